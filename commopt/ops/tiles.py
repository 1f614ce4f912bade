"""Tiles: how the work of a CUDA kernel is cut, and the arguments that say so.

Rows are cut into tiles as ``kernels/cuda/payload.cuh`` has it. Kernels get the tensors that lie in rows (gradients,
parameters) as a table by value, of limited size; where there are more, the tiles are done in several launches.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from commopt.ops.cuda_module import launch

LARGEST = 8192
"""Elements of the largest block that one team of threads does in one pass: 1024 threads of 8."""
TILE = 2048
"""Elements of a tile of larger blocks, and of whatever has no blocks: 256 threads of 8."""
FINE = 64
"""Elements of a tile where so many tensors lie that one launch cannot take those of a tile: fewer than MAX_RUNS."""
MAX_RUNS, MAX_ENTRIES = 95, 70
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_P, _I64, _U32, _I32, _F32 = ctypes.c_void_p, ctypes.c_longlong, ctypes.c_uint32, ctypes.c_int32, ctypes.c_float


def _struct(name: str, **fields: Any) -> type[Structure]:
    return type(name, (Structure,), {"_fields_": list(fields.items())})


# As in the sources, field by field.
Layout = _struct(
    "Layout", n=_I64, block=_I64, nbytes=_I64, nblocks=_U32, tiles_per_block=_U32, tile=_U32, first=_U32, last=_U32,
    unused=_U32,
)  # fmt: skip
Run = _struct("Run", start=_I64, end=_I64, data=_P, step=_F32, eps=_F32, kind=_I32, unused=_I32)
Runs = _struct("Runs", count=_I64, run=Run * MAX_RUNS)
Compression = _struct(
    "Compression", at=Layout, error=_P, new_error=_P, payload=_P, active=_P, partials=_P, error_stride=_I64,
    new_error_stride=_I64, active_stride=_I64, norm=_I64,
)  # fmt: skip
CompressRows = _struct("CompressRows", to=Compression, x=_P, stride=_I64)
Momentum = _struct("Momentum", m=_P, stride=_I64, beta=_F32, alpha=_F32, grads=Runs)
CompressMomentum = _struct("CompressMomentum", to=Compression, of=Momentum)
MomentumTo = _struct("MomentumTo", at=Layout, out=_P, stride=_I64, of=Momentum)
Reduce = _struct("Reduce", to=Compression, payloads=_P, ranks=_I64)
Decompression = _struct("Decompression", at=Layout, payload=_P, out=_P, active=_P, out_stride=_I64, active_stride=_I64)
DecompressMean = _struct("DecompressMean", at=Layout, payloads=_P, out=_P, ranks=_I64)
DecompressAdam = _struct("DecompressAdam", of=Decompression, v=_P, stride=_I64, decay=_F32, params=Runs)
Mask = _struct("Mask", at=Layout, x=_P, bits=_P)
Entry = _struct(
    "Entry", first=_I64, n=_I64, data=_P, m=_P, v=_P, step=_F32, eps=_F32, kind=_I32, unused=_I32
)  # fmt: skip
Entries = _struct("Entries", partials=_P, tile=_I64, decay=_F32, count=_I64, entry=Entry * MAX_ENTRIES)
Total = _struct("Total", partials=_P, out=_P, count=_I64)


def _threads(elements: int) -> int:
    """Threads, in whole warps, that ``elements`` elements take, 8 to each."""
    return 32 * -(-elements // 256)


@dataclass(frozen=True)
class Tiling:
    """Partition of rows: ``struct Layout`` without the part of one launch."""

    rows: int
    n: int
    block: int
    tile: int
    nbytes: int = 0

    @classmethod
    def of(cls, rows: int, n: int, block: int, nbytes: int) -> Tiling:
        """For rows of a payload: a block is one tile, or several where it is too large."""
        block = min(block or n, n)
        return cls(rows, n, block, block if block <= LARGEST else TILE, nbytes)

    def fine(self) -> Tiling:
        """The same in tiles of few elements: for kernels that need nothing of the rest of a block."""
        return replace(self, tile=min(self.tile, FINE))

    @property
    def nblocks(self) -> int:
        return -(-self.n // self.block)

    @property
    def tiles_per_block(self) -> int:
        return -(-self.block // self.tile)

    @property
    def tiles(self) -> int:
        return self.rows * self.nblocks * self.tiles_per_block

    def layout(self, first: int, last: int) -> Structure:
        """Of a launch that does the tiles [first, last)."""
        return Layout(
            self.n, self.block, self.nbytes, self.nblocks, self.tiles_per_block, self.tile, first, last
        )  # fmt: skip

    def launch(self, name: str, argument: Structure, device: torch.device, first: int, last: int) -> None:
        """Starts a kernel on the tiles [first, last): several small ones to a block of threads."""
        x = _threads(self.tile)
        teams = max(1, 256 // x)
        launch(name, -(-(last - first) // teams), (x, teams), argument, device)

    def start(self, tile: int, stride: int) -> int:
        """The place in the buffer of a tile; rows are ``stride`` elements apart."""
        row, block = divmod(tile // self.tiles_per_block, self.nblocks)
        return row * stride + block * self.block + tile % self.tiles_per_block * self.tile

    def after(self, place: int, stride: int) -> int:
        """The first tile that ends after a place in the buffer."""
        row, i = divmod(max(place, 0), stride) if self.rows > 1 else (0, max(place, 0))
        if i >= self.n:
            row, i = row + 1, 0
        block, rest = divmod(i, self.block)
        return min((row * self.nblocks + block) * self.tiles_per_block + rest // self.tile, self.tiles)


def flat(n: int) -> Tiling:
    """For ``n`` elements without blocks."""
    return Tiling(1, n, n, TILE)


Piece = tuple[int, int, Structure]
"""The first tile of a launch, the tile after its last one, and what is its own."""


def pieces(
    tiling: Tiling,
    stride: int,
    tensors: Sequence[Tensor],
    offsets: Sequence[int],
    factors: Sequence[tuple[float, float]],
) -> list[Piece] | None:
    """Launches (first tile, last tile, ``Runs``) that together do all tiles, each with the runs that it needs.

    The tensors are contiguous and of :data:`KINDS`. None if one tile alone needs more than a launch can take, which
    those of :meth:`Tiling.fine` never do.
    """
    runs = [
        Run(o, o + x.numel(), x.data_ptr(), *f, KINDS[x.dtype])
        for x, o, f in zip(tensors, offsets, factors)
        if x.numel() > 0
    ]
    out: list[Piece] = []
    first, k = 0, 0
    while first < tiling.tiles:
        start = tiling.start(first, stride)
        while k < len(runs) and runs[k].end <= start:
            k += 1
        these, rest = runs[k : k + MAX_RUNS], runs[k + MAX_RUNS : k + MAX_RUNS + 1]
        last = tiling.after(rest[0].start, stride) if rest else tiling.tiles
        if last <= first:
            return None
        out.append((first, last, Runs(len(these), (Run * MAX_RUNS)(*these))))
        first = last
    return out


def any_pieces(
    tiling: Tiling,
    stride: int,
    tensors: Sequence[Tensor],
    offsets: Sequence[int],
    factors: Sequence[tuple[float, float]],
) -> tuple[Tiling, list[Piece]]:
    """:func:`pieces` for kernels that can do with a fine tiling: that one, if need be, and its launches."""
    out = pieces(tiling, stride, tensors, offsets, factors)
    if out is None:
        tiling = tiling.fine()
        out = pieces(tiling, stride, tensors, offsets, factors)
        assert out is not None
    return tiling, out


def momentum_rows(
    tiling: Tiling,
    m: Tensor,
    stride: int,
    grads: list[Tensor],
    offsets: list[int],
    beta: float,
    alpha: float,
    out: Tensor,
) -> None:
    """out (r, n) <- beta m + alpha g, rows that begin ``stride`` elements apart in ``m`` and in what offsets count."""
    tiling, pieces = any_pieces(tiling, stride, grads, offsets, [(0, 0)] * len(grads))
    for first, last, runs in pieces:
        of = Momentum(m.data_ptr(), stride, beta, alpha, runs)
        argument = MomentumTo(tiling.layout(first, last), out.data_ptr(), out.stride(0), of)
        tiling.launch("momentum", argument, m.device, first, last)


def columns(x: Tensor, rows: int, start: int, stop: int, unit: int = 1) -> Tensor:
    """Some columns of a flat tensor, or of a mask, that is ``rows`` rows end to end; ``unit`` elements to an item."""
    return x.view(rows, -1)[:, start // unit : -(-stop // unit)]


def contiguous(tensors: Sequence[Tensor]) -> list[Tensor] | None:
    """The tensors as the kernels can read them: copies of those with strides. None where one is float64."""
    if any(x.dtype not in KINDS for x in tensors):
        return None
    return [x.contiguous() for x in tensors]
