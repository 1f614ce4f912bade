"""Parameters that are put into another group train by that group, as with torch, and keep their state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from every import COMMUNICATING, make
from torch import nn
from worlds import on_threads, same_bits

from commopt import OneBitAdam
from commopt.comm import ThreadBackend

RANKS = 2


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))


def train(net: nn.Module, optimizer: Any, steps: range, rank: int) -> None:
    for step in steps:
        draw = torch.Generator().manual_seed(10 * step + rank)
        for p in net.parameters():
            p.grad = torch.randn(p.shape, generator=draw)
        optimizer.step()


def into_a_new_one(net: nn.Module, optimizer: Any) -> None:
    out = net[0].weight
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p is not out]
    optimizer.add_param_group({"params": [out], "lr": 0.0})


def into_another(net: nn.Module, optimizer: Any) -> None:
    first, second = optimizer.param_groups
    out = net[0].weight
    first["params"] = [p for p in first["params"] if p is not out]
    second["params"].insert(0, out)
    second["lr"] = 0.0


@pytest.mark.parametrize("name", COMMUNICATING)
@pytest.mark.parametrize("move", [into_a_new_one, into_another])
@pytest.mark.parametrize("when", [1, 5, 8])
def test_it_moves_by_its_new_group_and_the_others_by_theirs(
    name: str, move: Callable[[nn.Module, Any], None], when: int
) -> None:
    """With a learning rate of 0 it stands from then on; the others are as in a run that has not moved it, at first."""

    def run(backend: ThreadBackend) -> list[torch.Tensor]:
        net = model()
        groups = [{"params": list(net[0].parameters())}, {"params": list(net[1].parameters())}]
        optimizer = make(name, groups, backend=backend)
        train(net, optimizer, range(when), backend.rank)
        if hasattr(optimizer, "synchronize"):
            optimizer.synchronize()
        move(net, optimizer)
        before = [p.detach().clone() for p in net.parameters()]
        copied = copy.deepcopy((net, optimizer))
        train(net, optimizer, range(when, when + 9), backend.rank)
        optimizer.synchronize()
        moved = [not torch.equal(p, q) for p, q in zip(net.parameters(), before)]
        # by an outer momentum, or what the last round has left of its error
        coasts = name in ("DiLoCo", "NoLoCo") or (name == "QSparseLocalSGD" and when > 3)
        assert moved == [coasts, True, *[coasts or move is into_a_new_one] * 2]
        train(*copied, range(when, when + 9), backend.rank)
        copied[1].synchronize()
        assert same_bits(list(net.parameters()), list(copied[0].parameters()))
        return [p.detach() for p in net.parameters()]

    a, b = on_threads(RANKS, run)
    assert same_bits(a, b)


@pytest.mark.parametrize("frozen", ["never", "first", "later"])
def test_a_layer_that_is_given_a_new_group_warms_up_once_more(frozen: str) -> None:
    """The remedy that the warning of a layer unfrozen too late names."""

    def run(backend: ThreadBackend) -> None:
        net = model()
        net[1].requires_grad_(frozen != "first")
        optimizer = OneBitAdam(net.parameters(), lr=1e-2, freeze_step=3, backend=backend)
        train(net, optimizer, range(2), backend.rank)
        net[1].requires_grad_(frozen == "never")
        train(net, optimizer, range(2, 6), backend.rank)
        net[1].requires_grad_(True)
        (group,) = optimizer.param_groups
        group["params"] = list(net[0].parameters())
        optimizer.add_param_group({"params": list(net[1].parameters())})
        assert [optimizer.phase_of(g) for g in optimizer.param_groups] == ["compressed", "warmup"]
        before = [optimizer.state[p]["exp_avg_sq"].clone() for p in net.parameters()]
        train(net, optimizer, range(6, 8), backend.rank)
        after = [optimizer.state[p]["exp_avg_sq"] for p in net.parameters()]
        assert [not torch.equal(a, b) for a, b in zip(before, after)] == [False, False, True, True]

    on_threads(RANKS, run)


def test_a_rank_that_moves_one_alone_is_told() -> None:
    def run(backend: ThreadBackend) -> None:
        net = model()
        groups = [{"params": list(net[0].parameters())}, {"params": list(net[1].parameters())}]
        optimizer = OneBitAdam(groups, lr=1e-2, freeze_step=3, backend=backend)
        train(net, optimizer, range(2), backend.rank)
        if backend.rank:
            into_another(net, optimizer)
        with pytest.raises(RuntimeError, match=r"of parameter group [01] is .* on rank 1 and .* on rank 0"):
            train(net, optimizer, range(2, 3), backend.rank)

    on_threads(RANKS, run)
