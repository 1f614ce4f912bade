"""Members, some of whose parameters are frozen or trained again while ranks come and go."""

from __future__ import annotations

import threading

import pytest
import torch
from member_world import Died, Rendezvous, averaging, go, run_ranks, until
from torch import nn

from commopt.comm import given_up


@pytest.fixture(autouse=True)
def _look_often(monkeypatch):
    monkeypatch.setattr(given_up, "LOOK", 0.05)


def two_params(fill: float = 0.0) -> list[nn.Parameter]:
    return [nn.Parameter(torch.full((3,), fill, dtype=torch.float64)) for _ in range(2)]


@pytest.mark.parametrize("joins", [True, False])
def test_a_parameter_that_was_frozen_later_is_the_same_on_all_when_members_change(joins):
    """The one that joins has a bucket for it, too; those that stay average what each had learnt of it."""
    world, frozen = Rendezvous(), threading.Event()

    def rank(name):
        members, params, optimizer = averaging(world, name, two_params(), ranks=3, patience=1.0)
        go(params, optimizer, name)
        params[1].grad = None
        if joins:
            params[1].requires_grad_(False)
            frozen.set()
            until(lambda: members.roster.client.add("tickets", 0) == 4)
            go(params[:1], optimizer, name, 2)
            return params[1].tolist(), members.names
        for group in optimizer.param_groups:
            group["period"] = 2
        go(params, optimizer, name)  # in the middle of a round
        params[1].requires_grad_(False)
        params[1].grad = None
        if name == 2:
            raise Died
        go(params[:1], optimizer, name, 3)
        return params[1].tolist(), members.names

    def joiner():
        frozen.wait(30)
        params = two_params(7.0)
        params[1].requires_grad_(False)
        members, params, optimizer = averaging(world, 3, params)
        go(params[:1], optimizer, 3, 3 - optimizer.param_groups[0]["rounds"])
        return params[1].tolist(), members.names

    found = run_ranks([*(lambda n=n: rank(n) for n in range(3)), *([joiner] if joins else [])])
    names, at = ([0, 1, 2, 3], 2.0) if joins else ([0, 1], 2.0 + (1 + 2) / 2)
    assert [each for each in found if each is not None] == [([at] * 3, names)] * len(names)


def test_what_one_rank_alone_has_frozen_is_averaged_with_itself_when_members_change():
    world, sizes = Rendezvous(), (3, 5)

    def rank(name):
        params = [nn.Parameter(torch.zeros(n, dtype=torch.float64)) for n in sizes]
        _, params, optimizer = averaging(world, name, params, ranks=3, patience=1.0)
        go(params, optimizer, name)
        if name == 2:
            raise Died
        if name == 0:
            params[0].grad = None
            params[0].requires_grad_(False)
        go(params[1:] if name == 0 else params, optimizer, name, 2)
        return [p.tolist() for p in params]

    first, second, died = run_ranks([lambda n=n: rank(n) for n in range(3)])
    assert first == second == [[2.0 + 2 * (0 + 2) / 2] * 3, [2.0 + 2 * (1 + 2) / 2] * 5]
    assert died is None


@pytest.mark.parametrize("way", ["frozen", "trained again"])
def test_a_rank_that_was_left_out_meanwhile_joins_anew_and_has_frozen_what_the_others_have(way):
    """Before it trains another set of parameters than they."""
    world, left_out = Rendezvous(), threading.Event()

    def begin(name):
        params = two_params()
        params[1].requires_grad_(way == "frozen")
        return averaging(world, name, params, ranks=3, patience=1.0, join_timeout=20.0)

    def trained(params):
        for p in params:
            p.grad = None
        return [p for p in params if p.requires_grad]

    def others(name):
        members, params, optimizer = begin(name)
        go(trained(params), optimizer, name)
        params[1].requires_grad_(way != "frozen")
        go(trained(params), optimizer, name)
        if name == 0:
            left_out.set()
        until(lambda: members.roster.client.add("tickets", 0) == 4)
        go(trained(params), optimizer, name)
        go(trained(params), optimizer, name)
        return [p.tolist() for p in params], members.names

    def late():
        members, params, optimizer = begin(2)
        go(trained(params), optimizer, 2)
        left_out.wait(20)
        go(trained(params), optimizer, 2)
        assert params[1].requires_grad == (way != "frozen")
        assert optimizer.param_groups[0]["rounds"] == 3
        go(trained(params), optimizer, 2)
        return [p.tolist() for p in params], members.names

    found = run_ranks([lambda: others(0), lambda: others(1), late])
    assert found[0] == found[1] == found[2]
    second = 2.0 if way == "frozen" else 1.5 + 1.5 + 2.0
    assert found[0] == ([[2.0 + 1.5 + 1.5 + 2.0] * 3, [second] * 3], [0, 1, 2])


def test_a_member_that_unfreezes_later_than_the_others_is_refused_and_they_go_on():
    """Its buckets have others in them, of which their sizes say nothing."""
    world = Rendezvous()

    def rank(name):
        params = two_params()
        params[1].requires_grad_(False)
        members, params, optimizer = averaging(world, name, params, ranks=3, patience=1.0)
        for step in range(3):
            params[1].requires_grad_(step >= (2 if name == 2 else 1))
            if step == 1 and name == 2:
                with pytest.raises(RuntimeError, match="it trains, or has trained, other parameters than most others"):
                    go([p for p in params if p.requires_grad], optimizer, name)
                return None
            go([p for p in params if p.requires_grad], optimizer, name)
        return [p[0].item() for p in params], members.names

    both, other, nothing = run_ranks([lambda n=n: rank(n) for n in range(3)])
    assert nothing is None
    assert both == other
    assert both[1] == [0, 1]
