#!/usr/bin/env python3
"""What ``commopt probe`` predicts for the networks on which scripts/bench_network.py has measured, beside that.

    scripts/bench_probe.py                     # probes the beds of benchmarks/network_gradients.json; writes probe.json
    scripts/bench_probe.py --update-docs       # the table in docs/probe.md, from both; no run

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
MEASURED, PREDICTED = (ROOT / "benchmarks" / name for name in ("network_gradients.json", "probe.json"))
PAGE = ROOT / "docs" / "probe.md"
MARKS = "<!-- probe: made by scripts/bench_probe.py --update-docs -->", "<!-- /probe -->"


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
            1,
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
    others = (busy_seconds() - busy - (_own() - before)) / (time.perf_counter() - start) / (os.cpu_count() or 1)
    return {
        "hosts": run["hosts"],
        "rate": run["rate"],
        "command": shlex.join(["commopt", "probe", *given]),
        "others_share": max(0.0, others),
        "seconds": {name: step["seconds"] for name, step in found["steps"].items()},
        "bytes": {name: step["nbytes"] for name, step in found["steps"].items()},
        "advice": found["advice"],
    }


def _own() -> float:
    """CPU seconds of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def table(measured: list[dict[str, Any]], predicted: list[dict[str, Any]]) -> str:
    """Markdown: seconds of a step, and how many times as fast as DDP's, measured and predicted; how far others
    disturbed either; and what the probe recommends."""
    lines = ["| link | method | measured | predicted | speed measured | predicted |", "|---|---|---|---|---|---|"]
    notes = []
    for guess in predicted:
        run = next(run for run in measured if (run["hosts"], run["rate"]) == (guess["hosts"], guess["rate"]))
        link, ours = f"{guess['hosts']} hosts, {guess['rate']}", guess["seconds"]
        for name, method in run["methods"].items():
            if name not in ours or name == "none":
                continue
            seconds = method["seconds_median"]
            speeds = run["methods"]["ddp"]["seconds_median"] / seconds, ours["ddp"] / ours[name]
            lines.append(
                f"| {link} | {method['label']} | {1e3 * seconds:.0f} ms | {1e3 * ours[name]:.0f} ms "
                f"| {speeds[0]:.2f} | {speeds[1]:.2f} |"
            )
            link = ""
        notes.append(
            f"{guess['hosts']} hosts, {guess['rate']}: others had {100 * run['others_share']:.0f} % of the cores while "
            f"it was measured, and {100 * guess['others_share']:.0f} % while it was predicted, by "
            f"`{guess['command']}`. The probe's advice: *{guess['advice']}*"
        )
    return "\n\n".join(["\n".join(lines), *notes])


def update_docs() -> None:
    """Writes the table into its page."""
    measured, predicted = (json.loads(path.read_text())["runs"] for path in (MEASURED, PREDICTED))
    put(table(measured, predicted), PAGE, MARKS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-mb", type=float, default=16, help="largest message that is timed (default: 16)")
    parser.add_argument("--timeout", type=float, default=900, help="seconds after which a probe is ended")
    parser.add_argument("--update-docs", action="store_true", help="only the table, from what is there")
    args = parser.parse_args()
    if not args.update_docs:
        exit_on_signals()
        try:
            runs = [probe(run, args.max_mb, args.timeout) for run in json.loads(MEASURED.read_text())["runs"]]
        except BedError as error:
            print(f"bench_probe: {error}", file=sys.stderr)
            return 2
        PREDICTED.write_text(json.dumps({"runs": runs}, indent=1) + "\n")
    update_docs()
    return 0


if __name__ == "__main__":
    sys.exit(main())
