"""Top-k by threshold in plain PyTorch: the provider on any device, and the oracle of the native ones."""

from __future__ import annotations

import torch
from torch import Tensor

from commopt.ops.reference import masked, mean_of_entries, scatter_entries, wide_magnitude
from commopt.ops.threshold_row import SEGMENT, ThresholdRow

CHUNK, LANES = 4096, 16
"""Sums are over chunks of a row, and then over these: element i of a chunk is in lane i % 16."""


def threshold_compress(x: Tensor, payload: Tensor, k: int, rounds: int, active: Tensor | None = None) -> None:
    if x.numel():
        _encode(masked(x, active), payload, k, rounds)


def threshold_compress_with_feedback(
    x: Tensor, error: Tensor, new_error: Tensor, payload: Tensor, k: int, rounds: int, active: Tensor | None = None
) -> None:
    if x.numel() == 0:
        return
    z = masked(x + error, active)
    index, sent = _encode(z, payload, k, rounds)
    new_error.copy_(z.scatter(1, index, z.gather(1, index) - sent))


def threshold_decompress(payload: Tensor, out: Tensor, k: int, active: Tensor | None = None) -> None:
    if out.numel():
        scatter_entries(*_decode(payload, ThresholdRow(out.shape[1], k), out.dtype), out, active)


def threshold_decompress_mean(payload: Tensor, out: Tensor, k: int) -> None:
    if out.numel():
        mean_of_entries(*_decode(payload, ThresholdRow(out.shape[0], k), out.dtype), out)


def threshold_is_sound(payload: Tensor, row: ThresholdRow) -> Tensor:
    """0-d bool: whether rows are such as compression makes of finite numbers.

    Args:
        payload: (r, row.nbytes) uint8.
        row: what they are.
    """
    if row.n == 0:
        return torch.ones((), dtype=torch.bool, device=payload.device)
    starts, value, _ = _parts(payload, row)
    edges = torch.nn.functional.pad(starts, (1, 0))
    ordered = (edges.diff() >= 0).all() & (edges >= 0).all() & (edges <= row.k).all()
    place, _ = _decode(payload, row, torch.float32)
    return ordered & value.isfinite().all() & (place < row.n).all() & (place.diff() > 0).all()


# encoding -------------------------------------------------------------------------------------------------------------


def _encode(z: Tensor, payload: Tensor, k: int, rounds: int) -> tuple[Tensor, Tensor]:
    """Writes C[z] to ``payload``; returns which elements are entries, (r, k), ascending, and what they decode to."""
    row = ThresholdRow(z.shape[1], k)
    index = _select(z, k, rounds)
    value = z.gather(1, index).float().bfloat16()
    value = value.where(~value.isnan(), torch.nan)  # one NaN for all
    ends = SEGMENT * torch.arange(1, row.segments, device=z.device).expand(z.shape[0], -1)
    starts = torch.searchsorted(index, ends.contiguous()).to(torch.int32)
    payload[:, : row.values_at] = starts.view(torch.uint8)
    payload[:, row.values_at : row.indices_at] = value.view(torch.uint8)
    payload[:, row.indices_at : row.used] = (index % SEGMENT).to(torch.uint16).view(torch.uint8)
    payload[:, row.used :] = 0
    return index, value.to(z.dtype)


def _select(z: Tensor, k: int, rounds: int) -> Tensor:
    """(r, k) int64, ascending: of each row of (r, n) the elements that the text of the format chooses."""
    size = wide_magnitude(z)
    wild = ~(size < 2.0**128)
    wilds = wild.sum(1, keepdim=True)
    size = size.where(~wild, torch.inf)
    tame = size.where(~wild, 0)
    mean = (_sum(tame) / tame.new_full((), z.shape[1])).unsqueeze(1)  # a tensor: on CUDA, not its reciprocal
    low, high = _bracket(size, mean, tame.amax(1, keepdim=True), k, rounds)
    crowded = wilds > k
    low = torch.where(wilds > 0, torch.where(crowded, torch.inf, 0.0), low)
    high = torch.where(wilds > 0, torch.inf, high)
    sure = (size >= high) & ~crowded
    rest = (size >= low) & ~sure
    window = rest & (rest.cumsum(1) <= k - sure.sum(1, keepdim=True))
    return (sure | window).nonzero()[:, 1].view(z.shape[0], k)


def _bracket(size: Tensor, mean: Tensor, largest: Tensor, k: int, rounds: int) -> tuple[Tensor, Tensor]:
    """Thresholds (low, high), (r, 1) each: no more than k elements reach ``high``, more than k reach ``low``, unless
    these are inf and 0."""

    def fits(threshold: Tensor) -> Tensor:
        return (size >= threshold).sum(1, keepdim=True) <= k

    below = fits(mean)
    base, top = torch.where(below, 0, mean), torch.where(below, mean, largest)
    low, high = base, torch.where(below, mean, torch.inf)
    left, right = torch.zeros_like(mean), torch.ones_like(mean)
    for _ in range(rounds):
        middle = (left + right) / 2
        threshold = base + middle * (top - base)
        good = fits(threshold)
        left, right = torch.where(good, left, middle), torch.where(good, middle, right)
        low, high = torch.where(good, low, threshold), torch.where(good, threshold, high)
    return low, high


def _sum(x: Tensor) -> Tensor:
    """(r, n) float64, not negative -> (r,), in the order that the module of the operators states."""
    while x.shape[1] > 1:
        chunk = min(CHUNK, -(-x.shape[1] // LANES) * LANES)
        lanes = torch.nn.functional.pad(x, (0, -x.shape[1] % chunk)).unflatten(1, (-1, chunk // LANES, LANES))
        total = torch.zeros_like(lanes[:, :, 0])
        for i in range(lanes.shape[2]):
            total = total + lanes[:, :, i]
        while total.shape[-1] > 1:
            half = total.shape[-1] // 2
            total = total[..., :half] + total[..., half:]
        x = total[..., 0]
    return x[:, 0]


# decoding -------------------------------------------------------------------------------------------------------------


def _parts(payload: Tensor, row: ThresholdRow) -> tuple[Tensor, Tensor, Tensor]:
    """Starts of the segments but the first, (r, segments - 1) int64; values, (r, k) bfloat16; indices, int64."""
    starts = payload[:, : row.values_at].contiguous().view(torch.int32).to(torch.int64)
    value = payload[:, row.values_at : row.indices_at].contiguous().view(torch.bfloat16)
    index = payload[:, row.indices_at : row.used].contiguous().view(torch.uint16).to(torch.int64)
    return starts, value, index


def _decode(payload: Tensor, row: ThresholdRow, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The places of the entries, (r, k), n for one that counts for nothing, and their values."""
    starts, value, index = _parts(payload, row)
    starts = starts.clamp(0, row.k)
    if row.segments > 1:
        starts = starts.cummax(1).values
    entry = torch.arange(row.k, device=payload.device).expand(payload.shape[0], -1).contiguous()
    segment = torch.searchsorted(starts, entry, right=True)
    counts = segment * SEGMENT + index < row.n
    counts[:, 1:] &= (index.diff() > 0) | (segment.diff() > 0)
    return (segment * SEGMENT + index).where(counts, row.n), value.to(dtype)
