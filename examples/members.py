"""Ranks that come and go: the second one leaves in the middle of the run, and the first goes on.

torchrun --nproc-per-node 2 examples/members.py
"""

import torch
import torch.distributed as dist
from torch import nn

import commopt

dist.init_process_group("gloo")  # for its store alone; any other will do: commopt.Members(store, name, ranks=2)
members = commopt.Members(patience=60, quorum=1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
teacher = nn.Linear(64, 10)
optimizer = commopt.DiLoCo(model.parameters(), lr=3e-3, period=10, outer_momentum=0.5, members=members)

torch.manual_seed(1 + members.name)
while (rounds := optimizer.param_groups[0]["rounds"]) < 30:
    if members.name == 1 and rounds == 20:
        break
    x = torch.randn(32, 64)
    loss = nn.functional.cross_entropy(model(x), teacher(x).argmax(1))
    optimizer.zero_grad()
    loss.backward()
    members.add_weight(len(x))
    optimizer.step()
    if optimizer.param_groups[0]["rounds"] % 10 == 0 and optimizer.param_groups[0]["round_step"] == 1:
        print(f"round {rounds} of {len(members.names)}: loss {loss.item():.3f}")
print(f"after {rounds} rounds: loss {loss.item():.3f}")
members.leave()
dist.destroy_process_group()
