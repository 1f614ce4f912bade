"""The probe: fits, predictions and their limits, mistakes, and a real run of two processes."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forks import python
from probing import Alone, on_ranks

import commopt
from commopt.agreement.decision import AGREEMENT_BYTES
from commopt.cli import main
from commopt.comm import ThreadBackend, ThreadWorld
from commopt.compress import Sign
from commopt.probe.advice import cannot_tell, recommend
from commopt.probe.clock import Clock, Costs
from commopt.probe.command import check_place
from commopt.probe.compressors import COMPRESSORS
from commopt.probe.cut import WAYS, predict_cut
from commopt.probe.figures import count, figure, rate, seconds
from commopt.probe.fit import Line, fit_line, line_through, misfit
from commopt.probe.inside import rows
from commopt.probe.measure import FACTOR, LONGEST, Sample, Stand, columns, exchanges, gap, losses
from commopt.probe.model import Model, adamw_seconds, split
from commopt.probe.options import ProbeError, parse, parse_count
from commopt.probe.predict import (
    FASTEST,
    METHODS,
    SLOWEST,
    at_bandwidth,
    bandwidth_at,
    break_even,
    break_evens,
    plain,
    predict,
    whole_run,
)
from commopt.probe.report import cells, off_the_line
from commopt.probe.sgd import PERIOD, sgd

COLLECTIVES = ("all_reduce", "all_reduce_bf16", "all_to_all", "all_gather", "exchange")
NOTHING = Line(0.0, 0.0)
MODEL = Model(params=100_000_000, step_time=0.5, last_params=0, bucket_bytes=25 * 2**20, compressor=Sign())


def costs(link: Line = NOTHING, loss: Line = NOTHING, world_size: int = 2, copies: float = 0.0) -> Costs:
    """Every verb over the same link. AdamW takes 0.1 s for ``MODEL``, and so do all other optimizers."""
    return Costs(
        world_size=world_size,
        link=dict.fromkeys(COLLECTIVES, link),
        loss=dict.fromkeys(COLLECTIVES, loss),
        adamw=1e-9,
        copies={"all_reduce": copies, "all_reduce_bf16": 2 * copies},
        onebit={"agreement": 1e-10, "all_to_all": 3e-10, "all_gather": 2e-10, "end": 4e-10},
        sgd={
            "cser": {"agreement": 0.0, "all_reduce": 6e-10, "end": 4e-10},
            "cser_reset": {"agreement": 0.0, "all_reduce": 6e-10, "end": 4e-10},
            "qsparse_reset": {"agreement": 0.0, "all_reduce": 6e-10, "end": 4e-10},
            "qsparse": {"agreement": 1e-10, "end": 9e-10},
        },
    )


def ethernet(gbit: float) -> Line:
    return Line(1e-4, 8e-9 / gbit)


# fit ------------------------------------------------------------------------------------------------------------------

SIZES = [4096 * 4**i for i in range(8)]


@pytest.mark.parametrize("latency", [0.0, 2e-5, 1e-3])
@pytest.mark.parametrize("gbit", [0.1, 1, 100])
def test_a_line_is_found_again(latency: float, gbit: float) -> None:
    line = Line(latency, 8e-9 / gbit)
    found = fit_line(SIZES, [line(n) for n in SIZES])
    assert found.latency == pytest.approx(latency, rel=1e-6, abs=1e-12)
    assert found.bits_per_second == pytest.approx(gbit * 1e9, rel=1e-6)
    assert misfit(found, SIZES, [line(n) for n in SIZES]) < 1e-6


def test_noise_and_an_outlier_move_a_line_little() -> None:
    line, draw = ethernet(1), np.random.default_rng(0)
    times = [line(n) * draw.uniform(0.95, 1.05) for n in SIZES]
    times[3] *= 10
    found = fit_line(SIZES, times)
    assert found.latency == pytest.approx(line.latency, rel=0.1)
    assert found.bits_per_second == pytest.approx(1e9, rel=0.1)
    assert 0.005 < misfit(found, SIZES, times) < 0.05


def test_lines_never_go_below_zero() -> None:
    falling = fit_line([1000, 2000, 4000], [3e-4, 2e-4, 1e-4])
    assert falling.per_byte == 0
    assert 1e-4 < falling.latency < 3e-4
    assert falling.bits_per_second == math.inf
    steep = fit_line([1000, 2000, 4000], [1e-4, 4e-4, 16e-4])
    assert steep.latency == 0
    assert steep.per_byte > 1e-7


def test_a_largest_message_that_is_far_off_its_line_is_told() -> None:
    """As an all-reduce of three ranks was at 100 Mbit/s and a loss of 1 %, on a busy machine: an outlier moves the line
    little, also if it is the largest."""
    took = [8.29e-3, 25.2e-3, 15.5e-3, 353e-3]
    lossy = [Sample(n, 4 * n // 3, t) for n, t in zip((4096, 16384, 65536, 262144), took)]
    link = {"all_reduce": fit_line(*columns(lossy)), "exchange": Line(1e-3, 8 / 1e8)}
    even = [Sample(n, n, 1.2 * link["exchange"](n)) for n in SIZES]
    (note,) = off_the_line(link, {"all_reduce": lossy, "exchange": even})
    assert note.startswith("note: all-reduce, float32: 256 KB, the largest message, took 8.8 times")
    even[-1] = replace(even[-1], seconds=even[-1].seconds / 2)
    assert "to the next rank, float32: " in off_the_line(link, {"all_reduce": lossy, "exchange": even})[1]


def test_a_line_through_two_points() -> None:
    assert line_through((10, 3.0), (20, 5.0)) == Line(1.0, 0.2)
    assert line_through((10, 3.0), (20, 1.0)) == Line(3.0, 0.0)
    assert line_through((10, 1.0), (20, 3.0)) == Line(0.0, 0.2)
    assert line_through((10, 1.0), (10, 3.0)) == Line(1.0, 0.0)


# the clock and the buckets --------------------------------------------------------------------------------------------


def test_messages_follow_each_other_and_slow_computing_down() -> None:
    clock = Clock(costs(link=Line(1.0, 0.0), loss=Line(0.25, 0.0)))
    first, second = (clock.send("all_reduce", 5) for _ in range(2))
    assert (first, second) == (1.0, 2.0)
    clock.compute(0.75)  # just what fits beside the first
    assert clock.now == pytest.approx(1.0)
    clock.compute(1.0)  # 0.75 beside the second, the rest alone
    assert clock.now == pytest.approx(2.25)
    clock.wait(1.5)
    assert clock.now == pytest.approx(2.25)
    assert clock.step().communication == pytest.approx(0.5)
    assert clock.step().nbytes == 10


def test_a_message_that_takes_the_whole_device_leaves_nothing() -> None:
    clock = Clock(costs(link=Line(1.0, 0.0), loss=Line(3.0, 0.0)))
    clock.send("all_reduce", 5)
    clock.compute(0.5)
    assert clock.now == pytest.approx(1.5)


def test_a_message_leaves_before_the_one_before_it_has_arrived() -> None:
    clock = Clock(replace(costs(link=Line(1.0, 0.0), loss=Line(0.125, 0.0)), busy={"all_reduce": Line(0.25, 0.0)}))
    assert [clock.send("all_reduce", 5) for _ in range(2)] == [1.0, 1.25]
    clock.compute(0.25)  # half as fast, for as long as the link is busy
    assert clock.now == pytest.approx(0.5)
    clock.compute(0.25)  # nobody sends any more
    assert clock.now == pytest.approx(0.75)
    assert clock.step().wire == pytest.approx(0.5)
    assert clock.send("all_gather", 5) == pytest.approx(1.75)  # of this nothing else was measured


def test_of_a_message_that_is_sent_now_and_then_so_much_is_counted() -> None:
    clock = Clock(costs(link=Line(1.0, 0.5)))
    assert clock.send("all_reduce", 1, chance=0.25) == pytest.approx(0.25 + 0.5)
    assert clock.step().nbytes == 1


class Simulated(Alone):
    """A stand on a link in simulated time: a message of ``n`` bytes keeps the next one waiting for 0.01 s and 1 ns a
    byte, and arrives 0.1 s and 2 ns a byte after it has left."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(2)
        self.now = self.free = 0.0
        monkeypatch.setattr("commopt.probe.measure.time.perf_counter", lambda: self.now)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def channels(self, place: int) -> tuple[Any, Any]:
        return self, self

    def all_to_all(self, out: torch.Tensor, inp: torch.Tensor) -> Any:
        left = max(self.now, self.free)
        self.free = left + 0.01 + 1e-9 * inp[0].nbytes
        return Arriving(self, left + 0.1 + 2e-9 * inp[0].nbytes)

    def time(self, do: Any) -> float:
        self.now = self.free = self.now + 1.0
        return self.seconds(do)


