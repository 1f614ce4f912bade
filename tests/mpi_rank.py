"""One rank under mpirun: calls a function of a module and leaves its result, or its error, in a folder."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from typing import Any

import torch
from mpi4py import MPI


def main(folder: str, module: str, name: str, *args: str) -> None:
    rank = MPI.COMM_WORLD.rank
    torch.set_num_threads(1)
    try:
        result: Any = getattr(importlib.import_module(module), name)(*args)
    except BaseException:
        result = RuntimeError(f"rank {rank}:\n{traceback.format_exc()}")
    torch.save(result, os.path.join(folder, str(rank)))
    if isinstance(result, RuntimeError):
        MPI.COMM_WORLD.Abort(1)  # the others may wait for this rank


if __name__ == "__main__":
    main(*sys.argv[1:])
