"""From the arguments of an outer optimizer to its base."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from commopt.comm import LocalBackend
from commopt.optim.base import CommOptimizer
from commopt.optim.packed import PackedOptimizer

_SYNCHRONIZING = ("ZeroRedundancyOptimizer", "PostLocalSGDOptimizer", "DistributedOptimizer")
"""Optimizers of torch.distributed that communicate; by name, because importing them takes time."""


def make_base(
    params: Any, base: Callable[..., torch.optim.Optimizer] | None, arguments: dict[str, Any]
) -> torch.optim.Optimizer:
    """The base optimizer: ``params`` itself if it is one, else ``base(params, **arguments)``.

    An optimizer class of commopt is given one rank alone, for it shall not communicate.

    Raises:
        ValueError: if both are given, or what ``base`` makes is no optimizer.
        TypeError: from ``base``, for arguments that it does not know.
    """
    if isinstance(params, torch.optim.Optimizer):
        if base is not None or arguments:
            given = [repr(base)] * (base is not None) + [f"{k}={v!r}" for k, v in arguments.items()]
            raise ValueError(
                f"the base optimizer {type(params).__name__} is made already, so it takes no {', '.join(given)}; give "
                "either an optimizer, or parameters, a class and its arguments"
            )
        return params
    if isinstance(base, torch.optim.Optimizer):
        raise ValueError(f"base is an optimizer already; give it in place of the parameters: got {type(base).__name__}")
    if base is None:
        base = torch.optim.AdamW
    if not callable(base):
        raise ValueError(f"base must be an optimizer class such as torch.optim.AdamW, got {base!r}")
    if isinstance(base, type) and issubclass(base, PackedOptimizer):
        arguments = {"backend": LocalBackend(), **arguments}
    made = base(params, **arguments)
    if not isinstance(made, torch.optim.Optimizer):
        raise ValueError(f"base must make a torch.optim.Optimizer, but {base!r} made a {type(made).__name__}")
    return made


def check_base(base: torch.optim.Optimizer) -> None:
    """Raises ValueError if ``base`` communicates itself, or cannot take local steps."""
    name = type(base).__name__
    kinds = {cls.__name__ for cls in type(base).__mro__}
    ranks = base.backend.world_size if isinstance(base, PackedOptimizer) else 1
    if kinds & {"OuterOptimizer", *_SYNCHRONIZING} or ranks > 1:
        also = " (or give it backend=commopt.comm.LocalBackend())" if isinstance(base, CommOptimizer) else ""
        raise ValueError(
            f"the base optimizer {name} already synchronises the ranks; allowed are optimizers that take local steps, "
            f"such as torch.optim.AdamW{also}"
        )
    if isinstance(base, torch.optim.LBFGS):
        raise ValueError(
            f"the base optimizer {name} evaluates its closure several times a step; allowed are optimizers whose "
            "step() takes no closure, such as torch.optim.AdamW"
        )
