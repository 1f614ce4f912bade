"""MPI: dtypes and bits, training as on threads, what is refused, and ranks that fail. The verbs are in test_backends.

Starting ranks costs seconds, so each world is started once and runs all its scenes.
"""

from __future__ import annotations

import itertools
import signal
import sys
import time
from typing import Any
from unittest import mock

import pytest
import torch
from conformance import conformance
from torch import nn
from worlds import Toy, mpirun, needs_mpi, on_mpi, on_threads, params_of, same_bits, train

from commopt import OneBitAdam, comm
from commopt.comm import MPIBackend
from commopt.comm import mpi as mpi_module

SETTINGS: dict[str, Any] = {"lr": 1e-2, "freeze_step": 4, "bucket_mb": 3e-4}
STEPS = 9


# under mpirun ---------------------------------------------------------------------------------------------------------


def given(rank: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)


def scene_means(backend: MPIBackend) -> dict[Any, torch.Tensor]:
    """Sizes on both sides of every threshold that Open MPI has for its algorithms."""
    out = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        for n in (0, 1, 7, 1003, 300_007):
            out[dtype, n] = x = given(backend.rank, n, dtype)
            backend.all_reduce(x).wait()
    return out


def scene_training(backend: MPIBackend, **settings: Any) -> list[torch.Tensor]:
    model = Toy(torch.float64)
    optimizer = OneBitAdam(model.parameters(), backend=backend, **{**SETTINGS, **settings})
    train(model, optimizer, range(STEPS), backend.rank, backend.world_size)
    return params_of(model)


def scene_crossed_lines(backend: MPIBackend) -> list[float]:
    """Two lines, used in opposite orders by odd and even ranks."""
    xs = [torch.full((1000,), float(backend.rank)), torch.full((1000,), 10.0 * backend.rank)]
    order = [0, 1] if backend.rank % 2 else [1, 0]
    lines = comm.open_channels(backend, 2)
    for work in [lines[i].all_reduce(xs[i]) for i in order]:
        work.wait()
    return [x[0].item() for x in xs]


def scene_late_start(backend: MPIBackend) -> bool:
    """overlap=True; in the first step only rank 0 starts a bucket in backward."""
    params = [nn.Parameter(torch.arange(1.0, 901.0)) for _ in range(2)]
    optimizer = OneBitAdam(params, backend=backend, overlap=True, **{**SETTINGS, "bucket_mb": 3e-3})
    for t in range(STEPS):
        optimizer.zero_grad()
        used = params[:1] if backend.rank and t == 0 else params
        sum((p * (backend.rank + t + 1)).sin().sum() for p in used).backward()
        optimizer.step()
    rows = torch.empty(backend.world_size, 900)
    backend.all_gather(rows, params[1].detach()).wait()
    return bool((rows == rows[0]).all())


def scene_staged(backend: MPIBackend) -> list[int]:
    """As with a GPU whose memory MPI cannot read: every verb goes through copies on the host."""
    copies = []

    def pinned(x: torch.Tensor) -> torch.Tensor:
        copies.append(x.numel())
        return torch.full_like(x, 77)

    with mock.patch.object(MPIBackend, "_reads", return_value=False), mock.patch.object(mpi_module, "_pinned", pinned):
        conformance(backend, pairs=False)
        left, right = ((backend.rank + d) % backend.world_size for d in (-1, 1))
        mine, theirs = torch.full((3,), float(backend.rank)), torch.zeros(3)
        backend.exchange(theirs, mine, right, left).wait()
        assert theirs.tolist() == [left] * 3
    return copies


def scene_work(backend: MPIBackend) -> dict[str, Any]:
    """A work that nobody waits for yet is not complete while a rank is missing; one that is over stays so."""
    out: dict[str, Any] = {}
    if backend.rank == 0:
        time.sleep(0.3)
    x = torch.full((3,), float(backend.rank))
    work = backend.all_reduce(x)
    out["early"] = work.is_completed()
    work.wait()
    once = x.clone()
    x.add_(1)
    work.wait()
    out["again"] = (work.is_completed(), torch.equal(x, once + 1))
    out["kept"] = len(mpi_module._in_flight)
    return out


