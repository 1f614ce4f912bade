"""Bad input: an error that names the value and what is allowed, on every rank, before anything is communicated."""

from __future__ import annotations

import copy
import math
import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from worlds import Toy, backward, on_threads, params_of, same_bits, tensors_in, train

from commopt import (
    CSER,
    DiLoCo,
    Lamb,
    Lans,
    LocalSGD,
    Muon,
    NoLoCo,
    OneBitAdam,
    OneBitLion,
    QSparseLocalSGD,
    SignMomentum,
    SparseLoCo,
    Streaming,
    ZeroOneAdam,
    attach,
    compress_gradients,
)
from commopt.agreement import checks
from commopt.comm import LocalBackend, ThreadWorld
from commopt.compress import Int8, PowerSGD, RandomBlocks, Sign, TopK
from commopt.gradients import LoCo
from commopt.outer import RandomSign

OF_ROUNDS = [LocalSGD, DiLoCo, SignMomentum, SparseLoCo, NoLoCo]

BAD_ARGUMENTS = [
    ({"lr": -0.1}, r"lr must be a number >= 0, got -0.1"),
    ({"lr": math.nan}, r"lr must be a number >= 0, got nan"),
    ({"lr": "1e-3"}, r"lr must be a number >= 0, got '1e-3'"),
    ({"lr": torch.ones(2)}, r"lr as a tensor must have 1 element, got shape \(2,\)"),
    ({"lr": torch.tensor(-1.0)}, r"lr must be a number >= 0, got -1.0"),
    ({"betas": (1.0, 0.9)}, r"betas must be two numbers in \[0, 1\), got \(1.0, 0.9\)"),
    ({"betas": (0.9, -0.1)}, r"betas must be two numbers in \[0, 1\), got \(0.9, -0.1\)"),
    ({"betas": 0.9}, r"betas must be two numbers in \[0, 1\), got 0.9"),
    ({"eps": -1e-8}, r"eps must be a number >= 0, got -1e-08"),
    ({"weight_decay": -1}, r"weight_decay must be a number >= 0, got -1"),
    ({"maximize": 1}, r"maximize must be True or False, got 1"),
    ({"freeze_step": 0}, r"freeze_step must be 'auto' or an int >= 1, got 0"),
    ({"freeze_step": 2.5}, r"freeze_step must be 'auto' or an int >= 1, got 2.5"),
    ({"freeze_step": "never"}, r"freeze_step must be 'auto' or an int >= 1, got 'never'"),
    ({"freeze_step": True}, r"freeze_step must be 'auto' or an int >= 1, got True"),
    ({"compressor": "sign"}, r"compressor must be a commopt.compress.Compressor such as Sign\(\), got 'sign'"),
    ({"max_grad_norm": 0}, r"max_grad_norm must be a number > 0, got 0"),
    ({"bucket_mb": -1}, r"bucket_mb must be a number > 0, got -1"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_ARGUMENTS)
def test_an_argument_out_of_range(arguments, message):
    with pytest.raises(ValueError, match=message):
        OneBitAdam(Toy().parameters(), **arguments)


@pytest.mark.parametrize(("arguments", "message"), [BAD_ARGUMENTS[0], BAD_ARGUMENTS[11], BAD_ARGUMENTS[15]])
def test_an_argument_out_of_range_on_one_rank_is_an_error_on_all(arguments, message):
    def run(backend):
        with pytest.raises(ValueError, match=message) as caught:
            OneBitAdam(Toy().parameters(), backend=backend, **(arguments if backend.rank == 1 else {}))
        return str(caught.value)

    texts = on_threads(3, run)
    assert texts[0].startswith("rank 1 refused its arguments: ")
    assert texts[2] == texts[0]


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ([], ValueError, "empty parameter list"),
        (torch.zeros(2), TypeError, "iterable"),
        (
            [torch.zeros(2, dtype=torch.complex64)],
            ValueError,
            "parameter 0 is complex64; allowed are float64, float32, bfloat16",
        ),
        ([torch.zeros(1), torch.zeros(2, dtype=torch.int64)], ValueError, "parameter 1 is int64"),
    ],
)
def test_parameters_that_cannot_be_optimized(params, error, message):
    with pytest.raises(error, match=message):
        OneBitAdam(params)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda m: list(m.parameters())[:-2],
            r"parameter lists differ between ranks: rank 1 has \d+ parameters with \d+ elements",
        ),
        (lambda m: list(m.parameters())[::-1], "parameter lists differ between ranks: rank 1"),
        (lambda m: list(m.double().parameters()), "parameter lists differ between ranks: rank 1"),
        (
            lambda m: [{"params": list(m.parameters())[:3]}, {"params": list(m.parameters())[3:]}],
            "in 2 groups, rank 0 has",
        ),
    ],
)
def test_ranks_with_different_parameters_say_which_rank_differs(change, message):
    def run(backend):
        model = Toy()
        with pytest.raises(ValueError, match=message):
            OneBitAdam(change(model) if backend.rank == 1 else list(model.parameters()), backend=backend)

    on_threads(3, run)


