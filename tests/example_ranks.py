"""The examples, as torchrun runs them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from forks import python
from ports import free_port

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def on_two_ranks(name: str, patience: float = 120.0) -> str:
    """What rank 0 of two prints that run an example; fails if one does not end well."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [python(), str(EXAMPLES / name)], env={**os.environ, **meeting, "RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE, text=True,
        )
        for rank in "01"
    ]  # fmt: skip
    try:
        printed = [process.communicate(timeout=patience)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert [process.returncode for process in ranks] == [0, 0]
    return printed[0]
