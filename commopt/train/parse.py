"""From a YAML file and command-line overrides to a Config, through jsonargparse.

Keys are compared with the dataclasses before values are parsed, so that a misspelt one, in the file or on the command
line, is answered with the nearest valid name. YAML is read by safe loaders only.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from commopt.train.config import Config
from commopt.train.errors import ConfigError
from commopt.train.yamlfile import Dumper, Loader, read_yaml


def nearest(name: str, valid: Iterable[str]) -> str:
    """``"; did you mean X?"`` for the valid name closest to ``name``, by its whole dotted path or by its last part; if
    there is none, what is valid. Of a section that there is, names are looked for there first."""
    valid = list(valid)
    section, _, last = name.rpartition(".")
    within = [key for key in valid if section and key.rpartition(".")[0] == section]
    by_part = {key.rpartition(".")[2]: key for key in valid}
    if within:
        here = {key.rpartition(".")[2]: key for key in within}
        choices, listed = ((here, last, 0.6), (by_part, last, 0.8)), within
    else:
        choices = (by_part | {key: key for key in valid}, name, 0.5), (by_part, last, 0.5)
        listed = sorted({key.split(".")[0] for key in valid})
    for known, looked_for, cutoff in choices:
        if found := difflib.get_close_matches(looked_for, known, n=1, cutoff=cutoff):
            return f"; did you mean {known[found[0]]}?"
    return f"; valid: {', '.join(listed)}"


def _section(hint: Any) -> type | None:
    """The dataclass that a field holds (also as ``X | None``), or None for a plain value."""
    for option in (hint, *typing.get_args(hint)):
        if isinstance(option, type) and dataclasses.is_dataclass(option):
            return option
    return None


@functools.cache
def keys(cls: type = Config, prefix: str = "") -> dict[str, Any]:
    """Every dotted key below ``cls`` -> its type, sections included, in the order of the fields."""
    found: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(cls).items():
        found[prefix + name] = hint
        section = _section(hint)
        if section is not None:
            found |= keys(section, f"{prefix}{name}.")
    return found


def _is_free(hint: Any) -> bool:
    return typing.get_origin(hint) is dict


def _check_key(key: str, where: str) -> None:
    valid = keys()
    parents = [key.rsplit(".", n)[0] for n in range(1, key.count(".") + 1)]
    free = [parent for parent in parents if _is_free(valid.get(parent))]
    if key not in valid and not free:
        raise ConfigError(f"unknown key {key!r} {where}{nearest(key, valid)}")
    parent, _, own = key.rpartition(".")
    if key not in valid and parent not in free:  # jsonargparse would drop the rest of the mapping
        raise ConfigError(f"{key} {where} is not allowed: give {parent} whole, as {parent}='{{{own}: ...}}'")


def _check_tree(data: Mapping[str, Any], where: str, prefix: str = "", dotted: bool = True) -> None:
    """Raise ConfigError unless ``data`` has known keys; ``dotted``: those of free mappings, such as optim.args.betas,
    too."""
    for name, value in data.items():
        key = f"{prefix}{name}"
        _check_key(key, where)
        parent, _, own = key.rpartition(".")
        if not dotted and key not in keys() and "." in str(name):
            raise ConfigError(f"{key} {where} is not allowed: put {own} below {parent}")
        if _section(hint := keys().get(key)) is not None:
            if isinstance(value := _named(key, value), Mapping):
                _check_tree(value, where, f"{key}.", dotted)
            elif value is not None or not _may_be_null(hint):
                name = "a name, or " if _may_be_null(hint) else ""
                raise ConfigError(
                    f"{key}={value!r} {where} is not allowed: it must be {name}keys and values below {key}"
                )


def _may_be_null(hint: Any) -> bool:
    return hint is Any or type(None) in typing.get_args(hint)


_KINDS = {float: "a number", int: "a whole number", bool: "true or false", str: "a string", type(None): "null"}


def _allowed(hint: Any) -> str:
    """What a value of that type may be, in words."""
    if typing.get_origin(hint) is Literal:
        options = list(typing.get_args(hint))
    elif typing.get_origin(hint) in (types.UnionType, typing.Union):
        options = [_allowed(option) for option in typing.get_args(hint)]
    elif hint in _KINDS:
        options = [_KINDS[hint]]
    elif typing.get_origin(hint) is list:
        options = ["a list of strings"]
    else:
        options = ["keys and values"]
    return " or ".join([", ".join(options[:-1]), options[-1]] if options[1:] else options)


def _no_null(key: str, hint: Any) -> str:
    return f"{key}=null is not allowed: it must be {_allowed(hint)}; leave it out for its default"


def _in_words(said: str) -> str:
    """What jsonargparse says of a value of another type, in one line: the key, the value and what is allowed."""
    names, given = re.findall(r'[Kk]ey "([\w.]+)":', said), re.search(r"(?:Got|Given) value: ?(.*)", said)
    key = ".".join(names)  # of what is within a section that may be null, the section's comes first
    if given is None or key not in keys():
        return " ".join(said.split())
    return f"{key}={given[1]} is not allowed: it must be {_allowed(keys()[key])}"


def _check_value(key: str, value: Any, hint: Any) -> None:
    """Raise ConfigError for what jsonargparse takes for any type: null, and keys that are no words."""
    if value is None and not _may_be_null(hint):
        raise ConfigError(_no_null(key, hint))
    if _is_free(hint):
        for name in value:
            if not isinstance(name, str):
                raise ConfigError(f"{key} has the key {name!r}, and keys must be words")


def _named(key: str, value: Any) -> Any:
    """``value`` of ``key``; {name: Int4, args: {}} for Int4, and for {name: Int4}, where a class may be named: its
    arguments are those that it was named with, not those of a class that was named before."""
    hint = keys().get(key)
    is_name = isinstance(value, str) and value.replace(".", "_").isidentifier() and value not in ("null", "None")
    optional = type(None) in typing.get_args(hint) and _section(hint) is not None
    if optional and isinstance(value, Mapping) and "name" in value and "args" not in value:
        return {**value, "args": {}}
    return {"name": value, "args": {}} if is_name and optional else value


def _whole(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``data`` without such names."""
    out = {}
    for name, given in data.items():
        key = f"{prefix}{name}"
        value = _named(key, given)
        nested = isinstance(value, Mapping) and _section(keys().get(key)) is not None
        out[name] = _whole(value, f"{key}.") if nested else value
    return out


