"""Compressed means of gradients: what comes out, what stays, and that it is the same on every rank."""

from __future__ import annotations

import copy
import gc
import io
import math
import pickle
import re
import sys
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import oracle
import pytest
import torch
from given import SIZES, Given, check_nothing_is_left, check_resumed, made, split_all
from torch import Tensor, nn
from trainer_runs import assert_same
from worlds import Toy, Used, on_threads, same_bits, seeded, some_grads, some_of, through_a_file, tokens

import commopt
from commopt.bucket import ROW_MULTIPLE
from commopt.comm import CollectiveError, LocalBackend, MessageDamaged, ThreadBackend
from commopt.compress import ACP, Compressor, Float8, Identity, Int2, Int4, Int8, PowerSGD, Sign, TopBlocks, TopK
from commopt.gradients import LoCo
from commopt.gradients.watching import ROW_BYTES
from commopt.optim import ReplicasDiffer, join_state_dict


def incomplete(step: int, rank: int) -> list[Tensor | None]:
    """Some parameters lack a gradient here, or everywhere; the last never does."""
    grads = some_of(some_grads(SIZES, step, rank), step, rank)
    return [*grads[:-1], some_grads(SIZES, step, rank)[-1]]


def residuals(parts: Sequence[dict[str, Any]]) -> list[Tensor]:
    """By parameter, what all ranks together owe: the mean of the workers', and what the servers do."""
    merged = join_state_dict(*split_all(parts), 0, len(parts) + 1)["residuals"]["state"]
    return [
        (merged[i]["worker_error"].reshape(-1) + merged[i]["server_error"].reshape(-1))
        if i in merged
        else torch.zeros(0)
        for i in range(len(SIZES))
    ]


# what comes out -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("bucket_mb", [None, 2e-4])
@pytest.mark.parametrize("feedback", [True, False])
def test_with_the_identity_it_is_the_exact_mean(world_size, bucket_mb, feedback):
    """Of those that have a gradient on some rank; those that have none anywhere keep none."""

    def run(backend: ThreadBackend) -> None:
        model = Given()
        handle = commopt.compress_gradients(model, Identity(), backend=backend, bucket_mb=bucket_mb, feedback=feedback)
        for step in range(6):
            model.backward(incomplete(step, backend.rank))
            everyone = [incomplete(step, rank) for rank in range(world_size)]
            for i, found in enumerate(model.take()):
                brought = [grads[i] for grads in everyone]
                if all(g is None for g in brought):
                    assert found is None
                    continue
                mean = sum(torch.zeros(SIZES[i]) if g is None else g for g in brought) / world_size
                torch.testing.assert_close(found, mean, rtol=1e-12, atol=1e-14)
        assert handle.comm_stats()["steps"] == 6

    on_threads(world_size, run)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("spec", [Identity(), Int4(), ACP(2)], ids=repr)
def test_a_sum_is_as_many_means_as_there_are_ranks(world_size, spec):
    def run(backend: ThreadBackend, reduction: str) -> list[Tensor]:
        model, out = Given(), list[Tensor]()
        commopt.compress_gradients(model, spec, backend=backend, reduction=reduction, bucket_mb=2e-4)
        for step in range(3):
            model.backward(some_grads(SIZES, step, backend.rank))
            out += model.take()
        return out

    means, sums = (on_threads(world_size, lambda backend, r=r: run(backend, r)) for r in ("mean", "sum"))
    for mean, total in zip(means, sums):
        assert same_bits([world_size * x for x in mean], total)


