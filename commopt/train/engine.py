"""Engines, which say who communicates: an optimizer that does it itself, or DistributedDataParallel around any torch
optimizer, or FSDP2 below it where models are cut over a mesh.

All sides of that choice answer the same four questions of the loop: what to call, how to accumulate, how to step, and
what was sent.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from commopt.agreement.calls import OutOfStep, StepRefused
from commopt.comm import LocalBackend, MessageDamaged, NodesBackend, all_reduce_bytes
from commopt.gradients import CompressedGradients, compress_gradients
from commopt.optim import CommOptimizer, NotFinite, ReplicasDiffer
from commopt.outer import OuterOptimizer
from commopt.sharding import local
from commopt.train.config import Config
from commopt.train.errors import ConfigError, DivergedError, RankError, ReplicaError
from commopt.train.finite import bad, in_short
from commopt.train.models import count_parameters
from commopt.train.optimizer import OURS, make_optimizer, plan_compression, plan_optimizer
from commopt.train.parallel import make_mesh, shard, share_gradients
from commopt.train.world import World

log = logging.getLogger(__name__)

# torch 2.13 renames the argument, and warns of the old name. The models' buffers are constants: nothing to send.
_DDP_ARGUMENTS = inspect.signature(nn.parallel.DistributedDataParallel).parameters
_CONSTANT_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _DDP_ARGUMENTS else "broadcast_buffers": False
}


@dataclass(frozen=True)
class Traffic:
    """Traffic of one step, on this rank."""

    bytes: int
    fp32_bytes: int
    """Bytes that an fp32 all-reduce of all parameters sends."""
    skipped: bool
    """True if the step, or this rank's gradient of a local step, was left out for inf or NaN."""


class Engine(Protocol):
    """The model and its optimizer, as the loop uses them."""

    module: nn.Module
    """Callable that gives the loss."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Whose learning rate and state the loop handles."""
        ...

    @property
    def phase(self) -> str:
        """Phase of the next step: ddp, hsdp, plain (one rank), or what the optimizer says."""
        ...

    @property
    def steps_locally(self) -> bool:
        """True if ranks tell each other nothing in the next step."""
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
        """Traffic of the last step."""
        ...

    def residual_ratio(self) -> float | None:
        """Norm of the compression residual over that of what is compressed (the momentum, or an outer optimizer's last
        mean way); None where nothing is."""
        ...


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Context of what communicates: errors of commopt by which all ranks end a run are those of one line."""
    try:
        yield
    except NotFinite as error:
        raise DivergedError(str(error)) from error
    except (ReplicasDiffer, MessageDamaged) as error:
        raise ReplicaError(f"{error}: --resume=auto") from error
    except OutOfStep:
        raise
    except StepRefused as error:
        raise RankError(str(error)) from error


class SelfCommunicating:
    """A commopt optimizer on a bare module: gradients stay local, it does the rest, clipping included."""

    def __init__(self, model: nn.Module, optimizer: CommOptimizer | OuterOptimizer) -> None:
        self.module, self.optimizer = model, optimizer
        self._skipped = (0, 0)  # steps skipped so far, also by this rank alone, before and after the last step

    @property
    def phase(self) -> str:
        """As the optimizer says."""
        return self.optimizer.phase

    @property
    def steps_locally(self) -> bool:
        """As the optimizer says."""
        return self.optimizer.steps_locally()

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        """Holds an overlapping optimizer back until the last backward."""
        return contextlib.nullcontext() if last else self.optimizer.no_sync()

    def step(self) -> None:
        """One step of the optimizer.

        Raises:
            DivergedError, ReplicaError: on all ranks; see :class:`commopt.Guard`.
        """
        with explained():
            self.optimizer.step()
        dropped = getattr(self.optimizer, "dropped_gradients", 0)
        self._skipped = (self._skipped[1], self.optimizer.skipped_steps + dropped)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """The mean model, where replicas differ after local steps."""
        with explained(), self.optimizer.averaged():
            yield

    def traffic(self) -> Traffic:
        """From the optimizer's own counts."""
        sent, full = self.optimizer.topology.traffic.step.summary()["bytes"], self.optimizer.fp32_bytes()
        return Traffic(sent, full, self._skipped[0] < self._skipped[1])

    def residual_ratio(self) -> float | None:
        """From the optimizer's own statistics."""
        return self.optimizer.comm_stats()["residual_ratio"] or None  # 0 before the first compression


