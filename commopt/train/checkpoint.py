"""Checkpoints: a folder that is whole or absent.

    step-00000500/  shared.pt        rank 0: model, replicated optimizer state, counters, what they belong to
                    rank-00000.pt …  every rank: its compression residuals and random generators
                    manifest.json    format, version, world size, and size and SHA-256 of each file

All ranks write into a folder with another name; only when all have succeeded does rank 0 rename it. Files are read with
``weights_only=True``: loading runs no code from them. Every public function that takes a ``World`` is a collective, and
what fails on one rank is raised on all.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from commopt.train.errors import CheckpointError
from commopt.train.world import World

log = logging.getLogger(__name__)
FORMAT, VERSION = "commopt-checkpoint", 1
MANIFEST, SHARED = "manifest.json", "shared.pt"
PREFIX, ASIDE = "step-", ".tmp-"


def rank_file(rank: int) -> str:
    """Name of the file of a rank."""
    return f"rank-{rank:05d}.pt"


def list_steps(folder: Path) -> list[Path]:
    """Finished checkpoints below ``folder``, oldest first."""
    found = folder.glob(f"{PREFIX}*") if folder.is_dir() else ()
    return sorted(path for path in found if path.name.removeprefix(PREFIX).isdigit())


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    return int(path.name.removeprefix(PREFIX))


# --- writing ---


def _sync(path: Path) -> None:
    """Ask the disk to hold a folder's entries: without it a rename may survive a power cut and its files not."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _write(path: Path, content: Any) -> dict[str, Any]:
    """Write one file to the disk itself; return its manifest entry."""
    with path.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    return {"size": path.stat().st_size, "sha256": _sha256(path)}


def _clear_leftovers(folder: Path) -> None:
    """Remove what a killed run left half written."""
    for path in folder.glob(f"{ASIDE}*"):
        shutil.rmtree(path, ignore_errors=True)


