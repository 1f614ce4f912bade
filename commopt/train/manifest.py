"""Manifest of a checkpoint: its step, its ranks, and size and SHA-256 of each file.

The manifest carries a checksum of its own, so that a changed digit in it is damage and not another checkpoint.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from commopt.train import sums
from commopt.train.errors import DamagedError, unloadable

FORMAT, VERSION = "commopt-checkpoint", 2
OF_PIECES = ("commopt-sharded-checkpoint", 1)
"""Format and version of those of models that ranks hold together; the others are as they were."""
MANIFEST, SHARED, PREFIX, PIECES = "manifest.json", "shared.pt", "step-", "sharded"
LARGEST = 1 << 24
"""Bytes of a manifest that are read at most; one entry takes about 150."""
KEYS = {"format", "version", "step", "world_size", "files", sums.KEY}


def rank_file(rank: int) -> str:
    """Name of the file of a rank."""
    return f"rank-{rank:05d}.pt"


def step_in(name: str) -> int | None:
    """The step in a checkpoint's name; None for any other name."""
    found = re.fullmatch(rf"{PREFIX}([0-9]{{1,18}})", name)
    return int(found[1]) if found else None


def is_piece(name: str) -> bool:
    """True for the name of a file of a sharded model."""
    return re.fullmatch(rf"{PIECES}/(\.metadata|__[0-9]+_[0-9]+\.distcp)", name) is not None


def make_manifest(step: int, world_size: int, files: dict[str, Any]) -> str:
    """The text of a manifest. ``files``: name -> size and sha256."""
    kind, version = OF_PIECES if any(map(is_piece, files)) else (FORMAT, VERSION)
    content = {"format": kind, "version": version, "step": step, "world_size": world_size, "files": files}
    return sums.sealed(content)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of the checkpoint ``path``, checked: checksum, types, ranges, and that it is of this folder.

    Raises DamagedError, naming what is wrong, or CheckpointError where this machine cannot read it.
    """
    if not path.is_dir():
        raise DamagedError(f"checkpoint {path}: no such folder")
    try:
        with (path / MANIFEST).open("rb") as file:
            manifest = json.loads(file.read(LARGEST).decode("utf-8"))
    except FileNotFoundError:
        raise DamagedError(f"checkpoint {path}: no {MANIFEST} in it: this is no commopt checkpoint") from None
    except OSError as error:
        raise unloadable(path, f": cannot read {MANIFEST}", error) from None
    except (ValueError, RecursionError):
        raise DamagedError(f"checkpoint {path}: {MANIFEST} is damaged or of another program") from None
    if not isinstance(manifest, dict) or not {"format", "version"} <= manifest.keys():
        raise DamagedError(f"checkpoint {path}: {MANIFEST} is damaged or of another program")
    found = (manifest["format"], manifest["version"])
    if found not in ((FORMAT, VERSION), OF_PIECES):
        raise DamagedError(f"checkpoint {path}: its format is {found}, expected {(FORMAT, VERSION)}")
    if reason := _fault(manifest, step_in(path.name)):
        raise DamagedError(f"checkpoint {path}: {MANIFEST} is damaged: {reason}")
    return manifest


def _fault(manifest: dict[str, Any], step: int | None) -> str | None:
    """Fault of a manifest in a folder of this step, if anything."""
    if manifest.keys() != KEYS:
        return f"its keys are {sorted(map(str, manifest))}, expected {sorted(KEYS)}"
    if manifest[sums.KEY] != sums.of_content(manifest):
        return "its checksum differs"
    size, files = manifest["world_size"], manifest["files"]
    if not (sums.is_count(size) and size >= 1):
        return f"world_size={size!r}, expected >= 1"
    if not sums.is_count(manifest["step"]) or step not in (None, manifest["step"]):
        return f"step={manifest['step']!r} in the folder of step {step}"
    if not isinstance(files, dict):
        return f"files={files!r}, expected names and entries"
    sharded = manifest["format"] == OF_PIECES[0]
    pieces = [f"{PIECES}/.metadata", *filter(is_piece, files)] if sharded else []
    whole = (SHARED, *map(rank_file, range(size)))
    for name in (*whole, *pieces):
        if name not in files:
            return f"{name} is not in it"
        entry = files[name]
        if not (isinstance(entry, dict) and sums.is_count(entry.get("size")) and isinstance(entry.get("sha256"), str)):
            return f"its entry of {name} is {entry!r}"
    expected = len({*whole, *pieces})
    return None if len(files) == expected else f"it has {len(files)} files, expected {expected}"
