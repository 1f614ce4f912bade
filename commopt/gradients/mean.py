"""The mean of a model's gradients over the ranks, compressed, while backward runs and at its end.

    z = g + e;   C[z] is sent;   e <- z - C[z]            on every rank, and once more where the means are taken

(error feedback; 1-bit Adam's two phases, arXiv 2102.02888, with the gradient in place of its momentum, as in CLAN,
arXiv 2105.07829). Gradients are in buckets, in reverse order of the parameters; a bucket whose gradients are all there
is sent while backward makes the others. When all have come, every rank has the same bytes, and so finds the same: if
any of them stands for inf or NaN, no residual changes on any rank, and the gradients come out not finite.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from commopt import ops
from commopt.agreement import checks
from commopt.bucket import bucket_bytes, partition
from commopt.comm import (
    STARTED,
    Channel,
    CollectiveError,
    MessageDamaged,
    Pipeline,
    Task,
    Topology,
    Work,
    gather_rows,
    mean_over_all,
    message_device,
    numbers_in_world,
    refuse_if_left_out,
    wait,
)
from commopt.gradients.loss_scale import LossScale, rescale_
from commopt.gradients.method import Brought, BucketMean, Method, Part, packed
from commopt.gradients.watching import ROW_BYTES, MeanWatch
from commopt.sharding import like, local, settle
from commopt.state.guard import ReplicasDiffer
from commopt.state.host import numbers_of
from commopt.state.state_bucket import StateBucket

FAILED = 2
"""Byte of a rank's row, and more: its backward has failed, when so many more buckets had started."""


