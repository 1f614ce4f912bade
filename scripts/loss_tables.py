"""What scripts/convergence.py and scripts/tuned.py show of the losses that runs have ended with: rows of held-out loss,
spread, gap to the counterpart and whether that is within the spreads."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from marked import markdown

Row = dict[str, Any]


def compare(row: Row, other: Row, gap: float) -> None:
    """Adds to a row what it is ``against``, its ``gap``, the larger of both spreads, and whether it ``passed``: whether
    the gap is no more than that. A loss that is not finite, of a run that has diverged, has not."""
    allowed = max(row["spread"], other["spread"])
    row |= {"against": other["method"], "gap": gap, "allowed": allowed, "passed": gap <= allowed and gap < math.inf}


def share(sent: float, rounded: bool = False) -> str:
    """As per cent; with fewer digits if it is to be ``rounded``."""
    return f"{100 * sent:.{(0 if rounded else 1) if sent >= 0.01 else 2}f} %"


def summary(found: Mapping[str, Mapping[str, Row]], methods: Iterable[str]) -> str:
    """A line for each of ``methods`` that has been compared: its gap on every task, in brackets the larger of the two
    spreads, marked where the gap is more; and what it sends.

    Args:
        found: by task, the rows by method.
        methods: in the order of the lines.
    """
    lines = []
    for method in methods:
        rows = {task: of_task[method] for task, of_task in found.items() if "gap" in of_task.get(method, {})}
        if not rows:  # it has not been run yet, or is compared with nothing
            continue
        gaps = [_gap(rows[task]) if task in rows else "" for task in found]
        sent = [share(of(row["sent"] for row in rows.values()), rounded=True) for of in (min, max)]
        lines.append([method, next(iter(rows.values()))["against"], *gaps, " to ".join(dict.fromkeys(sent))])
    return markdown(["optimizer", "against", *(f"gap, {task}" for task in found), "sent"], lines)


def _gap(row: Row) -> str:
    if row["gap"] == math.inf:
        return "diverged ✗"
    return f"{row['gap']:+.3f} ({row['allowed']:.2f})" + ("" if row["passed"] else " ✗")
