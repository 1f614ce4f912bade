"""Checksums: of a file, and of what a JSON file says."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

KEY = "sha256"


def of_file(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def of_content(content: dict[str, Any]) -> str:
    """SHA-256 of the canonical form of a JSON object, without the checksum in it."""
    text = json.dumps({k: v for k, v in content.items() if k != KEY}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def sealed(content: dict[str, Any]) -> str:
    """The object as JSON, with its checksum."""
    return json.dumps({**content, KEY: of_content(content)}, indent=2)


def is_count(value: Any) -> bool:
    """True if this is an integer >= 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
