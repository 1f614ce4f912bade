"""The pages name what there is: links, paths and names of commopt lead somewhere, and an example is the code itself."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import textwrap
from pathlib import Path

import pytest

from commopt import OneBitAdam

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def anchors(page: Path) -> set[str]:
    """What the headings of a page are called in links, as GitHub does it."""
    heads = [line.lstrip("#").strip().lower() for line in page.read_text().splitlines() if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", head).replace(" ", "-") for head in heads}


def exists(name: str) -> bool:
    """Whether ``name``, with dots, is a module or what lies in one. The doors of frameworks are not opened for that."""
    if name.startswith("commopt.integrations."):
        return importlib.util.find_spec(".".join(name.split(".")[:3])) is not None
    first, *rest = name.split(".")
    found = importlib.import_module(first)
    for i, part in enumerate(rest):
        if not hasattr(found, part):
            try:
                importlib.import_module(".".join([first, *rest[: i + 1]]))
            except ImportError:
                return False
        found = getattr(found, part)
    return True


@pages
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if link.startswith("http"):
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pages
def test_paths_exist(page: Path) -> None:
    for path in re.findall(r"\b(?:benchmarks|configs|docs|scripts|tests)/[\w./*-]*\w", page.read_text()):
        assert list(ROOT.glob(path)), path


@pages
def test_names_of_commopt_exist(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        return  # has old names, too
    for name in set(re.findall(r"\bcommopt(?:\.[A-Za-z_]\w*)+", page.read_text())):
        assert exists(name), name


def test_a_name_that_does_not_exist_is_seen() -> None:
    assert exists("commopt.optim.policies.SyncPolicy")
    assert not exists("commopt.optim.schedules")
    assert not exists("commopt.optim.policies.Missing")
    assert exists("commopt.integrations.timm")
    assert not exists("commopt.integrations.missing")


def test_the_example_of_an_optimizer_is_the_code() -> None:
    source = textwrap.dedent(inspect.getsource(OneBitAdam.compressed))
    assert source in (ROOT / "ARCHITECTURE.md").read_text()


def test_the_readme_is_a_page() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110
