"""State that somebody assigns, or deletes, in ``optimizer.state``: the one counts, the other is refused."""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from functools import partial

import pytest
import torch
from every import EVERY, every_communicating
from torch import nn
from worlds import Toy, Used, backward, on_threads, params_of, same_bits, tensors_in, through_a_file, train

from commopt import LocalSGD, OneBitAdam, OneBitLamb
from commopt.comm import LocalBackend
from commopt.optim import ReplicasDiffer
from commopt.outer.member_rounds import _forget_what_is_not_finite


def halved(optimizer, put):
    for bucket in optimizer.buckets:
        for p, which in itertools.product(bucket.params, bucket.buffers):
            put(p, which, optimizer.state[p][which] * 0.5)


def exchanged(model, optimizer, put):
    which = next(iter(optimizer.buckets[0].buffers))
    two = [optimizer.state[p][which] for p in (model.embedding, model.positions)]
    put(model.embedding, which, torch.cat([two[1], two[0][:6].clone()]))
    put(model.positions, which, two[1].flip(0))
    for counter in list(optimizer.buckets[0].numbers)[:1]:
        put(model.bias, counter, torch.tensor(3.0))


@every_communicating
def test_what_is_assigned_is_as_what_is_changed_in_place(name):
    """Of every parameter, all at once, and of two of them in exchange; and of a counter."""

    def run(backend, assigns):
        model = Toy()
        optimizer = EVERY[name](model.parameters(), lr=1e-2, backend=backend)

        def put(p, which, value):
            if assigns:
                optimizer.state[p][which] = value
            else:
                optimizer.state[p][which].copy_(value)

        train(model, optimizer, range(4), backend.rank, 2)
        halved(optimizer, put)
        train(model, optimizer, range(4, 5), backend.rank, 2)
        exchanged(model, optimizer, put)
        train(model, optimizer, range(5, 6), backend.rank, 2)
        state = tensors_in(optimizer.state_dict())
        train(model, optimizer, range(6, 9), backend.rank, 2)
        return params_of(model), state, tensors_in(optimizer.state_dict())

    in_place, assigned = (on_threads(2, partial(run, assigns=assigns)) for assigns in (False, True))
    for there, here in zip(in_place, assigned):
        for mine, theirs in zip(there, here):
            assert same_bits(mine, theirs)


def test_tensors_that_are_exchanged_and_a_number_that_is_assigned():
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
    optimizer = OneBitAdam(params, lr=1e-2, backend=LocalBackend())
    for p, scale in zip(params, (1.0, 2.0)):
        p.grad = torch.arange(3) * scale
    optimizer.step()
    first, second = (optimizer.state[p] for p in params)
    before = [first["exp_avg"].clone(), second["exp_avg"].clone()]
    first["exp_avg"], second["exp_avg"] = second["exp_avg"], first["exp_avg"]
    second["step"] = 7
    saved = optimizer.state_dict()["state"]
    assert same_bits([saved[1]["exp_avg"], saved[0]["exp_avg"]], before)
    assert saved[1]["step"] == 7
    optimizer.buckets[0]["exp_avg"].zero_()
    assert not first["exp_avg"].any()
    optimizer.step()
    assert second["step"] == 8


def test_copies_that_a_framework_puts_there_change_nothing():
    def run(backend, moved):
        model = Toy()
        optimizer = OneBitAdam(model.parameters(), lr=1e-2, freeze_step=2, backend=backend)
        for step in range(6):
            train(model, optimizer, range(step, step + 1), backend.rank, 2)
            for p in list(optimizer.state) if moved else ():
                optimizer.state[p] = {key: value.clone() for key, value in optimizer.state[p].items()}
        return params_of(model), tensors_in(optimizer.state_dict())

    for stays, moves in zip(on_threads(2, lambda b: run(b, False)), on_threads(2, lambda b: run(b, True))):
        assert same_bits(stays[0], moves[0])
        assert same_bits(stays[1], moves[1])


def delete_an_entry(optimizer, p):
    del optimizer.state[p]


def delete_a_tensor(optimizer, p):
    optimizer.state[p].popitem()


def clear(optimizer, p):
    optimizer.state.clear()


def begin_anew(optimizer, p):
    optimizer.state = defaultdict(dict)


