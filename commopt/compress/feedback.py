"""What compression has lost so far, and still owes (error feedback).

A rank keeps one residual for what it sends to all (``worker``), and one for the chunk that it averages and sends back
(``server``). They differ from rank to rank and are part of the optimizer's state: forget them, and the run is another
one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Feedback:
    """Residuals of one compressed all-reduce over ``world_size`` ranks.

    Compression reads ``worker`` and ``server`` and writes ``next_worker`` and ``next_server``; ``commit()`` makes the
    next ones the present ones. They are the same tensors (and commit() changes nothing) unless ``undoable``.

    Attributes:
        worker: (D,), of what this rank sends; D is a multiple of world_size.
        server: (D / world_size,), of the chunk that this rank averages.
        live: (D / 8,) uint8 bit mask, least significant bit first, or None for all. Dead elements (bit 0) stay 0 in
            every residual and in every result. Derived, not state: it is not saved.
        undoable: whether the residuals stay what they were until commit(). Costs the memory of both once more, from
            the first compression on.
    """

    worker: Tensor
    server: Tensor
    live: Tensor | None = None
    undoable: bool = False
    _next: tuple[Tensor, Tensor] | None = field(init=False, default=None, repr=False)

    @classmethod
    def zeros(
        cls, numel: int, world_size: int, dtype: torch.dtype, device: torch.device, undoable: bool = False
    ) -> Feedback:
        """Residuals of a buffer of ``numel`` elements before anything was sent."""
        worker = torch.zeros(numel, dtype=dtype, device=device)
        server = torch.zeros(numel // world_size, dtype=dtype, device=device)
        return cls(worker, server, undoable=undoable)

    @property
    def next_worker(self) -> Tensor:
        """Where the worker's residual of the compression under way goes."""
        return self._after()[0]

    @property
    def next_server(self) -> Tensor:
        """Where the server's goes."""
        return self._after()[1]

    def worker_rows(self, rows: int) -> tuple[Tensor, Tensor]:
        """``worker`` and ``next_worker``, both (rows, D / rows); one tensor if they are one."""
        worker = self.worker.view(rows, -1)
        return worker, self.next_worker.view(rows, -1) if self.undoable else worker

    def live_rows(self, rows: int) -> Tensor | None:
        """``live`` as (rows, D / rows / 8), or None."""
        return None if self.live is None else self.live.view(rows, -1)

    def _after(self) -> tuple[Tensor, Tensor]:
        if not self.undoable:
            return self.worker, self.server
        if self._next is None:
            self._next = torch.empty_like(self.worker), torch.empty_like(self.server)
        return self._next

    def commit(self) -> None:
        """The compression under way has happened: what it owes is what is owed."""
        if self._next is not None:
            self._next, (self.worker, self.server) = (self.worker, self.server), self._next
