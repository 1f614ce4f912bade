"""Ranks that are late, stopped, killed or never come: the others say for whom they wait, and whom they lacked.

``drill(world_size)`` plays all scenes of processes in one world and returns what every rank saw, by scene.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from forks import python
from listening import listening
from ports import free_port
from torch import nn
from worlds import Used, needs_mpi, on_mpi, params_of, same_bits, train

from commopt import LocalSGD, OneBitAdam
from commopt.comm import (
    CollectiveError,
    LocalBackend,
    MPIBackend,
    NodesBackend,
    ThreadBackend,
    ThreadWorld,
    first_notice,
    given_up,
    set_first_notice,
    wait,
)
from commopt.comm.meeting import Meeting, StoreMeeting
from commopt.comm.watch import named

SETTINGS: dict[str, Any] = {"lr": 1e-2, "freeze_step": 2, "bucket_mb": 1.2e-4}


@contextlib.contextmanager
def notices(seconds: float) -> Iterator[list[str]]:
    """What is said meanwhile, with the first notice after ``seconds``."""
    before = first_notice()
    set_first_notice(seconds)
    try:
        with listening() as lines:
            yield lines
    finally:
        set_first_notice(before)


def failure(call: Callable[[], Any]) -> str:
    """What ``call()`` raises."""
    try:
        call()
    except CollectiveError as error:
        return str(error)
    return "nothing was raised"


# threads --------------------------------------------------------------------------------------------------------------


def waiting_in(lines: list[str]) -> list[str]:
    return [line for line in lines if "waiting" in line]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_rank_that_is_late_is_named_with_step_and_bucket_and_changes_nothing(overlap):
    def run(backend: ThreadBackend, seconds: float) -> Any:
        model = Used()
        optimizer = OneBitAdam(model.parameters(), backend=backend, overlap=overlap, **SETTINGS)
        train(model, optimizer, range(3), backend.rank, 3)
        if backend.rank == 1:
            time.sleep(seconds)
        train(model, optimizer, range(3, 5), backend.rank, 3)
        return params_of(model)

    with notices(0.3) as lines:  # a busy machine makes others late by 0.1 s
        late = ThreadWorld(3).run(lambda backend: run(backend, 1.5))
    assert any("step 4, " in line and "waiting for rank 1 for 0." in line for line in waiting_in(lines)), lines
    assert all("waiting for rank 1 for" in line for line in waiting_in(lines) if "step 4" in line)
    with notices(30.0) as lines:
        punctual = ThreadWorld(3).run(lambda backend: run(backend, 0.0))
    assert not waiting_in(lines)
    assert all(same_bits(a, b) for a, b in zip(late, punctual))


def test_one_rank_speaks_for_all_and_ever_more_rarely():
    def run(backend: ThreadBackend) -> None:
        if backend.rank == 2:
            time.sleep(1.0)
        wait(backend.all_reduce(torch.zeros(1)), "step 7, bucket 3 of 8")

    with notices(0.1) as lines:
        ThreadWorld(4).run(run)
    assert len(lines) == 3, lines  # after 0.1, 0.3 and 0.6 s; the next after 3
    assert all(line.startswith("step 7, bucket 3 of 8: waiting for rank 2 for 0.") for line in lines)


def test_the_error_of_a_collective_names_the_ranks_that_never_joined():
    def run(backend: ThreadBackend) -> str:
        if backend.rank in (1, 3):
            return ""
        return failure(lambda: wait(backend.all_reduce(torch.zeros(1)), "step 7"))

    said = ThreadWorld(4, timeout=0.5).run(run)
    assert said[0].startswith("step 7: ranks 1 and 3 did not join within 0.5 s: ")
    assert said[2].startswith("step 7: ranks 1 and 3 did not join within 0.5 s: ")


def test_ranks_inside_a_node_are_named_by_their_number_in_the_world():
    def run(backend: ThreadBackend) -> None:
        part = backend.part([1, 2]) if backend.rank in (1, 2) else None
        if backend.rank == 2:
            time.sleep(0.4)
        if part is not None:
            wait(part.all_reduce(torch.zeros(1)), "inside")

    with notices(0.1) as lines:
        ThreadWorld(3).run(run)
    assert lines[0].startswith("inside: waiting for rank 2 for")


def test_construction_and_the_grid_of_nodes_are_not_waited_for_in_silence():
    def run(backend: ThreadBackend) -> None:
        if backend.rank == 3:
            time.sleep(0.5)
        nodes = backend.nodes(2)
        assert isinstance(nodes, NodesBackend)
        if backend.rank == 1:
            time.sleep(0.5)
        OneBitAdam(Used().parameters(), backend=nodes, **SETTINGS)

    with notices(0.1) as lines:
        ThreadWorld(4).run(run)
    assert any(line.startswith("construction of NodesBackend: waiting for rank 3 for") for line in lines), lines
    assert any(line.startswith("construction of the optimizer") and "rank 1 for" in line for line in lines), lines


def test_work_of_a_backend_that_knows_nothing_of_this_is_waited_for_as_ever():
    class Plain:
        def wait(self) -> None:
            raise RuntimeError("lost")

        def is_completed(self) -> bool:
            return False

    with pytest.raises(CollectiveError, match=r"^step 3: lost$"):
        wait(Plain(), "step 3")


class Silent:
    """Work that does not know before ``wait()`` whether it is completed; after it, once ``over`` is set."""

    def __init__(self, error: Exception | None = None) -> None:
        self.arrived, self.over, self.error, self.waits = threading.Event(), threading.Event(), error, 0
        self.over.set()

    def wait(self) -> None:
        self.arrived.wait(30)
        self.waits += 1
        if self.error is not None:
            raise self.error

    def is_completed(self) -> bool:
        return self.waits > 0 and self.over.is_set()


def given_up_work(inner: Silent, why: Callable[[], str | None]) -> Any:
    backend: Any = LocalBackend()
    backend.all_reduce = lambda x: inner
    return given_up.GivenUp(backend, why, "the test").all_reduce(torch.zeros(1))


def test_members_wait_for_work_that_does_not_know_whether_it_is_completed(monkeypatch):
    monkeypatch.setattr(given_up, "LOOK", 0.01)
    work = Silent()
    threading.Timer(0.1, work.arrived.set).start()
    given_up_work(work, given_up.nobody_has).wait()
    assert work.waits == 2  # in a thread, and then where the current stream is the caller's


def test_members_give_up_work_that_does_not_know_whether_it_is_completed(monkeypatch):
    monkeypatch.setattr(given_up, "LOOK", 0.01)
    never, early, failed = Silent(), Silent(), Silent(RuntimeError("lost"))
    early.over.clear()  # as of NCCL, whose wait() returns before that
    for work in (early, failed):
        work.arrived.set()
    for work, said in ((never, "others gone"), (early, "others gone"), (failed, "lost")):
        end = time.monotonic() + 0.1
        with pytest.raises(RuntimeError, match=said):
            given_up_work(work, lambda end=end: "others gone" if time.monotonic() > end else None).wait()
    never.arrived.set()


@pytest.mark.parametrize(
    ("of_torch", "left"),
    [
        ("[/third_party/gloo/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3",
         "Connection closed by peer [127.0.0.1]:3"),
        ("Read error [::1]:3: Connection reset by peer. This is typically caused by a remote worker hanging or bugs in "
         "the application. Check the logs of the remote worker before reporting an error. GLHF! \U0001f3d6\ufe0f: more",
         "Read error [::1]:3: Connection reset by peer: more"),
        ("NCCL error in: x.cu:3\nLast error:\n  nothing", "NCCL error in: x.cu:3 Last error: nothing"),
    ],
)  # fmt: skip
def test_asides_of_torch_are_left_out(of_torch, left):
    assert str(CollectiveError(f"step 3: {of_torch}")) == f"step 3: {left}"


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), True, "10"])
def test_seconds_that_cannot_be(seconds):
    with pytest.raises(ValueError, match="seconds until the first notice must be a number > 0, got"):
        set_first_notice(seconds)


def test_many_ranks_are_not_all_named():
    assert named([2]) == "rank 2"
    assert named([1, 2, 5]) == "ranks 1, 2 and 5"
    assert named(list(range(20))) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"


# processes ------------------------------------------------------------------------------------------------------------

TIMEOUT = 3.0


class Drill:
    """One rank of a world of processes over Gloo, some of which fail.

    Every scene has a process group of its own, because one that has failed is broken for good, and ends where all ranks
    that are left meet in the store.
    """

    def __init__(self, rank: int, world: int, port: int) -> None:
        self.rank, self.world = rank, world
        # ours: what a test waits by must not be what the scenes break
        self.store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, timeout=timedelta(seconds=60))
        dist.init_process_group("gloo", store=dist.PrefixStore("torch", self.store), rank=rank, world_size=world)
        self.out: dict[str, Any] = {}
        self.scene = 0
        self.store.set(f"pid{rank}", str(os.getpid()))
        self.pids = [int(self.store.get(f"pid{r}")) for r in range(world)]

    def meet(self, name: str, ranks: int) -> None:
        self.store.add(name, 1)
        while int(self.store.add(name, 0)) < ranks:
            time.sleep(0.02)

    def trained(self, overlap: bool = False) -> tuple[Any, Any]:
        self.scene += 1
        self.meet(f"scene {self.scene}", self.world)
        group = dist.new_group(list(range(self.world)), timedelta(seconds=TIMEOUT))
        model = Used()
        optimizer = OneBitAdam(model.parameters(), process_group=group, overlap=overlap, **SETTINGS)
        train(model, optimizer, range(4), self.rank, self.world)
        return model, optimizer

    def go_on(self, trained: tuple[Any, Any], steps: int = 1) -> None:
        train(*trained, range(4, 4 + steps), self.rank, self.world)

    def left_in_store(self) -> list[str]:
        """Keys of ours, where torch can list them."""
        keys = self.store.list_keys() if hasattr(self.store, "list_keys") else []
        return [key for key in keys if "commopt" in key]

    def late(self, overlap: bool) -> None:
        """Rank 1 comes a second late to a step, and the other ranks go on as if nothing had been."""
        trained = self.trained(overlap)
        if self.rank == 1:
            time.sleep(1.2)
        with notices(0.3) as lines:
            self.go_on(trained)
        self.meet(f"late {overlap}", self.world)
        self.out[f"late {overlap}"] = {"said": lines, "keys": self.left_in_store()}

    def absent(self, overlap: bool) -> None:
        """Rank 2 never comes to a step."""
        trained = self.trained(overlap)
        if self.rank != 2:
            with notices(0.3) as lines:
                self.out[f"absent {overlap}"] = {"error": failure(lambda: self.go_on(trained)), "said": lines}
        self.meet(f"absent {overlap}", self.world)

    def late_construction(self) -> None:
        """Rank 2 makes its optimizer a second late."""
        group = dist.new_group(list(range(self.world)), timedelta(seconds=20))
        if self.rank == 2:
            time.sleep(1.2)
        with notices(0.3) as lines:
            OneBitAdam(Used().parameters(), process_group=group, **SETTINGS)
        self.out["construction"] = {"said": lines}
        self.meet("construction", self.world)

    def stopped(self, victim: int, by: int) -> None:
        """A rank is stopped (SIGSTOP), and comes back when the others have failed."""
        trained, name = self.trained(), f"stopped {victim}"
        self.meet(f"{name} begins", self.world)
        if self.rank == by:
            os.kill(self.pids[victim], signal.SIGSTOP)
        time.sleep(0.3)
        if self.rank != victim:
            with notices(0.3) as lines:
                self.out[name] = {"error": failure(lambda: self.go_on(trained)), "said": lines}
            if self.rank == by:
                time.sleep(0.5)
                os.kill(self.pids[victim], signal.SIGCONT)
        self.meet(name, self.world)

    def killed(self, while_waiting: bool) -> None:
        """Rank 2 is killed, in its own code or while it waits for the others; the last scene."""
        trained = self.trained()
        self.meet("killed begins", self.world)
        with notices(0.3) as lines:
            if self.rank == 2 and not while_waiting:
                os.kill(os.getpid(), signal.SIGKILL)
            if self.rank == 2:
                threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
            else:
                time.sleep(1.5 if while_waiting else 0.1)
            self.out["killed"] = {"error": failure(lambda: self.go_on(trained)), "said": lines}
        self.meet("killed", self.world - 1)

    def calls(self) -> None:
        """Rank 1 takes a step less, and averages something over the same ranks."""
        group = dist.new_group(list(range(self.world)), timedelta(seconds=TIMEOUT))
        model = Used()
        optimizer = LocalSGD(model.parameters(), lr=0.1, period=2, process_group=group)
        train(model, optimizer, range(2), self.rank, self.world)

        def go_on() -> None:
            train(model, optimizer, range(2, 4 - self.rank), self.rank, self.world)
            if self.rank == 1:
                wait(optimizer.topology.backend.all_reduce(torch.zeros(1)), "evaluation, mean loss")

        with notices(0.3) as lines:
            self.out["calls"] = {"error": failure(go_on), "said": lines}
        self.meet("calls", self.world)

    def join(self, attached: bool, outer: bool = False) -> None:
        """torch's Join around uneven batches: rank 2 has fewer."""
        from torch.distributed.algorithms import Join

        from commopt import attach

        group = dist.new_group(list(range(self.world)), timedelta(seconds=TIMEOUT))
        model: Any = nn.parallel.DistributedDataParallel(Used(), process_group=group, find_unused_parameters=True)
        optimizer: Any = (
            LocalSGD(model.parameters(), process_group=group, period=50)
            if outer
            else OneBitAdam(model.parameters(), process_group=group, **SETTINGS)
        )
        if attached:
            attach(model, optimizer)
        steps, said = 0, ""
        try:
            with notices(0.3) as lines, Join([model]):
                for t in range(4 if self.rank == 2 else 8):
                    train(model, optimizer, range(t, t + 1), self.rank, self.world)
                    steps += 1
        except RuntimeError as error:
            said = str(error)
        self.out[f"join {attached} {outer}"] = {"steps": steps, "error": said, "said": lines}
        self.meet(f"join {attached} {outer}", self.world)


