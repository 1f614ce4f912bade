"""Classes that a config names, and their arguments."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from inspect import isabstract
from types import ModuleType, UnionType
from typing import Any, get_args, get_origin

from torch.optim import LBFGS, Optimizer

from commopt.agreement import checks
from commopt.optim import CommOptimizer
from commopt.outer import Mixed, OuterOptimizer
from commopt.train.errors import ConfigError
from commopt.train.parse import nearest

HARMLESS = ("commopt", "torch")
"""Packages that are imported already."""
_BASE = "it is what others are made of"
_NOT_BY_NAME = {
    Optimizer: _BASE,
    CommOptimizer: _BASE,
    OuterOptimizer: _BASE,
    Mixed: "it is of several optimizers; optim.name=Muon has AdamW for what is no hidden matrix",
    LBFGS: "it evaluates the loss several times in a step, and takes no groups of parameters",
}
"""Optimizers that a config cannot name, and why."""
_importing: ContextVar[bool] = ContextVar("_importing", default=True)


class NotImported(Exception):
    """A class is named by a dotted path, and its module is not to be imported now: that runs its code."""


@contextlib.contextmanager
def without_importing() -> Iterator[None]:
    """Context in which a dotted path into any package but :data:`HARMLESS` raises NotImported."""
    token = _importing.set(False)
    try:
        yield
    finally:
        _importing.reset(token)


def import_dotted(name: str, key: str) -> Any:
    """Imports what a dotted path names; None if its module has no such attribute. Raises ConfigError without the
    module."""
    path, _, attribute = name.rpartition(".")
    if not _importing.get() and path.split(".")[0] not in HARMLESS:
        raise NotImported
    try:
        return getattr(importlib.import_module(path), attribute, None)
    except ImportError as error:
        raise ConfigError(f"{key}={name!r}: cannot import {path}: {error}") from None


def find_class(name: str, key: str, modules: tuple[ModuleType, ...], base: type | UnionType) -> type:
    """The class that a config names: an attribute of one of ``modules``, or a dotted path; a subclass of ``base``,
    which may be several.

    Raises ConfigError, with the nearest valid name, where there is none.
    """
    if not isinstance(name, str):
        raise ConfigError(f"{key}={name!r} is not allowed: it must be a name")
    if "." in name:
        found = import_dotted(name, key)
    else:
        found = next((getattr(module, name) for module in modules if hasattr(module, name)), None)
    if isinstance(found, type) and found in _NOT_BY_NAME:
        raise ConfigError(f"{key}={name!r} is not allowed: {_NOT_BY_NAME[found]}")
    if not _is_a(found, base):
        public = [name for module in modules for name, one in vars(module).items() if _is_a(one, base)]
        places = " or ".join(module.__name__ for module in modules)
        kinds = " or ".join(kind.__name__ for kind in get_args(base) or (base,))
        raise ConfigError(f"{key}={name!r} is no {kinds} of {places}{nearest(name, public)}")
    return found


def _is_a(found: Any, base: type | UnionType) -> bool:
    """True if it is a class that can be made, a subclass of ``base``."""
    if not isinstance(found, type) or get_origin(found) is not None:  # to Python 3.10 tuple[int, int] is a type, too
        return False
    return issubclass(found, base) and found not in _NOT_BY_NAME and not isabstract(found)


def check_arguments(cls: type, args: Mapping[str, Any], key: str, taken: Mapping[str, str] | None = None) -> None:
    """Raise ConfigError for an argument that ``cls`` has not, naming the nearest that it has, or that is ``taken``: set
    by another key of the config, or the model's parameters."""
    taken = taken or {}
    parameters, any_other = arguments_of(cls)
    for name in args:
        if not isinstance(name, str):
            raise ConfigError(f"{key} has the key {name!r}, and keys must be words")
        if name in taken:
            raise ConfigError(f"{key}.{name}: set {taken[name]} instead")
        if name == "params":
            raise ConfigError(f"{key}.params is not allowed: they are the model's")
        if name not in parameters and not any_other:
            valid = [n for n in parameters if n not in (*taken, "params")]
            close = difflib.get_close_matches(name, [*valid, *taken], n=1)
            hint = f"; did you mean {taken[close[0]]}?" if close and close[0] in taken else nearest(name, valid)
            raise ConfigError(f"{key}.{name}: {cls.__name__} has no such argument{hint}")


def arguments_of(cls: type) -> tuple[list[str], bool]:
    """The names of the arguments of ``cls``, and whether it takes any other one. An optimizer of commopt that takes
    others takes keywords of torch's optimizer, which it says."""
    takes_others = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(cls).parameters.values())
    known = getattr(cls, "known_options", None)
    return [*checks.arguments_of(cls), *(known or () if takes_others else ())], takes_others and known is None


def build(cls: type, key: str, *args: Any, **kwargs: Any) -> Any:
    """Make ``cls``; what it says about its arguments becomes a ConfigError. YAML's lists are tuples for it. Where it is
    Python that says something, of a value of another type, the arguments are named, too."""
    kwargs = {name: tuple(value) if isinstance(value, list) else value for name, value in kwargs.items()}
    try:
        return cls(*args, **kwargs)
    except (ValueError, TypeError, RuntimeError) as error:
        plain = {name: value for name, value in kwargs.items() if isinstance(value, (str, int, float, tuple))}
        given = f"({', '.join(f'{name}={value!r}' for name, value in plain.items())})"
        what = f"{cls.__name__}{given if isinstance(error, TypeError) else ''}"
        raise ConfigError(f"{key}: {what}: {' '.join(str(error).split())}") from error
