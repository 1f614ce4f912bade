"""The test that every backend has to pass, on every rank."""

from __future__ import annotations

import math

import torch

from commopt.comm import Backend, ExchangingBackend

LONG = 160_001  # so that they may go in several pieces


def conformance(backend: Backend, pairs: bool = True, long: int = LONG) -> None:
    """What every backend must do; called on every rank. ``pairs``: also what one must do for gossip; ``long``: elements
    of long rows."""
    rank, world = backend.rank, backend.world_size
    assert 0 <= rank < world
    for dtype in (torch.float32, torch.float64):
        x = torch.arange(5, dtype=dtype) + 10 * rank
        backend.all_reduce(x).wait()
        assert torch.equal(x, torch.arange(5, dtype=dtype) + 10 * (world - 1) / 2)
    for length in (3, long):
        columns, ranks = torch.arange(length, dtype=torch.int32) % 7, torch.arange(world).view(-1, 1)
        given = (columns * 16 * world + ranks * world + rank).int()
        out = torch.zeros_like(given)
        backend.all_to_all(out, given).wait()
        assert torch.equal(out, (columns * 16 * world + rank * world + ranks).int())
        out = torch.zeros(world, length, dtype=torch.int32)
        backend.all_gather(out, columns + 7 * rank).wait()
        assert torch.equal(out, (columns + 7 * ranks).int())
    x = torch.full((3,), float(rank))
    backend.broadcast(x, src=world - 1).wait()
    assert torch.equal(x, torch.full((3,), float(world - 1)))
    a, b = torch.full((2,), float(rank)), torch.full((2,), float(rank) ** 2)
    works = [backend.all_reduce(a), backend.all_reduce(b)]  # two in flight
    for work in works:
        work.wait()
    assert torch.allclose(a, torch.full((2,), (world - 1) / 2))
    assert torch.allclose(b, torch.full((2,), sum(r * r for r in range(world)) / world))
    assert isinstance(backend, Backend)
    if pairs:
        exchanges(backend, long)


def exchanges(backend: Backend, long: int = LONG) -> None:
    """What a backend whose ranks talk in pairs must do; called on every rank. ``long``: elements of a long message."""
    assert isinstance(backend, ExchangingBackend)
    rank, world = backend.rank, backend.world_size
    for distance in range(world + 1):  # round the ring, to oneself too
        for dtype, shape in (
            (torch.float32, (3,)), (torch.float64, (2, 5)), (torch.uint8, (7,)), (torch.int64, ()), (torch.uint8, (0,)),
            (torch.float32, (long,)),
        ):  # fmt: skip
            places = torch.arange(math.prod(shape)).view(shape) % 5
            x, out = (places + 3 * rank + distance).to(dtype), torch.full(shape, 99, dtype=dtype)
            left, right = (rank - distance) % world, (rank + distance) % world
            backend.exchange(out, x, right, left).wait()
            assert torch.equal(out, (places + 3 * left + distance).to(dtype))
            assert torch.equal(x, (places + 3 * rank + distance).to(dtype))
    peer = rank ^ 1 if rank ^ 1 < world else rank  # in pairs; of an odd number the last has nobody
    outs = [torch.zeros(2) for _ in range(3)]
    mean = torch.full((2,), float(rank))
    works = [  # in flight together, in one order on every rank
        backend.exchange(outs[0], torch.full((2,), rank + 1.0), peer, peer),
        backend.exchange(outs[1], torch.full((2,), rank + 2.0), (rank + 1) % world, (rank - 1) % world),
        backend.all_reduce(mean),
        backend.exchange(outs[2], torch.full((2,), rank + 3.0), (rank - 1) % world, (rank + 1) % world),
    ]
    for work in reversed(works):
        work.wait()
        assert work.is_completed()
        work.wait()  # once more: nothing happens
    for out, expected in zip(outs, (peer + 1, (rank - 1) % world + 2, (rank + 1) % world + 3)):
        assert torch.equal(out, torch.full((2,), float(expected)))
    assert torch.allclose(mean, torch.full((2,), (world - 1) / 2))