class GradientMean:
    """The gradients of ``params``, averaged over the ranks.

    Args:
        params: trainable parameters, in the order of the model, the same on all ranks.
        topology: the ranks.
        method: how those of a bucket are.
        bucket_mb: see :func:`commopt.bucket.bucket_bytes`.
        reduction: "mean", or "sum" where a step goes by the sum of the gradients of all ranks.
        elsewhere: ids of parameters whose gradients are averaged where they arise, by ``parts``.
        scale: that of the loss.
        check_every: how often the ranks compare parameters, where each has the whole model; None: never.
        warmup_steps: how many means are taken in full precision at first.

    Attributes:
        parts: other means, whose ends are those of this one.
        topology: the ranks, and what this one has sent.
        buckets: in the order in which they are sent.
        steps: how many means were taken.
        exact_left: how many more are in full precision, before the first compressed one.
        not_finite: how many of these were not finite, and left the residuals as they were.
        loaded_residuals: by the id of a parameter, what is added to its next mean: residuals that were loaded, and stay
            none where one node compresses nothing.
        scale: that of the loss, which residuals have.
        zeros_are_absent: whether a gradient of zeros counts as none: DDP gives one to a parameter that was not used.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        topology: Topology,
        method: Method,
        bucket_mb: float | None = None,
        reduction: str = "mean",
        elsewhere: Collection[int] = (),
        scale: LossScale | None = None,
        check_every: int | None = None,
        warmup_steps: int = 0,
    ) -> None:
        self.params, self.topology, self.method = list(params), topology, method
        self.scale = scale or LossScale()
        self.parts: list[Part] = []
        self.zeros_are_absent = False
        self.steps = self.not_finite = 0
        self.exact_left = warmup_steps
        self.loaded_residuals: dict[int, Tensor] = {}
        self._here = [p for p in self.params if id(p) not in elsewhere]
        capacity = bucket_bytes(bucket_mb, self._here)
        held = {id(p): topology.held(p) for p in self._here}
        self.buckets: list[StateBucket] = []
        for run in partition(self._here, capacity, lambda p: held[id(p)]):
            replicas, holding = held[id(run[0])]
            bucket = StateBucket(
                run,
                replicas.world_size,
                replicas,
                inside=holding.inside,
                adds_up=reduction == "sum",
                alike=holding.alike,
            )
            method.prepare(bucket, capacity)
            self.buckets.append(bucket)
        self._bucket_of = {id(p): i for i, bucket in enumerate(self.buckets) for p in bucket.params}
        topology.open()
        self._control = topology.control()
        whole = topology.world_size > 1 and topology.holds_whole
        self._watch = MeanWatch(topology.receipt, self.params, check_every) if whole else None
        self._kept: dict[int, Tensor] = {}
        self._doubtful: set[int] = set()  # kept before a backward that has failed: may have been set to zeros since
        self._begin()

    def _begin(self) -> None:
        self._pipeline = Pipeline(STARTED)
        self._started = 0
        self._gradients: dict[int, Tensor] = {}
        self._versions: dict[int, int | None] = {}
        self._waiting = [{id(p) for p in bucket.params if p.numel()} for bucket in self.buckets]
        self._received: list[tuple[BucketMean, list[Tensor]]] = []  # each with where it was written
        self._nowhere: set[int] = set()
        self._streams: set[torch.cuda.Stream] = set()
        self.topology.receipt.clear()
        self._begun = False
        self._discarded = False  # the backward has failed, or all ranks refuse its mean: nothing is written

    def begin(self) -> bool:
        """Before anything of a mean. Returns whether it is the first of it; then :meth:`finish` must be called when the
        backward ends.

        Raises:
            RuntimeError: it is of one rank that is alone because it was made before ``init_process_group()``.
            ValueError: several GradScalers are in use.
            commopt.comm.CollectiveError: the last backward has failed here, and not on all ranks, or elsewhere there.
        """
        if not self._begun:
            refuse_if_left_out(self.topology.backend, "compress_gradients()")
        if self._discarded:
            self._refuse_failed_alone()
            self._pipeline.finish()  # ranks have come equally far with what they have started only at its end
            self._begin()
        first = not self._begun
        if first and (factor := self.scale.change()) != 1:
            self._rescale(factor)
        self._begun = True
        if self.params[0].is_cuda:  # FSDP2's own streams, too: nobody waits for them in a backward that is not its last
            self._streams.add(torch.cuda.current_stream())
        return first

    @torch.no_grad()
    def _rescale(self, factor: float) -> None:
        """Multiplies all residuals by ``factor``."""
        self.method.rescale(self.buckets, factor)
        for part in self.parts:
            part.rescale(factor)
        for residual in self.loaded_residuals.values():
            rescale_(residual, factor)

    # in backward ------------------------------------------------------------------------------------------------------

    def keep(self, p: Tensor) -> None:
        """The gradient of ``p`` stays this rank's own, until the next mean."""
        self._kept[id(p)] = p
        self._doubtful.discard(id(p))

    @torch.no_grad()
    def arrive(self, p: Tensor, gradient: Tensor, stays: bool = False, used: bool = True) -> None:
        """The ``gradient`` of ``p``, of the shape of what this rank holds of it, is complete. Its mean will be written
        into it. Starts all buckets whose turn it is; but the last waits for :meth:`finish`. If it ``stays``, it has to
        be that of ``p``, as it is, until then. If ``p`` was not ``used`` here, it counts where another rank has one."""
        checks.check_gradients([gradient])
        self.begin()
        if not p.numel():  # nobody waits for it
            self._gradients[id(p)] = gradient
            return
        index = self._bucket_of[id(p)]
        if index < self._started:
            raise RuntimeError(
                "a gradient arrived a second time in one backward(), after it was sent: a parameter is used by several "
                "backward passes at once, or in a checkpoint that is run again. Put all but the last backward() in "
                "`with handle.no_sync():` (DDP: model.no_sync())"
            )
        self._gradients[id(p)] = gradient
        if stays:
            self._versions[id(p)] = version_of(gradient)
        if not used or (self.zeros_are_absent and not gradient.any()):
            return  # whether others have one is known at the end
        self._waiting[index].discard(id(p))
        with self._as_written():
            self._pipeline.progress()
            self._start_complete(len(self.buckets) - 1)

    def _start_complete(self, stop: int) -> None:
        """Starts the buckets before ``stop`` whose turn it is, if all their gradients are there, and if they may be
        sent before other ranks are known to have come as far."""
        while self._started < stop and not self._waiting[self._started]:
            bucket = self.buckets[self._started]
            if bucket.inside is not None or not bucket.replicas.channels:
                return
            self._start_next([])

    @torch.no_grad()
    def finish(self) -> None:
        """Takes the means of all gradients, and writes them where the gradients were; of a parameter that has one on
        other ranks only, as its ``grad``.

        Raises:
            commopt.comm.CollectiveError: if a rank is lost, or its backward has failed.
            commopt.comm.MessageDamaged: what was received in the mean before is not what was sent.
            commopt.optim.ReplicasDiffer: the parameters of the ranks differ.
        """
        try:
            for stream in self._streams:
                torch.cuda.current_stream(stream.device).wait_stream(stream)
            with self._as_written():
                self._finish()
        finally:
            self._begin()

    def _finish(self) -> None:
        for i, p in self._kept.items():  # of earlier passes, and not of the last one
            if i not in self._gradients and p.grad is not None and (i not in self._doubtful or local(p.grad).any()):
                settle([p])
                self.arrive(p, local(p.grad))
        self._kept.clear()
        self._doubtful.clear()
        self._find_absent()
        self._start_rest()
        self._pipeline.finish()  # each is written as it comes, while the others are on their way
        if self._watch is not None:
            self._watch.end()
        parts = [mine for part in self.parts if (mine := part.sound) is not None]
        means = [flag for received, outs in self._received for flag in (received.sound, *_in_range(outs))]
        here = sound = all(numbers_of([*parts, *means]))
        if self.topology.is_sharded:  # those that hold another part have seen other bytes
            row = torch.tensor([sound], dtype=torch.uint8, device=message_device(self._control))
            sound = bool(gather_rows(self._control, row, "whether all means are finite").all())
        for received, outs in self._received:
            if here and not sound:  # no rank takes a step that others do not
                torch._foreach_mul_(outs, float("nan"))
            if sound:
                received.commit()
            received.let_go()
        for part in self.parts:
            part.end(sound)
        self.steps += 1
        self.exact_left = max(0, self.exact_left - 1)
        self.not_finite += not sound
        self.topology.traffic.end_step()

    def confirm(self) -> None:
        """Makes sure that the last mean was received as it was sent, where that is watched over. All ranks call it,
        between two backward passes."""
        if self._watch is not None:
            self._watch.confirm(self._control, self.steps)
            self.topology.receipt.clear()
            self.topology.traffic.leave_out()

    def _as_written(self) -> AbstractContextManager[None]:
        """Context in which products have the dtype of their factors, also if backward() is called within autocast."""
        device = self.params[0].device.type
        return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()

    def averages(self, p: Tensor) -> bool:
        """True if it takes the mean of the gradients of ``p`` here."""
        return id(p) in self._bucket_of

    def forget(self) -> None:
        """Forgets the gradients that have arrived: the backward has failed, on all ranks at the same place. Residuals
        stay as they were. What is on its way is waited for when the next gradient arrives: this may be called where
        nothing should wait."""
        self._discarded = True
        self._doubtful.update(self._kept)
        self._versions = {}  # they may be changed now
        for part in self.parts:
            part.forget()

    def _refuse_failed_alone(self) -> None:
        """Asks all ranks whether their last backward has failed, too, when as much of the mean had started as here. One
        that has not asks which gradients there are, meanwhile, in a row of 0 and 1.

        Raises:
            commopt.comm.CollectiveError: it has not, on some rank.
        """
        if not self._here:
            return
        size = len(self._here) + (ROW_BYTES if self._watch is not None else 0)
        row = torch.full((size,), FAILED + self._started % 250, dtype=torch.uint8, device=message_device(self._control))
        told = gather_rows(self._control, row, "whether the last backward has failed on all ranks")[:, 0]
        if bool((told != row[0]).any()):
            self._refuse_failed(told)

    def _refuse_failed(self, told: Tensor) -> None:
        """Raises CollectiveError if some of the ranks have ``told``, in the first bytes of their rows, that their last
        backward has failed."""
        numbers = numbers_in_world(self._control)
        failed = [rank for rank, byte in zip(numbers, told.tolist()) if byte >= FAILED]
        if failed:
            raise CollectiveError(
                f"mean of gradients {self.steps + 1}: the backward of ranks {failed} has failed, and not that of all "
                "ranks at the same place: nothing was averaged, and nothing can be any more. Where one rank may fail, "
                "as for lack of memory, end the run, or have all ranks agree before backward() to skip a batch"
            )

    def _find_absent(self) -> None:
        """Asks all ranks which parameters have a gradient on none, and whether all is well. Of a bucket that is
        complete here none lacks one, so these are on their way meanwhile, and what waits behind them in the network
        holds nobody up."""
        if not self._here:
            return
        lacking = {id(p) for p in self._here if id(p) not in self._gradients}
        lacking.update(i for waiting in self._waiting for i in waiting)  # those of zeros
        row = torch.tensor([id(p) not in lacking for p in self._here], dtype=torch.uint8, device="cpu")
        if self._watch is not None:
            row = torch.cat([row, self._watch.row(self.steps + 1)])
        row = row.to(message_device(self._control))
        table, where = row.new_empty(self._control.world_size, row.numel()), "which gradients the ranks have"
        asked = self._control.all_gather(table, row)
        self._start_complete(len(self.buckets))
        self._pipeline.reach(asked, asked, where)
        wait(asked, where)
        table = table.cpu()
        self._refuse_failed(table[:, 0])
        if self._watch is not None:
            try:
                self._watch.check(self._control, table[:, len(self._here) :], self.steps + 1)
            except (MessageDamaged, ReplicasDiffer):
                self._run_down()
                raise
        for p, present in zip(self._here, table.any(0).tolist()):
            if not present:
                self._nowhere.add(id(p))
                self._gradients.pop(id(p), None)  # DDP's, which stays what it is
            elif id(p) not in self._gradients and p.grad is not None:  # that of earlier passes
                settle([p])
                self._gradients[id(p)] = local(p.grad)

    def _start_rest(self) -> None:
        """Starts the buckets that are left, but for those that rest: they are not sent, and their residuals stay."""
        while self._started < len(self.buckets):
            bucket = self.buckets[self._started]
            absent = [i for i, p in enumerate(bucket.params) if id(p) in self._nowhere]
            if bucket.rests(absent):
                self._started += 1
            else:
                self._start_next(absent)

    def _run_down(self) -> None:
        """Ends a mean that all ranks refuse, so that all have started the same collectives. Writes nothing."""
        self._discarded = True
        while self._started < len(self.buckets):
            self._start_next([])
        self._pipeline.finish()

    def _start_next(self, absent: Sequence[int]) -> None:
        index = self._started
        bucket = self.buckets[index]
        send, reply = bucket.replicas.pair(index)
        self._started += 1
        where = f"mean of gradients {self.steps + 1}, bucket {index} of {len(self.buckets)} ({bucket.describe()})"
        self._pipeline.start(self._mean(bucket, absent, send, reply), where, early=reply is not send)

    def _mean(self, bucket: StateBucket, absent: Sequence[int], send: Channel, reply: Channel) -> Task:
        """The mean of a bucket. In backward it comes no further than to where all is on its way."""
        here = self._gradients
        has = [(p, o) for p, o in zip(bucket.params, bucket.offsets) if id(p) in here and p.numel()]
        brought: Brought = [(here[id(p)], o) for p, o in has]
        if bucket.inside is not None:  # ranks of one replica, each with gradients of its own
            flat = packed(bucket, brought)
            yield bucket.inside.all_reduce(flat)
            brought = [(flat.mul_(bucket.inside_factor), 0)]
        if bucket.replicas.nodes == 1 or self.exact_left:
            received = yield from self._in_full(bucket, brought, send, reply)
        else:
            received = yield from self.method.mean(bucket, brought, absent, send, reply)
        if self._discarded:  # where it would be written, the next gradients may be
            received.let_go()
            return
        self._received.append((received, self._written(received)))

    def _in_full(
        self, bucket: StateBucket, brought: Brought, send: Channel, reply: Channel
    ) -> Generator[Work, None, BucketMean]:
        """In warm-up and on one node nothing is compressed, and residuals stay. On one node those that were loaded, of
        other numbers of nodes, are folded in at once."""
        mean = packed(bucket, brought)
        yield from mean_over_all(mean, send, reply, STARTED)
        folded = [i for i in map(id, bucket.params) if i in self.loaded_residuals and i not in self._nowhere]
        for p, there in zip(bucket.params, bucket.views(mean)):
            if id(p) in folded:
                there.add_(self.loaded_residuals[id(p)])

        def commit() -> None:
            for i in folded:
                del self.loaded_residuals[i]

        def write(outs: Sequence[Tensor]) -> None:
            torch._foreach_copy_(list(outs), bucket.views(mean))

        return BucketMean(bucket, ops.all_finite(mean), write, commit)

    def _written(self, received: BucketMean) -> list[Tensor]:
        """The tensors in which the gradients were, with their mean now; new ones for parameters that had none here."""
        bucket, here = received.bucket, self._gradients
        for p in bucket.params:
            if id(p) in self._versions:
                refuse_changed(p, here[id(p)], self._versions[id(p)])
        outs = [here[id(p)] if id(p) in here else _new_gradient(p, x) for p, x in zip(bucket.params, bucket.values)]
        received.write(outs)
        if bucket.factor != 1:
            torch._foreach_mul_(outs, bucket.factor)
        for p, out in zip(bucket.params, outs):
            if id(p) not in here and id(p) not in self._nowhere:
                p.grad = like(out, p)
        return outs


