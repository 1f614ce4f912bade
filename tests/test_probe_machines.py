"""The probe on machines as nodes: what is sent on both levels, to the byte; what is predicted and recommended."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from probing import AGREED, BUCKET, NOTHING, SMALL, VERBS, Alone, Given, costs, model, on_ranks
from worlds import on_threads

import commopt
from commopt import OneBitAdam
from commopt.comm import ThreadBackend
from commopt.compress import Int8
from commopt.optim.policies import SyncPolicy, VariancePolicy, count_steps
from commopt.probe import command
from commopt.probe.advice import OF_SGD, over_run, recommend
from commopt.probe.clock import Clock, Costs, Step
from commopt.probe.compressors import COMPRESSORS, TWICE, compressors, label
from commopt.probe.cut import ON_NODES, WAYS, costs_of, gathered, predict_cut, recommend_cut, reduced
from commopt.probe.fit import Line
from commopt.probe.local import onebit_on_machines
from commopt.probe.machines import Machines, as_nodes, better
from commopt.probe.means import Mean
from commopt.probe.measure import Stand
from commopt.probe.messages import FLAT, ON_MACHINES, exchanges, shapes_of, turns
from commopt.probe.options import ProbeError, parse
from commopt.probe.predict import FROZEN, RUN, Messages, one_mean, predict

MEANS_ON_MACHINES = ("inside_all_to_all", "between_all_reduce", "inside_all_gather")
STAGES = {
    "gradients_int8": ON_MACHINES,
    "gradients_int4_int8": ON_MACHINES,
    "gradients_acp4": MEANS_ON_MACHINES,
    "gradients_powersgd4": (*MEANS_ON_MACHINES, *(f"{verb} 2" for verb in MEANS_ON_MACHINES)),
    "gradients_blocks": (*MEANS_ON_MACHINES[:2], "between_all_reduce 2", *MEANS_ON_MACHINES[2:]),
}
"""What follows what is computed for a mean, with machines as nodes."""
EXAMPLES = [(2, 4), (2, 6), (3, 6)]
"""Ranks of a machine, and all ranks."""


def on_machines(link: dict[str, Line], world_size: int, per: float = 0.0) -> Costs:
    """What is not in ``link`` takes no time; computing takes ``per`` seconds a parameter before each message."""
    stages = dict.fromkeys((*chain.from_iterable(STAGES.values()), *FLAT, *AGREED, "agreement", "presence", "end"), per)
    verbs = *VERBS, *ON_MACHINES, *MEANS_ON_MACHINES
    return replace(
        costs(world_size=world_size),
        link={**dict.fromkeys(verbs, NOTHING), **link},
        loss=dict.fromkeys(verbs, NOTHING),
        adamw=0.0,
        onebit=stages,
        means=dict.fromkeys((*COMPRESSORS, *TWICE), stages),
    )


@pytest.mark.long
@pytest.mark.parametrize(("machine", "ranks"), EXAMPLES)
def test_bytes_on_both_levels_are_those_that_compressed_gradients_count(machine: int, ranks: int) -> None:
    nodes = as_nodes(model(), machine)

    def sent(backend: ThreadBackend) -> dict[str, list[tuple[int, int]]]:
        out = {}
        for name, spec in nodes.compressors.items():
            net = Given(SMALL)
            handle = commopt.compress_gradients(
                net, spec, backend=backend.nodes(machine), bucket_mb=BUCKET / 2**20, inside=nodes.inside.get(name)
            )
            out[name] = []
            for _ in range(turns(spec)):
                net.backward()
                step = handle.comm_stats()["step"]
                out[name].append((step["bytes"], step["intra_node"]["bytes"]))
            handle.remove()
        return out

    given = on_machines({}, ranks)
    steps = {
        name: [one_mean(given, nodes, name, turn) for turn in range(turns(spec))]
        for name, spec in nodes.compressors.items()
    }
    assert set(nodes.compressors) == {*COMPRESSORS, *TWICE}
    expected = {name: [(step.nbytes - step.inside, step.inside) for step in several] for name, several in steps.items()}
    assert on_threads(ranks, sent) == [expected] * ranks
    chunked = exchanges(SMALL, Int8(), ranks, BUCKET, 0, machine)
    assert any(len(bucket) > 1 for bucket in chunked), "a bucket goes in chunks"


@pytest.mark.parametrize(("machine", "ranks"), [(1, 3), *EXAMPLES])
@pytest.mark.parametrize("overlap", [False, True])
def test_bytes_on_both_levels_are_those_of_onebit_adam(machine: int, ranks: int, overlap: bool) -> None:
    """Of a model with several buckets, some of which go in chunks; and how many collectives that is."""

    def sent(backend: ThreadBackend) -> tuple[int, int]:
        net = Given(SMALL)
        nodes = backend if machine == 1 else backend.nodes(machine)
        optimizer = OneBitAdam(
            net.parameters(), freeze_step=1, bucket_mb=BUCKET / 2**20, overlap=overlap, backend=nodes
        )
        for _ in range(2):
            net.backward()
            optimizer.step()
        step = optimizer.comm_stats()["step"]
        return step["bytes"], step.get("intra_node", {"bytes": 0})["bytes"]

    nodes = model() if machine == 1 else as_nodes(model(), machine)
    there = costs(world_size=ranks) if machine == 1 else on_machines({}, ranks)
    step = predict(there, nodes)["onebit_adam_overlap" if overlap else "onebit_adam"]
    assert on_threads(ranks, sent) == [(step.nbytes - step.inside, step.inside)] * ranks
    assert len(exchanges(SMALL, nodes.compressor, ranks, BUCKET)) > 3


@pytest.mark.parametrize("name", sorted(STAGES))
def test_an_exchange_waits_for_each_of_its_collectives(name: str) -> None:
    """Of one message: the sum of all that it computes and sends."""
    nodes, stages = as_nodes(model(), 2), STAGES[name]
    link = {verb: Line(0.001 * (i + 1), 1e-8 * (i + 1)) for i, verb in enumerate(("between_all_reduce", *ON_MACHINES))}
    per = {stage: 1e-9 * 2**i for i, stage in enumerate((*stages, "end"))}
    messages = Messages(Clock(on_machines(link, 4)), per)
    shape = (128, 128)
    ((exchange,),) = exchanges((shape,), nodes.compressors[name], 4, 10**6, machine=2, inside=nodes.inside.get(name))
    assert exchange.stages == [*stages]
    messages.launch([exchange])
    messages.arrive()
    messages.end()
    seconds = sum(link[verb](nbytes) for verb, nbytes in exchange.sent) + sum(per.values()) * 128 * 128
    assert messages.clock.step().seconds == pytest.approx(seconds, rel=1e-12)


def test_a_bucket_in_chunks_goes_out_inside_a_machine_as_one_message() -> None:
    """No chunk is compressed before all of that has come."""
    at = on_machines({ON_MACHINES[0]: Line(1.0, 0.0)}, 4)
    (several,) = exchanges(((40_000,),), Int8(), 4, BUCKET, machine=2)
    assert len(several) > 2
    messages = Messages(Clock(at), dict.fromkeys((*ON_MACHINES, "end"), 0.0))
    messages.launch(several)
    messages.turn(0.5)
    assert [number for _, number, _ in messages.under_way] == [0] * len(several)
    messages.arrive()
    assert messages.clock.step().seconds == 1.0
    assert messages.clock.inside == sum(nbytes for e in several for verb, nbytes in e.sent if "inside" in verb)


def test_exact_steps_of_zero_one_adam_leave_a_machine_as_parts() -> None:
    """2 machines of 8: each rank has an 8th of the model to average with one other."""
    ranks, machine, params = 16, 8, 50_000_000
    net = replace(model(shapes_of(params, 0, 768), 0.0, 25 * 2**20), params=params)
    step = predict(on_machines({}, ranks), as_nodes(net, machine))["zero_one_adam"]
    counts = count_steps(VariancePolicy(stop=FROZEN), SyncPolicy(), RUN)
    row = as_nodes(net, machine).compressor.nbytes(params // ranks)
    out = counts.exact * 4 * params // machine + counts.compressed * 2 * row
    inside = counts.exact * 2 * 4 * params * 7 // 8 + counts.compressed * (4 * params * 7 // 8 + 7 * 2 * row)
    assert step.nbytes - step.inside == pytest.approx(out / RUN, rel=0.01)
    assert step.inside == pytest.approx(inside / RUN, rel=0.01)


def test_a_slow_network_between_machines_costs_a_part_of_what_it_costs_all_ranks_alike() -> None:
    """4 machines of 8 ranks: to 3 others with a rank's place goes what goes to 31 others without nodes."""
    ranks, machine, slow, fast = 32, 8, 8 / 25e9 * 8, 8 / 2e12
    net = replace(model(shapes_of(50_000_000, 0, 768), 0.0, 25 * 2**20), params=50_000_000)
    alike = replace(costs(Line(0.0, slow), ranks), adamw=0.0, onebit=on_machines({}, ranks).onebit)
    levels = {verb: Line(0.0, fast if verb.startswith("inside") else slow) for verb in ON_MACHINES}
    steps = predict(alike, net)
    nodes = predict(on_machines({**dict.fromkeys(VERBS, Line(0.0, slow)), **levels}, ranks), as_nodes(net, machine))
    assert nodes["ddp"].seconds == steps["ddp"].seconds
    for name in ("gradients_int8", "gradients_int4", "onebit_adam"):
        between = nodes[name].seconds - nodes[name].inside * fast
        assert between / steps[name].seconds == pytest.approx(3 / 31, rel=5e-3), name  # and an agreement


