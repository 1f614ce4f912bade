"""Compressed means of gradients under DistributedDataParallel and FSDP2, in processes over Gloo."""

from __future__ import annotations

from collections.abc import Iterator

import gradient_scenes
import mesh_scenes
import pytest
import torch
from pool import Pool
from worlds import needs_fsdp2, same_bits


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    processes = Pool(4)
    yield processes
    processes.close()


def test_under_ddp_it_is_what_it_is_without(pool):
    """To the bit, however DDP makes its buckets, with clipping and accumulation; and no rank differs."""
    ranks = pool.over_gloo(2, gradient_scenes.under_ddp)
    for name in gradient_scenes.DDP_KINDS:
        for found in ranks:
            ours, bare, *steps = found[name]
            assert same_bits(ours, bare), name
            assert same_bits(ours, ranks[0][name][0]), name
            assert steps == [6, 6]


def test_under_ddp_several_backward_passes_of_a_step_may_be_averaged(pool):
    """What the last of them does not reach keeps its mean, and its residual."""
    for found in pool.over_gloo(2, gradient_scenes.several_synced):
        assert found == [True] * 8


def test_with_the_identity_it_is_the_average_of_ddp(pool):
    """Unused parameters, on some ranks and on all; and it is DDP's own again when removed."""
    for found in pool.over_gloo(3, gradient_scenes.exact_under_ddp):
        assert found.keys() == gradient_scenes.DDP_KINDS.keys()
        for name, apart in found.items():
            assert apart < 1e-14, name


def test_all_ranks_skip_a_step_and_nothing_is_left_of_it(pool):
    ranks = pool.over_gloo(2, gradient_scenes.scaled)
    for found in ranks:
        assert found["moved"] == [True, True, False, True, True]
        assert found["trace"] == found["moved"]
        assert found["scale"] == 512
        assert same_bits(found["bits"], ranks[0]["bits"])
        assert same_bits(found["bits"], found["plain"])  # the GradScaler was found, and residuals follow its scale


def test_a_run_that_was_stopped_continues_to_the_bit(pool):
    assert pool.over_gloo(2, gradient_scenes.resumed) == [True, True]


@pytest.mark.long
def test_sharded_models_and_nodes(pool):
    ranks = pool.over_gloo(4, gradient_scenes.sharded)
    for rank, found in enumerate(ranks):
        assert found["exact"] < 1e-14
        assert same_bits(found["pieces"], ranks[rank % 2]["pieces"])
        assert found["stats"]["step"]["bytes"] < found["stats"]["fp32_bytes"]
        assert not any(found["finite"])  # NaN was in one piece on one rank
        assert not found["trace"]
        gradients, stats = found["nodes"]
        assert same_bits(gradients, ranks[0]["nodes"][0])
        assert stats["step"]["intra_node"]["bytes"] > 0


def test_powersgd_is_torchs(pool):
    for apart in pool.over_gloo(2, gradient_scenes.beside_torchs_powersgd):
        assert len(apart) == 4
        assert max(apart) < 1e-10


def test_a_model_that_an_optimizer_is_attached_to_is_refused(pool):
    for said in pool.over_gloo(2, gradient_scenes.beside_another_hook):
        assert "has a communication hook already, which it keeps for good" in said


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="of torch 2.13")
def test_a_model_of_which_ddp_skips_what_is_unused_is_refused(pool):
    """Its hook would wait for buckets that never come."""
    for said in pool.over_gloo(2, gradient_scenes.skips_unused):
        assert "skip_all_reduce_unused_params=True" in said


@needs_fsdp2
def test_stages_of_a_pipeline_are_averaged_by_ddp_or_bare_and_not_by_fsdp2(pool):
    for found in pool.over_gloo(4, gradient_scenes.in_a_pipeline):
        assert found["ddp"] < 1e-7
        assert found["bare"] < 1e-7
        assert "outside of a backward()" in found["fsdp"]


def test_a_model_that_is_compressed_bare_is_not_averaged_by_ddp_too(pool):
    for said in pool.over_gloo(2, gradient_scenes.wrapped):
        assert "give compress_gradients() that one" in said["before"]
        assert said["steps"] == 1
        assert "the model was compressed first and given to DistributedDataParallel then" in said["after"]


def test_under_ddp_the_next_mean_after_one_that_all_ranks_refused_is_as_if_that_had_not_been(pool):
    for found in pool.over_gloo(2, gradient_scenes.refused_under_ddp):
        for said, same in found:
            assert "before mean 3: ranks [0] and [1] differ in the parameters" in said
            assert same


def test_a_layer_that_was_frozen_after_ddp_was_made_takes_no_part(pool):
    for found in pool.over_gloo(2, gradient_scenes.frozen_after_ddp):
        for way in ("unused", "static"):
            theirs, ours = found[way]
            assert [g is None for g in ours] == [g is None for g in theirs]
            pairs = [(a, b) for a, b in zip(ours, theirs) if b is not None]
            assert len(pairs) == 8
            for mine, exact in pairs:
                torch.testing.assert_close(mine, exact)
        assert "were frozen when compress_gradients() was called, and are trained now" in found["thawed"]


def test_sparse_gradients_under_ddp_are_refused(pool):
    for said in pool.over_gloo(2, gradient_scenes.sparse_under_ddp):
        assert "allowed are dense gradients (torch.strided), so create embeddings with sparse=False" in said


def test_copies_of_a_compressed_ddp_model_are_averaged_by_ddp(pool):
    for found in pool.over_gloo(2, gradient_scenes.copied):
        for way in ("deepcopy", "file", "average"):
            assert same_bits(found[way], found["exact"])
        assert found["steps"] == 1


@pytest.mark.long
def test_a_step_that_is_compiled_as_a_whole(pool):
    for found in pool.over_gloo(2, gradient_scenes.compiled_as_a_whole):
        for plain, compiled in found.values():
            for a, b in zip(plain, compiled):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_what_ddp_is_told_to_leave_alone_is_each_ranks_own(pool):
    one, other = pool.over_gloo(2, gradient_scenes.with_experts_of_its_own)
    assert same_bits([one["shared"]], [other["shared"]])
    assert not torch.equal(one["own"], other["own"])
    assert one["residuals"] == other["residuals"] == [0, 1]


def test_pieces_that_are_strips_of_several_matrices_in_one(pool):
    for found in pool.over_gloo(4, mesh_scenes.in_strips):
        assert len(found) == 8
        assert all(found.values()), found  # torch 2.6, too, with which tests of FSDP2 are skipped
