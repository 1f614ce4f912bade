"""overlap=True: the same bits as without it, really under way in backward, and clear about what it excludes."""

from __future__ import annotations

import contextlib
import copy
import logging
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from worlds import Toy, Used, backward, on_threads, params_of, same_bits, tensors_in, tokens, train

from commopt import OneBitAdam
from commopt.agreement.calls import OutOfStep
from commopt.agreement.decision import AGREEMENT_BYTES
from commopt.comm import CollectiveError, ThreadBackend, ThreadWorld
from commopt.compress import Identity, Sign
from commopt.state import binding

SETTINGS: dict[str, Any] = {"lr": 1e-2, "freeze_step": 4, "bucket_mb": 1.2e-4}
STEPS = 9


def optimizer_of(model: nn.Module, backend: Any, overlap: bool, **settings: Any) -> OneBitAdam:
    return OneBitAdam(model.parameters(), backend=backend, overlap=overlap, **{**SETTINGS, **settings})


def run_of(kind: type[Toy], overlap: bool, **settings: Any) -> Any:
    """A function of a rank: trains, and returns parameters and the whole state."""

    def run(backend: Any) -> tuple[list[Tensor], list[Tensor]]:
        model = kind()
        optimizer = optimizer_of(model, backend, overlap, **settings)
        train(model, optimizer, range(STEPS), backend.rank, backend.world_size)
        return params_of(model), tensors_in(optimizer.state_dict())

    return run


# the same bits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", [Toy, Used])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"compressor": Sign(block=16)},
        {"compressor": Sign(None, norm="l1")},
        {"compressor": Identity()},
        {"maximize": True, "weight_decay": 0.1},
        {"freeze_step": "auto", "betas": (0.9, 0.5)},
        {"bucket_mb": None},
    ],
    ids=str,
)
def test_parameters_and_state_are_those_without_overlap(world_size, kind, settings):
    plain = on_threads(world_size, run_of(kind, False, **settings))
    overlapped = on_threads(world_size, run_of(kind, True, **settings))
    for a, b in zip(plain, overlapped):
        assert same_bits(a[0], b[0])
        assert same_bits(a[1], b[1])
    assert not same_bits(plain[0][0], params_of(kind()))


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("block", [8, 64])
def test_a_tensor_that_is_sent_in_pieces_gives_the_same_bits(world_size, overlap, block):
    def run(backend, bucket_mb):
        model = nn.Sequential(nn.Linear(41, 97, bias=False), nn.Tanh(), nn.Linear(97, 31, bias=False))
        for p in model.parameters():  # torch's own generator is shared with the other ranks' threads
            p.data = torch.randn(p.shape, generator=torch.Generator().manual_seed(len(p))) / 8
        compressor = Sign(block=block)
        groups = [[p] for p in model.parameters()]  # a bucket each
        optimizer = OneBitAdam(
            [{"params": g} for g in groups], 1e-2, freeze_step=3, bucket_mb=bucket_mb, compressor=compressor,
            overlap=overlap, backend=backend,
        )  # fmt: skip
        for step in range(STEPS):
            data = torch.Generator().manual_seed(100 * step + backend.rank)
            model(torch.randn(5, 41, generator=data)).square().sum().backward()
            if step == 6 and backend.rank == 1:
                model[2].weight.grad[0, 0] = float("nan")
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.skipped_steps == 1
        pieces = [len(bucket.chunks) for bucket in optimizer.buckets]
        calls = optimizer.comm_stats()["step"]["by_collective"]["all_to_all"]["calls"]
        return params_of(model), tensors_in(optimizer.state_dict()), pieces, calls

    whole = on_threads(world_size, partial(run, bucket_mb=25))
    cut = on_threads(world_size, partial(run, bucket_mb=0.003))
    for a, b in zip(whole, cut):
        assert same_bits(a[0], b[0])
        assert same_bits(a[1], b[1])
        assert a[2] == [1, 1]
        assert all(n > 2 for n in b[2])
        assert b[3] == sum(b[2])


