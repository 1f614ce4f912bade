"""A run that has gone wrong ends, and says where: what is not finite, which rank differs, who has other settings."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from every import every_variant, make
from torch import Tensor, nn
from worlds import Toy, backward, on_processes, on_threads, params_of, same_bits, tensors_in, train

import commopt
from commopt import DiLoCo, Guard, LocalSGD, OneBitAdam, Streaming, ZeroOneAdam
from commopt.agreement import setup
from commopt.agreement.calls import OutOfStep, StepRefused
from commopt.agreement.digest import CHUNK, digest
from commopt.comm import CollectiveError
from commopt.compress import Int4
from commopt.optim import NotFinite, ReplicasDiffer, SyncPolicy, VariancePolicy
from commopt.outer.flight import Flight
from commopt.state import comparing
from commopt.state.guard import describe_difference, majority

# not finite -----------------------------------------------------------------------------------------------------------


@every_variant
def test_a_poisoned_parameter_ends_the_run_and_is_named(name):
    def run(backend):
        model = Toy()
        optimizer = make(name, model.named_parameters(), backend=backend, guard=Guard(max_skipped=3))
        train(model, optimizer, range(4), backend.rank, 3)
        if backend.rank == 1:
            with torch.no_grad():
                model.weight.view(-1)[0] = math.nan
        with pytest.raises((NotFinite, RuntimeError)) as caught:
            train(model, optimizer, range(4, 24), backend.rank, 3)
        return str(caught.value), optimizer.skipped_steps

    for text, skipped in on_threads(3, run):
        assert "rank 1: " in text
        assert "(1 of 25 elements)" in text
        assert "3 " in text
        assert "in a row were skipped" in text
        assert skipped <= 9


def test_gradients_whose_norm_is_too_large_are_named_where_nothing_is_inf_or_nan():
    def run(backend):
        model = Toy()
        optimizer = OneBitAdam(model.named_parameters(), backend=backend, guard=Guard(max_skipped=2))
        backward(model, 0, backend.rank, 2)
        model.bias.grad[:] = 1e18
        optimizer.step()
        with pytest.raises(NotFinite, match=r"the norm of the gradients is above 1e\+14\. Go on from"):
            optimizer.step()

    on_threads(2, run)


def test_only_gradients_that_are_not_finite_are_named_too():
    def run(backend):
        model = Toy()
        optimizer = OneBitAdam(model.named_parameters(), backend=backend, guard=Guard(max_skipped=2))
        backward(model, 0, backend.rank, 2)
        if backend.rank == 0:
            model.bias.grad[:] = math.inf
        optimizer.step()
        with pytest.raises(NotFinite) as caught:
            optimizer.step()
        return str(caught.value)

    texts = on_threads(2, run)
    assert texts[0] == texts[1]
    assert "rank 0: the gradient of bias" in texts[0]
    assert "rank 1" not in texts[0]


def test_a_step_that_is_taken_starts_the_count_anew_and_none_never_ends():
    def run(backend, most):
        model = Toy()
        optimizer = OneBitAdam(model.parameters(), backend=backend, guard=Guard(max_skipped=most))
        for step in range(40):
            backward(model, step, backend.rank, 2)
            if most is None or step % 3:
                model.bias.grad[:] = math.nan
            optimizer.step()
        return optimizer.skipped_steps

    assert on_threads(2, lambda backend: run(backend, 3)) == [26, 26]
    assert on_threads(2, lambda backend: run(backend, None)) == [40, 40]


@pytest.mark.parametrize("local", [False, True])
def test_a_good_state_that_is_loaded_starts_the_count_anew(local):
    def run(backend: Any) -> None:
        p, settings = nn.Parameter(torch.zeros(40)), {"lr": 0.1, "guard": Guard(max_skipped=3), "backend": backend}
        optimizer = LocalSGD([p], period=2, **settings) if local else OneBitAdam([p], freeze_step=2, **settings)

        def steps(*values: float) -> None:
            for value in values:
                p.grad = torch.full_like(p, value)
                optimizer.step()

        steps(1.0)
        good = optimizer.state_dict()
        with pytest.raises(NotFinite):
            steps(*[math.nan] * 10)
        optimizer.load_state_dict(good)
        steps(math.nan, math.nan, 1.0)

    on_threads(2, run)


def test_alone_too():
    model = Toy()
    optimizer = OneBitAdam(model.named_parameters(), guard=Guard(max_skipped=2))
    optimizer.state[model.weight]["exp_avg"].fill_(math.inf)
    with torch.no_grad():
        model.weight.fill_(math.nan)
    with pytest.raises(NotFinite, match=r"rank 0: weight .*exp_avg of bucket 0"):
        train(model, optimizer, range(3))


@every_variant
def test_a_gradient_too_large_for_float32_arithmetic_counts_as_not_finite(name):
    """Its square overflows: v, a scale or a residual would be infinite for ever."""

    def run(backend):
        model = Toy()
        optimizer = make(name, model.parameters(), backend=backend)
        train(model, optimizer, range(6), backend.rank, 2)
        backward(model, 6, backend.rank, 2)
        if backend.rank == 0:
            model.weight.grad.view(-1)[3] = 1e20
        optimizer.step()
        skipped = optimizer.skipped_steps + getattr(optimizer, "dropped_gradients", 0)
        train(model, optimizer, range(7, 13), backend.rank, 2)
        finite = all(t.isfinite().all() for t in [*params_of(model), *tensors_in(optimizer.state_dict())])
        return skipped, finite

    results = on_threads(2, run)
    assert max(skipped for skipped, _ in results) == 1
    assert all(finite for _, finite in results)


# replicas that differ -------------------------------------------------------------------------------------------------


def flip(x: Tensor, bit: int = 3) -> None:
    """Flips one bit of one element."""
    x.detach().view(-1).view(torch.int32)[7] ^= 1 << bit


def spoil(optimizer: Any, model: Toy, what: str) -> None:
    """Flips a bit of what all ranks have in common."""
    flip(model.weight if what == "parameter" else optimizer.state[model.weight][what])


IN_COMMON = {
    "OneBitAdam warming up": ("parameter", "exp_avg", "exp_avg_sq"),
    "OneBitAdam": ("parameter", "exp_avg", "exp_avg_sq"),
    "OneBitAdam overlapping": ("parameter", "exp_avg_sq"),
    "OneBitLamb": ("parameter", "exp_avg_sq", "fresh_exp_avg_sq"),
    "OneBitLion": ("parameter", "exp_avg"),
    "ZeroOneAdam": ("anchor", "exp_avg_sq"),
    "QSparseLocalSGD": ("anchor",),
    "LocalSGD": ("anchor",),
    "SlowMo": ("anchor", "outer_momentum"),
    "DiLoCo": ("anchor", "outer_momentum"),
    "SignMomentum": ("anchor", "outer_momentum"),
    "SparseLoCo": ("anchor",),
}
"""What all ranks have in common after 7 steps: within a round, where there are any. CSER(RandomBlocks) has nothing then
but its settings."""
COMMON = [(name, what) for name, parts in IN_COMMON.items() for what in parts]


@pytest.mark.parametrize(("name", "what"), COMMON)
def test_a_flipped_bit_is_noticed_and_the_rank_named(name, what):
    def run(backend):
        model = Toy()
        optimizer = make(name, model.parameters(), backend=backend, guard=Guard(check_every=4))
        train(model, optimizer, range(7), backend.rank, 3)
        if backend.rank == 1:
            spoil(optimizer, model, what)
        with pytest.raises(ReplicasDiffer) as caught:
            train(model, optimizer, range(7, 16), backend.rank, 3)
        return str(caught.value)

    texts = on_threads(3, run)
    assert len(set(texts)) == 1
    assert "rank 1 differs from all others" in texts[0]


def check_repaired(found: list[tuple[list[Tensor], Any]], caplog: pytest.LogCaptureFixture) -> None:
    """Parameters and digests by rank are all alike, and it was said once that those of rank 1 were not."""
    first, *others = found
    for other in others:
        assert same_bits(first[0], other[0])
        assert first[1] == other[1]
    assert caplog.text.count("rank 1 differs from all others") == 1


@pytest.mark.parametrize(("name", "what"), COMMON)
def test_a_replica_that_differs_is_repaired_from_the_majority(name, what, caplog):
    def run(backend):
        model = Toy()
        guard = Guard(check_every=4, on_difference="repair")
        optimizer = make(name, model.parameters(), backend=backend, guard=guard)
        train(model, optimizer, range(7), backend.rank, 3)
        if backend.rank == 1:
            spoil(optimizer, model, what)
        train(model, optimizer, range(7, 16), backend.rank, 3)
        return params_of(model), comparing.digests(optimizer)

    check_repaired(on_threads(3, run), caplog)


@pytest.mark.parametrize("between", ["nothing", "synchronized", "resumed"])
def test_rounds_compare_though_no_multiple_of_check_every_is_one(between):
    """Rounds at 5, 7, 9, ...: the first one after each fourth step, whatever is done between two of them."""

    def run(backend):
        model, compared = Toy(), []

        def made():
            policies = {"variance": VariancePolicy(2, 3), "sync": SyncPolicy(2, None, 2)}
            optimizer = ZeroOneAdam(model.parameters(), backend=backend, guard=Guard(check_every=4), **policies)
            optimizer._compare = lambda number, table: compared.append(number)
            return optimizer

        optimizer = made()
        train(model, optimizer, range(8), backend.rank, 2)
        if between == "synchronized":
            optimizer.synchronize()
        if between == "resumed":
            state, optimizer = optimizer.state_dict(), made()
            optimizer.load_state_dict(state)
            optimizer._check_next = False  # loading alone would have it compare
        train(model, optimizer, range(8, 20), backend.rank, 2)
        return compared

    assert on_threads(2, run) == [[1, 5, 9, 13, 17]] * 2


def test_two_ranks_cannot_outvote_each_other():
    def run(backend):
        model = Toy()
        guard = Guard(check_every=1, on_difference="repair")
        optimizer = OneBitAdam(model.parameters(), backend=backend, guard=guard)
        if backend.rank:
            flip(model.weight)
        before = params_of(model)
        with pytest.raises(ReplicasDiffer, match=r"ranks \[0\] and \[1\] differ in the parameters of bucket 0"):
            train(model, optimizer, range(1), backend.rank, 2)
        return same_bits(before, params_of(model))

    assert on_threads(2, run) == [True, True]


def test_states_that_differ_are_noticed_right_after_loading():
    def run(backend):
        model = Toy()
        optimizer = OneBitAdam(model.parameters(), backend=backend)
        train(model, optimizer, range(2), backend.rank, 3)
        state = optimizer.state_dict()
        if backend.rank == 2:
            state["state"][0]["exp_avg_sq"][0] += 1
            optimizer.load_state_dict(state)  # on one rank alone
        with pytest.raises(ReplicasDiffer, match=r"rank 2 differs from all others in exp_avg_sq of bucket"):
            train(model, optimizer, range(2, 3), backend.rank, 3)

    on_threads(3, run)


def test_none_never_compares():
    def run(backend):
        model = Toy()
        optimizer = OneBitAdam(model.parameters(), backend=backend, guard=Guard(check_every=None))
        if backend.rank:
            flip(model.weight)
        train(model, optimizer, range(101), backend.rank, 2)

    on_threads(2, run)


def test_digests_see_single_bits_permutations_and_nothing_else():
    generator = torch.Generator().manual_seed(0)
    for shape in [(), (7,), (3, 5), (2 * CHUNK + 3,)]:
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            x = torch.randn(shape, generator=generator).to(dtype)
            assert digest(x) == digest(x.clone())
            for byte in {0, x.numel() * x.itemsize // 2, x.numel() * x.itemsize - 1}:
                for bit in (0, 7):
                    other = x.clone()
                    other.view(-1).view(torch.uint8)[byte] ^= 1 << bit
                    assert digest(other) != digest(x)
    x = torch.randn(6, 6, generator=generator)
    assert len({digest(y).item() for y in (x, x.T, x.flip(0), x.flip(1), x.roll(2, 0), -x)}) == 6
    assert digest(x.T) == digest(x.T.contiguous())
    assert digest(x[:1, 1]) == digest(x[:1, 1:2].clone())  # one element, of any stride


def test_digests_are_those_of_the_values_wherever_they_begin_in_their_storage():
    """As gradients that are views of DDP's buckets, empty ones too, and parameters that were mapped from a file."""
    mapped = torch.frombuffer(bytearray(range(64)), dtype=torch.float32, offset=4)
    for x in (torch.ones(9), mapped):
        for start in range(4):
            for end in (start, start + 1, start + 2, start + 5):
                assert digest(x[start:end]) == digest(x[start:end].clone())


