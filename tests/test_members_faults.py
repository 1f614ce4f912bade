"""Members that die, come too late, are cut off, or do not fit: what it costs, and whom."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from member_world import Died, Rendezvous, averaging, give_grads, go, numbers, run_ranks, until
from worlds import needs_connections

from commopt import DiLoCo, Guard, LocalSGD, Members
from commopt.agreement.calls import StepRefused
from commopt.comm import CollectiveError, LocalBackend, MessageDamaged, given_up
from commopt.comm.store import StoreClient, StoreLost
from commopt.outer import CutOff, LeftOut, NotEnoughMembers
from commopt.outer.roster import Roster


@pytest.fixture(autouse=True)
def _look_often(monkeypatch):
    monkeypatch.setattr(given_up, "LOOK", 0.05)


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


def load_another_anchor(optimizer):
    state = optimizer.state_dict()
    state["state"][0]["anchor"][0] = -7.0
    optimizer.load_state_dict(state)


@pytest.mark.parametrize("rejoin", [True, False])
def test_who_holds_another_anchor_is_left_out_alone_and_has_that_of_the_others_when_it_joins_anew(rejoin, caplog):
    """It has loaded another state, of the same round; what it has done since then reaches nobody."""
    world, left_out = Rendezvous(), threading.Event()

    def others(name):
        members, params, optimizer = averaging(world, name, ranks=3, patience=5.0)
        go(params, optimizer, name)
        assert go(params, optimizer, name) == pytest.approx(2.0 + 1.5)
        assert members.names == [0, 1]
        left_out.set()
        if rejoin:
            until(lambda: members.roster.client.add("tickets", 0) == 4)
        go(params, optimizer, name, 2)
        return numbers(params), members.names

    def other():
        _, params, optimizer = averaging(world, 2, ranks=3, patience=5.0, rejoin=rejoin)
        go(params, optimizer, 2)
        load_another_anchor(optimizer)
        if not rejoin:
            with pytest.raises(LeftOut, match="it holds another anchor or outer state than most others"):
                go(params, optimizer, 2)
            return None
        assert go(params, optimizer, 2) == pytest.approx(2.0 + 1.5 + 1.5)
        go(params, optimizer, 2)
        return numbers(params), [0, 1, 2]

    caplog.set_level(logging.WARNING)
    found = run_ranks([lambda: others(0), lambda: others(1), other])
    assert "goes on without 2: it holds another anchor" in caplog.text
    assert found[0] == found[1]
    if rejoin:
        assert found[0] == found[2] == ([pytest.approx(5.0 + 2.0)] * 3, [0, 1, 2])


@pytest.mark.parametrize("ranks", [2, 4])
def test_of_two_camps_of_one_size_the_first_ranks_goes_on_and_the_others_join_anew(ranks):
    """With the default quorum, of which those apart are: they are there."""
    world, usual, drawn = Rendezvous(), range(ranks // 2), 2 * ranks - ranks // 2

    def rank(name):
        members, params, optimizer = averaging(world, name, ranks=ranks, patience=5.0)
        go(params, optimizer, name)
        if name not in usual:
            load_another_anchor(optimizer)
        go(params, optimizer, name)
        if name in usual:
            assert members.names == [*usual]
            until(lambda: members.roster.client.add("tickets", 0) == drawn)
            go(params, optimizer, name)
        go(params, optimizer, name)
        return members.names, numbers(params)

    found = run_ranks([lambda n=n: rank(n) for n in range(ranks)])
    mean, of_usual = (ranks + 1) / 2, (len(usual) + 1) / 2
    assert found == [([*range(ranks)], [pytest.approx(2 * mean + 2 * of_usual)] * 3)] * ranks


@pytest.mark.parametrize(("buffer", "ranks"), [("anchor", 3), ("outer_momentum", 3), ("outer_momentum", 2)])
def test_inf_or_nan_in_the_outer_state_of_most_is_not_what_the_others_join_anew_for(buffer, ranks, caplog):
    """The one that has none goes on, and the others have its state."""
    world, healthy = Rendezvous(), ranks - 1

    def rank(name):
        params = [torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))]
        members = world.members(name, ranks=ranks, patience=5.0)
        optimizer = DiLoCo(params, torch.optim.SGD, lr=1.0, period=1, members=members)
        go(params, optimizer, name)
        if name != healthy:
            optimizer.buckets[0][buffer][1] = float("nan")
            params[0].data.copy_(optimizer.buckets[0]["anchor"][:3])
        go(params, optimizer, name)
        if name == healthy:
            assert members.names == [healthy]
            until(lambda: members.roster.client.add("tickets", 0) == 2 * ranks - 1)
            go(params, optimizer, name)
        go(params, optimizer, name)
        return members.names, numbers(params), optimizer.param_groups[0]["rounds"]

    caplog.set_level(logging.WARNING)
    found = run_ranks([lambda n=n: rank(n) for n in range(ranks)])
    assert found == [([*range(ranks)], [found[healthy][1][0]] * 3, 4)] * ranks
    assert "goes on without 0: inf or NaN is in its anchor or outer state" in caplog.text


def test_replicas_that_are_not_to_be_compared_go_on_together():
    world = Rendezvous()

    def rank(name):
        members, params, optimizer = averaging(world, name, ranks=2, guard=Guard(check_every=None))
        go(params, optimizer, name)
        if name:
            load_another_anchor(optimizer)
        go(params, optimizer, name)
        return members.names

    assert run_ranks([lambda n=n: rank(n) for n in range(2)]) == [[0, 1]] * 2


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


def test_a_rank_that_has_joined_skips_a_local_step_of_nan_and_says_so(caplog):
    """Its number was 0 of one rank when it was made."""
    world, late = Rendezvous(), threading.Event()

    def first():
        _, params, optimizer = averaging(world, 0, ranks=1)
        go(params, optimizer, 0)
        late.set()
        until(lambda: optimizer.members.roster.client.add("tickets", 0) == 2)
        go(params, optimizer, 0, 3)

    def second():
        late.wait(30)
        _, params, optimizer = averaging(world, 1)
        go(params, optimizer, 1)
        params[0].grad = torch.full_like(params[0], float("nan"))
        optimizer.step()
        return optimizer.skipped_steps

    assert run_ranks([first, second])[1] == 1
    assert "LocalSGD: rank 1 skipped its local step: inf, NaN" in caplog.text


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


@pytest.mark.long(but="1")
@pytest.mark.parametrize("quorum", [None, 1])
def test_members_between_whom_the_network_is_cut(quorum):
    """Of two, one goes on if it may. Of five, two pairs of which one rank is in both: without that one."""
    world, cut = Rendezvous(), threading.Barrier(5)

    def rank(name):
        members, params, optimizer = averaging(world, name, ranks=5, patience=3.0, quorum=quorum, reconnect=2.9)
        go(params, optimizer, name)
        cut.wait()
        world.cut |= {frozenset((1, 3)), frozenset((0, 1))}
        if name == 1:
            with pytest.raises(CutOff, match="reaches the store, but not 0, 3; the network between them is cut"):
                go(params, optimizer, name)
            return None
        at = go(params, optimizer, name)
        assert members.names == [0, 2, 3, 4]
        return at

    assert run_ranks([lambda n=n: rank(n) for n in range(5)]) == [6.25, None, *[6.25] * 3]

    def of_two(name):
        _, params, optimizer = averaging(two, name, ranks=2, patience=1.0, quorum=quorum, reconnect=0.0)
        go(params, optimizer, name)
        two.cut.add(frozenset((0, 1)))
        if name == 0 and quorum == 1:
            return go(params, optimizer, name)
        with pytest.raises((NotEnoughMembers, CutOff)):
            go(params, optimizer, name)
        return params[0].tolist()[0]

    two = Rendezvous()
    assert run_ranks([lambda n=n: of_two(n) for n in range(2)]) == [1.5 + 1.0, 1.5 + 2.0]


def test_a_member_that_was_cut_off_from_others_joins_anew_after_longer_and_longer_pauses(monkeypatch, caplog):
    """Cut in its round and in the one after it has joined; then the network is back, and later cut once more."""
    world, pauses = Rendezvous(), []
    all_here, link = threading.Barrier(3), frozenset((1, 2))

    def pause(seconds):
        if seconds < 1:
            return sleep(seconds)
        pauses.append(seconds)
        if len(pauses) >= 2:
            world.cut.remove(link)
        return None

    sleep = time.sleep
    monkeypatch.setattr("commopt.outer.members.time.sleep", pause)

    def rank(name):
        members, params, optimizer = averaging(world, name, ranks=3, patience=3.0, reconnect=12.0)
        go(params, optimizer, name)
        for _ in range(2):
            all_here.wait()
            world.cut.add(link)
            last = optimizer.param_groups[0]["rounds"] + 3
            while optimizer.param_groups[0]["rounds"] < last or len(members.names) < 3:
                view = members.roster.view
                if name < 2 and members.names == [0, 1] and not view.joiners:  # until the other one waits to join
                    until(lambda drawn=view.drawn: members.roster.client.add("tickets", 0) > drawn)
                go(params, optimizer, name)
        return numbers(params), members.names, optimizer.param_groups[0]["rounds"]

    found = run_ranks([lambda n=n: rank(n) for n in range(3)])
    assert found[0] == found[1] == found[2]
    assert pauses == [3.0, 6.0, 3.0]
    assert caplog.text.count("its own round is lost, and it joins anew in") == 3


def test_a_store_that_does_not_answer_is_an_error_in_time():
    world = Rendezvous()
    members, params, optimizer = averaging(world, 0, ranks=1, timeout=0.5, reconnect=0.0)
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


class Failing:
    """A store that has died: each question takes a while, and fails."""

    def clone(self):
        return self

    def get(self):
        time.sleep(0.2)
        raise RuntimeError("connection reset by peer")


def test_two_questions_under_way_as_the_store_fails_are_both_told_so():
    client = StoreClient(Failing(), 5.0)

    def ask():
        with pytest.raises(StoreLost, match="cannot be reached: connection reset by peer"):
            client.ask(lambda store: store.get())

    run_ranks([ask, ask])
    assert client.ask(lambda _: "again") == "again"


class Late(Future):
    """What is there as soon as the time is over that somebody waits for it."""

    def result(self, timeout=None):
        found = super().result()
        if timeout is not None:
            raise FutureTimeout
        return found


def test_what_comes_as_the_time_is_over_is_not_taken_for_a_failure(monkeypatch):
    monkeypatch.setattr(given_up, "Future", Late)
    monkeypatch.setattr("commopt.comm.store.Future", Late)
    assert StoreClient(dist.HashStore(), 0.5).ask(lambda _: "answer") == "answer"
    comes = threading.Event()

    def connect(*_):
        comes.wait(2)
        return LocalBackend()

    def why():
        comes.set()
        time.sleep(0.3)

    for patience in (30.0, 0.05):
        comes.clear()
        backend = given_up.connected(connect, dist.HashStore(), "pair", 0, 2, 5.0, patience, why)
        assert backend.world_size == 1


@needs_connections
def test_a_store_that_is_silent_while_members_try_whom_they_reach_cuts_off_nobody(monkeypatch, caplog):
    """They ask it again, and meet as soon as it answers."""
    world, ask, reaches, silent = Rendezvous(), StoreClient.ask, Members._reaches, [0.0]

    def fall_silent():
        silent[0] = time.monotonic() + 1.0

    both = threading.Barrier(2, fall_silent)

    def tried(self, other):
        both.wait(30)
        return reaches(self, other)

    def asked(self, question, seconds=0.0):
        if time.monotonic() < silent[0]:
            raise StoreLost("no answer")
        return ask(self, question, seconds)

    monkeypatch.setattr(Members, "_reaches", tried)
    monkeypatch.setattr(StoreClient, "ask", asked)

    def rank(name):
        members, params, optimizer = averaging(world, name, ranks=2, patience=5.0)
        go(params, optimizer, name)
        if name == 0:
            world.refuses += [0, 0]
        return go(params, optimizer, name), members.names

    assert run_ranks([lambda n=n: rank(n) for n in range(2)]) == [(3.0, [0, 1])] * 2
    assert silent[0]
    assert "whom this rank reaches is not known" in caplog.text


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_verdict_that_the_store_has_taken_down_and_not_answered_is_asked_for_again(ranks, monkeypatch, caplog):
    """By all: each holds the mean, and would else find that the others have ended a round without it."""
    world, inner, lost = Rendezvous(), StoreClient.compare_set, set()

    def compare_set(self, key, expected, desired):
        out = inner(self, key, expected, desired)
        if desired.startswith(f"{ended} done") and id(self) not in lost:
            lost.add(id(self))
            raise StoreLost("no answer")
        return out

    monkeypatch.setattr(StoreClient, "compare_set", compare_set)
    ended = 2

    def rank(name):
        members, params, optimizer = averaging(world, name, ranks=ranks, patience=3.0, join_timeout=5.0)
        return go(params, optimizer, name, 3), members.epoch, len(members.names)

    mean = (ranks + 1) / 2
    assert run_ranks([lambda n=n: rank(n) for n in range(ranks)]) == [(3 * mean, 3, ranks)] * ranks
    assert len(lost) == ranks
    assert "joins anew" not in caplog.text


def test_a_rank_counts_once_whose_count_the_store_has_not_answered(monkeypatch):
    """Of three, two are there: a third one would be taken for missing if one of them counted twice."""
    world, inner, lost = Rendezvous(), StoreClient.add, []

    def add(self, key, amount):
        out = inner(self, key, amount)
        if key == "count/1" and not lost:
            lost.append(key)
            raise StoreLost("no answer")
        return out

    monkeypatch.setattr(StoreClient, "add", add)

    def rank(name):
        members, params, optimizer = averaging(world, name, ranks=3, patience=3.0)
        go(params, optimizer, name)
        if name == 2:
            until(lambda: lost and inner(members.roster.client, "count/1", 0) >= 2)
            time.sleep(0.5)
        return go(params, optimizer, name), members.epoch, members.names

    assert run_ranks([lambda n=n: rank(n) for n in range(3)]) == [(4.0, 2, [0, 1, 2])] * 3
    assert lost


@needs_connections
def test_a_member_that_dies_while_connections_are_opened_costs_one_meeting_alone():
    """The others' connections wait for it at the store, for as long as a collective may take, and are given up before
    that: those of the next meeting do not wait behind them."""
    world, dies, held = Rendezvous(), threading.Event(), []
    world.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    class Slow(Rendezvous):
        def connect(self, who):
            inner = world.connect(who)

            def of(store, name, rank, world_size, timeout):
                if who == 2 and dies.is_set():
                    raise Died
                held.append(name)
                store.set(f"there/{rank}", "")
                store.wait([f"there/{r}" for r in range(world_size)], timedelta(seconds=timeout))
                return inner(store, name, rank, world_size, timeout)

            return of

    slow = Slow()
    slow.store = world.store

    def rank(name):
        _, params, optimizer = averaging(slow, name, ranks=3, patience=1.5, timeout=60.0, join_timeout=60.0)
        at = go(params, optimizer, name)
        assert at == pytest.approx(2.0)
        dies.set()
        until(lambda: optimizer.members.roster.client.add("tickets", 0) == 4)
        go(params, optimizer, name)  # the joiner gets the state, and the next view has other members
        return go(params, optimizer, name)

    def joiner():
        dies.wait(30)
        _, params, optimizer = averaging(slow, 3, patience=1.5, timeout=60.0, join_timeout=60.0)
        return go(params, optimizer, 3)

    moved = run_ranks([*((lambda n=n: rank(n)) for n in range(3)), joiner], 40.0)
    for name in held:  # no thread waits any more
        dist.PrefixStore(name, dist.PrefixStore("commopt/members", world.store)).set("there/2", "")
    assert moved[2] is None
    assert moved[0] == moved[1] == moved[3] == pytest.approx(4.0 + (1 + 2 + 4) / 3)


def test_the_member_that_gives_the_state_dies(caplog):
    """The one that joins asks again, and has it from the next one."""
    world, asked = Rendezvous(), threading.Event()

    def rank(name):
        members, params, optimizer = averaging(world, name, ranks=3, patience=1.0, timeout=1.5)
        go(params, optimizer, name)
        asked.set()
        until(lambda: members.roster.client.add("tickets", 0) == 4)
        if name == 0:
            world.fuse[0] = 5  # behind the round's own two
        go(params, optimizer, name)
        assert name != 0
        go(params, optimizer, name)
        go(params, optimizer, name)
        return numbers(params), members.names

    def joins():
        asked.wait(30)
        members, params, optimizer = averaging(world, 3, timeout=1.5)
        assert optimizer.param_groups[0]["rounds"] == 3
        go(params, optimizer, 3)
        return numbers(params), members.names

    found = run_ranks([*(lambda n=n: rank(n) for n in range(3)), joins])
    assert found == [None, *[([4.0 + 2.5 + 3.0] * 3, [1, 2, 3])] * 3]
    assert "this rank asks again" in caplog.text


class Word:
    """What somebody has put into a parameter group."""


@pytest.mark.parametrize("extra", [None, lambda: 0, Word()], ids=["in the state", "a lambda", "an object"])
def test_a_state_that_cannot_be_given_is_an_error_of_the_joiner_alone(extra, caplog):
    """But for what is no parameter's: of that a joiner needs nothing."""
    world, asked = Rendezvous(), threading.Event()

    def rank(name):
        members, params, optimizer = averaging(world, name, ranks=2, patience=3.0)
        if extra is None:
            optimizer.state["tokens"] = 5
        else:
            optimizer.param_groups[0]["extra"] = extra
        asked.set()
        until(lambda: members.roster.client.add("tickets", 0) == 3)
        go(params, optimizer, name, 3)
        return numbers(params), members.names

    def joins():
        asked.wait(30)
        if extra is not None:
            with pytest.raises(ValueError, match=r"a member cannot give its state: .*(lambda|it has .*\.Word)"):
                averaging(world, 2)
            return
        members, params, optimizer = averaging(world, 2)
        go(params, optimizer, 2, 3 - optimizer.param_groups[0]["rounds"])
        assert members.names == [0, 1, 2]

    *found, _ = run_ranks([*(lambda n=n: rank(n) for n in range(2)), joins])
    assert found[0] == found[1]
    assert found[0][1] == ([0, 1, 2] if extra is None else [0, 1])
    assert ("a rank that would join has not: " in caplog.text) is (extra is not None)


