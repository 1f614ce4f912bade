"""Native CUDA providers: ``kernels/cuda`` through CuPy.

What a kernel does not handle (float64, a payload that is not on 4 bytes) goes to the reference, as in
:mod:`commopt.ops.native`. Nothing here waits for the device.

Rows may be strided: a row tensor of two dimensions has its own ``stride(0)``, and the offsets of gradients and
parameters count from its first element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from ctypes import Structure

import torch
from torch import Tensor

from commopt.ops import catalogue, cuda_integers, cuda_threshold, cuda_top_k, reference
from commopt.ops import tiles as t
from commopt.ops.arguments import Served, pointer, serves, strides
from commopt.ops.cuda_module import launch, provider, with_warning

SUM_TILE = 16384
"""Elements of a partial sum of squares."""


def _readable(x: Tensor) -> bool:
    return x.dtype in t.KINDS and x.is_contiguous()


def _write_back(tensors: Sequence[Tensor], changed: Sequence[Tensor]) -> None:
    """To those with strides what was done to their copies."""
    for x, y in zip(tensors, changed):
        if x is not y:
            x.copy_(y)
    torch.autograd.graph.increment_version(list(tensors))  # as in native.py


# compression ----------------------------------------------------------------------------------------------------------


def _compress(
    name: str,
    pieces: Sequence[tuple[int, int, Callable[[Structure], Structure]]],
    tiling: t.Tiling,
    error: Tensor | None,
    new_error: Tensor | None,
    payload: Tensor,
    norm: int,
    active: Tensor | None,
) -> None:
    """Runs kernel ``name`` on each piece, with the argument that the piece makes of ``struct Compression``; then, where
    blocks have several tiles, what has to wait for all of them."""
    rows, device, partials = tiling.rows, payload.device, None
    if tiling.tiles_per_block > 1:
        partials = torch.empty((tiling.tiles, 2), dtype=torch.float64, device=device)
    apart = strides(error, new_error, active)
    pointers = [pointer(x) for x in (error, new_error, payload, active, partials)]
    for first, last, argument in pieces:
        to = t.Compression(tiling.layout(first, last), *pointers, *apart, norm)
        tiling.launch(name, argument(to), device, first, last)
    if partials is None:
        return
    to = t.Compression(tiling.layout(0, tiling.tiles), *pointers, *apart, norm)
    x = min(1024, 32 * -(-tiling.tiles_per_block // 32))
    launch("sign_scales", rows * tiling.nblocks, (x, 1), to, device)
    if error is not None:
        tiling.launch("sign_residuals", to, device, 0, tiling.tiles)


def _compress_rows(
    x: Tensor,
    error: Tensor | None,
    new_error: Tensor | None,
    payload: Tensor,
    block: int,
    norm: int,
    active: Tensor | None,
) -> None:
    rows, n = x.shape
    if rows and n:
        tiling = t.Tiling.of(rows, n, block, payload.shape[1])
        piece = 0, tiling.tiles, lambda to: t.CompressRows(to, x.data_ptr(), x.stride(0))
        _compress("sign_compress", [piece], tiling, error, new_error, payload, norm, active)


def _sign_compress(x: Tensor, payload: Tensor, block: int, norm: int, active: Tensor | None = None) -> Served:
    if not serves(x, payload):
        return NotImplemented
    _compress_rows(x, None, None, payload, block, norm, active)


def _sign_compress_with_feedback(
    x: Tensor, error: Tensor, new_error: Tensor, payload: Tensor, block: int, norm: int, active: Tensor | None = None
) -> Served:
    if not serves(x, payload):
        return NotImplemented
    _compress_rows(x, error, new_error, payload, block, norm, active)


def _sign_compress_momentum(
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
) -> Served:
    rows, n = payload.shape[0], stop - start
    if n == 0:
        return
    mine = t.contiguous(grads) if serves(m, payload) else None
    if mine is None:
        return NotImplemented
    m, error, new_error = (t.columns(x, rows, start, stop) for x in (m, error, new_error))
    active = None if active is None else t.columns(active, rows, start, stop, 8)
    offsets, stride = [o - start for o in offsets], m.stride(0)
    tiling = t.Tiling.of(rows, n, block, payload.shape[1])
    pieces = t.pieces(tiling, stride, mine, offsets, [(0, 0)] * len(mine))
    if pieces is None:  # too many tensors in a block to do it in one pass
        x = m.new_empty((rows, n))
        t.momentum_rows(tiling, m, stride, mine, offsets, beta, alpha, x)
        return _compress_rows(x, error, new_error, payload, block, norm, active)

    def with_runs(runs: Structure) -> Callable[[Structure], Structure]:
        return lambda to: t.CompressMomentum(to, t.Momentum(m.data_ptr(), stride, beta, alpha, runs))

    arguments = [(first, last, with_runs(runs)) for first, last, runs in pieces]
    _compress("sign_compress_momentum", arguments, tiling, error, new_error, payload, norm, active)


def _sign_reduce(
    payloads: Tensor, error: Tensor, new_error: Tensor, own: Tensor, block: int, norm: int, active: Tensor | None = None
) -> Served:
    if not serves(error, payloads, own):
        return NotImplemented
    ranks, nbytes = payloads.shape
    if error.shape[0]:
        tiling = t.Tiling.of(1, error.shape[0], block, nbytes)
        piece = 0, tiling.tiles, lambda to: t.Reduce(to, payloads.data_ptr(), ranks)
        _compress("sign_reduce", [piece], tiling, error, new_error, own, norm, active)


# decompression --------------------------------------------------------------------------------------------------------


def _decompression(
    tiling: t.Tiling, first: int, last: int, payload: Tensor, out: Tensor, active: Tensor | None
) -> Structure:
    pointers = payload.data_ptr(), out.data_ptr(), pointer(active)
    return t.Decompression(tiling.layout(first, last), *pointers, *strides(out, active))


def _sign_decompress(payload: Tensor, out: Tensor, block: int, active: Tensor | None = None) -> Served:
    if not serves(out, payload):
        return NotImplemented
    if out.numel():
        tiling = t.Tiling.of(out.shape[0], out.shape[1], block, payload.shape[1])
        argument = _decompression(tiling, 0, tiling.tiles, payload, out, active)
        tiling.launch("sign_decompress", argument, out.device, 0, tiling.tiles)


def _sign_decompress_adam_(
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
    rows, n = payload.shape[0], stop - start
    if n == 0:
        return
    mine = t.contiguous(params) if serves(exp_avg, payload) else None
    if mine is None:
        reference.sign_decompress_adam_(
            payload, exp_avg, exp_avg_sq, [], [], [], [], eps, decay, block, active, start, stop
        )
        return reference.adam_in_columns_(
            _frozen_adam_apply_, rows, exp_avg, exp_avg_sq, params, offsets, step_sizes, sqrt_bias_corrections2, eps,
            decay, start, stop,
        )  # fmt: skip
    m, v = (t.columns(x, rows, start, stop) for x in (exp_avg, exp_avg_sq))
    active = None if active is None else t.columns(active, rows, start, stop, 8)
    factors = _factors(step_sizes, sqrt_bias_corrections2, eps)
    tiling, offsets = t.Tiling.of(rows, n, block, payload.shape[1]), [o - start for o in offsets]
    tiling, pieces = t.any_pieces(tiling, m.stride(0), mine, offsets, factors)
    for first, last, runs in pieces:
        of = _decompression(tiling, first, last, payload, m, active)
        argument = t.DecompressAdam(of, v.data_ptr(), v.stride(0), decay, runs)
        tiling.launch("sign_decompress_adam", argument, exp_avg.device, first, last)
    _write_back(params, mine)


def _sign_decompress_mean(payload: Tensor, out: Tensor, block: int) -> Served:
    if not serves(out, payload):
        return NotImplemented
    ranks, nbytes = payload.shape
    if out.shape[0]:
        tiling = t.Tiling.of(1, out.shape[0], block, nbytes)
        argument = t.DecompressMean(tiling.layout(0, tiling.tiles), payload.data_ptr(), out.data_ptr(), ranks)
        tiling.launch("sign_decompress_mean", argument, out.device, 0, tiling.tiles)


# masks, and lists of tensors ------------------------------------------------------------------------------------------


def _mask(name: str, x: Tensor, bits: Tensor) -> None:
    if x.shape[0]:
        tiling = t.flat(x.shape[0])
        argument = t.Mask(tiling.layout(0, tiling.tiles), x.data_ptr(), bits.data_ptr())
        tiling.launch(name, argument, x.device, 0, tiling.tiles)


def _pack_nonzero(x: Tensor, bits: Tensor) -> Served:
    if x.dtype != torch.float32:
        return NotImplemented
    _mask("pack_nonzero", x, bits)


def _zero_inactive_(x: Tensor, bits: Tensor) -> Served:
    if x.dtype != torch.float32:
        return NotImplemented
    _mask("zero_inactive", x, bits)


def _momentum(m: Tensor, grads: list[Tensor], offsets: list[int], beta: float, alpha: float, out: Tensor) -> Served:
    mine = t.contiguous(grads) if m.dtype == torch.float32 else None
    if mine is None:
        return NotImplemented
    if m.shape[0]:
        t.momentum_rows(t.flat(m.shape[0]), m, 0, mine, offsets, beta, alpha, out.view(1, -1))


def _each_batch(rows: list[Structure], tile: int) -> Iterator[tuple[list[Structure], int]]:
    """``Entry`` rows a launch can take, with their first tiles filled in, and how many tiles they have."""
    for k in range(0, len(rows), t.MAX_ENTRIES):
        batch, tiles = rows[k : k + t.MAX_ENTRIES], 0
        for entry in batch:
            entry.first = tiles
            tiles += -(-entry.n // tile)
        yield batch, tiles


def _square_sum(xs: list[Tensor]) -> Tensor:
    # What the kernel cannot read is added after the rest: an order that depends on nothing but the list.
    mine = [x for x in xs if x.numel() and _readable(x)]
    total = (torch.empty if mine else torch.zeros)((), dtype=torch.float64, device=xs[0].device)
    if mine:
        partials, _ = _partial_sums(mine)
        _add_up(partials, total)
    others = [x for x in xs if not _readable(x)]
    return total + reference.square_sum(others) if others else total


def _square_sums(xs: list[Tensor]) -> Tensor:
    totals = torch.zeros(len(xs), dtype=torch.float64, device=xs[0].device)
    mine = {i: x for i, x in enumerate(xs) if x.numel() and _readable(x)}
    if mine:
        partials, counts = _partial_sums(list(mine.values()))
        for i, of_one in zip(mine, partials.split(counts)):
            _add_up(of_one, totals[i])
    for i, x in enumerate(xs):
        if not _readable(x):
            totals[i] = reference.square_sum([x])
    return totals


def _partial_sums(xs: list[Tensor]) -> tuple[Tensor, list[int]]:
    """The sums of the squares of the tiles of all ``xs``, as struct Partial in payload.cuh has them, and how many tiles
    each of them has."""
    rows = [t.Entry(0, x.numel(), x.data_ptr(), None, None, 0, 0, t.KINDS[x.dtype]) for x in xs]
    counts = [-(-row.n // SUM_TILE) for row in rows]
    partials = torch.empty((sum(counts), 2), dtype=torch.float64, device=xs[0].device)
    done = 0
    for batch, tiles in _each_batch(rows, SUM_TILE):
        place = partials.data_ptr() + done * 16
        argument = t.Entries(place, SUM_TILE, 0, len(batch), (t.Entry * t.MAX_ENTRIES)(*batch))
        launch("square_sum", tiles, (256, 1), argument, xs[0].device)
        done += tiles
    return partials, counts


def _add_up(partials: Tensor, total: Tensor) -> None:
    """total <- the sum of the ``partials``."""
    argument = t.Total(partials.data_ptr(), total.data_ptr(), len(partials))
    launch("total", 1, (1024, 1), argument, total.device)


def _factors(
    step_sizes: Sequence[float], sqrt_bias_corrections2: Sequence[float], eps: float
) -> list[tuple[float, float]]:
    """Of each parameter, what m is multiplied by, and what is added to sqrt(v)."""
    return [(s * c, eps * c) for s, c in zip(step_sizes, sqrt_bias_corrections2)]


def _frozen_adam_apply_(
    params: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    step_sizes: list[float],
    sqrt_bias_corrections2: list[float],
    eps: float,
    decay: float,
) -> None:
    rows, moved, copies = [], [], []
    factors = _factors(step_sizes, sqrt_bias_corrections2, eps)
    for i, (p, m, v) in enumerate(zip(params, exp_avgs, exp_avg_sqs)):
        mine = t.contiguous((p, m, v))
        if mine is None:
            reference.frozen_adam_apply_([p], [m], [v], [step_sizes[i]], [sqrt_bias_corrections2[i]], eps, decay)
        elif p.numel():
            pointers = [x.data_ptr() for x in mine]
            rows.append(t.Entry(0, p.numel(), *pointers, *factors[i], t.KINDS[p.dtype]))
            moved.append(p)
            copies.append(mine)
    for batch, tiles in _each_batch(rows, t.TILE):
        argument = t.Entries(None, t.TILE, decay, len(batch), (t.Entry * t.MAX_ENTRIES)(*batch))
        launch("frozen_adam", tiles, (256, 1), argument, params[0].device)
    _write_back(moved, [mine[0] for mine in copies])


KERNELS = catalogue.with_reference(
    {
        "sign_compress": _sign_compress,
        "sign_compress_with_feedback": _sign_compress_with_feedback,
        "sign_compress_momentum": _sign_compress_momentum,
        "sign_reduce": _sign_reduce,
        "sign_decompress": _sign_decompress,
        "sign_decompress_mean": _sign_decompress_mean,
        "sign_decompress_adam_": _sign_decompress_adam_,
        "pack_nonzero": _pack_nonzero,
        "zero_inactive_": _zero_inactive_,
        "square_sum": _square_sum,
        "square_sums": _square_sums,
        "momentum": _momentum,
        "frozen_adam_apply_": _frozen_adam_apply_,
        **cuda_integers.KERNELS,
        **cuda_threshold.KERNELS,
        **cuda_top_k.KERNELS,
    }
)


def _start() -> None:
    served = provider()
    for name, function in KERNELS.items():
        if served == "cupy":
            catalogue.register(name, "cuda", served, function)
        elif served == "reference":
            catalogue.register(name, "cuda", served, with_warning(catalogue.REFERENCES[name]))


_start()
