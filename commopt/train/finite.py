"""Search of all that a checkpoint would hold for what is not finite."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from commopt import ops
from commopt.sharding import local


def not_finite(model: nn.Module, states: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of this rank's tensors with inf or NaN: the model's weights and buffers, and what is in ``states``, parts
    of its optimizer's ``state_dict()``."""
    names = _names(states)
    found = [(f"weights {name}", x) for name, x in model.state_dict().items()]
    found += [(f"optimizer state {name}", x) for state in states for name, x in _tensors(state, names)]
    return bad(found)


def bad(named: Sequence[tuple[str, Any]]) -> list[str]:
    """Names of the tensors with inf or NaN; of sharded ones, in the piece that is here. Communicates nothing."""
    tensors = [(name, local(x)) for name, x in named if isinstance(x, Tensor)]
    floats = [(name, torch.view_as_real(x)) for name, x in tensors if x.is_complex()]
    floats += [(name, x) for name, x in tensors if x.is_floating_point()]
    flags = [ops.all_finite(x) for _, x in floats]
    if not flags or bool(torch.stack([flag.to(flags[0].device) for flag in flags]).all()):
        return []
    return [name for (name, _), flag in zip(floats, flags) if not flag]


def in_short(names: Sequence[str]) -> str:
    """The first, and how many more there are."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _names(states: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """Names of parameters by their numbers in a state dict, as far as it has them."""
    groups = [group for state in states for group in state.get("param_groups", ())]
    return {i: name for group in groups for i, name in zip(group["params"], group.get("param_names", ()))}


def _tensors(tree: Any, names: Mapping[int, str], path: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(tree, Tensor):
        yield path, tree
        return
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, (list, tuple)) else ()
    for key, value in items:
        inside = path.endswith("state") and isinstance(key, int)
        name = names.get(key, str(key)) if inside else str(key)
        yield from _tensors(value, names, f"{path}.{name}" if path else name)
