"""The configs of this repository."""

from __future__ import annotations

import functools
from pathlib import Path

from commopt.train.config import Config
from commopt.train.parse import parse

ROOT = Path(__file__).parents[1]


@functools.cache
def shipped(path: Path, name: str) -> Config:
    """A config as it is with one of its optimizers."""
    return parse([str(path), f"--optim.name={name}"])
