"""A model that FSDP2 cuts over all ranks: what its exchanges cost as they are, and compressed.

    forward    of each module: all-gather of its weights, computing
    backward   of each but the outermost once more; computing; reduce-scatter of its gradients

What is assumed, beside what :mod:`commopt.probe.predict` does: an FSDP module for each layer, and the outermost; FSDP2
waits for each exchange before it computes, as over Gloo; each rank updates its part alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from commopt.comm import Topology, Traffic
from commopt.compress import Compressor, Int4, Int8
from commopt.gradients import Differences
from commopt.gradients.all_gather import FLAG, GroupDifferences, GroupWeights
from commopt.gradients.reduce_scatter import GroupMean
from commopt.gradients.shard_group import ShardGroup
from commopt.probe.advice import ACCURACY, TOO_COARSE, WORTH, cannot_tell, faster
from commopt.probe.clock import Clock, Costs, Step
from commopt.probe.compressors import COMPRESSORS, error
from commopt.probe.fit import Line, fit_line
from commopt.probe.inside import collectives
from commopt.probe.local import SAMPLE, Mirrors
from commopt.probe.measure import Stand, sizes_up_to
from commopt.probe.messages import Shapes, columns_of
from commopt.probe.options import Options
from commopt.probe.predict import BACKWARD, Model, adamw_seconds


@dataclass(frozen=True)
class Way:
    """What is compressed of FSDP2's exchanges; None: nothing.

    Attributes:
        words: how one writes it.
    """

    words: str
    gradients: Compressor | None = None
    weights: Compressor | Differences | None = None

    @property
    def lost(self) -> float:
        """Error of the compressor of gradients."""
        return 0.0 if self.gradients is None else error(self.gradients)


WAYS = {
    "fsdp": Way("FSDP2 as it is"),
    **{
        name.replace("gradients", "fsdp"): Way(words, spec)
        for name, (words, spec) in COMPRESSORS.items()
        if isinstance(spec, Compressor)
    },
    "fsdp_int8_int8": Way("Int8(), weights=Int8()", Int8(), Int8()),
    "fsdp_int4_int8": Way("Int4(), weights=Int8()", Int4(), Int8()),
    "fsdp_int4_differences": Way("Int4(), weights=Differences()", Int4(), Differences()),
}
"""By name: gradients alone by each compressor of rows, then weights, too."""

PATIENCE = timedelta(minutes=2)


@dataclass(frozen=True)
class Cut:
    """Findings.

    Attributes:
        steps: predicted, by way.
        costs: seconds per parameter of the model, by way: before each exchange of "gradients" and of "weights", after
            it, and of weights that are there "again", in backward.
        link: of FSDP2's own collectives.
        advice: the recommendation.
    """

    steps: dict[str, Step]
    costs: dict[str, dict[str, float]]
    link: dict[str, Line]
    advice: str


def measure_cut(stand: Stand, options: Options, costs: Costs, model: Model, modules: Sequence[Shapes]) -> Cut:
    """Times FSDP2's collectives over all ranks, and compressing; predicts."""
    ranks = dist.new_group(backend=options.backend, timeout=PATIENCE)
    sizes = sizes_up_to(options.max_mb)[1::2]
    samples = {verb: collectives(stand, verb, sizes, ranks) for verb in ("all_gather", "reduce_scatter")}
    link = {f"fsdp_{v}": fit_line([s.nbytes for s in two], [s.seconds for s in two]) for v, two in samples.items()}
    columns = min(SAMPLE[stand.device.type], model.params) // stand.world_size + 1
    per = {name: costs_of(way, columns, stand) for name, way in WAYS.items()}
    steps = {name: predict_cut(costs, link, model, modules, way, per[name]) for name, way in WAYS.items()}
    largest = max(sample.size for two in samples.values() for sample in two)
    at_once = 4 * stand.world_size * max(columns_of(shapes, stand.world_size) for shapes in modules)
    return Cut(steps, per, link, cannot_tell(link, largest, at_once) or recommend_cut(steps))


# what it costs on the device ------------------------------------------------------------------------------------------


class _Module:
    """In place of a parameter group of FSDP2: one parameter of so many columns, which has a gradient."""

    name, params = "a module", ()
    places = (None,)

    def __init__(self, columns: int, world_size: int, device: torch.device) -> None:
        self.columns, self.world_size, self.device, self.dtype = columns, world_size, device, torch.float32

    def divided_by(self, dtype: torch.dtype) -> float:
        return 1.0

    def with_gradient(self, columns: int) -> Sequence[int]:
        return (0,)

    def mask(self, present: Sequence[int]) -> None:
        return None

    def size(self) -> int:
        return self.world_size


