"""Parameters that come and go: one without a gradient on any rank is left alone, as in torch, in every kind of step."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from worlds import (
    Used,
    give,
    on_threads,
    params_of,
    same_bits,
    some_grads,
    some_of,
    some_params,
    tensors_in,
    tokens,
)

from commopt import CSER, Lamb, Lans, LocalSGD, OneBitAdam, OneBitLamb, OneBitLion, QSparseLocalSGD, ZeroOneAdam
from commopt.comm import LocalBackend
from commopt.compress import BFloat16, Float8, Identity, Int8, Sign, ThresholdTopK, TopK
from commopt.optim import SyncPolicy, VariancePolicy, masks

SIZES: list[tuple[int, ...]] = [(3, 7), (), (40,), (0, 2), (2, 5), (9,)]
ROUNDS: dict[str, Any] = {"variance": VariancePolicy(100, 6), "sync": SyncPolicy(1, None, 1)}
EVERYTHING = [
    pytest.param(OneBitAdam, {"freeze_step": 6}, id="1-bit Adam"),
    pytest.param(OneBitLamb, {"freeze_step": 6}, id="1-bit LAMB"),
    pytest.param(OneBitLion, {}, id="1-bit Lion"),
    pytest.param(ZeroOneAdam, ROUNDS, id="0/1 Adam"),
    pytest.param(ZeroOneAdam, {"variance": VariancePolicy(3, 100)}, id="0/1 Adam, refreshing"),
    pytest.param(
        CSER, {"momentum": 0.9, "compressor": Sign(16), "reset_compressor": Sign(16), "period": 100}, id="CSER"
    ),
]


def everything_of(optimizer: Any, p: nn.Parameter) -> list[Tensor]:
    """All that an optimizer keeps of a parameter, this rank's own included, and the parameter; as copies."""
    kept = {**optimizer.state[p], **getattr(optimizer, "residuals", {}).get(p, {})}
    return [t.detach().clone() for t in [p, *kept.values()]]


@pytest.mark.parametrize(
    "compressor",
    [Sign(16), Sign(None), Int8(), TopK(), ThresholdTopK(), BFloat16(), Float8(), Identity()],
    ids=lambda c: type(c).__name__,
)
def test_a_group_of_empty_parameters_is_no_trouble(compressor):
    """It has a bucket of its own, of which nothing is sent but what fills it up."""

    def run(backend, make):
        full, empty = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(0, 4))
        groups = [{"params": [full]}, {"params": [empty]}]
        optimizer = make(groups, lr=1e-3, compressor=compressor, backend=backend)
        for _ in range(4):
            full.grad, empty.grad = torch.full((5,), 1.0 + backend.rank), torch.zeros(0, 4)
            optimizer.step()
        return bool((full < 1).any())

    local = partial(LocalSGD, period=2), partial(QSparseLocalSGD, period=2)
    for make in (OneBitLion, *local, partial(CSER, reset_compressor=Sign(16), period=2)):
        assert on_threads(2, lambda backend, make=make: run(backend, make)) == [True, True]


@pytest.mark.parametrize(("cls", "settings"), EVERYTHING)
@pytest.mark.parametrize("world", [(1, 1), (2, 1), (3, 1), (4, 2)], ids=str)
@pytest.mark.parametrize(("overlap", "dtype"), [(False, torch.float32), (True, torch.bfloat16)])
def test_what_has_no_gradient_anywhere_stays_to_the_bit(cls, settings, world, overlap, dtype):
    """Parameter, momentum, variance, clocks and both residuals, of one parameter, of several, of all."""
    if cls is CSER and world[1] > 1:
        return

    def run(backend):
        params = [nn.Parameter(p.detach().to(dtype)) for p in some_params(SIZES)]
        grouped = backend if world[1] == 1 else backend.nodes(world[1])
        optimizer = cls(params, 1e-2, weight_decay=0.1, overlap=overlap, backend=grouped, bucket_mb=2e-4, **settings)
        for step in range(24):
            gone = [{}, {0}, {4, 2}, {5}, set(range(6)), {2, 0, 5}][step * 5 % 6 if step > 2 else 0]
            before = [everything_of(optimizer, p) for p in params]
            grads = some_grads(SIZES, step, backend.rank)
            give(params, [None if i in gone else g.to(dtype) for i, g in enumerate(grads)])
            optimizer.step()
            for i, p in enumerate(params):
                assert same_bits(before[i], everything_of(optimizer, p)) == (i in gone), (step, i)
        return params_of(nn.ParameterList(params)), tensors_in(optimizer.state_dict())

    ranks = on_threads(world[0], run)
    if cls is not CSER:  # which keeps ranks apart
        assert all(same_bits(ranks[0][0], params) for params, _ in ranks)