def test_of_each_method_the_faster_way_is_recommended_and_its_mesh_is_named() -> None:
    def step(seconds: float) -> Step:
        return Step(seconds, seconds, 0)

    names = [*COMPRESSORS, "onebit_adam", "onebit_adam_overlap", "onebit_adam_int8", "zero_one_adam"]
    others = dict.fromkeys(["ddp", "ddp_bf16", *OF_SGD], step(2.0))
    steps = {**dict.fromkeys(names, step(2.0)), **others, "none": step(0.1)}
    found = {**steps, **dict.fromkeys([*names, *TWICE], step(1.99)), "gradients_int8": step(0.5), "cser": step(0.1)}
    machines = Machines(8, {}, costs(), as_nodes(model(), 8), found, ("gradients_int8", 1, 1.0, 1.0))
    best, nodes = better(steps, machines)
    assert nodes == {"gradients_int8", "onebit_adam_int8", *TWICE}, "of the latter the warm-up is faster"
    assert best["gradients_int8"] == step(0.5)
    assert best["gradients_int4"] == step(2.0), "a gain below 5 % is none"
    assert best["cser"] == step(2.0), "it knows no nodes"
    specs = {**compressors(2048), **{name: spec for name, (_, spec, _) in TWICE.items()}}
    mesh = 'init_device_mesh("cuda", (4, 8))'
    said = recommend(best, True, 1, specs, nodes=nodes, mesh=mesh)
    assert said.startswith("use AdamW on Int8(), machines as nodes (compress_gradients): a compressed step takes 0.5 s")
    assert said.endswith('Machines as nodes: process_group=init_device_mesh("cuda", (4, 8)).')
    assert "nodes" not in recommend(steps, True, 1, compressors(2048))
    beside = {**steps, "gradients_int8": step(1.0), "gradients_topk": step(0.4)}
    said = recommend(beside, True, 1, compressors(2048), nodes={"gradients_topk"}, mesh=mesh)
    assert said.startswith("use AdamW on Int8() (compress_gradients): ")
    assert said.endswith("AdamW on TopK(), machines as nodes 5.00 x. Machines as nodes: process_group=" + mesh + ".")
    assert better(steps, None) == (steps, set())
    assert label("gradients_int4_int8", specs) == "Int4(), inside=Int8()"


