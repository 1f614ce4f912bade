"""0/1 Adam: Adam that sends one bit or nothing (Lu et al., arXiv 2202.06009, Algorithm 1).

Read first: tests/oracle_zero_one.py, the same on plain lists of floats.

Two ideas. The variance v changes slowly, so it is refreshed from exact gradients ever more rarely, at the steps T_v,
and the momentum is compressed from the start: there is no warm-up in full precision. And once v stands still, ranks
take steps on their own between the steps T_u, at which they send what they have gathered. Every step is of one kind:

    exact, t in T_v:        g = mean_i g_i;   m = b1 m + (1-b1) g;   v = b2 v + (1-b2) g^2
                            x = x - c_t m / D
    compressed, t in T_u:   m_i = b1 m_i + (1-b1) g_i;   u_i = u_i + c m_i;   G = G + c
                            m_i = m = compressed_mean_of(u_i / G);   x_i = x = x_a - G m / D
                            x_a = x;   u_i = 0;   G = 0
    local, all others:      m_i = b1 m_i + (1-b1) g_i;   u_i = u_i + c m_i;   G = G + c
                            x_i = x_a - u_i / D

with D = sqrt(v / (1-b2^k)) + eps after k refreshes, and c = lr / (1-b1^t). In compressed and local steps v is at least
a hundredth of the mean in its block. The anchor x_a is the model after the last round. Local steps begin when T_v has
ended, so D does not change between two rounds.

Where this differs from the paper and its usual implementation:

* x_i is always made from the anchor, never by undoing local steps. So replicas are the same to the bit after every
  round, and x_i need not be saved: it follows from x_a, u_i and v.
* What is kept and sent is u_i / G, the mean of the momenta weighted with c, instead of u_i: the same where lr is
  constant. The residual is then momentum and not a distance, so that it does not swamp the momentum when lr falls;
  lr = 0 divides nothing by 0; and rounds at successive steps are those of 1-bit Adam. Where the next interval is
  longer, the residual shrinks by as much, so that what was lost moves x as far as it would have.
* At T_v the exact mean gradient feeds the momentum too, and nothing is compressed. So T_v at every step is Adam.
  v is refreshed before it is used: in the paper's order the first step divides by eps.
* Bias correction as in ``torch.optim.Adam``, with the step counter of b2 counting refreshes. Between two rounds c
  keeps the correction of the first step, so that one number G serves all elements.
* Decoupled weight decay shrinks the anchor, x_a = x_a (1 - lr wd), and is never in u_i: it cannot leak into m. Coupled
  decay is a part of the gradient, g_i + wd x_i, in all three.
* A ``refresh_compressor`` compresses the gradients at T_v, (1-b1) g_i. After a round they go without the residuals:
  these are of momenta, and would be most of g. What is lost is added to them, in momentum's units, so that the next
  step makes up for it: refreshes that follow a refresh go with the residuals, which would grow without end otherwise.
  Where two follow rounds, as where T_v begins anew, what the rounds have left is dropped. v is that of what was sent.
  (In full precision in the paper.)
* T_u counts from the end of T_v; the paper asks for that, here it is so by construction.
* ``VariancePolicy(stop="auto")`` ends T_v where :mod:`commopt.optim.settling` finds that v has settled. Where that was
  too early, T_v begins anew (:mod:`commopt.optim.thaw`): its distances are counted from there, and until it ends there
  are no local steps.
* T_v begins where every element of a tensor has had 20 gradients on average
  (:func:`commopt.optim.settling.rarely_updated`): at once, unless a step brings gradients to fewer than half of them,
  as to the rows of an embedding. Until then every step is exact. In the paper's order recommenders are lost.
* T_v begins anew where a parameter has its first gradients between two refreshes (``missed_at``), which could not move
  it: from the next refresh on every step is exact until it has one, for as many steps at most as were taken when it
  came. A head whose turn is every second step may never meet a refresh otherwise.
* Elements of v that are not 0 are raised to 0.01 of the mean in their block after refreshes
  (:mod:`commopt.optim.floor`): others would be moved by thousands of lr. ``min_variance=0`` is the paper's.
* Scales by block, and masks: where v = 0 there was no gradient at any refresh, and nothing moves or is sent, as in
  :class:`commopt.OneBitAdam`.
* A parameter without a gradient on any rank is left alone, momentum and residuals too, in exact steps and in a round
  that follows another. In local steps nobody knows: there, and in the round that ends them, a missing gradient is
  zeros, so that the momentum decays, on all ranks alike, while it moves the parameter. One that was frozen on all
  ranks when the first local step began is left alone, as in torch.
* One rank alone, or one node, is plain Adam. With nodes of several ranks a round averages inside the node and is
  compressed between nodes; local steps are each rank's own, and communicate nothing in the node either.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor

from commopt import ops
from commopt.agreement import checks
from commopt.agreement.decision import StepDecision
from commopt.agreement.diagnostics import tell_if_never_settled
from commopt.comm import Backend, Work, reduce_scatter
from commopt.compress import Compressor, FrozenAdam, Momentum
from commopt.optim import floor, schedule, settling, unmoved
from commopt.optim.anchored import Interval, add_params_, moves, next_interval, place, to_anchor
from commopt.optim.exchange import averaged_gradients, compressed_mean_of, local_momentum
from commopt.optim.masks import absent_runs, active_mask, keeping
from commopt.optim.policies import SyncPolicy, VariancePolicy
from commopt.optim.rules import adam_, coupled_decay
from commopt.optim.thaw import FrozenVariance, Words, until_it_goes_back
from commopt.optim.thaw import defaults as thaw_defaults
from commopt.state import loading, replicas
from commopt.state.guard import Guard
from commopt.state.own import MIXED, Origin
from commopt.state.saving import Entries
from commopt.state.state_bucket import StateBucket
from commopt.step.base import CommOptimizer
from commopt.step.in_flight import StepContext

logger = logging.getLogger("commopt")

UNTIL = (
    "ranks still send something in every step; VariancePolicy(stop=<an int>) and a SyncPolicy that fits the run let "
    "local steps begin"
)
WORDS = Words("variance_stop", UNTIL, "a larger VariancePolicy(stop=)", "all ranks refresh it again, in full precision")


class ZeroOneAdam(CommOptimizer):
    """Adam (AdamW with ``weight_decay``) that sends one bit per parameter from the start, later nothing in most steps.

    ::

        optimizer = commopt.ZeroOneAdam(model.parameters(), lr=1e-3, variance=VariancePolicy(stop=10_000))

    Between two rounds the ranks' parameters differ. Evaluate and save the model in ``with optimizer.averaged(model):``,
    or call ``optimizer.synchronize()`` first. All ranks must call ``step()`` equally often.

    State per parameter and rank: exp_avg, exp_avg_sq, mean_momentum, anchor, one residual of the same size and 1/W of
    one, in float32 (float64 for float64 parameters): 5 + 1/W times the parameters; residuals only with more than one
    rank. With nodes of L ranks the residuals are 1/L and 1/W. A round after local steps takes one buffer more while
    it is compressed. Between two rounds exp_avg, mean_momentum and the parameters are each rank's own; ``state_dict()``
    has the first two with the residuals, and ``load_state_dict()`` makes the parameters from them.

    Args:
        params: parameters, (name, parameter) pairs, or parameter groups; float64, float32, bfloat16 or float16.
        lr: learning rate, >= 0; a float or a 0-d tensor, read at each step.
        betas: decay of exp_avg and exp_avg_sq, each in [0, 1). The second is used at each refresh only.
        eps: added to the square root, >= 0.
        weight_decay: wd, >= 0; see ``decoupled_weight_decay``.
        maximize: go up instead of down.
        decoupled_weight_decay: whether the decay is AdamW's, x (1 - lr wd), or Adam's, a part of each rank's gradient,
            g_i + wd x_i.
        bias_correction: whether m and v are divided by 1 - b1^t and 1 - b2^k, as Adam's are; the published code of
            0/1 Adam never does.
        variance: T_v, a :class:`VariancePolicy` or a mapping of its arguments. Its ``stop`` must fit the run: ``sync``
            counts from there; "auto" finds it as 1-bit Adam does. In a parameter group it is the numbers
            ``variance_kappa`` and ``variance_stop``.
        thaw: whether a variance that was stopped too early moves again (:mod:`commopt.optim.thaw`): "auto" if its
            ``stop`` was "auto", "always", or "never". A warning says that it was, in any case.
        sync: T_u, a :class:`SyncPolicy` or a mapping of its arguments, which must fit the run, too: by default the
            first local step comes 32,678 steps after ``stop``. ``sync_first``, ``sync_double_every`` and
            ``sync_longest`` in a group.
        min_variance: c in [0, 1): of the mean of its block, what an element's variance is at least, unless it
            is 0 (:mod:`commopt.optim.floor`). 0 is the paper's, and loses runs.
        compressor: what is sent at T_u; ``Sign()`` if None.
        refresh_compressor: what gradients are sent by at T_v, such as ``Int8()`` or ``Int4()``; None for full
            precision. Takes the memory of the residuals once more while it sends.
        max_grad_norm: clip to this norm, > 0, or None. The norm is sqrt(mean_i ||g_i||^2), as in ``OneBitAdam``; in a
            local step, ||g_i|| of this rank.
        bucket_mb: MB (2**20 bytes) of float32 per bucket, > 0; None for an 8th of the group, 1 to 25 (GPU: to 100).
        overlap: send while backward runs, at T_v and T_u: to the same bits. Costs both residuals once more, and
            excludes what needs all gradients first, as in ``OneBitAdam``; and neither lr nor weight_decay may change
            between backward() and step().
        guard: when a run that has gone wrong ends; :class:`commopt.Guard` if None.
        reduction: "mean" if a step goes by the mean of the ranks' gradients, as losses that are means need; "sum" if by
            their sum, as where each rank divides its loss by what all ranks have.
        process_group: a ProcessGroup; or a DeviceMesh: averages are over its dimensions that a parameter's own mesh
            lacks (:mod:`commopt.comm.mesh`). None is the mesh that sharded parameters are on a slice of, or else the
            default process group, or one rank where there is none.
        backend: a :class:`commopt.comm.Backend` instead.
        torch_options: ``foreach`` and ``fused``; ``amsgrad``, ``capturable``, ``differentiable`` if False: as
            :class:`torch.optim.Adam` has them, and without effect.

    Raises:
        ValueError: on every rank, for an argument out of range on any of them, or if ranks differ in parameters or
            settings.
    """

    further_compressors = ("refresh_compressor",)
    _SETTINGS = (*CommOptimizer._SETTINGS, *further_compressors)

    follows_from_params = (*CommOptimizer.follows_from_params, "residual_steps", "residual_interval")
    step_counters = (*CommOptimizer.step_counters, "interval_step")
    scalars: Mapping[str, float] = {**settling.SCALARS, "missed_at": 0.0}  # step of a gradient before any refresh
    hyperparams_used_in_backward = (
        "betas", "maximize", "lr", "weight_decay", "variance_kappa", "variance_stop", "thawed", "rare_until",
        "sync_first", "sync_double_every", "sync_longest",
    )  # fmt: skip

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        decoupled_weight_decay: bool = True,
        bias_correction: bool = True,
        variance: VariancePolicy | Mapping[str, Any] | None = None,
        sync: SyncPolicy | Mapping[str, Any] | None = None,
        thaw: Literal["auto", "always", "never"] = "auto",
        min_variance: float = floor.LEAST,
        compressor: Compressor | None = None,
        refresh_compressor: Compressor | None = None,
        max_grad_norm: float | None = None,
        bucket_mb: float | None = None,
        overlap: bool = False,
        guard: Guard | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        process_group: Any = None,
        backend: Backend | None = None,
        **torch_options: Any,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "decoupled_weight_decay": decoupled_weight_decay,
            "bias_correction": bias_correction,
            **thaw_defaults(thaw),
            **floor.defaults(min_variance),
            "rare_until": 0,  # the last step at which parameters had few gradients, or none: T_v is counted from there
            "local_steps": 0,  # since the last round: their number, the sum of their lr, and the product of their decay
            "local_lr_sum": 0.0,
            "local_decay": 1.0,
            "local_betas": betas,  # of the last local step
            "local_eps": eps,
            "residual_steps": 0,  # of the interval in whose mean residuals were left; 0 if of none, but of refreshes
            "residual_interval": 0,  # steps of that for whose mean they are weighed, at least as many
        }
        self.refresh_compressor = refresh_compressor
        super().__init__(
            params,
            {**defaults, **schedule.numbers_of("variance", variance), **schedule.numbers_of("sync", sync)},
            compressor=compressor,
            max_grad_norm=max_grad_norm,
            bucket_mb=bucket_mb,
            overlap=overlap,
            guard=guard,
            reduction=reduction,
            process_group=process_group,
            backend=backend,
            torch_options=torch_options,
        )

    def check_group(self, group: dict[str, Any]) -> None:
        checks.check_lr(group["lr"])
        checks.check_betas(group["betas"])
        checks.check_at_least("eps", group["eps"], 0)
        checks.check_at_least("weight_decay", group["weight_decay"], 0)
        checks.check_bool("maximize", group["maximize"])
        checks.check_bool("decoupled_weight_decay", group["decoupled_weight_decay"])
        checks.check_bool("bias_correction", group["bias_correction"])
        checks.check_thaw(group["thaw"])
        checks.check_min_variance(group["min_variance"])
        schedule.check_policies(group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, which starts at its own step 0, with its own ``variance`` and ``sync`` if it has them."""
        schedule.put_policies(param_group)
        super().add_param_group(param_group)

    def init_bucket(self, bucket: StateBucket) -> None:
        for name in ("exp_avg", "exp_avg_sq", "mean_momentum", "anchor"):
            bucket.buffers[name] = bucket.zeros()

    def _restart(self) -> None:
        super()._restart()
        back = WORDS.back.replace("in full precision", f"by {self.refresh_compressor}")
        words = WORDS if self.refresh_compressor is None else WORDS._replace(back=back)
        self._frozen = FrozenVariance(words, sent_by=self.refresh_compressor, kept_back=1.0)
        self._parted = False
        self._run |= {"waiting": False, "waited": 0, "enough": 1}  # for a variance to settle
        if self.topology.rank == 0:
            weakref.finalize(self, tell_if_never_settled, type(self).__name__, self._run)

    def _register(self, groups: list[dict[str, Any]], error: Exception | None, differ: bool = False) -> None:
        super()._register(groups, error, differ)
        for group in groups:
            if self.topology.nodes > 1:
                self._diagnostics.freeze_at("VariancePolicy(stop=%d)", group["variance_stop"], group["betas"][1])

    # schedule ---------------------------------------------------------------------------------------------------------

    def kind_of(self, group: dict[str, Any]) -> str:
        """Kind of the group's next step: "exact", "compressed" or "local"."""
        return self._kind(group, group["step"] + 1)

    def _kind(self, group: dict[str, Any], step: int) -> str:
        if self.topology.nodes == 1:
            return "exact"
        return schedule.kind(group, step)

    def phase_of(self, group: dict[str, Any]) -> str:
        """ "plain" on one node, else "refreshing" up to the last step of T_v, then "frozen"."""
        if self.topology.nodes == 1:
            return "plain"
        return "frozen" if schedule.variance_of(group).has_stopped(group["step"] + 1) else "refreshing"

    def wants_average(self, group: dict[str, Any]) -> bool:
        return self.kind_of(group) == "exact" and (self.refresh_compressor is None or self.topology.nodes == 1)

    def is_local(self, group: dict[str, Any]) -> bool:
        return self.kind_of(group) == "local"

    def sends_in(self, phase: str) -> str:
        refreshes = "exact averages" if self.refresh_compressor is None else str(self.refresh_compressor)
        return f"{refreshes} at refreshes, else {self.compressor}" if phase == "refreshing" else super().sends_in(phase)

    def report_phase(self, phase: str, groups: list[dict[str, Any]]) -> None:
        if phase == "frozen":
            unmoved.report_zero(self, groups, "set a larger VariancePolicy(stop=)")
            floor.report_outsized(self, groups)
            settling.report_rare(self, groups, "VariancePolicy(stop=)")

    ever_rank_local = ("exp_avg", "mean_momentum")

    @property
    def replicas_differ(self) -> bool:
        return any(group["local_steps"] for group in self.param_groups)

    @property
    def has_parted(self) -> bool:
        return self._parted

    def rank_local(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "mean_momentum") if group["local_steps"] else ()

    def growth(self, unscale: float) -> float:
        frozen = [group for group in self._in("frozen") if not self.is_local(group)]
        return self._frozen.growth(self, frozen, unscale)

    def unmoved(self) -> int:
        return self._frozen.unmoved_kinds()

    def heard(self, decision: StepDecision) -> None:
        self._frozen.heard(decision.growth, decision.unmoved, self._clip(decision))

    def after_step(self) -> None:
        """Counts the local steps since the last round. Stops a variance that has settled, and lets it move again where
        it had not (``stop="auto"``)."""
        kinds = {id(group): self._kind(group, group["step"]) for group in self.param_groups}  # before an interval ends
        intervals = {id(group): group["local_steps"] + 1 for group in self.param_groups}

        def of(*some: str) -> list[dict[str, Any]]:
            return [group for group in self.param_groups if kinds[id(group)] in some]

        self._count_local_steps(of("local"))
        self._end_interval(of("exact", "compressed"))
        for group in self.param_groups:
            exact = kinds[id(group)] == "exact"
            group["raised"] = "" if exact else floor.raised_by(group, self.compressor)
        frozen, refreshing = self._in("frozen"), self._in("refreshing")
        self._frozen.go_back(self, frozen)
        self._wait([group for group in refreshing if self._asks(group, kinds[id(group)])])
        self._frozen.stop_where_settled(self, [group for group in refreshing if not schedule.has_begun_anew(group)])
        for group in of("compressed"):  # where it has gone back residuals are 0, of no round
            interval = 0 if group["thawed"] == group["step"] else intervals[id(group)]
            group.update(residual_steps=interval, residual_interval=interval)
        if self.refresh_compressor is not None:
            self._count_refreshes(of("exact"))
        self._weigh_residuals(of("exact", "compressed"))
        waiting = [g["betas"][1] for g in refreshing if g["variance_stop"] == "auto" and not g["thaws"]]
        self._run["waiting"] = bool(waiting)
        if waiting:
            self._run["waited"] += 1
            self._run["enough"] = min(round(1 / (1 - max(waiting))), 100)

    def _asks(self, group: dict[str, Any], kind: str) -> bool:
        """True if ranks ask each other after this step, of that ``kind``, whether a parameter of ``group`` waits: after
        an exact step that is not one of the first ones, which all are, and before the variance may stop."""
        step = group["step"]
        may_stop = group["variance_stop"] == "auto" and settling.is_look(step)
        return step >= group["variance_kappa"] and (may_stop or kind == "exact")

    def _wait(self, groups: list[dict[str, Any]]) -> None:
        """Lets T_v of those of ``groups`` begin only now in which a parameter waits for its first refresh, or in whose
        tensors elements have had few gradients when it would thin out."""
        end = []
        for group, waits in zip(groups, settling.any_in(self, groups, _waiting)):
            if waits:
                group["rare_until"] = group["step"]
            elif schedule.is_end_of_first(group, group["step"]):
                end.append(group)
        floor.report_outsized(self, end)

    def _count_local_steps(self, groups: list[dict[str, Any]]) -> None:
        for group in groups:
            now = next_interval(group)
            group.update(local_steps=now.steps, local_lr_sum=now.lr_sum, local_decay=now.decay)
            group.update(local_betas=now.betas, local_eps=now.eps)
            self._parted = True

    def _count_refreshes(self, groups: list[dict[str, Any]]) -> None:
        """Where another refresh follows one of ``groups``, it sends the residuals; those that rounds have left would be
        most of g, and are dropped."""
        more = [group for group in groups if self.kind_of(group) == "exact"]
        for bucket, _ in self.compressed_buckets([group for group in more if group["residual_steps"]]):
            assert bucket.feedback is not None
            bucket.feedback.clear()
        for group in more:
            group.update(residual_steps=0, residual_interval=1)
        for group in groups:
            group["residual_interval"] = group["residual_interval"] or 1

    def _weigh_residuals(self, groups: list[dict[str, Any]]) -> None:
        """Where the interval to the next round is longer than that in which residuals were left, what was lost is less
        of its mean. When that comes depends on whether v stands, so that is found out first."""
        shares: dict[int, float] = {}
        for group in groups:
            if group["residual_interval"]:
                interval = max(group["residual_steps"], schedule.steps_to_next_round(group))
                shares[id(group)], group["residual_interval"] = group["residual_interval"] / interval, interval
        for bucket, group in self.compressed_buckets([g for g in groups if shares.get(id(g), 1) != 1]):
            assert bucket.feedback is not None
            bucket.feedback.worker.mul_(shares[id(group)])
            bucket.feedback.server.mul_(shares[id(group)])

    def put_in_group(self, params: Sequence[Tensor], old: dict[str, Any], new: dict[str, Any]) -> None:
        """What was lost of ``params`` is weighed as in their new group, whose interval may be longer. Where that sends
        residuals with its refreshes, the next one goes without."""
        if not new["residual_interval"]:
            new.update(residual_steps=old["residual_steps"], residual_interval=old["residual_interval"])
        elif old["residual_steps"] and not new["residual_steps"]:
            new["residual_steps"] = 1
        share = (old["residual_interval"] or 1) / (new["residual_interval"] or 1)
        residuals = self.residuals if share < 1 else {}
        for residual in (r for p in params if p in residuals for r in residuals[p].values()):
            residual.mul_(share)

    # the step ---------------------------------------------------------------------------------------------------------

    def bucket_step(self, bucket: StateBucket, group: dict[str, Any], ctx: StepContext) -> Iterator[Work]:
        steps = {"exact": self.exact, "compressed": self.round, "local": self.local}
        kind = "exact" if bucket.feedback is None else self.kind_of(group)
        return steps[kind](bucket, group, ctx)

    def idle(self, bucket: StateBucket, group: dict[str, Any], ctx: StepContext) -> Iterator[Work]:
        yield from super().idle(bucket, group, ctx)
        if bucket.feedback is not None and self.kind_of(group) != "exact":
            floor.raise_in_blocks(bucket, group, self.compressor)

    def exact(self, bucket: StateBucket, group: dict[str, Any], ctx: StepContext) -> Iterator[Work]:
        """t in T_v, and every step of what one rank alone holds: Adam on the mean gradient."""
        apart = 1 / group["residual_interval"] if group["residual_steps"] else None
        g = yield from averaged_gradients(bucket, ctx, self.refresh_compressor, group["betas"][0], apart)  # mean_i g_i
        moving = ctx.moving(bucket)
        step = group["step"] + 1
        wanted = settling.counts(group["variance_stop"], step) or schedule.is_end_of_first(group, step)
        settling.count_nonzero(bucket, ctx, g, wanted)
        bucket.increment(("step", "variance_step"), moving)
        x, m, v, counts = bucket.operands(moving)
        adam_(x, g, m, v, counts, group)

    def round(self, bucket: StateBucket, group: dict[str, Any], ctx: StepContext) -> Iterator[Work]:
        """t in T_u: the mean over ranks and steps of the momenta."""
        m, since, bucket.nonzero = bucket["exp_avg"], next_interval(group), []
        absent = None if since.steps == 1 else _still(bucket)  # between rounds a missing gradient is zeros
        mean = yield from compressed_mean_of(
            (yield from self._gathered(bucket, group, ctx, since)), bucket, self.compressor, ctx, absent=absent
        )
        floor.raise_in_blocks(bucket, group, self.compressor)  # v = max(v, c mean of its block)
        update = moves(bucket, group, since, self._increment(bucket, group, since, ctx.present))
        if since.steps > 1:
            to_anchor(bucket, update)
        mean.into(m, update)  # m = mean_i u_i / G;  x = x_a - G m / D
        if since.steps > 1:
            bucket["mean_momentum"].zero_()  # u_i = 0, so that all state is the same on all ranks

    def local(self, bucket: StateBucket, group: dict[str, Any], ctx: StepContext) -> Iterator[Work]:
        """All other steps: this rank's own, from the anchor."""
        yield ctx.barrier
        floor.raise_in_blocks(bucket, group, self.compressor)  # v = max(v, c mean of its block)
        m, u, since = bucket["exp_avg"], bucket["mean_momentum"], next_interval(group)
        grads = [] if ctx.nonfinite_dropped else bucket.gradients()
        beta1, moving = group["betas"][0], self._increment(bucket, group, since, None)
        with keeping(m, absent_runs(bucket, _still(bucket))):
            ops.momentum(m, [g for g, _ in grads], [o for _, o in grads], beta1, (1 - beta1) * ctx.scale, m)
        add_params_(m, bucket, moving, (1 - beta1) * coupled_decay(group))  # m_i = b1 m_i + (1-b1) (g_i + wd x_i)
        if since.steps == 1:
            bucket.pack_params_(bucket["anchor"])  # x_a = x
            u.copy_(m)
        else:
            u.lerp_(m, since.share)  # u_i / G
        place(bucket, moves(bucket, group, since, moving), u)

    def _gathered(
        self, bucket: StateBucket, group: dict[str, Any], ctx: StepContext, since: Interval
    ) -> Generator[Work, None, Momentum]:
        """u_i / G with this step, of the part of the bucket that this rank compresses for its node."""
        beta1, m = group["betas"][0], bucket["exp_avg"]
        if since.steps == 1:  # the momentum is the same on all ranks: only gradients differ
            return (yield from local_momentum(bucket, m, group, ctx))
        u = bucket["mean_momentum"] * (1 - since.share)
        u.add_(m, alpha=beta1 * since.share)
        moving = bucket.numbers["interval_step"].nonzero().flatten().tolist()
        add_params_(u, bucket, moving, (1 - beta1) * since.share * coupled_decay(group))
        grads = bucket.gradients()
        local = Momentum(u, [g for g, _ in grads], [o for _, o in grads], 1.0, (1 - beta1) * ctx.scale * since.share)
        if bucket.local_world_size == 1:
            return local
        ops.momentum(u, local.grads, local.offsets, 1.0, local.alpha, u)
        part = yield from reduce_scatter(u, ctx.send.intra_node)
        return Momentum(part, [], [], 1.0, 0.0)

    def _increment(
        self, bucket: StateBucket, group: dict[str, Any], interval: Interval, present: frozenset[int] | None
    ) -> list[int]:
        """The indices of the parameters that move, the same on all ranks, after their step counters were incremented.

        Between rounds nobody knows which of them have a gradient on some rank. So with local steps go all that are
        trainable and have a variance when the first begins, until the round; a missing gradient is zeros. In a round
        that follows another, those ``present``.
        """
        since, k = bucket.numbers["interval_step"].tolist(), bucket.numbers["variance_step"].tolist()
        if interval.steps > 1:
            moving = [i for i, steps in enumerate(since) if steps > 0]
        else:
            here = [p.requires_grad if present is None else id(p) in present for p in bucket.params]
            moving = [i for i, moves in enumerate(here) if moves and k[i] > 0]
            if present is not None:
                missed = bucket.numbers["missed_at"]
                for i, moves in enumerate(here):
                    if moves and not k[i] and not missed[i]:
                        missed[i] = group["step"] + 1
            if self.phase_of(group) == "frozen":
                late = [p for i, p in enumerate(bucket.params) if p.grad is not None and not k[i]]
                until, when = until_it_goes_back(group, self._frozen.words), "the last refresh of the variance"
                self._diagnostics.too_late(late, self.param_groups, when, until, "starts")
        bucket.increment(("step", "interval_step"), moving)
        return moving

    def terms(self) -> dict[str, Any]:
        """Which parameters have not moved since the last round: each rank has let them alone."""
        still: set[int] = set()
        for bucket, group in self.grouped_buckets():
            if group["local_steps"]:
                since = bucket.numbers["interval_step"].tolist()
                still.update(id(p) for p, steps in zip(bucket.params, since) if steps == 0)
        return {"parameters frozen since the last round": [i for i, p in enumerate(self.params) if id(p) in still]}

    # where the parameters are -----------------------------------------------------------------------------------------

    def _differing(self) -> Iterator[tuple[StateBucket, FrozenAdam]]:
        """The buckets that differ between ranks, and how their parameters have come from the anchor."""
        for bucket, group in self.grouped_buckets():
            if group["local_steps"]:
                steps, lr_sum, decay, betas, eps = (
                    group[f"local_{name}"] for name in ("steps", "lr_sum", "decay", "betas", "eps")
                )
                interval = Interval(steps, lr_sum, decay, 1.0, betas, eps)
                moving = bucket.numbers["interval_step"].nonzero().flatten().tolist()
                yield bucket, moves(bucket, group, interval, moving)

    def synchronize_replicas(self) -> None:
        """A round in full precision, out of turn. The next one comes when it would have."""
        differing = [(bucket, update) for bucket, update in self._differing() if bucket.feedback is not None]
        means = [bucket.buffers["mean_momentum"].clone() for bucket, _ in differing]
        where = "synchronisation between rounds"
        replicas.average_exactly(self.topology, [bucket for bucket, _ in differing], means, where)
        for (bucket, update), mean in zip(differing, means):
            ops.zero_inactive_(mean, active_mask(bucket))
            place(bucket, update, mean)
            with keeping(bucket["exp_avg"], absent_runs(bucket, _still(bucket))):
                bucket["exp_avg"].copy_(mean)
            bucket.buffers["mean_momentum"].zero_()
        self._end_interval(self.param_groups)
        self._weigh_residuals(self.param_groups)  # the interval to the next round is shorter now
        self._check_next = True  # among the local steps that count no longer may have been one at which to compare

    def _end_interval(self, groups: list[dict[str, Any]]) -> None:
        for group in groups:
            group.update(local_steps=0, local_lr_sum=0.0, local_decay=1.0)
        ended = {id(group) for group in groups}
        for bucket, group in self.grouped_buckets():
            if id(group) in ended:
                bucket.numbers["interval_step"].zero_()

    def prepare(self, entries: Entries, origin: Origin | None) -> Entries:
        """Drops what ranks have gathered since the last round, where nobody knows whose momenta these are: the
        parameters are at the anchor then."""
        entries = super().prepare(entries, origin)
        differ = {id(p) for group in self.param_groups if group["local_steps"] for p in group["params"]}
        lost = bool(differ) and (origin is None or origin[0] == MIXED)
        if differ and not self.owns(origin):
            nothing = "the local steps since the last round count as steps without a gradient"
            consequence = nothing if lost else "every rank continues from where that one was"
            loading.report_not_own(self, origin, "its momenta between two rounds", consequence)
        if lost:
            return {p: {k: v for k, v in e.items() if k != "mean_momentum"} for p, e in entries.items()}
        # where there are no rounds to come, what local steps have gathered is the momentum; plain steps gather nothing
        alone = {id(p) for bucket in self.buckets if bucket.feedback is None for p in bucket.params} & differ
        gathered = {p: e for p, e in entries.items() if id(p) in alone and e.get("interval_step", 0) > 0}
        momenta = {p: e["mean_momentum"] for p, e in gathered.items() if "mean_momentum" in e}
        return {p: {**e, "exp_avg": momenta[p]} if p in momenta else e for p, e in entries.items()}

    def loaded(self, entries: Entries, origin: Origin | None) -> None:
        """Puts the parameters where the state says they are, between two rounds."""
        super().loaded(entries, origin)
        for bucket, update in self._differing():
            place(bucket, update, bucket["mean_momentum"])
            if bucket.feedback is None:
                bucket["mean_momentum"].zero_()
                bucket.numbers["interval_step"].zero_()
        if self.topology.nodes == 1:
            self._end_interval(self.param_groups)


def _waiting(bucket: StateBucket, group: dict[str, Any]) -> list[Tensor]:
    """The parameters of ``bucket`` for which ``group`` goes on with refreshes at every step."""
    missed, refreshes = bucket.numbers["missed_at"].tolist(), bucket.numbers["variance_step"].tolist()
    waits = [p for p, at, k in zip(bucket.params, missed, refreshes) if at and not k and group["step"] < 2 * at]
    return waits + (settling.rarely_updated(bucket) if schedule.is_end_of_first(group, group["step"]) else [])


def _still(bucket: StateBucket) -> list[int]:
    """Indices of the parameters that do not move between two rounds: frozen when the first local step began, or without
    a variance. Known once that step has; the same on all ranks."""
    return [i for i, steps in enumerate(bucket.numbers["interval_step"].tolist()) if steps == 0]
