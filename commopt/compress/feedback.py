"""What compression has lost so far, and still owes (error feedback).

A rank keeps one residual for what it sends to all (``worker``), and one for the chunk that it averages and sends back
(``server``). They differ from rank to rank and are part of the optimizer's state: forget them, and the run is another
one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Feedback:
    """Residuals of one compressed all-reduce over ``world_size`` ranks.

    Attributes:
        worker: (D,), of what this rank sends; D is a multiple of world_size.
        server: (D / world_size,), of the chunk that this rank averages.
        live: (D / 8,) uint8 bit mask, least significant bit first, or None for all. Dead elements (bit 0) stay 0 in
            every residual and in every result. Derived, not state: it is not saved.
    """

    worker: Tensor
    server: Tensor
    live: Tensor | None = None

    @classmethod
    def zeros(cls, numel: int, world_size: int, dtype: torch.dtype, device: torch.device) -> Feedback:
        """Residuals of a buffer of ``numel`` elements before anything was sent."""
        return cls(
            torch.zeros(numel, dtype=dtype, device=device),
            torch.zeros(numel // world_size, dtype=dtype, device=device),
        )
