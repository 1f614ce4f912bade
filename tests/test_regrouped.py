"""Parameters that are put into another group train by that group, as with torch, and keep their state."""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from every import COMMUNICATING, make
from torch import nn
from worlds import on_threads, same_bits, seeded, through_a_file

from commopt import CSER, OneBitAdam, ZeroOneAdam
from commopt.comm import ThreadBackend
from commopt.compress import Int8, Sign
from commopt.optim import SyncPolicy, VariancePolicy

RANKS = 2


def model() -> nn.Module:
    with seeded():
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


def into_a_new_one_beside_another(net: nn.Module, optimizer: Any) -> None:
    first = optimizer.param_groups[0]
    out = first["params"].pop(0)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2)), out], "lr": 0.0})


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
        coasts = name in ("DiLoCo", "NoLoCo", "SparseLoCo") or (name == "QSparseLocalSGD" and when > 3)
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


@pytest.mark.parametrize("name", ["ZeroOneAdam", "DiLoCo", "CSER"])
@pytest.mark.parametrize("move", [into_a_new_one, into_a_new_one_beside_another, into_another])
@pytest.mark.parametrize("bucket_mb", [None, 1e-5])  # or each parameter in a bucket of its own, which moves as a whole
def test_between_two_rounds_it_is_refused_and_nothing_is_lost(
    name: str, move: Callable[[nn.Module, Any], None], bucket_mb: float | None
) -> None:
    def run(backend: ThreadBackend) -> list[torch.Tensor]:
        net = model()
        groups = [{"params": list(net[0].parameters())}, {"params": list(net[1].parameters())}]
        optimizer = make(name, groups, backend=backend, bucket_mb=bucket_mb)
        train(net, optimizer, range(7), backend.rank)
        assert optimizer.replicas_differ
        lists = [list(group["params"]) for group in optimizer.param_groups]

        def moved() -> None:
            move(net, optimizer)
            optimizer.state_dict()
            train(net, optimizer, range(7, 8), backend.rank)

        with pytest.raises(ValueError, match="was put into another group between two rounds, where replicas differ"):
            moved()
        assert len(optimizer.param_groups) == len(lists)
        for group, params in zip(optimizer.param_groups, lists):
            group["params"] = params
        optimizer.synchronize()
        move(net, optimizer)
        train(net, optimizer, range(7, 12), backend.rank)
        optimizer.synchronize()
        return [p.detach() for p in net.parameters()]

    a, b = on_threads(RANKS, run)
    assert same_bits(a, b)


@pytest.mark.parametrize("name", ["ZeroOneAdam", "DiLoCo", "CSER"])
def test_a_group_that_is_added_between_two_rounds_leaves_the_buckets_as_they_are(name: str) -> None:
    def run(backend: ThreadBackend) -> None:
        net = model()
        optimizer = make(name, list(net[0].parameters()), backend=backend)
        train(net, optimizer, range(7), backend.rank)
        assert optimizer.replicas_differ
        buckets = list(optimizer.buckets)
        optimizer.add_param_group({"params": list(net[1].parameters())})
        assert all(map(operator.is_, buckets, optimizer.buckets))

    on_threads(RANKS, run)


def loaded_anew(optimizer: Any) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def made_anew(optimizer: Any) -> None:
    optimizer.param_groups[:] = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]


@pytest.mark.parametrize("name", ["ZeroOneAdam", "DiLoCo", "CSER"])
@pytest.mark.parametrize("anew", [loaded_anew, made_anew])
def test_groups_that_are_made_anew_between_two_rounds_are_those_in_their_places(
    name: str, anew: Callable[[Any], None]
) -> None:
    """Also where one of them has got a parameter since."""

    def run(backend: ThreadBackend, anew: Callable[[Any], None]) -> list[torch.Tensor]:
        net = model()
        groups = [{"params": list(net[0].parameters())}, {"params": list(net[1].parameters())}]
        optimizer = make(name, groups, backend=backend)
        train(net, optimizer, range(7), backend.rank)
        assert optimizer.replicas_differ
        anew(optimizer)
        optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(2)))
        train(net, optimizer, range(7, 12), backend.rank)
        optimizer.synchronize()
        return [p.detach() for p in net.parameters()]

    plain, other = [on_threads(RANKS, functools.partial(run, anew=f)) for f in (lambda _: None, anew)]
    assert same_bits(plain[0], other[0])
    assert same_bits(other[0], other[1])


