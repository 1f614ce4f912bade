#!/usr/bin/env python3
"""How long until a model is as good as DDP with AdamW makes it? Whole training runs on a network of a chosen speed.

    scripts/time_to_loss.py --hosts 2 --rate 100mbit --estimate       # what would be run, and for how long; no run
    scripts/time_to_loss.py --hosts 2,4 --rate 100mbit,1gbit --json benchmarks/time_to_loss.json
    scripts/time_to_loss.py --hosts 2 --rate 100mbit --methods onebit_adam,diloco --seeds 3
    scripts/time_to_loss.py --update-docs     # table and picture in docs, from benchmarks/time_to_loss.json; no run

The GPT of configs/gpt_quick.yaml is trained by ``commopt train``'s loop on the hosts of scripts/netbed.py, once by
every method: from the same weights, on the same samples in the same order, and evaluated at the same steps. The loss
to be reached is what DDP with AdamW ends at, with the same seed, and a margin. The clock runs from the first step until
the evaluation that has found it, with everything between: warm-up, evaluations, waiting. Bytes are the NIC's own count,
mean of the hosts. A run ends with its schedule, or at the limit, which is a multiple of DDP's time.

A run that has finished is a line in the folder of --runs; a call that is started again goes on from there, and figures
are of all runs in it with the same settings, whichever call has made them. What comes after -- are further arguments of
``commopt train`` for all methods.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench_network import DISTURBED, machine, positive
from netbed import BedError, Loopback, NetBed, exit_on_signals, parse_rate
from time_to_loss_methods import METHODS, SCHEDULE, resolved
from time_to_loss_report import BOUND, MARGIN, RIVAL, draw, page, tables, update_page

from commopt.train.config import CommConfig, Config, OptimConfig
from commopt.train.errors import UserError
from commopt.train.optimizer import check_plan
from commopt.train.parse import from_dict, parse

ROOT = Path(__file__).resolve().parent.parent
FIGURES, PAGE = ROOT / "benchmarks" / "time_to_loss.json", ROOT / "docs" / "time_to_loss.md"
OTHERS = {
    "time_to_loss_slow.json": "With today's `min_variance`, on another machine",
    "time_to_loss_more.json": "Methods that are not above, and with today's `min_variance`",
    "time_to_loss_small.json": "With one sample a host and step, not four: computing is an 11th of DDP's step",
    "time_to_loss_refreshes.json": "0/1 Adam whose refreshes are compressed",
    "time_to_loss_refreshes_small.json": "0/1 Adam whose refreshes are compressed, with one sample a host and step",
}
"""Further figures, beside these, and what is different there."""
RECIPE = [str(ROOT / "configs" / "gpt_quick.yaml"), "--train.batch_size=8"]
"""Half the recipe's batch: a step of computing is short against what a step of DDP sends, as it is on a GPU."""

Record = dict[str, Any]

# runs -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One training run, and what makes it the same as another."""

    hosts: int
    rate: str
    method: str
    seed: int
    config: Config
    hook: dict[str, Any] | None = field(default=None)

    @property
    def key(self) -> Record:
        """JSON: all that decides what is trained and on what."""
        config = dataclasses.asdict(self.config)
        config["train"].pop("run_dir")
        config["data"].pop("cache_dir")
        key = {"hosts": self.hosts, "rate": self.rate, "method": self.method, "seed": self.seed}
        return json.loads(json.dumps(key | {"hook": self.hook, "config": config}))  # type: ignore[no-any-return]

    @property
    def name(self) -> str:
        return f"{self.hosts}-{self.rate}-{self.method}-{self.seed}"


@functools.cache
def recipe(*further: str) -> Config:
    """The config of all runs, but for what is a method's own."""
    return parse([*RECIPE, *further])


def make_run(hosts: int, rate: str, name: str, seed: int, args: argparse.Namespace) -> Run:
    """The run of a method. Raises UserError for a config that cannot be."""
    method = METHODS[name]
    steps = round(method.stretch * args.steps)
    often = {"eval_every": args.eval_every, "eval_samples": args.eval_samples, "log_every": args.eval_every}
    base = recipe(*args.further)
    config = dataclasses.replace(
        base,
        optim=from_dict(resolved({**SCHEDULE, **method.optim}, steps), OptimConfig),
        comm=from_dict({"timeout": 120.0, "compress": method.compress}, CommConfig),
        train=dataclasses.replace(base.train, steps=steps, seed=seed, checkpoint_every=steps, keep=1, **often),
    )
    check_plan(config)
    return Run(hosts, rate if method.network else "none", name, seed, config, resolved(method.hook, steps))


