"""The laws of OneBitLion: it is Lion on the mean gradient but for what compression owes, and owes no more than that."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from oracle_lion import OneBitLionOracle, lion_step
from torch import Tensor, nn
from worlds import (
    Toy,
    backward,
    flat,
    flat_given,
    give,
    node_mean,
    on_threads,
    params_of,
    same_bits,
    some_grads,
    some_of,
    some_params,
    tensors_in,
    through_a_file,
    train,
)

from commopt import OneBitAdam, OneBitLion
from commopt.agreement.decision import AGREEMENT_BYTES
from commopt.bucket import ROW_MULTIPLE
from commopt.comm import LocalBackend
from commopt.compress import Compressor, Identity, Int4, Sign, TopK
from commopt.optim import join_state_dict, split_state_dict

SIZES: list[tuple[int, ...]] = [(3, 7), (), (40,), (0, 2), (2, 5)]
SETTINGS: dict[str, Any] = {"lr": 0.02, "betas": (0.8, 0.95), "weight_decay": 0.05}


class Lion:
    """Lion as its paper has it, for one process."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float, sign: int = 1) -> None:
        self.params, self.lr, self.betas, self.wd, self.sign = list(params), lr, betas, weight_decay, sign
        self.m = {p: torch.zeros_like(p) for p in self.params}

    @torch.no_grad()
    def step(self) -> None:
        b1, b2 = self.betas
        for p in (p for p in self.params if p.grad is not None):
            g, m = p.grad * self.sign, self.m[p]
            c = (m * b1).add_(g, alpha=1 - b1)
            if self.wd:
                p.mul_(1 - self.lr * self.wd)
            p.sub_(c.sign(), alpha=self.lr)
            m.mul_(b2).add_(g, alpha=1 - b2)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("maximize", [False, True])
def test_one_rank_is_lion_to_the_bit(decay: float, maximize: bool) -> None:
    ours, theirs = Toy(), Toy()
    optimizer = OneBitLion(ours.parameters(), 1e-2, (0.8, 0.95), decay, maximize=maximize, backend=LocalBackend())
    reference = Lion(theirs.parameters(), 1e-2, (0.8, 0.95), decay, -1 if maximize else 1)
    assert optimizer.phase == "plain"
    train(ours, optimizer, range(8))
    train(theirs, reference, range(8))
    assert same_bits(params_of(ours), params_of(theirs))
    m = [(optimizer.state[p]["exp_avg"], reference.m[q]) for p, q in zip(ours.parameters(), theirs.parameters())
         if p.requires_grad]  # fmt: skip
    assert same_bits(*map(list, zip(*m)))
    assert optimizer.comm_stats()["total"]["bytes"] == 0
    x, momentum = lion_step(1.0, 0.5, -3.0, 0.1, 0.9, 0.99, 0.2)  # the oracle's, by hand: c = .45 - .3
    assert (x, momentum) == (1 - 0.1 * (1 + 0.2), 0.99 * 0.5 - (1 - 0.99) * 3)


