"""SparseLoCo: local steps, and the largest elements of what they come to (Sarfi et al., arXiv 2508.15706, Algorithm 1).

Read first: tests/oracle_sparse_loco.py, the same on plain lists of floats.

    x_r <- x;   period local steps of the base on x_r;   D_r = x - x_r
    e_r <- b e_r + D_r
    s_r = C(e_r);   e_r <- e_r - s_r          C keeps the k largest elements of each chunk, at 2 bits a value
    x <- x - a mean_r s_r

There is no outer momentum: what an error buffer e_r has not sent yet is one, and b lets it decay.

Every rank gathers the messages s_r of all, so nothing is compressed a second time. That is W - 1 rows sent, and as many
received, by each of W ranks; two compressed ways, as of ``DiLoCo(outer_momentum=0, compressor=TopK())``, are 2 (W-1)/W.
So the bytes grow with the ranks: from about 16 on, where a network is bound by bytes and not by latency, those of two
ways, which are 8 times fewer then, are worth what the second selection loses.

Where this differs from the paper, and from the code with which its authors have trained Covenant-72B (Templar):

* C is any compressor. Chunks are runs of a bucket, in which parameters lie end to end, and not tiles of a matrix, and
  are of 256 elements by default (:mod:`commopt.compress.top_k`). Their ``TopK(64, 4096)`` is one of ours, too.
* The mean is over all ranks, as in the paper, where Templar's is over the contributors: the ranks that have sent the
  element. Where ranks choose other elements that is the sum, a step up to W times as long, of what one rank alone has
  found: so it is not the default, but ``mean_over="contributors"``.
* ``clip_to_median=True`` is Templar's, the paper has none: s_r of a tensor is made no longer than the median of the
  ranks' (of those that have sent something of it; of two in the middle, the lower). e_r is not told.
* One rank alone sends nothing, and so compresses nothing: x <- x - a D.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from commopt.agreement import checks
from commopt.comm import Backend
from commopt.compress import Compressor, TopK
from commopt.outer.base import OuterOptimizer
from commopt.outer.gathered import GatheredMeans, Over
from commopt.outer.means import Entry, Means
from commopt.outer.members import Members
from commopt.outer.rounds import Round
from commopt.outer.streaming import Streaming
from commopt.state.guard import Guard
from commopt.state.state_bucket import StateBucket


class SparseLoCo(OuterOptimizer):
    """A base optimizer, and every ``period`` steps the mean of the largest elements of the ranks' error buffers.

    ::

        optimizer = commopt.SparseLoCo(model.parameters(), torch.optim.AdamW, lr=4e-4, weight_decay=0.1, period=30)

    A round costs 0.16 bits a parameter and other rank, sent, and as many received: they grow with the ranks.

    Memory per rank beyond the base's, in float32 per parameter: 1 (anchor), 2 + 1/W more (error buffer, twice: the old
    one lasts until the synchronisation is complete); 1 in all with ``compressor=None``. During a synchronisation 1
    more, and of a bucket 3 more.

    Args:
        params: parameters, (name, parameter) pairs or parameter groups; or a base optimizer.
        base: class of the base optimizer; None is torch.optim.AdamW.
        period: local steps between two synchronisations, >= 1. The paper has 15 to 100.
        outer_lr: a, >= 0.
        error_decay: b, in [0, 1]: what is left of the error buffer at each synchronisation, before the pseudo-gradient
            is added. 1 is plain error feedback.
        mean_over: "ranks" (the paper) divides the sum of what was sent of an element by the number of ranks;
            "contributors" by that of the ranks that have sent it, which makes steps up to as many times longer.
        clip_to_median: whether what a rank has sent of a tensor is scaled down to the median, over the ranks, of its
            2-norm, of an even number the lower of the two in the middle: against a rank that is far off. Costs one
            more small message a bucket.
        compressor: C; None is full precision, which leaves nothing in the error buffer.
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
        ValueError: on every rank, for an argument out of range on any of them, for ``mean_over`` or ``clip_to_median``
            without a compressor, for a base that communicates, or if ranks differ in parameters or settings.
    """

    _SETTINGS = (*OuterOptimizer._SETTINGS, "mean_over", "clip_to_median")

    def __init__(
        self,
        params: Any,
        base: Callable[..., torch.optim.Optimizer] | None = None,
        *,
        period: int = 30,
        outer_lr: float = 1.0,
        error_decay: float = 0.95,
        mean_over: Over = "ranks",
        clip_to_median: bool = False,
        compressor: Compressor | None = TopK(),  # noqa: B008  it is frozen
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
        self.mean_over, self.clip_to_median = mean_over, clip_to_median
        outer = {"outer_lr": outer_lr, "error_decay": error_decay}
        super().__init__(
            params, base, base_args, outer, period=period, compressor=compressor, max_grad_norm=max_grad_norm,
            bucket_mb=bucket_mb, guard=guard, streaming=streaming, state_period=state_period, reduction=reduction,
            process_group=process_group, backend=backend, members=members,
        )  # fmt: skip

    def own_settings(self) -> dict[str, Any]:
        if self.mean_over not in ("ranks", "contributors"):
            raise ValueError(f"mean_over must be 'ranks' or 'contributors', got {self.mean_over!r}")
        checks.check_bool("clip_to_median", self.clip_to_median)
        if self.compressor is None and (self.mean_over != "ranks" or self.clip_to_median):
            raise ValueError(
                f"mean_over={self.mean_over!r}, clip_to_median={self.clip_to_median} need each rank's own message, "
                "which compressor=None does not send; with it they must be 'ranks' and False"
            )
        if self.members is not None and (self.mean_over != "ranks" or self.clip_to_median):
            raise ValueError(
                f"mean_over={self.mean_over!r}, clip_to_median={self.clip_to_median} do not fit members=, which "
                "weights each rank's message, and leaves out those too large; with it they must be 'ranks' and False"
            )
        return {"mean_over": self.mean_over, "clip_to_median": self.clip_to_median}

    def check_group(self, group: dict[str, Any]) -> None:
        checks.check_at_least("outer_lr", group["outer_lr"], 0)
        decay = group["error_decay"]
        if not checks.is_number(decay) or not 0 <= decay <= 1:
            raise ValueError(f"error_decay must be a number in [0, 1], got {decay!r}")

    def init_messages(self, bucket: StateBucket, capacity: int) -> None:
        if self.compressor is not None:
            bucket.add_residuals(double_buffered=True, serves=False)

    def means_of(self, entries: Sequence[Entry], flats: list[Tensor]) -> Means:
        if self.compressor is None:
            return super().means_of(entries, flats)
        return GatheredMeans(entries, flats, self.compressor, self.mean_over, self.clip_to_median)

    def outer_step(self, bucket: StateBucket, group: dict[str, Any], pseudo_gradient: Tensor, ctx: Round) -> None:
        bucket.buffers["anchor"].sub_(pseudo_gradient, alpha=group["outer_lr"])

    def fold_residual_into(self, p: Tensor, residual: Tensor) -> None:
        super().fold_residual_into(p, residual * self.group_of()[id(p)]["outer_lr"])
