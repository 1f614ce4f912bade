"""Streaming: fragments in flight, against an oracle on plain lists; and its laws."""

from __future__ import annotations

import copy
import itertools
import math
import threading
from contextvars import ContextVar
from functools import partial

import numpy as np
import pytest
import torch
from oracle_streaming import StreamingOracle
from oracle_top_k import encode
from streams import STREAMS
from torch import Tensor, nn
from worlds import (
    Toy,
    all_tensors,
    backward,
    on_threads,
    params_of,
    same_bits,
    some_grads,
    some_params,
    through_a_file,
    train,
)

from commopt import DiLoCo, Guard, LocalSGD, SignMomentum, SlowMo, SparseLoCo, Streaming
from commopt.comm import LocalBackend, all_reduce_bytes
from commopt.compress import Int4, Sign, TopK
from commopt.optim import NotFinite, ReplicasDiffer, join_state_dict, split_state_dict
from commopt.outer.rounds import ROUND_BYTES, Comparison
from commopt.state import following, packing

METHODS = {"average": LocalSGD, "slowmo": SlowMo, "diloco": DiLoCo, "sign": SignMomentum, "sparse": SparseLoCo}
OUTER = {
    "average": ({}, {}),
    "slowmo": ({"lr": 0.9, "momentum": 0.6}, {"outer_lr": 0.9, "outer_momentum": 0.6}),
    "diloco": ({"lr": 0.7, "momentum": 0.9}, {"outer_lr": 0.7, "outer_momentum": 0.9}),
    "sign": (
        {"lr": 0.8, "b1": 0.7, "b2": 0.9, "wd": 0.2},
        {"outer_lr": 0.8, "outer_betas": (0.7, 0.9), "outer_weight_decay": 0.2},
    ),
    "sparse": (
        {"lr": 0.8, "decay": 0.9, "compress": lambda row: encode(row, 4, 16, 2, kind=np.float64)[1]},
        {"outer_lr": 0.8, "error_decay": 0.9, "compressor": TopK(4, 16, 2)},
    ),
}
EVERY = pytest.mark.parametrize("method", METHODS)
SIZES = [(3, 7), (), (40,), (0, 2), (2, 5)]
EVERY_WAY = {**STREAMS, "eager": (2, None, "eager", 0.0, Streaming(2, merge="eager"))}
EVERY_STREAM = pytest.mark.parametrize("stream", EVERY_WAY)
LATE = [Streaming(3, 2), Streaming(3, 4, "mix"), Streaming(2, merge="eager")]
EVERY_LATE = pytest.mark.parametrize("streaming", LATE, ids=["corrected", "mix", "eager"])


def flat(tensors: list[Tensor]) -> list[float]:
    return [v for t in tensors for v in t.detach().double().flatten().tolist()]


def make(method, params, backend, streaming, **settings):
    return METHODS[method](params, backend=backend, streaming=streaming, **settings)


def pieces_of(optimizer, params) -> list[tuple[int, list[int]]]:
    numbers = {id(p): i for i, p in enumerate(params)}
    return [(bucket.fragment, [numbers[id(p)] for p in bucket.params]) for bucket in optimizer.buckets]


def lr_of(step: int) -> float:
    return 0.02 / (1 + step % 5)


def compare_with_oracle(world_size, method, stream, block=0, steps=12, ends=()):
    fragments, delay, merge, alpha, streaming = EVERY_WAY[stream]
    ours, arguments = OUTER[method]
    period, params = 5, some_params(SIZES)
    settings = {"lr": 1.0, "period": period, "betas": (0.9, 0.99), "weight_decay": 0.1, **arguments}
    if block:
        settings["compressor"] = Sign(block=block)
    layout = pieces_of(make(method, params, LocalBackend(), streaming, **settings), params)
    assert {p for p, _ in layout} == set(range(fragments))

    oracle = StreamingOracle(
        [(p, flat([params[i] for i in at]), [params[i].numel() for i in at]) for p, at in layout],
        method, world_size, period, "adamw", ours, block, fragments, delay, merge, alpha, ours,
    )  # fmt: skip
    expected = []
    for step in range(steps):
        grads = [some_grads(SIZES, step, r) for r in range(world_size)]
        oracle.step([[flat([of_rank[i] for i in at]) for of_rank in grads] for _, at in layout], lr_of(step))
        if step in ends:
            oracle.synchronize()
        expected.append([[list(x) for x in piece.x] for piece in oracle.pieces])

    def run(backend):
        mine = some_params(SIZES)
        optimizer = make(method, mine, backend, streaming, **settings)
        assert pieces_of(optimizer, mine) == layout
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = lr_of(step)
            for p, g in zip(mine, some_grads(SIZES, step, backend.rank)):
                p.grad = g
            optimizer.step()
            if step in ends:
                optimizer.synchronize()
                assert not optimizer.replicas_differ
            for (_, at), of_ranks in zip(layout, expected[step]):
                theirs = torch.tensor(of_ranks[backend.rank], dtype=torch.float64)
                now = torch.tensor(flat([mine[i] for i in at]), dtype=torch.float64)
                torch.testing.assert_close(now, theirs, rtol=1e-12, atol=1e-12, msg=lambda m: f"step {step}: {m}")  # noqa: B023
        return optimizer.comm_stats()["rounds"]

    assert on_threads(world_size, run) == [oracle_rounds(steps, ends, period)] * world_size


def oracle_rounds(steps: int, ends: tuple[int, ...], period: int) -> int:
    at = rounds = 0
    for step in range(steps):
        at += 1
        if at == period or step in ends:
            rounds += 1 + (at == period and step in ends)
            at = 0
    return rounds


@pytest.mark.parametrize("world_size", [1, 3])
@EVERY
@EVERY_STREAM
def test_every_step_equals_the_algorithm_on_plain_lists(world_size, method, stream):
    compare_with_oracle(world_size, method, stream)


@pytest.mark.parametrize("method", ["diloco", "sign"])
@EVERY_STREAM
def test_compressed_fragments_equal_the_loop_with_residuals(method, stream):
    compare_with_oracle(2, method, stream, block=16)


@pytest.mark.parametrize("method", ["diloco", "sparse"])
@EVERY_STREAM
def test_synchronize_merges_what_is_in_flight_and_ends_all_rounds(method, stream):
    """Between rounds, right behind one that was sent, and in the middle of a flight."""
    compare_with_oracle(2, method, stream, ends=(3, 8, 10))


