"""Muon on compressed means of gradients: every step against the compressor's text on lists and torch's Muon."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import oracle_integers
import pytest
import torch
from given import Given
from torch import Tensor
from worlds import on_threads, same_bits, through_a_file

import commopt
from commopt.bucket import ROW_MULTIPLE
from commopt.comm import ThreadBackend
from commopt.compress import Int4

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon is of torch 2.9")

SIZES = [(24, 40), (12, 7), (9,), (3, 5)]
MATRICES, REST = (0, 1, 3), (2,)
STEPS, STOP = 7, 4
MUONS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "ours": commopt.Muon, "torch's": getattr(torch.optim, "Muon", commopt.Muon),
}  # fmt: skip


def gradients(step: int, rank: int) -> list[Tensor | None]:
    """The second matrix has none anywhere in step 2; the first has none on rank 1 in step 3."""
    g = torch.Generator().manual_seed(10 * step + rank)
    drawn = [torch.randn(size, generator=g, dtype=torch.float64) for size in SIZES]
    return [None if (step, i) == (2, 1) or (step, rank, i) == (3, 1, 0) else x for i, x in enumerate(drawn)]


def in_order(tensors: list[Tensor]) -> list[float]:
    """All elements as a bucket packs them, of the last tensor first."""
    return [v for t in reversed(tensors) for v in t.flatten().tolist()]


class Means:
    """Both ways of a compressed mean with error feedback, on lists: what is lost of z = g + e is the next e."""

    def __init__(self, ranks: int) -> None:
        size = sum(map(math.prod, SIZES))
        self.row = math.ceil(size / (ranks * ROW_MULTIPLE)) * ROW_MULTIPLE
        self.worker = [[0.0] * (self.row * ranks) for _ in range(ranks)]
        self.server = [[0.0] * self.row for _ in range(ranks)]

    def packed(self, tensors: list[Tensor]) -> list[float]:
        flat = in_order(tensors)
        return flat + [0.0] * (self.row * len(self.worker) - len(flat))

    def sent(self, x: list[float], error: list[float], there: list[float]) -> list[float]:
        """What a row stands for; ``error`` becomes what it leaves, and is kept of what takes no part."""
        z = [a + b for a, b in zip(x, error)]
        out = oracle_integers.row(z, [bool(t) for t in there], 4, 128, False, False, 0)[1]
        error[:] = [a - b if t else e for a, b, e, t in zip(z, out, error, there)]
        return out

    def __call__(self, brought: list[list[Tensor | None]]) -> list[Tensor | None]:
        """The mean of the gradients of all ranks, as all of them get it."""
        ranks, zero = len(brought), [torch.zeros(size, dtype=torch.float64) for size in SIZES]
        nowhere = [all(grads[i] is None for grads in brought) for i in range(len(SIZES))]
        there = self.packed([x if none else torch.ones_like(x) for x, none in zip(zero, nowhere)])
        rows, out = [slice(r * self.row, (r + 1) * self.row) for r in range(ranks)], []
        messages = []
        for grads, error in zip(brought, self.worker):
            flat, after, message = self.packed([x if g is None else g for g, x in zip(grads, zero)]), [], []
            for at in rows:
                rest = error[at]
                message.append(self.sent(flat[at], rest, there[at]))
                after += rest
            error[:] = after
            messages.append(message)
        for r, at in enumerate(rows):
            mean = [sum(v / ranks for v in column) for column in zip(*(message[r] for message in messages))]
            out += self.sent(mean, self.server[r], there[at])
        pieces = torch.tensor(out[: sum(x.numel() for x in zero)], dtype=torch.float64).split(
            [x.numel() for x in reversed(zero)]
        )
        means = [piece.view(x.shape) for piece, x in zip(reversed(pieces), zero)]
        return [None if none else mean for none, mean in zip(nowhere, means)]


def optimizers(params: Any, muon: Callable[..., torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    adamw = torch.optim.AdamW([params[i] for i in REST], lr=3e-3)
    return [muon([params[i] for i in MATRICES], lr=0.02), adamw]


def alone(ranks: int) -> list[list[Tensor]]:
    """torch's Muon and AdamW on one copy of the parameters, which have the means; these after each step."""
    params, means, out = Given(SIZES).params, Means(ranks), []
    both = optimizers(params, torch.optim.Muon)
    for step in range(STEPS):
        for p, mean in zip(params, means([gradients(step, rank) for rank in range(ranks)])):
            p.grad = mean
        for optimizer in both:
            optimizer.step()
        out.append([p.detach().clone() for p in params])
    return out


@pytest.mark.parametrize("muon", MUONS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_muon_on_compressed_gradients_is_torchs_on_their_means_to_the_bit(ranks: int, muon: str) -> None:
    """Every step on every rank, and so the replicas too; a run that is resumed in the middle as well."""
    expected = alone(ranks)

    def made(backend: ThreadBackend) -> tuple[Given, commopt.gradients.CompressedGradients, commopt.Mixed]:
        model = Given(SIZES)
        handle = commopt.compress_gradients(model, Int4(), backend=backend, bucket_mb=1)
        return model, handle, commopt.Mixed(*optimizers(model.params, MUONS[muon]))

    def steps(model: Given, optimizer: commopt.Mixed, which: range, rank: int) -> None:
        for step in which:
            optimizer.zero_grad()
            model.backward(gradients(step, rank))
            optimizer.step()
            assert same_bits([p.detach() for p in model.params], expected[step]), step

    def run(backend: ThreadBackend) -> None:
        model, handle, optimizer = made(backend)
        steps(model, optimizer, range(STOP), backend.rank)
        saved = through_a_file([model.state_dict(), handle.state_dict(), optimizer.state_dict()])
        steps(model, optimizer, range(STOP, STEPS), backend.rank)
        for part, state in zip(again := made(backend), saved):
            part.load_state_dict(state)
        steps(again[0], again[2], range(STOP, STEPS), backend.rank)

    on_threads(ranks, run)