@pytest.mark.parametrize("world", [(2, 1), (3, 1), (4, 1), (4, 2)], ids=str)
@pytest.mark.parametrize(
    ("compressor", "block", "norm"),
    [(Identity(), None, None), (Sign(16), 16, "l2"), (Sign(16, "l1"), 16, "l1"), (Sign(None), None, "l2")],
)
@pytest.mark.parametrize(("absent", "overlap"), [(False, False), (True, False), (True, True)])
def test_every_step_is_that_of_the_loop_on_lists(
    world: tuple[int, int], compressor: Compressor, block: int | None, norm: str | None, absent: bool, overlap: bool
) -> None:
    """Parameters, momentum, and residuals, of every element; in float64 no bit may be another. ``absent``: parameters
    come and go, in blocks that they share with others. With nodes of two ranks these are the workers."""
    world_size, inside = world
    nodes = world_size // inside
    oracle = OneBitLionOracle(
        flat(some_params(SIZES)), nodes, lr=0.02, b1=0.8, b2=0.95, wd=0.05, row_multiple=ROW_MULTIPLE, block=block,
        norm=norm, rows=world_size,
    )  # fmt: skip
    expected = []

    def grads(step: int, rank: int) -> list[Any]:
        whole = some_grads(SIZES, step, rank)
        return some_of(whole, step, rank) if absent else whole

    for step in range(20):
        ranks = [flat_given(grads(step, r), SIZES) for r in range(world_size)]
        oracle.step([node_mean(ranks[n * inside : (n + 1) * inside]) for n in range(nodes)])
        expected.append(oracle.x + oracle.m[: oracle.size])
    # means over 3 ranks of float32 scales: see test_onebit_adam
    atol = 1e-6 if world_size == 3 else 1e-12

    def run(backend: Any) -> None:
        mine, grouped = some_params(SIZES), backend if inside == 1 else backend.nodes(inside)
        optimizer = OneBitLion(mine, compressor=compressor, overlap=overlap, backend=grouped, **SETTINGS)
        assert optimizer.phase == "compressed"  # from the first step on
        for step, right in enumerate(expected):
            give(mine, grads(step, backend.rank))
            optimizer.step()
            found = flat(mine) + flat([optimizer.state[p]["exp_avg"] for p in mine])
            assert max(abs(a - b) for a, b in zip(found, right)) <= atol, step
        if inside == 1:
            residuals = [optimizer.residuals[p] for p in mine]
            for name, right in (("worker_error", oracle.worker), ("server_error", oracle.server)):
                errors = flat([r[name] for r in residuals])
                assert max((abs(a - b) for a, b in zip(errors, right[backend.rank])), default=0) <= atol, name

    on_threads(world_size, run)


@pytest.mark.parametrize("world_size", [2, 4])
def test_without_loss_it_is_lion_on_the_mean_gradient(world_size: int) -> None:
    """Of a model, whose gradients follow from where it is."""
    theirs = Toy(torch.float64)
    reference = Lion(theirs.parameters(), 1e-2, (0.8, 0.95), 0.1)
    for step in range(10):
        grads = []
        for rank in range(world_size):
            backward(theirs, step, rank, world_size)
            grads.append([None if p.grad is None else p.grad.clone() for p in theirs.parameters()])
        for p, of_ranks in zip(theirs.parameters(), zip(*grads)):
            p.grad = None if of_ranks[0] is None else sum(of_ranks) / world_size
        reference.step()

    def run(backend: Any) -> list[Tensor]:
        model = Toy(torch.float64)
        optimizer = OneBitLion(
            model.parameters(), 1e-2, (0.8, 0.95), 0.1, compressor=Identity(), backend=backend, bucket_mb=2e-4
        )
        train(model, optimizer, range(10), backend.rank, world_size)
        return params_of(model)

    for ours in on_threads(world_size, run):
        for a, b in zip(ours, params_of(theirs)):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("compressor", [Sign(), Sign(None, "l1"), Int4(), TopK(4)])
def test_replicas_are_bit_identical_after_every_step(world_size: int, dtype: torch.dtype, compressor: Any) -> None:
    def run(backend: Any) -> list[list[Tensor]]:
        model, history = Toy(dtype), []
        optimizer = OneBitLion(model.parameters(), 1e-2, compressor=compressor, backend=backend, bucket_mb=2e-4)
        for step in range(8):
            train(model, optimizer, range(step, step + 1), backend.rank, world_size)
            history.append(params_of(model) + [optimizer.state[p]["exp_avg"].clone() for p in optimizer.params[:3]])
        return history

    rank_0, *others = on_threads(world_size, run)
    for history in others:
        assert all(same_bits(a, b) for a, b in zip(rank_0, history))
    assert not same_bits(rank_0[0], rank_0[-1])


