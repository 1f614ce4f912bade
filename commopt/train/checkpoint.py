"""Checkpoints: a folder that is whole or absent.

    step-00000500/  shared.pt        rank 0: model, replicated optimizer state, counters, what they belong to
                    rank-00000.pt …  every rank: its compression residuals and random generators
                    manifest.json    format, step, world size, size and SHA-256 of each file, and of all that
                    sharded/         where ranks hold a model together: its weights and optimizer state (sharded.py)

    discarded-step-00000700/  set aside by a run that went on from an earlier one; the last time's alone

All ranks write into a folder with another name; only when all have succeeded does rank 0 rename it. Files are read with
``weights_only=True``: loading runs no code from them. Every public function that takes a ``World`` is a collective, and
what fails on one rank is raised on all.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any, cast

import torch

from commopt.comm import CollectiveError
from commopt.train import sums
from commopt.train.errors import CheckpointError, DamagedError, UserError, explain, unloadable
from commopt.train.files import Watched
from commopt.train.manifest import MANIFEST, PREFIX, SHARED, make_manifest, rank_file, read_manifest, step_in
from commopt.train.world import World

log = logging.getLogger(__name__)
FOLDER = "checkpoints"
"""Name of the folder of all checkpoints, in that of the run."""
ASIDE, DISCARDED = ".tmp-", "discarded-"
"""Beginnings of the names of what is being written, and of what was set aside."""


def list_steps(folder: Path) -> list[Path]:
    """Finished checkpoints below ``folder``, oldest first; none where there is no such folder.

    Raises OSError if it cannot be read, which is not the same: a run that is taken up would begin anew.
    """
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        if folder.is_symlink():  # its disk may not be mounted
            raise
        return []
    return sorted((folder / name for name in names if step_in(name) is not None), key=step_of)


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    step = step_in(path.name)
    assert step is not None
    return step


# --- writing ---


def _sync(path: Path) -> None:
    """Ask the disk to hold a folder's entries: without it a rename may survive a power cut and its files not."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write(path: Path, content: Any) -> dict[str, Any]:
    """Write one file to the disk itself; return its manifest entry. Raises OSError, also where torch hides it."""
    with path.open("wb") as file:
        watched = Watched(file)
        try:
            torch.save(content, cast(IO[bytes], watched))
            watched.sync()
        except Exception as error:
            if watched.error is not None:
                raise watched.error from error
            raise
    return _entry(path)


def _entry(path: Path) -> dict[str, Any]:
    """The manifest entry of a file."""
    return {"size": path.stat().st_size, "sha256": sums.of_file(path)}


def _clear_leftovers(folder: Path) -> None:
    """Remove what a killed run left half written."""
    for path in folder.glob(f"{ASIDE}*"):
        shutil.rmtree(path, ignore_errors=True)


