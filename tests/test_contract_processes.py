"""The contract of a torch optimizer where there are several processes: torch.compile, made too early, and what tools
for distributed checkpoints save."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from every import COMMUNICATING, EVERY
from worlds import Used, backward, on_processes, params_of, same_bits, train

from commopt import LocalSGD, OneBitAdam
from commopt.comm import LocalBackend


def make(name: str, model: torch.nn.Module, **settings: Any) -> Any:
    return EVERY[name](model.parameters(), lr=1e-2, **settings)


# torch.compile --------------------------------------------------------------------------------------------------------


def compiled(rank: int, world_size: int) -> dict[str, Any]:
    """Whether a compiled step, and a compiled step of training, do what they do uncompiled."""
    out = {}
    for name in COMMUNICATING:
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
        model = Used()
        base = OneBitAdam(model.parameters(), lr=1e-2)
    train(model, LocalSGD(base, period=2), range(2), rank, world_size)


def scenes(rank: int, world_size: int) -> dict[str, Any]:
    made_too_early(rank, world_size)
    return compiled(rank, world_size)


def test_compiled_steps_and_optimizers_that_were_made_too_early():
    for out in on_processes(2, scenes):
        assert out == dict.fromkeys(COMMUNICATING, True)
