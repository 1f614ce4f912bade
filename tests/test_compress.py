"""The laws of compressors. A new compressor adds one row to CASES."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from commopt.compress import (
    BFloat16,
    Compressor,
    Float8,
    Identity,
    Int2,
    Int4,
    Int8,
    Momentum,
    Sign,
    ThresholdTopK,
    TopK,
)  # fmt: skip
from commopt.compress.compressor import align
from commopt.ops.reference import unpack_bits


@dataclass(frozen=True)
class Rounded(Compressor):
    """What a newcomer writes: three methods, everything else by default. Sends multiples of 1/8 as int8."""

    def nbytes(self, n: int, dtype: torch.dtype = torch.float32) -> int:
        return align(n)

    def compress(self, x: Tensor, payload: Tensor) -> None:
        payload.zero_()
        payload[:, : x.shape[1]] = (x * 8).round().clamp(-127, 127).to(torch.int8).view(torch.uint8)

    def decompress(self, payload: Tensor, out: Tensor) -> None:
        out.copy_(payload[:, : out.shape[1]].view(torch.int8) / 8)


class InPieces(Rounded):
    """One whose rows may be cut."""

    @property
    def chunk_multiple(self) -> int | None:
        return 16


CASES = [
    Sign(),
    Sign(block=8),
    Sign(block=64, norm="l1"),
    Sign(block=None),
    Sign(block=None, norm="l1"),
    Identity(),
    TopK(),
    TopK(k=3, chunk=16, bits=1),
    TopK(k=5, chunk=32, bits=8),
    TopK(k=2, chunk=64, bits=16),
    TopK(k=1, chunk=16, bits=32),
    ThresholdTopK(),
    ThresholdTopK(density=0.3, rounds=5),
    ThresholdTopK(density=1),
    Rounded(),
    InPieces(),
    Int8(),
    Int4(block=8, rotate=True),
    Int4(block=32, rounding="stochastic"),
    Int2(block=64),
    Int2(rounding="stochastic", rotate=True, seed=1),
    Float8(),
    Float8(32, "stochastic", format="e5m2"),
    BFloat16(),
]
every_case = pytest.mark.parametrize("compressor", CASES, ids=repr)
shapes = st.tuples(st.integers(1, 4), st.integers(0, 300), st.integers(0, 2**31))


def draw(rows: int, n: int, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, n, generator=g, dtype=torch.float64).to(dtype)
    x[:, ::7] = 0
    error = torch.randn(rows, n, generator=g, dtype=torch.float64).to(dtype) * 0.3
    active = torch.randint(0, 256, (rows, -(-n // 8)), generator=g, dtype=torch.uint8)
    return x, error, active


def payload_for(compressor: Compressor, x: Tensor) -> Tensor:
    return torch.full((x.shape[0], compressor.nbytes(x.shape[1], x.dtype)), 255, dtype=torch.uint8)


@every_case
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@settings(max_examples=30, deadline=None)
@given(shape=shapes)
def test_sent_plus_new_error_is_input_plus_old_error(compressor, dtype, tolerance, shape):
    x, error, _ = draw(*shape, dtype)
    payload, sent = payload_for(compressor, x), torch.empty_like(x)
    before = x + error
    compressor.compress_with_feedback(x, error, payload)
    compressor.decompress(payload, sent)
    torch.testing.assert_close(sent + error, before, rtol=tolerance, atol=tolerance)


@every_case
@settings(max_examples=30, deadline=None)
@given(shape=shapes)
def test_feedback_is_compress_of_the_sum_and_a_dead_element_has_no_residual(compressor, shape):
    x, error, active = draw(*shape, torch.float32)
    is_active = unpack_bits(active, x.shape[1])
    payload, sent, old = payload_for(compressor, x), torch.empty_like(x), error.clone()
    compressor.compress_with_feedback(x, error, payload, active)
    compressor.decompress(payload, sent)
    assert not error[~is_active].any()
    torch.testing.assert_close((sent + error)[is_active], (x + old)[is_active], rtol=1e-5, atol=1e-5)
    all_active = torch.full_like(active, 255)
    again, wire_2, wire_3 = old.clone(), torch.empty_like(payload), torch.empty_like(payload)
    compressor.compress_with_feedback(x, again, wire_2, all_active)
    compressor.compress(x + old, wire_3)
    assert torch.equal(wire_2, wire_3)


@every_case
@settings(max_examples=30, deadline=None)
@given(shape=shapes, cut=st.booleans())
def test_columns_are_compressed_by_themselves_and_dead_elements_are_0(compressor, shape, cut):
    """Of whole rows, and of columns where rows may be cut; what is sent of all elements is received with a mask."""
    x, error, active = draw(*shape, torch.float32)
    n, unit = x.shape[1], compressor.chunk_multiple
    chunk = (n // 3 // unit * unit, 2 * n // 3 // unit * unit) if cut and unit else (0, n)
    at, is_active = slice(*chunk), unpack_bits(active, n)
    momentum = Momentum(x.view(-1), [], [], 1.0, 0.0)
    for mask in (None, active):
        bits = None if mask is None else mask[:, chunk[0] // 8 : -(-chunk[1] // 8)].contiguous()
        part, before = x[:, at].contiguous(), error.clone()
        rest = before[:, at].clone(memory_format=torch.contiguous_format)
        expected, payload = payload_for(compressor, part), payload_for(compressor, part)
        compressor.compress_with_feedback(part, rest, expected, bits)
        compressor.compress_momentum(momentum, error, payload, mask, error, chunk)
        assert torch.equal(payload, expected)
        assert torch.equal(error[:, at], rest)
        before[:, at] = rest
        assert torch.equal(error, before)
    compressor.compress(part, payload)
    out, values = torch.full_like(x, 7.0), torch.empty_like(part)
    compressor.decompress(payload, values)
    compressor.decompress_active(payload, out, active, chunk)
    assert torch.equal(out[:, at], values.where(is_active[:, at], 0))
    out[:, at] = 7.0
    assert bool((out == 7.0).all())


@every_case
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@settings(max_examples=30, deadline=None)
@given(shape=shapes)
def test_decompress_mean_is_the_mean_of_what_decompress_gives(compressor, dtype, shape):
    x, _, _ = draw(*shape, dtype)
    payload, rows, mean = payload_for(compressor, x), torch.empty_like(x), torch.empty(x.shape[1], dtype=dtype)
    compressor.compress(x, payload)
    compressor.decompress(payload, rows)
    compressor.decompress_mean(payload, mean)
    torch.testing.assert_close(mean, rows.mean(0), rtol=1e-5, atol=1e-6)


@every_case
def test_a_row_can_be_decoded_by_itself_and_has_the_size_it_says(compressor):
    x, _, _ = draw(3, 1000, 5, torch.float32)
    payload, rows = payload_for(compressor, x), torch.empty_like(x)
    compressor.compress(x, payload)
    compressor.decompress(payload, rows)
    assert payload.shape[1] % 16 == 0
    for r in range(3):
        one = torch.empty(1, 1000)
        compressor.decompress(payload[r : r + 1].clone(), one)
        assert torch.equal(one[0], rows[r])


def test_identity_loses_nothing():
    for dtype in (torch.float32, torch.float64):
        x, error, _ = draw(2, 33, 1, dtype)
        payload, sent = payload_for(Identity(), x), torch.empty_like(x)
        expected = x + error
        Identity().compress_with_feedback(x, error, payload)
        Identity().decompress(payload, sent)
        assert torch.equal(sent, expected)
        assert not error.any()


@pytest.mark.parametrize("n", [1, 7, 8, 63, 64, 2048, 2049, 5000])
def test_a_sign_costs_one_bit_and_a_block_four_bytes(n):
    assert Sign(block=64).nbytes(n) == align(4 * -(-n // 64) + -(-n // 8))
    assert Sign(block=None).nbytes(n) == align(4 + -(-n // 8))
    assert Identity().nbytes(n) == align(4 * n)
    assert Identity().nbytes(n, torch.float64) == align(8 * n)


def test_a_block_of_zeros_decodes_to_zeros_and_does_not_dilute_its_neighbours():
    x = torch.zeros(1, 32)
    x[0, 8:16] = torch.tensor([1.0, -1, 1, -1, 1, -1, 1, -1]) * 3
    payload, out = payload_for(Sign(block=8), x), torch.empty_like(x)
    Sign(block=8).compress(x, payload)
    Sign(block=8).decompress(payload, out)
    assert torch.equal(out, x)


def test_the_l2_residual_stays_bounded_where_that_of_l1_grows():
    """Constant sparse input with noise, 1500 steps: the reason why L2 is the default."""
    sizes = {}
    for norm in ("l1", "l2"):
        g = torch.Generator().manual_seed(0)
        mean = torch.randn(512, generator=g, dtype=torch.float64) * (torch.rand(512, generator=g) < 0.1)
        compressor, error = Sign(block=512, norm=norm), torch.zeros(1, 512, dtype=torch.float64)
        history = []
        for _ in range(1500):
            x = (mean + 0.3 * mean * torch.randn(512, generator=g, dtype=torch.float64)).unsqueeze(0)
            payload = payload_for(compressor, x)
            compressor.compress_with_feedback(x, error, payload)
            history.append(error.norm() / mean.norm())
        sizes[norm] = (max(history[300:500]), max(history[1300:]))
    assert sizes["l2"][1] < 1.1 * sizes["l2"][0]
    assert sizes["l1"][1] > 1.5 * sizes["l1"][0]
    assert sizes["l1"][1] > 5 * sizes["l2"][1]


@pytest.mark.parametrize("block", [0, -8, 7, 12, 8.0, True, "8"])
def test_a_block_out_of_range_is_refused(block):
    with pytest.raises(ValueError, match=r"block must be None or a positive multiple of 8, got"):
        Sign(block=block)


def test_an_unknown_norm_is_refused():
    with pytest.raises(ValueError, match=r"norm must be 'l1' or 'l2', got 'max'"):
        Sign(norm="max")
