"""Nodes of several ranks: full precision inside, compressed between."""

from __future__ import annotations

import copy
import math
import random
import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import OneBitAdamOracle
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from worlds import (
    Toy,
    Used,
    backward,
    flat,
    flat_given,
    give,
    needs_mpi,
    node_mean,
    on_mpi,
    on_one_core,
    on_processes,
    on_threads,
    params_of,
    same_bits,
    some_grads,
    some_of,
    some_params,
    tensors_in,
    tokens,
    train,
)  # fmt: skip

from commopt import DiLoCo, OneBitAdam, attach, compress_gradients
from commopt.agreement.decision import AGREEMENT_BYTES
from commopt.bucket import ROW_MULTIPLE
from commopt.comm import (
    LocalBackend,
    MPIBackend,
    NodesBackend,
    ThreadBackend,
    ThreadWorld,
    Topology,
    TorchBackend,
    mean_over_all,
    run,
)
from commopt.compress import Identity, Int4, Int8, Sign
from commopt.optim import ReplicasDiffer, join_state_dict, split_state_dict

GRIDS = [(2, 2), (3, 2), (2, 3), (1, 2), (2, 1)]
STEPS = 12


def trained(
    backend: Any, places: int | None, overlap: bool = False, kind: type[nn.Module] = Toy, steps: range = range(STEPS),
    bad: tuple[int, int] | None = None, **settings: Any,
) -> tuple[nn.Module, OneBitAdam]:  # fmt: skip
    """A model and its optimizer after ``steps``; places: of a node, None for no nodes; bad: step and rank of a NaN."""
    model = kind()
    grouped = backend if places is None else backend.nodes(places)
    arguments = {"lr": 1e-2, "freeze_step": 4, "bucket_mb": 3e-4, "compressor": Sign(block=16), **settings}
    optimizer = OneBitAdam(model.parameters(), backend=grouped, overlap=overlap, **arguments)
    for step in steps:
        backward(model, step, backend.rank, backend.world_size)
        if bad == (step, backend.rank):
            model.weight.grad[0, 0] = math.nan
        optimizer.step()
    return model, optimizer


class Late(ThreadBackend):
    """Collectives that are done later than they are, each after a time of its own."""

    def _start(self, verb: str, give: Tensor, finish: Any) -> Any:
        work = super()._start(verb, give, finish)
        draw = random.Random(f"{self.world.run_number} {self.members} {self.rank} {self.channel} {self.calls}")
        done, wait_for, late = work.is_completed, work.wait_for, time.monotonic() + draw.choice([0, 0, 1e-3, 4e-3])
        work.is_completed = lambda: time.monotonic() > late and done()

        def wait(seconds: float) -> bool:
            time.sleep(min(max(late - time.monotonic(), 0), seconds))  # nobody says when it is no longer late
            return wait_for(seconds)

        work.wait_for = wait
        return work


def result(model: nn.Module, optimizer: OneBitAdam) -> tuple[list[Tensor], list[Tensor]]:
    return params_of(model), tensors_in(optimizer.state_dict())


SIZES = [(3, 70), (), (400,), (0, 2), (2, 5)]


def gradients(step: int, rank: int, absent: bool) -> list[Tensor | None]:
    whole = some_grads(SIZES, step, rank)
    return some_of(whole, step, rank) if absent else whole


def node_average(step: int, node: int, places: int, absent: bool) -> list[float | None]:
    ranks = range(node * places, (node + 1) * places)
    return node_mean([flat_given(gradients(step, rank, absent), SIZES) for rank in ranks])


