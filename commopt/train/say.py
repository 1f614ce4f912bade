"""The last line of a process, on standard error: once per machine, from whichever rank comes first.

Ranks mostly fail together, with the same words, but any of them may be the only one that is left to say so. So each
looks into a file that the processes of one launcher share, whether its words have been said.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from commopt.train import started

FRESH = 60.0
"""Seconds after which what was said counts as that of another job."""
PREFIX = "commopt-said-"


def say(line: str, about: str | None = None) -> None:
    """Write ``line``, unless another rank of this machine has; ``about``: what counts as the same, else the line."""
    if not started.launched():
        sys.stderr.write(f"{line}\n")
        return
    with _said(about or line) as before:
        if not before:
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()


@contextlib.contextmanager
def _said(words: str) -> Iterator[bool]:
    """True if another rank has said them; nobody else asks meanwhile. Where that cannot be known: no."""
    with contextlib.ExitStack() as stack:
        before = False
        with contextlib.suppress(OSError):  # no temporary folder, or nothing can be written there
            handle = _open(words)
            stack.callback(os.close, handle)
            before = _enter(handle)
        yield before


def _open(words: str) -> int:
    """The file for ``words``."""
    folder = Path(tempfile.gettempdir())
    job = f"{os.getuid()}-{os.getppid()}-"
    _clear(folder, job)
    key = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT')} {os.environ.get('MASTER_PORT')} {words}"
    path = folder / f"{PREFIX}{job}{hashlib.sha256(key.encode()).hexdigest()[:20]}"
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _enter(handle: int) -> bool:
    """Sign the file; whether others have. A rank says a thing once: if its own name is there, that was another job."""
    fcntl.flock(handle, fcntl.LOCK_EX)
    about = os.fstat(handle)
    ranks = os.pread(handle, 1 << 16, 0).split()
    mine = str(started.rank()).encode()
    ours = stat.S_ISREG(about.st_mode) and about.st_uid == os.getuid()
    before = bool(ranks) and ours and mine not in ranks and time.time() - about.st_mtime < FRESH
    with contextlib.suppress(OSError):  # the disk is full: another rank will say it, too
        os.ftruncate(handle, 0)
        os.pwrite(handle, b" ".join([*ranks, mine] if before else [mine]), 0)
    return before


def _clear(folder: Path, job: str) -> None:
    """Remove what this user's earlier jobs have left."""
    for path in folder.glob(f"{PREFIX}{os.getuid()}-*"):
        with contextlib.suppress(OSError):
            if not path.name.startswith(PREFIX + job) and time.time() - path.stat().st_mtime > FRESH:
                path.unlink()
