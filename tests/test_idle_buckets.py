"""Buckets of which no parameter has a gradient on any rank are not sent, and nothing else changes by that."""

from __future__ import annotations

import math

import pytest
import torch
from every import make
from given import Given
from torch import nn
from worlds import all_tensors, on_threads, same_bits, some_grads, tensors_in

import commopt
from commopt.compress import ACP, Int4, PowerSGD, Sign, TopBlocks, TopK
from commopt.optim import VariancePolicy, settling
from commopt.state.state_bucket import StateBucket

SIZES = [(64, 3), (40,), (300,), (17, 5), (130,), (2, 50)]
NAMES = [
    "OneBitAdam", "OneBitLamb", "OneBitLion", "ZeroOneAdam",
    "OneBitAdam warming up", "OneBitAdam warming up by 4 bits",
]  # fmt: skip


def present(step: int) -> set[int]:
    """Indices of the parameters that have a gradient: all at first; then one bucket of several, and then others, rests,
    in whole or in part."""
    return {0: {*range(6)}, 1: {0, 1, 2}, 2: {3}, 3: {*range(6)}, 4: set(), 5: {0, 5}}[step // 2 % 6]


def step_by_step(optimizer, params: list[nn.Parameter], rank: int, steps: int) -> list[int]:
    """Bytes of each step."""
    sent = []
    for step in range(steps):
        for i, (p, g) in enumerate(zip(params, some_grads(SIZES, step, rank))):
            p.grad = g.to(p.dtype) if i in present(step) else None
        optimizer.step()
        sent.append(optimizer.comm_stats()["step"]["bytes"])
    return sent


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(size, generator=generator)) for size in SIZES]


@pytest.mark.parametrize("ranks_per_node", [1, 2])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_what_rests_is_as_if_it_had_been_sent(name, overlap, ranks_per_node):
    def run(backend):
        ranks = backend if ranks_per_node == 1 else backend.nodes(ranks_per_node)
        runs = []
        for sends_all in (False, True):
            params = parameters()
            optimizer = make(name, params, overlap=overlap, bucket_mb=2e-3, backend=ranks)
            assert len(optimizer.buckets) > 2
            if sends_all:
                optimizer.touches_absent = lambda group: True
            sent = step_by_step(optimizer, params, backend.rank, 15)
            runs.append((params, tensors_in(optimizer.state_dict()), sent))
        (rested, state, sent), (moved, other, all_sent) = runs
        assert same_bits(rested, moved)
        assert same_bits(state, other)
        assert all(less <= more for less, more in zip(sent, all_sent))
        assert sum(sent) < sum(all_sent)

    on_threads(2 * ranks_per_node, run)


@pytest.mark.parametrize("scaling", ["tensor", "element"])
def test_what_rests_while_a_variance_moves_again_has_new_coefficients_when_that_stands(scaling):
    """After each step, as a state may be saved there."""

    def run(backend):
        runs = []
        for sends_all in (False, True):
            params = parameters()
            optimizer = make("OneBitLamb", params, scaling=scaling, bucket_mb=1e-3, backend=backend)
            if sends_all:
                optimizer.touches_absent = lambda group: True
            states = []
            for step in range(12):
                if step == 5:
                    optimizer.param_groups[0]["freeze_step"] = 8
                for i, (p, g) in enumerate(zip(params, some_grads(SIZES, step, backend.rank))):
                    p.grad = None if 5 <= step < 10 and i > 3 else g.to(p.dtype) * (1 + step)
                optimizer.step()
                states.append(tensors_in(optimizer.state_dict()))
            runs.append((params, states))
        (rested, states), (moved, others) = runs
        assert same_bits(rested, moved)
        assert all(map(same_bits, states, others))
        assert not same_bits(states[4], states[9])

    on_threads(2, run)


@pytest.mark.parametrize("name", ["OneBitAdam", "OneBitLamb", "OneBitLion", "ZeroOneAdam"])
def test_a_bucket_of_empty_parameters_starts_alike_on_all_ranks(name):
    """It waits for no gradient: one rank starts it in backward, another after the ranks have agreed."""

    def run(backend):
        params, empty = parameters(), nn.Parameter(torch.zeros(0, 3))
        groups = [{"params": params}, {"params": [empty]}]
        optimizer = make(name, groups, overlap=True, bucket_mb=1e-3, backend=backend)
        assert [p.numel() for p in optimizer.buckets[-1].params] == [0]
        for step in range(8):
            optimizer.zero_grad()
            here = params if backend.rank == 0 or step % 2 else params[1:]
            sum((p * (1 + step + backend.rank)).sum() for p in here).backward()
            optimizer.step()
        return params

    first, second = on_threads(2, run, timeout=20)
    assert same_bits(first, second)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", ["OneBitAdam", "OneBitLamb", "OneBitLion"])
def test_a_compressed_step_sends_the_buckets_that_have_gradients_and_no_others(name, overlap):
    def run(backend):
        params = parameters()
        optimizer = make(name, params, overlap=overlap, bucket_mb=2e-3, backend=backend)

        def sent(*buckets) -> int:
            chosen = {id(p) for bucket in buckets for p in bucket.params}
            for p, g in zip(params, some_grads(SIZES, 1, backend.rank)):
                p.grad = g.to(p.dtype) if id(p) in chosen else None
            optimizer.step()
            return optimizer.comm_stats()["step"]["by_collective"].get("all_to_all", {"bytes": 0})["bytes"]

        for _ in range(3):
            sent(*optimizer.buckets)
        alone = [sent(bucket) for bucket in optimizer.buckets]
        assert len(alone) > 2
        assert min(alone) > sent() == 0
        assert sum(alone) == sent(*optimizer.buckets)

    on_threads(2, run)


