"""FSDP2's reduce-scatters and all-gathers, compressed, in processes over Gloo."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

import fsdp_scenes
import pytest
import torch
from pool import Pool
from worlds import needs_fsdp2, same_bits

from commopt.compress import Int4, Int8, PowerSGD, Sign, TopBlocks
from commopt.gradients import Differences, LoCo
from commopt.probe.clock import Costs
from commopt.probe.cut import ON_NODES, WAYS, predict_cut
from commopt.probe.fit import Line
from commopt.probe.messages import ON_MACHINES, columns_of, modules_of
from commopt.probe.model import Model
from commopt.state.places import put_together

pytestmark = needs_fsdp2


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    processes = Pool(4)
    yield processes
    processes.close()


def test_with_the_identity_they_are_fsdps_own(pool):
    """Uneven and empty pieces, parameters without gradient, a factor of FSDP's, bfloat16; and when removed."""
    for found in pool.over_gloo(3, fsdp_scenes.as_fsdps_own):
        assert [found[f"apart {step}"] < 1e-14 for step in range(6)] == [True] * 6
        assert found["half"] < 1e-2  # a bfloat16 has 8 bits
        assert found["both"] < 1e-2
        assert found["reduced in full"] < 1e-6
        assert found["offloaded"] < 1e-6
        assert found["steps"] == 5
        assert found["ratio"] == pytest.approx(0.5, abs=0.01)  # of float64


@pytest.mark.long
def test_residuals_follow_the_scale_of_the_loss(pool):
    ways = {
        "as it is": {"compressor": Int4(block=8)},
        "in 8 bits": {"compressor": Int4(block=8), "feedback": LoCo()},
        "on nodes": {"compressor": Int4(block=8), "inside": Int8(block=8)},
    }
    for found in pool.over_gloo(4, fsdp_scenes.scaled, ways):
        assert found == dict.fromkeys(ways, [True] * 6)


def test_between_replicas_hooks_on_parameters_give_what_fsdps_all_reduce_gives(pool):
    """By any policy, several groups, and gradients that have added up: in one mean, of one bucket."""
    for found in pool.over_gloo(4, fsdp_scenes.beside_hsdp):
        for (name, _), (apart, steps, calls) in found.items():
            assert apart < (1e-2 if name in ("half", "both") else 1e-6)
            assert steps == 1
            assert calls == 4  # who has which gradients, out, back, and whether all is finite


@pytest.mark.long(but="PowerSGD(rank=2, min_compression=2.0, seed=0)-{}")
@pytest.mark.parametrize(
    ("compressor", "options"),
    [(Int4(block=8), {"inside": Int8(block=8), "weights": Int8(block=8)}), (PowerSGD(2), {})],
    ids=repr,
)
def test_a_model_on_both_dimensions_is_as_one_on_the_shards(pool, compressor, options):
    """HSDP: FSDP leaves the replicas to us, and takes them back."""
    for found in pool.over_gloo(4, fsdp_scenes.on_both_dimensions, compressor, options):
        assert found == dict.fromkeys(found, True)


@pytest.mark.long(but="2")
@pytest.mark.parametrize("machine", [1, 2])
def test_bytes_are_those_that_the_probe_predicts(pool, machine):
    """Of every way; what is not compressed is FSDP's, and not counted here."""
    modules, ranks = modules_of(120_013, 9_999, 64), 3 if machine == 1 else 4
    assert len(modules) == 3
    verbs = ("all_to_all", "all_gather", "fsdp_all_gather", "fsdp_reduce_scatter", *ON_MACHINES)
    flat = {verb: Line(0.0, 1e-9) for verb in verbs}
    costs = Costs(ranks, flat, flat, 0.0, {}, {})
    model = Model(120_013, 1.0, 9_999, 2**20, Sign())
    compressed = {name: way for name, way in (WAYS if machine == 1 else ON_NODES).items() if way.gradients is not None}
    gathered = sum(columns_of(shapes, ranks) for shapes in [*modules, *modules[1:]])
    for found in pool.over_gloo(ranks, fsdp_scenes.as_probed, modules, compressed):
        for name, way in compressed.items():
            step = predict_cut(costs, flat, model, modules, way, {"again": 0.0}, machine)
            out, inside = found[name]
            assert step.inside == inside, name
            assert step.nbytes - inside == out + (4 * (ranks - 1) * gathered if way.weights is None else 0), name
            assert step.communication == pytest.approx(1e-9 * step.nbytes)
    plain = predict_cut(costs, flat, model, modules, WAYS["fsdp"], {})
    assert plain.nbytes == 4 * (ranks - 1) * (gathered + sum(columns_of(shapes, ranks) for shapes in modules))


