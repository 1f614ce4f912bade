"""torch's defaults (``set_default_dtype``, ``set_default_device``) are for what a program makes: what commopt makes for
itself has the dtype and device that it needs, and no bit of a run depends on them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import every
import pytest
import torch
from torch import Tensor, nn
from worlds import on_threads

import commopt
from commopt.comm import ThreadBackend
from commopt.compress import ACP, BFloat16, Float8, Int4, Int8, PowerSGD, Sign, ThresholdTopK, TopBlocks, TopK

SHAPES = [(5, 7), (16,), (3, 4, 2), ()]
COMPRESSORS = [
    Int8(8), Int4(16, rotate=True), Float8(8), BFloat16(), TopK(2, 16), ThresholdTopK(), TopBlocks(0.5, 8), Sign(16),
    PowerSGD(1), ACP(1),
]  # fmt: skip


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """All threads have it as default."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def parameters(rank: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(rank)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float32)) for shape in SHAPES]


def gradients(step: int, rank: int) -> list[Tensor]:
    """Small ones, as float16 loses."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [1e-5 * torch.randn(shape, generator=generator, dtype=torch.float32) for shape in SHAPES]


def trained(name: str, device: str, steps: int, **settings: Any) -> list[Any]:
    """Parameters and state of both ranks after ``steps``, in which new tensors are on ``device`` by default."""

    def run(backend: ThreadBackend) -> Any:
        params = parameters(0)
        grads = [gradients(step, backend.rank) for step in range(steps)]
        with torch.device(device):
            optimizer = every.WITH_VARIANTS[name](params, lr=1e-2, backend=backend, **settings)
            for of_step in grads:
                for p, g in zip(params, of_step):
                    p.grad = g
                optimizer.step()
        return [p.detach() for p in params], optimizer.state_dict()

    return on_threads(2, run)


def check_equal(one: Any, other: Any) -> None:
    if isinstance(one, Tensor):
        assert one.dtype == other.dtype
        assert one.device == other.device
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            check_equal(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other):
            check_equal(a, b)
    else:
        assert one == other


@pytest.mark.parametrize("name", every.WITH_VARIANTS)
def test_no_optimizer_depends_on_the_default_dtype(name: str) -> None:
    plain = trained(name, "cpu", steps=7)
    with default_dtype(torch.float16):
        check_equal(trained(name, "cpu", steps=7), plain)


def test_nor_does_the_end_of_a_warm_up() -> None:
    settings = {"freeze_step": "auto", "betas": (0.9, 0.9), "steps": 41}
    plain = trained("OneBitAdam", "cpu", **settings)
    with default_dtype(torch.float16):
        check_equal(trained("OneBitAdam", "cpu", **settings), plain)


@pytest.mark.parametrize("name", [name for name in every.WITH_VARIANTS if name not in every.OUTER])
def test_no_optimizer_makes_tensors_on_the_default_device(name: str) -> None:
    check_equal(trained(name, "meta", steps=7), trained(name, "cpu", steps=7))


def means(spec: Any, device: str, contiguous: bool) -> list[Any]:
    """Means of gradients of both ranks, and the state of the handle after them."""

    def run(backend: ThreadBackend) -> Any:
        model = nn.ParameterList(parameters(0))
        brought = [gradients(step, backend.rank) for step in range(3)]
        out = []
        with torch.device(device):
            handle = commopt.compress_gradients(model, spec, backend=backend)
            for grads in brought:
                for p, g in reversed(list(zip(model, grads))):
                    p.grad = g.clone() if contiguous or g.dim() < 2 else g.transpose(0, 1).contiguous().transpose(0, 1)
                    handle.mean.arrive(p, p.grad)
                handle.mean.finish()
                out.append([p.grad for p in model])
        return out, handle.state_dict()["residuals"]

    return on_threads(2, run)


@pytest.mark.parametrize("spec", COMPRESSORS, ids=repr)
@pytest.mark.parametrize("contiguous", [True, False])
def test_no_compressor_does(spec: Any, contiguous: bool) -> None:
    plain = means(spec, "cpu", contiguous)
    check_equal(means(spec, "meta", contiguous), plain)
    with default_dtype(torch.float16):
        check_equal(means(spec, "cpu", contiguous), plain)