def test_majorities():
    assert majority([[1, 2], [1, 2], [1, 3]]) == 0
    assert majority([[9, 2], [1, 2], [1, 2]]) == 1
    assert majority([[1], [2]]) is None
    assert majority([[1], [1], [2], [2]]) is None
    text = describe_difference([[1, 2], [1, 2], [1, 3]], ["a", "b"], range(3))
    assert text == "rank 2 differs from all others in b"


# ranks that are not at one place, or not of one make ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["OneBitAdam", "OneBitLamb", "OneBitLion", "ZeroOneAdam", "CSER", "QSparseLocalSGD"])
@pytest.mark.parametrize(
    ("key", "value"), [("lr", 0.5), ("lr", torch.tensor(0.5)), ("step", 77), ("weight_decay", 0.3)]
)
def test_other_hyper_parameters_on_one_rank_are_an_error_on_all(name, key, value):
    def run(backend):
        model = Toy()
        optimizer = make(name, model.parameters(), backend=backend)
        train(model, optimizer, range(3), backend.rank, 3)
        if backend.rank == 2:
            optimizer.param_groups[0][key] = value
        with pytest.raises(RuntimeError) as caught:
            train(model, optimizer, range(3, 6), backend.rank, 3)
        assert isinstance(caught.value, OutOfStep)
        return str(caught.value)

    texts = on_threads(3, run)
    for text in texts:
        assert f"{key} of parameter group 0 is" in text
        assert "on rank 2 and" in text


