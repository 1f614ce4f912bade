"""What runs of the trainer leave behind, and whether two of them are the same."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from trainer_pair import run

from commopt.train import manifest, sums
from commopt.train.config import Config
from commopt.train.metrics import read_metrics

Make = Callable[..., Config]

CLOCK = ("tokens_per_s", "seconds")


def records(run_dir: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in record.items() if k not in CLOCK} for record in read_metrics(run_dir)]


def content(run_dir: Path, step: int, ranks: int) -> list[Any]:
    """Everything a checkpoint holds, without the clock and the config."""
    folder = run_dir / "checkpoints" / f"step-{step:08d}"
    shared = torch.load(folder / "shared.pt", weights_only=True)
    del shared["config"], shared["meter"]["seconds"]
    return [shared, *(torch.load(folder / f"rank-{rank:05d}.pt", weights_only=True) for rank in range(ranks))]


def assert_same(a: Any, b: Any, where: str = "") -> None:
    assert type(a) is type(b), where
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype, where
        assert torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for index, (x, y) in enumerate(zip(a, b)):
            assert_same(x, y, f"{where}[{index}]")
    else:
        assert a == b, where


def saved(run_dir: Path, step: int = 12, rank: int | None = None) -> list[torch.Tensor]:
    """Weights in a checkpoint; with ``rank`` also the optimizer's state and the residuals of that rank."""
    folder = run_dir / "checkpoints" / f"step-{step:08d}"
    shared = torch.load(folder / "shared.pt", weights_only=True)
    trees: list[Any] = [shared["weights"]]
    if rank is not None:
        own = torch.load(folder / f"rank-{rank:05d}.pt", weights_only=True)
        trees += [shared["optimizer_state"], own["optimizer_state"]]
    return [leaf for leaf in tree_leaves(trees) if isinstance(leaf, torch.Tensor)]


def train_all(path: str) -> list[Any]:
    """The configs in a file, one after another; those over Gloo meet at a port of their own."""
    from mpi4py import MPI

    summaries = []
    for config, port in pickle.loads(Path(path).read_bytes()):
        if config.comm.backend != "mpi":
            rank, size = str(MPI.COMM_WORLD.rank), str(MPI.COMM_WORLD.size)
            place = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            os.environ.update(place)
            summaries.append(run(config))
            for name in place:
                del os.environ[name]
        else:
            summaries.append(run(config))
    return summaries


def sign_anew(path: Path) -> None:
    """Make a checkpoint's manifest fit what its files are now: verified, and still not what was saved."""
    step = manifest.step_in(path.name)
    assert step is not None
    names = sorted(file.name for file in path.glob("*.pt"))
    files = {n: {"size": (path / n).stat().st_size, "sha256": sums.of_file(path / n)} for n in names}
    (path / manifest.MANIFEST).write_text(manifest.make_manifest(step, len(names) - 1, files))
