#!/usr/bin/env python3
"""What does each optimizer learn with its own learning rate? All of them, and their uncompressed counterparts, tuned
alike on the tasks of scripts/convergence_tasks.py.

    scripts/tuned.py [--task gpt] [--methods ...] [--seeds 0,1,2,3,4] [--steps 600]     # goes on where it was ended
    scripts/tuned.py --update-docs          # the tables of docs/convergence.md and that of README.md, no run

First a grid of the same size for every method: RATES times the middle of its family, on seeds that are not reported; if
the least loss is at its end, it moves on by one rate. Then the other seeds at the best of it. Longer runs (--steps)
take the rate that the grid has found. Every run is a line of benchmarks/tuned.jsonl as soon as it has ended, and is not
repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convergence_tasks import TASKS, Method
from loss_tables import compare, share, summary
from marked import markdown, put
from netbed import exit_on_signals
from torchrun import torchrun
from tuned_methods import METHODS

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "benchmarks" / "tuned.jsonl"
MARKS = "<!-- tuned: made by scripts/tuned.py --update-docs -->", "<!-- /tuned -->"
RATES = 0.1, 0.16, 0.25, 0.4, 0.63, 1.0, 1.6, 2.5, 4.0, 6.3, 10.0, 16.0, 25.0
FIRST, SIZE = 3, 5
"""The grid: so many of RATES, at first from this one on."""
TUNING_SEEDS = 100, 101
"""Two: where some seeds fail and others do not, one of them says too little."""
IN_README = (
    "OneBitAdam", "ZeroOneAdam", "OneBitLamb", "OneBitLamb(element)", "OneBitLion", "LocalSGD(AdamW)",
    "SignMomentum(AdamW)", "SlowMo(AdamW)", "DiLoCo(AdamW)", "SparseLoCo(AdamW) H=15 k=32 of contributors",
    "NoLoCo(AdamW) H=15", "Gossip(AdamW)", "CSER(R=4)", "QSparseLocalSGD",
)  # fmt: skip
"""A method of each optimizer that communicates."""
Record = dict[str, Any]


@dataclass(frozen=True)
class Tuning:
    """A task, and the methods that are tuned on it. Of the records that it is given it takes those of its task.

    Attributes:
        task: of scripts/convergence_tasks.py.
        methods: by name; a counterpart before what is compared with it.
    """

    task: str
    methods: dict[str, Method]

    @property
    def steps(self) -> int:
        """Of the runs of a grid."""
        return TASKS[self.task].steps

    def rates(self, method: str) -> list[float]:
        """All that its grid may come to."""
        return [float(f"{self.methods[method].optim['lr'] * rate:.3g}") for rate in RATES]

    def grid(self, method: str, records: Iterable[Record] = ()) -> dict[float, list[float]]:
        """The losses of each learning rate of the grid, on its seeds, as far as they have been run: rates for SIZE of
        RATES next to each other, moved on by one while all of them have been run, and the best is the first or the
        last."""
        found: dict[float, list[float]] = {lr: [] for lr in self.rates(method)}
        for r in records:
            mine = (r["task"], r["method"], r["steps"]) == (self.task, method, self.steps)
            if mine and r["seed"] in TUNING_SEEDS and r["lr"] in found:
                found[r["lr"]].append(r["heldout_loss"])
        first = FIRST
        while True:
            out = dict(list(found.items())[first : first + SIZE])
            if any(len(losses) < len(TUNING_SEEDS) for losses in out.values()):
                return out
            at = [statistics.mean(losses) for losses in out.values()]
            if min(at) == at[0] and first > 0:
                first -= 1
            elif min(at) == at[-1] < at[0] and first + SIZE < len(found):
                first += 1
            else:
                return out

    def best(self, records: Iterable[Record], method: str) -> float | None:
        """The learning rate with the least mean loss over the grid's seeds, once all of it has been run."""
        found = self.grid(method, records)
        if any(len(losses) < len(TUNING_SEEDS) for losses in found.values()):
            return None
        return min(found, key=lambda lr: statistics.mean(found[lr]))

    def optim_of(self, method: str, lr: float) -> dict[str, Any]:
        """Its ``optim`` section at a learning rate. SignMomentum has the outer one with it: its rounds end with a step
        of size outer_lr lr, whatever the inner steps are."""
        optim = self.methods[method].optim
        if optim["name"] == "SignMomentum":
            step = optim["lr"] * optim["args"]["outer_lr"]
            optim = {**optim, "args": {**optim["args"], "outer_lr": step / lr}}
        return {**optim, "lr": lr}

    def missing(self, records: list[Record], methods: list[str], seeds: list[int], steps: int) -> list[Record]:
        """What is to be run next: the grids that are not complete, or else the seeds."""
        done = {key_of(r) for r in records}

        def todo(runs: Iterable[tuple[str, float | None, int, int]]) -> list[Record]:
            names = "method", "lr", "seed", "steps"
            every = [{"task": self.task, **dict(zip(names, run))} for run in runs]
            return [run for run in every if key_of(run) not in done]

        grids = {method: self.grid(method, records) for method in methods}
        chosen = {method: self.best(records, method) for method in methods}
        return todo(
            (method, lr, seed, self.steps) for method in methods for seed in TUNING_SEEDS for lr in grids[method]
        ) or todo((method, chosen[method], seed, steps) for seed in seeds for method in methods)

    def rows(self, records: list[Record], steps: int) -> list[Record]:
        """A row for each method that has been run on reported seeds: its rate, loss, spread, gap, and what it sends."""
        out: dict[str, Record] = {}
        for method, of in self.methods.items():
            of_run = self.task, method, self.best(records, method), steps
            same = [r for r in records if (r["task"], r["method"], r["lr"], r["steps"]) == of_run]
            runs = [r for r in same if r["seed"] not in TUNING_SEEDS]
            if not runs:
                continue
            losses, lr = [run["heldout_loss"] for run in runs], runs[0]["lr"]
            whole = [r for r in runs if r["bytes"]] or [r for r in same if r["bytes"]]  # of none that diverged
            out[method] = {
                "method": method,
                "lr": lr,
                "edge": lr in (min(tried := self.grid(method, records)), max(tried)),
                "seeds": {run["seed"]: run["heldout_loss"] for run in runs},
                "loss": statistics.mean(losses),
                "spread": max(losses) - min(losses) if min(losses) < math.inf else math.inf,
                "sent": sum(r["bytes"] for r in whole) / sum(r["fp32_bytes"] for r in whole) if whole else math.nan,
            }
            other = out.get(of.counterpart or "")
            if other is not None:
                both = out[method]["seeds"].keys() & other["seeds"].keys()
                gaps = [out[method]["seeds"][seed] - other["seeds"][seed] for seed in both]
                compare(out[method], other, statistics.mean(gaps) if gaps else math.nan)
                out[method]["worse"] = f"{sum(gap > 0 for gap in gaps)} of {len(gaps)}"
        return list(out.values())


