"""A model that FSDP2 cuts over all ranks: what its exchanges cost as they are, and compressed.

    forward    of each module: all-gather of its weights, computing
    backward   of each but the outermost once more; computing; reduce-scatter of its gradients

With machines of several ranks as nodes, what is compressed goes in two levels: gradients inside a machine and then
between machines, weights between them and then inside.

What is assumed, beside what :mod:`commopt.probe.predict` does: an FSDP module for each layer, and the outermost; FSDP2
waits for each exchange before it computes, as over Gloo; each rank updates its part alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from commopt.comm import Backend, NoReceipt, Topology, Traffic
from commopt.compress import Compressor, Int4, Int8
from commopt.gradients import Differences
from commopt.gradients.all_gather import FLAG, GroupDifferences, GroupWeights
from commopt.gradients.reduce_scatter import GroupMean
from commopt.gradients.shard_group import ShardGroup
from commopt.probe.advice import ACCURACY, TOO_COARSE, WORTH, cannot_tell, faster
from commopt.probe.clock import Clock, Costs, Step
from commopt.probe.compressors import COMPRESSORS, error
from commopt.probe.figures import figure
from commopt.probe.fit import Line
from commopt.probe.inside import collectives
from commopt.probe.local import SAMPLE, MirroredMachines, Mirrors
from commopt.probe.measure import Stand, every_second, links, sizes_up_to
from commopt.probe.messages import ON_MACHINES, Shapes, columns_of, part_bytes
from commopt.probe.model import BACKWARD, Model, adamw_seconds
from commopt.probe.options import PATIENCE, Options


@dataclass(frozen=True)
class Way:
    """Compressors of FSDP2's exchanges; None: nothing is compressed.

    Attributes:
        words: how one writes it.
        nodes: whether machines are nodes.
        inside: for gradients inside a machine; in float32 without.
    """

    words: str
    gradients: Compressor | None = None
    weights: Compressor | Differences | None = None
    nodes: bool = False
    inside: Compressor | None = None

    @property
    def spelt(self) -> str:
        """Spelling of it, with what makes machines nodes."""
        return f"{self.words}, process_group=mesh" if self.nodes else self.words

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
ON_NODES = {
    name: Way(words, gradients, weights, nodes=True, inside=inside)
    for name, words, gradients, weights, inside in (
        ("fsdp_int8_nodes", "Int8()", Int8(), None, None),
        ("fsdp_int8_int8_nodes", "Int8(), weights=Int8()", Int8(), Int8(), None),
        ("fsdp_int4_int8_nodes", "Int4(), weights=Int8()", Int4(), Int8(), None),
        ("fsdp_int4_differences_nodes", "Int4(), weights=Differences()", Int4(), Differences(), None),
        ("fsdp_twice", "Int4(), inside=Int8(), weights=Differences()", Int4(), Differences(), Int8()),
    )
}
"""With machines as nodes. The last is SDP4Bit's, but for its rotation and rounding."""


@dataclass(frozen=True)
class Cut:
    """Findings.

    Attributes:
        ways: that were compared, by name.
        steps: predicted, by way.
        costs: seconds per parameter of the model, by way: before each collective of "gradients" and of "weights", after
            these, and of weights that are there "again", in backward.
        link: of FSDP2's own collectives.
        advice: the recommendation.
    """

    ways: dict[str, Way]
    steps: dict[str, Step]
    costs: dict[str, dict[str, float]]
    link: dict[str, Line]
    advice: str


