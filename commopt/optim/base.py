"""What a step is: agree, run the algorithm on every bucket, report.

A subclass says what happens to one bucket in one step, as a generator that yields collectives in flight:

    def check_group(self, group)                      ranges of its hyper-parameters
    def init_bucket(self, bucket)                     its flat buffers
    def phase_of(self, group)                         a pure function of what is in the group
    def bucket_step(self, bucket, group, now)         its algorithm; yields Work
    def after_step(self)                              what needs all buckets

Before a step touches anything that outlives it, the ranks agree on whether to take it, how to clip, and which
parameters take part. From then on all of them do the same, so nothing can hang or drift. A bucket's task yields
``now.agreed`` at that point: with ``overlap=True`` it has started in backward, long before.

A step may be local (``is_local``): then the ranks tell each other nothing at all, not even that. Each agrees with
itself; all of them take the step and count it, because the next round is found by counting. A gradient that is inf or
NaN counts as missing there (``now.dropped``), a missing one as zeros, and the norm that is clipped is this rank's own.
What a rank changes in a local step may differ from the others' until the next round: such buffers are
``local_buffers()``, which each rank saves for itself. If groups are in different phases, a step is local if it is for
all of them.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from commopt import ops
from commopt.comm import (
    Backend,
    CollectiveError,
    CountingBackend,
    LocalBackend,
    MessageDamaged,
    Work,
    message_device,
    refuse_if_left_out,
    resolve_backend,
)
from commopt.compress import Compressor, Sign
from commopt.optim import checks
from commopt.optim.agreement import LARGEST_NORM, LocalView, OutOfStep, StepSkipped, Verdict, is_usable
from commopt.optim.flight import Flight, Overlap, Step
from commopt.optim.guard import (
    Guard,
    NotFinite,
    check_guard,
    describe_difference,
    tell_not_finite,
)
from commopt.optim.lifetime import forget_frames, import_what_torch_imports_late
from commopt.optim.packed import PackedOptimizer, StateBucket

logger = logging.getLogger("commopt")

_ALONE = CountingBackend(LocalBackend())

LINES = 3
"""Lines that buckets take in turn, in each direction, where the backend has several."""


class CommOptimizer(PackedOptimizer):
    """Base of the optimizers; see the module's docstring for what a subclass adds.

    Args:
        params: parameters, (name, parameter) pairs, or parameter groups, as for every torch optimizer.
        defaults: hyper-parameters of the groups.
        compressor: what is sent in the compressed phase; ``Sign()`` if None.
        max_grad_norm: clip to this norm, or None. The norm is the root mean square over the ranks of the 2-norm of all
            gradients that a rank brings: one number, the same on all ranks and in all phases.
        bucket_mb: size of a bucket in MB (2**20 bytes) of float32; None for an 8th of the parameter group, but 1 to 25.
        overlap: whether buckets start in backward, as their gradients arrive, instead of in ``step()``.
        guard: when a run that has gone wrong ends; :class:`commopt.Guard` if None.
        process_group: ProcessGroup or 1-d DeviceMesh; 2-d: nodes, and the ranks of a node. None for the default group,
            or one rank where there is none.
        backend: a :class:`commopt.comm.Backend` instead of a process group.

    Raises:
        ValueError: on every rank, for an argument out of range on any of them, or if ranks differ in parameters or
        settings.
    """

    read_in_backward: tuple[str, ...] = ("betas", "maximize", "freeze_step")
    """What of a parameter group a bucket's task reads before it yields ``now.agreed``."""

    # so that a GradScaler never skips step() on one rank alone; the ranks agree inside
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        compressor: Compressor | None = None,
        max_grad_norm: float | None = None,
        bucket_mb: float | None = None,
        overlap: bool = False,
        guard: Guard | None = None,
        process_group: Any = None,
        backend: Backend | None = None,
    ) -> None:
        import_what_torch_imports_late()
        self.backend = CountingBackend(resolve_backend(process_group, backend))
        self.compressor = Sign() if compressor is None else compressor
        self.max_grad_norm = max_grad_norm
        self.bucket_mb = bucket_mb
        self.overlap = overlap
        self.guard = Guard() if guard is None else guard
        self.buckets = []
        self.skipped_steps = 0
        self.dropped_gradients = 0
        self._restart()
        self._ready = False
        error: Exception | None = None
        try:
            self.check_settings()
            check_guard(self.guard)
            super().__init__(params, {**defaults, "step": 0})
        except (ValueError, TypeError) as caught:
            error = caught
        self._ready = True
        try:
            self._welcome(getattr(self, "param_groups", []), error)
        except Exception as raised:
            forget_frames(raised)
            raise
        finally:
            error = None

    def _restart(self) -> None:
        self._attachment: Any = None
        self._reported_equal = self._reported_late = self._reported_idle = False
        self._ready = True
        self._skipped_in_a_row = 0
        self._check_next = True  # digests, at the next step
        self._damaged: str | None = None
        self._right: int | None = None  # whose replica the others get after the step
        self._flight: Flight | None = None
        self._watching: Overlap | None = None
        self._lines: list[CountingBackend] | None = None
        self._control: CountingBackend | None = None

    # what a subclass says ---------------------------------------------------------------------------------------------

    def check_group(self, group: dict[str, Any]) -> None:
        """Raises ValueError if a hyper-parameter of ``group`` is out of range."""
        raise NotImplementedError

    def check_settings(self) -> None:
        """Raises ValueError if an argument that is not of a group is out of range."""
        checks.check_compressor(self.compressor)
        checks.check_common(self.max_grad_norm, self.bucket_mb, self.overlap)

    def settings(self) -> list[Any]:
        """What besides the groups must be the same on every rank."""
        return [self.compressor, self.max_grad_norm, self.bucket_mb, self.overlap, self.guard]

    def bucket_step(self, bucket: StateBucket, group: dict[str, Any], now: Step) -> Iterator[Work]:
        """One step of the algorithm on one bucket. Changes nothing that outlives the step before it has yielded
        ``now.agreed``."""
        raise NotImplementedError

    def phase_of(self, group: dict[str, Any]) -> str:
        """Phase of the group's next step."""
        raise NotImplementedError

    def wants_average(self, group: dict[str, Any]) -> bool:
        """Whether the group's next step needs gradients averaged over the ranks, as DDP does it."""
        return self.phase_of(group) != "compressed"

    def is_local(self, group: dict[str, Any]) -> bool:
        """Whether the group's next step communicates nothing: the same on every rank, like the phase."""
        return False

    def after_step(self) -> None:
        """Work across buckets, after all of them have stepped. Communicates the same on all ranks; nothing, if the step
        was local."""

    def report_phase(self, phase: str, groups: list[dict[str, Any]]) -> None:
        """What a user should know of ``groups``, which begin ``phase``. On rank 0 only; communicates nothing."""

    # groups -----------------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, which starts at its own step 0. All ranks must add the same group at the same time."""
        known = len(self.param_groups)
        error: Exception | None = None
        try:
            super().add_param_group(param_group)
            checks.check_params(self.param_groups[-1]["params"], self.devices())
            self.check_group(self.param_groups[-1])
        except (ValueError, TypeError) as caught:
            error = caught
        if not self._ready:  # torch's constructor adds the first groups; ours welcomes all of them at once
            if error is not None:
                raise error
            return
        try:
            self._welcome(self.param_groups[known:], error)
        except Exception as raised:
            del self.param_groups[known:]
            forget_frames(raised)
            raise
        finally:
            error = None

    def _welcome(self, groups: list[dict[str, Any]], error: Exception | None) -> None:
        """Makes sure that all ranks bring the same new groups, and gives them buckets."""
        settings: list[Any] = [{k: v for k, v in g.items() if k not in ("params", "param_names")} for g in groups]
        self.welcome(groups, [*settings, type(self).__name__, *self.settings()], error)
        if self.overlap:
            self._open_lines()
            if self.backend.world_size > 1 and self._all_on_one_line():
                raise ValueError(
                    f"{type(self).__name__}(overlap=True) needs a backend that has several lines, or a control channel "
                    "of its own; this one has neither: create the optimizer with overlap=False"
                )
        self._watch()
        self.backend.end_step()

    # the step ---------------------------------------------------------------------------------------------------------

    @torch._disable_dynamo  # torch.compile leaves it as it is: it talks to other ranks, and looks at what they say
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step, the same on every rank; all ranks must call it.

        If some gradient on some rank is inf or NaN (or their norm is above 1e14), all ranks skip the step: nothing
        changes, and it is counted and logged.

        Args:
            closure: reevaluates the model and returns the loss. Not with ``overlap=True``, unless on one rank alone.

        Returns:
            what the closure returned, or None.

        Raises:
            RuntimeError: within :meth:`averaged`, within ``join()`` of an attached DDP model, and on one rank that is
                alone because the optimizer was made before ``init_process_group()``.
            ValueError: for sparse gradients, and for what ``overlap=True`` excludes: a closure, a GradScaler, gradients
                or hyper-parameters changed between backward and step(). On the other ranks RuntimeError. Nothing has
                changed then.
            commopt.optim.agreement.OutOfStep: a rank has another learning rate, or is at another step.
            commopt.optim.ReplicasDiffer, commopt.optim.NotFinite: see :class:`commopt.Guard`.
            commopt.comm.MessageDamaged: what was received is not what was sent. Parameters and momenta are as before,
                residuals may not be: every step raises it until a state is loaded.
            commopt.comm.CollectiveError: a collective failed or timed out; says in which step and bucket.
        """
        self.refuse_if_lent("step()")
        if self._damaged is not None:
            raise MessageDamaged(self._damaged)
        refuse_if_left_out(self.backend.inner, type(self).__name__)
        if self._attachment is not None:
            self._attachment.refuse_join()
        loss, refused = None, None
        if closure is not None and self.overlap and self.backend.world_size > 1:
            refused = ValueError(
                "overlap=True sends gradients while backward runs, so step() takes no closure: run the closure before "
                "step(), or create the optimizer with overlap=False"
            )
        elif closure is not None:
            with torch.enable_grad():
                loss = closure()
        local = self.steps_locally()
        flight = self.flight()
        try:
            self._fly(flight, refused, local)
        except (CollectiveError, OutOfStep):  # what the ranks have started does not fit together any more
            flight.pipeline.abandon()
            raise
        except MessageDamaged as error:
            self._damaged = str(error)
            flight.pipeline.abandon()
            raise
        except StepSkipped:
            flight.call_off()
            self._skip(flight.agreement.verdict)
        except Exception as error:
            flight.call_off()
            flight.agreement.forget()
            forget_frames(error)
            raise
        finally:
            self._flight = None
            self.backend.receipt.clear()
            del flight, refused
            self._watch()
            if self._attachment is not None:
                self._attachment.clear()
            self.backend.end_step()
        return loss

    def _fly(self, flight: Flight, refused: Exception | None, local: bool) -> None:
        """The step, from wherever backward has taken it."""
        early = self.starts_in_backward()
        if early and self._watching is not None:
            self._watching.report(flight)
        if not local:
            self._open_lines()
        refused = refused or self._follow(flight)
        flight.params = params = [p for bucket in self.buckets for p in bucket.params]
        unscale = 1 / float(getattr(self, "grad_scale", None) or 1)  # set by torch.amp.GradScaler around step()
        phases = [self.phase_of(group) for group in self.param_groups]
        view = self._local_view(params, unscale, refused or self._refusal(flight, early, unscale))
        if not local:
            view = self._guarded(view, flight.number)
        elif view.error is None and not is_usable(view.square_norm):
            flight.dropped, view = True, LocalView(0.0, [False] * len(params), False)
            self._report_dropped()
        those_who_agree = _ALONE if local else self._control or self.backend
        flight.confirmation.over(those_who_agree)
        device = message_device(those_who_agree)
        where = flight.where("agreement of the ranks on it")
        flight.agreement.start(those_who_agree, device, view, where)
        flight.early = early
        if early:  # a bucket that lacks a gradient here must know at its start whether others have it
            flight.launch_complete()
            flight.pipeline.reach(flight.agreement, flight.agreement.under_way, where)
            flight.agreement.wait()
            flight.launch_known()
        if flight.launched < len(self.buckets) or not early:
            verdict = flight.agreement.wait()
            self._report_equal_gradients(verdict)
            flight.launch_all(self._clip(verdict) * unscale, verdict.average)
        flight.finish()
        for group in self.param_groups:
            group["step"] += 1
        self.after_step()
        self._end_agreed(flight, local)
        self._report_new_phases(phases)

    def _end_agreed(self, flight: Flight, local: bool) -> None:
        """What follows when all ranks have taken a step together."""
        if local:
            return
        self._skipped_in_a_row, self._check_next = 0, False
        self._report_idle(flight)
        if self._right is not None:
            self._repair(self._right)

    def _follow(self, flight: Flight) -> Exception | None:
        """Follows parameters that were moved, cast or unfrozen; what forbids this step if something else was done to
        them. The other ranks hear of it when they agree."""
        if flight.launched and any(bucket.stale() for bucket in self.buckets):
            return ValueError(
                "parameters were moved or cast between backward() and step(), but overlap=True has sent gradients of "
                "them already; do it after step()"
            )
        try:
            for bucket in self.buckets:
                bucket.check_shapes()
        except ValueError as error:
            return error
        if self.follow_parameters():
            flight.buckets = list(self.buckets)
        return None

    def _refusal(self, flight: Flight, early: bool, unscale: float) -> Exception | None:
        """What forbids this step on this rank because buckets have started in backward, or would have."""
        if early and unscale != 1:
            return ValueError(
                "overlap=True sends gradients before a GradScaler has unscaled them; train in bfloat16 without a "
                "scaler, or create the optimizer with overlap=False"
            )
        try:
            flight.check()
        except ValueError as error:
            return error
        return None

    def _clip(self, verdict: Verdict) -> float:
        return 1.0 if self.max_grad_norm is None else min(1.0, self.max_grad_norm / (verdict.norm + 1e-6))

    def starts_in_backward(self) -> bool:
        """Whether buckets of the next step start in backward: not where DDP averages the gradients first, nor in the
        first step of a copy, which has no lines yet, nor where the agreement would share their order."""
        alone = self.backend.world_size == 1
        if not self.overlap or alone or self._lines is None or self._all_on_one_line() or self.steps_locally():
            return False
        if self._attachment is None:
            return True
        return not self._attachment.joining() and not any(self.wants_average(group) for group in self.param_groups)

    def why_not_meet(self) -> Exception | None:
        """A step that has begun in backward has sent what belongs to the parameters as they are."""
        if self._flight is None or not self._flight.launched:
            return None
        return ValueError("overlap=True has begun the next step in backward(): take the mean after step(), not before")

    def steps_locally(self) -> bool:
        """Whether the next step communicates nothing."""
        return self.backend.world_size > 1 and all(self.is_local(group) for group in self.param_groups)

    def accumulating(self) -> bool:
        """Whether an attached DDP model is in its ``no_sync()``."""
        return self._attachment is not None and self._attachment.accumulating()

    def lines_of(self, index: int) -> tuple[CountingBackend, CountingBackend]:
        """The lines of bucket ``index``: out, and back."""
        if not self._lines:
            return self.backend, self.backend
        return self._lines[index % LINES], self._lines[LINES + index % LINES]

    def _open_lines(self) -> None:
        """Opens the lines, if that has not been done. Never in backward: it communicates, and a rank whose first bucket
        waits for a gradient would by then have started the agreement instead."""
        if self._lines is None:
            alone = self.backend.world_size == 1
            self._lines = [] if alone else self.backend.lines(2 * LINES)
            # where buckets have lines, nothing else is under way on the backend itself when the ranks agree
            self._control = self.backend if alone or self._lines else self.backend.control()

    def _all_on_one_line(self) -> bool:
        """Whether buckets and the agreement of the ranks share one order."""
        return not self._lines and self._control is self.backend

    def no_sync(self) -> AbstractContextManager[None]:
        """Context of every backward of a step but the last: with ``overlap=True`` the last one sends.

        ::

            for i, batch in enumerate(batches):
                with optimizer.no_sync() if i < len(batches) - 1 else contextlib.nullcontext():
                    (loss(batch) / len(batches)).backward()
            optimizer.step()

        Without overlap it does nothing.
        """
        return self._watching.holding() if self._watching is not None else nullcontext()

    def _watch(self) -> None:
        """Watches all parameters, if their gradients start buckets."""
        if self.overlap and self.backend.world_size > 1:
            self._watching = self._watching or Overlap(self)
            self._watching.follow(self.buckets)

    def name_of(self, p: Tensor) -> str:
        """A parameter's name, where the optimizer was given (name, parameter) pairs, or its shape."""
        for group in self.param_groups:
            for q, name in zip(group["params"], group.get("param_names", ())):
                if q is p:
                    return name
        return f"a parameter of shape {tuple(p.shape)}"

    def flight(self) -> Flight:
        """The step under way; a new one if none is."""
        if self._flight is None:
            self._flight = Flight(self)
        return self._flight

    def _local_view(self, params: list[Tensor], unscale: float, refused: Exception | None) -> LocalView:
        present = [p.grad is not None for p in params]
        if refused is not None:
            return LocalView(0.0, present, False, refused)
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

    # is it still right? -----------------------------------------------------------------------------------------------

    def _guarded(self, view: LocalView, number: int) -> LocalView:
        """``view`` of step ``number``, with what the ranks compare."""
        terms = [{key: group[key] for key in self.defaults if key in group} for group in self.param_groups]
        checks_now = self.guard.checks_at(number, self._check_next)
        judge = functools.partial(self._judge, number)
        return dataclasses.replace(view, terms=terms, checks=checks_now, digests=self.digests, judge=judge)

    def _judge(self, number: int, table: list[list[int]]) -> None:
        """Says what follows from the digests of all ranks."""
        where, names = f"{type(self).__name__}, step {number}", [name for name, _ in self.replicated()]
        self._right = self.guard.judge(table, names, where)
        if self._right is not None and self.backend.rank == 0:
            what = describe_difference(table, names)
            logger.error("%s: %s; after this step all have what rank %d has", where, what, self._right)

    def _repair(self, right: int) -> None:
        """Gives all ranks what rank ``right`` has of what must be the same."""
        self.copy_replica(right)
        self._right, self._check_next = None, True

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
                bytes are those that this rank sends, beyond its node if it has one; ``"inside"`` has the others
                (:mod:`commopt.comm.counting` has the formulas).
            fp32_bytes: what a float32 all-reduce of all parameters would send in a step.
            ratio: fp32_bytes over the bytes of the last step; None if it sent nothing.
            residual_norm, momentum_norm: 2-norms of this rank's worker residual and of the quantity that is compressed.
            residual_ratio: the one over the other; None if the latter is 0.
            skipped_steps: steps skipped because of inf or NaN.
            dropped_gradients: local steps that this rank took without its gradient, because of inf or NaN.
        """
        residual, momentum = self._norms()
        return {
            "phase": self.phase,
            **self.traffic(),
            "residual_norm": residual,
            "momentum_norm": momentum,
            "residual_ratio": residual / momentum if momentum else None,
            "skipped_steps": self.skipped_steps,
            "dropped_gradients": self.dropped_gradients,
        }

    def _norms(self) -> tuple[float, float]:
        """2-norms of what this rank's compression owes, and of what is compressed."""
        residual = square_norm([b.feedback.worker for b in self.buckets if b.feedback is not None]) ** 0.5
        return residual, square_norm([b.buffers[self.residual_of] for b in self.buckets]) ** 0.5

    def _skip(self, verdict: Verdict | None) -> None:
        assert verdict is not None
        self.skipped_steps += 1
        self._skipped_in_a_row += 1
        if self.backend.rank == 0 and worth_a_line(self.skipped_steps):
            logger.warning(
                "%s: step skipped on all ranks: inf, NaN or a norm above %g in the gradients of rank %s (%d skipped so "
                "far)",
                type(self).__name__, LARGEST_NORM, ", ".join(map(str, verdict.non_finite)), self.skipped_steps,
            )  # fmt: skip
        if self.guard.ends_after(self._skipped_in_a_row):
            names = {p: self.name_of(p) for bucket in self.buckets for p in bucket.params}
            told = tell_not_finite(self.backend, self.buckets, names)
            raise NotFinite(f"{type(self).__name__}: {self._skipped_in_a_row} steps in a row were skipped: {told}")

    def _report_idle(self, flight: Flight) -> None:
        if self._reported_idle or not flight.params or flight.present():
            return
        self._reported_idle = True
        if self.backend.rank == 0:
            logger.warning(
                "%s: no parameter has a gradient on any rank, so nothing moves. Was backward() called, and are these "
                "still the parameters of the model? (Some wrappers, such as FSDP, exchange them: wrap first.)",
                type(self).__name__,
            )

    def _report_dropped(self) -> None:
        self.dropped_gradients += 1
        if worth_a_line(self.dropped_gradients):
            logger.warning(
                "%s: inf or NaN in the gradient of rank %d in a local step, which counts as zeros there (%d so far)",
                type(self).__name__, self.backend.rank, self.dropped_gradients,
            )  # fmt: skip

    def report_too_late(self, when: str, what_it_does: str) -> None:
        """Warns once of a parameter that has its first gradient after ``when``. In a group of its own it would not be
        too late: that group ``what_it_does`` by itself."""
        if not self._reported_late and self.backend.rank == 0:
            logger.warning(
                "%s: a parameter has its first gradient after %s; it will not move. Give it to add_param_group() when "
                "it becomes trainable, and its group %s by itself.",
                type(self).__name__, when, what_it_does,
            )  # fmt: skip
        self._reported_late = True

    def report_zero_variance(self, groups: list[dict[str, Any]], later: str) -> None:
        """Warns if parameters of ``groups``, whose variance stands from now on, had gradients, but all of them 0: they
        will not move. Or if none of ``groups`` will. ``later`` says what lets a variance stand later."""
        params = [p for group in groups for p in group["params"] if "exp_avg_sq" in self.state.get(p, ()) and p.numel()]
        still = [p for p in params if not self.state[p]["exp_avg_sq"].any()]
        zeros = [p for p in still if self.state[p]["variance_step"] > 0]
        named = zeros if len(still) < len(params) else still
        if not named:
            return
        names = ", ".join(self.name_of(p) for p in named[:3]) + (" ..." if len(named) > 3 else "")
        logger.warning(
            "%s: the variance of %d of %d parameters is 0 everywhere, and stands from now on: no gradient will move "
            "them (%s). Their gradients so far were 0, or too small for a square. If it was too early, %s; if they are "
            "not to be trained, freeze them (requires_grad_(False)).",
            type(self).__name__, len(named), len(params), names, later,
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
            self.report_phase(new, [self.param_groups[i] for i in groups])
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


def worth_a_line(n: int) -> bool:
    """Whether the n-th of something is logged: the 1st, 2nd, 4th, 8th ... A run gone bad must not fill the disk."""
    return n & (n - 1) == 0
