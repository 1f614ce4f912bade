"""The CUDA sources compile, and what is wrong in them does not, without a GPU."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import cuda_checks as checks
import pytest

from commopt.ops import cuda_module

Compiled = tuple[int, str, str, bytes]
"""The status (0: good), what the compiler says, PTX, and machine code: the assembler finds what it does not."""


def nvrtc() -> Path:
    """The library of NVIDIA's runtime compiler, from its wheel."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(p) for p in spec.submodule_search_locations or ()] if spec else []
    found = sorted(lib for folder in folders for lib in folder.glob("*/lib/libnvrtc.so.*"))
    if not found:
        pytest.skip("NVRTC is not installed (the package nvidia-cuda-nvrtc)")
    return found[-1]


@pytest.fixture
def compile_cuda(request: pytest.FixtureRequest) -> Callable[..., Compiled]:
    """``compile_cuda(text, arch)``. What a compiler has once made of a text is kept beside what pytest keeps."""

    def compiled(text: str, arch: str, optimise: bool = False) -> Compiled:
        library = nvrtc()
        # As CuPy does it.
        options = [b"-std=c++17", b"-ftz=true", f"-arch={arch}".encode(), b"--device-as-default-execution-space"]
        options += [] if optimise else [b"--Ofast-compile=max"]
        cache, there = getattr(request.config, "cache", None), library.stat()
        if cache is None:
            return compiled_by(library, text, options)
        key = repr((text, options, str(library), there.st_size, there.st_mtime_ns))
        kept = cache.mkdir("cuda") / hashlib.sha256(key.encode()).hexdigest()
        if not kept.exists():
            part = kept.with_suffix(f".{os.getpid()}")
            part.write_bytes(pickle.dumps(compiled_by(library, text, options)))
            part.replace(kept)
        outcome: Compiled = pickle.loads(kept.read_bytes())
        return outcome

    return compiled


def compiled_by(library: Path, text: str, options: list[bytes]) -> Compiled:
    for helper in library.parent.glob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(helper), mode=ctypes.RTLD_GLOBAL)  # NVRTC looks for it by name
    compiler, program, size = ctypes.CDLL(str(library)), ctypes.c_void_p(), ctypes.c_size_t()
    assert compiler.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"all.cu", 0, None, None) == 0
    status = compiler.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    texts = []
    for what in ["ProgramLog"] + ["PTX", "CUBIN"] * (status == 0):
        assert getattr(compiler, f"nvrtcGet{what}Size")(program, ctypes.byref(size)) == 0
        buffer = ctypes.create_string_buffer(size.value)
        assert getattr(compiler, f"nvrtcGet{what}")(program, buffer) == 0
        texts.append(buffer.raw)
    compiler.nvrtcDestroyProgram(ctypes.byref(program))
    log, ptx, code = (*texts, b"", b"")[:3]
    return status, log.decode(), ptx.decode(), code


@pytest.mark.long(but="sm_90")
@pytest.mark.parametrize("arch", ["sm_75", "sm_90"])
def test_the_sources_compile(compile_cuda, request, arch):
    """As CuPy compiles them, for the oldest and for the newest of those that are meant, but optimised only with
    --every-combination: that takes half a minute."""
    optimise = request.config.getoption("every_combination")
    status, log, ptx, code = compile_cuda(cuda_module.source(), arch, optimise)
    assert status == 0, log
    assert log.strip("\0\n") == ""
    assert ptx.count(".entry") == checks.kernels()
    # Denormals are kept where CuPy asks for them to be flushed: no float arithmetic but our own instructions.
    assert [line for line in ptx.splitlines() if ".ftz" in line] == []
    assert code.startswith(b"\x7fELF")
    assert code.count(b".text.") >= ptx.count(".entry")


def test_a_broken_source_does_not_compile(compile_cuda):
    status, log, _, _ = compile_cuda(cuda_module.source().replace("__popc(mask)", "__popc(musk)"), "sm_80")
    assert status != 0
    assert "compress.cu" in log
    assert "musk" in log
    # an instruction that does not exist is found by the assembler only
    status, _, _, code = compile_cuda(cuda_module.source().replace("fma.rn.f32", "fma.rm.f31"), "sm_80")
    assert status != 0
    assert not code
