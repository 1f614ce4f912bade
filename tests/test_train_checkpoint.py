"""A checkpoint is whole or absent, and what is wrong with one is said by name, on every rank."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from trainer_pair import Pair

from commopt.train import checkpoint, sharded, sums
from commopt.train.errors import CheckpointError
from commopt.train.world import World, open_world

ALONE = World(0, 1, torch.device("cpu"))


def save(folder: Path, step: int, keep: int = 5) -> Path:
    return checkpoint.save(folder, step, {"step": step, "w": torch.full((50,), step)}, {"rng": step}, ALONE, keep)


def find(folder: Path, resume: str = "auto") -> Path | None:
    return checkpoint.find(folder, resume, ALONE)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = save(tmp_path, 500)
    assert path.name == "step-00000500"
    assert sorted(p.name for p in path.iterdir()) == ["manifest.json", "rank-00000.pt", "shared.pt"]
    shared, parts = checkpoint.load(path, ALONE)
    assert torch.equal(shared["w"], torch.full((50,), 500))
    assert parts == [{"rng": 500}]


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 10):
        save(tmp_path, step, keep=2)
    assert [checkpoint.step_of(path) for path in checkpoint.list_steps(tmp_path)] == [2, 10]
    assert find(tmp_path) == tmp_path / "step-00000010"
    for step in (99_999_999, 100_000_000):  # whose name is longer
        save(tmp_path, step, keep=2)
    assert [checkpoint.step_of(path) for path in checkpoint.list_steps(tmp_path)] == [99_999_999, 100_000_000]


def test_an_old_one_that_cannot_be_removed_does_not_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1)
    monkeypatch.setattr(shutil, "rmtree", mock.Mock(side_effect=OSError(39, "Directory not empty")))
    path = save(tmp_path, 2, keep=1)
    assert checkpoint.verify(path)["step"] == 2
    assert "step-00000001 is old, and cannot be removed: OSError: [Errno 39] Directory not empty" in caplog.text


def truncate(path: Path) -> None:
    file = path / "shared.pt"
    file.write_bytes(file.read_bytes()[:-100])


def flip(path: Path) -> None:
    file = path / "rank-00000.pt"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def flip_in(file: Path, text: bytes) -> None:
    """Flip a bit in the middle of ``text``."""
    data = file.read_bytes()
    changed = bytearray(text)
    changed[len(text) // 2] ^= 1
    assert text in data
    file.write_bytes(data.replace(text, bytes(changed)))


def edit_manifest(path: Path, sign: bool = True, **changes: Any) -> None:
    """Change what a manifest says; with ``sign`` also its checksum, as another program might."""
    file = path / "manifest.json"
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps(content | ({"sha256": sums.of_content(content)} if sign else {})))


DAMAGES: list[tuple[str, Callable[[Path], None], str]] = [
    ("truncated", truncate, r"shared.pt has \d+ bytes, expected \d+: it is truncated"),
    ("flipped bit", flip, "the content of rank-00000.pt has changed"),
    ("file missing", lambda path: (path / "rank-00000.pt").unlink(), "rank-00000.pt is missing"),
    ("no manifest", lambda path: (path / "manifest.json").unlink(), "no manifest.json in it: this is no commopt"),
    ("manifest cut", lambda path: (path / "manifest.json").write_text('{"format": "comm'), "manifest.json is damaged"),
    ("foreign format", lambda path: edit_manifest(path, format="other"), r"format is \('other', 2\), expected"),
    ("later version", lambda path: edit_manifest(path, version=3), r"\('commopt-checkpoint', 3\), expected"),
    ("older version", lambda path: edit_manifest(path, version=1), r"\('commopt-checkpoint', 1\), expected"),
    ("more ranks than files", lambda path: edit_manifest(path, world_size=2), "rank-00001.pt is not in it"),
    ("no ranks", lambda path: edit_manifest(path, world_size=0), "world_size=0, expected >= 1"),
    ("ranks are no number", lambda path: edit_manifest(path, world_size=True), "world_size=True, expected >= 1"),
    ("another step", lambda path: edit_manifest(path, step=70), "step=70 in the folder of step 2"),
    ("files are no mapping", lambda path: edit_manifest(path, files=["shared.pt"]), "expected names and entries"),
    ("an entry is none", lambda path: edit_manifest(path, files={"shared.pt": 3}), "its entry of shared.pt is 3"),
    ("a changed digit", lambda path: edit_manifest(path, sign=False, step=9), "its checksum differs"),
    ("a changed name", lambda path: flip_in(path / "manifest.json", b'"step"'), "its keys are"),
    ("no mapping", lambda path: (path / "manifest.json").write_text("[1]"), "manifest.json is damaged"),
    ("deep", lambda path: (path / "manifest.json").write_text("[" * 100_000), "manifest.json is damaged"),
    ("not UTF-8", lambda path: (path / "manifest.json").write_bytes(b'{"format": "\xff"}'), "manifest.json is damaged"),
    ("a file in its place", lambda path: (shutil.rmtree(path), path.write_text("")), "no such folder"),
]


@pytest.mark.parametrize(("damage", "message"), [case[1:] for case in DAMAGES], ids=[case[0] for case in DAMAGES])
def test_damage_is_named_and_auto_takes_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None], message: str
) -> None:
    good, bad = save(tmp_path, 1), save(tmp_path, 2)
    damage(bad)
    with pytest.raises(CheckpointError, match=message):
        find(tmp_path, str(bad))
    with caplog.at_level(logging.ERROR):
        assert find(tmp_path) == good
    assert "step-00000002" in caplog.text
    damage(good)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is good"):
        find(tmp_path)


def test_nothing_to_find(tmp_path: Path) -> None:
    assert find(tmp_path) is None
    assert find(tmp_path / "nowhere") is None
    with pytest.raises(CheckpointError, match="no such folder"):
        find(tmp_path, str(tmp_path / "nowhere"))


@pytest.mark.parametrize("given", [".", "checkpoints"])
def test_the_folder_of_a_run_is_no_checkpoint_and_the_error_names_the_newest_in_it(tmp_path: Path, given: str) -> None:
    save(tmp_path / "checkpoints", 1)
    newest = save(tmp_path / "checkpoints", 2)
    with pytest.raises(CheckpointError, match=rf"is the folder of a run; resume must be .*, such as {newest}$"):
        find(tmp_path / "checkpoints", str(tmp_path / given))


def test_a_kill_while_writing_leaves_the_last_good_one(tmp_path: Path) -> None:
    """A kill is a BaseException here: nothing that handles errors may see it. The next save clears what it left."""
    good = save(tmp_path, 1)

    def write_half(path: Path, content: Any) -> Any:
        path.write_bytes(b"half")
        if path.name == "shared.pt":
            raise SystemExit
        return {"size": 4, "sha256": ""}

    with mock.patch.object(checkpoint, "_write", write_half), pytest.raises(SystemExit):
        save(tmp_path, 2)
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".tmp-")] == [".tmp-step-00000002"]
    assert find(tmp_path) == good
    save(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def test_a_full_disk_is_one_clear_error(tmp_path: Path) -> None:
    good = save(tmp_path, 1)
    with (
        mock.patch.object(torch, "save", side_effect=OSError(28, "No space left on device")),
        pytest.raises(CheckpointError, match=r"cannot write checkpoint .*step-00000002: .*No space left on device"),
    ):
        save(tmp_path, 2, keep=1)
    assert list(tmp_path.iterdir()) == [good]


def test_torch_does_not_hide_that_the_disk_is_full(tmp_path: Path) -> None:
    """When a write in the middle fails, torch ends the archive all the same, and speaks of unexpected positions."""

    class Filling(io.BytesIO):
        def write(self, data: Any) -> int:
            if self.tell() > 90_000:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data)

    with (
        mock.patch.object(Path, "open", return_value=Filling()),
        pytest.raises(OSError, match="No space left on device"),
    ):
        checkpoint._write(tmp_path / "x", {str(i): torch.zeros(3000) for i in range(20)})
    with pytest.raises(OSError, match="No space left on device"):
        checkpoint._write(Path("/dev/full"), {"w": torch.zeros(300_000)})
    with (
        pytest.raises(OSError, match="No space left on device"),
        sharded._Files().create_stream(Path("/dev/full"), "wb") as stream,
    ):
        torch.save({"w": torch.zeros(300_000)}, stream)
    good = save(tmp_path, 1)
    write = checkpoint._write

    def to_a_full_disk(path: Path, content: Any) -> Any:
        return write(Path("/dev/full"), {"w": torch.zeros(300_000)})

    with (
        mock.patch.object(checkpoint, "_write", to_a_full_disk),
        pytest.raises(CheckpointError, match=r"cannot write checkpoint .*step-00000002: the disk is full: .*No space"),
    ):
        save(tmp_path, 2, keep=1)
    assert list(tmp_path.iterdir()) == [good]


def save_with_a_fault(folder: Path, rank: int) -> None:
    """Both ranks save; the disk of one is full."""
    with open_world() as world:
        checkpoint.save(folder, 1, {"a": 1}, {"b": world.rank}, world, 3)
        full = OSError(28, "No space left on device")
        with mock.patch.object(torch, "save", side_effect=full if world.rank == rank else None, wraps=torch.save):
            checkpoint.save(folder, 2, {"a": 1}, {"b": world.rank}, world, 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_if_one_rank_cannot_write_nobody_renames(pair: Pair, tmp_path: Path, rank: int) -> None:
    for kind, message in pair.errors(save_with_a_fault, tmp_path, rank):
        assert kind == "CheckpointError"
        assert "No space left on device" in message
        assert f"(rank {rank})" in message
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    assert sorted(p.name for p in (tmp_path / "step-00000001").glob("rank-*")) == ["rank-00000.pt", "rank-00001.pt"]


def find_on_both(folder: Path) -> None:
    with open_world() as world:
        checkpoint.find(folder, "auto", world)


def test_damage_is_raised_on_every_rank(pair: Pair, tmp_path: Path) -> None:
    truncate(save(tmp_path, 1))
    errors = pair.errors(find_on_both, tmp_path)
    assert [kind for kind, _ in errors] == ["CheckpointError"] * 2
    assert all("no checkpoint in" in message for _, message in errors)


class Code:
    """Runs when it is unpickled by the ordinary loader."""

    def __reduce__(self) -> Any:
        return (Path.touch, (Path("/tmp/commopt-was-here"),))


def test_loading_runs_no_code(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    file = path / "rank-00000.pt"
    for content in (pickle.dumps(Code(), protocol=2), None):
        if content is None:
            torch.save({"a": Code()}, file)
        else:
            file.write_bytes(content)
        entry = {"size": file.stat().st_size, "sha256": sums.of_file(file)}
        files = json.loads((path / "manifest.json").read_text())["files"]
        edit_manifest(path, files=files | {file.name: entry})
        checkpoint.verify(path)
        with pytest.raises(CheckpointError, match=r"cannot read rank-00000.pt"):
            checkpoint.load(path, ALONE)
    assert not Path("/tmp/commopt-was-here").exists()


def test_of_another_model() -> None:
    saved = {"optimizer": "A", "corpus": "c", "model": [["x", [2]], ["y", [3]]]}
    checkpoint.check_fits(saved, saved, Path("p"))
    for model, message in (
        ([["x", [2]], ["y", [4]]], r"it has y \(3,\) where this one has y \(4,\)"),
        ([["x", [2]]], r"2 parameters against 1 here, the first that only one of them has is y \(3,\)"),
        ([["x", [2]], ["y", [3]], ["z", [5]]], r"the first that only one of them has is z \(5,\)"),
    ):
        with pytest.raises(CheckpointError, match=message):
            checkpoint.check_fits(saved, saved | {"model": model}, Path("p"))


def test_later_checkpoints_are_set_aside(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    checkpoint.set_aside_newer(tmp_path, 1)
    assert checkpoint.list_steps(tmp_path) == [tmp_path / "step-00000001"]
    assert (tmp_path / "discarded-step-00000003" / "manifest.json").exists()
    again = save(tmp_path, 3)  # and once more: there is a discarded one by that name
    content = (again / "manifest.json").read_text()
    (tmp_path / "discarded-step-00000003" / "manifest.json").write_text("old")
    checkpoint.set_aside_newer(tmp_path, 1)
    assert not again.exists()
    assert (tmp_path / "discarded-step-00000003" / "manifest.json").read_text() == content


def test_what_is_set_aside_is_kept_until_the_next_time(tmp_path: Path) -> None:
    """However often a run goes back, no more lies there than once was; and nothing of others' goes."""

    def aside() -> list[str]:
        return sorted(path.name.removeprefix("discarded-") for path in tmp_path.glob("discarded-*"))

    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / "discarded-step-mine").mkdir()
    checkpoint.set_aside_newer(tmp_path, 1)
    assert aside() == ["step-00000002", "step-00000003", "step-mine"]
    checkpoint.set_aside_newer(tmp_path, 1)  # there is nothing later: as it is
    assert aside() == ["step-00000002", "step-00000003", "step-mine"]
    save(tmp_path, 3)
    save(tmp_path, 4)
    checkpoint.set_aside_newer(tmp_path, 1)
    assert aside() == ["step-00000003", "step-00000004", "step-mine"]
    assert checkpoint.list_steps(tmp_path) == [tmp_path / "step-00000001"]
    save(tmp_path, 5)
    checkpoint.set_aside_newer(tmp_path, 3)  # taken up from what was set aside, which is all there is of it
    assert aside() == ["step-00000003", "step-00000005", "step-mine"]


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name_and_that_before_an_older_one_goes(tmp_path, monkeypatch):
    """What a power cut needs: files, their folder's entries, the name, and only then is the older one removed."""

    alone = World(0, 1, torch.device("cpu"))

    def save(step):
        return checkpoint.save(tmp_path, step, {"step": step, "w": torch.zeros(50)}, {"rng": step}, alone, 1)

    old, happened = save(1), []
    fsync, rename, remove = os.fsync, Path.rename, checkpoint._remove

    def noted(handle):
        happened.append(os.fstat(handle).st_ino)
        return fsync(handle)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(Path, "rename", lambda path, to: (happened.append("named"), rename(path, to))[1])
    monkeypatch.setattr(checkpoint, "_remove", lambda path: (happened.append(path.name), remove(path))[1])
    path = save(2)
    named = happened.index("named")
    for one in (*path.iterdir(), path):
        assert one.stat().st_ino in happened[:named], f"{one.name} may be lost in a power cut"
    assert happened[named + 1 :] == [tmp_path.stat().st_ino, old.name]
