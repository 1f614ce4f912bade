"""When freeze_step="auto" ends the warm-up: the energies of windows from sums of the variance, and the rule on them."""

from __future__ import annotations

import gc
import math

import pytest
import torch
from torch import nn
from worlds import on_threads

from commopt import OneBitAdam, OneBitLamb, ZeroOneAdam
from commopt.optim import settling

LOOKS = [20, 40, 60, 80, 100, 125, 156, 195, 243, 303, 378]


def test_looks_are_a_quarter_of_all_steps_apart_and_twenty_at_least():
    assert [t for t in range(1, 400) if settling.is_look(t)] == LOOKS


def run(backend, sizes, steps, cls=OneBitAdam, lr=lambda t: 1e-3, **settings):
    """A run of two tensors whose gradients at step t have the elements ``sizes(t)``, with signs that differ between
    ranks; the optimizer and the steps after which "auto" was replaced or came back."""
    params = [nn.Parameter(torch.ones(8, dtype=torch.float64)) for _ in sizes(1)]
    optimizer = cls([{"params": [p]} for p in params], backend=backend, **settings)
    seen = []
    for t in range(1, steps + 1):
        for p, size in zip(params, sizes(t)):
            signs = torch.randint(0, 2, (8,), generator=torch.Generator().manual_seed(2 * t)) * 2.0 - 1
            noise = torch.randn(8, generator=torch.Generator().manual_seed(2 * t + backend.rank), dtype=torch.float64)
            p.grad = None if size is None else size * (signs + 0.01 * noise)
        for group in optimizer.param_groups:
            group["lr"] = lr(t)
        optimizer.step()
        decided = [group["freeze_step"] for group in optimizer.param_groups]
        if not seen or seen[-1][1] != decided:
            seen.append((t, decided))
    return optimizer, seen


def freezes_at(sizes, steps, **settings):
    """The step at which the last group freezes; None if one does not."""
    results = on_threads(2, lambda backend: run(backend, sizes, steps, **settings)[1])
    assert results[0] == results[1]
    return None if "auto" in results[0][-1][1] else max(results[0][-1][1])


@pytest.mark.parametrize("beta2", [0.9, 0.999])
def test_the_energy_of_a_window_is_the_weighted_mean_of_the_squares_in_it(beta2):
    """On lists, from the gradients themselves; one tensor lacks every third of them, and one the whole first window."""

    def sizes(t):
        return (1 + t % 7, None if t % 3 == 0 else 2.0**-t, None if t <= 20 else 1.0)

    def energies(backend):
        squares = [[], [], []]
        params = [nn.Parameter(torch.zeros(3, dtype=torch.float64)) for _ in range(3)]
        optimizer = OneBitAdam(params, betas=(0.9, beta2), freeze_step="auto", lr=1e-3, backend=backend)
        expected = {0: 0.0, 1: 0.0, 2: 0.0}
        for t in range(1, 41):
            for i, (p, size) in enumerate(zip(params, sizes(t))):
                p.grad = None if size is None else torch.tensor([size, 0.5 * size, -size], dtype=torch.float64)
                if size is not None:
                    squares[i].append(2.25 * size**2)
            optimizer.step()
            if t in LOOKS:
                for i, window in enumerate(squares):
                    weights = [beta2 ** (len(window) - 1 - j) for j in range(len(window))]
                    if window:
                        expected[i] = sum(w * s for w, s in zip(weights, window)) / sum(weights)
                    window.clear()
                found = [optimizer.state[p]["look_energy"].item() for p in params]
                # v is summed in float64, through its root; b2 = 0.999 forgets 2 % of it in a window: 50 times the rest
                assert found == pytest.approx(list(expected.values()), rel=1e-12)
        return True

    assert on_threads(2, energies) == [True, True]


@pytest.mark.parametrize("cls", [OneBitAdam, OneBitLamb])
@pytest.mark.parametrize("beta2", [0.95, 0.98, 0.999])
def test_steady_gradients_freeze_at_the_third_look_whatever_b2(cls, beta2):
    assert freezes_at(lambda t: (1.0, 0.1), 70, cls=cls, betas=(0.9, beta2)) == 60


def plateau(t):
    """As on a small BERT: the embedding's gradients fall and then stay; those of the queries fall with them to a
    thousandth, and grow a thousandfold in steps 100 to 160."""
    falling = math.exp(-min(t, 80) / 30)
    growing = math.exp(min(max(t - 100, 0), 60) / 60 * math.log(1000))
    return (0.3 + falling, 1e-3 * falling * growing)


@pytest.mark.long(but="0.98")
@pytest.mark.parametrize("beta2", [0.95, 0.98, 0.999])
def test_the_warm_up_outlasts_a_plateau_that_the_sum_of_the_variance_does_not_see(beta2):
    """||v||_1 does not change by 4 % after step 125, where the queries' has yet to grow a hundredfold."""
    at = freezes_at(plateau, 400, betas=(0.9, beta2))
    assert at is not None
    assert 160 < at <= 303


