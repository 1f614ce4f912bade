"""Collectives by message size, and what computing loses while one is under way.

Every number is the median over repetitions, on the slowest rank. How many repetitions there are, and at which size to
stop, follows from times that all ranks have agreed on, so that all of them do the same.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from commopt.comm import (
    CHANNELS,
    Backend,
    ExchangingBackend,
    TorchBackend,
    Work,
    all_reduce_bytes,
    compressed_all_reduce,
    open_channels,
    run,
    wait,
)
from commopt.compress import Compressor, Feedback
from commopt.outer.gossip import ring
from commopt.probe.fit import Line, fit_line, line_through

SMALLEST, FACTOR = 4096, 4
"""Bytes of the smallest message, and how much larger the next one is."""
FAST = 16
"""Messages of a compressed step are that much smaller than those of an all-reduce, and are measured at such sizes."""
ENOUGH = 0.5
"""Seconds after which one size has been measured long enough."""
LONGEST = (1.0, 4.0)
"""Seconds of one message that is too long to wait for, beyond those of the smallest; and over a long way."""
LONG_WAY = 32
"""Over a long way it may take so many times the seconds of the smallest: TCP begins each message slowly, and doubles
its pace once a round trip."""
REPEATS = (3, 20)
"""At least and at most so many repetitions."""
UNDER_WAY = 8
"""Messages that are started together, as those of buckets are."""
SLOW = 0.1
"""Seconds of a message that is too slow to measure what computing loses to it."""


@dataclass(frozen=True)
class Sample:
    """One message size.

    Attributes:
        size: bytes of the tensor given to the collective.
        nbytes: bytes that a rank sends for it.
        seconds: until it is done.
    """

    size: int
    nbytes: int
    seconds: float


def columns(samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
    """Bytes that a rank sends, and seconds."""
    return [s.nbytes for s in samples], [s.seconds for s in samples]


def links(samples: Mapping[str, Sequence[Sample]]) -> dict[str, Line]:
    """By verb, the line nearest to its samples."""
    return {verb: fit_line(*columns(some)) for verb, some in samples.items()}


def losses_by(lost: Mapping[str, Sequence[Sample]]) -> dict[str, Line]:
    """By verb, the line through the two samples of :func:`losses`."""
    return {verb: line_through(*((s.nbytes, s.seconds) for s in two)) for verb, two in lost.items()}


def gap(alone: Line, together: Line, count: int = UNDER_WAY) -> Line:
    """Seconds for which a message keeps the next one waiting: of ``count`` that are started at once, the last leaves
    so much later.

    Args:
        alone: seconds of one message.
        together: a share of the seconds of ``count`` of them.
        count: how many, >= 2.
    """

    def of(one: float, share: float) -> float:
        return min(one, max(0.0, count * share - one) / (count - 1))

    return Line(of(alone.latency, together.latency), of(alone.per_byte, together.per_byte))


class Stand:
    """Test stand: the ranks, and their device.

    Args:
        backend: what is measured; with channels of its own, if it has any, for what OneBitAdam sends over such.
        control: carries what the ranks tell each other about the measurement, over CPU tensors.
        device: of the tensors sent.
    """

    def __init__(self, backend: Backend, control: TorchBackend, device: torch.device) -> None:
        self.backend, self.control, self.device = backend, control, device
        self.world_size = backend.world_size
        self._lines = open_channels(backend, 2 * CHANNELS)

    def channels(self, place: int) -> tuple[Backend, Backend]:
        """The lines of the bucket at ``place``: out, and back."""
        if not self._lines:
            return self.backend, self.backend
        return self._lines[place % CHANNELS], self._lines[CHANNELS + place % CHANNELS]

    @property
    def has_channels(self) -> bool:
        """True if there are such channels: without, nothing starts in backward that others have to answer."""
        return bool(self._lines)

    def largest(self, values: Sequence[float]) -> list[float]:
        """The largest of each value over the ranks; the ranks are at the same place then."""
        message = torch.tensor(values, dtype=torch.float64)
        wait(dist.all_reduce(message, dist.ReduceOp.MAX, self.control.group, async_op=True), "control message")
        return message.tolist()

    def meet(self) -> None:
        """Returns when all ranks are here."""
        self.largest([0.0])

    @cached_property
    def meeting(self) -> float:
        """Seconds of :meth:`meet`; all ranks ask for it at the same place."""
        return self.largest([min(self.seconds(self.meet) for _ in range(3))])[0]

    def synchronize(self) -> None:
        """Waits for what this process has asked of the device, but not for collectives in flight."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def seconds(self, do: Callable[[], object]) -> float:
        """Seconds of one ``do()``, the device included."""
        self.synchronize()
        start = time.perf_counter()
        do()
        self.synchronize()
        return time.perf_counter() - start

    def time(self, do: Callable[[], object]) -> float:
        """Seconds of ``do()``: median of repetitions that all ranks begin together, on the slowest rank; of what takes
        long, of one."""
        do()
        (once,) = self.largest([self.seconds(do)])
        if once > LONGEST[0]:
            return once
        times = []
        for _ in range(max(REPEATS[0], min(REPEATS[1], int(ENOUGH / (once + self.meeting))))):
            self.meet()
            times.append(self.seconds(do))
        return self.largest([statistics.median(times)])[0]

    def sweep(self, sizes: Sequence[int], prepare: Callable[[int], tuple[int, Callable[[], object]]]) -> list[Sample]:
        """``prepare(size)`` gives the bytes that a rank sends, and what to time. Ends early on a slow network, but not
        before two sizes."""
        out: list[Sample] = []
        for size in sizes:
            nbytes, do = prepare(size)
            out.append(Sample(size, nbytes, self.time(do)))
            if len(out) > 1 and too_long_next([s.seconds for s in out]):
                break
        return out


