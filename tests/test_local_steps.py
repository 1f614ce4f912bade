"""Local steps: they say nothing to anybody, and whatever happens in them is settled by the next round."""

from __future__ import annotations

import copy
import logging
import math
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from worlds import (
    Toy,
    Used,
    backward,
    on_threads,
    params_of,
    same_bits,
    tensors_in,
    through_a_file,
    tokens,
    train,
)
from zero_one import SYNC, VARIANCE, fixed_gradients, kind, make, whole

from commopt import Guard, ZeroOneAdam
from commopt.agreement.decision import AGREEMENT_BYTES
from commopt.bucket import ROW_MULTIPLE
from commopt.comm import CollectiveError, LocalBackend, ThreadWorld
from commopt.compress import Identity, Sign
from commopt.optim import SyncPolicy, VariancePolicy, join_state_dict, split_state_dict

LOCAL, ROUND, EXACT = 20, 23, 3
"""Steps, counted from 0: after those before them, the next is local (the first of 3), a round after 3, or exact."""


# what is sent --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("compressor", [Sign(), Sign(block=None), Identity()])
def test_bytes_of_a_run_are_those_of_the_ledger_and_local_steps_send_nothing(world_size, overlap, compressor):
    sizes, w = [1000, 1, 513], world_size

    def run(backend):
        params = [nn.Parameter(torch.zeros(n)) for n in sizes]
        optimizer = ZeroOneAdam(
            params,
            variance=VARIANCE,
            sync=SYNC,
            compressor=compressor,
            backend=backend,
            overlap=overlap,
            bucket_mb=0.004,
            guard=Guard(check_every=None),
        )
        sent = []
        for step in range(40):
            optimizer.zero_grad()
            before = backend.calls
            sum((p * (1.0 + backend.rank + step + i)).sum() for i, p in enumerate(params)).backward()
            what = kind(optimizer)
            optimizer.step()
            assert what != "local" or backend.calls == before
            sent.append((what, optimizer.comm_stats()["step"]["bytes"]))
        return sent

    rows = [math.ceil(n / (w * ROW_MULTIPLE)) * ROW_MULTIPLE for n in (514, 1000)]
    agreement = (w - 1) * AGREEMENT_BYTES
    cost = {
        "exact": agreement + sum(2 * (w - 1) * 4 * n for n in rows) if w > 1 else 0,
        "compressed": agreement + sum(2 * (w - 1) * compressor.nbytes(n) for n in rows),
        "local": 0,
    }
    for sent in on_threads(world_size, run):
        assert all(nbytes == cost[what] for what, nbytes in sent)
        kinds = [what for what, _ in sent]
        if w > 1:
            assert (kinds.count("exact"), kinds.count("compressed"), kinds.count("local")) == (4, 14, 22)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("nodes", [False, True])
def test_overlap_changes_no_bit(world_size, nodes):
    def run(backend, overlap):
        model, rank = Used(), backend.rank
        optimizer = make(
            model, backend.nodes(1) if nodes else backend, overlap=overlap, bucket_mb=1e-4, weight_decay=0.1
        )
        for step in range(27):
            backward(model, step, rank, world_size)
            if step == LOCAL:
                model.bias.grad.mul_(0.5)  # nothing has been sent: editing is allowed
            if step == 23 and rank == 1:
                model.bias.grad.fill_(math.nan)
            if step == 23 and overlap:
                assert optimizer.step_in_flight().started > 1, "a round after local steps starts in backward"
                with pytest.raises(ValueError if rank == 1 else RuntimeError):  # the edit is refused
                    optimizer.step()
            else:
                optimizer.step()
        return whole(model, optimizer)

    for a, b in zip(
        on_threads(world_size, partial(run, overlap=False)), on_threads(world_size, partial(run, overlap=True))
    ):
        assert same_bits(a, b)


