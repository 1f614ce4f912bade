"""Words of the launcher of this process in the environment: torchrun, or the mpirun of Open MPI or MPICH.

For what is needed before the ranks have joined each other, and without importing anything heavy.
"""

from __future__ import annotations

import contextlib
import os

from commopt.train.errors import ConfigError


def _read(*names: str, default: int) -> int:
    """The first of ``names`` that is there. Raises ConfigError where that is no number."""
    for name in names:
        if name in os.environ:
            try:
                return int(os.environ[name])
            except ValueError:
                raise ConfigError(
                    f"{name}={os.environ[name]!r} in the environment is not allowed: it must be a number, as launchers "
                    "such as torchrun set it"
                ) from None
    return default


def launched() -> bool:
    """True if a launcher has started this process, so that there may be others."""
    return any(name in os.environ for name in ("RANK", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"))


def rank() -> int:
    """This process among all; 0 without a launcher, and where that is no number: errors are said by it, too."""
    with contextlib.suppress(ConfigError):
        return _read("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", default=0)
    return 0


def local_rank() -> int:
    """This process among those of its machine; 0 without a launcher."""
    return _read("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", default=0)


def local_size() -> int | None:
    """Number of processes on this machine; None without a launcher."""
    return _read("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", default=0) or None


def restarts() -> int:
    """How often torchrun has started the processes again; 0 without it."""
    return _read("TORCHELASTIC_RESTART_COUNT", default=0)


def max_restarts() -> int:
    """How often torchrun would start the processes again; 0 without it."""
    return _read("TORCHELASTIC_MAX_RESTARTS", default=0)


def by_torchrun() -> int | None:
    """Number of processes that torchrun has started; None if it was not torchrun."""
    return _read("WORLD_SIZE", default=0) or None


def by_mpirun() -> int | None:
    """Number of processes that mpirun has started; None if it was not mpirun."""
    return _read("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", default=0) or None
