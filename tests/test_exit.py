"""How a process over Gloo ends: in order, even if collectives are still being cleared away, or never end."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from forks import python
from ports import free_port

SCRIPT = """
import sys, time, torch, torch.distributed as dist
from commopt.comm import TorchBackend

rank, port, alone = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "alone"
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
backend = TorchBackend()
how = sys.argv[3]
lines = backend.channels(300 if how == "many" else 3)
if how == "many":
    from commopt.comm import gloo
    gloo.AT_EXIT = 0.5  # for one of them
cycle = [lines]
cycle.append(cycle)  # so that nothing is freed before Python ends
for _ in range(1 if how == "many" else 20):
    for one in lines if alone else [*lines, backend]:
        one.all_reduce(torch.ones(20000))
if alone:
    dist.barrier()
    if rank == 1:
        time.sleep(60)
    lines[0].all_reduce(torch.ones(9))
    sys.exit(3)
dist.destroy_process_group()
"""


def start(how: str) -> list[subprocess.Popen[str]]:
    port = str(free_port())
    programs = [sys.executable, sys.executable if how == "together" else python()]  # else what rank 0 does is the law
    return [
        subprocess.Popen([program, "-c", SCRIPT, str(r), port, how], stderr=subprocess.PIPE, text=True)
        for r, program in enumerate(programs)
    ]


@pytest.mark.long
def test_processes_end_in_order_while_collectives_are_in_flight():
    processes = start("together")
    said = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said


@pytest.mark.long
def test_processes_end_in_order_with_more_groups_than_can_end_in_the_time_for_one():
    processes = start("many")
    said = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said


LATE = """
import os, sys, time, torch, torch.distributed as dist
from commopt.comm import TorchBackend, gloo

rank, port = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
gloo.AT_EXIT = 0.1
lines = TorchBackend().channels(2)

class Last:
    def __del__(self, write=os.write, sleep=time.sleep):
        write(1, b"x")  # Python shuts down, and now the other rank goes
        sleep(2)

if rank == 1:
    time.sleep(600)
last = Last()
for line in lines:
    line.all_reduce(torch.ones(1 << 20))  # nobody holds these but Gloo
if sys.argv[3] == "lines end first":
    del line, lines
sys.exit(3)
"""


@pytest.mark.long(but="lines end first")
@pytest.mark.parametrize("which", ["lines end last", "lines end first"])
def test_a_rank_that_goes_while_another_shuts_down_does_not_end_that_with_a_signal(which):
    port = str(free_port())
    waiting, absent = (
        subprocess.Popen([program, "-c", LATE, str(r), port, which], stdout=subprocess.PIPE)
        for r, program in enumerate([sys.executable, python()])
    )
    try:
        assert waiting.stdout is not None
        assert waiting.stdout.read(1) == b"x"
        absent.kill()
        assert waiting.wait(timeout=60) == 3
    finally:
        for process in (waiting, absent):
            process.kill()
            process.communicate()


@pytest.mark.long
def test_a_process_does_not_wait_at_its_end_for_ranks_that_never_join():
    waiting, absent = start("alone")
    began = time.monotonic()
    try:
        _, err = waiting.communicate(timeout=50)  # Gloo's own timeout is half an hour
        assert waiting.returncode != 0, err
        assert time.monotonic() - began < 45
    finally:
        absent.kill()
        absent.communicate()


ASKING = """
import sys, time
from contextlib import suppress
from datetime import timedelta
import torch.distributed as dist
from commopt.comm import CollectiveError
from commopt.comm.given_up import connected, nobody_has
from commopt.comm.meeting import StoreMeeting
from commopt.comm.store import StoreClient

store = dist.HashStore()
answer = lambda store, *_: store.wait(["never"], timedelta(seconds=1.7))
with suppress(CollectiveError):
    if sys.argv[1] == "who is missing":
        StoreMeeting(store, 0, [0, 1])._ask(answer)
    elif sys.argv[1] == "members":
        StoreClient(store, 1.0).ask(answer)
    else:
        connected(answer, store, "members", 0, 2, 1.0, 1.0, nobody_has)

class TornDown:
    sleep = time.sleep
    def __del__(self):
        self.sleep(1.5)

last = TornDown()
"""


@pytest.mark.parametrize("asks", ["who is missing", "members", "connections"])
def test_a_process_ends_in_order_though_an_answer_that_it_has_given_up_comes_as_it_ends(asks):
    process = subprocess.Popen([sys.executable, "-c", ASKING, asks], stderr=subprocess.PIPE, text=True)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 0, said


KEPT = """
import os, torch.distributed as dist
from datetime import timedelta
from commopt.comm import gloo
from commopt.comm.meeting import Meeting
channel = gloo.GlooChannel(dist.HashStore(), Meeting(0, [0]), "0", timedelta(seconds=5))
os.kept = channel, gloo  # of a module that goes after those of commopt
"""


@pytest.mark.long
def test_a_channel_that_outlives_its_module_says_nothing():
    process = subprocess.run([sys.executable, "-c", KEPT], stderr=subprocess.PIPE, text=True, timeout=60)
    assert (process.returncode, process.stderr) == (0, "")
