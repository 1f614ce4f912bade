"""n steps, save, load, n steps = 2n steps, in every phase, to the bit; and what happens at another world size."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from worlds import Toy, on_threads, params_of, same_bits, tensors_in, through_a_file, train

from commopt import LocalSGD, OneBitAdam, OneBitLamb
from commopt.comm import LocalBackend
from commopt.compress import Sign
from commopt.optim import join_state_dict, split_state_dict
from commopt.state import loading


def make(model, backend, **settings):
    return OneBitAdam(model.parameters(), lr=1e-2, betas=(0.9, 0.9), backend=backend, eps=1e-5, **settings)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("half", [3, 4, 5, 9], ids=["warmup", "before the switch", "at the switch", "compressed"])
def test_a_resumed_run_equals_one_never_stopped(world_size, dtype, half):
    def run(backend):
        straight = Toy(dtype)
        optimizer = make(straight, backend, freeze_step=5)
        train(straight, optimizer, range(2 * half), backend.rank, world_size)

        model = Toy(dtype)
        first = make(model, backend, freeze_step=5)
        train(model, first, range(half), backend.rank, world_size)
        saved = through_a_file({"model": model.state_dict(), "optimizer": first.state_dict()})

        resumed = Toy(dtype, seed=9)
        second = make(resumed, backend, freeze_step=5)
        resumed.load_state_dict(saved["model"])
        second.load_state_dict(saved["optimizer"])
        train(resumed, second, range(half, 2 * half), backend.rank, world_size)
        assert same_bits(params_of(straight), params_of(resumed))
        assert same_bits(tensors_in(optimizer.state_dict()), tensors_in(second.state_dict()))
        return params_of(resumed)

    results = on_threads(world_size, run)
    assert all(same_bits(results[0], r) for r in results)


def test_auto_resumes_between_two_looks():
    def run(backend):
        def step(p, optimizer, t):
            p.grad = torch.ones_like(p) * (1 + backend.rank)
            optimizer.step()

        p = nn.Parameter(torch.zeros(64))
        optimizer = OneBitAdam([p], betas=(0.9, 0.9), backend=backend)
        for t in range(25):
            step(p, optimizer, t)
        q = nn.Parameter(p.detach().clone())
        second = OneBitAdam([q], betas=(0.9, 0.9), backend=backend)
        second.load_state_dict(through_a_file(optimizer.state_dict()))
        for t in range(25, 80):
            step(p, optimizer, t)
            step(q, second, t)
            assert optimizer.param_groups[0]["freeze_step"] == second.param_groups[0]["freeze_step"]
        assert optimizer.param_groups[0]["freeze_step"] == 60
        assert torch.equal(p, q)

    on_threads(2, run)


def test_loading_onto_a_fresh_optimizer_is_no_operation_and_keeps_dtypes():
    """What Accelerate's prepare() does; a bf16 model must not turn fp32 state into bf16."""

    def run(backend):
        model = Toy(torch.bfloat16)
        optimizer = make(model, backend, freeze_step=2)
        optimizer.load_state_dict(optimizer.state_dict())
        other = Toy(torch.bfloat16)
        untouched = make(other, backend, freeze_step=2)
        train(model, optimizer, range(6), backend.rank, 2)
        train(other, untouched, range(6), backend.rank, 2)
        optimizer.load_state_dict(optimizer.state_dict())
        assert {t.dtype for t in tensors_in(optimizer.state_dict()) if t.dim()} == {torch.float32}  # numbers: float64
        assert same_bits(params_of(model), params_of(other))
        bucket = optimizer.buckets[0]
        view = optimizer.state[bucket.params[-1]]["exp_avg"]
        assert view.untyped_storage().data_ptr() == bucket.buffers["exp_avg"].untyped_storage().data_ptr()

    on_threads(2, run)


def test_a_saved_view_does_not_carry_its_whole_buffer():
    model = Toy()
    for entry in make(model, LocalBackend()).state_dict()["state"].values():
        for t in entry.values():
            assert t.untyped_storage().nbytes() == t.nbytes


