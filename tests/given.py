"""A model whose gradients are given, the residuals of all ranks, and laws of every way to take means."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from worlds import same_bits, some_grads, some_params

import commopt
from commopt.comm import Backend
from commopt.gradients import CompressedGradients
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


def made(backend: Backend, compressor: Any, **settings: Any) -> tuple[Given, CompressedGradients]:
    model = Given()
    return model, commopt.compress_gradients(model, compressor, backend=backend, **{"bucket_mb": 2e-4, **settings})


Made = Callable[[], tuple[Given, CompressedGradients]]
"""Makes a model, and has its gradients compressed."""


def check_nothing_is_left(make: Made, rank: int, spoil: Callable[[list[Tensor]], None]) -> list[Tensor]:
    """``spoil`` makes some gradients of rank 1 not finite: so is the mean, no residual changes, and the
    next mean is finite. Returns both."""
    model, handle = make()
    for step in range(3):
        model.backward(some_grads(SIZES, step, rank))
    model.take()
    before = handle.state_dict()["residuals"]["state"]
    grads = some_grads(SIZES, 3, rank)
    if rank == 1:
        spoil(grads)
    model.backward(grads)
    out = model.take()
    assert not out[0].isfinite().all()
    after = handle.state_dict()["residuals"]["state"]
    for i in before:
        assert same_bits(before[i].values(), after[i].values())
    assert handle.comm_stats()["not_finite"] == 1
    model.backward(some_grads(SIZES, 4, rank))
    out += model.take()
    assert all(g.isfinite().all() for g in out[len(SIZES) :])
    return out


def check_resumed(make: Made, grads: Callable[[int], Sequence[Tensor | None]], half: int) -> None:
    """A run that is saved after ``half`` of 8 means, and goes on in another model, is the one that never stopped;
    ``grads`` of each step."""

    def steps(model: Given, which: range) -> list[Tensor | None]:
        out = []
        for step in which:
            model.backward(grads(step))
            out += model.take()
        return out

    model, handle = make()
    steps(model, range(half))
    saved = handle.state_dict()
    straight = steps(model, range(half, 8))
    other, second = make()
    second.load_state_dict(saved)
    found = steps(other, range(half, 8))
    assert [g is None for g in found] == [g is None for g in straight]
    assert same_bits([g for g in found if g is not None], [g for g in straight if g is not None])
    final, same = (h.state_dict()["residuals"]["state"] for h in (handle, second))
    assert all(same_bits(final[i].values(), same[i].values()) for i in final)
