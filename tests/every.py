"""Every optimizer of commopt, by name, with settings under which a few steps reach all of its phases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import commopt
from commopt.compress import Int4, Int8, RandomBlocks, Sign
from commopt.optim import SyncPolicy, VariancePolicy


def _zero_one(params: Any, **settings: Any) -> torch.optim.Optimizer:
    given = {"variance": VariancePolicy(2, 3), "sync": SyncPolicy(3, None, 3), "eps": 1e-6, **settings}
    return commopt.ZeroOneAdam(params, **given)


def _plain(cls: Any) -> Callable[..., torch.optim.Optimizer]:
    return lambda params, backend=None, **settings: cls(params, **settings)


def _cser(params: Any, **settings: Any) -> torch.optim.Optimizer:
    return commopt.CSER(params, momentum=0.9, **{"period": 3, **settings})


def _signs(params: Any, **settings: Any) -> torch.optim.Optimizer:
    return _cser(params, compressor=Sign(16), reset_compressor=RandomBlocks(2, 8), **settings)


def _qsparse(params: Any, **settings: Any) -> torch.optim.Optimizer:
    return commopt.QSparseLocalSGD(params, momentum=0.9, **{"period": 3, "compressor": Sign(16), **settings})


def _outer(cls: Any) -> Callable[..., torch.optim.Optimizer]:
    return lambda params, **settings: cls(params, **{"period": 3, **settings})


PLAIN = {cls.__name__: _plain(cls) for cls in (commopt.Lamb, commopt.Lans)}
"""Those that send nothing."""
_OUTER = (commopt.LocalSGD, commopt.SlowMo, commopt.DiLoCo, commopt.SignMomentum, commopt.SparseLoCo)
GOSSIP: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "NoLoCo": _outer(commopt.NoLoCo),
    "Gossip": _outer(commopt.Gossip),
    "Gossip, 8 bits": lambda params, **settings: commopt.Gossip(
        params, **{"period": 3, "compressor": Int8(), **settings}
    ),
}
"""Those whose replicas are never equal."""
OUTER = {**{cls.__name__: _outer(cls) for cls in _OUTER}, **GOSSIP}
EVERY: dict[str, Callable[..., Any]] = {
    "OneBitAdam": lambda params, **settings: commopt.OneBitAdam(params, **{"freeze_step": 2, **settings}),
    "OneBitLamb": lambda params, **settings: commopt.OneBitLamb(params, **{"freeze_step": 2, **settings}),
    "OneBitLion": commopt.OneBitLion,
    **PLAIN,
    "ZeroOneAdam": _zero_one,
    "CSER": _cser,
    "CSER, signs": _signs,
    "QSparseLocalSGD": _qsparse,
    **OUTER,
}
"""Name -> function of parameters and settings."""

WITH_VARIANTS: dict[str, Callable[..., Any]] = {
    **EVERY,
    "OneBitAdam warming up": lambda params, **settings: commopt.OneBitAdam(params, freeze_step=1000, **settings),
    "OneBitAdam warming up by 4 bits": lambda params, **settings: commopt.OneBitAdam(
        params, freeze_step=1000, warmup_compressor=Int4(16), **settings
    ),
    "ZeroOneAdam refreshing by 4 bits": lambda params, **settings: commopt.ZeroOneAdam(
        params, **{**settings, "variance": VariancePolicy(1000), "refresh_compressor": Int4(16)}
    ),
    "OneBitAdam overlapping": lambda params, **settings: EVERY["OneBitAdam"](params, overlap=True, **settings),
    "QSparseLocalSGD, blocks": lambda params, **settings: EVERY["QSparseLocalSGD"](
        params, compressor=RandomBlocks(2, 8), **settings
    ),
}
"""Also those that come to the same lines by other ways."""


def make(name: str, params: Any, **settings: Any) -> Any:
    """One of ``WITH_VARIANTS``, with a round at every second step and a learning rate of 0.01."""
    rounds: dict[str, Any] = {}
    if name == "ZeroOneAdam":
        rounds = {"variance": VariancePolicy(2, 4), "sync": SyncPolicy(2, None, 2)}
    elif name in OUTER or name.startswith(("CSER", "QSparseLocalSGD")):
        rounds = {"period": 2}
    return WITH_VARIANTS[name](params, **{"lr": 1e-2, **rounds, **settings})


every = pytest.mark.parametrize("name", EVERY)
every_outer = pytest.mark.parametrize("name", OUTER)
COMMUNICATING = [name for name in EVERY if name not in PLAIN]
every_communicating = pytest.mark.parametrize("name", COMMUNICATING)
OVERLAPPING = [name for name in COMMUNICATING if name not in OUTER]
every_overlapping = pytest.mark.parametrize("name", OVERLAPPING)
every_variant = pytest.mark.parametrize("name", [name for name in WITH_VARIANTS if name not in PLAIN])
