"""The least that a variance stands as: its law on lists, runs that are lost without it, and what stays as it was."""

from __future__ import annotations

import math
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import raised
from torch import Tensor, nn
from worlds import on_threads, same_bits, tensors_in

from commopt import OneBitAdam, OneBitLamb, ZeroOneAdam
from commopt.comm import ThreadBackend
from commopt.compress import Compressor, Identity, Int4, Sign, TopK
from commopt.optim import VariancePolicy, thaw


def some_v(numel: int, dtype: torch.dtype) -> Tensor:
    """Variances over eight orders of magnitude, and zeros."""
    draw = torch.Generator().manual_seed(numel)
    v = 10.0 ** (torch.rand(numel, generator=draw, dtype=torch.float64) * -8)
    v[torch.rand(numel, generator=draw) < 0.2] = 0.0
    return v.to(dtype)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("compressor", "block"),
    [(Sign(block=16), 16), (Sign(None), None), (Int4(block=64), 64), (TopK(1, 16), 2048)],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5])
def test_the_variance_is_raised_to_a_share_of_the_mean_of_its_block(world_size, compressor, block, dtype, share):
    def run(backend: ThreadBackend) -> tuple[list[float], list[float], list[float]]:
        params = [nn.Parameter(torch.ones(n, dtype=dtype)) for n in (70, 1, 400)]
        optimizer = OneBitAdam(params, freeze_step=1, compressor=compressor, min_variance=share, backend=backend)
        seen: list[list[float]] = []
        for _ in range(4):
            for p in params:
                p.grad = torch.ones_like(p)
            optimizer.step()
            (bucket,) = optimizer.buckets
            if not seen:
                bucket["exp_avg_sq"][: bucket.numel] = some_v(bucket.numel, dtype)
                bucket.active = None
                seen.append(bucket["exp_avg_sq"].tolist())
            seen.append(bucket["exp_avg_sq"].tolist())
        assert seen[1] == seen[0]
        assert seen[2] == seen[3] == seen[4], "raised once, before its first use"
        return seen[0], seen[2], raised(seen[0], world_size, block, share)

    for before, after, expected in on_threads(world_size, run):
        tolerance = 1e-6 if dtype == torch.float32 else 1e-12
        assert after == pytest.approx(expected, rel=tolerance, abs=0)
        assert [x > 0 for x in after] == [x > 0 for x in before]
        assert (after != before) == (share > 0)


def test_without_blocks_it_is_the_mean_of_the_whole_row():
    """Which has more elements than a block, where a compressor has none."""

    def run(backend: ThreadBackend) -> None:
        p = nn.Parameter(torch.ones(9000, dtype=torch.float64))
        optimizer = OneBitAdam([p], freeze_step=1, compressor=Sign(None), backend=backend)
        for step in range(2):
            p.grad = torch.ones_like(p)
            optimizer.step()
            if step == 0:
                (bucket,) = optimizer.buckets
                bucket["exp_avg_sq"][:9000] = 1e-6
                bucket["exp_avg_sq"][:2048] = 1.0
                bucket.active = None
        row = bucket.padded // 2
        assert row > 4096
        assert bucket["exp_avg_sq"][row - 1].item() == pytest.approx(0.01 * 2048 / row, rel=1e-3)
        assert bucket["exp_avg_sq"][row].item() == 1e-6

    on_threads(2, run)


@pytest.mark.parametrize(
    ("apart", "factor", "compressor", "warns"),
    [
        (False, 24.0, Sign(), True),
        (False, 9.0, Sign(), False),
        (True, 24.0, Sign(), False),
        (False, 24.0, Int4(), False),
    ],
)
@pytest.mark.parametrize(
    ("cls", "settings"), [(OneBitAdam, {"freeze_step": 3}), (ZeroOneAdam, {"variance": VariancePolicy(kappa=3)})]
)
def test_a_scalar_whose_gradients_dwarf_those_it_shares_a_scale_with_is_named(
    caplog: pytest.LogCaptureFixture,
    cls: type[OneBitAdam | ZeroOneAdam],
    settings: dict[str, Any],
    apart: bool,
    factor: float,
    compressor: Compressor,
    warns: bool,
) -> None:
    """When compression begins: in 0/1 Adam after the refreshes at every step."""

    def run(backend: ThreadBackend) -> None:
        matrix, scalar = nn.Parameter(torch.ones(40, 40)), nn.Parameter(torch.zeros(()))
        groups = [{"params": [matrix]}, {"params": [scalar]}] if apart else [{"params": [matrix, scalar]}]
        optimizer = cls(groups, compressor=compressor, backend=backend, **settings)
        for step in range(4):
            matrix.grad = (torch.arange(1600) % 2 * 2.0 - 1).view(40, 40)
            scalar.grad = torch.tensor(factor * (-1) ** step)  # beside 800: their rms is 1.3 then
            optimizer.step()

    on_threads(2, run)
    assert ("1 parameters (a parameter of shape ()) have gradients up to 18 times" in caplog.text) == warns
    assert ("times as large as those" in caplog.text) == warns