def scene_refused(backend: MPIBackend) -> dict[str, str]:
    from mpi4py import MPI

    world, f = backend.world_size, torch.zeros
    cases = {
        "int": lambda: backend.all_reduce(f(3, dtype=torch.int64)),
        "complex": lambda: backend.all_reduce(f(3, dtype=torch.complex64)),
        "strides": lambda: backend.all_reduce(f(4, 4).t()),
        "sparse dtype": lambda: backend.all_gather(f(world, 3), f(3, dtype=torch.float64)),
        "device": lambda: backend.all_to_all(f(world, 3), f(world, 3, device="meta")),
        "meta": lambda: backend.broadcast(f(3, device="meta")),
        "rows": lambda: backend.all_to_all(f(world + 1, 3), f(world + 1, 3)),
        "short": lambda: backend.all_gather(f(world, 2), f(3)),
        "mesh": lambda: MPIBackend("world"),
        "timeout": lambda: MPIBackend(timeout=0),
        "inter": lambda: MPIBackend(
            MPI.COMM_WORLD.Split(int(backend.rank > 0)).Create_intercomm(0, MPI.COMM_WORLD, int(backend.rank == 0))
        ),
        "both": lambda: OneBitAdam(Toy().parameters(), backend=backend, process_group="mesh"),
    }
    out = {}
    for name, case in cases.items():
        with pytest.raises(ValueError) as caught:
            case()
        out[name] = str(caught.value)
    before = len(mpi_module._in_flight)
    with pytest.raises(MPI.Exception):
        backend.broadcast(f(3), src=99)
    assert len(mpi_module._in_flight) == before  # nothing was started, so that nothing is kept
    return out


def scene_pieces(backend: MPIBackend) -> int:
    """Messages of more bytes than one may have; the most pieces that one went in."""
    world, rank, most = backend.world_size, backend.rank, 0
    tested = mpi_module._Calls.Test

    def noted(calls: Any) -> bool:
        nonlocal most
        most = max(most, len(calls.requests))
        return tested(calls)

    with mock.patch.object(mpi_module._Calls, "Test", noted):
        for limit, n in itertools.product((1, 7, 64), (0, 1, 5, 33, 257)):
            with mock.patch.object(mpi_module, "MOST", limit):
                conformance(backend, long=50)
                rows = [
                    given(r, world * n, torch.float64).view(torch.uint8)[::8].reshape(world, n) for r in range(world)
                ]
                out, table = torch.zeros(world, n, dtype=torch.uint8), torch.zeros(world, world, n, dtype=torch.uint8)
                works = [backend.all_to_all(out, rows[rank].clone()), backend.all_gather(table, rows[rank].clone())]
                x, mean = rows[rank].clone(), given(rank, n, torch.float32)
                works += [backend.broadcast(x, world - 1), backend.all_reduce(mean)]
                for work in works:
                    work.wait()
                assert torch.equal(out, torch.stack([row[rank] for row in rows]))
                assert torch.equal(table, torch.stack(rows))
                assert torch.equal(x, rows[-1])
                exact = sum(given(r, n, torch.float32).double() for r in range(world)) / world
                torch.testing.assert_close(mean.double(), exact, rtol=1e-6, atol=1e-6)
    return most


def scene_part(backend: MPIBackend) -> dict[str, Any]:
    """The odd ranks and the even ones, the last of them first; rank 1 has another learning rate."""
    from mpi4py import MPI

    part = MPIBackend(MPI.COMM_WORLD.Split(backend.rank % 2, key=-backend.rank))
    several = part, part.control(), comm.CountingBackend(part), comm.CountingBackend(part.control())
    out: dict[str, Any] = {"numbers": [list(comm.numbers_in_world(b)) for b in several]}
    optimizer = OneBitAdam(Toy().parameters(), backend=part, **SETTINGS)
    optimizer.param_groups[0]["lr"] *= 1 + (backend.rank == 1)
    try:
        optimizer.step()
    except RuntimeError as error:
        out["said"] = str(error)
    return out


