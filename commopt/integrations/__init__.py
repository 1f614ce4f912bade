"""Doors for other people's trainers; one module for each, which imports its framework. Nothing is imported before it is
asked for: ``import commopt.integrations.timm`` asks for one, and so does ``commopt.integrations.timm`` after ``import
commopt``."""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

_DOORS = ("accelerate", "lightning", "timm", "torchtitan", "transformers")


if not TYPE_CHECKING:  # to a type checker every name would be there

    def __getattr__(name: str) -> ModuleType:
        """The door ``name``, imported now. Raises ImportError if its framework is not installed."""
        if name in _DOORS:
            try:
                return importlib.import_module(f"{__name__}.{name}")
            except ModuleNotFoundError as error:
                extra = {"accelerate": "hf", "transformers": "hf"}.get(name, name)
                message = f"{error}: commopt.integrations.{name} needs it; pip install 'commopt[{extra}]'"
                raise ModuleNotFoundError(message, name=error.name) from error
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; there are {', '.join(_DOORS)}")