def _remove(path: Path) -> None:
    """Remove a checkpoint, or whatever bears the name of one; of a link, the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _publish(aside: Path, final: Path, files: dict[str, Any], step: int, world_size: int) -> None:
    for name, entry in files.items():
        path = aside / name
        if not path.exists() or path.stat().st_size != entry["size"]:
            raise CheckpointError(
                f"{path} was written by another rank but is not here: train.run_dir must be a shared folder"
            )
    with (aside / MANIFEST).open("w", encoding="utf-8") as file:
        file.write(make_manifest(step, world_size, files))
        file.flush()
        os.fsync(file.fileno())
    for path in {(aside / name).parent for name in files}:
        _sync(path)
    aside.rename(final)
    _sync(final.parent)


def _remove_old(folder: Path, keep: int) -> None:
    """Remove all but the newest ``keep``."""
    try:
        old = list_steps(folder)[:-keep]
    except OSError as error:
        log.warning("old checkpoints cannot be removed: %s", explain(error))
        return
    _remove_each(old)


def _remove_each(checkpoints: Iterable[Path]) -> None:
    """Remove ``checkpoints``; what cannot be removed is said, for the new one is there all the same."""
    for old in checkpoints:
        try:
            _remove(old)
        except OSError as error:
            log.warning("checkpoint %s is old, and cannot be removed: %s", old, explain(error))


def save(
    folder: Path,
    step: int,
    shared: dict[str, Any],
    local: dict[str, Any],
    world: World,
    keep: int,
    pieces: dict[str, torch.Tensor] | None = None,
) -> Path:
    """Write the checkpoint of ``step`` below ``folder`` and remove all but the newest ``keep``.

    ``shared`` is used on rank 0 only, ``local`` on every rank; ``pieces`` are tensors of which ranks have parts. Raises
    CheckpointError on every rank if any of them could not write; the checkpoints that were there stay then.
    """
    final = folder / f"{PREFIX}{step:08d}"
    aside = folder / f"{ASIDE}{final.name}"

    def begin() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        _clear_leftovers(folder)
        aside.mkdir()

    def write() -> dict[str, Any]:
        files = {rank_file(world.rank): _write(aside / rank_file(world.rank), local)}
        if pieces is not None:
            from commopt.train import sharded

            files |= {path.relative_to(aside).as_posix(): _entry(path) for path in sharded.files_of(aside, world)}
        return files | ({SHARED: _write(aside / SHARED, shared)} if world.is_main else {})

    def finish() -> None:
        files = {name: entry for part in parts for name, entry in part.items()}
        _publish(aside, final, files, step, world.size)
        _remove_old(folder, keep)

    try:
        world.once(begin)
        if pieces is not None:
            from commopt.train import sharded  # which imports what takes half a second

            sharded.write(aside, pieces, world)
        parts = world.gather(world.together(write))
        world.once(finish)
    except Exception as error:
        if world.is_main:
            shutil.rmtree(aside, ignore_errors=True)
        if isinstance(error, (UserError, RuntimeError, OSError)) and not isinstance(
            error, (CheckpointError, CollectiveError)
        ):
            reason = str(error) if isinstance(error, UserError) else explain(error)
            raise CheckpointError(f"cannot write checkpoint {final}: {reason}") from error
        raise
    return final


# --- reading ---


def verify(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, after checking it and every file.

    Raises DamagedError, naming what is wrong, or CheckpointError where this machine cannot read it.
    """
    manifest = read_manifest(path)
    for name, entry in manifest["files"].items():
        _verify_file(path / name, entry)
    return manifest


def _verify_file(path: Path, entry: dict[str, Any]) -> None:
    where = f"checkpoint {path.parent}"
    try:
        size = path.stat().st_size
        if size != entry["size"]:
            raise DamagedError(f"{where}: {path.name} has {size} bytes, expected {entry['size']}: it is truncated")
        if sums.of_file(path) != entry["sha256"]:
            raise DamagedError(f"{where}: the content of {path.name} has changed (SHA-256 differs)")
    except FileNotFoundError:
        raise DamagedError(f"{where}: {path.name} is missing") from None
    except OSError as error:
        raise unloadable(path.parent, f": cannot read {path.name}", error) from None


def check_there(option: str, path: Path, allowed: str) -> None:
    """Raises CheckpointError, naming the ``option`` and what is ``allowed``, if there is no folder ``path``, or it is
    that of a run, or of all its checkpoints."""
    if not path.is_dir():
        raise CheckpointError(f"checkpoint {path}: no such folder; {option} must be {allowed}")
    if os.path.exists(path / MANIFEST):
        return
    for folder in (path / FOLDER, path):
        steps: list[Path] = []
        with contextlib.suppress(OSError):  # what cannot be read is said by what needs it
            steps = list_steps(folder)
        if steps:
            raise CheckpointError(f"{path} is the folder of a run; {option} must be {allowed}, such as {steps[-1]}")


