"""The backend that a config names."""

from __future__ import annotations

import importlib

from commopt.comm import Backend, MPIBackend, resolve_backend
from commopt.train.config import BACKENDS, CommConfig
from commopt.train.errors import ConfigError
from commopt.train.named import build, check_arguments
from commopt.train.parse import nearest

VERBS = ("all_reduce", "all_to_all", "all_gather", "broadcast")


def backend_class(config: CommConfig) -> type | None:
    """The class whose object takes the place of torch.distributed; None where the config names none.

    Raises ConfigError for a name or an argument that it cannot have. Makes nothing.
    """
    name = config.backend
    if name == "mpi":
        check_arguments(MPIBackend, config.args, "comm.args")
        return MPIBackend
    if name in BACKENDS:
        if config.args:
            raise ConfigError(f"comm.args={config.args} is not allowed: comm.backend={name} takes none")
        return None
    path, _, attribute = name.rpartition(".")
    if not path:
        raise ConfigError(f"comm.backend={name!r} is none of {', '.join(BACKENDS)}{nearest(name, BACKENDS)}")
    try:
        found = getattr(importlib.import_module(path), attribute, None)
    except ImportError as error:
        raise ConfigError(f"comm.backend={name!r}: cannot import {path}: {error}") from None
    if not isinstance(found, type):
        raise ConfigError(f"comm.backend={name!r}: {path} has no class {attribute}")
    missing = [verb for verb in VERBS if not callable(getattr(found, verb, None))]
    if missing:
        raise ConfigError(f"comm.backend={name!r} lacks {', '.join(missing)} (see commopt.comm.Backend)")
    check_arguments(found, config.args, "comm.args")
    return found


def make_backend(cls: type, config: CommConfig, rank: int, size: int) -> Backend:
    """An object of ``cls`` on this rank. Raises ConfigError unless it knows the same ranks as the run does."""
    try:
        backend = resolve_backend(backend=build(cls, "comm", **config.args))
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"comm.backend={config.backend!r}: {error}") from error
    if (backend.rank, backend.world_size) != (rank, size):
        raise ConfigError(
            f"comm.backend={config.backend!r} says rank {backend.rank} of {backend.world_size} where the run has rank "
            f"{rank} of {size}: all of them must be in it, in the same order"
        )
    return backend
