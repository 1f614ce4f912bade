"""Ranks that come and go: every step against an oracle on plain lists, the same bits where nobody does, and faults."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from member_world import Died, Rendezvous, give_grads, numbers, run_ranks, some_params, until
from oracle_members import MembersOracle
from torch import nn
from worlds import Toy, on_threads, params_of, same_bits, tensors_in, train

from commopt import DiLoCo, LocalSGD, Members, SignMomentum, SlowMo, SparseLoCo, Streaming
from commopt.comm import MessageDamaged, given_up
from commopt.comm.store import StoreClient, StoreLost
from commopt.compress import Sign
from commopt.optim.agreement import StepRefused
from commopt.outer import LeftOut, NotEnoughMembers
from commopt.outer.member_rounds import _residuals

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


# faults ---------------------------------------------------------------------------------------------------------------


def averaging(world, name, params=None, **settings):
    """Local SGD whose rank moves by name + 1 in each round of one step."""
    members = world.members(name, **settings)
    params = params or [torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))]
    return members, params, LocalSGD(params, torch.optim.SGD, lr=1.0, period=1, members=members)


def go(params, optimizer, name, rounds=1):
    for _ in range(rounds):
        for p in params:
            p.grad = torch.full_like(p, -(name + 1.0))
        optimizer.step()
    return params[0].tolist()[0]


@pytest.mark.parametrize("collective", [0, 1])
def test_a_rank_that_dies_in_an_exchange_costs_its_own_round_alone(collective):
    """In the mean, or when it confirms that it has that; the others then have had all it has sent."""
    world = Rendezvous()

    def rank(name):
        _, params, optimizer = averaging(world, name, ranks=4, patience=1.0)
        at = go(params, optimizer, name)
        assert at == pytest.approx(2.5)
        if name == 2:
            world.fuse[2] = collective
        return go(params, optimizer, name)

    moved = run_ranks([lambda n=n: rank(n) for n in range(4)])
    assert moved[2] is None
    assert moved[0] == moved[1] == moved[3] == pytest.approx(2.5 + (1 + 2 + 4) / 3)


@pytest.mark.parametrize("quorum", [None, 1])
def test_the_last_but_one_rank_that_dies_ends_the_run_unless_one_may_go_on(quorum):
    world = Rendezvous()

    def rank(name):
        _, params, optimizer = averaging(world, name, ranks=2, patience=1.0, quorum=quorum)
        if name == 1:
            raise Died
        if quorum == 1:
            return go(params, optimizer, name, 3)
        with pytest.raises(
            NotEnoughMembers, match=r"1 of 2 members are there \(0\), and 2 are needed.*nothing is lost"
        ):
            go(params, optimizer, name)
        assert (params[0].tolist(), optimizer.param_groups[0]["rounds"]) == ([1.0] * 3, 0)
        return 1.0

    assert run_ranks([lambda n=n: rank(n) for n in range(2)])[0] == (3.0 if quorum else 1.0)


def test_who_has_left_does_not_count_and_one_that_waits_does():
    """Two ranks; one leaves, the other goes on; one joins; the first dies, the other goes on with one that waits."""
    world, late = Rendezvous(), threading.Event()

    def first():
        _, params, optimizer = averaging(world, 0, ranks=2, patience=1.0)
        at = go(params, optimizer, 0, 2)
        assert at == pytest.approx(1.5 + 1.0)
        late.set()
        until(lambda: optimizer.members.roster.client.add("tickets", 0) == 3)
        go(params, optimizer, 0)
        assert optimizer.members.names == [0]
        assert go(params, optimizer, 0) == pytest.approx(3.5 + (1 + 3) / 2)
        raise Died

    def second():
        members, params, optimizer = averaging(world, 1, ranks=2)
        go(params, optimizer, 1)
        members.leave()

    def third():
        late.wait(30)
        _, params, optimizer = averaging(world, 2, patience=1.0)
        assert params[0].tolist()[0] == pytest.approx(3.5)
        go(params, optimizer, 2)
        with pytest.raises(NotEnoughMembers):
            go(params, optimizer, 2)
        fourth = threading.Thread(target=averaging, args=(world, 3), kwargs={"join_timeout": 20.0}, daemon=True)
        fourth.start()
        until(lambda: optimizer.members.roster.client.add("tickets", 0) == 4)
        go(params, optimizer, 2)
        fourth.join(20)
        assert not fourth.is_alive()
        assert optimizer.members.names == [2]

    run_ranks([first, second, third])


@pytest.mark.parametrize("at", ["view", "now"])
def test_a_rank_that_dies_while_it_publishes_a_view(at, monkeypatch):
    """Before it is all's, or before the others are told."""
    world, inner = Rendezvous(), StoreClient.compare_set
    armed: list[int] = []

    def compare_set(self, key, expected, desired):
        dies = bool(armed) and " open " in desired and bool(armed.pop())
        if dies and at == "view":
            raise Died
        out = inner(self, key, expected, desired)
        if dies:
            raise Died
        return out

    monkeypatch.setattr(StoreClient, "compare_set", compare_set)

    def rank(name):
        _, params, optimizer = averaging(world, name, ranks=4, patience=1.0, timeout=1.0)
        go(params, optimizer, name)
        if name == 0:
            armed.append(1)
        return go(params, optimizer, name)

    moved = [value for value in run_ranks([lambda n=n: rank(n) for n in range(4)]) if value is not None]
    assert len(moved) == 3
    assert len(set(moved)) == 1


