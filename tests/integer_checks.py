"""What every provider of the integer operators has to do: the same as the reference, bit for bit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from oracle_integers import value_of
from payloads import FLAVOURS, mask_bits, same, tensors_in, values
from torch import Tensor

from commopt import ops
from commopt.ops import reference_integers as reference
from commopt.ops.integers import E4M3, E5M2, LARGEST_CODE

BITS = list(LARGEST_CODE)
ANY = {
    "rows": st.integers(1, 3),
    "n": st.one_of(st.integers(1, 40), st.integers(41, 700), st.sampled_from([2049, 4096, 8191, 9001, 17_000])),
    "bits": st.sampled_from(BITS),
    "block": st.sampled_from([8, 16, 32, 64, 128, 128, 256, 512, 2048, 8192]),
    "stochastic": st.booleans(),
    "rotated": st.booleans(),
    "flavour": st.sampled_from([*FLAVOURS, "ties"]),
    "mask": st.sampled_from(["none", "none", "some", "blocks", "all", "inactive"]),
    "bad": st.sampled_from([None, None, None, math.nan, math.inf, -math.inf]),
    "seed": st.integers(0, 2**32 - 1),
}


def new_payload(rows: int, n: int, bits: int, block: int) -> Tensor:
    """A payload full of rubbish, every byte of which has to be written."""
    return torch.full((rows, ops.int_nbytes(n, bits, block)), 0xA5, dtype=torch.uint8)


def ties(shape: tuple[int, int], bits: int, block: int, rng: np.random.Generator) -> Tensor:
    """Elements halfway between what two codes stand for, in blocks whose scale is 1."""
    top = LARGEST_CODE[bits]
    if bits in (E4M3, E5M2):
        stand_for = torch.tensor([v for code in range(128) if (v := value_of(code, bits)) <= top])
        halfway = (stand_for[1:] + stand_for[:-1]) / 2
        x = halfway[rng.integers(0, len(halfway), shape)] * torch.from_numpy(rng.choice([1.0, -1.0], shape)).float()
    else:
        x = torch.from_numpy(rng.integers(-int(top), int(top) + 1, shape) + 0.5).float()
    x[:, ::block] = top
    return x


def check(
    run: Any,
    device: Any,
    rows: int,
    n: int,
    bits: int,
    block: int,
    stochastic: bool,
    rotated: bool,
    flavour: str,
    mask: str,
    bad: float | None,
    seed: int,
) -> None:
    """``run`` has the operators as attributes, and works on ``device``."""
    rng = np.random.default_rng(seed)
    if flavour == "ties":
        x, error = ties((rows, n), bits, block, rng), torch.zeros(rows, n)
    else:
        x, error = values(flavour, (rows, n), rng), values(flavour, (rows, n), rng)
    if bad is not None:
        x[rng.integers(rows), rng.integers(n)] = bad
    active, coding, results = mask_bits(mask, rows, n, rng), (bits, block, stochastic, rotated, seed), []
    there = [None if t is None else t.to(device) for t in (x, error, active)]
    for provider, (x_, error_, live_) in ((run, there), (reference, (x, error, active))):
        plain, payload, own = (new_payload(r, n, bits, block).to(x_.device) for r in (rows, rows, 1))
        own = own[0]
        shapes = (rows, n), (rows, n), (rows, n), n, n
        new_error, out, masked, mean, rest = (torch.empty(s, device=x_.device) for s in shapes)
        provider.int_compress(x_, plain, *coding, live_)
        provider.int_compress_with_feedback(x_, error_, new_error, payload, *coding, live_)
        provider.int_decompress(payload, out, bits, block, rotated)
        provider.int_decompress(payload, masked, bits, block, rotated, live_)
        provider.int_decompress_mean(payload, mean, bits, block, rotated)
        provider.int_reduce(payload, error_[0], rest, own, *coding, None if live_ is None else live_[0])
        results.append((plain, payload, new_error, out, masked, mean, own, rest))
    for mine, expected in zip(*results):
        assert same(mine, expected)
    _, payload, new_error, *_, own, rest = results[1]
    for i in range(2):  # the new residual may take the place of either
        again, inputs = new_payload(rows, n, bits, block).to(device), [there[0].clone(), there[1].clone()]
        run.int_compress_with_feedback(*inputs, inputs[i], again, *coding, there[2])
        assert same(again, payload)
        assert same(inputs[i], new_error)
    again, place = torch.empty_like(own, device=device), there[1][0].clone()
    run.int_reduce(results[0][1], place, place, again, *coding, None if active is None else there[2][0])
    assert same(again, own)
    assert same(place, rest)
    assert same(there[0], x)
    assert same(there[1], error)


COLUMNS = {name: ANY[name] for name in ("bits", "block", "stochastic", "rotated", "mask", "seed")} | {
    "rows": st.integers(1, 3),
    "start": st.sampled_from([0, 8, 256, 1024]),
    "stop": st.sampled_from([1032, 2048, 3005]),
    "sizes": st.sampled_from([[1, 5, 700], [300], [1, 2, 30], [3000]]),
    "in_place": st.booleans(),
}


def check_columns(
    run: Any,
    device: Any,
    rows: int,
    bits: int,
    block: int,
    stochastic: bool,
    rotated: bool,
    mask: str,
    seed: int,
    start: int,
    stop: int,
    sizes: list[int],
    in_place: bool,
) -> None:
    """Of columns: a momentum that is not formed, and tensors that are written where they lie. Nothing else is. (Factors
    whose products are exact: not every machine rounds a sum of products once.)"""
    rng, width = np.random.default_rng(seed), 3005
    m, error = (values("normal", (rows * width,), rng) for _ in range(2))
    active, coding = mask_bits(mask, rows, width, rng), (bits, block, stochastic, rotated, seed)
    grads, offsets = tensors_in(rows * width, sizes, [torch.float32, torch.bfloat16, torch.float16], rng)
    results = []
    for provider, place in ((run, device), (reference, "cpu")):
        m_, residual, live_ = (None if t is None else t.to(place) for t in (m, error.clone(), active))
        payload = new_payload(rows, stop - start, bits, block).to(place)
        rest = residual if in_place else torch.full_like(m_, 7.0)
        mine, outs = [g.to(place) for g in grads], [torch.full_like(g, 7.0).to(place) for g in grads]
        provider.int_compress_momentum(
            m_, mine, offsets, 0.5, 0.25, residual, rest, payload, *coding, live_, start, stop
        )
        provider.int_decompress_to(payload, outs, offsets, rows * width, bits, block, rotated, live_, start, stop)
        assert same(m_, m)
        assert in_place or same(residual, error)
        results.append((payload, rest, *outs))
    for mine, expected in zip(*results):
        assert same(mine, expected)
