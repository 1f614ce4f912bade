"""DeepSpeed's 1-bit optimizers without its engine, on CPUs. Their files run as they are.

What they ask of DeepSpeed is stood in for: an engine, which averages gradients until it is told not to; and the
collective, which theirs has for GPUs only. Gradients of zeros go through their first step, as their fp16 and bf16
wrappers do it.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

BETAS, EPS = (0.9, 0.99), 1e-8
NEVER = 10**6
Params = Iterable[Any]
Policy = tuple[int, int]
"""Of 0/1 Adam: refreshes, and steps of ranks on their own, after which the distance between two is doubled."""
EVERY = (NEVER, NEVER)


class GlooBackend:
    """Their two-way compressed mean: one scale for all of a buffer on the way out, one for each rank's chunk back."""

    calls = 0

    def __init__(self, mpu: Any = None) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def compressed_allreduce(self, buffer: Tensor, worker: Tensor, server: Tensor, local_rank: int) -> Tensor:
        GlooBackend.calls += 1
        flat = buffer.flatten()
        bits, scale = self.compress(F.pad(flat, (0, worker.numel() - flat.numel())), worker)
        received, scales = torch.empty_like(bits), [torch.empty(1) for _ in range(self.size)]
        dist.all_to_all_single(received, bits)
        dist.all_gather(scales, scale)
        rows = self.signs(received).view(self.size, -1)
        bits, scale = self.compress(rows.mul_(torch.stack(scales) / self.size).sum(0), server)
        chunks = [torch.empty_like(bits) for _ in range(self.size)]
        dist.all_gather(chunks, bits)
        dist.all_gather(scales, scale)
        mean = torch.cat([self.signs(chunk) * s for chunk, s in zip(chunks, scales)])
        return flat.copy_(mean[: flat.numel()]).view(buffer.shape)

    def compress(self, x: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
        """The signs, as bits, and the scale of ``x`` with the ``error``; which becomes what they lose."""
        total = x + error
        scale = torch.linalg.norm(total) / math.sqrt(total.numel())
        bits = torch.from_numpy(np.packbits((total >= 0).numpy()))
        error.copy_(total - scale * self.signs(bits))
        return bits, scale.view(1)

    @staticmethod
    def signs(bits: Tensor) -> Tensor:
        return torch.from_numpy(np.unpackbits(bits.numpy())).float().mul_(2).sub_(1)


class Theirs:
    """An optimizer of DeepSpeed's, and the part of its engine that it needs."""

    mpu, local_rank = None, 0

    def __init__(self, name: str, params: Params, first: bool = True, **settings: Any) -> None:
        self.params = list(params)
        self.enable_backward_allreduce = True
        module = {"OneBitAdam": "adam", "OneBitLamb": "lamb", "ZeroOneAdam": "zoadam"}[name]
        found = importlib.import_module(f"deepspeed.runtime.fp16.onebit.{module}")
        cls = getattr(found, name.replace("OneBit", "Onebit"))
        self.optimizer = cls(self.params, self, betas=BETAS, eps=EPS, **settings)
        if first:
            for p in self.params:
                p.grad = torch.zeros_like(p)
            self.optimizer.step()

    def step(self) -> None:
        if self.enable_backward_allreduce:
            for p in self.params:
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
        self.optimizer.step()


def theirs(
    name: str, params: Params, lr: float, decay: float, warmup: int, policy: Policy = EVERY, **options: Any
) -> Any:
    """Their optimizer. Its first step changes nothing, and is counted: so ``warmup`` others end at the next one."""
    options |= {"lr": lr, "weight_decay": decay}
    if name == "ZeroOneAdam":
        options |= {"var_update_scaler": policy[0], "local_step_scaler": policy[1], "local_step_clipper": 4}
        return Theirs(name, params, var_freeze_step=warmup, **options)
    return Theirs(name, params, freeze_step=warmup + 1, **options)


class Fused:
    """Their optimizer over one flat parameter, as their fp16 and bf16 wrappers have it."""

    def __init__(self, name: str, params: Params, *settings: Any) -> None:
        self.parts = list(params)
        self.whole = nn.Parameter(torch.cat([p.detach().flatten() for p in self.parts]))
        self.inner = theirs(name, [self.whole], *settings)

    def step(self) -> None:
        self.whole.grad = torch.cat([p.grad.flatten() for p in self.parts])
        self.inner.step()
        for p, new in zip(self.parts, self.whole.detach().split([p.numel() for p in self.parts])):
            p.data.copy_(new.view_as(p))


def stand_in() -> None:
    """Puts the collective in the place of theirs. Before the first optimizer; the process group is there."""
    collective = ModuleType("deepspeed.runtime.comm.nccl")
    collective.NcclBackend = GlooBackend  # type: ignore[attr-defined]
    importlib.import_module("deepspeed").init_distributed("gloo", verbose=False)
    sys.modules[collective.__name__] = collective
