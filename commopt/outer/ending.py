"""The end of a round that is waited for, of all buckets or of a fragment: functions of an outer optimizer.

Nothing that lasts changes before all collectives are done, but for anchors that differed; then everything does.
"""

from __future__ import annotations

import contextlib
import logging
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from commopt.agreement.decision import is_usable
from commopt.agreement.diagnostics import names_of
from commopt.agreement.setup import equalize
from commopt.comm import gather_rows, message_device, wait
from commopt.outer import base_state, rounds
from commopt.outer.means import Entry, wait_for_means
from commopt.outer.rounds import Comparison, Round, RoundDecision, RoundReport, pseudo_gradient
from commopt.outer.streaming import OF_A_PART
from commopt.sharding import local
from commopt.state import comparing, packing, wrapped
from commopt.state.guard import REMEDY, NotFinite, tell_not_finite
from commopt.state.host import as_numbers, square_norm
from commopt.state.replicas import agree_inside, average_exactly, reaching_others
from commopt.state.saving import PARAMETER
from commopt.state.state_bucket import StateBucket

if TYPE_CHECKING:
    from commopt.outer.base import OuterOptimizer

logger = logging.getLogger("commopt")

Squares = dict[tuple[int, int], float]
"""Sums of squares, by fragment, and by the id of a parameter group."""

Write = Callable[[int, Entry], None]
"""Writes parameters, of the entry of that number, when its anchor has moved."""


def end_round(optimizer: OuterOptimizer, error: Exception | None, fragments: Sequence[int], whole: bool = True) -> bool:
    """Ends the rounds of ``fragments``. Returns whether the ranks have not skipped that.

    Args:
        optimizer: whose.
        error: why this rank cannot take part.
        fragments: their numbers; the others are at rest, if it is ``whole``.
        whole: whether all replicas are equal then.

    Raises:
        error: on the rank that has one; the others raise StepRefused.
        commopt.comm.CollectiveError: a collective failed.
    """
    topology = optimizer.topology
    where = where_of(optimizer, None if whole else fragments[0])
    due = [(base_state.due(optimizer.state_period, optimizer.round_of(p) + 1), p) for p in fragments]
    error = error or base_state.lacking(optimizer.base, [name for names, _ in due for name in names])
    checks = whole or fragments[-1] == optimizer.fragments - 1
    decision = agreed(optimizer, report(optimizer, error, checks), where, None if whole else fragments[0])
    if decision is None:
        return False
    entries = optimizer.entries(fragments)
    frozen = frozen_of(optimizer) if decision.alike_frozen else ()
    own = mean_buffers(optimizer, where) if whole and optimizer.is_eager else []
    means = optimizer.means_of(entries, [pseudo_gradient(bucket) for bucket, _ in entries])
    wait_for_means(topology, means, where)
    states = own
    for names, p in due:
        buckets = [bucket for bucket, _ in optimizer.entries([p])]
        states += base_state.mean_states(topology, buckets, optimizer.base, names, f"{where}, state of the bases")
    for mine, mean in states:
        mine.copy_(mean)
    squares = squares_of(entries, means.flats)
    take_steps(optimizer, entries, means.flats, lambda _, entry: to_anchor(entry), frozen)
    if own:
        for entry in optimizer.entries():
            to_anchor(entry)
    optimizer.count_round(fragments, whole, squares)
    optimizer._moved = False
    return True


def where_of(optimizer: OuterOptimizer, fragment: int | None) -> str:
    """Beginning of errors of a round of a fragment; of all parameters, if it is None."""
    group, name = optimizer.param_groups[0], type(optimizer).__name__
    if fragment is None or optimizer.streaming is None or optimizer.fragments == 1:
        return f"{name}, synchronisation {group['rounds'] + 1}"
    number = group["fragment_rounds"][fragment] + 1
    return f"{name}, synchronisation {number}, fragment {fragment + 1} of {optimizer.fragments}"


def mean_buffers(optimizer: OuterOptimizer, where: str) -> base_state.Means:
    """Flat buffers that are each rank's own, with their means over the ranks."""
    names = [name for name in optimizer.rank_local(optimizer.param_groups[0]) if name != PARAMETER]
    out = [(bucket, bucket[name], bucket[name].clone()) for bucket in optimizer.buckets for name in names]
    if names:  # also where this rank trains nothing: the others confirm what they have received
        with reaching_others(optimizer.topology, where):
            average_exactly(optimizer.topology, [b for b, _, _ in out], [mean for *_, mean in out], where)
    return [(mine, mean) for _, mine, mean in out]


def agreed(
    optimizer: OuterOptimizer, mine: RoundReport, where: str, fragment: int | None = None
) -> RoundDecision | None:
    """The decision of the ranks to end a round, of a ``fragment`` or all, None if they skip it: waits for their
    reports. Anchors are the same on all ranks then, if parameters were changed before it."""
    device = optimizer.control_device([p for b in optimizer.buckets for p in b.params])
    decision = rounds.agree(optimizer.topology, device, mine, f"{where}, agreement of the ranks")
    if decision.broken:
        skip(optimizer, decision.broken, fragment=fragment, known=decision.skipped)
        return None
    if decision.moved:
        optimizer.anchors_moved(device, where)
    follow(optimizer, decision, where, fragment)
    return decision


