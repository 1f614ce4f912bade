"""Backends (who talks to whom), collectives (what is said), and schedules (who waits)."""

from commopt.comm.backend import Backend, LocalBackend, Work
from commopt.comm.collectives import compressed_all_reduce
from commopt.comm.counting import CountingBackend, all_reduce_bytes
from commopt.comm.schedule import run, run_interleaved
from commopt.comm.threads import ThreadBackend, ThreadWorld
from commopt.comm.torch import TorchBackend, resolve_backend

__all__ = [
    "Backend",
    "CountingBackend",
    "LocalBackend",
    "ThreadBackend",
    "ThreadWorld",
    "TorchBackend",
    "Work",
    "all_reduce_bytes",
    "compressed_all_reduce",
    "resolve_backend",
    "run",
    "run_interleaved",
]