def test_all_skip_a_round_also_a_rank_that_has_not_reached_the_others(monkeypatch):
    """The others have found that none is finite, and say so before it says that it has failed."""
    world, told, inner = Rendezvous(), threading.Event(), Members.backend
    cut = []

    def backend(self):
        if self.name == 2 and cut:
            cut.clear()
            told.wait(30)
            raise CollectiveError("it does not reach the others")
        return inner(self)

    monkeypatch.setattr(Members, "backend", backend)

    def rank(name):
        members, params, optimizer = averaging(world, name, ranks=3)
        for group in optimizer.param_groups:
            group["period"] = 2
        go(params, optimizer, name, 3)
        kept = params[0].detach().clone()
        with torch.no_grad():
            params[0].fill_(float("nan"))
        if name == 2:
            cut.append(name)
        go(params, optimizer, name)
        told.set()
        with torch.no_grad():
            params[0].copy_(kept)
        at = go(params, optimizer, name)
        return at, optimizer.comm_stats()["skipped_rounds"], members.names

    assert run_ranks([lambda n=n: rank(n) for n in range(3)]) == [(8.0, 1, [0, 1, 2])] * 3


@pytest.mark.parametrize("call", ["ready", "forsake"])
def test_the_store_is_lost_while_a_rank_joins(call, monkeypatch, caplog):
    """By the member that gives the state: it has its outer step, and goes on. By the one that joins anew: it asks
    again. Both find the store again, and all three are members in the end."""
    world, inner, lost = Rendezvous(), getattr(Members, call), [StoreLost("no answer")]

    def once(self, *args):
        if lost:
            raise lost.pop()
        return inner(self, *args)

    monkeypatch.setattr(Members, call, once)
    late = threading.Event()

    def rank(name):
        members, params, optimizer = averaging(world, name, ranks=3, patience=1.0, timeout=1.5)
        if name == 2:
            late.wait(30)
            go(params, optimizer, name)
        while len(members.names) < 3 or optimizer.param_groups[0]["rounds"] < 2:
            view = members.roster.view
            if members.names == [0, 1] and not view.joiners:
                late.set()
                until(lambda drawn=view.drawn: members.roster.client.add("tickets", 0) > drawn)
            go(params, optimizer, name)
        return numbers(params), members.names

    found = run_ranks([lambda n=n: rank(n) for n in range(3)])
    assert found[0] == found[1] == found[2]
    assert not lost
    assert ("ranks that would join have not: no answer" if call == "ready" else "answers again") in caplog.text


