"""Parameters that are frozen, or unfrozen, while a run goes on: what becomes of buckets that are made anew."""

from __future__ import annotations

import copy
import functools
import operator
import pickle
import zlib

import pytest
import torch
from every import EVERY, every_communicating, every_outer
from torch import nn
from worlds import Used, backward, on_threads, params_of, same_bits, tensors_in, train

from commopt import OneBitAdam
from commopt.agreement.calls import OutOfStep, StepRefused
from commopt.comm import LocalBackend
from commopt.state import following, packing


def run_until(name, backend, later):
    """A run in which a layer has become trainable, or is trained no longer, in several buckets."""
    model = Used()
    model.bias.requires_grad_(later == "frozen")
    optimizer = EVERY[name](model.parameters(), lr=1e-2, bucket_mb=1.2e-4, backend=backend)
    train(model, optimizer, range(1), backend.rank, 2)
    model.bias.requires_grad_(True)
    train(model, optimizer, range(1, 4), backend.rank, 2)
    model.weight.requires_grad_(later != "frozen")
    return model, optimizer


def of_ranks(optimizer):
    """All that is saved, and the layout of the buckets."""
    numbers = {id(p): i for i, p in enumerate(optimizer.params)}
    return tensors_in(optimizer.state_dict()), [[numbers[id(p)] for p in bucket.params] for bucket in optimizer.buckets]


@pytest.mark.parametrize("later", ["frozen", "unfrozen"])
@every_communicating
def test_a_copy_goes_on_as_the_original_would(name, later):
    def run(backend):
        model, optimizer = run_until(name, backend, later)
        twin, other = copy.deepcopy((model, optimizer))
        for m in (model, twin):
            m.weight.requires_grad_(True)
        (mine, layout), (theirs, same) = of_ranks(optimizer), of_ranks(other)
        assert layout == same
        assert same_bits(mine, theirs)
        assert name not in ("OneBitAdam", "OneBitLamb") or any(r.any() for r in residuals_of(optimizer, model.weight))
        for m, o in ((model, optimizer), (twin, other)):
            train(m, o, range(4, 7), backend.rank, 2)
        assert same_bits(params_of(model), params_of(twin))
        assert same_bits(of_ranks(optimizer)[0], of_ranks(other)[0])

    on_threads(2, run)


@pytest.mark.parametrize("how", ["exchanged", "rebuilt"])
@pytest.mark.parametrize("then", [0, 1], ids=["at once", "a step later"])
@every_communicating
def test_nothing_is_lost_where_buckets_are_made_anew_behind_an_unfrozen_layer(name, then, how, caplog):
    """By ``rebind()``, and where a model is moved or cast."""

    def run(backend):
        model = Used()
        model.bias.requires_grad_(False)
        optimizer = EVERY[name](model.parameters(), lr=1e-2, bucket_mb=1.2e-4, backend=backend)
        train(model, optimizer, range(4), backend.rank, 2)
        model.bias.requires_grad_(True)
        train(model, optimizer, range(4, 4 + then), backend.rank, 2)
        twin, other = copy.deepcopy((model, optimizer))
        if how == "exchanged":
            for path, p in list(twin.named_parameters()):
                setattr(twin, path, nn.Parameter(p.detach().clone(), p.requires_grad))
            other.param_groups[0]["params"][:] = twin.parameters()
            other.rebind()
        else:
            following.rebuild(other, other.all_state(), packing.origin_here(other), packing.runs_of(other))
        for m, o in ((model, optimizer), (twin, other)):
            train(m, o, range(4 + then, 9), backend.rank, 2)
        assert same_bits(params_of(model), params_of(twin))
        assert [sorted(r) for r in of_ranks(optimizer)[1]] == [sorted(r) for r in of_ranks(other)[1]]
        assert same_bits(of_ranks(optimizer)[0], of_ranks(other)[0])

    on_threads(2, run)
    assert "start again from 0" not in caplog.text


def residuals_of(optimizer, p):
    return list(optimizer.residuals[p].values())


