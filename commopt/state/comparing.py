"""Values that must be the same, to the bit, on all ranks that hold the same: their digests, what follows where these
differ, and the repair. Functions of an optimizer."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from commopt.agreement.digest import digest
from commopt.comm import wait
from commopt.state.guard import describe_difference
from commopt.state.state_bucket import StateBucket

if TYPE_CHECKING:
    from commopt.state.packed import PackedOptimizer

logger = logging.getLogger("commopt")


def replicated(optimizer: PackedOptimizer) -> Iterator[tuple[StateBucket, str, Tensor]]:
    """Tensors that must be the same now, to the bit, on all ranks that hold the same of a bucket, each with that
    bucket and a name: parameters unless replicas differ, flat buffers that are not a rank's own, and numbers of the
    parameters."""
    for i, (bucket, group) in enumerate(optimizer.grouped_buckets()):
        where, own = f"bucket {i} ({bucket.describe()})", optimizer.rank_local(group)
        if not optimizer.replicas_differ:
            yield bucket, f"the parameters of {where}", bucket.pack_params()
        for name, flat in bucket.buffers.items():
            if name not in own:
                yield bucket, f"{name} of {where}", flat
        if bucket.numbers:
            yield bucket, f"step counts of {where}", torch.cat([n.double() for n in bucket.numbers.values()])


def digests(optimizer: PackedOptimizer) -> list[int]:
    """The digests of what :func:`replicated` gives; where ranks hold parts, each after a number that is that of
    the ranks that hold the same."""
    found = [digest(x) for _, _, x in replicated(optimizer)]
    numbers: list[int] = torch.stack([d.to(found[0].device) for d in found]).tolist() if found else []
    if not optimizer.topology.is_sharded:
        return numbers
    holders = [_holders(optimizer, bucket) for bucket, _, _ in replicated(optimizer)]
    return [number for pair in zip(holders, numbers) for number in pair]


def _holders(optimizer: PackedOptimizer, bucket: StateBucket) -> int:
    """A number of the ranks that hold the same of ``bucket``; other ranks have others, or none."""
    replicas = bucket.replicas
    return optimizer.topology.replicas.index(replicas) * optimizer.topology.world_size + replicas.members[0]


def right_replicas(optimizer: PackedOptimizer, table: list[list[int]], where: str, when: str) -> dict[int, int]:
    """Of ranks that must hold the same and do not, the rank whose replica the others are to get, by their number;
    the same on all ranks, as it follows from the digests of all.

    Args:
        table: the digests, by rank.
        where: begins the message.
        when: %d in it is that rank.

    Raises:
        commopt.optim.ReplicasDiffer: replicas differ, and cannot be repaired, or shall not.
    """
    names: dict[int, list[str]] = {}
    for bucket, name, _ in replicated(optimizer):
        names.setdefault(_holders(optimizer, bucket), []).append(name)
    rows: dict[int, dict[int, list[int]]] = {}
    for rank, row in enumerate(table):
        pairs = zip(row[::2], row[1::2]) if optimizer.topology.is_sharded else ((0, number) for number in row)
        for holders, number in pairs:
            rows.setdefault(holders, {}).setdefault(rank, []).append(number)
    rows.pop(-1, None)  # what made rows equally long
    right = {}
    for holders, by_rank in sorted(rows.items()):
        ranks, same = list(by_rank), list(by_rank.values())
        of = names.get(holders) or [f"tensor {i}" for i in range(len(same[0]))]
        called = [optimizer.topology.numbers[rank] for rank in ranks]
        chosen = optimizer.guard.decide(same, of, where, called)
        if chosen is not None:
            right[holders] = ranks[chosen]
            if optimizer.topology.rank == 0:
                logger.error("%s: %s; " + when, where, describe_difference(same, of, called), called[chosen])
    return right


def copy_replicas(optimizer: PackedOptimizer, right: Mapping[int, int]) -> None:
    """Gives ranks what must be the same on all that hold it, from the one that is ``right``, by their number."""
    for bucket, group in optimizer.grouped_buckets():
        if (chosen := right.get(_holders(optimizer, bucket))) is None:
            continue
        own, source = optimizer.rank_local(group), bucket.replicas.members.index(chosen)
        if not optimizer.replicas_differ:
            flat = bucket.pack_params()
            _copy_from(bucket, source, flat)
            bucket.unpack_params(flat)
        for name, flat in bucket.buffers.items():
            if name not in own:
                _copy_from(bucket, source, flat)
        for numbers in bucket.numbers.values():
            values = numbers.to(bucket.device, copy=True)
            _copy_from(bucket, source, values)
            numbers.copy_(values)
        bucket.active = None


def _copy_from(bucket: StateBucket, source: int, x: Tensor) -> None:
    ranks = bucket.replicas
    wait(ranks.world.broadcast(x, source), f"what rank {ranks.members[source]} has, for its replicas")
