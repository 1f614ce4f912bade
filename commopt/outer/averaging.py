"""Local SGD: local steps and plain averaging (Stich, arXiv 1805.09767); with AdamW inside, local AdamW.

Read first: tests/oracle_outer.py, the same on plain lists of floats.

    x_i <- x;   period local steps of the base on x_i;   x <- mean_i x_i

Where this differs from the paper: the mean is taken of the pseudo-gradients x - x_i, in float32, and x is kept in
float32, so that bfloat16 parameters lose nothing in the averaging and what is sent may be compressed; this costs one
copy of the parameters. One rank alone is the base optimizer, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from commopt.comm import Backend
from commopt.compress import Compressor
from commopt.outer.base import OuterOptimizer
from commopt.outer.members import Members
from commopt.outer.rounds import Round
from commopt.outer.streaming import Streaming
from commopt.state.guard import Guard
from commopt.state.state_bucket import StateBucket


class LocalSGD(OuterOptimizer):
    """A base optimizer whose parameters are averaged over the ranks every ``period`` steps.

    ::

        optimizer = commopt.LocalSGD(model.parameters(), torch.optim.AdamW, lr=1e-3, period=16)
        optimizer = commopt.LocalSGD(torch.optim.AdamW(model.parameters(), lr=1e-3), period=16)

    Memory per rank beyond the base's, in float32 per parameter: 1 (anchor); with a compressor 2 + 2/W more (residuals,
    each twice: the old one lasts until the synchronisation is complete). During a synchronisation 1 more.

    Args:
        params: parameters, (name, parameter) pairs or parameter groups; or a base optimizer.
        base: class of the base optimizer; None is torch.optim.AdamW.
        period: local steps between two synchronisations, >= 1.
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
        ValueError: on every rank, for an argument out of range on any of them, for a base that communicates, or if
            ranks differ in parameters or settings.
    """

    def __init__(
        self,
        params: Any,
        base: Callable[..., torch.optim.Optimizer] | None = None,
        *,
        period: int = 16,
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
        super().__init__(
            params, base, base_args, {}, period=period, compressor=compressor, max_grad_norm=max_grad_norm,
            bucket_mb=bucket_mb, guard=guard, streaming=streaming, state_period=state_period, reduction=reduction,
            process_group=process_group, backend=backend, members=members,
        )  # fmt: skip

    def outer_step(self, bucket: StateBucket, group: dict[str, Any], pseudo_gradient: Tensor, ctx: Round) -> None:
        x = bucket.buffers["anchor"]
        if self.topology.copies > 1 or (self.streaming is not None and not self.streaming.waits):
            x.sub_(pseudo_gradient)
            return
        for p, mine in zip(bucket.values, bucket.views(x)):  # x - (x - x_i) is x_i but for rounding
            mine.copy_(p)