def test_in_the_middle_of_a_run_a_state_goes_from_one_to_the_other():
    def run(backend, first, second):
        model = Used()
        optimizer = optimizer_of(model, backend, first)
        train(model, optimizer, range(6), backend.rank, 2)
        other = Used()
        other.load_state_dict(model.state_dict())
        resumed = optimizer_of(other, backend, second)
        resumed.load_state_dict(optimizer.state_dict())
        train(other, resumed, range(6, STEPS), backend.rank, 2)
        return params_of(other), tensors_in(resumed.state_dict())

    expected = on_threads(2, run_of(Used, False))
    for first, second in [(False, True), (True, False), (True, True)]:
        for a, b in zip(expected, on_threads(2, partial(run, first=first, second=second))):
            assert same_bits(a[0], b[0])
            assert same_bits(a[1], b[1])


@pytest.mark.parametrize("step", [2, 6])
@pytest.mark.parametrize("overlap", [False, True])
def test_nan_on_one_rank_leaves_parameters_and_residuals_as_they_were(step, overlap):
    def run(backend):
        model = Used()
        optimizer = optimizer_of(model, backend, overlap)
        for t in range(STEPS):
            before = params_of(model), tensors_in(optimizer.state_dict())
            model.zero_grad()
            loss = model(tokens(t, backend.rank, 3))
            (loss * float("nan") if t == step and backend.rank == 1 else loss).backward()
            optimizer.step()
            after = params_of(model), tensors_in(optimizer.state_dict())
            assert same_bits(before[0], after[0]) == (t == step)
            assert same_bits(before[1], after[1]) == (t == step)
        assert optimizer.skipped_steps == 1
        return params_of(model)

    ranks = on_threads(3, run)
    assert same_bits(ranks[0], ranks[1])
    assert all(p.isfinite().all() for p in ranks[0])


def test_a_gradient_that_one_rank_lacks():
    def run(backend, overlap):
        model = Used()
        optimizer = optimizer_of(model, backend, overlap)
        for t in range(STEPS):
            backward_without(model, t, backend, {model.weight} if backend.rank == t % 3 else set())
            optimizer.step()
        return params_of(model), tensors_in(optimizer.state_dict())

    plain = on_threads(3, lambda b: run(b, False))
    for a, b in zip(plain, on_threads(3, lambda b: run(b, True))):
        assert same_bits(a[0], b[0])
        assert same_bits(a[1], b[1])


class OneLine(ThreadBackend):
    """As NCCL: no lines, so that all ranks must start their buckets in one order; they agree on another."""

    def channels(self, n: int) -> list[ThreadBackend]:
        return []


class AllOnOneLine(OneLine):
    """Everything must start in one order, the agreement too."""

    def control(self) -> ThreadBackend:
        return self


def test_where_the_agreement_has_no_channel_of_its_own_overlap_is_refused():
    """A bucket that lacks a gradient waits for the agreement, which the others would start in another order."""

    def run(backend):
        with pytest.raises(ValueError, match="needs a backend that has several channels, or one for small messages"):
            optimizer_of(Used(), AllOnOneLine(backend.world, backend.rank), True)

    on_threads(2, run)


@pytest.mark.parametrize("places", [None, 2])
def test_without_lines_a_gradient_that_one_rank_lacks_changes_no_order(places):
    """Its buckets have not started in backward as those of the others have."""

    def run(backend, overlap):
        model, backend = Used(), OneLine(backend.world, backend.rank)
        grouped = backend if places is None else backend.nodes(places)
        optimizer = optimizer_of(model, grouped, overlap)
        for t in range(STEPS):
            first = next(p for p in optimizer.buckets[0].params if p.numel())  # the first bucket waits for it
            backward_without(model, t, backend, {first} if backend.rank == t % 4 else set())
            optimizer.step()
        return params_of(model), tensors_in(optimizer.state_dict())

    plain = on_threads(4, lambda b: run(b, False))
    for a, b in zip(plain, on_threads(4, lambda b: run(b, True))):
        assert same_bits(a[0], b[0])
        assert same_bits(a[1], b[1])


