"""Measures the CUDA kernels against separate PyTorch operations with cupy.packbits, and against a copy on the device.

    python scripts/bench_cuda.py [--size 134217728] [--json benchmarks/cuda.json]

The routes of each row take turns, and medians are given, by events on the device. The copy is ``dst.copy_(src)``, 8
bytes an element; the bytes of each operator are what it must read and write at least, and are printed. "of copy"
compares the two rates of bytes. Gradients and parameters are 16 tensors. The target is 80 % of a copy.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict

import torch
from bench_kernels import (
    Case,
    Route,
    int_cases,
    measure,
    show,
    show_titles,
    threshold_cases,
    top_k_cases,
    usual_frozen_adam,
    usual_momentum,
    usual_square_sum,
)
from torch import Tensor

from commopt import ops

BLOCK, RANKS, TENSORS = 2048, 4, 16
OF_COPY = 0.8


def pack(plus: Tensor) -> Tensor:
    """Signs to bits, by CuPy."""
    import cupy

    return torch.as_tensor(cupy.packbits(cupy.asarray(plus.view(torch.uint8)), bitorder="little"), device="cuda")


def unpack(bits: Tensor, n: int) -> Tensor:
    """Bits to signs, by CuPy."""
    import cupy

    return torch.as_tensor(cupy.unpackbits(cupy.asarray(bits), bitorder="little"), device="cuda")[:n].view(torch.bool)


def usual_compress(x: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    """Sign compression with feedback by separate operations: one scale for all."""
    error.add_(x)
    scale = torch.linalg.vector_norm(error) / error.numel() ** 0.5
    plus = error >= 0
    error.sub_(torch.where(plus, scale, -scale))
    return pack(plus), scale


def usual_decompress_mean(bits: Tensor, scales: Tensor, out: Tensor) -> None:
    """The mean of several compressed rows."""
    for rank in range(len(bits)):
        share = scales[rank] / len(bits)
        term = torch.where(unpack(bits[rank], out.numel()), share, -share)
        if rank == 0:
            out.copy_(term)
        else:
            out.add_(term)


def usual_decompress(bits: Tensor, scale: Tensor, out: Tensor) -> None:
    """One compressed row."""
    torch.where(unpack(bits, out.numel()), scale, -scale, out=out)


def sign_cases(n: int) -> list[Case]:
    """The scaled sign alone."""
    x, error, out = (torch.randn(1, n, device="cuda") for _ in range(3))
    payloads, own, whole = (
        torch.zeros(rows, ops.sign_nbytes(n, block), dtype=torch.uint8, device="cuda")
        for rows, block in ((RANKS, BLOCK), (1, BLOCK), (1, 0))
    )
    ops.sign_compress(x, own, BLOCK, 2)
    payloads.copy_(own.expand_as(payloads))
    bits, scales = own[0, : (n + 7) // 8].expand(RANKS, -1).contiguous(), torch.rand(RANKS, device="cuda")
    usual_error, flat = torch.zeros(n, device="cuda"), out.view(n)
    active, sign = torch.full((1, (n + 7) // 8), 255, dtype=torch.uint8, device="cuda"), 4 / BLOCK + 1 / 8

    def compress() -> object:
        return usual_compress(x.view(n), usual_error)

    def fused() -> None:
        ops.sign_compress_with_feedback(x, error, own, BLOCK, 2)

    def one_scale() -> None:
        ops.sign_compress_with_feedback(x, error, whole, 0, 2)

    def with_active() -> None:
        ops.sign_compress_with_feedback(x, error, own, BLOCK, 2, active)

    return [
        Case("compress_with_feedback", fused, compress, 12 + sign),
        Case("  with a mask (all active)", with_active, compress, 12 + sign + 1 / 8),
        # it cannot keep z between its two passes: it is written and read once more
        Case("  one scale for all", one_scale, compress, 20 + 1 / 8),
        Case(
            f"decompress_mean ({RANKS} ranks)",
            lambda: ops.sign_decompress_mean(payloads, flat, BLOCK),
            lambda: usual_decompress_mean(bits, scales, flat),
            4 + RANKS * sign,
        ),
        Case(
            "decompress",
            lambda: ops.sign_decompress(own, out, BLOCK),
            lambda: usual_decompress(bits[0], scales[0], flat),
            4 + sign,
        ),
    ]


def joined_cases(n: int) -> list[Case]:
    """What a step does in one pass."""
    m, error, out = (torch.randn(n, device="cuda") for _ in range(3))
    payloads, own = (
        torch.zeros(rows, ops.sign_nbytes(n, BLOCK), dtype=torch.uint8, device="cuda") for rows in (RANKS, 1)
    )
    ops.sign_compress(m[None], own, BLOCK, 2)
    payloads.copy_(own.expand_as(payloads))
    grads = [part.clone() for part in torch.randn(n, device="cuda").chunk(TENSORS)]
    offsets = [i * grads[0].numel() for i in range(len(grads))]
    bits, scales = own[0, : (n + 7) // 8].expand(RANKS, -1).contiguous(), torch.rand(RANKS, device="cuda")
    v, params = torch.rand(n, device="cuda") + 0.1, [g.clone() for g in grads]
    views, vs, steps = list(out.chunk(TENSORS)), list(v.chunk(TENSORS)), ([1e-3] * len(grads), [0.5] * len(grads))
    usual_error, sign = torch.zeros(n, device="cuda"), 4 / BLOCK + 1 / 8

    def momentum_then_compress() -> None:
        usual_momentum(out, views, grads)
        usual_compress(out, usual_error)

    def mean_then_compress() -> None:
        usual_decompress_mean(bits, scales, out)
        usual_compress(out, usual_error)

    def decompress_then_adam() -> None:
        usual_decompress(bits[0], scales[0], out)
        usual_frozen_adam(params, views, vs)

    return [
        Case(
            "momentum, compress in one",
            lambda: ops.sign_compress_momentum(m, grads, offsets, 0.9, 0.1, error, error, own, BLOCK, 2),
            momentum_then_compress,
            16 + sign,
        ),
        Case(
            f"reduce in one ({RANKS} ranks)",
            lambda: ops.sign_reduce(payloads, error, error, own[0], BLOCK, 2),
            mean_then_compress,
            8 + (RANKS + 1) * sign,
        ),
        Case(
            "decompress, adam in one",
            lambda: ops.sign_decompress_adam_(own, m, v, params, offsets, *steps, 1e-8, 0.999, BLOCK),
            decompress_then_adam,
            16 + sign,
        ),
    ]


def other_cases(n: int) -> list[Case]:
    """Norms, masks and updates."""
    x, y, v = (torch.rand(n, device="cuda") + 0.1 for _ in range(3))
    xs, ys, vs = ([part.clone() for part in t.chunk(TENSORS)] for t in (x, y, v))
    views, offsets = list(y.chunk(TENSORS)), [i * xs[0].numel() for i in range(len(xs))]
    mask, steps = torch.empty((n + 7) // 8, dtype=torch.uint8, device="cuda"), ([1e-3] * len(xs), [0.5] * len(xs))

    def update() -> None:
        ops.frozen_adam_apply_(ys, xs, vs, *steps, 1e-8, 0.999)

    return [
        Case("square_sum", lambda: ops.square_sum(xs), lambda: usual_square_sum(xs), 4),
        Case("pack_nonzero", lambda: ops.pack_nonzero(x, mask), lambda: pack(x != 0), 4 + 1 / 8),
        Case(
            "momentum",
            lambda: ops.momentum(y, xs, offsets, 0.9, 0.1, y),
            lambda: usual_momentum(y, views, xs),
            12,
        ),
        Case("frozen_adam_apply_", update, lambda: usual_frozen_adam(ys, xs, vs), 16),
    ]


def on_gpu(cases: Callable[[int], list[Case]]) -> Callable[[int], list[Case]]:
    """Cases of the CPU's benchmark that are of tensors alone, on the GPU."""

    def made(n: int) -> list[Case]:
        with torch.device("cuda"):
            return cases(n)

    return made


