"""Parameters <-> flat buffers.

A :class:`Bucket` packs a run of parameters end to end. Each piece of optimizer state is one flat buffer of the bucket,
and ``state[p][name]`` is a view of it shaped like ``p``: a collective moves the flat buffer, the user sees tensors.

Buckets are filled in reverse order of the parameters, which is about the order in which backward makes their gradients,
so that a later bucket never has to wait for an earlier gradient. A bucket holds one device and one buffer dtype only.

Of a sharded parameter a bucket holds what this rank has of it, its piece: shapes, offsets and views are those of the
pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from commopt.sharding import is_sharded, largest_piece, local

ROW_MULTIPLE = 64
"""A rank's shard of a bucket is a multiple of this many elements: whole bytes of signs, whole vectors in the
kernels."""


def buffer_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which state of a parameter of ``dtype`` is kept: float64 for float64, float32 for all else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass
class Bucket:
    """Parameters packed end to end, and the flat buffers of their state.

    Attributes:
        params: the parameters, in packing order; each of them exactly once in one bucket.
        world_size: ranks that shard the bucket; each owns an equal chunk of every flat buffer.
        sharded: whether some parameters are DTensors.
        shapes: of the pieces of the parameters, when the bucket was made.
        offsets: where each of them starts in a flat buffer, in elements.
        numel: elements in use.
        padded: length of a flat buffer; the elements from ``numel`` on belong to no parameter and stay 0.
        device, dtype: of every flat buffer.
        buffers: flat buffers by name, each of ``padded`` elements.
    """

    params: list[Tensor]
    world_size: int
    sharded: bool = field(init=False)
    device: torch.device = field(init=False)
    dtype: torch.dtype = field(init=False)
    shapes: list[torch.Size] = field(init=False)
    offsets: list[int] = field(init=False)
    numel: int = field(init=False)
    padded: int = field(init=False)
    buffers: dict[str, Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.device = self.params[0].device
        self.dtype = buffer_dtype(self.params[0].dtype)
        self.sharded = any(is_sharded(p) for p in self.params)
        self.shapes = [x.shape for x in self.values]
        self.offsets = []
        self.numel = 0
        for x in self.values:
            self.offsets.append(self.numel)
            self.numel += x.numel()
        multiple = 1 if self.world_size == 1 else self.world_size * ROW_MULTIPLE
        self.padded = max(1, -(-self.numel // multiple)) * multiple  # some for empty parameters, too: rows have bytes

    @property
    def values(self) -> list[Tensor]:
        """The parameters as plain tensors: what this rank holds of each."""
        return [local(p) for p in self.params] if self.sharded else self.params

    def split(self, capacity: int, chunk_multiple: int | None) -> list[tuple[int, int]]:
        """The chunks [start, stop) of every rank's shard in which a bucket larger than ``capacity`` bytes is sent, so
        that one is in flight while the next is computed. Equal multiples of ``chunk_multiple``, but the last; the
        whole, if ``chunk_multiple`` is None."""
        shard, nbytes = self.padded // self.world_size, self.numel * self.dtype.itemsize
        if chunk_multiple is None or nbytes <= capacity:
            return [(0, shard)]
        width = -(-shard // -(-nbytes // max(capacity, 1)))
        width = -(-width // chunk_multiple) * chunk_multiple
        return [(start, min(start + width, shard)) for start in range(0, shard, width)]

    def __getitem__(self, name: str) -> Tensor:
        """The flat buffer ``name``."""
        return self.buffers[name]

    def zeros(self) -> Tensor:
        """A new flat buffer, shape (padded,), filled with zeros."""
        return torch.zeros(self.padded, dtype=self.dtype, device=self.device)

    def zero_views(self) -> list[Tensor]:
        """Zeros shaped like each parameter, which take no memory."""
        return [torch.zeros((), dtype=self.dtype, device=self.device).expand(shape) for shape in self.shapes]

    def views(self, flat: Tensor, indices: Iterable[int] | None = None) -> list[Tensor]:
        """``flat`` of shape (padded,) as one view per parameter, or of each of those given by their indices, shaped
        like it."""
        places = list(zip(self.offsets, self.shapes))
        chosen = places if indices is None else [places[i] for i in indices]
        return [flat[o : o + shape.numel()].view(shape) for o, shape in chosen]

    def gradients(self) -> list[tuple[Tensor, int]]:
        """The dense gradients there are, each with where it starts in a flat buffer."""
        return [
            (local(p.grad) if self.sharded else p.grad, offset)
            for p, offset in zip(self.params, self.offsets)
            if p.grad is not None and p.grad.layout == torch.strided
        ]

    def gradient(self, i: int) -> Tensor | None:
        """The gradient of parameter ``i``, of the shape of its piece; None if it has none."""
        grad = self.params[i].grad
        return grad if grad is None else local(grad)

    def pack_gradients(self, scale: float) -> Tensor:
        """A new flat buffer, shape (padded,), with ``scale`` times each gradient; zeros where there is none."""
        flat = torch.empty(self.padded, dtype=self.dtype, device=self.device)
        grads, places, end = [], [], 0
        for grad, offset in self.gradients():
            if offset > end:
                flat[end:offset].zero_()
            end = offset + grad.numel()
            grads.append(grad)
            places.append(flat[offset:end].view(grad.shape))
        if end < self.padded:
            flat[end:].zero_()
        if grads:
            torch._foreach_copy_(places, grads)
        return flat if scale == 1 else flat.mul_(scale)

    def pack_params(self) -> Tensor:
        """A new flat buffer, shape (padded,), with the parameters."""
        flat = self.zeros()
        self.pack_params_(flat)
        return flat

    def pack_params_(self, flat: Tensor) -> None:
        """Copies the parameters to ``flat``, shape (padded,)."""
        torch._foreach_copy_(self.views(flat), [x.detach() for x in self.values])

    def unpack_params(self, flat: Tensor) -> None:
        """Writes ``flat``, shape (padded,), to the parameters, rounded to their dtypes."""
        torch._foreach_copy_([x.detach() for x in self.values], self.views(flat))

    def shares(self, chunk: Tensor, rank: int) -> list[Tensor]:
        """Slices of the parameters that lie in ``rank``'s shard, as 1-d views of ``chunk`` (shape (padded / W,));
        many are empty."""
        start = rank * chunk.numel()
        stop = start + chunk.numel()
        out = []
        for o, shape in zip(self.offsets, self.shapes):
            low, high = max(o, start), min(o + shape.numel(), stop)
            out.append(chunk[low - start : high - start] if low < high else chunk[:0])
        return out

    def start_of(self, i: int, rank: int, chunk: Tensor) -> int:
        """Start of ``rank``'s shard in parameter ``i``, in elements, if shards are as long as ``chunk``."""
        return min(max(rank * chunk.numel() - self.offsets[i], 0), self.shapes[i].numel())

    def describe(self) -> str:
        """Number of parameters and elements, in words."""
        return f"{len(self.params)} parameters, {self.numel} elements"

    def check_shapes(self) -> None:
        """Raises ValueError if a parameter has another shape than when the bucket was made."""
        for x, shape in zip(self.values, self.shapes):
            if x.shape != shape:
                raise ValueError(
                    f"a parameter of shape {tuple(shape)} has shape {tuple(x.shape)} now: something (such as FSDP) has "
                    "partitioned or exchanged the parameters after the optimizer was made; make the optimizer last"
                )

    def stale(self) -> bool:
        """True if the parameters were moved or cast since the bucket was made (``model.to(...)`` after
        construction)."""
        double = self.dtype == torch.float64
        # asked while backward runs: no calls
        return bool([p for p in self.params if p.device != self.device or (p.dtype == torch.float64) != double])


