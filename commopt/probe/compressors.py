"""The compressors of gradients that the probe compares: another one is one line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

import torch

from commopt.compress import (
    ACP,
    BFloat16,
    Compressor,
    Float8,
    Int2,
    Int4,
    Int8,
    PowerSGD,
    Sign,
    ThresholdTopK,
    TopBlocks,
    TopK,
)  # fmt: skip
from commopt.gradients.method import OfGradients

COMPRESSORS: dict[str, tuple[str, OfGradients]] = {
    "gradients_bfloat16": ("BFloat16()", BFloat16()),
    "gradients_float8": ("Float8()", Float8()),
    "gradients_int8": ("Int8()", Int8()),
    "gradients_int4": ("Int4()", Int4()),
    "gradients_int2": ("Int2()", Int2()),
    "gradients_sign": ("Sign()", Sign()),
    "gradients_topk": ("TopK()", TopK()),
    "gradients_threshold": ("ThresholdTopK()", ThresholdTopK()),
    "gradients_blocks": ("TopBlocks()", TopBlocks()),
    "gradients_powersgd4": ("PowerSGD(4)", PowerSGD(4)),
    "gradients_acp4": ("ACP(4)", ACP(4)),
}
"""By name: how one writes it, and what it is."""
TWICE: dict[str, tuple[str, Compressor, Compressor]] = {
    "gradients_int4_int8": ("Int4(), inside=Int8()", Int4(), Int8()),
}
"""With machines as nodes, gradients that are compressed inside them, too: how one writes it, the compressor between
machines, and that inside."""

FINE = 0.05
"""Error of a compressor from which on it is a coarse one: 8 bits have less, 4 have more."""


def compressors(block: int) -> dict[str, OfGradients]:
    """All of them by name; ``block`` is that of :class:`commopt.compress.Sign`."""
    specs = {name: spec for name, (_, spec) in COMPRESSORS.items()}
    return {name: replace(spec, block=block) if isinstance(spec, Sign) else spec for name, spec in specs.items()}


def label(name: str, specs: Mapping[str, OfGradients]) -> str:
    """Spelling of the compressor ``name`` of ``specs``."""
    if name in TWICE:
        return TWICE[name][0]
    words, usual = COMPRESSORS[name]
    spec = specs[name]
    return f"Sign({spec.block})" if isinstance(spec, Sign) and spec != usual else words


@lru_cache(maxsize=64)
def error(spec: OfGradients) -> float:
    """Loss of one message of Gaussian numbers: root mean square over that of the numbers. 1 for factors of low rank,
    which noise has none of, and for blocks, of which none of noise is above the others."""
    if not isinstance(spec, Compressor):
        return 1.0
    x = torch.randn(1, 2**14, generator=torch.Generator().manual_seed(0), device="cpu")
    payload, out = torch.zeros(1, spec.nbytes(x.shape[1]), dtype=torch.uint8), torch.empty_like(x)
    spec.compress(x, payload)
    spec.decompress(payload, out)
    return float((out - x).norm() / x.norm())