@pytest.mark.parametrize("key", ["lr", "weight_decay"])
def test_what_a_round_uses_may_not_change_after_it_has_started_in_backward(key):
    def run(backend):
        model = Used()
        optimizer = make(model, backend, overlap=True, bucket_mb=1e-4)
        train(model, optimizer, range(ROUND), backend.rank, 2)
        before = whole(model, optimizer)
        backward(model, ROUND, backend.rank, 2)
        group = optimizer.param_groups[0]
        kept, group[key] = group[key], 0.5
        with pytest.raises(ValueError, match="a parameter group changed between backward"):
            optimizer.step()
        group[key] = kept
        assert same_bits(before, whole(model, optimizer))

    on_threads(2, run)


@pytest.mark.parametrize("nodes", [1, 2])
def test_nodes_of_several_ranks_meet_to_the_bit(nodes):
    def run(backend):
        model, rank = Toy(), backend.rank
        optimizer = make(model, backend.nodes(nodes), bucket_mb=2e-4)
        train(model, optimizer, range(ROUND), rank, 4)
        between = params_of(model)
        train(model, optimizer, range(ROUND, ROUND + 1), rank, 4)
        return between, params_of(model)

    results = on_threads(4, run)
    assert not any(same_bits(results[0][0], r[0]) for r in results[1:])
    assert all(same_bits(results[0][1], r[1]) for r in results)


def test_a_group_that_comes_late_makes_rounds_of_local_steps_of_its_own_only():
    """While one group has a round, the other's local step is agreed on; it still sends nothing."""

    def run(backend):
        model = Toy()
        optimizer = ZeroOneAdam(
            [model.weight, model.bias], lr=1e-2, variance=VARIANCE, sync=SYNC, backend=backend, eps=1e-6
        )
        train(model, optimizer, range(17), backend.rank, 2)
        optimizer.add_param_group(
            {"params": [model.embedding], "variance": VariancePolicy(1, 3), "sync": {"first": 3, "longest": 3}}
        )
        assert optimizer.phase == "mixed"
        seen = []
        for step in range(17, 32):
            seen.append("".join(optimizer.kind_of(group)[0] for group in optimizer.param_groups))
            calls = backend.calls
            train(model, optimizer, range(step, step + 1), backend.rank, 2)
            assert (backend.calls == calls) == (seen[-1] == "ll")
        assert seen[:9] == ["le", "lc", "ce", "ll", "ll", "lc", "cl", "ll", "lc"]
        optimizer.synchronize()
        return params_of(model)

    a, b = on_threads(2, run)
    assert same_bits(a, b)


# what may go wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_in_a_local_step_is_a_gradient_of_zeros_there_and_nothing_to_the_others(bad, caplog):
    def run(backend, spoil):
        model = Toy()
        optimizer = make(model, backend, max_grad_norm=1.0)
        for step in range(30):
            backward(model, step, backend.rank, 2)
            if step in (LOCAL, LOCAL + 1) and backend.rank == 1:
                for p in model.parameters():
                    if p.grad is not None:
                        p.grad.zero_()
                if spoil:
                    model.weight.grad[1, 2] = bad
            optimizer.step()
            assert optimizer.param_groups[0]["step"] == step + 1
        assert optimizer.skipped_steps == 0
        assert optimizer.comm_stats()["dropped_gradients"] == (2 if spoil and backend.rank == 1 else 0)
        return whole(model, optimizer)

    zeros, spoilt = on_threads(2, partial(run, spoil=False)), on_threads(2, partial(run, spoil=True))
    assert all(same_bits(a, b) for a, b in zip(zeros, spoilt))
    assert caplog.text.count("in the gradient of rank 1 in a local step") == 2


