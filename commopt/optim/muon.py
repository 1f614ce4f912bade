"""Muon for hidden matrices, also of models that are cut: each matrix is orthogonalised once, by one of its ranks.

    M <- mu M + (1 - mu) g;   U = (1 - mu) g + mu M  (Nesterov), or M
    X <- U / |U|_F;  n times:  A = X X^T;  X <- a X + (b A + c A^2) X       Newton-Schulz, in bfloat16, X wide
    p <- p - lr weight_decay p - lr adjust(shape) X

K. Jordan and others, "Muon: an optimizer for hidden layers in neural networks" (2024); adjust="match_rms_adamw" is
arXiv 2502.16982, section 2.2. To the bit what ``torch.optim.Muon`` does with whole matrices; but where parameters are
bfloat16 and ``nesterov=False``, torch's iterations normalise the momentum itself, in place. Its iterations on DTensors
put a matrix together in each of the five, on every rank; here a step has two exchanges, whatever is in the model:
the pieces of U go to the matrix's owner, those of X come back. Owners are chosen so that all ranks have the
same work, as SPD-KFAC (arXiv 2107.06533, section 4.2) shares the inverses of its factors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from commopt.agreement import checks
from commopt.sharding import cut, is_sharded, like, local, settle
from commopt.state import foreign
from commopt.state.saving import check_shape, check_tensor
from commopt.step.closure import loss_of

ADJUSTMENTS: dict[str | None, Callable[[int, int], float]] = {
    None: lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}
"""Factors of lr by the shape of a matrix: of unit spectral norm, or with steps as long as AdamW's."""