@pytest.mark.parametrize("old", [2, 3, 4])
@pytest.mark.parametrize("new", [1, 2, 3, 4])
def test_at_another_world_size_residuals_are_kept(old, new):
    """The mean of the worker residuals plus the server residuals is the same before and after (exact at old = new)."""

    def save(backend):
        model = Toy(torch.float64)
        optimizer = make(model, backend, freeze_step=3)
        train(model, optimizer, range(8), backend.rank, old)
        return model.state_dict(), *split_state_dict(through_a_file(optimizer.state_dict()))

    saved = on_threads(old, save)
    replicated, rank_locals = saved[0][1], [s[2] for s in saved]
    assert all(torch.equal(a, b) for a, b in zip(tensors_in(saved[0][1]), tensors_in(saved[1][1])))

    def residuals(parts, shape):
        worker = torch.stack([p["worker_error"] for p in parts]).mean(0)
        return worker + torch.cat([p["server_error"] for p in parts]).view(shape)

    def load(backend):
        model = Toy(torch.float64)
        model.load_state_dict(saved[0][0])
        optimizer = make(model, backend, freeze_step=3, bucket_mb=25.0 if old == new else 3e-4)
        optimizer.load_state_dict(join_state_dict(replicated, rank_locals, backend.rank, new))
        state = {i: {**optimizer.state[p], **optimizer.residuals.get(p, {})} for i, p in enumerate(model.parameters())}
        copied = {i: {k: v.clone() for k, v in s.items()} for i, s in state.items()}
        train(model, optimizer, range(8, 12), backend.rank, new)
        return copied, params_of(model)

    loaded = on_threads(new, load)
    assert all(same_bits(loaded[0][1], params) for _, params in loaded)
    total = 0.0
    for i, entry in replicated["state"].items():
        before = residuals([part["state"][i] for part in rank_locals], entry["exp_avg"].shape)
        states = [state[i] for state, _ in loaded]
        after = residuals(states, entry["exp_avg"].shape) if new > 1 else states[0]["exp_avg"] - entry["exp_avg"]
        torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-15)
        total += before.abs().sum().item()
    assert total > 0


def test_with_the_state_of_rank_0_alone_replicas_stay_equal_and_one_warning_says_what_was_lost(caplog):
    def run(backend, saved=None):
        model = Toy()
        optimizer = make(model, backend, freeze_step=3)
        if saved is None:
            train(model, optimizer, range(6), backend.rank, 2)
            return model.state_dict(), optimizer.state_dict()
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        errors = optimizer.comm_stats()["residual_norm"]
        train(model, optimizer, range(6, 9), backend.rank, 2)
        return errors, params_of(model)

    rank_0 = on_threads(2, run)[0]
    caplog.clear()
    (kept, a), (lost, b) = on_threads(2, lambda backend: run(backend, rank_0))
    assert kept > 0
    assert lost == 0
    assert same_bits(a, b)
    assert caplog.text.count("start again from 0") == 1


def test_residuals_of_another_bucket_layout_are_not_taken_for_ones_own(monkeypatch, caplog):
    monkeypatch.setattr(loading, "by_a_door", lambda: " In a framework so.")

    def run(backend):
        model = Toy()
        optimizer = make(model, backend, freeze_step=1)
        train(model, optimizer, range(4), backend.rank, 2)
        other = make(model, backend, freeze_step=1, bucket_mb=3e-4)
        other.load_state_dict(optimizer.state_dict())
        return other.comm_stats()["residual_norm"]

    assert on_threads(2, run) == [0.0, 0.0]
    assert "start again from 0" in caplog.text
    assert "Make all as it was then, load, and freeze parameters later. In a framework so." in caplog.text


def test_the_state_of_a_torch_adam_is_taken_over():
    """A run that has started with Adam goes on with OneBitAdam."""
    theirs, ours = Toy(), Toy()
    adam = torch.optim.Adam(theirs.parameters(), lr=1e-2)
    train(theirs, adam, range(4))
    ours.load_state_dict(theirs.state_dict())
    optimizer = OneBitAdam(ours.parameters(), lr=1e-2)
    optimizer.load_state_dict(through_a_file(adam.state_dict()))
    train(theirs, adam, range(4, 8))
    train(ours, optimizer, range(4, 8))
    assert same_bits(params_of(theirs), params_of(ours))
    assert optimizer.param_groups[0]["step"] == 8


def test_the_state_of_another_model_is_refused_and_nothing_changes():
    model = Toy()
    optimizer = make(model, LocalBackend())
    train(model, optimizer, range(3))
    before = optimizer.state_dict()
    other = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=r"different number|doesn't match the size"):
        optimizer.load_state_dict(OneBitAdam(other.parameters()).state_dict())
    wrong = Toy()
    wrong.weight = nn.Parameter(torch.zeros(5, 6))
    with pytest.raises(ValueError, match=r"exp_avg .*\(5, 6\).*\(5, 5\).*another model"):
        optimizer.load_state_dict(make(wrong, LocalBackend()).state_dict())
    assert same_bits(tensors_in(before), tensors_in(optimizer.state_dict()))


def test_parts_of_different_worlds_are_not_joined():
    def run(backend):
        return split_state_dict(make(Toy(), backend, compressor=Sign()).state_dict())

    (replicated, a), (_, b) = on_threads(2, run)
    with pytest.raises(ValueError, match="every rank of one world"):
        join_state_dict(replicated, [b, a], 0, 2)
    with pytest.raises(ValueError, match="every rank of one world"):
        join_state_dict(replicated, [a], 0, 2)


