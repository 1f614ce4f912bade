"""Rounds whose ranks come and go, on plain lists of Python floats, all ranks of a run at once.

    end of a round, with those present that count:  D = sum_i w_i (x - x_i) / sum_i w_i;   x <- outer step along D
    x_i <- x for those present; who is absent is gone, with its state
    join:  x_j <- x; its base is empty, or a copy of a member's, or what it had

Shares no code with commopt.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping

from oracle_outer import Local, OuterOracle


class MembersOracle:
    """
    Args:
        method, base, h: as of :class:`OuterOracle`.
        x: initial parameters.
        names: of the ranks that begin.
    """

    def __init__(self, method: str, x: list[float], names: Iterable[int], base: str, h: dict[str, float]) -> None:
        self.outer, self.base = OuterOracle(method, x, 1, 1, base, h), base
        self.x = {name: list(x) for name in names}
        self.bases = {name: Local(base, len(x)) for name in self.x}
        self.lrs: list[float] = []

    def step(self, grads: Mapping[int, list[float]], lr: float) -> None:
        for name, grad in grads.items():
            self.bases[name].step(self.x[name], grad, lr)
        self.lrs.append(lr)

    def end(self, present: Iterable[int], weights: Mapping[int, float], mad: Iterable[int] = ()) -> None:
        present = list(present)
        count = [name for name in present if name not in mad]
        total = sum(weights[name] for name in count)
        anchor = self.outer.anchor
        d = [sum(weights[n] * (a - self.x[n][j]) for n in count) / total for j, a in enumerate(anchor)]
        self.outer._outer(d, sum(self.lrs) / len(self.lrs))
        self.lrs = []
        self.x = {name: list(self.outer.anchor) for name in present}
        self.bases = {name: self.bases[name] for name in present}

    def join(self, name: int, donor: int | None) -> None:
        self.x[name] = list(self.outer.anchor)
        self.bases[name] = (
            Local(self.base, len(self.outer.anchor)) if donor is None else copy.deepcopy(self.bases[donor])
        )
