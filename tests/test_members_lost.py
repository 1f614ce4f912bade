"""Members that have lost the store, or each other, for a moment: the others wait for nothing, and no round is lost."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from member_world import Rendezvous, averaging, go, numbers, run_ranks, until

from commopt import Guard, LocalSGD, Members
from commopt.comm import CollectiveError, given_up
from commopt.comm.store import StoreClient, StoreLost
from commopt.optim import NotFinite
from commopt.outer.roster import Roster


@pytest.fixture(autouse=True)
def _look_often(monkeypatch):
    monkeypatch.setattr(given_up, "LOOK", 0.05)


def test_a_rank_that_has_lost_its_connections_has_new_ones_with_all_others(monkeypatch, caplog):
    """All skip a round, which it alone has found to fail: they meet in the next one, and none waits."""
    world, told, inner, cut = Rendezvous(), threading.Event(), Members.backend, []

    def backend(self):
        if self.name == 2 and cut:
            cut.clear()
            told.wait(30)
            raise CollectiveError("it does not reach the others")
        return inner(self)

    monkeypatch.setattr(Members, "backend", backend)

    def rank(name):
        members, params, optimizer = averaging(world, name, ranks=3, patience=20.0)
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
        begin = time.monotonic()
        at = go(params, optimizer, name)
        return at, optimizer.comm_stats()["skipped_rounds"], members.epoch, time.monotonic() - begin < 5

    assert run_ranks([lambda n=n: rank(n) for n in range(3)]) == [(8.0, 1, 3, True)] * 3
    assert "they meet again" not in caplog.text


def test_too_many_skipped_rounds_end_the_run_of_a_rank_that_reaches_no_other_too(monkeypatch):
    """It is among others than before, and has no connections to these."""
    world, told, inner, cut = Rendezvous(), threading.Event(), Members.backend, []

    def backend(self):
        if self.name == 2 and cut:
            told.wait(30)
            raise CollectiveError("it does not reach the others")
        return inner(self)

    monkeypatch.setattr(Members, "backend", backend)

    def rank(name):
        members, params = world.members(name, ranks=4), [torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))]
        optimizer = LocalSGD(params, torch.optim.SGD, lr=1.0, period=1, members=members, guard=Guard(max_skipped=1))
        go(params, optimizer, name)
        if name == 3:
            return members.leave()
        with torch.no_grad():
            params[0].fill_(float("nan"))
        if name == 2:
            cut.append(name)
        with pytest.raises(NotFinite, match=r"1 synchronisations in a row were skipped: not finite are .* of 0, 1, 2"):
            go(params, optimizer, name)
        told.set()
        return name

    begin = time.monotonic()
    assert run_ranks([lambda n=n: rank(n) for n in range(4)]) == [0, 1, 2, None]
    assert time.monotonic() < begin + 20


@pytest.mark.parametrize("call", ["wait", "compare_set"])
def test_a_rank_that_has_not_been_told_of_a_view_that_it_is_in_goes_on_with_it(call, monkeypatch, caplog):
    """Neither when it has waited for that, nor when it has published it."""
    world, inner, lost = Rendezvous(), getattr(StoreClient, call), []

    def once(self, key, *args):
        out = inner(self, key, *args)
        told = key == "opened/2" if call == "wait" else args[1].startswith("2 open")
        if told and out and not lost:
            lost.append(key)
            raise StoreLost("no answer")
        return out

    monkeypatch.setattr(StoreClient, call, once)
    begin = time.monotonic()

    def rank(name):
        members, params, optimizer = averaging(world, name, ranks=3)
        return go(params, optimizer, name, 3), members.epoch, members.names

    assert run_ranks([lambda n=n: rank(n) for n in range(3)]) == [(6.0, 3, [0, 1, 2])] * 3
    assert lost
    assert "they meet again" not in caplog.text
    assert time.monotonic() < begin + 20  # and not their patience of 30 seconds


def test_no_member_waits_for_one_that_has_lost_the_store_while_it_gave_the_state(monkeypatch, caplog):
    world, late, inner, lost = Rendezvous(), threading.Event(), Members.ready, [StoreLost("no answer")]

    def ready(self):
        if lost:
            raise lost.pop()
        return inner(self)

    monkeypatch.setattr(Members, "ready", ready)

    def rank(name):
        members, params, optimizer = averaging(world, name, ranks=2, patience=1.0)
        late.set()
        until(lambda: members.roster.client.add("tickets", 0) == 3)
        go(params, optimizer, name)
        begin = time.monotonic()
        go(params, optimizer, name)
        assert time.monotonic() < begin + 10
        while len(members.names) < 3:
            view = members.roster.view
            if not view.joiners:
                until(lambda drawn=view.drawn: members.roster.client.add("tickets", 0) > drawn)
            go(params, optimizer, name)
        return numbers(params), members.names

    def joiner():
        late.wait(30)
        members, params, optimizer = averaging(world, 2, patience=1.0, timeout=1.5)
        go(params, optimizer, 2)
        return numbers(params), members.names

    found = run_ranks([lambda: rank(0), lambda: rank(1), joiner])
    assert found[0] == found[1] == found[2]
    assert found[0][1] == [0, 1, 2]
    assert "ranks that would join have not: no answer" in caplog.text


def test_a_run_begins_though_the_store_has_not_answered_that_a_rank_is_ready(monkeypatch):
    world, inner, lost = Rendezvous(), StoreClient.compare_set, set()

    def compare_set(self, key, expected, desired):
        out = inner(self, key, expected, desired)
        if desired.startswith("0 kept") and id(self) not in lost:
            lost.add(id(self))
            raise StoreLost("no answer")
        return out

    monkeypatch.setattr(StoreClient, "compare_set", compare_set)

    def rank(name):
        members, params, optimizer = averaging(world, name, ranks=3)
        return go(params, optimizer, name), members.names

    assert run_ranks([lambda n=n: rank(n) for n in range(3)]) == [(2.0, [0, 1, 2])] * 3
    assert lost


def test_who_waits_for_a_view_that_all_have_come_to_says_so(monkeypatch, caplog):
    """The last one may have been slow to publish it, as over a bad link to the store."""
    world, inner, slow = Rendezvous(), Roster.publish, [1.5]

    def publish(self):
        if slow:
            time.sleep(slow.pop())
        inner(self)

    monkeypatch.setattr(Roster, "publish", publish)

    def rank(name):
        _, params, optimizer = averaging(world, name, ranks=2, patience=1.0)
        return go(params, optimizer, name)

    assert run_ranks([lambda n=n: rank(n) for n in range(2)]) == [1.5] * 2
    assert "members: whoever came last has not told the others within 1 s" in caplog.text
    assert "nobody" not in caplog.text
