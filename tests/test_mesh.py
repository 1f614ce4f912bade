"""Sharded parameters: FSDP2 and its like inside, and one bit between replicas. Real processes over Gloo."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mesh_scenes
import muon_scenes
import pytest
import torch
from pool import Pool
from torch import Tensor
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from worlds import needs_fsdp2, same_bits

from commopt.state.own_tensor import OwnTensor, Place, boxes

pytestmark = needs_fsdp2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    processes = Pool(8)
    yield processes
    processes.close()


@pytest.fixture(scope="module")
def saved(pool: Pool, folder: Path, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What four processes had when they wrote it into the folder, by rank; of those optimizers that are looked at."""
    names = mesh_scenes.KINDS if request.config.getoption("short") else mesh_scenes.COMMUNICATING
    return pool.over_gloo(4, mesh_scenes.saved, str(folder), names)


def test_a_sharded_run_with_the_identity_is_the_unsharded_one(pool):
    """Every optimizer, with clipping and without; scalar, tied, frozen and unused parameters, uneven, empty pieces."""
    for furthest in pool.over_gloo(4, mesh_scenes.as_unsharded):
        assert len(furthest) == 14 + 1
        for name, distance in furthest.items():
            assert distance < 1e-12, name


@pytest.mark.long
def test_muon_in_a_mixture_on_a_mesh(pool, folder):
    """Its iterations are in bfloat16: a last bit that FSDP's sum of gradients has otherwise may be 0.004 of a step of
    0.1. If it took each piece for a matrix, that would be 0.04."""
    for found in pool.over_gloo(4, mesh_scenes.mixed, str(folder)):
        assert found["sorted"] == [2, 5]
        assert found["apart"] < 0.02
        assert found["same"]
        assert found["resumed"]


@pytest.mark.long
def test_a_base_whose_step_needs_values_keeps_its_state_in_a_distributed_checkpoint(pool, tmp_path):
    for found in pool.over_gloo(4, mesh_scenes.bases, str(tmp_path)):
        for name, (resumed, said) in found.items():
            assert resumed, name
            assert not any("not known" in line or "no state" in line for line in said), said


def test_a_base_whose_state_is_not_cut_as_its_parameters_is_not_saved(pool):
    for found in pool.over_gloo(2, mesh_scenes.uncuttable):
        assert "state 'rows' of Rows is of shape " in found["rows"]
        assert "state 'seen' of Rows is several tensors, of a sharded parameter of shape" in found["seen"]


def test_muon_makes_of_pieces_what_it_makes_of_the_whole(pool):
    """Rows and columns, uneven and empty pieces, replicas, pieces along two dimensions, and all of these at once; each
    matrix is worked on once, by the rank that both exchanges of a step go to and come from."""
    ranks = pool.over_gloo(4, muon_scenes.cut_up)
    for found in ranks:
        assert set(found) == {"rows", "columns", "replicas", "rows on replicas", "rows and columns", "all at once"}
        for way, (same, _, _) in found.items():
            assert same, way
    elements = sum(rows * columns for rows, columns in muon_scenes.MATRICES)
    for way in ("rows", "columns"):
        assert [rank[way][1] for rank in ranks] == [1, 1, 1, 2]  # shared out by cost, the two cheapest to one rank
        assert sum(rank[way][2] for rank in ranks) == 2 * 2 * elements  # bfloat16, both ways, one's own part included
    assert all(rank["rows and columns"][1] == len(muon_scenes.MATRICES) for rank in ranks)


def test_doors(pool):
    """FSDP2 and tensor parallelism train as the whole net does: with gradients that are sums still to be made, summed
    losses, accumulation, a GradScaler, parameters exchanged after the optimizer was made, FSDP's own averages; and
    compressed."""
    for found in pool.over_gloo(4, mesh_scenes.doors):
        assert len(found) == 9
        for door, (apart, same) in found.items():
            assert apart < 1e-12, door
            assert same, door


