"""Optimizers that warm up on averages of gradients, and compress once their variance has settled.

A subclass is an Adam of some kind: it keeps a momentum ``exp_avg`` and a variance ``exp_avg_sq`` in every bucket, and
freezes the variance after step ``freeze_step`` (T_w) of a group.

A ``warmup_compressor`` compresses the gradients of the warm-up, with error feedback (the papers send them in full
precision). The residuals are those of the compressed phase, of the momentum: what is sent is (1-b1) g_i.

``freeze_step="auto"``: every D = 1 / (1-b2) steps, freeze if ||v_t||_1 is within 4 % of ||v_{t-D}||_1 and lr has not
risen in between; groups of the same age and beta2 decide together. 1-bit Adam (arXiv 2102.02888) has the rule of the
ratio; that it must not fire while v still grows from 0, nor in the warm-up of lr, is ours.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Generator, Iterator
from typing import Any

import torch
from torch import Tensor

from commopt.comm import Work, wait
from commopt.compress import Compressor
from commopt.optim.base import CommOptimizer
from commopt.optim.checks import check_compressor
from commopt.optim.diagnostics import tell_if_never_compressed
from commopt.optim.exchange import averaged_gradients
from commopt.optim.in_flight import StepContext
from commopt.optim.state_bucket import StateBucket

logger = logging.getLogger("commopt")

STABLE = 0.96
"""Ratio of ||v_t||_1 and ||v_{t-D}||_1 from which v counts as settled."""
LONG = 10
"""Windows D after which it is said that v has not settled."""


def warmup_defaults(freeze_step: Any) -> dict[str, Any]:
    """Defaults of the parameter groups of a :class:`WarmupOptimizer`."""
    # variance_norm, variance_lr: of the auto rule: ||v||_1 of the cohort and lr when it last looked
    return {"freeze_step": freeze_step, "variance_norm": 0.0, "variance_lr": 0.0}


class WarmupOptimizer(CommOptimizer):
    """Base of the optimizers with a warm-up; see the module's docstring.

    Args:
        params, defaults, common: as for :class:`commopt.optim.CommOptimizer`.
        warmup_compressor: of the gradients of the warm-up; None for full precision.
    """

    _SETTINGS = (*CommOptimizer._SETTINGS, "warmup_compressor")

    def __init__(
        self, params: Any, defaults: dict[str, Any], *, warmup_compressor: Compressor | None = None, **common: Any
    ) -> None:
        self.warmup_compressor = warmup_compressor
        super().__init__(params, defaults, **common)

    def check_settings(self) -> None:
        super().check_settings()
        if self.warmup_compressor is not None:
            check_compressor(self.warmup_compressor, "warmup_compressor")

    def settings(self) -> list[Any]:
        return [*super().settings(), self.warmup_compressor]

    def chunk_multiple(self) -> int | None:
        both = [c.chunk_multiple for c in (self.compressor, self.warmup_compressor) if c is not None]
        return None if None in both else math.lcm(*(multiple for multiple in both if multiple is not None))

    def wants_average(self, group: dict[str, Any]) -> bool:
        return super().wants_average(group) and (self.warmup_compressor is None or self.topology.nodes == 1)

    def _restart(self) -> None:
        super()._restart()
        self._run: dict[str, Any] = {"warmup": 0, "compressed": 0, "enough": 1, "freeze_step": "auto"}
        if self.topology.rank == 0:
            weakref.finalize(self, tell_if_never_compressed, type(self).__name__, self._run)

    def _register(self, groups: list[dict[str, Any]], error: Exception | None) -> None:
        super()._register(groups, error)
        for group in groups:
            steps, beta2 = group["freeze_step"], group["betas"][1]
            if self.topology.nodes > 1 and steps != "auto" and steps < round(1 / (1 - beta2)):
                self._diagnostics.early_freeze(steps, beta2)

    def phase_of(self, group: dict[str, Any]) -> str:
        """ "plain" on one node, else "warmup" up to step freeze_step, then "compressed"."""
        if self.topology.nodes == 1:
            return "plain"
        frozen = group["freeze_step"] != "auto" and group["step"] >= group["freeze_step"]
        return "compressed" if frozen else "warmup"

    def mean_gradients(
        self, bucket: StateBucket, group: dict[str, Any], ctx: StepContext
    ) -> Generator[Work, None, list[Tensor]]:
        """The means of the gradients of the parameters that move: exact, or by ``warmup_compressor``."""
        return averaged_gradients(bucket, ctx, self.warmup_compressor, group["betas"][0])

    def bucket_step(self, bucket: StateBucket, group: dict[str, Any], ctx: StepContext) -> Iterator[Work]:
        step = self.compressed if self.phase_of(group) == "compressed" else self.warmup
        return step(bucket, group, ctx)

    def warmup(self, bucket: StateBucket, group: dict[str, Any], ctx: StepContext) -> Iterator[Work]:
        """One step of the algorithm on exact averages."""
        raise NotImplementedError

    def compressed(self, bucket: StateBucket, group: dict[str, Any], ctx: StepContext) -> Iterator[Work]:
        """One step of the algorithm with a variance that stands."""
        raise NotImplementedError

    def increment(self, bucket: StateBucket, ctx: StepContext, variance_moves: bool) -> list[int]:
        """Increments the step counters of the parameters that move; returns their indices."""
        moving = ctx.moving(bucket)
        bucket.increment(("step", "variance_step") if variance_moves else ("step",), moving)
        if not variance_moves and not bucket.numbers["variance_step"][moving].all():
            self._diagnostics.too_late("the variance was frozen", "warms up")
        return moving

    def report_phase(self, phase: str, groups: list[dict[str, Any]]) -> None:
        if phase == "compressed":
            self.report_zero_variance(groups, "set a larger freeze_step")

    # the end of warm-up -----------------------------------------------------------------------------------------------

    def after_step(self) -> None:
        """Freezes the variance where it has settled (``freeze_step="auto"``)."""
        self._count()
        cohorts: dict[tuple[int, float], list[dict[str, Any]]] = {}  # groups of one age and beta2 decide together
        for group in self.param_groups:
            beta2 = group["betas"][1]
            undecided = self.phase_of(group) == "warmup" and group["freeze_step"] == "auto"
            if undecided and group["step"] % round(1 / (1 - beta2)) == 0:
                cohorts.setdefault((group["step"], beta2), []).append(group)
        if not cohorts or not self.buckets:
            return
        norms = torch.stack([self._variance_norm(groups) for groups in cohorts.values()])
        where = f"step {max(step for step, _ in cohorts)}, whether the variance has settled"
        # where every rank holds the whole: equal already, but for the order of summation; the decision must be
        wait(self.topology.world.all_reduce(norms), where)
        for groups, norm in zip(cohorts.values(), norms.tolist()):
            self._decide(groups, norm)

    def _count(self) -> None:
        """Notes what is said at the end of a run."""
        warms_up = self.phase == "warmup"
        self._run["warmup" if warms_up else "compressed"] += 1
        if warms_up:
            group = max(self.param_groups, key=lambda group: group["betas"][1])
            window = round(1 / (1 - group["betas"][1]))
            self._run |= {"enough": min(window, 100), "freeze_step": group["freeze_step"]}

    def _variance_norm(self, groups: list[dict[str, Any]]) -> Tensor:
        """||v||_1 over the parameters of ``groups``, 0-d float64: the mean over all ranks is that of the model."""
        chosen = {id(group) for group in groups}
        norm = torch.zeros((), dtype=torch.float64, device=self.buckets[0].device)
        for bucket, group in self.grouped_buckets():
            if id(group) in chosen:
                norm += bucket.share * bucket["exp_avg_sq"].sum(dtype=torch.float64).to(norm.device)
        return norm

    def _decide(self, groups: list[dict[str, Any]], norm: float) -> None:
        """Freezes ``groups`` if ||v||_1 is near what it was a window ago and no lr has risen; else remembers both."""
        settled = True
        for group in groups:
            before, lr_before = group["variance_norm"], group["variance_lr"]
            group["variance_norm"], group["variance_lr"] = norm, float(group["lr"])
            steady = before > 0 and norm > 0 and min(norm / before, before / norm) >= STABLE
            settled = settled and steady and group["variance_lr"] <= lr_before
            if not settled and group["step"] == LONG * round(1 / (1 - group["betas"][1])):
                change = abs(norm / before - 1) if before else 1.0
                self._diagnostics.long_warmup(group["step"], change, group["variance_lr"] > lr_before)
        if settled:
            for group in groups:
                group["freeze_step"] = group["step"]
