"""Who waits, and when: runs generators that yield collectives in flight.

All ways give the same results. Ranks start the same collectives in the same order, because what happens depends only
on the order of the tasks, never on what has arrived.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from commopt.comm.backend import Work

Task = Iterator[Work]


class CollectiveError(RuntimeError):
    """A collective failed or never completed; the message says which, and the ranks are no longer in step."""


def wait(work: Work, where: str) -> None:
    """Waits for ``work``.

    Raises:
        CollectiveError: it failed, or timed out; the message begins with ``where``.
    """
    try:
        work.wait()
    except CollectiveError:
        raise
    except (RuntimeError, TimeoutError) as error:
        raise CollectiveError(f"{where}: {error}") from error


@dataclass
class _Running:
    task: Task
    where: str
    work: Work


class Pipeline:
    """Tasks that run in turn: while one waits for the network, the others compute.

    ``launch()`` starts a task, up to its first collective, when its input is there; ``finish()`` runs all to their
    end. In between, launches also take tasks that were launched as ``early`` to their second collective, all but the
    last ``ahead`` of them, so that the network has that to do as well.
    """

    def __init__(self, ahead: int = 2) -> None:
        self.ahead = ahead
        self._first: deque[_Running] = deque()
        self._later: deque[_Running] = deque()

    def launch(self, task: Task, where: str = "a collective", early: bool = False) -> None:
        """Starts ``task``; ``where`` says in an error what it was about."""
        self._advance(task, where, self._first if early else self._later)
        if len(self._first) > self.ahead:
            self._resume(self._first.popleft())

    def finish(self) -> None:
        """Runs every task to its end."""
        self._later.extend(self._first)
        self._first.clear()
        while self._later:
            self._resume(self._later.popleft())

    def drain(self, barrier: Work) -> None:
        """Closes all tasks where they are, and waits for what is in flight, ``barrier`` excepted."""
        running = [*self._later, *self._first]
        self._later.clear()
        self._first.clear()
        for each in running:
            each.task.close()  # type: ignore[attr-defined]
            if each.work is not barrier:
                wait(each.work, each.where)

    def _resume(self, running: _Running) -> None:
        wait(running.work, running.where)
        self._advance(running.task, running.where, self._later)

    def _advance(self, task: Task, where: str, to: deque[_Running]) -> None:
        work = next(task, None)
        if work is not None:
            to.append(_Running(task, where, work))


def run(tasks: Iterable[Task]) -> None:
    """One task after another; each collective is waited for at once. Least memory."""
    for task in tasks:
        for work in task:
            wait(work, "a collective")


def run_interleaved(tasks: Iterable[Task]) -> None:
    """All tasks in turn, each started in list order."""
    pipeline = Pipeline()
    for task in tasks:
        pipeline.launch(task)
    pipeline.finish()
