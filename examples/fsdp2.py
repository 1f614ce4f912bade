"""FSDP2: gradients in 4 bits, and weights gathered as 4-bit differences to those gathered last.

torchrun --nproc-per-node 2 examples/fsdp2.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import commopt
from commopt.compress import Int4
from commopt.gradients import Differences

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
teacher = nn.Linear(64, 10)
fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
handle = commopt.compress_gradients(model, Int4(), weights=Differences())  # the one line
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

torch.manual_seed(1 + dist.get_rank())
for step in range(301):
    x = torch.randn(32, 64)
    loss = nn.functional.cross_entropy(model(x), teacher(x).argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 0 and dist.get_rank() == 0:
        ratio = handle.comm_stats()["ratio"]
        print(f"step {step}: loss {loss.item():.3f}, {ratio:.1f} times fewer bytes than in float32")

dist.destroy_process_group()