def test_gradients_add_up_before_they_are_averaged(pool):
    """And no_sync() leaves what was off before."""
    for found in pool.over_gloo(2, fsdp_scenes.accumulated):
        assert found["still off"]
        for way in ("handle", "fsdp"):
            assert found[way][1] == 4
            for g, h in zip(found[way][0], found["sum"][0]):
                assert g is None or torch.allclose(g, h, rtol=1e-9, atol=1e-12)


def test_on_two_levels(pool):
    """SDP4Bit's: 8 bits inside, rotated 4 between, 4-bit differences of weights; each row leaves a node once."""
    ranks = pool.over_gloo(4, fsdp_scenes.two_levels)
    rows = 2 * 8 + 2, 10 * 7 + 10 + 2 * 40 + 2 + 7  # of the outermost module and of the block, padded
    of = {fsdp_scenes.BETWEEN: 1, fsdp_scenes.INSIDE: 2}
    reduced = {c: sum(c.nbytes(k * n, torch.float64) for n in rows) for c, k in of.items()}
    too = 2 + 3  # of parameters that have no gradient
    gathered = sum(fsdp_scenes.WEIGHTS.nbytes(n, torch.float64) + 16 for n in (rows[0] + too, rows[1]))
    for found in ranks:
        assert found["apart"] < 1e-14
        step = found["stats"]["step"]
        assert step["by_collective"]["all_to_all"]["bytes"] == reduced[fsdp_scenes.BETWEEN]
        assert step["intra_node"]["by_collective"]["all_to_all"]["bytes"] == reduced[fsdp_scenes.INSIDE]
        assert step["by_collective"]["all_gather"]["bytes"] == gathered + 3  # and whether all is finite
        assert step["intra_node"]["by_collective"]["all_gather"]["bytes"] == 2 * gathered
        assert 0 < found["error"] < 0.1
        assert torch.equal(found["y"], ranks[0]["y"])
        assert not any(found["finite"])


def test_on_two_levels_the_residuals_are_what_is_missing(pool):
    """Full precision inside, and feedback between."""
    for found in pool.over_gloo(4, fsdp_scenes.conserved, Int4(block=8), True, True):
        for came, residuals, true in zip(found["came"], found["residuals"], found["true"]):
            assert not isinstance(true, torch.Tensor) or torch.allclose(came + residuals, true, rtol=0, atol=1e-12)


@pytest.mark.parametrize("compressor", fsdp_scenes.COMPRESSORS, ids=repr)
def test_what_came_out_and_the_residuals_is_what_went_in(pool, compressor):
    """Also of a parameter that has a gradient now and then, and of uneven pieces; and the bytes."""
    for found in pool.over_gloo(3, fsdp_scenes.conserved, compressor, True):
        for came, residuals, true in zip(found["came"], found["residuals"], found["true"]):
            assert not isinstance(true, torch.Tensor) or torch.allclose(came + residuals, true, rtol=0, atol=1e-12)
        rows = {True: (3 * 8 + 3, 14 * 7 + 14 + 3 * 40 + 3 + 7), False: (27, 14 * 7 + 14 + 3 * 40 + 3)}
        for stats, too in ((found["stats"], True), (found["fewer"], False)):
            expected = sum(2 * compressor.nbytes(n, torch.float64) for n in rows[too]) + 2  # and whether all is finite
            assert stats["step"]["bytes"] == expected
            assert stats["fp32_bytes"] == 4 * 2 * sum(rows[too])