def plan(args: argparse.Namespace) -> list[Run]:
    """All runs that were asked for, once each, the rival's first: it says what is to be reached, and in which time.
    With seeds of which the rival is not run, the bound's, which computes the same."""
    runs = [
        make_run(hosts, rate, name, seed, args)
        for hosts in args.hosts
        for rate in args.rate
        for seed in range(args.seeds)
        for name in dict.fromkeys([RIVAL if seed < args.rival_seeds else BOUND, *args.methods])
    ]
    return list({run.name: run for run in runs}.values())


def read_records(path: Path) -> list[Record]:
    """The runs that have finished; a line that was cut off is none."""
    records = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            records.append(json.loads(line))
    return records


def add_record(path: Path, record: Record) -> None:
    """Adds a line, below one that was cut off."""
    whole = not path.exists() or path.read_bytes()[-1:] in (b"", b"\n")
    with path.open("a") as file:
        file.write("" if whole else "\n")
        file.write(json.dumps(record) + "\n")


def find(run: Run, records: Iterable[Record]) -> Record | None:
    """The newest record of ``run``."""
    return next((record for record in reversed(list(records)) if record["key"] == run.key), None)


def collected(records: Sequence[Record], args: argparse.Namespace) -> list[Record]:
    """The newest record of every run that ``args`` would make in the same way, in the order of the methods."""
    runs: dict[str, tuple[Run, Record]] = {}
    for record in records:
        where = record["hosts"], record["rate"], record["method"], record["seed"]
        if record["method"] in METHODS and (run := make_run(*where, args)).key == record["key"]:
            runs[run.name] = run, record
    order = list(METHODS)
    kept = sorted(runs.values(), key=lambda pair: (pair[0].hosts, order.index(pair[0].method), pair[0].seed))
    return [record for _, record in kept]


def start(run: Run, limit: float, folder: Path, timeout: float) -> Record:
    """Trains; what it has come to. Raises BedError if it fails."""
    place = folder / run.name
    shutil.rmtree(place, ignore_errors=True)  # of a run that was not finished
    place.mkdir(parents=True)
    config = dataclasses.replace(run.config, train=dataclasses.replace(run.config.train, run_dir=str(place / "run")))
    out, spec = place / "curve.jsonl", place / "spec.json"
    given = {"config": dataclasses.asdict(config), "hook": run.hook, "limit": limit, "out": str(out)}
    spec.write_text(json.dumps(given))
    bed = NetBed(run.hosts, parse_rate(run.rate)) if METHODS[run.method].network else Loopback(run.hosts)
    python = os.environ.get("PYTHON_EXEC", sys.executable)  # as torchrun does it
    command, load = [python, str(ROOT / "scripts" / "time_to_loss_rank.py"), str(spec)], os.getloadavg()[0]
    with bed, (place / "log.txt").open("w") as log:
        quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
        with contextlib.closing(bed.start(command, env=quiet, stdout=log, stderr=log)) as job:
            code = job.wait(timeout)
        cores = len(set().union(*bed.cores))
    lines = read_records(out)
    if code or not lines or "ended" not in lines[-1]:
        raise BedError(f"{run.name}: exit code {code}\n{(place / 'log.txt').read_text()[-3000:]}")
    shutil.rmtree(place / "run" / "checkpoints", ignore_errors=True)
    facts = {"cores": cores, "load": load, "limit": limit if limit < float("inf") else None}
    ended = lines.pop()
    settings = {key: getattr(run, key) for key in ("hosts", "rate", "method", "seed")} | {"steps": config.train.steps}
    return {"key": run.key, **settings, **ended, **facts, **others(lines), "curve": lines}


def others(curve: Sequence[Record]) -> Record:
    """Share of the machine's cores that processes other than the ranks had."""
    if not curve:
        return {"others_share": 0.0}
    last = curve[-1]
    return {"others_share": max(0.0, last["busy"] - last["own"]) / (last["seconds"] * (os.cpu_count() or 1))}


