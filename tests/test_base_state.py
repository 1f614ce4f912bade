"""Means of the state of the bases of outer optimizers (DES-LOC). Every step against plain lists is in test_outer.py."""

from __future__ import annotations

import copy

import pytest
import torch
from every import GOSSIP, OUTER, every_outer
from torch import Tensor, nn
from worlds import Toy, backward, on_processes, on_threads, params_of, same_bits, through_a_file, train

from commopt import Guard, LocalSGD, Mixed, OneBitAdam, SparseLoCo
from commopt.agreement.calls import StepRefused
from commopt.comm import CONFIRMATION_BYTES, LocalBackend, all_reduce_bytes
from commopt.compress import Identity
from commopt.optim import join_state_dict, split_state_dict
from commopt.outer.rounds import ROUND_BYTES

PERIODS = {"exp_avg": 1, "exp_avg_sq": 2}


def moments(optimizer, name: str) -> dict[int, Tensor]:
    """By the number of the parameter."""
    state = optimizer.base.state
    return {i: state[p][name].clone() for i, p in enumerate(optimizer.params) if state.get(p)}


@every_outer
def test_moments_are_equal_after_their_rounds_and_only_then(name):
    """The first in every round, the second in every second."""

    def run(backend):
        model, history = Toy(), []
        settings = {"period": 2, "state_period": PERIODS, "bucket_mb": 2e-4}
        optimizer = OUTER[name](model.parameters(), lr=1e-2, backend=backend, **settings)
        for step in range(8):
            train(model, optimizer, range(step, step + 1), backend.rank, 3)
            history.append([list(moments(optimizer, which).values()) for which in PERIODS])
        assert len(optimizer.buckets) > 1
        return history, params_of(model)

    (first, params), *others = on_threads(3, run)
    for history, theirs in others:
        assert same_bits(params, theirs) or name in GOSSIP
        equal = [[same_bits(a, b) for a, b in zip(mine, its)] for mine, its in zip(first, history)]
        assert equal == [[False, False], [True, False], [False, False], [True, True]] * 2


def test_without_it_the_state_stays_with_its_rank():
    def run(backend):
        model = Toy()
        optimizer = LocalSGD(model.parameters(), lr=1e-2, period=2, backend=backend)
        train(model, optimizer, range(4), backend.rank, 2)
        return list(moments(optimizer, "exp_avg").values())

    assert not same_bits(*on_threads(2, run))


