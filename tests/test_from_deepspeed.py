"""docs/from_deepspeed.md: the setting that it names makes 1-bit Adam what DeepSpeed's is, and its tables are those of
the figures."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from worlds import on_threads

from commopt import OneBitAdam, ZeroOneAdam
from commopt.comm import LocalBackend, ThreadBackend
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


@pytest.mark.parametrize("cls", [OneBitAdam, ZeroOneAdam])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_state_of_theirs_leaves_the_bias_correction_as_it_is(cls: Any, steps: int) -> None:
    """Their groups say that there is one, and it is not used."""
    p = torch.nn.Parameter(torch.ones(6))
    moments = {"exp_avg": torch.ones(6), "exp_avg_sq": torch.ones(6)}
    sizes = {"tensor_size": 6, "corrected_tensor_size": 16, "server_chunk_size": 8}
    group = {
        "lr": LR,
        "bias_correction": True,
        "betas": (0.9, 0.99),
        "eps": EPS,
        "weight_decay": 0.0,
        "max_grad_norm": 0.0,
    }
    optimizer = cls([p], LR, bias_correction=False, backend=LocalBackend())
    for _ in range(steps):
        p.grad = torch.ones(6)
        optimizer.step()
    saved = {"state": {0: {"step": 3, **moments, **sizes}}, "param_groups": [{**group, "params": [0]}]}
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["bias_correction"] is False
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.99)
    assert saved["param_groups"][0]["bias_correction"] is True
    del saved["state"][0]["corrected_tensor_size"]
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["bias_correction"] is True, "of others it is what it says"
    with pytest.raises(ValueError, match="group"):
        optimizer.load_state_dict({**saved, "param_groups": saved["param_groups"] * 2})


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