def test_the_momentum_is_lions_but_for_the_residuals() -> None:
    """However long the run, m stays where Lion's momentum on the same gradients is, and residuals are no larger than
    what is sent. Without residuals it is off by half of itself."""
    b1, b2 = 0.9, 0.99

    def grad(step: int, rank: int) -> Tensor:
        g = torch.Generator().manual_seed(10 * step + rank)
        return torch.randn(512, generator=g, dtype=torch.float64) + torch.linspace(-2, 2, 512)

    def run(backend: Any, forgets: bool) -> float:
        p = nn.Parameter(torch.zeros(512, dtype=torch.float64))
        optimizer, right = OneBitLion([p], betas=(b1, b2), backend=backend), torch.zeros(512, dtype=torch.float64)
        distances = []
        for step in range(300):
            p.grad = grad(step, backend.rank)
            optimizer.step()
            for bucket in optimizer.buckets if forgets else ():
                bucket.feedback.worker.zero_()
                bucket.feedback.server.zero_()
            right.mul_(b2).add_((grad(step, 0) + grad(step, 1)) / 2, alpha=1 - b2)
            distances.append(float((optimizer.state[p]["exp_avg"] - right).norm() / right.norm()))
        assert optimizer.comm_stats()["residual_ratio"] < 2
        return sum(distances[150:]) / 150

    assert on_threads(2, lambda backend: run(backend, False))[0] < 0.15
    assert on_threads(2, lambda backend: run(backend, True))[0] > 0.4


def test_what_never_has_a_gradient_stays_within_a_few_lr_or_where_it_is() -> None:
    """A bit is never 0; the compressors that have a 0 leave it alone. A parameter without any gradient never moves."""

    def run(backend: Any, compressor: Any) -> Tensor:
        p, alone = nn.Parameter(torch.ones(64)), nn.Parameter(torch.ones(3))
        optimizer = OneBitLion([p, alone], lr=1e-3, compressor=compressor, backend=backend)
        furthest = torch.zeros(64)
        for step in range(200):
            p.grad = torch.randn(64, generator=torch.Generator().manual_seed(2 * step + backend.rank))
            p.grad[40:] = 0
            optimizer.step()
            furthest = torch.maximum(furthest, (p.detach() - 1).abs())
        assert torch.equal(alone, torch.ones(3))
        return furthest[40:]

    for compressor, within in ((None, 8e-3), (Int4(), 0.0), (TopK(4), 0.0)):
        for furthest in on_threads(2, lambda backend, compressor=compressor: run(backend, compressor)):
            assert float(furthest.max()) <= within
            assert (float(furthest.max()) > 0) == (within > 0)


def test_bytes_are_those_of_two_rows_from_the_first_step_on() -> None:
    def run(backend: Any) -> None:
        p = nn.Parameter(torch.zeros(4 * 4096))
        optimizer = OneBitLion([p], backend=backend)
        p.grad = torch.ones_like(p)
        optimizer.step()
        stats = optimizer.comm_stats()
        assert stats["phase"] == "compressed"
        sent = 2 * 3 * Sign().nbytes(4096)
        assert sent < stats["step"]["bytes"] < sent + 8 * 4 * AGREEMENT_BYTES
        assert stats["momentum_norm"] > 0

    on_threads(4, run)


# saving ---------------------------------------------------------------------------------------------------------------


def trained(backend: Any, steps: range, state: Any = None) -> tuple[Toy, OneBitLion]:
    model = Toy(torch.float64)
    optimizer = OneBitLion(model.parameters(), compressor=Sign(16), backend=backend, **SETTINGS)
    if state is not None:
        model.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
    train(model, optimizer, steps, backend.rank, backend.world_size)
    return model, optimizer


def saved_by(world_size: int) -> Any:
    """What a run of ``world_size`` ranks has after 5 steps: weights, and the state's two parts of all ranks."""

    def run(backend: Any) -> Any:
        model, optimizer = trained(backend, range(5))
        return through_a_file([model.state_dict(), *split_state_dict(optimizer.state_dict())])

    ranks = on_threads(world_size, run)
    return ranks[0][0], ranks[0][1], [mine for _, _, mine in ranks]


