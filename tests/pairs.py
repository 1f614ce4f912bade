"""Of a product of parameters, a part in which each pair of values still occurs.

A test that multiplies three lists of parameters or more runs with such a part: two values that do not go together are
found by it, and a fault that needs three at once is rare. ``pytest --every-combination`` runs the whole product.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

Pair = frozenset[tuple[str, Hashable]]


def pairs_of(case: Mapping[str, Hashable]) -> set[Pair]:
    """All pairs of (name, value) in a case."""
    return {frozenset(two) for two in itertools.combinations(case.items(), 2)}


def covering(cases: Sequence[Mapping[str, Hashable]]) -> list[int]:
    """Positions, ascending, of cases in which every pair occurs that occurs in ``cases``.

    Each one taken is that with the most pairs that no other had before it, the first of several. All cases are taken
    where they have one name only.
    """
    if all(len(case) < 2 for case in cases):
        return list(range(len(cases)))
    missing = {i: pairs_of(case) for i, case in enumerate(cases)}
    taken: list[int] = []
    while any(missing.values()):
        best = max(missing, key=lambda i: (len(missing[i]), -i))
        taken.append(best)
        found = missing.pop(best)
        missing = {i: pairs - found for i, pairs in missing.items()}
    return sorted(taken)


def lists_of(item: Any) -> dict[str, Any]:
    """What a test takes from each of its lists: the names of a ``parametrize`` -> what its values are known by."""
    known_by = {name: id(value) for name, value in item.callspec.params.items()}
    lists: dict[str, Any] = {}
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0] if isinstance(mark.args[0], str) else ",".join(mark.args[0])
        lists[names] = tuple(known_by.pop(name.strip()) for name in names.split(","))
    return lists | known_by
