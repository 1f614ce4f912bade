"""CSER's error e_i, what compression has lost so far, and where it is kept: nowhere, as x_i - a of an anchor a, or
apart.

Each class starts what a step sends, all of it at once, because none of it depends on what is received; and when that
has come, moves x_i.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from commopt.comm import BlockSync, PSync
from commopt.state.state_bucket import StateBucket

UPDATE, RESET = 0, 1
"""Kinds of synchronisation: p_i with C2, or e_i with C1."""

Start = Callable[[int, Tensor], PSync]
"""Starts PSync of UPDATE or RESET on (n,), which is overwritten with the residual."""


class ImplicitError:
    """e_i is not kept. With blocks that are the same on every rank, the kept blocks of x_i are averaged at a reset."""

    def __init__(self, bucket: StateBucket) -> None:
        self.bucket = bucket

    def start(self, p: Tensor, psync: Start, resets: bool) -> tuple[PSync, PSync | None]:
        """PSync(p_i, C2), and at a reset PSync(e_i, C1): here of x_i - p_i, as PSync keeps means."""
        reset = psync(RESET, self.bucket.pack_params()[: self.bucket.numel].sub_(p)) if resets else None
        return psync(UPDATE, p), reset

    def apply(self, x: Tensor, mean: Tensor, update: PSync, reset: PSync | None) -> None:
        """x_i <- x_i - p'_i;  its kept blocks <- their mean. ``mean`` is that of C2(p_i)."""
        x.sub_(update.residual.add_(mean))  # p'_i = mean + r_i
        if reset is not None:
            assert isinstance(reset, BlockSync)
            reset.blocks.scatter_(x, reset.values)


class StoredAnchor:
    """e_i = x_i - a. The anchor moves by what is received and nothing else: it is the same on all ranks, to the bit."""

    def __init__(self, bucket: StateBucket) -> None:
        self.bucket = bucket
        self.anchor = bucket["anchor"][: bucket.numel]

    def start(self, p: Tensor, psync: Start, resets: bool) -> tuple[PSync, PSync | None]:
        """PSync(p_i, C2), and at a reset PSync(e_i, C1): e_i after the update is x_i - r_i - a, known already."""
        x = self.bucket.pack_params()[: self.bucket.numel] if resets else None
        update = psync(UPDATE, p)
        if x is None:
            return update, None
        return update, psync(RESET, self.reset_input(x.sub_(self.anchor).sub_(update.residual)))

    def apply(self, x: Tensor, mean: Tensor, update: PSync, reset: PSync | None) -> None:
        """x_i <- x_i - p'_i;  a <- a - mean;  at a reset a <- a + e', x_i <- a, and the residual goes where it goes."""
        self.anchor.sub_(mean)
        x.sub_(update.residual.add_(mean))  # p'_i = mean + r_i
        if reset is not None:
            self.anchor.add_(reset.mean())
            x.copy_(self.anchor)
            self.absorb_residual(x, reset.residual)

    def reset_input(self, error: Tensor) -> Tensor:
        """Input of a reset: e_i. May be written."""
        return error

    def absorb_residual(self, x: Tensor, residual: Tensor) -> None:
        """Takes what a reset has not sent into the local model."""
        x.add_(residual)


class KeptError(StoredAnchor):
    """An error of which a reset keeps what it has not sent for the next one, and all ranks have the same model then."""

    def __init__(self, bucket: StateBucket) -> None:
        super().__init__(bucket)
        self.error = bucket["error_buffer"][: bucket.numel]

    def reset_input(self, error: Tensor) -> Tensor:
        """e_i + x_i - a."""
        return error.add_(self.error)

    def absorb_residual(self, x: Tensor, residual: Tensor) -> None:
        """e_i <- what was not sent."""
        self.error.copy_(residual)
