"""The operators of top-k in plain PyTorch: the provider on any device, and the oracle of the native ones."""

from __future__ import annotations

import torch
from torch import Tensor

from commopt.ops.reference import (
    magnitude_bits,
    masked,
    mean_of_entries,
    pack_bits,
    scatter_entries,
    unpack_bits,
    wide_magnitude,
)
from commopt.ops.top_k_row import TopKRow

LANES = 32
"""Sums of a group have so many lanes: entry i is in lane i % 32; the upper half is added to the lower, and so on."""


def topk_compress(x: Tensor, payload: Tensor, k: int, chunk: int, bits: int, active: Tensor | None = None) -> None:
    if x.numel():
        _encode(masked(x, active), payload, k, chunk, bits)


def topk_compress_with_feedback(
    x: Tensor,
    error: Tensor,
    new_error: Tensor,
    payload: Tensor,
    k: int,
    chunk: int,
    bits: int,
    active: Tensor | None = None,
) -> None:
    if x.numel() == 0:
        return
    z = masked(x + error, active)
    places, sent = _encode(z, payload, k, chunk, bits)
    rest = torch.nn.functional.pad(z, (0, 1))  # the last column is for entries that carry nothing
    rest.scatter_(1, places, rest.gather(1, places) - sent)
    new_error.copy_(rest[:, :-1])


def topk_decompress(payload: Tensor, out: Tensor, k: int, chunk: int, bits: int, active: Tensor | None = None) -> None:
    if out.numel():
        scatter_entries(*_decode(payload, TopKRow(out.shape[1], k, chunk, bits, out.dtype)), out, active)


def topk_decompress_mean(payload: Tensor, out: Tensor, k: int, chunk: int, bits: int) -> None:
    if out.numel():
        mean_of_entries(*_decode(payload, TopKRow(out.shape[0], k, chunk, bits, out.dtype)), out)


def topk_find_unsound(
    payload: Tensor, sound: Tensor, n: int, k: int, chunk: int, bits: int, dtype: torch.dtype = torch.float32
) -> None:
    if payload.shape[0] and n:
        sound &= _is_sound(payload, TopKRow(n, k, chunk, bits, dtype))


def _is_sound(payload: Tensor, row: TopKRow) -> Tensor:
    scales, codes = _scales(payload, row), _codes(payload, row)
    sound = (scales.isfinite() & (scales >= 0)).all()
    if row.bits >= 16:
        sound = sound & codes.isfinite().all()
    for index, length in _chunked_indices(payload, row):
        step = index.diff()
        # entries ascend, and then repeat the last; or there are none
        ascends = (step >= 0).all(-1) & ~((step[..., 1:] > 0) & (step[..., :-1] == 0)).any(-1)
        nothing = torch.zeros_like(index[0, 0])
        nothing[0] = 1 if index.shape[-1] > 1 else length % 256**row.index_nbytes
        sound = sound & (ascends & (index < length).all(-1) | (index == nothing).all(-1)).all()
    return sound


# encoding -------------------------------------------------------------------------------------------------------------


def _encode(z: Tensor, payload: Tensor, k: int, chunk: int, bits: int) -> tuple[Tensor, Tensor]:
    """Writes C[z] to ``payload``; returns the places of the entries, (r, entries), n for one without value, and
    what each of them decodes to."""
    row = TopKRow(z.shape[1], k, chunk, bits, z.dtype)
    parts = [_select(part, k) for part in _chunks(z, chunk)]
    starts = torch.arange(0, row.chunks * chunk, chunk, device=z.device).repeat_interleave(k)[: row.entries]
    real, index, value = (torch.cat([p[i].flatten(1) for p in parts], 1) for i in range(3))
    scales = _scales_of(value, row)
    codes = _quantised(value, scales, row)
    payload[:, : row.values_at] = scales.flatten(1).view(torch.uint8)
    payload[:, row.values_at : row.values_at + row.values_nbytes] = codes
    payload[:, row.values_at + row.values_nbytes : row.indices_at] = 0
    narrow = index.to(torch.uint8) if row.index_nbytes == 1 else index.to(torch.uint16)
    payload[:, row.indices_at : row.used] = narrow.view(torch.uint8)
    payload[:, row.used :] = 0
    sent = _values(_codes(payload, row), scales, row)
    return (starts + index).where(real, row.n), sent.where(real, 0)