def scene_alone(backend: MPIBackend) -> tuple[str, float]:
    """The last rank never joins a step."""
    from mpi4py import MPI

    model = Toy()
    optimizer = OneBitAdam(model.parameters(), backend=MPIBackend(MPI.COMM_WORLD.Dup(), timeout=1.0), **SETTINGS)
    train(model, optimizer, range(5), backend.rank, backend.world_size)
    text, begin = "", time.monotonic()
    if backend.rank < backend.world_size - 1:
        with pytest.raises(comm.CollectiveError) as caught:
            train(model, optimizer, range(5, 6), backend.rank, backend.world_size)
        text = str(caught.value)
    seconds = time.monotonic() - begin
    MPI.COMM_WORLD.Barrier()
    return text, seconds


def scenes() -> dict[str, Any]:
    backend = MPIBackend()
    return {
        "means": scene_means(backend),
        "plain": scene_training(backend),
        "overlapped": scene_training(backend, overlap=True),
        "crossed": scene_crossed_lines(backend),
        "late": scene_late_start(backend),
        "staged": scene_staged(backend),
        "work": scene_work(backend),
        "refused": scene_refused(backend),
        "pieces": scene_pieces(backend),
        "part": scene_part(backend),
        "alone": scene_alone(backend),
    }


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return on_mpi(request.param, scenes)


@needs_mpi
class TestUnderMpirun:
    @pytest.mark.long(but="2")
    def test_means_have_the_same_bits_on_every_rank(self, ranks):
        for (dtype, n), x in ranks[0]["means"].items():
            assert all(same_bits([x], [r["means"][dtype, n]]) for r in ranks)
            exact = sum(given(r, n, dtype).double() for r in range(len(ranks))) / len(ranks)
            # 16 bits: float32 holds the sum, and it is rounded once
            half = dtype in (torch.bfloat16, torch.float16)
            tolerance = torch.finfo(dtype).eps * (0.51 if half else len(ranks))
            torch.testing.assert_close(x.double(), exact, rtol=tolerance, atol=tolerance)

    def test_training_gives_the_parameters_of_threads(self, ranks):
        """2 ranks: the bits. More: MPI adds up in an order of its own, and float64 differs in the last bits."""
        here = params_of(Toy(torch.float64))
        threads = on_threads(len(ranks), scene_training)[0]
        assert all(same_bits(r["plain"], ranks[0]["plain"]) for r in ranks)
        assert not same_bits(here, ranks[0]["plain"])
        if len(ranks) == 2:
            assert same_bits(ranks[0]["plain"], threads)
        for a, b in zip(ranks[0]["plain"], threads):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)

    def test_overlap_gives_the_same_bits(self, ranks):
        assert all(same_bits(r["overlapped"], ranks[0]["plain"]) for r in ranks)

    def test_lines_do_not_wait_for_each_other(self, ranks):
        mean = (len(ranks) - 1) / 2
        assert all(r["crossed"] == [mean, 10 * mean] for r in ranks)

    def test_overlap_where_the_ranks_start_their_first_bucket_at_different_times(self, ranks):
        assert all(r["late"] for r in ranks)

    def test_what_mpi_cannot_read_goes_through_the_host(self, ranks):
        # a copy of what is reduced or broadcast, one each of what is given and received
        verbs = 2 + 2 * (2 + 2) + 1 + 2 + 2
        assert all(len(r["staged"]) == verbs for r in ranks)

    def test_work_ends_once(self, ranks):
        assert not ranks[1]["work"]["early"]
        for r in ranks:
            assert r["work"]["again"] == (True, True)
            assert r["work"]["kept"] == 0

    def test_what_is_more_than_a_message_may_have_goes_in_pieces(self, ranks):
        assert all(r["pieces"] >= 257 for r in ranks)

    def test_ranks_of_a_part_are_called_as_in_the_world(self, ranks):
        for rank, r in enumerate(ranks):
            part = [other for other in reversed(range(len(ranks))) if other % 2 == rank % 2]
            assert r["part"]["numbers"] == [part] * 4
            assert ("said" in r["part"]) == (len(part) > 1 and rank % 2 == 1)
            if "said" in r["part"]:
                assert "lr of parameter group 0 is 0.02 on rank 1 and 0.01 on rank 3" in r["part"]["said"]

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("int", "all_reduce of int64: allowed are float64, float32, bfloat16, float16"),
            ("complex", "all_reduce of complex64: allowed are"),
            ("strides", "tensors must be contiguous, got shape (4, 4) with strides (1, 4)"),
            ("sparse dtype", "tensors of one collective must agree: float32 on cpu, float64 on cpu"),
            ("device", "tensors of one collective must agree: float32 on cpu, float32 on meta"),
            ("meta", "MPI reads tensors on the CPU and on CUDA devices, got one on meta"),
            ("rows", "both must have one shape, of"),
            ("short", "all_gather from (3,) into"),
            ("mesh", "comm must be an intra-communicator of mpi4py or None, got 'world'"),
            ("timeout", "timeout must be > 0 seconds, got 0"),
            ("inter", "comm must be an intra-communicator of mpi4py or None, got <mpi4py.MPI.Intercomm"),
            ("both", "give either process_group or backend, not both"),
        ],
    )
    def test_what_cannot_be_sent_is_refused_on_every_rank(self, ranks, name, message):
        assert all(message in r["refused"][name] for r in ranks)

    def test_a_rank_that_never_joins_is_an_error_that_names_step_and_collective(self, ranks):
        for r in ranks[:-1]:
            text, seconds = r["alone"]
            assert text == (
                f"step 6, agreement of the ranks on it: rank {len(ranks) - 1} did not join within 1 s: an MPI "
                "collective did not complete within 1 seconds"
            )
            assert 0.5 < seconds < 10


