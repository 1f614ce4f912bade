#!/usr/bin/env python3
"""commopt beside DeepSpeed's OnebitAdam, OnebitLamb and ZeroOneAdam: the same models, data and settings, over Gloo.

    DS_BUILD_OPS=0 pip install --no-build-isolation "deepspeed==0.19.6"    # the last version that has them
    scripts/compare_deepspeed.py                  # some minutes; figures go to benchmarks/deepspeed.json
    scripts/compare_deepspeed.py --update-docs    # the tables of docs/from_deepspeed.md, no run

Losses are those of the batches that are trained on, over all ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.metadata
import inspect
import io
import json
import logging
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed_optimizers import BETAS, EPS, EVERY, NEVER, Fused, GlooBackend, Params, Policy, stand_in, theirs
from marked import markdown, put
from torch import Tensor, nn
from torch.nn import functional as F
from torchrun import torchrun

import commopt
from commopt.compress import Compressor, Sign
from commopt.optim import SyncPolicy, VariancePolicy

ROOT = Path(__file__).resolve().parent.parent
FIGURES, PAGE = ROOT / "benchmarks" / "deepspeed.json", ROOT / "docs" / "from_deepspeed.md"
WARMUP, STEPS = 39, 79


@dataclass(frozen=True)
class OneScale(Compressor):
    """Signs with one scale for all that a rank sends of a bucket, where ``Sign(block=None)`` has one for each row."""

    def nbytes(self, n: int, dtype: torch.dtype = torch.float32) -> int:
        return Sign(block=None).nbytes(n, dtype)

    def compress(self, x: Tensor, payload: Tensor) -> None:
        Sign(block=None).compress(x, payload)
        payload.view(torch.float32)[:, 0] = torch.linalg.norm(x) / math.sqrt(x.numel())

    def decompress(self, payload: Tensor, out: Tensor) -> None:
        Sign(block=None).decompress(payload, out)


class FromZero:
    """1-bit LAMB whose average of trust ratios starts at 0, as theirs: ours is corrected for that. By the learning rate
    after the warm-up of ``stop`` steps."""

    def __init__(self, optimizer: Any, stop: int, lr: float) -> None:
        self.optimizer, self.stop, self.lr = optimizer, stop, lr

    def step(self) -> None:
        for group in self.optimizer.param_groups:
            if group["step"] >= self.stop:
                group["lr"] = self.lr * (1 - group["coeff_beta"] ** self.stop)
        self.optimizer.step()


def ours(
    name: str, params: Params, lr: float, decay: float, warmup: int, policy: Policy = EVERY, **settings: Any
) -> Any:
    """Ours, with no setting but what theirs has."""
    if name == "ZeroOneAdam":
        settings |= {"variance": VariancePolicy(policy[0], warmup), "sync": SyncPolicy(1, policy[1], 4)}
        return commopt.ZeroOneAdam(params, lr, BETAS, EPS, decay, **settings)
    return getattr(commopt, name)(params, lr, BETAS, EPS, decay, freeze_step=warmup, **settings)


def uncorrected(
    name: str, params: Params, lr: float, decay: float, warmup: int, policy: Policy = EVERY, **settings: Any
) -> Any:
    """Ours, without bias correction, as theirs."""
    if name == "OneBitLamb":
        return FromZero(ours(name, params, lr, decay, warmup, **settings), warmup, lr)
    return ours(name, params, lr, decay, warmup, policy, bias_correction=False, **settings)


def as_theirs(name: str, params: Params, lr: float, decay: float, warmup: int) -> Any:
    """Ours, with the settings that make it theirs: a bucket for each tensor (for LAMB one, in their order)."""
    listed = list(params)
    given = listed[::-1] if name == "OneBitLamb" else [{"params": [p]} for p in listed]
    return uncorrected(name, given, lr, decay, warmup, bucket_mb=100.0, compressor=OneScale(), min_variance=0.0)


# models and data ------------------------------------------------------------------------------------------------------


def mlp(seed: int = 0) -> nn.Module:
    """Tensors whose sizes are multiples of 256, so that neither has padding, and none of whose gradients are 0."""
    torch.manual_seed(seed)
    hidden = [nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh()]
    return nn.Sequential(*hidden, nn.Linear(256, 16, bias=False))


def mlp_loss(model: nn.Module, step: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(1 + step * 64 + dist.get_rank() + 10**6 * seed)
    x = torch.randn(32, 64, generator=draw)
    return F.cross_entropy(model(x), x[:, :16].argmax(1))


class GPT(nn.Module):
    """Of the bytes of a program: 2 layers, width 64, 32 places. Without rare ones all have gradients from the start."""

    def __init__(self, seed: int, rare: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.places = nn.Embedding(32, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 256, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 128, bias=False)
        text = torch.tensor(list(inspect.getsource(argparse).encode("ascii", "ignore")))
        found, which, counts = text.unique(return_inverse=True, return_counts=True)
        self.text = text if rare else torch.where(counts[which] < 100, found.tolist().index(32), which)
        self.tokens = nn.Embedding(128 if rare else len(found), 64)

    def forward(self, draw: torch.Generator) -> Tensor:
        at = torch.randint(0, len(self.text) - 33, (16,), generator=draw)
        rows = self.text[at[:, None] + torch.arange(33)]
        mask = nn.Transformer.generate_square_subsequent_mask(32)
        inner = self.layers(self.tokens(rows[:, :-1]) + self.places.weight, mask, is_causal=True)
        return F.cross_entropy(self.head(inner).flatten(0, 1), rows[:, 1:].flatten())


def gpt_loss(model: nn.Module, step: int, seed: int = 0) -> Tensor:
    loss: Tensor = model(torch.Generator().manual_seed(1 + step * 64 + dist.get_rank() + 10**6 * seed))
    return loss


def train(
    model: nn.Module, loss_of: Callable[..., Tensor], optimizer: Any, first: int, end: int, seed: int = 0
) -> list[float]:
    """The losses of steps [first, end)."""
    losses = []
    for step in range(first, end):
        model.zero_grad()
        loss = loss_of(model, step, seed)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    mean = torch.stack(losses) / dist.get_world_size()
    dist.all_reduce(mean)
    return list(mean.tolist())


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# what is measured -----------------------------------------------------------------------------------------------------

LR = {"OneBitAdam": 1e-3, "OneBitLamb": 2e-3, "ZeroOneAdam": 1e-3}
DECAY = {"OneBitAdam": 0.01, "OneBitLamb": 0.01, "ZeroOneAdam": 0.0}
LOOKS = (WARMUP, WARMUP + 1, WARMUP + 11, STEPS)


def same_steps(name: str) -> dict[str, Any]:
    """How far parameters are from theirs, over how far these have come, after each number of steps of ``LOOKS``."""
    out: dict[str, Any] = {}
    path: list[Tensor] = []
    for way, make in {"theirs": theirs, "as theirs": as_theirs, "default": ours}.items():
        model = mlp()
        start, optimizer, done = flat(model), make(name, model.parameters(), LR[name], DECAY[name], WARMUP), 0
        apart = []
        for i, look in enumerate(LOOKS):
            train(model, mlp_loss, optimizer, done, look)
            done, here = look, flat(model)
            if way == "theirs":
                path.append(here)
            apart.append(float((here - path[i]).norm() / (path[i] - start).norm()))
        out[way] = apart
    del out["theirs"]
    return out


def losses(name: str) -> dict[str, list[float]]:
    """Mean loss of the last 20 of 200 steps of a GPT, of three seeds; the variance stands from step 60 on. At last of
    one seed with rare bytes, and with some that do not occur."""
    ways = {"theirs": theirs, "default": ours, "uncorrected": uncorrected, "uncompressed": ours}
    rate = {"OneBitLamb": 1e-2}.get(name, 2e-3)
    out: dict[str, list[float]] = {way: [] for way in ways}
    for seed, rare in ((0, False), (1, False), (2, False), (0, True)):
        for way, make in ways.items():
            model = GPT(seed, rare)
            end = NEVER if way == "uncompressed" else 60
            optimizer = make(name, model.parameters(), rate, 0.0, end, EVERY if way == "uncompressed" else (4, 40))
            out[way].append(statistics.mean(train(model, gpt_loss, optimizer, 0, 200, seed)[-20:]))
    return out


def spread(model: nn.Module, start: Tensor) -> float:
    """How far the parameters of rank 0 and the last are apart, over how far those of rank 0 have come."""
    every = [torch.empty_like(start) for _ in range(dist.get_world_size())]
    dist.all_gather(every, flat(model))
    return float((every[0] - every[-1]).norm() / (every[0] - start).norm())


def resumes(name: str) -> dict[str, list[float]]:
    """A run of ``STEPS`` that is resumed in a new optimizer 20 steps before its end: how far its parameters are from
    those of the run that went on, over how far these have come in that time; and from those of the last rank."""
    out = {}
    for way in ("theirs, fp32", "theirs, fp16", "ours"):
        make: Callable[..., Any] = ours if way == "ours" else theirs
        options = {} if way == "ours" else {"first": way.endswith("fp16")}
        model, stop = mlp(), STEPS - 20
        optimizer = make(name, model.parameters(), LR[name], DECAY[name], WARMUP)
        train(model, mlp_loss, optimizer, 0, stop)
        again, at = copy.deepcopy(model), flat(model)
        inner = optimizer if way == "ours" else optimizer.optimizer
        saved = [copy.deepcopy(inner.state_dict())]
        if way != "ours":  # rank 0 saves, for all
            dist.broadcast_object_list(saved)
        train(model, mlp_loss, optimizer, stop, STEPS)
        fresh = make(name, again.parameters(), LR[name], DECAY[name], WARMUP, **options)
        (fresh if way == "ours" else fresh.optimizer).load_state_dict(saved[0])
        train(again, mlp_loss, fresh, stop, STEPS)
        apart = float((flat(again) - flat(model)).norm() / (flat(model) - at).norm())
        out[way] = [apart, spread(again, at), spread(model, at)]
    return out


def costs(name: str) -> dict[str, list[float]]:
    """Collectives of a compressed step, and its milliseconds without backward: the median of 30. 100 tensors of
    825,600 elements."""
    out = {}
    for way, make in {"theirs": theirs, "theirs, fused": Fused, "ours": ours}.items():
        if name == "OneBitLamb" and way == "theirs, fused":
            continue  # it fuses by itself
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(50)))
        optimizer = make(name, model.parameters(), 1e-5, 0.0, 5)
        times, calls = [], 0
        for step in range(40):
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
            before = GlooBackend.calls
            dist.barrier()
            begun = time.perf_counter()
            optimizer.step()
            times.append(time.perf_counter() - begun)
            calls = optimizer.comm_stats()["step"]["calls"] if way == "ours" else 4 * (GlooBackend.calls - before)
        out[way] = [calls, 1000 * statistics.median(times[10:])]
    return out


def tables(found: dict[str, Any]) -> dict[str, str]:
    """What the page shows, by name."""
    two = found["2"]
    steps = [
        [name, ranks, way, *map(short, found[ranks]["steps"][name][key])]
        for name in NAMES
        for ranks in ("2", "4")
        for key, way in (("default", "as by default"), ("as theirs", "uncorrected"))
    ]
    looks = [f"{look} steps" for look in LOOKS]
    losses = []
    for name in NAMES:
        of = two["losses"][name]
        plain = of["uncompressed"]
        losses.append(
            [name, *(" ".join(f"{x:.2f}" for x in of[way][:3]) for way in ("theirs", "uncorrected", "default"))]
        )
        losses[-1] += [" ".join(f"{x:.2f}" for x in plain[:3]), *(f"{of[w][3]:.2f}" for w in ("theirs", "uncorrected"))]
    resumed = [
        [name, way, *map(short, two["resumes"][name][key])]
        for name in NAMES
        for key, way in (("theirs, fp32", "theirs, fp32"), ("theirs, fp16", "theirs, fp16"), ("ours", "commopt"))
    ]
    ways = {"theirs": "theirs", "theirs, fused": "theirs, one flat tensor", "ours": "commopt"}
    cost = [
        [name, ways[way], str(calls), f"{ms:.0f}"] for name in NAMES for way, (calls, ms) in two["costs"][name].items()
    ]
    return {
        "steps": markdown(["optimizer", "ranks", "commopt's settings", *looks], steps),
        "losses": markdown(
            [
                "optimizer",
                "theirs",
                "commopt, uncorrected",
                "commopt",
                "uncompressed",
                "theirs, rare",
                "commopt, uncorrected, rare",
            ],
            losses,
        ),
        "resumes": markdown(["optimizer", "whose", "from the run that went on", "from rank 1", "before"], resumed),
        "costs": markdown(["optimizer", "whose", "collectives a step", "ms a step"], cost),
    }


def short(x: float) -> str:
    return "0" if x == 0 else f"{x:.0e}" if x < 1e-3 else f"{x:.2g}"


MEASURED = {"steps": same_steps, "losses": losses, "resumes": resumes, "costs": costs}
NAMES = ("OneBitAdam", "OneBitLamb", "ZeroOneAdam")


def measure(path: Path) -> None:
    """On a rank: all figures that need its number of ranks."""
    logging.getLogger("commopt").setLevel(logging.ERROR)
    dist.init_process_group("gloo")
    stand_in()
    wanted = MEASURED if dist.get_world_size() == 2 else {"steps": same_steps}
    found = {what: {name: of(name) for name in NAMES} for what, of in wanted.items()}
    if dist.get_rank() == 0:
        path.write_text(json.dumps(found))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update-docs", action="store_true", help="writes the tables of the page, from the figures")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        with contextlib.redirect_stdout(io.StringIO()):  # they print
            measure(options.rank)
        return
    if not options.update_docs:
        found: dict[str, Any] = {"deepspeed": importlib.metadata.version("deepspeed"), "torch": torch.__version__}
        for ranks in (2, 4):
            with tempfile.TemporaryDirectory() as folder:
                part = Path(folder) / "figures.json"
                with torchrun(ranks, [__file__, f"--rank={part}"]) as process:
                    if process.wait() != 0:
                        raise SystemExit("a rank has failed")
                found[str(ranks)] = json.loads(part.read_text())
        FIGURES.write_text(json.dumps(found, indent=1) + "\n")
    for what, text in tables(json.loads(FIGURES.read_text())).items():
        put(text, PAGE, (f"<!-- {what}: made by scripts/compare_deepspeed.py --update-docs -->", f"<!-- /{what} -->"))


if __name__ == "__main__":
    main()
