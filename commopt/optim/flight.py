"""One step on its way: which buckets have started, on what terms, and what the ranks agree on.

Buckets start in the order of their index, on every rank. With ``overlap=True`` most of them start while backward runs
(:class:`Overlap` sees their gradients arrive), before it is known whether all ranks take the step. A bucket's task
therefore keeps everything that outlives the step as it was until it has yielded ``now.agreed``.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from commopt.comm import CountingBackend, Pipeline, confirm
from commopt.optim.agreement import Agreement
from commopt.optim.packed import StateBucket

if TYPE_CHECKING:
    from commopt.optim.base import CommOptimizer

logger = logging.getLogger("commopt")


@dataclass(frozen=True)
class Step:
    """On what terms a bucket takes a step.

    Attributes:
        scale: factor of this rank's gradients: the clip coefficient over the scale of its GradScaler, negative to
            maximize.
        average: whether gradients still have to be averaged; False on one rank, and where DDP has done so.
        line, back: the ranks, on the lines that are this bucket's: for what goes out, and for what comes back.
        flight: the step of all buckets.
    """

    scale: float
    average: bool
    line: CountingBackend
    back: CountingBackend
    flight: Flight

    @property
    def agreed(self) -> Agreement:
        """What a bucket's task yields before it changes anything that outlives the step: all ranks take it."""
        return self.flight.agreement

    @property
    def confirmed(self) -> Confirmation:
        """What a bucket's task yields when all that it receives has come, and before it uses any of it: all ranks have
        received what was sent, and it can be right."""
        return self.flight.confirmation

    @property
    def present(self) -> frozenset[int]:
        """Ids of the parameters that have a gradient on some rank (in a local step: on this one); the others do not
        move. Known once agreed."""
        return self.flight.present()

    def absent(self, bucket: StateBucket) -> list[int]:
        """Indices of the parameters of ``bucket`` that have no gradient on any rank. Known when its task starts."""
        return self.flight.absent(bucket)

    @property
    def dropped(self) -> bool:
        """Whether this rank's gradients count as missing: the step is local, and they are inf or NaN. Known once
        agreed."""
        return self.flight.dropped