def rank_main(rank: int, world: int, port: int, scenes: str, folder: str) -> None:
    torch.set_num_threads(1)
    train(Used(), OneBitAdam(Used().parameters(), **SETTINGS), range(1))  # what torch imports late takes seconds
    drill = Drill(rank, world, port)
    for scene in scenes.split(","):
        name, *arguments = scene.split()
        getattr(drill, name)(*(json.loads(a) for a in arguments))
    Path(folder, str(rank)).write_text(json.dumps(drill.out))
    if rank == 0:
        time.sleep(1.0)  # it has the store
    os._exit(0)


def drill(*scenes: str, world: int = 3) -> tuple[list[dict[str, Any]], list[int], str]:
    """Plays ``scenes`` ("late true") on ``world`` processes.

    Returns:
        what each rank saw, by scene ({} of one that was killed), their exit codes, and what they wrote to stderr.
    """
    port = str(free_port())
    with tempfile.TemporaryDirectory() as folder:
        command = [python(), __file__, "RANK", str(world), port, ",".join(scenes), folder]
        ranks = []
        for r in range(world):
            command[2] = str(r)
            ranks.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        try:
            errors = "".join(process.communicate(timeout=150)[1] for process in ranks)
        finally:
            for process in ranks:
                process.kill()
        files = [Path(folder, str(r)) for r in range(world)]
        seen = [json.loads(file.read_text()) if file.exists() else {} for file in files]
    return seen, [process.returncode for process in ranks], errors


