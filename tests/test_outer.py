"""Optimizers with local steps: their laws, against an oracle on plain lists and against torch.optim."""

from __future__ import annotations

import math

import pytest
import torch
from oracle_outer import OuterOracle
from torch import Tensor, nn
from worlds import Toy, all_tensors, backward, on_threads, params_of, same_bits, tensors_in, train

from commopt import DiLoCo, Gossip, Guard, LocalSGD, NoLoCo, OneBitAdam, SignMomentum, SlowMo, SparseLoCo, Streaming
from commopt.agreement.calls import FIELDS
from commopt.comm import CONFIRMATION_BYTES, CountingBackend, LocalBackend, all_reduce_bytes
from commopt.compress import Identity, Int8, Sign
from commopt.optim import NotFinite
from commopt.outer import RandomSign, RandomSignOrZero
from commopt.outer.rounds import ROUND_BYTES
from commopt.outer.signs import uniform

METHODS = {"average": LocalSGD, "slowmo": SlowMo, "diloco": DiLoCo, "sign": SignMomentum}
OUTER = {
    "average": ({}, {}),
    "slowmo": ({"lr": 0.9, "momentum": 0.6}, {"outer_lr": 0.9, "outer_momentum": 0.6}),
    "diloco": ({"lr": 0.7, "momentum": 0.9}, {"outer_lr": 0.7, "outer_momentum": 0.9}),
    "sign": (
        {"lr": 0.8, "b1": 0.7, "b2": 0.9, "wd": 0.2},
        {"outer_lr": 0.8, "outer_betas": (0.7, 0.9), "outer_weight_decay": 0.2},
    ),
}
EVERY = pytest.mark.parametrize("cls", [*METHODS.values(), SparseLoCo], ids=[*METHODS, "sparse"])
IN_TWO_WAYS = pytest.mark.parametrize("cls", METHODS.values(), ids=METHODS)
"""Those that send by an all-reduce; or compressed, with residuals of both ways."""
SIZES = [(3, 7), (), (40,), (0, 2), (2, 5)]
ORDER = list(reversed(range(len(SIZES))))  # how a bucket packs


def flat(tensors: list[Tensor]) -> list[float]:
    return [v for t in tensors for v in t.detach().double().flatten().tolist()]


def some_params() -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(s, generator=g, dtype=torch.float64)) for s in SIZES]


def some_grad(step: int, rank: int, i: int) -> Tensor:
    g = torch.Generator().manual_seed(100 * step + 10 * rank + i)
    out = torch.randn(SIZES[i], generator=g, dtype=torch.float64) + 0.3
    if i == 2:
        out[5:9] = 0
    return out


def base_of(kind: str) -> tuple[type[torch.optim.Optimizer], dict]:
    if kind == "sgd":
        return torch.optim.SGD, {"momentum": 0.9}
    return torch.optim.AdamW, {"betas": (0.9, 0.99), "weight_decay": 0.1}


def lr_of(step: int) -> float:
    return 0.0 if step in (6, 7, 8) else 0.02 / (1 + step % 5)  # a whole round of 3 at lr = 0


STATE = {"momentum_buffer": "m", "exp_avg": "m", "exp_avg_sq": "v"}


def compare_with_oracle(world_size, method, base, period, block=0, sign=None, rule=None, atol=1e-12, states=None):
    ours, arguments = OUTER[method]
    params = some_params()
    means = {STATE[name]: every for name, every in (states or {}).items()}
    oracle = OuterOracle(method, flat([params[i] for i in ORDER]), world_size, period, base, ours, block, sign, means)
    expected = []
    for step in range(14):
        oracle.step([flat([some_grad(step, r, i) for i in ORDER]) for r in range(world_size)], lr_of(step))
        expected.append([list(x) for x in oracle.x])
    arguments = arguments | ({"compressor": Sign(block=block)} if block else {}) | ({"sign": rule} if rule else {})
    arguments = arguments | {"state_period": states}

    def run(backend):
        mine = some_params()
        cls, extra = base_of(base)
        optimizer = METHODS[method](mine, cls, lr=1.0, period=period, backend=backend, **extra, **arguments)
        for step in range(14):
            optimizer.param_groups[0]["lr"] = lr_of(step)
            for i, p in enumerate(mine):
                p.grad = some_grad(step, backend.rank, i)
            optimizer.step()
            theirs = torch.tensor(expected[step][backend.rank], dtype=torch.float64)
            now = torch.tensor(flat([mine[i] for i in ORDER]), dtype=torch.float64)
            torch.testing.assert_close(now, theirs, rtol=1e-12, atol=atol)
        return optimizer.comm_stats()["rounds"]

    assert on_threads(world_size, run) == [14 // period] * world_size


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("base", "period"), [("sgd", 3), ("adamw", 3), ("sgd", 1), ("adamw", 5)])
def test_every_step_equals_the_papers_loop_on_plain_lists(world_size, method, base, period):
    """lr changes from step to step, and is 0 for a round, and later in every 5th of them."""
    compare_with_oracle(world_size, method, base, period)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("method", METHODS)
