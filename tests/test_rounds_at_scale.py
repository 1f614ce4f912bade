"""Rounds on paper: the simulation against what can be said without it, and against what was measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import rounds_at_scale as scale  # noqa: E402
from rounds_at_scale import Run  # noqa: E402

SMALL = {"params": 5_000_000, "step": 0.25, "period": 30, "rate": 20e6, "latency": 0.1}


def run(ranks: int, **other: float) -> Run:
    return Run(ranks, **{**SMALL, **other})  # type: ignore[arg-type]


def test_a_round_takes_its_latencies_and_its_bytes() -> None:
    four = run(4)
    nbytes = 2 * 3 * (625_000 + 9766 * 4 + 8)  # of 1.25 million: half a byte each, 9766 scales, up to 16 bytes
    seconds = 4 * 0.1 + 8 * (nbytes + 3 * 64 + 3 * 16) / 20e6
    assert scale.waited_for(four, scale.INT4) == pytest.approx(7.5 / (7.5 + seconds), rel=1e-4)
    assert scale.every_step(four) == pytest.approx(0.25 / (0.25 + 0.6 + 8 * 30e6 / 20e6), rel=1e-6)


@pytest.mark.parametrize("ranks", [2, 8, 100])
def test_streamed_rounds_wait_only_where_the_link_is_full(ranks: int) -> None:
    one = run(ranks, fragments=1, delay=0)
    for ways in (scale.INT4, scale.gathered(scale.TOP_K)):
        assert scale.streamed(one, ways) == pytest.approx(scale.waited_for(one, ways), rel=1e-9)
        assert scale.waited_for(run(ranks), ways) < scale.streamed(run(ranks), ways) <= 1
    assert scale.streamed(run(ranks), scale.INT4) == 1
    full = run(ranks, rate=1e6)  # the bytes of a cycle take longer than the cycle
    busy = 8 * sum(nbytes for _, nbytes in scale.INT4(full.ranks, full.params)) / 1e6
    assert scale.streamed(full, scale.INT4) == pytest.approx(7.5 / busy, rel=0.1)


def test_what_all_ranks_gather_grows_with_them_and_two_ways_do_not() -> None:
    few, many = run(8), run(1000)
    gathered, both = scale.gathered(scale.TOP_K), scale.two_ways(scale.TOP_K)
    assert gathered(many.ranks, many.params)[0][1] == pytest.approx(999 / 7 * gathered(few.ranks, few.params)[0][1])
    # all but one rank's share, of rows that are filled up to whole blocks
    assert sum(n for _, n in both(many.ranks, many.params)) < 1.3 * sum(n for _, n in both(few.ranks, few.params))


def test_it_is_near_what_was_measured() -> None:
    (measured,) = json.loads((ROOT / "benchmarks" / "network_rounds.json").read_text())["runs"]
    seconds = {name: m["seconds_median"] for name, m in measured["methods"].items()}
    ours = Run(measured["hosts"], measured["parameters"], seconds["none"], 30, 20e6, 0.1)
    assert scale.every_step(ours) == pytest.approx(seconds["none"] / seconds["ddp"], rel=0.2)
    assert scale.waited_for(ours, scale.INT4) == pytest.approx(seconds["none"] / seconds["diloco_int4"], rel=0.25)


def test_the_page_has_what_the_script_says() -> None:
    assert scale.text() in (ROOT / "docs" / "streaming.md").read_text()
