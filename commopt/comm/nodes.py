"""Nodes with several ranks: a fast network inside each, a slow one between them.

What is sent in bulk goes over both in turn: full precision inside a node, and between nodes, compressed or not, every
rank sends the part that is its own. So the bytes that leave a node are divided by the number of its ranks.
``collectives`` has how.
"""

from __future__ import annotations

from commopt.comm.backend import Backend, OfWorld, common_devices, message_device, open_channels
from commopt.comm.grid import check_grid


class NodesBackend(OfWorld):
    """All ranks, seen as M nodes of L ranks each. The collectives are those of all ranks together.

    Args:
        world: all M L ranks.
        intra_node: those of this rank's node, L of them.
        inter_node: those that have this rank's place in the other nodes, M of them. Every node has the same order of
            places, and every place the same order of nodes.

    Attributes:
        grid: of every rank, by rank: its node, and its place in that.

    Raises:
        ValueError: on every rank, if on any of them the three do not fit together; before that, if one of them lacks
            a collective.
    """

    def __init__(self, world: Backend, intra_node: Backend, inter_node: Backend) -> None:
        self.world, self.intra_node, self.inter_node = world, intra_node, inter_node
        self.grid = check_grid(world, intra_node, inter_node, message_device(self))
        self.rank, self.world_size = world.rank, world.world_size

    @property
    def devices(self) -> tuple[str, ...] | None:
        """Those that all three can send from."""
        return common_devices(self.world, self.intra_node, self.inter_node)

    def channels(self, n: int) -> list[NodesBackend]:
        """``n`` channels within and between nodes; none where one of the two has none."""
        levels = []
        for level in (self.intra_node, self.inter_node):
            channels = (
                open_channels(level, n) if level.world_size > 1 else [level] * n
            )  # one rank alone needs no channels
            levels.append(channels)
        out = []
        for intra_node, inter_node in zip(*levels):
            channel = object.__new__(type(self))
            channel.__dict__.update(self.__dict__, intra_node=intra_node, inter_node=inter_node)
            out.append(channel)
        return out