class Muon(torch.optim.Optimizer):
    """Muon, with the arguments and the state of ``torch.optim.Muon``.

    ::

        hidden, rest = commopt.sort_parameters(model)
        optimizer = commopt.Mixed(commopt.Muon(hidden, lr=0.02), torch.optim.AdamW(rest, lr=3e-4))

    It averages nothing: DDP, FSDP2 or :func:`commopt.compress_gradients` do, or an outer optimizer around it. Matrices
    cut along one dimension of their mesh are worked on by all ranks of that dimension, each with its share; those cut
    along several are put together on every rank. A step sends 4 (W - 1) / W bytes an element of what W ranks have cut.

    Memory: the momentum, of the shape and dtype of the parameters; in a step 2 bytes an element of the rank's pieces
    twice, and of the matrices that it owns.

    Args:
        params: matrices, (name, matrix) pairs or parameter groups.
        lr: learning rate, >= 0.
        weight_decay: decoupled, >= 0.
        momentum: mu, in [0, 1).
        nesterov: whether U has the gradient's own share.
        ns_coefficients: a, b and c.
        eps: the least norm that U is divided by.
        ns_steps: n, 1 to 99.
        adjust_lr_fn: "original" (None, too): lr sqrt(max(1, rows / columns)); "match_rms_adamw": lr 0.2
            sqrt(max(rows, columns)).

    Raises:
        ValueError: for an argument out of range, and a parameter that is no real matrix.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
    ) -> None:
        defaults = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov,
            "ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn,
        }  # fmt: skip
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of matrices. Raises ValueError for others, and arguments out of range; nothing is changed
        then."""
        super().add_param_group(param_group)
        try:
            _check(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step of the matrices that have a gradient: the same ones on all ranks that hold pieces of them.

        Args:
            closure: reevaluates the model and returns the loss; called once, first.

        Returns:
            what the closure returned, or None.

        Raises:
            ValueError: for sparse gradients; nothing has changed then.
        """
        loss = loss_of(closure)
        checks.check_gradients([p.grad for group in self.param_groups for p in group["params"] if p.grad is not None])
        todo: list[_Matrix] = []
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            settle(params)
            for p in params:
                if self.state[p].get("momentum_buffer") is None:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p.grad)
                gradient, buffer = local(p.grad), local(self.state[p]["momentum_buffer"])
                buffer.lerp_(gradient, 1 - group["momentum"])
                update = gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
                todo.append(_Matrix(p, update.bfloat16(), group))
        for matrix, direction in zip(todo, _orthogonalized(todo)):
            p, group = matrix.param, matrix.group
            lr = float(group["lr"])
            piece = local(p)
            piece.mul_(1 - lr * group["weight_decay"])
            piece.add_(direction, alpha=-lr * ADJUSTMENTS[group["adjust_lr_fn"]](*p.shape))
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what ``state_dict()`` gave, or the state of a ``torch.optim.Muon``.

        Raises:
            ValueError: if it is the state of another optimizer, or of other shapes; nothing is changed then.
        """
        hook = self.register_load_state_dict_pre_hook(lambda _, given: self._check_loaded(given))
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()

    def _check_loaded(self, given: dict[str, Any]) -> None:
        foreign.check_form(given)
        params = [p for group in self.param_groups for p in group["params"]]
        foreign.check_family("Muon", given, self.param_groups, [self.state.get(p, {}) for p in params])
        for i, p in zip(foreign.ids_of(given), params):
            value = given["state"].get(i, {}).get("momentum_buffer")
            check_tensor(i, "momentum_buffer", value)
            if value is not None:
                check_shape(i, "momentum_buffer", value, p.shape, p)


@dataclass
class _Matrix:
    """A matrix in a step: its parameter, what this rank holds of U, in bfloat16, and its group."""

    param: Tensor
    update: Tensor
    group: dict[str, Any]

    def orthogonal(self, whole: Tensor) -> Tensor:
        group = self.group
        return newton_schulz(whole, group["ns_coefficients"], group["ns_steps"], group["eps"])


def newton_schulz(
    matrix: Tensor, coefficients: Sequence[float] = (3.4445, -4.775, 2.0315), steps: int = 5, eps: float = 1e-7
) -> Tensor:
    """``matrix`` with singular values near 1, in bfloat16."""
    a, b, c = coefficients
    x = matrix.bfloat16()
    tall = matrix.size(0) > matrix.size(1)
    x = x.T if tall else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


# whose work a matrix is -----------------------------------------------------------------------------------------------


def owners_of(shapes: Sequence[torch.Size], ranks: int) -> list[int]:
    """The rank that orthogonalises each matrix: the costliest first, each to the rank that has least to do so far."""
    costs = [rows * columns * min(rows, columns) for rows, columns in shapes]
    load, out = [0] * ranks, [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        out[i] = min(range(ranks), key=lambda rank: load[rank])
        load[out[i]] += costs[i]
    return out


def _orthogonalized(todo: Sequence[_Matrix]) -> list[Tensor]:
    """This rank's part of X, of each matrix."""
    out: list[Tensor | None] = [None] * len(todo)
    shared: dict[tuple[Any, int], list[int]] = {}
    for i, matrix in enumerate(todo):
        p = matrix.param
        cuts = _cuts(p)
        if not cuts:
            out[i] = matrix.orthogonal(matrix.update)
        elif len(cuts) == 1:
            shared.setdefault((p.device_mesh, cuts[0]), []).append(i)  # type: ignore[attr-defined]
        else:
            out[i] = cut(matrix.orthogonal(like(matrix.update, p).full_tensor()), p)  # type: ignore[attr-defined]
    for (mesh, dim), numbers in shared.items():
        group = mesh.get_group(dim)
        for i, piece in zip(numbers, _by_owners([todo[i] for i in numbers], group, dim)):
            out[i] = piece
    return out  # type: ignore[return-value]


def _cuts(p: Tensor) -> list[int]:
    """The dimensions of its mesh, of more than one rank, that ``p`` is cut along."""
    if not is_sharded(p):
        return []
    mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
    return [d for d, placement in enumerate(placements) if not placement.is_replicate() and mesh.size(d) > 1]


def _by_owners(matrices: Sequence[_Matrix], group: dist.ProcessGroup, mesh_dim: int) -> list[Tensor]:
    """This rank's part of X of ``matrices``, all cut over the ranks of ``group``: two exchanges."""
    ranks, rank, first = group.size(), group.rank(), matrices[0].update
    owners = owners_of([m.param.shape for m in matrices], ranks)
    dims: list[int] = [m.param.placements[mesh_dim].dim for m in matrices]  # type: ignore[attr-defined]
    # of each matrix, how far its pieces go
    sizes = [_pieces(m.param.shape[d], ranks) for m, d in zip(matrices, dims)]
    mine = [i for i, owner in enumerate(owners) if owner == rank]
    per_rank = [
        [_of_piece(matrices[i].param.shape, dims[i], sizes[i][r]) for i in mine] for r in range(ranks)
    ]  # shapes of the pieces of my matrices, by the rank that holds them
    to_owners = [[i for i, owner in enumerate(owners) if owner == r] for r in range(ranks)]
    sent = [sum(matrices[i].update.numel() for i in theirs) for theirs in to_owners]
    received = [sum(shape.numel() for shape in shapes) for shapes in per_rank]

    got = _exchange([matrices[i].update for theirs in to_owners for i in theirs], sent, received, group, first)
    pieces: list[list[Tensor]] = [[] for _ in mine]
    for shapes, part in zip(per_rank, got):
        for own, piece in zip(pieces, part.split([shape.numel() for shape in shapes])):
            own.append(piece)
    back: list[list[Tensor]] = [[] for _ in range(ranks)]
    for number, (i, parts) in enumerate(zip(mine, pieces)):
        whole = torch.cat([part.view(per_rank[r][number]) for r, part in enumerate(parts)], dims[i])
        for r, piece in enumerate(matrices[i].orthogonal(whole).split(sizes[i], dims[i])):
            back[r].append(piece)
    returned = _exchange([piece for pieces in back for piece in pieces], received, sent, group, first)
    out: list[Tensor] = [torch.empty(0, device="cpu")] * len(matrices)
    for theirs, part in zip(to_owners, returned):
        for i, piece in zip(theirs, part.split([matrices[i].update.numel() for i in theirs])):
            out[i] = piece.view(matrices[i].update.shape)
    return out


def _pieces(size: int, ranks: int) -> list[int]:
    """Length of each rank's piece of a dimension, as DTensor cuts it."""
    chunk = -(-size // ranks)
    return [max(0, min(chunk, size - rank * chunk)) for rank in range(ranks)]


def _of_piece(shape: torch.Size, dim: int, size: int) -> torch.Size:
    return torch.Size(size if d == dim else n for d, n in enumerate(shape))


def _exchange(
    parts: Sequence[Tensor], sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup, like: Tensor
) -> tuple[Tensor, ...]:
    """Elements that every rank sends this one, by rank, flat, of bfloat16 as ``like``. ``sent``, ``received``: their
    numbers by rank."""
    flat = torch.cat([like.new_empty(0), *(part.reshape(-1) for part in parts)])  # who owns nothing sends nothing
    out = flat.new_empty(sum(received))
    dist.all_to_all_single(  # as bytes: not every backend has bfloat16
        out.view(torch.uint8),
        flat.view(torch.uint8),
        [2 * n for n in received],
        [2 * n for n in sent],
        group=group,
    )
    return out.split(list(received))


def _check(group: dict[str, Any]) -> None:
    checks.check_lr(group["lr"])
    for name in ("weight_decay", "eps"):
        checks.check_at_least(name, group[name], 0)
    checks.check_within("momentum", group["momentum"], 0, 1)
    checks.check_bool("nesterov", group["nesterov"])
    steps, coefficients = group["ns_steps"], group["ns_coefficients"]
    if not isinstance(steps, int) or not 1 <= steps < 100:
        raise ValueError(f"ns_steps must be an int from 1 to 99, got {steps!r}")
    three = isinstance(coefficients, (tuple, list)) and len(coefficients) == 3
    if not three or not all(map(checks.is_number, coefficients)):
        raise ValueError(f"ns_coefficients must be three numbers, got {coefficients!r}")
    if group["adjust_lr_fn"] not in ADJUSTMENTS:
        allowed = ", ".join(map(repr, ADJUSTMENTS))
        raise ValueError(f"adjust_lr_fn must be one of {allowed}, got {group['adjust_lr_fn']!r}")
    names = group.get("param_names", [None] * len(group["params"]))
    for name, p in zip(names, group["params"]):
        if p.dim() != 2 or p.is_complex():
            raise ValueError(
                f"Muon takes real matrices, got {name or 'a parameter'} of shape {tuple(p.shape)} and {p.dtype}; "
                "commopt.sort_parameters(model) tells them from the rest, which is for AdamW"
            )