def costs_of(way: Way, columns: int, stand: Stand) -> dict[str, float]:
    """Seconds per parameter of what ``way`` computes, of a module of so many ``columns`` a rank."""
    world = stand.world_size
    module: Any = _Module(columns, world, stand.device)
    mirrors = Mirrors(world, stand.synchronize)
    ranks = ShardGroup(mirrors, Topology(mirrors).among(mirrors, inside=False))
    whole = torch.randn(world, columns, device=stand.device)
    mine = whole[0].clone()
    out: dict[str, float] = {}
    if way.gradients is not None:
        mean = GroupMean(module, ranks, way.gradients, True, lambda: None)

        def take() -> None:
            mean(mine, whole.view(-1), module, dist.ReduceOp.SUM)
            mean.end(sound=True)

        seconds = mirrors.time(stand, take)
        out |= {"gradients": seconds["all_to_all"], "gradients end": seconds["end"]}
    if way.weights is not None:
        kind = GroupDifferences if isinstance(way.weights, Differences) else GroupWeights
        gather = kind(module, ranks, way.weights, Traffic())  # type: ignore[arg-type]
        seconds = mirrors.time(stand, lambda: gather(whole.view(-1), mine, module))
        out |= {"weights": seconds["all_gather"], "weights end": seconds["end"]}
        out["again"] = out["weights"] + out["weights end"]
        if isinstance(way.weights, Differences):
            kept = torch.empty_like(whole)
            out["again"] = stand.time(lambda: whole.copy_(kept))
    return {verb: value / whole.numel() for verb, value in out.items()}


# predictions ----------------------------------------------------------------------------------------------------------


def predict_cut(
    costs: Costs, link: Mapping[str, Line], model: Model, modules: Sequence[Shapes], way: Way, per: Mapping[str, float]
) -> Step:
    """A step. ``modules``: the tensors of each, the outermost first."""
    world = costs.world_size
    lines = {**costs.link, **link}
    clock = Clock(replace(costs, link=lines, loss=dict.fromkeys(lines, Line(0.0, 0.0))))
    columns = [columns_of(shapes, world) for shapes in modules]
    computing = max(0.0, model.step_time - adamw_seconds(costs, model)) / sum(columns)

    def gather(n: int, again: bool) -> None:
        if way.weights is None:
            clock.wait(clock.send("fsdp_all_gather", 4 * (world - 1) * n))
            return
        if again and isinstance(way.weights, Differences):
            clock.compute(per["again"] * world * n)
            return
        clock.compute(per["weights"] * world * n)
        clock.wait(clock.send("fsdp_all_gather", (world - 1) * weight_bytes(way.weights, n)))
        clock.compute(per["weights end"] * world * n)

    for n in columns:
        gather(n, again=False)
        clock.compute(computing * (1 - BACKWARD) * n)
    for i, n in reversed(list(enumerate(columns))):
        if i > 0:  # FSDP2 keeps those of the outermost module
            gather(n, again=True)
        clock.compute(computing * BACKWARD * n)
        if way.gradients is None:
            clock.wait(clock.send("fsdp_reduce_scatter", 4 * (world - 1) * n))
            continue
        clock.compute(per["gradients"] * world * n)
        clock.wait(clock.send("all_to_all", (world - 1) * way.gradients.nbytes(n)))
        clock.compute(per["gradients end"] * world * n)
    if way.gradients is not None:  # whether all means are finite
        clock.wait(clock.send("all_gather", world - 1))
    clock.compute(adamw_seconds(costs, model) / world)
    return clock.step()


def weight_bytes(weights: Compressor | Differences, n: int) -> int:
    """Bytes of a rank's ``n`` weights, as they go to another."""
    if isinstance(weights, Differences):
        return weights.compressor.nbytes(n) + FLAG
    return weights.nbytes(n)


def recommend_cut(steps: Mapping[str, Step]) -> str:
    """What to do with a model that is cut over all ranks: the fastest, but what loses more must be 5 % faster, and what
    loses too much is not recommended."""
    plain = steps["fsdp"]
    gain = {name: plain.seconds / step.seconds for name, step in steps.items()}
    fine = sorted((name for name, way in WAYS.items() if way.lost < TOO_COARSE), key=lambda name: WAYS[name].lost)
    coarse = {way.words: gain[name] for name, way in WAYS.items() if way.lost >= TOO_COARSE}
    chosen = "fsdp"
    for name in fine:
        if gain[name] >= WORTH * gain[chosen]:
            chosen = name
    beside = faster(gain[chosen], [coarse])
    if chosen == "fsdp":
        best = max(fine[1:], key=lambda name: gain[name])
        return f"leave FSDP2 as it is: {WAYS[best].words}, the fastest, would be {gain[best]:.2f} x as fast.{beside}"
    text = (
        f"compress_gradients(model, {WAYS[chosen].words}): a step takes {steps[chosen].seconds:.3g} s where FSDP2 "
        f"takes {plain.seconds:.3g} s, {gain[chosen]:.2f} x as fast."
    )
    return text + (" That is little for a prediction: try both." if gain[chosen] < ACCURACY else "") + beside
