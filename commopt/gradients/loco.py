"""LoCo's error feedback (arXiv 2407.04480): a residual in 8 bits, a moving average, that is forgotten now and then.

    h = g + e;  C[h] is sent;  e <- Q8[ beta e + (1 - beta) (h - C[h]) ];  every T means e <- 0

So a rank keeps 1 byte an element where error feedback keeps 4. It sends less of what is lost than error feedback does,
and keeps it longer: the mean of many equal steps does not tend to the gradient. The paper's reduce-scatter ends where
each rank has its part of the sum: that is :mod:`commopt.gradients.reduce_scatter`. Here, for whole models, means are
compressed once more, with error feedback of 4 bytes, to all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from commopt.agreement.checks import check_int, check_within
from commopt.compress import Compressor, Feedback, Int8, Spared
from commopt.gradients.loss_scale import rescale_
from commopt.gradients.rows import Rows
from commopt.state.own import Origin
from commopt.state.places import Saved
from commopt.state.saving import Entries
from commopt.state.state_bucket import StateBucket

MEMORY = Int8()
"""Encoding in which the residual is kept."""

EXACTLY = "exactly"
"""Key of the encoded residual, beside the values that it stands for."""


@dataclass(frozen=True)
class LoCo:
    """Error feedback of LoCo, for ``compress_gradients(..., feedback=LoCo())``.

    Args:
        beta: share of the old in the moving average, in [0, 1).
        reset_every: means after which the residual is forgotten, >= 1; None: never.

    Raises:
        ValueError: for an argument out of range.
    """

    beta: float = 0.8
    reset_every: int | None = 1024

    def __post_init__(self) -> None:
        check_within("beta", self.beta, 0, 1)
        if self.reset_every is not None:
            check_int("reset_every", self.reset_every, 1, "None or ")


@dataclass
class LoCoResiduals:
    """State of a bucket.

    Attributes:
        bytes: (1, nbytes) uint8, the encoded residual of what this rank compresses.
        server: residual of the means that this rank takes.
        means: taken so far.
    """

    bytes: Tensor
    server: Tensor
    means: int = 0


class LoCoRows(Rows):
    """As :class:`Rows`, with LoCo's feedback."""

    def __init__(self, compressor: Compressor, loco: LoCo, inside: Compressor | None = None) -> None:
        super().__init__(compressor, True, inside)
        self.loco = loco
        self._residuals: dict[int, LoCoResiduals] = {}

    def prepare(self, bucket: StateBucket, capacity: int) -> None:
        bucket.chunks = bucket.split(capacity, self.compressor.chunk_multiple)
        numel = bucket.padded // bucket.local_world_size
        payload = torch.zeros(1, MEMORY.nbytes(numel, bucket.dtype), dtype=torch.uint8, device=bucket.device)
        server = torch.zeros(numel // bucket.replicas.nodes, dtype=bucket.dtype, device=bucket.device)
        self._residuals[id(bucket)] = LoCoResiduals(payload, server)

    def residuals(self, bucket: StateBucket) -> Feedback:
        return Feedback(self._decoded(bucket), self._residuals[id(bucket)].server, double_buffered=True)

    def compressed(self, bucket: StateBucket, feedback: Feedback, spared: Spared) -> Callable[[], None]:
        """Encode what is lost at once, in 8 bits: no other bucket waits for the memory."""
        residuals, beta = self._residuals[id(bucket)], self.loco.beta
        average = feedback.next_worker.lerp_(feedback.worker, beta)
        for at, values in spared[0]:
            average[at] = values
        new = torch.empty_like(residuals.bytes)
        MEMORY.compress(average.unsqueeze(0), new)
        feedback.drop_worker()

        def keep() -> None:
            feedback.commit(([], spared[1]))
            every = self.loco.reset_every
            residuals.bytes, residuals.server, residuals.means = new, feedback.server, residuals.means + 1
            if every is not None and residuals.means % every == 0:
                residuals.bytes.zero_()

        return keep

    def _decoded(self, bucket: StateBucket) -> Tensor:
        e = torch.empty(bucket.padded // bucket.local_world_size, dtype=bucket.dtype, device=bucket.device)
        MEMORY.decompress(self._residuals[id(bucket)].bytes, e.unsqueeze(0))
        return e

    def rescale(self, buckets: Sequence[StateBucket], factor: float) -> None:
        for bucket in buckets:
            residuals = self._residuals[id(bucket)]
            rescale_(MEMORY.scales(residuals.bytes, bucket.padded // bucket.local_world_size), factor)
            rescale_(residuals.server, factor)

    # state ------------------------------------------------------------------------------------------------------------

    def own(self, buckets: Sequence[StateBucket], params: Sequence[Tensor]) -> dict[Any, dict[str, Any]]:
        with self._unpacked(buckets):
            out: dict[Any, dict[str, Any]] = dict(super().own(buckets, params))
        # decoded and encoded again, a scale may differ by its last bit
        residuals = [self._residuals[id(bucket)] for bucket in buckets]
        out[EXACTLY] = {f"bytes {i}": each.bytes.clone() for i, each in enumerate(residuals)}
        out[EXACTLY] |= {f"means {i}": each.means for i, each in enumerate(residuals)}
        return out

    def places(self, buckets: Sequence[StateBucket], params: Sequence[Tensor]) -> Saved:
        with self._unpacked(buckets):
            return super().places(buckets, params)

    def load(
        self,
        buckets: Sequence[StateBucket],
        entries: Entries,
        origin: Origin | None,
        here: Origin,
        fold: Callable[[Tensor, Tensor], None],
    ) -> bool:
        with self._unpacked(buckets):
            left_out = super().load(buckets, entries, origin, here, fold)
            for bucket in buckets:
                if bucket.feedback is not None:
                    MEMORY.compress(bucket.feedback.worker.unsqueeze(0), self._residuals[id(bucket)].bytes)
        for i, bucket in enumerate(buckets):
            exactly, residuals = entries.get(EXACTLY, {}), self._residuals[id(bucket)]
            if f"means {i}" in exactly:
                residuals.means = exactly[f"means {i}"]
            if origin == here and f"bytes {i}" in exactly:
                residuals.bytes.copy_(exactly[f"bytes {i}"])
        return left_out

    @contextlib.contextmanager
    def _unpacked(self, buckets: Sequence[StateBucket]) -> Iterator[None]:
        """Meanwhile buckets have residuals as with error feedback, which may be read, and written."""
        for bucket in buckets:
            if bucket.replicas.nodes > 1:
                bucket.feedback = Feedback(self._decoded(bucket), self._residuals[id(bucket)].server)
        try:
            yield
        finally:
            for bucket in buckets:
                bucket.feedback = None