def find(folder: Path, resume: str, world: World, before: int | None = None) -> Path | None:
    """The verified checkpoint to start from; None for a new run. ``resume`` as in the config.

    Rank 0 looks for it, and each rank gets it below its own ``folder``, or at its own path. With auto, a damaged
    checkpoint is logged as an error and the one before it is taken; if all are damaged, that is an error. ``before``:
    only those of earlier steps, because the one of that step could not be loaded.

    Raises CheckpointError, on every rank: there is none that may be taken, or ``folder`` cannot be read.
    """
    found = world.patiently(lambda heed: _find(folder, resume, before))
    if found is None:
        return None
    return folder / found.name if resume == "auto" else Path(resume)


def _present(folder: Path) -> list[Path]:
    try:
        return list_steps(folder)
    except OSError as error:
        raise CheckpointError(f"the checkpoints in {folder} cannot be looked for: {explain(error)}") from error


def _find(folder: Path, resume: str, before: int | None) -> Path | None:
    present = _present(folder)
    if resume == "none":
        if present:
            raise CheckpointError(
                f"{folder.parent} already holds a run (at step {step_of(present[-1])}): go on with --resume=auto, "
                "or start another with --train.run_dir=FOLDER"
            )
        return None
    if resume != "auto":
        path = Path(resume)
        check_there("resume", path, "none, auto or the folder of a checkpoint")
        verify(path)
        if present and path.resolve().parent != folder.resolve():
            raise CheckpointError(
                f"{folder.parent} already holds a run: resume {path} with another --train.run_dir=FOLDER"
            )
        return path
    for path in reversed(present):
        if before is not None and step_of(path) >= before:
            continue
        try:
            verify(path)
        except DamagedError as error:
            log.error("damaged checkpoint left out: %s", error)
        else:
            return path
    if present:
        raise CheckpointError(f"no checkpoint in {folder} is good; they were left as they are")
    return None


def load(path: Path, world: World) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The shared part, and the part of every rank that was there at the save, on the CPU. Raises DamagedError.

    Other ranks' parts are memory maps: they are read only where the world size has changed and they are merged.
    """

    def read() -> tuple[dict[str, Any], list[dict[str, Any]]]:
        manifest = read_manifest(path)
        shared = load_shared(path)
        if shared.get("step") != manifest["step"]:
            raise DamagedError(f"checkpoint {path}: {SHARED} is of step {shared.get('step')!r}")
        return shared, [_read(path / name, mmap=name != own) for name in map(rank_file, range(manifest["world_size"]))]

    own = rank_file(world.rank)
    return world.together(read)


def load_shared(path: Path) -> dict[str, Any]:
    """The shared part alone, on the CPU."""
    return _read(path / SHARED)


def _read(path: Path, mmap: bool = False) -> dict[str, Any]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # pickle, zip and torch errors alike: the file is not what was saved
        raise unloadable(path.parent, f": cannot read {path.name}", error) from None
    if not isinstance(content, dict):
        raise DamagedError(f"checkpoint {path.parent}: {path.name} holds no checkpoint but {type(content).__name__}")
    return content


def check_fits(saved: Mapping[str, Any], expected: Mapping[str, Any], path: Path) -> None:
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
    """Rename checkpoints after ``step``: the run continues from there, and auto must not find another future. Those
    that were set aside before are removed, but for one of that step: the run may have come from it."""
    newer = [path for path in list_steps(folder) if step_of(path) > step]
    there = folder.glob(f"{DISCARDED}*") if newer else ()
    before = {path for path in there if step_in(path.name.removeprefix(DISCARDED)) not in (None, step)}
    for path in newer:
        aside = path.with_name(f"{DISCARDED}{path.name}")
        if aside in before:
            _remove(aside)
            before.remove(aside)
        path.rename(aside)
        log.warning("checkpoint of a later step set aside: %s", aside)
    _remove_each(sorted(before))