def follow(
    optimizer: OuterOptimizer, decision: RoundDecision, where: str, fragment: int | None = None, waits: bool = True
) -> None:
    """Does what follows for a round, of a ``fragment`` or all, that the ranks end: says what is odd, and compares
    replicas if it is time.

    Unless it ``waits``, what follows from the digests is seen at the next merge of a fragment.
    """
    if fragment is None:
        optimizer._skipped_in_a_row.clear()
    else:
        del optimizer._skipped_in_a_row[fragment], optimizer._skipped_in_a_row[None]
    if decision.equal_gradients:
        optimizer._diagnostics.equal_gradients_in_rounds(wrapped.advice(optimizer))
    wrapped.averages_now(optimizer, decision.equal_gradients)
    if decision.checks:
        digests, topology = comparing.digests(optimizer), optimizer.topology
        if waits:
            comparison = Comparison(topology, topology.backend, digests, where)
            optimizer._compare(comparison.table(), where)
        else:
            optimizer.flights.compare(digests, where)


def report(
    optimizer: OuterOptimizer,
    error: Exception | None,
    checks: bool,
    sent: Sequence[Tensor] | None = None,
    frozen: Sequence[int] | None = None,
) -> RoundReport:
    """Report of this rank at the end of a round. ``checks``: whether digests may be compared at it. If it has
    ``sent`` something, whether that is finite counts, and not its parameters. ``frozen``: the numbers of the
    parameters that were when that was sent first; None: of those that are now. Ranks compare them."""
    own = optimizer.defaults.keys() - optimizer.base.defaults.keys() - {*OF_A_PART}
    named = [as_numbers(group, sorted(own)) for group in optimizer.param_groups]
    group = optimizer.param_groups[0]
    finite = is_usable(square_norm(optimizer.values() if sent is None else list(sent)))
    checksum, number = zlib.crc32(str(named).encode()), group["rounds"]
    if checks := checks and not optimizer.own_anchors:
        checks = optimizer.guard.checks_at(number + 1, number, optimizer._check_next, group["period"])
    moved, step = optimizer._moved, group["round_step"]
    skipped = max(optimizer._skipped_in_a_row.values(), default=0)
    still = zlib.crc32(str(frozen_of(optimizer) if frozen is None else frozen).encode()) % 2**20
    if optimizer.members is None:
        packed = packing.layout(optimizer)
    else:  # whose buckets are made anew, alike, where they are others than before
        ids = optimizer.packed()
        packed = zlib.crc32(str([i for i, p in enumerate(optimizer.params) if id(p) in ids]).encode())
    return RoundReport(
        finite, optimizer._square, step, number, checksum, moved, checks, error, still, packed, skipped, named
    )


def frozen_of(optimizer: OuterOptimizer) -> Sequence[int]:
    """The numbers of the parameters that are frozen now."""
    return tuple(i for i, p in enumerate(optimizer.params) if not p.requires_grad)


def take_steps(
    optimizer: OuterOptimizer,
    entries: Sequence[Entry],
    means: Sequence[Tensor],
    write: Write,
    frozen: Sequence[int],
    sent: bool = False,
    commit: bool = True,
) -> None:
    """Outer steps along ``means``, of each entry, the residuals of which are committed if asked for. ``frozen``: the
    numbers of the parameters that become the mean, without a momentum. ``sent``: the rounds are those in flight, and
    not those of now."""
    positions, params = _positions(optimizer), optimizer.params
    still = {id(params[i]) for i in frozen} if optimizer.momentum else set()
    for i, ((bucket, group), mean) in enumerate(zip(entries, means)):
        number, lr = optimizer.place_of(bucket, group, sent)
        if bucket.feedback is not None and commit:
            bucket.feedback.commit()
        ctx = Round(number, lr, [positions[id(p)] for p in bucket.params])
        with averaging(optimizer, bucket, mean, [k for k, p in enumerate(bucket.params) if id(p) in still]):
            optimizer.outer_step(bucket, group, mean, ctx)
        write(i, (bucket, group))


@contextlib.contextmanager
def averaging(optimizer: OuterOptimizer, bucket: StateBucket, mean: Tensor, indices: Sequence[int]) -> Iterator[None]:
    """Context of an outer step of ``bucket`` along ``mean``, of which the parameters given by their indices do not take
    part: they become the mean, and their momenta stay."""
    means = [bucket.views(mean)[i].clone() for i in indices]
    kept = {name: [x.clone() for x in bucket.tensors(name, indices)] for name in bucket.buffers} if indices else {}
    yield
    for name, before in kept.items():
        for x, was in zip(bucket.tensors(name, indices), before):
            x.copy_(was)
    for i, d in zip(indices, means):
        optimizer.to_mean(bucket.tensors("anchor")[i], d)


