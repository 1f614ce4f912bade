"""Lightning's Trainer with 1-bit Adam: two processes on the CPU, in seconds.

pip install ".[lightning]"  # in the checkout, once
python examples/lightning_trainer.py
"""

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import commopt
from commopt.integrations.lightning import CommoptCallback


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 4))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("right", (self.net(batch[0]).argmax(1) == batch[1]).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return commopt.OneBitAdam(self.parameters(), lr=2e-3, betas=(0.9, 0.95), freeze_step=20, max_grad_norm=5.0)


def points(seed: int, n: int) -> DataLoader:
    """``n`` points of four classes."""
    centers = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (n,), generator=random)
    noise = torch.randn(n, 32, generator=random)
    return DataLoader(TensorDataset(centers[labels] + noise, labels), batch_size=32, shuffle=seed == 1)


def main() -> None:
    pl.seed_everything(0)
    model = Classifier()
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, logger=False, enable_progress_bar=False,
        callbacks=[CommoptCallback(), ModelCheckpoint("lightning_example", save_last=True)],
    )  # fmt: skip
    trainer.fit(model, points(1, 2048), points(2, 512))
    stats = trainer.optimizers[0].comm_stats()
    if trainer.is_global_zero:
        print(f"right: {trainer.callback_metrics['right']:.3f}")
        print(f"a step sends {stats['step']['bytes']} bytes, in float32 {stats['fp32_bytes']}")


if __name__ == "__main__":
    main()