@pytest.mark.parametrize("later", ["frozen", "unfrozen"])
def test_a_model_that_is_cast_keeps_state_and_residuals_of_all(later, caplog):
    def run(backend):
        model, optimizer = run_until("OneBitAdam", backend, later)
        before, layout = of_ranks(optimizer)
        model.double()
        following.follow_parameters(optimizer)
        after, same = of_ranks(optimizer)
        assert layout == same
        assert all(torch.equal(a.double(), b.double()) for a, b in zip(before, after))
        assert optimizer.state[model.weight]["exp_avg"].dtype == torch.float64
        model.weight.requires_grad_(True)
        train(model, optimizer, range(4, 6), backend.rank, 2)

    on_threads(2, run)
    assert "residuals" not in caplog.text


def test_a_model_that_is_cast_in_part_has_its_state_in_buckets_of_each_dtype():
    def run(backend):
        model, optimizer = run_until("OneBitAdam", backend, "frozen")
        before = [optimizer.state[p]["exp_avg"].clone() for p in (model.weight, model.embedding)]
        model.weight.data = model.weight.data.double()
        following.follow_parameters(optimizer)
        after = [optimizer.state[p]["exp_avg"] for p in (model.weight, model.embedding)]
        assert [t.dtype for t in after] == [torch.float64, torch.float32]
        assert all(torch.equal(a.double(), b.double()) for a, b in zip(before, after))

    on_threads(2, run)


def test_what_is_pickled_with_its_model_keeps_the_state_of_what_is_frozen():
    model = Used()
    optimizer = OneBitAdam(model.parameters(), lr=1e-2, backend=LocalBackend())
    train(model, optimizer, range(3))
    model.weight.requires_grad_(False)
    twin, other = pickle.loads(pickle.dumps((model, optimizer)))
    assert same_bits(tensors_in(optimizer.state_dict()), tensors_in(other.state_dict()))
    for m, o in ((model, optimizer), (twin, other)):
        m.weight.requires_grad_(True)
        train(m, o, range(3, 6))
    assert same_bits(params_of(model), params_of(twin))


@pytest.mark.parametrize("when", [3, 4])
def test_what_one_rank_alone_freezes_between_two_rounds_is_named_in_the_next(when):
    """Of 0/1 Adam, whose first local step says what moves until the round: steps 4 and 5 are local, 6 ends that."""

    def run(backend):
        model = Used()
        optimizer = EVERY["ZeroOneAdam"](model.parameters(), lr=1e-2, backend=backend)
        train(model, optimizer, range(when), backend.rank, 2)
        number = [id(p) for p in model.parameters()].index(id(model.bias))
        model.bias.requires_grad_(backend.rank == 0)
        train(model, optimizer, range(when, when + 1), backend.rank, 2)
        model.bias.requires_grad_(True)
        if when == 4:  # it had moved already
            train(model, optimizer, range(when + 1, 9), backend.rank, 2)
            return params_of(model)
        with pytest.raises(
            RuntimeError, match=rf"step 6, .* frozen since the last round is \[{number}, .* on rank 1 and"
        ):
            train(model, optimizer, range(when + 1, 9), backend.rank, 2)

    a, b = on_threads(2, run)
    assert when == 3 or same_bits(a, b)


def unfrozen_twice(name, backend, **settings):
    """A run in which two layers have become trainable, one after the other."""
    model, optimizer = made(name, backend, "as at first", **settings)
    train(model, optimizer, range(1), backend.rank, 2)
    model.bias.requires_grad_(True)
    train(model, optimizer, range(1, 3), backend.rank, 2)
    model.weight.requires_grad_(True)
    train(model, optimizer, range(3, 6), backend.rank, 2)
    return model, optimizer


def made(name, backend, way, **settings):
    model = Used()
    for p in (model.bias, model.weight):
        p.requires_grad_(way == "as at the end")
    return model, EVERY[name](model.parameters(), lr=1e-2, backend=backend, **settings)


@pytest.mark.parametrize("way", ["as at first", "as at the end"])
@every_communicating
def test_a_run_is_resumed_to_the_bit_whatever_is_frozen_where_its_optimizer_is_made(name, way, caplog):
    def run(backend):
        model, optimizer = unfrozen_twice(name, backend)
        other, resumed = made(name, backend, way)
        other.load_state_dict(model.state_dict())
        resumed.load_state_dict(optimizer.state_dict())
        for p in (other.bias, other.weight):
            p.requires_grad_(True)
        assert of_ranks(optimizer)[1] == of_ranks(resumed)[1]
        assert same_bits(of_ranks(optimizer)[0], of_ranks(resumed)[0])
        train(model, optimizer, range(6, 9), backend.rank, 2)
        train(other, resumed, range(6, 9), backend.rank, 2)
        assert same_bits(params_of(model), params_of(other))

    on_threads(2, run)
    assert "start again from 0" not in caplog.text