def squares_of(entries: Sequence[Entry], means: Sequence[Tensor]) -> Squares:
    """Sums of squares of what was compressed."""
    out = Squares()
    for (bucket, group), mean in zip(entries, means):
        if bucket.feedback is not None:
            key = bucket.fragment, id(group)
            out[key] = out.get(key, 0.0) + bucket.share * square_norm([mean])
    return out


def to_anchor(entry: Entry) -> None:
    """Sets parameters to their anchors."""
    bucket, _ = entry
    for p, x in zip(bucket.values, bucket.tensors("anchor")):
        p.copy_(x)


def of_all_parts(optimizer: OuterOptimizer, squares: Squares, fragments: Sequence[int]) -> list[list[float]]:
    """The sums of squares of what the model has of each of some fragments, group by group, from those of what each rank
    has of it."""
    mine: list[list[float]] = [
        [squares.get((p, id(group)), 0.0) for group in optimizer.param_groups] for p in fragments
    ]
    if not optimizer.topology.is_sharded or optimizer.compressor is None:
        return mine
    table = torch.tensor(mine, dtype=torch.float64, device=message_device(optimizer.topology.backend))
    wait(optimizer.topology.world.all_reduce(table), "norms of the mean pseudo-gradients of all parts")
    return [list(row) for row in table.tolist()]


def equalize_anchors(optimizer: OuterOptimizer, device: torch.device, where: str) -> None:
    """Gives every rank the anchors of one, if those that were taken over anew differ: of the first whose anchors are
    finite, and whose pseudo-gradient counts.

    Raises:
        commopt.optim.NotFinite: on all ranks, if there is none.
    """
    differed, first, topology = False, 0, optimizer.topology
    with reaching_others(topology, where):
        usable = _usable_anchors(optimizer, where)
    if not any(usable):
        raise NotFinite(f"{where}: the parameters that a round begins from are finite on no rank. {REMEDY}")
    with reaching_others(topology, where):
        for replicas in topology.replicas:
            anchors = [bucket["anchor"] for bucket in optimizer.buckets if bucket.replicas is replicas]
            source = next(i for i, rank in enumerate(replicas.members) if usable[rank] or replicas.world_size == 1)
            if equalize(replicas.world, device, anchors, source):
                differed, first = True, replicas.members[source]
    if differed and topology.rank == 0:
        logger.warning(
            "%s: parameters were changed between two rounds, to values that differ between ranks; the round counts "
            "from those of rank %d",
            type(optimizer).__name__, topology.numbers[first],
        )  # fmt: skip


def _usable_anchors(optimizer: OuterOptimizer, where: str) -> list[bool]:
    """Of each rank, by rank, whether the others may have the anchors of its replica."""
    topology, members = optimizer.topology, optimizer.members
    square = square_norm([bucket["anchor"] for bucket in optimizer.buckets])
    square, _ = agree_inside(topology, square, None, where)
    counts = members is None or members.counts
    mine = torch.tensor([float(counts and is_usable(square))], device=message_device(topology.backend))
    return [bool(told) for told in gather_rows(topology.world, mine, where).flatten().tolist()]


def skip(
    optimizer: OuterOptimizer,
    broken: Sequence[int],
    why: str | None = None,
    fragment: int | None = None,
    known: int | None = None,
) -> None:
    """Counts a round, of a ``fragment`` or all, that all ranks skip, because of those that are ``broken``. ``why``:
    what of these is not finite, in the same words on all ranks, which tell each other where it is None. ``known``: how
    many in a row all ranks know of, where they have said so; None: as many as this one.

    Raises:
        commopt.optim.NotFinite: there were too many.
    """
    optimizer.skipped_rounds += 1
    if known is not None:
        for which, count in optimizer._skipped_in_a_row.items():
            optimizer._skipped_in_a_row[which] = min(count, known)
    optimizer._skipped_in_a_row.update({fragment, None})
    of_all, of_fragment = (optimizer._skipped_in_a_row[which] for which in (None, fragment))
    in_a_row = max(of_all, of_fragment)
    optimizer._diagnostics.round_skipped(broken, optimizer.skipped_rounds)
    if optimizer.guard.ends_after(in_a_row):
        why = why or tell_not_finite(optimizer.topology.world, optimizer.buckets, names_of(optimizer.param_groups))
        of = ""
        if fragment is not None and of_fragment > of_all:
            of = f", of fragment {fragment + 1} of {optimizer.fragments}"
        raise NotFinite(f"{type(optimizer).__name__}: {in_a_row} synchronisations in a row were skipped{of}: {why}")


def _positions(optimizer: OuterOptimizer) -> dict[int, int]:
    """Start of each parameter in what this rank holds of the model, in elements."""
    at, out = 0, {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            out[id(p)] = at
            at += local(p).numel()
    return out
