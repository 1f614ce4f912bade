"""The mean of a bucket by a compressor of rows: two phases, with error feedback in both."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import torch
from torch import Tensor

from commopt import ops
from commopt.comm import STARTED, Channel, InFlightChunk, Work
from commopt.compress import Compressor, Feedback, Momentum, Spared
from commopt.gradients.flat import Flat
from commopt.gradients.method import Brought, BucketMean, packed, part_of_node
from commopt.optim.exchange import start_mean
from commopt.optim.masks import absent_runs, padding_mask, within, without
from commopt.state.state_bucket import StateBucket


class Rows(Flat):
    """Every rank compresses its gradients and sends to each its row; each takes the mean of the rows it gets, and sends
    that, compressed, to all.

    Args:
        compressor: the same on all ranks.
        feedback: whether what is lost is kept, and sent later.
        inside: what gradients are compressed with inside a node, without feedback; None: they are in full precision.
    """

    def __init__(self, compressor: Compressor, feedback: bool, inside: Compressor | None = None) -> None:
        super().__init__(feedback)
        self.compressor, self.inside = compressor, inside

    def prepare(self, bucket: StateBucket, capacity: int) -> None:
        bucket.chunks = bucket.split(capacity, self.compressor.chunk_multiple)
        super().prepare(bucket, capacity)

    def mean(
        self, bucket: StateBucket, brought: Brought, absent: Sequence[int], send: Channel, reply: Channel
    ) -> Generator[Work, None, BucketMean]:
        if bucket.local_world_size > 1:
            part = yield from part_of_node(packed(bucket, brought), send.intra_node, self.inside)
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
        yield STARTED
        sound = torch.ones((), dtype=torch.bool, device=bucket.device)
        for chunk in in_flight:
            yield chunk.work
            sound = sound & self._is_sound(chunk, bucket)

        def write(outs: Sequence[Tensor]) -> None:
            room, mask = self.scratch(bucket), active.view(bucket.world_size, -1)
            for chunk in in_flight:
                self.compressor.decompress_to(chunk.payload, outs, bucket.offsets, room, mask, chunk.chunk)

        return BucketMean(bucket, sound, write, keep, feedback.let_go)

    def compressed(self, bucket: StateBucket, feedback: Feedback, spared: Spared) -> Callable[[], None]:
        """Called when everything is compressed, and on its way. Returns what makes the residuals those after the
        mean, but for what is ``spared``."""
        return lambda: feedback.commit(spared)

    def _is_sound(self, chunk: InFlightChunk, bucket: StateBucket) -> Tensor:
        start, stop = chunk.chunk
        if type(self.compressor).is_sound is not Compressor.is_sound:
            return self.compressor.is_sound(chunk.payload, stop - start, bucket.dtype)
        values = torch.empty(chunk.payload.shape[0], stop - start, dtype=bucket.dtype, device=bucket.device)
        self.compressor.decompress(chunk.payload, values)
        return ops.all_finite(values)


def _as_momentum(brought: Brought, error: Tensor) -> Momentum:
    """Gradients as a momentum, 0 e + g: the residual ``error`` is added by the compressor."""
    return Momentum(error, [g for g, _ in brought], [o for _, o in brought], 0.0, 1.0)