@pytest.mark.parametrize("make", [OneBitAdam, LocalSGD])
def test_the_first_parameter_that_differs_is_named_on_every_rank_and_what_to_do(make):
    def run(backend, freeze):
        model = Toy()
        if backend.rank == 1 and freeze:
            model.bias.requires_grad_(False)
        elif backend.rank == 1:
            model.bias = nn.Parameter(torch.zeros(7))
        with pytest.raises(ValueError, match="parameter lists differ between ranks") as caught:
            make(list(model.parameters()), backend=backend)
        return str(caught.value)

    for freeze, odd in ((False, "float32 of shape (7,) on cpu"), (True, "on cpu, frozen")):
        texts = on_threads(2, lambda backend, freeze=freeze: run(backend, freeze))
        assert len(set(texts)) == 1
        assert "the first that differs: rank 1 has parameter " in texts[0]
        assert odd in texts[0].split("the first that differs: rank 1 has ")[1].split("), rank 0 has parameter")[0]
        assert texts[0].endswith("build the same model on every rank, and give its parameters in the same order")


@pytest.mark.parametrize(
    "different",
    [{"lr": 0.5}, {"compressor": Sign(block=64)}, {"bucket_mb": 1.0}, {"freeze_step": 9}, {"max_grad_norm": 2.0}],
)
def test_ranks_with_different_settings(different):
    def run(backend):
        with pytest.raises(ValueError, match="settings or kernel providers differ between ranks: rank 2") as caught:
            OneBitAdam(Toy().parameters(), backend=backend, **(different if backend.rank == 2 else {}))
        assert f"; the first that differs: {next(iter(different))!r}; give every rank " in str(caught.value)

    on_threads(3, run)


@pytest.mark.parametrize(
    ("make", "different"),
    [
        (NoLoCo, {"seed": 3}),
        (NoLoCo, {"outer_momentum": 0.25}),
        (DiLoCo, {"compressor": Int8(block=64)}),
        (DiLoCo, {"betas": (0.9, 0.95)}),
        (SignMomentum, {"sign": RandomSign(1)}),
        (SparseLoCo, {"mean_over": "contributors"}),
        (CSER, {"reset_compressor": RandomBlocks(2)}),
        (OneBitAdam, {"warmup_compressor": Int8()}),
        (ZeroOneAdam, {"refresh_compressor": Int8()}),
    ],
    ids=str,
)
def test_the_setting_that_differs_is_named(make, different):
    def run(backend):
        with pytest.raises(ValueError, match="differ between ranks: rank 1") as caught:
            make(Toy().parameters(), backend=backend, **(different if backend.rank == 1 else {}))
        assert f"; the first that differs: {next(iter(different))!r}; give every rank " in str(caught.value)

    on_threads(2, run)


def test_a_bad_late_group_is_refused_on_all_ranks_and_training_goes_on():
    def run(backend):
        model = Toy()
        optimizer = OneBitAdam([model.weight, model.bias], freeze_step=2, backend=backend)
        lr = -1.0 if backend.rank == 0 else 0.1
        with pytest.raises(ValueError, match=r"lr must be a number >= 0, got -1.0"):
            optimizer.add_param_group({"params": [model.gain], "lr": lr})
        assert len(optimizer.param_groups) == 1
        train(model, optimizer, range(4), backend.rank, 2)
        return params_of(model)

    a, b = on_threads(2, run)
    assert same_bits(a, b)


