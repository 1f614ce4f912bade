"""Who takes part in a compressed step of a bucket.

A parameter without a gradient on any rank does not: as in torch, it is as if it were not there. It is in no scale of a
block, what is sent for it counts for nothing, and its momentum and residuals stay, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from commopt import ops
from commopt.comm import Arrival
from commopt.compress import Compressor, FrozenAdam, Spared
from commopt.optim.packed import StateBucket

Run = tuple[int, int]
"""Elements [start, stop) of a flat buffer."""


class Attendance:
    """What of a bucket takes part in the step that begins: live elements of parameters that are not absent.

    Where nothing is absent, this costs nothing. Else it costs a mask, and a copy of what the absent keep.

    Args:
        bucket: has residuals; their mask is that of this step from now on.
        absent: indices of the parameters without a gradient on any rank, ascending.
        share: which share of the bucket this rank averages.

    Attributes:
        live: bit mask of what takes part, (padded / 8,) uint8; the same on every rank.
    """

    def __init__(self, bucket: StateBucket, absent: Sequence[int], share: int) -> None:
        assert bucket.feedback is not None
        self.bucket, self.feedback = bucket, bucket.feedback
        self._runs = absent_runs(bucket, absent)
        self.live = without(find_live(bucket), self._runs)
        self.feedback.live = bucket.part(self.live)
        self._spared = self._spare(share) if self._runs else None

    def _spare(self, share: int) -> Spared:
        worker, server = self.feedback.worker.numel(), self.feedback.server.numel()
        return self.feedback.spare(
            _within(self._runs, self.bucket.place * worker, worker), _within(self._runs, share * server, server)
        )

    def live_rows(self) -> Tensor:
        """The mask as a row of each rank's share."""
        return self.live.view(self.bucket.world_size, -1)

    def commit(self) -> None:
        """The compression has happened: its residuals are what is owed, but the absent owe what they owed."""
        if self._spared is None:
            self.feedback.commit()
        else:
            self.feedback.commit(self._spared)

    def move(self, arrivals: Sequence[Arrival], compressor: Compressor, momentum: Tensor, then: FrozenAdam) -> None:
        """Writes what has come to ``momentum``, (padded,), but for the absent, and moves parameters along it."""
        kept = [(slice(*run), momentum[slice(*run)].clone()) for run in self._runs]
        for arrival in arrivals:
            compressor.decompress_adam(arrival.wires, momentum, then, self.live_rows(), arrival.columns)
        for at, values in kept:
            momentum[at] = values


def absent_runs(bucket: StateBucket, absent: Sequence[int]) -> list[Run]:
    """Where the parameters of the indices ``absent``, ascending, are in a flat buffer; neighbours in one run."""
    out: list[Run] = []
    for i in absent:
        start, stop = bucket.offsets[i], bucket.offsets[i] + bucket.params[i].numel()
        if out and out[-1][1] == start:
            start = out.pop()[0]
        if start < stop:
            out.append((start, stop))
    return out


def without(live: Tensor, runs: Sequence[Run]) -> Tensor:
    """The bit mask ``live`` with the bits of ``runs`` cleared: itself if there are none, else a new one."""
    if not runs:
        return live
    out = live.clone()
    for start, stop in runs:
        first, last = start // 8, stop // 8  # the bytes at the ends, of which some bits stay
        low, high = (1 << start % 8) - 1, 0xFF & ~((1 << stop % 8) - 1)
        if first == last:
            out[first] &= low | high
            continue
        out[first] &= low
        out[first + 1 : last] = 0
        if stop % 8:
            out[last] &= high
    return out


def find_live(bucket: StateBucket) -> Tensor:
    """The bit mask of the elements whose variance is not 0: only they are sent and move. Stays until it is unset."""
    if bucket.live is None:
        live = torch.empty(bucket.padded // 8, dtype=torch.uint8, device=bucket.device)
        ops.pack_nonzero(bucket.buffers["exp_avg_sq"], live)
        bucket.set_live(live)
    assert bucket.live is not None
    return bucket.live


def _within(runs: Sequence[Run], start: int, length: int) -> list[slice]:
    """What of ``runs`` lies in the ``length`` elements from ``start`` on, counted from there."""
    cut = ((max(a, start) - start, min(b, start + length) - start) for a, b in runs)
    return [slice(a, b) for a, b in cut if a < b]