class Arriving:
    """A message that is there at some time."""

    def __init__(self, stand: Simulated, at: float) -> None:
        self.stand, self.at = stand, at

    def wait(self, timeout: Any = None) -> None:
        self.stand.now = max(self.stand.now, self.at)

    def is_completed(self) -> bool:
        return self.stand.now >= self.at


def test_a_link_is_measured_alone_and_with_many_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Simulated(monkeypatch)
    sizes = [2**10, 2**14, 2**18, 2**22]
    one, several = (fit_line(*columns(exchanges(stand, "all_to_all", sizes, count))) for count in (1, 8))
    assert (one.latency, one.per_byte) == (pytest.approx(0.1), pytest.approx(2e-9))
    assert several.latency == pytest.approx((0.1 + 7 * 0.01) / 8)
    busy = gap(one, several)
    assert (busy.latency, busy.per_byte) == (pytest.approx(0.01), pytest.approx(1e-9))
    assert gap(Line(1.0, 0.0), Line(0.1, 1.0), 2) == Line(0.0, 0.0)  # no message takes less than nothing,
    assert gap(Line(1.0, 1.0), Line(3.0, 3.0), 2) == Line(1.0, 1.0)  # or longer than it takes alone


def test_what_others_take_of_the_cores_is_not_lost_to_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three matrix products one is interrupted: what a message takes is more than so many of the usual ones."""
    stand, takes = Simulated(monkeypatch), itertools.cycle([0.001, 0.001, 0.004])

    def product(*_: Any, **__: Any) -> None:
        stand.now += next(takes)

    monkeypatch.setattr("commopt.probe.measure.torch.mm", product)
    for lost in losses(stand, "all_to_all", [Sample(2**10, 2**9, 0.1), Sample(2**12, 2**11, 0.1)]):
        assert lost.seconds < 0.003  # of 0.11 s for two


def test_over_a_long_way_messages_are_timed_in_which_bytes_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """TCP sends 14 kB, and twice as much a round trip later: the first sizes take as long as each other, or a round
    trip more, which tells nothing of the bandwidth."""
    stand = Simulated(monkeypatch)
    stand.time = lambda do: do()  # type: ignore[method-assign]

    def timed(latency: float, per_byte: float) -> list[Sample]:
        def seconds(size: int) -> float:
            took, window = 2 * latency + 1e-3, 14_000
            while window < size and window * per_byte < 2 * latency:
                took, size, window = took + 2 * latency, size - window, 2 * window
            return took + size * per_byte

        return stand.sweep(SIZES, lambda size: (size, lambda: seconds(size)))

    for latency, mbit in [(0.2, 2), (0.1, 100), (0.1, 10), (0.05, 10), (0.05, 100), (0.025, 100)]:
        samples = timed(latency, 8e-6 / mbit)
        assert mbit / 2 < fit_line(*columns(samples)).bits_per_second / 1e6 < mbit, (latency, mbit)
        assert samples[-1].seconds < LONGEST[1]
    for mbit in (2, 10, 100):  # without a long way none takes longer than it may
        samples = timed(0.0, 8e-6 / mbit)
        assert len(samples) > 2
        assert LONGEST[0] / FACTOR**2 <= samples[-1].seconds <= LONGEST[0]


@pytest.mark.parametrize(("meeting", "times"), [(0.0, 20), (0.1, 4), (0.8, 3)])
def test_ranks_that_meet_slowly_repeat_less(meeting: float, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what takes no time on the device takes as long as 20 meetings."""
    stand, did = Simulated(monkeypatch), []

    def largest(values: Any) -> list[float]:
        stand.now += meeting
        return list(values)

    def do() -> None:
        did.append(0)
        stand.now += 0.01

    monkeypatch.setattr(stand, "largest", largest)
    assert Stand.time(stand, do) == pytest.approx(0.01)
    assert len(did) == 2 + times
    did.clear()
    assert Stand.time(stand, lambda: (do(), stand.sleep(2.0))) == pytest.approx(2.01)
    assert len(did) == 2


