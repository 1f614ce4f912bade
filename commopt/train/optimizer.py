"""The optimizer that a config names, with all that it names in turn: compressors, a base optimizer, a sign rule."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Mapping
from types import ModuleType, UnionType
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import commopt.compress
import commopt.gradients
import commopt.optim
import commopt.outer
from commopt.comm import Backend, LocalBackend
from commopt.compress import Compressor, RandomBlocks
from commopt.gradients import Differences, LoCo
from commopt.gradients.method import OfGradients
from commopt.optim.plain import PlainOptimizer
from commopt.train.backend import backend_class
from commopt.train.config import Config, GradientsConfig, OptimConfig
from commopt.train.errors import ConfigError
from commopt.train.models import parameter_groups
from commopt.train.muon import check_muon, is_muon, make_muon
from commopt.train.named import HARMLESS, NotImported, build, check_arguments, find_class, without_importing
from commopt.train.parse import nearest

AnyCompressor = Compressor | RandomBlocks
OWN_KEYS = {
    **{name: f"optim.{name}" for name in ("lr", "weight_decay", "max_grad_norm", "compressor")},
    "guard": "optim.max_skipped, optim.check_every and optim.on_difference",
    "backend": "comm.backend",
    "process_group": "comm.backend or parallel",
}
"""Arguments that have their own key in the config and so may not be in ``optim.args``."""

PLACES = (commopt.optim, commopt.outer, torch.optim)
"""Modules with optimizers that a config may name without a path."""

OURS = (commopt.optim.CommOptimizer, commopt.outer.OuterOptimizer)
"""Optimizers that communicate themselves."""


def make_named(name: str, args: Mapping[str, Any], key: str, module: ModuleType, base: type | UnionType) -> Any:
    """The object that a config names: of a class of ``module`` or a dotted path, a subclass of ``base``."""
    cls = find_class(name, f"{key}.name", (module,), base)
    check_arguments(cls, args, f"{key}.args")
    return build(cls, key, **args)


def make_given(given: Any, key: str, module: ModuleType, base: type | UnionType) -> Any:
    """As :func:`make_named`, of an argument of an optimizer: a name, or name and args."""
    named: Any = {"name": given} if isinstance(given, str) else given
    args = named.get("args", {}) if isinstance(named, Mapping) else None
    if not isinstance(args, Mapping) or not {"name"} <= named.keys() <= {"name", "args"}:
        raise ConfigError(f"{key}={given!r} is not allowed: it must be a name, or name and args")
    return make_named(named["name"], args, key, module, base)


def takes_guard(cls: type) -> bool:
    """True if an optimizer compares replicas: one of commopt, unless it is a class of one's own without a guard."""
    if not issubclass(cls, OURS):
        return False
    return any(p.name == "guard" or p.kind is p.VAR_KEYWORD for p in inspect.signature(cls).parameters.values())


def _check_unguarded(config: Config) -> None:
    """Raise ConfigError for settings of a comparison of replicas, where nobody makes it: an optimizer that does not
    communicate leaves it to comm.compress, which compares whole models, and repairs none."""
    compared = config.comm.compress is not None and not config.parallel.on_mesh
    for name in ("on_difference",) if compared else ("check_every", "on_difference"):
        given, usual = getattr(config.optim, name), getattr(OptimConfig, name)
        if given not in (None, usual):  # null is what happens
            raise ConfigError(
                f"optim.{name}={given} is not allowed with optim.name={config.optim.name}: only optimizers of commopt "
                f"that communicate compare replicas{'' if compared else ', and comm.compress those of whole models'}; "
                f"it must be {usual}, its default"
            )


def plan_optimizer(config: OptimConfig) -> tuple[type, dict[str, Any]]:
    """The class that a config names and its arguments, those of Muon apart ("of_muon"). Raises ConfigError for what
    does not fit; needs no model."""
    cls = find_class(config.name, "optim.name", PLACES, torch.optim.Optimizer)
    extra: dict[str, Any] = {"lr": config.lr}
    if issubclass(cls, OURS):
        extra["max_grad_norm"] = config.max_grad_norm
    if takes_guard(cls):
        extra["guard"] = commopt.optim.Guard(config.max_skipped, config.check_every, config.on_difference)
    if config.compressor is not None:
        if not issubclass(cls, OURS):
            raise ConfigError(
                f"optim.compressor is not allowed with optim.name={config.name}, which sends nothing itself: "
                "comm.compress compresses the gradients that it steps with"
            )
        check_arguments(cls, {"compressor": None}, "optim")
        extra["compressor"] = make_named(
            config.compressor.name, config.compressor.args, "optim.compressor", commopt.compress, AnyCompressor
        )
    check = check_muon if is_muon(cls) else functools.partial(check_arguments, cls)
    check(config.args, "optim.args", OWN_KEYS)
    args, steps_with = dict(config.args), cls
    for name in args:
        if name.endswith("_compressor") and args[name] is not None:  # whether there must be one, the class says
            args[name] = make_given(args[name], f"optim.args.{name}", commopt.compress, AnyCompressor)
    if issubclass(cls, commopt.outer.OuterOptimizer):
        args, steps_with = plan_outer(cls, args)
    if config.weight_decay:
        check_arguments(steps_with, {"weight_decay": None}, "optim")
    return cls, extra | ({"of_muon": args} if is_muon(cls) else args)


