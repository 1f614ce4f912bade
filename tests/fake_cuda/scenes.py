"""Scenes on devices that are the CPU: prints what each has found, a dict as JSON, in the last line.

LD_PRELOAD=LIBRARY FAKE_CUDA=LIBRARY python scenes.py SCENE
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from typing import Any

from torch_cuda import Anywhere, on_devices  # before whatever asks torch for its devices

# isort: split
import torch
from every import COMMUNICATING, OVERLAPPING, make
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from worlds import Toy, Used, on_threads, params_of, same_bits, tokens

import commopt
from commopt.comm import ThreadBackend
from commopt.compress import BFloat16, Compressor, Int4, Int8, PowerSGD, Sign, TopBlocks, TopK

logging.disable(logging.WARNING)
GRADIENTS: list[Any] = [Sign(8), Int8(128), Int4(8), Int4(8, rounding="stochastic"), BFloat16(), TopK(2, 16)]
GRADIENTS += [PowerSGD(2), TopBlocks(0.5, 8)]


def same_on_both(rank_on: Callable[[str], Callable[[Any], list[Tensor]]]) -> str:
    """Whether ``rank_on("cuda")`` gives on devices what ``rank_on("cpu")`` gives on the CPU; the error, if there is
    one."""
    try:
        there = on_devices(2, rank_on("cuda"))
    except Exception as error:
        return repr(error)
    here = on_threads(2, rank_on("cpu"))
    return "same" if all(same_bits(x, y) for x, y in zip(there, here)) else "other bits"


def place(kind: str, rank: int) -> torch.device:
    return torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")


def with_optimizer(name: str, **settings: Any) -> Callable[[str], Callable[[Any], list[Tensor]]]:
    """A run through all phases, with a step that is skipped, saved to the CPU, loaded, shown and synchronised."""

    def rank_on(kind: str) -> Callable[[Any], list[Tensor]]:
        def rank(backend: ThreadBackend) -> list[Tensor]:
            device = place(kind, backend.rank)
            cls = Used if settings.get("overlap") else Toy
            model = cls().to(device)
            optimizer: Any = make(name, model.parameters(), backend=backend, **settings)
            for step in range(9):
                model.zero_grad()
                model(tokens(step, backend.rank, 2).to(device)).backward()
                if step == 4 and backend.rank == 0 and not settings.get("overlap"):
                    model.weight.grad[0, 0] = float("inf")
                optimizer.step()
                if step == 6:
                    state = torch.utils._pytree.tree_map_only(Tensor, Tensor.cpu, optimizer.state_dict())
                    weights = {key: value.cpu() for key, value in model.state_dict().items()}
                    model = cls(seed=3).to(device)
                    model.load_state_dict(weights)
                    optimizer = make(name, model.parameters(), backend=backend, **settings)
                    optimizer.load_state_dict(state)
            with optimizer.averaged():
                shown = [p.cpu() for p in params_of(model)]
            optimizer.synchronize()
            return shown + [p.cpu() for p in params_of(model)]

        return rank

    return rank_on


def with_gradients(compressor: Compressor) -> Callable[[str], Callable[[Any], list[Tensor]]]:
    def rank_on(kind: str) -> Callable[[Any], list[Tensor]]:
        def rank(backend: ThreadBackend) -> list[Tensor]:
            device = place(kind, backend.rank)
            model = Toy().to(device)
            commopt.compress_gradients(model, compressor, backend=backend, bucket_mb=3e-4)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(5):
                model.zero_grad()
                model(tokens(step, backend.rank, 2).to(device)).backward()
                optimizer.step()
            return [p.cpu() for p in params_of(model)]

        return rank

    return rank_on


def optimizers() -> dict[str, str]:
    found = {name: same_on_both(with_optimizer(name)) for name in COMMUNICATING}
    return found | {f"{name}, overlap": same_on_both(with_optimizer(name, overlap=True)) for name in OVERLAPPING}


def gradients() -> dict[str, str]:
    return {repr(compressor): same_on_both(with_gradients(compressor)) for compressor in GRADIENTS}


def learning_rates() -> dict[str, str]:
    """Tensors, each on the device of its rank."""

    def rank_of(name: str) -> Callable[[Any], None]:
        def rank(backend: ThreadBackend) -> None:
            device = place("cuda", backend.rank)
            model = Toy().to(device)
            optimizer = make(name, model.parameters(), backend=backend, lr=torch.tensor(1e-2, device=device))
            for step in range(4):
                model.zero_grad()
                model(tokens(step, backend.rank, 2).to(device)).backward()
                optimizer.step()

        return rank

    found = {}
    for name in COMMUNICATING:
        try:
            on_devices(2, rank_of(name))
            found[name] = "fine"
        except Exception as error:
            found[name] = repr(error)
    return found


class Branches(nn.Module):
    """Layers side by side, on two devices in turn: a backward has two threads."""

    def __init__(self, devices: list[torch.device]) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(8))
        self.devices = [devices[i % 2] for i in range(8)]
        for layer, device in zip(self.layers, self.devices):
            for p in layer.parameters():
                p.data = torch.randn(p.shape, generator=draw) * 0.3
            layer.to(device)

    def forward(self, x: Tensor) -> Tensor:
        parts = [layer(x.to(device)).square().mean().to("cpu") for layer, device in zip(self.layers, self.devices)]
        return torch.stack(parts).sum()


def two_devices() -> dict[str, str]:
    """Replicas are compared in every step."""

    def rank_of(name: str) -> Callable[[Any], None]:
        def rank(backend: ThreadBackend) -> None:
            model = Branches([torch.device("cuda", 2 * backend.rank + i) for i in range(2)])
            small: dict[str, Any] = {"backend": backend, "bucket_mb": 2e-4}
            if name == "gradients":
                commopt.compress_gradients(model, Int4(8), check_every=1, **small)
                optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
            else:
                every = commopt.Guard(check_every=1)
                optimizer = make(name, model.parameters(), overlap=True, guard=every, **small)
            for step in range(12):
                optimizer.zero_grad()
                draw = torch.Generator().manual_seed(10 * step + backend.rank)
                model(torch.randn(4, 6, generator=draw)).backward()
                optimizer.step()

        return rank

    found = {}
    for name in ("gradients", "OneBitAdam", "ZeroOneAdam"):
        try:
            for _ in range(8):
                on_devices(2, rank_of(name), Anywhere)
            found[name] = "fine"
        except Exception as error:
            found[name] = repr(error)
    return found


class Waits(TorchDispatchMode):
    """Counts what the host reads of a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_there = args and isinstance(args[0], Tensor) and args[0].is_cuda
        to_host = torch.device(kwargs.get("device") or "cuda").type == "cpu"
        self.count += bool(is_there and (func is torch.ops.aten._local_scalar_dense.default or to_host))
        return func(*args, **kwargs)


def waits() -> dict[str, int]:
    """How often the host waits in a compressed step of OneBitAdam, with one bucket and with many."""

    def rank_with(bucket_mb: float) -> Callable[[Any], tuple[int, int]]:
        def rank(backend: ThreadBackend) -> tuple[int, int]:
            device = place("cuda", backend.rank)
            model = Used().to(device)
            optimizer = commopt.OneBitAdam(
                model.parameters(), 1e-2, freeze_step=2, backend=backend, bucket_mb=bucket_mb
            )
            seen = Waits()
            for step in range(9):
                model.zero_grad()
                model(tokens(step, backend.rank, 2).to(device)).backward()
                if step < 8 or backend.rank != 0:
                    optimizer.step()
                    continue
                with seen:
                    optimizer.step()
            return len(optimizer.buckets), seen.count

        return rank

    (few, one), (many, other) = on_devices(2, rank_with(25.0))[0], on_devices(2, rank_with(2e-4))[0]
    return {"few": few, "of few": one, "many": many, "of many": other}


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]]()))
