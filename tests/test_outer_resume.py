"""Outer optimizers: exact resume between synchronisations and at them, copies, other worlds, bad input."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from worlds import Toy, all_tensors, backward, on_threads, params_of, same_bits, through_a_file, tokens, train

from commopt import (
    DiLoCo,
    Lamb,
    LocalSGD,
    Mixed,
    NoLoCo,
    OneBitAdam,
    SignMomentum,
    SlowMo,
    SparseLoCo,
    Streaming,
    attach,
)
from commopt.agreement.calls import StepRefused
from commopt.comm import CollectiveError, LocalBackend
from commopt.compress import Sign
from commopt.optim import join_state_dict, split_state_dict
from commopt.outer import RandomSign
from commopt.state import following, replicas

CLASSES = [LocalSGD, SlowMo, DiLoCo, SignMomentum, SparseLoCo]
EVERY = pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)


def make(cls, model, backend, **settings):
    settings = {"lr": 1e-2, "period": 4, **settings}
    if cls is SignMomentum:
        settings.setdefault("sign", RandomSign(seed=3))
    return cls(model.parameters(), backend=backend, **settings)


@EVERY
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compressor", [None, Sign(block=64)])
def test_a_resumed_run_equals_one_never_stopped(cls, world_size, dtype, compressor):
    """Before, at and after a synchronisation. The model file is rank 0's alone, as trainers write it: a rank's own
    parameters come with its own part."""
    stops = (3, 4, 5)

    def straight(backend):
        model, saved = Toy(dtype), {}
        optimizer = make(cls, model, backend, compressor=compressor)
        for step in range(9):
            if step in stops:
                state = split_state_dict(optimizer.state_dict())
                saved[step] = through_a_file([model.state_dict(), *state])
            train(model, optimizer, range(step, step + 1), backend.rank, world_size)
        return params_of(model), all_tensors(optimizer.state_dict()), saved

    results = on_threads(world_size, straight)
    for step in stops:
        replicated = [saved[step][1] for _, _, saved in results]
        assert all(same_bits(all_tensors(replicated[0]), all_tensors(other)) for other in replicated)
        assert all(str(r["param_groups"]) == str(replicated[0]["param_groups"]) for r in replicated)

    def resumed(backend):
        for step in stops:
            model = Toy(dtype, seed=9)
            optimizer = make(cls, model, backend, compressor=compressor)
            weights, replicated, _ = results[0][2][step]
            model.load_state_dict(weights)
            parts = [saved[step][2] for _, _, saved in results]
            optimizer.load_state_dict(join_state_dict(replicated, parts, backend.rank, world_size))
            train(model, optimizer, range(step, 9), backend.rank, world_size)
            assert same_bits(params_of(model), results[backend.rank][0])
            assert same_bits(all_tensors(optimizer.state_dict()), results[backend.rank][1])

    on_threads(world_size, resumed)


@EVERY
@pytest.mark.parametrize(("old", "new"), [(3, 2), (2, 4), (2, 1), (3, 3)])
def test_at_another_world_size_the_mean_of_what_is_each_ranks_own_is_kept(cls, old, new):
    def save(backend):
        model = Toy(torch.float64)
        optimizer = make(cls, model, backend, compressor=Sign(block=64))
        train(model, optimizer, range(6), backend.rank, old)
        return params_of(model), *split_state_dict(through_a_file(optimizer.state_dict()))

    saved = on_threads(old, save)
    parts = [s[2] for s in saved]

    def load(backend):
        model = Toy(torch.float64, seed=4)
        optimizer = make(cls, model, backend, compressor=Sign(block=64), bucket_mb=None if old == new else 3e-4)
        optimizer.load_state_dict(join_state_dict(saved[0][1], parts, backend.rank, new))
        start, state = params_of(model), saved[0][1]["state"]
        folded = [  # one rank has no residuals: they have moved anchor and parameter alike
            optimizer.state[p]["anchor"] - state[i]["anchor"] if p in optimizer.state else torch.zeros_like(p)
            for i, p in enumerate(model.parameters())
        ]
        moments = [t.clone() for t in all_tensors(optimizer.base.state_dict()["state"])]
        residuals = [t.clone() for t in all_tensors([list(e.values()) for e in optimizer.residuals.values()])]
        train(model, optimizer, range(6, 8), backend.rank, new)
        assert not optimizer.replicas_differ
        return start, moments, params_of(model), residuals, folded

    loaded = on_threads(new, load)
    assert any(bool(f.any()) for f in loaded[0][4]) == (new == 1)
    mean = [torch.stack(group).mean(0) + f for group, f in zip(zip(*(s[0] for s in saved)), loaded[0][4])]
    now = [torch.stack(group).mean(0) for group in zip(*(x[0] for x in loaded))]
    torch.testing.assert_close(now, mean, rtol=1e-12, atol=1e-15)
    old_moments = [all_tensors(part["base"]["state"]) for part in parts]
    mean = [torch.stack(group).mean(0) for group in zip(*old_moments)]
    now = [torch.stack(group).mean(0) for group in zip(*(x[1] for x in loaded))]
    torch.testing.assert_close(now, mean, rtol=1e-6, atol=1e-15)
    assert all(same_bits(loaded[0][2], x[2]) for x in loaded)
    assert sum(float(t.abs().sum()) for t in loaded[0][3]) > 0 or new == 1


@pytest.mark.parametrize(("old", "new"), [(3, 2), (2, 3), (4, 1)])
@pytest.mark.parametrize(("bucket_mb", "frozen"), [(None, False), (3e-4, False), (None, True)])
@pytest.mark.parametrize("cls", [DiLoCo, SparseLoCo])
def test_at_another_world_size_residuals_are_kept(cls, old, new, bucket_mb, frozen):
    """anchor - (mean of worker residuals + server residuals) is the same before and after, also of a layer that is
    frozen where the state is loaded, and unfrozen later."""

    def worth(anchor, worker, server):
        return anchor - (worker + server).view(anchor.shape)

    def save(backend):
        model = Toy(torch.float64)
        optimizer = make(cls, model, backend, compressor=Sign(block=64))
        train(model, optimizer, range(4), backend.rank, old)
        return split_state_dict(optimizer.state_dict())

    saved = on_threads(old, save)
    parts = [part["state"] for _, part in saved]

    def load(backend):
        model = Toy(torch.float64)
        model.weight.requires_grad_(not frozen)
        optimizer = make(cls, model, backend, compressor=Sign(block=64), bucket_mb=bucket_mb)
        optimizer.load_state_dict(join_state_dict(saved[0][0], [p for _, p in saved], backend.rank, new))
        model.weight.requires_grad_(True)
        following.follow_parameters(optimizer)
        residuals = optimizer.residuals
        state = optimizer.state
        return {i: (state[p]["anchor"], residuals.get(p)) for i, p in enumerate(model.parameters()) if p.requires_grad}

    loaded = on_threads(new, load)
    total = 0.0
    for i in parts[0]:
        worker = torch.stack([p[i]["worker_error"] for p in parts]).mean(0).flatten()
        server = torch.cat([p[i]["server_error"] for p in parts])
        before = worth(saved[0][0]["state"][i]["anchor"], worker, server)
        anchor = loaded[0][i][0]
        if new == 1:
            after = anchor
        else:
            worker = torch.stack([x[i][1]["worker_error"] for x in loaded]).mean(0).flatten()
            after = worth(anchor, worker, torch.cat([x[i][1]["server_error"] for x in loaded]))
        torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-15)
        total += float(worker.abs().sum() if cls is SparseLoCo else server.abs().sum())
    assert total > 0


def test_the_mean_of_what_is_each_ranks_own_keeps_its_dtype():
    """And it is taken of those that have it: the base of rank 0 never had a gradient of the bias."""

    def save(backend):
        model = Toy(torch.bfloat16)
        optimizer = make(LocalSGD, model, backend)
        for step in range(3):
            backward(model, step, backend.rank, 3)
            if backend.rank == 0:
                model.bias.grad = None
            optimizer.step()
        return split_state_dict(optimizer.state_dict())

    saved = on_threads(3, save)
    merged = join_state_dict(saved[0][0], [part for _, part in saved], 0, 2)["residuals"]
    for i, entry in merged["state"].items():
        assert set(entry) == {"parameter"}
        mean = torch.stack([part["state"][i]["parameter"].float() for _, part in saved]).mean(0)
        assert same_bits([entry["parameter"]], [mean.bfloat16()])
    assert {float(entry["step"]) for entry in merged["base"]["state"].values()} == {3.0}
    assert set(merged["base"]["state"]) == set(saved[1][1]["base"]["state"]) > set(saved[0][1]["base"]["state"])


@EVERY
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_deep_copy_goes_on_as_the_original_would(cls, world_size):
    def run(backend):
        model = Toy()
        optimizer = make(cls, model, backend, compressor=Sign(block=64), max_grad_norm=1.0)
        train(model, optimizer, range(6), backend.rank, world_size)
        both = copy.deepcopy({"model": model, "optimizer": optimizer})
        assert both["optimizer"].param_groups[0]["params"][0] is next(both["model"].parameters())
        assert {k for k in vars(optimizer) if k[0] != "_"} == {k for k in vars(both["optimizer"]) if k[0] != "_"}
        train(both["model"], both["optimizer"], range(6, 9), backend.rank, world_size)
        untouched = params_of(model)
        train(model, optimizer, range(6, 9), backend.rank, world_size)
        assert same_bits(params_of(model), params_of(both["model"]))
        assert not same_bits(untouched, params_of(model))

    on_threads(world_size, run)


@EVERY
def test_a_state_dict_is_a_copy_when_it_is_made_and_when_it_is_loaded(cls):
    model, other = Toy(), Toy()
    optimizer, second = make(cls, model, LocalBackend()), make(cls, other, LocalBackend())
    train(model, optimizer, range(6))
    saved = optimizer.state_dict()
    kept = [t.clone() for t in all_tensors(saved)]
    train(model, optimizer, range(6, 10))
    second.load_state_dict(saved)
    train(other, second, range(6, 10))
    assert same_bits(all_tensors(saved), kept)
    assert same_bits(params_of(model), params_of(other))


@EVERY
def test_pickle(cls):
    model = Toy()
    optimizer = make(cls, model, LocalBackend())
    train(model, optimizer, range(6))
    other, resumed = pickle.loads(pickle.dumps((model, optimizer)))
    train(model, optimizer, range(6, 10))
    train(other, resumed, range(6, 10))
    assert same_bits(params_of(model), params_of(other))


@EVERY
def test_moving_or_casting_the_model_between_synchronisations_moves_the_state(cls):
    def run(backend):
        model = Toy()
        optimizer = make(cls, model, backend, compressor=Sign(block=64))
        train(model, optimizer, range(6), backend.rank, 2)
        before = all_tensors(optimizer.state_dict()["state"])
        residuals = all_tensors(optimizer.state_dict()["residuals"]["state"])
        model.double()
        model.zero_grad()
        optimizer.step()
        assert {b.dtype for b in optimizer.buckets} == {torch.float64}
        after = all_tensors(optimizer.state_dict()["state"])
        assert all(torch.equal(a.double(), b) for a, b in zip(before, after))
        assert all(
            torch.equal(a.double(), b)
            for a, b in zip(residuals, all_tensors(optimizer.state_dict()["residuals"]["state"]))
        )
        for entry in optimizer.base.state.values():
            entry.update({k: v.double() for k, v in entry.items() if k != "step"})
        train(model, optimizer, range(7, 8), backend.rank, 2)
        assert not optimizer.replicas_differ
        return params_of(model)

    a, b = on_threads(2, run)
    assert same_bits(a, b)


def test_the_state_of_the_base_alone_is_taken_over():
    """A run that has started with AdamW goes on with local steps."""
    theirs, ours = Toy(), Toy()
    adam = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    train(theirs, adam, range(4))
    optimizer = LocalSGD(ours.parameters(), lr=1.0, period=3)
    train(ours, optimizer, range(2))
    ours.load_state_dict(theirs.state_dict())
    optimizer.load_state_dict(through_a_file(adam.state_dict()))
    assert optimizer.comm_stats()["round_step"] == 0
    train(theirs, adam, range(4, 9))
    train(ours, optimizer, range(4, 9))
    assert same_bits(params_of(theirs), params_of(ours))
    assert optimizer.param_groups[0]["lr"] == 1e-2
    assert optimizer.param_groups[0]["period"] == 3


def test_a_base_loaded_behind_our_back_is_followed():
    model = Toy()
    optimizer = DiLoCo(model.parameters(), lr=1e-2, period=3)
    train(model, optimizer, range(4))
    state = torch.optim.AdamW(Toy().parameters(), lr=5e-3).state_dict()
    optimizer.base.load_state_dict(state)
    train(model, optimizer, range(4, 6))
    assert optimizer.param_groups is optimizer.base.param_groups
    assert optimizer.param_groups[0]["lr"] == 5e-3
    assert optimizer.comm_stats()["rounds"] == 2


def test_what_was_done_to_model_and_base_is_followed_by_synchronize():
    def run(backend):
        model = Toy()
        optimizer = make(DiLoCo, model, backend)
        train(model, optimizer, range(2), backend.rank, 2)
        model.double()
        optimizer.base.load_state_dict(torch.optim.AdamW(Toy().parameters(), lr=5e-3).state_dict())
        optimizer.synchronize()
        assert optimizer.param_groups is optimizer.base.param_groups
        assert {b.dtype for b in optimizer.buckets} == {torch.float64}
        assert optimizer.comm_stats()["rounds"] == 1
        return params_of(model)

    a, b = on_threads(2, run)
    assert same_bits(a, b)


def test_without_any_ranks_own_part_all_start_at_the_anchor(caplog):
    def run(backend):
        model = Toy()
        optimizer = make(DiLoCo, model, backend)
        train(model, optimizer, range(6), backend.rank, 2)
        replicated, _ = split_state_dict(optimizer.state_dict())
        anchors = [optimizer.state[p]["anchor"].clone() for p in model.parameters() if p.requires_grad]
        optimizer.load_state_dict(replicated)
        assert same_bits(anchors, [p for p in params_of(model) if p.numel() != 4 or p.dim() != 1][: len(anchors)])
        train(model, optimizer, range(6, 8), backend.rank, 2)
        return params_of(model)

    a, b = on_threads(2, run)
    assert same_bits(a, b)
    assert caplog.text.count("no rank's own part") == 1
    assert "residuals in the loaded state" not in caplog.text


def test_tools_for_distributed_checkpoints_see_the_outer_state():
    model = Toy()
    optimizer = make(DiLoCo, model, LocalBackend())
    train(model, optimizer, range(4))
    saved = get_optimizer_state_dict(model, optimizer)
    assert set(saved["state"]["weight"]) == {"anchor", "outer_momentum"}
    other = Toy(seed=5)
    second = make(DiLoCo, other, LocalBackend())
    set_optimizer_state_dict(other, second, saved)
    assert same_bits(all_tensors(optimizer.state_dict()["state"]), all_tensors(second.state_dict()["state"]))
    assert same_bits(params_of(model), params_of(other))


def test_the_state_of_another_model_is_refused_and_nothing_changes():
    model = Toy()
    optimizer = make(DiLoCo, model, LocalBackend())
    train(model, optimizer, range(5))
    before, params = optimizer.state_dict(), params_of(model)
    wrong = Toy()
    wrong.weight = nn.Parameter(torch.zeros(5, 6))
    with pytest.raises(ValueError, match=r"\(5, 6\).*\(5, 5\).*another model"):
        optimizer.load_state_dict(make(DiLoCo, wrong, LocalBackend()).state_dict())
    with pytest.raises(ValueError, match=r"different number|doesn't match the size"):
        optimizer.load_state_dict(make(DiLoCo, nn.Linear(3, 2), LocalBackend()).state_dict())
    assert same_bits(all_tensors(before), all_tensors(optimizer.state_dict()))
    assert same_bits(params, params_of(model))


def test_a_group_added_between_synchronisations_joins_the_round():
    def run(backend):
        model = Toy()
        late = [model.embedding]
        early = [p for p in model.parameters() if p is not model.embedding]
        optimizer = SlowMo(early, lr=1e-2, period=4, backend=backend)
        train(model, optimizer, range(2), backend.rank, 2)
        optimizer.add_param_group({"params": late, "lr": 5e-3})
        assert optimizer.base.param_groups[1]["outer_momentum"] == 0.5
        assert optimizer.base.param_groups[1]["round_lr"] == 2 * 5e-3
        with pytest.raises(ValueError, match="period must be the same in all parameter groups, got 3 and 4"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "period": 3})
        train(model, optimizer, range(2, 4), backend.rank, 2)
        assert not optimizer.replicas_differ
        assert optimizer.base.state[model.embedding]["step"] == 2
        lr = -1.0 if backend.rank == 0 else 1e-2
        with pytest.raises(ValueError, match="lr must be a number >= 0, got -1"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "lr": lr})
        assert len(optimizer.param_groups) == 2
        for group in optimizer.param_groups:
            group["period"] = 6
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
        assert optimizer.param_groups[2]["period"] == 6  # that of the others now
        return params_of(model)

    a, b = on_threads(2, run)
    assert same_bits(a, b)


@EVERY
def test_closure_hooks_and_names(cls):
    model, same, calls = Toy(), Toy(), []
    optimizer = cls(model.named_parameters(), lr=1e-2, period=2)
    reference = cls(same.parameters(), lr=1e-2, period=2)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before step"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after step"))
    optimizer.register_load_state_dict_post_hook(lambda o: calls.append(o.param_groups[0]["rounds"]))
    for step in range(4):

        def closure(step=step):
            backward(model, step, 0, 1)
            return torch.tensor(float(step))

        assert optimizer.step(closure) == step
    train(same, reference, range(4))
    assert same_bits(params_of(model), params_of(same))
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["param_names"] == [n for n, _ in model.named_parameters()]
    optimizer.load_state_dict(saved)
    assert calls == ["before step", "after step"] * 4 + [2]
    assert repr(optimizer).startswith(f"{cls.__name__} (")
    assert "period: 2" in repr(optimizer)
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


# bad input ------------------------------------------------------------------------------------------------------------

BAD = [
    (LocalSGD, {"period": 0}, r"period must be an int >= 1, got 0"),
    (LocalSGD, {"period": 2.5}, r"period must be an int >= 1, got 2.5"),
    (LocalSGD, {"period": True}, r"period must be an int >= 1, got True"),
    (LocalSGD, {"compressor": "sign"}, r"compressor must be None .*got 'sign'"),
    (LocalSGD, {"max_grad_norm": 0}, r"max_grad_norm must be a number > 0, got 0"),
    (LocalSGD, {"bucket_mb": -1}, r"bucket_mb must be a number > 0, got -1"),
    (SlowMo, {"outer_lr": -1.0}, r"outer_lr must be a number >= 0, got -1.0"),
    (SlowMo, {"outer_momentum": 1.0}, r"outer_momentum must be a number in \[0, 1\), got 1.0"),
    (DiLoCo, {"outer_lr": math.nan}, r"outer_lr must be a number >= 0, got nan"),
    (DiLoCo, {"outer_momentum": -0.1}, r"outer_momentum must be a number in \[0, 1\), got -0.1"),
    (SignMomentum, {"outer_betas": (0.9, 1.0)}, r"outer_betas must be two numbers in \[0, 1\), got"),
    (SignMomentum, {"outer_weight_decay": -1}, r"outer_weight_decay must be a number >= 0, got -1"),
    (SignMomentum, {"outer_lr": -1}, r"outer_lr must be a number >= 0, got -1"),
    (SignMomentum, {"sign": "random"}, r"sign must be a commopt.outer.SignRule such as ExactSign\(\), got 'random'"),
    (LocalSGD, {"base": 3}, r"base must be an optimizer class such as torch.optim.AdamW, got 3"),
    (LocalSGD, {"base": len}, r"base must make a torch.optim.Optimizer, but .* made a int"),
    (LocalSGD, {"base": torch.optim.LBFGS}, r"LBFGS evaluates its closure several times"),
]


@pytest.mark.parametrize(("cls", "arguments", "message"), BAD)
def test_an_argument_out_of_range(cls, arguments, message):
    arguments = {"base": torch.optim.SGD, **arguments}
    with pytest.raises(ValueError, match=message):
        cls(list(Toy().parameters()), **arguments)


@pytest.mark.parametrize(("cls", "arguments", "message"), [BAD[0], BAD[7], BAD[13]])
def test_an_argument_out_of_range_on_one_rank_is_an_error_on_all(cls, arguments, message):
    def run(backend):
        with pytest.raises(ValueError, match=message) as caught:
            cls(Toy().parameters(), torch.optim.SGD, backend=backend, **(arguments if backend.rank == 1 else {}))
        return str(caught.value)

    texts = on_threads(3, run)
    assert texts[0].startswith("rank 1 refused its arguments: ")


@pytest.mark.parametrize("arguments", [{"seed": 1.5}, {"seed": True}, {"bound": 0}, {"bound": math.inf}])
def test_a_random_sign_out_of_range(arguments):
    with pytest.raises(ValueError, match="must be"):
        RandomSign(**arguments)


@pytest.mark.parametrize(
    "different", [{"lr": 0.5}, {"period": 9}, {"outer_lr": 0.1}, {"sign": RandomSign(seed=2)}, {"compressor": Sign()}]
)
def test_ranks_with_different_settings(different):
    def run(backend):
        settings = {"lr": 0.1, **(different if backend.rank == 2 else {})}
        with pytest.raises(ValueError, match="settings or kernel providers differ between ranks: rank 2"):
            SignMomentum(Toy().parameters(), backend=backend, **settings)

    on_threads(3, run)


def test_ranks_with_different_bases():
    def run(backend):
        base = torch.optim.Adam if backend.rank else torch.optim.AdamW
        with pytest.raises(ValueError, match="settings or kernel providers differ between ranks: rank 1"):
            LocalSGD(Toy().parameters(), base, lr=0.1, backend=backend)

    on_threads(2, run)


def test_an_unknown_argument_of_the_base_is_the_bases_own_error():
    with pytest.raises(TypeError, match="unexpected keyword argument 'learning_rate'"):
        LocalSGD(Toy().parameters(), torch.optim.SGD, learning_rate=0.1)


def test_arguments_that_do_not_go_with_an_instance():
    with pytest.raises(ValueError, match=r"the base optimizer SGD is made already, so it takes no lr=0.1"):
        LocalSGD(torch.optim.SGD(Toy().parameters()), lr=0.1)
    with pytest.raises(ValueError, match="give it in place of the parameters"):
        LocalSGD(Toy().parameters(), torch.optim.SGD(Toy().parameters()))


def test_a_base_that_already_synchronises_is_refused():
    def run(backend):
        onebit = OneBitAdam(Toy().parameters(), backend=backend)
        inner = LocalSGD(Toy().parameters(), lr=0.1, backend=backend)
        for base in (onebit, inner):
            with pytest.raises(ValueError, match=f"{type(base).__name__} already synchronises the ranks; allowed are"):
                LocalSGD(base, period=2, backend=backend)
        with pytest.raises(ValueError, match="OneBitAdam already synchronises"):
            LocalSGD(Toy().parameters(), lambda p: OneBitAdam(p, backend=backend), period=2, backend=backend)

    on_threads(2, run)


def test_parameters_without_memory_and_devices_that_the_backend_cannot_send_from(monkeypatch):
    def ours(backend):
        bad = nn.Linear(2, 2, device="meta" if backend.rank else "cpu")
        with pytest.raises(ValueError) as caught:
            LocalSGD([*nn.Linear(2, 2).parameters(), *bad.parameters()], lr=0.1, backend=backend)
        return str(caught.value)

    first, second = on_threads(2, ours)
    assert "rank 1 refused its arguments: parameter 2 is on the meta device" in first
    assert "parameter 2 is on the meta device and has no values" in second
    monkeypatch.setattr(LocalSGD, "devices", lambda _: ("cuda",))  # as NCCL
    with pytest.raises(ValueError, match="parameter 0 is on cpu, but this backend sends from cuda only"):
        LocalSGD(Toy().parameters(), lr=0.1, backend=LocalBackend())


def test_a_base_with_a_period_of_its_own_is_refused():
    class Periodic(torch.optim.SGD):
        def __init__(self, params, period=7):
            super().__init__(params)
            self.defaults["period"] = period

    with pytest.raises(ValueError, match="the base optimizer Periodic has a hyper-parameter 'period' of its own"):
        LocalSGD(Toy().parameters(), Periodic)


def test_a_torch_optimizer_that_synchronises_is_refused():
    class ZeroRedundancyOptimizer(torch.optim.SGD):
        pass

    with pytest.raises(ValueError, match="ZeroRedundancyOptimizer already synchronises"):
        LocalSGD(ZeroRedundancyOptimizer(Toy().parameters()))


@pytest.mark.parametrize("cls", [SlowMo, SignMomentum])
@pytest.mark.parametrize("defaults", [{}, {"lr": None}], ids=["none", "of its own"])
def test_a_base_without_a_learning_rate(cls, defaults):
    """Or one that finds its own, as Adafactor of transformers does: its groups have an lr of None."""

    class Fixed(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, defaults)

        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.sub_(p.grad, alpha=0.1)

    with pytest.raises(
        ValueError, match=f"{cls.__name__} needs the learning rate of its base, but .* Fixed has no 'lr'"
    ):
        cls(Toy().parameters(), Fixed)
    model = Toy()
    optimizer = DiLoCo([model.weight], Fixed, period=2)
    optimizer.add_param_group({"params": [model.bias]})
    train(model, optimizer, range(4))
    assert [group["rounds"] for group in optimizer.param_groups] == [2, 2]
    assert not same_bits([model.weight, model.bias], [Toy().weight, Toy().bias])


def test_ranks_that_stand_at_different_places_are_told_and_nothing_changes():
    def run(backend):
        model = Toy()
        optimizer = make(DiLoCo, model, backend)
        train(model, optimizer, range(2 + backend.rank), backend.rank, 2)
        before = params_of(model), all_tensors(optimizer.state_dict())
        with pytest.raises(StepRefused, match=r"rank 1 has taken 3 local steps after 0 synchronisations, rank 0 2"):
            optimizer.synchronize()
        assert same_bits(before[0], params_of(model))
        assert same_bits(before[1], all_tensors(optimizer.state_dict()))

    on_threads(2, run)


def test_learning_rates_that_differ_between_ranks_are_told():
    def run(backend):
        model = Toy()
        optimizer = make(SignMomentum, model, backend)
        train(model, optimizer, range(3), backend.rank, 2)
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 + backend.rank)
        said = r"the sum of lr in this round, parameter group 0, is 0\.05 on rank 1 and 0\.04 on rank 0"
        with pytest.raises(StepRefused, match=said):
            train(model, optimizer, range(3, 4), backend.rank, 2)
        optimizer.param_groups[0].update(lr=1e-2, round_lr=0.0, outer_lr=0.5 + backend.rank)
        with pytest.raises(StepRefused, match=r"outer_lr, parameter group 0, is 1\.5 on rank 1 and 0\.5 on rank 0"):
            optimizer.synchronize()

    on_threads(2, run)


@pytest.mark.parametrize("cls", [DiLoCo, NoLoCo])
@pytest.mark.parametrize("step", [0, 1, 4])
def test_a_layer_that_one_rank_alone_unfreezes_is_an_error_on_all(cls, step):
    """It gets a bucket there, of which the others know nothing: Gloo would end their processes."""

    def run(backend):
        model = Toy()
        model.weight.requires_grad_(False)
        optimizer = cls(model.parameters(), torch.optim.SGD, lr=1e-2, period=2, backend=backend)
        train(model, optimizer, range(step), backend.rank, 2)
        model.weight.requires_grad_(backend.rank == 1)
        with pytest.raises(StepRefused, match="rank 1 trains, or has trained, other parameters than rank 0"):
            train(model, optimizer, range(step, 6), backend.rank, 2)

    on_threads(2, run)


def test_ranks_that_unfreeze_as_many_layers_but_others_are_told():
    def run(backend):
        model = Toy()
        model.weight.requires_grad_(False)
        model.bias.requires_grad_(False)
        optimizer = DiLoCo(model.parameters(), torch.optim.SGD, lr=1e-2, period=2, backend=backend)
        (model.weight if backend.rank else model.bias).requires_grad_(True)
        with pytest.raises(StepRefused, match="other parameters than rank 0"):
            train(model, optimizer, range(2), backend.rank, 2)

    on_threads(2, run)


def test_a_base_that_fails_at_a_synchronisation_stops_all_ranks():
    def run(backend):
        model = Toy()
        optimizer = make(LocalSGD, model, backend, period=2)
        train(model, optimizer, range(1), backend.rank, 2)
        backward(model, 1, backend.rank, 2)
        if backend.rank == 1:
            model.embedding.grad = model.embedding.grad.to_sparse()
        error, message = (
            (RuntimeError, "sparse") if backend.rank == 1 else (StepRefused, "rank 1 cannot take this step")
        )
        with pytest.raises(error, match=message):
            optimizer.step()
        train(model, optimizer, range(2, 3), backend.rank, 2)
        assert not optimizer.replicas_differ
        return params_of(model)

    a, b = on_threads(2, run)
    assert same_bits(a, b)


def test_state_that_is_deleted_before_a_synchronisation_stops_all_ranks():
    def run(backend):
        model = Toy()
        optimizer = make(LocalSGD, model, backend, period=2)
        train(model, optimizer, range(1), backend.rank, 2)
        backward(model, 1, backend.rank, 2)
        p, kept = model.embedding, dict(optimizer.state[model.embedding])
        if backend.rank == 1:
            optimizer.state[p].clear()
        error, message = (ValueError, "state") if backend.rank == 1 else (StepRefused, "rank 1 cannot take this step")
        with pytest.raises(error, match=message):
            optimizer.step()
        optimizer.state[p].update(kept)
        train(model, optimizer, range(2, 3), backend.rank, 2)
        assert not optimizer.replicas_differ
        return params_of(model)

    a, b = on_threads(2, run)
    assert same_bits(a, b)


@pytest.mark.parametrize("merge", ["corrected", "eager"])
def test_a_base_that_fails_when_a_fragment_is_sent_is_told_once_and_its_steps_count_later(merge):
    def run(backend):
        model = Toy()
        streaming = Streaming(2, 1) if merge == "corrected" else Streaming(2, merge="eager")
        optimizer = make(LocalSGD, model, backend, period=4, streaming=streaming)
        train(model, optimizer, range(5), backend.rank, 2)
        backward(model, 5, backend.rank, 2)
        if backend.rank == 1:
            model.embedding.grad = model.embedding.grad.to_sparse()
            with pytest.raises(RuntimeError, match="sparse"):
                optimizer.step()
        else:
            optimizer.step()  # it hears of it when the fragment comes
        told = []
        for step in range(6, 16):
            backward(model, step, backend.rank, 2)
            try:
                optimizer.step()
            except (StepRefused, RuntimeError) as error:
                told.append(isinstance(error, StepRefused))
        optimizer.synchronize()
        assert not optimizer.replicas_differ
        return params_of(model), told

    (a, told), (b, too) = on_threads(2, run)
    assert same_bits(a, b)
    assert (told, too) == ([True], [False])


@pytest.mark.parametrize("base", [torch.optim.AdamW, OneBitAdam, Lamb])
def test_a_group_that_is_refused_is_forgotten_by_the_base_too(base):
    def run(backend):
        model, more = Toy(), nn.Parameter(torch.ones(3))
        optimizer = LocalSGD(model.parameters(), base, lr=1e-2, period=2, backend=backend)
        train(model, optimizer, range(3), backend.rank, 2)
        with pytest.raises(ValueError, match="period must be"):
            optimizer.add_param_group({"params": [more], "period": 3})
        train(model, optimizer, range(3, 4), backend.rank, 2)
        assert more not in optimizer.state
        assert more not in optimizer.base.state
        optimizer.add_param_group({"params": [more]})
        more.grad = torch.ones(3)
        train(model, optimizer, range(4, 6), backend.rank, 2)
        return params_of(model)

    a, b = on_threads(2, run)
    assert same_bits(a, b)


@pytest.mark.parametrize("base", [torch.optim.AdamW, OneBitAdam])
def test_parameters_are_exchanged_and_copied_with_any_base(base):
    def run(backend):
        model, other = Toy(), Toy()
        optimizer = LocalSGD(model.parameters(), base, lr=1e-2, period=2, backend=backend)
        straight = LocalSGD(other.parameters(), base, lr=1e-2, period=2, backend=backend)
        for m, o in ((model, optimizer), (other, straight)):
            train(m, o, range(3), backend.rank, 2)
        for path, p in list(model.named_parameters()):
            module, _, name = path.rpartition(".")
            setattr(model.get_submodule(module), name, nn.Parameter(p.detach().clone()))
        optimizer.param_groups[0]["params"][:] = model.parameters()
        optimizer.rebind()
        model, optimizer = copy.deepcopy((model, optimizer))
        for key in ("optimizer", "outer_optimizer"):
            assert optimizer.param_groups[0].get(key) == straight.param_groups[0].get(key)
        for m, o in ((model, optimizer), (other, straight)):
            train(m, o, range(3, 6), backend.rank, 2)
        assert same_bits(params_of(model), params_of(other))

    on_threads(2, run)


def test_the_state_of_the_base_follows_a_model_that_is_cast_after_a_load():
    def run(backend):
        model = Toy()
        optimizer = make(LocalSGD, model, backend, period=2)
        train(model, optimizer, range(4), backend.rank, 2)
        fresh = Toy()
        resumed = make(LocalSGD, fresh, backend, period=2)
        fresh.load_state_dict(model.state_dict())
        resumed.load_state_dict(optimizer.state_dict())
        copied, again = copy.deepcopy((fresh, resumed))
        for m, o in ((fresh, resumed), (copied, again)):
            m.double()
            train(m, o, range(4, 6), backend.rank, 2)
            moments = [t for entry in o.base.state.values() for n, t in entry.items() if n != "step"]
            assert {t.dtype for t in moments} == {torch.float64}

    on_threads(2, run)


# a group that shrinks -------------------------------------------------------------------------------------------------


class Shrinking:
    """A backend that loses a rank, as elastic ones do; so do its channels."""

    def __init__(self, inner, whole=None):
        self.inner, self.whole = inner, whole or self
        self.gone, self.fails = 0, False

    def channels(self, n):
        return [type(self)(channel, self) for channel in self.inner.channels(n)]

    @property
    def broken(self):
        return self.whole.fails

    @broken.setter
    def broken(self, fails):
        self.whole.fails = bool(fails)

    def __getattr__(self, name):
        return getattr(self.inner, name)

    @property
    def world_size(self):
        return self.inner.world_size - self.gone

    def all_reduce(self, x):
        if self.broken:
            raise RuntimeError("connection reset by peer")
        return self.inner.all_reduce(x)

    def all_gather(self, out, inp):
        if self.broken and inp.dtype == torch.uint8:  # messages; what ranks agree on is of numbers
            raise RuntimeError("connection reset by peer")
        return self.inner.all_gather(out, inp)


@EVERY
@pytest.mark.parametrize("fault", ["gone", "broken"])
def test_a_process_group_that_shrinks_between_synchronisations(cls, fault):
    """A clear error, nothing is lost, and the ranks that are left go on from where each of them is."""

    def first(backend):
        shrinking = Shrinking(backend)
        model = Toy()
        optimizer = make(cls, model, shrinking)
        train(model, optimizer, range(7), backend.rank, 3)
        setattr(shrinking, fault, 1)
        message = (
            r"has 2 ranks now, it had 3; nothing is lost" if fault == "gone" else "connection reset.*nothing is lost"
        )
        own = params_of(model)
        with pytest.raises(CollectiveError, match=message), optimizer.averaged():
            pass
        with pytest.raises(CollectiveError, match=message):
            optimizer.synchronize()
        assert same_bits(own, params_of(model))
        backward(model, 7, backend.rank, 3)
        before = all_tensors(optimizer.state_dict()["state"])
        with pytest.raises(CollectiveError, match=message):
            optimizer.step()
        assert same_bits(before, all_tensors(optimizer.state_dict()["state"]))
        return params_of(model), optimizer.state_dict()

    left = on_threads(3, first)[:2]

    def second(backend):
        model = Toy()
        optimizer = make(cls, model, backend)
        own, state = left[backend.rank]
        optimizer.load_state_dict(state)
        assert same_bits(params_of(model), own)
        assert optimizer.base.state[model.weight]["step"] == 8
        optimizer.synchronize()
        assert not optimizer.replicas_differ
        train(model, optimizer, range(8, 14), backend.rank, 2)
        optimizer.synchronize()
        assert not optimizer.replicas_differ
        return params_of(model)

    a, b = on_threads(2, second)
    assert same_bits(a, b)


class LosingTheWayBack(Shrinking):
    """One whose compressed means arrive, but do not come back; nor do large ones."""

    def all_reduce(self, x):
        if self.broken and x.numel() > 1:
            raise RuntimeError("connection reset by peer")
        return self.inner.all_reduce(x)

    def all_gather(self, out, x):
        if self.broken and x.dtype == torch.uint8:
            raise RuntimeError("connection reset by peer")
        return self.inner.all_gather(out, x)


@EVERY
def test_a_compressed_synchronisation_that_fails_half_way_changes_nothing(cls):
    def run(backend):
        losing, model, twin = LosingTheWayBack(backend), Toy(), Toy()
        optimizer = make(cls, model, losing, compressor=Sign(block=64))
        reference = make(cls, twin, backend, compressor=Sign(block=64))
        for m, o in ((model, optimizer), (twin, reference)):
            train(m, o, range(6), backend.rank, 2)
        losing.broken = True
        before = params_of(model), all_tensors(optimizer.state_dict())
        with pytest.raises(CollectiveError, match=r"synchronisation 2.*connection reset.*nothing is lost"):
            optimizer.synchronize()
        with pytest.raises(CollectiveError, match=r"connection reset.*nothing is lost"), optimizer.averaged():
            pass
        assert same_bits(before[0], params_of(model))
        assert same_bits(before[1], all_tensors(optimizer.state_dict()))
        losing.broken = False
        for m, o in ((model, optimizer), (twin, reference)):
            o.synchronize()
            train(m, o, range(6, 11), backend.rank, 2)
        assert same_bits(params_of(model), params_of(twin))

    on_threads(2, run)


# evaluation -----------------------------------------------------------------------------------------------------------


def test_evaluation_between_two_synchronisations_is_reported_once(monkeypatch, caplog):
    monkeypatch.setattr(replicas, "by_a_door", lambda: " In a framework so.")

    def run(backend):
        model = Toy()
        optimizer = make(LocalSGD, model, backend)
        optimizer.warn_in_evaluation(model)
        evaluate = lambda: model.eval()(tokens(0, 0, 1))  # noqa: E731
        evaluate()  # before any step all ranks are equal
        model.train()
        train(model, optimizer, range(2), backend.rank, 2)
        with optimizer.averaged():
            evaluate()
        assert "is evaluated" not in caplog.text
        backend.all_reduce(torch.zeros(1)).wait()
        evaluate()
        evaluate()
        model.train()
        train(model, optimizer, range(2, 4), backend.rank, 2)
        evaluate()

    on_threads(2, run)
    assert caplog.text.count("LocalSGD: the model is evaluated between two rounds") == 1
    assert "with optimizer.averaged(model):" in caplog.text
    assert "optimizer.synchronize() first (on all ranks). In a framework so." in caplog.text


def test_training_in_the_mode_of_evaluation_is_not_reported(caplog):
    """As by who does not call train() on a model that a library has loaded, and that is for evaluation then."""

    def run(backend):
        model = Toy().eval()
        optimizer = make(LocalSGD, model, backend)
        optimizer.warn_in_evaluation(model)
        train(model, optimizer, range(3), backend.rank, 2)

    on_threads(2, run)
    assert "is evaluated" not in caplog.text


def test_the_watch_over_evaluation_does_not_have_a_model_compiled_twice():
    compiled = []

    def counting(graph, _):
        compiled.append(graph)
        return graph.forward

    model = nn.Linear(3, 1)
    optimizer = LocalSGD(model.parameters(), torch.optim.SGD, lr=0.1, period=2, backend=LocalBackend())
    optimizer.warn_in_evaluation(model)
    call = torch.compile(model, backend=counting, fullgraph=True)
    for _ in range(3):
        call(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    assert len(compiled) == 1


def test_on_one_rank_evaluation_is_never_reported_and_synchronize_does_nothing(caplog):
    model, same = Toy(), Toy()
    optimizer, reference = make(SlowMo, model, LocalBackend()), make(SlowMo, same, LocalBackend())
    optimizer.warn_in_evaluation(model)
    for step in range(6):
        train(model, optimizer, range(step, step + 1))
        train(same, reference, range(step, step + 1))
        optimizer.synchronize()
        assert not optimizer.replicas_differ
        model.eval()(tokens(0, 0, 1))
    assert caplog.text == ""
    assert same_bits(params_of(model), params_of(same))


def test_a_bare_model_is_not_attached():
    model = Toy()
    with pytest.raises(ValueError, match="a bare Toy needs no attaching"):
        attach(model, make(LocalSGD, model, LocalBackend()))


def test_equal_gradients_are_reported_once(caplog):
    def run(backend):
        model = Toy()
        optimizer = make(LocalSGD, model, backend)
        for step in range(8):
            train(model, optimizer, range(step, step + 1), 0, 2)

    on_threads(2, run)
    assert caplog.text.count("the gradients are equal on all ranks") == 1


@pytest.mark.parametrize("streaming", [None, Streaming(2, 1)], ids=str)
def test_the_state_of_the_base_alone_may_be_loaded_between_two_rounds(streaming, caplog):
    """Parameters, which differ, become anchors: those of rank 0, with a warning."""

    def run(backend):
        model = Toy(torch.float64)
        adamw = torch.optim.AdamW(Toy(torch.float64).parameters(), lr=1e-2)
        optimizer = DiLoCo(model.parameters(), lr=1e-2, period=4, streaming=streaming, backend=backend)
        train(model, optimizer, range(6), backend.rank, 2)
        optimizer.load_state_dict(adamw.state_dict())
        train(model, optimizer, range(6, 14), backend.rank, 2)
        optimizer.synchronize()
        return params_of(model)

    a, b = on_threads(2, run)
    assert same_bits(a, b)
    assert "parameters were changed between two rounds, to values that differ between ranks" in caplog.text


def test_the_groups_of_a_base_that_was_loaded_by_itself_are_saved():
    model = Toy()
    base = Mixed(
        torch.optim.AdamW([model.weight], lr=0.1), torch.optim.SGD([model.bias, model.gain, model.embedding], lr=0.1)
    )
    optimizer = LocalSGD(base, period=4)
    saved = base.parts[0].state_dict()
    saved["param_groups"][0]["lr"] = 0.5
    base.parts[0].load_state_dict(saved)
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.5
    base.parts[0].load_state_dict({**saved, "param_groups": [{**saved["param_groups"][0], "lr": 0.25}]})
    assert base.state_dict()["param_groups"][0]["lr"] == 0.25


@pytest.mark.parametrize("how", ["load", "copy"])
@pytest.mark.parametrize("streaming", [None, Streaming(2, 1)], ids=["round", "streamed"])
def test_models_that_differ_where_a_round_begins_are_one_when_it_ends_after_a_load_too(streaming, how):
    """Of files of which each rank has a whole one, or of a copy."""

    def run(backend):
        model, other = Toy(torch.float64), Toy(torch.float64)
        settings = {"lr": 1e-2, "period": 4, "streaming": streaming, "backend": backend}
        optimizer, second = DiLoCo(model.parameters(), **settings), DiLoCo(other.parameters(), **settings)
        train(model, optimizer, range(4), backend.rank, 2)
        optimizer.synchronize()
        with torch.no_grad():
            model.bias.add_(backend.rank)
        train(model, optimizer, range(4, 5), backend.rank, 2)
        if how == "copy":
            other, second = copy.deepcopy((model, optimizer))
        else:
            other.load_state_dict(model.state_dict())
            second.load_state_dict(through_a_file(optimizer.state_dict()))
        for m, o in ((model, optimizer), (other, second)):
            train(m, o, range(5, 12), backend.rank, 2)
        assert same_bits(params_of(model), params_of(other))

    on_threads(2, run)
