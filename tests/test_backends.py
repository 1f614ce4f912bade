"""Conformance of backends: one list of checks, every backend. A new backend adds one row."""

from __future__ import annotations

import math
import threading
import time
import weakref
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conformance import LONG, conformance, exchanges
from worlds import needs_mpi, on_mpi, on_processes, on_threads, same_bits

from commopt.comm import (
    Backend,
    CollectiveError,
    CountingBackend,
    LocalBackend,
    MessageDamaged,
    MPIBackend,
    ThreadBackend,
    Topology,
    TorchBackend,
    all_reduce_bytes,
    check_exchanges,
    compressed_all_reduce,
    confirm,
    open_channels,
    open_control,
    run,
    wait,
)
from commopt.comm.pipeline import Pipeline
from commopt.comm.psync import psync
from commopt.comm.torch import group_of_ranks, same_on_all, second_group, timeout_of
from commopt.compress import Feedback, Identity, RandomBlocks, Sign


def apart(backend: Backend) -> None:
    """What a backend's control channel must do: it conforms, and its order is its own."""
    topology = Topology(backend)
    control = topology.control()
    conformance(control)
    assert topology.traffic.total.calls["all_gather"] == 2
    x, y = torch.full((5,), float(backend.rank)), torch.full((3,), 2.0 * backend.rank)
    starts = [lambda: backend.all_reduce(x), lambda: control.all_reduce(y)]
    for work in [start() for start in (starts if backend.rank % 2 else reversed(starts))]:
        work.wait()
    assert torch.allclose(x, torch.full((5,), (backend.world_size - 1) / 2))
    assert torch.allclose(y, torch.full((3,), backend.world_size - 1.0))


def in_process(rank: int, world_size: int) -> None:
    conformance(TorchBackend())
    conformance(CountingBackend(TorchBackend()))
    apart(TorchBackend())
    holds_nothing_when_it_is_done(TorchBackend())


def holds_nothing_when_it_is_done(backend: TorchBackend) -> None:
    """Of rows that went in pieces the copies are freed, though a work and its channel are still there."""
    made, row = [], torch.zeros(LONG, device="cpu")
    empty_like = torch.empty_like

    def noted(x: torch.Tensor) -> torch.Tensor:
        made.append(weakref.ref(out := empty_like(x)))
        return out

    whole = torch.empty(backend.world_size, LONG)
    with mock.patch.object(torch, "empty_like", noted):
        work = backend.all_gather(whole, row)
    assert len(made) > 1
    assert all(ref() is not None for ref in made)
    work.wait()
    work.wait()
    assert work.is_completed()
    deadline = time.monotonic() + 10  # Gloo's own thread lets go a little later
    while any(ref() is not None for ref in made):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_one_rank():
    conformance(LocalBackend())


def test_a_group_of_some_ranks_waits_as_long_as_that_of_all():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=7))
    try:
        assert timeout_of(group_of_ranks([0])) == timedelta(seconds=7)
    finally:
        dist.destroy_process_group()


