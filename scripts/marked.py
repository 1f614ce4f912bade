"""What scripts write into pages: tables, each between two marks."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def put(text: str, page: Path, marks: tuple[str, str]) -> None:
    """Replaces what stands between the two marks of a page."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not (begin and end):
        raise SystemExit(f"{page} has no {marks[0]} ... {marks[1]}")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def markdown(head: list[str], rows: Iterable[list[str]]) -> str:
    """A table, as Markdown."""
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(cells) + " |" for cells in rows)])