# ranks that fail ------------------------------------------------------------------------------------------------------

DYING = """
import os, signal, sys, torch
from commopt.comm import MPIBackend
backend = MPIBackend()
if backend.rank == 1:
    {deed}
backend.all_reduce(torch.zeros(1)).wait()
"""


@pytest.mark.long(but="raises")
@needs_mpi
@pytest.mark.parametrize(
    ("options", "deed", "said", "interpreter"),
    [
        ((), f"os.kill(os.getpid(), {int(signal.SIGKILL)})", "signal 9", sys.executable),
        (("-m", "mpi4py"), "raise ArithmeticError('lost')", "ArithmeticError: lost", None),
    ],
    ids=["killed", "raises"],
)
def test_a_rank_that_fails_ends_the_job(options, deed, said, interpreter):
    done = mpirun(2, *options, "-c", DYING.format(deed=deed), patience=60, interpreter=interpreter)
    assert done.returncode != 0
    assert said in done.stdout + done.stderr


# the state of MPI -----------------------------------------------------------------------------------------------------


class FakeMPI:
    """What of mpi4py's MPI is asked before anything is sent."""

    THREAD_FUNNELED, THREAD_SERIALIZED, THREAD_MULTIPLE = 1, 2, 3

    def __init__(self, initialized: bool = True, finalized: bool = False, level: int = 3) -> None:
        self.Is_initialized = lambda: initialized
        self.Is_finalized = lambda: finalized
        self.Query_thread = lambda: level


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"initialized": False}, "MPI is not initialised: call MPI.Init"),
        ({"finalized": True}, "MPI is finalised"),
        ({"level": FakeMPI.THREAD_FUNNELED}, "MPI was initialised for one thread.*MPI_THREAD_SERIALIZED"),
    ],
    ids=["not initialised", "finalised", "one thread"],
)
def test_mpi_in_a_state_that_cannot_be_used(monkeypatch, state, message):
    package = mock.MagicMock()
    package.MPI = FakeMPI(**state)
    monkeypatch.setitem(sys.modules, "mpi4py", package)
    with pytest.raises(RuntimeError, match=message):
        MPIBackend()