def test_a_warm_up_and_the_steps_after_it_have_the_same_ranks() -> None:
    def level(onebit: float, int8: float) -> dict[str, Step]:
        seconds = {"ddp": 3.0, "onebit_adam_int8": onebit, "gradients_int8": int8}
        return {name: Step(value, 0.0, 0) for name, value in seconds.items()}

    for there, faster in ((level(0.55, 0.9), False), (level(0.48, 0.5), True)):  # alike: 20 % of 1.3 s, 80 % of 0.45
        steps = level(0.45, 1.3)
        machines = Machines(8, {}, costs(), as_nodes(model(), 8), there, ("gradients_int8", 1, 1.0, 1.0))
        best, nodes = better(steps, machines)
        assert nodes == ({"gradients_int8", "onebit_adam_int8"} if faster else {"gradients_int8"})
        assert best["onebit_adam_int8"] == (there if faster else steps)["onebit_adam_int8"]
        used = there if faster else steps
        gain = 3.0 / (0.2 * used["gradients_int8"].seconds + 0.8 * used["onebit_adam_int8"].seconds)
        assert over_run(best, "onebit_adam_int8")[0] == pytest.approx(gain)


@pytest.mark.parametrize(
    ("here", "machine", "expected"),
    [
        ([2, 2, 2, 2], [0, 0, 1, 1], 2),
        ([2, 2, 2, 2], None, 2),
        ([2, 2, 2, 2], [0, 1, 0, 1], 1),  # numbered in turn
        ([3, 3, 3, 1], [0, 0, 0, 1], 1),
        ([2, 2, 1, 1], [0, 0, 1, 2], 1),
        ([4, 4, 4, 4], [0, 0, 0, 0], 1),
        ([1, 1, 1, 1], [0, 1, 2, 3], 1),
        ([8, 8, 8, 8], [0, 0, 0, 0], 1),
        (None, None, 1),
    ],
)
def test_machines_are_nodes_if_all_run_as_many_ranks_in_a_row(
    here: list[int] | None, machine: list[int] | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = parse(["--params=1M", "--step-time=1", "--device=cpu"])

    def found(rank: int) -> int:
        for name, values in (("LOCAL_WORLD_SIZE", here), ("GROUP_RANK", machine)):
            monkeypatch.delenv(name, raising=False)
            if values is not None:
                monkeypatch.setenv(name, str(values[rank]))
        rows = iter([here or [1] * 4, machine or [r // (here or [1] * 4)[rank] for r in range(4)]])

        def gather(_: object, number: int) -> list[int]:
            row = next(rows)
            assert row[rank] == number
            return row

        monkeypatch.setattr(command, "gather_number", gather)
        return command.ranks_of_a_machine(options, SimpleNamespace(rank=rank, world_size=4))  # type: ignore[arg-type]

    assert [found(rank) for rank in range(4)] == [expected] * 4


@pytest.mark.parametrize(
    ("name", "value"), [("LOCAL_WORLD_SIZE", "abc"), ("LOCAL_WORLD_SIZE", "0"), ("GROUP_RANK", "-1")]
)
def test_what_no_launcher_sets_is_refused(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv(name, value)
    with pytest.raises(ProbeError, match=f"{name}='{value}' is not allowed, torchrun sets a whole number >= "):
        command.check_place(parse(["--params=1M", "--step-time=1", "--device=cpu"]))


@pytest.mark.long
@pytest.mark.parametrize("machine", [2, 4])
def test_mirrored_machines_note_what_each_level_waits_for(machine: int) -> None:
    """What is computed before each collective, of the optimizer and of a mean, and nothing else."""

    def measured(backend: ThreadBackend) -> list[set[str]]:
        stand = Stand(backend, backend, torch.device("cpu"))  # type: ignore[arg-type]
        stand.largest = list  # type: ignore[method-assign, assignment]
        mean = Mean(SMALL, stand)
        found = [mean.costs(nodes.compressors[name], BUCKET, machine, nodes.inside.get(name)) for name in STAGES]
        found.append(onebit_on_machines(stand, 40_000, BUCKET, commopt.compress.Sign(), machine))
        assert all(seconds >= 0 for each in found for seconds in each.values())
        return [set(each) for each in found]

    nodes = as_nodes(model(), machine)
    (*means, optimizer), *_ = on_threads(8, measured)
    assert means == [{"presence", *stages, "end"} for stages in STAGES.values()]
    assert optimizer == {"agreement", *ON_MACHINES, "end"}


@pytest.mark.parametrize("name", sorted(ON_NODES))
def test_compressing_what_fsdp2_sends_on_two_levels_is_timed_and_predicted(name: str) -> None:
    """Of one module: what is computed before each collective, and the sum of that and of all that is sent."""
    way, ranks, machine = ON_NODES[name], 8, 4
    verbs = {"gradients inside_all_to_all", "gradients between_all_to_all", "gradients end"}
    if way.weights is not None:
        verbs |= {"weights between_all_gather", "weights inside_all_gather", "weights end", "again"}
    per = costs_of(way, 4096, Alone(ranks), machine)
    assert per.keys() == verbs
    assert all(seconds > 0 for seconds in per.values())
    link = {verb: Line(0.0, 1e-9 * (i + 1)) for i, verb in enumerate(ON_MACHINES)}
    fsdp = dict.fromkeys(("fsdp_all_gather", "fsdp_reduce_scatter"), NOTHING)
    net, n = model(((8 * 4096,),)), 4096
    step = predict_cut(on_machines(link, ranks), fsdp, net, [net.shapes], way, dict.fromkeys(per, 1e-9), machine)
    sent = reduced(way, n, ranks, machine) + gathered(way, n, ranks, machine)
    computed = len(verbs - {"again"}) * 1e-9 * ranks * n
    expected = computed + sum({**link, **fsdp}[verb](nbytes) for verb, nbytes in sent)
    assert step.seconds == pytest.approx(expected, rel=1e-12)
    assert step.inside == sum(nbytes for verb, nbytes in sent if verb.startswith("inside"))


def test_with_nodes_what_fsdp2_sends_is_recommended_with_its_mesh() -> None:
    ways = {**WAYS, **ON_NODES}
    steps = {name: Step(0.5 if name == "fsdp_twice" else 1.0, 0.0, 0) for name in ways}
    said = recommend_cut(steps, ways, 'init_device_mesh("cuda", (4, 8))')
    call = "compress_gradients(model, Int4(), inside=Int8(), weights=Differences(), process_group=mesh)"
    assert said.startswith(f"{call}: a step takes 0.5 s where FSDP2 takes 1 s, 2.00 x as fast.")
    assert said.endswith('Here mesh is init_device_mesh("cuda", (4, 8)), and fully_shard(model) takes none.')


@pytest.mark.long
def test_machines_as_nodes_are_in_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """4 ranks, of which torchrun would say that each machine runs 2."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    figures = tmp_path / "all.json"
    results = on_ranks(*[["--params=40K", "--step-time=0.01", "--max-mb=0.0625", "--fsdp", f"--json={figures}"]] * 4)
    assert [code for code, _, _ in results] == [0] * 4, results
    report = " ".join(results[0][1].split())
    for words in (
        "machines as nodes", "means inside a machine of 2 ranks in float32", "with machines as nodes took",
        "the same with process_group=mesh, machines as nodes; MB but for what is compressed inside a machine: Int8()",
    ):  # fmt: skip
        assert words in report, words
    table = results[0][1].split("machines as nodes")[1].split("means inside")[0]
    rows = {line[:30].strip(): line[30:].split() for line in table.splitlines()}
    assert float(rows["Int4(), inside=Int8()"][3]) < float(rows["Int4()"][3]), "less goes inside a machine"
    assert float(rows["ACP(4)"][2]) < float(rows["PowerSGD(4)"][2]), "one factor in a step"
    found = json.loads(figures.read_text())["machines"]
    assert found["ranks"] == 2
    assert set(found["link"]) == {*ON_MACHINES, *MEANS_ON_MACHINES}


@pytest.mark.long
def test_one_machine_is_no_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    results = on_ranks(*[["--params=40K", "--step-time=0.01", "--max-mb=0.0625"]] * 2)
    assert [code for code, _, _ in results] == [0] * 2, results
    assert "nodes" not in results[0][1]
