"""YAML files of others: plain values only, of a bounded size, whatever is in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from commopt.train.errors import ConfigError

Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
LARGEST, DEEPEST = 1 << 20, 64
"""Bytes of a file, and levels in it, that are read at most."""


def read_yaml(path: Path, what: str = "config file") -> Any:
    """What the file says; None if it is empty.

    Raises ConfigError, in one line, for a file that cannot be read, is too large or too deep, or is no YAML, or has
    tags or aliases: a few lines of those can stand for objects, or for more memory than there is.
    """
    where = f"{what} {path}"
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
        if len(data) > LARGEST:
            raise ConfigError(f"{where}: it has more than {LARGEST} bytes")
        text = data.decode("utf-8")
        _refuse_what_is_not_plain(text, where)
        return yaml.load(text, Loader)
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}") from None
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError, TypeError, ArithmeticError, RecursionError) as error:
        raise ConfigError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from None


def _refuse_what_is_not_plain(text: str, where: str) -> None:
    depth = 0
    event: Any
    for event in yaml.parse(text, Loader):
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            raise ConfigError(f"{where}: not valid YAML for a config: line {line} has an alias (*{event.anchor})")
        if getattr(event, "tag", None) not in (None, "!"):
            raise ConfigError(f"{where}: not valid YAML for a config: line {line} has a tag ({event.tag})")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise ConfigError(f"{where}: not valid YAML for a config: line {line} is more than {DEEPEST} levels deep")
