"""Checks of what users hand in. Each raises ValueError with the value and what is allowed."""

from __future__ import annotations

import difflib
import inspect
import itertools
import math
import traceback
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from commopt import compress
from commopt.compress import Compressor, RandomBlocks
from commopt.sharding import is_sharded, local

_OF_GRADIENTS = (compress.ACP, compress.PowerSGD, compress.TopBlocks)

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def is_number(value: Any) -> bool:
    """True if ``value`` is a finite number, one of numpy's too (and no bool)."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def check_at_least(name: str, value: Any, low: float) -> None:
    if not is_number(value) or value < low:
        raise ValueError(f"{name} must be a number >= {low}, got {value!r}")


def check_positive(name: str, value: Any) -> None:
    if not is_number(value) or value <= 0:
        raise ValueError(f"{name} must be a number > 0, got {value!r}")


def check_lr(value: Any) -> None:
    """``value`` must be a number >= 0, or a tensor of one element that holds one."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"lr as a tensor must have 1 element, got shape {tuple(value.shape)}")
        value = value.item()
    check_at_least("lr", value, 0)


def check_betas(value: Any, name: str = "betas") -> None:
    if not isinstance(value, (tuple, list)) or len(value) != 2 or not all(is_number(b) and 0 <= b < 1 for b in value):
        raise ValueError(f"{name} must be two numbers in [0, 1), got {value!r}")


def check_within(name: str, value: Any, low: float, high: float) -> None:
    """``low`` <= value < ``high``."""
    if not is_number(value) or not low <= value < high:
        raise ValueError(f"{name} must be a number in [{low:g}, {high:g}), got {value!r}")


def check_outer(group: dict[str, Any]) -> None:
    """Checks a parameter group of an outer step with a momentum."""
    check_at_least("outer_lr", group["outer_lr"], 0)
    check_within("outer_momentum", group["outer_momentum"], 0, 1)


def check_lamb(group: dict[str, Any], bounded: bool = True) -> None:
    """Checks a parameter group of LAMB. bounded: whether max_coeff must be a number; it may be None otherwise."""
    check_lr(group["lr"])
    check_betas(group["betas"])
    check_positive("eps", group["eps"])  # 0 / 0 in one element would spoil the norm of its tensor
    check_at_least("weight_decay", group["weight_decay"], 0)
    check_at_least("min_coeff", group["min_coeff"], 0)
    low, high = group["min_coeff"], group["max_coeff"]
    if bounded or high is not None:
        if not is_number(high) or high <= 0:
            raise ValueError(f"max_coeff must be a number > 0{'' if bounded else ', or None'}, got {high!r}")
        if high < low:
            raise ValueError(f"max_coeff must be at least min_coeff={low!r}, got {high!r}")
    check_bool("maximize", group["maximize"])


def check_lans(group: dict[str, Any]) -> None:
    """Checks a parameter group of LANS."""
    check_lamb(group, bounded=False)
    check_bool("normalize_grad", group["normalize_grad"])


def check_onebit_lamb(group: dict[str, Any]) -> None:
    """Checks the rest of a parameter group of 1-bit LAMB."""
    check_within("coeff_beta", group["coeff_beta"], 0, 1)
    check_within("factor_threshold", group["factor_threshold"], 0, 1)
    low, high = group["factor_min"], group["factor_max"]
    if not is_number(low) or not 0 < low <= 1:
        raise ValueError(f"factor_min must be a number in (0, 1], got {low!r}")
    check_at_least("factor_max", high, 1)
    check_scaling(group["scaling"])
    check_freeze_step(group["freeze_step"])
    check_thaw(group["thaw"])
    check_min_variance(group["min_variance"])


def check_thaw(value: Any) -> None:
    if value not in ("auto", "always", "never"):
        raise ValueError(f"thaw must be 'auto', 'always' or 'never', got {value!r}")


def check_min_variance(value: Any) -> None:
    check_within("min_variance", value, 0, 1)


def check_scaling(value: Any) -> None:
    if value not in ("tensor", "element"):
        raise ValueError(f"scaling must be 'tensor' or 'element', got {value!r}")