@pytest.mark.long
def test_copies_of_a_tensor_group_stay_alike(pool):
    """Norms, and biases that are DTensors without a cut."""
    for found in pool.over_gloo(4, mesh_scenes.copies_of_a_tensor_group):
        assert len(found) == 4
        for way, (alike, sums) in found.items():
            assert alike, way
            assert sums, way


def test_three_dimensions(pool):
    """FSDP over tensor parallelism, over replicas."""
    for found in pool.over_gloo(8, mesh_scenes.cube):
        for apart, same in found.values():
            assert apart < 1e-12
            assert same


@pytest.mark.long
def test_ways_in_which_fsdp_computes(pool):
    """Mixed precision, offloading, compiled blocks, checkpointed activations, and overlap, with one bit between."""
    for found in pool.over_gloo(4, mesh_scenes.policies):
        assert set(found.pop("state")) == {"DTensor"}
        assert found.pop("share of the state") == 0.5
        assert found.pop("state of rounds") == 3  # both moments and the anchor
        assert found.pop("overlap changes nothing")
        assert found.pop("evaluated") == [True, True]
        assert len(found) == 8
        for way, (same, learnt, early) in found.items():
            assert same, way
            assert learnt, way
            assert (early > 0) == (way == "overlapped")


def test_a_group_with_a_mesh_of_its_own(pool):
    """Experts: ranks 0 and 1 hold one piece, 2 and 3 the other; the gradient of rank r is 2^r."""
    for rank, found in enumerate(pool.over_gloo(4, mesh_scenes.experts)):
        mean = (1 + 2) / 2 if rank < 2 else (4 + 8) / 2
        assert found["OneBitAdam"][1] == pytest.approx(0.1 * mean)
        assert found["DiLoCo"][0] == pytest.approx(0.5 * mean)
        assert not found["OneBitAdam"][2]
        for name, beta in (("OneBitAdam", 0.9), ("OneBitLamb", 0.9), ("ZeroOneAdam", 0.9), ("OneBitLion", 0.99)):
            momentum, apart = found[f"{name}, cut over all"]  # what one rank alone holds takes plain steps
            assert momentum == pytest.approx((1 - beta**6) * 2**rank)
            assert apart == 0


def test_a_group_with_a_mesh_of_its_own_that_comes_while_fragments_are_in_flight(pool):
    (one, channels), (other, _) = pool.over_gloo(2, mesh_scenes.experts_that_come_while_fragments_are_in_flight)
    assert one == other
    assert channels == [6, 6]


def test_stages_of_a_pipeline_skip_together(pool):
    ranks = pool.over_gloo(4, mesh_scenes.pipelines)
    for rank, found in enumerate(ranks):
        stage = rank // 2
        assert found["skipped"] == [0, 0, 0, 1, 1]
        # at the third step the last parameter of each stage had no gradient, and only that
        assert found["steps"] == ([3], [4, 3])[stage]
        assert [len(p) for p in found["params"]] == ([3], [5, 5])[stage]
        assert same_bits(found["params"], ranks[2 * stage]["params"])


def test_what_cannot_work_is_an_error_on_every_rank(pool, folder):
    expected = {
        "the shard group": "whom its ranks average with must be told",
        "Lamb": "Lamb takes the norms of whole tensors; commopt.OneBitLamb(params, process_group=mesh) takes those of",
        "Lans": "Lans takes the norms of whole tensors; commopt.OneBitLamb(params, process_group=mesh) takes those of",
        "no such dimension": "which are not those along dimensions of the mesh given",
        "two meshes in a group": "which are not those along dimensions of the mesh given",
        "two meshes and none given": "the parameters are on slices of several meshes",
        "partial": "a sum that is still to be made is no parameter",
        "other meshes on other ranks": "ranks differ in what they were given",
        "no pipeline": "pipeline must be one of the dimensions ('replicate', 'shard') of the mesh, or None; got 'pp'",
        "a group's mesh of other ranks": "must have the ranks of the optimizer's, [0, 1, 2, 3], got",
        "a group's mesh and none given": "but the optimizer was given none",
        "a base of ours": "OneBitAdam communicates by itself where parameters are sharded",
        "a base of ours, in groups": "so that it cannot be the base of an outer step there",
        "a base of ours, made": "allowed are optimizers that take local steps, such as torch.optim.AdamW",
        "exchanged": "call optimizer.rebind() after that, on all ranks",
        "another model": "Missing key in checkpoint state_dict: model.weight",
        "another optimizer": "Missing key in checkpoint state_dict: optim.",
        **{
            f"another optimizer, of which it needs a part, flattened {flat}": "the loaded state is that of OneBitLamb, "
            "and this is OneBitAdam: load it into the optimizer that has saved it, or begin with the weights"
            for flat in (False, True)
        },
    }
    for found in pool.over_gloo(4, mesh_scenes.refusals, str(folder)):
        assert found.keys() == expected.keys()
        for what, text in expected.items():
            assert text in found[what], what
        assert "LocalBackend" not in found["a base of ours, made"]  # no rank is alone there


