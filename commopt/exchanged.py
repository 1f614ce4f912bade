"""Parameters that ``load_state_dict(assign=True)`` would put others in the place of, unseen by who watches them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


def refuse_assign(model: nn.Module, params: Collection[int], why: str) -> dict[int, RemovableHandle]:
    """Has ``load_state_dict(assign=True)`` raise RuntimeError, with ``why``, before it exchanges any of the parameters
    of ``model`` with the ids ``params``. Returns what ends that, by the id of a module; copies of the model are free of
    it."""
    owners = [m for m in model.modules() if any(id(p) in params for p in m.parameters(recurse=False))]
    return {id(m): m.register_load_state_dict_pre_hook(_Refusal(why)) for m in owners}


class _Refusal:
    """A hook before a module's state is loaded; empty in a copy of the module."""

    def __init__(self, why: str = "") -> None:
        self.why = why

    def __reduce__(self) -> tuple[type[_Refusal], tuple[()]]:
        return type(self), ()

    def __call__(self, module: nn.Module, state: Any, prefix: str, metadata: dict[str, Any], *_: Any) -> None:
        if self.why and metadata.get("assign_to_params_buffers"):
            raise RuntimeError(f"load_state_dict(assign=True) would exchange parameters of the model: {self.why}")
