"""Gloo groups of our own: the ranks of a process group once more, with connections and an order of their own."""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from commopt.comm.meeting import Meeting
from commopt.comm.pipeline import CollectiveError, wait
from commopt.comm.watch import Roll

AT_EXIT = 2.0
"""Seconds that a process waits at its end for collectives in flight, which other ranks may never join."""
AT_END = 0.2
"""Seconds that the end of one group is waited for, so that its threads have gone."""

holders: weakref.WeakSet[Any] = weakref.WeakSet()
"""Holders of groups: a group ends, and its threads with it, when nothing holds it any more."""

ROW = 1 << 17, 4
"""Bytes of a piece of a row at least, and how many pieces that has at most: each costs some 0.3 ms, as much as these
bytes on a link of 3 Gbit/s."""
MESSAGE = 1 << 15, 8
"""The same of a message to one rank, as over slow links."""

_unfinished: list[tuple[Any, list[list[Any]]]] = []
"""Groups that nothing else holds, with their collectives in flight. A group's end waits for these, and would block."""


def _completed(works: Sequence[Any]) -> bool:
    return False not in [work.is_completed() for work in works]  # asked again and again while a rank waits


def _ended() -> list[Any]:
    """Takes the groups whose collectives have all completed out of the unfinished ones."""
    done = [entry for entry in _unfinished if all(map(_completed, entry[1]))]
    for entry in done:
        _unfinished.remove(entry)
    return [group for group, _ in done]


@atexit.register
def _let_go() -> None:
    """Ends the groups while Python still runs.

    If Python has begun to shut down, a thread that asks for it is ended, and inside C++ that ends the process with
    SIGABRT, after all its work. Two kinds of threads would ask: Gloo's, which frees the tensors of a collective after
    that is done, and one of ours in the end of a group, which waits for collectives in flight. So a group whose
    collectives are still in flight after ``AT_EXIT`` is never freed, nor are its tensors.
    """
    left = []
    for holder in list(holders):
        if isinstance(holder, GlooChannel):
            holder.end()
        else:
            left.append(holder.group)
            holder.group = None
    deadline = time.monotonic() + AT_EXIT
    left += _ended()
    while _unfinished and time.monotonic() < deadline:
        time.sleep(0.01)
        left += _ended()
    for entry in _unfinished:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(entry))

    def release() -> None:
        while left:
            left.pop()

    thread = threading.Thread(target=release, daemon=True)
    with suppress(RuntimeError):  # some versions of Python start no more threads here
        thread.start()
        before = len(left) + 1
        while thread.is_alive() and len(left) < before:  # however many there are: each has its time
            before = len(left)
            thread.join(AT_EXIT)


class GlooWork:
    """A collective of Gloo in flight, which knows who has not joined it.

    Args:
        inner: torch's works that it consists of; let go, with what they hold, where there was something to finish.
        meeting: where the ranks leave word for each other.
        channel, number: whose collective it is, and its number there.
        timeout: seconds that it may take.
        finish: puts what has come where it belongs.
    """

    def __init__(
        self,
        inner: list[Any],
        meeting: Meeting,
        channel: str,
        number: int,
        timeout: float,
        finish: Callable[[], object] | None = None,
    ) -> None:
        self.inner, self.meeting, self.channel, self.number, self.timeout = inner, meeting, channel, number, timeout
        self._finish = finish
        self._deadline = time.monotonic() + timeout

    def wait(self) -> None:
        for work in self.inner:
            work.wait()
        if self._finish is not None:
            self._finish()
            self._finish = None
            self.inner.clear()

    def is_completed(self) -> bool:
        return _completed(self.inner)

    def get_future(self) -> Any:
        """torch's future of the tensors, as DistributedDataParallel wants it; of what is one work."""
        (work,) = self.inner
        return work.get_future()

    def wait_for(self, seconds: float) -> bool:
        """Waits at most so long; whether ``wait()`` would return, or raise, at once."""
        end = time.monotonic() + seconds
        for work in self.inner:
            if not work.is_completed():
                with suppress(RuntimeError):  # its own, which wait() raises again, or that the time is over
                    work.wait(timedelta(seconds=max(end - time.monotonic(), 0.001)))
        return self.is_completed()

    def overdue(self) -> bool:
        return time.monotonic() >= self._deadline - 0.1 * self.timeout

    def tell(self, state: str, where: str) -> None:
        self.meeting.tell(state, where)

    def leave(self) -> None:
        self.meeting.leave()

    def absent(self, states: Sequence[str]) -> Roll:
        return self.meeting.absent(self.channel, self.number, states)


