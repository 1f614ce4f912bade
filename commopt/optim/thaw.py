"""Back where the variance moves, if it was frozen too early: once, and a second time for the rest of the run.

A frozen v is right as long as gradients stay what they were. Where learning begins only then, those of some tensors
grow a thousandfold, the steps lr m / sqrt(v) of these grow with them, and the run falls back to where it was, or worse.
What a tensor's steps have become shows in its gradients, long before the loss does. In the first 10 steps after the
switch, and then in every 5th, each rank takes

    a = mean over the tensors of log(||g_i||^2 / ||v||_1),  + min(0, 2 log(lr / lr at the switch))

of its own gradients (clipped as they were), and tells it in the agreement that each step begins with: no message of its
own. The mean over the ranks is smoothed, A = (A + a) / 2 with an a that is within 1 of A, so that one batch alone never
decides, and never hides what comes after it; and A0 is the least of the first three. When

    A - A0 > 1,    that is when the steps are 1.6 times as long as they were meant to be,

all ranks go back to the warm-up (in 0/1 Adam to refreshes, T_v from its beginning), after the step in which they have
heard of it, and the log says so:

    v = max(v, m^2), with as much weight as 1 / (1-b1) updates;   m stays;   residuals are 0

* max(v, m^2): |m| / sqrt(v) is at most 1 at once, so that no step is longer than lr while v learns. m^2 is the one
  bound that is there at no cost, and the same on all ranks.
* The count of updates, by which v is corrected for having begun at 0, is set back, so that what was wrong is forgotten
  in as many steps as m forgets. 1-bit LAMB does not correct, and keeps its count.
* Residuals are of a momentum that had run away: sent later they would bring it back.
* A0 takes care of what is no growth: gradients of one rank are noisier than the mean, whose squares v has.
* What has grown no faster than lr fell since is no danger; an lr that rises (a restart) is meant to lengthen steps.
* What has gone back warms up by the same rule as at first, so that it compresses again. Should that be too early as
  well, it goes back once more, and for the rest of the run: a rule that was wrong twice is not asked again. Of the runs
  in benchmarks/freeze.json none has gone back twice.
* A tensor that a rank lacks a gradient of, or whose gradient is 0 throughout, is left out, and a rank that lacks all of
  them; so is a group whose lr is 0, as long as it is.
* In 0/1 Adam only rounds can tell: with local steps between them a look is the first round after every 5th step.

1-bit LAMB has a second way to lose a run: signs make noise, noisy steps make larger gradients, and with a trust ratio
that stands nothing holds the steps. Gradients alone tell too late, as lr falls meanwhile. So there, between the looks,
in every 5th step from the 11th after the switch on, each rank tells how long updates have become instead,

    b = mean over the tensors of log(mean over the elements of (m / (sqrt(v) + eps))^2)

of what it has of m and v. It is the same on all ranks, unless a replica has gone wrong or tensors are cut; the mean
over the ranks is in any case. Smoothed like a it is B; B0 is what B has come to after 20 steps, by when the noise is
what it will be, and B - B0 > 2 is too much: updates are 2.7 times as long. Of six runs on a BERT the four good ones
stay below 1; the others pass 2 before they are lost.

At the looks ranks tell, too, whether elements have gradients that do not move them, since there were none when v was
frozen (:mod:`commopt.optim.unmoved`): a third way, by which all go back after it has been told three times in a row. It
is counted apart, up to 8: what has had no gradient yet is no error of the rule. Where going back has not helped, as the
gradients of ranks cancel, it is not done again.

The key of a group that says when v is frozen (``freeze_step``, ``variance_stop``) is "auto" again then, and ``thawed``
the step. Whether it goes back is ``thaw`` of the group:

    "auto"      if "auto" has chosen the step; a number that the user has given stands, and a warning is all: it says
                what a run sends, and who gives one may have reasons
    "always"    whoever has chosen it
    "never"     a warning is all
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from commopt.compress import Compressor
from commopt.optim import settling, unmoved
from commopt.state.host import numbers_of, square_sums
from commopt.state.state_bucket import StateBucket

if TYPE_CHECKING:
    from commopt.step.base import CommOptimizer

EVERY = 5
"""Steps from one look to the next."""
EARLY = 10
"""Steps after the switch in which all are looks."""
FIRST = 3
"""Looks of which A0 is the least."""
TOO_MUCH = 1.0
"""The most that A - A0 may be."""
JUMP = 1.0
"""The most by which a counts as other than A, and b as other than B."""
BETWEEN = 2
"""Steps from a look to that at the length of updates."""
LONG = 20
"""Steps after the switch by which updates are as long as they will be."""
TOO_LONG = 2.0
"""The most that B - B0 may be."""
TIMES = 2
"""Times that a group goes back at most because gradients or updates have grown: once to warm up again, and once to
stay. Each time all ranks do, and log it."""

DEFAULTS = {
    "watch_looks": 0,
    "watch_base": 0.0,
    "watch_level": 0.0,
    "watch_lr": 0.0,
    "watch_lengths": 0,
    "watch_length_base": 0.0,
    "watch_length": 0.0,
    "watch_unmoved": 0,
    "chosen": False,
    "late": 0,
    "thawed": 0,
    "thaws": 0,
}
"""Of a group: looks since the switch, A0, A, lr at the switch, or where it was above 0 for the first time after it (0:
it is not watched yet), looks at b, B0, B, looks in a row that have found elements which nothing moves (-1: going back
has not helped them), whether "auto" has chosen the step, how often it has gone back for such elements, the step after
which it has last gone back (0: it has not), and how often it has for what has grown."""


def defaults(when: Any) -> dict[str, Any]:
    """Defaults of parameter groups whose variance may stand by itself, and goes back ``when``."""
    return {"thaw": when, **settling.DEFAULTS, **DEFAULTS}


def is_look(group: dict[str, Any], key: str) -> bool:
    """True if ranks look at the gradients of the next step of ``group``, in which they communicate: its variance stands
    since the step ``key``, and since they last did so they have taken ``local_steps``, if there are such."""
    step = group["step"] + 1
    last = step - 1 - group.get("local_steps", 0)
    return step // EVERY > last // EVERY or bool(step <= group[key] + EARLY)


def is_look_at_length(group: dict[str, Any], key: str) -> bool:
    """True if in the next step of ``group`` the ranks tell how long its updates have become."""
    step = group["step"] + 1
    return bool(step > group[key] + EARLY and step % EVERY == BETWEEN)


def begin(group: dict[str, Any], chosen: bool) -> None:
    """Begins to watch ``group``, whose variance stands from now on, if its lr is above 0; ``chosen``: because "auto"
    has it so."""
    group.update(watch_looks=0, watch_base=0.0, watch_level=0.0, watch_lr=float(group["lr"]), chosen=chosen)
    group.update(watch_lengths=0, watch_length_base=0.0, watch_length=0.0, watch_unmoved=0)


def goes_back(group: dict[str, Any]) -> bool:
    """True if ``group`` would go back to the warm-up."""
    return group["thaw"] == "always" or (group["thaw"] == "auto" and bool(group["chosen"]))


def may_help(group: dict[str, Any]) -> bool:
    """True if ``group`` would go back for elements that have gradients now, and had none."""
    return goes_back(group) and bool(group["late"] < unmoved.TIMES)


def is_watched(group: dict[str, Any]) -> bool:
    """True if ``group``, whose variance stands, is watched."""
    return bool(group["watch_lr"] > 0)


class Words(NamedTuple):
    """Words of an optimizer for what it does, for the log."""

    key: str
    """Of a group: the step since which its variance stands, or "auto"."""
    until: str
    """Clause on what goes on while it moves, and how to end that."""
    longer: str
    """Clause on how a user sets a later step."""
    back: str
    """Clause on what all ranks do when they go back."""


class FrozenVariance:
    """Says of the groups of an optimizer when their variance stands, and when it moves again. The optimizer calls
    :meth:`growth` for the report of a step that all ranks agree on, :meth:`heard` with what they have told, and after
    every step :meth:`go_back` and :meth:`stop_where_settled`.

    Args:
        words: what the optimizer calls it; its buckets have ``exp_avg`` and ``exp_avg_sq``.
        corrects_bias: whether v is used over 1 - b2^t.
        measures_updates: whether it looks at b, too.
        sent_by: what gradients are sent by while v moves; None if they are exact.
        kept_back: gradients of an element that add up before it sends them, where v is 0; 1 without error feedback.
    """

    def __init__(
        self,
        words: Words,
        corrects_bias: bool = True,
        measures_updates: bool = False,
        sent_by: Compressor | None = None,
        kept_back: float = unmoved.KEPT_BACK,
    ) -> None:
        self.words, self.sent_by, self.kept_back = words, sent_by, kept_back
        self.corrects_bias, self.measures_updates = corrects_bias, measures_updates
        self.looked: list[dict[str, Any]] = []  # groups, in this step
        self.at_length = False
        self.unmoved: list[tuple[Tensor, bool]] = []  # of which this rank has gradients where v is 0; :func:`may_help`
        self.heard_unmoved = 0  # the kinds of such that some rank has
        self.reached: list[dict[str, Any]] = []  # groups that have had them for long enough, or still
        self.mean = 0.0

    def growth(self, optimizer: CommOptimizer, frozen: Sequence[dict[str, Any]], unscale: float) -> float:
        """a of this rank, of the ``frozen`` groups in which ranks communicate in the next step, by gradients times
        ``unscale``; or b, where they are looked at in turn. NaN if that is no look at them, or if it has nothing of
        theirs."""
        watched, key = [group for group in frozen if is_watched(group)], self.words.key
        self.at_length = self.measures_updates and any(is_look_at_length(group, key) for group in watched)
        self.looked = watched if self.at_length or any(is_look(group, key) for group in watched) else []
        if not self.looked:
            self.unmoved = []
            return math.nan
        buckets = optimizer.compressed_buckets(self.looked)
        self.unmoved = [] if self.at_length else unmoved_of(buckets, unscale, self.sent_by, self.kept_back)
        return length(buckets) if self.at_length else growth(buckets, unscale)

    def unmoved_kinds(self) -> int:
        """1 if this rank has found elements that nothing moves in groups that may go back for them, and 2 if in others,
        which bring nobody back."""
        return sum({1 if helps else 2 for _, helps in self.unmoved})

    def heard(self, mean: float, kinds: int, clip: float) -> None:
        """Takes the mean of a, or b, over the ranks that have told one, NaN if there are none, and the ``kinds`` of
        unmoved elements that some have; with neither it was no look. Gradients are clipped by the factor ``clip``."""
        self.mean = mean if self.at_length else mean + 2 * math.log(clip)
        self.heard_unmoved = kinds
        if math.isnan(mean) and not kinds:
            self.looked = []

    def go_back(self, optimizer: CommOptimizer, frozen: Sequence[dict[str, Any]]) -> None:
        """Lets the variance of those of the ``frozen`` groups move again whose gradients have outgrown it, whose
        updates have become too long by it, or of which it moves nothing that has gradients now."""
        for group in frozen:
            if not is_watched(group):
                begin(group, group["chosen"])
        watched, self.looked = self.looked, []
        late, self.unmoved = self.unmoved, []
        if not watched or (why := self._why(watched)) is None:
            return
        if why == "unmoved":
            self._let_move(optimizer, watched, late)
            return
        back = [group for group in watched if goes_back(group)]
        for group in watched:
            begin(group, group["chosen"])
        for_good = any(group["thaws"] + 1 == TIMES for group in back)
        stood, words = [group[self.words.key] for group in watched], self.words
        tell = optimizer._diagnostics.frozen_too_early
        tell(stood, why == "long", words.longer, words.back, bool(back), for_good)
        self._thaw(optimizer, back, "thaws")

    def _let_move(
        self, optimizer: CommOptimizer, watched: Sequence[dict[str, Any]], late: Sequence[tuple[Tensor, bool]]
    ) -> None:
        """Lets the groups go back for which that may help elements that have gradients now; warns of the others."""
        words, tell = self.words, optimizer._diagnostics.unmoved
        reached = [group for group in self.reached if group["watch_unmoved"] != unmoved.NOT_HELPED]
        if len(reached) < len(self.reached):
            optimizer._diagnostics.unmoved_for_good(unmoved.names(optimizer, [p for p, _ in late]))
        helped = [group for group in watched if may_help(group)] if any(map(may_help, reached)) else []
        for groups, helps in ((helped, True), ([g for g in reached if not may_help(g)], False)):
            if groups:
                names = unmoved.names(optimizer, [p for p, kind in late if kind == helps])
                tell(names, [group[words.key] for group in groups], words.longer, words.back, helps)
        for group in helped:
            begin(group, group["chosen"])
        self._thaw(optimizer, helped, "late")

    def _thaw(self, optimizer: CommOptimizer, back: Sequence[dict[str, Any]], why: str) -> None:
        """Lets the variance of the groups that go ``back`` move, and counts that as ``why``."""
        for bucket, group in optimizer.compressed_buckets(back):
            thaw(bucket, group["betas"], self.corrects_bias and group.get("bias_correction", True))
        for group in back:
            group.update({self.words.key: "auto", "thawed": group["step"], why: group[why] + 1})
            group.update(watch_lr=0.0, look_trend=0.0, look_lr=0.0)  # what has grown need not be waited for

    def _why(self, watched: Sequence[dict[str, Any]]) -> Literal["long", "grown", "unmoved"] | None:
        """Why the variance of the groups that are ``watched`` is to move again, by what was heard; None if it is not.
        They remember what was heard."""
        if self.at_length:
            return "long" if are_too_long(watched, self.words.key, self.mean) else None
        kinds = [1 if may_help(group) else 2 for group in watched]
        self.reached = unmoved.count(watched, [bool(kind & self.heard_unmoved) for kind in kinds])
        if not math.isnan(self.mean) and has_outgrown(watched, self.mean):
            return "grown"
        return "unmoved" if self.reached else None

    def stop_where_settled(self, optimizer: CommOptimizer, moving: Sequence[dict[str, Any]]) -> None:
        """Lets the variance of those of the ``moving`` groups stand in which it has settled; not of one that has gone
        back for the rest of the run. What was watched is forgotten: a user may have set a later step since."""
        for group in moving:
            group.update(watch_lr=0.0, chosen=False)
        may = [group for group in moving if group["thaws"] < TIMES]
        for group in settling.stop_where_settled(optimizer, may, self.words.key, self.words.until):
            begin(group, chosen=True)


def until_it_goes_back(group: dict[str, Any], words: Words) -> str:
    """Clause on when what has its first gradient now moves, for the log; "" if it never does."""
    looks = f"it is still so in {unmoved.LOOKS} looks, within {unmoved.LOOKS * EVERY} steps"
    return f" until {words.back}, which they do if {looks}" if goes_back(group) else ""


def growth(watched: Sequence[tuple[StateBucket, dict[str, Any]]], scale: float) -> float:
    """a of this rank; NaN if it has no gradient of what is ``watched`` that moves anything. ``scale`` is the factor of
    its gradients."""
    total, count = 0.0, 0
    rates = {id(group): float(group["lr"]) for _, group in watched}
    moved = [(bucket, group) for bucket, group in watched if rates[id(group)] != 0]
    grads = [bucket.gradient(i) for bucket, _ in moved for i in range(len(bucket.params))]
    squares = iter(square_sums([g for g in grads if g is not None]))
    for bucket, group in moved:
        variances = _standing(bucket, group["betas"][1]).sums
        lr = 2 * _log(rates[id(group)] / group["watch_lr"])
        factor = (scale * bucket.factor) ** 2
        for i, p in enumerate(bucket.params):
            square = 0.0 if p.grad is None else next(squares)
            floor = bucket.shapes[i].numel() * group["eps"] ** 2  # below it steps have no length
            if variances[i] > 0 and square > 0:
                total += _log((square * factor + floor) / (variances[i] + floor)) + min(0.0, lr)
                count += 1
    return total / count if count else math.nan


def unmoved_of(
    watched: Sequence[tuple[StateBucket, dict[str, Any]]], scale: float, sent_by: Compressor | None, kept_back: float
) -> list[tuple[Tensor, bool]]:
    """Parameters of what is ``watched`` that have gradients of this rank which move nothing, as v is 0, each with
    :func:`may_help` of its group; see :func:`commopt.optim.unmoved.unmoved`."""
    found: list[tuple[Tensor, bool]] = []
    for helps in (True, False):
        shares = [
            share
            for bucket, group in watched
            if float(group["lr"]) != 0 and may_help(group) == helps
            for share in unmoved.unmoved(
                bucket, _standing(bucket, group["betas"][1]).with_zeros, scale, goes_back(group), sent_by, kept_back
            )
        ]
        found += [(p, helps) for p in unmoved.enough(shares)]
    return found


def has_outgrown(groups: Sequence[dict[str, Any]], mean: float) -> bool:
    """Takes the ``mean`` of a over the ranks into what ``groups`` remember, which are watched together. Returns whether
    it has become too much."""
    looks = {group["watch_looks"] for group in groups}
    if len(looks) > 1:  # one has come to them: what a is the mean of is another
        for group in groups:
            group["watch_looks"] = 0
    first = groups[0]
    n = first["watch_looks"] + 1
    level = _smoothed(n, first["watch_level"], mean)
    base = level if n == 1 else first["watch_base"]
    base = min(base, level) if n <= FIRST else base
    for group in groups:
        group.update(watch_looks=n, watch_base=base, watch_level=level)
    return level - base > TOO_MUCH


def length(watched: Sequence[tuple[StateBucket, dict[str, Any]]]) -> float:
    """b of what this rank has of the tensors that are ``watched``; NaN if that is nothing."""
    total, count = 0.0, 0
    for bucket, group in watched:
        pairs = zip(bucket.tensors("exp_avg"), bucket.tensors("exp_avg_sq"))
        squares = square_sums([m / (v.sqrt() + group["eps"]) for m, v in pairs])
        for square, x in zip(squares, bucket.values):
            if square > 0:
                total += _log(square / x.numel())
                count += 1
    return total / count if count else math.nan


def _smoothed(n: int, last: float, now: float) -> float:
    """A, or B, after the ``n``-th look, which has found a, or b, to be ``now``."""
    return now if n == 1 else (last + min(max(now, last - JUMP), last + JUMP)) / 2


def are_too_long(groups: Sequence[dict[str, Any]], key: str, mean: float) -> bool:
    """Takes the ``mean`` of b over the ranks into what ``groups`` remember, which are watched together. Returns whether
    it has become too much."""
    if len({group["watch_lengths"] for group in groups}) > 1:  # one has come to them
        for group in groups:
            group["watch_lengths"] = 0
    first = groups[0]
    n = first["watch_lengths"] + 1
    level = _smoothed(n, first["watch_length"], mean)
    settled = n > 1 and first["step"] > max(group[key] for group in groups) + LONG
    base = first["watch_length_base"] if settled else level
    for group in groups:
        group.update(watch_lengths=n, watch_length_base=base, watch_length=level)
    return level - base > TOO_LONG


def thaw(bucket: StateBucket, betas: tuple[float, float], corrects_bias: bool) -> None:
    """Lets the variance of ``bucket`` move again. Local: all ranks do the same to what they have in common."""
    (beta1, beta2), counts = betas, bucket.numbers["variance_step"]
    steps = max(1, round(1 / (1 - beta1)))
    for i, (v, m) in enumerate(zip(bucket.tensors("exp_avg_sq"), bucket.tensors("exp_avg"))):
        n = int(counts[i])
        after = min(n, steps) if corrects_bias else n
        corrected, weight = (1 - beta2**n, 1 - beta2**after) if corrects_bias and n else (1.0, 1.0)
        v.mul_(weight / corrected)
        torch.maximum(v, m.square().mul_(weight), out=v)
        counts[i] = after
    assert bucket.feedback is not None
    bucket.feedback.clear()
    bucket.active = None
    settling.forget(bucket)


class Standing(NamedTuple):
    """What is taken once of a variance that stands."""

    sums: list[float]
    """Of each parameter v over its bias correction, of the piece that this rank has."""
    with_zeros: list[int]
    """The indices of those with elements whose v is 0."""
    beta2: float
    """Of the bias correction."""


def _standing(bucket: StateBucket, beta2: float) -> Standing:
    """Taken anew when v has moved, and with it the mask of what is active; and for another b2."""
    if bucket.standing is None or bucket.standing[0] is not bucket.active or bucket.standing[1].beta2 != beta2:
        counts, variances = bucket.numbers["variance_step"].tolist(), bucket.tensors("exp_avg_sq")
        sums = settling.norms_of(variances)
        found = [v / (1 - beta2**n) if n else 0.0 for v, n in zip(sums, counts)]
        zeros = [n < v.numel() for n, v in zip(numbers_of([v.count_nonzero() for v in variances]), variances)]
        standing = Standing(found, [i for i, some in enumerate(zeros) if some], beta2)
        if bucket.active is None:
            return standing
        bucket.standing = (bucket.active, standing)
    return bucket.standing[1]


def _log(x: float) -> float:
    return math.log(max(x, 1e-30))
