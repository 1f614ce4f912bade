"""One state of all ranks, on the rank that saves: consolidate_state_dict()."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from every import COMMUNICATING, EVERY
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only
from worlds import Toy, backward, on_threads, params_of, same_bits, tensors_in, through_a_file, train

from commopt import DiLoCo, OneBitAdam
from commopt.comm import LocalBackend, ThreadBackend
from commopt.optim import join_state_dict, split_state_dict
from commopt.state import consolidate

STEPS = 5
"""Compressed phases have begun, and a round of three local steps is under way."""


def make(name: str, backend: Any, model: Toy, **settings: Any) -> Any:
    return EVERY[name](model.parameters(), backend=backend, lr=1e-2, bucket_mb=3e-4, **settings)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", COMMUNICATING)
def test_one_state_gives_each_rank_its_own_back(name: str, world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consolidate, "IN_FLIGHT", 1)
    to = world_size - 1

    def run(backend: ThreadBackend) -> tuple[Any, ...]:
        model = Toy()
        optimizer = make(name, backend, model)
        train(model, optimizer, range(STEPS), backend.rank, world_size)
        optimizer.consolidate_state_dict(to)
        state = [through_a_file(optimizer.state_dict()), copy.deepcopy(model.state_dict())]
        train(model, optimizer, range(STEPS, STEPS + 6), backend.rank, world_size)
        return *state, params_of(model), optimizer.state_dict()

    def resume(backend: ThreadBackend) -> tuple[Any, ...]:
        model = Toy(seed=1)
        model.load_state_dict(saved[to][1])
        optimizer = make(name, backend, model)
        optimizer.load_state_dict(saved[to][0])
        train(model, optimizer, range(STEPS, STEPS + 6), backend.rank, world_size)
        return params_of(model), optimizer.state_dict()

    saved = on_threads(world_size, run)
    parts = saved[to][0]["residuals_of_ranks"]
    assert [part["rank"] for part in parts] == list(range(world_size))
    assert not any("residuals_of_ranks" in state for rank, (state, *_) in enumerate(saved) if rank != to)
    for before, after in zip(saved, on_threads(world_size, resume)):
        assert same_bits(before[2], after[0])
        assert same_bits(tensors_in(before[3]), tensors_in(after[1]))


@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("name", ["OneBitAdam", "ZeroOneAdam", "DiLoCo"])
def test_another_world_gets_what_the_joined_state_gives(name: str, new: int) -> None:
    def save(backend: ThreadBackend) -> Any:
        model = Toy()
        optimizer = make(name, backend, model)
        train(model, optimizer, range(STEPS), backend.rank, 2)
        optimizer.consolidate_state_dict()
        return optimizer.state_dict()

    def load(backend: ThreadBackend) -> list[Any]:
        out = []
        for given in (saved[0], join_state_dict(replicated, parts, backend.rank, new)):
            model = Toy()
            optimizer = make(name, backend, model)
            optimizer.load_state_dict(given)
            out.append([*params_of(model), *tensors_in(optimizer.state_dict())])
        return out

    saved = on_threads(2, save)
    replicated, parts = split_state_dict(saved[0])[0], [split_state_dict(state)[1] for state in saved]
    assert "residuals_of_ranks" not in replicated
    for consolidated, joined in on_threads(new, load):
        assert same_bits(consolidated, joined)


def test_what_is_old_is_not_saved() -> None:
    """After a step, a synchronisation, a load or a new group, a state is that of one rank again."""

    def run(backend: ThreadBackend) -> list[bool]:
        model, another, late = Toy(), Toy(), torch.nn.Parameter(torch.ones(3))
        optimizer = DiLoCo(model.parameters(), period=4, lr=1e-2, backend=backend)
        state = optimizer.state_dict()
        one_bit = OneBitAdam(another.parameters(), freeze_step=1, backend=backend)

        def stays(optimizer: Any, change: Any) -> bool:
            optimizer.consolidate_state_dict()
            had = "residuals_of_ranks" in optimizer.state_dict()
            assert had == ("residuals_of_ranks" in optimizer.state_dict()) == (backend.rank == 0)
            assert "residuals_of_ranks" not in copy.deepcopy(optimizer).state_dict()
            change()
            return "residuals_of_ranks" in optimizer.state_dict()

        return [
            stays(optimizer, lambda: train(model, optimizer, range(1), backend.rank, 2)),
            stays(one_bit, lambda: train(another, one_bit, range(1), backend.rank, 2)),
            stays(optimizer, optimizer.synchronize),
            stays(optimizer, lambda: optimizer.load_state_dict(state)),
            stays(optimizer, lambda: optimizer.add_param_group({"params": [late]})),
            stays(optimizer, optimizer.rebind),
        ]

    assert on_threads(2, run) == [[False] * 6] * 2


def test_it_is_in_no_step_and_in_the_total() -> None:
    def run(backend: ThreadBackend) -> tuple[Any, Any, int]:
        model = Toy()
        optimizer = make("OneBitAdam", backend, model)
        train(model, optimizer, range(4), backend.rank, 2)
        before = optimizer.comm_stats()
        optimizer.consolidate_state_dict()
        after = optimizer.comm_stats()
        train(model, optimizer, range(4, 5), backend.rank, 2)
        later = optimizer.comm_stats()
        sent = after["total"]["bytes"] - before["total"]["bytes"]
        return before["step"], later["step"], sent

    for before, later, sent in on_threads(2, run):
        assert before == later
        assert sent > 4 * sum(p.numel() for p in Toy().parameters())


def test_inside_averaged_it_is_what_it_is_outside() -> None:
    def run(backend: ThreadBackend) -> bool:
        model = Toy()
        optimizer = make("DiLoCo", backend, model)
        train(model, optimizer, range(STEPS), backend.rank, 2)
        optimizer.consolidate_state_dict()
        outside = optimizer.state_dict()
        with optimizer.averaged():
            optimizer.consolidate_state_dict()
            inside = optimizer.state_dict()
        parts = [state.get("residuals_of_ranks", [state["residuals"]]) for state in (outside, inside)]
        return all(same_bits(*([t for _, t in tensors(part)] for part in pair)) for pair in zip(*parts))

    def tensors(part: Any) -> list[Any]:
        return [(i, t) for i, entry in part["state"].items() for t in entry.values()]

    assert all(on_threads(2, run))


@pytest.mark.parametrize("name", ["DiLoCo", "CSER"])
def test_a_model_that_is_loaded_between_two_rounds_is_saved_inside_averaged_as_outside(name: str) -> None:
    def run(backend: ThreadBackend) -> bool:
        model = Toy()
        optimizer = make(name, backend, model)
        model.load_state_dict(Toy(seed=1).state_dict())
        with optimizer.averaged():
            inside = optimizer.state_dict()
        again = Toy(seed=1)
        loaded = make(name, backend, again)
        loaded.load_state_dict(inside)
        assert same_bits(tensors_in(inside), tensors_in(optimizer.state_dict()))
        return same_bits(params_of(again), params_of(Toy(seed=1)))

    assert all(on_threads(2, run))


def test_copies_in_place_of_state_change_nothing() -> None:
    """Frameworks that move an optimizer to a device put copies into its state, all but of "step"."""

    def run(backend: ThreadBackend, name: str, spoilt: bool) -> Any:
        model = Toy()
        optimizer = make(name, backend, model)
        for step in range(STEPS + 1):
            if spoilt:
                for entry in optimizer.state.values():
                    entry.update({key: value.clone() for key, value in entry.items() if key != "step"})
            if step == STEPS:
                optimizer.synchronize()
                return optimizer.state_dict(), params_of(model)
            train(model, optimizer, range(step, step + 1), backend.rank, 2)

    for name in ("OneBitLamb", "ZeroOneAdam", "CSER", "DiLoCo"):
        right, copied = (on_threads(2, lambda b, n=name, s=s: run(b, n, s)) for s in (False, True))
        for (state, params), (state_of_copies, params_of_copies) in zip(right, copied):
            assert same_bits(params, params_of_copies), name
            assert same_bits(tensors_in(state), tensors_in(state_of_copies)), name


@pytest.mark.parametrize("to", [-1, 2, True, "0", 1.0])
def test_a_rank_that_there_is_not(to: Any) -> None:
    def run(backend: ThreadBackend) -> str:
        with pytest.raises(ValueError, match="to must be the number of a rank, 0 to 1") as error:
            make("OneBitAdam", backend, Toy()).consolidate_state_dict(to)
        return str(error.value)

    assert all(repr(to) in said for said in on_threads(2, run))


def test_one_rank_alone_says_nothing() -> None:
    for name in COMMUNICATING:
        model = Toy()
        optimizer = make(name, LocalBackend(), model)
        train(model, optimizer, range(STEPS))
        optimizer.consolidate_state_dict()
        assert "residuals_of_ranks" not in optimizer.state_dict()


def test_not_while_a_step_is_on_its_way() -> None:
    def run(backend: ThreadBackend) -> bool:
        model = Toy()
        model.unused.requires_grad_(False)
        optimizer = make("OneBitAdam", backend, model, overlap=True)
        train(model, optimizer, range(4), backend.rank, 2)
        backward(model, 4, backend.rank, 2)
        with pytest.raises(ValueError, match="overlap=True has begun the next step"):
            optimizer.consolidate_state_dict()
        optimizer.step()
        optimizer.consolidate_state_dict()
        return "residuals_of_ranks" in optimizer.state_dict()

    assert on_threads(2, run) == [True, False]


@pytest.mark.parametrize("name", ["OneBitAdam", "ZeroOneAdam", "DiLoCo"])
def test_parts_on_devices_of_their_own_are_joined_where_the_first_is(name: str) -> None:
    """As GPUs save them: each rank's on its own, or on the CPU if another rank has gathered it."""

    def save(backend: ThreadBackend) -> Any:
        model = Toy()
        optimizer = make(name, backend if name == "DiLoCo" else backend.nodes(2), model)
        train(model, optimizer, range(STEPS), backend.rank, 4)
        return split_state_dict(optimizer.state_dict())

    saved = on_threads(4, save)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        parts = [
            tree_map_only(Tensor, lambda t, at=at: mode.from_tensor(t).to(at), part)
            for at, (_, part) in zip(("cuda:1", "cuda:0", "cpu", "cuda:0"), saved)
        ]
        joined = join_state_dict(saved[0][0], parts, 0, 3)["residuals"]
    assert joined["state"]
    assert {str(t.device) for t in tree_leaves(joined) if isinstance(t, Tensor) and t.dim()} == {"cuda:1"}
