"""Search for what averages the gradients of the parameters in every step, around them, though nobody has said so.

:mod:`commopt.attach`, which knows such models, says how to look for them, and how to end that. Where it cannot be
ended, what they send is counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from commopt.agreement import calls
from commopt.comm import Topology, gather_number
from commopt.comm.torch import is_of_processes
from commopt.state import binding

if TYPE_CHECKING:
    from commopt.state.packed import PackedOptimizer

Attach = Callable[[bool], "Obstacle | None"]
"""Attaches, or returns why that cannot be; True: in a backward, before anything is sent."""


@dataclass
class Obstacle:
    """Why models around the parameters cannot be attached.

    Attributes:
        why: what it is, and what to do: a sentence without its full stop.
        nbytes: gives about how many bytes this rank sends for their averages of one step, as far as nobody counts them.
        active: whether gradients came averaged when the ranks last agreed.
        everywhere: whether every rank has found one: the same on all.
    """

    why: str
    nbytes: Callable[[], int]
    active: bool = False
    everywhere: bool = False


Look = Callable[["PackedOptimizer"], "Attach | Obstacle | None"]

_look: Look | None = None


def look_with(look: Look) -> None:
    """``look(optimizer)`` returns what attaches the optimizer to a model that averages its gradients; why it cannot be;
    or None if there is no such model."""
    global _look
    _look = look


def found(optimizer: PackedOptimizer) -> Attach | Obstacle | None:
    """The function that attaches ``optimizer`` to the model around its parameters, if there is one, or why it cannot
    be. Communicates nothing."""
    return _look(optimizer) if _look is not None and _may_be_wrapped(optimizer) else None


def may_average(optimizer: PackedOptimizer) -> bool:
    """True if a model around the parameters averages their gradients, or may do so until the next step has attached
    it: the first step of this rank finds out. Communicates nothing."""
    if not optimizer._looked:
        return found(optimizer) is not None
    return optimizer._obstacle is not None and optimizer._obstacle.everywhere


def attach_if_wrapped(optimizer: PackedOptimizer) -> None:
    """At its first step: attaches ``optimizer`` to the model around its parameters, if all ranks find one. Warns of
    sharded parameters that nothing is averaged of."""
    if optimizer._looked:
        return
    optimizer._looked = True
    binding.report_unaveraged(optimizer)
    in_backward = optimizer._attachment is not None and not optimizer._attachment.agreed
    if not _may_be_wrapped(optimizer) and not in_backward:
        return
    there = found(optimizer)
    ranks = optimizer.agrees_over.inner
    mine = int(in_backward or callable(there)) + 2 * int(isinstance(there, Obstacle))
    try:
        found_by = calls.begin(ranks, calls.FIRST_STEP, mine)
    except calls.CallsDiffer:
        optimizer._looked = False
        raise
    everywhere = all(number == 1 for number in found_by)
    if in_backward:
        optimizer._attachment.agreed = everywhere
    elif everywhere and callable(there):
        there = there(False)
    optimizer._obstacle = there if isinstance(there, Obstacle) else None
    if all(found_by):
        everywhere = all(gather_number(ranks, int(optimizer._obstacle is not None)))
        if optimizer._obstacle is not None:
            optimizer._obstacle.everywhere = everywhere


def attach_in_backward(optimizer: PackedOptimizer) -> None:
    """Attaches ``optimizer``, which has loaded a state or is a copy, as the first gradient arrives, if it has not taken
    a step yet and there is a model then that averages its gradients: the next step is that of a run which was never
    stopped, and may not want averages. Communicates nothing; the step makes sure that all ranks have done so."""
    if not optimizer._looked and _may_be_wrapped(optimizer):
        _FirstBackward(optimizer)


class _FirstBackward:
    """Hooks on all parameters of an optimizer, until the first gradient arrives. Holds the optimizer weakly."""

    def __init__(self, optimizer: PackedOptimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._handles = [p.register_hook(self) for p in optimizer.params if p.requires_grad]

    def __call__(self, _: Tensor) -> None:
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        optimizer = self._optimizer()
        if handles and optimizer is not None and not optimizer._looked:
            there = found(optimizer)
            if callable(there):
                there(True)


def advice(optimizer: PackedOptimizer) -> str | None:
    """Why the models around the parameters are not attached, and what to do; None if there are none."""
    return None if optimizer._obstacle is None else optimizer._obstacle.why


def averages_now(optimizer: PackedOptimizer, equal: bool) -> None:
    """Takes down whether gradients came ``equal`` on all ranks: whether models that are not attached average them."""
    if optimizer._obstacle is not None:
        optimizer._obstacle.active = equal


def count_others(optimizer: PackedOptimizer) -> None:
    """Counts, as "ddp", what models that are not attached have sent for this step."""
    obstacle = optimizer._obstacle
    if obstacle is not None and obstacle.active and (nbytes := obstacle.nbytes()):
        optimizer.topology.traffic.add("ddp", nbytes)


def ddp_may_average(topology: Topology) -> bool:
    """False where no DistributedDataParallel can average over these ranks, nor need be looked for: the same on all of
    them."""
    if topology.world_size == 1 or not topology.holds_whole:
        return False
    return is_of_processes(topology.backend)  # else no process group's ranks, so no DDP's


def _may_be_wrapped(optimizer: PackedOptimizer) -> bool:
    return optimizer._attachment is None and ddp_may_average(optimizer.topology)
