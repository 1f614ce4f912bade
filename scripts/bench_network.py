#!/usr/bin/env python3
"""What a training step costs on a network of a chosen speed, method against method in one run.

    scripts/bench_network.py --hosts 2 --rate 100mbit,1gbit --methods none,ddp,ddp_powersgd4,onebit_adam
    scripts/bench_network.py --hosts 2,3,4,8 --rate none --methods ddp,onebit_adam --rounds 2     # bytes per rank
    scripts/bench_network.py --update-docs     # tables and picture in docs, from benchmarks/network*.json; no run

A GPT-2 of the given size trains on fixed random tokens, on the hosts of scripts/netbed.py. All methods live in the
same processes and take turns, a block of steps each, in rounds; a ratio is that of two blocks of one round. The first
step of a block is not counted; where fragments are in flight when it ends, the first cycle is not, so that as many are
when it begins. Seconds are from barrier to barrier, divided by the steps between; bytes are those that
the NIC has counted in the same time, headers and acknowledgements included, mean of the hosts. OneBitAdam is in its
compressed phase, PowerSGD past its warm-up. The bound is max(seconds of ``none``, bytes / rate): with that optimizer's
arithmetic, no order of communication and computation could be faster. Rounds in which other processes had more than a
tenth of the machine do not count, unless all are like that.

The methods hsdp... have models that FSDP2 shards inside a host (--ranks-per-host 2); their bound is by ``hsdp_none``.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from netbed import BedError, Loopback, NetBed, NotRoot, exit_on_signals, parse_latency, parse_rate
from network_rank import METHODS
from network_report import BY_RATE, RATIOS, by_rate, caveats, draw, summary, table, title, update_page

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "benchmarks" / "network.json"
DISTURBED = 0.1  # a round counts if other processes had no more than this share of the machine's cores
APART = ("nodes", "hsdp", "loco", "buckets")  # in names of methods that are not measured unless named
SHAPE = ("layers", "width", "vocab", "sequence", "batch")


def make_bed(hosts: int, rate: str, args: argparse.Namespace) -> Loopback:
    try:
        return NetBed(hosts, parse_rate(rate), args.ranks_per_host, args.cores, parse_latency(args.latency))
    except NotRoot as error:
        print(f"bench_network: {error}: ON LOOPBACK INSTEAD, WITHOUT ANY RATE", file=sys.stderr)
        return Loopback(hosts, args.ranks_per_host, args.cores)


def run(bed: Loopback, args: argparse.Namespace, rate: str) -> dict[str, Any]:
    """All methods on one bed; what they took, summarised."""
    spec: dict[str, Any] = {key: getattr(args, key) for key in (*SHAPE, "methods", "rounds", "seconds")}
    spec |= {"hosts": bed.hosts, "bed": "namespaces" if isinstance(bed, NetBed) else "loopback"}
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        python = os.environ.get("PYTHON_EXEC", sys.executable)  # as torchrun does it
        command = [python, str(ROOT / "scripts" / "network_rank.py"), json.dumps(spec), str(out)]
        with contextlib.closing(bed.start(command, env={"TORCH_CPP_LOG_LEVEL": "ERROR"})) as job:
            code = job.wait(args.timeout)
        if code:
            raise BedError(f"a rank failed; exit code {code}")
        measured = json.loads(out.read_text())
    blocks = undisturbed(measured["blocks"])
    methods = summarise(blocks, bed, args.batch * args.sequence)
    return {
        "hosts": bed.hosts,
        "ranks_per_host": bed.ranks_per_host,
        "cores_per_host": len(bed.cores[0]),
        "cores": len(set().union(*bed.cores)),
        "rate": rate,
        "latency": args.latency,
        "bed": spec["bed"],
        "command": shlex.join(["scripts/bench_network.py", *sys.argv[1:]]),
        "load": load,
        **{key: spec[key] for key in SHAPE},
        **measured["facts"],
        "rounds": args.rounds,
        "rounds_used": len(next(iter(blocks[0].values()))),
        "others_share": others_share(blocks),
        "methods": {name: method | {"collectives": measured["collectives"][name]} for name, method in methods.items()},
    }


def undisturbed(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Only the rounds in which other processes had little of the machine; all if there are none. blocks: by rank."""

    def only(rounds: list[int]) -> list[dict[str, Any]]:
        return [{name: [all_rounds[i] for i in rounds] for name, all_rounds in rank.items()} for rank in blocks]

    every = list(range(len(next(iter(blocks[0].values())))))
    return only([i for i in every if others_share(only([i])) <= DISTURBED] or every)


def others_share(blocks: list[dict[str, Any]]) -> float:
    """Share of the machine's cores that processes other than the ranks had while something was measured."""
    own = sum(block["own"] for rank in blocks for method in rank.values() for block in method)
    first = [block for method in blocks[0].values() for block in method]
    busy, wall = (sum(block[key] for block in first) for key in ("busy", "block"))
    return max(0.0, (busy - own) / (wall * (os.cpu_count() or 1)))


def key(run: dict[str, Any]) -> tuple[Any, ...]:
    """What makes two runs the same measurement."""
    names = ("hosts", "ranks_per_host", "cores_per_host", "rate", "bed", *SHAPE)
    return run.get("latency", "0ms"), *(run[name] for name in names)


