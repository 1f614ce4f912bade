"""The mean of a bucket by a compressor of rows: two phases, with error feedback in both."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from commopt.comm import Backend, Channel, InFlightChunk, Work, compressed_reduce_scatter, reduce_scatter
from commopt.compress import Compressor, Feedback, Momentum, Spared
from commopt.gradients.method import Brought, Received, packed
from commopt.optim import saving
from commopt.optim.exchange import start_mean
from commopt.optim.masks import absent_runs, padding_mask, within, without
from commopt.optim.own import Origin
from commopt.optim.saving import Entries
from commopt.optim.state_bucket import StateBucket


class Rows:
    """Every rank compresses its gradients and sends to each its row; each takes the mean of the rows it gets, and sends
    that, compressed, to all.

    Args:
        compressor: the same on all ranks.
        feedback: whether what is lost is kept, and sent later.
        inside: what gradients are compressed with inside a node, without feedback; None: they are in full precision.
    """

    def __init__(self, compressor: Compressor, feedback: bool, inside: Compressor | None = None) -> None:
        self.compressor, self.feedback, self.inside = compressor, feedback, inside
        self._scratches: dict[Any, Tensor] = {}

    def prepare(self, bucket: StateBucket, capacity: int) -> None:
        bucket.chunks = bucket.split(capacity, self.compressor.chunk_multiple)
        if self.feedback:
            bucket.add_residuals(double_buffered=True)

    def mean(
        self, bucket: StateBucket, brought: Brought, absent: Sequence[int], send: Channel, reply: Channel
    ) -> Generator[Work, None, Received]:
        if bucket.local_world_size > 1:
            part = yield from self._part_of_node(packed(bucket, brought), send.intra_node)
            brought = [(part, 0)]
        runs = absent_runs(bucket, absent)
        active = without(padding_mask(bucket), runs)
        feedback = self.residuals(bucket)
        worker, server = feedback.worker.numel(), feedback.server.numel()
        spared = feedback.spare(
            within(runs, bucket.local_rank * worker, worker), within(runs, bucket.shard_index * server, server)
        )
        on_the_way = start_mean(
            _as_momentum(brought, feedback.worker), feedback, bucket, self.compressor, send, reply, active
        )
        keep = self.compressed(bucket, feedback, spared)
        in_flight = yield from on_the_way
        sound = torch.ones((), dtype=torch.bool, device=bucket.device)
        for chunk in in_flight:
            yield chunk.work
            sound = sound & self._is_sound(chunk, bucket)

        def write(outs: Sequence[Tensor]) -> None:
            mean = self._scratch(bucket)
            mask = active.view(bucket.world_size, -1)
            for chunk in in_flight:
                rows = mean.view(chunk.payload.shape[0], -1)
                self.compressor.decompress_active(chunk.payload, rows, mask, chunk.chunk)
            torch._foreach_copy_(list(outs), bucket.views(mean))

        return Received(bucket, sound, write, keep, feedback.let_go)

    def _part_of_node(self, flat: Tensor, node: Backend) -> Generator[Work, None, Tensor]:
        """This rank's part of the mean over its node."""
        inside = self.inside
        if inside is None:
            return (yield from reduce_scatter(flat, node))
        rows = flat.view(node.world_size, -1)
        part = flat.new_empty(rows.shape[1])
        yield from compressed_reduce_scatter(lambda payload: inside.compress(rows, payload), part, inside, node)
        return part

    def residuals(self, bucket: StateBucket) -> Feedback:
        """The residuals of ``bucket`` before a mean, double-buffered."""
        return bucket.feedback or _forgotten(bucket)

    def compressed(self, bucket: StateBucket, feedback: Feedback, spared: Spared) -> Callable[[], None]:
        """Called when everything is compressed, and on its way. Returns what makes the residuals those after the
        mean, but for what is ``spared``."""
        return lambda: feedback.commit(spared)

    def _scratch(self, bucket: StateBucket) -> Tensor:
        """A flat buffer that all buckets have in turn: new memory costs a CPU more than what is written to it."""
        key = (bucket.dtype, bucket.device)
        known = self._scratches.get(key)
        if known is None or known.numel() < bucket.padded:
            known = self._scratches[key] = bucket.zeros()
        return known[: bucket.padded]

    def _is_sound(self, chunk: InFlightChunk, bucket: StateBucket) -> Tensor:
        start, stop = chunk.chunk
        if type(self.compressor).is_sound is not Compressor.is_sound:
            return self.compressor.is_sound(chunk.payload, stop - start, bucket.dtype)
        values = torch.empty(chunk.payload.shape[0], stop - start, dtype=bucket.dtype, device=bucket.device)
        self.compressor.decompress(chunk.payload, values)
        return values.isfinite().all()

    def own(self, buckets: Sequence[StateBucket], params: Sequence[Tensor]) -> dict[Any, dict[str, Any]]:
        return dict(saving.own_states([(bucket, ()) for bucket in buckets], params, lambda p: p))

    def common(self, buckets: Sequence[StateBucket], params: Sequence[Tensor]) -> dict[int, dict[str, Any]]:
        return {}

    def load(
        self,
        buckets: Sequence[StateBucket],
        entries: Entries,
        origin: Origin | None,
        here: Origin,
        fold: Callable[[Tensor, Tensor], None],
    ) -> bool:
        for bucket in buckets:
            for p, shape, mine in zip(bucket.params, bucket.shapes, bucket.residuals()):
                theirs = entries.get(p, {}).get("worker_error")
                if origin == here and theirs is not None and theirs.numel() != mine["worker_error"].numel():
                    raise ValueError(
                        f"the loaded residual of a parameter of shape {tuple(shape)} has {theirs.numel()} elements, "
                        f"and {mine['worker_error'].numel()} are here: it is of another model"
                    )
        return saving.fill_residuals(buckets, entries, origin, here, lambda _: False, fold)


def _as_momentum(brought: Brought, error: Tensor) -> Momentum:
    """Gradients as a momentum, 0 e + g: the residual ``error`` is added by the compressor."""
    return Momentum(error, [g for g, _ in brought], [o for _, o in brought], 0.0, 1.0)


def _forgotten(bucket: StateBucket) -> Feedback:
    """Residuals of a mean that keeps none."""
    numel = bucket.padded // bucket.local_world_size
    return Feedback.zeros(numel, bucket.replicas.nodes, bucket.dtype, bucket.device, double_buffered=True)
