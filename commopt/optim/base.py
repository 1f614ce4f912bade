"""What a step is: agree, run the algorithm on every bucket, report.

A subclass says what happens to one bucket in one step, as a generator that yields collectives in flight:

    def check_group(self, group)                      ranges of its hyper-parameters
    def init_bucket(self, bucket)                     its flat buffers
    def phase_of(self, group)                         a pure function of what is in the group
    def bucket_step(self, bucket, group, now)         its algorithm; yields Work
    def after_step(self)                              what needs all buckets

Before a step touches anything, the ranks agree on whether to take it, how to clip, and which parameters take part. From
then on all of them do the same, so nothing can hang or drift.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from commopt import ops
from commopt.comm import Backend, CountingBackend, Work, all_reduce_bytes, resolve_backend, run_interleaved
from commopt.compress import Compressor, Sign
from commopt.optim import checks
from commopt.optim.agreement import LocalView, Verdict, agree_on_setup, agree_on_step, equalize
from commopt.optim.packed import PackedOptimizer, StateBucket

logger = logging.getLogger("commopt")


@dataclass(frozen=True)
class Step:
    """What the ranks agreed on for one step.

    Attributes:
        scale: factor of this rank's gradients: the clip coefficient over the scale of its GradScaler, negative to
            maximize.
        present: ids of the parameters that have a gradient on some rank. The others do not move.
        average: whether gradients still have to be averaged; False on one rank, and where DDP has done so.
    """

    scale: float
    present: frozenset[int]
    average: bool


class CommOptimizer(PackedOptimizer):
    """Base of the optimizers; see the module's docstring for what a subclass adds.

    Args:
        params: parameters, (name, parameter) pairs, or parameter groups, as for every torch optimizer.
        defaults: hyper-parameters of the groups.
        compressor: what is sent in the compressed phase; ``Sign()`` if None.
        max_grad_norm: clip to this norm, or None. The norm is the root mean square over the ranks of the 2-norm of all
            gradients that a rank brings: one number, the same on all ranks and in all phases.
        bucket_mb: size of a bucket in MB (2**20 bytes) of float32.
        process_group: ProcessGroup or 1-d DeviceMesh; None for the default group, or one rank where there is none.
        backend: a :class:`commopt.comm.Backend` instead of a process group.

    Raises:
        ValueError: on every rank, for an argument out of range on any of them, or if ranks differ in parameters or
        settings.
    """

    schedule = staticmethod(run_interleaved)
    _step_supports_amp_scaling = (
        True  # so that a GradScaler never skips step() on one rank alone; the ranks agree inside
    )

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        compressor: Compressor | None = None,
        max_grad_norm: float | None = None,
        bucket_mb: float = 25.0,
        process_group: Any = None,
        backend: Backend | None = None,
    ) -> None:
        self.backend = CountingBackend(resolve_backend(process_group, backend))
        self.compressor = Sign() if compressor is None else compressor
        self.max_grad_norm = max_grad_norm
        self.bucket_mb = bucket_mb
        self.buckets = []
        self.residuals = {}
        self.skipped_steps = 0
        self._attachment: Any = None
        self._reported_equal = False
        self._ready = False
        error: Exception | None = None
        try:
            checks.check_common(self.compressor, max_grad_norm, bucket_mb)
            super().__init__(params, {**defaults, "step": 0})
        except (ValueError, TypeError) as caught:
            error = caught
        self._ready = True
        self._welcome(getattr(self, "param_groups", []), error)

    # what a subclass says ---------------------------------------------------------------------------------------------

    def check_group(self, group: dict[str, Any]) -> None:
        """Raises ValueError if a hyper-parameter of ``group`` is out of range."""
        raise NotImplementedError

    def bucket_step(self, bucket: StateBucket, group: dict[str, Any], now: Step) -> Iterator[Work]:
        """One step of the algorithm on one bucket."""
        raise NotImplementedError

    def phase_of(self, group: dict[str, Any]) -> str:
        """Phase of the group's next step."""
        raise NotImplementedError

    def wants_average(self, group: dict[str, Any]) -> bool:
        """Whether the group's next step needs gradients averaged over the ranks, as DDP does it."""
        return self.phase_of(group) != "compressed"

    def after_step(self) -> None:
        """Work across buckets, after all of them have stepped. Communicates the same on all ranks."""

    # groups -----------------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, which starts at its own step 0. All ranks must add the same group at the same time."""
        known = len(self.param_groups)
        error: Exception | None = None
        try:
            super().add_param_group(param_group)
            checks.check_params(self.param_groups[-1]["params"])
            self.check_group(self.param_groups[-1])
        except (ValueError, TypeError) as caught:
            error = caught
        if not self._ready:  # torch's constructor adds the first groups; ours welcomes all of them at once
            if error is not None:
                raise error
            return
        try:
            self._welcome(self.param_groups[known:], error)
        except Exception:
            del self.param_groups[known:]
            raise

    def _welcome(self, groups: list[dict[str, Any]], error: Exception | None) -> None:
        """Makes sure that all ranks bring the same new groups, and gives them buckets."""
        settings: list[Any] = [{k: v for k, v in g.items() if k not in ("params", "param_names")} for g in groups]
        # providers may differ in the last bit of an update; instruction sets of one provider do not
        providers = {op: {d: p.split()[0] for d, p in by.items()} for op, by in ops.report().items()}
        settings += [type(self).__name__, self.compressor, self.max_grad_norm, self.bucket_mb, providers]
        params = [p for group in groups for p in group["params"]]
        facts = {
            "parameter lists": str([[(tuple(p.shape), p.dtype) for p in group["params"]] for group in groups]),
            "settings or kernel providers": str(settings),
        }
        counts = f"{len(params)} parameters with {sum(p.numel() for p in params)} elements in {len(groups)} groups"
        device = params[0].device if params else torch.device("cpu")
        agree_on_setup(self.backend, device, facts, error, counts)
        if equalize(self.backend, device, params) and self.backend.rank == 0:
            logger.warning("%s: parameters differed between ranks; all have those of rank 0 now", type(self).__name__)
        for group in groups:
            self.make_buckets(group)
        self.backend.end_step()

    # the step ---------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step, the same on every rank; all ranks must call it.

        If some gradient on some rank is inf or NaN, all ranks skip the step: nothing changes, and it is counted and
        logged.

        Args:
            closure: reevaluates the model and returns the loss.

        Returns:
            what the closure returned, or None.

        Raises:
            ValueError: for sparse gradients; on the other ranks RuntimeError. Nothing has changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.follow_parameters()
        params = [p for bucket in self.buckets for p in bucket.params]
        device = params[0].device if params else torch.device("cpu")
        unscale = 1 / float(getattr(self, "grad_scale", None) or 1)  # set by torch.amp.GradScaler around step()
        verdict = agree_on_step(self.backend, device, self._local_view(params, unscale))
        self._report_equal_gradients(verdict)
        if verdict.non_finite:
            self._skip(verdict.non_finite)
        else:
            self._run_buckets(params, verdict, unscale)
        if self._attachment is not None:
            self._attachment.clear()
        self.backend.end_step()
        return loss

    def _local_view(self, params: list[Tensor], unscale: float) -> LocalView:
        present = [p.grad is not None for p in params]
        try:
            checks.check_gradients(params)
        except ValueError as error:
            return LocalView(0.0, present, False, error)
        averaged = self._attachment.averaged if self._attachment is not None else {}
        wanting = {id(p) for group in self.param_groups if self.wants_average(group) for p in group["params"]}
        fresh = [p for p in params if p.grad is not None and id(p) not in averaged]
        square = square_norm([p.grad for p in fresh if p.grad is not None])
        square += sum(float(s) for s in averaged.values())
        return LocalView(square * unscale**2, present, any(id(p) in wanting for p in fresh))

    def _run_buckets(self, params: list[Tensor], verdict: Verdict, unscale: float) -> None:
        clip = 1.0 if self.max_grad_norm is None else min(1.0, self.max_grad_norm / (verdict.norm + 1e-6))
        scale = clip * unscale
        present = frozenset(id(p) for p, here in zip(params, verdict.present) if here)
        phases = [self.phase_of(group) for group in self.param_groups]
        groups = self.group_of()

        def task(bucket: StateBucket) -> Iterator[Work]:
            group = groups[id(bucket.params[0])]
            return self.bucket_step(
                bucket, group, Step(-scale if group["maximize"] else scale, present, verdict.average)
            )

        self.schedule(task(bucket) for bucket in self.buckets)
        for group in self.param_groups:
            group["step"] += 1
        self.after_step()
        self._report_new_phases(phases)

    # what is it doing? ------------------------------------------------------------------------------------------------

    @property
    def phase(self) -> str:
        """Phase of the next step; "mixed" if the parameter groups are in different ones."""
        phases = {self.phase_of(group) for group in self.param_groups}
        return phases.pop() if len(phases) == 1 else "mixed"

    def comm_stats(self) -> dict[str, Any]:
        """What this rank has sent, and what compression still owes. Local: communicates nothing.

        Returns:
            phase: of the next step.
            step, total: traffic of the last step, and of all since construction, ``{"bytes", "calls", "by_verb"}``;
                bytes are those that this rank sends (:mod:`commopt.comm.counting` has the formulas).
            fp32_bytes: what a float32 all-reduce of all parameters would send in a step.
            ratio: fp32_bytes over the bytes of the last step; None if it sent nothing.
            residual_norm, momentum_norm: 2-norms of this rank's worker residual and of the quantity that is compressed.
            residual_ratio: the one over the other; None if the latter is 0.
            skipped_steps: steps skipped because of inf or NaN.
        """
        step = self.backend.step.summary()
        fp32 = self.fp32_bytes()
        residual = square_norm([b.feedback.worker for b in self.buckets if b.feedback is not None]) ** 0.5
        momentum = square_norm([b.buffers[self.residual_of] for b in self.buckets]) ** 0.5
        return {
            "phase": self.phase,
            "step": step,
            "total": self.backend.total.summary(),
            "fp32_bytes": fp32,
            "ratio": fp32 / step["bytes"] if step["bytes"] else None,
            "residual_norm": residual,
            "momentum_norm": momentum,
            "residual_ratio": residual / momentum if momentum else None,
            "skipped_steps": self.skipped_steps,
        }

    def fp32_bytes(self) -> int:
        """Bytes that a float32 all-reduce of all trainable parameters would send on this rank."""
        return all_reduce_bytes(4 * sum(bucket.numel for bucket in self.buckets), self.backend.world_size)

    def _skip(self, ranks: int) -> None:
        self.skipped_steps += 1
        n = self.skipped_steps
        if (
            self.backend.rank == 0 and n & (n - 1) == 0
        ):  # the 1st, 2nd, 4th, 8th ...: a run gone bad must not fill the disk
            logger.warning(
                "%s: step skipped on all ranks: inf or NaN in the gradients of %d of %d ranks (%d skipped so far)",
                type(self).__name__, ranks, self.backend.world_size, n,
            )  # fmt: skip

    def _report_equal_gradients(self, verdict: Verdict) -> None:
        if (
            self._reported_equal
            or not verdict.already_equal
            or (self._attachment is not None and self._attachment.averaged)
        ):
            return
        self._reported_equal = True
        if self.backend.rank == 0:
            logger.warning(
                "%s: the gradients are already equal on all ranks. Either a DistributedDataParallel that is not "
                "attached still averages them at full price (call commopt.attach(ddp_model, optimizer)), or all ranks "
                "train on the same data.",
                type(self).__name__,
            )

    def _report_new_phases(self, before: list[str]) -> None:
        changed: dict[tuple[str, str], list[int]] = {}
        for i, (old, group) in enumerate(zip(before, self.param_groups)):
            if self.phase_of(group) != old:
                changed.setdefault((old, self.phase_of(group)), []).append(i)
        for (old, new), groups in changed.items() if self.backend.rank == 0 else ():
            which = "" if len(groups) == len(self.param_groups) else f" for parameter groups {groups}"
            # WARNING, because that is what a user sees who has set up no logging
            logger.warning(
                "%s: %s ended after step %d%s, %s from now on with %s",
                type(self).__name__, old, self.param_groups[groups[0]]["step"], which, new, self.compressor,
            )  # fmt: skip


def square_norm(tensors: list[Tensor]) -> float:
    """Sum of squares over ``tensors``, of any devices; finite if and only if all elements are."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for t in tensors:
        by_device.setdefault(t.device, []).append(t)
    return sum((float(ops.square_sum(on_one)) for on_one in by_device.values()), 0.0)
