"""The laws of OneBitLamb: it equals Lamb where it must, its paper where it must, and itself on every rank."""

from __future__ import annotations

import copy
import logging
import math
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from oracle_lamb import OneBitLambOracle
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from worlds import (
    Lost,
    Toy,
    Used,
    as_scheduled,
    backward,
    give,
    lacks,
    on_processes,
    on_threads,
    params_of,
    same_bits,
    scheduled,
    some_of,
    tensors_in,
    through_a_file,
    tokens,
    train,
)

from commopt import Guard, Lamb, OneBitLamb, attach
from commopt.agreement.decision import AGREEMENT_BYTES
from commopt.bucket import ROW_MULTIPLE
from commopt.comm import CollectiveError, ThreadBackend
from commopt.compress import Compressor, Identity, Sign
from commopt.optim import join_state_dict, split_state_dict

SETTINGS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.05, "betas": (0.9, 0.9), "eps": 1e-5}


def make(model: nn.Module, backend: Any, **settings: Any) -> OneBitLamb:
    return OneBitLamb(model.parameters(), backend=backend, **{**SETTINGS, "freeze_step": 4, **settings})


def run_of(steps: range, world_size: int, kind: Any = Toy, places: int | None = None, **settings: Any) -> Any:
    """A function of a rank: trains, and returns parameters and the whole state."""

    def run(backend: Any) -> tuple[list[Tensor], list[Tensor]]:
        model = kind()
        optimizer = make(model, backend if places is None else backend.nodes(places), **settings)
        train(model, optimizer, steps, backend.rank, world_size)
        return params_of(model), tensors_in(optimizer.state_dict())

    return run


# warm-up -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("lr", [1e-2, torch.tensor(1e-2)])
@pytest.mark.parametrize("maximize", [False, True])
def test_one_rank_is_lamb_to_the_bit_for_the_whole_run(dtype, lr, maximize):
    ours, theirs = Toy(dtype), Toy(dtype)
    settings = {**SETTINGS, "lr": lr, "maximize": maximize}
    optimizer, reference = (
        OneBitLamb(ours.parameters(), **settings, freeze_step=3),
        Lamb(theirs.parameters(), **settings),
    )
    assert optimizer.phase == "plain"
    train(ours, optimizer, range(12))
    train(theirs, reference, range(12))
    assert same_bits(params_of(ours), params_of(theirs))
    for a, b in zip(ours.parameters(), theirs.parameters()):
        for key in reference.state.get(b, {}):
            assert torch.equal(optimizer.state[a][key], reference.state[b][key])
    assert optimizer.comm_stats()["total"]["bytes"] == 0


@pytest.mark.parametrize(("world_size", "places"), [(2, None), (3, None), (4, None), (4, 2), (2, 2)])
def test_warm_up_is_lamb_on_the_averaged_gradient(world_size, places):
    theirs = Toy(torch.float64)
    reference = Lamb(theirs.parameters(), **SETTINGS)
    for step in range(10):
        theirs.zero_grad()
        sum(theirs(tokens(step, r, world_size)) / world_size for r in range(world_size)).backward()
        reference.step()
    run = run_of(range(10), world_size, partial(Toy, torch.float64), places, freeze_step=10)
    for ours, _ in on_threads(world_size, run):
        for a, b in zip(ours, theirs.parameters()):
            torch.testing.assert_close(a, b.detach(), rtol=1e-10, atol=1e-11)


# the paper -----------------------------------------------------------------------------------------------------------

SIZES = [(3, 7), (), (40,), (0, 2), (2, 5), (6,)]
STILL = 5
"""The tensor whose gradient is always 0."""


def some_params() -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(s, generator=g, dtype=torch.float64)) for s in SIZES]


def some_grad(step: int, rank: int, i: int) -> Tensor:
    """Of very different sizes; one of zeros, one with zeros, one that grows, and one that becomes small."""
    g = torch.Generator().manual_seed(100 * step + 10 * rank + i)
    out = torch.randn(SIZES[i], generator=g, dtype=torch.float64) + 0.3
    if i == 2:
        out[5:9] = 0  # never a gradient here
    grows = {0: 1.0, 2: 1.5, 4: 0.6}.get(i, 1.0) ** max(step - 6, 0)
    return out * (10.0 ** (i - 2)) * (0 if i == STILL else grows)


def node_grads(step: int, node: int, places: int, order: list[int], absent: bool) -> list[list[float] | None]:
    ranks, out = range(node * places, (node + 1) * places), []
    for i in order:
        there = [some_grad(step, r, i) for r in ranks if not (absent and lacks(i, step, r))]
        out.append((sum(there) / places).flatten().tolist() if there else None)
    return out


