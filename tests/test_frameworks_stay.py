"""What other people's tools do to a model or to an optimizer, and must go on doing: adapters, functional calls,
recomputation, tied and parametrized weights, wrappers, a profiler, sub-groups, pipelines, experts by rank."""

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


class Half(nn.Module):
    """One of two stages."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        with seeded(stage):
            self.linear = nn.Linear(8, 8) if stage == 0 else nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def example(step: int, replica: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(10 * step + replica)
    return torch.randn(4, 8, generator=draw), torch.randn(4, 3, generator=draw)


def in_a_pipeline(rank: int, world: int) -> list[Tensor]:
    """Ranks 0 and 1 are the two stages of one replica, 2 and 3 those of another: each stage has an optimizer, over the
    ranks that have it. Gives the parameters of this rank's stage."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    replica, stage = divmod(rank, 2)
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model = Half(stage)
    pipe = PipelineStage(model, stage, 2, torch.device("cpu"), group=rows[replica])
    schedule = ScheduleGPipe(pipe, n_microbatches=2, loss_fn=nn.functional.mse_loss)
    optimizer = OneBitAdam(model.parameters(), lr=1e-2, freeze_step=FREEZE, process_group=columns[stage])
    for t in range(STEPS):
        optimizer.zero_grad()
        x, y = example(t, replica)
        schedule.step(*([x] if stage == 0 else []), **({} if stage == 0 else {"target": y}))
        optimizer.step()
    assert optimizer.phase == "compressed"
    return params_of(model)


def in_one_piece(backend: Any) -> list[list[Tensor]]:
    """The same without a pipeline: the parameters of both stages."""
    stages = [Half(0), Half(1)]
    optimizers = [OneBitAdam(s.parameters(), lr=1e-2, freeze_step=FREEZE, backend=backend) for s in stages]
    for t in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for x, y in zip(*(part.chunk(2) for part in example(t, backend.rank))):
            (nn.functional.mse_loss(stages[1](stages[0](x)), y) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
    return [params_of(stage) for stage in stages]


class Experts(nn.Module):
    """A gate that all ranks have, and an expert that some have."""

    def __init__(self, expert: int) -> None:
        super().__init__()
        with seeded(0):
            self.gate = nn.Linear(8, 8)
        with seeded(1 + expert):
            self.expert = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.expert(torch.tanh(self.gate(x)))


def with_experts(rank: int, world: int) -> dict[str, Any]:
    """Expert 0 is on ranks 0 and 2, expert 1 on 1 and 3: each has an optimizer over its ranks, and the gate one over
    all. Besides, the same by hand with torch's Adam on means of gradients, as far as the warm-up goes."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine, model, other = groups[rank % 2], Experts(rank % 2), Experts(rank % 2)
    settings: dict[str, Any] = {"lr": 1e-2, "freeze_step": FREEZE}
    gate = OneBitAdam(model.gate.parameters(), **settings)
    expert = OneBitAdam(model.expert.parameters(), **settings, process_group=mine)
    adam = torch.optim.Adam(other.parameters(), lr=1e-2)
    warm, by_hand = [], []
    for t in range(STEPS):
        x, y = example(t, rank)
        for net in (model, other):
            net.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
        gate.step()
        expert.step()
        for part, group in ((other.gate, None), (other.expert, mine)):
            for p in part.parameters():
                dist.all_reduce(p.grad, group=group)
                p.grad.div_(dist.get_world_size(group))
        adam.step()
        if t == FREEZE - 1:
            warm, by_hand = params_of(model), params_of(other)
    assert gate.phase == expert.phase == "compressed"
    return {"warm": warm, "by hand": by_hand, "gate": params_of(model.gate), "expert": params_of(model.expert)}


def on_a_grid(rank: int, world: int) -> dict[str, Any]:
    return {"pipeline": in_a_pipeline(rank, world), "experts": with_experts(rank, world)}


@pytest.fixture(scope="module")
def grid() -> list[dict[str, Any]]:
    return on_processes(4, on_a_grid)


def test_a_pipeline_of_two_replicas_trains_as_the_model_in_one_piece(grid: list[dict[str, Any]]) -> None:
    whole = on_threads(2, in_one_piece)[0]
    for rank, result in enumerate(grid):
        assert same_bits(result["pipeline"], whole[rank % 2])


def test_experts_by_rank_are_averaged_by_those_that_have_them(grid: list[dict[str, Any]]) -> None:
    found = [result["experts"] for result in grid]
    for result in found:
        for a, b in zip(result["warm"], result["by hand"]):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        assert same_bits(result["gate"], found[0]["gate"])
    assert same_bits(found[0]["expert"], found[2]["expert"])
    assert same_bits(found[1]["expert"], found[3]["expert"])
    assert not same_bits(found[0]["expert"], found[1]["expert"])
    for result in found:
        assert not same_bits(result["gate"], result["warm"][:2])  # it goes on in the compressed phase
