"""Ways to take the mean of a bucket: what all have in common."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from commopt.comm import Backend, Channel, Work, compressed_reduce_scatter, reduce_scatter
from commopt.compress import Compressor, TopBlocks
from commopt.compress.low_rank import LowRank
from commopt.state.own import Origin
from commopt.state.places import Saved
from commopt.state.saving import Entries
from commopt.state.state_bucket import StateBucket

OfGradients = Compressor | LowRank | TopBlocks
"""Compressors that :func:`commopt.compress_gradients` takes."""

Brought = Sequence[tuple[Tensor, int]]
"""Gradients of this rank, each with where it starts in a flat buffer, ascending."""


def nothing() -> None:
    """Does nothing."""


@dataclass
class BucketMean:
    """The mean of a bucket that has come; nothing that outlives the step has changed yet.

    Attributes:
        bucket: what it is of.
        sound: whether it is finite, 0-d bool; the same on all ranks that have it.
        write: writes it to the tensors given, one for each parameter, of the shape of what this rank holds of it.
        commit: makes the residuals those after this mean; called if all means are finite.
        let_go: gives memory back; called in any case, last.
    """

    bucket: StateBucket
    sound: Tensor
    write: Callable[[Sequence[Tensor]], None]
    commit: Callable[[], None] = nothing
    let_go: Callable[[], None] = nothing


class Method(Protocol):
    """A way to take means between several nodes.

    Attributes:
        of_whole: whether each rank has residuals of all that its node brings, and not of its part.
    """

    of_whole: bool

    def prepare(self, bucket: StateBucket, capacity: int) -> None:
        """Makes the residuals of a new bucket, all zeros; ``capacity`` is the most bytes of a bucket."""

    def mean(
        self, bucket: StateBucket, brought: Brought, absent: Sequence[int], send: Channel, reply: Channel
    ) -> Generator[Work, None, BucketMean]:
        """Takes the mean of what the ranks have ``brought``. ``absent``: indices of the parameters that no rank has a
        gradient of, ascending; their residuals stay. Yields :data:`commopt.comm.STARTED` when its last collective
        has started."""

    def rescale(self, buckets: Sequence[StateBucket], factor: float) -> None:
        """Multiplies the residuals by ``factor``. No mean is under way."""

    def own(self, buckets: Sequence[StateBucket], params: Sequence[Tensor]) -> dict[Any, dict[str, Any]]:
        """The residuals of this rank, by the number of the parameter, as copies."""

    def places(self, buckets: Sequence[StateBucket], params: Sequence[Tensor]) -> Saved:
        """Places of the residuals in whole parameters: see :mod:`commopt.state.places`."""

    def common(self, buckets: Sequence[StateBucket], params: Sequence[Tensor]) -> dict[int, dict[str, Any]]:
        """State that is the same on all ranks, by the number of the parameter, as copies."""

    def load(
        self,
        buckets: Sequence[StateBucket],
        entries: Entries,
        origin: Origin | None,
        here: Origin,
        fold: Callable[[Tensor, Tensor], None],
    ) -> bool:
        """Takes what was saved, by parameter, of ``origin``; ``fold`` takes residuals where there is one node alone.
        Returns whether something of another rank was left out."""


class Part(Protocol):
    """Gradients that are averaged where they arise, and no bucket's."""

    @property
    def sound(self) -> Tensor | None:
        """True if the means taken since the last end are finite, on this rank; 0-d bool, None if there are none."""

    def end(self, sound: bool) -> None:
        """Ends the means taken: residuals are those after them if all were ``sound``, else what they were.
        Gradients become NaN if they were not, on whichever rank: none takes a step that others do not."""

    def forget(self) -> None:
        """Forgets the means taken: the backward has failed."""

    def rescale(self, factor: float) -> None:
        """Multiplies the residuals by ``factor``. No mean is under way."""


def part_of_node(x: Tensor, node: Backend, inside: Compressor | None) -> Generator[Work, None, Tensor]:
    """This rank's part of the mean of ``x`` over the L ranks of its node, (D / L,).

    Args:
        x: (D,), contiguous, unchanged; D a multiple of L.
        node: they.
        inside: what is sent is compressed with this; None: it is in full precision.
    """
    if inside is None:
        return (yield from reduce_scatter(x, node))
    rows = x.view(node.world_size, -1)
    part = x.new_empty(rows.shape[1])
    yield from compressed_reduce_scatter(lambda payload: inside.compress(rows, payload), part, inside, node)
    return part


def packed(bucket: StateBucket, brought: Brought) -> Tensor:
    """A new flat buffer, (padded,), with gradients at their offsets; zeros elsewhere."""
    flat = bucket.zeros()
    for g, offset in brought:
        flat[offset : offset + g.numel()].view(g.shape).copy_(g)
    return flat
