"""Models in parts: a rank holds one part, averages it with the ranks that hold the same, and agrees with all."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import pytest
import torch
from every import OUTER, OVERLAPPING, PLAIN, WITH_VARIANTS, every_communicating, every_variant, make
from torch import Tensor, nn
from worlds import give, on_threads, same_bits, some_grads, some_of

import commopt
from commopt import Streaming
from commopt.comm import Holding, LocalBackend, ShardedBackend
from commopt.compress import Identity, Sign
from commopt.optim import SyncPolicy, VariancePolicy

SIZES = ([(7, 3), (5,), (4, 4), (2,), (3,)], [(2, 3), (9,), (1, 9), (6,), (1,), (4, 9), (8,)])
"""Of the parameters in each part: of other shapes, and other numbers of buckets."""
STEPS = 14
PARTS = 2


def own_params(part: int) -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(part)
    return [nn.Parameter(torch.randn(size, generator=g, dtype=torch.float64)) for size in SIZES[part]]


def own_grads(part: int, step: int, replica: int, complete: bool) -> list[Tensor | None]:
    grads = some_grads(SIZES[part], step, replica + 10 * part)
    return list(grads) if complete else some_of(grads, step + part, replica)


def run(
    backend: Any, part: int, replica: int, name: str, complete: bool, until: int = STEPS, **settings: Any
) -> tuple[list[Tensor], Any]:
    """What ``until`` steps make of ``part`` in ``replica``: parameters, and its optimizer."""
    params = own_params(part)
    optimizer = make(name, params, backend=backend, bucket_mb=2e-4, **settings)
    for step in range(until):
        give(params, own_grads(part, step, replica, complete))
        optimizer.step()
    return [p.detach().clone() for p in params], optimizer


def tensors_of(optimizer: Any) -> list[Tensor]:
    """All state, residuals too."""
    state = [t for p in optimizer.params for t in optimizer.state[p].values()]
    return state + [t for entry in optimizer.residuals.values() for t in entry.values()]


@every_variant
@pytest.mark.parametrize("complete", [True, False])
def test_each_part_is_trained_as_a_model_of_its_own(name, complete):
    """To the bit, with any compressor: also where gradients are missing in one part and not in the other."""
    settings: dict[str, Any] = {"compressor": Sign(16)} if name.startswith("OneBit") else {}
    if complete:
        settings["until"] = 7  # all phases, and half a round; that gradients come and go takes 14

    def apart(part: int) -> list[tuple[list[Tensor], list[Tensor]]]:
        def ours(backend: Any) -> tuple[list[Tensor], list[Tensor]]:
            params, optimizer = run(backend, part, backend.rank, name, complete, **settings)
            return params, tensors_of(optimizer)

        return on_threads(2, ours)

    def together(backend: Any) -> tuple[list[Tensor], list[Tensor]]:
        replica, part = divmod(backend.rank, PARTS)
        params, optimizer = run(backend.sharded(PARTS), part, replica, name, complete, **settings)
        return params, tensors_of(optimizer)

    expected = [apart(part) for part in range(PARTS)]
    for rank, (params, state) in enumerate(on_threads(2 * PARTS, together)):
        replica, part = divmod(rank, PARTS)
        assert same_bits(params, expected[part][replica][0])
        assert same_bits(state, expected[part][replica][1])


NOTHING = [(name, {}) for name in WITH_VARIANTS if name not in PLAIN] + [
    ("DiLoCo", {"state_period": {"exp_avg": 1}}),
    ("DiLoCo", {"streaming": Streaming(1, 1)}),
    ("DiLoCo", {"streaming": Streaming(1, merge="eager")}),
    ("DiLoCo", {"compressor": Sign(16)}),
    ("SparseLoCo", {"clip_to_median": True}),
]


@pytest.mark.parametrize(("name", "settings"), NOTHING)
@pytest.mark.parametrize("frozen", [0, 2])
def test_a_part_that_trains_nothing_follows_the_others(name, settings, frozen):
    """It has no parameters, or ``frozen`` ones: it is in the phases of the other part, and takes part in means and
    copies."""

    def ours(backend: Any, part: int, replica: int) -> list[list[Tensor]]:
        params = own_params(part) if part else [p.requires_grad_(False) for p in own_params(part)[:frozen]]
        optimizer = make(name, [{"params": params}], backend=backend, bucket_mb=2e-4, **settings)
        seen = []
        for step in range(7):
            if part:
                give(params, own_grads(part, step, replica, True))
            optimizer.step()
            seen.append([p.detach().clone() for p in params])
        with optimizer.averaged():
            seen.append([p.detach().clone() for p in params])
        assert copy.deepcopy(optimizer).phase == optimizer.phase
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.synchronize()
        return [*seen, [p.detach().clone() for p in params]]

    expected = on_threads(2, lambda backend: ours(backend, 1, backend.rank))
    for rank, seen in enumerate(on_threads(4, lambda b: ours(b.sharded(PARTS), b.rank % PARTS, b.rank // PARTS))):
        for found, right in zip(seen, expected[rank // PARTS], strict=True):
            assert same_bits(found, right if rank % PARTS else own_params(0)[:frozen])


@every_communicating
@pytest.mark.parametrize("where", [0, 3])
def test_inf_in_one_part_of_one_replica_is_skipped_by_all_that_would_follow_it(name, where):
    """Steps and rounds in which the ranks talk: by all ranks. In a local step, by the replica."""

    def ours(backend: Any) -> tuple[list[Tensor], int]:
        replica, part = divmod(backend.rank, PARTS)
        params = own_params(part)
        optimizer = make(name, params, backend=backend.sharded(PARTS))
        for step in range(9):
            give(params, own_grads(part, step, replica, complete=True))
            if step == 4 and backend.rank == where:
                params[0].grad.view(-1)[0] = math.inf
            optimizer.step()
            if step == 4:
                dropped = optimizer.skipped_steps + getattr(optimizer, "dropped_gradients", 0)
        return [p.detach().clone() for p in params], dropped

    ranks = on_threads(2 * PARTS, ours)
    replica = where // PARTS
    for rank, (params, dropped) in enumerate(ranks):
        assert all(torch.isfinite(p).all() for p in params)
        assert dropped == (name not in LOCAL or rank // PARTS == replica)
    for part in range(PARTS):
        assert same_bits(ranks[part][0], ranks[part + PARTS][0]) or name in ROUNDS


LOCAL = ("ZeroOneAdam", *OUTER)
"""Those with steps in which nobody is told anything; the fifth is one."""
ROUNDS = ("CSER", "CSER, signs", "QSparseLocalSGD", *LOCAL)
"""Those whose replicas differ between rounds; the ninth step ends none."""


@pytest.mark.parametrize("name", [*OVERLAPPING[:4], "DiLoCo"])
def test_one_norm_of_all_parts_clips_them(name):
    """As a whole model's: the root mean square over the replicas; in a local step, the replica's own."""
    norm = 0.5

    def ours(backend: Any) -> list[Tensor]:
        replica, part = divmod(backend.rank, PARTS)
        return run(backend.sharded(PARTS), part, replica, name, True, 3, max_grad_norm=norm, **freeze)[0]

    def whole(backend: Any) -> list[Tensor]:
        params = [p for part in range(PARTS) for p in own_params(part)]
        optimizer = make(name, params, backend=backend, max_grad_norm=norm, **freeze)
        for step in range(3):
            give(params, [g for part in range(PARTS) for g in own_grads(part, step, backend.rank, True)])
            optimizer.step()
        return [p.detach().clone() for p in params]

    freeze = {"freeze_step": 100} if name in ("OneBitAdam", "OneBitLamb") else {"compressor": Identity()}
    expected = on_threads(2, whole)
    for rank, params in enumerate(on_threads(2 * PARTS, ours)):
        replica, part = divmod(rank, PARTS)
        for p, q in zip(params, expected[replica][5 * part :]):
            torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-13)


def test_a_rank_that_cannot_take_a_local_step_stops_those_that_hold_a_replica_with_it():
    def ours(backend: Any) -> str:
        replica, part = divmod(backend.rank, PARTS)
        _, optimizer = run(backend.sharded(PARTS), part, replica, "DiLoCo", True, 1, period=4)
        give(optimizer.params, own_grads(part, 1, replica, True))
        if backend.rank == 1:
            optimizer.max_grad_norm = -1.0
        try:
            optimizer.step()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "taken"

    said = on_threads(2 * PARTS, ours)
    assert said[0].startswith("StepRefused: DiLoCo, local step 2: rank 1 of this replica cannot take this step")
    assert said[1].startswith("ValueError: max_grad_norm must be")
    assert said[2:] == ["taken", "taken"]


def test_the_variance_of_all_parts_decides_when_it_has_settled():
    """freeze_step="auto": one part settles long before the other."""

    def ours(backend: Any) -> list[Any]:
        replica, part = divmod(backend.rank, PARTS)
        params = own_params(part)
        optimizer = commopt.OneBitAdam(params, 1e-3, (0.9, 0.9), backend=backend.sharded(PARTS))
        seen = []
        for step in range(80):
            grow = 1.0 if part == 0 else 1.1 ** min(step, 40)
            give(params, [g * grow for g in own_grads(part, 0, replica, True)])
            optimizer.step()
            seen.append(optimizer.param_groups[0]["freeze_step"])
        return seen

    ranks = on_threads(2 * PARTS, ours)
    assert all(seen == ranks[0] for seen in ranks)
    decided = [step for step in ranks[0] if step != "auto"]
    assert decided
    assert decided[0] > 40


@pytest.mark.parametrize("name", ["OneBitAdam", "OneBitLamb", "ZeroOneAdam"])
def test_a_part_that_does_not_train_hears_when_the_variance_has_settled(name):
    """It looks when the others do, and goes from phase to phase with them."""
    auto: dict[str, Any] = {"freeze_step": "auto"}
    if name == "ZeroOneAdam":
        auto = {"variance": VariancePolicy(2, "auto"), "sync": SyncPolicy(2, None, 2)}

    def ours(backend: Any) -> list[Any]:
        replica, part = divmod(backend.rank, PARTS)
        params = own_params(part)
        for p in params:
            p.requires_grad_(part == 1)
        optimizer = make(name, params, betas=(0.9, 0.9), backend=backend.sharded(PARTS), **auto)
        seen = []
        for step in range(63):
            if part == 1:
                give(params, own_grads(part, step % 2, replica, True))
            optimizer.step()
            group = optimizer.param_groups[0]
            seen.append((group["variance_stop" if name == "ZeroOneAdam" else "freeze_step"], optimizer.phase))
        return seen

    ranks = on_threads(2 * PARTS, ours)
    assert all(seen == ranks[0] for seen in ranks)
    assert ranks[0][0] == ("auto", "refreshing" if name == "ZeroOneAdam" else "warmup")
    assert ranks[0][-1] == (60, "frozen" if name == "ZeroOneAdam" else "compressed")


class Alone(ShardedBackend):
    """Some parameters, of two dimensions, are each rank's own, as pieces cut over all ranks are; the rest has
    replicas."""

    def holding(self, p: Tensor) -> Holding:
        return Holding(LocalBackend(), 1) if p.dim() == 2 else super().holding(p)


@pytest.mark.parametrize("name", [*OVERLAPPING, "OneBitAdam overlapping", "OneBitAdam warming up by 4 bits"])
def test_what_one_rank_alone_holds_beside_what_has_replicas_takes_plain_steps(name):
    """To the bit, in all phases, and with a mean between two rounds; the rest is what it is without that."""

    def trained(backend: Any, dims: tuple[int, ...], rank: int) -> list[Tensor]:
        here = [i for i, p in enumerate(own_params(0)) if p.dim() in dims]
        params = [own_params(0)[i] for i in here]
        optimizer = make(name, params, backend=backend)
        for step in range(9):
            give(params, [own_grads(0, step, rank, True)[i] for i in here])
            optimizer.step()
            if step == 6:
                optimizer.synchronize()
        return [p.detach().clone() for p in params]

    def ours(backend: Any) -> list[Tensor]:
        grid = backend.sharded(1)
        return trained(Alone(grid.world, grid.inside, grid.replicas), (1, 2), backend.rank)

    rest = on_threads(2, lambda backend: trained(backend.sharded(1), (1,), backend.rank))
    for rank, params in enumerate(on_threads(2, ours)):
        assert same_bits([p for p in params if p.dim() == 1], rest[rank])
        assert same_bits([p for p in params if p.dim() == 2], trained(LocalBackend(), (2,), rank))


@pytest.mark.parametrize("name", ["OneBitAdam", "ZeroOneAdam"])
def test_what_one_rank_alone_holds_and_has_no_gradient_stays_though_the_variance_of_the_rest_is_raised(name):
    settings = {"sync": SyncPolicy(1, None, 1)} if name == "ZeroOneAdam" else {}

    def ours(backend: Any) -> None:
        grid, params = backend.sharded(1), own_params(0)
        optimizer = make(name, params, backend=Alone(grid.world, grid.inside, grid.replicas), **settings)
        alone = [p for p in params if p.dim() == 2]
        for step in range(6):
            before = [optimizer.state[p]["exp_avg_sq"].clone() for p in alone]
            give(params, own_grads(0, step, backend.rank, True))
            for p in alone if step > 2 else ():
                p.grad = None
            optimizer.step()
            assert same_bits(before, [optimizer.state[p]["exp_avg_sq"] for p in alone]) == (step > 2)

    on_threads(2, ours)


def test_what_one_rank_alone_holds_is_no_error_of_averages():
    def ours(backend: Any) -> None:
        grid = backend.sharded(1)
        _, optimizer = run(Alone(grid.world, grid.inside, grid.replicas), 0, backend.rank, "CSER, signs", True, 5)
        errors = [p.detach() - optimizer.state[p]["anchor"] for p in optimizer.params if p.dim() == 1]
        expected = math.sqrt(math.fsum(e**2 for error in errors for e in error.tolist()))
        assert optimizer.comm_stats()["residual_norm"] == pytest.approx(expected, rel=1e-12)
        assert expected > 0

    on_threads(2, ours)


@pytest.mark.parametrize("how", ["loaded", "copied"])
def test_what_one_rank_alone_holds_goes_on_where_a_state_is_loaded_or_copied_between_two_rounds(how):
    """It takes no local steps, so nothing was gathered of its momentum."""

    def trained(backend: Any, again: bool) -> list[Tensor]:
        grid = backend.sharded(1)
        params = own_params(0)
        alone = Alone(grid.world, grid.inside, grid.replicas)
        optimizer = make("ZeroOneAdam", params, sync=SyncPolicy(4, None, 4), backend=alone)
        for step in range(11):
            give(params, own_grads(0, step, backend.rank, True))
            optimizer.step()
            if again and how == "loaded":
                optimizer.load_state_dict(optimizer.state_dict())
            elif again:
                params, optimizer = copy.deepcopy((params, optimizer))
        assert optimizer.replicas_differ
        return [p.detach().clone() for p in params]

    straight, resumed = (on_threads(2, functools.partial(trained, again=again)) for again in (False, True))
    for once, other in zip(straight, resumed):
        assert same_bits(once, other)


@pytest.mark.parametrize("repair", [False, True])
def test_replicas_of_a_part_are_compared_with_each_other_only(repair):
    """Three replicas of two parts: one of them is made to differ."""
    guard = commopt.Guard(check_every=3, on_difference="repair" if repair else "raise")

    def ours(backend: Any) -> tuple[list[Tensor], str]:
        replica, part = divmod(backend.rank, PARTS)
        params = own_params(part)
        optimizer = commopt.OneBitAdam(params, freeze_step=2, guard=guard, backend=backend.sharded(PARTS))
        said = ""
        for step in range(8):
            give(params, own_grads(part, step, replica, True))
            if step == 3 and backend.rank == 3:
                with torch.no_grad():
                    params[1].view(-1)[0] += 1e-9
            try:
                optimizer.step()
            except commopt.optim.ReplicasDiffer as error:
                said = str(error)
                break
        return [p.detach().clone() for p in params], said

    ranks = on_threads(3 * PARTS, ours)
    if repair:
        for part in range(PARTS):
            assert all(same_bits(ranks[part][0], ranks[part + PARTS * i][0]) for i in (1, 2))
            assert ranks[part][1] == ""
    else:
        assert all("rank 3 differs from all others in " in said for _, said in ranks)


@pytest.mark.parametrize("new", [True, False])
def test_a_part_whose_parameter_gets_another_group_goes_on_with_the_one_that_has_none_to_put_there(new):
    """What follows from where a parameter came from is that part's own."""

    def ours(backend: Any) -> list[Tensor]:
        replica, part = divmod(backend.rank, PARTS)
        params = own_params(part)
        optimizer = commopt.ZeroOneAdam(
            [{"params": params[:3]}, {"params": params[3:]}], variance=VariancePolicy(1, 2), compressor=Sign(16),
            backend=backend.sharded(PARTS),
        )  # fmt: skip
        for step in range(8):
            if step == 5:
                moved = [optimizer.param_groups[0]["params"].pop()] if part == 0 else []
                params += [] if part == 0 or not new else [nn.Parameter(torch.zeros(9, dtype=torch.float64))]
                if new:
                    optimizer.add_param_group({"params": moved or params[-1:]})
                else:
                    optimizer.param_groups[1]["params"] += moved
            give(params, [torch.full_like(p, 1.0 + step + replica) for p in params])
            optimizer.step()
        return [p.detach().clone() for p in params]

    ranks = on_threads(2 * PARTS, ours)
    assert all(same_bits(ranks[part], ranks[part + PARTS]) for part in range(PARTS))


