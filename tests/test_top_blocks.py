"""Means of gradients in blocks that all ranks agree on (TASC): against the loop on plain lists, and the laws of every
compressed mean."""

from __future__ import annotations

import math
from typing import Any

import given
import pytest
import torch
from given import SIZES, Given, check_nothing_is_left, check_resumed, split_all
from torch import Tensor
from worlds import on_threads, same_bits, some_grads, some_of

import commopt
from commopt.comm import Backend, LocalBackend, ThreadBackend, all_reduce_bytes
from commopt.compress import Sign, TopBlocks
from commopt.gradients import LoCo
from commopt.optim import join_state_dict

SPEC = TopBlocks(0.2, 20)


def grads(step: int, rank: int) -> list[Tensor | None]:
    """Some parameters lack a gradient here, or everywhere; the last never does."""
    return [*some_of(some_grads(SIZES, step, rank), step, rank)[:-1], some_grads(SIZES, step, rank)[-1]]


def made(backend: Backend, spec: Any = SPEC, **settings: Any) -> tuple[Given, Any]:
    return given.made(backend, spec, **{"bucket_mb": 4e-4, **settings})


# the algorithm on lists -----------------------------------------------------------------------------------------------


def mean_of_blocks(a: list[list[float]], density: float, block: int) -> tuple[list[float], list[list[float]]]:
    """The mean of the blocks of ``a`` of all ranks that matter most, and what each rank owes."""
    n, ranks = len(a[0]), len(a)
    cuts = [range(i, i + block) for i in range(0, n - block + 1, block)]
    importance = [math.fsum(x[i] ** 2 for x in a for i in cut) for cut in cuts]
    order = sorted(range(len(cuts)), key=lambda b: (-importance[b], b))
    sent = {i for b in order[: min(len(cuts), max(1, round(density * len(cuts))))] for i in cuts[b]}
    sent |= set(range(len(cuts) * block, n))
    mean = [sum(x[i] for x in a) / ranks if i in sent else 0.0 for i in range(n)]
    return mean, [[0.0 if i in sent else v for i, v in enumerate(x)] for x in a]


class Loop:
    """All ranks at once, of one bucket; ``number`` of each parameter."""

    def __init__(self, bucket: Any, number: dict[int, int], ranks: int, density: float) -> None:
        self.places = [
            (number[id(p)], o, o + s.numel()) for p, o, s in zip(bucket.params, bucket.offsets, bucket.shapes)
        ]
        self.residuals = [[0.0] * bucket.padded for _ in range(ranks)]
        self.density = density

    def step(self, everyone: list[list[Tensor | None]]) -> dict[int, list[float] | None]:
        """The means, by parameter."""
        a, kept, absent = [list(e) for e in self.residuals], [list(e) for e in self.residuals], set[int]()
        nowhere = {i for i, *_ in self.places if all(g[i] is None for g in everyone)}
        for i, start, stop in self.places:
            if i in nowhere:
                absent |= set(range(start, stop))
            for x, g in zip(a, everyone):
                for at, v in zip(range(start, stop), [] if g[i] is None else g[i].flatten().tolist()):
                    x[at] += v
        a = [[0.0 if at in absent else v for at, v in enumerate(x)] for x in a]
        mean, rest = mean_of_blocks(a, self.density, 20)
        self.residuals = [[old[at] if at in absent else v for at, v in enumerate(new)] for new, old in zip(rest, kept)]
        return {i: None if i in nowhere else mean[start:stop] for i, start, stop in self.places}


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("density", [0.01, 0.4])
def test_it_is_the_algorithm_on_plain_lists(world_size, density):
    """Also with gradients that some ranks, or all, lack: what the latter owe stays."""

    def run(backend: ThreadBackend) -> None:
        model, handle = made(backend, TopBlocks(density, 20))
        number = {id(p): i for i, p in enumerate(model.params)}
        loops = [Loop(bucket, number, world_size, density) for bucket in handle.mean.buckets]
        assert len(loops) > 1
        for step in range(8):
            everyone = [grads(step, rank) for rank in range(world_size)]
            model.backward(everyone[backend.rank])
            found = model.take()
            for i, expected in (item for loop in loops for item in loop.step(everyone).items()):
                assert (found[i] is None) == (expected is None)
                if expected is not None:
                    wanted = torch.tensor(expected, dtype=torch.float64)
                    torch.testing.assert_close(found[i].flatten(), wanted, rtol=1e-12, atol=1e-14)
        for bucket, loop in zip(handle.mean.buckets, loops):
            residuals = torch.tensor(loop.residuals[backend.rank], dtype=torch.float64)
            torch.testing.assert_close(bucket.feedback.worker, residuals, rtol=1e-12, atol=1e-14)
            assert not bucket.feedback.server.any()

    on_threads(world_size, run)


