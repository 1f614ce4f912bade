"""Files that are whole or as they were, and that are never written through a link."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any


def replace(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Write ``path`` aside and rename: it is whole or as before, after a power cut, too, and a symbolic link there is
    replaced, not followed.

    Raises OSError.
    """
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with aside.open("xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())  # else the name may be on the disk before what is in it
        aside.rename(path)
    finally:
        aside.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """As :func:`replace`, of text."""
    replace(path, lambda file: file.write(text.encode("utf-8")))


class Watched:
    """A file for writing that remembers the first error: libraries hide it behind errors of their own."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """As of the file."""
        return self._noting(lambda: self.file.write(data))

    def flush(self) -> None:
        """As of the file."""
        self._noting(self.file.flush)

    def sync(self) -> None:
        """Put everything on the disk itself."""
        self.flush()
        self._noting(lambda: os.fsync(self.file.fileno()))

    def _noting(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except OSError as error:
            self.error = self.error or error
            raise
