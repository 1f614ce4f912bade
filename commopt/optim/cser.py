"""CSER: SGD with compressed updates, whose error is kept in the local model and reset (Xie et al., arXiv 2007.13221).

Read first: tests/oracle_cser.py, the same on plain lists of floats.

Error feedback keeps what compression loses for later; at high compression it comes too late. CSER gives it to the local
model at once. The models of the ranks differ by that, and every H steps they are brought together again, in part:

    PSync(v_i, C):            q_i = C(v_i);   r_i = v_i - q_i;   v'_i = mean_i q_i + r_i;   returns v'_i, r_i

    every step:               m_i = b m_i + g_i;   p_i = lr m_i,  or lr (g_i + b m_i) with Nesterov
                              p'_i, r_i = PSync(p_i, C2);   x_i = x_i - p'_i;   e_i = e_i - r_i
    at each H-th step, then:  e'_i, e_new = PSync(e_i, C1);   x_i = x_i - e_i + e'_i;   e_i = e_new

g_i is the gradient of rank i at its own x_i (plus weight decay times x_i, as in ``torch.optim.SGD``), m_i its own too.
x_i - e_i is the same on all ranks, and the mean of x_i moves by the mean of p_i, whatever C1 and C2 lose.

Where this differs from the paper:

* With blocks chosen at random (:class:`commopt.compress.RandomBlocks`) for C1 and C2 there is no e: the kept blocks of
  p_i are averaged at each step, and the kept blocks of x_i at a reset, which is the same (the paper's implementation
  II). Both are sent together: the mean of x_i after the update is that of x_i - p_i, as PSync keeps means.
* With other compressors the anchor a = x_i - e_i is stored instead of e_i. It moves by what is received and nothing
  else, so it is the same on all ranks to the bit, whatever the arithmetic of x_i loses (bfloat16 too): no drift. What
  e_i will be after the update, x_i - r_i - a, is known before the others' q_i: both syncs of a reset go out together.
* The mean of what other compressors send is exact: every rank gathers every q_i, (W - 1) rows of bytes, and nothing is
  compressed a second time on its way back.
* The paper's released code averages models in every step, instead of updates. This is the paper's Algorithm 2.
* One rank alone is plain SGD. A parameter that has no gradient on any rank gets no update: its momentum stays, and it
  is in no scale of C2. But it takes part in resets, which are about x_i.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from commopt.agreement import checks
from commopt.agreement.decision import StepReport
from commopt.comm import Backend, PSync, Replicas, Work, psync
from commopt.compress import Compressor, Identity, RandomBlocks
from commopt.optim.cser_error import UPDATE, ImplicitError, StoredAnchor
from commopt.optim.masks import absent_runs, without
from commopt.optim.rules import scaled_gradient, sgd_
from commopt.state import loading, replicas
from commopt.state.guard import Guard
from commopt.state.host import square_norm
from commopt.state.loading import OWN
from commopt.state.own import Origin
from commopt.state.own_tensor import OwnTensor
from commopt.state.saving import PARAMETER, Entries
from commopt.state.split import MERGED
from commopt.state.state_bucket import StateBucket
from commopt.step.base import CommOptimizer
from commopt.step.in_flight import StepContext
from commopt.step.torch_options import OF_SGD

logger = logging.getLogger("commopt")

AnyCompressor = Compressor | RandomBlocks


class CSER(CommOptimizer):
    """SGD that averages a part of each update, and a part of the difference between the models every ``period`` steps.

    ::

        optimizer = commopt.CSER(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)  # was torch.optim.SGD(...)
        with optimizer.averaged():
            evaluate(model); save(model)

    Parameters differ from rank to rank. :meth:`averaged` lends their mean, for evaluation and saving;
    :meth:`synchronize` makes it every rank's. With blocks of ratio R2 for C2 and R1 for C1, a step costs
    32 (1/R2 + 1/(H R1)) bits a parameter one way; with another compressor a rank sends W - 1 rows of it.

    Other methods are settings of it:

    ====================  ==================  ================  ======
    method                compressor (C2)     reset_compressor  period
    ====================  ==================  ================  ======
    synchronous SGD       RandomBlocks(1)     any               any
    local SGD             None                RandomBlocks(1)   H
    CSER-PL               None                any               H
    CSEA                  None                any               1
    ====================  ==================  ================  ======

    Where residuals are kept apart instead, :class:`commopt.QSparseLocalSGD` has QSparse-local-SGD and EF-SGD.

    State per parameter and rank, of its size in float32 (float64 for float64 parameters): momentum_buffer 1 with
    ``momentum``; anchor 1 unless both compressors are RandomBlocks, Identity or None; nothing else. For the duration of
    a step each bucket takes 2 more of its size (3 with an anchor); with ``overlap=True`` all buckets do at once.

    Args:
        params: parameters, (name, parameter) pairs, or parameter groups; float64, float32, bfloat16 or float16.
        lr: learning rate, >= 0; a float or a tensor of one element, read at each step.
        momentum: b, in [0, 1).
        nesterov: Nesterov's momentum instead of the heavy ball; with momentum > 0 only.
        weight_decay: added to the gradient times the parameter, >= 0, as in ``torch.optim.SGD``.
        maximize: go up instead of down.
        period: H, an int >= 1: errors are reset at each H-th step.
        compressor: C2, which part of each update is averaged: RandomBlocks, any Compressor, or None for nothing.
        reset_compressor: C1, which part of the errors is averaged at a reset; RandomBlocks or any Compressor.
        max_grad_norm: clip each rank's gradients to this norm, > 0, or None. The norm is N = sqrt(mean_i ||g_i||^2),
            one number on all ranks. Not with ``overlap=True``.
        bucket_mb, overlap, guard, reduction, process_group, backend: as for :class:`commopt.optim.CommOptimizer`. Not
            on nodes of several ranks.
        torch_options: ``foreach`` and ``fused``; ``dampening=0`` and ``differentiable=False``: as
            :class:`torch.optim.SGD` has them, and without effect.

    Raises:
        ValueError: on every rank, for an argument out of range on any of them, if ranks differ in parameters or
            settings, and for nodes of several ranks.
    """

    hyperparams_used_in_backward = ("lr", "momentum", "nesterov", "weight_decay", "maximize", "period")
    known_options = OF_SGD
    step_counters = ("step",)
    ever_rank_local: tuple[str, ...] = (PARAMETER, "momentum_buffer")
    rank_local_buffers: tuple[str, ...] = ("momentum_buffer",)
    """Flat buffers of which every rank has its own."""
    compressor: Any
    _SETTINGS = (*CommOptimizer._SETTINGS, "reset_compressor")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        *,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        maximize: bool = False,
        period: int = 16,
        compressor: AnyCompressor | None = RandomBlocks(64),  # noqa: B008  it is frozen
        reset_compressor: AnyCompressor = RandomBlocks(4),  # noqa: B008
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
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "period": period,
            "last_sync_step": 0,  # after which all ranks had the same parameters
            "anchor_step": 0,  # after which these were the anchor, but for their rounding
            "ranks": 0,  # that have had a momentum of their own
        }
        self.reset_compressor = reset_compressor
        updates: Any = RandomBlocks(math.inf) if compressor is None else compressor
        super().__init__(
            params,
            defaults,
            compressor=updates,
            max_grad_norm=max_grad_norm,
            bucket_mb=bucket_mb,
            overlap=overlap,
            guard=guard,
            reduction=reduction,
            process_group=process_group,
            backend=backend,
            torch_options=torch_options,
        )

    knows_nodes = False

    name_of_reset = "reset_compressor"
    """Argument that gives what a reset sends by, for errors."""

    def check_settings(self) -> None:
        checks.check_partial("compressor", self.compressor)
        checks.check_partial(self.name_of_reset, self.reset_compressor)
        if isinstance(self.reset_compressor, RandomBlocks) and math.isinf(self.reset_compressor.ratio):
            raise ValueError(f"{self.name_of_reset} must keep something, got {self.reset_compressor}")
        checks.check_common(self.max_grad_norm, self.bucket_mb, self.overlap)
        checks.check_reduction(self.reduction)

    def check_replicas(self, replicas: Replicas) -> None:
        if replicas.intra_node.world_size > 1:
            raise ValueError(
                f"{type(self).__name__} does not know nodes of several ranks, got nodes of "
                f"{replicas.intra_node.world_size}: give it a process group, or a mesh"
            )

    def check_group(self, group: dict[str, Any]) -> None:
        checks.check_lr(group["lr"])
        checks.check_within("momentum", group["momentum"], 0, 1)
        checks.check_bool("nesterov", group["nesterov"])
        if group["nesterov"] and group["momentum"] == 0:
            raise ValueError("nesterov=True needs momentum > 0, got momentum=0")
        checks.check_at_least("weight_decay", group["weight_decay"], 0)
        checks.check_bool("maximize", group["maximize"])
        checks.check_period(group["period"])

    # state ------------------------------------------------------------------------------------------------------------

    @property
    def anchored(self) -> bool:
        """True if x_i - e_i is stored, because it cannot be found again from x_i."""
        many = (
            self.topology.copies > 1 or self.topology.is_sharded
        )  # one replica today may be several when it is loaded
        return many and not (_shared(self.compressor) and _shared(self.reset_compressor))

    def init_messages(self, bucket: StateBucket, capacity: int) -> None:
        """Nothing is left behind but in the model."""

    def init_bucket(self, bucket: StateBucket) -> None:
        if self.group_of()[id(bucket.params[0])]["momentum"] != 0:
            bucket.buffers["momentum_buffer"] = bucket.zeros()
        if self.anchored:
            bucket.buffers["anchor"] = bucket.pack_params()

    def own_tensors(self, bucket: StateBucket, group: dict[str, Any]) -> list[dict[str, OwnTensor]]:
        if bucket.world_size == 1 and "anchor" in bucket.buffers:
            bucket.pack_params_(bucket["anchor"])
        return super().own_tensors(bucket, group)

    @torch.no_grad()
    def adopt_values(self) -> None:
        for bucket, group in self.grouped_buckets():
            self._adopt(bucket, group)

    def _adopt(self, bucket: StateBucket, group: dict[str, Any]) -> None:
        """Takes over parameters that somebody has changed, as by loading a model, where they were at the anchor."""
        if bucket.world_size == 1 or "anchor" not in bucket.buffers:
            return
        if group["anchor_step"] == group["step"] and bucket.adopt("anchor"):
            self._check_next = True  # the ranks may have loaded other ones

    def before_agreement(self, report: StepReport) -> None:
        """Takes over in anchors what was loaded since the last step, whatever gradients this rank brings: only all
        ranks together know that a step is skipped, and their anchors may be compared before."""
        if report.error is None:
            for bucket, group in list(self.grouped_buckets())[self.step_in_flight().started :]:
                self._adopt(bucket, group)

    def _momentum(self, bucket: StateBucket) -> Tensor:
        """The momentum of a bucket; zeros, if it has had none so far."""
        if "momentum_buffer" not in bucket.buffers:
            bucket.buffers["momentum_buffer"] = bucket.zeros()
            for p, entry in zip(bucket.params, bucket.state()):
                self.state[p]["momentum_buffer"] = entry["momentum_buffer"]
        return bucket["momentum_buffer"]

    def rank_local(self, group: dict[str, Any]) -> tuple[str, ...]:
        return (PARAMETER, *self.rank_local_buffers) if self.replicas_differ else self.rank_local_buffers

    def check_loaded(self, given: dict[str, Any]) -> None:
        super().check_loaded(given)
        own = given.get("residuals")
        apart = [i for i, entry in own["state"].items() if PARAMETER in entry] if own and own["rank"] != MERGED else []
        apart += [i for i, entry in given["state"].items() if _is_apart(entry)]
        if self.anchored and any(given["state"].get(i, {}).get("anchor") is None for i in apart):
            raise ValueError(
                "the loaded state has no anchor, so what the models of the ranks have in common is not known: it was "
                "saved with RandomBlocks for both compressors. Load it with such, call synchronize(), and save again"
            )

    def prepare(self, entries: Entries, origin: Origin | None) -> Entries:
        for bucket, group in self.grouped_buckets():
            if group["momentum"] != 0:
                self._momentum(bucket)
        return super().prepare(entries, origin)

    def loaded(self, entries: Entries, origin: Origin | None) -> None:
        super().loaded(entries, origin)
        own = [bucket[name] for bucket in self.buckets for name in self.rank_local_buffers if name in bucket.buffers]
        ranks = max((group["ranks"] for group in self.param_groups), default=0)
        if not self.owns(origin) and (self.replicas_differ or (ranks > 1 and any(t.any() for t in own))):
            loading.report_not_own(self, origin, "its parameters and momentum", "parameters stay as they are")
        for bucket in self.buckets:
            anchors = bucket.tensors("anchor") if "anchor" in bucket.buffers else []
            for p, x, anchor in zip(bucket.params, bucket.values, anchors):
                if "anchor" not in entries.get(p, {}):  # of an optimizer that had none, its models are in one place
                    anchor.copy_(x.detach())

    # the mean model ---------------------------------------------------------------------------------------------------

    @property
    def replicas_differ(self) -> bool:
        many = self.topology.copies > 1
        return many and any(group["step"] != group.get("last_sync_step", 0) for group in self.param_groups)

    def synchronize_replicas(self) -> None:
        """x_i <- mean_i x_i, in full precision: all ranks have the same model then, and no error."""
        replicas.take_mean(self.topology, self.buckets)
        for bucket in self.buckets:
            if "anchor" in bucket.buffers:
                bucket.pack_params_(bucket.buffers["anchor"])
        for group in self.param_groups:
            group["last_sync_step"] = group["anchor_step"] = group["step"]

    def resets_all(self) -> bool:
        """True if a reset leaves all ranks with the same parameters."""
        return _keeps_all(self.reset_compressor)

    def check_step(self) -> None:
        for group in self.param_groups:
            checks.check_period(group["period"])

    def after_step(self) -> None:
        """Takes down where all ranks have the same parameters."""
        copies = self.topology.copies
        alone = copies == 1
        for group in self.param_groups:
            group["ranks"] = copies
            together = _keeps_all(self.compressor) and group["last_sync_step"] == group["step"] - 1
            if alone or (group["step"] % group["period"] == 0 and self.resets_all()):
                group["last_sync_step"] = group["anchor_step"] = group["step"]
            elif together:
                group["last_sync_step"] = group["step"]

    # the step ---------------------------------------------------------------------------------------------------------

    def phase_of(self, group: dict[str, Any]) -> str:
        """ "plain" on one rank, else "compressed"."""
        return "plain" if self.topology.copies == 1 else "compressed"

    def wants_average(self, group: dict[str, Any]) -> bool:
        return False

    def touches_absent(self, group: dict[str, Any]) -> bool:
        return True  # it may owe them an error

    def bucket_step(self, bucket: StateBucket, group: dict[str, Any], ctx: StepContext) -> Iterator[Work]:
        if bucket.world_size == 1:
            yield ctx.barrier
            self._plain_step(bucket, group, ctx)
            return
        if ctx.step.agreement.decision is None:  # in backward
            self._adopt(bucket, group)
        absent = [slice(*run) for run in absent_runs(bucket, ctx.absent(bucket))]
        resets = (group["step"] + 1) % group["period"] == 0
        p, m = self._update(bucket, group, ctx.scale, absent)  # m_i is not stored yet

        def start(what: int, v: Tensor) -> PSync:
            how = self.compressor if what == UPDATE else self.reset_compressor
            return self._psync(v, how, what, bucket, group, ctx, absent if what == UPDATE else ())

        error = self.error_of(bucket)
        update, reset = error.start(p, start, resets)  # PSync(p_i, C2);  PSync(e_i, C1)
        for sync in (update, reset) if reset is not None else (update,):
            yield from sync.works
            ctx.confirmed.note(sync.is_sound())
        yield ctx.barrier
        yield ctx.confirmed
        if m is not None:
            bucket["momentum_buffer"][: bucket.numel].copy_(m)
        bucket.increment(("step",), ctx.moving(bucket))
        mean = update.mean()
        for at in absent:
            mean[at] = 0
        x = bucket.pack_params()
        error.apply(x[: bucket.numel], mean, update, reset)  # x_i = x_i - p'_i;  x_i = x_i - e_i + e'_i
        bucket.unpack_params(x)

    def error_of(self, bucket: StateBucket) -> ImplicitError | StoredAnchor:
        """Keeper of the error of a bucket."""
        return StoredAnchor(bucket) if self.anchored else ImplicitError(bucket)

    def _psync(
        self,
        v: Tensor,
        how: AnyCompressor,
        what: int,
        bucket: StateBucket,
        group: dict[str, Any],
        ctx: StepContext,
        absent: Sequence[slice],
    ) -> PSync:
        """Starts to average the part of ``v`` that ``how`` keeps at this step; what is ``absent`` is in no scale.
        Numbers that are sent as they are, and no numbers, go as blocks."""
        if isinstance(how, Identity) or not v.numel():
            how = RandomBlocks(1)
        if not isinstance(how, RandomBlocks):
            if not absent:
                return psync(v, how, ctx.send.world)
            all_active = torch.full((-(-v.numel() // 8),), 0xFF, dtype=torch.uint8, device=v.device)
            return psync(v, how, ctx.send.world, without(all_active, [(at.start, at.stop) for at in absent]))
        index = next(i for i, other in enumerate(self.buckets) if other is bucket)
        return psync(v, how.choose(v.numel(), group["step"], 2 * index + what, v.device), ctx.send.world)

    def _update(
        self, bucket: StateBucket, group: dict[str, Any], scale: float, absent: list[slice]
    ) -> tuple[Tensor, Tensor | None]:
        """p_i, and m_i if there is momentum; (n,) each, new tensors."""
        n, beta = bucket.numel, group["momentum"]
        update = bucket.pack_gradients(scale)[:n]
        if group["weight_decay"] != 0:
            update.add_(bucket.pack_params()[:n], alpha=group["weight_decay"])
        momentum = None
        if beta != 0:
            before = self._momentum(bucket)[:n]
            momentum = (before * beta).add_(update)
            for at in absent:
                momentum[at] = before[at]
            update = update.add_(momentum, alpha=beta) if group["nesterov"] else momentum.clone()
        for at in absent:
            update[at] = 0
        return update.mul_(float(group["lr"])), momentum

    def _plain_step(self, bucket: StateBucket, group: dict[str, Any], ctx: StepContext) -> None:
        moving = ctx.moving(bucket)
        bucket.increment(("step",), moving)
        values = bucket.values
        params = [values[i] for i in moving]
        grads = [scaled_gradient(values[i], bucket.gradient(i), bucket.dtype, ctx.scale) for i in moving]
        momenta = []
        if group["momentum"] != 0:
            self._momentum(bucket)
            momenta = bucket.tensors("momentum_buffer", moving)
        sgd_(params, grads, momenta, group)

    def _norms(self) -> tuple[float, float]:
        """2-norms of e_i, where it is kept (else 0), and of the momentum."""
        errors = []
        for bucket in self.buckets:
            if "anchor" in bucket.buffers and bucket.world_size > 1:
                errors.append(bucket.pack_params().sub_(bucket.buffers["anchor"]))
        momenta = [b.buffers["momentum_buffer"] for b in self.buckets if "momentum_buffer" in b.buffers]
        return square_norm(errors) ** 0.5, square_norm(momenta) ** 0.5


def _is_apart(entry: Any) -> bool:
    """True if ``entry``, the loaded state of a parameter, has a value of it for each replica."""
    own = entry.get(OWN + PARAMETER) if isinstance(entry, Mapping) else None
    return isinstance(own, OwnTensor) and own.apart


def _keeps_all(how: AnyCompressor) -> bool:
    """True if nothing is left out, so that what was averaged is the same on all ranks."""
    return isinstance(how, Identity) or (isinstance(how, RandomBlocks) and how.ratio == 1)


def _shared(how: AnyCompressor) -> bool:
    """True if all ranks keep the same elements, so that nothing has to be stored."""
    return isinstance(how, (RandomBlocks, Identity))
