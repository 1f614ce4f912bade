"""The contract of a torch optimizer where there are several processes: torch.compile, made too early, and what tools
for distributed checkpoints save."""

from __future__ import annotations

import copy
import itertools
import pickle
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from every import COMMUNICATING, EVERY, OUTER
from listening import listening
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from worlds import Used, backward, on_processes, params_of, same_bits, train

from commopt import LocalSGD, OneBitAdam, compress_gradients
from commopt.comm import LocalBackend
from commopt.compress import Sign
from commopt.optim import join_state_dict, split_state_dict

APART = ("ZeroOneAdam", "CSER", "CSER, signs", "QSparseLocalSGD", *OUTER)
"""Optimizers whose replicas differ between two rounds."""


COMPILED = ("OneBitAdam", "ZeroOneAdam", "CSER, signs", "SlowMo")


def make(name: str, model: torch.nn.Module, **settings: Any) -> Any:
    return EVERY[name](model.parameters(), lr=1e-2, **settings)


# torch.compile --------------------------------------------------------------------------------------------------------


def compiled(rank: int, world_size: int) -> dict[str, Any]:
    """Whether a compiled step, and a compiled step of training, do what they do uncompiled."""
    out = {}
    for name in COMPILED:
        model, same = Used(), Used()
        optimizer, reference = make(name, model), make(name, same)
        step = torch.compile(optimizer.step, backend="eager")
        if name in ("OneBitAdam", "SlowMo"):

            def whole(number: int, model: Used = model, optimizer: Any = optimizer) -> None:
                backward(model, number, rank, world_size)
                optimizer.step()
                with optimizer.averaged():
                    optimizer.zero_grad()

            train_step = torch.compile(whole, backend="eager")
            for number in range(2):
                train_step(number)
            train(same, reference, range(2), rank, world_size)
        for number in range(2, 5):
            backward(model, number, rank, world_size)
            step()
        torch.compile(optimizer.synchronize, backend="eager")()
        train(same, reference, range(2, 5), rank, world_size)
        reference.synchronize()
        out[name] = same_bits(params_of(model), params_of(same))
        torch._dynamo.reset()
    return out


# made too early -------------------------------------------------------------------------------------------------------


def made_too_early(rank: int, world_size: int) -> None:
    for name in COMMUNICATING:
        with mock.patch("torch.distributed.is_initialized", return_value=False):
            model, other = Used(), Used()
            early, alone = make(name, model), make(name, other, backend=LocalBackend())
        backward(model, 0, rank, world_size)
        with pytest.raises(RuntimeError, match=r"was made before torch\.distributed\.init_process_group\(\)"):
            early.step()
        with pytest.raises(RuntimeError, match="1 ranks: make it after that call, or with backend="):
            copy.deepcopy(early).step()
        assert same_bits(params_of(model), params_of(Used()))
        train(other, alone, range(4), rank, world_size)
        assert not same_bits(params_of(other), params_of(Used()))
    with mock.patch("torch.distributed.is_initialized", return_value=False):
        handle = compress_gradients(model, Sign())
    with pytest.raises(RuntimeError, match=r"compress_gradients\(\) was made before torch\.distributed\.init"):
        backward(model, 0, rank, world_size)
    handle.remove()
    with mock.patch("torch.distributed.is_initialized", return_value=False):
        model = Used()
        base = OneBitAdam(model.parameters(), lr=1e-2)
    optimizer = LocalSGD(base, period=2)
    train(model, optimizer, range(2), rank, world_size)
    for kept in (alone, pickle.loads(pickle.dumps(alone)), pickle.loads(pickle.dumps(optimizer)).base):
        assert kept.topology.world_size == 1
        kept.step()


def scenes(rank: int, world_size: int) -> dict[str, Any]:
    made_too_early(rank, world_size)
    return compiled(rank, world_size)


@pytest.mark.long
def test_compiled_steps_and_optimizers_that_were_made_too_early():
    for out in on_processes(2, scenes):
        assert out == dict.fromkeys(COMPILED, True)


# tools for distributed checkpoints ------------------------------------------------------------------------------------

BETWEEN = 4
"""Steps after which replicas are apart, where they ever are, with periods of 3."""


Case = tuple[str, bool, bool]
"""An optimizer, and ``tool`` and ``met`` of :func:`saved_by_tool`."""


