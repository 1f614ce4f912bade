#!/usr/bin/env python3
"""A step of commopt.Muon against torch.optim.Muon on matrices that are cut over the ranks, in turns, without a model.

    torchrun --nproc-per-node 2 scripts/bench_muon.py [--layers 4] [--width 512] [--steps 5]

Medians of the slowest rank; bytes are what a rank sends, by the sizes of the tensors that go into collectives.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import commopt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4, help="of a transformer: 6 matrices each (default: 4)")
    parser.add_argument("--width", type=int, default=512, help="(default: 512)")
    parser.add_argument("--steps", type=int, default=5, help="of each (default: 5)")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh, n = init_device_mesh("cpu", (dist.get_world_size(),)), args.width
    shapes = [*[(n, n)] * 4, (4 * n, n), (n, 4 * n)] * args.layers
    optimizers, seconds = {}, {"torch": [], "commopt": []}
    for name, cls in (("torch", torch.optim.Muon), ("commopt", commopt.Muon)):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(distribute_tensor(torch.randn(shape), mesh, [Shard(0)])) for shape in shapes]
        for p in params:
            p.grad = distribute_tensor(torch.randn(p.shape), mesh, [Shard(0)])
        optimizers[name] = cls(params, lr=0.01)
        with CommDebugMode() as counted:
            optimizers[name].step()
        if dist.get_rank() == 0:
            print(f"{name}: {counted.get_total_counts()} collectives a step")
    for _ in range(args.steps):
        for name, optimizer in optimizers.items():
            dist.barrier()
            begin = time.perf_counter()
            optimizer.step()
            took = torch.tensor(time.perf_counter() - begin)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            seconds[name].append(float(took))
    both = [optimizer.param_groups[0]["params"] for optimizer in optimizers.values()]
    with torch.no_grad():
        apart = max(float((p - q).full_tensor().abs().max()) for p, q in zip(*both))
    if dist.get_rank() == 0:
        times = {name: statistics.median(values) for name, values in seconds.items()}
        print({name: f"{1e3 * s:.0f} ms" for name, s in times.items()}, f"{times['torch'] / times['commopt']:.2f} x")
        print(f"largest difference of a parameter after {args.steps + 1} steps: {apart:.2g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