@pytest.mark.parametrize("rejoin", [True, False])
def test_a_rank_that_comes_too_late_is_out_and_joins_anew(rejoin, caplog):
    world, left_out, back = Rendezvous(), threading.Event(), []

    def others(name):
        _, params, optimizer = averaging(world, name, ranks=3, patience=1.0, join_timeout=20.0)
        at = go(params, optimizer, name)
        assert at == pytest.approx(1.5)
        if name == 0:
            left_out.set()
        if rejoin:
            until(lambda: optimizer.members.roster.client.add("tickets", 0) == 4)
            go(params, optimizer, name)
            assert go(params, optimizer, name) == pytest.approx(3.0 + 2.0)
        return numbers(params)

    def late():
        called = []
        _, params, optimizer = averaging(
            world, 2, ranks=3, patience=1.0, rejoin=rejoin, on_join=called.append, join_timeout=20.0
        )
        left_out.wait(20)
        if not rejoin:
            with pytest.raises(LeftOut, match="gone on without this rank"):
                go(params, optimizer, 2)
            return back.append(numbers(params))
        assert go(params, optimizer, 2) == pytest.approx(3.0)
        assert called == [optimizer]
        assert optimizer.param_groups[0]["rounds"] == 2
        go(params, optimizer, 2)
        return numbers(params)

    found = run_ranks([lambda: others(0), lambda: others(1), late])
    if rejoin:
        assert found[0] == found[1] == found[2]
        assert "its own round is lost" in caplog.text
    else:
        assert back == [[3.0] * 3]


def test_what_is_refused_does_not_end_the_run_of_the_others(caplog):
    """Other learning rates; a model that is another; a rank that would join and has gone."""
    world, model = Rendezvous(), threading.Event()

    def rank(name):
        members, params, optimizer = averaging(world, name, ranks=4, patience=2.0)
        if name == 3:
            optimizer.param_groups[0]["lr"] = 0.5
            with pytest.raises(StepRefused, match="other learning rates or outer hyper-parameters than most"):
                go(params, optimizer, name)
            return members.leave()
        go(params, optimizer, name)
        if name == 0:
            members.roster.client.add("tickets", 1)
            members.roster.client.set("ticket/4", '"gone"')
            model.set()
            until(lambda: members.roster.client.add("tickets", 0) == 6)
        go(params, optimizer, name, 2)
        assert members.names == [0, 1, 2]
        return numbers(params)

    def other():
        model.wait(30)
        with pytest.raises(ValueError, match="parameter"):
            averaging(world, 9, [torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))])

    caplog.set_level(logging.WARNING)
    found = run_ranks([*(lambda n=n: rank(n) for n in range(4)), other])
    assert found[0] == found[1] == found[2] == [pytest.approx(6.0)] * 3
    assert "goes on without 3: it has other learning rates" in caplog.text


def test_inf_or_nan_on_one_rank_does_not_count_and_is_healed_and_on_all_is_skipped():
    world = Rendezvous()

    def rank(name):
        params = [torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))]
        members = world.members(name, ranks=3)
        optimizer = DiLoCo(params, torch.optim.AdamW, lr=0.1, period=2, members=members)
        for step in range(6):
            give_grads(params, step, name)
            optimizer.step()
            with torch.no_grad():
                if (step == 2 and name == 1) or step == 4:
                    params[0][1] = float("nan")
                if step == 2 and name == 1:
                    optimizer.base.state[params[0]]["exp_avg"].fill_(float("inf"))
            if step == 3:
                assert bool(torch.isfinite(params[0]).all())
                assert (len(optimizer.base.state[params[0]]) == 0) == (name == 1)
        assert (optimizer.comm_stats()["skipped_rounds"], optimizer.param_groups[0]["rounds"]) == (1, 2)
        anchor = optimizer.buckets[0]["anchor"].tolist()
        members.leave()
        return anchor

    found = run_ranks([lambda n=n: rank(n) for n in range(3)])
    assert found[0] == found[1] == found[2]


