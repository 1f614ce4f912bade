"""Steps of a streaming optimizer: each sends the fragment whose round ends, and merges what has come back.
Functions of an outer optimizer; :mod:`commopt.outer.streaming` says what is computed.

A fragment in flight is counted in the groups (``sent_steps``), and what this rank has sent of it is saved with the
rank's own. A copy, or a run that is resumed, sends it once more with its first step: the merge comes when it would have
come, with the same bits.

Ranks agree by a row that travels with the fragment, and look at it when they merge. If some rank had inf or NaN in the
fragment then, or an error, which all raise, none merges: the round counts as never ended, and its steps with the next
one. The first row after all replicas were equal is waited for, since parameters may have been loaded before it.
Digests, which ranks compare now and then, are not: they are sent at one merge, and looked at in the next.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from commopt.agreement.calls import StepRefused
from commopt.agreement.decision import is_usable
from commopt.outer import ending, freezing
from commopt.outer.flight import Flight
from commopt.outer.local_steps import too_many_skipped
from commopt.outer.means import Entry
from commopt.outer.rounds import RoundDecision, pseudo_gradient
from commopt.outer.stream_state import forget_sent, keep_sent
from commopt.outer.streaming import JOINED, STILL, Group, Streaming, end_fragment, in_flight, put
from commopt.state.host import square_norm

if TYPE_CHECKING:
    from commopt.outer.base import OuterOptimizer


def step(optimizer: OuterOptimizer, error: Exception | None) -> None:
    """Do what follows a local step that was taken; or not, for ``error``.

    Raises:
        error; and what the end of a round raises.
    """
    streaming, group = _streaming(optimizer), optimizer.param_groups[0]
    optimizer.flights.progress()
    resume(optimizer)
    if not streaming.is_eager:
        for p in in_flight(group):
            if group["fragment_steps"][p] >= streaming.steps:
                merge(optimizer, p)
    while group["round_step"] >= streaming.end_of(group["fragment"], group["period"]):
        error = error or too_many_skipped(optimizer)
        if not _send(optimizer, group["fragment"], error):
            break
    if error is not None:
        raise error


def due_after(streaming: Streaming, group: Mapping[str, Any]) -> bool:
    """True if something is sent or merged at the end of the next step."""
    if group["round_step"] + 1 >= streaming.end_of(group["fragment"], group["period"]):
        return True
    return not streaming.is_eager and any(
        group["fragment_steps"][p] + 1 >= streaming.steps for p in range(streaming.fragments) if group["sent_steps"][p]
    )


def synchronize(optimizer: OuterOptimizer) -> None:
    """Merges all that is in flight, and ends the rounds of all fragments: replicas are equal then, unless the ranks
    skip that."""
    resume(optimizer)
    group = optimizer.param_groups[0]
    for p in in_flight(group):
        (_take_rest if optimizer.is_eager else merge)(optimizer, p)
    heed_digests(optimizer)
    ending.end_round(optimizer, None, [p for p, steps in enumerate(group["fragment_steps"]) if steps])


def merge(optimizer: OuterOptimizer, fragment: int) -> None:
    """Takes the outer step of a fragment in flight, waiting for it, and merges what comes of it."""
    streaming, flights = _streaming(optimizer), optimizer.flights
    flight = flights.land(fragment)
    if not _counts(optimizer, flight):
        return
    entries = flight.means.entries
    write: ending.Write = lambda _, entry: ending.to_anchor(entry)  # noqa: E731
    if not optimizer.param_groups[0]["fragment_steps"][fragment]:
        pass  # no step was taken meanwhile
    elif streaming.merge == "mix":
        write = lambda _, entry: _mix(entry, streaming.kept, flight.joined)  # noqa: E731
    else:
        drifts = [sent - pseudo_gradient(bucket) for (bucket, _), sent in zip(entries, flight.sent)]
        write = lambda i, entry: _add_to_anchor(entry, drifts[i])  # noqa: E731
    squares = ending.squares_of(entries, flight.means.flats)
    ending.take_steps(optimizer, entries, flight.means.flats, write, _still(optimizer, flight), sent=True)
    flights.done(flight)
    for group in optimizer.param_groups:
        put(group, fragment, sent_steps=0, sent_lr=0.0, fragment_rounds=group["fragment_rounds"][fragment] + 1)
    _keep_norms(optimizer, squares, [fragment])


def _counts(optimizer: OuterOptimizer, flight: Flight) -> bool:
    """True if the ranks merge a flight that has landed; if not, it counts as never sent."""
    decision = None if flight.refused else _decide(optimizer, flight)
    heed_digests(optimizer)
    if decision is None or not decision.alike_frozen:
        flight.frozen = ()
    if decision is not None and not decision.broken:
        ending.follow(optimizer, decision, flight.where, flight.fragment, waits=False)
        return True
    if not optimizer.is_eager:  # what is merged eagerly is sent once more
        optimizer.flights.done(flight)
        _take_back(optimizer, flight.fragment)
    if decision is not None:
        since = optimizer.skipped_rounds - flight.skipped
        ending.skip(optimizer, decision.broken, fragment=flight.fragment, known=decision.skipped + since)
    return False


def _decide(optimizer: OuterOptimizer, flight: Flight) -> RoundDecision:
    """What the ranks decide about a flight that has landed; if it is an error, they raise that once."""
    try:
        return optimizer.flights.decide(flight)
    except Exception as error:
        flight.refused = error is flight.report.error or isinstance(error, StepRefused)
        raise


def _take_back(optimizer: OuterOptimizer, fragment: int) -> None:
    """Counts the steps of what was sent of a fragment as ones of the round under way."""
    for group in optimizer.param_groups:
        steps, lr = (group[f"fragment_{what}"][fragment] + group[f"sent_{what}"][fragment] for what in ("steps", "lr"))
        put(group, fragment, sent_steps=0, sent_lr=0.0, fragment_steps=steps, fragment_lr=lr)


def heed_digests(optimizer: OuterOptimizer) -> None:
    """Does what follows from digests that were sent at the merge before."""
    if (comparison := optimizer.flights.compared()) is not None:
        optimizer._compare(comparison.table(), comparison.where)


# the end of a fragment's round ----------------------------------------------------------------------------------------


def _send(optimizer: OuterOptimizer, fragment: int, error: Exception | None) -> bool:
    """Ends the round of a fragment. Returns False if it is to be tried again after the next step."""
    streaming = _streaming(optimizer)
    if streaming.waits:
        return ending.end_round(optimizer, error, [fragment], whole=False)
    if not streaming.is_eager and fragment in optimizer.flights:  # the period was made shorter
        merge(optimizer, fragment)
    if not optimizer.param_groups[0]["started"]:
        where = ending.where_of(optimizer, fragment)
        decision = ending.agreed(optimizer, ending.report(optimizer, error, False), where, fragment)
        if decision is None:
            return False
        optimizer._moved = False
        if streaming.is_eager:
            freezing.begin(optimizer, ending.frozen_of(optimizer) if decision.alike_frozen else ())
    entries = optimizer.entries([fragment])
    if streaming.is_eager:
        _step_eagerly(optimizer, fragment, entries)
    else:
        keep_sent(optimizer, entries, [pseudo_gradient(bucket) for bucket, _ in entries])
    _count_sent(optimizer, fragment)
    launch(optimizer, fragment, error)
    return True


def launch(optimizer: OuterOptimizer, fragment: int, error: Exception | None = None) -> None:
    """Sends what was kept of a fragment, nothing where that is not there. If this rank has inf or NaN in it, the others
    learn that, and it sends zeros. Of parameters that have joined it since it was sent for the first time, all ranks
    send nothing: they were frozen then."""
    joined, sent = joined_of(optimizer), list[Tensor]()
    of_it = [(bucket, group) for bucket, group in optimizer.entries([fragment]) if group["sent_steps"][fragment]]
    entries = [(bucket, group) for bucket, group in of_it if any(id(p) not in joined for p in bucket.params)]
    for bucket, _ in entries:
        sent.append(bucket.zeros())
        for p, view in zip(bucket.params, bucket.views(sent[-1])):
            if p in optimizer.sent:
                view.copy_(optimizer.sent[p])
    frozen = tuple(i for i, p in enumerate(optimizer.params) if id(p) in joined | _still_when_sent(optimizer, fragment))
    report = ending.report(optimizer, error, fragment == optimizer.fragments - 1, sent, frozen)
    means = optimizer.means_of(entries, [flat.clone() if report.finite else torch.zeros_like(flat) for flat in sent])
    where = f"{ending.where_of(optimizer, fragment)}, in flight"
    optimizer.flights.follow(optimizer.params)
    optimizer.flights.launch(Flight(fragment, means, sent, report, frozen, where, joined, optimizer.skipped_rounds))
    forget_sent(optimizer, entries)


def _still_when_sent(optimizer: OuterOptimizer, fragment: int) -> set[int]:
    """The ids of the parameters that were frozen when a fragment was sent for the first time; if that is not known, of
    those that are now."""
    still = set[int]()
    for group in optimizer.param_groups:
        numbers, params = group[STILL][fragment], group["params"]
        still |= {id(p) for p in params if not p.requires_grad} if numbers is None else {id(params[i]) for i in numbers}
    return still


def note_joined(optimizer: OuterOptimizer, groups: Sequence[Group], before: Collection[int]) -> None:
    """Takes down of which parameters of ``groups`` nothing is in flight, though their fragment is: of all but those
    with the ids ``before``."""
    fragment_of = {id(p): b.fragment for b in optimizer.buckets for p in b.params if id(p) not in before}
    for group in groups if fragment_of else ():
        packed = ((i, fragment_of.get(id(p))) for i, p in enumerate(group["params"]))
        joined = (i for i, fragment in packed if fragment is not None and group["sent_steps"][fragment])
        group[JOINED] = tuple(sorted({*group[JOINED], *joined}))


def joined_of(optimizer: OuterOptimizer) -> set[int]:
    """The ids of the parameters of which nothing is in flight, though their fragment may be."""
    return {id(group["params"][i]) for group in optimizer.param_groups for i in group[JOINED]}


def resume(optimizer: OuterOptimizer) -> None:
    """Sends again what was in flight when a state was saved, or when buckets were made anew."""
    group = optimizer.param_groups[0]
    missing = [p for p in in_flight(group) if p not in optimizer.flights]
    if missing or (group["started"] and optimizer._loaded_anchors):  # no row is waited for that would tell
        optimizer.before_sending_again()
    for p in missing:
        launch(optimizer, p)


def _count_sent(optimizer: OuterOptimizer, fragment: int) -> None:
    copies, sent = optimizer.topology.copies, {id(p) for b, _ in optimizer.entries([fragment]) for p in b.params}
    for group in optimizer.param_groups:
        steps, lr = group["fragment_steps"][fragment], group["fragment_lr"][fragment]
        still = tuple(i for i, p in enumerate(group["params"]) if not p.requires_grad)
        put(group, fragment, sent_steps=steps, sent_lr=lr, sent_copies=copies, fragment_steps=0, fragment_lr=0.0)
        put(group, fragment, **{STILL: still})
        group[JOINED] = tuple(i for i in group[JOINED] if id(group["params"][i]) not in sent)
        group["started"] = True
        end_fragment(group, fragment, _streaming(optimizer))


def count_round(optimizer: OuterOptimizer, fragments: Sequence[int], whole: bool, squares: ending.Squares) -> None:
    """Counts rounds that have ended, and were waited for; ``whole``: and all replicas are equal."""
    for group in optimizer.param_groups:
        for p in fragments:
            put(group, p, fragment_steps=0, fragment_lr=0.0, fragment_rounds=group["fragment_rounds"][p] + 1)
        end_fragment(group, optimizer.fragments - 1 if whole else fragments[-1], _streaming(optimizer))
        if whole:
            group["started"] = False
    _keep_norms(optimizer, squares, fragments)


def _keep_norms(optimizer: OuterOptimizer, squares: ending.Squares, fragments: Sequence[int]) -> None:
    for p, of_groups in zip(fragments, ending.of_all_parts(optimizer, squares, fragments)):
        for group, square in zip(optimizer.param_groups, of_groups):
            put(group, p, fragment_squares=square)
            group["pseudo_gradient_norm"] = sum(group["fragment_squares"]) ** 0.5


# merges ---------------------------------------------------------------------------------------------------------------


def _still(optimizer: OuterOptimizer, flight: Flight) -> list[int]:
    """The numbers of the parameters whose anchors no outer step of a flight moves."""
    return [i for i, p in enumerate(optimizer.params) if i in flight.frozen or id(p) in flight.joined]


def _mix(entry: Entry, kept: float, joined: Collection[int]) -> None:
    """x <- alpha x + (1 - alpha) anchor, but for the parameters with the ids ``joined``."""
    bucket, _ = entry
    for p, x, anchor in zip(bucket.params, bucket.values, bucket.tensors("anchor")):
        if id(p) not in joined:
            x.copy_(anchor if kept == 0 else anchor * (1 - kept) + x.to(anchor.dtype) * kept)


def _add_to_anchor(entry: Entry, drift: Tensor) -> None:
    """x <- anchor + drift."""
    bucket, _ = entry
    for p, anchor, moved in zip(bucket.values, bucket.tensors("anchor"), bucket.views(drift)):
        p.copy_(anchor + moved)


# eager ----------------------------------------------------------------------------------------------------------------


def _step_eagerly(optimizer: OuterOptimizer, fragment: int, entries: Sequence[Entry]) -> None:
    """Takes the outer step with this rank's share of a fragment, and what the others have sent before; keeps what is to
    be sent. What ranks have skipped is sent again, where this rank's share has counted already. Of what all have frozen
    (:mod:`.freezing`) no share counts before those of the others do."""
    now, flight, counts = [pseudo_gradient(bucket) for bucket, _ in entries], None, False
    if fragment in optimizer.flights:
        flight = optimizer.flights.land(fragment)
        counts = _counts(optimizer, flight)
    known, frozen = freezing.known(optimizer), freezing.told(optimizer, flight if counts else None)
    before = _sent_before(optimizer, flight, known if counts else ())
    finite = is_usable(square_norm(now))
    along, sent = [], now
    for (bucket, _), d in zip(entries, now):
        share = freezing.without(bucket, d, frozen) if finite else torch.zeros_like(d)
        if counts and id(bucket) in before:  # if not, it was added since
            _, counted, mean = before[id(bucket)]
            along.append((share - counted).div_(bucket.world_size).add_(mean))
        else:
            along.append(share / bucket.world_size)
    if flight is not None and not counts:
        sent = [d + before[id(bucket)].own if id(bucket) in before else d for (bucket, _), d in zip(entries, now)]
    squares = ending.Squares()
    if flight is not None and counts:
        squares = ending.squares_of(flight.means.entries, flight.means.flats)
    numbers = [i for i, p in enumerate(optimizer.params) if id(p) in frozen]
    means = freezing.means(optimizer, entries, along, frozen - known, ending.where_of(optimizer, fragment))
    ending.take_steps(optimizer, entries, along, lambda *_: None, numbers, commit=counts)
    for x, mean in means:
        x.copy_(mean)
    for entry, d in zip(entries, now):
        if finite:
            ending.to_anchor(entry)
        else:  # the parameters follow the anchor, or this rank's next share would take back what others have done
            _add_to_anchor(entry, -d)
    freezing.know(optimizer, frozen, entries)
    _taken(optimizer, fragment, flight, squares)
    keep_sent(optimizer, entries, sent)


class _Sent(NamedTuple):
    """Of one bucket of a flight that has landed, (padded,) each."""

    own: Tensor
    """What this rank has sent."""
    counted: Tensor
    """That of which a share has counted: ``own``, or a multiple, if the replicas were more or fewer then."""
    mean: Tensor


def _sent_before(optimizer: OuterOptimizer, flight: Flight | None, waits: Collection[int]) -> dict[int, _Sent]:
    """What was sent in a flight that has landed, by the id of the bucket; without the parameters with the ids
    ``waits``, no share of which has counted yet."""
    if flight is None:
        return {}
    found: dict[int, _Sent] = {}
    for (bucket, group), sent, mean in zip(flight.means.entries, flight.sent, flight.means.flats):
        own = freezing.without(bucket, _or_zero(sent), waits)
        copies = optimizer.topology.copies
        times = copies / (group["sent_copies"][flight.fragment] or copies)  # 0: of a state from before it was counted
        found[id(bucket)] = _Sent(own, own if times == 1 else own * times, mean)
    return found


def _take_rest(optimizer: OuterOptimizer, fragment: int) -> None:
    """Takes the outer step with what the others have sent before, for good; how far this rank has come since stays. If
    that does not count, what is left of this rank's share counts as steps since."""
    flight = optimizer.flights.land(fragment)
    entries, squares = flight.means.entries, ending.Squares()
    counts, before = _counts(optimizer, flight), _sent_before(optimizer, flight, freezing.known(optimizer))
    own = [before[id(bucket)].counted / bucket.world_size for bucket, _ in entries]
    if counts:
        drifts = [pseudo_gradient(bucket).neg_() for bucket, _ in entries]
        along = [mean - share for mean, share in zip(flight.means.flats, own)]
        squares = ending.squares_of(entries, flight.means.flats)
        write: ending.Write = lambda i, entry: _add_to_anchor(entry, drifts[i])  # noqa: E731
        ending.take_steps(optimizer, entries, along, write, _still(optimizer, flight), sent=True)
    else:
        for entry, sent, share in zip(entries, flight.sent, own):
            _add_to_anchor(entry, share - _or_zero(sent) - pseudo_gradient(entry[0]))
    _taken(optimizer, fragment, flight, squares)
    if not counts:
        _take_back(optimizer, fragment)
    for group in optimizer.param_groups:
        put(group, fragment, sent_steps=0, sent_lr=0.0)


def _taken(optimizer: OuterOptimizer, fragment: int, flight: Flight | None, squares: ending.Squares) -> None:
    if flight is not None:
        optimizer.flights.done(flight)
    for group in optimizer.param_groups:
        put(group, fragment, fragment_rounds=group["fragment_rounds"][fragment] + 1)
    _keep_norms(optimizer, squares, [fragment])


def _or_zero(own: Tensor) -> Tensor:
    """``own`` as this rank has sent it; if that was not finite, zeros were."""
    return own if is_usable(square_norm([own])) else torch.zeros_like(own)


def _streaming(optimizer: OuterOptimizer) -> Streaming:
    assert optimizer.streaming is not None
    return optimizer.streaming
