"""Runs of a second on real images: families of optimizers, and the faults that their runs must show.

Two ranks on threads train a small network on scikit-learn's digits. One sees the smaller digits of each batch, the
other the larger ones, so that neither can do without what the other finds: what is lost between them is missing.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from worlds import on_threads

import commopt
from commopt.comm import ThreadBackend
from commopt.compress import Compressor, Int2, RandomBlocks, Sign
from commopt.optim import SyncPolicy, VariancePolicy

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import digits

STEPS, WARMUP, BATCH, FREEZE = 200, 20, 64, 60
images = cache(digits.load)

Make = Callable[..., Any]
"""An optimizer of a model, with ``lr`` and ``backend``."""

Spoil = Callable[[Any, ThreadBackend, int], None]
"""Does something to an optimizer after each step; given the backend and the step."""


def learnt(make: Make, lr: float, spoil: Spoil | None = None, seed: int = 0) -> tuple[float, float]:
    """The held-out loss of the mean model, inf if the run was ended, and what the run sent of what float32 sends."""
    try:
        return on_threads(2, lambda backend: _train(backend, make, lr, spoil, seed))[0]  # type: ignore[no-any-return]
    except RuntimeError as error:
        if "were skipped" not in str(error):
            raise
        return math.inf, 1.0


def _train(backend: ThreadBackend, make: Make, lr: float, spoil: Spoil | None, seed: int) -> tuple[float, float]:
    (pixels, labels), (new_pixels, new_labels) = images()
    draw = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    for p in model.parameters():
        nn.init.normal_(p, std=0.15 if p.dim() == 2 else 0.0, generator=draw)
    optimizer = make(model, lr=lr, backend=backend)
    for step in range(STEPS):
        along = (step - WARMUP) / (STEPS - WARMUP)
        for group in optimizer.param_groups:
            group["lr"] = lr * ((step + 1) / WARMUP if along < 0 else 0.525 + 0.475 * math.cos(math.pi * along))
        batch = torch.randint(0, len(labels), (BATCH,), generator=draw)
        mine = batch[labels[batch].argsort(stable=True)].view(2, -1)[backend.rank]
        optimizer.zero_grad()
        cross_entropy(model(pixels[mine]), labels[mine]).backward()
        optimizer.step()
        if spoil is not None:
            spoil(optimizer, backend, step)
    stats = optimizer.comm_stats()
    sent = stats["total"]["bytes"] / (STEPS * stats["fp32_bytes"])
    with optimizer.averaged(), torch.no_grad():
        loss = cross_entropy(model(new_pixels), new_labels)
    return float(loss), sent


ADAM: dict[str, Any] = {"betas": (0.9, 0.98), "weight_decay": 0.01}
LOCAL: dict[str, Any] = {"base": torch.optim.AdamW, "period": 4, **ADAM}
SGD: dict[str, Any] = {"momentum": 0.9, "nesterov": True}


def of(cls: Any, **settings: Any) -> Make:
    return lambda model, **more: cls(model.parameters(), **settings, **more)


def scaled(cls: Any, factor: float) -> Any:
    """``cls`` whose mean pseudo-gradient has come to ``factor`` times what it should be."""

    class Scaled(cls):  # type: ignore[misc]
        def outer_step(self, bucket: Any, group: dict[str, Any], pseudo_gradient: Tensor, ctx: Any) -> None:
            super().outer_step(bucket, group, pseudo_gradient.mul_(factor), ctx)

    return Scaled


def without_mean(cls: Any) -> Any:
    """``cls`` that has, in place of the mean of the ranks' pseudo-gradients, that of rank 0."""

    class WithoutMean(cls):  # type: ignore[misc]
        def means_of(self, entries: Any, flats: list[Tensor]) -> Any:
            for flat in flats:
                flat.mul_(0 if self.topology.rank else self.topology.world_size)
            return super().means_of(entries, flats)

    return WithoutMean


def on_gradients(compressor: Compressor, feedback: bool = True) -> Make:
    """SGD on compressed means of gradients."""

    def make(model: nn.Module, lr: float, backend: ThreadBackend) -> Any:
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=lr, **SGD)
        handle = commopt.compress_gradients(model, compressor, feedback=feedback, backend=backend)
        optimizer.averaged, optimizer.comm_stats = contextlib.nullcontext, handle.comm_stats
        return optimizer

    return make


