"""Loading: the state of an outer optimizer, and of its base."""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from commopt.outer import stream_state
from commopt.outer.mixed import Mixed, name_of
from commopt.outer.streaming import Streaming
from commopt.sharding import is_cut, like, local
from commopt.state.foreign import OUTER, WHOSE, ids_of, is_of_outer
from commopt.state.loading import fill, forget_users, keep_users, read, report_not_own
from commopt.state.own import MIXED, Origin, cloned
from commopt.state.saving import PARAMETER, Entries

if TYPE_CHECKING:
    from commopt.outer.base import OuterOptimizer

logger = logging.getLogger("commopt")

BASE = "base_"
"""Begins the names of the state of the base, where that is beside the outer state of a parameter."""
MOVED = "moved"
"""Name, in a rank's own part, of whether its anchors were taken over anew from parameters since the last round."""


def load(optimizer: OuterOptimizer, given: dict[str, Any]) -> None:
    """Loads the state ``given`` into ``optimizer`` and its base, or the state of the base alone."""
    of_base = not is_of_outer(given)
    entries, origin, base = (dict[Any, Any](), None, {"state": given["state"]})
    if not of_base:
        entries, origin = read(optimizer, given)
        base = base_of_entries(given, entries, optimizer.params) or base_to_load(optimizer, given, origin)
    before = optimizer.param_groups
    # torch would go on with the tensors given
    groups = _groups_of_base(optimizer, given["param_groups"], of_base)
    optimizer.base.load_state_dict({"state": {}, **cloned(base), "param_groups": groups})
    adopt_groups(optimizer, before)
    _fill(optimizer, given, entries, origin, of_base)


def adopt_groups(optimizer: OuterOptimizer, before: list[dict[str, Any]]) -> None:
    """Makes the groups of the base those of ``optimizer``, after it was loaded; what they lack is as ``before``."""
    optimizer.param_groups = optimizer.base.param_groups
    for old, group in zip(before, optimizer.param_groups):
        for key, default in optimizer.defaults.items():
            group.setdefault(key, old.get(key, default))
        group[OUTER] = optimizer.saved_as()


def _fill(
    optimizer: OuterOptimizer, given: dict[str, Any], entries: Entries, origin: Origin | None, of_base: bool
) -> None:
    """Takes over ``entries`` of the state ``given``, when the base has loaded its own; ``of_base``: that is all."""
    if of_base:
        for group in optimizer.param_groups:
            group.update(optimizer.position())
        optimizer._moved = True  # to parameters that may differ between ranks
    else:
        stream_state.complete(optimizer, given["param_groups"])
        if optimizer.owns(origin):
            part = given.get("residuals") or {}
            stream_state.take_over_own(optimizer, part)
            optimizer._moved |= part.get(MOVED, False)
    users = forget_users(optimizer, {**given, "state": {}} if of_base else given)
    fill(optimizer, entries, origin)
    keep_users(optimizer, users)
    for bucket in optimizer.buckets:
        for p, x, anchor in zip(bucket.params, bucket.values, bucket.tensors("anchor")):
            if PARAMETER not in entries.get(p, {}):
                x.copy_(anchor)


def _groups_of_base(
    optimizer: OuterOptimizer, given: Sequence[Mapping[str, Any]], of_base: bool
) -> list[dict[str, Any]]:
    """The parameter groups ``given`` as the base is to load them: not as those of an outer optimizer, and where they
    come with the state of a base alone, without what another outer optimizer had."""
    own, name = {OUTER}, optimizer.base.defaults.get(WHOSE)
    if of_base:
        own |= {*optimizer.defaults, *Streaming().position()} - optimizer.base.defaults.keys()
    groups = [{key: value for key, value in group.items() if key not in own} for group in given]
    return [{WHOSE: name, **group} for group in groups] if name is not None else groups


def base_to_load(optimizer: OuterOptimizer, given: dict[str, Any], origin: Origin | None) -> dict[str, Any]:
    """The state of the base in ``given``, whose own part is of ``origin``; empty if there is none for this rank. Says
    what is lacking."""
    base = (given.get("residuals") or {}).get("base")
    name = name_of(optimizer.base)
    if base is None:
        if optimizer.topology.rank == 0:
            logger.warning(
                "%s: the loaded state has no rank's own part: every rank starts at the anchor, and its base %s with no "
                "state. Save every rank's (commopt.optim.split_state_dict) to keep them.",
                type(optimizer).__name__, name,
            )  # fmt: skip
        return {}
    if optimizer.owns(origin):
        return dict(base)
    mixed = origin is None or origin[0] == MIXED
    state = "with no state" if mixed else "with that rank's state"
    report_not_own(
        optimizer, origin, f"its parameters and the state of {name}", f"it starts at the anchor, and {name} {state}"
    )
    return {} if mixed else dict(base)


