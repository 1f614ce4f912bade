"""0/1 Adam with few steps between its rounds, and runs of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from worlds import params_of, tensors_in

from commopt import ZeroOneAdam
from commopt.optim import SyncPolicy, VariancePolicy

VARIANCE, SYNC = VariancePolicy(kappa=2, stop=8), SyncPolicy(first=2, double_every=8, longest=4)
"""Steps 1, 2, 4, 6 exact, up to 8 compressed, then rounds at 10, 12, 14, 16, 20, 24, ..."""


def make(model: nn.Module, backend: Any, **settings: Any) -> ZeroOneAdam:
    given = {"lr": 1e-2, "variance": VARIANCE, "sync": SYNC, "eps": 1e-6, **settings}
    return ZeroOneAdam(model.parameters(), backend=backend, **given)


def kind(optimizer: ZeroOneAdam) -> str:
    return optimizer.kind_of(optimizer.param_groups[0])


def whole(model: nn.Module, optimizer: ZeroOneAdam) -> list[Tensor]:
    return params_of(model) + tensors_in(optimizer.state_dict())


SIZES = [(3, 7), (), (40,), (0, 2), (2, 5)]


def leaves() -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(s, generator=g, dtype=torch.float64)) for s in SIZES]


def grad(step: int, rank: int, i: int) -> Tensor:
    g = torch.Generator().manual_seed(100 * step + 10 * rank + i)
    out = torch.randn(SIZES[i], generator=g, dtype=torch.float64) + 0.3
    if i == 2 and step < 15:
        out[5:9] = 0  # no gradient here when the variance was refreshed, but later
    if i == 2 and step < 3:
        out[12:15] = 0  # and here from the third refresh on
    return out


def fixed_gradients(backend: Any, steps: int, **settings: Any) -> tuple[list[nn.Parameter], ZeroOneAdam]:
    """A run on gradients that do not depend on the parameters."""
    mine = leaves()
    optimizer = ZeroOneAdam(mine, backend=backend, **{"lr": 0.02, "variance": VARIANCE, "sync": SYNC, **settings})
    for step in range(steps):
        for i, p in enumerate(mine):
            p.grad = grad(step, backend.rank, i)
        optimizer.step()
    return mine, optimizer
