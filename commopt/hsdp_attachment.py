"""Lets an optimizer average over the replicas of a model in FSDP2's stead (HSDP)."""

from __future__ import annotations

import logging
import weakref
from typing import Any

from torch import nn

from commopt.ddp_attachment import Ours, strangers
from commopt.exchanged import refuse_assign
from commopt.hsdp import TakenReplicas, give_back, look_anew, take_replicas
from commopt.state import binding
from commopt.step.arrival import remove_all

logger = logging.getLogger("commopt")


def average_over_replicas(model: nn.Module, optimizer: Ours) -> None:
    """Has ``optimizer`` average over the replicas of ``model``, which FSDP2 has sharded inside them.

    Raises:
        ValueError: the optimizer holds none of its parameters, or FSDP2's replicas cannot be taken.
        RuntimeError: another user has them.
    """
    look_anew(model)
    now = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not now & {id(p) for p in model.parameters()}:
        raise ValueError(strangers(model))
    taken = take_replicas(model, "attach()", optimizer.reduction, now)
    if all(optimizer in one.holders for one in taken) and taken:
        return
    try:
        binding.take_replicas(optimizer)
    except BaseException:
        give_back(taken)
        raise
    for one in taken:
        one.holders.add(optimizer)
    if optimizer.rows_merged > 1 and optimizer.topology.rank == 0:
        logger.warning(
            "%s: its state was loaded before attach(), so that of what each of %d replicas had of its own (residuals; "
            "with local steps parameters and momenta) all have the mean now. Attach first, then load, to go on exactly",
            type(optimizer).__name__, optimizer.rows_merged,
        )  # fmt: skip
    optimizer.rows_merged = 0
    params = {id(p) for one in taken for p in one.trained()}
    why = "nobody would average the gradients of the new ones; load it before attach(), or without assign=True"
    handles = refuse_assign(model, params, why)
    handles[id(optimizer)] = optimizer.register_step_pre_hook(_BeforeStep(taken))
    weakref.finalize(optimizer, _let_go, taken, handles).atexit = False
    optimizer.warn_in_evaluation(model)


def _let_go(taken: list[TakenReplicas], handles: dict[int, Any]) -> None:
    remove_all(handles)
    give_back(taken)


class _BeforeStep:
    """A hook before each step of an optimizer that averages over replicas in FSDP2's stead."""

    def __init__(self, taken: list[TakenReplicas]) -> None:
        self._taken, self._looked_at = taken, list[tuple[int, ...]]()

    def __call__(self, *_: Any) -> None:
        for one in self._taken:
            one.check()
        now = [(len(one.holders), *map(id, one.trained())) for one in self._taken]
        if now != self._looked_at:  # parameters were frozen or unfrozen since, or an optimizer has gone
            self._check_held()
            self._looked_at = now

    def _check_held(self) -> None:
        """Makes sure that somebody averages all that FSDP2 does not.

        Raises:
            ValueError: an optimizer that is not attached has some of it.
        """
        for one in self._taken:
            held = {id(p) for holder in one.holders for group in holder.param_groups for p in group["params"]}
            others = [p for p in one.trained() if id(p) not in held]
            if others:
                raise ValueError(
                    f"{len(others)} trainable parameters, such as one of shape {tuple(others[0].shape)}, are in one of "
                    "FSDP2's groups with parameters of an attached optimizer, and in no attached optimizer themselves: "
                    "nobody would average them over the replicas. Give them to one, freeze them, or give their module "
                    "a fully_shard() of its own, which leaves their average to FSDP2"
                )
