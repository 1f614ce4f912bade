"""The laws that Lamb and Lans share: torch's conventions, and state in float32 whatever the parameters are."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from worlds import Toy, backward, params_of, same_bits, tensors_in, through_a_file, tokens, train

from commopt import Lamb, Lans, OneBitAdam, OneBitLamb
from commopt.comm import LocalBackend

HYPER = {"lr": 0.02, "eps": 1e-6, "weight_decay": 0.05, "betas": (0.9, 0.98)}
both = pytest.mark.parametrize("cls", [Lamb, Lans])


@both
def test_it_learns(cls):
    """One batch by heart."""
    model = Toy()
    optimizer = cls(model.parameters(), lr=0.05)
    losses = []
    for _ in range(100):
        model.zero_grad()
        loss = model(tokens(0, 0, 1))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    assert losses[-1] < losses[0] - 0.5, losses[::10]


@both
def test_groups_have_their_own_settings(cls):
    """As two optimizers would, to the bit."""
    model, same = Toy(), Toy()
    others = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.0, "min_coeff": 0.2, "max_coeff": 0.5}
    ours, theirs = list(model.parameters()), list(same.parameters())
    optimizer = cls([{"params": ours[::2]}, {"params": ours[1::2], **others}], **HYPER)
    apart = [cls(theirs[::2], **HYPER), cls(theirs[1::2], **others)]
    for step in range(4):
        backward(model, step, 0, 1)
        backward(same, step, 0, 1)
        for o in (optimizer, *apart):
            o.step()
    assert same_bits(params_of(model), params_of(same))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@both
def test_half_precision_parameters_have_float32_state_and_are_rounded_once(cls, dtype):
    p = nn.Parameter(torch.randn(50, generator=torch.Generator().manual_seed(0)).to(dtype))
    optimizer = cls([p], lr=0.02)
    for step in range(5):
        wide = nn.Parameter(p.detach().float())
        theirs = cls([wide], lr=0.02)
        theirs.load_state_dict(optimizer.state_dict())
        p.grad = torch.randn(50, generator=torch.Generator().manual_seed(step)).to(dtype)
        wide.grad = p.grad.float()
        optimizer.step()
        theirs.step()
        assert torch.equal(p, wide.to(dtype))
        assert optimizer.state[p]["exp_avg"].dtype == torch.float32
        assert torch.equal(optimizer.state[p]["exp_avg_sq"], theirs.state[wide]["exp_avg_sq"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@both
def test_a_resumed_run_equals_one_never_stopped(cls, dtype):
    straight, model, resumed = Toy(dtype), Toy(dtype), Toy(dtype, seed=9)
    optimizer, first, second = (cls(m.parameters(), **HYPER) for m in (straight, model, resumed))
    train(straight, optimizer, range(8))
    train(model, first, range(4))
    saved = through_a_file({"model": model.state_dict(), "optimizer": first.state_dict()})
    resumed.load_state_dict(saved["model"])
    second.load_state_dict(saved["optimizer"])
    train(resumed, second, range(4, 8))
    assert same_bits(params_of(straight), params_of(resumed))
    assert same_bits(tensors_in(optimizer.state_dict()), tensors_in(second.state_dict()))


@both
def test_loading_copies(cls):
    model, other = Toy(), Toy()
    first, second = cls(model.parameters()), cls(other.parameters())
    train(model, first, range(2))
    saved = first.state_dict()
    second.load_state_dict(saved)
    before = [t.clone() for t in tensors_in(saved)]
    train(other, second, range(2))
    assert same_bits(before, tensors_in(saved))


@both
def test_copies_and_pickles_go_on_as_the_original(cls):
    model = Toy()
    optimizer = cls(model.named_parameters(), **HYPER)
    train(model, optimizer, range(3))
    others = [copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))]
    train(model, optimizer, range(3, 6))
    for m, o in others:
        train(m, o, range(3, 6))
        assert same_bits(params_of(model), params_of(m))


@both
def test_state_is_complete_at_construction_and_frozen_parameters_have_none(cls):
    model = Toy()
    optimizer = cls(model.parameters())
    assert model.frozen not in optimizer.state
    assert set(optimizer.state[model.weight]) == {"step", "exp_avg", "exp_avg_sq"}
    assert sum(t.nbytes for t in tensors_in(optimizer.state_dict()) if t.dim()) == 8 * sum(
        p.numel() for p in model.parameters() if p.requires_grad and p.dim()
    )
    model.frozen.requires_grad_(True)
    model.frozen.grad = torch.ones(4)
    optimizer.step()
    assert optimizer.state[model.frozen]["step"] == 1
    assert not torch.equal(model.frozen, torch.ones(4))


@both
def test_a_model_that_is_cast_takes_its_state_along(cls):
    model = Toy()
    optimizer = cls(model.parameters())
    train(model, optimizer, range(3))
    model.double()
    train(model, optimizer, range(3, 5))
    assert optimizer.state[model.weight]["exp_avg"].dtype == torch.float64
    assert optimizer.state[model.weight]["step"] == 5


@both
def test_the_state_of_a_torch_adam_is_taken_over(cls):
    theirs, ours = Toy(torch.bfloat16), Toy(torch.bfloat16)
    adam = torch.optim.Adam(theirs.parameters())
    train(theirs, adam, range(3))
    optimizer = cls(ours.parameters())
    optimizer.load_state_dict(adam.state_dict())
    assert optimizer.param_groups[0]["max_coeff"] == cls([torch.ones(1)]).param_groups[0]["max_coeff"]
    assert torch.equal(optimizer.state[ours.weight]["exp_avg"], adam.state[theirs.weight]["exp_avg"].float())
    train(ours, optimizer, range(3, 5))


def saved_by(cls, **settings):
    model = Toy()
    optimizer = cls(model.parameters(), **settings)
    train(model, optimizer, range(2))
    return through_a_file(optimizer.state_dict())


@pytest.mark.parametrize(
    ("cls", "other"),
    [(Lamb, Lans), (Lans, Lamb), (OneBitLamb, Lans), (OneBitAdam, Lans), (OneBitAdam, Lamb), (Lamb, OneBitLamb)],
)
def test_the_state_of_another_optimizer_is_refused(cls, other):
    model = Toy()
    optimizer = cls(model.parameters())
    with pytest.raises(ValueError, match=f"is that of {other.__name__}, and this is {cls.__name__}:"):
        optimizer.load_state_dict(saved_by(other))
    assert optimizer.param_groups[0]["optimizer"] == cls.__name__


def test_the_state_of_lamb_is_continued_by_its_one_bit_version():
    saved = saved_by(Lamb)
    model = Toy()
    optimizer = OneBitLamb(model.parameters(), backend=LocalBackend())
    optimizer.load_state_dict(saved)
    assert torch.equal(optimizer.state[model.weight]["exp_avg"], saved["state"][2]["exp_avg"])
    group = optimizer.param_groups[0]
    assert (group["optimizer"], group["step"]) == ("OneBitLamb", 2)
    OneBitLamb(Toy().parameters(), backend=LocalBackend()).load_state_dict(optimizer.state_dict())


def test_a_loaded_group_out_of_range_is_refused_and_nothing_changes():
    saved = saved_by(Lans)
    del saved["param_groups"][0]["optimizer"]  # as before it was there
    optimizer = Lamb(Toy().parameters())
    with pytest.raises(ValueError, match="max_coeff must be a number > 0, got None"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["max_coeff"] == 10


@both
def test_what_it_has_not_is_refused_in_a_group_and_told_of_a_loaded_run(cls, caplog):
    decayed = {"decoupled_weight_decay": False, "weight_decay": 0.1}
    for options, said in (({"amsgrad": True}, "amsgrad=True"), (decayed, "decoupled_weight_decay=False")):
        with pytest.raises(ValueError, match=f"{cls.__name__} has no {said} in parameter group 0"):
            cls([{"params": list(Toy().parameters()), **options}])
        optimizer = cls(Toy().parameters())
        with pytest.raises(ValueError, match=f"{cls.__name__} has no {said} in parameter group 1"):
            optimizer.add_param_group({"params": list(Toy().parameters()), **options})
        assert len(optimizer.param_groups) == 1
    saved = saved_by(torch.optim.Adam, weight_decay=0.1, amsgrad=True)
    optimizer.load_state_dict(saved)
    gone = "amsgrad=True and decoupled_weight_decay=False"
    told = f"{cls.__name__}: parameter group 0 of the loaded state has {gone}, which this optimizer has not"
    assert caplog.text.count(told) == 1
    optimizer.load_state_dict(optimizer.state_dict())
    assert caplog.text.count("which this optimizer has not") == 1


@both
def test_closures_and_missing_gradients(cls):
    model = Toy()
    optimizer = cls(model.parameters(), weight_decay=0.1)
    assert optimizer.step() is None
    assert same_bits(params_of(model), params_of(Toy()))

    def closure():
        backward(model, 0, 0, 1)
        return torch.tensor(3.0)

    assert optimizer.step(closure) == 3.0
    assert torch.equal(model.unused, Toy().unused)
    assert not torch.equal(model.weight, Toy().weight)
    assert all(p.isfinite().all() for p in model.parameters())


@both
def test_sparse_gradients_are_refused_before_anything_moves(cls):
    dense, p = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    dense.grad, p.grad = torch.ones(2), torch.ones(3).to_sparse()
    optimizer = cls([{"params": [dense]}, {"params": [p]}])
    with pytest.raises(ValueError, match="sparse"):
        optimizer.step()
    assert torch.equal(dense, torch.ones(2))
    with pytest.raises(ValueError, match="parameter 0 is complex64"):
        cls([torch.zeros(2, dtype=torch.complex64)])