def test_a_parameter_that_is_in_two_groups_by_mistake_is_in_one_bucket() -> None:
    def run(backend: ThreadBackend) -> None:
        net = model()
        net[1].bias.requires_grad_(False)
        groups = [{"params": list(net[0].parameters())}, {"params": list(net[1].parameters())}]
        optimizer = OneBitAdam(groups, lr=1e-2, freeze_step=3, backend=backend)
        train(net, optimizer, range(2), backend.rank)
        optimizer.param_groups[0]["params"].append(net[1].bias.requires_grad_(True))
        train(net, optimizer, range(2, 3), backend.rank)
        assert sum(p is net[1].bias for bucket in optimizer.buckets for p in bucket.params) == 1

    on_threads(RANKS, run)


def test_what_is_owed_of_each_parameter_stays_owed(caplog: pytest.LogCaptureFixture) -> None:
    """The sum of what workers and servers owe, over the ranks; no bucket begins anew."""

    def owed(optimizer: Any) -> list[torch.Tensor]:
        """Of the mean: of a worker its share, of a server what it has of the whole."""
        out = []
        for p in optimizer.params:
            bucket, i = next((b, i) for b in optimizer.buckets for i, q in enumerate(b.params) if q is p)
            whole = bucket.feedback.worker / RANKS
            whole.view(RANKS, -1)[bucket.shard_index] += bucket.feedback.server
            out.append(bucket.views(whole)[i].clone())
        return out

    def run(backend: ThreadBackend) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        net = model()
        optimizer = OneBitAdam(net.parameters(), lr=1e-2, freeze_step=3, backend=backend)
        train(net, optimizer, range(6), backend.rank)
        before = owed(optimizer)
        into_a_new_one(net, optimizer)
        after = dict(zip(map(id, optimizer.params), owed(optimizer)))
        return before, [after[id(p)] for p in net.parameters()]

    (a, c), (b, d) = on_threads(RANKS, run)
    for x, y, z, w in zip(a, b, c, d):
        torch.testing.assert_close(z + w, x + y)
        assert bool((x + y).any())
    assert "residuals" not in caplog.text


def test_with_overlap_it_may_be_done_between_two_steps() -> None:
    def run(backend: ThreadBackend) -> list[torch.Tensor]:
        net = model()
        groups = [{"params": list(net[0].parameters())}, {"params": list(net[1].parameters())}]
        optimizer = OneBitAdam(groups, lr=1e-2, freeze_step=2, overlap=True, bucket_mb=1e-4, backend=backend)

        def step(number: int) -> None:
            net.zero_grad()
            net(torch.full((2, 5), 1.0 + number + backend.rank)).square().mean().backward()
            optimizer.step()

        for number in range(4):
            step(number)
        into_another(net, optimizer)
        before = net[0].weight.detach().clone()
        for number in range(4, 7):
            step(number)
        assert torch.equal(before, net[0].weight)
        return [p.detach() for p in net.parameters()]

    a, b = on_threads(RANKS, run)
    assert same_bits(a, b)


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("freeze_step", [2, 100])
def test_between_backward_and_step_it_may_be_done_where_nothing_was_sent_yet(freeze_step: int, saves: bool) -> None:
    """With overlap, that is, where there is one bucket."""

    def run(backend: ThreadBackend, overlap: bool) -> list[torch.Tensor]:
        net = model()
        groups = [{"params": list(net.parameters())}, {"params": [nn.Parameter(torch.ones(2))], "lr": 0.0}]
        groups[1]["params"][0].requires_grad_(False)
        optimizer = OneBitAdam(groups, lr=1e-2, freeze_step=freeze_step, overlap=overlap, backend=backend)
        for number in range(6):
            net.zero_grad()
            net(torch.full((2, 5), 1.0 + number + backend.rank)).square().mean().backward()
            if number == 3:
                into_another(net, optimizer)
                if saves:
                    optimizer.state_dict()
            optimizer.step()
        return [p.detach() for p in net.parameters()]

    for plain, overlapped in zip(*(on_threads(RANKS, lambda b, o=o: run(b, o)) for o in (False, True))):
        assert same_bits(plain, overlapped)