@pytest.mark.parametrize("step", [EXACT, 6, ROUND])
def test_nan_in_a_round_is_skipped_by_all_and_the_round_comes_again(step, caplog):
    def run(backend):
        model = Toy()
        optimizer = make(model, backend)
        train(model, optimizer, range(step), backend.rank, 3)
        what, before, groups = kind(optimizer), whole(model, optimizer), optimizer.state_dict()["param_groups"]
        assert what != "local"
        backward(model, step, backend.rank, 3)
        if backend.rank == 2:
            model.weight.grad[0, 0] = math.nan
        optimizer.step()
        assert same_bits(before, whole(model, optimizer))
        assert optimizer.state_dict()["param_groups"] == groups
        assert (kind(optimizer), optimizer.skipped_steps) == (what, 1)
        train(model, optimizer, range(step, step + 1), backend.rank, 3)
        assert not optimizer.replicas_differ
        return params_of(model)

    results = on_threads(3, run)
    assert all(same_bits(results[0], r) for r in results)
    assert caplog.text.count("step skipped on all ranks") == 1


def test_a_gradient_that_is_missing_in_a_local_step_is_zeros():
    def run(backend, lacks):
        model = Toy()
        optimizer = make(model, backend)
        for step in range(26):
            backward(model, step, backend.rank, 2)
            if step in (LOCAL, ROUND) and backend.rank == 1:
                model.weight.grad = None if lacks else torch.zeros_like(model.weight)
            optimizer.step()
        assert optimizer.state[model.unused]["step"] == 0
        assert torch.equal(model.unused, Toy().unused)
        return params_of(model)

    for a, b in zip(on_threads(2, partial(run, lacks=True)), on_threads(2, partial(run, lacks=False))):
        assert same_bits(a, b)


@pytest.mark.parametrize("at", [LOCAL, LOCAL + 1, ROUND])
def test_a_parameter_that_is_frozen_stops_with_the_next_round_at_the_latest(at):
    def run(backend):
        model = Toy()
        optimizer = make(model, backend, weight_decay=0.1)
        for step in range(30):
            if step == at:
                model.weight.requires_grad_(False)
                model.weight.grad = None
            backward(model, step, backend.rank, 2)
            optimizer.step()
            if step == ROUND:
                stopped = model.weight.detach().clone()
        assert torch.equal(stopped, model.weight)
        optimizer.synchronize()
        return params_of(model)

    a, b = on_threads(2, run)
    assert same_bits(a, b)


def test_a_parameter_that_comes_too_late_does_not_move_and_is_reported_once(caplog):
    def run(backend):
        model = Toy()
        model.weight.requires_grad_(False)
        optimizer = make(model, backend)
        train(model, optimizer, range(21), backend.rank, 2)
        model.weight.requires_grad_(True)
        train(model, optimizer, range(21, 30), backend.rank, 2)
        assert torch.equal(model.weight, Toy().weight)

    on_threads(2, run)
    late = f"1 parameters (a parameter of shape {tuple(Toy().weight.shape)}) have their first gradient after"
    assert caplog.text.count(f"{late} the last refresh") == 1


def test_a_sparse_gradient_in_a_local_step_is_an_error_there_and_changes_nothing():
    def run(backend):
        model = Toy()
        optimizer = make(model, backend)
        train(model, optimizer, range(LOCAL), backend.rank, 2)
        before = whole(model, optimizer)
        backward(model, LOCAL, backend.rank, 2)
        if backend.rank == 1:
            dense, model.weight.grad = model.weight.grad, model.weight.grad.to_sparse()
            with pytest.raises(ValueError, match=r"is torch\.sparse"):
                optimizer.step()
            assert same_bits(before, whole(model, optimizer))
            model.weight.grad = dense
        optimizer.step()
        train(model, optimizer, range(LOCAL + 1, ROUND + 1), backend.rank, 2)
        return params_of(model)

    a, b = on_threads(2, run)
    assert same_bits(a, b)


def test_clipping_in_a_local_step_is_by_the_ranks_own_norm():
    """beta1 = 0 and equal steps: u_i / D of one local step is lr g_i / (||g_i|| D)."""

    def run(backend):
        p = nn.Parameter(torch.zeros(4, dtype=torch.float64))
        optimizer = ZeroOneAdam(
            [p], lr=0.1, betas=(0.0, 0.9), max_grad_norm=1.0, backend=backend,
            variance=VariancePolicy(1, 1), sync=SyncPolicy(2, None, 2),
        )  # fmt: skip
        for size in (0.5, 3.0 + backend.rank):
            before = p.detach().clone()
            p.grad = torch.full_like(p, size / 2)
            optimizer.step()
        return (p.detach() - before)[0].item()

    for moved in on_threads(2, run):
        assert moved == pytest.approx(-0.1 * 0.5 / 0.25, rel=1e-5)  # g = 1/2 after clipping; sqrt(v) = 1/4