# relations ------------------------------------------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("world_size", [1, 2])
def test_one_fragment_without_a_delay_is_a_round_to_the_bit(method, world_size):
    """Parameters, state, own parts and bytes; with a round that is skipped, and one that is ended early."""

    def run(backend):
        out = []
        for streaming in (None, Streaming(1, 0), Streaming(1, 0, "mix")):
            model = Toy()
            settings = {"lr": 1e-2, "period": 3, "bucket_mb": 2e-4, "compressor": Sign(block=64)}
            optimizer = make(method, model.parameters(), backend, streaming, **settings)
            history = []
            for step in range(8):
                kept = model.weight.detach().clone()
                backward(model, step, backend.rank, world_size)
                if step == 2 and backend.rank == 0:
                    model.weight.data[0, 0] = math.nan
                optimizer.step()
                if step == 2:
                    assert optimizer.skipped_rounds == 1
                    model.weight.data.copy_(kept)
                if step == 4:
                    optimizer.synchronize()
                state, stats = optimizer.state_dict(), optimizer.comm_stats()
                history.append((params_of(model), all_tensors([state["state"], state["residuals"]]), stats["total"]))
            stats.pop("in_flight", None)
            out.append((history, stats, optimizer.phase))
        for history, *rest in out[1:]:
            assert rest == list(out[0][1:])
            for (a, b, sent), (c, d, also) in zip(out[0][0], history):
                assert same_bits(a, c)
                assert same_bits(b, d)
                assert sent == also

    on_threads(world_size, run)


def test_mixing_nothing_of_its_own_is_throwing_the_steps_away_and_correcting_is_not():
    def run(backend):
        out = {}
        for name, streaming in (
            ("kept", Streaming(2, 2)), ("own", Streaming(2, 2, "mix", 1.0)), ("anchor", Streaming(2, 2, "mix", 0.0)),
        ):  # fmt: skip
            model = Toy(torch.float64)
            optimizer = DiLoCo(model.parameters(), lr=1e-2, period=4, streaming=streaming, backend=backend)
            train(model, optimizer, range(3), backend.rank, 2)
            before = {p: p.detach().clone() for p in model.parameters()}
            train(model, optimizer, range(3, 4), backend.rank, 2)
            merged = optimizer.entries([0])[0][0]
            x, anchor = merged.pack_params(), merged["anchor"]
            out[name] = (x, anchor.clone())
            assert not same_bits(list(before.values()), params_of(model))
        assert same_bits([out["anchor"][0]], [out["anchor"][1]])
        assert len({float(anchor.sum()) for _, anchor in out.values()}) == 1
        assert not same_bits([out["own"][0]], [out["own"][1]])
        assert float((out["kept"][0] - out["kept"][1]).abs().max()) > 1e-3
        return out["kept"][1]

    a, b = on_threads(2, run)
    assert same_bits([a], [b])


# flights --------------------------------------------------------------------------------------------------------------


def settings_of(method: str) -> dict:
    return {"lr": 1e-2, "period": 6, **({} if method == "sparse" else {"compressor": Int4(block=64)})}


@pytest.mark.parametrize(
    ("method", "dtype"), [("average", torch.bfloat16), ("diloco", torch.float32), ("sparse", torch.float32)]
)
@EVERY_LATE
def test_a_run_resumed_in_the_middle_of_a_flight_equals_one_never_stopped(method, streaming, dtype):
    """In flight, where one is merged and where the next is sent; rank 0 saves its own first, alone."""
    stops, last = (3, 4, 6, 8, 9), 15

    def straight(backend):
        model, saved = Toy(dtype), {}
        optimizer = make(method, model.parameters(), backend, streaming, **settings_of(method))
        for step in range(last):
            if step in stops:
                state = split_state_dict(optimizer.state_dict())
                saved[step] = through_a_file([model.state_dict(), *state, optimizer.comm_stats()["in_flight"]])
            train(model, optimizer, range(step, step + 1), backend.rank, 2)
        return params_of(model), all_tensors(optimizer.state_dict()), saved

    results = on_threads(2, straight)
    assert all(results[0][2][step][3] for step in stops)
    for step in stops:
        groups = [str(saved[step][1]["param_groups"]) for _, _, saved in results]
        assert groups[0] == groups[1]

    def resumed(backend):
        for step in stops:
            model = Toy(dtype, seed=9)
            optimizer = make(method, model.parameters(), backend, streaming, **settings_of(method))
            weights, replicated, *_ = results[0][2][step]
            model.load_state_dict(weights)
            parts = [saved[step][2] for _, _, saved in results]
            optimizer.load_state_dict(join_state_dict(replicated, parts, backend.rank, 2))
            assert same_bits(all_tensors(optimizer.state_dict()["residuals"]), all_tensors(parts[backend.rank]))
            train(model, optimizer, range(step, last), backend.rank, 2)
            assert same_bits(params_of(model), results[backend.rank][0])
            assert same_bits(all_tensors(optimizer.state_dict()), results[backend.rank][1])

    on_threads(2, resumed)