def plan_compression(config: Config) -> dict[str, Any] | None:
    """The arguments of :func:`commopt.compress_gradients` that a config names, or None. Raises ConfigError for what
    does not fit."""
    given, key = config.comm.compress, "comm.compress"
    if given is None:
        return None
    named: OfGradients = make_named(given.name, given.args, key, commopt.compress, OfGradients)
    feedback: Any = given.feedback
    if not isinstance(feedback, bool):
        feedback = make_given(feedback, f"{key}.feedback", commopt.gradients, LoCo)
        if not isinstance(named, Compressor):
            raise ConfigError(
                f"{key}.feedback={given.feedback!r} is not allowed with {key}.name={given.name}: it must be true or "
                "false"
            )
    out: dict[str, Any] = {"compressor": named, "feedback": feedback}
    if given.warmup_steps:
        out["warmup_steps"] = given.warmup_steps
    for name, value in (("inside", given.inside), ("weights", given.weights)):
        if value is not None:
            out[name] = plan_exchange(value, f"{key}.{name}", differences=name == "weights")
    if config.parallel.shard == 1:
        _check_whole(config, given, isinstance(named, Compressor))
    return out


def _check_whole(config: Config, given: GradientsConfig, of_rows: bool) -> None:
    """Raise ConfigError for what cannot be compressed where FSDP2 does not cut the model. ``of_rows``: whether the
    compressor of the mean gradients is one of rows."""
    cut, inside = "FSDP2 must cut the model", given.inside is not None

    def refuse(name: str, allowed: str, beside: str = "") -> NoReturn:
        what = f"comm.compress.{name}={getattr(given, name)!r}"
        raise ConfigError(f"{what} is not allowed with {beside}parallel.shard=1: {allowed}")

    if given.weights is not None:
        refuse("weights", cut)
    if inside and config.comm.ranks_per_node == 1:
        refuse("inside", f"{cut}, or comm.ranks_per_node say how many ranks are a machine")
    if inside and not of_rows:
        refuse(
            "inside",
            f"{cut}, or the other compressor be one of rows such as Int4",
            f"comm.compress.name={given.name} and ",
        )


def plan_exchange(given: Any, key: str, differences: bool) -> Compressor | Differences:
    """A compressor by name, or Differences by another one."""
    name, args = (given.get("name"), given.get("args", {})) if isinstance(given, Mapping) else (given, {})
    if differences and name == "Differences":
        if isinstance(args, Mapping) and "compressor" in args:
            inner = make_given(args["compressor"], f"{key}.args.compressor", commopt.compress, Compressor)
            args = {**args, "compressor": inner}
        whole = {**given, "args": args} if isinstance(given, Mapping) else given
        made: Differences = make_given(whole, key, commopt.gradients, Differences)
        return made
    compressor: Compressor = make_given(given, key, commopt.compress, Compressor)
    return compressor


def plan_outer(cls: type, args: Mapping[str, Any]) -> tuple[dict[str, Any], type]:
    """The arguments of an outer optimizer, and the class of its base: what the config names becomes what it is, and
    ``base_args`` go to the base. Raises ConfigError for what does not fit."""
    key, args = "optim.args", dict(args)
    own = [name for name in inspect.signature(cls).parameters if name != "params"]  # what takes the others: base_args
    for name in args:
        if name not in own:
            hint = nearest(name, [n for n in own if n not in OWN_KEYS])
            raise ConfigError(
                f"{key}.{name}: {cls.__name__} has no such argument{hint}; those of its base are in {key}.base_args"
            )
    base = find_class(args.pop("base", "AdamW"), f"{key}.base", (torch.optim, commopt.optim), torch.optim.Optimizer)
    of_base = args.pop("base_args", {})
    if not isinstance(of_base, Mapping):
        raise ConfigError(f"{key}.base_args={of_base!r} is not allowed: it must be arguments of {base.__name__}")
    check = check_muon if is_muon(base) else functools.partial(check_arguments, base)
    check(of_base, f"{key}.base_args", {**{name: f"{key}.{name}" for name in own}, **OWN_KEYS})
    check_arguments(base, {"lr": None}, "optim")
    if args.get("sign") is not None:
        args["sign"] = make_given(args["sign"], f"{key}.sign", commopt.outer, commopt.outer.SignRule)
    if args.get("streaming") is not None:
        given = args["streaming"]
        if not isinstance(given, Mapping):
            raise ConfigError(f"{key}.streaming={given!r} is not allowed: it must be arguments of Streaming, or null")
        check_arguments(commopt.outer.Streaming, given, f"{key}.streaming")
        args["streaming"] = build(commopt.outer.Streaming, f"{key}.streaming", **given)
    return {**({"of_muon": dict(of_base)} if is_muon(base) else {"base": base, **of_base}), **args}, base


