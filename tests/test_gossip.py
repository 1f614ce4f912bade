"""NoLoCo and averaging on a ring: every step against the loop on plain lists, what is sent, kept, refused."""

from __future__ import annotations

import copy
import math
import re
import threading
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import compress
from oracle_gossip import CompressedRingOracle, NoLoCoOracle, RingOracle, around
from oracle_streaming import GossipStreamingOracle
from streams import STREAMS
from torch import Tensor, nn
from worlds import (
    Lost,
    Toy,
    flat,
    needs_mpi,
    on_mpi,
    on_processes,
    on_threads,
    params_of,
    same_bits,
    some_grads,
    some_params,
    through_a_file,
    train,
)

from commopt import Gossip, NoLoCo, Streaming
from commopt.comm import CollectiveError, LocalBackend, MPIBackend, ThreadBackend
from commopt.compress import Identity, Int4, Int8, Sign, TopK
from commopt.optim import join_state_dict, split_state_dict
from commopt.outer.noloco import pairing
from commopt.outer.rounds import ROUND_BYTES

SIZES = [(3, 7), (), (40,), (0, 2), (2, 5), (26, 3)]
NUMEL = sum(math.prod(size) for size in SIZES)
STEPS, PERIOD = 11, 2
WORLDS = pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])


def signs(row: list[float]) -> list[float]:
    """By blocks of 16, the last of which is filled with zeros, as buckets are."""
    padded = row + [0.0] * (-len(row) % 16)
    return compress(padded, 16, "l2", [True] * len(padded))[: len(row)]


def pairs_of(world: int, seed: int = 0) -> Any:
    """Groups of the oracle: the drawing itself is ours, and has laws of its own."""
    return lambda k: [list(group) for group in {tuple(sorted({r, p})) for r, p in enumerate(pairing(seed, k, world))}]


def settings_of(way: str) -> tuple[type, dict[str, Any]]:
    return {
        "noloco": (NoLoCo, {}),
        "noloco, other settings": (NoLoCo, {"outer_lr": 0.9, "outer_momentum": 0.3, "seed": 5}),
        "ring": (Gossip, {}),
        "ring, signs": (Gossip, {"compressor": Sign(16)}),
        "ring, all bits": (Gossip, {"compressor": Identity()}),
    }[way]


WAYS = ("noloco", "noloco, other settings", "ring", "ring, signs", "ring, all bits")
every_way = pytest.mark.parametrize("way", WAYS)


def oracle_of(way: str, x: list[float], world: int, base: str, fragment: int = 0, fragments: int = 1) -> Any:
    h = settings_of(way)[1]
    if way.startswith("noloco"):
        drawn = pairs_of(world, h.get("seed", 0))
        pairs = lambda k: drawn(k * fragments + fragment)  # noqa: E731
        return NoLoCoOracle(x, world, PERIOD, base, pairs, h.get("outer_lr", 0.7), h.get("outer_momentum", 0.5))
    if way == "ring" or world == 1:  # one rank alone has nobody to send to
        return RingOracle(x, world, PERIOD, base)
    return CompressedRingOracle(x, world, PERIOD, base, signs if way == "ring, signs" else list)


def expected_of(way: str, world: int, base: str) -> list[list[list[float]]]:
    """Parameters of every rank after every step."""
    oracle, out = oracle_of(way, flat(some_params(SIZES)), world, base), []
    for step in range(STEPS):
        oracle.step([flat(some_grads(SIZES, step, r)) for r in range(world)], 0.02 / (1 + step % 5))
        out.append([list(x) for x in oracle.x])
    return out


def follow(backend: Any, rank: int, way: str, base: str, expected: list[list[list[float]]]) -> None:
    """Trains as the oracle has, and compares every step with it."""
    cls, given = settings_of(way)
    mine = some_params(SIZES)
    extra = {"sgd": {"momentum": 0.9}, "adamw": {"betas": (0.9, 0.99), "weight_decay": 0.1}}[base]
    kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[base]
    optimizer = cls(mine, kind, lr=1.0, period=PERIOD, backend=backend, **given, **extra)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 0.02 / (1 + step % 5)
        for p, g in zip(mine, some_grads(SIZES, step, rank)):
            p.grad = g
        optimizer.step()
        now = torch.tensor(flat(mine), dtype=torch.float64)
        theirs = torch.tensor(expected[step][rank], dtype=torch.float64)
        torch.testing.assert_close(now, theirs, rtol=1e-12, atol=1e-12)
    assert optimizer.comm_stats()["rounds"] == STEPS // PERIOD


@WORLDS
@every_way
def test_every_step_of_every_rank_equals_the_loop_on_plain_lists(way, world_size):
    base = "sgd" if "other" in way else "adamw"
    expected = expected_of(way, world_size, base)
    on_threads(world_size, lambda backend: follow(backend, backend.rank, way, base, expected))
    if world_size > 3:
        assert len({tuple(x) for x in expected[-1]}) == world_size, "the replicas must differ to tell anything"


