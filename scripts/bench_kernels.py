"""Measures the native CPU kernels against the usual route with PyTorch and numpy, and against a plain copy.

    python scripts/bench_kernels.py [--size 67108864] [--threads 2] [--json out.json]

The routes of each row take turns, so that other load on the machine meets all of them; medians are given. The copy is
``dst.copy_(src)``, 8 bytes an element; the bytes of each operator are what it must read and write at least, and are
printed. "of copy" compares the two rates of bytes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor

from commopt import ops

BLOCK, RANKS = 2048, 4
Route = Callable[[], object]


@dataclass
class Case:
    """One operator at one size: its route and the usual one, and the bytes an element that it cannot do without."""

    name: str
    native: Route
    usual: Route
    bytes_per_element: float


@dataclass
class Row:
    """What was measured. Times in microseconds."""

    name: str
    size: int
    native_us: float
    usual_us: float
    copy_us: float
    bytes_per_element: float
    speedup: float
    of_copy: float


def usual_compress(x: Tensor, error: Tensor) -> tuple[np.ndarray, Tensor]:
    """Sign compression with feedback as one writes it without kernels: one scale for all, bits by numpy."""
    error.add_(x)
    scale = torch.linalg.vector_norm(error) / error.numel() ** 0.5
    plus = error >= 0
    bits = np.packbits(plus.numpy(), bitorder="little")
    error.sub_(torch.where(plus, scale, -scale))
    return bits, scale


def usual_decompress_mean(bits: np.ndarray, scales: Tensor, out: Tensor) -> None:
    """The mean of several compressed rows, unpacked by numpy."""
    for rank in range(len(bits)):
        plus = torch.from_numpy(np.unpackbits(bits[rank], bitorder="little", count=out.numel())).view(torch.bool)
        share = scales[rank] / len(bits)
        term = torch.where(plus, share, -share)
        if rank == 0:
            out.copy_(term)
        else:
            out.add_(term)


def usual_decompress(bits: np.ndarray, scale: Tensor, out: Tensor) -> None:
    """One compressed row, unpacked by numpy."""
    plus = torch.from_numpy(np.unpackbits(bits, bitorder="little", count=out.numel())).view(torch.bool)
    torch.where(plus, scale, -scale, out=out)


def usual_frozen_adam(p: Tensor, m: Tensor, v: Tensor) -> None:
    """The update of Adam with a frozen variance, operation by operation."""
    denominator = v.sqrt().div_(0.5).add_(1e-8)
    p.mul_(0.999).addcdiv_(m, denominator, value=-1e-3)


def cases(n: int) -> list[Case]:
    """All operators on ``n`` elements."""
    x, error, out = torch.randn(1, n), torch.zeros(1, n), torch.empty(n)
    wire = torch.empty(RANKS, ops.sign_nbytes(n, BLOCK), dtype=torch.uint8)
    for rank in range(RANKS):
        ops.sign_compress(torch.randn(1, n), wire[rank : rank + 1], BLOCK, 2)
    bits, scales = np.random.default_rng(0).integers(0, 256, (RANKS, (n + 7) // 8), dtype=np.uint8), torch.rand(RANKS)
    row, flat, v = out.view(1, n), x.view(n), torch.rand(n) + 0.1
    live = torch.full(((n + 7) // 8,), 255, dtype=torch.uint8)
    sign, usual_error = 4 / BLOCK + 1 / 8, torch.zeros(n)
    own = wire[:1].clone()
    return [
        Case(
            "compress_with_feedback",
            lambda: ops.sign_compress_with_feedback(x, error, own, BLOCK, 2),
            lambda: usual_compress(flat, usual_error),
            12 + sign,
        ),
        Case(
            "  one scale for all",
            lambda: ops.sign_compress_with_feedback(x, error, own[:, : ops.sign_nbytes(n, 0)], 0, 2),
            lambda: usual_compress(flat, usual_error),
            12 + sign,
        ),
        Case(
            f"decompress_mean ({RANKS} ranks)",
            lambda: ops.sign_decompress_mean(wire, out, BLOCK),
            lambda: usual_decompress_mean(bits, scales, out),
            4 + RANKS * sign,
        ),
        Case(
            "decompress",
            lambda: ops.sign_decompress(own, row, BLOCK),
            lambda: usual_decompress(bits[0], scales[0], out),
            4 + sign,
        ),
        Case(
            "zero_dead_ (all live)",
            lambda: ops.zero_dead_(flat, live),
            lambda: flat.mul_(torch.from_numpy(np.unpackbits(live.numpy(), bitorder="little", count=n))),
            1 / 8,
        ),
        Case("square_sum", lambda: ops.square_sum([flat]), lambda: flat.double().square().sum(), 4),
        Case(
            "momentum_", lambda: ops.momentum_([out], [flat], 0.9, 0.1), lambda: out.mul_(0.9).add_(flat, alpha=0.1), 12
        ),
        Case(
            "frozen_adam_apply_",
            lambda: ops.frozen_adam_apply_([out], [flat], [v], [1e-3], [0.5], 1e-8, 0.999),
            lambda: usual_frozen_adam(out, flat, v),
            16,
        ),
    ]


def seconds(route: Route, calls: int) -> float:
    """Wall time of one call, over ``calls`` of them."""
    start = time.perf_counter()
    for _ in range(calls):
        route()
    return (time.perf_counter() - start) / calls


def measure(case: Case, n: int, repetitions: int) -> Row:
    """Medians over ``repetitions`` rounds, in each of which every route has its turn."""
    source, target = torch.randn(n), torch.empty(n)
    routes: list[Route] = [case.native, case.usual, lambda: target.copy_(source)]
    calls = max(1, min(200, 2**18 // n))
    for route in routes:
        seconds(route, calls)
    rounds = [[seconds(route, calls) for route in routes] for _ in range(repetitions)]
    native, usual, copy = (1e6 * statistics.median(column) for column in zip(*rounds))
    of_copy = (case.bytes_per_element / native) / (8 / copy)
    return Row(case.name, n, native, usual, copy, case.bytes_per_element, usual / native, of_copy)


def show(row: Row) -> None:
    """Prints one line of the table."""
    rate = row.bytes_per_element * row.size / row.native_us / 1e3
    print(
        f"{row.name:<26}{row.size:>10}{row.native_us:>12.1f}{row.usual_us:>13.1f}{row.speedup:>8.1f}x"
        f"{row.bytes_per_element:>8.2f}{rate:>8.1f}{100 * row.of_copy:>8.0f} %",
        flush=True,
    )


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=2**26, help="elements of the large table (default: 64 Mi)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads (default: PyTorch's)")
    parser.add_argument("--repetitions", type=int, default=7, help="rounds of which the median is taken (default: 7)")
    parser.add_argument("--small", action="store_true", help="only the table of small sizes")
    parser.add_argument("--json", metavar="FILE", help="also write the rows to FILE")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    print(f"provider: {ops.report()['sign_compress'].get('cpu', 'reference')}; threads: {arguments.threads}")
    print(f"torch {torch.__version__}; blocks of {BLOCK}; times in microseconds, rates in GB/s")
    print(
        f"{'operator':<26}{'elements':>10}{'commopt':>12}{'torch+numpy':>13}{'speed':>9}{'B/elem':>8}{'GB/s':>8}{'of copy':>10}"
    )
    sizes = [16, 1024, 16384, 65536] if arguments.small else [16, 1024, 16384, 65536, arguments.size]
    rows = []
    for n in sizes:
        for case in cases(n):
            rows.append(measure(case, n, arguments.repetitions if n > 2**20 else 3 * arguments.repetitions))
            show(rows[-1])
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump([asdict(row) for row in rows], file, indent=1)


if __name__ == "__main__":
    main()
