"""Receipts: proof that what was received in a step is what was sent.

Every rank adds up the words of what it gives to collectives, and of what it gets back. Over all ranks the two sums are
equal, whatever was sent to whom; a single flipped bit, in anybody's memory or on the way, makes them differ:

    all_to_all   each row once by its sender, once by its receiver
    all_gather   each row W times by its sender, once by each receiver
    all_reduce   the result W times by rank 0, once by each rank: it is the same on all of them
    exchange     once by its sender, once by its receiver

Sums of 64-bit words, modulo 2^64: one pass over bytes, which are few where they are compressed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from commopt.comm.backend import Backend, Work, message_device
from commopt.comm.pipeline import gather_rows
from commopt.comm.torch import numbers_in_world

if TYPE_CHECKING:
    from commopt.comm.counting import CountingBackend

CONFIRMATION_BYTES = 16
"""Bytes of the row that each rank all-gathers to confirm."""
UNAPPLIED = "Nothing of the step was applied; go on from the last checkpoint"
"""Remedy where damage is found before anything of a step is used."""


class MessageDamaged(RuntimeError):
    """Received data is not what was sent, or cannot be right. Parameters and momenta are as before the step."""


@dataclass(frozen=True)
class Entry:
    """A collective that is complete: its collective, and the sums of the rows that were given and got."""

    collective: str
    sent: Tensor
    received: Tensor


class Receipt:
    """Sums of what a rank has sent and received since the last ``clear()``. It is cleared where all ranks have
    waited for the same collectives, or for none: where a step ends."""

    def __init__(self) -> None:
        self.waited_for: list[tuple[tuple[int, int], Entry]] = []
        """Entries that are complete, each with its place in the order that is the same on every rank."""
        self._orders = 0

    def new_order(self) -> Order | None:
        """The collectives of one backend, which have an order of their own; None where none is watched. Called in one
        order on every rank."""
        self._orders += 1
        return Order(self, self._orders)

    def clear(self) -> None:
        """Forgets."""
        self.waited_for = []

    def entries(self) -> list[Entry]:
        """In an order that is the same on every rank."""
        return [entry for _, entry in sorted(self.waited_for, key=lambda item: item[0])]

    def balance(self) -> int:
        """Sent less received, modulo 2^64. Over all ranks it is 0."""
        if not self.waited_for:
            return 0
        on_device: dict[torch.device, list[Entry]] = {}
        for _, entry in self.waited_for:
            on_device.setdefault(entry.sent.device, []).append(entry)
        totals = [
            torch.cat([e.sent for e in entries]).sum() - torch.cat([e.received for e in entries]).sum()
            for entries in on_device.values()
        ]
        return int(sum(total.to(totals[0].device) for total in totals))  # still modulo 2^64: no sum of Python's


class NoReceipt(Receipt):
    """For whoever never confirms: keeps nothing, and has no sums made."""

    def new_order(self) -> None:
        return None

    def balance(self) -> int:
        raise AssertionError("nothing was kept that could be confirmed")


class Order:
    """The collectives of one backend, in order."""

    def __init__(self, receipt: Receipt, number: int) -> None:
        self._receipt, self._number, self._calls = receipt, number, 0

    def watch(self, collective: str, work: Work, sums: Callable[[], tuple[Tensor, Tensor]]) -> Work:
        """``work``, entered when it is complete; ``sums()`` gives what was sent and received then."""
        self._calls += 1
        return _Receipted(work, self._receipt, (self._number, self._calls), collective, sums)


class _Receipted:
    """A collective in flight that is entered in a receipt when it is waited for. Otherwise it is what it is of."""

    def __init__(
        self,
        work: Work,
        receipt: Receipt,
        position: tuple[int, int],
        collective: str,
        sums: Callable[[], tuple[Tensor, Tensor]],
    ) -> None:
        self._work, self._receipt, self._position, self._collective = work, receipt, position, collective
        self._sums: Callable[[], tuple[Tensor, Tensor]] | None = sums
        self.is_completed = work.is_completed
        if hasattr(work, "wait_for"):  # asked for in every wait
            self.wait_for = work.wait_for

    def wait(self) -> Any:
        result = self._work.wait()
        if self._sums is not None:
            self._receipt.waited_for.append((self._position, Entry(self._collective, *self._sums())))
            self._sums = None
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def row_sums(x: Tensor, rows: int) -> Tensor:
    """The sum of the 64-bit words of each of ``rows`` equal rows of a contiguous tensor, (rows,) int64."""
    if not x.numel():
        return torch.zeros(rows, dtype=torch.int64, device=x.device)
    data = x.detach().view(rows, -1)
    rest = -data.shape[1] * data.element_size() % 8
    if rest or data.storage_offset() * data.element_size() % 8:
        data = torch.nn.functional.pad(data.view(torch.uint8), (0, rest))
    return data.view(torch.int64).sum(1)


def confirm(backend: CountingBackend, sound: bool, where: str) -> None:
    """Makes sure that all ranks have received what was sent since the last step, and that all of it is ``sound``. All
    ranks call it. ``backend`` is what they tell each other over; its receipt has what was sent.

    Raises:
        MessageDamaged: on every rank, if not; begins with ``where``, and names a rank where that is known.
    """
    mine = confirmation(backend, sound)
    refuse_damaged(backend, gather_rows(backend, mine, f"{where}, confirmation of what was received").tolist(), where)


def confirmation(backend: CountingBackend, sound: bool) -> Tensor:
    """This rank's row of :func:`confirm`, (2,) int64."""
    return torch.tensor([backend.receipt.balance(), int(sound)], dtype=torch.int64, device=message_device(backend))


