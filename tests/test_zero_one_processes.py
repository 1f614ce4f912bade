"""0/1 Adam over Gloo: attached to DDP, bare, one bucket after another and overlapped, all the same; on nodes too."""

from __future__ import annotations

from typing import Any

import torch
from listening import listening
from torch.nn.parallel import DistributedDataParallel
from worlds import Used, on_processes, params_of, same_bits, tensors_in, tokens
from zero_one import kind, make

import commopt


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


def main(rank: int, world_size: int) -> dict[str, Any]:
    out: dict[str, Any] = {"bare": scene(rank, world_size, False)}
    with listening() as out["log"]:
        out["attached"] = scene(rank, world_size, True)
    out["overlapped"] = scene(rank, world_size, False, overlap=True)
    out["both"] = scene(rank, world_size, True, overlap=True)
    return out


def test_over_gloo_all_ways_give_the_same_and_local_steps_are_silent():
    results = on_processes(2, main)
    for way in ("bare", "attached", "overlapped", "both"):
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
        for p, q in zip(r["bare"]["end"], r["attached"]["end"]):  # DDP's buckets sum in another order
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
    assert sum("evaluated between two rounds" in line for line in results[0]["log"]) == 1
    assert not any("evaluated" in line for line in results[1]["log"])