def backward_without(model: Toy, t: int, backend: Any, without: set[nn.Parameter]) -> None:
    """A backward in which the parameters ``without`` take no part."""
    model.zero_grad()
    for p in without:
        p.requires_grad_(False)
    model(tokens(t, backend.rank, backend.world_size)).backward()
    for p in without:
        p.requires_grad_(True)


# in backward ---------------------------------------------------------------------------------------------------------


def test_all_buckets_but_the_last_start_in_backward():
    def run(backend):
        model = Used()
        optimizer = optimizer_of(model, backend, True)
        buckets = len(optimizer.buckets)
        assert buckets >= 4
        seen = []
        for t in range(6):
            calls = dict(optimizer.topology.traffic.total.calls)
            backward(model, t, backend.rank, 2)
            now = optimizer.topology.traffic.total.calls
            seen.append({verb: now[verb] - calls.get(verb, 0) for verb in now})
            optimizer.step()
        assert seen[3]["all_reduce"] == buckets - 1
        assert seen[5]["all_to_all"] == buckets - 1
        assert seen[5]["all_reduce"] == 0

    on_threads(2, run)


def test_a_model_that_was_moved_overlaps_again_from_its_second_step_on(monkeypatch):
    """``model.to()`` exchanges what is inside DTensors, and others where torch is told so: their hooks are lost."""
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)

    def run(backend: ThreadBackend) -> None:
        model = Used()
        optimizer = optimizer_of(model, backend, True)
        started = []
        for step in range(4):
            if step == 2:
                model.bfloat16()
            backward(model, step, backend.rank, 2)
            started.append(optimizer.step_in_flight().started)
            optimizer.step()
        most = len(optimizer.buckets) - 1
        assert started == [most, most, 0, most]

    on_threads(2, run)


def test_without_overlap_nothing_is_sent_in_backward():
    def run(backend):
        model = Used()
        optimizer = optimizer_of(model, backend, False)
        train(model, optimizer, range(6), backend.rank, 2)
        before = dict(optimizer.topology.traffic.total.calls)
        backward(model, 6, backend.rank, 2)
        assert optimizer.topology.traffic.total.calls == before
        optimizer.step()

    on_threads(2, run)


@pytest.mark.parametrize("overlap", [False, True])
def test_accumulation_in_no_sync_sends_nothing_and_gives_the_same_bits(overlap):
    def run(backend, overlap):
        model = Used()
        optimizer = optimizer_of(model, backend, overlap)
        for t in range(STEPS):
            model.zero_grad()
            first, second = tokens(t, backend.rank, 2).chunk(2)
            before = dict(optimizer.topology.traffic.total.calls)
            with optimizer.no_sync():
                (model(first) / 2).backward()
            assert optimizer.topology.traffic.total.calls == before
            (model(second) / 2).backward()
            assert (optimizer.topology.traffic.total.calls == before) == (not overlap)
            optimizer.step()
        return params_of(model)

    for a, b in zip(on_threads(2, lambda b: run(b, overlap)), on_threads(2, run_of(Used, False))):
        for p, q in zip(a, b[0]):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
    assert same_bits(on_threads(2, lambda b: run(b, True))[0], on_threads(2, lambda b: run(b, False))[0])


def test_a_parameter_without_gradient_is_reported_once_with_its_name(caplog):
    def run(backend):
        model = Toy()
        optimizer = OneBitAdam(model.named_parameters(), backend=backend, overlap=True, **SETTINGS)
        train(model, optimizer, range(6), backend.rank, 2)

    with caplog.at_level(logging.WARNING, "commopt"):
        on_threads(2, run)
    lines = [r.getMessage() for r in caplog.records if "overlap is lost" in r.getMessage()]
    assert len(lines) == 1
    assert "from bucket 0 of" in lines[0]
    assert "unused had no gradient" in lines[0]


