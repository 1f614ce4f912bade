"""Residual and factors of a bucket of matrices: see :mod:`commopt.gradients.low_rank`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from commopt import ops
from commopt.gradients.method import Brought
from commopt.state.state_bucket import StateBucket


@dataclass(frozen=True)
class Factors:
    """A matrix of a bucket, and its factors, the same on all ranks.

    Attributes:
        index: of the parameter in the bucket.
        start: of its elements in a flat buffer.
        p, q: (n, r) and (m, r).
        turn: how many means of it were taken.
    """

    index: int
    start: int
    p: Tensor
    q: Tensor
    turn: int = 0

    def matrix(self, flat: Tensor) -> Tensor:
        """Its elements in a flat buffer, (n, m), a view."""
        n, m = self.p.shape[0], self.q.shape[0]
        return flat[self.start : self.start + n * m].view(n, m)

    def loaded(self, entry: Mapping[str, Any]) -> Factors:
        """With the factors that were saved. Raises ValueError for those of another matrix, or of another rank."""
        p, q = entry["p"].to(self.p), entry["q"].to(self.q)
        if (p.shape, q.shape) != (self.p.shape, self.q.shape):
            raise ValueError(
                f"the loaded factors are {tuple(p.shape)} and {tuple(q.shape)}, here they are {tuple(self.p.shape)} "
                f"and {tuple(self.q.shape)}: they are of another model, or of another rank"
            )
        return replace(self, p=p.clone(), q=q.clone(), turn=int(entry["turn"]))


@dataclass
class Exact:
    """Neighbouring parameters of a bucket that are sent in full.

    Attributes:
        start, stop: in a flat buffer.
        params: of each the index in the bucket, and where it starts here.
    """

    start: int
    stop: int
    params: list[tuple[int, int]]


@dataclass
class LowRankState:
    """State of a bucket.

    Attributes:
        matrices: those that are sent as factors.
        exact: all others.
        error: (padded,), the residual of this rank; None without feedback.
        spare: (padded,), where the next error is made.
        loaded: indices of parameters that are sent in full, whose residual was loaded.
    """

    matrices: list[Factors]
    exact: list[Exact]
    error: Tensor | None
    spare: Tensor
    loaded: set[int] = field(default_factory=set)

    def errors(self, bucket: StateBucket) -> Iterator[tuple[int, Tensor]]:
        """Residuals, by the index of a parameter, as views: of matrices, and of what is sent in full with the next
        mean, where that was loaded."""
        if self.error is not None:
            indices = sorted({factors.index for factors in self.matrices} | self.loaded)
            yield from zip(indices, bucket.views(self.error, indices))

    def plus_error(self, brought: Brought) -> Tensor:
        """``spare``, with the gradients plus the residual."""
        before = self.spare.zero_() if self.error is None else self.error
        ops.momentum(before, [g for g, _ in brought], [start for _, start in brought], 1.0, 1.0, self.spare)
        return self.spare
