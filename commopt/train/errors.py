"""Errors a user can fix. The command line prints them as one line; a traceback is for bugs only."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path


class UserError(Exception):
    """Base of every error that names something the user can change. One message, one line."""


class ConfigError(UserError, ValueError):
    """A config key, value or combination that is not allowed."""


class DataError(UserError, ValueError):
    """A corpus that is missing, unreadable, empty or too small."""


class CheckpointError(UserError, RuntimeError):
    """A checkpoint that is missing, damaged, foreign, or of another model, optimizer or corpus."""


class DamagedError(CheckpointError):
    """A checkpoint that is not what was saved; an older one may be."""


class BusyError(UserError, RuntimeError):
    """A run folder that another run is using."""


class FolderError(UserError, RuntimeError):
    """A folder that cannot be written."""


class DivergedError(UserError, RuntimeError):
    """Weights, optimizer state or losses that are inf or NaN."""


class ReplicaError(UserError, RuntimeError):
    """Replicas that differ, or a message that was damaged: a rank cannot be relied upon."""


class RankError(UserError, RuntimeError):
    """Another rank failed with an unexpected error; its own traceback is in that rank's output."""


MACHINE = ("CUDA out of memory", "CUDA error", "Cannot allocate memory")
"""Words of torch's errors of a machine that has no memory left, or a GPU that fails."""
OF_THE_MACHINE = (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EPERM, errno.ESTALE)
"""Errors of a file that say nothing about its content: no memory, too many open files, no permission, a server of files
that is gone."""


def explain(error: BaseException) -> str:
    """Explains what went wrong, in one line; a full disk is called that."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk is full: {text}"
    return f"{type(error).__name__}: {text}"


def unloadable(path: Path, what: str, error: Exception) -> CheckpointError:
    """What to raise for an ``error`` by which the checkpoint ``path`` could not be loaded: DamagedError, with ``what``
    is wrong; but not where the machine lacks memory, open files or permission, or its GPU fails: whether this one is
    damaged is then not known."""
    said = str(error)  # torch has classes of its own for these, some of them in new versions only
    lacking = isinstance(error, OSError) and error.errno in OF_THE_MACHINE
    lacking = lacking or isinstance(error, MemoryError) or any(word in said for word in MACHINE)
    if lacking:
        return CheckpointError(f"checkpoint {path} cannot be loaded on this machine: {explain(error)}")
    return DamagedError(f"checkpoint {path}{what}: {explain(error)}")


@contextlib.contextmanager
def writing(key: str, folder: Path) -> Iterator[None]:
    """Raises FolderError for an OSError in here: ``folder``, which the config has as ``key``, cannot be written."""
    try:
        yield
    except OSError as error:
        raise FolderError(f"{key}={folder} cannot be written: {explain(error)}") from error
