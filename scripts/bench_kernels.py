"""Measures the native CPU kernels against the usual route with PyTorch and numpy, and against a plain copy.

    python scripts/bench_kernels.py [--size 67108864] [--threads 2] [--json out.json]

The routes of each row take turns, so that other load on the machine meets all of them; medians are given. The copy is
``dst.copy_(src)``, 8 bytes an element; the bytes of each operator are what it must read and write at least, and are
printed. "of copy" compares the two rates of bytes. Gradients and parameters are 16 tensors. Where two operators are
joined in one pass ("in one"), the other route is the two, one after the other, also native.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor

from commopt import ops
from commopt.ops import native
from commopt.ops.integers import E4M3, LARGEST_CODE, width

BLOCK, INT_BLOCK, RANKS, TENSORS = 2048, 128, 4, 16
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


def usual_frozen_adam(ps: list[Tensor], ms: list[Tensor], vs: list[Tensor]) -> None:
    """The update of Adam with a frozen variance, as torch.optim does it on a list."""
    denominators = torch._foreach_sqrt(vs)
    torch._foreach_div_(denominators, 0.5)
    torch._foreach_add_(denominators, 1e-8)
    torch._foreach_mul_(ps, 0.999)
    torch._foreach_addcdiv_(ps, ms, denominators, value=-1e-3)


def usual_momentum(m: Tensor, views: Sequence[Tensor], grads: list[Tensor]) -> None:
    """The momentum in a flat buffer, of which ``views`` are the places of the gradients."""
    m.mul_(0.9)
    torch._foreach_add_(views, grads, alpha=0.1)


def usual_square_sum(xs: list[Tensor]) -> Tensor:
    """As torch.nn.utils.get_total_norm does it, in float32."""
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(xs))).square()


def sign_cases(n: int) -> list[Case]:
    """The scaled sign on ``n`` elements."""
    x, error, out = torch.randn(1, n), torch.zeros(1, n), torch.empty(n)
    active, new_error = torch.full((1, (n + 7) // 8), 255, dtype=torch.uint8), torch.empty(1, n)
    payload = torch.empty(RANKS, ops.sign_nbytes(n, BLOCK), dtype=torch.uint8)
    ops.sign_compress(torch.randn(RANKS, n), payload, BLOCK, 2)
    own, whole = payload[:1].clone(), torch.empty(1, ops.sign_nbytes(n, 0), dtype=torch.uint8)
    bits, scales = np.random.default_rng(0).integers(0, 256, (RANKS, (n + 7) // 8), dtype=np.uint8), torch.rand(RANKS)
    usual_error, usual_x = torch.zeros(n), x.view(n)
    sign = 4 / BLOCK + 1 / 8
    return [
        Case(
            "compress_with_feedback",
            lambda: ops.sign_compress_with_feedback(x, error, own, BLOCK, 2),
            lambda: usual_compress(usual_x, usual_error),
            12 + sign,
        ),
        Case(
            "  to a new residual",
            lambda: ops.sign_compress_with_feedback(x, error, own, BLOCK, 2, None, new_error),
            lambda: usual_compress(usual_x, usual_error),
            12 + sign,
        ),
        Case(
            "  one scale for all",
            lambda: ops.sign_compress_with_feedback(x, error, whole, 0, 2),
            lambda: usual_compress(usual_x, usual_error),
            12 + 1 / 8,
        ),
        Case(
            f"decompress_mean ({RANKS} ranks)",
            lambda: ops.sign_decompress_mean(payload, out, BLOCK),
            lambda: usual_decompress_mean(bits, scales, out),
            4 + RANKS * sign,
        ),
        Case(
            "decompress",
            lambda: ops.sign_decompress(own, out.view(1, n), BLOCK),
            lambda: usual_decompress(bits[0], scales[0], out),
            4 + sign,
        ),
        Case(
            "  with a mask (all active)",
            lambda: ops.sign_decompress(own, out.view(1, n), BLOCK, active),
            lambda: usual_decompress(bits[0], scales[0], out),
            4 + sign + 1 / 8,
        ),
    ]


def joined_cases(n: int) -> list[Case]:
    """What a step does in one pass on ``n`` elements, against the same in two."""
    m, error, new_error, out = (torch.randn(n) for _ in range(4))
    payloads, own = (torch.empty(ranks, ops.sign_nbytes(n, BLOCK), dtype=torch.uint8) for ranks in (RANKS, 1))
    ops.sign_compress(torch.randn(RANKS, n), payloads, BLOCK, 2)
    grads = [part.clone() for part in torch.randn(n).chunk(TENSORS)]
    offsets = [i * grads[0].numel() for i in range(len(grads))]
    sign = 4 / BLOCK + 1 / 8

    def momentum_then_compress() -> None:
        ops.momentum(m, grads, offsets, 0.9, 0.1, out)
        ops.sign_compress_with_feedback(out[None], error[None], own, BLOCK, 2, None, new_error[None])

    def mean_then_compress() -> None:
        ops.sign_decompress_mean(payloads, out, BLOCK)
        ops.sign_compress_with_feedback(out[None], error[None], own, BLOCK, 2, None, new_error[None])

    v, params = torch.rand(n) + 0.1, [g.clone() for g in grads]
    views, vs = out.chunk(TENSORS), v.chunk(TENSORS)
    steps, corrections = [1e-3] * len(params), [0.5] * len(params)

    def decompress_then_adam() -> None:
        ops.sign_decompress(own, out[None], BLOCK)
        ops.frozen_adam_apply_(params, views, vs, steps, corrections, 1e-8, 0.999)

    return [
        Case(
            "momentum, compress in one",
            lambda: ops.sign_compress_momentum(m, grads, offsets, 0.9, 0.1, error, new_error, own, BLOCK, 2),
            momentum_then_compress,
            16 + sign,
        ),
        Case(
            f"reduce in one ({RANKS} ranks)",
            lambda: ops.sign_reduce(payloads, error, new_error, own[0], BLOCK, 2),
            mean_then_compress,
            8 + (RANKS + 1) * sign,
        ),
        Case(
            "decompress, adam in one",
            lambda: ops.sign_decompress_adam_(own, out, v, params, offsets, steps, corrections, 1e-8, 0.999, BLOCK),
            decompress_then_adam,
            16 + sign,
        ),
    ]


def usual_integers(
    z: Tensor, error: Tensor, bits: int, stochastic: bool = False, hadamard: Tensor | None = None
) -> None:
    """Integers with a scale a block and feedback, as one writes it without kernels; of 4 and 2 bits, a byte each.
    ``hadamard``: blocks are multiplied with it first, and what is sent is afterwards."""
    error.add_(z)
    blocks = error.view(-1, INT_BLOCK)
    rotated = blocks if hadamard is None else blocks @ hadamard
    scales = rotated.abs().amax(1, keepdim=True) / LARGEST_CODE[bits]
    codes = rotated / scales
    if bits == E4M3:  # torch does not round these stochastically
        sent = codes.to(torch.float8_e4m3fn).to(codes.dtype) * scales
    else:
        codes = codes.add_(torch.rand_like(codes)).floor_() if stochastic else codes.round_()
        sent = codes.to(torch.int8) * scales
    blocks.sub_(sent if hadamard is None else sent @ hadamard)


def walsh_hadamard(size: int) -> Tensor:
    """The normalised matrix, (size, size)."""
    out = torch.ones(1, 1)
    while out.shape[0] < size:
        out = torch.cat([torch.cat([out, out], 1), torch.cat([out, -out], 1)])
    return out / size**0.5


def int_cases(n: int) -> list[Case]:
    """Integers and floats of 8 bits on ``n`` elements, whole blocks of them; in the other route nothing is packed."""
    n = max(n, INT_BLOCK)
    return [case for bits in (8, 4, 2, E4M3) for case in cases_of_bits(n, bits)]


def cases_of_bits(n: int, bits: int) -> list[Case]:
    """Integers of so many bits, or floats."""
    x, error, usual_x, usual_error, out, new_error = (torch.randn(1, n) for _ in range(6))
    payload = torch.empty(RANKS, ops.int_nbytes(n, bits, INT_BLOCK), dtype=torch.uint8)
    ops.int_compress(torch.randn(RANKS, n), payload, bits, INT_BLOCK)
    own, size, matrix = payload[:1].clone(), 4 / INT_BLOCK + width(bits) / 8, walsh_hadamard(INT_BLOCK)
    kind = torch.float8_e4m3fn if bits == E4M3 else torch.int8
    codes, scales = torch.ones(RANKS, n // INT_BLOCK, INT_BLOCK).to(kind), torch.ones(n // INT_BLOCK, 1)

    def compress(stochastic: bool, rotated: bool) -> Route:
        return lambda: ops.int_compress_with_feedback(x, error, own, bits, INT_BLOCK, stochastic, rotated)

    def usual(stochastic: bool, rotated: bool) -> Route:
        by = matrix if rotated else None
        return lambda: usual_integers(usual_x, usual_error, bits, stochastic, by)

    def usual_mean() -> None:
        out.zero_()
        for rows in codes:
            out.view(-1, INT_BLOCK).add_((rows.float() if bits == E4M3 else rows) * scales)
        out.div_(RANKS)

    def usual_reduce() -> None:
        usual_mean()
        usual_integers(out, usual_error, bits)

    every, name = [(False, False, "")], "floats of 8 bits" if bits == E4M3 else f"{bits} bits"
    if bits != E4M3:
        every += [(True, False, "  stochastic"), (False, True, "  rotated")]
    if bits == 4:
        every.append((True, True, "  rotated, stochastic"))
    return [
        *(Case(label or f"{name}, with feedback", compress(*how), usual(*how), 12 + size) for *how, label in every),
        Case(
            "  to a new residual",
            lambda: ops.int_compress_with_feedback(x, error, own, bits, INT_BLOCK, new_error=new_error),
            usual(False, False),
            12 + size,
        ),
        Case(
            f"  decompress_mean ({RANKS} ranks)",
            lambda: ops.int_decompress_mean(payload, out[0], bits, INT_BLOCK),
            usual_mean,
            4 + RANKS * size,
        ),
        Case(
            f"  reduce ({RANKS} ranks)",
            lambda: ops.int_reduce(payload, error[0], new_error[0], own[0], bits, INT_BLOCK),
            usual_reduce,
            8 + (RANKS + 1) * size,
        ),
    ]


def joined_int_cases(n: int) -> list[Case]:
    """What a mean of gradients does in one pass on ``n`` elements of 4 bits, against the same in two."""
    n = max(n, INT_BLOCK)
    error, new_error, out = (torch.randn(n) for _ in range(3))
    own, size = torch.empty(1, ops.int_nbytes(n, 4, INT_BLOCK), dtype=torch.uint8), 4 / INT_BLOCK + 1 / 2
    grads = [part.clone() for part in torch.randn(n).chunk(TENSORS)]
    offsets = [i * grads[0].numel() for i in range(len(grads))]
    outs = [torch.empty_like(g) for g in grads]
    views = out.chunk(TENSORS)

    def momentum_then_compress() -> None:
        ops.momentum(error, grads, offsets, 0.0, 1.0, out)
        ops.int_compress_with_feedback(out[None], error[None], own, 4, INT_BLOCK, new_error=new_error[None])

    def decompress_then_copy() -> None:
        ops.int_decompress(own, out[None], 4, INT_BLOCK)
        torch._foreach_copy_(outs, views)

    return [
        Case(
            "4 bits, gradients in one",
            lambda: ops.int_compress_momentum(error, grads, offsets, 0.0, 1.0, error, new_error, own, 4, INT_BLOCK),
            momentum_then_compress,
            12 + size,
        ),
        Case(
            "  to gradients in one",
            lambda: ops.int_decompress_to(own, outs, offsets, n, 4, INT_BLOCK),
            decompress_then_copy,
            4 + size,
        ),
    ]


def cast_cases(n: int) -> list[Case]:
    """Rows of bfloat16 on ``n`` elements, against torch's casts."""
    x, new_error, usual_error, out = (torch.randn(n) for _ in range(4))
    error = torch.zeros(n)
    payloads = torch.empty(RANKS, ops.bf16_nbytes(n), dtype=torch.uint8)
    ops.bf16_compress_momentum(torch.randn(RANKS * n), [], [], 1.0, 0.0, *[torch.zeros(RANKS * n)] * 2, payloads)
    rows, own = payloads.view(torch.bfloat16)[:, :n], payloads[:1].clone()
    active = torch.full((1, (n + 7) // 8), 255, dtype=torch.uint8)
    grads = [part.clone() for part in torch.randn(n).chunk(TENSORS)]
    offsets, outs = [i * grads[0].numel() for i in range(len(grads))], [torch.empty_like(g) for g in grads]

    def usual(z: Tensor) -> None:
        usual_error.add_(z)
        usual_error.sub_(usual_error.bfloat16())

    def usual_momentum() -> None:
        ops.momentum(x, grads, offsets, 0.9, 0.1, out)
        usual(out)

    def usual_reduce() -> None:
        torch.sum(rows, 0, dtype=torch.float32, out=out)
        usual(out.div_(RANKS))

    def usual_outs() -> None:
        torch._foreach_copy_(outs, rows[0].chunk(TENSORS))

    return [
        Case(
            "bfloat16, with feedback",
            lambda: ops.bf16_compress_momentum(x, [], [], 1.0, 0.0, error, new_error, own),
            lambda: usual(x),
            14,
        ),
        Case(
            "  momentum in one",
            lambda: ops.bf16_compress_momentum(x, grads, offsets, 0.9, 0.1, error, new_error, own),
            usual_momentum,
            18,
        ),
        Case(
            f"  reduce ({RANKS} ranks)",
            lambda: ops.bf16_reduce(payloads, error, new_error, own[0]),
            usual_reduce,
            10 + 2 * RANKS,
        ),
        Case(
            "  to gradients, masked",
            lambda: ops.bf16_decompress_to(own, outs, offsets, n, active),
            usual_outs,
            6 + 1 / 8,
        ),
    ]


def usual_top_k(x: Tensor, error: Tensor, k: int, chunk: int) -> tuple[Tensor, Tensor]:
    """The k largest of every chunk by torch.topk, with feedback; indices and values are left as they are."""
    error.add_(x)
    chunks = error.view(-1, min(chunk, error.numel()))
    indices = chunks.abs().topk(min(k, chunks.shape[1]), sorted=False).indices
    values = chunks.gather(1, indices)
    chunks.scatter_(1, indices, 0.0)
    return indices, values


def usual_sparse_mean(indices: Tensor, values: Tensor, out: Tensor) -> None:
    """The mean of rows of indices, which count from the start of ``out``, and values."""
    out.zero_()
    for at, row in zip(indices, values):
        out.index_add_(0, at, row, alpha=1 / len(indices))


def top_k_cases(n: int) -> list[Case]:
    """Top-k on ``n`` elements, at 2 bits a value."""
    x, error, usual_error, out = torch.randn(1, n), torch.zeros(1, n), torch.zeros(n), torch.empty(n)
    cases = []
    for k, chunk in ((4, 256), (64, 4096)):
        nbytes = ops.topk_nbytes(n, k, chunk, 2)
        payload = torch.empty(1, nbytes, dtype=torch.uint8)
        cases.append(
            Case(
                f"top-{k} of {chunk} with feedback",
                lambda payload=payload, k=k, chunk=chunk: ops.topk_compress_with_feedback(
                    x, error, payload, k, chunk, 2
                ),
                lambda k=k, chunk=chunk: usual_top_k(x.view(n), usual_error, k, chunk),
                12 + nbytes / n,
            )
        )
    payloads = torch.empty(RANKS, ops.topk_nbytes(n, 4, 256, 2), dtype=torch.uint8)
    ops.topk_compress(torch.randn(RANKS, n), payloads, 4, 256, 2)
    count = max(1, n // 64)
    indices, values = torch.stack([torch.randperm(n)[:count] for _ in range(RANKS)]), torch.randn(RANKS, count)
    per_rank = payloads.shape[1] / n
    return [
        *cases,
        Case(
            "  decompress",
            lambda: ops.topk_decompress(payloads[:1], out.view(1, n), 4, 256, 2),
            lambda: usual_sparse_mean(indices[:1], values[:1], out),
            4 + per_rank,
        ),
        Case(
            f"  decompress_mean ({RANKS} ranks)",
            lambda: ops.topk_decompress_mean(payloads, out, 4, 256, 2),
            lambda: usual_sparse_mean(indices, values, out),
            4 + RANKS * per_rank,
        ),
    ]


def threshold_cases(n: int) -> list[Case]:
    """Top-k by threshold on ``n`` elements, 1 of 100; in the other route by torch.topk of all of them."""
    x, error, usual_error, out = torch.randn(1, n), torch.zeros(1, n), torch.zeros(n), torch.empty(n)
    k = max(1, n // 100)
    payloads = torch.empty(RANKS, ops.threshold_nbytes(n, k), dtype=torch.uint8)
    ops.threshold_compress(torch.randn(RANKS, n), payloads, k, 20)
    indices, values = torch.stack([torch.randperm(n)[:k] for _ in range(RANKS)]), torch.randn(RANKS, k)
    own, per_rank = payloads[:1].clone(), payloads.shape[1] / n
    return [
        Case(
            "1 % by threshold, with feedback",
            lambda: ops.threshold_compress_with_feedback(x, error, own, k, 20),
            lambda: usual_top_k(x.view(n), usual_error, k, n),
            12 + per_rank,
        ),
        Case(
            f"  decompress_mean ({RANKS} ranks)",
            lambda: ops.threshold_decompress_mean(payloads, out, k),
            lambda: usual_sparse_mean(indices, values, out),
            4 + RANKS * per_rank,
        ),
    ]


def other_cases(n: int) -> list[Case]:
    """Norms and updates on ``n`` elements."""
    x, y, v = torch.randn(n), torch.randn(n), torch.rand(n) + 0.1
    xs, ys, vs = ([part.clone() for part in t.chunk(TENSORS)] for t in (x, y, v))
    steps, corrections = [1e-3] * len(xs), [0.5] * len(xs)
    views, offsets = y.chunk(TENSORS), [i * xs[0].numel() for i in range(len(xs))]
    return [
        Case("square_sum", lambda: ops.square_sum(xs), lambda: usual_square_sum(xs), 4),
        Case(
            "momentum",
            lambda: ops.momentum(y, xs, offsets, 0.9, 0.1, y),
            lambda: usual_momentum(y, views, xs),
            12,
        ),
        Case(
            "frozen_adam_apply_",
            lambda: ops.frozen_adam_apply_(ys, xs, vs, steps, corrections, 1e-8, 0.999),
            lambda: usual_frozen_adam(ys, xs, vs),
            16,
        ),
    ]


def seconds(route: Route, calls: int) -> float:
    """Wall time of one call, over ``calls`` of them."""
    start = time.perf_counter()
    for _ in range(calls):
        route()
    return (time.perf_counter() - start) / calls


def measure(
    case: Case,
    n: int,
    repetitions: int,
    calls: int,
    clock: Callable[[Route, int], float] = seconds,
    device: str = "cpu",
) -> Row:
    """Medians over ``repetitions`` rounds, in each of which every route has its turn.

    Args:
        calls: of a route in a turn.
        clock: the seconds of one call of a route, over so many of them.
        device: of the tensors.
    """
    source, target = torch.randn(n, device=device), torch.empty(n, device=device)
    routes: list[Route] = [case.native, case.usual, lambda: target.copy_(source)]
    for route in routes:
        clock(route, calls)
    rounds = [[clock(route, calls) for route in routes] for _ in range(repetitions)]
    native, usual, copy = (1e6 * statistics.median(column) for column in zip(*rounds))
    of_copy = (case.bytes_per_element / native) / (8 / copy)
    return Row(case.name, n, native, usual, copy, case.bytes_per_element, usual / native, of_copy)


def show_titles(other: str) -> None:
    """Prints the head of the table; ``other`` is the other route."""
    titles = ["operator", "elements", "commopt", other, "speed", "B/elem", "GB/s", "of copy"]
    print("{:<28}{:>10}{:>12}{:>13}{:>9}{:>8}{:>9}{:>10}".format(*titles))


def show(row: Row, remark: str = "") -> None:
    """Prints one line of the table."""
    rate = row.bytes_per_element * row.size / row.native_us / 1e3
    print(
        f"{row.name:<28}{row.size:>10}{row.native_us:>12.1f}{row.usual_us:>13.1f}{row.speedup:>8.1f}x"
        f"{row.bytes_per_element:>8.2f}{rate:>9.1f}{100 * row.of_copy:>8.0f} %{remark}",
        flush=True,
    )


KINDS = (
    sign_cases, joined_cases, int_cases, joined_int_cases, cast_cases, top_k_cases, threshold_cases, other_cases,
)  # fmt: skip


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=2**26, help="elements of the large table (default: 64 Mi)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads (default: PyTorch's)")
    parser.add_argument("--repetitions", type=int, default=7, help="rounds of which the median is taken (default: 7)")
    parser.add_argument("--isa", default="", help="instruction set: avx512, avx2, neon or plain (default: the best)")
    parser.add_argument("--small", action="store_true", help="only the table of small sizes")
    parser.add_argument("--json", metavar="FILE", help="also write the rows to FILE")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.isa and not native.use_isa(arguments.isa):
        parser.error(f"this machine or build has no native kernels for {arguments.isa}")

    print(f"provider: {ops.report()['sign_compress'].get('cpu', 'reference')}; threads: {arguments.threads}")
    print(f"torch {torch.__version__}; blocks of {BLOCK}; times in microseconds, rates in GB/s")
    show_titles("other route")
    sizes = [16, 1024, 16384, 65536, 2**20] + ([] if arguments.small else [arguments.size])
    rows = []
    for n in sizes:
        for cases in KINDS:
            for case in cases(n):
                repetitions = arguments.repetitions if n > 2**20 else 3 * arguments.repetitions
                rows.append(measure(case, n, repetitions, max(1, min(200, 2**18 // n))))
                show(rows[-1])
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump([asdict(row) for row in rows], file, indent=1)


if __name__ == "__main__":
    main()
