"""Watch over means of gradients: before each the ranks tell each other whether all of the mean before came as it was
sent, and now and then a digest of the parameters, which all of them change alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from commopt.agreement.checks import check_int
from commopt.agreement.digest import digest_of_all
from commopt.comm import CountingBackend, Receipt, gather_rows, message_device, numbers_in_world, refuse_damaged
from commopt.state.guard import Guard, ReplicasDiffer

ROW_BYTES = 16
"""Bytes of a rank's row."""
_APART = (
    "If each rank shall have its own in backward, as where it moves them by its own gradient and puts them back (SAM), "
    "give compress_gradients(check_every=None)"
)
_REMEDY = "The optimizer has gone by what came; go on from the last checkpoint"


def check_interval(check_every: object) -> None:
    """Raises ValueError unless ``check_every`` is allowed."""
    if check_every is not None:
        check_int("check_every", check_every, 1, "None or ")


class MeanWatch:
    """Watch over the means of gradients of a model that every rank has the whole of.

    Args:
        receipt: of what the means send and receive.
        params: parameters that must be the same on all ranks.
        check_every: they are compared before the first mean, and before every such one after it; None: never.
    """

    def __init__(self, receipt: Receipt, params: Sequence[Tensor], check_every: int | None) -> None:
        self._receipt, self._params, self._every = receipt, list(params), check_every
        self._balance, self._entries = 0, receipt.entries()

    def row(self, number: int) -> Tensor:
        """This rank's row before the mean ``number``, from 1: (16,) uint8."""
        due = self._every is not None and (number - 1) % self._every == 0
        digest = digest_of_all(self._params) if due else 0
        return torch.tensor([self._balance, digest], dtype=torch.int64, device="cpu").view(torch.uint8)

    def check(self, backend: CountingBackend, rows: Tensor, number: int) -> None:
        """Looks at the rows of all ranks, (W, 16) uint8 on the CPU, which have come over ``backend`` before the mean
        ``number``.

        Raises:
            commopt.comm.MessageDamaged: on every rank, if what was received in the mean before is not what was sent.
            commopt.optim.ReplicasDiffer: on every rank, if parameters differ.
        """
        pairs = rows.contiguous().view(torch.int64).tolist()
        balances = [(balance, 1) for balance, _ in pairs]
        self._refuse_damaged(backend, balances, f"compress_gradients(), mean {number - 1}")
        where = f"compress_gradients(), before mean {number}"
        try:
            digests, ranks = [[digest] for _, digest in pairs], numbers_in_world(backend)
            Guard().decide(digests, ["the parameters"], where, ranks, repairs=False)
        except ReplicasDiffer as error:
            raise ReplicasDiffer(f"{error}. {_APART}") from None

    def confirm(self, backend: CountingBackend, number: int) -> None:
        """As :meth:`check` of the mean ``number``, the last one, by itself. All ranks call it."""
        mine = torch.tensor([self._balance, 1], dtype=torch.int64, device=message_device(backend))
        where = f"compress_gradients(), mean {number}"
        rows = gather_rows(backend, mine, f"{where}, confirmation of what was received").tolist()
        self._refuse_damaged(backend, rows, where)

    def _refuse_damaged(self, backend: CountingBackend, rows: Sequence[Sequence[int]], where: str) -> None:
        """What the ``rows`` say is known to all ranks now, and not said again: they may go on from a checkpoint."""
        entries, self._entries, self._balance = self._entries, [], 0
        refuse_damaged(backend, rows, where, entries, _REMEDY)

    def end(self) -> None:
        """Takes down what a mean has sent and received, when all of it has come."""
        self._balance, self._entries = self._receipt.balance(), self._receipt.entries()
