"""DistributedDataParallel with any optimizer, here Muon and AdamW: the means of the gradients are compressed.

torchrun --nproc-per-node 2 examples/ddp_any_optimizer.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commopt
from commopt.compress import Int4

dist.init_process_group("gloo")
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 256, bias=False), nn.GELU(), nn.Linear(256, 10))
teacher = nn.Linear(64, 10)
model = DistributedDataParallel(net)
handle = commopt.compress_gradients(model, Int4())  # the one line
optimizers = [
    commopt.Muon([net[0].weight], lr=0.02, weight_decay=0.0),
    torch.optim.AdamW(net[2].parameters(), lr=3e-3),
]

torch.manual_seed(1 + dist.get_rank())
for step in range(301):
    x = torch.randn(32, 64)
    loss = nn.functional.cross_entropy(model(x), teacher(x).argmax(1))
    model.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # of means: the same on all ranks
    for optimizer in optimizers:
        optimizer.step()
    if step % 100 == 0 and dist.get_rank() == 0:
        ratio = handle.comm_stats()["ratio"]
        print(f"step {step}: loss {loss.item():.3f}, {ratio:.1f} times fewer bytes than in float32")

dist.destroy_process_group()
