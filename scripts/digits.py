"""A small task of real images: scikit-learn's 1,797 handwritten digits of 8 x 8 pixels; and a residual network."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HELD_OUT = 400

Images = tuple[Tensor, Tensor]
"""Pixels (n, 1, 8, 8) in [-0.5, 0.5], and the digits (n,)."""


def load() -> tuple[Images, Images]:
    """Images to train on, and 400 held out; the same ones always."""
    from sklearn.datasets import load_digits

    data = load_digits()
    pixels = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16 - 0.5
    digits = torch.tensor(data.target)
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
    pixels, digits = pixels[order], digits[order]
    return (pixels[HELD_OUT:], digits[HELD_OUT:]), (pixels[:HELD_OUT], digits[:HELD_OUT])


class Residual(nn.Module):
    """Two convolutions around which the input goes as well."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(4, outputs) for _ in range(2))
        self.around = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(inner)) + self.around(x))


class ResNet(nn.Sequential):
    """20,000 parameters. Normalised by groups, so that it has no buffers: what is learnt is all in the parameters."""

    def __init__(self, width: int = 16) -> None:
        super().__init__(
            nn.Conv2d(1, width, 3, 1, 1, bias=False),
            nn.GroupNorm(4, width),
            nn.ReLU(),
            Residual(width, width, 1),
            Residual(width, 2 * width, 2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(2 * width, 10),
        )

    @property
    def blocks(self) -> list[nn.Module]:
        """What FSDP2 cuts one by one, where several ranks hold the model together."""
        return [module for module in self if isinstance(module, Residual)]
