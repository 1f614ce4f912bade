"""Launches the kernels of ``kernels/cuda`` through CuPy, which compiles them at first use and keeps the result on disk.

A launch goes to torch's current stream, copies nothing and waits for nothing. Each kernel has one argument, a struct by
value, so that a launch can be captured in a CUDA graph; the first use loads the kernels, and belongs before a capture.

CuPy is imported at the first launch. Where it is not installed, and on ROCm, the reference serves, and one warning
says so.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

SOURCES = (
    "scalar.cuh", "payload.cuh", "runs.cuh", "compress.cu", "decompress.cu", "lists.cu", "integers.cu", "top_k.cu",
    "threshold.cu",
)  # fmt: skip
"""The files that make up the one module, in order; each of them uses what the ones before define."""

_logger = logging.getLogger("commopt")


def folder() -> Path:
    """Folder of the sources: beside this file in an installed package, else in the repository."""
    installed = Path(__file__).with_name("cuda_sources")
    return installed if installed.is_dir() else Path(__file__).parents[2] / "kernels" / "cuda"


def source() -> str:
    """All kernels as one text. It includes nothing: CuPy keeps what it compiled by the text alone."""
    parts = [f'#line 1 "{name}"\n{(folder() / name).read_text(encoding="utf-8")}' for name in SOURCES]
    return "\n".join(parts)


def extra() -> str:
    """The extra of this package that brings the CuPy for this torch."""
    version = torch.version.cuda
    return "commopt[cuda12] or commopt[cuda13]" if version is None else f"commopt[cuda{version.split('.')[0]}]"


def provider() -> str | None:
    """ "cupy", "reference" where it is missing or the devices are ROCm's, or None where one is asked not to."""
    if os.environ.get("COMMOPT_NATIVE", "1") == "0":
        return None
    missing = torch.version.hip is not None or importlib.util.find_spec("cupy") is None
    return "reference" if missing else "cupy"


@functools.cache
def _warn() -> None:
    if torch.version.hip is not None:
        _logger.warning(
            "The kernels are for CUDA: the PyTorch reference serves on ROCm, slower; COMMOPT_NATIVE=0 silences this."
        )
        return
    _logger.warning(
        "No CuPy: the PyTorch reference serves on CUDA devices, many times slower. Install %s; "
        "COMMOPT_NATIVE=0 silences this.",
        extra(),
    )


def with_warning(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, whose first call, or that of any other like it, warns that the reference serves."""

    @functools.wraps(function)
    def serve(*arguments: Any) -> Any:
        _warn()
        return function(*arguments)

    return serve


@functools.cache
def _module() -> Any:
    import cupy

    return cupy.RawModule(code=source(), options=("-std=c++17",))


@functools.cache
def _kernel(name: str) -> Any:
    try:
        return _module().get_function(name)
    except Exception as problem:
        # Not the reference: ops.report() has said "cupy" already, and other ranks count on it.
        raise RuntimeError(
            f"CuPy is installed but cannot be used: {problem}. Reinstall {extra()}, or set COMMOPT_NATIVE=0 on all "
            "ranks for the PyTorch reference"
        ) from problem


class _TorchStream:
    """A stream as CuPy takes it from others, for a torch that does not have the protocol yet."""

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.pointer


@functools.lru_cache(maxsize=256)
def _stream(pointer: int) -> Any:
    from cupy import cuda

    if hasattr(cuda.Stream, "from_external"):
        return cuda.Stream.from_external(_TorchStream(pointer))
    return cuda.ExternalStream(pointer)  # CuPy before 14


@functools.cache
def _by_value(struct: type[ctypes.Structure]) -> np.dtype[np.void]:
    """As elements of this type CuPy passes structs by value."""
    return np.dtype((np.void, ctypes.sizeof(struct)))


def launch(name: str, blocks: int, threads: tuple[int, int], argument: ctypes.Structure, device: torch.device) -> None:
    """Starts kernel ``name`` on torch's current stream of ``device``.

    Raises:
        RuntimeError: CuPy is there, but cannot compile or load the kernels.
    """
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(name, blocks, threads, argument, device)
    by_value = np.frombuffer(argument, dtype=_by_value(type(argument)))  # type: ignore[call-overload]
    stream = _stream(torch._C._cuda_getCurrentRawStream(device.index))  # a Stream of torch's takes longer than a launch
    _kernel(name)((blocks,), threads, (by_value,), stream=stream)
