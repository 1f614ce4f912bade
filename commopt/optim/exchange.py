"""Exchange of a bucket's step with the other ranks: the heart of every optimizer of the Adam family.

    g      mean_i g_i, in full precision, or coarser  averaged_gradients
    m_i    b1 m + (1-b1) g_i                          local_momentum
    m      mean_i m_i, compressed both ways           compressed_mean_of(...).into(m, update)

With nodes of several ranks, i is a node: its ranks average their gradients in full precision, and each of them
compresses a part of the bucket, its own. What comes back is shared in the node, still as bytes.

A parameter without a gradient on any rank takes no part in a compressed exchange: as in torch, it is as if it were not
there. It is in no scale of a block, what is sent for it counts for nothing, and its momentum and residuals stay, to
the bit. The same goes for elements whose variance is 0, but that their momentum and residuals are 0.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from commopt import ops
from commopt.comm import (
    Backend,
    Channel,
    InFlightChunk,
    Work,
    compressed_mean,
    mean_over_all,
    reduce_scatter,
    to_node,
)
from commopt.compress import NOTHING, Chunk, Compressor, Feedback, FrozenAdam, Momentum
from commopt.ops.reference import runs_of
from commopt.optim.masks import Run, absent_runs, active_mask, keeping, padding_mask, within, without
from commopt.optim.rules import bias_corrections, coupled_decay, scaled_gradient, weight_decay_factor
from commopt.state.state_bucket import StateBucket
from commopt.step.in_flight import StepContext


def averaged_gradients(
    bucket: StateBucket,
    ctx: StepContext,
    compressor: Compressor | None = None,
    beta: float = 0.0,
    apart: float | None = None,
) -> Generator[Work, None, list[Tensor]]:
    """The means of the gradients of the parameters that move, in the dtype of the state.

    They are exact or, with a ``compressor``, compressed both ways: what is sent is (1-b) g_i + residual, the share that
    they have in a momentum of decay b, so that the residuals are those of the momentum later on. With ``apart`` it is
    (1-b) g_i alone, for where the residuals are already of momenta, beside which a gradient's share is small; what is
    lost of it is added to them, times ``apart``.

    All ranks take the step when it returns. Masks are for a variance that stands, so there are none from then on.
    """
    if compressor is not None and bucket.feedback is not None:
        bucket.active = None  # that of a variance that stood
        g_i = yield from _local(bucket, bucket["exp_avg"], 0.0, 1 - beta, ctx)
        feedback = bucket.feedback if apart is None else bucket.feedback.emptied()
        mean = yield from compressed_mean_of(g_i, bucket, compressor, ctx, feedback=feedback, variance_moves=True)
        if apart is not None:
            bucket.feedback.add(feedback, apart)
        bucket.active = None
        views = bucket.views(mean.values().div_(1 - beta))
        return [views[i] for i in ctx.moving(bucket)]
    if ctx.average:
        flat = bucket.pack_gradients(ctx.scale)
        yield from mean_over_all(flat, ctx.send, ctx.reply)
    yield ctx.barrier
    if ctx.average and bucket.world_size > 1:
        ctx.confirmed.note(ops.all_finite(flat))
    if (ctx.average and bucket.world_size > 1) or bucket.pieces:
        yield ctx.confirmed
    bucket.active = None
    moving = ctx.moving(bucket)
    if ctx.average:
        views = bucket.views(flat)
        return [views[i] for i in moving]
    values = bucket.values
    return [scaled_gradient(values[i], bucket.gradient(i), bucket.dtype, ctx.scale) for i in moving]


def local_momentum(
    bucket: StateBucket, m: Tensor, group: dict[str, Any], ctx: StepContext
) -> Generator[Work, None, Momentum]:
    """b1 m + (1-b1) g_i, of what this rank compresses: the whole bucket, or its part on behalf of its node; with
    g_i + wd x for g_i where the weight decay is coupled.

    It is not formed: the compressor does that. ``m`` is a flat buffer of ``bucket``.
    """
    beta, decay = group["betas"][0], coupled_decay(group)
    if decay == 0:
        return (yield from _local(bucket, m, beta, 1 - beta, ctx))
    decayed = bucket.pack_params().mul_((1 - beta) * decay).add_(m, alpha=beta)
    return (yield from _local(bucket, decayed, 1.0, 1 - beta, ctx))


def _local(
    bucket: StateBucket, m: Tensor, beta: float, alpha: float, ctx: StepContext
) -> Generator[Work, None, Momentum]:
    """b m + a g_i."""
    if bucket.local_world_size > 1:
        part = yield from reduce_scatter(bucket.pack_gradients(ctx.scale), ctx.send.intra_node)
        return Momentum(bucket.part(m), [part], [0], beta, alpha)
    grads = bucket.gradients()
    return Momentum(m, [g for g, _ in grads], [o for _, o in grads], beta, alpha * ctx.scale)


def compressed_mean_of(
    local: Momentum,
    bucket: StateBucket,
    compressor: Compressor,
    ctx: StepContext,
    *,
    scaling: Tensor | None = None,
    absent: Sequence[int] | None = None,
    feedback: Feedback | None = None,
    variance_moves: bool = False,
) -> Generator[Work, None, Received]:
    """The mean over the ranks of ``local`` + residual, compressed, and the residuals of that.

    When it returns, all ranks take the step, have received what was sent, and the residuals are those after it. Until
    then nothing that outlives the step has changed, but for residuals that are not double-buffered.

    Args:
        local: what this rank compresses, (padded / local_world_size,); let go of when it is compressed.
        bucket: has the residuals; elements whose variance is 0, if it has one, take no part.
        compressor: the same on every rank.
        ctx: the step.
        scaling: a factor k > 0 of each element, (padded,): k (``local`` + residual) is compressed, what comes back is
            divided by k, and so are the residuals.
        absent: indices of the parameters that take no part, ascending; None: those without a gradient on any rank.
        feedback: residuals in the place of the bucket's.
        variance_moves: elements take part whose variance is 0, too.
    """
    feedback = feedback or bucket.feedback
    assert feedback is not None
    runs = absent_runs(bucket, ctx.absent(bucket) if absent is None else absent)
    active = without(padding_mask(bucket) if variance_moves else active_mask(bucket), runs)
    server = feedback.server.numel()
    kept = NOTHING
    if runs:
        mine = within(runs, bucket.local_rank * feedback.worker.numel(), feedback.worker.numel())
        kept = feedback.spare(mine, within(runs, bucket.shard_index * server, server))
    on_the_way = start_mean(local, feedback, bucket, compressor, ctx.send, ctx.reply, active, scaling)
    del local
    in_flight = yield from on_the_way
    yield ctx.barrier
    for chunk in in_flight:
        yield chunk.work
        start, stop = chunk.chunk
        ctx.confirmed.note(compressor.is_sound(chunk.payload, stop - start, bucket.dtype))
    yield ctx.confirmed
    feedback.commit(kept)
    return Received(in_flight, bucket, compressor, active, runs, scaling)


class Received:
    """A compressed mean that has come: still bytes, the same on every rank. The residuals are committed."""

    def __init__(
        self,
        in_flight: Sequence[InFlightChunk],
        bucket: StateBucket,
        compressor: Compressor,
        active: Tensor,
        absent: Sequence[Run],
        scaling: Tensor | None,
    ) -> None:
        self._in_flight, self._bucket, self._compressor = in_flight, bucket, compressor
        self._active, self._absent, self._scaling = active.view(bucket.world_size, -1), absent, scaling

    def into(self, m: Tensor, update: FrozenAdam) -> None:
        """Writes the mean to ``m``, a flat buffer of the bucket, but for the absent, and moves parameters along it."""
        with keeping(m, self._absent):
            for chunk in self._in_flight:
                self._compressor.decompress_adam(chunk.payload, m, update, self._active, chunk.chunk)

    def values(self) -> Tensor:
        """The mean, (padded,), a new tensor; what it has for the absent means nothing."""
        mean = torch.empty(self._bucket.padded, dtype=self._bucket.dtype, device=self._bucket.device)
        for chunk in self._in_flight:
            rows = mean.view(chunk.payload.shape[0], -1)
            self._compressor.decompress_active(chunk.payload, rows, self._active, chunk.chunk)
        if self._scaling is not None:
            mean.div_(self._scaling)
        return mean


def start_mean(
    local: Momentum,
    feedback: Feedback,
    bucket: StateBucket,
    compressor: Compressor,
    send: Channel,
    reply: Channel,
    active: Tensor,
    scaling: Tensor | None = None,
) -> Generator[Work, None, list[InFlightChunk]]:
    """Compresses ``local`` + residual at once, starts to send it, and returns the task that takes the mean and brings
    it to all ranks: :func:`commopt.comm.compressed_mean` between the nodes, and to all ranks of each.

    Args:
        local: what this rank compresses, (padded / local_world_size,). The task does not hold it.
        feedback: the residuals.
        bucket: what this is of.
        compressor: the same on every rank.
        send, reply: the ranks, on the channels for what goes out, and for what comes back.
        active: bit mask of what takes part, (padded / 8,).
        scaling: as for :func:`compressed_mean_of`. Residuals are divided by k as soon as they are written, so that
            whatever fails later leaves none k times too large.
    """
    nodes = send.inter_node.world_size
    mask = bucket.part(active)
    rows = mask.view(nodes, -1)

    def compress(payload: Tensor, chunk: Chunk) -> None:
        worker, after = feedback.worker_rows(nodes)
        if scaling is None:
            compressor.compress_momentum(local, worker, payload, rows, after, chunk)
            return
        k = bucket.part(scaling).view(nodes, -1)
        _multiply(local, worker, k, after, chunk)
        compressor.compress_momentum(None, after, payload, rows, after, chunk)
        after[:, slice(*chunk)].div_(k[:, slice(*chunk)])

    chunks, servers = bucket.chunks or None, None
    if scaling is not None:
        servers = scaling.view(-1, feedback.server.numel())[bucket.shard_index]
    between = compressed_mean(compress, feedback, compressor, send.inter_node, reply.inter_node, chunks, mask, servers)
    return _shared_in_node(between, reply.intra_node)


def _shared_in_node(
    between: Generator[Work, None, list[InFlightChunk]], intra_node: Backend
) -> Generator[Work, None, list[InFlightChunk]]:
    in_flight = yield from between
    return (yield from to_node(in_flight, intra_node))


def _multiply(local: Momentum, worker: Tensor, k: Tensor, out: Tensor, chunk: Chunk) -> None:
    """Writes k (``local`` + ``worker``) to the ``chunk`` of ``out``, which may be ``worker``; (rows, n) each."""
    worker, k, to = worker.view(-1), k.view(-1), out.view(-1)
    for first, end in runs_of(chunk, *out.shape):
        of, x = local.between(first, end), to[first:end]
        torch.add(worker[first:end], of.m, alpha=of.beta, out=x)
        ops.momentum(x, of.grads, of.offsets, 1.0, of.alpha, x)
        x.mul_(k[first:end])


def frozen_adam(
    bucket: StateBucket,
    v: Tensor,
    moving: Sequence[int],
    group: dict[str, Any],
    counts: list[tuple[float, float]] | None = None,
) -> FrozenAdam:
    """x <- x (1 - lr wd) - lr / (1-b1^t) m / (sqrt(v / (1-b2^t')) + eps), for when m has come.

    Args:
        bucket: of the parameters.
        v: a flat buffer of it.
        moving: indices of the parameters that move, ascending.
        group: lr, betas, eps, weight_decay.
        counts: (t, t') of each of them; None for those of the bucket.
    """
    x, _, _, now = bucket.operands(moving)
    offsets = [bucket.offsets[i] for i in moving]
    factors = bias_corrections(now if counts is None else counts, group)
    return FrozenAdam(v, x, offsets, *factors, group["eps"], weight_decay_factor(group))