def in_another_order(optimizer: Any) -> None:
    optimizer.param_groups.reverse()


def without_an_empty_one(optimizer: Any) -> None:
    del optimizer.param_groups[0]


@pytest.mark.parametrize("change", [in_another_order, without_an_empty_one, made_anew])
def test_between_backward_and_step_groups_may_change_around_what_was_sent(change: Callable[[Any], None]) -> None:
    def run(backend: ThreadBackend, change: Callable[[Any], None]) -> list[torch.Tensor]:
        net = model()
        groups: list[Any] = [{"params": []}, *({"params": list(layer.parameters())} for layer in net)]
        optimizer = OneBitAdam(groups, lr=1e-2, freeze_step=2, overlap=True, bucket_mb=1e-5, backend=backend)
        for number in range(6):
            net.zero_grad()
            net(torch.full((2, 5), 1.0 + number + backend.rank)).square().mean().backward()
            if number == 4:
                change(optimizer)
                optimizer.param_groups[-1]["params"].append(nn.Parameter(torch.ones(2), requires_grad=False))
            optimizer.step()
        return [p.detach() for p in net.parameters()]

    for plain, other in zip(*(on_threads(RANKS, functools.partial(run, change=f)) for f in (lambda _: None, change))):
        assert same_bits(plain, other)


def test_a_parameter_that_is_back_in_its_group_before_the_step_is_not_missed() -> None:
    """With overlap, which has sent it meanwhile."""

    def run(backend: ThreadBackend, away: bool) -> list[torch.Tensor]:
        net = model()
        optimizer = OneBitAdam(net.parameters(), lr=1e-2, freeze_step=2, overlap=True, bucket_mb=1e-6, backend=backend)
        for number in range(5):
            net.zero_grad()
            params = optimizer.param_groups[0]["params"]
            gone = [params.pop()] if away and number == 3 else []
            net(torch.full((2, 5), 1.0 + number + backend.rank)).square().mean().backward()
            params += gone
            optimizer.step()
        return [p.detach() for p in net.parameters()]

    for plain, other in zip(*(on_threads(RANKS, functools.partial(run, away=away)) for away in (False, True))):
        assert same_bits(plain, other)


def test_a_parameter_that_was_taken_away_before_backward_is_named_as_that_with_overlap() -> None:
    def run(backend: ThreadBackend) -> None:
        net = model()
        optimizer = OneBitAdam(net.parameters(), lr=1e-2, freeze_step=2, overlap=True, bucket_mb=1e-6, backend=backend)
        for number in range(5):
            net.zero_grad()
            params = optimizer.param_groups[0]["params"]
            gone = [params.pop()] if number == 3 else []
            net(torch.full((2, 5), 1.0 + number + backend.rank)).square().mean().backward()
            if gone:
                with pytest.raises(ValueError, match="1 of 4 parameters are gone from the parameter groups"):
                    optimizer.step()
            else:
                optimizer.step()
            params += gone

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


def test_a_frozen_parameter_that_one_rank_alone_adds_to_a_group_is_told() -> None:
    def run(backend: ThreadBackend) -> None:
        net = model()
        optimizer = OneBitAdam(net.parameters(), lr=1e-2, freeze_step=3, backend=backend)
        train(net, optimizer, range(2), backend.rank)
        if backend.rank:
            optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(2), requires_grad=False))
        with pytest.raises(RuntimeError, match="parameters of parameter group 0 is 5 on rank 1 and 4 on rank 0"):
            train(net, optimizer, range(2, 3), backend.rank)

    on_threads(RANKS, run)