def check_freeze_step(value: Any) -> None:
    if value != "auto":
        check_int("freeze_step", value, 1, "'auto' or ")


def check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")


def check_compressor(compressor: Any, name: str = "compressor") -> None:
    if not isinstance(compressor, Compressor):
        raise ValueError(
            f"{name} must be a commopt.compress.Compressor such as Sign(), got {no_compressor(compressor)}"
        )


def no_compressor(value: Any) -> str:
    """Description of ``value`` in place of a compressor, and how it would be one, or where it belongs."""
    if isinstance(value, RandomBlocks):
        return f"{value!r}, which is for CSER and QSparseLocalSGD"
    if isinstance(value, _OF_GRADIENTS):
        return f"{value!r}, which compresses gradients only: commopt.compress_gradients(model, {value!r})"
    known = {name.lower(): name for name in compress.__all__}
    name = value.__name__ if isinstance(value, type) else value
    if isinstance(name, str) and name.lower() in known:
        what = f"the class {name}" if isinstance(value, type) else repr(value)
        return f"{what}: write commopt.compress.{known[name.lower()]}()"
    return repr(value)


def nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """A question for the one of ``names`` that may be meant, if one is near: by difflib's ratio, ``cutoff`` or more."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=cutoff)
    return f"; did you mean {close[0]}?" if close else ""


def arguments_of(cls: type) -> list[str]:
    """The names of the arguments of ``cls``, in order. An optimizer of commopt that takes others, and has
    ``known_options``, hands them on: it takes those of its parent, too, if that is one that users make."""
    parameters = inspect.signature(cls).parameters
    parents = (parent for parent in cls.__mro__[1:] if "__init__" in vars(parent) and hasattr(parent, "known_options"))
    further = {}
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()) and (parent := next(parents, None)) is not None:
        further = dict(inspect.signature(parent).parameters)  # type: ignore[arg-type]
    named = {**parameters, **({} if "defaults" in further else further)}
    return [name for name, p in named.items() if p.kind is not p.VAR_KEYWORD]


def check_partial(name: str, how: Any) -> None:
    """``how`` must say which part of a buffer is averaged: RandomBlocks, or any Compressor."""
    if not isinstance(how, (Compressor, RandomBlocks)):
        raise ValueError(f"{name} must be a RandomBlocks or a Compressor of commopt.compress, got {no_compressor(how)}")


def check_period(value: Any) -> None:
    check_int("period", value, 1)


def check_int(name: str, value: Any, low: int | None = None, also: str = "") -> None:
    """``value`` must be an int, >= ``low`` if that is given; ``also`` says what else is allowed."""
    if not isinstance(value, int) or isinstance(value, bool) or (low is not None and value < low):
        raise ValueError(f"{name} must be {also}an int{'' if low is None else f' >= {low}'}, got {value!r}")


def check_rank(name: str, value: Any, world_size: int) -> None:
    """``value`` must be the number of a rank."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < world_size:
        raise ValueError(f"{name} must be the number of a rank, 0 to {world_size - 1}, got {value!r}")


def check_common(max_grad_norm: Any, bucket_mb: Any, overlap: Any) -> None:
    """The arguments that all optimizers share."""
    if max_grad_norm is not None:
        check_positive("max_grad_norm", max_grad_norm)
    if bucket_mb is not None:
        check_positive("bucket_mb", bucket_mb)
    check_bool("overlap", overlap)
    if overlap and max_grad_norm is not None:
        raise ValueError(
            f"overlap=True and max_grad_norm={max_grad_norm} exclude each other: the norm is known only when backward "
            "is over, and by then most gradients have been sent; leave one of them out"
        )


def check_reduction(value: Any) -> None:
    if value not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum', got {value!r}")


