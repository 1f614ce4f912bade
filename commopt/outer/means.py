"""Means of the pseudo-gradients of some buckets: waited for at once, or in flight (:mod:`commopt.outer.flight`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from commopt.comm import Channel, Pipeline, Task, Topology, confirm
from commopt.compress import Compressor
from commopt.outer.rounds import mean_pseudo_gradient
from commopt.state.host import square_norm
from commopt.state.replicas import reaching_others
from commopt.state.state_bucket import StateBucket

Entry = tuple[StateBucket, dict[str, Any]]
"""A bucket, and the parameter group of its parameters."""


class Means:
    """The means over the ranks of the pseudo-gradients of some buckets; compressed both ways, or in full precision. The
    caller commits the residuals; nothing else that lasts is written.

    Args:
        entries: the buckets, with their groups.
        flats: the pseudo-gradient of this rank for each, (padded,); its mean, in the end.
        compressor: the same on every rank.

    Attributes:
        blocks: whether :meth:`finish` exchanges something, which all ranks then do at the same point.
    """

    blocks = False

    def __init__(self, entries: Sequence[Entry], flats: list[Tensor], compressor: Compressor | None) -> None:
        self.entries, self.flats, self.compressor = entries, flats, compressor

    def task(self, i: int, send: Channel, reply: Channel) -> Task:
        """Exchange of bucket ``i``, over the channels for what goes out, and for what comes back."""
        return mean_pseudo_gradient(self.flats[i], self.entries[i][0], self.compressor, send, reply)

    def finish(self, where: str) -> bool:
        """Makes the means, when all tasks have run. Returns whether what has come can be right."""
        return square_norm(self.flats) < float("inf")

    def start(self, channels: Callable[[StateBucket, int], tuple[Channel, Channel]], pipeline: Pipeline, where: str,
              early: bool = False) -> None:  # fmt: skip
        """Starts all tasks, each over the ``channels`` of its bucket and number."""
        for i, (bucket, _) in enumerate(self.entries):
            pipeline.start(self.task(i, *channels(bucket, i)), f"{where}, {self.describe(i)}", early)

    def describe(self, i: int) -> str:
        """Description of what is sent of entry ``i``, in errors."""
        return f"bucket {i} of {len(self.entries)} ({self.entries[i][0].describe()})"


def wait_for_means(topology: Topology, means: Means, where: str) -> None:
    """Runs ``means`` to their end.

    Raises:
        commopt.comm.CollectiveError: the other ranks could not be reached; begins with ``where``.
        commopt.comm.MessageDamaged: on all ranks, if something that has come on any of them cannot be right.
    """
    sound = receive_means(topology, means, where)
    if topology.world_size > 1:
        confirm(topology.world, sound, where)


def receive_means(topology: Topology, means: Means, where: str) -> bool:
    """As :func:`wait_for_means`, but that the ranks have not confirmed yet. Returns whether what has come can be
    right."""
    with reaching_others(topology, where):
        topology.open()
        pipeline = Pipeline()
        means.start(lambda bucket, i: bucket.replicas.pair(i), pipeline, where)
        pipeline.finish()
        return means.finish(where)
