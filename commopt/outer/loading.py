"""Loading: the state of an outer optimizer, and of its base."""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from commopt.optim.loading import read, report_not_own
from commopt.optim.own import MIXED, Origin, cloned
from commopt.optim.packed import WHOSE
from commopt.outer.mixed import Mixed, name_of
from commopt.sharding import like, local

if TYPE_CHECKING:
    from commopt.outer.base import OuterOptimizer

logger = logging.getLogger("commopt")

BASE = "base_"
"""Begins the names of the state of the base, where that is beside the outer state of a parameter."""


def load(optimizer: OuterOptimizer, given: dict[str, Any]) -> None:
    """Loads the state ``given`` into ``optimizer`` and its base, or the state of the base alone."""
    of_base = not any("round_step" in group for group in given["param_groups"])
    entries, origin, base = (dict[Any, Any](), None, {"state": given["state"]})
    if not of_base:
        entries, origin = read(optimizer, given)
        base = base_of_entries(given, entries, optimizer.params) or base_to_load(optimizer, given, origin)
    before = optimizer.param_groups
    # torch would go on with the tensors given
    whose = {WHOSE: optimizer.base.defaults.get(WHOSE)}  # the base may be one of ours
    groups = [{**group, **whose} for group in given["param_groups"]]
    optimizer.base.load_state_dict({"state": {}, **cloned(base), "param_groups": groups})
    optimizer.adopt_groups(before)
    optimizer.fill_from(given, entries, origin, of_base)


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
    if isinstance(base, Mixed):
        base = base.part_of(p)
    state = base.state.get(p)
    if not state and p.requires_grad:
        known = state_known_of(base, p, x) or {}
        return {name: torch.zeros((), dtype=t.dtype).expand(t.shape) for name, t in known.items()}
    numbers = (bool, int, float)
    tensors = {name: torch.tensor(float(v)) if isinstance(v, numbers) else v for name, v in (state or {}).items()}
    return {name: local(v) for name, v in tensors.items() if isinstance(v, Tensor)}


def state_known_of(base: torch.optim.Optimizer, p: Tensor, x: Tensor) -> Mapping[str, Tensor] | None:
    """What a first step of ``base`` would make as the state of ``p``, of which this rank has ``x``: tensors without
    memory, as a step on such finds. None if that is not known."""
    twin = nn.Parameter(torch.empty(x.shape, dtype=x.dtype, device="meta"))
    twin.grad = torch.empty_like(twin)
    group = next(group for group in base.param_groups if any(q is p for q in group["params"]))
    try:
        other = copy.copy(base)
        other.state = type(base.state)(dict)  # type: ignore[call-arg]
        other._optimizer_step_pre_hooks, other._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        fused = {"fused": False} if group.get("fused") else {}  # there is no such kernel without memory
        other.param_groups = [{**group, "params": [twin], **fused}]
        type(base).step(other)
    except Exception as error:  # whatever somebody's optimizer cannot do without values
        logger.warning("%s: its state before the first step is not known (%s)", type(base).__name__, error)
        return None
    return {name: t for name, t in other.state[twin].items() if isinstance(t, Tensor)}


def base_of_entries(given: dict[str, Any], entries: Mapping[Any, Any], params: Sequence[Tensor]) -> dict[str, Any]:
    """The state of the base among ``entries`` of the state ``given``; empty if it is not there."""
    ids = [i for group in given["param_groups"] for i in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for i, p in zip(ids, params):
        for name, t in entries.get(p, {}).items():
            if name.startswith(BASE):
                t = like(t, p) if t.shape == local(p).shape else t
                state.setdefault(i, {})[name.removeprefix(BASE)] = t
    return {"state": state} if state else {}
