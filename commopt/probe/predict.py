"""Latency, bandwidth and costs -> seconds per step, break-even bandwidth, advice. Pure functions on numbers.

A step is played on a :class:`Clock` that has one computing device and one link. DistributedDataParallel sends each
bucket when backward has filled it; so does OneBitAdam with ``overlap=True``, else it begins after backward. Compressed
means of gradients begin when DDP has filled a bucket, or, where FSDP2 cuts the model, when the gradients are there; the
last bucket always after backward. What is assumed:

* two thirds of forward and backward are backward, and gradients arrive evenly in it, but for ``last_params``;
* messages leave one after another: each keeps the next one waiting, and arrives, when the lines measured say;
* while a message is under way, computing is slowed down as it was when that was measured;
* all ranks are equally fast.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

import torch

from commopt.agreement.decision import AGREEMENT_BYTES
from commopt.bucket import ROW_MULTIPLE
from commopt.comm import CONFIRMATION_BYTES, all_reduce_bytes
from commopt.optim.policies import SyncPolicy, VariancePolicy, count_steps
from commopt.probe.clock import Clock, Costs, Step, mean_of
from commopt.probe.fit import Line
from commopt.probe.messages import (
    Exchange,
    Shapes,
    buckets_of,
    exchanges,
    presence_bytes,
    turns,
)
from commopt.probe.model import Model, adamw_seconds, begin, split
from commopt.probe.sgd import cser, qsparse

MB = 2**20
DDP_BUCKETS = (1 * MB, 25 * MB)
"""Bytes of DDP's first bucket, and of the others."""
SLOWEST, FASTEST = 1e3, 1e13
"""Between these bandwidths, in bit/s, the break-even is sought."""
PLACES = 2**15
"""Of the bandwidths among which it is sought each is as many times the one before, 1.0007."""


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
    """Messages of a compressed mean that are in flight, in the order in which they were sent.

    Args:
        clock: the device and the link.
        per: seconds per parameter before each of the stages of an exchange, and at the "end".
    """

    def __init__(self, clock: Clock, per: Mapping[str, float]) -> None:
        self.clock, self.per = clock, per
        self.under_way: deque[tuple[float, int, Exchange]] = deque()  # when it arrives, which of what it is
        self.arrived: list[Exchange] = []
        self.last = 0.0  # when the last of these has arrived

    def launch(self, several: Sequence[Exchange]) -> None:
        """Starts the first collective of each."""
        for exchange in several:
            self._send(0, exchange)

    def turn(self, until: float = float("inf")) -> None:
        """Goes on with all that arrives up to ``until``: sends what follows."""
        while self.under_way and self.under_way[0][0] <= until:
            arrival, number, exchange = self.under_way.popleft()
            if number + 1 < len(exchange.sent):
                self.clock.wait(arrival)
                self._send(number + 1, exchange)
            else:
                self.arrived.append(exchange)
                self.last = max(self.last, arrival)

    def arrive(self) -> None:
        """Waits for all that is under way."""
        self.turn()
        self.clock.wait(self.last)

    def end(self) -> None:
        """Applies what has arrived."""
        for exchange in self.arrived:
            self.clock.compute(self.per["end"] * exchange.params)

    def _send(self, number: int, exchange: Exchange) -> None:
        # none of a stage that the part of the model that was timed has not
        self.clock.compute(self.per.get(exchange.stages[number], 0.0) * exchange.params)
        verb, nbytes = exchange.sent[number]
        if nbytes or not self.under_way:
            arrival = self.clock.send(verb, nbytes)
        else:  # it is a part of the message before
            arrival = self.under_way[-1][0]
        self.under_way.append((arrival, number, exchange))


def onebit(costs: Costs, model: Model, overlap: bool = False) -> Step:
    """OneBitAdam in its compressed phase."""
    clock = Clock(costs)
    messages = Messages(clock, costs.onebit)
    backward = begin(clock, model)
    shapes = model.all_shapes
    buckets = buckets_of(shapes, costs.world_size, model.bucket_bytes)
    sent = exchanges(shapes, model.compressor, costs.world_size, model.bucket_bytes, machine=model.machine)
    early, ranks = len(buckets) - 1 if overlap else 0, costs.world_size * model.shard
    for i, bucket in enumerate(buckets):
        clock.compute(backward * bucket.numel)
        if i < early:
            messages.launch(sent[i])
            messages.turn(clock.now)
    clock.compute(costs.onebit["agreement"] * model.params)
    agreed = clock.send("all_gather", (ranks - 1) * (AGREEMENT_BYTES - CONFIRMATION_BYTES))
    if not overlap:
        clock.wait(agreed)
    for several in sent[early:]:
        messages.launch(several)
    messages.turn()
    clock.wait(agreed)
    messages.arrive()
    clock.wait(clock.send("all_gather", (ranks - 1) * CONFIRMATION_BYTES))
    messages.end()
    return clock.step()


