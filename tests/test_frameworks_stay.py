"""What other people's tools do to a model or to an optimizer, and must go on doing: adapters, functional calls,
recomputation, tied and parametrized weights, wrappers, a profiler, sub-groups."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint
from worlds import on_processes, on_threads, params_of, same_bits, seeded

from commopt import CSER, OneBitAdam

STEPS, FREEZE = 6, 3


class Net(nn.Module):
    """Two layers whose weights are tied, or not, and a recomputed block, or not."""

    def __init__(self, tied: bool = False, recomputed: bool = False, normed: bool = False) -> None:
        super().__init__()
        with seeded():
            self.embedding, self.first, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        if normed:
            weight_norm(self.first)
        self.recomputed = recomputed

    def block(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = checkpoint(self.block, x, use_reentrant=False) if self.recomputed else self.block(x)
        return nn.functional.cross_entropy(self.head(x), tokens.roll(1))


def batch(step: int, rank: int) -> Tensor:
    return torch.randint(0, 11, (6,), generator=torch.Generator().manual_seed(10 * step + rank))


def optimizer_of(model: nn.Module, backend: Any = None, **settings: Any) -> OneBitAdam:
    return OneBitAdam(model.parameters(), lr=1e-2, freeze_step=FREEZE, bucket_mb=3e-4, backend=backend, **settings)


Loss = Callable[[nn.Module, Tensor], Tensor]


def trained(
    make: Callable[[], nn.Module],
    loss: Loss = lambda model, tokens: model(tokens),
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    **settings: Any,
) -> list[list[Tensor]]:
    """The parameters of two ranks after some steps, each within ``around()``."""

    def run(backend: Any) -> list[Tensor]:
        model = make()
        optimizer = optimizer_of(model, backend, **settings)
        for t in range(STEPS):
            with around() if backend.rank == 0 else contextlib.nullcontext():
                optimizer.zero_grad()
                loss(model, batch(t, backend.rank)).backward()
                optimizer.step()
        assert optimizer.phase == "compressed"
        return params_of(model)

    ranks = on_threads(2, run)
    assert same_bits(*ranks)
    assert not any(torch.equal(a, b) for a, b in zip(ranks[0], make().parameters()))
    return ranks


@pytest.mark.parametrize("overlap", [False, True])
def test_functional_calls_recomputation_and_a_profiler_train_as_without(overlap: bool) -> None:
    plain = trained(Net, overlap=overlap)[0]

    def called(model: nn.Module, tokens: Tensor) -> Tensor:
        return functional_call(model, dict(model.named_parameters()), (tokens,))

    profile = torch.profiler.profile
    assert same_bits(trained(Net, called, overlap=overlap)[0], plain)
    assert same_bits(trained(lambda: Net(recomputed=True), overlap=overlap)[0], plain)
    assert same_bits(trained(Net, around=profile, overlap=overlap)[0], plain)


@pytest.mark.parametrize("overlap", [False, True])
def test_tied_and_parametrized_weights_are_one_parameter_each(overlap: bool) -> None:
    assert len(trained(lambda: Net(tied=True), overlap=overlap)[0]) == 3
    assert len(trained(lambda: Net(normed=True), overlap=overlap)[0]) == 5  # its direction and its length


class Lookahead:
    """A wrapper that is no torch optimizer: every second step goes half of the way back."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.steps = optimizer, 0
        self.slow = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self) -> None:
        self.optimizer.step()
        self.steps += 1
        if self.steps % 2 == 0:
            for slow, p in zip(self.slow, self.optimizer.param_groups[0]["params"]):
                p.copy_(slow.lerp_(p, 0.5))


def test_a_wrapper_that_moves_the_weights_between_steps_keeps_replicas_equal(caplog: pytest.LogCaptureFixture) -> None:
    def run(backend: Any) -> list[Tensor]:
        model = Net()
        inner = optimizer_of(model, backend)
        wrapper = Lookahead(inner)
        for t in range(STEPS):
            inner.zero_grad()
            model(batch(t, backend.rank)).backward()
            wrapper.step()
        inner.zero_grad()
        inner._check_next = True  # digests
        model(batch(STEPS, backend.rank)).backward()
        wrapper.step()
        return params_of(model)

    assert same_bits(*on_threads(2, run))
    assert "differ" not in caplog.text


def test_of_a_model_with_lora_adapters_only_these_are_sent() -> None:
    peft = pytest.importorskip("peft")

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with seeded():
                self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.tanh(self.first(x))).square().mean()

    def run(backend: Any) -> tuple[list[Tensor], list[Tensor], int, int]:
        config = peft.LoraConfig(r=2, target_modules=["first", "second"])
        model = peft.get_peft_model(Tokens(), config)
        optimizer = optimizer_of(model, backend)
        frozen = [p.detach().clone() for p in model.parameters() if not p.requires_grad]
        for t in range(STEPS):
            optimizer.zero_grad()
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(2 * t + backend.rank))
            model(x).backward()
            optimizer.step()
        assert same_bits(frozen, [p.detach() for p in model.parameters() if not p.requires_grad])
        stats = optimizer.comm_stats()
        adapters = [p for p in model.parameters() if p.requires_grad]
        return params_of(nn.ParameterList(adapters)), frozen, stats["step"]["bytes"], stats["fp32_bytes"]

    (a, frozen, sent, fp32), (b, *_) = on_threads(2, run)
    assert same_bits(a, b)
    numel = 4 * 2 * 64
    assert sum(p.numel() for p in a) == numel
    assert sum(p.numel() for p in frozen) > 8 * numel
    assert fp32 == 4 * numel
    assert sent < fp32 / 4


def in_sub_groups(rank: int, world: int) -> tuple[list[Tensor], bool]:
    """Ranks 0 and 2 train together, and rank 1 alone."""
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    group, mine = groups[rank % 2], [0, 2] if rank % 2 == 0 else [1]
    model = Net()
    optimizer = OneBitAdam(model.parameters(), lr=1e-2, freeze_step=FREEZE, process_group=group)
    other = CSER(Net().parameters(), lr=1e-2, process_group=group)
    for t in range(STEPS):
        optimizer.zero_grad()
        model(batch(t, mine.index(rank))).backward()
        optimizer.step()
    return params_of(model), optimizer.topology.world_size == other.topology.world_size == len(mine)


def test_sub_groups_train_apart() -> None:
    ranks = on_processes(3, in_sub_groups)
    assert all(right for _, right in ranks)
    assert same_bits(ranks[0][0], ranks[2][0])
    assert not same_bits(ranks[0][0], ranks[1][0])
