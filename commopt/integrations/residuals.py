"""The residuals of compressed gradients in a framework's checkpoint: a file for each rank, beside what is saved on one.

checkpoint/commopt-gradients-0-rank-00000.pt ...
"""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path
from typing import Any

import torch

from commopt.comm import Topology, gather_rows, message_device
from commopt.gradients.handle import CompressedGradients
from commopt.integrations import parts
from commopt.state.packed import PackedOptimizer
from commopt.state.split import join_state_dict, split_state_dict

logger = logging.getLogger("commopt")


def refuse_own(optimizer: Any) -> None:
    """Raises ValueError if ``optimizer`` is one of commopt that communicates: gradients would be averaged twice."""
    if isinstance(optimizer, PackedOptimizer):
        raise ValueError(
            f"{type(optimizer).__name__} averages by itself, and compresses what it sends: leave compressed gradients "
            "out, or train with an optimizer that does not communicate, such as torch.optim.AdamW"
        )


def save(handle: CompressedGradients, folder: str | os.PathLike[str], index: int = 0) -> None:
    """Writes this rank's residuals of the handle number ``index`` into ``folder``. All ranks must call it, between two
    backward passes; a few bytes make sure that the last mean has come as it was sent, and number the save.

    Raises:
        commopt.comm.MessageDamaged: it has not.
    """
    handle.confirm()
    topology = handle.mean.topology
    content = {"world_size": topology.world_size, "nodes": handle.nodes, "state": handle.state_dict()}
    content["save"] = _number_of_rank_0(topology)
    parts.write(content, _file(folder, index, topology.rank))
    if topology.rank == 0:  # what an earlier save over more ranks has left
        for stale in Path(folder).glob(f"commopt-gradients-{index}-rank-*.pt"):
            if int(stale.stem[-5:]) >= topology.world_size:
                stale.unlink()


def load(handle: CompressedGradients, folder: str | os.PathLike[str], index: int = 0) -> None:
    """Gives every rank its residuals from ``folder`` again, those that :func:`save` has written; over another number of
    ranks, its share of all of them. If there are none they begin at 0, and a warning says so. All ranks must call it,
    between two backward passes.

    Raises:
        ValueError: on all ranks, if some ranks' residuals are there, but not those that each needs; if one cannot be
            read; or if they are of several saves.
    """
    topology, where = handle.mean.topology, f"residuals of compressed gradients from {folder}"
    number, state = 0, dict[str, Any]()
    error: Exception | None = None
    try:
        number, state = _found(handle, folder, index)
    except Exception as raised:
        error = raised
    if len(set(parts.agree(topology, number, error, where))) > 1:
        raise ValueError(f"{where}: ranks have found those of {_SEVERAL}")
    if number:
        handle.load_state_dict(state)
    elif topology.rank == 0:
        logger.warning("%s: there are none; they begin at 0, so that the run goes on otherwise", where)


_SEVERAL = (
    "several saves: one was interrupted. Resume from an earlier checkpoint, or delete the files commopt-*.pt to begin "
    "at 0"
)


def _number_of_rank_0(topology: Topology) -> int:
    """The same on all ranks, and hardly that of another save; not 0."""
    mine = torch.tensor([float(1 + secrets.randbelow(2**24 - 1))], device=message_device(topology.backend))
    return int(gather_rows(topology.backend, mine, "number of a save of residuals")[0].item())


def _file(folder: str | os.PathLike[str], index: int, rank: int) -> Path:
    return Path(folder, f"commopt-gradients-{index}-rank-{rank:05d}.pt")


def _found(handle: CompressedGradients, folder: str | os.PathLike[str], index: int) -> tuple[int, dict[str, Any]]:
    """The number of the save, and this rank's state: what it has saved itself, where ranks are the same, else its share
    of all. 0 if there is nothing."""
    topology = handle.mean.topology
    mine, first = _file(folder, index, topology.rank), _file(folder, index, 0)
    if mine.exists():
        own = parts.read(mine)
        if (own["world_size"], own["nodes"]) == (topology.world_size, handle.nodes):
            return own["save"], own["state"]
    if not first.exists():
        return 0, {}
    size = parts.read(first)["world_size"]
    files = [_file(folder, index, rank) for rank in range(size)]
    missing = [rank for rank, file in enumerate(files) if not file.exists()]
    if missing:
        raise ValueError(
            f"{folder} lacks the residuals of ranks {missing} of {size}: the save was interrupted, or the folder is "
            "not shared. Resume from an earlier checkpoint, or delete the files commopt-*.pt to begin at 0"
        )
    saved = [parts.read(file) for file in files]
    if len({one["save"] for one in saved}) > 1:
        raise ValueError(f"{folder} has the residuals of {_SEVERAL}")
    split = [split_state_dict(one["state"]) for one in saved]
    owns = [own for _, own in split]
    return saved[0]["save"], join_state_dict(split[0][0], owns, topology.rank, topology.world_size, nodes=handle.nodes)