# laws -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [TopBlocks(1, 1), TopBlocks(1, 50)], ids=repr)
def test_all_blocks_are_the_exact_mean(spec):
    def run(backend: ThreadBackend) -> None:
        model, _ = made(backend, spec, feedback=False)
        for step in range(3):
            model.backward(grads(step, backend.rank))
            everyone = [grads(step, rank) for rank in range(3)]
            for i, found in enumerate(model.take()):
                if found is None:
                    assert all(g[i] is None for g in everyone)
                    continue
                mean = sum(torch.zeros(SIZES[i]) if g[i] is None else g[i] for g in everyone) / 3
                torch.testing.assert_close(found, mean, rtol=1e-12, atol=1e-14)

    on_threads(3, run)


def residuals_of_all(states: list[dict[str, Any]]) -> dict[int, Tensor]:
    """By parameter: the mean of the workers' residuals, and the servers'."""
    merged = join_state_dict(*split_all(states), 0, len(states) + 1)["residuals"]["state"]
    return {i: entry["worker_error"].flatten() + entry["server_error"].flatten() for i, entry in merged.items()}


@pytest.mark.parametrize(("nodes", "bucket_mb"), [(None, 4e-4), (2, 4e-4), (2, 1)])
def test_what_came_out_plus_the_residuals_is_what_went_in(nodes, bucket_mb):
    """Also between nodes of two ranks, where each place has blocks of its own, of parameters that lack a gradient as of
    others."""
    world_size = 4 if nodes else 3

    def run(backend: Backend) -> tuple[list[Tensor], dict[str, Any]]:
        model, handle = made(backend, bucket_mb=bucket_mb)
        total = [torch.zeros(size, dtype=torch.float64) for size in SIZES]
        for step in range(12):
            model.backward(grads(step, backend.rank))
            for sum_, g in zip(total, model.take()):
                sum_.add_(0 if g is None else g)
        return total, handle.state_dict()

    results = on_threads(world_size, (lambda backend: run(backend.nodes(2))) if nodes else run)
    assert all(same_bits(results[0][0], total) for total, _ in results)
    left = residuals_of_all([state for _, state in results])
    assert any(e.any() for e in left.values())
    for i, size in enumerate(SIZES):
        gs = [g for step in range(12) for rank in range(world_size) if (g := grads(step, rank)[i]) is not None]
        went_in = (sum(gs) if gs else torch.zeros(size, dtype=torch.float64)).flatten() / world_size
        if went_in.numel():
            torch.testing.assert_close(results[0][0][i].flatten() + left[i], went_in, rtol=0, atol=1e-12)


