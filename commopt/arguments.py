"""Command lines by argparse, whose mistakes are one line: the option that is not there is named first, with the nearest
that is."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises in place of exiting.

    Args:
        mistake: the error that it raises, of one line.
        others: arguments of ArgumentParser.
    """

    def __init__(self, mistake: type[Exception], **others: Any) -> None:
        super().__init__(allow_abbrev=False, **others)
        self.mistake = mistake

    def error(self, message: str) -> NoReturn:
        raise self.mistake(message.removeprefix("argument "))

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """The options in ``argv``. Raises :attr:`mistake`."""
        known = [flag for flag in self._option_string_actions if flag.startswith("--")]
        for word in argv:
            flag = word.partition("=")[0]
            if flag.startswith("--") and flag not in ("--", *known):
                close = difflib.get_close_matches(flag, known, n=1)
                hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(sorted(known))}"
                self.error(f"{flag}: there is no such option; {hint}")
        return self.parse_args(argv)