ONE_BIT_ADAM = of(commopt.OneBitAdam, freeze_step=FREEZE, **ADAM)
ZERO_ONE_ADAM = of(commopt.ZeroOneAdam, variance=VariancePolicy(16, FREEZE), sync=SyncPolicy(1, FREEZE, 4), **ADAM)
SLOWMO: dict[str, Any] = {"outer_momentum": 0.2, **LOCAL}
SIGNS: dict[str, Any] = {"outer_lr": 2.0, "outer_betas": (0.5, 0.8), **LOCAL}
LION = of(commopt.OneBitLion, betas=(0.9, 0.95), weight_decay=0.01)
ONE_BIT_LAMB = of(commopt.OneBitLamb, freeze_step=FREEZE, **ADAM)
BLOCKS: dict[str, Any] = {"compressor": RandomBlocks(16, 32), "reset_compressor": RandomBlocks(2, 32), **SGD}
CSER = of(commopt.CSER, **BLOCKS)
QSPARSE = of(commopt.QSparseLocalSGD, period=2, compressor=RandomBlocks(4, 8), **SGD)
TWO_BITS = Int2(512)

WHOLE, BIT = 1.0174, 0.0415
"""What a step sends of what float32 sends, padding and the ranks' agreement in it: 32 bits an element, and one."""
ROUNDS = WHOLE / 4
WARMED_UP = (FREEZE * WHOLE + (STEPS - FREEZE) * BIT) / STEPS
REFRESHED = (35 * WHOLE + 120 * BIT) / STEPS
"""0/1 Adam: 35 of the first 60 steps refresh the variance. One bit is sent by the other 25, by all to step 120, by
every second to 180 and every fourth to 200."""


@dataclass(frozen=True)
class Family:
    """A method, and what its run came to when this was written.

    Attributes:
        make: its optimizer.
        lr: the peak.
        loss: held-out.
        sent: by the whole run, of what float32 sends.
    """

    make: Make
    lr: float
    loss: float
    sent: float

    def learns_otherwise(self, loss: float) -> bool:
        """Whether ``loss`` is another than this one's, by more than a processor that rounds otherwise can make of it.
        Less is another, too: steps twice as long learn these few steps faster."""
        return not abs(loss - self.loss) <= 0.1 * self.loss + 0.01

    def sends_otherwise(self, sent: float) -> bool:
        """Whether a run that ``sent`` so much is not this one: the bytes are counted, and 1 % is for the first step."""
        return not abs(sent - self.sent) <= 0.01 * self.sent


FAMILIES = {
    "OneBitAdam": Family(ONE_BIT_ADAM, 1e-2, 0.143, WARMED_UP),
    "ZeroOneAdam": Family(ZERO_ONE_ADAM, 1e-2, 0.158, REFRESHED),
    "OneBitLamb": Family(ONE_BIT_LAMB, 3e-2, 0.0886, WARMED_UP),
    "OneBitLion": Family(LION, 1e-2, 0.128, 0.0419),
    "LocalSGD": Family(of(commopt.LocalSGD, **LOCAL), 1e-2, 0.262, ROUNDS),
    "SlowMo": Family(of(commopt.SlowMo, **SLOWMO), 1e-2, 0.217, ROUNDS),
    "DiLoCo": Family(of(commopt.DiLoCo, outer_lr=0.7, outer_momentum=0.5, **LOCAL), 1e-2, 0.197, ROUNDS),
    "SignMomentum": Family(of(commopt.SignMomentum, **SIGNS), 1e-2, 0.248, ROUNDS),
    "SparseLoCo": Family(of(commopt.SparseLoCo, **LOCAL), 1e-2, 0.706, 0.00414),
    "CSER": Family(CSER, 0.1, 0.25, 0.1007),
    "QSparseLocalSGD": Family(QSPARSE, 0.05, 0.208, 0.1337),
    "SGD on gradients of 1 bit": Family(on_gradients(Sign()), 0.1, 0.119, 0.0357),
    "SGD on gradients of 2 bits": Family(on_gradients(TWO_BITS), 0.1, 0.121, 0.0689),
}


# faults ---------------------------------------------------------------------------------------------------------------


def forget(optimizer: Any, backend: ThreadBackend, step: int) -> None:
    """What compression loses is lost."""
    for bucket in optimizer.buckets:
        if bucket.feedback is not None:
            bucket.feedback.worker.zero_()
            bucket.feedback.server.zero_()
        if "error_buffer" in bucket.buffers:
            bucket.buffers["error_buffer"].zero_()