def bucket_bytes(bucket_mb: float | None, params: Iterable[Tensor], device: str | None = None) -> int:
    """Most bytes of flat buffer in a bucket of ``params``: ``bucket_mb`` times 2**20.

    None chooses: an 8th of all of them, so that the buckets form a pipeline, but at least 1 MB, so that latency does
    not rule, and at most 25 MB; on a GPU 100, where a bucket takes as long to ask for as to compute. ``device``: its
    type, where that is not the parameters'.
    """
    if bucket_mb is not None:
        return int(bucket_mb * 2**20)
    params = list(params)
    total = sum(largest_piece(p) * buffer_dtype(p.dtype).itemsize for p in params)
    most = 100 if "cuda" in (device, *(p.device.type for p in params)) else 25
    return min(max(total // 8, 2**20), most * 2**20)


def partition(
    params: Iterable[Tensor], capacity: int, kind: Callable[[Tensor], Hashable] = lambda _: None
) -> list[list[Tensor]]:
    """Splits ``params`` into the contents of buckets of at most ``capacity`` bytes of flat buffer each, and of one
    ``kind`` each.

    A parameter larger than ``capacity`` gets a bucket of its own. Every rank that holds the same shapes, dtypes and
    order gets the same split, whatever its pieces: the largest ones count.
    """
    open_runs: dict[Hashable, list[Tensor]] = {}
    sizes: dict[Hashable, int] = {}
    full: list[list[Tensor]] = []
    for p in reversed(list(dict.fromkeys(params))):
        dtype, numel = buffer_dtype(p.dtype), largest_piece(p)
        key = (p.device, dtype, kind(p))
        run = open_runs.setdefault(key, [])
        sizes[key] = sizes.get(key, 0) + numel
        if run and sizes[key] * dtype.itemsize > capacity:
            full.append(run)
            run = open_runs[key] = []
            sizes[key] = numel
        run.append(p)
    return full + list(open_runs.values())
