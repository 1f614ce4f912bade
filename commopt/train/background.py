"""Work in a thread of its own, while the main thread stays with the other ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from commopt.train.stop import Stopped

T = TypeVar("T")
GRACE = 2.0
"""Seconds that work which was called off has to clear up; after that the process ends without it."""


class Background(Generic[T]):
    """Starts ``work``, which gets a function to call now and then: it raises Stopped once the work is called off."""

    def __init__(self, work: Callable[[Callable[[], None]], T]) -> None:
        self._called_off = threading.Event()
        self._results: list[T] = []
        self._errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Waits for at most that time; true if it is done."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def cancel(self) -> None:
        """Call it off."""
        self._called_off.set()
        self._thread.join(GRACE)

    def result(self) -> T:
        """Result of the call; raises what that raised."""
        if self._errors:
            raise self._errors[0]
        return self._results[0]

    def _run(self, work: Callable[[Callable[[], None]], T]) -> None:
        try:
            self._results.append(work(self._heed))
        except BaseException as error:
            self._errors.append(error)

    def _heed(self) -> None:
        if self._called_off.is_set():
            raise Stopped("called off")
