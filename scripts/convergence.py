#!/usr/bin/env python3
"""Does a compressed run learn what the plain one learns? Every optimizer, and AdamW on compressed means of gradients,
against its uncompressed counterpart.

    scripts/convergence.py [--tasks gpt,bert,digits] [--methods ...] [--seeds 0,1,2] [--ranks 4] [--json FILE]
    scripts/convergence.py --update-docs     # the tables of docs/convergence.md and gradients_measured.md, no run

The same data, steps, seeds and learning rates for both, on real processes over Gloo (scripts/convergence_tasks.py has
all settings). Passed is what ends with a mean held-out loss within the spread of its counterpart: no more above the
counterpart's mean than the larger spread (largest minus smallest loss over the seeds) of the two.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from convergence_tasks import TASKS
from loss_tables import compare, summary
from marked import markdown, put
from netbed import exit_on_signals
from torchrun import torchrun

ROOT = Path(__file__).resolve().parent.parent
RANK = ROOT / "scripts" / "convergence_rank.py"
FIGURES = ROOT / "benchmarks" / "convergence.json"
MARKS = "<!-- convergence: made by scripts/convergence.py --update-docs -->", "<!-- /convergence -->"

Record = dict[str, Any]


def follow(process: subprocess.Popen[Any], out: Path, runs: int) -> int:
    """Says what is written to ``out`` as soon as it is; returns the exit code of ``process``."""
    shown, began = 0, time.monotonic()
    while True:
        code = process.poll()
        for record in map(json.loads, out.read_text().splitlines()[shown:]):
            where = f"{record['task']}, {record['method']}, seed {record['seed']}"
            took = f"{shown + 1} of {runs}, {time.monotonic() - began:.0f} s"
            print(f"{where}: held-out loss {record['heldout_loss']:.4f} ({took})", file=sys.stderr, flush=True)
            shown += 1
        if code is not None:
            return code
        time.sleep(0.2)


def launch(
    runs: list[tuple[str, str, int]], ranks: int, folder: Path, program: Sequence[str] = (str(RANK),)
) -> list[Record]:
    """All runs in ``ranks`` processes, one after another; says what each has come to as soon as it has.

    Args:
        runs: task, method and seed of each.
        ranks: how many processes.
        folder: for what they write.
        program: a rank, and its first arguments.
    """
    spec, out = folder / "runs.json", folder / "out.jsonl"
    spec.write_text(json.dumps(runs))
    out.touch()
    program = [*program, str(spec), str(out), str(folder)]
    with (folder / "log.txt").open("w") as log, torchrun(ranks, program, stdout=log, stderr=log) as process:
        code = follow(process, out, len(runs))
    if code:
        said = (folder / "log.txt").read_text().partition("ChildFailedError")[0]
        raise RuntimeError(f"a rank failed, exit code {code}:\n{said[-3000:]}")
    return [json.loads(line) for line in out.read_text().splitlines()]


def earlier(path: Path, ranks: int) -> list[Record]:
    """The runs of a file of figures, of methods that there still are; none without the file."""
    if not path.exists():
        return []
    figures = json.loads(path.read_text())
    if figures["ranks"] != ranks:
        raise SystemExit(f"{path} has figures of {figures['ranks']} ranks, these would be of {ranks}")
    records = [run for row in figures["rows"] for run in row["runs"]]
    return [
        record for record in records if record["task"] in TASKS and record["method"] in TASKS[record["task"]].methods
    ]


def merge(old: list[Record], new: list[Record]) -> list[Record]:
    """The new runs and those of the old ones that were not repeated, in the order of the tasks."""
    runs = {(record["task"], record["method"], record["seed"]): record for record in (*old, *new)}
    order = [(task, method) for task in TASKS for method in TASKS[task].methods]
    return [runs[key] for key in sorted(runs, key=lambda key: (order.index(key[:2]), key[2]))]


def summarise(records: list[Record]) -> list[Record]:
    """A row for each task and method: means and spreads, and whether it learns what its counterpart does."""
    rows: dict[tuple[str, str], Record] = {}
    for record in records:
        key = record["task"], record["method"]
        rows.setdefault(key, {"task": key[0], "method": key[1], "runs": []})["runs"].append(record)
    for row in rows.values():
        losses = [run["heldout_loss"] for run in row["runs"]]
        row["loss"], row["spread"] = statistics.mean(losses), max(losses) - min(losses)
        row["sent"] = sum(run["bytes"] for run in row["runs"]) / sum(run["fp32_bytes"] for run in row["runs"])
        if "accuracy" in row["runs"][0]:
            row["accuracy"] = statistics.mean(run["accuracy"] for run in row["runs"])
    for (task, method), row in rows.items():
        other = rows.get((task, TASKS[task].methods[method].counterpart or ""))
        if other is not None:
            compare(row, other, row["loss"] - other["loss"])
    return list(rows.values())


def table(rows: list[Record]) -> str:
    """The rows as a Markdown table."""
    head = ["task", "optimizer", "held-out loss", "spread", "against", "gap", "within the spread", "accuracy", "sent"]
    lines = []
    for row in rows:
        against = ["", "", ""]
        if "gap" in row:
            against = [row["against"], f"{row['gap']:+.4f}", "yes" if row["passed"] else "no"]
        accuracy = f"{100 * row['accuracy']:.1f} %" if "accuracy" in row else ""
        cells = [row["task"], row["method"], f"{row['loss']:.4f}", f"{row['spread']:.4f}", *against, accuracy]
        lines.append([*cells, f"{100 * row['sent']:.1f} %"])
    return markdown(head, lines)


def on_gradients(rows: list[Record]) -> str:
    """The summary of those that compress means of gradients."""
    found: dict[str, dict[str, Record]] = {}
    for row in rows:
        if "compress" in TASKS[row["task"]].methods[row["method"]].comm:
            found.setdefault(row["task"], {})[row["method"]] = row
    return summary(found, dict.fromkeys(method for of_task in found.values() for method in of_task))


def update_docs(rows: list[Record], root: Path = ROOT) -> None:
    put(table(rows), root / "docs" / "convergence.md", MARKS)
    put(on_gradients(rows), root / "docs" / "gradients_measured.md", MARKS)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", default=",".join(TASKS), help=f"with commas, of {', '.join(TASKS)} (default: all)")
    parser.add_argument("--methods", help="with commas; by default all of each task")
    parser.add_argument("--seeds", default="0,1,2", help="with commas (default: 0,1,2)")
    parser.add_argument("--ranks", type=int, default=4, help="processes (default: 4)")
    parser.add_argument("--runs", type=Path, help="keep the run folders here, for `commopt report`")
    parser.add_argument("--json", type=Path, help="write all figures to this file; what it has of other runs stays")
    parser.add_argument("--check", action="store_true", help="exit with 1 if an optimizer learns less")
    parser.add_argument("--update-docs", action="store_true", help=f"their tables from {FIGURES.name}; no run")
    args = parser.parse_args()
    args.tasks = args.tasks.split(",")
    for task in args.tasks:
        if task not in TASKS:
            parser.error(f"--tasks {task}: expected some of {', '.join(TASKS)}")
    known = list(dict.fromkeys(name for task in args.tasks for name in TASKS[task].methods))
    args.methods = args.methods.split(",") if args.methods else known
    for method in args.methods:
        if method not in known:
            parser.error(f"--methods {method}: expected some of {', '.join(known)}")
    try:
        args.seeds = [int(seed) for seed in args.seeds.split(",")]
    except ValueError:
        parser.error(f"--seeds {args.seeds}: expected integers with commas between")
    for task in args.tasks:
        if args.ranks < 1 or TASKS[task].batch % args.ranks:
            parser.error(f"--ranks {args.ranks}: the batch of {task} is {TASKS[task].batch}, a multiple of the ranks")
    return args


def main() -> int:
    exit_on_signals()
    args = arguments()
    if args.update_docs:
        update_docs(json.loads(FIGURES.read_text())["rows"])
        return 0
    runs = [
        (task, method, seed)
        for task in args.tasks
        for method in TASKS[task].methods
        if method in args.methods
        for seed in args.seeds
    ]
    old = earlier(args.json, args.ranks) if args.json else []
    with tempfile.TemporaryDirectory() as folder:
        if args.runs is not None:
            args.runs.mkdir(parents=True, exist_ok=True)
        records = merge(old, launch(runs, args.ranks, args.runs or Path(folder)))
    rows, seeds = summarise(records), sorted({record["seed"] for record in records})
    print(table(rows))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"ranks": args.ranks, "seeds": seeds, "rows": rows}, indent=1) + "\n")
    return int(args.check and not all(row.get("passed", True) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
