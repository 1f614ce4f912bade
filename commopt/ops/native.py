"""Native CPU providers: a C library through ctypes.

The library is built from ``kernels/cpu`` when the package is installed. Where it is missing, or was built for another
version of this file, one warning says so and the reference serves instead. ``COMMOPT_NATIVE=0`` in the environment
keeps the reference on purpose, without a warning.

The library links no OpenMP: its threads are those of the OpenMP library that torch calls.

Calls release the GIL. What a kernel does not handle (float64, a strided parameter, ...) goes to the reference.
"""

from __future__ import annotations

import ctypes
import logging
import os
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from commopt.ops import catalogue, native_bfloat16, native_integers, native_threshold, native_top_k, reference
from commopt.ops.arguments import Served, address, gradient_runs, pointer, runs_of

ABI_VERSION = 13
"""Changes with every signature in ``kernels/cpu``; ``dispatch.cpp`` states the same number."""

LIBRARY = Path(__file__).with_name("libcommopt_cpu.so")

_P, _I64, _I32, _F32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
_SIGNATURES: dict[str, list[Any]] = {
    "sign_compress": [_P, _P, _P, _P, _P, _I64, _I64, _I64, _I32, _I32],
    "sign_compress_momentum": [_P, _P, _I64, _F32, _F32, _P, _P, _P, _P, _I64, _I64, _I64, _I64, _I64, _I32, _I32],
    "sign_reduce": [_P, _P, _P, _P, _P, _I64, _I64, _I64, _I32, _I32],
    "sign_decompress": [_P, _P, _P, _I64, _I64, _I64, _I32],
    "sign_decompress_mean": [_P, _P, _I64, _I64, _I64, _I32],
    "sign_decompress_adam": [_P, _P, _P, _P, _P, _I64, _P, _F32, _I64, _I64, _I64, _I64, _I64, _I32],
    "pack_nonzero": [_P, _P, _I64, _I32],
    "zero_inactive": [_P, _P, _I64, _I32],
    "square_sum": [_P, _I64, _P, _I32],
    "square_sums": [_P, _I64, _P, _I32],
    "momentum": [_P, _P, _I64, _F32, _F32, _P, _I64, _I32],
    "frozen_adam": [_P, _I64, _P, _F32, _I32],
    **native_bfloat16.SIGNATURES,
    **native_integers.SIGNATURES,
    **native_threshold.SIGNATURES,
    **native_top_k.SIGNATURES,
}
_OPENMP = ("GOMP_parallel", "omp_get_num_threads", "omp_get_thread_num")
_logger = logging.getLogger("commopt")
_calls: dict[str, Callable[..., int]] = {}


def load(path: Path) -> ctypes.CDLL:
    """Opens the library and checks that it was built for this file.

    Raises:
        OSError: it cannot be opened, its ABI version is not :data:`ABI_VERSION`, or it lacks a kernel.
    """
    library = ctypes.CDLL(str(path))
    version = getattr(library, "commopt_abi_version", lambda: None)()
    if version != ABI_VERSION:
        raise OSError(f"{path} has ABI version {version}, needed is {ABI_VERSION}")
    library.commopt_isa.restype = ctypes.c_char_p
    library.commopt_use_isa.argtypes = [ctypes.c_char_p]
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, f"commopt_{name}", None)
        if function is None:
            raise OSError(f"{path} lacks the kernel commopt_{name}: it was built from other sources")
        function.argtypes = arguments
        function.restype = ctypes.c_int
        _calls[name] = function
    library.commopt_use_openmp((ctypes.c_void_p * 3)(*_openmp_functions()))
    return library


def _openmp_functions() -> list[int | None]:
    """Addresses of the functions that threads are made by; empty where torch has none.

    They are sought as the loader does for torch: what is global comes first (torch for x86-64 loads its OpenMP so, and
    a library of LD_PRELOAD replaces it), then what torch is linked with (torch for ARM).
    """
    for scope in (None, torch._C.__file__):
        found = ctypes.CDLL(scope)
        if all(hasattr(found, name) for name in _OPENMP):
            return [ctypes.cast(getattr(found, name), ctypes.c_void_p).value for name in _OPENMP]
    return []


def use_isa(name: str) -> bool:
    """Makes the kernels use instruction set ``name`` ("avx512", "avx2", "neon", "plain", or "" for the best).

    For tests. Returns False, and changes nothing, where this machine or build does not have it.
    """
    if library is None or not library.commopt_use_isa(name.encode()):
        return False
    _announce(library)
    return True


def _call(name: str, *arguments: Any) -> None:
    if _calls[name](*arguments, torch.get_num_threads()):
        raise MemoryError(f"no memory for the work space of {name}")


