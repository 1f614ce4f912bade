"""From the arguments of an outer optimizer to its base."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from commopt.agreement.checks import arguments_of, nearest
from commopt.comm import LocalBackend, Topology
from commopt.optim.plain import PlainOptimizer
from commopt.sharding import is_sharded, tensors_in
from commopt.state.binding import in_a_list
from commopt.state.packed import PackedOptimizer
from commopt.step.base import CommOptimizer

Where = tuple[torch.dtype, torch.device]

_SYNCHRONIZING = ("ZeroRedundancyOptimizer", "PostLocalSGDOptimizer", "DistributedOptimizer")
"""Optimizers of torch.distributed that communicate; by name, because importing them takes time."""


def make_base(
    params: Any, base: Callable[..., torch.optim.Optimizer] | None, arguments: dict[str, Any], outer: type
) -> torch.optim.Optimizer:
    """The base optimizer of one of class ``outer``: ``params`` itself if it is one, else ``base(params, **arguments)``.

    An optimizer class of commopt is given one rank alone, for it shall not communicate.

    Raises:
        ValueError: if both are given, or what ``base`` makes is no optimizer.
        TypeError: for arguments that neither ``base`` nor ``outer`` knows.
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
        params = in_a_list(params)
        _refuse_sharded(params, base)
        arguments = {"backend": LocalBackend(), **arguments}
    _check_arguments(base, arguments, outer)
    made = base(params, **arguments)
    if not isinstance(made, torch.optim.Optimizer):
        raise ValueError(f"base must make a torch.optim.Optimizer, but {base!r} made a {type(made).__name__}")
    return made


def _refuse_sharded(params: Any, base: type) -> None:
    """Raises ValueError if some of ``params``, or of what is in groups of them, is sharded."""
    if any(map(is_sharded, tensors_in(params))):
        raise ValueError(
            f"{base.__name__} communicates by itself where parameters are sharded, so that it cannot be the base of an "
            "outer step there; allowed are optimizers of torch, such as torch.optim.AdamW"
        )


def _check_arguments(base: Callable[..., Any], arguments: dict[str, Any], outer: type) -> None:
    """Raises TypeError for a keyword that ``base``, if it is a class that lists them, does not have."""
    if not isinstance(base, type):
        return
    known = inspect.signature(base).parameters
    if any(p.kind is p.VAR_KEYWORD for p in known.values()):
        return
    for key in arguments.keys() - known:
        own = arguments_of(outer)
        hint = nearest(key, [*known, *own]) or f"; its own are {', '.join(own)}"
        raise TypeError(
            f"{outer.__name__}() got an unexpected keyword argument {key!r}, which its base {base.__name__} does not "
            f"have either{hint}"
        )


def check_base(base: torch.optim.Optimizer) -> None:
    """Raises ValueError if ``base`` communicates itself, or cannot take local steps."""
    name = type(base).__name__
    kinds = {cls.__name__ for cls in type(base).__mro__}
    ranks = base.topology.world_size if isinstance(base, PackedOptimizer) else 1
    if kinds & {"OuterOptimizer", *_SYNCHRONIZING} or ranks > 1:
        sharded = any(is_sharded(p) for group in base.param_groups for p in group["params"])  # no rank is alone there
        alone = isinstance(base, CommOptimizer) and not sharded
        also = " (or give it backend=commopt.comm.LocalBackend())" if alone else ""
        raise ValueError(
            f"the base optimizer {name} already synchronises the ranks; allowed are optimizers that take local steps, "
            f"such as torch.optim.AdamW{also}"
        )
    if isinstance(base, torch.optim.LBFGS):
        raise ValueError(
            f"the base optimizer {name} evaluates its closure several times a step; allowed are optimizers whose "
            "step() takes no closure, such as torch.optim.AdamW"
        )
    if isinstance(base, PackedOptimizer):
        base.topology = Topology(LocalBackend())  # from now on it is alone because it is a base


def follow_casts(
    bases: Sequence[torch.optim.Optimizer], params: Sequence[Tensor], before: Mapping[Tensor, Where]
) -> dict[Tensor, Where]:
    """Has the state of ``bases`` follow parameters that were moved or cast since ``before``, as torch does when it
    loads a state: what is shaped like its parameter, and was of its dtype and on its device. That of optimizers of
    commopt follows by itself, whose dtype is not that of the parameters. Returns where they are now."""
    now = {p: (p.dtype, p.device) for p in params}
    moved = [(p, was, where) for p, where in now.items() if (was := before.get(p, where)) != where]
    for base in bases:
        if isinstance(base, (PackedOptimizer, PlainOptimizer)):
            continue
        for p, was, (dtype, device) in moved:
            entry = base.state.get(p, {})
            for name, t in entry.items():
                if name != "step" and isinstance(t, Tensor) and t.shape == p.shape and (t.dtype, t.device) == was:
                    entry[name] = t.to(device=device, dtype=dtype)
    return now


def step_base(base: torch.optim.Optimizer) -> None:
    """One step of ``base``, as a part of one of ours.

    Hooks for the steps of all optimizers, and the profiler's, belong to ours: they are not called once more. Those of
    ``base`` are. A ``step`` that somebody has put into the object itself (schedulers do) is called as it is, but for
    theirs, which only takes down that it was called.
    """
    patch: Any = vars(base).get("step")
    step: Any = type(base).step
    of_scheduler = hasattr(patch, "_wrapped_by_lr_sched") and getattr(patch.__wrapped__, "__func__", None) is step
    if not hasattr(step, "hooked") or not (patch is None or of_scheduler):
        base.step()
        return
    if patch is not None:
        base._opt_called = True  # type: ignore[attr-defined]
    args: tuple[Any, ...] = (base,)
    kwargs: dict[str, Any] = {}
    for before in list(base._optimizer_step_pre_hooks.values()):
        changed = before(base, args, kwargs)
        if changed is not None:
            args, kwargs = changed
    step.__wrapped__(*args, **kwargs)
    for after in list(base._optimizer_step_post_hooks.values()):
        after(base, args, kwargs)
