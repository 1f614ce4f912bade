"""One run at a time in a run folder."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from trainer_pair import Pair, run

from commopt.train import lock
from commopt.train.config import Config
from commopt.train.errors import BusyError
from commopt.train.lock import Lock
from commopt.train.world import World

ALONE = World(0, 1, torch.device("cpu"))
Make = Callable[..., Config]
HOLD = """
import sys, time
from pathlib import Path
from commopt.train.lock import Lock
lock = Lock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_second_run_is_refused_on_all_ranks_and_changes_nothing(pair: Pair, tiny: Make, tmp_path: Path) -> None:
    run(tiny(tmp_path, train={"steps": 4}))
    mine = Lock(tmp_path)
    before = content(tmp_path)
    for resume in ("none", "auto"):
        errors = pair.errors(run, tiny(tmp_path, resume=resume))
        assert errors[0] == errors[1]
        kind, message = errors[0]
        assert kind == "BusyError"
        assert f"run folder {tmp_path} is in use by process {os.getpid()} on " in message
        assert "since 2" in message
        assert "\n" not in message
    assert content(tmp_path) == before
    mine.release()
    assert pair.run(run, tiny(tmp_path, resume="auto"))[0]["finished"]
    assert not (tmp_path / lock.LOCK).exists()


def test_the_lock_of_a_killed_run_is_free(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(BusyError, match=rf"in use by process {process.pid} on "):
            Lock(tmp_path)
        process.send_signal(signal.SIGKILL)
        process.wait()
        Lock(tmp_path).release()


def test_nothing_is_left_but_what_was_there(tmp_path: Path) -> None:
    new, old = tmp_path / "a" / "new", tmp_path / "old"
    old.mkdir()
    for folder in (new, old):
        with lock.hold(folder, ALONE):
            assert (folder / lock.LOCK).exists()
    assert not new.exists()
    assert list(old.iterdir()) == []


def test_a_lock_that_does_not_say_whose(tmp_path: Path) -> None:
    mine = Lock(tmp_path)
    for text in ("", "[]", '{"host": 1}', '{"host": "h", "pid": "x", "since": 0}', "\x00\xff"):
        (tmp_path / lock.LOCK).write_text(text)
        with pytest.raises(BusyError, match="in use by another run"):
            Lock(tmp_path)
    mine.release()


def test_a_folder_that_is_removed_meanwhile(tmp_path: Path) -> None:
    """The run that held the lock ends between our open and our lock: ours would be of a file that is gone."""
    first, real = Lock(tmp_path), os.open
    opened = []

    def open_late(*args: object) -> int:
        handle = real(*args)  # type: ignore[arg-type]
        if not opened:
            first.release()
        opened.append(handle)
        return handle

    with mock.patch.object(lock.os, "open", open_late):
        second = Lock(tmp_path)
    assert len(opened) == 2
    with pytest.raises(BusyError):
        Lock(tmp_path)
    second.release()


def test_a_file_system_without_locks_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    missing = OSError(38, "Function not implemented")
    with mock.patch.object(lock.fcntl, "flock", side_effect=missing), caplog.at_level(logging.WARNING):
        Lock(tmp_path).release()
    assert "no lock taken" in caplog.text


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / lock.LOCK).symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="symbolic links"):
        Lock(tmp_path / "run")
    assert (tmp_path / "target").read_text() == "mine"
