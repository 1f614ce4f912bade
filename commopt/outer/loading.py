"""Loading: the state of the base of an outer optimizer."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from commopt.optim.own import MIXED, Origin

if TYPE_CHECKING:
    from commopt.outer.base import OuterOptimizer

logger = logging.getLogger("commopt")


def base_to_load(optimizer: OuterOptimizer, given: dict[str, Any], origin: Origin | None) -> dict[str, Any]:
    """The state of the base in ``given``, whose own part is of ``origin``; empty if there is none for this rank. Says
    what is lacking."""
    base = (given.get("residuals") or {}).get("base")
    name = type(optimizer.base).__name__
    if base is None:
        if optimizer.topology.rank == 0:
            logger.warning(
                "%s: the loaded state has no rank's own part: every rank starts at the anchor, and its base %s with no "
                "state. Save every rank's (commopt.optim.split_state_dict) to keep them.",
                type(optimizer).__name__, name,
            )  # fmt: skip
        return {}
    if optimizer.owns(origin):
        return dict(base)
    mixed = origin is None or origin[0] == MIXED
    state = "with no state" if mixed else "with that rank's state"
    optimizer.report_not_own(
        origin, f"its parameters and the state of {name}", f"it starts at the anchor, and {name} {state}"
    )
    return {} if mixed else dict(base)
