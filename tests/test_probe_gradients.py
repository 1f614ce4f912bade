"""The probe on compressed gradients: what is sent, to the byte; what is predicted, and what is recommended."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from probing import AGREED, BUCKET, NOTHING, SMALL, VERBS, Alone, Given, costs, model
from worlds import on_threads

import commopt
from commopt.comm import ThreadBackend
from commopt.compress import ACP, Compressor, Int8, PowerSGD, Sign
from commopt.gradients import Differences
from commopt.gradients.all_gather import GroupDifferences
from commopt.gradients.watching import ROW_BYTES
from commopt.optim.policies import SyncPolicy, VariancePolicy, count_steps
from commopt.probe.advice import TOO_COARSE, over_run, recommend
from commopt.probe.clock import Costs, Step
from commopt.probe.compressors import COMPRESSORS, FINE, compressors, error, label
from commopt.probe.cut import WAYS, costs_of, predict_cut, recommend_cut
from commopt.probe.fit import Line
from commopt.probe.means import Mean, Staged
from commopt.probe.messages import (
    FLAT,
    Shapes,
    exchanges,
    modules_of,
    presence_bytes,
    sample_of,
    shapes_of,
    turns,
    usual_width,
)
from commopt.probe.model import Model
from commopt.probe.options import ProbeError, parse
from commopt.probe.predict import METHODS, break_evens, ddp, gradients, methods, predict, rehearse_mean
from commopt.probe.report import verdict
from commopt.probe.rounds import Round


def large(step_time: float = 0.5) -> Model:
    return model(shapes_of(100_000_000, 0, 768), step_time, 25 * 2**20)


# what is sent ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 3])
def test_bytes_and_collectives_are_those_that_compressed_gradients_count(world_size: int) -> None:
    """Of every compressor, at every turn, in a step that the probe predicts."""

    def sent(backend: ThreadBackend) -> dict[str, list[tuple[int, int]]]:
        out = {}
        for name, spec in compressors(2048).items():
            net = Given(SMALL)
            handle = commopt.compress_gradients(net, spec, backend=backend, bucket_mb=BUCKET / 2**20)
            out[name] = []
            for _ in range(turns(spec)):
                net.backward()
                step = handle.comm_stats()["step"]
                out[name].append((step["bytes"], step["calls"]))
            handle.remove()
        return out

    steps = predict(costs(world_size=world_size), model())
    for rank in on_threads(world_size, sent):
        for name, counted in rank.items():
            spec = COMPRESSORS[name][1]
            planned = [exchanges(SMALL, spec, world_size, BUCKET, turn) for turn in range(turns(spec))]
            collectives = [sum(len(e.sent) for bucket in buckets for e in bucket) for buckets in planned]
            assert [calls for _, calls in counted] == [1 + n for n in collectives], name
            assert steps[name].nbytes == sum(nbytes for nbytes, _ in counted) // len(counted), name
    assert any(len(bucket) > 1 for bucket in exchanges(SMALL, Int8(), world_size, BUCKET))  # chunks


def test_bytes_of_a_sharded_model() -> None:
    """What a rank has of every tensor goes to the other replica; and what all four ranks tell each other."""
    pieces = shapes_of(110_013, 9_999, 64, shard=2)

    def sent(backend: ThreadBackend) -> dict[str, int]:
        out = {}
        for name, (_, spec) in COMPRESSORS.items():
            net, sharded = Given(pieces), backend.sharded(2)
            sharded.stages = [0] * 4  # the parts are of the same parameters
            handle = commopt.compress_gradients(net, spec, backend=sharded, bucket_mb=BUCKET / 2**20)
            out[name] = 0
            for _ in range(turns(spec)):
                net.backward()
                out[name] += handle.comm_stats()["step"]["bytes"]
        return out

    steps = predict(costs(), model(pieces, shard=2))
    assert (
        on_threads(4, sent) == [{name: turns(spec) * steps[name].nbytes for name, (_, spec) in COMPRESSORS.items()}] * 4
    )


def test_bytes_are_those_measured_on_a_network() -> None:
    """By the NICs of the hosts, which count headers and acknowledgements too: 66 bytes each, at most one of either for
    each segment, and for the notices that Gloo sends before and after each message."""
    figures = Path(__file__).parent.parent / "benchmarks" / "network_gradients.json"
    for run in json.loads(figures.read_text())["runs"]:
        params, last, hosts = run["parameters"], run["vocab"] * run["width"], run["hosts"]
        assert usual_width(params - last) == run["width"]
        shapes = shapes_of(params, last, run["width"])
        there = costs(world_size=hosts)
        steps = predict(there, replace(model(shapes, bucket_bytes=4 * params // 8), last_params=last))
        measured = {name: m for name, m in run["methods"].items() if name in COMPRESSORS}
        assert len(measured) >= 6
        for name, m in measured.items():
            spec = COMPRESSORS[name][1]
            buckets = exchanges(shapes, spec, hosts, 4 * params // 8)
            assert m["collectives"] == 1 + sum(len(e.sent) for bucket in buckets for e in bucket), name
            segments = steps[name].nbytes / 1448 + 3 * m["collectives"] * 2 * (hosts - 1)
            assert 0 < m["bytes_per_host"] - steps[name].nbytes < 2 * 66 * segments, name
        modules = modules_of(params, last, run["width"])
        free = dict.fromkeys(("fsdp_all_gather", "fsdp_reduce_scatter"), NOTHING)
        for name, way in (("fsdp_int8", "fsdp_int8_int8"), ("fsdp_int4", "fsdp_int4_differences")):
            if name in run["methods"]:
                step = predict_cut(there, free, model(shapes), modules, WAYS[way], {"again": 0.0})
                assert 1 < run["methods"][name]["bytes_per_host"] / step.nbytes < 1.03, name


@pytest.mark.parametrize(
    ("params", "last", "width"), [(5_273_088, 2**21, 256), (100_013, 9_999, 64), (25, 0, 64), (700, 700, 64)]
)
@pytest.mark.parametrize("shard", [1, 2])
def test_the_tensors_have_all_parameters(params: int, last: int, width: int, shard: int) -> None:
    whole = shapes_of(params, last, width)
    assert sum(math.prod(shape) for shape in whole) == params
    pieces = shapes_of(params, last, width, shard)
    assert [shape[1:] for shape in pieces] == [shape[1:] for shape in whole]
    assert all(shard * (n - 1) < all_rows <= shard * n for (n, *_), (all_rows, *_) in zip(pieces, whole))


def test_usual_widths() -> None:
    assert usual_width(85_000_000) == 768  # GPT-2 small
    assert usual_width(302_000_000) in range(960, 1217)  # BERT-Large has 1024
    assert usual_width(10) == 64


def test_a_sample_has_the_first_gradients() -> None:
    assert sample_of(((9, 5), (7,), (4, 6), (3,)), 16) == ((3, 6), (3,))
    assert sample_of(((9, 5), (7,)), 1000) == ((9, 5), (7,))


# what it costs on the device ------------------------------------------------------------------------------------------


def test_a_mean_is_timed_by_what_follows() -> None:
    """Every message of every compressor is seen, and the gradients are what they were before each mean."""
    mean = Mean(SMALL, Alone(3))
    assert mean.params == 110_013
    for name, spec in compressors(2048).items():
        sent = [exchange for bucket in exchanges(SMALL, spec, 3, BUCKET) for exchange in bucket]
        stages = FLAT if isinstance(spec, Compressor) else AGREED[: 1 if name == "gradients_acp4" else 2]
        per = mean.costs(spec, BUCKET)
        assert per.keys() == {"presence", *stages, "end"}, name
        assert all(seconds > 0 for seconds in per.values()), name

        mirrors = Staged(3, lambda: None, sent)
        handle = mean.handle(spec, BUCKET, mirrors)
        for _ in range(turns(spec)):
            mean.bring()
            mirrors.reset()
            assert sum(map(len, mirrors.stages.values())) == sum(len(exchange.sent) for exchange in sent), name
            mean.take(handle)
            assert not any(mirrors.stages.values()), name
        assert not any(torch.equal(g, brought) for g, brought in zip(mean.grads, mean.brought) if g.dim() > 1), name
        handle.remove()
        mean.bring()
        assert all(map(torch.equal, mean.grads, mean.brought))


# predictions ----------------------------------------------------------------------------------------------------------


def test_on_a_slow_link_only_bytes_count() -> None:
    slow = costs(Line(1e-4, 8e-9 / 1e-4), per=1e-10)
    steps = predict(slow, large())
    for name in COMPRESSORS:
        assert steps["ddp"].seconds / steps[name].seconds == pytest.approx(
            steps["ddp"].nbytes / steps[name].nbytes, rel=0.02
        ), name
    assert steps["ddp"].nbytes / steps["gradients_int8"].nbytes == pytest.approx(32 / 8.25, rel=1e-3)
    both, one = (steps[name].nbytes for name in ("gradients_powersgd4", "gradients_acp4"))
    whole = 4 * sum(math.prod(shape) for shape in large().shapes if len(shape) == 1)
    assert both - whole == pytest.approx(2 * (one - whole), rel=0.01)  # one factor of two; the rest is sent anyway


@pytest.mark.parametrize(
    ("name", "messages"), [("gradients_int8", 3), ("gradients_powersgd4", 3), ("gradients_acp4", 2)]
)
def test_messages_of_a_bucket_follow_each_other(name: str, messages: int) -> None:
    """Presence, there, and, but for ACP, back; then nothing is left to wait for."""
    one = model(shapes_of(49_984, 0, 64), bucket_bytes=2**20)
    step = predict(costs(Line(0.25, 0.0)), one)[name]
    assert step.seconds == step.communication == step.wire == pytest.approx(0.25 * messages)


def test_computing_is_counted_once_for_each_parameter() -> None:
    for name, spec in compressors(2048).items():
        phases = 2 if isinstance(spec, ACP) else 3
        step = gradients(costs(per=1e-9, copies=1e-9), large(), name)
        assert step.seconds == pytest.approx(0.5 + 0.1 * phases + 0.1, rel=0.01), name  # and DDP's copies
        assert step.communication == pytest.approx(0, abs=1e-9)


def test_backward_hides_what_is_sent_early_but_not_the_last_bucket() -> None:
    fast, whole = costs(Line(0.0, 8e-9 / 20)), large()
    early, late = (gradients(fast, replace(whole, early=early), "gradients_int8") for early in (True, False))
    assert late.communication == pytest.approx(late.wire)
    assert early.communication < 0.3 * late.communication
    assert early.wire == pytest.approx(late.wire)
    last = gradients(fast, replace(whole, last_params=90_000_000), "gradients_int8")  # one bucket of DDP's
    assert last.communication > 0.85 * last.wire


def test_a_sharded_model_starts_when_its_gradients_are_there() -> None:
    """And its ranks, of all parts, also tell each other whether all means are finite."""
    link = Line(0.0, 8e-9 / 20)
    whole, cut = (gradients(costs(link), replace(large(), shard=shard), "gradients_bfloat16") for shard in (1, 2))
    assert cut.communication < whole.communication
    tensors = len(large().shapes)
    assert presence_bytes(large().shapes, 4, False) == 3 * tensors
    assert cut.nbytes - whole.nbytes == 2 * tensors + 3 - ROW_BYTES


def test_break_even_of_a_compressor() -> None:
    dear = costs(Line(1e-4, 8e-9), per=3e-9)
    at = break_evens(dear, large(), ["gradients_int8"])["gradients_int8"]
    assert at is not None
    assert 1e7 < at < 1e11
    step, ddp = (methods(large())[name] for name in ("gradients_int8", "ddp"))
    for factor, pays in ((0.8, True), (1.25, False)):
        there = replace(dear, link=dict.fromkeys(VERBS, Line(1e-4, 8 / (at * factor))))
        assert (step(there, large()).seconds < ddp(there, large()).seconds) is pays
    too_dear = costs(Line(1e-4, 8e-9), per=1.0)
    assert break_evens(too_dear, large(), ["gradients_int8"]) == {"gradients_int8": 0}


def test_break_evens_play_a_step_of_ddp_once_for_each_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many methods are compared, which are found where each by itself is."""
    dear, names, played = costs(Line(1e-4, 8e-9), per=3e-9), ["onebit_adam", "gradients_int8", "gradients_int4"], []
    alone = {name: break_evens(dear, large(), [name])[name] for name in names}

    def counted(there: Costs, model: Model) -> Step:
        played.append(there.link["all_reduce"].per_byte)
        return ddp(there, model)

    monkeypatch.setattr("commopt.probe.predict.ddp", counted)
    assert break_evens(dear, large(), names) == alone
    assert len(set(alone.values())) == 3
    assert 2 + len(names) <= len(played) == len(set(played))


