"""Hooks on parameters, for whoever wants to know when a gradient has arrived."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Watches(Protocol):
    """Something that sees gradients arrive."""

    def arrived(self, p: Tensor) -> None:
        """The gradient of ``p`` is complete, as far as this backward goes."""


class Arrivals:
    """Hooks that tell who ``watches`` of gradients, one at a time: autograd has a thread for each device, and a model
    may be on several. They go when this does: parameters may outlive it, and it does not hold who watches."""

    def __init__(self, watches: Watches) -> None:
        self._hook = _hook_of(weakref.ref(watches))
        self._handles: dict[int, Any] = {}
        self._inside: dict[int, int] = {}
        weakref.finalize(self, remove_all, self._handles).atexit = False

    def follow(self, params: Sequence[Tensor]) -> None:
        """From now on tells of ``params``, and of no others.

        Where ``model.to()`` has exchanged what is inside a parameter, as it does with DTensors, autograd has lost its
        hooks, which only Python knows then: it is told of them once more.
        """
        inside = {id(p): p._cdata for p in params}
        for gone in self._handles.keys() - inside.keys():
            self._handles.pop(gone).remove()
        for p in params:
            if id(p) not in self._handles:
                self._handles[id(p)] = p.register_post_accumulate_grad_hook(self._hook)
            elif self._inside[id(p)] != inside[id(p)]:
                p._post_accumulate_grad_hooks = p._post_accumulate_grad_hooks  # type: ignore[attr-defined]
        self._inside = inside

    def remove(self) -> None:
        """Takes the hooks away."""
        remove_all(self._handles)


def remove_all(handles: dict[int, Any]) -> None:
    """Removes hooks."""
    for handle in handles.values():
        handle.remove()
    handles.clear()


def _hook_of(watches: Callable[[], Watches | None]) -> Callable[[Tensor], None]:
    lock = threading.RLock()

    @torch._disable_dynamo  # torch.compile would trace it where it compiles the step as a whole
    def arrived(p: Tensor) -> None:
        watching = watches()
        if watching is not None:
            with lock:
                watching.arrived(p)

    return arrived
