"""Ranks that come and go: every step against an oracle on plain lists, the same bits where nobody does, and faults."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from member_world import Died, Rendezvous, averaging, give_grads, numbers, run_ranks, some_params, until
from oracle_members import MembersOracle
from torch import nn
from worlds import Toy, on_threads, params_of, same_bits, tensors_in, train

from commopt import DiLoCo, LocalSGD, Members, SignMomentum, SlowMo, SparseLoCo, Streaming
from commopt.comm import given_up
from commopt.compress import Sign
from commopt.outer import LeftOut, NotEnoughMembers
from commopt.outer.joining import message_of
from commopt.outer.member_rounds import _residuals
from commopt.outer.view import Report, View, mad_ones

METHODS = {"average": LocalSGD, "slowmo": SlowMo, "diloco": DiLoCo, "sign": SignMomentum}
OUTER = {
    "average": ({}, {}),
    "slowmo": ({"lr": 0.9, "momentum": 0.6}, {"outer_lr": 0.9, "outer_momentum": 0.6}),
    "diloco": ({"lr": 0.7, "momentum": 0.9}, {"outer_lr": 0.7, "outer_momentum": 0.9}),
    "sign": (
        {"lr": 0.8, "b1": 0.7, "b2": 0.9, "wd": 0.2},
        {"outer_lr": 0.8, "outer_betas": (0.7, 0.9), "outer_weight_decay": 0.2},
    ),
}
PERIOD = 2


@pytest.fixture(autouse=True)
def _look_often(monkeypatch):
    monkeypatch.setattr(given_up, "LOOK", 0.05)


# the algorithm --------------------------------------------------------------------------------------------------------

SPANS = {0: (0, 6), 1: (0, 6), 2: (0, 4), 3: (0, 1), 4: (2, 6), 5: (5, 6), 6: (2, 6)}
"""Of each rank, in which rounds it is. 3 leaves in round 1, 2 dies in round 4; 4 and 6 join at once after round 1, and
5 after round 4, with an empty base."""
MAD = {3: 1}
"""In round 3, rank 1 is far off."""


def weight(name: int, step: int) -> float:
    return 1.0 + (3 * name + step) % 4


def expected(method: str) -> list[dict[int, list[float]]]:
    """Parameters of each rank after each step."""
    oracle = MembersOracle(method, numbers(some_params()), range(4), "adamw", OUTER[method][0])
    out = []
    for round_ in range(6):
        there = [name for name, (first, last) in SPANS.items() if first <= round_ < last]
        weights = dict.fromkeys(there, 0.0)
        for step in range(round_ * PERIOD, (round_ + 1) * PERIOD):
            oracle.step({name: give_grads(some_params(), step, name) for name in there}, 0.02 / (1 + step % 5))
            if round_ in MAD and step % PERIOD == 0:
                oracle.x[MAD[round_]] = [v + 1e4 for v in oracle.x[MAD[round_]]]
            for name in there:
                weights[name] += weight(name, step)
            if step % PERIOD == PERIOD - 1:
                oracle.end(there, weights, [MAD[round_]] if round_ in MAD else [])
                if round_ == 1:
                    oracle.join(4, 0)
                    oracle.join(6, 0)
                if round_ == 4:
                    oracle.join(5, None)
            out.append({name: list(x) for name, x in oracle.x.items()})
    return out


class Schedule:
    """Ranks on threads that come and go as ``SPANS`` has it."""

    def __init__(self, method: str) -> None:
        self.world, self.method, self.right = Rendezvous(), method, expected(method)
        self.dies = 2 if method == "diloco" else None  # by others' patience; else it leaves
        settings = {"ranks": 4, "patience": 30.0 if self.dies is None else 2.0}
        self.members = {n: self.world.members(n, fetch_base=n != 5, **settings) for n in SPANS}
        self.asked = {n: threading.Event() for n in (4, 5, 6)}

    def rank(self, name: int) -> None:
        first, last = SPANS[name]
        if name in self.asked:
            self.asked[name].wait(60)
        params = some_params()
        optimizer = METHODS[self.method](
            params, torch.optim.AdamW, lr=1.0, period=PERIOD, members=self.members[name], betas=(0.9, 0.99),
            weight_decay=0.1, **OUTER[self.method][1],
        )  # fmt: skip
        assert optimizer.param_groups[0]["rounds"] == first
        for step in range(first * PERIOD, last * PERIOD):
            self.step(name, params, optimizer, step)
        if last == 6:
            assert self.members[name].names == [0, 1, 4, 5, 6]
        if name == self.dies:
            raise Died
        self.members[name].leave()

    def step(self, name: int, params: list[nn.Parameter], optimizer: Any, step: int) -> None:
        round_, ends = step // PERIOD, step % PERIOD == PERIOD - 1
        optimizer.param_groups[0]["lr"] = 0.02 / (1 + step % 5)
        give_grads(params, step, name)
        self.members[name].add_weight(weight(name, step))
        if ends and name == 0:
            self.ask({1: (4, 6), 4: (5,)}.get(round_, ()))
        optimizer.step()
        if MAD.get(round_) == name and not ends:
            with torch.no_grad():
                for p in params:
                    p += 1e4
        now, theirs = (torch.tensor(v, dtype=torch.float64) for v in (numbers(params), self.right[step][name]))
        torch.testing.assert_close(now, theirs, rtol=1e-12, atol=1e-12)

    def ask(self, joiners: Iterable[int]) -> None:
        """Lets ranks come, and waits until they do."""
        for joiner in joiners:
            self.asked[joiner].set()
            until(lambda j=joiner: self.members[j].roster.ticket >= 0)


@pytest.mark.parametrize("method", METHODS)
def test_every_step_of_every_rank_equals_the_algorithm_with_these_ranks(method):
    schedule = Schedule(method)
    run_ranks([lambda n=n: schedule.rank(n) for n in SPANS])


@pytest.mark.parametrize(
    "make",
    [
        lambda p, **k: LocalSGD(p, period=3, **k),
        lambda p, **k: DiLoCo(p, period=3, compressor=Sign(block=64), **k),
        lambda p, **k: SlowMo(p, torch.optim.SGD, period=2, **k),
        lambda p, **k: SparseLoCo(p, period=3, **k),
    ],
)
def test_where_nobody_comes_or_goes_it_is_the_same_to_the_bit(make):
    def result(model, optimizer, rank):
        train(model, optimizer, range(7), rank, 3)
        with optimizer.averaged():
            mean = params_of(model)
        optimizer.synchronize()
        return [*params_of(model), *mean, *tensors_in(optimizer.state_dict())]

    def plain(backend):
        model = Toy()
        return result(model, make(model.parameters(), lr=1e-2, backend=backend), backend.rank)

    def with_members(name):
        model, members = Toy(), world.members(name, ranks=3)
        out = result(model, make(model.parameters(), lr=1e-2, members=members), name)
        assert members.epoch == 2 + len(range(7)) // make(Toy().parameters(), lr=1.0).param_groups[0]["period"]
        members.leave()
        return out

    world, right = Rendezvous(), on_threads(3, plain)
    for mine, theirs in zip(run_ranks([lambda n=n: with_members(n) for n in range(3)]), right):
        assert same_bits(mine, theirs)


# residuals, arguments -------------------------------------------------------------------------------------------------


def test_residuals_keep_what_ranks_owe_when_they_become_more_or_fewer():
    """What all ranks owe is the mean of what they have not sent, and what the servers have not sent back."""

    def run(backend):
        model = Toy(torch.float64)
        optimizer = DiLoCo(model.parameters(), lr=1e-2, period=2, compressor=Sign(block=64), backend=backend)
        train(model, optimizer, range(4), backend.rank, 3)
        (bucket,) = optimizer.buckets
        whole = torch.empty(bucket.padded, dtype=torch.float64)
        bucket.replicas.world.all_gather(whole.view(3, -1), bucket.feedback.server).wait()
        left = _residuals(optimizer, 5, False)
        after = torch.cat([left[p]["worker_error"].flatten() for p in bucket.params])
        return bucket.feedback.worker[: bucket.numel], whole[: bucket.numel], after

    found = on_threads(3, run)
    before = sum(worker for worker, _, _ in found) / 5 + found[0][1]
    torch.testing.assert_close(sum(after for *_, after in found) / 5, before, rtol=1e-12, atol=1e-15)
    assert found[0][1].abs().max() > 0


@pytest.mark.parametrize("make", [
    lambda p, **k: DiLoCo(p, lr=1e-2, period=2, compressor=Sign(block=64), **k),
    lambda p, **k: SparseLoCo(p, lr=1e-2, period=2, **k),
])  # fmt: skip
def test_compressed_rounds_with_ranks_that_come_and_go(make):
    world, asked = Rendezvous(), threading.Event()

    def rank(name):
        if name == 3:
            asked.wait(30)
        model, members = Toy(), world.members(name, ranks=3)
        optimizer = make(model.parameters(), members=members)
        for step in range(optimizer.param_groups[0]["rounds"] * 2, 12):
            if step == 5 and name == 0:
                asked.set()
                until(lambda: members.roster.client.add("tickets", 0) == 4)
            if step == 9 and name == 1:
                return members.leave()
            train(model, optimizer, range(step, step + 1), name, 4)
        residual = optimizer.comm_stats()["residual_norm"]
        members.leave()
        assert residual > 0
        return params_of(model)

    found = run_ranks([lambda n=n: rank(n) for n in range(4)])
    assert found[1] is None
    assert all(same_bits(found[0], found[rank]) for rank in (2, 3))


def test_bad_arguments():
    world = Rendezvous()
    for wrong in ({"patience": 0}, {"timeout": -1.0}, {"quorum": 0}, {"ranks": 0}, {"max_z": 0}, {"rejoin": 1},
                  {"join_timeout": float("inf")}, {"connect": 3}, {"on_join": 3}):  # fmt: skip
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Members(world.store, 0, **wrong)
    with pytest.raises(ValueError, match="name must be"):
        Members(world.store)
    with pytest.raises(ValueError, match="store must be"):
        Members("tcp://x", 0)
    with pytest.raises(ValueError, match="needs a store"):
        Members()
    model = Toy()
    for wrong in ({"streaming": Streaming(2)}, {"state_period": {"exp_avg": 1}}, {"process_group": 1}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}=.*does not fit members="):
            DiLoCo(model.parameters(), lr=1.0, members=world.members(0, ranks=1), **wrong)
    with pytest.raises(ValueError, match="members must be"):
        DiLoCo(model.parameters(), lr=1.0, members=3)
    for wrong in ({"clip_to_median": True}, {"mean_over": "contributors"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            SparseLoCo(model.parameters(), lr=1.0, members=Rendezvous().members(0, ranks=1), **wrong)
    members = world.members(1, ranks=1)
    optimizer = DiLoCo(model.parameters(), lr=1.0, members=members)
    with pytest.raises(ValueError, match="amount must be"):
        members.add_weight(-1)
    for call in (optimizer.consolidate_state_dict, optimizer.rebind, lambda: optimizer.averaged(model),
                 lambda: optimizer.synchronize(model),
                 lambda: optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})):  # fmt: skip
        with pytest.raises(ValueError, match="does not fit members="):
            call()
    with pytest.raises(ValueError, match="one optimizer alone"):
        DiLoCo(Toy().parameters(), lr=1.0, members=members)


def test_a_torch_with_one_connection_to_the_store_is_warned_of(monkeypatch, caplog):
    for has in (True, False):
        monkeypatch.setattr(Members, "_makes_connections", has)
        Members(Rendezvous().store, 0, ranks=1)
        assert ("a rank that loses it cannot join anew" in caplog.text) == (not has)


def test_too_few_ranks_to_begin_and_none_to_join():
    world = Rendezvous()
    with pytest.raises(NotEnoughMembers, match=r"1 of 3 ranks have come within 0.2 s, and 2 are needed to begin"):
        averaging(world, 0, ranks=3, timeout=0.2)
    with pytest.raises(LeftOut, match=r"no member has taken this rank in within 0.2 s"):
        averaging(world, 0, join_timeout=0.2)


def test_where_nobody_that_counts_has_done_anything_all_that_count_weigh_alike():
    """Weights of 0, as of ranks that have read no tokens: no division by 0, and the mad rank does not count."""

    def factors(weights, excluded):
        reports = [Report("round", weight=w) for w in weights]
        return View(1, range(len(weights)), reports, {}, excluded=dict.fromkeys(excluded, "mad")).factors()

    assert factors([0.0, 0.0, 5.0], [2]) == [1.5, 1.5, 0.0]
    assert factors([0.0, 0.0, 0.0], []) == [1.0, 1.0, 1.0]
    assert factors([1.0, 3.0, 5.0], [2]) == [0.75, 2.25, 0.0]


def test_where_the_others_are_nearly_alike_nobody_is_mad_for_little():
    def mad(*norms):
        return list(mad_ones({i: Report("round", norm=norm) for i, norm in enumerate(norms)}, 5.0))

    assert mad(1.0, 1.01, 1.02, 1.2) == []
    assert mad(1.0, 1.01, 1.02, 3.4) == []
    assert mad(1.0, 1.01, 1.02, 3.7) == [3]
    assert mad(1.0, 100.0) == []  # of two nobody knows which
    weights, norms = (0.0, 0.0, 10.0, 10.0, 10.0, 0.0), (0.0, 0.0, 1.0, 1.1, 9.0, 1e-3)
    idle = {i: Report("round", weight=w, norm=norm) for i, (w, norm) in enumerate(zip(weights, norms))}
    assert list(mad_ones(idle, 5.0)) == [4]  # those that have done nothing are no measure


def test_the_mean_that_averaged_shows_is_of_those_that_are_finite():
    world = Rendezvous()

    def rank(name):
        _, params, optimizer = averaging(world, name, ranks=3, patience=1.0)
        optimizer.param_groups[0]["period"] = 3
        for p in params:
            p.grad = torch.full_like(p, -(name + 1.0))
        optimizer.step()
        if name == 2:
            params[0].data[1] = float("nan")
        with optimizer.averaged():
            shown = params[0].tolist()
        return shown, params[0].isfinite().all().item()

    shown = [1.5, 1.5, 1.5]
    assert run_ranks([lambda n=n: rank(n) for n in range(3)]) == [(shown, True), (shown, True), (shown, False)]


@pytest.mark.parametrize("changed", [float("nan"), 100.0])
def test_nobody_goes_on_from_what_a_member_that_does_not_count_was_changed_to(changed):
    """Rank 0 is the first, and was changed before the round; it does not count as it is not finite, or far off."""
    world = Rendezvous()

    def rank(name):
        params = [nn.Parameter(torch.zeros(3, dtype=torch.float64))]
        settings = {"lr": 1.0, "period": 1, "outer_lr": 0.5, "outer_momentum": 0.0}
        optimizer = DiLoCo(params, torch.optim.SGD, members=world.members(name, ranks=3, patience=1.0), **settings)
        if name == 0:
            params[0].data[1] = changed
        for p in params:
            p.grad = torch.full_like(p, -100.0 if name == 0 else -(name + 1.0))
        optimizer.step()
        return params[0].tolist()

    assert run_ranks([lambda n=n: rank(n) for n in range(3)]) == [[1.25, 1.25, 1.25]] * 3


def test_a_learning_rate_of_numpy_goes_to_those_that_join():
    tree = {"lr": np.float64(0.25), "steps": [np.int64(3)], "x": torch.ones(2)}
    header = message_of(tree)[1]
    skeleton, _ = torch.load(io.BytesIO(bytes(header.tolist())), weights_only=True)
    assert skeleton["lr"] == 0.25
    assert type(skeleton["lr"]) is float
    assert skeleton["steps"] == [3]