def test_what_goes_alone_takes_its_latency_however_many_could_be_under_way() -> None:
    """Ranks that agree, and confirm what has come, wait for nothing else meanwhile; nor do FSDP2's exchanges."""
    link, busy = Line(0.25, 0.0), dict.fromkeys(COLLECTIVES, Line(1e-3, 0.0))
    there = replace(costs(link), busy=busy)
    steps = predict(there, replace(MODEL, params=10_000, step_time=0.0))
    assert steps["onebit_adam"].communication == pytest.approx(4 * 0.25, rel=0.02)
    assert sgd(there, replace(MODEL, step_time=0.5), "qsparse").communication == pytest.approx(2 * 0.25)
    layer = ((64, 64),)
    step = predict_cut(there, {"fsdp_all_gather": NOTHING}, MODEL, [layer, layer], WAYS["fsdp_int8"], {})
    assert step.communication == pytest.approx(3 * 0.25)  # two means, and whether all are finite
    many = predict(there, MODEL)["onebit_adam"]  # 16 buckets
    assert many.communication == pytest.approx(4 * 0.25, rel=0.05)


def test_blocks_of_small_buckets_are_sent_now_and_then() -> None:
    """Of a bucket of 2 blocks, of which 1 of 64 is kept, in one step of 32; at a reset, 1 of 4 in one of 2."""
    timed = replace(costs(Line(0.25, 0.0)), sgd={kind: {"agreement": 0.0, "end": 0.0} for kind in costs().sgd})
    step = predict(timed, replace(MODEL, params=512, step_time=0.0, bucket_bytes=2**20))["cser"]
    assert step.seconds == pytest.approx(0.25 * (2 + 1 / 32 + 1 / 16 * 1 / 2))


def test_buckets() -> None:
    assert split(100, 0, 4, 40) == (1, *[10] * 9, 9)
    assert split(100, 30, 80) == (20, 20, 20, 10, 30)
    assert split(100, 5, 80) == (20, 20, 20, 20, 20)
    assert split(100, 100, 80) == (100,)
    assert split(3, 0, 80) == (3,)
    for last in (0, 1, 999, 1_000_000):
        assert sum(split(10**6, last, 2**20, 2**22)) == 10**6


# limits of the predictions --------------------------------------------------------------------------------------------


