"""A loop of Hugging Face accelerate with DiLoCo, on CPUs in seconds:

pip install ".[hf]"  # in the checkout, once
torchrun --standalone --nproc-per-node=2 examples/accelerate_loop.py
"""

import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch.nn.functional import cross_entropy

import commopt
from commopt.integrations.accelerate import connect


def main() -> None:
    """Train, save in the middle of a round, evaluate the mean model."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    inputs = torch.randn(1024, 16)
    targets = inputs[:, :4].argmax(1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=16, shuffle=True)

    optimizer = commopt.DiLoCo(model.parameters(), lr=1e-2, period=5)  # AdamW on each rank, an outer step every 5
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    connect(accelerator, model, optimizer)

    folder = broadcast_object_list([tempfile.mkdtemp()])[0]
    for epoch in range(3):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
        accelerator.save_state(f"{folder}/{epoch}")  # load_state() goes on to the bit

    bare = optimizer.optimizer
    model.eval()
    with bare.averaged(model), torch.no_grad():
        accuracy = (model(inputs.to(accelerator.device)).argmax(1).cpu() == targets).float().mean()
    if accelerator.is_main_process:
        stats = bare.comm_stats()
        print(f"accuracy {accuracy:.3f}, {stats['rounds']} rounds, {stats['round_step']} steps into the next")


main()