METHODS = [Sign(16), Int4(16), TopK(4, 64), TopBlocks(0.5, 16), PowerSGD(1), ACP(1)]


@pytest.mark.parametrize("ranks_per_node", [1, 2])
@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_means_of_what_rests_are_as_if_they_had_been_sent(method, feedback, ranks_per_node, monkeypatch):
    def run(backend):
        ranks = backend if ranks_per_node == 1 else backend.nodes(ranks_per_node)
        model = Given(SIZES)
        handle = commopt.compress_gradients(model, method, feedback=feedback, bucket_mb=2e-3, backend=ranks)
        assert len(handle.mean.buckets) > 2
        means, sent = [], []
        for step in range(14):
            if not present(step):  # a backward has a gradient at least
                continue
            grads = some_grads(SIZES, step, backend.rank)
            model.backward([g if i in present(step) else None for i, g in enumerate(grads)])
            means += model.take()
            sent.append(handle.comm_stats()["step"]["bytes"])
        return means, all_tensors(handle.state_dict()), sent

    rested = on_threads(2 * ranks_per_node, run)
    monkeypatch.setattr(StateBucket, "rests", lambda *_: False)
    for (means, state, sent), (others, theirs, all_sent) in zip(rested, on_threads(2 * ranks_per_node, run)):
        assert [m is None for m in means] == [m is None for m in others]
        assert same_bits([m for m in means if m is not None], [m for m in others if m is not None])
        assert same_bits(state, theirs)
        assert sum(sent) < sum(all_sent)


def test_means_of_a_bucket_of_empty_parameters_are_begun_alike_on_all_ranks():
    """It waits for no gradient: one rank starts it in backward, another when it knows which gradients there are."""

    def run(backend):
        model = nn.ParameterList([*parameters()[:2], torch.zeros(0, 3, dtype=torch.float64)])
        handle = commopt.compress_gradients(model, Sign(), bucket_mb=1e-4, backend=backend)
        assert [[p.numel() for p in bucket.params] for bucket in handle.mean.buckets] == [[40], [0], [192]]
        gradients = []
        for step in range(4):
            model.zero_grad()
            here = model[:2] if backend.rank == 0 or step % 2 else model[:1]
            sum((p * (1 + step + backend.rank)).sum() for p in here).backward()
            gradients += [p.grad for p in model[:2]]
        return gradients

    first, second = on_threads(2, run, timeout=20)
    assert same_bits(first, second)


@pytest.mark.parametrize("name", ["OneBitAdam", "OneBitLamb", "ZeroOneAdam"])
def test_a_step_that_is_skipped_though_it_has_begun_in_backward_leaves_what_rests_alone(name):
    """The first one in which a variance that stands is raised."""

    def run(backend):
        params = parameters()
        optimizer = make(name, params, overlap=True, bucket_mb=1e-3, backend=backend)
        for _ in range(3 if name == "ZeroOneAdam" else 2):
            for p, g in zip(params, some_grads(SIZES, 1, backend.rank)):
                p.grad = g.to(p.dtype)
            optimizer.step()
        optimizer.zero_grad()
        before = [t.clone() for bucket in optimizer.buckets for t in bucket.buffers.values()]
        params[0].grad = torch.full_like(params[0], math.nan)
        optimizer.step()
        assert optimizer.skipped_steps == 1
        assert same_bits(before, [t for bucket in optimizer.buckets for t in bucket.buffers.values()])

    on_threads(2, run)


def test_a_variance_that_is_refreshed_stays_where_it_rests():
    def run(backend):
        params = parameters()
        optimizer = make("ZeroOneAdam", params, variance=VariancePolicy(9, 9), bucket_mb=1e-3, backend=backend)
        for chosen in (params, params, params[:1]):
            before = [optimizer.state[p]["exp_avg_sq"].clone() for p in params[1:]]
            for p, g in zip(params, some_grads(SIZES, 1, backend.rank)):
                p.grad = g.to(p.dtype) if p is params[0] or chosen is params else None
            optimizer.step()
        assert same_bits(before, [optimizer.state[p]["exp_avg_sq"] for p in params[1:]])

    on_threads(2, run)


def test_what_rests_has_no_gradients_that_could_be_few():
    """Though of those that came last few elements had one."""

    def run(backend):
        table, other = (nn.Parameter(torch.zeros(n)) for n in (300, 200))
        optimizer = commopt.OneBitAdam([table, other], freeze_step="auto", bucket_mb=1e-3, backend=backend)
        of_table = optimizer.buckets[1]
        for step in range(1, 22):
            other.grad = torch.ones(200)
            table.grad = None if step == 21 else (torch.arange(300) % 20 == step % 20).float()
            optimizer.step()
            found = [p is table for p in settling.rarely_updated(of_table)]
            assert found == [True] * settling.is_look(step), step

    on_threads(2, run)


def test_what_rests_at_a_reset_is_the_same_on_all_ranks_after_it():
    """Each rank owes the others what it has not sent in the steps before."""

    def run(backend):
        params = parameters()
        optimizer = make("QSparseLocalSGD", params, period=3, bucket_mb=1e-3, backend=backend)
        for step in range(3):
            before = [p.detach().clone() for p in params]
            for p, g in zip(params, some_grads(SIZES, step, backend.rank)):
                p.grad = g.to(p.dtype) if step < 2 or p is params[0] else None
            optimizer.step()
        return before, [p.detach() for p in params]

    (before, after), (other, same) = on_threads(2, run)
    assert not any(torch.equal(a, b) for a, b in zip(before, other))
    assert same_bits(after, same)
