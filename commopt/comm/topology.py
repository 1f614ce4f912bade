"""Topology, or who exchanges with whom: all ranks, those of a node, and one of each node; in one order of
collectives, or in several."""

from __future__ import annotations

from dataclasses import dataclass

from commopt.comm.backend import Backend, LocalBackend, open_channels, open_control
from commopt.comm.counting import CountingBackend, Traffic
from commopt.comm.nodes import NodesBackend
from commopt.comm.receipt import Receipt


@dataclass(frozen=True)
class Channel:
    """The ranks, with an order of collectives of their own.

    Attributes:
        world: all ranks.
        intra_node: those of this rank's node; without nodes, this rank alone.
        inter_node: those with this rank's place in their nodes; without nodes, all.
    """

    world: CountingBackend
    intra_node: Backend
    inter_node: CountingBackend


class Topology:
    """The ranks of one optimizer.

    Attributes:
        backend: the backend that it was made of; what goes over this itself is counted nowhere.
        traffic: what this rank has sent, over all channels.
        receipt: what it has sent and received since that was cleared.
        channel: the ranks; ``world``, ``intra_node`` and ``inter_node`` are its.
        rank, world_size: of the world.
        nodes: how many there are; without nodes, every rank is one.
        shard_index: which of ``world_size`` equal shards of a flat buffer this rank averages: they are in the order of
            local ranks, and of nodes within.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend, self.traffic, self.receipt = backend, Traffic(), Receipt()
        self.channel = self._channel(backend)
        self.world, self.inter_node = self.channel.world, self.channel.inter_node
        self.intra_node = self.channel.intra_node
        self.rank, self.world_size, self.nodes = backend.rank, backend.world_size, self.inter_node.world_size
        self.shard_index = self.intra_node.rank * self.nodes + self.inter_node.rank

    def channels(self, n: int) -> list[Channel]:
        """``n`` more channels of the same ranks, empty where the backend has none. All ranks must call this at the
        same point; it may communicate."""
        return [self._channel(channel) for channel in open_channels(self.backend, n)]

    def control(self) -> CountingBackend:
        """All ranks once more, for small messages; ``world`` where the backend has no such channel. All ranks must
        call this at the same point; it may communicate."""
        control = open_control(self.backend)
        return self.world if control is self.backend else self._counted(control)

    def _channel(self, backend: Backend) -> Channel:
        world = self._counted(backend)
        if not isinstance(backend, NodesBackend):
            return Channel(world, LocalBackend(), world)
        return Channel(world, self._counted(backend.intra_node, intra_node=True), self._counted(backend.inter_node))

    def _counted(self, backend: Backend, intra_node: bool = False) -> CountingBackend:
        return CountingBackend(backend, self.traffic, self.receipt, intra_node)
