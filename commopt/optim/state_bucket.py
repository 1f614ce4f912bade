"""A bucket of an optimizer: flat buffers of state, numbers of its parameters, and residuals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from commopt.bucket import Bucket
from commopt.compress import Chunk, Feedback


@dataclass
class StateBucket(Bucket):
    """A bucket with all state of its parameters. Its compressed mean leaves residuals (None on one node, which
    compresses nothing), and is sent in chunks.

    With nodes of several ranks, each rank compresses a part of the bucket: the one of its local rank.

    Attributes:
        local_rank, local_world_size: of this rank in its node, and how many there are.
        shard_index: which of ``world_size`` equal shards this rank averages; they are in the order of local ranks, and
            of nodes within.
        numbers: of each parameter, by name: step counters and scalars, (len(params),), on the CPU.
        active: bit mask of the elements that take part in compressed exchanges, (padded / 8,) uint8; None before it is
            known, and for all. Derived, not state: it is not saved.
    """

    local_rank: int = 0
    local_world_size: int = 1
    shard_index: int = 0
    numbers: dict[str, Tensor] = field(init=False, default_factory=dict)
    feedback: Feedback | None = field(init=False, default=None)
    chunks: list[Chunk] = field(init=False, default_factory=list)
    active: Tensor | None = field(init=False, default=None)
    _views: dict[str, list[Tensor]] = field(init=False, default_factory=dict, repr=False)

    def part(self, flat: Tensor) -> Tensor:
        """Of a flat buffer, or of a mask, the part that this rank compresses: a view."""
        return flat.view(self.local_world_size, -1)[self.local_rank]

    def part_views(self, part: Tensor) -> list[Tensor]:
        """Slices of the parameters that lie in the part of this rank, (padded / local_world_size,), as views; some
        are empty."""
        return self.views(part) if self.local_world_size == 1 else self.shares(part, self.local_rank)

    def residuals(self) -> list[dict[str, Tensor]]:
        """The residuals of each parameter on this rank, as views; empty on one node."""
        if self.feedback is None:
            return []
        workers, servers = self.part_views(self.feedback.worker), self.shares(self.feedback.server, self.shard_index)
        return [{"worker_error": w, "server_error": s} for w, s in zip(workers, servers)]

    def tensors(self, name: str, indices: Sequence[int] | None = None) -> list[Tensor]:
        """The buffer ``name`` as a view shaped like each parameter, or each of those given by their indices."""
        if name not in self._views:
            self._views[name] = self.views(self.buffers[name])
        views = self._views[name]
        return views if indices is None else [views[i] for i in indices]

    def operands(
        self, indices: Sequence[int]
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[tuple[float, float]]]:
        """x, m, v and the counts (t, t') of m and v, of the parameters given by their indices, as the rules of the Adam
        family take them."""
        t, frozen_t = self.numbers["step"].tolist(), self.numbers["variance_step"].tolist()
        params, counts = [self.params[i] for i in indices], [(t[i], frozen_t[i]) for i in indices]
        return params, self.tensors("exp_avg", indices), self.tensors("exp_avg_sq", indices), counts

    def add_residuals(self, nodes: int, double_buffered: bool) -> None:
        """Makes the residuals of a compressed mean over ``nodes``; none on one node."""
        if nodes > 1:
            numel = self.padded // self.local_world_size
            self.feedback = Feedback.zeros(numel, nodes, self.dtype, self.device, double_buffered)

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
