"""One step of an optimizer: agree, run the algorithm on every bucket, report.

A subclass says what happens to one bucket in one step, as a generator that yields collectives in flight:

    def check_group(self, group)                      ranges of its hyper-parameters
    def init_bucket(self, bucket)                     its flat buffers
    def phase_of(self, group)                         a pure function of what is in the group
    def bucket_step(self, bucket, group, ctx)         its algorithm; yields Work
    def after_step(self)                              what needs all buckets

Before a step touches anything that outlives it, the ranks agree on whether to take it, how to clip, and which
parameters take part. From then on all of them do the same, so nothing can hang or drift. A bucket's task yields
``ctx.barrier`` at that point: with ``overlap=True`` it has started in backward, long before.

A step may be local (``is_local``): then the ranks tell each other nothing at all, not even that. Each agrees with
itself; all of them take the step and count it, because the next round is found by counting. A gradient that is inf or
NaN counts as missing there (``ctx.nonfinite_dropped``), a missing one as zeros, and the norm that is clipped is this
rank's own.
What a rank changes in a local step may differ from the others' until the next round: such buffers are
in ``rank_local()``, and each rank saves its own. If groups are in different phases, a step is local if it is for
all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch

from commopt.agreement import checks
from commopt.agreement.calls import OutOfStep
from commopt.agreement.decision import StepDecision, StepReport, StepSkipped
from commopt.agreement.diagnostics import names_of
from commopt.comm import (
    Backend,
    CollectiveError,
    CountingBackend,
    LocalBackend,
    MessageDamaged,
    Topology,
    Work,
    refuse_if_left_out,
    resolve_backend,
)
from commopt.compress import Compressor, Sign
from commopt.compress.compressor import common_multiple
from commopt.state import binding, comparing, following, wrapped
from commopt.state.foreign import WHOSE, check_moments
from commopt.state.guard import Guard, NotFinite, check_guard, tell_not_finite
from commopt.state.host import as_numbers, square_norm
from commopt.state.lifetime import forget_frames, import_what_torch_imports_late
from commopt.state.own import Origin
from commopt.state.packed import PackedOptimizer
from commopt.state.saving import Entries
from commopt.state.state_bucket import StateBucket
from commopt.step import starting, step_report
from commopt.step.closure import loss_of
from commopt.step.in_flight import StepContext, StepInFlight
from commopt.step.overlap import Overlap
from commopt.step.torch_options import (
    OF_ADAM,
    check_group_keys,
    check_group_options,
    check_torch_options,
    leave_out_of_loaded,
)

logger = logging.getLogger("commopt")

_ALONE = CountingBackend(LocalBackend())


class CommOptimizer(PackedOptimizer):
    """Base of the optimizers; see the module's docstring for what a subclass adds.

    Args:
        params: parameters, (name, parameter) pairs, or parameter groups, as for every torch optimizer.
        defaults: hyper-parameters of the groups.
        compressor: what is sent in the compressed phase; ``Sign()`` if None.
        max_grad_norm: clip to this norm, or None. The norm is the root mean square over the ranks of the 2-norm of all
            gradients that a rank brings: one number, the same on all ranks and in all phases.
        bucket_mb: size of a bucket in MB (2**20 bytes) of float32; None for an 8th of the group, 1 to 25 (GPU: to 100).
        overlap: whether buckets start in backward, as their gradients arrive, instead of in ``step()``.
        guard: when a run that has gone wrong ends; :class:`commopt.Guard` if None.
        reduction: "mean" if a step goes by the mean of the ranks' gradients, as losses that are means need; "sum" if by
            their sum, as where each rank divides its loss by what all ranks have.
        process_group: a ProcessGroup; or a DeviceMesh: averages are over its dimensions that a parameter's own mesh
            lacks (:mod:`commopt.comm.mesh`). None is the mesh that sharded parameters are on a slice of, or else the
            default process group, or one rank where there is none.
        backend: a :class:`commopt.comm.Backend` instead of a process group.
        torch_options: keywords of torch's optimizer that are taken where they ask for nothing.

    Raises:
        ValueError: on every rank, for an argument out of range on any of them, or if ranks differ in parameters or
            settings.
    """

    hyperparams_used_in_backward: tuple[str, ...] = ("betas", "maximize", "freeze_step")
    """Hyper-parameters of a group that a bucket's task reads before it yields ``ctx.barrier``."""

    follows_from_params: tuple[str, ...] = ("raised",)
    """Keys of a group that change with the parameters that are put into it: ranks that hold other ones altogether need
    not have them alike."""

    known_options: tuple[str, ...] = OF_ADAM
    """Names in ``torch_options``."""

    further_compressors: tuple[str, ...] = ()
    """Arguments that are a compressor beside ``compressor``, or None."""

    _SETTINGS: tuple[str, ...] = ("compressor", "max_grad_norm", "bucket_mb", "overlap", "guard", "reduction")

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
        reduction: Literal["mean", "sum"] = "mean",
        process_group: Any = None,
        backend: Backend | None = None,
        torch_options: Mapping[str, Any] | None = None,
    ) -> None:
        import_what_torch_imports_late()
        params = binding.in_a_list(params)
        self.topology = Topology(resolve_backend(process_group, backend, params), self.knows_nodes)
        self.compressor = Sign() if compressor is None else compressor
        self.max_grad_norm = max_grad_norm
        self.bucket_mb = bucket_mb
        self.overlap = overlap
        self.guard = Guard() if guard is None else guard
        self.reduction = reduction
        self.buckets = []
        self.skipped_steps = 0
        self.dropped_gradients = 0
        self._restart()

        def construct() -> None:
            self.check_settings()
            check_guard(self.guard)
            given = {WHOSE: self.saved_as(), "step": 0, "scales_may_differ": False}
            super(CommOptimizer, self).__init__(params, {**defaults, **given})
            check_torch_options(type(self), torch_options or {}, self.known_options, self.param_groups)

        self.register_new(construct)  # the first groups all at once
        self._ready = True

    def _restart(self) -> None:
        super()._restart()
        self._run: dict[str, Any] = {}  # what is said at its end, see diagnostics.py
        self._skipped_in_a_row = 0
        self._damaged: str | None = None
        self._right: dict[int, int] = {}  # whose replica the others get after the step
        self._in_flight: StepInFlight | None = None
        self._watching: Overlap | None = None
        self._made_to_overlap = self.overlap
        self._control: CountingBackend | None = None

    # what a subclass says ---------------------------------------------------------------------------------------------

    def check_group(self, group: dict[str, Any]) -> None:
        """Raises ValueError if a hyper-parameter of ``group`` is out of range."""
        raise NotImplementedError

    def check_settings(self) -> None:
        """Raises ValueError if an argument that is not of a group is out of range."""
        checks.check_compressor(self.compressor)
        for name in self.further_compressors:
            if getattr(self, name) is not None:
                checks.check_compressor(getattr(self, name), name)
        checks.check_common(self.max_grad_norm, self.bucket_mb, self.overlap)
        checks.check_reduction(self.reduction)

    def settings(self) -> dict[str, Any]:
        """Settings, besides the groups, that must be the same on every rank, by name."""
        return {name: getattr(self, name) for name in self._SETTINGS}

    def chunk_multiple(self) -> int | None:
        return common_multiple(self.compressor, *[getattr(self, name) for name in self.further_compressors])

    def bucket_step(self, bucket: StateBucket, group: dict[str, Any], ctx: StepContext) -> Iterator[Work]:
        """One step of the algorithm on one bucket. Changes nothing that outlives the step before it has yielded
        ``ctx.barrier``."""
        raise NotImplementedError

    def idle(self, bucket: StateBucket, group: dict[str, Any], ctx: StepContext) -> Iterator[Work]:
        """In place of :meth:`bucket_step` for a bucket of which no parameter has a gradient on any rank: sends nothing,
        and leaves what a step would."""
        yield ctx.barrier
        bucket.nonzero = []

    def touches_absent(self, group: dict[str, Any]) -> bool:
        """True if the group's next step may change something of parameters that have no gradient on any rank: the other
        ranks hear of these then, too."""
        return self.is_local(group) or self.replicas_differ

    def phase_of(self, group: dict[str, Any]) -> str:
        """Phase of the group's next step."""
        raise NotImplementedError

    def wants_average(self, group: dict[str, Any]) -> bool:
        """True if the group's next step needs gradients averaged over the ranks in full precision."""
        return self.phase_of(group) != "compressed"

    def _in(self, phase: str) -> list[dict[str, Any]]:
        """The groups whose next step is in ``phase``."""
        return [group for group in self.param_groups if self.phase_of(group) == phase]

    def sends_in(self, phase: str) -> str:
        """Way in which gradients or momenta are sent in ``phase``, in words for a user."""
        return str(self.compressor)

    def lets_average(self, group: dict[str, Any]) -> bool:
        """True if DDP averages the gradients of the group's next step: not once a rank's GradScaler may have met an
        overflow that the others have not, for gradients are scaled where DDP averages them."""
        return self.wants_average(group) and not group["scales_may_differ"]

    def is_local(self, group: dict[str, Any]) -> bool:
        """True if the group's next step communicates nothing: the same on every rank, like the phase."""
        return False

    def growth(self, unscale: float) -> float:
        """A number of which all ranks are to hear the mean before their step, or NaN; ``unscale``: what this rank's
        gradients are to be multiplied by."""
        return 0.0

    def unmoved(self) -> int:
        """Bits: whether this rank has gradients that move nothing, though they should; after :meth:`growth`."""
        return 0

    def terms(self) -> dict[str, Any]:
        """What all ranks must have alike in a step that they take together, by name, besides groups and settings."""
        return {}

    def check_step(self) -> None:
        """Raises ValueError if a setting forbids the next step: it may have been changed."""

    def before_agreement(self, report: StepReport) -> None:
        """Hook for what this rank takes over before the ranks agree on a step; ``report``: what it brings."""

    def heard(self, decision: StepDecision) -> None:
        """Hook for what the ranks have agreed on, of a step that they have taken together; before ``after_step()``."""

    def after_step(self) -> None:
        """Work across buckets, after all of them have stepped. Communicates the same on all ranks; nothing, if the step
        was local."""

    def report_phase(self, phase: str, groups: list[dict[str, Any]]) -> None:
        """Logs what a user should know of ``groups``, which begin ``phase``. Called on rank 0 only, unless ranks hold
        parts: then on all, and it may communicate with the ranks of the same replica."""

    def forget_skips(self) -> None:
        self._skipped_in_a_row = 0

    def loaded(self, entries: Entries, origin: Origin | None) -> None:
        super().loaded(entries, origin)
        self._damaged = None
        leave_out_of_loaded(type(self), self.param_groups, self.known_options, self.topology.rank == 0)
        for group in self.param_groups:
            group[WHOSE] = self.saved_as()

    # groups -----------------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, which starts at its own step 0. All ranks must add the same group at the same time. What a step
        has begun with in backward (``overlap=True``) ends without effect; the step begins again."""

        def add() -> None:
            super(CommOptimizer, self).add_param_group(param_group)
            differ = any(group["scales_may_differ"] for group in self.param_groups)
            self.param_groups[-1]["scales_may_differ"] = differ
            binding.take_mesh(self, self.param_groups[-1])
            binding.check_held(self, self.param_groups[-1]["params"])
            where = f"parameter group {len(self.param_groups) - 1}"
            check_group_options(type(self), self.param_groups[-1], self.known_options, where)
            known = {*self.defaults, *self.known_options}
            check_group_keys(type(self), self.param_groups[-1], known, where)
            self.check_group(self.param_groups[-1])
            following.refuse_moved(self, self.param_groups[-1]["params"])

        if self._ready:
            self.give_up_step()
            self.register_new(add)
        else:
            add()

    def _register(self, groups: list[dict[str, Any]], error: Exception | None, differ: bool = False) -> None:
        apart = ("params", "param_names")
        settings: list[Any] = [as_numbers(g, [k for k in g if k not in apart]) for g in groups]
        settings.append({"optimizer": type(self).__name__, **self.settings()})
        binding.register_groups(self, groups, settings, error, differ)
        if self.overlap:
            starting.open_channels(self)
            if self.topology.world_size > 1 and starting.all_on_one_channel(self):
                raise ValueError(
                    f"{type(self).__name__}(overlap=True) needs a backend that has several channels, or one for small "
                    "messages; this one has neither: create the optimizer with overlap=False"
                )
        starting.watch(self)
        self.topology.traffic.end_step()

    # the step ---------------------------------------------------------------------------------------------------------

    @torch._disable_dynamo  # torch.compile leaves it as it is: it talks to other ranks, and looks at what they say
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step, the same on every rank; all ranks must call it.

        If some gradient on some rank is inf or NaN (or their norm is above 1e14), all ranks skip the step: nothing
        changes, and it is counted and logged.

        Args:
            closure: reevaluates the model and returns the loss; called once, first.

        Returns:
            what the closure returned, or None.

        Raises:
            RuntimeError: within :meth:`averaged`, within ``join()`` of an attached DDP model, and on one rank that is
                alone because the optimizer was made before ``init_process_group()``.
            ValueError: for sparse gradients, and for what ``overlap=True`` excludes: a GradScaler, gradients or
                hyper-parameters changed between backward and step(). On the other ranks RuntimeError. For a GradScaler
                after the warm-up, if an attached DDP model has parameters of another optimizer. Nothing has changed
                then.
            commopt.agreement.calls.OutOfStep: a rank has another learning rate, or is at another step, or in another
                call.
            commopt.optim.ReplicasDiffer, commopt.optim.NotFinite: see :class:`commopt.Guard`.
            commopt.comm.MessageDamaged: what was received is not what was sent. Parameters and momenta are as before,
                residuals may not be: every step raises it until a state is loaded.
            commopt.comm.CollectiveError: a collective failed or timed out; says in which step and bucket.
        """
        self.begin_change("step()")
        if self._damaged is not None:
            raise MessageDamaged(self._damaged)
        refuse_if_left_out(self.topology.backend, type(self).__name__)
        binding.rebind_if_new(self)
        wrapped.attach_if_wrapped(self)
        if self._attachment is not None:
            self._attachment.before_step()
        loss = loss_of(closure)
        step = self.step_in_flight()
        try:
            self._take(step)
        except (CollectiveError, OutOfStep):  # what the ranks have started does not fit together any more
            step.pipeline.abandon()
            raise
        except MessageDamaged as error:
            self._damaged = str(error)
            step.pipeline.abandon()
            raise
        except StepSkipped:
            step.abort()
            self._skip(step.agreement.decision)
        except Exception as error:
            step.abort()
            step.agreement.forget()
            forget_frames(error)
            raise
        except BaseException:  # KeyboardInterrupt: wherever it was, and elsewhere on each rank
            step.pipeline.abandon()
            self._check_next = True
            raise
        finally:
            self._in_flight = None
            self.topology.receipt.clear()
            del step
            starting.watch(self)
            if self._attachment is not None:
                self._attachment.clear()
            wrapped.count_others(self)
            self.topology.traffic.end_step()
        return loss

    def _take(self, step: StepInFlight) -> None:
        """Takes ``step`` from wherever backward has taken it, and does what follows from it."""
        local, overlapped, phases, refused = self._plan()
        if overlapped:
            self._diagnostics.overlap_lost(step.blocking(), self.param_groups, step.started, len(step.buckets))
        if not local:
            starting.open_channels(self)
        refused = refused or step_report.follow(self, step)
        step.params = [p for bucket in self.buckets for p in bucket.params]
        if self.topology.is_sharded:
            self.settle()
        unscale = 1 / float(getattr(self, "grad_scale", None) or 1)  # set by torch.amp.GradScaler around step()
        if refused is None:
            self._notice_scaler()
        report = step_report.report_of(self, step, local, overlapped, unscale, refused)
        over, holders = (_ALONE, None) if local else (self.agrees_over, self.holders())
        decision = step.run(
            report, over, overlapped, self.buckets, lambda decision: self._clip(decision) * unscale, holders
        )
        if not local:
            self._look_at_norms(decision)
            self.heard(decision)
        for group in self.param_groups:
            group["step"] += 1
        self.after_step()
        if not local:
            self._end_agreed(step, decision)
        self._report_new_phases(phases)

    def _plan(self) -> tuple[bool, bool, list[str], Exception | None]:
        """Whether the step is local, whether its buckets start in backward, and the phases of the groups; or what
        forbids it, of which the other ranks hear when they agree: a hyper-parameter was set to what no step can go
        by."""
        try:
            phases = [self.phase_of(group) for group in self.param_groups]
            return self.steps_locally(), self.starts_in_backward(), phases, None
        except Exception as error:
            if self._made_to_overlap:  # others may have begun in backward what this rank cannot begin
                raise step_report.blame(self, error) from None
            return False, False, [], step_report.blame(self, error)

    def _notice_scaler(self) -> None:
        """Notes that scales may differ after this step: only where DDP averages do all ranks overflow together."""
        if getattr(self, "found_inf", None) is not None and not all(map(self.wants_average, self.param_groups)):
            for group in self.param_groups:
                group["scales_may_differ"] = True

    def _look_at_norms(self, decision: StepDecision) -> None:
        """Says what the norms of all ranks' gradients show."""
        equal = decision.already_equal and not (self._attachment is not None and self._attachment.has_averaged())
        if equal:
            self._diagnostics.equal_gradients(wrapped.advice(self))
        wrapped.averages_now(self, equal)
        self._diagnostics.norms(decision.alike, decision.norm)

    def _end_agreed(self, step: StepInFlight, decision: StepDecision) -> None:
        """Ends a step that all ranks have taken together."""
        self._skipped_in_a_row, self._check_next = 0, False
        nothing = not step.present() and not decision.norm  # also of other parts of the model
        if nothing and (step.params or not any(p.requires_grad for p in self.params)):
            self._diagnostics.idle(self.params)
        if self._right:
            comparing.copy_replicas(self, self._right)
            self._right, self._check_next = {}, True

    def _clip(self, decision: StepDecision) -> float:
        return 1.0 if self.max_grad_norm is None else min(1.0, self.max_grad_norm / (decision.norm + 1e-6))

    def _skip(self, decision: StepDecision | None) -> None:
        assert decision is not None
        self.skipped_steps += 1
        self._skipped_in_a_row = decision.skipped + 1
        self._diagnostics.skipped(decision.non_finite, self.skipped_steps)
        if self.guard.ends_after(self._skipped_in_a_row):
            told = tell_not_finite(self.topology.world, self.buckets, names_of(self.param_groups))
            raise NotFinite(f"{type(self).__name__}: {self._skipped_in_a_row} steps in a row were skipped: {told}")

    def check_loaded(self, given: dict[str, Any]) -> None:
        super().check_loaded(given)
        check_moments(self.saved_as(), given, map(self.moments_of, self.params))

    def _load(self, given: dict[str, Any]) -> None:
        packed = self.packed()
        for group, theirs in zip(self.param_groups, given["param_groups"]):
            ours = WHOSE in theirs and "step" in theirs
            if not ours and not theirs.get("step"):  # a plain Adam, and our Lamb, count by parameter only
                numbers = (i for i, p in zip(theirs["params"], group["params"]) if id(p) in packed)
                steps = (given["state"].get(i, {}).get("step") or 0 for i in numbers)
                group["step"] = int(max(steps, default=0))
        super()._load(given)

    # when buckets start -----------------------------------------------------------------------------------------------

    def step_in_flight(self) -> StepInFlight:
        """The step under way; a new one if none is."""
        if self._in_flight is None:
            self._in_flight = starting.new_step(self)
        return self._in_flight

    def starts_in_backward(self) -> bool:
        """True if buckets of the next step start in backward."""
        return starting.in_backward(self)

    def why_not_synchronize(self) -> Exception | None:
        """A step that has begun in backward has sent what belongs to the parameters as they are."""
        if self._in_flight is None or not self._in_flight.started:
            return None
        return ValueError("overlap=True has begun the next step in backward(): take the mean after step(), not before")

    @torch.no_grad()
    def give_up_step(self) -> None:
        """Starts all of a step that has begun in backward, on any rank, and stops it at the barrier. All ranks must
        call it: from the first step on, with ``overlap=True``, they tell each other whether one has."""
        starting.give_up(self)

    @property
    def agrees_over(self) -> CountingBackend:
        return self._control or self.topology.world

    def sent_as_another_kind(self, was: Mapping[int, dict[str, Any]], now: Mapping[int, dict[str, Any]]) -> bool:
        step = self._in_flight
        sent = [] if step is None else [id(p) for bucket in step.buckets[: step.started] for p in bucket.params]
        moved = [(was[i], now[i]) for i in sent if i in was and i in now and was[i] is not now[i]]
        return any(self.is_local(old) != self.is_local(new) for old, new in moved)

    def steps_locally(self) -> bool:
        """True if the next step communicates nothing."""
        return self.topology.world_size > 1 and not [group for group in self.param_groups if not self.is_local(group)]

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

    def watch_buckets(self) -> None:
        if self._watching is not None:
            starting.watch(self)

    # is it still right? -----------------------------------------------------------------------------------------------

    def _compare(self, number: int, table: list[list[int]]) -> None:
        """Says what follows from the digests of all ranks."""
        where = f"{type(self).__name__}, step {number}"
        self._right = comparing.right_replicas(self, table, where, "after this step all have what rank %d has")

    # what is it doing? ------------------------------------------------------------------------------------------------

    @property
    def phase(self) -> str:
        """Phase of the next step; "mixed" if the parameter groups are in different ones."""
        phases = {self.phase_of(group) for group in self.param_groups}
        return phases.pop() if len(phases) == 1 else "mixed"

    def to_be_continued(self) -> None:
        """Note that the run goes on in another process, from what was saved: nothing is logged of what its end would
        have to say. Local: communicates nothing."""
        self._run["goes_on"] = True

    def comm_stats(self) -> dict[str, Any]:
        """Traffic of this rank, and the residual of compression. Local: communicates nothing.

        Returns:
            phase: of the next step.
            step, total: traffic of the last step, and of all since construction, ``{"bytes", "calls",
                "by_collective"}``; bytes are those that this rank sends, beyond its node, or the ranks that hold a
                replica together; ``"intra_node"`` has the others, but for what FSDP and its like send
                (:mod:`commopt.comm.counting` has the formulas). Where a DistributedDataParallel that cannot be
                attached averages gradients in every step, ``by_collective["ddp"]`` is that: an estimate, one all-reduce
                of them in their dtype.
            fp32_bytes: what a float32 all-reduce of all parameters would send in a step.
            ratio: fp32_bytes over the bytes of the last step; None if either is 0.
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
        """2-norms of this rank's worker residual, and of what is compressed."""
        return self.residual_norm(), square_norm([b.buffers[self.residual_of] for b in self.buckets]) ** 0.5

    def compressed_buckets(self, groups: Sequence[dict[str, Any]]) -> list[tuple[StateBucket, dict[str, Any]]]:
        """The buckets of ``groups`` whose means are compressed, each with its group. What one rank alone holds, beside
        what has replicas, is in none: it takes plain steps, in every phase."""
        chosen = {id(group) for group in groups}
        return [(b, group) for b, group in self.grouped_buckets() if b.feedback is not None and id(group) in chosen]

    def _report_new_phases(self, before: list[str]) -> None:
        changed: dict[tuple[str, str], list[int]] = {}
        for i, (old, group) in enumerate(zip(before, self.param_groups)):
            if self.phase_of(group) != old:
                changed.setdefault((old, self.phase_of(group)), []).append(i)
        for (old, new), indices in changed.items():
            groups = [self.param_groups[i] for i in indices]
            which = indices if len(groups) < len(self.param_groups) else None
            if self.topology.rank == 0 or self.topology.is_sharded:
                self.report_phase(new, groups)
            self._diagnostics.new_phase(old, new, groups[0]["step"], which, self.sends_in(new))