def test_a_mean_is_rehearsed_without_the_rest_of_a_step() -> None:
    link = Line(0.25, 0.0)
    seconds = rehearse_mean(costs(link, per=1e-9, copies=1.0), large(), "gradients_sign", ((64, 64), (64,)))
    assert seconds == pytest.approx(3 * 0.25 + 2 * 4160e-9)  # it is compressed while the ranks ask who has what


def test_what_fsdp2_cuts_over_all_ranks_is_computed_once_for_each_parameter() -> None:
    """And update of a rank's own part; backward computes nothing for differences but a copy."""
    net, modules = large(), modules_of(100_000_000, 0, 768)
    free = {f"fsdp_{verb}": Line(0.0, 0.0) for verb in ("all_gather", "reduce_scatter")}
    per = {"gradients all_to_all": 1e-9, "gradients end": 2e-9, "weights fsdp_all_gather": 3e-9, "weights end": 4e-9,
           "again": 5e-9}  # fmt: skip
    there = costs(Line(0.0, 0.0))
    update = there.adamw * net.params
    layers = sum(math.prod(shape) for shapes in modules[1:] for shape in shapes)
    for name, way in WAYS.items():
        mine = {what: seconds for what, seconds in per.items() if what.startswith("gradients") and way.gradients}
        mine |= {what: seconds for what, seconds in per.items() if not what.startswith("gradients") and way.weights}
        step = predict_cut(there, free, net, modules, way, mine)
        work = net.step_time - update + update / there.world_size
        if way.gradients is not None:
            work += 3e-9 * net.params
        if way.weights is not None:
            work += 7e-9 * net.params + (5e-9 if isinstance(way.weights, Differences) else 7e-9) * layers
        assert step.seconds == pytest.approx(work, rel=1e-3), name
        assert step.communication == pytest.approx(0, abs=1e-9)


