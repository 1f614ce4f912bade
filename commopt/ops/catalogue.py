"""The operator catalogue: the name, the schema and the fake of every operator of the ``commopt`` namespace.

A provider is a function with the signature of the schema, registered for a device. The reference serves every device
that has no provider of its own, and arguments for which a provider returns ``NotImplemented``, having done nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from commopt.ops import reference, reference_bfloat16, reference_integers, reference_threshold, reference_top_k

SCHEMAS = {
    "sign_compress": "(Tensor x, Tensor(a!) payload, int block, int norm, Tensor? active=None) -> ()",
    "sign_compress_with_feedback": (
        "(Tensor x, Tensor error, Tensor(a!) new_error, Tensor(b!) payload, int block, int norm, Tensor? active=None) "
        "-> ()"
    ),
    "sign_compress_momentum": (
        "(Tensor m, Tensor[] grads, int[] offsets, float beta, float alpha, Tensor error, Tensor(a!) new_error, "
        "Tensor(b!) payload, int block, int norm, Tensor? active, int start, int stop) -> ()"
    ),
    "sign_reduce": (
        "(Tensor payloads, Tensor error, Tensor(a!) new_error, Tensor(b!) own, int block, int norm, "
        "Tensor? active=None) -> ()"
    ),
    "sign_decompress": "(Tensor payload, Tensor(a!) out, int block, Tensor? active=None) -> ()",
    "sign_decompress_mean": "(Tensor payload, Tensor(a!) out, int block) -> ()",
    "sign_decompress_adam_": (
        "(Tensor payload, Tensor(a!) exp_avg, Tensor exp_avg_sq, Tensor(b!)[] params, int[] offsets, "
        "float[] step_sizes, float[] sqrt_bias_corrections2, float eps, float decay, int block, Tensor? active, "
        "int start, int stop) -> ()"
    ),
    "pack_nonzero": "(Tensor x, Tensor(a!) bits) -> ()",
    "zero_inactive_": "(Tensor(a!) x, Tensor bits) -> ()",
    "square_sum": "(Tensor[] xs) -> Tensor",
    "square_sums": "(Tensor[] xs) -> Tensor",
    "momentum": "(Tensor m, Tensor[] grads, int[] offsets, float beta, float alpha, Tensor(a!) out) -> ()",
    "frozen_adam_apply_": (
        "(Tensor(a!)[] params, Tensor[] exp_avgs, Tensor[] exp_avg_sqs, float[] step_sizes, "
        "float[] sqrt_bias_corrections2, float eps, float decay) -> ()"
    ),
    "int_compress": (
        "(Tensor x, Tensor(a!) payload, int bits, int block, bool stochastic, bool rotated, int seed, "
        "Tensor? active=None) -> ()"
    ),
    "int_compress_with_feedback": (
        "(Tensor x, Tensor error, Tensor(a!) new_error, Tensor(b!) payload, int bits, int block, bool stochastic, "
        "bool rotated, int seed, Tensor? active=None) -> ()"
    ),
    "int_compress_momentum": (
        "(Tensor m, Tensor[] grads, int[] offsets, float beta, float alpha, Tensor error, Tensor(a!) new_error, "
        "Tensor(b!) payload, int bits, int block, bool stochastic, bool rotated, int seed, Tensor? active, int start, "
        "int stop) -> ()"
    ),
    "int_reduce": (
        "(Tensor payloads, Tensor error, Tensor(a!) new_error, Tensor(b!) own, int bits, int block, bool stochastic, "
        "bool rotated, int seed, Tensor? active=None) -> ()"
    ),
    "int_decompress": "(Tensor payload, Tensor(a!) out, int bits, int block, bool rotated, Tensor? active=None) -> ()",
    "int_decompress_to": (
        "(Tensor payload, Tensor(a!)[] outs, int[] offsets, int numel, int bits, int block, bool rotated, "
        "Tensor? active, int start, int stop) -> ()"
    ),
    "int_decompress_mean": "(Tensor payload, Tensor(a!) out, int bits, int block, bool rotated) -> ()",
    "bf16_compress_momentum": (
        "(Tensor m, Tensor[] grads, int[] offsets, float beta, float alpha, Tensor error, Tensor(a!) new_error, "
        "Tensor(b!) payload, Tensor? active, int start, int stop) -> ()"
    ),
    "bf16_reduce": ("(Tensor payloads, Tensor error, Tensor(a!) new_error, Tensor(b!) own, Tensor? active=None) -> ()"),
    "bf16_decompress_to": (
        "(Tensor payload, Tensor(a!)[] outs, int[] offsets, int numel, Tensor? active, int start, int stop) -> ()"
    ),
    "topk_compress": "(Tensor x, Tensor(a!) payload, int k, int chunk, int bits, Tensor? active=None) -> ()",
    "topk_compress_with_feedback": (
        "(Tensor x, Tensor error, Tensor(a!) new_error, Tensor(b!) payload, int k, int chunk, int bits, "
        "Tensor? active=None) -> ()"
    ),
    "topk_decompress": "(Tensor payload, Tensor(a!) out, int k, int chunk, int bits, Tensor? active=None) -> ()",
    "topk_decompress_mean": "(Tensor payload, Tensor(a!) out, int k, int chunk, int bits) -> ()",
    "topk_find_unsound": (
        "(Tensor payload, Tensor(a!) sound, int n, int k, int chunk, int bits, ScalarType dtype) -> ()"
    ),
    "threshold_compress": "(Tensor x, Tensor(a!) payload, int k, int rounds, Tensor? active=None) -> ()",
    "threshold_compress_with_feedback": (
        "(Tensor x, Tensor error, Tensor(a!) new_error, Tensor(b!) payload, int k, int rounds, Tensor? active=None) "
        "-> ()"
    ),
    "threshold_decompress": "(Tensor payload, Tensor(a!) out, int k, Tensor? active=None) -> ()",
    "threshold_decompress_mean": "(Tensor payload, Tensor(a!) out, int k) -> ()",
}

_BEGINNINGS = {
    "bf16": reference_bfloat16,
    "int": reference_integers,
    "topk": reference_top_k,
    "threshold": reference_threshold,
}

REFERENCES: dict[str, Callable[..., Any]] = {
    name: getattr(_BEGINNINGS.get(name.partition("_")[0], reference), name) for name in SCHEMAS
}
"""The reference of each operator."""

PROVIDERS: dict[str, dict[str, str]] = {name: {} for name in SCHEMAS}
"""Providers of each operator on each device: {operator: {device: provider}}."""


def with_reference(functions: dict[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Providers by operator, each with the reference for what it leaves to that."""
    return {name: _with_reference(function, REFERENCES[name]) for name, function in functions.items()}


def _with_reference(function: Callable[..., Any], reference: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def serve(*arguments: Any) -> Any:
        out = function(*arguments)
        return reference(*arguments) if out is NotImplemented else out

    return serve


def register(name: str, device: str, provider: str, function: Callable[..., Any]) -> None:
    """Makes ``function`` the kernel of operator ``name`` on ``device``; "default" is every device without its own."""
    # Not register_kernel: what it adds, for torch.compile to leave the function alone, is 1.4 us of each call's 6.
    torch.library.impl(f"commopt::{name}", device, function)
    PROVIDERS[name][device] = provider


def _fake_in_place(*_: Any) -> None:
    """Operators that only write into their arguments have no output to describe."""


_FAKES: dict[str, Callable[..., Any]] = {
    "square_sum": lambda xs: xs[0].new_empty((), dtype=torch.float64),
    "square_sums": lambda xs: xs[0].new_empty(len(xs), dtype=torch.float64),
}


for _name, _schema in SCHEMAS.items():
    torch.library.define(f"commopt::{_name}", _schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.register_fake(f"commopt::{_name}", _FAKES.get(_name, _fake_in_place))
    register(_name, "default", "reference", REFERENCES[_name])