def test_a_freeze_step_changed_on_one_rank_is_an_error_and_no_hang():
    def run(backend):
        model = Toy()
        optimizer = OneBitAdam(model.parameters(), freeze_step=100, backend=backend)
        train(model, optimizer, range(3), backend.rank, 2)
        if backend.rank:
            optimizer.param_groups[0]["freeze_step"] = 2
        with pytest.raises(OutOfStep, match="freeze_step of parameter group 0 is 2 on rank 1 and 100 on rank 0"):
            train(model, optimizer, range(3, 4), backend.rank, 2)

    on_threads(2, run)


def test_a_norm_to_clip_to_that_one_rank_sets_is_an_error_on_all():
    def run(backend):
        model = Toy()
        optimizer = OneBitAdam(model.parameters(), freeze_step=2, max_grad_norm=1.0, backend=backend)
        train(model, optimizer, range(3), backend.rank, 2)
        if backend.rank:
            optimizer.max_grad_norm = 0.5
        with pytest.raises(OutOfStep, match=r"max_grad_norm is 0\.5 on rank 1 and 1\.0 on rank 0"):
            train(model, optimizer, range(3, 4), backend.rank, 2)

    on_threads(2, run)


def test_a_compressor_that_one_rank_sets_is_an_error_on_all():
    def run(backend):
        model = Toy()
        optimizer = OneBitAdam(model.parameters(), freeze_step=2, backend=backend)
        train(model, optimizer, range(3), backend.rank, 2)
        if backend.rank:
            optimizer.compressor = Int4()
        with pytest.raises(OutOfStep, match=r"compressor is Int4\(.*\) on rank 1 and Sign\(.*\) on rank 0"):
            train(model, optimizer, range(3, 4), backend.rank, 2)

    on_threads(2, run)