def test_the_mean_of_the_replicas_is_of_those_that_are_there():
    world = Rendezvous()

    def rank(name):
        members = world.members(name, ranks=3, patience=1.0)
        params = [torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))]
        optimizer = LocalSGD(params, torch.optim.SGD, lr=1.0, period=9, members=members)
        go(params, optimizer, name)
        if name == 1:
            world.fuse[1] = 0
        own = numbers(params)
        with optimizer.averaged():
            assert numbers(params) == [2.0] * 3
        assert numbers(params) == own
        optimizer.synchronize()
        return numbers(params)

    assert run_ranks([lambda n=n: rank(n) for n in range(3)]) == [[2.0] * 3, None, [2.0] * 3]


@pytest.mark.parametrize("times", [1, 9])
def test_a_damaged_message_is_sent_again_and_again_but_not_for_ever(times, monkeypatch):
    from commopt.outer import member_rounds

    world, inner, damaged = Rendezvous(), member_rounds.confirm, []

    def confirm(backend, sound, where):
        inner(backend, sound, where)
        damaged.append(backend.rank)
        if damaged.count(backend.rank) <= times:
            raise MessageDamaged("what was received is not what was sent")

    monkeypatch.setattr(member_rounds, "confirm", confirm)

    def rank(name):
        _, params, optimizer = averaging(world, name, ranks=2)
        if times == 9:
            with pytest.raises(CollectiveError, match="5 exchanges have failed, though members are there"):
                go(params, optimizer, name)
            return 1.5, 2
        return go(params, optimizer, name), optimizer.members.epoch

    assert run_ranks([lambda n=n: rank(n) for n in range(2)]) == [(1.5, 2)] * 2


@pytest.mark.parametrize("quorum", [None, 1])
def test_members_between_whom_the_network_is_cut(quorum):
    """Of two, one goes on if it may. Of five, two pairs of which one rank is in both: without that one."""
    world, cut = Rendezvous(), threading.Barrier(5)

    def rank(name):
        members, params, optimizer = averaging(world, name, ranks=5, patience=3.0, quorum=quorum)
        go(params, optimizer, name)
        cut.wait()
        world.cut |= {frozenset((1, 3)), frozenset((0, 1))}
        if name == 1:
            with pytest.raises(StepRefused, match="reaches the store, but not 0, 3; the network between them is cut"):
                go(params, optimizer, name)
            return None
        at = go(params, optimizer, name)
        assert members.names == [0, 2, 3, 4]
        return at

    assert run_ranks([lambda n=n: rank(n) for n in range(5)]) == [6.25, None, *[6.25] * 3]

    def of_two(name):
        _, params, optimizer = averaging(two, name, ranks=2, patience=1.0, quorum=quorum)
        go(params, optimizer, name)
        two.cut.add(frozenset((0, 1)))
        if name == 0 and quorum == 1:
            return go(params, optimizer, name)
        with pytest.raises((NotEnoughMembers, StepRefused)):
            go(params, optimizer, name)
        return params[0].tolist()[0]

    two = Rendezvous()
    assert run_ranks([lambda n=n: of_two(n) for n in range(2)]) == [1.5 + 1.0, 1.5 + 2.0]


def test_a_store_that_does_not_answer_is_an_error_in_time():
    world = Rendezvous()
    members, params, optimizer = averaging(world, 0, ranks=1, timeout=0.5)
    go(params, optimizer, 0)
    hangs = threading.Event()
    members.roster.client.ask(lambda _: None)
    members.roster.client._questions.put((lambda _: hangs.wait(30), type("Nobody", (), {"set_result": print})()))
    with pytest.raises(StoreLost, match=r"cannot be reached: no answer within 0.5 s"):
        go(params, optimizer, 0)
    assert (numbers(params), optimizer.param_groups[0]["rounds"]) == ([2.0] * 3, 1)
    hangs.set()
    assert go(params, optimizer, 0) == 3.0  # it answers again
    members.roster.client.delete(["now"])
    with pytest.raises(StoreLost, match="has forgotten them"):
        go(params, optimizer, 0)


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
        owed = _residuals(optimizer, 5, False)
        after = torch.cat([owed[p]["worker_error"].flatten() for p in bucket.params])
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
    with pytest.raises(ValueError, match="weight must be"):
        members.add_weight(-1)
    for call in (optimizer.consolidate_state_dict, optimizer.rebind, lambda: optimizer.averaged(model),
                 lambda: optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})):  # fmt: skip
        with pytest.raises(ValueError, match="does not fit members="):
            call()
    with pytest.raises(ValueError, match="one optimizer alone"):
        DiLoCo(Toy().parameters(), lr=1.0, members=members)


def test_too_few_ranks_to_begin_and_none_to_join():
    world = Rendezvous()
    with pytest.raises(NotEnoughMembers, match=r"1 of 3 ranks have come within 0.2 s, and 2 are needed to begin"):
        averaging(world, 0, ranks=3, timeout=0.2)
    with pytest.raises(LeftOut, match=r"no member has taken this rank in within 0.2 s"):
        averaging(world, 0, join_timeout=0.2)