def against_the_oracle(
    nodes: int, places: int, compressor: Compressor, freeze: int, atol: float, **options: Any
) -> Counter:
    """Compares every step, parameters and state, and returns which ways the oracle has taken."""
    steps, overlap, changes = 18, options.pop("overlap", False), options.pop("changes", False)
    absent, lossy_warmup = options.pop("absent", False), options.pop("lossy_warmup", False)
    common, debias = options.pop("common", "one"), options.pop("debias", True)
    order = list(reversed(range(len(SIZES))))  # how a bucket packs
    ours = {"lr": 0.02, "eps": 1e-6, "weight_decay": 0.05, "betas": (0.9, 0.98), **options}
    oracle = OneBitLambOracle(
        [some_params()[i].flatten().tolist() for i in order], nodes, freeze, lr=0.02, eps=1e-6,
        wd=ours["weight_decay"], b1=0.9, b2=0.98, b3=options.get("coeff_beta", 0.9),
        low=options.get("min_coeff", 0.01), high=options.get("max_coeff", 10.0),
        r_min=options.get("factor_min", 0.5), r_max=options.get("factor_max", 4.0),
        r_thr=options.get("factor_threshold", 0.1), row_multiple=ROW_MULTIPLE,
        block=getattr(compressor, "block", None), norm=getattr(compressor, "norm", None), rows=nodes * places,
        common=common, debias=debias, lossy_warmup=lossy_warmup, scaling=options.get("scaling", "tensor"),
    )  # fmt: skip
    expected = []
    for step in range(steps):
        if changes:
            as_scheduled(oracle, step)
        oracle.step([node_grads(step, node, places, order, absent) for node in range(nodes)])
        expected.append(copy.deepcopy((oracle.x, oracle.m, oracle.f, oracle.r)))

    def run(backend):
        mine = some_params()
        backend = backend if places == 1 else backend.nodes(places)
        warmup = compressor if lossy_warmup else None
        optimizer = OneBitLamb(
            mine,
            freeze_step=freeze,
            compressor=compressor,
            warmup_compressor=warmup,
            backend=backend,
            overlap=overlap,
            **ours,
        )
        for step in range(steps):
            optimizer.param_groups[0].update(scheduled(step) if changes else {})
            grads: list[Any] = [some_grad(step, backend.rank, i) for i in range(len(mine))]
            give(mine, some_of(grads, step, backend.rank) if absent else grads)
            optimizer.step()
            states = [optimizer.state[mine[i]] for i in order]
            history = [
                [mine[i].detach().flatten() for i in order], [s["exp_avg"].flatten() for s in states],
                [s["fresh_exp_avg_sq"].flatten() for s in states] if step >= freeze else None,
                [s["factor"].view(1) for s in states],
            ]  # fmt: skip
            for what, theirs in zip(history, expected[step]):
                for a, b in zip(what or [], theirs):
                    b = torch.tensor(b, dtype=torch.float64).view(-1)
                    size = max([1.0, *b.abs().tolist()])
                    torch.testing.assert_close(a, b, rtol=max(atol, 1e-11), atol=atol * size)
        return optimizer.phase

    assert set(on_threads(nodes * places, run)) == {"compressed"}
    return oracle.seen


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("compressor", [Identity(), Sign(block=16), Sign(block=16, norm="l1"), Sign(None)], ids=str)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("absent", [False, True])
@pytest.mark.parametrize("changes", [False, True])
def test_every_step_is_that_of_the_paper_on_lists(world_size, compressor, overlap, absent, changes):
    """float64, so that nothing but the algorithm is compared. ``absent``: tensors come and go. ``changes``: so do all
    hyper-parameters, at every step."""
    # 3 ranks: a mean of float32 scales can lie exactly between two float32 (see test_onebit_adam.py)
    atol = 1e-5 if world_size == 3 and compressor != Identity() else 1e-11
    against_the_oracle(world_size, 1, compressor, 6, atol, overlap=overlap, absent=absent, changes=changes)


