"""A bucket of an optimizer: flat buffers of state, and the residuals of what is compressed of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from commopt.bucket import Bucket
from commopt.compress import Columns, Feedback


@dataclass
class StateBucket(Bucket):
    """A bucket with the residuals of its compressed all-reduce (None on one node, which compresses nothing), and the
    columns in which it is sent.

    With nodes of several ranks, each rank compresses a part of the bucket: that of its place in the node.

    Attributes:
        place, places: of this rank in its node, and how many there are.
        share: which of ``world_size`` equal shares this rank averages; they are in the order of places, and of nodes
            within.
        active: bit mask of the elements that take part in compressed exchanges, (padded / 8,) uint8; None before it is
            known, and for all. Derived, not state: it is not saved.
    """

    place: int = 0
    places: int = 1
    share: int = 0
    feedback: Feedback | None = field(init=False, default=None)
    columns: list[Columns] = field(init=False, default_factory=list)
    active: Tensor | None = field(init=False, default=None)

    def part(self, flat: Tensor) -> Tensor:
        """Of a flat buffer, or of a mask, the part that this rank compresses: a view."""
        return flat.view(self.places, -1)[self.place]

    def part_views(self, part: Tensor) -> list[Tensor]:
        """What of each parameter lies in the part of this rank, (padded / places,), as views; some are empty."""
        return self.views(part) if self.places == 1 else self.shares(part, self.place)

    def owed(self) -> list[dict[str, Tensor]]:
        """The residuals of each parameter on this rank, as views; empty on one node."""
        if self.feedback is None:
            return []
        workers, servers = self.part_views(self.feedback.worker), self.shares(self.feedback.server, self.share)
        return [{"worker_error": w, "server_error": s} for w, s in zip(workers, servers)]
