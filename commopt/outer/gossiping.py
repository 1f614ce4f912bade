"""Common parts of outer steps without an all-reduce: each rank talks to a few others, and keeps a model of its own.

* The anchor and the outer momentum are each rank's own, as its parameters are. ``averaged()`` is the mean model of all
  ranks; ``synchronize()`` ends the round, and then gives every rank the mean of the anchors and of the momenta.
* Ranks exchange y = anchor - (anchor as the parameters have it - x): their parameters in the precision of the anchor.
  Of float32 parameters that is x.
* The ranks agree on a round as for every outer step (:mod:`commopt.outer.rounds`): two all-gathers, of 64 and 16 bytes
  a rank. So a round waits for the slowest rank; and all ranks skip one in which the parameters of any are inf or NaN,
  and are told when they stand at different places.
* No digests are compared, for nothing has to be the same on two ranks.
* Streamed, a rank sends y as it was then; the outer step that follows ``delay`` steps later moves its own anchor, on
  which "corrected" puts what it has done meanwhile, or "mix" a part of where it is. "eager" is a mean over all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from commopt.comm import Channel, ExchangingBackend, Replicas, Task, Work, check_exchanges
from commopt.outer import ending, rounds
from commopt.outer.base import OuterOptimizer
from commopt.outer.means import Entry, Means
from commopt.outer.rounds import pseudo_gradient
from commopt.outer.streaming import Streaming
from commopt.state.replicas import average_exactly, reaching_others
from commopt.state.state_bucket import StateBucket


class GossipOptimizer(OuterOptimizer):
    """An outer step on what a few other ranks have sent; see the module's docstring, and :class:`OuterOptimizer`.

    A subclass says ``exchange`` and ``outer_step``. ``last_sync_round`` of a parameter group is the number of rounds
    after which all ranks had the same for the last time; -1 if that is not known.
    """

    # what a subclass says ---------------------------------------------------------------------------------------------

    def exchange(self, bucket: StateBucket, flat: Tensor, ranks: ExchangingBackend) -> Iterator[Work]:
        """Task that exchanges ``flat``, this rank's y, with others of ``ranks``, and puts what :meth:`outer_step` is
        to be given in its place: not finite if what this rank has sent is not. Nothing else that lasts is written."""
        raise NotImplementedError

    def partners(self, bucket: StateBucket) -> list[int]:
        """Ranks of ``bucket.replicas`` that this one talks to in the round that ends now."""
        raise NotImplementedError

    def to_mean(self, anchor: Tensor, mean: Tensor) -> None:
        anchor.copy_(mean)

    def anchors_moved(self, device: torch.device, where: str) -> None:
        """Nothing: they are each rank's own."""

    def own_settings(self) -> dict[str, Any]:
        if isinstance(self.streaming, Streaming) and self.streaming.is_eager:
            raise ValueError(
                f"streaming={self.streaming!r} is not allowed with {type(self).__name__}: an eager merge goes by the "
                "mean over all ranks; allowed are merge='corrected' and 'mix'"
            )
        return {}

    # rounds -----------------------------------------------------------------------------------------------------------

    def draw_of(self, bucket: StateBucket) -> int:
        """A number of the round of ``bucket`` that ends now, or is in flight: another one for each fragment."""
        return self.round_of(bucket.fragment) * self.fragments + bucket.fragment

    knows_nodes = False

    def check_replicas(self, replicas: Replicas) -> None:
        if replicas.intra_node.world_size > 1:
            raise ValueError(
                f"{type(self).__name__} does not know nodes of several ranks, got nodes of "
                f"{replicas.intra_node.world_size}: give it a process group, or the world of these nodes"
            )
        check_exchanges(replicas.backend, type(self).__name__)

    def means_of(self, entries: Sequence[Entry], flats: list[Tensor]) -> Means:
        return Exchanged(self, entries, flats)

    def synchronize_replicas(self) -> None:
        """Ends the rounds that are under way; then all ranks have the mean of the anchors, and of the outer momenta.
        If some rank's parameters are inf or NaN, all skip that, and replicas stay different."""
        self.follow()
        where = f"{type(self).__name__}, synchronize()"
        if self._under_way():
            super().synchronize_replicas()
            if self._under_way():
                return  # it was skipped
        device = self.control_device(self.params)
        decision = rounds.agree(self.topology, device, ending.report(self, None, False), f"{where}, agreement")
        if decision.broken:
            ending.skip(self, decision.broken, known=decision.skipped)
            return
        self._take_means(where)
        for group in self.param_groups:
            group["last_sync_round"] = group["rounds"]

    def _take_means(self, where: str) -> None:
        """Gives all ranks the mean of the anchors and of the outer momenta, with the same bits."""
        means = {"anchor": [own_values(bucket) for bucket in self.buckets]}
        if self.momentum:
            means["outer_momentum"] = [bucket.buffers["outer_momentum"].clone() for bucket in self.buckets]
        with reaching_others(self.topology, where):
            for name, flats in means.items():
                average_exactly(self.topology, self.buckets, flats, f"{where}, {name}")
        for name, flats in means.items():
            for bucket, flat in zip(self.buckets, flats):
                bucket.buffers[name].copy_(flat)
        for bucket in self.buckets:
            for replica in bucket.neighbours:
                replica.copy_(bucket.buffers["anchor"])
            for p, y in zip(bucket.values, bucket.tensors("anchor")):
                p.copy_(y)

    # what is a rank's own ---------------------------------------------------------------------------------------------

    @property
    def own_anchors(self) -> bool:
        return True

    @property
    def replicas_differ(self) -> bool:
        return self.topology.copies > 1 and _differs(self.param_groups[0])

    def rank_local(self, group: dict[str, Any]) -> tuple[str, ...]:
        return self.ever_rank_local if _differs(group) else ()

    @torch.no_grad()
    def _load(self, given: dict[str, Any]) -> None:
        super()._load(given)
        if not any("last_sync_round" in group for group in given["param_groups"]):  # of the base alone
            for group in self.param_groups:
                group["last_sync_round"] = -1


def _differs(group: dict[str, Any]) -> bool:
    """True if what is of ``group`` may differ between ranks now."""
    return bool(group["round_step"] or group["rounds"] != group["last_sync_round"])


class Exchanged(Means):
    """Means that :meth:`GossipOptimizer.exchange` makes of each bucket: over some ranks, not of pseudo-gradients."""

    def __init__(self, optimizer: GossipOptimizer, entries: Sequence[Entry], flats: list[Tensor]) -> None:
        super().__init__(entries, flats, optimizer.compressor)
        self.optimizer = optimizer
        for (bucket, _), flat in zip(entries, flats):
            _to_values(bucket, flat)

    def task(self, i: int, send: Channel, reply: Channel) -> Task:
        bucket, _ = self.entries[i]
        return self.optimizer.exchange(bucket, self.flats[i], send.world) if bucket.world_size > 1 else iter(())

    def describe(self, i: int) -> str:
        bucket, _ = self.entries[i]
        ranks = [bucket.replicas.members[rank] for rank in self.optimizer.partners(bucket)]
        return f"{super().describe(i)}, exchange with rank {' and '.join(map(str, ranks)) or 'nobody'}"


def own_values(bucket: StateBucket) -> Tensor:
    """y of this rank; a new flat buffer."""
    return _to_values(bucket, pseudo_gradient(bucket))


def _to_values(bucket: StateBucket, flat: Tensor) -> Tensor:
    """Makes y of this rank of its pseudo-gradient ``flat``, in place."""
    return torch.sub(bucket.buffers["anchor"], flat, out=flat)
