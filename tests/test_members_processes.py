"""Members in processes over Gloo: that are killed, stopped, or leave; that join; and whose store dies."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from bed import needs_bed, netbed
from forks import python
from ports import free_port
from worlds import needs_connections

PATIENCE = 3.0  # by which ranks may be apart where more processes than cores want to run
RANK = str(Path(__file__).with_name("member_rank.py"))


class Run:
    """Processes that train, and what they have left word of."""

    def __init__(self, port: int, patience: float = PATIENCE, host: str = "127.0.0.1") -> None:
        self.host, self.port, self.patience, self.processes = host, port, patience, {}
        self.store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False)

    def start(self, name: int, ranks: int = 0, reconnect: float = 0.0, through: int = 0, nic: str = "") -> None:
        given = (name, self.host, self.port, ranks, self.patience, reconnect, through or self.port)
        words = [python(), RANK, *map(str, given)]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)} | ({"GLOO_SOCKET_IFNAME": nic} if nic else {})
        self.processes[name] = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env)

    def number(self, key: str) -> int:
        return int(self.store.get(key)) if self.store.check([key]) else 0

    def rounds(self, name: int) -> int:
        return self.number(f"rounds {name}")

    def send(self, name: int, which: signal.Signals) -> None:
        pid = self.number(f"pid {name}")
        if not pid:  # 0 would be all processes of this test
            raise ProcessLookupError(f"rank {name} has not said its pid yet")
        os.kill(pid, which)

    def go_on(self, names: list[int], rounds: int = 2, seconds: float = 60.0) -> float:
        """Waits until each has ended so many more rounds; the seconds until it had ended the first."""
        before, begin, first = {name: self.rounds(name) for name in names}, time.monotonic(), 0.0
        while any(self.rounds(name) < before[name] + rounds for name in names):
            first = first or (time.monotonic() - begin if self.rounds(names[0]) > before[names[0]] else 0.0)
            assert time.monotonic() < begin + seconds, {name: self.rounds(name) - before[name] for name in names}
            ended = {name: self.said(name, 1) for name in set(names) - set(self.left())}
            assert not ended
            time.sleep(0.01)
        return first

    def left(self) -> list[int]:
        """The names of those that run."""
        return [name for name, process in self.processes.items() if process.poll() is None]

    def said(self, name: int, seconds: float, code: int = 1) -> str:
        """What a rank says that ends by itself, within so many seconds, with that exit code."""
        process = self.processes[name]
        assert process.wait(seconds) == code
        assert process.stdout is not None
        return process.stdout.read()

    def replicas_equal(self) -> None:
        """All that have ended a round have the same parameters after it, and as many members."""
        names = list(self.processes)
        for number in range(1, max(map(self.rounds, names)) + 1):
            keys = [key for name in names if self.store.check([key := f"after {name} {number}"])]
            assert len({self.store.get(key) for key in keys}) == 1, number

    def close(self) -> None:
        for name, process in self.processes.items():
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    self.send(name, signal.SIGKILL)
            process.kill()
            process.communicate()


@pytest.mark.long
def test_ranks_that_are_killed_or_stopped_and_ranks_that_join():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run, took = Run(store.port), {}
    try:
        for name in range(4):
            run.start(name, 4)
        run.go_on([0, 1, 2, 3], seconds=60)
        for name in (4, 5):
            run.start(name)
        run.go_on([4, 5, 0], seconds=60)
        run.send(3, signal.SIGKILL)
        took["killed between two rounds"] = run.go_on([0, 1, 2, 4, 5])
        store.set("in 2", "")
        took["killed in a round"] = run.go_on([0, 1, 4, 5], 3)
        run.send(1, signal.SIGSTOP)
        took["stopped"] = run.go_on([0, 4, 5])
        run.send(1, signal.SIGCONT)
        took["back"] = run.go_on([1, 0, 4, 5])
        store.set("view", "")
        while len(left := run.left()) == 4:
            time.sleep(0.01)
        took["killed while it publishes"] = run.go_on(left)
        run.send(left[0], signal.SIGKILL)
        run.go_on(left[1:])
        run.replicas_equal()
        run.send(left[1], signal.SIGKILL)  # the last but one
        said = run.said(left[2], 20)
        assert "NotEnoughMembers 1 of 2 members are there" in said
        assert "nothing is lost" in said
    finally:
        run.close()
    print({name: f"{seconds:.2f} s" for name, seconds in took.items()})


class Way:
    """A port of this machine that leads to another one, as long as it is open."""

    def __init__(self, to: int) -> None:
        self.to, self.port, self.ends = to, free_port(), []
        self.open()

    def open(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, args=(self.listener,), daemon=True).start()

    def close(self) -> None:
        for end in (self.listener, *self.ends):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self.ends = []

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                here = listener.accept()[0]
                there = socket.create_connection(("127.0.0.1", self.to))
                self.ends += [here, there]
                for ends in ((here, there), (there, here)):
                    threading.Thread(target=self._pass, args=ends, daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


@needs_connections
def test_a_rank_that_was_cut_off_from_the_store_joins_anew_when_it_reaches_it():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run, way = Run(store.port), Way(store.port)
    try:
        for name in range(3):
            run.start(name, 3, reconnect=60.0, through=way.port if name == 1 else 0)
        run.go_on([0, 1, 2], seconds=60)
        way.close()
        run.go_on([0, 2], rounds=4)
        assert run.left() == [0, 1, 2]
        way.open()
        run.go_on([1, 0, 2])
        assert run.number("began 1") == 0
        run.replicas_equal()
    finally:
        run.close()
        way.close()


@contextlib.contextmanager
def hosts() -> Iterator[tuple[netbed.NetBed, Run]]:
    """Three, with a rank each; the store is on the first."""
    with netbed.NetBed(3) as bed:
        with bed.inside(0):
            store = dist.TCPStore(bed.address(0), 0, is_master=True, wait_for_workers=False)
            run = Run(store.port, patience=5.0, host=bed.address(0))
        try:
            for name in range(3):
                with bed.inside(name):
                    run.start(name, 3, reconnect=60.0, nic=netbed.NIC)
            run.go_on([0, 1, 2])
            yield bed, run
            run.replicas_equal()
        finally:
            run.close()


@pytest.mark.long
@needs_bed
def test_a_host_whose_cable_was_pulled_joins_anew_when_it_is_back():
    """Nothing tells it that it is cut off: its store does not answer within 8 s."""
    with hosts() as (bed, run):
        bed.cut(1)
        until = time.monotonic() + 12
        while time.monotonic() < until:
            run.go_on([0, 2])
        assert run.left() == [0, 1, 2]
        bed.mend(1)
        run.go_on([1, 0, 2])


@pytest.mark.long
@needs_bed
def test_a_host_that_others_do_not_reach_joins_anew_when_they_do():
    """It reaches the store and another host all the time; the exchanges of all three fail after 8 s."""
    with hosts() as (bed, run):
        bed.cut_between(1, 2)
        run.go_on([0, 1])
        bed.mend_between(1, 2)
        run.go_on([2, 0, 1])
        assert run.number("began 2") == 0


def test_nobody_waits_for_ranks_that_leave_and_when_the_last_has_the_run_has_ended():
    """They would have the patience for longer than this test has."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run = Run(store.port, patience=300.0)
    try:
        for name in range(3):
            run.start(name, 3)
        run.go_on([0, 1, 2], seconds=60)
        for name, left in ((1, [0, 2]), (0, [2]), (2, [])):
            store.set(f"leave {name}", "")
            assert run.said(name, 60, code=0) == ""
            run.go_on(left)
        run.replicas_equal()
        run.start(3)
        assert "LeftOut the run of this store has ended: all its members have left" in run.said(3, 60)
    finally:
        run.close()


def test_when_the_host_of_the_store_dies_all_say_so():
    port = free_port()
    code = f"import time, torch.distributed as d; s = d.TCPStore('127.0.0.1', {port}, is_master=True, "
    host = subprocess.Popen([python(), "-c", f"{code} wait_for_workers=False); print(0, flush=True); time.sleep(300)"])
    run = Run(port)
    try:
        for name in range(2):
            run.start(name, 2)
        run.go_on([0, 1], seconds=60)
        host.kill()
        for name in range(2):
            assert "StoreLost the store of the members cannot be reached" in run.said(name, 30)
    finally:
        host.kill()
        host.wait()
        for process in run.processes.values():
            process.kill()
            process.communicate()
