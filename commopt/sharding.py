"""Sharded parameters (torch's DTensor) as the plain tensors that this rank holds of them.

FSDP2, tensor parallelism and their like cut a parameter into pieces, one for each rank of a device mesh. Whatever works
element by element works on the pieces; these functions lead from one to the other. All of them take plain tensors too.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

_PLAIN = (Tensor, nn.Parameter)


def is_sharded(t: Any) -> bool:
    """True for a DTensor."""
    if type(t) in _PLAIN:  # of thousands of parameters that are not sharded, this is asked often
        return False
    module = sys.modules.get("torch.distributed.tensor")  # whoever has a DTensor has imported it; it takes a second
    return module is not None and isinstance(t, module.DTensor)


def tensors_in(params: Any) -> list[Any]:
    """The parameters among what an optimizer is given: parameters, (name, parameter) pairs, or groups of them."""
    found: list[Any] = []
    for entry in params if isinstance(params, (list, tuple)) else ():
        inside = entry.get("params", ()) if isinstance(entry, dict) else [entry]
        found += [inside] if isinstance(inside, Tensor) else inside
    return [p[1] if isinstance(p, tuple) and len(p) == 2 else p for p in found]


def local(t: Tensor) -> Tensor:
    """This rank's piece of ``t``: the same memory, without gradient; ``t`` itself if it is a plain tensor."""
    if not is_sharded(t):
        return t
    piece = t._local_tensor  # type: ignore[attr-defined]
    return piece.wait() if hasattr(piece, "wait") and hasattr(piece, "elem") else piece  # of a collective in flight


def leave_dims(p: Tensor, dims: tuple[int, ...]) -> None:
    """Notes that over ``dims`` of its own mesh ranks have the same of ``p``, and nobody averages its gradient: as over
    dimensions that its mesh lacks."""
    p._commopt_left_dims = dims  # type: ignore[attr-defined]


def left_dims(p: Tensor) -> tuple[int, ...]:
    """Dimensions that :func:`leave_dims` has noted. ``module.to()`` and its like take the note from a DTensor: it is
    made anew then."""
    if not is_sharded(p):
        return ()
    if not hasattr(p, "_commopt_left_dims"):
        leave_dims(p, ())
        for note in _noting:
            note()
    return p._commopt_left_dims  # type: ignore[attr-defined,no-any-return]


def notes_dims(note: Callable[[], None]) -> Callable[[], None]:
    """Has ``note`` called where a parameter has lost what it has noted by :func:`leave_dims`."""
    _noting.append(note)
    return note


_noting: list[Callable[[], None]] = []


def covers(p: Tensor, mesh: Any) -> bool:
    """True if ``p`` is on as many dimensions of ranks as ``mesh`` has, so that none is left to average it over; not
    where there is no mesh."""
    return mesh is not None and is_sharded(p) and p.device_mesh.ndim - len(left_dims(p)) == mesh.ndim  # type: ignore[attr-defined]


def is_cut(p: Tensor) -> bool:
    """True if several ranks hold pieces of ``p``: the same on all of them, also on one that has all of it."""
    return is_sharded(p) and any(
        ranks > 1 and getattr(placement, "dim", None) is not None
        for ranks, placement in zip(p.device_mesh.shape, p.placements)  # type: ignore[attr-defined]
    )


def largest_piece(p: Tensor) -> int:
    """Number of elements of the largest piece of ``p`` on any rank: the same on all of them, however it is cut."""
    if not is_sharded(p):
        return p.numel()
    sizes = list(p.shape)
    for ranks, placement in zip(p.device_mesh.shape, p.placements):  # type: ignore[attr-defined]
        dim = getattr(placement, "dim", None)
        if dim is not None:
            sizes[dim] = -(-sizes[dim] // ranks)
    return math.prod(sizes)


def like(piece: Tensor, p: Tensor) -> Tensor:
    """``piece``, of the shape of ``local(p)``, as a tensor that is cut as ``p`` is, of the same memory."""
    if not is_sharded(p):
        return piece
    from torch.distributed.tensor import DTensor

    mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
    return DTensor.from_local(piece, mesh, placements, run_check=False, shape=p.shape, stride=p.stride())


def settle(params: Iterable[Tensor]) -> None:
    """Makes every gradient lie as its parameter does: tensor parallelism leaves some as sums that are still to be made.
    That communicates, with the ranks that the parameter is cut over, which all call it."""
    for p in params:
        if is_sharded(p) and p.grad is not None and is_sharded(p.grad) and p.grad.placements != p.placements:  # type: ignore[attr-defined]
            p.grad = p.grad.redistribute(placements=p.placements)  # type: ignore[attr-defined]


def as_cut(whole: Tensor, p: Tensor) -> Tensor:
    """``whole``, of the shape of all of ``p``, cut as it is; itself if it has another shape."""
    return like(cut(whole, p).contiguous(), p) if whole.shape == p.shape and not is_sharded(whole) else whole


def global_offset(p: Tensor) -> tuple[int, ...]:
    """Start of this rank's piece of ``p`` in it."""
    if not is_sharded(p):
        return (0,) * p.dim()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)  # type: ignore[attr-defined]
    return tuple(offset)


def cut_alike(t: Tensor, p: Tensor) -> bool:
    """False if ``t`` is cut, but not as ``p`` is."""
    if not is_sharded(t):
        return True
    return is_sharded(p) and (t.device_mesh, t.placements) == (p.device_mesh, p.placements)  # type: ignore[attr-defined]


def cut(whole: Tensor, p: Tensor) -> Tensor:
    """This rank's piece of ``whole``, a plain tensor of the shape of all of ``p``, or sharded as it."""
    if is_sharded(whole) or not is_sharded(p) or whole.shape != p.shape:
        return local(whole)
    if _in_strips(p):
        return _cut_by_placements(whole, p)
    offset, shape = global_offset(p), local(p).shape
    return whole[tuple(slice(start, start + n) for start, n in zip(offset, shape))]


def _in_strips(p: Any) -> bool:
    """True if a piece of ``p`` is no block of it: tensor parallelism cuts what is several matrices in one, such as the
    gate and the other half of a gated layer, so that each rank has a part of each of them."""
    strips = False
    for i, placement in enumerate(p.placements):
        after = zip(p.device_mesh.shape[i + 1 :], p.placements[i + 1 :])
        inside = math.prod(n for n, other in after if getattr(other, "dim", None) == getattr(placement, "dim", None))
        strips |= getattr(placement, "split_factor", inside) != inside  # FSDP2 over tensor parallelism: as many strips
    return strips


def _cut_by_placements(whole: Tensor, p: Any) -> Tensor:
    """This rank's piece of ``whole`` as torch cuts it, one placement after the other. ``distribute_tensor`` of torch
    2.6 would send it."""
    for placement, ranks, here in zip(p.placements, p.device_mesh.shape, p.device_mesh.get_coordinate()):
        if getattr(placement, "dim", None) is not None:
            pieces, _ = placement._split_tensor(whole, ranks, with_padding=False, contiguous=False)
            whole = pieces[here]
    return whole
