"""A backend of your own: anything that can exchange bytes. Here it wraps torch's, and counts what passes.

torchrun --nproc-per-node 2 examples/custom_backend.py
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

import commopt
from commopt.comm import Work


class Counting:
    """The verbs that every backend has; see docs/backends.md."""

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.passed = 0

    def all_reduce(self, x: Tensor) -> Work:
        """x <- its mean over the ranks."""
        self.passed += x.nbytes
        dist.all_reduce(x)
        x /= self.world_size
        return Done()

    def all_to_all(self, out: Tensor, inp: Tensor) -> Work:
        """Row r of inp goes to rank r; row r of out comes from it."""
        self.passed += inp.nbytes
        dist.all_to_all_single(out, inp)
        return Done()

    def all_gather(self, out: Tensor, inp: Tensor) -> Work:
        """Row r of out is inp of rank r."""
        self.passed += inp.nbytes
        dist.all_gather(list(out.unbind()), inp)
        return Done()

    def broadcast(self, x: Tensor, src: int = 0) -> Work:
        """x <- that of rank src."""
        self.passed += x.nbytes
        dist.broadcast(x, src)
        return Done()


class Done:
    """Work that is done when it is returned: this backend waits."""

    def wait(self) -> None: ...

    def is_completed(self) -> bool:
        return True


dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
teacher = nn.Linear(64, 10)
backend = Counting()
optimizer = commopt.OneBitAdam(model.parameters(), lr=3e-3, betas=(0.9, 0.98), freeze_step=60, backend=backend)

torch.manual_seed(1 + dist.get_rank())
for step in range(201):
    x = torch.randn(32, 64)
    loss = nn.functional.cross_entropy(model(x), teacher(x).argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0 and dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.3f}, {backend.passed / 1e3:.0f} kB so far")

dist.destroy_process_group()
