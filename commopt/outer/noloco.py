"""NoLoCo: local steps, and an outer step with one other rank at a time (Kolehmainen et al., arXiv 2506.10911).

Read first: tests/oracle_gossip.py, the same on plain lists of floats.

    x_r <- y_r;   period local steps of the base on x_r          y_r, m_r: the anchor and momentum of rank r
    in each round the ranks are paired at random, anew; with the means over the pair of r
    m_r <- u m_r + a mean(x - y) + a (mean(y) - y_r);   y_r <- y_r + m_r

The first mean is that of the pseudo-gradients, as in DiLoCo; the second term pulls the two anchors together. As one
factor a is before both, their sum is a (mean(x) - y_r), so it is enough to exchange x: half of what the paper sends.

Where this differs from the paper, and from its authors' code (gensyn-ai/noloco):

* The paper lets the pull have a factor of its own, g, with u < g < sqrt(2 + u^2) for pairs; their code has a for both,
  as has this: with u = 0.5 and a = 0.7 that holds.
* Of an odd number of ranks one is paired with itself in each round, which is an outer step on its own progress. So is
  every step of one rank alone.
* Pairs are drawn by the number of the round and a seed, and so need no message.
* The routing of a pipeline's micro-batches, which the paper has as well, is none of an optimizer's business.
* The ranks agree on each round, in 80 bytes a rank, which the paper does without: see :mod:`commopt.outer.gossiping`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from commopt.agreement import checks
from commopt.comm import Backend, ExchangingBackend, Work
from commopt.outer.gossiping import GossipOptimizer
from commopt.outer.rounds import Round
from commopt.outer.streaming import Streaming
from commopt.state.guard import Guard
from commopt.state.state_bucket import StateBucket


class NoLoCo(GossipOptimizer):
    """A base optimizer, and every ``period`` steps an outer step with one other rank, drawn at random.

    ::

        optimizer = commopt.NoLoCo(model.parameters(), torch.optim.AdamW, lr=4e-4, weight_decay=0.1, period=50)

    A round sends 32 bits a parameter and receives as many, whatever the number of ranks. Replicas are never equal,
    unless ``synchronize()`` makes them: evaluate and save the mean model, ``with optimizer.averaged(model):``.

    Memory per rank beyond the base's, in float32 per parameter: 2 (anchor, momentum). During a synchronisation 2 more.

    Args:
        params: parameters, (name, parameter) pairs or parameter groups; or a base optimizer.
        base: class of the base optimizer; None is torch.optim.AdamW.
        period: local steps between two exchanges, >= 1.
        outer_lr: a, >= 0.
        outer_momentum: u, in [0, 1).
        seed: of the pairs, an int; the same on all ranks.
        max_grad_norm: clip this rank's gradient to this norm in each local step, or None.
        bucket_mb: MB (2**20 bytes) of float32 per bucket, > 0; None for an 8th of the group, 1 to 25 (GPU: to 100).
        guard: when a run that has gone wrong ends; :class:`commopt.Guard` if None. No digests are compared.
        streaming: sends the parameters in fragments, while training goes on (:class:`commopt.Streaming`), merged as
            "corrected" or "mix"; while one is in flight, what was sent of it takes 2 of the memory. None: all at the
            end of a round.
        state_period: names tensors of the base's state that are averaged over all ranks, in full precision, and at
            every how many rounds (:mod:`commopt.outer.base_state`). That is an all-reduce. None: never.
        reduction: "mean" if a step goes by the mean of the ranks' gradients, as losses that are means need; "sum" if by
            their sum, as where each rank divides its loss by what all ranks have.
        process_group: a ProcessGroup; or a DeviceMesh: replicas are over its dimensions that a parameter's own mesh
            lacks (:mod:`commopt.comm.mesh`), one at most. None is the mesh that sharded parameters are on a slice of,
            or else the default process group, or one rank where there is none.
        backend: a :class:`commopt.comm.ExchangingBackend` instead.
        base_args: arguments of the class ``base``, such as lr.

    Raises:
        ValueError: on every rank, for an argument out of range on any of them, for a base that communicates, for a
            backend that has no ``exchange`` or has nodes of several ranks, or if ranks differ in parameters or
            settings.
    """

    momentum = True
    _SETTINGS = (*GossipOptimizer._SETTINGS, "seed")

    def __init__(
        self,
        params: Any,
        base: Callable[..., torch.optim.Optimizer] | None = None,
        *,
        period: int = 50,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.5,
        seed: int = 0,
        max_grad_norm: float | None = None,
        bucket_mb: float | None = None,
        guard: Guard | None = None,
        streaming: Streaming | None = None,
        state_period: Mapping[str, int] | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        process_group: Any = None,
        backend: Backend | None = None,
        **base_args: Any,
    ) -> None:
        self.seed = seed
        outer = {"outer_lr": outer_lr, "outer_momentum": outer_momentum, "last_sync_round": 0}
        super().__init__(
            params, base, base_args, outer, period=period, max_grad_norm=max_grad_norm, bucket_mb=bucket_mb,
            guard=guard, streaming=streaming, state_period=state_period, reduction=reduction,
            process_group=process_group, backend=backend,
        )  # fmt: skip

    def own_settings(self) -> dict[str, Any]:
        checks.check_int("seed", self.seed)
        return {**super().own_settings(), "seed": self.seed}

    def check_group(self, group: dict[str, Any]) -> None:
        checks.check_outer(group)

    def _partner(self, bucket: StateBucket) -> int:
        ranks = bucket.replicas
        return pairing(self.seed, self.draw_of(bucket), ranks.world_size)[ranks.rank]

    def partners(self, bucket: StateBucket) -> list[int]:
        partner = self._partner(bucket)
        return [] if partner == bucket.replicas.rank else [partner]

    def exchange(self, bucket: StateBucket, flat: Tensor, ranks: ExchangingBackend) -> Iterator[Work]:
        partner, theirs = self._partner(bucket), torch.empty_like(flat)
        yield ranks.exchange(theirs, flat, partner, partner)
        flat.add_(theirs).div_(2)  # mean(x)

    def outer_step(self, bucket: StateBucket, group: dict[str, Any], pseudo_gradient: Tensor, ctx: Round) -> None:
        y, m, x = bucket.buffers["anchor"], bucket.buffers["outer_momentum"], pseudo_gradient
        m.mul_(group["outer_momentum"]).add_(x.sub_(y), alpha=group["outer_lr"])  # m = u m + a (mean(x) - y)
        y.add_(m)


def pairing(seed: int, number: int, world_size: int) -> list[int]:
    """The partner of each rank in the round ``number``, by rank: its own number for the one that is left over where
    ``world_size`` is odd. Every pairing is as probable as any other."""
    order = list(range(world_size))
    random.Random(f"{seed} {number}").shuffle(order)
    partner = list(range(world_size))
    for a, b in zip(order[::2], order[1::2]):
        partner[a], partner[b] = b, a
    return partner
