"""The compressed reduce-scatter of a group of parameters, on threads, against the loop of its papers."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from worlds import on_threads

from commopt.comm import NodesBackend, Topology
from commopt.compress import Int4, Int8, Sign, TopK
from commopt.gradients import LoCo
from commopt.gradients.fsdp import MASKS, Group, Place
from commopt.gradients.reduce_scatter import Averaged, GroupMean, Kept
from commopt.gradients.shard_group import ShardGroup

SHAPES = [((5, 3), 0), ((8,), 0), ((2, 4), 1), ((1, 2), 0)]
"""Of parameters, and along what they are cut over 4 ranks: uneven, even, by columns, and with pieces of nothing."""
W = 4


def places() -> list[Place]:
    out: list[Place] = []
    for shape, dim in SHAPES:
        start = out[-1].stop if out else 0
        cut = [-(-n // W) if i == dim else n for i, n in enumerate(shape)]
        out.append(Place(torch.Size(shape), dim, start, start + int(torch.tensor(cut).prod())))
    return out


@dataclass
class Plain:
    """As :class:`commopt.gradients.fsdp.Group`, of no module; with all gradients, or with those of ``present``."""

    present: list[int]
    trained: list[Any] = field(default_factory=list)
    places: list[Place] = field(default_factory=places)
    name: str = "net"
    world_size: int = W
    dtype: torch.dtype = torch.float64
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def columns(self) -> int:
        return self.places[-1].stop

    def divided_by(self, dtype: torch.dtype) -> float:
        return 2.0

    def with_gradient(self, columns: int) -> list[int]:
        return self.present

    def mask(self, present: list[int]) -> Tensor | None:
        used = [self.places[i].columns(torch.ones(self.places[i].shape.numel()), W) for i in present]
        rows = torch.cat(used, 1).bool().tolist()
        bits = [[sum(v << k for k, v in enumerate(row[i : i + 8])) for i in range(0, len(row), 8)] for row in rows]
        return torch.tensor(bits, dtype=torch.uint8)


def drawn(step: int, rank: int, present: list[int]) -> Tensor:
    """The rows that FSDP would hand over: gradients cut, with zeros for padding, halved."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    whole = [torch.randn(place.shape.numel(), generator=draw, dtype=torch.float64) for place in places()]
    return torch.cat([places()[i].columns(whole[i], W) for i in present], 1) / 2


STEPS = [[0, 1, 2, 3], [0, 2], [0, 1, 2, 3], [1, 3], [0, 1, 2, 3]]


def decoded(compressor: Any, row: list[float]) -> list[float]:
    """What a row becomes in the payload."""
    x = torch.tensor([row], dtype=torch.float64)
    payload = torch.empty(1, compressor.nbytes(len(row), x.dtype), dtype=torch.uint8)
    compressor.compress(x, payload)
    out = torch.empty_like(x)
    compressor.decompress(payload, out)
    return [float(v) for v in out[0]]


ALIKE = [(rank, 0) for rank in range(W)]
TWO_NODES = [(0, 0), (0, 1), (1, 0), (1, 1)]
ACROSS = [(0, 1), (1, 1), (0, 0), (1, 0)]
ONE_NODE = [(0, rank) for rank in range(W)]
"""Of each rank, its node and its place in that: nodes of one rank; of two that follow each other; in another order; of
all ranks."""


def loop(compressor: Any, feedback: Any, grid: list[tuple[int, int]], inside: Any) -> list[list[list[float]]]:
    """By step and rank, the sum that it gets; on lists. Padding is no part of anything, but has its place."""
    columns = places()[-1].stop
    used = torch.cat([p.columns(torch.ones(p.shape.numel()), W) for p in places()], 1).bool().tolist()
    residuals = [[[0.0] * columns for _ in range(W)] for _ in range(W)]  # by rank and row
    out = []
    for step, present in enumerate(STEPS):
        at = [c for i in present for c in range(places()[i].start, places()[i].stop)]
        gradients = [[[2 * g for g in row] for row in drawn(step, rank, present).tolist()] for rank in range(W)]
        sums = [[0.0] * len(at) for _ in range(W)]
        for rank, (node, place) in enumerate(grid):
            rows = sorted((r for r in range(W) if grid[r][1] == place), key=lambda r: grid[r])
            peers = sorted((r for r in range(W) if grid[r][0] == node), key=lambda r: grid[r])
            flat = [[g for row in rows for g in gradients[peer][row]] for peer in peers]
            if len(peers) > 1 and inside is not None:
                flat = [decoded(inside, row) for row in flat]
            mean = [sum(values) / len(peers) for values in zip(*flat)]
            for i, row in enumerate(rows):
                e, before = residuals[rank][row], list(residuals[rank][row])
                local = mean[i * len(at) : (i + 1) * len(at)]
                z = [g + (e[c] if used[row][c] else 0.0) for g, c in zip(local, at)]
                sent = decoded(compressor, z)
                sums[row] = [a + b * len(peers) / 2 for a, b in zip(sums[row], sent)]
                for c, value, s in zip(at, z, sent):
                    lost = value - s if used[row][c] else 0.0
                    e[c] = lost if feedback is True else 0.0
                    if isinstance(feedback, LoCo):
                        e[c] = feedback.beta * before[c] + (1 - feedback.beta) * lost
            if isinstance(feedback, LoCo):
                kept = decoded(Int8(), [v for row in rows for v in residuals[rank][row]])
                again = feedback.reset_every is not None and (step + 1) % feedback.reset_every == 0
                for i, row in enumerate(rows):
                    residuals[rank][row] = [0.0] * columns if again else kept[i * columns : (i + 1) * columns]
        out.append(sums)
    return out