def test_without_a_network_every_method_costs_what_none_costs() -> None:
    for name, step in predict(costs(), MODEL).items():
        assert step.seconds == pytest.approx(0.5), name
        assert step.communication == pytest.approx(0.0, abs=1e-12), name
    assert recommend(predict(costs(), MODEL), True).startswith("do not compress: communication is 0% of a step of DDP")


def test_nothing_is_recommended_where_all_messages_were_too_small_to_tell() -> None:
    known, unknown = Line(1e-3, 1e-9), Line(1e-3, 0.0)
    assert cannot_tell({"all_reduce": known, "all_to_all": known}, 1e4, 1e6) is None
    assert cannot_tell({"all_reduce": unknown}, 1e6, 1e6) is None  # what is sent at once was timed
    assert cannot_tell({"all_reduce": known, "all_to_all": unknown}, 2**16, 3 * 2**20) == (
        "none: messages of up to 0.066 MB were too small to tell the bandwidth of all-to-all, and this model sends "
        "3.1 MB at once; run it again with --max-mb=4"
    )
    assert str(cannot_tell({"all_reduce": unknown}, 2**28, 2**32)).endswith("at once; run it again with --max-mb=1024")
    assert str(cannot_tell({"all_reduce": unknown}, 2**30, 2**32)).endswith("this model sends 4300 MB at once")


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (810.4, 2, "810"), (8.14, 2, "8.1"), (0.0656, 2, "0.066"), (99.7, 2, "100"), (281_234.5, 4, "281200"),
        (12_900.4, 3, "12900"), (12.5, 4, "12.5"), (3.2e-05, 4, "0.000032"), (-1.4e-17, 4, "0"), (-0.25, 4, "-0.25"),
        (0.0, 3, "0"), (7, 3, "7"),
    ],
)  # fmt: skip
def test_figures_have_no_exponent(value: float, digits: int, text: str) -> None:
    assert figure(value, digits) == text


def test_tables_have_four_digits_of_a_tenth_of_a_millisecond_and_three_of_tens_of_microseconds() -> None:
    assert cells(10, 4.123e-4, 4.126e-5, 30.6214) == " 0.0004123 0.0000413     30.62"


def test_units_of_figures() -> None:
    assert [seconds(value) for value in (1234.5, 1.0, 0.9996, 2e-9)] == ["1230 s", "1 s", "1000 ms", "0.000002 ms"]
    assert [rate(value) for value in (1e13, 2.5e6, 999.9e3)] == ["10000 Gbit/s", "2.5 Mbit/s", "1000 kbit/s"]
    assert [count(n) for n in (70_000_000_000, 99_999_900, 999)] == ["70B", "100M", "999"]


def test_on_a_slow_link_only_bytes_count() -> None:
    slow = costs(ethernet(1e-4))
    steps = predict(slow, MODEL)
    fp32, ours = steps["ddp"], steps["onebit_adam"]
    assert fp32.nbytes == 4 * MODEL.params
    assert fp32.nbytes / ours.nbytes == pytest.approx(32 / (1 + 32 / 2048), rel=1e-3)
    assert fp32.seconds / ours.seconds == pytest.approx(fp32.nbytes / ours.nbytes, rel=0.02)
    assert fp32.seconds / steps["ddp_bf16"].seconds == pytest.approx(2, rel=0.01)
    assert recommend(steps, True).startswith("use ZeroOneAdam(variance=VariancePolicy(stop=steps // 5)): on average")
    assert recommend(steps | {"zero_one_adam": fp32}, True).startswith("use OneBitAdam: a compressed step takes")


def test_a_compressed_step_is_four_messages_one_after_another_and_has_the_bytes_of_the_optimizer() -> None:
    """Agreement, chunks to their ranks, means back, confirmation."""
    n = 4096
    model = replace(MODEL, params=n, step_time=0.0)
    step = predict(costs(Line(0.25, 0.0)), model)["onebit_adam"]
    assert step.communication == pytest.approx(4 * 0.25)

    def sent(backend: ThreadBackend) -> int:
        p = torch.nn.Parameter(torch.ones(n))
        optimizer = commopt.OneBitAdam([p], freeze_step=1, guard=commopt.Guard(check_every=None), backend=backend)
        for _ in range(3):
            p.grad = torch.ones(n)
            optimizer.step()
        return int(optimizer.comm_stats()["step"]["bytes"])

    assert ThreadWorld(2).run(sent) == [step.nbytes] * 2


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("name", "kind"), [("cser", commopt.CSER), ("qsparse", commopt.QSparseLocalSGD)])
def test_the_relatives_of_sgd_send_what_the_probe_says_as_they_come(name: str, kind: Any, ranks: int) -> None:
    """Over a period, of a bucket whose blocks can be shared out evenly."""
    n = 2 * 64 * 256 * 3  # an all-reduce of 3 ranks, too

    def sent(backend: ThreadBackend) -> list[int]:
        p = torch.nn.Parameter(torch.zeros(n))
        optimizer = kind([p], momentum=0.9, guard=commopt.Guard(check_every=None), backend=backend)
        out = []
        for _ in range(PERIOD + 1):
            p.grad = torch.randn(n)
            optimizer.step()
            out.append(int(optimizer.comm_stats()["step"]["bytes"]))
        return out[1:]  # the ranks meet in the first

    step = predict(costs(Line(0.0, 1.0), world_size=ranks), replace(MODEL, params=n, step_time=0.0))[name]
    for found in ThreadWorld(ranks).run(sent):
        assert sum(found) // PERIOD == step.nbytes
        assert sorted(found)[-2] == found[0] < max(found)  # one reset in PERIOD steps


