"""Int8, Int4, Int2 and Float8: against lists of floats, and every provider against the reference."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import integer_checks as checks
import numpy as np
import oracle_integers as oracle
import pytest
import torch
from hypothesis import given, settings
from integer_checks import new_payload
from payloads import bits_equal, mask_bits, unpacked
from torch import Tensor

from commopt import ops
from commopt.compress import Float8, Int2, Int4, Int8
from commopt.ops import reference_integers as reference
from commopt.ops.integers import E4M3, E5M2

F32, F64 = torch.float32, torch.float64
KINDS = (Int8, Int4, Int2, Float8, partial(Float8, format="e5m2"))
WAYS = list(itertools.product((False, True), (False, True)))
every_kind = pytest.mark.parametrize("kind", KINDS, ids=["Int8", "Int4", "Int2", "e4m3", "e5m2"])
every_rounding = pytest.mark.parametrize("rounding", ["nearest", "stochastic"])


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def there_and_back(compressor: Any, x: Tensor) -> Tensor:
    payload, out = torch.empty(len(x), compressor.nbytes(x.shape[1]), dtype=torch.uint8), torch.empty_like(x)
    compressor.compress(x, payload)
    compressor.decompress(payload, out)
    return out


# the definition -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stochastic", "rotated"), WAYS)
@pytest.mark.parametrize("bits", checks.BITS)
@pytest.mark.parametrize(("n", "block"), [(1, 8), (37, 16), (100, 64), (300, 128), (129, 128), (64, 64)])
def test_rows_are_those_of_the_definition(n, block, bits, stochastic, rotated):
    for seed, mask in enumerate(["none", "some", "blocks", "inactive"]):
        x, error = normal(2, n, seed=seed), normal(2, n, seed=seed + 100) * 10.0**-seed
        x[0, : n // 2] = 0.0
        active = mask_bits(mask, 2, n, np.random.default_rng(seed))
        is_active = np.ones((2, n), bool) if active is None else unpacked(active, n)
        payload, out, rest, mean = new_payload(2, n, bits, block), torch.empty(2, n), torch.empty(2, n), torch.empty(n)
        out, rest, mean = out.double(), rest.double(), mean.double()
        coding = bits, block, stochastic, rotated, seed
        ops.int_compress_with_feedback(x, error, payload, *coding, active, rest)
        ops.int_decompress(payload, out, bits, block, rotated)
        for r in range(2):
            z = (x + error)[r].tolist()
            expected, sent = oracle.row(z, is_active[r].tolist(), *coding)
            assert payload[r].numpy().tobytes() == expected
            assert out[r].tolist() == sent
            assert rest[r].tolist() == [a - b if here else 0.0 for a, b, here in zip(z, sent, is_active[r])]
        ops.int_decompress_mean(payload, mean, bits, block, rotated)
        torch.testing.assert_close(mean, out.mean(0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("kind", "bits"), [*zip(KINDS, (8, 4, 2, 8, 8))])
def test_a_row_has_the_size_it_says(kind, bits):
    for n, block in itertools.product([0, 1, 7, 8, 63, 128, 129, 5000], [8, 128, 8192]):
        size = 4 * math.ceil(n / block) + math.ceil(n * bits / 8)
        assert kind(block=block).nbytes(n) == kind(block=block, rotate=True).nbytes(n) == math.ceil(size / 16) * 16


@every_kind
@every_rounding
@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("dtype", [F32, F64])
def test_what_is_sent_and_what_stays_are_what_was_there(kind, rounding, rotate, dtype):
    compressor = kind(block=64, rounding=rounding, rotate=rotate, seed=3)
    x, error = normal(3, 1000, dtype=dtype), normal(3, 1000, seed=1, dtype=dtype)
    before, payload = x + error, torch.empty(3, compressor.nbytes(1000), dtype=torch.uint8)
    sent = torch.empty_like(x)
    compressor.compress_with_feedback(x, error, payload)
    compressor.decompress(payload, sent)
    assert bits_equal(error, before - sent)
    assert bool(error.abs().max() > 0)


# providers ------------------------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None, derandomize=True)
@given(**checks.ANY)
def check_native(**case):
    checks.check(torch.ops.commopt, "cpu", **case)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(**checks.COLUMNS)
def check_native_columns(**case):
    checks.check_columns(torch.ops.commopt, "cpu", **case)


def test_native_equals_reference_bitwise(isa):
    check_native()
    check_native_columns()


@pytest.mark.parametrize(("bits", "rotated"), [(8, False), (4, True), (2, False), (E4M3, False), (E5M2, True)])
def test_what_bypasses_the_caches_is_the_same(isa, bits, rotated):
    n = 2**18 + 200  # the end is no whole block, nor a whole register
    x, error, results = normal(1, n, dtype=F32), normal(1, n, seed=1, dtype=F32), []
    active = torch.full((1, -(-n // 8)), 255, dtype=torch.uint8)
    active[0, 1000] = 3
    for run in (ops.catalogue.REFERENCES, None):
        payload, own, outs = (
            new_payload(1, n, bits, 128),
            new_payload(1, n, bits, 128)[0],
            [torch.empty(1, n) for _ in range(5)],
        )
        arguments = {
            "int_compress_with_feedback": (x, error, outs[0], payload, bits, 128, False, rotated, 0, active),
            "int_decompress": (payload, outs[1], bits, 128, rotated, active),
            "int_decompress_mean": (payload, outs[2][0], bits, 128, rotated),
            "int_reduce": (payload, error[0], outs[3][0], own, bits, 128, False, rotated, 0),
            "int_compress_momentum": (
                x[0], [], [], 1.0, 0.0, error[0], outs[4][0], payload, bits, 128, False, rotated, 0, active, 0, n,
            ),
        }  # fmt: skip
        for name, given_ in arguments.items():
            (run[name] if run else getattr(torch.ops.commopt, name))(*given_)
        results.append((payload, own, *outs))
    for a, b in zip(*results):
        assert bits_equal(a, b)


def test_more_ranks_than_any_buffer(isa):
    n, ranks, mean, expected = 1000, 150, torch.empty(1000), torch.empty(1000)
    payload = new_payload(ranks, n, 4, 64)
    ops.int_compress(normal(ranks, n, dtype=F32), payload, 4, 64)
    ops.int_decompress_mean(payload, mean, 4, 64)
    reference.int_decompress_mean(payload, expected, 4, 64, False)
    assert bits_equal(mean, expected)


@pytest.mark.parametrize("bits", checks.BITS)
def test_results_do_not_depend_on_threads(isa, threads, bits):
    n, seen = 300_001, []
    x, error = normal(2, n, dtype=F32), normal(2, n, seed=1, dtype=F32)
    for count in (1, 2, 3):
        threads(count)
        payload, own = new_payload(2, n, bits, 128), new_payload(1, n, bits, 128)[0]
        after, out, mean, rest = torch.empty(2, n), torch.empty(2, n), torch.empty(n), torch.empty(n)
        ops.int_compress_with_feedback(x, error, payload, bits, 128, True, True, 5, None, after)
        ops.int_decompress(payload, out, bits, 128, True)
        ops.int_decompress_mean(payload, mean, bits, 128, True)
        ops.int_reduce(payload, error[0], rest, own, bits, 128, True, True, 5)
        seen.append((payload, own, after, out, mean, rest))
    for other in seen[1:]:
        assert all(bits_equal(a, b) for a, b in zip(seen[0], other))


# what is not a number, and what is nothing ----------------------------------------------------------------------------


@every_kind
@every_rounding
@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("dtype", [F32, F64])
def test_zeros_are_zeros_and_a_bad_number_spoils_its_block_only(kind, rounding, rotate, dtype):
    compressor = kind(block=16, rounding=rounding, rotate=rotate)
    x = normal(1, 72, dtype=dtype)
    x[0, :16] = 0.0
    x[0, 16:32] = 1e-40
    payload, out = torch.empty(1, compressor.nbytes(72), dtype=torch.uint8), torch.empty_like(x)
    compressor.compress(x, payload)
    compressor.decompress(payload, out)
    assert bits_equal(out[:, :32], torch.zeros(1, 32, dtype=dtype))
    assert bool(compressor.is_sound(payload, 72))
    whole = out.clone()
    for bad, place in itertools.product((math.nan, math.inf, -math.inf), (40, 71)):
        y = x.clone()
        y[0, place] = bad
        compressor.compress(y, payload)
        compressor.decompress(payload, out)
        spoilt = slice(place // 16 * 16, place // 16 * 16 + 16)
        assert bool(out[0, spoilt].isnan().all())
        out[0, spoilt] = whole[0, spoilt]
        assert torch.equal(out, whole)
        assert not bool(compressor.is_sound(payload, 72))
    compressor.compress(x, payload)
    payload.view(F32)[0, 2] *= -1
    assert not bool(compressor.is_sound(payload, 72))


@every_kind
@pytest.mark.parametrize("dtype", [F32, F64])
def test_what_is_absent_is_not_in_a_scale(kind, dtype):
    x, error = normal(1, 32, dtype=dtype), torch.zeros(1, 32, dtype=dtype)
    x[0, 3:8] = torch.tensor([1e6, math.nan, math.inf, -1e30, 5.0])
    is_active = torch.ones(32, dtype=torch.bool)
    is_active[3:8] = False
    active = torch.tensor([[0b00000111, 255, 255, 255]], dtype=torch.uint8)
    few, compressor = x[:, is_active].clone(), kind(block=32)
    payload, alone = (torch.empty(1, compressor.nbytes(32), dtype=torch.uint8) for _ in range(2))
    compressor.compress_with_feedback(x, error, payload, active)
    compressor.compress(torch.cat([few, few[:, :0]], 1), alone[:, : compressor.nbytes(27)])
    assert bits_equal(payload.view(F32)[:, :1], alone.view(F32)[:, :1])
    out = torch.empty_like(x)
    compressor.decompress_active(payload, out, active)
    assert not out[0, 3:8].any()
    assert not error[0, 3:8].any()
    assert bits_equal(error[:, is_active], (x - out)[:, is_active])


# stochastic rounding --------------------------------------------------------------------------------------------------


def sigmas(off: Tensor) -> float:
    """The sum of the errors in units of what independent errors without a bias would have."""
    return float(off.sum().abs() / off.square().sum().sqrt())


@every_kind
@pytest.mark.parametrize("rotate", [False, True])
def test_stochastic_rounding_has_no_bias(kind, rotate):
    for seed in range(3):
        x = normal(4, 2**16, seed=seed).square()  # all of one sign
        assert sigmas(there_and_back(kind(rounding="stochastic", rotate=rotate, seed=seed), x) - x) < 5


@every_kind
def test_equal_elements_are_rounded_differently_in_different_places_and_blocks(kind):
    x = torch.full((1, 2**17), 0.3, dtype=F64)
    x[0, ::128] = 1 + normal(2**10, seed=1).abs() / 100  # a scale of its own for each block
    inner = (torch.arange(2**17) % 128) > 0
    assert sigmas((there_and_back(kind(rounding="stochastic"), x) - x)[0, inner]) < 5
    assert sigmas((there_and_back(kind(), x) - x)[0, inner]) > 50  # to nearest, all go the same way
    one, other = (there_and_back(kind(rounding="stochastic", seed=s), x) for s in (0, 1))
    assert not torch.equal(one, other)
    assert torch.equal(one, there_and_back(kind(rounding="stochastic"), x))


# feedback, rotation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize(
    ("kind", "rounding"), [*((k, "nearest") for k in KINDS if k is not Int2), *[(k, "stochastic") for k in KINDS]]
)
def test_the_mean_of_many_equal_steps_tends_to_what_is_sent(kind, rounding, rotate):
    compressor, x = kind(rounding=rounding, rotate=rotate), normal(1, 512, seed=4)
    error, total, steps = torch.zeros_like(x), torch.zeros_like(x), 200
    payload, sent = torch.empty(1, compressor.nbytes(512), dtype=torch.uint8), torch.empty_like(x)
    for _ in range(steps):
        compressor.compress_with_feedback(x, error, payload)
        compressor.decompress(payload, sent)
        total += sent
    torch.testing.assert_close(total + error, steps * x, rtol=1e-12, atol=1e-10)
    assert bool((error.abs() < 4).all())  # so that the mean is as near as 4 / 200
    torch.testing.assert_close(total / steps, x, rtol=0, atol=4 / steps)


def test_what_two_bits_cut_off_comes_later():
    """Elements far above 1.5 root mean squares wait in the residual, which makes the scale larger until they go."""
    x = normal(1, 512, seed=4, dtype=F32)
    x[0, 7] = 30.0
    error, sizes, total = torch.zeros_like(x), [], torch.zeros_like(x, dtype=F64)
    payload, sent = torch.empty(1, Int2().nbytes(512), dtype=torch.uint8), torch.empty_like(x)
    for _ in range(3000):
        Int2().compress_with_feedback(x, error, payload)
        Int2().decompress(payload, sent)
        total += sent
        sizes.append(float(error.norm()))
    assert max(sizes[2000:]) < 1.1 * max(sizes[500:1500])
    torch.testing.assert_close(total / 3000, x.double(), rtol=0, atol=0.3)


@pytest.mark.parametrize("n", [8, 128, 200, 1, 77])
@pytest.mark.parametrize(("dtype", "tolerance"), [(F64, 1e-13), (F32, 1e-5)])
def test_rotation_keeps_the_norm_and_undoes_itself(n, dtype, tolerance):
    x = normal(2, n, dtype=dtype)
    y = reference.rotate(x, 128)
    torch.testing.assert_close(y.square().sum(1), x.square().sum(1), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(reference.rotate(y, 128), x, rtol=tolerance, atol=tolerance)
    signs = [[(-1) ** (i & j).bit_count() for j in range(8)] for i in range(8)]
    if n == 8:
        by_definition = x @ torch.tensor(signs, dtype=dtype) / math.sqrt(8)
        torch.testing.assert_close(y, by_definition, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", [Int4, Int8])
def test_rotation_helps_where_few_elements_are_large(kind):
    x = normal(1, 2**14)
    x[0, ::128] *= 100
    small = torch.arange(2**14) % 128 > 0

    def error_of(rotate: bool) -> float:
        return float((there_and_back(kind(rotate=rotate), x) - x)[0, small].norm())

    assert error_of(True) < 0.6 * error_of(False)


# arguments ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"block": 4}, "block must be a power of two from 8 to 8192, got 4"),
        ({"block": 96}, "got 96"),
        ({"block": 16384}, "got 16384"),
        ({"block": True}, "got True"),
        ({"block": 64.0}, "got 64.0"),
        ({"rounding": "up"}, "rounding must be 'nearest' or 'stochastic', got 'up'"),
        ({"rotate": 1}, "rotate must be True or False, got 1"),
        ({"seed": -1}, "seed must be an int with 0 <= seed < 2\\*\\*32, got -1"),
        ({"seed": 2**32}, "got 4294967296"),
        ({"seed": 1.0}, "got 1.0"),
    ],
)
def test_settings_out_of_range_are_refused(arguments, says):
    for kind in KINDS:
        with pytest.raises(ValueError, match=says):
            kind(**arguments)


def reduce_(**wrong):
    right = {"payloads": new_payload(2, 8, 4, 8), "error": torch.ones(8), "new_error": torch.ones(8)}
    ops.int_reduce(**(right | {"own": new_payload(1, 8, 4, 8)[0], "bits": 4, "block": 8} | wrong))


def columns_(**wrong):
    right = {"m": torch.ones(16), "grads": [], "offsets": [], "beta": 1.0, "alpha": 1.0, "error": torch.ones(16)}
    ops.int_compress_momentum(
        **(right | {"new_error": torch.ones(16), "payload": new_payload(2, 8, 4, 8), "bits": 4, "block": 8} | wrong)
    )


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: ops.int_nbytes(-1, 8, 8), "n must be at least 0, got -1"),
        (lambda: ops.int_nbytes(8, 3, 8), r"bits must be 8, 4 or 2, or E4M3 \(43\) or E5M2 \(52\), got 3"),
        (lambda: ops.int_nbytes(8, 4, 12), "power of two from 8 to 8192, got 12"),
        (lambda: ops.int_compress(torch.ones(8), new_payload(1, 8, 4, 8), 4, 8), "x .*2 dimensions"),
        (lambda: ops.int_compress(torch.ones(1, 8).half(), new_payload(1, 8, 4, 8), 4, 8), "x .*float16"),
        (lambda: ops.int_compress(torch.ones(1, 99), new_payload(1, 8, 4, 8), 4, 8), r"payload .*\(1, 112\)"),
        (
            lambda: ops.int_compress(torch.ones(1, 8), new_payload(1, 8, 4, 8), 4, 8, seed=2**32),
            "seed .*got 4294967296",
        ),
        (
            lambda: ops.int_compress(torch.ones(1, 8), new_payload(1, 8, 4, 8), 4, 8, active=torch.ones(1, 8)),
            r"active .*\(1, 1\)",
        ),
        (
            lambda: ops.int_compress_with_feedback(torch.ones(1, 8), torch.ones(8), new_payload(1, 8, 4, 8), 4, 8),
            "error",
        ),
        (
            lambda: ops.int_compress_with_feedback(
                torch.ones(1, 8), torch.ones(1, 8), new_payload(1, 8, 4, 8), 4, 8, new_error=torch.ones(1, 8).double()
            ),
            "new_error .*float64",
        ),
        (lambda: ops.int_decompress(new_payload(2, 8, 4, 8), torch.ones(3, 8), 4, 8), r"payload .*\(3, 16\)"),
        (lambda: ops.int_decompress_mean(new_payload(2, 8, 4, 8), torch.ones(1, 8), 4, 8), "out .*1 dimensions"),
        (lambda: ops.int_decompress_mean(new_payload(2, 8, 4, 8)[:0], torch.ones(8), 4, 8), "at least one rank"),
        (lambda: columns_(payload=new_payload(3, 8, 4, 8)), "share the 16 elements equally"),
        (lambda: columns_(start=4), "multiples of 8 .*got 4, 8"),
        (lambda: columns_(seed=-1), "seed .*got -1"),
        (lambda: columns_(error=torch.ones(8)), "error"),
        (lambda: columns_(grads=[torch.ones(9)], offsets=[8]), "grads .*16 elements .*17"),
        (lambda: ops.int_decompress_to(new_payload(2, 8, 4, 8), [torch.ones(9)], [8], 16, 4, 8), "outs .*ends at 17"),
        (lambda: ops.int_decompress_to(new_payload(2, 8, 4, 8), [], [], 40, 4, 8), r"payload .*\(2, 32\)"),
        (lambda: reduce_(payloads=torch.empty(2, 16)), "payloads .*float32"),
        (lambda: reduce_(new_error=torch.ones(9)), "new_error"),
        (lambda: reduce_(own=new_payload(1, 8, 4, 8)), "own"),
        (lambda: reduce_(active=torch.ones(2, dtype=torch.uint8)), "active"),
        (lambda: reduce_(seed=-1), "seed .*got -1"),
    ],
)
def test_wrong_arguments_are_named(call, says):
    with pytest.raises(ValueError, match=says):
        call()


@pytest.mark.parametrize("dtype", [F32, F64])
def test_empty_rows_are_no_error(dtype):
    x, payload = torch.empty(2, 0, dtype=dtype), new_payload(2, 0, 4, 8)
    assert payload.shape == (2, 0)
    ops.int_compress(x, payload, 4, 8, True, True)
    ops.int_compress_with_feedback(x, x.clone(), payload, 4, 8, True, True)
    ops.int_decompress(payload, x, 4, 8, True)
    ops.int_decompress_mean(payload, x[0], 4, 8, True)
    ops.int_reduce(payload, x[0], x[1], payload[0].clone(), 4, 8, True, True)
