"""One step in flight: which buckets have started, on what terms, and what the ranks agree on.

Buckets start in the order of their index, on every rank. Before a bucket's task has yielded ``ctx.barrier`` it changes
nothing that outlives the step: with ``overlap=True`` it starts while backward runs, before it is known whether all
ranks take the step. What a step does, by where its buckets start:

    step                  the ranks agree                  buckets start
    --------------------  -------------------------------  ------------------------------------------------------------
    local                 each rank with itself            at once; they send nothing
    at step()             first                            then: clipping, and who averages, are known
    in backward           after backward, while buckets    in backward and before the agreement, if all gradients are
                          are on their way                 there; those that lack one here after it
    refused, skipped      as above                         if in backward: all of them, and stop at the barrier, so
                                                           that all ranks have started the same collectives
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from commopt.agreement.decision import Agreement, Holders, StepDecision, StepReport
from commopt.comm import Channel, CountingBackend, Pipeline, Task, confirm, message_device
from commopt.sharding import settle
from commopt.state.host import numbers_of
from commopt.state.state_bucket import StateBucket


@dataclass(frozen=True)
class StepContext:
    """On what terms a bucket takes a step.

    Attributes:
        scale: factor of this rank's gradients: the clip coefficient over the scale of its GradScaler, times the number
            of replicas if gradients add up, negative to maximize.
        average: whether gradients still have to be averaged; False on one rank, and where DDP has done so.
        send, reply: the ranks, on the channels that are this bucket's: for what goes out, and for what comes back.
        step: the step of all buckets.
    """

    scale: float
    average: bool
    send: Channel
    reply: Channel
    step: StepInFlight

    @property
    def barrier(self) -> Agreement:
        """Work that a bucket's task yields before it changes anything that outlives the step: all ranks take it."""
        return self.step.agreement

    @property
    def confirmed(self) -> Confirmation:
        """Work that a bucket's task yields when all that it receives has come, and before it uses any of it: all
        ranks have received what was sent, and it can be right."""
        return self.step.confirmation

    @property
    def present(self) -> frozenset[int]:
        """Ids of the parameters that have a gradient on some rank (in a local step: on this one); the others do not
        move. Known behind the barrier."""
        return self.step.present()

    def moving(self, bucket: StateBucket) -> list[int]:
        """Indices of the parameters of ``bucket`` that have a gradient on some rank. Known behind the barrier."""
        present = self.present
        return [i for i, p in enumerate(bucket.params) if id(p) in present]

    def absent(self, bucket: StateBucket) -> list[int]:
        """Indices of the parameters of ``bucket`` that have no gradient on any rank. Known when its task starts."""
        return self.step.absent(bucket)

    @property
    def nonfinite_dropped(self) -> bool:
        """True if this rank's gradients count as missing: the step is local, and they are inf or NaN. Known behind
        the barrier."""
        return self.step.nonfinite_dropped


