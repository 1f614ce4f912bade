"""The loop of a small GPT script: DDP, accumulation, clipping, groups with and without weight decay, rank 0 saves.

torchrun --nproc-per-node 2 examples/nanogpt_style.py
"""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commopt


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, attn_mask=mask, is_causal=True, need_weights=False)[0]
        return x + self.mlp(self.norms[1](x))


dist.init_process_group("gloo")
torch.manual_seed(0)
vocab, width, length, accumulate = 64, 64, 32, 2
net = nn.Sequential(
    nn.Embedding(vocab, width), Block(width), Block(width), nn.LayerNorm(width), nn.Linear(width, vocab)
)
model = DistributedDataParallel(net)
decay = [p for p in net.parameters() if p.dim() >= 2]
rest = [p for p in net.parameters() if p.dim() < 2]
groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
# was torch.optim.AdamW(groups, ...), with clip_grad_norm_(model.parameters(), 1.0) before each step: that would clip
# each rank's own gradients, where max_grad_norm clips by one norm on all ranks
optimizer = commopt.OneBitAdam(groups, lr=2e-3, betas=(0.9, 0.95), freeze_step=60, max_grad_norm=1.0, fused=True)

torch.manual_seed(1 + dist.get_rank())
for step in range(201):
    for micro in range(accumulate):
        model.require_backward_grad_sync = micro == accumulate - 1
        start = torch.randint(vocab, (8, 1))
        tokens = (start + 3 * torch.arange(length + 1)) % vocab
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        (loss / accumulate).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if step % 50 == 0 and dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.3f}, {optimizer.comm_stats()['phase']}")

with tempfile.TemporaryDirectory() as folder:
    if dist.get_rank() == 0:  # to resume to the bit, save optimizer.state_dict() of every rank
        torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, os.path.join(folder, "ckpt.pt"))
dist.destroy_process_group()
