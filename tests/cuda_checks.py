"""What the CUDA kernels have to do, whatever runs them: a GPU (test_gpu.py), or a CPU (test_cuda_sources.py).

Each check gets ``run``, with the operators as attributes, and the device of their tensors. What is expected comes from
the reference on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from payloads import mask_bits, new_payload, same, tensors_in, unpacked, values
from torch import Tensor

from commopt import ops
from commopt.ops import cuda_module, reference, reference_threshold, reference_top_k

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
MARGIN = 64


def kernels() -> int:
    """How many there are; of those of integers a macro makes three each."""
    text = cuda_module.source()
    return text.count("__global__") - 3 + 3 * text.count("COMMOPT_INTEGER_KERNELS(int_")


class Guarded:
    """Tensors with a margin on both sides that nobody may write to."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = device
        self.buffers: list[Tensor] = []

    def __call__(self, x: Tensor, shift: int = 0) -> Tensor:
        """A copy of ``x`` on the device, ``shift`` elements away from where an allocation would be."""
        buffer = torch.full((x.numel() + 2 * MARGIN + shift,), 0x5A).to(x.dtype).to(self.device)
        self.buffers.append(buffer)
        place = buffer[MARGIN + shift : MARGIN + shift + x.numel()].view(x.shape)
        place.copy_(x)
        return place

    def check(self) -> None:
        for buffer in self.buffers:
            assert bool((buffer[:MARGIN].double() == 0x5A).all() and (buffer[-MARGIN:].double() == 0x5A).all())


def check_sign(
    run: Any, device: Any, rows: int, n: int, block: int, norm: int, flavour: str, mask: str, seed: int
) -> None:
    """The five operators on rows, in every way that residuals may be placed."""
    rng, guard = np.random.default_rng(seed), Guarded(device)
    x, error = values(flavour, (rows, n), rng), values(flavour, (rows, n), rng)
    active = mask_bits(mask, rows, n, rng)
    shift = int(rng.integers(4))
    results = []
    for provider, take in ((run, guard), (reference, lambda t, *_: t)):
        plain, payload = take(new_payload(rows, n, block), 4 * shift), take(new_payload(rows, n, block), 4 * shift)
        own = take(new_payload(1, n, block)[0])
        x_, error_, live_ = take(x, shift), take(error), None if active is None else take(active, shift)
        new_error, out, masked = (take(torch.empty(rows, n), shift) for _ in range(3))
        mean, rest = take(torch.empty(n), shift), take(torch.empty(n))
        provider.sign_compress(x_, plain, block, norm, live_)
        provider.sign_compress_with_feedback(x_, error_, new_error, payload, block, norm, live_)
        provider.sign_decompress(payload, out, block)
        provider.sign_decompress(payload, masked, block, live_)
        provider.sign_decompress_mean(payload, mean, block)
        provider.sign_reduce(payload, error_[0], rest, own, block, norm, None if live_ is None else live_[0])
        assert same(x_, x)
        assert same(error_, error)
        results.append((plain, payload, new_error, out, masked, mean, own, rest))
    for a, b in zip(*results):
        assert same(a, b)
    _, payload, new_error, _, _, _, own, rest = results[1]
    live_ = None if active is None else active.to(device)
    for i in range(2):  # the new residual may take the place of either
        again, inputs = guard(new_payload(rows, n, block)), [guard(x), guard(error)]
        run.sign_compress_with_feedback(*inputs, inputs[i], again, block, norm, live_)
        assert same(again, payload)
        assert same(inputs[i], new_error)
    again, place = guard(new_payload(1, n, block)[0]), guard(error[0])
    run.sign_reduce(payload.to(device), place, place, again, block, norm, None if live_ is None else live_[0])
    assert same(again, own)
    assert same(place, rest)
    guard.check()


def sound_top_k(provider: Any, payload: Tensor, n: int, form: Sequence[int]) -> bool:
    """Whether rows are such as compression makes."""
    sound = torch.ones((), dtype=torch.bool, device=payload.device)
    provider.topk_find_unsound(payload, sound, n, *form, F32)
    return bool(sound)


