"""Muon on matrices that are cut: functions of a rank, for tests/test_mesh.py, and what they share with test_muon.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import commopt
from commopt.optim import muon

MATRICES = ((7, 12), (12, 7), (16, 16), (3, 5), (2, 9))
SETTINGS: list[dict[str, Any]] = [
    {"lr": 0.02},
    {"lr": 0.1, "nesterov": False, "momentum": 0.8, "weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"},
    {"lr": torch.tensor(0.05), "ns_steps": 3, "eps": 1e-3, "ns_coefficients": (2.0, -1.5, 0.5)},
]


def drawn(shape: Any, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def cut_up(rank: int, world_size: int) -> dict[str, tuple[bool, int, int]]:
    """By the way matrices are cut: whether they become what whole ones do, how many this rank has worked on in a step,
    and how many bytes it has sent."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    line = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    ways: dict[str, list[Any]] = {
        "rows": [(line, (Shard(0),))],
        "columns": [(line, (Shard(1),))],
        "replicas": [(line, (Replicate(),))],
        "rows on replicas": [(square, (Replicate(), Shard(0)))],
        "rows and columns": [(square, (Shard(0), Shard(1)))],
    }
    ways["all at once"] = [place for places in ways.values() for place in places]
    return {way: _against_whole(places, distribute_tensor) for way, places in ways.items()}


def _against_whole(places: list[Any], distribute: Any) -> tuple[bool, int, int]:
    where = [places[i % len(places)] for i in range(len(MATRICES))]
    whole = [torch.nn.Parameter(drawn(shape, i)) for i, shape in enumerate(MATRICES)]
    pieces = [torch.nn.Parameter(distribute(p.detach(), *place)) for p, place in zip(whole, where)]
    ours, reference = commopt.Muon(pieces, lr=0.1), commopt.Muon(whole, lr=0.1)
    worked = sent = 0
    for step in range(3):
        for i, (p, q) in enumerate(zip(whole, pieces)):
            p.grad = drawn(p.shape, 10 * step + i)
            q.grad = distribute(p.grad, *where[i])
        reference.step()
        with _Watched() as watched:
            ours.step()
        worked, sent = watched.worked, watched.sent
    same = all(torch.equal(p, q.full_tensor()) for p, q in zip(whole, pieces))
    return same, worked, sent


class _Watched:
    """Counts matrices that are orthogonalised, and bytes of all-to-alls, in a with block."""

    def __enter__(self) -> _Watched:
        self.worked = self.sent = 0
        self._before = muon.newton_schulz, dist.all_to_all_single
        iterate, exchange = self._before

        def counted(*args: Any, **kwargs: Any) -> Tensor:
            self.worked += 1
            return iterate(*args, **kwargs)

        def carried(out: Tensor, given: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.sent += given.numel() * given.element_size()
            return exchange(out, given, *args, **kwargs)

        muon.newton_schulz, dist.all_to_all_single = counted, carried
        return self

    def __exit__(self, *_: object) -> None:
        muon.newton_schulz, dist.all_to_all_single = self._before