@every_communicating
def test_a_layer_that_is_unfrozen_where_a_run_is_resumed_is_as_one_that_is_unfrozen_between_two_steps(name):
    def run(backend):
        model, optimizer = made(name, backend, "as at first")
        train(model, optimizer, range(6), backend.rank, 2)
        other, resumed = made(name, backend, "as at the end")
        other.load_state_dict(model.state_dict())
        resumed.load_state_dict(optimizer.state_dict())
        for p in (model.bias, model.weight):
            p.requires_grad_(True)
        train(model, optimizer, range(6, 9), backend.rank, 2)
        train(other, resumed, range(6, 9), backend.rank, 2)
        assert same_bits(params_of(model), params_of(other))
        assert of_ranks(optimizer)[1] == of_ranks(resumed)[1]
        assert same_bits(of_ranks(optimizer)[0], of_ranks(resumed)[0])

    on_threads(2, run)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_run_whose_parameters_have_moved_to_another_group_is_resumed_to_the_bit(overlap):
    def groups(model, moved):
        trained = [p for p in model.parameters() if p.requires_grad]
        late = [p for p in trained if p is model.positions or (moved and p is model.weight)]
        return [{"params": [p for p in trained if all(p is not q for q in late)]}, {"params": late, "lr": 3e-3}]

    def run(backend):
        model, other = Used(), Used()
        optimizer, resumed = (
            OneBitAdam(groups(m, moved), lr=1e-2, freeze_step=2, bucket_mb=1e-4, overlap=overlap, backend=backend)
            for m, moved in ((model, False), (other, True))
        )
        train(model, optimizer, range(4), backend.rank, 2)
        for group, moved in zip(optimizer.param_groups, groups(model, True)):
            group["params"] = moved["params"]
        optimizer.state_dict()  # whose buckets are of the new groups
        train(model, optimizer, range(4, 6), backend.rank, 2)
        other.load_state_dict(model.state_dict())
        resumed.load_state_dict(optimizer.state_dict())
        train(model, optimizer, range(6, 9), backend.rank, 2)
        train(other, resumed, range(6, 9), backend.rank, 2)
        assert same_bits(params_of(model), params_of(other))

    on_threads(2, run)


@pytest.mark.parametrize("anew", ["saved", "loaded"])
def test_buckets_that_are_made_anew_between_two_steps_start_in_backward(anew):
    def run(backend):
        model = Used()
        trained = [p for p in model.parameters() if p.requires_grad]
        groups = [{"params": trained[:1]}, {"params": trained[1:]}]
        settings = {"freeze_step": 2, "bucket_mb": 1e-4, "overlap": True, "backend": backend}
        optimizer = OneBitAdam(groups, **settings)
        train(model, optimizer, range(4), backend.rank, 2)
        optimizer.param_groups[0]["params"].append(optimizer.param_groups[1]["params"].pop())
        if anew == "saved":
            optimizer.state_dict()
        else:
            optimizer.load_state_dict(optimizer.state_dict())
        backward(model, 4, backend.rank, 2)
        assert optimizer.step_in_flight().started == len(optimizer.buckets) - 1 > 2
        optimizer.step()

    on_threads(2, run)


def test_buckets_that_a_loaded_state_makes_anew_start_in_backward():
    def run(backend):
        settings = {"overlap": True, "bucket_mb": 2e-4}
        model, optimizer = unfrozen_twice("OneBitAdam", backend, **settings)
        other, resumed = made("OneBitAdam", backend, "as at the end", **settings)
        train(other, resumed, range(1), backend.rank, 2)
        before = of_ranks(resumed)[1]
        other.load_state_dict(model.state_dict())
        resumed.load_state_dict(optimizer.state_dict())
        assert of_ranks(resumed)[1] == of_ranks(optimizer)[1] != before
        backward(other, 6, backend.rank, 2)
        assert resumed.step_in_flight().started == len(resumed.buckets) - 1 > 1
        resumed.step()

    on_threads(2, run)


