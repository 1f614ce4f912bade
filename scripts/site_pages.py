"""Hook of MkDocs: pages that read well on their own read well in the site, too.

* Links from a page to a file that is not in the site become the name of the file. ``ARCHITECTURE.md`` and its
  neighbours are pages of the site. A link that is called by the name of a page gets that page's title.
* Blocks within lists, indented by 2 as elsewhere, are indented by 4, as Python-Markdown wants them.
* A table right after a comment gets an empty line before it, and its numbers stay beside their units.
* A picture leads to itself, as large as it is.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
BESIDE = {"ARCHITECTURE.md": "architecture.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Pages at the top of the repository, and what they are called in the site."""

_LINK = re.compile(r"\[([^\]]*)\]\((?!https?:)([^)#\s]*)(#[^)\s]*)?\)")
_FENCE = re.compile(r" *```")
_PICTURE = re.compile(r"!\[[^\]]*\]\(([^)]*)\)")
_UNIT = re.compile(r"(?<=\d) (?=(%|×|[kMGT]?B|[kMGT]bit/s|m?s|h|x|of \d+)(?![\w-]))")
"""Between a number and its unit."""


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages beside ``docs``, as if they lay in it."""
    for source, name in BESIDE.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """The text as Python-Markdown wants it."""
    names = {name: source for source, name in BESIDE.items()}
    uri = page.file.src_uri
    folder = ROOT if uri in names else (Path(config.docs_dir) / uri).parent
    out, fence = list[str](), False
    for line in markdown.splitlines():
        fence ^= bool(_FENCE.match(line))
        if not (fence or _FENCE.match(line)):
            line = _LINK.sub(lambda link: _link(link, folder, uri), line)
            line = _UNIT.sub("\N{NO-BREAK SPACE}", line) if line.startswith("|") else line
            line = _PICTURE.sub(lambda picture: f"[{picture[0]}]({picture[1]})", line)
        out.append(line)
    return _apart("\n".join(_indented(out)))


def _link(link: re.Match[str], folder: Path, uri: str) -> str:
    """The link, to where its target lies in the site; or the name of the file."""
    text, path, anchor = link[1], link[2], link[3] or ""
    if not path:
        return link[0]
    target = (folder / path).resolve()
    docs = ROOT / "docs"
    if target.is_relative_to(docs):
        where = target.relative_to(docs).as_posix()
    elif target.is_relative_to(ROOT) and target.relative_to(ROOT).as_posix() in BESIDE:
        where = BESIDE[target.relative_to(ROOT).as_posix()]
    else:
        name = target.relative_to(ROOT).as_posix()
        plain = text.strip("`")
        return f"`{name}`" if name.endswith(plain) else f"{text} (`{name}`)"
    if text == Path(path).name:
        text = target.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
    return f"[{text}]({'../' * uri.count('/')}{where}{anchor})"


def _indented(lines: list[str]) -> list[str]:
    """With what belongs to an item of a bulleted list indented by twice as much; an item after another one of several
    blocks gets an empty line before it."""
    out, item, blocks = list[str](), False, False
    for line in lines:
        if line.startswith(("* ", "- ")):
            if item and blocks and out[-1]:
                out.append("")
            item, blocks = True, False
        elif not line:
            blocks = item
        elif not line.startswith("  "):
            item = blocks = False
        deep = len(line) - len(line.lstrip())
        out.append(" " * deep + line if item and deep else line)
    return out


def _apart(text: str) -> str:
    return re.sub(r"(-->)\n(?=\|)", r"\1\n\n", text)