@pytest.mark.parametrize("cls", [OneBitAdam, OneBitLamb, ZeroOneAdam])
def test_where_nothing_is_lost_nothing_is_raised(cls):
    settings = {"variance": VariancePolicy(kappa=1, stop=2)} if cls is ZeroOneAdam else {"freeze_step": 2}

    def run(backend: ThreadBackend) -> list[float]:
        p = nn.Parameter(torch.ones(3, dtype=torch.float64))
        optimizer = cls([p], compressor=Identity(), backend=backend, betas=(0.9, 0.5), **settings)
        for _ in range(4):
            p.grad = torch.tensor([1.0, 1e-6, 0.0], dtype=torch.float64)
            optimizer.step()
        assert optimizer.phase in ("compressed", "frozen")
        return optimizer.state[p]["exp_avg_sq"].tolist()

    share = 0.5 if cls is ZeroOneAdam else 0.75  # of one refresh, of two steps
    for v in on_threads(2, run):
        assert v == pytest.approx([share, share * 1e-12, 0.0], rel=1e-9)


def test_lamb_takes_the_mean_of_the_tensor():
    def run(backend: ThreadBackend) -> list[Tensor]:
        params = [nn.Parameter(torch.ones(4, dtype=torch.float64)) for _ in range(2)]
        optimizer = OneBitLamb(params, freeze_step=60, backend=backend)
        for _ in range(61):
            params[0].grad = torch.tensor([1.0, 1e-3, 0.0, 0.5], dtype=torch.float64)
            params[1].grad = params[0].grad * 1e-6
            optimizer.step()
        return [optimizer.state[p]["exp_avg_sq"] / (1 - 0.999**60) for p in params]

    for v, small in on_threads(2, run):
        assert v.tolist() == pytest.approx([1.0, 0.01 * 1.250001 / 3, 0.0, 0.25], rel=1e-9)
        assert small.tolist() == pytest.approx([x * 1e-12 for x in v.tolist()], rel=1e-9)


# runs that are lost without it ----------------------------------------------------------------------------------------


@cache
def digits() -> tuple[Tensor, Tensor]:
    """Images, (1797, 64) from 0 to 1, and what they show."""
    from sklearn.datasets import load_digits  # takes seconds to import

    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images).float() / 16, torch.tensor(labels)


LOST: dict[str, tuple[Any, dict[str, Any]]] = {
    "early": (OneBitAdam, {"betas": (0.9, 0.99), "freeze_step": 40}),
    "auto": (OneBitAdam, {"freeze_step": "auto", "thaw": "never", "lr": 3e-3}),
    "0/1": (ZeroOneAdam, {}),
    "0/1, stops": (ZeroOneAdam, {"variance": VariancePolicy(kappa=4, stop=40)}),
    "lamb": (OneBitLamb, {"freeze_step": 40, "lr": 1e-2}),
}


def digits_loss(cls: Any, settings: dict[str, Any], steps: int, min_variance: float) -> float:
    """Held-out loss of a small network with ReLU on digits, some pixels of which are rarely lit."""
    images, labels = digits()

    def run(backend: ThreadBackend) -> float:
        draw = torch.Generator().manual_seed(backend.rank)
        shapes = [(64, 64), (64,), (64, 64), (64,), (10, 64), (10,)]
        start = torch.Generator().manual_seed(5)
        params = [nn.Parameter((torch.rand(s, generator=start) - 0.5) / 4) for s in shapes]

        def loss(x: Tensor, y: Tensor) -> Tensor:
            for w, b in zip(params[::2], params[1::2]):
                x = F.linear(x.relu(), w, b)
            return F.cross_entropy(x, y)

        optimizer = cls(params, backend=backend, min_variance=min_variance, **{"lr": 1e-3, **settings})
        for _ in range(steps):
            at = torch.randint(0, 1400, (32,), generator=draw)
            optimizer.zero_grad()
            loss(images[at], labels[at]).backward()
            optimizer.step()
        return loss(images[1400:], labels[1400:]).item()

    one, other = on_threads(2, run)
    assert one == other
    return one