def check_params(params: Sequence[Tensor], devices: Sequence[str] | None = None, sharded: bool = False) -> None:
    """devices: the types that the backend can send from; None for all. sharded: whether DTensors are allowed."""
    if _is_partition():
        raise ValueError(
            "ZeroRedundancyOptimizer gives each rank other parameters, which an optimizer that averages them over the "
            "ranks would mix up; give the commopt optimizer all parameters itself"
        )
    for i, p in enumerate(params):
        if is_lazy(p):
            raise ValueError(
                f"parameter {i} has no shape yet, it is of a lazy module such as LazyLinear: let the model compute "
                "once, with an input of the right shape, then make the optimizer, or compress"
            )
        if getattr(p, "_is_flat_param", False) or getattr(p, "_fsdp_flattened", False):
            raise ValueError(
                f"parameter {i} is sharded by FullyShardedDataParallel: each rank holds another part of the model, and "
                "averaging these would mix them up; allowed are whole parameters, the same on every rank"
            )
        if is_sharded(p):
            _check_sharded(i, p, sharded)
        if p.device.type == "meta":
            raise ValueError(
                f"parameter {i} is on the meta device and has no values; its shape is {tuple(p.shape)}. Give the model "
                "memory (model.to_empty(device=...)) and values (initialise it, or load its weights), then make the "
                "optimizer"
            )
        if devices is not None and p.device.type not in devices:
            raise ValueError(
                f"parameter {i} is on {p.device}, but this backend sends from {' and '.join(devices)} only: move the "
                "model there, or give another process group or backend"
            )
        if p.dtype not in _DTYPES:
            allowed = ", ".join(str(d).removeprefix("torch.") for d in _DTYPES)
            raise ValueError(f"parameter {i} is {str(p.dtype).removeprefix('torch.')}; allowed are {allowed}")
        if p.layout != torch.strided:
            raise ValueError(
                f"parameter {i} is a {type(p).__name__} of layout {p.layout}; allowed are plain strided tensors"
            )


def refuse_shared_memory(name: str, params: Sequence[Tensor]) -> None:
    """Raises ValueError if two of ``params`` share memory, for an optimizer called ``name`` whose rounds set each of
    them: what one has learnt would be written over. Tensors with gaps, which may interleave, are left out."""
    spans = []
    for i, p in enumerate(params):
        x = local(p)
        dense = x.numel() == 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))
        if p.requires_grad and dense and x.device.type != "meta" and x.data_ptr():
            spans.append((str(x.device), x.data_ptr(), x.data_ptr() + x.nbytes, i))
    spans.sort()
    for (device, _, end, i), (other, start, _, j) in itertools.pairwise(spans):
        if device == other and start < end and params[i] is not params[j]:
            i, j = sorted((i, j))
            raise ValueError(
                f"parameters {i} and {j} share memory, and a round of {name} would keep what only one of them has "
                "learnt: make them one parameter (module.weight = other.weight), or give one a memory of its own"
            )


def _is_partition() -> bool:
    """True if a ZeroRedundancyOptimizer is making this optimizer of its rank's part of the parameters: nothing in
    the parameters tells that they are another's."""
    return any(
        frame.f_code.co_filename.endswith("zero_redundancy_optimizer.py") for frame, _ in traceback.walk_stack(None)
    )


def _check_sharded(i: int, p: Tensor, allowed: bool) -> None:
    placements = getattr(p, "placements", ())
    if not allowed:
        raise ValueError(
            f"parameter {i} is a DTensor, placed as {placements}: whom its ranks average with must be told. Give all "
            "of the device mesh that the parameters are on a slice of, process_group=mesh, where the model has "
            'fully_shard(model, mesh=mesh["shard"])'
        )
    if any(placement.is_partial() for placement in placements):
        raise ValueError(
            f"parameter {i} is a DTensor placed as {placements}: a sum that is still to be made is no parameter; "
            "allowed are Shard and Replicate"
        )


def check_gradients(gradients: Iterable[Tensor]) -> None:
    for gradient in gradients:
        if gradient.layout != torch.strided:
            raise ValueError(
                f"the gradient of a parameter of shape {tuple(gradient.shape)} is {gradient.layout}; allowed are dense "
                "gradients (torch.strided), so create embeddings with sparse=False"
            )