def test_differences_are_timed_as_they_follow_weights_that_move(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded, whole = [], GroupDifferences._decoded

    def counted(self: Any, *given: Any) -> Any:
        decoded.append(1)
        return whole(self, *given)

    monkeypatch.setattr(GroupDifferences, "_decoded", counted)
    costs_of(WAYS["fsdp_int4_differences"], 4096, Alone(3))
    assert len(decoded) >= 2  # all but the first


def test_an_outermost_module_without_parameters_sends_nothing() -> None:
    way, line = WAYS["fsdp"], Line(1e-3, 0.0)
    link = {"fsdp_all_gather": line, "fsdp_reduce_scatter": line}
    layer: Shapes = ((64, 64),)
    alone, inside = (
        predict_cut(costs(line), link, large(), modules, way, {}) for modules in ([layer, layer], [(), layer, layer])
    )
    assert inside.wire == pytest.approx(alone.wire + 1e-3)  # the first layer is gathered again, as it is not outermost


def test_compressing_what_fsdp2_sends_is_timed() -> None:
    for name, way in WAYS.items():
        per = costs_of(way, 4096, Alone(3))
        verbs = {"gradients all_to_all", "gradients end"} if way.gradients is not None else set()
        if way.weights is not None:
            verbs |= {"weights fsdp_all_gather", "weights end", "again"}
        assert per.keys() == verbs, name
        assert all(seconds > 0 for seconds in per.values())


@pytest.mark.parametrize(
    ("speeds", "words"),
    [
        ({"fsdp_int4": 1.04}, "leave FSDP2 as it is: Int4\\(\\), the fastest, would be 1.04 x"),
        ({"fsdp_int8": 1.5, "fsdp_int4": 1.55}, "compress_gradients\\(model, Int8\\(\\)\\): .* 1.50 x as fast.$"),
        (
            {"fsdp_int8": 1.1, "fsdp_int4_differences": 1.2},
            "compress_gradients\\(model, Int4\\(\\), weights=Differences\\(\\)\\): .* 1.20 x .* little",
        ),
        (
            {"fsdp_int8": 1.5, "fsdp_topk": 1.9, "fsdp_sign": 2.0},
            "compress_gradients\\(model, Int8\\(\\)\\): .* 1.50 x as fast. Faster, and .* of them: Sign\\(\\) 2.00 x.$",
        ),
        (
            {"fsdp_int2": 1.3},
            "leave FSDP2 as it is: .* 0.50 x as fast. Faster, and learning less .*: Int2\\(\\) 1.30 x.$",
        ),
    ],
)
def test_of_fsdp2_too_what_loses_more_must_gain_more(speeds: dict[str, float], words: str) -> None:
    steps = {name: Step(1 / speeds.get(name, 0.5 if name != "fsdp" else 1.0), 0.0, 0) for name in WAYS}
    assert re.match(words, recommend_cut(steps)), recommend_cut(steps)


# recommendations ------------------------------------------------------------------------------------------------------


def advice(bf16: bool = False, shard: int = 1, rounds: float | None = None, **speeds: float) -> str:
    """With speeds of a step, as multiples of DDP's; all others have 0.1. ``rounds``: seconds of a round."""
    names = {*METHODS, *COMPRESSORS} - {"ddp"}
    steps = {name: Step(1 / speeds.get(name, 0.1), 0.0, 0) for name in names}
    apart = {} if rounds is None else {"DiLoCo": Round(rounds, 0, 1)}
    return recommend(steps | {"ddp": Step(1.0, 0.25, 0)}, bf16, shard, compressors(2048), apart)


@pytest.mark.parametrize(
    ("speeds", "words"),
    [
        ({}, "do not compress: communication is 25% of a step of DDP"),
        ({"gradients_int4": 1.04}, "do not compress: .* AdamW on Int4\\(\\), the fastest, would be 1.04 x as fast.$"),
        # and what loses very much is named beside
        ({"gradients_sign": 9.0}, "do not compress: .* Faster, .* takes more of them: AdamW on Sign\\(\\) 9.00 x.$"),
        (
            {"gradients_int8": 1.06},
            "use AdamW on Int8\\(\\) \\(compress_gradients\\): .* 1.06 x .* little for a predic",
        ),
        # what loses more must gain 5 %
        ({"gradients_bfloat16": 1.5, "gradients_int8": 1.57, "gradients_float8": 1.57}, "use AdamW on BFloat16\\(\\)"),
        ({"gradients_bfloat16": 1.5, "gradients_int8": 1.58, "gradients_float8": 1.6}, "use AdamW on Int8\\(\\)"),
        ({"gradients_int8": 2.0, "gradients_int4": 2.09}, "use AdamW on Int8\\(\\)"),
        ({"gradients_int4": 4.0, "gradients_acp4": 4.1, "gradients_topk": 4.1}, "use AdamW on Int4\\(\\)"),
        # a run of OneBitAdam is a fifth warm-up: 5 times as fast is 1 / (0.2 + 0.8 / 5) = 2.78
        ({"onebit_adam": 5.0, "gradients_sign": 2.9}, "use OneBitAdam: .* 5.00 x .* warm-up 2.78 to 3.12 x.$"),
        (
            {"onebit_adam": 5.0, "gradients_sign": 3.0, "gradients_topk": 3.5},
            "use OneBitAdam: .* 2.78 to 3.12 x. Faster, .*: AdamW on TopK\\(\\) 3.50 x.$",
        ),
        ({"onebit_adam": 5.0, "gradients_int8": 2.7}, "use AdamW on Int8\\(\\) .* with OneBitAdam would be 2.78 x"),
        # by Int8() that is 1 / (0.2 / 2.5 + 0.8 / 5) = 4.17
        (
            {"onebit_adam": 5.0, "onebit_adam_int8": 5.0, "gradients_int8": 2.5},
            "use OneBitAdam\\(warmup_compressor=Int8\\(\\)\\): .* 5.00 x .* warm-up 4.17 to 4.35 x",
        ),
        ({"onebit_adam": 5.0, "zero_one_adam": 2.9}, "use OneBitAdam: .* 2.78 to 3.12 x"),
        (
            {"onebit_adam": 5.0, "zero_one_adam": 3.0},
            "use ZeroOneAdam.*: on average, a step .* 3.00 x as fast, from",
        ),
        (
            {"onebit_adam": 5.0, "gradients_int8": 2.0, "gradients_int4": 9.0},
            "use AdamW on Int4\\(\\) .* 9.00 x .* without warm-up. It loses some .* compare losses. "
            "Runs that lose less: with AdamW on Int8\\(\\) 2.00 x and with OneBitAdam 2.78 x.$",
        ),
    ],
)
def test_what_loses_more_must_gain_more(speeds: dict[str, float], words: str) -> None:
    assert re.match(words, advice(**speeds)), advice(**speeds)


def test_the_bf16_hook_is_one_of_them_where_there_is_one() -> None:
    assert advice(bf16=True, ddp_bf16=1.5, gradients_int8=1.55).startswith("do not compress to 1 bit: DDP with bf16")
    assert advice(bf16=False, ddp_bf16=1.5, gradients_int8=1.55).startswith("use AdamW on Int8()")
    assert "HSDP takes 1 s" in advice(shard=4, gradients_int8=2.0)


def test_sgd_is_named_beside_where_it_is_faster() -> None:
    said = advice(gradients_int8=3.0, cser=3.2, qsparse=4.0)
    assert said.endswith(" so that it takes more of them: SGD by QSparseLocalSGD 4.00 x.")
    assert "Faster" not in advice(gradients_int8=3.2, cser=3.3)


def test_rounds_are_named_beside_where_they_are_faster() -> None:
    """30 steps of a 5th of DDP's and a round of 3 s: 1 / (0.2 + 0.1)."""
    said = advice(gradients_int8=3.0, gradients_sign=4.0, none=5.0, rounds=3.0)
    assert said.endswith(
        " Faster, and learning less in a step, so that it takes more of them: AdamW on Sign() 4.00 x, "
        "rounds of 30 local steps (DiLoCo) 3.33 x."
    )
    assert "Faster" not in advice(gradients_int8=3.2, none=5.0, rounds=3.0)


def test_a_run_of_zero_one_adam_is_the_mean_of_its_steps() -> None:
    """Of 10,000 steps 111 are exact, by the policies, and none is local."""
    model, slow = large(), costs(Line(1e-4, 8e-9))
    steps = predict(slow, model)
    counts = count_steps(VariancePolicy(16, 2000), SyncPolicy(), 10_000)
    assert counts == (111, 9889, 0)
    mean = (111 * steps["ddp"].seconds + 9889 * steps["onebit_adam"].seconds) / 10_000
    assert steps["zero_one_adam"].seconds == pytest.approx(mean)
    assert over_run(steps, "zero_one_adam")[0] == pytest.approx(steps["ddp"].seconds / mean)


def test_what_is_coarse_follows_from_the_errors() -> None:
    errors = {name: error(spec) for name, (_, spec) in COMPRESSORS.items()}
    fine = {name for name, lost in errors.items() if lost < FINE}
    assert {"gradients_bfloat16", "gradients_int8", "gradients_float8"} <= fine
    too_coarse = {name for name, lost in errors.items() if lost >= TOO_COARSE}
    assert errors.keys() - fine - too_coarse == {"gradients_int4"}
    order = ["bfloat16", "int8", "float8", "int4", "int2", "sign", "topk", "acp4"]
    values = [errors[f"gradients_{name}"] for name in order]
    assert values == sorted(values)
    assert error(PowerSGD(4)) == 1


def test_the_table_says_what_is_slower() -> None:
    assert verdict(0.99, 2e8) == "NO, SLOWER; below 200 Mbit/s"
    assert verdict(0.5, 0.0) == "NO, SLOWER; at no rate"
    assert verdict(1.04, 1.1e9) == "hardly; below 1.1 Gbit/s"
    assert verdict(1.2, math.inf) == "yes; at any rate"
    assert verdict(1.2, None) == "yes; rate unknown"


def test_the_block_of_signs_is_the_one_asked_for() -> None:
    specs = compressors(128)
    assert specs["gradients_sign"] == Sign(block=128)
    assert label("gradients_sign", specs) == "Sign(128)"
    assert label("gradients_sign", compressors(2048)) == "Sign()"
    assert specs["gradients_int8"] == Int8()


def test_the_width_is_an_option() -> None:
    words = ["--params=1M", "--step-time=1", "--device=cpu"]
    assert parse(words).width is None
    assert parse([*words, "--width=1K"]).width == 1000
    with pytest.raises(ProbeError, match="--width: 0 is not allowed, it must be at least 1"):
        parse([*words, "--width=0"])