RUN, FROZEN = 10_000, 2_000
"""Steps of the run that 0/1 Adam is predicted for, and after how many its variance stands still."""


def zero_one(costs: Costs, model: Model) -> Step:
    """ZeroOneAdam, its policies as they come but for the stop: the mean of the steps of a run. An exact step is taken
    for one of DDP, but for its bytes on machines."""
    counts = count_steps(VariancePolicy(stop=FROZEN), SyncPolicy(), RUN)
    exact, inside = ddp(costs, model), model.machine
    if inside > 1:
        among = 2 * 4 * model.params * (inside - 1) // inside
        out = all_reduce_bytes(4 * model.params // inside, costs.world_size // inside)
        exact = replace(exact, nbytes=among + out, inside=among)
    return mean_of([(counts.exact, exact), (counts.compressed, onebit(costs, model)),
                    (counts.local, plain(costs, model))])  # fmt: skip


def gradients(costs: Costs, model: Model, name: str) -> Step:
    """AdamW on compressed means of gradients: the mean of the steps that take turns."""
    return mean_of([(1, one_mean(costs, model, name, turn)) for turn in range(turns(model.compressors[name]))])


def one_mean(costs: Costs, model: Model, name: str, turn: int) -> Step:
    """A step of AdamW on the mean number ``turn`` of gradients, which ``model.compressors[name]`` compresses."""
    clock, per = Clock(costs), costs.means[name]
    copy = costs.copies["all_reduce"] / 2
    messages = Messages(clock, per)
    backward = begin(clock, model)
    sizes = [bucket.numel for bucket in buckets_of(model.shapes, costs.world_size, model.bucket_bytes)]
    waiting = list(
        exchanges(
            model.shapes, model.compressors[name], costs.world_size, model.bucket_bytes, turn, model.machine,
            model.inside.get(name),
        )
    )  # fmt: skip
    arrived = launched = 0
    for n in sizes if model.shard > 1 else split(model.params, model.last_params, *DDP_BUCKETS):
        clock.compute((backward + copy) * n)
        arrived += n
        while model.early and len(waiting) > 1 and launched + sizes[-len(waiting)] <= arrived:
            launched += sizes[-len(waiting)]
            messages.launch(waiting.pop(0))
        messages.turn(clock.now)
    ranks = costs.world_size * model.shard
    clock.compute(per["presence"] * model.params)
    asked = clock.send("all_gather", presence_bytes(model.shapes, ranks, model.shard == 1))
    if not model.early:
        clock.wait(asked)
    for bucket in waiting:
        messages.launch(bucket)
    messages.turn(clock.now)
    clock.wait(asked)
    messages.turn()
    messages.arrive()
    if model.shard > 1:  # whether the means of all parts are finite
        clock.wait(clock.send("all_gather", ranks - 1))
    messages.end()
    clock.compute(copy * model.params + adamw_seconds(costs, model))
    return clock.step()


def share(n: int, world_size: int) -> int:
    """Elements of a rank's shard of a bucket of ``n`` parameters."""
    return -(-n // (world_size * ROW_MULTIPLE)) * ROW_MULTIPLE


METHODS: dict[str, Callable[[Costs, Model], Step]] = {
    "none": plain,
    "ddp": ddp,
    "ddp_bf16": lambda costs, model: ddp(costs, model, "all_reduce_bf16", 2),
    "onebit_adam": onebit,
    "onebit_adam_overlap": lambda costs, model: onebit(costs, model, overlap=True),
    "onebit_adam_int8": onebit,
    "zero_one_adam": zero_one,
    "cser": cser,
    "qsparse": qsparse,
}
"""The methods by name, but for compressed gradients. "onebit_adam_int8" has another warm-up than "onebit_adam"."""


def methods(model: Model) -> dict[str, Callable[[Costs, Model], Step]]:
    """All methods by name, those of ``model.compressors`` too."""
    return METHODS | {name: partial(gradients, name=name) for name in model.compressors}


def predict(costs: Costs, model: Model) -> dict[str, Step]:
    """A step with each method."""
    return {name: method(costs, model) for name, method in methods(model).items()}


def rehearse(costs: Costs, model: Model, params: int) -> Step:
    """OneBitAdam.step() alone, of ``params`` parameters."""
    return onebit(costs, replace(model, params=params, last_params=0, shapes=(), step_time=costs.adamw * params))


def rehearse_mean(costs: Costs, model: Model, name: str, shapes: Shapes) -> float:
    """Seconds of a mean alone, without DDP, of gradients of ``shapes`` that are all there."""
    params = sum(torch.Size(shape).numel() for shape in shapes)
    alone = replace(costs, adamw=0.0, copies=dict.fromkeys(costs.copies, 0.0))
    return gradients(
        alone, replace(model, params=params, last_params=0, step_time=0.0, shapes=shapes, shard=1), name
    ).seconds


def at_bandwidth(costs: Costs, bits_per_second: float) -> Costs:
    """``costs`` over a link on which an all-reduce has this bandwidth, the other collectives in proportion.

    Latency stays; and a byte does not become faster than the computing that it costs.
    """
    factor = 8 / bits_per_second / costs.link["all_reduce"].per_byte

    def scaled(verb: str, line: Line) -> Line:
        floor = min(line.per_byte, costs.loss[verb].per_byte)
        return replace(line, per_byte=max(line.per_byte * factor, floor))

    link, busy = ({verb: scaled(verb, line) for verb, line in lines.items()} for lines in (costs.link, costs.busy))
    return replace(costs, link=link, busy=busy)


def break_evens(costs: Costs, model: Model, names: Iterable[str]) -> dict[str, float | None]:
    """By method, the bit/s, as an all-reduce sees them, below which a step is faster than one of DDP.

    Infinite if it is faster however fast the link, 0 if it never is, None if no message was large enough to tell.
    """
    if costs.link["all_reduce"].per_byte <= 0:
        return dict.fromkeys(names)

    @cache
    def there(place: int) -> tuple[Costs, float]:
        """The costs, and what DDP takes: the same for all methods."""
        at = at_bandwidth(costs, bandwidth_at(place))
        return at, ddp(at, model).seconds

    def gain(step: Callable[[Costs, Model], Step], place: int) -> float:
        at, rival = there(place)
        return rival - step(at, model).seconds

    every = methods(model)
    return {name: break_even(partial(gain, every[name])) for name in names}


def bandwidth_at(place: float) -> float:
    """Bit/s at a place in [0, PLACES]."""
    return SLOWEST * (FASTEST / SLOWEST) ** (place / PLACES)


def break_even(gain: Callable[[int], float]) -> float:
    """Greatest of the bandwidths at which there is a ``gain``, a function of their place; as :func:`break_evens`.

    Steps are nearly straight lines in the seconds of a byte, so that few of them have to be played: the secant is tried
    (the Illinois method), and each third time the middle, for there are steps that jump.
    """
    low, high, below = 0, PLACES, gain(PLACES)
    if below > 0:
        return float("inf")
    above = gain(low)
    if above <= 0:
        return 0.0
    tried = side = 0
    while high - low > 1:
        share = above / (above - below)
        per_bit = (1 - share) / bandwidth_at(low) + share / bandwidth_at(high)
        place = math.log(1 / per_bit / SLOWEST, FASTEST / SLOWEST) * PLACES
        middle = (low + high) // 2 if tried % 3 == 2 else min(max(int(place), low + 1), high - 1)
        found, tried = gain(middle), tried + 1
        if found > 0:
            low, above, below = middle, found, below / 2 if side > 0 else below
        else:
            high, below, above = middle, found, above / 2 if side < 0 else above
        side = 1 if found > 0 else -1
    return bandwidth_at(low)


def whole_run(ddp: float, compressed: float, share: float, warm: float | None = None) -> float:
    """Speed over DDP's of a run of which ``share`` is warm-up, whose steps take ``warm`` seconds, or as long as
    DDP's."""
    return ddp / (share * (ddp if warm is None else warm) + (1 - share) * compressed)
