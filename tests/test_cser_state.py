"""CSER beyond its arithmetic: resume, skips, bytes, memory, overlap, the mean model, what is refused."""

from __future__ import annotations

import contextlib
import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from worlds import (
    Toy,
    Used,
    all_tensors,
    backward,
    on_processes,
    on_threads,
    params_of,
    same_bits,
    tensors_in,
    through_a_file,
    tokens,
    train,
)

from commopt import CSER, Guard, OneBitAdam, QSparseLocalSGD, attach
from commopt.agreement.calls import FIELDS
from commopt.agreement.decision import AGREEMENT_BYTES
from commopt.comm import CONFIRMATION_BYTES, ThreadBackend, all_reduce_bytes
from commopt.compress import Identity, RandomBlocks, Sign
from commopt.optim import ReplicasDiffer, join_state_dict, split_state_dict
from commopt.state import following
from commopt.state.own_tensor import OwnTensor, Place

SETTINGS: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01, "period": 3}
VARIANTS: dict[str, Any] = {
    "blocks": lambda p, **k: CSER(p, compressor=RandomBlocks(3, 8), reset_compressor=RandomBlocks(2, 8), **k),
    "sign": lambda p, **k: CSER(p, compressor=Sign(16), reset_compressor=Sign(32), **k),
    "sign, blocks": lambda p, **k: CSER(p, compressor=Sign(16), reset_compressor=RandomBlocks(2, 8), **k),
    "local": lambda p, **k: CSER(p, compressor=None, reset_compressor=Identity(), **k),
    "qsparse": lambda p, **k: QSparseLocalSGD(p, compressor=Sign(16), **k),
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def make(variant: str, model: nn.Module, backend: Any, **settings: Any) -> CSER:
    return VARIANTS[variant](model.parameters(), backend=backend, **{"bucket_mb": 2e-4, **SETTINGS, **settings})


# resume ---------------------------------------------------------------------------------------------------------------


@every_variant
@pytest.mark.parametrize(
    ("world_size", "half", "dtype"),
    [
        (1, 5, torch.float32),
        (2, 4, torch.float32),
        (2, 5, torch.bfloat16),
        (2, 6, torch.float32),
        (3, 5, torch.float32),
    ],
)
def test_a_resumed_run_equals_one_never_stopped(variant, world_size, dtype, half):
    """Just after a reset, between two, just before one. The weights are rank 0's, as trainers save them."""
    rank_0: dict[str, Any] = {}

    def run(backend):
        straight = Toy(dtype)
        optimizer = make(variant, straight, backend)
        train(straight, optimizer, range(2 * half), backend.rank, world_size)

        model = Toy(dtype)
        first = make(variant, model, backend)
        train(model, first, range(half), backend.rank, world_size)
        if backend.rank == 0:
            rank_0.update(through_a_file(model.state_dict()))
        replicated, mine = split_state_dict(through_a_file(first.state_dict()))
        backend.all_reduce(torch.zeros(1)).wait()

        resumed = Toy(dtype, seed=9)
        second = make(variant, resumed, backend)
        resumed.load_state_dict(rank_0)
        second.load_state_dict({**replicated, "residuals": mine} if mine else replicated)
        train(resumed, second, range(half, 2 * half), backend.rank, world_size)
        assert same_bits(params_of(straight), params_of(resumed))
        assert same_bits(tensors_in(optimizer.state_dict()), tensors_in(second.state_dict()))
        return replicated, params_of(resumed)

    results = on_threads(world_size, run)
    for own in results:
        for mine, first in zip(own[0]["state"].values(), results[0][0]["state"].values()):
            assert all(torch.equal(mine[name], first[name]) for name in ("step", "anchor") if name in first)


@every_variant
@pytest.mark.parametrize(("old", "new"), [(2, 3), (3, 1), (2, 2)])
def test_at_another_world_size_every_rank_starts_from_the_mean(variant, old, new):
    def save(backend):
        model = Toy(torch.float64)
        optimizer = make(variant, model, backend)
        train(model, optimizer, range(7), backend.rank, old)
        return model.state_dict(), *split_state_dict(through_a_file(optimizer.state_dict()))

    saved = on_threads(old, save)
    parts = [s[2] for s in saved]

    def load(backend):
        model = Toy(torch.float64)
        model.load_state_dict(saved[0][0])
        optimizer = make(variant, model, backend)
        optimizer.load_state_dict(join_state_dict(saved[0][1], parts, backend.rank, new))
        state = optimizer.state_dict()
        loaded = (
            params_of(model),
            [p.clone() for p in tensors_in({"state": state["residuals"]["state"]})] if new > 1 else [],
        )
        train(model, optimizer, range(7, 10), backend.rank, new)
        assert optimizer.param_groups[0]["step"] == 10
        return loaded

    for rank, (params, local) in enumerate(on_threads(new, load)):
        for key in parts[0]["state"]:
            of_all = torch.stack([part["state"][key]["parameter"] for part in parts])
            expected = of_all[rank] if old == new else of_all.mean(0)
            torch.testing.assert_close(params[key], expected, rtol=1e-14, atol=1e-15)
        if old == new:
            assert same_bits(local, tensors_in({"state": parts[rank]["state"]}))


def test_with_rank_0s_state_alone_parameters_stay_and_one_warning_says_so(caplog):
    def run(backend, saved=None):
        model = Toy()
        optimizer = make("sign", model, backend)
        if saved is None:
            train(model, optimizer, range(7), backend.rank, 2)
            with optimizer.averaged():
                return copy.deepcopy(model.state_dict()), optimizer.state_dict()
        model.load_state_dict(saved[0])
        before = params_of(model)
        optimizer.load_state_dict(saved[1])
        after = params_of(model)
        train(model, optimizer, range(7, 9), backend.rank, 2)
        return before, after

    rank_0 = on_threads(2, run)[0]
    caplog.clear()
    _, b = on_threads(2, lambda backend: run(backend, rank_0))
    assert same_bits(b[0], b[1])
    assert caplog.text.count("parameters stay as they are") == 1


def test_with_rank_0s_state_alone_where_models_are_the_same_momenta_are_not_and_one_warning_says_so(caplog):
    def run(backend, saved=None):
        model = Toy()
        optimizer = make("sign", model, backend)
        if saved is None:
            train(model, optimizer, range(7), backend.rank, 2)
            optimizer.synchronize()
            return copy.deepcopy(model.state_dict()), optimizer.state_dict()
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        return [group["ranks"] for group in optimizer.param_groups]

    rank_0 = on_threads(2, run)[0]
    caplog.clear()
    assert on_threads(2, lambda backend: run(backend, rank_0)) == [[2], [2]]
    assert caplog.text.count("parameters stay as they are") == 1


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_the_state_of_a_torch_sgd_is_taken_over_by_one_rank_and_by_two(momentum):
    """Also by one that was made without momentum."""
    theirs = Toy()
    sgd = torch.optim.SGD(theirs.parameters(), lr=0.05, momentum=0.9)
    train(theirs, sgd, range(4))
    saved, weights = through_a_file(sgd.state_dict()), copy.deepcopy(theirs.state_dict())
    train(theirs, sgd, range(4, 8))

    def run(backend):
        ours = Toy()
        ours.load_state_dict(weights)
        optimizer = make("sign", ours, backend, nesterov=False, momentum=momentum)
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["momentum"] == 0.9
        assert optimizer.param_groups[0]["period"] == 3
        if backend.world_size > 1:
            assert all(torch.equal(optimizer.state[p]["anchor"], p) for p in ours.parameters() if p.requires_grad)
        train(ours, optimizer, range(4, 8), backend.rank, backend.world_size)
        return params_of(ours)

    assert same_bits(on_threads(1, run)[0], params_of(theirs))
    on_threads(2, run)


def test_a_state_without_what_the_models_have_in_common_is_refused_where_that_is_needed():
    """From blocks to signs: x_i - e_i was not stored. From signs to blocks nothing is missing."""

    def run(backend):
        model = Toy()
        optimizer = make("blocks", model, backend)
        train(model, optimizer, range(4), backend.rank, 2)
        other = make("sign", model, backend)
        with pytest.raises(ValueError, match="has no anchor"):
            other.load_state_dict(optimizer.state_dict())
        train(model, other, range(4, 6), backend.rank, 2)
        before, saved = params_of(model), other.state_dict()
        back = make("blocks", model, backend)
        back.load_state_dict(saved)
        assert same_bits(before, params_of(model))

    on_threads(2, run)


@pytest.mark.parametrize("alike", [False, True])
def test_a_state_of_a_sharded_model_without_an_anchor_is_refused_where_replicas_differ(alike):
    """There the models of the replicas are in the state itself, with their places."""

    def run(backend):
        model = Toy()
        optimizer = make("blocks", model, backend)
        train(model, optimizer, range(4), backend.rank, 2)
        if alike:
            optimizer.synchronize()
        saved = optimizer.state_dict()
        del saved["residuals"]
        for i, p in enumerate(model.parameters()):
            if i in saved["state"]:
                place = Place.of(p, p.shape, 0, backend.rank, 2, alike)
                saved["state"][i]["own_parameter"] = OwnTensor.make(p.detach().clone(), place)
        other = make("sign", model, backend)
        with contextlib.nullcontext() if alike else pytest.raises(ValueError, match="has no anchor"):
            other.load_state_dict(saved)

    on_threads(2, run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_without_an_anchor_is_taken_where_all_models_are_the_same(dtype):
    """As the error says: after synchronize() the models are what they have in common. The momenta are each rank's."""

    def run(backend):
        model = Toy(dtype)
        optimizer = make("blocks", model, backend)
        train(model, optimizer, range(4), backend.rank, 2)
        optimizer.synchronize()
        saved = through_a_file(optimizer.state_dict())
        other = make("sign", model, backend)
        other.load_state_dict(saved)
        for p in (p for p in model.parameters() if p.requires_grad):
            assert torch.equal(other.state[p]["anchor"], p.float())
            assert torch.equal(other.state[p]["momentum_buffer"], optimizer.state[p]["momentum_buffer"])
        train(model, other, range(4, 8), backend.rank, 2)
        return [bucket["anchor"].clone() for bucket in other.buckets]

    a, b = on_threads(2, run)
    assert same_bits(a, b)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_state_of_another_model_is_refused_and_nothing_changes(momentum):
    """Also where each rank has all of it as its own, and nothing is equal on all ranks."""

    def run(backend):
        def made(rows: int) -> CSER:
            params = [nn.Parameter(torch.ones(rows, 3)), nn.Parameter(torch.ones(rows))]
            optimizer = CSER(params, lr=0.1, momentum=momentum, backend=backend)
            for _ in range(rows):
                for p in params:
                    p.grad = torch.full_like(p, 1.0 + backend.rank)
                optimizer.step()
            return optimizer

        other, optimizer = made(4), made(5)
        before = optimizer.state_dict()
        with pytest.raises(ValueError, match=r"parameter 0: .*shape \(4, 3\).*\(5, 3\).*another model"):
            optimizer.load_state_dict(other.state_dict())
        after = optimizer.state_dict()
        assert same_bits(all_tensors(before), all_tensors(after))
        assert after["param_groups"] == before["param_groups"]

    on_threads(2, run)


@every_variant
def test_a_deep_copy_goes_on_as_the_original(variant):
    def run(backend):
        model = Toy()
        optimizer = make(variant, model, backend)
        train(model, optimizer, range(4), backend.rank, 2)
        twin, other = copy.deepcopy((model, optimizer))
        train(model, optimizer, range(4, 8), backend.rank, 2)
        train(twin, other, range(4, 8), backend.rank, 2)
        assert same_bits(params_of(model), params_of(twin))
        assert other.reset_compressor == optimizer.reset_compressor

    on_threads(2, run)


def test_moving_the_model_to_another_dtype_keeps_its_state():
    def run(backend):
        model = Toy()
        optimizer = make("sign", model, backend)
        train(model, optimizer, range(4), backend.rank, 2)
        before = [{k: v.clone() for k, v in optimizer.state[p].items()} for p in model.parameters()]
        model.double()
        with optimizer.averaged():
            pass
        following.follow_parameters(optimizer)
        for entry, p in zip(before, model.parameters()):
            assert all(torch.equal(v.double(), optimizer.state[p][k].double()) for k, v in entry.items())
        train(model, optimizer, range(4, 6), backend.rank, 2)

    on_threads(2, run)


# skips, absent gradients ----------------------------------------------------------------------------------------------


@every_variant
@pytest.mark.parametrize(("overlap", "bad"), [(False, math.inf), (True, math.nan)])
def test_a_bad_gradient_on_one_rank_is_skipped_by_all_and_changes_nothing(variant, overlap, bad):
    def run(backend, poisoned):
        model = Used()
        optimizer = make(variant, model, backend, overlap=overlap)
        for step in range(8):
            if step in (4, 5) and poisoned:
                before = params_of(model), tensors_in(optimizer.state_dict())
                model.zero_grad()
                loss = model(torch.zeros(2, 7, dtype=torch.int64)) * (bad if backend.rank == 1 else 1.0)
                if step == 5 and backend.rank == 0:
                    loss = (model.weight * 1.0).sum()  # all others of rank 0 have no gradient: it starts no bucket
                loss.backward()
                optimizer.step()
                assert same_bits(before[0], params_of(model))
                assert same_bits(before[1], tensors_in(optimizer.state_dict()))
            train(model, optimizer, range(step, step + 1), backend.rank, 3)
        assert optimizer.skipped_steps == 2 * poisoned
        return params_of(model)

    clean = on_threads(3, lambda b: run(b, False))
    for a, b in zip(clean, on_threads(3, lambda b: run(b, True))):
        assert same_bits(a, b)


@every_variant
@pytest.mark.parametrize("overlap", [False, True])
def test_no_gradient_here_is_zeros_and_no_gradient_anywhere_is_no_update(variant, overlap):
    def run(backend, explicit):
        model = Used(torch.float64)
        optimizer = make(variant, model, backend, overlap=overlap, bucket_mb=2e-4 if overlap else 1.0)
        for step in range(8):
            zeros = model.gain.register_hook(torch.zeros_like) if backend.rank == 1 and explicit else None
            model.gain.requires_grad_(backend.rank == 0 or explicit)
            backward(model, step, backend.rank, 2)
            model.gain.requires_grad_(True)
            if zeros is not None:
                zeros.remove()
            optimizer.step()
        # nowhere: no step, no momentum, no decay; its error is reset all the same
        model.zero_grad()
        before, count = optimizer.state[model.weight]["momentum_buffer"].clone(), optimizer.state[model.weight]["step"]
        (model.bias.sum() * (1.0 + backend.rank)).backward()
        with optimizer.averaged():
            mean = model.weight.detach().clone()
        optimizer.step()
        with optimizer.averaged():
            if variant != "qsparse":  # which folds its residual in now
                torch.testing.assert_close(model.weight.detach(), mean, rtol=1e-14, atol=1e-15)
        assert torch.equal(before, optimizer.state[model.weight]["momentum_buffer"])
        assert optimizer.state[model.weight]["step"] == count == 8
        assert optimizer.state[model.bias]["step"] == 9
        return params_of(model)

    missing, zeros = on_threads(2, lambda b: run(b, False)), on_threads(2, lambda b: run(b, True))
    assert all(same_bits(a, b) for a, b in zip(missing, zeros))


# overlap --------------------------------------------------------------------------------------------------------------


@every_variant
@pytest.mark.parametrize("world_size", [3])
def test_overlap_gives_the_same_bits_and_is_under_way_in_backward(variant, world_size):
    def run(backend, overlap, kind):
        model = kind()
        optimizer, early = make(variant, model, backend, overlap=overlap), 0
        for step in range(9):
            backward(model, step, backend.rank, world_size)
            early += optimizer._in_flight.started if optimizer._in_flight is not None else 0
            optimizer.step()
        if kind is Used:
            assert (early > 0) == overlap
        return params_of(model) + tensors_in(optimizer.state_dict())

    for kind in (Used, Toy):  # a toy has a parameter without a gradient
        without = on_threads(world_size, lambda b, kind=kind: run(b, False, kind))
        with_it = on_threads(world_size, lambda b, kind=kind: run(b, True, kind))
        assert all(same_bits(a, b) for a, b in zip(without, with_it))


def test_overlap_without_a_gradient_on_one_rank_neither_hangs_nor_differs():
    def run(backend, overlap):
        model = Used()
        optimizer = make("blocks", model, backend, overlap=overlap)
        for step in range(8):
            model.zero_grad()
            loss = (model.bias * 2.0).sum() + model.gain if backend.rank == 1 else None
            if loss is None:
                backward(model, step, 0, 2)
            else:
                loss.backward()
            optimizer.step()
        return params_of(model)

    assert all(same_bits(a, b) for a, b in zip(*(on_threads(2, lambda b, o=o: run(b, o)) for o in (False, True))))


def test_overlap_refuses_what_it_excludes():
    def run(backend):
        model = Used()
        optimizer = make("blocks", model, backend, overlap=True)
        train(model, optimizer, range(2), backend.rank, 2)
        backward(model, 2, backend.rank, 2)
        optimizer.param_groups[0]["lr"] = 0.5
        with pytest.raises(ValueError, match="changed between backward"):
            optimizer.step()
        backward(model, 2, backend.rank, 2)
        for call in (optimizer.synchronize, optimizer.averaged().__enter__):
            with pytest.raises(ValueError, match=r"has begun the next step in backward\(\)"):
                call()
        optimizer.step()

    on_threads(2, run)
    with pytest.raises(ValueError, match="exclude each other"):
        CSER(Toy().parameters(), overlap=True, max_grad_norm=1.0)


# bytes and memory -----------------------------------------------------------------------------------------------------


def wire_bytes(how: Any, n: int, step: int, stream: int, world_size: int) -> int:
    """What a rank sends of ``n`` float32: the ledger."""
    if isinstance(how, RandomBlocks):
        return all_reduce_bytes(4 * how.choose(n, step, stream).numel, world_size)
    return (world_size - 1) * how.nbytes(n)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("c2", [RandomBlocks(4, 8), RandomBlocks(math.inf), Sign(16)])
@pytest.mark.parametrize("c1", [RandomBlocks(2, 8), Sign(16)])
def test_bytes_sent_are_those_of_the_ledger(world_size, c2, c1):
    def run(backend):
        model = Used()
        optimizer = make("blocks", model, backend)
        optimizer = CSER(
            model.parameters(), compressor=c2, reset_compressor=c1, backend=backend, bucket_mb=2e-4,
            guard=Guard(check_every=None), **SETTINGS,
        )  # fmt: skip
        for step in range(7):
            train(model, optimizer, range(step, step + 1), backend.rank, world_size)
            expected = (world_size - 1) * AGREEMENT_BYTES + all_reduce_bytes(8 * 7, world_size)  # one has no gradient
            for i, bucket in enumerate(optimizer.buckets):
                expected += wire_bytes(c2, bucket.numel, step, 2 * i, world_size)
                if step % 3 == 2:
                    expected += wire_bytes(c1, bucket.numel, step, 2 * i + 1, world_size)
            assert optimizer.comm_stats()["step"]["bytes"] == expected
        assert len(optimizer.buckets) > 1
        before, model_bytes = optimizer.comm_stats(), sum(4 * bucket.padded for bucket in optimizer.buckets)
        optimizer.synchronize()
        after = optimizer.comm_stats()
        assert after["step"] == before["step"]
        sent = after["total"]["bytes"] - before["total"]["bytes"]
        agreement = (world_size - 1) * 8 * FIELDS
        confirmed = (world_size - 1) * CONFIRMATION_BYTES
        assert sent == all_reduce_bytes(model_bytes, world_size) + agreement + confirmed

    on_threads(world_size, run)


def test_over_many_steps_the_ratio_is_that_of_the_paper():
    """R = 1 / (1 / R2 + 1 / (H R1)): 64, 4, 16 -> 32. 1600 steps; the blocks kept of 2000 hardly vary."""

    def run(backend):
        p = nn.Parameter(torch.zeros(16_000))
        optimizer = CSER(
            [p], compressor=RandomBlocks(64, 8), reset_compressor=RandomBlocks(4, 8), period=16, backend=backend,
            guard=Guard(check_every=None),
        )  # fmt: skip
        optimizer.topology.traffic.total.bytes.clear()
        for _ in range(160):
            p.grad = torch.ones_like(p)
            optimizer.step()
        sent = optimizer.comm_stats()["total"]["bytes"] - 160 * AGREEMENT_BYTES
        return 160 * optimizer.fp32_bytes() / sent

    assert on_threads(2, run)[0] == pytest.approx(32, rel=0.01)


def test_memory_is_what_the_docstring_says():
    n = 1000

    def numbers(optimizer):
        """State of a parameter, in units of it: what outlives a step."""
        return (
            sum(flat.numel() for bucket in optimizer.buckets for flat in bucket.buffers.values())
            / optimizer.buckets[0].padded
        )

    def run(backend):
        def of(kind, **settings):
            p = nn.Parameter(torch.zeros(n))
            optimizer = kind([p], backend=backend, **settings)
            for _ in range(4):
                p.grad = torch.ones(n)
                optimizer.step()
            return numbers(optimizer)

        assert of(CSER, period=2) == 0
        assert of(CSER, period=2, momentum=0.9) == 1
        assert of(CSER, period=2, compressor=None, reset_compressor=Identity()) == 0
        assert of(CSER, period=2, compressor=Sign(), reset_compressor=RandomBlocks(2)) == 1
        assert of(CSER, period=2, compressor=None, reset_compressor=Sign(), momentum=0.9) == 2
        assert of(QSparseLocalSGD, period=2) == 2
        assert of(QSparseLocalSGD, period=2, momentum=0.9) == 3

    on_threads(2, run)


# the mean model -------------------------------------------------------------------------------------------------------


@every_variant
def test_averaged_lends_the_mean_and_leaves_no_trace(variant):
    def run(backend, look):
        model, seen = Toy(torch.float64), []
        optimizer = make(variant, model, backend)
        for step in range(8):
            train(model, optimizer, range(step, step + 1), backend.rank, 3)
            if look:
                local, state = params_of(model), tensors_in(optimizer.state_dict())
                with optimizer.averaged():
                    mean = params_of(model)
                    assert same_bits(state, tensors_in(optimizer.state_dict()))
                assert same_bits(local, params_of(model))
                seen.append((local, mean))
        return params_of(model), seen

    results = on_threads(3, lambda b: run(b, True))
    for (a, _), (b, _) in zip(results, on_threads(3, lambda b: run(b, False))):
        assert same_bits(a, b)
    for per_rank in zip(*(seen for _, seen in results)):
        assert all(same_bits(per_rank[0][1], mean) for _, mean in per_rank)
        for i, mean in enumerate(per_rank[0][1]):
            expected = torch.stack([local[i] for local, _ in per_rank]).mean(0)
            torch.testing.assert_close(mean, expected, rtol=1e-14, atol=1e-15)


@every_variant
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_synchronize_makes_all_models_the_mean_and_leaves_no_error(variant, dtype):
    def run(backend):
        model = Toy(dtype)
        optimizer = make(variant, model, backend)
        train(model, optimizer, range(5), backend.rank, 2)
        with optimizer.averaged():
            mean = params_of(model)
        norm = optimizer.comm_stats()["residual_norm"]
        optimizer.synchronize()
        assert same_bits(mean, params_of(model))
        if variant == "qsparse":  # what is kept apart from the models is still to be folded in
            assert optimizer.comm_stats()["residual_norm"] == norm > 0
        elif variant != "blocks":
            assert optimizer.comm_stats()["residual_norm"] == 0
        train(model, optimizer, range(5, 6), backend.rank, 2)
        return mean, params_of(model)

    a, b = on_threads(2, run)
    assert same_bits(a[0], b[0])
    equal = same_bits(a[1], b[1])  # the sixth step resets
    assert equal == (variant in ("local", "qsparse"))


@pytest.mark.parametrize("variant", ["sign", "sign, blocks", "qsparse"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_is_loaded_after_synchronize_is_where_the_next_steps_begin(variant, dtype):
    """Off a round, too: the reset to come takes none of it back."""

    def run(backend):
        model = Toy(dtype)
        optimizer = make(variant, model, backend, period=8)
        train(model, optimizer, range(5), backend.rank, 2)
        optimizer.synchronize()
        weights = {key: value + 1 for key, value in Toy(dtype, seed=9).state_dict().items()}
        model.load_state_dict(weights)
        optimizer.state_dict()
        trained = {key: p for key, p in model.named_parameters() if p.requires_grad}
        assert all(torch.equal(optimizer.state[p]["anchor"], weights[key].float()) for key, p in trained.items())
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        train(model, optimizer, range(5, 9), backend.rank, 2)
        return all(torch.equal(p, weights[key]) for key, p in trained.items())

    assert on_threads(2, run) == [True, True]


@pytest.mark.parametrize("synchronized", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("model", [Toy, Used])
def test_a_model_that_one_rank_alone_has_loaded_is_noticed_at_once(model, overlap, synchronized):
    """Long before the next comparison: the ranks have nothing in common any more. After a reset, or off one."""

    def run(backend):
        mine = model()
        optimizer = make("qsparse", mine, backend, period=4, overlap=overlap, guard=Guard(check_every=1000))
        train(mine, optimizer, range(6 if synchronized else 8), backend.rank, 2)
        optimizer.synchronize()
        if backend.rank == 0:
            mine.load_state_dict(model(seed=9).state_dict())
        with pytest.raises(ReplicasDiffer):
            train(mine, optimizer, range(8, 10), backend.rank, 2)

    on_threads(2, run)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("model", [Toy, Used])
def test_a_model_that_is_loaded_before_a_step_that_is_skipped_is_where_the_next_steps_begin(model, overlap):
    """One rank alone has a bad gradient. The ranks compare anchors in that step, as they take over what was loaded."""

    def run(backend, bad):
        mine = model()
        optimizer = make("qsparse", mine, backend, period=4, overlap=overlap, guard=Guard(check_every=1000))
        train(mine, optimizer, range(8), backend.rank, 2)
        mine.load_state_dict(model(seed=9).state_dict())
        for _ in range(bad):
            mine.zero_grad()
            (mine(tokens(8, backend.rank, 2)) * (math.nan if backend.rank == 1 else 1.0)).backward()
            optimizer.step()
        train(mine, optimizer, range(8, 14), backend.rank, 2)
        assert optimizer.skipped_steps == bad
        return params_of(mine)

    for clean, skipped in zip(on_threads(2, partial(run, bad=0)), on_threads(2, partial(run, bad=2))):
        assert same_bits(clean, skipped)


@pytest.mark.parametrize("c2", [Identity(), Sign(16)])
def test_what_compression_or_rounding_has_left_in_the_models_is_never_taken_for_a_loaded_model(c2):
    """With Identity() all ranks have the same model in every step, and the anchor what bfloat16 has lost of it."""

    def run(backend):
        model = Toy(torch.bfloat16)
        how = {"compressor": c2, "reset_compressor": Sign(16)}
        optimizer = CSER(model.parameters(), backend=backend, **how, **SETTINGS)
        departed = False
        for step in range(7):
            train(model, optimizer, range(step, step + 1), backend.rank, 2)
            before = [bucket["anchor"].clone() for bucket in optimizer.buckets]
            optimizer.adopt_values()
            assert same_bits(before, [bucket["anchor"] for bucket in optimizer.buckets])
            departed |= any((b["anchor"].bfloat16() != b.pack_params().bfloat16()).any() for b in optimizer.buckets)
        return departed

    assert all(on_threads(2, run))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"compressor": RandomBlocks(64, 8), "reset_compressor": RandomBlocks(4, 8)}, [True] * 7),
        ({"compressor": RandomBlocks(1)}, [False] * 7),
        ({"compressor": Identity(), "reset_compressor": Sign(16)}, [False] * 7),
        ({"compressor": None, "reset_compressor": RandomBlocks(1)}, [True, True, False] * 2 + [True]),
        ({"compressor": Sign(16), "reset_compressor": Identity()}, [True, True, False] * 2 + [True]),
    ],
)
def test_it_knows_when_all_ranks_have_the_same_model(arguments, expected):
    def run(backend):
        model, apart = Toy(), []
        optimizer = CSER(model.parameters(), lr=0.1, momentum=0.9, period=3, backend=backend, **arguments)
        assert not optimizer.replicas_differ
        for step in range(7):
            train(model, optimizer, range(step, step + 1), backend.rank, 2)
            apart.append((optimizer.replicas_differ, params_of(model)))
        optimizer.synchronize()
        assert not optimizer.replicas_differ
        return apart

    for (apart, a), (_, b), known in zip(*on_threads(2, run), expected):
        assert apart == known == (not same_bits(a, b))


def test_qsparse_has_one_model_on_all_ranks_after_every_reset():
    def run(backend):
        model, differ = Toy(), []
        optimizer = make("qsparse", model, backend, period=3)
        for step in range(7):
            train(model, optimizer, range(step, step + 1), backend.rank, 2)
            differ.append(optimizer.replicas_differ)
        return differ

    assert on_threads(2, run) == [[True, True, False, True, True, False, True]] * 2


def test_a_period_that_was_changed_to_one_that_cannot_be_is_refused():
    def run(backend):
        model = Toy()
        optimizer = make("sign", model, backend)
        optimizer.param_groups[0]["period"] = 0
        with pytest.raises(ValueError, match="period must be an int >= 1, got 0"):
            train(model, optimizer, range(1), backend.rank, 2)

    on_threads(2, run)


class OneLine(ThreadBackend):
    """As NCCL: buckets have no lines, but the ranks agree on a channel of its own."""

    def channels(self, n: int) -> list[ThreadBackend]:
        return []


class AllOnOneLine(OneLine):
    def control(self) -> ThreadBackend:
        return self


def test_overlap_needs_lines_or_a_control_channel_as_a_bucket_may_have_to_wait_for_what_ranks_agree_on():
    def run(backend):
        with pytest.raises(ValueError, match=r"CSER\(overlap=True\) needs a backend that has several channels, or one"):
            CSER(Toy().parameters(), backend=AllOnOneLine(backend.world, backend.rank), overlap=True)

    on_threads(2, run)


@pytest.mark.parametrize("variant", ["blocks", "sign"])
def test_overlap_over_one_line_with_a_control_channel_gives_the_same_bits(variant):
    """Also where some rank lacks a gradient, so that its buckets start after the agreement only."""

    def run(backend, overlap):
        model = Used()
        optimizer = make(variant, model, OneLine(backend.world, backend.rank), overlap=overlap)
        for step in range(8):
            model.zero_grad()
            model.weight.requires_grad_(backend.rank != step % 4)
            model(tokens(step, backend.rank, 3)).backward()
            model.weight.requires_grad_(True)
            optimizer.step()
        return params_of(model)

    plain, overlapped = (on_threads(3, partial(run, overlap=o)) for o in (False, True))
    assert same_bits(plain[0], overlapped[0])
    assert all(same_bits(plain[r], overlapped[r]) for r in range(3))


# what is refused ------------------------------------------------------------------------------------------------------

BAD = [
    ({"period": 0}, r"period must be an int >= 1, got 0"),
    ({"period": 2.0}, r"period must be an int >= 1, got 2.0"),
    ({"period": True}, r"period must be an int >= 1, got True"),
    ({"momentum": 1.0}, r"momentum must be a number in \[0, 1\), got 1.0"),
    ({"momentum": -0.1}, r"momentum must be a number in \[0, 1\), got -0.1"),
    ({"nesterov": True}, r"nesterov=True needs momentum > 0, got momentum=0"),
    ({"nesterov": 1, "momentum": 0.5}, r"nesterov must be True or False, got 1"),
    ({"lr": -1.0}, r"lr must be a number >= 0, got -1.0"),
    ({"weight_decay": -1}, r"weight_decay must be a number >= 0, got -1"),
    ({"maximize": 1}, r"maximize must be True or False, got 1"),
    ({"compressor": "sign"}, r"compressor must be a RandomBlocks or a Compressor .*, got 'sign'"),
    ({"reset_compressor": None}, r"reset_compressor must be a RandomBlocks or a Compressor .*, got None"),
    ({"reset_compressor": RandomBlocks(math.inf)}, r"reset_compressor must keep something, got RandomBlocks"),
    ({"bucket_mb": 0}, r"bucket_mb must be a number > 0, got 0"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_an_argument_out_of_range_on_one_rank_is_an_error_on_all(arguments, message):
    def run(backend):
        with pytest.raises(ValueError, match=message):
            CSER(Toy().parameters(), backend=backend, **(arguments if backend.rank == 1 else {}))

    on_threads(2, run)


@pytest.mark.parametrize(
    "different", [{"period": 2}, {"reset_compressor": RandomBlocks(2)}, {"compressor": RandomBlocks(64, seed=1)}]
)
def test_ranks_with_different_settings(different):
    def run(backend):
        with pytest.raises(ValueError, match="settings or kernel providers differ between ranks: rank 1"):
            CSER(Toy().parameters(), backend=backend, **(different if backend.rank == 1 else {}))

    on_threads(2, run)


def test_nodes_of_several_ranks_are_refused_and_nodes_of_one_are_no_nodes():
    def run(backend):
        with pytest.raises(ValueError, match="CSER does not know nodes of several ranks, got nodes of 2"):
            CSER(Toy().parameters(), backend=backend.nodes(2))
        out = []
        for ranks in (backend, backend.nodes(1)):
            model = Toy()
            train(model, make("sign", model, ranks), range(5), backend.rank, 4)
            out.append(params_of(model))
        assert same_bits(*out)

    on_threads(4, run)


def test_random_blocks_are_refused_where_a_compressor_of_rows_is_needed():
    with pytest.raises(ValueError, match=r"compressor must be a commopt\.compress\.Compressor"):
        OneBitAdam(Toy().parameters(), compressor=RandomBlocks(2))


# processes ------------------------------------------------------------------------------------------------------------


def scenes(rank: int, world_size: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for variant in ("blocks", "sign"):
        for name, overlap, wrapped in (("bare", False, False), ("overlap", True, False), ("ddp", False, True)):
            model = Used()
            optimizer = make(variant, model, None, overlap=overlap)
            forward: nn.Module = model
            if wrapped:
                forward = DistributedDataParallel(model, find_unused_parameters=True)
                attach(forward, optimizer)
            for step in range(7):
                forward.zero_grad()
                forward(tokens(step, rank, world_size)).backward()
                optimizer.step()
            with optimizer.averaged():
                mean = params_of(model)
            out[f"{variant} {name}"] = (params_of(model), mean, optimizer.comm_stats()["total"]["bytes"])
    return out


def test_over_gloo_bare_overlapped_and_attached_to_ddp():
    ranks = on_processes(2, scenes)
    for variant in ("blocks", "sign"):
        for out in ranks:
            bare, *others = (out[f"{variant} {name}"] for name in ("bare", "overlap", "ddp"))
            for other in others:
                assert same_bits(bare[0], other[0])
        assert same_bits(ranks[0][f"{variant} bare"][1], ranks[1][f"{variant} bare"][1])
        assert not same_bits(ranks[0][f"{variant} bare"][0], ranks[1][f"{variant} bare"][0])


def test_a_momentum_that_is_switched_off_stays_each_ranks_own():
    """Nobody takes what ranks have gathered of it for replicas that differ."""

    def run(backend):
        model = Toy()
        optimizer = CSER(
            model.parameters(), 0.05, 0.9, period=2, guard=Guard(check_every=1), compressor=RandomBlocks(2, 8),
            reset_compressor=RandomBlocks(1), backend=backend,
        )  # fmt: skip
        train(model, optimizer, range(3), backend.rank, 2)
        optimizer.param_groups[0]["momentum"] = 0.0
        train(model, optimizer, range(3, 6), backend.rank, 2)
        own = optimizer.state_dict()["residuals"]["state"]
        return [own[i]["momentum_buffer"] for i in own]

    a, b = on_threads(2, run)
    assert not same_bits(a, b)