def test_a_sparse_gradient_on_one_rank_stops_all_before_anything_changes():
    def run(backend):
        model = Toy()
        optimizer = OneBitAdam(model.parameters(), freeze_step=1, backend=backend)
        train(model, optimizer, range(3), backend.rank, 2)
        before = params_of(model), tensors_in(optimizer.state_dict())
        backward(model, 3, backend.rank, 2)
        if backend.rank == 1:
            model.embedding.grad = model.embedding.grad.to_sparse()
        error, message = (
            (ValueError, "sparse_coo; allowed are dense") if backend.rank == 1 else (RuntimeError, "rank 1 cannot take")
        )
        with pytest.raises(error, match=message):
            optimizer.step()
        assert same_bits(before[0], params_of(model))
        assert same_bits(before[1], tensors_in(optimizer.state_dict()))
        train(model, optimizer, range(4, 6), backend.rank, 2)
        return params_of(model)

    a, b = on_threads(2, run)
    assert same_bits(a, b)


def test_a_backend_that_lacks_a_verb():
    class Half:
        rank, world_size = 0, 2

        def all_reduce(self, x):
            raise AssertionError("nothing may be communicated")

    with pytest.raises(ValueError, match="lacks all_to_all, all_gather, broadcast"):
        OneBitAdam(Toy().parameters(), backend=Half())


def test_a_backend_and_a_process_group_together():
    with pytest.raises(ValueError, match="either process_group or backend"):
        OneBitAdam(Toy().parameters(), backend=LocalBackend(), process_group=object())


def test_a_process_group_without_torch_distributed():
    group = dist.ProcessGroup(0, 1)
    with pytest.raises(RuntimeError, match="init_process_group"):
        OneBitAdam(Toy().parameters(), process_group=group)


@pytest.mark.parametrize(
    ("group", "hint"),
    [
        (2, r"new_group\(\[0, 1"),
        ([0, 1], r"new_group\(\[0, 1"),
        ("nccl", r"init_process_group\('nccl'\)"),
        (nn.Linear, ""),
    ],
)
@pytest.mark.parametrize("make", [OneBitAdam, LocalSGD])
def test_what_is_no_process_group_is_named_even_before_there_are_any(make, group, hint):
    with pytest.raises(ValueError, match=f"must be a ProcessGroup, a DeviceMesh or None, got .*{hint}"):
        make(Toy().parameters(), process_group=group)


def test_attach_wants_a_ddp_model():
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="a bare Linear needs no attaching"):
        attach(model, OneBitAdam(model.parameters()))


def test_a_rank_that_fails_takes_the_others_along_instead_of_leaving_them_to_wait():
    def run(backend):
        if backend.rank == 1:
            raise KeyError("broken")
        backend.all_reduce(torch.zeros(1)).wait()

    with pytest.raises((KeyError, RuntimeError), match="broken"):
        ThreadWorld(3, timeout=5).run(run)


def test_a_world_of_threads_needs_a_rank():
    with pytest.raises(ValueError, match="world_size must be at least 1, got 0"):
        ThreadWorld(0)


def said_of(make, bad):
    """What each of two ranks says where the second layer of rank 1 is ``bad()``."""

    def ours(backend):
        layer = bad() if backend.rank else nn.Linear(2, 2)
        with pytest.raises(ValueError) as caught:
            make([*nn.Linear(2, 2).parameters(), *layer.parameters()], backend=backend)
        return str(caught.value)

    return on_threads(2, ours)


def sgd(params):
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


@pytest.mark.parametrize(
    "make",
    [CSER, QSparseLocalSGD, *(lambda params, backend, cls=cls: cls(sgd(params), backend=backend) for cls in OF_ROUNDS)],
    ids=["CSER", "QSparseLocalSGD", *(cls.__name__ for cls in OF_ROUNDS)],
)
@pytest.mark.parametrize("late", [False, True], ids=["at once", "in a group that comes later"])
def test_two_parameters_in_one_memory_are_refused_where_rounds_set_them(make, late):
    """What one of them has learnt in a round would be written over by the other."""

    def run(backend):
        buffer = torch.arange(12.0)
        apart = [nn.Parameter(buffer[:4]), nn.Parameter(buffer[4:8]), nn.Parameter(torch.ones(3))]
        matrix = torch.ones(4, 4)
        columns = [nn.Parameter(matrix[:, :2]), nn.Parameter(matrix[:, 2:])]
        over = nn.Parameter(buffer[7:])
        if not late:
            with pytest.raises(ValueError, match="parameters 1 and 3 share memory, and a round of"):
                make([*apart, over, *columns], backend=backend)
        optimizer = make([*apart, *columns], backend=backend)
        if late:
            with pytest.raises(ValueError, match="parameters 1 and 5 share memory"):
                optimizer.add_param_group({"params": [over]})
        assert sum(len(group["params"]) for group in optimizer.param_groups) == 5

    on_threads(2, run)


