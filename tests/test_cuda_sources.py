"""The CUDA sources without a GPU: the same text, run on a CPU, does what the reference does."""

from __future__ import annotations

import ctypes
import importlib.util
import inspect
import logging
import math
from types import SimpleNamespace

import cuda_checks as checks
import fake_cupy
import integer_checks
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from payloads import BLOCKS, FLAVOURS, new_payload, same

from commopt import ops
from commopt.ops import catalogue, cuda, cuda_integers, cuda_module, cuda_threshold, cuda_top_k, reference, tiles

RUN = SimpleNamespace(**cuda.KERNELS)
MASKS = ["none", "none", "some", "blocks", "all", "inactive"]
THRESHOLD = ["measure", "begin", "count", "step", "tally", "places", "encode"]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return fake_cupy.build(tmp_path_factory.mktemp("cuda") / "kernels.so")


@pytest.fixture(scope="module", autouse=True)
def fake(library):
    with fake_cupy.installed(library) as module:
        yield module


LENGTHS = st.one_of(st.integers(1, 40), st.integers(41, 400), st.sampled_from([2049, 4096, 8193, 9001]))
ALL_BLOCKS = st.sampled_from([*BLOCKS, 264, 4096, 8192, 8200])
SIZES = st.sampled_from([[1, 5, 16, 700, 3000], [1, 2, 30], [300]])
ANY_ROWS = {
    "rows": st.integers(1, 3),
    "n": LENGTHS,
    "block": ALL_BLOCKS,
    "mask": st.sampled_from(MASKS),
    "seed": st.integers(0, 2**32 - 1),
}
ANY_SIGN = ANY_ROWS | {"norm": st.sampled_from([1, 2]), "flavour": st.sampled_from(FLAVOURS)}
few = settings(max_examples=60, deadline=None, derandomize=True)


@few
@given(backwards=st.booleans(), **ANY_SIGN)  # which thread and which block comes first must not matter
def test_sign_equals_the_reference_bitwise(fake, backwards, **case):
    fake.backwards = backwards
    checks.check_sign(RUN, "cpu", **case)


@pytest.mark.long
@few
@given(backwards=st.booleans(), **integer_checks.ANY)
def test_integers_equal_the_reference_bitwise(fake, backwards, **case):
    fake.backwards = backwards
    integer_checks.check(RUN, "cpu", **case)


@pytest.mark.long
@few
@given(backwards=st.booleans(), **integer_checks.COLUMNS)
def test_columns_of_integers_equal_the_reference_bitwise(fake, backwards, **case):
    fake.backwards = backwards
    integer_checks.check_columns(RUN, "cpu", **case)


@pytest.mark.long
@few
@given(sizes=SIZES, **ANY_SIGN)
def test_momentum_and_compression_in_one(fake, **case):
    checks.check_momentum(RUN, "cpu", **case)


@few
@given(sizes=SIZES, layouts=st.booleans(), **ANY_ROWS)
def test_decompression_and_frozen_adam(fake, **case):
    checks.check_adam(RUN, "cpu", **case)


@pytest.mark.parametrize(("start", "stop"), [(0, 1000), (64, 72), (1000, 3005), (200, 2704)])
@pytest.mark.parametrize("block", [0, 64, 2048])
@pytest.mark.parametrize("sizes", [[1, 60, 700, 2000], [20]])  # the second: more tensors than a launch takes
def test_columns(block, start, stop, sizes):
    checks.check_columns(RUN, "cpu", block, 2, start, stop, block + start, sizes)


def test_a_block_of_more_tiles_than_one_thread_adds_up():
    checks.check_many_tiles(RUN, "cpu", 2**21 + 1)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_square_sum(dtype):
    checks.check_square_sum(RUN, "cpu", dtype)


@pytest.mark.parametrize("n", [1, 7, 8, 31, 64, 65, 2048, 5000])
def test_masks(n):
    checks.check_masks(RUN, "cpu", n)