@pytest.mark.parametrize("delete", [delete_an_entry, delete_a_tensor, clear, begin_anew])
@every_communicating
def test_what_is_deleted_is_refused_by_name_until_a_state_is_loaded(name, delete):
    def run(backend):
        model, twin = Toy(), Toy()
        optimizer = EVERY[name](model.named_parameters(), lr=1e-2, backend=backend)
        other = EVERY[name](twin.named_parameters(), lr=1e-2, backend=backend)
        for m, o in ((model, optimizer), (twin, other)):
            train(m, o, range(4), backend.rank, 2)
        saved, before = through_a_file(optimizer.state_dict()), params_of(model)
        delete(optimizer, model.weight)
        backward(model, 4, backend.rank, 2)
        for call in (optimizer.step, optimizer.state_dict, lambda: copy.deepcopy(optimizer)):
            with pytest.raises(ValueError, match=r"optimizer.state has no '\w+' of \w+ any more"):
                call()
        model.double()
        with pytest.raises(ValueError, match=r"optimizer.state has no '\w+' of \w+ any more"):
            optimizer.step()
        model.float()
        assert same_bits(before, params_of(model))
        optimizer.load_state_dict(saved)
        for m, o in ((model, optimizer), (twin, other)):
            train(m, o, range(4, 7), backend.rank, 2)
        return params_of(model), params_of(twin)

    for resumed, never_stopped in on_threads(2, run):
        assert same_bits(resumed, never_stopped)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(3), r"a tensor of shape \(3,\) as 'exp_avg' of weight; allowed is the shape \(5, 5\)"),
        ("zeros", "'zeros' as 'exp_avg' of weight"),
        (None, "no 'exp_avg' of weight any more"),
    ],
)
def test_what_does_not_fit_on_one_rank_ends_the_step_on_all(value, message):
    def run(backend):
        model = Toy()
        optimizer = OneBitAdam(model.named_parameters(), lr=1e-2, freeze_step=2, backend=backend)
        train(model, optimizer, range(4), backend.rank, 2)
        before, mine = params_of(model), optimizer.state[model.weight]["exp_avg"]
        if backend.rank == 1:
            optimizer.state[model.weight]["exp_avg"] = value
        backward(model, 4, backend.rank, 2)
        error = (ValueError, message) if backend.rank == 1 else (RuntimeError, "rank 1")
        with pytest.raises(error[0], match=error[1]):
            optimizer.step()
        assert same_bits(before, params_of(model))
        optimizer.state[model.weight]["exp_avg"] = mine
        optimizer.step()
        return params_of(model)

    first, second = on_threads(2, run)
    assert same_bits(first, second)


def test_what_is_assigned_on_one_rank_only_is_found_in_the_next_step():
    def run(backend):
        model = Toy()
        optimizer = OneBitAdam(model.parameters(), lr=1e-2, freeze_step=2, backend=backend)
        train(model, optimizer, range(4), backend.rank, 2)
        if backend.rank == 1:
            optimizer.state[model.bias]["exp_avg"] = torch.zeros(5)
        backward(model, 4, backend.rank, 2)
        with pytest.raises(ReplicasDiffer):
            optimizer.step()

    on_threads(2, run)


def test_with_overlap_what_is_assigned_counts_from_the_next_backward_and_that_is_said():
    """What is changed in place counts at once."""

    def run(backend, overlap):
        model = Used()
        settings = {"lr": 1e-2, "freeze_step": 2, "bucket_mb": 1.2e-4, "overlap": overlap}
        optimizer = OneBitAdam(model.parameters(), backend=backend, **settings)
        train(model, optimizer, range(4), backend.rank, 2)
        if overlap:
            optimizer.state[model.embedding]["exp_avg"] = torch.zeros_like(model.embedding)
            before = params_of(model)
            backward(model, 4, backend.rank, 2)
            with pytest.raises(ValueError, match=r"overlap=True has sent in backward.*counts from the next backward"):
                optimizer.step()
            assert same_bits(before, params_of(model))
        else:
            optimizer.state[model.embedding]["exp_avg"].zero_()
        train(model, optimizer, range(4, 6), backend.rank, 2)
        optimizer.state[model.weight]["exp_avg"].zero_()
        train(model, optimizer, range(6, 8), backend.rank, 2)
        return params_of(model)

    plain, overlapped = (on_threads(2, partial(run, overlap=overlap)) for overlap in (False, True))
    assert same_bits(plain[0], overlapped[0])
    assert same_bits(overlapped[0], overlapped[1])


# a base with buckets --------------------------------------------------------------------------------------------------


def test_the_state_of_a_base_stays_in_float32_where_the_model_is_cast():
    model = Toy()
    optimizer = LocalSGD(model.parameters(), OneBitAdam, lr=1e-2, period=4, backend=LocalBackend())
    train(model, optimizer, range(3))
    before = [v.clone() for entry in optimizer.base.state.values() for v in entry.values()]
    model.bfloat16()
    optimizer.follow()
    assert same_bits(before, tensors_in(optimizer.base.state_dict()))
    train(model, optimizer, range(3, 6))
    assert {b.dtype for b in optimizer.base.buckets} == {torch.float32}


def test_a_base_begins_anew_where_its_state_is_not_finite():
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    base = OneBitLamb([p, q], lr=1e-2, backend=LocalBackend())
    fresh = copy.deepcopy(base.state[p])
    for x in (p, q):
        x.grad = torch.ones_like(x)
    base.step()
    kept = copy.deepcopy(base.state[q])
    base.state[p]["exp_avg"].fill_(torch.nan)
    _forget_what_is_not_finite(base)
    assert all(torch.equal(base.state[p][k], fresh[k]) for k in fresh)
    assert all(torch.equal(base.state[q][k], kept[k]) for k in kept)
    base.step()
    assert p.isfinite().all()
