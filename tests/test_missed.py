"""0/1 Adam: a parameter that has its first gradients between two refreshes of the variance."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from worlds import on_threads, same_bits

from commopt import ZeroOneAdam
from commopt.optim import zero_one_adam
from commopt.optim.policies import VariancePolicy

KAPPA = 2
NEVER = [t for t in range(41, 200, 2) if not VariancePolicy(KAPPA, 10_000).refreshes(t)]
"""Steps at which a head has its turn, every second one from 41 on: T_v, 1, 2, 4, 6, 10, 14, ..., has none of them."""


class Run:
    """A body with a gradient in every step, and a head with one in the steps ``turns``, counted from 1; in ``groups``
    of their own, or in one, or without a body."""

    def __init__(self, backend, turns, stop=10_000, body=True):
        self.rank, self.turns, self.step = backend.rank, turns, 0
        self.body, self.head = (nn.Parameter(torch.full((4, 3), x)) for x in (1.0, 2.0))
        self.params = {"body": self.body, "head": self.head} if body else {"head": self.head}
        variance = {"kappa": KAPPA, "stop": stop}
        self.optimizer = ZeroOneAdam(self.params.items(), lr=1e-2, variance=variance, backend=backend)
        self.kinds = []

    def go_on(self, until):
        while self.step < until:
            self.step += 1
            for p in self.params.values():
                draw = torch.Generator().manual_seed(100 * self.step + self.rank)
                takes_part = p is self.body or self.step in self.turns
                p.grad = torch.randn(p.shape, generator=draw) + 1 if takes_part else None
            self.kinds.append(self.optimizer.kind_of(self.optimizer.param_groups[0]))
            self.optimizer.step()
        return self

    def moved(self):
        return not bool((self.head == 2.0).all())


def test_the_turns_of_the_head_are_never_those_of_the_variance():
    assert list(range(41, 200, 2)) == NEVER


def test_without_the_rule_it_never_moves(monkeypatch):
    monkeypatch.setattr(zero_one_adam, "_waiting", lambda bucket, group: [])
    assert on_threads(2, lambda backend: Run(backend, NEVER).go_on(199).moved()) == [False, False]


def test_refreshes_begin_anew_at_the_next_one_until_it_has_had_one():
    def run(backend):
        run = Run(backend, NEVER).go_on(120)
        return run.kinds, run.moved(), run.optimizer.param_groups[0]["rare_until"], run.head.detach()

    (kinds, moved, until, head), other = on_threads(2, run)
    assert same_bits([head], [other[3]])
    assert (kinds, moved, until) == other[:3]
    assert moved
    policy = VariancePolicy(KAPPA, 10_000)
    next_refresh = next(t for t in range(41, 200) if policy.refreshes(t))
    assert kinds[:next_refresh] == [
        "exact" if policy.refreshes(t) else "compressed" for t in range(1, next_refresh + 1)
    ]
    turn = next_refresh + 1  # at an odd step: the head's turn, in which it has its first refresh
    assert until == next_refresh
    assert kinds[turn - 1 : turn + 3] == ["exact", "exact", "compressed", "exact"]


def test_it_waits_no_longer_than_the_run_had_taken_until_then():
    """For a parameter that has had one gradient, and none after it."""

    def run(backend):
        run = Run(backend, [41]).go_on(140)
        return run.kinds, run.moved(), run.optimizer.param_groups[0]["rare_until"]

    for kinds, moved, until in on_threads(2, run):
        assert not moved
        assert until == 2 * 41 - 1
        assert set(kinds[until - 10 : until + KAPPA]) == {"exact"}
        assert kinds[until + KAPPA] == "compressed"


@pytest.mark.long(but="46")
@pytest.mark.parametrize("saved_after", [42, 43, 46, 47, 60])
def test_a_run_that_is_resumed_meanwhile_is_the_one_never_stopped(saved_after):
    def run(backend):
        run, other = Run(backend, NEVER).go_on(saved_after), Run(backend, NEVER)
        for name, p in other.params.items():
            p.data.copy_(run.params[name])
        other.optimizer.load_state_dict(run.optimizer.state_dict())
        other.step = saved_after
        run.go_on(100)
        other.go_on(100)
        assert run.kinds[saved_after:] == other.kinds
        return same_bits(list(run.params.values()), list(other.params.values()))

    assert on_threads(2, run) == [True, True]


def test_a_variance_does_not_stop_by_itself_meanwhile():
    def run(backend):
        run = Run(backend, [59], stop="auto")
        while run.step < 61:
            run.go_on(run.step + 1)
            if run.optimizer.param_groups[0]["variance_stop"] != "auto":
                return run.step
        return run.go_on(250).optimizer.param_groups[0]["variance_stop"]

    one, other = on_threads(2, run)
    assert one == other
    assert one == "auto" or one > 2 * 59


def test_ranks_that_hold_another_part_of_a_model_begin_anew_with_those_that_have_it():
    """Two replicas of a model in two parts, of which one is the head."""

    def run(backend):
        is_head = backend.rank % 2 == 1
        cut = Run(backend.sharded(2), NEVER if is_head else range(1000), body=not is_head)
        if not is_head:
            cut.head.requires_grad_(False)
        cut.go_on(120)
        return cut.kinds, cut.moved()

    found = on_threads(4, run)
    assert [kinds for kinds, _ in found] == [found[0][0]] * 4
    assert [moved for _, moved in found[1::2]] == [True, True]


def test_what_counts_is_the_first_of_several_gradients_between_two_refreshes():
    """Refreshes at steps 1, 3 and 7; gradients of the second parameter at 4, 5 and 6."""

    def run(backend):
        params = [nn.Parameter(torch.zeros(16)) for _ in range(2)]
        optimizer = ZeroOneAdam(params, variance=VariancePolicy(kappa=1), backend=backend)
        for step in range(1, 7):
            params[0].grad = torch.ones(16)
            params[1].grad = torch.ones(16) if step >= 4 else None
            optimizer.step()
        return float(optimizer.state[params[1]]["missed_at"])

    assert on_threads(2, run) == [4.0, 4.0]