def test_a_rank_that_never_joins_the_round_is_an_error_that_names_the_step():
    def run(backend):
        model = Toy()
        optimizer = make(model, backend)
        train(model, optimizer, range(ROUND), backend.rank, 2)
        if backend.rank == 0:
            with pytest.raises(CollectiveError, match=f"step {ROUND + 1}, agreement"):
                train(model, optimizer, range(ROUND, ROUND + 1), backend.rank, 2)

    ThreadWorld(2, timeout=1.0).run(run)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"variance": {"kappa": 0}}, "kappa must be an int >= 1, got 0"),
        ({"variance": {"stop": 0}}, "stop must be .auto. or an int >= 1, got 0"),
        ({"variance": 5000.0}, "variance must be a VariancePolicy or a mapping of its arguments, .*got 5000.0"),
        ({"variance": {"stops": 10}}, "no 'variance_stops'; there are variance_kappa, variance_stop"),
        ({"sync": {"first": 0}}, "first must be an int >= 1, got 0"),
        ({"sync": {"first": 4, "longest": 2}}, "longest must be at least first, 4, got 2"),
        ({"sync": {"double_every": -1}}, "double_every must be None or an int >= 1, got -1"),
        ({"sync": {"longest": True}}, "longest must be an int >= 1, got True"),
        ({"lr": -1.0}, "lr must be a number >= 0"),
        ({"betas": (0.9, 1.0)}, "betas must be"),
        ({"eps": -1.0}, "eps must be"),
        ({"weight_decay": -1.0}, "weight_decay must be"),
        ({"maximize": 1}, "maximize must be"),
        ({"overlap": True, "max_grad_norm": 1.0}, "exclude each other"),
    ],
)
def test_a_wrong_setting_on_one_rank_is_an_error_on_all(settings, message):
    def run(backend):
        with pytest.raises(ValueError, match=message):
            make(Toy(), backend, **(settings if backend.rank == 1 else {}))

    on_threads(2, run)


def test_ranks_with_different_schedules_are_refused():
    def run(backend):
        with pytest.raises(ValueError, match="differ between ranks: rank 1"):
            make(Toy(), backend, sync=SyncPolicy(longest=16 - backend.rank))

    on_threads(2, run)


def test_a_policy_that_is_changed_between_rounds_waits_for_the_round():
    """A refresh may not fall between two rounds: D has to stay."""

    def run(backend):
        model = Toy()
        optimizer = make(model, backend)
        train(model, optimizer, range(LOCAL + 1), backend.rank, 2)
        optimizer.param_groups[0].update(variance_kappa=1000, variance_stop=1000)
        kinds = []
        for step in range(LOCAL + 1, LOCAL + 4):
            kinds.append(kind(optimizer))
            train(model, optimizer, range(step, step + 1), backend.rank, 2)
        assert kinds == ["compressed", "exact", "exact"]
        return params_of(model)

    a, b = on_threads(2, run)
    assert same_bits(a, b)