class Mistake:
    """Rank 1 goes on with what compression has lost on rank 0."""

    def __init__(self) -> None:
        self.residuals: dict[tuple[int, int], Tensor] = {}

    def __call__(self, optimizer: Any, backend: ThreadBackend, step: int) -> None:
        for i, bucket in enumerate(optimizer.buckets):
            if bucket.feedback is None:
                continue
            if backend.rank == 0:
                self.residuals[step, i] = bucket.feedback.worker.clone()
            elif (step - 1, i) in self.residuals:  # of the step before, which rank 0 has ended
                bucket.feedback.worker.copy_(self.residuals.pop((step - 1, i)))


class Twice(Sign):
    """Signs whose scales, in what is sent of a mean, are twice what they should be."""

    def reduce(self, payloads: Tensor, error: Tensor, own: Tensor, active: Tensor | None, new_error: Tensor) -> None:
        super().reduce(payloads, error, own, active, new_error)
        scales = 4 * -(-error.numel() // self.block)
        own.view(-1)[:scales].view(torch.float32).mul_(2)


FAULTS: dict[str, tuple[str, Make, Spoil | None]] = {
    "OneBitAdam without residuals": ("OneBitAdam", ONE_BIT_ADAM, forget),
    "OneBitAdam with another rank's residuals": ("OneBitAdam", ONE_BIT_ADAM, Mistake()),
    "OneBitAdam with scales twice as large": (
        "OneBitAdam", of(commopt.OneBitAdam, freeze_step=FREEZE, compressor=Twice(), **ADAM), None,
    ),
    "OneBitAdam frozen at step 1": (
        "OneBitAdam", of(commopt.OneBitAdam, freeze_step=1, min_variance=0.0, **ADAM), None,
    ),
    "ZeroOneAdam without residuals": ("ZeroOneAdam", ZERO_ONE_ADAM, forget),
    "OneBitLamb without residuals": ("OneBitLamb", ONE_BIT_LAMB, forget),
    "OneBitLion without residuals": ("OneBitLion", LION, forget),
    "SparseLoCo without residuals": ("SparseLoCo", of(commopt.SparseLoCo, **LOCAL), forget),
    "DiLoCo that forgets its outer step": ("DiLoCo", of(commopt.DiLoCo, outer_lr=0.0, **LOCAL), None),
    "CSER without resets": ("CSER", of(commopt.CSER, period=sys.maxsize, **BLOCKS), None),
    "QSparseLocalSGD without residuals": ("QSparseLocalSGD", QSPARSE, forget),
    "gradients of 1 bit without residuals": ("SGD on gradients of 1 bit", on_gradients(Sign(), False), None),
    "gradients of 2 bits without residuals": ("SGD on gradients of 2 bits", on_gradients(TWO_BITS, False), None),
    "LocalSGD that takes rank 0 for the mean": ("LocalSGD", of(without_mean(commopt.LocalSGD), **LOCAL), None),
    "LocalSGD that goes twice as far": ("LocalSGD", of(scaled(commopt.LocalSGD, 2), **LOCAL), None),
    "SlowMo that goes twice as far": ("SlowMo", of(scaled(commopt.SlowMo, 2), **SLOWMO), None),
    "SlowMo that goes back": ("SlowMo", of(scaled(commopt.SlowMo, -1), **SLOWMO), None),
    "SignMomentum that takes rank 0 for the mean": (
        "SignMomentum", of(without_mean(commopt.SignMomentum), **SIGNS), None,
    ),
    "SignMomentum that goes back": ("SignMomentum", of(scaled(commopt.SignMomentum, -1), **SIGNS), None),
}  # fmt: skip
"""The family, and what is wrong: it learns otherwise."""

ALWAYS = of(commopt.ZeroOneAdam, variance=VariancePolicy(16, FREEZE), sync=SyncPolicy(1, FREEZE, 1), **ADAM)
WRONG_BYTES: dict[str, tuple[str, Make]] = {
    "OneBitAdam whose warm-up lasts": ("OneBitAdam", of(commopt.OneBitAdam, freeze_step=STEPS, **ADAM)),
    "OneBitAdam whose warm-up ends later": ("OneBitAdam", of(commopt.OneBitAdam, freeze_step=FREEZE + 5, **ADAM)),
    "ZeroOneAdam that skips no round": ("ZeroOneAdam", ALWAYS),
    "LocalSGD with a shorter period": ("LocalSGD", of(commopt.LocalSGD, **{**LOCAL, "period": 3})),
    "LocalSGD with a longer period": ("LocalSGD", of(commopt.LocalSGD, **{**LOCAL, "period": 5})),
    "SparseLoCo with a shorter period": ("SparseLoCo", of(commopt.SparseLoCo, **{**LOCAL, "period": 3})),
}
"""The family, and what is wrong: it sends otherwise."""
