"""Masks of the elements of a bucket that take part in a compressed exchange: bits, least significant bit first, 1 =
active."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from commopt import ops
from commopt.state.state_bucket import StateBucket

Run = tuple[int, int]
"""Elements [start, stop) of a flat buffer."""


def active_mask(bucket: StateBucket) -> Tensor:
    """The mask of the elements whose variance is not 0, (padded / 8,) uint8: only they are sent and move. Of all but
    the padding, where there is no variance. It stays until the variance is written to, by whomever, or
    ``bucket.active`` is unset."""
    if "exp_avg_sq" not in bucket.buffers:
        return padding_mask(bucket)
    v = bucket["exp_avg_sq"]
    version = None if v.is_inference() else v._version
    if bucket.active is None or bucket.active_of != ("exp_avg_sq", version):
        bucket.active, bucket.active_of = _nonzero(v), ("exp_avg_sq", version)
    return bucket.active


def padding_mask(bucket: StateBucket) -> Tensor:
    """The mask of all elements but the padding, (padded / 8,) uint8; it stays until ``bucket.active`` is unset."""
    if bucket.active is None:
        bucket.active_of = ()
        used = bucket.zeros()
        used[: bucket.numel] = 1
        bucket.active = _nonzero(used)
    return bucket.active


def _nonzero(flat: Tensor) -> Tensor:
    mask = torch.empty(flat.numel() // 8, dtype=torch.uint8, device=flat.device)
    ops.pack_nonzero(flat, mask)
    return mask


def absent_runs(bucket: StateBucket, absent: Sequence[int]) -> list[Run]:
    """Runs of the parameters of the indices ``absent``, ascending, in a flat buffer; neighbours in one run."""
    out: list[Run] = []
    for i in absent:
        start, stop = bucket.offsets[i], bucket.offsets[i] + bucket.shapes[i].numel()
        if out and out[-1][1] == start:
            start = out.pop()[0]
        if start < stop:
            out.append((start, stop))
    return out


@contextlib.contextmanager
def keeping(flat: Tensor, runs: Sequence[Run]) -> Iterator[None]:
    """Context that may write all of ``flat``, a flat buffer; what ``runs`` have is put back."""
    kept = [(slice(*run), flat[slice(*run)].clone()) for run in runs]
    try:
        yield
    finally:
        for at, values in kept:
            flat[at] = values


def without(active: Tensor, runs: Sequence[Run]) -> Tensor:
    """The mask ``active`` with the bits of ``runs`` cleared: itself if there are none, else a new one."""
    if not runs:
        return active
    out = active.clone()
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


def within(runs: Sequence[Run], start: int, length: int) -> list[slice]:
    """Slices of ``runs`` that lie in the ``length`` elements from ``start`` on, counted from there."""
    cut = ((max(a, start) - start, min(b, start + length) - start) for a, b in runs)
    return [slice(a, b) for a, b in cut if a < b]