@pytest.mark.long
@few
@given(
    rows=st.integers(1, 3),
    n=st.one_of(st.integers(1, 40), st.integers(41, 700), st.just(3000)),
    shape=st.sampled_from([(4, 256), (1, 16), (3, 16), (16, 16), (5, 64), (40, 256), (256, 256), (2, 512), (40, 2048)]),
    bits=st.sampled_from([1, 2, 8, 16, 32]),
    flavour=st.sampled_from([*FLAVOURS, "ties"]),
    mask=st.sampled_from(MASKS),
    seed=st.integers(0, 2**32 - 1),
    backwards=st.booleans(),
)
def test_top_k(fake, backwards, **case):
    fake.backwards = backwards
    checks.check_top_k(RUN, "cpu", **case)


@pytest.mark.long
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 2),
    n=st.one_of(st.integers(1, 40), st.integers(41, 700), st.sampled_from([4095, 4097, 9001])),
    part=st.sampled_from([0.001, 0.01, 0.1, 0.6, 1]),
    rounds=st.sampled_from([1, 7, 20, 32]),
    flavour=st.sampled_from([*FLAVOURS, "ties", "wild"]),
    mask=st.sampled_from(MASKS),
    seed=st.integers(0, 2**32 - 1),
    backwards=st.booleans(),
)
def test_threshold(fake, backwards, **case):
    fake.backwards = backwards
    checks.check_threshold(RUN, "cpu", **case)


def test_threshold_in_several_segments():
    checks.check_threshold(RUN, "cpu", 1, 2 * 65536 + 5000, 0.001, 20, "normal", "none", 0)


def test_more_ranks_than_lanes():
    checks.check_many_ranks(RUN, "cpu")


@pytest.mark.parametrize("block", [64, 2048, 0])
def test_scales_are_the_same_however_the_grid_is_cut(fake, block):
    m, error = torch.randn(2 * 9000), torch.randn(2 * 9000)
    outs = []
    for count in (1, 300):  # 300 gradients take several launches
        g = [x.clone() for x in torch.ones(18_000).chunk(count)]
        offsets = [i * g[0].numel() for i in range(len(g))]
        payload, rest = new_payload(2, 9000, block), torch.empty(18_000)
        fake.launches.clear()
        RUN.sign_compress_momentum(m, g, offsets, 0.9, 0.1, error, rest, payload, block, 2, None, 0, 9000)
        names = [name for name, _, _ in fake.launches]
        assert names.count("sign_compress_momentum") == (1 if count == 1 else 4)
        assert names.count("sign_residuals") == (block == 0)
        outs.append((payload, rest))
    assert all(same(a, b) for a, b in zip(*outs))


def test_half_precision_rounds_to_even_once():
    p16, b16 = torch.zeros(48, dtype=torch.float16), torch.zeros(48, dtype=torch.bfloat16)
    m = -torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11] * 12)
    one = torch.ones(48)
    RUN.frozen_adam_apply_([p16, b16], [m, m], [one, one], [1.0, 1.0], [1.0, 1.0], 0.0, 1.0)
    assert same(p16, (-m).half())
    assert same(b16, (-m).bfloat16())
    RUN.frozen_adam_apply_([b16], [m * math.nan], [one], [1.0], [1.0], 0.0, 1.0)
    assert bool(b16.isnan().all())


