"""Optimizer states of several ranks, taken apart and put together.

A replica's state is the same on every rank, but for the residuals of compression. A checkpoint
therefore holds the replicated part once and the residuals of every rank:

    replicated, mine = split_state_dict(optimizer.state_dict())        # save both; `replicated` on one rank only
    optimizer.load_state_dict(join_state_dict(replicated, all_of_mine, rank, world_size))

At the same world size the result is exact. At another one, what compression still owes is kept: every new rank
starts from the mean of the old worker residuals, and the server residuals are dealt out anew.
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


def join_state_dict(replicated: StateDict, rank_locals: Sequence[StateDict], rank: int, world_size: int) -> StateDict:
    """The inverse of :func:`split_state_dict`, for ``rank`` of ``world_size``.

    Args:
        replicated: the part that every rank holds alike.
        rank_locals: the other part of every rank that took part in the save, by rank.
        rank: of the rank that will load the result.
        world_size: of the world that will load it.

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
    mine = rank_locals[rank] if len(saved) == world_size else _merge(rank_locals)
    return {**replicated, "residuals": mine}


def _merge(parts: Sequence[StateDict]) -> StateDict:
    """The residuals of all ranks together: the mean of the workers', and the servers' end to end."""
    state = {
        key: {
            "worker_error": torch.stack([part["state"][key]["worker_error"] for part in parts]).mean(0),
            "server_error": torch.cat([part["state"][key]["server_error"] for part in parts]),
        }
        for key in parts[0]["state"]
    }
    return {**parts[0], "rank": MERGED, "state": state}