def refuse_damaged(
    backend: CountingBackend,
    rows: Sequence[Sequence[int]],
    where: str,
    entries: Sequence[Entry] | None = None,
    remedy: str = UNAPPLIED,
) -> None:
    """Raise what follows from the confirmations of all ranks, by rank, as :func:`confirm` does.

    Args:
        backend: what they have told each other over.
        rows: the confirmations.
        where: begins the message.
        entries: of what they confirm, where that is not what the receipt has now.
        remedy: ends the message.
    """
    if sum([balance for balance, _ in rows]) % 2**64:
        told = _tell(backend.receipt.entries() if entries is None else entries, backend)
        raise MessageDamaged(f"{where}: {told}. Memory or the network damages messages. {remedy}")
    bad = [rank for rank, (_, fine) in enumerate(rows) if not fine]
    if bad:
        numbers = numbers_in_world(backend)
        ranks = ", ".join(str(numbers[rank]) for rank in bad)
        raise MessageDamaged(
            f"{where}: what rank {ranks} received holds inf, NaN or a scale that cannot be, as it was sent. {remedy}"
        )


def _tell(entries: Sequence[Entry], backend: Backend) -> str:
    """Names the message that was damaged, as far as it can be told."""
    world, numbers = backend.world_size, numbers_in_world(backend)
    lengths = [(entry.sent.numel(), entry.received.numel()) for entry in entries]
    sums = [t.to(message_device(backend)) for entry in entries for t in (_padded(entry.sent, world), entry.received)]
    told = "what was received is not what was sent"
    if any(max(pair) > world for pair in lengths):
        return told
    mine = torch.cat([_padded(t, world) for t in sums])
    table = gather_rows(backend, mine, "search for the damaged message")
    pieces = table.view(world, len(entries), 2, world)
    for i, entry in enumerate(entries):
        sent, received = pieces[:, i, 0], pieces[:, i, 1]
        if int(sent.sum() - received.sum()) == 0:
            continue
        if entry.received.numel() == world and entry.collective in ("all_to_all", "all_gather", "exchange"):
            wrong = (sent != received.T).nonzero().tolist()  # sent[s, r] is for r, received[r, s] from s
            pairs = ", ".join(f"rank {numbers[r]} received from rank {numbers[s]}" for s, r in wrong[:3])
            return f"{entry.collective}: what {pairs} is not what was sent"
        if entry.collective == "all_reduce":
            results = received[:, 0].tolist()
            odd = [str(numbers[rank]) for rank, result in enumerate(results) if 2 * results.count(result) <= world]
            if len(odd) == world:
                return "all_reduce: the ranks received different results"
            return f"all_reduce: the result on rank {', '.join(odd)} is another than on the others"
        return f"{entry.collective}: {told}"
    return told


def _padded(x: Tensor, n: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, n - x.numel()))
