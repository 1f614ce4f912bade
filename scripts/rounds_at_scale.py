#!/usr/bin/env python
"""Rounds between many hosts on far networks, on paper: the share of the time that is spent computing, by simulation.

    scripts/rounds_at_scale.py                       the tables
    scripts/rounds_at_scale.py --update-docs         writes them into docs/streaming.md

One rank a host, on one clock with one device and one link (:mod:`commopt.probe.clock`). What is assumed:

* a message takes the latency, and its bytes at the rate of the uplink; a rank receives as much as it sends, meanwhile;
* collectives of commopt send to all ranks at once, one latency each; a full-precision all-reduce is a ring, 2 (W-1);
* a round is an agreement, a way out, a way back and a confirmation, one after the other; messages of small rows take a
  latency. What follows a message starts at the next step, though a rank looks more often;
* computing is not slowed down by what is under way, all ranks are equally fast, and packing costs nothing.

TCP's slow start is not in it: over few connections, it costs a round that is waited for some round trips more.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from marked import put

from commopt.compress import Int4, TopK
from commopt.probe.clock import Clock, Costs
from commopt.probe.fit import Line
from commopt.probe.rounds import Mean, Message, full, gathered, two_ways, whole_round

PAGE = Path(__file__).parents[1] / "docs" / "streaming.md"
MARKS = ("<!-- scale: made by scripts/rounds_at_scale.py --update-docs -->", "<!-- /scale -->")
CYCLES = 12
"""Periods that are played; the first ones, which only fill the link, are not counted."""
SETTLED = 4


@dataclass(frozen=True)
class Run:
    """A run of one rank on each of ``ranks`` hosts.

    Attributes:
        ranks: W.
        params: of the model.
        step: seconds of a step without communication.
        period: steps of a round.
        rate: of each host's uplink, bit/s.
        latency: seconds of a message from one host to another.
        fragments, delay: of streamed rounds.
    """

    ranks: int
    params: int
    step: float
    period: int
    rate: float
    latency: float
    fragments: int = 5
    delay: int = 12

    def clock(self) -> Clock:
        line, none = Line(self.latency, 8 / self.rate), Line(0.0, 0.0)
        ring = Line(2 * (self.ranks - 1) * self.latency, 8 / self.rate)
        link = {"all_reduce": ring, "all_gather": line, "all_to_all": line}
        return Clock(Costs(self.ranks, link, dict.fromkeys(link, none), 0.0, {}, {}))


def every_step(run: Run) -> float:
    """Share of computing where gradients are averaged at every step, after backward."""
    clock = run.clock()
    clock.compute(run.step)
    (way,) = full(run.ranks, run.params)
    clock.wait(clock.send(*way))
    return run.step / clock.now


def waited_for(run: Run, mean: Mean) -> float:
    """Share of computing with rounds that are waited for."""
    clock = run.clock()
    clock.compute(run.period * run.step)
    for message in whole_round(mean, run.ranks, run.params):
        clock.wait(clock.send(*message))
    return run.period * run.step / clock.now


def streamed(run: Run, mean: Mean) -> float:
    """Share of computing with streamed rounds: nobody waits but where a fragment is merged."""
    clock, flights = (
        run.clock(),
        list[tuple[int, list[float], list[Message]]](),
    )  # the step of the merge, arrivals, what follows
    ends = {run.period * (p + 1) // run.fragments for p in range(run.fragments)}
    begin = 0.0

    def merge(step: int) -> None:
        while flights and flights[0][0] <= step:
            _, arrivals, rest = flights.pop(0)
            clock.wait(arrivals[-1])
            for way in rest:
                clock.wait(clock.send(*way))

    for step in range(1, CYCLES * run.period + 1):
        if step == SETTLED * run.period + 1:
            begin = clock.now
        clock.compute(run.step)
        for _, arrivals, rest in flights:
            while rest and arrivals[-1] <= clock.now:
                arrivals.append(clock.send(*rest.pop(0)))
        merge(step)
        if (step - 1) % run.period + 1 in ends:
            agreement, first, *rest = whole_round(mean, run.ranks, -(-run.params // run.fragments))
            arrival = max(clock.send(*agreement), clock.send(*first))
            flights.append((step + run.delay, [arrival], rest))
            merge(step)  # if there is no delay
    return (CYCLES - SETTLED) * run.period * run.step / (clock.now - begin)


INT4, TOP_K = two_ways(Int4()), TopK()
METHODS: dict[str, Callable[[Run], float]] = {
    "DDP, AdamW": every_step,
    "DiLoCo": lambda run: waited_for(run, full),
    "DiLoCo, Int4()": lambda run: waited_for(run, INT4),
    "DiLoCo, Int4(), streamed": lambda run: streamed(run, INT4),
    "SparseLoCo": lambda run: waited_for(run, gathered(TOP_K)),
    "SparseLoCo, streamed": lambda run: streamed(run, gathered(TOP_K)),
    "DiLoCo, TopK(), outer_momentum=0, streamed": lambda run: streamed(run, two_ways(TOP_K)),
}
RANKS = (8, 32, 128, 512, 1000)


def table(run: Callable[[int], Run], ranks: Sequence[int] = RANKS) -> str:
    """Markdown: the share of computing by method and number of ranks."""
    lines = ["| | " + " | ".join(f"{w} ranks" for w in ranks) + " |", "| --- |" + " --- |" * len(ranks)]
    for name, share in METHODS.items():
        lines.append(f"| {name} | " + " | ".join(f"{share(run(w)):.1%}" for w in ranks) + " |")
    return "\n".join(lines)


SMALL = {"params": 5_273_088, "step": 0.25, "period": 30, "rate": 20e6, "latency": 0.1}
LARGE = {"params": 1_000_000_000, "step": 5.0, "period": 100, "rate": 20e6, "latency": 0.1, "delay": 20}


def text() -> str:
    """What the page says."""
    small, large = table(lambda w: Run(w, **SMALL)), table(lambda w: Run(w, **LARGE))  # type: ignore[arg-type]
    return "\n\n".join([
        "The model above, 5.3 million parameters, a step of 0.25 s, a period of 30, 5 fragments and a delay of 12:",
        small,
        "A billion parameters, a step of 5 s, a period of 100, 5 fragments and a delay of 20:",
        large,
        "```bash\nscripts/rounds_at_scale.py\n```",
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update-docs", action="store_true", help="write the tables into docs/streaming.md")
    if parser.parse_args().update_docs:
        put(text(), PAGE, MARKS)
    else:
        print(text())


if __name__ == "__main__":
    main()
