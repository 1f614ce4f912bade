#!/usr/bin/env python3
"""What does each optimizer learn with its own learning rate? All of them, and their uncompressed counterparts, tuned
alike on the GPT of scripts/convergence_tasks.py.

    scripts/tuned.py [--methods ...] [--seeds 0,1,2,3,4] [--steps 600]     # goes on where it was ended
    scripts/tuned.py --update-docs                                       # the table of docs/convergence.md, no run

First a grid of the same size for every method: RATES times the middle of its family, on seeds that are not reported; if
the least loss is at its end, it moves on by one rate. Then the other seeds at the best of it. Longer runs (--steps)
take the rate that the grid has found. Every run is a line of benchmarks/tuned.jsonl as soon as it has ended, and is not
repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from convergence_tasks import TASKS, Method
from marked import put

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "benchmarks" / "tuned.jsonl"
MARKS = "<!-- tuned: made by scripts/tuned.py --update-docs -->", "<!-- /tuned -->"
RATES = 0.1, 0.16, 0.25, 0.4, 0.63, 1.0, 1.6, 2.5, 4.0, 6.3, 10.0, 16.0, 25.0
FIRST, SIZE = 3, 5
"""The grid: so many of RATES, at first from this one on."""
TUNING_SEEDS = 100, 101
"""Two: where some seeds fail and others do not, one of them says too little."""
STEPS = 600
GPT = TASKS["gpt"].methods
SIGN_STEP = 2e-3
"""Of SignMomentum: outer_lr lr, as in scripts/convergence_tasks.py."""
LIONS = 1.0
"""Of AdamW's learning rate: the middle of OneBitLion's, whose steps are shorter than Lion's (docs/onebit_lion.md)."""

Record = dict[str, Any]


def rounds(name: str, base: str = "AdamW", **args: Any) -> dict[str, Any]:
    """The ``optim`` section of an outer optimizer with rounds of 15 steps."""
    betas = {"betas": [0.9, 0.98]}
    of_base = {"adamw": betas} if base == "Muon" else betas
    given = {"base": base, "base_args": of_base, "period": 15, **args}
    return {"name": name, "lr": 2e-3, "weight_decay": 0.1, "args": given}


def outer(name: str, base: str = "AdamW", against: str = "LocalSGD(AdamW) H=15", **args: Any) -> Method:
    return Method(rounds(name, base, **args), against)


MOMENTUM = {"outer_lr": 0.7, "outer_momentum": 0.5}
"""Of DiLoCo: the best of five on the tuning seeds, at its best rate: 4.020; (1, 0.5) 4.222, (0.7, 0.7) 4.216, (1, 0.3)
4.049, (0.5, 0.7) 4.050."""
MUON = {"name": "Muon", "lr": 2e-3, "weight_decay": 0.1, "args": {"adamw": {"betas": [0.9, 0.98]}}}
LION = {"name": "OneBitLion", "lr": LIONS * 2e-3, "weight_decay": 0.1 / LIONS, "args": {}}


