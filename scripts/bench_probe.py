#!/usr/bin/env python3
"""What ``commopt probe`` predicts for the networks on which scripts/bench_network.py has measured, beside that.

    scripts/bench_probe.py                     # probes the beds of benchmarks/network_gradients.json and nodes.json
    scripts/bench_probe.py --beds nodes        # those of one of them; what was predicted for the others stays
    scripts/bench_probe.py --hosts 4           # those of so many hosts; --rate 100mbit: at that rate
    scripts/bench_probe.py --update-docs       # the table in docs/probe.md, from all; no run

The probe is told what it asks for: the parameters of that model, how many its tied embedding has, its width, and the
seconds of a step without communication, which are those measured there. So run it on the machine, and in the hour, in
which these were. As everywhere, nothing else should run meanwhile; how much of the cores others had is written down.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from marked import put
from netbed import BedError, NetBed, exit_on_signals, parse_latency, parse_rate
from network_rank import busy_seconds

ROOT = Path(__file__).resolve().parent.parent
BEDS = ("network_gradients", "nodes")
"""Files with measurements."""
PREDICTED = ROOT / "benchmarks" / "probe.json"
PAGE = ROOT / "docs" / "probe.md"
MARKS = "<!-- probe: made by scripts/bench_probe.py --update-docs -->", "<!-- /probe -->"


def measured(beds: str) -> list[dict[str, Any]]:
    """The runs of one of ``BEDS``."""
    runs: list[dict[str, Any]] = json.loads((ROOT / "benchmarks" / f"{beds}.json").read_text())["runs"]
    return runs


def arguments_of(run: dict[str, Any], max_mb: float) -> list[str]:
    """What the probe is told of the model that was measured."""
    given = {
        "params": run["parameters"],
        "last-params": run["vocab"] * run["width"],
        "width": run["width"],
        "step-time": round(run["methods"]["none"]["seconds_median"], 4),
        "max-mb": max_mb,
    }
    return [f"--{name}={value}" for name, value in given.items()]


def probe(run: dict[str, Any], max_mb: float, timeout: float) -> dict[str, Any]:
    """Predictions for the bed of a run."""
    given = arguments_of(run, max_mb)
    with tempfile.TemporaryDirectory() as folder:
        out, before, busy, start = Path(folder, "probe.json"), _own(), busy_seconds(), time.perf_counter()
        place = (
            run["hosts"],
            parse_rate(run["rate"]),
            run["ranks_per_host"],
            run["cores_per_host"],
            parse_latency(run.get("latency", "0ms")),
        )
        python = os.environ.get("PYTHON_EXEC", sys.executable)  # as torchrun does it
        with (
            NetBed(*place) as bed,
            contextlib.closing(bed.start([python, "-m", "commopt", "probe", *given, f"--json={out}"])) as job,
        ):
            code = job.wait(timeout)
        if code:
            raise BedError(f"the probe failed; exit code {code}")
        found = json.loads(out.read_text())
    steps = dict(found["steps"])
    for name, step in (found["machines"] or {"steps": {}})["steps"].items():
        steps[f"{name}_nodes"] = step
    others = (busy_seconds() - busy - (_own() - before)) / (time.perf_counter() - start) / (os.cpu_count() or 1)
    return {
        "hosts": run["hosts"],
        "ranks_per_host": run["ranks_per_host"],
        "rate": run["rate"],
        "command": shlex.join(["commopt", "probe", *given]),
        "others_share": max(0.0, others),
        "seconds": {name: step["seconds"] for name, step in steps.items()},
        "bytes": {name: step["nbytes"] for name, step in steps.items()},
        "advice": found["advice"],
    }


def _own() -> float:
    """CPU seconds of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def place_of(run: dict[str, Any]) -> str:
    """Its bed, in words."""
    ranks = "" if run["ranks_per_host"] == 1 else f" of {run['ranks_per_host']} ranks"
    return f"{run['hosts']} hosts{ranks}, {run['rate']}"


def table(measured: list[dict[str, Any]], predicted: list[dict[str, Any]]) -> str:
    """Markdown: seconds of a step, and how many times as fast as DDP's, measured and predicted; how far others
    disturbed either; and what the probe recommends."""
    lines = ["| link | method | measured | predicted | speed measured | predicted |", "|---|---|---|---|---|---|"]
    notes, runs = [], {place_of(run): run for run in measured}
    for guess in predicted:
        if (link := place_of(guess)) not in runs:  # its bed has not been measured again
            continue
        run, ours = runs[link], guess["seconds"]
        for name, method in run["methods"].items():
            if name not in ours or name.startswith("none"):
                continue
            seconds = method["seconds_median"]
            speeds = run["methods"]["ddp"]["seconds_median"] / seconds, ours["ddp"] / ours[name]
            lines.append(
                f"| {link} | {method['label']} | {1e3 * seconds:.0f} ms | {1e3 * ours[name]:.0f} ms "
                f"| {speeds[0]:.2f} | {speeds[1]:.2f} |"
            )
            link = ""
        notes.append(
            f"{place_of(guess)}: others had {100 * run['others_share']:.0f} % of the cores while "
            f"it was measured, and {100 * guess['others_share']:.0f} % while it was predicted, by "
            f"`{guess['command']}`. The probe's advice: *{guess['advice']}*"
        )
    return "\n\n".join(["\n".join(lines), *notes])


def update_docs() -> None:
    """Writes the table into its page."""
    put(table([run for beds in BEDS for run in measured(beds)], json.loads(PREDICTED.read_text())["runs"]), PAGE, MARKS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-mb", type=float, default=16, help="largest message that is timed (default: 16)")
    parser.add_argument("--beds", choices=BEDS, help="probe those of this file alone (default: all)")
    parser.add_argument("--hosts", type=int, help="probe beds of so many hosts alone (default: all)")
    parser.add_argument("--rate", help="probe beds of this rate alone, as it is written there (default: all)")
    parser.add_argument("--timeout", type=float, default=900, help="seconds after which a probe is ended")
    parser.add_argument("--update-docs", action="store_true", help="only the table, from what is there")
    args = parser.parse_args()
    if not args.update_docs:
        exit_on_signals()
        try:
            again = [run for beds in BEDS if args.beds in (None, beds) for run in measured(beds)]
            again = [run for run in again if args.hosts in (None, run["hosts"]) and args.rate in (None, run["rate"])]
            runs = [probe(run, args.max_mb, args.timeout) for run in again]
        except BedError as error:
            print(f"bench_probe: {error}", file=sys.stderr)
            return 2
        known = json.loads(PREDICTED.read_text())["runs"] if PREDICTED.exists() else []
        runs = [run for run in known if place_of(run) not in map(place_of, runs)] + runs
        PREDICTED.write_text(json.dumps({"runs": runs}, indent=1) + "\n")
    update_docs()
    return 0


if __name__ == "__main__":
    sys.exit(main())
