"""A recommender of which a step has a few of the rows learns as with AdamW."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from worlds import on_threads

from commopt import OneBitAdam, ZeroOneAdam
from commopt.comm.threads import ThreadBackend

USERS, ITEMS, BATCH, STEPS = 1000, 400, 64, 400


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


OF_USERS, OF_ITEMS = torch.randn(USERS, generator=generator(1)), torch.randn(ITEMS, generator=generator(2))


class Recommender(nn.Module):
    """What a user gives on average, and an item gets; and tastes, which there are none of to learn."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Parameter(torch.zeros(USERS, 1)), nn.Parameter(torch.zeros(ITEMS, 1))
        self.tastes = nn.Parameter(0.1 * torch.randn(USERS, 4, generator=generator(3)))
        self.kinds = nn.Parameter(0.1 * torch.randn(ITEMS, 4, generator=generator(4)))

    def forward(self, i: Tensor, j: Tensor) -> Tensor:
        return self.users[i, 0] + self.items[j, 0] + (self.tastes[i] * self.kinds[j]).sum(-1)


def loss(model: Recommender, draw: torch.Generator, n: int = BATCH, noise: float = 1.0) -> Tensor:
    i, j = (torch.randint(0, rows, (n,), generator=draw) for rows in (USERS, ITEMS))
    return (model(i, j) - OF_USERS[i] - OF_ITEMS[j] - noise * torch.randn(n, generator=draw)).square().mean()


def heldout(backend: ThreadBackend, make: Callable[..., Any], seeds: list[int]) -> float:
    model = Recommender()
    optimizer, draws = make(list(model.parameters()), 3e-2, backend), [generator(seed) for seed in seeds]
    for _ in range(STEPS):
        optimizer.zero_grad()
        (sum(loss(model, draw) for draw in draws) / len(draws)).backward()
        optimizer.step()
    with torch.no_grad():
        return loss(model, generator(77), 4000, noise=0.0).item()


def adamw(params: list[Tensor], lr: float, backend: ThreadBackend) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr, weight_decay=0.0)


@pytest.mark.long(but="ZeroOneAdam")
@pytest.mark.parametrize("cls", [OneBitAdam, ZeroOneAdam])
def test_a_recommender_learns_as_with_adamw(cls: type[OneBitAdam | ZeroOneAdam]) -> None:
    """Of zeros the loss is 2. A variance of the first gradients makes it 0.33, or 25,000 in 0/1 Adam."""

    def make(params: list[Tensor], lr: float, backend: ThreadBackend) -> OneBitAdam | ZeroOneAdam:
        return cls(params, lr, backend=backend)

    plain = heldout(ThreadBackend, adamw, [0, 1])
    ours = on_threads(2, lambda backend: heldout(backend, make, [backend.rank]))
    assert ours[0] == ours[1] < 1.25 * plain < 0.2