def test_the_number_of_collectives_does_not_depend_on_the_number_of_tensors():
    def calls(pieces: int) -> dict[str, int]:
        def run(backend):
            params = [nn.Parameter(torch.ones(1024 // pieces)) for _ in range(pieces)]
            optimizer = OneBitAdam(params, freeze_step=1, backend=backend, overlap=True)
            for _ in range(3):
                optimizer.zero_grad()
                sum((p * (backend.rank + 1.0)).sum() for p in params).backward()
                optimizer.step()
            by_collective = optimizer.comm_stats()["step"]["by_collective"]
            return {verb: entry["calls"] for verb, entry in by_collective.items()}

        return on_threads(2, run)[0]

    assert calls(1) == calls(4) == calls(256) == {"all_to_all": 1, "all_gather": 1 + 2}  # and the agreement


def test_bytes_per_rank_do_not_grow_with_the_number_of_ranks():
    def sent(world_size: int) -> int:
        def run(backend):
            p = nn.Parameter(torch.ones(2**16))
            optimizer = OneBitAdam([p], freeze_step=1, backend=backend)
            for _ in range(3):
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(backend.rank))
                optimizer.step()
            by_collective = optimizer.comm_stats()["step"]["by_collective"]
            agreement = (world_size - 1) * AGREEMENT_BYTES
            return by_collective["all_to_all"]["bytes"] + by_collective["all_gather"]["bytes"] - agreement

        return on_threads(world_size, run)[0]

    bits = 2**16 / 8 * (1 + 32 / 2048)
    for world_size in range(2, 9):
        assert sent(world_size) <= 2 * bits * (world_size - 1) / world_size + 2 * 16 * 8


# what it excludes ----------------------------------------------------------------------------------------------------


def broken_step(
    change: Any, error: type[Exception], message: str, others: str = "cannot take this step", rank: int = 1
) -> None:
    """A step that ``change(model, optimizer)`` spoils on a rank raises on all and changes nothing; the next works."""

    def run(backend):
        model = Used()
        optimizer = optimizer_of(model, backend, True)
        train(model, optimizer, range(6), backend.rank, 2)
        before = params_of(model), tensors_in(optimizer.state_dict())
        backward(model, 6, backend.rank, 2)
        mine = backend.rank == rank
        step = (change(model, optimizer) if mine else None) or optimizer.step
        with pytest.raises(error if mine else RuntimeError, match=message if mine else others):
            step()
        assert same_bits(before[0], params_of(model))
        assert same_bits(before[1], tensors_in(optimizer.state_dict()))
        optimizer.param_groups[0]["betas"] = (0.9, 0.999)
        train(model, optimizer, range(7, STEPS), backend.rank, 2)
        return params_of(model)

    a, b = on_threads(2, run)
    assert same_bits(a, b)


def test_clipping_between_backward_and_step():
    def clip(model, optimizer):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)

    broken_step(clip, ValueError, "was changed between backward")


def test_zero_grad_between_backward_and_step():
    broken_step(lambda m, o: m.zero_grad(), ValueError, "was changed between backward")


def test_another_beta_between_backward_and_step():
    def change(model, optimizer):
        optimizer.param_groups[0]["betas"] = (0.8, 0.999)

    broken_step(change, ValueError, "a parameter group changed between backward.*0.8")


@pytest.mark.parametrize("decoupled", [True, False])
def test_another_decay_between_backward_and_step(decoupled):
    """It is used by then only if it is a part of the gradient."""

    def run(backend):
        model = Used()
        optimizer = optimizer_of(model, backend, True, decoupled_weight_decay=decoupled, weight_decay=0.05)
        train(model, optimizer, range(4), backend.rank, 2)
        backward(model, 4, backend.rank, 2)
        optimizer.param_groups[0]["weight_decay"] = 0.1
        with contextlib.nullcontext() if decoupled else pytest.raises(ValueError, match=r"between backward.*0\.1"):
            optimizer.step()

    on_threads(2, run)


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("lacking", ["one", "all", None])
def test_a_state_that_is_loaded_between_backward_and_step(lacking, again):
    """What backward has begun is given up: a run is the one without overlap, to the bit. So it is where a rank has
    begun nothing for want of a gradient, or of all of them, and where the model goes back, too."""

    def run(backend, overlap):
        model = Used()
        optimizer = optimizer_of(model, backend, overlap)
        train(model, optimizer, range(6), backend.rank, 2)
        kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        train(model, optimizer, range(6, 7), backend.rank, 2)
        first = next(p for p in optimizer.buckets[0].params if p.numel())
        for t in range(7, 9):
            if lacking == "all" and backend.rank == 1:
                model.zero_grad()
            else:
                backward_without(model, t, backend, {first} if lacking and backend.rank == 1 else set())
            optimizer.load_state_dict(kept[1])
            if again:
                model.load_state_dict(kept[0])
                backward(model, t, backend.rank, 2)
            optimizer.step()
        train(model, optimizer, range(9, 11), backend.rank, 2)
        return params_of(model), tensors_in(optimizer.state_dict())

    for plain, overlapped in zip(on_threads(2, lambda b: run(b, False)), on_threads(2, lambda b: run(b, True))):
        assert same_bits(plain[0], overlapped[0])
        assert same_bits(plain[1], overlapped[1])


def test_a_rank_may_load_by_itself_before_the_first_step():
    """As where a resume fails on one rank, and the others are to hear of it."""

    def run(backend):
        model = Used()
        optimizer = optimizer_of(model, backend, True)
        if backend.rank == 1:
            optimizer.load_state_dict(optimizer.state_dict())
        train(model, optimizer, range(STEPS), backend.rank, 2)
        return params_of(model)

    assert same_bits(on_threads(2, run, 10.0)[1], on_threads(2, run_of(Used, False))[1][0])


def test_a_step_that_was_given_up_is_no_lost_overlap(caplog):
    def run(backend):
        model = Used()
        optimizer = optimizer_of(model, backend, True)
        train(model, optimizer, range(6), backend.rank, 2)
        backward(model, 6, backend.rank, 2)
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()
        train(model, optimizer, range(7, STEPS), backend.rank, 2)

    with caplog.at_level(logging.WARNING, "commopt"):
        on_threads(2, run)
    assert "overlap is lost" not in caplog.text


def test_what_a_step_that_was_given_up_has_sent_is_no_part_of_the_next_one():
    def run(backend):
        model = Used()
        optimizer = optimizer_of(model, backend, True)
        train(model, optimizer, range(6), backend.rank, 2)
        stats = optimizer.comm_stats()
        backward(model, 6, backend.rank, 2)
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()
        now = optimizer.comm_stats()
        assert now["step"]["bytes"] == stats["step"]["bytes"] > 0
        assert now["total"]["bytes"] > stats["total"]["bytes"] + now["step"]["bytes"]

    on_threads(2, run)


def test_a_step_is_given_up_though_what_came_of_it_is_refused():
    """As where an optimizer is to take the average over replicas, and cannot: all but that step is as it was."""

    def run(backend, overlap):
        model = Used()
        optimizer = optimizer_of(model, backend, overlap)
        train(model, optimizer, range(6), backend.rank, 2)
        backward(model, 6, backend.rank, 2)
        params = optimizer.param_groups[0]["params"]
        whole = list(params)
        params.pop()
        with pytest.raises(ValueError, match="parameters now"):
            binding.take_replicas(optimizer)
        params[:] = whole
        optimizer.step()
        train(model, optimizer, range(7, STEPS), backend.rank, 2)
        return params_of(model), tensors_in(optimizer.state_dict())

    for plain, overlapped in zip(on_threads(2, lambda b: run(b, False)), on_threads(2, lambda b: run(b, True))):
        assert same_bits(plain[0], overlapped[0])
        assert same_bits(plain[1], overlapped[1])


@pytest.mark.parametrize("exchange", [True, False])
def test_parameters_that_are_exchanged_or_added_between_backward_and_step(exchange):
    """What backward has begun is given up: a run is the one without overlap, to the bit."""

    def run(backend, overlap):
        model, more = Used(), nn.Parameter(torch.ones(5))
        optimizer = optimizer_of(model, backend, overlap)
        train(model, optimizer, range(6), backend.rank, 2)
        backward(model, 6, backend.rank, 2)
        if exchange:
            (group,) = optimizer.param_groups
            group["params"] = [anew(p) for p in group["params"]]
            optimizer.rebind()
        else:
            optimizer.add_param_group({"params": [more]})
        optimizer.step()
        now = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
        if not exchange:
            train(model, optimizer, range(7, STEPS), backend.rank, 2)
        return [*now, *params_of(model), *tensors_in(optimizer.state_dict())]

    def anew(p):
        new = nn.Parameter(p.detach().clone())
        new.grad = None if p.grad is None else p.grad.clone()
        return new

    for plain, overlapped in zip(on_threads(2, lambda b: run(b, False)), on_threads(2, lambda b: run(b, True))):
        assert same_bits(plain, overlapped)


def test_what_one_rank_exchanges_before_backward_is_an_error_on_all_in_the_phase_of_its_group():
    """So that what the others have begun ends; they go on once the parameters are back."""

    def run(backend):
        model = Used()
        params = list(model.parameters())
        groups = [{"params": params[:2], "freeze_step": 2}, {"params": params[2:], "freeze_step": 100}]
        optimizer = OneBitAdam(groups, lr=1e-2, bucket_mb=1e-4, overlap=True, backend=backend)
        train(model, optimizer, range(4), backend.rank, 2)
        if backend.rank == 1:
            optimizer.param_groups[1]["params"] = [nn.Parameter(p.detach().clone()) for p in params[2:]]
        with pytest.raises((ValueError, RuntimeError), match=r"rebind\(\)|rank 1 cannot take this step"):
            train(model, optimizer, range(4, 5), backend.rank, 2)
        optimizer.param_groups[1]["params"] = params[2:]
        train(model, optimizer, range(4, 6), backend.rank, 2)
        return params_of(model)

    assert same_bits(*on_threads(2, run))


def test_a_state_that_does_not_fit_between_backward_and_step():
    """It is refused, and the step is taken as if nothing had been."""

    def run(backend, spoil):
        model = Used()
        optimizer = optimizer_of(model, backend, True)
        train(model, optimizer, range(6), backend.rank, 2)
        backward(model, 6, backend.rank, 2)
        if spoil:
            with pytest.raises(ValueError, match="parameter group"):
                optimizer.load_state_dict({"state": {}, "param_groups": []})
        optimizer.step()
        train(model, optimizer, range(7, STEPS), backend.rank, 2)
        return params_of(model)

    assert same_bits(on_threads(2, lambda b: run(b, True))[0], on_threads(2, lambda b: run(b, False))[0])


def test_a_grad_scaler():
    def scale(model, optimizer):
        optimizer.grad_scale = torch.tensor(1024.0)

        def step():
            try:
                optimizer.step()
            finally:
                del optimizer.grad_scale

        return step

    broken_step(scale, ValueError, "before a GradScaler has unscaled them")


def test_a_second_backward():
    def run(backend):
        model = Used()
        optimizer = optimizer_of(model, backend, True)
        train(model, optimizer, range(6), backend.rank, 2)
        before = params_of(model)
        backward(model, 6, backend.rank, 2)
        with pytest.raises(RuntimeError, match=r"one backward\(\) per step\(\).*optimizer.no_sync\(\)"):
            model(tokens(7, backend.rank, 2)).backward()
        assert same_bits(before, params_of(model))

    on_threads(2, run)


def test_clipping_inside_is_refused_at_construction_on_all_ranks():
    def run(backend):
        with pytest.raises(ValueError, match=r"overlap=True and max_grad_norm=1\.0 exclude each other"):
            optimizer_of(Used(), backend, True, max_grad_norm=1.0 if backend.rank else None)

    on_threads(2, run)


def test_ranks_that_differ_in_overlap():
    def run(backend):
        with pytest.raises(ValueError, match="differ between ranks: rank 1"):
            optimizer_of(Used(), backend, bool(backend.rank))

    on_threads(2, run)


def test_a_model_that_is_cast_between_backward_and_step():
    def run(backend):
        model = Used()
        optimizer = optimizer_of(model, backend, True)
        backward(model, 0, backend.rank, 2)
        model.double()
        with pytest.raises(ValueError, match="were moved, cast or put into other groups between backward"):
            optimizer.step()

    on_threads(2, run)


# nothing hangs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overlap", "where"), [(False, "step 7, agreement of the ranks"), (True, "step 7, bucket 0 of")]
)
def test_a_rank_that_never_joins_is_an_error_that_names_step_and_bucket(overlap, where):
    def run(backend):
        model = Used()
        optimizer = optimizer_of(model, backend, overlap)
        train(model, optimizer, range(6), backend.rank, 2)
        if backend.rank == 0:
            with pytest.raises(CollectiveError, match=where):
                train(model, optimizer, range(6, 7), backend.rank, 2)

    ThreadWorld(2, timeout=1.0).run(run)