# the algorithm --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nodes", "places"), GRIDS[:3])
@pytest.mark.parametrize(("compressor", "block", "norm"), [(Identity(), None, None), (Sign(block=16), 16, "l2")])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("absent", [False, True])
def test_every_step_is_that_of_the_paper_with_nodes_for_workers(
    nodes, places, compressor, block, norm, overlap, absent
):
    """float64: nothing but the algorithm is compared. The oracle gets what each node has on average."""
    settings = {"lr": 0.02, "eps": 1e-6}
    oracle = OneBitAdamOracle(
        flat(some_params(SIZES)), nodes, 6, **settings, b1=0.9, b2=0.98, wd=0.05,
        row_multiple=ROW_MULTIPLE, block=block, norm=norm, rows=nodes * places,
    )  # fmt: skip
    expected = []
    for step in range(14):
        oracle.step([node_average(step, node, places, absent) for node in range(nodes)])
        expected.append(list(oracle.x))

    def ours(backend):
        mine = some_params(SIZES)
        optimizer = OneBitAdam(
            mine, betas=(0.9, 0.98), weight_decay=0.05, freeze_step=6, compressor=compressor,
            backend=backend.nodes(places), overlap=overlap, **settings,
        )  # fmt: skip
        history = []
        for step in range(14):
            give(mine, gradients(step, backend.rank, absent))
            optimizer.step()
            history.append(flat(mine))
        assert optimizer.phase == "compressed"
        return history

    # 3 nodes: as in test_onebit_adam.py, for the rounding of scales
    atol = 1e-6 if nodes == 3 else 1e-12
    for history in on_threads(nodes * places, ours):
        for a, b in zip(history, expected):
            a64, b64 = (torch.tensor(x, dtype=torch.float64) for x in (a, b))
            torch.testing.assert_close(a64, b64, rtol=0, atol=atol)


@pytest.mark.parametrize("overlap", [False, True])
def test_nodes_of_one_rank_are_no_nodes(overlap):
    def both(backend):
        return [result(*trained(backend, places, overlap)) for places in (None, 1)]

    for (a, b), (c, d) in on_threads(3, both):
        assert same_bits(a, c)
        assert same_bits(b, d)


def test_ranks_of_a_node_with_one_gradient_are_one_rank():
    """Two nodes of two ranks that see the same samples train as two ranks do."""

    class Large(nn.Module):  # in rows that are blocks in both worlds
        def __init__(self):
            super().__init__()
            self.x = nn.Parameter(torch.linspace(-1, 1, 1024))

    def ours(backend, places):
        model = Large()
        optimizer = OneBitAdam(
            model.parameters(), 1e-2, freeze_step=2, compressor=Sign(block=64), backend=backend.nodes(places)
        )
        for step in range(8):
            g = torch.Generator().manual_seed(10 * step + backend.rank // places)
            model.x.grad = torch.randn(1024, generator=g)
            optimizer.step()
        return params_of(model)

    a, b = on_threads(4, partial(ours, places=2)), on_threads(2, partial(ours, places=1))
    assert all(same_bits(a[0], x) for x in [*a, *b])


@pytest.mark.parametrize(
    ("nodes", "places", "kind", "settings"),
    [
        *((*grid, Toy, {}) for grid in GRIDS),
        (3, 2, Used, {"bucket_mb": None}),
        (2, 3, Used, {"bucket_mb": None, "compressor": Sign(None)}),
        (2, 2, Used, {"compressor": Identity()}),
        (2, 2, Used, {"freeze_step": "auto", "betas": (0.9, 0.5)}),
    ],
)
def test_replicas_are_equal_with_overlap_and_without(nodes, places, kind, settings):
    def both(backend):
        return [result(*trained(backend, places, overlap, kind, **settings)) for overlap in (False, True)]

    ranks = on_threads(nodes * places, both)
    for (a, b), (c, d) in ranks:
        assert same_bits(a, ranks[0][0][0])
        assert same_bits(a, c)
        assert same_bits(b, d)


@pytest.mark.parametrize("freeze_step", [2, 100])
def test_maximize_goes_the_other_way_and_clipping_scales(freeze_step):
    """Gradients of one value: their norm is known, and a clipped gradient is another one of one value."""

    def ours(backend):
        histories = []
        for sign, limit, size in ((1, None, 0.125), (-1, None, 0.125), (1, 1.0, 16.0)):  # 1 / sqrt(64) = 0.125
            p = nn.Parameter(torch.zeros(64, dtype=torch.float64))
            optimizer = OneBitAdam(
                [p], lr=0.01, freeze_step=freeze_step, maximize=sign < 0, max_grad_norm=limit, backend=backend.nodes(2)
            )
            for _ in range(6):
                p.grad = torch.full((64,), sign * size, dtype=torch.float64)
                optimizer.step()
            histories.append(p.detach().clone())
            stats = optimizer.comm_stats()["momentum_norm"]
            histories.append(torch.tensor(stats))
        return histories

    for there, m, back, _, clipped, clipped_m in on_threads(4, ours):
        assert (there < 0).all()
        assert same_bits([there], [back])
        torch.testing.assert_close(clipped, there, rtol=1e-5, atol=0)
        torch.testing.assert_close(clipped_m, m, rtol=1e-5, atol=0)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("step", [2, 8])
def test_nan_on_one_rank_is_skipped_by_all_nodes_and_leaves_no_trace(step, overlap):
    def ours(backend):
        before = result(*trained(backend, 2, overlap, steps=range(step)))
        model, optimizer = trained(backend, 2, overlap, steps=range(step + 1), bad=(step, 2))
        assert optimizer.skipped_steps == 1
        after = result(model, optimizer)
        train(model, optimizer, range(step + 1, STEPS), backend.rank, 4)
        return before, after, params_of(model)

    ranks = on_threads(4, ours)
    for before, after, params in ranks:
        assert same_bits(before[0], after[0])
        assert same_bits(before[1], after[1])
        assert same_bits(params, ranks[0][2])


@pytest.mark.long(but="1")
@pytest.mark.parametrize("places", [1, 2])
def test_ranks_that_see_collectives_complete_in_different_orders(places):
    """Many buckets, some in warm-up and some compressed, over few lines: what a rank starts must not depend on it."""

    def ours(backend, late):
        backend = Late(backend.world, backend.rank) if late else backend
        params = [nn.Parameter(torch.linspace(-1, 1, 300 + 8 * i)) for i in range(14)]
        groups = [{"params": params[i::3], "freeze_step": (1, 4, 100)[i]} for i in range(3)]
        optimizer = OneBitAdam(
            groups, 1e-2, overlap=True, bucket_mb=1e-3, compressor=Sign(block=16), backend=backend.nodes(places)
        )
        for step in range(8):
            data = torch.randn(1, generator=torch.Generator().manual_seed(10 * step + backend.rank))
            sum((p * data).sin().sum() for p in params).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in params]

    world = ThreadWorld(2 * places, timeout=20)
    with on_one_core():
        expected = world.run(partial(ours, late=False))
        for number in range(5):
            world.run_number = number
            for params in world.run(partial(ours, late=True)):
                assert same_bits(params, expected[0])