@pytest.mark.long
def test_the_mean_of_many_equal_steps_tends_to_the_gradient(pool):
    assert max(pool.over_gloo(3, fsdp_scenes.many_equal_steps)) < 0.05


@pytest.mark.parametrize(
    ("feedback", "assign"), [*((feedback, False) for feedback in fsdp_scenes.FEEDBACKS), (True, True)], ids=repr
)
def test_what_is_not_finite_is_so_everywhere_and_leaves_no_trace(pool, feedback, assign):
    for found in pool.over_gloo(3, fsdp_scenes.not_finite, feedback, assign):
        assert found["same"]
        assert found["again"]
        assert not any(found["finite"])
        assert (found["stats"]["steps"], found["stats"]["not_finite"]) == (3, 1)


@pytest.mark.parametrize(
    ("feedback", "weights"),
    [(True, None), (LoCo(0.5, 3), Int4(block=8)), (False, Differences(Int4(block=8)))],
    ids=repr,
)
def test_a_run_that_was_stopped_continues_to_the_bit(pool, feedback, weights):
    assert pool.over_gloo(2, fsdp_scenes.resumed, feedback, weights) == [True, True]


@pytest.mark.long(but="True")
@pytest.mark.parametrize("feedback", [True, LoCo(0.5, 3)], ids=repr)
def test_a_run_on_two_levels_that_was_stopped_continues_to_the_bit(pool, feedback):
    assert pool.over_gloo(4, fsdp_scenes.resumed, feedback, Differences(Int4(block=8)), Int8(block=8)) == [True] * 4


@pytest.mark.long(but="False-False")
@pytest.mark.parametrize(("saved", "loaded"), [(False, False), (True, False), (False, True)], ids=str)
def test_another_world_has_the_same_residuals_together(pool, saved, loaded):
    """Its ranks alike, or as nodes."""
    states = pool.over_gloo(3 if loaded else 4, fsdp_scenes.saved_at, saved)
    there = [fsdp_scenes.residuals_in(state) for state in states]
    here = pool.over_gloo(4 if loaded else 3, fsdp_scenes.loaded_at, states, loaded)
    for key in there[0]:
        mean = torch.stack([each[key] for each in there]).mean(0)
        for each in [torch.stack([each[key] for each in here]).mean(0)] if loaded else [each[key] for each in here]:
            assert torch.allclose(each, mean, rtol=0, atol=1e-14)
    assert any(each.any() for each in there[0].values())


@pytest.mark.long(but="(3, 1)-[(2, 2)]-TopBlocks(density=0.5, block=8)")
@pytest.mark.parametrize(
    ("saved", "loaded", "compressor"),
    [
        ((2, 2), [(2, 2), (4, 1), (1, 3), (1, 1), None], Int8(block=8)),
        ((3, 1), [(2, 2)], TopBlocks(0.5, block=8)),
        (None, [(2, 2)], Int8(block=8)),
    ],
    ids=repr,
)
def test_any_mesh_has_the_residuals_that_another_had(pool, saved, loaded, compressor):
    """(replicas, shards); None: cut over all ranks, by FSDP2's reduce-scatters."""
    ranks = pool.over_gloo(4 if saved is None else math.prod(saved), fsdp_scenes.saved_on_mesh, saved, compressor)
    states, residuals = [state for state, _ in ranks], ranks[0][1]
    assert any(each.any() for each in residuals)
    for shape in loaded:
        world_size = 4 if shape is None else math.prod(shape)
        for there, _ in pool.over_gloo(world_size, fsdp_scenes.loaded_on_mesh, states, shape, compressor):
            for mine, theirs in zip(there, residuals):
                torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


