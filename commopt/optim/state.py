"""Optimizer states of several ranks, taken apart and put together.

A replica's state is the same on every rank, but for the residuals of compression (:data:`RANK_LOCAL`). A checkpoint
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
"""Keys of per-parameter state that differ from rank to rank."""

MERGED = -1
"""``residual_rank`` of a state dict that holds the residuals of all ranks together."""


def split_state_dict(state_dict: StateDict) -> tuple[StateDict, StateDict]:
    """``state_dict`` as (what every rank holds alike, what only this rank holds).

    Works for any torch optimizer; the second part is empty for one without residuals.
    """
    shared: StateDict = {**state_dict, "state": {}, "param_groups": []}
    local: StateDict = {}
    for group in state_dict["param_groups"]:
        shared["param_groups"].append({k: v for k, v in group.items() if not k.startswith("residual_")})
        if "residual_rank" in group:
            local = {"rank": group["residual_rank"], "world_size": group["residual_world_size"], "state": {}}
            local["layout"] = group["residual_layout"]
    for key, entry in state_dict["state"].items():
        shared["state"][key] = {k: v for k, v in entry.items() if k not in RANK_LOCAL}
        if local:
            local["state"][key] = {k: v for k, v in entry.items() if k in RANK_LOCAL}
    return shared, local


def join_state_dict(replicated: StateDict, rank_locals: Sequence[StateDict], rank: int, world_size: int) -> StateDict:
    """The inverse of :func:`split_state_dict`, for ``rank`` of ``world_size``.

    Args:
        replicated: the part that every rank holds alike.
        rank_locals: the other part of every rank that took part in the save, by rank.
        rank, world_size: of the rank that will load the result.

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
    if len(saved) == world_size:
        residuals, owner = rank_locals[rank]["state"], rank
    else:
        residuals, owner = _merge([part["state"] for part in rank_locals]), MERGED
    joined: StateDict = {**replicated, "state": {}, "param_groups": []}
    for group in replicated["param_groups"]:
        origin = {"residual_world_size": len(saved), "residual_layout": rank_locals[0]["layout"]}
        joined["param_groups"].append({**group, "residual_rank": owner, **origin})
    for key in {**replicated["state"], **residuals}:
        joined["state"][key] = {**replicated["state"].get(key, {}), **residuals.get(key, {})}
    return joined


def _merge(parts: list[dict[Any, dict[str, torch.Tensor]]]) -> dict[Any, dict[str, torch.Tensor]]:
    merged = {}
    for key in parts[0]:
        merged[key] = {
            "worker_error": torch.stack([part[key]["worker_error"] for part in parts]).mean(0),
            "server_error": torch.cat([part[key]["server_error"] for part in parts]),
        }
    return merged