def machine() -> dict[str, Any]:
    cpu = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    tcp = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    return {
        "cpu": cpu.partition(":")[2].strip(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "tcp": tcp,
        "torch": torch.__version__,
    }


def summarise(blocks: list[dict[str, Any]], bed: Loopback, tokens: int) -> dict[str, Any]:
    """Medians, quartiles and ratios of the methods. blocks: by rank; tokens: of one rank in one step."""
    counted = 1 if isinstance(bed, NetBed) else bed.hosts  # how many hosts share the counter
    methods: dict[str, Any] = {}
    for name, first in blocks[0].items():
        seconds = [block["seconds"] for block in first]
        quartiles = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else 3 * seconds
        sent = [statistics.mean(block["bytes"] for block in same) / counted for same in zip(*(r[name] for r in blocks))]
        methods[name] = {
            "label": METHODS[name][0],
            "seconds": seconds,
            "seconds_median": quartiles[1],
            "seconds_quartiles": [quartiles[0], quartiles[2]],
            "tokens_per_second": tokens * len(blocks) / quartiles[1],
            "bytes_per_host": statistics.median(sent),
            "cpu_seconds": statistics.median(block["own"] / block["steps"] for r in blocks for block in r[name]),
            "busy_share": statistics.median(block["busy"] / block["block"] / (os.cpu_count() or 1) for block in first),
        }
    for name, method in methods.items():
        for other in RATIOS.keys() & methods.keys():
            ratios = [a / b for a, b in zip(method["seconds"], methods[other]["seconds"])]
            method[f"to_{other}"] = statistics.median(ratios)
        alone = "hsdp_none" if name.startswith("hsdp") else "none"
        if alone in methods:
            wire = 8 * method["bytes_per_host"] / bed.rate if bed.rate else 0.0
            method["bound_seconds"] = max(methods[alone]["seconds_median"], wire)
            method["to_bound"] = method["seconds_median"] / method["bound_seconds"]
    return methods


def positive(kind: type) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        if not (value := kind(text)) > 0:
            raise ValueError
        return value

    parse.__name__ = f"positive {kind.__name__}"  # argparse: "invalid positive int value"
    return parse


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", default="2", help="numbers of hosts, with commas (default: 2)")
    parser.add_argument("--rate", default="100mbit,1gbit", help='rates, with commas; "none" is unshaped')
    parser.add_argument("--latency", default="0ms", help="from host to host, one way, such as 100ms (default: 0ms)")
    parser.add_argument(
        "--methods",
        default=",".join(name for name in METHODS if not any(word in name for word in APART)),
        help=f"with commas; of {', '.join(METHODS)} "
        f"(default: all without {', '.join(APART)}: for several ranks a host, rounds of many steps, or other buckets)",
    )
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--cores", type=int, help="cores of each host (default: an equal share, 1 at least)")
    parser.add_argument("--layers", type=positive(int), default=4)
    parser.add_argument("--width", type=positive(int), default=256)
    parser.add_argument("--vocab", type=positive(int), default=8192)
    parser.add_argument("--sequence", type=positive(int), default=64)
    parser.add_argument("--batch", type=positive(int), default=2, help="samples of each rank in a step (default: 2)")
    parser.add_argument("--rounds", type=positive(int), default=8, help="blocks of every method (default: 8)")
    parser.add_argument("--seconds", type=positive(float), default=0.5, help="length of a block, about (default: 0.5)")
    parser.add_argument("--timeout", type=positive(float), default=1800, help="seconds after which a run is ended")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--append", action="store_true", help="keep the runs of other beds and models in that file")
    parser.add_argument("--png", type=Path, help="draw the runs into this file")
    parser.add_argument(
        "--update-docs", action="store_true", help="their tables and picture from benchmarks/network*.json; no run"
    )
    args = parser.parse_args()
    try:
        args.hosts = [int(hosts) for hosts in args.hosts.split(",")]
    except ValueError:
        parser.error(f"--hosts {args.hosts}: expected integers with commas between")
    args.rate, args.methods = args.rate.split(","), args.methods.split(",")
    for name in args.methods:
        if name not in METHODS:
            parser.error(f"method {name!r}: expected some of {', '.join(METHODS)}")
    return args


def write(path: Path, kept: list[dict[str, Any]], runs: list[dict[str, Any]]) -> None:
    """All figures: ``runs``, and those ``kept`` that are no older measurements of the same."""
    kept = [old for old in kept if key(old) not in {key(new) for new in runs}]
    path.write_text(json.dumps({"machine": machine(), "runs": kept + runs}, indent=1) + "\n")


def main() -> int:
    args = arguments()
    if args.update_docs:
        kept = json.loads(FIGURES.read_text())["runs"]
        update_page(summary(kept), ROOT / "docs" / "speed.md")
        for figures, page, against in BY_RATE:
            runs = json.loads((ROOT / "benchmarks" / figures).read_text())["runs"]
            update_page(by_rate(runs, *against), ROOT / "docs" / page)
        draw([run for run in kept if run["hosts"] == 2 and run["rate"] != "none"], ROOT / "docs" / "network.png")
        return 0
    exit_on_signals()
    runs: list[dict[str, Any]] = []
    kept = json.loads(args.json.read_text())["runs"] if args.json and args.append and args.json.exists() else []
    try:
        for hosts, rate in itertools.product(args.hosts, args.rate):
            with make_bed(hosts, rate, args) as bed:
                runs.append(run(bed, args, rate))
            print(f"{title(runs[-1])}\n\n{table(runs[-1])}\n\n{caveats(runs[-1])}\n", flush=True)
            if args.json:  # a later run may fail
                write(args.json, kept, runs)
    except BedError as error:
        print(f"bench_network: {error}", file=sys.stderr)
        return 2
    if args.png:
        draw(runs, args.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
