"""Residuals of ranks that hold pieces of parameters, put together to those of whole ones.

A rank's own part says where its residuals lie (``"places"``: see :class:`commopt.state.own_tensor.Place`). So what all
ranks of a mesh have saved can be made into residuals of whole parameters, and cut anew for any other mesh.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor

from commopt.state.own_tensor import Place, boxes
from commopt.state.state_bucket import StateBucket

RANK_LOCAL = ("worker_error", "server_error")
"""Names of a parameter's residuals: of what this rank sends, and of the part of it that this rank averages."""

PLACES = "places"
"""Key of where the residuals of a rank's own part lie, by the number of the parameter and by name, as tuples."""

Saved = dict[Any, dict[str, Any]]


def places_of(buckets: Iterable[StateBucket], params: Sequence[Tensor]) -> Saved:
    """Places of the residuals of ``buckets``, of what a node compresses; empty on one node."""
    number = {id(p): i for i, p in enumerate(params)}
    return {
        number[id(p)]: {name: astuple(place) for name, place in places.items()}
        for bucket in buckets
        if bucket.feedback is not None
        for p, places in zip(bucket.params, bucket.residual_places(bucket.feedback))
    }


def put_together(parts: Sequence[Mapping[str, Any]]) -> Saved:
    """The residuals of whole parameters, by their numbers, flat: of what ranks send, the mean over those that hold the
    same. Those without a place are of whole parameters. Zeros for the servers' where there are none.

    Args:
        parts: the own parts of all ranks of one save, each with places.
    """
    lying: dict[Any, dict[str, list[tuple[Place, Tensor]]]] = {}
    for part in parts:
        for key, places in part[PLACES].items():
            for name, place in places.items():
                residual = part["state"][key][name]
                lying.setdefault(key, {}).setdefault(name, []).append((Place(*place), residual))
    out = {key: {name: _whole(pieces) for name, pieces in entry.items()} for key, entry in lying.items()}
    for key, entry in parts[0]["state"].items():
        if key not in out and "worker_error" in entry:
            ranks = [part["state"][key] for part in parts]
            out[key] = {name: torch.stack(on_one_device([rank[name] for rank in ranks])).mean(0) for name in RANK_LOCAL}
    return {key: with_server(entry) for key, entry in out.items()}


def on_one_device(tensors: Sequence[Tensor]) -> list[Tensor]:
    """``tensors`` where the first of them is: each rank saves its part on a device of its own."""
    return [t.to(tensors[0].device) for t in tensors]


def with_server(entry: dict[str, Any]) -> dict[str, Any]:
    """The residuals of all ranks together, with zeros for those of the servers where these have none."""
    server = entry.get("server_error")
    if "worker_error" not in entry or (server is not None and server.numel()):
        return entry
    return {**entry, "server_error": torch.zeros_like(entry["worker_error"])}


def _whole(pieces: Sequence[tuple[Place, Tensor]]) -> Tensor:
    """The mean of the rows that ``pieces`` make up, flat."""
    first, like = pieces[0]
    rows = torch.zeros(first.rows, *first.shape, dtype=like.dtype, device=like.device)
    for place, elements in pieces:
        at, elements = 0, elements.reshape(-1)
        for start, sizes in boxes(place.piece, place.start, place.start + elements.numel()):
            here = tuple(slice(a + b, a + b + n) for a, b, n in zip(place.offset, start, sizes))
            n = math.prod(sizes)
            rows[place.row][here] = elements[at : at + n].view(sizes)
            at += n
    return rows.mean(0).flatten()