def key_of(run: Record) -> tuple[Any, ...]:
    return run["task"], run["method"], run["lr"], run["seed"], run["steps"]


TUNINGS = {task: Tuning(task, methods) for task, methods in METHODS.items()}


def read(path: Path = FIGURES) -> list[Record]:
    """The runs so far; a loss that is not finite is written as null."""
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [{**r, "heldout_loss": math.inf if r["heldout_loss"] is None else r["heldout_loss"]} for r in records]


def launch(runs: list[Record], ranks: int, out: Path) -> None:
    """All of ``runs`` in ``ranks`` processes, one after another."""
    with tempfile.TemporaryDirectory() as folder:
        spec = Path(folder, "runs.json")
        spec.write_text(json.dumps(runs))
        program = [str(ROOT / "scripts" / "tuned_rank.py"), str(spec), str(out), folder]
        with torchrun(ranks, program) as process:
            code = process.wait()
    if code:
        raise RuntimeError(f"a rank failed, exit code {code}")


def table(found: list[Record]) -> str:
    """As Markdown."""
    head = ["optimizer", "learning rate", "seeds", "held-out loss", "spread"]
    head += ["against", "gap", "worse on", "within", "sent"]
    lines = []
    for row in found:
        against = ["", "", "", ""]
        if "gap" in row:
            against = [row["against"], f"{row['gap']:+.3f}", row["worse"], "yes" if row["passed"] else "no"]
        rate = f"{row['lr']:.2g}" + (" (edge)" if row["edge"] else "")
        cells = [row["method"], rate, str(len(row["seeds"])), f"{row['loss']:.3f}", f"{row['spread']:.3f}", *against]
        lines.append([*cells, share(row["sent"])])
    return markdown(head, lines)