def test_compressed_ways_equal_the_loop_with_residuals(world_size, method):
    compare_with_oracle(world_size, method, "adamw", 3, block=16)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("base", "period", "states"),
    [
        ("sgd", 3, {"momentum_buffer": 2}),
        ("adamw", 1, {"exp_avg": 3, "exp_avg_sq": 6}),
        ("adamw", 3, {"exp_avg_sq": 1}),
    ],
)
def test_state_of_the_bases_is_averaged_at_its_own_rounds(world_size, method, base, period, states):
    compare_with_oracle(world_size, method, base, period, states=states)


# randomised signs -----------------------------------------------------------------------------------------------------


def splitmix(seed: int, number: int, position: int) -> float:
    """The draw at a position, on Python's own integers."""
    mask, step = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(x):
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return x ^ (x >> 31)

    key = mix(mix((seed + step) & mask) ^ (number * step & mask))
    return (mix((key + (position + 1) * step) & mask) >> 11) * 2.0**-53


@pytest.mark.parametrize("seed", [0, 7, -3, 2**63])
def test_draws_are_functions_of_their_place(seed):
    draws = uniform(seed, 5, 1000, 50)
    assert draws.tolist() == [splitmix(seed, 5, 1000 + i) for i in range(50)]
    assert torch.equal(uniform(seed, 5, 1010, 20), draws[10:30])
    assert not torch.equal(uniform(seed, 6, 1000, 50), draws)
    assert not torch.equal(uniform(seed + 1, 5, 1000, 50), draws)
    many = uniform(seed, 1, 0, 100_000)
    assert ((many >= 0) & (many < 1)).all()
    counts = torch.histc(many, 100, 0, 1)  # chi-square of 99 degrees of freedom: 99 +- 14
    assert ((counts - 1000) ** 2 / 1000).sum() < 99 + 5 * 14.1


@pytest.mark.parametrize("rule", [RandomSign(seed=5), RandomSignOrZero(seed=5), RandomSign(bound=4.0)])
def test_a_random_sign_has_the_mean_of_the_paper(rule):
    """The mean over 4000 rounds is u / B, within 5 standard deviations of a coin."""
    u = torch.tensor([1.0, -0.5, 0.0, 0.25, -2.0, 0.01], dtype=torch.float64)
    draws = torch.stack([rule.of(u, number, 17) for number in range(4000)])
    assert set(draws.unique().tolist()) <= {-1.0, 0.0, 1.0}
    assert (draws[:, 2] == 0).all()
    bound = rule.bound or 2.0
    assert ((draws.mean(0) - u / bound).abs() < 5 / math.sqrt(4000)).all()
    if not isinstance(rule, RandomSignOrZero):
        assert (draws[:, [0, 1, 3, 4, 5]] != 0).all()
    elif rule.bound is None:
        assert (draws[:, 4] == -1).all()


def test_a_random_sign_of_nothing_is_nothing():
    for rule in (RandomSign(), RandomSignOrZero()):
        assert not rule.of(torch.zeros(5), 0, 0).any()
        assert rule.of(torch.zeros(0, 3), 0, 0).shape == (0, 3)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("kind", [RandomSign, RandomSignOrZero])
def test_random_signs_in_training_equal_the_loop_and_leave_torchs_generator_alone(world_size, kind):
    starts, at = [], 0
    for shape in SIZES:
        starts.append(at)
        at += math.prod(shape)

    def sign(u, number):
        out, done = [], 0
        for i in ORDER:
            part = u[done : done + math.prod(SIZES[i])]
            done += len(part)
            bound = max((abs(v) for v in part), default=0.0)
            for j, v in enumerate(part):
                draw, plain = splitmix(11, number, starts[i] + j), (v > 0) - (v < 0)
                if v == 0:
                    out.append(0)
                elif kind is RandomSign:
                    out.append(1 if draw < 0.5 + v / bound / 2 else -1)
                else:
                    out.append(plain if draw < abs(v) / bound else 0)
        return out

    state = torch.get_rng_state()
    compare_with_oracle(world_size, "sign", "sgd", 3, sign=sign, rule=kind(seed=11))
    assert torch.equal(state, torch.get_rng_state())


# relations ------------------------------------------------------------------------------------------------------------


def test_sign_momentum_on_one_rank_with_sgd_and_period_1_is_lion():
    ours, theirs = Toy(torch.float64), Toy(torch.float64)
    optimizer = SignMomentum(
        ours.parameters(), torch.optim.SGD, lr=3e-3, period=1, outer_betas=(0.9, 0.99), outer_weight_decay=0.5
    )
    momenta = {n: torch.zeros_like(p) for n, p in theirs.named_parameters()}
    for step in range(200):
        train(ours, optimizer, range(step, step + 1))
        backward(theirs, step, 0, 1)
        for name, p in theirs.named_parameters():
            if not p.requires_grad:
                continue
            g = torch.zeros_like(p) if p.grad is None else p.grad
            p.data.mul_(1 - 3e-3 * 0.5)
            p.data.sub_((momenta[name] * 0.9 + g * (1 - 0.9)).sign(), alpha=3e-3)
            momenta[name].mul_(0.99).add_(g, alpha=1 - 0.99)
        # the ways (x - (x - lr g)) / lr are g but for rounding, so signs are those of Lion, and x is to the bit
        assert same_bits(params_of(ours), params_of(theirs))


