"""A folder that cannot be written is one line with the key that it has in the config, whoever writes."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tensorboard.compat.tensorflow_stub.io import gfile
from trainer_pair import run

from commopt.train import data
from commopt.train.config import Config
from commopt.train.errors import FolderError
from commopt.train.metrics import RunRecorder

Make = Callable[..., Config]
FULL = r"cannot be written: the disk is full: \[Errno 28\] No space left on device$"


def no_space(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("written", ["_write", "append"], ids=["at once", "later"])
def test_events_on_a_full_disk(tiny: Make, tmp_path: Path, capfd: pytest.CaptureFixture[str], written: str) -> None:
    """TensorBoard writes in a thread, which dies: with no traceback of its own."""
    config = tiny(tmp_path / "run", train={"log_every": 1, "steps": 4000, "checkpoint_every": 4000})
    with (
        mock.patch.object(gfile.LocalFileSystem, written, no_space),
        pytest.raises(FolderError, match=f"^train.run_dir={config.train.run_dir} {FULL}"),
    ):
        run(config)
    assert "Traceback" not in capfd.readouterr().err


def test_metrics_on_a_full_disk(tiny: Make, tmp_path: Path) -> None:
    class Full(RunRecorder):
        def write(self, record: dict[str, Any]) -> None:
            self.file.close()
            self.file = os.fdopen(os.open("/dev/full", os.O_WRONLY), "w")
            super().write(record)

    with (
        mock.patch("commopt.train.loop.RunRecorder", Full),
        pytest.raises(FolderError, match=f"^train.run_dir={tmp_path}/run {FULL}"),
    ):
        run(tiny(tmp_path / "run"))


def test_a_run_folder_that_is_a_file(tiny: Make, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, why in (("file", "FileExistsError"), ("file/run", "NotADirectoryError")):
        with pytest.raises(FolderError, match=f"^train.run_dir={tmp_path}/{name} cannot be written: {why}"):
            run(tiny(tmp_path / name))


@pytest.mark.parametrize(("place", "written"), [(Path, "write_text"), (data.prepared, "write_meta")])
def test_a_corpus_prepared_on_a_full_disk(tiny: Make, tmp_path: Path, place: Any, written: str) -> None:
    """The tokenizer, whose library has errors of its own, and what is written last."""
    config = tiny(tmp_path / "run", data={"cache_dir": str(tmp_path / "cache")})
    with (
        mock.patch.object(place, written, no_space),
        pytest.raises(FolderError, match=f"^data.cache_dir={tmp_path}/cache {FULL}"),
    ):
        run(config)
