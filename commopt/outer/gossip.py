"""Gossip on a ring: each rank averages with its two neighbours, in full precision or by compressed differences.

D-PSGD (Lian et al., arXiv 1705.09056) and DCD-PSGD (Tang et al., arXiv 1803.06443), as BAGUA has them (Gan et al.,
arXiv 2107.01499: decentralised full and low precision). Read first: tests/oracle_gossip.py, both on plain lists.

    period local steps of the base:  y_r -> x_r;         N(r): r and its neighbours, n(r) of them; 3 from 3 ranks on

    full precision     y_r <- mean of x_j over N(r)

    low precision      z_r = x_r - y_r + (mean of y_j over N(r)) - y_r        r has replicas of its neighbours' y_j
                       q_r = C(z_r), sent to both neighbours
                       y_r <- y_r + q_r;   r adds q_j to its replica of y_j, for both neighbours j
    x_r <- y_r

A replica is y_j to the bit, as both add up the same decoded bytes. What C loses of z_r is lost, so C must be fine. What
low precision averages are the anchors before the local steps, as in the papers: full precision is a round ahead of it.

Where this differs from the papers and from BAGUA:

* Steps of any base, as many as ``period`` says; theirs is one step of SGD.
* Of two ranks each is the other's only neighbour and counts once, 1/2, where BAGUA's ring counts it twice, 2/3.
* Full precision averages what is there after the local steps, as BAGUA does; D-PSGD what was there before its step.
* C is any compressor, by rows of a bucket; BAGUA's is 8 bits between the minimum and the maximum of a bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from commopt.comm import Backend, ExchangingBackend, Pipeline, Replicas, Work
from commopt.compress import Compressor
from commopt.optim.masks import padding_mask
from commopt.outer.gossiping import GossipOptimizer
from commopt.outer.rounds import Round
from commopt.outer.streaming import Streaming
from commopt.state.guard import Guard
from commopt.state.replicas import reaching_others
from commopt.state.state_bucket import StateBucket


class Gossip(GossipOptimizer):
    """A base optimizer whose parameters are averaged with those of two neighbours on a ring every ``period`` steps.

    ::

        optimizer = commopt.Gossip(model.parameters(), torch.optim.AdamW, lr=4e-4, period=4)
        optimizer = commopt.Gossip(model.parameters(), lr=4e-4, compressor=commopt.compress.Int8())

    A round sends 64 bits a parameter, 32 to each neighbour, and 16.5 with ``Int8()``, and receives as many, of
    however many ranks W. Averaging brings ranks closer by (1 + 2 cos(2 pi / W)) / 3 a round at worst, which is next to
    nothing for many: W^2 / 19 rounds for half the distance. Replicas are never equal, unless ``synchronize()`` makes
    them: evaluate and save the mean model, ``with optimizer.averaged(model):``.

    Memory per rank beyond the base's, in float32 per parameter: 1 (anchor), with a compressor 3 (and its neighbours').
    During a synchronisation 3 more, with a compressor 2.

    Args:
        params: parameters, (name, parameter) pairs or parameter groups; or a base optimizer.
        base: class of the base optimizer; None is torch.optim.AdamW.
        period: local steps between two exchanges, >= 1.
        compressor: C, what low precision sends, such as ``Int8()``. It has no error feedback: what is lost of a
            difference is lost, and coarse ones (``Sign()``, ``TopK()``) do not hold the ranks together. None is full
            precision.
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

    def __init__(
        self,
        params: Any,
        base: Callable[..., torch.optim.Optimizer] | None = None,
        *,
        period: int = 1,
        compressor: Compressor | None = None,
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
        super().__init__(
            params, base, base_args, {"last_sync_round": 0}, period=period, compressor=compressor,
            max_grad_norm=max_grad_norm, bucket_mb=bucket_mb, guard=guard, streaming=streaming,
            state_period=state_period, reduction=reduction, process_group=process_group, backend=backend,
        )  # fmt: skip

    def _restart(self) -> None:
        super()._restart()
        self._arrived: dict[int, list[Tensor]] = {}  # of each bucket, by its id: payloads of the neighbours

    def init_messages(self, bucket: StateBucket, capacity: int) -> None:
        """No residuals: what is lost is lost."""

    def init_bucket(self, bucket: StateBucket) -> None:
        super().init_bucket(bucket)
        if self.compressor is not None:
            bucket.neighbours = [bucket.buffers["anchor"].clone() for _ in ring(bucket.replicas)]

    def loaded(self, entries: Any, origin: Any) -> None:
        super().loaded(entries, origin)
        self._moved = self._loaded_anchors = True  # what the neighbours have loaded is not known here

    def anchors_moved(self, device: torch.device, where: str) -> None:
        """Brings the replicas of the neighbours up to date, in full precision."""
        with reaching_others(self.topology, where):
            pipeline = Pipeline()
            for bucket in self.buckets:
                if bucket.neighbours:
                    task = swap(bucket.replicas.world, bucket.buffers["anchor"], bucket.neighbours)
                    pipeline.start(task, f"{where}, anchors of the neighbours ({bucket.describe()})")
            pipeline.finish()
        self._loaded_anchors = False

    def before_sending_again(self) -> None:
        self.anchors_moved(self.control_device(self.params), f"{type(self).__name__}, fragments that are sent again")
        self._moved = False

    def partners(self, bucket: StateBucket) -> list[int]:
        return [src for _, src in ring(bucket.replicas)]

    def exchange(self, bucket: StateBucket, flat: Tensor, ranks: ExchangingBackend) -> Iterator[Work]:
        sides = len(ring(bucket.replicas))
        if self.compressor is None:
            others = [torch.empty_like(flat) for _ in range(sides)]
            yield from swap(ranks, flat, others)
            for x in others:
                flat.add_(x)
            flat.div_(1 + sides)  # the mean of x over N(r)
            return
        y = bucket.buffers["anchor"]
        mean = torch.clone(y)
        for replica in bucket.neighbours:
            mean.add_(replica)
        z = flat.add_(mean.div_(1 + sides)).sub_(y, alpha=2)
        q = torch.empty(1, self.compressor.nbytes(z.numel(), z.dtype), dtype=torch.uint8, device=z.device)
        self.compressor.compress(z.view(1, -1), q)
        arrived = [torch.empty_like(q) for _ in range(sides)]
        yield from swap(ranks, q, arrived)
        self._arrived[id(bucket)] = arrived
        self._decode(bucket, q, flat)

    def outer_step(self, bucket: StateBucket, group: dict[str, Any], pseudo_gradient: Tensor, ctx: Round) -> None:
        y = bucket.buffers["anchor"]
        if bucket.world_size == 1 and (self.streaming is None or self.streaming.waits):
            for p, mine in zip(bucket.values, bucket.views(y)):  # anchor - (anchor - x) is x but for rounding
                mine.copy_(p)
        elif self.compressor is None or bucket.world_size == 1:
            y.copy_(pseudo_gradient)
        else:
            y.add_(pseudo_gradient)  # y_r = y_r + q_r
            for replica, q in zip(bucket.neighbours, self._arrived.pop(id(bucket))):
                self._decode(bucket, q, pseudo_gradient)
                replica.add_(pseudo_gradient)  # y_j = y_j + q_j

    def _decode(self, bucket: StateBucket, payload: Tensor, out: Tensor) -> None:
        assert self.compressor is not None
        self.compressor.decompress_active(payload, out.view(1, -1), padding_mask(bucket).view(1, -1))


def ring(ranks: Backend | Replicas) -> list[tuple[int, int]]:
    """To whom this rank sends, and from whom it receives, at each of its sides: to the right what comes from the left,
    and the other way. One side for two ranks; none for one."""
    left, right = (ranks.rank - 1) % ranks.world_size, (ranks.rank + 1) % ranks.world_size
    return [(right, left), (left, right)][: ranks.world_size - 1]


def swap(ranks: ExchangingBackend, message: Tensor, out: list[Tensor]) -> Iterator[Work]:
    """Task that sends ``message`` to the neighbours, and writes what comes from each to ``out``, in the order of
    :func:`ring`."""
    works = [ranks.exchange(into, message, dst, src) for into, (dst, src) in zip(out, ring(ranks))]
    yield from works
