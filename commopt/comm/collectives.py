"""Collectives made of verbs and compressors. ``yield`` hands out a collective in flight; see ``schedule`` for who
waits."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from commopt.comm.backend import Backend, Work
from commopt.compress.compressor import Columns, Compressor
from commopt.compress.feedback import Feedback


@dataclass(frozen=True)
class Arrival:
    """Columns of a compressed mean on their way.

    Attributes:
        columns: [start, stop) of every rank's share.
        wires: (W, nbytes(stop - start)) uint8, row r with the mean of what rank r serves.
        work: when it is done, they are there.
    """

    columns: Columns
    wires: Tensor
    work: Work


def compressed_mean(
    compress: Callable[[Tensor, Columns], None],
    feedback: Feedback,
    compressor: Compressor,
    backend: Backend,
    back: Backend | None = None,
    columns: Sequence[Columns] | None = None,
) -> Generator[Work, None, list[Arrival]]:
    """The mean over all ranks of what each compresses, still as bytes: the same on every rank.

    Two phases, each with error feedback (1-bit Adam, arXiv 2102.02888, section 4; rank r is the server of chunk r):

        1. every rank compresses its input and sends chunk r to rank r; rank r takes the mean of what it receives
        2. rank r compresses its mean and sends it to all

    What a rank sends is 2 (W-1) rows of ``compressor.nbytes(D / W)`` bytes, in 2 collectives. In several columns it is
    about the same number of bytes and 2 collectives for each, and while some are on their way, others are compressed.
    Nothing but ``feedback.next_worker`` and ``feedback.next_server`` is written; the caller commits them.

    Args:
        compress: writes the given columns of the input to the wire rows given, (W, nbytes(stop - start)) uint8, and
            what is lost to ``feedback.next_worker``.
        feedback: this rank's residuals, of D elements; D a multiple of W.
        compressor: the same on every rank.
        backend: the ranks, W of them.
        back: the line for the way back, if it is another one.
        columns: what to send at a time, multiples of ``compressor.grain``; None for all of it.

    Yields:
        Each collective of the way out; the caller waits for it before it resumes the generator.

    Returns:
        What is on the way back, all of it started.
    """
    world, rank = backend.world_size, backend.rank
    server, after, live = feedback.server, feedback.next_server, feedback.live_rows(world)

    def send(start: int, stop: int) -> tuple[Columns, Tensor, Tensor, Work]:
        shape = world, compressor.nbytes(stop - start, server.dtype)
        out, received = (torch.empty(shape, dtype=torch.uint8, device=server.device) for _ in range(2))
        compress(out, (start, stop))
        return (start, stop), out, received, backend.all_to_all(received, out)

    def send_back(start: int, stop: int, own: Tensor, received: Tensor) -> Arrival:
        mask = None if live is None else live[rank, start // 8 : (stop + 7) // 8]
        compressor.reduce(received, server[start:stop], own, mask, after[start:stop])
        return Arrival((start, stop), received, (back or backend).all_gather(received, own))

    sent = [send(*cut) for cut in columns or [(0, server.shape[0])]]
    arrivals = []
    for cut, out, received, work in sent:
        yield work
        arrivals.append(send_back(*cut, out[rank], received))  # the bytes of out have been sent: the place is free
    return arrivals


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

    def compress(wire: Tensor, _: Columns) -> None:
        worker, after = feedback.worker_rows(backend.world_size)
        compressor.compress_with_feedback(rows, worker, wire, live, after)

    (arrival,) = yield from compressed_mean(compress, feedback, compressor, backend)
    yield arrival.work
    feedback.commit()
    compressor.decompress_live(arrival.wires, rows, live)
