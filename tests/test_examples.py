"""The examples, whole, on two ranks."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from forks import python
from ports import free_port

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
RUN = {"plain_before", "plain_after", "ddp_any_optimizer", "fsdp2", "nanogpt_style", "custom_backend"}
"""Others are run by the tests of the frameworks that they are for."""


def run(name: str) -> str:
    """What rank 0 of two prints; an error if one fails."""
    port = str(free_port())
    ranks = []
    for rank in range(2):
        env = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [python(), str(EXAMPLES / f"{name}.py")]
        ranks.append(subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    out = [rank.communicate(timeout=200) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], out
    return out[0][0]


def losses(said: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", said)]


@pytest.fixture(scope="module")
def before() -> list[float]:
    return losses(run("plain_before"))


def test_one_line_is_all_that_changes(before: list[float]) -> None:
    """Warm-up is Adam; after it, compressed, the loss is no worse than that of another seed."""
    old, new = ((EXAMPLES / f"plain_{name}.py").read_text().splitlines() for name in ("before", "after"))
    added = [line for line in new[4:] if line and line not in old]
    assert [line.split("(")[0] for line in added] == ["import commopt", "optimizer = commopt.OneBitAdam"]
    after = losses(run("plain_after"))
    assert len(after) == len(before) == 4
    assert after[:3] == before[:3]
    assert abs(after[3] - before[3]) < 0.1 * before[3]


@pytest.mark.parametrize("name", sorted(RUN - {"plain_before", "plain_after"}))
def test_an_example_learns(name: str) -> None:
    said = run(name)
    first, *_, last = losses(said)
    assert last < first / 4
    if "fewer" in said:
        assert float(re.findall(r"([\d.]+) times fewer", said)[-1]) > 7


def test_every_example_is_run() -> None:
    others = {path.stem for path in EXAMPLES.glob("*.py")} - RUN
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_door_*.py"))
    assert not [name for name in others if name not in tests]