SCENES = (
    "late false", "late true", "absent false", "absent true", "late_construction", "join true", "join false",
    "join true true", "join false true", "stopped 2 1", "stopped 0 1",
)  # fmt: skip


@pytest.fixture(scope="module")
def world() -> list[dict[str, Any]]:
    """Scenes after which all ranks are still there; the last one is that a rank is killed."""
    seen, codes, errors = drill(*SCENES, "killed false")
    assert codes == [0, 0, -signal.SIGKILL], errors
    return seen


@pytest.mark.parametrize("overlap", [False, True])
def test_over_gloo_a_late_rank_is_named_and_no_word_stays_in_the_store(world, overlap):
    said = world[0][f"late {overlap}"]["said"]
    assert any("step 5, " in line and "waiting for rank 1 for" in line for line in said), said
    assert world[0][f"late {overlap}"]["keys"] == []


@pytest.mark.parametrize("overlap", [False, True])
def test_over_gloo_a_rank_that_never_comes_is_named(world, overlap):
    for rank in (0, 1):
        seen = world[rank][f"absent {overlap}"]
        assert "step 5, " in seen["error"]
        assert ": rank 2 did not join within 3 s: " in seen["error"]
    assert any("waiting for rank 2 for" in line for line in world[0][f"absent {overlap}"]["said"])


