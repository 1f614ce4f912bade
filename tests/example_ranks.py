"""The examples, as torchrun runs them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

from forks import python
from ports import free_port

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def on_two_ranks(name: str, patience: float = 120.0) -> str:
    """What rank 0 of two prints that run an example; fails if one does not end well."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    env = os.environ | meeting | {"PYTHONFAULTHANDLER": "1"}
    ranks = [
        subprocess.Popen(
            [python(), str(EXAMPLES / name)], env=env | {"RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE, text=True,
        )
        for rank in "01"
    ]  # fmt: skip
    late = time.monotonic() + patience
    try:
        printed = [process.communicate(timeout=max(late - time.monotonic(), 0.1))[0] for process in ranks]
    finally:
        for process in ranks:
            if process.poll() is None:
                process.send_signal(signal.SIGABRT)  # says where its threads are
                process.communicate()
    assert [process.returncode for process in ranks] == [0, 0]
    return printed[0]
