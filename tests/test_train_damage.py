"""Whatever happens to the files of a run, ``--resume=auto`` goes on from an older checkpoint or says why it cannot."""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from trainer_pair import run
from trainer_runs import assert_same, content, sign_anew

from commopt.optim import CommOptimizer
from commopt.train import checkpoint, resume
from commopt.train.config import Config
from commopt.train.errors import CheckpointError, DamagedError, UserError
from commopt.train.metrics import METRICS, read_metrics

Make = Callable[..., Config]
ROUNDS = int(os.environ.get("COMMOPT_FUZZ", "6"))
"""Damaged copies of each file; COMMOPT_FUZZ=200 for a night."""


@pytest.fixture(scope="module")
def finished(tiny: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 steps with checkpoints of step 2, 4 and 6."""
    run_dir = tmp_path_factory.mktemp("finished")
    run(config(tiny, run_dir))
    return run_dir


def config(tiny: Make, run_dir: Path, **more: Any) -> Config:
    return tiny(run_dir, train={"steps": 6, "checkpoint_every": 2, "eval_every": 6, "log_every": 1}, **more)


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def spoil(path: Path, draw: random.Random) -> str:
    """Flip one bit, or cut the file; says what."""
    data = bytearray(path.read_bytes())
    place = draw.randrange(len(data))
    if draw.random() < 0.75:
        bit = draw.randrange(8)
        data[place] ^= 1 << bit
        path.write_bytes(data)
        return f"{path.name}: bit {bit} of byte {place}"
    path.write_bytes(data[:place])
    return f"{path.name}: cut to {place} bytes"


def test_flipped_bits_and_cuts(tiny: Make, finished: Path, tmp_path: Path) -> None:
    """In one file of the newest checkpoint, or of the run folder: the run goes on, and ends as it had."""
    draw = random.Random(3)
    names = [str(p.relative_to(finished)) for p in sorted(finished.rglob("*")) if p.is_file()]
    read = [name for name in names if "step-00000006" in name or name in (METRICS, "config.yaml")]
    assert len(read) == 5
    whole = content(finished, 6, 1)
    for number in range(ROUNDS * len(read)):
        run_dir = tmp_path / str(number)
        shutil.copytree(finished, run_dir)
        said = spoil(run_dir / read[number % len(read)], draw)
        summary = run(config(tiny, run_dir, resume="auto"))
        assert summary["finished"], said
        assert_same(content(run_dir, 6, 1), whole, said)
        shutil.rmtree(run_dir)


def test_everything_damaged_is_one_line(tiny: Make, copy: Path) -> None:
    draw = random.Random(4)
    for folder in checkpoint.list_steps(copy / "checkpoints"):
        spoil(draw.choice(sorted(folder.glob("*.pt"))), draw)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is good") as caught:
        run(config(tiny, copy, resume="auto"))
    assert "\n" not in str(caught.value)


def without(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda content: {k: v for k, v in content.items() if k != key}


WRONG: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "no step": ("shared.pt", without("step")),
    "another step": ("shared.pt", lambda content: content | {"step": 7}),
    "no weights": ("shared.pt", without("weights")),
    "no model": ("shared.pt", without("model")),
    "model is a number": ("shared.pt", lambda content: content | {"model": 3}),
    "config is a list": ("shared.pt", lambda content: content | {"config": []}),
    "meter of another kind": ("shared.pt", lambda content: content | {"meter": {"miles": 3}}),
    "state is none": ("shared.pt", lambda content: content | {"optimizer_state": {}}),
    "a list": ("shared.pt", lambda content: [1]),
    "no generators": ("rank-00000.pt", without("rng")),
    "a tensor": ("rank-00000.pt", lambda content: torch.zeros(3)),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_verified_and_cannot_be_loaded_is_left_out_too(
    tiny: Make, finished: Path, copy: Path, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    name, change = WRONG[case]
    newest = copy / "checkpoints" / "step-00000006"
    torch.save(change(torch.load(newest / name, weights_only=True)), newest / name)
    sign_anew(newest)
    checkpoint.verify(newest)
    with pytest.raises(UserError) as caught:  # asked for by name, it is an error of one line
        run(config(tiny, copy.parent / "other", resume=str(newest)))
    assert "\n" not in str(caught.value)
    with caplog.at_level(logging.ERROR):
        assert run(config(tiny, copy, resume="auto"))["finished"]
    assert "damaged checkpoint left out" in caplog.text
    assert_same(content(copy, 6, 1), content(finished, 6, 1))


def test_another_setting_is_no_damage(tiny: Make, copy: Path) -> None:
    """Older checkpoints have it as well: none is set aside for it."""
    other = config(tiny, copy, resume="auto")
    other.train.seed = 1
    with (
        mock.patch.object(resume, "FIXED", ("train.seed",)),
        pytest.raises(CheckpointError, match=r"step-00000006 was made with train.seed=0, this run has 1"),
    ):
        run(other)
    assert len(checkpoint.list_steps(copy / "checkpoints")) == 3


NO_MEMORY = {
    "of the GPU": (CommOptimizer, "load_state_dict", torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB")),
    "for a file": (torch, "load", RuntimeError("unable to mmap 9 bytes: Cannot allocate memory (12)")),
    "of Python": (torch, "load", MemoryError()),
    "for one more file": (torch, "load", OSError(errno.EMFILE, "Too many open files")),
}


@pytest.mark.parametrize("case", NO_MEMORY)
def test_a_machine_without_memory_is_no_damage(tiny: Make, copy: Path, case: str) -> None:
    """No other checkpoint is better: none is set aside, and nobody is told that none is good."""
    place, name, error = NO_MEMORY[case]
    with (
        mock.patch.object(place, name, mock.Mock(side_effect=error)),
        pytest.raises(CheckpointError, match=r"step-00000006 cannot be loaded on this machine: ") as caught,
    ):
        run(config(tiny, copy, resume="auto"))
    assert not isinstance(caught.value, DamagedError)
    assert "\n" not in str(caught.value)
    assert len(checkpoint.list_steps(copy / "checkpoints")) == 3


@pytest.mark.parametrize("name", ["manifest.json", "shared.pt", "rank-00000.pt"])
@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), OSError(116, "Stale file handle")])
def test_a_file_that_may_not_be_read_is_no_damage(
    tiny: Make, copy: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: OSError
) -> None:
    """Going on from an older checkpoint would set the newest aside, of which nothing is known to be wrong."""
    whole = Path.open

    def unless_newest(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path == copy / "checkpoints" / "step-00000006" / name:
            raise error
        return whole(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", unless_newest)
    with pytest.raises(CheckpointError, match=rf"cannot be loaded on this machine: .*{error.strerror}") as caught:
        run(config(tiny, copy, resume="auto"))
    assert not isinstance(caught.value, DamagedError)
    assert len(checkpoint.list_steps(copy / "checkpoints")) == 3


@pytest.mark.parametrize("resumed", ["auto", "none"])
@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), OSError(116, "Stale file handle")])
def test_checkpoints_that_cannot_be_looked_for_are_not_taken_for_none(
    tiny: Make, copy: Path, resumed: str, error: OSError
) -> None:
    """A run that then began anew would also begin its metrics anew."""
    before = (copy / METRICS).read_bytes()
    listdir, scandir = os.listdir, os.scandir

    def unless_checkpoints(list_it: Callable[..., Any]) -> Callable[..., Any]:
        def look(path: Any = ".") -> Any:
            if Path(path) == copy / "checkpoints":
                raise error
            return list_it(path)

        return look

    with (
        mock.patch("os.listdir", unless_checkpoints(listdir)),
        mock.patch("os.scandir", unless_checkpoints(scandir)),
        pytest.raises(CheckpointError, match=rf"checkpoints cannot be looked for: \w+: .*{error.strerror}"),
    ):
        run(config(tiny, copy, resume=resumed))
    assert (copy / METRICS).read_bytes() == before


def test_a_link_to_checkpoints_on_a_disk_that_is_not_there_is_not_taken_for_none(tiny: Make, copy: Path) -> None:
    before = (copy / METRICS).read_bytes()
    (copy / "checkpoints").rename(copy.parent / "disk")
    (copy / "checkpoints").symlink_to(copy.parent / "elsewhere")
    with pytest.raises(CheckpointError, match=r"checkpoints cannot be looked for: FileNotFoundError"):
        run(config(tiny, copy, resume="auto"))
    assert (copy / METRICS).read_bytes() == before
    (copy.parent / "disk").rename(copy.parent / "elsewhere")
    assert run(config(tiny, copy, resume="auto"))["step"] == 6


# --- metrics.jsonl ---


def test_what_is_readable_of_the_metrics_is_kept(tiny: Make, copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = copy / METRICS
    lines = path.read_bytes().splitlines()
    assert len(lines) == 6
    lines[0] = b"\xff" + lines[0]
    lines[1] = lines[1].replace(b'"bytes_total"', b'"bytes_tota,"')
    lines[2] = lines[2].replace(b'"step": 3', b'"step": 33')
    lines[3] = b"[" * 100_000
    path.write_bytes(b"\n".join(lines) + b"\n")
    with caplog.at_level(logging.WARNING):
        assert run(config(tiny, copy, resume="auto"), draw=True)["finished"]
    assert "4 of 6 lines are damaged and left out" in caplog.text
    assert [record["step"] for record in read_metrics(copy)] == [5, 6]
    assert (copy / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_metrics_that_a_resumed_run_writes_anew_are_on_the_disk_before_they_replace_the_old(
    tiny: Make, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power cut soon after could leave an empty file, and no record of the run so far."""
    synced: list[int] = []
    fsync, rename = os.fsync, Path.rename

    def noted(handle: int) -> None:
        synced.append(os.fstat(handle).st_ino)
        fsync(handle)

    def checked(path: Path, to: Path) -> Path:
        if Path(to).name == METRICS:
            assert path.stat().st_ino in synced
            synced.append(-1)
        return rename(path, to)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(Path, "rename", checked)
    run(config(tiny, copy, resume="auto"))
    assert -1 in synced


@pytest.mark.parametrize(
    "change",
    [
        {"step": "3"}, {"step": True}, {"step": -1}, {"step": 10**400}, {"phase": 3}, {"loss": "low"},
        {"tokens_total": None}, {"seconds": float("nan")}, {"bytes": []}, {"heldout_loss": float("inf")},
        {"bytes_total": 0.5},
    ],
    ids=str,
)  # fmt: skip
def test_a_line_of_other_types_is_no_record(copy: Path, change: dict[str, Any]) -> None:
    import json

    last = read_metrics(copy)[-1]
    (copy / METRICS).write_text(json.dumps(last) + "\n" + json.dumps(last | {"step": 7} | change) + "\n")
    assert read_metrics(copy) == [last]
