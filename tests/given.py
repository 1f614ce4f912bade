"""A model whose gradients are given, and the residuals of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from worlds import some_params

from commopt.optim import split_state_dict

SIZES = [(7, 3), (5,), (4, 4), (), (0, 2), (130,)]


class Given(nn.Module):
    """A model whose gradients are what one wishes: its loss is their inner product with the parameters."""

    def __init__(self, sizes: Sequence[tuple[int, ...]] = SIZES) -> None:
        super().__init__()
        self.params = nn.ParameterList(some_params(list(sizes)))

    def backward(self, grads: Sequence[Tensor | None]) -> None:
        terms = [(p * g).sum() for p, g in zip(self.params, grads) if g is not None]
        torch.stack(terms).sum().backward()

    def take(self) -> list[Tensor | None]:
        """The gradients, which are gone then."""
        out = [p.grad for p in self.params]
        for p in self.params:
            p.grad = None
        return out


def split_all(states: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    return split_state_dict(states[0])[0], [split_state_dict(state)[1] for state in states]