def test_ranks_that_have_other_buckets_are_told_before_anything_is_sent():
    def run(backend):
        model, optimizer = unfrozen_twice("OneBitAdam", backend)
        other, resumed = made("OneBitAdam", backend, "as at the end")
        state = optimizer.state_dict()
        if backend.rank == 1:
            del state["residuals"]
        other.load_state_dict(model.state_dict())
        resumed.load_state_dict(state)
        with pytest.raises(
            OutOfStep, match="step 7, agreement of the ranks on it: the ranks have their parameters in o"
        ):
            train(other, resumed, range(6, 7), backend.rank, 2)

    on_threads(2, run)


@every_outer
@pytest.mark.parametrize("how", ["loaded", "unfrozen"])
def test_ranks_of_rounds_that_have_other_buckets_are_told_before_anything_is_sent(name, how):
    """Of two layers of one size, in other order: what is sent would be taken for the other's."""

    def run(backend):
        layers = [nn.Parameter(torch.full((5,), float(x))) for x in (0, 100)]
        trained = nn.Parameter(torch.zeros(5))
        optimizer = EVERY[name]([trained, *layers], lr=1e-2, backend=backend, bucket_mb=1e-5)
        first, second = layers if backend.rank == 0 else reversed(layers)

        def steps(n):
            for _ in range(n):
                for p in (trained, *layers):
                    p.grad = torch.ones(5) if p.requires_grad else None
                optimizer.step()

        if how == "loaded":
            state = optimizer.state_dict()
            state["residuals"]["buckets"] = [[0], [1], [2]] if backend.rank == 0 else [[0], [2], [1]]
            state["residuals"]["layout"] = zlib.crc32(str(state["residuals"]["buckets"]).encode())
            del state["residuals"]["digest"]
            optimizer.load_state_dict(state)
        else:
            for p in layers:
                p.requires_grad_(False)
            optimizer = EVERY[name]([trained, *layers], lr=1e-2, backend=backend, bucket_mb=1e-5)
            for p in (first, second):
                p.requires_grad_(True)
                steps(1)
        with pytest.raises((OutOfStep, StepRefused), match="other buckets"):
            steps(4)
        with pytest.raises((OutOfStep, StepRefused), match="other buckets"), optimizer.averaged():
            pass

    on_threads(2, run)


def within_averaged(optimizer):
    with optimizer.averaged():
        pass


@pytest.mark.parametrize("name", ["ZeroOneAdam", "CSER", "QSparseLocalSGD", "LocalSGD", "Gossip"])
@pytest.mark.parametrize("take_mean", [within_averaged, operator.methodcaller("synchronize")])
def test_ranks_that_have_other_buckets_take_no_mean(name, take_mean):
    def run(backend):
        model, optimizer = unfrozen_twice(name, backend)
        train(model, optimizer, range(6, 7), backend.rank, 2)
        assert optimizer.replicas_differ
        other, resumed = made(name, backend, "as at the end")
        state = optimizer.state_dict()
        if backend.rank == 1:
            del state["residuals"]
        other.load_state_dict(model.state_dict())
        resumed.load_state_dict(state)
        before = params_of(other)
        with pytest.raises(OutOfStep, match="other buckets"):
            take_mean(resumed)
        assert same_bits(before, params_of(other))

    on_threads(2, run)


def test_a_state_that_one_rank_takes_between_backward_and_step_leaves_the_step_in_flight_alone():
    """Parameters were put into another group, while the first bucket waits for one that is not used."""

    def run(backend, takes):
        model = Used()
        model.unused.requires_grad_(True)
        trained = [p for p in model.parameters() if p.requires_grad]
        groups = [{"params": trained[:2]}, {"params": trained[2:]}]
        optimizer = OneBitAdam(groups, freeze_step=2, bucket_mb=1e-4, overlap=True, backend=backend)
        train(model, optimizer, range(4), backend.rank, 2)
        backward(model, 4, backend.rank, 2)
        optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"].pop())
        if takes and backend.rank == 0:
            optimizer.state_dict()
        optimizer.step()
        train(model, optimizer, range(5, 7), backend.rank, 2)
        return params_of(model)

    (alone, _), (one, other) = (on_threads(2, functools.partial(run, takes=takes)) for takes in (False, True))
    assert same_bits(one, other)
    assert same_bits(one, alone)


