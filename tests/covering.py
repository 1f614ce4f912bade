"""Of a product of parameters, a part in which each value, or each pair of values, still occurs.

Two values that do not go together are found by a part with all pairs, and a fault that needs three at once is rare.
``pytest --short`` takes less, a part in which each value occurs, and ``--every-combination`` the whole product.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

Part = frozenset[tuple[str, Hashable]]


def parts_of(case: Mapping[str, Hashable], size: int) -> set[Part]:
    """All sets of so many (name, value) in a case: with 1 its values, with 2 its pairs of values."""
    return {frozenset(some) for some in itertools.combinations(case.items(), size)}


def covering(cases: Sequence[Mapping[str, Hashable]], size: int) -> list[int]:
    """Positions, ascending, of cases in which every part of that size occurs that occurs in ``cases``.

    Each one taken is that with the most parts that no other had before it, the first of several. All cases are taken
    where they have one name only.
    """
    if all(len(case) < 2 for case in cases):
        return list(range(len(cases)))
    missing = {i: parts_of(case, size) for i, case in enumerate(cases)}
    taken: list[int] = []
    while any(missing.values()):
        best = max(missing, key=lambda i: (len(missing[i]), -i))
        taken.append(best)
        found = missing.pop(best)
        missing = {i: parts - found for i, parts in missing.items()}
    return sorted(taken)


def lists_of(item: Any) -> dict[str, Any]:
    """What a test takes from each of its lists: the names of a ``parametrize`` -> what its values are known by."""
    known_by = {name: id(value) for name, value in item.callspec.params.items()}
    lists: dict[str, Any] = {}
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0] if isinstance(mark.args[0], str) else ",".join(mark.args[0])
        lists[names] = tuple(known_by.pop(name.strip()) for name in names.split(","))
    return lists | known_by
