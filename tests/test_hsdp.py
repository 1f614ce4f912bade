"""HSDP, FSDP2 over (replicas, shards): who averages over the replicas, whatever a user does. Processes over Gloo."""

from __future__ import annotations

from collections.abc import Iterator

import hsdp_scenes
import pytest
from pool import Pool
from worlds import needs_fsdp2

pytestmark = needs_fsdp2


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    processes = Pool(4)
    yield processes
    processes.close()


def test_compressed_gradients_are_averaged_or_an_error_says_why_not(pool: Pool) -> None:
    for found in pool.over_gloo(4, hsdp_scenes.compressed):
        assert found["kept, hsdp"]
        assert found["kept, bare"]
        assert found["kept, as FSDP2"] < 1e-12
        for factor in ("None, mean", "4.0, mean", "1.0, mean", "1.0, sum"):
            assert found[f"factor {factor}"] < 1e-12, factor
        assert "set_gradient_divide_factor(2.0) was called after compress_gradients()" in found["factor set later"]
        for said in found["compressed twice"]:
            assert "compress_gradients() averages the gradients of this model over its replicas already" in said
        assert found["as it was"]
        assert "call remove() on the handle" in found["assigned"]
        assert found["nothing loaded"]
        assert found["removed twice"] == [1, 1, 1]
        for name in ("hsdp", "bare"):
            assert "2 parameters, such as one of shape (6, 6), were frozen" in found[f"frozen, {name}"]
        assert found["as before"]


def test_an_attached_optimizer_leaves_nobody_without_an_average(pool: Pool) -> None:
    for found in pool.over_gloo(4, hsdp_scenes.attached):
        for name in ("the other group is FSDP2's", "one group, two of ours", "deleted", "attached again"):
            assert found[name], name
        for name in ("one group, two kinds", "one of two has gone", "and unfrozen"):
            why = "2 trainable parameters, such as one of shape (6, 6), are in one of FSDP2's groups with"
            assert why in found[name], name
        assert not found["what it had is frozen"]
        assert "attach() averages the gradients of this model" in found["attached, then compressed"]
        assert "compress_gradients() averages the gradients of this model" in found["compressed, then attached"]
        assert "load it before attach()" in found["assigned"]
        assert "was called after attach()" in found["factor set later"]


def test_an_optimizer_that_is_not_attached_says_that_fsdp2_averages(pool: Pool) -> None:
    for rank, found in enumerate(pool.over_gloo(4, hsdp_scenes.not_attached)):
        assert len(found) == (rank == 0)


def test_after_an_evaluation_weights_that_were_gathered_are_no_parameters(pool: Pool) -> None:
    for found in pool.over_gloo(4, hsdp_scenes.evaluated):
        for name in ("attached, False", "attached, True", "made anew"):
            assert found[name], name
        assert "4 of the parameters, such as one of shape (6, 6), are whole weights" in found["made"]
        assert "call reshard()" in found["made"]


def test_parameters_that_were_put_there_after_fully_shard_are_averaged_over_the_replicas(pool: Pool) -> None:
    for found in pool.over_gloo(4, hsdp_scenes.loaded_by_hand):
        assert found["compressed"] < 1e-12
        assert found["sent"] > 0
        assert found["attached"]


def test_a_model_that_is_moved_or_cast_is_averaged_over_its_replicas_as_before(pool: Pool) -> None:
    for found in pool.over_gloo(4, hsdp_scenes.converted):
        assert len(found) == 6
        assert all(found.values()), found


def test_a_state_that_is_loaded_before_attach_is_said_to_be_a_mean(pool: Pool) -> None:
    for rank, found in enumerate(pool.over_gloo(4, hsdp_scenes.loaded_and_attached)):
        assert found["attach, load"]
        assert not found["attach, load: said"]
        assert not found["load, attach"]
        assert len(found["load, attach: said"]) == (rank == 0)


def test_residuals_of_one_mesh_on_another_of_as_many_ranks(pool: Pool) -> None:
    ranks = pool.over_gloo(4, hsdp_scenes.moved)
    for name in ("(4, 1)", "(1, 4)"):
        assert all(found[f"{name}, own"] == 0 for found in ranks), name  # begun anew
    assert sum(found["(4, 1), joined"] for found in ranks) > 0
    assert (
        sum(found["(1, 4), joined"] for found in ranks) > 0
    )  # one replica compresses nothing, and has it still to give
    assert all(found["saved once more"] < 1e-6 for found in ranks)
    assert all(found["(2, 2), own"] == found["(2, 2), joined"] > 0 for found in ranks)


def test_a_model_on_a_slice_of_a_mesh_is_averaged_over_that(pool: Pool) -> None:
    assert pool.over_gloo(4, hsdp_scenes.on_a_slice) == [(True, True)] * 4


def test_one_rank(pool: Pool) -> None:
    assert pool.over_gloo(1, hsdp_scenes.alone) == [True]