def _publish(aside: Path, final: Path, files: dict[str, Any], step: int, world_size: int) -> None:
    for name, entry in files.items():
        path = aside / name
        if not path.exists() or path.stat().st_size != entry["size"]:
            raise CheckpointError(
                f"{path} was written by another rank but is not here: train.run_dir must be a shared folder"
            )
    manifest = {"format": FORMAT, "version": VERSION, "step": step, "world_size": world_size, "files": files}
    with (aside / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    _sync(aside)
    aside.rename(final)
    _sync(final.parent)


def save(folder: Path, step: int, shared: dict[str, Any], local: dict[str, Any], world: World, keep: int) -> Path:
    """Write the checkpoint of ``step`` below ``folder`` and remove all but the newest ``keep``.

    ``shared`` is used on rank 0 only, ``local`` on every rank. Raises CheckpointError on every rank if any of them
    could not write; the checkpoints that were there stay then.
    """
    final = folder / f"{PREFIX}{step:08d}"
    aside = folder / f"{ASIDE}{final.name}"

    def begin() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        _clear_leftovers(folder)
        aside.mkdir()

    def write() -> dict[str, Any]:
        files = {rank_file(world.rank): _write(aside / rank_file(world.rank), local)}
        return files | ({SHARED: _write(aside / SHARED, shared)} if world.is_main else {})

    def finish() -> None:
        files = {name: entry for part in parts for name, entry in part.items()}
        _publish(aside, final, files, step, world.size)
        for old in list_steps(folder)[:-keep]:
            shutil.rmtree(old)

    try:
        world.once(begin)
        parts = world.gather(world.together(write))
        world.once(finish)
    except Exception as error:
        if world.is_main:
            shutil.rmtree(aside, ignore_errors=True)
        if isinstance(error, (OSError, RuntimeError)) and not isinstance(error, CheckpointError):
            raise CheckpointError(f"cannot write checkpoint {final}: {' '.join(str(error).split())}") from error
        raise
    return final


# --- reading ---


def verify(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, after checking it and every file. Raises CheckpointError, naming what is wrong."""
    if not path.is_dir():
        raise CheckpointError(f"checkpoint {path}: no such folder")
    manifest_path = path / MANIFEST
    if not manifest_path.exists():
        raise CheckpointError(f"checkpoint {path}: no {MANIFEST} in it: this is no commopt checkpoint")
    try:
        manifest = json.loads(manifest_path.read_text(encoding="utf-8"))
        found = (manifest["format"], manifest["version"])
        files, size = dict(manifest["files"]), int(manifest["world_size"])
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"checkpoint {path}: {MANIFEST} is damaged or of another program") from None
    if found != (FORMAT, VERSION):
        raise CheckpointError(f"checkpoint {path}: its format is {found}, expected {(FORMAT, VERSION)}")
    for name in (SHARED, *map(rank_file, range(size))):
        if name not in files:
            raise CheckpointError(f"checkpoint {path}: {name} is not in its {MANIFEST}")
        _verify_file(path / name, files[name])
    return manifest


def _verify_file(path: Path, entry: dict[str, Any]) -> None:
    if not path.exists():
        raise CheckpointError(f"checkpoint {path.parent}: {path.name} is missing")
    size = path.stat().st_size
    if size != entry["size"]:
        raise CheckpointError(
            f"checkpoint {path.parent}: {path.name} has {size} bytes, expected {entry['size']}: it is truncated"
        )
    if _sha256(path) != entry["sha256"]:
        raise CheckpointError(f"checkpoint {path.parent}: the content of {path.name} has changed (SHA-256 differs)")


def find(folder: Path, resume: str, world: World) -> Path | None:
    """The verified checkpoint to start from; None for a new run. ``resume`` as in the config.

    With auto, a damaged checkpoint is logged as an error and the one before it is taken; if all are damaged, that is an
    error.
    """
    return world.once(lambda: _find(folder, resume))


def _find(folder: Path, resume: str) -> Path | None:
    present = list_steps(folder)
    if resume == "none":
        if present:
            raise CheckpointError(
                f"{folder.parent} already holds a run (at step {step_of(present[-1])}): go on with --resume=auto, "
                "or start another with --train.run_dir=FOLDER"
            )
        return None
    if resume != "auto":
        path = Path(resume)
        verify(path)
        if present and path.resolve().parent != folder.resolve():
            raise CheckpointError(
                f"{folder.parent} already holds a run: resume {path} with another --train.run_dir=FOLDER"
            )
        return path
    for path in reversed(present):
        try:
            verify(path)
        except CheckpointError as error:
            log.error("damaged checkpoint left out: %s", error)
        else:
            return path
    if present:
        raise CheckpointError(f"no checkpoint in {folder} is good; they were left as they are")
    return None


def load(path: Path, world: World) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The shared part, and the part of every rank that was there at the save, on the CPU.

    Other ranks' parts are memory maps: they are read only where the world size has changed and they are merged.
    """

    def read() -> list[dict[str, Any]]:
        size = int(json.loads((path / MANIFEST).read_text(encoding="utf-8"))["world_size"])
        return [_read(path / name, mmap=name != own) for name in map(rank_file, range(size))]

    own = rank_file(world.rank)
    return world.together(lambda: load_shared(path)), world.together(read)


def load_shared(path: Path) -> dict[str, Any]:
    """The shared part alone, on the CPU."""
    return _read(path / SHARED)


def _read(path: Path, mmap: bool = False) -> dict[str, Any]:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # pickle, zip and torch errors alike: the file is not what was saved
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"checkpoint {path.parent}: cannot read {path.name}: {type(error).__name__}: {reason}"
        ) from None


def check_fits(saved: dict[str, Any], expected: dict[str, Any], path: Path) -> None:
    """Raise CheckpointError unless the checkpoint belongs to this optimizer class, corpus and model.

    Both arguments have the keys ``optimizer``, ``corpus`` and ``model`` ([name, shape] of every parameter).
    """
    for key, reason in (("optimizer", "optimizer class"), ("corpus", "corpus or tokenizer")):
        if saved[key] != expected[key]:
            raise CheckpointError(
                f"checkpoint {path} is of another {reason}: {saved[key]}, this run has {expected[key]}"
            )
    theirs, ours = saved["model"], expected["model"]
    for (name, shape), (our_name, our_shape) in zip(theirs, ours):
        if (name, shape) != (our_name, our_shape):
            raise CheckpointError(
                f"checkpoint {path} is of another model: it has {name} {tuple(shape)} where this one has "
                f"{our_name} {tuple(our_shape)}"
            )
    if len(theirs) != len(ours):
        first = max(theirs, ours, key=len)[min(len(theirs), len(ours))]
        raise CheckpointError(
            f"checkpoint {path} is of another model: {len(theirs)} parameters against {len(ours)} here, the first that "
            f"only one of them has is {first[0]} {tuple(first[1])}"
        )


def set_aside_newer(folder: Path, step: int) -> None:
    """Rename checkpoints after ``step``: the run goes on from there, and auto must not find another future."""
    for path in list_steps(folder):
        if step_of(path) > step:
            aside = path.with_name(f"discarded-{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
            log.warning("checkpoint of a later step set aside: %s", aside)
