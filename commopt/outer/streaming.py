"""Streaming: the parameters in fragments, each with a round of its own (Streaming DiLoCo, arXiv 2501.18512).

Read first: tests/oracle_streaming.py, the same on plain lists of floats.

    period H, P fragments, delay d; x^p is fragment p of the model, p = 1 ... P
    every H steps, at step p H / P:  D_r = anchor^p - x_r^p;  start D = mean_r D_r, and go on training
    d steps later:                   anchor^p <- outer_step(anchor^p, D);  x_r^p <- merge(x_r^p, anchor^p)

What is sent in H steps is what one round sends, in P parts, while the ranks train: the network needs a P-th of the
bandwidth at any time, and d steps may pass before somebody waits. Merges, with x_r as it is then:

    mix        x_r <- alpha x_r + (1 - alpha) anchor                    Streaming DiLoCo
    corrected  x_r <- anchor + (x_r - y_r),  y_r as it was when sent    LOSCAR-SGD, arXiv 2605.20866; keeps the d steps
    eager      at each round t, and not d steps later: D~_r = (D_r(t) - D_r(t-1)) / R + D(t-1), the rank's own share at
               once, those of the others a round late;  anchor_r <- outer_step(anchor_r, D~_r);  x_r <- anchor_r
                                                                        Eager updates, arXiv 2502.12996

Where this differs from the papers:

* It is an option of any outer step on any base, with any compressor; the paper has DiLoCo, and 4-bit floats.
* The first cycle is shorter for all fragments but the last: fragment p has had p H / P steps then.
* Fragments are not layers, which an optimizer does not know, but buckets: runs of parameters. They are dealt out in
  their order, each to the fragment that has the fewest bytes so far. Of equal buckets that is the paper's strided
  pattern, which it finds slightly better than runs of layers; of others, fragments are about as large as each
  other, and the largest takes longest to send.
* With alpha = 1/2 half of the d steps is given up, as in the paper; "corrected" gives up nothing, and is the default.
* Eager: with a compressor the others' share is what came of it, and the own one is exact. D_r(-1) = D(-1) = 0. A
  parameter that all ranks have frozen is one value on all of them from the next round on (:mod:`.freezing`).
  Anchors and outer momenta are each rank's own then. ``synchronize()`` makes them one: an outer step of each rank with
  what it lacks of the others, D(t-1) - D_r(t-1) / R; the means of anchors and momenta; then one of all with D(t).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from commopt.agreement import checks

Merge = Literal["mix", "corrected", "eager"]
Group = dict[str, Any]

FROZEN = "frozen_alike"
"""Name, in a parameter group, of the numbers of those that all ranks have frozen: :mod:`.freezing`."""
JOINED = "joined_in_flight"
"""Name, in a parameter group, of the numbers of those that have become trainable while the fragment that they are in
was in flight, so that nothing of them was sent."""
STILL = "frozen_when_sent"
"""Name, in a parameter group and in a rank's own part, of the numbers of those that this rank had frozen when each
fragment was sent; None where that is not known, in a state from before it was saved."""
OF_A_PART = (FROZEN, JOINED, STILL)
"""What each part of a model has for itself."""


@dataclass(frozen=True)
class Streaming:
    """Settings of an outer optimizer that sends its parameters in fragments, while training goes on.

    Args:
        fragments: P, >= 1; the model has at least as many parameters, and a period as many steps.
        delay: d, local steps from sending to merging, >= 0 and less than the period; 0 waits for each fragment. None is
            1. With ``merge="eager"`` it is None: a mean is waited for when the fragment's next round ends.
        merge: "corrected", "mix" or "eager"; see the module's docstring.
        alpha: of ``merge="mix"``, in [0, 1]: how much a rank keeps of its own. None is 0.5, as in the paper; with
            ``delay=0``, where nothing was done meanwhile, 0.

    Raises:
        ValueError: for a value out of range, or one that the merge has no use for.
    """

    fragments: int = 4
    delay: int | None = None
    merge: Merge = "corrected"
    alpha: float | None = None

    def __post_init__(self) -> None:
        checks.check_int("fragments", self.fragments, 1)
        if self.merge not in ("mix", "corrected", "eager"):
            raise ValueError(f"merge must be 'mix', 'corrected' or 'eager', got {self.merge!r}")
        if self.delay is not None:
            checks.check_int("delay", self.delay, 0)
            if self.is_eager:
                raise ValueError(f"delay must be None with merge='eager', which waits a whole period; got {self.delay}")
        if self.alpha is None:
            return
        if self.merge != "mix":
            raise ValueError(f"alpha={self.alpha!r} is of merge='mix'; with merge={self.merge!r} it must be None")
        if not checks.is_number(self.alpha) or not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha must be a number in [0, 1], got {self.alpha!r}")
        if self.delay == 0 and self.alpha != 0:
            raise ValueError(f"alpha must be 0 with delay=0, where no steps were taken meanwhile; got {self.alpha!r}")

    @property
    def is_eager(self) -> bool:
        return self.merge == "eager"

    @property
    def waits(self) -> bool:
        """True if each fragment is waited for when it is sent."""
        return self.delay == 0

    @property
    def steps(self) -> int:
        """The delay, of merges that have one."""
        return 1 if self.delay is None else self.delay

    @property
    def kept(self) -> float:
        """alpha."""
        return 0.5 if self.alpha is None else self.alpha

    @property
    def kind(self) -> str:
        """Settings of this that must be the same where a state is loaded in the middle of a cycle."""
        return f"{self.fragments} fragments{', eager' if self.is_eager else ''}"

    def end_of(self, fragment: int, period: int) -> int:
        """After how many local steps of a cycle the round of ``fragment`` ends, 0 being the first."""
        return max(1, (fragment + 1) * period // self.fragments)

    def position(self) -> Group:
        """Position of a parameter group: the next fragment to send; whether one was sent since all replicas were
        equal; and of each fragment the local steps of its round so far, the sum of their learning rates, how many
        rounds there were, the sum of squares of its last mean if it was compressed, and steps and rates of what is in
        flight, 0 if nothing is, and from how many replicas; and where fragments are merged eagerly, the numbers of the
        parameters that all ranks have frozen, as far as they know; of those that nothing is in flight of; and for each
        fragment of those that were frozen when it was sent."""
        none, nothing = (0,) * self.fragments, (0.0,) * self.fragments
        return {
            "streaming": self.kind, "fragment": 0, "started": False, "fragment_steps": none, "fragment_lr": nothing,
            "fragment_rounds": none, "fragment_squares": nothing, "sent_steps": none, "sent_lr": nothing,
            "sent_copies": none, FROZEN: (), JOINED: (), STILL: (None,) * self.fragments,
        }  # fmt: skip

    def check_period(self, period: int) -> None:
        """Raises ValueError if a cycle is too short."""
        if period < self.fragments:
            raise ValueError(f"period must be at least the number of fragments, {self.fragments}, got {period}")
        if not self.is_eager and self.steps >= period:
            raise ValueError(f"delay must be less than the period, {period}, got {self.steps}")


def check_streaming(value: object) -> None:
    """Raises ValueError if ``value`` is neither None nor a :class:`Streaming`."""
    if value is not None and not isinstance(value, Streaming):
        raise ValueError(f"streaming must be None or a commopt.Streaming such as Streaming(fragments=4), got {value!r}")


def put(group: Group, fragment: int, **values: Any) -> None:
    """Sets numbers of one fragment in a parameter group."""
    for name, value in values.items():
        now = group[name]
        group[name] = (*now[:fragment], value, *now[fragment + 1 :])


def count_step(group: Group, lr: float) -> None:
    """Counts a local step at the learning rate ``lr``."""
    group["fragment_steps"] = tuple(steps + 1 for steps in group["fragment_steps"])
    group["fragment_lr"] = tuple(total + lr for total in group["fragment_lr"])


def end_fragment(group: Group, fragment: int, streaming: Streaming) -> None:
    """Counts that a fragment was sent: the next one is due, and behind the last one a cycle ends."""
    group["fragment"] = (fragment + 1) % streaming.fragments
    if group["fragment"] == 0:
        group.update(round_step=0, round_lr=0.0, rounds=group["rounds"] + 1)


def in_flight(group: Group) -> list[int]:
    """The fragments that are in flight, oldest first."""
    sent = [p for p, steps in enumerate(group["sent_steps"]) if steps]
    order = {p: (p - group["fragment"]) % len(group["sent_steps"]) for p in sent}
    return sorted(sent, key=lambda p: (-group["fragment_steps"][p], order[p]))


def came_from(group: Group) -> int:
    """From how many replicas came what is in flight, at most; 0 if nothing is."""
    return max((n for n, steps in zip(group.get("sent_copies", ()), group.get("sent_steps", ())) if steps), default=0)