class Confirmation:
    """That all ranks have received what was sent: a :class:`Work` for when all of it has come."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._backend: CountingBackend | None = None
        self._sound: list[Tensor] = []

    def over(self, backend: CountingBackend) -> None:
        """Says what the ranks tell each other over."""
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
        sound = all(self._sound)
        self._sound = []
        if self._backend.world_size > 1:
            confirm(self._backend, sound, self._where)


class Flight:
    """A step that has begun.

    Attributes:
        buckets: those there were when it began; they start in this order.
        number: of the step, from 1.
        launched: how many of them have started.
        agreement: what all ranks decide about the step.
        params: those of all buckets, as in the verdict; set before the agreement starts.
        early: whether buckets start in backward, and ranks are about to agree.
        dropped: whether this rank's gradients count as missing, because they are not finite and the step is local.
    """

    def __init__(self, optimizer: CommOptimizer) -> None:
        self.optimizer = optimizer
        self.buckets = list(optimizer.buckets)
        self.launched = 0
        self.agreement = Agreement()
        self.number = max((group["step"] for group in optimizer.param_groups), default=0) + 1
        self.confirmation = Confirmation(f"{type(optimizer).__name__}, step {self.number}")
        self.pipeline = Pipeline(self.agreement, self.confirmation)
        self.params: list[Tensor] = []
        self.early = self.dropped = False
        self._present: frozenset[int] | None = None
        self._groups = optimizer.group_of()
        self._waiting = [{id(p) for p in bucket.params if p.numel()} for bucket in self.buckets]
        self._used: list[tuple[Tensor, Tensor | None, int]] = []
        self._terms: list[dict[str, Any]] = []

    def where(self, what: str) -> str:
        """``what``, with the number of the step, for errors."""
        return f"step {self.number}, {what}"

    def launch_known(self) -> None:
        """Starts all buckets there were at the beginning that have not started yet."""
        while self.launched < len(self.buckets):
            self._launch_next(1.0, True)

    def launch_complete(self) -> None:
        """Starts the buckets whose turn it is and whose parameters all have a gradient here, and so take part."""
        while self.launched < len(self.buckets) and _complete(self.buckets[self.launched]):
            self._launch_next(1.0, True)

    def call_off(self) -> None:
        """Ends all tasks without effect, where all ranks have started the same collectives."""
        if self.early:
            self.launch_known()  # as other ranks may have done in backward
        self.pipeline.stop()

    def launch_all(self, scale: float, average: bool) -> None:
        """Starts all buckets that have not started yet, on the terms given."""
        self.buckets = self.optimizer.buckets
        while self.launched < len(self.buckets):
            self._launch_next(scale, average)

    def _launch_next(self, scale: float, average: bool) -> None:
        bucket = self.buckets[self.launched]
        group = self._group(bucket)
        where = self.where(f"bucket {self.launched} of {len(self.buckets)} ({bucket.describe()})")
        line, back = self.optimizer.lines_of(self.launched)
        now = Step(-scale if group["maximize"] else scale, average, line, back, self)
        self.launched += 1
        # without nodes an average is one collective: there is nothing to go on to
        stages = line.inside.world_size > 1 or not self.optimizer.wants_average(group)
        early = back is not line and stages
        self.pipeline.launch(self.optimizer.bucket_step(bucket, group, now), where, early)

    def _group(self, bucket: StateBucket) -> dict[str, Any]:
        """The parameter group of a bucket."""
        key = id(bucket.params[0])
        if key not in self._groups:  # added since
            self._groups = self.optimizer.group_of()
        return self._groups[key]

    def finish(self) -> None:
        """Runs all tasks to their end, once the agreement has started."""
        self.pipeline.finish()
        self.agreement.wait()

    def present(self) -> frozenset[int]:
        """Ids of the parameters that have a gradient on some rank."""
        if self._present is None:
            verdict = self.agreement.verdict
            assert verdict is not None, "present is known only after the task has yielded now.agreed"
            self._present = frozenset(id(p) for p, here in zip(self.params, verdict.present) if here)
        return self._present

    def absent(self, bucket: StateBucket) -> list[int]:
        """Indices of the parameters of ``bucket`` that have no gradient on any rank.

        A bucket starts before the ranks have agreed only if it is complete here (then none is absent), or if the step
        is being called off (then it does not matter).
        """
        if self.agreement.verdict is None:
            return []
        present = self.present()
        if len(present) == len(self.params):
            return []
        return [i for i, p in enumerate(bucket.params) if id(p) not in present]

    # in backward ------------------------------------------------------------------------------------------------------

    def arrive(self, index: int, p: Tensor) -> None:
        """The gradient of ``p``, of bucket ``index``, is there: starts all buckets whose turn it is and that have all
        gradients. The last one is left to step(), which first sends what the ranks agree by: a few bytes that would
        wait behind the bucket's on a slow link.

        Raises:
            RuntimeError: the bucket has started already.
        """
        if index < self.launched:
            raise RuntimeError(
                "a gradient arrived after its bucket was sent: overlap=True takes one backward() per step(). Put all "
                "but the last backward() of a step in `with optimizer.no_sync():` (DDP: model.no_sync()), or create "
                "the optimizer with overlap=False"
            )
        self._waiting[index].discard(id(p))
        self.pipeline.progress()
        while self.launched < len(self.buckets) - 1 and not self._waiting[self.launched]:
            bucket = self.buckets[self.launched]
            if bucket.stale() or any(q.grad is not None and q.grad.layout != torch.strided for q in bucket.params):
                return  # step() reports it, or deals with it
            if not self._terms:
                self._terms = [self._read(group) for group in self.optimizer.param_groups]
                _after_backward(self._remember)
            self._launch_next(1.0, True)

    def _remember(self) -> None:
        """Remembers the gradients that were used, as they are when backward and DDP are done with them."""
        params = [p for bucket in self.buckets[: self.launched] for p in bucket.params]
        self._used = [(p, p.grad, 0 if p.grad is None else p.grad._version) for p in params]

    def _read(self, group: dict[str, Any]) -> dict[str, Any]:
        terms = {key: group[key] for key in self.optimizer.read_in_backward}
        return {key: t.item() if isinstance(t, Tensor) else copy.copy(t) for key, t in terms.items()}

    def check(self) -> None:
        """Makes sure that what was sent in backward is still what the step is about.

        Raises:
            ValueError: a gradient or a hyper-parameter has changed since.
        """
        for p, grad, version in self._used:
            if p.grad is not grad or (grad is not None and grad._version != version):
                raise ValueError(
                    f"the gradient of a parameter of shape {tuple(p.shape)} was changed between backward() and step(), "
                    "but overlap=True has sent it already. Clip, scale or edit gradients with overlap=False "
                    "(max_grad_norm= clips inside the optimizer)"
                )
        for group, terms in zip(self.optimizer.param_groups, self._terms):
            now = self._read(group)
            if now != terms:
                raise ValueError(
                    f"a parameter group changed between backward() and step(), from {terms} to {now}, but overlap=True "
                    "has used it already. Change it after step()"
                )

    def blocking(self) -> list[Tensor]:
        """The parameters without a gradient that keep the next bucket, and all after it, from starting."""
        if self.launched >= len(self.buckets) - 1:
            return []
        return [p for p in self.buckets[self.launched].params if id(p) in self._waiting[self.launched]]


class Overlap:
    """Sees gradients arrive, by hooks on the parameters, and gives them to the optimizer's flight.

    Holds the optimizer weakly: parameters outlive it. The hooks go when this does.
    """

    def __init__(self, optimizer: CommOptimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._handles: dict[int, Any] = {}
        weakref.finalize(self, _remove_all, self._handles).atexit = False
        self._bucket_of: dict[int, int] = {}
        self._held = 0
        self._reported = False

    def follow(self, buckets: Sequence[StateBucket]) -> None:
        """Watches the parameters of ``buckets``, which are all there are."""
        self._bucket_of = {id(p): i for i, bucket in enumerate(buckets) for p in bucket.params}
        for gone in set(self._handles) - set(self._bucket_of):
            self._handles.pop(gone).remove()
        hook = _hook(weakref.ref(self))
        for p in (p for bucket in buckets for p in bucket.params if id(p) not in self._handles):
            self._handles[id(p)] = p.register_post_accumulate_grad_hook(hook)

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """Gradients that arrive meanwhile are not the last of their step."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1

    @torch.no_grad()
    def arrived(self, p: Tensor) -> None:
        """The gradient of ``p`` is complete, as far as this backward goes."""
        optimizer = self._optimizer()
        if optimizer is None or self._held or not optimizer.starts_in_backward() or optimizer.accumulating():
            return
        index = self._bucket_of.get(id(p))
        if index is not None and p.numel():  # no bucket waits for an empty one
            optimizer.flight().arrive(index, p)

    def report(self, flight: Flight) -> None:
        """Says once what keeps buckets from starting in backward."""
        blocking = flight.blocking()
        optimizer = self._optimizer()
        if self._reported or not blocking or optimizer is None:
            return
        self._reported = True
        if optimizer.backend.rank == 0:
            names = ", ".join(optimizer.name_of(p) for p in blocking[:3]) + (" ..." if len(blocking) > 3 else "")
            logger.warning(
                "%s: overlap is lost from bucket %d of %d on: %s had no gradient when backward ended, and buckets "
                "start in order. Freeze what is never used (requires_grad_(False)).",
                type(optimizer).__name__, flight.launched, len(flight.buckets), names,
            )  # fmt: skip


def _complete(bucket: StateBucket) -> bool:
    """Whether all parameters with elements have a gradient on this rank."""
    return not [p for p in bucket.params if p.grad is None and p.numel()]


def _after_backward(call: Callable[[], None]) -> None:
    """Calls ``call()`` when the backward under way ends, after what DDP does then."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(lambda: engine.queue_callback(call))


def _remove_all(handles: dict[int, Any]) -> None:
    for handle in handles.values():
        handle.remove()


def _hook(overlap: weakref.ref[Overlap]) -> Callable[[Tensor], None]:
    def arrived(p: Tensor) -> None:
        watching = overlap()
        if watching is not None:
            watching.arrived(p)

    return arrived
