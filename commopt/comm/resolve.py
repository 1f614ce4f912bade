"""From the arguments of an optimizer to a backend."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from commopt.comm.backend import Backend, LocalBackend, check_backend
from commopt.comm.nodes import NodesBackend
from commopt.comm.torch import TorchBackend


def resolve_backend(process_group: Any = None, backend: Backend | None = None) -> Backend:
    """The backend that an optimizer's arguments stand for.

    ``backend`` as given; else the process group or mesh given (one of 2 dimensions: nodes, and the ranks of a node);
    else the default process group; else one rank alone.

    Raises:
        ValueError: if both are given, or ``backend`` lacks a verb.
    """
    if backend is not None:
        if process_group is not None:
            raise ValueError("give either process_group or backend, not both")
        check_backend(backend)
        return backend
    if isinstance(process_group, DeviceMesh) and process_group.ndim == 2:
        return NodesBackend.from_mesh(process_group)
    if process_group is not None or (dist.is_available() and dist.is_initialized()):
        return TorchBackend(process_group)
    return LocalBackend()
