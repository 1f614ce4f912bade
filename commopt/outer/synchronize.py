"""The end of a round: all ranks agree, average how far they have come, and take the outer step together."""

from __future__ import annotations

import logging
import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from commopt.comm import Pipeline, confirm, wait
from commopt.optim.agreement import is_usable
from commopt.optim.diagnostics import worth_a_line
from commopt.optim.guard import NotFinite, describe_difference, tell_not_finite
from commopt.optim.packed import StateBucket
from commopt.optim.rules import square_norm
from commopt.optim.setup import equalize
from commopt.outer.agreement import Standing, Verdict, exchange, judge
from commopt.outer.mean import mean_way
from commopt.outer.saving import SavedOuter

logger = logging.getLogger("commopt")


@dataclass(frozen=True)
class Round:
    """What an outer step knows of the round that has ended.

    Attributes:
        number: of the round, from 0.
        lr: the mean learning rate of the group over the round's local steps; 0 if its base has none.
        positions: where each parameter of the bucket starts in the model, in elements.
    """

    number: int
    lr: float
    positions: list[int]


class SynchronizedOuter(SavedOuter):
    """Synchronisations. Says nothing about local steps."""

    _reported_equal: bool
    _square: float
    _moved: bool
    _check_next: bool
    _skipped_in_a_row: int

    def outer_step(self, bucket: StateBucket, group: dict[str, Any], way: Tensor, now: Round) -> None:
        """Moves ``bucket.buffers["anchor"]``.

        Args:
            bucket: its flat buffers, of ``padded`` elements; what lies behind ``numel`` is 0 and stays 0.
            group: of its parameters.
            way: D, the mean over the ranks of anchor - x_i, like the anchor; may be overwritten.
            now: the round.
        """
        raise NotImplementedError

    def follow(self) -> None:
        """Follows what was done to parameters, and to the base behind our back."""
        if self.param_groups is not self.base.param_groups:  # somebody has loaded the base
            self.adopt_groups(self.param_groups)
        for bucket in self.buckets:
            bucket.check_shapes()
        self.follow_parameters()

    @property
    def replicas_differ(self) -> bool:
        return self.topology.world_size > 1 and self.param_groups[0]["round_step"] > 0

    def synchronize_replicas(self) -> None:
        """Ends the round now. If some rank's parameters are inf or NaN, all skip that, and replicas stay apart."""
        self.follow()
        self.end_round(None)

    def begin_round(self) -> None:
        """Takes over parameters that were changed since the last synchronisation, such as those of a model that was
        loaded after the optimizer was made. An anchor that rounds to its parameter stays."""
        for bucket in self.buckets:
            anchors = bucket.views(bucket.buffers["anchor"])
            changed = torch.stack([(x.to(p.dtype) != p).any() for p, x in zip(bucket.params, anchors)])
            if changed.any():
                self._moved = True
                for p, x, new in zip(bucket.params, anchors, changed.tolist()):
                    if new:
                        x.copy_(p)

    def end_round(self, error: Exception | None) -> None:
        """Nothing that lasts changes before all collectives are done, but for anchors that differed; then everything
        does."""
        where = f"{type(self).__name__}, synchronisation {self.param_groups[0]['rounds'] + 1}"
        standing, what = self._standing(error), f"{where}, agreement of the ranks"
        device = self.control_device([p for bucket in self.buckets for p in bucket.params])
        with self.reaching_others(what):
            table = exchange(self.topology.world, device, standing, what)
        verdict = judge(table, standing, what)
        if verdict.broken:
            self._skip(verdict)
            return
        self._skipped_in_a_row = 0
        self._report_equal_gradients(verdict)
        with self.reaching_others(where):
            if verdict.moved:
                self._equalize_anchors(device)
        if verdict.checks:
            self._compare_replicas(device, where)
        with self.reaching_others(where):
            ways = self._mean_ways(where)
        if self.topology.world_size > 1:
            finite = square_norm(ways) < float("inf")
            confirm(self.topology.world, finite, where)
        groups, positions, squares = self.group_of(), self._positions(), dict[int, float]()
        for bucket, way in zip(self.buckets, ways):
            group = groups[id(bucket.params[0])]
            now = Round(
                group["rounds"], group["round_lr"] / group["round_step"], [positions[id(p)] for p in bucket.params]
            )
            if bucket.feedback is not None:
                bucket.feedback.commit()
                squares[id(group)] = squares.get(id(group), 0.0) + square_norm([way])
            self.outer_step(bucket, group, way, now)
            for p, x in zip(bucket.params, bucket.views(bucket.buffers["anchor"])):
                p.copy_(x)
        for group in self.param_groups:
            norm = squares.get(id(group), 0.0) ** 0.5
            group.update(round_step=0, round_lr=0.0, rounds=group["rounds"] + 1, way_norm=norm)
        self._moved = False

    def _standing(self, error: Exception | None) -> Standing:
        own = self.defaults.keys() - self.base.defaults.keys()
        terms = [
            sorted((k, float(v) if isinstance(v, Tensor) else v) for k, v in group.items() if k in own)
            for group in self.param_groups
        ]
        group = self.param_groups[0]
        finite = is_usable(square_norm([p.detach() for bucket in self.buckets for p in bucket.params]))
        checksum, rounds = zlib.crc32(str(terms).encode()), group["rounds"]
        checks = self.guard.checks_at(rounds + 1, self._check_next, group["period"])
        return Standing(finite, self._square, group["round_step"], rounds, checksum, self._moved, checks, error)

    def _compare_replicas(self, device: torch.device, where: str) -> None:
        """Compares the digests of what must be the same on all ranks: anchors and outer momenta.

        Raises:
            commopt.optim.ReplicasDiffer: they are not, and cannot be repaired, or shall not.
        """
        mine = torch.tensor(self.digests(), dtype=torch.int64, device=device)
        received = mine.new_empty(self.topology.world_size, mine.numel())
        with self.reaching_others(what := f"{where}, comparison of the replicas"):
            wait(self.topology.backend.all_gather(received, mine), what)  # uncounted, as in the agreement of a step
        table, names = received.tolist(), [name for name, _ in self.replicated()]
        right = self.guard.judge(table, names, where)
        self._check_next = right is not None
        if right is not None:
            if self.topology.rank == 0:
                logger.error("%s: %s; all have what rank %d has now", where, describe_difference(table, names), right)
            self.copy_replica(right)

    def _equalize_anchors(self, device: torch.device) -> None:
        """Gives every rank the anchors of rank 0, if those that were taken over anew differ."""
        anchors = [bucket.buffers["anchor"] for bucket in self.buckets]
        if equalize(self.topology.world, device, anchors) and self.topology.rank == 0:
            logger.warning(
                "%s: parameters were changed between two rounds, to values that differ between ranks; the round counts "
                "from those of rank 0",
                type(self).__name__,
            )

    def _mean_ways(self, where: str) -> list[Tensor]:
        """The mean over all ranks of their ways, by bucket."""
        ways = [_way(bucket) for bucket in self.buckets]
        pipeline = Pipeline()
        for i, (bucket, way) in enumerate(zip(self.buckets, ways)):
            what = f"{where}, bucket {i} of {len(self.buckets)} ({bucket.describe()})"
            pipeline.launch(mean_way(way, bucket, self.compressor, self.topology.channel), what)
        pipeline.finish()
        return ways

    def _positions(self) -> dict[int, int]:
        """Where each parameter starts in the model, in elements."""
        at, out = 0, {}
        for group in self.param_groups:
            for p in group["params"]:
                out[id(p)] = at
                at += p.numel()
        return out

    def _skip(self, verdict: Verdict) -> None:
        self.skipped_rounds += 1
        self._skipped_in_a_row += 1
        if self.topology.rank == 0 and worth_a_line(self.skipped_rounds):
            logger.warning(
                "%s: synchronisation skipped on all ranks: inf or NaN in the parameters of ranks %s (%d skipped so "
                "far). It is tried again after the next step; those ranks need the last good checkpoint.",
                type(self).__name__, verdict.broken, self.skipped_rounds,
            )  # fmt: skip
        if self.guard.ends_after(self._skipped_in_a_row):
            names = {p: f"a parameter of shape {tuple(p.shape)}" for bucket in self.buckets for p in bucket.params}
            told = tell_not_finite(self.topology.world, self.buckets, names)
            raise NotFinite(
                f"{type(self).__name__}: {self._skipped_in_a_row} synchronisations in a row were skipped: {told}"
            )

    def _report_equal_gradients(self, verdict: Verdict) -> None:
        if self._reported_equal or not verdict.equal_gradients:
            return
        self._reported_equal = True
        if self.topology.rank == 0:
            logger.warning(
                "%s: the gradients are equal on all ranks. Either a DistributedDataParallel averages them in every "
                "step (call commopt.attach(ddp_model, optimizer), or train the bare module), or all ranks train on the "
                "same data.",
                type(self).__name__,
            )


def _way(bucket: StateBucket) -> Tensor:
    """How far this rank has come from the anchor, as its parameters have it: anchor - x_i, a new flat buffer."""
    flat = bucket.zeros()
    for p, x, d in zip(bucket.params, bucket.views(bucket.buffers["anchor"]), bucket.views(flat)):
        d.copy_(x.to(p.dtype)).sub_(p)
    return flat