def check_top_k(
    run: Any, device: Any, rows: int, n: int, shape: tuple[int, int], bits: int, flavour: str, mask: str, seed: int
) -> None:
    """The operators of top-k, in columns of wider tensors, and with the residual in every place."""
    rng, form = np.random.default_rng(seed), (*shape, bits)
    x, error = (
        torch.from_numpy(rng.integers(-2, 3, (rows, n)).astype(np.float32))
        if flavour == "ties"
        else values(flavour, (rows, n), rng)
        for _ in range(2)
    )
    active, nbytes, results = mask_bits(mask, rows, n, rng), ops.topk_nbytes(n, *form), []
    rubbish = torch.full((rows, nbytes), 0xA5, dtype=torch.uint8)
    for provider, where in ((run, device), (reference_top_k, "cpu")):
        guard = Guarded(where)
        wide = [guard(torch.nn.functional.pad(t, (5, 3))) for t in (x, error, x * 0, x * 0, x * 0)]
        x_, error_, rest, out, masked = (t[:, 5 : 5 + n] for t in wide)
        plain, payload, mean, live_ = guard(rubbish), guard(rubbish), guard(x[0] * 0, 1), None
        if active is not None:
            live_ = guard(active, 1)
        provider.topk_compress(x_, plain, *form, live_)
        provider.topk_compress_with_feedback(x_, error_, rest, payload, *form, live_)
        provider.topk_decompress(payload, out, *form)
        provider.topk_decompress(payload, masked, *form, live_)
        provider.topk_decompress_mean(payload, mean, *form)
        for place in (x_, error_):
            again, before = guard(rubbish), place.clone()
            provider.topk_compress_with_feedback(x_, error_, place, again, *form, live_)
            assert same(again, payload)
            assert same(place, rest)
            place.copy_(before)
        for t in wide:
            assert not t[:, :5].any()
            assert not t[:, 5 + n :].any()
        guard.check()
        rng = np.random.default_rng(seed)
        verdicts = [sound_top_k(provider, payload, n, form)]
        for _ in range(12):
            bad = payload.clone()
            bad[rng.integers(rows), rng.integers(nbytes)] += int(rng.integers(1, 256))
            verdicts.append(sound_top_k(provider, bad, n, form))
        results.append((plain, payload, rest, out, masked, mean, x_, error_, torch.tensor(verdicts)))
    for a, b in zip(*results):
        assert same(a, b)
    assert results[0][-1][0]  # what was compressed from finite numbers