def scenes(rank: int, world_size: int) -> list[str]:
    for way in WAYS[::2] if world_size > 2 else WAYS:
        follow(None, rank, way, "adamw", expected_of(way, world_size, "adamw"))
    return [left_by_the_last(way, rank, world_size) for way in ("noloco", "ring, signs")] if world_size > 2 else []


def left_by_the_last(way: str, rank: int, world_size: int) -> str:
    """The last rank does not come to the second round; the others go on without it, each from where it is."""
    group, left = dist.new_group(timeout=timedelta(seconds=2)), dist.new_group(range(world_size - 1))
    model, message = Toy(), ""
    optimizer = make(way, model, None, process_group=group)
    train(model, optimizer, range(5), rank, world_size)
    if rank < world_size - 1:
        with pytest.raises(CollectiveError) as told:
            train(model, optimizer, range(5, 6), rank, world_size)
        message = str(told.value)
        own, other = params_of(model), Toy()
        second = make(way, other, None, process_group=left)
        second.load_state_dict(optimizer.state_dict())
        assert same_bits(own, params_of(other))
        anchors = [[bucket.buffers["anchor"][: bucket.numel] for bucket in o.buckets] for o in (optimizer, second)]
        assert same_bits(*anchors)
        train(other, second, range(6, 12), rank, world_size)
        assert second.comm_stats()["rounds"] >= 2
    dist.barrier()
    return message


@pytest.mark.long(but="2")
@pytest.mark.parametrize("world_size", [2, 4])
def test_over_gloo(world_size):
    for rank, messages in enumerate(on_processes(world_size, scenes)):
        for message in messages if rank < world_size - 1 else ():
            # others may be late, too, where a machine is busy
            absent = re.search(
                r", synchronisation 2, agreement of the ranks: ranks? (.*) did not join within 2 s", message
            )
            assert absent is not None, message
            assert str(world_size - 1) in absent[1]
            assert "nothing is lost: every rank still has its own parameters" in message


def mpi_scenes() -> None:
    backend = MPIBackend()
    for way in ("noloco", "ring, signs"):
        follow(backend, backend.rank, way, "adamw", expected_of(way, backend.world_size, "adamw"))


@pytest.mark.long
@needs_mpi
def test_over_mpi():
    on_mpi(3, mpi_scenes)


# streamed -------------------------------------------------------------------------------------------------------------

every_stream = pytest.mark.parametrize("stream", STREAMS)


def follow_streamed(backend: Any, rank: int, world: int, way: str, stream: str, ends: tuple[int, ...] = ()) -> None:
    """Trains as the oracle does, and compares every step with it; ``ends``: steps that synchronize() follows."""
    (cls, given), (*numbers, streaming) = settings_of(way), STREAMS[stream]
    period, steps, mine = 5, 13, some_params(SIZES)
    settings = {"lr": 1.0, "betas": (0.9, 0.99), "weight_decay": 0.1, "period": period, **given}
    optimizer = cls(mine, torch.optim.AdamW, streaming=streaming, backend=backend, **settings)
    place = {id(p): i for i, p in enumerate(mine)}
    layout = [(bucket.fragment, sorted(place[id(p)] for p in bucket.params)) for bucket in optimizer.buckets]
    assert {p for p, _ in layout} == set(range(streaming.fragments))

    def round_of(p: int, x: list[float]) -> Any:
        return oracle_of(way, x, world, "adamw", p, streaming.fragments)

    pieces = [(p, flat([mine[i] for i in at])) for p, at in layout]
    oracle = GossipStreamingOracle(pieces, round_of, world, period, "adamw", *numbers)
    for step in range(steps):
        grads, lr = [some_grads(SIZES, step, r) for r in range(world)], 0.02 / (1 + step % 5)
        oracle.step([[flat([of_rank[i] for i in at]) for of_rank in grads] for _, at in layout], lr)
        optimizer.param_groups[0]["lr"] = lr
        for p, g in zip(mine, grads[rank]):
            p.grad = g
        optimizer.step()
        if step in ends:
            oracle.synchronize()
            optimizer.synchronize()
            assert not optimizer.replicas_differ
        for piece, (_, at) in zip(oracle.pieces, layout):
            now = torch.tensor(flat([mine[i] for i in at]), dtype=torch.float64)
            theirs = torch.tensor(piece.x[rank], dtype=torch.float64)
            torch.testing.assert_close(now, theirs, rtol=1e-12, atol=1e-12, msg=lambda m: f"step {step}: {m}")  # noqa: B023
    assert optimizer.replicas_differ is (world > 1)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@every_way
