"""A connection to a store, every question over which is answered within a stated time, or raises.

The process that runs a store may be one that was killed, or has stopped: a question then waits for minutes, or for
ever. So questions are asked in a thread, which is not waited for longer than an answer may take.
"""

from __future__ import annotations

import atexit
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from commopt.comm.pipeline import CollectiveError

T = TypeVar("T")

AT_EXIT = 2.0
"""Seconds that a process waits at its end for threads of ours that are inside C++: an answer may be slow to come."""
_SLICE = 1.0
_ABSENT = "\0"
"""Value that nothing is set to. A store returns what was expected of a key that is not there."""
_Questions = queue.SimpleQueue[Any]


_inside: weakref.WeakSet[Future[Any]] = weakref.WeakSet()


def inside(call: Future[T]) -> Future[T]:
    """``call``, in a daemon thread of ours, for which the process waits at its end. One that comes back from C++ when
    Python has begun to shut down ends the process with SIGABRT, after all its work."""
    _inside.add(call)
    return call


@atexit.register
def _let_come_back() -> None:
    futures.wait(list(_inside), AT_EXIT)


class StoreLost(CollectiveError):
    """The store does not answer: the process that runs it may have gone, or stopped, or the network to it is cut."""


class StoreAnother(StoreLost):
    """A store begun anew has answered, which knows nothing of what was there."""


class StoreClient:
    """A store, asked over a connection of its own (before torch 2.8 there is none such: then over the one given).

    Args:
        store: any store of torch.distributed.
        answer: seconds within which it has to answer.
    """

    def __init__(self, store: dist.Store, answer: float) -> None:
        self.store, self.answer = store, answer
        self._questions: _Questions | None = None
        self._lock = threading.Lock()

    def __del__(self) -> None:
        if getattr(self, "_questions", None) is not None:
            self._questions.put(None)  # type: ignore[union-attr]

    def ask(self, question: Callable[[Any], T], seconds: float = 0.0) -> T:
        """The answer to ``question(store)``, which itself may take so many ``seconds``.

        Raises:
            StoreLost: there is none.
        """
        answer: Future[T] = inside(Future())
        questions = self._put((question, answer))
        slices = max(1, math.ceil((seconds + self.answer) / _SLICE))
        part = (seconds + self.answer) / slices
        # a process that was stopped for long has lost one of them, and no more
        if not any(futures.wait([answer], part).done for _ in range(slices)):
            self._forget(questions)
            raise StoreLost(f"the store of the members cannot be reached: no answer within {seconds + self.answer:g} s")
        try:
            return answer.result()
        except (RuntimeError, TimeoutError) as error:
            self._forget(questions)
            raise StoreLost(f"the store of the members cannot be reached: {error}") from error

    def _put(self, entry: Any) -> _Questions:
        """Puts a question into the queue of the thread that answers, and returns that."""
        with self._lock:
            if self._questions is None:
                self._questions = queue.SimpleQueue()
                threading.Thread(target=_answer, args=(self.store, self._questions), daemon=True).start()
            self._questions.put(entry)
            return self._questions

    def _forget(self, questions: _Questions) -> None:
        """Lets the next question go over a new connection than those in ``questions``."""
        with self._lock:
            if self._questions is questions:
                questions.put(None)
                self._questions = None

    def get(self, key: str) -> str | None:
        """The value under ``key``; None if there is none."""
        return self.ask(lambda store: _read(store, key))

    def get_all(self, keys: Iterable[str]) -> dict[str, str]:
        """The values under those of ``keys`` that have one."""
        wanted = list(keys)
        found = self.ask(lambda store: [(key, _read(store, key)) for key in wanted])
        return {key: value for key, value in found if value is not None}

    def set(self, key: str, value: str) -> None:
        self.ask(lambda store: store.set(key, value))

    def add(self, key: str, amount: int) -> int:
        """Adds to a number, from 0, and returns it."""
        return int(self.ask(lambda store: store.add(key, amount)))

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        """Sets ``key`` to ``desired`` if it is ``expected`` ("": if it is not there), at once. Returns what it is."""
        return self.ask(lambda store: store.compare_set(key, expected, desired)).decode()

    def wait(self, key: str, seconds: float) -> bool:
        """Waits at most so long until something is under ``key``; whether there is."""

        def come(store: Any) -> bool:
            with suppress(RuntimeError):  # that the time is over; if the store has gone, check() says so
                store.wait([key], timedelta(seconds=max(seconds, 0.001)))
            return bool(store.check([key]))

        return self.ask(come, seconds)

    def delete(self, keys: Iterable[str]) -> None:
        """Takes keys away that are there."""
        wanted = list(keys)

        def take(store: Any) -> None:
            with suppress(NotImplementedError):
                for key in wanted:
                    store.delete_key(key)

        self.ask(take)


def _read(store: Any, key: str) -> str | None:
    """The value under ``key``, in one question: between check() and get() another rank may take it away, and get() then
    waits for it, or gives nothing as a value."""
    found = str(store.compare_set(key, _ABSENT, _ABSENT).decode())
    return None if found == _ABSENT else found


def _answer(store: Any, questions: _Questions) -> None:
    """Answers ``questions`` until there comes None."""
    own = store
    with suppress(AttributeError, RuntimeError):  # a store that is lost says so when it is asked
        own = store.clone()
    while (entry := questions.get()) is not None:
        question, answer = entry
        try:
            answer.set_result(question(own))
        except BaseException as error:
            answer.set_exception(error)
        del entry, question, answer


def until(seconds: float) -> Callable[[], float]:
    """A function that says how many of so many seconds from now are left; never below 0."""
    end = time.monotonic() + seconds
    return lambda: max(0.0, end - time.monotonic())
