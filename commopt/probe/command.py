"""The ranks meet, agree on what was asked for, and measure; rank 0 reports."""

from __future__ import annotations

import contextlib
import gc
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from commopt.agreement.setup import agree_on_setup
from commopt.bucket import bucket_bytes
from commopt.comm import CollectiveError, TorchBackend, gather_number, wait
from commopt.compress import Sign
from commopt.probe.advice import OURS, STEPS, cannot_tell, over_run, recommend
from commopt.probe.clock import Costs, Step
from commopt.probe.compressors import TWICE, compressors
from commopt.probe.cut import measure_cut
from commopt.probe.fit import misfit
from commopt.probe.inside import grouped, measure_inside
from commopt.probe.local import Local, measure_local
from commopt.probe.machines import Machines, better, measure_machines
from commopt.probe.means import Mean
from commopt.probe.measure import (
    UNDER_WAY,
    Sample,
    Stand,
    all_reduces,
    columns,
    compressed,
    every_second,
    exchanges,
    gap,
    links,
    losses,
    losses_by,
    sizes_up_to,
    small_sizes,
)  # fmt: skip
from commopt.probe.messages import modules_of, sample_of, shapes_of, usual_width
from commopt.probe.model import Model
from commopt.probe.options import HOW_TO_START, PATIENCE, Options, ProbeError, make_parser, parse
from commopt.probe.predict import break_evens, predict, rehearse, rehearse_mean
from commopt.probe.report import COLLECTIVES, Result, render, to_json
from commopt.probe.rounds import Round, predict_rounds

VERBS = ("all_reduce", "all_to_all", "all_gather")
"""Collectives whose bandwidths a recommendation goes by."""


def probe(argv: Sequence[str]) -> str:
    """``commopt probe``; returns the report, on rank 0.

    Raises:
        ProbeError: on every rank: for a mistake in the arguments of any of them, before anything is measured; and if
            the ranks cannot meet, or one of them is lost.
    """
    if "--help" in argv or "-h" in argv:
        return make_parser().format_help()
    options, mistake = None, None
    try:
        options = parse(argv)
        check_place(options)
    except ProbeError as caught:
        mistake = str(caught)
    if "RANK" not in os.environ:
        raise ProbeError(mistake or HOW_TO_START)
    with meet(mistake) as control:
        mistake = disagreement(options, mistake, control)
        result = measure_all(options, control) if options is not None and mistake is None else None
    gc.collect()  # a process group in some cycle would keep its threads, and they can abort the exit of the process
    if result is None or options is None:
        raise ProbeError(mistake)
    if control.rank != 0:
        return ""
    if options.json is not None:
        try:
            Path(options.json).write_text(to_json(result))
        except OSError as error:
            sys.stdout.write(render(result))  # what was measured is not lost
            raise ProbeError(f"--json={options.json}: {error.strerror}") from None
    return render(result)


def disagreement(options: Options | None, mistake: str | None, control: TorchBackend) -> str | None:
    """Describes what is wrong with the arguments of some rank; every rank hears of it. None if all is well.

    Args:
        options: this rank's; None if they could not be read.
        mistake: what is wrong with this rank's.
        control: the ranks.
    """
    try:
        facts = {"arguments": repr(options)}
        agree_on_setup(control, torch.device("cpu"), facts, ProbeError(mistake) if mistake else None, str(options))
    except ValueError as refused:
        refused.__traceback__ = None  # it is in a cycle with ``control``
        return str(refused)
    return None


def check_place(options: Options) -> None:
    """Raises ProbeError for what cannot work in this process."""
    for name, least in (("LOCAL_WORLD_SIZE", 1), ("GROUP_RANK", 0)):
        given = os.environ.get(name, "1")
        if not given.isdecimal() or int(given) < least:
            raise ProbeError(f"{name}={given!r} is not allowed, torchrun sets a whole number >= {least}")
    ranks = int(os.environ.get("WORLD_SIZE", 2 * options.shard))
    if ranks < 2:
        raise ProbeError(f"WORLD_SIZE={ranks}: there is nobody to talk to; {HOW_TO_START}")
    if ranks % options.shard or ranks == options.shard:
        raise ProbeError(
            f"--shard: {options.shard} is not allowed with {ranks} ranks: they must make up 2 or more whole replicas"
        )
    if options.device == "cuda" and int(os.environ.get("LOCAL_RANK", "0")) >= torch.cuda.device_count():
        here = torch.cuda.device_count()
        raise ProbeError(f"LOCAL_RANK={os.environ['LOCAL_RANK']}, but this machine has {here} GPUs: one process each")
    if options.json is not None and os.environ.get("RANK", "0") == "0":
        folder = Path(options.json).resolve().parent
        if not os.access(folder, os.W_OK) or Path(options.json).is_dir():
            raise ProbeError(f"--json: cannot write {options.json!r}; expected a file in a folder that exists")


