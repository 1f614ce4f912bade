"""The laws of Lamb: its paper on lists, and what bias correction would change. What it shares: test_plain.py."""

from __future__ import annotations

import math

import pytest
import torch
from oracle_lamb import OneBitLambOracle
from torch import nn
from worlds import Toy

from commopt import Lamb

SIZES = [(3, 7), (), (40,), (0, 2), (2, 5)]
HYPER = {"lr": 0.02, "eps": 1e-6, "weight_decay": 0.05, "betas": (0.9, 0.98)}


@pytest.mark.parametrize("decay", [0.0, 0.05])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("bounds", [(0.01, 10.0), (0.4, 0.5), (0.0, 1.0)])
def test_every_step_is_that_of_the_paper_on_lists(decay, maximize, bounds):
    """float64. One tensor starts at 0 and one has no gradient but zeros: their ratio is 1, outside the bounds too."""
    g = torch.Generator().manual_seed(3)
    params = [nn.Parameter(torch.randn(s, generator=g, dtype=torch.float64)) for s in SIZES]
    params[4].data.zero_()
    oracle = OneBitLambOracle(
        [p.flatten().tolist() for p in params], 1, None, lr=0.02, b1=0.9, b2=0.98, eps=1e-6, wd=decay,
        low=bounds[0], high=bounds[1],
    )  # fmt: skip
    optimizer = Lamb(
        params, **{**HYPER, "weight_decay": decay}, min_coeff=bounds[0], max_coeff=bounds[1], maximize=maximize
    )
    for step in range(20):
        for i, p in enumerate(params):
            g = torch.Generator().manual_seed(100 * step + i)
            p.grad = torch.randn(p.shape, generator=g, dtype=torch.float64) * (i != 1)
        oracle.step([[(-p.grad if maximize else p.grad).flatten().tolist() for p in params]])
        optimizer.step()
        for p, expected in zip(params, oracle.x):
            torch.testing.assert_close(
                p.detach().flatten(), torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-14
            )


def corrected(p, grads, decay, low, high, eps=1e-30):
    """LAMB of the paper, with bias correction, in float64: x after each step."""
    x, m, v, out = p.detach().clone(), torch.zeros_like(p), torch.zeros_like(p), []
    for t, g in enumerate(grads, 1):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        u = m / (1 - 0.9**t) / ((v / (1 - 0.999**t)).sqrt() + eps) + decay * x
        x = x - 0.02 * float((x.norm() / u.norm()).clamp(low, high)) * u
        out.append(x)
    return out


@pytest.mark.parametrize(
    ("decay", "bounds", "same"),
    [(0.0, (1e-3, 1e3), True), (0.3, (1e-3, 1e3), False), (0.0, (1e-3, 0.05), False)],
)
def test_the_trust_ratio_takes_out_bias_correction_without_decay_and_within_its_bounds_only(decay, bounds, same):
    g = torch.Generator().manual_seed(3)
    p = nn.Parameter(torch.randn(50, generator=g, dtype=torch.float64))
    grads = [torch.randn(50, generator=g, dtype=torch.float64) + 1 for _ in range(12)]
    expected, before = corrected(p, grads, decay, *bounds), [p.detach().clone()]
    optimizer = Lamb([p], lr=0.02, weight_decay=decay, eps=1e-30, min_coeff=bounds[0], max_coeff=bounds[1])
    for step, (grad, x) in enumerate(zip(grads, expected), 1):
        p.grad = grad
        optimizer.step()
        before.append(p.detach().clone())
        far = float((p - x).detach().norm() / x.norm())
        assert far < 1e-14 if same else far > 1e-4
        if bounds[1] == 0.05 and step == 1:  # at a bound, the step is larger by what is not corrected
            torch.testing.assert_close(before[1] - before[0], (x - before[0]) * 0.1 / 0.001**0.5, rtol=1e-12, atol=0)


def test_a_tensor_of_zeros_takes_a_step_of_lr_times_the_update():
    p = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    optimizer = Lamb([p], lr=0.5, betas=(0.9, 0.99), eps=1e-30, max_coeff=0.3)
    p.grad = torch.full_like(p, 2.0)
    optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full_like(p, -0.5 * 0.1 / math.sqrt(0.01)), rtol=1e-12, atol=0)


def test_the_step_is_lr_times_the_norm_of_the_weights_whatever_the_gradient():
    for scale in (1e-6, 1.0, 1e6):
        p = nn.Parameter(torch.randn(100, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
        before = p.detach().clone()
        p.grad = torch.randn(100, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * scale
        Lamb([p], lr=0.01, max_coeff=100.0, eps=1e-20).step()
        torch.testing.assert_close((p.detach() - before).norm(), 0.01 * before.norm(), rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": -0.1}, r"lr must be a number >= 0, got -0.1"),
        ({"betas": (1.0, 0.9)}, r"betas must be two numbers in \[0, 1\)"),
        ({"eps": 0.0}, r"eps must be a number > 0, got 0.0"),
        ({"weight_decay": -1}, r"weight_decay must be a number >= 0, got -1"),
        ({"min_coeff": -1}, r"min_coeff must be a number >= 0, got -1"),
        ({"max_coeff": 0}, r"max_coeff must be a number > 0, got 0"),
        ({"min_coeff": 0.5, "max_coeff": 0.3}, r"max_coeff must be at least min_coeff=0.5, got 0.3"),
        ({"maximize": 1}, r"maximize must be True or False, got 1"),
    ],
)
def test_an_argument_out_of_range(arguments, message):
    with pytest.raises(ValueError, match=message):
        Lamb(Toy().parameters(), **arguments)
    optimizer = Lamb([nn.Parameter(torch.zeros(1))])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], **arguments})
    assert len(optimizer.param_groups) == 1
