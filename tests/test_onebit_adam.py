"""The laws of OneBitAdam: it equals Adam where it must, its paper where it must, and itself on every rank."""

from __future__ import annotations

import gc
import logging
import math

import pytest
import torch
from oracle import OneBitAdamOracle
from torch import Tensor, nn
from worlds import (
    Toy,
    as_scheduled,
    backward,
    flat,
    flat_given,
    give,
    on_threads,
    params_of,
    same_bits,
    scheduled,
    some_grads,
    some_of,
    some_params,
    tokens,
    torch_adam,
    train,
)

from commopt import Guard, LocalSGD, OneBitAdam, OneBitLamb, ZeroOneAdam
from commopt.agreement.decision import AGREEMENT_BYTES
from commopt.bucket import ROW_MULTIPLE
from commopt.compress import Compressor, Identity, Int4, Int8, Sign

WORLDS = (1, 2, 3, 4)


def averaged_backward(model: Toy, step: int, world_size: int) -> None:
    """Gradients averaged over what ``world_size`` ranks would see."""
    model.zero_grad()
    sum(model(tokens(step, r, world_size)) / world_size for r in range(world_size)).backward()


def state_of(optimizer: OneBitAdam, name: str) -> list[Tensor]:
    return [entry[name] for entry in optimizer.state.values()]


# warm-up -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("decay", "decoupled"), [(0.0, True), (0.1, True), (0.1, False)])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("lr", [1e-2, torch.tensor(1e-2)])
def test_one_rank_is_torch_adam_to_the_bit_for_the_whole_run(decay, decoupled, maximize, lr):
    ours, theirs = Toy(), Toy()
    settings = {"lr": lr, "weight_decay": decay, "maximize": maximize, "decoupled_weight_decay": decoupled}
    theirs_optimizer = torch_adam(theirs.parameters(), **settings)
    optimizer = OneBitAdam(ours.parameters(), freeze_step=3, **settings)
    assert optimizer.phase == "plain"
    train(ours, optimizer, range(12))
    train(theirs, theirs_optimizer, range(12))
    assert same_bits(params_of(ours), params_of(theirs))
    for a, b in zip(ours.parameters(), theirs.parameters()):
        for key in theirs_optimizer.state.get(b, {}):
            assert torch.equal(optimizer.state[a][key], theirs_optimizer.state[b][key])
    assert optimizer.comm_stats()["total"]["bytes"] == 0


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(("decay", "decoupled"), [(0.0, True), (0.1, True), (0.1, False)])
def test_warm_up_is_torch_adam_on_the_averaged_gradient(world_size, decay, decoupled):
    theirs = Toy()
    settings = {"lr": 1e-2, "weight_decay": decay, "decoupled_weight_decay": decoupled}
    reference = torch_adam(theirs.parameters(), **settings)
    for step in range(10):
        averaged_backward(theirs, step, world_size)
        reference.step()

    def run(backend):
        model = Toy()
        optimizer = OneBitAdam(model.parameters(), freeze_step=10, backend=backend, **settings)
        train(model, optimizer, range(10), backend.rank, world_size)
        return params_of(model)

    for ours in on_threads(world_size, run):
        for a, b in zip(ours, theirs.parameters()):
            torch.testing.assert_close(a, b.detach(), rtol=1e-5, atol=1e-6)


# the paper -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(
    ("compressor", "block", "norm"),
    [
        (Identity(), None, None),
        (Sign(block=16), 16, "l2"),
        (Sign(block=16, norm="l1"), 16, "l1"),
        (Sign(None), None, "l2"),
    ],
)
@pytest.mark.parametrize(
    ("absent", "overlap", "lossy_warmup"),
    [(False, False, False), (True, False, False), (True, True, False), (True, False, True), (True, True, True)],
)
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("changes", [False, True])
def test_every_step_is_that_of_the_paper_on_lists(
    world_size, compressor, block, norm, absent, overlap, lossy_warmup, decoupled, changes
):
    """float64 parameters, so that nothing but the algorithm is compared. Bits of a sign may not differ even once.
    ``absent``: parameters come and go, in blocks that they share with others. ``lossy_warmup``: gradients are sent by
    the same compressor, with the same residuals. ``changes``: so do all hyper-parameters, at every step. Half of the
    cases have no bias correction."""
    corrects = changes != decoupled
    sizes: list[tuple[int, ...]] = [(3, 7), (), (40,), (0, 2), (2, 5)]
    settings = {"lr": 0.02, "eps": 1e-6}
    oracle = OneBitAdamOracle(
        flat(some_params(sizes)), world_size, 6, **settings, b1=0.9, b2=0.98, wd=0.05,
        row_multiple=ROW_MULTIPLE, block=block, norm=norm, lossy_warmup=lossy_warmup,
        coupled=not decoupled, corrects=corrects,
    )  # fmt: skip
    expected = []

    def grads(step: int, rank: int) -> list[Tensor | None]:
        whole = some_grads(sizes, step, rank)
        return some_of(whole, step, rank) if absent else whole

    for step in range(20):
        if changes:
            as_scheduled(oracle, step)
        oracle.step([flat_given(grads(step, r), sizes) for r in range(world_size)])
        expected.append(oracle.x + oracle.m[: oracle.size])

    # With 3 ranks a mean of float32 scales can lie exactly between two float32, and which one becomes the next scale
    # then depends on the last bit of a float64 sum (which Python 3.12's sum() rounds differently). Such a rounding is
    # 2**-24 of a scale and moves a parameter by 1e-9 to 1e-7; a wrong sign would move it by 1e-2.
    atol = 1e-6 if world_size == 3 else 1e-12

    def run(backend):
        mine = some_params(sizes)
        optimizer = OneBitAdam(
            mine,
            betas=(0.9, 0.98),
            weight_decay=0.05,
            decoupled_weight_decay=decoupled,
            bias_correction=corrects,
            freeze_step=6,
            compressor=compressor,
            warmup_compressor=compressor if lossy_warmup else None,
            overlap=overlap,
            backend=backend,
            **settings,
        )
        history = []
        for step in range(20):
            optimizer.param_groups[0].update(scheduled(step) if changes else {})
            give(mine, grads(step, backend.rank))
            optimizer.step()
            history.append(flat(mine) + flat([optimizer.state[p]["exp_avg"] for p in mine]))
        residuals = [optimizer.residuals[p] for p in mine]
        errors = flat([r["worker_error"] for r in residuals]), flat([r["server_error"] for r in residuals])
        for ours, theirs in zip(errors, (oracle.worker[backend.rank], oracle.server[backend.rank])):
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs[: len(ours)]), rtol=0, atol=atol)
        return history

    for history in on_threads(world_size, run):
        for ours, theirs in zip(history, expected):
            a, b = (torch.tensor(x, dtype=torch.float64) for x in (ours, theirs))
            torch.testing.assert_close(a, b, rtol=1e-12, atol=atol)