@pytest.mark.parametrize("warmup_compressor", [None, Int4()], ids=str)
def test_one_node_is_adamw_on_the_mean_gradient(warmup_compressor):
    """Whatever would compress the warm-up between nodes."""
    theirs = Toy()
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(STEPS):
        theirs.zero_grad()
        sum(theirs(tokens(step, r, 3)) / 3 for r in range(3)).backward()
        reference.step()

    def ours(backend):
        model, optimizer = trained(backend, 3, weight_decay=0.1, warmup_compressor=warmup_compressor)
        assert optimizer.phase == "plain"
        assert optimizer.comm_stats()["ratio"] is None  # between nodes float32 would send nothing
        assert optimizer.residuals == {}
        return params_of(model)

    for params in on_threads(3, ours):
        for a, b in zip(params, theirs.parameters()):
            torch.testing.assert_close(a, b.detach(), rtol=1e-5, atol=1e-6)


# bytes and memory -----------------------------------------------------------------------------------------------------


def sent(backend: Any, numel: int, freeze_step: int) -> tuple[int, int, int, float]:
    """Of a step: bytes that leave the node, but for those of the agreement; bytes inside; bytes that an all-reduce in
    float32 would send; and residuals per parameter."""
    x = nn.Parameter(torch.zeros(numel))
    optimizer = OneBitAdam([x], freeze_step=freeze_step, backend=backend)
    for step in range(4):
        x.grad = torch.randn(numel, generator=torch.Generator().manual_seed(10 * step + backend.rank))
        optimizer.step()
    stats = optimizer.comm_stats()
    world = optimizer.topology.world_size
    leaving = stats["step"]["bytes"] - (world - 1) * AGREEMENT_BYTES
    residuals = sum(t.numel() for t in optimizer.residuals[x].values()) / numel
    return leaving, stats["step"].get("intra_node", {"bytes": 0})["bytes"], stats["fp32_bytes"], residuals


