"""Buffers of a model while it is evaluated: the same on all ranks, as one chooses, and each rank's own afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from worlds import on_threads, same_bits

from commopt import LocalSGD, OneBitAdam
from commopt.comm import ThreadBackend


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.register_buffer("mask", torch.tensor([0.0, float("-inf"), 0.1]))
        self.register_buffer("constant", torch.tensor([1.0], dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x))


def trained(backend: ThreadBackend, cls: Any) -> tuple[Net, Any]:
    """After 3 steps on batches of each rank's own; rank 2 has seen one more."""
    net = Net()
    optimizer = cls(net.parameters(), lr=0.1, backend=backend) if cls is OneBitAdam else cls(
        net.parameters(), period=2, backend=backend
    )  # fmt: skip
    draw = torch.Generator().manual_seed(backend.rank)
    for _ in range(3):
        net.zero_grad()
        net(torch.randn(5, 3, generator=draw)).square().sum().backward()
        optimizer.step()
    if backend.rank == 2:
        net(torch.randn(5, 3, generator=draw))
    return net, optimizer


@pytest.mark.parametrize("cls", [LocalSGD, OneBitAdam])
@pytest.mark.parametrize("how", ["mean", "broadcast"])
def test_buffers_are_the_same_while_the_model_is_evaluated(cls: Any, how: Any) -> None:
    x = torch.randn(7, 3, generator=torch.Generator().manual_seed(9))

    def run(backend: ThreadBackend) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor, bool]:
        net, optimizer = trained(backend, cls)
        own = {name: t.clone() for name, t in net.state_dict().items()}
        with optimizer.averaged(net, how):
            inside = {name: t.clone() for name, t in net.named_buffers()}
            evaluated = net.eval()(x).detach()
        return own, inside, evaluated, same_bits(list(own.values()), list(net.state_dict().values()))

    ranks = on_threads(3, run)
    owns = [own for own, *_ in ranks]
    assert not torch.equal(owns[0]["norm.running_mean"], owns[1]["norm.running_mean"])
    for _, inside, evaluated, restored in ranks:
        assert restored
        assert torch.equal(evaluated, ranks[0][2])
        assert int(inside["norm.num_batches_tracked"]) == 3  # rank 0's
        for name in ("mask", "constant"):  # constants stay what they are, to the bit
            assert same_bits([inside[name]], [owns[0][name]])
        for name in ("norm.running_mean", "norm.running_var"):
            mean = torch.stack([own[name].double() for own in owns]).mean(0)
            expected = mean.float() if how == "mean" else owns[0][name]
            torch.testing.assert_close(inside[name], expected, rtol=1e-6, atol=1e-8)


def test_without_the_model_buffers_are_each_ranks_own() -> None:
    def run(backend: ThreadBackend) -> list[Tensor]:
        net, optimizer = trained(backend, LocalSGD)
        with optimizer.averaged():
            return [net.norm.running_mean.clone()]

    a, b = on_threads(2, run)
    assert not same_bits(a, b)


def test_another_word_is_refused() -> None:
    def run(backend: ThreadBackend) -> None:
        net, optimizer = trained(backend, LocalSGD)
        with (
            pytest.raises(ValueError, match="must be 'mean' or 'broadcast', got 'sum'"),
            optimizer.averaged(net, "sum"),
        ):
            pass

    on_threads(2, run)