def check_data(record: Record, rival: Record) -> None:
    """Raises BedError unless both runs began with the same weights and have had the same samples."""
    theirs = {point["step"]: point["data"] for point in rival["curve"]}
    for point in record["curve"]:
        if theirs.get(point["step"], point["data"]) != point["data"]:
            raise BedError(f"{record['method']}: not the weights and samples of {RIVAL} at step {point['step']}")


# how long -------------------------------------------------------------------------------------------------------------


START = 20
"""Seconds until a run has begun, and after its end."""


def estimate(run: Run, records: Sequence[Record], step: float, parameters: int) -> float:
    """Seconds that a run is likely to take: as its kind has taken, or else by the ``step`` of one host, and bytes."""
    train, what = run.config.train, ("hosts", "rate", "method")
    alike = [r for r in records if r["curve"] and all(r[key] == getattr(run, key) for key in what)]
    if alike:
        last = alike[-1]["curve"][-1]
        return START + train.steps * last["seconds"] / last["step"]
    sharing = max(1.0, run.hosts / len(os.sched_getaffinity(0)))
    forwards = train.eval_samples / train.batch_size / 3 / train.eval_every  # an evaluation, in steps
    sent = METHODS[run.method].sent * 2 * (run.hosts - 1) / run.hosts * 4 * parameters
    rate = parse_rate(run.rate)
    wire = 8 * sent / rate if rate else 0.0
    return START + train.steps * (sharing * step * (1 + forwards) + 1.1 * wire)


