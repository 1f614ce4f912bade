"""Native CPU providers: a C library through ctypes.

The library is built from ``kernels/cpu`` when the package is installed. Where it is missing, or was built for another
version of this file, one warning says so and the reference serves instead. ``COMMOPT_NATIVE=0`` in the environment
keeps the reference on purpose, without a warning.

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

from commopt.ops import catalogue, reference

ABI_VERSION = 1
"""Changes with every signature in ``kernels/cpu/api.cpp``, which states the same number."""

LIBRARY = Path(__file__).with_name("libcommopt_cpu.so")

_P, _I64, _I32, _F32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
_SIGNATURES: dict[str, list[Any]] = {
    "sign_compress": [_P, _P, _P, _P, _I64, _I64, _I64, _I32, _I32],
    "sign_decompress": [_P, _P, _I64, _I64, _I64, _I32],
    "sign_decompress_mean": [_P, _P, _I64, _I64, _I64, _I32],
    "pack_nonzero": [_P, _P, _I64, _I32],
    "zero_dead": [_P, _P, _I64, _I32],
    "square_sum": [_I64, _P, _P, _P, _P, _I32],
    "momentum": [_I64, _P, _P, _P, _P, _F32, _F32, _I32],
    "frozen_adam": [_I64, _P, _P, _P, _P, _P, _P, _P, _F32, _F32, _I32],
}
_KIND = {torch.float32: 0, torch.bfloat16: 1}
_logger = logging.getLogger("commopt")
_calls: dict[str, Callable[..., int]] = {}


def load(path: Path) -> ctypes.CDLL:
    """Opens the library and checks that it was built for this file.

    Raises:
        OSError: it cannot be opened, or its ABI version is not :data:`ABI_VERSION`.
    """
    library = ctypes.CDLL(str(path))
    version = getattr(library, "commopt_abi_version", lambda: None)()
    if version != ABI_VERSION:
        raise OSError(f"{path} has ABI version {version}, needed is {ABI_VERSION}")
    library.commopt_isa.restype = ctypes.c_char_p
    library.commopt_use_isa.argtypes = [ctypes.c_char_p]
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, f"commopt_{name}")
        function.argtypes = arguments
        function.restype = ctypes.c_int
        _calls[name] = function
    return library


def use_isa(name: str) -> bool:
    """Makes the kernels use instruction set ``name`` ("avx512", "avx2", "plain", or "" for the best there is).

    For tests. Returns False, and changes nothing, where this machine or build does not have it.
    """
    if library is None or not library.commopt_use_isa(name.encode()):
        return False
    _announce(library)
    return True


def _call(name: str, *arguments: Any) -> None:
    if _calls[name](*arguments, torch.get_num_threads()):
        raise MemoryError(f"no memory for the work space of {name}")


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _sign_compress(x: Tensor, wire: Tensor, block: int, norm: int, live: Tensor | None = None) -> None:
    if x.dtype != torch.float32:
        return reference.sign_compress(x, wire, block, norm, live)
    _call("sign_compress", x.data_ptr(), None, wire.data_ptr(), _pointer(live), *x.shape, block, norm)


def _sign_compress_with_feedback(
    x: Tensor, error: Tensor, wire: Tensor, block: int, norm: int, live: Tensor | None = None
) -> None:
    if x.dtype != torch.float32:
        return reference.sign_compress_with_feedback(x, error, wire, block, norm, live)
    _call("sign_compress", x.data_ptr(), error.data_ptr(), wire.data_ptr(), _pointer(live), *x.shape, block, norm)


def _sign_decompress(wire: Tensor, out: Tensor, block: int) -> None:
    if out.dtype != torch.float32:
        return reference.sign_decompress(wire, out, block)
    _call("sign_decompress", wire.data_ptr(), out.data_ptr(), *out.shape, block)


def _sign_decompress_mean(wire: Tensor, out: Tensor, block: int) -> None:
    if out.dtype != torch.float32:
        return reference.sign_decompress_mean(wire, out, block)
    _call("sign_decompress_mean", wire.data_ptr(), out.data_ptr(), wire.shape[0], out.shape[0], block)


def _pack_nonzero(x: Tensor, bits: Tensor) -> None:
    if x.dtype != torch.float32:
        return reference.pack_nonzero(x, bits)
    _call("pack_nonzero", x.data_ptr(), bits.data_ptr(), x.shape[0])


def _zero_dead_(x: Tensor, bits: Tensor) -> None:
    if x.dtype != torch.float32:
        return reference.zero_dead_(x, bits)
    _call("zero_dead", x.data_ptr(), bits.data_ptr(), x.shape[0])


def _pointers(tensors: Sequence[Tensor]) -> array[int]:
    return array("Q", [t.data_ptr() for t in tensors])


def _sizes_and_kinds(tensors: Sequence[Tensor]) -> tuple[array[int], array[int]]:
    return array("q", [t.numel() for t in tensors]), array("B", [_KIND[t.dtype] for t in tensors])


def _address(values: array[Any]) -> int:
    return values.buffer_info()[0]


def _square_sum(xs: list[Tensor]) -> Tensor:
    # Tensors that the kernel cannot read are added after the others: an order that depends on nothing but the list.
    mine = [x for x in xs if x.dtype in _KIND and x.is_contiguous()]
    total = array("d", [0.0])
    if mine:
        arrays = (_pointers(mine), *_sizes_and_kinds(mine), total)
        _call("square_sum", len(mine), *map(_address, arrays))
    result = torch.tensor(total[0], dtype=torch.float64)
    if len(mine) == len(xs):
        return result
    return result + reference.square_sum([x for x in xs if not (x.dtype in _KIND and x.is_contiguous())])


def _momentum_(ms: list[Tensor], gs: list[Tensor], beta: float, alpha: float) -> None:
    mine = []
    for m, g in zip(ms, gs):
        if m.dtype == torch.float32 and g.dtype in _KIND and m.is_contiguous() and g.is_contiguous():
            mine.append((m, g))
        else:
            reference.momentum_([m], [g], beta, alpha)
    if mine:
        m_list, g_list = zip(*mine)
        arrays = (_pointers(m_list), _pointers(g_list), *_sizes_and_kinds(g_list))
        _call("momentum", len(mine), *map(_address, arrays), beta, alpha)


def _frozen_adam_apply_(
    params: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    step_sizes: list[float],
    sqrt_bias_corrections2: list[float],
    eps: float,
    decay: float,
) -> None:
    mine = []
    for row in zip(params, exp_avgs, exp_avg_sqs, step_sizes, sqrt_bias_corrections2):
        p, m, v = row[:3]
        dense = p.is_contiguous() and m.is_contiguous() and v.is_contiguous()
        if dense and p.dtype in _KIND and m.dtype == v.dtype == torch.float32:
            mine.append(row)
        else:
            reference.frozen_adam_apply_(*([value] for value in row), eps, decay)  # type: ignore[call-arg, arg-type]
    if not mine:
        return
    p_list, m_list, v_list, steps, corrections = zip(*mine)
    arrays = (*map(_pointers, (p_list, m_list, v_list)), *_sizes_and_kinds(p_list), array("f", steps))
    corrections_ = array("f", corrections)
    _call("frozen_adam", len(mine), *map(_address, arrays), _address(corrections_), eps, decay)
    # Autograd keeps parameters for backward and finds out by this counter that one has changed since.
    torch.autograd.graph.increment_version(p_list)


_KERNELS = {
    "sign_compress": _sign_compress,
    "sign_compress_with_feedback": _sign_compress_with_feedback,
    "sign_decompress": _sign_decompress,
    "sign_decompress_mean": _sign_decompress_mean,
    "pack_nonzero": _pack_nonzero,
    "zero_dead_": _zero_dead_,
    "square_sum": _square_sum,
    "momentum_": _momentum_,
    "frozen_adam_apply_": _frozen_adam_apply_,
}


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
            "Install a C++ compiler and reinstall commopt; COMMOPT_NATIVE=0 silences this.",
            problem,
        )
        return None
    for name, function in _KERNELS.items():
        catalogue.register(name, "cpu", "native", function)
    _announce(opened)
    return opened


library = _start()
