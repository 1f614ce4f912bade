"""Optimizer states of several ranks, taken apart and put together.

A replica's state is the same on every rank, but for the residuals of compression, and for what a method lets ranks have
of their own between two rounds. A checkpoint therefore holds the replicated part once and the other part of every rank:

    replicated, mine = split_state_dict(optimizer.state_dict())        # save both; `replicated` on one rank only
    optimizer.load_state_dict(join_state_dict(replicated, all_of_mine, rank, world_size))

At the same world size, and with the same nodes, the result is exact. Else what compression still owes is kept: every
new rank starts from the mean of the old worker residuals, and the server residuals are dealt out anew. Of all else that
is a rank's own, new ranks start from the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

StateDict = dict[str, Any]

RANK_LOCAL = ("worker_error", "server_error")
"""What a parameter's residuals are called: of what this rank sends, and of the part of it that this rank averages."""

MERGED = -1
"""The rank in residuals that are those of all ranks together."""


def split_state_dict(state_dict: StateDict) -> tuple[StateDict, StateDict]:
    """``state_dict`` as (what every rank holds alike, what only this rank holds).

    Works for any torch optimizer; the second part is empty for one without residuals.
    """
    replicated = dict(state_dict)
    return replicated, replicated.pop("residuals", {})


def join_state_dict(
    replicated: StateDict, rank_locals: Sequence[StateDict], rank: int, world_size: int, nodes: int | None = None
) -> StateDict:
    """The inverse of :func:`split_state_dict`, for ``rank`` of ``world_size``.

    Args:
        replicated: the part that every rank holds alike.
        rank_locals: the other part of every rank that took part in the save, by rank.
        rank: of the rank that will load the result.
        world_size: of the world that will load it.
        nodes: how many nodes its ranks are grouped by (:class:`commopt.comm.NodesBackend`); None: they are not.

    Raises:
        ValueError: if ``rank_locals`` are not those of ranks 0, 1, ... of one world.
    """
    if not any(rank_locals):
        return replicated
    saved = [(part["rank"], part["world_size"]) for part in rank_locals]
    if saved != [(r, len(saved)) for r in range(len(saved))]:
        raise ValueError(
            f"rank-local states must come from every rank of one world, in order; got (rank, size) {saved}"
        )
    same = (len(saved), _nodes(rank_locals[0])) == (world_size, nodes or world_size)
    mine = rank_locals[rank] if same else _merge(rank_locals)
    return {**replicated, "residuals": mine}


def _nodes(part: StateDict) -> int:
    return part["nodes"] if "nodes" in part else part["world_size"]  # as before there were nodes


def _merge(parts: Sequence[StateDict]) -> StateDict:
    """The residuals of all ranks together: the mean of the workers', place by place where nodes have several, and the
    servers' end to end. Of all else that is a rank's own, the mean."""
    nodes = _nodes(parts[0])
    parts = sorted(parts, key=lambda part: part["share"] if "share" in part else part["rank"])
    places = [parts[i : i + nodes] for i in range(0, len(parts), nodes)]
    state = {}
    for key, names in parts[0]["state"].items():
        every = {name: [part["state"][key][name] for part in parts] for name in names}
        state[key] = {name: torch.stack(values).mean(0) for name, values in every.items() if name not in RANK_LOCAL}
        if "worker_error" in every:
            workers = [torch.stack([part["state"][key]["worker_error"] for part in place]).mean(0) for place in places]
            state[key]["worker_error"] = workers[0] if len(workers) == 1 else torch.cat(workers)
            state[key]["server_error"] = torch.cat(every["server_error"])
    return {**parts[0], "rank": MERGED, "state": state}
