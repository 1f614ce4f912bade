"""Who waits, and when: runs generators that yield collectives in flight.

Both ways give the same results; ranks start the same collectives in the same order because both are deterministic.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from commopt.comm.backend import Work


def run(tasks: Iterable[Iterator[Work]]) -> None:
    """One task after another; each collective is waited for at once. Least memory."""
    for task in tasks:
        for work in task:
            work.wait()


def run_interleaved(tasks: Iterable[Iterator[Work]]) -> None:
    """All tasks in turn: while one waits for the network, the others compute. Each is started in list order."""
    in_flight: deque[tuple[Iterator[Work], Work]] = deque()

    def advance(task: Iterator[Work]) -> None:
        work = next(task, None)
        if work is not None:
            in_flight.append((task, work))

    for task in tasks:
        advance(task)
    while in_flight:
        task, work = in_flight.popleft()
        work.wait()
        advance(task)
