"""Optimizer states of several ranks, taken apart and put together.

A replica's state is the same on every rank, but for the residuals of compression, and for what a method lets ranks have
of their own between two rounds. A checkpoint therefore holds the replicated part once and the other part of every rank:

    replicated, mine = split_state_dict(optimizer.state_dict())        # save both; `replicated` on one rank only
    optimizer.load_state_dict(join_state_dict(replicated, all_of_mine, rank, world_size))

At the same world size, and with the same nodes, the result is exact. Else no residual is lost: every
new rank starts from the mean of the old worker residuals, and the server residuals are dealt out anew. Of all else that
is a rank's own (with local steps: parameters, momenta, the state of a base optimizer), new ranks start from the mean.

Parts that say where in whole parameters they lie, because ranks hold pieces, are put together to whole ones. Whether a
rank is where it was is for it to say that loads: it gets its own part, and beside it what all have together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from commopt.state.places import PLACES, RANK_LOCAL, on_one_device, put_together, with_server

StateDict = dict[str, Any]

TOGETHER = "residuals_together"
"""Key of the residuals of all ranks together, beside a rank's own which may be of another mesh."""

OF_RANKS = "residuals_of_ranks"
"""Key of a state with the own parts of all ranks, by rank: what ``consolidate_state_dict()`` is followed by."""

_OUTDATED = ("met_step", "way_norm")
"""Keys of parameter groups before 0.1.0."""

MERGED = -1
"""The rank in residuals that are those of all ranks together."""


def split_state_dict(state_dict: StateDict) -> tuple[StateDict, StateDict]:
    """``state_dict`` as (what every rank holds alike, what only this rank holds).

    Works for any torch optimizer; the second part is empty for one without residuals. The parts of all ranks, which
    ``consolidate_state_dict()`` has brought to one of them, are in neither.
    """
    replicated = {key: value for key, value in state_dict.items() if key != OF_RANKS}
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
        nodes: how many nodes its ranks are grouped by (:class:`commopt.comm.NodesBackend`); None: as many as when the
            parts were saved, if its ranks are as many, else they are not grouped.

    Raises:
        ValueError: if ``rank_locals`` are not those of ranks 0, 1, ... of one world.
    """
    if not any(rank_locals):
        return replicated
    refuse_outdated(rank_locals)
    saved = [(part["rank"], part["world_size"]) for part in rank_locals]
    if saved != [(r, len(saved)) for r in range(len(saved))]:
        raise ValueError(
            f"rank-local states must come from every rank of one world, in order; got (rank, size) {saved}"
        )
    if PLACES in rank_locals[0]:
        together = {**_merge_pieces(rank_locals), "rank": MERGED}
        own = rank_locals[rank] if len(saved) == world_size else together
        return {**replicated, "residuals": own, TOGETHER: together}
    same = len(saved) == world_size and nodes in (None, _nodes(rank_locals[0]))
    mine = rank_locals[rank] if same else _merge(rank_locals)
    return {**replicated, "residuals": mine}


def refuse_outdated(parts: Sequence[StateDict | None], groups: Sequence[StateDict] = ()) -> None:
    """Raises ValueError if a rank's own part, or a parameter group, was saved before names were changed."""
    old_group = any(key in group for group in groups for key in _OUTDATED)
    if old_group or any(part and "shard_index" not in part for part in parts):
        raise ValueError(
            "the loaded state was saved before commopt 0.1.0, whose names of state are others: load it with the "
            "version that has saved it, or begin a new run from the weights of the model"
        )


def _merge_pieces(parts: Sequence[StateDict]) -> StateDict:
    """The residuals of all ranks together, of whole parameters."""
    return {**{key: parts[0][key] for key in parts[0] if key not in (PLACES, "digest")}, "state": put_together(parts)}


def _nodes(part: StateDict) -> int:
    return int(part["nodes"])


def _merge(parts: Sequence[StateDict]) -> StateDict:
    """The residuals of all ranks together: the mean of the workers', local rank by local rank where nodes have several,
    and the servers' end to end. Of all else that is a rank's own, the mean."""
    nodes = _nodes(parts[0])
    parts = sorted(parts, key=lambda part: part["shard_index"])
    by_local_rank = [parts[i : i + nodes] for i in range(0, len(parts), nodes)]
    merged: StateDict = _mean_of([_without_residuals(part) for part in parts])
    for key, entry in parts[0]["state"].items():
        if "worker_error" in entry:
            # where nobody averages a part for others, each rank's residual is of all
            of_whole = not any(part["state"][key]["server_error"].numel() for part in parts)
            workers = [
                torch.stack(on_one_device([part["state"][key]["worker_error"] for part in together])).mean(0)
                for together in ([parts] if of_whole else by_local_rank)
            ]
            servers = [part["state"][key]["server_error"] for part in parts]
            for name, pieces in (("worker_error", workers), ("server_error", servers)):
                merged["state"][key][name] = pieces[0] if len(pieces) == 1 else torch.cat(on_one_device(pieces))
            merged["state"][key] = with_server(merged["state"][key])
    return {**merged, "rank": MERGED}


def _without_residuals(part: StateDict) -> StateDict:
    state = part["state"].items()
    return {**part, "state": {i: {k: v for k, v in entry.items() if k not in RANK_LOCAL} for i, entry in state}}


def _mean_of(trees: Sequence[Any]) -> Any:
    """Nested dicts with the mean of every floating tensor, where the first is; all else is the first's that has it."""
    first = trees[0]
    if isinstance(first, dict):
        keys = dict.fromkeys(key for tree in trees for key in tree)
        return {key: _mean_of([tree[key] for tree in trees if key in tree]) for key in keys}
    if isinstance(first, torch.Tensor) and first.is_floating_point():
        return torch.stack(on_one_device(trees)).mean(0)
    return first