def too_long_next(seconds: Sequence[float]) -> bool:
    """Whether a message that is :data:`FACTOR` times as large as the last would be too long to wait for, by what two or
    more took."""
    first, last = seconds[0], seconds[-1]
    following = last + FACTOR * (last - seconds[-2])
    return following - first > min(max(LONGEST[0], LONG_WAY * first), LONGEST[1])


def sizes_up_to(max_mb: float, smallest: int = SMALLEST) -> list[int]:
    """Bytes of the messages."""
    out = [smallest]
    while out[-1] * FACTOR <= max_mb * 2**20:
        out.append(out[-1] * FACTOR)
    return out


def every_second(sizes: list[int]) -> list[int]:
    """Every second of them; all where that were fewer than two, through which no line goes."""
    return sizes[1::2] if len(sizes) > 3 else sizes


def small_sizes(max_mb: float) -> list[int]:
    """Bytes of the messages of a compressed step."""
    return sizes_up_to(max_mb / FAST, SMALLEST // FACTOR)


def all_reduces(stand: Stand, sizes: Sequence[int], dtype: torch.dtype = torch.float32) -> list[Sample]:
    """All-reduces as DistributedDataParallel does them."""

    def prepare(size: int) -> tuple[int, Callable[[], object]]:
        x = torch.zeros(size // dtype.itemsize, dtype=dtype, device=stand.device)
        return all_reduce_bytes(x.nbytes, stand.world_size), lambda: finish([start_all_reduce(stand, x)])

    return stand.sweep(sizes, prepare)


def start_all_reduce(stand: Stand, x: Tensor) -> Work:
    """The sum of x, in place: the collective without its division, which DDP has done before."""
    assert isinstance(stand.backend, TorchBackend)
    return dist.all_reduce(x, group=stand.backend.group, async_op=True)


def exchanges(stand: Stand, verb: str, sizes: Sequence[int], together: int = 1) -> list[Sample]:
    """The collectives of a compressed step, ``together`` messages started at once; the seconds are those until all are
    there, shared out."""

    def prepare(size: int) -> tuple[int, Callable[[], object]]:
        start, nbytes = exchange(stand, verb, size, together)
        return nbytes, lambda: finish([start(i) for i in range(together)])

    return [Sample(s.size, s.nbytes, s.seconds / together) for s in stand.sweep(sizes, prepare)]


def exchange(stand: Stand, verb: str, size: int, places: int) -> tuple[Callable[[int], Work], int]:
    """Callable that starts "all_reduce" (not DDP's, but over a channel), "all_to_all", "all_gather" or "exchange" of
    ``size`` bytes at one of ``places``, and the bytes that a rank sends. What is exchanged goes to the next rank."""
    world = stand.world_size
    if verb == "all_reduce":
        xs = torch.zeros(places, size // 4, device=stand.device)
        return lambda i: stand.channels(i)[0].all_reduce(xs[i]), all_reduce_bytes(xs[0].nbytes, world)
    if verb == "exchange":
        got, given = (torch.zeros(places, size // 4, device=stand.device) for _ in range(2))
        (dst, src), *_ = ring(stand.backend)
        lines = [cast(ExchangingBackend, stand.channels(i)[0]) for i in range(places)]
        return lambda i: lines[i].exchange(got[i], given[i], dst, src), given[0].nbytes
    row = max(16, size // world // 16 * 16)
    out, inp = (torch.zeros(places, world, row, dtype=torch.uint8, device=stand.device) for _ in range(2))
    starts: dict[str, Callable[[int], Work]] = {
        "all_to_all": lambda i: stand.channels(i)[0].all_to_all(out[i], inp[i]),
        "all_gather": lambda i: stand.channels(i)[1].all_gather(out[i], inp[i, 0]),
    }
    return starts[verb], (world - 1) * row


def finish(works: Sequence[Work]) -> None:
    """Waits for all."""
    for work in works:
        wait(work, "a collective that the probe timed")


def compressed(stand: Stand, sizes: Sequence[int], compressor: Compressor) -> list[Sample]:
    """Compressed all-reduces of float32, compressing and decompressing included; ``size`` is that of the floats."""
    world = stand.world_size

    def prepare(size: int) -> tuple[int, Callable[[], object]]:
        numel = -(-size // 4 // (8 * world)) * 8 * world
        x = torch.randn(numel, device=stand.device)
        feedback = Feedback.zeros(numel, world, x.dtype, x.device)
        nbytes = 2 * (world - 1) * compressor.nbytes(numel // world)
        return nbytes, lambda: run([compressed_all_reduce(x, feedback, compressor, stand.channels(0)[0])])

    return stand.sweep(sizes, prepare)


def losses(stand: Stand, verb: str, samples: Sequence[Sample]) -> list[Sample]:
    """Seconds of computing (matrix products) that a message costs while it is under way: the smallest of ``samples``,
    and the largest that is not slow."""
    side = 256 if stand.device.type == "cpu" else 2048
    a, b, out = (torch.randn(side, side, device=stand.device) for _ in range(3))

    def product() -> None:
        torch.mm(a, b, out=out)
        stand.synchronize()

    def compute_beside(works: Sequence[Any], alone: float) -> float:
        """Seconds that were not spent on matrix products, until ``works`` are done."""
        products, start = 0, time.perf_counter()
        while not all(work.is_completed() for work in works):
            product()
            products += 1
        return time.perf_counter() - start - products * alone

    def one(size: int) -> Sample:
        once = stand.time(lambda: finish([exchange(stand, verb, size, 1)[0](0)]))
        count = max(2, min(UNDER_WAY, int(0.2 / once)))
        start, nbytes = exchange(stand, verb, size, count)
        lost = []
        for _ in range(5):
            alone = statistics.fmean(stand.seconds(product) for _ in range(50))  # with what others take of the cores
            stand.meet()
            works = [start(i) for i in range(count)]
            lost.append(compute_beside(works, alone))
            finish(works)
        return Sample(size, nbytes, max(0.0, stand.largest([statistics.median(lost)])[0]) / count)

    large = max((s for s in samples[1:] if s.seconds < SLOW), default=samples[1], key=lambda s: s.size)
    return [one(samples[0].size), one(large.size)]
