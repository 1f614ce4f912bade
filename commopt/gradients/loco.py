"""LoCo's error feedback (arXiv 2407.04480): what is owed in 8 bits, as a moving average, and forgotten now and then.

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

from commopt.compress import Compressor, Feedback, Int8, Spared
from commopt.gradients.rows import Rows
from commopt.optim.checks import check_int, check_within
from commopt.optim.own import Origin
from commopt.optim.places import Saved
from commopt.optim.saving import Entries
from commopt.optim.state_bucket import StateBucket

MEMORY = Int8()
"""How what is owed is kept."""

EXACTLY = "exactly"
"""Key of what is owed as it is, beside what it stands for."""


@dataclass(frozen=True)
class LoCo:
    """Error feedback of LoCo, for ``compress_gradients(..., feedback=LoCo())``.

    Args:
        beta: share of the old in the moving average, in [0, 1).
        reset_every: means after which what is owed is forgotten, >= 1; None: never.

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
class Owed:
    """State of a bucket.

    Attributes:
        bytes: (1, nbytes) uint8, what this rank owes of what it compresses.
        server: of the means that this rank takes.
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
        self._owed: dict[int, Owed] = {}

    def prepare(self, bucket: StateBucket, capacity: int) -> None:
        bucket.chunks = bucket.split(capacity, self.compressor.chunk_multiple)
        numel = bucket.padded // bucket.local_world_size
        payload = torch.zeros(1, MEMORY.nbytes(numel, bucket.dtype), dtype=torch.uint8, device=bucket.device)
        server = torch.zeros(numel // bucket.replicas.nodes, dtype=bucket.dtype, device=bucket.device)
        self._owed[id(bucket)] = Owed(payload, server)

    def residuals(self, bucket: StateBucket) -> Feedback:
        return Feedback(self._decoded(bucket), self._owed[id(bucket)].server, double_buffered=True)

    def compressed(self, bucket: StateBucket, feedback: Feedback, spared: Spared) -> Callable[[], None]:
        """What is lost is made small at once: no other bucket waits for the memory."""
        owed, beta = self._owed[id(bucket)], self.loco.beta
        average = feedback.next_worker.lerp_(feedback.worker, beta)
        for at, values in spared[0]:
            average[at] = values
        new = torch.empty_like(owed.bytes)
        MEMORY.compress(average.unsqueeze(0), new)
        feedback.drop_worker()

        def keep() -> None:
            feedback.commit(([], spared[1]))
            every = self.loco.reset_every
            owed.bytes, owed.server, owed.means = new, feedback.server, owed.means + 1
            if every is not None and owed.means % every == 0:
                owed.bytes.zero_()

        return keep

    def _decoded(self, bucket: StateBucket) -> Tensor:
        e = torch.empty(bucket.padded // bucket.local_world_size, dtype=bucket.dtype, device=bucket.device)
        MEMORY.decompress(self._owed[id(bucket)].bytes, e.unsqueeze(0))
        return e

    # state ------------------------------------------------------------------------------------------------------------

    def own(self, buckets: Sequence[StateBucket], params: Sequence[Tensor]) -> dict[Any, dict[str, Any]]:
        with self._unpacked(buckets):
            out: dict[Any, dict[str, Any]] = dict(super().own(buckets, params))
        # decoded and encoded again, a scale may differ by its last bit
        owed = [self._owed[id(bucket)] for bucket in buckets]
        out[EXACTLY] = {f"bytes {i}": each.bytes.clone() for i, each in enumerate(owed)}
        out[EXACTLY] |= {f"means {i}": each.means for i, each in enumerate(owed)}
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
                    MEMORY.compress(bucket.feedback.worker.unsqueeze(0), self._owed[id(bucket)].bytes)
        for i, bucket in enumerate(buckets):
            exactly, owed = entries.get(EXACTLY, {}), self._owed[id(bucket)]
            if f"means {i}" in exactly:
                owed.means = exactly[f"means {i}"]
            if origin == here and f"bytes {i}" in exactly:
                owed.bytes.copy_(exactly[f"bytes {i}"])
        return left_out

    @contextlib.contextmanager
    def _unpacked(self, buckets: Sequence[StateBucket]) -> Iterator[None]:
        """Meanwhile buckets have residuals as with error feedback, which may be read, and written."""
        for bucket in buckets:
            if bucket.replicas.nodes > 1:
                bucket.feedback = Feedback(self._decoded(bucket), self._owed[id(bucket)].server)
        try:
            yield
        finally:
            for bucket in buckets:
                bucket.feedback = None
