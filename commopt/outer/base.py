"""Local steps, and an outer step now and then: what all optimizers of this kind share.

Each rank lets a base optimizer of its own take ``period`` steps on its own gradients, without a word to the others.
Then the ranks average how far they have come, and a subclass says what to make of that:

    round:    x_i <- x, on every rank i;   period local steps of the base on x_i
              D = mean_i (x - x_i), in float32 or compressed
              x <- outer_step(x, D), the same bits on every rank

x, the **anchor**, is kept in float32 (float64 for float64 parameters), so bfloat16 parameters have a master copy; what
counts as a rank's way is the distance from the rounded anchor it has started from. The base's own state is never
averaged.

A subclass says ``check_group``, ``outer_step``, and what it needs: ``momentum``, ``uses_lr``, ``own_settings``.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import torch

from commopt.comm import Backend, Topology, refuse_if_left_out, resolve_backend
from commopt.compress import Compressor
from commopt.optim import checks
from commopt.optim.agreement import LARGEST_NORM, is_usable
from commopt.optim.diagnostics import worth_a_line
from commopt.optim.guard import Guard, NotFinite, check_guard
from commopt.optim.lifetime import forget_frames, import_what_torch_imports_late
from commopt.optim.rules import square_norm
from commopt.outer.saving import POSITION
from commopt.outer.synchronize import SynchronizedOuter
from commopt.outer.wrap import check_base, make_base, step_base

logger = logging.getLogger("commopt")


class OuterOptimizer(SynchronizedOuter):
    """A base optimizer with an outer step every ``period`` steps; see the module's docstring for what a subclass adds.

    Its ``param_groups`` are those of the base, so learning-rate schedules act on the base; the outer hyper-parameters
    are there too (``outer_...``), and ``period``, which may change between rounds, and the position: ``round_step``
    local steps since the last of ``rounds`` synchronisations. ``state`` has the outer state; ``base.state`` is the
    base's.

    Args:
        params: parameters, (name, parameter) pairs or parameter groups, for the class ``base``; or a base optimizer.
        base: class (or any callable) of the base optimizer; None is torch.optim.AdamW, or ``params`` is the optimizer.
        base_args: arguments of that class.
        outer: outer hyper-parameters of the groups.
        period: local steps between two synchronisations, >= 1.
        compressor: what is sent of the ranks' ways; None is full precision.
        max_grad_norm: clip this rank's gradient to this norm in each local step, or None.
        bucket_mb: MB (2**20 bytes) of float32 per bucket; None for an 8th of the parameter group, but 1 to 25.
        guard: when a run that has gone wrong ends; :class:`commopt.Guard` if None. Digests are compared at
            synchronisations, about every ``check_every`` steps.
        process_group, backend: as for every optimizer of commopt.

    Raises:
        ValueError: on every rank, for an argument out of range on any of them, for a base optimizer that communicates
            itself, or if ranks differ in parameters or settings.
    """

    uses_lr = False
    """Whether the outer step divides by the learning rate of the base."""

    def __init__(
        self,
        params: Any,
        base: Callable[..., torch.optim.Optimizer] | None,
        base_args: dict[str, Any],
        outer: dict[str, Any],
        *,
        period: int,
        compressor: Compressor | None = None,
        max_grad_norm: float | None = None,
        bucket_mb: float | None = None,
        guard: Guard | None = None,
        process_group: Any = None,
        backend: Backend | None = None,
    ) -> None:
        import_what_torch_imports_late()
        self.topology = Topology(resolve_backend(process_group, backend))
        self.compressor, self.max_grad_norm, self.bucket_mb = compressor, max_grad_norm, bucket_mb
        self.guard = Guard() if guard is None else guard
        self.skipped_steps = self.skipped_rounds = 0
        self._restart()
        self._ready = False
        error: Exception | None = None
        try:
            if compressor is not None and not isinstance(compressor, Compressor):
                raise ValueError(
                    "compressor must be None (full precision) or a commopt.compress.Compressor such as Sign(), got "
                    f"{compressor!r}"
                )
            checks.check_common(max_grad_norm, bucket_mb, overlap=False)
            check_guard(self.guard)
            self.own_settings()
            self.base = make_base(params, base, base_args)
            check_base(self.base)
            ours = {**outer, "period": period, **POSITION}
            _check_names(self.base, ours)
            super().__init__(self.base.param_groups, {**self.base.defaults, **ours})
            self.param_groups = self.base.param_groups
        except (ValueError, TypeError) as caught:
            error = caught
        self._ready = True
        try:
            self._register(getattr(self, "param_groups", []), error)
        except Exception as raised:
            forget_frames(raised)
            raise
        finally:
            error = None

    def _restart(self) -> None:
        self.buckets = []
        self._attachment: Any = None
        self._reported_equal = self._moved = False
        self._check_next = True  # digests, at the next synchronisation
        self._skipped_in_a_row = self._local_skips = 0
        self._square = 0.0
        self._ready = True

    # what a subclass says ---------------------------------------------------------------------------------------------

    def check_group(self, group: dict[str, Any]) -> None:
        """Raises ValueError if an outer hyper-parameter of ``group`` is out of range."""

    def own_settings(self) -> list[Any]:
        """What of ``self`` must be the same on all ranks, and have a repr that says it. Raises ValueError if it is out
        of range."""
        return []

    # groups -----------------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the base. All ranks must add the same one at the same time; it joins the round under way."""
        if not self._ready:  # torch's constructor hands us the base's groups; ours registers all of them at once
            super().add_param_group(param_group)
            self._check_new(self.param_groups[-1])
            return
        known = len(self.param_groups)
        error: Exception | None = None
        first = self.param_groups[0]
        try:
            self.base.add_param_group(param_group)
            new = self.param_groups[-1]
            for key, default in self.defaults.items():
                new.setdefault(key, default)
            new.update({key: first[key] for key in ("round_step", "rounds")})
            self._check_new(new)
            new["round_lr"] = float(new.get("lr", 0.0)) * new["round_step"]
        except (ValueError, TypeError) as caught:
            error = caught
        try:
            self._register(self.param_groups[known:], error)
        except Exception as raised:
            del self.param_groups[known:]
            forget_frames(raised)
            raise
        finally:
            error = None

    def _check_new(self, group: dict[str, Any]) -> None:
        checks.check_params(group["params"], self.devices())
        checks.check_period(group["period"])
        if group["period"] != self.param_groups[0]["period"]:
            raise ValueError(
                f"period must be the same in all parameter groups, got {group['period']} and "
                f"{self.param_groups[0]['period']}"
            )
        if self.uses_lr:
            if "lr" not in group:
                raise ValueError(
                    f"{type(self).__name__} needs the learning rate of its base, but a parameter group of "
                    f"{type(self.base).__name__} has no 'lr'; allowed are bases that have one"
                )
            checks.check_lr(group["lr"])
        self.check_group(group)

    def _register(self, groups: list[dict[str, Any]], error: Exception | None) -> None:
        """Makes sure that all ranks bring the same new groups, and gives them buckets."""
        settings: list[Any] = [{k: v for k, v in g.items() if k not in ("params", "param_names")} for g in groups]
        base = type(getattr(self, "base", None)).__name__
        settings += [type(self).__name__, base, self.compressor, self.max_grad_norm, self.bucket_mb, self.guard]
        settings += self.own_settings() if error is None else []
        self.register_groups(groups, settings, error)
        self.topology.traffic.end_step()

    # the step ---------------------------------------------------------------------------------------------------------

    # so that a GradScaler never skips step() on one rank alone, which would leave the ranks at different places
    _step_supports_amp_scaling = True

    @torch._disable_dynamo  # torch.compile leaves it as it is, as other optimizers of commopt
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One local step; every ``period``-th one is followed by a synchronisation, which all ranks must reach.

        If a gradient of this rank is inf or NaN, its base does not step, but the round goes on: other ranks know
        nothing of it. A GradScaler's scale is taken out of the gradients, in place; so is what clipping takes.

        Args:
            closure: reevaluates the model and returns the loss; called once.

        Returns:
            what the closure returned, or None.

        Raises:
            RuntimeError: within :meth:`averaged`, within ``join()`` of an attached DDP model, and on one rank that is
                alone because the optimizer was made before ``init_process_group()``.
            commopt.optim.agreement.StepRefused: the ranks stand at different places, or one has failed.
            commopt.comm.CollectiveError: a collective failed. In both cases the local step has been taken and nothing
                else has changed: this rank's parameters are its own.
        """
        self.refuse_inside_averaged("step()")
        refuse_if_left_out(self.topology.backend, type(self).__name__)
        if self._attachment is not None:
            self._attachment.refuse_join()
        loss, error = None, None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.follow()
        if self.param_groups[0]["round_step"] == 0:
            self.begin_round()
        try:
            self._local_step()
        except Exception as caught:
            if self.param_groups[0]["round_step"] + 1 < self.param_groups[0]["period"]:
                raise
            error = caught  # the other ranks are about to wait for this one
        for group in self.param_groups:
            group["round_step"] += 1
            group["round_lr"] += float(group.get("lr", 0.0))
        try:
            if error is not None or self.param_groups[0]["round_step"] >= self.param_groups[0]["period"]:
                self.end_round(error or self._too_many_skipped())
        except Exception as raised:
            forget_frames(raised)
            raise
        finally:
            error = None
            if self._attachment is not None:
                self._attachment.clear()
            self.topology.receipt.clear()
            self.topology.traffic.end_step()
        return loss

    def _too_many_skipped(self) -> Exception | None:
        """What ends the run if this rank has skipped its local steps for too long, though its parameters are finite."""
        params = [p.detach() for bucket in self.buckets for p in bucket.params]
        if not self.guard.ends_after(self._local_skips) or not is_usable(square_norm(params)):
            return None
        return NotFinite(
            f"{type(self).__name__}: rank {self.topology.rank} has skipped its last {self._local_skips} local steps: "
            f"inf, NaN or a norm above {LARGEST_NORM:g} in its gradients, while its parameters are finite; look at its "
            "data and the learning rate"
        )

    def _local_step(self) -> None:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        dense = [g.coalesce().values() if g.layout == torch.sparse_coo else g for g in grads]
        unscale = 1 / float(getattr(self, "grad_scale", None) or 1)  # set by torch.amp.GradScaler around step()
        square = square_norm(dense) * unscale**2
        finite = is_usable(square)
        self._square = square if finite else 0.0
        self._local_skips = 0 if finite else self._local_skips + 1
        if not finite:
            self.skipped_steps += 1
            if worth_a_line(self.skipped_steps):
                logger.warning(
                    "%s: rank %d skipped its local step: inf or NaN in its gradients (%d skipped so far)",
                    type(self).__name__, self.topology.rank, self.skipped_steps,
                )  # fmt: skip
            return
        scale = unscale
        if self.max_grad_norm is not None:
            scale *= min(1.0, self.max_grad_norm / (square**0.5 + 1e-6))
        if scale != 1:
            for g in grads:
                g.mul_(scale)
        step_base(self.base)

    # what is it doing? ------------------------------------------------------------------------------------------------

    def wants_average(self, group: dict[str, Any]) -> bool:
        """Whether gradients should be averaged, as DDP does it: never."""
        return False

    def accumulating(self) -> bool:
        """Whether an attached DDP model is in its ``no_sync()``."""
        return self._attachment is not None and self._attachment.accumulating()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Context of every backward of a step but the last, as other optimizers have it: nothing is sent in any."""
        return contextlib.nullcontext()

    @property
    def phase(self) -> str:
        """Of the next step: "plain" on one rank, "local", or "synchronizing" if it ends a round."""
        if self.topology.world_size == 1:
            return "plain"
        group = self.param_groups[0]
        return "local" if group["round_step"] + 1 < group["period"] else "synchronizing"

    def comm_stats(self) -> dict[str, Any]:
        """What this rank has sent. Local: communicates nothing.

        Returns:
            phase, step, total, fp32_bytes, ratio: as of :meth:`commopt.optim.CommOptimizer.comm_stats`; ``step`` is the
                last step or call that may communicate.
            residual_norm, way_norm: 2-norms of this rank's worker residual and of the last mean way; 0 without a
                compressor.
            residual_ratio: the one over the other; None if the latter is 0.
            round_step, rounds: local steps since the last synchronisation, and how many there were.
            skipped_steps: local steps that this rank skipped because of inf or NaN.
            skipped_rounds: synchronisations that all ranks skipped because of inf or NaN.
        """
        group = self.param_groups[0]
        residual = square_norm([b.feedback.worker for b in self.buckets if b.feedback is not None]) ** 0.5
        way = sum(g["way_norm"] ** 2 for g in self.param_groups) ** 0.5
        return {
            "phase": self.phase,
            **self.traffic(),
            "residual_norm": residual,
            "way_norm": way,
            "residual_ratio": residual / way if way else None,
            "round_step": group["round_step"],
            "rounds": group["rounds"],
            "skipped_steps": self.skipped_steps,
            "skipped_rounds": self.skipped_rounds,
        }


def _check_names(base: torch.optim.Optimizer, ours: dict[str, Any]) -> None:
    both = sorted(base.defaults.keys() & ours.keys())
    if both:
        raise ValueError(
            f"the base optimizer {type(base).__name__} has a hyper-parameter {both[0]!r} of its own; allowed are "
            f"optimizers without any of {', '.join(ours)}"
        )
