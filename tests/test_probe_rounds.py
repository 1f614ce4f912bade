"""Rounds in the probe: bytes are those of real rounds, seconds those of the lines, and periods do what they say."""

from __future__ import annotations

import pytest
import torch
from worlds import on_threads

import commopt
from commopt.comm import ThreadBackend
from commopt.compress import Int4, Int8, TopK
from commopt.outer.rounds import ROUND_BYTES
from commopt.probe.clock import Costs
from commopt.probe.fit import Line
from commopt.probe.rounds import BOTH_WAYS, GATHERED, NEARLY_ALL, ROUNDS, fewer_from, predict_rounds, whole_round

MADE = {
    "DiLoCo": lambda params, **given: commopt.DiLoCo(params, torch.optim.SGD, lr=0.1, **given),
    "DiLoCo, Int4()": lambda params, **given: commopt.DiLoCo(
        params, torch.optim.SGD, lr=0.1, compressor=Int4(), **given
    ),
    "DiLoCo, TopK(), outer_momentum=0": lambda params, **given: commopt.DiLoCo(
        params, torch.optim.SGD, lr=0.1, compressor=TopK(), outer_momentum=0, **given
    ),
    "NoLoCo": lambda params, **given: commopt.NoLoCo(params, torch.optim.SGD, lr=0.1, **given),
    "Gossip": lambda params, **given: commopt.Gossip(params, torch.optim.SGD, lr=0.1, **given),
    "Gossip, Int8()": lambda params, **given: commopt.Gossip(
        params, torch.optim.SGD, lr=0.1, compressor=Int8(), **given
    ),
    "SparseLoCo": lambda params, **given: commopt.SparseLoCo(params, torch.optim.SGD, lr=0.1, **given),
}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", sorted(ROUNDS))
def test_bytes_are_those_of_a_round(name: str, ranks: int) -> None:
    params = 3 * 4096

    def run(backend: ThreadBackend) -> int:
        x = torch.nn.Parameter(torch.zeros(params))
        optimizer = MADE[name]([x], period=1, backend=backend, guard=commopt.Guard(check_every=None))
        for _ in range(2):
            x.grad = torch.randn(params)
            optimizer.step()
        sent: int = optimizer.comm_stats()["step"]["bytes"]
        return sent

    mean, _ = ROUNDS[name]
    alone = ranks % 2 if name == "NoLoCo" else 0  # one rank of an odd number is its own partner, and agrees only
    messages = whole_round(mean, ranks, params)
    told = sum(nbytes for verb, nbytes in messages if verb != "exchange")
    expected = [sum(nbytes for _, nbytes in messages)] * (ranks - alone) + [told] * alone
    assert sorted(on_threads(ranks, run)) == sorted(expected)


def costs(ranks: int, latency: float = 0.1, rate: float = 20e6) -> Costs:
    line, none = Line(latency, 8 / rate), Line(0.0, 0.0)
    link = {"all_reduce": line, "all_to_all": line, "all_gather": line, "exchange": line}
    means = {f"gradients_{name}": {"all_to_all": 1e-9, "end": 2e-9} for name in ("int8", "int4", "topk")}
    return Costs(ranks, link, dict.fromkeys(link, none), 0.0, {}, {}, means)


def test_a_round_takes_its_messages_and_its_computing() -> None:
    found = predict_rounds(costs(4), 1_000_000, 0.5)
    assert found["DiLoCo"].seconds == pytest.approx(3 * 0.1 + 8 * found["DiLoCo"].nbytes / 20e6)
    assert found["DiLoCo, Int4()"].seconds == pytest.approx(4 * 0.1 + 8 * found["DiLoCo, Int4()"].nbytes / 20e6 + 3e-3)
    assert found["NoLoCo"].seconds == pytest.approx(3 * 0.1 + 8 * found["NoLoCo"].nbytes / 20e6)
    assert found["Gossip"].seconds == pytest.approx(4 * 0.1 + 8 * found["Gossip"].nbytes / 20e6)
    for each in found.values():
        share = each.period * 0.5 / (each.period * 0.5 + each.seconds)
        shorter = (each.period - 1) * 0.5 / ((each.period - 1) * 0.5 + each.seconds)
        assert shorter < NEARLY_ALL <= share


def test_the_ranks_of_all_parts_agree_on_a_round_and_confirm_it() -> None:
    """4 replicas of 2 parts each are 8 ranks."""
    whole, cut = (predict_rounds(costs(4), 1_000_000, 0.5, shard)["DiLoCo"] for shard in (1, 2))
    assert cut.nbytes - whole.nbytes == (7 - 3) * ROUND_BYTES


def test_from_where_on_a_second_selection_sends_less() -> None:
    for ranks in (2, 3, 8, 100):
        found = predict_rounds(costs(ranks), 10**7, 1.0)
        gathered, two_ways = found["SparseLoCo"].nbytes, found["DiLoCo, TopK(), outer_momentum=0"].nbytes
        assert gathered / two_ways == pytest.approx(ranks / 2, rel=0.05)


@pytest.mark.parametrize("params", [1, 64, 1000, 1500, 2000, 3000, 3 * 4096, 10**5, 10**9])
def test_from_how_many_ranks_on_both_ways_receive_fewer_bytes(params: int) -> None:
    """It is so with each number of ranks from there on, and with none below."""

    def nbytes(name: str, ranks: int) -> int:
        return sum(sent for _, sent in whole_round(ROUNDS[name][0], ranks, params))

    first = fewer_from(params)
    for ranks in [*range(2, 200), 1000, 10**4]:
        assert (nbytes(BOTH_WAYS, ranks) < nbytes(GATHERED, ranks)) == (first is not None and ranks >= first), ranks


def test_that_is_from_three_on_but_for_small_models() -> None:
    assert [fewer_from(params) for params in (64, 1000, 1500, 2000, 3000, 10**5, 10**9)] == [None, None, 6, 8, 3, 3, 3]