def test_state_that_was_deleted_is_named_where_parameters_were_put_into_another_group_too() -> None:
    def run(backend: ThreadBackend) -> None:
        net = model()
        groups = [{"params": list(net[0].parameters())}, {"params": list(net[1].parameters())}]
        optimizer = OneBitAdam(groups, lr=1e-2, freeze_step=3, backend=backend)
        train(net, optimizer, range(2), backend.rank)
        into_another(net, optimizer)
        del optimizer.state[net[1].weight]["exp_avg"]
        with pytest.raises(ValueError, match=r"optimizer\.state has no 'exp_avg' of"):
            train(net, optimizer, range(2, 3), backend.rank)

    on_threads(RANKS, run)


def test_with_nodes_it_may_be_done_too() -> None:
    """A rank has a part of the residuals then, of other parameters afterwards."""

    def run(backend: ThreadBackend) -> list[torch.Tensor]:
        net = model()
        groups = [{"params": list(net[0].parameters())}, {"params": list(net[1].parameters())}]
        optimizer = OneBitAdam(groups, lr=1e-2, freeze_step=2, backend=backend.nodes(2))
        train(net, optimizer, range(4), backend.rank)
        into_another(net, optimizer)
        before = net[0].weight.detach().clone()
        train(net, optimizer, range(4, 7), backend.rank)
        assert torch.equal(before, net[0].weight)
        return [p.detach() for p in net.parameters()]

    ranks = on_threads(4, run)
    assert all(same_bits(ranks[0], params) for params in ranks)


@pytest.mark.parametrize("on", [True, False])
def test_overlap_that_one_rank_alone_sets_is_told_to_the_other(on: bool) -> None:
    def run(backend: ThreadBackend) -> None:
        net = model()
        optimizer = OneBitAdam(
            net.parameters(), lr=1e-2, freeze_step=1, overlap=not on, bucket_mb=1e-4, backend=backend
        )
        for number in range(4):
            net.zero_grad()
            net(torch.full((2, 5), 1.0 + number + backend.rank)).square().mean().backward()
            if number == 2 and backend.rank:
                optimizer.overlap = on
            if number < 2:
                optimizer.step()
                continue
            error, said = (ValueError, f"overlap was set to {on}") if backend.rank else (RuntimeError, "rank 1 cannot")
            with pytest.raises(error, match=said):
                optimizer.step()

    on_threads(RANKS, run)


def test_a_hyperparameter_that_is_gone_on_one_rank_is_told_to_the_other() -> None:
    def run(backend: ThreadBackend) -> None:
        net = model()
        optimizer = OneBitAdam(net.parameters(), lr=1e-2, freeze_step=1, backend=backend)
        train(net, optimizer, range(3), backend.rank)
        if backend.rank:
            del optimizer.param_groups[0]["betas"]
        with pytest.raises(KeyError if backend.rank else RuntimeError, match="betas" if backend.rank else "rank 1"):
            train(net, optimizer, range(3, 4), backend.rank)

    on_threads(RANKS, run)


