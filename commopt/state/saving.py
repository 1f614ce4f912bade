"""State in buckets -> what is saved, and back: functions of buckets, of what is loaded, and of whose it is.

What must be equal on all ranks is in ``state``; a rank's own part is beside it. An optimizer declares what that is
(``rank_local``), and everything here follows: each rank saves its own, loads its own, else the mean of all ranks', else
leaves what it has.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from commopt.comm import Topology
from commopt.sharding import cut, cut_alike, is_sharded, local
from commopt.state.foreign import ids_of
from commopt.state.own import MIXED, NAMES, Origin, belongs, cloned, origin_of, same_as_in
from commopt.state.own_tensor import OwnTensor
from commopt.state.split import MERGED, RANK_LOCAL, refuse_outdated
from commopt.state.state_bucket import StateBucket

Entries = dict[Any, dict[str, Any]]
"""State by parameter; by other keys what users have put there."""

PARAMETER = "parameter"
"""Name of a parameter's own value where ranks have other ones."""


def numbers_in(buckets: Sequence[StateBucket], params: Sequence[Tensor]) -> list[list[int]]:
    """The numbers of the parameters of each bucket, in order."""
    order = {id(p): i for i, p in enumerate(params)}
    return [[order[id(p)] for p in bucket.params] for bucket in buckets]


def layout_of(numbers: Sequence[Sequence[int]], topology: Topology) -> int:
    """A checksum of which parameters are in which bucket, and of where ranks are: residuals of one layout mean nothing
    in another. Nodes of one rank each, in order, are no nodes."""
    grid = getattr(topology.backend, "grid", "")
    where = "" if grid == [(rank, 0) for rank in range(topology.world_size)] else grid
    return zlib.crc32(f"{numbers}{where}".encode())


def origin_here(buckets: Sequence[StateBucket], params: Sequence[Tensor], topology: Topology) -> Origin:
    """The origin of what this rank saves now."""
    return topology.rank, topology.world_size, layout_of(numbers_in(buckets, params), topology)


def buckets_of(part: Mapping[str, Any], count: int, topology: Topology) -> list[list[int]]:
    """The numbers of the parameters in the buckets that a rank's own ``part`` is of, if a world like this one, with
    ``count`` parameters, can make the same ones, or if it is of all ranks together, which fits those of any world;
    empty if that is not known, or cannot be."""
    numbers = part.get("buckets")
    if not isinstance(numbers, list) or any(not isinstance(run, list) for run in numbers):
        return []
    flat = [i for run in numbers for i in run]
    fits = all(type(i) is int and 0 <= i < count for i in flat) and len({*flat}) == len(flat)
    here = part.get("world_size") == topology.world_size and layout_of(numbers, topology) == part["layout"]
    return numbers if fits and (here or part["rank"] == MERGED) else []


def whose(origin: Origin, topology: Topology) -> dict[str, Any]:
    """Beginning of a rank's own part: the ``origin``, and where the rank stands among the nodes."""
    rank, world_size, layout = origin
    shard_index = next((ranks.shard_index for ranks in topology.replicas), 0)
    return {
        "rank": rank, "world_size": world_size, "layout": layout, "nodes": topology.nodes, "shard_index": shard_index,
    }  # fmt: skip


def own_states(
    declared: Iterable[tuple[StateBucket, Sequence[str]]], params: Sequence[Tensor], value: Callable[[Tensor], Tensor]
) -> dict[int, dict[str, Tensor]]:
    """This rank's own state of each parameter, by its number, as copies: residuals, and what is ``declared`` of its
    bucket. ``value`` gives a parameter's own value."""
    out: dict[int, dict[str, Tensor]] = {id(p): {} for p in params}
    for bucket, names in declared:
        for p, residuals in zip(bucket.params, bucket.residuals()):
            out[id(p)].update(residuals)
        for name in names:
            if name == PARAMETER:
                mine = [value(p) for p in bucket.params]
            else:
                mine = bucket.tensors(name) if name in bucket.buffers else []
            for p, tensor in zip(bucket.params, mine):
                out[id(p)][name] = tensor
    numbers = {id(p): i for i, p in enumerate(params)}  # of one that is in a group twice the last, as torch has it
    return {i: cloned(out[key]) for key, i in numbers.items() if out[key]}


