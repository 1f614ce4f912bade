"""Top-k: of every chunk of a row the k elements of the largest magnitude, with their indices.

**Payload row.** ``n`` elements in chunks of ``chunk`` (the last one may be shorter). Each chunk has ``k`` entries (no
more than it has elements), K in all; each group of about 256 entries shares its scales::

    [ceil(chunks / group) float32 scales, two of each if bits = 2][K values of ``bits`` bits][0, if that is odd]
    [K indices, of 1 byte if chunk <= 256, else of 2][zeros up to a multiple of 16 bytes]

    group = 256 // k chunks, rounded down to a multiple of 8 / gcd(k, 8), which is its least size

Indices count from the start of a chunk and ascend within it. Magnitudes are compared as the bits of |z|: of equal ones
that with the lower index is chosen, and NaN is above all numbers. Zeros are never sent, and elements that a mask makes
absent are zeros. So a chunk may have fewer entries than places: those left over repeat the last index, and if there are
none, the first index is 1 and the others 0 (where there is one place only: the length of the chunk, in its lowest
bits). Their values have no bit set. So an entry counts if its index is in the chunk, above the one before it, and, for
the first, not above the second.

The values of the entries v of a group, least significant bit first:

    bits=1:   1 for plus, 0 for minus; v decodes to +-s, s the mean of |v|
    bits=2:   that, and 1 where |v| >= the mean of |v|; the two scales are the means of |v| below, and from there on
    bits=8:   int8 q = v / s to nearest, ties to even; s = max |v| / 127; v decodes to q s
    bits=16:  bfloat16, to nearest, ties to even; of float64 by way of float32
    bits=32:  v itself, of the row's dtype: 8 bytes for float64

Means are summed in float64, in 32 lanes (entry i of a group in lane i % 32, then the upper half of the lanes to the
lower, and so on), and rounded to float32: all providers give the same bits, but for the payload of NaN. Where a group
has an inf or a NaN, so has a scale or a value, and what decodes from it is not finite.

Which elements are sent, and their signs, are a matter of bits: ``torch.set_flush_denormal(True)`` changes nothing of
it. Scales, residuals and what decodes are then without denormals, on every provider; ranks must agree on the mode, as
in all arithmetic that is to give the same bits.

A ``active`` mask is (r, ceil(n / 8)) uint8, least significant bit first. Rows of tensors may be
strided: columns of larger ones.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from commopt.ops import catalogue as catalogue  # it defines the operators
from commopt.ops.checks import check_gathered, check_rows, check_sent
from commopt.ops.top_k_row import TopKRow

__all__ = [
    "TopKRow", "topk_compress", "topk_compress_with_feedback", "topk_decompress", "topk_decompress_mean",
    "topk_is_sound", "topk_nbytes",
]  # fmt: skip

_ops = torch.ops.commopt


def topk_is_sound(payload: Tensor, row: TopKRow) -> Tensor:
    """0-d bool: whether rows are such as compression makes of finite numbers.

    Args:
        payload: (r, row.nbytes) uint8, contiguous.
        row: what they are.
    """
    sound = torch.ones((), dtype=torch.bool, device=payload.device)
    _ops.topk_find_unsound.default(payload, sound, row.n, row.k, row.chunk, row.bits, row.dtype)
    return sound


@functools.lru_cache(maxsize=1024)
def topk_nbytes(n: int, k: int, chunk: int, bits: int, dtype: torch.dtype = torch.float32) -> int:
    """Bytes of the payload row of ``n`` elements, a multiple of 16.

    Args:
        n: elements in the row; 0 gives 0.
        k: entries of a chunk, 1 <= k <= chunk; at least 2 if bits <= 2 and chunk is 256 or 65536.
        chunk: elements, a power of two from 16 to 65536.
        bits: of a value: 1, 2, 8, 16 or 32.
        dtype: of the elements; matters for bits=32 only.

    Raises:
        ValueError: any of them is not as above.
    """
    return TopKRow(n, k, chunk, bits, dtype).nbytes


def topk_compress(x: Tensor, payload: Tensor, k: int, chunk: int, bits: int, active: Tensor | None = None) -> None:
    """Writes C[x], the entries of each chunk of each row of ``x``, to ``payload``.

    Args:
        x: (r, n) float32 or float64, rows contiguous; unchanged.
        payload: (r, topk_nbytes(n, k, chunk, bits, x.dtype)) uint8, contiguous; written, in the format that the module
            states.
        k, chunk, bits: as for :func:`topk_nbytes`.
        active: (r, ceil(n / 8)) uint8 bit mask of the elements that take part, rows contiguous, or None for all.

    Raises:
        ValueError: a shape, dtype, device, layout, k, chunk or bits is not as above.
    """
    _check("x", x, payload, k, chunk, bits, active)
    _ops.topk_compress.default(x, payload, k, chunk, bits, active)


def topk_compress_with_feedback(
    x: Tensor,
    error: Tensor,
    payload: Tensor,
    k: int,
    chunk: int,
    bits: int,
    active: Tensor | None = None,
    new_error: Tensor | None = None,
) -> None:
    """Sends the residual too, and keeps what is lost: z = x + error;  payload = C[z];  new_error <- z - C[z].

    Args:
        x: (r, n) float32 or float64, rows contiguous; unchanged unless it is ``new_error``.
        error: like x, with strides of its own: the residual; unchanged unless it is ``new_error``.
        payload, k, chunk, bits, active: as for :func:`topk_compress`.
        new_error: like error; written, 0 where ``active`` is 0; None for ``error``. It may be ``error`` or ``x``
            itself; no two arguments may overlap otherwise.

    Raises:
        ValueError: a shape, dtype, device, layout, k, chunk or bits is not as above.
    """
    _check("x", x, payload, k, chunk, bits, active)
    new_error = error if new_error is None else new_error
    for name, y in (("error", error), ("new_error", new_error)):
        check_rows(name, y, x.shape, x.dtype, x.device)
    _ops.topk_compress_with_feedback.default(x, error, new_error, payload, k, chunk, bits, active)


def topk_decompress(payload: Tensor, out: Tensor, k: int, chunk: int, bits: int, active: Tensor | None = None) -> None:
    """Writes what the rows of ``payload`` stand for to ``out``: the value of each entry, and 0 elsewhere.

    Args:
        payload: (r, topk_nbytes(n, k, chunk, bits, out.dtype)) uint8, contiguous. Entries whose index is not in their
            chunk count for nothing; other damage may give any values.
        out: (r, n) float32 or float64, rows contiguous; written.
        k, chunk, bits: as they were for compression.
        active: as for :func:`topk_compress`: 0 is written where it is 0.

    Raises:
        ValueError: a shape, dtype, device, layout, k, chunk or bits is not as above.
    """
    _check("out", out, payload, k, chunk, bits, active)
    _ops.topk_decompress.default(payload, out, k, chunk, bits, active)


def topk_decompress_mean(payload: Tensor, out: Tensor, k: int, chunk: int, bits: int) -> None:
    """Writes the mean of the W rows of ``payload`` to ``out``.

        out = ((0 + v_0 / W) + v_1 / W) + ...

    in rank order and rounded in the dtype of ``out`` after each operation, so that it is the same on every rank. It is
    the mean over all rows, not over those that have sent an element.

    Args:
        payload: (W, topk_nbytes(n, k, chunk, bits, out.dtype)) uint8, contiguous, W >= 1.
        out: (n,) float32 or float64, contiguous; written.
        k, chunk, bits: as they were for compression.

    Raises:
        ValueError: a shape, dtype, device, layout, k, chunk or bits is not as above.
    """
    check_gathered(out, payload, lambda n: topk_nbytes(n, k, chunk, bits, out.dtype))
    _ops.topk_decompress_mean.default(payload, out, k, chunk, bits)


def _check(name: str, x: Tensor, payload: Tensor, k: int, chunk: int, bits: int, active: Tensor | None) -> None:
    check_sent(name, x, payload, lambda n: topk_nbytes(n, k, chunk, bits, x.dtype), active)
