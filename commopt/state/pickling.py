"""Optimizers in pickles and copies. Functions of an optimizer."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch

from commopt.comm import LocalBackend, Topology, resolve_backend
from commopt.state import assigned, following, loading, packing, wrapped
from commopt.state.own import cloned

if TYPE_CHECKING:
    from commopt.state.packed import PackedOptimizer


def state_of(optimizer: PackedOptimizer) -> dict[str, Any]:
    """What a pickle or a copy has: all but what belongs to this process. The process group cannot be pickled, buckets
    are made anew, of the same parameters. Who shall be alone stays alone.

    Raises:
        ValueError: some of the state was deleted, or does not fit; see :func:`commopt.state.assigned.check`.
        RuntimeError: within ``averaged()``.
    """
    optimizer.refuse_inside_averaged("a copy or a pickle of the optimizer")
    assigned.check(optimizer)
    following.regroup_between_steps(optimizer)
    return {
        **{name: getattr(optimizer, name) for name in (*optimizer._SETTINGS, *optimizer._KEPT)},
        "state": cloned(optimizer.all_state()),
        "origin": packing.origin_here(optimizer),
        "runs": packing.runs_of(optimizer),
        "alone": type(optimizer.topology.backend) is LocalBackend,
    }


def is_whole(state: dict[str, Any]) -> bool:
    """True if ``state`` is of :func:`state_of`: torch gives ``__setstate__`` the groups alone, of a state it loads."""
    return "origin" in state


def restore(optimizer: PackedOptimizer, state: dict[str, Any]) -> None:
    """Makes ``optimizer``, which has nothing yet, what ``state`` was of; over ``state["backend"]`` if it is there."""
    state = dict(state)
    tensors, origin, runs = state.pop("state"), state.pop("origin"), state.pop("runs", ())
    alone = LocalBackend() if state.pop("alone", False) else None
    backend = resolve_backend(backend=state.pop("backend", alone), params=state["param_groups"])
    optimizer.topology = Topology(backend, optimizer.knows_nodes)
    loading.tell_of_other_ranks(optimizer, origin)
    ours = set(state["defaults"])
    torch.optim.Optimizer.__setstate__(optimizer, state)
    for key in optimizer.defaults.keys() - ours:  # torch adds "differentiable", which would get into the groups
        del optimizer.defaults[key]
    optimizer._restart()
    optimizer._ready = True
    for p in optimizer.params:
        optimizer.topology.check(p)
    following.rebuild(optimizer, tensors, origin, runs)
    optimizer.topology.agree_on_extent()
    wrapped.attach_in_backward(optimizer)


def copy_of(optimizer: PackedOptimizer, memo: dict[int, Any]) -> PackedOptimizer:
    """A deep copy, over the same ranks."""
    new = type(optimizer).__new__(type(optimizer))
    memo[id(optimizer)] = new
    new.__setstate__({**deepcopy(optimizer.__getstate__(), memo), "backend": optimizer.topology.backend})
    return new