@pytest.mark.parametrize(("nodes", "places"), [(2, 2), (2, 4), (3, 2)])
@pytest.mark.parametrize("freeze_step", [2, 100])
def test_what_leaves_a_node_is_divided_by_its_ranks(nodes, places, freeze_step):
    """Every rank sends between nodes what it would if it were alone on its node, divided by ``places``."""
    world = nodes * places
    numel = 8192 * world  # rows whose bytes need no padding
    alone = on_threads(nodes, lambda backend: sent(backend, numel, freeze_step))[0]
    assert alone[1] == 0
    assert alone[3] == 1 + 1 / nodes
    if freeze_step == 100:
        assert alone[0] == alone[2] == 2 * (nodes - 1) * 4 * numel // nodes
    # of what a node's ranks send in a flat world, W - L of W - 1 rows go to other nodes
    flat_world = on_threads(world, lambda backend: sent(backend, numel, freeze_step))[0][0]
    crossing = places * flat_world * (world - places) / (world - 1)
    for leaving, inside, fp32, residuals in on_threads(
        world, lambda backend: sent(backend.nodes(places), numel, freeze_step)
    ):
        assert leaving * places == alone[0]
        assert leaving * places == crossing / places
        assert inside > 0
        assert fp32 * places == alone[2]
        assert residuals == 1 / places + 1 / world


@pytest.mark.parametrize(("nodes", "places"), GRIDS)
def test_the_mean_over_all_is_one(nodes, places):
    def ours(backend):
        x = torch.randn(nodes * places * 5, generator=torch.Generator().manual_seed(backend.rank), dtype=torch.float64)
        topology = Topology(backend.nodes(places))
        channel = topology.replicas[0].channel
        run([mean_over_all(x, channel, channel)])
        return x, topology.traffic.total.summary()["bytes"]

    world = nodes * places
    each = [
        torch.randn(world * 5, generator=torch.Generator().manual_seed(r), dtype=torch.float64) for r in range(world)
    ]
    ranks = on_threads(world, ours)
    for x, sent in ranks:
        torch.testing.assert_close(x, torch.stack(each).mean(0), rtol=1e-14, atol=1e-14)
        assert same_bits([x], [ranks[0][0]])
        assert sent == 2 * (nodes - 1) * -(-nodes * 5 * 8 // nodes)


def test_of_all_ranks_it_has_the_rank_and_of_the_three_the_devices_they_have_in_common():
    class On(LocalBackend):
        def __init__(self, *devices: str) -> None:
            self.devices = devices

    assert NodesBackend(On("cpu", "cuda"), On("cpu"), LocalBackend()).devices == ("cpu",)
    assert NodesBackend(LocalBackend(), LocalBackend(), On("cpu", "cuda")).devices == ("cpu", "cuda")
    assert NodesBackend(LocalBackend(), LocalBackend(), LocalBackend()).devices is None

    def ours(backend):
        nodes = backend.nodes(2)
        return nodes.rank, nodes.world_size

    assert on_threads(4, ours) == [(rank, 4) for rank in range(4)]


# state ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("bucket_mb", [3e-4, None])
def test_a_resumed_run_equals_one_never_stopped(overlap, bucket_mb):
    def ours(backend):
        model, optimizer = trained(backend, 2, overlap, steps=range(7), bucket_mb=bucket_mb)
        saved = model.state_dict(), optimizer.state_dict()
        again = Toy()
        again.load_state_dict(saved[0])
        fresh = OneBitAdam(
            again.parameters(), lr=1e-2, freeze_step=4, bucket_mb=bucket_mb, compressor=Sign(block=16),
            overlap=overlap, backend=backend.nodes(2),
        )  # fmt: skip
        fresh.load_state_dict(saved[1])
        for m, o in ((model, optimizer), (again, fresh)):
            train(m, o, range(7, STEPS), backend.rank, 4)
        return result(model, optimizer), result(again, fresh)

    for a, b in on_threads(4, ours):
        assert same_bits(a[0], b[0])
        assert same_bits(a[1], b[1])


@pytest.mark.parametrize("old", [(2, 2), (3, 2), (4, None)])
@pytest.mark.parametrize("new", [(2, 2), (2, 3), (4, None), (1, 2), (1, None)])
def test_with_other_nodes_residuals_are_kept(old, new):
    """The mean over nodes of what workers owe, plus what servers owe, is the same before and after."""
    settings = {"lr": 1e-2, "freeze_step": 3, "compressor": Sign(block=16)}  # one bucket, which every place has part of

    def grouped(backend, places):
        return backend if places is None else backend.nodes(places)

    def save(backend):
        model = Toy(torch.float64)
        optimizer = OneBitAdam(model.parameters(), backend=grouped(backend, old[1]), **settings)
        train(model, optimizer, range(8), backend.rank, backend.world_size)
        return model.state_dict(), *split_state_dict(optimizer.state_dict())

    def residuals(parts: list[tuple[int, dict[str, Tensor]]], nodes: int) -> Tensor:
        parts = [part for _, part in sorted(parts, key=lambda pair: pair[0])]
        places = [parts[i : i + nodes] for i in range(0, len(parts), nodes)]
        worker = torch.cat([torch.stack([p["worker_error"].flatten() for p in place]).mean(0) for place in places])
        return worker + torch.cat([p["server_error"] for p in parts])

    saved = on_threads(old[0] * (old[1] or 1), save)
    replicated, rank_locals = saved[0][1], [s[2] for s in saved]

    def load(backend):
        model = Toy(torch.float64)
        model.load_state_dict(saved[0][0])
        optimizer = OneBitAdam(model.parameters(), backend=grouped(backend, new[1]), **settings)
        world, nodes = backend.world_size, new[0]
        optimizer.load_state_dict(join_state_dict(replicated, rank_locals, backend.rank, world, nodes))
        state = {i: {**optimizer.state[p], **optimizer.residuals.get(p, {})} for i, p in enumerate(model.parameters())}
        copied = {i: {k: v.clone() for k, v in s.items()} for i, s in state.items()}
        train(model, optimizer, range(8, 11), backend.rank, world)
        return optimizer.topology.replicas[0].shard_index, copied, params_of(model)

    loaded = on_threads(new[0] * (new[1] or 1), load)
    assert all(same_bits(loaded[0][2], params) for _, _, params in loaded)
    total = 0.0
    for i, entry in replicated["state"].items():
        before = residuals([(part["shard_index"], part["state"][i]) for part in rank_locals], old[0])
        if new[0] > 1:
            after = residuals([(share, state[i]) for share, state, _ in loaded], new[0])
        else:  # one node compresses nothing: residuals are folded in
            after = (loaded[0][1][i]["exp_avg"] - entry["exp_avg"]).flatten()
        torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-15)
        total += before.abs().sum().item()
    assert total > 0


