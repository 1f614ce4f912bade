"""Steps of OneBitAdam on a GPU, out of warm-up and in the compressed phase: replicas must stay equal to the bit.

On its own, under torchrun, one rank a GPU over NCCL; test_gpu.py runs it with ranks on threads.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import commopt


def train(rank: int, device: torch.device, **arguments: Any) -> tuple[list[Tensor], list[float]]:
    """The parameters after 12 steps, and the losses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 200), nn.Tanh(), nn.Linear(200, 7)).to(device)
    model[2].bfloat16()
    optimizer = commopt.OneBitAdam(model.parameters(), lr=1e-2, freeze_step=4, **arguments)
    generator, losses = torch.Generator().manual_seed(rank), []
    target = torch.randn(33, 7, generator=torch.Generator().manual_seed(9)).to(device)
    for _ in range(12):
        x = torch.randn(64, 33, generator=generator).to(device)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model[2](model[1](model[0](x)).bfloat16()).float(), x @ target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert optimizer.phase == "compressed"
    return [p.detach().clone() for p in model.parameters()], losses


def main() -> None:
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    for overlap in (False, True):
        params, losses = train(rank, torch.device("cuda", rank), overlap=overlap)
        assert losses[-1] < losses[0], losses
        for p in params:
            others = [torch.empty_like(p) for _ in range(dist.get_world_size())]
            dist.all_gather(others, p)
            assert all(torch.equal(others[0], other) for other in others), "replicas differ"
    dist.destroy_process_group()
    if rank == 0:
        print("2 ranks over NCCL: replicas equal, loss falls", losses)


if __name__ == "__main__":
    main()
