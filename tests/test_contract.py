"""What every torch optimizer does, ours does: hooks, closures, schedulers, copies, pickles, names, saving tools."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import warnings
from functools import cache
from typing import Any

import pytest
import torch
from every import (
    COMMUNICATING,
    EVERY,
    OUTER,
    every,
    every_communicating,
    every_outer,
    every_overlapping,
    every_variant,
    make,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import profile
from worlds import Toy, Used, backward, on_threads, params_of, same_bits, tensors_in, through_a_file, train

from commopt import Lamb, OneBitAdam, Streaming
from commopt.comm import LocalBackend


@cache
def torchs_own():
    """What torch tests Adam with. To import it costs as much as torch itself: not while tests are collected."""
    from torch.testing._internal.common_optimizers import optim_db

    return next(info for info in optim_db if info.optim_cls is torch.optim.Adam)


def supported(kwargs):
    return not set(kwargs) & {"amsgrad", "capturable", "fused", "foreach", "differentiable"} and not any(
        isinstance(b, torch.Tensor) for b in kwargs.get("betas", ())
    )


def test_torchs_own_inputs_for_adam():
    """Every set of arguments that torch tests Adam with and that we take, with Adam's default for its weight decay."""
    cases = [case for case in torchs_own().optim_inputs_func(device="cpu") if supported(case.kwargs)]
    assert len(cases) >= 4
    for case in cases:
        ours, theirs = Toy(), Toy()
        optimizer = OneBitAdam(ours.parameters(), **{"decoupled_weight_decay": False, **case.kwargs})
        reference = torch.optim.Adam(theirs.parameters(), **case.kwargs)
        train(ours, optimizer, range(6))
        train(theirs, reference, range(6))
        assert same_bits(params_of(ours), params_of(theirs)), case.desc


def test_closure():
    model, same = Toy(), Toy()
    optimizer, reference = OneBitAdam(model.parameters()), torch.optim.Adam(same.parameters())

    def closure(m):
        m.zero_grad()
        loss = m(torch.arange(7).view(1, 7))
        loss.backward()
        return loss

    for _ in range(4):
        loss = optimizer.step(lambda: closure(model))
        assert torch.equal(loss, reference.step(lambda: closure(same)))
    assert same_bits(params_of(model), params_of(same))


def test_step_is_no_operation_without_gradients():
    model = Toy()
    optimizer = OneBitAdam(model.parameters(), weight_decay=0.1)
    assert optimizer.step() is None
    assert same_bits(params_of(model), params_of(Toy()))


