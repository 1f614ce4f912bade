"""Top-k by threshold: k elements of a row, found by counting: MSTopK (arXiv 2010.10458).

A row of ``n`` elements, a_i their magnitudes, has exactly ``k`` entries. With mu the mean of a, u its largest and N
``rounds``, thresholds are sampled by bisection, and what is counted at each is the elements that reach it::

    b, e = (0, mu) if count(a >= mu) <= k else (mu, u);    l, r = 0, 1
    N times:  q = (l + r) / 2;  t = b + q (e - b);  c = count(a >= t);   r = q if c <= k else l = q
    high = the last t with c <= k: at first mu if that is e, else none;   low = the last with c > k: at first b
    the entries: all a >= high, and of those in [low, high) the first, by index, that are wanted up to k

The paper searches above the mean only, and takes what is lacking from a place drawn at random on.

All of it is in float64, each operation rounded once, and not contracted. mu is summed in chunks of 4096 elements, each
in 16 lanes (element i of a chunk in lane i % 16, then the upper half of the lanes to the lower, and so on), what comes
of the chunks in the same way, until one number is left; then divided by n. So all providers choose the same, also under
``torch.set_flush_denormal(True)``: denormals count for what they are.

Where a row has inf, NaN, or magnitudes of 2^128 and more, these come first: all of them, and else the first by index;
or, if they are more than k, the first k of them.

**Payload row.** Indices count from the start of a segment of 65536 elements, and ascend within it::

    [of each segment but the first: uint32, the entries before it][k bfloat16 values][k uint16 indices]
    [zeros up to a multiple of 16 bytes]

Values are rounded to nearest, ties to even (of float64 by way of float32), and NaN is 0x7FC0; what rounding loses is
residual as the rest is. Elements that a mask makes absent are zeros, and may be sent as such, where k is more than is
left. In a row that is damaged, an entry counts if its index is in the segment, and above that of the entry before it,
and the entries before a segment are no less than those before the one before, and no more than k.

A ``active`` mask is (r, ceil(n / 8)) uint8, least significant bit first. Rows of tensors may be strided: columns of
larger ones.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from commopt.ops import catalogue as catalogue  # it defines the operators
from commopt.ops.checks import check_gathered, check_rows, check_sent
from commopt.ops.reference_threshold import threshold_is_sound
from commopt.ops.threshold_row import ThresholdRow, check_rounds

__all__ = [
    "ThresholdRow", "check_rounds", "threshold_compress", "threshold_compress_with_feedback", "threshold_decompress",
    "threshold_decompress_mean", "threshold_is_sound", "threshold_nbytes",
]  # fmt: skip

_ops = torch.ops.commopt


@functools.lru_cache(maxsize=1024)
def threshold_nbytes(n: int, k: int) -> int:
    """Bytes of the payload row of ``n`` elements and ``k`` entries, a multiple of 16.

    Args:
        n: elements in the row; 0 gives 0.
        k: entries, 1 <= k <= n; 0 for n = 0.

    Raises:
        ValueError: any of them is not as above.
    """
    return ThresholdRow(n, k).nbytes


def threshold_compress(x: Tensor, payload: Tensor, k: int, rounds: int, active: Tensor | None = None) -> None:
    """Writes C[x], the entries of each row of ``x``, to ``payload``.

    Args:
        x: (r, n) float32 or float64, rows contiguous; unchanged.
        payload: (r, threshold_nbytes(n, k)) uint8, contiguous; written, in the format that the module states.
        k: as for :func:`threshold_nbytes`.
        rounds: thresholds that are sampled, 1 to 32.
        active: (r, ceil(n / 8)) uint8 bit mask of the elements that take part, rows contiguous, or None for all.

    Raises:
        ValueError: a shape, dtype, device, layout, k or rounds is not as above.
    """
    _check("x", x, payload, k, active)
    check_rounds(rounds)
    _ops.threshold_compress.default(x, payload, k, rounds, active)


def threshold_compress_with_feedback(
    x: Tensor,
    error: Tensor,
    payload: Tensor,
    k: int,
    rounds: int,
    active: Tensor | None = None,
    new_error: Tensor | None = None,
) -> None:
    """Sends the residual too, and keeps what is lost: z = x + error;  payload = C[z];  new_error <- z - C[z].

    Args:
        x: (r, n) float32 or float64, rows contiguous; unchanged unless it is ``new_error``.
        error: like x, with strides of its own: the residual; unchanged unless it is ``new_error``.
        payload, k, rounds, active: as for :func:`threshold_compress`.
        new_error: like error; written, 0 where ``active`` is 0; None for ``error``. It may be ``error`` or ``x``
            itself; no two arguments may overlap otherwise.

    Raises:
        ValueError: a shape, dtype, device, layout, k or rounds is not as above.
    """
    _check("x", x, payload, k, active)
    check_rounds(rounds)
    new_error = error if new_error is None else new_error
    for name, y in (("error", error), ("new_error", new_error)):
        check_rows(name, y, x.shape, x.dtype, x.device)
    _ops.threshold_compress_with_feedback.default(x, error, new_error, payload, k, rounds, active)


def threshold_decompress(payload: Tensor, out: Tensor, k: int, active: Tensor | None = None) -> None:
    """Writes what the rows of ``payload`` stand for to ``out``: the value of each entry, and 0 elsewhere.

    Args:
        payload: (r, threshold_nbytes(n, k)) uint8, contiguous. Damage may give any values, but nothing is written
            elsewhere.
        out: (r, n) float32 or float64, rows contiguous; written.
        k: as it was for compression.
        active: as for :func:`threshold_compress`: 0 is written where it is 0.

    Raises:
        ValueError: a shape, dtype, device, layout or k is not as above.
    """
    _check("out", out, payload, k, active)
    _ops.threshold_decompress.default(payload, out, k, active)


def threshold_decompress_mean(payload: Tensor, out: Tensor, k: int) -> None:
    """Writes the mean of the W rows of ``payload`` to ``out``.

        out = ((0 + v_0 / W) + v_1 / W) + ...

    in rank order and rounded in the dtype of ``out`` after each operation, so that it is the same on every rank. It is
    the mean over all rows, not over those that have sent an element.

    Args:
        payload: (W, threshold_nbytes(n, k)) uint8, contiguous, W >= 1.
        out: (n,) float32 or float64, contiguous; written.
        k: as it was for compression.

    Raises:
        ValueError: a shape, dtype, device, layout or k is not as above.
    """
    check_gathered(out, payload, lambda n: threshold_nbytes(n, k))
    _ops.threshold_decompress_mean.default(payload, out, k)


def _check(name: str, x: Tensor, payload: Tensor, k: int, active: Tensor | None) -> None:
    check_sent(name, x, payload, lambda n: threshold_nbytes(n, k), active)
