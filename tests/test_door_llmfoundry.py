"""LLM Foundry finds optimizers as entry points of a group: each leads to its class, and none is missing."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import torch

import commopt

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib  # type: ignore[no-redef]

ROOT = Path(__file__).resolve().parent.parent


def test_every_optimizer_is_an_entry_point() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["llmfoundry_optimizers"]
    found = {EntryPoint(name, value, "llmfoundry_optimizers").load() for name, value in declared.items()}
    exported = [getattr(commopt, name) for name in commopt.__all__]
    classes = {cls for cls in exported if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)}
    assert found == classes - {commopt.Mixed}  # which is made of optimizers
    assert len(declared) == len(found)
    words = (ROOT / "docs" / "doors.md").read_text().partition("## LLM Foundry")[2]
    assert not [name for name in declared if f"`{name}`" not in words]
