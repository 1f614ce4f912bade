"""A wheel has all that commopt needs where there is no compiler and no repository, for any Python."""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import commopt

ROOT = Path(__file__).resolve().parent.parent
COMPILER = shlex.split(os.environ.get("CXX") or os.environ.get("CC") or "c++")[0]
KERNELS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "kernels").rglob("*.*"))
LIBRARY = "commopt/ops/libcommopt_cpu.so"

pytestmark = pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"no C++ compiler ({COMPILER})")


def run(folder: Path, *words: str, **env: str) -> str:
    """Standard output of a program in ``folder``, which sees nothing of this repository."""
    mine = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(words, cwd=folder, env=mine | env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], Path]:
    """The files of a source distribution of a clean copy of this repository; and a wheel that is made of it."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    left_out = shutil.ignore_patterns("*.so", "__pycache__", "cuda_sources")
    shutil.copytree(ROOT / "commopt", tree / "commopt", ignore=left_out)
    shutil.copytree(ROOT / "kernels", tree / "kernels")
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "constraints.txt", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for page in ROOT.glob("*.md"):
        shutil.copy(page, tree)
    sdist = "from setuptools import build_meta; build_meta.build_sdist('../dist')"
    run(tree, sys.executable, "-c", sdist)
    [archive] = (folder / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    source = folder / f"commopt-{commopt.__version__}"
    files = {path.relative_to(source).as_posix() for path in source.rglob("*.*")}
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    # -O0: what is inside counts, and a quarter of the time
    run(source, *pip, "--disable-pip-version-check", "--wheel-dir", "../dist", ".", CXXFLAGS="-O0")
    [wheel] = (folder / "dist").glob("*.whl")
    return files, wheel


@pytest.mark.long
def test_the_sources_are_whole(built: tuple[set[str], Path]) -> None:
    inside, _ = built
    assert {*KERNELS, "setup.py", "pyproject.toml", "constraints.txt", "CHANGELOG.md", "README.md"} <= inside
    assert not [name for name in inside if name.endswith(".so")]


@pytest.mark.long
def test_one_wheel_serves_every_python(built: tuple[set[str], Path]) -> None:
    _, wheel = built
    assert wheel.name == f"commopt-{commopt.__version__}-py3-none-linux_{platform.machine()}.whl"
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
        facts = opened.read(f"commopt-{commopt.__version__}.dist-info/WHEEL").decode()
        library = opened.read(LIBRARY)
    assert "Root-Is-Purelib: false" in facts
    assert [name for name in names if ".so" in name] == [LIBRARY]
    cuda = {Path(name).name for name in KERNELS if name.startswith("kernels/cuda/")}
    assert {Path(name).name for name in names if "/cuda_sources/" in name} == cuda
    python = {path.relative_to(ROOT).as_posix() for path in (ROOT / "commopt").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == python
    for linked in (b"libgomp", b"libstdc++", b"libgcc_s"):  # what the system may lack, or have in another version
        assert linked not in library


USE = """
import json, os, torch, commopt
from commopt.ops import cuda_module

def threads():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(2)
x, before = torch.randn(1, 1 << 22), threads()
sign = commopt.compress.Sign()
sign.compress(x, torch.empty(1, sign.nbytes(x.shape[1]), dtype=torch.uint8))
compressed = threads()
x + x
facts = {"file": commopt.__file__, "kernels": str(cuda_module.folder()), "providers": commopt.ops.report()}
print(json.dumps(facts | {"threads": [before, compressed, threads()]}))
"""


@pytest.mark.long
def test_it_runs_without_the_repository(built: tuple[set[str], Path], tmp_path: Path) -> None:
    _, wheel = built
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(tmp_path / "unpacked")
    (tmp_path / "use.py").write_text(USE)
    env = {"PYTHONPATH": str(tmp_path / "unpacked"), "PATH": "", "OMP_NUM_THREADS": "2"}
    facts = json.loads(run(tmp_path, sys.executable, "use.py", **env))
    inside = tmp_path / "unpacked" / "commopt"
    assert facts["file"] == str(inside / "__init__.py")
    assert facts["kernels"] == str(inside / "ops" / "cuda_sources")
    assert all(by.get("cpu", "").startswith("native (") for by in facts["providers"].values())
    before, compressed, computed = facts["threads"]
    assert compressed == before + 1  # the kernels have threads,
    assert computed == compressed  # and torch has the same ones


@pytest.mark.parametrize(
    ("version", "spoil", "said"),
    [
        ("0.0.9", "", "pyproject.toml has another version than 0.0.9"),
        (commopt.__version__, "echo '# more' >> setup.py", "there are changes that are not committed"),
        (commopt.__version__, "echo nothing > CHANGELOG.md; git commit -qam x", "CHANGELOG.md has no section"),
        (
            commopt.__version__,
            "echo > commopt/__init__.py; git commit -qam x",
            "commopt/__init__.py has another version",
        ),
    ],
    ids=["version", "changes", "no section", "another version"],
)
@pytest.mark.skipif(shutil.which("git") is None, reason="no git")
def test_what_is_no_release_is_refused(tmp_path: Path, version: str, spoil: str, said: str) -> None:
    for name in (
        "scripts/release.sh",
        "scripts/env.sh",
        "pyproject.toml",
        "setup.py",
        "commopt/__init__.py",
        "CHANGELOG.md",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    start = "git init -q; git config user.name a; git config user.email a@b; git add .; git commit -qm x; "
    run(tmp_path, "bash", "-ec", start + spoil)
    release = ["bash", "scripts/release.sh", version, str(tmp_path.with_name("out"))]
    done = subprocess.run(release, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert said in done.stderr