class GlooChannel:
    """Some ranks once more, over a raw Gloo group: other groups know nothing of it, nor it of them.

    Collectives that are in flight together take ten times as long in one Gloo group as in several.

    Of two ranks that exchange rows, Gloo has the one that comes first wait with its own until it has all of the
    other's: that starts to send at once, and says on the same connection, behind its row, that it is ready to receive.
    So large rows go in pieces, which are under way both ways at the same time.

    Args:
        store: where the ranks find each other; no other group uses it.
        meeting: where they leave word; of all channels of the same ranks.
        name: of the channel there.
        timeout: of each collective.
    """

    def __init__(self, store: dist.Store, meeting: Meeting, name: str, timeout: timedelta) -> None:
        self.rank, self.world_size = meeting.rank, len(meeting.ranks)
        self.group: Any = dist.ProcessGroupGloo(store, self.rank, self.world_size, timeout)
        self.meeting, self.name, self.timeout = meeting, name, timeout.total_seconds()
        self._in_flight: list[list[Any]] = []
        holders.add(self)

    def end(self) -> None:
        """Gives the group away; it ends when its collectives in flight have completed."""
        group, self.group = getattr(self, "group", None), None
        if group is not None:
            _unfinished.append((group, self._in_flight))

    def __del__(self) -> None:
        """Ends the group, and those before it whose collectives have completed meanwhile."""
        if getattr(self, "group", None) is None:  # as at the end of Python, when this module may be gone
            return
        self.end()
        last = _ended()
        if not last:
            return
        thread = threading.Thread(target=last.clear, daemon=True)
        with suppress(RuntimeError):
            thread.start()
            thread.join(AT_END)

    def _start(self, *inner: Any, finish: Callable[[], object] | None = None) -> GlooWork:
        works = list(inner)
        self._in_flight = [others for others in self._in_flight if not _completed(others)] + [works]
        return GlooWork(works, self.meeting, self.name, self.meeting.start(self.name), self.timeout, finish)

    def all_reduce(self, x: Tensor) -> GlooWork:
        x.div_(self.world_size)
        return self._start(self.group.allreduce([x]))

    def all_to_all(self, out: Tensor, inp: Tensor) -> GlooWork:
        return self._rows(out, inp.view(self.world_size, -1))

    def all_gather(self, out: Tensor, inp: Tensor) -> GlooWork:
        if inp.device.type != "cpu":  # Gloo exchanges rows on the CPU only
            return self._start(self.group.allgather([list(out.unbind(0))], [inp]))
        # the same bytes as Gloo's own, which takes more than twice as long
        return self._rows(out, inp.expand(self.world_size, -1))

    def _rows(self, out: Tensor, rows: Tensor) -> GlooWork:
        """An all-to-all of ``rows``, which need not be contiguous."""
        pieces = _pieces(rows, rows.shape[1], *ROW)
        if len(pieces) == 1:
            return self._start(self.group.alltoall_base(out, rows.contiguous(), [], []))
        works, parts = [], []
        for piece in pieces:
            sent = rows[:, piece].contiguous()
            parts.append(torch.empty_like(sent))
            works.append(self.group.alltoall_base(parts[-1], sent, [], []))
        whole = out.view(self.world_size, -1)
        return self._start(*works, finish=lambda: torch.cat(parts, 1, out=whole))

    def broadcast(self, x: Tensor, src: int = 0) -> GlooWork:
        return self._start(self.group.broadcast(x, src))

    def exchange(self, out: Tensor, inp: Tensor, dst: int, src: int) -> GlooWork:
        # Gloo's own messages between two ranks cannot be asked whether they are done, and one that is waited for in
        # vain breaks the group; this sends the others a header
        out, inp, works = out.view(-1), inp.view(-1), []
        for piece in _pieces(inp, inp.numel(), *MESSAGE):
            sizes = exchange_sizes(inp[piece].numel(), dst, src, self.world_size)
            works.append(self.group.alltoall_base(out[piece], inp[piece], *sizes))
        return self._start(*works)


def _pieces(x: Tensor, numel: int, nbytes: int, most: int) -> list[slice]:
    """The pieces in which rows of ``x`` of ``numel`` elements go, the same on all ranks: ``most`` at most, and of
    ``nbytes`` at least."""
    count = max(1, min(most, numel * x.element_size() // nbytes))
    step = max(1, -(-numel // count))
    return [slice(start, min(start + step, numel)) for start in range(0, numel, step)] or [slice(0, 0)]


def exchange_sizes(numel: int, dst: int, src: int, world_size: int) -> tuple[list[int], list[int]]:
    """The elements of each row, received and sent, of the exchange of rows that is one of a message of ``numel``."""
    received, sent = ([numel if rank == other else 0 for rank in range(world_size)] for other in (src, dst))
    return received, sent


def connect(store: dist.Store, meeting: Meeting, names: Sequence[str], timeout: timedelta) -> list[GlooChannel]:
    """A channel for each of ``names``; all ranks call this at the same point. They leave no keys in the store.

    Raises:
        CollectiveError: some rank could not be reached.
    """
    where = "opening connections between the ranks"
    try:
        channels = [GlooChannel(dist.PrefixStore(name, store), meeting, name, timeout) for name in names]
    except RuntimeError as error:
        raise CollectiveError(f"{where}: {error}") from error
    for channel in channels:
        wait(channel.all_reduce(torch.zeros(1, device="cpu")), where)
    if not lazy():
        for name in names:  # every rank has read the addresses; each takes back its own
            with suppress(RuntimeError):
                store.delete_key(f"{name}/0/{meeting.rank}")
    return channels


def lazy() -> bool:
    """True if torch was told to connect two ranks when they first talk: then addresses are needed later."""
    return os.environ.get("TORCH_GLOO_LAZY_INIT", "0").lower() in ("1", "y", "yes", "t", "true", "on")
