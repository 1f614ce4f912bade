"""PowerSGD and ACP: against the papers' loops on plain lists, and the laws of every compressed mean."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch
from given import Given, split_all
from torch import Tensor, nn
from worlds import on_threads, same_bits, tensors_in

import commopt
from commopt.bucket import ROW_MULTIPLE
from commopt.comm import LocalBackend, ThreadBackend, all_reduce_bytes
from commopt.compress import ACP, PowerSGD, Sign
from commopt.optim import join_state_dict

SIZES = [(12, 9), (5,), (9, 2, 8), (3, 3), ()]
METHODS = [PowerSGD(2, min_compression=1.0), ACP(2, min_compression=1.0)]
both = pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)

Matrix = list[list[float]]


def grads(step: int, rank: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(size, generator=g, dtype=torch.float64) for size in SIZES]


def test_ranks_that_multiply_with_other_numbers_of_threads_are_refused(monkeypatch):
    """Each makes the same products, which torch rounds by the number of its threads: replicas would drift apart."""

    def run(backend: ThreadBackend, method: Any) -> None:
        monkeypatch.setattr(
            "commopt.gradients.connecting.torch.get_num_threads", lambda: 1 + ranks[threading.get_ident()]
        )
        ranks[threading.get_ident()] = backend.rank
        commopt.compress_gradients(Given([(12, 9)]), method, backend=backend)

    ranks: dict[int, int] = {}
    for method in METHODS:
        with pytest.raises(ValueError, match=r"get_num_threads.*rank 1 has 2, rank 0 has 1; .*OMP_NUM_THREADS"):
            on_threads(2, lambda backend, method=method: run(backend, method))
    on_threads(2, lambda backend: run(backend, Sign(16)))


# the papers' loops on lists -------------------------------------------------------------------------------------------


def times(a: Matrix, b: Matrix) -> Matrix:
    return [[math.fsum(x * y for x, y in zip(row, column)) for column in zip(*b)] for row in a]


def transposed(a: Matrix) -> Matrix:
    return [list(column) for column in zip(*a)]


def mean_of(several: list[Matrix]) -> Matrix:
    return [[sum(v) / len(several) for v in zip(*rows)] for rows in zip(*several)]


def minus(a: Matrix, b: Matrix) -> Matrix:
    return [[x - y for x, y in zip(p, q)] for p, q in zip(a, b)]


def plus(a: Matrix, b: Matrix) -> Matrix:
    return [[x + y for x, y in zip(p, q)] for p, q in zip(a, b)]


def orthonormal(a: Matrix) -> Matrix:
    """Gram and Schmidt: another basis of the same space than a QR by reflections, which the product P Q' cannot
    tell."""
    out: list[list[float]] = []
    for column in transposed(a):
        for other in out:
            dot = math.fsum(x * y for x, y in zip(column, other))
            column = [x - dot * y for x, y in zip(column, other)]
        norm = math.sqrt(math.fsum(x * x for x in column))
        out.append([x / norm for x in column])
    return transposed(out)


class Oracle:
    """All ranks at once, of one matrix."""

    def __init__(self, world: int, p: Matrix, q: Matrix) -> None:
        self.p, self.q, self.turn = p, q, 0
        self.errors = [[[0.0] * len(q) for _ in p] for _ in range(world)]

    def mean(self, method: Any, gs: list[Matrix]) -> Matrix:
        a = [plus(g, e) for g, e in zip(gs, self.errors)]
        if isinstance(method, PowerSGD):
            self.p = orthonormal(mean_of([times(x, self.q) for x in a]))
            mine = [times(transposed(x), self.p) for x in a]
            self.errors = [minus(x, times(self.p, transposed(q))) for x, q in zip(a, mine)]
            self.q = mean_of(mine)
        elif self.turn % 2 == 0:
            self.q = orthonormal(self.q)
            mine = [times(x, self.q) for x in a]
            self.errors = [minus(x, times(p, transposed(self.q))) for x, p in zip(a, mine)]
            self.p = mean_of(mine)
        else:
            self.p = orthonormal(self.p)
            mine = [times(transposed(x), self.p) for x in a]
            self.errors = [minus(x, times(self.p, transposed(q))) for x, q in zip(a, mine)]
            self.q = mean_of(mine)
        self.turn += 1
        return times(self.p, transposed(self.q))


@both
@pytest.mark.parametrize("world_size", [2, 3])
def test_it_is_the_algorithm_on_plain_lists(method, world_size):
    def run(backend: ThreadBackend) -> None:
        model = Given(SIZES)
        handle = commopt.compress_gradients(model, method, backend=backend, bucket_mb=2e-4)
        start = handle.state_dict()["state"]
        oracles = {i: Oracle(world_size, start[i]["p"].tolist(), start[i]["q"].tolist()) for i in start}
        assert sorted(oracles) == [0, 2]
        for step in range(7):
            everyone = [grads(step, rank) for rank in range(world_size)]
            model.backward(everyone[backend.rank])
            for i, found in enumerate(model.take()):
                if i in oracles:
                    expected = oracles[i].mean(method, [g[i].flatten(1).tolist() for g in everyone])
                    found, wanted = found.flatten(1), torch.tensor(expected, dtype=torch.float64)
                else:
                    wanted = torch.stack([g[i] for g in everyone]).mean(0)
                torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)

    on_threads(world_size, run)


@both
def test_what_came_out_plus_the_residuals_is_what_went_in(method):
    """Also where a matrix has no gradient on one rank, or on none: then nothing of it is sent."""

    def brought(step: int, rank: int) -> list[Tensor | None]:
        out: list[Tensor | None] = list(grads(step, rank))
        if step % 3 == 1 or (step % 3 == 2 and rank == 0):
            out[2] = None
        return out

    def run(backend: ThreadBackend) -> tuple[list[Tensor], dict[str, Any]]:
        model = Given(SIZES)
        handle = commopt.compress_gradients(model, method, backend=backend, bucket_mb=2e-4)
        total = [torch.zeros(size, dtype=torch.float64) for size in SIZES]
        for step in range(9):
            model.backward(brought(step, backend.rank))
            out = model.take()
            assert (out[2] is None) == (step % 3 == 1)
            for sum_, g in zip(total, out):
                sum_.add_(0 if g is None else g)
        return total, handle.state_dict()["residuals"]["state"]

    results = on_threads(3, run)
    for i in range(len(SIZES)):
        went_in = sum(g for step in range(9) for rank in range(3) if (g := brought(step, rank)[i]) is not None) / 3
        left = sum(own[i]["worker_error"] for _, own in results) / 3 if i in results[0][1] else torch.zeros(())
        came_out = results[0][0][i]
        torch.testing.assert_close(came_out + left.expand(came_out.numel()).view(SIZES[i]), went_in, rtol=0, atol=1e-12)


@both
def test_a_matrix_that_has_gradients_in_every_second_mean_only_has_turns_of_its_own(method):
    """It is the algorithm on plain lists with those alone; also if the run is resumed in between."""

    def run(backend: ThreadBackend) -> None:
        model = Given(SIZES)
        handle = commopt.compress_gradients(model, method, backend=backend, bucket_mb=2e-4)
        start = handle.state_dict()["state"]
        oracles = {i: Oracle(2, start[i]["p"].tolist(), start[i]["q"].tolist()) for i in start}
        for step in range(10):
            everyone = [grads(step, rank) for rank in range(2)]
            here = [i for i in range(len(SIZES)) if i != 2 or step % 2 == 0]
            model.backward([g if i in here else None for i, g in enumerate(everyone[backend.rank])])
            found = model.take()
            for i in oracles.keys() & set(here):
                expected = oracles[i].mean(method, [g[i].flatten(1).tolist() for g in everyone])
                wanted = torch.tensor(expected, dtype=torch.float64)
                torch.testing.assert_close(found[i].flatten(1), wanted, rtol=1e-9, atol=1e-11)
            assert (found[2] is None) == (step % 2 == 1)
            if step == 5:
                saved = handle.state_dict()
                handle.remove()
                handle = commopt.compress_gradients(model, method, backend=backend, bucket_mb=2e-4)
                handle.load_state_dict(saved)

    on_threads(2, run)


@both
def test_a_residual_of_what_is_sent_in_full_stays_until_it_is_sent(method):
    """Another way to take means may have left it: it is saved as long as it lasts."""

    def run(backend: ThreadBackend) -> None:
        model = Given(SIZES)
        handle = commopt.compress_gradients(model, Sign(16), backend=backend, bucket_mb=2e-4)
        model.backward(grads(0, backend.rank))
        saved = handle.state_dict()
        handle.remove()
        handle = commopt.compress_gradients(model, method, backend=backend, bucket_mb=2e-4)
        handle.load_state_dict(saved)
        lasts = []
        for absent in (1, None):
            model.take()
            model.backward([None if i == absent else g for i, g in enumerate(grads(1, backend.rank))])
            lasts.append(1 in handle.state_dict()["residuals"]["state"])
        assert lasts == [True, False]

    on_threads(2, run)


@both
def test_autocast_around_backward_changes_nothing(method):
    def run(backend: ThreadBackend, dtype: torch.dtype | None) -> list[Tensor]:
        model, out = Given(SIZES).float(), list[Tensor]()
        commopt.compress_gradients(model, method, backend=backend, bucket_mb=2e-4)
        for step in range(3):
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                model.backward([g.float() for g in grads(step, backend.rank)])
            out += model.take()
        return out

    without = on_threads(2, lambda backend: run(backend, None))
    within = on_threads(2, lambda backend: run(backend, torch.bfloat16))
    for mine, theirs in zip(within, without):
        assert same_bits(mine, theirs)


@both
def test_a_fixed_matrix_of_low_rank_is_exact_from_the_second_step_on(method):
    def run(backend: ThreadBackend) -> None:
        model = Given([(30, 20)])
        commopt.compress_gradients(model, method, backend=backend, feedback=False)
        draw = torch.Generator().manual_seed(0)
        a = torch.randn(30, 2, generator=draw, dtype=torch.float64) @ torch.randn(
            2, 20, generator=draw, dtype=torch.float64
        )
        for step in range(4):
            model.backward([a])
            (found,) = model.take()
            if step:
                torch.testing.assert_close(found, a, rtol=0, atol=1e-10)

    on_threads(2, run)


@both
def test_bytes_and_messages(method):
    """One all-reduce of one factor and of what is sent whole; of PowerSGD, another of the other factor."""

    def run(backend: ThreadBackend) -> None:
        model = Given(SIZES)
        handle = commopt.compress_gradients(model, method, backend=backend)

        def padded(numbers: int) -> int:
            return 8 * -(-numbers // (3 * ROW_MULTIPLE)) * 3 * ROW_MULTIPLE

        whole, ps, qs = 5 + 9 + 1, 2 * (12 + 9), 2 * (9 + 16)
        for step in range(3):
            model.backward(grads(step, backend.rank))
            factors = [ps + whole, qs] if isinstance(method, PowerSGD) else [(ps, qs)[step % 2] + whole]
            counted = handle.comm_stats()["step"]["by_collective"]["all_reduce"]
            assert counted == {"bytes": sum(all_reduce_bytes(padded(n), 3) for n in factors), "calls": len(factors)}

    on_threads(3, run)


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_rank_has_the_same_bits(method, dtype):
    def run(backend: ThreadBackend) -> list[Tensor]:
        model = Given(SIZES).to(dtype)
        commopt.compress_gradients(model, method, backend=backend, bucket_mb=2e-4)
        out = []
        for step in range(4):
            model.backward([g.to(dtype) for g in grads(step, backend.rank)])
            out += model.take()
        return out

    results = on_threads(3, run)
    assert all(same_bits(results[0], r) for r in results)


def leaves_nothing(method, spoil):
    """A step in which the gradients of rank 1 are spoilt by ``spoil(gradients)`` changes no state, and the next is
    right; and what came out of it, on each rank."""

    def run(backend: ThreadBackend) -> tuple[list[Tensor], list[Tensor]]:
        model = Given(SIZES)
        handle = commopt.compress_gradients(model, method, backend=backend, bucket_mb=2e-4)
        for step in range(2):
            model.backward(grads(step, backend.rank))
        model.take()
        before = handle.state_dict()
        spoilt = grads(2, backend.rank)
        if backend.rank == 1:
            spoil(spoilt)
        model.backward(spoilt)
        came_out = model.take()
        assert handle.comm_stats()["not_finite"] == 1
        after = handle.state_dict()
        for i in before["state"]:
            assert before["state"][i]["turn"] == after["state"][i]["turn"]
            assert same_bits([before["state"][i][n] for n in "pq"], [after["state"][i][n] for n in "pq"])
            old, new = (s["residuals"]["state"][i]["worker_error"] for s in (before, after))
            assert torch.equal(old, new)
        model.backward(grads(3, backend.rank))
        out = model.take()
        assert all(g.isfinite().all() for g in out)
        return came_out, out

    results = on_threads(2, run)
    assert same_bits(results[0][1], results[1][1])
    return [came_out for came_out, _ in results]


@both
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_leaves_nothing(method, bad):
    def spoil(gradients: list[Tensor]) -> None:
        gradients[0][3, 3] = bad

    for came_out in leaves_nothing(method, spoil):
        assert not came_out[0].isfinite().all()


def sent_in_full(gradients: list[Tensor]) -> None:
    """Beside finite matrices."""
    gradients[1][2] = math.nan


def second_factor(gradients: list[Tensor]) -> None:
    """A matrix whose one column, of 12 rows, is longer than any number, though its product with the factor is not."""
    gradients[0][:, 4] = 1e308


@pytest.mark.parametrize(
    ("method", "spoil"), [*((method, sent_in_full) for method in METHODS), (METHODS[0], second_factor)]
)
def test_what_is_not_finite_in_one_message_alone_leaves_nothing(method, spoil):
    leaves_nothing(method, spoil)


@both
@pytest.mark.parametrize("size", [1e-26, 1e20, 1e30])
def test_one_gradient_of_another_size_is_not_the_end(method, size):
    """float32: the factors that are kept have the size of the last gradients, and products must stay in range."""

    def run(backend: ThreadBackend) -> list[Tensor]:
        model = Given([(30, 20)]).float()
        handle = commopt.compress_gradients(model, method, backend=backend)
        for step in range(6):
            g = torch.randn(30, 20, generator=torch.Generator().manual_seed(10 * step + backend.rank))
            model.backward([g * (size if step == 1 else 1.0)])
            out = model.take()
            assert out[0].isfinite().all()
            assert out[0].any(1).all()
        assert handle.comm_stats()["not_finite"] == 0
        return out

    assert same_bits(*on_threads(2, run))


@both
def test_after_gradients_of_zeros_it_learns_again(method):
    def run(backend: ThreadBackend) -> None:
        model = Given([(30, 20)])
        commopt.compress_gradients(model, method, backend=backend)
        zero = torch.zeros(30, 20, dtype=torch.float64)
        for _ in range(3):
            model.backward([zero])
            assert torch.equal(model.take()[0], zero)
        g = torch.randn(30, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        total = torch.zeros_like(g)
        for _ in range(200):
            model.backward([g])
            total += model.take()[0]
        assert float((total / 200 - g).norm()) < 0.1 * float(g.norm())

    on_threads(2, run)


@both
@pytest.mark.parametrize("half", [1, 2, 3])
def test_a_resumed_run_is_the_one_never_stopped(method, half):
    def run(backend: ThreadBackend) -> None:
        def made(which: Any) -> tuple[Given, Any]:
            model = Given(SIZES)
            return model, commopt.compress_gradients(model, which, backend=backend, bucket_mb=2e-4)

        def steps(model: Given, which: range) -> list[Tensor]:
            out = []
            for step in which:
                model.backward(grads(step, backend.rank))
                out += model.take()
            return out

        model, handle = made(method)
        steps(model, range(half))
        saved = handle.state_dict()
        straight = steps(model, range(half, 6))
        other, second = made(type(method)(2, 1.0, seed=5))
        second.load_state_dict(saved)
        assert same_bits(steps(other, range(half, 6)), straight)

    on_threads(2, run)


@both
@pytest.mark.parametrize("after", [1, 2, 4])
def test_another_number_of_ranks_has_the_same_residuals(method, after):
    def before(backend: ThreadBackend) -> dict[str, Any]:
        model = Given(SIZES)
        handle = commopt.compress_gradients(model, method, backend=backend, bucket_mb=2e-4)
        for step in range(5):
            model.backward(grads(step, backend.rank))
        return handle.state_dict()

    states = on_threads(3, before)

    def again(backend: ThreadBackend) -> tuple[list[Tensor], dict[str, Any]]:
        model = Given(SIZES)
        handle = commopt.compress_gradients(model, method, backend=backend, bucket_mb=2e-4)
        handle.load_state_dict(join_state_dict(*split_all(states), backend.rank, after))
        kept = handle.state_dict()["residuals"]["state"]
        model.backward([torch.zeros(size, dtype=torch.float64) for size in SIZES])
        return model.take(), kept

    results = on_threads(after, again)
    for i in (0, 2):
        residuals = sum(state["residuals"]["state"][i]["worker_error"] for state in states) / 3
        if after == 1:
            now = results[0][0][i].flatten()  # one rank alone compresses nothing
        else:
            now = sum(kept[i]["worker_error"] for _, kept in results) / after
        torch.testing.assert_close(now, residuals, rtol=0, atol=1e-12)


def test_a_matrix_is_sent_as_factors_where_that_takes_no_more_than_the_part_that_is_said():
    method = ACP(1, min_compression=2.0)
    assert method.factors_of(torch.Size([4, 4])) == (4, 4, 1)  # 8 numbers for 16
    assert method.factors_of(torch.Size([3, 5])) is None


def test_what_is_not_allowed():
    for arguments, message in (
        ({"rank": 0}, "rank must be an int >= 1, got 0"),
        ({"rank": 2.0}, "rank must be an int >= 1, got 2.0"),
        ({"seed": -1}, "seed must be an int >= 0, got -1"),
        ({"min_compression": 0}, "min_compression must be > 0, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            ACP(**arguments)
    with pytest.raises(ValueError, match="compressor must be"):
        commopt.OneBitAdam([torch.nn.Parameter(torch.ones(3))], compressor=ACP(), backend=LocalBackend())
    first, second = (commopt.compress_gradients(Given(SIZES), ACP(r, 1.0), backend=LocalBackend()) for r in (2, 3))
    with pytest.raises(ValueError, match=r"the loaded factors are \(9, 2\) and \(16, 2\), here they are \(9, 3\)"):
        second.load_state_dict({**first.state_dict(), "residuals": {**first.state_dict()["residuals"]}})


@both
def test_gradients_of_zeros_leave_what_was_learnt_of_the_matrix(method):
    """A matrix of rank 2 that is exact is so again at once."""

    def run(backend: ThreadBackend) -> None:
        model = Given([(30, 20)])
        commopt.compress_gradients(model, method, backend=backend, feedback=False)
        draw = torch.Generator().manual_seed(0)
        thin, flat = (torch.randn(k, 2, generator=draw, dtype=torch.float64) for k in (30, 20))
        a = thin @ flat.t()
        for _ in range(4):
            model.backward([a])
            model.take()
        for _ in range(2):
            model.backward([torch.zeros_like(a)])
            model.take()
        model.backward([a])
        torch.testing.assert_close(model.take()[0], a, rtol=0, atol=1e-10)

    on_threads(2, run)


@both
@pytest.mark.parametrize(("world_size", "nodes"), [(4, 4), (4, 2), (2, 2), (2, 1)])
def test_of_ranks_in_nodes_other_ranks_and_nodes_owe_the_same(method, world_size, nodes):
    """Each rank of a node owes of the whole, as nobody averages a part for others."""

    def before(backend: ThreadBackend) -> dict[str, Any]:
        model = Given(SIZES)
        handle = commopt.compress_gradients(model, method, backend=backend.nodes(2), bucket_mb=2e-4)
        for step in range(3):
            model.backward(grads(step, backend.rank))
        return handle.state_dict()

    states = on_threads(4, before)

    def again(backend: ThreadBackend) -> dict[str, Any]:
        handle = commopt.compress_gradients(
            Given(SIZES), method, backend=backend if nodes == world_size else backend.nodes(world_size // nodes)
        )
        handle.load_state_dict(join_state_dict(*split_all(states), backend.rank, world_size, handle.nodes))
        return handle.state_dict()["residuals"]["state"]

    kept = on_threads(world_size, again)
    for i in (0, 2):
        residuals = sum(state["residuals"]["state"][i]["worker_error"] for state in states) / 4
        now = sum(state[i]["worker_error"] for state in kept) / world_size
        torch.testing.assert_close(now, residuals, rtol=0, atol=1e-12)
        if world_size == 4:
            for mine, theirs in zip(kept, states):
                assert torch.equal(mine[i]["worker_error"], theirs["residuals"]["state"][i]["worker_error"])


@pytest.mark.parametrize("method", [PowerSGD(2), ACP(2)], ids=str)
def test_a_state_that_is_refused_changes_nothing(method):
    """Of a model whose last matrix is another: the first ones would fit."""

    def run(backend):
        handles = []
        for last in (12, 13):
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, last), nn.Linear(last, 8))
            handle = commopt.compress_gradients(net, method, backend=backend)
            torch.manual_seed(backend.rank)
            for _ in range(3):
                net(torch.randn(4, 8)).square().mean().backward()
            handles.append(handle)
        before = tensors_in(handles[0].state_dict())
        with pytest.raises(ValueError, match="of another model"):
            handles[0].load_state_dict(handles[1].state_dict())
        assert same_bits(before, tensors_in(handles[0].state_dict()))

    on_threads(2, run)