@pytest.mark.parametrize("how", ["copied", "loaded", "rebound"])
def test_a_whole_bucket_that_has_moved_is_saved_and_copied_as_it_is(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """No residual is lost: not to a copy, to an optimizer made with the groups as they are, or by ``rebind()``."""

    def run(backend: ThreadBackend) -> None:
        net = model()
        params = list(net.parameters())
        optimizer = OneBitAdam(
            [{"params": params[:3]}, {"params": params[3:]}], freeze_step=2, bucket_mb=1e-6, backend=backend
        )
        train(net, optimizer, range(4), backend.rank)
        optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"].pop(0))
        train(net, optimizer, range(4, 6), backend.rank)
        before = [r["worker_error"].clone() for r in optimizer.residuals.values()]
        assert all(float(r.abs().sum()) > 0 for r in before)
        other: Any
        if how == "copied":
            _, other = copy.deepcopy((net, optimizer))
        elif how == "rebound":
            optimizer.rebind()
            other = optimizer
        else:
            twins = list(copy.deepcopy(net).parameters())
            groups = [{"params": twins[1:3]}, {"params": [twins[3], twins[0]]}]
            other = OneBitAdam(groups, freeze_step=2, bucket_mb=1e-6, backend=backend)
            other.load_state_dict(optimizer.state_dict())
        assert same_bits([r["worker_error"] for r in other.residuals.values()], before)

    on_threads(RANKS, run)
    assert "loaded state" not in caplog.text


def owed(optimizer: Any, p: torch.Tensor) -> torch.Tensor:
    """What this rank owes of ``p``: of the mean over the ranks, times their number."""
    bucket = next(bucket for bucket in optimizer.buckets if any(q is p for q in bucket.params))
    return next(x for q, x in zip(bucket.params, bucket.views(bucket.owed(RANKS))) if q is p)


@pytest.mark.parametrize("alone", [False, True])
def test_what_0_1_adam_has_lost_moves_a_parameter_no_further_in_a_group_with_longer_intervals(alone: bool) -> None:
    """Residuals are of the mean momentum of an interval: where that is four times as long, they are a fourth of it."""

    def run(backend: ThreadBackend) -> None:
        net = model()
        first = [net[0].weight] if alone else list(net[0].parameters())
        rare = {"params": list(net[1].parameters()), "sync": SyncPolicy(4, None, 4)}
        groups = [{"params": first}, rare] if not alone else [{"params": [*first, net[0].bias]}, rare]
        optimizer = ZeroOneAdam(
            groups, variance=VariancePolicy(1, 2), sync=SyncPolicy(1, None, 1), compressor=Sign(16), backend=backend,
            bucket_mb=1e-5 if alone else None,
        )  # fmt: skip
        train(net, optimizer, range(6), backend.rank)  # a round of both
        p, (often, seldom) = net[0].weight, optimizer.param_groups
        assert (often["residual_interval"], seldom["residual_interval"]) == (1, 4)
        before = owed(optimizer, p)
        assert before.any()
        often["params"] = [q for q in often["params"] if q is not p]
        seldom["params"].append(p)
        optimizer.state_dict()
        torch.testing.assert_close(owed(optimizer, p), before / 4)

    on_threads(RANKS, run)


def two_intervals(net: nn.Module, backend: ThreadBackend) -> ZeroOneAdam:
    """0/1 Adam with rounds at every step in the first group, and at every fourth in the second."""
    groups: list[dict[str, Any]] = [{"params": list(layer.parameters())} for layer in (net[0], net[1])]
    groups[1]["sync"] = SyncPolicy(4, None, 4)
    return ZeroOneAdam(
        groups, variance=VariancePolicy(1, 2), sync=SyncPolicy(1, None, 1), compressor=Sign(16), backend=backend
    )


@pytest.mark.parametrize("loaded", [False, True])
def test_so_it_is_where_its_old_group_is_gone(loaded: bool) -> None:
    def run(backend: ThreadBackend) -> None:
        net = model()
        optimizer = two_intervals(net, backend)
        train(net, optimizer, range(6), backend.rank)
        if loaded:
            saved = through_a_file(optimizer.state_dict())
            optimizer = two_intervals(net, backend)
            optimizer.load_state_dict(saved)
        before = {p: owed(optimizer, p).clone() for p in net.parameters()}
        assert all(residual.any() for residual in before.values())
        often = optimizer.param_groups.pop(0)
        optimizer.param_groups[0]["params"] += often["params"]
        optimizer.state_dict()
        for p in net.parameters():
            share = 1 / 4 if any(p is q for q in often["params"]) else 1
            torch.testing.assert_close(owed(optimizer, p), share * before[p])

    on_threads(RANKS, run)


@pytest.mark.parametrize("bucket_mb", [1e-6, None])  # None: it is moved out of a bucket with others
def test_what_was_moved_before_a_state_is_loaded_owes_what_that_has(bucket_mb: float | None) -> None:
    """As where a script that is resumed does once more what it did before it saved."""

    def run(backend: ThreadBackend) -> None:
        def made(net: nn.Module, bucket_mb: float | None) -> ZeroOneAdam:
            seldom = {"params": [net[1].bias], "sync": SyncPolicy(4, None, 4)}
            return ZeroOneAdam(
                [{"params": [*net[0].parameters(), net[1].weight]}, seldom], variance=VariancePolicy(1, 2),
                sync=SyncPolicy(1, None, 1), compressor=Sign(16), backend=backend, bucket_mb=bucket_mb,
            )  # fmt: skip

        def move(optimizer: ZeroOneAdam) -> None:
            often, seldom = optimizer.param_groups
            seldom["params"].insert(0, often["params"].pop())  # so that all are in the same order

        net = model()
        optimizer = made(net, bucket_mb)
        train(net, optimizer, range(6), backend.rank)
        move(optimizer)
        saved = through_a_file(optimizer.state_dict())
        expected = owed(optimizer, net[1].weight)
        assert expected.any()
        again = model()
        resumed = made(again, bucket_mb)
        move(resumed)
        resumed.load_state_dict(saved)
        resumed.state_dict()
        assert same_bits([owed(resumed, again[1].weight)], [expected])
        train(again, resumed, range(6, 12), backend.rank)
        train(net, optimizer, range(6, 12), backend.rank)
        assert same_bits([owed(resumed, again[1].weight)], [owed(optimizer, net[1].weight)])

    on_threads(RANKS, run)


@pytest.mark.parametrize("longer", [True, False])
def test_what_overlap_has_sent_may_not_go_on_as_a_local_step(longer: bool) -> None:
    """Nor the other way round: it would be made anew from an anchor that nobody has set."""

    def run(backend: ThreadBackend) -> None:
        net = model()
        params = list(net.parameters())
        groups: list[dict[str, Any]] = [{"params": params[:2]}, {"params": params[2:], "sync": SyncPolicy(4, None, 4)}]
        optimizer = ZeroOneAdam(
            groups, variance=VariancePolicy(1, 2), sync=SyncPolicy(1, None, 1), overlap=True, bucket_mb=1e-6,
            compressor=Sign(16), backend=backend,
        )  # fmt: skip

        def backward(number: int) -> None:
            net.zero_grad()
            net(torch.full((2, 5), 1.0 + number + backend.rank)).square().mean().backward()

        for number in range(6):
            backward(number)
            optimizer.step()
        often, seldom = (group["params"] for group in optimizer.param_groups)
        backward(6)
        p = often[-1] if longer else seldom[-1]
        before = [*owed(optimizer, p).clone(), *p.detach().clone()]
        (seldom if longer else often).append((often if longer else seldom).pop())
        with pytest.raises(ValueError, match="put into other groups between backward\\(\\) and step\\(\\)"):
            optimizer.step()
        assert same_bits([*owed(optimizer, p), *p.detach()], before)

    on_threads(RANKS, run)


def test_groups_in_another_order_owe_what_they_did() -> None:
    def run(backend: ThreadBackend) -> None:
        net = model()
        optimizer = two_intervals(net, backend)
        train(net, optimizer, range(6), backend.rank)
        before = [owed(optimizer, p).clone() for p in net.parameters()]
        optimizer.param_groups.reverse()
        optimizer.state_dict()
        assert same_bits([owed(optimizer, p) for p in net.parameters()], before)
        train(net, optimizer, range(6, 7), backend.rank)

    on_threads(RANKS, run)


def test_groups_that_somebody_has_made_anew_are_those_that_were_there() -> None:
    """As a framework does that puts copies of them in their place: only what is put into another one has moved."""

    class Watched(ZeroOneAdam):
        seen: list[torch.Tensor]

        def put_in_group(self, params: Any, old: dict[str, Any], new: dict[str, Any]) -> None:
            self.seen += params
            super().put_in_group(params, old, new)

    def run(backend: ThreadBackend) -> None:
        net = model()
        groups = [{"params": list(layer.parameters())} for layer in net]
        optimizer = Watched(groups, variance=VariancePolicy(1, 2), compressor=Sign(16), backend=backend)
        optimizer.seen = []
        train(net, optimizer, range(4), backend.rank)
        optimizer.param_groups = [dict(group) for group in optimizer.param_groups]
        train(net, optimizer, range(4, 6), backend.rank)
        assert not optimizer.seen
        into_another(net, optimizer)
        train(net, optimizer, range(6, 8), backend.rank)
        assert [id(p) for p in optimizer.seen] == [id(net[0].weight)]

    on_threads(RANKS, run)


@pytest.mark.parametrize("new", [True, False])
def test_a_refresh_in_another_group_leaves_out_what_rounds_have_lost(new: bool) -> None:
    """The variance would be that of the residuals, which are of momenta."""

    def run(backend: ThreadBackend) -> None:
        p, q, r = (nn.Parameter(torch.zeros(64)) for _ in range(3))
        optimizer = ZeroOneAdam(
            [p, q], betas=(0.9, 0.5), variance=VariancePolicy(1, 2), compressor=Sign(64), refresh_compressor=Int8(),
            backend=backend,
        )  # fmt: skip

        def step() -> None:
            for x in (p, q, r):
                x.grad = torch.linspace(0.5, 1.5, 64)
            optimizer.step()

        for _ in range(20):
            step()
        if not new:
            optimizer.add_param_group({"params": [r], "variance": VariancePolicy(4, 8)})
            step()
            step()
        optimizer.param_groups[0]["params"].pop()
        if new:
            optimizer.add_param_group({"params": [q]})
        else:
            optimizer.param_groups[1]["params"].append(q)
        before = optimizer.state[q]["exp_avg_sq"].clone()
        step()
        expected = 0.5 * before + 0.5 * torch.linspace(0.5, 1.5, 64) ** 2
        torch.testing.assert_close(optimizer.state[q]["exp_avg_sq"], expected, rtol=0.05, atol=0)

    on_threads(RANKS, run)


def test_a_group_that_has_taken_no_step_has_taken_none_when_it_is_loaded() -> None:
    """Its parameters have, in another group; a plain Adam's state has no steps of groups."""
    net = model()
    optimizer = OneBitAdam(net.parameters())
    train(net, optimizer, range(3), 0)
    into_a_new_one(net, optimizer)
    again = OneBitAdam([{"params": group["params"]} for group in optimizer.param_groups])
    again.load_state_dict(through_a_file(optimizer.state_dict()))
    assert [group["step"] for group in again.param_groups] == [3, 0]


@pytest.mark.filterwarnings("ignore:.*duplicate parameters")
def test_a_parameter_that_is_given_twice_is_saved_and_loaded_once() -> None:
    def run(backend: ThreadBackend) -> None:
        p, q = nn.Parameter(torch.ones(70)), nn.Parameter(torch.ones(3))
        optimizer = CSER([p, q, p], momentum=0.9, period=2, compressor=Sign(16), backend=backend)
        for step in range(3):
            for x in (p, q):
                x.grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(10 * step + backend.rank))
            optimizer.step()
        saved = through_a_file(optimizer.state_dict())
        again = CSER([p, q, p], momentum=0.9, period=2, compressor=Sign(16), backend=backend)
        again.load_state_dict(saved)
        new = again.state_dict()
        assert new["state"].keys() == saved["state"].keys()
        assert new["residuals"]["state"].keys() == saved["residuals"]["state"].keys() <= saved["state"].keys()

    on_threads(RANKS, run)
