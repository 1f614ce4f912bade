"""Messages that :func:`commopt.compress_gradients` sends for a mean, in closed form, by the tensors of a model.

presence   all_gather: which parameters have a gradient, a byte for each, and whether all is well
rows       of a chunk: all_to_all, all_gather
low rank   of a bucket: all_reduce of one factor, and (PowerSGD) of the other
blocks     of a bucket: all_reduce of their importances, and of those chosen

Where machines are nodes, what is all-reduced goes inside each first, and then a part of it between them:

rows       ``ON_MACHINES``
low rank   of each factor: inside_all_to_all, between_all_reduce, inside_all_gather
blocks     of all of the bucket: inside_all_to_all; between_all_reduce of both; of all of it: inside_all_gather
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain

import torch

from commopt.bucket import ROW_MULTIPLE, Bucket, partition
from commopt.comm import all_reduce_bytes
from commopt.compress import ACP, Compressor, PowerSGD, TopBlocks
from commopt.compress.low_rank import LowRank
from commopt.gradients.method import OfGradients
from commopt.gradients.watching import ROW_BYTES

Shapes = tuple[tuple[int, ...], ...]
"""Of the tensors of a model, in its order: the gradient of the first comes last."""


FLAT = ("all_to_all", "all_gather")
"""Collectives of a compressor of rows: rows to those who take their means, and these to all."""
ON_MACHINES = ("inside_all_to_all", "between_all_to_all", "between_all_gather", "inside_all_gather")
"""The same with machines as nodes: inside a machine each rank takes the mean of its part; between them as above, of
that part; and what has come goes to all ranks of the machine."""


@dataclass(frozen=True)
class Exchange:
    """Collectives one after another.

    Attributes:
        params: how many parameters they are about.
        sent: of each, the verb, and the bytes that a rank sends; none if it goes with the message before.
    """

    params: int
    sent: tuple[tuple[str, int], ...]

    @cached_property
    def stages(self) -> list[str]:
        """Names of the collectives: their verbs, with a number from the second of a verb on."""
        verbs = [verb for verb, _ in self.sent]
        times = [verbs[: i + 1].count(verb) for i, verb in enumerate(verbs)]
        return [verb if n == 1 else f"{verb} {n}" for verb, n in zip(verbs, times)]


def usual_width(params: int) -> int:
    """Width of a transformer with ``params`` parameters in its layers, if it has a layer for each 64: so GPT-2 and
    BERT, about."""
    return max(64, round((params * 64 / 12) ** (1 / 3) / 64) * 64)


def layer_params(width: int) -> int:
    """Parameters of a layer of a transformer of that ``width``."""
    return 12 * width * width + 13 * width


def shapes_of(params: int, last_params: int, width: int, shard: int = 1) -> Shapes:
    """The tensors of a transformer of that ``width`` that has ``params`` parameters.

    Args:
        params: all of them.
        last_params: of them, those of the tensor that comes first: (rows, width), and a vector of what is left over.
        width: columns of most matrices; >= 1.
        shard: ranks that each tensor is cut over, along its rows: the pieces of the first of them.
    """
    layers, rest = divmod(params - last_params, layer_params(width))
    out = [*_matrix(last_params, width), *(layers * _layer(width)), *_matrix(rest, width)]
    return tuple((-(-n // shard), *columns) for n, *columns in out)


def modules_of(params: int, last_params: int, width: int) -> list[Shapes]:
    """The same tensors, of a layer together, and first those of none."""
    layers, rest = divmod(params - last_params, layer_params(width))
    return [(*_matrix(last_params, width), *_matrix(rest, width)), *(layers * [tuple(_layer(width))])]


def columns_of(shapes: Shapes, world_size: int) -> int:
    """Elements that a rank holds of tensors that FSDP2 cuts along their rows, padding included."""
    return sum(-(-n // world_size) * torch.Size(columns).numel() for n, *columns in shapes)


def _layer(w: int) -> list[tuple[int, ...]]:
    return [(w,), (w,), (w, 3 * w), (3 * w,), (w, w), (w,), (w,), (w,), (w, 4 * w), (4 * w,), (4 * w, w), (w,)]


def _matrix(elements: int, width: int) -> list[tuple[int, ...]]:
    rows, rest = divmod(elements, width)
    return ([(rows, width)] if rows else []) + ([(rest,)] if rest else [])


def sample_of(shapes: Shapes, count: int) -> Shapes:
    """The tensors whose gradients come first, ``count`` parameters or all; the last of them is cut along its rows, as
    near to that as whole rows are."""
    out: list[tuple[int, ...]] = []
    for n, *columns in reversed(shapes):
        rows = min(n, -(-count // torch.Size(columns).numel()))
        if rows > 0:
            out.append((rows, *columns))
            count -= torch.Size(out[-1]).numel()
    return tuple(reversed(out))


@lru_cache(maxsize=64)
def buckets_of(shapes: Shapes, world_size: int, capacity: int) -> Sequence[Bucket]:
    """The buckets of ``capacity`` bytes, in the order in which they are sent, with parameters that take no memory."""
    params = [torch.empty(shape, device="meta") for shape in shapes]
    return [Bucket(run, world_size) for run in partition(params, capacity)]


def turns(spec: OfGradients) -> int:
    """After how many means the same messages come again."""
    return 2 if isinstance(spec, ACP) else 1


@lru_cache(maxsize=256)
def exchanges(
    shapes: Shapes,
    spec: OfGradients,
    world_size: int,
    capacity: int,
    turn: int = 0,
    machine: int = 1,
    inside: Compressor | None = None,
) -> Sequence[Sequence[Exchange]]:
    """Exchanges of each bucket.

    Args:
        shapes: of what a rank holds.
        spec: the compressor.
        world_size: ranks that average.
        capacity: most bytes of a bucket.
        turn: which mean, of :func:`turns`.
        machine: ranks of a machine, where machines are nodes; 1: all ranks are alike.
        inside: of compressors of rows, the one of what goes out inside a machine; None: in float32.
    """
    buckets = buckets_of(shapes, world_size, capacity)
    if isinstance(spec, LowRank):
        return [_factors(bucket, spec, turn, machine) for bucket in buckets]
    if isinstance(spec, TopBlocks):
        return [_blocks(bucket, spec, machine) for bucket in buckets]
    return [_rows(bucket, spec, capacity, machine, inside) for bucket in buckets]


def _rows(bucket: Bucket, spec: Compressor, capacity: int, machine: int, inside: Compressor | None) -> list[Exchange]:
    shard, out = bucket.padded // bucket.world_size, []
    for start, stop in bucket.split(capacity, spec.chunk_multiple):
        params = bucket.numel * stop // shard - bucket.numel * start // shard
        # a bucket goes out inside a machine at once
        brought = part_bytes(bucket.padded // machine, machine, inside) if start == 0 else 0
        out.append(Exchange(params, rows_sent(spec, stop - start, bucket.world_size, machine, brought)))
    return out


def part_bytes(part: int, machine: int, inside: Compressor | None) -> int:
    """Bytes that a rank sends so that each of the ``machine`` ranks of a machine has the mean of its ``part`` elements;
    ``inside`` as for :func:`exchanges`."""
    return (machine - 1) * (4 * part if inside is None else inside.nbytes(part))


def rows_sent(
    spec: Compressor, n: int, world_size: int, machine: int = 1, brought: int = 0
) -> tuple[tuple[str, int], ...]:
    """The verbs, and the bytes that a rank sends, for the mean of ``n`` elements of the shard of each rank; ``machine``
    as for :func:`exchanges`, and ``brought``: the bytes that go out inside it."""
    nbytes, machines = spec.nbytes(n), world_size // machine
    if machine == 1:
        return tuple((verb, (world_size - 1) * nbytes) for verb in FLAT)
    return (
        (ON_MACHINES[0], brought),
        (ON_MACHINES[1], (machines - 1) * nbytes),
        (ON_MACHINES[2], (machines - 1) * nbytes),
        (ON_MACHINES[3], (machine - 1) * machines * nbytes),
    )


def mean_sent(n: int, world_size: int, machine: int) -> tuple[tuple[str, int], ...]:
    """The verbs, and the bytes that a rank sends, for the mean of ``n`` elements in full precision
    (:func:`commopt.comm.mean_over_all`)."""
    if machine == 1:
        return (("all_reduce", all_reduce_bytes(4 * n, world_size)),)
    part = n // machine
    return (
        ("inside_all_to_all", part_bytes(part, machine, None)),
        ("between_all_reduce", all_reduce_bytes(4 * part, world_size // machine)),
        ("inside_all_gather", part_bytes(part, machine, None)),
    )


def _factors(bucket: Bucket, spec: LowRank, turn: int, machine: int) -> list[Exchange]:
    p = q = whole = 0
    for shape in bucket.shapes:
        thin = spec.factors_of(shape)
        if thin is None:
            whole += shape.numel()
        else:
            n, m, r = thin
            p, q = p + n * r, q + m * r
    numbers = [p + whole, q] if isinstance(spec, PowerSGD) else [(p, q)[turn] + whole]
    multiple = bucket.world_size * ROW_MULTIPLE
    means = [mean_sent(-(-n // multiple) * multiple, bucket.world_size, machine) for n in numbers if n]
    return [Exchange(bucket.numel, tuple(chain.from_iterable(means)))]


def _blocks(bucket: Bucket, spec: TopBlocks, machine: int) -> list[Exchange]:
    n, block = bucket.padded // machine, spec.block
    numbers = [n // block, spec.kept(n) * block + n % block]
    verb, machines = "all_reduce" if machine == 1 else "between_all_reduce", bucket.world_size // machine
    agreed = tuple((verb, all_reduce_bytes(4 * m, machines)) for m in numbers if m)
    if machine == 1:
        return [Exchange(bucket.numel, agreed)]
    part = part_bytes(n, machine, None)
    return [Exchange(bucket.numel, (("inside_all_to_all", part), *agreed, ("inside_all_gather", part)))]


def presence_bytes(shapes: Shapes, ranks: int, whole: bool) -> int:
    """Bytes that a rank sends to say which parameters have a gradient, and, of a ``whole`` model, what is watched over
    besides; ``ranks``: all of them."""
    return (ranks - 1) * (len(shapes) + whole * ROW_BYTES)
