"""Corpora, where text comes from: a stream of (name, text) documents, in an order that does not depend on the
machine."""

from __future__ import annotations

import codecs
import contextlib
import functools
import logging
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from commopt.train.config import DataConfig
from commopt.train.errors import DataError

log = logging.getLogger(__name__)
Document = tuple[str, str]
TEXT = ("string", "large_string", "string_view")
"""Types of a column of text."""
PIECE, LONGEST = 2000, 100_000
"""Characters of a document of a file that is the whole corpus: it ends with a line, and at most after so many."""
ODD = 1000
"""A text is garbled where more than one character of so many could not be read."""
STDLIB_SKIPS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


def documents(config: DataConfig) -> Iterator[Document]:
    """Documents of ``config.corpus``; the name is relative to the corpus, so the held-out split moves with it.

    Raises DataError for a corpus that is missing or unreadable.
    """
    corpus = config.corpus
    if corpus == "stdlib":
        yield from _stdlib()
    elif isinstance(corpus, str) and corpus.startswith("hf:"):
        yield from _hugging_face(corpus.removeprefix("hf:"), config)
    else:
        paths = [Path(path).expanduser() for path in ([corpus] if isinstance(corpus, str) else corpus)]
        for path in paths:
            yield from _pieces(path) if len(paths) == 1 and path.is_file() else _files(path)


def _stdlib() -> Iterator[Document]:
    root = Path(sysconfig.get_path("stdlib"))
    yield from _folder(root, ".py", STDLIB_SKIPS)


def _files(path: Path) -> Iterator[Document]:
    if path.is_dir():
        yield from _folder(path, "", frozenset({"__pycache__"}))
    elif path.is_file():
        yield path.name, _text_alone(path)
    elif path.exists():
        raise DataError(f"corpus {path}: it is neither a file nor a folder")
    else:
        raise DataError(f"corpus {path}: no such file or folder")


def _text_alone(path: Path) -> str:
    """Text of a file that is named. Raises DataError where most of it is none."""
    text = _text(path)
    if 3 * (text.count("\0") + text.count("\ufffd")) > len(text):
        raise DataError(
            f"corpus {path}: it is no text in UTF-8, or in UTF-16 with a byte order mark: more than a third of it "
            "cannot be read"
        )
    if _is_garbled(text):
        _warn_of_encoding(str(path), path.name, 1)
    return text


def _is_garbled(text: str) -> bool:
    return ODD * text.count("\ufffd") > len(text)


def _pieces(path: Path) -> Iterator[Document]:
    """A file that is the whole corpus, in documents of its lines: one alone would leave the other split empty."""
    start, text = 0, _text_alone(path)
    while start < len(text):
        end = text.find("\n", start + PIECE, start + LONGEST) + 1 or min(len(text), start + LONGEST)
        yield f"{path.name}:{start}", text[start:end]
        start = end


def _folder(root: Path, suffix: str, skips: frozenset[str]) -> Iterator[Document]:
    """Files below ``root`` by relative name; hidden and binary ones and folders in ``skips`` are left out, and so are
    links to folders. The latter, binary ones and garbled ones are said."""

    def refuse(error: OSError) -> None:
        raise DataError(f"corpus {error.filename}: {error.strerror}")

    names, links = [], []
    for folder, subfolders, files in os.walk(root, onerror=refuse):
        subfolders[:] = [name for name in subfolders if name not in skips and not name.startswith(".")]
        links += [path for name in subfolders if os.path.islink(path := os.path.join(folder, name))]
        names += [os.path.join(folder, name) for name in files if name.endswith(suffix) and not name.startswith(".")]
    if links and not suffix:
        _warn_of_links(str(root), min(links), len(links))
    binary, garbled = [], []
    for name in sorted(Path(name).relative_to(root).as_posix() for name in names):
        if (root / name).exists() and not (root / name).is_file():
            log.debug("left out, no file: %s", root / name)
            continue
        text = _text(root / name)
        if "\0" in text:
            binary.append(name)
        else:
            garbled += [name] if _is_garbled(text) and not suffix else []
            yield name, text
    if garbled:
        _warn_of_encoding(str(root), garbled[0], len(garbled))
    if binary:
        _say_binary(str(root), binary[0], len(binary))


@functools.cache  # once: a corpus is read several times
def _warn_of_links(root: str, first: str, count: int) -> None:
    log.warning(
        "corpus %s: %d links to folders are not followed, such as %s: list in data.corpus what is to be read, too",
        root, count, first,
    )  # fmt: skip


@functools.cache
def _warn_of_encoding(root: str, first: str, count: int) -> None:
    log.warning(
        "corpus %s: %d files are not in UTF-8, such as %s: more than one character of %d there is read as U+FFFD; "
        "convert them (iconv -f LATIN1 -t UTF-8)",
        root, count, first, ODD,
    )  # fmt: skip


@functools.cache
def _say_binary(root: str, first: str, count: int) -> None:
    log.info("corpus %s: %d files are left out, which are no text, but have bytes of 0, such as %s", root, count, first)


def _text(path: Path) -> str:
    """UTF-8 text, or UTF-16 that says so by its first two bytes, the byte order mark; a byte that is not UTF-8 becomes
    U+FFFD, for a few files of every corpus have one."""
    try:
        with path.open("rb") as file:
            marked = file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        if marked:
            with contextlib.suppress(UnicodeDecodeError):  # something else that begins so
                return path.read_text(encoding="utf-16")
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise DataError(f"corpus {path}: {error.strerror}") from None


def _hugging_face(name: str, config: DataConfig) -> Iterator[Document]:
    from datasets import Value, load_dataset

    try:
        rows: Any = load_dataset(os.path.expanduser(name), config.hf_config, split=config.hf_split)
    except Exception as error:  # the library raises a dozen types for a wrong name, a wrong split and a missing network
        reason = " ".join(str(error).split())
        raise DataError(f"corpus hf:{name} (split {config.hf_split!r}): {type(error).__name__}: {reason}") from None
    if config.hf_text_field not in rows.column_names:
        columns = ", ".join(rows.column_names)
        raise DataError(
            f"corpus hf:{name}: data.hf_text_field={config.hf_text_field!r} is not one of its columns: {columns}"
        )
    kind = rows.features[config.hf_text_field]
    if not isinstance(kind, Value) or kind.dtype not in TEXT:
        raise DataError(
            f"corpus hf:{name}: data.hf_text_field={config.hf_text_field!r} must be a column of text, not of {kind}"
        )
    for index, text in enumerate(rows.select_columns([config.hf_text_field])[config.hf_text_field]):
        yield str(index), text or ""
