"""Ranks that were given other configs, or other checkpoints to start from: an error on all of them, which says where
they differ, before anything is done. Paths may be others."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from trainer_pair import Pair, run, run_and_stop

from commopt.train import alike, checkpoint, prepared, started
from commopt.train.config import Config
from commopt.train.errors import DamagedError

Make = Callable[..., Config]


def run_of(configs: list[Config]) -> Any:
    """The config of each rank."""
    return run(configs[started.rank()])


@pytest.mark.parametrize(
    ("section", "here", "there"),
    [
        ("optim", {"name": "AdamW", "args": {}, "lr": 1e-3}, {"name": "AdamW", "args": {}, "lr": 0.5}),
        ("optim", {"args": {"freeze_step": 5}}, {"args": {"freeze_step": 6}}),
        ("train", {"seed": 0}, {"seed": 5}),
        ("train", {"steps": 12}, {"steps": 6}),
        ("train", {"eval_every": 4}, {"eval_every": 3}),
        ("data", {"seq_len": 16}, {"seq_len": 24}),
        ("comm", {"compress": None}, {"compress": {"name": "Int8"}}),
    ],
)
def test_another_setting_on_one_rank_ends_all_with_its_name_and_values(
    pair: Pair, tiny: Make, tmp_path: Path, section: str, here: dict[str, Any], there: dict[str, Any]
) -> None:
    common = {"name": "AdamW", "args": {}} if section == "comm" else {}
    made = [tiny(tmp_path / "run", **{"optim": common, section: given}) for given in (here, there)]
    errors = pair.errors(run_of, made)
    assert errors[0] == errors[1]
    kind, message = errors[0]
    assert kind == "ConfigError"
    changed = [key for key in there if here[key] != there[key]]
    assert [part.split(" is ")[0] for part in message.split("; ")] == [f"{section}.{key}" for key in changed]
    assert all(f"{here[key]!r} on rank 0" in message for key in changed if not isinstance(here[key], dict))
    assert message.endswith(" on rank 1: give all ranks the same config")
    assert not (tmp_path / "run").exists()


def test_all_that_differs_is_named_and_a_run_that_is_taken_up_by_one_rank_only(
    pair: Pair, tiny: Make, tmp_path: Path
) -> None:
    config = tiny(tmp_path / "run")
    other = replace(config, resume="auto", train=replace(config.train, keep=7))
    (_, message), _ = pair.errors(run_of, [config, other])
    assert message.startswith("resume is 'none' on rank 0 and 'auto' on rank 1; train.keep is ")


def test_paths_may_differ(pair: Pair, tiny: Make, tmp_path: Path) -> None:
    """The same folder under another name; and the corpus, which rank 0 alone reads."""
    (tmp_path / "mounted").symlink_to(tmp_path, target_is_directory=True)
    configs = [tiny(tmp_path / "run"), tiny(tmp_path / "mounted" / "run", data={"corpus": "/nowhere"})]
    summaries = pair.run(run_of, configs)
    assert summaries[0]["step"] == configs[0].train.steps


def test_a_run_folder_that_is_not_one_for_all_is_an_error_before_a_step(pair: Pair, tiny: Make, tmp_path: Path) -> None:
    """As with a disk of each machine's own: else it would be found out at the first checkpoint."""
    errors = pair.errors(run_elsewhere, [tiny(tmp_path / "a"), tiny(tmp_path / "b")])
    assert errors[0] == errors[1]
    kind, message = errors[0]
    assert kind == "FolderError"
    assert message.startswith(f"train.run_dir={tmp_path / 'b'} on ")
    assert message.endswith("to one folder, which machines must share (rank 1)")
    assert not (tmp_path / "a").exists()


def run_elsewhere(configs: list[Config]) -> Any:
    with mock.patch("commopt.train.lock.SEEN", 0.2):
        return run_of(configs)


def unseen(read: Callable[[Path], Any], below: Path) -> Callable[[Path], Any]:
    """``read``, for which nothing is ``below`` this folder."""

    def look(folder: Path) -> Any:
        if folder.is_relative_to(below):
            raise DamagedError(f"{folder}: no such folder")
        return read(folder)

    return look


def run_on_machines(configs: list[Config], below: Path, step: int | None = None) -> Any:
    """The config of each rank, until it is stopped after ``step``; rank 1 has nothing ``below`` this folder."""
    readers = [(checkpoint, "read_manifest"), (alike, "read_manifest"), (prepared, "read_meta")]
    with contextlib.ExitStack() as stack:
        for module, name in readers if started.rank() == 1 else []:
            stack.enter_context(mock.patch.object(module, name, unseen(getattr(module, name), below)))
        config = configs[started.rank()]
        return run(config) if step is None else run_and_stop(config, step, 0)


def test_a_run_is_taken_up_where_machines_have_its_folders_at_other_places(
    pair: Pair, tiny: Make, tmp_path: Path
) -> None:
    """By the newest checkpoint there is, and by the path that it has on each machine."""
    mounted = tmp_path / "mounted"
    mounted.symlink_to(tmp_path, target_is_directory=True)
    roots = mounted, tmp_path
    data = [{"cache_dir": str(root / "cache")} for root in roots]
    first = [tiny(root / "run", data=at) for root, at in zip(roots, data)]
    pair.run(run_on_machines, first, mounted, 3)
    assert [path.name for path in checkpoint.list_steps(tmp_path / "run/checkpoints")] == ["step-00000003"]
    for summary in pair.run(run_on_machines, [replace(config, resume="auto") for config in first], mounted):
        assert summary["finished"]
    saved = "run/checkpoints/step-00000004"
    again = [tiny(root / "again", data=at, resume=str(root / saved)) for root, at in zip(roots, data)]
    for summary in pair.run(run_on_machines, again, mounted):
        assert summary["finished"]


@pytest.mark.parametrize("option", ["init", "resume"])
def test_a_checkpoint_that_is_another_on_one_rank_ends_all(pair: Pair, tiny: Make, tmp_path: Path, option: str) -> None:
    """But not a copy of it, as on a disk of the machine's own."""
    baseline = {"name": "AdamW", "args": {}}
    pair.run(run, tiny(tmp_path / "first", optim=baseline))
    fourth, eighth = (tmp_path / f"first/checkpoints/step-{step:08d}" for step in (4, 8))

    def starting_from(*paths: Path) -> list[Config]:
        return [tiny(tmp_path / "run", optim=baseline, **{option: str(path)}) for path in paths]

    errors = pair.errors(run_of, starting_from(fourth, eighth))
    assert errors[0] == errors[1]
    kind, message = errors[0]
    assert kind == "ConfigError"
    digest = r"\(SHA-256 [0-9a-f]{8}\)"
    assert re.match(
        rf"{option} is a checkpoint of step 4 {digest} on rank 0 and of step 8 {digest} on rank 1: give all", message
    )
    copy = tmp_path / "own" / eighth.name
    shutil.copytree(eighth, copy)
    for summary in pair.run(run_of, starting_from(eighth, copy)):
        assert summary["finished"]
