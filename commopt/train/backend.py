"""The backend that a config names."""

from __future__ import annotations

from collections.abc import Sequence

from commopt.comm import Backend, MPIBackend, resolve_backend
from commopt.comm.backend import lacking
from commopt.train.config import BACKENDS, CommConfig
from commopt.train.errors import ConfigError
from commopt.train.named import build, check_arguments, import_dotted
from commopt.train.parse import nearest


def backend_class(config: CommConfig) -> type | None:
    """The class whose object takes the place of torch.distributed; None where the config names none.

    Raises ConfigError for a name or an argument that it cannot have. Makes nothing.
    """
    name = config.backend
    if name == "mpi":
        check_arguments(MPIBackend, config.args, "comm.args", {"timeout": "comm.timeout"})
        return MPIBackend
    if name in BACKENDS:
        if config.args:
            raise ConfigError(f"comm.args={config.args} is not allowed: comm.backend={name} takes none")
        return None
    path, _, attribute = name.rpartition(".")
    if not path:
        raise ConfigError(f"comm.backend={name!r} is none of {', '.join(BACKENDS)}{nearest(name, BACKENDS)}")
    if config.ranks_per_node != 1:
        raise ConfigError(
            f"comm.ranks_per_node={config.ranks_per_node} is not allowed with comm.backend={name}, but with "
            f"{', '.join(BACKENDS)} (a class of your own can make a commopt.comm.NodesBackend itself)"
        )
    found = import_dotted(name, "comm.backend")
    if not isinstance(found, type):
        raise ConfigError(f"comm.backend={name!r}: {path} has no class {attribute}")
    if missing := lacking(found):
        raise ConfigError(f"comm.backend={name!r} lacks {', '.join(missing)} (see commopt.comm.Backend)")
    check_arguments(found, config.args, "comm.args")
    return found


def make_backend(cls: type, config: CommConfig, rank: int, size: int) -> Backend:
    """An object of ``cls`` on this rank. Raises ConfigError unless it knows the same ranks as the run does."""
    args = config.args | ({"timeout": config.timeout} if cls is MPIBackend else {})
    try:
        backend = resolve_backend(backend=build(cls, "comm", **args))
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


def ranks_per_node(config: CommConfig, size: int, local_sizes: Sequence[int | None]) -> int:
    """Number of ranks that make a node.

    Args:
        config: what was asked for.
        size: number of ranks.
        local_sizes: of every rank, how many its machine runs, if its launcher has said so.

    Raises:
        ConfigError: nodes of that size cannot be made.
    """
    key, places = f"comm.ranks_per_node={config.ranks_per_node}", config.ranks_per_node
    if places == 0:
        if len(set(local_sizes)) > 1 or not local_sizes[0]:
            raise ConfigError(
                f"{key} needs a launcher that starts as many processes on every machine; here they run {local_sizes}: "
                "give the number"
            )
        places = local_sizes[0]
    if size % places:
        raise ConfigError(f"{key} is not allowed with {size} ranks: it must divide them")
    return places