def test_over_gloo_a_rank_that_is_late_to_construction_is_named(world):
    assert any("waiting for rank 2 for" in line for line in world[0]["construction"]["said"])


def test_over_gloo_a_rank_that_is_stopped_is_named(world):
    for rank in (0, 1):
        assert ": rank 2 did not join within 3 s: " in world[rank]["stopped 2"]["error"]
    assert any("waiting for rank 2 for" in line for line in world[0]["stopped 2"]["said"])


def test_without_the_store_it_is_said_that_nobody_knows(world):
    """Rank 0 runs the store."""
    seen = world[1]["stopped 0"]
    assert "who is missing is not known (the store of the process group cannot be reached" in seen["error"]
    assert any("for whom is not known: the store of the process group" in line for line in seen["said"])


def test_over_gloo_a_rank_that_was_killed_has_gone(world):
    for rank in (0, 1):
        assert "rank 2 has gone: " in world[rank]["killed"]["error"]


def test_over_gloo_a_rank_that_was_killed_while_it_waited_has_gone_though_it_has_left_word():
    seen, codes, errors = drill("killed true")
    assert codes == [0, 0, -signal.SIGKILL], errors
    for rank in (0, 1):
        assert "rank 2 has gone: " in seen[rank]["killed"]["error"]


# torch's Join ---------------------------------------------------------------------------------------------------------


