"""The backend over MPI, through mpi4py (extra ``commopt[mpi]``): any communicator, no torchrun.

Every collective is one of MPI's non-blocking collectives on the memory of the tensors themselves. What MPI promises,
and what is done here because it does not:

* all ranks get the same bits from an Allreduce (MPI 4.0, section 6.9.6); the order of summation is its own affair, so
  that with more than 2 ranks they may differ in the last bit from those of another backend;
* MPI knows nothing of CUDA streams: a tensor on a GPU is waited for before MPI is given it. If MPI cannot read the
  memory of GPUs, it is given a pinned copy on the host;
* MPI has no 16-bit floats that it can sum: their mean is formed in float32 and rounded once;
* MPI counts in C ints, and libraries multiply them: a message of more than :data:`MOST` bytes goes in pieces;
* MPI waits for ever: ``wait()`` gives up after ``timeout`` seconds. A collective cannot be taken back, so that its
  tensors are kept until it is complete, whoever has given up on it;
* MPI lets a process that ends wait for all others: a rank that fails alone must end the job, as ``python -m mpi4py``
  sees to, and ``commopt train``.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from commopt.comm.backend import Work
from commopt.comm.meeting import Meeting
from commopt.comm.pipeline import wait
from commopt.comm.watch import Roll

TAG = 21102
"""Of messages between two ranks: others on the same communicator are the program's own."""
SPIN = 1e-3
"""Seconds that ``wait()`` looks without a pause: a collective moves on only while somebody looks."""
NAP = 5e-5
"""Seconds between two looks after that: the core may have better to do."""
MOST = 2**30
"""Bytes of one call of MPI at most, of all its rows together."""

SUMMED_IN = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}
"""Dtypes that have a mean, and what it is formed in."""


