"""Integers of 8, 4 or 2 bits, or floats of 8, and a scale a block: the operators of :mod:`commopt.compress.scaled`.

**Payload row.** ``n`` elements in blocks of ``block`` (the last one may be shorter)::

    [ceil(n / block) float32 scales][ceil(n b / 8) bytes of codes][zeros up to a multiple of 16 bytes]

The code of element i has b bits and begins at bit b (i % (8 / b)) of byte i b // 8, least significant first; unused
bits are 0. ``bits`` is 8, 4 or 2, and b; or the kind of float, and b is 8.
Everything below is computed in the dtype of the input, each operation rounded once, without fused multiply-adds: all
providers agree bit for bit.

* **8 and 4 bits**: two's complement q in [-Q, Q], Q = 127 or 7, stands for q s;  s = max |z| / Q.
* **2 bits**: q in 0..3 stands for (q - 1.5) s.  To nearest: s = sqrt(sum z^2 / count), in float64, the sum in a fixed
  order (:mod:`commopt.ops.reference_integers`). Stochastic: s = max |z| / 1.5.

* **Floats of 8 bits**: what torch.float8_e4m3fn or torch.float8_e5m2 stand for, times s;  s = max |z| / Q, Q = 448 or
  57344, their largest number.

With t = z (1 / s), codes are rounded to nearest (ties to even; 2 bits: floor(t) + 2), or stochastically: floor(t + u),
for 2 bits floor(t + 1.5 + u); then clamped. The noise u, a multiple of 2^-24 in [0, 1), is the finaliser of
MurmurHash3 of the seed, the scale, the place in the block and the bits of z as float32, but for its last 8 bits. It has
no state: equal inputs give equal codes, wherever in a row their block lies. For floats t is rounded to float32 and
clamped first; a stochastic code is that of the number towards zero whose digits, with as many bits of the hash behind
them as float32 has more, are added up without a carry beyond; below the smallest normal number floor(t / unit + u).

The scale is rounded to float32. It is 0 where that would be below the smallest normal float32, and then the block
decodes to zeros; it is NaN where Q s would not be finite in float32 (2 bits: 1.5 s; rotated: Q s block, to which the
butterflies may sum up on the way back), and then the block decodes to NaN. Either way all codes are 0 (of 2 bits: 2).

**Rotated**, a block is replaced by its Walsh-Hadamard transform before, and back after: butterflies over neighbours at
distance 1, 2, 4, ... (a, b -> a + b, a - b), then a factor of 1 / sqrt(block), rounded to the dtype. A shorter last
block is transformed in pieces whose lengths are powers of two, the largest first: as many codes as elements, and
nothing sent for padding.

A ``active`` mask, (r, ceil(n / 8)) uint8, least significant bit first, makes the elements with bit 0 count as absent:
they enter as 0, are not in the count of a mean (unless rotated: what is counted then are coefficients), and their
residual is 0. They decode to what the code of 0 stands for, or to 0 with the same mask.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from commopt.ops.checks import check_like, check_real, check_runs, check_shared_rows

_ops = torch.ops.commopt

E4M3, E5M2 = 43, 52
"""Floats of 8 bits, by their bits of exponent and of mantissa."""
LARGEST_CODE = {8: 127.0, 4: 7.0, 2: 1.5, E4M3: 448.0, E5M2: 57344.0}
"""Value of the largest code, by ``bits``: that many scales."""
LARGEST_BLOCK = 8192
"""Elements of the largest block: what one team of threads of a GPU does in one pass."""


def int_nbytes(n: int, bits: int, block: int) -> int:
    """Bytes of the payload row of ``n`` elements: 4 ceil(n / block) + ceil(n b / 8), rounded up to a multiple of 16.

    Args:
        n: elements in the row; 0 gives 0.
        bits: 8, 4 or 2, which is b; or E4M3 or E5M2, whose b is 8.
        block: elements that share a scale, a power of two from 8 to 8192.

    Raises:
        ValueError: any of them is not as above.
    """
    if n < 0:
        raise ValueError(f"n must be at least 0, got {n}")
    if bits not in LARGEST_CODE:
        raise ValueError(f"bits must be 8, 4 or 2, or E4M3 ({E4M3}) or E5M2 ({E5M2}), got {bits}")
    if not 8 <= block <= LARGEST_BLOCK or block & (block - 1):
        raise ValueError(f"block must be a power of two from 8 to {LARGEST_BLOCK}, got {block}")
    return (4 * -(-n // block) + -(-n * width(bits) // 8) + 15) & ~15


def width(bits: int) -> int:
    """Bits of a code."""
    return 8 if bits in (E4M3, E5M2) else bits


def int_compress(
    x: Tensor,
    payload: Tensor,
    bits: int,
    block: int,
    stochastic: bool = False,
    rotated: bool = False,
    seed: int = 0,
    active: Tensor | None = None,
) -> None:
    """Writes C[x] to ``payload``.

    Args:
        x: (r, n) float32 or float64, contiguous; unchanged.
        payload: (r, int_nbytes(n, bits, block)) uint8, contiguous; written, in the format that the module states.
        bits: of an element: 8, 4 or 2; or E4M3 or E5M2.
        block: elements that share a scale, a power of two from 8 to 8192.
        stochastic: rounding; otherwise to nearest.
        rotated: whether blocks are transformed first.
        seed: of the noise, 0 <= seed < 2**32.
        active: (r, ceil(n / 8)) uint8 bit mask of the elements that take part, or None for all.

    Raises:
        ValueError: a shape, dtype, device, layout or number is not as above.
    """
    check_real("x", x, 2)
    _check_rows(payload, x, bits, block, active)
    _check_seed(seed)
    _ops.int_compress.default(x, payload, bits, block, stochastic, rotated, seed, active)


def int_compress_with_feedback(
    x: Tensor,
    error: Tensor,
    payload: Tensor,
    bits: int,
    block: int,
    stochastic: bool = False,
    rotated: bool = False,
    seed: int = 0,
    active: Tensor | None = None,
    new_error: Tensor | None = None,
) -> None:
    """Sends the residual too, and keeps what is lost: z = x + error;  payload = C[z];  new_error <- z - C[z].

    Args:
        x: (r, n) float32 or float64, contiguous; unchanged unless it is ``new_error``.
        error: like x: the residual; unchanged unless it is ``new_error``.
        payload, bits, block, stochastic, rotated, seed, active: as for :func:`int_compress`.
        new_error: like x; written; None for ``error``. It may be ``error`` or ``x`` itself; no two arguments may
            overlap otherwise.

    Raises:
        ValueError: a shape, dtype, device, layout or number is not as above.
    """
    check_real("x", x, 2)
    _check_rows(payload, x, bits, block, active)
    _check_seed(seed)
    check_like("error", error, x.shape, x.dtype, x.device)
    after = error if new_error is None else new_error
    check_like("new_error", after, x.shape, x.dtype, x.device)
    _ops.int_compress_with_feedback.default(x, error, after, payload, bits, block, stochastic, rotated, seed, active)


def int_compress_momentum(
    m: Tensor,
    grads: Sequence[Tensor],
    offsets: Sequence[int],
    beta: float,
    alpha: float,
    error: Tensor,
    new_error: Tensor,
    payload: Tensor,
    bits: int,
    block: int,
    stochastic: bool = False,
    rotated: bool = False,
    seed: int = 0,
    active: Tensor | None = None,
    start: int = 0,
    stop: int | None = None,
) -> None:
    """:func:`commopt.ops.momentum`, then :func:`int_compress_with_feedback` of it, in one pass and to the same bits:

        x = beta m + alpha g;  z = x + error;  payload = C[z];  new_error <- z - C[z]

    Args:
        m: (r n,) float32 or float64, contiguous, seen as r rows of n; unchanged.
        grads, offsets, beta, alpha: as for :func:`commopt.ops.momentum`.
        error: like m: the residual; unchanged unless it is ``new_error``.
        new_error: like m; written. It may be ``error`` itself; no two arguments may overlap otherwise, but that m may
            be ``error``.
        payload: (r, int_nbytes(stop - start, bits, block)) uint8, contiguous, r >= 1; written.
        bits, block, stochastic, rotated, seed, active: as for :func:`int_compress`; active is of whole rows.
        start, stop: the columns of each row to work on, [start, stop); the others are not touched. Multiples of 8,
            but that stop may be n, as it is if None. Cut at multiples of ``block``, a row is compressed to the same
            values as whole.

    Raises:
        ValueError: a shape, dtype, device, layout, offset, column or number is not as above.
    """
    check_real("m", m, 1)
    _check_seed(seed)
    stop = check_shared_rows(payload, m.shape[0], m.device, lambda n: int_nbytes(n, bits, block), active, start, stop)
    check_like("error", error, m.shape, m.dtype, m.device)
    check_like("new_error", new_error, m.shape, m.dtype, m.device)
    check_runs("grads", grads, offsets, m.shape[0], m.device)
    _ops.int_compress_momentum.default(
        m, grads, offsets, beta, alpha, error, new_error, payload, bits, block, stochastic, rotated, seed, active,
        start, stop,
    )  # fmt: skip


def int_reduce(
    payloads: Tensor,
    error: Tensor,
    new_error: Tensor,
    own: Tensor,
    bits: int,
    block: int,
    stochastic: bool = False,
    rotated: bool = False,
    seed: int = 0,
    active: Tensor | None = None,
) -> None:
    """:func:`int_decompress_mean`, then :func:`int_compress_with_feedback` of it, in one pass and to the same bits:

        z = mean of the rows of payloads + error;  own = C[z];  new_error <- z - C[z]

    Args:
        payloads: (W, int_nbytes(n, bits, block)) uint8, contiguous, W >= 1.
        error: (n,) float32 or float64, contiguous: the residual; unchanged unless it is ``new_error``.
        new_error: like error; written. It may be ``error`` itself; no two arguments may overlap otherwise.
        own: (int_nbytes(n, bits, block),) uint8, contiguous; written.
        bits, block, stochastic, rotated, seed: of ``own``; bits, block and rotated of ``payloads`` are the same.
        active: (ceil(n / 8),) uint8 bit mask of the elements that take part, or None for all.

    Raises:
        ValueError: a shape, dtype, device, layout or number is not as above.
    """
    check_real("error", error, 1)
    _check_ranks("payloads", payloads, error, bits, block)
    _check_seed(seed)
    check_like("new_error", new_error, error.shape, error.dtype, error.device)
    check_like("own", own, (payloads.shape[1],), torch.uint8, error.device)
    if active is not None:
        check_like("active", active, ((error.shape[0] + 7) // 8,), torch.uint8, error.device)
    _ops.int_reduce.default(payloads, error, new_error, own, bits, block, stochastic, rotated, seed, active)


def int_decompress(
    payload: Tensor, out: Tensor, bits: int, block: int, rotated: bool = False, active: Tensor | None = None
) -> None:
    """Writes to ``out`` what the rows of ``payload`` stand for, and 0 to the inactive elements.

    Args:
        payload: (r, int_nbytes(n, bits, block)) uint8, contiguous.
        out: (r, n) float32 or float64, contiguous; written.
        bits, block, rotated: as they were for compression.
        active: (r, ceil(n / 8)) uint8 bit mask of the elements that take part, or None for all.

    Raises:
        ValueError: a shape, dtype, device, layout or number is not as above.
    """
    check_real("out", out, 2)
    _check_rows(payload, out, bits, block, active)
    _ops.int_decompress.default(payload, out, bits, block, rotated, active)


def int_decompress_to(
    payload: Tensor,
    outs: Sequence[Tensor],
    offsets: Sequence[int],
    numel: int,
    bits: int,
    block: int,
    rotated: bool = False,
    active: Tensor | None = None,
    start: int = 0,
    stop: int | None = None,
) -> None:
    """:func:`int_decompress`, in float32, to tensors that lie in a flat buffer which is not there; rounded to theirs.

    Args:
        payload: (r, int_nbytes(stop - start, bits, block)) uint8, contiguous, r >= 1.
        outs: of any shape, floating dtype and layout; written where they are in the columns [start, stop).
        offsets: for each of them the element of the buffer where it starts; ascending, without overlap.
        numel: r n, elements of the buffer, seen as r rows of n.
        bits, block, rotated: as they were for compression.
        active: (r, ceil(n / 8)) uint8 bit mask of the elements that take part, or None for all; 0 at the others.
        start, stop: as for :func:`int_compress_momentum`.

    Raises:
        ValueError: a shape, dtype, device, layout, offset, column or number is not as above.
    """
    stop = check_shared_rows(payload, numel, payload.device, lambda n: int_nbytes(n, bits, block), active, start, stop)
    check_runs("outs", outs, offsets, numel, payload.device)
    _ops.int_decompress_to.default(payload, outs, offsets, numel, bits, block, rotated, active, start, stop)


def int_decompress_mean(payload: Tensor, out: Tensor, bits: int, block: int, rotated: bool = False) -> None:
    """Writes the mean of the W rows of ``payload`` to ``out``.

        a_k = s_k / W;   y = ((q_0 a_0 + q_1 a_1) + ...) + q_{W-1} a_{W-1}     (2 bits: q - 1.5 for q)

    in rank order and rounded in the dtype of ``out`` after each operation, so that it is the same on every rank; if
    rotated, ``out`` is y rotated back, once for all ranks.

    Args:
        payload: (W, int_nbytes(n, bits, block)) uint8, contiguous, W >= 1.
        out: (n,) float32 or float64, contiguous; written.
        bits, block, rotated: as they were for compression.

    Raises:
        ValueError: a shape, dtype, device, layout or number is not as above.
    """
    check_real("out", out, 1)
    _check_ranks("payload", payload, out, bits, block)
    _ops.int_decompress_mean.default(payload, out, bits, block, rotated)


def _check_seed(seed: int) -> None:
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must be an int with 0 <= seed < 2**32, got {seed}")


def _check_rows(payload: Tensor, x: Tensor, bits: int, block: int, active: Tensor | None) -> None:
    rows, n = x.shape
    check_like("payload", payload, (rows, int_nbytes(n, bits, block)), torch.uint8, x.device)
    if active is not None:
        check_like("active", active, (rows, (n + 7) // 8), torch.uint8, x.device)


def _check_ranks(name: str, payload: Tensor, row: Tensor, bits: int, block: int) -> None:
    if payload.dim() != 2 or payload.shape[0] == 0:
        raise ValueError(f"{name} must have a row for each of at least one rank, got shape {tuple(payload.shape)}")
    check_like(name, payload, (payload.shape[0], int_nbytes(row.shape[0], bits, block)), torch.uint8, row.device)