@pytest.mark.long(but="1-bit LAMB")
@pytest.mark.parametrize(("cls", "settings"), EVERYTHING)
def test_overlap_changes_no_bit_where_parameters_come_and_go(cls, settings):
    """The hooks of backward start buckets that are complete, others wait for what the ranks agree on."""

    def run(backend, overlap, places):
        params = some_params(SIZES)
        grouped = backend if places == 1 else backend.nodes(places)
        optimizer = cls(params, 1e-2, overlap=overlap, backend=grouped, bucket_mb=2e-4, **settings)
        assert len(optimizer.buckets) > 2
        early = 0
        for step in range(15):  # at 13 there is no gradient at all
            give(params, some_of(some_grads(SIZES, step, backend.rank), step, backend.rank))
            early += optimizer._in_flight.started if optimizer._in_flight is not None else 0
            optimizer.step()
        assert (early > 0) == overlap
        return params_of(nn.ParameterList(params)), tensors_in(optimizer.state_dict())

    for world_size, places in [(3, 1), (4, 2)][: 1 if cls is CSER else 2]:
        plain, overlapped = (on_threads(world_size, partial(run, overlap=o, places=places)) for o in (False, True))
        for a, b in zip(plain, overlapped):
            assert same_bits(a[0], b[0])
            assert same_bits(a[1], b[1])


@pytest.mark.long(but="False-OneBitAdam")
@pytest.mark.parametrize("cls", [OneBitAdam, OneBitLamb, OneBitLion])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_tensor_that_is_sent_in_pieces_comes_and_goes(cls, overlap):
    """The same bits as whole; gone on all ranks at every third step, on one of them in between."""

    def run(backend, bucket_mb):
        params = some_params([(41, 97), (97, 31)])
        groups = [{"params": [p]} for p in params]
        settings = {} if cls is OneBitLion else {"freeze_step": 3}
        optimizer = cls(groups, 1e-2, bucket_mb=bucket_mb, compressor=Sign(8), overlap=overlap, backend=backend,
                        **settings)  # fmt: skip
        for step in range(12):
            grads = [torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * step + backend.rank)).double()
                     for p in params]  # fmt: skip
            gone = {0} if step % 3 == 0 else {1} if step % 3 == 1 and backend.rank == 0 else set()
            give(params, [None if i in gone else g for i, g in enumerate(grads)])
            optimizer.step()
        assert all((len(bucket.chunks) > 2) == (bucket_mb < 1) for bucket in optimizer.buckets)
        return params_of(nn.ParameterList(params)), tensors_in(optimizer.state_dict())

    for a, b in zip(*(on_threads(3, partial(run, bucket_mb=mb)) for mb in (25, 0.003))):
        assert same_bits(a[0], b[0])
        assert same_bits(a[1], b[1])


@pytest.mark.parametrize("cls", [OneBitAdam, OneBitLamb, OneBitLion, ZeroOneAdam])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_that_is_called_off_leaves_those_alone_who_are_absent_too(cls, overlap):
    """NaN on a rank, in a compressed step in which parameters have no gradient: nothing has changed."""

    def run(backend):
        params = some_params(SIZES)
        settings = {ZeroOneAdam: ROUNDS, OneBitLion: {}}.get(cls, {"freeze_step": 6})
        optimizer = cls(params, 1e-2, overlap=overlap, backend=backend, bucket_mb=2e-4, **settings)
        for step in range(16):
            grads = some_of(some_grads(SIZES, step, backend.rank), step, backend.rank)
            bad = step in (9, 10, 12)
            if bad and backend.rank == 1:
                grads[5] = torch.full(SIZES[5], float("nan"), dtype=torch.float64)
            before = params_of(nn.ParameterList(params)), tensors_in(optimizer.state_dict())
            give(params, grads)
            optimizer.step()
            after = params_of(nn.ParameterList(params)), tensors_in(optimizer.state_dict())
            assert same_bits(before[0] + before[1], after[0] + after[1]) == (bad or step == 13)
        assert optimizer.skipped_steps == 3
        return params_of(nn.ParameterList(params))

    a, b, c = on_threads(3, run)
    assert same_bits(a, b)
    assert same_bits(a, c)