def measure_cut(
    stand: Stand,
    options: Options,
    costs: Costs,
    model: Model,
    modules: Sequence[Shapes],
    machine: int = 1,
    mesh: str = "",
) -> Cut:
    """Times FSDP2's collectives over all ranks, and compressing; predicts. ``machine``: ranks of a machine, where
    ``costs`` has what is sent with machines as nodes, and ``mesh`` is how one writes these."""
    ranks = dist.new_group(backend=options.backend, timeout=PATIENCE)
    sizes = every_second(sizes_up_to(options.max_mb))
    samples = {verb: collectives(stand, verb, sizes, ranks) for verb in ("all_gather", "reduce_scatter")}
    link = {f"fsdp_{verb}": line for verb, line in links(samples).items()}
    columns = min(SAMPLE[stand.device.type], model.params) // stand.world_size + 1
    ways = WAYS if machine == 1 else {**WAYS, **ON_NODES}
    per = {name: costs_of(way, columns, stand, machine) for name, way in ways.items()}
    steps = {name: predict_cut(costs, link, model, modules, way, per[name], machine) for name, way in ways.items()}
    largest = max(sample.size for two in samples.values() for sample in two)
    at_once = 4 * stand.world_size * max(columns_of(shapes, stand.world_size) for shapes in modules)
    of_rows = ("all_to_all",) if machine == 1 else ("all_to_all", *ON_MACHINES)
    used = {**link, **{verb: costs.link[verb] for verb in of_rows}}
    advice = cannot_tell(used, largest, at_once) or recommend_cut(steps, ways, mesh)
    return Cut(ways, steps, per, link, advice)


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


REDUCED = {False: ("all_to_all",), True: ("inside_all_to_all", "between_all_to_all")}
GATHERED = {False: ("fsdp_all_gather",), True: ("between_all_gather", "inside_all_gather")}
"""The collectives of a mean of gradients, and of a gather of weights, with nodes or without."""


def costs_of(way: Way, columns: int, stand: Stand, machine: int = 1) -> dict[str, float]:
    """Seconds per parameter of what ``way`` computes, of a module of so many ``columns`` a rank, before each collective
    and after the last."""
    world = stand.world_size
    module: Any = _Module(columns, world, stand.device)
    mirrors = Mirrors(world, stand.synchronize)
    backend: Backend = MirroredMachines(mirrors, machine) if way.nodes else mirrors
    ranks = ShardGroup(backend, Topology(backend, receipt=NoReceipt()).among(backend, inside=False))
    whole = torch.randn(world, columns, device=stand.device)
    mine = whole[0].clone()
    out: dict[str, float] = {}
    if way.gradients is not None:
        mean = GroupMean(module, ranks, way.gradients, True, lambda: None, way.inside)

        def take() -> None:
            mean(mine, whole.view(-1), module, dist.ReduceOp.SUM)
            mean.end(sound=True)

        seconds = mirrors.time(stand, take)
        out |= {f"gradients {verb}": seconds[verb] for verb in (*REDUCED[way.nodes], "end")}
    if way.weights is not None:
        kind = GroupDifferences if isinstance(way.weights, Differences) else GroupWeights
        gather = kind(module, ranks, way.weights, Traffic())  # type: ignore[arg-type]
        moves = itertools.cycle((1.01, 1 / 1.01))  # Differences sends nothing of weights that stay

        def follow() -> None:
            mine.mul_(next(moves))
            stand.synchronize()
            mirrors.reset()
            gather(whole.view(-1), mine, module)

        seconds = mirrors.time(stand, follow)
        again = {f"weights {verb}": seconds[verb.removeprefix("fsdp_")] for verb in (*GATHERED[way.nodes], "end")}
        out |= {**again, "again": sum(again.values())}
        if isinstance(way.weights, Differences):
            kept = torch.empty_like(whole)
            out["again"] = stand.time(lambda: whole.copy_(kept))
    return {verb: value / whole.numel() for verb, value in out.items()}


# predictions ----------------------------------------------------------------------------------------------------------