def seconds(route: Route, calls: int) -> float:
    """Time of one call on the device, over ``calls`` of them."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        route()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls / 1e3


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=2**27, help="elements (default: 128 Mi)")
    parser.add_argument("--repetitions", type=int, default=9, help="rounds of which the median is taken (default: 9)")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    served = ops.report()["sign_compress"].get("cuda", "reference")
    if served != "cupy":
        parser.error(f"the {served} serves on CUDA: install commopt[cuda12] or commopt[cuda13]")

    import cupy

    n, device = arguments.size, torch.cuda.get_device_name()
    print(f"{device}; torch {torch.__version__}, CuPy {cupy.__version__}; {n} elements in blocks of {BLOCK}")
    show_titles("separate")
    rows = []
    of_both = [on_gpu(cases) for cases in (int_cases, top_k_cases, threshold_cases)]
    for cases in (sign_cases, joined_cases, *of_both, other_cases):
        for case in cases(n):
            row = measure(case, n, arguments.repetitions, 5, seconds, "cuda")
            show(row, "" if row.of_copy >= OF_COPY else "  MISSED")
            rows.append(asdict(row))
        torch.cuda.empty_cache()
        cupy.get_default_memory_pool().free_all_blocks()
    if arguments.json:
        facts = {"device": device, "torch": torch.__version__, "cupy": cupy.__version__, "block": BLOCK}
        with open(arguments.json, "w") as file:
            json.dump(facts | {"rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