def test_a_rank_without_state_counts_for_nothing_and_gets_none():
    """Its base has never had a gradient of the bias, and makes the whole state when it first has one."""

    def run(backend):
        model = Toy(torch.float64)
        optimizer = LocalSGD(model.parameters(), lr=1e-2, period=2, state_period={"exp_avg": 1}, backend=backend)
        for step in range(2):
            backward(model, step, backend.rank, 3)
            if backend.rank == 0:
                model.bias.grad = None
            if step == 1:
                before = step_of(model, optimizer)
            optimizer.step()
        mine = {i: t.clone() for i, t in moments(optimizer, "exp_avg").items()}
        train(model, optimizer, range(2, 4), backend.rank, 3)
        assert set(optimizer.base.state[model.bias]) == {"step", "exp_avg", "exp_avg_sq"}
        return before, mine

    def step_of(model, optimizer):
        """What the first moments will be after the step to come."""
        entries = [(i, p, optimizer.base.state[p].get("exp_avg")) for i, p in enumerate(optimizer.params)]
        return {i: 0.9 * m + 0.1 * p.grad for i, p, m in entries if m is not None}

    ranks = on_threads(3, run)
    bias = 3
    assert [bias in mine for _, mine in ranks] == [False, True, True]
    for i in ranks[1][1]:
        mean = torch.stack([before[i] for before, _ in ranks if i in before]).mean(0)
        for _, mine in ranks:
            if i in mine:
                torch.testing.assert_close(mine[i], mean, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stopped_anywhere_the_resumed_run_is_the_one_never_stopped(dtype):
    stops = (2, 3, 4, 6)

    def make(model, backend):
        settings = {"period": 2, "state_period": {"exp_avg": 1, "exp_avg_sq": 3}}
        return LocalSGD(model.parameters(), lr=1e-2, backend=backend, **settings)

    def straight(backend):
        model, saved = Toy(dtype), {}
        optimizer = make(model, backend)
        for step in range(9):
            if step in stops:
                saved[step] = through_a_file([model.state_dict(), *split_state_dict(optimizer.state_dict())])
            train(model, optimizer, range(step, step + 1), backend.rank, 2)
        twin, copied = copy.deepcopy((model, optimizer))
        for m, o in ((model, optimizer), (twin, copied)):
            train(m, o, range(9, 13), backend.rank, 2)
        assert same_bits(params_of(model), params_of(twin))
        return params_of(model), saved

    results = on_threads(2, straight)

    def resumed(backend):
        for step in stops:
            model = Toy(dtype, seed=9)
            optimizer = make(model, backend)
            model.load_state_dict(results[0][1][step][0])
            parts = [saved[step][2] for _, saved in results]
            optimizer.load_state_dict(join_state_dict(results[0][1][step][1], parts, backend.rank, 2))
            train(model, optimizer, range(step, 13), backend.rank, 2)
            assert same_bits(params_of(model), results[backend.rank][0])

    on_threads(2, resumed)


def test_bytes_are_those_of_the_ledger():
    """An all-reduce of a state in the rounds that are its, with a flag for each parameter."""

    def run(backend):
        model, guard = Toy(), Guard(check_every=None)
        settings = {"period": 2, "state_period": PERIODS, "guard": guard, "bucket_mb": 2e-4}
        optimizer = LocalSGD(model.parameters(), lr=1e-2, backend=backend, **settings)
        for step in range(8):
            train(model, optimizer, range(step, step + 1), backend.rank, 3)
            sent = optimizer.comm_stats()["step"]["by_collective"]
            states = (0, 1, 0, 2)[step % 4]
            if not states:
                assert sent == {}
                continue
            flags = [-(-len(bucket.params) // 3) * 3 for bucket in optimizer.buckets]
            ways = sum(all_reduce_bytes(4 * bucket.padded, 3) for bucket in optimizer.buckets)
            more = sum(all_reduce_bytes(4 * (b.padded + n), 3) for b, n in zip(optimizer.buckets, flags))
            assert sent == {
                "all_gather": {"bytes": 2 * (ROUND_BYTES + CONFIRMATION_BYTES), "calls": 3},
                "all_reduce": {"bytes": ways + states * more, "calls": (1 + states) * len(optimizer.buckets)},
            }

    on_threads(3, run)


def test_an_optimizer_of_ours_and_nodes_of_several_ranks():
    """The moments of OneBitAdam are views; and nodes average as ranks do."""

    def run(backend):
        out = []
        for base, where in ((torch.optim.Adam, backend), (OneBitAdam, backend), (torch.optim.Adam, backend.nodes(2))):
            model = Toy(torch.float64)
            optimizer = LocalSGD(model.parameters(), base, lr=1e-2, period=2, state_period=PERIODS, backend=where)
            train(model, optimizer, range(6), backend.rank, 4)
            out.append(params_of(model))
        for other in out[1:]:
            torch.testing.assert_close(other, out[0], rtol=1e-11, atol=1e-13)

    on_threads(4, run)


def over_gloo(rank: int, world_size: int) -> list[Tensor]:
    model = Toy()
    optimizer = LocalSGD(model.parameters(), lr=1e-2, period=2, state_period=PERIODS)
    train(model, optimizer, range(6), rank, world_size)
    return [*params_of(model), *moments(optimizer, "exp_avg").values()]


def test_over_gloo():
    def threads(backend):
        model = Toy()
        optimizer = LocalSGD(model.parameters(), lr=1e-2, period=2, state_period=PERIODS, backend=backend)
        train(model, optimizer, range(6), backend.rank, 2)
        return [*params_of(model), *moments(optimizer, "exp_avg").values()]

    for ours, theirs in zip(on_processes(2, over_gloo), on_threads(2, threads)):
        assert same_bits(ours, theirs)


# what is refused ------------------------------------------------------------------------------------------------------


ADAMW, SGD = torch.optim.AdamW, torch.optim.SGD
WRONG = [
    (ADAMW, {"exp_avg": 0}, r"state_period\['exp_avg'\] must be an int >= 1, in synchronisations, got 0"),
    (ADAMW, {"exp_avg": True}, r"state_period\['exp_avg'\] must be an int >= 1, .*, got True"),
    (ADAMW, {"exp_avg": 1.5}, r"state_period\['exp_avg'\] must be an int >= 1, .*, got 1.5"),
    (ADAMW, 3, "state_period must be None, or name tensors of the base's state, .*; got 3"),
    (ADAMW, {3: 1}, "state_period must be None, or name tensors of the base's state"),
    (ADAMW, {"m": 3}, r"state_period\['m'\]: the state of AdamW .* no tensor .*; allowed are exp_avg, exp_avg_sq"),
    (ADAMW, {"step": 3}, r"state_period\['step'\]: the state of AdamW has no tensor of that name"),
    (SGD, {"momentum_buffer": 3}, r"the state of SGD has no tensor .*; it has no such tensors at all"),
    (OneBitAdam, {"momentum_buffer": 3}, r"the state of OneBitAdam has no .*; allowed are exp_avg, exp_avg_sq"),
]


@pytest.mark.parametrize(("base", "given", "message"), WRONG)
def test_what_a_base_does_not_have_is_refused(base, given, message):
    for cls in (LocalSGD, SparseLoCo):
        with pytest.raises(ValueError, match=message):
            cls(Toy().parameters(), base, lr=1e-2, state_period=given, backend=LocalBackend())


def test_ranks_that_want_other_states_are_told():
    def run(backend):
        with pytest.raises(ValueError, match="rank"):
            LocalSGD(Toy().parameters(), lr=1e-2, state_period={"exp_avg": 1 + backend.rank}, backend=backend)

    on_threads(2, run)


class Secret(torch.optim.SGD):
    """A base that steps on its own parameters only, so that its state is known when it has one."""

    def __init__(self, params, **settings):
        super().__init__(params, **settings)
        self.ages = {id(p): 1.0 for group in self.param_groups for p in group["params"]}

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    age = self.ages[id(p)] + abs(float(p.grad.flatten()[0]))
                    self.state[p].setdefault("age", torch.zeros_like(p)).add_(age)


def test_a_state_that_is_not_known_before_is_looked_for_in_its_first_round(caplog):
    def run(backend):
        p = nn.Parameter(torch.ones(3))
        settings = {"lr": 1.0, "period": 2, "backend": backend}
        right = LocalSGD([p], Secret, state_period={"age": 1}, **settings)
        for _ in range(2):
            p.grad = torch.full((3,), float(backend.rank))
            right.step()
        assert torch.equal(right.base.state[p]["age"], torch.full((3,), 3.0))  # of 2 and 4
        q = nn.Parameter(torch.ones(3))
        wrong = LocalSGD([q], Secret, state_period={"years": 1}, **settings)
        if backend.rank == 0:
            q.grad = torch.ones(3)
        wrong.step()
        error, message = (ValueError, "no tensor of that name .*; allowed are age") if backend.rank == 0 else (
            StepRefused, "rank 0 cannot take this step"
        )  # fmt: skip
        with pytest.raises(error, match=message):
            wrong.step()

    on_threads(2, run)
    assert "its state before the first step is not known" in caplog.text


def test_with_the_identity_and_all_of_the_state_it_is_as_if_there_was_one_base():
    """period 1, SGD with momentum and its buffer averaged in every round: SGD on the mean gradient."""

    def run(backend):
        model = Toy(torch.float64)
        settings = {"lr": 0.1, "momentum": 0.9, "period": 1, "state_period": {"momentum_buffer": 1}}
        optimizer = LocalSGD(model.parameters(), torch.optim.SGD, backend=backend, compressor=Identity(), **settings)
        train(model, optimizer, range(6), backend.rank, 2)
        return params_of(model)

    whole = Toy(torch.float64)
    train(whole, torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9), range(6))
    for params in on_threads(2, run):
        torch.testing.assert_close(params, params_of(whole), rtol=1e-11, atol=1e-12)


def test_a_rank_that_has_used_a_scalar_only_knows_of_no_name():
    """Of a scalar nobody can say whether a tensor of the state is shaped like it."""

    def run(backend):
        w, scale = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(()))
        optimizer = LocalSGD([w, scale], lr=1e-2, period=2, state_period={"exp_avg": 1}, backend=backend)
        for _ in range(4):
            scale.grad = torch.ones(())
            w.grad = torch.ones(4, 4) if backend.rank == 0 else None
            optimizer.step()
        return [w.detach(), scale.detach()]

    first, second = on_threads(2, run)
    assert same_bits(first, second)


def test_a_part_whose_parameters_have_had_no_gradient_yet_refuses_no_round():
    """The one that has such a state may be the one that has none so far."""

    def run(backend):
        a, b = (nn.Parameter(torch.ones(3)) for _ in range(2))
        base = Mixed(torch.optim.AdamW([a], lr=0.1), torch.optim.SGD([b], lr=0.1, momentum=0.9))
        optimizer = LocalSGD(base, period=1, state_period={"momentum_buffer": 1}, backend=backend)
        for step in range(3):
            a.grad = torch.full_like(a, 1.0 + backend.rank)
            b.grad = torch.full_like(b, 1.0 + backend.rank) if step == 2 or (step == 1 and backend.rank) else None
            optimizer.step()
        return [base.state[p].get("momentum_buffer") for p in (a, b)]

    for none, momentum in on_threads(2, run):
        assert none is None
        assert momentum.tolist() == pytest.approx([((0.9 * 2 + 2) + 1) / 2] * 3)


@pytest.mark.parametrize("shapes", [[(3,), (4, 3)], [(4, 3), (3,)]])
def test_a_name_that_the_state_has_of_some_shapes_alone_is_one_of_the_base(shapes):
    """As of Adafactor, whose second moments are shaped like vectors, and of matrices are not: whichever come first."""

    def run(backend):
        params = [nn.Parameter(torch.ones(shape)) for shape in shapes]
        settings = {"lr": 0.1, "period": 1, "state_period": {"variance": 1}}
        optimizer = LocalSGD(params, torch.optim.Adafactor, backend=backend, **settings)
        for p in params:
            p.grad = torch.full_like(p, 1.0 + backend.rank)
        optimizer.step()
        (vector,) = [optimizer.base.state[p]["variance"].clone() for p in params if p.dim() == 1]
        return vector

    first, second = on_threads(2, run)
    assert torch.equal(first, second)
    with pytest.raises(ValueError, match=r"state_period\['variance'\]: .* has no tensor of that name"):
        LocalSGD([nn.Parameter(torch.ones(4, 3))], torch.optim.Adafactor, lr=0.1, state_period={"variance": 1})


@pytest.mark.parametrize("frozen", [[0, 1], [1]])
def test_a_name_that_only_a_frozen_group_has_is_one_of_the_base(frozen):
    """As hidden matrices that are frozen at first, on all ranks or by mistake on one: their state comes later."""

    def run(backend):
        a, b = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3))
        a.requires_grad_(frozen == [1])  # what one rank alone has frozen is refused at construction
        base = Mixed(torch.optim.SGD([a], lr=0.1, momentum=0.9), torch.optim.AdamW([b], lr=0.1))
        periods = {"momentum_buffer": 1, "exp_avg": 1}
        optimizer = LocalSGD(base, period=1, state_period=periods, backend=backend)
        for step in range(3):
            a.requires_grad_(step > 0 or backend.rank not in frozen)
            a.grad = torch.full_like(a, 1.0 + backend.rank) if a.requires_grad else None
            b.grad = torch.ones(3)
            optimizer.step()
        return base.state[a]["momentum_buffer"].clone()

    first, second = on_threads(2, run)
    assert torch.equal(first, second)
    assert first.abs().sum() > 0