# launching ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 24])
def test_nothing_is_launched_for_nothing(fake, n):
    fake.launches.clear()
    x, payload, flat = torch.empty(2, n), new_payload(2, n, 8), torch.empty(2 * n)
    mask = torch.empty(n // 4, dtype=torch.uint8)
    RUN.sign_compress(x, payload, 8, 2)
    RUN.sign_compress_with_feedback(x, x.clone(), x, payload, 8, 2)
    RUN.sign_compress_momentum(flat, [], [], 0.9, 0.1, flat.clone(), flat.clone(), payload, 8, 2, None, 0, n)
    RUN.sign_decompress(payload, x, 8)
    RUN.sign_decompress_adam_(payload, flat, flat.clone(), [], [], [], [], 0.0, 1.0, 8, None, 0, n)
    RUN.sign_decompress_mean(payload, x[0], 8)
    RUN.sign_reduce(payload, x[0], x[1], payload[0].clone(), 8, 2)
    top = torch.empty(2, ops.topk_nbytes(n, 4, 256, 2), dtype=torch.uint8)
    RUN.topk_compress(x, top, 4, 256, 2)
    RUN.topk_compress_with_feedback(x, x.clone(), x, top, 4, 256, 2)
    RUN.topk_decompress(top, x, 4, 256, 2)
    RUN.topk_decompress_mean(top, x[0], 4, 256, 2)
    k = min(n, 2)
    few = torch.empty(2, ops.threshold_nbytes(n, k), dtype=torch.uint8)
    RUN.threshold_compress(x, few, k, 12)
    RUN.threshold_compress_with_feedback(x, x.clone(), x, few, k, 12)
    RUN.threshold_decompress(few, x, k)
    RUN.threshold_decompress_mean(few, x[0], k)
    RUN.pack_nonzero(flat, mask)
    RUN.zero_inactive_(flat, mask)
    RUN.momentum(flat, [], [], 0.9, 0.1, flat)
    RUN.frozen_adam_apply_([], [], [], [], [], 0.0, 1.0)
    assert len(fake.launches) == (0 if n == 0 else 18 + 28)
    assert float(RUN.square_sum([torch.empty(0)])) == 0.0
    assert RUN.square_sums([torch.empty(0)]).tolist() == [0.0]


def test_what_no_kernel_handles_goes_to_the_reference(fake):
    fake.launches.clear()
    x, payload = torch.randn(1, 24).double(), new_payload(1, 24, 8)
    RUN.sign_compress(x, payload, 8, 2)
    shifted = torch.empty(payload.numel() + 1, dtype=torch.uint8)[1:].view(1, -1)
    RUN.sign_compress(x.float(), shifted, 8, 2)
    assert same(payload, shifted)
    top, out = torch.empty(1, ops.topk_nbytes(24, 24, 32, 32, x.dtype), dtype=torch.uint8), torch.empty_like(x)
    RUN.topk_compress_with_feedback(x, x * 0, out.clone(), top, 24, 32, 32)
    RUN.topk_decompress(top, out, 24, 32, 32)
    assert same(x, out)
    few = torch.empty(1, ops.threshold_nbytes(24, 24), dtype=torch.uint8)
    RUN.threshold_compress_with_feedback(x, x * 0, out.clone(), few, 24, 20)
    RUN.threshold_decompress(few, out, 24)
    torch.testing.assert_close(out, x, rtol=2**-8, atol=0)
    assert fake.launches == []


def test_more_tensors_in_a_block_than_a_launch_takes(fake):
    tiny, payload, block = [torch.ones(1) for _ in range(500)], new_payload(1, 600, 0), 0
    offsets = [*range(50, 550)]
    m, error, rest, out = torch.randn(600), torch.randn(600), torch.empty(600), torch.empty(600)
    fake.launches.clear()
    RUN.sign_compress_momentum(m, tiny, offsets, 0.9, 0.1, error, rest, payload, block, 2, None, 0, 600)
    names = [name for name, _, _ in fake.launches]
    assert names == ["momentum"] * (len(names) - 1) + ["sign_compress"]
    expected, expected_rest = new_payload(1, 600, 0), torch.empty(600)
    reference.sign_compress_momentum(m, tiny, offsets, 0.9, 0.1, error, expected_rest, expected, block, 2, None, 0, 600)
    torch.testing.assert_close(rest, expected_rest, rtol=1e-6, atol=1e-6)
    v, ps, factors = torch.ones(600), [x.clone() for x in tiny], ([0.1] * 500, [0.5] * 500, 0.0, 1.0)
    RUN.sign_decompress_adam_(payload, out, v, ps, offsets, *factors, block, None, 0, 600)
    torch.testing.assert_close(torch.cat(ps), 1 - 0.1 * out[50:550] / 2)


def test_arguments_are_as_large_as_the_sources_say(library):
    sizes = {
        "sign_compress": tiles.CompressRows,
        "sign_compress_momentum": tiles.CompressMomentum,
        "sign_reduce": tiles.Reduce,
        "sign_scales": tiles.Compression,
        "sign_residuals": tiles.Compression,
        "sign_decompress": tiles.Decompression,
        "sign_decompress_mean": tiles.DecompressMean,
        "sign_decompress_adam": tiles.DecompressAdam,
        "momentum": tiles.MomentumTo,
        "pack_nonzero": tiles.Mask,
        "zero_inactive": tiles.Mask,
        "square_sum": tiles.Entries,
        "total": tiles.Total,
        "frozen_adam": tiles.Entries,
        **{
            f"{name}{largest}": struct
            for largest in ("", "_128", "_256")
            for name, struct in {
                "int_compress": cuda_integers.CompressRows,
                "int_compress_momentum": cuda_integers.CompressMomentum,
                "int_reduce": cuda_integers.Reduce,
                "int_decompress": cuda_integers.Decompression,
                "int_decompress_mean": cuda_integers.Mean,
            }.items()
        },
        "topk_select": cuda_top_k.Compression,
        "topk_select_block": cuda_top_k.Compression,
        "topk_select_large": cuda_top_k.Compression,
        "topk_find_unsound": cuda_top_k.Soundness,
        "topk_scales": cuda_top_k.Compression,
        "topk_encode": cuda_top_k.Compression,
        "topk_decompress": cuda_top_k.Decompression,
        **{f"threshold_{name}": cuda_threshold.Compression for name in THRESHOLD},
        "threshold_decompress": cuda_threshold.Decompression,
    }
    assert len(sizes) == checks.kernels()
    for name, struct in sizes.items():
        assert library.argument_size(name.encode()) == ctypes.sizeof(struct), name


def test_providers_are_registered_and_take_what_the_reference_takes():
    casts = {"bf16_compress_momentum", "bf16_reduce", "bf16_decompress_to"}  # torch's own do on a GPU
    assert set(cuda.KERNELS) | casts == set(catalogue.SCHEMAS)
    assert all(torch._C._dispatch_has_kernel_for_dispatch_key(f"commopt::{name}", "CUDA") for name in cuda.KERNELS)
    for name, function in cuda.KERNELS.items():
        assert list(inspect.signature(function).parameters) == list(
            inspect.signature(catalogue.REFERENCES[name]).parameters
        )


# without CuPy, or with one that fails ---------------------------------------------------------------------------------


def test_without_cupy_the_reference_serves_and_one_warning_says_so(monkeypatch, caplog):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("COMMOPT_NATIVE", raising=False)
    assert cuda_module.provider() == "reference"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    cuda_module._warn.cache_clear()
    x, mask = torch.ones(8), torch.empty(1, dtype=torch.uint8)
    with caplog.at_level(logging.WARNING, logger="commopt"):
        for _ in range(2):
            cuda_module.with_warning(reference.pack_nonzero)(x, mask)
    assert mask.tolist() == [255]
    assert len(caplog.records) == 1
    assert "commopt[cuda13]" in caplog.text
    cuda_module._warn.cache_clear()


def test_on_rocm_the_reference_serves_and_one_warning_says_so(monkeypatch, caplog):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: "there")  # a CuPy for ROCm cannot compile PTX
    monkeypatch.delenv("COMMOPT_NATIVE", raising=False)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert cuda_module.provider() == "reference"
    cuda_module._warn.cache_clear()
    mask = torch.empty(1, dtype=torch.uint8)
    with caplog.at_level(logging.WARNING, logger="commopt"):
        for _ in range(2):
            cuda_module.with_warning(reference.pack_nonzero)(torch.ones(8), mask)
    assert [record.getMessage() for record in caplog.records] == [
        "The kernels are for CUDA: the PyTorch reference serves on ROCm, slower; COMMOPT_NATIVE=0 silences this."
    ]
    cuda_module._warn.cache_clear()
    monkeypatch.setenv("COMMOPT_NATIVE", "0")
    assert cuda_module.provider() is None


def test_the_provider_is_named_without_importing_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: "there")
    monkeypatch.delenv("COMMOPT_NATIVE", raising=False)
    assert cuda_module.provider() == "cupy"
    monkeypatch.setenv("COMMOPT_NATIVE", "0")
    assert cuda_module.provider() is None


def test_a_cupy_that_fails_is_an_error_and_not_a_fallback(fake, monkeypatch):
    def broken(**_):
        raise OSError("no libnvrtc")

    monkeypatch.setattr(fake, "RawModule", broken)
    cuda_module._module.cache_clear()
    cuda_module._kernel.cache_clear()
    with pytest.raises(RuntimeError, match=r"no libnvrtc.*commopt\[cuda.*COMMOPT_NATIVE=0"):
        RUN.pack_nonzero(torch.ones(8), torch.empty(1, dtype=torch.uint8))
    cuda_module._kernel.cache_clear()