@EVERY_LATE
@pytest.mark.parametrize("how", ["copy", "load", "cast", "consolidate"])
def test_a_copy_in_the_middle_of_a_flight_goes_on_as_the_original_would(streaming, how):
    """A deep copy; a state loaded into the optimizer that flies already; a model cast to and fro; one rank's file."""

    def run(backend):
        model, other = Toy(torch.float64), Toy(torch.float64)
        settings = {"lr": 1e-2, "period": 6, "streaming": streaming, "compressor": Sign(block=64)}
        optimizer = DiLoCo(model.parameters(), backend=backend, **settings)
        train(model, optimizer, range(8), backend.rank, 2)
        assert optimizer.comm_stats()["in_flight"]
        if how == "copy":
            other, second = copy.deepcopy((model, optimizer))
        else:
            second = DiLoCo(other.parameters(), backend=backend, **settings)
            train(other, second, range(3 if how == "load" else 8), backend.rank, 2)
            if how == "consolidate":
                optimizer.consolidate_state_dict()
            if how == "cast":
                other.float().double()  # changes bits; what was in flight is loaded
                following.rebuild(second, second.all_state(), packing.origin_here(second))
            other.load_state_dict(model.state_dict())
            second.load_state_dict(optimizer.state_dict())
        train(model, optimizer, range(8, 12), backend.rank, 2)
        train(other, second, range(8, 12), backend.rank, 2)
        assert same_bits(params_of(model), params_of(other))

    on_threads(2, run)


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("merge", ["corrected", "eager"])
def test_what_one_rank_freezes_or_unfreezes_in_flight_changes_nothing_of_a_flight_that_is_sent_again(merge, alike):
    """A layer that all had frozen when it was sent is the mean, unless another was frozen on one rank alone."""
    streaming = Streaming(1, merge=merge, delay=None if merge == "eager" else 2)

    def run(backend):
        def go(model, optimizer, steps):
            for step in steps:
                if step == 2:
                    model.weight.requires_grad_(False)
                if step == (4 if alike else 3) and backend.rank:
                    model.bias.requires_grad_(not model.bias.requires_grad)
                if step == 4 and backend.rank and not alike:
                    model.bias.requires_grad_(True)
                train(model, optimizer, range(step, step + 1), backend.rank, 2)

        model, other = Toy(torch.float64), Toy(torch.float64)
        settings = {"lr": 1e-2, "period": 4, "streaming": streaming, "backend": backend}
        optimizer, second = DiLoCo(model.parameters(), **settings), DiLoCo(other.parameters(), **settings)
        go(model, optimizer, range(5))
        assert optimizer.comm_stats()["in_flight"]
        other.load_state_dict(model.state_dict())
        for p, q in zip(other.parameters(), model.parameters()):
            p.requires_grad_(q.requires_grad)
        second.load_state_dict(optimizer.state_dict())
        for m, o in ((model, optimizer), (other, second)):
            go(m, o, range(5, 12))
        assert same_bits(params_of(model), params_of(other))
        assert same_bits(all_tensors(optimizer.state_dict()), all_tensors(second.state_dict()))

    on_threads(2, run)


@pytest.mark.parametrize("how", ["copy", "load"])
@pytest.mark.parametrize("method", ["average", "diloco", "sign"])
@EVERY_LATE
def test_what_is_unfrozen_in_flight_is_in_no_flight_of_a_copy_either_and_keeps_its_steps(streaming, method, how):
    """A copy goes on as the original, to the bit; loaded where buckets are larger, it shares one with others."""

    def run(backend):
        model = Toy(torch.float64)
        model.weight.requires_grad_(False)
        settings = {"lr": 1e-2, "period": 6, "streaming": streaming, "backend": backend, "weight_decay": 0.0}
        if method == "sign":
            settings["outer_weight_decay"] = 0.2
        optimizer = METHODS[method](model.parameters(), **settings)
        now = 9 if streaming.is_eager else 8
        train(model, optimizer, range(now), backend.rank, 2)
        flying = optimizer.comm_stats()["in_flight"]
        model.weight.requires_grad_(True)
        train(model, optimizer, range(now, now + 1), backend.rank, 2)
        assert optimizer.comm_stats()["in_flight"] == flying
        if how == "copy":
            other, second = copy.deepcopy((model, optimizer))
            train(model, optimizer, range(now + 1, 20), backend.rank, 2)
            train(other, second, range(now + 1, 20), backend.rank, 2)
            assert same_bits(params_of(model), params_of(other))
            assert same_bits(all_tensors(optimizer.state_dict()), all_tensors(second.state_dict()))
            return
        other = Toy(torch.float64)
        second = METHODS[method](other.parameters(), bucket_mb=8, **settings)
        other.load_state_dict(model.state_dict())
        second.load_state_dict(optimizer.state_dict())
        (of_it,) = {bucket.fragment for bucket in second.buckets if any(p is other.weight for p in bucket.params)}
        assert of_it in flying
        second.param_groups[0]["lr"] = 0.0  # so that only a merge moves anything
        train(other, second, range(now + 1, now + (2 if streaming.is_eager else 5)), backend.rank, 2)
        torch.testing.assert_close(other.weight, model.weight, rtol=0, atol=1e-12)

    on_threads(2, run)


@pytest.mark.parametrize("how", ["copy", "load"])
@EVERY_LATE
def test_what_was_frozen_when_it_was_sent_is_so_in_a_copy_that_is_made_in_flight(streaming, how):
    """A layer is frozen before a fragment is sent and unfrozen before the merge, or the other way round."""
    settings = {"lr": 1e-2, "period": 6, "streaming": streaming}

    def run(backend):
        model, copies, changed = Toy(torch.float64), [], set()
        optimizer = DiLoCo(model.parameters(), backend=backend, **settings)
        (place,) = (i for i, p in enumerate(optimizer.params) if p is model.weight)
        (of_it,) = {b.fragment for b in optimizer.buckets if any(p is model.weight for p in b.params)}
        for step in range(22):
            frozen = step % 4 < 2
            for each, _ in [(model, optimizer), *copies]:
                each.weight.requires_grad_(not frozen)
            was = place in (optimizer.param_groups[0]["frozen_when_sent"][of_it] or ())
            if of_it in optimizer.comm_stats()["in_flight"] and was != frozen:
                changed.add(was)
                if how == "copy":
                    copies.append(copy.deepcopy((model, optimizer)))
                else:
                    other = Toy(torch.float64)
                    other.load_state_dict(model.state_dict())
                    other.weight.requires_grad_(not frozen)
                    copies.append((other, DiLoCo(other.parameters(), backend=backend, **settings)))
                    copies[-1][1].load_state_dict(optimizer.state_dict())
            for each, its in [(model, optimizer), *copies]:
                train(each, its, range(step, step + 1), backend.rank, 2)
        assert changed == {True, False}
        assert all(same_bits(params_of(other), params_of(model)) for other, _ in copies)

    on_threads(2, run)


@pytest.mark.parametrize("streaming", [Streaming(1, 2), Streaming(1, merge="eager")], ids=["corrected", "eager"])
def test_what_one_rank_alone_had_frozen_when_it_was_sent_is_so_on_that_rank_alone_after_a_load(streaming):
    """Of a checkpoint with the parameter groups of rank 0."""
    saved, all_saved = {}, threading.Barrier(2)
    settings = {"lr": 1e-2, "period": 4, "streaming": streaming}

    def run(backend):
        model, other = Toy(torch.float64), Toy(torch.float64)
        optimizer = DiLoCo(model.parameters(), backend=backend, **settings)
        train(model, optimizer, range(2), backend.rank, 2)
        model.weight.requires_grad_(backend.rank == 1)
        train(model, optimizer, range(2, 5), backend.rank, 2)
        assert optimizer.comm_stats()["in_flight"]
        saved[backend.rank] = split_state_dict(through_a_file(optimizer.state_dict()))
        all_saved.wait()
        other.load_state_dict(model.state_dict())
        second = DiLoCo(other.parameters(), backend=backend, **settings)
        other.weight.requires_grad_(backend.rank == 1)
        second.load_state_dict(join_state_dict(saved[0][0], [saved[0][1], saved[1][1]], backend.rank, 2))
        for m, o in ((model, optimizer), (other, second)):
            train(m, o, range(5, 12), backend.rank, 2)
        assert same_bits(params_of(model), params_of(other))

    on_threads(2, run)


