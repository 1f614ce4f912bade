"""What somebody has assigned to ``optimizer.state``, or deleted from it, and the buffers behind it. Functions of an
optimizer.

State of commopt is views of flat buffers, complete from construction. Whoever puts another tensor in the place of one
of them (zeros, to begin anew; frameworks that move an optimizer put copies in place of all) means the buffer. Whoever
deletes an entry means one that the next step makes anew, as an optimizer of torch does. Here state is made once: in the
compressed phase a variance that begins again would stand at 0, and nothing would move.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from commopt.agreement.diagnostics import names_of
from commopt.sharding import cut, cut_alike, local
from commopt.state.state_bucket import StateBucket

if TYPE_CHECKING:
    from commopt.state.packed import PackedOptimizer


class Assigned(NamedTuple):
    """Tensor in the place of a view of a buffer."""

    bucket: StateBucket
    entry: dict[str, Any]
    name: str
    view: Tensor
    value: Tensor
    """This rank's piece of what was assigned, of the shape of the view's."""

    @property
    def differs(self) -> bool:
        """True if it is not what the buffer has."""
        mine = local(self.view)
        return not torch.equal(mine, self.value.to(mine))


def ids_in(state: Mapping[Any, Any]) -> list[int]:
    """The ids of all values in the entries of ``state``: a look at thousands of tensors in a millisecond."""
    entries: list[Iterable[Any]] = [entry.values() for entry in state.values() if isinstance(entry, dict)]
    return [*map(id, chain.from_iterable(entries))]


@torch.no_grad()
def follow(optimizer: PackedOptimizer) -> bool:
    """Copies what was assigned to state into the buffers, and makes state views of them again. Returns whether that
    changes any: the ranks compare theirs in the next step then.

    Raises:
        ValueError: as :func:`check`. Nothing has changed then.
    """
    if ids_in(optimizer.state) == optimizer._seen:
        return False
    found = [one for one in check(optimizer) if one.bucket.device.type != "meta"]  # that has no values yet
    new = [(one, one.value.to(local(one.view), copy=True)) for one in found if one.differs]  # two may be exchanged
    for one, value in new:
        local(one.view).copy_(value)
        one.bucket.active = None
        optimizer._check_next = True
    for one in found:
        one.entry[one.name] = one.view
    optimizer._seen = ids_in(optimizer.state)
    return bool(new)


def check(optimizer: PackedOptimizer) -> list[Assigned]:
    """Returns what is in state in the place of views of buffers.

    Raises:
        ValueError: some is missing, or does not fit there.
    """
    return [
        Assigned(bucket, entry, name, view, _piece(optimizer, p, name, view, entry.get(name)))
        for bucket, p, entry, name, view in _replaced(optimizer)
    ]


def _piece(optimizer: PackedOptimizer, p: Tensor, name: str, view: Tensor, value: Any) -> Tensor:
    """This rank's piece of ``value``, which was assigned to ``name`` of ``p``, where ``view`` was."""
    if value is None:
        raise ValueError(
            f"optimizer.state has no {name!r} of {_described(optimizer, p)} any more. It is made once, with the "
            "optimizer, and not anew at the next step: to begin anew make another optimizer, or set what is there to 0 "
            "in place; load_state_dict() brings back a state that was saved"
        )
    if isinstance(value, (int, float)):
        value = torch.tensor(value, dtype=torch.float64, device="cpu")
    fits = isinstance(value, Tensor) and (value.shape == view.shape or value.numel() == view.numel() == 1)
    if not fits or not cut_alike(value, p):
        what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(
            f"optimizer.state has {what} as {name!r} of {_described(optimizer, p)}; allowed is the shape "
            f"{tuple(view.shape)}, whole, or cut over ranks as the parameter"
        )
    return cut(value.detach(), p).reshape(local(view).shape)


def _replaced(optimizer: PackedOptimizer) -> Iterator[tuple[StateBucket, Tensor, dict[str, Any], str, Tensor]]:
    """The bucket, the parameter, its entry in state, a name and a view of each that is not there."""
    for bucket in optimizer.buckets:
        for p, mine in zip(bucket.params, bucket.state()):
            entry = optimizer.state.get(p)
            entry = entry if isinstance(entry, dict) else {}
            for name, view in mine.items():
                if entry.get(name) is not view:
                    yield bucket, p, entry, name, view


def _described(optimizer: PackedOptimizer, p: Tensor) -> str:
    """The name of ``p``, or its shape."""
    return names_of(optimizer.param_groups).get(p, f"a parameter of shape {tuple(p.shape)}")