def cut_over(backend: Any, grid: list[tuple[int, int]] = ALIKE) -> tuple[ShardGroup, Topology]:
    """The ranks of a world of threads, as nodes where they are some."""
    node, place = grid[backend.rank]
    if len({place for _, place in grid}) > 1:
        along = (
            sorted((r for r in range(W) if grid[r][i] == at), key=lambda r: grid[r])
            for i, at in ((0, node), (1, place))
        )
        backend = NodesBackend(backend, *(backend.part(ranks) for ranks in along))
    topology = Topology(backend)
    return ShardGroup(backend, topology.among(backend, inside=False)), topology


@pytest.mark.parametrize("feedback", [True, False, LoCo(0.6, 3)], ids=["feedback", "none", "LoCo"])
@pytest.mark.parametrize("compressor", [Int4(block=8), Int8(block=8, rotate=True)], ids=["int4", "int8"])
@pytest.mark.parametrize(
    ("grid", "inside"),
    [
        (ALIKE, None),
        (TWO_NODES, None),
        (TWO_NODES, Int8(block=8)),
        (ACROSS, Int4(block=8)),
        (TWO_NODES, TopK(4, 16)),
        (ONE_NODE, None),
    ],
    ids=["alike", "nodes", "int8 inside", "across", "top-k inside", "one node"],
)
def test_it_is_the_loop_of_the_papers(compressor, feedback, grid, inside):
    def run(backend):
        out = []
        group = Plain([])
        ranks, topology = cut_over(backend, grid)
        mean = GroupMean(group, ranks, compressor, feedback, lambda: None, inside)
        for step, present in enumerate(STEPS):
            group.present = present
            given = drawn(step, backend.rank, present)
            mine = given.new_empty(given.shape[1])
            mean(mine, given.view(-1), None, dist.ReduceOp.SUM)
            mean.end(sound=True)
            topology.traffic.end_step()
            out.append(mine)
        return out, topology.summary(mean.fp32_bytes)

    expected = loop(compressor, feedback, grid, inside)
    nodes, places_of = (1 + max(at[i] for at in grid) for i in (0, 1))
    n = places()[-1].stop  # the last step has all
    for rank, (found, stats) in enumerate(on_threads(W, run)):
        for step, mine in enumerate(found):
            # a sum in another order
            assert torch.allclose(mine, torch.tensor(expected[step][rank], dtype=torch.float64), rtol=0, atol=1e-12)
        assert stats["step"]["bytes"] == (nodes - 1) * compressor.nbytes(n, torch.float64)
        assert stats["fp32_bytes"] == 4 * (nodes - 1) * sum(len(row[0]) for row in expected)
        if places_of > 1:
            part = 8 * nodes * n if inside is None else inside.nbytes(nodes * n, torch.float64)
            assert stats["step"]["intra_node"]["bytes"] == (places_of - 1) * part


@pytest.mark.parametrize("grid", [ALIKE, TWO_NODES, ACROSS, ONE_NODE], ids=["alike", "nodes", "across", "one node"])
def test_rows_are_gathered_in_the_order_of_ranks(grid):
    """Each leaves a node once."""

    def run(backend):
        ranks, topology = cut_over(backend, grid)
        out = torch.empty(W, 16, dtype=torch.uint8)
        for work in ranks.all_gather(out, torch.full((16,), backend.rank, dtype=torch.uint8)):
            work.wait()
        topology.traffic.end_step()
        return out, topology.summary(0)["step"]["bytes"]

    for out, sent in on_threads(W, run):
        assert out.tolist() == [[rank] * 16 for rank in range(W)]
        assert sent == 16 * max(node for node, _ in grid)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_parameter_that_is_cut_along_a_dimension_is_put_together_again(dim):
    whole, shape = torch.arange(1.0, 2 * 4 * 6 + 1), torch.Size((2, 4, 6))
    columns = Place(shape, dim, 0, 24).columns(whole, 2)
    for row, piece in zip(columns, whole.view(shape).chunk(2, dim)):
        assert torch.equal(row, piece.reshape(-1))
    assert torch.equal(Place(shape, dim, 0, 24).whole(columns), whole)