def check_threshold(
    run: Any, device: Any, rows: int, n: int, part: float, rounds: int, flavour: str, mask: str, seed: int
) -> None:
    """As :func:`check_top_k`, of top-k by threshold."""
    rng, k = np.random.default_rng(seed), max(1, round(part * n))
    x, error = (
        torch.from_numpy(rng.integers(-2, 3, (rows, n)).astype(np.float32))
        if flavour == "ties"
        else values("normal" if flavour == "wild" else flavour, (rows, n), rng)
        for _ in range(2)
    )
    if flavour == "wild":
        for bad in (math.nan, math.inf, -math.inf):
            x[rng.integers(rows), rng.integers(n, size=1 + n // 100)] = bad
    active, results = mask_bits(mask, rows, n, rng), []
    rubbish = torch.full((rows, ops.threshold_nbytes(n, k)), 0xA5, dtype=torch.uint8)
    for provider, where in ((run, device), (reference_threshold, "cpu")):
        guard = Guarded(where)
        wide = [guard(torch.nn.functional.pad(t, (5, 3))) for t in (x, error, *[torch.zeros_like(x)] * 3)]
        x_, error_, rest, out, masked = (t[:, 5 : 5 + n] for t in wide)
        plain, payload, mean, live_ = guard(rubbish), guard(rubbish), guard(torch.zeros(n), 1), None
        if active is not None:
            live_ = guard(active, 1)
        provider.threshold_compress(x_, plain, k, rounds, live_)
        provider.threshold_compress_with_feedback(x_, error_, rest, payload, k, rounds, live_)
        provider.threshold_decompress(payload, out, k)
        provider.threshold_decompress(payload, masked, k, live_)
        provider.threshold_decompress_mean(payload, mean, k)
        for place in (x_, error_):
            again, before = guard(rubbish), place.clone()
            provider.threshold_compress_with_feedback(x_, error_, place, again, k, rounds, live_)
            assert same(again, payload)
            assert same(place, rest)
            place.copy_(before)
        for t in wide:
            assert not t[:, :5].any()
            assert not t[:, 5 + n :].any()
        guard.check()
        results.append((plain, payload, rest, out, masked, mean, x_, error_))
    for a, b in zip(*results):
        assert same(
            a.nan_to_num(nan=7.0) if a.is_floating_point() else a, b.nan_to_num(nan=7.0) if b.is_floating_point() else b
        )


def momentum_oracle(m: Tensor, grads: list[Tensor], offsets: list[int], beta: float, alpha: float) -> Tensor:
    """beta m rounded, then the sum rounded once, by way of float64 (exact but for one double rounding in 2^29)."""
    beta, alpha = float(np.float32(beta)), float(np.float32(alpha))
    out = m * beta
    for g, o in zip(grads, offsets):
        place = out[o : o + g.numel()]
        place.copy_((place.double() + alpha * g.double().flatten()).float())
    return out


def check_momentum(
    run: Any,
    device: Any,
    rows: int,
    n: int,
    block: int,
    norm: int,
    flavour: str,
    mask: str,
    seed: int,
    sizes: Sequence[int],
) -> None:
    """The momentum, and its compression in one."""
    rng, guard = np.random.default_rng(seed), Guarded(device)
    m, error = values(flavour, (rows * n,), rng), values(flavour, (rows * n,), rng)
    active = mask_bits(mask, rows, n, rng)
    grads, offsets = tensors_in(rows * n, sizes, [F32, F32, BF16, F16], rng)
    x, payload, new_error = (
        momentum_oracle(m, grads, offsets, 0.9, 0.1),
        new_payload(rows, n, block),
        torch.empty(rows, n),
    )
    reference.sign_compress_with_feedback(x.view(rows, n), error.view(rows, n), new_error, payload, block, norm, active)
    grads, live_ = [g.to(device) if g.is_contiguous() else strided(g, device) for g in grads], None
    if active is not None:
        live_ = active.to(device)
    m_, out, error_ = guard(m, 1), guard(m, 2), guard(error, 3)
    run.momentum(m_, grads, offsets, 0.9, 0.1, out)
    assert same(out, x)
    for place in (guard(m), error_):  # the second in place
        again = guard(new_payload(rows, n, block))
        run.sign_compress_momentum(m_, grads, offsets, 0.9, 0.1, error_, place, again, block, norm, live_, 0, n)
        assert same(again, payload)
        assert same(place, new_error)
    assert same(m_, m)
    run.momentum(m_, grads, offsets, 0.9, 0.1, m_)
    assert same(m_, x)
    guard.check()


def strided(x: Tensor, device: Any) -> Tensor:
    """``x`` of one dimension, with every second element in memory left out."""
    return x.to(device).repeat_interleave(2)[::2]


def check_adam(
    run: Any,
    device: Any,
    rows: int,
    n: int,
    block: int,
    mask: str,
    seed: int,
    sizes: Sequence[int],
    layouts: bool = False,
) -> None:
    """The update of parameters, with and without decompression. layouts: also such as no kernel reads."""
    rng, guard = np.random.default_rng(seed), Guarded(device)
    payload = new_payload(rows, n, block)
    reference.sign_compress(values("normal", (rows, n), rng), payload, block, 2)
    active, v = mask_bits(mask, rows, n, rng), torch.from_numpy(rng.random(rows * n).astype(np.float32))
    v[::3] = 0.0
    ps, offsets = tensors_in(rows * n, sizes, [F32, F32, BF16, F16, F64] if layouts else [F32, BF16, F16], rng)
    ps = ps if layouts else [p.contiguous() for p in ps]
    steps, corrections = rng.random(len(ps)).tolist(), (rng.random(len(ps)) + 0.5).tolist()
    m = torch.empty(rows * n)
    reference.sign_decompress(payload, m.view(rows, n), block, active)
    ms, vs = reference.views(m, ps, offsets), reference.views(v, ps, offsets)
    moved = [guard(p, 1) if p.is_contiguous() else strided(p, device) for p in ps]
    again = [guard(p) if p.is_contiguous() else strided(p, device) for p in ps]
    versions, m_, v_ = [p._version for p in moved], guard(m * 0, 1), guard(v, 2)
    live_ = None if active is None else active.to(device)
    factors = steps, corrections, 0.05, 0.99
    run.sign_decompress_adam_(payload.to(device), m_, v_, moved, offsets, *factors, block, live_, 0, n)
    assert same(m_, m)
    assert same(v_, v)
    assert all(p._version > version for p, version in zip(moved, versions))
    flat_m, flat_v = m_.clone(), v_.clone()
    run.frozen_adam_apply_(again, reference.views(flat_m, ps, offsets), reference.views(flat_v, ps, offsets), *factors)
    assert all(same(p, q) for p, q in zip(moved, again))
    for p, before, m_i, v_i, step, correction in zip(moved, ps, ms, vs, steps, corrections):
        update = torch.where(v_i == 0, 0, step * m_i.double() / (v_i.double().sqrt() / correction + 0.05))
        expected = before.double() * 0.99 - update
        # Rounding of the state's arithmetic (six operations), and once to the dtype of p.
        room = 6 * torch.finfo(F32).eps * (before.double().abs() + update.abs())
        room += torch.finfo(p.dtype).eps / 2 * expected.abs() * 1.01 + 1e-7
        assert bool(((p.cpu().double() - expected).abs() <= room).all())
    guard.check()


def check_columns(
    run: Any, device: Any, block: int, norm: int, start: int, stop: int, seed: int, sizes: Sequence[int], rows: int = 3
) -> None:
    """Some columns of the rows: they become what they would alone, and nothing else is read or written."""
    rng, width = np.random.default_rng(seed), 3005
    total, n = rows * width, stop - start
    m, error = values("normal", (total,), rng), values("normal", (total,), rng)
    active = mask_bits("some", rows, width, rng)
    v = torch.from_numpy(rng.random(total).astype(np.float32))
    grads, offsets = tensors_in(total, sizes, [F32, BF16, F16], rng)

    def part(x: Tensor) -> Tensor:
        return x.cpu().view(rows, width)[:, start:stop].contiguous()

    def untouched(x: Tensor) -> bool:
        outside = torch.ones(rows, width, dtype=torch.bool)
        outside[:, start:stop] = False
        return bool((x.cpu().view(rows, width)[outside] == 7).all())

    x, active_part = (
        part(momentum_oracle(m, grads, offsets, 0.9, 0.1)),
        active[:, start // 8 : -(-stop // 8)].contiguous(),
    )
    payload, new_error = new_payload(rows, n, block), torch.empty(rows, n)
    reference.sign_compress_with_feedback(x, part(error), new_error, payload, block, norm, active_part)
    m_, error_, live_, v_, wire_ = (t.to(device) for t in (m, error, active, v, new_payload(rows, n, block)))
    grads_, rest = [g.to(device) for g in grads], torch.full_like(m_, 7.0)
    columns = block, norm, live_, start, stop
    run.sign_compress_momentum(m_, grads_, offsets, 0.9, 0.1, error_, rest, wire_, *columns)
    assert same(wire_, payload)
    assert same(part(rest), new_error)
    assert untouched(rest)
    run.sign_compress_momentum(m_, grads_, offsets, 0.9, 0.1, error_, error_, wire_, *columns)  # in its place
    assert same(wire_, payload)
    assert same(part(error_), new_error)

    out, expected = torch.full_like(m_, 7.0), torch.empty(rows, n)
    reference.sign_decompress(payload, expected, block, active_part)
    ps, moved = [g.contiguous() for g in grads], [g.contiguous().clone() for g in grads_]
    factors = [0.1] * len(ps), [0.5] * len(ps), 1e-8, 0.99
    run.sign_decompress_adam_(wire_, out, v_, moved, offsets, *factors, block, live_, start, stop)
    assert same(part(out), expected)
    assert untouched(out)
    inside = torch.zeros(rows, width, dtype=torch.bool)
    inside[:, start:stop] = True
    flat_inside = inside.flatten()
    for p, q, o in zip(ps, moved, offsets):
        at = slice(o, o + p.numel())
        whole = p.to(device).clone()
        run.frozen_adam_apply_([whole], [out[at].clone()], [v_[at].clone()], [0.1], [0.5], 1e-8, 0.99)
        assert same(q, torch.where(flat_inside[at], whole.cpu(), p))


def check_square_sum(run: Any, device: Any, dtype: torch.dtype) -> None:
    xs = [torch.randn(s).to(dtype) for s in ((), (0,), (3, 5), (20_001,))] + [torch.randn(8, 6).to(dtype).t()]
    xs += [torch.randn(3).to(dtype) for _ in range(150)]
    there = [x.to(device) if x.is_contiguous() else x.t().to(device).t() for x in xs]
    expected = math.fsum(v * v for x in xs for v in x.flatten().tolist())
    result = run.square_sum(there)
    assert (result.shape, result.dtype, result.device) == ((), F64, there[0].device)
    assert abs(float(result) - expected) <= 1e-13 * expected
    assert same(result, run.square_sum(there))
    each = run.square_sums(there)
    assert (each.shape, each.dtype, each.device) == ((len(xs),), F64, there[0].device)
    for square, x in zip(each.tolist(), there):
        assert abs(square - float(run.square_sum([x]))) <= 1e-13 * square
    for bad in (math.inf, -math.inf, math.nan):
        for where in (0, 15, 20_000):
            there[3][where] = bad
            assert not math.isfinite(run.square_sum(there))
            there[3][where] = 1.0
    assert math.isfinite(run.square_sum([torch.full((1000,), torch.finfo(F32).max).to(device)]))


def check_masks(run: Any, device: Any, n: int) -> None:
    guard, x = Guarded(device), torch.randn(n)
    x[torch.rand(n) < 0.3] = 0.0
    x[::5] = -0.0
    x[3::11] = math.nan
    x[4::11] = 1e-45
    bits = guard(torch.full(((n + 7) // 8,), 0xA5, dtype=torch.uint8), 1)
    run.pack_nonzero(guard(x, 1), bits)
    assert bits.tolist() == np.packbits(x.numpy() != 0, bitorder="little").tolist()
    y = guard(torch.randn(n), 1)
    expected = np.where(unpacked(bits.cpu(), n), y.cpu().numpy(), 0)
    run.zero_inactive_(y, bits)
    np.testing.assert_array_equal(y.cpu().numpy(), expected)
    guard.check()


def check_many_ranks(run: Any, device: Any) -> None:
    n, ranks = 1000, 70
    payload, out, expected = new_payload(ranks, n, 64), torch.empty(n), torch.empty(n)
    reference.sign_compress(torch.randn(ranks, n), payload, 64, 2)
    there = out.to(device)
    run.sign_decompress_mean(payload.to(device), there, 64)
    reference.sign_decompress_mean(payload, expected, 64)
    assert same(there, expected)


def check_many_tiles(run: Any, device: Any, n: int) -> None:
    """A block of more tiles than the threads that add them up."""
    x, error = torch.randn(1, n), torch.randn(1, n)
    payloads, rests = [new_payload(1, n, 0) for _ in range(2)], [torch.empty_like(x) for _ in range(2)]
    payload, rest = payloads[0].to(device), rests[0].to(device)
    run.sign_compress_with_feedback(x.to(device), error.to(device), rest, payload, 0, 1, None)
    reference.sign_compress_with_feedback(x, error, rests[1], payloads[1], 0, 1)
    assert same(payload, payloads[1])
    assert same(rest, rests[1])