@pytest.mark.parametrize("norm", ["l1", "l2"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_it_is_the_algorithm_on_plain_lists(world_size, norm):
    """Both phases of 1-bit Adam's compressed mean, with the gradient for its momentum, on lists of floats."""
    size, steps, block = 150, 7, 16
    row = math.ceil(size / (world_size * ROW_MULTIPLE)) * ROW_MULTIPLE
    active = [i < size for i in range(row * world_size)]
    worker = [[0.0] * (row * world_size) for _ in range(world_size)]
    server = [[0.0] * row for _ in range(world_size)]

    def grads(step: int, rank: int) -> list[float]:
        g = torch.Generator().manual_seed(10 * step + rank)
        return torch.randn(size, generator=g, dtype=torch.float64).tolist()

    expected = []
    for step in range(steps):
        sent = []
        for rank in range(world_size):
            g = grads(step, rank) + [0.0] * (row * world_size - size)
            z = [a + b if is_active else 0.0 for a, b, is_active in zip(g, worker[rank], active)]
            rows = [slice(row * r, row * (r + 1)) for r in range(world_size)]
            sent.append([v for at in rows for v in oracle.compress(z[at], block, norm, active[at])])
            worker[rank] = [a - b for a, b in zip(z, sent[rank])]
        out: list[float] = []
        for r in range(world_size):
            at = slice(row * r, row * (r + 1))
            mean = [sum(column) / world_size for column in zip(*(s[at] for s in sent))]
            z = [a + b if is_active else 0.0 for a, b, is_active in zip(mean, server[r], active[at])]
            back = oracle.compress(z, block, norm, active[at])
            server[r] = [a - b for a, b in zip(z, back)]
            out += back
        expected.append(out[:size])

    def run(backend: ThreadBackend) -> None:
        model = Given([(size,)])
        commopt.compress_gradients(model, Sign(block, norm), backend=backend)
        for step in range(steps):
            model.backward([torch.tensor(grads(step, backend.rank), dtype=torch.float64)])
            (found,) = model.take()
            torch.testing.assert_close(found, torch.tensor(expected[step], dtype=torch.float64), rtol=1e-6, atol=1e-9)

    on_threads(world_size, run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_rank_has_the_same_bits_and_any_optimizer_follows(dtype):
    def run(backend: ThreadBackend) -> list[Tensor]:
        model = Toy(dtype)
        commopt.compress_gradients(model, Sign(16), backend=backend, bucket_mb=2e-4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        first = None
        for step in range(60):
            optimizer.zero_grad()
            loss = model(tokens(step % 4, backend.rank, 2))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            first = first or loss.item()
        assert loss.item() < first - 0.1
        assert model.unused.grad is None
        return [p.detach() for p in model.parameters()]

    ours, theirs = on_threads(2, run)
    assert same_bits(ours, theirs)


@pytest.mark.parametrize("compressor", [Sign(16), Sign(None), Int4(16), Identity()], ids=repr)
@pytest.mark.parametrize("bucket_mb", [None, 2e-4])
def test_bytes_are_the_closed_form(compressor: Compressor, bucket_mb):
    world_size = 3

    def run(backend: ThreadBackend) -> None:
        model = Given()
        handle = commopt.compress_gradients(model, compressor, backend=backend, bucket_mb=bucket_mb)
        model.backward(some_grads(SIZES, 0, backend.rank))
        chunks = [stop - start for bucket in handle.mean.buckets for start, stop in bucket.chunks]
        rows = sum(compressor.nbytes(n, torch.float64) for n in chunks)
        agreement = (len(SIZES) + ROW_BYTES) * (world_size - 1)
        stats = handle.comm_stats()
        assert stats["step"]["bytes"] == 2 * (world_size - 1) * rows + agreement
        numel = sum(p.numel() for p in model.parameters())
        assert stats["fp32_bytes"] >= 2 * (world_size - 1) * 4 * numel / world_size
        assert stats["ratio"] == stats["fp32_bytes"] / stats["step"]["bytes"]

    on_threads(world_size, run)


# what stays -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("compressor", [Sign(16), Sign(16, "l1"), Int8(16), Int4(16, rotate=True), Int2(16)], ids=repr)
def test_what_came_out_plus_the_residuals_is_what_went_in(world_size, compressor):
    """Also with gradients that some, or all, ranks lack: nothing is lost."""

    def run(backend: ThreadBackend) -> tuple[list[Tensor], dict[str, Any]]:
        model = Given()
        handle = commopt.compress_gradients(model, compressor, backend=backend, bucket_mb=2e-4)
        total = [torch.zeros(size, dtype=torch.float64) for size in SIZES]
        for step in range(12):
            model.backward(incomplete(step, backend.rank))
            for sum_, g in zip(total, model.take()):
                sum_.add_(0 if g is None else g)
        return total, handle.state_dict()

    results = on_threads(world_size, run)
    left = residuals([state for _, state in results])
    for i, size in enumerate(SIZES):
        went_in = torch.zeros(size, dtype=torch.float64)
        for step in range(12):
            for rank in range(world_size):
                g = incomplete(step, rank)[i]
                went_in += 0 if g is None else g / world_size
        if went_in.numel():
            torch.testing.assert_close(results[0][0][i].reshape(-1) + left[i], went_in.reshape(-1), rtol=0, atol=1e-12)


def test_the_mean_of_many_equal_steps_tends_to_the_gradient():
    """And without feedback it does not."""

    def run(backend: ThreadBackend) -> list[float]:
        out = []
        for feedback, steps in ((True, 256), (False, 2)):  # without, each mean is the one before
            model = Given([(200,)])
            commopt.compress_gradients(model, Sign(None), backend=backend, feedback=feedback)
            g = torch.randn(200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
            means = []
            for _ in range(steps):
                model.backward([g])
                means.append(model.take()[0].clone())
            assert torch.equal(means[0], means[1]) != feedback
            out.append(float((sum(means) / steps - g).norm() / g.norm()))
        return out

    (kept, forgotten), *_ = on_threads(2, run)
    assert kept < 0.05
    assert forgotten > 0.3


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    "compressor",
    [Sign(16), Sign(None), Int8(16), Int4(16, rotate=True), Int2(16), Float8(block=16), Identity()],
    ids=repr,
)
def test_a_gradient_that_is_not_finite_is_so_on_every_rank_and_leaves_nothing(compressor, bad):
    def spoil(grads: list[Tensor]) -> None:
        grads[0][2, 1] = bad

    def run(backend: ThreadBackend) -> list[Tensor]:
        return check_nothing_is_left(lambda: made(backend, compressor), backend.rank, spoil)

    results = on_threads(3, run)
    assert all(same_bits(results[0], r) for r in results)


@pytest.mark.parametrize("compressor", [Int8(16), Int4(16, rotate=True), Int2(16), Float8(block=16)], ids=repr)
@pytest.mark.parametrize("elements", [1, 16])
def test_the_largest_number_of_a_dtype_leaves_no_residual_that_is_not_finite(compressor, elements):
    """As clamping makes it of inf. Its scale is finite, and rounded up, so that the largest code stands for more."""

    def run(backend: ThreadBackend) -> list[bool]:
        model = Given([(64,)]).float()
        handle = commopt.compress_gradients(model, compressor, backend=backend)
        finite = []
        for step in range(3):
            g = torch.randn(64, generator=torch.Generator().manual_seed(step))
            if step == 0 and backend.rank == 0:
                g[:elements] = torch.finfo(torch.float32).max * torch.rand(elements).mul_(0.4).add_(0.6)
                g[0] = -torch.finfo(torch.float32).max
            model.backward([g])
            finite.append(bool(model.take()[0].isfinite().all()))
        own = handle.state_dict()["residuals"]["state"]
        assert all(t.isfinite().all() for entry in own.values() for t in entry.values())
        return finite

    for finite in on_threads(2, run):
        assert finite[1:] == [True, True]


@pytest.mark.parametrize(
    ("compressor", "reduction"), [(TopK(2, 16), "mean"), (TopBlocks(0.5, 16), "mean"), (Int8(16), "sum")], ids=repr
)
def test_a_mean_beyond_the_range_of_float16_is_not_finite_and_leaves_nothing(compressor, reduction):
    """What was kept back, or a sum of ranks, can be larger than any gradient of float16."""

    def run(backend: ThreadBackend) -> None:
        model = Given([(1024,)]).half()
        handle = commopt.compress_gradients(model, compressor, backend=backend, reduction=reduction)
        for _ in range(8):
            before = handle.state_dict()["residuals"]["state"]
            model.backward([torch.full((1024,), 40000.0, dtype=torch.float16)])
            if not model.take()[0].isfinite().all():
                break
        assert handle.comm_stats()["not_finite"] == 1
        after = handle.state_dict()["residuals"]["state"]
        assert all(same_bits(before[i].values(), after[i].values()) for i in before)

    on_threads(2, run)


@pytest.mark.parametrize("warmup_steps", [0, 3])
@pytest.mark.parametrize("half", [1, 4])
def test_a_resumed_run_is_the_one_never_stopped(half, warmup_steps):
    def run(backend: ThreadBackend) -> None:
        check_resumed(
            lambda: made(backend, Sign(16), warmup_steps=warmup_steps),
            lambda step: incomplete(step, backend.rank),
            half,
        )

    on_threads(3, run)


WAYS: dict[str, tuple[Any, Any]] = {
    "rows": (Int4(16), True), "averaged": (Int4(16), LoCo()), "blocks": (TopBlocks(0.5, 8), True),
    "factors": (PowerSGD(2, min_compression=1.0), True), "none": (Int4(16), False),
}  # fmt: skip


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(("old", "new"), [(old, new) for old in WAYS for new in WAYS if old != new])
def test_the_residuals_of_one_way_another_takes_or_says_that_it_does_not(old, new, world_size, caplog):
    def run(backend: ThreadBackend, name: str, states: Any = None) -> Any:
        compressor, feedback = WAYS[name]
        model = Toy()
        handle = commopt.compress_gradients(model, compressor, feedback=feedback, backend=backend)
        if states is not None:
            handle.load_state_dict(join_state_dict(*split_all(states), backend.rank, backend.world_size))
            taken = handle.state_dict()
        for step in range(3):
            model.zero_grad()
            model(tokens(step, backend.rank, 2)).backward()
        return handle.state_dict() if states is None else taken

    def whole(parts: Sequence[dict[str, Any]]) -> dict[int, Tensor]:
        """By parameter, what all ranks together owe."""
        merged = join_state_dict(*split_all(parts), 0, len(parts) + 1).get("residuals", {}).get("state", {})
        both = {
            i: e["worker_error"].reshape(-1) + e["server_error"].reshape(-1)
            for i, e in merged.items()
            if "worker_error" in e
        }
        return {i: t for i, t in both.items() if t.any()}

    before = on_threads(2, lambda backend: run(backend, old))
    caplog.clear()
    after = on_threads(world_size, lambda backend: run(backend, new, before))
    said = [record for record in caplog.records if "residuals in the loaded state" in record.getMessage()]
    residuals, residuals_then = whole(after), whole(before)
    assert bool(residuals_then) == (old != "none")
    if said:
        assert world_size == 2 or new == "none"
    elif new != "averaged":  # which rounds it
        assert residuals.keys() == residuals_then.keys()
        for i, t in residuals.items():
            torch.testing.assert_close(t, residuals_then[i], rtol=1e-5, atol=1e-6)


class Damaged(ThreadBackend):
    """A rank whose next large ``verb`` is received with a bit flipped; it has one channel."""

    verb = ""
    channels = None  # type: ignore[assignment]

    def _received(self, verb: str, work: Any, out: Tensor) -> Any:
        if self.verb == verb and out.numel() > 64:
            work.wait()
            out.view(-1).view(torch.uint8)[20] ^= 4
            self.verb = ""
        return work

    def all_to_all(self, out, inp):
        return self._received("all_to_all", super().all_to_all(out, inp), out)

    def all_gather(self, out, inp):
        return self._received("all_gather", super().all_gather(out, inp), out)


@pytest.mark.parametrize("verb", ["all_to_all", "all_gather"])
def test_a_damaged_message_is_an_error_on_all_ranks_before_the_next_mean(verb):
    def run(backend: ThreadBackend) -> str:
        damaged = Damaged(backend.world, backend.rank)
        model, _ = made(damaged, Int8(), bucket_mb=None)
        for step in range(4):
            damaged.verb = verb if backend.rank == 1 and step == 2 else ""
            if step < 3:
                model.backward(some_grads(SIZES, step, backend.rank))
                continue
            with pytest.raises(MessageDamaged, match="go on from the last checkpoint") as caught:
                model.backward(some_grads(SIZES, step, backend.rank))
        return str(caught.value)

    for said in on_threads(3, run):
        assert re.match(rf"compress_gradients\(\), mean 3: {verb}: what rank 1 received from rank \d is not", said)


@pytest.mark.parametrize(("every", "seen"), [(1, 2), (3, 3), (100, None), (None, None)])
def test_parameters_that_differ_are_an_error_on_all_ranks_when_they_are_compared(every, seen):
    def run(backend: ThreadBackend) -> list[Tensor | None]:
        model = Given()
        commopt.compress_gradients(model, Int8(), backend=backend, check_every=every, bucket_mb=2e-4)
        first = next(model.parameters()).detach()
        right = first.clone()
        for step in range(6 if seen is None else seen):
            if step == 1 and backend.rank == 1:
                first.view(-1)[0] += every != 1
            model.backward(some_grads(SIZES, step, backend.rank))
        if seen is not None:
            first.view(-1)[0] += backend.rank == 1
            with pytest.raises(
                ReplicasDiffer, match=f"mean {seen + 1}: rank 1 differs from all others in the para.*check_every=None"
            ) as error:
                model.backward(some_grads(SIZES, seen, backend.rank))
            assert "guard=" not in str(error.value)
            first.copy_(right)
            model.zero_grad()
            model.backward(some_grads(SIZES, seen + 1, backend.rank))  # all have sent the same of the one before
            return model.take()
        return []

    ranks = on_threads(3, run)
    assert all(same_bits(found, ranks[0]) for found in ranks)


@pytest.mark.parametrize("every", [0, -1, 2.5, True])
def test_an_interval_of_comparisons_that_cannot_be(every):
    with pytest.raises(ValueError, match="check_every must be None or an int >= 1, got"):
        commopt.compress_gradients(Given(), Int8(), backend=LocalBackend(), check_every=every)


def test_saving_confirms_its_own_messages_and_no_mean_keeps_a_receipt():
    """Of a mean the next one is told: no longer is anything kept."""

    def run(backend: ThreadBackend) -> None:
        damaged = Damaged(backend.world, backend.rank)
        model, handle = made(damaged, Int8(), bucket_mb=None)
        for step in range(4):
            model.backward(some_grads(SIZES, step, backend.rank))
            assert not handle.mean.topology.receipt.waited_for
        assert bool(handle.consolidated_state_dict().get("residuals_of_ranks")) == (backend.rank == 0)
        damaged.verb = "all_gather" if backend.rank == 1 else ""
        with pytest.raises(MessageDamaged, match="what rank 1 received from rank 0 is not what was sent"):
            handle.consolidated_state_dict()

    on_threads(2, run)


@pytest.mark.parametrize("after", [1, 2, 3, 4])
def test_another_number_of_ranks_has_the_same_residuals(after):
    """From a file of each rank, or one that has all of theirs."""

    def before(backend: ThreadBackend) -> dict[str, Any]:
        model = Given()
        handle = commopt.compress_gradients(model, Sign(16), backend=backend, bucket_mb=2e-4)
        for step in range(5):
            model.backward(some_grads(SIZES, step, backend.rank))
        last = handle.comm_stats()["step"]
        consolidated = handle.consolidated_state_dict(to=1)
        assert ("residuals_of_ranks" in consolidated) == (backend.rank == 1)
        assert handle.comm_stats()["step"] == last
        return handle.state_dict() if backend.rank != 1 else consolidated

    states = on_threads(3, before)
    file = io.BytesIO()
    torch.save(states[1], file)

    def again(backend: ThreadBackend) -> tuple[list[Tensor | None], dict[str, Any]]:
        model = Given()
        handle = commopt.compress_gradients(model, Sign(16), backend=backend, bucket_mb=2e-4)
        handle.load_state_dict(join_state_dict(*split_all(states), backend.rank, after))
        kept = handle.state_dict()
        other = commopt.compress_gradients(Given(), Sign(16), backend=backend, bucket_mb=2e-4)
        other.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
        assert_same(other.state_dict()["residuals"], kept["residuals"])
        if after == 3:
            assert_same(kept["residuals"], states[backend.rank]["residuals"])
        if after == 1:  # saved once more before it comes out
            handle.load_state_dict(kept)
        model.backward([torch.zeros(size, dtype=torch.float64) for size in SIZES])
        return model.take(), kept

    results = on_threads(after, again)
    if after == 1:  # one rank alone compresses nothing: residuals come out at once
        for g, left in zip(results[0][0], residuals(states)):
            torch.testing.assert_close(g.reshape(-1)[: left.numel()], left, rtol=0, atol=1e-12)
        return
    for mine, theirs in zip(residuals([kept for _, kept in results]), residuals(states)):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("compressor", [Sign(16), PowerSGD(2, 1.0), LoCo()], ids=["signs", "low rank", "LoCo"])
@pytest.mark.parametrize(
    ("before", "after"),
    [((3, "sum"), (2, "sum")), ((3, "sum"), (1, "sum")), ((3, "sum"), (3, "mean")), ((2, "mean"), (2, "sum"))],
    ids=str,
)
def test_what_is_owed_to_a_sum_is_the_same_over_another_number_of_ranks_and_to_a_mean(compressor, before, after):
    """LoCo: to its 8 bits, encoded anew."""

    def world(backend: ThreadBackend, reduction: str) -> tuple[Given, Any]:
        model, loco = Given(), isinstance(compressor, LoCo)
        feedback, by = (compressor, Sign(16)) if loco else (True, compressor)
        return model, commopt.compress_gradients(
            model, by, backend=backend, bucket_mb=2e-4, reduction=reduction, feedback=feedback
        )

    def begin(backend: ThreadBackend) -> dict[str, Any]:
        model, handle = world(backend, before[1])
        for step in range(5):
            model.backward(some_grads(SIZES, step, backend.rank))
        return handle.state_dict()

    def again(backend: ThreadBackend) -> dict[str, Any]:
        handle = world(backend, after[1])[1]
        handle.load_state_dict(through_a_file(join_state_dict(*split_all(begun), backend.rank, after[0])))
        return handle.state_dict()

    begun = on_threads(before[0], begin)
    resumed = on_threads(after[0], again)
    times = [ranks if reduction == "sum" else 1 for ranks, reduction in (before, after)]
    near = {"rtol": 0.03, "atol": 0.03} if isinstance(compressor, LoCo) else {"rtol": 0, "atol": 1e-12}
    for theirs, mine in zip(residuals(begun), residuals(resumed)):
        torch.testing.assert_close(mine.double() * times[1], theirs.double() * times[0], **near)


@pytest.mark.parametrize("compressor", [Sign(16), PowerSGD(2, 1.0)], ids=["signs", "low rank"])
@pytest.mark.parametrize("after", [(1, 1), (2, 1), (2, 2), (4, 2), (4, 4)], ids=str)
def test_what_one_node_has_not_given_out_yet_is_saved_and_no_rank_has_its_own(compressor, after):
    """Two ranks owe; one node of two loads that, and saves it before a backward; ranks in nodes go on with it."""

    def world(backend: ThreadBackend, nodes: int) -> tuple[Given, Any]:
        model, world_size = Given(), backend.world_size
        grouped = backend if nodes == world_size else backend.nodes(world_size // nodes)
        return model, commopt.compress_gradients(model, compressor, backend=grouped, bucket_mb=2e-4)

    def moved(states: Sequence[dict[str, Any]], world_size: int, nodes: int) -> list[dict[str, Any]]:
        def load(backend: ThreadBackend) -> dict[str, Any]:
            handle = world(backend, nodes)[1]
            handle.load_state_dict(join_state_dict(*split_all(states), backend.rank, world_size, handle.nodes))
            return handle.state_dict()

        return on_threads(world_size, load)

    def begin(backend: ThreadBackend) -> dict[str, Any]:
        model, handle = world(backend, 2)
        for step in range(3):
            model.backward(some_grads(SIZES, step, backend.rank))
        return handle.state_dict()

    def give_out(states: Sequence[dict[str, Any]]) -> list[Tensor | None]:
        model = Given()
        handle = commopt.compress_gradients(model, compressor, backend=LocalBackend(), bucket_mb=2e-4)
        handle.load_state_dict(join_state_dict(*split_all(states), 0, 1))
        model.backward([torch.zeros(size, dtype=torch.float64) for size in SIZES])
        return model.take()

    begun = on_threads(2, begin)
    one_node = moved(begun, 2, 1)
    for mine, theirs in zip(give_out(moved(one_node, *after)), give_out(begun)):
        assert mine is not None
        assert theirs is not None
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)

    def own(backend: ThreadBackend) -> list[Tensor | None]:
        model, handle = world(backend, 1)
        handle.load_state_dict(begun[backend.rank])  # of two nodes: each rank's other one
        model.backward(some_grads(SIZES, 0, 0))
        return model.take()

    first, second = on_threads(2, own)
    assert same_bits(first, second)


# when -----------------------------------------------------------------------------------------------------------------


def test_gradients_add_up_in_no_sync():
    def run(backend: ThreadBackend) -> None:
        first, second = Used(torch.float64), Used(torch.float64)
        handles = [commopt.compress_gradients(m, Sign(16), backend=backend, bucket_mb=2e-4) for m in (first, second)]
        for step in range(3):
            first.zero_grad()
            second.zero_grad()
            batches = [tokens(3 * step + i, backend.rank, 2) for i in range(3)]
            for batch in batches[:2]:
                with handles[0].no_sync():
                    first(batch).backward()
            first(batches[2]).backward()
            torch.stack([second(batch) for batch in batches]).sum().backward()
            for p, q in zip(first.parameters(), second.parameters()):
                if p.grad is not None:
                    torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-12)
        assert [h.comm_stats()["steps"] for h in handles] == [3, 3]

    on_threads(2, run)


def test_what_backward_passes_in_no_sync_alone_have_reached_is_averaged_with_the_last_one():
    def run(backend: ThreadBackend) -> None:
        left, right = (nn.Linear(8, 8, bias=False, dtype=torch.float64) for _ in range(2))
        handle = commopt.compress_gradients(nn.ModuleList([left, right]), Identity(), backend=backend)
        with handle.no_sync():
            ((1 + backend.rank) * left.weight.sum()).backward()
        right.weight.sum().backward()
        assert torch.equal(left.weight.grad, torch.full((8, 8), 1.5, dtype=torch.float64))

    on_threads(2, run)


def test_a_second_backward_may_reach_a_parameter_on_some_ranks_only():
    """Both passes take a mean. What the first one left counts in the second as much where that reaches a parameter as
    where it does not: else it would be the mean of one rank's gradient with nothing."""

    def run(backend: ThreadBackend) -> None:
        left, right = (nn.Linear(8, 8, bias=False, dtype=torch.float64) for _ in range(2))
        model = nn.ModuleList([left, right])
        commopt.compress_gradients(model, Identity(), backend=backend, bucket_mb=5e-4)  # a bucket each
        (left.weight.sum() + 2 * right.weight.sum()).backward()
        (left.weight.sum() + (3 * right.weight.sum() if backend.rank == 1 else 0)).backward()
        assert torch.equal(left.weight.grad, torch.full((8, 8), 2.0, dtype=torch.float64))
        assert torch.equal(right.weight.grad, torch.full((8, 8), 2 + 3 / 2, dtype=torch.float64))

    on_threads(2, run)


def test_buckets_are_sent_while_backward_runs():
    """All but the last, if all its gradients are there."""

    def run(backend: ThreadBackend) -> None:
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        handle = commopt.compress_gradients(model, Sign(64), backend=backend, bucket_mb=0.0165)
        started: list[int] = []
        model[0].weight.register_post_accumulate_grad_hook(lambda _: started.append(handle.mean._started))
        model(torch.ones(2, 64)).sum().backward()
        assert len(handle.mean.buckets) == 4
        assert started == [3]

    on_threads(2, run)


def test_removed_it_leaves_gradients_alone():
    def run(backend: ThreadBackend) -> None:
        model = Given()
        handle = commopt.compress_gradients(model, Sign(16), backend=backend)
        handle.remove()
        grads = some_grads(SIZES, 0, backend.rank)
        model.backward(grads)
        assert same_bits(model.take(), grads)
        commopt.compress_gradients(model, Identity(), backend=backend)
        model.backward(grads)
        assert not same_bits(model.take(), grads)

    on_threads(2, run)


@pytest.mark.parametrize(
    "compressor", [Sign(16), Int4(), TopK(4, 16), PowerSGD(1, 1.0), ACP(1, 1.0), TopBlocks(0.25, 32)], ids=str
)
@pytest.mark.parametrize("per_node", [1, 2])
def test_after_a_warm_up_of_exact_means_it_is_as_if_it_began_there(compressor, per_node):
    """One step of the warm-up is not finite, and counts as any other."""

    def run(ranks: ThreadBackend) -> None:
        backend = ranks if per_node == 1 else ranks.nodes(per_node)
        (model, handle), (exact, _), (late, begun) = (
            made(backend, given, warmup_steps=steps)
            for given, steps in ((compressor, 3), (Identity(), 0), (compressor, 0))
        )
        for step in range(6):
            grads = incomplete(step, backend.rank)
            grads[-1] = torch.full_like(grads[-1], math.nan) if step == 1 and backend.rank == 1 else grads[-1]
            assert handle.warms_up == (step < 3)
            other = exact if step < 3 else late
            for which in (model, other):
                which.backward(grads)
            found, expected = model.take(), other.take()
            assert [g is None for g in found] == [g is None for g in expected]
            assert same_bits([g for g in found if g is not None], [g for g in expected if g is not None])
        mine, theirs = (h.state_dict()["residuals"]["state"] for h in (handle, begun))
        assert mine.keys() == theirs.keys()
        assert all(same_bits(mine[i].values(), theirs[i].values()) for i in mine)

    on_threads(2 * per_node, run)


# what cannot be -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "kind", "message"),
    [
        (nn.Linear(2, 2), {"compressor": "Sign"}, "compressor must be a commopt.compress.Compressor such as Sign"),
        (nn.Linear(2, 2), {"compressor": Sign}, "compressor must be a commopt.compress.Compressor such as Sign"),
        ([nn.Linear(2, 2)], {}, "model must be a torch.nn.Module, got list"),
        (nn.ReLU(), {}, "the ReLU has no trainable parameters"),
        (nn.Linear(2, 2), {"bucket_mb": -1}, "bucket_mb must be"),
        (nn.Linear(2, 2), {"warmup_steps": -1}, "warmup_steps must be an int >= 0, got -1"),
        (nn.Linear(2, 2), {"warmup_steps": 2.0}, "warmup_steps must be an int >= 0, got 2.0"),
        (nn.Linear(2, 2), {"reduction": "max"}, "reduction must be 'mean' or 'sum', got 'max'"),
        (nn.Linear(2, 2, device="meta"), {}, "parameter 0 is on the meta device"),
        (nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2)), {}, "parameter 2 has no shape yet, it is of a lazy module"),
    ],
)
def test_what_is_not_allowed(model, kind, message):
    with pytest.raises(ValueError, match=message):
        commopt.compress_gradients(model, **{"compressor": Sign(), "backend": LocalBackend(), **kind})


