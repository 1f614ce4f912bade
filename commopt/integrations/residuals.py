"""The residuals of compressed gradients in a framework's checkpoint: a file for each rank, beside what is saved on one.

checkpoint/commopt-gradients-0-rank-00000.pt ...
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from commopt.gradients.handle import CompressedGradients
from commopt.integrations import parts
from commopt.optim.packed import PackedOptimizer
from commopt.optim.state import join_state_dict, split_state_dict

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
    backward passes; 16 bytes make sure that the last mean has come as it was sent.

    Raises:
        commopt.comm.MessageDamaged: it has not.
    """
    handle.confirm()
    topology = handle.mean.topology
    content = {"world_size": topology.world_size, "nodes": handle.nodes, "state": handle.state_dict()}
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
            read; or if they are of saves over other numbers of ranks.
    """
    topology, where = handle.mean.topology, f"residuals of compressed gradients from {folder}"
    size, state = 0, dict[str, Any]()
    error: Exception | None = None
    try:
        size, state = _found(handle, folder, index)
    except Exception as raised:
        error = raised
    sizes = parts.agree(topology, size, error, where)
    if len(set(sizes)) > 1:
        raise ValueError(f"{where}: ranks have found those of {sizes} ranks, of several saves")
    if size:
        handle.load_state_dict(state)
    elif topology.rank == 0:
        logger.warning("%s: there are none; they begin at 0, so that the run goes on otherwise", where)


def _file(folder: str | os.PathLike[str], index: int, rank: int) -> Path:
    return Path(folder, f"commopt-gradients-{index}-rank-{rank:05d}.pt")


def _found(handle: CompressedGradients, folder: str | os.PathLike[str], index: int) -> tuple[int, dict[str, Any]]:
    """How many ranks have saved, and this rank's state: what it has saved itself, where ranks are the same, else its
    share of all. 0 if there is nothing."""
    topology = handle.mean.topology
    mine, first = _file(folder, index, topology.rank), _file(folder, index, 0)
    if mine.exists():
        own = parts.read(mine)
        if (own["world_size"], own["nodes"]) == (topology.world_size, handle.nodes):
            return own["world_size"], own["state"]
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
    split = [split_state_dict(parts.read(file)["state"]) for file in files]
    owns = [own for _, own in split]
    return size, join_state_dict(split[0][0], owns, topology.rank, topology.world_size, nodes=handle.nodes)