# state ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("half", [EXACT, 5, 8, 9, LOCAL, LOCAL + 1, ROUND, ROUND + 1])
def test_a_resumed_run_equals_one_never_stopped(world_size, dtype, half):
    """Between rounds too, and from the parameters of rank 0 alone: where a rank was follows from its state."""

    def straight(backend):
        model = Toy(dtype)
        optimizer = make(model, backend, weight_decay=0.1)
        train(model, optimizer, range(half), backend.rank, world_size)
        saved = through_a_file([model.state_dict(), *split_state_dict(optimizer.state_dict())])
        train(model, optimizer, range(half, half + 9), backend.rank, world_size)
        return saved, whole(model, optimizer)

    results = on_threads(world_size, straight)
    weights, replicated, _ = results[0][0]

    def resumed(backend):
        model = Toy(dtype, seed=9)
        optimizer = make(model, backend, weight_decay=0.1)
        model.load_state_dict(weights)
        parts = [saved[2] for saved, _ in results]
        optimizer.load_state_dict(join_state_dict(replicated, parts, backend.rank, world_size))
        train(model, optimizer, range(half, half + 9), backend.rank, world_size)
        return whole(model, optimizer)

    for a, (_, b) in zip(on_threads(world_size, resumed), results):
        assert same_bits(a, b)


@pytest.mark.parametrize("half", [LOCAL, LOCAL + 1, ROUND, ROUND + 2])
def test_a_resumed_run_equals_one_never_stopped_where_schedulers_change_all_there_is(half):
    """As OneCycleLR changes betas: between a local step, with the old ones, and the state that is saved after it."""

    def steps(model, optimizer, numbers, rank):
        for step in numbers:
            train(model, optimizer, range(step, step + 1), rank, 2)
            numbers_now = {"lr": 1e-2 / (step + 1), "betas": (0.95 - step / 100, 0.999 - step / 1000)}
            optimizer.param_groups[0].update(numbers_now, eps=1e-6 * (step + 1), weight_decay=0.1 / (step + 1))

    def straight(backend):
        model = Toy()
        optimizer = make(model, backend, weight_decay=0.1)
        steps(model, optimizer, range(half), backend.rank)
        saved = through_a_file([model.state_dict(), *split_state_dict(optimizer.state_dict())])
        now = params_of(model)
        steps(model, optimizer, range(half, half + 6), backend.rank)
        return saved, now, whole(model, optimizer)

    results = on_threads(2, straight)
    weights, replicated, _ = results[0][0]

    def resumed(backend):
        model = Toy(seed=9)
        optimizer = make(model, backend, weight_decay=0.1)
        model.load_state_dict(weights)
        parts = [saved[2] for saved, *_ in results]
        optimizer.load_state_dict(join_state_dict(replicated, parts, backend.rank, 2))
        now = params_of(model)
        steps(model, optimizer, range(half, half + 6), backend.rank)
        return now, whole(model, optimizer)

    for (now, end), (_, then, straight_end) in zip(on_threads(2, resumed), results):
        assert same_bits(now, then)
        assert same_bits(end, straight_end)


def test_a_state_without_the_betas_of_its_local_steps_has_those_of_its_group():
    """As states were saved that did not have them."""

    def run(backend):
        def made():
            model = Toy()
            params = [{"params": list(model.parameters()), "betas": (0.8, 0.95), "eps": 1e-4}]
            return model, ZeroOneAdam(params, lr=1e-2, variance=VARIANCE, sync=SYNC, backend=backend)

        model, optimizer = made()
        train(model, optimizer, range(LOCAL + 1), backend.rank, 2)
        state = through_a_file(optimizer.state_dict())
        for key in ("local_betas", "local_eps"):
            del state["param_groups"][0][key]
        again, loaded = made()
        again.load_state_dict(model.state_dict())
        loaded.load_state_dict(state)
        assert loaded.replicas_differ
        assert same_bits(params_of(again), params_of(model))

    on_threads(2, run)