def test_parts_that_differ_at_the_start_get_those_of_their_first_replica():
    def ours(backend: Any) -> list[Tensor]:
        part = backend.rank % PARTS
        params = own_params(part)
        with torch.no_grad():
            params[0].add_(backend.rank)
        make("OneBitAdam", params, backend=backend.sharded(PARTS))
        return [p.detach().clone() for p in params]

    ranks = on_threads(2 * PARTS, ours)
    for part in range(PARTS):
        expected = own_params(part)
        assert same_bits(ranks[part][0:1], [expected[0].detach() + part])
        assert same_bits(ranks[part], ranks[part + PARTS])


def test_what_differs_between_replicas_is_refused_and_between_parts_is_not():
    def ours(backend: Any) -> str:
        part = backend.rank % PARTS
        params = own_params(part)[: 4 if backend.rank == 3 else 5]
        try:
            make("OneBitAdam", params, backend=backend.sharded(PARTS))
        except ValueError as error:
            return str(error)
        return ""

    for said in on_threads(2 * PARTS, ours):
        assert said.startswith(
            "parameter lists differ between ranks: rank 3 has 4 parameters with 30 elements in 1 groups, rank 1 has 5 "
            "parameters with 31 elements in 1 groups; the first that differs: rank 3 has "
        )


