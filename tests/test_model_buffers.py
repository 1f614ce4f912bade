"""Buffers of a model while it is evaluated: the same on all ranks, as one chooses, and each rank's own afterwards."""

from __future__ import annotations

import gc
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from worlds import on_threads, same_bits, seeded

from commopt import LocalSGD, OneBitAdam, ZeroOneAdam
from commopt.comm import ThreadBackend
from commopt.comm.backend import Done
from commopt.ddp_models import ddp_models_around
from commopt.optim import SyncPolicy, VariancePolicy
from commopt.state import packed, replicas
from commopt.state.model_buffers import _make_same, warn_of_copies
from commopt.state.replicas import tell_of_copies


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with seeded():
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


@pytest.mark.parametrize("how", ["mean", "broadcast"])
@pytest.mark.parametrize("cls", [LocalSGD, OneBitAdam])
def test_synchronize_leaves_what_averaged_shows(cls: Any, how: Any) -> None:
    def run(backend: ThreadBackend) -> tuple[list[Tensor], list[Tensor]]:
        net, optimizer = trained(backend, cls)
        with optimizer.averaged(net, how):
            inside = [b.clone() for b in net.buffers()]
        calls = optimizer.comm_stats()["step"]
        optimizer.synchronize(net, how)
        assert optimizer.comm_stats()["step"] == calls  # no step has sent it
        assert not optimizer.replicas_differ
        return inside, list(net.buffers())

    ranks = on_threads(3, run)
    for inside, left in ranks:
        assert same_bits(inside, left)
        assert same_bits(left, ranks[0][1])


def test_what_is_no_model_is_refused() -> None:
    def run(backend: ThreadBackend) -> None:
        _, optimizer = trained(backend, LocalSGD)
        with (
            pytest.raises(ValueError, match=r"model must be a torch\.nn\.Module or None, got 3"),
            optimizer.averaged(3),
        ):
            pass
        with pytest.raises(ValueError, match=r"model must be a torch\.nn\.Module or None, got 'net'"):
            optimizer.synchronize("net")
        assert optimizer.replicas_differ

    on_threads(2, run)


def test_another_word_is_refused() -> None:
    def run(backend: ThreadBackend) -> None:
        net, optimizer = trained(backend, LocalSGD)
        with (
            pytest.raises(ValueError, match="must be 'mean' or 'broadcast', got 'sum'"),
            optimizer.averaged(net, "sum"),
        ):
            pass

    on_threads(2, run)


@pytest.mark.parametrize("cls", [LocalSGD, OneBitAdam])
@pytest.mark.parametrize(
    ("there", "said"),
    [
        ({"cache": (4,), "more": (2,)}, r"rank 1 has cache \(float32 of shape \(4,\)\), rank 0 has cache .*\(3,\)"),
        ({"cache": (3,), "more": (3,), "last": (1,)}, r"rank 1 has last .*, rank 0 has norm.running_mean"),
        ({"cache": (3,)}, r"rank 1 has norm.running_mean .*, rank 0 has more"),
        (None, "rank 1 has no model, rank 0 has a model"),
    ],
)
def test_ranks_that_have_other_buffers_are_told_which(cls: Any, there: Any, said: str) -> None:
    def run(backend: ThreadBackend) -> None:
        net, optimizer = trained(backend, cls)
        shapes = there if backend.rank else {"cache": (3,), "more": (3,)}
        for name, shape in (shapes or {}).items():
            net.register_buffer(name, torch.zeros(shape))
        before = [t.clone() for t in net.state_dict().values()]
        if there is None and not optimizer.replicas_differ:
            return  # without a model nothing is said at all
        for call in (lambda *args: optimizer.averaged(*args).__enter__(), optimizer.synchronize):
            with pytest.raises(ValueError, match=said):
                call(*([] if shapes is None else [net]))
        assert same_bits(before, list(net.state_dict().values()))

    on_threads(2, run)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_buffer_that_is_expanded_is_made_the_same_too(ranks: int) -> None:
    def run(backend: ThreadBackend) -> None:
        net, optimizer = trained(backend, LocalSGD)
        net.register_buffer("scale", torch.full((1, 2), float(backend.rank)).expand(3, 4, 2)[:, :1])
        with optimizer.averaged(net):
            assert net.scale.eq((ranks - 1) / 2).all()
        assert net.scale.eq(backend.rank).all()

    on_threads(ranks, run)


@pytest.mark.parametrize("cls", [LocalSGD, OneBitAdam])
def test_a_moving_average_of_the_model_is_that_of_the_mean_where_it_is_evaluated(cls: Any) -> None:
    def run(backend: ThreadBackend) -> tuple[list[Tensor], list[Tensor], bool, list[Tensor], int]:
        net = Net()
        net.norm.bias.requires_grad_(False)
        ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        settings = {"lr": 0.1} if cls is OneBitAdam else {"period": 2}
        optimizer = cls([p for p in net.parameters() if p.requires_grad], backend=backend, **settings)
        draw = torch.Generator().manual_seed(backend.rank)
        means = []
        for _ in range(3):
            net.zero_grad()
            net(torch.randn(5, 3, generator=draw)).square().sum().backward()
            optimizer.step()
            ema.update_parameters(net)
            with optimizer.averaged():
                means.append([p.detach().clone() for p in net.parameters()])
        expected = [a.lerp(b, 0.5).lerp(c, 0.5) for a, b, c in zip(*means)]
        own = [p.detach().clone() for p in ema.parameters()]
        calls = optimizer.comm_stats()["total"]["calls"]
        with optimizer.averaged(nn.ModuleList([net, ema])):
            inside = [p.detach().clone() for p in ema.parameters()]
            calls = optimizer.comm_stats()["total"]["calls"] - calls
        return inside, expected, same_bits(own, list(ema.parameters())), own, calls

    ranks = on_threads(3, run)
    assert same_bits(ranks[0][3], ranks[1][3]) == (cls is OneBitAdam)
    for inside, expected, restored, own, _ in ranks:
        assert restored
        assert same_bits(inside, ranks[0][0])
        for mine, theirs in zip(inside, expected):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)
        if cls is OneBitAdam:
            assert same_bits(inside, own)