def test_what_is_compressed_already_is_refused_whatever_is_around_it():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    handle = commopt.compress_gradients(model[0], Sign(16), backend=LocalBackend())
    for around in (model, model[0], torch.compile(model, backend="eager")):
        with pytest.raises(ValueError, match="compressed already"):
            commopt.compress_gradients(around, Sign(16), backend=LocalBackend())
    commopt.compress_gradients(model[1], Sign(16), backend=LocalBackend())
    handle.remove()
    commopt.compress_gradients(model[0], Sign(16), backend=LocalBackend())


def test_threads_connect_models_of_their_own_at_any_time():
    interval = sys.getswitchinterval()
    models = [nn.Linear(1, 1) for _ in range(200)]

    def connect(number: int) -> None:
        for model in models[number::4]:
            commopt.compress_gradients(model, Sign(), backend=LocalBackend())

    try:
        sys.setswitchinterval(1e-6)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(connect, range(4)))
    finally:
        sys.setswitchinterval(interval)
    for model in models:
        with pytest.raises(ValueError, match="compressed already"):
            commopt.compress_gradients(model, Sign(), backend=LocalBackend())


@pytest.mark.parametrize("fails", [False, True])
def test_models_whose_gradients_come_in_another_order_on_each_rank_are_averaged(fails):
    """In one backward; and if that of one of them ends in an error on all ranks, the others are as if it had not
    been."""

    def rank(backend: ThreadBackend) -> list[Any]:
        with seeded():
            models = [nn.Linear(4, 3) for _ in range(3)]
        handles = [commopt.compress_gradients(model, Int8(), backend=backend) for model in models]
        errors, order = [], models if backend.rank == 0 else models[::-1]
        for step in range(3):
            x = torch.full((2, 4), 1.0 + backend.rank + step)
            if fails and step == 0:
                with torch.no_grad():
                    models[1].bias += backend.rank
            try:
                sum(model(x).sum() for model in order).backward()
            except ReplicasDiffer as error:
                errors.append(error)
                with torch.no_grad():
                    models[1].bias -= backend.rank
        return [
            errors,
            [handle.mean.steps for handle in handles],
            [p.grad for model in models for p in model.parameters()],
        ]

    ranks = on_threads(2, rank, timeout=20)
    for errors, steps, gradients in ranks:
        assert len(errors) == fails
        assert steps == ([3, 2, 2] if fails else [3, 3, 3])
        assert fails or same_bits(gradients, ranks[0][2])