@every_communicating
def test_in_another_world_what_was_unfrozen_since_has_its_state_when_it_is_unfrozen_again(name):
    """Where buckets are others, too. Saved before that, it still has it."""

    def run(backend):
        model, optimizer = unfrozen_twice(name, backend)
        optimizer.synchronize()
        other, resumed = made(name, backend, "as at first", bucket_mb=2e-4)
        other.load_state_dict(model.state_dict())
        resumed.load_state_dict(optimizer.state_dict())
        kept = resumed.state_dict()
        for p in (other.bias, other.weight):
            p.requires_grad_(True)
        following.follow_parameters(resumed)
        for state in (kept, resumed.state_dict()):
            assert same_bits(shared_in(optimizer.state_dict()), shared_in(state))
        train(other, resumed, range(6, 8), backend.rank, 2)

    on_threads(2, run)


def shared_in(state_dict):
    """What is the same on all ranks."""
    return [t for _, entry in sorted(state_dict["state"].items()) for _, t in sorted(entry.items())]


def with_frozen_bias():
    model = Used()
    optimizer = OneBitAdam(model.parameters(), backend=LocalBackend())
    train(model, optimizer, range(3))
    saved = optimizer.state_dict()
    model.bias.requires_grad_(False)
    other = OneBitAdam(model.parameters(), backend=LocalBackend())
    return model, other, saved, saved["state"][[*map(id, other.params)].index(id(model.bias))]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("exp_avg", torch.zeros(3, 77), r"exp_avg in the loaded state has shape \(3, 77\)"),
        ("exp_avg", torch.tensor(0.0), r"exp_avg in the loaded state has shape \(\)"),
        ("exp_avg", 0.0, "exp_avg in the loaded state is 0.0, not a tensor"),
        ("step", torch.zeros(5), r"step in the loaded state has shape \(5,\)"),
        ("step", "3", "step in the loaded state is '3', not a tensor"),
    ],
)
def test_what_does_not_fit_is_refused_though_the_parameter_is_frozen(name, value, said):
    _, other, saved, entry = with_frozen_bias()
    entry[name] = value
    with pytest.raises(ValueError, match=said):
        other.load_state_dict(saved)


def test_what_is_none_is_not_there_though_the_parameter_is_frozen():
    model, other, saved, entry = with_frozen_bias()
    moment, entry["exp_avg"] = entry["exp_avg_sq"], None
    other.load_state_dict(saved)
    model.bias.requires_grad_(True)
    following.follow_parameters(other)
    assert torch.equal(other.state[model.bias]["exp_avg"], torch.zeros(5))
    assert torch.equal(other.state[model.bias]["exp_avg_sq"], moment)


def test_what_was_put_there_and_does_not_fit_refuses_the_step_in_which_it_is_taken_up():
    model, other, saved, entry = with_frozen_bias()
    other.load_state_dict(saved)
    other.state[model.bias]["exp_avg"] = torch.zeros(77)
    model.bias.requires_grad_(True)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"exp_avg in the loaded state has shape \(77,\)"):
            train(model, other, range(3, 4))
    other.state[model.bias]["exp_avg"] = entry["exp_avg"]
    train(model, other, range(3, 4))
    assert int(other.state[model.bias]["step"]) == 4


def test_the_state_of_an_adam_waits_for_a_frozen_parameter_with_a_second_moment_as_old_as_the_first():
    model = Used()
    adam = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    train(model, adam, range(3))
    i = [*map(id, adam.param_groups[0]["params"])].index(id(model.bias))
    saved = adam.state_dict()["state"][i]
    model.bias.requires_grad_(False)
    other = OneBitAdam(adam.param_groups[0]["params"], backend=LocalBackend())
    other.load_state_dict(adam.state_dict())
    model.bias.requires_grad_(True)
    following.follow_parameters(other)
    found = other.state[model.bias]
    assert (int(found["step"]), int(found["variance_step"])) == (3, 3)
    assert all(torch.equal(found[name], saved[name]) for name in ("exp_avg", "exp_avg_sq"))