def test_the_calm_after_a_decline_must_last():
    """Steps 61 to 80 are as 41 to 60, but those were less than a third of the ones before."""
    at = freezes_at(lambda t: (1.0 if t <= 40 else 0.5, 1.0 if t <= 40 else 0.5), 130, betas=(0.9, 0.98))
    assert at == 100
    assert freezes_at(lambda t: (0.5 if t <= 40 else 1.0,) * 2, 130, betas=(0.9, 0.98)) == 80  # after growth at once


@pytest.mark.parametrize("rate", [1.02, 0.98])
def test_what_grows_or_shrinks_by_half_in_a_window_does_not_freeze(rate):
    assert freezes_at(lambda t: (1.0, rate**t), 160, betas=(0.9, 0.98)) is None


@pytest.mark.long(but="dtype0")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tensor_whose_gradients_have_become_zero_says_nothing(dtype):
    """What is left in its variance by rounding is no gradient; with None instead it is as long a warm-up."""

    def frozen(backend, dead):
        params = [nn.Parameter(torch.ones(6, 6, dtype=dtype)) for _ in range(4)]
        optimizer = OneBitAdam(params, 1e-3, betas=(0.9, 0.98), freeze_step="auto", backend=backend)
        draw = torch.Generator().manual_seed(backend.rank)
        for t in range(1, 131):
            for i, p in enumerate(params):
                p.grad = torch.randn(p.shape, generator=draw, dtype=dtype)
                if i == 0 and t >= 30:
                    p.grad = None if dead is None else torch.zeros_like(p)
            optimizer.step()
        return optimizer.param_groups[0]["freeze_step"]

    zeros, none = (on_threads(2, lambda backend, dead=dead: frozen(backend, dead)) for dead in (0.0, None))
    assert zeros == none == [60, 60]


def kind_of_next(optimizer):
    return optimizer.kind_of(optimizer.param_groups[0])