def test_any_torch_optimizer_passes_through_split_and_join():
    model = Toy()
    adam = torch.optim.AdamW(model.parameters())
    train(model, adam, range(2))
    replicated, mine = split_state_dict(adam.state_dict())
    assert mine == {}
    assert same_bits(tensors_in(join_state_dict(replicated, [mine, mine], 1, 2)), tensors_in(adam.state_dict()))


def test_moving_or_casting_the_model_after_construction_moves_the_state():
    def run(backend):
        model = Toy()
        optimizer = make(model, backend, freeze_step=2)
        train(model, optimizer, range(4), backend.rank, 2)
        before = optimizer.state_dict()
        model.double()
        train(model, optimizer, range(4, 7), backend.rank, 2)
        assert {b.dtype for b in optimizer.buckets} == {torch.float64}
        assert before["state"][0]["exp_avg"].any()
        assert optimizer.state[model.embedding]["step"] == 7
        return params_of(model)

    logging.getLogger("commopt").setLevel(logging.ERROR)
    a, b = on_threads(2, run)
    logging.getLogger("commopt").setLevel(logging.NOTSET)
    assert same_bits(a, b)


@pytest.mark.parametrize("where", ["the own part", "a parameter group", "the parts of all ranks"])
def test_a_state_from_before_names_were_changed_is_refused_and_changes_nothing(where):
    def run(backend):
        model = Toy()
        optimizer = OneBitAdam(model.parameters(), freeze_step=1, backend=backend)
        train(model, optimizer, range(3), backend.rank, 2)
        state, before = optimizer.state_dict(), params_of(model)
        if where == "the own part":
            state["residuals"]["share"] = state["residuals"].pop("shard_index")
        elif where == "a parameter group":
            state["param_groups"][0]["met_step"] = 0
        shared, part = split_state_dict(state)
        if where == "the parts of all ranks":
            del part["shard_index"]

        def load():
            return optimizer.load_state_dict(
                join_state_dict(shared, [part], 0, 2) if "shard_index" not in part else state
            )

        with pytest.raises(ValueError, match=r"saved before commopt 0\.1\.0"):
            load()
        assert same_bits(before, params_of(model))
        train(model, optimizer, range(3, 5), backend.rank, 2)
        return params_of(model)

    a, b = on_threads(2, run)
    assert same_bits(a, b)


class Mine(OneBitAdam):
    """A user's own."""


def test_the_state_of_another_optimizer_is_refused():
    def made(cls, **settings):
        p = nn.Parameter(torch.ones(5))
        optimizer = cls([p], backend=LocalBackend(), **settings)
        p.grad = torch.ones(5)
        optimizer.step()
        return optimizer

    adam, saved = made(OneBitAdam), made(OneBitLamb).state_dict()
    before = adam.state_dict()
    with pytest.raises(ValueError, match=r"the loaded state is that of OneBitLamb, and this is OneBitAdam: load it"):
        adam.load_state_dict(saved)
    assert same_bits(tensors_in(adam.state_dict()), tensors_in(before))
    made(Mine).load_state_dict(before)
    adam.load_state_dict(made(Mine).state_dict())
    assert adam.param_groups[0]["optimizer"] == "OneBitAdam"
    with pytest.raises(ValueError, match=r"that of LocalSGD\(AdamW\), and this is LocalSGD\(SGD\)"):
        made(LocalSGD, base=torch.optim.SGD, lr=0.1).load_state_dict(
            made(LocalSGD, base=torch.optim.AdamW).state_dict()
        )
    rounds = made(LocalSGD, base=OneBitAdam)
    rounds.load_state_dict(made(LocalSGD, base=OneBitAdam).state_dict())
    rounds.load_state_dict(adam.state_dict())  # that of the base alone
    assert rounds.param_groups[0]["outer_optimizer"] == "LocalSGD(OneBitAdam)"
    assert rounds.param_groups[0]["optimizer"] == "OneBitAdam"
    with pytest.raises(ValueError, match=r"that of LocalSGD\(OneBitAdam\), and this is OneBitAdam"):
        adam.load_state_dict(rounds.state_dict())


def test_a_state_of_somebody_elses_lamb_with_a_number_by_our_name_is_refused():
    """It would count as one whose variance stands, with a coefficient of which nobody knows what it is of."""
    p = nn.Parameter(torch.ones(5))
    theirs, ours = torch.optim.Adam([p]), OneBitLamb([p], backend=LocalBackend())
    p.grad = torch.ones(5)
    theirs.step()
    saved = theirs.state_dict()
    ours.load_state_dict(saved)
    saved["state"][0]["scaling_coeff"] = torch.tensor(2.0)
    with pytest.raises(ValueError, match=r"parameter 0 has 'scaling_coeff', which is another number here; allowed are"):
        ours.load_state_dict(saved)
