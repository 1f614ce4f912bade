"""Whether something around the parameters averages their gradients in every step, though nobody has said so.

:mod:`commopt.attach`, which knows such models, says how to look for them, and how to end that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from commopt.comm import gather_number
from commopt.comm.torch import ranks_of

if TYPE_CHECKING:
    from commopt.optim.packed import PackedOptimizer

Attach = Callable[[], None]
Look = Callable[["PackedOptimizer"], "Attach | None"]

_look: Look | None = None


def look_with(look: Look) -> None:
    """``look(optimizer)`` returns what attaches the optimizer to a model that averages its gradients; None if there is
    no such model, or if it cannot be."""
    global _look
    _look = look


def found(optimizer: PackedOptimizer) -> Attach | None:
    """What attaches ``optimizer`` to the model around its parameters, if there is one. Communicates nothing."""
    return _look(optimizer) if _look is not None and _may_be_wrapped(optimizer) else None


def attach_if_wrapped(optimizer: PackedOptimizer) -> None:
    """At its first step: attaches ``optimizer`` to the model around its parameters, if all ranks find one."""
    if optimizer._looked:
        return
    optimizer._looked = True
    if not _may_be_wrapped(optimizer):
        return
    attach = found(optimizer)
    if all(gather_number(optimizer.topology.backend, int(attach is not None))) and attach is not None:
        attach()


def _may_be_wrapped(optimizer: PackedOptimizer) -> bool:
    """False where no such model can be, nor need be looked for: the same on all ranks."""
    topology = optimizer.topology
    if optimizer._attachment is not None or topology.world_size == 1 or topology.is_sharded:
        return False
    return ranks_of(topology.backend) is not None  # else no process group's ranks, so no DDP's