def test_after_gradients_that_came_outside_of_a_backward_the_next_backward_is_averaged():
    def rank(backend: ThreadBackend) -> Tensor | None:
        model = nn.Linear(4, 3)
        commopt.compress_gradients(model, Identity(), backend=backend)
        hooks = list(model.weight._post_accumulate_grad_hooks.values())
        model.weight.grad = torch.ones(3, 4)
        with pytest.raises(RuntimeError, match=r"came outside of a backward\(\)"):
            hooks[0](model.weight)
        model.zero_grad()
        (model.weight.sum() * (1 + backend.rank)).backward()
        return model.weight.grad

    for gradient in on_threads(2, rank, timeout=20):
        assert gradient is not None
        assert gradient.unique().tolist() == [1.5]


def test_one_rank_that_is_wrong_is_an_error_on_all():
    def run(backend: ThreadBackend) -> None:
        with pytest.raises(ValueError, match=r"settings or kernel providers differ between ranks: rank 1 has .*Sign"):
            commopt.compress_gradients(Given(), Sign(16 << backend.rank), backend=backend)
        with pytest.raises(ValueError, match="parameter lists differ between ranks"):
            commopt.compress_gradients(nn.Linear(3 + backend.rank, 2), Sign(), backend=backend)
        with pytest.raises(ValueError, match=r"(rank 1 refused its arguments: )?compressor must be"):
            commopt.compress_gradients(Given(), [Sign(), None][backend.rank], backend=backend)
        model = Given()
        commopt.compress_gradients(model, Sign(), backend=backend)
        with pytest.raises(ValueError, match=r"gradients of this Given are compressed already"):
            commopt.compress_gradients(model, Sign(), backend=backend)

    on_threads(2, run)