def test_at_other_world_sizes_residuals_go_on() -> None:
    """One rank owes nobody: it takes what is left into its momentum, as the next c would have brought it there."""
    weights, replicated, parts = saved_by(2)
    residuals = {
        i: (parts[0]["state"][i]["worker_error"] + parts[1]["state"][i]["worker_error"]) / 2
        + torch.cat([part["state"][i]["server_error"] for part in parts]).view(entry["exp_avg"].shape)
        for i, entry in replicated["state"].items()
    }
    assert any(bool(e.any()) for e in residuals.values())

    def run(backend: Any) -> Any:
        joined = join_state_dict(replicated, parts, backend.rank, backend.world_size)
        _, optimizer = trained(backend, range(0), (weights, joined))
        out = optimizer.state_dict()
        return out["state"], out.get("residuals", {}).get("state", {})

    ((state, _),) = on_threads(1, run)
    for i, entry in replicated["state"].items():
        right = entry["exp_avg"] + (1 - 0.95) / (1 - 0.8) * residuals[i]
        torch.testing.assert_close(state[i]["exp_avg"], right, rtol=0, atol=1e-14)
    ranks = on_threads(3, run)
    for i, entry in replicated["state"].items():
        assert torch.equal(ranks[0][0][i]["exp_avg"], entry["exp_avg"])
        workers = sum(mine[i]["worker_error"] for _, mine in ranks) / 3
        servers = torch.cat([mine[i]["server_error"] for _, mine in ranks]).view(residuals[i].shape)
        torch.testing.assert_close(workers + servers, residuals[i], rtol=0, atol=1e-14)


def test_residuals_that_are_missing_are_told_and_those_that_never_were_are_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for world_size, told in ((2, 1), (1, 0)):
        weights, replicated, _ = saved_by(world_size)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            on_threads(2, lambda backend, state=(weights, replicated): trained(backend, range(0), state))
        assert caplog.text.count("the residuals in the loaded state are missing") == told


def test_the_momentum_of_other_optimizers_is_taken_only_as_what_it_is() -> None:
    """Of a plain Lion's state it is; another optimizer of commopt has another one."""
    model, other = Toy(), Toy()
    optimizer = OneBitLion(model.parameters(), lr=1e-2, backend=LocalBackend())
    train(model, optimizer, range(3))
    plain = optimizer.state_dict()
    plain["state"] = {i: {"exp_avg": entry["exp_avg"]} for i, entry in plain["state"].items()}
    plain["param_groups"][0].pop("optimizer")
    second = OneBitLion(other.parameters(), lr=1e-2, backend=LocalBackend())
    second.load_state_dict(plain)
    assert same_bits(*([t for t in tensors_in(o.state_dict()) if t.dim()] for o in (optimizer, second)))
    adam = OneBitAdam(Toy().parameters(), backend=LocalBackend())
    with pytest.raises(ValueError, match="is that of OneBitAdam, and this is OneBitLion"):
        second.load_state_dict(adam.state_dict())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"betas": (0.99, 0.9)}, r"betas must be b1 <= b2 .*got \(0.99, 0.9\)"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"lr": -1.0}, "lr"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"maximize": 1}, "maximize"),
        ({"compressor": "Sign"}, "compressor"),
    ],
)
def test_an_argument_out_of_range_on_one_rank_is_an_error_on_all(settings: dict[str, Any], message: str) -> None:
    def run(backend: Any) -> None:
        with pytest.raises(ValueError, match=message):
            OneBitLion(Toy().parameters(), backend=backend, **(settings if backend.rank else {}))

    on_threads(2, run)


def test_keywords_that_frameworks_give_are_taken_and_others_are_not() -> None:
    OneBitLion(Toy().parameters(), foreach=True, fused=False, backend=LocalBackend())
    for key, value in (("eps", 1e-8), ("amsgrad", False)):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{key}'"):
            OneBitLion(Toy().parameters(), backend=LocalBackend(), **{key: value})


def test_a_config_names_it() -> None:
    from commopt.train.config import CompressorConfig, OptimConfig
    from commopt.train.optimizer import make_optimizer

    compressor = CompressorConfig("Sign", {"block": 16})
    config = OptimConfig("OneBitLion", 1e-3, weight_decay=0.5, compressor=compressor, args={"betas": [0.8, 0.95]})
    optimizer = make_optimizer(config, Toy(), LocalBackend())
    assert isinstance(optimizer, OneBitLion)
    assert optimizer.compressor == Sign(16)
    assert optimizer.guard.check_every == config.check_every
    assert {(group["lr"], group["betas"]) for group in optimizer.param_groups} == {(1e-3, (0.8, 0.95))}
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]
