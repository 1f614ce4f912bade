"""Latency, bandwidth and costs -> seconds per step, break-even bandwidth, advice. Pure functions on numbers.

A step is played on a :class:`Clock` that has one computing device and one link. DistributedDataParallel sends each
bucket when backward has filled it; so does OneBitAdam with ``overlap=True``, else it begins after backward. What is
assumed:

* two thirds of forward and backward are backward, and gradients arrive evenly in it, but for ``last_params``;
* the link carries one message after another, each in the time its line says;
* while a message is under way, computing is slowed down as it was when that was measured;
* all ranks are equally fast.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from commopt.bucket import ROW_MULTIPLE
from commopt.comm import CONFIRMATION_BYTES, all_reduce_bytes
from commopt.compress import Compressor
from commopt.optim.agreement import AGREEMENT_BYTES
from commopt.probe.fit import Line

BACKWARD = 2 / 3
"""Share of backward in the time of forward and backward."""
MB = 2**20
DDP_BUCKETS = (1 * MB, 25 * MB)
"""Bytes of DDP's first bucket, and of the others."""
SLOWEST, FASTEST = 1e3, 1e13
"""Between these bandwidths, in bit/s, the break-even is sought."""


@dataclass(frozen=True)
class Costs:
    """Measured costs.

    Attributes:
        world_size: ranks.
        link: by verb, the seconds of a message as a line in the bytes that a rank sends.
        loss: by verb, the seconds of computing that are lost while a message is under way, as such a line.
        adamw: seconds of torch.optim.AdamW, per parameter.
        copies: seconds that DDP spends on copying gradients into buckets and back, per parameter, by collective.
        onebit: seconds of a compressed step of OneBitAdam per parameter, by the collective that follows; "end" is the
            rest.
    """

    world_size: int
    link: dict[str, Line]
    loss: dict[str, Line]
    adamw: float
    copies: dict[str, float]
    onebit: dict[str, float]


@dataclass(frozen=True)
class Model:
    """The model that is trained.

    Attributes:
        params: parameters.
        step_time: seconds of forward, backward and AdamW on one device.
        last_params: of ``params``, how many are one tensor whose gradient comes last.
        bucket_bytes: most bytes of float32 in a bucket of OneBitAdam.
        compressor: of OneBitAdam.
    """

    params: int
    step_time: float
    last_params: int
    bucket_bytes: int
    compressor: Compressor


@dataclass(frozen=True)
class Step:
    """A predicted step: its seconds, those of them that communication costs, and the bytes that a rank sends."""

    seconds: float
    communication: float
    nbytes: int


