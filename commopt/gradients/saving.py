"""Residuals of gradients <-> what is saved."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor

from commopt.comm import MeshBackend
from commopt.gradients.loco import EXACTLY
from commopt.gradients.mean import GradientMean
from commopt.gradients.sharded import ShardedDoor
from commopt.sharding import is_sharded
from commopt.state import saving
from commopt.state.consolidate import with_own
from commopt.state.foreign import ids_of
from commopt.state.own import MIXED, Origin, digest_of, origin_of, why_left_out
from commopt.state.own_tensor import Place
from commopt.state.places import PLACES, RANK_LOCAL
from commopt.state.saving import Entries
from commopt.state.split import MERGED, TOGETHER, refuse_outdated

logger = logging.getLogger("commopt")

EXACT_LEFT = "warmup_steps_left"
"""Key of how many means in full precision are to come."""
SCALE = "loss_scale"
"""Key of the scale of the loss that residuals have."""
ADDED_UP = "added_up"
"""Key of how much of a step the residual of each parameter is: as many times itself as there are replicas, where their
gradients are added up; once, where their mean is taken."""


def saved_residuals(mean: GradientMean, sharded: ShardedDoor | None) -> dict[str, Any]:
    """``handle.state_dict()``: as of an optimizer whose parameters are those of the model, in its order."""
    part = {**saving.whose(_origin(mean, sharded), mean.topology), "state": mean.method.own(mean.buckets, mean.params)}
    part["nodes"] = nodes_of(mean, sharded)
    common = mean.method.common(mean.buckets, mean.params)
    if sharded is not None:
        part["state"] |= sharded.own(mean.params)
    if isinstance(mean.topology.backend, MeshBackend):  # parameters may be in pieces
        part[PLACES] = mean.method.places(mean.buckets, mean.params)
        for i in [i for i in common if is_sharded(mean.params[i])]:
            part["state"].setdefault(i, {}).update(common.pop(i))
    _add_loaded_residuals(part, mean)
    part["digest"] = digest_of(part)
    group = {SCALE: mean.scale.value, EXACT_LEFT: mean.exact_left, ADDED_UP: _added_up(mean)}
    groups = [{"params": list(range(len(mean.params))), **group}]
    return {"param_groups": groups, "state": common, "residuals": part}


def _added_up(mean: GradientMean) -> list[float]:
    factors = {id(p): bucket.factor for bucket in mean.buckets for p in bucket.params}
    return [factors.get(id(p), 1.0) for p in mean.params]


def nodes_of(mean: GradientMean, sharded: ShardedDoor | None) -> int:
    """Number of nodes whose ranks have residuals of parts of the whole; where each has one of all of it, each is as a
    node. One node has no residual: what it takes comes out, the same on all of its ranks."""
    whole = mean.method.of_whole or (sharded is not None and sharded.whole)
    return mean.topology.world_size if whole and mean.topology.nodes > 1 else mean.topology.nodes


def _add_loaded_residuals(part: dict[str, Any], mean: GradientMean) -> None:
    """Adds what was loaded on one node and has not come out yet: of parameters that have had no gradient since. It is
    the same on all ranks, and of the whole."""
    for i, p in enumerate(mean.params):
        if id(p) not in mean.loaded_residuals:
            continue
        residual, entry = mean.loaded_residuals[id(p)].flatten().clone(), part["state"].setdefault(i, {})
        if PLACES in part:
            replicas, _ = mean.topology.held(p)
            place = Place.of(p, mean.loaded_residuals[id(p)].shape, 0, replicas.rank, replicas.world_size)
            part[PLACES].setdefault(i, {})["worker_error"] = astuple(place)
        entry.update(worker_error=residual, server_error=residual[:0])


@torch.no_grad()
def load_residuals(mean: GradientMean, given: Mapping[str, Any], sharded: ShardedDoor | None) -> None:
    """``handle.load_state_dict()``. Raises ValueError for the residuals of another model, and where weights are
    gathered with what ranks load, on all of them if one is given such."""
    if sharded is None or not sharded.weights:
        _load_own(mean, given, sharded)
        return
    error: Exception | None = None
    weights: Sequence[Any] = ()
    try:
        weights = _load_own(mean, given, sharded)
    except Exception as caught:  # whatever it is, the others wait
        error = caught
    sharded.load_weights(weights, error)


def _load_own(mean: GradientMean, given: Mapping[str, Any], sharded: ShardedDoor | None) -> Sequence[Any]:
    """Loads what needs no other rank. Returns what :meth:`ShardedDoor.load_weights` takes."""
    given = with_own(dict(given), mean.topology, nodes_of(mean, sharded))
    refuse_outdated([given["residuals"]])
    ids = ids_of(given)
    if len(ids) != len(mean.params):
        raise ValueError(
            f"the loaded residuals are of {len(ids)} parameters, the model has {len(mean.params)} to train"
        )
    here = _origin(mean, sharded)
    if TOGETHER in given and origin_of(given["residuals"]) != here:
        given = {**given, "residuals": given[TOGETHER]}
    entries, origin = saving.read(given, mean.params, mean.topology.rank, mean.topology.world_size)
    why, nodes = why_left_out(origin, here), given["residuals"].get("nodes")
    if origin is not None and origin[0] != MERGED and nodes != nodes_of(mean, sharded):
        why = f"of {nodes} nodes, and there are {nodes_of(mean, sharded)} here; they start again from 0"
        origin = (MIXED, *origin[1:])  # of another part, or not the same on all ranks of a node
    entries = _as_added_up(entries, mean, given["param_groups"][0].get(ADDED_UP))
    before = dict(mean.loaded_residuals)
    mean.loaded_residuals.clear()

    def fold(p: Tensor, residual: Tensor) -> None:
        if residual.any():
            mean.loaded_residuals[id(p)] = mean.loaded_residuals.get(id(p), torch.zeros_like(residual)) + residual

    weights: Sequence[Any] = ()
    try:
        left_out = mean.method.load(mean.buckets, entries, origin, here, fold)
        if sharded is not None:
            known = origin is not None and (origin == here or origin[0] == MERGED)
            some_left, weights = sharded.load(mean.params, entries, known, mine=origin == here)
            left_out = left_out or some_left
    except BaseException:
        mean.loaded_residuals.clear()
        mean.loaded_residuals.update(before)
        raise
    mean.scale.loaded(given["param_groups"][0].get(SCALE))
    mean.exact_left = given["param_groups"][0].get(EXACT_LEFT, 0)
    if left_out:
        logger.warning("compress_gradients: the residuals in the loaded state are %s.", why)
    return weights


def _as_added_up(entries: Entries, mean: GradientMean, theirs: Sequence[float] | None) -> Entries:
    """``entries`` with residuals that are as much of what a step goes by as they were where they were saved: with a sum
    over other ranks, or a mean in place of a sum, they count as many times as gradients do here."""
    if theirs is None or theirs == (here := _added_up(mean)):
        return entries
    out = dict(entries)
    for p, there, now in zip(mean.params, theirs, here):
        if there != now and p in out:
            out[p] = {k: v * (there / now) if k in RANK_LOCAL else v for k, v in out[p].items()}
    exactly = out.get(EXACTLY, {})
    return {**out, EXACTLY: {k: v for k, v in exactly.items() if not isinstance(v, Tensor)}}  # as other numbers


def _origin(mean: GradientMean, sharded: ShardedDoor | None) -> Origin:
    rank, world_size, layout = saving.origin_here(mean.buckets, mean.params, mean.topology)
    if sharded is not None and sharded.nodes:
        layout = zlib.crc32(f"{layout} {sharded.nodes}".encode())
    return rank, world_size, layout
