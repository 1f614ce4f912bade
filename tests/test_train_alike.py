"""Ranks that were given other configs: an error on all of them, which names each setting, before anything is done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from trainer_pair import Pair, run

from commopt.train import started
from commopt.train.config import Config

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