@pytest.mark.parametrize(("old", "new"), [(3, 2), (2, 1)])
@EVERY_LATE
def test_at_another_world_size_the_mean_of_what_was_sent_goes_on(streaming, old, new):
    def save(backend):
        model = Toy(torch.float64)
        optimizer = DiLoCo(model.parameters(), lr=1e-2, period=6, streaming=streaming, backend=backend)
        train(model, optimizer, range(8), backend.rank, old)
        return params_of(model), *split_state_dict(through_a_file(optimizer.state_dict()))

    saved = on_threads(old, save)

    def load(backend):
        model = Toy(torch.float64, seed=4)
        optimizer = DiLoCo(model.parameters(), lr=1e-2, period=6, streaming=streaming, backend=backend)
        optimizer.load_state_dict(join_state_dict(saved[0][1], [part for *_, part in saved], backend.rank, new))
        start = params_of(model)
        train(model, optimizer, range(8, 10), backend.rank, new)
        optimizer.synchronize()
        assert not optimizer.replicas_differ
        return start, params_of(model)

    loaded = on_threads(new, load)
    mean = [torch.stack(group).mean(0) for group in zip(*(s[0] for s in saved))]
    torch.testing.assert_close(loaded[0][0], mean, rtol=1e-12, atol=1e-15)
    assert all(same_bits(loaded[0][1], other) for _, other in loaded)


@pytest.mark.parametrize("streaming", [Streaming(1, 3), Streaming(1, 3, "mix"), Streaming(1, merge="eager")], ids=str)
def test_local_steps_do_not_wait_for_what_is_in_flight(streaming):
    """Rank 1 joins nothing of the second round before rank 0 has sent it, taken further steps, and saved its state."""
    ahead = threading.Event()

    def run(backend):
        model = Toy()
        settings = {"lr": 1e-2, "period": 6, "streaming": streaming, "compressor": Sign(block=64)}
        optimizer = DiLoCo(model.parameters(), backend=backend, **settings)
        train(model, optimizer, range(11), backend.rank, 2)
        if backend.rank == 1:
            optimizer.flights.land_all()  # rank 0 waits for what it has to say about the first one
            assert ahead.wait(20)
        train(model, optimizer, range(11, 14), backend.rank, 2)
        if backend.rank == 0:
            assert optimizer.comm_stats()["in_flight"] == [0]
            assert optimizer.state_dict()["residuals"]["state"][0]["sent_pseudo_gradient"].any()
            ahead.set()
        train(model, optimizer, range(14, 18), backend.rank, 2)

    on_threads(2, run, timeout=30)


@EVERY_LATE
def test_averaged_leaves_no_trace_in_what_is_in_flight(streaming):
    def run(backend):
        model, other = Toy(), Toy()
        settings = {"lr": 1e-2, "period": 6, "streaming": streaming, "backend": backend}
        optimizer, untouched = DiLoCo(model.parameters(), **settings), DiLoCo(other.parameters(), **settings)
        for step in range(13):
            train(model, optimizer, range(step, step + 1), backend.rank, 2)
            train(other, untouched, range(step, step + 1), backend.rank, 2)
            own = [p.double() for p in params_of(model)]
            for p in own:
                backend.all_reduce(p).wait()
            with optimizer.averaged():
                torch.testing.assert_close([p.double() for p in params_of(model)], own, rtol=1e-6, atol=1e-7)
        assert same_bits(params_of(model), params_of(other))

    on_threads(2, run)


# what is sent ---------------------------------------------------------------------------------------------------------


@EVERY_LATE
def test_a_cycle_sends_what_a_round_does_and_a_row_for_each_fragment(streaming):
    """What a fragment has sent is counted where it is merged, whenever it was sent."""
    world_size, period = 3, 6

    def run(backend):
        guard = Guard(check_every=None)
        settings = {"lr": 1e-2, "period": period, "guard": guard, "backend": backend, "streaming": streaming}
        model = Toy()
        optimizer = DiLoCo(model.parameters(), **settings)
        before, delay = optimizer.comm_stats()["total"]["bytes"], streaming.steps
        ends = [streaming.end_of(p, period) for p in range(streaming.fragments)]
        later = [end + (period if streaming.is_eager else delay) for end in ends]
        rows, first, merged = (world_size - 1) * ROUND_BYTES, (world_size - 1) * 64, []
        for step in range(1, 3 * period):
            phase = optimizer.phase
            train(model, optimizer, range(step, step + 1), backend.rank, world_size)
            stats = optimizer.comm_stats()
            now = [p for p, at in enumerate(later) if step >= at and (step - at) % period == 0]
            buckets = [bucket for bucket, _ in optimizer.entries(now)]
            sent = sum(all_reduce_bytes(4 * bucket.padded, world_size) for bucket in buckets) + len(now) * rows
            assert stats["step"]["bytes"] == sent + (first if step == ends[0] else 0)
            merged += now
            sends = (step - 1) % period + 1 in ends
            assert stats["in_flight"] == [] or len(stats["in_flight"]) <= streaming.fragments
            assert (phase == "synchronizing") == (sends or bool(now))
        buckets = [bucket for p in merged for bucket, _ in optimizer.entries([p])]
        of_buckets = sum(all_reduce_bytes(4 * bucket.padded, world_size) for bucket in buckets)
        assert optimizer.comm_stats()["total"]["bytes"] - before == of_buckets + len(merged) * rows + first

    on_threads(world_size, run)