def test_uneven_batches_under_join_are_an_error_and_no_abort(world):
    for rank in (0, 1):
        for attached in (True, False):  # or by the first step
            for outer in (True, False):
                assert world[rank][f"join {attached} {outer}"]["steps"] == 0
                assert "drop_last=True" in world[rank][f"join {attached} {outer}"]["error"]


# MPI ------------------------------------------------------------------------------------------------------------------


def mpi_scenes() -> dict[str, Any]:
    from mpi4py import MPI

    out: dict[str, Any] = {}
    backend = MPIBackend(MPI.COMM_WORLD.Dup(), timeout=20.0)
    model = Used()
    optimizer = OneBitAdam(model.parameters(), backend=backend, overlap=True, **SETTINGS)
    train(model, optimizer, range(4), backend.rank, backend.world_size)
    if backend.rank == 2:
        time.sleep(1.5)
    with notices(0.3) as lines:
        train(model, optimizer, range(4, 5), backend.rank, backend.world_size)
    out["late"] = lines
    brief = MPIBackend(MPI.COMM_WORLD.Dup(), timeout=1.0)
    wait(brief.all_reduce(torch.zeros(1)), "first")
    MPI.COMM_WORLD.Barrier()
    out["channels"] = "" if backend.rank == 1 else failure(lambda: brief.channels(1))
    MPI.COMM_WORLD.Barrier()
    if backend.rank == 1:
        failure(lambda: brief.channels(1))
    MPI.COMM_WORLD.Barrier()
    return out


@pytest.mark.long
@needs_mpi
def test_over_mpi_a_late_rank_is_named_and_making_lines_has_the_timeout():
    ranks = on_mpi(3, mpi_scenes)
    said = [line for rank in ranks[:2] for line in rank["late"]]
    assert any("step 5, " in line and "waiting for rank 2 for" in line for line in said), said
    for rank in (0, 2):
        assert ranks[rank]["channels"].startswith("duplicating the communicator: rank 1 did not join within 1 s: ")


def test_a_word_that_is_taken_back_while_it_is_read_is_none():
    class Torn:
        """A store whose keys go between two questions; torch's gives "" then."""

        def check(self, keys: list[str]) -> bool:
            return True

        def get(self, key: str) -> bytes:
            word = {"state": "waits", "where": "", "started": {"world": 3}}
            return b"" if key == "1" else json.dumps(word).encode()

    roll = StoreMeeting(cast("Any", Torn()), 0, [0, 1, 2]).absent("world", 2, ("waits",))
    assert (roll.absent, roll.unknown) == ([1], "")


