"""The examples, whole, on two ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from example_ranks import EXAMPLES, on_two_ranks

RUN = {"plain_before", "plain_after", "ddp_any_optimizer", "fsdp2", "nanogpt_style", "custom_backend", "members"}
"""Others are run by the tests of the frameworks that they are for."""


def losses(said: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", said)]


@pytest.fixture(scope="module")
def before() -> list[float]:
    return losses(on_two_ranks("plain_before.py"))


def test_one_line_is_all_that_changes(before: list[float]) -> None:
    """Adam in the warm-up; after it, compressed, it learns as well."""
    old, new = ((EXAMPLES / f"plain_{name}.py").read_text().splitlines() for name in ("before", "after"))
    added = [line for line in new[4:] if line and line not in old]
    assert [line.split("(")[0] for line in added] == ["import commopt", "optimizer = commopt.OneBitAdam"]
    after = losses(on_two_ranks("plain_after.py"))
    assert len(after) == len(before) == 4
    assert after[0] == before[0]
    assert all(abs(a - b) < 0.1 * b for a, b in zip(after, before)), after


@pytest.mark.long(but="ddp_any_optimizer")
@pytest.mark.parametrize("name", sorted(RUN - {"plain_before", "plain_after"}))
def test_an_example_learns(name: str) -> None:
    said = on_two_ranks(f"{name}.py")
    first, *_, last = losses(said)
    assert last < first / 4
    if "fewer" in said:
        assert float(re.findall(r"([\d.]+) times fewer", said)[-1]) > 7


def test_every_example_is_run() -> None:
    others = {path.stem for path in EXAMPLES.glob("*.py")} - RUN
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_door_*.py"))
    assert not [name for name in others if name not in tests]