def test_a_group_that_one_rank_alone_has_is_an_error_on_all():
    def run(backend):
        model = Toy()
        optimizer = OneBitAdam(model.parameters(), freeze_step=2, backend=backend)
        train(model, optimizer, range(1), backend.rank, 2)
        if backend.rank:
            optimizer.param_groups.append({**optimizer.param_groups[0], "params": []})
        with pytest.raises(OutOfStep, match="different numbers of parameter groups"):
            train(model, optimizer, range(1, 2), backend.rank, 2)

    on_threads(2, run)


@pytest.mark.parametrize("name", ["OneBitAdam", "DiLoCo"])
def test_a_norm_to_clip_to_that_is_none_is_refused_when_it_is_set_later(name):
    def run(backend):
        model = Toy()
        optimizer = make(name, model.parameters(), backend=backend)
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.max_grad_norm = -1.0
        with pytest.raises(ValueError, match=r"max_grad_norm must be .*got -1\.0"):
            train(model, optimizer, range(1), backend.rank, 2)
        assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before))

    on_threads(2, run)


@pytest.mark.parametrize(
    "fact",
    ["versions of commopt", "versions of torch", "payload formats", "instruction sets of torch (ATEN_CPU_CAPABILITY)"],
)
def test_another_version_or_instruction_set_is_refused_by_name(fact):
    here, real = threading.local(), setup.versions

    def versions(devices):
        facts = real(devices)
        assert fact in facts
        return {**facts, fact: "another"} if here.rank == 1 else facts

    def run(backend):
        here.rank = backend.rank
        with pytest.raises(ValueError, match="differ between ranks: rank 1 has another, rank 0 has") as caught:
            OneBitAdam(Toy().parameters(), backend=backend)
        assert str(caught.value).startswith(fact)

    with mock.patch("commopt.state.binding.versions", versions):
        on_threads(2, run)