@pytest.mark.long(but="Int8(block=8, rounding='nearest', rotate=False, seed=0)-LoCo(beta=0.5, reset_every=None)")
@pytest.mark.parametrize(("compressor", "feedback"), [(PowerSGD(2), True), (Int8(block=8), LoCo(0.5, None))], ids=repr)
def test_what_does_not_come_out_at_once_lies_where_it_did(pool, compressor, feedback):
    """Low rank, whose factors begin anew for other pieces; and LoCo's, which is rounded to 8 bits once more."""
    states = [state for state, _ in pool.over_gloo(4, fsdp_scenes.saved_on_mesh, (2, 2), compressor, feedback)]
    loaded = pool.over_gloo(4, fsdp_scenes.loaded_on_mesh, states, (4, 1), compressor, feedback)
    before, after = (put_together([state["residuals"] for state in of]) for of in (states, [s for _, s in loaded]))
    assert any(each["worker_error"].any() for each in before.values())
    for key, entry in after.items():  # other matrices may be large enough to have factors
        for name, mine in entry.items():
            theirs = before[key][name] if key in before else torch.zeros_like(mine)
            room = 0 if feedback is True else float(theirs.abs().max()) / 127
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-14 + room)
    assert before.keys() <= after.keys()


@pytest.mark.parametrize("nodes", [False, True])
def test_residuals_go_on_in_another_kind_of_feedback(pool, nodes):
    """But for the rounding of LoCo's, to 8 bits."""
    for in_bits, as_they_are in pool.over_gloo(4, fsdp_scenes.otherwise_kept, nodes):
        assert 0 < in_bits < 1 / 127
        assert as_they_are == 0


@pytest.mark.long(but="LoCo on nodes")
@pytest.mark.parametrize(
    ("feedback", "nodes"), [(LoCo(), False), (LoCo(), True), (True, True)], ids=["LoCo", "LoCo on nodes", "on nodes"]
)
def test_residuals_go_on_in_other_groups_of_fsdp(pool, feedback, nodes):
    """But for the rounding of LoCo's, to 8 bits."""
    for apart in pool.over_gloo(4, fsdp_scenes.in_other_groups, feedback, nodes):
        assert max(apart) < 1 / 127 if isinstance(feedback, LoCo) else apart == [0, 0]


def test_a_state_that_one_rank_cannot_load_is_an_error_on_all_that_load_weights(pool):
    others, own = pool.over_gloo(2, fsdp_scenes.one_is_given_another)
    assert [others[0], own[0]] == ["loaded", "loaded"]
    for said in others[1:]:
        assert "ranks [1] cannot load the state that they were given" in said
    assert "the loaded residuals are of" in own[1]
    assert "has 1 elements" in own[2]


def test_the_same_ranks_otherwise_grouped_begin_again(pool):
    for residuals, told in pool.over_gloo(4, fsdp_scenes.regrouped):
        assert not residuals
        assert "they start again from 0" in told[-1]


def test_dimensions_of_a_mesh_are_nodes_only_where_it_is_given(pool):
    for step in pool.over_gloo(4, fsdp_scenes.not_grouped):
        assert "intra_node" not in step


@pytest.mark.long
def test_another_compressor_inside(pool):
    ranks = pool.over_gloo(4, fsdp_scenes.both_levels)
    for rank, found in enumerate(ranks):
        pieces, stats = found["pair"]
        assert same_bits(pieces, ranks[rank % 2]["pair"][0])
        plain = found["plain"][1]["step"]
        assert stats["step"]["bytes"] == plain["bytes"]
        assert stats["step"]["intra_node"]["bytes"] > 0 == plain.get("intra_node", {"bytes": 0})["bytes"]
        gradients, stats = found["whole pair"]
        assert stats["step"]["intra_node"]["bytes"] < found["whole plain"][1]["step"]["intra_node"]["bytes"]
        assert same_bits(
            [g for g in gradients if g is not None], [g for g in ranks[0]["whole pair"][0] if g is not None]
        )
        pair, other, exact = (
            torch.cat([g.flatten() for g in each if g is not None])
            for each in (gradients, found["whole plain"][0], found["exact"])
        )
        assert 0 < float((pair - exact).norm() / exact.norm()) < 0.2
        assert not torch.equal(pair, other)


