"""The laws of CSER: its paper, the methods that are settings of it, what is the same on all ranks, and the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle_cser import (
    Csea,
    Cser,
    CserBlocks,
    CserPL,
    EfSGD,
    LocalSGD,
    QSparse,
    SynchronousSGD,
    blocks,
    everything,
    mean,
    nothing,
    sign,
)  # fmt: skip
from torch import Tensor, nn
from worlds import Toy, flat_given, give, on_threads, params_of, same_bits, some_of, tokens, train

from commopt import CSER, QSparseLocalSGD
from commopt.compress import Identity, RandomBlocks, Sign

SIZES = [(3, 7), (), (40,), (0, 2), (2, 5)]
ORDER = list(reversed(range(len(SIZES))))  # how a bucket packs
STEPS = 14
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "heavy ball": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True},
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def start() -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(s, generator=g, dtype=torch.float64)) for s in SIZES]


def flat(tensors: list[Any]) -> list[float]:
    return [v for i in ORDER for v in tensors[i].detach().flatten().tolist()]


def target(step: int, rank: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(s, generator=g, dtype=torch.float64) + rank for s in SIZES]


def run_oracle(make: Any, world_size: int, absent: bool = False) -> Any:
    """History of x by step and rank; the gradient of a rank is (x - target) / 2 at its own x. ``absent``: parameters
    come and go."""
    oracle, history = make(flat(start()), world_size), []
    for step in range(STEPS):
        there = [targets_of(step, r, absent) for r in range(world_size)]
        pairs = zip(oracle.x, (flat_given(targets, SIZES) for targets in there))
        oracle.step([[None if b is None else (a - b) * 0.5 for a, b in zip(x, c)] for x, c in pairs])
        history.append([list(x) for x in oracle.x])
    return history


def targets_of(step: int, rank: int, absent: bool) -> list[Tensor | None]:
    targets = target(step, rank)
    return some_of(targets, step, rank) if absent else targets


def run_ours(make: Any, world_size: int, absent: bool = False) -> Any:
    """The same of an optimizer. ``make(params, backend=...)``."""

    def run(backend):
        params = start()
        optimizer, history = make(params, backend=backend), []
        for step in range(STEPS):
            targets = targets_of(step, backend.rank, absent)
            give(params, [None if c is None else (p.detach() - c) * 0.5 for p, c in zip(params, targets)])
            optimizer.step()
            history.append(flat(params))
        return history

    return [list(ranks) for ranks in zip(*on_threads(world_size, run))]


def exact(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def assert_same(ours: Any, theirs: Any) -> None:
    """To 1e-12: float64, and a wrong block or sign is 1e-3 and more."""
    torch.testing.assert_close(exact(ours), exact(theirs), rtol=1e-12, atol=1e-12)


# the paper ------------------------------------------------------------------------------------------------------------

PAIRS = {
    "blocks, blocks": (RandomBlocks(3, 5), blocks(3, 5), RandomBlocks(2, 4, 7), blocks(2, 4, 7)),
    "blocks, sign": (RandomBlocks(3.5, 5), blocks(3.5, 5), Sign(16), sign(16)),
    "sign, blocks": (Sign(16), sign(16), RandomBlocks(2, 5), blocks(2, 5)),
    "sign, sign": (Sign(16), sign(16), Sign(8), sign(8)),
    "nothing, blocks": (None, nothing, RandomBlocks(2.5, 3), blocks(2.5, 3)),
    "nothing, sign": (None, nothing, Sign(16), sign(16)),
    "sign, all": (Sign(16), sign(16), Identity(), everything),
    "all, sign": (Identity(), everything, Sign(8), sign(8)),
}


@pytest.mark.parametrize(("world_size", "kind"), [(2, "plain"), (3, "heavy ball"), (4, "nesterov")])
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize(("absent", "overlap"), [(False, False), (True, False), (True, True)])
def test_every_step_is_that_of_the_paper_on_lists(world_size, pair, kind, absent, overlap):
    """``absent``: parameters come and go, in blocks that they share with others."""
    c2, their_c2, c1, their_c1 = PAIRS[pair]
    settings = {"lr": 0.1, **KINDS[kind]}
    theirs = run_oracle(
        lambda x, w: Cser(x, w, c2=their_c2, c1=their_c1, period=4, wd=0.02, **settings), world_size, absent
    )
    ours = run_ours(
        lambda p, backend: CSER(
            p, compressor=c2, reset_compressor=c1, period=4, weight_decay=0.02, overlap=overlap, backend=backend,
            **settings,
        ),
        world_size,
        absent,
    )  # fmt: skip
    assert_same(ours, theirs)


def test_the_oracle_of_stored_errors_and_that_of_averaged_blocks_are_one():
    settings = {"c2": blocks(3, 5), "c1": blocks(2, 5, 1), "period": 3, "lr": 0.1, "momentum": 0.9, "nesterov": True}
    assert_same(*(run_oracle(lambda x, w, kind=kind: kind(x, w, **settings), 3) for kind in (Cser, CserBlocks)))


@pytest.mark.long(but="c20")
@pytest.mark.parametrize("c2", [RandomBlocks(4, 5), Sign(16), None])
def test_resets_keep_models_together_and_without_them_they_come_apart_for_ever(c2):
    """Gradients that differ between ranks for ever. With resets the distance of the models has a bound; without, it
    grows with the number of steps."""

    def run(backend, period):
        params, history = start(), []
        optimizer = CSER(
            params, 0.1, compressor=c2, reset_compressor=RandomBlocks(2, 5), period=period, backend=backend
        )
        for _ in range(160):
            for p, c in zip(params, target(0, backend.rank)):
                p.grad = c.clone()
            optimizer.step()
            history.append(flat(params))
        return exact(history)

    def apart(period):
        a, b = on_threads(2, lambda backend: run(backend, period))
        distance = (a - b).norm(dim=1)
        return distance[:80].max(), distance[80:].max()

    early, late = apart(4)
    assert late < 1.3 * early
    early, late = apart(10**9)
    assert late > 1.8 * early


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("c2", [RandomBlocks(3, 5), Sign(16), None])
@every_kind
def test_the_anchor_is_the_same_on_all_ranks_and_the_mean_moves_by_the_mean_update(world_size, c2, kind):
    """J1 to the bit; J2 to 1e-13, with p_i from a plain SGD of each rank on its own."""

    def run(backend):
        params, history = start(), []
        optimizer = CSER(
            params,
            0.1,
            compressor=c2,
            reset_compressor=Sign(8),
            period=3,
            backend=backend,
            bucket_mb=1e-4,
            **KINDS[kind],
        )
        momenta = [torch.zeros_like(p) for p in params]
        b, nesterov = optimizer.param_groups[0]["momentum"], optimizer.param_groups[0]["nesterov"]
        for step in range(STEPS):
            before = flat(params)
            for p, c in zip(params, target(step, backend.rank)):
                p.grad = (p.detach() - c) * 0.5
            momenta = [b * m + p.grad for m, p in zip(momenta, params)]
            update = [0.1 * (p.grad + b * m if nesterov else m) for m, p in zip(momenta, params)]
            optimizer.step()
            history.append((before, flat(update), flat(params), [optimizer.state[p]["anchor"].clone() for p in params]))
        return history

    for ranks in zip(*on_threads(world_size, run)):
        before, update, after, anchors = zip(*ranks)
        assert all(same_bits(anchors[0], a) for a in anchors)
        expected = exact(mean(before)) - exact(mean(update))
        torch.testing.assert_close(exact(mean(after)), expected, rtol=1e-13, atol=1e-13)


# settings that are other methods --------------------------------------------------------------------------------------

ALL = RandomBlocks(1)
METHODS: dict[str, tuple[Any, Any]] = {
    "synchronous SGD": (
        lambda p, **k: CSER(p, compressor=ALL, period=3, **k),
        lambda x, w, **k: SynchronousSGD(x, w, **k),
    ),
    "local SGD": (
        lambda p, **k: CSER(p, compressor=None, reset_compressor=ALL, period=4, **k),
        lambda x, w, **k: LocalSGD(x, w, period=4, **k),
    ),
    "CSEA, sign": (
        lambda p, **k: CSER(p, compressor=None, reset_compressor=Sign(16), period=1, **k),
        lambda x, w, **k: Csea(x, w, c=sign(16), **k),
    ),
    "CSEA, blocks": (
        lambda p, **k: CSER(p, compressor=None, reset_compressor=RandomBlocks(3, 5), period=1, **k),
        lambda x, w, **k: Csea(x, w, c=blocks(3, 5), **k),
    ),
    "CSER-PL, sign": (
        lambda p, **k: CSER(p, compressor=None, reset_compressor=Sign(16), period=4, **k),
        lambda x, w, **k: CserPL(x, w, c=sign(16), period=4, **k),
    ),
    "CSER-PL, blocks": (
        lambda p, **k: CSER(p, compressor=None, reset_compressor=RandomBlocks(3, 5), period=4, **k),
        lambda x, w, **k: CserPL(x, w, c=blocks(3, 5), period=4, **k),
    ),
    "EF-SGD": (
        lambda p, **k: QSparseLocalSGD(p, compressor=Sign(16), period=1, **k),
        lambda x, w, **k: EfSGD(x, w, c=sign(16), **k),
    ),
    "EF-SGD, blocks": (
        lambda p, **k: QSparseLocalSGD(p, compressor=RandomBlocks(3, 5), period=1, **k),
        lambda x, w, **k: EfSGD(x, w, c=blocks(3, 5), **k),
    ),
    "QSparse-local-SGD": (
        lambda p, **k: QSparseLocalSGD(p, compressor=Sign(16), period=4, **k),
        lambda x, w, **k: QSparse(x, w, c=sign(16), period=4, **k),
    ),
    "QSparse-local-SGD, blocks": (
        lambda p, **k: QSparseLocalSGD(p, compressor=RandomBlocks(3, 5), period=4, **k),
        lambda x, w, **k: QSparse(x, w, c=blocks(3, 5), period=4, **k),
    ),
}


@pytest.mark.parametrize("method", [name for name in METHODS if name.startswith(("EF", "QSparse"))])
def test_the_residual_norm_is_that_of_the_error(method):
    ours, theirs = METHODS[method]
    settings: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
    oracle, residuals = theirs(flat(start()), 2, **settings), []
    for step in range(STEPS):
        oracle.step([flat(target(step, rank)) for rank in range(2)])
        residuals.append([sum(a * a for a in e) ** 0.5 for e in oracle.e])

    def run(backend):
        params = start()
        optimizer, norms = ours(params, backend=backend, **settings), []
        for step in range(STEPS):
            for p, g in zip(params, target(step, backend.rank)):
                p.grad = g
            optimizer.step()
            norms.append(optimizer.comm_stats()["residual_norm"])
        return norms

    assert min(residuals[-1]) > 0.1
    assert_same(list(zip(*on_threads(2, run))), residuals)


@pytest.mark.parametrize(("world_size", "kind"), [(2, "plain"), (3, "heavy ball"), (4, "nesterov")])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("absent", [False, True])
def test_settings_that_are_another_method_equal_its_own_definition(world_size, method, kind, absent):
    ours, theirs = METHODS[method]
    settings = {"lr": 0.1, **KINDS[kind]}
    assert_same(
        run_ours(lambda p, backend: ours(p, backend=backend, **settings), world_size, absent),
        run_oracle(lambda x, w: theirs(x, w, **settings), world_size, absent),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("all_of_it", [RandomBlocks(1), Identity()])
def test_models_are_bit_identical_where_everything_is_sent(dtype, all_of_it):
    """Synchronous SGD after every step; local SGD and EF-SGD after every H-th. They start apart, and are made equal."""

    def run(backend, make):
        model, history = Toy(dtype, seed=backend.rank), []
        optimizer = make(model.parameters(), lr=0.1, momentum=0.9, backend=backend, bucket_mb=2e-4)
        for step in range(8):
            train(model, optimizer, range(step, step + 1), backend.rank, 3)
            history.append(params_of(model))
        return history

    synchronous = on_threads(3, lambda b: run(b, lambda p, **k: CSER(p, compressor=all_of_it, **k)))
    assert all(same_bits(a, c) for history in synchronous[1:] for a, c in zip(synchronous[0], history))
    for make in (
        lambda p, **k: CSER(p, compressor=None, reset_compressor=all_of_it, period=4, **k),
        lambda p, **k: CSER(p, compressor=Sign(16), reset_compressor=all_of_it, period=4, **k),
        lambda p, **k: QSparseLocalSGD(p, compressor=Sign(16), period=4, **k),
    ):
        histories = on_threads(3, lambda b, make=make: run(b, make))
        for step in range(8):
            equal = same_bits(histories[0][step], histories[2][step])
            assert equal == (step % 4 == 3)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("lr", [1e-2, torch.tensor(1e-2)])
@every_kind
def test_one_rank_is_torch_sgd_to_the_bit(kind, maximize, lr):
    settings = {"lr": lr, "weight_decay": 0.1, "maximize": maximize, **KINDS[kind]}
    ours, theirs = Toy(), Toy()
    optimizer, reference = CSER(ours.parameters(), **settings), torch.optim.SGD(theirs.parameters(), **settings)
    train(ours, optimizer, range(8))
    train(theirs, reference, range(8))
    assert same_bits(params_of(ours), params_of(theirs))
    for a, b in zip(ours.parameters(), theirs.parameters()):
        if b in reference.state and reference.state[b].get("momentum_buffer") is not None:
            assert torch.equal(optimizer.state[a]["momentum_buffer"], reference.state[b]["momentum_buffer"])
    assert optimizer.phase == "plain"
    assert optimizer.comm_stats()["total"]["bytes"] == 0


@pytest.mark.parametrize("world_size", [2, 3, 4])
@every_kind
def test_synchronous_sgd_is_torch_sgd_on_the_averaged_gradient(world_size, kind):
    settings = {"lr": 0.05, "weight_decay": 0.1, "maximize": True, **KINDS[kind]}
    theirs = Toy(torch.float64)
    reference = torch.optim.SGD(theirs.parameters(), **settings)
    for step in range(8):
        theirs.zero_grad()
        sum(theirs(tokens(step, r, world_size)) / world_size for r in range(world_size)).backward()
        reference.step()

    def run(backend):
        model = Toy(torch.float64)
        train(model, CSER(model.parameters(), compressor=RandomBlocks(1), backend=backend, **settings), range(8),
              backend.rank, world_size)  # fmt: skip
        return params_of(model)

    for ours in on_threads(world_size, run):
        for a, b in zip(ours, theirs.parameters()):
            torch.testing.assert_close(a, b.detach(), rtol=1e-12, atol=1e-12)