def test_a_rank_that_has_left_is_told_so_and_one_that_comes_when_all_have():
    world = Rendezvous()
    members, params, optimizer = averaging(world, 0, ranks=1)
    go(params, optimizer, 0)
    members.leave()
    with pytest.raises(StepRefused, match="has left the run"):
        go(params, optimizer, 0)
    with pytest.raises(LeftOut, match="has ended: all its members have left"):
        averaging(world, 1, ranks=1)


@needs_connections
def test_who_fails_alone_does_not_let_the_others_wait():
    """The timeout is 30 seconds, and nobody has gone: the others hear that one has given up, and all meet again."""
    world, begin = Rendezvous(), time.monotonic()

    def rank(name):
        members, params, optimizer = averaging(world, name, ranks=3)
        if name == 1:
            world.refuses.append(name)
        return go(params, optimizer, name), members.epoch

    assert run_ranks([lambda n=n: rank(n) for n in range(3)]) == [(2.0, 2)] * 3
    assert time.monotonic() < begin + 20


def test_a_rank_that_has_waited_in_vain_is_not_taken_in_and_does_not_count(caplog):
    """It would cost the others their patience, and one that is left alone would go on, for it counts one that waits."""
    world, began, waited = Rendezvous(), threading.Event(), threading.Event()

    def first():
        _, params, optimizer = averaging(world, 0, ranks=2, patience=1.0)
        go(params, optimizer, 0)
        began.set()
        assert waited.wait(30)
        with pytest.raises(NotEnoughMembers, match="1 of 2 members are there"):
            go(params, optimizer, 0)

    def second():
        _, params, optimizer = averaging(world, 1, ranks=2)
        go(params, optimizer, 1)
        raise Died

    def third():
        assert began.wait(30)
        with pytest.raises(LeftOut, match=r"no member has taken this rank in within 0.2 s"):
            averaging(world, 2, join_timeout=0.2)
        waited.set()

    run_ranks([first, second, third])
    assert "join: 2" not in caplog.text