def test_a_warm_up_that_is_compressed_in_pieces_is_that_in_one():
    """Pieces end where blocks of both compressors do: of 24 and of 64 elements, in rows of 3008."""

    def run(backend, bucket_mb):
        p = nn.Parameter(torch.zeros(6000))
        optimizer = OneBitAdam(
            [p], lr=1e-2, betas=(0.9, 0.5), freeze_step=4, compressor=Sign(24), warmup_compressor=Int4(64),
            bucket_mb=bucket_mb, backend=backend, guard=Guard(check_every=None),
        )  # fmt: skip
        calls = []
        for step in range(8):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * step + backend.rank))
            optimizer.step()
            calls.append(optimizer.comm_stats()["step"]["by_collective"]["all_to_all"]["calls"])
        return p.detach(), calls

    (whole, once), (pieces, often) = (on_threads(2, lambda b, mb=mb: run(b, mb))[0] for mb in (25, 0.004))
    assert set(once) == {1}
    assert set(often) == {6}
    assert same_bits([whole], [pieces])


def test_a_later_freeze_step_lets_what_had_no_variance_move_at_once_in_a_compressed_warm_up():
    def run(backend):
        p = nn.Parameter(torch.zeros(64))
        optimizer = OneBitAdam([p], lr=1e-2, freeze_step=2, thaw="never", warmup_compressor=Int8(32), backend=backend)
        for step in range(4):
            if step == 3:
                optimizer.param_groups[0]["freeze_step"] = 10
            p.grad = torch.ones(64)
            p.grad[32:] = float(step == 3)
            optimizer.step()
        return optimizer.phase, bool((optimizer.state[p]["exp_avg_sq"] > 0).all())

    assert on_threads(2, run) == [("warmup", True)] * 2


def test_what_a_compressed_warm_up_leaves_without_a_variance_is_in_no_message_after_it():
    def run(backend):
        p = nn.Parameter(torch.zeros(64))
        optimizer = OneBitAdam(
            [p], freeze_step=3, compressor=Sign(16), warmup_compressor=Int8(32), guard=Guard(check_every=None),
            backend=backend,
        )  # fmt: skip
        for step in range(8):
            p.grad = torch.randn(64, generator=torch.Generator().manual_seed(10 * step + backend.rank))
            p.grad[5:9] = 0
            optimizer.step()
        still = [optimizer.state[p]["exp_avg"][5:9], optimizer.residuals[p]["worker_error"][5:9], p.detach()[5:9]]
        return optimizer.phase, any(bool(t.any()) for t in still), bool(optimizer.state[p]["exp_avg"][:5].all())

    assert on_threads(2, run) == [("compressed", False, True)] * 2