@pytest.mark.parametrize(
    "make", [partial(OneBitAdam, freeze_step=3), partial(DiLoCo, period=4)], ids=["steps", "rounds"]
)
def test_the_same_nodes_take_their_own_parts_whether_they_are_counted_or_not(make):
    """Those who resume in the same world need not say how many nodes there are."""
    settings = {"lr": 1e-2, "bucket_mb": 3e-4, "compressor": Sign(block=16)}

    def whole(backend):
        model = Toy()
        optimizer = make(model.parameters(), backend=backend.nodes(2), **settings)
        train(model, optimizer, range(6), backend.rank, 4)
        saved = copy.deepcopy((model.state_dict(), *split_state_dict(optimizer.state_dict())))
        train(model, optimizer, range(6, 9), backend.rank, 4)
        return saved, params_of(model)

    runs = on_threads(4, whole)
    parts = [mine for (_, _, mine), _ in runs]

    def resumed(backend, nodes):
        (weights, replicated, _), _ = runs[0]
        model = Toy(seed=9)
        model.load_state_dict(weights)
        optimizer = make(model.parameters(), backend=backend.nodes(2), **settings)
        optimizer.load_state_dict(join_state_dict(replicated, parts, backend.rank, 4, nodes))
        train(model, optimizer, range(6, 9), backend.rank, 4)
        return params_of(model)

    for nodes in (None, 2):
        for again, (_, params) in zip(on_threads(4, partial(resumed, nodes=nodes)), runs):
            assert same_bits(again, params)


def test_other_nodes_of_as_many_ranks_do_not_take_the_residuals_for_their_own(caplog):
    def ours(backend):
        optimizer = trained(backend, 2)[1]
        other = OneBitAdam(Toy().parameters(), bucket_mb=3e-4, compressor=Sign(block=16), backend=backend)
        other.load_state_dict(optimizer.state_dict())
        return other.comm_stats()["residual_norm"]

    assert on_threads(4, ours) == [0.0] * 4
    assert caplog.text.count("start again from 0") == 1


# what cannot be -------------------------------------------------------------------------------------------------------