def test_a_group_is_of_its_ranks_alone_where_the_default_one_is_bound_to_a_device(monkeypatch):
    """torch splits the communicator of a bound group, for which it needs all of its ranks."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    default, bound, made = dist.group.WORLD, [], dist.new_group
    try:
        default.bound_device_id = torch.device("cpu", 0)

        def new_group(*args, **settings):
            bound.append(default.bound_device_id)
            return made(*args, **settings)

        monkeypatch.setattr(dist, "new_group", new_group)
        group_of_ranks([0])
        second_group(default)
        assert bound == [None, None]
        assert default.bound_device_id == torch.device("cpu", 0)
    finally:
        dist.destroy_process_group()


def other_numbers_of_groups(rank: int, world_size: int) -> None:
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    with pytest.raises(ValueError, match=r"rank \d has a list of \d process groups \(new_group\(\) is for all ranks"):
        group_of_ranks([0, 1])


def test_ranks_that_have_made_other_numbers_of_groups_say_so():
    """torch names a group by that number, so that they would wait for each other until the timeout."""
    on_processes(2, other_numbers_of_groups)


def test_ranks_that_agree_find_each_other_though_some_have_agreed_on_something_before(monkeypatch):
    store, here = dist.HashStore(), threading.local()
    store.set_timeout(timedelta(seconds=2))
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(dist, "get_rank", lambda: here.rank)

    def agree(backend):
        here.rank = backend.rank
        if here.rank < 2:
            same_on_all([0, 1], "mesh of two")
        same_on_all([0, 1, 2], "mesh of three")
        with pytest.raises(ValueError, match=r"rank \d has a mesh \d, rank \d a mesh \d"):
            same_on_all([2, 0, 1], f"mesh {here.rank}")

    on_threads(3, agree)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_threads(world_size):
    on_threads(world_size, conformance)
    on_threads(world_size, lambda backend: conformance(CountingBackend(backend)))
    on_threads(world_size, apart)


def test_the_control_channel_of_nodes_is_of_everyone_and_one_rank_is_its_own():
    on_threads(4, lambda backend: apart(backend.nodes(2)))
    alone = LocalBackend()
    assert open_control(alone) is alone
    topology = Topology(alone)
    assert topology.control() is topology.world


def test_gloo_with_three_processes():
    on_processes(3, in_process)


def on_communicators() -> None:
    """All of MPI's ranks, lines of them, and a part of them in another order."""
    from mpi4py import MPI

    conformance(MPIBackend())
    conformance(CountingBackend(MPIBackend()))
    apart(MPIBackend())
    for line in open_channels(MPIBackend(), 2):
        conformance(line)
    world = MPI.COMM_WORLD
    beside(MPIBackend(), world)
    part = world.Split(color=0 if world.rank else MPI.UNDEFINED, key=-world.rank)
    if world.rank:
        backend = MPIBackend(part)
        assert (backend.rank, backend.world_size) == (world.size - 1 - world.rank, world.size - 1)
        conformance(backend)
    else:
        with pytest.raises(ValueError, match="rank 0 of COMM_WORLD is not a member"):
            MPIBackend(part)


def beside(backend: MPIBackend, world: Any) -> None:
    """Messages of the program's own, under way on the same communicator, are no exchange's."""
    peer = backend.rank ^ 1 if backend.rank ^ 1 < backend.world_size else backend.rank
    own = world.isend({"rank": backend.rank}, peer, tag=7)
    out = torch.zeros(3)
    wait(backend.exchange(out, torch.full((3,), float(backend.rank)), peer, peer), "exchange")
    assert out.tolist() == [float(peer)] * 3
    assert world.recv(source=peer, tag=7) == {"rank": peer}
    own.wait()


@pytest.mark.long(but="2")
@needs_mpi
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_mpi(world_size):
    on_mpi(world_size, on_communicators)


def test_threads_notice_ranks_that_call_different_collectives():
    def diverge(backend):
        if backend.rank == 0:
            backend.all_reduce(torch.zeros(1)).wait()
        else:
            backend.broadcast(torch.zeros(1)).wait()

    with pytest.raises(RuntimeError, match="different collectives"):
        on_threads(2, diverge)


def test_an_exchange_needs_its_two_ranks_alone_and_names_who_is_missing():
    """Threads: rank 2 never comes; 0 and 1 swap, and 3 waits for it."""

    def run(backend):
        peer = backend.rank ^ 1
        if backend.rank == 2:
            return "away"
        out = torch.zeros(1)
        work = backend.exchange(out, torch.full((1,), float(backend.rank)), peer, peer)
        if backend.rank < 2:
            wait(work, "swap")
            return out.item()
        with pytest.raises(CollectiveError, match=r"^swap: rank 2 did not join within 0.5 s: "):
            wait(work, "swap")
        return "told"

    assert on_threads(4, run, timeout=0.5) == [1.0, 0.0, "away", "told"]


def test_an_exchange_with_a_rank_that_sends_elsewhere_is_noticed():
    def run(backend):
        dst, src = [(1, 2), (2, 0), (1, 1)][backend.rank]  # rank 2 sends to 1, and 0 expects it
        backend.exchange(torch.zeros(1), torch.zeros(1), dst, src).wait()

    with pytest.raises(RuntimeError, match=r"exchange: rank 0 expects a message of rank 2, which sends to 1"):
        on_threads(3, run)


def test_a_damaged_exchange_is_told_with_its_two_ranks():
    class Damaging(ThreadBackend):
        def exchange(self, out, inp, dst, src):
            work = super().exchange(out, inp, dst, src)
            work.wait()
            if self.rank == 2:
                out[1] += 1
            return work

    def run(backend):
        counting = CountingBackend(Damaging(backend.world, backend.rank))
        counting.exchange(torch.zeros(3), torch.ones(3), (backend.rank + 1) % 3, (backend.rank - 1) % 3).wait()
        with pytest.raises(MessageDamaged, match=r"exchange: what rank 2 received from rank 1 is not what was sent"):
            confirm(counting, True, "a swap")

    on_threads(3, run)