@pytest.mark.parametrize("change", [lambda x: x.T, lambda x: x.flip(0), lambda x: x.roll(1, 1)])
def test_replicas_that_are_permutations_of_each_other_are_not_taken_for_equal(change, caplog):
    def run(backend):
        model = nn.Linear(6, 6)
        with torch.no_grad():
            model.weight.copy_(torch.arange(36.0).view(6, 6))
            if backend.rank == 1:
                model.weight.copy_(change(model.weight.clone()))
        OneBitAdam(model.parameters(), backend=backend)
        return params_of(model)

    first, second = on_threads(2, run)
    assert same_bits(first, second)
    assert torch.equal(first[0], torch.arange(36.0).view(6, 6))
    assert "parameters differed between ranks" in caplog.text


# partitioned parameters -----------------------------------------------------------------------------------------------


def partitioned(rank: int, world_size: int) -> dict[str, tuple[str, bool]]:
    """What an optimizer says to parameters that are partitioned, and whether all were left as they were."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def two_layers() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def attempt(model: nn.Module, make: Callable[[], Any]) -> tuple[str, bool]:
        before = params_of(model)
        try:
            make()
        except (ValueError, RuntimeError) as error:
            return str(error), same_bits(before, params_of(model))
        return "accepted", same_bits(before, params_of(model))

    out = {}
    for original in (False, True):
        model: nn.Module = FullyShardedDataParallel(
            two_layers(), use_orig_params=original, device_id=torch.device("cpu")
        )
        out[f"FSDP1, use_orig_params={original}"] = attempt(model, lambda m=model: OneBitAdam(m.parameters()))
        out[f"FSDP1, LocalSGD {original}"] = attempt(model, lambda m=model: LocalSGD(m.parameters(), lr=1e-3))
    model = two_layers()
    out["ZeRO"] = attempt(model, lambda: ZeroRedundancyOptimizer(model.parameters(), OneBitAdam, lr=1e-3))
    first = two_layers()
    optimizer = OneBitAdam(first.parameters())
    sharded = FullyShardedDataParallel(first, use_orig_params=True, device_id=torch.device("cpu"))
    sharded(torch.ones(2, 8)).sum().backward()
    out["optimizer before FSDP1"] = attempt(sharded, optimizer.step)
    return out


def test_partitioned_parameters_are_refused_and_left_alone():
    for scenes in on_processes(2, partitioned):
        assert all(unchanged for _, unchanged in scenes.values()), scenes
        for name, (text, _) in scenes.items():
            if name.startswith("FSDP1"):
                assert "is sharded by FullyShardedDataParallel" in text
        assert "ZeroRedundancyOptimizer gives each rank other parameters" in scenes["ZeRO"][0]
        assert "make the optimizer last" in scenes["optimizer before FSDP1"][0]


def test_parameters_with_other_names_are_refused():
    def run(backend):
        model = Toy()
        pairs = [(f"{name}.{backend.rank}", p) for name, p in model.named_parameters()]
        before = params_of(model)
        with pytest.raises(ValueError, match="names of the parameters differ between ranks: rank 1 has"):
            OneBitAdam(pairs, backend=backend)
        assert same_bits(before, params_of(model))

    on_threads(2, run)


def test_no_gradient_at_all_is_said_once(caplog):
    def run(backend):
        model = Toy()
        optimizer = OneBitAdam(model.parameters(), backend=backend)
        for _ in range(3):
            optimizer.step()

    on_threads(2, run)
    assert caplog.text.count("no parameter has a gradient on any rank") == 1
    assert "frozen" not in caplog.text


@pytest.mark.parametrize("before", [True, False], ids=["before it was made", "later"])
@pytest.mark.parametrize("make", [OneBitAdam, DiLoCo])
def test_parameters_that_are_all_frozen_are_said_once(caplog, make, before):
    def run(backend):
        model = Toy()
        model.requires_grad_(not before)
        optimizer = make(model.parameters(), lr=0.1, backend=backend)
        model.requires_grad_(False)
        for _ in range(3):
            optimizer.step()

    on_threads(2, run)
    assert caplog.text.count(f"All {len([*Toy().parameters()])} of this optimizer are frozen") == 1


@pytest.mark.parametrize("make", [OneBitAdam, DiLoCo])
def test_a_part_of_a_model_that_is_frozen_is_nothing_to_be_said_of_where_another_is_trained(caplog, make):
    def run(backend):
        cut, model = backend.sharded(2), Toy()
        model.requires_grad_(cut.rank % 2 == 1)
        optimizer = make(model.parameters(), lr=0.1, backend=cut)
        for p in model.parameters():
            p.grad = torch.full_like(p, 1.0 + cut.rank) if p.requires_grad else None
        optimizer.step()

    on_threads(4, run)
    assert "no parameter has a gradient" not in caplog.text


# settings -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad", [{"max_skipped": 0}, {"check_every": 1.5}, {"check_every": True}, {"on_difference": "x"}]
)
def test_bad_guards(bad):
    with pytest.raises(ValueError, match=f"{next(iter(bad))} must be"):
        Guard(**bad)


@every_variant
def test_a_guard_is_checked_copied_and_the_same_on_all_ranks(name):
    with pytest.raises(ValueError, match=r"guard must be a commopt.Guard, got 7"):
        make(name, Toy().parameters(), guard=7)
    guard = Guard(max_skipped=3, check_every=None)
    assert copy.deepcopy(make(name, Toy().parameters(), guard=guard)).guard == guard

    def run(backend):
        with pytest.raises(ValueError, match="settings or kernel providers differ between ranks: rank 1"):
            make(name, Toy().parameters(), backend=backend, guard=Guard(max_skipped=3 + backend.rank))

    on_threads(2, run)


def test_a_parameter_that_was_reshaped_on_one_rank_is_an_error_on_all():
    def run(backend):
        model = Toy()
        optimizer = OneBitAdam(model.parameters(), backend=backend)
        train(model, optimizer, range(2), backend.rank, 2)
        backward(model, 2, backend.rank, 2)
        if backend.rank == 1:
            model.bias.grad = None
            model.bias.data = model.bias.data[:3].clone()
        with pytest.raises((ValueError, RuntimeError)) as caught:
            optimizer.step()
        return str(caught.value)

    first, second = on_threads(2, run)
    assert "rank 1 cannot take this step" in first
    assert "make the optimizer last" in second


def test_a_variance_that_was_0_on_one_rank_takes_part_again_once_it_is_repaired(caplog):
    def run(backend):
        model = Toy()
        guard = Guard(check_every=100, on_difference="repair")
        optimizer = OneBitAdam(model.parameters(), freeze_step=2, backend=backend, guard=guard)
        train(model, optimizer, range(5), backend.rank, 3)
        if backend.rank == 1:  # alone: the others hear of it in the next step, which is taken with what is there
            state = optimizer.state_dict()
            index = [p is model.weight for p in model.parameters()].index(True)
            state["state"][index]["exp_avg_sq"].zero_()
            optimizer.load_state_dict(state)
        train(model, optimizer, range(5, 12), backend.rank, 3)
        return params_of(model), comparing.digests(optimizer)

    check_repaired(on_threads(3, run), caplog)


def test_an_interrupt_that_has_met_each_rank_elsewhere_in_a_step_is_found_in_the_next_one():
    """As Ctrl-C under torchrun, caught by the script."""

    def run(backend):
        model = Toy()
        settings = {"freeze_step": 2, "bucket_mb": 1e-4, "guard": Guard(check_every=100), "backend": backend}
        optimizer = OneBitAdam(model.parameters(), lr=1e-2, **settings)
        train(model, optimizer, range(4), backend.rank, 2)
        step, done = optimizer.bucket_step, []

        def interrupted(*args):
            yield from step(*args)
            done.append(1)
            if len(done) == 1 + 2 * backend.rank:
                raise KeyboardInterrupt

        with mock.patch.object(optimizer, "bucket_step", interrupted), pytest.raises(KeyboardInterrupt):
            train(model, optimizer, range(4, 5), backend.rank, 2)
        with pytest.raises(ReplicasDiffer, match=r"step 5: ranks \[0\] and \[1\] differ in the parameters of bucket"):
            train(model, optimizer, range(5, 6), backend.rank, 2)

    on_threads(2, run)


def test_an_interrupt_while_a_fragment_is_sent_is_told_when_that_is_due():
    """And not what has become of the collectives by it."""
    confirm, interrupts = Flight.confirm, []

    def interrupted(flight, backend):
        if backend.rank == 1 and flight.fragment == 1:
            interrupts.append(flight)
            raise KeyboardInterrupt
        return confirm(flight, backend)

    def run(backend):
        model = Toy()
        streaming = {"streaming": Streaming(2, 1), "bucket_mb": 1e-4, "backend": backend}
        optimizer = DiLoCo(model.parameters(), lr=1e-2, period=4, **streaming)
        for step in range(8):
            try:
                train(model, optimizer, [step], backend.rank, 2)
            except KeyboardInterrupt:
                assert backend.rank == 1
            except CollectiveError as error:
                return str(error)

    with mock.patch.object(Flight, "confirm", interrupted):
        told = on_threads(2, run, timeout=3)
    assert len(interrupts) == 1
    assert "did not join" in told[0]
    assert "fragment 2 of 2, in flight: KeyboardInterrupt while this rank was sending; nothing is lost" in told[1]


@pytest.mark.parametrize("name", ["OneBitAdam", "OneBitLamb", "ZeroOneAdam", "DiLoCo"])
@pytest.mark.parametrize("lr", [None, "x"])
def test_a_learning_rate_that_is_none_on_one_rank_is_told_to_all(name, lr):
    """After the warm-up, too, where ranks look at the gradients before they agree."""

    def run(backend):
        model = Toy()
        early = {"ZeroOneAdam": {"variance": {"kappa": 2, "stop": 3}}, "DiLoCo": {"period": 1}}
        cls, settings = getattr(commopt, name), early.get(name, {"freeze_step": 2})
        optimizer = cls(model.parameters(), lr=1e-2, backend=backend, **settings)
        train(model, optimizer, range(4), backend.rank, 2)
        if backend.rank == 1:
            optimizer.param_groups[0]["lr"] = lr
        with pytest.raises((StepRefused, ValueError, TypeError)) as caught:
            train(model, optimizer, range(4, 6), backend.rank, 2)
        return str(caught.value)

    others, own = on_threads(2, run)
    assert "rank 1 cannot take this step; its own error says why" in others
    assert name == "DiLoCo" or own == f"lr must be a number >= 0, got {lr!r}"


def test_rounds_longer_than_check_every_compare_each_time():
    assert all(Guard(check_every=100).checks_at(n + 1, n, False, length=500) for n in range(3))


@pytest.mark.parametrize("name", ["OneBitAdam", "ZeroOneAdam", "OneBitLamb"])
@pytest.mark.parametrize("on_difference", ["raise", "repair"])
def test_a_step_count_that_differs_is_noticed_or_repaired(name, on_difference, caplog):
    def run(backend):
        model = Toy()
        guard = Guard(check_every=4, on_difference=on_difference)
        optimizer = make(name, model.parameters(), backend=backend, guard=guard)
        train(model, optimizer, range(7), backend.rank, 3)
        if backend.rank == 1:
            optimizer.state[model.weight]["step"] += 1
        if on_difference == "raise":
            with pytest.raises(ReplicasDiffer, match=r"rank 1 differs from all others in .*step counts of bucket"):
                train(model, optimizer, range(7, 16), backend.rank, 3)
            return None
        train(model, optimizer, range(7, 16), backend.rank, 3)
        return params_of(model), comparing.digests(optimizer)

    found = on_threads(3, run)
    if on_difference == "repair":
        check_repaired(found, caplog)


@pytest.mark.parametrize("name", ["OneBitAdam", "LocalSGD"])
def test_after_a_repair_the_next_step_compares_again(name):
    """So that what was repaired is known to be right, and not only after another ``check_every`` steps. Of LocalSGD
    rounds of two steps are meant."""

    local = name == "LocalSGD"

    def run(backend):
        model, compared = Toy(), []
        if local:
            guard = Guard(check_every=8, on_difference="repair")
            optimizer = LocalSGD(model.parameters(), torch.optim.SGD, lr=1e-3, period=2, backend=backend, guard=guard)
        else:
            guard = Guard(check_every=4, on_difference="repair")
            optimizer = OneBitAdam(model.parameters(), backend=backend, guard=guard)
        compare, group = optimizer._compare, optimizer.param_groups[0]
        optimizer._compare = lambda *args: (compared.append(group["rounds" if local else "step"] + 1), compare(*args))
        for step in range(26 if local else 13):
            if step == (13 if local else 6) and backend.rank == 1:
                common = optimizer.state[model.weight]["anchor"] if local else model.weight.data
                common.view(-1)[7] += 1
            train(model, optimizer, range(step, step + 1), backend.rank, 3)
        return compared

    assert on_threads(3, run) == [[1, 4, 8, 9, 12]] * 3


@pytest.mark.parametrize("what", ["gradients", "parameters"])
def test_a_local_step_and_a_round_that_are_taken_start_the_count_anew(what):
    """Two of three are skipped, and never three in a row: the run goes on."""

    def run(backend):
        model, ends = Toy(), 0
        guard = Guard(max_skipped=3, check_every=None)
        optimizer = LocalSGD(model.parameters(), torch.optim.SGD, lr=1e-2, period=2, backend=backend, guard=guard)
        for step in range(24):
            backward(model, step, backend.rank, 2)
            in_round = optimizer.param_groups[0]["round_step"] > 0
            ends += in_round
            kept = model.bias.detach().clone()
            if backend.rank == 0 and what == "gradients" and step % 3:
                model.bias.grad.fill_(torch.nan)
            if backend.rank == 0 and what == "parameters" and in_round and ends % 3:
                model.bias.data.fill_(torch.nan)
            optimizer.step()
            if what == "parameters" and in_round and ends % 3:
                model.bias.data.copy_(kept)
        return optimizer.skipped_steps, optimizer.skipped_rounds

    assert on_threads(2, run) == ([(16, 0), (0, 0)] if what == "gradients" else [(0, 12), (0, 12)])


@pytest.mark.parametrize(
    "make_one",
    [
        OneBitAdam,
        partial(DiLoCo, period=1),
        partial(DiLoCo, period=2, streaming=Streaming(2, 0)),
        partial(commopt.Gossip, period=1),
    ],
    ids=["steps", "rounds", "fragments", "gossip"],
)
def test_a_state_that_one_rank_alone_has_loaded_starts_the_count_of_skips_anew_on_all(make_one):
    """They count alike, and so raise at the same step, where they tell each other what is not finite."""

    def run(backend):
        model = Toy()
        optimizer = make_one(model.parameters(), lr=1e-2, backend=backend, guard=Guard(max_skipped=3))
        train(model, optimizer, range(2), backend.rank, 2)
        for step in range(2, 7):
            if step == 4 and backend.rank == 1:
                optimizer.load_state_dict(optimizer.state_dict())
            backward(model, step, backend.rank, 2)
            if backend.rank == 0:
                (model.weight.grad if make_one is OneBitAdam else model.weight.data)[0, 0] = math.nan
            if step < 6:
                optimizer.step()
        with pytest.raises(NotFinite, match=r"3 (steps|synchronisations) in a row were skipped: not finite are, on ra"):
            optimizer.step()

    on_threads(2, run)
