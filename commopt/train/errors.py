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


def explain(error: BaseException) -> str:
    """Explains what went wrong, in one line; a full disk is called that."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk is full: {text}"
    return f"{type(error).__name__}: {text}"


@contextlib.contextmanager
def writing(key: str, folder: Path) -> Iterator[None]:
    """Raises FolderError for an OSError in here: ``folder``, which the config has as ``key``, cannot be written."""
    try:
        yield
    except OSError as error:
        raise FolderError(f"{key}={folder} cannot be written: {explain(error)}") from error