def test_what_differs_between_ranks_is_saved_between_rounds_only():
    def run(backend):
        model = Toy()
        optimizer = make(model, backend)
        train(model, optimizer, range(LOCAL), backend.rank, 2)
        all_alike, at_a_round = split_state_dict(optimizer.state_dict())
        train(model, optimizer, range(LOCAL, LOCAL + 2), backend.rank, 2)
        replicated, between = split_state_dict(optimizer.state_dict())
        assert set(at_a_round["state"][0]) == {"worker_error", "server_error"}
        assert set(between["state"][0]) == {"worker_error", "server_error", "exp_avg", "mean_momentum"}
        mine = [(e["exp_avg"], e.pop("exp_avg"), e.pop("mean_momentum"))[1:] for e in replicated["state"].values()]
        optimizer.synchronize()
        synchronized, _ = split_state_dict(optimizer.state_dict())
        same = tensors_in(all_alike) + tensors_in(replicated) + tensors_in(synchronized)
        return same, mine, replicated["param_groups"]

    a, b = on_threads(2, run)
    assert same_bits(a[0], b[0])
    assert a[2] == b[2]
    assert not same_bits([t for ts in a[1] for t in ts], [t for ts in b[1] for t in ts])


@pytest.mark.parametrize("old", [2, 3])
@pytest.mark.parametrize("new", [1, 2, 3, 4])
def test_at_another_world_size_the_mean_model_goes_on(old, new):
    def save(backend):
        model = Toy(torch.float64)
        optimizer = make(model, backend)
        train(model, optimizer, range(LOCAL + 2), backend.rank, old)
        return model.state_dict(), *split_state_dict(optimizer.state_dict()), params_of(model)

    saved = on_threads(old, save)

    def load(backend):
        model = Toy(torch.float64)
        model.load_state_dict(saved[0][0])
        optimizer = make(model, backend)
        optimizer.load_state_dict(join_state_dict(saved[0][1], [s[2] for s in saved], backend.rank, new))
        loaded = params_of(model)
        assert optimizer.replicas_differ == (new > 1)  # or what is saved now would be taken for the middle of a round
        train(model, optimizer, range(LOCAL + 2, ROUND + 1), backend.rank, new)
        return loaded, params_of(model)

    results = on_threads(new, load)
    for r, (loaded, later) in enumerate(results):
        for i, p in enumerate(loaded):
            mean = saved[r][3][i] if old == new else sum(s[3][i] for s in saved) / old
            torch.testing.assert_close(p, mean, rtol=1e-12, atol=1e-13)
        assert same_bits(later, results[0][1])


def test_with_the_state_of_rank_0_alone_ranks_go_on_from_its_model_and_meet():
    def run(backend, saved=None):
        model = Toy()
        optimizer = make(model, backend)
        if saved is None:
            train(model, optimizer, range(LOCAL + 2), backend.rank, 2)
            return model.state_dict(), optimizer.state_dict()
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        loaded = params_of(model)
        train(model, optimizer, range(LOCAL + 2, ROUND + 1), backend.rank, 2)
        return loaded, params_of(model)

    rank_0 = on_threads(2, run)[0]
    (a, later), (b, other) = on_threads(2, partial(run, saved=rank_0))
    assert same_bits(a, b)
    assert same_bits(a, [t for n, t in rank_0[0].items()])
    assert same_bits(later, other)


def test_what_another_rank_had_between_rounds_is_not_taken_for_ones_own(caplog):
    """With the state of rank 0 and the own part of rank 1, rank 1 has all it needs. Nobody can tell on rank 0 whose
    momenta are in that state: what it has gathered since the round counts as nothing."""

    def run(backend, saved=None):
        model = Toy()
        optimizer = make(model, backend)
        if saved is None:
            train(model, optimizer, range(LOCAL + 2), backend.rank, 2)
            return optimizer.state_dict()
        optimizer.load_state_dict(saved)
        return [optimizer.state[p]["mean_momentum"].clone() for p in model.parameters() if p.requires_grad]

    first, second = on_threads(2, run)
    loaded = on_threads(2, partial(run, saved={**first, "residuals": second["residuals"]}))
    assert not any(t.any() for t in loaded[0])
    assert same_bits(loaded[1], [second["state"][i]["mean_momentum"] for i in sorted(second["state"])])
    assert not same_bits(*loaded)
    assert "ZeroOneAdam: what is each rank's own (its momenta between two rounds) is a mixture" in caplog.text


