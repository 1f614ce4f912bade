"""Outer optimizers over Gloo: the same bits as on threads, under DDP, and when a rank has gone."""

from __future__ import annotations

import gc
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from worlds import Toy, backward, on_processes, on_threads, params_of, same_bits, tokens, train

from commopt import DiLoCo, LocalSGD, OneBitAdam, SignMomentum, Streaming, attach
from commopt.comm import CollectiveError
from commopt.compress import Int4, Sign


def trained(backend, rank, world_size):
    model = Toy()
    optimizer = SignMomentum(model.parameters(), lr=1e-2, period=3, compressor=Sign(block=64), backend=backend)
    train(model, optimizer, range(7), rank, world_size)
    return params_of(model)


def under_ddp(rank, world_size):
    """DDP, attached, averages nothing: parameters and local bytes are those of the bare module."""
    bare, inner = Toy(), Toy()
    for m in (bare, inner):
        m.unused.requires_grad_(False)
        m.empty.requires_grad_(False)
    ddp = DistributedDataParallel(inner)
    plain = DiLoCo(bare.parameters(), lr=1e-2, period=3)
    optimizer = DiLoCo(inner.parameters(), lr=1e-2, period=3)
    attach(ddp, optimizer)
    for step in range(7):
        train(bare, plain, range(step, step + 1), rank, world_size)
        ddp.zero_grad()
        ddp(tokens(step, rank, world_size)).backward()
        optimizer.step()
    assert same_bits(params_of(bare), params_of(inner))
    assert optimizer.comm_stats()["total"] == plain.comm_stats()["total"]
    return optimizer


def after_a_rank_has_gone(rank, world_size):
    """Rank 1 never comes to the synchronisation; rank 0 goes on alone from where it is."""
    group, alone = dist.new_group(timeout=timedelta(seconds=2)), dist.new_group([0])
    model = Toy()
    optimizer = DiLoCo(model.parameters(), lr=1e-2, period=3, process_group=group)
    train(model, optimizer, range(5), rank, world_size)
    message = ""
    if rank == 0:
        own = params_of(model)
        try:
            optimizer.synchronize()
        except CollectiveError as error:
            message = str(error)
        assert same_bits(own, params_of(model))
        other = Toy()
        second = DiLoCo(other.parameters(), lr=1e-2, period=3, process_group=alone)
        second.load_state_dict(optimizer.state_dict())
        assert same_bits(own, params_of(other))
        train(other, second, range(5, 10), 0, 1)
        assert second.comm_stats()["rounds"] == 3
    dist.barrier()
    return message


def streamed(backend, rank, world_size):
    """Threads and processes come to the same bits, with 4 bits an element."""
    out = []
    for streaming in (Streaming(3, 2), Streaming(2, merge="eager")):
        model = Toy()
        settings = {"lr": 1e-2, "period": 6, "compressor": Int4(block=64), "streaming": streaming}
        optimizer = DiLoCo(model.parameters(), backend=backend, **settings)
        train(model, optimizer, range(15), rank, world_size)
        out += params_of(model)
    return out


def ahead_of_the_others(rank, world_size):
    """Rank 1 comes to its second round when rank 0 has sent that, taken further steps, and told so."""
    model, store = Toy(), dist.distributed_c10d._get_default_store()
    optimizer = DiLoCo(model.parameters(), lr=1e-2, period=6, streaming=Streaming(1, 3), compressor=Sign(block=64))
    train(model, optimizer, range(11), rank, world_size)
    if rank == 1:
        store.wait(["ahead"], timedelta(seconds=30))
    train(model, optimizer, range(11, 14), rank, world_size)
    if rank == 0:
        assert optimizer.comm_stats()["in_flight"] == [0]
        optimizer.state_dict()
        store.set("ahead", "")
    train(model, optimizer, range(14, 18), rank, world_size)
    optimizer.synchronize()