@pytest.mark.parametrize("world_size", [2, 3])
def test_without_loss_the_compressed_phase_is_adam_with_a_frozen_variance(world_size):
    """Identity compressor against torch.optim.Adam whose exp_avg_sq and second clock are put back after each step."""
    theirs = Toy(torch.float64)
    alive = [p for n, p in theirs.named_parameters() if n in ("embedding", "weight", "bias", "gain")]
    reference = torch.optim.Adam(alive, lr=1e-2, betas=(0.9, 0.9))
    frozen = None
    for step in range(12):
        averaged_backward(theirs, step, world_size)
        if step == 8:
            frozen = [reference.state[p]["exp_avg_sq"].clone() for p in alive]
        if frozen is None:
            reference.step()
            continue
        c1, c2 = 1 - 0.9 ** (step + 1), 1 - 0.9**8
        for p, v in zip(alive, frozen):
            m = reference.state[p]["exp_avg"].lerp_(p.grad, 0.1)
            p.data -= torch.where(v > 0, 1e-2 / c1 * m / ((v / c2).sqrt() + 1e-8), 0)

    def run(backend):
        model = Toy(torch.float64)
        mine = [p for n, p in model.named_parameters() if n in ("embedding", "weight", "bias", "gain")]
        model.positions.requires_grad_(False)
        optimizer = OneBitAdam(
            mine, lr=1e-2, betas=(0.9, 0.9), freeze_step=8, compressor=Identity(), backend=backend, bucket_mb=1e-4
        )
        train(model, optimizer, range(12), backend.rank, world_size)
        return [p.detach() for p in mine]

    for ours in on_threads(world_size, run):
        for a, b in zip(ours, alive):
            torch.testing.assert_close(a, b.detach(), rtol=1e-11, atol=1e-12)


# replicas ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("compressor", [Sign(), Sign(block=None, norm="l1"), Identity()])
def test_replicas_are_bit_identical_after_every_step(world_size, dtype, compressor):
    def run(backend):
        model, history = Toy(dtype), []
        optimizer = OneBitAdam(
            model.parameters(), lr=1e-2, freeze_step=4, compressor=compressor, backend=backend, bucket_mb=2e-4, eps=1e-6
        )
        for step in range(12):
            train(model, optimizer, range(step, step + 1), backend.rank, world_size)
            history.append(params_of(model) + [t.clone() for t in state_of(optimizer, "exp_avg")])
        assert optimizer.phase == "compressed"
        assert all(t.isfinite().all() for t in history[-1])
        return history

    rank_0, *others = on_threads(world_size, run)
    for history in others:
        assert all(same_bits(a, b) for a, b in zip(rank_0, history))
    assert not same_bits(rank_0[5], rank_0[-1])


def test_ranks_that_start_from_different_parameters_get_those_of_rank_0(caplog):
    def run(backend):
        model = Toy(seed=backend.rank)
        OneBitAdam(model.parameters(), backend=backend)
        return params_of(model)

    for params in on_threads(3, run):
        assert same_bits(params, params_of(Toy(seed=0)))
    assert caplog.text.count("differed between ranks") == 1


# phases --------------------------------------------------------------------------------------------------------------


def test_the_change_of_phase_is_logged_once_and_the_variance_stays_frozen(caplog):
    def run(backend):
        model = Toy()
        optimizer = OneBitAdam(model.parameters(), freeze_step=3, backend=backend)
        phases = []
        for step in range(8):
            phases.append(optimizer.phase)
            train(model, optimizer, range(step, step + 1), backend.rank, 2)
            if step == 2:
                frozen = [t.clone() for t in state_of(optimizer, "exp_avg_sq")]
        assert same_bits(frozen, state_of(optimizer, "exp_avg_sq"))
        return phases

    for phases in on_threads(2, run):
        assert phases == ["warmup"] * 3 + ["compressed"] * 5
    assert caplog.text.count("warmup ended after step 3, compressed from now on") == 1


def test_the_size_of_the_update_does_not_jump_at_the_switch_nor_grow_after_it():
    """With a gradient of constant size |update| is lr for ever; if the clock of beta2 ran on, it would be 1.005 lr
    after its first step, and reach 3.2 lr."""

    def run(backend):
        p = nn.Parameter(torch.zeros(1000, dtype=torch.float64))
        optimizer = OneBitAdam([p], lr=1e-3, freeze_step=100, backend=backend)
        sizes = []
        for _ in range(200):
            before = p.detach().clone()
            p.grad = torch.ones_like(p)
            optimizer.step()
            sizes.append((p.detach() - before).abs().mean().item())
        return sizes

    for sizes in on_threads(2, run):
        assert all(math.isclose(s, 1e-3, rel_tol=1e-3) for s in sizes)


def test_groups_have_phases_of_their_own_and_a_late_group_warms_up_by_itself(caplog):
    def run(backend):
        model = Toy()
        optimizer = OneBitAdam([model.weight, model.bias], freeze_step=2, backend=backend)
        train(model, optimizer, range(3), backend.rank, 2)
        assert optimizer.phase == "compressed"
        optimizer.add_param_group({"params": [model.embedding, model.positions, model.gain], "freeze_step": 4})
        assert optimizer.phase == "mixed"
        train(model, optimizer, range(3, 7), backend.rank, 2)
        assert optimizer.phase == "compressed"
        assert [g["step"] for g in optimizer.param_groups] == [7, 4]
        train(model, optimizer, range(7, 10), backend.rank, 2)
        return params_of(model)

    a, b = on_threads(2, run)
    assert same_bits(a, b)
    assert not same_bits(a, params_of(Toy()))
    assert caplog.text.count("ended after step 2, compressed from now on") == 1
    assert caplog.text.count("ended after step 4 for parameter groups [1], compressed from now on") == 1


