"""Rows of bfloat16: the reference against lists of floats, and the native provider against the reference."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from payloads import FLAVOURS, mask_bits, same, tensors_in, unpacked, values
from torch import Tensor

from commopt import ops
from commopt.ops import catalogue
from commopt.ops import reference_bfloat16 as reference

F32, F64 = torch.float32, torch.float64


def rounded(x: float) -> float:
    """To nearest of 8 bits of mantissa, ties to even."""
    if x == 0.0 or not math.isfinite(x):
        return x
    unit = 2.0 ** (max(math.frexp(x)[1], -125) - 8)
    near = round(x / unit) * unit  # Python's round goes to even
    return near if abs(near) < 2.0**128 else math.copysign(math.inf, x)


def of_bytes(row: Tensor, n: int) -> list[float]:
    """What a row says, read by hand."""
    words = struct.unpack(f"<{len(row) // 2}H", row.numpy().tobytes())
    assert not any(words[n:])
    return [struct.unpack("<f", struct.pack("<I", word << 16))[0] for word in words[:n]]


def new_payload(rows: int, n: int) -> Tensor:
    """Full of rubbish, every byte of which has to be written."""
    return torch.full((rows, ops.bf16_nbytes(n)), 0xA5, dtype=torch.uint8)


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("mask", ["none", "some", "inactive"])
def test_rows_are_those_of_the_definition(dtype, mask):
    """In numbers of float32, whose sums are rounded once in either dtype."""
    rows, n, rng = 3, 37, np.random.default_rng(5)
    m, error = (values("normal", (rows * n,), rng).bfloat16().to(dtype) for _ in range(2))
    g = values("normal", (50,), rng).bfloat16().to(dtype)
    active = mask_bits(mask, rows, n, rng)
    is_active = np.ones((rows, n), bool) if active is None else unpacked(active, n)
    payload, rest = new_payload(rows, n), torch.empty_like(m)
    ops.bf16_compress_momentum(m, [g], [7], 0.5, 0.25, error, rest, payload, active)
    x = [0.5 * v + (0.25 * g[i - 7].item() if 7 <= i < 57 else 0.0) for i, v in enumerate(m.tolist())]
    for r in range(rows):
        z = [
            torch.tensor(torch.tensor(a, dtype=dtype).item() + b, dtype=dtype).item() if here else 0.0
            for a, b, here in zip(x[r * n :], error[r * n :].tolist(), is_active[r])
        ]
        sent = [rounded(v) for v in z]
        assert of_bytes(payload[r], n) == sent
        assert rest[r * n : (r + 1) * n].tolist() == [a - b for a, b in zip(z, sent)]


def test_a_mean_is_that_of_the_rows_and_the_residual():
    n, rng = 21, np.random.default_rng(6)
    error, after, sent = values("normal", (n,), rng).double(), torch.empty(n, dtype=F64), new_payload(1, n)[0]
    payloads = torch.cat([new_payload(1, n) for _ in range(3)])
    nothing = torch.zeros(3 * n, dtype=F64)
    ops.bf16_compress_momentum(values("normal", (3 * n,), rng).double(), [], [], 1.0, 0.0, nothing, nothing, payloads)
    ops.bf16_reduce(payloads, error, after, sent)
    rows = [of_bytes(payload, n) for payload in payloads]
    z = [((a + b) + c) / 3 + e for a, b, c, e in zip(*rows, error.tolist())]
    assert of_bytes(sent, n) == [rounded(v) for v in z]
    assert after.tolist() == [v - rounded(v) for v in z]


CASES = {
    "rows": st.integers(1, 3),
    "n": st.one_of(st.integers(0, 40), st.sampled_from([700, 4096, 4097, 33_000])),
    "flavour": st.sampled_from(FLAVOURS),
    "mask": st.sampled_from(["none", "none", "some", "blocks", "all", "inactive"]),
    "bad": st.sampled_from([None, None, math.nan, math.inf, -math.inf, 3.4e38]),
    "sizes": st.sampled_from([[1, 5, 700], [300], [1, 2, 30], [3000]]),
    "cut": st.booleans(),
    "in_place": st.booleans(),
    "seed": st.integers(0, 2**32 - 1),
}


@settings(max_examples=120, deadline=None, derandomize=True)
@given(**CASES)
def check_native(
    rows: int,
    n: int,
    flavour: str,
    mask: str,
    bad: float | None,
    sizes: list[int],
    cut: bool,
    in_place: bool,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    m, error = (values(flavour, (rows * n,), rng) for _ in range(2))
    if bad is not None and n:
        m[rng.integers(rows * n)] = bad
    active = mask_bits(mask, rows, n, rng)
    start, stop = (n // 3 // 8 * 8, 2 * n // 3 // 8 * 8) if cut else (0, n)
    grads, offsets = tensors_in(rows * n, sizes, [torch.float32, torch.bfloat16, torch.float16], rng)
    results = []
    for provider in (torch.ops.commopt, reference):
        payload, own, residual = new_payload(rows, stop - start), new_payload(1, stop - start)[0], error.clone()
        rest, outs = residual if in_place else torch.full_like(m, 7.0), [torch.full_like(g, 7.0) for g in grads]
        left = rest[start:stop].clone()
        provider.bf16_compress_momentum(m, grads, offsets, 0.5, 0.25, residual, rest, payload, active, start, stop)
        provider.bf16_decompress_to(payload, outs, offsets, rows * n, active, start, stop)
        bits = None if active is None else active[0, start // 8 : (stop + 7) // 8].clone()
        provider.bf16_reduce(payload, left, left, own, bits)
        assert in_place or same(residual, error)
        sent = (payload.view(torch.bfloat16), own.view(torch.bfloat16)) if own.numel() else ()
        results.append((*sent, rest, left, *outs))
    for mine, expected in zip(*results):
        assert same(mine, expected)


def test_native_equals_reference_bitwise(isa):
    check_native()


def test_large_rows_are_the_same_on_any_threads(isa: str, threads: Callable[[int], None]) -> None:
    """Residuals of this size bypass the caches."""
    rows, n = 2, 300_001
    m, error = (values("normal", (rows * n,), np.random.default_rng(i)) for i in range(2))
    seen = []
    for provider, count in ((reference, 1), *((torch.ops.commopt, count) for count in (1, 2, 3))):
        threads(count)
        payload, own = new_payload(rows, n), new_payload(1, n)[0]
        rest, after, out = torch.empty(rows * n), torch.empty(n), torch.empty(rows * n)
        provider.bf16_compress_momentum(m, [], [], 1.0, 0.0, error, rest, payload, None, 0, n)
        provider.bf16_reduce(payload, error[:n], after, own)
        provider.bf16_decompress_to(payload, [out], [0], rows * n, None, 0, n)
        seen.append((payload, own, rest, after, out))
    for results in seen[1:]:
        for a, b in zip(results, seen[0]):
            assert torch.equal(a, b)


def test_the_library_serves_float32(isa):
    assert all(catalogue.PROVIDERS[name]["cpu"].startswith("native") for name in catalogue.SCHEMAS if "bf16" in name)


def call(**wrong: Any) -> None:
    right = {"m": torch.ones(16), "grads": [], "offsets": [], "beta": 1.0, "alpha": 0.0, "error": torch.ones(16)}
    ops.bf16_compress_momentum(**(right | {"new_error": torch.ones(16), "payload": new_payload(2, 8)} | wrong))


def reduce(**wrong: Any) -> None:
    right = {
        "payloads": new_payload(2, 8),
        "error": torch.ones(8),
        "new_error": torch.ones(8),
        "own": new_payload(1, 8)[0],
    }
    ops.bf16_reduce(**(right | wrong))


@pytest.mark.parametrize(
    ("function", "wrong", "says"),
    [
        (lambda: ops.bf16_nbytes(-1), {}, "n must be at least 0, got -1"),
        (call, {"m": torch.ones(16).half()}, "m must be float32 or float64"),
        (call, {"payload": new_payload(3, 8)}, "payload must have rows that share the 16 elements equally"),
        (call, {"payload": new_payload(2, 9)}, "payload must be contiguous"),
        (call, {"start": 4}, "start and stop must be multiples of 8"),
        (call, {"error": torch.ones(15)}, "error must be contiguous"),
        (call, {"active": torch.ones(2, 2, dtype=torch.uint8)}, "active must be contiguous"),
        (call, {"grads": [torch.ones(9)], "offsets": [8]}, "grads must lie within the 16 elements"),
        (reduce, {"payloads": new_payload(2, 8)[:0]}, "payloads must have a row for each of at least one rank"),
        (reduce, {"own": new_payload(1, 9)[0]}, "own must be contiguous"),
        (reduce, {"active": torch.ones(2, dtype=torch.uint8)}, "active must be contiguous"),
    ],
)
def test_what_does_not_fit_is_refused(function, wrong, says):
    with pytest.raises(ValueError, match=says):
        function(**wrong)
