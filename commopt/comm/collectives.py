"""Collectives made of verbs and compressors. ``yield`` hands out a collective in flight; see ``schedule`` for who
waits."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from commopt import ops
from commopt.comm.backend import Backend, Work
from commopt.compress.compressor import Compressor
from commopt.compress.feedback import Feedback


def compressed_all_reduce(x: Tensor, feedback: Feedback, compressor: Compressor, backend: Backend) -> Iterator[Work]:
    """x <- the mean of x over all ranks, compressed both ways, in place and with the same bits on every rank.

    Two phases, each with error feedback (1-bit Adam, arXiv 2102.02888, section 4; rank r is the server of chunk r):

        1. every rank compresses x and sends chunk r to rank r; rank r takes the mean of what it receives
        2. rank r compresses its mean and sends it to all

    What a rank sends is 2 (W-1) rows of ``compressor.nbytes(D / W)`` bytes, in 2 collectives. No temporary is larger
    than the wire rows.

    Args:
        x: (D,) float32 or float64, contiguous; D a multiple of the world size (of 8 W where ``feedback.live`` is
        given).
        feedback: this rank's residuals of x. Elements dead in ``feedback.live`` come out as 0.
        compressor: the same on every rank.
        backend: the ranks.

    Yields:
        Each collective as it starts; the caller waits for it before it resumes the generator.
    """
    world, rank = backend.world_size, backend.rank
    rows = x.view(world, -1)
    nbytes = compressor.nbytes(rows.shape[1], x.dtype)
    send, recv = (torch.empty(world, nbytes, dtype=torch.uint8, device=x.device) for _ in range(2))
    live = feedback.live.view(world, -1) if feedback.live is not None else None

    compressor.compress_with_feedback(rows, feedback.worker.view(world, -1), send, live)
    yield backend.all_to_all(recv, send)

    chunk, own = rows[rank], send[rank]  # x was sent, and its bytes too: both places are free
    compressor.decompress_mean(recv, chunk)
    mine = live[rank : rank + 1] if live is not None else None
    compressor.compress_with_feedback(chunk.unsqueeze(0), feedback.server.unsqueeze(0), own.unsqueeze(0), mine)
    yield backend.all_gather(recv, own)

    compressor.decompress(recv, rows)
    if feedback.live is not None:
        ops.zero_dead_(x, feedback.live)
