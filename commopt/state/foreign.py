"""States that no optimizer of commopt has saved: which of them one can be continued from.

A group or a parameter of another optimizer is told by what it lacks: of what torch calls by one name everywhere, such
as ``betas`` and ``exp_avg_sq``, it must have what is here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

from torch import Tensor

WHOSE = "optimizer"
"""Key of parameter groups of our optimizers: whose they are, for whoever loads them. Of what is no tensor, tools for
checkpoints keep nothing but groups."""
OUTER = "outer_optimizer"
"""Key of those of an outer optimizer: whose they are, beside whose its base's are."""
SETTINGS = ("betas", "momentum", "nesterov")
"""Hyper-parameters that tell families of optimizers apart."""
MOMENTS = ("exp_avg", "exp_avg_sq", "exp_inf", "square_avg", "sum")
"""State that a family cannot do without once it has taken a step."""
_OUTER = {"anchor", "outer_momentum"}
"""State of outer optimizers."""


def name_of_ours(cls: type) -> str:
    """Name of the class of commopt that ``cls`` is, or is derived from: an optimizer's in what it saves."""
    return next(base.__name__ for base in cls.__mro__ if base.__module__.startswith("commopt."))


def check_form(given: Any) -> None:
    """Raises ValueError unless ``given`` is what ``state_dict()`` of some optimizer gives."""
    if isinstance(given, Mapping) and {"state", "param_groups"} <= given.keys():
        return _check_inside(given)
    if isinstance(given, Mapping) and {"rank", "world_size", "layout"} <= given.keys():
        raise ValueError(
            "load_state_dict() got the part that split_state_dict() took apart for one rank; give it what "
            "join_state_dict(replicated, parts, rank, world_size) makes of both"
        )
    what = repr(given)
    if isinstance(given, Mapping):
        what = f"a dict with {', '.join(map(repr, list(given)[:5])) or 'nothing'}"
    raise ValueError(
        f"load_state_dict() takes what state_dict() of an optimizer gave, with 'state' and 'param_groups', got {what}; "
        "of a checkpoint of several things give the entry that is the optimizer's"
    )


def _check_inside(given: Mapping[str, Any]) -> None:
    groups, state, own = given["param_groups"], given["state"], given.get("residuals")
    whole = isinstance(groups, Sequence) and isinstance(state, Mapping) and (own is None or isinstance(own, Mapping))
    if not whole or not all(isinstance(group, Mapping) and "params" in group for group in groups):
        raise ValueError(
            "the loaded state is damaged: 'param_groups' must be a list of dicts with 'params', and 'state' a dict"
        )
    ids = ids_of(given)
    odd = [i for i in ids if not isinstance(state.get(i, {}), Mapping)]
    if odd:
        raise ValueError(f"the loaded state is damaged: that of parameter {odd[0]} is {state[odd[0]]!r}, not a dict")
    unnamed = [(i, key) for i in ids for key in state.get(i, ()) if not isinstance(key, str)]
    if unnamed:
        i, key = unnamed[0]
        raise ValueError(f"the loaded state is damaged: that of parameter {i} has the key {key!r}, not a name")
    if own and not {"rank", "world_size", "layout", "state"} <= own.keys():
        raise ValueError(f"the loaded state is damaged: its 'residuals' have only {', '.join(map(repr, own))}")


def check_saver(name: str, given: Mapping[str, Any], loads: Collection[str]) -> None:
    """Raises ValueError if the state ``given`` is of an optimizer of commopt that is none of those whose state ``name``
    ``loads``."""
    remedy = "load it into the optimizer that has saved it, or begin with the weights of the model alone"
    for saver in savers(given):
        if saver not in loads:
            raise ValueError(f"the loaded state is that of {saver}, and this is {name}: {remedy}")


def savers(given: Mapping[str, Any]) -> list[str]:
    """Whose the groups of the state ``given`` are, of those that say so.

    Raises:
        ValueError: an outer optimizer has saved it under the key of its base, as it once did.
    """
    key = OUTER if is_of_outer(given) else WHOSE
    for group in given["param_groups"]:
        if "(" in str(group.get(WHOSE)):
            raise ValueError(
                f"the loaded state is that of {group[WHOSE]}, saved before commopt 0.2.0, where the name of an outer "
                "optimizer had another key: load it with the version that has saved it, or begin with the weights of "
                "the model alone"
            )
    return [group[key] for group in given["param_groups"] if group.get(key) is not None]


def is_of_outer(given: Mapping[str, Any]) -> bool:
    """True if ``given`` is the state of an outer optimizer, and not that of its base alone, which has the same groups,
    but moments and counters in place of anchors."""
    of_both = any(OUTER in group or "round_step" in group for group in given["param_groups"])
    if of_both and "base" in (given.get("residuals") or {}):  # whatever a user has added beside
        return True
    entries = [entry for i in ids_of(given) if (entry := given["state"].get(i))]
    return of_both and (not entries or any(_OUTER & entry.keys() and "step" not in entry for entry in entries))