class Clock:
    """A device that computes and a link that carries messages one after another, in simulated time."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.now = 0.0
        self.work = 0.0
        self.nbytes = 0
        self._under_way: deque[tuple[float, float]] = deque()  # end of each message, speed of computing until then

    def compute(self, work: float) -> None:
        """``work`` seconds of computing, as long as they take beside what is under way."""
        self.work += work
        while self._under_way:
            end, speed = self._under_way[0]
            if work <= max(0.0, end - self.now) * speed:
                self.now += work / speed if work else 0.0
                return
            work -= max(0.0, end - self.now) * speed
            self.now = max(self.now, end)
            self._under_way.popleft()
        self.now += work

    def wait(self, arrival: float) -> None:
        """Until ``arrival``."""
        self.now = max(self.now, arrival)

    def send(self, verb: str, nbytes: int) -> float:
        """Starts a message of which a rank sends ``nbytes``; when it will have arrived."""
        seconds, lost = self.costs.link[verb](nbytes), self.costs.loss[verb](nbytes)
        start = max(self.now, self._under_way[-1][0] if self._under_way else 0.0)
        self._under_way.append((start + seconds, max(0.0, 1 - lost / seconds) if seconds else 1.0))
        self.nbytes += nbytes
        return start + seconds

    def step(self) -> Step:
        """The step that ends now."""
        return Step(self.now, self.now - self.work, self.nbytes)


def split(params: int, last: int, *capacities: int) -> list[int]:
    """Parameters in each bucket, in order of backward; the last capacity (in bytes of float32) holds for all further
    ones. ``last`` parameters are one tensor, the last one."""
    out: list[int] = []
    rest = params - last
    while rest > 0:
        out.append(min(rest, max(1, capacities[min(len(out), len(capacities) - 1)] // 4)))
        rest -= out[-1]
    if last and out and 4 * (out[-1] + last) <= capacities[min(len(out) - 1, len(capacities) - 1)]:
        out[-1] += last
    elif last:
        out.append(last)
    return out


def plain(costs: Costs, model: Model) -> Step:
    """No communication."""
    clock = Clock(costs)
    clock.compute(model.step_time)
    return clock.step()


def ddp(costs: Costs, model: Model, verb: str = "all_reduce", itemsize: int = 4) -> Step:
    """DistributedDataParallel and AdamW; ``verb`` "all_reduce_bf16" with 2 bytes is its bf16 hook."""
    clock, copy = Clock(costs), costs.copies[verb] / 2
    backward = begin(clock, model)
    buckets = split(model.params, model.last_params, *DDP_BUCKETS)
    sent = []
    for n in buckets:
        clock.compute((backward + copy) * n)
        sent.append(clock.send(verb, all_reduce_bytes(itemsize * n, costs.world_size)))
    for n, arrival in zip(buckets, sent):
        clock.wait(arrival)
        clock.compute(copy * n)
    clock.compute(adamw_seconds(costs, model))
    return clock.step()


class Messages:
    """Messages of OneBitAdam that are in flight, in the order in which they were sent."""

    def __init__(self, clock: Clock, model: Model) -> None:
        self.clock, self.model, self.per = clock, model, clock.costs.onebit
        self.out: list[tuple[float, int]] = []  # when it arrives, and how many parameters it is about
        self.back: list[tuple[float, int]] = []

    def launch(self, bucket: int) -> None:
        for n in pieces(bucket, self.model.bucket_bytes):
            self.clock.compute(self.per["all_to_all"] * n)
            self.out.append((self._send("all_to_all", n), n))

    def turn(self, until: float = float("inf")) -> None:
        """Sends back the means of all that arrives up to ``until``."""
        while self.out and self.out[0][0] <= until:
            arrival, n = self.out.pop(0)
            self.clock.wait(arrival)
            self.clock.compute(self.per["all_gather"] * n)
            self.back.append((self._send("all_gather", n), n))

    def end(self) -> None:
        """Applies what has arrived, when all ranks have confirmed what they received."""
        for arrival, _ in self.back:
            self.clock.wait(arrival)
        self.clock.wait(self.clock.send("all_gather", (self.clock.costs.world_size - 1) * CONFIRMATION_BYTES))
        for _, n in self.back:
            self.clock.compute(self.per["end"] * n)

    def _send(self, verb: str, n: int) -> float:
        return self.clock.send(verb, row_bytes(n, self.clock.costs.world_size, self.model.compressor))


def onebit(costs: Costs, model: Model, overlap: bool = False) -> Step:
    """OneBitAdam in its compressed phase."""
    clock = Clock(costs)
    messages = Messages(clock, model)
    backward = begin(clock, model)
    buckets = split(model.params, model.last_params, model.bucket_bytes)
    early = len(buckets) - 1 if overlap else 0
    for i, n in enumerate(buckets):
        clock.compute(backward * n)
        if i < early:
            messages.launch(n)
            messages.turn(clock.now)
    clock.compute(costs.onebit["agreement"] * model.params)
    agreed = clock.send("all_gather", (costs.world_size - 1) * (AGREEMENT_BYTES - CONFIRMATION_BYTES))
    if not overlap:
        clock.wait(agreed)
    for n in buckets[early:]:
        messages.launch(n)
    messages.turn()
    clock.wait(agreed)
    messages.end()
    return clock.step()


def begin(clock: Clock, model: Model) -> float:
    """Computes forward; returns the seconds of backward per parameter."""
    both = max(0.0, model.step_time - adamw_seconds(clock.costs, model))
    clock.compute(both * (1 - BACKWARD))
    return both * BACKWARD / model.params


def adamw_seconds(costs: Costs, model: Model) -> float:
    """Seconds of a step that AdamW takes: not more than all of it."""
    return min(costs.adamw * model.params, model.step_time)


def pieces(n: int, bucket_bytes: int) -> list[int]:
    """The parts in which a bucket of ``n`` parameters is sent: several, if it is one large parameter."""
    count = max(1, -(-4 * n // bucket_bytes))
    return [n * (i + 1) // count - n * i // count for i in range(count)]


def row_bytes(n: int, world_size: int, compressor: Compressor) -> int:
    """Bytes that a rank sends in each of the two collectives of a bucket of ``n`` parameters."""
    rows = -(-n // (world_size * ROW_MULTIPLE)) * ROW_MULTIPLE
    return (world_size - 1) * compressor.nbytes(rows)


METHODS: dict[str, Callable[[Costs, Model], Step]] = {
    "none": plain,
    "ddp": ddp,
    "ddp_bf16": lambda costs, model: ddp(costs, model, "all_reduce_bf16", 2),
    "onebit_adam": onebit,
    "onebit_adam_overlap": lambda costs, model: onebit(costs, model, overlap=True),
}
"""The methods by name."""


def predict(costs: Costs, model: Model) -> dict[str, Step]:
    """A step with each method."""
    return {name: method(costs, model) for name, method in METHODS.items()}


def rehearse(costs: Costs, model: Model, params: int) -> Step:
    """OneBitAdam.step() alone, of ``params`` parameters."""
    return onebit(costs, replace(model, params=params, last_params=0, step_time=costs.adamw * params))


def at_bandwidth(costs: Costs, bits_per_second: float) -> Costs:
    """``costs`` over a link on which an all-reduce has this bandwidth, the other collectives in proportion.

    Latency stays; and a byte does not become faster than the computing that it costs.
    """
    factor = 8 / bits_per_second / costs.link["all_reduce"].per_byte

    def scaled(verb: str, line: Line) -> Line:
        floor = min(line.per_byte, costs.loss[verb].per_byte)
        return replace(line, per_byte=max(line.per_byte * factor, floor))

    return replace(costs, link={verb: scaled(verb, line) for verb, line in costs.link.items()})


def break_even(costs: Costs, model: Model, method: str = "onebit_adam") -> float | None:
    """Bit/s, as an all-reduce sees them, below which a step of ``method`` is faster than one of DDP.

    Infinite if it is faster however fast the link, 0 if it never is, None if no message was large enough to tell.
    """
    if costs.link["all_reduce"].per_byte <= 0:
        return None

    def pays(bits_per_second: float) -> bool:
        there = at_bandwidth(costs, bits_per_second)
        return METHODS[method](there, model).seconds < ddp(there, model).seconds

    low, high = SLOWEST, FASTEST
    if pays(high):
        return float("inf")
    if not pays(low):
        return 0.0
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if pays(middle) else (low, middle)
    return low


def whole_run(warm: float, compressed: float, share: float) -> float:
    """Speed over DDP's of a run of which ``share`` is warm-up at DDP's price."""
    return warm / (share * warm + (1 - share) * compressed)