def after_a_rank_has_gone_in_flight(rank, world_size):
    """Rank 1 sends a fragment, and the next one never. Rank 0 merges the first, and not the other: it goes on alone."""
    group, alone = dist.new_group(timeout=timedelta(seconds=2)), dist.new_group([0])
    model = Toy()
    settings = {"lr": 1e-2, "period": 6, "streaming": Streaming(2, 2)}
    optimizer = DiLoCo(model.parameters(), process_group=group, **settings)
    train(model, optimizer, range(5), rank, world_size)
    message = ""
    if rank == 0:
        assert optimizer.comm_stats()["in_flight"] == []
        train(model, optimizer, range(5, 7), rank, world_size)  # the second one is sent, and not waited for
        backward(model, 7, rank, world_size)
        anchors = [bucket["anchor"].clone() for bucket in optimizer.buckets]
        try:
            optimizer.step()
        except CollectiveError as error:
            message = str(error)
        assert same_bits(anchors, [bucket["anchor"] for bucket in optimizer.buckets])
        other = Toy()
        second = DiLoCo(other.parameters(), process_group=alone, **settings)
        second.load_state_dict(optimizer.state_dict())
        assert same_bits(params_of(model), params_of(other))
        train(other, second, range(8, 9), 0, 1)
        assert second.param_groups[0]["fragment_rounds"] == (1, 1)
    dist.barrier()
    return message


def the_others_have_gone(rank, world_size):
    """Rank 1 takes its last step, and lets go of all, with fragment 2 in flight; rank 0 has heard of its end before it
    takes its own, and needs fragment 1 for that. It fails where fragment 2 is to be merged."""
    model, store = Toy(), dist.distributed_c10d._get_default_store()
    settings = {"lr": 1e-2, "period": 6, "compressor": Int4(block=64), "streaming": Streaming(2, merge="eager")}
    optimizer = DiLoCo(model.parameters(), **settings)
    train(model, optimizer, range(12), rank, world_size)
    flights = optimizer.flights
    if rank == 1:
        flights.progress = lambda: None  # its half of fragment 2 never comes
        train(model, optimizer, range(12, 15), rank, world_size)
        del optimizer, flights.progress, flights
        gc.collect()
        store.set("let go", "")
        return ""
    train(model, optimizer, range(12, 14), rank, world_size)
    deadline = time.monotonic() + 30
    while flights._failed is None and time.monotonic() < deadline:
        flights.progress()
    store.wait(["let go"], timedelta(seconds=30))
    train(model, optimizer, range(14, 15), rank, world_size)
    assert optimizer.param_groups[0]["fragment_rounds"] == (3, 2)
    try:
        train(model, optimizer, range(15, 18), rank, world_size)
    except CollectiveError as error:
        return str(error)
    return ""


def scenes(rank, world_size):
    under_ddp(rank, world_size)
    ours = LocalSGD(Toy().parameters(), OneBitAdam, lr=1e-2)  # the base does not take the default group
    assert (ours.topology.world_size, ours.base.topology.world_size) == (world_size, 1)
    ahead_of_the_others(rank, world_size)
    gone = [
        scene(rank, world_size)
        for scene in (after_a_rank_has_gone, after_a_rank_has_gone_in_flight, the_others_have_gone)
    ]
    return trained(None, rank, world_size), *gone, streamed(None, rank, world_size)


def test_over_gloo():
    results = on_processes(2, scenes)
    threads = on_threads(2, lambda backend: trained(backend, backend.rank, 2))
    for (params, *_), expected in zip(results, threads):
        assert same_bits(params, expected)
    for (*_, params), expected in zip(results, on_threads(2, lambda backend: streamed(backend, backend.rank, 2))):
        assert same_bits(params, expected)
    assert results[0][3].startswith("DiLoCo, synchronisation 3, fragment 2 of 2, in flight, bucket "), results[0][3]
    told = results[0][2]
    assert told.startswith("DiLoCo, synchronisation 1, fragment 2 of 2, in flight, agreement of the ranks: "), told
    assert "nothing is lost: every rank still has its own parameters" in told
    assert results[0][1].startswith("synchronize(), whether all ranks can: ")
    assert "nothing is lost: every rank still has its own parameters" in results[0][1]
    assert not torch.equal(results[0][0][0], results[1][0][0])