def refused(world_size: int, build: Any) -> list[str]:
    """What each rank is told; none may hang or get through."""

    def ours(backend):
        with pytest.raises(ValueError) as caught:
            build(backend)
        return str(caught.value)

    return on_threads(world_size, ours, timeout=5)


def test_groups_that_are_no_grid_are_refused_on_every_rank():
    def pairs(backend, ranks):
        return backend.part(ranks)

    def same(backend):  # both group by node
        node = backend.rank // 2
        inside = [2 * node, 2 * node + 1]
        return NodesBackend(backend, pairs(backend, inside), pairs(backend, inside))

    assert all("each in a place of its own" in text for text in refused(4, same))

    def sizes(backend):
        if backend.rank < 2:
            return NodesBackend(backend, pairs(backend, [0, 1]), pairs(backend, [backend.rank]))
        return NodesBackend(backend, pairs(backend, [backend.rank]), pairs(backend, [2, 3]))

    assert all("do not form nodes of one size: rank 2 sees 2 nodes of 1" in text for text in refused(4, sizes))

    def crossed(backend):  # ranks 1 and 2 have changed places in one of the two groupings
        inside = [[0, 1], [0, 1], [2, 3], [2, 3]][backend.rank]
        between = [[0, 3], [1, 2], [1, 2], [0, 3]][backend.rank]
        return NodesBackend(backend, pairs(backend, inside), pairs(backend, between))

    texts = refused(4, crossed)
    assert all("each in a place of its own" in t or "should have" in t or "another rank" in t for t in texts)


def test_a_backend_without_a_verb_is_refused():
    class Half:
        rank, world_size = 0, 1

        def all_reduce(self, x):
            pass

    texts = refused(1, lambda backend: NodesBackend(backend, Half(), backend))
    assert "lacks all_to_all, all_gather, broadcast" in texts[0]


@pytest.mark.parametrize("places", [0, 3, 8])
def test_ranks_that_cannot_be_divided(places):
    assert all(f"nodes of {places} ranks" in text for text in refused(4, lambda backend: backend.nodes(places)))


# real networks --------------------------------------------------------------------------------------------------------