def table_optimizer(cls, parts, steps, before, backend, **settings):
    """An optimizer of a matrix and a table after ``steps``, before each of which ``before`` was called with it; of the
    table each step has one of ``parts`` equal parts."""
    dense, rows = nn.Parameter(torch.ones(6, 6)), nn.Parameter(torch.ones(40, 2))
    optimizer = cls([dense, rows], 1e-4, backend=backend, **settings)
    draw = torch.Generator().manual_seed(backend.rank)
    for t in range(steps):
        before(optimizer)
        dense.grad, rows.grad = torch.randn(6, 6, generator=draw), torch.zeros(40, 2)
        rows.grad[t % parts :: parts] = torch.randn(40 // parts, 2, generator=draw)
        optimizer.step()
    return optimizer


def table(backend, cls, parts, steps, freeze_step="auto"):
    """The step after which the warm-up of a matrix and a table ends."""
    settings = {"freeze_step": freeze_step, "backend": backend}
    return table_optimizer(cls, parts, steps, lambda optimizer: None, **settings).param_groups[0]["freeze_step"]


@pytest.mark.long(but="4-80-OneBitAdam")
@pytest.mark.parametrize("cls", [OneBitAdam, OneBitLamb])
@pytest.mark.parametrize(("parts", "at"), [(1, 60), (2, 60), (4, 80), (10, 243), (20, "auto")])
def test_rows_of_a_table_have_had_twenty_gradients_before_their_variance_stands(cls, parts, at):
    assert on_threads(2, lambda backend: table(backend, cls, parts, 250)) == [at] * 2


@pytest.mark.long(but="4-16-80")
@pytest.mark.parametrize(
    ("parts", "kappa", "exact"),
    [(1, 16, 16), (2, 16, 16), (4, 16, 80), (4, 100, 100), (10, 16, 208), (20, 16, 250)],
)
def test_zero_one_adam_refreshes_at_every_step_until_rows_have_had_twenty_gradients(parts, kappa, exact):
    """It looks after multiples of kappa; then the distances double."""

    def kinds(backend):
        seen = []
        with_stop = {"variance": {"kappa": kappa, "stop": 10_000}, "backend": backend}
        optimizer = table_optimizer(ZeroOneAdam, parts, 250, lambda o: seen.append(kind_of_next(o)), **with_stop)
        return seen, optimizer.param_groups[0]["rare_until"]

    (seen, until), other = on_threads(2, kinds)
    assert (seen, until) == other
    assert seen[: exact + 4] == (["exact"] * exact + ["compressed", "exact"] * 2)[:250]
    assert until == (exact - kappa if exact < 250 else 240)


def test_ranks_that_have_no_table_of_a_model_wait_for_its_rows_with_those_that_have():
    """Two replicas of a model in two parts, of which one is a table."""

    def kinds(backend):
        cut = backend.sharded(2)
        rows, seen = nn.Parameter(torch.ones(40, 2) if backend.rank % 2 else torch.ones(4)), []
        optimizer = ZeroOneAdam([rows], 1e-4, variance={"kappa": 16, "stop": 10_000}, backend=cut)
        draw = torch.Generator().manual_seed(backend.rank)
        for t in range(120):
            seen.append(kind_of_next(optimizer))
            rows.grad = torch.zeros_like(rows)
            part = slice(t % 4, None, 4) if backend.rank % 2 else slice(None)
            rows.grad[part] = torch.randn(rows.grad[part].shape, generator=draw)
            optimizer.step()
        return seen

    found = on_threads(4, kinds)
    assert found == found[:1] * 4
    assert found[0][:84] == ["exact"] * 80 + ["compressed", "exact"] * 2


def test_a_table_that_is_frozen_too_early_by_hand_is_named(caplog):
    on_threads(2, lambda backend: table(backend, OneBitAdam, 10, 62, freeze_step=60))
    assert caplog.text.count("1 parameters (a parameter of shape (40, 2)) have had fewer than 20 gradients") == 1
    caplog.clear()
    on_threads(2, lambda backend: table(backend, OneBitAdam, 2, 62, freeze_step=60))
    assert "fewer than 20 gradients" not in caplog.text


def test_an_lr_that_rises_keeps_the_warm_up_going():
    assert freezes_at(lambda t: (1.0,), 130, lr=lambda t: 1e-3 * min(1, t / 70)) == 100, "70 is after the look at 60"
    # a restart at step 50: lr is higher at 60 than at 40
    assert freezes_at(lambda t: (1.0,), 130, lr=lambda t: 1e-3 * (1.0 - (t % 50) / 60)) == 80


def test_groups_of_one_age_decide_together_and_a_late_one_by_itself():
    """One shrinks for ever: neither freezes."""
    assert freezes_at(lambda t: (1.0, 0.9**t), 130) is None

    def late(backend):
        p, q = (nn.Parameter(torch.ones(8)) for _ in range(2))
        optimizer = OneBitAdam([p], backend=backend)
        for t in range(100):
            if t == 30:
                optimizer.add_param_group({"params": [q]})
            p.grad, q.grad = torch.ones(8), torch.ones(8)
            optimizer.step()
        return [group["freeze_step"] for group in optimizer.param_groups]

    assert on_threads(2, late) == [[60, 60], [60, 60]]


def test_ranks_that_see_other_variances_decide_the_same():
    """The variance on rank 1 alone is made to grow twentyfold between two looks: neither rank freezes alone."""

    def differing(backend):
        p = nn.Parameter(torch.zeros(8))
        optimizer = OneBitAdam([p], betas=(0.9, 0.9), backend=backend)
        for t in range(1, 62):
            p.grad = torch.ones(8)
            optimizer.step()
            if backend.rank == 1:
                optimizer.state[p]["exp_avg_sq"].fill_(20.0 ** (t // 20))
        return optimizer.param_groups[0]["freeze_step"]

    assert on_threads(2, differing) == ["auto", "auto"]


@pytest.mark.parametrize("kappa", [16, 1000])
def test_zero_one_adam_stops_by_the_same_rule_and_its_local_steps_begin(kappa):
    """Be every step a refresh (kappa = 1000) or fewer: then E is that of the refreshes."""

    def run(backend):
        p = nn.Parameter(torch.ones(8, dtype=torch.float64))
        policies = {"variance": {"kappa": kappa, "stop": "auto"}, "sync": {"first": 4, "longest": 4}}
        optimizer = ZeroOneAdam([p], betas=(0.9, 0.98), backend=backend, **policies)
        kinds = []
        for t in range(1, 130):
            p.grad = torch.full_like(p, math.exp(-min(t, 30) / 10) * (1 + backend.rank))
            kinds.append(optimizer.kind_of(optimizer.param_groups[0]))
            optimizer.step()
        return optimizer.param_groups[0]["variance_stop"], kinds

    (stop, kinds), other = on_threads(2, run)
    assert (stop, kinds) == other
    assert stop == 100, "80 is calm, but up to 60 it was a decline"
    assert "local" not in kinds[:stop]
    assert kinds[stop : stop + 8] == ["local", "local", "local", "compressed"] * 2


@pytest.mark.parametrize(("betas2", "steps", "told"), [((0.9, 0.98), 49, 0), ((0.9, 0.98), 50, 1), ((0.9999,), 100, 1)])
def test_a_run_of_zero_one_adam_that_ends_before_a_variance_has_settled_says_so(betas2, steps, told, caplog):
    """If it was as long as the slowest of them remembers, or 100 steps."""

    def run(backend):
        params = [nn.Parameter(torch.ones(8, dtype=torch.float64)) for _ in betas2]
        groups = [{"params": [p], "betas": (0.9, beta2)} for p, beta2 in zip(params, betas2)]
        policies = {"variance": {"kappa": 1000, "stop": "auto"}, "sync": {"first": 4, "longest": 4}}
        optimizer = ZeroOneAdam(groups, backend=backend, **policies)
        for t in range(steps):
            for p in params:
                p.grad = torch.full_like(p, 1.1**t)
            optimizer.step()

    on_threads(2, run)
    gc.collect()
    assert caplog.text.count(f"the run ends after {steps} steps") == told


def test_a_model_without_gradients_does_not_freeze():
    assert freezes_at(lambda t: (None, None), 70) is None
    assert freezes_at(lambda t: (0.0, 0.0), 70) is None