def test_hooks_fire_around_step_state_dict_and_load_state_dict():
    model, calls = Toy(), []
    optimizer = OneBitAdam(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: calls.append("before step"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after step"))
    optimizer.register_state_dict_pre_hook(lambda *_: calls.append("before save"))
    optimizer.register_state_dict_post_hook(lambda o, s: calls.append("after save"))
    optimizer.register_load_state_dict_pre_hook(lambda o, s: calls.append("before load"))
    optimizer.register_load_state_dict_post_hook(lambda o: calls.append(("after load", o.param_groups[0]["step"])))
    train(model, optimizer, range(1))
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())
    saving = ["before save", "after save", "before load", ("after load", 1)]
    assert calls == ["before step", "after step", *saving, *saving]


def test_a_load_hook_may_change_what_is_loaded():
    model = Toy()
    optimizer = OneBitAdam(model.parameters())
    train(model, optimizer, range(2))
    optimizer.register_load_state_dict_pre_hook(
        lambda o, s: {**s, "state": {k: {**v, "exp_avg": v["exp_avg"] * 2} for k, v in s["state"].items()}}
    )
    before = optimizer.state[model.weight]["exp_avg"].clone()
    optimizer.load_state_dict(optimizer.state_dict())
    assert torch.equal(optimizer.state[model.weight]["exp_avg"], before * 2)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_deep_copy_goes_on_as_the_original_would(world_size):
    def run(backend):
        model = Toy()
        optimizer = OneBitAdam(model.parameters(), lr=1e-2, freeze_step=3, backend=backend)
        train(model, optimizer, range(5), backend.rank, world_size)
        both = copy.deepcopy({"model": model, "optimizer": optimizer})
        assert both["optimizer"].param_groups[0]["params"][0] is next(both["model"].parameters())
        assert {k for k in vars(optimizer) if k[0] != "_"} == {k for k in vars(both["optimizer"]) if k[0] != "_"}
        train(both["model"], both["optimizer"], range(5, 8), backend.rank, world_size)
        untouched = params_of(model)
        train(model, optimizer, range(5, 8), backend.rank, world_size)
        assert same_bits(params_of(model), params_of(both["model"]))
        assert not same_bits(untouched, params_of(model))

    on_threads(world_size, run)


def test_pickle_and_torch_save_of_the_optimizer_itself():
    model = Toy()
    optimizer = OneBitAdam(model.parameters(), lr=1e-2, backend=LocalBackend())
    train(model, optimizer, range(3))
    file = io.BytesIO()
    torch.save((model, optimizer), file)
    file.seek(0)
    copies = [pickle.loads(pickle.dumps((model, optimizer))), torch.load(file, weights_only=False)]
    train(model, optimizer, range(3, 6))
    for other, resumed in copies:
        train(other, resumed, range(3, 6))
        assert same_bits(params_of(model), params_of(other))


def test_a_pickle_has_each_number_once():
    """Though those of a bucket are views of one tensor."""
    params = [nn.Parameter(torch.ones(1000)) for _ in range(20)]
    optimizer = OneBitAdam(params, backend=LocalBackend())
    assert len(pickle.dumps(optimizer)) < 3 * 4 * 20_000 + 100_000


def test_an_optimizer_that_is_unpickled_among_other_ranks_says_so(caplog):
    """Here it is alone, as there is no process group. A copy has the ranks of the original, and says nothing."""

    def kept(backend):
        model = Toy()
        optimizer = OneBitAdam(model.parameters(), lr=1e-2, backend=backend)
        copies = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
        return [other.topology.world_size for other in copies]

    assert on_threads(2, kept) == [[2, 1]] * 2
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert all(text.startswith("OneBitAdam: pickled as one of 2 ranks, unpickled as one of 1: ") for text in told)
    optimizer = OneBitAdam(Toy().parameters(), lr=1e-2)
    assert pickle.loads(pickle.dumps(optimizer)).topology.world_size == 1
    assert len(caplog.records) == 2


def test_repr_shows_the_groups():
    text = repr(OneBitAdam(Toy().parameters(), lr=0.25, freeze_step=7))
    assert text.startswith("OneBitAdam (")
    assert "lr: 0.25" in text
    assert "freeze_step: 7" in text


def test_named_parameters_keep_their_names():
    model = Toy()
    optimizer = OneBitAdam(model.named_parameters(), lr=1e-2)
    train(model, optimizer, range(2))
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["param_names"] == [n for n, _ in model.named_parameters()]
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["param_names"][0] == "embedding"
    unnamed = OneBitAdam(Toy().parameters())
    unnamed.load_state_dict(saved)


@pytest.mark.parametrize("number", range(4))
def test_schedulers(number):
    case = torchs_own().scheduler_inputs[number]
    model, same = Toy(), Toy()
    optimizer, reference = OneBitAdam(model.parameters()), torch.optim.Adam(same.parameters())
    schedulers = [[make(o) for make in case] for o in (optimizer, reference)]
    for step in range(6):
        for m, o, mine in ((model, optimizer, schedulers[0]), (same, reference, schedulers[1])):
            backward(m, step, 0, 1)
            o.step()
            for s in mine:
                s.step(torch.tensor(1.0)) if isinstance(s, torch.optim.lr_scheduler.ReduceLROnPlateau) else s.step()
    assert same_bits(params_of(model), params_of(same))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("freeze_step", [1, 100])
def test_accumulating_small_batches_is_one_large_batch(world_size, freeze_step):
    def run(backend):
        model, large = Toy(torch.float64), Toy(torch.float64)
        optimizer, reference = (
            OneBitAdam(m.parameters(), lr=1e-2, freeze_step=freeze_step, backend=backend) for m in (model, large)
        )
        for step in range(6):
            model.zero_grad()
            large.zero_grad()
            batch = torch.randint(0, 13, (8, 7), generator=torch.Generator().manual_seed(10 * step + backend.rank))
            for half in batch.split(4):
                (model(half) / 2).backward()
            large(batch).backward()
            optimizer.step()
            reference.step()
        return params_of(model), params_of(large)

    for pair in on_threads(world_size, run):
        for a, b in zip(*pair, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("flatten", [False, True])
def test_distributed_checkpoints_get_and_set_state(flatten):
    """get_optimizer_state_dict must find complete state on a fresh optimizer, or it would call step()."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model = Toy()
    optimizer = OneBitAdam(model.parameters(), lr=1e-2, freeze_step=4)
    fresh = get_optimizer_state_dict(model, optimizer, options=options)
    assert optimizer.param_groups[0]["step"] == 0
    train(model, optimizer, range(3))
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    assert saved.keys() == fresh.keys()

    other = copy.deepcopy(model)
    second = OneBitAdam(other.parameters(), lr=1e-2, freeze_step=4)
    set_optimizer_state_dict(other, second, saved, options=options)
    train(model, optimizer, range(3, 5))
    train(other, second, range(3, 5))
    assert same_bits(params_of(model), params_of(other))


def test_state_is_complete_at_construction_and_the_same_on_every_rank():
    def run(backend):
        model = Toy()
        optimizer = OneBitAdam(model.parameters(), freeze_step=2, backend=backend)
        fresh = {k: set(v) for k, v in optimizer.state_dict()["state"].items()}
        train(model, optimizer, range(4), backend.rank, 3)
        assert {k: set(v) for k, v in optimizer.state_dict()["state"].items()} == fresh
        return fresh

    fresh, *others = on_threads(3, run)
    assert all(other == fresh for other in others)
    assert fresh[0] == {"step", "variance_step", "exp_avg", "exp_avg_sq", *OneBitAdam.scalars}
    assert len(fresh) == sum(p.requires_grad for p in Toy().parameters())


def test_state_of_one_rank_has_no_residuals():
    state_dict = OneBitAdam(Toy().parameters()).state_dict()
    assert set(state_dict) == {"state", "param_groups"}
    assert set(state_dict["state"][0]) == {
        "step",
        "variance_step",
        *OneBitAdam.scalars,
        "exp_avg",
        "exp_avg_sq",
    }


def test_the_residuals_take_one_and_a_wth_of_a_buffer():
    def run(backend):
        optimizer = OneBitAdam([nn.Parameter(torch.zeros(4096))], backend=backend)
        residuals = optimizer.state_dict()["residuals"]["state"][0]
        return residuals["worker_error"].numel(), residuals["server_error"].numel()

    assert on_threads(4, run) == [(4096, 1024)] * 4


@pytest.mark.parametrize("memory_format", ["transposed", "channels_last", "slice"])
def test_parameters_and_gradients_of_any_stride(memory_format):
    def make():
        x = torch.randn(4, 6, 3, 5, generator=torch.Generator().manual_seed(0))
        if memory_format == "channels_last":
            x = x.to(memory_format=torch.channels_last)
        elif memory_format == "transposed":
            x = x.transpose(0, 3)
        else:
            x = x[:, ::2]
        return nn.Parameter(x), nn.Parameter(torch.ones(3))

    def run(backend, contiguous):
        p, q = make()
        if contiguous:
            p = nn.Parameter(p.detach().contiguous())
        optimizer = OneBitAdam([p, q], lr=1e-2, freeze_step=2, backend=backend)
        for step in range(6):
            g = torch.randn(p.shape, generator=torch.Generator().manual_seed(step + 100 * backend.rank))
            p.grad, q.grad = torch.empty_like(p).copy_(g), torch.ones(3)
            optimizer.step()
        return p.detach().contiguous(), tensors_in(optimizer.state_dict())

    strided, plain = on_threads(2, lambda b: run(b, False)), on_threads(2, lambda b: run(b, True))
    torch.testing.assert_close(strided[0][0], plain[0][0], rtol=1e-6, atol=1e-7)
    assert torch.equal(strided[0][0], strided[1][0])


# every optimizer ------------------------------------------------------------------------------------------------------


def tree_of(optimizer):
    """All tensors of a state dict, those of a base too."""

    def walk(tree):
        if isinstance(tree, torch.Tensor):
            return [tree]
        return [t for value in tree.values() for t in walk(value)] if isinstance(tree, dict) else []

    return [t.clone() for t in walk(optimizer.state_dict())]


def through_load(optimizer, fresh):
    fresh.load_state_dict(through_a_file(optimizer.state_dict()))
    return fresh


@every
@pytest.mark.parametrize("world_size", [1, 2])
def test_what_users_add_to_state_comes_through_everything(name, world_size):
    """Keys of their own, and values of any kind in a parameter's entry: of one with state, and of a frozen one."""
    notes = {
        "text": "note",
        "number": 3,
        "pair": (1.5, [torch.ones(2)]),
        "tensor": torch.arange(3),
        "own": torch.ones(2),
        "parameter": torch.ones(2),  # also what a rank's own parameters are saved as
        "error": torch.ones(2),
    }

    def added(optimizer, model):
        out = [optimizer.state["x"], optimizer.state["y"]["z"]]
        for p in (model.weight, model.frozen):
            out += [optimizer.state[p][key] for key in notes]
        return repr(out)

    def run(backend):
        model = Toy()
        optimizer = EVERY[name](model.parameters(), lr=1e-2, backend=backend)
        train(model, optimizer, range(1), backend.rank, world_size)
        optimizer.state["x"], optimizer.state["y"] = 1, {"z": torch.ones(1)}
        for p in (model.weight, model.frozen):
            optimizer.state[p].update(copy.deepcopy(notes))
        before = added(optimizer, model)
        train(model, optimizer, range(1, 4), backend.rank, world_size)

        other = Toy()
        other.load_state_dict(model.state_dict())
        second = through_load(optimizer, EVERY[name](other.parameters(), lr=1e-2, backend=backend))
        assert added(second, other) == before
        second.load_state_dict(EVERY[name](Toy().parameters(), backend=backend).state_dict())
        assert "x" not in second.state
        assert "text" not in second.state[other.weight]

        twin, third = copy.deepcopy((model, optimizer))
        assert added(third, twin) == before
        assert third.state[twin.weight]["tensor"] is not optimizer.state[model.weight]["tensor"]
        if world_size == 1:
            twin, third = pickle.loads(pickle.dumps((model, optimizer)))
            assert added(third, twin) == before

        model.double()
        for p in model.parameters():
            p.grad = None
        optimizer.step()  # follows the parameters
        assert added(optimizer, model) == before
        train(twin, third, range(4, 6), backend.rank, world_size)

    on_threads(world_size, run)


@every
@pytest.mark.parametrize("world_size", [1, 2])
def test_loading_and_copying_add_nothing_to_the_groups(name, world_size):
    def keys(optimizer):
        return [set(group) for group in optimizer.param_groups], set(optimizer.defaults)

    def run(backend):
        model = Toy()
        optimizer = EVERY[name](model.parameters(), lr=1e-2, backend=backend)
        train(model, optimizer, range(4), backend.rank, world_size)
        before = keys(optimizer)
        copies = [copy.deepcopy(optimizer)]
        copies += [pickle.loads(pickle.dumps(optimizer))] if world_size == 1 else []
        copies += [through_load(optimizer, EVERY[name](Toy().parameters(), backend=backend))]
        for other in copies:
            assert keys(other) == before
            other.load_state_dict(other.state_dict())
            assert keys(other) == before
        assert keys(optimizer) == before

    on_threads(world_size, run)


@every
def test_hooks_for_the_steps_of_all_optimizers_are_called_once_a_step(name):
    model, calls = Toy(), []
    optimizer = EVERY[name](model.parameters(), lr=1e-2, backend=LocalBackend())
    handles = [
        register_optimizer_step_pre_hook(lambda o, *_: calls.append(("before", o))),
        register_optimizer_step_post_hook(lambda o, *_: calls.append(("after", o))),
    ]
    try:
        with profile() as prof:
            train(model, optimizer, range(3))
    finally:
        for handle in handles:
            handle.remove()
    assert calls == [("before", optimizer), ("after", optimizer)] * 3
    steps = {event.key: event.count for event in prof.key_averages() if event.key.startswith("Optimizer.step#")}
    assert steps == {f"Optimizer.step#{type(optimizer).__name__}.step": 3}


@every_outer
def test_hooks_of_a_base_are_called_and_may_change_its_arguments(name):
    model, same, calls = Toy(), Toy(), []
    optimizer, reference = (EVERY[name](m.parameters(), lr=1e-2, backend=LocalBackend()) for m in (model, same))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.base, 2)  # puts a step of its own into the base
    torch.optim.lr_scheduler.StepLR(reference, 2)
    optimizer.base.register_step_pre_hook(lambda *given: calls.append(("before", *given)) or given[1:])
    optimizer.base.register_step_post_hook(lambda *given: calls.append(("after", *given)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as of a scheduler that sees no step
        train(model, optimizer, range(2))
        scheduler.step()
    assert (
        calls
        == [("before", optimizer.base, (optimizer.base,), {}), ("after", optimizer.base, (optimizer.base,), {})] * 2
    )
    train(same, reference, range(2))
    assert same_bits(params_of(model), params_of(same))

    class Skipping:
        def __init__(self, step):
            self.step, self.calls = step, 0

        def __call__(self):
            self.calls += 1
            return self.step()

    optimizer.base.step = Skipping(optimizer.base.step)  # somebody's own
    train(model, optimizer, range(2, 4))
    assert optimizer.base.step.calls == 2
    assert len(calls) == 8


SCHEDULERS = [
    (lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.05, total_steps=9),),
    (lambda o: torch.optim.lr_scheduler.CyclicLR(o, 1e-3, 1e-2, step_size_up=2),),
]


def learning_rates(make, case):
    """What lr a scheduler sets in 6 steps."""
    p, lrs = nn.Parameter(torch.ones(2)), []
    optimizer = make([p], lr=1e-2)
    schedulers = [make_one(optimizer) for make_one in case]
    for _ in range(6):
        p.grad = torch.ones(2)
        optimizer.step()
        for s in schedulers:
            s.step(torch.tensor(1.0)) if isinstance(s, torch.optim.lr_scheduler.ReduceLROnPlateau) else s.step()
        lrs.append(optimizer.param_groups[0]["lr"])
    assert torch.isfinite(p).all()
    return lrs


@every
def test_every_scheduler_moves_the_lr_as_it_does_elsewhere(name):
    for case in (*torchs_own().scheduler_inputs, *SCHEDULERS):
        assert learning_rates(EVERY[name], case) == learning_rates(torch.optim.Adam, case)


@every_outer
def test_defaults_are_those_of_the_base_too(name):
    optimizer = EVERY[name](Toy().parameters(), lr=1e-2, betas=(0.8, 0.9))
    assert optimizer.defaults["betas"] == (0.8, 0.9)
    assert optimizer.defaults["period"] == 3
    assert optimizer.defaults.keys() >= optimizer.base.defaults.keys()
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert optimizer.param_groups[1]["betas"] == (0.8, 0.9)


def test_hyper_parameters_of_a_base_may_differ_between_ranks():
    """They are no part of what a synchronisation compares."""

    def run(backend):
        model = Toy()
        optimizer = EVERY["DiLoCo"](model.parameters(), lr=1e-2, backend=backend)
        optimizer.param_groups[0]["weight_decay"] = 0.1 * backend.rank
        train(model, optimizer, range(3), backend.rank, 2)
        assert not optimizer.replicas_differ
        return params_of(model)

    a, b = on_threads(2, run)
    assert same_bits(a, b)


@every_overlapping
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_closure_is_run_first_with_overlap(name, world_size):
    def run(backend):
        model, same = Used(), Used()
        optimizer = EVERY[name](model.parameters(), lr=1e-2, backend=backend, overlap=True)
        reference = EVERY[name](same.parameters(), lr=1e-2, backend=backend)

        def closure(t):
            optimizer.zero_grad()
            backward(model, t, backend.rank, world_size)
            return 5.0

        for t in range(4):
            assert optimizer.step(functools.partial(closure, t)) == 5.0
        train(same, reference, range(4), backend.rank, world_size)
        assert same_bits(params_of(model), params_of(same))

    on_threads(world_size, run)


@every
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_that_is_saved_and_loaded_goes_on_to_the_bit(name, world_size):
    """Copied, too; and tensors as learning rates."""

    def run(backend):
        for step in (2, 4, 5):
            model, lr = Toy(), torch.tensor(1e-2)
            optimizer = EVERY[name](model.named_parameters(), lr=lr, backend=backend)
            train(model, optimizer, range(step), backend.rank, world_size)
            other = Toy(seed=4)
            other.load_state_dict(model.state_dict())
            second = through_load(optimizer, EVERY[name](other.named_parameters(), lr=0.5, backend=backend))
            twin, third = copy.deepcopy((model, optimizer))
            for m, o in ((model, optimizer), (other, second), (twin, third)):
                train(m, o, range(step, step + 4), backend.rank, world_size)
            assert second.param_groups[0]["param_names"] == [n for n, _ in model.named_parameters()]
            for m, o in ((other, second), (twin, third)):
                assert same_bits(params_of(model), params_of(m))
                assert same_bits(tree_of(optimizer), tree_of(o))

    on_threads(world_size, run)


@every
def test_what_every_torch_optimizer_refuses_and_takes(name):
    make = EVERY[name]
    with pytest.raises(TypeError, match="ordered collections"):
        make([{"params": set(Toy().parameters())}])
    with pytest.raises((TypeError, ValueError), match=r"iterable of Tensors|torch\.FloatTensor|Tensor"):
        make(torch.zeros(2))
    with pytest.raises(ValueError, match="empty parameter list"):
        make([])
    with pytest.raises(ValueError, match="complex64"):
        make([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
    with pytest.raises(ValueError, match=r"of layout torch\.sparse"):
        make([nn.Parameter(torch.zeros(2, 2).to_sparse())])
    assert len(make([{"params": nn.Parameter(torch.ones(()))}]).param_groups[0]["params"]) == 1
    p = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="more than one parameter group"):
        make([{"params": [p]}, {"params": [p]}])
    optimizer = make([p], lr=1e-2)
    assert optimizer.step() is None
    assert torch.equal(p, torch.ones(3))
    q = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": q, "lr": 0.0})
    p.grad, q.grad = torch.ones(3), torch.ones(2)
    optimizer.step()
    assert not torch.equal(p, torch.ones(3))
    assert torch.equal(q, torch.ones(2))
    optimizer.zero_grad(set_to_none=False)
    assert p.grad.abs().sum() == 0
    optimizer.zero_grad()
    assert p.grad is None


@pytest.mark.parametrize("name", ["OneBitAdam", "CSER", "QSparseLocalSGD", "DiLoCo"])
def test_what_is_frozen_keeps_its_state_where_parameters_are_exchanged(name):
    """Frozen amid a round, exchanged, and trained again: as without the exchange."""

    def run(backend, exchanges):
        params = [nn.Parameter(torch.ones(size)) for size in ((3,), (2, 2))]
        optimizer = make(name, params, backend=backend)

        def steps(n):
            for _ in range(n):
                optimizer.zero_grad()
                sum((p.square() * (1 + backend.rank)).sum() for p in params if p.requires_grad).backward()
                optimizer.step()

        steps(7)
        params[0].requires_grad_(False).grad = None
        if exchanges:
            params[:] = [nn.Parameter(p.detach().clone(), p.requires_grad) for p in params]
            optimizer.param_groups[0]["params"][:] = params
            optimizer.rebind()
        steps(2)
        params[0].requires_grad_(True)
        steps(3)
        optimizer.synchronize()
        return [p.detach() for p in params]

    straight, exchanged = (on_threads(2, lambda b, e=e: run(b, e)) for e in (False, True))
    assert all(same_bits(found, straight[0]) for found in (*straight, *exchanged))


@pytest.mark.parametrize("name", ["ZeroOneAdam", "CSER", "CSER, signs", "QSparseLocalSGD", *OUTER])
@pytest.mark.parametrize("steps", [3, 5])
def test_the_whole_state_of_rank_0_on_every_rank_is_told_and_they_meet(name, steps, caplog):
    """As torch.save() on rank 0 and a load on all leave it: after a round, and between two. A run of one rank has
    nothing that another would lack."""

    def run(backend, saved=None):
        model = Toy()
        optimizer = EVERY[name](model.parameters(), lr=1e-2, backend=backend)
        if saved is None:
            train(model, optimizer, range(steps), backend.rank, backend.world_size)
            return model.state_dict(), through_a_file(optimizer.state_dict())
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        loaded = params_of(model)
        train(model, optimizer, range(steps, steps + 2), backend.rank, backend.world_size)
        optimizer.synchronize()
        return loaded, params_of(model)

    of_two, of_one = on_threads(2, run)[0], on_threads(1, run)[0]
    for saved, told in ((of_two, name != "ZeroOneAdam" or steps == 5), (of_one, False)):
        caplog.clear()
        a, b = on_threads(2, lambda backend, saved=saved: run(backend, saved))
        if name not in OUTER or steps == 3 or not told:
            assert same_bits(a[0], b[0])
        assert same_bits(a[1], b[1])
        assert caplog.text.count("what is each rank's own") == told
        assert caplog.text.count("is that of rank 0 of 2 in the loaded state, not that of rank 1 of 2") == told


@every
@pytest.mark.parametrize("before", [0, 3])
def test_a_model_that_is_loaded_between_two_rounds_is_trained_and_saved(name, before):
    """After the optimizer was made, or at a round: the next steps are from there, and so is a run resumed from what is
    saved before them."""

    def run(backend):
        model, gone = Toy(), Toy()
        optimizer, resumed = (EVERY[name](m.parameters(), backend=backend, lr=1e-9) for m in (model, gone))
        train(model, optimizer, range(before), backend.rank, 2)
        if getattr(optimizer, "replicas_differ", False):
            optimizer.synchronize()
        weights = {key: value + 1 for key, value in Toy(seed=9).state_dict().items()}
        model.load_state_dict(weights)
        state = through_a_file(optimizer.state_dict())
        gone.load_state_dict(weights)
        resumed.load_state_dict(state)
        for m, o in ((model, optimizer), (gone, resumed)):
            train(m, o, range(before, before + 6), backend.rank, 2)
        moved = max(float((p.detach() - weights[key]).abs().max()) for key, p in model.named_parameters() if p.numel())
        return moved, same_bits(params_of(model), params_of(gone))

    for moved, same in on_threads(2, run):
        assert moved < 0.1
        assert same


def exchange(model: nn.Module, optimizer: Any) -> None:
    """Puts copies of all parameters in their place, in the model and in the groups."""
    new = {p: nn.Parameter(p.detach().clone(), p.requires_grad) for p in model.parameters()}
    for key, p in list(model.named_parameters()):
        setattr(model, key, new[p])
    for group in optimizer.param_groups:
        group["params"][:] = [new[p] for p in group["params"]]


@every_communicating
@pytest.mark.parametrize("steps", [3, 5])
def test_parameters_that_are_exchanged_in_mid_run_go_on_as_they_were(name, steps):
    """As frameworks do that put others in their place: after a round, and between two, where each rank has its own."""

    def run(backend, exchanged):
        model = Toy()
        optimizer = EVERY[name](model.parameters(), lr=1e-2, backend=backend)
        train(model, optimizer, range(steps), backend.rank, 2)
        if exchanged:
            exchange(model, optimizer)
            optimizer.rebind()
        train(model, optimizer, range(steps, steps + 4), backend.rank, 2)
        own = params_of(model)
        optimizer.synchronize()
        return own, params_of(model), tensors_in(optimizer.state_dict())

    for whole, other in zip(on_threads(2, lambda b: run(b, False)), on_threads(2, lambda b: run(b, True))):
        for mine, theirs in zip(whole, other):
            assert same_bits(mine, theirs)


@pytest.mark.parametrize(("cls", "name", "value"), [(OneBitAdam, "freeze_step", 500), (Lamb, "max_coeff", 3.0)])
def test_what_a_state_of_torchs_adam_lacks_is_as_it_was_set_in_a_group(cls, name, value):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def groups(**settings: Any) -> list[dict[str, Any]]:
        return [{"params": model[0].parameters(), **settings}, {"params": model[1].parameters()}]

    adam = torch.optim.Adam(groups(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    adam.step()
    optimizer = cls(groups(**{name: value}))
    default = optimizer.defaults[name]
    optimizer.load_state_dict(adam.state_dict())
    assert [group[name] for group in optimizer.param_groups] == [value, default]
    assert optimizer.param_groups[0]["lr"] == 0.1


@every_communicating
def test_averaged_takes_over_parameters_that_were_exchanged_before_the_first_step(name):
    """As step() does; later it says what to call, as that does, too."""

    def run(backend, exchanged):
        model = Toy()
        optimizer = EVERY[name](model.parameters(), lr=1e-2, backend=backend)
        if exchanged:
            exchange(model, optimizer)
        with optimizer.averaged():
            before = params_of(model)
        train(model, optimizer, range(4), backend.rank, 2)
        after = params_of(model)
        exchange(model, optimizer)
        with pytest.raises(ValueError, match=r"call optimizer.rebind\(\)"), optimizer.averaged():
            pass
        return before, after

    for whole, other in zip(on_threads(2, lambda b: run(b, False)), on_threads(2, lambda b: run(b, True))):
        for mine, theirs in zip(whole, other):
            assert same_bits(mine, theirs)


@every_variant
def test_a_rebind_that_is_refused_changes_nothing(name):
    """For what one rank brings: all ranks raise, and so do their steps, until it is called with what can be."""

    def on_meta(params):
        params[1] = nn.Parameter(params[1].detach().to("meta"))

    def run(backend, spoils):
        model = Toy()
        optimizer = make(name, model.parameters(), backend=backend)
        train(model, optimizer, range(5), backend.rank, 2)
        exchange(model, optimizer)
        backward(model, 5, backend.rank, 2)
        params, before = optimizer.param_groups[0]["params"], tensors_in({"state": optimizer.state})
        whole = list(params)
        for spoil in spoils:
            if backend.rank == 1:
                spoil(params)
            for call in (optimizer.rebind, optimizer.step, optimizer.rebind):
                with pytest.raises((ValueError, RuntimeError), match=r"meta|parameters now|exchanged|cannot take this"):
                    call()
            assert same_bits(before, tensors_in({"state": optimizer.state}))
            params[:] = whole
        optimizer.rebind()
        train(model, optimizer, range(5, 9), backend.rank, 2)
        return params_of(model), tensors_in(optimizer.state_dict())

    spoiled = on_threads(2, lambda b: run(b, [on_meta, list.pop]))
    for once, twice in zip(on_threads(2, lambda b: run(b, [])), spoiled):
        for mine, other in zip(once, twice):
            assert same_bits(mine, other)


@every_communicating
@pytest.mark.parametrize("steps", [0, 3])
def test_what_users_add_to_state_is_kept_where_parameters_are_exchanged(name, steps):
    """In the first step, and by ``rebind()`` later."""

    def run(backend):
        model = Toy()
        optimizer = EVERY[name](model.parameters(), lr=1e-2, backend=backend)
        train(model, optimizer, range(steps), backend.rank, 2)
        optimizer.state["x"] = 1
        for p in (model.weight, model.frozen):
            optimizer.state[p]["note"] = torch.ones(2)
        gone = model.weight
        exchange(model, optimizer)
        if steps:
            optimizer.rebind()
        train(model, optimizer, range(steps, steps + 1), backend.rank, 2)
        assert optimizer.state["x"] == 1
        assert (
            optimizer.state[model.weight]["note"].tolist() == optimizer.state[model.frozen]["note"].tolist() == [1, 1]
        )
        assert gone not in optimizer.state

    on_threads(2, run)


@every_communicating
def test_a_copy_or_a_pickle_within_averaged_is_refused_and_names_the_remedy(name):
    """It would be neither the run's own, nor the mean's."""

    def run(backend):
        model = Toy()
        optimizer = make(name, model.parameters(), backend=backend)
        train(model, optimizer, range(5), backend.rank, 2)
        with optimizer.averaged():
            for copied in (copy.deepcopy, pickle.dumps):
                with pytest.raises(RuntimeError, match=r"within `with optimizer\.averaged\(\):`.*leave it first"):
                    copied((model, optimizer))
        copy.deepcopy(optimizer)

    on_threads(2, run)


@every_communicating
def test_a_learning_rate_in_a_tensor_is_a_copy_in_the_state(name):
    lr = torch.tensor(0.01)
    optimizer = make(name, Toy().parameters(), lr=lr)
    saved = optimizer.state_dict()
    lr.fill_(0.5)
    assert float(saved["param_groups"][0]["lr"]) == pytest.approx(0.01)


def test_overlap_that_is_set_later_is_refused_on_all_ranks():
    """Residuals were made without it."""

    def run(backend):
        model = Toy()
        optimizer = OneBitAdam(model.parameters(), freeze_step=1, backend=backend)
        train(model, optimizer, range(3), backend.rank, 2)
        optimizer.overlap = True
        for _ in range(2):
            with pytest.raises(ValueError, match="overlap was set to True: give it where the optimizer is made"):
                train(model, optimizer, range(3, 4), backend.rank, 2)
        optimizer.overlap = False
        train(model, optimizer, range(3, 5), backend.rank, 2)
        return params_of(model)

    a, b = on_threads(2, run)
    assert same_bits(a, b)


class Counted(list):
    """A list that counts how often somebody goes through it."""

    looks = 0

    def __iter__(self):
        self.looks += 1
        return super().__iter__()


@pytest.mark.parametrize(
    ("name", "settings"), [*((name, {}) for name in COMMUNICATING), ("DiLoCo", {"streaming": Streaming(2, 1)})]
)
def test_steps_look_at_a_parameter_as_often_however_many_groups_there_are(name, settings):
    """Else a step of a group for each parameter would take the time of their number squared."""

    def most_looks(backend, count):
        params = [nn.Parameter(torch.ones(3)) for _ in range(count)]
        optimizer = make(name, [{"params": [p]} for p in params], backend=backend, **settings)

        def steps(number):
            for _ in range(number):
                for p in params:
                    p.grad = torch.ones(3)
                optimizer.step()

        steps(1)
        lists = []
        for holder in optimizer.param_groups:
            holder["params"] = Counted(holder["params"])
            lists.append(holder["params"])
        for bucket in optimizer.buckets:
            bucket.params = Counted(bucket.params)
            lists.append(bucket.params)
        steps(6)
        return max(each.looks for each in lists)

    few, many = [on_threads(2, functools.partial(most_looks, count=count)) for count in (3, 9)]
    assert few == many
