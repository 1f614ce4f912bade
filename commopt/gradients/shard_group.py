"""The ranks that FSDP2 cuts parameters over: all alike, or as M nodes of L ranks each.

Row r of a flat tensor, (W, n), is what rank r holds of it. Alike, every rank sends each other one a row. As nodes, a
rank serves the rows of its place, those of the ranks that have its place in the M nodes:

    reduce-scatter   inside a node, all rows of a place go to the rank that has it, which takes their mean;
                     between nodes, each row of that goes to the rank that holds it
    all-gather       between nodes, the rows of a place go to all that have it; inside a node, these go to all

So of either, M - 1 rows a rank leave a node in place of (M - 1) L. The reduce-scatter is SDP4Bit's
(arXiv 2410.15526).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator

import torch
from torch import Tensor

from commopt.comm import Backend, Channel, NodesBackend, Work
from commopt.compress import Compressor
from commopt.gradients.method import part_of_node


class ShardGroup:
    """The ranks that some parameters are cut over.

    Args:
        backend: they; a :class:`commopt.comm.NodesBackend` if they are grouped by nodes.
        channel: the same, counted.

    Attributes:
        rank, world_size: among all of them.
        inside, between: those of this rank's node, and those of its place; this rank alone, and all, without nodes.
        by_place: all ranks, in the order of places, and of nodes within.
        rows: those of this rank's place, by node; all of them, without nodes.
    """

    def __init__(self, backend: Backend, channel: Channel) -> None:
        self.inside, self.between = channel.intra_node, channel.inter_node
        self.rank, self.world_size = backend.rank, backend.world_size
        grid = backend.grid if isinstance(backend, NodesBackend) else [(r, 0) for r in range(self.world_size)]
        self.by_place = sorted(range(self.world_size), key=lambda r: grid[r][::-1])
        first = self.inside.rank * self.between.world_size
        self.rows = self.by_place[first : first + self.between.world_size]

    @property
    def has_nodes(self) -> bool:
        """True if nodes have several ranks."""
        return self.inside.world_size > 1

    def of_place(self, rows: Tensor) -> Tensor:
        """Those of this rank's place: (M, ...) of (W, ...)."""
        return rows[self.rows] if self.has_nodes else rows

    def mean_inside(self, x: Tensor, compressor: Compressor | None) -> Generator[Work, None, Tensor]:
        """The rows of this rank's place of the mean of ``x`` over its node: (M, n) of (W, n); ``x`` itself, without
        nodes.

        Args:
            x: (W, n) float32 or float64, contiguous.
            compressor: of what is sent inside; None: full precision.
        """
        if not self.has_nodes:
            return x
        part = yield from part_of_node(x[self.by_place].view(-1), self.inside, compressor)
        return part.view(len(self.rows), -1)

    def all_gather(self, out: Tensor, mine: Tensor) -> Iterator[Work]:
        """out <- the rows of all ranks, (W, n) of any dtype, of which ``mine``, (n,), is this rank's."""
        if not self.has_nodes:
            yield self.between.all_gather(out, mine)
            return
        place = out.new_empty(len(self.rows), out.shape[1])
        yield self.between.all_gather(place, mine)
        every = out.new_empty(self.inside.world_size, place.numel())
        yield self.inside.all_gather(every, place.view(-1))
        out[torch.tensor(self.by_place, device=out.device)] = every.view_as(out)
