"""YAML files of others: plain values only, of a bounded size, whatever is in them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from commopt.train.errors import ConfigError

Loader: Any = type("Loader", (getattr(yaml, "CSafeLoader", yaml.SafeLoader),), {})
"""A safe loader of YAML. Numbers are those of YAML 1.2, as for jsonargparse: for PyYAML's own 9e-1 and 1.5e3 are
words."""
Dumper: Any = type("Dumper", (yaml.SafeDumper,), {})
"""Writes what the loader reads as it was: words that would be numbers there in quotes."""
for _of_yaml in (Loader, Dumper):
    _of_yaml.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"),
        list("-+0123456789"),
    )
LARGEST, DEEPEST, MOST = 1 << 20, 64, 100_000
"""Bytes of a file, levels in it, and values, aliases written out, that are read at most."""


def read_yaml(path: Path, what: str = "config file") -> Any:
    """Content of the file; None if it is empty.

    Raises ConfigError, in one line, for a file that cannot be read, is too large or too deep, or is no YAML, or has
    tags, or aliases that stand for very much: a few lines can mean objects, or more memory than there is; or has a key
    twice, of which YAML's reader would take the last.
    """
    where = f"{what} {path}"
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
        if len(data) > LARGEST:
            raise ConfigError(f"{where}: it has more than {LARGEST} bytes")
        text = data.decode("utf-8")
        _refuse_what_is_not_plain(text, where)
        _refuse_what_is_given_twice(yaml.compose(text, Loader), where)
        return yaml.load(text, Loader)
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}") from None
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError, TypeError, ArithmeticError, RecursionError) as error:
        raise ConfigError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from None


def _refuse_what_is_not_plain(text: str, where: str) -> None:
    """Raise ConfigError for tags, for too many levels, and for aliases that stand for too much or for themselves."""
    counts, sizes = [0], {}  # values so far in each open collection; of what has an anchor
    anchors: list[str | None] = []
    event: Any
    for event in yaml.parse(text, Loader):
        line = f"{where}: not valid YAML for a config: line {event.start_mark.line + 1}"
        if getattr(event, "tag", None) not in (None, "!"):
            raise ConfigError(f"{line} has a tag ({event.tag})")
        if isinstance(event, yaml.CollectionStartEvent):
            counts.append(1)
            anchors.append(event.anchor)
        elif isinstance(event, yaml.CollectionEndEvent):
            size = counts.pop()
            sizes[anchors.pop()] = size
            counts[-1] += size
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor in anchors:
                raise ConfigError(f"{line} has an alias for what it is in (*{event.anchor})")
            counts[-1] += sizes.get(event.anchor, 1)
        elif isinstance(event, yaml.ScalarEvent):
            counts[-1] += 1
            sizes[event.anchor] = 1
        if len(counts) > DEEPEST:
            raise ConfigError(f"{line} is more than {DEEPEST} levels deep")
        if counts[-1] > MOST:
            raise ConfigError(f"{line} comes to more than {MOST} values, aliases written out")


def _refuse_what_is_given_twice(root: yaml.Node | None, where: str) -> None:
    """Raise ConfigError for a key that a mapping has twice, or has both itself and, with dots, a part of."""
    left, seen = [root], set()
    while left:
        node = left.pop()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            left += node.value
        elif isinstance(node, yaml.MappingNode):
            left += [value for _, value in node.value]
            names: set[str] = set()
            whole = {key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)}
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    continue
                line, name = key.start_mark.line + 1, key.value
                if name in names:
                    raise ConfigError(f"{where}: line {line} gives {name!r} once more: put all of it in one place")
                if "." in name and name.split(".")[0] in whole:
                    section = name.split(".")[0]
                    raise ConfigError(f"{where}: line {line} gives {name!r} beside {section!r}: put it below that")
                names.add(name)