def test_fragments_have_about_the_same_bytes_and_every_depth():
    params = [nn.Parameter(torch.zeros(100)) for _ in range(16)] + [nn.Parameter(torch.zeros(390))]
    optimizer = LocalSGD(params, period=8, streaming=Streaming(4), bucket_mb=4e-4)
    loads = [sum(bucket.numel for bucket, _ in optimizer.entries([p])) for p in range(4)]
    assert sum(loads) == 1990
    assert max(loads) <= 600
    fragments = [bucket.fragment for bucket in optimizer.buckets]
    assert fragments[:4] == [0, 1, 2, 3]
    whole = LocalSGD([nn.Parameter(torch.zeros(8)) for _ in range(4)], period=8, streaming=Streaming(4))
    assert [bucket.fragment for bucket in whole.buckets] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("period", "streaming", "why"),
    [
        (2, Streaming(3), "period must be at least the number of fragments, 3, got 2"),
        (4, Streaming(3, 5), "delay must be less than the period, 4, got 5"),
    ],
)
def test_a_loaded_period_that_does_not_fit_the_streaming_is_refused_before_anything_changes(period, streaming, why):
    saved = DiLoCo(Toy().parameters(), lr=1e-2, period=period).state_dict()
    optimizer = DiLoCo(Toy().parameters(), lr=2e-2, period=6, streaming=streaming)
    with pytest.raises(ValueError, match=why):
        optimizer.load_state_dict(saved)
    assert [(group["period"], group["lr"]) for group in optimizer.param_groups] == [(6, 2e-2)]
    optimizer.step()


@pytest.mark.parametrize("method", ["diloco", "sparse"])
@EVERY_LATE
def test_on_nodes_on_one_channel_and_in_parts_it_is_the_same(method, streaming):
    """Nodes of 2 and, without compression, as without them; a backend without channels, to the bit."""

    class OneChannel:
        def __init__(self, backend):
            self.rank, self.world_size = backend.rank, backend.world_size
            for name in ("all_reduce", "all_gather", "all_to_all", "broadcast"):
                setattr(self, name, getattr(backend, name))

    def run(backend):
        out = []
        compressor = {"compressor": None} if method == "sparse" else {}
        for over in (backend, backend.nodes(2), OneChannel(backend)):
            model = Toy(torch.float64)
            settings = {"lr": 1e-2, "period": 6, "streaming": streaming, **compressor}
            optimizer = METHODS[method](model.parameters(), backend=over, **settings)
            train(model, optimizer, range(9), backend.rank, 4)
            optimizer.synchronize()
            out.append(params_of(model))
        torch.testing.assert_close(out[0], out[1], rtol=1e-9, atol=1e-12)
        assert same_bits(out[0], out[2])
        return out[0]

    results = on_threads(4, run)
    assert all(same_bits(results[0], other) for other in results)


@EVERY_LATE
def test_sharded_replicas_and_nodes_with_a_compressor_stay_replicas(streaming):
    def run(backend):
        out = []
        for over, compressor in ((backend.sharded(2), Int4(block=64)), (backend.nodes(2), TopK(4, 16))):
            cls = SparseLoCo if isinstance(compressor, TopK) else DiLoCo
            clip = {"clip_to_median": True} if cls is SparseLoCo else {}
            model = Toy(torch.float64, seed=backend.rank % 2 if cls is DiLoCo else 0)
            settings = {"lr": 1e-2, "period": 6, "streaming": streaming, "compressor": compressor, **clip}
            optimizer = cls(model.parameters(), backend=over, **settings)
            train(model, optimizer, range(9), backend.rank, 4)
            optimizer.synchronize()
            out.append(params_of(model))
        return out

    results = on_threads(4, run)
    for rank in (1, 2, 3):
        assert same_bits(results[rank][1], results[0][1])
        assert same_bits(results[rank][0], results[0][0]) == (rank == 2)
    assert same_bits(results[1][0], results[3][0])


# what goes wrong ------------------------------------------------------------------------------------------------------


@EVERY_LATE
def test_a_fragment_with_nan_on_one_rank_is_not_merged_by_any_and_made_up_for(streaming, caplog):
    def run(backend):
        model = Toy(torch.float64)
        settings = {"lr": 1e-2, "period": 6, "streaming": streaming, "compressor": Sign(block=64)}
        optimizer = DiLoCo(model.parameters(), backend=backend, **settings)
        last = streaming.fragments - 1
        train(model, optimizer, range(5), backend.rank, 2)
        ((bucket, _),) = optimizer.entries([last])[:1]
        p = bucket.params[0]
        kept, anchor = p.detach().clone(), [b["anchor"].clone() for b, _ in optimizer.entries([last])]
        if backend.rank == 1:
            p.data.view(-1)[0] = math.nan
        backward(model, 5, backend.rank, 2)
        model.zero_grad()
        optimizer.step()  # sends the last fragment
        p.data.copy_(kept)
        train(model, optimizer, range(6, 11), backend.rank, 2)
        rounds = optimizer.param_groups[0]["fragment_rounds"][last]
        if not streaming.is_eager:
            assert optimizer.skipped_rounds == 1
            assert rounds == 0
            assert same_bits(anchor, [b["anchor"] for b, _ in optimizer.entries([last])])
            assert optimizer.param_groups[0]["fragment_steps"][last] == 11
        residuals = [b.feedback.worker.clone() for b, _ in optimizer.entries([last])]
        train(model, optimizer, range(11, 12), backend.rank, 2)
        if streaming.is_eager:  # what was lost of a message that nobody has taken is in no residual
            assert optimizer.skipped_rounds == 1
            assert same_bits(residuals, [b.feedback.worker for b, _ in optimizer.entries([last])])
        train(model, optimizer, range(12, 20), backend.rank, 2)
        assert optimizer.skipped_rounds == 1
        optimizer.synchronize()
        assert not optimizer.replicas_differ
        assert all(t.isfinite().all() for t in params_of(model) + all_tensors(optimizer.state_dict()))
        return params_of(model)

    a, b = on_threads(2, run)
    assert same_bits(a, b)
    assert "inf, NaN or a norm above 1e+14 in the parameters of ranks [1]" in caplog.text


@pytest.mark.parametrize("steps", [18, 8, 10])
def test_what_an_eager_round_that_was_skipped_has_not_brought_comes_with_the_next_one(steps):
    """Without momentum, by gradients that do not depend on the model: the mean of all that was done, but for the one
    element that was NaN."""

    def run(backend):
        params = some_params(SIZES)
        optimizer = LocalSGD(
            params, torch.optim.SGD, lr=0.1, period=4, streaming=Streaming(2, merge="eager"), backend=backend
        )
        expected = [p.detach().clone() for p in params]
        for step in range(steps):
            for p, g in zip(params, some_grads(SIZES, step, backend.rank)):
                p.grad = g
            bad = step == 7 and backend.rank == 1
            if bad:
                params[2].data[0] = math.nan
            optimizer.step()  # after 4, 8, 12, ... steps the second fragment is sent, which is this parameter
            if bad:
                params[2].data[0] = optimizer.state[params[2]]["anchor"][0]
            for x, *both in zip(expected, some_grads(SIZES, step, 0), some_grads(SIZES, step, 1)):
                x.sub_(sum(both), alpha=0.05)
        assert optimizer.skipped_rounds == (steps > 11)  # looked at when the fragment is sent the next time
        optimizer.synchronize()
        assert optimizer.skipped_rounds == 1
        params[2].data[0] = expected[2][0]
        torch.testing.assert_close([p.detach() for p in params], expected, rtol=1e-12, atol=1e-12)

    on_threads(2, run)


