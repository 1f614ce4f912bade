"""A message that is damaged on its way, or that its sender has spoilt, is noticed by all ranks before it is used."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from every import GOSSIP, OUTER, every_variant, make
from torch import Tensor
from worlds import Toy, Used, backward, on_threads, params_of, same_bits, tensors_in, train

from commopt import CSER, Guard, OneBitAdam
from commopt.comm import MessageDamaged, ThreadBackend
from commopt.comm.receipt import row_sums
from commopt.compress import Identity, RandomBlocks, Sign
from commopt.optim import NotFinite


class _Hurt:
    """A collective that damages what this rank receives."""

    def __init__(self, work: Any, hurt: Any) -> None:
        self.work, self.hurt = work, hurt

    def wait(self) -> None:
        self.work.wait()
        hurt, self.hurt = self.hurt, None
        if hurt is not None:
            hurt()

    def is_completed(self) -> bool:
        return self.work.is_completed()


class Damaging(ThreadBackend):
    """A rank whose next large ``verb`` is received with other bytes: ``damage(received)`` changes them."""

    verb = ""
    damage: Any = None

    def part(self, ranks):
        """The lines of it damage as well."""
        line = super().part(ranks)
        line.owner = self.owner
        return line

    @property
    def owner(self) -> Damaging:
        return self.__dict__.get("_owner", self)

    @owner.setter
    def owner(self, owner: Damaging) -> None:
        self.__dict__["_owner"] = owner

    def _hit(self, verb: str, work: Any, x: Tensor) -> Any:
        armed = self.owner
        if armed.damage is None or armed.verb != verb or x.numel() < 17 or x.dtype == torch.float64:
            return work
        damage, armed.damage = armed.damage, None
        return _Hurt(work, lambda: damage(x))

    def all_reduce(self, x):
        return self._hit("all_reduce", super().all_reduce(x), x)

    def all_to_all(self, out, inp):
        return self._hit("all_to_all", super().all_to_all(out, inp), out)

    def all_gather(self, out, inp):
        return self._hit("all_gather", super().all_gather(out, inp), out)

    def exchange(self, out, inp, dst, src):
        return self._hit("exchange", super().exchange(out, inp, dst, src), out)


def scale(value: float) -> Any:
    """Overwrites the first scale of the last row."""

    def damage(received: Tensor) -> None:
        received[-1].view(torch.uint8).view(-1)[:4].view(torch.float32)[0] = value

    return damage


def bit(received: Tensor) -> None:
    """Flips one bit in the middle."""
    data = received.view(-1).view(torch.uint8)
    data[data.numel() // 2] ^= 4


DAMAGES = {"bit": bit, "nan": scale(math.nan), "inf": scale(math.inf), "huge": scale(1e30), "negative": scale(-1e-3)}


def attempt(name: str, verb: str, damage: Any, before: int = 4, after: int = 12) -> list[tuple[str, bool]]:
    """What each of 3 ranks says when rank 1 receives something else, and whether it has changed nothing."""

    def run(backend):
        backend = Damaging(backend.world, backend.rank)
        model = Used()
        optimizer = make(name, model.parameters(), backend=backend)
        train(model, optimizer, range(before), backend.rank, 3)
        if backend.rank == 1:
            backend.verb, backend.damage = verb, damage
        for step in range(before, after):
            mine = [*params_of(model), *[t.clone() for b in optimizer.buckets for t in b.buffers.values()]]
            try:
                train(model, optimizer, range(step, step + 1), backend.rank, 3)
            except MessageDamaged as error:
                local = hasattr(optimizer, "base") or name == "ZeroOneAdam"  # which has taken its own local step
                now = [*params_of(model), *[t for b in optimizer.buckets for t in b.buffers.values()]]
                return str(error), local or same_bits(mine, now)
        return "nothing noticed", True

    return on_threads(3, run)


COMPRESSED = ["OneBitAdam", "OneBitAdam overlapping", "OneBitLamb", "OneBitLion", "ZeroOneAdam"]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("verb", ["all_to_all", "all_gather"])
@pytest.mark.parametrize("name", COMPRESSED)
def test_damage_of_what_is_compressed_is_noticed_and_nothing_used(name, verb, damage):
    for text, unchanged in attempt(name, verb, DAMAGES[damage]):
        assert f"{verb}: what rank 1 received from rank " in text
        assert "is not what was sent" in text
        assert unchanged


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_of_messages_that_all_gather_is_noticed(damage):
    for text, _ in attempt("SparseLoCo", "all_gather", DAMAGES[damage]):
        assert "all_gather: what rank 1 received from rank " in text
        assert "is not what was sent" in text


@pytest.mark.parametrize(
    ("name", "damage"), [("NoLoCo", "bit"), ("Gossip", "bit"), *(("Gossip, 8 bits", damage) for damage in DAMAGES)]
)
def test_damage_of_a_message_to_one_rank_is_noticed_by_all(name, damage):
    for text, unchanged in attempt(name, "exchange", DAMAGES[damage]):
        assert re.search(r"exchange: what rank 1 received from rank [02] is not what was sent", text)
        assert unchanged


ALL_REDUCING = [name for name in OUTER if name not in ("SparseLoCo", *GOSSIP)]


@pytest.mark.parametrize("name", ["OneBitAdam warming up", "CSER", "QSparseLocalSGD, blocks", *ALL_REDUCING])
def test_damage_of_a_mean_is_noticed(name):
    for text, unchanged in attempt(name, "all_reduce", bit, after=40):
        assert "all_reduce: the result on rank 1 is another than on the others" in text
        assert unchanged


@pytest.mark.parametrize("name", ["OneBitAdam warming up", "CSER", "QSparseLocalSGD, blocks"])
def test_a_mean_that_all_ranks_receive_alike_and_is_not_finite_is_refused(name):
    """What was sent and received adds up, so that only the values tell."""

    def run(backend):
        backend = Damaging(backend.world, backend.rank)
        model = Used()
        optimizer = make(name, model.parameters(), backend=backend)
        train(model, optimizer, range(4), backend.rank, 3)
        backend.verb, backend.damage = "all_reduce", lambda received: received.view(-1)[3].fill_(math.nan)
        with pytest.raises(MessageDamaged, match="what rank 0, 1, 2 received holds inf, NaN"):
            train(model, optimizer, range(4, 40), backend.rank, 3)
        return all(t.isfinite().all() for t in params_of(model))

    assert on_threads(3, run) == [True] * 3


def test_afterwards_steps_are_refused_until_a_state_is_loaded():
    def run(backend):
        backend = Damaging(backend.world, backend.rank)
        model = Toy()
        optimizer = OneBitAdam(model.parameters(), freeze_step=2, backend=backend)
        train(model, optimizer, range(4), backend.rank, 2)
        saved, weights = optimizer.state_dict(), params_of(model)
        if backend.rank == 0:
            backend.verb, backend.damage = "all_gather", bit
        for _ in range(2):
            with pytest.raises(MessageDamaged, match="rank 0 received from rank"):
                train(model, optimizer, range(4, 5), backend.rank, 2)
        optimizer.load_state_dict(saved)
        train(model, optimizer, range(4, 8), backend.rank, 2)
        other = Toy()
        same = OneBitAdam(other.parameters(), freeze_step=2, backend=backend)
        with torch.no_grad():
            for p, w in zip(other.parameters(), weights):
                p.copy_(w)
        same.load_state_dict(saved)
        train(other, same, range(4, 8), backend.rank, 2)
        return same_bits(params_of(model), params_of(other))

    assert on_threads(2, run) == [True, True]


@pytest.mark.parametrize("name", [*COMPRESSED, "CSER, signs"])
def test_a_momentum_that_is_not_finite_on_one_rank_spoils_no_other(name):
    """Its rank sends scales of NaN: all ranks refuse them, and their own momentum and parameters stay finite."""

    def run(backend):
        model = Used()
        optimizer = make(name, model.parameters(), backend=backend, guard=Guard(max_skipped=2))
        train(model, optimizer, range(6), backend.rank, 3)
        if backend.rank == 2:
            momentum = "momentum_buffer" if name == "CSER, signs" else "exp_avg"
            optimizer.state[model.weight][momentum].view(-1)[5] = math.nan
            if name == "ZeroOneAdam":
                optimizer.state[model.weight]["mean_momentum"].view(-1)[5] = math.nan
        with pytest.raises((MessageDamaged, NotFinite)):
            train(model, optimizer, range(6, 12), backend.rank, 3)
        clean = [*params_of(model), *[v for e in optimizer.state_dict()["state"].values() for v in e.values()]]
        return all(t.isfinite().all() for t in clean)

    assert on_threads(3, run)[:2] == [True, True]


def test_what_is_sound_is_what_can_be_right():
    for compressor in (Sign(block=64), Sign(block=None), Identity()):
        for dtype in (torch.float32, torch.float64):
            x = torch.randn(3, 200, dtype=dtype, generator=torch.Generator().manual_seed(0))
            payload = torch.zeros(3, compressor.nbytes(200, dtype), dtype=torch.uint8)
            compressor.compress(x, payload)
            assert compressor.is_sound(payload, 200, dtype)
            for value in (math.nan, math.inf, -math.inf):
                bad = payload.clone()
                kind = torch.float32 if isinstance(compressor, Sign) else dtype
                bad[2].view(kind)[0] = value
                assert not compressor.is_sound(bad, 200, dtype), (compressor, value)
    bad = torch.zeros(1, Sign().nbytes(64), dtype=torch.uint8)
    bad.view(torch.float32)[0, 0] = -1.0
    assert not Sign().is_sound(bad, 64)


def test_damage_of_what_a_step_has_sent_that_was_given_up_is_no_error_of_the_next_one():
    def run(backend):
        backend = Damaging(backend.world, backend.rank)
        model = Used()
        optimizer = make("OneBitAdam overlapping", model.parameters(), bucket_mb=1e-4, backend=backend)
        train(model, optimizer, range(4), backend.rank, 2)
        if backend.rank == 1:
            backend.verb, backend.damage = "all_to_all", bit
        backward(model, 4, backend.rank, 2)
        optimizer.load_state_dict(optimizer.state_dict())
        assert backend.damage is None
        train(model, optimizer, range(4, 6), backend.rank, 2)
        return params_of(model)

    assert same_bits(*on_threads(2, run))


@every_variant
def test_undamaged_runs_are_never_refused(name):
    def run(backend):
        model = Toy()
        optimizer = make(name, model.parameters(), backend=backend)
        train(model, optimizer, range(16), backend.rank, 4)
        return tensors_in(optimizer.state_dict())

    on_threads(4, run)


@pytest.mark.parametrize("c2", [RandomBlocks(4, 8), Sign(16)])
def test_a_mean_model_is_confirmed_as_well(c2):
    def run(backend):
        backend = Damaging(backend.world, backend.rank)
        model = Used()
        optimizer: Any = CSER(model.parameters(), lr=1e-2, period=3, compressor=c2, backend=backend)
        train(model, optimizer, range(4), backend.rank, 2)
        mine = params_of(model)
        if backend.rank == 1:
            backend.verb, backend.damage = "all_reduce", bit
        with (
            pytest.raises(MessageDamaged, match="all_reduce: the ranks received different results"),
            optimizer.averaged(),
        ):
            pass
        return same_bits(mine, params_of(model))

    assert on_threads(2, run) == [True, True]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8])
def test_nothing_sums_up_to_0(rows, dtype):
    """As of an empty parameter that has a bucket to itself."""
    assert row_sums(torch.empty(0, dtype=dtype), rows).tolist() == [0] * rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_a_message_sums_up_to_the_same_wherever_it_lies(dtype):
    """As a view of a buffer that does not begin at a whole word."""
    message = torch.arange(48, dtype=torch.uint8).view(dtype)
    shifted = torch.cat([message[:1], message])[1:]
    assert shifted.storage_offset() == 1
    assert row_sums(shifted, 3).tolist() == row_sums(message, 3).tolist()
