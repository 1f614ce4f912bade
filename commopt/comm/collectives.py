"""Collectives made of verbs and compressors. ``yield`` hands out a collective in flight; see ``schedule`` for who
waits."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator

import torch
from torch import Tensor

from commopt.comm.backend import Backend, Work
from commopt.compress.compressor import Compressor
from commopt.compress.feedback import Feedback


def compressed_mean(
    compress: Callable[[Tensor], None],
    feedback: Feedback,
    compressor: Compressor,
    backend: Backend,
    back: Backend | None = None,
) -> Generator[Work, None, Tensor]:
    """The mean over all ranks of what each compresses, still as bytes: the same on every rank.

    Two phases, each with error feedback (1-bit Adam, arXiv 2102.02888, section 4; rank r is the server of chunk r):

        1. every rank compresses its input and sends chunk r to rank r; rank r takes the mean of what it receives
        2. rank r compresses its mean and sends it to all

    What a rank sends is 2 (W-1) rows of ``compressor.nbytes(D / W)`` bytes, in 2 collectives. Nothing but
    ``feedback.next_worker`` and ``feedback.next_server`` is written; the caller commits them.

    Args:
        compress: writes the input to the wire rows given, (W, nbytes(D / W)) uint8, and what is lost to
            ``feedback.next_worker``.
        feedback: this rank's residuals, of D elements; D a multiple of W.
        compressor: the same on every rank.
        backend: the ranks, W of them.
        back: the line for the way back, if it is another one.

    Yields:
        Each collective as it starts; the caller waits for it before it resumes the generator.

    Returns:
        Wire rows (W, nbytes(D / W)), row r with the mean of chunk r.
    """
    world, rank = backend.world_size, backend.rank
    server = feedback.server
    nbytes = compressor.nbytes(server.shape[0], server.dtype)
    send, received = (torch.empty(world, nbytes, dtype=torch.uint8, device=server.device) for _ in range(2))

    compress(send)
    yield backend.all_to_all(received, send)

    own = send[rank]  # its bytes have been sent: the place is free
    live = feedback.live_rows(world)
    compressor.reduce(received, server, own, None if live is None else live[rank], feedback.next_server)
    yield (back or backend).all_gather(received, own)

    return received


def compressed_all_reduce(x: Tensor, feedback: Feedback, compressor: Compressor, backend: Backend) -> Iterator[Work]:
    """x <- the mean of x over all ranks, compressed both ways, in place and with the same bits on every rank.

    See :func:`compressed_mean`.

    Args:
        x: (D,) float32 or float64, contiguous; D a multiple of the world size (of 8 W where ``feedback.live`` is
            given).
        feedback: this rank's residuals of x. Elements dead in ``feedback.live`` come out as 0.
        compressor: the same on every rank.
        backend: the ranks.

    Yields:
        Each collective as it starts; the caller waits for it before it resumes the generator.
    """
    rows = x.view(backend.world_size, -1)
    live = feedback.live_rows(backend.world_size)

    def compress(wire: Tensor) -> None:
        worker, after = feedback.worker_rows(backend.world_size)
        compressor.compress_with_feedback(rows, worker, wire, live, after)

    wires = yield from compressed_mean(compress, feedback, compressor, backend)
    feedback.commit()
    compressor.decompress_live(wires, rows, live)
