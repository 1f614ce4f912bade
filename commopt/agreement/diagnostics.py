"""Diagnostics of a run, as lines of the log: once each, or ever more rarely; mostly on rank 0."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from commopt.agreement.decision import LARGEST_NORM

logger = logging.getLogger("commopt")

LONG, WINDOWS, SHORT = 1000, 10, 100
"""It is said that the variance has not settled after so many steps; or after so many times those that it averages over,
if these are fewer, but not before the third number of steps."""
_DOORS = (
    ("transformers.trainer", "transformers", "Hugging Face's Trainer", "callbacks=[CommoptCallback()]"),
    ("lightning.pytorch.trainer.trainer", "lightning", "Lightning's Trainer", "callbacks=[CommoptCallback()]"),
    ("accelerate.accelerator", "accelerate", "accelerate", "connect(accelerator, model, optimizer)"),
)  # fmt: skip
"""Frameworks that are imported, and the module, of those in ``commopt.integrations``, that has a line for each."""

IN_A_ROW = 3
"""Times in a row that norms must be alike before it is no chance."""


class Diagnostics:
    """The log of one optimizer.

    Args:
        optimizer: its name.
        rank: this rank.
        numbers: of each rank the number that a user knows it by.
    """

    def __init__(self, optimizer: str, rank: int, numbers: Sequence[int]) -> None:
        self.optimizer, self.rank, self.numbers = optimizer, rank, numbers
        self._said: set[str] = set()
        self._alike = 0  # how often in a row

    def skipped(self, ranks: Sequence[int], count: int) -> None:
        """All ranks have skipped a step, because of ``ranks``: the ``count``-th."""
        if self.rank == 0 and worth_a_line(count):
            logger.warning(
                "%s: step skipped on all ranks: inf, NaN or a norm above %g in the gradients of rank %s (%d skipped so "
                "far)",
                self.optimizer, LARGEST_NORM, ", ".join(str(self.numbers[rank]) for rank in ranks), count,
            )  # fmt: skip

    def dropped(self, count: int) -> None:
        """This rank has taken a local step without its gradient: the ``count``-th."""
        if worth_a_line(count):
            logger.warning(
                "%s: inf, NaN or a norm above %g in the gradient of rank %d in a local step, which counts as zeros "
                "there (%d so far)",
                self.optimizer, LARGEST_NORM, self.numbers[self.rank], count,
            )  # fmt: skip

    def idle(self, params: Sequence[Tensor], where: str = "on any rank") -> None:
        """None of ``params``, those of the optimizer, has a gradient ``where`` it would count."""
        if not self._once("idle"):
            return
        why = (
            "Was backward() called, and are these still the parameters of the model? (FSDP1, and FSDP2's "
            "fully_shard(), exchange them: shard first, and make the optimizer then; or put the new ones into its "
            "groups, and call rebind(). FSDP2 hides gradients where set_requires_all_reduce(False) or "
            "set_requires_gradient_sync(False) was called.)"
            if any(p.requires_grad for p in params)
            else f"All {len(params)} of this optimizer are frozen (requires_grad=False): make it after what freezes "
            "the model and adds others to train, as peft's get_peft_model() does, and trainers with peft_config="
        )
        logger.warning("%s: no parameter has a gradient %s, so nothing moves. %s", self.optimizer, where, why)

    def nothing_to_average(self, count: int, by_others: bool, ranks: Any) -> None:
        """Of ``count`` sharded parameters no rank holds what another one averages: ``by_others``, if some hold the same
        and FSDP makes it so. ``ranks`` is the backend."""
        if not self._once("nothing to average"):
            return
        what = (
            "FSDP averages their gradients in full precision by itself. Call commopt.attach(model, optimizer) before "
            "the first backward: then the optimizer averages over the replicas, and compresses"
            if by_others
            else "every rank holds another part of them. To compress between replicas give fully_shard() the inner "
            'dimension of a mesh, fully_shard(model, mesh=mesh["shard"]), and the optimizer all of it, '
            "process_group=mesh; commopt.compress_gradients() compresses what FSDP2 itself exchanges"
        )
        logger.warning(
            "%s: nothing of %d sharded parameters is averaged, nor compressed: %s (ranks: %s)",
            self.optimizer, count, what, getattr(ranks, "mesh", ranks),
        )  # fmt: skip

    def equal_gradients(self, why: str | None = None) -> None:
        """All ranks had the same gradients before anything was averaged: ``why`` says what averages them, if that is
        known."""
        self._tell_of_equal(
            why,
            "the gradients are already equal on all ranks. Either a DistributedDataParallel that is not attached still "
            "averages them at full price (call commopt.attach(ddp_model, optimizer)), or commopt.compress_gradients() "
            "does (it wants a plain optimizer), or all ranks train on the same data.",
        )

    def norms(self, alike: bool, norm: float) -> None:
        """Note whether the gradients of all ranks were ``alike`` in norm, which by chance happens once in ten thousand
        times."""
        self._alike = self._alike + 1 if alike else 0
        if self._alike == IN_A_ROW and self._once("clipped"):
            logger.warning(
                "%s: the gradients have a norm of %.4g on every rank, though they differ: each rank clips its own "
                "(torch.nn.utils.clip_grad_norm_, or a trainer's max_grad_norm or gradient_clip_val), so that no mean "
                "is clipped. Turn that off, and give the optimizer max_grad_norm=%.4g",
                self.optimizer, norm, norm,
            )  # fmt: skip

    def equal_gradients_in_rounds(self, why: str | None = None) -> None:
        """All ranks had the same gradients in the last step of a round: ``why`` says what averages them, if that is
        known."""
        self._tell_of_equal(
            why,
            "the gradients are equal on all ranks. Either a DistributedDataParallel averages them in every step (call "
            "commopt.attach(ddp_model, optimizer), or train the bare module), or compress_gradients() does (call "
            "remove() on its handle), or all ranks train on the same data.",
        )

    def local_step_skipped(self, count: int) -> None:
        """This rank has not stepped, because of its gradients: the ``count``-th time."""
        if worth_a_line(count):
            logger.warning(
                "%s: rank %d skipped its local step: inf, NaN or a norm above %g in its gradients (%d skipped so far)",
                self.optimizer, self.numbers[self.rank], LARGEST_NORM, count,
            )  # fmt: skip

    def round_skipped(self, ranks: Sequence[int], count: int) -> None:
        """All ranks have skipped a synchronisation, because of parameters of ``ranks``: the ``count``-th."""
        if self.rank == 0 and worth_a_line(count):
            logger.warning(
                "%s: synchronisation skipped on all ranks: inf, NaN or a norm above %g in the parameters of ranks %s "
                "(%d skipped so far). It is tried again after the next step; those ranks need the last good "
                "checkpoint.",
                self.optimizer, LARGEST_NORM, [self.numbers[rank] for rank in ranks], count,
            )  # fmt: skip

    def too_late(
        self, late: Sequence[Tensor], groups: Sequence[dict[str, Any]], when: str, until: str, what_it_does: str
    ) -> None:
        """The parameters ``late``, of ``groups``, have their first gradient after ``when``, and do not move ``until``
        something happens. In a group of their own it would not be too late: that group ``what_it_does`` by itself."""
        new = [p for p in late if self._once(f"too late: {id(p)}")]
        if new:
            logger.warning(
                "%s: %d parameters (%s) have their first gradient after %s; they will not move%s. When such "
                "become trainable, take them out of the 'params' of their group and give them to add_param_group(): "
                "that group %s by itself.",
                self.optimizer, len(new), listed(new, groups), when, until, what_it_does,
            )  # fmt: skip

    def overlap_lost(
        self, blocking: Sequence[Tensor], groups: Sequence[dict[str, Any]], index: int, buckets: int
    ) -> None:
        """The parameters ``blocking``, of ``groups``, keep buckets from ``index`` on from starting in backward."""
        if blocking and self._once("overlap lost"):
            logger.warning(
                "%s: overlap is lost from bucket %d of %d on: %s had no gradient when backward ended, and buckets "
                "start in order. %s.",
                self.optimizer, index, buckets, listed(blocking, groups),
                "Freeze what is never used (requires_grad_(False)) before the optimizer is made"
                if any(p.requires_grad for p in blocking)
                else "It was frozen after the optimizer was made: one that is made now, and loads its state, has no "
                "bucket with it",
            )  # fmt: skip

    def zero_variance(
        self, moves: Mapping[Tensor, bool], state: Mapping[Tensor, Any], groups: Sequence[dict[str, Any]], later: str
    ) -> None:
        """The variance of some parameters, of ``groups``, stands from now on; those with any that is not 0 will move.
        Warns if some had gradients, but all of them 0: they will not. Or if none of them will. ``later`` says what lets
        a variance stand later."""
        if self.rank:
            return
        still = [p for p, any_moves in moves.items() if not any_moves]
        zeros = [p for p in still if state[p]["variance_step"] > 0]
        named = zeros if len(still) < len(moves) else still
        if named:
            logger.warning(
                "%s: the variance of %d of %d parameters is 0 everywhere, and stands from now on: no gradient will "
                "move them (%s). Their gradients so far were 0, or too small for a square. If it was too early, %s; if "
                "they are not to be trained, freeze them (requires_grad_(False)).",
                self.optimizer, len(named), len(moves), listed(named, groups), later,
            )  # fmt: skip

    def freeze_at(self, setting: str, step: Any, beta2: float) -> None:
        """The variance will be frozen after ``step``, or "auto": whether it is one of as many gradients as it averages
        then. ``setting`` is the word for that step, with %d in it."""
        window = round(1 / (1 - beta2))
        if step != "auto" and step < window and self._once("early freeze"):
            logger.warning(
                "%s: %s is less than 1 / (1 - beta2) = %d steps, over which the variance averages: it will "
                "stand as what the first %d gradients make of it, and where that is too small, weights grow while the "
                "loss falls. Take %s or more, a smaller beta2, or \"auto\"",
                self.optimizer, setting % step, window, step, setting % window,
            )  # fmt: skip

    def rarely_updated(
        self, params: Sequence[Tensor], groups: Sequence[dict[str, Any]], enough: int, setting: str
    ) -> None:
        """The variance of ``params`` stands from now on as what fewer than ``enough`` gradients an element have made of
        it; ``setting`` says since when it stands."""
        if params and self.rank == 0 and self._once("rarely updated"):
            logger.warning(
                "%s: the variance stands from now on, and %d parameters (%s) have had fewer than %d gradients an "
                "element, as rows of an embedding do that few batches have: they may be lost by it. Take a larger "
                '%s or "auto", or any optimizer on commopt.compress_gradients(model, commopt.compress.Int8())',
                self.optimizer, len(params), listed(params, groups), enough, setting,
            )  # fmt: skip

    def outsized(self, times: Mapping[Tensor, float], groups: Sequence[dict[str, Any]]) -> None:
        """Gradients of some parameters are so many ``times`` those of the others that they share scales with."""
        if times and self.rank == 0 and self._once("outsized"):
            largest = max(times.values())
            logger.warning(
                "%s: %d parameters (%s) have gradients up to %.0f times as large as those that they share the scale of "
                "their signs with, and will move by about 1/%.0f of what they should. Put them into a parameter "
                "group of their own, or take a compressor with more bits, as compressor=commopt.compress.Int4()",
                self.optimizer, len(times), listed(list(times), groups), largest, largest,
            )  # fmt: skip

    def unsettled(self, step: int, beta2: float, change: float, rare: int, lr_rises: bool, until: str) -> None:
        """The variance has not settled after ``step``: from one window to the next the gradients' squares have changed
        by exp(``change``), or ``rare`` tensors have had few gradients an element. Warns if that is long; ``until`` says
        what goes on until then, and how to end it."""
        is_long = step >= min(LONG, max(SHORT, WINDOWS / (1 - beta2)))
        if is_long and math.isfinite(change) and self._once("long warm-up"):
            factor = math.exp(min(change, 99))
            why = f"the squares of a tensor's gradients have changed by a factor of {factor:.2f} since the last look, "
            why += "1.5 is allowed"
            if lr_rises:
                why = "the learning rate still rises"
            elif rare:
                why = f"elements of {rare} tensors, as the rows of an embedding, have had fewer than 20 gradients each"
            logger.warning(
                "%s: after %d steps the variance has not settled (%s), and %s",
                self.optimizer, step, why, until,
            )  # fmt: skip

    def frozen_too_early(
        self, steps: Sequence[Any], too_long: bool, longer: str, back: str, goes_back: bool, for_good: bool
    ) -> None:
        """Gradients have outgrown a variance that stands since ``steps``, or updates have become ``too_long`` by it;
        ``goes_back``: to one that moves, and maybe ``for_good``. ``longer``: how to set a later step; ``back``: what
        all ranks do."""
        if self.rank or not (goes_back or self._once("frozen too early")):
            return
        which = ", ".join(map(str, dict.fromkeys(steps)))
        what = (
            f"updates have become 2.7 times as long as they were when the variance was frozen (step {which}), by the "
            "noise of compression at this lr, of which scaling='element' makes less"
            if too_long
            else f"gradients have grown so much since the variance was frozen (step {which}) that steps are 1.6 times "
            "as long as they should be, for learning began later"
        )
        follows = (
            back + (", for the rest of the run" if for_good else "")
            if goes_back
            else f'the run may fall back to where it was. Take {longer}, or thaw="always": then {back}'
        )
        logger.warning("%s: %s: %s", self.optimizer, what, follows)

    def unmoved(
        self,
        names: Sequence[str],
        steps: Sequence[Any],
        longer: str,
        back: str,
        goes_back: bool,
    ) -> None:
        """A tenth or more of the elements of the parameters of these ``names``, of what some rank has of them, have
        gradients now, and had none before their variance was frozen (``steps``). The rest as in
        :meth:`frozen_too_early`."""
        if self.rank or not (goes_back or self._once("unmoved")):
            return
        which = ", ".join(map(str, dict.fromkeys(steps)))
        whose = f"{len(names)} parameters ({first_of(names)})"
        follows = back if goes_back else f'nothing moves them. Take {longer}, or thaw="always": then {back}'
        logger.warning(
            "%s: a tenth or more of the elements of %s have gradients now, and had none before the variance was "
            "frozen (step %s): %s",
            self.optimizer, whose, which, follows,
        )  # fmt: skip

    def unmoved_for_good(self, names: Sequence[str]) -> None:
        """Going back has not helped elements of the parameters of these ``names``, which still have gradients that move
        nothing."""
        if self.rank == 0:
            logger.warning(
                "%s: elements of %d parameters (%s) still have gradients, and a variance of 0, though all ranks went "
                "back to where it moves: their gradients cancel among the ranks, or are too small to be sent. Nothing "
                "moves them; no more is done about that, and such elements that come now are not looked for",
                self.optimizer, len(names), first_of(names),
            )  # fmt: skip

    def new_phase(self, old: str, new: str, step: int, groups: Sequence[int] | None, sends: str) -> None:
        """A phase has ended after ``step``, for the parameter groups given, or for all; the new one ``sends`` so."""
        if self.rank == 0:
            which = "" if groups is None else f" for parameter groups {list(groups)}"
            # WARNING, because that is what a user sees who has set up no logging
            logger.warning(
                "%s: %s ended after step %d%s, %s from now on with %s",
                self.optimizer, old, step, which, new, sends,
            )  # fmt: skip

    def _tell_of_equal(self, why: str | None, guess: str) -> None:
        """Says once that gradients came equal: ``why``, if that is known, or what it may be."""
        if not self._once("equal gradients"):
            return
        if why is not None:
            guess = (
                "the gradients are already equal on all ranks: a DistributedDataParallel around them averages them in "
                f'every step, so that nothing is saved (comm_stats() counts it as "ddp"). It is not attached: {why}'
            )
        logger.warning("%s: %s", self.optimizer, guess)

    def _once(self, what: str) -> bool:
        """True if ``what`` is to be said now: once, on rank 0."""
        new = what not in self._said
        self._said.add(what)
        return new and self.rank == 0


def by_a_door() -> str:
    """Hint at the door that does by itself, in a framework that this program uses, what a warning asks for; "" if there
    is none, or if that is imported already."""
    for framework, door, name, line in _DOORS:
        if framework in sys.modules and f"commopt.integrations.{door}" not in sys.modules:
            return f" In {name} that is done by {line} of commopt.integrations.{door}."
    return ""


def tell_if_never_compressed(optimizer: str, run: Mapping[str, Any]) -> None:
    """At the end of a run: that its warm-up has not ended, if that had ``run["enough"]`` steps or more; nothing where
    the run goes on (:meth:`~commopt.optim.CommOptimizer.to_be_continued`)."""
    if not run.get("goes_on") and not run["compressed"] and run["warmup"] >= run["enough"]:
        logger.warning(
            "%s: the run ends after %d steps, all of them of its warm-up, which freeze_step=%r has not ended. A fifth "
            "of the steps of a run is usual",
            optimizer, run["warmup"], run["freeze_step"],
        )  # fmt: skip


def tell_if_never_settled(optimizer: str, run: Mapping[str, Any]) -> None:
    """At the end of a run of 0/1 Adam: that it has taken no local steps, if it was still ``run["waiting"]`` for the
    variance, and that for ``run["enough"]`` steps or more; nothing where the run goes on."""
    if not run.get("goes_on") and run["waiting"] and run["waited"] >= run["enough"]:
        logger.warning(
            "%s: the run ends after %d steps in which ranks sent something at each: the variance has not settled, as "
            "VariancePolicy(stop='auto') waits for. VariancePolicy(stop=<an int>) and a SyncPolicy that fits the run "
            "let local steps begin",
            optimizer, run["waited"],
        )  # fmt: skip


def listed(params: Sequence[Tensor], groups: Sequence[dict[str, Any]]) -> str:
    """The names of the first three of ``params``, of ``groups``."""
    names = names_of(groups)
    return first_of([names[p] for p in params])


def first_of(names: Sequence[str]) -> str:
    """The first three of ``names``."""
    return ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")


def names_of(groups: Sequence[dict[str, Any]]) -> dict[Tensor, str]:
    """A name for each parameter: its own, where the optimizer was given (name, parameter) pairs, or its shape."""
    out = {p: f"a parameter of shape {tuple(p.shape)}" for group in groups for p in group["params"]}
    for group in groups:
        out.update(zip(group["params"], group.get("param_names", ())))
    return out


def worth_a_line(n: int) -> bool:
    """True if the n-th of something is logged: the 1st, 2nd, 4th, 8th ... A run gone bad must not fill the disk."""
    return n & (n - 1) == 0
