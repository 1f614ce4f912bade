"""Worlds and models that the tests share. Every toy model has a dead layer, a scalar, a tied weight and rows without
use."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import math
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forks import python
from ports import free_port
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from commopt.comm import ThreadBackend, ThreadWorld


@contextlib.contextmanager
def on_one_core() -> Iterator[None]:
    """The threads that are started meanwhile stay on the core that this one is on, where the system knows of that.

    Only one of them can hold Python's lock. Where it goes from core to core with every operation of torch, that costs
    more than twice the processor time of all they compute, and makes nothing faster.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    allowed = os.sched_getaffinity(0)
    core = int(Path("/proc/thread-self/stat").read_text().rpartition(")")[2].split()[36])
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


_DRAWING = threading.Lock()


@contextlib.contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """torch's own generator, which all threads share, is this thread's meanwhile, and seeded."""
    with _DRAWING:
        torch.manual_seed(seed)
        yield


def on_threads(world_size: int, fn: Callable[[ThreadBackend], Any], timeout: float = 60.0) -> list[Any]:
    """``fn(backend)`` on every rank of a world of threads; the results by rank."""
    with on_one_core():
        return ThreadWorld(world_size, timeout).run(fn)


class Lost:
    """A collective that fails when it is waited for."""

    def __init__(self, why: str) -> None:
        self.why = why

    def wait(self) -> None:
        raise RuntimeError(self.why)

    def is_completed(self) -> bool:
        return True


