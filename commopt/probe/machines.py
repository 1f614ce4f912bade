"""Machines of several ranks as nodes: means in full precision inside each, compressed between them. What that costs.

    inside_all_to_all     inside a machine: each rank takes the mean of its part
    between_all_to_all    between machines, all ranks of each at once: of that part, compressed
    between_all_gather    the same, back
    inside_all_gather     inside a machine: all parts, as they have come

Low rank and blocks have ``between_all_reduce`` for the two in the middle (:mod:`commopt.probe.messages`).

What is assumed, beside what :mod:`commopt.probe.predict` does: what goes inside a machine and what goes between them
take turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch.distributed as dist

from commopt.comm import NodesBackend, TorchBackend
from commopt.probe.advice import OF_SGD, WARM, WORTH, over_run
from commopt.probe.clock import Costs, Step
from commopt.probe.compressors import TWICE
from commopt.probe.fit import Line
from commopt.probe.local import onebit_on_machines
from commopt.probe.means import Mean
from commopt.probe.measure import (
    UNDER_WAY,
    Sample,
    Stand,
    exchanges,
    gap,
    links,
    losses,
    losses_by,
    sizes_up_to,
    small_sizes,
)
from commopt.probe.messages import ON_MACHINES
from commopt.probe.model import Model
from commopt.probe.options import Options
from commopt.probe.predict import predict, rehearse_mean

FULL = "inside_all_to_all"
"""What goes in full precision."""


@dataclass(frozen=True)
class Machines:
    """Findings.

    Attributes:
        ranks: of a machine.
        link: the seconds of a message as a line in the bytes that a rank sends, by what is sent.
        costs, model: what the predictions were made from.
        steps: a predicted step, by method.
        rehearsal: of a mean of gradients: the compressor, how many parameters, seconds measured over the network and
            predicted.
    """

    ranks: int
    link: dict[str, Line]
    costs: Costs
    model: Model
    steps: dict[str, Step]
    rehearsal: tuple[str, int, float, float]

    @property
    def compressed(self) -> dict[str, Step]:
        """Steps of the methods that have nodes."""
        return {name: step for name, step in self.steps.items() if name not in ("none", "ddp", "ddp_bf16", *OF_SGD)}


def measure_machines(
    stand: Stand,
    groups: tuple[dist.ProcessGroup, dist.ProcessGroup],
    options: Options,
    costs: Costs,
    model: Model,
    mean: Mean,
) -> Machines:
    """Times what goes inside machines and between them, and what the ranks compute; predicts.

    Args:
        stand: all ranks.
        groups: the ranks of this machine, and those with this one's place in the machines.
        options: what was asked for.
        costs, model: where all ranks are alike.
        mean: gradients like those of the model.
    """
    inside, between = (TorchBackend(group) for group in groups)
    ranks, capacity = inside.world_size, model.bucket_bytes
    stands = [Stand(level, stand.control, stand.device) for level in (inside, between)]
    samples, together, lost = time_levels(stands[0], stands[1], options.max_mb)
    link = links(samples)
    busy = {verb: gap(link[verb], line, at_once(verb)) for verb, line in links(together).items()}
    model = as_nodes(model, ranks)
    costs = replace(
        costs,
        link={**costs.link, **link},
        busy={**costs.busy, **busy},
        loss={**costs.loss, **losses_by(lost)},
        onebit=onebit_on_machines(stand, model.params, capacity, model.compressor, ranks),
        means={
            name: mean.costs(spec, capacity, ranks, model.inside.get(name)) for name, spec in model.compressors.items()
        },
    )
    steps = predict(costs, model)
    fastest = min(model.compressors, key=lambda name: steps[name].seconds)
    took = mean.rehearsal(
        model.compressors[fastest], capacity, NodesBackend(stand.backend, inside, between), model.inside.get(fastest)
    )
    check = fastest, mean.params, took, rehearse_mean(costs, model, fastest, mean.shapes)
    return Machines(ranks, link, costs, model, steps, check)


def as_nodes(model: Model, ranks: int) -> Model:
    """``model`` on machines of ``ranks`` ranks: gradients also by those of ``TWICE``."""
    twice = {name: spec for name, (_, spec, _) in TWICE.items()}
    inside = {name: spec for name, (_, _, spec) in TWICE.items()}
    return replace(model, compressors={**model.compressors, **twice}, machine=ranks, inside=inside)


def time_levels(
    inside: Stand, between: Stand, max_mb: float
) -> tuple[dict[str, list[Sample]], dict[str, list[Sample]], dict[str, list[Sample]]]:
    """Seconds of what is sent, alone and several together, and of computing that is lost meanwhile."""
    samples, together, lost = {}, {}, {}
    for name in (*ON_MACHINES, "between_all_reduce"):
        level, verb = name.split("_", 1)
        stand = inside if level == "inside" else between
        sizes = sizes_up_to(max_mb) if name == FULL else small_sizes(max_mb)
        samples[name] = exchanges(stand, verb, sizes)
        together[name] = exchanges(stand, verb, sizes, at_once(name))
        lost[name] = losses(stand, verb, together[name])
    return samples, together, lost


def at_once(name: str) -> int:
    """Messages that are started together; those in full precision are large."""
    return 2 if name == FULL else UNDER_WAY


def better(steps: Mapping[str, Step], machines: Machines | None) -> tuple[dict[str, Step], set[str]]:
    """The steps that a recommendation is made among: each method where all ranks are alike, or with machines as nodes,
    if that makes it 5 % faster. And which of them are the latter."""
    best, nodes = dict(steps), set[str]()
    if machines is None:
        return best, nodes
    for name, step in machines.compressed.items():
        if name == "onebit_adam_int8":  # its warm-up is by the same ranks
            alike, on_nodes = (over_run({**some, "ddp": steps["ddp"]}, name)[0] for some in (steps, machines.steps))
            faster = on_nodes >= WORTH * alike
            best[WARM] = (machines.steps if faster else steps)["gradients_int8"]
        else:
            faster = name not in steps or step.seconds * WORTH <= steps[name].seconds
        if faster:
            best[name] = step
            nodes.add(name)
    return best, nodes
