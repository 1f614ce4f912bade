"""The operators against an oracle in numpy, and every native instruction set against the reference.

The oracle is written from the text of ``commopt.ops`` alone, with sums by ``math.fsum``.
"""

from __future__ import annotations

import ctypes.util
import importlib.util
import itertools
import logging
import math
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from isas import ISAS
from payloads import BLOCKS, FLAVOURS, bits_equal, mask_bits, new_payload, unpacked, values
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from commopt import ops
from commopt.ops import native, reference

F32, F64, U8 = torch.float32, torch.float64, torch.uint8


def oracle_row(z: list[float], is_active: list[bool], block: int, norm: int) -> tuple[bytes, list[float]]:
    """One payload row, and what is left of each element, from the definition."""
    n = len(z)
    block = block or n
    scales, rest = [], []
    for start in range(0, n, block):
        part = [v for v, a in zip(z[start : start + block], is_active[start : start + block]) if a]
        mean = math.fsum(v * v if norm == 2 else abs(v) for v in part) / len(part) if part else 0.0
        scales.append(np.float32(math.sqrt(mean) if norm == 2 else mean))
    for i, (v, a) in enumerate(zip(z, is_active)):
        s = float(scales[i // block])
        rest.append((v - s if v >= 0 else v + s) if a else 0.0)
    signs = np.packbits([v >= 0 and a for v, a in zip(z, is_active)], bitorder="little")
    row = np.array(scales, dtype="<f4").tobytes() + signs.tobytes()
    return row + bytes(-len(row) % 16), rest


sign_cases = given(
    rows=st.integers(1, 4),
    n=st.one_of(st.integers(1, 40), st.integers(41, 400), st.sampled_from([2049, 4096, 16385, 40007])),
    block=st.sampled_from(BLOCKS),
    norm=st.sampled_from([1, 2]),
    flavour=st.sampled_from(FLAVOURS),
    mask=st.sampled_from(["none", "none", "some", "blocks", "all", "inactive"]),
    seed=st.integers(0, 2**32 - 1),
)


@settings(max_examples=100, deadline=None, derandomize=True)
@sign_cases
def test_sign_reference_matches_the_definition(rows, n, block, norm, flavour, mask, seed):
    n = min(n, 500)
    rng = np.random.default_rng(seed)
    x, error = values(flavour, (rows, n), rng), values(flavour, (rows, n), rng)
    active, payload, z = mask_bits(mask, rows, n, rng), new_payload(rows, n, block), x + error
    is_active = np.ones((rows, n), bool) if active is None else unpacked(active, n)
    before, error_before, new_error = x.clone(), error.clone(), torch.empty(rows, n)
    reference.sign_compress_with_feedback(x, error, new_error, payload, block, norm, active)
    assert bits_equal(x, before)
    assert bits_equal(error, error_before)
    out, masked = torch.empty(rows, n), torch.empty(rows, n)
    reference.sign_decompress(payload, out, block)
    reference.sign_decompress(payload, masked, block, active)
    assert bits_equal(masked, out.where(torch.from_numpy(is_active), 0))
    for r in range(rows):
        row, rest = oracle_row(z[r].tolist(), is_active[r].tolist(), block, norm)
        assert payload[r].numpy().tobytes() == row
        np.testing.assert_array_equal(new_error[r].numpy(), np.array(rest, dtype=np.float32))
        nblocks = -(-n // (block or n))
        scale = np.repeat(np.frombuffer(row[: 4 * nblocks], "<f4"), block or n)[:n]
        plus = np.unpackbits(np.frombuffer(row, np.uint8, offset=4 * nblocks), bitorder="little")[:n]
        np.testing.assert_array_equal(out[r].numpy(), np.where(plus, scale, -scale))
    mean, expected = torch.empty(n), torch.zeros(n)
    reference.sign_decompress_mean(payload, mean, block)
    for r in range(rows):  # a division of the scale is a division of the decoded element
        expected = out[r] / rows if r == 0 else expected + out[r] / rows
    assert torch.equal(mean, expected)


@settings(max_examples=100, deadline=None, derandomize=True)
@sign_cases
def check_native_sign(rows, n, block, norm, flavour, mask, seed):
    rng = np.random.default_rng(seed)
    x, error = values(flavour, (rows, n), rng), values(flavour, (rows, n), rng)
    active = mask_bits(mask, rows, n, rng)
    mean, results = torch.empty(n), []
    for provider in (torch.ops.commopt, reference):
        plain, payload, own = new_payload(rows, n, block), new_payload(rows, n, block), new_payload(1, n, block)[0]
        new_error, out, masked, mean, rest = (torch.empty(s) for s in ((rows, n), (rows, n), (rows, n), n, n))
        provider.sign_compress(x, plain, block, norm, active)
        provider.sign_compress_with_feedback(x, error, new_error, payload, block, norm, active)
        provider.sign_decompress(payload, out, block)
        provider.sign_decompress(payload, masked, block, active)
        provider.sign_decompress_mean(payload, mean, block)
        provider.sign_reduce(payload, error[0], rest, own, block, norm, None if active is None else active[0])
        results.append((plain, payload, new_error, out, masked, mean, own, rest))
    for a, b in zip(*results):
        assert bits_equal(a, b)
    _, payload, new_error, _, _, _, own, rest = results[0]
    places = x.clone(), error.clone()
    for i, place in enumerate(places):  # the new residual may take the place of either
        again, inputs = new_payload(rows, n, block), [x, error]
        inputs[i] = place
        torch.ops.commopt.sign_compress_with_feedback(*inputs, place, again, block, norm, active)
        assert bits_equal(again, payload)
        assert bits_equal(place, new_error)
    again, place = torch.empty_like(own), error[0].clone()
    ops.sign_reduce(payload, place, place, again, block, norm, None if active is None else active[0])
    assert bits_equal(again, own)
    assert bits_equal(place, rest)


def test_sign_native_equals_reference_bitwise(isa):
    check_native_sign()


@settings(max_examples=60, deadline=None, derandomize=True)
@sign_cases
def check_momentum_and_compression(rows, n, block, norm, flavour, mask, seed):
    rng = np.random.default_rng(seed)
    m, error = values(flavour, (rows * n,), rng), values(flavour, (rows * n,), rng)
    active, payloads = mask_bits(mask, rows, n, rng), [new_payload(rows, n, block), new_payload(rows, n, block)]
    grads, offsets, at = [], [], 0
    while at < rows * n:  # gradients of many sizes and kinds, some of them missing
        size = min(int(rng.choice([1, 5, 16, 700, 30_000])), rows * n - at)
        g = values(flavour, (size,), rng).to([F32, F32, torch.bfloat16, torch.float16][rng.integers(4)])
        if rng.random() < 0.8:
            grads.append(g.repeat_interleave(2)[::2] if rng.random() < 0.2 else g)
            offsets.append(at)
        at += size
    before, errors = (m.clone(), error.clone()), [torch.empty(rows * n), torch.empty(rows * n)]
    ops.sign_compress_momentum(m, grads, offsets, 0.9, 0.1, error, errors[0], payloads[0], block, norm, active)
    assert bits_equal(m, before[0])
    assert bits_equal(error, before[1])
    again, in_place = new_payload(rows, n, block), error.clone()
    ops.sign_compress_momentum(m, grads, offsets, 0.9, 0.1, in_place, in_place, again, block, norm, active)
    assert bits_equal(again, payloads[0])
    assert bits_equal(in_place, errors[0])
    ops.momentum(m, grads, offsets, 0.9, 0.1, m)
    x, error = m.view(rows, n), error.view(rows, n)
    ops.sign_compress_with_feedback(x, error, payloads[1], block, norm, active, errors[1].view(rows, n))
    assert bits_equal(*payloads)
    assert bits_equal(*errors)


def test_momentum_and_compression_in_one_equal_the_two(isa):
    check_momentum_and_compression()


def test_no_scale_is_lost_when_ranks_outnumber_one_call(isa):
    n, ranks = 1000, 150  # the kernel adds up 64 ranks at a time
    payload = new_payload(ranks, n, 64)
    ops.sign_compress(torch.randn(ranks, n), payload, 64, 2)
    out, expected = torch.empty(n), torch.empty(n)
    ops.sign_decompress_mean(payload, out, 64)
    reference.sign_decompress_mean(payload, expected, 64)
    assert bits_equal(out, expected)
    own, rest, error = new_payload(1, n, 64), torch.empty(n), torch.randn(n)
    ops.sign_reduce(payload, error, rest, own[0], 64, 2)
    ops.sign_compress_with_feedback(expected[None], error[None], payload[:1], 64, 2)
    assert bits_equal(own, payload[:1])
    assert bits_equal(rest, error)


@pytest.mark.parametrize("offset", [0, 1])
def test_large_outputs_are_streamed_right(isa, offset):
    n = 2**18 + 37  # past the size from which stores bypass the caches; offset 1: not on a cache line
    payload = torch.randint(0, 256, (2, ops.sign_nbytes(n, 4096)), dtype=torch.uint8)
    payload[:, : 4 * -(-n // 4096)].view(torch.float32).uniform_(0.5, 1)
    out = torch.empty(n + offset)[offset:]
    ops.sign_decompress_mean(payload, out, 4096)
    expected = torch.empty(n)
    reference.sign_decompress_mean(payload, expected, 4096)
    assert bits_equal(out, expected)
    active = torch.randint(0, 256, (1, (n + 7) // 8), dtype=torch.uint8)
    for mask in (None, active):
        ops.sign_decompress(payload[:1], out.view(1, n), 4096, mask)
        reference.sign_decompress(payload[:1], expected.view(1, n), 4096, mask)
        assert bits_equal(out, expected)
    error, own = torch.randn(n), [torch.empty_like(payload[0]), torch.empty_like(payload[0])]
    ops.sign_reduce(payload, error, out, own[0], 4096, 2, active[0])  # a residual too is streamed, or not
    reference.sign_reduce(payload, error, expected, own[1], 4096, 2, active[0])
    assert bits_equal(out, expected)
    assert bits_equal(*own)


@pytest.mark.parametrize("block", [0, 2048, 2**17])
@pytest.mark.parametrize("norm", [1, 2])
def test_results_do_not_depend_on_threads(isa, threads, block, norm):
    n = 300_001
    x, error, grads = torch.randn(2, n), torch.randn(2, n), [torch.randn(500), torch.randn(400_000)]
    offsets = [100, 100_001]
    seen = []
    for count in (1, 2, 3):
        threads(count)
        payload, first, own = new_payload(2, n, block), new_payload(2, n, block), new_payload(1, n, block)[0]
        e, mean, rest, new_error, m = (torch.empty(s) for s in ((2, n), n, n, 2 * n, 2 * n))
        ops.sign_compress_with_feedback(x, error, payload, block, norm, None, e)
        ops.sign_decompress_mean(payload, mean, block)
        ops.sign_reduce(payload, error[0], rest, own, block, norm)
        ops.momentum(x.view(-1), grads, offsets, 0.9, 0.1, m)
        flat = x.view(-1), grads, offsets, 0.9, 0.1, error.view(-1), new_error
        ops.sign_compress_momentum(*flat, first, block, norm)
        seen.append((payload, e, mean, own, rest, m, first, new_error, ops.square_sum([x, error])))
    for other in seen[1:]:
        assert all(bits_equal(a, b) for a, b in zip(seen[0], other))
    reference.sign_compress_with_feedback(x, error, e, payload, block, norm)
    assert bits_equal(payload, seen[0][0])
    assert bits_equal(e, seen[0][1])


def test_kernels_can_run_in_several_python_threads(isa):
    x = torch.randn(1, 200_000)

    def run(_):
        payload = new_payload(1, x.shape[1], 0)
        ops.sign_compress(x, payload, 0, 2)
        return payload

    with ThreadPoolExecutor(4) as pool:
        payloads = list(pool.map(run, range(16)))
    assert all(torch.equal(payloads[0], w) for w in payloads)


@pytest.mark.parametrize("block", [0, 8, 64])
@pytest.mark.parametrize("norm", [1, 2])
def test_nothing_is_lost_in_float64(block, norm):
    x, error = torch.randn(3, 201, dtype=torch.float64), torch.randn(3, 201, dtype=torch.float64)
    before, payload, sent = x + error, new_payload(3, 201, block), torch.empty_like(x)
    ops.sign_compress_with_feedback(x, error, payload, block, norm)
    ops.sign_decompress(payload, sent, block)
    torch.testing.assert_close(sent + error, before, rtol=1e-12, atol=1e-12)


def test_a_block_without_anything_to_send_decodes_to_zeros(isa):
    x, payload, out = torch.zeros(1, 24), new_payload(1, 24, 8), torch.ones(1, 24)
    x[0, :8] = 1
    ops.sign_compress(x, payload, 8, 2, torch.tensor([[255, 255, 0]], dtype=torch.uint8))
    ops.sign_decompress(payload, out, 8)
    assert out.tolist() == [[1.0] * 8 + [0.0] * 16]


@pytest.mark.parametrize(
    ("n", "block", "nbytes"), [(0, 0, 0), (0, 8, 0), (1, 0, 16), (96, 0, 16), (97, 0, 32), (17, 8, 16)]
)
def test_sign_nbytes(n, block, nbytes):
    assert ops.sign_nbytes(n, block) == nbytes
    for tensor in (torch.empty(2, n), torch.empty(2, n, dtype=torch.float64)):  # an empty row is no error
        payload = new_payload(2, n, block)
        ops.sign_compress(tensor, payload, block, 2)
        ops.sign_compress_with_feedback(tensor, tensor.clone(), payload, block, 2)
        ops.sign_decompress(payload, tensor, block)
        ops.sign_decompress_mean(payload, tensor[0], block)
        ops.sign_reduce(payload, tensor[0], tensor[1], payload[0].clone(), block, 2)
        flat = tensor.clone().view(-1)
        ops.sign_compress_momentum(flat, [], [], 0.9, 0.1, flat.clone(), tensor.view(-1), payload, block, 2)


@pytest.mark.parametrize("n", [0, 1, 7, 8, 15, 16, 64, 65, 1000, 70_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_masks(isa, n, dtype):
    x = torch.randn(n, dtype=dtype)
    x[torch.rand(n) < 0.3] = 0.0
    x[::5] = -0.0
    x[3::11] = math.nan
    x[64:256] = 1.0
    bits = torch.full(((n + 7) // 8,), 0xA5, dtype=torch.uint8)
    ops.pack_nonzero(x, bits)
    assert bits.tolist() == np.packbits(x.numpy() != 0, bitorder="little").tolist()
    y = torch.randn(n, dtype=dtype)
    expected = np.where(unpacked(bits, n), y.numpy(), 0)
    ops.zero_inactive_(y, bits)
    np.testing.assert_array_equal(y.numpy(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_square_sum(isa, dtype):
    xs = [torch.randn(s).to(dtype) for s in ((), (0,), (3, 5), (70_001,))] + [torch.randn(8, 6).to(dtype).t()]
    expected = math.fsum(v * v for x in xs for v in x.flatten().tolist())
    result = ops.square_sum(xs)
    assert (result.shape, result.dtype) == ((), torch.float64)
    assert float(result) == pytest.approx(expected, rel=1e-13)
    for bad in (math.inf, -math.inf, math.nan):
        for where in (0, 15, 16, 70_000):
            xs[3][where] = bad
            assert not math.isfinite(ops.square_sum(xs))
            xs[3][where] = 1.0
    assert float(ops.square_sum([])) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_square_sums_are_those_of_one_each_to_the_bit(isa, dtype, threads):
    xs = [torch.randn(s).to(dtype) for s in ((), (0,), (3, 5), (70_001,))] + [torch.randn(8, 6).to(dtype).t()]
    xs += [torch.randn(7), torch.randn(9, dtype=torch.float64)]
    xs[0].fill_(math.nan)
    for count in (1, 2):
        threads(count)
        each = ops.square_sums(xs)
        assert (each.shape, each.dtype) == ((len(xs),), torch.float64)
        assert bits_equal(each, torch.stack([ops.square_sum([x]) for x in xs]))
    assert each[1] == 0
    assert ops.square_sums([]).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("n", [0, 1, 7, 64, 1003, 100_001])
def test_all_finite(dtype, n, threads):
    largest = torch.finfo(dtype).max
    for count in (1, 2):
        threads(count)
        x = torch.full((2, n), largest, dtype=dtype)
        x[1] = -largest
        assert bool(ops.all_finite(x))
        for bad in (math.nan, math.inf, -math.inf):
            for place in {0, n // 2, n - 1} if n else ():
                y = x.clone()
                y[1, place] = bad
                assert not bool(ops.all_finite(y))
                assert not bool(ops.all_finite(y.t()))
                assert bool(ops.all_finite(y[:, :place]))
                assert bool(ops.all_finite(y[:, place + 1 :]))


def test_square_sum_of_the_largest_floats_is_finite(isa):
    assert math.isfinite(ops.square_sum([torch.full((1000,), torch.finfo(torch.float32).max)]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("count", [0, 10, 11])  # gradients; the last is float64
def test_momentum(isa, dtype, in_place, count):
    grads = [torch.randn(s) for s in ((), (0,), (3, 5), (1001,), (70_001,), (2, 3))] + [torch.randn(8, 6).t()]
    grads[2:2] = [torch.randn(4, 4).bfloat16(), torch.randn(33).half(), torch.randn(2001).bfloat16()]
    grads = [*grads, torch.randn(9, dtype=torch.float64)][:count]
    offsets, at = [], 0
    for i, g in enumerate(grads):
        at += i % 3 * 10  # gaps, where a gradient is missing
        offsets.append(at)
        at += g.numel()
    m, g64 = torch.randn(at + 20, dtype=dtype), torch.zeros(at + 20, dtype=torch.float64)
    expected = m * 0.9
    for g, o in zip(grads, offsets):
        g64[o : o + g.numel()] = g.flatten()
        expected[o : o + g.numel()].view(g.shape).add_(g, alpha=0.1)
    before, out = m.clone(), m if in_place else torch.empty_like(m)
    ops.momentum(m, grads, offsets, 0.9, 0.1, out)
    assert in_place or bits_equal(m, before)
    if isa != "plain" or count == 0:  # plain has no fused multiply-add, unlike PyTorch on this machine
        assert bits_equal(out, expected)
    scale = before.double().abs() * 0.9 + g64.abs() * 0.1
    off = (out.double() - (before.double() * 0.9 + g64 * 0.1)).abs()
    assert bool((off <= 2 * torch.finfo(torch.float32).eps * scale).all())


def adam_oracle(p, m, v, step, correction, eps, decay):
    p, m, v = p.double(), m.double(), v.double()
    update = torch.where(v == 0, 0, step * m / (v.sqrt() / correction + eps))
    return p * decay - update


@pytest.mark.parametrize("provider", [ops, reference])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_frozen_adam(isa, provider, dtype):
    shapes = [(), (0,), (3, 5), (1001,), (70_001,)]
    ps = [torch.randn(s).to(dtype) for s in shapes] + [torch.randn(6, 8).to(dtype).t()]
    ms, vs = [torch.randn(p.shape) for p in ps], [torch.rand(p.shape) for p in ps]
    for v in vs[2:]:
        v[::3] = 0.0
    steps, corrections = [0.1 * (i + 1) for i in range(len(ps))], [0.3 + 0.1 * i for i in range(len(ps))]
    expected = [adam_oracle(*row, 1e-8, 0.99) for row in zip(ps, ms, vs, steps, corrections)]
    provider.frozen_adam_apply_(ps, ms, vs, steps, corrections, 1e-8, 0.99)
    for p, e, m in zip(ps, expected, ms):
        # Rounding of the state's arithmetic (six operations), and once to the dtype of p.
        room = 6 * torch.finfo(torch.float32).eps * (e.abs() + 100 * m.double().abs()) if m.numel() else 0
        assert bool(((p.double() - e).abs() <= room + torch.finfo(dtype).eps / 2 * e.abs() * 1.01 + 1e-8).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("cuts", [(0, 640, 1280, 2004), (0, 64, 1984, 2004), (0, 2004)])
def test_rows_cut_at_blocks_are_compressed_and_moved_as_whole(isa, cuts, dtype):
    rows, n, block = 3, 2004, 64
    active = torch.randint(0, 256, (rows, (n + 7) // 8), dtype=torch.uint8)
    m, error = torch.randn(2, rows * n, dtype=dtype)
    ps = [torch.randn(700), torch.randn(9, 300).t(), torch.randn(n + 401).bfloat16()]
    grads, offsets, then = [torch.randn_like(p) for p in ps], [5, 800, n + 1500], ([0.1, 0.2, 0.3], [0.4, 0.5, 0.6])
    results = []
    for pieces in ([(0, n)], list(itertools.pairwise(cuts))):
        moved, after, new_m = [p.clone() for p in ps], torch.zeros_like(error), torch.zeros_like(m)
        for start, stop in pieces:
            payload = new_payload(rows, stop - start, block)
            columns = {"start": start, "stop": stop}
            ops.sign_compress_momentum(m, grads, offsets, 0.9, 0.1, error, after, payload, block, 2, active, **columns)
            v = m.abs()
            ops.sign_decompress_adam_(payload, new_m, v, moved, offsets, *then, 1e-8, 0.99, block, active, **columns)
        results.append([after, new_m, *moved])
    assert not any(bits_equal(p, q) for p, q in zip(ps, results[0][2:]))
    for whole, cut in zip(*results):
        if cut.is_contiguous():
            assert bits_equal(whole, cut)
        else:  # whole, no kernel reads it, and torch's square root rounds otherwise
            torch.testing.assert_close(whole, cut)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("block", [0, 8, 2048])
@pytest.mark.parametrize("n", [2001, 2**18 + 5])  # the momentum of the second bypasses the caches
def test_decompression_and_frozen_adam_in_one_equal_the_two(isa, threads, n, block, dtype):
    threads(2)
    sizes = [1, 0, 1500, 700, 16, 12_345, 2**17]
    payload = new_payload(2, n, block)
    ops.sign_compress(torch.randn(2, n, dtype=dtype), payload, block, 2)
    active = torch.randint(0, 256, (2, (n + 7) // 8), dtype=torch.uint8)
    ps, offsets, at = [], [], 7
    for i, size in enumerate(s for s in sizes if s < n):
        p = torch.randn(size)
        ps.append(p.bfloat16() if i % 2 else p)
        offsets.append(at)
        at += size + i % 3 * 10
    steps, corrections = [0.1 * (i + 1) for i in range(len(ps))], [0.3 + 0.1 * i for i in range(len(ps))]
    m, v = torch.empty(2, 2 * n, dtype=dtype), torch.rand(2 * n, dtype=dtype)
    v[::3] = 0.0
    for more, mask in (([], None), ([torch.randn(8, 6).t(), torch.randn(9).half()], active)):
        mine = [p.clone() for p in ps] + more  # what no kernel reads too
        same, places = [p.clone() for p in mine], [*offsets, at, at + 48][: len(mine)]
        factors = [*steps, 0.1, 0.2][: len(mine)], [*corrections, 0.5, 0.6][: len(mine)]
        versions = [p._version for p in mine]
        ops.sign_decompress_adam_(payload, m[0], v, mine, places, *factors, 1e-8, 0.99, block, mask)
        ops.sign_decompress(payload, m[1].view(2, n), block, mask)
        views = [[flat[o : o + p.numel()].view(p.shape) for p, o in zip(mine, places)] for flat in (m[1], v)]
        ops.frozen_adam_apply_(same, *views, *factors, 1e-8, 0.99)
        assert bits_equal(m[0], m[1])
        assert all(bits_equal(p.contiguous(), q.contiguous()) for p, q in zip(mine, same))
        assert all(p._version > version for p, version in zip(mine, versions))
        before = [p.clone() for p in ps]
        ops.sign_decompress_adam_(payload, m[0], v, [], [], [], [], 1e-8, 0.99, block, mask)
        assert bits_equal(m[0], m[1])
        assert all(bits_equal(p, q) for p, q in zip(ps, before))


def test_every_instruction_set_updates_alike():
    # Ranks may run on machines of different kinds, and their replicas must stay equal.
    p, m, v, seen = torch.randn(70_001), torch.randn(70_001), torch.rand(70_001), []
    for isa in filter(native.use_isa, ISAS):
        moved = [p.clone(), p.bfloat16()]
        ops.frozen_adam_apply_(moved, [m, m], [v, v], [0.1, 0.2], [0.3, 0.4], 1e-8, 0.99)
        seen.append((isa, moved))
    native.use_isa("")
    for isa, moved in seen[1:]:
        assert all(bits_equal(a, b) for a, b in zip(moved, seen[0][1])), isa


def test_frozen_adam_rounds_to_even_once(isa):
    # 1 + 2^-8 lies between the bfloat16 numbers 1 and 1 + 2^-7, 1 + 3 * 2^-8 between 1 + 2^-7 and 1 + 2^-6.
    p = torch.zeros(48, dtype=torch.bfloat16)
    m = -torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20] * 16)
    ops.frozen_adam_apply_([p], [m], [torch.ones(48)], [1.0], [1.0], 0.0, 1.0)
    assert p.tolist() == [1.0, 1 + 2**-6, 1 + 2**-7] * 16


def test_where_the_variance_is_zero_a_parameter_only_decays(isa):
    p, m = torch.full((100,), 2.0, requires_grad=True), torch.full((100,), math.inf)
    version = p._version
    with torch.no_grad():
        ops.frozen_adam_apply_([p], [m], [torch.zeros(100)], [0.1], [0.5], 0.0, 0.5)
    assert p.tolist() == [1.0] * 100
    assert p._version > version  # or autograd would not notice a change between forward and backward


def test_frozen_adam_reference_keeps_temporaries_small():
    n = 8 * 2**20
    p, m, v = torch.zeros(n), torch.ones(n), torch.ones(n)
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        reference.frozen_adam_apply_([p], [m], [v], [1.0], [1.0], 0.0, 1.0)
    assert bool((p == -1).all())
    sizes = [e.nbytes() for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert sizes
    assert max(sizes) <= 4 * 2**20


def op_arguments() -> dict[str, tuple]:
    x, bits, row = torch.randn(2, 37), torch.full((5,), 0x5A, dtype=torch.uint8), new_payload(2, 37, 16)
    flat, other = torch.randn(37), torch.rand(37)
    active = torch.full((2, 5), 0x5A, dtype=torch.uint8)
    ops.sign_compress(x, payload := row.clone(), 16, 2)
    codes = torch.zeros(2, ops.int_nbytes(37, 4, 16), dtype=torch.uint8)
    ways = 4, 16, True, True, 7
    return {
        "int_compress": (x, codes.clone(), *ways, active),
        "int_compress_with_feedback": (x, x.clone(), codes.clone(), *ways, active, x.clone()),
        "int_compress_momentum": (
            *(torch.randn(74), [flat, other.bfloat16()], [0, 37], 0.9, 0.1, torch.randn(74), torch.empty(74)),
            *(codes.clone(), *ways, active, 0, 37),
        ),
        "int_decompress_to": (codes, [flat, other.bfloat16()], [0, 37], 74, 4, 16, True, active, 0, 37),
        "int_reduce": (codes, flat, torch.empty(37), codes[0].clone(), *ways, bits),
        "int_decompress": (codes, x, 4, 16, True, active),
        "int_decompress_mean": (codes, flat, 4, 16, True),
        "bf16_compress_momentum": (
            *(torch.randn(74), [flat, other.bfloat16()], [0, 37], 0.9, 0.1, torch.randn(74), torch.empty(74)),
            *(cast := torch.zeros(2, ops.bf16_nbytes(37), dtype=U8), active, 0, 37),
        ),
        "bf16_reduce": (cast, flat, torch.empty(37), cast[0].clone(), bits),
        "bf16_decompress_to": (cast, [flat, other.bfloat16()], [0, 37], 74, active, 0, 37),
        "sign_compress": (x, row, 16, 2, active),
        "sign_compress_with_feedback": (x, x.clone(), row, 16, 1, None, x.clone()),
        "sign_compress_momentum": (
            *(torch.randn(74), [flat, other.bfloat16()], [0, 37], 0.9, 0.1, torch.randn(74), torch.empty(74)),
            *(row, 16, 2, active, 0, 37),
        ),
        "sign_reduce": (payload, flat, torch.empty(37), row[0].clone(), 16, 2, bits),
        "sign_decompress": (payload, x, 16, active),
        "sign_decompress_adam_": (
            *(payload, torch.empty(74), torch.rand(74), [flat, other.bfloat16()], [0, 37], [0.1, 0.2], [0.5, 0.6]),
            *(1e-8, 0.9, 16, active, 0, 37),
        ),
        "sign_decompress_mean": (payload, flat, 16),
        "threshold_compress": (x, few := torch.zeros(2, ops.threshold_nbytes(37, 3), dtype=U8), 3, 20, active),
        "threshold_compress_with_feedback": (x, x.clone(), few.clone(), 3, 20, None, x.clone()),
        "threshold_decompress": (few, x.clone(), 3, active),
        "threshold_decompress_mean": (few, flat.clone(), 3),
        "topk_compress": (x, top := torch.zeros(2, ops.topk_nbytes(37, 3, 16, 2), dtype=U8), 3, 16, 2, active),
        "topk_compress_with_feedback": (x, x.clone(), top.clone(), 3, 16, 2, None, x.clone()),
        "topk_decompress": (top, x.clone(), 3, 16, 2, active),
        "topk_decompress_mean": (top, flat.clone(), 3, 16, 2),
        "topk_find_unsound": (top, torch.ones((), dtype=torch.bool), 37, 3, 16, 2, torch.float32),
        "pack_nonzero": (flat, bits),
        "zero_inactive_": (flat, bits),
        "square_sum": ([flat, x],),
        "square_sums": ([flat, x],),
        "momentum": (torch.randn(50), [flat], [13], 0.9, 0.1, torch.empty(50)),
        "frozen_adam_apply_": ([flat], [other.clone()], [other], [0.1], [0.5], 1e-8, 0.9),
    }


@pytest.mark.parametrize("name", sorted(ops.report()))
def test_opcheck(name):
    arguments = op_arguments()[name]
    if name == "sign_compress_with_feedback":  # its function and its operator order their arguments differently
        x, error, payload, block, norm, active, new_error = arguments
        arguments = (x, error, new_error, payload, block, norm, active)
    if name == "int_compress_with_feedback":
        x, error, payload, *ways, active, new_error = arguments
        arguments = (x, error, new_error, payload, *ways, active)
    if name in ("threshold_compress_with_feedback", "topk_compress_with_feedback"):
        x, error, payload, *form, active, new_error = arguments
        arguments = (x, error, new_error, payload, *form, active)
    torch.library.opcheck(getattr(torch.ops.commopt, name).default, arguments)


def test_fakes():
    with FakeTensorMode() as mode:
        fakes = torch.utils._pytree.tree_map_only(Tensor, mode.from_tensor, op_arguments())
        for name, arguments in fakes.items():
            result = getattr(ops, name, getattr(torch.ops.commopt, name))(*arguments)
            shape = {"square_sum": (), "square_sums": (2,)}.get(name)
            assert result is None if shape is None else (result.shape, result.dtype) == (shape, torch.float64)


def momentum_of(grads, offsets):
    ops.momentum(torch.ones(4), grads, offsets, 0.9, 0.1, torch.ones(4))


def compress_momentum(**wrong):
    right = {"m": torch.ones(16), "grads": [], "offsets": [], "beta": 0.9, "alpha": 0.1, "error": torch.ones(16)}
    right |= {"new_error": torch.ones(16), "payload": new_payload(2, 8, 0), "block": 0, "norm": 2}
    ops.sign_compress_momentum(**(right | wrong))


def decompress_adam(**wrong):
    right = {"payload": new_payload(2, 8, 0), "exp_avg": torch.ones(16), "exp_avg_sq": torch.ones(16), "offsets": [3]}
    right |= {"params": [torch.ones(4)], "step_sizes": [0.1], "sqrt_bias_corrections2": [0.5]}
    ops.sign_decompress_adam_(**(right | {"eps": 1e-8, "decay": 1.0, "block": 0} | wrong))


def reduce(**wrong):
    right = {"payloads": new_payload(2, 8, 0), "error": torch.ones(8), "new_error": torch.ones(8)}
    right |= {"own": new_payload(1, 8, 0)[0], "block": 0, "norm": 2}
    ops.sign_reduce(**(right | wrong))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: ops.sign_nbytes(-1, 0), "-1"),
        (lambda: ops.sign_nbytes(8, 12), "multiple of 8, got 12"),
        (lambda: ops.sign_nbytes(8, -8), "-8"),
        (lambda: ops.sign_compress(torch.ones(2, 8), torch.empty(2, 16, dtype=U8), 0, 3), "norm must be 1 or 2, got 3"),
        (
            lambda: ops.sign_compress(torch.ones(2, 8), torch.empty(2, 32, dtype=U8), 0, 2),
            r"payload .*\(2, 16\).*\(2, 32\)",
        ),
        (lambda: ops.sign_compress(torch.ones(2, 8), torch.empty(2, 16), 0, 2), "payload"),
        (lambda: ops.sign_compress(torch.ones(8, 2).t(), torch.empty(2, 16, dtype=U8), 0, 2), "x .*strided"),
        (lambda: ops.sign_compress(torch.ones(2, 8).half(), torch.empty(2, 16, dtype=U8), 0, 2), "x .*float16"),
        (lambda: ops.sign_compress(torch.ones(8), torch.empty(1, 16, dtype=U8), 0, 2), "2 dimensions"),
        (
            lambda: ops.sign_compress(torch.ones(2, 8), torch.empty(2, 16, dtype=U8), 0, 2, torch.ones(2, 8, dtype=U8)),
            r"active .*\(2, 1\)",
        ),
        (
            lambda: ops.sign_compress_with_feedback(
                torch.ones(2, 8), torch.ones(2, 8, dtype=F64), new_payload(2, 8, 0), 0, 2
            ),
            "error .*float64",
        ),
        (
            lambda: ops.sign_compress_with_feedback(
                torch.ones(2, 8), torch.ones(2, 8), new_payload(2, 8, 0), 0, 2, None, torch.ones(8, 2).t()
            ),
            "new_error .*strided",
        ),
        (lambda: compress_momentum(payload=new_payload(3, 8, 0)), r"share the 16 elements equally, got \(3, 16\)"),
        (lambda: compress_momentum(payload=new_payload(1, 8, 0)[0]), "share the 16 elements"),
        (lambda: compress_momentum(payload=new_payload(2, 500, 0)), r"payload .*\(2, 16\)"),
        (lambda: compress_momentum(m=torch.ones(2, 8)), "m .*1 dimensions"),
        (lambda: compress_momentum(m=torch.ones(16).half()), "m .*float16"),
        (lambda: compress_momentum(error=torch.ones(8)), "error"),
        (lambda: compress_momentum(new_error=torch.ones(16, dtype=F64)), "new_error .*float64"),
        (lambda: compress_momentum(norm=0), "norm must be 1 or 2, got 0"),
        (lambda: compress_momentum(block=9), "multiple of 8, got 9"),
        (lambda: compress_momentum(active=torch.ones(2, dtype=U8)), "active"),
        (lambda: compress_momentum(grads=[torch.ones(9)], offsets=[8]), "16 elements .*17"),
        (lambda: compress_momentum(start=4), "multiples of 8 .*0 <= start <= stop <= 8, got 4, 8"),
        (lambda: compress_momentum(start=8, stop=0), "got 8, 0"),
        (lambda: compress_momentum(stop=16), "<= 8, got 0, 16"),
        (lambda: compress_momentum(start=8), r"payload .*\(2, 0\)"),
        (lambda: decompress_adam(payload=new_payload(3, 8, 0)), "share the 16 elements equally"),
        (lambda: decompress_adam(exp_avg=torch.ones(2, 8)), "exp_avg .*1 dimensions"),
        (lambda: decompress_adam(exp_avg_sq=torch.ones(16, dtype=F64)), "exp_avg_sq .*float64"),
        (lambda: decompress_adam(step_sizes=[]), r"same length, got lengths \(1, 0, 1\)"),
        (lambda: decompress_adam(sqrt_bias_corrections2=[]), r"same length, got lengths \(1, 1, 0\)"),
        (lambda: decompress_adam(offsets=[]), "params and offsets .*length, got 1 and 0"),
        (lambda: decompress_adam(offsets=[13]), "16 elements .*17"),
        (lambda: decompress_adam(params=[torch.ones(4, dtype=torch.int32)]), "params .*int32"),
        (lambda: decompress_adam(active=torch.ones(2, dtype=U8)), "active"),
        (lambda: reduce(payloads=torch.empty(0, 16, dtype=U8)), "at least one rank"),
        (lambda: reduce(payloads=torch.empty(2, 16)), "payloads .*float32"),
        (lambda: reduce(error=torch.ones(1, 8)), "error .*1 dimensions"),
        (lambda: reduce(new_error=torch.ones(16)[::2]), "new_error .*strided"),
        (lambda: reduce(own=new_payload(1, 8, 0)), "own"),
        (lambda: reduce(norm=3), "norm must be 1 or 2, got 3"),
        (lambda: reduce(active=torch.ones(2, dtype=U8)), "active"),
        (
            lambda: ops.sign_decompress(new_payload(2, 8, 0), torch.ones(2, 8), 0, torch.ones(2, 1)),
            "active .*float32",
        ),
        (lambda: ops.sign_compress(torch.ones(2, 8), torch.empty(2, 16, dtype=U8, device="meta"), 0, 2), "meta"),
        (lambda: ops.sign_decompress(new_payload(2, 8, 0), torch.empty(3, 8), 0), "payload"),
        (lambda: ops.sign_decompress_mean(torch.empty(0, 16, dtype=U8), torch.empty(8), 0), "at least one rank"),
        (lambda: ops.sign_decompress_mean(new_payload(2, 8, 0), torch.empty(1, 8), 0), "1 dimensions"),
        (lambda: ops.pack_nonzero(torch.ones(9), torch.empty(1, dtype=U8)), "bits"),
        (lambda: ops.zero_inactive_(torch.ones(9)[::2], torch.empty(1, dtype=U8)), "x .*strided"),
        (lambda: ops.square_sum([torch.ones(2), torch.ones(2, dtype=torch.int64)]), "int64"),
        (lambda: ops.momentum(torch.ones(4), [], [0], 0.9, 0.1, torch.ones(4)), "length, got 0 and 1"),
        (lambda: ops.momentum(torch.ones(4), [], [], 0.9, 0.1, torch.ones(5)), r"out .*\(4,\)"),
        (lambda: ops.momentum(torch.ones(8)[::2], [], [], 0.9, 0.1, torch.ones(4)), "m .*strided"),
        (lambda: momentum_of([torch.ones(3)], [2]), "4 elements .*5"),
        (lambda: momentum_of([torch.ones(1)], [-1]), "got -1"),
        (lambda: momentum_of([torch.ones(2), torch.ones(1)], [0, 1]), "got 1 after a tensor that ends at 2"),
        (lambda: momentum_of([torch.ones(2, dtype=torch.int32)], [0]), "int32"),
        (lambda: momentum_of([torch.ones(2, device="meta")], [0]), "meta"),
        (lambda: ops.frozen_adam_apply_([torch.ones(2)], [], [], [], [], 0.0, 1.0), "same length"),
        (
            lambda: ops.frozen_adam_apply_(
                [torch.ones(2)], [torch.ones(2)], [torch.ones(2).double()], [1.0], [1.0], 0, 1
            ),
            "float64",
        ),
    ],
)
def test_wrong_arguments_are_named(call, says):
    with pytest.raises(ValueError, match=says):
        call()


def test_report_names_the_provider(isa):
    assert set(ops.report()) == set(op_arguments())
    cuda = "reference" if importlib.util.find_spec("cupy") is None else "cupy"
    for name, by_device in ops.report().items():
        on_gpus = {} if name.startswith("bf16") else {"cuda": cuda}  # casts are torch's there
        assert by_device == {"default": "reference", "cpu": f"native ({isa})"} | on_gpus, name


def test_foreign_or_stale_libraries_are_refused(monkeypatch):
    with pytest.raises(OSError, match="ABI version None"):
        native.load(Path(ctypes.util.find_library("m") or "libm.so.6"))
    if native.library is not None:
        monkeypatch.setattr(native, "ABI_VERSION", native.ABI_VERSION + 1)
        with pytest.raises(OSError, match="needed is"):
            native.load(native.LIBRARY)
        monkeypatch.undo()
        monkeypatch.setitem(native._SIGNATURES, "of_tomorrow", [])
        with pytest.raises(OSError, match="lacks the kernel commopt_of_tomorrow"):
            native.load(native.LIBRARY)


PROBE = """
import sys
import torch
from commopt import ops
payload, out = torch.empty(1, 16, dtype=torch.uint8), torch.empty(1, 3)
ops.sign_compress(torch.tensor([[3.0, -3.0, 3.0]]), payload, 0, 2)
ops.sign_decompress(payload, out, 0)
assert "cupy" not in sys.modules
print(out.tolist(), ops.report()["sign_decompress"].get("cpu", "reference"))
"""


def test_without_the_library_the_reference_serves_and_says_so_once(tmp_path):
    # The operators alone, without the library, as where there was no compiler. Both runs at once: torch imports slowly.
    package = tmp_path / "commopt"
    shutil.copytree(Path(ops.__file__).parent, package / "ops", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (package / "__init__.py").touch()
    runs = []
    for switch in ("1", "0"):
        env = os.environ | {"PYTHONPATH": str(tmp_path), "COMMOPT_NATIVE": switch}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        runs.append(subprocess.Popen([sys.executable, "-c", PROBE], cwd=tmp_path, env=env, **pipes))
    (out, warned), (asked_out, asked_warned) = (run.communicate(timeout=120) for run in runs)
    assert out.strip() == asked_out.strip() == "[[3.0, -3.0, 3.0]] reference"
    assert warned.count("No native CPU kernels") == 1
    assert "Reinstall commopt, from a wheel or with a C++ compiler" in warned
    assert asked_warned == ""


def test_the_warning_goes_through_the_package_logger(monkeypatch, caplog):
    monkeypatch.setattr(native, "LIBRARY", Path("nowhere.so"))
    monkeypatch.delenv("COMMOPT_NATIVE", raising=False)
    with caplog.at_level(logging.WARNING, logger="commopt"):
        assert native._start() is None
    assert [(r.name, r.levelno) for r in caplog.records] == [("commopt", logging.WARNING)]


ALONE = """
import array, ctypes, os, sys
library = ctypes.CDLL(sys.argv[1])
n = 1 << 18
x, bits = array.array("f", [i % 3 for i in range(n)]), array.array("B", bytes(n // 8))
pointers = [ctypes.c_void_p(values.buffer_info()[0]) for values in (x, bits)]
before = len(os.listdir("/proc/self/task"))
library.commopt_pack_nonzero(*pointers, ctypes.c_int64(n), 4)
expected = bytes(sum((i % 3 > 0) << (i - start) for i in range(start, start + 8)) for start in range(0, n, 8))
print(library.commopt_threaded(), bits.tobytes() == expected, len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.skipif(native.library is None, reason="no native kernels")
def test_where_no_openmp_is_loaded_the_kernels_run_on_one_thread(monkeypatch, caplog):
    command = [sys.executable, "-c", ALONE, str(native.LIBRARY)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() == ["0", "True", "0"]
    assert native.library.commopt_threaded()  # here torch has loaded it
    alone = SimpleNamespace(commopt_threaded=lambda: 0)
    monkeypatch.delenv("COMMOPT_NATIVE", raising=False)
    monkeypatch.setattr(native, "load", lambda path: alone)
    monkeypatch.setattr(native, "_announce", lambda opened: None)
    monkeypatch.setattr(native.catalogue, "register", lambda *arguments: None)
    with caplog.at_level(logging.WARNING, logger="commopt"):
        assert native._start() is alone
    assert [record.message for record in caplog.records] == [
        "This torch has loaded no OpenMP library: the native CPU kernels run on one thread."
    ]


# ctypes opens nothing for all to see, so that torch is what it is on ARM, where it loads OpenMP for itself alone.
LOCAL = """
import ctypes, os
opened = ctypes.CDLL
ctypes.CDLL = lambda name, mode=ctypes.DEFAULT_MODE: opened(name)
import torch
from commopt.ops import native
def threads():
    return len(os.listdir("/proc/self/task"))
torch.set_num_threads(2)
x, bits = torch.empty(1 << 18), torch.empty(1 << 15, dtype=torch.uint8)
before = threads()
native._pack_nonzero(x, bits)
packed = threads()
x + x
print(hasattr(opened(None), "GOMP_parallel"), native.library.commopt_threaded(), packed - before, threads() - packed)
"""


@pytest.mark.skipif(native.library is None, reason="no native kernels")
def test_the_kernels_threads_are_those_of_torch_where_its_openmp_is_not_global():
    done = subprocess.run([sys.executable, "-c", LOCAL], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "1", "1", "0"]
    assert not done.stderr
