"""Each rank's own part of an optimizer's state, in files beside the state that a framework saves on rank 0 alone.

checkpoint/commopt-0-rank-00000.pt ...     residuals; with local steps parameters and the state of the base
"""

from __future__ import annotations

import logging
import os
import pickle
import zlib
from pathlib import Path
from typing import Any

import torch

from commopt.comm import Topology, gather_rows, message_device
from commopt.state.host import as_numbers
from commopt.state.packed import PackedOptimizer
from commopt.state.split import StateDict, join_state_dict, split_state_dict

logger = logging.getLogger("commopt")


def save(optimizer: PackedOptimizer, folder: str | os.PathLike[str], index: int = 0) -> None:
    """Writes this rank's own part of the state of the optimizer number ``index`` into ``folder``, which is made. To be
    called on every rank, at the same step as the framework saves the rest. Communicates nothing."""
    replicated, part = split_state_dict(optimizer.state_dict())
    rank, world_size = optimizer.topology.rank, optimizer.topology.world_size
    content = {"rank": rank, "world_size": world_size, "moment": _moment(replicated), "part": part}
    write(content, Path(folder, f"commopt-{index}-rank-{rank:05d}.pt"))


def write(content: dict[str, Any], file: Path) -> None:
    """Writes ``content`` so that ``file`` is whole or not there; its folder is made."""
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, file.with_suffix(".tmp"))
    os.replace(file.with_suffix(".tmp"), file)


def join(
    optimizer: PackedOptimizer, state_dict: StateDict, folder: str | os.PathLike[str], index: int = 0
) -> StateDict:
    """``state_dict``, which was saved on one rank, with this rank's own part from ``folder``; in a world of another
    size what :func:`commopt.optim.join_state_dict` makes of all parts. As it is if no rank finds any of that save. All
    ranks call it.

    Raises:
        ValueError: on all ranks, if some ranks' parts are there, but not those that each needs, or if one cannot be
            read.
    """
    joined: StateDict = state_dict
    error: Exception | None = None
    try:
        joined = _found(optimizer.topology, state_dict, Path(folder), index)
    except Exception as raised:
        error = raised
    found = int(joined is not state_dict)
    agree(optimizer.topology, found, error, f"own parts of an optimizer's state from {folder}")
    return joined


def agree(topology: Topology, found: int, error: Exception | None, where: str) -> list[int]:
    """What all ranks have ``found``, by rank: numbers of theirs, or all 0, for nothing.

    Raises:
        ValueError: on all ranks, if only some have found nothing, or if one has met with an ``error``, which is raised
            there.
    """
    mine = torch.tensor([float(found), float(error is not None)], device=message_device(topology.backend))
    rows: list[list[float]] = gather_rows(topology.backend, mine, f"{where}, whether all ranks have theirs").tolist()
    if error is not None:
        raise error
    if failed := [rank for rank, row in enumerate(rows) if row[1]]:
        raise ValueError(f"{where}: ranks {failed} cannot have theirs; their own errors say why")
    without = [rank for rank, row in enumerate(rows) if not row[0]]
    if 0 < len(without) < topology.world_size:
        raise ValueError(
            f"{where}: ranks {without} of {topology.world_size} find none there, the others do. Bring the files "
            "commopt-*.pt there, or resume from an earlier checkpoint, or delete them everywhere to go on without them"
        )
    return [int(row[0]) for row in rows]


def _found(topology: Topology, state_dict: StateDict, folder: Path, index: int) -> StateDict:
    """The state that :func:`join` gives, as far as this rank knows."""
    replicated, _ = split_state_dict(state_dict)
    moment = _moment(state_dict)
    files = sorted(folder.glob(f"commopt-{index}-rank-*.pt"))
    saved = [read(file) for file in files]
    saved = [one for one in saved if one["moment"] == moment]
    if not saved:
        return state_dict
    here = {"rank": topology.rank, "world_size": topology.world_size}
    mine = [one["part"] for one in saved if here.items() <= one.items()]
    if mine and mine[0].get("nodes", topology.nodes) == topology.nodes:
        return {**replicated, "residuals": mine[0]} if mine[0] else replicated
    ranks, size = [one["rank"] for one in saved], saved[0]["world_size"]
    if ranks != list(range(size)):
        raise ValueError(
            f"{folder} has the own parts of ranks {ranks} of {size}: the save was interrupted, or the folder is not "
            "shared. Resume from an earlier checkpoint, or delete the files commopt-*.pt to go on without them"
        )
    return join_state_dict(
        replicated, [one["part"] for one in saved], topology.rank, topology.world_size, topology.nodes
    )


def read(file: Path) -> dict[str, Any]:
    """What :func:`write` has written. Raises ValueError if it cannot be read."""
    try:
        content: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, OSError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(
            f"{file} cannot be read: the save was interrupted, or the file is damaged. Resume from an earlier "
            "checkpoint, or delete the files commopt-*.pt to go on without them"
        ) from error
    return content


def load(optimizer: PackedOptimizer, file: Path) -> None:
    """Loads what was saved on one rank in ``file``, once more, with this rank's own part from the folder of it. To be
    called on all ranks.

    Raises:
        ValueError: on all ranks, as :func:`join`.
    """
    if not file.exists():  # nothing was loaded: all may begin anew, but not some
        agree(optimizer.topology, 0, None, f"own parts of an optimizer's state from {file.parent}")
        return
    saved = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    joined = join(optimizer, saved, file.parent)
    optimizer.load_state_dict(joined)
    if joined is not saved and optimizer.topology.rank == 0:
        logger.warning(
            "%s: every rank has its own part again, from %s: what was said before of parts that are lost is void",
            type(optimizer).__name__, file.parent,
        )  # fmt: skip


def _moment(state_dict: StateDict) -> int:
    """A checksum of the groups, which are the same on all ranks and others after each step; wherever tensors among
    their values are."""
    groups = [as_numbers(group, group) for group in state_dict["param_groups"]]
    return zlib.crc32(str(groups).encode())