@pytest.mark.parametrize("streaming", [Streaming(2, merge="eager"), Streaming(2, 1)], ids=str)
@pytest.mark.parametrize(("old", "new"), [(2, 2), (2, 1), (2, 3), (3, 2)])
@pytest.mark.parametrize("steps", [3, 6, 11])
@pytest.mark.parametrize("more", [0, 5])
def test_what_is_in_flight_counts_in_full_at_another_world_size(streaming, old, new, steps, more):
    """Without momentum, by gradients that do not depend on the model: the mean of all that was done, by however many
    ranks; eager ranks had taken their own shares of what was in flight."""

    def train(backend, state, start, steps):
        params = [nn.Parameter(p.clone()) for p in start]
        settings = {"lr": 0.1, "period": 4, "streaming": streaming, "backend": backend}
        optimizer = LocalSGD(params, torch.optim.SGD, **settings)
        if state is not None:
            optimizer.load_state_dict(join_state_dict(*copy.deepcopy(state), backend.rank, new))
        for step in steps:
            for p, g in zip(params, some_grads(SIZES, step, backend.rank)):
                p.grad = g
            optimizer.step()
        saved = split_state_dict(copy.deepcopy(optimizer.state_dict()))
        values = [p.detach().clone() for p in params]
        optimizer.synchronize()
        return values, *saved, params

    start = [p.detach() for p in some_params(SIZES)]
    saved = on_threads(old, lambda backend: train(backend, None, start, range(steps)))
    state = saved[0][1], [own for _, _, own, _ in saved]
    ended = on_threads(new, lambda backend: train(backend, state, saved[0][0], range(steps, steps + more)))
    expected = [p.clone() for p in start]
    for ranks, taken in (old, range(steps)), (new, range(steps, steps + more)):
        for step, rank in itertools.product(taken, range(ranks)):
            for x, g in zip(expected, some_grads(SIZES, step, rank)):
                x.sub_(g, alpha=0.1 / ranks)
    for *_, params in ended:
        torch.testing.assert_close([p.detach() for p in params], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("streaming", [Streaming(2, 0), Streaming(2, 1), Streaming(2, merge="eager")], ids=str)
def test_one_fragment_that_is_never_merged_ends_the_run_though_others_are(streaming):
    """One parameter of one rank is NaN, and so are all of its gradients from then on."""

    def run(backend):
        params = [nn.Parameter(torch.ones(4)) for _ in range(2)]
        settings = {"lr": 0.01, "period": 4, "streaming": streaming, "guard": Guard(max_skipped=3)}
        optimizer = DiLoCo(params, torch.optim.SGD, backend=backend, **settings)
        for step in range(40):
            bad = backend.rank == 1 and step >= 5
            if bad and step == 5:
                params[0].data[0] = math.nan
            for p in params:
                p.grad = torch.full_like(p, math.nan if bad else 1.0)
            try:
                optimizer.step()
            except NotFinite as error:
                return step, str(error)
        return None

    (first, said), other = on_threads(2, run)
    assert (first, said) == other
    assert first < 24
    of = "" if streaming.waits else ", of fragment"  # which is tried again after each step
    assert f"3 synchronisations in a row were skipped{of}" in said


@pytest.mark.parametrize("streaming", [Streaming(1, 1), Streaming(2, 1), Streaming(2, 3)], ids=str)
def test_a_state_that_one_rank_alone_has_loaded_starts_the_count_of_skips_anew_on_all(streaming):
    """While nothing is in flight. They raise at the same step, where they tell each other what is not finite."""

    def run(backend):
        model, loads = Toy(), 0
        settings = {"lr": 1e-2, "period": 8, "streaming": streaming, "guard": Guard(max_skipped=5)}
        optimizer = DiLoCo(model.parameters(), backend=backend, **settings)
        for step in range(80):
            if step >= 24 and not loads and not optimizer.comm_stats()["in_flight"]:
                assert optimizer.skipped_rounds >= 2
                loads = step
                if backend.rank == 1:
                    optimizer.load_state_dict(optimizer.state_dict())
            backward(model, step, backend.rank, 2)
            if backend.rank == 0 and step >= 8:
                model.weight.data.fill_(math.nan)
            try:
                optimizer.step()
            except NotFinite as error:
                return step - loads, str(error)
        return None

    one, other = on_threads(2, run)
    assert one == other
    assert one[0] >= 4 * (8 // streaming.fragments)
    assert "5 synchronisations in a row were skipped" in one[1]
    assert "not finite are, on rank 0: " in one[1]


def test_a_rank_that_stays_nan_ends_the_run_everywhere():
    def run(backend):
        model = Toy()
        guard = Guard(max_skipped=2)
        settings = {"lr": 1e-2, "period": 4, "streaming": Streaming(2, 1), "guard": guard}
        optimizer = DiLoCo(model.parameters(), backend=backend, **settings)
        train(model, optimizer, range(2), backend.rank, 2)
        if backend.rank == 1:
            for p in model.parameters():
                p.data.fill_(math.nan)
        model.zero_grad()
        for _ in range(2, 6):
            optimizer.step()
        with pytest.raises(NotFinite, match="2 synchronisations in a row were skipped: "):
            optimizer.step()

    on_threads(2, run)


def test_nobody_waits_for_digests_before_the_next_merge(monkeypatch):
    """Sent at the merge of the last fragment, after steps 5, 9, 13; looked at in that of the first, or at the end."""
    looked: list[int] = []
    table = Comparison.table
    monkeypatch.setattr(Comparison, "table", lambda self: looked.append(step.get()) or table(self))
    step: ContextVar[int] = ContextVar("step")

    def run(backend):
        model = Toy()
        settings = {"lr": 1e-2, "period": 4, "streaming": Streaming(2, 1), "guard": Guard(check_every=1)}
        optimizer = DiLoCo(model.parameters(), backend=backend, **settings)
        for number in range(1, 14):
            step.set(number)
            train(model, optimizer, [number - 1], backend.rank, 2)
        step.set(14)
        optimizer.synchronize()  # of step 13; and its own

    on_threads(2, run)
    assert sorted(looked) == [7, 7, 11, 11, 14, 14, 14, 14]


def with_a_flipped_bit(backend):
    """A model and its optimizer after step 10; rank 1's anchor has differed since step 8, and digests that show it were
    sent with the merge of step 9."""
    model = Toy()
    settings = {"lr": 1e-2, "period": 4, "streaming": Streaming(2, 1), "guard": Guard(check_every=1)}
    optimizer = DiLoCo(model.parameters(), backend=backend, **settings)
    train(model, optimizer, range(8), backend.rank, 2)
    if backend.rank == 1:
        optimizer.buckets[0]["anchor"][0] += 1e-6
    train(model, optimizer, range(8, 10), backend.rank, 2)
    return model, optimizer


@pytest.mark.parametrize("end", ["merge", "synchronize"])
def test_a_flipped_bit_of_an_anchor_is_noticed(end):
    """Where the digests are looked at: in the merge of step 11, or at the end."""

    def run(backend):
        model, optimizer = with_a_flipped_bit(backend)
        before = params_of(model)
        ways = {"merge": partial(train, model, optimizer, range(10, 11), backend.rank, 2)}
        with pytest.raises(ReplicasDiffer, match=r"synchronisation 2, fragment 2 of 2.*anchor of bucket 0"):
            ways.get(end, optimizer.synchronize)()
        if end == "synchronize":
            assert same_bits(before, params_of(model))

    on_threads(2, run)


def test_what_differs_is_named_before_a_group_is_added():
    """Digests that are under way are those of the buckets that there were."""

    def run(backend):
        _, optimizer = with_a_flipped_bit(backend)
        with pytest.raises(ReplicasDiffer, match="anchor of bucket 0"):
            optimizer.add_param_group({"params": some_params([(3, 2)])})
        assert len(optimizer.param_groups) == 1

    on_threads(2, run)


def test_a_replica_that_differs_gets_the_anchors_of_the_others():
    def run(backend):
        model = Toy()
        guard = Guard(check_every=1, on_difference="repair")
        settings = {"lr": 1e-2, "period": 4, "streaming": Streaming(2, 1), "guard": guard}
        optimizer = DiLoCo(model.parameters(), backend=backend, **settings)
        train(model, optimizer, range(8), backend.rank, 3)
        if backend.rank == 1:
            optimizer.buckets[0]["anchor"][0] += 1e-6
            optimizer.buckets[1]["outer_momentum"][3] += 1.0
        train(model, optimizer, range(8, 11), backend.rank, 3)
        return [bucket[name].clone() for bucket in optimizer.buckets for name in ("anchor", "outer_momentum")]

    first, *others = on_threads(3, run)
    for other in others:
        assert same_bits(first, other)


@EVERY_LATE
def test_models_changed_before_the_first_fragment_are_where_it_begins(streaming, caplog):
    def run(backend):
        early, late = Toy(seed=5), Toy()
        settings = {"lr": 1e-2, "period": 6, "streaming": streaming, "backend": backend}
        reference, optimizer = DiLoCo(early.parameters(), **settings), DiLoCo(late.parameters(), **settings)
        late.load_state_dict(Toy(seed=5).state_dict())
        for model, mine in ((early, reference), (late, optimizer)):
            train(model, mine, range(8), backend.rank, 2)
            mine.synchronize()
        assert same_bits(params_of(early), params_of(late))
        if backend.rank == 1:
            late.weight.data += 0.5
        train(late, optimizer, range(8, 12), backend.rank, 2)
        optimizer.synchronize()
        return params_of(late)

    a, b = on_threads(2, run)
    assert same_bits(a, b)
    assert caplog.text.count("parameters were changed between two rounds") == 1


def test_a_fragment_that_is_due_before_it_has_come_back_is_merged_first():
    """The period was made shorter while it was in flight."""

    def run(backend):
        model = Toy()
        optimizer = DiLoCo(model.parameters(), lr=1e-2, period=16, streaming=Streaming(4, 7), backend=backend)
        train(model, optimizer, range(8), backend.rank, 2)
        optimizer.param_groups[0]["period"] = 8
        train(model, optimizer, range(8, 13), backend.rank, 2)  # the second fragment was sent after 8, and is after 13
        assert optimizer.param_groups[0]["sent_steps"][1] == 5
        assert optimizer.param_groups[0]["fragment_rounds"][1] == 1
        optimizer.synchronize()
        return params_of(model)

    assert same_bits(*on_threads(2, run))


def test_a_state_in_the_middle_of_another_stream_is_refused():
    model = Toy()
    optimizer = DiLoCo(model.parameters(), lr=1e-2, period=6, streaming=Streaming(3, 2))
    train(model, optimizer, range(3))
    state = optimizer.state_dict()
    for streaming in (None, Streaming(2, 2), Streaming(3, merge="eager")):
        other = DiLoCo(Toy().parameters(), lr=1e-2, period=6, streaming=streaming)
        with pytest.raises(
            ValueError, match=r"was streamed in 3 fragments, .*: call synchronize\(\) before it is saved"
        ):
            other.load_state_dict(state)
    one = DiLoCo(model.parameters(), lr=1e-2, period=6, streaming=Streaming(1, 2))
    train(model, one, range(6))
    assert one.param_groups[0]["fragment_steps"] == (0,)  # no step was taken since, but all is in flight
    with pytest.raises(ValueError, match="was streamed in 1 fragments"):
        DiLoCo(Toy().parameters(), lr=1e-2, period=6).load_state_dict(one.state_dict())
    plain = DiLoCo(model.parameters(), lr=1e-2, period=6)
    train(model, plain, range(10))
    optimizer.load_state_dict(plain.state_dict())  # of rounds: all fragments are as far
    assert optimizer.param_groups[0]["fragment_steps"] == (4, 4, 4)
    assert optimizer.param_groups[0]["fragment_rounds"] == (1, 1, 1)
    train(model, optimizer, range(4, 8))
    plain.load_state_dict(DiLoCo(Toy().parameters(), lr=1e-2, period=6, streaming=Streaming(3, 2)).state_dict())
    assert "fragment" not in plain.param_groups[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"streaming": 4}, r"streaming must be None or a commopt.Streaming .*, got 4"),
        ({"streaming": Streaming(7), "period": 6}, "period must be at least the number of fragments, 7, got 6"),
        ({"streaming": Streaming(2, 6), "period": 6}, "delay must be less than the period, 6, got 6"),
        ({"streaming": Streaming(20), "period": 50}, "there are 8 trainable parameters; allowed are at most as many"),
        ({"streaming": Streaming(2), "state_period": {"exp_avg": 3}}, "states are not streamed, so it must be None"),
    ],
)
def test_bad_streams_are_refused_on_every_rank(settings, message):
    def run(backend):
        mine = settings if backend.rank else {"period": settings.get("period", 6)}
        with pytest.raises(ValueError, match=message if backend.rank else "rank 1 refused its arguments"):
            DiLoCo(Toy().parameters(), lr=1e-2, backend=backend, **mine)

    on_threads(2, run)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fragments": 0}, "fragments must be an int >= 1, got 0"),
        ({"delay": -1}, "delay must be an int >= 0, got -1"),
        ({"delay": 1, "merge": "eager"}, "delay must be None with merge='eager'"),
        ({"merge": "later"}, "merge must be 'mix', 'corrected' or 'eager', got 'later'"),
        ({"alpha": 0.5}, "alpha=0.5 is of merge='mix'"),
        ({"alpha": 1.5, "merge": "mix"}, r"alpha must be a number in \[0, 1\], got 1.5"),
        ({"alpha": 0.5, "merge": "mix", "delay": 0}, "alpha must be 0 with delay=0"),
    ],
)
def test_bad_arguments_of_a_stream_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Streaming(**arguments)


