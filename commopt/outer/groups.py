"""Parameter groups of an outer optimizer, which are those of its base, and settings that all ranks have alike.
Functions of an optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from commopt.agreement import checks
from commopt.compress import Compressor
from commopt.outer import base_state
from commopt.outer.mixed import name_of
from commopt.outer.streaming import check_streaming
from commopt.state import binding, following
from commopt.state.foreign import OUTER
from commopt.state.guard import check_guard
from commopt.state.packed import PackedOptimizer
from commopt.step.torch_options import check_group_keys

if TYPE_CHECKING:
    from commopt.outer.base import OuterOptimizer

COUNTED = ("round_step", "rounds", "fragment", "started", "fragment_steps", "fragment_rounds", OUTER)
"""What a group that joins the round under way has as the others."""


def check_settings(optimizer: OuterOptimizer) -> None:
    """Raises ValueError if an argument of the constructor that is not of a group is out of range."""
    compressor = optimizer.compressor
    if compressor is not None and not isinstance(compressor, Compressor):
        raise ValueError(
            "compressor must be None (full precision) or a commopt.compress.Compressor such as Sign(), got "
            f"{checks.no_compressor(compressor)}"
        )
    checks.check_common(optimizer.max_grad_norm, optimizer.bucket_mb, overlap=False)
    checks.check_reduction(optimizer.reduction)
    check_guard(optimizer.guard)
    optimizer.own_settings()
    check_streaming(optimizer.streaming)
    base_state.check_state_period(optimizer.state_period)


def check_state_period(optimizer: OuterOptimizer) -> None:
    """Raises ValueError if the base has no such state, or if it cannot be averaged while fragments are in flight."""
    if optimizer.state_period:
        base_state.check_names(optimizer.base, list(optimizer.state_period))
        if optimizer.streaming is not None and not optimizer.streaming.waits:
            raise ValueError(
                f"state_period={optimizer.state_period!r} is not allowed with {optimizer.streaming!r}: states are not "
                "streamed, so it must be None, or the delay of the fragments 0"
            )


def check_fragments(optimizer: OuterOptimizer) -> None:
    """Raises ValueError if there are fewer trainable parameters than fragments."""
    there = sum(p.requires_grad for p in optimizer.params)
    if optimizer.fragments > 1 and there < optimizer.fragments:
        raise ValueError(
            f"streaming={optimizer.streaming!r}: there are {there} trainable parameters; allowed are at most as many "
            "fragments"
        )


def check_new(optimizer: OuterOptimizer, group: dict[str, Any]) -> None:
    """Raises ValueError for what is not allowed in ``group``, the last one."""
    binding.check_held(optimizer, group["params"])
    where = f"parameter group {len(optimizer.param_groups) - 1}"
    check_group_keys(type(optimizer), group, optimizer.defaults, where)
    check_period(optimizer, group)
    if optimizer.uses_lr:
        if group.get("lr") is None:
            raise ValueError(
                f"{type(optimizer).__name__} needs the learning rate of its base, but a parameter group of "
                f"{name_of(optimizer.base)} has no 'lr'; allowed are bases that have one"
            )
        checks.check_lr(group["lr"])
    optimizer.check_group(group)


def check_period(optimizer: OuterOptimizer, group: dict[str, Any]) -> None:
    """Raises ValueError if the period of ``group`` is none, or another one than that of the first group."""
    period, first = group["period"], optimizer.param_groups[0]["period"]
    checks.check_period(period)
    if optimizer.streaming is not None:
        optimizer.streaming.check_period(period)
    if period != first:
        raise ValueError(f"period must be the same in all parameter groups, got {period} and {first}")


def add(optimizer: OuterOptimizer, param_group: dict[str, Any]) -> None:
    """Adds a group to the base, on all ranks or on none; it joins the round under way."""
    known, given = len(optimizer.param_groups), list[Tensor]()

    def add_to_base() -> None:
        first = optimizer.param_groups[0]
        optimizer.base.add_param_group(param_group)
        new = optimizer.param_groups[-1]
        following.refuse_moved(optimizer, new["params"])
        given.extend(new["params"])
        binding.take_mesh(optimizer, new)
        for key, default in optimizer.defaults.items():
            new.setdefault(key, first["period"] if key == "period" else default)
        new.update({key: first[key] for key in COUNTED if key in first})
        check_new(optimizer, new)
        lr = lr_of(new)
        new["round_lr"] = lr * new["round_step"]
        if optimizer.streaming is not None:
            new["fragment_lr"] = tuple(lr * steps for steps in new["fragment_steps"])

    try:
        optimizer.register_new(add_to_base)
    except Exception:  # an optimizer of commopt has made state of what is refused
        for p in given:
            optimizer.base.state.pop(p, None)
        if isinstance(optimizer.base, PackedOptimizer):
            binding.forget_groups(optimizer.base, known)
        raise


def fixed_settings(optimizer: OuterOptimizer, error: Exception | None = None) -> list[Any]:
    """Settings that ranks must have alike besides their groups; some of them, of one that failed with ``error``."""
    base = name_of(optimizer.base) if hasattr(optimizer, "base") else None
    names = ("compressor", "max_grad_norm", "bucket_mb", "guard", "reduction", "state_period", "streaming")
    own = optimizer.own_settings() if error is None else {}
    settings = {name: getattr(optimizer, name) for name in names}
    return [{"optimizer": type(optimizer).__name__, "base": base, **settings, **own}]


def lr_of(group: Mapping[str, Any], failed: bool = False) -> float:
    """The learning rate of ``group``; 0 if its base has none, or finds its own and says None; and if it is no number,
    where that may be why the step has ``failed``."""
    lr = group.get("lr")
    try:
        return 0.0 if lr is None else float(lr)
    except (TypeError, ValueError):
        if not failed:
            raise
        return 0.0
