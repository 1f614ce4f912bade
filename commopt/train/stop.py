"""SIGINT and SIGTERM as a wish to stop after the current step; a second one ends the process at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
ECHO = 1.0
"""Seconds in which further signals count as the first: launchers and terminals often deliver one wish several times."""


class Stopped(Exception):
    """All ranks end because a signal came before there was anything to save."""


class StopSignal:
    """Context in which the first signal sets ``requested``. Outside the main thread it changes nothing."""

    def __init__(self) -> None:
        self.requested = False
        self.since = 0.0
        """Time at which it came, by ``time.monotonic()``."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._receive) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.requested:
            self.requested, self.since = True, now
        elif now - self.since > ECHO:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
