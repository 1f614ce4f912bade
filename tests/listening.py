"""What commopt logs, as lines."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


class _Lines(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())


@contextlib.contextmanager
def listening() -> Iterator[list[str]]:
    """Context with the list of all that is logged in it."""
    lines: list[str] = []
    handler, logger = _Lines(lines), logging.getLogger("commopt")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
