"""Elements that get gradients only after their variance was frozen: a word, or back to where it moves."""

from __future__ import annotations

import itertools
import logging

import pytest
import torch
from torch import nn
from worlds import on_threads, same_bits, tensors_in, through_a_file

from commopt import OneBitAdam, OneBitLamb, ZeroOneAdam
from commopt.compress import Int4, Int8
from commopt.optim import VariancePolicy, join_state_dict, split_state_dict, unmoved

ROWS, LATE, FROZEN = 40, 30, 20
"""Rows of a table; those of them from LATE on have gradients in the steps of a test; the step that a user names."""


def make(backend, cls=OneBitAdam, stop=None, **settings):
    """A table, of which "auto" freezes the variance at step 60, and a vector."""
    draw = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(n, generator=draw)) for n in ((ROWS, 8), (64,))]
    if stop is not None:
        stands = {"variance": VariancePolicy(4, stop)} if cls is ZeroOneAdam else {"freeze_step": stop}
        settings = {**stands, **settings}
    elif cls is ZeroOneAdam:
        settings = {"variance": VariancePolicy(4, "auto"), **settings}
    named = [("table", params[0]), ("vector", params[1])]
    return params, cls(named, lr=1e-3, betas=(0.9, 0.95), backend=backend, **settings)


def steps(params, optimizer, backend, which, late, ranks=(0, 1), rows=ROWS, size=1.0):
    """Noise, in the first rows of the table at all steps and in the others, up to ``rows``, at the steps ``late`` on
    ``ranks``."""
    for t in which:
        draw = torch.Generator().manual_seed(100 * t + backend.rank)
        table, vector = (torch.randn(p.shape, generator=draw) for p in params)
        table[rows if t in late and backend.rank in ranks else LATE :] = 0
        params[0].grad, params[1].grad = table, vector * size
        optimizer.step()


def stands_since(optimizer):
    key = "variance_stop" if isinstance(optimizer, ZeroOneAdam) else "freeze_step"
    return optimizer.param_groups[0][key]


@pytest.mark.parametrize("cls", [OneBitAdam, OneBitLamb, ZeroOneAdam])
@pytest.mark.parametrize("ranks", [(0, 1), (1,)], ids=["all ranks", "one rank"])
def test_what_auto_has_frozen_goes_back_for_rows_that_come_later_and_they_move(cls, ranks, caplog):
    def run(backend):
        params, optimizer = make(backend, cls)
        steps(params, optimizer, backend, range(1, 101), ())
        frozen, before = stands_since(optimizer), params[0].detach()[LATE:].clone()
        steps(params, optimizer, backend, range(101, 115), range(101, 200), ranks)
        still = stands_since(optimizer), bool((params[0][LATE:] == before).all())
        steps(params, optimizer, backend, range(115, 130), range(101, 200), ranks)
        group = optimizer.param_groups[0]
        return (
            frozen,
            still,
            (group["thawed"], group["thaws"], group["watch_unmoved"]),
            params[0].detach()[LATE:] - before,
        )

    with caplog.at_level(logging.WARNING):
        (a, *firsts), (b, *seconds) = on_threads(2, run)
    assert a == b
    assert isinstance(a, int)
    assert firsts[0] == seconds[0] == (a, True)
    assert firsts[1] == seconds[1] == (115, 0, 0)  # looks after steps 105, 110, 115; and it is not counted
    assert same_bits([firsts[2]], [seconds[2]])
    assert (firsts[2].abs().amax(dim=1) > 1e-3).all()
    told = [r.getMessage() for r in caplog.records if "have gradients now" in r.getMessage()]
    assert len(told) == 1
    assert "of 1 parameters (table)" in told[0]  # whichever rank has found it
    assert f"frozen (step {a})" in told[0]


@pytest.mark.parametrize("cls", [OneBitAdam, OneBitLamb, ZeroOneAdam])
def test_a_number_of_the_user_stands_and_a_warning_names_them_once(cls, caplog):
    def run(backend):
        params, optimizer = make(backend, cls, FROZEN)
        steps(params, optimizer, backend, range(1, 41), ())
        before = params[0].detach()[LATE:].clone()
        steps(params, optimizer, backend, range(41, 101), range(41, 200))
        assert stands_since(optimizer) == FROZEN
        assert same_bits([params[0].detach()[LATE:]], [before])

    with caplog.at_level(logging.WARNING):
        on_threads(2, run)
    told = [r.getMessage() for r in caplog.records if "have gradients now" in r.getMessage()]
    assert len(told) == 1
    assert "of 1 parameters (table)" in told[0]
    assert "nothing moves them" in told[0]


