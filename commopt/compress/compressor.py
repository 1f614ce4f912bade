"""Compressors: rows of floats <-> rows of bytes. A row is what one rank receives.

A compressor is stateless (a frozen dataclass): residuals belong to the caller. To add one, write ``nbytes``,
``compress`` and ``decompress`` in a file of its own; the other methods have correct defaults and are overridden only
where a fused operator makes them faster.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from commopt import ops
from commopt.ops.reference import (
    adam_in_columns_,
    mask_of_columns,
    momentum_of_columns,
    pieces_between,
    write_columns,
)

PAYLOAD_ALIGN = 16
"""Bytes of a payload row are a multiple of this, so that rows can be viewed as float32 and float64."""


def align(nbytes: int) -> int:
    """``nbytes`` rounded up to a whole number of payload units."""
    return -(-nbytes // PAYLOAD_ALIGN) * PAYLOAD_ALIGN


Chunk = tuple[int, int]
"""The chunk [start, stop) of every row."""


@dataclass(frozen=True)
class Momentum:
    """beta m + alpha g, not formed yet.

    Attributes:
        m: (D,) float32 or float64.
        grads: the gradients, of any shape, that lie in ``m``; elements that none covers have gradient 0.
        offsets: where each of them starts, in elements, ascending.
        beta, alpha: the factors.
    """

    m: Tensor
    grads: Sequence[Tensor]
    offsets: Sequence[int]
    beta: float
    alpha: float

    @classmethod
    def nothing(cls, like: Tensor) -> Momentum:
        """Zeros, as many as ``like`` has."""
        return cls(like.view(-1), [], [], 0.0, 0.0)

    def between(self, first: int, end: int) -> Momentum:
        """Its elements [first, end)."""
        return Momentum(self.m[first:end], *pieces_between(self.grads, self.offsets, first, end), self.beta, self.alpha)

    def columns(self, rows: int, start: int, stop: int) -> Tensor:
        """It, formed: the columns [start, stop) of ``m`` seen as ``rows`` rows; a new tensor (rows, stop - start)."""
        return momentum_of_columns(
            self.m, self.grads, self.offsets, self.beta, self.alpha, rows, start, stop, ops.momentum
        )


@dataclass(frozen=True)
class FrozenAdam:
    """p <- decay p - step_size m / (sqrt(v) / sqrt_bias_correction2 + eps), for when m is known
    (:func:`commopt.ops.frozen_adam_apply_`).

    Attributes:
        v: (D,) like m.
        params: the parameters to move.
        offsets: where each of them starts in m and v, in elements, ascending.
        step_sizes, sqrt_bias_corrections2: one of each a parameter.
        eps, decay: for all of them.
    """

    v: Tensor
    params: Sequence[Tensor]
    offsets: Sequence[int]
    step_sizes: Sequence[float]
    sqrt_bias_corrections2: Sequence[float]
    eps: float
    decay: float


def columns_of(active: Tensor | None, chunk: Chunk) -> Tensor | None:
    """The bits of a chunk: (r, ceil(n / 8)) uint8 -> (r, ceil((stop - start) / 8))."""
    mask = mask_of_columns(active, *chunk)
    return None if mask is None else mask.contiguous()


def scales_are_sound(payload: Tensor, scales: int) -> Tensor:
    """0-d bool, true if so many float32 scales, with which each row begins, are finite and not negative."""
    if not payload.numel():
        return torch.ones((), dtype=torch.bool, device=payload.device)
    found = payload.view(torch.float32)[:, :scales]
    return ((found >= 0) & (found < float("inf"))).all()


def zero_inactive_(x: Tensor, active: Tensor | None) -> None:
    """Makes the inactive elements of (r, n) 0: those whose bits in ``active``, (r, ceil(n / 8)) uint8, are 0."""
    if active is not None and x.shape[1] % 8 == 0 and x.is_contiguous():
        ops.zero_inactive_(x.view(-1), active.view(-1))
    elif active is not None:  # the bits of a row begin at a whole byte
        for row, bits in zip(x, active):
            ops.zero_inactive_(row, bits)


class Compressor(ABC):
    """Rows of floats, shape (r, n), <-> rows of bytes, shape (r, nbytes(n)), each row decodable by itself.

    Everything a row needs (scales too) travels inside the row. Both directions write into tensors that the caller
    gives.

    Attributes:
        chunk_multiple: where a row may be cut and its pieces be compressed by themselves, to the same values: at
            multiples of this many elements, itself a multiple of 8. None: nowhere.
    """

    @property
    def chunk_multiple(self) -> int | None:
        return None

    @abstractmethod
    def nbytes(self, n: int, dtype: torch.dtype = torch.float32) -> int:
        """Exact size in bytes of the payload row of ``n`` values of ``dtype``; a multiple of 16."""

    @abstractmethod
    def compress(self, x: Tensor, payload: Tensor) -> None:
        """Writes C[x] to ``payload``. x: (r, n) float32 or float64, unchanged; payload: (r, nbytes(n)) uint8."""

    @abstractmethod
    def decompress(self, payload: Tensor, out: Tensor) -> None:
        """Writes to ``out`` (r, n) the values that ``payload`` (r, nbytes(n)) stands for; the same bits on every
        rank."""

    def is_sound(self, payload: Tensor, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """0-d bool, true if rows can be right. What they hold of numbers must be finite, and no less than it can be.

        Asked before anything is done with rows that have come from other ranks. Here there is nothing to ask.

        Args:
            payload: (r, nbytes(n, dtype)) uint8.
            n, dtype: values of a row.
        """
        return torch.ones((), dtype=torch.bool, device=payload.device)

    def decompress_active(
        self, payload: Tensor, out: Tensor, active: Tensor | None, chunk: Chunk | None = None
    ) -> None:
        """As :meth:`decompress`, with 0 at the inactive elements of ``active`` (as below).

        Args:
            payload: rows of the chunk only.
            out: (r, n), written in the chunk.
            active: of whole rows.
            chunk: as for :meth:`compress_momentum`.
        """
        rows, n = out.shape
        if chunk is not None and chunk != (0, n):
            assert self.chunk_multiple is not None, "a row is cut only where a compressor says so"
            part = out.new_empty((rows, chunk[1] - chunk[0]))
            self.decompress_active(payload, part, columns_of(active, chunk))
            out[:, slice(*chunk)] = part
            return
        self.decompress(payload, out)
        zero_inactive_(out, active)

    def decompress_to(
        self,
        payload: Tensor,
        outs: Sequence[Tensor],
        offsets: Sequence[int],
        room: Tensor,
        active: Tensor | None,
        chunk: Chunk | None = None,
    ) -> None:
        """As :meth:`decompress_active`, to tensors that lie in the rows, rounded to their dtypes.

        Args:
            payload: (r, nbytes(n)) uint8; rows of the chunk only.
            outs: of any shape, floating dtype and layout; written where they lie in the chunk.
            offsets: where each of them starts in the rows end to end, in elements, ascending.
            room: (r n,) float32 or float64, of whose dtype the values are; what is in it may be overwritten.
            active: (r, ceil(n / 8)) as below.
            chunk: as for :meth:`compress_momentum`.
        """
        rows = room.view(payload.shape[0], -1)
        n = rows.shape[1]
        start, stop = chunk or (0, n)
        self.decompress_active(payload, rows, active, chunk)
        write_columns(rows[:, start:stop], outs, offsets, n, start)

    def compress_with_feedback(
        self, x: Tensor, error: Tensor, payload: Tensor, active: Tensor | None = None, new_error: Tensor | None = None
    ) -> None:
        """Sends C[x + error] and keeps what was lost: new_error <- (x + error) - C[x + error].

        Args:
            x: (r, n) float32 or float64, unchanged.
            error: (r, n) like x, the residual.
            payload: (r, nbytes(n)) uint8, written.
            active: (r, ceil(n / 8)) uint8 bit mask, least significant bit first, or None for all. An inactive element
                (bit 0) counts as absent: it enters as 0, and its residual stays 0 whatever the row decodes to at its
                place.
            new_error: like error, written; None is ``error`` itself, which otherwise is unchanged.
        """
        rest = torch.add(x, error, out=error if new_error is None else new_error)
        zero_inactive_(rest, active)
        self.compress(rest, payload)
        sent = torch.empty_like(rest)
        self.decompress_active(payload, sent, active)
        rest.sub_(sent)

    def compress_momentum(
        self,
        momentum: Momentum | None,
        error: Tensor,
        payload: Tensor,
        active: Tensor | None,
        new_error: Tensor,
        chunk: Chunk | None = None,
    ) -> None:
        """As :meth:`compress_with_feedback`, of a momentum that need not be formed in memory.

        Args:
            momentum: of r * n elements; unchanged. None is 0: the residual alone is sent.
            error, active: as above.
            payload: as above, but rows of the chunk only.
            new_error: as above; may be ``error``.
            chunk: what to work on, or None for all; only if there is a ``chunk_multiple``, of which they are multiples
                (or end with the row).
        """
        rows, n = error.shape
        start, stop = chunk or (0, n)
        x = error.new_zeros((rows, stop - start)) if momentum is None else momentum.columns(rows, start, stop)
        if stop - start == n:
            self.compress_with_feedback(x, error, payload, active, new_error)
            return
        assert self.chunk_multiple is not None, "a row is cut only where a compressor says so"
        rest = error[:, start:stop].clone(memory_format=torch.contiguous_format)
        self.compress_with_feedback(x, rest, payload, columns_of(active, (start, stop)))
        new_error[:, start:stop] = rest

    def decompress_adam(
        self, payload: Tensor, m: Tensor, update: FrozenAdam, active: Tensor | None, chunk: Chunk | None = None
    ) -> None:
        """As :meth:`decompress_active` to ``m``, and moves the parameters along it.

        Args:
            payload: (r, nbytes(n)) uint8; rows of the chunk only.
            m: (r n,) float32 or float64, written.
            update: how parameters move.
            active: (r, ceil(n / 8)) as above.
            chunk: as for :meth:`compress_momentum`.
        """
        rows = m.view(payload.shape[0], -1)
        self.decompress_active(payload, rows, active, chunk)
        start, stop = chunk or (0, rows.shape[1])
        adam_in_columns_(
            ops.frozen_adam_apply_, len(rows), m, update.v, list(update.params), list(update.offsets),
            list(update.step_sizes), list(update.sqrt_bias_corrections2), update.eps, update.decay, start, stop,
        )  # fmt: skip

    def decompress_mean(self, payload: Tensor, out: Tensor) -> None:
        """Writes to ``out`` (n,) the mean over the rows of ``payload`` (r, nbytes(n)), summed in row order."""
        row = torch.empty_like(out).unsqueeze(0)
        out.zero_()
        for i in range(payload.shape[0]):
            self.decompress(payload[i : i + 1], row)
            out.add_(row[0])
        out.div_(payload.shape[0])

    def reduce(self, payloads: Tensor, error: Tensor, own: Tensor, active: Tensor | None, new_error: Tensor) -> None:
        """A server's part: :meth:`decompress_mean`, then :meth:`compress_with_feedback` of that mean.

        Args:
            payloads: (r, nbytes(n)) uint8, a row of each rank.
            error: (n,) float32 or float64, the residual.
            own: (nbytes(n),) uint8, written; no row of ``payloads``.
            active: (ceil(n / 8),) as above, or None.
            new_error: like error, written; may be ``error``.
        """
        mean = torch.empty_like(error)
        self.decompress_mean(payloads, mean)
        mask = None if active is None else active.unsqueeze(0)
        row = error.unsqueeze(0)
        out = row if new_error is error else new_error.unsqueeze(0)
        self.compress_with_feedback(mean.unsqueeze(0), row, own.unsqueeze(0), mask, out)


def common_multiple(*compressors: Compressor | None) -> int | None:
    """``chunk_multiple`` of rows that each of ``compressors`` compresses, None being none."""
    multiples = [c.chunk_multiple for c in compressors if c is not None]
    return None if None in multiples else math.lcm(*(multiple for multiple in multiples if multiple is not None))