def check_fits(given: Mapping[str, Any], params: Sequence[Tensor], buckets: Sequence[StateBucket]) -> None:
    """Raises ValueError if what is loaded is of another model, or from before names were changed."""
    refuse_outdated([given.get("residuals")], given["param_groups"])
    ids = ids_of(given)
    if len(ids) != len(params):
        return  # torch raises, and says why
    state = {id(p): entry for bucket in buckets for p, entry in zip(bucket.params, bucket.state())}
    own = {
        id(p): _own_shapes(bucket, j) for bucket in buckets for j, p in enumerate(bucket.params) if not is_sharded(p)
    }
    part = (given.get("residuals") or {}).get("state", {})
    check_waiting({i: (p, given["state"].get(i, {})) for i, p in zip(ids, params) if id(p) not in state}, buckets)
    for i, p in zip(ids, params):
        mine_own = own.get(id(p), {})
        for name, value in part.get(i, {}).items():
            if name in mine_own or name in RANK_LOCAL:
                check_tensor(i, name, value)
            if isinstance(value, Tensor) and name in mine_own:
                check_shape(i, name, value, mine_own[name], p)
        for name, mine in state.get(id(p), {}).items():
            value = given["state"].get(i, {}).get(name)
            if mine.numel() != 1 or not isinstance(value, Real):
                check_tensor(i, name, value)
            if not isinstance(value, Tensor) or value.numel() == mine.numel() == 1 or isinstance(value, OwnTensor):
                continue
            check_shape(i, name, value, mine.shape, p)
            if not cut_alike(value, p):
                raise ValueError(
                    f"parameter {i}: {name} in the loaded state is cut over ranks, and the parameter not like it: "
                    "load it with torch.distributed.checkpoint, or give whole tensors (full_tensor())"
                )


def check_waiting(frozen: Mapping[Any, tuple[Tensor, Mapping[str, Any]]], buckets: Sequence[StateBucket]) -> None:
    """Raises ValueError if what ``frozen`` parameters have, each with its entry, would not fit into buckets such as
    these: it is taken up in the midst of a run."""
    numbers = set[str]().union(*(bucket.numbers for bucket in buckets))
    flats = set[str]().union(*(bucket.buffers for bucket in buckets))
    for i, (p, entry) in frozen.items():
        for name in (name for name, value in entry.items() if value is not None):
            value, is_number = entry[name], name in numbers
            if name in flats or (is_number and not isinstance(value, Real)):
                check_tensor(i, name, value)
            if isinstance(value, Tensor) and (name in flats or (is_number and value.numel() != 1)):
                check_shape(i, name, value, torch.Size() if is_number else p.shape, p)


def _own_shapes(bucket: StateBucket, index: int) -> dict[str, torch.Size]:
    """Shapes of what a rank may have as its own of a parameter that it has all of; residuals go where they can."""
    return {
        PARAMETER: bucket.values[index].shape,
        **{name: bucket.tensors(name)[index].shape for name in bucket.buffers if name not in RANK_LOCAL},
    }


def check_tensor(i: Any, name: str, value: Any) -> None:
    """Raises ValueError unless ``value``, called ``name`` in the loaded state of parameter ``i``, is a tensor, or
    None."""
    if value is not None and not isinstance(value, Tensor):
        raise ValueError(f"parameter {i}: {name} in the loaded state is {value!r}, not a tensor: it is damaged")