@pytest.mark.parametrize(
    "make", [lambda *of: Kept(*of, exactly=True), lambda *of: Averaged(*of, LoCo())], ids=["kept", "averaged"]
)
def test_a_state_that_was_loaded_is_the_callers(make):
    """No scale of a loss that changes later is in it."""
    residual = make((2, 16), torch.float32, torch.device("cpu"))
    residual.write(torch.ones(2, 16), residual.read())
    residual.commit()
    state = residual.state()
    saved = {name: value.clone() for name, value in state.items() if isinstance(value, Tensor)}
    residual.load(residual.read(), state)
    residual.rescale(2.0)
    assert all(torch.equal(state[name], value) for name, value in saved.items())


def test_the_residual_of_loco_follows_the_scale_to_its_last_block():
    residual = Averaged((4, 50), torch.float64, torch.device("cpu"), LoCo())  # 200 elements: a block of 128 and of 72
    residual.load(torch.randn(4, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64), {})
    before = residual.read()
    residual.rescale(0.25)
    assert torch.equal(residual.read(), before / 4)


def test_loco_forgets_at_the_same_mean_where_a_run_is_resumed():
    first, resumed = (Averaged((2, 16), torch.float32, torch.device("cpu"), LoCo(reset_every=2)) for _ in range(2))
    first.write(torch.ones(2, 16), first.read())
    first.commit()
    resumed.load(first.read(), first.state())
    for residual in (first, resumed):
        assert residual.read().any()
        residual.write(torch.ones(2, 16), residual.read())
        residual.commit()
        assert not residual.read().any()


def test_of_several_means_one_that_is_not_sound_is_enough():
    def run(backend):
        mean = GroupMean(Plain([0, 1, 2, 3]), cut_over(backend)[0], Int8(), False, lambda: None)
        given = drawn(0, backend.rank, [0, 1, 2, 3])
        for rows in (torch.full_like(given, torch.nan), given):
            mean(given.new_empty(given.shape[1]), rows.view(-1), None, dist.ReduceOp.SUM)
        return bool(mean.sound)

    assert on_threads(W, run) == [False] * W


def test_a_mean_that_is_not_sound_leaves_the_residual():
    """And gradients are NaN then; a second mean before the end goes on from the first."""

    def run(backend):
        group = Plain([0, 1, 2, 3], trained=[torch.nn.Parameter(torch.zeros(3))])
        group.trained[0].grad = torch.ones(3)
        mean = GroupMean(group, cut_over(backend)[0], Sign(16), True, lambda: None)
        given = drawn(0, backend.rank, group.present)
        mine = given.new_empty(given.shape[1])

        def take() -> Tensor:
            mean(mine, given.view(-1), None, dist.ReduceOp.SUM)
            return mine.clone()

        assert mean.residual is not None
        first = take()
        mean.end(sound=False)
        nothing, nan = bool(mean.residual.read().any()), bool(group.trained[0].grad.isnan().all())
        again, second = take(), take()
        mean.forget()
        return first, again, second, nothing, nan, bool(mean.residual.read().any())

    for first, again, second, nothing, nan, after in on_threads(W, run):
        assert torch.equal(first, again)
        assert not torch.equal(first, second)
        assert (nothing, nan, after) == (False, True, False)


def group_of(shapes: list[tuple[tuple[int, ...], int]]) -> Group:
    """FSDP's group of parameters of these shapes, without FSDP."""
    own, size = nn.Parameter(torch.zeros(1)), torch.Size
    params = [
        SimpleNamespace(sharded_param=own, fsdp_placement=SimpleNamespace(dim=dim), _orig_size=size(shape))
        for shape, dim in shapes
    ]
    mesh = SimpleNamespace(shard_process_group=SimpleNamespace(size=lambda: W))
    return Group(None, SimpleNamespace(mesh_info=mesh, fsdp_params=params, device=torch.device("cpu")))


def test_masks_of_experts_that_are_others_in_every_step_do_not_add_up():
    """Of a mixture of experts each step may have gradients of another choice: one mask for each would fill the
    memory."""
    group, draw = group_of([((5, 3), 0)] * 12), random.Random(0)
    choices = [sorted(draw.sample(range(12), 6)) for _ in range(100)]
    assert len({*map(tuple, choices)}) > 4 * MASKS
    for present in choices:
        mask = group.mask(present)
        assert mask is not None
        assert mask.tolist() == Plain(present, places=group.places).mask(present).tolist()
    assert len(group._masks) <= MASKS
