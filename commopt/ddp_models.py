"""The DistributedDataParallel models that there are: inside a module, and around parameters."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def ddp_models_in(model: Any) -> list[DistributedDataParallel]:
    """Those that ``model`` is, or has inside."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return [module for module in modules if isinstance(module, DistributedDataParallel)]


def ddp_models_around(params: Sequence[Tensor]) -> list[DistributedDataParallel]:
    """Those that average gradients of any of ``params``. Looks at all objects there are, which takes some 0.1 s where
    these are a million: seldom."""
    mine = {id(p) for p in params}
    kinds = _with_subclasses(DistributedDataParallel)  # it has abstract bases: issubclass() of every object is slow
    models = [x for x in gc.get_objects() if type(x) in kinds]
    return [x for x in models if any(id(p) in mine for p in getattr(x, "_module_parameters", ()))]


def _with_subclasses(cls: type) -> set[type]:
    return {cls}.union(*map(_with_subclasses, cls.__subclasses__()))