def phase_of(gradients: CompressedGradients) -> str:
    """ "plain" where there is one node, and nothing to compress; else "warmup" before "compressed"."""
    if not gradients.compresses:
        return "plain"
    return "warmup" if gradients.warms_up else "compressed"


class DataParallel:
    """A torch optimizer under DDP: the uncompressed baseline, or on compressed means of the gradients. A step with a
    gradient that is not finite is skipped."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, config: Config, world: World) -> None:
        self.optimizer, self.alone = optimizer, world.size == 1
        self.limit = float("inf") if config.optim.max_grad_norm is None else config.optim.max_grad_norm
        self.max_skipped, self.row = config.optim.max_skipped, 0  # steps in a row that were skipped
        self.skipped, self.bytes = False, self.bytes_of(model, world)
        self.timeout = timedelta(seconds=config.comm.timeout)
        self.module = self.wrap(model)
        plan = plan_compression(config)
        self.gradients = (
            None if plan is None else self.compress({**plan, "check_every": config.optim.check_every}, world)
        )

    def compress(self, plan: Mapping[str, Any], world: World) -> CompressedGradients:
        """Has means of the gradients compressed. Raises ConfigError for what does not go with these ranks."""
        given = _where_there_are_nodes(plan, world)
        try:
            return compress_gradients(self.module, **self.ranks(world), **given)
        except ValueError as error:
            raise ConfigError(f"comm.compress: {error}") from error

    def ranks(self, world: World) -> dict[str, Any]:
        """Between whom, as :func:`commopt.compress_gradients` takes it."""
        return {"backend": LocalBackend() if self.alone else world.backend}

    def bytes_of(self, model: nn.Module, world: World) -> int:
        """Bytes of a step, on this rank."""
        return all_reduce_bytes(4 * count_parameters(model), world.size)

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model with whoever averages its gradients."""
        return model if self.alone else nn.parallel.DistributedDataParallel(model, **_CONSTANT_BUFFERS)

    @property
    def phase(self) -> str:
        """As of :func:`phase_of`, or always the same: "plain" on one rank, else "ddp"."""
        if self.gradients is not None:
            return phase_of(self.gradients)
        return "plain" if self.alone else "ddp"

    steps_locally = False

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        """DDP all-reduces in the last backward pass only."""
        if last or (self.alone and self.gradients is None):
            return contextlib.nullcontext()
        module: Any = self.module if self.gradients is None else self.gradients
        no_sync: AbstractContextManager[None] = module.no_sync()
        return no_sync

    def step(self) -> None:
        """Clip to the norm of the averaged gradient and update; every rank has the same gradient, so all skip
        together.

        Raises:
            DivergedError: on all ranks, when ``max_skipped`` steps in a row have been skipped.
        """
        gradients = [(name, p.grad) for name, p in self._named()]
        norm = self.clip()
        self.skipped = not torch.isfinite(norm)
        if not self.skipped:
            self.row = 0
            self.optimizer.step()
            return
        self.row += 1
        log.warning("step skipped on all ranks: inf or NaN in the gradients")
        if self.max_skipped is not None and self.row >= self.max_skipped:
            self._give_up(bad(gradients))

    def clip(self) -> Tensor:
        """Clips the gradients, unless their norm is not finite; gives the norm that they had."""
        norm = nn.utils.get_total_norm([p.grad for p in self.module.parameters() if p.grad is not None])
        if torch.isfinite(norm):
            nn.utils.clip_grads_with_norm_(self.module.parameters(), self.limit, norm)
        return norm

    def _named(self) -> list[tuple[str, Tensor]]:
        """The parameters, by their names in the model that DDP has wrapped."""
        return [(name.removeprefix("module."), p) for name, p in self.module.named_parameters()]

    def _give_up(self, gradients: list[str]) -> None:
        weights = bad(self._named())
        places = [f"the gradients of {in_short(gradients)}"] if gradients else ["the norm of the gradients"]
        places += [f"the weights of {in_short(weights)}"] if weights else []
        raise DivergedError(
            f"{self.row} steps in a row were skipped (optim.max_skipped): inf or NaN in {' and in '.join(places)}; go "
            "on from the last checkpoint with --resume=auto and a lower --optim.lr"
        )

    def averaged(self) -> AbstractContextManager[Any]:
        """Replicas never differ."""
        return contextlib.nullcontext()

    def traffic(self) -> Traffic:
        """DDP sends the same in every step, whether it is then skipped or not."""
        if self.gradients is None:
            return Traffic(self.bytes, self.bytes, self.skipped)
        stats = self.gradients.comm_stats()
        return Traffic(stats["step"]["bytes"], stats["fp32_bytes"], self.skipped)

    def residual_ratio(self) -> float | None:
        """Nobody adds it up."""
        return None