@pytest.mark.parametrize("lacking", [0, 1])
def test_another_learning_rate_on_one_rank_is_an_error_on_all(lacking):
    """Also where a rank has begun nothing for want of a gradient, and the other waits for its first bucket."""

    def run(backend):
        model = Used()
        optimizer = optimizer_of(model, backend, True)
        train(model, optimizer, range(6), backend.rank, 2)
        first = next(p for p in optimizer.buckets[0].params if p.numel())
        backward_without(model, 6, backend, {first} if backend.rank == lacking else set())
        if backend.rank == 1:
            optimizer.param_groups[0]["lr"] = 0.5
        with pytest.raises(OutOfStep, match=r"lr of parameter group 0 is 0\.5 on rank 1 and 0\.01 on rank 0"):
            optimizer.step()

    ThreadWorld(2, timeout=5.0).run(run)


def test_unfreezing_on_one_rank_only_is_an_error_on_all():
    def run(backend):
        model = Used()
        optimizer = optimizer_of(model, backend, True)
        train(model, optimizer, range(6), backend.rank, 2)
        if backend.rank == 1:
            model.unused.requires_grad_(True)
        backward(model, 6, backend.rank, 2)
        with pytest.raises(RuntimeError, match="different numbers of trainable parameters"):
            optimizer.step()

    on_threads(2, run)


