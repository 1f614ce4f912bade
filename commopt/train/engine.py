"""Who communicates: an optimizer that does it itself, or DistributedDataParallel around any torch optimizer.

Both sides of that choice answer the same four questions of the loop: what to call, how to accumulate, how to step, and
what was sent.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import nn

import commopt.compress
import commopt.optim
from commopt.comm import all_reduce_bytes
from commopt.train.config import CompressorConfig, OptimConfig
from commopt.train.errors import ConfigError
from commopt.train.models import count_parameters, parameter_groups
from commopt.train.parse import nearest
from commopt.train.world import World

log = logging.getLogger(__name__)
OWN_KEYS = ("lr", "weight_decay", "max_grad_norm", "compressor")
"""Arguments that have their own key in the config and so may not be in ``optim.args``."""

# torch 2.13 renames the argument, and warns of the old name. The models' buffers are constants: nothing to send.
_DDP_ARGUMENTS = inspect.signature(nn.parallel.DistributedDataParallel).parameters
_CONSTANT_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _DDP_ARGUMENTS else "broadcast_buffers": False
}


@dataclass(frozen=True)
class Traffic:
    """What one step sent, on this rank."""

    bytes: int
    fp32_bytes: int
    """What an fp32 all-reduce of all parameters sends."""
    skipped: bool
    """Whether the step was skipped for inf or NaN."""


class Engine(Protocol):
    """The model and its optimizer, as the loop uses them."""

    module: nn.Module
    """What to call for the loss."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Whose learning rate and state the loop handles."""
        ...

    @property
    def phase(self) -> str:
        """Phase of the next step: warmup, compressed, ddp, or plain (one rank)."""
        ...

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        """Context of one of several backward passes of a step."""
        ...

    def step(self) -> None:
        """Clip and update."""
        ...

    def traffic(self) -> Traffic:
        """What the last step sent."""
        ...

    def residual_ratio(self) -> float | None:
        """Norm of the compression residual over that of the momentum; None where nothing is compressed. Reads both."""
        ...


class SelfCommunicating:
    """A commopt optimizer on a bare module: gradients stay local, it does the rest, clipping included."""

    def __init__(self, model: nn.Module, optimizer: commopt.optim.CommOptimizer) -> None:
        self.module, self.optimizer = model, optimizer
        self._skipped = (0, 0)  # steps skipped so far, before and after the last step

    @property
    def phase(self) -> str:
        """As the optimizer says."""
        return self.optimizer.phase

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        """Holds an overlapping optimizer back until the last backward."""
        return contextlib.nullcontext() if last else self.optimizer.no_sync()

    def step(self) -> None:
        """One step of the optimizer."""
        self.optimizer.step()
        self._skipped = (self._skipped[1], self.optimizer.skipped_steps)

    def traffic(self) -> Traffic:
        """From the optimizer's own counts."""
        sent, full = self.optimizer.backend.step.summary()["bytes"], self.optimizer.fp32_bytes()
        return Traffic(sent, full, self._skipped[0] < self._skipped[1])

    def residual_ratio(self) -> float | None:
        """From the optimizer's own statistics."""
        return self.optimizer.comm_stats()["residual_ratio"] or None  # 0 before the first compression