def _where_there_are_nodes(plan: Mapping[str, Any], world: World) -> Mapping[str, Any]:
    """``plan`` without what compresses inside a node, where that is one rank: nothing is sent there."""
    alike = world.mesh is None or world.mesh["shard"].size() == world.size  # else replicas are the nodes
    if "inside" not in plan or not alike or isinstance(world.backend, NodesBackend):
        return plan
    if world.is_main:
        log.warning("comm.compress.inside: a node is one rank here (comm.ranks_per_node), so that nothing is inside")
    return {name: value for name, value in plan.items() if name != "inside"}


class Hybrid(DataParallel):
    """A torch optimizer on pieces of a model that FSDP2 averages over all ranks (HSDP): the uncompressed baseline on a
    mesh; or over the ranks of a replica, and compressed means are taken between these, or inside the only one. Bytes
    are those between the replicas, or inside the only one what is compressed."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, config: Config, world: World) -> None:
        assert world.mesh is not None
        self.mesh = world.mesh
        super().__init__(model, optimizer, config, world)

    def ranks(self, world: World) -> dict[str, Any]:
        mesh = world.mesh
        if isinstance(world.backend, NodesBackend):  # the model is cut over all ranks
            shape = world.backend.inter_node.world_size, world.backend.intra_node.world_size
            mesh = make_mesh(shape, ("node", "place"), world.device, self.timeout)
        return {"process_group": mesh}

    def bytes_of(self, model: nn.Module, world: World) -> int:
        """An all-reduce of this rank's pieces in every step."""
        assert world.mesh is not None
        pieces = sum(local(p).numel() for p in model.parameters())
        return all_reduce_bytes(4 * pieces, world.mesh["replicate"].size())

    def wrap(self, model: nn.Module) -> nn.Module:
        """It is FSDP2's already."""
        return model

    @property
    def phase(self) -> str:
        """As of :func:`phase_of`, or always the same: "plain" on one rank, else "hsdp"."""
        if self.gradients is not None:
            return phase_of(self.gradients)
        return "plain" if self.mesh.size() == 1 else "hsdp"

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        """Inside a replica FSDP2 reduces in every backward pass, which saves memory; between replicas, and inside the
        only one if that is compressed, in the last."""
        if self.gradients is not None:
            return contextlib.nullcontext() if last else self.gradients.no_sync()
        self.module.set_requires_all_reduce(last)  # type: ignore[operator]
        return contextlib.nullcontext()

    def step(self) -> None:
        """As of DDP, once the ranks of a tensor group have the same gradient of what each of them holds."""
        share_gradients(self.module, self.mesh)
        super().step()

    def clip(self) -> Tensor:
        """As of DDP, but parameters may be on meshes of their own: over tensor parallel ranks only some are cut."""
        grads: dict[Any, list[Tensor]] = {}
        for g in (p.grad for p in self.module.parameters() if p.grad is not None):
            grads.setdefault(g.device_mesh, []).append(g)  # type: ignore[attr-defined]
        norms = [nn.utils.get_total_norm(some).full_tensor() for some in grads.values()]  # type: ignore[attr-defined]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        if torch.isfinite(norm):
            factor = (self.limit / (norm + 1e-6)).clamp(max=1.0)
            for some in grads.values():
                torch._foreach_mul_([local(g) for g in some], factor)
        return norm


def make_engine(config: Config, model: nn.Module, world: World) -> Engine:
    """The optimizer and whoever communicates for it; cuts the model, if there is a mesh."""
    if world.mesh is not None:
        ours = issubclass(plan_optimizer(config.optim)[0], OURS)
        shard(model, world.mesh, hybrid=not ours and config.comm.compress is None)
    optimizer = make_optimizer(config.optim, model, world.backend, world.mesh)
    if isinstance(optimizer, OURS):
        return SelfCommunicating(model, optimizer)
    if world.mesh is not None:
        return Hybrid(model, optimizer, config, world)
    return DataParallel(model, optimizer, config, world)