def test_groups_that_change_together_are_reported_in_one_line(caplog):
    def run(backend):
        model = Toy()
        optimizer = OneBitAdam([{"params": [model.weight]}, {"params": [model.bias]}], freeze_step=2, backend=backend)
        train(model, optimizer, range(3), backend.rank, 2)

    on_threads(2, run)
    assert caplog.text.count("from now on") == 1


# masks and presence --------------------------------------------------------------------------------------------------


def test_what_never_had_a_gradient_never_moves():
    """Rows never used, the dead layer, the unused parameter: not in 30 compressed steps; their residuals stay 0."""

    def run(backend):
        model = Toy()
        optimizer = OneBitAdam(model.parameters(), lr=1e-2, freeze_step=5, backend=backend)
        train(model, optimizer, range(35), backend.rank, 2)
        for name, rows in [("embedding", slice(13, None)), ("positions", slice(6, None)), ("dead", slice(None))]:
            p = getattr(model, name)
            assert torch.equal(p[rows], getattr(Toy(), name)[rows]), name
            for key, value in {**optimizer.state[p], **optimizer.residuals[p]}.items():
                assert value.dim() < 2 or not value[rows].any(), (name, key)
        assert torch.equal(model.unused, Toy().unused)
        assert optimizer.state[model.unused]["step"] == 0
        assert not torch.equal(model.embedding[:13], Toy().embedding[:13])

    on_threads(2, run)


@pytest.mark.parametrize("freeze_step", [2, 100])
def test_a_parameter_without_gradient_on_all_ranks_does_not_move_and_on_one_rank_counts_as_zero(freeze_step):
    """As in torch, weight decay included; decided by all ranks together, so nobody hangs."""

    def run(backend):
        model = Toy()
        optimizer = OneBitAdam(model.parameters(), lr=1e-2, weight_decay=0.1, freeze_step=freeze_step, backend=backend)
        train(model, optimizer, range(3), backend.rank, 2)
        before, bias = model.weight.detach().clone(), model.bias.detach().clone()
        for step in range(3, 8):
            backward(model, step, backend.rank, 2)
            model.weight.grad = None
            if backend.rank == 1:
                model.bias.grad = None
            optimizer.step()
        assert torch.equal(model.weight, before)
        assert not torch.equal(model.bias, bias)
        assert optimizer.state[model.weight]["step"] == 3
        assert optimizer.state[model.bias]["step"] == 8
        return params_of(model)

    a, b = on_threads(2, run)
    assert same_bits(a, b)


# agreement -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("freeze_step", [2, 100])
def test_nan_or_inf_on_one_rank_is_skipped_by_all_and_changes_nothing(world_size, bad, freeze_step, caplog):
    def run(backend):
        model = Toy()
        optimizer = OneBitAdam(model.parameters(), lr=1e-2, freeze_step=freeze_step, backend=backend)
        train(model, optimizer, range(4), backend.rank, world_size)
        before = params_of(model), optimizer.state_dict()
        backward(model, 4, backend.rank, world_size)
        if backend.rank == world_size - 1:
            model.weight.grad[1, 2] = bad
        optimizer.step()
        assert same_bits(before[0], params_of(model))
        after = optimizer.state_dict()
        assert after["param_groups"] == before[1]["param_groups"]
        for key, entry in before[1]["state"].items():
            assert same_bits(list(entry.values()), list(after["state"][key].values()))
        assert optimizer.skipped_steps == optimizer.comm_stats()["skipped_steps"] == 1
        train(model, optimizer, range(5, 8), backend.rank, world_size)
        return params_of(model)

    results = on_threads(world_size, run)
    assert all(same_bits(results[0], r) for r in results)
    assert caplog.text.count("step skipped on all ranks") == 1


@pytest.mark.parametrize("freeze_step", [100, 1])
def test_clipping_uses_the_root_mean_square_of_the_ranks_norms(freeze_step):
    """Rank norms 3 and 5 give sqrt((9 + 25) / 2); clipped to 1 the run equals one with gradients scaled by hand."""
    norm = math.sqrt((3**2 + 5**2) / 2)

    def run(backend, clip):
        p = nn.Parameter(torch.zeros(4, dtype=torch.float64))
        q = nn.Parameter(torch.zeros((), dtype=torch.float64))
        optimizer = OneBitAdam(
            [p, q], lr=1e-2, eps=0.5, freeze_step=freeze_step, backend=backend, max_grad_norm=1.0 if clip else None
        )
        for _ in range(3):
            scale = 1.0 if clip else 1.0 / (norm + 1e-6)
            size = (3.0 if backend.rank == 0 else 5.0) / math.sqrt(5) * scale
            p.grad, q.grad = torch.full_like(p, size), torch.full_like(q, size)
            optimizer.step()
        return torch.cat([p.detach(), q.detach().view(1)])

    clipped = on_threads(2, lambda backend: run(backend, True))
    by_hand = on_threads(2, lambda backend: run(backend, False))
    assert torch.equal(clipped[0], clipped[1])
    torch.testing.assert_close(clipped[0], by_hand[0], rtol=1e-12, atol=0)