def _sign_compress(x: Tensor, payload: Tensor, block: int, norm: int, active: Tensor | None = None) -> Served:
    if x.dtype != torch.float32:
        return NotImplemented
    _call("sign_compress", x.data_ptr(), None, None, payload.data_ptr(), pointer(active), *x.shape, block, norm)


def _sign_compress_with_feedback(
    x: Tensor, error: Tensor, new_error: Tensor, payload: Tensor, block: int, norm: int, active: Tensor | None = None
) -> Served:
    if x.dtype != torch.float32:
        return NotImplemented
    pointers = x.data_ptr(), error.data_ptr(), new_error.data_ptr(), payload.data_ptr(), pointer(active)
    _call("sign_compress", *pointers, *x.shape, block, norm)


def _sign_compress_momentum(
    m: Tensor,
    grads: list[Tensor],
    offsets: list[int],
    beta: float,
    alpha: float,
    error: Tensor,
    new_error: Tensor,
    payload: Tensor,
    block: int,
    norm: int,
    active: Tensor | None,
    start: int,
    stop: int,
) -> Served:
    gradients = gradient_runs(m, grads, offsets)
    if gradients is None:
        return NotImplemented
    (runs, _), rows = gradients, payload.shape[0]
    pointers = error.data_ptr(), new_error.data_ptr(), payload.data_ptr(), pointer(active)
    shape = rows, m.shape[0] // rows, start, stop, block, norm
    _call("sign_compress_momentum", m.data_ptr(), address(runs), len(grads), beta, alpha, *pointers, *shape)


def _sign_reduce(
    payloads: Tensor, error: Tensor, new_error: Tensor, own: Tensor, block: int, norm: int, active: Tensor | None = None
) -> Served:
    if error.dtype != torch.float32:
        return NotImplemented
    pointers = payloads.data_ptr(), error.data_ptr(), new_error.data_ptr(), own.data_ptr(), pointer(active)
    _call("sign_reduce", *pointers, payloads.shape[0], error.shape[0], block, norm)


def _sign_decompress(payload: Tensor, out: Tensor, block: int, active: Tensor | None = None) -> Served:
    if out.dtype != torch.float32:
        return NotImplemented
    _call("sign_decompress", payload.data_ptr(), out.data_ptr(), pointer(active), *out.shape, block)


def _sign_decompress_adam_(
    payload: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    params: list[Tensor],
    offsets: list[int],
    step_sizes: list[float],
    sqrt_bias_corrections2: list[float],
    eps: float,
    decay: float,
    block: int,
    active: Tensor | None,
    start: int,
    stop: int,
) -> None:
    rows, runs = payload.shape[0], runs_of(params, offsets)
    if exp_avg.dtype != torch.float32 or runs is None:
        reference.sign_decompress_adam_(
            payload, exp_avg, exp_avg_sq, [], [], [], [], eps, decay, block, active, start, stop
        )
        return reference.adam_in_columns_(
            _frozen_adam_apply_, rows, exp_avg, exp_avg_sq, params, offsets, step_sizes, sqrt_bias_corrections2, eps,
            decay, start, stop,
        )  # fmt: skip
    factors = _factors(step_sizes, sqrt_bias_corrections2, eps)
    pointers = payload.data_ptr(), pointer(active), exp_avg.data_ptr(), exp_avg_sq.data_ptr(), address(runs)
    shape = rows, exp_avg.shape[0] // rows, start, stop, block
    _call("sign_decompress_adam", *pointers, len(params), address(factors), decay, *shape)
    torch.autograd.graph.increment_version(params)  # as in _frozen_adam_apply_


def _sign_decompress_mean(payload: Tensor, out: Tensor, block: int) -> Served:
    if out.dtype != torch.float32:
        return NotImplemented
    _call("sign_decompress_mean", payload.data_ptr(), out.data_ptr(), payload.shape[0], out.shape[0], block)


def _pack_nonzero(x: Tensor, bits: Tensor) -> Served:
    if x.dtype != torch.float32:
        return NotImplemented
    _call("pack_nonzero", x.data_ptr(), bits.data_ptr(), x.shape[0])


def _zero_inactive_(x: Tensor, bits: Tensor) -> Served:
    if x.dtype != torch.float32:
        return NotImplemented
    _call("zero_inactive", x.data_ptr(), bits.data_ptr(), x.shape[0])


_READABLE = (torch.float32, torch.bfloat16)
"""Dtypes that kernels for lists of tensors read."""


def _entries(xs: list[Tensor]) -> tuple[array[int], list[int]]:
    """``xs`` as struct Entry in lists.cpp has them, and the indices of those that kernels cannot read: empty there."""
    numbers: list[int] = []
    others = []
    for i, x in enumerate(xs):
        if x.dtype in _READABLE and x.is_contiguous():
            numbers += (x.numel(), x.dtype is torch.bfloat16, x.data_ptr())
        else:
            numbers += (0, 0, 0)
            others.append(i)
    return array("q", numbers), others


