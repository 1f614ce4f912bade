"""Keywords of torch's optimizers that those of commopt do not have: taken where they ask for nothing that is not there
anyway, so that a call of torch's class is one of ours, and a parameter group of torch's is one of ours."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from commopt.agreement.checks import arguments_of, nearest

logger = logging.getLogger("commopt")

_ANY = "foreach", "fused"  # how a step is computed: here by fused kernels

_REASONS = {
    "amsgrad": "it keeps the largest variances, and compression needs one that stands",
    "capturable": "a step talks to other ranks, which a CUDA graph cannot hold",
    "differentiable": "a step is not differentiated",
    "dampening": "the momentum that is compressed has none",
}
_ASKS_NOTHING = {"amsgrad": False, "capturable": False, "differentiable": False, "dampening": 0}
_CHANGES_RESULTS = "amsgrad", "dampening"  # those that are more than a way to compute the same

OF_ADAM = (*_ANY, "amsgrad", "capturable", "differentiable")
"""Of torch.optim.Adam and AdamW, but for ``decoupled_weight_decay``, which theirs have."""
OF_LAMB = (*OF_ADAM, "decoupled_weight_decay")
"""Of torch.optim.Adam: ``decoupled_weight_decay=False``, its default, is taken only without any decay."""
OF_LION = _ANY
"""Of no optimizer of torch, which has no Lion: what frameworks give to any."""
OF_SGD = (*_ANY, "dampening", "differentiable")
"""Of torch.optim.SGD."""


def check_torch_options(
    cls: type, options: Mapping[str, Any], known: Sequence[str], groups: Sequence[Mapping[str, Any]]
) -> None:
    """Checks the further keywords that an optimizer of class ``cls`` was given.

    Raises:
        TypeError: for one that torch's optimizer does not have either.
        ValueError: for one that asks for what is not there.
    """
    for key, value in options.items():
        if key not in known:
            taken = arguments_of(cls)
            hint = nearest(key, taken) or f"; allowed are {', '.join([*taken, *known])}"
            raise TypeError(f"{cls.__name__}.__init__() got an unexpected keyword argument {key!r}{hint}")
        if key in _ANY and value not in (None, True, False):
            raise ValueError(f"{key} must be None, True or False, got {value!r}")
        _refuse(cls, key, value, "")
    for group in groups:
        _refuse_coupled_decay(cls, {**group, **options}, known, "")


def check_group_options(cls: type, group: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    """Raises ValueError for a keyword of torch's optimizer that asks for what is not there, in a parameter group;
    ``where`` is which group it is."""
    for key, value in group.items():
        _refuse(cls, key, value, f" in {where}")
    _refuse_coupled_decay(cls, group, known, f" in {where}")


def check_group_keys(cls: type, group: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Looks at keys of a parameter group that are none of those ``known``. torch lets users keep there what they like:
    what reads like a mistake is warned of.

    Raises:
        ValueError: for a setting of the whole optimizer.
    """
    for key in group.keys() - {*known, "params", "param_names"}:
        if key in arguments_of(cls):
            raise ValueError(
                f"{where} has {key}={group[key]!r}, which is a setting of the whole optimizer: give it to "
                f"{cls.__name__}(...); allowed in a group are {', '.join(sorted(known))}"
            )
        if hint := nearest(key, known, 0.85):
            logger.warning("%s: %s has %r, which changes nothing%s", cls.__name__, where, key, hint)


def leave_out_of_loaded(cls: type, groups: Sequence[dict[str, Any]], known: Sequence[str], tells: bool = True) -> None:
    """Takes out of parameter groups that were loaded what a run of torch's optimizer had and this one has not. Warns
    of it, if this rank ``tells``."""
    for i, group in enumerate(groups):
        gone = _leave_out(group, known)
        if gone and tells:
            logger.warning(
                "%s: parameter group %d of the loaded state has %s, which this optimizer has not: the run goes on "
                "without it",
                cls.__name__, i, " and ".join(gone),
            )  # fmt: skip


def _leave_out(group: dict[str, Any], known: Sequence[str]) -> list[str]:
    """What was taken out of ``group``, in words."""
    out = [f"{key}={group[key]!r}" for key in _CHANGES_RESULTS if group.get(key)]
    group.update({key: _ASKS_NOTHING[key] for key in _CHANGES_RESULTS if group.get(key)})
    key = "decoupled_weight_decay"
    if key in known and not group.get(key, True):
        out += [f"{key}=False"] if group.get("weight_decay") else []
        group[key] = True
    return out


def _refuse(cls: type, key: str, value: Any, where: str) -> None:
    if key in _REASONS and value not in (_ASKS_NOTHING[key], None):
        raise ValueError(
            f"{cls.__name__} has no {key}={value!r}{where}: {_REASONS[key]}; allowed is {_ASKS_NOTHING[key]!r}"
        )


def _refuse_coupled_decay(cls: type, group: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    key = "decoupled_weight_decay"
    if key in known and not group.get(key, True) and group.get("weight_decay"):
        raise ValueError(
            f"{cls.__name__} has no {key}=False{where}: its weight decay is a part of the update, as LAMB's is, and "
            "not added to the gradient; allowed is True, or weight_decay=0"
        )
