"""The scripts parse, and the constraints pin everything that the package asks for."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
SCRIPTS = [*sorted((ROOT / "scripts").glob("*.sh")), ROOT / ".ci" / "run"]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse_and_can_be_started(path: Path) -> None:
    assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0
    assert os.access(path, os.X_OK)


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_requirement_is_pinned() -> None:
    lines = [line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    pins = [line for line in lines if line]
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9.]+(; python_version .*)?", pin) for pin in pins), pins
    assert "torch==2.13.0" in pins
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = {
        canonical(re.split(r"[\[><=!~; ]", line)[0])
        for line in (*project["dependencies"], *extras["train"], *extras["mpi"], *extras["test"])
    }
    [alone] = re.findall(r"(?m)^ALONE=\((.*)\)$", (ROOT / "scripts" / "env.sh").read_text())
    asked |= {part.split(";")[0] for part in shlex.split(alone)}
    assert {"torch", "numpy", "transformers", "mpi4py", "pytest", "timm"} <= asked
    assert asked <= {pin.split("==")[0] for pin in pins}


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        ({"mpirun": "exit 0"}, ""),
        ({"id": "echo 1000"}, "installing it needs root or sudo without a password, and apt-get"),
        ({"id": "echo 1000", "sudo": "exit 1", "apt-get": "exit 0"}, "installing it needs root or sudo"),
        ({"id": "echo 0"}, "installing it needs root or sudo"),
        (
            {"id": "echo 0", "apt-get": "echo no network >&2; exit 100"},
            "no network\nno network\ntest.sh: apt-get failed",
        ),
        ({"id": "echo 0", "apt-get": "echo $* >> $LOG"}, ""),
        ({"id": "echo 1000", "sudo": 'test "$1" = -n && shift && "$@"', "apt-get": "echo $* >> $LOG"}, ""),
    ],
    ids=["there already", "no sudo", "password", "no apt-get", "fails", "root", "sudo"],
)
def test_open_mpi_is_installed_where_one_may_and_else_the_tests_go_on(
    tmp_path: Path, tools: dict[str, str], said: str
) -> None:
    bin_dir, log = tmp_path / "bin", tmp_path / "log"
    bin_dir.mkdir()
    for name in ("bash", "env", "timeout", "basename", "dirname"):
        (bin_dir / name).symlink_to(str(shutil.which(name)))
    for name, text in tools.items():
        (bin_dir / name).write_text(f"#!{bin_dir}/bash\n{text}\n")
        (bin_dir / name).chmod(0o755)
    script = tmp_path / "test.sh"
    script.write_text(f"set -euo pipefail\nsource {ROOT}/scripts/env.sh\nensure_mpi\necho goes on\n")
    env = {"PATH": str(bin_dir), "LOG": str(log)}
    done = subprocess.run([bin_dir / "bash", script], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "goes on"), done.stderr
    assert said in done.stderr
    assert ("tests of the MPI backend are skipped" in done.stderr) == bool(said)
    installed = log.exists() and "openmpi-bin" in log.read_text()
    assert installed == ("$LOG" in tools.get("apt-get", ""))


def copy_of_scripts(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    return tmp_path / "scripts" / "pretrain.sh"


def test_an_old_python_is_named(tmp_path: Path) -> None:
    old = tmp_path / "python"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    script = copy_of_scripts(tmp_path)
    env = {**os.environ, "PYTHON": str(old)}
    done = subprocess.run(["bash", str(script)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == f"pretrain.sh: PYTHON={old} is not allowed: it must be Python 3.10 or newer\n"


@pytest.mark.long
def test_a_failed_installation_is_named_and_tried_again(tmp_path: Path) -> None:
    """Here the project is missing; without a network the same line follows what pip says."""
    script = copy_of_scripts(tmp_path)
    for name in ("constraints.txt", "pyproject.toml", "setup.py"):
        (tmp_path / name).write_text("")
    (tmp_path / "kernels").mkdir()
    env = {**os.environ, "PYTHON": sys.executable, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
    for _ in range(2):
        done = subprocess.run(["bash", str(script)], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert "pretrain.sh: the requirements could not be installed" in done.stderr
        assert "Traceback" not in done.stderr