class Words(Meeting):
    """Ranks that hear each other at once."""

    said: dict[int, str]

    def send(self, word: str) -> None:
        self.said[self.rank] = word

    def hear(self) -> dict[int, str]:
        return {rank: word for rank, word in self.said.items() if rank != self.rank}


@pytest.mark.parametrize(
    ("mine", "theirs", "is_other"),
    [
        ("DiLoCo, synchronisation 2, agreement of the ranks", "averaged(), whether all ranks can", True),
        ("step 8, agreement of the ranks on it", "step 9, agreement of the ranks on it", True),
        ("step 8, agreement of the ranks on it", "OneBitAdam, step 8, bucket 1 of 2 (3 parameters)", False),
        (
            "Gossip, synchronisation 1, bucket 1 of 1, exchange with rank 0",
            "Gossip, synchronisation 1, bucket 1",
            False,
        ),
        ("averaged(), whether all ranks can", "averaged(), the mean", False),
    ],
)
def test_a_rank_that_waits_in_another_call_is_named_with_it(mine: str, theirs: str, is_other: bool) -> None:
    said: dict[int, str] = {}
    ranks = [Words(rank, [4, 7]) for rank in range(2)]
    for rank, where in zip(ranks, (mine, theirs)):
        rank.said = said
        rank.start("world")
        rank.tell("waits", where)
    roll = ranks[0].absent("world", 0, ("waits",))
    assert (roll.absent, roll.first) == ([], True)
    assert roll.elsewhere == ({7: ", ".join(theirs.split(", ")[:2])} if is_other else {})


@pytest.mark.parametrize("state", ["waits", "late", "failed"])
def test_a_rank_that_waits_in_an_earlier_collective_is_not_named_beside_one_that_says_nothing(state: str) -> None:
    said: dict[int, str] = {}
    ranks = [Words(rank, [4, 7, 9]) for rank in range(3)]
    for rank in ranks:
        rank.said = said
        rank.start("world")
    ranks[1].start("world")  # rank 9 has stopped when its message for rank 7 had gone out, and that for rank 4 had not
    for rank in ranks[:2]:
        rank.tell(state, "step 8")
    earlier, later = (rank.absent("world", number, (state,)) for number, rank in enumerate(ranks[:2]))
    assert (earlier.absent, earlier.first) == ([9], True)
    assert (later.absent, later.first) == ([9], False)
    ranks[2].tell(state, "step 8")  # nobody is silent: ranks 4 and 9 are who has not come
    assert ranks[1].absent("world", 1, (state,)).absent == [4, 9]


def test_over_gloo_ranks_in_different_calls_are_told_which() -> None:
    outs, _, _ = drill("calls", world=2)
    calls = ["LocalSGD, synchronisation 2", "evaluation, mean loss"]
    for rank in range(2):
        error = outs[rank]["calls"]["error"]
        assert error.startswith(calls[rank])
        assert f"rank {1 - rank} is in another call ({calls[1 - rank]}" in error
        assert "all ranks must make the same calls" in error
    assert outs[0]["calls"]["error"].endswith("; nothing is lost")
    assert any("rank 1 is in another call (evaluation, mean loss" in line for line in outs[0]["calls"]["said"])


# what it costs --------------------------------------------------------------------------------------------------------


def test_a_fast_wait_tells_nobody_anything():
    def run(backend: ThreadBackend) -> None:
        optimizer = LocalSGD([nn.Parameter(torch.ones(3))], lr=0.1, period=1, backend=Told(backend.world, backend.rank))
        for _ in range(3):
            optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
            optimizer.step()

    told: list[str] = []

    class Told(ThreadBackend):
        def _start(self, *arguments: Any) -> Any:
            work = super()._start(*arguments)
            work.tell = told.append
            return work

    with notices(30.0):
        ThreadWorld(2).run(run)
    assert not told


if __name__ == "__main__":
    rank_main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5])
