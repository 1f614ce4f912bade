"""What it costs to notice that something has gone wrong: comparing replicas, and confirming what was received.

    python scripts/bench_guard.py [--repeats 20] [--json FILE]

Two processes over Gloo, one thread each, OneBitAdam on a GPT-2 of 20 M parameters in both phases. In one run, in turn: steps with
everything on and the digests compared in each of them, steps without digests, and steps that confirm nothing either. A step is forward
and backward of --tokens tokens (as many multiplications; no model is built) and step().
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from bench_step import make_params

from commopt import Guard, OneBitAdam

EVERY = Guard().check_every or 1
KINDS = ("compared", "confirmed", "neither")


def unconfirmed() -> ExitStack:
    """A context in which nothing is summed and nothing is confirmed."""
    stack = ExitStack()

    def no_sums(x: torch.Tensor, rows: int) -> torch.Tensor:
        return torch.zeros(rows, dtype=torch.int64, device=x.device)

    stack.enter_context(mock.patch("commopt.comm.counting.row_sums", no_sums))
    stack.enter_context(mock.patch("commopt.step.in_flight.confirm", return_value=None))
    return stack


def measure(rank: int, port: int, repeats: int, tokens: int, file: str) -> None:
    """One process: milliseconds of each kind of step, in both phases."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo")
    result: dict[str, Any] = {}
    for phase, freeze in (("warmup", 10**9), ("compressed", 1)):
        optimizers = {
            "compared": OneBitAdam(make_params(rank), freeze_step=freeze, guard=Guard(check_every=1)),
            "confirmed": OneBitAdam(make_params(rank), freeze_step=freeze, guard=Guard(check_every=None)),
            "neither": OneBitAdam(make_params(rank), freeze_step=freeze, guard=Guard(check_every=None)),
        }
        times: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for turn in range(repeats + 2):
            for kind in KINDS:
                with unconfirmed() if kind == "neither" else ExitStack():
                    dist.barrier()
                    start = time.perf_counter()
                    optimizers[kind].step()
                    if turn > 1:
                        times[kind].append(1e3 * (time.perf_counter() - start))
        result[phase] = {kind: statistics.median(times[kind]) for kind in KINDS}
    result["forward_and_backward"] = forward_and_backward(tokens)
    if rank == 0:
        Path(file).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def forward_and_backward(tokens: int) -> float:
    """Milliseconds of the matrix products of a training step: 6 operations a parameter and token."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        for p in make_params():
            if p.dim() == 2:
                x = torch.ones(tokens, p.shape[0])
                (x @ p).sum().backward()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=512, help="of a step on one rank")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "result")
        mp.spawn(measure, (free_port(), options.repeats, options.tokens, file), nprocs=2)
        result = json.loads(Path(file).read_text())
    base = result["forward_and_backward"]
    for phase in ("warmup", "compressed"):
        of = result[phase]
        step = base + of["confirmed"]
        of["digests_of_a_training_step"] = (of["compared"] - of["confirmed"]) / EVERY / step
        of["confirmation_of_a_training_step"] = (of["confirmed"] - of["neither"]) / step
        confirming, comparing = of["confirmed"] - of["neither"], of["compared"] - of["confirmed"]
        print(
            f"{phase}: step() {of['neither']:.1f} ms, confirming adds {confirming:.1f} ms, comparing {comparing:.1f} ms"
        )
        shares = of["confirmation_of_a_training_step"], of["digests_of_a_training_step"]
        print(f"  of a training step of {step:.0f} ms: {shares[0]:.2%}, and {shares[1]:.2%} (every {EVERY} steps)")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
