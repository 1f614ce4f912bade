"""Float8 and BFloat16: the casts, against tables of all values that a format has."""

from __future__ import annotations

import math

import pytest
import torch

from commopt.compress import BFloat16, Float8

F32, F64 = torch.float32, torch.float64
FORMATS = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}
every_format = pytest.mark.parametrize("name", FORMATS)
both = pytest.mark.parametrize("dtype", [F32, F64])


def payload_of(compressor, x):
    return torch.full((x.shape[0], compressor.nbytes(x.shape[1], x.dtype)), 0xA5, dtype=torch.uint8)


@every_format
@both
@pytest.mark.parametrize("n", [1, 24, 130, 300])
def test_each_element_becomes_the_nearest_number_of_the_format(name, dtype, n):
    kind, top = FORMATS[name]
    table = torch.arange(256, dtype=torch.uint8).view(kind).to(F64)
    table = table[table.isfinite()]
    compressor = Float8(format=name, block=16)
    x = torch.randn(2, n, dtype=F64, generator=torch.Generator().manual_seed(n)).to(dtype)
    payload, out = payload_of(compressor, x), torch.empty_like(x)
    compressor.compress(x, payload)
    compressor.decompress(payload, out)
    scales = payload[:, : 4 * math.ceil(n / 16)].contiguous().view(F32)
    for r in range(2):
        for i in range(n):
            block = x[r, i // 16 * 16 : i // 16 * 16 + 16]
            s = scales[r, i // 16].double()
            assert s == (block.abs().max() / block.new_tensor(top)).float()
            nearest = float((table * s - x[r, i].double()).abs().min())
            off = float((out[r, i].double() - x[r, i].double()).abs())
            assert off <= nearest * (1 + 1e-5) + float(s) * 1e-7 * top
    assert not payload[:, 4 * math.ceil(n / 16) + n :].any()
    assert bool(compressor.is_sound(payload, n))


@every_format
@both
@pytest.mark.parametrize("scale", [1.0, 0.3, 2.0**-126, 3e33])
def test_every_code_stands_for_what_torch_casts_it_to(name, dtype, scale):
    codes = torch.arange(256, dtype=torch.uint8)
    compressor, values = Float8(format=name, block=16), codes.view(FORMATS[name][0]).to(dtype)
    finite = values.isfinite()
    values = torch.where(finite, values, 0)
    scales = torch.full((math.ceil(256 / 16),), scale, dtype=F32)
    payload, out = payload_of(compressor, values.view(1, 256)), torch.empty(1, 256, dtype=dtype)
    payload[0, : 4 * len(scales)] = scales.view(torch.uint8)
    payload[0, 4 * len(scales) :][:256] = torch.where(finite, codes, 0)
    compressor.decompress(payload, out)
    assert torch.equal(out[0], values * scales[0].to(dtype))
    assert bool(compressor.is_sound(payload, 256))


@every_format
def test_a_block_with_a_bad_number_is_nan_and_one_of_zeros_zero(name):
    compressor = Float8(format=name, block=8)
    for bad in (math.nan, math.inf, -math.inf):
        x = torch.randn(1, 24)
        x[0, 3], x[0, 8:16] = bad, 0.0
        payload, out = payload_of(compressor, x), torch.empty_like(x)
        compressor.compress(x, payload)
        compressor.decompress(payload, out)
        assert bool(out[0, :8].isnan().all())
        assert out[0, 8:16].tolist() == [0.0] * 8
        assert bool(out[0, 16:].isfinite().all())
        assert not bool(compressor.is_sound(payload, 24))


def test_the_size_is_a_closed_form():
    for n in (0, 1, 15, 16, 128, 129, 1000):
        assert Float8().nbytes(n) == math.ceil((4 * math.ceil(n / 128) + n) / 16) * 16
        assert BFloat16().nbytes(n, F64) == math.ceil(2 * n / 16) * 16


@both
def test_bfloat16_rounds_ties_to_even(dtype):
    # between 1 and 1 + 2^-7, between 1 + 2^-7 and 1 + 2^-6, and a little above the first
    x = torch.tensor([[1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -0.0, math.inf, math.nan]], dtype=dtype)
    payload, out = payload_of(BFloat16(), x), torch.empty_like(x)
    BFloat16().compress(x, payload)
    BFloat16().decompress(payload, out)
    assert out[0, :5].tolist() == [1.0, 1 + 2**-6, 1 + 2**-7, 0.0, math.inf]
    assert bool(out[0, 3].signbit())
    assert math.isnan(out[0, 5])
    assert not payload[:, 12:].any()
    assert not bool(BFloat16().is_sound(payload, 6))
    assert bool(BFloat16().is_sound(payload, 4))


@both
@pytest.mark.parametrize("compressor", [Float8(), Float8(format="e5m2"), BFloat16()], ids=repr)
def test_what_is_sent_and_what_stays_are_what_was_there(compressor, dtype):
    x, error = torch.randn(2, 2, 300, dtype=dtype)
    before, payload, sent = x + error, payload_of(compressor, x), torch.empty_like(x)
    compressor.compress_with_feedback(x, error, payload)
    compressor.decompress(payload, sent)
    assert torch.equal(error, before - sent)
    assert bool((error.abs() <= before.abs().max() / 8).all())
    assert bool(error.any())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"format": "e4m4"}, "format must be 'e4m3' or 'e5m2', got 'e4m4'"),
        ({"format": None}, "got None"),
        ({"block": 0}, "block must be a power of two from 8 to 8192, got 0"),
        ({"block": 24}, "got 24"),
    ],
)
def test_settings_out_of_range_are_refused(arguments, says):
    with pytest.raises(ValueError, match=says):
        Float8(**arguments)
