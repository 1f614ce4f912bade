"""The DistributedDataParallel models that there are: inside a module, and around parameters."""

from __future__ import annotations

import gc
from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def ddp_models_in(model: Any) -> list[DistributedDataParallel]:
    """Those that ``model`` is, or has inside."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return [module for module in modules if isinstance(module, DistributedDataParallel)]


def ddp_models_around(params: Sequence[Tensor]) -> list[DistributedDataParallel]:
    """Those that average gradients of any of ``params``."""
    mine = {id(p) for p in params}
    models = instances_of(with_subclasses(DistributedDataParallel))
    return [x for x in models if any(id(p) in mine for p in getattr(x, "_module_parameters", ()))]


def instances_of(kinds: Collection[type]) -> list[Any]:
    """The objects there are whose class is one of ``kinds``. Looks at all objects: seldom.

    By who refers to the classes: gc.get_objects() would hold what other threads have half made, too, and Python's own
    tuple() fails in such a thread then.
    """
    return [x for x in gc.get_referrers(*kinds) if type(x) in kinds]


def with_subclasses(cls: type) -> set[type]:
    """``cls`` and all classes derived from it."""
    return {cls}.union(*map(with_subclasses, cls.__subclasses__()))