# saving ---------------------------------------------------------------------------------------------------------------


def residuals(ranks: list[dict[str, Any]], name: str) -> dict[int, Tensor]:
    """By parameter, the mean over the replicas of the residuals of workers, plus those of servers."""
    out: dict[int, Tensor] = {}
    for i in ranks[0][name]["residuals"]:
        for which in ("worker_error", "server_error"):
            rows: dict[tuple[int, ...], Tensor] = {}
            for rank in ranks:
                for found, place, values in rank[name]["residuals"][i]:
                    if found == which:
                        whole = rows.setdefault((place.row, place.rows), torch.zeros(place.shape, dtype=torch.float64))
                        at = 0
                        for start, shape in boxes(place.piece, place.start, place.start + values.numel()):
                            n = math.prod(shape)
                            first = [a + b for a, b in zip(place.offset, start)]
                            part = tuple(slice(a, a + b) for a, b in zip(first, shape))
                            whole[part] = values[at : at + n].view(shape)
                            at += n
            if rows:
                out[i] = out.get(i, torch.zeros(())) + sum(rows.values()) / next(iter(rows))[1]
    return out


@pytest.mark.long(but="True")
@pytest.mark.parametrize("flat", [False, True])
def test_on_the_same_mesh_the_resumed_run_is_the_one_never_stopped(pool, saved, folder, flat):
    names = mesh_scenes.FORMS[flat]
    loaded = pool.over_gloo(4, mesh_scenes.loaded, str(folder), 2, flat, "", names)
    for never, resumed in zip(saved, loaded):
        assert resumed.keys() == set(names)
        for name in names:
            assert same_bits(never[name]["later"], resumed[name]["later"]), name


@pytest.mark.long
def test_a_model_on_both_dimensions_goes_on_as_one_on_the_shards_and_back(pool, saved, folder, tmp_path):
    """HSDP, whose replicas FSDP leaves to the optimizer."""
    names, later = mesh_scenes.KINDS, mesh_scenes.LATER
    there = pool.over_gloo(4, mesh_scenes.loaded, str(folder), 2, False, str(tmp_path), names, later, True)
    back = pool.over_gloo(4, mesh_scenes.loaded, str(tmp_path), 2, False)
    differing = {name for name in names if there[0][name]["said"][0]}
    assert differing
    assert {name for name in names if "evaluated between two rounds" in "".join(there[0][name]["said"][1])} == differing
    for ranks in (there, back):
        for never, resumed in zip(saved, ranks):
            for name in names:
                assert same_bits(never[name]["later"], resumed[name]["later"]), name