def state_of_base(base: torch.optim.Optimizer, p: Tensor, x: Tensor) -> dict[str, Tensor]:
    """The state that ``base`` has of ``p``, of which this rank has ``x``, as plain tensors; before it has stepped,
    zeros like those that it will have, which take no memory."""
    state = base.state.get(p)
    if not state and p.requires_grad:
        known = state_known_of(base, p, x) or {}
        return {name: torch.zeros((), dtype=t.dtype, device="cpu").expand(t.shape) for name, t in known.items()}
    return {name: local(t) for name, t in _tensors(state or {}).items()}


def _tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """State that a base keeps of a parameter, but for what is neither a tensor nor a number."""
    numbers = {
        k: torch.tensor(float(v), dtype=torch.float64, device="cpu") for k, v in state.items() if isinstance(v, Real)
    }
    return {k: v for k, v in {**state, **numbers}.items() if isinstance(v, Tensor)}


def refuse_uncuttable(base: torch.optim.Optimizer) -> None:
    """Raises ValueError, on every rank, if the state of ``base`` has something of a sharded parameter that is not cut
    as that is: a checkpoint that all ranks write together would not know where it lies."""
    whole = base
    for p in (p for group in whole.param_groups for p in group["params"] if is_cut(p)):
        base = whole.part_of(p) if isinstance(whole, Mixed) else whole
        for name, value in base.state.get(p, {}).items():
            several = isinstance(value, (list, tuple, dict)) and _has_tensors(value)
            if several or (isinstance(value, Tensor) and value.dim() and local(value).shape != local(p).shape):
                what = "several tensors" if several else f"of shape {tuple(value.shape)}"
                raise ValueError(
                    f"state {name!r} of {name_of(base)} is {what}, of a sharded parameter of shape {tuple(p.shape)}: "
                    "it cannot be in a checkpoint, nor go to other ranks. Allowed are bases whose state is numbers and "
                    "tensors of the shape of their parameters, as AdamW's; or train unsharded replicas"
                )


def _has_tensors(values: Any) -> bool:
    return any(isinstance(v, Tensor) for v in (values.values() if isinstance(values, dict) else values))


def state_known_of(base: torch.optim.Optimizer, p: Tensor, x: Tensor) -> Mapping[str, Tensor] | None:
    """State that a first step of ``base`` would make for ``p``, of which this rank has ``x``, as such a step finds: on
    tensors without memory, or on zeros where it looks at values. None if that is not known."""
    if isinstance(base, Mixed):
        base = base.part_of(p)
    group = next(group for group in base.param_groups if any(q is p for q in group["params"]))
    try:
        return _after_a_step(base, {**group, **({"fused": False} if group.get("fused") else {})}, x.to("meta"))
    except Exception:  # whatever somebody's optimizer cannot do without values
        try:
            return _after_a_step(base, group, torch.zeros_like(x))
        except Exception as error:
            if base not in _unknown:
                _unknown.add(base)
                logger.warning("%s: its state before the first step is not known (%s)", type(base).__name__, error)
            return None


_unknown: WeakSet[torch.optim.Optimizer] = WeakSet()


def _after_a_step(base: torch.optim.Optimizer, group: Mapping[str, Any], x: Tensor) -> dict[str, Tensor]:
    """The state that ``base`` makes of a parameter like ``x`` in ``group``, whose gradient is zeros."""
    twin = nn.Parameter(x)
    twin.grad = torch.zeros_like(x)
    other = copy.copy(base)
    changed = {k: copy.copy(v) for k, v in vars(base).items() if isinstance(v, (list, dict, set))}  # maybe, in place
    clones = {k: v.clone() for k, v in vars(base).items() if isinstance(v, Tensor)}
    other.__dict__.update(changed | clones)
    other.state = type(base.state)(dict)  # type: ignore[call-arg]
    other._optimizer_step_pre_hooks, other._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    other.param_groups = [{**group, "params": [twin]}]
    with torch.random.fork_rng(devices=[x.device] if x.device.type == "cuda" else []):
        type(base).step(other)
    return _tensors(other.state[twin])


def base_of_entries(given: dict[str, Any], entries: Mapping[Any, Any], params: Sequence[Tensor]) -> dict[str, Any]:
    """The state of the base among ``entries`` of the state ``given``; empty if it is not there."""
    ids = ids_of(given)
    state: dict[int, dict[str, Tensor]] = {}
    for i, p in zip(ids, params):
        for name, t in entries.get(p, {}).items():
            if name.startswith(BASE):
                t = like(t, p) if t.shape == local(p).shape else t
                state.setdefault(i, {})[name.removeprefix(BASE)] = t
    return {"state": state} if state else {}