def test_a_misspelt_name_is_refused_where_a_group_is_frozen():
    a, b = nn.Parameter(torch.ones(3, 3), requires_grad=False), nn.Parameter(torch.ones(3))
    groups = [{"params": [a]}, {"params": [b]}]
    for base in (
        torch.optim.AdamW(groups, lr=0.1),
        OneBitAdam(groups, lr=0.1, freeze_step=10, backend=LocalBackend()),
        Mixed(torch.optim.SGD([a], lr=0.1, momentum=0.9), torch.optim.AdamW([b], lr=0.1)),
    ):
        with pytest.raises(ValueError, match=r"state_period\['exp_avgs'\]: .* no tensor .*; allowed are .*exp_avg"):
            LocalSGD(base, state_period={"exp_avgs": 1}, backend=LocalBackend())


@pytest.mark.parametrize("broken", [[1], [0, 1], [0, 1, 2]])
def test_a_state_with_inf_counts_for_nothing_and_gets_the_mean_of_the_others(broken):
    def run(backend):
        p = nn.Parameter(torch.zeros(3))
        optimizer = LocalSGD([p], lr=0.0, period=1, state_period={"exp_avg_sq": 1}, backend=backend)
        p.grad = torch.ones(3) * (1 + backend.rank)
        optimizer.step()
        if backend.rank in broken:
            optimizer.base.state[p]["exp_avg_sq"][1] = float("inf")
        p.grad = torch.zeros(3)
        optimizer.step()
        return optimizer.base.state[p]["exp_avg_sq"].clone()

    for found in on_threads(3, run):
        assert bool(found.isfinite().all()) == (len(broken) < 3)
        assert broken != [1] or torch.allclose(found, torch.full((3,), 0.999 * 0.001 * (1 + 4 + 9) / 3))
