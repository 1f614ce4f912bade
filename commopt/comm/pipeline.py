"""Pipeline: runs generators that yield collectives in flight, and decides who waits, and when.

All ways give the same results. Ranks start the same collectives in the same order, because what happens depends only
on the order of the tasks, never on what has arrived.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from commopt.comm.backend import Backend, Done, Work
from commopt.comm.watch import Watch, blame, is_soon_done

Task = Iterator[Work]

NAP, PATIENCE, LONGEST = 5e-5, 1 / 32, 5e-3
"""Seconds between two looks at collectives in flight, when there is nothing else to do: at first, as a part of those
waited, and at most. Looking takes time from whoever computes on the same core."""

STARTED: Work = Done()
"""A barrier for tasks that may always go on: what they yield when they have started all that they start, so that the
next ones may start theirs."""


ASIDES = re.compile(r"\[/\S*\] ?|\.? This is typically caused by a remote worker.*?GLHF!( [^\w\s:]+)?")
"""Text that torch adds to an error of Gloo's: the place in its sources, and advice."""


class CollectiveError(RuntimeError):
    """A collective failed or never completed; the message says which, in one line. The ranks are no longer in step.

    Attributes:
        calls_differ: whether no rank is missing, but they are in different calls.
    """

    def __init__(self, message: str, calls_differ: bool = False) -> None:
        super().__init__(ASIDES.sub("", " ".join(message.split())))
        self.calls_differ = calls_differ


def wait(work: Work, where: str) -> None:
    """Waits for ``work``. Says now and then for whom, if that is known and takes long (:mod:`commopt.comm.watch`).

    Raises:
        CollectiveError: it failed, or timed out; the message begins with ``where``, and continues with who is missing.
    """
    try:
        if not is_soon_done(work):
            with Watch(work, where) as watch:
                watch.wait()
        work.wait()
    except (RuntimeError, TimeoutError) as error:
        why = blame(work, where)
        raise CollectiveError(f"{where}: {why.text}{error}", why.calls_differ) from error


def gather_rows(backend: Backend, row: Tensor, where: str) -> Tensor:
    """The ``row`` of every rank, (W, n), one below the other; waits for it, and ``where`` begins errors."""
    table = row.new_empty(backend.world_size, row.numel())
    wait(backend.all_gather(table, row), where)
    return table


@dataclass
class _Running:
    task: Task
    where: str
    work: Work
    number: int


class Pipeline:
    """Tasks that run in turn: while one waits for the network, the others compute.

    ``start()`` starts a task, up to its first collective; ``finish()`` runs all tasks to their end. In between,
    ``progress()`` takes tasks that were launched as ``early`` on to ``barrier``, in launch order, as far as what they
    wait for is done: it never waits. That is how a pipeline is driven while something else computes, and then what
    tasks start after their launch must go over channels of its own (:func:`commopt.comm.open_channels`), because when
    that is differs from rank to rank. After the barrier they start no more.

    Args:
        barrier: work on which tasks may be stopped for good. Its errors are passed on as they are.
        last: work that is waited for when all tasks that yield it have come to it, and no other is left; so are its
            errors.
    """

    def __init__(self, barrier: Work | None = None, last: Work | None = None) -> None:
        self.barrier, self.last = barrier, last
        self._held: list[_Running] = []
        self._early: deque[_Running] = deque()
        self._later: deque[_Running] = deque()
        self._started = 0

    def start(self, task: Task, where: str = "a collective", early: bool = False) -> None:
        """Starts ``task``; ``where`` says in an error what it was about."""
        self._started += 1
        self._advance(task, where, self._started, self._early if early else self._later)

    def progress(self) -> bool:
        """Takes the oldest early tasks on to the barrier, as far as what they wait for is done; whether any moved."""
        moved = False
        while self._early and self._early[0].work.is_completed():
            self._resume_first()
            moved = True
        return moved

    def run_until(self, done: Callable[[], bool]) -> None:
        """Takes early tasks on, in launch order, until ``done()``; waits for what they wait for."""
        while not done():
            self._resume_first()

    def reach(self, work: Work, under_way: Work, where: str) -> None:
        """Takes early tasks on until ``work`` is done, or has failed, or there are none: its own ``wait()`` comes next.
        Says who is missing in ``under_way``, the collective that it waits for, and ``where``."""
        done, since = False, time.monotonic()
        with Watch(under_way, where) as watch:
            while not done and self._early:
                done = work.is_completed()  # looked at first: of two that time out, the earlier one is reported
                if self.progress():
                    since = time.monotonic()
                elif not done:
                    watch.look()
                    _nap(since)

    def finish(self) -> None:
        """Runs every task to its end."""
        while self._early or self._later:
            self._step()
        if self._held and self.last is not None:
            self.last.wait()
            # in the order of their start: what they exchange now, if anything, has one order on every rank
            held, self._held = sorted(self._held, key=lambda running: running.number), []
            for running in held:
                self._advance(running.task, running.where, running.number, self._later)
            self.finish()

    def stop(self) -> None:
        """Runs every task to where it yields ``barrier``, so that all ranks have started the same collectives, and
        closes it there."""
        while self._early:
            self._resume_first()
        while self._later:
            running = self._later.popleft()
            if running.work is self.barrier:
                running.task.close()  # type: ignore[attr-defined]
            else:
                self._resume(running, self._later)

    def abandon(self) -> None:
        """Closes every task where it is: a collective has failed, and the ranks are no longer in step."""
        self._early.clear()
        self._later.clear()
        self._held.clear()

    def _step(self) -> None:
        """Resumes one task: an early one if its time has come, else the oldest of the others whose has."""
        if not self._early:
            self._resume(self._later.popleft(), self._later)
            return
        since = time.monotonic()
        with Watch(self._early[0].work, self._early[0].where) as watch:
            while True:
                ready = next((r for r in self._later if r.work.is_completed()), None)
                if self.progress():
                    return
                if ready is not None:
                    self._later.remove(ready)
                    break
                watch.look()
                _nap(since)
        self._resume(ready, self._later)

    def _resume_first(self) -> None:
        """Resumes the first early task, which stays the first until it has come to the barrier."""
        waiting = len(self._early)
        self._resume(self._early.popleft(), self._early)
        if len(self._early) == waiting:
            self._early.rotate(1)

    def _resume(self, running: _Running, to: deque[_Running]) -> None:
        if running.work is self.barrier:
            running.work.wait()
        else:
            wait(running.work, running.where)
        self._advance(running.task, running.where, running.number, to)

    def _advance(self, task: Task, where: str, number: int, to: deque[_Running]) -> None:
        work = next(task, None)
        if work is not None:
            running = _Running(task, where, work, number)
            if work is self.last:
                self._held.append(running)
            else:
                (self._later if work is self.barrier else to).append(running)


def _nap(since: float) -> None:
    """Sleeps until the next look of a wait that began at ``since``, by ``time.monotonic()``."""
    time.sleep(min(max(NAP, PATIENCE * (time.monotonic() - since)), LONGEST))


def run(tasks: Iterable[Task]) -> None:
    """One task after another; each collective is waited for at once. Least memory."""
    for task in tasks:
        for work in task:
            wait(work, "a collective")
