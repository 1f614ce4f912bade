"""Blocks chosen at random: the same everywhere, as often as they should be, and from no other generator."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch
from oracle_cser import kept_blocks
from worlds import on_threads

from commopt.compress import Blocks, RandomBlocks


def ids(blocks: Blocks) -> list[int]:
    """Which blocks these are."""
    tail = [blocks.stop // blocks.block] if blocks.end > blocks.stop else []
    return blocks.whole.tolist() + tail


@pytest.mark.parametrize("n", [0, 1, 7, 8, 72, 1000])
@pytest.mark.parametrize("ratio", [1, 2.5, 8, 64, math.inf])
def test_they_are_those_of_the_definition(n, ratio):
    for seed, step, stream in [(0, 0, 0), (5, 3, 1), (2**64 - 1, 10**6, 40)]:
        chosen = RandomBlocks(ratio, 8, seed).choose(n, step, stream)
        assert ids(chosen) == kept_blocks(n, ratio, 8, seed, step, stream)
        assert chosen.numel == sum(min(8, n - 8 * i) for i in ids(chosen))


def test_they_are_the_same_on_every_rank_whatever_else_draws_random_numbers():
    def run(backend):
        torch.manual_seed(backend.rank)
        np.random.seed(backend.rank)
        digest = hashlib.blake2b(digest_size=8)
        for step in range(50):
            torch.rand(backend.rank + 1)
            np.random.rand(backend.rank + 1)
            digest.update(str(ids(RandomBlocks(4, 8).choose(1001, step, 2))).encode())
        mine = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)
        everyone = torch.empty(backend.world_size, 8, dtype=torch.uint8)
        backend.all_gather(everyone, mine).wait()
        return everyone

    for everyone in on_threads(3, run):
        assert (everyone == everyone[0]).all()


def test_choosing_draws_from_no_generator_of_torch_or_numpy():
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    RandomBlocks(4).choose(10_000, 3, 0)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()


@pytest.mark.parametrize(("ratio", "count"), [(4, 25), (2.5, 25), (64, 25), (1.1, 10)])
def test_each_block_is_kept_as_often_as_any_other_and_the_ratio_holds(ratio, count):
    """4 standard deviations of a binomial; the last block is the short one."""
    steps = 4000
    kept = torch.zeros(count)
    for step in range(steps):
        chosen = ids(RandomBlocks(ratio, 8).choose(8 * count - 3, step, 0))
        assert len(chosen) in (math.floor(count / ratio), math.ceil(count / ratio))
        kept[chosen] += 1
    p = 1 / ratio
    assert ((kept / steps - p).abs() < 4 * math.sqrt(p * (1 - p) / steps)).all()
    assert abs(kept.mean() / steps - p) < 4 * math.sqrt(0.25 / steps) / count


def test_steps_streams_and_seeds_choose_independently():
    def chosen(step=0, stream=0, seed=0):
        return set(ids(RandomBlocks(2, 1, seed).choose(2000, step, stream)))

    for other in (chosen(step=1), chosen(stream=1), chosen(seed=1), chosen(step=2**32), chosen(seed=2**63)):
        assert 400 < len(chosen() & other) < 600  # 500, standard deviation 11


@pytest.mark.parametrize("ratio", [1, 3, math.inf])
@pytest.mark.parametrize("n", [0, 5, 64, 71])
def test_gather_scatter_and_zero(n, ratio):
    x = torch.arange(1.0, n + 1)
    for step in range(6):
        blocks = RandomBlocks(ratio, 8).choose(n, step, 0)
        expected = torch.zeros(n)
        for i in ids(blocks):
            expected[8 * i : 8 * i + 8] = x[8 * i : 8 * i + 8]
        out = torch.zeros(n)
        values = blocks.gather(x)
        assert values.shape == (blocks.numel,)
        blocks.scatter_(out, values)
        assert torch.equal(out, expected)
        rest = x.clone()
        blocks.zero_(rest)
        assert torch.equal(rest + out, x)
        assert not rest[expected != 0].any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ratio": 0.5}, r"ratio must be a number >= 1, got 0.5"),
        ({"ratio": -1}, r"ratio must be a number >= 1, got -1"),
        ({"ratio": math.nan}, r"ratio must be a number >= 1, got nan"),
        ({"ratio": "4"}, r"ratio must be a number >= 1, got '4'"),
        ({"ratio": True}, r"ratio must be a number >= 1, got True"),
        ({"block": 0}, r"block must be an int >= 1, got 0"),
        ({"block": 2.0}, r"block must be an int >= 1, got 2.0"),
        ({"seed": -1}, r"seed must be an int with 0 <= seed < 2\*\*64, got -1"),
        ({"seed": 2**64}, r"seed must be an int with 0 <= seed < 2\*\*64, got"),
        ({"seed": 0.0}, r"seed must be an int with 0 <= seed < 2\*\*64, got 0.0"),
    ],
)
def test_arguments_out_of_range(arguments, message):
    with pytest.raises(ValueError, match=message):
        RandomBlocks(**arguments)
