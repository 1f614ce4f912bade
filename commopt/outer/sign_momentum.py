"""Distributed sign momentum with local steps (Yu et al., arXiv 2411.17866, Algorithm 1).

Read first: tests/oracle_outer.py, the same on plain lists of floats.

    x_i <- x;   period local steps of the base on x_i;   D = mean_i (x - x_i) / lr
    u = b1 m + (1-b1) D
    x <- x - a lr (sign(u) + wd x)
    m <- b2 m + (1-b2) D

With one rank, SGD inside and a period of 1 it is Lion. The randomised sign of the paper's analysis is
``sign=RandomSign()``, or ``RandomSignOrZero()``.

Where this differs from the paper:

* lr is the mean of the base's learning rate over the round's steps (the paper has one lr a round, then it is that): the
  last one alone would give D the wrong size while lr changes. If it is 0, D is undefined, and 0/0 in m would stay for
  ever: then x <- x - mean_i (x - x_i), which is x if lr = 0 moves nothing, and m stays.
* The bound of the randomised sign is by default the largest element of u in each parameter; the paper has one constant
  for all, which nobody knows. Elements of u that are 0 stay 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from commopt.agreement import checks
from commopt.comm import Backend
from commopt.compress import Compressor
from commopt.outer.base import OuterOptimizer
from commopt.outer.members import Members
from commopt.outer.rounds import Round
from commopt.outer.signs import ExactSign, SignRule
from commopt.outer.streaming import Streaming
from commopt.state.guard import Guard
from commopt.state.state_bucket import StateBucket


class SignMomentum(OuterOptimizer):
    """A base optimizer with a sign-momentum step along the mean pseudo-gradient every ``period`` steps.

    ::

        optimizer = commopt.SignMomentum(model.parameters(), torch.optim.AdamW, lr=5e-4, weight_decay=0.1, period=12)

    Each element moves by outer_lr * lr at a synchronisation, whatever the period and the size of the gradients.

    Memory per rank beyond the base's, in float32 per parameter: 2 (anchor, momentum); with a compressor 2 + 2/W more
    (residuals, each twice: the old one lasts until the synchronisation is complete). During a synchronisation 1 more,
    and of a bucket 2 more.

    Args:
        params: parameters, (name, parameter) pairs or parameter groups; or a base optimizer.
        base: class of the base optimizer; None is torch.optim.AdamW. Its groups have an ``lr``.
        period: local steps between two synchronisations, >= 1.
        outer_lr: a, >= 0.
        outer_betas: b1 and b2, each in [0, 1).
        outer_weight_decay: wd, >= 0; times outer_lr * lr, on every parameter of the group. The base's own weight decay
            is another one.
        sign: ``ExactSign()`` if None; :class:`RandomSign` or :class:`RandomSignOrZero`, the same on all ranks.
        compressor: sends the pseudo-gradients compressed, with error feedback; None is full precision.
        max_grad_norm: clip this rank's gradient to this norm in each local step, or None.
        bucket_mb: MB (2**20 bytes) of float32 per bucket, > 0; None for an 8th of the group, 1 to 25 (GPU: to 100).
        guard: when a run that has gone wrong ends; :class:`commopt.Guard` if None.
        streaming: sends the parameters in fragments, while training goes on (:class:`commopt.Streaming`); while one is
            in flight, what was sent of it takes 2 of the memory. None: all at the end of a round.
        state_period: names tensors of the base's state that are averaged, too, in full precision, and at every how many
            synchronisations: DES-LOC (:mod:`commopt.outer.base_state`) advises ``{"exp_avg": 3, "exp_avg_sq": 6}`` for
            Adam. For that while each takes 1 more of the memory. None: the state stays with its rank.
        reduction: "mean" if a step goes by the mean of the ranks' gradients, as losses that are means need; "sum" if by
            their sum, as where each rank divides its loss by what all ranks have.
        process_group: a ProcessGroup; or a DeviceMesh: averages are over its dimensions that a parameter's own mesh
            lacks (:mod:`commopt.comm.mesh`). None is the mesh that sharded parameters are on a slice of, or else the
            default process group, or one rank where there is none.
        backend: a :class:`commopt.comm.Backend` instead.
        members: :class:`commopt.Members` instead: ranks that may come and go between two rounds.
        base_args: arguments of the class ``base``, such as lr.

    Raises:
        ValueError: on every rank, for an argument out of range on any of them, for a base that communicates or has no
            lr, or if ranks differ in parameters or settings.
    """

    momentum = True
    uses_lr = True
    _SETTINGS = (*OuterOptimizer._SETTINGS, "sign")

    def __init__(
        self,
        params: Any,
        base: Callable[..., torch.optim.Optimizer] | None = None,
        *,
        period: int = 12,
        outer_lr: float = 1.0,
        outer_betas: tuple[float, float] = (0.95, 0.98),
        outer_weight_decay: float = 0.1,
        sign: SignRule | None = None,
        compressor: Compressor | None = None,
        max_grad_norm: float | None = None,
        bucket_mb: float | None = None,
        guard: Guard | None = None,
        streaming: Streaming | None = None,
        state_period: Mapping[str, int] | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        process_group: Any = None,
        backend: Backend | None = None,
        members: Members | None = None,
        **base_args: Any,
    ) -> None:
        self.sign = ExactSign() if sign is None else sign
        outer = {"outer_lr": outer_lr, "outer_betas": outer_betas, "outer_weight_decay": outer_weight_decay}
        super().__init__(
            params, base, base_args, outer, period=period, compressor=compressor, max_grad_norm=max_grad_norm,
            bucket_mb=bucket_mb, guard=guard, streaming=streaming, state_period=state_period, reduction=reduction,
            process_group=process_group, backend=backend, members=members,
        )  # fmt: skip

    def own_settings(self) -> dict[str, Any]:
        if not isinstance(self.sign, SignRule):
            raise ValueError(f"sign must be a commopt.outer.SignRule such as ExactSign(), got {self.sign!r}")
        return {"sign": self.sign}

    def check_group(self, group: dict[str, Any]) -> None:
        checks.check_at_least("outer_lr", group["outer_lr"], 0)
        checks.check_betas(group["outer_betas"], "outer_betas")
        checks.check_at_least("outer_weight_decay", group["outer_weight_decay"], 0)

    def outer_step(self, bucket: StateBucket, group: dict[str, Any], pseudo_gradient: Tensor, ctx: Round) -> None:
        x, m = bucket.buffers["anchor"], bucket.buffers["outer_momentum"]
        if ctx.lr == 0:
            x.sub_(pseudo_gradient)
            return
        (b1, b2), step = group["outer_betas"], group["outer_lr"] * ctx.lr
        d = pseudo_gradient.div_(ctx.lr)
        u = m.mul(b1).add_(d, alpha=1 - b1)
        x.mul_(1 - step * group["outer_weight_decay"])
        for mine, direction, start in zip(bucket.views(x), bucket.views(u), ctx.positions):
            mine.sub_(self.sign.of(direction, ctx.number, start), alpha=step)
        m.mul_(b2).add_(d, alpha=1 - b2)
