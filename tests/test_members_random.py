"""A thousand rounds of members that die, come too late, leave and join, at random, on threads."""

from __future__ import annotations

import itertools
import logging
import math
import random
import threading
import time
from collections import Counter

import pytest
import torch
from member_world import Died, Rendezvous
from worlds import on_one_core

from commopt import LocalSGD
from commopt.comm import given_up

ROUNDS = 1000
FAULTS = {"dies": 0.005, "dies in it": 0.01, "late": 0.015, "leaves": 0.03}
"""What a rank does before the end of a round, with which probability, added up."""


class Chaos:
    """Ranks that average what they draw.

    Attributes:
        after: the parameters after each round, which must be the same for all.
        brought: of each rank, by its ticket, what it has brought to a round.
        faults: how many there were.
    """

    def __init__(self) -> None:
        self.world, self.rng, self.lock = Rendezvous(), random.Random(5), threading.Lock()
        self.after: dict[int, list[float]] = {0: [0.0] * 3}
        self.brought: dict[tuple[int, int], list[float]] = {}
        self.faults: Counter[str] = Counter()
        self.last = 0  # how many rounds there were at the last fault
        self.names = itertools.count()
        self.running: list[threading.Thread] = []
        self.failed: list[BaseException] = []

    def alive(self) -> int:
        return sum(thread.is_alive() for thread in self.running)

    def start(self, ranks: int | None = None) -> None:
        def main() -> None:
            try:
                self.rank(next(self.names), ranks)
            except Died:
                pass
            except BaseException as error:
                if len(self.after) <= ROUNDS or "all its members have left" not in str(error):
                    self.failed.append(error)

        self.running.append(threading.Thread(target=main, daemon=True))
        self.running[-1].start()

    def ended(self, members, number, found) -> None:
        """A round has ended for a rank of ``members``, with the parameters ``found``."""
        with self.lock:
            came = [self.brought[ticket, number] for ticket in members.roster.view.members]
            mean = [math.fsum(column) / len(came) for column in zip(*came)]
            assert found == pytest.approx(mean, rel=0, abs=1e-12)
            assert self.after.setdefault(number + 1, found) == found

    def rank(self, name: int, ranks: int | None) -> None:
        chaos = self

        class Recorded(LocalSGD):
            def outer_step(self, bucket, group, pseudo_gradient, ctx):
                super().outer_step(bucket, group, pseudo_gradient, ctx)
                chaos.ended(self.members, ctx.number, bucket["anchor"][: bucket.numel].tolist())

        p = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
        settings = {"patience": 0.25, "timeout": 2.0, "quorum": 1, "join_timeout": 30.0, "max_z": None}
        members = self.world.members(name, ranks=ranks, **settings)
        optimizer = Recorded([p], torch.optim.SGD, lr=1.0, period=1, members=members)
        while (done := optimizer.param_groups[0]["rounds"]) < ROUNDS:
            with self.lock:
                assert p.tolist() == self.after[done]
                p.grad = torch.tensor([self.rng.uniform(-1, 1) for _ in range(3)], dtype=torch.float64)
                self.brought[members.roster.ticket, done] = (p.detach() - p.grad).tolist()
                fault = self.draw(members)
            if fault == "dies":
                raise Died
            if fault == "leaves":
                break
            if fault == "dies in it":
                self.world.fuse[name] = self.rng.randrange(2)
            if fault == "late":
                time.sleep(0.5)
            optimizer.step()
        members.leave()

    def draw(self, members) -> str | None:
        """A fault, now and then: one at a time, and while there are enough members, so that one is always left."""
        drawn, number = self.rng.random(), len(self.after)
        fault = next((name for name, upto in FAULTS.items() if drawn < upto), None)
        if fault is None or len(members.names) < 3 or number < self.last + 3:
            return None
        self.last = number
        self.faults.update([fault])
        return fault


@pytest.mark.long
def test_a_thousand_rounds_of_random_faults(caplog, monkeypatch):
    """Each round that ends is the mean of what its members have brought, to 1e-12, for all of them; nobody hangs, and
    all are equal in the end."""
    caplog.set_level(logging.ERROR, "commopt")
    monkeypatch.setattr(given_up, "LOOK", 0.05)
    chaos, end = Chaos(), time.monotonic() + 300
    with on_one_core():
        for _ in range(3):
            chaos.start(3)
        while chaos.alive() and not chaos.failed:
            assert time.monotonic() < end, f"hangs after {len(chaos.after)} rounds"
            time.sleep(0.05)
            if len(chaos.after) < ROUNDS and chaos.alive() < 4:
                chaos.start()
    if chaos.failed:
        raise chaos.failed[0]
    assert len(chaos.after) == ROUNDS + 1
    assert set(chaos.faults) == set(FAULTS)
    assert chaos.world.store.num_keys() < 100  # of thousands that there were