def test_streams_that_differ_between_ranks_are_refused():
    def run(backend):
        with pytest.raises(ValueError, match="settings or kernel providers differ between ranks"):
            DiLoCo(Toy().parameters(), period=6, streaming=Streaming(2 + backend.rank), backend=backend)

    on_threads(2, run)


@EVERY_LATE
@pytest.mark.parametrize("compressor", [None, Sign(16)])
def test_a_group_that_is_added_while_fragments_are_in_flight_joins_them(streaming, compressor):
    def run(backend):
        first, added = (some_params([(3, 7), (5,), (4,)]) for _ in range(2))
        optimizer = LocalSGD(first, lr=1e-2, period=6, streaming=streaming, backend=backend, compressor=compressor)
        for step in range(18):
            if step == 8:
                optimizer.add_param_group({"params": added})
            for i, p in enumerate([*first, *added]):
                p.grad = torch.full_like(p, (1.0 + backend.rank) * (1 + i))
            optimizer.step()
        optimizer.synchronize()
        return [p.detach() for p in (*first, *added)]

    ranks = on_threads(2, run)
    begun = some_params([(3, 7)])[0].detach()
    for params in ranks:
        assert same_bits(params, ranks[0])
        assert float((params[3] - begun).abs().min()) > 0.01  # it was trained


