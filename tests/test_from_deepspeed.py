"""docs/from_deepspeed.md: the setting that it names makes 1-bit Adam what DeepSpeed's is, and its tables are those of
the figures."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from worlds import on_threads

from commopt import OneBitAdam
from commopt.comm import ThreadBackend
from commopt.compress import Identity

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
PAGE = ROOT / "docs" / "from_deepspeed.md"
FREEZE, STEPS, LR, DECAY, EPS = 5, 12, 1e-2, 0.1, 1e-3


def gradient(step: int, rank: int) -> Tensor:
    return torch.randn(40, generator=torch.Generator().manual_seed(step * 2 + rank), dtype=torch.float64)


def uncorrected() -> Tensor:
    """Adam without bias corrections, whose variance stands after FREEZE steps."""
    x, m, v = torch.ones(40, dtype=torch.float64), torch.zeros(40).double(), torch.zeros(40).double()
    for step in range(STEPS):
        g = (gradient(step, 0) + gradient(step, 1)) / 2
        m = 0.9 * m + 0.1 * g
        v = 0.99 * v + 0.01 * g * g if step < FREEZE else v
        x = x - LR * (m / (v.sqrt() + EPS) + DECAY * x)
    return x


@pytest.mark.filterwarnings("ignore")
def test_without_bias_correction_1_bit_adam_has_their_warm_up() -> None:
    def run(backend: ThreadBackend) -> Tensor:
        x = torch.nn.Parameter(torch.ones(40, dtype=torch.float64))
        optimizer = OneBitAdam(
            [x], LR, (0.9, 0.99), EPS, DECAY, freeze_step=FREEZE, bias_correction=False, compressor=Identity(),
            backend=backend,
        )  # fmt: skip
        for step in range(STEPS):
            x.grad = gradient(step, backend.rank)
            optimizer.step()
        return x.detach()

    for x in on_threads(2, run):
        torch.testing.assert_close(x, uncorrected(), rtol=1e-12, atol=0)


def test_one_scale_is_that_of_all_rows() -> None:
    script = importlib.import_module("compare_deepspeed")
    x, compressor = torch.randn(2, 64), script.OneScale()
    payload, out = torch.empty(2, compressor.nbytes(64), dtype=torch.uint8), torch.empty(2, 64)
    compressor.compress(x, payload)
    compressor.decompress(payload, out)
    torch.testing.assert_close(out, x.sign() * float(x.norm()) / math.sqrt(128))


def test_the_page_has_the_figures_that_are_committed() -> None:
    script = importlib.import_module("compare_deepspeed")
    for what, table in script.tables(json.loads(script.FIGURES.read_text())).items():
        assert f"<!-- {what}: made by scripts/compare_deepspeed.py --update-docs -->\n{table}\n<!--" in PAGE.read_text()
