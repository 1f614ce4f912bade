"""Integers of 8, 4 and 2 bits, and floats of 8, in plain PyTorch: what :mod:`commopt.ops.integers` says, on any device.

Written to be read, as :mod:`commopt.ops.reference`. Rows are padded with zeros to whole blocks where that is simpler.
"""

from __future__ import annotations

import torch
from torch import Tensor

from commopt.ops.integers import E4M3, E5M2, LARGEST_CODE, width
from commopt.ops.reference import mask_of_columns, momentum_of_columns, unpack_bits, write_columns

_FLOATS = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}
_WORD = 0xFFFFFFFF
_STEP = 0x9E3779B9


def in_blocks(x: Tensor, block: int) -> Tensor:
    """(r, n) -> (r, ceil(n / block), block), zeros after the end of a row; a view where nothing is after it."""
    odd = -x.shape[1] % block
    return (torch.nn.functional.pad(x, (0, odd)) if odd else x).unflatten(1, (-1, block))


def usable(scales: Tensor, reach: float) -> Tensor:
    """As float32: those below the smallest normal number are 0; NaN are those of which ``reach``, that many of which
    decoding may come to, are not finite."""
    scales = scales.float()
    scales = scales.where(scales >= torch.finfo(torch.float32).tiny, scales * 0)
    return scales.where((scales * reach).isfinite(), torch.nan)


def rotate(x: Tensor, block: int) -> Tensor:
    """The normalised Walsh-Hadamard transform of each block of the rows of ``x`` (r, n), which is its own inverse.

    A shorter last block is transformed in pieces: as its length is a sum of powers of two, the largest first.
    """
    n = x.shape[1]
    whole = n // block * block
    parts = [_hadamard(x[:, :whole].unflatten(1, (-1, block))).flatten(1)] if whole else []
    for bit in reversed(range(block.bit_length())):
        if n % block >> bit & 1:
            parts.append(_hadamard(x[:, whole : whole + (1 << bit)]))
            whole += 1 << bit
    return torch.cat(parts, dim=1)


