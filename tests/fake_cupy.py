"""As much of CuPy as commopt uses, with its kernels on the CPU.

The kernels are those of ``kernels/cuda``, compiled with ``tests/cuda_on_cpu``. Arguments are taken as CuPy's own
sources take them: grid and block are tuples, and what is passed by value is a numpy array of one element.
"""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from commopt.ops import cuda_module

HERE = Path(__file__).parent / "cuda_on_cpu"
STREAM = 0xABC0


def build(target: Path, sources: Path | None = None) -> ctypes.CDLL:
    """Compiles the kernels in ``sources`` for the CPU."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler: the CUDA kernels cannot be run on the CPU")
    flags = ["-std=c++17", "-O2", "-ffp-contract=off", "-Wall", "-Werror", "-Wno-unknown-pragmas", "-fPIC", "-shared"]
    flags += ["-U_FORTIFY_SOURCE"]  # which takes a jump from fiber to fiber for a mistake
    include = f"-I{sources or cuda_module.folder()}"
    subprocess.run([compiler, *flags, include, str(HERE / "kernels.cpp"), "-o", str(target)], check=True)
    library = ctypes.CDLL(str(target))
    library.argument_size.restype = ctypes.c_size_t
    return library


class FakeCupy(ModuleType):
    """The module, which remembers the launches as (name, grid, block)."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__("cupy")
        self.library = library
        self.launches: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
        self.backwards = False
        self.cuda = SimpleNamespace(Stream=SimpleNamespace(from_external=self._from_external))

    @staticmethod
    def _from_external(stream: Any) -> SimpleNamespace:
        version, pointer = stream.__cuda_stream__()
        assert (version, type(pointer)) == (0, int)
        return SimpleNamespace(ptr=pointer)

    def RawModule(self, *, code: str, options: tuple[str, ...]) -> SimpleNamespace:
        assert code == cuda_module.source()
        assert isinstance(options, tuple)
        return SimpleNamespace(get_function=lambda name: lambda *a, **k: self._run(name, *a, **k))

    def _run(self, name: str, grid: tuple[int], block: tuple[int, int], args: tuple[Any, ...], *, stream: Any) -> None:
        assert isinstance(grid, tuple)
        assert isinstance(block, tuple)
        assert 1 <= grid[0] < 2**31
        assert block[0] % 32 == 0
        assert 32 <= block[0] * block[1] <= 1024
        assert stream.ptr == STREAM
        (argument,) = args
        assert isinstance(argument, np.ndarray)
        assert argument.size == 1
        assert argument.dtype.itemsize == self.library.argument_size(name.encode()) <= 4096
        self.launches.append((name, grid, block))
        pointer = ctypes.c_void_p(argument.__array_interface__["data"][0])
        assert self.library.launch(name.encode(), grid[0], *block, pointer, self.backwards) == 0, f"{name} is stuck"


@contextlib.contextmanager
def installed(library: ctypes.CDLL) -> Iterator[FakeCupy]:
    """Makes commopt find the fake, and torch have a current stream; the operators then work on CPU tensors."""
    fake = FakeCupy(library)
    caches = (cuda_module._module, cuda_module._kernel, cuda_module._stream)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", fake)
        patch.setattr(torch.cuda, "current_device", lambda: None)  # the index of torch.device("cpu")
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM, raising=False)
        for cache in caches:
            cache.cache_clear()
        yield fake
    for cache in caches:
        cache.cache_clear()
