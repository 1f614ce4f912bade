"""LLM Foundry finds optimizers as entry points of a group: each leads to its class, and none is missing."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from torch import nn

import commopt

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib  # type: ignore[no-redef]

ROOT = Path(__file__).resolve().parent.parent


declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["llmfoundry_optimizers"]


def test_every_optimizer_is_an_entry_point() -> None:
    found = {EntryPoint(name, value, "llmfoundry_optimizers").load() for name, value in declared.items()}
    exported = [getattr(commopt, name) for name in commopt.__all__]
    classes = {cls for cls in exported if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)}
    assert found == classes - {commopt.Mixed, commopt.Muon}  # of optimizers; for some parameters only
    assert len(declared) == len(found)
    words = (ROOT / "docs" / "door_llmfoundry.md").read_text()
    assert not [name for name in declared if f"`{name}`" not in words]


@pytest.mark.parametrize("name", declared)
def test_each_is_made_as_its_builder_makes_them(name: str) -> None:
    """By keywords alone, of groups whose parameters may be a view of a dict; and stepped as Composer does it."""
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    named = dict(model.named_parameters())
    bias = named.pop("1.bias")
    cls = EntryPoint(name, declared[name], "llmfoundry_optimizers").load()
    optimizer = cls(params=[{"params": named.values()}, {"params": [bias], "weight_decay": 0.0}], lr=1e-2)
    assert [len(group["params"]) for group in optimizer.param_groups] == [3, 1]
    assert optimizer.param_groups[1]["weight_decay"] == 0
    before = bias.detach().clone()

    def closure() -> float:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        return 0.5

    assert optimizer.step(closure=closure) == 0.5
    assert not torch.equal(bias, before)