def _square_sum(xs: list[Tensor]) -> Tensor:
    # What the kernel cannot read is added after the rest: an order that depends on nothing but the list.
    entries, others = _entries(xs)
    total = torch.zeros((), dtype=torch.float64, device="cpu")
    _call("square_sum", address(entries), len(xs), total.data_ptr())
    if others:
        total += reference.square_sum([xs[i] for i in others])
    return total


def _square_sums(xs: list[Tensor]) -> Tensor:
    entries, others = _entries(xs)
    totals = torch.zeros(len(xs), dtype=torch.float64, device="cpu")
    _call("square_sums", address(entries), len(xs), totals.data_ptr())
    if others:
        totals[others] = reference.square_sums([xs[i] for i in others])
    return totals


def _momentum(m: Tensor, grads: list[Tensor], offsets: list[int], beta: float, alpha: float, out: Tensor) -> Served:
    gradients = gradient_runs(m, grads, offsets)
    if gradients is None:
        return NotImplemented
    runs, _ = gradients
    _call("momentum", m.data_ptr(), address(runs), len(grads), beta, alpha, out.data_ptr(), m.shape[0])


def _factors(step_sizes: Sequence[float], sqrt_bias_corrections2: Sequence[float], eps: float) -> array[float]:
    """Of each parameter, what m is multiplied by, and what is added to sqrt(v)."""
    return array("f", [x for s, c in zip(step_sizes, sqrt_bias_corrections2) for x in (s * c, eps * c)])


def _frozen_adam_apply_(
    params: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    step_sizes: list[float],
    sqrt_bias_corrections2: list[float],
    eps: float,
    decay: float,
) -> None:
    numbers: list[int] = []  # of each as struct Entry in lists.cpp has it
    mine, sizes, corrections = [], [], []
    for p, m, v, step_size, correction in zip(params, exp_avgs, exp_avg_sqs, step_sizes, sqrt_bias_corrections2):
        contiguous = p.is_contiguous() and m.is_contiguous() and v.is_contiguous()
        if contiguous and p.dtype in _READABLE and m.dtype is v.dtype is torch.float32:
            numbers += (p.numel(), p.dtype is torch.bfloat16, m.data_ptr(), v.data_ptr(), p.data_ptr())
            mine.append(p)
            sizes.append(step_size)
            corrections.append(correction)
        else:
            reference.frozen_adam_apply_([p], [m], [v], [step_size], [correction], eps, decay)
    if mine:
        entries, factors = array("q", numbers), _factors(sizes, corrections, eps)
        _call("frozen_adam", address(entries), len(mine), address(factors), decay)
        # Autograd keeps parameters for backward and finds out by this counter that one has changed since.
        torch.autograd.graph.increment_version(mine)


_KERNELS = catalogue.with_reference(
    {
        "sign_compress": _sign_compress,
        "sign_compress_with_feedback": _sign_compress_with_feedback,
        "sign_compress_momentum": _sign_compress_momentum,
        "sign_reduce": _sign_reduce,
        "sign_decompress": _sign_decompress,
        "sign_decompress_mean": _sign_decompress_mean,
        "sign_decompress_adam_": _sign_decompress_adam_,
        "pack_nonzero": _pack_nonzero,
        "zero_inactive_": _zero_inactive_,
        "square_sum": _square_sum,
        "square_sums": _square_sums,
        "momentum": _momentum,
        "frozen_adam_apply_": _frozen_adam_apply_,
        **native_bfloat16.kernels(_call),
        **native_integers.kernels(_call),
        **native_threshold.kernels(_call),
        **native_top_k.kernels(_call),
    }
)


def _announce(opened: ctypes.CDLL) -> None:
    for name in _KERNELS:
        catalogue.PROVIDERS[name]["cpu"] = f"native ({opened.commopt_isa().decode()})"


def _start() -> ctypes.CDLL | None:
    if os.environ.get("COMMOPT_NATIVE", "1") == "0":
        return None
    try:
        opened = load(LIBRARY)
    except OSError as problem:
        _logger.warning(
            "No native CPU kernels (%s): the PyTorch reference serves, many times slower. "
            "Reinstall commopt, from a wheel or with a C++ compiler (pip install --force-reinstall --no-deps; in a "
            "checkout, python setup.py build_ext --inplace). COMMOPT_NATIVE=0 silences this.",
            problem,
        )
        return None
    for name, function in _KERNELS.items():
        catalogue.register(name, "cpu", "native", function)
    _announce(opened)
    if not opened.commopt_threaded():
        _logger.warning("This torch has loaded no OpenMP library: the native CPU kernels run on one thread.")
    return opened


library = _start()
