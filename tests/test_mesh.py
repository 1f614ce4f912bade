"""Sharded parameters: FSDP2 and its like inside, and one bit between replicas. Real processes over Gloo."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import mesh_scenes
import pytest
import torch
from every import COMMUNICATING
from torch import Tensor
from worlds import on_processes, same_bits

from commopt.optim.own_tensor import OwnTensor, boxes


def test_a_sharded_run_with_the_identity_is_the_unsharded_one():
    """Every optimizer, with clipping and without; scalar, tied, frozen and unused parameters, uneven, empty pieces."""
    for furthest in on_processes(4, mesh_scenes.as_unsharded):
        assert len(furthest) == 2 * 9
        for name, distance in furthest.items():
            assert distance < 1e-12, name


# saving ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def saved(folder: Path) -> list[dict[str, Any]]:
    """What the ranks of (2, 2) had when they wrote, and later."""
    return on_processes(4, partial(mesh_scenes.save, folder=str(folder), shards=2))


def owes(ranks: list[dict[str, Any]], name: str) -> dict[int, Tensor]:
    """By parameter, the mean over the replicas of what workers owe, plus what servers do."""
    out: dict[int, Tensor] = {}
    for i in ranks[0][name]["owed"]:
        for which in ("worker_error", "server_error"):
            rows: dict[tuple[int, ...], Tensor] = {}
            for rank in ranks:
                for found, place, values in rank[name]["owed"][i]:
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


@pytest.mark.parametrize("flat", [False, True])
def test_on_the_same_mesh_the_resumed_run_is_the_one_never_stopped(saved, folder, flat):
    loaded = on_processes(4, partial(mesh_scenes.load, folder=str(folder), shards=2, flat=flat))
    for name in COMMUNICATING:
        for before, after in zip(saved, loaded):
            assert same_bits(before[name]["later"], after[name]["later"]), name


@pytest.mark.parametrize(("replicas", "shards"), [(4, 1), (1, 2), (1, 1), (3, 1), (1, 4)])
def test_on_another_mesh_nothing_is_lost_and_back(saved, folder, tmp_path, replicas, shards):
    """What compression owes is kept, and where one replica is left, taken into what is compressed; replicas that were
    apart start from their mean."""
    flat = shards == 1
    away = partial(mesh_scenes.load, folder=str(folder), shards=shards, flat=flat, back=str(tmp_path))
    loaded = on_processes(replicas * shards, away)
    back = on_processes(4, partial(mesh_scenes.load, folder=str(tmp_path), shards=2, flat=flat))
    for name in COMMUNICATING:
        before = owes(saved, name)
        for ranks in (loaded, back) if replicas > 1 else ():
            after = owes(ranks, name)
            assert before.keys() == after.keys()
            for i in before:
                torch.testing.assert_close(after[i], before[i], rtol=1e-12, atol=1e-14)
        for ranks in (loaded, back):
            mean = [sum(ps) / len(ps) for ps in zip(*(rank[name]["start"] for rank in saved))]
            for rank in ranks:
                for p, q in zip(rank[name]["start"], mean):
                    torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4), (4, 1, 3)])
def test_a_run_of_elements_is_some_boxes(shape):
    numbers = torch.arange(math.prod(shape)).view(shape)
    for start in range(numbers.numel() + 1):
        for stop in range(start, numbers.numel() + 1):
            found = [numbers[tuple(map(slice, o, map(sum, zip(o, s))))].flatten() for o, s in boxes(shape, start, stop)]
            assert [int(n) for part in found for n in part] == list(range(start, stop))


def test_a_tensor_that_knows_its_place_stays_that_where_it_is_copied():
    import copy
    import pickle

    from commopt.optim.own_tensor import Place

    own = OwnTensor.make(torch.arange(3.0), Place((7, 3), (2, 0), (3, 3), 4, 1, 2))
    for other in (own.clone(), copy.deepcopy(own), pickle.loads(pickle.dumps(own)), own.to("cpu"), own.detach()):
        assert isinstance(other, OwnTensor)
        assert other.place == own.place
        assert other.plain().tolist() == [0, 1, 2]
    assert type(own + 1) is Tensor
    assert own.size() != (2, 7, 4)
    assert not own.size() != (9, 7, 3)
    assert own.rows_read == 9
