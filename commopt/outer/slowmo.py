"""SlowMo: slow momentum on top of local steps (Wang, Tantia, Ballas, Rabbat, arXiv 1910.00643, Algorithm 1).

Read first: tests/oracle_outer.py, the same on plain lists of floats.

    x_i <- x;   period local steps of the base on x_i;   D = mean_i (x - x_i)
    u <- b u + D / lr
    x <- x - a lr u

Where this differs from the paper: lr is the mean of the base's learning rate over the round's steps (the paper has one
lr a round, then it is that). If that is 0, D is what remains: x <- x - D, and u stays. The base's own state stays with
its rank (the paper's choice "maintain"), or is averaged as ``state_period`` says ("average" is 1 for all of it).
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
from commopt.outer.streaming import Streaming
from commopt.state.guard import Guard
from commopt.state.state_bucket import StateBucket


class SlowMo(OuterOptimizer):
    """A base optimizer with a momentum step along the mean pseudo-gradient every ``period`` steps.

    ::

        optimizer = commopt.SlowMo(model.parameters(), torch.optim.SGD, lr=0.1, period=12, outer_momentum=0.5)

    Memory per rank beyond the base's, in float32 per parameter: 2 (anchor, momentum); with a compressor 2 + 2/W more
    (residuals, each twice: the old one lasts until the synchronisation is complete). During a synchronisation 1 more.

    Args:
        params: parameters, (name, parameter) pairs or parameter groups; or a base optimizer.
        base: class of the base optimizer; None is torch.optim.AdamW. Its groups have an ``lr``.
        period: local steps between two synchronisations, >= 1.
        outer_lr: a, >= 0.
        outer_momentum: b, in [0, 1). More ranks want more: 0.2 for 4, 0.5 for 8, 0.6 for 16 is advised.
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

    def __init__(
        self,
        params: Any,
        base: Callable[..., torch.optim.Optimizer] | None = None,
        *,
        period: int = 12,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.5,
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
        outer = {"outer_lr": outer_lr, "outer_momentum": outer_momentum}
        super().__init__(
            params, base, base_args, outer, period=period, compressor=compressor, max_grad_norm=max_grad_norm,
            bucket_mb=bucket_mb, guard=guard, streaming=streaming, state_period=state_period, reduction=reduction,
            process_group=process_group, backend=backend, members=members,
        )  # fmt: skip

    def check_group(self, group: dict[str, Any]) -> None:
        checks.check_outer(group)

    def outer_step(self, bucket: StateBucket, group: dict[str, Any], pseudo_gradient: Tensor, ctx: Round) -> None:
        x, u = bucket.buffers["anchor"], bucket.buffers["outer_momentum"]
        if ctx.lr == 0:
            x.sub_(pseudo_gradient)
            return
        u.mul_(group["outer_momentum"]).add_(pseudo_gradient.div_(ctx.lr))
        x.sub_(u, alpha=group["outer_lr"] * ctx.lr)