def check_family(
    name: str,
    given: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    moments: Iterable[Iterable[str]],
) -> None:
    """Raises ValueError if ``given`` is the state of an optimizer of another family.

    Args:
        name: of the optimizer that is to load it.
        given: the state.
        groups: the optimizer's own.
        moments: of each of its parameters, in their order, the names of its state.
    """
    saved: Sequence[Mapping[str, Any]] = given["param_groups"]
    for i, (theirs, mine) in enumerate(zip(saved, groups)):
        for key in SETTINGS:
            if key in mine and key not in theirs:
                _refuse(name, f"its parameter group {i} has no {key!r}", f"groups with {key!r}")
    check_moments(name, given, moments := list(moments))
    for i, names in zip(ids_of(given), moments):
        entry = given["state"].get(i, {})
        needed = [key for key in MOMENTS if key in names]
        other = [key for key in MOMENTS if key in entry and key not in names]
        if other and needed:
            _refuse(name, f"its parameter {i} has {other[0]!r}", f"parameters with {' and '.join(needed)} alone")


def check_counters(groups: Iterable[Mapping[str, Any]], counters: Iterable[str]) -> None:
    """Raises ValueError if a number of steps or rounds in ``groups``, where it is there, is none."""
    for i, group in enumerate(groups):
        for name in counters:
            value = group.get(name, 0)
            single = not isinstance(value, Tensor) or value.numel() == 1
            whole = isinstance(value, (Real, Tensor)) and single and not isinstance(value, bool)
            if not whole or not float(value) >= 0 or float(value) % 1:
                raise ValueError(
                    f"{name} of parameter group {i} in the loaded state must be an int >= 0, got {value!r}: the state "
                    "is damaged"
                )


def check_moments(name: str, given: Mapping[str, Any], moments: Iterable[Iterable[str]]) -> None:
    """Raises ValueError if the state of some parameter in ``given`` lacks one of its ``MOMENTS``; arguments as for
    :func:`check_family`."""
    for i, names in zip(ids_of(given), moments):
        entry = given["state"].get(i, {})
        needed = [key for key in MOMENTS if key in names]
        lacking = [key for key in needed if entry.get(key) is None]
        if lacking and any(key in entry for key in ("step", *MOMENTS)):  # else it was not trained, and is a user's own
            _refuse(name, f"its parameter {i} has no {lacking[0]!r}", f"parameters with {' and '.join(needed)}")


def check_names(name: str, given: Mapping[str, Any], own: Collection[str]) -> None:
    """Raises ValueError if some parameter in ``given``, the state of an optimizer that is none of commopt's, has a
    number by one of the names ``own``: what these mean elsewhere, nobody knows."""
    for i in ids_of(given):
        for key in given["state"].get(i, ()):
            if key in own:
                _refuse(name, f"its parameter {i} has {key!r}, which is another number here", "moments alone")


def corrected_as(given: dict[str, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The state ``given``, with the ``bias_correction`` of ``groups`` where it is of DeepSpeed's 1-bit optimizers:
    theirs have the key, True by default, and never correct."""
    key, saved = "bias_correction", given["param_groups"]
    if not any("corrected_tensor_size" in given["state"].get(i, ()) for i in ids_of(given)):
        return given
    if len(saved) != len(groups):  # torch refuses it
        return given
    pairs = zip(saved, groups)
    mine = [{**theirs, key: own[key]} if key in theirs and key in own else theirs for theirs, own in pairs]
    return {**given, "param_groups": mine}


def ids_of(given: Mapping[str, Any]) -> list[Any]:
    """What the parameters are known by in the state ``given``, in their order."""
    return [i for group in given["param_groups"] for i in group["params"]]


def momenta_lost(given: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Messages about groups that take a momentum of 0 from ``given``, where they had one."""
    lost = [
        (i, theirs["momentum"], mine["momentum"])
        for i, (theirs, mine) in enumerate(zip(given["param_groups"], groups))
        if mine.get("momentum") and not theirs.get("momentum", 1)
    ]
    return [
        f"the loaded state sets momentum={now} in parameter group {i}, which had {before}: it is of an optimizer "
        f"without momentum. To train with it, set param_groups[{i}]['momentum'] = {before} after load_state_dict()"
        for i, now, before in lost
    ]


def _refuse(name: str, what: str, allowed: str) -> None:
    raise ValueError(
        f"the loaded state is of an optimizer that {name} cannot continue: {what}; allowed are states that {name} has "
        f"saved, and those of other optimizers that have {allowed}. Load it into the optimizer that has saved it, or "
        "begin with the weights of the model alone"
    )