def load_mpi() -> Any:
    """``mpi4py.MPI``, ready to be used.

    Raises:
        RuntimeError: without mpi4py or an MPI library, before MPI is initialised or after it is finalised, and where it
            may be called from the main thread only.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise RuntimeError(
            "MPIBackend needs mpi4py and an MPI library: pip install 'commopt[mpi]', and Open MPI from your system "
            f"(Debian, Ubuntu: apt-get install openmpi-bin): {' '.join(str(error).split())}"
        ) from error
    check_running(MPI)
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise RuntimeError(
            "MPI was initialised for one thread, but backward() calls collectives from threads of its own: initialise "
            "it with MPI_THREAD_SERIALIZED or MPI_THREAD_MULTIPLE (mpi4py does, unless mpi4py.rc says otherwise)"
        )
    return MPI


def check_running(mpi: Any) -> None:
    """Raises RuntimeError unless MPI has been initialised and not been finalised: its calls would end the process."""
    if not mpi.Is_initialized():
        raise RuntimeError("MPI is not initialised: call MPI.Init() first, or leave mpi4py.rc.initialize as it is")
    if mpi.Is_finalized():
        raise RuntimeError("MPI is finalised: nothing can be sent any more")


class MPIBackend:
    """The ranks of an MPI communicator. The first collective waits for all of them.

    Args:
        comm: an intra-communicator of mpi4py; ``MPI.COMM_WORLD`` if None. Collectives of your own on it must come in
            the same order on every rank as everything else; give a ``comm.Dup()`` to be rid of that.
        timeout: seconds after which a collective that has not completed counts as failed; of channels too, and of
            making them.
        cuda_aware: whether MPI can read and write the memory of GPUs; None to ask it (Open MPI answers, others count as
            not).

    Attributes:
        numbers: those of the ranks in ``MPI.COMM_WORLD``, by rank, which errors and warnings name them by; their own
            where that does not contain them all.

    Raises:
        ValueError: for something else than an intra-communicator, on a process that it does not contain, and for a
            timeout that is not positive.
        RuntimeError: see :func:`load_mpi`.
    """

    devices = ("cpu", "cuda")

    def __init__(self, comm: Any = None, timeout: float = 1800.0, cuda_aware: bool | None = None) -> None:
        self._mpi = mpi = load_mpi()
        self.comm = mpi.COMM_WORLD if comm is None else comm
        if not isinstance(self.comm, mpi.Intracomm):
            raise ValueError(f"comm must be an intra-communicator of mpi4py or None, got {comm!r}")
        if self.comm == mpi.COMM_NULL:
            raise ValueError(f"rank {mpi.COMM_WORLD.rank} of COMM_WORLD is not a member of the communicator given")
        if not timeout > 0:
            raise ValueError(f"timeout must be > 0 seconds, got {timeout!r}")
        self.timeout = timeout
        self.cuda_aware = is_cuda_aware(mpi) if cuda_aware is None else cuda_aware
        self.rank: int = self.comm.Get_rank()
        self.world_size: int = self.comm.Get_size()
        self.numbers = _numbers_in_world(mpi, self.comm)
        self._types = {torch.float64: mpi.DOUBLE, torch.float32: mpi.FLOAT}
        self._meeting: MPIMeeting | None = None
        self._channel = "0"

    def channels(self, n: int) -> list[MPIBackend]:
        """``n`` duplicates of the communicator. MPI frees them when it ends."""
        return [] if self.world_size == 1 else [self._duplicate() for _ in range(n)]

    def control(self) -> MPIBackend:
        """A duplicate of the communicator. MPI frees it when it ends."""
        return self if self.world_size == 1 else self._duplicate()

    def _duplicate(self) -> MPIBackend:
        meeting = self._meet()
        channel = MPIBackend(self._copy_of_comm(meeting), self.timeout, self.cuda_aware)
        channel._meeting, channel._channel = meeting, f"{self._channel}.{meeting.started[self._channel]}"
        return channel

    def _meet(self) -> MPIMeeting:
        """Communicator in which the ranks tell each other who waits. All of them open it, by their first collective."""
        if self._meeting is None:
            meeting = MPIMeeting(self._mpi, self.rank, self.numbers)
            meeting.aside = self._copy_of_comm(meeting) if self.world_size > 1 else None
            self._meeting = meeting
        return self._meeting

    def _copy_of_comm(self, meeting: MPIMeeting) -> Any:
        """A duplicate of the communicator, waited for: Open MPI 4.1 mixes one under way with other collectives."""
        copy, request = self.comm.Idup()
        number = meeting.start(self._channel)
        wait(
            _MPIWork(self._mpi, request, (), None, self.timeout, meeting, self._channel, number),
            "duplicating the communicator",
        )
        return copy

    def all_reduce(self, x: Tensor) -> Work:
        """x <- mean of x over all ranks. float64, float32, bfloat16 or float16."""
        if x.dtype not in SUMMED_IN:
            allowed = ", ".join(_name(dtype) for dtype in SUMMED_IN)
            raise ValueError(f"all_reduce of {_name(x.dtype)}: allowed are {allowed}")
        self._check(x)
        wide = x if SUMMED_IN[x.dtype] == x.dtype else x.to(SUMMED_IN[x.dtype])
        sent = self._outgoing(wide.div_(self.world_size))
        kind = self._types[wide.dtype]

        def start(calls: _Calls) -> None:
            for at, count in _spans(sent.numel(), sent.itemsize):
                part = self._memory(sent, at * sent.itemsize, count * sent.itemsize)
                calls.requests.append(self.comm.Iallreduce(self._mpi.IN_PLACE, [part, count, kind], self._mpi.SUM))

        return self._start(start, (sent,), sent, x)

    def all_to_all(self, out: Tensor, inp: Tensor) -> Work:
        """Row r of ``inp`` goes to rank r; row r of ``out`` comes from rank r. Any dtype."""
        self._check(out, inp)
        if out.shape != inp.shape or inp.shape[:1] != (self.world_size,):
            rows = f"both must have one shape, of {self.world_size} rows"
            raise ValueError(f"all_to_all from {tuple(inp.shape)} into {tuple(out.shape)}: {rows}")
        sent, received = self._outgoing(inp), self._incoming(out)

        def start(calls: _Calls) -> None:
            for given, taken in zip(self._columns(sent, calls), self._columns(received, calls)):
                calls.requests.append(self.comm.Ialltoall(given, taken))

        return self._start(start, (sent, received), received, out)

    def all_gather(self, out: Tensor, inp: Tensor) -> Work:
        """Row r of ``out`` is rank r's ``inp``. Any dtype."""
        self._check(out, inp)
        if out.shape != (self.world_size, *inp.shape):
            rows = f"it must be {self.world_size} such rows"
            raise ValueError(f"all_gather from {tuple(inp.shape)} into {tuple(out.shape)}: {rows}")
        sent, received = self._outgoing(inp), self._incoming(out)

        def start(calls: _Calls) -> None:
            for given, taken in zip(self._pieces(sent, self.world_size), self._columns(received, calls)):
                calls.requests.append(self.comm.Iallgather(given, taken))

        return self._start(start, (sent, received), received, out)

    def broadcast(self, x: Tensor, src: int = 0) -> Work:
        """x <- rank ``src``'s x. Any dtype."""
        self._check(x)
        sent = self._outgoing(x)

        def start(calls: _Calls) -> None:
            calls.requests += [self.comm.Ibcast(piece, src) for piece in self._pieces(sent)]

        return self._start(start, (sent,), sent, x)

    def exchange(self, out: Tensor, inp: Tensor, dst: int, src: int) -> Work:
        """``inp`` goes to rank ``dst``, ``out`` comes from rank ``src``. Any dtype."""
        self._check(out, inp)
        if out.shape != inp.shape:
            raise ValueError(f"exchange of {tuple(inp.shape)} for {tuple(out.shape)}: both must have one shape")
        sent, received = self._outgoing(inp), self._incoming(out)

        def start(calls: _Calls) -> None:
            calls.requests += [self.comm.Irecv(piece, src, TAG) for piece in self._pieces(received)]
            calls.requests += [self.comm.Isend(piece, dst, TAG) for piece in self._pieces(sent)]

        return self._start(start, (sent, received), received, out)

    # memory -----------------------------------------------------------------------------------------------------------

    def _check(self, *tensors: Tensor) -> None:
        """Raises before MPI, which sees addresses only, would write where nothing of the kind is."""
        check_running(self._mpi)
        first = tensors[0]
        for t in tensors:
            if t.device != first.device or t.dtype != first.dtype:
                raise ValueError(
                    f"tensors of one collective must agree: {_name(first.dtype)} on {first.device}, "
                    f"{_name(t.dtype)} on {t.device}"
                )
            if t.device.type not in ("cpu", "cuda"):
                raise ValueError(f"MPI reads tensors on the CPU and on CUDA devices, got one on {t.device}")
            if not t.is_contiguous():
                raise ValueError(f"tensors must be contiguous, got shape {tuple(t.shape)} with strides {t.stride()}")

    def _reads(self, x: Tensor) -> bool:
        return x.device.type == "cpu" or self.cuda_aware

    def _outgoing(self, x: Tensor) -> Tensor:
        """x, or a copy that is on its way to where MPI can read it."""
        return x if self._reads(x) else self._incoming(x).copy_(x, non_blocking=True)

    def _incoming(self, x: Tensor) -> Tensor:
        """x, or a place of its size where MPI can write."""
        return x if self._reads(x) else _pinned(x)

    @staticmethod
    def _settle(device: torch.device) -> None:
        """Waits until everything on the current stream has happened: then the tensors are as MPI may see them."""
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    def _memory(self, x: Tensor, start: int, nbytes: int) -> Any:
        return self._mpi.buffer.fromaddress(x.data_ptr() + start, nbytes)

    def _pieces(self, x: Tensor, rows: int = 1) -> list[list[Any]]:
        """x as bytes, cut as rows of its size are of which one call has so many."""
        return [[self._memory(x, at, length), self._mpi.BYTE] for at, length in _spans(x.nbytes, rows)]

    def _columns(self, x: Tensor, calls: _Calls) -> list[list[Any]]:
        """The rows of x, one of each rank, cut into columns of bytes."""
        row = x.nbytes // self.world_size
        spans = _spans(row, self.world_size)
        if len(spans) == 1:
            return [[self._memory(x, 0, x.nbytes), self._mpi.BYTE]]
        # for each rank one element, as long as a row, of which it has a part
        return [
            [self._memory(x, at, x.nbytes - at), 1, calls.kind(self._mpi.BYTE, length, row)] for at, length in spans
        ]

    def _start(self, start: Callable[[_Calls], Any], kept: tuple[Tensor, ...], result: Tensor, x: Tensor) -> Work:
        """Starts a collective that leaves in ``result`` what belongs into ``x``."""
        self._settle(x.device)
        finish = None if result is x else lambda: x.copy_(result, non_blocking=True)
        meeting = self._meet()
        number = meeting.start(self._channel)
        calls = _Calls()
        try:
            start(calls)
        except BaseException:
            if not calls.Test():  # the tensors of calls that have started are kept
                _MPIWork(self._mpi, calls, (*kept, x), finish, self.timeout, meeting, self._channel, number)
            raise
        return _MPIWork(self._mpi, calls, (*kept, x), finish, self.timeout, meeting, self._channel, number)


