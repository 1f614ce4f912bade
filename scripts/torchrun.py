"""Processes that end with the script that has started them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any


@contextlib.contextmanager
def torchrun(ranks: int, program: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """``program`` under torchrun in ``ranks`` processes, which share the cores; they end with the context. options: of
    ``subprocess.Popen``."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *program]
    threads = max(1, (os.cpu_count() or 1) // ranks)
    with subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": str(threads)}, **options) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()  # torchrun hands it on