@pytest.mark.parametrize("level", [FakeMPI.THREAD_SERIALIZED, FakeMPI.THREAD_MULTIPLE])
def test_threads_one_at_a_time_are_enough(monkeypatch, level):
    package = mock.MagicMock()
    package.MPI = FakeMPI(level=level)
    monkeypatch.setitem(sys.modules, "mpi4py", package)
    assert mpi_module.load_mpi() is package.MPI


def test_without_mpi4py_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(RuntimeError, match=r"pip install 'commopt\[mpi\]', and Open MPI from your system"):
        MPIBackend()


FINALISED = """
import torch
from mpi4py import MPI
from commopt.comm import MPIBackend
backend = MPIBackend()
work = backend.all_reduce(torch.zeros(1))
work.wait()
MPI.Finalize()
for call in (lambda: backend.all_reduce(torch.zeros(1)), MPIBackend):
    try:
        call()
    except RuntimeError as error:
        print(error)
work.wait()
"""


@needs_mpi
def test_nothing_is_sent_after_mpi_has_ended():
    """MPI itself would end the process."""
    done = mpirun(1, "-c", FINALISED)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("MPI is finalised: nothing can be sent any more") == 2


# GPUs, as far as it can be seen without one ---------------------------------------------------------------------------


class Scripted:
    """An MPI of one rank that notes what happens, and when."""

    IN_PLACE = SUM = BYTE = DOUBLE = FLOAT = object()

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.buffer = mock.Mock()
        self.Is_initialized, self.Is_finalized = lambda: True, lambda: False

    def Iallreduce(self, *_: Any) -> Any:
        self.events.append("start")
        return mock.Mock(Test=lambda: True)


def test_the_stream_is_waited_for_before_mpi_starts_and_the_copy_back_is_made_once(monkeypatch):
    events: list[str] = []
    scripted = Scripted(events)
    backend = MPIBackend.__new__(MPIBackend)
    backend.__dict__.update(
        _mpi=scripted,
        comm=scripted,
        world_size=2,
        rank=0,
        timeout=1.0,
        cuda_aware=False,
        _types={torch.float32: None},
        _meeting=mock.Mock(),
        _channel="0",
    )
    host = torch.empty(3)
    monkeypatch.setattr(MPIBackend, "_reads", lambda *_: False)
    monkeypatch.setattr(MPIBackend, "_settle", staticmethod(lambda device: events.append(f"settle {host.tolist()}")))
    monkeypatch.setattr(mpi_module, "_pinned", lambda x: host)
    x = torch.full((3,), 4.0)
    work = backend.all_reduce(x)
    assert events == ["settle [2.0, 2.0, 2.0]", "start"]
    host.fill_(9)
    assert work.is_completed()
    assert x.tolist() == [2.0] * 3, "nothing is copied back before wait()"
    work.wait()
    assert x.tolist() == [9.0] * 3
    host.fill_(5)
    work.wait()
    assert x.tolist() == [9.0] * 3


@pytest.mark.parametrize(("answer", "aware"), [(1, True), (0, False), (None, False)])
def test_mpi_is_asked_whether_it_reads_the_memory_of_gpus(monkeypatch, answer, aware):
    library = mock.Mock(spec=["MPIX_Query_cuda_support"] if answer is not None else [])
    if answer is not None:
        library.MPIX_Query_cuda_support.return_value = answer
    monkeypatch.setattr(mpi_module.ctypes, "CDLL", lambda path: library)
    assert mpi_module.is_cuda_aware(mock.Mock(__file__="libmpi.so")) is aware


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@needs_mpi
def test_on_gpus():
    on_mpi(2, on_gpus)


def on_gpus() -> None:
    backend = MPIBackend()
    with torch.device("cuda"):
        conformance(backend)