def test_clipping_on_one_rank_is_clip_grad_norm():
    ours, theirs = Toy(), Toy()
    optimizer = OneBitAdam(ours.parameters(), lr=1e-2, max_grad_norm=0.05)
    reference = torch.optim.Adam(theirs.parameters(), lr=1e-2)
    for step in range(6):
        train(ours, optimizer, range(step, step + 1))
        backward(theirs, step, 0, 1)
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.05)
        reference.step()
    for a, b in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_gradients_that_somebody_else_has_averaged_are_reported_once(caplog):
    def run(backend):
        model = Toy()
        optimizer = OneBitAdam(model.parameters(), freeze_step=2, backend=backend)
        train(model, optimizer, range(5))  # the same data on every rank

    on_threads(2, run)
    assert caplog.text.count("already equal on all ranks") == 1
    assert "commopt.attach" in caplog.text


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradients_that_come_equal_to_the_bit_are_not_averaged_again_and_others_are(reduction):
    def gradients(t, rank):
        """In steps 0, 1 and 5 the same on all ranks; else of the same norm, but in other places, or missing."""
        a = torch.randn(6, generator=torch.Generator().manual_seed(t), dtype=torch.float64)
        if t in (2, 4):
            return a.roll(rank), torch.ones(2, dtype=torch.float64)
        if t == 3:
            return a, torch.zeros(2, dtype=torch.float64) if rank else None
        return a, torch.ones(2, dtype=torch.float64)

    def run(backend):
        p = [nn.Parameter(torch.ones(n, dtype=torch.float64)) for n in (6, 2)]
        optimizer = OneBitAdam(p, lr=1e-2, freeze_step=9, backend=backend, reduction=reduction)
        averaged = []
        for t in range(6):
            p[0].grad, p[1].grad = gradients(t, backend.rank)
            optimizer.step()
            averaged.append("all_reduce" in optimizer.comm_stats()["step"]["by_collective"])
        return params_of(nn.ParameterList(p)), averaged

    ranks = on_threads(3, run)
    p = [nn.Parameter(torch.ones(n, dtype=torch.float64)) for n in (6, 2)]
    reference = torch.optim.Adam(p, lr=1e-2)
    for t in range(6):
        brought = [gradients(t, rank) for rank in range(3)]
        factor = 3 if reduction == "sum" else 1
        p[0].grad = factor * sum(a for a, _ in brought) / 3
        p[1].grad = factor * sum(torch.zeros(2, dtype=torch.float64) if b is None else b for _, b in brought) / 3
        reference.step()
    for params, averaged in ranks:
        assert same_bits(params, ranks[0][0])
        assert averaged == [False, False, True, True, True, False]
        for mine, theirs in zip(params, p):
            torch.testing.assert_close(mine, theirs.detach(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("freeze_step", "beta2", "said"), [(8, 0.999, 1), (1000, 0.999, 0), (8, 0.8, 0), ("auto", 0.999, 0)]
)
def test_a_warm_up_shorter_than_the_window_of_the_variance_is_reported(caplog, freeze_step, beta2, said):
    def run(backend):
        OneBitAdam(Toy().parameters(), betas=(0.9, beta2), freeze_step=freeze_step, backend=backend)

    on_threads(2, run)
    assert caplog.text.count("freeze_step=8 is less than 1 / (1 - beta2) = 1000 steps") == said


def test_a_warm_up_that_does_not_end_is_reported_after_100_steps_and_at_the_end_of_the_run(caplog):

    def run(backend, **settings):
        p = nn.Parameter(torch.ones(4))
        optimizer = OneBitAdam([p], betas=(0.9, 0.5), backend=backend, **settings)
        for t in range(120):
            p.grad = torch.full_like(p, 1.1**t * (1 + backend.rank))
            optimizer.step()

    on_threads(1, run)
    assert not caplog.text  # one rank alone compresses nothing, and needs no warm-up
    on_threads(2, run)
    said = "the variance has not settled (the squares of a tensor's gradients have changed by a factor of 45"
    assert caplog.text.count("the variance has not settled") == caplog.text.count(said) == 1  # 1.1^40, at step 100
    assert "everything is still sent in full precision" in caplog.text
    gc.collect()
    assert caplog.text.count("the run ends after 120 steps, all of them of its warm-up") == 1
    on_threads(2, lambda backend: run(backend, warmup_compressor=Int8()))
    assert f"everything is still sent by {Int8()}; freeze_step=<an int>" in caplog.text


def test_the_end_of_a_run_that_was_compressed_says_nothing(caplog):
    def run(backend):
        model = Toy()
        train(model, OneBitAdam(model.parameters(), betas=(0.9, 0.5), freeze_step=4, backend=backend), range(6))

    on_threads(2, run)
    gc.collect()
    assert "the run ends" not in caplog.text


@pytest.mark.parametrize("cls", [OneBitAdam, LocalSGD])
def test_gradients_that_each_rank_clips_by_itself_are_reported_once_where_they_are_averaged(caplog, cls):
    def run(backend, clip):
        model = Toy()
        options = {"freeze_step": 2} if cls is OneBitAdam else {"period": 2}
        optimizer = cls(model.parameters(), backend=backend, **options)
        for t in range(8):
            backward(model, t, backend.rank, 2)
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()

    on_threads(2, lambda backend: run(backend, False))
    assert "max_grad_norm" not in caplog.text
    on_threads(2, lambda backend: run(backend, True))
    averages = cls is OneBitAdam  # what else clips than each rank, where each takes its own steps?
    assert caplog.text.count("a norm of 0.01 on every rank, though they differ") == averages
    assert ("give the optimizer max_grad_norm=0.01" in caplog.text) == averages


# accounting ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("compressor", [Sign(), Sign(block=None), Sign(block=64), Identity()])
def test_bytes_counted_are_those_of_the_closed_form(world_size, compressor: Compressor):
    sizes = [1000, 1, 513]

    def run(backend):
        params = [nn.Parameter(torch.zeros(n)) for n in sizes]
        guard = Guard(check_every=None)
        optimizer = OneBitAdam(
            params, freeze_step=1, compressor=compressor, backend=backend, bucket_mb=0.002, guard=guard
        )
        stats = []
        for step in range(2):
            for i, p in enumerate(params):
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step + i + backend.rank))
            optimizer.step()
            stats.append(optimizer.comm_stats())
        return stats

    w = world_size
    buckets = [514, 1000]  # 1000 floats do not fit beside the others in 0.002 MB
    agreement = (w - 1) * AGREEMENT_BYTES
    rows = [math.ceil(n / (w * ROW_MULTIPLE)) * ROW_MULTIPLE for n in buckets]
    # the second is larger than that, and goes in two pieces if blocks are small enough
    halves = compressor == Sign(block=64) and rows[1] > 64
    first = math.ceil(rows[1] / 2 / 64) * 64
    pieces = [rows[0], first, rows[1] - first] if halves else rows
    for warmup, compressed in on_threads(world_size, run):
        if w == 1:
            assert warmup["step"]["calls"] == compressed["step"]["calls"] == 0
            continue
        assert warmup["step"]["bytes"] == agreement + sum(2 * (w - 1) * 4 * n for n in rows)
        assert compressed["step"]["bytes"] == agreement + sum(2 * (w - 1) * compressor.nbytes(n) for n in pieces)
        assert compressed["step"]["by_collective"]["all_to_all"]["calls"] == len(pieces)
        assert compressed["step"]["by_collective"]["all_gather"]["calls"] == len(pieces) + 2
        assert compressed["fp32_bytes"] == 2 * (w - 1) * math.ceil(4 * sum(sizes) / w)
        assert compressed["ratio"] == compressed["fp32_bytes"] / compressed["step"]["bytes"]
        assert compressed["total"]["bytes"] > warmup["step"]["bytes"] + compressed["step"]["bytes"]  # and construction