@contextlib.contextmanager
def meet(mistake: str | None) -> Iterator[TorchBackend]:
    """The ranks of torchrun's environment, over Gloo; they part together. ``mistake`` is this rank's, if they cannot
    meet to hear of it."""
    try:
        dist.init_process_group("gloo", timeout=PATIENCE)
    except (RuntimeError, ValueError) as failed:
        raise ProbeError(mistake or f"the ranks cannot meet: {in_one_line(failed)}") from failed
    try:
        yield TorchBackend()
        wait(dist.barrier(async_op=True), "the end of the probe")
    except CollectiveError as lost:
        raise ProbeError(f"a rank was lost or the network failed: {in_one_line(lost)}") from lost
    finally:
        dist.destroy_process_group()


def in_one_line(error: Exception) -> str:
    """Its words."""
    return " ".join(str(error).split())


def measure_all(options: Options, control: TorchBackend) -> Result:
    """Measures, fits and predicts; the same on every rank."""
    machine = ranks_of_a_machine(options, control)
    groups = grouped(control.world_size, machine, options, PATIENCE) if machine > 1 else None
    stand = make_stand(options, control, groups)
    inside = measure_inside(stand, options, groups[0]) if groups is not None and options.shard > 1 else None
    compressor = Sign(block=options.block)
    held, last = (-(-count // options.shard) for count in (options.params, options.last_params))
    capacity = bucket_bytes(None, [torch.empty(held, device="meta")], options.device)
    samples = time_collectives(stand, options.max_mb, compressor)
    together = {verb: exchanges(stand, verb, small_sizes(options.max_mb), UNDER_WAY) for verb in VERBS}
    by_size = {**together, "exchange": samples["exchange"]}
    lost = {verb: losses(stand, verb, some) for verb, some in by_size.items()}
    local = measure_local(stand, held, capacity, compressor)
    width = options.width or usual_width(options.params - options.last_params)
    model = Model(
        held, options.step_time, last, capacity, compressor,
        shapes_of(options.params, options.last_params, width, options.shard), options.shard,
        stand.has_channels, compressors(options.block),
    )  # fmt: skip
    mean = Mean(sample_of(model.shapes, local.params), stand)
    means = {name: mean.costs(spec, capacity) for name, spec in model.compressors.items()}
    costs = fit_costs(stand.world_size, samples, together, lost, local, means, copies=options.shard == 1)
    steps, rounds = predict(costs, model), predict_rounds(costs, model.params, options.step_time, options.shard)
    fastest = min(model.compressors, key=lambda name: steps[name].seconds)
    machines = None
    if groups is not None and options.shard == 1:
        machines = measure_machines(stand, groups, options, costs, model, mean)
    mesh = f'init_device_mesh("{options.device}", ({control.world_size // machine}, {machine}))'
    cut = None
    if options.fsdp:
        modules = modules_of(options.params, options.last_params, width)
        cut = measure_cut(stand, options, machines.costs if machines else costs, model, modules, machine, mesh)
    took = mean.rehearsal(model.compressors[fastest], capacity, stand.backend)
    return Result(
        options=options,
        place=place(options),
        world_size=control.world_size,
        inside=inside,
        samples=samples,
        together=together,
        losses=lost,
        misfit={verb: misfit(line, *columns(samples[verb])) for verb, line in costs.link.items()},
        local=local,
        costs=costs,
        model=model,
        width=width,
        steps=steps,
        rehearsal=(local.rehearsal, rehearse(costs, model, local.params).seconds),
        mean_rehearsal=(fastest, mean.params, took, rehearse_mean(costs, model, fastest, mean.shapes)),
        break_even=break_evens(costs, model, (*STEPS, *model.compressors)),
        run={name: over_run(steps, name) for name in OURS},
        rounds=rounds,
        advice=advise(options, samples, costs, model, steps, rounds, machines, mesh),
        cut=cut,
        machines=machines,
    )


def make_stand(
    options: Options, control: TorchBackend, groups: tuple[dist.ProcessGroup, dist.ProcessGroup] | None
) -> Stand:
    """The ranks and devices to measure: all ranks or, with a model that is cut, those that hold the same part of it."""
    device = place_device(options)
    if options.shard > 1:
        assert groups is not None
        return Stand(TorchBackend(groups[1]), control, device)
    if options.device == "cpu":
        return Stand(control, control, device)
    return Stand(TorchBackend(dist.new_group(backend=options.backend, timeout=PATIENCE)), control, device)


def time_collectives(stand: Stand, max_mb: float, compressor: Sign) -> dict[str, list[Sample]]:
    """Times by collective, and of "compressed_all_reduce"."""
    sizes, small = sizes_up_to(max_mb), small_sizes(max_mb)
    return {
        "all_reduce": all_reduces(stand, sizes),
        "all_reduce_bf16": all_reduces(stand, every_second(sizes), torch.bfloat16),
        "all_to_all": exchanges(stand, "all_to_all", small),
        "all_gather": exchanges(stand, "all_gather", small),
        "exchange": exchanges(stand, "exchange", sizes),
        "compressed_all_reduce": compressed(stand, sizes, compressor),
    }


def advise(
    options: Options,
    samples: dict[str, list[Sample]],
    costs: Costs,
    model: Model,
    steps: dict[str, Step],
    rounds: dict[str, Round],
    machines: Machines | None,
    mesh: str,
) -> str:
    """The recommendation, or why there is none; ``mesh``: how one writes machines as nodes."""
    best, nodes = better(steps, machines)
    used = {verb: costs.link[verb] for verb in VERBS}
    if machines is not None and nodes:
        used |= machines.link
    largest = max(sample.size for sample in samples["all_reduce"])
    specs = {**model.compressors, **{name: spec for name, (_, spec, _) in TWICE.items() if name in best}}
    return cannot_tell(used, largest, min(model.bucket_bytes, 4 * model.params)) or recommend(
        best, options.backend == "nccl", options.shard, specs, rounds, nodes, mesh
    )


def place_device(options: Options) -> torch.device:
    """Device on which this rank computes."""
    if options.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def ranks_of_a_machine(options: Options, control: TorchBackend) -> int:
    """Those that hold a model together or, by torchrun's environment, that each machine runs; 1 where there is one
    machine, they do not run as many as each other, or their ranks do not follow each other."""
    if options.shard > 1:
        return options.shard
    here, ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), control.world_size
    alike = set(gather_number(control, here)) == {here} and ranks % here == 0
    machines = gather_number(control, int(os.environ.get("GROUP_RANK", control.rank // here)))
    in_a_row = all(machines[r] == machines[r // here * here] for r in range(ranks)) if alike else False
    return here if in_a_row and len(set(machines)) == ranks // here > 1 else 1


def fit_costs(
    world_size: int,
    samples: dict[str, list[Sample]],
    together: dict[str, list[Sample]],
    lost: dict[str, list[Sample]],
    local: Local,
    means: dict[str, dict[str, float]],
    copies: bool,
) -> Costs:
    """Lines through what was measured. Without ``copies``, gradients are sent from where FSDP2 has them.

    No large all-reduces were ``together``: they have the latency of the small ones that were, and the bandwidth of one.
    """
    link, loss = links(samples), losses_by(lost)
    busy = {verb: gap(link[verb], line) for verb, line in links(together).items()}
    small = busy["all_reduce"]
    for verb in ("all_reduce", "all_reduce_bf16"):
        alone = link[verb]
        busy[verb] = replace(alone, latency=min(alone.latency, small.latency))
    return Costs(
        world_size=world_size,
        link={verb: link[verb] for verb in COLLECTIVES},
        loss={verb: loss[verb.removesuffix("_bf16")] for verb in COLLECTIVES},
        adamw=local.adamw,
        copies=local.copies if copies else dict.fromkeys(local.copies, 0.0),
        onebit=local.onebit,
        means=means,
        sgd=local.sgd,
        busy=busy,
    )


def place(options: Options) -> str:
    """Describes what was measured."""
    if options.device == "cuda":
        return f"{torch.cuda.get_device_name()}, {options.backend}, torch {torch.__version__}"
    return f"{platform.machine()} CPU with {torch.get_num_threads()} threads, gloo, torch {torch.__version__}"
