"""The state of all ranks in one: each rank's own part, on the rank that saves.

What ZeroRedundancyOptimizer began, and Lightning and Fabric ask every optimizer for: all ranks call
``consolidate_state_dict()``, then one of them saves its ``state_dict()``. Every rank loads that one, and takes its own
out of it. Functions of the ranks and of their parts.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from commopt.comm import CountingBackend, Topology, confirm, gather_rows, message_device
from commopt.state.split import OF_RANKS, join_state_dict

IN_FLIGHT = 2**26
"""Bytes that a rank has of all ranks at a time, on the device that it sends from; at least a MB of each."""


def refuse_pieces(topology: Topology, own_in_state: bool) -> None:
    """Raises ValueError, on every rank, where one rank's state is not that of the whole model."""
    if own_in_state or len(set(topology.parts)) > 1:
        raise ValueError(
            "consolidate_state_dict() is for models that every rank holds whole, and here ranks hold pieces: save with "
            "torch.distributed.checkpoint, which keeps each rank's own too (docs/sharding.md)"
        )


def gather_parts(topology: Topology, mine: Mapping[str, Any], to: int, where: str) -> list[dict[str, Any] | None]:
    """The own part of every other rank, by rank, in host memory; None in this rank's place. Empty but on rank ``to``.

    Args:
        topology: the ranks. All of them call it.
        mine: this rank's part.
        to: the rank that gets them.
        where: begins errors.
    """
    data, device = _bytes_of(mine), message_device(topology.backend)
    world = CountingBackend(topology.backend, topology.traffic)  # with a receipt of these messages alone
    lengths = gather_rows(world, torch.tensor([data.numel()], device=device), where).flatten().tolist()
    at_a_time = max(2**20, IN_FLIGHT // topology.world_size)
    takes = topology.rank == to
    others = [
        torch.empty(n if takes and r != to else 0, dtype=torch.uint8, device="cpu") for r, n in enumerate(lengths)
    ]
    for start in range(0, max(lengths), at_a_time):
        row = torch.zeros(min(at_a_time, max(lengths) - start), dtype=torch.uint8, device=device)
        row[: max(0, data.numel() - start)] = data[start : start + row.numel()]
        for other, got in zip(others, gather_rows(world, row, where)):
            here = other[start : start + row.numel()]
            here.copy_(got[: here.numel()])
    confirm(world, True, where)
    parts: list[dict[str, Any] | None] = []
    for r in range(topology.world_size if takes else 0):
        parts.append(None if r == to else _part_of(others[r]))
        others[r] = torch.empty(0, device="cpu")
    return parts


def with_own(state_dict: dict[str, Any], topology: Topology, nodes: int | None = None) -> dict[str, Any]:
    """``state_dict``; of one with the parts of all ranks, with what this rank takes of them for its own. ``nodes``: by
    which ranks are grouped, the topology's if it is None."""
    if OF_RANKS not in state_dict:
        return state_dict
    alike = {key: value for key, value in state_dict.items() if key not in (OF_RANKS, "residuals")}
    return join_state_dict(alike, state_dict[OF_RANKS], topology.rank, topology.world_size, nodes or topology.nodes)


def _bytes_of(part: Mapping[str, Any]) -> Tensor:
    file = io.BytesIO()
    torch.save(dict(part), file)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def _part_of(data: Tensor) -> dict[str, Any]:
    # from a rank of this run, and of whatever a base optimizer keeps: as torch.distributed takes objects
    part: dict[str, Any] = torch.load(io.BytesIO(data.numpy().tobytes()), map_location="cpu", weights_only=False)
    return part