class Confirmation:
    """That all ranks have received what was sent: a :class:`Work` for when all of it has come."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._backend: CountingBackend | None = None
        self._sound: list[Tensor] = []
        self.done = False

    def over(self, backend: CountingBackend) -> None:
        """Sets what the ranks tell each other over."""
        self._backend = backend

    def note(self, sound: Tensor) -> None:
        """Takes down whether something that has come can be right, 0-d bool."""
        self._sound.append(sound)

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        """Exchanges what all ranks have found.

        Raises:
            commopt.comm.MessageDamaged: on every rank, if something is not as it was sent, or cannot be right.
        """
        assert self._backend is not None
        sound = all(numbers_of(self._sound))
        self._sound, self.done = [], True
        if self._backend.world_size > 1:
            confirm(self._backend, sound, self._where)


@dataclass(frozen=True)
class Starter:
    """Callables and channels with which an optimizer starts the task of a bucket.

    Attributes:
        task: makes it, of the bucket and its context.
        factor: of the gradients of a bucket, negative to maximize.
        has_stages: whether it has further collectives, over the channel for replies.
        channels: those of a bucket, by its index: for what goes out, and for what comes back.
        stale: whether buckets are to be made anew, as parameters were moved, cast or put into other groups.
    """

    task: Callable[[StateBucket, StepContext], Task]
    factor: Callable[[StateBucket], float]
    has_stages: Callable[[StateBucket], bool]
    channels: Callable[[int], tuple[Channel, Channel]]
    stale: Callable[[], bool]


class StepInFlight:
    """A step that has begun.

    Args:
        name: of the optimizer, for errors.
        number: of the step, from 1.
        buckets: those there are when it begins; they start in this order.
        starter: starts their tasks.

    Attributes:
        started: how many buckets have.
        agreement: what all ranks decide about the step.
        params: those of all buckets, as in the decision; set before the agreement starts.
        nonfinite_dropped: whether this rank's gradients count as missing, because they are not finite and the step is
            local.
    """

    def __init__(self, name: str, number: int, buckets: Sequence[StateBucket], starter: Starter) -> None:
        self.number, self.buckets, self._starter = number, list(buckets), starter
        self.started = 0
        self.agreement = Agreement()
        self.confirmation = Confirmation(f"{name}, step {number}")
        self.pipeline = Pipeline(self.agreement, self.confirmation)
        self.params: list[Tensor] = []
        self.nonfinite_dropped = False
        self._arrived = False  # some gradient, in backward
        self._overlapped = False  # buckets start in backward
        self._present: frozenset[int] | None = None
        self._stale: bool | None = None
        self._waiting = [{id(p) for p in bucket.params if p.numel()} for bucket in self.buckets]

    # in backward ------------------------------------------------------------------------------------------------------

    def arrive(self, index: int, p: Tensor) -> None:
        """The gradient of ``p``, of bucket ``index``, is there: starts all buckets whose turn it is and that have all
        gradients. The last one is left to step(), which first sends what the ranks agree by: a few bytes that would
        wait behind the bucket's on a slow link.

        Raises:
            RuntimeError: the bucket has started already.
        """
        if index < self.started:
            raise RuntimeError(
                "a gradient arrived after its bucket was sent: overlap=True takes one backward() per step(). Put all "
                "but the last backward() of a step in `with optimizer.no_sync():` (DDP: model.no_sync()), or create "
                "the optimizer with overlap=False. If it was left out because something had failed, call step(), or "
                "load_state_dict(), on all ranks first"
            )
        self._arrived = self._overlapped = True
        if self.buckets[index].sharded:
            settle([p])
        self._waiting[index].discard(id(p))
        if self.started:
            self.pipeline.progress()
        while self.started < len(self.buckets) - 1 and not self._waiting[self.started]:
            bucket = self.buckets[self.started]
            sparse = [q for q in bucket.params if q.grad is not None and q.grad.layout != torch.strided]
            gone = not _complete(bucket)  # with a backward that has failed before anything was sent
            if bucket.inside is not None or self._any_stale() or sparse or gone:
                return  # step() reports it, or deals with it
            self._start_next(1.0, True)

    def _any_stale(self) -> bool:
        """True if buckets are to be made anew since the last step: then none starts before that."""
        if self._stale is None:
            self._stale = self._starter.stale()
        return self._stale

    def replace(self, buckets: Sequence[StateBucket]) -> None:
        """Continues with ``buckets``, because all were made anew."""
        self.buckets = list(buckets)

    def blocking(self) -> list[Tensor]:
        """The parameters without a gradient that keep the next bucket, and all after it, from starting. None are where
        no gradient has come since the step began: one that backward had begun may have been given up."""
        if not self._arrived or self.started >= len(self.buckets) - 1:
            return []
        return [p for p in self.buckets[self.started].params if id(p) in self._waiting[self.started]]

    # in step() --------------------------------------------------------------------------------------------------------

    def run(
        self,
        report: StepReport,
        over: CountingBackend,
        overlapped: bool,
        buckets: Sequence[StateBucket],
        scale: Callable[[StepDecision], float],
        holders: Holders | None = None,
    ) -> StepDecision:
        """Takes the step, from wherever backward has taken it, to its end. Returns what the ranks have decided.

        Args:
            report: what this rank brings.
            over: what the ranks agree over.
            overlapped: whether buckets start in backward.
            buckets: those there are now; some may have been packed since backward, and start when the ranks agree.
            scale: the factor of gradients that follows from the decision.
            holders: what each rank holds; None: all of them the whole model.
        """
        where = self.where("agreement of the ranks on it")
        self._overlapped = overlapped
        self.confirmation.over(over)
        self.agreement.start(over, message_device(over), report, where, holders)
        if overlapped:  # a bucket that lacks a gradient here must know at its start whether others have it
            self._start_while(_complete)
            self.pipeline.reach(self.agreement, self.agreement.under_way, where)
            self.agreement.wait()
            self._start_while(lambda _: True)
        if self.started < len(buckets) or not overlapped:
            decision = self.agreement.wait()
            self.buckets = list(buckets)
            self._start_while(lambda _: True, scale(decision), decision.average)
        self.pipeline.finish()
        decision = self.agreement.wait()
        if holders is not None and not self.confirmation.done:  # others may have parameters to confirm
            self.confirmation.wait()
        return decision

    def abort(self, begun: bool = False) -> None:
        """Ends all tasks without effect, where all ranks have started the same collectives; ``begun``: some rank has
        begun in backward, maybe not this one."""
        if self._overlapped or begun:
            self._start_while(lambda _: True)  # as other ranks may have done in backward
        self.pipeline.stop()

    def where(self, what: str) -> str:
        """``what``, with the number of the step, for errors."""
        return f"step {self.number}, {what}"

    def present(self) -> frozenset[int]:
        """Ids of the parameters that have a gradient on some rank."""
        if self._present is None:
            decision = self.agreement.decision
            assert decision is not None, "present is known only after the task has yielded ctx.barrier"
            self._present = frozenset([id(p) for p, here in zip(self.params, decision.present) if here])
        return self._present

    def absent(self, bucket: StateBucket) -> list[int]:
        """Indices of the parameters of ``bucket`` that have no gradient on any rank.

        A bucket starts before the ranks have agreed only if it is complete here (then none is absent), or if the step
        is being aborted (then it does not matter).
        """
        if self.agreement.decision is None:
            return []
        present = self.present()
        if len(present) == len(self.params):
            return []
        return [i for i, p in enumerate(bucket.params) if id(p) not in present]

    def _start_while(self, ready: Callable[[StateBucket], bool], scale: float = 1.0, average: bool = True) -> None:
        """Starts buckets in their turn, as long as the next one is ``ready``."""
        while self.started < len(self.buckets) and ready(self.buckets[self.started]):
            self._start_next(scale, average)

    def _start_next(self, scale: float, average: bool) -> None:
        index, starter = self.started, self._starter
        bucket = self.buckets[index]
        where = self.where(f"bucket {index} of {len(self.buckets)} ({bucket.describe()})")
        send, reply = starter.channels(index)
        ctx = StepContext(starter.factor(bucket) * scale, average, send, reply, self)
        self.started += 1
        early = reply is not send and starter.has_stages(bucket)
        self.pipeline.start(starter.task(bucket, ctx), where, early)


def _complete(bucket: StateBucket) -> bool:
    """True if all parameters with elements have a gradient on this rank."""
    return not [p for p in bucket.params if p.grad is None and p.numel()]