@pytest.mark.parametrize("make", [OneBitAdam, DiLoCo])
def test_parameters_of_a_lazy_module_that_has_not_computed_yet(make):
    first, second = said_of(make, lambda: nn.LazyLinear(2))
    assert "rank 1 refused its arguments: parameter 2 has no shape yet, it is of a lazy module" in first
    assert "parameter 2 has no shape yet, it is of a lazy module such as LazyLinear" in second


def test_parameters_without_memory_and_devices_that_the_backend_cannot_send_from():
    first, second = said_of(OneBitAdam, lambda: nn.Linear(2, 2, device="meta"))
    assert "rank 1 refused its arguments: parameter 2 is on the meta device" in first
    assert "parameter 2 is on the meta device and has no values" in second
    params = list(nn.Linear(2, 2).parameters())
    checks.check_params(params, ("cpu", "cuda"))
    with pytest.raises(ValueError, match="parameter 0 is on cpu, but this backend sends from cuda only"):
        checks.check_params(params, ("cuda",))  # as NCCL


@pytest.mark.parametrize("make", [OneBitAdam, LocalSGD])
def test_a_model_in_place_of_its_parameters(make):
    with pytest.raises(TypeError, match=r"got the model Sequential: give it \.parameters\(\)"):
        make(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(TypeError, match=r"got the method parameters: call it, parameters\(\)"):
        make(nn.Linear(2, 2).parameters)


@pytest.mark.parametrize("given", [Sign, "Sign", "sign"])
def test_a_compressor_that_is_not_made_yet(given):
    what = re.escape("the class Sign" if given is Sign else repr(given))
    for make in (OneBitAdam, LocalSGD, lambda p, compressor: compress_gradients(nn.Linear(2, 2), compressor)):
        with pytest.raises(ValueError, match=rf"got {what}: write commopt\.compress\.Sign\(\)"):
            make(Toy().parameters(), compressor=given)


@pytest.mark.parametrize(
    ("make", "name", "message"),
    [
        (OneBitAdam, "freeze_steps", "OneBitAdam.* argument 'freeze_steps'; did you mean freeze_step\\?"),
        (LocalSGD, "peroid", "LocalSGD.* argument 'peroid', which its base AdamW does not .*; did you mean period\\?"),
        (LocalSGD, "weight_deacy", "argument 'weight_deacy', .*; did you mean weight_decay\\?"),
    ],
)
def test_a_keyword_with_a_letter_wrong(make, name, message):
    with pytest.raises(TypeError, match=message):
        make(Toy().parameters(), **{name: 1})


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda p: QSparseLocalSGD(p, compressor=None),
            ValueError,
            "^compressor must be a RandomBlocks or a Compressor",
        ),
        (lambda p: OneBitAdam(p, compressor=RandomBlocks(4)), ValueError, "which is for CSER and QSparseLocalSGD"),
        (
            lambda p: DiLoCo(p, compressor=PowerSGD(2)),
            ValueError,
            r"commopt.compress_gradients\(model, PowerSGD\(rank=2",
        ),
        (
            lambda p: ZeroOneAdam(p, refresh_compressor="int4"),
            ValueError,
            "^refresh_compressor must be a commopt.compress.Compressor such as .*, got 'int4'",
        ),
        (lambda p: CSER(p, compressor=TopK), ValueError, r"got the class TopK: write commopt.compress.TopK\(\)"),
        (
            lambda p: ZeroOneAdam(p, freeze_step=4),
            TypeError,
            "'freeze_step'; allowed are params, lr, .* variance, sync, ",
        ),
        (
            lambda p: QSparseLocalSGD(p, H=4),
            TypeError,
            "'H'; allowed are params, lr, momentum, compressor, .* period, ",
        ),
        (
            lambda p: Lamb(p, freeze_step=4),
            TypeError,
            "'freeze_step'; allowed are params, .* max_coeff, maximize, foreach",
        ),
        (lambda p: DiLoCo(p, H=4), TypeError, "'H', .*; its own are params, base, period, "),
        (lambda _: OneBitAdam(None), TypeError, r"got None: give it model.parameters\(\)"),
        (lambda _: LocalSGD(None), TypeError, r"got None: give it model.parameters\(\)"),
    ],
)
def test_what_is_meant_for_something_else(make, error, message):
    with pytest.raises(error, match=message):
        make(Toy().parameters())


