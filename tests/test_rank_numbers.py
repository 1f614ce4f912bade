"""Errors and warnings number ranks as the world does, where an optimizer is given some of them."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from worlds import on_processes

import commopt
from commopt.comm import LocalBackend, NodesBackend, ThreadBackend, ThreadWorld, TorchBackend, numbers_in_world
from commopt.comm.counting import CountingBackend


def of_rank(rank: int, world: int) -> dict[str, Any]:
    """What ranks 0 and 2 of three are told of what rank 2 does, by its name."""
    group = dist.new_group([0, 2])
    if rank == 1:
        return {}
    said: dict[str, Any] = {}
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("commopt").addHandler(handler)

    def told(name: str, spoil: Any, make: Any = commopt.OneBitAdam, **settings: Any) -> None:
        try:
            p = torch.nn.Parameter(torch.ones(8))
            optimizer = make([p], process_group=group, **{"lr": 0.01, **settings})
            for step in range(4):
                p.grad = torch.full((8,), 1.0 + rank)
                if step == 2 and rank == 2:
                    spoil(optimizer, p)
                optimizer.step()
        except Exception as error:
            said[name] = str(error)

    def nothing(optimizer: Any, p: Any) -> None:
        pass

    told("lr", lambda o, p: o.param_groups[0].update(lr=0.5))
    told("arguments", nothing, lr=-1 if rank == 2 else 0.01)
    told("settings", nothing, eps=1e-3 if rank == 2 else 1e-8)
    told("refusal", lambda o, p: setattr(p, "grad", p.grad.to_sparse()))
    guard = commopt.Guard(max_skipped=2)
    told("nan", lambda o, p: p.data.fill_(float("nan")), guard=commopt.Guard(check_every=1))
    told("inf", lambda o, p: p.grad.fill_(float("inf")), guard=guard)
    told("outer lr", lambda o, p: o.param_groups[0].update(outer_lr=0.1), make=commopt.DiLoCo, period=4)
    said["lines"] = [line for line in lines if "skipped" in line]
    own = TorchBackend(group)
    backends = own, CountingBackend(own), CountingBackend(own.control())
    said["numbers"] = [list(numbers_in_world(b)) for b in backends]
    return said


def test_over_a_group_of_some_ranks() -> None:
    first, _, last = on_processes(3, of_rank)
    for said in (first, last):
        assert "lr of parameter group 0 is 0.5 on rank 2 and 0.01 on rank 0" in said["lr"]
        assert "rank 2 has" in said["settings"]
        assert "rank 0 has" in said["settings"]
        assert "outer_lr, parameter group 0, is 0.1 on rank 2 and" in said["outer lr"]
        assert "ranks [0] and [2] differ in the parameters" in said["nan"]
        assert said["numbers"] == [[0, 2]] * 3
    assert first["arguments"].startswith("rank 2 refused its arguments: lr must be")
    assert first["refusal"] == "rank 2 cannot take this step; its own error says why"
    assert any("in the gradients of rank 2 (1 skipped so far)" in line for line in first["lines"])


def test_ranks_of_no_process_group_have_their_own_numbers() -> None:
    assert list(numbers_in_world(ThreadBackend(ThreadWorld(4), 2, [1, 2]))) == [0, 1]


def test_a_backend_may_say_what_its_ranks_are_called() -> None:
    backend: Any = LocalBackend()
    backend.numbers = [7]
    nodes: Any = NodesBackend(backend, LocalBackend(), LocalBackend())
    for one in (backend, CountingBackend(backend), nodes, CountingBackend(nodes)):
        assert numbers_in_world(one) == [7]
