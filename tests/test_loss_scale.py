"""Residuals of gradients follow the scale of a GradScaler: a scaled run is the unscaled one, to the bit."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from given import split_all
from torch import nn
from worlds import on_threads, same_bits, through_a_file

import commopt
from commopt.comm import ThreadBackend
from commopt.compress import ACP, Int4, PowerSGD, Sign, TopBlocks, TopK
from commopt.gradients import LoCo
from commopt.gradients.loss_scale import LossScale
from commopt.optim import join_state_dict

METHODS: dict[str, dict[str, Any]] = {
    "signs": {"compressor": Sign(16)},
    "4 bits": {"compressor": Int4(16)},
    "4 bits, LoCo": {"compressor": Int4(16), "feedback": LoCo()},
    "top-k": {"compressor": TopK(2, 16)},
    "agreed blocks": {"compressor": TopBlocks(0.2, block=8)},
    "PowerSGD": {"compressor": PowerSGD(2)},
    "ACP": {"compressor": ACP(2)},
}
OVERFLOWS = {4: 0, 5: 1, 6: 0, 11: 1}
"""By step, the rank whose loss is inf: the scale falls three times in a row, by 64, and once more."""


class Run:
    """A model whose gradients are given, with SGD; ``scaler``: None, or of its loss."""

    def __init__(self, backend: ThreadBackend, method: str, scaler: Any, nodes: int | None = None) -> None:
        draw = torch.Generator().manual_seed(0)
        self.model = nn.Linear(12, 8)
        for p in self.model.parameters():
            nn.init.normal_(p, generator=draw)
        self.rank, self.scaler = backend.rank, scaler
        ranks = backend if nodes is None else backend.nodes(nodes)
        self.handle = commopt.compress_gradients(self.model, backend=ranks, scaler=scaler, **METHODS[method])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def steps(self, which: range) -> None:
        for step in which:
            if step in OVERFLOWS and self.scaler is None:
                continue  # as if it had not been
            draw = torch.Generator().manual_seed(10 * step + self.rank)
            self.optimizer.zero_grad()
            loss = sum((p * torch.randn(p.shape, generator=draw)).sum() for p in self.model.parameters())
            if self.scaler is None:
                loss.backward()
                self.optimizer.step()
                continue
            self.scaler.scale(loss * (torch.inf if OVERFLOWS.get(step) == self.rank else 1.0)).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()


def scaler(scale: float = 2.0**10) -> torch.amp.GradScaler:
    """Grows after every second step, falls by 4 after an overflow."""
    return torch.amp.GradScaler("cpu", init_scale=scale, backoff_factor=0.25, growth_interval=2)


@pytest.mark.parametrize("nodes", [None, 2])
@pytest.mark.parametrize("method", METHODS)
def test_a_scaled_run_is_the_unscaled_one_without_the_steps_that_are_skipped(method: str, nodes: int | None) -> None:
    def run(backend: ThreadBackend) -> None:
        plain, scaled = (Run(backend, method, s, nodes) for s in (None, scaler()))
        scales = set()
        for step in range(16):
            plain.steps(range(step, step + 1))
            scaled.steps(range(step, step + 1))
            assert same_bits([*plain.model.parameters()], [*scaled.model.parameters()]), step
            scales.add(scaled.scaler.get_scale())
        assert len(scales) > 4
        assert scaled.handle.comm_stats()["not_finite"] == len(OVERFLOWS)

    on_threads(2 if nodes is None else 4, run)


@pytest.mark.parametrize("method", METHODS)
def test_a_scale_that_grows_until_residuals_leave_the_range_falls_again(method: str) -> None:
    """What leaves it must not stay infinite: then every later step would be skipped."""

    def run(backend: ThreadBackend) -> None:
        scaled = Run(backend, method, torch.amp.GradScaler("cpu", init_scale=2.0**120, growth_interval=1))
        before = None
        for step in range(20, 80):
            scaled.steps(range(step, step + 1))
            if step == 60:
                before = [p.detach().clone() for p in scaled.model.parameters()]
        assert scaled.handle.comm_stats()["not_finite"] > 3
        assert before is not None
        assert not same_bits(before, [*scaled.model.parameters()])
        assert all(p.isfinite().all() for p in scaled.model.parameters())
        assert scaled.scaler.get_scale() > 2.0**90

    on_threads(2, run)


@pytest.mark.parametrize("method", METHODS)
def test_a_run_that_is_resumed_with_another_scale_is_the_one_never_stopped(method: str) -> None:
    def run(backend: ThreadBackend) -> None:
        first = Run(backend, method, scaler())
        first.steps(range(8))
        saved = through_a_file([first.handle.state_dict(), first.model.state_dict()])
        first.steps(range(8, 12))
        for another in (scaler(2.0**3), scaler(1.0)):
            second = Run(backend, method, another)
            second.model.load_state_dict(saved[1])
            second.handle.load_state_dict(saved[0])
            second.steps(range(8, 12))
            assert same_bits([*first.model.parameters()], [*second.model.parameters()])
        twins = []
        for known in (True, False):  # saved before there was a scale in it: it counts as that of the next backward
            twins.append(Run(backend, method, scaler(saved[0]["param_groups"][0]["loss_scale"])))
            twins[-1].model.load_state_dict(saved[1])
            if not known:
                del saved[0]["param_groups"][0]["loss_scale"]
            twins[-1].handle.load_state_dict(saved[0])
            twins[-1].steps(range(8, 12))
        assert same_bits(*([*twin.model.parameters()] for twin in twins))

    on_threads(2, run)


def test_with_stochastic_rounding_a_scaled_run_draws_other_noise_and_another_of_its_scale_the_same() -> None:
    def run(backend: ThreadBackend, scale: float) -> list[torch.Tensor]:
        model = nn.Linear(40, 8, bias=False)
        nn.init.ones_(model.weight)
        used = scaler(scale)
        commopt.compress_gradients(model, Int4(rounding="stochastic"), backend=backend, feedback=False, scaler=used)
        draw = torch.Generator().manual_seed(backend.rank)
        given = torch.randn(model.weight.shape, generator=draw)
        used.scale((model.weight * given).sum()).backward()
        assert model.weight.grad is not None
        return [model.weight.grad / scale]

    plain, scaled, again = (on_threads(2, lambda b, s=s: run(b, s)) for s in (1.0, 1024.0, 1024.0))
    assert same_bits(scaled[0], scaled[1])
    assert same_bits(scaled[0], again[0])
    assert not same_bits(plain[0], scaled[0])


def test_the_scaler_in_use_is_found_and_of_several_one_must_be_named() -> None:
    gc.collect()
    assert LossScale().change() == 1
    lost = scaler()
    lost.scale(torch.ones(1))
    lost.itself = lost  # a cycle that nobody has any more
    del lost
    mine, idle, off = scaler(8.0), scaler(), torch.amp.GradScaler("cpu", enabled=False)
    mine.scale(torch.ones(1))
    scale = LossScale()
    assert scale.change() == 8
    assert scale.change() == 1
    mine.update(2.0)
    assert (scale.change(), scale.value) == (0.25, 2)
    mine.update(float("inf"))  # no scale to follow
    assert (scale.change(), scale.value) == (1, 2)
    mine = scaler(16.0)  # in the place of the one that has gone
    mine.scale(torch.ones(1))
    assert (scale.change(), scale.value) == (8, 16)
    scale.loaded(4.0)
    assert scale.change() == 4
    idle.scale(torch.ones(1))
    unsaid = LossScale()
    for _ in range(2):
        with pytest.raises(ValueError, match="2 GradScalers are in use: say whose"):
            unsaid.change()
    assert LossScale(idle).change() == 2.0**10
    assert off.get_scale() == 1


def test_several_scalers_are_an_error_of_the_first_backward_and_every_other() -> None:
    def run(backend: ThreadBackend) -> None:
        unsaid = Run(backend, "signs", None)
        scalers = [scaler(), scaler()]
        for each in scalers:
            each.scale(torch.ones(1))
        backend.all_reduce(torch.ones(1)).wait()  # all have theirs
        for _ in range(2):
            with pytest.raises(ValueError, match="GradScalers are in use"):
                unsaid.steps(range(1))
        assert unsaid.handle.comm_stats()["steps"] == 0
        backend.all_reduce(torch.ones(1)).wait()

    on_threads(2, run)


def test_what_is_no_scaler_is_refused_on_every_rank() -> None:
    def run(backend: ThreadBackend) -> None:
        with pytest.raises(ValueError, match=r"scaler must be a torch\.amp\.GradScaler or None, got 1024|rank 1"):
            commopt.compress_gradients(
                nn.Linear(2, 2), Sign(), backend=backend, scaler=1024.0 if backend.rank else None
            )
        with pytest.raises(ValueError, match="settings"):
            commopt.compress_gradients(
                nn.Linear(2, 2), Sign(), backend=backend, scaler=scaler() if backend.rank else None
            )

    on_threads(2, run)


def test_residuals_that_come_out_on_one_node_are_in_the_scale_of_its_loss():

    def before(backend):
        run = Run(backend, "signs", scaler())
        run.steps(range(8))
        return run.handle.state_dict()

    states = on_threads(2, before)

    def alone(backend, scale):
        run = Run(backend, "signs", scaler(scale))
        run.handle.load_state_dict(join_state_dict(*split_all(states), 0, 1))
        run.scaler.scale(sum((p * 0.0).sum() for p in run.model.parameters())).backward()
        return [p.grad / scale for p in run.model.parameters()]

    low, high = (on_threads(1, lambda backend, s=s: alone(backend, s))[0] for s in (2.0**3, 2.0**12))
    assert same_bits(low, high)
    assert all(g.any() for g in low)