class Even(torch.nn.Module):
    """Four parameters that are a bucket each, whose shares are as large on both ranks: nothing in the state of one rank
    has another size on another."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.weights = torch.nn.ParameterList(torch.randn(512, generator=g) for _ in range(4))

    def train_on(self, optimizer: Any, steps: range, rank: int) -> None:
        for step in steps:
            for i, p in enumerate(self.weights):
                p.grad = torch.randn(512, generator=torch.Generator().manual_seed(100 * step + 10 * i + rank))
            optimizer.step()


def even(name: str, seed: int = 0) -> tuple[Even, Any]:
    model = Even(seed)
    return model, make(name, model, bucket_mb=0.002)


def saved_by_tool(name: str, folder: str, tool: bool, met: bool, rank: int) -> dict[str, Any]:
    """Saves with torch.distributed.checkpoint, loads into fresh optimizers, and goes on past the next round.

    Args:
        tool: what get_optimizer_state_dict() makes of the state, instead of all that state_dict() gives.
        met: synchronised before.
    """
    model, optimizer = even(name)
    model.train_on(optimizer, range(BETWEEN), rank)
    if met:
        optimizer.synchronize()
    before = params_of(model)
    state = get_optimizer_state_dict(model, optimizer) if tool else optimizer.state_dict()
    dcp.save({"model": model.state_dict(), "optim": state}, checkpoint_id=folder)
    model, optimizer = even(name, seed=1)
    state = get_optimizer_state_dict(model, optimizer) if tool else optimizer.state_dict()
    loaded = {"model": model.state_dict(), "optim": state}
    dcp.load(loaded, checkpoint_id=folder)
    model.load_state_dict(loaded["model"])
    with listening() as log:
        if tool:
            set_optimizer_state_dict(model, optimizer, loaded["optim"])
        else:
            optimizer.load_state_dict(loaded["optim"])
    start = params_of(model)
    model.train_on(optimizer, range(BETWEEN, BETWEEN + 3), rank)
    optimizer.synchronize()
    return {"before": before, "start": start, "end": params_of(model), "log": log}


def saved_exactly(name: str, folder: str, rank: int, world_size: int) -> bool:
    """Whether a run goes on to the bit from what the tool has of what all ranks hold alike, and a file of each rank."""
    model, optimizer = even(name)
    model.train_on(optimizer, range(BETWEEN), rank)
    replicated, mine = split_state_dict(optimizer.state_dict())
    dcp.save({"model": model.state_dict(), "optim": replicated}, checkpoint_id=folder)
    torch.save(mine, Path(folder, f"own-{rank}.pt"))
    model.train_on(optimizer, range(BETWEEN, BETWEEN + 3), rank)
    dist.barrier()
    other, second = even(name, seed=1)
    loaded = {"model": other.state_dict(), "optim": split_state_dict(second.state_dict())[0]}
    dcp.load(loaded, checkpoint_id=folder)
    parts = [torch.load(Path(folder, f"own-{r}.pt")) for r in range(world_size)]
    other.load_state_dict(loaded["model"])
    second.load_state_dict(join_state_dict(loaded["optim"], parts, rank, world_size))
    other.train_on(second, range(BETWEEN, BETWEEN + 3), rank)
    return same_bits(params_of(model), params_of(other))


def with_tools(folder: str, cases: list[Case], rank: int, world_size: int) -> dict[Any, Any]:
    out: dict[Any, Any] = {}
    for name in COMMUNICATING:
        out[name, "exact"] = saved_exactly(name, f"{folder}/{name}", rank, world_size)
    for name, tool, met in cases:
        out[name, tool, met] = saved_by_tool(name, f"{folder}/{name}{tool}{met}", tool, met, rank)
    return out


@pytest.mark.long
def test_what_tools_for_distributed_checkpoints_save_is_never_taken_for_what_it_is_not(tmp_path, request):
    """Such a tool saves of each tensor that of some rank. Between two rounds, all ranks then start from one and the
    same place, one warning says so, and they meet again; after synchronize() that is where they were. What a rank has
    of its own comes back to the bit if it is saved by rank."""
    cases = list(itertools.product(COMMUNICATING, (False, True), (False, True)))
    if not request.config.getoption("every_combination"):  # after synchronize() one of the two ways, else the other
        ways = dict(zip(COMMUNICATING, itertools.cycle((False, True))))
        cases = [(name, tool, met) for name, tool, met in cases if met == (ways[name] == tool)]
    first, second = on_processes(2, partial(with_tools, str(tmp_path), cases))
    for name in COMMUNICATING:
        assert (first[name, "exact"], second[name, "exact"]) == (True, True), name
    for name, tool, met in cases:
        a, b = first[name, tool, met], second[name, tool, met]
        assert same_bits(a["start"], b["start"]), (name, tool, met)
        assert same_bits(a["end"], b["end"]), (name, tool, met)
        lines = a["log"] + b["log"]
        own = [line for line in lines if "what is each rank's own" in line or "no rank's own part" in line]
        if met or name not in APART:
            assert same_bits(a["start"], a["before"]), (name, tool, met)
        else:
            assert not same_bits(a["before"], b["before"])
            assert len(own) == 1, (name, tool, lines)
            assert "missing" in own[0] or "no rank's" in own[0] if tool else "mixture" in own[0]
        # after synchronize(), 0/1 Adam has no more than residuals that are a rank's own
        assert lines, (name, tool, met)
