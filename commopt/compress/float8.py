"""Floats of 8 bits and one float32 scale a block, by torch's casts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from commopt.compress.compressor import Compressor, align
from commopt.ops.reference_integers import in_blocks, usable

_FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass(frozen=True)
class Float8(Compressor):
    """C(x) = s cast(x / s), s = max |x| / the format's largest number, over a block.

    Small elements keep more digits beside large ones than with :class:`~commopt.compress.Int8`, large ones fewer. A
    payload row is ``[float32 scales][one byte an element][zeros up to a multiple of 16]``. A block that holds inf or
    NaN has the scale NaN, and decodes to NaN; one whose scale is below the smallest normal float32 decodes to zeros.
    float64 is rounded to float32 before the cast, as torch does it.

    Args:
        format: "e4m3" (3 bits of mantissa, largest number 448) or "e5m2" (2 bits, 57344).
        block: elements that share a scale, a positive multiple of 8. The last one of a row may be shorter.

    Raises:
        ValueError: for a format or block out of range.
    """

    format: Literal["e4m3", "e5m2"] = "e4m3"
    block: int = 128

    def __post_init__(self) -> None:
        block = self.block
        if self.format not in _FORMATS:
            raise ValueError(f"format must be 'e4m3' or 'e5m2', got {self.format!r}")
        if not isinstance(block, int) or isinstance(block, bool) or block < 8 or block % 8:
            raise ValueError(f"block must be a positive multiple of 8, got {block!r}")

    @property
    def chunk_multiple(self) -> int | None:
        return self.block

    def _head(self, n: int) -> int:
        """Bytes of the scales."""
        return 4 * -(-n // self.block)

    def nbytes(self, n: int, dtype: torch.dtype = torch.float32) -> int:
        return align(self._head(n) + n)

    def compress(self, x: Tensor, payload: Tensor) -> None:
        n, head, cast = x.shape[1], self._head(x.shape[1]), _FORMATS[self.format]
        if n == 0:
            return
        parts, top = in_blocks(x, self.block), torch.finfo(cast).max
        room = parts.abs()
        scales = usable(room.amax(-1) / x.new_full((), top), top)
        wide = scales.to(x.dtype).unsqueeze(-1)
        torch.div(parts, wide.where(wide > 0, torch.inf), out=room)  # above top by so little that the cast rounds to it
        payload[:, :head] = scales.view(torch.uint8)
        payload[:, head : head + n].view(cast).copy_(room.flatten(1)[:, :n])
        payload[:, head + n :] = 0

    def decompress(self, payload: Tensor, out: Tensor) -> None:
        n, head, block = out.shape[1], self._head(out.shape[1]), self.block
        if n == 0:
            return
        halves, factor = self._halves(payload[:, head : head + n])
        scales = payload[:, :head].contiguous().view(torch.float32).to(out.dtype) * factor
        out.copy_(halves)
        whole = n // block
        out[:, : whole * block].unflatten(1, (whole, block)).mul_(scales[:, :whole, None])
        out[:, whole * block :].mul_(scales[:, whole:])

    def _halves(self, codes: Tensor) -> tuple[Tensor, float]:
        """What ``codes`` stand for, as float16, but for a factor, a power of two. On a CPU torch takes twenty times as
        long to cast from 8 bits: a float16 has the same digits, and an exponent of 5 bits."""
        bits = codes.view(torch.int8).to(torch.int16)
        if self.format == "e5m2":
            return bits.bitwise_left_shift_(8).view(torch.float16), 1.0
        return bits.bitwise_left_shift_(7).bitwise_and_(~0x4000).view(torch.float16), 256.0  # biases: 7 and 15

    def is_sound(self, payload: Tensor, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
        scales = payload.view(torch.float32)[:, : -(-n // self.block)]
        codes = payload[:, self._head(n) : self._head(n) + n]
        infinite = 0x7F if self.format == "e4m3" else 0x7C  # NaN; inf and NaN
        return ((scales >= 0) & (scales < float("inf"))).all() & ((codes & infinite) != infinite).all()