def step_of_one_host(config: Config, hosts: int) -> tuple[float, int]:
    """Seconds of forward and backward of a host's share of the batch on one core, and the number of parameters."""
    import torch

    from commopt.train.models import make_model

    torch.set_num_threads(1)
    model, train = make_model(config, config.data.vocab_size), config.train
    tokens = torch.randint(0, config.data.vocab_size, (max(1, train.batch_size // hosts), config.data.seq_len))
    for _ in range(3):  # the last one counts
        began = time.perf_counter()
        model(tokens, tokens).backward()
        seconds = time.perf_counter() - began
    return 1.25 * seconds, sum(p.numel() for p in model.parameters())  # the optimizer, too


def show_plan(runs: Sequence[Run], records: Sequence[Record]) -> dict[str, float]:
    """Seconds of the runs that are still to be done, by name; says them."""
    costs = {hosts: step_of_one_host(runs[0].config, hosts) for hosts in {run.hosts for run in runs}}
    left = {r.name: estimate(r, records, *costs[r.hosts]) for r in runs if find(r, records) is None}
    for name, seconds in left.items():
        print(f"  {name}: about {seconds / 60:.1f} min", file=sys.stderr)
    total = f"{len(left)} of {len(runs)} runs to do, about {sum(left.values()) / 60:.0f} min"
    load = os.getloadavg()[0]
    print(f"{total}; load average {load:.2f}{', others disturb' * (load > 0.5)}", file=sys.stderr, flush=True)
    return left


def published() -> tuple[Record | None, list[tuple[str, Record]]]:
    """The figures that are committed; and further ones, each with what is different there."""
    paths = {what: FIGURES.with_name(name) for name, what in OTHERS.items()}
    others = [(what, json.loads(path.read_text())) for what, path in paths.items() if path.exists()]
    return json.loads(FIGURES.read_text()) if FIGURES.exists() else None, others


# the command ----------------------------------------------------------------------------------------------------------


def names(text: str) -> list[str]:
    chosen = text.split(",")
    if unknown := [name for name in chosen if name not in METHODS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r}: expected some of {', '.join(METHODS)}")
    return chosen


def arguments() -> argparse.Namespace:
    usage = "%(prog)s [options] [-- --KEY=VALUE ...]"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], usage=usage)
    parser.add_argument("--hosts", default="2", help="numbers of hosts, with commas (default: 2)")
    parser.add_argument("--rate", default="100mbit,1gbit", help="rates, with commas (default: 100mbit,1gbit)")
    parser.add_argument("--methods", type=names, default=list(METHODS), help=f"with commas, of {', '.join(METHODS)}")
    parser.add_argument("--seeds", type=positive(int), default=1, help="how many, from 0 on (default: 1)")
    parser.add_argument(
        "--rival-seeds", type=positive(int), default=10**6, help="with how many of them DDP is run on the network (all)"
    )
    parser.add_argument("--steps", type=positive(int), default=512, help="of DDP with AdamW (default: 512)")
    parser.add_argument("--eval-every", type=positive(int), default=16, help="steps (default: 16)")
    parser.add_argument("--eval-samples", type=positive(int), default=128, help="of an evaluation (default: 128)")
    parser.add_argument("--limit", type=positive(float), default=1.5, help="over DDP's time (default: 1.5)")
    parser.add_argument("--margin", type=float, default=MARGIN, help=f"in nats, over DDP's last loss ({MARGIN})")
    parser.add_argument("--runs", type=Path, default=Path("runs/time_to_loss"), help="folder of what has finished")
    parser.add_argument("--estimate", action="store_true", help="only say what would be run, and for how long")
    parser.add_argument("--repeat-disturbed", action="store_true", help="repeat runs that others have disturbed")
    parser.add_argument("--timeout", type=positive(float), default=7200, help="seconds after which a run has failed")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--png", type=Path, help="draw them into this file")
    parser.add_argument("--update-docs", action="store_true", help=f"from {FIGURES.name}; no run")
    parser.add_argument("further", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    try:
        args.hosts = [int(hosts) for hosts in args.hosts.split(",")]
    except ValueError:
        parser.error(f"--hosts {args.hosts}: expected integers with commas between")
    args.rate = args.rate.split(",")
    return args


def run_all(args: argparse.Namespace) -> list[Record]:
    """Makes the runs that were asked for and are not yet there; the records of all that there are."""
    runs, path = plan(args), args.runs / "results.jsonl"
    records = read_records(path)
    if args.repeat_disturbed:
        records = [record for record in records if record["others_share"] <= DISTURBED]
    left = show_plan(runs, records)
    if args.estimate:
        return []
    args.runs.mkdir(parents=True, exist_ok=True)
    found: list[Record] = []
    for run in runs:
        rival = RIVAL if run.seed < args.rival_seeds else BOUND
        theirs = [r for r in found if (r["method"], r["hosts"], r["seed"]) == (rival, run.hosts, run.seed)]
        rivals = [r for r in found if (r["method"], r["hosts"]) == (RIVAL, run.hosts)]
        record = find(run, records)
        if record is None:
            took = [r["curve"][-1]["seconds"] for r in rivals if run.rate in (r["rate"], "none")]
            limit = float("inf") if run.method == rival else args.limit * max(took, default=float("inf"))
            record = start(run, limit, args.runs, args.timeout)
            records.append(record)
            add_record(path, record)
            tell(run, record)
            left.pop(run.name)
            print(f"  about {sum(left.values()) / 60:.0f} min left", file=sys.stderr, flush=True)
        if run.method == rival and not (record["curve"] and record["curve"][-1]["loss"] is not None):
            raise BedError(f"{run.name} has no loss at its end that others could reach: {record['ended']}")
        for known in theirs[:1]:
            check_data(record, known)
        found.append(record)
    return collected(records, args)


def told(key: Record) -> Record:
    """What of a run's key is of its method."""
    return {"optim": key["config"]["optim"], "compress": key["config"]["comm"]["compress"], "hook": key["hook"]}


def tell(run: Run, record: Record) -> None:
    last = record["curve"][-1] if record["curve"] else {"loss": None, "seconds": 0.0, "step": 0}
    words = f"{run.name}: held-out loss {last['loss']} after {last['step']} steps, {last['seconds']:.0f} s"
    disturbed = f"; OTHER PROCESSES HAD {100 * record['others_share']:.0f} % OF THE CORES"
    print(words + disturbed * (record["others_share"] > DISTURBED), file=sys.stderr, flush=True)


def main() -> int:
    args = arguments()
    if args.update_docs:
        figures, others = published()
        update_page(page(figures, others), PAGE)
        if figures:
            draw(figures, PAGE.with_suffix(".png"))
        return 0
    exit_on_signals()
    try:
        records = run_all(args)
    except (BedError, UserError) as error:
        print(f"time_to_loss: {error}", file=sys.stderr)
        return 2
    if not records:
        return 0
    command = shlex.join(["scripts/time_to_loss.py", *sys.argv[1:]])
    labels = {name: [method.label, method.source] for name, method in METHODS.items()}
    runs = [{key: value for key, value in record.items() if key != "key"} | told(record["key"]) for record in records]
    figures = {"machine": machine(), "command": command, "margin": args.margin, "labels": labels, "runs": runs}
    print(tables(figures))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    if args.png:
        draw(figures, args.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
