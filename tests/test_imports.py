"""Imports go one way, as ROOMS says."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import commopt
from commopt import integrations
from commopt.agreement.diagnostics import by_a_door

ROOMS = [
    "ops",
    "sharding",
    "ddp_models",
    "exchanged",
    "hsdp",
    "bucket",
    "compress",
    "comm",
    "agreement",
    "state",
    "step",
    "optim",
    "outer",
    "gradients",
    "ddp_attachment",
    "hsdp_attachment",
    "attach",
    "integrations",
    "arguments",
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
    assert imported_rooms("def f():\n    from commopt.step.base import CommOptimizer") == {"step"}
    assert imported_rooms("from commopt import ops") == {"ops"}
    assert imported_rooms("import commopt.train.loop as x") == {"train"}


def test_doors_are_not_opened_before_they_are_asked_for():
    assert imported_rooms((PACKAGE / "integrations" / "__init__.py").read_text()) == set()
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name != "integrations":
            assert "integrations" not in imported_rooms(path.read_text()), path


DOORS = """
import sys
import commopt
def opened():
    return [name for name in sys.modules if name.startswith("commopt.integrations")]
assert not opened()
assert not hasattr(commopt, "integration")
assert opened() == []
assert not hasattr(commopt.integrations, "keras")
assert opened() == ["commopt.integrations"]
assert commopt.integrations.accelerate.connect
assert "commopt.integrations.accelerate" in opened() and "commopt.integrations.lightning" not in opened()
"""


def test_a_door_opens_when_it_is_asked_for_by_its_name():
    pytest.importorskip("accelerate")
    done = subprocess.run([sys.executable, "-c", DOORS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_door_is_known_by_its_name():
    doors = {path.stem for path in (PACKAGE / "integrations").glob("*.py")}
    shared = {"__init__", "advice", "common", "means", "parts", "residuals", "shards"}
    assert set(integrations._DOORS) == doors - shared


def test_no_test_imports_a_test_as_it_is_loaded():
    """What two files of tests share is in a file of its own, or in conftest.py: one of them may lose it otherwise."""
    for path in sorted(Path(__file__).parent.glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in modules if name.startswith("test_")], f"{path} imports {modules}"


@pytest.mark.parametrize(("door", "extra"), [("accelerate", "hf"), ("timm", "timm")])
def test_a_door_without_its_framework_says_which_extra_has_it(monkeypatch, door, extra):
    parts = [name for name in sys.modules if name.startswith(f"{door}.")]  # there, if an earlier test has used them
    for name in [door, *parts]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"commopt.integrations.{door}", raising=False)
    monkeypatch.delitem(vars(integrations), door, raising=False)
    with pytest.raises(ModuleNotFoundError, match=rf"pip install 'commopt\[{extra}\]'"):
        getattr(integrations, door)


@pytest.mark.parametrize(
    ("framework", "door", "line"),
    [
        ("transformers.trainer", "transformers", r"Hugging Face's Trainer .* callbacks=\[CommoptCallback\(\)\]"),
        ("lightning.pytorch.trainer.trainer", "lightning", r"Lightning's Trainer .* callbacks=\[CommoptCallback\(\)\]"),
        ("accelerate.accelerator", "accelerate", r"accelerate .* connect\(accelerator, model, optimizer\)"),
    ],
)
def test_in_a_framework_warnings_name_the_door(monkeypatch, framework, door, line):
    for name in [name for name in sys.modules if name.startswith(("transformers", "lightning", "accelerate"))]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("transformers", "lightning", "accelerate"):
        monkeypatch.delitem(sys.modules, f"commopt.integrations.{name}", raising=False)
    assert not by_a_door()
    monkeypatch.setitem(sys.modules, framework, ModuleType(framework))
    assert re.search(rf"{line} of commopt\.integrations\.{door}\.", by_a_door())
    monkeypatch.setitem(sys.modules, f"commopt.integrations.{door}", ModuleType(door))
    assert not by_a_door()