def check_shape(i: Any, name: str, value: Tensor, shape: torch.Size, p: Tensor) -> None:
    """Raises ValueError unless ``value``, called ``name`` in the loaded state of parameter ``i``, has ``shape``."""
    if value.shape != shape:
        raise ValueError(
            f"parameter {i}: {name} in the loaded state has shape {tuple(value.shape)}, but the parameter "
            f"has shape {tuple(p.shape)}: it is the state of another model"
        )


def read(
    given: Mapping[str, Any], params: Sequence[Tensor], rank: int, world_size: int
) -> tuple[Entries, Origin | None]:
    """Reads what is loaded, by parameter, and whose own part is in it. What differs between ranks is this rank's own
    or the mean of all; else, but for residuals, that of the rank whose ``state`` this is."""
    part = given.get("residuals") or {}
    origin = origin_of(part)
    mine = belongs(origin, rank, world_size)
    if origin is not None and not mine and not same_as_in(given["state"], part):
        origin = (MIXED, *origin[1:])
    entries = without_values(given["state"])
    for i, entry in part.get("state", {}).items():
        taken = {name: t for name, t in entry.items() if t is not None and (mine or name in RANK_LOCAL)}
        entries.setdefault(i, {}).update(taken)
    return by_parameter(given, entries, params), origin


def without_values(state: Mapping[Any, Any]) -> Entries:
    """The entries of ``state`` without what would be a parameter's value: only an own part has such. It is a user's.
    And without None, which torch's SGD keeps where there is no momentum: it is as if that were not there."""
    entries = ((key, entry) for key, entry in state.items() if isinstance(entry, Mapping))
    return {
        key: {name: value for name, value in entry.items() if value is not None and name != PARAMETER}
        for key, entry in entries
    }


def by_parameter(given: Mapping[str, Any], state: Mapping[Any, Any], params: Sequence[Tensor]) -> dict[Any, Any]:
    """``state`` of what is loaded, with parameters for their numbers."""
    ids = ids_of(given)
    numbers = dict(zip(ids, params))
    return {numbers.get(key, key): entry for key, entry in state.items()}


def added_by_users(state: Mapping[Any, Any], ours: Mapping[Tensor, Iterable[str]]) -> dict[Any, Any]:
    """Entries that users have added to ``state``: other keys than parameters, and to a parameter's entry. ``ours``
    is what we have put there. What a parameter that is frozen has of our names waits until it is trained again."""
    out: dict[Any, Any] = {}
    waiting = set[str]().union(*ours.values())
    for key, entry in state.items():
        if not isinstance(key, Tensor):
            out[key] = entry
            continue
        dropped = NAMES | {*ours[key]} if key in ours else NAMES - waiting
        if added := {k: v for k, v in entry.items() if k not in dropped}:
            out[key] = {k: v for k, v in added.items() if not isinstance(v, OwnTensor)}
    return out


def fill(
    buckets: Sequence[StateBucket], entries: Mapping[Tensor, Mapping[str, Any]], starts: Mapping[str, float]
) -> None:
    """Copies ``entries`` into ``buckets``, and own values into their parameters. What is lacking starts from
    ``starts``, or from 0; what is not trainable here is left out."""
    for bucket in buckets:
        bucket.active = None
        for p, mine in zip(bucket.params, bucket.state()):
            entry = entries.get(p, {})
            for name, tensor in mine.items():
                mine_of_it = local(tensor)
                if name in entry:
                    mine_of_it.copy_(cut(torch.as_tensor(entry[name]), p).reshape(mine_of_it.shape))
                else:
                    mine_of_it.fill_(starts.get(name, 0.0))
            # the state of a plain Adam has one counter: its second moment never stopped
            if "variance_step" in mine and "variance_step" not in entry:
                mine["variance_step"].copy_(mine["step"])
            if PARAMETER in entry:
                x = local(p.detach())
                x.copy_(cut(entry[PARAMETER], p).reshape(x.shape))


