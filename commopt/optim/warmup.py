"""Optimizers that warm up on averages of gradients, and compress once their variance has settled.

A subclass is an Adam of some kind: it keeps a momentum ``exp_avg`` and a variance ``exp_avg_sq`` in every bucket, and
freezes the variance after step ``freeze_step`` (T_w) of a group.

A ``warmup_compressor`` compresses the gradients of the warm-up, with error feedback (the papers send them in full
precision). The residuals are those of the compressed phase, of the momentum: what is sent is (1-b1) g_i.

``freeze_step="auto"``: :mod:`commopt.optim.settling` says when the variance has settled, and
:mod:`commopt.optim.thaw` when it had not: then all ranks go back to the warm-up, which ends as at first; if that was
too early as well, they go back for the rest of the run. Groups of the same age decide together.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterator, Mapping
from typing import Any

from torch import Tensor

from commopt.agreement.decision import StepDecision
from commopt.agreement.diagnostics import tell_if_never_compressed
from commopt.comm import Work
from commopt.compress import Compressor
from commopt.optim import floor, settling, thaw, unmoved
from commopt.optim.exchange import averaged_gradients
from commopt.state.state_bucket import StateBucket
from commopt.step.base import CommOptimizer
from commopt.step.in_flight import StepContext

WORDS = thaw.Words(
    "freeze_step",
    "everything is still sent in full precision; freeze_step=<an int> ends the warm-up at a step of your choice",
    "a larger freeze_step",
    "all ranks go back to the warm-up",
)


def warmup_defaults(freeze_step: Any, thaw_when: Any, min_variance: float) -> dict[str, Any]:
    """Defaults of the parameter groups of a :class:`WarmupOptimizer`."""
    return {"freeze_step": freeze_step, **thaw.defaults(thaw_when), **floor.defaults(min_variance)}


class WarmupOptimizer(CommOptimizer):
    """Base of the optimizers with a warm-up; see the module's docstring.

    Args:
        params, defaults, common: as for :class:`commopt.optim.CommOptimizer`.
        warmup_compressor: of the gradients of the warm-up; None for full precision.
    """

    further_compressors: tuple[str, ...] = ("warmup_compressor",)
    _SETTINGS = (*CommOptimizer._SETTINGS, *further_compressors)

    scalars: Mapping[str, float] = settling.SCALARS

    corrects_bias = True
    """True if v is used over 1 - b2^t."""

    measures_updates = False
    """True if updates that have become too long say, too, that v was frozen too early."""

    def __init__(
        self, params: Any, defaults: dict[str, Any], *, warmup_compressor: Compressor | None = None, **common: Any
    ) -> None:
        self.warmup_compressor = warmup_compressor
        super().__init__(params, defaults, **common)

    def wants_average(self, group: dict[str, Any]) -> bool:
        return super().wants_average(group) and (self.warmup_compressor is None or self.topology.nodes == 1)

    def sends_in(self, phase: str) -> str:
        if phase == "compressed":
            return super().sends_in(phase)
        return "exact averages" if self.warmup_compressor is None else str(self.warmup_compressor)

    def _restart(self) -> None:
        super()._restart()
        until = WORDS.until.replace("in full precision", f"by {self.warmup_compressor}")
        words = WORDS if self.warmup_compressor is None else WORDS._replace(until=until)
        self._frozen = thaw.FrozenVariance(words, self.corrects_bias, self.measures_updates, self.warmup_compressor)
        self._run |= {"warmup": 0, "compressed": 0, "enough": 1, "freeze_step": "auto"}
        if self.topology.rank == 0:
            weakref.finalize(self, tell_if_never_compressed, type(self).__name__, self._run)

    def _register(self, groups: list[dict[str, Any]], error: Exception | None, differ: bool = False) -> None:
        super()._register(groups, error, differ)
        for group in groups:
            if self.topology.nodes > 1:
                self._diagnostics.freeze_at("freeze_step=%d", group["freeze_step"], group["betas"][1])

    def phase_of(self, group: dict[str, Any]) -> str:
        """ "plain" on one node, else "warmup" up to step freeze_step, then "compressed"."""
        if self.topology.nodes == 1:
            return "plain"
        stands = group["freeze_step"] != "auto" and group["step"] >= group["freeze_step"]
        return "compressed" if stands else "warmup"

    def mean_gradients(
        self, bucket: StateBucket, group: dict[str, Any], ctx: StepContext
    ) -> Generator[Work, None, list[Tensor]]:
        """The means of the gradients of the parameters that move: exact, or by ``warmup_compressor``."""
        means = yield from averaged_gradients(bucket, ctx, self.warmup_compressor, group["betas"][0])
        wanted = settling.counts(group["freeze_step"], group["step"] + 1)
        settling.count_nonzero(bucket, ctx, means, wanted)
        return means

    def bucket_step(self, bucket: StateBucket, group: dict[str, Any], ctx: StepContext) -> Iterator[Work]:
        return (self.compressed if self._compresses(bucket, group) else self.warmup)(bucket, group, ctx)

    def _compresses(self, bucket: StateBucket, group: dict[str, Any]) -> bool:
        return self.phase_of(group) == "compressed" and bucket.feedback is not None

    def idle(self, bucket: StateBucket, group: dict[str, Any], ctx: StepContext) -> Iterator[Work]:
        yield from super().idle(bucket, group, ctx)
        if self._compresses(bucket, group):
            self.stand(bucket, group)

    def stand(self, bucket: StateBucket, group: dict[str, Any]) -> None:
        """Does to a variance that stands from now on what its first compressed step does."""
        floor.raise_in_blocks(bucket, group, self.compressor)

    def warmup(self, bucket: StateBucket, group: dict[str, Any], ctx: StepContext) -> Iterator[Work]:
        """One step of the algorithm on means of the gradients."""
        raise NotImplementedError

    def compressed(self, bucket: StateBucket, group: dict[str, Any], ctx: StepContext) -> Iterator[Work]:
        """One step of the algorithm with a variance that stands."""
        raise NotImplementedError

    def increment(
        self, bucket: StateBucket, group: dict[str, Any], ctx: StepContext, variance_moves: bool
    ) -> list[int]:
        """Increments the step counters of the parameters that move; returns their indices."""
        moving = ctx.moving(bucket)
        bucket.increment(("step", "variance_step") if variance_moves else ("step",), moving)
        counts = bucket.numbers["variance_step"]
        if not variance_moves and not counts.all() and not counts[moving].all():
            late = [bucket.params[i] for i in moving if not counts[i]]
            until = thaw.until_it_goes_back(group, self._frozen.words)
            self._diagnostics.too_late(late, self.param_groups, "the variance was frozen", until, "warms up")
        return moving

    def report_phase(self, phase: str, groups: list[dict[str, Any]]) -> None:
        if phase == "compressed":
            unmoved.report_zero(self, groups, "set a larger freeze_step")
            settling.report_rare(self, groups, "freeze_step")

    # the end of warm-up -----------------------------------------------------------------------------------------------

    def after_step(self) -> None:
        """Freezes the variance where it has settled, and thaws it where it had not (``freeze_step="auto"``)."""
        self._count()
        for group in self.param_groups:
            was_compressed = self.phase_of({**group, "step": group["step"] - 1}) == "compressed"
            group["raised"] = floor.raised_by(group, self.compressor) if was_compressed else ""
        self._frozen.go_back(self, self._in("compressed"))
        self._frozen.stop_where_settled(self, self._in("warmup"))

    def _count(self) -> None:
        """Notes what is said at the end of a run."""
        warms_up = self.phase == "warmup"
        self._run["warmup" if warms_up else "compressed"] += 1
        if warms_up:
            group = max(self.param_groups, key=lambda group: group["betas"][1])
            window = round(1 / (1 - group["betas"][1]))
            self._run |= {"enough": min(window, 100), "freeze_step": group["freeze_step"]}

    def growth(self, unscale: float) -> float:
        return self._frozen.growth(self, self._in("compressed"), unscale)

    def unmoved(self) -> int:
        return self._frozen.unmoved_kinds()

    def heard(self, decision: StepDecision) -> None:
        self._frozen.heard(decision.growth, decision.unmoved, self._clip(decision))