@pytest.mark.parametrize("thaw", ["auto", "never"])
def test_what_cannot_go_back_brings_nobody_else_back(thaw, caplog):
    def run(backend):
        draw = torch.Generator().manual_seed(0)
        params = [nn.Parameter(torch.randn(n, generator=draw)) for n in ((ROWS, 8), (64,))]
        groups = [{"params": params[:1], "freeze_step": FROZEN, "thaw": thaw}, {"params": params[1:]}]
        optimizer = OneBitAdam(groups, lr=1e-3, betas=(0.9, 0.95), backend=backend)
        steps(params, optimizer, backend, range(1, 131), range(81, 200))
        return [group["thawed"] for group in optimizer.param_groups]

    with caplog.at_level(logging.WARNING):
        assert on_threads(2, run) == [[0, 0]] * 2
    told = [r.getMessage() for r in caplog.records if "have gradients now" in r.getMessage()]
    assert len(told) == 1
    assert "nothing moves them" in told[0]


def test_always_goes_back_from_a_number_too_and_never_from_none():
    def run(backend, when, stop):
        params, optimizer = make(backend, stop=stop, thaw=when)
        steps(params, optimizer, backend, range(1, 131), range(81, 200))
        return optimizer.param_groups[0]["thawed"]

    assert on_threads(2, lambda backend: run(backend, "always", FROZEN)) == [95, 95]
    assert on_threads(2, lambda backend: run(backend, "never", None)) == [0, 0]


@pytest.mark.parametrize(
    ("late", "rows"),
    [(range(101, 111), ROWS), (sorted({*range(101, 131)} - {110, 125}), ROWS), (range(101, 131), LATE + 3), ((), ROWS)],
    ids=["two looks", "not in a row", "few", "none"],
)
def test_less_than_that_lets_it_stand(late, rows, caplog):
    def run(backend):
        params, optimizer = make(backend)
        steps(params, optimizer, backend, range(1, 131), late, rows=rows)
        return optimizer.param_groups[0]["thawed"]

    with caplog.at_level(logging.WARNING):
        assert on_threads(2, run) == [0, 0]
    assert not [r for r in caplog.records if "have gradients now" in r.getMessage()]


def test_growth_is_told_of_beside_it(caplog):
    def run(backend):
        params, optimizer = make(backend, stop=FROZEN)
        steps(params, optimizer, backend, range(1, 61), range(31, 200))
        steps(params, optimizer, backend, range(61, 101), range(31, 200), size=30.0)

    with caplog.at_level(logging.WARNING):
        on_threads(2, run)
    assert [r for r in caplog.records if "have gradients now" in r.getMessage()]
    assert [r for r in caplog.records if "gradients have grown so much" in r.getMessage()]


@pytest.mark.parametrize("alone", [False, True])
def test_a_whole_parameter_that_comes_later_brings_all_back_and_moves(alone, caplog):
    def run(backend):
        params, optimizer = make(backend)
        params[1].requires_grad_(False)
        for t in range(1, 131):
            params[1].requires_grad_(t > 100)
            draw = torch.Generator().manual_seed(100 * t + backend.rank)
            other = torch.randn(params[0].shape, generator=draw)
            params[0].grad = None if alone and t > 100 else other
            params[1].grad = torch.randn(params[1].shape, generator=draw) if t > 100 else None
            optimizer.step()
            if t == 101:
                before = params[1].detach().clone()
        return optimizer.param_groups[0]["thawed"], float((params[1].detach() - before).abs().max())

    with caplog.at_level(logging.WARNING):
        (a, moved), (b, _) = on_threads(2, run)
    assert a == b == 115
    assert moved > 1e-3
    assert [r for r in caplog.records if "they will not move until all ranks go back" in r.getMessage()]


@pytest.mark.parametrize("half", [104, 112, 118])
def test_a_resumed_run_goes_back_as_one_never_stopped(half):
    def straight(backend):
        params, optimizer = make(backend)
        steps(params, optimizer, backend, range(1, half), range(101, 200))
        saved = through_a_file([[p.detach() for p in params], *split_state_dict(optimizer.state_dict())])
        steps(params, optimizer, backend, range(half, 130), range(101, 200))
        return saved, [*params, *tensors_in(optimizer.state_dict())]

    results = on_threads(2, straight)

    def resumed(backend):
        (weights, replicated, _), _ = results[backend.rank]
        params, optimizer = make(backend)
        with torch.no_grad():
            for p, w in zip(params, weights):
                p.copy_(w)
        parts = [saved[2] for saved, _ in results]
        optimizer.load_state_dict(join_state_dict(replicated, parts, backend.rank, 2))
        steps(params, optimizer, backend, range(half, 130), range(101, 200))
        return [*params, *tensors_in(optimizer.state_dict())]

    for a, (_, b) in zip(on_threads(2, resumed), results):
        assert same_bits(a, b)


