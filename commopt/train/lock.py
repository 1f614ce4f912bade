"""One run at a time in a run folder: a lock that ends with the process that holds it.

Rank 0 holds ``flock`` on a file in the folder. The kernel lets go of it when the process ends, however it ends, so
there is nothing to clean up after a kill. On NFS it is a lock of the server's, which all machines see; where a file
system has no locks, that is logged, and nothing is locked.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from commopt.train.errors import BusyError, FolderError, writing
from commopt.train.world import World

log = logging.getLogger(__name__)
LOCK = ".lock"
ATTEMPTS = 100
SEEN = 15.0
"""Seconds within which a rank must see what rank 0 has written: the file system of a network may be late."""
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)


@contextlib.contextmanager
def hold(folder: Path, world: World) -> Iterator[None]:
    """Have the run folder for this run. All ranks call it.

    Raises:
        BusyError: on every rank, if another run has it; says who.
        FolderError: on every rank, if nothing can be written there, or if it is not one folder for all ranks.
    """

    def take() -> Lock | None:
        with writing("train.run_dir", folder):
            return Lock(folder) if world.is_main else None

    lock = world.together(take, name_rank=False)
    try:
        written = world.once(lambda: _text(folder / LOCK))
        world.together(lambda: _see(folder, written))
        yield
    finally:
        if lock is not None:
            lock.release()


def _see(folder: Path, written: str | None) -> None:
    """Raises FolderError unless this rank finds there what rank 0 has ``written``."""
    until = time.monotonic() + SEEN
    while _text(folder / LOCK) != written:
        if time.monotonic() >= until:
            raise FolderError(
                f"train.run_dir={folder} on {socket.gethostname()} is not the folder that rank 0 has: all ranks write "
                "their parts of a checkpoint to one folder, which machines must share"
            )
        time.sleep(0.1)


def _text(path: Path) -> str | None:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return None


class Lock:
    """A lock in a folder, which is made if it is not there. Raises BusyError, or OSError.

    Attributes:
        handle: of the open file; -1 where the file system has no locks.
    """

    def __init__(self, folder: Path, name: str = LOCK) -> None:
        self.folder, self.path = folder, folder / name
        self.made = not folder.exists()
        for _ in range(ATTEMPTS):
            folder.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # a run that ended has removed the folder under us
                self.handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
                if self._lock():
                    return
        raise BusyError(f"run folder {folder}: its lock {name} comes and goes")

    def _lock(self) -> bool:
        """Lock what was opened and sign it; False if it is no longer the file in the folder."""
        try:
            fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = _holder(self.handle)
            os.close(self.handle)
            if error.errno not in NO_LOCKS:
                raise BusyError(
                    f"run folder {self.folder} is in use by {holder}: wait until that has ended, or give another "
                    "--train.run_dir=FOLDER"
                ) from None
            log.warning("%s: no lock taken (%s): see to it that no other run uses this folder", self.path, error)
            self.handle = -1
            return True
        if not _same_file(self.handle, self.path):
            os.close(self.handle)
            return False
        since = datetime.now().astimezone().isoformat(timespec="seconds")
        text = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": since})
        with contextlib.suppress(OSError):  # a full disk: the lock holds, unsigned
            os.ftruncate(self.handle, 0)
            os.pwrite(self.handle, text.encode(), 0)
        return True

    def release(self) -> None:
        """Let go, and leave nothing: also no folder that this run has made and never used."""
        if self.handle < 0:
            return
        with contextlib.suppress(OSError):
            self.path.unlink()
        os.close(self.handle)
        if self.made:
            with contextlib.suppress(OSError):
                self.folder.rmdir()


def _same_file(handle: int, path: Path) -> bool:
    try:
        here, there = os.fstat(handle), os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def _holder(handle: int) -> str:
    """Holder who has signed a lock."""
    try:
        said = json.loads(os.pread(handle, 4096, 0).decode())
        host, pid, since = str(said["host"])[:256], int(said["pid"]), str(said["since"])[:64]
    except (OSError, ValueError, KeyError, TypeError):
        return "another run (its lock does not say whose)"
    return f"process {pid} on {host} since {' '.join(since.split())}"