def test_unfreezing_on_all_ranks():
    def run(backend, overlap):
        model = Used()
        optimizer = optimizer_of(model, backend, overlap, freeze_step=4)
        train(model, optimizer, range(3), backend.rank, 2)
        model.frozen.requires_grad_(True)
        for t in range(3, STEPS):
            model.zero_grad()
            (model(tokens(t, backend.rank, 2)) + (model.frozen**2).sum() * (1 + backend.rank)).backward()
            optimizer.step()
        return params_of(model), tensors_in(optimizer.state_dict())

    for a, b in zip(on_threads(2, lambda b: run(b, False)), on_threads(2, lambda b: run(b, True))):
        assert same_bits(a[0], b[0])
        assert same_bits(a[1], b[1])


def test_an_optimizer_that_is_gone_leaves_no_working_hooks():
    def run(backend):
        model = Used()
        train(model, optimizer_of(model, backend, True), range(2), backend.rank, 2)
        other = optimizer_of(model, backend, False)
        calls = backend.calls
        backward(model, 2, backend.rank, 2)
        assert backend.calls == calls
        other.step()
        assert backend.calls > calls

    on_threads(2, run)


def test_a_copy_whose_parameter_is_frozen_goes_on_and_overlaps_once_it_is_not():
    def run(backend: ThreadBackend) -> list[Tensor]:
        model = Used()
        optimizer = optimizer_of(model, backend, True)
        train(model, optimizer, range(2), backend.rank, 2)
        model.bias.requires_grad_(False)
        train(model, optimizer, range(2, 3), backend.rank, 2)
        other, new = copy.deepcopy((model, optimizer))
        train(other, new, range(3, 4), backend.rank, 2)
        other.bias.requires_grad_(True)
        train(other, new, range(4, 6), backend.rank, 2)
        backward(other, 6, backend.rank, 2)
        assert new.step_in_flight().started == len(new.buckets) - 1
        new.step()
        return params_of(other)

    one, other = on_threads(2, run)
    assert same_bits(one, other)