@every_stream
def test_fragments_in_flight_equal_the_loop_on_plain_lists(way, stream, world_size):
    on_threads(world_size, lambda backend: follow_streamed(backend, backend.rank, world_size, way, stream))


@every_way
@every_stream
def test_synchronize_merges_what_is_in_flight_and_makes_all_equal(way, stream):
    """Between rounds, right behind one that was sent, and in the middle of a flight."""
    on_threads(3, lambda backend: follow_streamed(backend, backend.rank, 3, way, stream, ends=(3, 8, 10)))


def streamed_scenes(rank: int, world_size: int) -> None:
    for way, stream in (("noloco", "corrected"), ("ring", "mix all"), ("ring, signs", "corrected")):
        follow_streamed(None, rank, world_size, way, stream, ends=(8,))


def test_fragments_in_flight_over_gloo():
    on_processes(3, streamed_scenes)


@every_way
@pytest.mark.parametrize("period", [3, 1])
def test_one_fragment_without_a_delay_is_a_round_to_the_bit(way, period):
    def run(backend):
        out = []
        for streaming in (None, Streaming(1, 0)):
            model, sent = Toy(), []
            optimizer = make(way, model, backend, bucket_mb=3e-4, period=period, streaming=streaming)
            for step in range(7):
                train(model, optimizer, range(step, step + 1), backend.rank, backend.world_size)
                sent.append(optimizer.comm_stats()["step"])
            state = [t for bucket in optimizer.buckets for t in (*bucket.buffers.values(), *bucket.neighbours)]
            out.append((params_of(model), state, sent))
        (a, b, sent), (c, d, also) = out
        assert same_bits(a, c)
        assert same_bits(b, d)
        assert sent == also

    for world_size in (1, 3):
        on_threads(world_size, run)


@every_way
@pytest.mark.parametrize("stop", range(5, 11))
def test_a_run_that_is_resumed_with_fragments_in_flight_is_the_one_that_never_stopped_to_the_bit(way, stop):
    saved: list[Any] = [None] * 3
    all_saved = threading.Barrier(3)

    def run(backend):
        model, other = Toy(), Toy(seed=1)
        settings = {"bucket_mb": 3e-4, "period": 5, "streaming": Streaming(3, 3)}
        optimizer = make(way, model, backend, **settings)
        train(model, optimizer, range(stop), backend.rank, 3)
        assert optimizer.comm_stats()["in_flight"]
        saved[backend.rank] = split_state_dict(through_a_file(optimizer.state_dict()))
        all_saved.wait(30)
        resumed = make(way, other, backend, **{**settings, "lr": 0.5})
        resumed.load_state_dict(join_state_dict(saved[0][0], [part for _, part in saved], backend.rank, 3))
        assert same_bits(params_of(model), params_of(other))
        sent = [0, 0]
        for step in range(stop, stop + 8):
            for i, (net, opt) in enumerate(((model, optimizer), (other, resumed))):
                train(net, opt, range(step, step + 1), backend.rank, 3)
                sent[i] += opt.comm_stats()["step"]["by_collective"].get("all_gather", {"bytes": 0})["bytes"]
            assert same_bits(params_of(model), params_of(other)), step
        assert sent[0] == sent[1]
        for a, b in zip(optimizer.buckets, resumed.buckets):
            assert same_bits([*a.buffers.values(), *a.neighbours], [*b.buffers.values(), *b.neighbours])

    on_threads(3, run)


@pytest.mark.parametrize("way", ["loaded", "copied", "cast"])
def test_replicas_of_neighbours_are_their_anchors_also_when_nothing_was_in_flight(way):
    """Between two flights, where no rank would wait for the next one."""
    saved: list[Any] = [None] * 3
    all_saved = threading.Barrier(3)

    def anchors_of(backend, seed=0):
        model = Toy(seed=seed)
        settings = {"bucket_mb": 3e-4, "period": 8, "streaming": Streaming(2, 1)}
        return model, make("ring, signs", model, backend, **settings)

    def run(backend):
        model, optimizer = anchors_of(backend)
        train(model, optimizer, range(6), backend.rank, 3)
        assert optimizer.comm_stats()["in_flight"] == []
        first = (model, optimizer)
        saved[backend.rank] = split_state_dict(through_a_file(optimizer.state_dict()))
        all_saved.wait(30)
        if way == "loaded":
            model, optimizer = anchors_of(backend, seed=1)
            optimizer.load_state_dict(join_state_dict(saved[0][0], [part for _, part in saved], backend.rank, 3))
        elif way == "copied":
            model, optimizer = copy.deepcopy((model, optimizer))
        else:
            model.double()
        train(model, optimizer, range(6, 14), backend.rank, 3)
        if way != "cast":
            train(*first, range(6, 14), backend.rank, 3)
            assert same_bits(params_of(model), params_of(first[0])), "it is the run that never stopped"
        return [b.buffers["anchor"] for b in optimizer.buckets], [b.neighbours for b in optimizer.buckets]

    ranks = on_threads(3, run)
    for r, (_, neighbours) in enumerate(ranks):
        for i, replicas in enumerate(neighbours):
            assert same_bits(replicas, [ranks[j % 3][0][i] for j in (r - 1, r + 1)])