# the optimizers that have a twin in torch -----------------------------------------------------------------------------


def sparse_run(make: Any, mean: bool, steps: int, every: int) -> list[Tensor]:
    """Parameters after ``steps``: one has a gradient at every step, one at every ``every``-th. ``mean``: one process
    with the mean of what ranks have."""

    def run(backend):
        params = some_params([(30,), (7, 3)])
        optimizer = make(params, backend)
        for step in range(steps):
            ranks = range(2) if mean else [backend.rank]
            each = [
                [torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + 10 * r + i)).double() + 0.5
                 for i, p in enumerate(params)] for r in ranks
            ]  # fmt: skip
            grads = [sum(g) / len(each) for g in zip(*each)]
            give(params, [grads[0], grads[1] if step % every == 0 else None])
            optimizer.step()
        return params_of(nn.ParameterList(params))

    return on_threads(1 if mean else 2, run)[0]


def frozen_adamw(freeze: int, refreshes: Any = None) -> Any:
    """AdamW on lists of tensors, straight from its definition: parameters without a gradient are left alone. The
    variance moves at the steps that ``refreshes`` says, or up to ``freeze``."""

    class Reference:
        def __init__(self, params: list[nn.Parameter]) -> None:
            self.params, self.t = params, 0
            self.state = {p: [torch.zeros_like(p), torch.zeros_like(p), 0, 0] for p in params}

        @torch.no_grad()
        def step(self) -> None:
            self.t += 1
            moves = self.t <= freeze if refreshes is None else refreshes(self.t)
            for p in (p for p in self.params if p.grad is not None):
                s = self.state[p]
                s[0] = 0.9 * s[0] + 0.1 * p.grad
                s[2] += 1
                if moves:
                    s[1] = 0.98 * s[1] + 0.02 * p.grad**2
                    s[3] += 1
                p.mul_(1 - 0.01 * 0.1)
                if s[3]:
                    p.sub_(0.01 / (1 - 0.9 ** s[2]) * s[0] / ((s[1] / (1 - 0.98 ** s[3])).sqrt() + 1e-8))

    return lambda params, backend: Reference(params)


ADAM: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.98), "weight_decay": 0.1, "compressor": Identity()}


@pytest.mark.parametrize("every", [2, 4, 10])
def test_one_bit_adam_without_loss_is_adamw_whose_variance_stands(every):
    ours = sparse_run(lambda ps, b: OneBitAdam(ps, freeze_step=22, backend=b, **ADAM), False, 90, every)
    for a, b in zip(ours, sparse_run(frozen_adamw(22), True, 90, every)):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_the_reference_is_torch_adamw_where_the_variance_moves():
    make = lambda ps, b: torch.optim.AdamW(ps, 0.01, (0.9, 0.98), 1e-8, 0.1)  # noqa: E731
    for a, b in zip(sparse_run(frozen_adamw(99), True, 50, 4), sparse_run(make, True, 50, 4)):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("every", [4, 10])
