"""All that was measured and predicted, as text and as JSON."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from commopt.probe.advice import CRITERION, NAMES, SHARDED, WORTH, rival
from commopt.probe.clock import Costs, Step
from commopt.probe.compressors import label
from commopt.probe.cut import Cut
from commopt.probe.figures import count, figure, rate, seconds, size
from commopt.probe.fit import Line, share_of_largest
from commopt.probe.inside import Inside
from commopt.probe.local import Local
from commopt.probe.machines import Machines
from commopt.probe.measure import Sample, columns
from commopt.probe.model import Model, adamw_seconds
from commopt.probe.options import Options
from commopt.probe.rounds import BOTH_WAYS, GATHERED, NEARLY_ALL, Round, fewer_from

WIDTH = 96
COLLECTIVES = {
    "all_reduce": "all-reduce, float32",
    "all_reduce_bf16": "all-reduce, bf16",
    "all_to_all": "all-to-all of bytes",
    "all_gather": "all-gather of bytes",
    "exchange": "to the next rank, float32",
}


@dataclass(frozen=True)
class Result:
    """The probe's findings.

    Attributes:
        options: what was asked for.
        place: what was measured, in words.
        world_size: ranks, of all machines.
        inside: what FSDP2 does inside a machine; None for a model that every rank holds whole.
        samples: times by collective, one at a time, and of "compressed_all_reduce".
        together: times by collective of several that are started together, shared out.
        losses: seconds of computing lost to a message, by collective.
        misfit: median relative error of each line, by collective.
        local: costs on the device.
        costs, model: what the predictions were made from.
        width: of the model, a transformer.
        steps: a predicted step, by method.
        rehearsal: seconds of a compressed OneBitAdam.step() of ``local.params`` parameters, measured and predicted.
        mean_rehearsal: of a compressed mean of gradients: the compressor, how many parameters, seconds measured and
            predicted.
        break_even: bit/s, by method; see :func:`commopt.probe.predict.break_evens`.
        run: how much faster than DDP a run is with 20 and with 15 % warm-up, by method.
        rounds: of local steps, by method.
        advice: the recommendation.
        cut: of a model that FSDP2 cuts over all ranks; None if that was not asked for.
        machines: with machines of several ranks as nodes; None if there are none.
    """

    options: Options
    place: str
    world_size: int
    inside: Inside | None
    samples: dict[str, list[Sample]]
    together: dict[str, list[Sample]]
    losses: dict[str, list[Sample]]
    misfit: dict[str, float]
    local: Local
    costs: Costs
    model: Model
    width: int
    steps: dict[str, Step]
    rehearsal: tuple[float, float]
    mean_rehearsal: tuple[str, int, float, float]
    break_even: dict[str, float | None]
    run: dict[str, tuple[float, float]]
    rounds: dict[str, Round]
    advice: str
    cut: Cut | None = None
    machines: Machines | None = None


def to_json(result: Result) -> str:
    """Everything. An infinite number is the string "inf"."""
    return json.dumps(_finite(asdict(result)), indent=2, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return "inf" if isinstance(value, float) and math.isinf(value) else value


def render(result: Result) -> str:
    """The report, at most 100 columns wide."""
    options, steps = result.options, result.steps
    versus = f"x as fast as {rival(options.shard)}"
    lines = [
        *_asked(result),
        "",
        f"{'network':25}{'latency':>11}{'next after':>12}{'bandwidth':>15}{'fit error':>11}{'lost to 1 MB':>15}",
        *(_network(result, verb) for verb in COLLECTIVES),
        "",
        f"{'message':>12}{'all-reduce':>14}{'compressed':>14}{'':>10}",
        *_sizes(result),
        "",
        *_device(result),
        "",
        f"{'a step of your model':30}{'seconds':>10}{'network':>10}{'MB sent':>10}{versus:>18}{'15-20 % warm-up':>18}",
        *(_step(result, name) for name in steps if name not in result.model.compressors),
        "",
        *_gradients(result),
        "",
        *_machines(result),
        *_rounds(result),
        "",
        *_check(result),
        *_break_even(result),
        "",
        "recommendation: " + result.advice,
        "",
        f"found by: {CRITERION}{' Machines are nodes for what that makes 5 % faster.' * bool(result.machines)}",
        *_cut(result),
    ]
    return "".join(
        part + "\n"
        for line in lines
        for part in (textwrap.wrap(line, WIDTH, break_on_hyphens=False) if len(line) > WIDTH else [line])
    )


def _asked(result: Result) -> list[str]:
    """Lines on what was measured, for which model."""
    options, inside, ranks = result.options, result.inside, result.world_size
    model, time = f"a model of {count(options.params)} parameters", f"{options.step_time:g} s per step on one"
    if inside is None:
        return [f"{ranks} ranks: {result.place}", f"{model}, {time} device"]
    shard = options.shard
    links = ", ".join(f"{verb.replace('_', '-')} {bandwidth(line)}" for verb, line in inside.link.items())
    return [
        f"{ranks} ranks, {shard} to a machine: {result.place}",
        f"{model}, cut over the {shard} ranks of a machine, {time} machine",
        f"inside a machine: {links}; a rank sends {figure(inside.nbytes / 1e6, 4)} MB a step to the others, which "
        f"takes {seconds(inside.seconds)} if nothing hides it (part of --step-time)",
        f"between machines, below: {shard} ranks of a machine at once, each to those with the same part of the model; "
        f"a machine sends {shard} x what a rank sends",
    ]


def _names(result: Result) -> dict[str, str]:
    return NAMES if result.inside is None else SHARDED


def _network(result: Result, verb: str) -> str:
    line, loss = result.costs.link[verb], result.costs.loss[verb]
    busy = result.costs.busy.get(verb)
    return (
        f"{COLLECTIVES[verb]:25}{seconds(line.latency):>11}{seconds(busy.latency) if busy else '':>12}"
        f"{bandwidth(line):>15}{result.misfit[verb]:>10.0%} {seconds(loss(2**20)):>15}"
    )


def _sizes(result: Result) -> list[str]:
    packed = {s.size: s.seconds for s in result.samples["compressed_all_reduce"]}
    return [
        f"{size(s.size):>12}{seconds(s.seconds):>14}{seconds(packed[s.size]):>14}{s.seconds / packed[s.size]:>8.2f} x"
        for s in result.samples["all_reduce"]
        if s.size in packed
    ]


def _device(result: Result) -> list[str]:
    kernels, params = result.local.kernels, result.model.params
    rates = ", ".join(f"{name.replace('_', ' ')} {figure(1e-9 / cost)}" for name, cost in kernels.items())
    ours = sum(result.local.onebit.values()) * params
    whose = "your model's update" if result.inside is None else "the update of a rank's part of your model"
    return [
        f"device: {rates} G elements/s",
        f"{whose}, no network: AdamW {seconds(result.local.adamw * params)}, "
        f"OneBitAdam with compression {seconds(ours)}",
    ]


def _step(result: Result, name: str) -> str:
    step, run = result.steps[name], result.run.get(name)
    over_run = "" if not run else f"{run[0]:.2f}" if run[0] == run[1] else f"{min(run):.2f}-{max(run):.2f}"
    return (
        f"{_names(result)[name]:30}{cells(10, step.seconds, step.communication, step.nbytes / 1e6)}"
        f"{result.steps['ddp'].seconds / step.seconds:>18.2f}{over_run:>18}"
    )


def _gradients(result: Result) -> list[str]:
    """Lines on what :func:`commopt.compress_gradients` would make of it, by compressor."""
    other = rival(result.options.shard)
    head = f"{'AdamW, gradients by':19}{'seconds':>10}{'computing':>10}{'wire':>10}{'MB sent':>9}{'x ' + other:>7}"
    return [
        f"{head}  faster than {other}",
        *(_gradient(result, name) for name in result.model.compressors),
        f"without warm-up, {'in ' + other if other == 'DDP' else 'between machines, FSDP2 inside'}; low rank as of a "
        f"transformer {result.width} wide (--width)",
    ]


def _gradient(result: Result, name: str) -> str:
    step, per = result.steps[name], result.costs.means[name]
    computing = sum(per.values()) * result.model.params
    speed = result.steps["ddp"].seconds / step.seconds
    return (
        f"{label(name, result.model.compressors):19}{cells(10, step.seconds, computing, step.wire)}"
        f"{cells(9, step.nbytes / 1e6)}{speed:>7.2f}  {verdict(speed, result.break_even[name])}"
    )


def _machines(result: Result) -> list[str]:
    """Lines on what it would be with machines as nodes."""
    found = result.machines
    if found is None:
        return []
    ddp = result.steps["ddp"].seconds
    links = {verb: bandwidth(line) for verb, line in found.link.items()}
    head = f"{'machines as nodes':30}{'seconds':>10}{'network':>10}{'MB out':>10}{'MB inside':>11}{'x DDP':>10}"
    rows = (
        f"{NAMES.get(name) or label(name, found.model.compressors):30}"
        f"{cells(10, step.seconds, step.communication, (step.nbytes - step.inside) / 1e6)}"
        f"{cells(11, step.inside / 1e6)}{ddp / step.seconds:>10.2f}"
        for name, step in found.compressed.items()
    )
    return [
        head,
        *rows,
        f"means inside a machine of {found.ranks} ranks in float32, if nothing else is said (all-to-all "
        f"{links['inside_all_to_all']}, then "
        f"all-gather of bytes {links['inside_all_gather']}), compressed between machines, all ranks of each at once "
        f"(all-to-all {links['between_all_to_all']}, all-gather {links['between_all_gather']}; of low rank and blocks "
        f"all-reduce {links['between_all_reduce']})",
        "",
    ]


def _rounds(result: Result) -> list[str]:
    """Lines on what rounds of local steps would cost."""
    head = f"{'rounds of local steps':36}{'a round':>10}{'MB sent':>10}{f'{NEARLY_ALL:.0%} computing':>17}"
    return [
        head,
        *(
            f"{name:36}{seconds(each.seconds):>10}{cells(10, each.nbytes / 1e6)}{f' from period {each.period}':>17}"
            for name, each in result.rounds.items()
        ),
        _fewer_bytes(result),
        "each learns less in a step than averages of gradients do: it is for networks on which these are too much",
    ]


def _fewer_bytes(result: Result) -> str:
    """From how many ranks on two compressed ways receive less than what is gathered from all."""
    ranks = fewer_from(result.model.params)
    when = "with no number of ranks" if ranks is None else f"from {ranks} ranks on (here {result.costs.world_size})"
    return f"{BOTH_WAYS}: receives fewer bytes than {GATHERED} {when}"


def _cut(result: Result) -> list[str]:
    """Lines on what FSDP2 over all ranks would make of it."""
    cut = result.cut
    if cut is None:
        return []
    plain = cut.steps["fsdp"].seconds
    alike: list[str] = []
    nodes: list[str] = []
    for name, step in cut.steps.items():
        way = cut.ways[name]
        (nodes if way.nodes else alike).append(
            f"{way.words:46}{cells(10, step.seconds, step.communication, (step.nbytes - step.inside) / 1e6)}"
            f"{plain / step.seconds:>10.2f}"
        )
    if nodes:
        nodes.insert(
            0,
            "the same with process_group=mesh, machines as nodes; MB but for what is compressed inside a machine:",
        )
    return [
        "",
        f"{'cut over all ranks by FSDP2':46}{'seconds':>10}{'network':>10}{'MB sent':>10}{'x FSDP2':>10}",
        *alike,
        *nodes,
        "a module for each layer; nothing of the network is hidden by computing",
        "",
        "recommendation, cut over all ranks: " + cut.advice,
    ]


def verdict(speed: float, break_even: float | None) -> str:
    """Verdict on whether a method that is ``speed`` times as fast as DDP is faster, and below which bandwidth it is."""
    here = "yes" if speed >= WORTH else "hardly" if speed > 1 else "NO, SLOWER"
    if break_even is None:
        return f"{here}; rate unknown"
    if math.isinf(break_even):
        return f"{here}; at any rate"
    return f"{here}; below {rate(break_even)}" if break_even > 0 else f"{here}; at no rate"


def _check(result: Result) -> list[str]:
    measured, predicted = result.rehearsal
    out = [
        f"check: OneBitAdam.step() of {count(result.local.params)} parameters took {seconds(measured)} over this "
        f"network, {seconds(predicted)} by these figures"
    ]
    name, params, measured, predicted = result.mean_rehearsal
    out.append(
        f"check: a mean of the gradients of {count(params)} parameters by {label(name, result.model.compressors)} took "
        f"{seconds(measured)} over this network, {seconds(predicted)} by these figures"
    )
    if result.machines is not None:
        name, params, measured, predicted = result.machines.rehearsal
        out.append(
            f"check: the same by {label(name, result.machines.model.compressors)} with machines as nodes took "
            f"{seconds(measured)}, {seconds(predicted)} by these figures"
        )
    out += off_the_line(result.costs.link, result.samples)
    if adamw_seconds(result.costs, result.model) >= result.options.step_time:
        out.append(
            f"note: AdamW alone takes {seconds(result.local.adamw * result.model.params)} here, no less than "
            f"--step-time={result.options.step_time:g}: was that measured on another device?"
        )
    return out


OFF = 1.5
"""Times that the largest message may take of what its line says: large ones are most of what is predicted."""


def off_the_line(link: Mapping[str, Line], samples: Mapping[str, Sequence[Sample]]) -> list[str]:
    """Notes on collectives whose largest message is far off their line, as where a network loses packets, or slows
    down what is larger than a burst."""
    out = []
    for verb, line in link.items():
        times = share_of_largest(line, *columns(samples[verb]))
        if not 1 / OFF < times < OFF:
            out.append(
                f"note: {COLLECTIVES[verb]}: {size(max(s.size for s in samples[verb]))}, the largest message, took "
                f"{figure(times, 2)} times as long as its line says, and what is predicted of large ones may be as "
                "far off: run it again when nothing else runs, with more --max-mb; or the network loses packets"
            )
    return out


def _break_even(result: Result) -> list[str]:
    now = rate(result.costs.link["all_reduce"].bits_per_second)
    out = [
        f"break-even, as bandwidth of an all-reduce (now {now}); a step is faster than {rival(result.options.shard)}'s"
    ]
    return out + [
        f"  {NAMES[name]:26}{_below(value, result)}" for name, value in result.break_even.items() if name in NAMES
    ]


def _below(value: float | None, result: Result) -> str:
    if value is None:
        return "unknown: no message was large enough to tell the bandwidth"
    if math.isinf(value):
        return f"at any: what {rival(result.options.shard)} copies, adds and updates costs more than compressing"
    return f"below {rate(value)}" if value > 0 else "at no bandwidth"


def cells(width: int, *values: float) -> str:
    """Figures in columns of that width, 9 characters at least: of tens of microseconds three digits."""
    return "".join(f"{figure(value, 4, 7):>{width}}" for value in values)


def bandwidth(line: Line) -> str:
    """Bandwidth of a line in words."""
    return rate(line.bits_per_second)
