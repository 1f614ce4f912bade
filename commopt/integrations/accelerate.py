"""Hugging Face accelerate.

model, optimizer, loader = accelerator.prepare(model, commopt.OneBitAdam(model.parameters(), lr=1e-3), loader)
commopt.integrations.accelerate.connect(accelerator, model, optimizer)
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from accelerate import Accelerator
from torch import nn

from commopt.integrations import common, means, parts
from commopt.optim.model_buffers import HowBuffers, check_how

_connected: WeakKeyDictionary[Accelerator, int] = WeakKeyDictionary()
"""Number of optimizers of each that are connected."""


def connect(accelerator: Accelerator, model: nn.Module, optimizer: Any, buffers: HowBuffers = "mean") -> None:
    """Lets ``optimizer`` decide when ``model`` averages gradients, and ``save_state()`` and ``load_state()`` resume to
    the bit.

    Call it once, on all ranks, after ``accelerator.prepare()`` and before ``load_state()``; for several optimizers in
    the same order as when they were saved. Then

    * a DDP model is attached (:func:`commopt.attach`);
    * parameters that FSDP2 has put in place of those that the optimizer was made with are taken over, and so are
      averages over replicas (``dp_replicate_size``);
    * ``save_state()``, which all ranks call, writes each rank's own part of the optimizer's state beside the rest, and
      the mean model where replicas differ; with local steps its buffers, such as BatchNorm's running statistics, are
      ``buffers``, too;
    * ``load_state()`` gives every rank its own part again. In a world of another size each starts from the mean.

    Args:
        accelerator: whose ``prepare()`` it was.
        model: what it gave for the model.
        optimizer: what it gave for an optimizer of commopt.
        buffers: "mean" of the ranks' buffers, or "broadcast", rank 0's. Those of a sharded model are each rank's own.

    Raises:
        ValueError: for another word; if it is no optimizer of commopt that communicates; and what
            :func:`commopt.attach` raises.
    """
    check_how(buffers)
    ours = common.bare(optimizer)
    common.attach_once(model, ours)
    wrapped = set(model.modules())
    index = _connected[accelerator] = _connected.get(accelerator, -1) + 1
    waiting: list[str] = []  # the folder of a load_state() under way

    def save(models: Sequence[nn.Module], weights: list[dict[str, Any]], folder: str) -> None:
        if ours.own_in_state:  # FSDP2: saved already, by all ranks together
            return
        parts.save(ours, folder, index)
        if ours.takes_local_steps and weights:  # after a round buffers differ still
            with means.mean_model([ours], model, buffers):
                for i, inner in enumerate(models):  # accelerate knows a DDP model by what is in it
                    if inner in wrapped:
                        weights[i] = copy.deepcopy(inner.state_dict())  # which keeps tied weights tied

    def load(models: Sequence[nn.Module], folder: str) -> None:
        if not ours.own_in_state:
            waiting[:] = [folder]

    def join(_: Any, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        return parts.join(ours, state_dict, waiting.pop(), index) if waiting else None

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    ours.register_load_state_dict_pre_hook(join)