def test_a_rank_with_inf_keeps_all_from_merging_a_fragment():
    def run(backend):
        model = Toy()
        optimizer = make("noloco", model, backend, period=4, streaming=Streaming(2, 1), bucket_mb=3e-4)
        train(model, optimizer, range(3), backend.rank, 2)  # the first fragment is merged, the second due
        second = [bucket for bucket in optimizer.buckets if bucket.fragment == 1]
        if backend.rank == 1:
            with torch.no_grad():
                next(p for p in second[0].params if p.numel()).view(-1)[0] = math.inf
        anchors = [bucket.buffers["anchor"].clone() for bucket in second]
        train(model, optimizer, range(3, 5), backend.rank, 2)
        assert optimizer.skipped_rounds == 1
        assert same_bits(anchors, [bucket.buffers["anchor"] for bucket in second])
        assert optimizer.param_groups[0]["fragment_rounds"] == (1, 0)

    on_threads(2, run)


@pytest.mark.parametrize("cls", [NoLoCo, Gossip])
def test_eager_fragments_are_refused_on_all_ranks(cls):
    def run(backend):
        with pytest.raises(
            ValueError, match=r"'eager'.*is not allowed with .*; allowed are merge='corrected' and 'mix'"
        ):
            cls(Toy().parameters(), lr=1e-2, period=4, backend=backend, streaming=Streaming(2, merge="eager"))

    on_threads(2, run)


# pairs and rings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_pairs_are_mutual_cover_all_and_are_drawn_evenly(world_size):
    rounds = 400
    seen: Counter[frozenset[int]] = Counter()
    for number in range(rounds):
        partner = pairing(3, number, world_size)
        assert [partner[p] for p in partner] == list(range(world_size))
        assert sum(r == p for r, p in enumerate(partner)) == world_size % 2
        seen.update({frozenset({r, p}) for r, p in enumerate(partner)})
    if world_size % 2 == 0:
        share, kinds = rounds / (world_size - 1), world_size * (world_size - 1) // 2
    else:
        share, kinds = rounds / world_size, world_size * (world_size + 1) // 2
    assert len(seen) == kinds
    assert all(abs(n - share) <= 5 * math.sqrt(share) for n in seen.values())
    assert pairing(3, 7, 8) != pairing(4, 7, 8)


def ring_of(backend: ThreadBackend, values: list[float], **settings: Any) -> tuple[Gossip, nn.Parameter]:
    """Ranks that start a round with other values, on a ring that takes no local steps."""
    p = nn.Parameter(torch.zeros(64, dtype=torch.float64))
    optimizer = Gossip([p], torch.optim.SGD, lr=1.0, backend=backend, **settings)
    p.grad = torch.full_like(p, -values[backend.rank])
    optimizer.step()  # from 0 to the value, and the first average
    p.grad = torch.zeros_like(p)
    return optimizer, p