def over_gloo(rank: int, world: int) -> dict[str, Any]:
    """Two nodes of two ranks over a mesh: bare, overlapped, and attached to DDP; and meshes that cannot be."""
    mesh = init_device_mesh("cpu", (2, 2))
    out: dict[str, Any] = {}
    settings = {"lr": 1e-2, "freeze_step": 4, "bucket_mb": 3e-4, "compressor": Sign(block=16)}
    for overlap in (False, True):
        model = Used()
        optimizer = OneBitAdam(model.parameters(), process_group=mesh, overlap=overlap, **settings)
        train(model, optimizer, range(STEPS), rank, world)
        out[f"overlap={overlap}"] = result(model, optimizer)
    model = DistributedDataParallel(Used(), find_unused_parameters=True)
    optimizer = OneBitAdam(model.parameters(), process_group=mesh, overlap=True, **settings)
    attach(model, optimizer)
    train(model, optimizer, range(STEPS), rank, world)
    out["attached"] = result(model.module, optimizer)
    out["stats"] = optimizer.comm_stats()["step"]
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))  # every rank has the whole of it
    found = OneBitAdam(net.parameters(), process_group=mesh, **settings)
    ddp = DistributedDataParallel(net, broadcast_buffers=False)
    for _ in range(6):
        ddp(torch.randn(5, 3, generator=torch.Generator().manual_seed(rank))).square().mean().backward()
        found.step()
    out["found"] = "ddp" in found.comm_stats()["step"]["by_collective"]
    with found.averaged(net):
        out["statistics"] = net[1].running_mean.clone()
    net = torch.nn.Linear(3, 1)
    handle = compress_gradients(net, Int8(), process_group=mesh, check_every=1)
    net(torch.ones(2, 3)).sum().backward()
    net.weight.data.add_(float(rank == 1))
    with pytest.raises(ReplicasDiffer, match="rank 1 differs"):
        net(torch.ones(2, 3)).sum().backward()
    handle.remove()
    half, some = dist.new_group([0, 1, 2]), DeviceMesh("cpu", [[0, 1]])
    refusals: dict[str, Any] = {
        "disagree": lambda: NodesBackend(TorchBackend(), TorchBackend(mesh.get_group(1)), TorchBackend()),
    }
    other = OneBitAdam(Used().parameters(), process_group=mesh)
    if rank >= 2:
        refusals["outside"] = lambda: OneBitAdam(Used().parameters(), process_group=some)
    if rank < 3:
        refused_model = DistributedDataParallel(Used(), process_group=half)
        refusals["attach"] = lambda: attach(refused_model, other)
    for name, refusal in refusals.items():
        with pytest.raises(ValueError) as caught:
            refusal()
        out[name] = str(caught.value)
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]  # some of the ranks: places of two nodes
    alone = [dist.new_group([r]) for r in range(4)]
    model, pair = Used(), TorchBackend(groups[rank % 2])
    backend = NodesBackend(pair, TorchBackend(alone[rank]), pair)
    train(model, OneBitAdam(model.parameters(), backend=backend, **settings), range(STEPS), rank // 2, 2)
    out["part"] = params_of(model)
    return out


def test_over_gloo_with_a_mesh():
    ranks = on_processes(4, over_gloo)
    bits = on_threads(4, lambda backend: result(*trained(backend, 2, kind=Used)))
    for rank, mine in enumerate(ranks):
        for name in ("overlap=False", "overlap=True"):
            assert same_bits(mine[name][0], bits[rank][0])
            assert same_bits(mine[name][1], bits[rank][1])
        # DDP's average is of all ranks at once: the last bits differ, and what follows from them
        for a, b in zip(mine["attached"][0], bits[rank][0]):
            torch.testing.assert_close(a, b, rtol=0.1, atol=5e-3)
        assert same_bits(mine["attached"][0], ranks[0]["attached"][0])
        assert mine["stats"]["intra_node"]["by_collective"].keys() == {"all_to_all", "all_gather"}
        assert not mine["found"]  # attached, and so without an average of DDP's own
        assert same_bits([mine["statistics"]], [ranks[0]["statistics"]])
        assert "one size" in mine["disagree"] or "each in a place of its own" in mine["disagree"]
        if rank >= 2:
            assert f"rank {rank} of the world is not a member of the device mesh" in mine["outside"]
        if rank < 3:
            assert "averages over ranks [0, 1, 2], the optimizer over [0, 1, 2, 3]" in mine["attach"]
    pairs = on_threads(2, lambda backend: params_of(trained(backend, 1, kind=Used)[0]))
    assert all(same_bits(mine["part"], pairs[0]) for mine in ranks)


def over_mpi(backend: Any = None) -> tuple[list[Tensor], str]:
    from mpi4py import MPI

    world = MPIBackend()
    rank = world.rank
    intra_node, inter_node = MPIBackend(MPI.COMM_WORLD.Split(rank // 2)), MPIBackend(MPI.COMM_WORLD.Split(rank % 2))
    model = Used()
    optimizer = OneBitAdam(
        model.parameters(), lr=1e-2, freeze_step=4, bucket_mb=3e-4, compressor=Sign(block=16), overlap=True,
        backend=NodesBackend(world, intra_node, inter_node),
    )  # fmt: skip
    train(model, optimizer, range(STEPS), rank, 4)
    text = ""
    try:
        NodesBackend(world, intra_node, intra_node)
    except ValueError as error:
        text = str(error)
    return params_of(model), text


@pytest.mark.long
@needs_mpi
def test_over_mpi():
    bits = on_threads(4, lambda backend: params_of(trained(backend, 2, kind=Used)[0]))
    for params, text in on_mpi(4, over_mpi):
        assert same_bits(params, bits[0])
        assert "each in a place of its own" in text


@pytest.mark.parametrize("then", [None, 1])
def test_a_run_is_resumed_to_the_bit_where_ranks_become_nodes_of_one_or_are_them_no_more(then):
    def run(backend):
        model, optimizer = trained(backend, 1 if then is None else None)
        other, resumed = trained(backend, then, steps=range(0))
        other.load_state_dict(model.state_dict())
        resumed.load_state_dict(optimizer.state_dict())
        assert same_bits(tensors_in(optimizer.state_dict()), tensors_in(resumed.state_dict()))
        for m, o in ((model, optimizer), (other, resumed)):
            train(m, o, range(STEPS, STEPS + 3), backend.rank, 3)
        assert same_bits(params_of(model), params_of(other))

    on_threads(3, run)