def test_sgd_that_averages_blocks_waits_for_its_messages_and_takes_no_adamw() -> None:
    model = replace(MODEL, bucket_bytes=4 * MODEL.params)
    at_once = {kind: {**per, "all_reduce": 0.0} for kind, per in costs().sgd.items()}
    steps = predict(replace(costs(Line(0.25, 0.0)), sgd=at_once), model)
    between, reset = 3 * 0.25, 4 * 0.25  # agreement, blocks of C2, those of C1, confirmation
    assert steps["cser"].communication == pytest.approx((15 * between + reset) / 16)
    assert steps["qsparse"].communication == pytest.approx((15 * 2 + 3) / 16 * 0.25)
    slower = replace(costs(), adamw=2e-9)
    assert predict(slower, MODEL)["cser"].seconds == pytest.approx(0.5 - 0.1)
    assert "SGD by QSparseLocalSGD" in recommend(predict(costs(ethernet(1e-3)), MODEL), True)


@pytest.mark.parametrize("name", ["onebit_adam", "qsparse"])
def test_the_ranks_of_all_parts_agree_and_confirm(name: str) -> None:
    """The costs are those of 2 replicas; with 4 parts each there are 8 ranks."""
    whole, cut = (predict(costs(), replace(MODEL, shard=shard))[name] for shard in (1, 4))
    assert cut.nbytes - whole.nbytes == (7 - 1) * AGREEMENT_BYTES


def test_of_a_model_that_is_too_small_for_a_block_nothing_is_sent() -> None:
    """Then no step that was timed had an all-reduce."""
    none = {kind: {"agreement": 1e-9, "end": 1e-9} for kind in costs().sgd}
    step = predict(replace(costs(), sgd=none), replace(MODEL, params=10))["cser"]
    assert step.nbytes == 2 * 4 // 16 + AGREEMENT_BYTES  # an all-reduce of 2 of 10 elements at a reset


@pytest.mark.parametrize("gbit", [0.1, 1, 10, 100])
@pytest.mark.parametrize("loss", [NOTHING, Line(1e-5, 1e-10)])
def test_order_of_the_methods(gbit: float, loss: Line) -> None:
    steps = predict(costs(ethernet(gbit), loss), MODEL)
    floor = steps["none"].seconds
    assert all(step.seconds >= floor - 1e-9 for step in steps.values())
    assert steps["onebit_adam_overlap"].seconds <= steps["onebit_adam"].seconds + 1e-9
    assert steps["ddp_bf16"].seconds <= steps["ddp"].seconds
    wire = 8 * steps["ddp"].nbytes / (gbit * 1e9)
    assert max(floor, wire) <= steps["ddp"].seconds <= 1.5 * floor + 1.1 * wire


def test_backward_hides_what_it_can_and_the_last_bucket_is_exposed() -> None:
    fast = costs(ethernet(20))
    whole = replace(MODEL, params=(1 + 15 * 25) * 2**18)  # DDP's buckets are full: of 1 MB, and 15 of 25 MB
    steps = predict(fast, whole)
    assert steps["ddp"].communication == pytest.approx(8 * 25 * 2**20 / 20e9 + 1e-4, rel=1e-3)
    tied = predict(fast, replace(MODEL, last_params=40_000_000))
    assert tied["ddp"].communication == pytest.approx(8 * 4 * 40e6 / 20e9, rel=0.01)


def test_losses_make_hidden_communication_cost_something() -> None:
    free, paid = (predict(costs(ethernet(20), loss), MODEL)["ddp"] for loss in (NOTHING, Line(0.0, 1e-10)))
    assert paid.seconds - free.seconds == pytest.approx(1e-10 * free.nbytes, rel=0.15)


def test_the_update_is_part_of_the_step_time() -> None:
    assert adamw_seconds(costs(), MODEL) == pytest.approx(0.1)
    assert plain(costs(), MODEL).seconds == 0.5
    short = replace(MODEL, step_time=0.05)  # shorter than AdamW
    assert adamw_seconds(costs(), short) == 0.05
    assert predict(costs(), short)["ddp"].seconds == pytest.approx(0.05)


@pytest.mark.parametrize("world_size", [2, 3, 16])
def test_break_even(world_size: int) -> None:
    slow_update = replace(costs(ethernet(1), world_size=world_size), onebit=dict.fromkeys(costs().onebit, 4e-10))
    at = break_evens(slow_update, MODEL, ["onebit_adam"])["onebit_adam"]
    assert at is not None
    assert 1e8 < at < 1e11
    for factor, pays in ((0.8, True), (1.25, False)):
        there = at_bandwidth(slow_update, at * factor)
        assert (METHODS["onebit_adam"](there, MODEL).seconds < METHODS["ddp"](there, MODEL).seconds) is pays


