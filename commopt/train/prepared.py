"""A prepared corpus on the disk: token files, and a ``meta.json`` with what they are and their checksums.

Rank 0 reads all of it at every start and compares: SHA-256 and the largest id take some 0.2 seconds per 100 million
tokens of 2 bytes, and a start hashes the text of the corpus anyway, which has about twice the bytes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from commopt.train import sums
from commopt.train.errors import DataError

FORMAT = 2  # raise it when the meaning of the cached files changes
META, TOKENIZER, SIDES = "meta.json", "tokenizer.json", ("train", "heldout")
KEYS = {"format", "key", "vocab_size", "tokens", "settings", "files", sums.KEY}
LARGEST = 1 << 24
"""Bytes of meta.json that are read at most."""
BLOCK = 1 << 22
"""Tokens looked at together."""


class DamagedCorpusError(DataError):
    """A prepared corpus that is not what was written; it can be prepared again."""


def token_file(side: str) -> str:
    """Name of the token file of a side of the split."""
    return f"{side}.npy"


def write_meta(folder: Path, key: str, vocab_size: int, tokens: dict[str, int], settings: dict[str, Any]) -> None:
    """Describe what is in ``folder``."""
    files = {
        name: {"size": (folder / name).stat().st_size, "sha256": sums.of_file(folder / name)}
        for name in (TOKENIZER, *map(token_file, SIDES))
    }
    content = {"format": FORMAT, "key": key, "vocab_size": vocab_size, "tokens": tokens, "settings": settings}
    (folder / META).write_text(sums.sealed({**content, "files": files}), encoding="utf-8")


def read_meta(folder: Path) -> dict[str, Any]:
    """Content of ``meta.json``, checked. Raises DamagedCorpusError."""
    try:
        with (folder / META).open("rb") as file:
            meta = json.loads(file.read(LARGEST).decode("utf-8"))
    except OSError as error:
        raise _damaged(folder, f"cannot read {META}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise _damaged(folder, f"{META} is damaged") from None
    if not isinstance(meta, dict) or meta.keys() != KEYS or meta[sums.KEY] != sums.of_content(meta):
        raise _damaged(folder, f"{META} is damaged")
    counts, files = meta["tokens"], meta["files"]
    sound = (
        (meta["format"], meta["key"]) == (FORMAT, folder.name)
        and sums.is_count(meta["vocab_size"])
        and isinstance(counts, dict)
        and all(sums.is_count(counts.get(side)) for side in SIDES)
        and isinstance(files, dict)
        and all(isinstance(files.get(name), dict) for name in (TOKENIZER, *map(token_file, SIDES)))
    )
    if not sound:
        raise _damaged(folder, f"{META} is of another corpus or format")
    return meta


def verify(folder: Path) -> None:
    """Compare every file with its checksum, and every id with the vocabulary. Raises DamagedCorpusError."""
    meta = read_meta(folder)
    try:
        for name in (TOKENIZER, *map(token_file, SIDES)):
            if (folder / name).stat().st_size != meta["files"][name].get("size"):
                raise _damaged(folder, f"{name} has another size")
            if sums.of_file(folder / name) != meta["files"][name].get("sha256"):
                raise _damaged(folder, f"the content of {name} has changed (SHA-256 differs)")
    except OSError as error:
        raise _damaged(folder, f"cannot read {error.filename}: {error.strerror}") from None
    for side, tokens in zip(SIDES, open_tokens(folder, meta)):
        for first in range(0, len(tokens), BLOCK):
            if int(tokens[first : first + BLOCK].max()) >= meta["vocab_size"]:
                raise _damaged(folder, f"{token_file(side)} has ids that are not below {meta['vocab_size']}")


def open_tokens(folder: Path, meta: dict[str, Any]) -> list[np.ndarray]:
    """Its token files, memory-mapped. Raises DamagedCorpusError."""
    found = []
    for side in SIDES:
        try:
            tokens = np.load(folder / token_file(side), mmap_mode="r", allow_pickle=False)
        except Exception as error:  # a header is a Python literal: anything can be wrong with it
            raise _damaged(folder, f"cannot read {token_file(side)}: {' '.join(str(error).split())}") from None
        if tokens.shape != (meta["tokens"][side],) or tokens.dtype not in (np.uint16, np.uint32):
            raise _damaged(folder, f"{token_file(side)} holds {tokens.dtype} of shape {tokens.shape}")
        found.append(tokens)
    return found


def _damaged(folder: Path, reason: str) -> DamagedCorpusError:
    return DamagedCorpusError(f"prepared corpus {folder}: {reason}")