def _content(path: Path) -> str:
    """Argument of jsonargparse for a config file: its path, what is in it without such names, or "" if that is
    nothing. Raises ConfigError unless it is a YAML mapping of known keys, or empty."""
    data = read_yaml(path)
    if data is not None and not isinstance(data, Mapping):
        raise ConfigError(f"config file {path}: it must hold keys and values, not {type(data).__name__}")
    _check_tree(data or {}, f"in {path}", dotted=False)
    whole = _whole(data or {})
    if whole == (data or {}):
        return str(path) if data else ""
    return str(yaml.dump(whole, Dumper=Dumper))


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Config files and ``--key=value`` overrides; ``--key value`` is joined."""
    files, overrides = [], []
    words = iter(argv)
    for word in words:
        if not word.startswith("--"):
            files.append(word)
        elif word.startswith("--config="):
            files.append(word.removeprefix("--config="))
        elif "=" in word:
            overrides.append(word)
        else:
            value = next(words, None)
            if value is None:
                if word != "--config":
                    _check_key(word[2:], "on the command line")
                raise ConfigError(f"{word} needs a value: {word}=VALUE")
            if word == "--config":
                files.append(value)
            else:
                overrides.append(f"{word}={value}")
    return files, overrides


@functools.cache
def make_parser() -> Any:
    """The jsonargparse parser of a run: one option per field, its docstring as help."""
    from jsonargparse import ArgumentParser, set_parsing_settings

    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(prog="commopt train", exit_on_error=False, allow_abbrev=False)
    parser.usage = "commopt train [CONFIG.yaml ...] [--section.key=value ...] [--print_config]"
    parser.add_argument(
        "--config",
        action="config",
        help="Path to a YAML file; the same as CONFIG.yaml. Of several, what a later one says holds.",
    )
    parser.add_class_arguments(Config)
    return parser


def from_dict(data: Mapping[str, Any], cls: type = Config, prefix: str = "") -> Any:
    """Build ``cls`` from nested mappings, for example from a run's config.yaml. ``prefix`` begins its keys in errors.

    Raises ConfigError for an unknown key (with the nearest valid one) or a value that is not allowed.
    """
    hints = typing.get_type_hints(cls)
    values = {}
    for name, value in data.items():
        if name not in hints:
            raise ConfigError(f"unknown key {name!r} in {cls.__name__}{nearest(name, hints)}")
        section = _section(hints[name])
        _check_value(f"{prefix}{name}", value, hints[name])
        below = f"{prefix}{name}."
        values[name] = from_dict(value, section, below) if section and isinstance(value, Mapping) else value
    return cls(**values)


def to_yaml(config: Config) -> str:
    """The resolved config as YAML; ``from_dict(yaml.safe_load(text))`` gives it back.

    Raises ConfigError for a value that is not plain, such as a Path or a number of numpy, as Python may give.
    """
    try:
        return str(yaml.dump(dataclasses.asdict(config), Dumper=Dumper, sort_keys=False, allow_unicode=True))
    except yaml.representer.RepresenterError as error:
        value = error.args[-1]
        raise ConfigError(
            f"{value!r} of type {type(value).__name__} is not allowed in a config: its values must be Python's own "
            "numbers and strings, and lists and mappings of these"
        ) from None


def parse(argv: Sequence[str], check_name: Callable[[str, str], None] | None = None) -> Config:
    """Config from ``[CONFIG.yaml] [--section.key=value ...]``; raises ConfigError for whatever is wrong with it.

    ``check_name`` is called with every name in optim.settings, and that key.
    """
    from argparse import ArgumentError

    files, overrides = _split(argv)
    contents = [content for path in files if (content := _content(Path(path).expanduser()))]
    for word in overrides:
        key, _, value = word[2:].partition("=")
        _check_key(key.removesuffix("+"), "on the command line")
        hint = keys().get(key)
        if value == "null" and hint is not None and not _may_be_null(hint):  # jsonargparse makes text of it
            raise ConfigError(_no_null(key, hint))
        if _section(hint) is not None:  # else it may be the name of a file, which jsonargparse would read
            _check_tree({key: _plain(key, value)}, "on the command line")
    parser = make_parser()

    def read(*words: str) -> dict[str, Any]:
        given = [_override(*word[2:].split("=", 1)) for word in (*words, *overrides)]
        try:
            parsed = parser.parse_args([*(f"--config={content}" for content in contents), *given])
        except (ArgumentError, ValueError) as error:
            raise ConfigError(_in_words(str(error))) from None
        values: dict[str, Any] = parsed.as_dict()
        values.pop("config", None)
        return values

    values = read()
    chosen, settings = values["optim"]["name"], values["optim"]["settings"]
    _check_value("optim.settings", settings, dict[str, Any])
    if check_name is not None:
        for name in settings:
            check_name(name, "optim.settings")
    if words := _settings_of(chosen, settings):
        values = read(*words)
    if values["optim"]["name"] != chosen:
        raise ConfigError(f"optim.settings.{chosen}.name={values['optim']['name']}: settings cannot change the name")
    values["optim"]["settings"] = {}
    return from_dict(values)


def _plain(key: str, value: str) -> Any:
    """Value of a word of the command line. Raises ConfigError."""
    try:
        return yaml.load(value, Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{key}={value!r} is not valid YAML: {' '.join(str(error).split())}") from None


def _override(key: str, value: str = "") -> str:
    """The word of the command line that gives ``key`` a value."""
    given = _plain(key, value) if value.lstrip().startswith("{") else value
    whole = _whole({key: given})[key]
    return f"--{key}={value if whole == given else _one_line(whole)}"


def _settings_of(chosen: str, settings: Mapping[str, Any]) -> list[str]:
    """Overrides that stand for the settings of the optimizer chosen; all settings are checked."""
    whole = {key.split(".")[0] for key in keys()}
    resolved: dict[str, dict[str, Any]] = {}
    for name, own in settings.items():
        if not isinstance(own, Mapping):
            raise ConfigError(
                f"optim.settings.{name}={own!r} is not allowed: it must be keys of optim and their values"
            )
        resolved[name] = {key if key.split(".")[0] in whole else f"optim.{key}": value for key, value in own.items()}
        _check_tree(resolved[name], f"in optim.settings.{name}")
    own = resolved.get(chosen, {})
    return [f"--{key}={value if isinstance(value, str) else _one_line(value)}" for key, value in own.items()]


class _Dumper(yaml.SafeDumper):
    """Writes out aliases, and words in quotes, so that none is read as anything else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style='"')


_Dumper.add_representer(str, _Dumper.represent_str)


def _one_line(value: Any) -> str:
    """``value`` as YAML in one line."""
    listed = yaml.dump([value], Dumper=_Dumper, default_flow_style=True, sort_keys=False, width=math.inf)
    return str(listed)[1:-2]
