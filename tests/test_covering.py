"""What is left of a product of parameters: less, and all values, or all pairs of values."""

from __future__ import annotations

import itertools
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import refuse_unknown_cases
from covering import covering, lists_of, parts_of
from forks import python


def product(*sizes: int) -> list[dict[str, int]]:
    """A case for each choice of one value from each list; lists have these sizes."""
    return [{str(i): v for i, v in enumerate(values)} for values in itertools.product(*map(range, sizes))]


def parts(cases: list[dict[str, Any]], size: int) -> set[Any]:
    return set().union(*(parts_of(case, size) for case in cases))


@pytest.mark.parametrize("sizes", [(2, 2, 2), (3, 4, 2, 2), (4, 2, 5), (3, 1, 3), (2,) * 6])
def test_every_pair_is_left_and_few_cases_are(sizes):
    cases = product(*sizes)
    kept = [cases[i] for i in covering(cases, 2)]
    assert parts(kept, 2) == parts(cases, 2)
    largest, second = sorted(sizes)[-1], sorted(sizes)[-2]
    assert largest * second <= len(kept) <= 1.5 * largest * second + 2
    assert len(kept) < len(cases) or 1 in sizes


@pytest.mark.parametrize("sizes", [(2, 2, 2), (3, 4, 2, 2), (4, 2, 5), (3, 1, 3), (2,) * 6, (2, 3)])
def test_every_value_is_left_in_as_many_cases_as_the_longest_list_has(sizes):
    cases = product(*sizes)
    kept = [cases[i] for i in covering(cases, 1)]
    assert parts(kept, 1) == parts(cases, 1)
    assert len(kept) == max(sizes)


@pytest.mark.parametrize("size", [1, 2])
def test_what_has_one_list_stays_whole(size):
    assert covering(product(5), size) == [0, 1, 2, 3, 4]
    assert covering([{}], size) == [0]


def test_all_pairs_of_two_lists_are_all_there_is():
    assert covering(product(3, 2), 2) == list(range(6))


def test_a_product_with_gaps():
    cases = [{"a": 0, "b": 0, "c": 0}, {"a": 0, "b": 0, "c": 1}, {"a": 1, "b": 0, "c": 0}]
    assert covering(cases, 2) == [0, 1, 2]


@pytest.mark.parametrize("a", [0, 1])
@pytest.mark.parametrize(("c", "d"), [("x", 3), ("x", 4), ("y", 3)])
def test_rows_of_one_list_are_values_of_it(request, a, c, d):
    """So none of them is left out because each two of its entries occur in other rows."""
    assert lists_of(request.node) == {"a": (id(a),), "c,d": (id(c), id(d))}


SUITE = """
import pytest

@pytest.mark.parametrize("a", [0, 1])
@pytest.mark.parametrize("b", [0, 1])
def test_two(a, b): pass

@pytest.mark.long
def test_long(): pass

@pytest.mark.long(but="one")
@pytest.mark.parametrize("a", ["one", "two"])
def test_of_some(a): pass
"""


def test_short_leaves_out_what_is_long_and_all_but_each_value(tmp_path):
    (tmp_path / "suite").mkdir()
    (tmp_path / "suite" / "test_it.py").write_text(SUITE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = long(but): x\n")
    code = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import pytest
for words in ["--short"], ["--short", "-m", "long"], []:
    print("with", *words)
    assert pytest.main(["-p", "conftest", "--collect-only", "-q", *words]) == 0"""
    done = subprocess.run([python(), "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [re.findall("::(.*)", part) for part in done.stdout.split("with")[1:]]
    assert [sorted(names) for names in found] == [
        ["test_of_some[one]", "test_two[0-0]", "test_two[1-1]"],
        ["test_of_some[one]"],
        ["test_long", "test_of_some[one]", "test_of_some[two]", *(f"test_two[{a}-{b}]" for a in "01" for b in "01")],
    ]


def test_a_case_that_is_kept_and_that_there_is_not_is_an_error():
    marked = pytest.mark.long(but="one").mark
    items = [SimpleNamespace(nodeid=f"x.py::f[{case}]", get_closest_marker=lambda _: marked) for case in ("one", "two")]
    refuse_unknown_cases(items)
    with pytest.raises(pytest.UsageError, match=r"'one'\) names no case of x\.py::f$"):
        refuse_unknown_cases(items[1:])