def frontier(found: Iterable[Record]) -> list[Record]:
    """Those of which no other sends as few bytes and ends as low; the fewest bytes first."""
    out: list[Record] = []
    for row in sorted(found, key=lambda row: (row["sent"], row["loss"])):
        if not out or row["loss"] < out[-1]["loss"]:
            out.append(row)
    return out


def table_of_bytes(found: list[Record]) -> str:
    """As Markdown: the frontier of all, and of what has Adam inside."""
    adams = [row for row in found if "Adam" in row["method"]]
    columns = [frontier(rows) for rows in (found, adams)]
    lines = []
    for sent in sorted({row["sent"] for rows in columns for row in rows}):
        cells = [share(sent)]
        for rows in columns:
            here = [row for row in rows if row["sent"] == sent]
            cells += [here[0]["method"], f"{here[0]['loss']:.3f}"] if here else ["", ""]
        lines.append(cells)
    return markdown(["sent", "of all methods", "held-out loss", "of those with Adam", "held-out loss"], lines)


def tables(records: list[Record]) -> list[str]:
    """Those of the page, each after its heading."""
    parts = []
    for task, tuning in TUNINGS.items():
        for steps in sorted({r["steps"] for r in records}):
            found = tuning.rows(records, steps)
            if found:
                parts += [f"**{task}, {steps} steps:**", table(found)]
    gpt = TUNINGS["gpt"]
    best_for = f"**The best for the bytes**, gpt, {gpt.steps} steps: nothing that sends as few ended lower."
    return [*parts, best_for, table_of_bytes(gpt.rows(records, gpt.steps))]


def overview(records: list[Record]) -> str:
    """The table of ``IN_README``."""
    found = {task: {row["method"]: row for row in of.rows(records, of.steps)} for task, of in TUNINGS.items()}
    return summary(found, IN_README)


def update_docs(records: list[Record], root: Path = ROOT) -> None:
    put("\n\n".join(tables(records)), root / "docs" / "convergence.md", MARKS)
    put(overview(records), root / "README.md", MARKS)


def main() -> None:
    exit_on_signals()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=TUNINGS, default="gpt", help="(default: gpt)")
    parser.add_argument("--methods", help="with commas (default: all of the task)")
    parser.add_argument("--seeds", default="0,1,2,3,4", help="with commas (default: 0,1,2,3,4)")
    parser.add_argument("--steps", type=int, help="of the runs after the grid (default: as many as in the grid)")
    parser.add_argument("--ranks", type=int, default=4, help="processes (default: 4)")
    parser.add_argument("--out", type=Path, default=FIGURES, help="the file of figures")
    parser.add_argument("--update-docs", action="store_true", help="the tables, from the figures; no run")
    args = parser.parse_args()
    if args.update_docs:
        return update_docs(read(args.out))
    tuning = TUNINGS[args.task]
    methods = args.methods.split(",") if args.methods else list(tuning.methods)
    unknown = [name for name in methods if name not in tuning.methods]
    if unknown:
        parser.error(f"argument --methods: there is no {unknown[0]!r}; allowed are {', '.join(tuning.methods)}")
    seeds, steps = [int(seed) for seed in args.seeds.split(",")], args.steps if args.steps is not None else tuning.steps
    while runs := tuning.missing(read(args.out), methods, seeds, steps):
        launch(runs, args.ranks, args.out)
    for length in dict.fromkeys((tuning.steps, steps)):
        print(table(tuning.rows(read(args.out), length)))


if __name__ == "__main__":
    main()