@pytest.mark.long(but="1-2")
@pytest.mark.parametrize(("replicas", "shards"), [(1, 2), (1, 1), (3, 1)])
def test_on_another_mesh_nothing_is_lost_and_back(pool, saved, folder, tmp_path, replicas, shards):
    """Residuals are kept, and where one replica is left, taken into what is compressed; replicas that were
    apart start from their mean."""
    flat = shards == 1
    names, at = mesh_scenes.KINDS, mesh_scenes.SAVED
    world_size = replicas * shards
    there = pool.over_gloo(world_size, mesh_scenes.loaded, str(folder), shards, flat, str(tmp_path), names, at)
    back = pool.over_gloo(4, mesh_scenes.loaded, str(tmp_path), 2, flat, "", names, at + 1)
    for name in names:
        before = residuals(saved, name)
        for ranks in (there, back) if replicas > 1 else ():
            after = residuals(ranks, name)
            assert before.keys() == after.keys()
            for i in before:
                torch.testing.assert_close(after[i], before[i], rtol=1e-12, atol=1e-14)
        mean = [sum(ps) / len(ps) for ps in zip(*(rank[name]["start"] for rank in saved))]
        if replicas == 1 and name == "DiLoCo":  # one replica alone moves by what is left: anchor and parameters
            mean = [p - before[i] if i in before else p for i, p in enumerate(mean)]
        for rank in (*there, *back):
            for p, q in zip(rank[name]["start"], mean):
                torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


def test_an_unpickled_optimizer_of_sharded_parameters_averages_over_their_mesh(pool):
    for found in pool.over_gloo(4, mesh_scenes.pickled):
        assert found == dict.fromkeys(("OneBitAdam", "DiLoCo"), (4, 2, True))


def test_states_of_whole_models_load_into_sharded_ones_and_back(pool):
    for found in pool.over_gloo(4, mesh_scenes.unsharded_and_back):
        assert len(found) == 4
        for way, apart in found.items():
            assert apart < 1e-12, way


def test_a_full_state_has_what_is_rank_0s_own_which_the_others_leave_out_and_say(pool):
    for rank, found in enumerate(pool.over_gloo(4, mesh_scenes.full_states)):
        for name in ("OneBitAdam", "DiLoCo"):
            for way in ("all load", "from rank 0"):
                assert found[f"{name}, {way}"], (name, way)
                assert found[f"{name}, {way}: said"] == (rank == 1), (name, way)


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4), (4, 1, 3)])
def test_a_run_of_elements_is_some_boxes(shape):
    numbers = torch.arange(math.prod(shape)).view(shape)
    for start in range(numbers.numel() + 1):
        for stop in range(start, numbers.numel() + 1):
            found = [numbers[tuple(map(slice, o, map(sum, zip(o, s))))].flatten() for o, s in boxes(shape, start, stop)]
            assert [int(n) for part in found for n in part] == list(range(start, stop))


def test_a_tensor_that_knows_its_place_stays_that_where_it_is_copied():
    own = OwnTensor.make(torch.arange(3.0), Place((7, 3), (2, 0), (3, 3), 4, 1, 2))
    for other in (own.clone(), copy.deepcopy(own), pickle.loads(pickle.dumps(own)), own.to("cpu"), own.detach()):
        assert isinstance(other, OwnTensor)
        assert other.place == own.place
        assert other.plain().tolist() == [0, 1, 2]
    file = io.BytesIO()
    torch.save({"own": own}, file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["own"].place == own.place
    assert type(own + 1) is Tensor
    assert own.size() != (2, 7, 4)
    assert own.size() == (9, 7, 3)
    assert own.rows_read == 9


def test_a_tensor_that_knows_its_place_is_staged_for_a_save_in_the_background():
    """Or refused, where that would make a plain one of it, which is written once, whichever rank's it is."""
    from torch.distributed.checkpoint._state_dict_stager import StateDictStager  # of torch 2.8

    own = {n: OwnTensor.make(torch.arange(float(n)), Place((7, 3), (2, 0), (3, 3), 4, 1, 2)) for n in (0, 3)}
    staged = StateDictStager().stage(own)
    own[3].plain().zero_()
    for n, copied in staged.items():
        assert isinstance(copied, OwnTensor)
        assert copied.place == own[n].place
        assert copied.plain().tolist() == list(range(n))
        assert copied.size() == (9, 7, 3)
        assert (copied.rows_read, own[n].rows_read) == (9, None)
    with pytest.raises(TypeError, match=r"each rank's own: stage it with .*DefaultStager"):
        BlockingAsyncStager().stage({"own": own[3]})
