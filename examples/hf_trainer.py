"""Hugging Face Trainer with 1-bit Adam, on CPUs in seconds:

pip install ".[hf]"  # in the checkout, once
torchrun --standalone --nproc-per-node=2 examples/hf_trainer.py
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import commopt
from commopt.integrations.transformers import CommoptCallback


def counting(samples: int) -> list[dict[str, torch.Tensor]]:
    """Sequences that count up from somewhere: there is something to learn."""
    starts = torch.randint(0, 64, (samples, 1), generator=torch.Generator().manual_seed(samples))
    rows = (starts + torch.arange(16)) % 64
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    """Train, and say what was sent."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    args = TrainingArguments(
        tempfile.mkdtemp(),
        max_steps=40,
        learning_rate=3e-3,
        weight_decay=0.01,
        max_grad_norm=0,  # the optimizer clips: the norm of all ranks' gradients
        per_device_train_batch_size=8,
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(
        LlamaForCausalLM(config),
        args,
        train_dataset=counting(512),
        eval_dataset=counting(32),
        optimizer_cls_and_kwargs=(
            commopt.OneBitAdam,
            {"lr": 3e-3, "betas": (0.9, 0.95), "freeze_step": 20, "max_grad_norm": 1.0},
        ),
        callbacks=[CommoptCallback()],
    )
    trainer.train()  # with checkpoints (save_strategy), resume_from_checkpoint=True goes on to the bit
    loss = trainer.evaluate()["eval_loss"]
    stats = trainer.optimizer.optimizer.comm_stats()
    if trainer.is_world_process_zero():
        print(f"loss {loss:.3f}, phase {stats['phase']}, sends 1/{stats['ratio'] or 1:.0f} of what DDP does")


main()