def _chunks(x: Tensor, chunk: int) -> list[Tensor]:
    """(r, n) as (r, whole chunks, chunk) and (r, 1, rest); empty ones are left out."""
    whole = x.shape[1] // chunk * chunk
    parts = [x[:, :whole].unflatten(1, (-1, chunk))] if whole else []
    return [*parts, x[:, whole:].unsqueeze(1)] if whole < x.shape[1] else parts


def _select(z: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each chunk, (r, c, length), its entries (r, c, min(k, length)): whether they carry a value, index, value."""
    length = z.shape[-1]
    k = min(k, length)
    magnitude = magnitude_bits(z)
    best = magnitude.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    index = best.where(magnitude.gather(-1, best) > 0, length).sort(dim=-1).values
    real = index < length
    value = z.gather(-1, index.clamp(max=length - 1)).where(real, 0)
    count = real.sum(-1, keepdim=True)
    last = index.gather(-1, (count - 1).clamp(min=0))
    nothing = torch.zeros_like(index[0, 0])
    nothing[0] = 1 if k > 1 else length
    return real, torch.where(count == 0, nothing, index.where(real, last)), value


def _grouped(x: Tensor, row: TopKRow) -> Tensor:
    """(r, entries) -> (r, groups, entries of a group), with zeros at the end."""
    size = row.group * row.k
    return torch.nn.functional.pad(x, (0, row.groups * size - row.entries)).unflatten(1, (row.groups, size))


def _sum(x: Tensor) -> Tensor:
    """Sum over the last dimension, in the order that :data:`LANES` states."""
    lanes = torch.nn.functional.pad(x, (0, -x.shape[-1] % LANES)).unflatten(-1, (-1, LANES))
    total = torch.zeros_like(lanes[..., 0, :])
    for i in range(lanes.shape[-2]):
        total = total + lanes[..., i, :]
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    return total[..., 0]


def _mean_of_groups(value: Tensor, row: TopKRow) -> Tensor:
    """(r, groups) float64: mean magnitudes, before they are rounded. What carries nothing is 0, and nothing else is."""
    wide = wide_magnitude(_grouped(value, row))
    return _sum(wide) / (wide != 0).sum(-1).clamp(min=1)


def _scales_of(value: Tensor, row: TopKRow) -> Tensor:
    """(r, groups, scales_of_group) float32."""
    if row.scales_of_group == 0:
        return value.new_zeros((value.shape[0], row.groups, 0), dtype=torch.float32)
    if row.bits == 1:
        scales = _mean_of_groups(value, row).unsqueeze(-1).float()
    elif row.bits == 2:
        wide = wide_magnitude(_grouped(value, row))
        high = wide >= _mean_of_groups(value, row).unsqueeze(-1)
        halves = [(_sum(wide.where(h, 0)), h.sum(-1)) for h in ((wide != 0) & ~high, (wide != 0) & high)]
        scales = torch.stack([total / count.clamp(min=1) for total, count in halves], -1).float()
    else:
        largest = magnitude_bits(_grouped(value, row)).max(-1, keepdim=True).values.view(value.dtype)
        wide = largest.double()
        scales = (wide / wide.new_full((), 127)).float()  # a tensor: on CUDA, not its reciprocal
    return scales.where(~scales.isnan(), torch.nan)  # one NaN for all


def _spread(scales: Tensor, row: TopKRow) -> Tensor:
    """(r, groups, s) -> (s, r, entries): to each entry the scales of its group."""
    return scales.repeat_interleave(row.group * row.k, dim=1)[:, : row.entries].movedim(-1, 0)


def _quantised(value: Tensor, scales: Tensor, row: TopKRow) -> Tensor:
    """The bytes of the values, (r, values_nbytes) uint8."""
    if row.bits == 32:
        return value.view(torch.uint8)
    if row.bits == 16:
        rounded = value.float().bfloat16()
        return rounded.where(~rounded.isnan(), torch.nan).view(torch.uint8)
    if row.bits == 8:
        (s,) = _spread(scales, row)
        usable = s.isfinite() & (s > 0)
        steps = (value / s.to(value.dtype)).where(usable, 0).round().clamp(-127, 127)
        return steps.to(torch.int8).view(torch.uint8)
    there = magnitude_bits(value) > 0
    plus = there & ~value.signbit()
    if row.bits == 1:
        return pack_bits(plus)
    (mean,) = _spread(_mean_of_groups(value, row).unsqueeze(-1), row)
    high = there & (wide_magnitude(value) >= mean)
    return pack_bits(torch.stack([plus, high], -1).flatten(1))


# decoding -------------------------------------------------------------------------------------------------------------


def _scales(payload: Tensor, row: TopKRow) -> Tensor:
    flat = payload[:, : row.values_at].contiguous().view(torch.float32)
    return flat.unflatten(1, (row.groups, row.scales_of_group))


def _codes(payload: Tensor, row: TopKRow) -> Tensor:
    """The values before they are scaled: (r, entries), or (r, entries, bits) bool for bits 1 and 2."""
    raw = payload[:, row.values_at : row.values_at + row.values_nbytes].contiguous()
    if row.bits <= 2:
        return unpack_bits(raw, row.entries * row.bits).unflatten(1, (row.entries, row.bits))
    return raw.view({8: torch.int8, 16: torch.bfloat16, 32: row.dtype}[row.bits])


def _values(codes: Tensor, scales: Tensor, row: TopKRow) -> Tensor:
    """(r, entries) of the row's dtype."""
    if row.bits >= 16:
        return codes.to(row.dtype)
    levels = _spread(scales, row).to(row.dtype)
    if row.bits == 8:
        return codes.to(row.dtype) * levels[0]
    size = levels[0] if row.bits == 1 else torch.where(codes[..., 1], levels[1], levels[0])
    return torch.where(codes[..., 0], size, -size)


def _chunked_indices(payload: Tensor, row: TopKRow) -> list[tuple[Tensor, int]]:
    """The indices of the whole chunks, (r, c, k) int64, and of the shorter one, (r, 1, k'); each with the length of a
    chunk."""
    raw = payload[:, row.indices_at : row.used].contiguous()
    flat = (raw if row.index_nbytes == 1 else raw.view(torch.uint16)).to(torch.int64)
    lengths = [row.chunk] * (row.whole > 0) + [row.n % row.chunk] * (row.chunks > row.whole)
    cut = row.whole * row.k
    parts = [flat[:, :cut].unflatten(1, (row.whole, row.k))] if cut else []
    return list(zip([*parts, flat[:, cut:].unsqueeze(1)] if row.chunks > row.whole else parts, lengths))


def _decode(payload: Tensor, row: TopKRow) -> tuple[Tensor, Tensor]:
    """The places of the entries, (r, entries), n for one that carries nothing, and their values, 0 for those."""
    places, start = [], 0
    for index, length in _chunked_indices(payload, row):
        real = index < length
        if index.shape[-1] > 1:
            step = index.diff()
            real[..., 1:] &= step > 0
            real[..., 0] &= step[..., 0] >= 0
        starts = torch.arange(start, start + index.shape[1] * length, length, device=payload.device).unsqueeze(-1)
        places.append((starts + index).where(real, row.n).flatten(1))
        start += index.shape[1] * length
    at = torch.cat(places, 1)
    values = _values(_codes(payload, row), _scales(payload, row), row)
    return at, values.where(at < row.n, 0)
