"""The mean of a bucket by factors of low rank. A_i is the gradient of rank i, as a matrix, plus its residual:

    PowerSGD    P_i = A_i Q;  P = orth(mean P_i);  Q_i = A_i' P;  Q = mean Q_i;  mean of gradients ~ P Q'
    ACP, even   Q <- orth(Q);  P_i = A_i Q;   P = mean P_i;                      mean of gradients ~ P Q'
    ACP, odd    P <- orth(P);  Q_i = A_i' P;  Q = mean Q_i;                      mean of gradients ~ P Q'

    residual of i <- A_i - P_i Q'   (ACP, odd, and PowerSGD: A_i - P Q_i')

(arXiv 1905.13727 and 2306.08881.) A rank's residual is what its own factors have missed, and not what the mean has: the
mean over the ranks is the same, but a rank's own does not grow without bound. torch's hook takes the other. A matrix of
zeros leaves the factors as they are. What is no matrix, or too small, is in the same message, in full.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import astuple, replace
from typing import Any

import torch
from torch import Tensor

from commopt import ops
from commopt.bucket import ROW_MULTIPLE
from commopt.comm import STARTED, Channel, Work, mean_over_all
from commopt.compress import PowerSGD
from commopt.compress.low_rank import LowRank
from commopt.gradients.factors import Exact, Factors, LowRankState
from commopt.gradients.loss_scale import rescale_
from commopt.gradients.method import Brought, BucketMean
from commopt.optim.masks import absent_runs
from commopt.sharding import cut, is_sharded
from commopt.state.own import MIXED, Origin
from commopt.state.own_tensor import Place
from commopt.state.places import Saved
from commopt.state.saving import Entries
from commopt.state.split import MERGED
from commopt.state.state_bucket import StateBucket


class Thin:
    """Means by factors.

    Args:
        spec: the rank, and whether one factor or both are sent in a step.
        feedback: whether what is lost is kept, and sent later.
    """

    of_whole = True

    def __init__(self, spec: LowRank, feedback: bool) -> None:
        self.spec, self.feedback = spec, feedback
        self._of: dict[int, LowRankState] = {}
        self._made = 0

    def prepare(self, bucket: StateBucket, capacity: int) -> None:
        matrices, exact = list[Factors](), list[Exact]()
        for i, (start, shape) in enumerate(zip(bucket.offsets, bucket.shapes)):
            thin = self.spec.factors_of(shape)
            if thin is None:
                if not exact or exact[-1].stop != start:
                    exact.append(Exact(start, start, []))
                exact[-1].params.append((i, start - exact[-1].start))
                exact[-1].stop = start + shape.numel()
                continue
            n, m, r = thin
            draw = torch.Generator().manual_seed(self.spec.seed * 1_000_003 + self._made)
            self._made += 1
            p, q = (torch.randn(k, r, generator=draw, dtype=torch.float64, device="cpu") for k in (n, m))
            matrices.append(Factors(i, start, p.to(bucket.device, bucket.dtype), q.to(bucket.device, bucket.dtype)))
        error = bucket.zeros() if self.feedback else None
        self._of[id(bucket)] = LowRankState(matrices, exact, error, bucket.zeros())

    def mean(
        self, bucket: StateBucket, brought: Brought, absent: Sequence[int], send: Channel, reply: Channel
    ) -> Generator[Work, None, BucketMean]:
        state = self._of[id(bucket)]
        a = state.plus_error(brought)
        runs = absent_runs(bucket, absent)
        for start, stop in runs:
            a[start:stop] = 0
        exact = [a[run.start : run.stop] for run in state.exact]
        take = _power if isinstance(self.spec, PowerSGD) else _alternating
        new, later, exact, sound = yield from take(state, a, exact, bucket, send, reply)

        def write(outs: Sequence[Tensor]) -> None:
            for f in new:
                _write_product(f, outs[f.index])
            for run, mean in zip(state.exact, exact):
                pieces = [(outs[i], mean[start : start + outs[i].numel()]) for i, start in run.params]
                torch._foreach_copy_([out for out, _ in pieces], [x.view(out.shape) for out, x in pieces])

        def commit() -> None:
            both = zip(state.matrices, later)
            state.matrices = [f if f.index in absent else replace(now, turn=f.turn + 1) for f, now in both]
            if state.error is not None:
                state.loaded &= set(absent)
                for start, stop in runs:
                    a[start:stop] = state.error[start:stop]
                state.error, state.spare = a, state.error

        return BucketMean(bucket, sound, write, commit)

    def rescale(self, buckets: Sequence[StateBucket], factor: float) -> None:
        for error in (self._of[id(bucket)].error for bucket in buckets):
            if error is not None:
                rescale_(error, factor)

    # state ------------------------------------------------------------------------------------------------------------

    def own(self, buckets: Sequence[StateBucket], params: Sequence[Tensor]) -> dict[Any, dict[str, Any]]:
        number, out = {id(p): i for i, p in enumerate(params)}, dict[Any, dict[str, Any]]()
        for bucket in buckets:
            for i, error in self._of[id(bucket)].errors(bucket):
                mine = error.clone().flatten()
                out[number[id(bucket.params[i])]] = {"worker_error": mine, "server_error": mine[:0]}
        return out

    def places(self, buckets: Sequence[StateBucket], params: Sequence[Tensor]) -> Saved:
        number, out = {id(p): i for i, p in enumerate(params)}, Saved()
        for bucket in buckets:
            for i, error in self._of[id(bucket)].errors(bucket):
                p, ranks = bucket.params[i], bucket.replicas
                place = Place.of(p, error.shape, 0, ranks.rank, ranks.world_size)
                out[number[id(p)]] = {"worker_error": astuple(place)}
        return out

    def common(self, buckets: Sequence[StateBucket], params: Sequence[Tensor]) -> dict[int, dict[str, Any]]:
        number, out = {id(p): i for i, p in enumerate(params)}, {}
        for bucket in buckets:
            state = self._of[id(bucket)]
            for factors in state.matrices:
                p, q = (x.clone(memory_format=torch.contiguous_format) for x in (factors.p, factors.q))
                entry: dict[str, Any] = {"p": p, "q": q, "turn": factors.turn}
                out[number[id(bucket.params[factors.index])]] = entry
        return out

    def load(
        self,
        buckets: Sequence[StateBucket],
        entries: Entries,
        origin: Origin | None,
        here: Origin,
        fold: Callable[[Tensor, Tensor], None],
    ) -> bool:
        matrices, errors = list[list[Factors]](), list[list[tuple[Tensor | None, bool]]]()
        for bucket in buckets:  # refuses before anything changes
            state, found = self._of[id(bucket)], list[Factors]()
            for factors in state.matrices:
                entry = entries.get(p := bucket.params[factors.index], {})
                serves = "p" in entry and (origin == here or not is_sharded(p))  # of other pieces, these begin anew
                found.append(factors.loaded(entry) if serves else factors)
            matrices.append(found)
            every = enumerate(bucket.params) if state.error is not None else ()
            errors.append([_error_to_take(bucket, i, entries.get(p, {}), origin, here) for i, p in every])
        for bucket, found, taken in zip(buckets, matrices, errors):
            state = self._of[id(bucket)]
            state.matrices = found
            if state.error is not None:
                state.error.zero_()
                thin = {factors.index for factors in state.matrices}
                has = {i for i, p in enumerate(bucket.params) if "worker_error" in entries.get(p, {})}
                state.loaded = has - thin
                for i, (given, _) in enumerate(taken):
                    if given is not None:
                        _take_error(bucket, i, state.error, given, fold)
        return any(left_out for taken in errors for _, left_out in taken)


def _error_to_take(
    bucket: StateBucket, i: int, entry: Mapping[str, Any], origin: Origin | None, here: Origin
) -> tuple[Tensor | None, bool]:
    """The residual of parameter ``i`` in what is loaded that is this rank's, None if there is none; and whether any was
    left out, because it is another rank's, or of the means of all ranks, of another way to take them.

    Raises:
        ValueError: it is of another model.
    """
    given, server, p, shape = entry.get("worker_error"), entry.get("server_error"), bucket.params[i], bucket.shapes[i]
    if given is None:
        return None, False
    if server is not None and not server.any():
        server = None
    if origin is not None and origin[0] == MERGED:
        given = given.reshape(p.shape)
        given, server = cut(given if server is None else given + server.reshape(p.shape), p), None
    elif origin is None or origin[0] == MIXED or origin[:2] != here[:2] or (is_sharded(p) and origin != here):
        return None, bool(given.any())
    if given.numel() != shape.numel():
        raise ValueError(
            f"the loaded residual of a parameter of shape {tuple(p.shape)} has {given.numel()} elements, and "
            f"{shape.numel()} are here: it is of another model"
        )
    return given, server is not None


def _take_error(
    bucket: StateBucket, i: int, error: Tensor, given: Tensor, fold: Callable[[Tensor, Tensor], None]
) -> None:
    """Puts ``given``, the residual of parameter ``i``, where it belongs in ``error``, (padded,)."""
    shape = bucket.shapes[i]
    given = given.to(bucket.device).reshape(shape)
    if bucket.replicas.nodes == 1:
        fold(bucket.params[i], given)
    else:
        error[bucket.offsets[i] : bucket.offsets[i] + given.numel()].view(shape).copy_(given)


Taken = tuple[list[Factors], list[Factors], list[Tensor], Tensor]
"""Factors of the means, those to go on with, means of what is sent in full, and whether all are finite."""


def _power(
    state: LowRankState, a: Tensor, exact: list[Tensor], bucket: StateBucket, send: Channel, reply: Channel
) -> Generator[Work, None, Taken]:
    """PowerSGD: takes the means, of ``exact`` too, which is part of ``a``; that becomes what is lost."""
    of_a = [f.matrix(a) for f in state.matrices]
    ps = [_times(x, _unit(f.q)) for x, f in zip(of_a, state.matrices)]
    ps, exact, sound = yield from _mean_of(ps, exact, bucket, send, reply, None if of_a else STARTED)
    ps, mine = [_orthonormal(p) for p in ps], list[Tensor]()
    for x, p in zip(of_a, ps):  # a matrix at a time: it stays in the cache
        mine.append(_transposed_times(x, p))
        x.addmm_(p, mine[-1].t(), alpha=-1)
    qs, _, also = yield from _mean_of(mine, [], bucket, reply, reply, STARTED)
    new = [replace(f, p=p, q=q) for f, p, q in zip(state.matrices, ps, qs)]
    return new, [_learnt(f, before, "q") for f, before in zip(new, state.matrices)], exact, sound & also


def _alternating(
    state: LowRankState, a: Tensor, exact: list[Tensor], bucket: StateBucket, send: Channel, reply: Channel
) -> Generator[Work, None, Taken]:
    """ACP: as :func:`_power`, one factor in a turn. A matrix without gradients does not have its turn: else one that
    has some in every second step only would never learn its other factor."""
    of_a, evens = [f.matrix(a) for f in state.matrices], [f.turn % 2 == 0 for f in state.matrices]
    bases = [_orthonormal(f.q if even else f.p) for f, even in zip(state.matrices, evens)]
    mine = list[Tensor]()
    for x, basis, even in zip(of_a, bases, evens):  # a matrix at a time: it stays in the cache
        mine.append(_times(x, basis) if even else _transposed_times(x, basis))
        x.addmm_(*((mine[-1], basis.t()) if even else (basis, mine[-1].t())), alpha=-1)
    means, exact, sound = yield from _mean_of(mine, exact, bucket, send, reply, STARTED)
    each = zip(state.matrices, means, bases, evens)
    new = [replace(f, p=mean, q=basis) if even else replace(f, p=basis, q=mean) for f, mean, basis, even in each]
    learnt = [_learnt(f, before, "p" if even else "q") for f, before, even in zip(new, state.matrices, evens)]
    return new, learnt, exact, sound


def _mean_of(
    mine: Sequence[Tensor],
    exact: list[Tensor],
    bucket: StateBucket,
    send: Channel,
    reply: Channel,
    started: Work | None = None,
) -> Generator[Work, None, tuple[list[Tensor], list[Tensor], Tensor]]:
    """The means of ``mine`` and of ``exact``, in one message, and whether all of it is finite. ``exact`` becomes 0."""
    parts = [*mine, *exact]
    if not parts:
        return [], [], torch.ones((), dtype=torch.bool, device=bucket.device)
    sizes = [x.numel() for x in parts]
    padding = -sum(sizes) % (bucket.world_size * ROW_MULTIPLE)
    end = torch.zeros(padding, dtype=bucket.dtype, device=bucket.device)
    message = torch.cat([*(x.reshape(-1) for x in parts), end])
    for x in exact:
        x.zero_()
    yield from mean_over_all(message, send, reply, started)
    means = [piece.view(x.shape) for piece, x in zip(message.split([*sizes, padding]), parts)]
    return means[: len(mine)], means[len(mine) :], ops.all_finite(message)


def _orthonormal(x: Tensor) -> Tensor:
    """An orthonormal basis of the columns of ``x``, (n, r)."""
    return torch.linalg.qr(_unit(x)).Q


def _unit(q: Tensor) -> Tensor:
    """``q`` times a power of two, such that its largest element is about 1: q has the size of the last gradients, and
    norms of it, and products with it, leave the range of a dtype long before these do. Its columns span the same."""
    _, exponent = torch.frexp(q.abs().amax())
    # a power of int would be made in the default dtype, as of torch 2.6
    return torch.ldexp(q, (-exponent).clamp(-120, 120).to(q.dtype))


def _times(x: Tensor, q: Tensor) -> Tensor:
    """x q, with each column of q in one piece: up to four times faster on a CPU."""
    return x @ q.t().contiguous().t()


def _transposed_times(x: Tensor, p: Tensor) -> Tensor:
    """x' p, in the order in which x is read row by row: several times faster on a CPU."""
    return (p.t() @ x).t().contiguous()


def _write_product(f: Factors, out: Tensor) -> None:
    """P Q' to a tensor of any dtype and layout."""
    n, m = f.p.shape[0], f.q.shape[0]
    if out.is_contiguous() and out.dtype == f.p.dtype:
        torch.mm(f.p, f.q.t(), out=out.view(n, m))
    else:
        out.copy_((f.p @ f.q.t()).view(out.shape))


def _learnt(new: Factors, old: Factors, name: str) -> Factors:
    """``new``, but the factor ``name`` as it was where the new one is 0: there was nothing to learn."""
    if name == "p":
        return replace(new, p=torch.where(new.p.any(), new.p, old.p))
    return replace(new, q=torch.where(new.q.any(), new.q, old.q))
