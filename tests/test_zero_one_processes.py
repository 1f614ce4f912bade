"""0/1 Adam over Gloo: attached to DDP, bare, one bucket after another and overlapped, all the same; on nodes too."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from listening import listening
from torch.nn.parallel import DistributedDataParallel
from worlds import Used, on_processes, params_of, same_bits, tensors_in, tokens
from zero_one import kind, make

import commopt
from commopt.compress import Int8


def scene(rank: int, world_size: int, ddp: bool, **settings: Any) -> dict[str, Any]:
    model = Used()
    model.empty.requires_grad_(False)  # DDP would wait for its gradient
    optimizer = make(model, None, bucket_mb=2e-4, **settings)
    wrapped: Any = model
    if ddp:
        wrapped = DistributedDataParallel(model)
        commopt.attach(wrapped, optimizer)
    met, calls = [], []
    for step in range(26):
        what, before = kind(optimizer), optimizer.topology.traffic.total.summary()["calls"]
        optimizer.zero_grad()
        wrapped(tokens(step, rank, world_size)).backward()
        optimizer.step()
        calls.append((what, optimizer.topology.traffic.total.summary()["calls"] - before))
        if what != "local":
            met.append(params_of(model) + [e["exp_avg"].clone() for e in optimizer.state.values()])
    wrapped.eval()
    for _ in range(2):
        wrapped(tokens(0, 0, 1))
    optimizer.synchronize()
    return {"met": met, "calls": calls, "state": tensors_in(optimizer.state_dict()), "end": params_of(model)}


class Way(NamedTuple):
    """How a run with a GradScaler is made."""

    ddp: bool
    unscale: bool
    stop: int = 0


def overflowing(rank: int, world_size: int, ddp: bool, unscale: bool, stop: int = 0) -> list[torch.Tensor]:
    """A GradScaler of each rank's own, and inf on rank 1 alone in a step that is compressed, and in a local one: the
    parameters after the round in which the run ends. Stopped and resumed after ``stop`` steps."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    state: dict[str, Any] = {}
    for steps in (range(stop), range(stop, 17)):
        model = Used()
        model.empty.requires_grad_(False)
        optimizer = make(model, None)
        wrapped: Any = DistributedDataParallel(model) if ddp else model
        if state:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        for step in steps:
            optimizer.zero_grad()
            loss = wrapped(tokens(step, rank, world_size))
            scaler.scale(loss * (torch.inf if step in (2, 11) and rank == 1 else 1.0)).backward()
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    assert not optimizer.replicas_differ
    return params_of(model)


def main(rank: int, world_size: int) -> dict[str, Any]:
    out: dict[str, Any] = {"bare": scene(rank, world_size, False)}
    with listening() as out["log"]:
        out["attached"] = scene(rank, world_size, True)
    out["overlapped"] = scene(rank, world_size, False, overlap=True)
    out["both"] = scene(rank, world_size, True, overlap=True)
    out["bare, by 8 bits"] = scene(rank, world_size, False, refresh_compressor=Int8(16))
    out["attached, by 8 bits"] = scene(rank, world_size, True, overlap=True, refresh_compressor=Int8(16))
    out["overflowed"] = {
        way: overflowing(rank, world_size, **way._asdict())
        for way in (Way(False, False), Way(True, False), Way(True, True), Way(True, False, stop=3), Way(True, True, 3))
    }
    return out


def test_over_gloo_all_ways_give_the_same_and_local_steps_are_silent():
    results = on_processes(2, main)
    for way in ("bare", "attached", "overlapped", "both", "bare, by 8 bits", "attached, by 8 bits"):
        a, b = (r[way] for r in results)
        assert len(a["met"]) > 10
        assert all(same_bits(x, y) for x, y in zip(a["met"], b["met"])), way
        assert same_bits(a["end"], b["end"])
        for what, calls in a["calls"]:
            assert (calls == 0) == (what == "local"), way
    for r in results:
        assert same_bits(r["bare"]["end"], r["overlapped"]["end"])
        assert same_bits(r["bare"]["state"], r["overlapped"]["state"])
        assert same_bits(r["attached"]["end"], r["both"]["end"])
        assert same_bits(r["bare, by 8 bits"]["end"], r["attached, by 8 bits"]["end"])  # DDP averages nothing
        for p, q in zip(r["bare"]["end"], r["attached"]["end"]):  # DDP's buckets sum in another order
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
    assert sum("evaluated between two rounds" in line for line in results[0]["log"]) == 1
    assert not any("evaluated" in line for line in results[1]["log"])
    for way in results[0]["overflowed"]:
        a, b = (r["overflowed"][way] for r in results)
        assert same_bits(a, b), way  # DDP has averaged no gradients of different scales
        assert same_bits(a, results[0]["overflowed"][Way(True, way.unscale)] if way.ddp else a), way
        for p, q in zip(a, results[0]["overflowed"][Way(False, False)]):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
