"""Parameters that are frozen while fragments are merged eagerly: one value on all ranks, without a synchronize()."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from worlds import Toy, on_threads, params_of, same_bits, train

from commopt import DiLoCo, SignMomentum, SlowMo, Streaming
from commopt.compress import Int4


@pytest.mark.parametrize("stop", [12, 13, 15])
@pytest.mark.parametrize(
    ("cls", "compressor", "ranks"), [(DiLoCo, None, 2), (SlowMo, None, 3), (SignMomentum, None, 2), (DiLoCo, Int4(), 3)]
)
def test_a_parameter_frozen_on_all_ranks_is_one_value_on_all_of_them(cls, compressor, ranks, stop):
    """From the next round but one on it stands, but for what a compressor owes of it; a run that is resumed knows that.
    Trained again, it moves."""

    def make(model, backend):
        settings = {"lr": 1e-2, "period": 4, "bucket_mb": 2e-4, "streaming": Streaming(2, merge="eager")}
        return cls(model.parameters(), compressor=compressor, backend=backend, **settings)

    def run(backend):
        model, other, rank = Toy(), Toy(seed=1), backend.rank
        optimizer, resumed = make(model, backend), make(other, backend)

        def seen():
            state = optimizer.state[model.weight]
            return [t.detach().clone() for t in (model.weight, state["anchor"], state["outer_momentum"])]

        train(model, optimizer, range(stop), rank, ranks)
        moving = seen()
        model.weight.requires_grad_(False)
        train(model, optimizer, range(stop, 25), rank, ranks)
        early = seen()
        resumed.load_state_dict(optimizer.state_dict())
        other.weight.requires_grad_(False)
        train(model, optimizer, range(25, 33), rank, ranks)
        train(other, resumed, range(25, 33), rank, ranks)
        assert same_bits(params_of(model), params_of(other))
        late = seen()
        model.weight.requires_grad_(True)
        train(model, optimizer, range(33, 45), rank, ranks)
        assert not torch.equal(model.weight, late[0])
        optimizer.synchronize()
        return moving, early, late, params_of(model)

    for moving, early, late, model in (found := on_threads(ranks, run)):
        assert same_bits(early, found[0][1])
        assert same_bits(late, found[0][2])
        assert same_bits(model, found[0][3])
        assert compressor is not None or same_bits(early, late)
        assert not torch.equal(moving[0], early[0])
    assert not torch.equal(found[0][0][1], found[1][0][1])


def test_a_parameter_frozen_on_one_rank_alone_moves_as_on_the_others():
    """As if no rank had frozen it."""

    def run(backend, freezes):
        params = [nn.Parameter(torch.zeros(64)), nn.Parameter(torch.zeros(64))]
        streaming = Streaming(2, merge="eager")
        optimizer = DiLoCo(params, torch.optim.SGD, lr=0.1, period=4, streaming=streaming, backend=backend)
        generator = torch.Generator().manual_seed(backend.rank)
        for step in range(24):
            for p in params:
                p.grad = torch.randn(64, generator=generator)
            if step >= 12:
                params[1].grad = None
                params[1].requires_grad_(not (freezes and backend.rank == 0))
            optimizer.step()
        return [*params_of(nn.ParameterList(params)), *(flat for b in optimizer.buckets for flat in b.buffers.values())]

    frozen, not_frozen = (on_threads(2, lambda backend, freezes=f: run(backend, freezes)) for f in (True, False))
    for mine, theirs in zip(frozen, not_frozen):
        assert same_bits(mine, theirs)
