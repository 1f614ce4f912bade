"""Imports go one way, as ROOMS says."""

from __future__ import annotations

import ast
from pathlib import Path

import commopt

ROOMS = [
    "ops",
    "sharding",
    "bucket",
    "compress",
    "comm",
    "optim",
    "outer",
    "gradients",
    "attach",
    "integrations",
    "probe",
    "train",
    "report",
    "cli",
]
PACKAGE = Path(commopt.__file__).parent


def imported_rooms(source: str) -> set[str]:
    """Rooms of commopt that ``source`` imports, wherever in the file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, "imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("commopt.")}
    return found


def test_no_room_imports_one_above_it():
    seen = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room not in ROOMS:
            assert room in ("__init__", "__main__"), f"{path} is in no room"
            continue
        seen.add(room)
        for other in imported_rooms(path.read_text()) & set(ROOMS):
            assert ROOMS.index(other) <= ROOMS.index(room), f"{path} imports {other}"
    assert seen == set(ROOMS)


def test_an_upward_import_would_be_seen():
    assert imported_rooms("def f():\n    from commopt.optim.base import CommOptimizer") == {"optim"}
    assert imported_rooms("from commopt import ops") == {"ops"}
    assert imported_rooms("import commopt.train.loop as x") == {"train"}


def test_no_test_imports_a_test_as_it_is_loaded():
    """What two files of tests share is in a file of its own, or in conftest.py: one of them may lose it otherwise."""
    for path in sorted(Path(__file__).parent.glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in modules if name.startswith("test_")], f"{path} imports {modules}"