@pytest.mark.parametrize("where", ["averaged", "synchronize", "state_dict"])
def test_a_moving_average_that_is_each_ranks_own_is_reported_once(
    where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(packed, "is_of_processes", lambda backend: True)  # as of processes
    gc.collect()

    def run(backend: ThreadBackend, updates: int) -> None:
        net, optimizer = trained(backend, LocalSGD)
        ema = AveragedModel(net)
        for _ in range(updates):
            ema.update_parameters(net)
        for _ in range(2):
            if where == "averaged":
                with optimizer.averaged():
                    pass
            else:
                getattr(optimizer, where)()

    on_threads(2, lambda backend: run(backend, 0))  # it has averaged nothing yet
    assert not caplog.text
    on_threads(2, lambda backend: run(backend, 1))
    assert caplog.text.count("within `with optimizer.averaged(averaged_model):`, on all ranks") == 1


@pytest.mark.parametrize("way", ["averaged", "synchronize"])
def test_a_moving_average_that_was_given_once_is_not_reported_by_what_comes_after(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[list[nn.Module]] = []

    def run(backend: ThreadBackend) -> None:
        net, optimizer = trained(backend, LocalSGD)
        ema = AveragedModel(net)
        ema.update_parameters(net)
        if way == "averaged":
            with optimizer.averaged(ema):
                pass
        else:
            optimizer.synchronize(ema)
        if backend.rank == 0:
            tell_of_copies(optimizer)
            assert list(given[-1]) == [ema]

    monkeypatch.setattr(replicas, "warn_of_copies", lambda name, params, models: given.append([*models]))
    on_threads(2, run)
    assert len(given) == 2


def test_moving_averages_are_not_looked_for_before_a_local_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """0/1 Adam takes none for long, and replicas are equal until then."""
    looks: list[int] = []

    def run(backend: ThreadBackend) -> None:
        net = Net()
        variance, sync = VariancePolicy(kappa=2, stop=4), SyncPolicy(first=1, double_every=1)
        optimizer = ZeroOneAdam(net.parameters(), variance=variance, sync=sync, backend=backend)
        for step in range(1, 10):
            net.zero_grad()
            net(torch.randn(5, 3, generator=torch.Generator().manual_seed(step))).square().sum().backward()
            local = optimizer.is_local(optimizer.param_groups[0])
            optimizer.step()
            before = len(looks)
            tell_of_copies(optimizer)
            if backend.rank == 0:
                assert (len(looks) > before) == (local or optimizer.has_parted)
                parted.append(optimizer.has_parted)

    parted: list[bool] = []
    monkeypatch.setattr(replicas, "worth_a_line", lambda count: True)
    monkeypatch.setattr(replicas, "warn_of_copies", lambda name, params, models: looks.append(0))
    on_threads(2, run)
    assert parted[:4] == [False] * 4
    assert parted[-1]


def test_a_moving_average_that_is_given_or_of_another_model_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    gc.collect()
    net, other = Net(), nn.Linear(3, 4)
    ema, of_other = AveragedModel(net), AveragedModel(other)
    ema.update_parameters(net)
    of_other.update_parameters(other)
    half_made = AveragedModel.__new__(AveragedModel)  # as by another thread, now
    assert not hasattr(half_made, "module")
    warn_of_copies("LocalSGD", list(net.parameters()), [net, ema])
    assert not caplog.text
    warn_of_copies("LocalSGD", list(net.parameters()), [net])
    assert "AveragedModel" in caplog.text


@pytest.mark.parametrize("look", [partial(warn_of_copies, "LocalSGD", models=()), ddp_models_around])
def test_who_looks_at_all_objects_leaves_what_other_threads_are_making_alone(look: Any) -> None:
    """A tuple that somebody else holds while tuple() fills it is a SystemError there."""
    params, ended, failed = list(Net().parameters()), threading.Event(), list[BaseException]()

    def work() -> None:
        try:
            while not ended.is_set():
                tuple(x for x in range(40))
        except SystemError as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    many = [[i] for i in range(200_000)]  # so that other threads have their turns within a look
    for _ in range(20):
        look(params=params)
    assert many
    ended.set()
    for thread in threads:
        thread.join()
    assert not failed


@pytest.mark.parametrize(("devices", "over"), [(("cuda:0",), "cuda:0"), (("cpu", "cuda:0"), "cpu"), (None, "cpu")])
def test_tensors_are_sent_from_where_the_backend_can(devices: Any, over: str) -> None:
    """Such as a moving average on the CPU of a model that NCCL averages: here without a GPU, and without values."""
    sent = []

    class Sending:
        def __init__(self) -> None:
            self.devices = devices
            self.broadcast = self.all_reduce = self.send

        def send(self, x: Tensor) -> Done:
            sent.append(str(x.device))
            return Done()

    with FakeTensorMode():
        tensors = [torch.ones(3), torch.ones(2, 2, dtype=torch.bfloat16), torch.ones((), dtype=torch.int64)]
        topology: Any = SimpleNamespace(world=Sending(), backend=Sending())
        _make_same(topology, tensors, "mean")
    assert sent == [over] * 2
    assert {str(t.device) for t in tensors} == {"cpu"}
