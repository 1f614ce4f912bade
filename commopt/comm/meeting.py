"""Search for the rank that is missing: a rank that waits long tells how many collectives it has started.

A rank that has not told, or has stopped repeating it, is missing. Over torch.distributed they leave word in the store
of the process group. It is asked over a connection of its own, in a thread that is not waited for longer than that may
take: the process that runs the store may be the one that has stopped.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from commopt.comm import watch
from commopt.comm.store import inside
from commopt.comm.watch import Roll

T = TypeVar("T")


class Meeting:
    """Words of the ranks of a backend, and of all its channels, on where they are. A subclass says how they are
    reached.

    Args:
        rank, ranks: this rank among them, and the numbers in the world of all of them.

    Attributes:
        started: how many collectives this rank has started, by channel.
    """

    silence = "the other ranks cannot be asked"
    """Reason why nothing is known of the others, where they cannot be reached."""

    def __init__(self, rank: int, ranks: Sequence[int]) -> None:
        self.rank, self.ranks = rank, list(ranks)
        self.started: dict[str, int] = {}
        self._told = 0
        self._where = ""
        self._heard: dict[int, tuple[str, float]] = {}

    def send(self, word: str) -> None:
        """Lets the others have ``word``."""
        raise NotImplementedError

    def hear(self) -> dict[int, str] | None:
        """The last word of each other rank that has left one; None where they cannot be reached."""
        raise NotImplementedError

    def take_back(self) -> None:
        """Withdraws this rank's word."""

    def start(self, channel: str) -> int:
        """The number of a collective that starts on ``channel``."""
        number = self.started.get(channel, 0)
        self.started[channel] = number + 1
        return number

    def tell(self, state: str, where: str) -> None:
        """Tells the others what this rank has started, ``where`` it waits, and how it stands there."""
        self._told += 1
        self._where = where
        self.send(json.dumps({"told": self._told, "state": state, "where": where, "started": self.started}))

    def leave(self) -> None:
        """The wait is over."""
        self._heard.clear()
        self.take_back()

    def absent(self, channel: str, number: int, states: Sequence[str]) -> Roll:
        """Ranks that have not started collective ``number`` of ``channel``, or do not say that they are in one of
        ``states``; of those that have not, and say so, none beside others: they wait in an earlier collective."""
        others = [r for r in range(len(self.ranks)) if r != self.rank]
        words = self.hear()
        if words is None:
            return Roll(unknown=self.silence)
        absent, behind, elsewhere, late, now = [], [], {}, False, time.monotonic()
        for r in others:
            word: dict[str, Any] = json.loads(words[r]) if r in words else {"state": "", "started": {}}
            if self._heard.get(r, ("",))[0] != words.get(r):
                self._heard[r] = (words.get(r, ""), now)
            fresh = word["state"] != "waits" or now - self._heard[r][1] < 0.85 * watch.first_notice()
            here = word["started"].get(channel, 0) > number
            late = late or (here and word["state"] == "late")
            if not (word["state"] in states and fresh):
                absent.append(r)
            elif not here:
                behind.append(r)
            elif not watch.is_same_call(word["where"], self._where):
                elsewhere[self.ranks[r]] = watch.call_of(word["where"])
        absent = absent or behind
        first = all(r > self.rank or r in absent for r in others)
        return Roll(sorted(self.ranks[r] for r in absent), first, late, elsewhere=elsewhere)


class StoreMeeting(Meeting):
    """Over a store.

    Args:
        store: the keys under its prefix are ours.
        rank, ranks: as of :class:`Meeting`.
    """

    silence = (
        "the store of the process group cannot be reached: the rank that runs it may have gone, or the network to it "
        "is slow"
    )

    def __init__(self, store: dist.Store, rank: int, ranks: Sequence[int]) -> None:
        super().__init__(rank, ranks)
        self._store = store
        self._own: Any = None  # a connection of our own, once there is something to say
        self._asking: Future[Any] | None = None

    def send(self, word: str) -> None:
        self._ask(lambda store: store.set(str(self.rank), word))

    def take_back(self) -> None:
        self._ask(lambda store: store.delete_key(str(self.rank)))

    def hear(self) -> dict[int, str] | None:
        others = [r for r in range(len(self.ranks)) if r != self.rank]

        def words(store: Any) -> dict[int, str]:
            left = {r: store.get(str(r)).decode() for r in others if store.check([str(r)])}
            return {r: word for r, word in left.items() if word}  # "" of a store: taken back in this very moment

        return self._ask(words)

    def _ask(self, question: Callable[[Any], T]) -> T | None:
        """Answer of the store; None if it does not."""
        if self._asking is not None and not self._asking.done():
            return None
        answer: Future[T | None] = inside(Future())

        def ask() -> None:
            found = None
            with suppress(Exception):  # of whatever store there is: without an answer the caller says so
                if self._own is None:
                    self._own = _connection_of_its_own(self._store)
                found = question(self._own)
            answer.set_result(found)

        self._asking = answer
        threading.Thread(target=ask, daemon=True).start()
        return answer.result() if futures.wait([answer], watch.LOOK).done else None


def _connection_of_its_own(store: dist.Store) -> Any:
    """``store`` over another connection, where it can have one (before torch 2.8 it cannot)."""
    try:
        own: dist.Store = store.clone()  # type: ignore[attr-defined]
        own.set_timeout(timedelta(seconds=watch.LOOK))  # a word that is taken back is not waited for
        return own
    except (AttributeError, RuntimeError):
        return store
