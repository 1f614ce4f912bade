"""Extension of Griffe: docstrings, with the little of reStructuredText that they have, as Markdown.

* ``:class:`commopt.Guard``` and its like become code, and a link where the site has that name.
* ``::`` before code goes: indented text is code.
* Tables between lines of ``====`` become tables.
* What begins with ``>=`` is no quotation.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|data|func|meth|mod):`~?([\w.]+)`")
_BORDER = re.compile(r"=+( +=+)+")


class Docstrings(griffe.Extension):
    """Changes every docstring as it is read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Of any module, class, function or attribute."""
        if obj.docstring:
            obj.docstring.value = _markdown(obj.docstring.value)


def _markdown(text: str) -> str:
    text = re.sub(r"(?m)^ *::\n\n?", "", text)
    text = re.sub(r"(?m)::$", ":", text)
    text = re.sub(r"(?m)^( *(?:\w+: )?)>=", r"\1\>=", text)
    return "\n".join(_tables(_ROLE.sub(_reference, text).splitlines()))


def _reference(role: re.Match[str]) -> str:
    """A name as code; with its module, a link where there is one to it."""
    name = role[1]
    code = f"<code>{name}</code>"
    return f'<autoref optional identifier="{name}">{code}</autoref>' if name.startswith("commopt") else f"`{name}`"


def _tables(lines: list[str]) -> list[str]:
    """Simple tables (border, head, border, rows, border) as those of Markdown."""
    out, borders, columns = list[str](), 0, list[tuple[int, int | None]]()
    for line in lines:
        if _BORDER.fullmatch(line.strip()):
            borders = (borders + 1) % 3
            starts = [match.start() for match in re.finditer(r"=+", line)]
            columns = [*zip(starts, [*starts[1:], None])]
            if borders == 2:
                out.append(line[: starts[0]] + "| --- " * len(columns) + "|")
        elif borders:
            cells = [line[start:stop].strip() for start, stop in columns]
            out.append(line[: columns[0][0]] + "| " + " | ".join(cells) + " |")
        else:
            out.append(line)
    return out
