"""Every operator in plain PyTorch: the provider on any device, and the oracle of the native ones.

Written to be read. Speed is the native providers' business, but temporaries stay of the order of the input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

PIECE = 2**20
"""Elements that the parameter update works on at a time, so that its temporaries stay small."""

_BITS_OF = {torch.float32: torch.int32, torch.float64: torch.int64}
_LEAST_NORMAL = 0x00800000
"""Bits of the smallest float32 that is no denormal."""


def pack_bits(mask: Tensor) -> Tensor:
    """(..., n) bool -> (..., ceil(n / 8)) uint8, least significant bit first; unused bits are 0."""
    n = mask.shape[-1]
    octets = torch.nn.functional.pad(mask.to(torch.uint8), (0, -n % 8)).unflatten(-1, (-1, 8))
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=mask.device)
    return (octets * weights).sum(-1, dtype=torch.uint8)


def unpack_bits(bits: Tensor, n: int) -> Tensor:
    """(..., ceil(n / 8)) uint8 -> (..., n) bool: the inverse of :func:`pack_bits`."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits.unsqueeze(-1) >> shifts) & 1).flatten(-2)[..., :n].bool()


def masked(x: Tensor, active: Tensor | None) -> Tensor:
    """(r, n) with 0 where the bits of ``active`` are 0; itself without a mask."""
    return x if active is None else x.where(unpack_bits(active, x.shape[1]), 0)


def magnitude_bits(x: Tensor) -> Tensor:
    """The bits of |x| as an integer: ordered as |x| is, and NaN above all."""
    as_int = _BITS_OF[x.dtype]
    return x.contiguous().view(as_int) & torch.iinfo(as_int).max


def wide_magnitude(x: Tensor) -> Tensor:
    """|x| as float64; of float32 exactly, also where denormals are taken for 0 (``torch.set_flush_denormal``)."""
    wide = x.abs().double()
    if x.dtype != torch.float32:
        return wide
    bits = magnitude_bits(x)
    return torch.where(bits < _LEAST_NORMAL, bits.double() * 2.0**-149, wide)