def _spans(length: int, rows: int) -> list[tuple[int, int]]:
    """Start and length of the pieces of a row, where a call has so many rows, and :data:`MOST` of all of them."""
    width = max(MOST // rows, 1)
    return [(at, min(width, length - at)) for at in range(0, length, width)] or [(0, 0)]


class _Calls:
    """Calls of MPI as one request, and the datatypes that they need."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self._kinds: list[Any] = []

    def kind(self, of: Any, count: int, extent: int) -> Any:
        """So many elements of a datatype, of which there are as many in each ``extent`` bytes."""
        plain = of.Create_contiguous(count)
        self._kinds.append(plain.Create_resized(0, extent).Commit())
        plain.Free()
        return self._kinds[-1]

    def Test(self) -> bool:
        self.requests = [request for request in self.requests if not request.Test()]
        if not self.requests:
            while self._kinds:
                self._kinds.pop().Free()
        return not self.requests


_in_flight: set[_MPIWork] = set()
"""Collectives that MPI has not completed: it writes into their tensors, whether or not anybody still waits."""


class _MPIWork:
    def __init__(
        self, mpi: Any, request: Any, tensors: tuple[Tensor, ...], finish: Callable[[], Any] | None, timeout: float,
        meeting: MPIMeeting, channel: str, number: int,
    ) -> None:  # fmt: skip
        self._mpi, self._request, self._tensors, self._finish, self.timeout = mpi, request, tensors, finish, timeout
        self._meeting, self._channel, self._number = meeting, channel, number
        self._deadline = time.monotonic() + timeout
        self._error: Exception | None = None
        _in_flight.add(self)

    def is_completed(self) -> bool:
        return self._complete() or time.monotonic() > self._deadline

    def wait(self) -> None:
        while not self.wait_for(self.timeout):
            pass
        if not self._complete():
            raise TimeoutError(f"an MPI collective did not complete within {self.timeout:g} seconds")
        if self._error is not None:
            raise self._error
        if self._finish is not None:
            self._finish()
            self._finish = None

    def wait_for(self, seconds: float) -> bool:
        """Waits at most so long; whether ``wait()`` would return, or raise, at once."""
        begin = time.monotonic()
        while not self._complete():
            now = time.monotonic()
            if now > self._deadline:
                return True
            if now > begin + seconds:
                return False
            time.sleep(NAP if now > begin + SPIN else 0)
        return True

    def overdue(self) -> bool:
        return time.monotonic() > self._deadline

    def tell(self, state: str, where: str) -> None:
        self._meeting.tell(state, where)

    def leave(self) -> None:
        self._meeting.leave()

    def absent(self, states: Sequence[str]) -> Roll:
        return self._meeting.absent(self._channel, self._number, states)

    def _complete(self) -> bool:
        """True if the collective has come to an end, be it a bad one."""
        if self._request is None or self._error is not None:
            return True
        try:
            check_running(self._mpi)
            if not self._request.Test():
                return False
        except RuntimeError as error:  # MPI.Exception is one
            self._error = error
            return True
        self._request, self._tensors = None, ()
        _in_flight.discard(self)
        return True


class MPIMeeting(Meeting):
    """By messages on a communicator of their own. A rank that never waits long never receives them: they are small, and
    MPI keeps them.

    Attributes:
        aside: the communicator; None before all ranks have come to make it.
    """

    silence = "some rank has not called its first collective"

    def __init__(self, mpi: Any, rank: int, numbers: Sequence[int]) -> None:
        super().__init__(rank, numbers)
        self._mpi = mpi
        self.aside: Any = None
        self._sending: list[Any] = []
        self._words: dict[int, str] = {}

    def send(self, word: str) -> None:
        if self.aside is None:
            return
        self._sending = [request for request in self._sending if not request.Test()]
        self._sending += [self.aside.isend(word, r) for r in range(len(self.ranks)) if r != self.rank]

    def hear(self) -> dict[int, str] | None:
        if self.aside is None:
            return None
        status = self._mpi.Status()
        while self.aside.iprobe(status=status):
            source = status.Get_source()
            self._words[source] = self.aside.recv(source=source)
        return self._words


def _pinned(x: Tensor) -> Tensor:
    """A place of the size of x on the host that a GPU reads and writes without being waited for."""
    return torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)


def _numbers_in_world(mpi: Any, comm: Any) -> list[int]:
    """The numbers in ``COMM_WORLD`` of the ranks of ``comm``; their own where that does not contain them all."""
    own = list(range(comm.Get_size()))
    group, world = comm.Get_group(), mpi.COMM_WORLD.Get_group()
    numbers: list[int] = list(mpi.Group.Translate_ranks(group, own, world))
    group.Free()
    world.Free()
    return own if mpi.UNDEFINED in numbers else numbers


def is_cuda_aware(mpi: Any) -> bool:
    """True if the MPI library says that it can read and write the memory of GPUs, as Open MPI can be asked."""
    query = getattr(ctypes.CDLL(mpi.__file__), "MPIX_Query_cuda_support", None)
    return query is not None and query() == 1


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
