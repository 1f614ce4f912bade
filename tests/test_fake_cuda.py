"""On devices that torch takes for GPUs, and that are the CPU: no tensor meets one of another device, and all have the
bits of a run on the CPU. Streams, and NCCL, are what this says nothing of (tests/fake_cuda)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.cpp_extension import include_paths

HERE = Path(__file__).parent
TORCH = Path(torch.__file__).parent / "lib"
COMPILER = shutil.which("c++") or shutil.which("g++")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA devices of its own"),
    pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="written for what is inside torch 2.13"),
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler"),
]
Run = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """``run(scene)``: what that one of fake_cuda/scenes.py finds."""
    library = str(tmp_path_factory.mktemp("fake_cuda") / "fakecuda.so")
    includes = [word for path in (*include_paths(), sysconfig.get_path("include")) for word in ("-isystem", path)]
    libraries = [f"-L{TORCH}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    flags = ["-std=c++20", "-O1", "-fPIC", "-shared", "-DTORCH_EXTENSION_NAME=fakecuda"]
    source = str(HERE / "fake_cuda" / "device.cpp")
    subprocess.run([COMPILER or "", *flags, *includes, source, "-o", library, *libraries], check=True)

    def run(scene: str) -> dict[str, Any]:
        paths = os.pathsep.join([str(HERE.parent), str(HERE)])
        env = {**os.environ, "LD_PRELOAD": library, "LD_LIBRARY_PATH": str(TORCH), "FAKE_CUDA": library}
        env |= {"PYTHONPATH": paths, "COMMOPT_NATIVE": "0"}  # the kernels' updates are rounded otherwise
        command = [sys.executable, str(HERE / "fake_cuda" / "scenes.py"), scene]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    return run


@pytest.mark.parametrize("scene", ["optimizers", "gradients"])
def test_a_run_has_the_bits_of_one_on_the_cpu(run: Run, scene: str) -> None:
    found = run(scene)
    assert len(found) > 7
    assert {name: what for name, what in found.items() if what != "same"} == {}


def test_a_learning_rate_may_be_on_the_device_of_each_rank(run: Run) -> None:
    found = run("learning_rates")
    assert len(found) > 7
    assert set(found.values()) == {"fine"}, found


def test_replicas_of_a_model_on_two_devices_stay_replicas(run: Run) -> None:
    """Autograd has a thread for each."""
    assert run("two_devices") == {"gradients": "fine", "OneBitAdam": "fine", "ZeroOneAdam": "fine"}


def test_the_host_waits_as_often_for_many_buckets_as_for_one(run: Run) -> None:
    found = run("waits")
    assert found["few"] < found["many"]
    assert found["of few"] == found["of many"] > 0