@pytest.mark.parametrize("policy", [VariancePolicy(100, 22), VariancePolicy(12, 1000)], ids=["frozen", "refreshing"])
def test_zero_one_adam_without_loss_is_adamw_whose_variance_stands(every, policy):
    """With a round at every step: in compressed steps between two refreshes, and after the last one."""
    ours = sparse_run(
        lambda ps, b: ZeroOneAdam(ps, variance=policy, sync=SyncPolicy(1, None, 1), backend=b, **ADAM), False, 90, every
    )
    for a, b in zip(ours, sparse_run(frozen_adamw(0, policy.refreshes), True, 90, every)):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_one_bit_lamb_without_loss_moves_a_rare_tensor_as_lamb_does():
    """A tensor with a gradient at every 4th step, and one that has the same ones at every step of a run a quarter as
    long: they are in the same place, as in LAMB."""

    def run(backend, every, cls=OneBitLamb, **settings):
        params = some_params([(30,), (7, 3)])
        settings = settings or {"freeze_step": 10 * every, "compressor": Identity()}
        optimizer = cls(params, 0.01, (0.9, 0.9), weight_decay=0.1, backend=backend, **settings)
        for step in range(30 * every):
            g = torch.randn(7, 3, generator=torch.Generator().manual_seed(2 * (step // every) + backend.rank)).double()
            give(params, [torch.ones(30, dtype=torch.float64), g if step % every == 0 else None])
            optimizer.step()
        return params[1].detach()

    rare, often = (on_threads(2, partial(run, every=every))[0] for every in (4, 1))
    torch.testing.assert_close(rare, often, rtol=1e-11, atol=1e-12)
    assert not torch.equal(rare, some_params([(30,), (7, 3)])[1])


# local steps ----------------------------------------------------------------------------------------------------------


def test_between_rounds_a_gradient_that_is_missing_everywhere_is_zeros():
    """Nobody knows there whether others have one. Exact steps leave the parameter alone, as in torch."""

    def run(backend, explicit):
        params, history = some_params(SIZES), []
        optimizer = ZeroOneAdam(
            params, 1e-2, variance=VariancePolicy(100, 6), sync=SyncPolicy(3, None, 3), backend=backend
        )
        for step in range(20):
            grads: list[Any] = list(some_grads(SIZES, step, backend.rank))
            local = optimizer.is_local(optimizer.param_groups[0]) or optimizer.replicas_differ
            if step % 2 and step > 2:
                grads[0] = torch.zeros(SIZES[0], dtype=torch.float64) if explicit and local else None
            before = everything_of(optimizer, params[0])
            give(params, grads)
            optimizer.step()
            if grads[0] is None:
                history.append((local, same_bits(before, everything_of(optimizer, params[0]))))
        return params_of(nn.ParameterList(params)), history

    for (a, seen), (b, _) in zip(*(on_threads(2, partial(run, explicit=e)) for e in (False, True))):
        assert same_bits(a, b)
        assert {(True, False), (False, True)} == set(seen)


@pytest.mark.parametrize("cls", [Lamb, Lans, CSER, QSparseLocalSGD])
def test_one_rank_leaves_it_alone(cls):
    params = some_params(SIZES)
    optimizer = cls(params, 1e-2, **({} if cls in (Lamb, Lans) else {"momentum": 0.9}))
    for step in range(6):
        before = everything_of(optimizer, params[0])
        grads: list[Any] = list(some_grads(SIZES, step, 0))
        give(params, [None if step == 4 else grads[0], *grads[1:]])
        optimizer.step()
        assert same_bits(before, everything_of(optimizer, params[0])) == (step == 4)


# a variance of 0 ------------------------------------------------------------------------------------------------------


def warnings_of(caplog: Any) -> list[str]:
    return [r.getMessage() for r in caplog.records if "0 everywhere" in r.getMessage()]


@pytest.mark.parametrize(
    ("cls", "settings", "advice"),
    [
        (OneBitAdam, {"freeze_step": 4}, "set a larger freeze_step"),
        (OneBitLamb, {"freeze_step": 4}, "set a larger freeze_step"),
        (ZeroOneAdam, {"variance": VariancePolicy(2, 4)}, "set a larger VariancePolicy(stop=)"),
    ],
)
def test_a_variance_that_is_0_where_it_begins_to_stand_is_reported_once(cls, settings, advice, caplog):
    def run(backend, zeros):
        named = [(f"p{i}", p) for i, p in enumerate(some_params(SIZES))]
        optimizer = cls(named, 1e-2, backend=backend, **settings)
        for step in range(9):
            for i, (_, p) in enumerate(named):
                p.grad = torch.ones_like(p) * (1.0 + backend.rank) * (i not in zeros or step > 4)
                if i == 5:
                    p.grad = None
            optimizer.step()

    with caplog.at_level(logging.WARNING, "commopt"):
        on_threads(2, partial(run, zeros=set()))  # a parameter without any gradient, as a frozen one, is no news
        assert warnings_of(caplog) == []
        on_threads(2, partial(run, zeros={0, 2}))
        (line,) = warnings_of(caplog)
        assert "2 of 5 parameters" in line
        assert "(p0, p2)" in line
        assert advice in line
        caplog.clear()
        on_threads(2, partial(run, zeros=set(range(6))))
        (line,) = warnings_of(caplog)
        assert "5 of 5 parameters" in line
        assert "(p0, p1, p2 ...)" in line


def test_auto_does_not_freeze_a_variance_of_0():
    def run(backend):
        p = nn.Parameter(torch.zeros(50))
        optimizer = OneBitAdam([p], betas=(0.9, 0.9), backend=backend)
        for step in range(200):
            p.grad = torch.full((50,), float(step >= 100))
            optimizer.step()
            assert step >= 100 or optimizer.param_groups[0]["freeze_step"] == "auto"
        return optimizer.param_groups[0]["freeze_step"]

    for decided in on_threads(2, run):
        assert decided > 110


# what starts when -----------------------------------------------------------------------------------------------------


def test_only_what_is_absent_here_holds_buckets_back_until_the_ranks_agree():
    """Complete buckets start in backward; one that lacks a gradient here, and what follows, when all have agreed."""

    def run(backend):
        model = Used()
        optimizer = OneBitAdam(model.parameters(), 1e-2, freeze_step=2, bucket_mb=1.2e-4, backend=backend, overlap=True)
        for step in range(6):
            model.zero_grad()
            if step == 5 and backend.rank == 0:
                model.bias.requires_grad_(False)
            model(tokens(step, backend.rank, 2)).backward()
            started = optimizer._in_flight.started
            holder = next(i for i, b in enumerate(optimizer.buckets) if any(p is model.bias for p in b.params))
            assert started == (holder if step == 5 and backend.rank == 0 else len(optimizer.buckets) - 1)
            model.bias.requires_grad_(True)
            optimizer.step()
        return params_of(model)

    a, b = on_threads(2, run)
    assert same_bits(a, b)


def test_a_mask_without_runs_has_all_other_bits():
    """Of every beginning and every end in a word, and of two runs."""
    full = torch.full((4,), 0xFF, dtype=torch.uint8)
    some = torch.tensor([0x5A, 0xC3, 0x0F, 0xA5], dtype=torch.uint8)

    def bits(mask):
        return [mask.tolist()[i // 8] >> i % 8 & 1 for i in range(32)]

    for start in range(32):
        for stop in range(start + 1, 33):
            assert bits(masks.without(full, [(start, stop)])) == [not start <= i < stop for i in range(32)]
    left = bits(masks.without(some, [(3, 5), (14, 24)]))
    assert left == [bit and not (3 <= i < 5 or 14 <= i < 24) for i, bit in enumerate(bits(some))]


def test_neighbours_are_one_run_and_what_is_empty_is_none():
    params = [nn.Parameter(torch.ones(n)) for n in (5, 0, 3, 4, 0)]
    (bucket,) = OneBitAdam(params, backend=LocalBackend()).buckets  # in reverse order
    assert masks.absent_runs(bucket, [0, 1, 3]) == [(0, 4)]
    assert masks.absent_runs(bucket, [0, 1, 2, 4]) == [(0, 12)]
    assert masks.absent_runs(bucket, [1, 4]) == [(0, 4), (7, 12)]
    assert masks.absent_runs(bucket, [0, 3]) == []
    assert masks.within([(0, 4), (7, 12)], 3, 6) == [slice(0, 1), slice(4, 6)]


def test_a_mask_is_of_the_variance_there_is_whatever_was_masked_before():
    def run(backend):
        (bucket,) = OneBitAdam([nn.Parameter(torch.ones(12))], backend=backend).buckets
        bucket["exp_avg_sq"][:3] = 1.0
        for _ in range(2):  # though the variance is what it was
            assert masks.active_mask(bucket).tolist()[:2] == [0b111, 0]
            bucket.active = None
        assert masks.padding_mask(bucket).tolist()[:2] == [0xFF, 0x0F]
        assert masks.active_mask(bucket).tolist()[:2] == [0b111, 0]

    on_threads(2, run)
