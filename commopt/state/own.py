"""A rank's own part of a state: whose it is, and whether it is whole.

Tools for distributed checkpoints take the states of all ranks for equal. Of each tensor and number they write one, of
any rank, and every rank gets that back: a mixture, unless everything comes from one rank by chance. So each rank's own
part carries a digest of what is in it, and loading takes no part whose digest is not that of its contents.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from commopt.agreement.digest import digest
from commopt.state.split import MERGED, RANK_LOCAL

Origin = tuple[int, int, int]
"""Whose an own part is: rank (MERGED for all ranks together, MIXED), world size, and checksum of the layout of the
buckets."""

MIXED = -2
"""The rank in the origin of a part that no rank has saved like that."""

_WHOSE = ("rank", "world_size", "layout", "nodes", "shard_index")
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

NAMES = frozenset(
    (
        *RANK_LOCAL, "step", "variance_step", "interval_step", "compressed_step", "exp_avg", "exp_avg_sq",
        "max_exp_avg_sq", "fresh_exp_avg_sq", "mean_momentum", "scaling_coeff", "trust_ratio_weight",
        "momentum_buffer", "outer_momentum", "anchor", "error_buffer",
        "sent_pseudo_gradient",
    )
)  # fmt: skip
"""Names of the state of commopt's optimizers, and of torch's Adam and SGD. One of these that an optimizer has no use
for comes from another optimizer: it is dropped when it is loaded, and not kept like what a user has added."""


def digest_of(part: Mapping[str, Any]) -> int:
    """A checksum of the tensors of an own part, by name, and of whose it is."""
    words = [(name, part.get(name)) for name in _WHOSE]
    words += [(name, int(digest(t))) for name, t in _tensors(part)]
    return zlib.crc32(str(words).encode())


def origin_of(part: Mapping[str, Any]) -> Origin | None:
    """Whose ``part`` is; None if there is none. A mixture if its digest is not that of its contents; from before there
    were digests, it counts as whole."""
    if not part:
        return None
    rank = part["rank"]
    if rank != MERGED and "digest" in part and part["digest"] != digest_of(part):
        rank = MIXED
    return (rank, part["world_size"], part["layout"])


def same_as_in(state: Mapping[Any, Any], part: Mapping[str, Any]) -> bool:
    """True if ``state`` is that of the rank whose ``part`` is: what both have is equal, to the bit."""
    for i, entry in part.get("state", {}).items():
        for name, mine in entry.items():
            other = state.get(i, {}).get(name)
            both = isinstance(mine, Tensor) and isinstance(other, Tensor)
            if name not in RANK_LOCAL and both and not torch.equal(_bits(mine), _bits(other)):
                return False
    return True


def belongs(origin: Origin | None, rank: int, world_size: int) -> bool:
    """True if an own part is for ``rank`` of ``world_size``: all ranks' together, one rank's alone, that rank's; and
    in a world that has lost ranks, where those that are left have moved up, that of the same rank or a later one."""
    if origin is None or origin[0] == MIXED:
        return False
    if origin[0] == MERGED or origin[1] == 1 or origin[:2] == (rank, world_size):
        return True
    return world_size < origin[1] and rank <= origin[0]


def describe(origin: Origin | None) -> str:
    """Whose it is, in words."""
    if origin is None:
        return "missing"
    if origin[0] == MIXED:
        return "a mixture of several ranks'"
    return f"that of rank {origin[0]} of {origin[1]}"


def why_left_out(origin: Origin | None, here: Origin) -> str:
    """Why residuals of ``origin`` are not taken ``here``, and what would keep them."""
    if origin == here:
        return "this rank's, of another way to compress; what has no place here is left out"
    if origin is not None and origin[:2] == here[:2]:
        return (
            "of other buckets than those here: parameters were frozen, or not, or bucket_mb or the nodes were others "
            "when that run began; they start again from 0. Make all as it was then, load, and freeze parameters later"
        )
    return (
        f"{describe(origin)} (rank, world size, layout: {origin}), not of {here}; they start again from 0. Save those "
        "of every rank to keep them (commopt.optim.split_state_dict, or consolidate_state_dict() on all ranks before "
        "one saves)"
    )


def cloned(tree: Any) -> Any:
    """``tree`` of dicts, lists and tuples with a copy of every tensor in it."""
    if isinstance(tree, Tensor):
        return tree.clone()
    if isinstance(tree, dict):
        return {key: cloned(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(cloned(value) for value in tree)
    return tree


def _bits(t: Tensor) -> Tensor:
    return t.detach().reshape(-1).contiguous().view(_BITS[min(t.element_size(), 8)])


def _tensors(tree: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """All plain tensors in nested dicts, with their paths."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _tensors(value, f"{name}.{key}")
    elif type(tree) in (Tensor, torch.nn.Parameter) and tree.layout == torch.strided:
        yield name, tree