@pytest.mark.parametrize(("nodes", "places"), [(2, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("compressor", [Sign(block=16), Sign(None)], ids=str)
@pytest.mark.parametrize("overlap", [False, True])
def test_signs_of_the_update_are_those_on_lists(nodes, places, compressor, overlap):
    against_the_oracle(nodes, places, compressor, 6, 1e-11, overlap=overlap, absent=places == 1, scaling="element")


@pytest.mark.parametrize(("nodes", "places"), [(2, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_warm_up_that_is_compressed_is_that_on_lists(nodes, places, overlap):
    against_the_oracle(nodes, places, Sign(block=16), 6, 1e-11, overlap=overlap, absent=places == 1, lossy_warmup=True)


@pytest.mark.long(but="{'coeff_beta': 0.99, 'min_coeff': 0.3, 'max_coeff': 0.4}")
@pytest.mark.parametrize(
    "options",
    [
        {"weight_decay": 0.0},
        {"factor_threshold": 0.5},
        {"factor_threshold": 0.9, "factor_min": 0.05, "factor_max": 1.5},
        {"factor_threshold": 0.0},
        {"coeff_beta": 0.0},
        {"coeff_beta": 0.99, "min_coeff": 0.3, "max_coeff": 0.4},
    ],
    ids=str,
)
def test_every_hyper_parameter_is_that_of_the_paper(options):
    against_the_oracle(2, 1, Sign(block=16), 6, 1e-11, **options)


def test_the_runs_against_the_oracle_take_every_way_through_the_bounds():
    seen: Counter = Counter()
    seen += against_the_oracle(2, 1, Sign(block=16), 6, 1e-11)
    seen += against_the_oracle(2, 1, Identity(), 6, 1e-11, factor_max=1.05, factor_threshold=0.005, weight_decay=0.0)
    assert {way for way, times in seen.items() if times} == {"low", "high", "within", "down", "up", "free"}


@pytest.mark.parametrize(("nodes", "places"), [(2, 2), (2, 3)])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("absent", [False, True])
def test_every_step_is_that_of_the_paper_with_nodes_for_workers(nodes, places, overlap, absent):
    # with 6, a mean of two scales lies exactly between two float32 where tensors come and go, in step 8
    against_the_oracle(nodes, places, Sign(block=16), 5 if absent else 6, 1e-11, overlap=overlap, absent=absent)


@pytest.mark.parametrize("compressor", [Identity(), Sign(block=16)])
def test_the_common_magnitude_of_the_paper_gives_the_same_run(compressor):
    """Mean over the tensors instead of 1: what differs is the rounding of a scale to float32, 2**-24 of it."""
    against_the_oracle(2, 1, compressor, 6, 1e-11 if compressor == Identity() else 1e-5, common="mean")


def test_after_a_long_warm_up_the_average_is_that_of_the_paper():
    """It divides c_avg by 1 - b3^n, which the paper does not: 1 to the last bit after 12 steps with b3 = 0.04."""
    against_the_oracle(2, 1, Sign(block=16), 12, 1e-11, debias=False, coeff_beta=0.04)


def test_without_loss_the_fresh_variance_is_that_of_the_averaged_gradients():
    """T2 of the design: the gradient that the momentum implies is the mean gradient, so f goes on as v would have."""

    def run(backend):
        p = nn.Parameter(torch.ones(30, dtype=torch.float64))
        optimizer = OneBitLamb([p], lr=1e-3, betas=(0.9, 0.95), freeze_step=5, compressor=Identity(), backend=backend)
        v = torch.zeros(30, dtype=torch.float64)
        for step in range(20):
            grads = [torch.randn(30, generator=torch.Generator().manual_seed(2 * step + r)).double() for r in range(2)]
            p.grad = grads[backend.rank]
            v = 0.95 * v + 0.05 * (sum(grads) / 2).square()
            optimizer.step()
        torch.testing.assert_close(optimizer.state[p]["fresh_exp_avg_sq"], v, rtol=1e-10, atol=1e-13)

    on_threads(2, run)


# the switch ----------------------------------------------------------------------------------------------------------


def test_at_the_switch_all_momenta_are_brought_to_one_magnitude_and_it_stays():
    def run(backend):
        model = Toy()
        optimizer = make(model, backend)
        train(model, optimizer, range(4), backend.rank, 2)
        states = {p: optimizer.state[p] for p in model.parameters() if p in optimizer.state}
        active = {p: s["exp_avg_sq"] > 0 for p, s in states.items()}
        rms = {p: s["exp_avg"][active[p]].double().square().mean().sqrt() for p, s in states.items() if active[p].any()}
        assert all(s["scaling_coeff"] == 0 for s in states.values()), "not known in warm-up"
        frozen = [s["exp_avg_sq"].clone() for s in states.values()]
        train(model, optimizer, range(4, 5), backend.rank, 2)
        for p, value in rms.items():
            torch.testing.assert_close(
                states[p]["scaling_coeff"] * value, torch.tensor(1.0).double(), rtol=1e-6, atol=0
            )
        assert states[model.dead]["scaling_coeff"] == states[model.unused]["scaling_coeff"] == 1
        ks = [s[k].clone() for s in states.values() for k in ("scaling_coeff", "trust_ratio", "trust_ratio_weight")]
        train(model, optimizer, range(5, 9), backend.rank, 2)
        assert same_bits(
            ks, [s[k] for s in states.values() for k in ("scaling_coeff", "trust_ratio", "trust_ratio_weight")]
        )
        assert same_bits(frozen, [s["exp_avg_sq"] for s in states.values()])

    on_threads(2, run)


@pytest.mark.parametrize("how", ["zero", "tiny", "none"])
@pytest.mark.parametrize("compressor", [Sign(block=8), Identity()])
def test_a_tensor_without_momentum_at_the_switch_divides_nothing_by_zero(how, compressor):
    """A tensor whose gradients stop, or are next to nothing, or never were; and an empty and a masked one."""

    def run(backend):
        sizes = [(6,), (5,), (0, 3), (4,)]
        params = [nn.Parameter(torch.ones(s)) for s in sizes]
        optimizer = OneBitLamb(
            params, lr=1e-2, betas=(0.9, 0.9), freeze_step=10, compressor=compressor, weight_decay=0.1, backend=backend
        )
        for step in range(30):
            for i, p in enumerate(params):
                g = torch.Generator().manual_seed(100 * step + 10 * i + backend.rank)
                p.grad = torch.randn(p.shape, generator=g) * (i != 3)
            if how == "none":
                params[1].grad = None if step < 20 else torch.zeros(5)
            if step == 10:
                start = params_of(nn.ParameterList(params))
                if how != "none":
                    optimizer.state[params[1]]["exp_avg"].fill_(0.0 if how == "zero" else 1e-45)
            optimizer.step()
            assert all(t.isfinite().all() for t in [*params, *tensors_in(optimizer.state_dict())])
        moved = [float((p.detach() - before).norm()) for p, before in zip(params, start)]
        assert 0 < moved[1] < 3 * moved[0]
        return params_of(nn.ParameterList(params))

    a, b = on_threads(2, run)
    assert same_bits(a, b)


def test_a_momentum_that_has_died_down_counts_with_a_tenth_of_its_usual_size():
    """Else its neighbours in a block would drown in it, or it in them."""

    def run(backend):
        loud, quiet = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))
        optimizer = OneBitLamb([loud, quiet], betas=(0.9, 0.99), freeze_step=60, compressor=Sign(), backend=backend)
        for step in range(61):
            loud.grad, quiet.grad = torch.ones(8), torch.full((8,), 1e-3 if step < 3 else 1e-12)
            optimizer.step()
        k, v = optimizer.state[quiet]["scaling_coeff"], optimizer.state[quiet]["exp_avg_sq"]
        assert k * 0.1 * v.double().mean().sqrt() == pytest.approx(1.0, rel=1e-6)

    on_threads(2, run)


@pytest.mark.parametrize("compressor", [Sign(), Sign(block=8), Identity()])
def test_what_never_had_a_gradient_does_nothing_but_decay(compressor):
    """Rows never used, the dead layer, the unused parameter: no residual, no momentum, and no say in r."""

    def run(backend, decay):
        model = Toy()
        optimizer = make(model, backend, weight_decay=decay, compressor=compressor)
        train(model, optimizer, range(25), backend.rank, 2)
        for name, rows in [("embedding", slice(13, None)), ("positions", slice(6, None)), ("dead", slice(None))]:
            p = getattr(model, name)
            for key, value in {**optimizer.state[p], **optimizer.residuals[p]}.items():
                assert value.dim() < 2 or not value[rows].any(), (name, key)
            ratio = p[rows] / getattr(Toy(), name)[rows]
            torch.testing.assert_close(ratio, ratio.mean().expand_as(ratio), rtol=1e-5, atol=0)
            assert (ratio == 1).all() == (decay == 0)
        assert torch.equal(model.unused, Toy().unused)
        assert optimizer.state[model.dead]["factor"] == 1

    for decay in (0.0, 0.1):
        on_threads(2, partial(run, decay=decay))


def test_elements_that_are_masked_have_no_say_in_the_factor():
    """Gradients three times as large as in warm-up: r falls below 1, where a masked element has a ratio of 1."""

    def run(backend):
        p = nn.Parameter(torch.ones(16))
        optimizer = OneBitLamb([p], betas=(0.9, 0.9), freeze_step=20, compressor=Identity(), backend=backend)
        for step in range(40):
            p.grad = torch.full((16,), 1.0 if step < 20 else 3.0)
            p.grad[8:] = 0
            optimizer.step()
        return optimizer.state[p]["factor"].item()

    assert on_threads(2, run) == [0.5, 0.5]


def test_the_factor_moves_by_at_most_its_threshold_and_stays_within_its_bounds():
    def run(backend):
        model = Toy()
        optimizer = make(model, backend, factor_min=0.7, factor_max=1.2, factor_threshold=0.07)
        before = dict.fromkeys(optimizer.state, 1.0)
        seen = set()
        for step in range(40):
            train(model, optimizer, range(step, step + 1), backend.rank, 2)
            for p, state in optimizer.state.items():
                r = state["factor"].item()
                assert 0.7 <= r <= 1.2
                assert abs(r / before[p] - 1) <= 0.07 * (1 + 1e-12)
                before[p] = r
                seen.add(r)
        assert len(seen) > 20

    on_threads(2, run)


def test_a_second_warm_up_learns_new_scales_and_keeps_the_residuals():
    def run(backend):
        model = Toy()
        optimizer = make(model, backend)
        train(model, optimizer, range(8), backend.rank, 2)
        state, residuals = optimizer.state[model.weight], optimizer.residuals[model.weight]["worker_error"].clone()
        k = state["scaling_coeff"].item()
        state["factor"].fill_(3.0)
        optimizer.param_groups[0]["freeze_step"] = 11
        assert optimizer.phase == "warmup"
        train(model, optimizer, range(8, 11), backend.rank, 2)
        assert state["scaling_coeff"] == 0
        assert torch.equal(optimizer.residuals[model.weight]["worker_error"], residuals)
        v = state["exp_avg_sq"].clone()
        train(model, optimizer, range(11, 12), backend.rank, 2)
        assert state["scaling_coeff"].item() not in (0.0, k)
        assert state["factor"] == pytest.approx(1.0, rel=0.1), "r starts again from 1"
        assert torch.equal(state["exp_avg_sq"], v)
        train(model, optimizer, range(12, 15), backend.rank, 2)
        return params_of(model)

    a, b = on_threads(2, run)
    assert same_bits(a, b)


def test_a_warm_up_without_a_ratio_takes_that_of_the_first_compressed_step():
    """Weights of 0 in a warm-up of one step; a run that goes on from the state of Lamb, which has no averages."""

    def run(backend):
        p = nn.Parameter(torch.zeros(16))
        optimizer = OneBitLamb([p], lr=1.0, betas=(0.9, 0.999), freeze_step=1, backend=backend)
        for _ in range(3):
            before = p.detach().clone()
            p.grad = torch.full((16,), 1.0 + backend.rank)
            optimizer.step()
        assert optimizer.state[p]["trust_ratio_weight"] > 0
        assert optimizer.state[p]["trust_ratio"] > 0
        return (p.detach() - before).norm().item() / before.norm().item()

    relative = on_threads(2, run)
    assert relative[0] == relative[1]
    assert 0.2 < relative[0] < 1.5

    theirs = Toy()
    lamb = Lamb(theirs.parameters(), **SETTINGS)
    train(theirs, lamb, range(6))
    saved = through_a_file(lamb.state_dict())

    def resume(backend):
        model = Toy()
        model.load_state_dict(theirs.state_dict())
        optimizer = make(model, backend)
        optimizer.load_state_dict(saved)
        assert optimizer.phase == "compressed"
        train(model, optimizer, range(6, 9), backend.rank, 2)
        state = optimizer.state[model.weight]
        c = state["trust_ratio"] / state["trust_ratio_weight"]
        assert 0.01 <= c < 1, "a random 5 x 5 matrix is smaller than its update"
        return params_of(model)

    a, b = on_threads(2, resume)
    assert same_bits(a, b)


def test_auto_freezes_and_is_logged(caplog):
    def run(backend):
        p = nn.Parameter(torch.ones(50))
        optimizer = OneBitLamb([p], betas=(0.9, 0.9), backend=backend)
        for _ in range(80):
            p.grad = torch.ones(50) * (1 + backend.rank)
            optimizer.step()
        return optimizer.param_groups[0]["freeze_step"], optimizer.phase

    (first, phase), second = on_threads(2, run)
    assert (first, phase) == second
    assert phase == "compressed"
    assert first % 10 == 0
    assert caplog.text.count(f"warmup ended after step {first}, compressed from now on") == 1


# replicas ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("compressor", [Sign(), Sign(block=None, norm="l1"), Identity()], ids=str)
def test_replicas_are_bit_identical_after_every_step(world_size, dtype, compressor):
    def run(backend):
        model, history = Toy(dtype), []
        optimizer = make(model, backend, compressor=compressor, bucket_mb=2e-4)
        for step in range(12):
            train(model, optimizer, range(step, step + 1), backend.rank, world_size)
            state = [t.clone() for entry in optimizer.state.values() for t in entry.values()]
            history.append(params_of(model) + state)
        assert optimizer.phase == "compressed"
        assert all(t.isfinite().all() for t in history[-1])
        return history

    rank_0, *others = on_threads(world_size, run)
    for history in others:
        assert all(same_bits(a, b) for a, b in zip(rank_0, history))
    assert not same_bits(rank_0[5], rank_0[-1])


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", [Toy, Used])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"compressor": Sign(block=16)},
        {"compressor": Identity()},
        {"maximize": True},
        {"freeze_step": "auto", "betas": (0.9, 0.5)},
    ],
    ids=str,
)
def test_overlap_gives_the_same_bits(world_size, kind, settings):
    settings = {"bucket_mb": 1.2e-4, **settings}
    plain, overlapped = (
        on_threads(world_size, run_of(range(9), world_size, kind, overlap=o, **settings)) for o in (False, True)
    )
    for a, b in zip(plain, overlapped):
        assert same_bits(a[0], b[0])
        assert same_bits(a[1], b[1])


def test_overlap_is_under_way_in_backward():
    def run(backend):
        model = Used()
        optimizer = make(model, backend, overlap=True, bucket_mb=1.2e-4)
        train(model, optimizer, range(6), backend.rank, 2)
        before = optimizer.topology.traffic.total.calls["all_to_all"]
        backward(model, 6, backend.rank, 2)
        assert optimizer.topology.traffic.total.calls["all_to_all"] - before == len(optimizer.buckets) - 1 > 2
        optimizer.step()

    on_threads(2, run)


@pytest.mark.parametrize(("key", "value"), [("eps", 1e-4), ("scaling", "tensor")])
def test_scales_that_change_between_backward_and_step(key, value):
    """They are in what backward has sent; residuals would be divided by others than they were multiplied by."""

    def run(backend):
        model = Used()
        optimizer = make(model, backend, overlap=True, scaling="element", bucket_mb=1.2e-4)
        train(model, optimizer, range(6), backend.rank, 2)
        before = params_of(model), tensors_in(optimizer.state_dict())
        backward(model, 6, backend.rank, 2)
        optimizer.param_groups[0][key] = value
        with pytest.raises(ValueError, match=f"a parameter group changed between backward.*{value}"):
            optimizer.step()
        assert same_bits(before[0], params_of(model))
        assert same_bits(before[1], tensors_in(optimizer.state_dict()))

    on_threads(2, run)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("places", [None, 2])
def test_a_tensor_that_is_sent_in_pieces_gives_the_same_bits(overlap, places):
    def run(backend, bucket_mb):
        params = [nn.Parameter(torch.ones(n)) for n in (4000, 1500)]
        optimizer = OneBitLamb(
            [{"params": [p]} for p in params], 1e-2, freeze_step=3, bucket_mb=bucket_mb, compressor=Sign(block=8),
            overlap=overlap, backend=backend if places is None else backend.nodes(places),
        )  # fmt: skip
        for step in range(9):
            loss = 0.0
            for i, p in enumerate(params):
                g = torch.Generator().manual_seed(100 * step + 10 * i + backend.rank)
                loss = loss + (p * torch.randn(p.shape, generator=g)).sum()
            (loss * math.nan if step == 6 and backend.rank == 1 else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.skipped_steps == 1
        return params_of(nn.ParameterList(params)), tensors_in(optimizer.state_dict()), optimizer.buckets[0].chunks

    whole, cut = (on_threads(4, partial(run, bucket_mb=mb)) for mb in (25, 0.003))
    for a, b in zip(whole, cut):
        assert same_bits(a[0], b[0])
        assert same_bits(a[1], b[1])
        assert len(b[2]) > 2


@pytest.mark.parametrize("overlap", [False, True])
def test_nodes_of_one_rank_are_no_nodes(overlap):
    plain, nodes = (on_threads(3, run_of(range(9), 3, Used, places, overlap=overlap)) for places in (None, 1))
    for a, b in zip(plain, nodes):
        assert same_bits(a[0], b[0])
        assert same_bits(a[1], b[1])


@pytest.mark.parametrize("overlap", [False, True])
def test_replicas_in_nodes_are_equal(overlap):
    ranks = on_threads(6, run_of(range(9), 6, Used, 2, overlap=overlap, bucket_mb=3e-4))
    plain = on_threads(6, run_of(range(9), 6, Used, 2, bucket_mb=3e-4))
    for (params, state), (same, also) in zip(ranks, plain):
        assert same_bits(params, ranks[0][0])
        assert same_bits(params, same)
        assert same_bits(state, also)


# agreement -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("step", [2, 4, 6], ids=["warmup", "at the switch", "compressed"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("overlap", [False, True])
def test_nan_or_inf_on_one_rank_is_skipped_by_all_and_leaves_no_trace(world_size, step, bad, overlap):
    def run(backend):
        model = Used()
        optimizer = make(model, backend, overlap=overlap, bucket_mb=1.2e-4)
        for t in range(9):
            before = params_of(model), tensors_in(optimizer.state_dict())
            model.zero_grad()
            loss = model(tokens(t, backend.rank, world_size))
            (loss * bad if t == step and backend.rank == world_size - 1 else loss).backward()
            optimizer.step()
            after = params_of(model), tensors_in(optimizer.state_dict())
            assert same_bits(before[0], after[0]) == (t == step)
            assert same_bits(before[1], after[1]) == (t == step)
        assert optimizer.skipped_steps == 1
        return params_of(model)

    ranks = on_threads(world_size, run)
    assert all(same_bits(ranks[0], r) for r in ranks)
    assert all(p.isfinite().all() for p in ranks[0])


@pytest.mark.parametrize("freeze_step", [2, 100])
def test_a_parameter_without_gradient_on_all_ranks_does_not_move_and_on_one_rank_counts_as_zero(freeze_step):
    def run(backend, lacks):
        model = Toy()
        optimizer = make(model, backend, freeze_step=freeze_step)
        train(model, optimizer, range(3), backend.rank, 2)
        before, momentum = model.weight.detach().clone(), optimizer.state[model.weight]["exp_avg"].clone()
        for step in range(3, 8):
            backward(model, step, backend.rank, 2)
            model.weight.grad = None
            if backend.rank == 1:
                model.bias.grad = None if lacks else torch.zeros_like(model.bias)
            optimizer.step()
        assert torch.equal(model.weight, before)
        assert optimizer.state[model.weight]["step"] == 3
        assert torch.equal(optimizer.state[model.weight]["exp_avg"], momentum)
        assert optimizer.state[model.bias]["step"] == 8
        return params_of(model), tensors_in(optimizer.state_dict())

    lacking, zeros = (on_threads(2, partial(run, lacks=lacks)) for lacks in (True, False))
    assert same_bits(lacking[0][0], lacking[1][0])
    assert same_bits(lacking[0][0], zeros[0][0])
    assert same_bits(lacking[1][1], zeros[1][1])


@pytest.mark.parametrize("places", [1, 2])
@pytest.mark.parametrize("freeze_step", [100, 3])
@pytest.mark.parametrize("compressor", [Identity(), Sign(block=16)])
def test_maximize_mirrors_the_run_and_clipping_scales_gradients(places, freeze_step, compressor):
    """float64. From -x up the same gradients is -(from x down them); clipped to half their norm, they are halved."""

    def run(backend, sign=1.0, scale=1.0, **settings):
        params = [nn.Parameter(p.detach() * sign) for p in some_params()]
        optimizer = OneBitLamb(
            params, 1e-2, (0.9, 0.9), 0.5, 0.1, freeze_step=freeze_step, compressor=compressor,
            backend=backend.nodes(places), **settings,
        )  # fmt: skip
        for step in range(7):
            for i, p in enumerate(params):
                p.grad = some_grad(step, backend.rank, i) * scale
            norms = [math.sqrt(sum(float(some_grad(step, r, i).square().sum()) for i in range(6))) for r in range(4)]
            if "max_grad_norm" in settings:
                optimizer.max_grad_norm = math.sqrt(sum(n * n for n in norms) / 4) / 2
            optimizer.step()
        return params_of(nn.ParameterList(params))

    plain, half = on_threads(4, run)[0], on_threads(4, partial(run, scale=0.5))[0]
    mirrored = on_threads(4, partial(run, sign=-1.0, maximize=True))[0]
    clipped = on_threads(4, partial(run, max_grad_norm=1.0))[0]
    for a, b, c, d in zip(plain, mirrored, half, clipped):
        torch.testing.assert_close(a, -b, rtol=1e-12, atol=1e-13)
        # 1e-6 is added to the norm: at most 1e-6 of the 300 that the gradients have
        torch.testing.assert_close(c, d, rtol=1e-6, atol=1e-7)
    assert max(float((a - c).norm()) for a, c in zip(plain, half)) > 1e-3


def test_groups_that_are_late_and_parameters_that_are_unfrozen():
    """A late group warms up by itself. In a frozen group a parameter that comes late can only decay."""

    def run(backend):
        model = Toy()
        model.bias.requires_grad_(False)
        optimizer = OneBitLamb([model.weight, model.bias], **SETTINGS, freeze_step=3, backend=backend)
        train(model, optimizer, range(5), backend.rank, 2)
        model.bias.requires_grad_(True)
        optimizer.add_param_group({"params": [model.embedding, model.empty], "freeze_step": 4})
        assert optimizer.phase == "mixed"
        train(model, optimizer, range(5, 12), backend.rank, 2)
        assert optimizer.phase == "compressed"
        assert optimizer.state[model.embedding]["step"] == 7
        ratio = model.bias.detach() / Toy().bias.detach()
        torch.testing.assert_close(ratio, ratio[0].expand_as(ratio))
        assert 0 < ratio[0] < 1
        assert optimizer.state[model.bias]["scaling_coeff"] == 1
        return params_of(model)

    a, b = on_threads(2, run)
    assert same_bits(a, b)
    assert all(p.isfinite().all() for p in a)


# accounting ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("compressor", [Sign(), Sign(block=None), Sign(block=64), Identity()], ids=str)
def test_bytes_counted_are_those_of_the_closed_form(world_size, compressor: Compressor):
    """2 (W-1) rows for each bucket, as in 1-bit Adam: the scales of tensors and their ratios cost nothing."""
    sizes, w = [1000, 1, 513], world_size

    def run(backend):
        params = [nn.Parameter(torch.ones(n)) for n in sizes]
        guard = Guard(check_every=None)
        optimizer = OneBitLamb(params, freeze_step=1, compressor=compressor, backend=backend, bucket_mb=25, guard=guard)
        stats = []
        for step in range(3):
            for i, p in enumerate(params):
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step + i + backend.rank))
            optimizer.step()
            stats.append(optimizer.comm_stats())
        return stats

    row = math.ceil(sum(sizes) / (w * ROW_MULTIPLE)) * ROW_MULTIPLE
    agreement = (w - 1) * AGREEMENT_BYTES
    for warmup, switch, compressed in on_threads(w, run):
        if w == 1:
            assert warmup["step"]["calls"] == compressed["step"]["calls"] == 0
            continue
        assert warmup["step"]["bytes"] == agreement + 2 * (w - 1) * 4 * row
        assert compressed["step"]["bytes"] == agreement + 2 * (w - 1) * compressor.nbytes(row)
        assert switch["step"] == compressed["step"]
        assert compressed["step"]["calls"] == 4  # with the agreement and the confirmation


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_memory_is_what_the_docstring_says(world_size, overlap):
    """16 + 4/W bytes an element, residuals twice with overlap, 12 on one rank; a mask of 1/8 byte."""
    numel = 64 * 4 * 10

    def run(backend):
        p = nn.Parameter(torch.ones(numel))
        optimizer = OneBitLamb([p], freeze_step=2, backend=backend, overlap=overlap)
        for _ in range(4):
            p.grad = torch.ones(numel) * (1 + backend.rank)
            optimizer.step()
        bucket = optimizer.buckets[0]
        held = list(bucket.buffers.values())
        if bucket.feedback is not None:
            feedback = bucket.feedback
            held += [feedback.worker, feedback.server, *(feedback._next or ()), bucket.active]
        return sum(t.untyped_storage().nbytes() for t in held)

    residuals = 0 if world_size == 1 else (4 + 4 / world_size) * (2 if overlap else 1) + 1 / 8
    assert set(on_threads(world_size, run)) == {int((12 + residuals) * numel)}


def test_stats_compare_residual_and_momentum_in_the_same_units():
    def run(backend):
        model = Toy()
        optimizer = make(model, backend)
        train(model, optimizer, range(10), backend.rank, 2)
        return optimizer.comm_stats()["residual_ratio"]

    for ratio in on_threads(2, run):
        assert 0.1 < ratio < 10


def test_learning_with_one_bit_is_about_as_good_as_with_32():
    """120 steps on the same data. Signs must not lose more than 5 % of what the same algorithm gains without loss;
    without residuals they lose 70 %.

    LAMB itself gains more with time, at the same lr: r is below 1 for most tensors, and a step smaller by as much.
    """

    def run(backend, freeze_step, compressor):
        model = Toy()
        optimizer = OneBitLamb(
            model.parameters(), 1e-2, (0.9, 0.95), freeze_step=freeze_step, compressor=compressor, backend=backend
        )
        for step in range(120):
            backward(model, step % 8, backend.rank, backend.world_size)
            optimizer.step()
        return sum(model(tokens(s, 0, 1)).item() for s in range(8)) / 8

    logging.getLogger("commopt").setLevel(logging.ERROR)
    first = sum(Toy()(tokens(s, 0, 1)).item() for s in range(8)) / 8
    runs = [(1, 1000, Sign()), (2, 40, Identity()), (2, 40, Sign())]  # LAMB on one rank: with all, it has their mean
    lamb, exact, signs = (on_threads(w, partial(run, freeze_step=f, compressor=c))[0] for w, f, c in runs)
    logging.getLogger("commopt").setLevel(logging.NOTSET)
    assert first - signs > 0.95 * (first - exact), (first, exact, signs)
    assert first - signs > 0.75 * (first - lamb), (first, lamb, signs)


# saving --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("half", [3, 4, 5, 9], ids=["warmup", "before the switch", "at the switch", "compressed"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_resumed_run_equals_one_never_stopped(world_size, dtype, half, overlap):
    def run(backend):
        straight, model, resumed = Toy(dtype), Toy(dtype), Toy(dtype, seed=9)
        optimizer = make(straight, backend, overlap=overlap)
        train(straight, optimizer, range(2 * half), backend.rank, world_size)
        first = make(model, backend, overlap=overlap)
        train(model, first, range(half), backend.rank, world_size)
        saved = through_a_file({"model": model.state_dict(), "optimizer": first.state_dict()})
        second = make(resumed, backend, overlap=overlap)
        resumed.load_state_dict(saved["model"])
        second.load_state_dict(saved["optimizer"])
        train(resumed, second, range(half, 2 * half), backend.rank, world_size)
        assert same_bits(params_of(straight), params_of(resumed))
        assert same_bits(tensors_in(optimizer.state_dict()), tensors_in(second.state_dict()))
        return params_of(resumed)

    results = on_threads(world_size, run)
    assert all(same_bits(results[0], r) for r in results)


@pytest.mark.long(but="old0-new0")
@pytest.mark.parametrize(("old", "new"), [((2, 1), (3, 1)), ((3, 1), (1, 1)), ((2, 2), (3, 1)), ((2, 1), (2, 2))])
def test_in_another_world_residuals_are_kept(old, new):
    """The mean of the worker residuals plus the server residuals, in the units of the momentum."""

    def save(backend):
        model = Toy(torch.float64)
        optimizer = make(model, backend.nodes(old[1]))
        train(model, optimizer, range(8), backend.rank, old[0] * old[1])
        return model.state_dict(), *split_state_dict(through_a_file(optimizer.state_dict())), optimizer.comm_stats()

    saved = on_threads(old[0] * old[1], save)
    replicated, parts = saved[0][1], [s[2] for s in saved]
    size = new[0] * new[1]

    def load(backend):
        model = Toy(torch.float64)
        model.load_state_dict(saved[0][0])
        optimizer = make(model, backend.nodes(new[1]), bucket_mb=3e-4)
        joined = join_state_dict(replicated, parts, backend.rank, size, new[0])
        optimizer.load_state_dict(joined)
        residuals = joined["residuals"]["state"]
        if new[0] == 1:  # residuals are folded in
            for i, p in enumerate(model.parameters()):
                if i in residuals:
                    total = residuals[i]["worker_error"].view(p.shape) + residuals[i]["server_error"].view(p.shape)
                    expected = replicated["state"][i]["exp_avg"] + total
                    torch.testing.assert_close(optimizer.state[p]["exp_avg"], expected, rtol=1e-12, atol=1e-15)
        assert all(
            optimizer.state[p][key] == replicated["state"][i][key]
            for i, p in enumerate(model.parameters()) if i in replicated["state"] for key in OneBitLamb.scalars
        )  # fmt: skip
        train(model, optimizer, range(8, 12), backend.rank, size)
        return params_of(model), sum(float(o["worker_error"].abs().sum()) for o in residuals.values())

    loaded = on_threads(size, load)
    assert all(same_bits(loaded[0][0], params) for params, _ in loaded)
    assert all(residuals > 0 for _, residuals in loaded)


def test_what_is_sent_and_the_residuals_add_up_over_a_run():
    """Sum of the communicated gradients + what is owed in the end = sum of all mean gradients, in float64.

    The momentum received is that formed from the last one, plus what was owed, minus what is owed now.
    """

    def run(backend):
        model = [nn.Parameter(torch.ones(n, dtype=torch.float64)) for n in (30, 50)]
        optimizer = OneBitLamb(model, lr=1e-3, freeze_step=3, compressor=Sign(block=16), backend=backend)
        history = []
        for step in range(12):
            for i, p in enumerate(model):
                g = torch.Generator().manual_seed(100 * step + 10 * i + backend.rank)
                p.grad = torch.randn(p.shape, generator=g, dtype=torch.float64) * 100.0**i
            before = [optimizer.state[p]["exp_avg"].clone() for p in model]
            residuals = [{k: v.clone() for k, v in optimizer.residuals[p].items()} for p in model]
            optimizer.step()
            now = [{k: v.clone() for k, v in optimizer.residuals[p].items()} for p in model]
            after = [optimizer.state[p]["exp_avg"].clone() for p in model]
            history.append((before, after, residuals, now, [p.grad.clone() for p in model]))
        return history

    a, b = on_threads(2, run)
    for step in range(3, 12):
        for i in range(2):
            mean = 0.9 * a[step][0][i] + 0.1 * (a[step][4][i] + b[step][4][i]) / 2
            residuals, now = (
                (a[step][when][i]["worker_error"] + b[step][when][i]["worker_error"]) / 2
                + torch.cat([r[step][when][i]["server_error"] for r in (a, b)])
                for when in (2, 3)
            )
            torch.testing.assert_close(a[step][1][i] + now, mean + residuals, rtol=1e-12, atol=1e-13 * 100**i)


class Failing(ThreadBackend):
    """A rank one of whose collectives of bytes fails: that which ``calls_left`` counts down to, at once, or
    when it is waited for if it ``starts``."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.calls_left, self.starts = [0], [True]

    def part(self, ranks):
        """The lines of it fail as well."""
        line = super().part(ranks)
        line.calls_left, line.starts = self.calls_left, self.starts
        return line

    def _next(self, start: Any, out: Tensor) -> Any:
        self.calls_left[0] -= out.dtype == torch.uint8
        if self.calls_left[0] != 0 or out.dtype != torch.uint8:
            return start()
        if not self.starts[0]:
            raise CollectiveError("connection reset")
        return Lost("connection reset")

    def all_to_all(self, out, inp):
        return self._next(partial(super().all_to_all, out, inp), out)

    def all_gather(self, out, inp):
        return self._next(partial(super().all_gather, out, inp), out)


@pytest.mark.parametrize(
    ("left", "starts", "scaling"),
    [(2, False, "tensor"), (1, True, "element"), (3, True, "tensor"), (4, True, "element"), (6, True, "tensor")],
)
def test_after_a_collective_that_failed_residuals_are_in_the_units_of_the_momentum(left, starts, scaling):
    """Three chunks are sent, and three come back. A message may be lost, but what was not compressed yet is there."""

    def run(backend):
        backend = Failing(backend.world, backend.rank)
        p = nn.Parameter(torch.ones(1536))
        optimizer = OneBitLamb(
            [p], 1e-3, freeze_step=3, bucket_mb=0.002, compressor=Sign(block=8), scaling=scaling, backend=backend
        )
        for step in range(8):
            g = torch.Generator().manual_seed(10 * step + backend.rank)
            p.grad = 1e-6 * torch.randn(p.shape, generator=g)
            before = {k: v.clone() for k, v in optimizer.residuals[p].items()}
            if step < 7:
                optimizer.step()
        backend.calls_left[0], backend.starts[0] = left, starts
        with pytest.raises(CollectiveError, match="connection reset"):
            optimizer.step()
        (after,) = optimizer.state_dict()["residuals"]["state"].values()
        for name, x in before.items():
            assert 0 < x.norm() < 1e-3
            assert after[name].norm() < 3 * x.norm(), name
        assert len(optimizer.buckets[0].chunks) == 3
        stays = [torch.equal(before["worker_error"].view(2, -1)[:, a:b], after["worker_error"].view(2, -1)[:, a:b])
                 for a, b in optimizer.buckets[0].chunks]  # fmt: skip
        assert stays == [False, False, not starts]

    on_threads(2, run)


def test_a_deep_copy_goes_on_as_the_original_would():
    def run(backend):
        model = Toy()
        optimizer = make(model, backend, freeze_step=3)
        train(model, optimizer, range(5), backend.rank, 2)
        both = copy.deepcopy({"model": model, "optimizer": optimizer})
        train(both["model"], both["optimizer"], range(5, 8), backend.rank, 2)
        train(model, optimizer, range(5, 8), backend.rank, 2)
        assert same_bits(params_of(model), params_of(both["model"]))

    on_threads(2, run)


def test_state_is_complete_at_construction():
    model = Toy()
    optimizer = OneBitLamb(model.parameters())
    names = {"step", "variance_step", "exp_avg", "exp_avg_sq", "fresh_exp_avg_sq", *OneBitLamb.scalars}
    assert all(set(entry) == names for entry in optimizer.state.values())
    assert optimizer.state[model.weight]["factor"] == 1
    adam = torch.optim.Adam(model.parameters())
    train(model, adam, range(2))
    optimizer.state[model.weight]["factor"].fill_(3.0)
    optimizer.load_state_dict(adam.state_dict())
    assert optimizer.state[model.weight]["factor"] == 1
    assert optimizer.param_groups[0]["step"] == 2


# bad input -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": -0.1}, r"lr must be a number >= 0, got -0.1"),
        ({"eps": 0}, r"eps must be a number > 0, got 0"),
        ({"max_coeff": 0.001}, r"max_coeff must be at least min_coeff=0.01, got 0.001"),
        ({"coeff_beta": 1.0}, r"coeff_beta must be a number in \[0, 1\), got 1.0"),
        ({"factor_threshold": -0.1}, r"factor_threshold must be a number in \[0, 1\), got -0.1"),
        ({"factor_min": 0}, r"factor_min must be a number in \(0, 1\], got 0"),
        ({"factor_min": 1.5}, r"factor_min must be a number in \(0, 1\], got 1.5"),
        ({"factor_max": 0.9}, r"factor_max must be a number >= 1, got 0.9"),
        ({"scaling": "row"}, r"scaling must be 'tensor' or 'element', got 'row'"),
        ({"freeze_step": 0}, r"freeze_step must be 'auto' or an int >= 1, got 0"),
        ({"bucket_mb": -1}, r"bucket_mb must be a number > 0, got -1"),
    ],
)
def test_an_argument_out_of_range_on_one_rank_is_an_error_on_all(arguments, message):
    def run(backend):
        with pytest.raises(ValueError, match=message) as caught:
            OneBitLamb(Toy().parameters(), backend=backend, **(arguments if backend.rank == 1 else {}))
        return str(caught.value)

    texts = on_threads(2, run)
    assert texts[0].startswith("rank 1 refused its arguments: ")


def test_ranks_with_different_settings():
    def run(backend):
        with pytest.raises(ValueError, match="settings or kernel providers differ between ranks: rank 1"):
            OneBitLamb(Toy().parameters(), backend=backend, factor_max=4.0 + backend.rank)

    on_threads(2, run)


# processes -----------------------------------------------------------------------------------------------------------


def over_gloo(rank: int, world: int) -> dict[str, Any]:
    """Bare, overlapping, attached to DDP, and Lamb under DDP: 9 steps each."""
    out: dict[str, Any] = {}
    for name, attached, overlap in [("bare", False, False), ("overlap", False, True), ("attached", True, True)]:
        model = Used()
        optimizer = make(model, None, overlap=overlap, bucket_mb=1.2e-4)
        wrapped = DistributedDataParallel(model, find_unused_parameters=True) if attached else model
        if attached:
            attach(wrapped, optimizer)
        for step in range(9):
            wrapped.zero_grad()
            wrapped(tokens(step, rank, world)).backward()
            optimizer.step()
        out[name] = params_of(model), tensors_in(optimizer.state_dict())
        out[name + " bytes"] = optimizer.comm_stats()["step"]["bytes"]
    model = Used()
    wrapped, lamb = DistributedDataParallel(model, find_unused_parameters=True), Lamb(model.parameters(), **SETTINGS)
    warm = Used()
    optimizer = make(warm, None, freeze_step=100)
    for step in range(9):
        wrapped.zero_grad()
        wrapped(tokens(step, rank, world)).backward()
        lamb.step()
        backward(warm, step, rank, world)
        optimizer.step()
    out["lamb"], out["warm"] = params_of(model), params_of(warm)
    return out


def test_over_gloo_bare_overlapping_and_attached_are_one_and_lamb_under_ddp_is_the_warm_up():
    ranks = on_processes(2, over_gloo)
    threads = on_threads(2, run_of(range(9), 2, Used, bucket_mb=1.2e-4))
    for rank, (params, state) in zip(ranks, threads):
        for name in ("bare", "overlap"):
            assert same_bits(rank[name][0], params)
            assert same_bits(rank[name][1], state)
        assert same_bits(rank["attached"][0], ranks[0]["attached"][0])
        assert rank["attached bytes"] == rank["bare bytes"] == rank["overlap bytes"]
        for a, b in zip(rank["attached"][0], params):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)  # DDP divides before it adds
        assert same_bits(rank["lamb"], ranks[0]["lamb"])
        for a, b in zip(rank["lamb"], rank["warm"]):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
