"""The test that every backend has to pass, on every rank."""

from __future__ import annotations

import torch

from commopt.comm import Backend


def conformance(backend: Backend) -> None:
    """What every backend must do; called on every rank."""
    rank, world = backend.rank, backend.world_size
    assert 0 <= rank < world
    for dtype in (torch.float32, torch.float64):
        x = torch.arange(5, dtype=dtype) + 10 * rank
        backend.all_reduce(x).wait()
        assert torch.equal(x, torch.arange(5, dtype=dtype) + 10 * (world - 1) / 2)
    given = (torch.arange(world).view(-1, 1) * 16 + rank).repeat(1, 3).to(torch.uint8)
    out = torch.zeros_like(given)
    backend.all_to_all(out, given).wait()
    assert torch.equal(out, (torch.arange(world).view(-1, 1) + 16 * rank).repeat(1, 3).to(torch.uint8))
    out = torch.zeros(world, 4, dtype=torch.uint8)
    backend.all_gather(out, torch.full((4,), rank + 1, dtype=torch.uint8)).wait()
    assert torch.equal(out, torch.arange(1, world + 1).view(-1, 1).repeat(1, 4).to(torch.uint8))
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
