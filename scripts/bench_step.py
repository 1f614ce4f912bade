"""What a step costs: time against torch.optim.AdamW on one rank, of large tensors and of many small ones; memory and
time in the compressed phase on two.

    python scripts/bench_step.py [--repeats 30] [--json FILE]

Time: both optimizers step the same 20 M parameters in turn, in one process; the ratio is the median of the pairs. So
with 5,000 tensors of 100 elements, where a step is mostly Python, and with 1,000 that are a parameter group each; there
the time to make the optimizer is taken, too.
Memory: two processes over Gloo; state is what the optimizer holds, temporaries are the growth of the process'
peak resident size during one compressed step. Both in units of the parameters (4 bytes each).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from commopt import OneBitAdam


def gpt_shapes(
    width: int = 512, layers: int = 5, vocabulary: int = 8192, positions: int = 128
) -> list[tuple[int, ...]]:
    """Parameter shapes of a GPT-2, by default of 20 M parameters."""
    layer: list[tuple[int, ...]] = [(width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,)]
    layer += [(width,), (width,), (width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return [(vocabulary, width), (positions, width), *(layer * layers), (width,), (width,)]


SMALL = [(100,)] * 5000
GROUPS = SMALL[:1000]


def make_params(seed: int = 0, shapes: Sequence[tuple[int, ...]] | None = None) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes or gpt_shapes()]
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator) * 1e-2
    return params


def seconds(step: Any) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def one_rank(
    repeats: int, shapes: Sequence[tuple[int, ...]] | None = None, group_each: bool = False
) -> dict[str, float]:
    """Milliseconds per step of AdamW(foreach=True) and OneBitAdam, the median ratio of pairs, and seconds to make
    OneBitAdam. ``group_each``: each parameter is a group."""

    def given() -> list[Any]:
        params = make_params(shapes=shapes)
        return [{"params": [p]} for p in params] if group_each else params

    reference = torch.optim.AdamW(given(), lr=1e-3, weight_decay=0.01, foreach=True)
    params = given()
    begin = time.perf_counter()
    ours = OneBitAdam(params, lr=1e-3, weight_decay=0.01)
    made = time.perf_counter() - begin
    pairs = []
    for i in range(repeats + 3):
        first, second = (reference, ours) if i % 2 else (ours, reference)
        a, b = seconds(first.step), seconds(second.step)
        pairs.append((a, b) if i % 2 else (b, a))
    pairs = pairs[3:]
    return {
        "adamw_foreach_ms": 1e3 * statistics.median(a for a, _ in pairs),
        "onebit_adam_ms": 1e3 * statistics.median(b for _, b in pairs),
        "ratio": statistics.median(b / a for a, b in pairs),
        "made_s": made,
    }


def resident(key: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    found = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    assert found is not None
    return 1024 * int(found.group(1))


def two_ranks_main(rank: int, port: int, folder: str, repeats: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    params = make_params()
    size = sum(p.nbytes for p in params)
    optimizer = OneBitAdam(params, lr=1e-3, weight_decay=0.01, freeze_step=2)
    for p in params:
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(rank)) * 1e-2
    for _ in range(4):
        optimizer.step()
    assert optimizer.phase == "compressed"
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = resident("VmRSS")
    optimizer.step()
    peak = resident("VmHWM") - before
    times = []
    for _ in range(repeats):
        dist.barrier()
        times.append(seconds(optimizer.step))
    entries = [*optimizer.state.values(), *optimizer.residuals.values()]
    state = sum(t.nbytes for entry in entries for t in entry.values())
    masks = sum(b.active.nbytes for b in optimizer.buckets if b.active is not None)
    if rank == 0:
        result = {
            "compressed_step_ms": 1e3 * statistics.median(times),
            "state": state / size,
            "masks": masks / size,
            "peak_temporaries": peak / size,
        }
        Path(folder, "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def two_ranks(repeats: int) -> dict[str, float]:
    with socket.socket() as s, tempfile.TemporaryDirectory() as folder:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
        s.close()
        mp.spawn(two_ranks_main, (port, folder, repeats), nprocs=2)
        return json.loads(Path(folder, "result.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=30, help="steps of each optimizer (default: 30)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    count = sum(p.numel() for p in make_params())
    one, small, two = one_rank(args.repeats), one_rank(args.repeats, SMALL), two_ranks(args.repeats)
    groups = one_rank(args.repeats, GROUPS, group_each=True)
    result = {"parameters": count, "one_rank": one, "small_tensors": small, "many_groups": groups, "two_ranks": two}
    print(f"{count / 1e6:.1f} M parameters, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"one rank   AdamW(foreach=True)   {one['adamw_foreach_ms']:8.1f} ms/step")
    print(f"           OneBitAdam            {one['onebit_adam_ms']:8.1f} ms/step, {one['ratio']:.2f} x AdamW")
    for what, times in ((f"{len(SMALL)} small", small), ("in groups", groups)):
        print(f"{what:<11}AdamW(foreach=True)   {times['adamw_foreach_ms']:8.1f} ms/step")
        print(
            f"           OneBitAdam            {times['onebit_adam_ms']:8.1f} ms/step, {times['ratio']:.2f} x AdamW, "
            f"made in {times['made_s']:.2f} s"
        )
    print(f"two ranks  OneBitAdam compressed {two['compressed_step_ms']:8.1f} ms/step over loopback, 1 thread each")
    print("           memory, in units of the parameters:")
    print(
        f"           state                 {two['state']:8.3f} (exp_avg + exp_avg_sq + residual + residual / 2 = 3.5)"
    )
    print(f"           masks                 {two['masks']:8.3f}")
    print(f"           peak of temporaries   {two['peak_temporaries']:8.3f}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
