"""SparseLoCo: every step against the loop on plain lists, what is sent, kept and refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from oracle import compress
from oracle_sparse_loco import SparseLoCoOracle
from oracle_top_k import encode, nbytes_of
from torch import Tensor, nn
from worlds import Toy, backward, on_processes, on_threads, params_of, same_bits, some_params, train

from commopt import DiLoCo, Guard, LocalSGD, SparseLoCo
from commopt.comm import LocalBackend
from commopt.compress import Identity, Sign, TopK
from commopt.optim import join_state_dict, split_state_dict
from commopt.outer.rounds import ROUND_BYTES

SIZES = [(3, 7), (), (40,), (0, 2), (2, 5), (26, 3)]
ORDER = list(reversed(range(len(SIZES))))  # how a bucket packs
STEPS = 14


def flat(tensors: list[Tensor]) -> list[float]:
    return [v for t in tensors for v in t.detach().double().flatten().tolist()]


def grad(step: int, rank: int, i: int) -> Tensor:
    """Of ranks of different loudness; a part of the third parameter never has one, and the fifth only on rank 1."""
    g = torch.Generator().manual_seed(100 * step + 10 * rank + i)
    out = (torch.randn(SIZES[i], generator=g, dtype=torch.float64) + 0.3) * (1 + rank)
    if i == 2:
        out[5:9] = 0
    return out * 0 if i == 4 and rank != 1 else out


def top_k(*shape: int):
    return lambda row: encode(row, *shape, kind=np.float64)[1]


def signs(row: list[float]) -> list[float]:
    return compress(row, 16, "l2", [v != 0 for v in row])


WIRES = {
    "4 of 16, 2 bits": (TopK(4, 16, 2), top_k(4, 16, 2)),
    "2 of 64, 8 bits": (TopK(2, 64, 8), top_k(2, 64, 8)),
    "3 of 32, all bits": (TopK(3, 32, 32), top_k(3, 32, 32)),
    "Templar's": (TopK(64, 4096, 2), top_k(64, 4096, 2)),
    "identity": (Identity(), list),
}
SETTINGS = [
    {},
    {"mean_over": "contributors"},
    {"clip_to_median": True},
    {"mean_over": "contributors", "clip_to_median": True, "error_decay": 0.5, "outer_lr": 0.7},
    {"error_decay": 1.0, "outer_lr": 0.9},
]
OF_ORACLE = {"mean_over": "over", "clip_to_median": "clip", "error_decay": "decay", "outer_lr": "lr"}


def expected_of(world_size: int, base: str, how, local: int = 1, **settings) -> list[list[list[float]]]:
    """Parameters of every rank after every step."""
    params, sizes = some_params(SIZES), [math.prod(SIZES[i]) for i in ORDER]
    given = {OF_ORACLE[name]: value for name, value in settings.items()}
    oracle = SparseLoCoOracle(flat([params[i] for i in ORDER]), sizes, world_size, 3, base, how, local=local, **given)
    out = []
    for step in range(STEPS):
        oracle.step([flat([grad(step, r, i) for i in ORDER]) for r in range(world_size)], 0.02 / (1 + step % 5))
        out.append([list(x) for x in oracle.x])
    return out


def follow(backend, rank: int, base: str, compressor, expected, **settings) -> SparseLoCo:
    """Trains as the oracle has, and compares every step with it."""
    mine = some_params(SIZES)
    extra = {"sgd": {"momentum": 0.9}, "adamw": {"betas": (0.9, 0.99), "weight_decay": 0.1}}[base]
    cls = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[base]
    optimizer = SparseLoCo(mine, cls, lr=1.0, period=3, backend=backend, compressor=compressor, **extra, **settings)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 0.02 / (1 + step % 5)
        for i, p in enumerate(mine):
            p.grad = grad(step, rank, i)
        optimizer.step()
        theirs = torch.tensor(expected[step][rank], dtype=torch.float64)
        now = torch.tensor(flat([mine[i] for i in ORDER]), dtype=torch.float64)
        torch.testing.assert_close(now, theirs, rtol=1e-12, atol=1e-12)
    assert optimizer.comm_stats()["rounds"] == STEPS // 3
    return optimizer


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("wire", WIRES)
def test_every_step_equals_the_papers_loop_on_plain_lists(world_size, settings, wire):
    compressor, how = WIRES[wire]
    base = "sgd" if wire == "identity" else "adamw"
    expected = expected_of(world_size, base, how, **settings)
    on_threads(world_size, lambda backend: follow(backend, backend.rank, base, compressor, expected, **settings) and 0)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_on_nodes_of_several_ranks_a_node_is_a_worker(settings):
    compressor, how = WIRES["4 of 16, 2 bits"]
    for world_size, local in ((4, 2), (2, 2)) if settings else ((6, 2),):
        expected = expected_of(world_size, "adamw", how, local, **settings)

        def run(backend, local=local, expected=expected):
            follow(backend.nodes(local), backend.rank, "adamw", compressor, expected, **settings)

        on_threads(world_size, run)


def scenes(rank: int, world_size: int) -> None:
    compressor, how = WIRES["4 of 16, 2 bits"]
    for settings in SETTINGS[1:4]:
        expected = expected_of(world_size, "adamw", how, **settings)
        follow(None, rank, "adamw", compressor, expected, **settings)


def test_over_gloo():
    on_processes(2, scenes)


# relations ------------------------------------------------------------------------------------------------------------


def trained(cls, backend, steps: int = 9, **settings) -> list[Tensor]:
    model = Toy(torch.float64)
    optimizer = cls(model.parameters(), lr=1e-2, period=3, backend=backend, **settings)
    train(model, optimizer, range(steps), backend.rank, backend.world_size)
    return params_of(model)


@pytest.mark.parametrize("world_size", [1, 3])
def test_with_nothing_lost_it_is_an_outer_step_without_momentum(world_size):
    """Whatever the decay, and whatever full precision is called; with an outer learning rate of 1 it is averaging."""

    def run(backend):
        half = trained(DiLoCo, backend, outer_lr=0.5, outer_momentum=0.0)
        for compressor in (None, Identity()):
            ours = trained(SparseLoCo, backend, outer_lr=0.5, error_decay=0.3, compressor=compressor)
            torch.testing.assert_close(ours, half, rtol=1e-12, atol=1e-14)
        everything = trained(SparseLoCo, backend, compressor=TopK(16, 16, 32), mean_over="contributors")
        whole = trained(SparseLoCo, backend, compressor=TopK(16, 16, 32))
        torch.testing.assert_close(whole, trained(LocalSGD, backend), rtol=1e-12, atol=1e-14)
        return same_bits(everything, whole)

    assert on_threads(world_size, run) == [world_size == 1] * world_size  # some rows have a gradient on one rank only


def test_what_is_sent_and_the_residuals_is_what_there_was():
    """e_new = b e + D - s, on every rank; and x moves by the mean of what was sent."""

    def run(backend):
        g = torch.Generator().manual_seed(backend.rank)
        p = nn.Parameter(torch.zeros(700, dtype=torch.float64))
        settings = {"lr": 1.0, "period": 1, "error_decay": 0.5, "outer_lr": 1.0}
        optimizer = SparseLoCo([p], torch.optim.SGD, backend=backend, **settings)
        residuals, moved = torch.zeros_like(p), []
        for _ in range(4):
            p.grad, before = torch.randn(700, generator=g, dtype=torch.float64), p.detach().clone()
            way = p.grad.clone()
            optimizer.step()
            left = optimizer.residuals[p]["worker_error"].view(700)
            sent = 0.5 * residuals + way - left
            assert 0 < int((sent.abs() > 1e-6).sum()) <= 4 * 3  # 4 of each of 3 chunks
            residuals = left.clone()
            moved.append((before - p.detach(), sent))
        return moved

    for ranks in zip(*on_threads(3, run)):
        mean = sum(sent for _, sent in ranks) / 3
        for way, _ in ranks:
            torch.testing.assert_close(way, mean, rtol=0, atol=1e-12)


def test_a_contributors_mean_divides_by_those_who_have_sent():
    """Of two ranks one sends the first element, both the second, neither the third."""

    def run(backend, over):
        p = nn.Parameter(torch.zeros(16, dtype=torch.float64))
        settings = {"lr": 1.0, "period": 1, "mean_over": over, "compressor": TopK(2, 16, 32)}
        optimizer = SparseLoCo([p], torch.optim.SGD, backend=backend, **settings)
        p.grad = torch.zeros(16, dtype=torch.float64)
        p.grad[:4] = torch.tensor([4.0, 2.0, 0.5, 0.0] if backend.rank == 0 else [0.0, 4.0, 0.5, 8.0])
        optimizer.step()
        return (-p.detach()[:4]).tolist()

    assert on_threads(2, lambda backend: run(backend, "ranks")) == [[2, 3, 0, 4]] * 2
    assert on_threads(2, lambda backend: run(backend, "contributors")) == [[4, 3, 0, 8]] * 2


def test_a_rank_that_is_far_off_is_clipped_to_the_median():
    """Tensor by tensor; a rank that has sent nothing of a tensor does not make its median 0."""

    def run(backend, clip):
        loud, rare = (nn.Parameter(torch.zeros(16, dtype=torch.float64)) for _ in range(2))
        settings = {"lr": 1.0, "period": 1, "compressor": TopK(16, 16, 32), "clip_to_median": clip}
        optimizer = SparseLoCo([loud, rare], torch.optim.SGD, backend=backend, **settings)
        loud.grad = torch.full_like(loud, (1.0, 2.0, 600.0)[backend.rank])
        rare.grad = torch.full_like(rare, 3.0) if backend.rank == 1 else None
        optimizer.step()
        left = optimizer.comm_stats()["residual_norm"]  # e is not told
        return -loud.detach()[0], -rare.detach()[0], left

    for clip, expected in ((True, (1 + 2 + 2) / 3), (False, 603 / 3)):
        for way, rare, left in on_threads(3, lambda backend, clip=clip: run(backend, clip)):
            assert (float(way), float(rare)) == pytest.approx((expected, 1.0), rel=1e-12)
            assert left == 0


# replicas, bytes and memory -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", [{}, {"mean_over": "contributors", "clip_to_median": True}], ids=str)
@pytest.mark.parametrize("compressor", [TopK(2, 16), Sign(block=64)])
def test_replicas_are_bit_identical_after_every_synchronisation_and_only_then(world_size, dtype, settings, compressor):
    def run(backend):
        model, history = Toy(dtype), []
        kind = {"period": 3, "bucket_mb": 2e-4, "compressor": compressor, **settings}
        optimizer = SparseLoCo(model.parameters(), lr=1e-2, backend=backend, **kind)
        for step in range(9):
            train(model, optimizer, range(step, step + 1), backend.rank, world_size)
            history.append(params_of(model))
        for bucket in optimizer.buckets:
            assert not any(buffer[bucket.numel :].any() for buffer in bucket.buffers.values())
            assert not bucket.feedback.server.any()
        residuals = [t.clone() for entry in optimizer.residuals.values() for t in entry.values()]
        assert all(t.isfinite().all() for t in history[-1] + residuals)
        return history, [t for entry in optimizer.state_dict()["state"].values() for t in entry.values()], residuals

    (rank_0, state_0, residuals_0), *others = on_threads(world_size, run)
    for history, state, residuals in others:
        assert [same_bits(a, b) for a, b in zip(rank_0, history)] == [False, False, True] * 3
        assert same_bits(state_0, state)
        assert not same_bits(residuals_0, residuals)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("clip", [False, True])
def test_bytes_are_those_of_the_ledger_and_grow_with_the_ranks(world_size, clip):
    """A row of top-k to each other rank, and so as many from them; with clipping 8 bytes a parameter more."""

    def run(backend):
        model, guard = Toy(), Guard(check_every=None)
        settings = {"period": 4, "bucket_mb": 2e-4, "guard": guard, "clip_to_median": clip}
        optimizer = SparseLoCo(model.parameters(), lr=1e-2, backend=backend, **settings)
        for step in range(8):
            train(model, optimizer, range(step, step + 1), backend.rank, world_size)
            sent = optimizer.comm_stats()["step"]
            if step % 4 < 3:
                assert sent == {"bytes": 0, "calls": 0, "by_collective": {}}
                continue
            buckets = optimizer.buckets
            rows = sum(nbytes_of(bucket.padded, 4, 256, 2) for bucket in buckets)
            norms = sum(8 * len(bucket.params) for bucket in buckets) * clip
            bytes_sent = (world_size - 1) * (rows + norms + ROUND_BYTES)
            calls = 2 + len(buckets) * (1 + clip)
            assert sent["by_collective"] == {"all_gather": {"bytes": bytes_sent, "calls": calls}}
        assert len(optimizer.buckets) > 1

    on_threads(world_size, run)


@pytest.mark.parametrize("compressor", [TopK(), Sign(), None])
def test_memory_is_what_the_docstring_says(compressor):
    """In units of the parameters (a large one, so that padding is nothing)."""

    def run(backend):
        p = nn.Parameter(torch.ones(1 << 16))
        optimizer = SparseLoCo([p], torch.optim.SGD, lr=1e-2, period=1, compressor=compressor, backend=backend)
        for _ in range(3):
            p.grad = torch.ones_like(p)
            optimizer.step()
        held = {}
        for bucket in optimizer.buckets:
            parts, feedback = list(bucket.buffers.values()), bucket.feedback
            if feedback is not None:
                parts += [feedback.worker, feedback.server, feedback.next_worker, feedback.next_server]
            held.update({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in parts})
        return sum(held.values()) / p.nbytes

    assert on_threads(4, run) == [1 + (0 if compressor is None else 2 + 1 / 4)] * 4
    assert "1 (anchor), 2 + 1/W more (error buffer" in SparseLoCo.__doc__


# inf and NaN ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_its_ranks_own_and_such_a_parameter_skips_the_round(bad):
    """The error buffer is that of before then, to the bit, and the next round takes everything."""

    def run(backend):
        model = Toy()
        optimizer = SparseLoCo(model.parameters(), lr=1e-2, period=3, backend=backend)
        for step in range(3):
            backward(model, step, backend.rank, 2)
            if backend.rank == 1 and step == 1:
                model.weight.grad[0, 0] = bad
            optimizer.step()
        assert (optimizer.skipped_steps, optimizer.comm_stats()["rounds"]) == (backend.rank, 1)
        train(model, optimizer, range(3, 5), backend.rank, 2)
        residuals, kept = [t.clone() for t in residuals_of(optimizer)], model.weight.detach().clone()
        if backend.rank == 1:
            model.weight.data[0, 0] = bad
        anchors = [optimizer.state[p]["anchor"].clone() for p in optimizer.params if p.requires_grad]
        optimizer.zero_grad()
        optimizer.step()
        assert (optimizer.skipped_rounds, optimizer.comm_stats()["rounds"]) == (1, 1)
        assert same_bits(residuals, residuals_of(optimizer))
        assert same_bits(anchors, [optimizer.state[p]["anchor"] for p in optimizer.params if p.requires_grad])
        model.weight.data.copy_(kept)
        optimizer.step()
        assert optimizer.comm_stats()["rounds"] == 2
        assert not same_bits(residuals, residuals_of(optimizer))
        return params_of(model)

    a, b = on_threads(2, run)
    assert same_bits(a, b)
    assert all(p.isfinite().all() for p in a)


def residuals_of(optimizer: SparseLoCo) -> list[Tensor]:
    return [entry["worker_error"] for entry in optimizer.residuals.values()]


def test_one_rank_that_is_left_takes_the_residual_at_the_outer_learning_rate():
    def save(backend):
        model = Toy(torch.float64)
        optimizer = SparseLoCo(model.parameters(), lr=1e-2, period=2, outer_lr=0.5, backend=backend)
        train(model, optimizer, range(4), backend.rank, 2)
        return split_state_dict(optimizer.state_dict())

    (replicated, first), (_, second) = on_threads(2, save)
    optimizer = SparseLoCo(Toy(torch.float64).parameters(), lr=1e-2, period=2, backend=LocalBackend())
    optimizer.load_state_dict(join_state_dict(replicated, [first, second], 0, 1))
    total = 0.0
    for i, p in enumerate(p for p in optimizer.params if p.requires_grad):
        i = list(first["state"])[i]
        mean = (first["state"][i]["worker_error"] + second["state"][i]["worker_error"]).view(p.shape) / 2
        expected = replicated["state"][i]["anchor"] - 0.5 * mean
        torch.testing.assert_close(optimizer.state[p]["anchor"], expected, rtol=0, atol=1e-15)
        total += float(mean.abs().sum())
    assert total > 0


# what is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"error_decay": 1.1}, r"error_decay must be a number in \[0, 1\], got 1.1"),
        ({"error_decay": -0.1}, r"error_decay must be a number in \[0, 1\], got -0.1"),
        ({"error_decay": None}, r"error_decay must be a number in \[0, 1\], got None"),
        ({"outer_lr": -1.0}, "outer_lr must be a number >= 0, got -1.0"),
        ({"mean_over": "mean"}, "mean_over must be 'ranks' or 'contributors', got 'mean'"),
        ({"clip_to_median": 0.5}, "clip_to_median must be True or False, got 0.5"),
        ({"clip_to_median": True, "compressor": None}, "clip_to_median=True need each rank's own message"),
        (
            {"mean_over": "contributors", "compressor": None},
            "mean_over='contributors', .* need each rank's own message",
        ),
        ({"compressor": "top"}, "compressor must be None .*, got 'top'"),
        ({"period": 0}, "period must be an int >= 1, got 0"),
    ],
)
def test_bad_arguments_are_answered(arguments, message):
    with pytest.raises(ValueError, match=message):
        SparseLoCo(Toy().parameters(), lr=1e-2, backend=LocalBackend(), **arguments)


@pytest.mark.parametrize(
    "mine", [{"mean_over": "contributors"}, {"clip_to_median": True}, {"error_decay": 0.5}], ids=str
)
def test_settings_that_differ_are_an_error_on_every_rank(mine):
    def run(backend):
        settings = mine if backend.rank == 1 else {}
        with pytest.raises(ValueError, match="rank"):
            SparseLoCo(Toy().parameters(), lr=1e-2, backend=backend, **settings)

    on_threads(2, run)
