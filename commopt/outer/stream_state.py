"""State of fragments in flight that is saved, and loaded: what each rank has sent. Functions of an outer optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from commopt.outer.means import Entry
from commopt.outer.streaming import STILL, Streaming, put
from commopt.sharding import cut, local

if TYPE_CHECKING:
    from commopt.outer.base import OuterOptimizer

SENT = "sent_pseudo_gradient"
"""Name of what a rank has sent of a parameter in flight."""


def keep_sent(optimizer: OuterOptimizer, entries: Sequence[Entry], flats: Sequence[Tensor]) -> None:
    """Keeps what is to be sent of some buckets."""
    for (bucket, _), flat in zip(entries, flats):
        optimizer.sent.update(zip(bucket.params, bucket.views(flat)))


def forget_sent(optimizer: OuterOptimizer, entries: Sequence[Entry]) -> None:
    """Forgets it: it is in flight."""
    for bucket, _ in entries:
        for p in bucket.params:
            optimizer.sent.pop(p, None)


def what_is_sent(optimizer: OuterOptimizer) -> dict[Tensor, Tensor]:
    """Values that this rank has sent of each parameter that is in flight."""
    out = dict(optimizer.sent)
    for flight in optimizer.flights:
        for (bucket, _), flat in zip(flight.means.entries, flight.sent):
            out.update(zip(bucket.params, bucket.views(flat)))
    return out


def take_over(optimizer: OuterOptimizer, entries: Mapping[Any, Mapping[str, Any]]) -> None:
    """Takes over what was in flight when the state with these ``entries`` was saved, in place of what is."""
    optimizer.flights.drop_all()
    groups, optimizer.sent = optimizer.group_of(), {}
    for bucket in optimizer.buckets:
        for p in bucket.params:
            if SENT in entries.get(p, {}) and groups[id(p)]["sent_steps"][bucket.fragment]:
                optimizer.sent[p] = cut(entries[p][SENT], p).reshape(local(p).shape).to(bucket.device, copy=True)


def take_over_own(optimizer: OuterOptimizer, part: Mapping[str, Any]) -> None:
    """Takes over from a rank's own ``part`` what was frozen when it sent the fragments in flight: parameter groups are
    those of one rank, and another may have frozen others."""
    for group, still in zip(optimizer.param_groups, part.get(STILL, ())):
        for fragment, steps in enumerate(group.get("sent_steps", ())):
            if steps:
                put(group, fragment, **{STILL: still[fragment]})


def check_loaded(optimizer: OuterOptimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError if parameter ``groups`` are of a state in the middle of a cycle that was streamed otherwise, or
    have a period that is too short for the fragments here."""
    kind = None if optimizer.streaming is None else optimizer.streaming.kind
    for group in groups:
        if optimizer.streaming is not None and "period" in group:
            optimizer.streaming.check_period(group["period"])
        theirs = group.get("streaming")
        if theirs == kind or theirs is None or not (any(group["fragment_steps"]) or any(group["sent_steps"])):
            continue
        raise ValueError(
            f"the loaded state was streamed in {theirs}, and saved in the middle of that; here it is "
            f"{kind or 'not streamed'}: call synchronize() before it is saved"
        )


def complete(optimizer: OuterOptimizer, given: Sequence[Mapping[str, Any]]) -> None:
    """Sets where the groups stand, if those ``given`` were not streamed, or otherwise: all fragments alike."""
    streaming = optimizer.streaming
    for group, theirs in zip(optimizer.param_groups, given):
        if theirs.get("streaming") == (None if streaming is None else streaming.kind):
            continue
        for key in set(group) & set(Streaming().position()):
            del group[key]
        if streaming is not None:
            group.update(streaming.position())
            for p in range(streaming.fragments):
                steps, lr = group["round_step"], group["round_lr"]
                put(group, p, fragment_steps=steps, fragment_lr=lr, fragment_rounds=group["rounds"])