def test_nodes_exchange_among_all_ranks_and_backends_that_cannot_say_so():
    on_threads(4, lambda backend: exchanges(backend.nodes(2)))

    class Four(LocalBackend):
        exchange = None

    check_exchanges(LocalBackend(), "this")
    for backend in (Four(), CountingBackend(Four())):
        with pytest.raises(ValueError, match=r"needs a backend whose ranks can talk in pairs, and .*Four.* lacks"):
            backend.exchange(torch.zeros(1), torch.zeros(1), 0, 0) if type(backend) is CountingBackend else (
                check_exchanges(backend, "gossip")
            )


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_counted_bytes(world_size):
    def count(backend):
        counting = CountingBackend(backend)
        counting.all_reduce(torch.zeros(10)).wait()
        counting.all_to_all(torch.zeros(world_size, 7), torch.zeros(world_size, 7)).wait()
        counting.traffic.end_step()
        counting.all_gather(torch.zeros(world_size, 3), torch.zeros(3)).wait()
        counting.broadcast(torch.zeros(world_size)).wait()
        right, left = (backend.rank + 1) % world_size, (backend.rank - 1) % world_size
        counting.exchange(torch.zeros(5), torch.zeros(5), right, left).wait()
        counting.exchange(torch.zeros(5), torch.zeros(5), backend.rank, backend.rank).wait()  # to oneself
        first = counting.traffic.step.summary()
        counting.traffic.end_step()
        return first, counting.traffic.step.summary(), counting.traffic.total.summary()

    w = world_size
    for first, second, total in on_threads(world_size, count):
        assert first["by_collective"]["all_reduce"] == {"bytes": 2 * (w - 1) * -(-40 // w), "calls": 1}
        assert first["by_collective"]["all_to_all"] == {"bytes": (w - 1) * 28, "calls": 1}
        assert second["by_collective"] == {
            "all_gather": {"bytes": (w - 1) * 12, "calls": 1},
            "broadcast": {"bytes": (w - 1) * 4, "calls": 1},
            "exchange": {"bytes": 20 if w > 1 else 0, "calls": 2},
        }
        assert total["bytes"] == first["bytes"] + second["bytes"]
        assert total["calls"] == 6
    assert all_reduce_bytes(40, 4) == 2 * 3 * 10


# the compressed all-reduce -------------------------------------------------------------------------------------------


def inputs(world: int, rank: int, step: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("compressor", [Sign(block=16), Sign(block=None, norm="l1"), Identity()], ids=repr)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_what_comes_out_plus_the_residuals_is_what_went_in(world_size, compressor, dtype, tolerance):
    """Sum over steps of mean x = sum over steps of the result + mean worker error + server error; same bits
    everywhere."""
    n, steps = 64 * world_size, 25

    def reduce(backend):
        feedback = Feedback.zeros(n, world_size, dtype, torch.device("cpu"))
        results = []
        for step in range(steps):
            x = inputs(world_size, backend.rank, step, n, dtype)
            run([compressed_all_reduce(x, feedback, compressor, backend)])
            results.append(x)
        return results, feedback

    ranks = on_threads(world_size, reduce)
    for results, _ in ranks[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results, ranks[0][0]))
    given = sum(inputs(world_size, r, s, n, dtype) for r in range(world_size) for s in range(steps)) / world_size
    residuals = sum(f.worker for _, f in ranks) / world_size + torch.cat([f.server for _, f in ranks])
    torch.testing.assert_close(sum(ranks[0][0]) + residuals, given, rtol=tolerance, atol=tolerance * steps)
    if isinstance(compressor, Identity):
        assert not residuals.any()
    else:
        assert residuals.any()
        row = ranks[0][0][-1][: n // world_size]
        if compressor.block is None:
            assert row.abs().unique().numel() == 1, "a row has one scale"


def in_turn(tasks):
    pipeline = Pipeline()
    for task in tasks:
        pipeline.start(task)
    pipeline.finish()


@pytest.mark.parametrize("world_size", [2, 3])
def test_one_after_another_and_interleaved_give_the_same_bits(world_size):
    n = 64 * world_size

    def reduce(backend, schedule):
        feedback = [Feedback.zeros(n, world_size, torch.float32, torch.device("cpu")) for _ in range(4)]
        xs = [inputs(world_size, backend.rank, i, n, torch.float32) for i in range(4)]
        for _ in range(3):
            schedule(compressed_all_reduce(x, f, Sign(block=32), backend) for x, f in zip(xs, feedback))
        return xs

    one = on_threads(world_size, lambda b: reduce(b, run))
    turn = on_threads(world_size, lambda b: reduce(b, in_turn))
    assert all(torch.equal(a, b) for x, y in zip(one, turn) for a, b in zip(x, y))


def test_interleaved_starts_every_task_before_it_waits_for_the_first():
    events = []

    class Noted:
        def __init__(self, name):
            self.name = name

        def wait(self):
            events.append(f"wait {self.name}")

    def task(name, waits):
        for i in range(waits):
            events.append(f"start {name}{i}")
            yield Noted(f"{name}{i}")
        events.append(f"end {name}")

    in_turn([task("a", 2), task("b", 0), task("c", 1)])
    assert events == [
        "start a0", "end b", "start c0", "wait a0", "start a1", "wait c0", "end c", "wait a1", "end a",
    ]  # fmt: skip


class Sent:
    """A collective that is done when it is told, or as soon as it is waited for; ``events`` says when it was."""

    def __init__(self, name, events, done=True, error=None):
        self.name, self.events, self.done, self.error = name, events, done, error

    def is_completed(self):
        return self.done

    def wait(self):
        self.events.append(f"wait {self.name}")
        self.done = True
        if self.error is not None:
            raise self.error


def steps_of(name, works, events):
    """A task that yields ``works``."""
    try:
        for i, work in enumerate(works):
            events.append(f"{name}{i}")
            yield work
        events.append(f"end {name}")
    finally:
        events.append(f"close {name}")


def without_ends(events):
    """``events`` but for the closing of tasks, which is when memory is freed."""
    return [event for event in events if event[:5] != "close"]


def test_early_tasks_go_on_one_after_another_as_far_as_what_they_wait_for_is_done_and_no_further_than_the_barrier():
    events = []
    barrier, late = Sent("barrier", events), Sent("late", events, done=False)
    pipeline = Pipeline(barrier)
    pipeline.start(steps_of("a", [Sent("x", events), Sent("y", events), late, barrier], events), early=True)
    pipeline.start(steps_of("b", [Sent("z", events), barrier], events), early=True)
    pipeline.start(steps_of("c", [Sent("u", events, done=False)], events))
    pipeline.start(steps_of("d", [Sent("v", events)], events))
    assert events == ["a0", "b0", "c0", "d0"]
    events.clear()
    assert pipeline.progress()
    assert events == ["wait x", "a1", "wait y", "a2"]  # b has its turn when a has come to the barrier
    assert not pipeline.progress()
    late.done = True
    events.clear()
    assert pipeline.progress()
    assert events == ["wait late", "a3", "wait z", "b1"]
    assert not pipeline.progress()
    events.clear()
    pipeline.finish()
    assert without_ends(events) == [
        "wait u", "end c", "wait v", "end d", "wait barrier", "end a", "wait barrier", "end b",
    ]  # fmt: skip


def test_while_early_tasks_wait_those_others_go_on_whose_time_has_come():
    events = []
    late = Sent("late", events, done=False)

    def release():
        yield Sent("v", events)
        events.append("released")
        late.done = True

    pipeline = Pipeline()
    pipeline.start(steps_of("a", [late], events), early=True)
    pipeline.start(steps_of("c", [Sent("u", events, done=False)], events))
    pipeline.start(release())
    pipeline.finish()
    assert without_ends(events) == [
        "a0", "c0", "wait v", "released", "wait late", "end a", "wait u", "end c",
    ]  # fmt: skip


def test_what_all_tasks_wait_for_in_the_end_is_waited_for_once_and_they_go_on_in_the_order_of_their_start():
    events = []
    last = Sent("last", events)
    pipeline = Pipeline(last=last)
    pipeline.start(steps_of("a", [Sent("x", events), Sent("y", events), last, Sent("z", events)], events))
    pipeline.start(steps_of("b", [last], events))
    pipeline.finish()
    assert without_ends(events) == [
        "a0", "b0", "wait x", "a1", "wait y", "a2", "wait last", "a3", "end b", "wait z", "end a",
    ]  # fmt: skip


def test_a_pipeline_that_is_stopped_closes_its_tasks_at_the_barrier():
    events = []
    barrier = Sent("barrier", events)
    pipeline = Pipeline(barrier)
    tasks = [steps_of(name, [Sent(f"of {name}", events), barrier], events) for name in "ab"]
    for task, early in zip(tasks, (True, False)):
        pipeline.start(task, early=early)
    events.clear()
    pipeline.stop()
    assert events == ["wait of a", "a1", "wait of b", "b1", "close a", "close b"]
    pipeline.finish()


def test_a_pipeline_that_is_abandoned_goes_on_with_none_of_its_tasks():
    events = []
    last = Sent("last", events)
    pipeline = Pipeline(last=last)
    tasks = [
        steps_of(name, works, events) for name, works in zip("abc", ([Sent("x", events)], [Sent("y", events)], [last]))
    ]
    for task, early in zip(tasks, (True, False, False)):
        pipeline.start(task, early=early)
    events.clear()
    pipeline.abandon()
    pipeline.finish()
    assert events == []


def test_errors_of_the_barrier_and_of_the_last_are_passed_on_and_others_say_where():
    for which in ("barrier", "last", "other"):
        events = []
        works = {name: Sent(name, events) for name in ("barrier", "last", "other")}
        works[which].error = RuntimeError("lost")
        pipeline = Pipeline(works["barrier"], works["last"])
        pipeline.start(steps_of("a", [works["other"], works["barrier"], works["last"]], events), "the third bucket")
        with pytest.raises(RuntimeError) as caught:
            pipeline.finish()
        assert str(caught.value) == ("the third bucket: lost" if which == "other" else "lost")
        assert isinstance(caught.value, CollectiveError) == (which == "other")


def test_dead_elements_come_out_as_zero_and_owe_nothing():
    n = 128

    def reduce(backend):
        feedback = Feedback.zeros(n, 2, torch.float32, torch.device("cpu"))
        active = torch.full((n // 8,), 0x0F, dtype=torch.uint8)
        for step in range(5):
            x = inputs(2, backend.rank, step, n, torch.float32)
            run([compressed_all_reduce(x, feedback, Sign(block=32), backend, active)])
        return x, feedback

    dead = torch.arange(n) % 8 >= 4
    for x, feedback in on_threads(2, reduce):
        assert not x[dead].any()
        assert not feedback.worker[dead].any()
        assert not feedback.server[dead[: n // 2]].any()
        assert x[~dead].all()


@pytest.mark.parametrize("how", [RandomBlocks(1), Sign(16)])
def test_a_part_that_is_not_finite_on_one_rank_is_sound_on_none(how):
    def averaged(x, backend):
        sync = psync(x, how.choose(64, 0, 0) if isinstance(how, RandomBlocks) else how, backend)
        for work in sync.works:
            wait(work, "psync")
        return bool(sync.is_sound())

    def reduce(backend):
        x = torch.ones(64)
        sound = averaged(x.clone(), backend)
        x[5] = math.inf if backend.rank == 1 else 1.0
        return sound, averaged(x, backend)

    assert on_threads(3, reduce) == [(True, False)] * 3


class Careful(Identity):
    """Relies on what is allowed: what is compressed lies in other memory than what is written."""

    def compress_with_feedback(self, x, error, payload, active=None, new_error=None):
        rest = error if new_error is None else new_error.copy_(error)
        rest.add_(x)
        super().compress_with_feedback(torch.zeros_like(rest), rest, payload, active)


def test_a_compressor_of_ones_own_is_given_other_memory_for_what_it_writes():
    active = torch.full((8,), 0xFF, dtype=torch.uint8)
    sync = psync(torch.arange(64.0), Careful(), LocalBackend(), active)
    assert torch.equal(sync.mean(), torch.arange(64.0))


def test_where_no_blocks_are_kept_nothing_is_sent():
    v = torch.arange(64.0)
    sync = psync(v.clone(), RandomBlocks(math.inf).choose(64, 0, 0), LocalBackend())
    assert sync.works == []
    assert torch.equal(sync.residual, v)
    assert not sync.mean().any()


def test_residuals_that_are_double_buffered_are_those_that_are_not():
    def reduce(backend):
        kept = [Feedback.zeros(128, 2, torch.float32, torch.device("cpu"), twice) for twice in (False, True)]
        draw = torch.Generator().manual_seed(backend.rank)
        for _ in range(4):
            x = torch.randn(128, generator=draw)
            ways = [x.clone(), x.clone()]
            for way, feedback in zip(ways, kept):
                run([compressed_all_reduce(way, feedback, Sign(block=32), backend)])
            assert same_bits(ways[:1], ways[1:])
            assert same_bits([kept[0].worker, kept[0].server], [kept[1].worker, kept[1].server])
        assert kept[0].worker.any()

    on_threads(2, reduce)