def test_the_number_of_collectives_does_not_depend_on_the_number_of_tensors():
    def run(backend, pieces):
        params = [nn.Parameter(torch.zeros(5000 // pieces)) for _ in range(pieces)]
        optimizer = OneBitAdam(params, freeze_step=1, backend=backend)
        for _ in range(2):
            for p in params:
                p.grad = torch.ones_like(p)
            optimizer.step()
        return optimizer.comm_stats()["step"]["calls"]

    assert on_threads(2, lambda b: run(b, 1)) == on_threads(2, lambda b: run(b, 500)) == [4, 4]


def test_stats_tell_the_norm_of_the_residual():
    def run(backend):
        model = Toy()
        optimizer = OneBitAdam(model.parameters(), freeze_step=2, backend=backend)
        train(model, optimizer, range(2), backend.rank, 2)
        before = optimizer.comm_stats()
        assert before["residual_norm"] == 0
        train(model, optimizer, range(2, 6), backend.rank, 2)
        stats = optimizer.comm_stats()
        errors = torch.cat([residuals["worker_error"].flatten() for residuals in optimizer.residuals.values()])
        momenta = torch.cat([t.flatten() for t in state_of(optimizer, "exp_avg")])
        assert stats["residual_norm"] == pytest.approx(errors.norm().item(), rel=1e-5)
        assert stats["residual_norm"] > 0
        assert stats["residual_ratio"] == pytest.approx(errors.norm().item() / momenta.norm().item(), rel=1e-5)

    on_threads(2, run)


def test_learning_with_one_bit_is_about_as_good_as_with_32():
    """The same data for both, 300 steps: momentum SGD by signs must not lose more than 5 % of what Adam gains."""

    def run(backend, freeze_step):
        model = Toy()
        optimizer = OneBitAdam(model.parameters(), lr=3e-3, freeze_step=freeze_step, backend=backend)
        logging.getLogger("commopt").setLevel(logging.ERROR)
        for step in range(300):
            backward(model, step % 8, backend.rank, backend.world_size)
            optimizer.step()
        return sum(model(tokens(s, 0, 1)).item() for s in range(8)) / 8

    first = sum(Toy()(tokens(s, 0, 1)).item() for s in range(8)) / 8
    plain = on_threads(1, lambda b: run(b, 1000))[0]  # the mean over two is that of one with all
    compressed = on_threads(2, lambda b: run(b, 60))[0]
    logging.getLogger("commopt").setLevel(logging.NOTSET)
    assert first - compressed > 0.95 * (first - plain), (first, plain, compressed)


# parameters that come and go ------------------------------------------------------------------------------------------


def test_frozen_parameters_take_no_state_and_no_bandwidth():
    def run(backend):
        base, adapter = nn.Parameter(torch.ones(10_000), requires_grad=False), nn.Parameter(torch.ones(100))
        optimizer = OneBitAdam([base, adapter], freeze_step=1, backend=backend)
        adapter.grad = torch.ones(100) * (1 + backend.rank)
        optimizer.step()
        assert base not in optimizer.state
        return optimizer.comm_stats()["fp32_bytes"]

    assert on_threads(2, run) == [400, 400]


@pytest.mark.parametrize("freeze_step", [3, 100])
def test_a_parameter_that_is_unfrozen_later(freeze_step, caplog):
    """In warm-up it starts to train; in the compressed phase it cannot, and that is said once, with what to do."""

    def run(backend):
        model = Toy()
        model.weight.requires_grad_(False)
        optimizer = OneBitAdam(model.parameters(), lr=1e-2, freeze_step=freeze_step, backend=backend)
        train(model, optimizer, range(5), backend.rank, 2)
        assert torch.equal(model.weight, Toy().weight)
        model.weight.requires_grad_(True)
        train(model, optimizer, range(5, 9), backend.rank, 2)
        return params_of(model), torch.equal(model.weight, Toy().weight)

    (a, stays), (b, _) = on_threads(2, run)
    assert same_bits(a, b)
    assert stays == (freeze_step == 3)
    late = f"1 parameters (a parameter of shape {tuple(Toy().weight.shape)}) have their first gradient after"
    assert caplog.text.count(f"{late} the variance was frozen") == (freeze_step == 3)


def test_each_parameter_that_is_unfrozen_too_late_is_named_when_it_is(caplog):
    def run(backend):
        model = Toy()
        model.weight.requires_grad_(False)
        model.bias.requires_grad_(False)
        optimizer = OneBitAdam(model.named_parameters(), lr=1e-2, freeze_step=3, backend=backend)
        for steps, late in (range(4), model.weight), (range(4, 7), model.bias), (range(7, 9), model.bias):
            train(model, optimizer, steps, backend.rank, 2)
            late.requires_grad_(True)

    on_threads(2, run)
    said = [text for text in caplog.messages if "first gradient after" in text]
    assert ["(weight)" in text for text in said] == [True, False]
    assert ["(bias)" in text for text in said] == [False, True]


@pytest.mark.parametrize("cls", [OneBitAdam, OneBitLamb, ZeroOneAdam])
def test_what_is_unfrozen_late_trains_in_a_group_of_its_own(cls, caplog):
    def run(backend):
        model = Toy()
        model.weight.requires_grad_(False)
        early = {"variance": {"kappa": 2, "stop": 3}} if cls is ZeroOneAdam else {"freeze_step": 3}
        optimizer = cls(model.parameters(), lr=1e-2, backend=backend, **early)
        train(model, optimizer, range(5), backend.rank, 2)
        model.weight.requires_grad_(True)
        group = optimizer.param_groups[0]
        group["params"] = [p for p in group["params"] if p is not model.weight]
        optimizer.add_param_group({"params": [model.weight]})
        train(model, optimizer, range(5, 12), backend.rank, 2)
        assert [group["step"] for group in optimizer.param_groups] == [12, 7]
        return params_of(model), bool((model.weight != Toy().weight).all())

    (a, moved), (b, _) = on_threads(2, run)
    assert same_bits(a, b)
    assert moved
    assert "first gradient after" not in caplog.text


def test_ranks_that_unfreeze_different_parameters_get_an_error_instead_of_a_hang():
    def run(backend):
        model = Toy()
        model.weight.requires_grad_(False)
        optimizer = OneBitAdam(model.parameters(), backend=backend)
        model.weight.requires_grad_(backend.rank == 1)
        backward(model, 0, backend.rank, 3)
        with pytest.raises(RuntimeError, match=r"numbers of trainable parameters: 8 on rank 1, 7 on rank 0"):
            optimizer.step()

    on_threads(3, run)


# mixed precision ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("freeze_step", [3, 100])
@pytest.mark.parametrize("unscale", [False, True])
def test_a_grad_scaler_changes_nothing_and_cannot_make_one_rank_skip_alone(freeze_step, unscale):
    """Scales are powers of two, so scaled and plain runs agree; the overflow on rank 1 is skipped by both ranks."""

    def run(backend, scaled):
        model = Toy()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
        optimizer = OneBitAdam(model.parameters(), lr=1e-2, freeze_step=freeze_step, max_grad_norm=0.5, backend=backend)
        for step in range(8):
            model.zero_grad()
            loss = model(tokens(step, backend.rank, 2))
            scaler.scale(loss * (math.inf if step == 5 and backend.rank == 1 else 1)).backward()
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert optimizer.skipped_steps == 1
        return params_of(model)

    scaled, plain = (on_threads(2, lambda backend, s=s: run(backend, s)) for s in (True, False))
    assert same_bits(scaled[0], scaled[1])
    for a, b in zip(scaled[0], plain[0]):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("freeze_step", [2, 100])
def test_once_a_group_is_compressed_a_grad_scaler_lets_ddp_average_none(freeze_step):
    """Where some gradients are each rank's own, an overflow on one rank may be none on the others."""

    def run(backend):
        model = Toy()
        params = [p for p in model.parameters() if p.requires_grad]
        groups = [{"params": params[:1], "freeze_step": freeze_step}, {"params": params[1:], "freeze_step": 100}]
        optimizer = OneBitAdam(groups, backend=backend)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        for step in range(4):
            model.zero_grad()
            scaler.scale(model(tokens(step, backend.rank, 2))).backward()
            scaler.step(optimizer)
            scaler.update()
        return [optimizer.lets_average(group) for group in optimizer.param_groups]

    assert on_threads(2, run) == [[freeze_step == 100] * 2] * 2


def test_maximize_goes_the_other_way_in_both_phases():
    def run(backend, maximize):
        model = Toy(torch.float64)
        for p in model.parameters():
            p.data.zero_()
        optimizer = OneBitAdam([model.weight, model.bias], maximize=maximize, freeze_step=3, backend=backend)
        for step in range(8):
            for i, p in enumerate((model.weight, model.bias)):
                g = torch.Generator().manual_seed(step + 10 * i + 100 * backend.rank)
                p.grad = torch.randn(p.shape, generator=g, dtype=torch.float64)
            optimizer.step()
        return params_of(model)

    up, down = on_threads(2, lambda b: run(b, True)), on_threads(2, lambda b: run(b, False))
    assert all(torch.equal(a, -b) for a, b in zip(up[0], down[0]))
    assert up[0][2].abs().sum() > 0


@pytest.mark.parametrize("freeze_step", [2, 100])
def test_a_gradient_that_one_rank_lacks_is_a_gradient_of_zeros(freeze_step):
    def run(backend, lacks):
        model = Toy()
        optimizer = OneBitAdam(model.parameters(), lr=1e-2, freeze_step=freeze_step, backend=backend)
        for step in range(7):
            backward(model, step, backend.rank, 2)
            if backend.rank == 1 and step > 3:
                model.weight.grad = None if lacks else torch.zeros_like(model.weight)
            optimizer.step()
        return params_of(model)

    lacking, zeros = on_threads(2, lambda b: run(b, True)), on_threads(2, lambda b: run(b, False))
    assert same_bits(lacking[0], zeros[0])


def half_then_whole(backend, prepare) -> Tensor:
    """Steps with gradients on the first half of a parameter, ``prepare``, then what a step on all of it moves."""
    p = nn.Parameter(torch.zeros(32))
    optimizer = OneBitAdam([p], lr=1e-2, freeze_step=2, backend=backend)

    def step(active: int) -> None:
        p.grad = torch.ones(32) * (1 + backend.rank)
        p.grad[active:] = 0
        optimizer.step()

    for _ in range(4):
        step(16)
    assert not p[16:].any()
    prepare(p, optimizer, lambda: step(32))
    assert optimizer.phase == "compressed"
    before = p.detach().clone()
    step(32)
    return p.detach() - before


def test_a_second_warm_up_wakes_what_was_masked():
    def warm_up_again(p, optimizer, step):
        optimizer.param_groups[0]["freeze_step"] = 6
        step()
        step()

    for moved in on_threads(2, lambda backend: half_then_whole(backend, warm_up_again)):
        assert moved.all()


def test_the_mask_follows_a_variance_that_is_changed_in_place():
    def change(p, optimizer, step):
        optimizer.state[p]["exp_avg_sq"].fill_(1.0)

    for moved in on_threads(2, lambda backend: half_then_whole(backend, change)):
        assert moved.all()


@pytest.mark.parametrize("cls", [OneBitAdam, OneBitLamb])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_run_whose_variance_was_zeroed_in_place_is_the_one_that_is_resumed_then(cls, overlap):
    """As of rows that start anew. 1-bit LAMB went on to divide their momentum by eps."""

    def run(backend, resumed):
        params = some_params([(40,), (24,)])
        settings = {"freeze_step": 3, "compressor": Sign(16), "thaw": "never", "overlap": overlap, "backend": backend}
        optimizer = cls(params, lr=0.01, **settings)
        for step in range(9):
            if step == 5:
                optimizer.state[params[0]]["exp_avg_sq"][20:24].zero_()
            if step == 5 and resumed:
                state, params = optimizer.state_dict(), [nn.Parameter(p.detach().clone()) for p in params]
                optimizer = cls(params, lr=0.01, **settings)
                optimizer.load_state_dict(state)
            generator = torch.Generator().manual_seed(10 * step + backend.rank)
            give(params, [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in params])
            optimizer.step()
        return params_of(nn.ParameterList(params))

    for kept, resumed in zip(*(on_threads(2, lambda b, r=r: run(b, r)) for r in (False, True))):
        assert same_bits(kept, resumed)


def test_the_mask_follows_a_state_that_is_loaded():
    def load_another(p, optimizer, step):
        state = optimizer.state_dict()
        state["state"][0]["exp_avg_sq"].fill_(1.0)
        optimizer.load_state_dict(state)

    for moved in on_threads(2, lambda backend: half_then_whole(backend, load_another)):
        assert moved.all()
