"""Ranks that are in different calls are told so, all of them, and at once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from worlds import on_processes, same_bits

import commopt
from commopt.agreement import calls
from commopt.agreement.calls import CallsDiffer
from commopt.comm import ThreadBackend, ThreadWorld

WORLD = 3


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))


def backward(net: nn.Module, rank: int) -> None:
    net.zero_grad()
    net(torch.full((2, 6), 1.0 + rank)).square().mean().backward()


def step(optimizer: Any, net: nn.Module, rank: int) -> None:
    backward(net, rank)
    optimizer.step()


def steps(optimizer: Any, net: nn.Module, rank: int) -> None:
    for _ in range(3):
        step(optimizer, net, rank)


def add(optimizer: Any, net: nn.Module, rank: int) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})


def rebind(optimizer: Any, net: nn.Module, rank: int) -> None:
    optimizer.rebind()


def averaged(optimizer: Any, net: nn.Module, rank: int) -> None:
    with optimizer.averaged():
        pass


def averaged_with_the_model(optimizer: Any, net: nn.Module, rank: int) -> None:
    net.register_buffer("count", torch.zeros(2))
    try:
        with optimizer.averaged(net):
            pass
    finally:
        del net.count


def synchronize(optimizer: Any, net: nn.Module, rank: int) -> None:
    optimizer.synchronize()


def consolidate(optimizer: Any, net: nn.Module, rank: int) -> None:
    optimizer.consolidate_state_dict()


def step_of_a_copy(optimizer: Any, net: nn.Module, rank: int) -> None:
    step(*reversed(copy.deepcopy((net, optimizer))), rank)


def load(optimizer: Any, net: nn.Module, rank: int) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def onebit_adam(net: nn.Module, **settings: Any) -> Any:
    return commopt.OneBitAdam(net.parameters(), lr=0.01, freeze_step=2, **settings)


def diloco(net: nn.Module) -> Any:
    return commopt.DiLoCo(net.parameters(), lr=0.01, period=3)


Call = Callable[[Any, nn.Module, int], None]
PAIRS: list[tuple[Callable[..., Any], Call, Call, str, str]] = [
    (onebit_adam, step, add, calls.STEP, calls.REGISTRATION),
    (onebit_adam, step, rebind, calls.STEP, calls.REGISTRATION),
    (onebit_adam, step, consolidate, calls.STEP, "consolidate_state_dict()"),
    (onebit_adam, step, step_of_a_copy, calls.STEP, calls.FIRST_STEP),
    (onebit_adam, step, averaged_with_the_model, calls.STEP, "averaged()"),
    (onebit_adam, consolidate, add, "consolidate_state_dict()", calls.REGISTRATION),
    (diloco, steps, add, calls.ROUND, calls.REGISTRATION),
    (diloco, steps, averaged, calls.ROUND, "averaged()"),
    (diloco, synchronize, averaged, "synchronize()", "averaged()"),
    (diloco, averaged, consolidate, "averaged()", "consolidate_state_dict()"),
]


def state_of(optimizer: Any, net: nn.Module) -> list[torch.Tensor]:
    entries = [t for entry in optimizer.state.values() for t in entry.values() if isinstance(t, torch.Tensor)]
    return [t.clone() for t in (*net.parameters(), *entries)]


def differ(rank: int, world: int) -> list[tuple[str, bool, int]]:
    """Of each pair, as rank 0 makes one call and the others another: the error, whether nothing has changed that the
    call did not change before, and the number of parameter groups. All go on together then."""
    out = []
    for make, usual, odd, *_ in PAIRS:
        net = model()
        optimizer = make(net)
        for _ in range(4):
            step(optimizer, net, rank)
        before = state_of(optimizer, net)
        with pytest.raises(CallsDiffer) as caught:
            (usual if rank == 0 else odd)(optimizer, net, rank)
        kept = same_bits(before, state_of(optimizer, net)) or usual is steps
        groups = len(optimizer.param_groups)
        if usual is not steps:
            steps(optimizer, net, rank)
        out.append((str(caught.value), kept, groups))
    return out


def test_all_ranks_are_told_which_call_each_is_in() -> None:
    of_ranks = on_processes(WORLD, differ)
    for (*_, usual, odd), told in zip(PAIRS, zip(*of_ranks), strict=True):
        for message, kept, groups in told:
            assert (
                f": rank 1 is in another call ({odd}), rank 0 in {usual}; all ranks must make the same calls" in message
            )
            assert kept
            assert groups == 1


def differ_at_first(rank: int, world: int) -> tuple[str, list[torch.Tensor]]:
    """The error where rank 0 takes its first step, and the others add a group; and what all have, three steps later."""
    net = model()
    optimizer = onebit_adam(net)
    with pytest.raises(CallsDiffer) as caught:
        (step if rank == 0 else add)(optimizer, net, rank)
    steps(optimizer, net, rank)
    return str(caught.value), state_of(optimizer, net)


def test_a_first_step_may_be_taken_again() -> None:
    first, *others = on_processes(WORLD, differ_at_first)
    assert f"rank 1 is in another call ({calls.REGISTRATION}), rank 0 in {calls.FIRST_STEP}" in first[0]
    for message, state in others:
        assert "is in another call" in message
        assert same_bits(first[1], state)


def differ_in_overlap(rank: int, world: int) -> list[str]:
    """The error of rank 0, which steps, and of the others, which do not."""
    out = []
    for odd in (add, load, rebind, consolidate):
        net = model()
        optimizer = onebit_adam(net, overlap=True)
        for _ in range(4):
            step(optimizer, net, rank)
        with pytest.raises(CallsDiffer) as caught:
            (step if rank == 0 else odd)(optimizer, net, rank)
        out.append(str(caught.value))
    return out


def test_with_overlap_too() -> None:
    for told in on_processes(2, differ_in_overlap):
        named = [calls.GIVING_UP, calls.GIVING_UP, calls.GIVING_UP, "consolidate_state_dict()"]
        for message, odd in zip(told, named, strict=True):
            assert (
                f": rank 1 is in another call ({odd}), rank 0 in step(); all ranks must make the same calls" in message
            )


def test_words_of_all_calls_differ() -> None:
    words = {calls.word_of(call, cannot) for call in calls.CALLS for cannot in (False, True)}
    assert len(words) == 2 * len(calls.CALLS)
    for damaged in (-1.0, 2.0 * len(calls.CALLS), float("inf"), float("nan")):
        with pytest.raises(CallsDiffer, match=r"another call \(one that begins with .*, which none does"):
            calls.refuse_other_calls([[0.0], [damaged]], ThreadBackend(ThreadWorld(2), 0), "step 3")
    assert [calls.cannot([calls.word_of(calls.ROUND, cannot)]) for cannot in (False, True)] == [False, True]
