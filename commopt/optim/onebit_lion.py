"""1-bit Lion: Lion (Chen et al., arXiv 2302.06675, Algorithm 2) whose c travels as signs, with error feedback.

Read first: tests/oracle_lion.py, the same on plain lists of floats.

Lion has no variance, so nothing has to be learnt before it may stand still: one bit an element from the first step on.

    c_i = b1 m + (1-b1) g_i
    c   = compressed_mean_of(c_i)                           1 bit, both ways, residuals on both
    m   = b2 m + (1-b2) g,    where (1-b1) g = c - b1 m     which is m + (1-b2) / (1-b1) (c - m)
    x   = x (1 - lr wd) - lr sign(c)

What is published sends something else. Distributed Lion (arXiv 2404.00438) has a momentum of each worker's own, and the
majority of sign(c_i): what a vote loses is lost for ever, and the workers that are in the minority by much count as
those that are by little. Lion Cub (arXiv 2411.16462) finds that to be what costs convergence, and sends c_i in a few
bits, scaled, with the momenta averaged now and then. Here the mean of c_i is sent and what one step loses the next one
sends, as in 1-bit Adam (arXiv 2102.02888); and because both c and m are linear in the gradient, c is all that m needs,
so m is the same on every rank. So it is Lion on the mean gradient, if nothing is lost in compression.

Where this differs from the papers:

* beta1 <= beta2, as everywhere in Lion's paper: m then is a running mean of c. With beta1 > beta2 it would go beyond c,
  and what compression loses would grow from step to step.
* Elements whose gradient is always 0 while others of their block have one move back and forth by lr: a bit is never 0.
  Compressors that have a 0 (``Int4()``, ``TopK()``) leave them where they are.
* A parameter without a gradient on any rank is left alone, as in torch: its momentum and residuals stay, to the bit,
  and it is in no scale.
* One rank alone, or one node (:class:`commopt.comm.NodesBackend`), is plain Lion. What is left of residuals when a run
  goes on there goes into m, as it would have by c.
* With nodes of several ranks i is a node: its ranks average their gradients in full precision, each compresses a part
  of c, and what comes back is shared in the node, still as bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from commopt.agreement import checks
from commopt.comm import Backend, Work
from commopt.compress import Compressor
from commopt.optim.exchange import averaged_gradients, compressed_mean_of, local_momentum
from commopt.optim.rules import sign_step_
from commopt.sharding import local
from commopt.state.guard import Guard
from commopt.state.state_bucket import StateBucket
from commopt.step.base import CommOptimizer
from commopt.step.in_flight import StepContext
from commopt.step.torch_options import OF_LION


class OneBitLion(CommOptimizer):
    """Lion that sends one bit per parameter, from the first step on.

    ::

        optimizer = commopt.OneBitLion(model.parameters(), lr=1e-4, weight_decay=1.0)

    Lion wants a learning rate 3 to 10 times smaller than AdamW's, and a weight decay larger by as much. With one bit,
    elements that are small in their block move by less than lr on average: try several times Lion's.

    Give it a bare module: it does all communication itself, in ``step()``. A DistributedDataParallel around it is found
    by the first step, or connected before by :func:`commopt.attach`. All ranks must call ``step()`` equally often.

    State per parameter and rank: exp_avg, one residual of the same size and 1/W of one, in float32 (float64 for float64
    parameters); residuals only with more than one rank. With nodes of L ranks the residuals are 1/L and 1/W of its
    size.

    Args:
        params: parameters, (name, parameter) pairs, or parameter groups; float64, float32, bfloat16 or float16.
        lr: learning rate, >= 0; a float or a 0-d tensor, read at each step.
        betas: b1 of what is sent and b2 of the momentum, 0 <= b1 <= b2 < 1.
        weight_decay: decoupled, times lr, >= 0.
        maximize: go up instead of down.
        compressor: what is sent; ``Sign()`` if None.
        max_grad_norm: clip to this norm, > 0, or None. The norm is N = sqrt(mean_i ||g_i||^2), where ||g_i||
            is the 2-norm over all parameters of the gradient on rank i: one number, the same on all ranks.
        bucket_mb: MB (2**20 bytes) of float32 per bucket, > 0; None for an 8th of the group, 1 to 25 (GPU: to 100). A
            bucket costs two collectives per step; a tensor larger than this goes in pieces, two collectives for each.
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
        torch_options: ``foreach`` and ``fused``, without effect.

    Raises:
        ValueError: on every rank, for an argument out of range on any of them, or if ranks differ in parameters or
            settings.
    """

    step_counters = ("step", "compressed_step")
    hyperparams_used_in_backward = ("betas", "maximize")
    known_options = OF_LION

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        compressor: Compressor | None = None,
        max_grad_norm: float | None = None,
        bucket_mb: float | None = None,
        overlap: bool = False,
        guard: Guard | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        process_group: Any = None,
        backend: Backend | None = None,
        **torch_options: Any,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(
            params, defaults, compressor=compressor, max_grad_norm=max_grad_norm, bucket_mb=bucket_mb,
            overlap=overlap, guard=guard, reduction=reduction, process_group=process_group, backend=backend,
            torch_options=torch_options,
        )  # fmt: skip

    def check_group(self, group: dict[str, Any]) -> None:
        checks.check_lr(group["lr"])
        checks.check_betas(group["betas"])
        if group["betas"][0] > group["betas"][1]:
            raise ValueError(f"betas must be b1 <= b2 for a momentum that compression can follow, got {group['betas']}")
        checks.check_at_least("weight_decay", group["weight_decay"], 0)
        checks.check_bool("maximize", group["maximize"])

    def init_bucket(self, bucket: StateBucket) -> None:
        bucket.buffers["exp_avg"] = bucket.zeros()

    def phase_of(self, group: dict[str, Any]) -> str:
        """ "plain" on one node, else "compressed"."""
        return "plain" if self.topology.nodes == 1 else "compressed"

    def bucket_step(self, bucket: StateBucket, group: dict[str, Any], ctx: StepContext) -> Iterator[Work]:
        step = self.plain if bucket.feedback is None else self.compressed
        return step(bucket, group, ctx)

    def plain(self, bucket: StateBucket, group: dict[str, Any], ctx: StepContext) -> Iterator[Work]:
        """Lion on the mean gradient."""
        b1, b2 = group["betas"]
        g = yield from averaged_gradients(bucket, ctx)  # g = mean_i g_i, in full precision
        x, m = self.moving(bucket, ctx, "step")
        if not x:
            return
        c = list(torch._foreach_mul(m, b1))
        torch._foreach_add_(c, g, alpha=1 - b1)  # c = b1 m + (1-b1) g
        torch._foreach_mul_(m, b2)
        torch._foreach_add_(m, g, alpha=1 - b2)  # m = b2 m + (1-b2) g
        sign_step_(x, c, group)  # x = x (1 - lr wd) - lr sign(c)

    def compressed(self, bucket: StateBucket, group: dict[str, Any], ctx: StepContext) -> Iterator[Work]:
        """The same with c in place of g, which is all that is known of it."""
        b1, b2 = group["betas"]
        c_i = yield from local_momentum(bucket, bucket["exp_avg"], group, ctx)  # c_i = b1 m + (1-b1) g_i
        mean = yield from compressed_mean_of(c_i, bucket, self.compressor, ctx)  # 1 bit, both ways
        x, m = self.moving(bucket, ctx, "step", "compressed_step")
        if not x:
            return
        c = bucket.views(mean.values(), ctx.moving(bucket))  # c = mean_i c_i
        torch._foreach_lerp_(m, c, (1 - b2) / (1 - b1))  # m = m + (1-b2) / (1-b1) (c - m)
        sign_step_(x, c, group)  # x = x (1 - lr wd) - lr sign(c)

    def moving(self, bucket: StateBucket, ctx: StepContext, *counters: str) -> tuple[list[Tensor], list[Tensor]]:
        """x and m of the parameters that move, whose ``counters`` count this step."""
        moving, values = ctx.moving(bucket), bucket.values
        bucket.increment(counters, moving)
        return [values[i] for i in moving], bucket.tensors("exp_avg", moving)

    def residual_expected(self, p: Tensor) -> bool:
        return bool(self.state[p]["compressed_step"] > 0)

    def fold_residual_into(self, p: Tensor, residual: Tensor) -> None:
        b1, b2 = self.group_of()[id(p)]["betas"]
        local(self.state[p]["exp_avg"]).add_(residual, alpha=(1 - b2) / (1 - b1))
