"""One run has one config: every rank looks at that of the others before anything else is done. And it starts from one
checkpoint, wherever each rank has it.

What is typed for each machine of its own can differ by a typing error, and torch would train on: with another learning
rate on one rank there are two models at the end, and nobody is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from commopt.train import sums
from commopt.train.config import Config, flat
from commopt.train.errors import ConfigError
from commopt.train.manifest import read_manifest
from commopt.train.world import World

OWN = ("train.run_dir", "data.cache_dir", "data.corpus", "comm.args")
"""Settings that may be others on another machine: paths of folders and files, and what a backend is told."""
START = ("init", "resume")
"""Of these the path may be another, too, but not whether there is one; see :func:`check_same_checkpoint`."""


def check_alike(config: Config, world: World) -> None:
    """All ranks call it.

    Raises:
        ConfigError: on every rank, where ranks have other settings than rank 0; names them, and two values of each.
    """
    first, *others = world.gather(_settings(config))
    found: dict[str, str] = {}
    for rank, theirs in enumerate(others, 1):
        for key in first.keys() | theirs.keys():
            mine, other = (settings.get(key) for settings in (first, theirs))
            if mine != other and key not in found:
                found[key] = f"{key} is {mine!r} on rank 0 and {other!r} on rank {rank}"
    if found:
        raise ConfigError(f"{'; '.join(found[key] for key in sorted(found))}: give all ranks the same config")


def check_same_checkpoint(option: str, path: Path, world: World) -> None:
    """All ranks call it, each with the path that ``option`` is there.

    Raises:
        ConfigError: on every rank, where ranks have another checkpoint than rank 0; names the first of them.
        DamagedError: on every rank, where a manifest cannot be read on any.
    """
    manifest = world.together(lambda: read_manifest(path))
    first, *others = world.gather((manifest["step"], manifest[sums.KEY]))
    for rank, theirs in enumerate(others, 1):
        if theirs != first:
            of = [f"of step {step} (SHA-256 {digest[:8]})" for step, digest in (first, theirs)]
            raise ConfigError(
                f"{option} is a checkpoint {of[0]} on rank 0 and {of[1]} on rank {rank}: give all ranks the same one"
            )


def _settings(config: Config) -> dict[str, Any]:
    tree: Mapping[str, Any] = asdict(config)
    out = {key: value for key, value in flat(tree).items() if key not in OWN}
    return out | {key: _kind(tree[key]) for key in START}


def _kind(given: str | None) -> str | None:
    return given if given in (None, "none", "auto") else "a folder"