@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
@pytest.mark.parametrize("compressor", [None, Int8()], ids=str)
def test_without_gradients_ranks_come_closer_by_the_factor_of_the_ring(world_size, compressor):
    """From a mode of the ring, cos(2 pi r / W): every round multiplies it by (1 + 2 cos(2 pi / W)) / 3; of two ranks,
    which count each other once, by 0. Full precision keeps the mean; low precision is near to both, and a round late,
    as it averages what the anchors were."""
    values = [1 + math.cos(2 * math.pi * r / world_size) for r in range(world_size)]
    factor = (1 + 2 * math.cos(2 * math.pi / world_size)) / 3 if world_size > 2 else 0.0
    middle = sum(values) / world_size

    def run(backend):
        optimizer, p = ring_of(backend, values, compressor=compressor)
        distances = []
        for k in range(1, 5):
            rounds = k if compressor is None else k - 1
            distances.append((p.detach() - middle, factor**rounds * (values[backend.rank] - middle)))
            optimizer.step()
        return [(x.mean().item(), expected) for x, expected in distances]

    tolerance = 1e-14 if compressor is None else 0.02
    ranks = on_threads(world_size, run)
    for line in ranks:
        for distance, expected in line:
            assert abs(distance - expected) <= tolerance
    for k in range(4):
        assert abs(sum(line[k][0] for line in ranks)) <= tolerance


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_on_a_ring_the_mean_over_the_ranks_moves_by_the_mean_of_what_they_did(world_size):
    def run(backend):
        mine = some_params(SIZES)
        optimizer = Gossip(mine, torch.optim.SGD, lr=0.01, period=1, backend=backend)
        for step in range(6):
            for p, g in zip(mine, some_grads(SIZES, step, backend.rank)):
                p.grad = g
            optimizer.step()
        return flat(mine)

    start = torch.tensor(flat(some_params(SIZES)))
    steps = [[flat(some_grads(SIZES, step, r)) for r in range(world_size)] for step in range(6)]
    moved = -0.01 * torch.tensor(steps, dtype=torch.float64).mean(1).sum(0)
    mean = torch.tensor(on_threads(world_size, run), dtype=torch.float64).mean(0)
    torch.testing.assert_close(mean, start.double() + moved, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compressor", [Int8(), Int4(16), TopK(4, 16, 8), Sign(16)], ids=str)
def test_replicas_of_neighbours_are_their_anchors_to_the_bit(dtype, compressor):
    def run(backend):
        model = Toy(dtype)
        optimizer = Gossip(model.parameters(), lr=1e-2, backend=backend, compressor=compressor, bucket_mb=3e-4)
        train(model, optimizer, range(4), backend.rank, backend.world_size)
        with torch.no_grad():
            model.weight += backend.rank  # behind its back: neighbours are told
        train(model, optimizer, range(4, 7), backend.rank, backend.world_size)
        anchors = [b.buffers["anchor"] for b in optimizer.buckets]
        return anchors, [b.neighbours for b in optimizer.buckets], params_of(model)

    ranks = on_threads(4, run)
    for r, (anchors, neighbours, params) in enumerate(ranks):
        for i, (left, right) in enumerate(neighbours):
            assert same_bits([left, right], [ranks[(r - 1) % 4][0][i], ranks[(r + 1) % 4][0][i]])
        assert all(bool(x.isfinite().all()) for x in params)
        assert len(anchors) > 1
    assert not same_bits(ranks[0][2], ranks[1][2])


# what is sent and kept ------------------------------------------------------------------------------------------------


@WORLDS
def test_bytes_are_those_of_the_ledger(world_size):
    padded = -(-NUMEL // (64 * world_size)) * 64 * world_size
    talks = {"noloco": 1, "ring": 2, "eight": 2}

    def run(backend):
        out = {}
        for name, (cls, given) in {
            **{k: settings_of(k) for k in ("noloco", "ring")},
            "eight": (Gossip, {"compressor": Int8()}),
        }.items():
            mine = [nn.Parameter(p.detach().float()) for p in some_params(SIZES)]
            optimizer = cls(mine, torch.optim.SGD, lr=0.1, period=2, backend=backend, **given)
            for _ in range(4):
                mine[0].grad = torch.ones_like(mine[0])
                optimizer.step()
                out.setdefault(name, []).append(optimizer.comm_stats()["step"]["by_collective"])
        return out

    w = world_size
    for rank, sent in enumerate(on_threads(w, run)):
        for name, steps in sent.items():
            assert not steps[0]
            assert not steps[2]
            for number, step in enumerate(steps[1::2]):
                if w == 1:
                    assert sum(entry["bytes"] for entry in step.values()) == 0
                    continue
                row = Int8().nbytes(padded) if name == "eight" else 4 * padded
                sides = min(talks[name], w - 1)
                if name == "noloco":
                    sides = int(pairing(0, number, w)[rank] != rank)
                assert step["exchange"]["bytes"] == sides * row
                assert step["all_gather"]["bytes"] == (w - 1) * ROUND_BYTES
                assert set(step) == {"exchange", "all_gather"}, "nothing is all-reduced"


@pytest.mark.parametrize(("way", "stated"), [("noloco", 2), ("ring", 1), ("ring, signs", 3)])
def test_memory_is_what_the_docstring_says(way, stated):
    def run(backend):
        p = nn.Parameter(torch.ones(1 << 14))
        cls, given = settings_of(way)
        optimizer = cls([p], torch.optim.SGD, lr=1e-2, period=1, backend=backend, **given)
        p.grad = torch.ones_like(p)
        optimizer.step()
        kept = [t for bucket in optimizer.buckets for t in (*bucket.buffers.values(), *bucket.neighbours)]
        assert all(bucket.feedback is None for bucket in optimizer.buckets)
        assert not optimizer._arrived if isinstance(optimizer, Gossip) else True
        return sum(t.untyped_storage().nbytes() for t in kept) / p.nbytes

    assert on_threads(4, run) == [stated] * 4


def make(way: str, model: nn.Module, backend: Any, **settings: Any) -> Any:
    cls, given = settings_of(way)
    return cls(model.parameters(), **{"lr": 1e-2, "period": 3, "backend": backend, **given, **settings})


@every_way
@pytest.mark.parametrize("steps", [2, 4, 6])
def test_averaged_is_the_mean_and_synchronize_makes_all_equal(way, steps):
    """In the first round, between two and after one; and they go on from there."""

    def run(backend):
        model = Toy(torch.float64)
        optimizer = make(way, model, backend)
        assert not optimizer.replicas_differ
        train(model, optimizer, range(steps), backend.rank, 3)
        own = params_of(model)
        with optimizer.averaged():
            mean = params_of(model)
        assert same_bits(own, params_of(model))
        assert optimizer.replicas_differ
        optimizer.synchronize()
        together = params_of(model)
        assert not optimizer.replicas_differ
        states = [v.clone() for bucket in optimizer.buckets for v in bucket.buffers.values()]
        for bucket in optimizer.buckets:
            assert all(torch.equal(replica, bucket.buffers["anchor"]) for replica in bucket.neighbours)
        optimizer.synchronize()  # nothing to do
        assert same_bits(together, params_of(model))
        train(model, optimizer, range(steps, steps + 4), backend.rank, 3)
        return own, mean, together, states, params_of(model)

    ranks = on_threads(3, run)
    for own, mean, together, states, after in ranks:
        expected = [torch.stack([rank[0][i] for rank in ranks]).mean(0) for i in range(len(own))]
        torch.testing.assert_close(mean, expected, rtol=1e-12, atol=1e-14)
        assert same_bits(mean, ranks[0][1])
        assert same_bits(together, ranks[0][2])
        assert same_bits(states, ranks[0][3])
        assert not same_bits(together, after)
        if steps == 6:  # no round was under way: it is the mean of what there is
            torch.testing.assert_close(together, expected, rtol=1e-12, atol=1e-14)
    assert not same_bits(ranks[0][0], ranks[1][0])


@every_way
def test_after_synchronize_the_state_of_one_rank_serves_all(way):
    """But for what is of their bases."""

    def run(backend, saved=None):
        model = Toy(torch.float64, seed=0 if saved is None else 1)
        optimizer = make(way, model, backend)
        if saved is None:
            train(model, optimizer, range(4), backend.rank, 3)
            assert own_in(optimizer.state_dict()) == own_names
            optimizer.synchronize()
            state = optimizer.state_dict()
            assert not own_in(state)
            return copy.deepcopy(model.state_dict()), through_a_file(state), tensors_of(optimizer)
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        return optimizer.replicas_differ, tensors_of(optimizer)

    own_names = {"parameter", "anchor", *(["outer_momentum"] if way.startswith("noloco") else [])}

    def own_in(state):
        return {name for entry in state["residuals"]["state"].values() for name in entry} & own_names

    def tensors_of(optimizer):
        return [v.clone() for bucket in optimizer.buckets for v in bucket.buffers.values()]

    rank_0 = on_threads(3, run)[0]
    assert any(v.any() for v in rank_0[2])
    for differ, tensors in on_threads(3, lambda backend: run(backend, rank_0)):
        assert not differ
        assert same_bits(tensors, rank_0[2])


@every_way
def test_one_rank_has_nobody_to_differ_from(way):
    model = Toy()
    optimizer = make(way, model, LocalBackend())
    train(model, optimizer, range(4))
    assert not optimizer.replicas_differ


@every_way
@pytest.mark.parametrize("steps", [4, 6])
def test_a_resumed_run_is_the_one_that_never_stopped_to_the_bit(way, steps):
    saved: list[Any] = [None] * 3
    all_saved = threading.Barrier(3)

    def run(backend):
        model, other = Toy(), Toy(seed=1)
        optimizer = make(way, model, backend, bucket_mb=3e-4)
        train(model, optimizer, range(steps), backend.rank, 3)
        saved[backend.rank] = split_state_dict(through_a_file(optimizer.state_dict()))
        all_saved.wait(30)
        parts = [part for _, part in saved]
        resumed = make(way, other, backend, bucket_mb=3e-4, lr=0.5)
        resumed.load_state_dict(join_state_dict(saved[0][0], parts, backend.rank, 3))
        assert same_bits(params_of(model)[:8], params_of(other)[:8])
        train(model, optimizer, range(steps, steps + 5), backend.rank, 3)
        train(other, resumed, range(steps, steps + 5), backend.rank, 3)
        assert same_bits(params_of(model), params_of(other))
        for a, b in zip(optimizer.buckets, resumed.buckets):
            assert same_bits(list(a.buffers.values()) + a.neighbours, list(b.buffers.values()) + b.neighbours)

    on_threads(3, run)


@every_way
def test_another_number_of_ranks_starts_from_the_mean(way):
    def before(backend):
        model = Toy(torch.float64)
        optimizer = make(way, model, backend)
        train(model, optimizer, range(6), backend.rank, 3)
        state = {i: {**entry} for i, entry in optimizer.state_dict()["state"].items()}
        return split_state_dict(through_a_file(optimizer.state_dict())), params_of(model), state

    saved = on_threads(3, before)
    mean = [torch.stack([params[i] for _, params, _ in saved]).mean(0) for i in range(len(saved[0][1]))]

    def after(backend):
        model = Toy(torch.float64, seed=4)
        optimizer = make(way, model, backend)
        parts = [part for (_, part), _, _ in saved]
        optimizer.load_state_dict(join_state_dict(saved[0][0][0], parts, backend.rank, backend.world_size))
        for i, entry in optimizer.state_dict()["state"].items():
            for name, tensor in entry.items():
                expected = torch.stack([state[i][name] for _, _, state in saved]).mean(0)
                torch.testing.assert_close(tensor, expected, rtol=1e-12, atol=1e-14)
        now = params_of(model)
        train(model, optimizer, range(6, 10), backend.rank, 2)
        assert optimizer.comm_stats()["rounds"] == 3
        neighbours = [bucket.neighbours for bucket in optimizer.buckets]
        return now, neighbours, [bucket.buffers["anchor"] for bucket in optimizer.buckets]

    for world_size in (2, 4):
        ranks = on_threads(world_size, after)
        for now, _, _ in ranks:
            torch.testing.assert_close(now[:8], mean[:8], rtol=1e-12, atol=1e-14)
        for r, (_, neighbours, _) in enumerate(ranks):
            for i, replicas in enumerate(neighbours):
                theirs = [ranks[j % world_size][2][i] for j in (r - 1, r + 1)][: len(replicas)]
                assert same_bits(replicas, theirs)


# what goes wrong ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["noloco", "ring", "ring, signs"])
def test_all_ranks_skip_a_round_in_which_one_is_not_finite_and_go_on_when_it_is_mended(way):
    def run(backend):
        model = Toy()
        optimizer = make(way, model, backend)
        train(model, optimizer, range(2), backend.rank, 3)
        with torch.no_grad():
            kept = model.bias.clone()
            if backend.rank == 1:
                model.bias[2] = math.nan
        anchors = [bucket.buffers["anchor"].clone() for bucket in optimizer.buckets]
        for p in model.parameters():
            p.grad = None
        optimizer.step()
        assert optimizer.comm_stats()["skipped_rounds"] == 1
        assert same_bits(anchors, [bucket.buffers["anchor"] for bucket in optimizer.buckets])
        optimizer.synchronize()
        assert optimizer.replicas_differ
        with torch.no_grad():
            model.bias.copy_(kept)
        optimizer.step()
        stats = optimizer.comm_stats()
        assert (stats["rounds"], stats["round_step"], stats["skipped_rounds"]) == (1, 0, 2)
        return all(bool(x.isfinite().all()) for x in params_of(model))

    assert all(on_threads(3, run))


@pytest.mark.parametrize("way", ["noloco", "ring"])
def test_synchronize_with_inf_on_one_rank_changes_nothing_where_no_round_is_under_way(way):
    def run(backend):
        model = Toy()
        optimizer = make(way, model, backend)
        train(model, optimizer, range(6), backend.rank, 3)
        if backend.rank == 1:
            with torch.no_grad():
                model.bias[2] = math.inf
        state = [v.clone() for bucket in optimizer.buckets for v in bucket.buffers.values()] + params_of(model)
        optimizer.synchronize()
        now = [v for bucket in optimizer.buckets for v in bucket.buffers.values()] + params_of(model)
        assert same_bits(state, now)
        assert optimizer.replicas_differ
        assert optimizer.comm_stats()["skipped_rounds"] == 1

    on_threads(3, run)


class Losing(ThreadBackend):
    """Its messages from rank 2 do not come."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.lost = [False]

    def channels(self, n: int) -> list[Any]:
        out = super().channels(n)
        for channel in out:
            channel.lost = self.lost
        return out

    def exchange(self, out: Tensor, inp: Tensor, dst: int, src: int) -> Any:
        work = super().exchange(out, inp, dst, src)
        return Lost("connection closed by peer") if self.lost[0] and src == 2 else work


@pytest.mark.parametrize("way", ["noloco", "ring", "ring, signs"])
def test_a_peer_that_cannot_be_reached_is_named_and_nothing_has_changed(way):
    def run(backend):
        mine = Losing(backend.world, backend.rank)
        model = Toy()
        optimizer = make(way, model, mine, period=1)
        number = next(k for k in range(9) if k and pairing(0, k, 3)[2] == 0)  # NoLoCo's round of 2 with 0
        train(model, optimizer, range(number), backend.rank, 3)
        mine.lost[0] = backend.rank == 0
        before = [b.clone() for bucket in optimizer.buckets for b in bucket.buffers.values()]
        if backend.rank == 0:
            with pytest.raises(CollectiveError, match=r"exchange with rank (2|2 and 1|1 and 2)\b.*nothing is lost"):
                train(model, optimizer, range(number, number + 1), 0, 3)
            after = [b for bucket in optimizer.buckets for b in bucket.buffers.values()]
            assert same_bits(before, after)
            raise EOFError
        with pytest.raises(CollectiveError, match="another rank failed"):
            train(model, optimizer, range(number, number + 1), backend.rank, 3)

    with pytest.raises(EOFError):
        on_threads(3, run)


@pytest.mark.parametrize("cls", [NoLoCo, Gossip])
def test_a_peer_is_named_by_its_number_in_the_world(cls):
    """Where it is another one among the replicas: of a part of a model in two parts."""

    def run(backend):
        optimizer = cls(Toy().parameters(), backend=backend.sharded(2))
        entry = next(optimizer.grouped_buckets())
        return optimizer.means_of([entry], [entry[0].zeros()]).describe(0)

    for rank, said in enumerate(on_threads(4, run)):
        assert said.endswith(f"exchange with rank {(rank + 2) % 4}")


@pytest.mark.parametrize("cls", [NoLoCo, Gossip])
def test_a_backend_without_exchange_is_refused_where_it_is_needed(cls):
    class Four(LocalBackend):
        exchange = None

    with pytest.raises(ValueError, match=rf"{cls.__name__} needs a backend whose ranks can talk in pairs, and .*Four"):
        cls(Toy().parameters(), backend=Four())

    def nodes(backend):
        with pytest.raises(ValueError, match=f"{cls.__name__} does not know nodes of several ranks, got nodes of 2"):
            cls(Toy().parameters(), backend=backend.nodes(2))

    on_threads(4, nodes)


@pytest.mark.parametrize(
    ("cls", "arguments", "message"),
    [
        (NoLoCo, {"outer_momentum": 1.0}, "outer_momentum must be"),
        (NoLoCo, {"outer_lr": -0.1}, "outer_lr must be"),
        (NoLoCo, {"seed": 0.5}, "seed must be an int, got 0.5"),
        (NoLoCo, {"period": 0}, "period must be"),
        (Gossip, {"compressor": "Int8"}, "compressor must be None"),
    ],
)
def test_bad_arguments_are_answered_on_every_rank(cls, arguments, message):
    def run(backend):
        given = arguments if backend.rank == 1 else {}
        with pytest.raises(ValueError, match=message if backend.rank == 1 else "rank 1"):
            cls(Toy().parameters(), backend=backend, **given)

    on_threads(2, run)


def test_seeds_that_differ_are_an_error_on_every_rank():
    def run(backend):
        with pytest.raises(ValueError, match="settings"):
            NoLoCo(Toy().parameters(), backend=backend, seed=backend.rank)

    on_threads(2, run)


def test_after_the_state_of_a_base_alone_nobody_knows_that_all_ranks_have_the_same():
    def run(backend):
        theirs, model = Toy(), Toy()
        base = torch.optim.AdamW(theirs.parameters())
        train(theirs, base, range(2))
        optimizer = Gossip(model.parameters(), backend=backend)
        assert not optimizer.replicas_differ
        optimizer.load_state_dict(base.state_dict())
        assert optimizer.replicas_differ

    on_threads(2, run)


def test_the_oracles_neighbourhoods():
    assert [around(w, 0) for w in (1, 2, 3, 5)] == [[0], [0, 1], [0, 1, 2], [0, 1, 4]]


def test_parameters_changed_on_one_rank_alone_are_found_by_all_also_when_a_load_has_ended_the_delay():
    """The state is of the middle of a cycle; every fragment is waited for then, with a row that tells."""

    def run(backend):
        settings = {"bucket_mb": 3e-4, "period": 8}
        model, other = Toy(), Toy(seed=1)
        delayed = make("ring, signs", model, backend, streaming=Streaming(4, 1), **settings)
        train(model, delayed, range(3), backend.rank, 2)
        optimizer = make("ring, signs", other, backend, streaming=Streaming(4, 0), **settings)
        optimizer.load_state_dict(delayed.state_dict())
        train(other, optimizer, range(3, 4), backend.rank, 2)
        (bucket, *_) = [bucket for bucket in optimizer.buckets if bucket.fragment == 1]
        if backend.rank == 0:
            with torch.no_grad():
                for p in bucket.params:
                    p += 1
        train(other, optimizer, range(4, 9), backend.rank, 2)
        return [b.buffers["anchor"] for b in optimizer.buckets], [b.neighbours[0] for b in optimizer.buckets]

    first, second = on_threads(2, run, timeout=10.0)
    assert same_bits(first[0], second[1])
    assert same_bits(first[1], second[0])
