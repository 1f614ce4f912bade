"""What is left of a product of parameters: less, and all pairs."""

from __future__ import annotations

import itertools

import pytest
from pairs import covering, lists_of, pairs_of


@pytest.mark.parametrize("sizes", [(2, 2, 2), (3, 4, 2, 2), (4, 2, 5), (3, 1, 3), (2,) * 6])
def test_every_pair_is_left_and_few_cases_are(sizes):
    cases = [dict(enumerate(values)) for values in itertools.product(*map(range, sizes))]
    cases = [{str(name): value for name, value in case.items()} for case in cases]
    kept = [cases[i] for i in covering(cases)]
    assert set().union(*map(pairs_of, kept)) == set().union(*map(pairs_of, cases))
    largest, second = sorted(sizes)[-1], sorted(sizes)[-2]
    assert largest * second <= len(kept) <= 1.5 * largest * second + 2
    assert len(kept) < len(cases) or 1 in sizes


def test_one_list_or_two_stay_whole():
    assert covering([{"a": i} for i in range(5)]) == [0, 1, 2, 3, 4]
    assert covering([{}]) == [0]
    product = [{"a": a, "b": b} for a in range(3) for b in range(2)]
    assert covering(product) == list(range(6))


def test_a_product_with_gaps():
    cases = [{"a": 0, "b": 0, "c": 0}, {"a": 0, "b": 0, "c": 1}, {"a": 1, "b": 0, "c": 0}]
    assert covering(cases) == [0, 1, 2]


@pytest.mark.parametrize("a", [0, 1])
@pytest.mark.parametrize(("c", "d"), [("x", 3), ("x", 4), ("y", 3)])
def test_rows_of_one_list_are_values_of_it(request, a, c, d):
    """So none of them is left out because each two of its entries occur in other rows."""
    assert lists_of(request.node) == {"a": (id(a),), "c,d": (id(c), id(d))}
