"""Topology, or who exchanges with whom: all ranks, those that hold the same part of a model, those of a node, and one
of each node; in one order of collectives, or in several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from commopt.comm.backend import Backend, LocalBackend, message_device, open_channels, open_control
from commopt.comm.counting import CountingBackend, Traffic
from commopt.comm.holding import Holding
from commopt.comm.nodes import NodesBackend
from commopt.comm.pipeline import gather_rows
from commopt.comm.receipt import Receipt
from commopt.comm.torch import numbers_in_world

CHANNELS = 3
"""Channels that buckets take in turn, in each direction, where the backend has several."""


@dataclass(frozen=True)
class Channel:
    """The ranks that average with each other, with an order of collectives of their own.

    Attributes:
        world: all of them.
        intra_node: those of this rank's node; without nodes, this rank alone.
        inter_node: those with this rank's place in their nodes; without nodes, all.
    """

    world: CountingBackend
    intra_node: Backend
    inter_node: CountingBackend


def channel_of(backend: Backend, traffic: Traffic, receipt: Receipt, world: CountingBackend | None = None) -> Channel:
    """The ranks of ``backend``, counted; ``world`` are all of them, if they are counted already."""
    world = world or CountingBackend(backend, traffic, receipt)
    if not isinstance(backend, NodesBackend):
        return Channel(world, LocalBackend(), world)
    inside = CountingBackend(backend.intra_node, traffic, receipt, intra_node=True)
    return Channel(world, inside, CountingBackend(backend.inter_node, traffic, receipt))


class Replicas:
    """The ranks that hold the same as this one of some parameters, and average with each other.

    Attributes:
        backend: what they were made of.
        channel: the ranks; ``world``, ``intra_node`` and ``inter_node`` are its.
        rank, world_size: among them.
        nodes: how many there are; without nodes, every rank is one.
        shard_index: which of ``world_size`` equal shards of a flat buffer this rank averages: they are in the order of
            local ranks, and of nodes within.
        members: the number of each of them among all ranks.
        channels: more channels of the same ranks; None before :meth:`open`.
    """

    def __init__(
        self,
        backend: Backend,
        traffic: Traffic,
        receipt: Receipt,
        members: Sequence[int],
        world: CountingBackend | None = None,
    ) -> None:
        self.backend, self.members = backend, list(members)
        self._traffic, self._receipt = traffic, receipt
        self.channel = self._channel(backend, world)
        self.world, self.inter_node = self.channel.world, self.channel.inter_node
        self.intra_node = self.channel.intra_node
        self.rank, self.world_size, self.nodes = backend.rank, backend.world_size, self.inter_node.world_size
        self.shard_index = self.intra_node.rank * self.nodes + self.inter_node.rank
        self.channels: list[Channel] | None = None

    def open(self) -> None:
        """Opens the channels, if that has not been done: none where the backend has none, or for one rank alone. All
        ranks must call this at the same point; it may communicate."""
        if self.channels is None:
            opened = open_channels(self.backend, 2 * CHANNELS) if self.world_size > 1 else []
            self.channels = [self._channel(channel) for channel in opened]

    def pair(self, index: int) -> tuple[Channel, Channel]:
        """The channels of bucket ``index``: for what goes out, and for what comes back; the one there is, where no
        others are open."""
        if not self.channels:
            return self.channel, self.channel
        half = len(self.channels) // 2
        return self.channels[index % half], self.channels[half + index % half]

    def pair_with(self, index: int, traffic: Traffic, receipt: Receipt) -> tuple[Channel, Channel]:
        """As :meth:`pair`, with a count and a receipt of its own."""
        send, reply = (channel_of(channel.world.inner, traffic, receipt) for channel in self.pair(index))
        return send, reply

    def _channel(self, backend: Backend, world: CountingBackend | None = None) -> Channel:
        return channel_of(backend, self._traffic, self._receipt, world)


def gather_number(backend: Backend, number: int) -> list[int]:
    """The ``number`` of each of the ranks of ``backend``, by rank."""
    row = torch.tensor([number], device=message_device(backend))
    numbers: list[int] = gather_rows(backend, row, "numbers of the ranks").flatten().tolist()
    return numbers


class Topology:
    """The ranks of one optimizer.

    Args:
        backend: those that agree on every step.
        nodes: whether ranks that hold the same parts of a mesh are grouped by nodes.
        receipt: where what is sent and received is entered; None for one of its own.

    Attributes:
        backend: the backend that it was made of; what goes over this itself is counted nowhere.
        traffic: what this rank has sent, over all channels.
        receipt: what it has sent and received since that was cleared.
        world: all ranks, which agree on every step.
        rank, world_size: of the world.
        is_sharded: whether ranks may hold parts of the model, and are asked of each parameter how.
        replicas: who averages with whom: one entry for each set of ranks that parameters were :meth:`held` by.
        copies: how many ranks hold the same, at most: 1 if nothing is averaged. Of this rank's parameters, before
            :meth:`agree_on_extent`; of all ranks' after it.
        nodes: how many nodes hold the same, at most: with 1, nothing is compressed. As ``copies``.
    """

    def __init__(self, backend: Backend, nodes: bool = True, receipt: Receipt | None = None) -> None:
        self.backend, self.traffic, self.receipt = backend, Traffic(), receipt or Receipt()
        self._with_nodes = nodes
        self.world = CountingBackend(backend, self.traffic, self.receipt)
        self.rank, self.world_size = backend.rank, backend.world_size
        self.is_sharded = hasattr(backend, "holding")
        self._alone = CountingBackend(LocalBackend())
        self.replicas: list[Replicas] = []
        self.copies = self.nodes = 1
        self._of: dict[int, Replicas] = {}
        self._inside: dict[int, CountingBackend] = {}
        self._parts: Sequence[int] | None = None
        self._stages: Sequence[int] | None = None
        self._whole: tuple[Replicas, Holding] | None = None
        if not self.is_sharded:
            self._whole = self._replicas_over(backend), Holding(backend, self.world_size)

    @property
    def numbers(self) -> Sequence[int]:
        """Of each rank, by rank, the number that a user knows it by."""
        return numbers_in_world(self.backend)

    @property
    def parts(self) -> Sequence[int]:
        """Of each rank, by rank, which part of the model it holds: ranks of one part are replicas."""
        if self._parts is None:
            self._parts = self.backend.parts if self.is_sharded else [0] * self.world_size  # type: ignore[attr-defined]
        return self._parts

    @property
    def stages(self) -> Sequence[int]:
        """Of each rank, by rank, which parameters it holds at all, whole or in parts."""
        if self._stages is None:
            self._stages = self.backend.stages if self.is_sharded else [0] * self.world_size  # type: ignore[attr-defined]
        return self._stages

    @property
    def holds_whole(self) -> bool:
        """True if every rank holds the whole model."""
        return not self.is_sharded or self.backend.holds_whole  # type: ignore[attr-defined, no-any-return]

    def same_part(self) -> list[int]:
        """The ranks that hold the same part of the model as this one."""
        return [rank for rank, part in enumerate(self.parts) if part == self.parts[self.rank]]

    @property
    def inside(self) -> Backend:
        """The ranks that hold one replica together; this rank alone where it holds a whole one."""
        return self._counted_inside(self.backend.inside) if self.is_sharded else self._alone  # type: ignore[attr-defined]

    def check(self, p: Tensor, elsewhere: bool = False) -> None:
        """Raises ValueError if the ranks cannot hold ``p``; ``elsewhere``: others average it. Communicates nothing."""
        if self.is_sharded:
            self.backend.check(p, elsewhere)  # type: ignore[attr-defined]

    def held(self, p: Tensor) -> tuple[Replicas, Holding]:
        """The ranks that hold the same of ``p`` as this one, and how all of them hold it. All ranks must call this at
        the same point; it may communicate."""
        if self._whole is not None:
            return self._whole
        self._parts = None  # they may be more now
        holding: Holding = self.backend.holding(p)  # type: ignore[attr-defined]
        if isinstance(holding.replicas, NodesBackend) and not self._with_nodes:
            holding = replace(holding, replicas=holding.replicas.world)
        pieces = tuple(self._counted_inside(ranks) for ranks in holding.pieces)
        inside = None if holding.inside is None else self._counted_inside(holding.inside)
        return self._replicas_over(holding.replicas), replace(holding, pieces=pieces, inside=inside)

    def agree_on_extent(self) -> None:
        """Makes ``copies`` and ``nodes`` those of the ranks that hold the most, as all must be in one phase. All ranks
        must call this at the same point; it communicates where ranks hold parts."""
        if self.is_sharded:
            mine = torch.tensor([self.copies, self.nodes], device=message_device(self.backend))
            self.copies, self.nodes = map(int, gather_rows(self.backend, mine, "copies of the ranks").amax(0))

    def summary(self, fp32_bytes: int) -> dict[str, Any]:
        """Traffic of this rank: ``step``, ``total``, ``fp32_bytes`` and ``ratio`` of ``comm_stats()``."""
        step = self.traffic.step.summary()
        return {
            "step": step,
            "total": self.traffic.total.summary(),
            "fp32_bytes": fp32_bytes,
            "ratio": fp32_bytes / step["bytes"] if step["bytes"] and fp32_bytes else None,
        }

    def open(self) -> None:
        """Opens the channels of all replicas, as :meth:`Replicas.open` does."""
        for ranks in self.replicas:
            ranks.open()

    def control(self) -> CountingBackend:
        """All ranks once more, for small messages; ``world`` where the backend has no such channel. All ranks must
        call this at the same point; it may communicate."""
        control = open_control(self.backend)
        return self.world if control is self.backend else CountingBackend(control, self.traffic, self.receipt)

    def among(self, backend: Backend, inside: bool) -> Channel:
        """The ranks of ``backend``, with what they send each other counted; as what stays ``inside``, or as what does
        not, but for what stays inside its nodes."""
        if inside:
            counted = self._counted_inside(backend)
            return Channel(counted, LocalBackend(), counted)
        return channel_of(backend, self.traffic, self.receipt)

    def _counted_inside(self, backend: Backend) -> CountingBackend:
        """Some ranks of a replica, with what they send each other counted as what stays inside."""
        if id(backend) not in self._inside:
            self._inside[id(backend)] = CountingBackend(backend, self.traffic, self.receipt, intra_node=True)
        return self._inside[id(backend)]

    def _replicas_over(self, backend: Backend) -> Replicas:
        if id(backend) not in self._of:
            world = self.world if backend is self.backend else None
            members = gather_number(backend, self.rank) if self.is_sharded else range(self.world_size)
            replicas = self._of[id(backend)] = Replicas(backend, self.traffic, self.receipt, members, world)
            self.replicas.append(replicas)
            self.copies, self.nodes = max(self.copies, replicas.world_size), max(self.nodes, replicas.nodes)
        return self._of[id(backend)]