@pytest.mark.parametrize(
    ("gain", "most"),
    [(lambda beyond: beyond, 6), (lambda beyond: 3 * beyond + max(0.0, beyond - 1e-11), 14),
     (lambda beyond: math.copysign(1.0, beyond), 45)],
    ids=["straight", "bent", "jump"],
)  # fmt: skip
@pytest.mark.parametrize("at", [2e3, 1.7e9, 9e12])
def test_a_break_even_is_found_in_few_steps_where_halving_finds_it(
    gain: Callable[[float], float], most: int, at: float
) -> None:
    """In the seconds of a bit beyond it; halving takes 17 of any."""
    asked = []

    def at_place(place: int) -> float:
        asked.append(place)
        return gain(1 / bandwidth_at(place) - 1 / at)

    found = break_even(at_place)
    low, high = SLOWEST, FASTEST
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if middle < at else (low, middle)
    assert found == pytest.approx(low, rel=1e-9)
    assert len(asked) == len(set(asked)) <= most


def test_break_even_at_the_ends() -> None:
    cheap = replace(costs(ethernet(1), copies=1e-9), onebit=dict.fromkeys(costs().onebit, 1e-11))
    assert break_evens(cheap, MODEL, ["onebit_adam"])["onebit_adam"] == math.inf
    dear = replace(costs(ethernet(1)), onebit=dict.fromkeys(costs().onebit, 1e-2))
    assert break_evens(dear, MODEL, ["onebit_adam"])["onebit_adam"] == 0
    assert break_evens(costs(), MODEL, ["onebit_adam"])["onebit_adam"] is None


def test_another_bandwidth_keeps_latency_and_proportions() -> None:
    here = replace(costs(ethernet(1)), link={**costs(ethernet(1)).link, "all_to_all": Line(3e-4, 16e-9)})
    there = at_bandwidth(here, 1e8)
    assert there.link["all_reduce"] == Line(1e-4, pytest.approx(8e-8))
    assert there.link["all_to_all"] == Line(3e-4, pytest.approx(16e-8))
    pipelined = at_bandwidth(replace(here, busy={"all_to_all": Line(1e-5, 12e-9)}), 1e8)
    assert pipelined.busy == {"all_to_all": Line(1e-5, pytest.approx(12e-8))}
    bound = at_bandwidth(replace(here, loss=dict.fromkeys(COLLECTIVES, Line(0.0, 1e-9))), 1e12)
    assert bound.link["all_reduce"].per_byte == pytest.approx(1e-9)  # what its computing takes
    assert at_bandwidth(here, 1e9).link["all_reduce"].per_byte == pytest.approx(8e-9)


def test_a_run_counts_its_warm_up() -> None:
    assert whole_run(1.0, 0.1, 0.2) == pytest.approx(1 / 0.28)
    assert whole_run(1.0, 0.1, 1.0) == 1


def test_bf16_is_recommended_where_it_is_as_good() -> None:
    steps = predict(costs(ethernet(8)), MODEL)
    assert steps["ddp"].seconds > 1.2 * steps["none"].seconds > 1.1 * steps["ddp_bf16"].seconds
    assert recommend(steps, True).startswith("do not compress to 1 bit: DDP with bf16_compress_hook")
    assert recommend(steps, False).startswith("use ZeroOneAdam")


# what the user says ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "number"),
    [("340M", 340_000_000), ("1.3B", 1_300_000_000), ("1.3g", 1_300_000_000), ("7.5k", 7500), ("25000", 25000)],
)
def test_counts(text: str, number: int) -> None:
    assert parse_count(text) == number


