"""The mean of a bucket by factors of low rank. A_i is the gradient of rank i, as a matrix, plus what it owes:

    PowerSGD    P_i = A_i Q;  P = orth(mean P_i);  Q_i = A_i' P;  Q = mean Q_i;  mean of gradients ~ P Q'
    ACP, even   Q <- orth(Q);  P_i = A_i Q;   P = mean P_i;                      mean of gradients ~ P Q'
    ACP, odd    P <- orth(P);  Q_i = A_i' P;  Q = mean Q_i;                      mean of gradients ~ P Q'

    what rank i owes <- A_i - P_i Q'   (ACP, odd, and PowerSGD: A_i - P Q_i')

(arXiv 1905.13727 and 2306.08881.) What a rank owes is what its own factors have missed, and not what the mean has: the
mean over the ranks is the same, but a rank's own does not grow without bound. torch's hook takes the other. A matrix of
zeros leaves the factors as they are. What is no matrix, or too small, is in the same message, in full.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from commopt.bucket import ROW_MULTIPLE
from commopt.comm import Channel, Work, mean_over_all
from commopt.compress import PowerSGD
from commopt.compress.low_rank import LowRank
from commopt.gradients.method import Brought, Received, packed
from commopt.optim.masks import absent_runs
from commopt.optim.own import MIXED, Origin
from commopt.optim.saving import Entries
from commopt.optim.state import MERGED
from commopt.optim.state_bucket import StateBucket


@dataclass(frozen=True)
class Factors:
    """A matrix of a bucket, and its factors, the same on all ranks.

    Attributes:
        index: of the parameter in the bucket.
        start: of its elements in a flat buffer.
        p, q: (n, r) and (m, r).
    """

    index: int
    start: int
    p: Tensor
    q: Tensor

    def matrix(self, flat: Tensor) -> Tensor:
        """Its elements in a flat buffer, (n, m), a view."""
        n, m = self.p.shape[0], self.q.shape[0]
        return flat[self.start : self.start + n * m].view(n, m)


@dataclass
class Owed:
    """State of a bucket.

    Attributes:
        matrices: those that are sent as factors.
        whole: [start, stop) of all other elements in a flat buffer.
        error: (padded,), what this rank owes; None without feedback.
        turn: how many means were taken.
    """

    matrices: list[Factors]
    whole: list[tuple[int, int]]
    error: Tensor | None
    turn: int = 0


class Thin:
    """Means by factors.

    Args:
        spec: the rank, and whether one factor or both are sent in a step.
        feedback: whether what is lost is kept, and sent later.
    """

    def __init__(self, spec: LowRank, feedback: bool) -> None:
        self.spec, self.feedback = spec, feedback
        self._of: dict[int, Owed] = {}
        self._made = 0

    def prepare(self, bucket: StateBucket, capacity: int) -> None:
        matrices, whole = [], []
        for i, (start, shape) in enumerate(zip(bucket.offsets, bucket.shapes)):
            thin = self.spec.factors_of(shape)
            if thin is None:
                whole.append((start, start + shape.numel()))
                continue
            n, m, r = thin
            draw = torch.Generator().manual_seed(self.spec.seed * 1_000_003 + self._made)
            self._made += 1
            p, q = (torch.randn(k, r, generator=draw, dtype=torch.float64) for k in (n, m))
            matrices.append(Factors(i, start, p.to(bucket.device, bucket.dtype), q.to(bucket.device, bucket.dtype)))
        self._of[id(bucket)] = Owed(matrices, whole, bucket.zeros() if self.feedback else None)

    def mean(
        self, bucket: StateBucket, brought: Brought, absent: Sequence[int], send: Channel, reply: Channel
    ) -> Generator[Work, None, Received]:
        owed = self._of[id(bucket)]
        a = packed(bucket, brought)
        if owed.error is not None:
            a.add_(owed.error)
        runs = absent_runs(bucket, absent)
        for start, stop in runs:
            a[start:stop] = 0
        exact = [a[start:stop].clone() for start, stop in owed.whole]
        take = _power if isinstance(self.spec, PowerSGD) else _alternating
        new, later, sound = yield from take(owed, a, exact, bucket, send, reply)
        for start, stop in owed.whole:
            a[start:stop] = 0

        def values() -> Tensor:
            mean = bucket.zeros()
            for factors in new:
                torch.mm(factors.p, factors.q.t(), out=factors.matrix(mean))
            for (start, stop), value in zip(owed.whole, exact):
                mean[start:stop] = value
            return mean

        def commit() -> None:
            owed.turn += 1
            owed.matrices = [old if old.index in absent else kept for old, kept in zip(owed.matrices, later)]
            if owed.error is not None:
                for start, stop in runs:
                    a[start:stop] = owed.error[start:stop]
                owed.error = a

        return Received(bucket, sound, values, commit)

    # state ------------------------------------------------------------------------------------------------------------

    def own(self, buckets: Sequence[StateBucket], params: Sequence[Tensor]) -> dict[int, dict[str, Tensor]]:
        number, out = {id(p): i for i, p in enumerate(params)}, {}
        for bucket in buckets:
            error = self._of[id(bucket)].error
            for factors in self._of[id(bucket)].matrices if error is not None else ():
                assert error is not None
                mine = factors.matrix(error).clone()
                out[number[id(bucket.params[factors.index])]] = {
                    "worker_error": mine.flatten(), "server_error": mine.new_zeros(0),
                }  # fmt: skip
        return out

    def common(self, buckets: Sequence[StateBucket], params: Sequence[Tensor]) -> dict[int, dict[str, Any]]:
        number, out = {id(p): i for i, p in enumerate(params)}, {}
        for bucket in buckets:
            owed = self._of[id(bucket)]
            for factors in owed.matrices:
                state: dict[str, Any] = {"p": factors.p.clone(), "q": factors.q.clone(), "turn": owed.turn}
                out[number[id(bucket.params[factors.index])]] = state
        return out

    def load(
        self,
        buckets: Sequence[StateBucket],
        entries: Entries,
        origin: Origin | None,
        here: Origin,
        fold: Callable[[Tensor, Tensor], None],
    ) -> bool:
        known = origin is not None and origin[0] != MIXED and (origin[0] == MERGED or origin[:2] == here[:2])
        left_out = False
        for bucket in buckets:
            owed = self._of[id(bucket)]
            for k, factors in enumerate(owed.matrices):
                entry = entries.get(bucket.params[factors.index], {})
                if "p" in entry:
                    owed.matrices[k] = self._loaded(factors, entry)
                    owed.turn = int(entry["turn"])
                error = entry.get("worker_error")
                if error is None or owed.error is None:
                    continue
                if bucket.replicas.nodes == 1 and known:
                    fold(bucket.params[factors.index], error.to(bucket.device).view(bucket.shapes[factors.index]))
                elif known:
                    factors.matrix(owed.error).copy_(error.view(factors.p.shape[0], -1))
                else:
                    left_out = left_out or bool(error.any())
        return left_out

    def _loaded(self, factors: Factors, entry: dict[str, Any]) -> Factors:
        p, q = entry["p"].to(factors.p), entry["q"].to(factors.q)
        if (p.shape, q.shape) != (factors.p.shape, factors.q.shape):
            raise ValueError(
                f"the loaded factors are {tuple(p.shape)} and {tuple(q.shape)}, here they are {tuple(factors.p.shape)} "
                f"and {tuple(factors.q.shape)}: they are of another model, or of another rank"
            )
        return replace(factors, p=p.clone(), q=q.clone())


Taken = tuple[list[Factors], list[Factors], Tensor]
"""Factors of the means, those to go on with, and whether they are finite."""


def _power(
    owed: Owed, a: Tensor, exact: list[Tensor], bucket: StateBucket, send: Channel, reply: Channel
) -> Generator[Work, None, Taken]:
    """PowerSGD: takes the means, of ``exact`` too, in place; ``a`` becomes what is lost."""
    of_a = [f.matrix(a) for f in owed.matrices]
    ps, sound = yield from _mean_of([x @ f.q for x, f in zip(of_a, owed.matrices)], exact, bucket, send, reply)
    ps = [_orthonormal(p) for p in ps]
    mine = [x.t() @ p for x, p in zip(of_a, ps)]
    for x, p, q in zip(of_a, ps, mine):
        x.addmm_(p, q.t(), alpha=-1)
    qs, also = yield from _mean_of(mine, [], bucket, reply, reply)
    new = [replace(f, p=p, q=q) for f, p, q in zip(owed.matrices, ps, qs)]
    return new, [replace(f, q=_unless_zero(f.q, old.q)) for f, old in zip(new, owed.matrices)], sound & also


def _alternating(
    owed: Owed, a: Tensor, exact: list[Tensor], bucket: StateBucket, send: Channel, reply: Channel
) -> Generator[Work, None, Taken]:
    """ACP: as :func:`_power`, one factor in a turn."""
    of_a, even = [f.matrix(a) for f in owed.matrices], owed.turn % 2 == 0
    bases = [_orthonormal(f.q if even else f.p) for f in owed.matrices]
    mine = [(x if even else x.t()) @ basis for x, basis in zip(of_a, bases)]
    for x, basis, factor in zip(of_a, bases, mine):
        x.addmm_(*((factor, basis.t()) if even else (basis, factor.t())), alpha=-1)
    means, sound = yield from _mean_of(mine, exact, bucket, send, reply)
    if even:
        new = [replace(f, p=mean, q=basis) for f, mean, basis in zip(owed.matrices, means, bases)]
        return new, [replace(f, p=_unless_zero(f.p, old.p)) for f, old in zip(new, owed.matrices)], sound
    new = [replace(f, p=basis, q=mean) for f, mean, basis in zip(owed.matrices, means, bases)]
    return new, [replace(f, q=_unless_zero(f.q, old.q)) for f, old in zip(new, owed.matrices)], sound


def _mean_of(
    mine: Sequence[Tensor], exact: list[Tensor], bucket: StateBucket, send: Channel, reply: Channel
) -> Generator[Work, None, tuple[list[Tensor], Tensor]]:
    """The means of ``mine``, and, in place, of ``exact``: one message. And whether all of it is finite."""
    parts = [*mine, *exact]
    if not parts:
        return [], torch.ones((), dtype=torch.bool, device=bucket.device)
    sizes = [x.numel() for x in parts]
    padding = -sum(sizes) % (bucket.world_size * ROW_MULTIPLE)
    message = torch.cat([*(x.reshape(-1) for x in parts), bucket.zeros()[:0].new_zeros(padding)])
    yield from mean_over_all(message, send, reply)
    means = [piece.view(x.shape) for piece, x in zip(message.split([*sizes, padding]), parts)]
    for x, mean in zip(exact, means[len(mine) :]):
        x.copy_(mean)
    return means[: len(mine)], message.isfinite().all()


def _orthonormal(x: Tensor) -> Tensor:
    """An orthonormal basis of the columns of ``x``, (n, r)."""
    return torch.linalg.qr(x).Q.contiguous()


def _unless_zero(new: Tensor, old: Tensor) -> Tensor:
    return torch.where(new.any(), new, old)
