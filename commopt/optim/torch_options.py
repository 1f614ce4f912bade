"""Keywords of torch's optimizers that those of commopt do not have: taken where they ask for nothing that is not there
anyway, so that a call of torch's class is one of ours."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from commopt.optim.checks import nearest

_ANY = "foreach", "fused"  # how a step is computed: here by fused kernels

_REASONS = {
    "amsgrad": "it keeps the largest variances, and compression needs one that stands",
    "capturable": "a step talks to other ranks, which a CUDA graph cannot hold",
    "differentiable": "a step is not differentiated",
    "dampening": "the momentum that is compressed has none",
}
_ASKS_NOTHING = {"amsgrad": False, "capturable": False, "differentiable": False, "dampening": 0}

OF_ADAM = (*_ANY, "amsgrad", "capturable", "differentiable")
"""Of torch.optim.Adam and AdamW, but for ``decoupled_weight_decay``, which theirs have."""
OF_LAMB = (*OF_ADAM, "decoupled_weight_decay")
"""Of torch.optim.Adam: ``decoupled_weight_decay=False``, its default, is taken only without any decay."""
OF_LION = _ANY
"""Of no optimizer of torch, which has no Lion: what frameworks give to any."""
OF_SGD = (*_ANY, "dampening", "differentiable")
"""Of torch.optim.SGD."""


def check_torch_options(
    cls: type, options: Mapping[str, Any], known: Sequence[str], groups: Sequence[Mapping[str, Any]]
) -> None:
    """Checks the further keywords that an optimizer of class ``cls`` was given.

    Raises:
        TypeError: for one that torch's optimizer does not have either.
        ValueError: for one that asks for what is not there.
    """
    name = cls.__name__
    for key, value in options.items():
        if key not in known:
            hint = nearest(key, inspect.signature(cls).parameters)
            raise TypeError(f"{name}.__init__() got an unexpected keyword argument {key!r}{hint}")
        if key in _ANY and value not in (None, True, False):
            raise ValueError(f"{key} must be None, True or False, got {value!r}")
        if key in _REASONS and value not in (_ASKS_NOTHING[key], None):
            raise ValueError(f"{name} has no {key}={value!r}: {_REASONS[key]}; allowed is {_ASKS_NOTHING[key]!r}")
        if key == "decoupled_weight_decay" and not value and any(group["weight_decay"] for group in groups):
            raise ValueError(
                f"{name} has no decoupled_weight_decay=False: its weight decay is a part of the update, as LAMB's is, "
                "and not added to the gradient; allowed is True, or weight_decay=0"
            )