def take_up(buckets: Sequence[StateBucket], waiting: Mapping[Tensor, Mapping[str, Any]]) -> None:
    """Copies what was ``waiting`` for parameters to be trained into new ``buckets``; what is lacking stays as it is."""
    entries: Entries = {}
    for bucket in buckets:
        for p, mine in zip(bucket.params, bucket.state()):
            entry = waiting.get(p, {}).items()
            found = {name: value for name, value in entry if name in mine and value is not None}
            made = {name: tensor for name, tensor in mine.items() if not found or name != "variance_step"}
            entries[p] = {**made, **found}
    fill(buckets, entries, {})


def fill_residuals(
    buckets: Sequence[StateBucket],
    entries: Mapping[Tensor, Mapping[str, Any]],
    origin: Origin | None,
    here: Origin,
    expected: Callable[[Tensor], bool],
    fold: Callable[[Tensor, Tensor], None],
) -> bool:
    """Copies the residuals in ``entries`` into ``buckets``, or this rank's share of those of all ranks of another
    world. Those of another rank, or in another layout, start again from 0.

    Args:
        buckets, entries: as for :func:`fill`.
        origin: whose residuals they are.
        here: this rank.
        expected: whether the state of a parameter is of a run that had residuals.
        fold: adds what is left of a parameter's residual to what is compressed, where one node compresses no more.

    Returns:
        whether residuals were left out, also where none are kept.
    """
    dropped: Any = False
    nothing = torch.zeros((), dtype=torch.float32, device="cpu")
    merged = origin is not None and origin[0] == MERGED
    for bucket in buckets:
        residuals: Sequence[Any] = bucket.residuals() or [None] * len(bucket.params)
        for i, (p, mine) in enumerate(zip(bucket.params, residuals)):
            worker, server = (entries.get(p, {}).get(name) for name in RANK_LOCAL)
            if worker is None or server is None:
                dropped, worker, server = dropped or expected(p), nothing, nothing
            elif mine is None and bucket.replicas.nodes == 1 and (origin == here or merged):
                # those of all are of the whole parameter; a rank's own of its piece, and without a server's, maybe
                for part in (worker, server) if server.numel() else (worker,):
                    piece = part if origin == here else cut(part.reshape(p.shape), p)
                    fold(p, piece.to(bucket.device).reshape(bucket.shapes[i]))
            elif mine is not None and merged:
                worker, server = (cut(part.reshape(p.shape), p).reshape(-1) for part in (worker, server))
                worker, server = _share_of(bucket, i, mine, worker, server)
            elif mine is None or origin != here or not _same_sizes(mine, worker, server):
                dropped, worker, server = dropped or worker.any() or server.any(), nothing, nothing
            if mine is not None:
                for name, part in (("worker_error", worker), ("server_error", server)):
                    mine[name].copy_(part.reshape(mine[name].shape) if part.dim() else part)
    return bool(dropped)


def _share_of(
    bucket: StateBucket, i: int, mine: Mapping[str, Tensor], worker: Tensor, server: Tensor
) -> tuple[Tensor, Tensor]:
    """Of the residuals of all ranks of another world, of parameter ``i``: of the mean of the workers' what this rank
    compresses, of the servers' what it averages."""
    feedback = bucket.feedback
    assert feedback is not None

    def own(whole: Tensor, share: int, chunk: Tensor, part: Tensor) -> Tensor:
        start = bucket.start_of(i, share, chunk)
        return whole[start : start + part.numel()].view(part.shape)

    return (
        own(worker, bucket.local_rank, feedback.worker, mine["worker_error"]),
        own(server, bucket.shard_index, feedback.server, mine["server_error"]),
    )


def _same_sizes(mine: Mapping[str, Tensor], worker: Tensor, server: Tensor) -> bool:
    return (mine["worker_error"].numel(), mine["server_error"].numel()) == (worker.numel(), server.numel())