def _hadamard(x: Tensor) -> Tensor:
    """Of the last dimension, a power of two."""
    size, half = x.shape[-1], 1
    while half < size:
        low, high = x.unflatten(-1, (-1, 2, half)).unbind(-2)
        x = torch.stack([low + high, low - high], dim=-2).flatten(-3)
        half *= 2
    doublings = size.bit_length() - 1
    return x * (0.5 ** (doublings // 2) * (0.5**0.5 if doublings % 2 else 1.0))


def _tree_sum(x: Tensor) -> Tensor:
    """The sum over the last dimension, in the one order that all providers have: groups of 32 elements, each with its
    neighbour, until one is left; of that, halves."""
    x = torch.nn.functional.pad(x, (0, -x.shape[-1] % 32)).unflatten(-1, (-1, 32))
    while x.shape[-2] > 1:
        x = x[..., 0::2, :] + x[..., 1::2, :]
    x = x.squeeze(-2)
    while x.shape[-1] > 1:
        low, high = x.chunk(2, dim=-1)
        x = low + high
    return x.squeeze(-1)


def _scales(y: Tensor, mask: Tensor | None, bits: int, block: int, stochastic: bool, rotated: bool) -> Tensor:
    """(r, nblocks) float32. mask: of what counts in a mean; None for all."""
    parts, reach = in_blocks(y, block), LARGEST_CODE[bits] * (block if rotated else 1)
    if bits == 2 and not stochastic:
        here = torch.ones_like(y, dtype=torch.bool) if mask is None else mask
        counts = in_blocks(here, block).sum(-1).clamp(min=1)
        return usable((_tree_sum(parts.double().square()) / counts).sqrt(), reach)
    most = y.new_full((), LARGEST_CODE[bits])  # a tensor: on CUDA, not its reciprocal
    return usable(parts.abs().amax(-1) / most, reach)


def _times(h: Tensor, factor: int) -> Tensor:
    """h * factor mod 2**32, of words in int64, without overflow."""
    return (h * (factor & 0xFFFF) + ((h * (factor >> 16) & 0xFFFF) << 16)) & _WORD


def _mix(h: Tensor) -> Tensor:
    """The finaliser of MurmurHash3, of words in int64."""
    h = _times(h ^ (h >> 16), 0x85EBCA6B)
    h = _times(h ^ (h >> 13), 0xC2B2AE35)
    return h ^ (h >> 16)


def _words(x: Tensor) -> Tensor:
    """The bits of x as float32, in int64."""
    return x.float().view(torch.int32).long() & _WORD


def _hashes(parts: Tensor, scales: Tensor, seed: int) -> Tensor:
    """Words in int64, for ``parts`` (r, nblocks, block)."""
    key = _mix(_words(scales) ^ seed).unsqueeze(-1)
    place = torch.arange(parts.shape[-1], device=parts.device)
    return _mix(((_words(parts) ^ key) + _times(place, _STEP)) & _WORD)


def _float_codes(t: Tensor, hashes: Tensor | None, kind: int) -> Tensor:
    """int64, 0 to 255: ``t`` as floats of 8 bits, to nearest without ``hashes``."""
    t = t.float().clamp(-LARGEST_CODE[kind], LARGEST_CODE[kind])
    if hashes is None:
        return t.to(_FLOATS[kind]).view(torch.uint8).long()
    mantissa = kind % 10
    dropped, bias = 23 - mantissa, 7 if kind == E4M3 else 15
    u = _words(t) & 0x7FFFFFFF
    normal = (u + (hashes >> 32 - dropped) >> dropped) - (127 - bias << mantissa)
    small = (t.abs() * 2.0 ** (bias - 1 + mantissa) + (hashes >> 8).float() * 2.0**-24).floor().long()
    return torch.where(u < 128 - bias << 23, small, normal) + (_words(t) >> 31 << 7)


def _floats(codes: Tensor, kind: int) -> Tensor:
    """Values of codes, 0 to 255, as float32. (torch's own cast takes long on a CPU, and knows inf and NaN, of
    which there are no codes here.)"""
    mantissa, bias = kind % 10, 7 if kind == E4M3 else 15
    digits = codes & 0x7F
    small = digits.float() * 2.0 ** (1 - bias - mantissa)
    normal = ((digits << 23 - mantissa) + (127 - bias << 23)).to(torch.int32).view(torch.float32)
    size = torch.where(digits < 1 << mantissa, small, normal)
    return torch.where(codes > 0x7F, -size, size)


def _codes(y: Tensor, scales: Tensor, bits: int, block: int, stochastic: bool, seed: int) -> Tensor:
    """(r, n) int64: what is sent of y, as whole numbers; of 2 bits 0 to 3, of floats 0 to 255."""
    parts, top = in_blocks(y, block), LARGEST_CODE[bits]
    good = (scales > 0).unsqueeze(-1)
    wide = scales.to(y.dtype).unsqueeze(-1)
    t = (parts * wide.reciprocal()).where(good, 0)
    hashes = _hashes(parts, scales, seed) if stochastic else None
    if bits in _FLOATS:
        return _float_codes(t, hashes, bits).where(good, 0).flatten(1)[:, : y.shape[1]]
    if hashes is not None:
        t = (t + 1.5 if bits == 2 else t) + (hashes >> 8).to(t.dtype) * 2.0**-24
    t = t.floor() + 2 if bits == 2 and not stochastic else t.floor() if stochastic else t.round()
    t = t.clamp(0, 3) if bits == 2 else t.clamp(-top, top)
    return t.where(good, 2 if bits == 2 else 0).long().flatten(1)[:, : y.shape[1]]


def _pack(codes: Tensor, bits: int) -> Tensor:
    """(r, n) -> (r, ceil(n bits / 8)) uint8, the first in the lowest ``bits``, 8, 4 or 2."""
    per = 8 // bits
    octets = torch.nn.functional.pad(codes & (2**bits - 1), (0, -codes.shape[1] % per)).unflatten(1, (-1, per))
    shifts = bits * torch.arange(per, device=codes.device)
    return (octets << shifts).sum(-1).to(torch.uint8)


def _encode(
    z: Tensor, mask: Tensor | None, payload: Tensor, bits: int, block: int, stochastic: bool, rotated: bool, seed: int
) -> None:
    """Writes C[z] to ``payload``."""
    y = rotate(z, block) if rotated else z
    scales = _scales(y, None if rotated else mask, bits, block, stochastic, rotated)
    codes = _pack(_codes(y, scales, bits, block, stochastic, seed), width(bits))
    head = 4 * scales.shape[1]
    tail = head + codes.shape[1]
    payload[:, :head] = scales.view(torch.uint8)
    payload[:, head:tail] = codes
    payload[:, tail:] = 0


def int_compress(
    x: Tensor,
    payload: Tensor,
    bits: int,
    block: int,
    stochastic: bool,
    rotated: bool,
    seed: int,
    active: Tensor | None = None,
) -> None:
    if x.numel():
        mask = None if active is None else unpack_bits(active, x.shape[1])
        z = x if mask is None else x.where(mask, 0)
        _encode(z, mask, payload, bits, block, stochastic, rotated, seed)


def int_compress_with_feedback(
    x: Tensor,
    error: Tensor,
    new_error: Tensor,
    payload: Tensor,
    bits: int,
    block: int,
    stochastic: bool,
    rotated: bool,
    seed: int,
    active: Tensor | None = None,
) -> None:
    if x.numel() == 0:
        return
    mask = None if active is None else unpack_bits(active, x.shape[1])
    z = x + error if mask is None else (x + error).where(mask, 0)
    _encode(z, mask, payload, bits, block, stochastic, rotated, seed)
    sent = _decode(payload, z.shape[1], bits, block, z.dtype)
    rest = z - (rotate(sent, block) if rotated else sent)
    new_error.copy_(rest if mask is None else rest.where(mask, 0))


def int_compress_momentum(
    m: Tensor,
    grads: list[Tensor],
    offsets: list[int],
    beta: float,
    alpha: float,
    error: Tensor,
    new_error: Tensor,
    payload: Tensor,
    bits: int,
    block: int,
    stochastic: bool,
    rotated: bool,
    seed: int,
    active: Tensor | None,
    start: int,
    stop: int,
) -> None:
    rows = momentum_of_columns(m, grads, offsets, beta, alpha, payload.shape[0], start, stop)
    residual, after = (t.view(payload.shape[0], -1)[:, start:stop] for t in (error, new_error))
    mask = mask_of_columns(active, start, stop)
    int_compress_with_feedback(rows, residual, after, payload, bits, block, stochastic, rotated, seed, mask)


def int_reduce(
    payloads: Tensor,
    error: Tensor,
    new_error: Tensor,
    own: Tensor,
    bits: int,
    block: int,
    stochastic: bool,
    rotated: bool,
    seed: int,
    active: Tensor | None = None,
) -> None:
    mean = torch.empty_like(error)
    int_decompress_mean(payloads, mean, bits, block, rotated)
    mask = None if active is None else active[None]
    rows = mean[None], error[None], new_error[None], own[None]
    int_compress_with_feedback(*rows, bits, block, stochastic, rotated, seed, mask)


def _decode(payload: Tensor, n: int, bits: int, block: int, dtype: torch.dtype, world: int = 1) -> Tensor:
    """(r, nbytes) -> (r, n) of ``dtype``, still rotated: code * (scale / world), the quotient rounded in ``dtype``."""
    head, size = 4 * -(-n // block), width(bits)
    per = 8 // size
    scales = payload[:, :head].contiguous().view(torch.float32).to(dtype)
    shares = scales if world == 1 else scales / scales.new_full((), world)
    octets = payload[:, head : head + -(-n // per)].long().unsqueeze(-1)
    codes = (octets >> size * torch.arange(per, device=payload.device) & (2**size - 1)).flatten(1)[:, :n]
    if bits in (8, 4):
        codes = (codes ^ (1 << bits - 1)) - (1 << bits - 1)
    values = _floats(codes, bits).to(dtype) if bits in _FLOATS else codes.to(dtype) - (1.5 if bits == 2 else 0)
    return values * shares.repeat_interleave(block, dim=1)[:, :n]


def int_decompress(
    payload: Tensor, out: Tensor, bits: int, block: int, rotated: bool, active: Tensor | None = None
) -> None:
    if out.numel():
        y = _decode(payload, out.shape[1], bits, block, out.dtype)
        out.copy_(rotate(y, block) if rotated else y)
        if active is not None:
            out.masked_fill_(~unpack_bits(active, out.shape[1]), 0)


def int_decompress_to(
    payload: Tensor,
    outs: list[Tensor],
    offsets: list[int],
    numel: int,
    bits: int,
    block: int,
    rotated: bool,
    active: Tensor | None,
    start: int,
    stop: int,
) -> None:
    values = torch.empty(payload.shape[0], stop - start, dtype=torch.float32, device=payload.device)
    mask = mask_of_columns(active, start, stop)
    int_decompress(payload, values, bits, block, rotated, mask)
    write_columns(values, outs, offsets, numel // payload.shape[0], start)


def int_decompress_mean(payload: Tensor, out: Tensor, bits: int, block: int, rotated: bool) -> None:
    n, world = out.shape[0], payload.shape[0]
    if n == 0:
        return
    total = torch.empty_like(out)
    for rank in range(world):  # in rank order, so that the rounding is the same on every rank
        share = _decode(payload[rank : rank + 1], n, bits, block, out.dtype, world)[0]
        total = share if rank == 0 else total.add_(share)
    out.copy_(rotate(total[None], block)[0] if rotated else total)