@pytest.mark.long
def test_weights_on_the_wire(pool):
    """8 bits: all ranks compute with the same; differences follow the weights, and backward sends none."""
    ranks = pool.over_gloo(3, fsdp_scenes.of_weights)
    for found in ranks:
        assert all(torch.equal(found[name]["y"], ranks[0][name]["y"]) for name in found)
        assert all(len(set(found[name]["full"][1:])) == 1 for name in found)  # of each step by itself
        assert max(found["exact"]["apart"]) < 1e-6
        assert found["exact"]["bytes"] == [(0, 0)] * 6  # FSDP's are not counted
        eight, differences = found["int8"], found["differences"]
        assert 1e-6 < max(eight["apart"]) < 0.05
        block, root = (2 * Int8().nbytes(n) for n in (14 * 7 + 14 + 3 * 40 + 3 + 7, 3 * 8 + 3 + 3 + 2 + 1))
        assert eight["bytes"] == [(block + root, block)] * 6  # FSDP keeps those of the outermost module
        assert max(differences["apart"]) < 0.02
        assert differences["moved"] < 1e-5  # in full
        first, *later = differences["bytes"]
        assert first[0] > 3 * later[0][0]
        assert all(sent == (later[0][0], 0) for sent in later)


def test_differences_of_weights_are_the_papers_loop(pool):
    assert pool.over_gloo(3, fsdp_scenes.loop_of_differences) == [[True] * 6] * 3


def test_weights_that_fsdp_gathers_from_fewer_ranks_in_backward_are_those_of_the_forward(pool):
    """``reshard_after_forward=2``."""
    assert max(pool.over_gloo(4, fsdp_scenes.gathered_back_inside)) == 0


def test_weights_that_were_nan_do_not_stay_so(pool):
    assert all(pool.over_gloo(2, fsdp_scenes.replica_is_nan))


def test_modules_of_one_group_have_one_exchange(pool):
    """And none when it was removed."""
    for found in pool.over_gloo(2, fsdp_scenes.several_in_a_group):
        assert found == {"count": (2, 2), "left": ["DefaultReduceScatter", "DefaultAllGather"], "sums": False}


def test_models_are_freed(pool):
    for found in pool.over_gloo(2, fsdp_scenes.gone):
        assert found == {"handle is let go": True, "removed": True}


def test_blocks_may_be_compiled_as_one_graph(pool):
    assert max(pool.over_gloo(2, fsdp_scenes.compiled)) < 1e-6


def test_without_feedback_it_need_not_be_seen_which_parameters_have_a_gradient(pool):
    assert all(pool.over_gloo(2, fsdp_scenes.by_another_method))


def test_a_parameter_that_is_trained_later_gets_no_residual_of_another(pool):
    for said in pool.over_gloo(2, fsdp_scenes.trained_later):
        assert "was frozen when compress_gradients was called" in said


def test_zeros_that_fsdp_hands_over_are_seen_where_a_parameter_was_frozen_later(pool):
    assert all(pool.over_gloo(2, fsdp_scenes.frozen_later))


def test_a_parameter_may_be_frozen_before_the_first_forward_and_trained_again(pool):
    for apart in pool.over_gloo(2, fsdp_scenes.frozen_before_the_first_forward):
        assert max(apart) < 1e-14


def test_over_tensor_parallelism_there_must_be_replicas(pool):
    """What its ranks hold alike would be compressed beside what they do not, and not stay alike."""
    for found in pool.over_gloo(4, fsdp_scenes.over_tensor_parallelism):
        for case, said in found.items():
            assert said == "allowed" if case.startswith("(2, 1, 2)") else "tensor parallelism cuts too" in said, case
            assert "\n" not in said