class Toy(nn.Module):
    """A small language model with everything that has ever broken an optimizer of this kind.

    A dead layer (used, but with zero gradient), a scalar, an embedding tied to the output with rows that never occur,
    a table of positions whose rows from 6 on are never used, an empty parameter, a frozen one, and one that is never
    used.
    """

    def __init__(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def param(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) * 0.3)

        self.embedding = param(17, 5)
        self.positions = param(11, 5)
        self.weight = param(5, 5)
        self.bias = param(5)
        self.gain = param()
        self.dead = param(5, 3)
        self.empty = nn.Parameter(torch.zeros(0, 4, dtype=dtype))
        self.unused = param(3, 2)
        self.frozen = nn.Parameter(torch.ones(4, dtype=dtype), requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean negative log-likelihood of the next token. tokens: (batch, 7) int64."""
        x = self.embedding[tokens[:, :-1]] + self.positions[: tokens.shape[1] - 1]
        x = torch.tanh(x @ self.weight + self.bias) * self.gain + (x @ self.dead).sum(-1, keepdim=True) * 0
        logits = x @ self.embedding.t()[:, :13]  # rows 13 ... 16 are never predicted, nor ever given
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Used(Toy):
    """A toy whose every trainable parameter gets a gradient, so that every bucket can start in backward."""

    def __init__(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        super().__init__(dtype, seed)
        self.unused.requires_grad_(False)


def tokens(step: int, rank: int, world_size: int, batch: int = 4) -> Tensor:
    """Rank ``rank``'s share of the batch of ``step``: the same global batch for every world size that divides 12."""
    whole = torch.randint(0, 13, (12 * batch // 4, 7), generator=torch.Generator().manual_seed(1000 + step))
    return whole[rank::world_size]


def backward(model: Toy, step: int, rank: int, world_size: int) -> None:
    model.zero_grad()
    model(tokens(step, rank, world_size)).backward()


def train(model: Toy, optimizer: Any, steps: range, rank: int = 0, world_size: int = 1) -> None:
    for step in steps:
        backward(model, step, rank, world_size)
        optimizer.step()


def some_params(sizes: list[tuple[int, ...]]) -> list[nn.Parameter]:
    """float64 parameters of these sizes, the same on every rank."""
    g = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(size, generator=g, dtype=torch.float64)) for size in sizes]


def some_grads(sizes: list[tuple[int, ...]], step: int, rank: int) -> list[Tensor]:
    """Their gradients, which differ by step and rank. In the third, 5 to 8 are always 0."""
    out = []
    for i, size in enumerate(sizes):
        g = torch.Generator().manual_seed(100 * step + 10 * rank + i)
        out.append(torch.randn(size, generator=g, dtype=torch.float64) + 0.3)
    out[2][5:9] = 0
    return out


def lacks(i: int, step: int, rank: int) -> bool:
    """Whether parameter ``i`` has no gradient at ``step`` on this rank. Some have none on any rank at every second or
    third step, or for a while; one has none on some of the ranks; at step 13 there is none at all."""
    nowhere = {0: step % 3 == 1, 1: step in (7, 8, 9), 4: step % 2 == 0}
    return step == 13 or nowhere.get(i, False) or (i == 2 and (step + rank) % 3 == 0)


def some_of(grads: list[Tensor], step: int, rank: int) -> list[Tensor | None]:
    """``grads``, but None where the parameter lacks one."""
    return [None if lacks(i, step, rank) else g for i, g in enumerate(grads)]


def give(params: list[nn.Parameter], grads: Sequence[Tensor | None]) -> None:
    """Gives each parameter its gradient, by a backward; None leaves it without."""
    for p in params:
        p.grad = None
    terms = [(p * g).sum() for p, g in zip(params, grads) if g is not None]
    if terms:
        torch.autograd.backward(terms)


def flat_given(grads: Sequence[Tensor | None], sizes: list[tuple[int, ...]]) -> list[float | None]:
    """As :func:`flat`, of gradients; None for each element of one that is not there."""
    pairs = list(zip(grads, sizes))
    return [v for g, size in reversed(pairs) for v in ([None] * math.prod(size) if g is None else g.flatten().tolist())]


def node_mean(ranks: list[list[float | None]]) -> list[float | None]:
    """What a node brings: the mean of what its ranks have, None where none of them has any."""
    columns = zip(*ranks)
    return [None if c.count(None) == len(c) else math.fsum(g or 0.0 for g in c) / len(c) for c in columns]


def flat(tensors: list[Any]) -> list[float]:
    """All elements in the order in which a bucket packs them: of the last tensor first."""
    return [v for t in reversed(tensors) for v in t.detach().flatten().tolist()]


# torch's very first arithmetic in a process, if several threads are in it, may differ in the last bits from all later
backward(Toy(), 0, 0, 1)


def params_of(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same_bits(a: list[Tensor], b: list[Tensor]) -> bool:
    """Equal to the last bit, NaN and sign of zero included."""
    return len(a) == len(b) and all(
        x.dtype == y.dtype
        and x.shape == y.shape
        and torch.equal(x.view(-1).view(torch.uint8), y.view(-1).view(torch.uint8))
        if x.numel()
        else x.shape == y.shape
        for x, y in zip(a, b)
    )


def tensors_in(state_dict: dict[str, Any]) -> list[Tensor]:
    """All tensors of an optimizer's state dict, residuals included."""
    parts = [state_dict["state"], state_dict.get("residuals", {}).get("state", {})]
    return [v for part in parts for entry in part.values() for v in entry.values() if isinstance(v, Tensor)]


def all_tensors(tree: Any) -> list[Tensor]:
    """All tensors in dicts, lists and tuples of one another."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def on_processes(world_size: int, fn: Callable[[int, int], Any], interpreter: str | None = None) -> list[Any]:
    """``fn(rank, world_size)`` (a function of a module) in processes over Gloo; the results by rank.

    They are forks (see forks.py), but for rank 0 where ``interpreter`` is given, which starts that.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "call").write_bytes(pickle.dumps(sys.path) + pickle.dumps(fn))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world_size)}
        command = [str(Path(__file__).with_name("process_rank.py")), folder]
        begun_by = [interpreter or python(), *[python()] * (world_size - 1)]
        ranks = [
            subprocess.Popen([begin, *command], env={**os.environ, **meeting, "RANK": str(rank)})
            for rank, begin in enumerate(begun_by)
        ]
        try:
            codes = [rank.wait() for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        files = [Path(folder, str(rank)) for rank in range(world_size)]
        results = [torch.load(file, weights_only=False) if file.exists() else None for file in files]
        in_order = sorted((file for file in files if file.exists()), key=lambda file: file.stat().st_mtime_ns)
    failed = [results[int(file.name)] for file in in_order if isinstance(results[int(file.name)], Exception)]
    if failed or any(codes):
        raise failed[0] if failed else RuntimeError(f"the processes ended with {codes}")
    return results


def through_a_file(state: Any) -> Any:
    """``state`` as it comes back from where it was saved."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def torch_adam(params: Any, decoupled_weight_decay: bool = False, **settings: Any) -> torch.optim.Optimizer:
    """torch's Adam; before torch 2.7 the decoupled one goes by AdamW only."""
    return (torch.optim.AdamW if decoupled_weight_decay else torch.optim.Adam)(params, **settings)


needs_fsdp2 = pytest.mark.skipif(
    torch.__version__ < (2, 9), reason="before torch 2.9 FSDP2 lacks what these need; that of 2.6 fails on CPUs"
)

needs_connections = pytest.mark.skipif(
    not hasattr(dist.Store, "clone"), reason="before torch 2.8 a process has one connection to a store"
)

HAS_MPI = bool(shutil.which("mpirun") and importlib.util.find_spec("mpi4py"))
needs_mpi = pytest.mark.skipif(not HAS_MPI, reason="no MPI: these need mpirun (Debian: openmpi-bin) and mpi4py")

MPI_SETTINGS = {
    "OMP_NUM_THREADS": "1",
    # Open MPI: as root; more ranks than cores (4.x, then 5.x); no reading of each other's memory: containers forbid it
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
}
_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def mpirun(
    world_size: int, *argv: str, patience: float = 150.0, interpreter: str | None = None
) -> subprocess.CompletedProcess[str]:
    """``python argv...`` on ``world_size`` ranks under mpirun, or ``interpreter argv...``; fails if they do not end."""
    env = {k: v for k, v in os.environ.items() if k not in _LAUNCHERS} | MPI_SETTINGS
    command = ["mpirun", "-np", str(world_size), interpreter or python(), *argv]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = process.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        process.terminate()  # mpirun takes its ranks along
        out, err = process.communicate(timeout=30)
        pytest.fail(f"mpirun {' '.join(argv)} hangs:\n{out}\n{err}")
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def on_mpi(world_size: int, fn: Callable[..., Any], *args: str) -> list[Any]:
    """``fn(*args)`` (a function of a module) on ranks under mpirun; the results by rank."""
    with tempfile.TemporaryDirectory() as folder:
        done = mpirun(
            world_size, str(Path(__file__).with_name("mpi_rank.py")), folder, fn.__module__, fn.__name__, *args
        )
        files = [Path(folder, str(rank)) for rank in range(world_size)]
        results = [torch.load(file, weights_only=False) if file.exists() else None for file in files]
        in_order = sorted((file for file in files if file.exists()), key=lambda file: file.stat().st_mtime_ns)
    failed = [results[int(file.name)] for file in in_order if isinstance(results[int(file.name)], Exception)]
    if failed or done.returncode:
        raise failed[0] if failed else RuntimeError(f"exit code {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return results


def scheduled(step: int) -> dict[str, Any]:
    """Hyper-parameters of the Adam family that are others in every step."""
    return {
        "lr": 0.02 / (1 + 0.2 * step), "betas": (0.9 - 0.03 * (step % 3), 0.98 - 0.01 * (step % 4)),
        "eps": 1e-6 * (1 + step), "weight_decay": 0.03 * (step % 3),
    }  # fmt: skip


def as_scheduled(oracle: Any, step: int) -> None:
    """Sets those of an oracle."""
    now = scheduled(step)
    oracle.lr, oracle.eps, oracle.wd, (oracle.b1, oracle.b2) = now["lr"], now["eps"], now["weight_decay"], now["betas"]
