"""Operators on tensors: each one a schema, a reference in PyTorch, and native providers where they are faster.

Each file states the payload rows of its operators: :mod:`commopt.ops.sign`, :mod:`commopt.ops.integers`,
:mod:`commopt.ops.bfloat16`, :mod:`commopt.ops.top_k` and :mod:`commopt.ops.threshold`; :mod:`commopt.ops.flat` has
those that send nothing.

Environment: ``COMMOPT_NATIVE=0`` keeps to the reference.
"""

from __future__ import annotations

from collections.abc import Sequence

from commopt.ops import catalogue
from commopt.ops import cuda as cuda  # for their registrations
from commopt.ops import native as native
from commopt.ops.bfloat16 import bf16_compress_momentum, bf16_decompress_to, bf16_nbytes, bf16_reduce
from commopt.ops.flat import (
    all_finite,
    frozen_adam_apply_,
    momentum,
    pack_nonzero,
    square_sum,
    square_sums,
    zero_inactive_,
)
from commopt.ops.integers import (
    int_compress,
    int_compress_momentum,
    int_compress_with_feedback,
    int_decompress,
    int_decompress_mean,
    int_decompress_to,
    int_nbytes,
    int_reduce,
)
from commopt.ops.sign import (
    sign_compress,
    sign_compress_momentum,
    sign_compress_with_feedback,
    sign_decompress,
    sign_decompress_adam_,
    sign_decompress_mean,
    sign_nbytes,
    sign_reduce,
)
from commopt.ops.threshold import (
    threshold_compress,
    threshold_compress_with_feedback,
    threshold_decompress,
    threshold_decompress_mean,
    threshold_nbytes,
)
from commopt.ops.top_k import (
    topk_compress,
    topk_compress_with_feedback,
    topk_decompress,
    topk_decompress_mean,
    topk_nbytes,
)

__all__ = [
    "all_finite",
    "bf16_compress_momentum",
    "bf16_decompress_to",
    "bf16_nbytes",
    "bf16_reduce",
    "frozen_adam_apply_",
    "int_compress",
    "int_compress_momentum",
    "int_compress_with_feedback",
    "int_decompress",
    "int_decompress_mean",
    "int_decompress_to",
    "int_nbytes",
    "int_reduce",
    "momentum",
    "pack_nonzero",
    "providers",
    "report",
    "sign_compress",
    "sign_compress_momentum",
    "sign_compress_with_feedback",
    "sign_decompress",
    "sign_decompress_adam_",
    "sign_decompress_mean",
    "sign_nbytes",
    "sign_reduce",
    "square_sum",
    "square_sums",
    "threshold_compress",
    "threshold_compress_with_feedback",
    "threshold_decompress",
    "threshold_decompress_mean",
    "threshold_nbytes",
    "topk_compress",
    "topk_compress_with_feedback",
    "topk_decompress",
    "topk_decompress_mean",
    "topk_nbytes",
    "zero_inactive_",
]


def report() -> dict[str, dict[str, str]]:
    """Providers of the operators: {operator: {device: provider}}, "default" being every other device.

    For instance ``{"sign_compress": {"default": "reference", "cpu": "native (avx512)"}, ...}``.
    """
    return {name: dict(by_device) for name, by_device in catalogue.PROVIDERS.items()}


def providers(devices: Sequence[str]) -> dict[str, list[str]]:
    """The provider of each operator on each of these types of devices, without its instruction set."""
    return {op: [by.get(d, by["default"]).split()[0] for d in devices] for op, by in report().items()}