def cser(ratio: int) -> Method:
    """1 / (2 R) in every step, and as much on average by a round in every 32nd, as in its paper: R = ``ratio``."""
    of = GPT["CSER(R=8)"].optim

    def blocks(ratio: int) -> dict[str, Any]:
        return {"name": "RandomBlocks", "args": {"ratio": ratio, "block": 32}}

    args = {**of["args"], "period": 32, "reset_compressor": blocks(ratio // 16)}
    return Method({**of, "args": args, "compressor": blocks(2 * ratio)}, "SGD")


def denser(**args: Any) -> Method:
    """SparseLoCo that sends 32 of 256 elements, at 8 bits."""
    top_k = {"name": "TopK", "args": {"k": 32, "chunk": 256, "bits": 8}}
    return Method({**rounds("SparseLoCo", **args), "compressor": top_k}, "DiLoCo(AdamW) H=15")


CONTRIBUTORS = {"mean_over": "contributors", "outer_lr": 0.85, "error_decay": 0.7}
"""Of SparseLoCo: the best of twelve settings on the tuning seeds, at the rate that is best for the defaults. (outer_lr,
error_decay): (1, 0.95), the default, 4.217; (1.4, 0.95) 4.191, (2, 0.95) 4.407, (1.4, 1) 4.179, (1.4, 0.8) 4.159; and
over the contributors (0.5, 0.95) 4.117, (0.7, 0.95) 4.064, (1, 0.95) 4.404, (0.7, 1) 4.161, (0.7, 0.8) 4.021,
(0.7, 0.6) 4.061, (0.85, 0.7) 3.972."""

METHODS: dict[str, Method] = {
    name: GPT[name]
    for name in (
        "AdamW", "AdamW + Int4", "AdamW + PowerSGD(4)", "AdamW + ACP(4)", "AdamW + Sign", "AdamW + TopK",
        "OneBitAdam", "ZeroOneAdam", "Lamb", "OneBitLamb",
    )
}  # fmt: skip
METHODS |= {
    "Lion": Method({**LION, "compressor": {"name": "Identity", "args": {}}}, "AdamW"),
    "OneBitLion": Method(LION, "Lion"),
    "Muon": Method(MUON),
    **{
        f"Muon + {name}": Method(MUON, "Muon", comm={"compress": {"name": name}})
        for name in ("Int8", "Int4", "Int2", "Sign")
    },
    **{name: GPT[name] for name in ("LocalSGD(AdamW)", "SignMomentum(AdamW)", "SlowMo(AdamW)", "DiLoCo(AdamW)")},
    "LocalSGD(AdamW) H=15": outer("LocalSGD", against="AdamW"),
    "DiLoCo(AdamW) H=15": outer("DiLoCo", **MOMENTUM),
    "DiLoCo(AdamW) H=15 streamed": outer(
        "DiLoCo", against="DiLoCo(AdamW) H=15", streaming={"fragments": 4, "delay": 2}, **MOMENTUM
    ),
    "DES-LOC(AdamW) H=15": outer("LocalSGD", state_period={"exp_avg": 3, "exp_avg_sq": 6}),
    "SparseLoCo(AdamW) H=15": outer("SparseLoCo", against="DiLoCo(AdamW) H=15"),
    "SparseLoCo(AdamW) H=15 k=32": denser(),
    "SparseLoCo(AdamW) H=15 k=32 of contributors": denser(**CONTRIBUTORS),
    "NoLoCo(AdamW) H=15": outer("NoLoCo", against="DiLoCo(AdamW) H=15"),
    "MuLoCo H=15": outer("DiLoCo", base="Muon", against="Muon", **MOMENTUM),
    "SGD": GPT["SGD"],
    "CSER(R=4)": GPT["CSER(R=4)"],
    "CSER(R=8)": GPT["CSER(R=8)"],
    "CSER(R=256)": cser(256),
    "CSER(R=1024)": cser(1024),
    "QSparseLocalSGD": GPT["QSparseLocalSGD"],
    "LocalSGD(SGD)": GPT["LocalSGD(SGD)"],
}


def read(path: Path = FIGURES) -> list[Record]:
    """The runs so far; a loss that is not finite is written as null."""
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [{**r, "heldout_loss": math.inf if r["heldout_loss"] is None else r["heldout_loss"]} for r in records]


def rates(method: str) -> list[float]:
    """All that its grid may come to."""
    return [float(f"{METHODS[method].optim['lr'] * rate:.3g}") for rate in RATES]


def grid(method: str, records: Iterable[Record] = ()) -> dict[float, list[float]]:
    """The losses of each learning rate of the grid, on its seeds, as far as they have been run: rates for SIZE of RATES
    next to each other, moved on by one while all of them have been run, and the best is the first or the last."""
    found: dict[float, list[float]] = {lr: [] for lr in rates(method)}
    for r in records:
        if r["method"] == method and r["seed"] in TUNING_SEEDS and r["steps"] == STEPS and r["lr"] in found:
            found[r["lr"]].append(r["heldout_loss"])
    first = FIRST
    while True:
        out = dict(list(found.items())[first : first + SIZE])
        if any(len(losses) < len(TUNING_SEEDS) for losses in out.values()):
            return out
        at = [statistics.mean(losses) for losses in out.values()]
        if min(at) == at[0] and first > 0:
            first -= 1
        elif min(at) == at[-1] and first + SIZE < len(found):
            first += 1
        else:
            return out


def best(records: Iterable[Record], method: str) -> float | None:
    """The learning rate with the least mean loss over the grid's seeds, once all of it has been run."""
    found = grid(method, records)
    if any(len(losses) < len(TUNING_SEEDS) for losses in found.values()):
        return None
    return min(found, key=lambda lr: statistics.mean(found[lr]))


def optim_of(method: str, lr: float) -> dict[str, Any]:
    """Its ``optim`` section at a learning rate. SignMomentum has the outer one with it: its rounds end with a step of
    size outer_lr lr, whatever the inner steps are."""
    optim = METHODS[method].optim
    if optim["name"] == "SignMomentum":
        optim = {**optim, "args": {**optim["args"], "outer_lr": SIGN_STEP / lr}}
    return {**optim, "lr": lr}


def key_of(run: Record) -> tuple[Any, ...]:
    return run["method"], run["lr"], run["seed"], run["steps"]


def missing(records: list[Record], methods: list[str], seeds: list[int], steps: int) -> list[Record]:
    """What is to be run next: the grids that are not complete, or else the seeds."""
    done = {key_of(r) for r in records}
    runs = [
        {"method": method, "lr": lr, "seed": seed, "steps": STEPS}
        for method in methods
        for seed in TUNING_SEEDS
        for lr in grid(method, records)
    ]
    todo = [run for run in runs if key_of(run) not in done]
    if not todo:
        chosen = {method: best(records, method) for method in methods}
        runs = [{"method": m, "lr": chosen[m], "seed": seed, "steps": steps} for seed in seeds for m in methods]
        todo = [run for run in runs if key_of(run) not in done]
    return todo


def launch(runs: list[Record], ranks: int, out: Path) -> None:
    """All of ``runs`` in ``ranks`` processes, one after another."""
    with tempfile.TemporaryDirectory() as folder:
        spec = Path(folder, "runs.json")
        spec.write_text(json.dumps(runs))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += [str(ROOT / "scripts" / "tuned_rank.py"), str(spec), str(out), folder]
        threads = max(1, (os.cpu_count() or 1) // ranks)
        subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": str(threads)}, check=True)


def rows(records: list[Record], steps: int) -> list[Record]:
    """A row for each method that has been run on reported seeds: its rate, loss, spread, gap, and what it sends."""
    out: dict[str, Record] = {}
    for method, of in METHODS.items():
        lr = best(records, method)
        same = [r for r in records if (r["method"], r["lr"], r["steps"]) == (method, lr, steps)]
        runs = [r for r in same if r["seed"] not in TUNING_SEEDS]
        if not runs:
            continue
        losses = [run["heldout_loss"] for run in runs]
        out[method] = {
            "method": method,
            "lr": lr,
            "edge": lr in (min(tried := grid(method, records)), max(tried)),
            "seeds": {run["seed"]: run["heldout_loss"] for run in runs},
            "loss": statistics.mean(losses),
            "spread": max(losses) - min(losses),
            "sent": sum(run["bytes"] for run in runs) / sum(run["fp32_bytes"] for run in runs),
            "against": of.counterpart if of.counterpart in out else None,
        }
    for row in out.values():
        if row["against"] is not None:
            other = out[row["against"]]
            both = row["seeds"].keys() & other["seeds"].keys()
            row["gap"] = statistics.mean(row["seeds"][s] - other["seeds"][s] for s in both) if both else math.nan
            row["passed"] = row["gap"] <= max(row["spread"], other["spread"])
    return list(out.values())


def table(found: list[Record]) -> str:
    """As Markdown."""
    head = ["optimizer", "learning rate", "seeds", "held-out loss", "spread", "against", "gap", "within", "sent"]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for row in found:
        against = ["", "", ""]
        if row["against"] is not None:
            against = [row["against"], f"{row['gap']:+.3f}", "yes" if row["passed"] else "no"]
        rate = f"{row['lr']:.2g}" + (" (edge)" if row["edge"] else "")
        cells = [row["method"], rate, str(len(row["seeds"])), f"{row['loss']:.3f}", f"{row['spread']:.3f}", *against]
        lines.append("| " + " | ".join([*cells, share(row["sent"])]) + " |")
    return "\n".join(lines)


def share(sent: float) -> str:
    """As per cent."""
    return f"{100 * sent:.1f} %" if sent >= 0.01 else f"{100 * sent:.2f} %"


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
    lines = ["| sent | of all methods | held-out loss | of those with Adam | held-out loss |", "|" + " --- |" * 5]
    for sent in sorted({row["sent"] for rows in columns for row in rows}):
        cells = [share(sent)]
        for rows in columns:
            here = [row for row in rows if row["sent"] == sent]
            cells += [here[0]["method"], f"{here[0]['loss']:.3f}"] if here else ["", ""]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def update_docs(records: list[Record], root: Path = ROOT) -> None:
    parts = []
    for steps in sorted({r["steps"] for r in records}):
        found = rows(records, steps)
        if found:
            parts += [f"**{steps} steps:**", table(found)]
    best_for = f"**The best for the bytes**, {STEPS} steps: nothing that sends as few ended lower."
    parts += [best_for, table_of_bytes(rows(records, STEPS))]
    put("\n\n".join(parts), root / "docs" / "convergence.md", MARKS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", help="with commas (default: all)")
    parser.add_argument("--seeds", default="0,1,2,3,4", help="with commas (default: 0,1,2,3,4)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of the runs after the grid (default: {STEPS})")
    parser.add_argument("--ranks", type=int, default=4, help="processes (default: 4)")
    parser.add_argument("--out", type=Path, default=FIGURES, help="the file of figures")
    parser.add_argument("--update-docs", action="store_true", help="the tables, from the figures; no run")
    args = parser.parse_args()
    if args.update_docs:
        return update_docs(read(args.out))
    methods = args.methods.split(",") if args.methods else list(METHODS)
    unknown = [name for name in methods if name not in METHODS]
    if unknown:
        parser.error(f"argument --methods: there is no {unknown[0]!r}; allowed are {', '.join(METHODS)}")
    seeds = [int(seed) for seed in args.seeds.split(",")]
    while runs := missing(read(args.out), methods, seeds, args.steps):
        launch(runs, args.ranks, args.out)
    for steps in dict.fromkeys((STEPS, args.steps)):
        print(table(rows(read(args.out), steps)))


if __name__ == "__main__":
    main()