def predict_cut(
    costs: Costs,
    link: Mapping[str, Line],
    model: Model,
    modules: Sequence[Shapes],
    way: Way,
    per: Mapping[str, float],
    machine: int = 1,
) -> Step:
    """A step. ``modules``: the tensors of each, the outermost first."""
    world = costs.world_size
    lines = {**costs.link, **link}
    clock = Clock(replace(costs, link=lines, loss=dict.fromkeys(lines, Line(0.0, 0.0))))
    columns = [columns_of(shapes, world) for shapes in modules]
    computing = max(0.0, model.step_time - adamw_seconds(costs, model)) / sum(columns)

    def exchange(what: str, n: int, sent: Sequence[tuple[str, int]]) -> None:
        for verb, nbytes in sent if n else ():  # a module without parameters sends nothing
            clock.compute(per.get(f"{what} {verb}", 0.0) * world * n)
            clock.wait(clock.send(verb, nbytes))
        clock.compute(per.get(f"{what} end", 0.0) * world * n)

    for n in columns:
        exchange("weights", n, gathered(way, n, world, machine))
        clock.compute(computing * (1 - BACKWARD) * n)
    for i, n in reversed(list(enumerate(columns))):
        if i > 0 and isinstance(way.weights, Differences):  # FSDP2 keeps those of the outermost module
            clock.compute(per["again"] * world * n)
        elif i > 0:
            exchange("weights", n, gathered(way, n, world, machine))
        clock.compute(computing * BACKWARD * n)
        exchange("gradients", n, reduced(way, n, world, machine))
    if way.gradients is not None:  # whether all means are finite
        clock.wait(clock.send("all_gather", world - 1))
    clock.compute(adamw_seconds(costs, model) / world)
    return clock.step()


def reduced(way: Way, n: int, world_size: int, machine: int) -> list[tuple[str, int]]:
    """Messages of a rank for the mean of gradients, of which each has ``n`` of its own: verbs, and bytes."""
    machines = world_size // machine
    if way.gradients is None:
        return [("fsdp_reduce_scatter", (world_size - 1) * 4 * n)]
    nbytes = way.gradients.nbytes(n)
    if not way.nodes:
        return [("all_to_all", (world_size - 1) * nbytes)]
    return [
        ("inside_all_to_all", part_bytes(machines * n, machine, way.inside)),
        ("between_all_to_all", (machines - 1) * nbytes),
    ]


def gathered(way: Way, n: int, world_size: int, machine: int) -> list[tuple[str, int]]:
    """The same for gathered weights."""
    nbytes, machines = 4 * n if way.weights is None else weight_bytes(way.weights, n), world_size // machine
    if not way.nodes or way.weights is None:
        return [("fsdp_all_gather", (world_size - 1) * nbytes)]
    return [
        ("between_all_gather", (machines - 1) * nbytes),
        ("inside_all_gather", (machine - 1) * machines * nbytes),
    ]


def weight_bytes(weights: Compressor | Differences, n: int) -> int:
    """Bytes of a rank's ``n`` weights, as they go to another."""
    if isinstance(weights, Differences):
        return weights.compressor.nbytes(n) + FLAG
    return weights.nbytes(n)


def recommend_cut(steps: Mapping[str, Step], ways: Mapping[str, Way] = WAYS, mesh: str = "") -> str:
    """Recommendation for a model that is cut over all ranks: the fastest, but what loses more must be 5 % faster, and
    what loses too much is not recommended. ``mesh``: how one writes machines as nodes."""
    text = _recommended(steps, ways)
    return f"{text} Here mesh is {mesh}, and fully_shard(model) takes none." if "=mesh" in text else text


def _recommended(steps: Mapping[str, Step], ways: Mapping[str, Way]) -> str:
    plain = steps["fsdp"]
    gain = {name: plain.seconds / step.seconds for name, step in steps.items()}
    fine = sorted((name for name, way in ways.items() if way.lost < TOO_COARSE), key=lambda name: ways[name].lost)
    coarse = {way.words: gain[name] for name, way in ways.items() if way.lost >= TOO_COARSE}
    chosen = "fsdp"
    for name in fine:
        if gain[name] >= WORTH * gain[chosen]:
            chosen = name
    beside = faster(gain[chosen], [coarse])
    if chosen == "fsdp":
        best = max(fine[1:], key=lambda name: gain[name])
        return f"leave FSDP2 as it is: {ways[best].spelt}, the fastest, would be {gain[best]:.2f} x as fast.{beside}"
    text = (
        f"compress_gradients(model, {ways[chosen].spelt}): a step takes {figure(steps[chosen].seconds)} s where FSDP2 "
        f"takes {figure(plain.seconds)} s, {gain[chosen]:.2f} x as fast."
    )
    return text + (" That is little for a prediction: try both." if gain[chosen] < ACCURACY else "") + beside