class Heads(nn.Module):
    """A trunk, and two heads in one bucket."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        shapes = [(9, 9), (9, 9), (9, 9), (9, 4), (9, 4)]
        self.params = nn.ParameterList([nn.Parameter(0.3 * torch.randn(s, generator=draw)) for s in shapes])

    def forward(self, x: Tensor, heads: tuple[int, ...]) -> Tensor:
        for weight in self.params[:3]:
            x = torch.tanh(x @ weight)
        return torch.stack([(x @ self.params[head]).square().mean() for head in heads]).sum()


@pytest.mark.parametrize("heads", [(3,), (4, 3)], ids=["the other head", "both heads"])
def test_a_backward_that_failed_before_anything_was_sent_leaves_nothing(heads):
    """Also where the next one reaches other parameters of the bucket that had begun to fill."""

    def run(backend: ThreadBackend, fails: bool) -> list[Tensor]:
        model = Heads()
        optimizer = optimizer_of(model, backend, overlap=True, bucket_mb=4e-4)
        for step in range(8):
            x = torch.randn(4, 9, generator=torch.Generator().manual_seed(10 * step + backend.rank))
            if fails and step >= 5:
                hook = model.params[2].register_hook(lambda _: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    model(x, (4,)).backward()
                hook.remove()
                optimizer.zero_grad()
            model(x, (3, 4) if step < 5 else heads).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [*params_of(model), *tensors_in(optimizer.state_dict())]

    for failed, plain in zip(*(on_threads(2, partial(run, fails=fails)) for fails in (True, False))):
        assert same_bits(failed, plain)


def test_after_a_backward_that_failed_on_all_ranks_the_error_says_how_to_go_on():
    def run(backend):
        models, failing = [Used(), Used()], []
        settings = {"lr": 1e-2, "freeze_step": 2, "bucket_mb": 1e-4, "overlap": True, "backend": backend}
        one, other = (OneBitAdam(model.parameters(), **settings) for model in models)

        def fail(_):
            if failing:
                raise MemoryError("boom")

        models[0].positions.register_hook(fail)
        for model, optimizer in zip(models, (one, other)):
            train(model, optimizer, range(4), backend.rank, 2)
        failing.append(True)
        with pytest.raises(MemoryError):
            backward(models[0], 4, backend.rank, 2)
        failing.clear()
        models[0].zero_grad()
        with pytest.raises(RuntimeError, match=r"the last backward\(\) did not end.*load_state_dict"):
            backward(models[0], 5, backend.rank, 2)
        one.load_state_dict(one.state_dict())
        models[0].zero_grad()
        for model, optimizer in zip(models, (one, other)):
            train(model, optimizer, range(5, 8), backend.rank, 2)
        assert same_bits(params_of(models[0]), params_of(models[1]))
        return params_of(models[0])

    assert same_bits(*on_threads(2, run))
