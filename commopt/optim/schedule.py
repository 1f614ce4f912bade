"""The schedules of 0/1 Adam in a parameter group: T_v and T_u as numbers (``variance_...``, ``sync_...``), and of which
kind a step is by them. Pure functions of the group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from commopt.optim.policies import SyncPolicy, VariancePolicy

_POLICIES: dict[str, type[VariancePolicy] | type[SyncPolicy]] = {"variance": VariancePolicy, "sync": SyncPolicy}


def numbers_of(name: str, policy: Any) -> dict[str, Any]:
    """The policy ``name``, "variance" or "sync", as numbers of a parameter group. What is wrong with them,
    :func:`check_policies` says, on every rank; so it does where ``policy`` is none, which is then there as it was
    given."""
    default = _POLICIES[name]()
    if policy is None or isinstance(policy, type(default)):
        given = asdict(policy or default)
    elif isinstance(policy, Mapping):
        given = {**asdict(default), **policy}
    else:
        return {**numbers_of(name, None), name: policy}
    return {f"{name}_{key}": value for key, value in given.items()}


def put_policies(group: dict[str, Any]) -> None:
    """Puts numbers in the place of the policies that a new ``group`` has for itself."""
    for name in _POLICIES:
        if name in group:
            group.update(numbers_of(name, group.pop(name)))


def check_policies(group: Mapping[str, Any]) -> None:
    """Raises ValueError for a policy that is none, and for numbers of one that are out of range, or unknown."""
    for name, policy in _POLICIES.items():
        if name in group:
            raise ValueError(
                f"{name} must be a {policy.__name__} or a mapping of its arguments, such as {asdict(policy())}, got "
                f"{group[name]!r}"
            )
    variance_of(group)
    sync_of(group)
    known = {**numbers_of("variance", None), **numbers_of("sync", None)}
    for key in group:
        if key.startswith(("variance_", "sync_")) and key not in known:
            raise ValueError(f"a policy has no {key!r}; there are {', '.join(known)}")


def variance_of(group: Mapping[str, Any]) -> VariancePolicy:
    """T_v of ``group``."""
    return VariancePolicy(group["variance_kappa"], group["variance_stop"])


def sync_of(group: Mapping[str, Any]) -> SyncPolicy:
    """T_u of ``group``."""
    return SyncPolicy(group["sync_first"], group["sync_double_every"], group["sync_longest"])


def kind(group: Mapping[str, Any], step: int) -> str:
    """Kind of ``step`` of ``group`` where several nodes train: "exact", "compressed" or "local"."""
    variance = variance_of(group)
    if variance.refreshes(step, _begun(group)):
        return "compressed" if group["local_steps"] else "exact"  # between rounds a policy that was changed waits
    if variance.stop == "auto":
        return "compressed"
    return "compressed" if sync_of(group).synchronises(step - variance.stop) else "local"


def steps_to_next_round(group: Mapping[str, Any]) -> int:
    """How many steps later than its last one ``group`` sends something next, where several nodes train."""
    stop = variance_of(group).stop
    return 1 if stop == "auto" else sync_of(group).distance_to_next(group["step"] - stop)


def is_end_of_first(group: Mapping[str, Any], step: int) -> bool:
    """True if ``step`` is the last of those refreshes at which T_v of ``group`` begins, at every step."""
    return bool(step == _begun(group) + group["variance_kappa"])


def has_begun_anew(group: Mapping[str, Any]) -> bool:
    """True if ``group`` refreshes at every step once more, for parameters that had few gradients."""
    return bool(group["rare_until"] > 0 and group["step"] < group["rare_until"] + group["variance_kappa"])


def _begun(group: Mapping[str, Any]) -> int:
    """The step after which T_v of ``group`` has begun."""
    return int(max(group["thawed"], group["rare_until"]))
