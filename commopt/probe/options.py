"""Options on the command line, and the mistakes in it."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch

from commopt.arguments import Parser
from commopt.compress import Sign
from commopt.probe.messages import layer_params

HOW_TO_START = (
    "start one process per device, at least 2: "
    "torchrun --nproc-per-node=2 -m commopt probe --params=340M --step-time=0.3 "
    "(on several machines with torchrun's --nnodes and --rdzv-endpoint)"
)

BACKENDS = {"cpu": ("gloo",), "cuda": ("nccl", "gloo")}
"""Backends by kind of device, the default first."""

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}


PATIENCE = timedelta(minutes=2)
"""Time that a rank waits for another before it gives up."""
MOST_MB = 1024
"""Of a message that is timed, in 2**20 bytes."""
STEP = (1e-6, 1e6)
"""Seconds of a step, least and most: beyond, figures overflow, or are as long as a page."""
WIDEST = 2**20
"""Columns of a matrix: of one a row is held in memory, several times."""
MOST_LAYERS = 10_000
"""Of a model: its tensors are counted one by one, for every method."""


class ProbeError(ValueError):
    """A mistake that the user can correct; one line."""


@dataclass(frozen=True)
class Options:
    """Options: what to predict, and what to measure.

    Attributes:
        params: trainable parameters of the model.
        shard: ranks over which FSDP2 cuts the model, those of a machine; 1 for a model that every rank holds whole.
        step_time: seconds of forward, backward and optimizer on one device, without communication.
        last_params: of ``params``, how many are in one tensor whose gradient is complete only when backward ends.
        width: of the model, a transformer; None for the usual one of its size.
        block: elements that share a scale, of :class:`commopt.compress.Sign`.
        max_mb: largest message, in MB (2**20 bytes).
        device: "cpu" or "cuda".
        backend: "gloo" or "nccl".
        json: file for all that was measured, or None.
        fsdp: whether to predict FSDP2 over all ranks too.
    """

    params: int
    shard: int
    step_time: float
    last_params: int
    width: int | None
    block: int
    max_mb: float
    device: str
    backend: str
    json: str | None
    fsdp: bool = False


def parse_count(text: str) -> int:
    """Number that "340M", "1.3B" or "25000" stands for: thousands, millions and billions (also G) of parameters.

    Raises:
        ArgumentTypeError: if it is no such number, or not at least 0.
    """
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*([kmgb]?)", text.strip().lower())
    value = float(match[1]) * UNITS[match[2]] if match else math.nan
    if not value <= 1e15 or value != round(value):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a count; expected a whole number such as 25000, 340M or 1.3B"
        )
    return round(value)


def parse_seconds(text: str) -> float:
    """Seconds of a step, within :data:`STEP`.

    Raises:
        ArgumentTypeError: if it is no such number.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    least, most = STEP
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not allowed: seconds must be a number > 0, such as 0.3, and from {least:.6f} to {most:.0f}"
        )
    return value


def make_parser() -> Parser:
    """The options, with their help."""
    parser = Parser(
        ProbeError,
        prog="commopt probe",
        description="Measures the network and the device, and predicts what a step of your model costs with each "
        "method, the break-even bandwidth, and whether to compress. " + HOW_TO_START[0].upper() + HOW_TO_START[1:],
    )
    add = parser.add_argument
    add("--params", type=parse_count, required=True, help="trainable parameters of the model: 340M, 1.3B, 25000")
    add("--step-time", type=parse_seconds, required=True, metavar="SECONDS",
        help="forward, backward and AdamW on one device, without communication; with --shard, on one "
        "machine")  # fmt: skip
    add("--shard", type=int, default=1, metavar="RANKS",
        help="ranks of a machine over which FSDP2 cuts the model; what is predicted goes between the machines, and "
        "--step-time is then that of one machine (default: 1)")  # fmt: skip
    add("--last-params", type=parse_count, default=0, metavar="PARAMS",
        help="size of the largest tensor whose gradient comes last in backward, such as a tied embedding; nothing "
        "hides its communication (default: 0)")  # fmt: skip
    add("--width", type=parse_count,
        help="columns of most matrices of the model, which is taken for a transformer: on the shapes depends what low "
        "rank sends (default: one layer for each 64)")  # fmt: skip
    add("--block", type=int, default=2048, help="elements that share a scale (default: 2048)")
    add("--max-mb", type=float, default=64.0, metavar="MB",
        help="largest message; slow networks stop earlier (default: 64)")  # fmt: skip
    add("--device", choices=list(BACKENDS), help="default: cuda where there is a GPU, else cpu")
    add("--backend", help="gloo or nccl (default: nccl on cuda, gloo on cpu)")
    add("--fsdp", action="store_true", help="also predict a model that FSDP2 cuts over all ranks, compressed or not")
    add("--json", metavar="FILE", help="also write everything that was measured, on rank 0")
    return parser


def parse(argv: Sequence[str]) -> Options:
    """The options in ``argv``.

    Raises:
        ProbeError: names the option, the value and what is allowed.
    """
    given = make_parser().parse(argv)
    device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options = Options(**{**vars(given), "device": device, "backend": given.backend or BACKENDS[device][0]})
    check(options)
    return options


def check(options: Options) -> None:
    """Raises ProbeError for a value out of range."""
    if options.params < 1:
        raise ProbeError(f"--params: {options.params} is not allowed, it must be at least 1")
    if options.shard < 1:
        raise ProbeError(f"--shard: {options.shard} is not allowed, it must be at least 1")
    if options.fsdp and options.shard > 1:
        raise ProbeError(f"--fsdp: is not allowed with --shard={options.shard}: it is of models cut over all ranks")
    if options.last_params > options.params:
        raise ProbeError(f"--last-params: {options.last_params} is more than --params, {options.params}")
    if options.width is not None:
        check_width(options.params - options.last_params, options.width)
    if not 0.0625 <= options.max_mb <= MOST_MB:
        raise ProbeError(f"--max-mb: {options.max_mb:g} is not allowed, it must be from 0.0625 to {MOST_MB}")
    if options.backend not in BACKENDS[options.device]:
        allowed = " or ".join(BACKENDS[options.device])
        raise ProbeError(
            f"--backend: {options.backend!r} is not allowed with --device={options.device}, only {allowed}"
        )
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ProbeError("--device: 'cuda' is not available here, only cpu")
    try:
        Sign(block=options.block)
    except ValueError as error:
        raise ProbeError(f"--block: {error}") from None


def check_width(params: int, width: int) -> None:
    """Raises ProbeError for a width with which the layers of ``params`` parameters cannot be counted, or held."""
    if width < 1:
        raise ProbeError(f"--width: {width} is not allowed, it must be at least 1")
    if width > WIDEST:
        raise ProbeError(f"--width: {width} is not allowed, it must be at most {WIDEST}")
    if (layers := params // layer_params(width)) > MOST_LAYERS:
        raise ProbeError(f"--width: {width} is not allowed, that is {layers} layers; at most {MOST_LAYERS}")
