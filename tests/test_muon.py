"""Muon: to the bit torch's with whole matrices; who works on which. Matrices in pieces are in test_mesh.py."""

from __future__ import annotations

import pytest
import torch
from muon_scenes import MATRICES, SETTINGS, drawn

import commopt
from commopt.optim.muon import newton_schulz, owners_of


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon is of torch 2.9")
@pytest.mark.parametrize("settings", SETTINGS)
def test_with_whole_matrices_it_is_torchs_to_the_bit(settings):
    """Also where gradients are 0 at first, and where they are shorter than eps."""
    ours, theirs = ([torch.nn.Parameter(drawn(shape, i)) for i, shape in enumerate(MATRICES)] for _ in range(2))
    mine, torchs = commopt.Muon(ours, **settings), torch.optim.Muon(theirs, **settings)
    for step in range(6):
        for i, (p, q) in enumerate(zip(ours, theirs)):
            size = 1e-5 if i == 4 else float((step, i) != (0, 3))
            p.grad = q.grad = None if (step, i) == (2, 1) else size * drawn(p.shape, 100 * step + i)
        mine.step()
        torchs.step()
        if step == 3:  # each goes on with the other's state
            mine_saved, torchs_saved = mine.state_dict(), torchs.state_dict()
            mine.load_state_dict(torchs_saved)
            torchs.load_state_dict(mine_saved)
        assert all(torch.equal(p, q) for p, q in zip(ours, theirs))
    assert not torch.equal(ours[0], drawn(MATRICES[0], 0))


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon is of torch 2.9")
def test_groups_have_their_own_settings():
    ours, theirs = ([torch.nn.Parameter(drawn(shape, i)) for i, shape in enumerate(MATRICES[:3])] for _ in range(2))
    mine, torchs = (
        cls([{"params": [p], **settings} for p, settings in zip(params, SETTINGS)])
        for cls, params in ((commopt.Muon, ours), (torch.optim.Muon, theirs))
    )
    for step in range(3):
        for i, (p, q) in enumerate(zip(ours, theirs)):
            p.grad = q.grad = drawn(p.shape, 100 * step + i)
        mine.step()
        torchs.step()
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs))


def test_the_iteration_makes_singular_values_near_1():
    for shape in ((8, 8), (5, 40), (40, 5)):
        values = torch.linalg.svdvals(newton_schulz(drawn(shape, 3)).float())
        assert values.min() > 0.5
        assert values.max() < 1.5


def test_owners_have_about_the_same_work():
    shapes = [torch.Size((64, 64))] * 6 + [torch.Size((64, 256))] * 4 + [torch.Size((8, 8))] * 10
    owners = owners_of(shapes, 4)
    load = [0] * 4
    for (rows, columns), owner in zip(shapes, owners):
        load[owner] += rows * columns * min(rows, columns)
    assert max(load) <= sum(load) / 4 + 64 * 64 * 64
    assert owners_of(shapes, 4) == owners
    costliest_last = [torch.Size((64, 64)), torch.Size((64, 64)), torch.Size((64, 128))]
    assert owners_of(costliest_last, 2) == [1, 1, 0]
    largest_last = [torch.Size((64, 64)), torch.Size((1024, 8)), torch.Size((1024, 8))]
    assert owners_of(largest_last, 2) == [0, 1, 1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "lr must be a number >= 0, got -1.0"),
        ({"weight_decay": -0.1}, "weight_decay must be a number >= 0, got -0.1"),
        ({"eps": -1e-7}, "eps must be a number >= 0, got -1e-07"),
        ({"nesterov": 1}, "nesterov must be True or False, got 1"),
        ({"momentum": 1.0}, r"momentum must be a number in \[0, 1\), got 1.0"),
        ({"ns_steps": 0}, "ns_steps must be an int from 1 to 99, got 0"),
        ({"ns_coefficients": (1, 2)}, r"ns_coefficients must be three numbers, got \(1, 2\)"),
        ({"adjust_lr_fn": "adam"}, "adjust_lr_fn must be one of None, 'original', 'match_rms_adamw', got 'adam'"),
    ],
)
def test_what_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        commopt.Muon([torch.zeros(2, 2)], **settings)


def test_what_is_no_matrix():
    with pytest.raises(ValueError, match=r"Muon takes real matrices, got bias of shape \(3,\) and torch.float32"):
        commopt.Muon([("bias", torch.zeros(3))])
    with pytest.raises(ValueError, match=r"got a parameter of shape \(2, 2\) and torch.complex64"):
        commopt.Muon([torch.zeros(2, 2, dtype=torch.complex64)])
    optimizer = commopt.Muon([torch.zeros(2, 2)])
    with pytest.raises(ValueError, match="Muon takes real matrices"):
        optimizer.add_param_group({"params": [torch.zeros(2, 2, 2)]})
    assert len(optimizer.param_groups) == 1
