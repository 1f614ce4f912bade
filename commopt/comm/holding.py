"""Models of which each rank holds a part: who holds the same one, and who the others.

A backend whose ranks do not all hold whole replicas has, besides its collectives, which are those of all ranks:

    check(p)         raises ValueError if the ranks cannot hold the parameter ``p``; communicates nothing
    holding(p)       how they do, once all were checked; the first call for a kind of parameter may communicate
    inside           a backend: the ranks that hold one replica together
    parts, stages    of each rank, by rank: which part of the model it has, and which parameters it has at all

:class:`ShardedBackend` has them for parts of any kind, :class:`commopt.comm.MeshBackend` for DTensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from commopt.comm.backend import Backend, OfWorld, common_devices, message_device
from commopt.comm.grid import check_grid


@dataclass(frozen=True)
class Holding:
    """Distribution of a parameter over the ranks.

    Attributes:
        replicas: those that hold the same of it as this one, and average it.
        copies: how many ranks hold the same of it as this one, whether they average it or get the same anyway.
        pieces: for each dimension of ranks that it is cut over, the ranks along that.
        inside: the ranks of one replica that hold the same of it, while they hold pieces of others: first of all they
            average its gradient, so that the replica stays one. None where there are none.
        alike: how many of those get the same gradient, but for rounding: it counts once in a sum.
    """

    replicas: Backend
    copies: int
    pieces: tuple[Backend, ...] = ()
    inside: Backend | None = None
    alike: int = 1


class ShardedBackend(OfWorld):
    """All ranks, as R replicas of a model in S parts, of which each rank holds one.

    The parameters of a rank are plain tensors, and its own: tensor, expert or pipeline parallelism of any kind.
    Averages are over ``replicas``; whether a step is taken, and how gradients are clipped, all ranks decide together.

    Args:
        world: all R S ranks.
        inside: those that hold one replica together with this one, S of them.
        replicas: those that hold the same part as this one, R of them.

    Raises:
        ValueError: on every rank, if on any of them the three do not fit together; before that, if one of them lacks
            a collective.
    """

    def __init__(self, world: Backend, inside: Backend, replicas: Backend) -> None:
        self.world, self.inside, self.replicas = world, inside, replicas
        words = ("ShardedBackend", "replicas", "inside", "replicas")
        self.parts = [part for _, part in check_grid(world, inside, replicas, message_device(self), words)]
        self.stages = self.parts
        self.rank, self.world_size = world.rank, world.world_size

    @property
    def devices(self) -> tuple[str, ...] | None:
        """Those that all three can send from."""
        return common_devices(self.world, self.inside, self.replicas)

    @property
    def holds_whole(self) -> bool:
        """True if every rank holds the whole model."""
        return len(set(self.parts)) == 1

    def check(self, p: Tensor, elsewhere: bool = False) -> None:
        """Any parameter will do."""

    def holding(self, p: Tensor) -> Holding:
        return Holding(self.replicas, self.replicas.world_size)
