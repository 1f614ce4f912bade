"""1-bit Adam: Adam whose momentum travels as signs (Tang et al., arXiv 2102.02888, Algorithm 1).

Read first: tests/oracle.py, the same on plain lists of floats.

Adam is not linear in the gradient, because of its variance v. So v is learnt first, with plain Adam on averaged
gradients; once it has settled it is frozen, and what is left, momentum SGD with a fixed scale per coordinate, is
linear. There compression with error feedback works: what one step loses, the next one sends.

    warm-up, t <= T_w:        g = mean_i g_i;   m = b1 m + (1-b1) g;   v = b2 v + (1-b2) g^2
    compressed, t > T_w:      m_i = b1 m + (1-b1) g_i;   m = compressed_mean_of(m_i);   v = max(v at T_w, c mean(v))
    both:                     x = x (1 - lr wd) - lr / (1-b1^t) * m / (sqrt(v / (1-b2^min(t, T_w))) + eps)

Weight decay that is coupled, as Adam's own, is a part of the gradient instead: g + wd x, and g_i + wd x.

Where this differs from the paper and its usual implementation:

* Bias correction as in ``torch.optim.Adam``, so that warm-up equals it. The step counter of b2 stops with v: if it
  ran on, the step size would grow by 1 / sqrt(1 - b2^T_w) after the switch.
* Scales by block instead of one for the whole buffer (``Sign(block=None)`` is the nearest to the paper), and with that
  masks: coordinates with v = 0 at the switch never had a gradient. Signs would move them by lr * scale / eps; here they
  are found, and their momentum, residual and update stay 0.
* A parameter without a gradient on any rank is left alone, as in torch: its momentum and residuals stay, to the bit,
  and it is in no scale, as if it were not there. The paper's b1 m + (1-b1) 0 would lose momentum without moving it.
* A variance that is 0 everywhere at the switch means that a parameter, or the model, never moves again: that is
  reported. ``"auto"`` does not freeze a variance of 0.
* ``freeze_step="auto"`` looks at the variance tensor by tensor (:mod:`commopt.optim.settling`), where the paper
  compares ||v||_1 of the whole model over 1 / (1-b2) steps. A variance that was frozen too early moves again
  (:mod:`commopt.optim.thaw`).
* Elements of v that are not 0 stand as c = 0.01 of the mean in their block, at least (:mod:`commopt.optim.floor`):
  others would be moved by thousands of lr. c = 0 is the paper's.
* One rank alone, or one node (:class:`commopt.comm.NodesBackend`), is plain Adam for the whole run.
* With nodes of several ranks a "worker" of the algorithm is a node: its ranks average their gradients in full
  precision, each compresses a part of the momentum, and what comes back is shared in the node, still as bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from torch import Tensor

from commopt.agreement import checks
from commopt.comm import Backend, Work
from commopt.compress import Compressor
from commopt.optim import floor
from commopt.optim.exchange import compressed_mean_of, frozen_adam, local_momentum
from commopt.optim.rules import adam_
from commopt.optim.warmup import WarmupOptimizer, warmup_defaults
from commopt.state.guard import Guard
from commopt.state.state_bucket import StateBucket
from commopt.step.in_flight import StepContext


class OneBitAdam(WarmupOptimizer):
    """Adam (AdamW with ``weight_decay``) that sends one bit per parameter once its variance has settled.

    ::

        optimizer = commopt.OneBitAdam(model.parameters(), lr=1e-3)  # was torch.optim.Adam(...)

    Give it a bare module: it does all communication itself, in ``step()``. A DistributedDataParallel around it is found
    by the first step, or connected before by :func:`commopt.attach`. All ranks must call ``step()`` equally often.

    State per parameter and rank: exp_avg, exp_avg_sq, one residual of the same size and 1/W of one, in float32 (float64
    for float64 parameters); residuals only with more than one rank. With nodes of L ranks the residuals are 1/L and
    1/W of its size.

    Args:
        params: parameters, (name, parameter) pairs, or parameter groups; float64, float32, bfloat16 or float16.
        lr: learning rate, >= 0; a float or a 0-d tensor, read at each step.
        betas: decay of exp_avg and exp_avg_sq, each in [0, 1).
        eps: added to the square root, >= 0.
        weight_decay: wd, >= 0; see ``decoupled_weight_decay``.
        maximize: go up instead of down.
        decoupled_weight_decay: whether the decay is AdamW's, x (1 - lr wd), or Adam's, a part of each rank's gradient,
            g_i + wd x.
        bias_correction: whether m and v are divided by 1 - b1^t and 1 - b2^t, as Adam's are; the published code of
            1-bit Adam never does.
        freeze_step: steps of warm-up T_w, an int >= 1; or "auto", when all ranks agree that the variance has settled:
            the number then replaces "auto" in the group.
        thaw: whether a variance that was frozen too early moves again (:mod:`commopt.optim.thaw`): "auto" if
            freeze_step was "auto", "always", or "never". A warning says that it was, in any case.
        min_variance: c in [0, 1): of the mean of its block, what an element's variance stands as at least, unless it
            is 0 (:mod:`commopt.optim.floor`). 0 is the paper's, and loses runs.
        compressor: what is sent in the compressed phase; ``Sign()`` if None.
        warmup_compressor: what the gradients of the warm-up are sent by, with error feedback, such as ``Int8()``; None
            for full precision, as in the paper.
        max_grad_norm: clip to this norm, > 0, or None. The norm is N = sqrt(mean_i ||g_i||^2), where ||g_i||
            is the 2-norm over all parameters of the gradient on rank i: one number, the same on all ranks and in both
            phases. It is not below the norm of the averaged gradient (which nobody knows in the compressed phase), and
            equals it if all g_i are equal.
        bucket_mb: MB (2**20 bytes) of float32 per bucket, > 0; None for an 8th of the group, 1 to 25 (GPU: to 100). A
            bucket costs one collective per step in warm-up and two in the compressed phase; there, a tensor larger
            than this goes in pieces, two collectives for each.
        overlap: send while backward runs: a bucket starts when its gradients are there. The parameters are the same to
            the bit. Costs both residuals once more, and excludes what needs all gradients first: ``max_grad_norm``,
            a GradScaler, editing gradients. Accumulation goes in :meth:`no_sync`.
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
        freeze_step: int | Literal["auto"] = "auto",
        thaw: Literal["auto", "always", "never"] = "auto",
        min_variance: float = floor.LEAST,
        compressor: Compressor | None = None,
        warmup_compressor: Compressor | None = None,
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
            **warmup_defaults(freeze_step, thaw, min_variance),
        }
        super().__init__(
            params,
            defaults,
            compressor=compressor,
            warmup_compressor=warmup_compressor,
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
        checks.check_freeze_step(group["freeze_step"])
        checks.check_thaw(group["thaw"])
        checks.check_min_variance(group["min_variance"])

    def report_phase(self, phase: str, groups: list[dict[str, Any]]) -> None:
        super().report_phase(phase, groups)
        if phase == "compressed":
            floor.report_outsized(self, groups)

    def init_bucket(self, bucket: StateBucket) -> None:
        bucket.buffers["exp_avg"] = bucket.zeros()
        bucket.buffers["exp_avg_sq"] = bucket.zeros()

    def warmup(self, bucket: StateBucket, group: dict[str, Any], ctx: StepContext) -> Iterator[Work]:
        """Adam on the mean gradient."""
        g = yield from self.mean_gradients(bucket, group, ctx)  # g = mean_i g_i
        x, m, v, counts = bucket.operands(self.increment(bucket, group, ctx, variance_moves=True))
        adam_(x, g, m, v, counts, group)

    def compressed(self, bucket: StateBucket, group: dict[str, Any], ctx: StepContext) -> Iterator[Work]:
        """Momentum SGD with a fixed scale per coordinate."""
        m, v = bucket["exp_avg"], bucket["exp_avg_sq"]
        m_i = yield from local_momentum(bucket, m, group, ctx)  # m_i = b1 m + (1-b1) g_i
        mean = yield from compressed_mean_of(m_i, bucket, self.compressor, ctx)  # 1 bit, both ways
        floor.raise_in_blocks(bucket, group, self.compressor)  # v = max(v, c mean of its block), once
        moving = self.increment(bucket, group, ctx, variance_moves=False)
        mean.into(m, frozen_adam(bucket, v, moving, group))  # m = mean_i m_i;  x = x - lr m / (sqrt(v) + eps)