def test_gradients_that_cancel_among_ranks_bring_all_back_once(caplog):
    def run(backend):
        params, optimizer = make(backend)
        for t in range(1, 401):
            draw = torch.Generator().manual_seed(100 * t + backend.rank)
            table, vector = (torch.randn(p.shape, generator=draw) for p in params)
            table[LATE:] = 1.0 - 2 * backend.rank
            params[0].grad, params[1].grad = table, vector
            optimizer.step()
        group = optimizer.param_groups[0]
        return group["late"], group["watch_unmoved"], optimizer.phase

    with caplog.at_level(logging.WARNING):
        assert on_threads(2, run) == [(1, unmoved.NOT_HELPED, "compressed")] * 2
    given_up = [r.getMessage() for r in caplog.records if "still have gradients" in r.getMessage()]
    assert len(given_up) == 1
    assert "of 1 parameters (table)" in given_up[0]
    assert len([r for r in caplog.records if "have gradients now" in r.getMessage()]) == 1


@pytest.mark.parametrize("most", [1, 2])
def test_rows_that_come_later_still_bring_all_back_again_but_not_for_ever(most, monkeypatch, caplog):
    monkeypatch.setattr(unmoved, "TIMES", most)

    def run(backend):
        params, optimizer = make(backend)
        steps(params, optimizer, backend, range(1, 101), ())
        steps(params, optimizer, backend, range(101, 251), range(101, 999), rows=35)
        before = params[0].detach()[35:].clone()
        steps(params, optimizer, backend, range(251, 301), range(251, 999))
        return optimizer.param_groups[0]["late"], bool((params[0][35:] != before).all())

    with caplog.at_level(logging.WARNING):
        assert on_threads(2, run) == [(most, most == 2)] * 2
    assert len([r for r in caplog.records if "nothing moves them" in r.getMessage()]) == 2 - most


@pytest.mark.parametrize(
    ("cls", "compressor", "small"),
    [
        *itertools.product((OneBitAdam, OneBitLamb), (Int8(), Int4()), (1e-7,)),
        (ZeroOneAdam, Int8(), 1e-3),  # which error feedback would add up, and its refreshes do not
        (ZeroOneAdam, Int4(), 1e-2),
    ],
    ids=str,
)
def test_what_a_compressed_warm_up_never_sends_brings_nobody_back(cls, compressor, small, caplog):
    """Such as the biases of keys, whose gradients are rounding alone, beside those of queries and values."""

    def run(backend, size):
        draw = torch.Generator().manual_seed(0)
        params = [nn.Parameter(torch.randn(n, generator=draw)) for n in ((ROWS, 8), (96,))]
        sent_by = {"warmup_compressor": compressor}
        if cls is ZeroOneAdam:
            sent_by = {"refresh_compressor": compressor, "variance": VariancePolicy(stop="auto")}
        settings = {"lr": 1e-3, "betas": (0.9, 0.95), "backend": backend, **sent_by}
        optimizer = cls([("table", params[0]), ("bias", params[1])], **settings)
        for t in range(1, 301):
            draw = torch.Generator().manual_seed(100 * t + backend.rank)
            for p in params:
                p.grad = torch.randn(p.shape, generator=draw)
            params[1].grad[32:64] *= size if t < 200 else 1.0
            optimizer.step()
        group = optimizer.param_groups[0]
        return group["late"], group["thawed"], bool((optimizer.state[params[1]]["exp_avg_sq"][32:64] == 0).any())

    with caplog.at_level(logging.WARNING):
        (late, thawed, zeros), other = on_threads(2, lambda backend: run(backend, small))
    assert (late, zeros) == (1, False)  # at step 200 they become as large as others
    assert 200 < thawed <= 215
    assert other == (late, thawed, zeros)
    assert len([r for r in caplog.records if "of 1 parameters (bias) have gradients now" in r.getMessage()]) == 1


@pytest.mark.parametrize(("compressor", "size"), [(Int8(), 0.01), (Int4(), 0.1)], ids=str)
def test_small_rows_that_come_later_bring_all_back_to_a_compressed_warm_up_that_sends_them_in_time(compressor, size):
    def run(backend):
        params, optimizer = make(backend, warmup_compressor=compressor)
        for t in range(1, 301):
            draw = torch.Generator().manual_seed(100 * t + backend.rank)
            table, vector = (torch.randn(p.shape, generator=draw) for p in params)
            table[LATE:] *= size if t > 100 else 0
            params[0].grad, params[1].grad = table, vector
            optimizer.step()
        return optimizer.param_groups[0]["late"], float((optimizer.state[params[0]]["exp_avg_sq"][LATE:] > 0).sum())

    (late, moved), other = on_threads(2, run)
    assert other == (late, moved)
    assert late == 1
    assert moved > 0.9 * 8 * (ROWS - LATE)


def test_gradients_whose_squares_are_nothing_are_none():
    def run(backend):
        params, optimizer = make(backend, stop=FROZEN)
        steps(params, optimizer, backend, range(1, 31), ())
        bucket, found = optimizer.buckets[0], []
        where = [p is params[0] for p in bucket.params].index(True)
        for size, scale in ((1e-20, 1.0), (1e-10, 1.0), (1e-10, 1e-8)):
            params[0].grad[LATE:] = size
            found.append(len(unmoved.enough(unmoved.unmoved(bucket, [where], scale, True))))
        assert found == [0, 1, 0]

    on_threads(2, run)
