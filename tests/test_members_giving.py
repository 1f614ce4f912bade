"""A state that takes long to give: what it costs the members, and whom."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from member_world import Rendezvous, averaging, go, run_ranks, until
from torch import nn

from commopt.comm import given_up
from commopt.outer import LeftOut, joining


@pytest.fixture(autouse=True)
def _look_often(monkeypatch):
    monkeypatch.setattr(given_up, "LOOK", 0.05)


def slowly(monkeypatch, seconds):
    """Each tensor of a state takes so long."""
    inner = joining.wait

    def wait(work, where):
        inner(work, where)
        time.sleep(seconds)

    monkeypatch.setattr(joining, "wait", wait)


def many_params():
    return [nn.Parameter(torch.zeros(3, dtype=torch.float64)) for _ in range(10)]


def test_a_state_that_takes_longer_than_timeout_is_given_up_and_costs_no_member_its_round(monkeypatch, caplog):
    """Though each of its tensors is there in time."""
    slowly(monkeypatch, 0.3)
    monkeypatch.setattr(joining, "ATTEMPTS", 2)
    world, late, over = Rendezvous(), threading.Event(), threading.Event()

    def rank(name):
        members, params, optimizer = averaging(world, name, many_params(), ranks=3, patience=1.0, timeout=1.5)
        late.set()
        until(lambda: members.roster.client.add("tickets", 0) == 4)
        for _ in range(2):
            drawn = members.roster.client.add("tickets", 0)
            go(params, optimizer, name)
            assert members.roster.view.joiners
            until(lambda drawn=drawn: over.is_set() or members.roster.client.add("tickets", 0) > drawn)
        return go(params, optimizer, name), members.names

    def joiner():
        late.wait(30)
        with pytest.raises(LeftOut, match=r"2 times, .* if that takes longer than 1\.5 s, give all members a longer"):
            averaging(world, 3, many_params(), timeout=1.5)
        over.set()

    *found, _ = run_ranks([*(lambda n=n: rank(n) for n in range(3)), joiner])
    assert found == [(pytest.approx(6.0), [0, 1, 2])] * 3
    assert "a rank that would join has not: state for a rank that joins: it takes longer than timeout=" in caplog.text


@pytest.mark.parametrize("longer", ["round", "giving"])
def test_the_others_wait_for_those_that_begin_a_round_later_as_a_state_was_given(longer, monkeypatch, caplog):
    """Longer than their patience: whatever of a round, and of the giving before it, is the longer one."""
    slowly(monkeypatch, 0.15 if longer == "round" else 0.3)
    local_steps = 4.0 if longer == "round" else 2.0
    world, late = Rendezvous(), threading.Event()

    def rank(name):
        members, params, optimizer = averaging(world, name, many_params(), ranks=3, patience=1.0, timeout=30.0)
        late.set()
        until(lambda: members.roster.client.add("tickets", 0) == 4)
        go(params, optimizer, name)
        time.sleep(local_steps)
        return go(params, optimizer, name), members.names

    def joiner():
        late.wait(30)
        members, params, optimizer = averaging(world, 3, many_params(), patience=1.0, timeout=30.0)
        time.sleep(local_steps)
        return go(params, optimizer, 3), members.names

    found = run_ranks([*(lambda n=n: rank(n) for n in range(3)), joiner])
    assert found == [(pytest.approx(2.0 + 2.5), [0, 1, 2, 3])] * 4
    assert "did not come within" not in caplog.text
