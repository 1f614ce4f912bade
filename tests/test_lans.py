"""The laws of Lans: its paper on lists, and how long a step is. What it shares with Lamb: test_plain.py."""

from __future__ import annotations

import math

import pytest
import torch
from given import Given
from oracle_lans import LansOracle
from torch import nn
from worlds import Toy, on_threads, same_bits, some_grads

import commopt
from commopt import Lans
from commopt.compress import Sign

SIZES = [(3, 7), (), (40,), (0, 2), (2, 5)]
HYPER = {"lr": 0.02, "eps": 1e-3, "betas": (0.9, 0.98)}


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.05])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("bounds", [(0.0, None), (0.4, 0.5), (0.0, 1.0)])
def test_every_step_is_that_of_the_paper_on_lists(normalize, decay, maximize, bounds):
    """float64. One tensor starts at 0 and one has no gradient but zeros: their ratio is 1, outside the bounds too. One
    has no gradient at every third step."""
    g = torch.Generator().manual_seed(3)
    params = [nn.Parameter(torch.randn(s, generator=g, dtype=torch.float64)) for s in SIZES]
    params[4].data.zero_()
    low, high = bounds
    oracle = LansOracle(
        [p.flatten().tolist() for p in params], lr=0.02, b1=0.9, b2=0.98, eps=1e-3, wd=decay, normalize=normalize,
        low=low, high=math.inf if high is None else high,
    )  # fmt: skip
    optimizer = Lans(
        params, **HYPER, weight_decay=decay, normalize_grad=normalize, min_coeff=low, max_coeff=high, maximize=maximize
    )
    for step in range(20):
        for i, p in enumerate(params):
            g = torch.Generator().manual_seed(100 * step + i)
            p.grad = torch.randn(p.shape, generator=g, dtype=torch.float64) * (i != 1)
        if step % 3 == 1:
            params[0].grad = None
        signs = -1 if maximize else 1
        oracle.step([None if p.grad is None else (signs * p.grad).flatten().tolist() for p in params])
        given = [None if p.grad is None else p.grad.clone() for p in params]
        optimizer.step()
        for p, kept, expected in zip(params, given, oracle.x):
            assert kept is None or torch.equal(p.grad, kept)
            torch.testing.assert_close(
                p.detach().flatten(), torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-14
            )


def test_clan_is_lans_on_compressed_means():
    """``compress_gradients`` and Lans: every step of every rank is the oracle's on the means that have come, which the
    ranks have alike, and whose sum stays near that of the gradients."""
    steps, sizes = 6, [(12, 3), (5,), (9,)]

    def run(backend):
        model = Given(sizes)
        handle = commopt.compress_gradients(model, Sign(16, norm="l1"), backend=backend)
        optimizer = Lans(model.parameters(), **HYPER, weight_decay=0.05)
        oracle = LansOracle([p.flatten().tolist() for p in model.params], lr=0.02, b1=0.9, b2=0.98, eps=1e-3, wd=0.05)
        came = torch.zeros(sum(math.prod(size) for size in sizes), dtype=torch.float64)
        for step in range(steps):
            model.backward(some_grads(sizes, step, backend.rank))
            came += torch.cat([p.grad.flatten() for p in model.params])
            oracle.step([p.grad.flatten().tolist() for p in model.params])
            optimizer.step()
            model.take()
            for p, expected in zip(model.params, oracle.x):
                torch.testing.assert_close(
                    p.detach().flatten(), torch.tensor(expected, dtype=p.dtype), rtol=1e-11, atol=1e-13
                )
        return [p.detach() for p in model.params], came, handle.comm_stats()["ratio"]

    ranks = on_threads(2, run)
    assert all(same_bits(ranks[0][0], params) for params, _, _ in ranks)
    exact = [torch.cat([g.flatten() for g in some_grads(sizes, t, r)]) for t in range(steps) for r in range(2)]
    mean = torch.stack(exact).sum(0) / 2
    assert 0 < float((ranks[0][1] - mean).norm()) < float(mean.norm())
    assert ranks[0][2] > 2