class DataParallel:
    """A torch optimizer under DDP, the uncompressed baseline. A step with a gradient that is not finite is skipped."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, max_grad_norm: float | None, world: World
    ) -> None:
        self.optimizer, self.alone = optimizer, world.size == 1
        self.limit = float("inf") if max_grad_norm is None else max_grad_norm
        self.skipped, self.bytes = False, all_reduce_bytes(4 * count_parameters(model), world.size)
        self.module = model if self.alone else nn.parallel.DistributedDataParallel(model, **_CONSTANT_BUFFERS)

    @property
    def phase(self) -> str:
        """Always the same."""
        return "plain" if self.alone else "ddp"

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        """DDP all-reduces in the last backward pass only."""
        if last or not isinstance(self.module, nn.parallel.DistributedDataParallel):
            return contextlib.nullcontext()
        return self.module.no_sync()

    def step(self) -> None:
        """Clip to the norm of the averaged gradient and update; every rank has the same gradient, so all skip
        together."""
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), self.limit)
        self.skipped = not torch.isfinite(norm)
        if self.skipped:
            log.warning("step skipped on all ranks: inf or NaN in the gradients")
        else:
            self.optimizer.step()

    def traffic(self) -> Traffic:
        """DDP sends the same in every step, whether it is then skipped or not."""
        return Traffic(self.bytes, self.bytes, self.skipped)

    def residual_ratio(self) -> float | None:
        """Nothing is compressed."""
        return None


def find_class(name: str, key: str, modules: tuple[ModuleType, ...], base: type) -> type:
    """The class that a config names: an attribute of one of ``modules``, or a dotted path.

    Raises ConfigError, with the nearest valid name, where there is none.
    """
    if "." in name:
        path, _, attribute = name.rpartition(".")
        try:
            found = getattr(importlib.import_module(path), attribute, None)
        except ImportError as error:
            raise ConfigError(f"{key}={name!r}: cannot import {path}: {error}") from None
    else:
        found = next((getattr(module, name) for module in modules if hasattr(module, name)), None)
    if not (isinstance(found, type) and issubclass(found, base)):
        public = [n for m in modules for n, v in vars(m).items() if isinstance(v, type) and issubclass(v, base)]
        places = " or ".join(module.__name__ for module in modules)
        raise ConfigError(f"{key}={name!r} is no {base.__name__} of {places}{nearest(name, public)}")
    return found


def check_arguments(cls: type, args: Mapping[str, Any], key: str, taken: tuple[str, ...] = ()) -> None:
    """Raise ConfigError for an argument that ``cls`` has not, naming the nearest that it has."""
    parameters = inspect.signature(cls).parameters
    for name in args:
        if name in taken:
            raise ConfigError(f"{key}.{name}: set optim.{name} instead")
        if name not in parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            valid = [n for n in parameters if n not in (*taken, "params")]
            raise ConfigError(f"{key}.{name}: {cls.__name__} has no such argument{nearest(name, valid)}")


def _build(cls: type, key: str, *args: Any, **kwargs: Any) -> Any:
    """Make ``cls``; what it says about its arguments becomes a ConfigError. YAML's lists are tuples for it."""
    kwargs = {name: tuple(value) if isinstance(value, list) else value for name, value in kwargs.items()}
    try:
        return cls(*args, **kwargs)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{key}: {cls.__name__}: {' '.join(str(error).split())}") from error


def make_compressor(config: CompressorConfig) -> Any:
    """The compressor that a config names."""
    key = "optim.compressor"
    cls = find_class(config.name, f"{key}.name", (commopt.compress,), commopt.compress.Compressor)
    check_arguments(cls, config.args, f"{key}.args")
    return _build(cls, key, **config.args)


def plan_optimizer(config: OptimConfig) -> tuple[type, dict[str, Any]]:
    """The class that a config names and its arguments. Raises ConfigError for what does not fit; needs no model."""
    cls = find_class(config.name, "optim.name", (commopt.optim, torch.optim), torch.optim.Optimizer)
    check_arguments(cls, config.args, "optim.args", OWN_KEYS)
    extra: dict[str, Any] = {"lr": config.lr}
    if issubclass(cls, commopt.optim.CommOptimizer):
        extra["max_grad_norm"] = config.max_grad_norm
    if config.compressor is not None:
        check_arguments(cls, {"compressor": None}, "optim")
        extra["compressor"] = make_compressor(config.compressor)
    if config.weight_decay:
        check_arguments(cls, {"weight_decay": None}, "optim")
    return cls, extra | config.args


def make_optimizer(config: OptimConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer that a config names, over two named parameter groups."""
    cls, args = plan_optimizer(config)
    return _build(cls, "optim", parameter_groups(model, config.weight_decay), **args)


def make_engine(config: OptimConfig, model: nn.Module, world: World) -> Engine:
    """The optimizer and whoever communicates for it."""
    optimizer = make_optimizer(config, model)
    if isinstance(optimizer, commopt.optim.CommOptimizer):
        return SelfCommunicating(model, optimizer)
    return DataParallel(model, optimizer, config.max_grad_norm, world)
