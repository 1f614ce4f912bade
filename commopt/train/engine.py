"""Who communicates: an optimizer that does it itself, or DistributedDataParallel around any torch optimizer.

Both sides of that choice answer the same four questions of the loop: what to call, how to accumulate, how to step, and
what was sent.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

import commopt.compress
import commopt.optim
from commopt.comm import Backend, all_reduce_bytes
from commopt.compress import Compressor, RandomBlocks
from commopt.train.backend import backend_class
from commopt.train.config import CompressorConfig, Config, OptimConfig
from commopt.train.errors import ConfigError
from commopt.train.models import count_parameters, parameter_groups
from commopt.train.named import build, check_arguments, find_class
from commopt.train.world import World

log = logging.getLogger(__name__)
AnyCompressor = Compressor | RandomBlocks
OWN_KEYS = {
    **{name: f"optim.{name}" for name in ("lr", "weight_decay", "max_grad_norm", "compressor")},
    "backend": "comm.backend",
    "process_group": "comm.backend",
}
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

    def averaged(self) -> AbstractContextManager[Any]:
        """Context in which the model is the same on all ranks, for evaluating and saving it."""
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

    def averaged(self) -> AbstractContextManager[Any]:
        """The mean model, where local steps have taken replicas apart."""
        return self.optimizer.averaged()

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

    def averaged(self) -> AbstractContextManager[Any]:
        """Replicas are never apart."""
        return contextlib.nullcontext()

    def traffic(self) -> Traffic:
        """DDP sends the same in every step, whether it is then skipped or not."""
        return Traffic(self.bytes, self.bytes, self.skipped)

    def residual_ratio(self) -> float | None:
        """Nothing is compressed."""
        return None


def make_compressor(config: CompressorConfig, key: str) -> Any:
    """The compressor, or the sparsifier, that a config names under ``key``."""
    cls = find_class(config.name, f"{key}.name", (commopt.compress,), AnyCompressor)
    check_arguments(cls, config.args, f"{key}.args")
    return build(cls, key, **config.args)


def plan_optimizer(config: OptimConfig) -> tuple[type, dict[str, Any]]:
    """The class that a config names and its arguments. Raises ConfigError for what does not fit; needs no model."""
    cls = find_class(config.name, "optim.name", (commopt.optim, torch.optim), torch.optim.Optimizer)
    check_arguments(cls, config.args, "optim.args", OWN_KEYS)
    extra: dict[str, Any] = {"lr": config.lr}
    if issubclass(cls, commopt.optim.CommOptimizer):
        extra["max_grad_norm"] = config.max_grad_norm
    if config.compressor is not None:
        check_arguments(cls, {"compressor": None}, "optim")
        extra["compressor"] = make_compressor(config.compressor, "optim.compressor")
    if config.weight_decay:
        check_arguments(cls, {"weight_decay": None}, "optim")
    for name, value in config.args.items():
        if name.endswith("_compressor") and isinstance(value, Mapping):
            extra[name] = make_compressor(_compressor_config(value, f"optim.args.{name}"), f"optim.args.{name}")
    return cls, config.args | extra


def _compressor_config(value: Mapping[str, Any], key: str) -> CompressorConfig:
    """A further compressor of an optimizer, written like ``optim.compressor``."""
    name, args = value.get("name"), value.get("args", {})
    if not value.keys() <= {"name", "args"} or not isinstance(name, str) or not isinstance(args, Mapping):
        raise ConfigError(f"{key}={dict(value)} is not allowed: expected name, the name of a compressor, and its args")
    return CompressorConfig(name, dict(args))


def check_plan(config: Config) -> None:
    """Raise ConfigError for an optimizer, a compressor or a backend that cannot be, or not together."""
    cls, _ = plan_optimizer(config.optim)
    own = backend_class(config.comm)
    if issubclass(cls, commopt.optim.CommOptimizer):
        return
    for key, value, allowed in (
        ("backend", config.comm.backend if own is not None else None, "auto, gloo and nccl"),
        ("ranks_per_node", config.comm.ranks_per_node if config.comm.ranks_per_node != 1 else None, "1"),
    ):
        if value is not None:
            raise ConfigError(
                f"comm.{key}={value} is not allowed with optim.name={config.optim.name}: that is trained under "
                f"DistributedDataParallel, which has {allowed}"
            )


def make_optimizer(config: OptimConfig, model: nn.Module, backend: Backend | None = None) -> torch.optim.Optimizer:
    """The optimizer that a config names, over two named parameter groups."""
    cls, args = plan_optimizer(config)
    if backend is not None:
        args["backend"] = backend
    return build(cls, "optim", parameter_groups(model, config.weight_decay), **args)


def make_engine(config: OptimConfig, model: nn.Module, world: World) -> Engine:
    """The optimizer and whoever communicates for it."""
    optimizer = make_optimizer(config, model, world.backend)
    if isinstance(optimizer, commopt.optim.CommOptimizer):
        return SelfCommunicating(model, optimizer)
    return DataParallel(model, optimizer, config.max_grad_norm, world)
