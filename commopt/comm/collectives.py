"""Collectives made of collectives and compressors. ``yield`` hands out a collective in flight; see ``pipeline`` for who
waits."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from commopt.comm.backend import Backend, Work
from commopt.comm.topology import Channel
from commopt.compress.compressor import Chunk, Compressor
from commopt.compress.feedback import Feedback


def reduce_scatter(x: Tensor, backend: Backend) -> Generator[Work, None, Tensor]:
    """This rank's part of the mean of x over W ranks, in full precision: part r, of D / W elements, is rank r's.

    Every rank sends each part straight to its owner: (W-1) / W of x, and the sum has one order on every backend.

    Args:
        x: (D,), contiguous, unchanged; D a multiple of W.
        backend: the ranks.

    Yields:
        The collective; the caller waits for it before it resumes the generator.
    """
    parts = x.view(backend.world_size, -1)
    received = torch.empty_like(parts)
    yield backend.all_to_all(received, parts)
    return received.mean(0)


def compressed_reduce_scatter(
    compress: Callable[[Tensor], None], out: Tensor, compressor: Compressor, backend: Backend
) -> Iterator[Work]:
    """out <- this rank's row of the mean over W ranks, of what each compresses: row r goes to rank r.

    Args:
        compress: writes the rows, (W, ``compressor.nbytes(n)``) uint8.
        out: (n,) float32 or float64, written.
        compressor: the same on every rank.
        backend: the ranks.

    Yields:
        The collective; the caller waits for it before it resumes the generator.
    """
    shape = backend.world_size, compressor.nbytes(out.shape[0], out.dtype)
    sent, received = (torch.empty(shape, dtype=torch.uint8, device=out.device) for _ in range(2))
    compress(sent)
    yield backend.all_to_all(received, sent)
    compressor.decompress_mean(received, out)


def mean_over_all(x: Tensor, send: Channel, reply: Channel, started: Work | None = None) -> Iterator[Work]:
    """x <- its mean over all ranks, in full precision, in place and with the same bits on every rank.

    Where ranks are grouped by nodes: the mean over the node, of which every rank keeps a part; the mean of that between
    the nodes; and the parts are put together in the node. Between nodes a rank sends what an all-reduce of its part
    does.

    Args:
        x: (D,), contiguous; D a multiple of the number of ranks.
        send, reply: the ranks, for the first collective and for what follows; see :class:`commopt.comm.Pipeline`.
        started: yielded when the last collective has started.

    Yields:
        Each collective as it starts; the caller waits for it before it resumes the generator.
    """
    before_the_last = () if started is None else (started,)
    if send.intra_node.world_size == 1:
        work = send.inter_node.all_reduce(x)
        yield from before_the_last
        yield work
        return
    part = yield from reduce_scatter(x, send.intra_node)
    if send.inter_node.world_size > 1:
        yield reply.inter_node.all_reduce(part)
    work = reply.intra_node.all_gather(x.view(send.intra_node.world_size, -1), part)
    yield from before_the_last
    yield work


@dataclass(frozen=True)
class InFlightChunk:
    """A chunk of a compressed mean in flight.

    Attributes:
        chunk: [start, stop) of every rank's shard.
        payload: (W, nbytes(stop - start)) uint8, row r with the mean of what rank r serves.
        work: when it is done, the payload is there.
    """

    chunk: Chunk
    payload: Tensor
    work: Work


def compressed_mean(
    compress: Callable[[Tensor, Chunk], None],
    feedback: Feedback,
    compressor: Compressor,
    backend: Backend,
    back: Backend | None = None,
    chunks: Sequence[Chunk] | None = None,
    active: Tensor | None = None,
    scaling: Tensor | None = None,
) -> Generator[Work, None, list[InFlightChunk]]:
    """The mean over all ranks of what each compresses, still as bytes: the same on every rank.

    All is compressed, and started to be sent, by the call; the task that it returns does not hold ``compress``.

    Two phases, each with error feedback (1-bit Adam, arXiv 2102.02888, section 4; rank r is the server of chunk r):

        1. every rank compresses its input and sends chunk r to rank r; rank r takes the mean of what it receives
        2. rank r compresses its mean and sends it to all

    What a rank sends is 2 (W-1) rows of ``compressor.nbytes(D / W)`` bytes, in 2 collectives. In several chunks it is
    about the same number of bytes and 2 collectives for each, and while some are in flight, others are compressed.
    Nothing but ``feedback.next_worker`` and ``feedback.next_server`` is written; the caller commits them.

    Args:
        compress: writes the given chunk of the input to the payload rows given, (W, nbytes(stop - start)) uint8, and
            what is lost to ``feedback.next_worker``.
        feedback: this rank's residuals, of D elements; D a multiple of W.
        compressor: the same on every rank.
        backend: the ranks, W of them.
        back: the channel for replies, if it is another one.
        chunks: what to send at a time, multiples of ``compressor.chunk_multiple``; None for all of it.
        active: (D / 8,) uint8 bit mask, least significant bit first, or None for all. Inactive elements (bit 0) become
            0 in the server's residual and in the result.
        scaling: (D / W,) factor k > 0 of what this rank averages, where ``compress`` is of k times the input: the
            server's residual counts k times, and what is lost is divided by k.

    Yields:
        Each collective that sends; the caller waits for it before it resumes the generator.

    Returns:
        The replies in flight, all of them started.
    """
    world, rank = backend.world_size, backend.rank
    server, after = feedback.server, feedback.next_server
    rows = None if active is None else active.view(world, -1)

    def send(start: int, stop: int) -> tuple[Chunk, Tensor, Tensor, Work]:
        shape = world, compressor.nbytes(stop - start, server.dtype)
        out, received = (torch.empty(shape, dtype=torch.uint8, device=server.device) for _ in range(2))
        compress(out, (start, stop))
        return (start, stop), out, received, backend.all_to_all(received, out)

    def send_back(start: int, stop: int, own: Tensor, received: Tensor) -> InFlightChunk:
        mask = None if rows is None else rows[rank, start // 8 : (stop + 7) // 8]
        residual, lost = server[start:stop], after[start:stop]
        if scaling is not None:
            residual = torch.mul(residual, scaling[start:stop], out=lost)
        compressor.reduce(received, residual, own, mask, lost)
        if scaling is not None:
            lost.div_(scaling[start:stop])
        return InFlightChunk((start, stop), received, (back or backend).all_gather(received, own))

    def turn(sent: list[tuple[Chunk, Tensor, Tensor, Work]]) -> Generator[Work, None, list[InFlightChunk]]:
        in_flight = []
        for chunk, out, received, work in sent:
            yield work
            in_flight.append(
                send_back(*chunk, out[rank], received)
            )  # the bytes of out have been sent: the place is free
        return in_flight

    return turn([send(*chunk) for chunk in chunks or [(0, server.shape[0])]])


def to_node(in_flight: Sequence[InFlightChunk], inside: Backend) -> Generator[Work, None, list[InFlightChunk]]:
    """Gathers the payloads that have come to each rank of a node, for all of them: still as bytes, so that nothing more
    is lost.

    Args:
        in_flight: of the parts that are this rank's, (M, nbytes) each.
        inside: the ranks of the node, L of them.

    Yields:
        Each chunk; the caller waits for it before it resumes the generator.

    Returns:
        The same with the rows of all parts, (L M, nbytes), part by part; in flight.
    """
    if inside.world_size == 1:
        return list(in_flight)
    out = []
    for chunk in in_flight:
        yield chunk.work
        payload = chunk.payload.new_empty((inside.world_size, *chunk.payload.shape))
        work = inside.all_gather(payload.flatten(1), chunk.payload.flatten())
        out.append(InFlightChunk(chunk.chunk, payload.flatten(0, 1), work))
    return out


def compressed_all_reduce(
    x: Tensor, feedback: Feedback, compressor: Compressor, backend: Backend, active: Tensor | None = None
) -> Iterator[Work]:
    """x <- the mean of x over all ranks, compressed both ways, in place and with the same bits on every rank.

    See :func:`compressed_mean`.

    Args:
        x: (D,) float32 or float64, contiguous; D a multiple of the world size (of 8 W where ``active`` is given).
        feedback: this rank's residuals of x.
        compressor: the same on every rank.
        backend: the ranks.
        active: as for :func:`compressed_mean`: inactive elements have no residual, and come out as 0.

    Yields:
        Each collective as it starts; the caller waits for it before it resumes the generator.
    """
    rows = x.view(backend.world_size, -1)
    mask = None if active is None else active.view(backend.world_size, -1)

    def compress(payload: Tensor, _: Chunk) -> None:
        worker, after = feedback.worker_rows(backend.world_size)
        compressor.compress_with_feedback(rows, worker, payload, mask, after)

    (chunk,) = yield from compressed_mean(compress, feedback, compressor, backend, active=active)
    yield chunk.work
    feedback.commit()
    compressor.decompress_active(chunk.payload, rows, mask)