@pytest.mark.parametrize("name", LOST)
def test_a_small_network_with_relu_learns(name):
    assert digits_loss(*LOST[name], steps=120, min_variance=0.01) < 1.0


def test_as_in_the_papers_it_is_lost():
    """What the default is for: of another learning rate or architecture nothing is said."""
    assert digits_loss(*LOST["early"], steps=48, min_variance=0.0) > 10


@pytest.mark.parametrize("settings", [{"freeze_step": 60}, {}], ids=["60", "auto"])
def test_a_bias_before_a_batch_norm_stays_where_it_is(settings):
    """Its gradient is rounding: what noise does to it, the running mean would have to follow."""
    images, labels = digits()

    def run(backend: ThreadBackend) -> tuple[float, float, float]:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(64, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 10))
        before = net[0].bias.detach().clone()
        optimizer = OneBitAdam(net.parameters(), lr=3e-3, betas=(0.9, 0.98), backend=backend, **settings)
        draw = torch.Generator().manual_seed(backend.rank)
        for _ in range(150):
            at = torch.randint(0, 1400, (32,), generator=draw)
            optimizer.zero_grad()
            F.cross_entropy(net(images[at]), labels[at]).backward()
            optimizer.step()
        assert optimizer.phase == "compressed"
        x, y = images[1400:], labels[1400:]
        losses = [F.cross_entropy(net.train(mode)(x), y).item() for mode in (False, True)]
        return *losses, float((net[0].bias.detach() - before).abs().max())

    for evaluating, training, moved in on_threads(2, run):
        assert moved < 0.5
        assert evaluating < training + 0.2


# what stays -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [OneBitAdam, OneBitLamb, ZeroOneAdam])
def test_a_run_that_goes_on_from_any_step_is_the_same_to_the_bit(cls):
    """The variance is raised once: a state that was saved after that is not raised anew."""
    settings = {"variance": VariancePolicy(kappa=2, stop=6)} if cls is ZeroOneAdam else {"freeze_step": 4}

    def steps(optimizer: Any, params: list[Tensor], rank: int, numbers: range) -> list[Tensor]:
        for t in numbers:
            for i, p in enumerate(params):
                draw = torch.Generator().manual_seed(100 * t + 10 * rank + i)
                p.grad = torch.randn(p.shape, generator=draw) * 10.0 ** -(torch.arange(p.numel()) % 5).view(p.shape)
            optimizer.step()
        return [p.detach().clone() for p in params] + tensors_in(optimizer.state_dict())

    def run(backend: ThreadBackend, stop: int) -> tuple[list[Tensor], list[Tensor]]:
        made = [[nn.Parameter(torch.ones(9, 5)), nn.Parameter(torch.ones(30))] for _ in range(2)]
        one, other = (cls(params, lr=1e-2, betas=(0.9, 0.9), backend=backend, **settings) for params in made)
        steps(one, made[0], backend.rank, range(stop))
        other.load_state_dict(one.state_dict())
        for p, q in zip(*made):
            q.data.copy_(p.data)
        return steps(one, made[0], backend.rank, range(stop, 10)), steps(other, made[1], backend.rank, range(stop, 10))

    for stop in (3, 4, 5, 6, 7):
        for one, other in on_threads(2, partial(run, stop=stop)):
            assert same_bits(one, other)


def test_one_rank_alone_leaves_the_variance_to_adam():
    p = nn.Parameter(torch.ones(3))
    optimizer = OneBitAdam([p], freeze_step=1)
    for _ in range(4):
        p.grad = torch.tensor([1.0, 1e-4, 0.0])
        optimizer.step()
    root = (optimizer.state[p]["exp_avg_sq"] / (1 - 0.999**4)).sqrt()
    assert root.tolist() == pytest.approx([1.0, 1e-4, 0.0], rel=1e-4)


