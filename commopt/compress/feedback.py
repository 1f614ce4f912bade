"""Residuals of compression (error feedback): what it has lost, and adds to the next message.

A rank keeps one residual for what it sends to all (``worker``), and one for the chunk that it averages and sends back
(``server``). They differ from rank to rank and are part of the optimizer's state: forget them, and the run is another
one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Spared = tuple[list[tuple[slice, Tensor]], list[tuple[slice, Tensor]]]
"""Elements of the worker's residual and of the server's that a compression leaves as they are, with their values."""

NOTHING: Spared = ([], [])


@dataclass
class Feedback:
    """Residuals of one compressed all-reduce over ``world_size`` ranks.

    Compression reads ``worker`` and ``server`` and writes ``next_worker`` and ``next_server``; ``commit()`` makes the
    next ones the present ones. They are the same tensors (and commit() changes nothing) unless ``double_buffered``.

    Attributes:
        worker: (D,), of what this rank sends; D is a multiple of world_size.
        server: (D / world_size,), of the chunk that this rank averages.
        double_buffered: whether the residuals stay what they were until commit(). Costs the memory of both once more,
            from the first compression on.
        serves: whether this rank compresses a mean, too. If not, ``server`` stays what it is, and there is one of it.
    """

    worker: Tensor
    server: Tensor
    double_buffered: bool = False
    serves: bool = True
    _next: tuple[Tensor, Tensor] | None = field(init=False, default=None, repr=False)

    @classmethod
    def zeros(
        cls,
        numel: int,
        world_size: int,
        dtype: torch.dtype,
        device: torch.device,
        double_buffered: bool = False,
        serves: bool = True,
    ) -> Feedback:
        """Residuals of a buffer of ``numel`` elements before anything was sent."""
        worker = torch.zeros(numel, dtype=dtype, device=device)
        server = torch.zeros(numel // world_size, dtype=dtype, device=device)
        return cls(worker, server, double_buffered, serves)

    def emptied(self) -> Feedback:
        """Residuals of as many elements, of a compression that neither has these nor changes them."""
        return Feedback(torch.zeros_like(self.worker), torch.zeros_like(self.server), serves=self.serves)

    def add(self, other: Feedback, share: float) -> None:
        """Adds ``share`` of the residuals of another compression of the same buffer."""
        self.worker.add_(other.worker, alpha=share)
        self.server.add_(other.server, alpha=share)

    @property
    def next_worker(self) -> Tensor:
        """Destination of the worker's residual of the compression under way."""
        return self._after()[0]

    @property
    def next_server(self) -> Tensor:
        """Destination of the server's."""
        return self._after()[1]

    def worker_rows(self, rows: int) -> tuple[Tensor, Tensor]:
        """``worker`` and ``next_worker``, both (rows, D / rows); one tensor if they are one."""
        worker = self.worker.view(rows, -1)
        return worker, self.next_worker.view(rows, -1) if self.double_buffered else worker

    def _after(self) -> tuple[Tensor, Tensor]:
        if not self.double_buffered:
            return self.worker, self.server
        if self._next is None:
            server = torch.empty_like(self.server) if self.serves else self.server
            self._next = torch.empty_like(self.worker), server
        return self._next

    def spare(self, worker: Sequence[slice], server: Sequence[slice]) -> Spared:
        """Notes what the compression to come shall leave as it is, for :meth:`commit`: elements of ``worker`` and of
        ``server``, which take no part in it. Costs their memory once more, or nothing if ``double_buffered``."""

        def now(residual: Tensor, places: Sequence[slice]) -> list[tuple[slice, Tensor]]:
            return [(at, residual[at] if self.double_buffered else residual[at].clone()) for at in places]

        return now(self.worker, worker), now(self.server, server)

    def commit(self, spared: Spared = NOTHING) -> None:
        """Makes the residuals of the compression under way the present ones, but for what is spared."""
        for i, kept in enumerate(spared):
            for at, values in kept:
                self._after()[i][at] = values
        if self._next is not None:
            self._next, (self.worker, self.server) = (self.worker, self.server), self._next

    def let_go(self) -> None:
        """Gives the memory of the next residuals back, until the next compression; but not on a CPU, where new memory
        costs more time than what is written to it."""
        if self.worker.device.type != "cpu":
            self._next = None

    def clear(self) -> None:
        """Makes the residuals 0."""
        self.worker.zero_()
        self.server.zero_()

    def drop_worker(self) -> None:
        """Gives the memory of the worker's residuals back, of those to come too: somebody keeps them in another form.
        Then commit() spares none of them."""
        self.worker, (_, server) = self.worker[:0].clone(), self._after()
        self._next = (self.worker.clone(), server)
