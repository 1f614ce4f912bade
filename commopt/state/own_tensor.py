"""A rank's own part of the state of a sharded parameter, in a form that torch.distributed.checkpoint keeps.

Tools for distributed checkpoints write a plain tensor once, whichever rank's it is, and look at nothing beside
``state`` and ``param_groups``. So where a model is on a device mesh, what ranks have of their own (residuals; with
local steps, parameters and momenta) is in ``state`` as an :class:`OwnTensor`, which says where its elements lie:

    residual of a worker, parameter, momentum    (rows, *p.shape), a row for each replica (or node)
    residual of a server                         (1, *p.shape): each element is some rank's

A rank has a run of elements of its piece of one row. It is written as the boxes that the run consists of, and read on
any other mesh: a row of its own if there are as many as before, else the mean of all rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from commopt.sharding import global_offset

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Start of a rectangular part of a tensor, and its shape."""


@dataclass(frozen=True)
class Place:
    """Place of elements of a parameter.

    Attributes:
        shape: of the parameter.
        offset: where in it this rank's piece starts.
        piece: shape of that.
        start: of the elements in the flat piece.
        row: whose they are.
        rows: how many there are.
        alike: whether they are the same in all rows now: then one row is saved.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    piece: tuple[int, ...]
    start: int
    row: int
    rows: int
    alike: bool = False

    @classmethod
    def of(cls, p: Tensor, piece: Sequence[int], start: int, row: int, rows: int, alike: bool = False) -> Place:
        """Of parameter ``p``."""
        return cls(tuple(p.shape), global_offset(p), tuple(piece), start, row, rows, alike)


class OwnTensor(Tensor):
    """Elements, (n,), with their place. See the module's docstring."""

    place: Place
    read: dict[int, Tensor]
    rows_read: int | None

    @staticmethod
    def make(elements: Tensor, place: Place) -> OwnTensor:
        """``elements``, of any shape, at ``place``."""
        flat: OwnTensor = torch.Tensor._make_subclass(OwnTensor, elements.detach().reshape(-1))  # type: ignore[assignment]
        flat.place, flat.read, flat.rows_read = place, {}, None
        return flat

    def plain(self) -> Tensor:
        """The elements, as a plain tensor of the same memory."""
        return self.as_subclass(Tensor)

    def value(self, here: Place) -> Tensor | None:
        """Elements that were loaded, for ``here``; those that this rank has itself, if none were, and they are of this
        place. Else None."""
        if self.read:
            rows = list(self.read.values())
            return torch.stack(rows).mean(0) if len(rows) > 1 else rows[0]
        return self.plain() if replace(self.place, alike=here.alike) == here and self.rows_read is None else None

    @property
    def apart(self) -> bool:
        """True if each replica is to have elements of its own: as many rows were saved, and they may differ."""
        if self.rows_read is None:
            return not self.place.alike
        return 1 < self.rows_read == self.place.rows

    # the protocol of torch.distributed.checkpoint ---------------------------------------------------------------------

    def size(self, *_: Any) -> Any:  # type: ignore[override]
        """Something that equals the size of what was saved, with any number of rows."""
        return _AnyRows(self)

    def new_empty(self, size: Any, **settings: Any) -> OwnTensor:  # type: ignore[override]
        """One of this place, for which :meth:`set_` brings the memory: so a state is staged for ``dcp.async_save``."""
        return _with_place(self.plain().new_empty(_of_elements(size), **settings), self)

    def set_(self, source: Any, offset: int, size: Any, stride: Any) -> OwnTensor:  # type: ignore[override]
        """As of a plain tensor, with the size of another one of this kind."""
        return super().set_(source, offset, _of_elements(size), stride)  # type: ignore[return-value]

    def __create_write_items__(self, fqn: str, _: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        alike = self.place.alike
        size = torch.Size((1 if alike else self.place.rows, *self.place.shape))
        boxes = self._boxes(self.place.row) if self.place.row == 0 or not alike else []
        if not boxes and 0 in size:
            boxes = [((0,) * len(size), tuple(size))]  # so that the key is there
        items = []
        for offsets, sizes in boxes:
            chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            data = TensorWriteData(chunk, TensorProperties.create_from_tensor(self.plain()), size)
            items.append(WriteItem(MetadataIndex(fqn, torch.Size(offsets)), WriteItemType.SHARD, tensor_data=data))
        return items

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        rows = self.rows_read or 0
        wanted = [self.place.row] if rows == self.place.rows else range(rows)
        self.read = {row: torch.zeros_like(self.plain()) for row in wanted}
        return [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for row in wanted for o, s in self._boxes(row)]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        row = index.offset[0]
        elements = self.read.get(row, self.plain())
        at = 0
        for offsets, sizes in self._boxes(row):
            if tuple(index.offset) == offsets:
                return elements[at : at + math.prod(sizes)].view(sizes)
            at += math.prod(sizes)
        return elements[:0].view(*([0] * len(index.offset)))

    def _boxes(self, row: int) -> list[Box]:
        """The boxes that the elements consist of, in their order, as parts of the whole."""
        place = self.place
        run = boxes(place.piece, place.start, place.start + self.numel())
        return [((row, *(a + b for a, b in zip(place.offset, start))), (1, *shape)) for start, shape in run]

    # a tensor that stays what it is where it is copied ---------------------------------------------------------------

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
        copied = func in (Tensor.clone, Tensor.detach, Tensor.to, Tensor.cpu, Tensor.cuda, torch.clone, torch.detach)
        if copied and isinstance(out, Tensor):
            return _with_place(out, args[0])
        return out.as_subclass(Tensor) if isinstance(out, OwnTensor) else out

    def __reduce_ex__(self, _: Any) -> Any:
        return rebuilt, (self.plain().clone(), astuple(self.place))

    def __deepcopy__(self, memo: Any) -> OwnTensor:
        return _with_place(self.plain().clone(), self)


def rebuilt(elements: Tensor, place: tuple[Any, ...]) -> OwnTensor:
    """The tensor that was pickled."""
    return OwnTensor.make(elements, Place(*place))


torch.serialization.add_safe_globals([rebuilt])  # torch.load(weights_only=True) runs no other code


class _AnyRows:
    """The size of an :class:`OwnTensor`, of any number of rows. Whoever compares it with the size of what was saved, as
    torch.distributed.checkpoint does before it asks which part to load, tells it how many there are."""

    def __init__(self, own: OwnTensor) -> None:
        self._own = own

    def __ne__(self, saved: object) -> bool:
        if not isinstance(saved, tuple) or tuple(saved[1:]) != self._own.place.shape:
            return True
        self._own.rows_read = saved[0]
        return False

    def __eq__(self, saved: object) -> bool:
        return not self != saved

    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        raise TypeError(
            "a plain tensor of this size would not know whose elements it has, of the state of a sharded model that is "
            "each rank's own: stage it with torch.distributed.checkpoint.staging.DefaultStager, as dcp.async_save does "
            "by itself, or save it with dcp.save"
        )

    __iter__ = __len__  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        """Sent to other ranks, as a state of rank 0 is that all load, it is the size of the elements."""
        return torch.Size, (tuple(self._own.plain().shape),)

    def __repr__(self) -> str:
        return f"({self._own.place.rows}, {', '.join(map(str, self._own.place.shape))})"


def _of_elements(size: Any) -> Any:
    """The size of the elements as they are."""
    return size._own.plain().shape if isinstance(size, _AnyRows) else size


def _with_place(out: Tensor, own: OwnTensor) -> OwnTensor:
    copied = OwnTensor.make(out.as_subclass(Tensor), own.place)
    copied.read, copied.rows_read = own.read, own.rows_read
    return copied


def boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The boxes that the elements [start, stop) of a tensor of ``shape`` consist of, in order."""
    if start >= stop:
        return []
    if not shape:
        return [((), ())]
    inner = math.prod(shape[1:])
    first, last = start // inner, stop // inner  # rows that are whole: from ``first`` or the next one up to ``last``
    out: list[Box] = []
    if start % inner:
        end = min(stop, (first + 1) * inner)
        out += [((first, *o), (1, *s)) for o, s in boxes(shape[1:], start - first * inner, end - first * inner)]
        first += 1
    if first < last:
        out.append(((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])))
    if last >= first and stop % inner:
        out += [((last, *o), (1, *s)) for o, s in boxes(shape[1:], 0, stop - last * inner)]
    return out
