"""Guard: ends a run that has gone wrong, instead of letting it continue without a word.

* A step is skipped when a gradient is not finite. If the parameters themselves are not, every step is: after
  ``max_skipped`` of them in a row, :class:`NotFinite` says on which rank what is not finite.
* Replicas must be the same to the bit. Every ``check_every`` steps, or at the next round, the ranks compare digests of
  their parameters and of all state that they have in common: a flipped bit, another processor or another version of a
  library shows there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from commopt.agreement.checks import check_int
from commopt.agreement.decision import LARGEST_NORM
from commopt.agreement.setup import gather_texts
from commopt.comm import Backend, numbers_in_world
from commopt.sharding import local

if TYPE_CHECKING:
    from commopt.state.state_bucket import StateBucket

REMEDY = "Go on from the last good checkpoint, with a lower learning rate or a max_grad_norm"


class NotFinite(RuntimeError):
    """Too many steps in a row were skipped because of inf or NaN; the message says what is not finite, and where."""


class ReplicasDiffer(RuntimeError):
    """Replicas differ in what must be the same on all ranks; the message names the rank that is alone. Nothing has
    changed."""


@dataclass(frozen=True)
class Guard:
    """Conditions under which an optimizer ends a run.

    Args:
        max_skipped: after so many steps in a row that were skipped because of inf or NaN, ``step()`` raises
            :class:`NotFinite` on all ranks, >= 1; None: never.
        check_every: the ranks compare digests of parameters and common state at every such step, >= 1, or if that is a
            local one at the next in which they communicate; and at the first one after loading; None: never. It reads
            both once: at 100 some 0.4 % of a step on a CPU.
        on_difference: "raise" :class:`ReplicasDiffer` on all ranks, before the step changes anything; or "repair": the
            step is taken, and then the ranks that differ get what the majority has. Without a majority, as with 2
            ranks, it raises all the same. With :class:`commopt.Members` neither: replicas are compared in every round,
            and those that differ join anew.

    Raises:
        ValueError: for a value out of range.
    """

    max_skipped: int | None = 25
    check_every: int | None = 100
    on_difference: Literal["raise", "repair"] = "raise"

    def __post_init__(self) -> None:
        for name in ("max_skipped", "check_every"):
            value = getattr(self, name)
            if value is not None:
                check_int(name, value, 1, "None or ")
        if self.on_difference not in ("raise", "repair"):
            raise ValueError(f"on_difference must be 'raise' or 'repair', got {self.on_difference!r}")

    def checks_at(self, number: int, last: int, asked: bool, length: int = 1) -> bool:
        """True if digests are compared at the step, or the round of ``length`` steps, of this ``number`` >= 1; ``last``
        is that of the one before it in which the ranks communicated. Also if that is ``asked`` for, but never if
        ``check_every`` is None."""
        if self.check_every is None:
            return False
        every = max(1, self.check_every // length)
        return asked or number // every > last // every

    def ends_after(self, skipped: int) -> bool:
        """True if the run ends after so many skipped steps in a row."""
        return self.max_skipped is not None and skipped >= self.max_skipped

    def decide(
        self,
        table: Sequence[Sequence[int]],
        names: Sequence[str],
        where: str,
        ranks: Sequence[int],
        repairs: bool = True,
    ) -> int | None:
        """Consequence of the digests of ranks that must hold the same: None if they agree, or the place in ``table`` of
        that whose replica the others are to get after the step.

        Args:
            table: the digests of each of these ranks.
            names: of what they are the digests.
            where: begins the message.
            ranks: the numbers that a user knows them by.
            repairs: whether somebody could repair them.

        Raises:
            ReplicasDiffer: they do not agree, and no rank is to be repaired, or none can be.
        """
        if all(row == table[0] for row in table):
            return None
        right = majority(table)
        if self.on_difference == "repair" and right is not None:
            return right
        remedy = "go on from the last checkpoint"
        if right is not None and repairs:
            remedy += ", or let guard=Guard(on_difference='repair') give such a rank what the majority has"
        remedy += (
            ". If they soon differ again, something changes parameters on each rank by itself, such as SAM that "
            "subtracts what it has added, in place of putting copies back, or Embedding(max_norm=)"
        )
        raise ReplicasDiffer(f"{where}: {describe_difference(table, names, ranks)}; {remedy}")


def check_guard(guard: Any) -> None:
    """Raises ValueError unless ``guard`` is a :class:`Guard`."""
    if not isinstance(guard, Guard):
        raise ValueError(f"guard must be a commopt.Guard, got {guard!r}")


def majority(table: Sequence[Sequence[int]]) -> int | None:
    """The first of the ranks that more than half of all agree with; None if there are none. ``table`` has the digests
    of every rank."""
    rows = [tuple(row) for row in table]
    row, count = Counter(rows).most_common(1)[0]
    return rows.index(row) if 2 * count > len(rows) else None


def describe_difference(table: Sequence[Sequence[int]], names: Sequence[str], ranks: Sequence[int]) -> str:
    """Describes which of ``ranks`` differ from the others, and in what. ``names`` are those of the digests."""
    right = majority(table)
    reference = table[0 if right is None else right]
    wrong = [row for row in table if list(row) != list(reference)]
    odd = [rank for rank, row in zip(ranks, table) if list(row) != list(reference)]
    where = [name for i, name in enumerate(names) if any(row[i] != reference[i] for row in wrong)]
    what = ", ".join(where[:3]) + (f" and {len(where) - 3} more" if len(where) > 3 else "")
    if right is None:
        camps = Counter(tuple(row) for row in table)
        sides = " and ".join(str([r for r, row in zip(ranks, table) if tuple(row) == camp]) for camp in camps)
        return f"ranks {sides} differ in {what}, and there is no majority that could be right"
    return f"{_ranks(odd)} from all others in {what}"


def _ranks(odd: Sequence[int]) -> str:
    return f"rank {odd[0]} differs" if len(odd) == 1 else f"ranks {', '.join(map(str, odd))} differ"


def tell_not_finite(backend: Backend, buckets: Sequence[StateBucket], names: Mapping[Tensor, str]) -> str:
    """Describes what is not finite on which rank, in words that are the same on all ranks. All ranks must call it
    together."""
    tensors = [(name, local(p.detach())) for p, name in names.items()]
    for i, bucket in enumerate(buckets):
        tensors += [(f"{name} of bucket {i}", flat) for name, flat in bucket.buffers.items()]
        if bucket.feedback is not None:
            tensors += [(f"worker_error of bucket {i}", bucket.feedback.worker)]
            tensors += [(f"server_error of bucket {i}", bucket.feedback.server)]
    found = not_finite(tensors) or not_finite(
        (f"the gradient of {name}", local(p.grad)) for p, name in names.items() if p.grad is not None
    )
    texts = gather_texts(backend, ", ".join(found))
    where = "; ".join(f"rank {rank}: {text}" for rank, text in zip(numbers_in_world(backend), texts) if text)
    found_text = f"not finite are, on {where}" if where else f"the norm of the gradients is above {LARGEST_NORM:g}"
    return f"{found_text}. {REMEDY}"


def not_finite(tensors: Iterable[tuple[str, Tensor]], most: int = 3) -> list[str]:
    """The names of those of ``tensors`` that hold inf or NaN, with how many of their elements; at most ``most``, and
    how many more there are."""
    found = []
    for name, x in tensors:
        bad = x.numel() - int(torch.isfinite(x).sum())
        if bad:
            found.append(f"{name} ({bad} of {x.numel()} elements)")
    return found[:most] + ([f"{len(found) - most} more"] if len(found) > most else [])
