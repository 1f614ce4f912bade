"""The documentation as a site: it is built without a warning, and nothing of a page is lost on the way."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
WRITTEN = sorted(DOCS.glob("*.md"))
BESIDE = [ROOT / name for name in ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")]

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("mkdocs", "material", "mkdocstrings")),
    reason="MkDocs is not installed: pip install '.[docs]', on Python 3.11 or newer",
)


class Page(HTMLParser):
    """What a page of the site shows.

    Attributes:
        count: how many there are of each tag, in the text of the page.
        links: where its links lead.
        ids: what links to the page may end in.
        text: outside of code.
    """

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.count, self.links, self.ids, self.text = dict[str, int](), list[str](), set[str](), ""
        self._code = self._within = 0
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids.add(values.get("id") or "")
        self._within |= tag == "article"
        if self._within:
            self.count[tag] = self.count.get(tag, 0) + 1
            self._code += tag in ("pre", "code")
            self.links += [values["href"] or ""] if tag == "a" and "href" in values else []
            self.links += [values["src"] or ""] if tag == "img" else []

    def handle_endtag(self, tag: str) -> None:
        self._within &= tag != "article"
        self._code -= bool(self._within and tag in ("pre", "code"))

    def handle_data(self, data: str) -> None:
        if self._within and not self._code:
            self.text += data


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Page]:
    """Pages by their folder in the site, which is built as the documentation says, but for the import of torch."""
    from forks import python

    folder = tmp_path_factory.mktemp("site")
    command = [python(), "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    return {str(file.parent.relative_to(folder)): Page(file) for file in folder.rglob("index.html")}


def name_of(source: Path) -> str:
    """The folder of a page."""
    if source.parent == ROOT:
        return source.stem.lower()
    return "." if source.name == "index.md" else source.stem


def without_code(text: str) -> str:
    return re.sub(r"(?ms)^ *```.*?^ *```$", "", text)


@pytest.mark.long
@pytest.mark.parametrize("source", [*WRITTEN, *BESIDE], ids=lambda source: source.name)
def test_nothing_of_a_page_is_lost(site: dict[str, Page], source: Path) -> None:
    text, page = source.read_text(encoding="utf-8"), site[name_of(source)]
    plain = without_code(text)
    tables = len(re.findall(r"(?m)^\|(?=.*-)[-| :]+\|$", plain))
    assert page.count.get("pre", 0) == len(re.findall(r"(?m)^ *```", text)) / 2
    assert page.count.get("table", 0) == tables
    assert page.count.get("tr", 0) == len(re.findall(r"(?m)^\|.*\|$", plain)) - tables
    assert page.count.get("li", 0) == len(re.findall(r"(?m)^ *([*-]|\d+\.) ", plain))
    assert sum(page.count.get(f"h{level}", 0) for level in range(1, 7)) == len(re.findall(r"(?m)^#+ ", plain))
    for mark in ("**", "```", "|--", "](", "<!--"):
        assert mark not in page.text
    assert page.count.get("img", 0) == len(re.findall(r"!\[", plain))
    assert not re.search(r"\d (%|ms)\n", page.text)  # a number of a table stays beside its unit


@pytest.mark.long
def test_links_lead_somewhere_in_the_site(site: dict[str, Page]) -> None:
    for name, page in site.items():
        for link in page.links:
            path, _, anchor = link.partition("#")
            if ":" in path:
                assert path.startswith("https://arxiv.org/"), link  # papers; all else is in the site
                continue
            target = os.path.normpath(os.path.join(name, path))
            if target in site:
                assert not anchor or anchor in site[target].ids, (name, link)
            else:
                assert (DOCS / target).is_file(), (name, link)  # a picture


def test_docstrings_are_text(site: dict[str, Page]) -> None:
    reference = {name: page for name, page in site.items() if name.startswith("api")}
    assert {path.stem for path in (DOCS / "api").glob("*.md")} == {Path(name).name for name in reference}
    for page in reference.values():
        for mark in (":class:", ":meth:", ":func:", ":mod:", ":data:", "::", "====", "``", "Args:"):
            assert mark not in page.text, mark
        assert "blockquote" not in page.count  # what begins with ">= 0"
    page = reference["api/gradients"]
    assert page.count["table"] == 1
    assert "../compress/#commopt.compress.TopBlocks" in page.links


def test_every_public_name_is_in_the_reference(site: dict[str, Page]) -> None:
    import commopt

    ids = {id_ for page in site.values() for id_ in page.ids}
    missing = {f"commopt.{name}" for name in commopt.__all__ if name != "__version__"} - ids
    assert not missing


@pytest.mark.long
def test_the_first_program_says_what_the_page_says(tmp_path: Path) -> None:
    from forks import python

    text = (DOCS / "index.md").read_text(encoding="utf-8")
    [program] = re.findall(r'(?ms)^```python title="swap.py"\n(.*?)^```$', text)
    [said] = re.findall(r"(?ms)^torchrun [^\n]* swap\.py\n```\n\n```\n(.*?)^```$", text)
    (tmp_path / "swap.py").write_text(program, encoding="utf-8")
    command = [python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "swap.py"]
    env = {**os.environ, "PYTHON_EXEC": python()}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

    def without_loss(lines: str) -> list[str]:
        return [re.sub(r"loss [\d.]+", "", line) for line in lines.splitlines()]

    log, *printed = without_loss(said)
    assert without_loss(done.stdout) == printed
    assert log in done.stderr
