"""A bucket of an optimizer: flat buffers of state, numbers of its parameters, and residuals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from commopt.bucket import Bucket
from commopt.comm import Backend, Replicas, all_reduce_bytes, gather_rows, message_device, wait
from commopt.compress import Chunk, Feedback
from commopt.sharding import like, settle
from commopt.state.own_tensor import OwnTensor, Place


@dataclass
class StateBucket(Bucket):
    """A bucket with all state of its parameters. Its compressed mean leaves residuals (None on one node, which
    compresses nothing), and is sent in chunks.

    With nodes of several ranks, each rank compresses a part of the bucket: the one of its local rank.

    Attributes:
        replicas: the ranks that hold the same of the parameters as this one, and average it.
        share: of a sum of squares over all ranks, how much one of this bucket's elements is to count: so that it comes
            to a sum of those ranks times all elements of the model, as if each held the whole.
        pieces: for each dimension of ranks that the parameters are cut over, the ranks along that.
        inside: ranks of one replica that hold the same of the parameters; None where there are none.
        adds_up: whether a step goes by the sum of the gradients, and not by their mean.
        alike: how many of ``inside`` have the same gradient anyway, which counts once in a sum.
        numbers: of each parameter, by name: step counters and scalars, (len(params),), on the CPU.
        local_rank, local_world_size: this rank's number in its node, and how many there are.
        shard_index: which of ``world_size`` equal shards this rank averages.
        compressed: whether its mean is, where there are several nodes.
        fragment: which of the fragments of its optimizer it is in, where that has several.
        active: bit mask of the elements that take part in compressed exchanges, (padded / 8,) uint8; None before it is
            known, and for all. Derived, not state: it is not saved.
        active_of: the buffer whose zeros ``active`` leaves out, and torch's count of what has written to it.
        standing: the mask ``active`` that there was when something was taken of a variance that stands, and that.
            Derived, not saved.
        nonzero: of each parameter, elements of its last mean gradient that are not 0; empty where they are not counted.
            Derived, not saved.
        neighbours: replicas of the anchors of other ranks, flat buffers; of gossip. Derived, not saved.
    """

    replicas: Replicas
    share: float = 1.0
    pieces: Sequence[Backend] = ()
    inside: Backend | None = None
    adds_up: bool = False
    alike: int = 1
    local_rank: int = field(init=False)
    local_world_size: int = field(init=False)
    shard_index: int = field(init=False)
    numbers: dict[str, Tensor] = field(init=False, default_factory=dict)
    feedback: Feedback | None = field(init=False, default=None)
    compressed: bool = field(init=False, default=False)
    chunks: list[Chunk] = field(init=False, default_factory=list)
    fragment: int = field(init=False, default=0)
    active: Tensor | None = field(init=False, default=None)
    active_of: tuple[Any, ...] = field(init=False, default=(), repr=False)
    standing: tuple[Tensor, Any] | None = field(init=False, default=None, repr=False)
    nonzero: list[float] = field(init=False, default_factory=list, repr=False)
    neighbours: list[Tensor] = field(init=False, default_factory=list)
    _views: dict[str, list[Tensor]] = field(init=False, default_factory=dict, repr=False)
    _state: list[dict[str, Tensor]] = field(init=False, default_factory=list, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        node, self.shard_index = self.replicas.intra_node, self.replicas.shard_index
        self.local_rank, self.local_world_size = node.rank, node.world_size

    @property
    def factor(self) -> float:
        """Of the gradients of a replica: such that the mean over the replicas is what a step goes by."""
        return float(self.world_size) if self.adds_up else 1.0

    @property
    def inside_factor(self) -> int:
        """Of the mean of the gradients over ``inside``: such that it is what a replica goes by."""
        return self.inside.world_size // self.alike if self.adds_up and self.inside is not None else 1

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

    def owed(self, nodes: int) -> Tensor:
        """The worker's residual, (padded,), of a bucket whose ranks are nodes of their own, with the server's in it,
        which is of a mean: times the ``nodes`` by which what is sent is divided. A new tensor."""
        assert self.feedback is not None
        worker = self.feedback.worker.clone()
        if self.feedback.serves:
            worker.view(self.world_size, -1)[self.shard_index].add_(self.feedback.server, alpha=nodes)
        return worker

    def residual_places(self, feedback: Feedback) -> list[dict[str, Place]]:
        """Of each parameter, where in the whole of it these residuals of the bucket lie."""
        node, nodes = self.replicas.inter_node.rank, self.replicas.nodes
        out = []
        for i, (p, shape) in enumerate(zip(self.params, self.shapes)):
            compresses = self.start_of(i, self.local_rank, feedback.worker)
            averages = self.start_of(i, self.shard_index, feedback.server)
            sent = Place.of(p, shape, compresses, node, nodes)
            out.append({"worker_error": sent, "server_error": Place.of(p, shape, averages, 0, 1)})
        return out

    def own_residuals(self) -> list[dict[str, OwnTensor]]:
        """The residuals of each parameter on this rank, with their places; zeros on one node. Empty if nothing is ever
        compressed."""
        if not self.compressed:
            return []
        feedback = self.feedback or Feedback(self.zeros(), self.zeros())
        workers, servers = self.part_views(feedback.worker), self.shares(feedback.server, self.shard_index)
        return [
            {name: OwnTensor.make(own, place) for (name, place), own in zip(places.items(), residuals)}
            for places, residuals in zip(self.residual_places(feedback), zip(workers, servers))
        ]

    def own(self, i: int, elements: Tensor, differ: bool) -> OwnTensor:
        """``elements``, of the shape of the piece of parameter ``i`` or of one element, of this replica if they
        ``differ`` between replicas, else of all."""
        row, rows = self.replicas.rank, self.world_size
        place = Place.of(self.params[i], elements.shape, 0, row, rows, not differ)
        if elements.shape != self.shapes[i]:
            place = replace(place, shape=tuple(elements.shape), offset=(0,) * elements.dim())
        return OwnTensor.make(elements, place)

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
        values, counts = self.values, [(t[i], frozen_t[i]) for i in indices]
        m, v = self.tensors("exp_avg", indices), self.tensors("exp_avg_sq", indices)
        return [values[i] for i in indices], m, v, counts

    def settle(self) -> None:
        """Makes the gradients what they are to the replica: where ranks hold it together, the same on all that hold the
        same. Those call it at the same point; it communicates with them."""
        settle(self.params if self.sharded else ())
        if self.inside is None:
            return
        there = [p.grad is not None for p in self.params]
        flat = self.pack_gradients(1.0)
        flat = torch.cat([flat, torch.tensor(there, dtype=self.dtype, device=self.device)])
        wait(self.inside.all_reduce(flat), f"gradients inside a replica ({self.describe()})")
        gradients = self.views(flat[: self.padded].mul_(self.inside_factor))
        for p, gradient, ranks in zip(self.params, gradients, flat[self.padded :].tolist()):
            if ranks > 0:
                p.grad = like(gradient.to(p.dtype), p)

    def total(self, numbers: Sequence[float]) -> Sequence[float]:
        """Sums of ``numbers`` of the parameters over all their pieces: the same on all ranks, to the
        bit. Those of all pieces call it in the same order."""
        return self._over_pieces(numbers, lambda table: table.sum(0))

    def highest(self, numbers: Sequence[float]) -> Sequence[float]:
        """As :meth:`total`, the largest of them."""
        return self._over_pieces(numbers, lambda table: table.amax(0))

    def _over_pieces(self, numbers: Sequence[float], reduce: Callable[[Tensor], Tensor]) -> Sequence[float]:
        for ranks in self.pieces:
            mine = torch.tensor(numbers, dtype=torch.float64, device=message_device(ranks))
            where = f"norms of the sharded tensors of a bucket ({self.describe()})"
            numbers = reduce(gather_rows(ranks, mine, where)).tolist()
        return numbers

    def add_residuals(self, double_buffered: bool, serves: bool = True) -> None:
        """Makes the residuals of a compressed mean over the nodes; none on one node. ``serves``: whether ranks compress
        means, too."""
        nodes, self.compressed = self.replicas.nodes, True
        if nodes > 1:
            numel = self.padded // self.local_world_size
            self.feedback = Feedback.zeros(numel, nodes, self.dtype, self.device, double_buffered, serves)

    def add_numbers(self, starts: Mapping[str, float], dtype: torch.dtype) -> None:
        """Makes numbers of the parameters, by name, with what they start from."""
        for name, start in starts.items():
            self.numbers[name] = torch.full((len(self.params),), start, dtype=dtype, device="cpu")

    def state(self) -> list[dict[str, Tensor]]:
        """The state of each parameter, as views, the same ones whenever it is asked for; of a sharded one, cut as it
        is."""
        self._state = self._state or [{} for _ in self.params]
        for name in [name for name in (*self.numbers, *self.buffers) if name not in self._state[0]]:
            views: Iterable[Tensor] = (
                self.numbers[name].unbind() if name in self.numbers else map(like, self.tensors(name), self.params)
            )
            for mine, view in zip(self._state, views):
                mine[name] = view
        return self._state

    def adopt(self, name: str) -> bool:
        """Copies parameters to the flat buffer ``name``, but for those that it rounds to, and those with inf or NaN;
        returns whether any were copied. None are while parameters are elsewhere than the buffer, or nowhere."""
        if self.stale() or self.device.type == "meta":
            return False
        kept = self.tensors(name)
        changed = torch.stack([(x.to(p.dtype) != p).any() for p, x in zip(self.values, kept)]).tolist()
        found = [(p, x) for p, x, new in zip(self.values, kept, changed) if new and p.isfinite().all()]
        for p, x in found:
            x.copy_(p)
        return bool(found)

    def rests(self, absent: Sequence[int]) -> bool:
        """True if nothing of it has a gradient on any rank, as those of the indices ``absent`` have none: then it need
        not be sent. One of empty parameters alone never rests: it waits for no gradient, so that some ranks may start
        it before they know."""
        return len(absent) == len(self.params) and any(p.numel() for p in self.params)

    def increment(self, names: Sequence[str], indices: Sequence[int]) -> None:
        """Adds 1 to the counters ``names`` of the parameters given by their indices."""
        for name in names:
            if len(indices) == len(self.params):
                self.numbers[name] += 1
            else:
                self.numbers[name][list(indices)] += 1


def fp32_bytes(buckets: Sequence[StateBucket]) -> int:
    """Bytes that a float32 all-reduce of all parameters in ``buckets`` would send on this rank; between nodes, where
    ranks are grouped by them."""
    numel: dict[Replicas, int] = {}
    for bucket in buckets:
        numel[bucket.replicas] = numel.get(bucket.replicas, 0) + bucket.numel
    return sum(all_reduce_bytes(-(-4 * n // r.intra_node.world_size), r.nodes) for r, n in numel.items())
