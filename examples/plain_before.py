"""A plain script for several ranks: DistributedDataParallel and Adam.

torchrun --nproc-per-node 2 examples/plain_before.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
teacher = nn.Linear(64, 10)
model = DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, betas=(0.9, 0.98))

torch.manual_seed(1 + dist.get_rank())
for step in range(301):
    x = torch.randn(32, 64)
    loss = nn.functional.cross_entropy(model(x), teacher(x).argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 0 and dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.3f}")

dist.destroy_process_group()
