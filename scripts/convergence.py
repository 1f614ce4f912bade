"""Does the compressed run learn what the plain one learns? OneBitAdam against DDP + torch.optim.AdamW, seed by seed.

    python scripts/convergence.py [--config configs/gpt_quick.yaml] [--seeds 0 1 2] [--json FILE] [-- --key=value ...]

Prints the held-out loss of every run, and mean and spread over the seeds, as a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

METHODS = ("AdamW", "OneBitAdam")


def train(config: Path, method: str, seed: int, folder: Path, extra: list[str]) -> dict[str, Any]:
    """One run under torchrun; returns its last record."""
    run_dir = folder / f"{method}-{seed}"
    arguments = [
        f"--optim.name={method}",
        f"--train.seed={seed}",
        f"--train.run_dir={run_dir}",
        "--train.keep=1",
        "--train.checkpoint_every=100000",
    ]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "commopt", "train", str(config), *arguments, *extra]
    threads = max(1, (os.cpu_count() or 2) // 2)
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": str(threads)}, stdout=subprocess.DEVNULL)
    return json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])


def table(results: dict[str, list[dict[str, Any]]], seeds: list[int]) -> str:
    head = ["optimizer", *(f"seed {s}" for s in seeds), "mean", "spread", "MB sent per rank", "of fp32"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for method, runs in results.items():
        losses = [run["heldout_loss"] for run in runs]
        sent, full = runs[0]["bytes_total"], runs[0]["fp32_bytes_total"]
        cells = [method, *(f"{x:.4f}" for x in losses), f"{statistics.mean(losses):.4f}"]
        cells += [f"{max(losses) - min(losses):.4f}", f"{sent / 1e6:.0f}", f"{100 * sent / full:.1f} %"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    root = Path(__file__).resolve().parent.parent
    parser.add_argument("--config", type=Path, default=root / "configs" / "gpt_quick.yaml", help="config of all runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one run of each method per seed")
    parser.add_argument("--json", type=Path, help="write all last records to this file")
    parser.add_argument("extra", nargs="*", help="overrides for every run, after --")
    args = parser.parse_args()
    results: dict[str, list[dict[str, Any]]] = {method: [] for method in METHODS}
    with tempfile.TemporaryDirectory() as folder:
        for seed in args.seeds:
            for method in METHODS:
                record = train(args.config, method, seed, Path(folder), args.extra)
                results[method].append(record)
                print(f"{method}, seed {seed}: held-out loss {record['heldout_loss']:.4f}", file=sys.stderr, flush=True)
    print(table(results, args.seeds))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"seeds": args.seeds, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