def test_a_tensor_of_zeros_takes_a_step_of_lr_times_the_update():
    """The first step: both directions are the sign of the gradient."""
    p = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    p.grad = torch.tensor([2.0, -2.0, 2.0, -2.0], dtype=torch.float64)
    Lans([p], lr=0.5, eps=1e-30, max_coeff=0.3).step()
    torch.testing.assert_close(p.detach(), torch.tensor([-0.5, 0.5, -0.5, 0.5]).double(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("normalize", [True, False])
def test_the_first_step_is_lr_times_the_norm_of_the_weights_and_none_is_longer(normalize):
    for scale in (1e-6, 1.0, 1e6):
        g = torch.Generator().manual_seed(0)
        p = nn.Parameter(torch.randn(100, generator=g, dtype=torch.float64))
        optimizer = Lans([p], lr=0.01, normalize_grad=normalize, eps=1e-20)
        for step in range(10):
            before = p.detach().clone()
            p.grad = torch.randn(100, generator=g, dtype=torch.float64) * scale
            optimizer.step()
            share = float((p.detach() - before).norm() / (0.01 * before.norm()))
            assert share == pytest.approx(1, rel=1e-9) if step == 0 else share < 1


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("bound", [None, 1.0])
def test_without_a_bound_an_old_momentum_moves_a_tensor_as_far_as_a_new_one(normalize, bound):
    p = nn.Parameter(torch.randn(10, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    optimizer = Lans([p], lr=0.01, weight_decay=0.0, normalize_grad=normalize, max_coeff=bound)
    for step in range(60):
        before = p.detach().clone()
        p.grad = torch.full_like(p, float(step == 0))
        optimizer.step()
    share = float((p.detach() - before).norm() / before.norm())
    assert share == pytest.approx(0.01 * 0.9, rel=1e-9) if bound is None else share < 1e-4


@pytest.mark.parametrize("normalize", [True, False])
def test_only_with_normalised_gradients_how_long_each_is_does_not_matter(normalize):
    def run(scales):
        g = torch.Generator().manual_seed(0)
        p = nn.Parameter(torch.randn(30, generator=g, dtype=torch.float64))
        optimizer = Lans([p], lr=0.02, normalize_grad=normalize, eps=1e-20)
        for scale in scales:
            p.grad = torch.randn(30, generator=g, dtype=torch.float64) * scale
            optimizer.step()
        return p.detach()

    a, b = run([1.0] * 6), run([1.0, 1e4, 1e-3, 10.0, 1e5, 1.0])
    far = float((a - b).norm() / a.norm())
    assert far < 1e-13 if normalize else far > 1e-3


def test_a_ratio_too_large_for_float32_makes_no_nan():
    """Of a direction that has all but vanished, beside an element that has none."""
    p = nn.Parameter(torch.full((2,), 1e6))
    p.grad = torch.tensor([1e-42, 0.0])
    Lans([p], lr=1.0, weight_decay=0.0, normalize_grad=False).step()
    assert p.isfinite().all()
    assert p[1] == 1e6
    assert 0 < p[0] < 1e6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": -0.1}, r"lr must be a number >= 0, got -0.1"),
        ({"betas": (1.0, 0.9)}, r"betas must be two numbers in \[0, 1\)"),
        ({"eps": 0.0}, r"eps must be a number > 0, got 0.0"),
        ({"weight_decay": -1}, r"weight_decay must be a number >= 0, got -1"),
        ({"min_coeff": -1}, r"min_coeff must be a number >= 0, got -1"),
        ({"max_coeff": 0}, r"max_coeff must be a number > 0, or None, got 0"),
        ({"max_coeff": math.inf}, r"max_coeff must be a number > 0, or None, got inf"),
        ({"min_coeff": 0.5, "max_coeff": 0.3}, r"max_coeff must be at least min_coeff=0.5, got 0.3"),
        ({"normalize_grad": 1}, r"normalize_grad must be True or False, got 1"),
        ({"maximize": 1}, r"maximize must be True or False, got 1"),
    ],
)
def test_an_argument_out_of_range(arguments, message):
    with pytest.raises(ValueError, match=message):
        Lans(Toy().parameters(), **arguments)
    optimizer = Lans([nn.Parameter(torch.zeros(1))])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], **arguments})
    assert len(optimizer.param_groups) == 1