OF_HOOKS = (
    "a hook of yours has done that (register_post_accumulate_grad_hook(); an optimizer in backward is one). "
    "What changes gradients comes before compress_gradients(), in place, or after backward(); what uses them up comes "
    "after backward()"
)


def version_of(gradient: Tensor) -> int | None:
    """Another number when it has been written to; None if it is a part of a buffer, whose versions are those of all."""
    return gradient._version if gradient._base is None else None


def refuse_changed(p: Tensor, gradient: Tensor, version: int | None) -> None:
    """Raises RuntimeError if the ``gradient`` of ``p`` was replaced, or changed since it was that ``version``."""
    there = p.grad is not None and local(p.grad).data_ptr() == gradient.data_ptr()
    if not there or version_of(gradient) != version:
        raise RuntimeError(
            f"the gradient of a parameter of shape {tuple(p.shape)} was changed in backward, after it was sent to be "
            f"averaged: {OF_HOOKS}"
        )


def _new_gradient(p: Tensor, x: Tensor) -> Tensor:
    """Memory for a gradient of ``p``, of which this rank holds ``x``, as autograd makes it on others: with the same
    strides, too, for norms add up in the order of the memory."""
    dtype = getattr(p, "grad_dtype", None) or x.dtype  # torch 2.10 and later
    out = torch.empty_like(x, dtype=dtype, requires_grad=False)
    return out if out.stride() == x.stride() else x.new_empty(x.shape, dtype=dtype)  # x is dense, or not


def why_unknown(params: Sequence[Tensor]) -> str:
    """Why gradients of parameters cannot be averaged that were not trained when this was made, and are now."""
    return (
        f"{len(params)} parameters, such as one of shape {tuple(params[0].shape)}, were frozen when "
        "compress_gradients() was called, and are trained now: call remove() on its handle, and "
        "compress_gradients() once more, so that their gradients are averaged"
    )


def _in_range(outs: Sequence[Tensor]) -> list[Tensor]:
    """Whether all are finite that have been rounded to float16, whose largest is 65504, each 0-d bool; other dtypes
    reach as far as what is sent."""
    halves = [out for out in outs if out.dtype == torch.float16 and out.numel()]
    return [largest.isfinite() for largest in torch._foreach_norm(halves, math.inf)] if halves else []
