"""timm where there is no torchvision, which it imports at once, but uses for images, data sets and a norm alone.

While timm is imported, any module of torchvision is one that is empty but for classes, which are made as they are asked
for and do nothing. Then they are gone from ``sys.modules``, so that whoever looks for torchvision finds none. What timm
has of them must not be used: models that need no such class, its optimizers and its schedules do without.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Any(type):
    """A class that has another one of any name, so that it may stand for an enumeration."""

    def __getattr__(cls, name: str) -> Any:
        return _made(cls, name)


class _Empty(ModuleType):
    """A module that has a class of any name."""

    def __getattr__(self, name: str) -> Any:
        return _made(self, name)


def _made(owner: Any, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    setattr(owner, name, _Any(name, (), {}))
    return vars(owner)[name]


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "torchvision" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextlib.contextmanager
def empty_torchvision() -> Iterator[None]:
    """Context in which torchvision can be imported: the real one where it is installed, else an empty one."""
    if importlib.util.find_spec("torchvision") is not None:
        yield
        return
    finder = _Finder()
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