@pytest.mark.parametrize("cls", [OneBitAdam, OneBitLamb, ZeroOneAdam])
@pytest.mark.parametrize("value", [-0.1, 1.0, math.nan, "a", None, True])
def test_a_share_out_of_range(cls, value):
    with pytest.raises(ValueError, match="min_variance must be"):
        cls([nn.Parameter(torch.ones(3))], min_variance=value)


def two_groups(late: int, compressor: Compressor, backend: ThreadBackend) -> tuple[list[nn.Parameter], OneBitAdam]:
    """Of a parameter each; ``late``: the freeze_step of the second."""
    params = [nn.Parameter(torch.zeros(4096)) for _ in range(2)]
    groups = [{"params": params[:1], "freeze_step": 5}, {"params": params[1:], "freeze_step": late}]
    return params, OneBitAdam(groups, lr=1e-3, thaw="never", compressor=compressor, backend=backend)


def largest_step(params: list[nn.Parameter], optimizer: OneBitAdam, steps: range, rank: int) -> float:
    """Of an element of the second parameter, in lr; every other one has gradients of a thousandth."""
    size, most = torch.ones(4096), 0.0
    size[::2] = 1e-3
    for step in steps:
        before = params[1].detach().clone()
        for i, p in enumerate(params):
            p.grad = torch.randn(4096, generator=torch.Generator().manual_seed(10 * step + 2 * rank + i)) * size
        optimizer.step()
        most = max(most, float((params[1].detach() - before).abs().max()) / 1e-3)
    return most


def test_a_variance_that_another_compressor_has_left_is_raised():
    def run(backend: ThreadBackend) -> float:
        params, optimizer = two_groups(5, Identity(), backend)
        largest_step(params, optimizer, range(20), backend.rank)
        again, other = two_groups(5, Sign(), backend)
        other.load_state_dict(optimizer.state_dict())
        return largest_step(again, other, range(20, 25), backend.rank)

    assert all(0.5 < most < 15 for most in on_threads(2, run))


@pytest.mark.parametrize("grows", [False, True])
def test_a_variance_that_comes_into_a_compressed_group_is_raised(grows):
    def run(backend: ThreadBackend) -> float:
        params, optimizer = two_groups(1000, Sign(), backend)
        largest_step(params, optimizer, range(20), backend.rank)
        first, second = optimizer.param_groups
        first["params"], second["params"] = second["params"], first["params"]
        if grows:
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(8))]})
        return largest_step(params, optimizer, range(20, 25), backend.rank)

    assert all(0.5 < most < 15 for most in on_threads(2, run))


def test_a_variance_is_raised_once_more_by_a_share_that_is_set_later():
    def run(backend: ThreadBackend) -> list[list[float]]:
        p = nn.Parameter(torch.zeros(128, dtype=torch.float64))  # the whole buffer
        optimizer = OneBitAdam([p], freeze_step=2, thaw="always", compressor=Sign(block=16), backend=backend)
        (group,), seen = optimizer.param_groups, []
        for share in (0.01, 0.5, 0.1):
            group["min_variance"] = share
            for _ in range(4):
                p.grad = 10.0 ** -(torch.arange(128, dtype=torch.float64) % 7)
                optimizer.step()
            seen.append(optimizer.state[p]["exp_avg_sq"].tolist())
        return seen

    for first, larger, smaller in on_threads(2, run):
        assert larger == pytest.approx(raised(first, 2, 16, 0.5), rel=1e-7)
        assert min(larger) > 2 * min(first)
        assert smaller == larger


def test_gradients_are_compared_with_a_variance_as_it_was_raised_last():
    def run(backend: ThreadBackend) -> None:
        p = nn.Parameter(torch.zeros(128))
        optimizer = OneBitAdam([p], freeze_step=2, thaw="always", compressor=Sign(block=16), backend=backend)
        (group,), (bucket,), found = optimizer.param_groups, optimizer.buckets, []
        for share in (0.01, 0.01, 0.01, 0.01, 0.5):
            group["min_variance"] = share
            p.grad = 10.0 ** -(torch.arange(128) % 7)
            optimizer.step()
        for _ in range(2):
            found.append(thaw.growth([(bucket, group)], 1.0))
            bucket.standing = None
        assert found[0] == found[1] < 0

    on_threads(2, run)