def check_name(name: str, key: str) -> None:
    """Raise ConfigError for the name of no optimizer, as far as that can be known without importing."""
    with contextlib.suppress(NotImported), without_importing():
        find_class(name, key, PLACES, torch.optim.Optimizer)


WHOLE_ONLY = (torch.optim.Adafactor, torch.optim.Rprop)
"""Optimizers of torch that fail of DTensors in their step."""


def check_plan(config: Config) -> None:
    """Raise ConfigError for an optimizer, a compressor or a backend that cannot be, or not together."""
    if config.optim.settings:
        raise ConfigError(
            f"optim.settings={config.optim.settings!r} is of config files, where optim.name chooses among them; from "
            "Python give lr=, args= and so on themselves"
        )
    cls, args = plan_optimizer(config.optim)
    if all(known.__module__.split(".")[0] in HARMLESS for known in (cls, args.get("base", cls))):
        try_out(config.optim)
    own = backend_class(config.comm)
    if not takes_guard(cls):
        _check_unguarded(config)
    if config.parallel.on_mesh:
        _check_steps_what_is_cut(config, cls, args.get("base", cls))
    if config.comm.compress is not None:
        plan_compression(config)
    if issubclass(cls, OURS):
        _check_ours(config, cls)
        return
    nodes = config.comm.ranks_per_node
    for key, value, allowed in (
        ("backend", config.comm.backend if own is not None else None, "auto, gloo and nccl"),
        ("ranks_per_node", None if nodes == 1 or config.comm.compress is not None else nodes, "1"),
    ):
        if value is not None:
            raise ConfigError(
                f"comm.{key}={value} is not allowed with optim.name={config.optim.name}: that is trained under "
                f"DistributedDataParallel, which has {allowed}"
            )


def _check_steps_what_is_cut(config: Config, cls: type, stepping: Any) -> None:
    """Raise ConfigError for an optimizer ``cls``, whose local steps ``stepping`` takes, that needs whole tensors."""
    if issubclass(cls, PlainOptimizer):
        raise ConfigError(
            f"optim.name={config.optim.name} is not allowed with parallel.*: it needs whole tensors; "
            "OneBitLamb is LAMB up to its freeze_step"
        )
    if stepping in WHOLE_ONLY:
        raise ConfigError(
            f"{stepping.__name__} is not allowed with parallel.*: torch's does not step tensors that are cut"
        )


def _check_ours(config: Config, cls: Any) -> None:
    """Raise ConfigError for what an optimizer of commopt does not go with."""
    if config.comm.compress is not None:
        raise ConfigError(
            f"comm.compress.name={config.comm.compress.name} is not allowed with optim.name={config.optim.name}, "
            "which sends what it compresses itself, by optim.compressor: it must be null"
        )
    if config.parallel.on_mesh:
        check_arguments(cls, {"process_group": None}, "parallel")
    if config.comm.ranks_per_node > 1 and not cls.knows_nodes:
        raise ConfigError(
            f"comm.ranks_per_node={config.comm.ranks_per_node} is not allowed with optim.name={config.optim.name}, "
            "which knows no nodes of several ranks: it must be 1"
        )


def check_without_importing(config: Config) -> None:
    """As :func:`check_plan`, as far as it can be known without importing what dotted paths name."""
    for check in (lambda: check_plan(config), lambda: backend_class(config.comm)):
        with contextlib.suppress(NotImported), without_importing():
            check()


def try_out(config: OptimConfig) -> None:
    """Make the optimizer for a small model, alone, and let one of torch's step: what it says of its arguments is said
    before a corpus is read. Raises ConfigError."""
    layers = {"embed": nn.Embedding(8, 4), "hidden": nn.Linear(4, 4), "norm": nn.LayerNorm(4), "head": nn.Linear(4, 8)}
    model = nn.ModuleDict(layers)
    optimizer = make_optimizer(config, model, LocalBackend())
    if isinstance(optimizer, OURS) or (config.args.get("capturable") and torch.cuda.is_available()):
        return
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    try:
        optimizer.step()
    except (RuntimeError, TypeError, AssertionError) as error:
        said = " ".join(str(error).split())
        raise ConfigError(f"optim.name={config.name} does not step as it must here: {said}") from error


def make_optimizer(
    config: OptimConfig, model: nn.Module, backend: Backend | None = None, mesh: DeviceMesh | None = None
) -> torch.optim.Optimizer:
    """The optimizer that a config names, over two named parameter groups."""
    cls, args = plan_optimizer(config)
    if issubclass(cls, OURS):
        if mesh is not None:
            args["process_group"] = mesh
        elif backend is not None:
            args["backend"] = backend
    groups = parameter_groups(model, config.weight_decay)
    if "outer_weight_decay" in inspect.signature(cls).parameters:  # biases and norms are decayed by nobody
        groups[1]["outer_weight_decay"] = 0.0
    if "of_muon" in args:
        mixed = make_muon(model, groups, args.pop("lr"), args.pop("of_muon"))
        return mixed if is_muon(cls) else build(cls, "optim", mixed, **args)
    return build(cls, "optim", groups, **args)
