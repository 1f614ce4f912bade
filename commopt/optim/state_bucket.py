"""A bucket of an optimizer: flat buffers of state, numbers of its parameters, and residuals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from commopt.bucket import Bucket
from commopt.compress import Columns, Feedback


@dataclass
class StateBucket(Bucket):
    """A bucket with all state of its parameters. Its compressed mean leaves residuals (None on one node, which
    compresses nothing), and is sent in columns.

    With nodes of several ranks, each rank compresses a part of the bucket: that of its place in the node.

    Attributes:
        place, places: of this rank in its node, and how many there are.
        share: which of ``world_size`` equal shares this rank averages; they are in the order of places, and of nodes
            within.
        numbers: of each parameter, by name: step counters and scalars, (len(params),), on the CPU.
        active: bit mask of the elements that take part in compressed exchanges, (padded / 8,) uint8; None before it is
            known, and for all. Derived, not state: it is not saved.
    """

    place: int = 0
    places: int = 1
    share: int = 0
    numbers: dict[str, Tensor] = field(init=False, default_factory=dict)
    feedback: Feedback | None = field(init=False, default=None)
    columns: list[Columns] = field(init=False, default_factory=list)
    active: Tensor | None = field(init=False, default=None)
    _views: dict[str, list[Tensor]] = field(init=False, default_factory=dict, repr=False)

    def part(self, flat: Tensor) -> Tensor:
        """Of a flat buffer, or of a mask, the part that this rank compresses: a view."""
        return flat.view(self.places, -1)[self.place]

    def part_views(self, part: Tensor) -> list[Tensor]:
        """What of each parameter lies in the part of this rank, (padded / places,), as views; some are empty."""
        return self.views(part) if self.places == 1 else self.shares(part, self.place)

    def residuals(self) -> list[dict[str, Tensor]]:
        """The residuals of each parameter on this rank, as views; empty on one node."""
        if self.feedback is None:
            return []
        workers, servers = self.part_views(self.feedback.worker), self.shares(self.feedback.server, self.share)
        return [{"worker_error": w, "server_error": s} for w, s in zip(workers, servers)]

    def tensors(self, name: str, indices: Sequence[int] | None = None) -> list[Tensor]:
        """The buffer ``name`` as a view shaped like each parameter, or each of those given by their indices."""
        if name not in self._views:
            self._views[name] = self.views(self.buffers[name])
        views = self._views[name]
        return views if indices is None else [views[i] for i in indices]

    def add_numbers(self, starts: Mapping[str, float], dtype: torch.dtype) -> None:
        """Makes numbers of the parameters, by name, with what they start from."""
        for name, start in starts.items():
            self.numbers[name] = torch.full((len(self.params),), start, dtype=dtype)

    def state(self) -> list[dict[str, Tensor]]:
        """The state of each parameter, as views."""
        numbers = {name: values.unbind() for name, values in self.numbers.items()}
        out: list[dict[str, Tensor]] = []
        for i in range(len(self.params)):
            out.append({name: values[i] for name, values in numbers.items()})
            out[i].update({name: self.tensors(name)[i] for name in self.buffers})
        return out

    def increment(self, names: Sequence[str], indices: Sequence[int]) -> None:
        """Adds 1 to the counters ``names`` of the parameters given by their indices."""
        for name in names:
            if len(indices) == len(self.params):
                self.numbers[name] += 1
            else:
                self.numbers[name][list(indices)] += 1