def test_defaults() -> None:
    options = parse(["--params=340M", "--step-time=0.3", "--device=cpu"])
    assert (options.params, options.step_time, options.last_params, options.shard) == (340_000_000, 0.3, 0, 1)
    assert (options.device, options.backend, options.json) == ("cpu", "gloo", None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--params=0 --step-time=1", "--params: 0 is not allowed, it must be at least 1"),
        ("--params=-5 --step-time=1", "--params: '-5' is not a count; expected a whole number such as 25000, 340M"),
        ("--params=340X --step-time=1", "--params: '340X' is not a count"),
        ("--params=1.5 --step-time=1", "--params: '1.5' is not a count"),
        ("--params=nan --step-time=1", "--params: 'nan' is not a count"),
        ("--params=1M --step-time=0", "--step-time: '0' is not allowed: seconds must be a number > 0, such as 0.3"),
        ("--params=1M --step-time=-1", "--step-time: '-1' is not allowed"),
        ("--params=1M --step-time=inf", "--step-time: 'inf' is not allowed"),
        ("--params=1M --step-time=1e-300", "--step-time: '1e-300' is not allowed: seconds must be a number > 0"),
        ("--params=1M --step-time=1e308", "--step-time: '1e308' is not allowed: seconds must be a number > 0, such as"),
        ("--params=1M --step-time=fast", "--step-time: 'fast' is not allowed"),
        ("--params=1M", "the following arguments are required: --step-time"),
        ("--params=1M --step-time=1 --parms=2", "--parms: there is no such option; did you mean --params?"),
        ("--param 340M --step-time=1", "--param: there is no such option; did you mean --params?"),
        ("--params=1M --step-time=1 --xyz", "--xyz: there is no such option; there are --backend, --block, "),
        ("--params=1M --step-time=1 --shard=0", "--shard: 0 is not allowed, it must be at least 1"),
        ("--params=1M --step-time=1 --last-params=2M", "--last-params: 2000000 is more than --params, 1000000"),
        ("--params=1M --step-time=1 --width=2M", "--width: 2000000 is not allowed, it must be at most 1048576"),
        (
            "--params=5M --step-time=1 --width=1",
            "--width: 1 is not allowed, that is 200000 layers; at most 10000",
        ),
        ("--params=1M --step-time=1 --backend=mpi", "--backend: 'mpi' is not allowed with --device=cpu, only gloo"),
        ("--params=1M --step-time=1 --backend=nccl", "--backend: 'nccl' is not allowed with --device=cpu, only gloo"),
        ("--params=1M --step-time=1 --device=tpu", "--device: invalid choice: 'tpu'"),
        ("--params=1M --step-time=1 --block=12", "--block: block must be None or a positive multiple of 8, got 12"),
        ("--params=1M --step-time=1 --max-mb=0", "--max-mb: 0 is not allowed, it must be from 0.0625 to 1024"),
        ("--params=1M --step-time=1 --max-mb=nan", "--max-mb: nan is not allowed"),
        ("--params=1M --step-time=1 --json=/nowhere/x", "--json: cannot write '/nowhere/x'; expected a file in a fold"),
        ("--params=1M --step-time=1", "start one process per device, at least 2: torchrun --nproc-per-node=2"),
    ],
)
def test_a_mistake_is_one_line(
    words: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    device = [] if "--device" in words else ["--device=cpu"]
    assert main(["probe", *words.split(), *device]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"commopt: error: {message}")


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(option in text for option in ("--params", "--step-time", "--last-params", "--backend", "--json"))


@pytest.mark.parametrize(
    ("ranks", "shard", "message"),
    [
        ("6", "4", "--shard: 4 is not allowed with 6 ranks: they must make up 2 or more whole replicas"),
        ("4", "4", "--shard: 4 is not allowed with 4 ranks: they must make up 2 or more whole replicas"),
        ("1", "1", "WORLD_SIZE=1: there is nobody to talk to; start one process per device, at least 2: torchrun"),
    ],
)
def test_ranks_must_make_up_replicas(ranks: str, shard: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", ranks)
    with pytest.raises(ProbeError, match=re.escape(message)):
        check_place(parse(["--params=1M", "--step-time=1", "--device=cpu", f"--shard={shard}"]))


def test_the_ranks_of_machines_and_of_parts() -> None:
    assert rows(6, 2) == ([[0, 1], [2, 3], [4, 5]], [[0, 2, 4], [1, 3, 5]])


def test_the_advice_names_what_a_sharded_model_would_do_without() -> None:
    steps = predict(costs(ethernet(8)), MODEL)
    assert "HSDP with reduce_dtype=torch.bfloat16 is" in recommend(steps, True, shard=4)
    assert " where HSDP takes " in recommend(steps, False, shard=4)
    assert " of a step of HSDP, and " in recommend(predict(costs(), MODEL), True, shard=4)


# processes ------------------------------------------------------------------------------------------------------------


def test_a_mistake_on_one_rank_is_an_error_on_every_rank() -> None:
    good = ["--params=100K", "--step-time=0.01"]
    results = on_ranks(good, ["--params=100K", "--step-time=-1"])
    assert [code for code, _, _ in results] == [2, 2]
    assert "commopt: error: rank 1 refused its arguments: --step-time: '-1' is not allowed" in results[0][2]
    assert "commopt: error: --step-time: '-1' is not allowed: seconds must be a number > 0" in results[1][2]


def test_ranks_that_were_asked_for_different_things_say_so() -> None:
    results = on_ranks(["--params=100K", "--step-time=0.01"], ["--params=200K", "--step-time=0.01"])
    assert [code for code, _, _ in results] == [2, 2]
    assert [out for _, out, _ in results] == ["", ""]
    said = "".join(err for _, _, err in results)  # once per machine, by whichever comes first
    assert said.count("commopt: error: arguments differ between ranks: rank 1 has Options(params=200000, ") == 1


@pytest.mark.long
def test_a_probe_for_a_sharded_model() -> None:
    results = on_ranks(*[["--params=40K", "--step-time=0.01", "--shard=2", "--max-mb=0.0625"]] * 4)
    assert [code for code, _, _ in results] == [0] * 4, results
    report = " ".join(results[0][1].split())
    for words in (
        "4 ranks, 2 to a machine: ", "a model of 40K parameters, cut over the 2 ranks of a machine, 0.01 s per step",
        "inside a machine: all-gather ", "a rank sends 0.24 MB a step to the others", "x as fast as HSDP",
        "the update of a rank's part of your model", "a step is faster than HSDP's", "faster than HSDP",
        "between machines, FSDP2 inside",
    ):  # fmt: skip
        assert words in report, words
    table = {name.strip(): line.split() for line in results[0][1].splitlines() for name in [line[:28]]}
    assert float(table["HSDP, float32"][-2]) == 0.08  # MB: all of 20,000 float32 in each direction, 2 (R-1) / R = 1
    assert float(table["HSDP, reduce_dtype bf16"][-2]) == 0.04
    lines = results[0][1].splitlines()
    end = next(line.index("MB sent") for line in lines if line.startswith("AdamW, gradients by")) + len("MB sent")
    (row,) = (line for line in lines if line[:20].strip() == "Int8()")  # what could not be measured is left out
    assert 0.0206 < float(row[:end].split()[-1]) < 0.022  # 8.25 bits of each of the 20,000
    assert "DDP," not in report


def test_a_probe_under_torchrun(tmp_path: Path) -> None:
    file = tmp_path / "probe.json"
    done = subprocess.run(
        [
            python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "commopt",
            "probe", "--params=100K", "--step-time=0.01", "--last-params=30K", "--max-mb=0.25", f"--json={file}",
            "--fsdp",
        ],
        capture_output=True, text=True, timeout=200,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHON_EXEC": python()},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("recommendation: ") == 1  # rank 0 alone reports
    for words in (
        "2 ranks: ", "a model of 100K parameters, 0.01 s per step", "all-reduce, float32", "all-to-all of bytes",
        "OneBitAdam(overlap=True)", "DDP, bf16 hook", "256 KB", "break-even, as bandwidth", "elements/s", "check: ",
        "AdamW, gradients by", "faster than DDP\n", "a transformer 64 wide (--width)", "check: a mean of the gradients",
        "found by: the fastest whole run", *(label for label, _ in COMPRESSORS.values()),
        "receives fewer bytes than SparseLoCo from 3 ranks on (here 2)", "CSER ", "QSparseLocalSGD ", "NoLoCo ",
        "Gossip, Int8() ", "to the next rank, float32",
        "cut over all ranks by FSDP2", *(way.words for way in WAYS.values()), "recommendation, cut over all ranks: ",
    ):  # fmt: skip
        assert words in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100

    found = json.loads(file.read_text())
    assert found["world_size"] == 2
    assert [s["size"] for s in found["samples"]["all_reduce"]] == [4096, 16384, 65536, 262144]
    assert [s["nbytes"] for s in found["samples"]["all_reduce"]] == [4096, 16384, 65536, 262144]  # 2 (W-1) / W = 1
    assert found["samples"].keys() == {*COLLECTIVES, "compressed_all_reduce"}
    assert found["together"].keys() == {"all_reduce", "all_to_all", "all_gather"}
    assert found["costs"]["busy"].keys() == {*COLLECTIVES} - {"exchange"}
    for verb, busy in found["costs"]["busy"].items():
        assert busy["latency"] <= found["costs"]["link"][verb]["latency"]
    assert all(s["seconds"] > 0 for samples in found["samples"].values() for s in samples)
    assert found["costs"]["link"].keys() == found["costs"]["loss"].keys() == set(COLLECTIVES)
    assert found["costs"]["onebit"].keys() == {"agreement", "all_to_all", "all_gather", "end"}
    assert all(seconds > 0 for seconds in found["costs"]["onebit"].values())
    assert found["costs"]["sgd"]["qsparse"].keys() == {"agreement", "end"}
    assert found["costs"]["sgd"]["cser_reset"].keys() == {"agreement", "all_reduce", "end"}
    assert {"cser", "cser_reset", "qsparse", "qsparse_reset"} == found["costs"]["sgd"].keys()
    assert found["steps"].keys() == {*METHODS, *COMPRESSORS} == found["model"]["compressors"].keys() | METHODS.keys()
    assert found["steps"]["gradients_int8"]["nbytes"] > found["steps"]["gradients_int4"]["nbytes"]
    assert found["costs"]["means"].keys() == set(COMPRESSORS)
    assert found["costs"]["means"]["gradients_acp4"].keys() == {"presence", "all_reduce", "end"}
    assert all(seconds > 0 for per in found["costs"]["means"].values() for seconds in per.values())
    compressor, params, *both = found["mean_rehearsal"]
    assert compressor in COMPRESSORS
    assert params == 100_000
    assert min(both) > 0
    assert found["width"] == 64
    assert found["cut"]["steps"].keys() == found["cut"]["costs"].keys() == WAYS.keys()
    assert all(seconds > 0 for per in found["cut"]["costs"].values() for seconds in per.values())
    assert found["cut"]["costs"]["fsdp"] == {}
    assert found["steps"]["none"]["seconds"] == 0.01
    assert found["steps"]["ddp"]["nbytes"] == 400_000
    assert found["options"]["last_params"] == 30_000
    assert found["run"].keys() == {"onebit_adam", "onebit_adam_overlap", "onebit_adam_int8", "zero_one_adam"}
    assert found["break_even"].keys() == {"onebit_adam", "onebit_adam_overlap", *COMPRESSORS}
    assert found["advice"] in " ".join(done.stdout.split())