@EVERY_LATE
def test_what_is_unfrozen_in_flight_takes_part_from_the_next_time_its_fragment_is_sent(streaming):
    """Its anchor moves as those of the others."""

    def run(backend):
        model = Toy(torch.float64)
        model.weight.requires_grad_(False)
        optimizer = LocalSGD(model.parameters(), lr=1e-2, period=6, streaming=streaming, backend=backend)
        train(model, optimizer, range(9), backend.rank, 2)
        assert optimizer.comm_stats()["in_flight"]
        model.weight.requires_grad_(True)
        begun = model.weight.detach().clone()
        train(model, optimizer, range(9, 24), backend.rank, 2)
        anchor = optimizer.state[model.weight]["anchor"]
        assert not torch.equal(anchor, begun)
        return anchor

    a, b = on_threads(2, run)
    assert streaming.is_eager or torch.equal(a, b)  # else with each rank's own share


@pytest.mark.parametrize("streaming", LATE[:2], ids=["corrected", "mix"])
def test_an_outer_momentum_does_not_move_what_was_frozen_when_its_fragment_was_sent(streaming):
    def run(backend):
        model = Toy(torch.float64)
        optimizer = DiLoCo(model.parameters(), lr=1e-2, period=6, streaming=streaming, backend=backend)
        train(model, optimizer, range(14), backend.rank, 2)
        optimizer.synchronize()
        state, kept = optimizer.state[model.weight], [model.weight.detach().clone()]
        kept.append(state["outer_momentum"].clone())
        model.weight.requires_grad_(False)
        train(model, optimizer, range(14, 30), backend.rank, 2)
        assert bool(kept[1].any())
        assert same_bits(kept, [model.weight.detach(), state["outer_momentum"]])

    on_threads(2, run)


def test_rounds_that_are_skipped_are_counted_one_by_one_where_several_are_in_flight():
    def run(backend):
        model = Toy()
        settings = {"lr": 1e-2, "period": 4, "streaming": Streaming(4, 3), "guard": Guard(max_skipped=5)}
        optimizer = DiLoCo(model.parameters(), backend=backend, **settings)
        train(model, optimizer, range(4), backend.rank, 2)
        assert len(optimizer.comm_stats()["in_flight"]) > 1
        told = None
        while told is None and optimizer.skipped_rounds < 20:
            for p in model.parameters():
                p.data.fill_(math.nan if backend.rank else 1.0)
            model.zero_grad()
            try:
                optimizer.step()
            except NotFinite as error:
                told = str(error)
        assert "5 synchronisations in a row were skipped: " in told
        return optimizer.skipped_rounds

    assert on_threads(2, run) == [5, 5]


def test_a_group_that_joins_a_cycle_has_a_learning_rate_for_each_step_of_it():
    """As if it had been there: a sign step is in units of their sum."""

    def run(backend):
        params = some_params([(3, 7), (5,), (4,)])
        settings = {"lr": 1e-2, "period": 6, "streaming": Streaming(2, 1)}
        optimizer = SignMomentum(params, backend=backend, **settings)
        for _ in range(4):
            for p in params:
                p.grad = torch.ones_like(p)
            optimizer.step()
        optimizer.add_param_group({"params": some_params([(6,)]), "lr": 3e-2})
        first, new = optimizer.param_groups
        assert any(new["fragment_steps"])
        assert new["fragment_lr"] == pytest.approx([3 * lr for lr in first["fragment_lr"]])

    on_threads(2, run)