def test_residuals_of_another_model_are_refused():
    model = Given()
    handle = commopt.compress_gradients(model, Sign(), backend=LocalBackend())
    other = commopt.compress_gradients(nn.Linear(2, 2), Sign(), backend=LocalBackend()).state_dict()
    with pytest.raises(ValueError, match="the loaded residuals are of 2 parameters, the model has 6 to train"):
        handle.load_state_dict(other)


# LoCo's feedback ------------------------------------------------------------------------------------------------------


@pytest.mark.long(but="2")
@pytest.mark.parametrize("world_size", [2, 3])
def test_loco_is_the_moving_average_of_what_is_lost(world_size):
    """Its residual is what the formula says, to what 8 bits can hold; every third mean it is forgotten; and it helps
    less than error feedback and more than none."""

    def run(backend: ThreadBackend) -> dict[str, float]:
        apart = {}
        for name, feedback, steps in (("none", False, 2), ("loco", LoCo(0.5, None), 64), ("all", True, 64)):
            model = Given([(200,)])
            commopt.compress_gradients(model, Int2(8), backend=backend, feedback=feedback)
            g = torch.randn(200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
            means = []
            for _ in range(steps):
                model.backward([g])
                means.append(model.take()[0].clone())
            assert torch.equal(means[0], means[1]) == (name == "none")  # and so each that would come
            apart[name] = float((sum(means) / steps - g).norm() / g.norm())

        model = Given([(200,)])
        handle = commopt.compress_gradients(model, Int2(8), backend=backend, feedback=LoCo(0.75, 3))
        e = torch.zeros(200, dtype=torch.float64)
        for step in range(6):
            g = torch.randn(200, generator=torch.Generator().manual_seed(10 * step + backend.rank), dtype=torch.float64)
            padded = torch.zeros(1, handle.mean.buckets[0].padded, dtype=torch.float64)
            padded[0, :200] = g + e
            rows = padded.view(world_size, -1)
            payload = torch.zeros(world_size, Int2(8).nbytes(rows.shape[1], torch.float64), dtype=torch.uint8)
            sent = torch.empty_like(rows)
            active = handle.mean.buckets[0].numel
            mask = torch.zeros(padded.numel(), dtype=torch.bool)
            mask[:active] = True
            bits = torch.zeros(padded.numel() // 8, dtype=torch.uint8)
            commopt.ops.pack_nonzero(mask.double(), bits)
            lost = torch.zeros_like(rows)
            Int2(8).compress_with_feedback(rows, torch.zeros_like(rows), payload, bits.view(world_size, -1), lost)
            Int2(8).decompress(payload, sent)
            e = 0.75 * e + 0.25 * lost.flatten()[:200]
            model.backward([g])
            model.take()
            mine = handle.state_dict()["residuals"]["state"][0]["worker_error"].flatten()
            if step % 3 == 2:
                assert not mine.any()
                e = torch.zeros_like(e)
            else:
                torch.testing.assert_close(mine, e, rtol=0, atol=float(e.abs().max()) / 127)
                e = mine.clone()
        return apart

    for apart in on_threads(world_size, run):
        assert apart["all"] < 0.8 * apart["loco"]
        assert apart["loco"] < 0.9 * apart["none"]


@pytest.mark.parametrize("half", [1, 4])
def test_loco_is_resumed_to_the_bit_and_leaves_nothing_of_what_is_not_finite(half):
    def run(backend: ThreadBackend) -> list[Tensor]:
        def steps(model: Given, which: range) -> list[Tensor]:
            out = []
            for step in which:
                model.backward(incomplete(step, backend.rank))
                out += [g for g in model.take() if g is not None]
            return out

        model, handle = made(backend, Int4(16), feedback=LoCo(0.8, 3))
        steps(model, range(half))
        saved = handle.state_dict()
        spoilt = [torch.full_like(g, math.nan) for g in some_grads(SIZES, 0, backend.rank)]
        model.backward(spoilt)
        assert not any(g.isfinite().all() for g in model.take() if g.numel())
        straight = steps(model, range(half, 8))
        other, second = made(backend, Int4(16), feedback=LoCo(0.8, 3))
        second.load_state_dict(saved)
        assert same_bits(steps(other, range(half, 8)), straight)
        return straight

    results = on_threads(3, run)
    assert all(same_bits(results[0], r) for r in results)


def test_what_loco_is_not_given():
    for arguments, message in (
        ({"beta": 1.0}, r"beta must be a number in \[0, 1\), got 1.0"),
        ({"reset_every": 0}, "reset_every must be None or an int >= 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            LoCo(**arguments)
    for compressor, feedback in ((ACP(), LoCo()), (Sign(), 3)):
        with pytest.raises(ValueError, match="feedback must be True, False or, with a compressor of rows, LoCo"):
            commopt.compress_gradients(Given(), compressor, backend=LocalBackend(), feedback=feedback)


def test_under_loco_the_residual_of_an_absent_parameter_stays():
    def run(backend: ThreadBackend) -> None:
        sizes = [(128,), (128,)]  # whole blocks of what it is kept in
        model = Given(sizes)
        handle = commopt.compress_gradients(model, Int2(8), backend=backend, feedback=LoCo())
        g = torch.Generator().manual_seed(backend.rank)
        grads = [torch.randn(128, generator=g, dtype=torch.float64) for _ in sizes]
        model.backward(grads)
        model.take()
        before = handle.state_dict()["residuals"]["state"]
        model.backward([None, grads[1]])
        assert model.take()[0] is None
        after = handle.state_dict()["residuals"]["state"]
        assert before[0]["worker_error"].any()
        for name in ("worker_error", "server_error"):
            torch.testing.assert_close(after[0][name], before[0][name], rtol=1e-6, atol=0)
        assert not torch.equal(after[1]["worker_error"], before[1]["worker_error"])

    on_threads(2, run)


def test_a_parameter_without_elements_has_a_gradient_on_all_ranks_or_on_none():
    """Clipping takes as many norms on each, so that their sum has the same bits."""

    def run(backend: ThreadBackend) -> list[bool]:
        model = Given([(3,), (0, 4), (2,)])
        commopt.compress_gradients(model, Int8(), backend=backend)
        seen = []
        for used in (backend.rank == 0, False):
            model.backward([torch.ones(3), torch.ones(0, 4) if used else None, torch.ones(2)])
            seen.append(model.take()[1] is not None)
        return seen

    assert on_threads(2, run) == [[True, False]] * 2


def test_a_model_is_copied_and_pickled_and_goes_as_any_other():
    def run(backend: ThreadBackend) -> Any:
        model = Used()
        handle = commopt.compress_gradients(model, Sign(16), backend=backend)
        with pytest.raises(ValueError, match="compressed already"):
            commopt.compress_gradients(model, Sign(16), backend=LocalBackend())
        with pytest.raises(TypeError, match=r"cannot be pickled: save its state_dict\(\)"):
            pickle.dumps(handle)
        assert copy.deepcopy(handle) is None
        copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        for other in (copied, pickled):
            other(tokens(0, backend.rank, 2)).backward()
        assert handle.comm_stats()["steps"] == 0
        assert repr(handle) == f"CompressedGradients(Used, {Sign(16)!r}, ranks={backend.world_size}, steps=0)"
        commopt.compress_gradients(copied, Sign(16), backend=backend)
        copied(tokens(0, backend.rank, 2)).backward()
        del handle
        model(tokens(0, backend.rank, 2)).backward()  # it goes on without being kept
        alone = [p.grad for p in pickled.parameters() if p.grad is not None]
        assert not same_bits([p.grad for p in model.parameters() if p.grad is not None], alone)
        return weakref.ref(model)

    gone = on_threads(2, run)
    gc.collect()  # here: of two threads that collect at once, one does not
    assert [ref() for ref in gone] == [None, None]


@pytest.mark.parametrize("around", [nn.ModuleList, lambda modules: nn.Sequential(*modules)], ids=["list", "sequence"])
def test_a_module_that_was_put_around_others_need_not_be_kept(around):
    def run(backend: ThreadBackend) -> Any:
        torch.manual_seed(0)
        first, second = nn.Linear(4, 3), nn.Linear(3, 2)
        commopt.compress_gradients(around([first, second]), Sign(16), backend=backend)
        backend.all_reduce(torch.zeros(1)).wait()
        with pytest.raises(ValueError, match="compressed already"):
            commopt.compress_gradients(nn.ModuleList([second]), Sign(16), backend=backend)
        second(first(torch.full((1, 4), backend.rank + 1.0))).square().sum().backward()
        return [p.grad for module in (first, second) for p in module.parameters()], weakref.ref(first)

    (mine, *gone), (others, *too) = on_threads(2, run)
    assert same_bits(mine, others)
    gc.collect()
    assert [ref() for ref in gone + too] == [None, None]


class Failing(torch.autograd.Function):
    """Hands on what it gets; its backward fails if it is told to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fails: bool) -> Tensor:
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if ctx.fails:
            raise MemoryError("no memory")
        return gradient, None


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("compressor", [Sign(64), Identity()], ids=repr)
def test_after_a_backward_that_failed_the_next_one_is_as_if_it_had_not_been(compressor, set_to_none):
    """Whatever was on its way by then."""

    def run(backend: ThreadBackend) -> None:
        def made_of_layers() -> tuple[nn.ModuleList, commopt.gradients.CompressedGradients]:
            layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
            for i, p in enumerate(layers.parameters()):
                nn.init.constant_(p, 0.01 * i)
            return layers, commopt.compress_gradients(layers, compressor, backend=backend, bucket_mb=0.0165)

        def backward(layers: nn.ModuleList, step: int, fails: bool = False) -> list[Tensor]:
            layers.zero_grad(set_to_none)
            x = torch.randn(2, 64, generator=torch.Generator().manual_seed(10 * step + backend.rank))
            x = Failing.apply(layers[0](x), fails)
            for layer in layers[1:]:
                x = torch.tanh(layer(x))
            x.square().sum().backward()
            return [p.grad.clone() for p in layers.parameters()]

        (layers, handle), (straight, _) = made_of_layers(), made_of_layers()
        for step in range(3):
            if step == 1:
                with pytest.raises(MemoryError, match="no memory"):
                    backward(layers, 7, fails=True)
            assert same_bits(backward(layers, step), backward(straight, step))
        assert handle.comm_stats()["steps"] == 3

    on_threads(2, run)


def test_what_one_rank_has_kept_since_a_backward_that_failed_all_ranks_have_a_gradient_of():
    """Also where it is zeros, or nothing: clipping takes as many norms on each."""

    def run(backend: ThreadBackend) -> list[bool]:
        model = Given([(3,), (0, 4), (2,)])
        handle = commopt.compress_gradients(model, Int8(), backend=backend)
        with pytest.raises(MemoryError, match="no memory"):
            Failing.apply(model.params[0], True).sum().add(model.params[2].sum()).backward()
        model.zero_grad()
        with handle.no_sync():
            kept = backend.rank == 0
            model.backward([torch.zeros(3), torch.ones(0, 4), torch.ones(2)] if kept else [None, None, torch.ones(2)])
        model.backward([None, None, torch.ones(2)])
        return [grad is not None for grad in model.take()]

    assert on_threads(2, run) == [[True] * 3] * 2


@pytest.mark.parametrize("after", [0, 2])
def test_a_backward_that_failed_on_one_rank_alone_is_an_error_on_all_once_that_goes_on(after):
    """And not messages that are of one bucket here and of another there. ``after``: where it fails; the other rank's
    fails elsewhere, or not."""

    def run(backend: ThreadBackend, other_fails: int | None) -> None:
        layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        commopt.compress_gradients(layers, Int8(), backend=backend, bucket_mb=0.0165)

        def backward(fails: int | None) -> None:
            x = torch.ones(2, 64)
            for i, layer in enumerate(layers):
                x = Failing.apply(torch.tanh(layer(x)), i == fails)
            x.square().sum().backward()

        backward(None)
        fails = (after, other_fails)[backend.rank]
        if fails is not None:
            with pytest.raises(MemoryError, match="no memory"):
                backward(fails)
        ranks = r"\[0\]" if other_fails is None else r"\[0, 1\]"
        for _ in range(2):
            with pytest.raises(
                CollectiveError, match=rf"the backward of ranks {ranks} has failed, and not that of all"
            ):
                backward(None)

    on_threads(2, partial(run, other_fails=None))
    on_threads(2, partial(run, other_fails=1))


def test_a_parameter_without_elements_arrives_whenever_it_likes():
    """Nobody waits for it: its bucket may have been sent."""

    def run(backend: ThreadBackend) -> list[Any]:
        model = Given([(0, 4), (300,), (0,), (200,), (300,)])
        handle = commopt.compress_gradients(model, Identity(), backend=backend, bucket_mb=1e-3)
        assert len(handle.mean.buckets) > 2
        for _ in range(2):
            model.backward([torch.full(p.shape, 1.0 + backend.rank, dtype=torch.float64) for p in model.params])
            found = model.take()
            assert [g.shape for g in found] == [p.shape for p in model.params]
            assert all(bool((g == 1.5).all()) for g in found)
        return found

    on_threads(2, run)


def test_what_is_trained_later_or_new_is_an_error_before_a_forward():
    """Also if all that was trained before is frozen by then, so that no gradient arrives that could tell."""

    def thaw(net: nn.Sequential) -> None:
        net.requires_grad_(False)
        net[0].requires_grad_(True)

    def adapt(net: nn.Sequential) -> None:
        net.requires_grad_(False)
        net.append(nn.Linear(2, 2))

    def exchange(net: nn.Sequential) -> None:
        net[1] = nn.Linear(4, 2)

    def reparametrize(net: nn.Sequential) -> None:
        nn.utils.parametrizations.weight_norm(net[1])

    def run(backend: ThreadBackend, change: Any, said: str) -> None:
        net, x = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), torch.ones(5, 3)
        net[0].requires_grad_(False)
        handle = commopt.compress_gradients(net, Sign(16), backend=backend)
        net(x).sum().backward()
        before = copy.deepcopy(net)
        change(net)
        with torch.no_grad():
            net(x)
        with pytest.raises(RuntimeError, match=said):
            net(x)
        change(before)
        before(x).sum().backward()  # nobody compresses the copy
        handle.remove()
        net(x).sum().backward()
        again = commopt.compress_gradients(net, Sign(16), backend=backend)
        net(x).sum().backward()
        assert again.comm_stats()["steps"] == 1

    frozen, new = "were frozen when compress_gradients.. was called, and are trained now", "are new since compress"
    for change, said in ((thaw, frozen), (adapt, new), (exchange, new), (reparametrize, new)):
        on_threads(2, lambda backend, change=change, said=said: run(backend, change, said))


def test_other_parameters_for_one_call_and_a_compiled_graph_are_no_new_ones():
    def run(backend: ThreadBackend) -> int:
        net, x = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), torch.ones(5, 3)
        handle = commopt.compress_gradients(net, Sign(16), backend=backend)
        twice = {name: 2 * p for name, p in net.named_parameters()}
        torch.func.functional_call(net, twice, (x,)).sum().backward()
        torch.compile(net, fullgraph=True, backend="eager")(x).sum().backward()
        return int(handle.comm_stats()["steps"])

    assert on_threads(1, run) == [2]


# hooks of others ------------------------------------------------------------------------------------------------------


def clipped(p: Tensor) -> None:
    p.grad = p.grad.clamp(-1e-3, 1e-3)


def clipped_in_place(p: Tensor) -> None:
    p.grad.clamp_(-1e-3, 1e-3)


def used_up(p: Tensor) -> None:
    p.grad = None


def in_backward(backend: ThreadBackend, hook: Any, before: bool) -> tuple[list[Tensor], int]:
    """The gradients of a net on which ``hook`` was before compress_gradients(), or after it; and how many means."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)).double()
    if before:
        hooks = [p.register_post_accumulate_grad_hook(hook) for p in net.parameters()]
    handle = commopt.compress_gradients(net, Identity(), backend=backend, bucket_mb=1e-4)
    if not before:
        hooks = [p.register_post_accumulate_grad_hook(hook) for p in net.parameters()]
    assert len(hooks) == 4
    net(torch.full((3, 4), 1.0 + backend.rank, dtype=torch.float64)).square().mean().backward()
    return [p.grad for p in net.parameters()], handle.comm_stats()["steps"]


@pytest.mark.parametrize("hook", [clipped, clipped_in_place])
def test_a_hook_that_changes_gradients_comes_before_or_is_an_error(hook):
    one, other = on_threads(2, lambda backend: in_backward(backend, hook, True))
    assert one[1] == other[1] == 1
    assert same_bits(one[0], other[0])
    assert max(float(g.abs().max()) for g in one[0]) <= 1e-3

    def refused(backend: ThreadBackend) -> None:
        with pytest.raises(RuntimeError, match=r"was changed in backward, after it was sent.*register_post_accumulate"):
            in_backward(backend, hook, False)

    on_threads(2, refused)


@pytest.mark.parametrize("before", [True, False])
def test_a_hook_that_uses_gradients_up_is_an_error(before):
    what = "taken away in backward, before it was averaged" if before else "changed in backward, after it was sent"

    def refused(backend: ThreadBackend) -> None:
        with pytest.raises(RuntimeError, match=what):
            in_backward(backend, used_up, before)

    on_threads(2, refused)


def test_gradients_that_are_parts_of_a_flat_buffer_may_change_with_it():
    """Its version is that of all of them, so that nothing follows from it."""

    def run(backend: ThreadBackend) -> list[Tensor]:
        params = [nn.Parameter(torch.ones(6, dtype=torch.float64)) for _ in range(3)]
        net, flat = nn.ParameterList(params), torch.zeros(18, dtype=torch.float64)
        for p, part in zip(params, flat.split(6)):
            p.grad = part
        commopt.compress_gradients(net, Identity(), backend=backend, bucket_mb=5e-5)
        sum(((1 + backend.rank) * p).sum() for p in params).backward()
        return [flat]

    for found in on_threads(2, run):
        assert same_bits(found, [torch.full((18,), 1.5, dtype=torch.float64)])


def test_a_model_whose_tensors_are_exchanged_inside_is_averaged_all_the_same(monkeypatch):
    """As ``model.to()`` does with DTensors, and with others where torch is told so."""
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)

    def run(backend: ThreadBackend) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Linear(4, 2)
        seen: list[Tensor] = []
        net.weight.register_post_accumulate_grad_hook(seen.append)
        handle = commopt.compress_gradients(net, Identity(), backend=backend)
        net.double()
        for _ in range(2):
            net(torch.full((3, 4), 1.0 + backend.rank, dtype=torch.float64)).square().mean().backward()
        assert handle.comm_stats()["steps"] == len(seen) == 2
        handle.remove()
        net(torch.ones(3, 4, dtype=torch.float64)).sum().backward()
        assert handle.comm_stats()["steps"] == 2
        return [p.grad for p in net.parameters()]

    one, other = on_threads(2, run)
    assert same_bits(one, other)


def test_saving_confirms_the_last_mean():
    """Else what an optimizer has made of a damaged one would be in the checkpoint."""

    def run(backend):
        damaged = Damaged(backend.world, backend.rank)
        model, handle = made(damaged, Int8(), bucket_mb=None)
        for step in range(3):
            damaged.verb = "all_gather" if backend.rank == 1 and step == 2 else ""
            model.backward(some_grads(SIZES, step, backend.rank))
        with pytest.raises(MessageDamaged, match="what rank 1 received from rank 0 is not what was sent"):
            handle.consolidated_state_dict()

    on_threads(2, run)


def test_frozen_parameters_start_as_those_of_rank_0_too(caplog):
    """Ranks that draw their own would train other models, and nothing compares what is frozen."""

    def run(backend):
        torch.manual_seed(backend.rank)
        net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        net[0].requires_grad_(False)
        commopt.compress_gradients(net, Int8(), backend=backend)
        return [p.detach().clone() for p in net.parameters()]

    a, b = on_threads(2, run)
    assert same_bits(a, b)
    assert "parameters differed between ranks; all have those of rank 0 now" in caplog.text


def test_frozen_parameters_that_are_others_on_each_rank_stay_each_ranks_own():
    def run(backend):
        net = nn.Linear(3, 4)
        net.own = nn.Parameter(torch.full((2 + backend.rank,), float(backend.rank)), requires_grad=False)
        commopt.compress_gradients(net, Int8(), backend=backend)
        return net.own.tolist()

    assert on_threads(2, run) == [[0.0, 0.0], [1.0, 1.0, 1.0]]


class Halved(nn.Module):
    """Two convolutions whose channels are last, of which the second is used on some ranks only."""

    def __init__(self) -> None:
        super().__init__()
        with seeded():
            self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 64, 3)
        self.to(memory_format=torch.channels_last)

    def forward(self, step: int, rank: int) -> Tensor:
        x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        y = self.first(x.to(memory_format=torch.channels_last))
        return (self.second(y) if rank else y).square().sum()


def test_a_gradient_that_other_ranks_have_brought_lies_as_theirs():
    """Norms, which clipping takes, add up in the order of the memory: where it is another one, so are the last bits."""

    def run(backend: ThreadBackend) -> list[Tensor]:
        model = Halved()
        commopt.compress_gradients(model, Int8(), backend=backend, check_every=1)
        optimizer, norms = torch.optim.SGD(model.parameters(), lr=0.1), []
        for step in range(4):
            optimizer.zero_grad()
            model(step, backend.rank).backward()
            assert all(p.grad.stride() == p.stride() for p in model.parameters())
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
        return norms

    ranks = on_threads(3, run)
    assert all(same_bits(norms, ranks[0]) for norms in ranks)


@pytest.mark.skipif(
    not hasattr(Tensor, "grad_dtype"), reason="before torch 2.10 gradients have the dtype of parameters"
)
@pytest.mark.parametrize("of_gradient", [torch.float32, None], ids=str)
def test_a_gradient_that_other_ranks_have_brought_has_the_dtype_that_gradients_have(of_gradient):
    def run(backend: ThreadBackend) -> list[Tensor]:
        model = nn.ParameterList(nn.Parameter(torch.ones(70, dtype=torch.bfloat16)) for _ in range(2))
        for p in model:
            p.grad_dtype = of_gradient
        commopt.compress_gradients(model, Int8(), backend=backend)
        (model[0] * (1 + backend.rank)).sum().backward() if backend.rank else model[1].sum().backward()
        return [p.grad for p in model]

    ranks = on_threads(2, run)
    assert same_bits(*ranks)
    assert all(grad.dtype == (of_gradient or torch.bfloat16) for grad in ranks[0])


@pytest.mark.parametrize("confirmed", [False, True])
def test_after_a_damaged_message_all_ranks_may_go_on_from_a_checkpoint(confirmed):
    """It is told once."""

    def run(backend: ThreadBackend) -> list[Tensor | None]:
        damaged = Damaged(backend.world, backend.rank)
        model, handle = made(damaged, Int8(), bucket_mb=None)
        for step in range(2):
            state = handle.state_dict()
            damaged.verb = "all_to_all" if backend.rank == 1 and step == 1 else ""
            model.backward(some_grads(SIZES, step, backend.rank))
            found = model.take()
        with pytest.raises(MessageDamaged, match="mean 2"):
            handle.confirm() if confirmed else model.backward(some_grads(SIZES, 2, backend.rank))
        model.take()
        handle.load_state_dict(state)
        for step in range(1, 4):
            model.backward(some_grads(SIZES, step, backend.rank))
            handle.confirm()
            found = model.take()
        straight, _ = made(backend, Int8(), bucket_mb=None)
        for step in range(4):
            straight.backward(some_grads(SIZES, step, backend.rank))
            exact = straight.take()
        assert same_bits(found, exact)

    on_threads(2, run)