def test_what_cannot_be_is_said_on_every_rank(pool):
    for rank, found in enumerate(pool.over_gloo(4, fsdp_scenes.refused)):
        assert "having the same of a gradient" in found["low rank"]
        assert "set_gradient_divide_factor(1.0)" in found["sum"]
        assert "machines of several ranks" in found["inside"]
        assert "reduce-scatters are compressed from the first one; allowed is 0" in found["warm-up"]
        assert "reduce-scatters are compressed from the first one; allowed is 0" in found["warm-up inside"]
        assert "got 'int8'" in found["inside what"]
        assert "got 8" in found["weights what"]
        assert "sharded by FSDP2" in found["weights of"]
        assert "nothing is left to compress" in found["on all dimensions"]
        assert "has 2 of the 4 ranks that the parameters are on" in found["some ranks"]
        assert "leave it out, or give all of that mesh" in found["some ranks"]
        assert "a collective of its own, Own" in found["custom"]
        assert "2 groups of parameters on different meshes" in found["groups"]
        assert "compressed already" in found["twice"]
        assert f"torch 2.9 or later, and this is {torch.__version__}" in found["older torch"]
        assert "settings or kernel providers" in found["differ"]
        assert ("got 8" if rank == 1 else "rank 1") in found["one rank"]


def test_a_model_may_be_cast_later(pool):
    assert max(pool.over_gloo(2, fsdp_scenes.cast_after)) < 1e-6


def test_blocks_with_replicas_are_compressed_beside_one_that_is_cut_over_all_ranks(pool):
    for found in pool.over_gloo(4, fsdp_scenes.beside_what_is_cut_over_all):
        for way in ("alone", "beside"):
            assert found[way]["between"]
            assert not found[way]["all-reduced"]
            assert all(found[way]["residuals"])
        mine = 4 * (16 * 16 + 16) // 2  # of a block, by a rank of two that hold it
        assert found["alone"]["fp32"] == 3 * mine
        # of an expert a quarter leaves a rank for the other machine: gradients, and weights in forward and in backward
        assert found["beside"]["fp32"] == 2 * mine + 3 * 4 * (16 * 16 + 16) // 4


def test_a_forward_without_gradients_between_two_of_a_step_hides_nothing_of_it(pool):
    for ratio, between in pool.over_gloo(2, fsdp_scenes.forward_between):
        assert ratio == between


def test_what_is_frozen_altogether_is_gathered_as_the_rest_and_not_trained_later(pool):
    for found in pool.over_gloo(2, fsdp_scenes.frozen_altogether):
        assert found["None"] < found[str(Int8(block=8))]
        assert "a parameter of base is trained that was frozen when compress_gradients was called" in found["said"]


def test_weights_of_several_dtypes_are_refused_where_fsdp_gathers_bytes(pool):
    for refused, allowed in pool.over_gloo(2, fsdp_scenes.of_several_dtypes):
        assert "torch.bfloat16, torch.float32, which FSDP2 gathers as bytes" in refused
        assert allowed == "allowed"


def test_gradients_may_be_compressed_after_an_evaluation(pool):
    for rank in pool.over_gloo(4, fsdp_scenes.made_after_an_evaluation):
        assert max(rank.values()) < 1e-14


def test_an_evaluation_may_be_the_first_after_a_load(pool):
    assert all(pool.over_gloo(2, fsdp_scenes.evaluated_after_a_load))


def test_the_lines_of_the_page_compress_what_fsdp_sends(pool):
    page = (Path(__file__).parents[1] / "docs" / "gradients_sharded.md").read_text()
    program = next(p for p in re.findall(r"(?ms)^```python\n(.*?)^```$", page) if "fully_shard(model, mesh=mesh)" in p)
    for ratios in pool.over_gloo(4, fsdp_scenes.of_the_page, program):
        assert len(ratios) == 3
        assert min(ratios) > 5