def test_join_with_an_optimizer():
    for cls in (OneBitAdam, LocalSGD):
        with pytest.raises(RuntimeError, match=r"same number of batches .*Join\(\[ddp_model\], throw_on_early"):
            Join([cls(Toy().parameters())])


def test_sparse_gradients_that_would_be_compressed():
    model = nn.Embedding(5, 4, sparse=True)
    compress_gradients(model, Int8())
    with pytest.raises(ValueError, match=r"of shape \(5, 4\) is torch.sparse_coo; .* sparse=False"):
        model(torch.tensor([1, 2])).sum().backward()


def test_attach_says_what_comes_first_and_what_there_is_for_other_optimizers():
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="got Linear; the model comes first"):
        attach(OneBitAdam(model.parameters()), model)
    with pytest.raises(ValueError, match=r"got SGD; any other has commopt.compress_gradients\("):
        attach(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_the_name_of_a_backend_of_torch_is_where_it_does_not_belong():
    with pytest.raises(ValueError, match=r"backend 'nccl' lacks rank.*call init_process_group\('nccl'\)"):
        OneBitAdam(Toy().parameters(), backend="nccl")


@pytest.mark.parametrize(("ranks", "backend", "said"), [("2", None, 1), ("1", None, 0), ("2", LocalBackend(), 0)])
def test_a_rank_that_a_launcher_has_started_and_that_has_no_process_group(monkeypatch, caplog, ranks, backend, said):
    monkeypatch.setenv("WORLD_SIZE", ranks)
    model = Toy()
    train(model, OneBitAdam(model.parameters(), backend=backend), range(2))
    assert caplog.text.count("this rank trains alone, though WORLD_SIZE is 2: call torch.distributed.init") == said


@pytest.mark.parametrize("policy", ["variance", "sync"])
@pytest.mark.parametrize("given", [3, "auto", {1, 2}, True])
def test_a_policy_that_is_none_is_an_error_on_all_ranks(policy, given):
    def run(backend):
        with pytest.raises(ValueError, match=f"{policy} must be a .*Policy or a mapping of its arguments") as caught:
            ZeroOneAdam(Toy().parameters(), backend=backend, **({policy: given} if backend.rank else {}))
        return str(caught.value)

    texts = on_threads(2, run)
    assert texts[0].startswith("rank 1 refused its arguments: ")
    assert all(repr(given) in text for text in texts)


@pytest.mark.parametrize("period", [0, -1, 2.5, True, "x", None])
@pytest.mark.parametrize(
    "make",
    [CSER, QSparseLocalSGD, DiLoCo, partial(DiLoCo, streaming=Streaming(2, 1))],
    ids=lambda make: str(make)[-30:],
)
def test_a_period_that_was_changed_to_what_is_not_allowed_is_an_error_on_all_ranks(make, period):
    def run(backend):
        model = Toy()
        optimizer = make(model.parameters(), lr=1e-2, period=4, backend=backend)
        train(model, optimizer, range(2), backend.rank, 2)
        before = params_of(model)
        optimizer.param_groups[0]["period"] = period
        with pytest.raises(ValueError, match=re.escape(f"period must be an int >= 1, got {period!r}")):
            train(model, optimizer, range(2, 3), backend.rank, 2)
        assert same_bits(before, params_of(model))
        optimizer.param_groups[0]["period"] = 3
        train(model, optimizer, range(2, 5), backend.rank, 2)

    on_threads(2, run)


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize(
    ("make", "key", "value"),
    [
        (partial(OneBitAdam, freeze_step=3), "freeze_step", "x"),
        (partial(OneBitAdam, freeze_step=3), "freeze_step", None),
        (partial(OneBitAdam, freeze_step=3, overlap=True), "freeze_step", "x"),
        (partial(ZeroOneAdam), "variance_stop", "x"),
        (partial(ZeroOneAdam), "variance_stop", None),
    ],
    ids=lambda given: str(given)[-40:],
)
def test_a_phase_that_was_set_to_what_is_none_is_an_error_on_all_ranks(make, key, value, everywhere):
    def run(backend):
        model = Toy()
        optimizer = make(model.parameters(), lr=1e-2, backend=backend)
        train(model, optimizer, range(2), backend.rank, 2)
        before, kept = params_of(model), optimizer.param_groups[0][key]
        mine = everywhere or backend.rank == 1
        if mine:
            optimizer.param_groups[0][key] = value
        with pytest.raises(ValueError if mine else RuntimeError, match=repr(value) if mine else "rank 1 cannot take"):
            train(model, optimizer, range(2, 3), backend.rank, 2)
        assert same_bits(before, params_of(model))
        optimizer.param_groups[0][key] = kept
        train(model, optimizer, range(2, 5), backend.rank, 2)
        return params_of(model)

    if everywhere or not make.keywords.get("overlap"):
        a, b = on_threads(2, run)
        assert same_bits(a, b)


def test_periods_that_streaming_has_no_use_for_or_that_differ_between_groups_are_refused_in_a_step():
    model = Toy()
    params = list(model.parameters())
    optimizer = DiLoCo([{"params": params[:3]}, {"params": params[3:]}], lr=1e-2, period=6, streaming=Streaming(3, 4))
    for group in optimizer.param_groups:
        group["period"] = 4
    with pytest.raises(ValueError, match="delay must be less than the period, 4, got 4"):
        optimizer.step()
    optimizer.param_groups[0]["period"], optimizer.param_groups[1]["period"] = 6, 5
    with pytest.raises(ValueError, match="period must be the same in all parameter groups, got 5 and 6"):
        optimizer.step()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: LoCo(beta="x"), r"beta must be a number in [0, 1), got 'x'"),
        (lambda p: LoCo(beta=1.0), r"beta must be a number in [0, 1), got 1.0"),
        (lambda p: Muon(p, ns_coefficients=3), "ns_coefficients must be three numbers, got 3"),
        (lambda p: Muon(p, ns_coefficients=(1, 2, "x")), "ns_coefficients must be three numbers, got (1, 2, 'x')"),
        (lambda p: Muon(p, lr="x"), "lr must be a number >= 0, got 'x'"),
        (lambda p: Muon(p, nesterov=3), "nesterov must be True or False, got 3"),
        (lambda p: Muon(p, momentum="x"), "momentum must be a number in [0, 1), got 'x'"),
    ],
)
def test_what_muon_and_loco_do_not_take(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make([nn.Parameter(torch.zeros(3, 2))])


@pytest.mark.parametrize("cls", [Lamb, Lans])
@pytest.mark.parametrize(
    ("other", "message"),
    [
        (partial(torch.optim.SGD, momentum=0.9), "has no 'betas'"),
        (torch.optim.Adagrad, "has no 'betas'"),
        (torch.optim.Adamax, "has no 'exp_avg_sq'"),
        (OneBitLion, "is that of OneBitLion"),
        (ZeroOneAdam, "is that of ZeroOneAdam"),
        (partial(CSER, momentum=0.9), "is that of CSER"),
        (DiLoCo, r"is that of DiLoCo\(AdamW\)"),
    ],
    ids=lambda other: str(other)[-40:],
)
def test_lamb_and_lans_refuse_the_state_of_another_optimizer(cls, other, message):
    model, theirs = Toy(), Toy()
    optimizer, one = cls(model.parameters()), other(theirs.parameters(), lr=1e-2)
    for net, opt in ((model, optimizer), (theirs, one)):
        train(net, opt, range(3), 0, 1)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(one.state_dict())
    after = optimizer.state_dict()
    assert same_bits(tensors_in(before), tensors_in(after))
    assert before["param_groups"] == after["param_groups"]


@pytest.mark.parametrize("cls", [Lamb, Lans])
def test_lamb_and_lans_refuse_a_state_of_other_shapes_and_take_adams(cls):
    p, q = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(2, 3))
    adam, optimizer = torch.optim.Adam([q]), cls([p])
    q.grad = torch.ones_like(q)
    adam.step()
    with pytest.raises(
        ValueError, match=r"exp_avg in the loaded state has shape \(2, 3\), but the parameter has shape \(3, 2\)"
    ):
        optimizer.load_state_dict(adam.state_dict())
    other = cls([q])
    other.load_state_dict(adam.state_dict())
    assert torch.equal(other.state[q]["exp_avg_sq"], adam.state[q]["exp_avg_sq"])


@pytest.mark.parametrize("cls", [OneBitAdam, DiLoCo])
def test_a_parameter_group_that_is_gone_is_an_error_with_what_to_do(cls):
    first, second = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = cls([{"params": [first]}, {"params": [second]}], lr=0.1)
    second.grad = torch.ones(3)
    optimizer.step()
    del optimizer.param_groups[0]
    with pytest.raises(ValueError, match=r"1 of 2 parameters are gone from the parameter groups, .*; freeze them"):
        optimizer.step()
