"""scripts/drills.py names tests that there are, and docs/reliability.md is what it says."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from forks import python

TESTS = Path(__file__).parent
ROOT = TESTS.parent


def load() -> Any:
    spec = importlib.util.spec_from_file_location("drills", ROOT / "scripts" / "drills.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["drills"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


drills = load()


@pytest.mark.parametrize("drill", drills.DRILLS, ids=lambda drill: drill.name)
def test_every_drill_is_made_of_tests_that_there_are(drill):
    assert drill.tests
    for test in drill.tests:
        file, _, name = test.partition("::")
        found = {node.name for node in ast.parse((TESTS / file).read_text()).body if isinstance(node, ast.FunctionDef)}
        assert not name or name in found, f"{file} has no {name}"


def test_names_are_unique_and_the_page_has_the_table():
    assert len({drill.name for drill in drills.DRILLS}) == len(drills.DRILLS)
    assert drills.table() in (ROOT / "docs" / "reliability.md").read_text()


def test_an_unknown_name_is_answered(capsys):
    with pytest.raises(SystemExit) as caught:
        drills.main(["nam"])
    assert caught.value.code == 2
    assert "no drill 'nam'; there are nan, " in capsys.readouterr().err


def test_a_drill_that_fails_is_said(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(drills, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "executable", python())
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_x.py").write_text("def test_y():\n    assert 1 == 2\n\n\ndef test_z():\n    pass\n")
    assert not drills.run(drills.Drill("x", "this", "that", ("test_x.py::test_y",)))
    assert drills.run(drills.Drill("x", "this", "that", ("test_x.py::test_z",)))
    out = capsys.readouterr().out
    assert out.count("FAILS") == 1
    assert out.count("holds") == 1
    assert "assert 1 == 2" in out
