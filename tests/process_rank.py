"""A rank of ``worlds.on_processes``: calls a function over Gloo, and leaves in FOLDER/RANK what it returned or raised.

    process_rank.py FOLDER

FOLDER/call has the path on which modules are found, and the function.
"""

import os
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any

import torch


def main() -> None:
    """Be the rank."""
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    with (folder / "call").open("rb") as file:
        sys.path = pickle.load(file)
        fn = pickle.load(file)
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    try:
        result: Any = fn(rank, int(os.environ["WORLD_SIZE"]))
    except BaseException:
        result = RuntimeError(f"rank {rank}:\n{traceback.format_exc()}")
    torch.save(result, folder / str(rank))
    if not isinstance(result, RuntimeError):  # else the others, which may wait for this rank, are to fail too
        torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # destroy_process_group() of torch 2.6 sometimes never returns when another rank has gone


main()