def mask_of_columns(active: Tensor | None, start: int, stop: int) -> Tensor | None:
    """(r, ceil(n / 8)) -> the bits of the columns [start, stop), which begin at a whole byte; where they lie."""
    return None if active is None else active[:, start // 8 : (stop + 7) // 8]


def scatter_entries(place: Tensor, value: Tensor, out: Tensor, active: Tensor | None) -> None:
    """out <- values at their places, (r, entries) each, n for one that counts for nothing, and 0 elsewhere, and where
    the bits of ``active`` are 0. No other place occurs twice in a row."""
    rows, n = out.shape
    dense = out.new_zeros((rows, n + 1))  # the last column is for entries that count for nothing
    out.copy_(dense.scatter_(1, place, dense.gather(1, place) + value)[:, :-1])
    if active is not None:
        out.masked_fill_(~unpack_bits(active, n), 0)


def mean_of_entries(place: Tensor, value: Tensor, out: Tensor) -> None:
    """out, (n,), <- the mean over the rows, as for :func:`scatter_entries`, in their order."""
    dense = out.new_zeros(out.shape[0] + 1)
    for at, share in zip(place, value / value.new_full((), len(value))):
        dense.scatter_(0, at, dense.gather(0, at) + share)
    out.copy_(dense[:-1])


def _per_block(x: Tensor, block: int) -> list[Tensor]:
    """(r, n) as views (r, whole blocks, block) and (r, 1, rest); empty ones are left out."""
    whole = x.shape[1] // block * block
    views = [x[:, :whole].unflatten(1, (-1, block))] if whole else []
    return [*views, x[:, whole:].unsqueeze(1)] if whole < x.shape[1] else views


def _spread(scales: Tensor, n: int, block: int) -> Tensor:
    """(r, nblocks) -> (r, n): to each element the scale of its block."""
    return scales.repeat_interleave(block, dim=1)[:, :n] if scales.shape[1] > 1 else scales.expand(-1, n)


def _scales(z: Tensor, mask: Tensor | None, block: int, norm: int) -> Tensor:
    """(r, nblocks) float32: root mean square or mean magnitude of the active elements of each block, 0 where none."""
    out = []
    masks = [None] * 2 if mask is None else _per_block(mask, block)
    for part, active in zip(_per_block(z, block), masks):
        wide = part.double()
        count = wide.new_full((), part.shape[-1]) if active is None else active.sum(-1).clamp(min=1)
        mean = (wide.square() if norm == 2 else wide.abs()).sum(-1) / count
        out.append(mean.sqrt() if norm == 2 else mean)
    return torch.cat(out, dim=1).float()


def _encode(z: Tensor, mask: Tensor | None, payload: Tensor, block: int, norm: int) -> Tensor:
    """Writes C[z] to ``payload``; returns the scale of each element, (r, n), as it is in the payload."""
    n = z.shape[1]
    scales = _scales(z, mask, block, norm)
    plus = z >= 0 if mask is None else (z >= 0) & mask
    head = 4 * scales.shape[1]
    tail = head + (n + 7) // 8
    payload[:, :head] = scales.view(torch.uint8)
    payload[:, head:tail] = pack_bits(plus)
    payload[:, tail:] = 0
    return _spread(scales.to(z.dtype), n, block)


def sign_compress(x: Tensor, payload: Tensor, block: int, norm: int, active: Tensor | None = None) -> None:
    if x.numel() == 0:
        return
    mask = None if active is None else unpack_bits(active, x.shape[1])
    _encode(x if mask is None else x.where(mask, 0), mask, payload, block or x.shape[1], norm)


def sign_compress_with_feedback(
    x: Tensor, error: Tensor, new_error: Tensor, payload: Tensor, block: int, norm: int, active: Tensor | None = None
) -> None:
    if x.numel() == 0:
        return
    mask = None if active is None else unpack_bits(active, x.shape[1])
    z = x + error if mask is None else (x + error).where(mask, 0)
    s = _encode(z, mask, payload, block or x.shape[1], norm)
    residual = torch.where(z >= 0, z - s, z + s)
    new_error.copy_(residual if mask is None else residual.where(mask, 0))


def sign_compress_momentum(
    m: Tensor,
    grads: list[Tensor],
    offsets: list[int],
    beta: float,
    alpha: float,
    error: Tensor,
    new_error: Tensor,
    payload: Tensor,
    block: int,
    norm: int,
    active: Tensor | None,
    start: int,
    stop: int,
) -> None:
    rows = momentum_of_columns(m, grads, offsets, beta, alpha, payload.shape[0], start, stop)
    residual, after = (t.view(payload.shape[0], -1)[:, start:stop] for t in (error, new_error))
    mask = mask_of_columns(active, start, stop)
    sign_compress_with_feedback(rows, residual, after, payload, block, norm, mask)


def sign_reduce(
    payloads: Tensor, error: Tensor, new_error: Tensor, own: Tensor, block: int, norm: int, active: Tensor | None = None
) -> None:
    mean = torch.empty_like(error)
    sign_decompress_mean(payloads, mean, block)
    mask = None if active is None else active[None]
    sign_compress_with_feedback(mean[None], error[None], new_error[None], own[None], block, norm, mask)


def _decode(payload: Tensor, n: int, block: int, dtype: torch.dtype, world: int = 1) -> Tensor:
    """(r, nbytes) -> (r, n) of ``dtype``: +-scale / world for each element, the quotient rounded in ``dtype``."""
    head = 4 * (-(-n // block))
    scales = payload[:, :head].contiguous().view(torch.float32).to(dtype)
    share = _spread(scales if world == 1 else scales / scales.new_full((), world), n, block)
    return torch.where(unpack_bits(payload[:, head : head + (n + 7) // 8], n), share, -share)


def sign_decompress(payload: Tensor, out: Tensor, block: int, active: Tensor | None = None) -> None:
    if out.numel():
        out.copy_(_decode(payload, out.shape[1], block or out.shape[1], out.dtype))
        if active is not None:
            out.masked_fill_(~unpack_bits(active, out.shape[1]), 0)


def adam_in_columns_(
    apply_: Callable[..., None],
    rows: int,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    params: list[Tensor],
    offsets: list[int],
    step_sizes: list[float],
    sqrt_bias_corrections2: list[float],
    eps: float,
    decay: float,
    start: int,
    stop: int,
) -> None:
    """``apply_``, a provider of frozen_adam_apply_, on what of each parameter lies in the columns [start, stop)."""
    n = exp_avg.shape[0] // rows
    if stop - start == n:
        ms, vs = views(exp_avg, params, offsets), views(exp_avg_sq, params, offsets)
        return apply_(params, ms, vs, step_sizes, sqrt_bias_corrections2, eps, decay)
    places = [slice(r * n + start, r * n + stop) for r in range(rows)]
    for p, offset, step_size, correction in zip(params, offsets, step_sizes, sqrt_bias_corrections2):
        flat = p.reshape(-1)  # a copy where p is strided
        for place in places:
            low, high = max(offset, place.start), min(offset + p.numel(), place.stop)
            if low < high:
                piece, here = flat[low - offset : high - offset], slice(low, high)
                apply_([piece], [exp_avg[here]], [exp_avg_sq[here]], [step_size], [correction], eps, decay)
        if not p.is_contiguous():
            p.copy_(flat.view(p.shape))


def views(flat: Tensor, tensors: Sequence[Tensor], offsets: Sequence[int]) -> list[Tensor]:
    """The places of ``tensors`` in ``flat``, shaped like them."""
    return [flat[offset : offset + t.numel()].view(t.shape) for t, offset in zip(tensors, offsets)]


def write_columns(values: Tensor, outs: Sequence[Tensor], offsets: Sequence[int], n: int, start: int) -> None:
    """Writes ``values`` (r, k), the columns from ``start`` on of rows of ``n`` elements, to those ``outs`` that lie
    there: of any floating dtype and layout, each from its offset on in the rows end to end. What lies elsewhere is not
    touched."""
    rows, k = values.shape
    if outs and k == n and values.is_contiguous():
        torch._foreach_copy_(list(outs), views(values.view(-1), outs, offsets))
        return
    places: list[Tensor] = []
    parts: list[Tensor] = []
    strided: list[tuple[Tensor, Tensor]] = []
    for out, offset in zip(outs, offsets):
        here = list(_of_columns(offset, out.numel(), rows, n, start, k))
        if not here:
            continue
        flat = out.reshape(-1)  # a copy where out is strided
        for row, low, high in here:
            first = row * n + start
            places.append(flat[low - offset : high - offset])
            parts.append(values[row, low - first : high - first])
        if not out.is_contiguous():
            strided.append((out, flat))
    if places:
        torch._foreach_copy_(places, parts)
    for out, flat in strided:
        out.copy_(flat.view(out.shape))


def _of_columns(offset: int, numel: int, rows: int, n: int, start: int, k: int) -> Iterator[tuple[int, int, int]]:
    """What lies of ``numel`` elements from ``offset`` on in the columns from ``start`` on: row, first and end."""
    for row in range(offset // n if n else rows, rows):
        first = row * n + start
        low, high = max(offset, first), min(offset + numel, first + k)
        if offset + numel <= row * n:
            return
        if low < high:
            yield row, low, high


def sign_decompress_adam_(
    payload: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    params: list[Tensor],
    offsets: list[int],
    step_sizes: list[float],
    sqrt_bias_corrections2: list[float],
    eps: float,
    decay: float,
    block: int,
    active: Tensor | None,
    start: int,
    stop: int,
) -> None:
    rows = exp_avg.view(payload.shape[0], -1)
    mask = mask_of_columns(active, start, stop)
    sign_decompress(payload, rows[:, start:stop], block, mask)
    adam_in_columns_(
        frozen_adam_apply_, len(rows), exp_avg, exp_avg_sq, params, offsets, step_sizes, sqrt_bias_corrections2, eps,
        decay, start, stop,
    )  # fmt: skip


def sign_decompress_mean(payload: Tensor, out: Tensor, block: int) -> None:
    n, world = out.shape[0], payload.shape[0]
    if n == 0:
        return
    for rank in range(world):  # in rank order, so that the rounding is the same on every rank
        share = _decode(payload[rank : rank + 1], n, block or n, out.dtype, world)[0]
        if rank == 0:
            out.copy_(share)
        else:
            out.add_(share)


def pack_nonzero(x: Tensor, bits: Tensor) -> None:
    bits.copy_(pack_bits(x != 0))


def zero_inactive_(x: Tensor, bits: Tensor) -> None:
    x.masked_fill_(~unpack_bits(bits, x.shape[0]), 0)


def square_sum(xs: list[Tensor]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=xs[0].device)
    for x in xs:
        # A norm accumulates without a float64 copy of x; squaring it back keeps inf and NaN.
        total += torch.linalg.vector_norm(x, 2, dtype=torch.float64).square()
    return total


def square_sums(xs: list[Tensor]) -> Tensor:
    return torch.stack([square_sum([x]) for x in xs])


def momentum(m: Tensor, grads: list[Tensor], offsets: list[int], beta: float, alpha: float, out: Tensor) -> None:
    torch.mul(m, beta, out=out)
    for place, g in zip(views(out, grads, offsets), grads):
        place.add_(g, alpha=alpha)


def momentum_of_columns(
    m: Tensor,
    grads: Sequence[Tensor],
    offsets: Sequence[int],
    beta: float,
    alpha: float,
    rows: int,
    start: int,
    stop: int,
    form: Callable[..., None] = momentum,
) -> Tensor:
    """b m + a g, formed by ``form``: the columns [start, stop) of ``m`` seen as ``rows`` rows; a new tensor
    (rows, stop - start)."""
    out = m.new_empty((rows, stop - start))
    runs = runs_of((start, stop), rows, m.numel() // rows)
    for (first, end), to in zip(runs, out.view(len(runs), -1)):
        form(m[first:end], *pieces_between(grads, offsets, first, end), beta, alpha, to)
    return out


def runs_of(chunk: tuple[int, int], rows: int, n: int) -> list[tuple[int, int]]:
    """Elements [first, end) of ``rows`` rows of ``n``, end to end, that are in ``chunk``: one run if it is all of them,
    else one of each row."""
    start, stop = chunk
    return [(0, rows * n)] if stop - start == n else [(r * n + start, r * n + stop) for r in range(rows)]


def pieces_between(
    grads: Sequence[Tensor], offsets: Sequence[int], first: int, end: int
) -> tuple[list[Tensor], list[int]]:
    """What of ``grads``, which start at ``offsets`` of a flat buffer, lies in its elements [first, end); and where it
    starts in these."""
    there = [(g, o) for g, o in zip(grads, offsets) if o < end and first < o + g.numel()]
    pieces = [
        g if first <= o and o + g.numel() <= end else g.reshape(-1)[max(first - o, 0) : end - o] for g, o in there
    ]
    return pieces, [max(o - first, 0) for _, o in there]


def frozen_adam_apply_(
    params: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    step_sizes: list[float],
    sqrt_bias_corrections2: list[float],
    eps: float,
    decay: float,
) -> None:
    for p, m, v, step_size, correction in zip(params, exp_avgs, exp_avg_sqs, step_sizes, sqrt_bias_corrections2):
        if p.is_contiguous() and m.is_contiguous() and v.is_contiguous():
            pieces = zip(p.view(-1).split(PIECE), m.view(-1).split(PIECE), v.view(-1).split(PIECE))
        else:
            pieces = zip((p,), (m,), (v,))
        for p_, m_, v_ in pieces:
            update = v_.sqrt().add_(eps * correction)
            torch.div(m_ * (step_size * correction), update, out=update).masked_fill_(v_ == 0, 0)
            # Not p.mul_().sub_(): a half-precision p would be rounded twice.
            p_.copy_((p_.to(torch.promote_types(p.dtype, m.dtype)) * decay).sub_(update))