def test_synchronize_keeps_momentum_away_from_where_the_variance_is_0():
    def run(backend):
        mine, optimizer = fixed_gradients(backend, LOCAL + 2)
        optimizer.synchronize()
        state = optimizer.state[mine[2]]
        dead = state["exp_avg_sq"] == 0
        return int(dead.sum()), state["exp_avg"][dead].abs().sum().item(), state["exp_avg"].abs().sum().item()

    for dead, there, everywhere in on_threads(2, run):
        assert dead >= 4
        assert there == 0 < everywhere


@pytest.mark.parametrize("how", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_a_copy_made_between_rounds_goes_on_like_the_original(how):
    def run(backend):
        model = Toy()
        optimizer = make(model, backend)
        optimizer.model = model  # so that the copy's parameters are those of a model
        train(model, optimizer, range(LOCAL + 2), backend.rank, 1)
        both = copy.deepcopy({"model": model, "optimizer": optimizer}) if how is copy.deepcopy else None
        if both is None:
            both = pickle.loads(pickle.dumps({"model": model, "optimizer": optimizer}))
        assert same_bits(params_of(model), params_of(both["model"]))
        train(model, optimizer, range(LOCAL + 2, 30), backend.rank, 1)
        train(both["model"], both["optimizer"], range(LOCAL + 2, LOCAL + 3), backend.rank, 1)
        opened = both["optimizer"].topology.replicas[0].channels
        assert opened is None or how is not copy.deepcopy, "opening them communicates"
        train(both["model"], both["optimizer"], range(LOCAL + 3, 30), backend.rank, 1)
        return same_bits(params_of(model), params_of(both["model"]))

    world = 2 if how is copy.deepcopy else 1
    assert all(on_threads(world, run))


def test_casting_the_model_between_rounds_keeps_where_it_is():
    def run(backend):
        model = Toy()
        optimizer = make(model, backend)
        train(model, optimizer, range(LOCAL + 1), backend.rank, 2)
        model.double()
        train(model, optimizer, range(LOCAL + 1, ROUND + 1), backend.rank, 2)
        return params_of(model)

    def as_it_was(backend):
        model = Toy()
        train(model, make(model, backend), range(ROUND + 1), backend.rank, 2)
        return params_of(model)

    a, b = on_threads(2, run)
    assert same_bits(a, b)
    for p, q in zip(a, on_threads(2, as_it_was)[0]):
        torch.testing.assert_close(p.float(), q, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_memory_is_what_the_docstring_says(world_size):
    n = 2**12

    def run(backend):
        optimizer = ZeroOneAdam([nn.Parameter(torch.zeros(n))], backend=backend)
        tensors = [t for bucket in optimizer.buckets for t in bucket.buffers.values()]
        tensors += [
            t for b in optimizer.buckets if b.feedback is not None for t in (b.feedback.worker, b.feedback.server)
        ]
        return sum(t.nbytes for t in tensors) / (4 * n)

    expected = 5 + 1 / world_size if world_size > 1 else 4
    assert on_threads(world_size, run) == [expected] * world_size


# the mean model ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inside_averaged_the_model_is_the_mean_and_afterwards_as_it_was(dtype):
    def run(backend, look):
        model = Toy(dtype)
        optimizer = make(model, backend, weight_decay=0.1)
        seen, traffic = [], []
        for step in range(30):
            train(model, optimizer, range(step, step + 1), backend.rank, 3)
            traffic.append(optimizer.comm_stats()["step"]["bytes"])
            if look:
                before, calls, apart = params_of(model), backend.calls, optimizer.replicas_differ
                with optimizer.averaged():
                    with optimizer.averaged():
                        seen.append((before, params_of(model)))
                    for forbidden in (optimizer.step, optimizer.synchronize, lambda: optimizer.load_state_dict({})):
                        with pytest.raises(RuntimeError, match="averaged"):
                            forbidden()
                assert same_bits(before, params_of(model))
                assert (backend.calls > calls) == apart
                assert optimizer.comm_stats()["step"]["bytes"] == traffic[-1]
        return seen, whole(model, optimizer), traffic

    looked, plain = on_threads(3, partial(run, look=True)), on_threads(3, partial(run, look=False))
    assert all(same_bits(a[1], b[1]) and a[2] == b[2] for a, b in zip(looked, plain))
    tolerance = {"rtol": 1e-5, "atol": 1e-7} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 1e-3}
    for step in range(30):
        means = [seen[step][1] for seen, _, _ in looked]
        assert same_bits(means[0], means[1])
        for i, mean in enumerate(means[0]):
            own = torch.stack([seen[step][0][i].double() for seen, _, _ in looked]).mean(0)
            torch.testing.assert_close(mean.double(), own, **tolerance)


@pytest.mark.parametrize("call", ["averaged", "synchronize"])
def test_the_mean_is_refused_on_all_ranks_while_a_round_is_under_way_on_one(call):
    def run(backend):
        model = Used()
        optimizer = make(model, backend, overlap=True, bucket_mb=1e-4)
        train(model, optimizer, range(ROUND), backend.rank, 2)
        before = whole(model, optimizer)
        if backend.rank == 1:
            backward(model, ROUND, 1, 2)
        error, message = [(RuntimeError, "rank 1 cannot take part"), (ValueError, "has begun the next step")][
            backend.rank
        ]
        with pytest.raises(error, match=message):
            getattr(optimizer, call)().__enter__() if call == "averaged" else optimizer.synchronize()
        assert same_bits(before, whole(model, optimizer))
        if backend.rank == 0:
            backward(model, ROUND, 0, 2)
        optimizer.step()
        return params_of(model)

    a, b = on_threads(2, run)
    assert same_bits(a, b)


@pytest.mark.parametrize("nodes", [1, 2])
def test_synchronize_ends_the_local_steps_with_the_mean(nodes):
    def run(backend):
        model, rank = Toy(torch.float64), backend.rank
        optimizer = make(model, backend.nodes(nodes) if nodes > 1 else backend)
        train(model, optimizer, range(LOCAL + 2), rank, 4)
        apart = params_of(model)
        optimizer.synchronize()
        met, calls = params_of(model), backend.calls
        assert not optimizer.replicas_differ
        optimizer.synchronize()
        assert backend.calls == calls
        kinds = []
        for step in range(LOCAL + 2, ROUND + 1):
            kinds.append(kind(optimizer))
            train(model, optimizer, range(step, step + 1), rank, 4)
        assert kinds == ["local", "compressed"]
        return apart, met, params_of(model)

    results = on_threads(4, run)
    for i, mean in enumerate(results[0][1]):
        torch.testing.assert_close(mean, sum(r[0][i] for r in results) / 4, rtol=1e-12, atol=1e-14)
    assert all(same_bits(results[0][1], r[1]) and same_bits(results[0][2], r[2]) for r in results)


def test_evaluating_between_rounds_is_reported_once_with_what_to_call(caplog):
    def run(backend):
        model = Toy()
        optimizer = make(model, backend)
        optimizer.warn_in_evaluation(model)

        def look():
            model.eval()
            model(tokens(0, 0, 1))
            model.train()

        train(model, optimizer, range(LOCAL), backend.rank, 2)
        look()
        assert pickle.loads(pickle.dumps(model)).eval()(tokens(0, 0, 1)) > 0
        train(model, optimizer, range(LOCAL, LOCAL + 2), backend.rank, 2)
        with optimizer.averaged():
            look()
        if backend.rank == 0:  # which is the one that speaks
            assert "evaluated" not in caplog.text
        look()
        look()

    with caplog.at_level(logging.WARNING, "commopt"):
        on_threads(2, run)
    assert caplog.text.count("optimizer.synchronize()") == 1


def test_optimizers_without_local_steps_have_nothing_to_synchronise():
    optimizer = ZeroOneAdam(Toy().parameters(), backend=LocalBackend())
    optimizer.synchronize()
    with optimizer.averaged(), pytest.raises(RuntimeError, match="leave it first"):
        optimizer.step()
    assert not optimizer.replicas_differ