def test_every_element_moves_by_the_outer_learning_rate_or_not_at_all():
    model = Toy(torch.float64)
    optimizer = SignMomentum(model.parameters(), lr=1e-2, period=2, outer_lr=0.5, outer_weight_decay=0.3)
    for step in range(0, 8, 2):
        before = [p.detach().clone() for p in model.parameters() if p.requires_grad]
        train(model, optimizer, range(step, step + 2))
        for a, p in zip(before, (p.detach() for p in model.parameters() if p.requires_grad)):
            moved = ((p - a * (1 - 0.5 * 1e-2 * 0.3)).abs() / (0.5 * 1e-2)).flatten()
            assert ((moved - 1).abs().minimum(moved) < 1e-9).all()


@pytest.mark.parametrize("betas", [(0.9, 0.98), (0.9, 0.9)])
def test_a_sign_step_is_in_units_of_the_learning_rate(betas):
    """Twice the rate doubles both terms, and m is in units of base steps; with equal betas it is the sign of the new m,
    a signed SlowMo."""
    start, moved = params_of(Toy(torch.float64)), {}
    for lr in (1e-3, 2e-3):
        model = Toy(torch.float64)
        settings = {"lr": lr, "period": 1, "outer_lr": 0.5, "outer_betas": betas, "outer_weight_decay": 0.2}
        optimizer = SignMomentum(model.parameters(), torch.optim.SGD, **settings)
        train(model, optimizer, range(1))
        moved[lr] = [p - x for p, x in zip(params_of(model), start)]
        m = {name: optimizer.state[p].get("outer_momentum") for name, p in model.named_parameters()}
        for (name, p), x in zip(model.named_parameters(), start):
            if p.requires_grad:
                way = 0.5 * lr * (m[name].sign() + 0.2 * x)  # the first step: u and m have the sign of D
                torch.testing.assert_close(p.detach(), x - way, rtol=0, atol=1e-15)
                if p.grad is not None:
                    torch.testing.assert_close(m[name], (1 - betas[1]) * p.grad, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(moved[2e-3], [2 * d for d in moved[1e-3]], rtol=0, atol=1e-15)


def test_with_equal_betas_it_is_the_sign_of_the_new_momentum():
    model = Toy(torch.float64)
    optimizer = SignMomentum(model.parameters(), lr=1e-2, period=3, outer_betas=(0.9, 0.9), outer_weight_decay=0.0)
    for step in range(0, 9, 3):
        before = {p: p.detach().clone() for p in model.parameters() if p.requires_grad}
        train(model, optimizer, range(step, step + 3))
        for p, x in before.items():
            expected = x - 1e-2 * optimizer.state[p]["outer_momentum"].sign()
            torch.testing.assert_close(p.detach(), expected, rtol=0, atol=1e-15)


def test_without_gradients_a_sign_step_only_decays():
    model = Toy(torch.float64)
    base = {"lr": 0.1, "weight_decay": 0.0}
    optimizer = SignMomentum(model.parameters(), period=2, outer_lr=0.5, outer_weight_decay=0.2, **base)
    before = params_of(model)
    for _ in range(4):
        optimizer.step()
    for p, x in zip(model.parameters(), before):
        factor = (1 - 0.5 * 0.1 * 0.2) ** 2 if p.requires_grad else 1.0
        torch.testing.assert_close(p.detach(), x * factor, rtol=1e-15, atol=0)


@EVERY
def test_a_synchronisation_leaves_the_bases_state_alone(cls):
    def run(backend):
        model = Toy()
        optimizer = cls(model.parameters(), lr=1e-2, period=5, backend=backend)
        train(model, optimizer, range(3), backend.rank, 2)
        before = [t.clone() for t in tensors_in(optimizer.base.state_dict())]
        optimizer.synchronize()
        after = tensors_in(optimizer.base.state_dict())
        assert same_bits(before, after)
        return after

    a, b = on_threads(2, run)
    assert not same_bits(a, b)


def test_diloco_is_torchs_nesterov_on_the_mean_way():
    def run(backend):
        model, reference = Toy(), Toy()
        optimizer = DiLoCo(model.parameters(), lr=1e-2, period=4, backend=backend)
        outer = torch.optim.SGD(reference.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        local = Toy()
        base = torch.optim.AdamW(local.parameters(), lr=1e-2)
        for step in range(16):
            train(model, optimizer, range(step, step + 1), backend.rank, 2)
            train(local, base, range(step, step + 1), backend.rank, 2)
            if step % 4 == 3:
                for p, q in zip(reference.parameters(), local.parameters()):
                    p.grad = p.detach() - q.detach()
                    backend.all_reduce(p.grad).wait()
                outer.step()
                local.load_state_dict(reference.state_dict())
                assert same_bits(params_of(model), params_of(reference))

    on_threads(2, run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_averaging_on_one_rank_is_the_base_to_the_bit(dtype):
    ours, theirs = Toy(dtype), Toy(dtype)
    optimizer = LocalSGD(ours.parameters(), lr=1e-2, period=3, compressor=Sign())
    train(ours, optimizer, range(10))
    train(theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-2), range(10))
    assert same_bits(params_of(ours), params_of(theirs))
    assert optimizer.phase == "plain"
    assert optimizer.comm_stats()["total"]["bytes"] == 0


def test_slowmo_without_momentum_and_diloco_without_outer_are_averaging():
    def run(backend):
        out = []
        for cls, outer in [
            (LocalSGD, {}),
            (SlowMo, {"outer_momentum": 0.0}),
            (DiLoCo, {"outer_momentum": 0.0, "outer_lr": 1.0}),
        ]:
            model = Toy(torch.float64)
            optimizer = cls(model.parameters(), lr=1e-2, period=3, backend=backend, **outer)
            train(model, optimizer, range(9), backend.rank, 2)
            out.append(params_of(model))
        return out

    for first, *others in on_threads(2, run):
        for other in others:
            torch.testing.assert_close(other, first, rtol=1e-12, atol=1e-14)


@EVERY
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_compressor_that_loses_nothing_changes_nothing(cls, world_size):
    def run(backend):
        out = []
        for compressor in (None, Identity()):
            model = Toy(torch.float64)
            optimizer = cls(model.parameters(), lr=1e-2, period=3, compressor=compressor, backend=backend)
            train(model, optimizer, range(7), backend.rank, world_size)
            out.append(params_of(model))
        torch.testing.assert_close(out[0], out[1], rtol=1e-11, atol=1e-12)

    on_threads(world_size, run)


# replicas and local steps ---------------------------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compressor", [None, Sign(block=64)])
def test_replicas_are_bit_identical_after_every_synchronisation_and_only_then(cls, world_size, dtype, compressor):
    def run(backend):
        model, history = Toy(dtype), []
        optimizer = cls(model.parameters(), lr=1e-2, period=3, compressor=compressor, backend=backend, bucket_mb=2e-4)
        for step in range(9):
            train(model, optimizer, range(step, step + 1), backend.rank, world_size)
            history.append(params_of(model))
        for bucket in optimizer.buckets:
            assert not any(buffer[bucket.numel :].any() for buffer in bucket.buffers.values())
        state = [t for entry in optimizer.state_dict()["state"].values() for t in entry.values()]
        assert all(t.isfinite().all() for t in history[-1] + state)
        own = [t for entry in optimizer.base.state_dict()["state"].values() for t in entry.values()]
        return history, state, own

    (rank_0, state_0, own_0), *others = on_threads(world_size, run)
    for history, state, own in others:
        assert [same_bits(a, b) for a, b in zip(rank_0, history)] == [False, False, True] * 3
        assert same_bits(state_0, state)
        assert not same_bits(own_0, own)


@IN_TWO_WAYS
def test_bytes_are_those_of_the_ledger(cls):
    """Nothing in local steps; at a synchronisation one all-reduce of 32 bits a parameter and a row a rank."""
    world_size = 3

    def run(backend):
        model = Toy()
        guard = Guard(check_every=None)
        optimizer = cls(model.parameters(), lr=1e-2, period=4, bucket_mb=2e-4, guard=guard, backend=backend)
        total = optimizer.comm_stats()["total"]["bytes"]
        for step in range(8):
            train(model, optimizer, range(step, step + 1), backend.rank, world_size)
            sent = optimizer.comm_stats()["step"]
            if step % 4 < 3:
                assert sent == {"bytes": 0, "calls": 0, "by_collective": {}}
                continue
            ways = sum(all_reduce_bytes(4 * bucket.padded, world_size) for bucket in optimizer.buckets)
            agreement = (world_size - 1) * ROUND_BYTES
            assert sent["by_collective"] == {
                "all_gather": {"bytes": agreement, "calls": 2},
                "all_reduce": {"bytes": ways, "calls": len(optimizer.buckets)},
            }
            total += ways + agreement
        assert optimizer.comm_stats()["total"]["bytes"] == total
        assert len(optimizer.buckets) > 1

    on_threads(world_size, run)


def test_bytes_of_compressed_ways_are_those_of_the_ledger():
    def run(backend):
        model, compressor = Toy(), Sign(block=64)
        guard = Guard(check_every=None)
        optimizer = DiLoCo(model.parameters(), lr=1e-2, period=2, compressor=compressor, guard=guard, backend=backend)
        train(model, optimizer, range(2), backend.rank, 2)
        (bucket,) = optimizer.buckets
        row = compressor.nbytes(bucket.padded // 2)
        assert optimizer.comm_stats()["step"]["by_collective"] == {
            "all_gather": {"bytes": ROUND_BYTES + row, "calls": 3},
            "all_to_all": {"bytes": row, "calls": 1},
        }
        assert optimizer.comm_stats()["ratio"] > 5
        stats = optimizer.comm_stats()
        assert stats["residual_norm"] > 0
        # from the anchor 0 on, where the momentum is D, 0.7 (D + 0.9 D) was taken
        moved = sum(
            float((p.detach() - q.detach()).square().sum()) for p, q in zip(model.parameters(), Toy().parameters())
        )
        assert stats["pseudo_gradient_norm"] == pytest.approx(moved**0.5 / (0.7 * 1.9), rel=1e-5)
        assert stats["residual_ratio"] == stats["residual_norm"] / stats["pseudo_gradient_norm"]

    on_threads(2, run)


def test_the_norm_of_what_was_compressed_is_that_of_all_buckets():
    def run(backend):
        norms = []
        for bucket_mb in (25, 2e-4):
            model = Toy()
            settings = {"compressor": Int8(block=64), "bucket_mb": bucket_mb, "backend": backend}
            optimizer = DiLoCo(model.parameters(), lr=1e-2, period=2, **settings)
            train(model, optimizer, range(2), backend.rank, 2)
            norms.append(optimizer.comm_stats()["pseudo_gradient_norm"])
        assert len(optimizer.buckets) > 1
        assert norms[1] == pytest.approx(norms[0], rel=1e-2)

    on_threads(2, run)


@IN_TWO_WAYS
@pytest.mark.parametrize("compressor", [None, Sign()])
def test_memory_is_what_the_docstring_says(cls, compressor):
    """In units of the parameters (a large one, so that padding is nothing)."""

    def run(backend):
        p = nn.Parameter(torch.ones(1 << 16))
        optimizer = cls([p], torch.optim.SGD, lr=1e-2, period=1, compressor=compressor, backend=backend)
        p.grad = torch.ones_like(p)
        optimizer.step()
        held = {}
        for bucket in optimizer.buckets:
            parts = list(bucket.buffers.values())
            if bucket.feedback is not None:
                feedback = bucket.feedback
                parts += [feedback.worker, feedback.server, feedback.next_worker, feedback.next_server]
            held.update({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in parts})
        return sum(held.values()) / p.nbytes

    stated = (1 if cls is LocalSGD else 2) + (0 if compressor is None else 2 + 2 / 4)
    assert on_threads(4, run) == [stated] * 4
    assert "2 + 2/W more" in cls.__doc__
    assert f"per parameter: {1 if cls is LocalSGD else 2} (anchor" in cls.__doc__


@EVERY
@pytest.mark.parametrize("compressor", [None, Sign(block=16)])
def test_nodes_of_several_ranks(cls, compressor):
    """On nodes of 2 the ranks stay replicas, and without compression the result is that without nodes."""

    def run(backend):
        out = []
        for grouped in (backend.nodes(2), backend):
            model = Toy(torch.float64)
            optimizer = cls(model.parameters(), lr=1e-2, period=3, compressor=compressor, backend=grouped)
            train(model, optimizer, range(6), backend.rank, 4)
            with optimizer.averaged():
                out.append(params_of(model))
        if compressor is None:
            torch.testing.assert_close(out[0], out[1], rtol=1e-12, atol=1e-13)
        return out[0]

    results = on_threads(4, run)
    assert all(same_bits(results[0], other) for other in results)


# the base -------------------------------------------------------------------------------------------------------------


def test_schedules_act_on_the_base():
    model = Toy()
    optimizer = SlowMo(model.parameters(), torch.optim.SGD, lr=1.0, period=2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(4):
        assert optimizer.base.param_groups[0]["lr"] == 1 / (1 + step)
        train(model, optimizer, range(step, step + 1))
        schedule.step()
    assert optimizer.param_groups is optimizer.base.param_groups


@pytest.mark.parametrize("period", [1, 3])
@EVERY
def test_a_learning_rate_of_0_gives_no_nan_and_moves_nothing(cls, period):
    model = Toy()
    optimizer = cls(model.parameters(), lr=0.0, period=period)
    before = params_of(model)
    train(model, optimizer, range(6))
    for name in optimizer.state[model.weight]:
        assert optimizer.state[model.weight][name].isfinite().all()
    assert same_bits(before, params_of(model))
    optimizer.param_groups[0]["lr"] = 1e-2
    train(model, optimizer, range(6))
    assert all(p.isfinite().all() for p in model.parameters())
    assert not same_bits(before, params_of(model))


@pytest.mark.parametrize("cls", [SlowMo, SignMomentum])
def test_where_the_learning_rate_is_0_what_the_base_does_all_the_same_is_averaged(cls):
    class Base(torch.optim.SGD):
        def step(self, closure=None):
            with torch.no_grad():
                for p in self.param_groups[0]["params"]:
                    p.sub_(p.grad)

    def run(backend):
        p = nn.Parameter(torch.zeros(3))
        optimizer = cls([p], Base, lr=0.0, period=2, backend=backend)
        for _ in range(2):
            p.grad = torch.full((3,), 1.0 + 2 * backend.rank)
            optimizer.step()
        assert not optimizer.state[p]["outer_momentum"].any()
        return p.tolist()

    assert on_threads(2, run) == [[-4.0] * 3] * 2


def test_an_instance_and_a_class_with_arguments_are_the_same():
    def run(backend):
        a, b, c = Toy(), Toy(), Toy()
        first = DiLoCo(torch.optim.AdamW(a.parameters(), lr=1e-2, weight_decay=0.1), period=2, backend=backend)
        second = DiLoCo(b.parameters(), torch.optim.AdamW, lr=1e-2, weight_decay=0.1, period=2, backend=backend)
        third = DiLoCo(c.parameters(), lr=1e-2, weight_decay=0.1, period=2, backend=backend)
        for model, optimizer in ((a, first), (b, second), (c, third)):
            train(model, optimizer, range(5), backend.rank, 2)
        assert same_bits(params_of(a), params_of(b))
        assert same_bits(params_of(a), params_of(c))

    on_threads(2, run)


def test_an_optimizer_of_ours_as_the_base_stays_on_its_rank():
    def run(backend):
        model, same = Toy(), Toy()
        optimizer = LocalSGD(model.parameters(), OneBitAdam, lr=1e-2, period=4, backend=backend)
        assert optimizer.base.topology.world_size == 1
        adam = LocalSGD(same.parameters(), torch.optim.Adam, lr=1e-2, period=4, backend=backend)
        train(model, optimizer, range(4), backend.rank, 2)
        train(same, adam, range(4), backend.rank, 2)
        assert same_bits(params_of(model), params_of(same))
        return params_of(model)

    a, b = on_threads(2, run)
    assert same_bits(a, b)


@EVERY
def test_a_model_loaded_after_the_optimizer_was_made_is_where_the_round_begins(cls):
    """And one that is loaded between two rounds, which keeps the outer momentum."""

    def run(backend):
        early, late = Toy(seed=5), Toy()
        settings = {"lr": 1e-2, "period": 3, "backend": backend}
        reference, optimizer = cls(early.parameters(), **settings), cls(late.parameters(), **settings)
        late.load_state_dict(Toy(seed=5).state_dict())
        for model, mine in ((early, reference), (late, optimizer)):
            train(model, mine, range(4), backend.rank, 2)
            mine.synchronize()
        assert same_bits(params_of(early), params_of(late))
        for model, mine in ((early, reference), (late, optimizer)):
            model.load_state_dict(Toy(seed=6).state_dict())
            train(model, mine, range(4, 7), backend.rank, 2)
        assert same_bits(params_of(early), params_of(late))
        far = [(p - q).abs().max() for p, q in zip(params_of(late), params_of(Toy(seed=6))) if p.numel()]
        assert max(far) < 0.1
        return params_of(late)

    a, b = on_threads(2, run)
    assert same_bits(a, b)


@EVERY
def test_models_that_were_changed_differently_on_each_rank_become_one_again(cls, caplog):
    def run(backend):
        model = Toy()
        optimizer = cls(model.parameters(), lr=1e-2, period=2, backend=backend)
        train(model, optimizer, range(2), backend.rank, 2)
        if backend.rank == 1:
            model.weight.data += 0.5
        train(model, optimizer, range(2, 4), backend.rank, 2)
        assert not optimizer.replicas_differ
        assert "broadcast" in optimizer.comm_stats()["step"]["by_collective"]
        train(model, optimizer, range(4, 6), backend.rank, 2)
        assert "broadcast" not in optimizer.comm_stats()["step"]["by_collective"]
        return params_of(model), tensors_in({**optimizer.state_dict(), "residuals": {"state": {}}})

    (a, state_a), (b, state_b) = on_threads(2, run)
    assert same_bits(a, b)
    assert same_bits(state_a, state_b)
    assert caplog.text.count("parameters were changed between two rounds, to values that differ between ranks") == 1


@pytest.mark.parametrize("cls", [*METHODS.values(), SparseLoCo, NoLoCo, Gossip])
@pytest.mark.parametrize("broken", [[0], [0, 1]], ids=str)
def test_a_round_that_began_from_nan_counts_from_where_the_last_one_ended(cls, broken):
    """Once the parameters are right again, it is as if nothing had been."""

    def run(backend, breaks):
        model = Toy()
        optimizer = cls(model.parameters(), lr=1e-2, period=2, backend=backend)
        train(model, optimizer, range(2), backend.rank, 2)
        kept = model.weight.detach().clone()
        if breaks and backend.rank in broken:
            model.weight.data[0, 0] = math.nan
        optimizer.step()  # without gradients
        model.weight.data.copy_(kept)
        train(model, optimizer, range(3, 6), backend.rank, 2)
        return params_of(model)

    for broke, did_not in zip(on_threads(2, lambda b: run(b, True)), on_threads(2, lambda b: run(b, False))):
        assert same_bits(broke, did_not)


@EVERY
def test_a_round_that_began_far_off_on_all_ranks_ends_the_run(cls):
    def run(backend):
        model = Toy()
        optimizer = cls(model.parameters(), lr=1e-2, period=2, backend=backend)
        train(model, optimizer, range(2), backend.rank, 2)
        kept = model.weight.detach().clone()
        model.weight.data.fill_(1e18)
        optimizer.step()  # without gradients
        model.weight.data.copy_(kept)
        with pytest.raises(NotFinite, match="parameters that a round begins from are finite on no rank"):
            train(model, optimizer, range(3, 4), backend.rank, 2)

    on_threads(2, run)


def test_clipping_is_each_ranks_own():
    ours, theirs = Toy(), Toy()
    optimizer = LocalSGD(ours.parameters(), torch.optim.SGD, lr=0.5, period=2, max_grad_norm=0.05)
    reference = torch.optim.SGD(theirs.parameters(), lr=0.5)
    for step in range(4):
        train(ours, optimizer, range(step, step + 1))
        backward(theirs, step, 0, 1)
        assert nn.utils.clip_grad_norm_(theirs.parameters(), 0.05) > 0.05
        reference.step()
    torch.testing.assert_close(params_of(ours), params_of(theirs), rtol=1e-6, atol=1e-7)


def test_bfloat16_parameters_have_a_master_copy():
    """Outer steps too small for bfloat16 add up in the anchor."""
    p = nn.Parameter(torch.full((8,), 256.0, dtype=torch.bfloat16))
    optimizer = DiLoCo([p], torch.optim.SGD, lr=1.0, period=1, outer_lr=0.1, outer_momentum=0.0)
    for _ in range(20):
        p.grad = torch.full_like(p, 2.0)  # x - x_i = 2, so that the anchor moves by 0.2; bfloat16 has steps of 1 to 2
        optimizer.step()
    # a way is 2 to the bit, wherever the anchor lies between two bfloat16
    torch.testing.assert_close(optimizer.state[p]["anchor"], torch.full((8,), 252.0), rtol=0, atol=1e-4)
    assert torch.equal(p.detach().float(), optimizer.state[p]["anchor"].bfloat16().float())


# inf and NaN ----------------------------------------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_skipped_by_its_rank_and_the_round_goes_on(cls, bad, caplog):
    def run(backend):
        model = Toy()
        optimizer = cls(model.parameters(), lr=1e-2, period=3, backend=backend)
        for step in range(6):
            backward(model, step, backend.rank, 2)
            before, moments = params_of(model), tensors_in(optimizer.base.state_dict())
            moments = [t.clone() for t in moments]
            if backend.rank == 1 and step == 1:
                model.weight.grad[0, 0] = bad
            optimizer.step()
            if backend.rank == 1 and step == 1:
                assert same_bits(before, params_of(model))
                assert same_bits(moments, tensors_in(optimizer.base.state_dict()))
        assert optimizer.skipped_steps == backend.rank
        assert all(t.isfinite().all() for t in params_of(model) + tensors_in(optimizer.state_dict()))
        return params_of(model)

    a, b = on_threads(2, run)
    assert same_bits(a, b)
    assert caplog.text.count("rank 1 skipped its local step") == 1


@EVERY
@pytest.mark.parametrize("compressor", [None, Sign()])
def test_parameters_that_are_not_finite_on_one_rank_stop_the_synchronisation_on_all(cls, compressor, caplog):
    def run(backend):
        model = Toy()
        optimizer = cls(model.parameters(), lr=1e-2, period=2, compressor=compressor, backend=backend)
        train(model, optimizer, range(3), backend.rank, 2)
        kept = model.weight.detach().clone()
        if backend.rank == 1:
            model.weight.data[0, 0] = math.nan
        outer = optimizer.state_dict()["state"], optimizer.state_dict()["residuals"]["state"]
        params = params_of(model)
        backward(model, 3, backend.rank, 2)
        model.zero_grad()  # so that nothing moves
        optimizer.step()
        assert same_bits(params, params_of(model))
        after = optimizer.state_dict()["state"], optimizer.state_dict()["residuals"]["state"]
        for x, y in zip(outer, after):
            assert same_bits([t for e in x.values() for t in e.values()], [t for e in y.values() for t in e.values()])
        assert optimizer.skipped_rounds == 1
        assert optimizer.replicas_differ
        model.weight.data.copy_(kept)
        train(model, optimizer, range(4, 5), backend.rank, 2)
        assert not optimizer.replicas_differ
        assert optimizer.comm_stats()["rounds"] == 2
        return params_of(model)

    a, b = on_threads(2, run)
    assert same_bits(a, b)
    assert "inf, NaN or a norm above 1e+14 in the parameters of ranks [1]" in caplog.text


def test_a_grad_scaler_never_leaves_ranks_at_different_places():
    def run(backend):
        model, plain = Toy(), Toy()
        settings = {"lr": 0.1, "period": 2, "max_grad_norm": 0.05, "backend": backend}
        optimizer = LocalSGD(model.parameters(), torch.optim.SGD, **settings)
        reference = LocalSGD(plain.parameters(), torch.optim.SGD, **settings)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(4):
            backward(plain, step, backend.rank, 2)
            model.zero_grad()
            for p, q in zip(model.parameters(), plain.parameters()):
                p.grad = None if q.grad is None else q.grad * 1024
            scaler.scale(torch.zeros(1))
            if step == 1 and backend.rank == 0:
                model.bias.grad[0] = plain.bias.grad[0] = math.inf
            scaler.step(optimizer)
            scaler._scale.fill_(1024.0)
            scaler._per_optimizer_states.clear()
            reference.step()
        assert optimizer.comm_stats()["rounds"] == 2
        torch.testing.assert_close(params_of(model), params_of(plain), rtol=1e-6, atol=1e-7)
        return params_of(model)

    a, b = on_threads(2, run)
    assert same_bits(a, b)


def test_a_scale_is_not_taken_out_of_gradients_of_float16_which_would_be_0_without_it():
    p = nn.Parameter(torch.ones(3, dtype=torch.float16))
    optimizer = LocalSGD([p], torch.optim.SGD, lr=1e4, period=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    scaler.scale((p.float() * 1e-8).sum()).backward()
    with pytest.raises(ValueError, match="float16"):
        scaler.step(optimizer)
    assert p.tolist() == [1, 1, 1]
    assert p.grad.all()
    assert optimizer.comm_stats()["round_step"] == 0


# the mean model -------------------------------------------------------------------------------------------------------


@EVERY
def test_the_mean_model_is_shown_and_taken_back(cls):
    def run(backend, shown):
        model, other = Toy(), Toy()
        optimizer = cls(model.parameters(), lr=1e-2, period=4, backend=backend)
        untouched = cls(other.parameters(), lr=1e-2, period=4, backend=backend)
        for step in range(7):
            train(model, optimizer, range(step, step + 1), backend.rank, 3)
            train(other, untouched, range(step, step + 1), backend.rank, 3)
            if not shown:
                continue
            own = params_of(model)
            mean = [p.double() for p in own]
            for p in mean:
                backend.all_reduce(p).wait()
            total = optimizer.comm_stats()["total"]["bytes"]
            with optimizer.averaged():
                if optimizer.replicas_differ:
                    sent = sum(all_reduce_bytes(4 * bucket.padded, 3) for bucket in optimizer.buckets)
                    agreement = 2 * 8 * FIELDS
                    confirmed = len(optimizer.buckets) * 2 * CONFIRMATION_BYTES
                    assert optimizer.comm_stats()["total"]["bytes"] - total == sent + agreement + confirmed
                torch.testing.assert_close([p.double() for p in params_of(model)], mean, rtol=1e-6, atol=1e-7)
                inside = params_of(model)
                saved = optimizer.state_dict()
                for call, *given in ((optimizer.step,), (optimizer.synchronize,), (optimizer.load_state_dict, saved)):
                    with pytest.raises(RuntimeError, match="the parameters are the mean of all replicas; leave it"):
                        call(*given)
            assert same_bits(own, params_of(model))
            assert same_bits(all_tensors(saved), all_tensors(optimizer.state_dict()))
        assert same_bits(params_of(model), params_of(other))
        return inside if shown else None

    results = on_threads(3, lambda backend: run(backend, True))
    assert all(same_bits(results[0], other) for other in results)


@EVERY
def test_synchronize_ends_a_round_early(cls):
    def run(backend):
        model = Toy()
        optimizer = cls(model.parameters(), lr=1e-2, period=5, backend=backend)
        assert not optimizer.replicas_differ
        assert optimizer.phase == "local"
        train(model, optimizer, range(2), backend.rank, 2)
        assert optimizer.replicas_differ
        optimizer.synchronize()
        assert not optimizer.replicas_differ
        assert optimizer.comm_stats()["rounds"] == 1
        calls = optimizer.comm_stats()["total"]["calls"]
        early = params_of(model)
        optimizer.synchronize()
        assert not optimizer.replicas_differ
        assert optimizer.comm_stats()["total"]["calls"] == calls
        train(model, optimizer, range(2, 6), backend.rank, 2)
        assert optimizer.phase == "synchronizing"
        train(model, optimizer, range(6, 7), backend.rank, 2)
        assert not optimizer.replicas_differ
        return early, params_of(model)

    (early, a), (also, b) = on_threads(2, run)
    assert same_bits(early, also)
    assert same_bits(a, b)
    if cls is LocalSGD:
        return
    reference = on_threads(2, lambda backend: _periods_2_and_5(cls, backend))
    assert same_bits(a, reference[0])


def _periods_2_and_5(cls, backend):
    model = Toy()
    optimizer = cls(model.parameters(), lr=1e-2, period=2, backend=backend)
    train(model, optimizer, range(2), backend.rank, 2)
    optimizer.param_groups[0]["period"] = 5
    train(model, optimizer, range(2, 7), backend.rank, 2)
    return params_of(model)


def test_the_backend_is_counted():
    optimizer = LocalSGD(Toy().parameters(), lr=1e-2, backend=LocalBackend())
    assert isinstance(optimizer.topology.world, CountingBackend)


def test_a_base_that_is_refused_keeps_its_groups():
    def run(backend):
        base = torch.optim.AdamW(Toy().parameters(), lr=1e-2)
        with pytest.raises(ValueError, match="period"):
            LocalSGD(base, period=2 + backend.rank, backend=backend)
        return len(base.param_groups)

    assert on_threads(2, run) == [1, 1]


@pytest.mark.parametrize("streaming", [None, Streaming(2, 1), Streaming(2, merge="eager")], ids=str)
@pytest.mark.parametrize("cls", [DiLoCo, SlowMo, SignMomentum, NoLoCo])
def test_a_frozen_parameter_is_not_moved_by_its_momentum_which_it_keeps(cls, streaming):
    """Thawed, it moves again. Frozen on one rank alone it moves on all, alike."""
    if cls is NoLoCo and streaming is not None and streaming.is_eager:
        pytest.skip("refused")

    def run(backend):
        model, rank = Toy(), backend.rank
        more = {"outer_weight_decay": 0.1} if cls is SignMomentum else {}
        settings = {"lr": 1e-2, "period": 4, "bucket_mb": 2e-4, "backend": backend, "streaming": streaming, **more}
        optimizer = cls(model.parameters(), **settings)

        def seen():
            optimizer.synchronize()
            return [model.weight.detach().clone(), optimizer.state[model.weight]["outer_momentum"].clone()]

        train(model, optimizer, range(6), rank, 2)
        first = seen()
        assert bool(first[1].any())
        model.weight.requires_grad_(False)
        train(model, optimizer, range(6, 15), rank, 2)
        assert same_bits(first, seen())
        model.weight.requires_grad_(rank == 0)
        train(model, optimizer, range(15, 24), rank, 2)
        alone = seen()
        model.weight.requires_grad_(True)
        train(model, optimizer, range(24, 33), rank, 2)
        for before, now in ((first, alone), (alone, seen())):
            assert not any(torch.equal(a, b) for a, b in zip(before, now))
        return params_of(model)

    assert same_bits(*on_threads(2, run))
