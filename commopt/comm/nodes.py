"""Nodes with several ranks: a fast network inside each, a slow one between them.

What is sent in bulk goes over both in turn: full precision inside a node, and between nodes, compressed or not, every
rank sends the part that is its own. So the bytes that leave a node are divided by the number of its ranks.
``collectives`` has how.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from commopt.comm.backend import Backend, Work, check_backend, message_device, open_channels, open_control, sends_from
from commopt.comm.pipeline import wait
from commopt.comm.torch import TorchBackend


class NodesBackend:
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
        for name, backend in (("world", world), ("intra_node", intra_node), ("inter_node", inter_node)):
            check_backend(backend, name)
        self.world, self.intra_node, self.inter_node = world, intra_node, inter_node
        self.rank, self.world_size = world.rank, world.world_size
        self.grid = _check_grid(world, intra_node, inter_node, message_device(self))

    @property
    def devices(self) -> tuple[str, ...] | None:
        """Those that all three can send from."""
        each = [d for d in map(sends_from, (self.world, self.intra_node, self.inter_node)) if d is not None]
        return tuple(sorted(set(each[0]).intersection(*each[1:]))) if each else None

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh) -> NodesBackend:
        """The nodes of a 2-d device mesh: its rows, as ``init_device_mesh("cuda", (nodes, ranks_per_node))`` has them.

        Raises:
            ValueError: for a mesh of another number of dimensions, on a rank that it does not contain, and if it does
                not hold all ranks of the default process group.
        """
        if mesh.ndim != 2:
            raise ValueError(f"the mesh of nodes must have 2 dimensions, nodes and ranks of a node, got {mesh.ndim}")
        if mesh.get_coordinate() is None:
            raise ValueError(f"rank {dist.get_rank()} of the world is not a member of the device mesh given")
        if mesh.size() != dist.get_world_size():
            raise ValueError(
                f"the mesh of nodes must hold all {dist.get_world_size()} ranks of the default process group, got "
                f"{mesh.size()}; for some of them give backend=NodesBackend(world, intra_node, inter_node), with a "
                "group of your own for world"
            )
        return cls(TorchBackend(), TorchBackend(mesh.get_group(1)), TorchBackend(mesh.get_group(0)))

    def all_reduce(self, x: Tensor) -> Work:
        return self.world.all_reduce(x)

    def all_to_all(self, out: Tensor, inp: Tensor) -> Work:
        return self.world.all_to_all(out, inp)

    def all_gather(self, out: Tensor, inp: Tensor) -> Work:
        return self.world.all_gather(out, inp)

    def broadcast(self, x: Tensor, src: int = 0) -> Work:
        return self.world.broadcast(x, src)

    def control(self) -> Backend:
        """The channel of all ranks for small messages."""
        return open_control(self.world)

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


def _check_grid(
    world: Backend, intra_node: Backend, inter_node: Backend, device: torch.device
) -> list[tuple[int, int]]:
    """Returns (inter_node.rank, intra_node.rank) of every rank. Raises ValueError on every rank unless these are the
    places of a grid of all ranks, whose rows are the groups ``intra_node`` and whose columns are the groups
    ``inter_node``."""
    mine = torch.tensor([inter_node.rank, intra_node.rank, inter_node.world_size, intra_node.world_size], device=device)
    table = mine.new_empty(world.world_size, 4)
    where = "construction of NodesBackend"
    wait(world.all_gather(table, mine), where)
    rows: list[list[int]] = table.tolist()
    _, _, nodes, places = rows[0]
    for rank, row in enumerate(rows):
        if row[2:] != [nodes, places]:
            raise ValueError(
                f"the ranks do not form nodes of one size: rank {rank} sees {row[2]} nodes of {row[3]} ranks, rank 0 "
                f"sees {nodes} of {places}"
            )
    grid = [(node, place) for node, place, _, _ in rows]
    if nodes * places != world.world_size or len(set(grid)) != world.world_size:
        raise ValueError(
            f"{nodes} nodes of {places} ranks are not the {world.world_size} ranks of world, each in a place of its own"
        )
    wrong = ""
    for name, group, axis in (("intra_node", intra_node, 0), ("inter_node", inter_node, 1)):
        expected = [r for _, r in sorted((row[1 - axis], r) for r, row in enumerate(rows) if row[axis] == mine[axis])]
        there = mine.new_empty(group.world_size, 1)
        wait(group.all_gather(there, torch.tensor([world.rank], device=device)), f"{where}, the ranks {name}")
        found = there.flatten().tolist()
        if found != expected:
            wrong = wrong or f"{name} has ranks {found} where it should have {expected}"
    failed = torch.tensor([float(bool(wrong))], device=device)
    wait(world.all_reduce(failed), where)
    if wrong:
        raise ValueError(wrong)
    if failed.item() > 0:
        raise ValueError("intra_node and inter_node do not fit together on another rank; its own error says where")
    return grid