def test_a_joiner_whose_ticket_was_overlooked_draws_another(monkeypatch):
    """It has drawn its ticket when a view is published, and has not written its name on it yet."""
    world, there, drawn, inner, late = Rendezvous(), threading.Event(), threading.Event(), Roster.draw, []

    def draw(self):
        if self.name == 1 and not late:
            late.append(self)
            self.ticket = self.client.add("tickets", 1) - 1
            drawn.set()
        else:
            inner(self)

    monkeypatch.setattr(Roster, "draw", draw)

    def first():
        members, params, optimizer = averaging(world, 0, ranks=1)
        there.set()
        drawn.wait(30)
        go(params, optimizer, 0)
        until(lambda: members.roster.client.add("tickets", 0) == 3)
        go(params, optimizer, 0)
        assert members.roster.expected == [0, 2]

    def second():
        there.wait(30)
        _, _, optimizer = averaging(world, 1)
        return optimizer.param_groups[0]["rounds"]

    assert run_ranks([first, second])[1] == 2


@needs_connections
def test_what_another_rank_takes_away_meanwhile_is_not_there():
    """Every answer is a value that was set, or None, and is there at once."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client, other, ends = StoreClient(store, 5.0), store.clone(), threading.Event()

    def set_and_delete():
        while not ends.is_set():
            other.set("key", "value")
            other.delete_key("key")

    thread = threading.Thread(target=set_and_delete, daemon=True)
    thread.start()
    ways, until = (lambda: client.get("key"), lambda: client.get_all(["key"]).get("key")), time.monotonic() + 30
    for ask in ways:
        found = {ask() for _ in range(300)}
        while len(found) < 2 and time.monotonic() < until:  # on a busy machine the threads may run in turns
            found.add(ask())
        assert found == {"value", None}
    ends.set()
    thread.join(10)
    client.set("key", "")
    assert (client.get("key"), client.get_all(["key", "another"])) == ("", {"key": ""})


def test_a_run_that_could_not_begin_is_begun_anew_on_the_same_store():
    """One of the first three dies as they connect, with the others of its view; who has come too late for that is told,
    too. Then all are started again."""
    world, dies, failed = Rendezvous(), [2], []
    inner, theirs = world.connect, dist.PrefixStore("commopt/members", world.store)

    def connect(who):
        def of(store, name, rank, world_size, timeout):
            if who in dies:
                raise Died
            if dies:
                until(lambda: theirs.add("tickets", 0) == 4)
                raise RuntimeError("not all have come")
            return inner(who)(store, name, rank, world_size, timeout)

        return of

    world.connect = connect

    def rank(name):
        with pytest.raises(CollectiveError, match=r"not all have come|could not begin"):
            averaging(world, name, ranks=3)
        failed.append(name)
        until(lambda: len(failed) == 3)
        dies.clear()
        _, params, optimizer = averaging(world, name, ranks=3)
        return go(params, optimizer, name)

    def again():
        until(lambda: theirs.check(["opened/0"]))
        with pytest.raises(LeftOut, match="could not: start them and this one again"):
            averaging(world, 2, ranks=3)
        failed.append(2)
        until(lambda: not dies)
        _, params, optimizer = averaging(world, 2, ranks=3)
        return go(params, optimizer, 2)

    def first_two():
        with pytest.raises(Died):
            averaging(world, 2, ranks=3)

    moved = run_ranks([lambda: rank(0), lambda: rank(1), first_two, again])
    assert moved == [2.0, 2.0, None, 2.0]


def test_who_joins_may_come_before_the_run_has_begun():
    world, waits = Rendezvous(), threading.Event()

    def rank(name):
        waits.wait(30)
        time.sleep(0.2)
        _, params, optimizer = averaging(world, name, ranks=2)
        until(lambda: optimizer.members.roster.client.add("tickets", 0) == 3)
        return go(params, optimizer, name, 2)

    def joins():
        waits.set()
        _, params, optimizer = averaging(world, 2)
        return go(params, optimizer, 2)

    assert run_ranks([lambda: rank(0), lambda: rank(1), joins]) == [3.5] * 3


def test_a_joiner_that_was_given_up_counts_once_whatever_it_says_later():
    """The others give it up, it leaves: nobody is taken for the last one before all have come."""
    world = Rendezvous()

    def rank(name):
        members, params, optimizer = averaging(world, name, ranks=2)
        roster = members.roster
        if name == 0:
            drawn = Roster(StoreClient(members._store, 5.0), 7, members._needed, None)
            drawn.draw()
        until(lambda: roster.client.add("tickets", 0) == 3)
        go(params, optimizer, name)
        if name == 0:
            assert roster.view.joiners == [2]
            assert roster.client.get(f"count/{roster.epoch}") == "1"  # it has not come: rank 0 has said so
            drawn.enter(roster.view, roster.now)
            drawn.leave()
            assert roster.client.get(f"count/{roster.epoch}") == "1"
        else:
            until(lambda: roster.client.get(f"count/{roster.epoch}") in ("1", "2"))  # rank 0 may have come meanwhile
            time.sleep(0.5)
        return go(params, optimizer, name), members.names

    assert run_ranks([lambda: rank(0), lambda: rank(1)]) == [(3.0, [0, 1])] * 2


def test_an_error_of_on_join_lets_the_others_go_on():
    world, begin = Rendezvous(), time.monotonic()

    def fails(optimizer):
        raise KeyError("no such data")

    def rank(name):
        _, params, optimizer = averaging(world, name, ranks=2)
        until(lambda: optimizer.members.roster.client.add("tickets", 0) == 3)
        return go(params, optimizer, name, 2)

    def joins():
        until(lambda: dist.PrefixStore("commopt/members", world.store).add("tickets", 0) == 2)
        with pytest.raises(KeyError, match="no such data"):
            averaging(world, 2, on_join=fails)

    assert run_ranks([lambda: rank(0), lambda: rank(1), joins]) == [3.0, 3.0, None]
    assert time.monotonic() < begin + 20  # and not their patience of 30 seconds
