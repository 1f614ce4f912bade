"""One computing device and one link, in simulated time.

A message keeps the link busy for a while, and arrives later: the next one may leave before (the gap and the latency of
LogGP, Alexandrov et al. 1995).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from commopt.probe.fit import Line


@dataclass(frozen=True)
class Costs:
    """Measured costs.

    Attributes:
        world_size: ranks.
        link: by verb, the seconds of a message that is alone on its way, as a line in the bytes that a rank sends.
        loss: by verb, the seconds of computing that are lost while a message is under way, as such a line.
        adamw: seconds of torch.optim.AdamW, per parameter.
        copies: seconds that DDP spends on copying gradients into buckets and back, per parameter, by collective.
        onebit: seconds of a compressed step of OneBitAdam per parameter, by the collective that follows; "end" is the
            rest.
        means: seconds of a compressed mean of gradients per parameter, by compressor, and by what follows: "presence",
            or a stage of :class:`commopt.probe.messages.Exchange`; "end" is the rest.
        sgd: seconds of a step of CSER and its relative per parameter, by kind of step
            (:data:`commopt.probe.local.SGD`), and by what follows, as ``onebit``.
        busy: by verb, the seconds of those of ``link`` for which the next message has to wait, as such a line; all of
            them, of a verb that is not in it.
    """

    world_size: int
    link: dict[str, Line]
    loss: dict[str, Line]
    adamw: float
    copies: dict[str, float]
    onebit: dict[str, float]
    means: dict[str, dict[str, float]] = field(default_factory=dict)
    sgd: dict[str, dict[str, float]] = field(default_factory=dict)
    busy: dict[str, Line] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """A predicted step: its seconds, those of them that communication costs, and the bytes that a rank sends; the
    seconds that the link is busy with these, hidden or not; and the bytes of them that stay inside a machine."""

    seconds: float
    communication: float
    nbytes: int
    wire: float = 0.0
    inside: int = 0


class Clock:
    """A device that computes and a link that messages leave by one after another, in simulated time."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.now = 0.0
        self.work = 0.0
        self.nbytes = self.inside = 0
        self.wire = 0.0
        self._alike: dict[tuple[str, int, float], tuple[float, float, float]] = {}
        # of each message: until when it keeps the link busy, and the speed of computing until then
        self._under_way: deque[tuple[float, float]] = deque()

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

    def send(self, verb: str, nbytes: int, chance: float = 1.0) -> float:
        """Starts a message of which a rank sends ``nbytes``; when it will have arrived.

        Args:
            verb: of the message.
            nbytes: on average, where not all are sent.
            chance: that it is sent, > 0: so much of its seconds is counted.
        """

        message = verb, nbytes, chance
        if message not in self._alike:  # most are as large as the one before
            self._alike[message] = self._takes(*message)
        alone, busy, speed = self._alike[message]
        start = max(self.now, self._under_way[-1][0] if self._under_way else 0.0)
        self._under_way.append((start + busy, speed))
        self.nbytes += nbytes
        self.inside += nbytes if verb.startswith("inside_") else 0
        self.wire += busy
        return start + alone

    def _takes(self, verb: str, nbytes: int, chance: float) -> tuple[float, float, float]:
        """Seconds of a message, those of them in which the link is busy, and the speed of computing meanwhile."""

        def of(line: Line) -> float:
            return chance * line(nbytes / chance)

        alone, lost = of(self.costs.link[verb]), of(self.costs.loss[verb])
        busy = min(alone, of(self.costs.busy.get(verb, self.costs.link[verb])))
        return alone, busy, max(0.0, 1 - lost / busy) if busy else 1.0

    def step(self) -> Step:
        """The step that ends now."""
        return Step(self.now, self.now - self.work, self.nbytes, self.wire, self.inside)


def mean_of(steps: Sequence[tuple[int, Step]]) -> Step:
    """The mean step, of so many of each."""
    count = sum(times for times, _ in steps)
    return Step(
        sum(times * step.seconds for times, step in steps) / count,
        sum(times * step.communication for times, step in steps) / count,
        sum(times * step.nbytes for times, step in steps) // count,
        sum(times * step.wire for times, step in steps) / count,
        sum(times * step.inside for times, step in steps) // count,
    )
