"""timm makes commopt's optimizers by name, with its groups.

Where there is no torchvision, an empty one stands in for it while timm is imported: nothing here uses it.
"""

from __future__ import annotations

import copy
import functools
import gc
import importlib.util
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from no_torchvision import empty_torchvision
from torch import nn
from worlds import on_threads, params_of, same_bits

import commopt
from commopt.comm import LocalBackend, ThreadBackend
from commopt.outer import OuterOptimizer
from commopt.state.model_buffers import warn_of_copies

if importlib.util.find_spec("timm") is None:
    pytest.skip("timm is not installed", allow_module_level=True)

if torch.version.cuda is None and importlib.util.find_spec("torchvision") is not None:
    # torchvision as pip installs it is built for CUDA: without it, it loads no operators, and then misses these two
    for op in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, op):
            torch.library.define(f"torchvision::{op}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

with warnings.catch_warnings(), empty_torchvision():  # of what timm imports
    warnings.simplefilter("ignore")
    import timm
    from timm.optim import create_optimizer_v2, list_optimizers
    from timm.optim._param_groups import param_groups_layer_decay
    from timm.scheduler import CosineLRScheduler
    from timm.utils import ModelEmaV2, ModelEmaV3

    from commopt.integrations.timm import ADAPTIVE, MOMENTUM, OUTER, WITHOUT_EPS, register

EVERY = {name: cls for table in (ADAPTIVE, WITHOUT_EPS, MOMENTUM, OUTER) for name, (cls, _) in table.items()}
PLAIN = ("commoptlamb", "commoptlans")


@pytest.fixture(autouse=True)
def registered() -> None:
    register()


def vit() -> nn.Module:
    """The same for every call: threads share torch's random numbers, so they are drawn once."""
    return copy.deepcopy(_vit())


@functools.cache
def _vit() -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=8, patch_size=4, embed_dim=12, depth=2, num_heads=2, num_classes=3
    )


def make(name: str, model: nn.Module, **given: Any) -> Any:
    return create_optimizer_v2(model, opt=name, lr=1e-2, weight_decay=0.05, **given)


def train(model: nn.Module, optimizer: Any, rank: int, steps: int = 4) -> None:
    for step in range(steps):
        random = torch.Generator().manual_seed(10 * step + rank)
        images, labels = torch.randn(4, 3, 8, 8, generator=random), torch.randint(0, 3, (4,), generator=random)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()


def test_the_empty_torchvision_is_gone() -> None:
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "torchvision":
            assert getattr(module, "__file__", None), "one that is installed has files"


def test_every_optimizer_has_a_name() -> None:
    exported = [getattr(commopt, name) for name in commopt.__all__]
    classes = {cls for cls in exported if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)}
    assert set(EVERY.values()) == classes - {commopt.Mixed, commopt.Muon}  # of optimizers; for some parameters only
    assert set(EVERY) <= set(list_optimizers())
    words = (Path(__file__).parents[1] / "docs" / "door_timm.md").read_text()
    assert not [name for name in EVERY if f"`{name}`" not in words]
    assert not [name for name in EVERY if "_" in name], "timm takes what is before a _ for something else"


def test_it_may_be_called_again_and_takes_no_name_of_timms(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "timm"):
        register()
    assert not caplog.records
    assert timm.optim.get_optimizer_class("lamb").__module__.startswith("timm.")


@pytest.mark.parametrize("name", EVERY)
def test_what_timm_gives_arrives(name: str) -> None:
    """What its train.py passes: betas as a list, eps, momentum."""
    backend = {} if name in PLAIN else {"backend": LocalBackend()}
    optimizer = make(name, vit(), betas=[0.8, 0.9], eps=1e-5, momentum=0.7, **backend)
    assert type(optimizer) is EVERY[name]
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0, 0.05}
    for group in optimizer.param_groups:
        assert group["lr"] == 1e-2
        if name in MOMENTUM:
            assert group["momentum"] == 0.7
        elif name in WITHOUT_EPS:
            assert list(group["betas"]) == [0.8, 0.9]
        else:
            assert (list(group["betas"]), group["eps"]) == ([0.8, 0.9], 1e-5)


@pytest.mark.parametrize("name", EVERY)
def test_layers_decay(name: str) -> None:
    """With timm's schedule, each layer has its own learning rate, and moves by that."""

    def ours(backend: ThreadBackend) -> tuple[list[Any], list[float]]:
        model = vit()
        optimizer = make(name, model, layer_decay=0.5, **settings(backend))
        CosineLRScheduler(optimizer, t_initial=10)
        train(model, optimizer, backend.rank)
        return params_of(model), [group["lr"] for group in optimizer.param_groups]

    def by_hand(backend: ThreadBackend) -> list[Any]:
        model = vit()
        groups = param_groups_layer_decay(model, 0.05, model.no_weight_decay(), layer_decay=0.5)
        for group in groups:
            group["lr"] = 1e-2 * group.pop("lr_scale")
        given = {"momentum": 0.9} if name in MOMENTUM else {}
        train(model, EVERY[name](groups, **given, **settings(backend)), backend.rank)
        return params_of(model)

    def settings(backend: ThreadBackend) -> dict[str, Any]:
        if name in PLAIN:
            return {}
        few: dict[str, Any] = {"backend": backend}
        if issubclass(EVERY[name], OuterOptimizer) or name in MOMENTUM:
            few["period"] = 2
        if "freeze_step" in EVERY[name].__init__.__annotations__:
            few["freeze_step"] = 2
        return few

    vit()
    for (params, lrs), right in zip(on_threads(2, ours), on_threads(2, by_hand)):
        assert same_bits(params, right)
        assert {round(lr, 6) for lr in lrs} == {0.01, 0.005, 0.0025, 0.00125}


@pytest.mark.parametrize("ema_class", [ModelEmaV2, ModelEmaV3])
def test_a_moving_average_of_timm_is_the_mean_of_all_ranks_within_averaged(ema_class: type) -> None:
    def run(backend: ThreadBackend) -> tuple[list[Any], list[Any], bool]:
        model = vit()
        optimizer, ema = make("localsgd", model, period=50, backend=backend), ema_class(model, decay=0.5)
        for _ in range(3):
            train(model, optimizer, backend.rank, steps=1)
            ema.update(model)
        own = params_of(ema)
        with optimizer.averaged(nn.ModuleList([model, ema])):
            mean = params_of(ema)
        return own, mean, same_bits(own, params_of(ema))

    (mine, mean, back), (others, same, _) = on_threads(2, run)
    assert not same_bits(mine, others)
    assert back
    assert same_bits(mean, same)
    torch.testing.assert_close(mean, [(a + b) / 2 for a, b in zip(mine, others)], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("ema_class", [ModelEmaV2, ModelEmaV3])
def test_a_moving_average_of_timm_that_is_each_ranks_own_is_reported(
    ema_class: type, caplog: pytest.LogCaptureFixture
) -> None:
    gc.collect()
    model = vit()
    ema = ema_class(model, decay=0.5)
    warn_of_copies("LocalSGD", list(model.parameters()), [model, ema])
    assert not caplog.text
    warn_of_copies("LocalSGD", list(model.parameters()), [model])
    assert f"a {ema_class.__name__} of parameters like these is each rank's own" in caplog.text