def test_groups_that_are_no_grid_are_refused():
    def ours(backend: Any) -> str:
        low = backend.rank < 2
        inside = backend.part([0, 1] if low else [2, 3])
        replicas = backend.part([0, 1] if low else [2, 3])
        try:
            ShardedBackend(backend, inside, replicas)
        except ValueError as error:
            return str(error)
        return ""

    for said in on_threads(4, ours):
        assert "are not the 4 ranks of world, each in a place of its own" in said or "should have" in said


def test_the_state_of_pieces_is_not_consolidated():
    def ours(backend: Any) -> list[str]:
        said = []
        for name in ("OneBitAdam", "DiLoCo"):
            optimizer = make(name, own_params(backend.rank % PARTS), backend=backend.sharded(PARTS))
            with pytest.raises(ValueError, match="here ranks hold pieces") as error:
                optimizer.consolidate_state_dict()
            said.append(str(error.value))
        return said

    assert all("every rank holds whole" in line for said in on_threads(2 * PARTS, ours) for line in said)


@pytest.mark.parametrize("name", ["OneBitAdam", "ZeroOneAdam", "CSER, signs", "DiLoCo"])
def test_stopped_and_resumed_is_never_stopped(name):
    def ours(backend: Any) -> tuple[list[Tensor], list[Tensor]]:
        replica, part = divmod(backend.rank, PARTS)
        params, optimizer = run(backend.sharded(PARTS), part, replica, name, False, 7)
        again = [nn.Parameter(p.clone()) for p in params]
        resumed = make(name, again, backend=backend.sharded(PARTS), bucket_mb=2e-4)
        resumed.load_state_dict(optimizer.state_dict())
        out = []
        for ps, one in ((optimizer.params, optimizer), (again, resumed)):
            for step in range(7, STEPS):
                give(ps, own_grads(part, step, replica, False))
                one.step()
            out.append([p.detach().clone() for p in ps])
        return out[0], out[1]

    for never, resumed in on_threads(2 * PARTS, ours):
        assert same_bits(never, resumed)
