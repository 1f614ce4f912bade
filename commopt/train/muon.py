"""Muon in a config: for a model's hidden matrices, with AdamW for all else, as one optimizer.

As ``optim.name``, or as the base of an outer optimizer (DiLoCo with it is MuLoCo). ``args.adamw`` has arguments of
AdamW, the others are Muon's. There is one learning rate for both: unless ``adjust_lr_fn`` says otherwise,
a step of Muon is as long as one of AdamW ("match_rms_adamw").
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from commopt.optim import Muon, sort_parameters
from commopt.outer import Mixed
from commopt.train.errors import ConfigError
from commopt.train.named import build, check_arguments

ADAMW = "adamw"
"""Key of AdamW's arguments among Muon's."""


def is_muon(cls: type) -> bool:
    return cls in (Muon, getattr(torch.optim, "Muon", Muon))  # torch has one since 2.9


def check_muon(args: Mapping[str, Any], key: str, taken: Mapping[str, str]) -> None:
    """Raise ConfigError for arguments that Muon, or AdamW beside it, has not."""
    of_adamw = args.get(ADAMW, {})
    if not isinstance(of_adamw, Mapping):
        raise ConfigError(f"{key}.{ADAMW}={of_adamw!r} is not allowed: it must be arguments of AdamW")
    check_arguments(Muon, {name: value for name, value in args.items() if name != ADAMW}, key, taken)
    check_arguments(torch.optim.AdamW, of_adamw, f"{key}.{ADAMW}", taken)


def make_muon(model: nn.Module, groups: list[dict[str, Any]], lr: float, args: Mapping[str, Any]) -> Mixed:
    """Muon for the hidden matrices among the named parameters of ``groups``, and AdamW for the others.

    Args:
        model: whose parameters they are.
        groups: with their weight decay, and what else an outer optimizer wants in them.
        lr: of both.
        args: what the config says.
    """
    try:
        chosen = {id(p) for _, p in sort_parameters(model).hidden}
    except ValueError as error:
        raise ConfigError(f"optim: Muon: {error}") from error
    hidden: list[dict[str, Any]] = []
    rest: list[dict[str, Any]] = []
    for group in groups:
        for part, inside in ((hidden, True), (rest, False)):
            params = [(name, p) for name, p in group["params"] if (id(p) in chosen) is inside]
            if params:
                part.append({**group, "params": params})
    of_muon = {"adjust_lr_fn": "match_rms_adamw", **{k: v for k, v in args.items() if k != ADAMW}}
    return Mixed(
        build(Muon, "optim", hidden, lr=lr, **of_muon),
        build(torch.optim.AdamW, "optim", rest, lr=lr, **args.get(ADAMW, {})),
    )