def test_the_mean_of_many_equal_steps_tends_to_the_gradient():
    """And without feedback most of it never comes."""

    def run(backend: ThreadBackend) -> list[float]:
        out = []
        for feedback in (True, False):
            model = Given([(400,)])
            commopt.compress_gradients(model, TopBlocks(0.1, 10), backend=backend, feedback=feedback)
            g = torch.randn(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
            total = torch.zeros_like(g)
            for _ in range(400):
                model.backward([g])
                total += model.take()[0]
            out.append(float((total / 400 - g).norm() / g.norm()))
        return out

    (kept, forgotten), *_ = on_threads(2, run)
    assert kept < 0.05
    assert forgotten > 0.5


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("nodes", [None, 2])
def test_a_gradient_that_is_not_finite_is_so_on_every_rank_and_leaves_nothing(bad, nodes):
    """However many blocks have such, and wherever they are."""

    def spoil(grads: list[Tensor]) -> None:
        grads[0][2, 1] = grads[5][3] = grads[5][77] = bad

    def run(backend: Backend) -> list[Tensor]:
        return check_nothing_is_left(lambda: made(backend, TopBlocks(0.01, 20)), backend.rank, spoil)

    results = on_threads(4, lambda backend: run(backend.nodes(2))) if nodes else on_threads(3, run)
    assert all(same_bits(results[0], r) for r in results)


def test_large_numbers_are_no_infinities():
    """Their squares are beyond float32."""

    def run(backend: ThreadBackend) -> None:
        model = Given([(200,)]).float()
        handle = commopt.compress_gradients(model, TopBlocks(0.1, 20), backend=backend)
        g = torch.ones(200)
        g[60:80] = 1e30
        g[100:120] = 3e30
        for start in (60, 100):  # equal, as far as can be told: that which comes first
            model.backward([g])
            (found,) = model.take()
            assert found.nonzero().flatten().tolist()[:20] == list(range(start, start + 20))
            g = torch.zeros(200)
        assert handle.comm_stats()["not_finite"] == 0
        g[60:80] = 1e30
        g[150] = math.inf if backend.rank else 0.0  # behind one that is as large, for all that its square says
        model.backward([g])
        assert not model.take()[0].isfinite().all()

    on_threads(2, run)


def test_the_sum_of_mean_squares_over_the_ranks_is_a_number(monkeypatch):
    """Also where each of them is beyond float32: no backend need divide before it adds."""
    sent, importance = list[Tensor](), TopBlocks.importance

    def watched(*args: Any) -> Tensor:
        sent.append(importance(*args))
        return sent[-1].clone()

    def run(backend: ThreadBackend) -> None:
        model = Given([(200,)]).float()
        commopt.compress_gradients(model, TopBlocks(0.1, 20), backend=backend)
        model.backward([torch.full((200,), 1e30)])

    monkeypatch.setattr(TopBlocks, "importance", watched)
    on_threads(4, run)
    assert len(sent) == 4
    assert torch.stack(sent).sum(0).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_rank_has_the_same_bits(dtype):
    def run(backend: ThreadBackend) -> list[Tensor]:
        model = Given().to(dtype)
        commopt.compress_gradients(model, SPEC, backend=backend, bucket_mb=2e-4)
        out = []
        for step in range(5):
            model.backward([None if g is None else g.to(dtype) for g in grads(step, backend.rank)])
            out += [g for g in model.take() if g is not None]
        return out

    results = on_threads(3, run)
    assert any(g.any() for g in results[0])
    assert all(same_bits(results[0], r) for r in results)


def test_bytes_and_messages():
    """One all-reduce of a number for each block, one of the blocks that are sent."""

    def run(backend: ThreadBackend) -> None:
        model, handle = made(backend)
        for step in range(3):
            model.backward(some_grads(SIZES, step, backend.rank))
            expected = 0
            for bucket in handle.mean.buckets:
                blocks, rest = divmod(bucket.padded, 20)
                sent = 20 * max(1, round(0.2 * blocks)) + rest
                expected += all_reduce_bytes(8 * blocks, 3) + all_reduce_bytes(8 * sent, 3)
            counted = handle.comm_stats()["step"]["by_collective"]["all_reduce"]
            assert counted == {"bytes": expected, "calls": 2 * len(handle.mean.buckets)}

    on_threads(3, run)


def test_a_bucket_smaller_than_a_block_is_sent_as_it_is():
    def run(backend: ThreadBackend) -> None:
        model = Given([(5,), (7, 3)])
        handle = commopt.compress_gradients(model, TopBlocks(0.01, 4096), backend=backend)
        g = [torch.arange(5.0).double(), torch.ones(7, 3).double()]
        model.backward([(1 + 2 * backend.rank) * x for x in g])
        for found, x in zip(model.take(), g):
            torch.testing.assert_close(found, 2 * x, rtol=1e-12, atol=0)
        assert handle.comm_stats()["step"]["by_collective"]["all_reduce"]["calls"] == 1
        assert TopBlocks(0.01, 4096).kept(26) == 0

    on_threads(2, run)


# state ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("half", [1, 4])
def test_a_resumed_run_is_the_one_never_stopped(half):
    def run(backend: ThreadBackend) -> None:
        check_resumed(lambda: made(backend), lambda step: grads(step, backend.rank), half)

    on_threads(3, run)


@pytest.mark.parametrize("spec", [SPEC, Sign(16)], ids=repr)
@pytest.mark.parametrize("after", [1, 2, 4])
def test_another_number_of_ranks_has_the_same_residuals(after, spec):
    """Also what another compressor has left, of means too."""

    def before(backend: ThreadBackend) -> dict[str, Any]:
        model, handle = made(backend, spec)
        for step in range(5):
            model.backward(some_grads(SIZES, step, backend.rank))
        return handle.state_dict()

    states = on_threads(3, before)

    def again(backend: ThreadBackend) -> tuple[list[Tensor], dict[str, Any]]:
        model, handle = made(backend)
        handle.load_state_dict(join_state_dict(*split_all(states), backend.rank, after))
        model.backward([torch.zeros(size, dtype=torch.float64) for size in SIZES])
        return model.take(), handle.state_dict()

    results = on_threads(after, again)
    residuals = residuals_of_all(states)
    left = residuals_of_all([state for _, state in results]) if after > 1 else {}
    for i, came_out in enumerate(results[0][0]):
        if came_out.numel():
            total = came_out.flatten() + left.get(i, 0)
            torch.testing.assert_close(total, residuals[i], rtol=0, atol=1e-12)


def test_what_was_left_of_means_stays_while_a_parameter_has_no_gradient():
    """Of the means of another compressor; the whole of it comes with the next gradient."""
    zeros, late = [torch.zeros(size, dtype=torch.float64) for size in SIZES], (0, 5)

    def before(backend: ThreadBackend) -> dict[str, Any]:
        model, handle = made(backend, Sign(16))
        for step in range(5):
            model.backward(some_grads(SIZES, step, backend.rank))
        return handle.state_dict()

    states = on_threads(3, before)

    def again(backend: ThreadBackend) -> tuple[list[Tensor], list[Tensor]]:
        model, handle = made(backend, TopBlocks(1.0, 20))
        handle.load_state_dict(states[backend.rank])
        model.backward([None if i in late else zero for i, zero in enumerate(zeros)])
        first = model.take()
        model.backward(zeros)
        return first, model.take()

    for first, second in on_threads(3, again):
        for i, left in residuals_of_all(states).items():
            if left.numel():
                assert left.any()
                came_out = (second if i in late else first)[i]
                torch.testing.assert_close(came_out.flatten(), left, rtol=0, atol=1e-12)


# what cannot be -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"density": 0}, "density must be a number with 0 < density <= 1, got 0"),
        ({"density": 1.01}, "got 1.01"),
        ({"density": math.nan}, "got nan"),
        ({"density": None}, "got None"),
        ({"block": 0}, "block must be an int >= 1, got 0"),
        ({"block": 8.0}, "block must be an int >= 1, got 8.0"),
    ],
)
def test_settings_out_of_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        TopBlocks(**arguments)


def test_it_is_for_gradients_only():
    params = [torch.nn.Parameter(torch.ones(3))]
    with pytest.raises(ValueError, match="compressor must be"):
        commopt.OneBitAdam(params, compressor=TopBlocks(), backend=LocalBackend())
    with pytest.raises(ValueError, match=r"compressor must be a RandomBlocks or a Compressor of .*, got TopB"):
        commopt.CSER(params, 0.1, compressor=TopBlocks(), backend=LocalBackend())
    with pytest.raises(ValueError, match="feedback must be True, False or, with a compressor of rows, LoCo"):
        commopt.compress_gradients(Given(), TopBlocks(), backend=LocalBackend(), feedback=LoCo())
