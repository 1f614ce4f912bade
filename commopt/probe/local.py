"""Cost of the optimizers on the device, without a network, while all ranks do the same.

OneBitAdam itself is timed, over ranks that are mirror images of this one, and its time is split where it starts a
collective.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from commopt.comm import CONFIRMATION_BYTES, Backend, NodesBackend, Work
from commopt.comm.backend import Done
from commopt.compress import Compressor
from commopt.gradients.watching import ROW_BYTES
from commopt.optim import CSER, Guard, OneBitAdam, QSparseLocalSGD
from commopt.probe.measure import Stand

SAMPLE = {"cpu": 8 * 2**20, "cuda": 64 * 2**20}
"""Parameters that are enough to time a larger model by, by kind of device; but always two buckets."""


@dataclass(frozen=True)
class Local:
    """Seconds per parameter.

    Attributes:
        params: how many were timed.
        adamw: torch.optim.AdamW.
        copies: into DDP's bucket and back, by collective.
        onebit: a compressed step of OneBitAdam, by the collective that follows, or "agreement"; "end" is what comes
            after the last one.
        sgd: the steps of :data:`SGD` in the same way, by name.
        rehearsal: seconds of such a step, of all ``params``, over the real network.
        kernels: compressing with error feedback, decompressing, and the mean of what the ranks send.
    """

    params: int
    adamw: float
    copies: dict[str, float]
    onebit: dict[str, float]
    sgd: dict[str, dict[str, float]]
    rehearsal: float
    kernels: dict[str, float]


class _Noted:
    """Ranks that do what this one does, in no time: :meth:`note` hears of each collective as it starts, and
    :meth:`deliver` brings what comes of it."""

    rank: int
    world_size: int

    def note(self, verb: str) -> Work:
        raise NotImplementedError

    def deliver(self, out: Tensor, inp: Tensor) -> None:
        raise NotImplementedError

    def all_reduce(self, x: Tensor) -> Work:
        return self.note("all_reduce")

    def all_to_all(self, out: Tensor, inp: Tensor) -> Work:
        work = self.note("all_to_all")
        self.deliver(out, inp)
        return work

    def all_gather(self, out: Tensor, inp: Tensor) -> Work:
        work = self.note("all_gather")
        self.deliver(out, inp.expand_as(out))
        return work

    def broadcast(self, x: Tensor, src: int = 0) -> Work:
        return self.note("broadcast")


class Mirrors(_Noted):
    """A backend whose other ranks do what this one does, in no time; it notes the time between its collectives."""

    def __init__(self, world_size: int, synchronize: Callable[[], None]) -> None:
        self.world_size = world_size
        self.rank = world_size - 1  # rank 0 logs
        self._synchronize = synchronize
        self.reset()

    def reset(self) -> None:
        """Starts to count anew."""
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def note(self, verb: str) -> Work:
        """All time since the last collective was spent on what comes before this one."""
        self._synchronize()
        now = time.perf_counter()
        self.seconds[verb] = self.seconds.get(verb, 0.0) + now - self._since
        self._since = now
        return Done()

    def deliver(self, out: Tensor, inp: Tensor) -> None:
        """The network's work, which costs no time here."""
        out.copy_(inp)
        self._synchronize()
        self._since = time.perf_counter()

    def control(self) -> Backend:
        """Backend that the ranks agree over: the first word of a step is "agreement", what comes after belongs to
        its end."""
        return _Agreeing(self, self.world_size, "agreement")

    def time(self, stand: Stand, step: Callable[[], object]) -> dict[str, float]:
        """Seconds that ``step()`` spends before each collective, and at the end: the median, on the slowest rank."""
        steps: list[dict[str, float]] = []

        def noted() -> None:
            self.reset()
            step()
            self.note("end")
            steps.append(self.seconds)

        stand.time(noted)
        verbs = list(dict.fromkeys(verb for s in steps[1:] for verb in s))
        medians = [statistics.median(s.get(verb, 0.0) for s in steps[1:]) for verb in verbs]
        return dict(zip(verbs, stand.largest(medians)))


class _Level(_Noted):
    """Some ranks of :class:`Mirrors`, whose collectives are noted by a name of their own."""

    def __init__(self, mirrors: Mirrors, ranks: int, name: str) -> None:
        self._mirrors, self.rank, self.world_size, self._name = mirrors, ranks - 1, ranks, name

    def note(self, verb: str) -> Work:
        return self._mirrors.note(f"{self._name}_{verb}")

    def deliver(self, out: Tensor, inp: Tensor) -> None:
        self._mirrors.deliver(out, inp)


class _Agreeing(_Level):
    """The control channel of :class:`Mirrors`."""

    def note(self, verb: str) -> Work:
        return self._mirrors.note("end" if self._name in self._mirrors.seconds else self._name)

    def deliver(self, out: Tensor, inp: Tensor) -> None:
        super().deliver(out, inp)
        watched = out.dtype == torch.uint8 and out.shape[1] > ROW_BYTES  # behind what has a gradient
        if watched or out[0].nbytes == CONFIRMATION_BYTES:
            rows = out[:, -ROW_BYTES:].contiguous().view(torch.int64) if watched else out
            rows[0, 0] -= rows[:, 0].sum()  # of an all-reduce rank 0 counts what all get, and nobody mirrors that
            if watched:
                out[:, -ROW_BYTES:] = rows.view(torch.uint8)


class MirroredMachines(NodesBackend):
    """``mirrors`` as machines of ``machine`` ranks each; the verbs are those of
    :mod:`commopt.probe.messages`."""

    def __init__(self, mirrors: Mirrors, machine: int) -> None:
        self.world, self.rank, self.world_size = mirrors, mirrors.rank, mirrors.world_size
        self.intra_node = _Level(mirrors, machine, "inside")
        self.inter_node = _Level(mirrors, mirrors.world_size // machine, "between")
        self.grid = [divmod(rank, machine) for rank in range(mirrors.world_size)]


def measure_local(stand: Stand, params: int, bucket_bytes: int, compressor: Compressor) -> Local:
    """Times a model of ``params`` parameters, or a part of it that is large enough."""
    count = sample_size(params, bucket_bytes, stand)
    tensors = make_params(count, bucket_bytes, stand)
    copies = time_copies(stand, tensors)
    adamw = torch.optim.AdamW(tensors, lr=0.0, betas=BETAS)  # parameters must stay as they are, equal on all ranks
    adamw_seconds = stand.time(adamw.step)
    mirrors = Mirrors(stand.world_size, stand.synchronize)
    onebit = mirrors.time(stand, make_onebit(tensors, adamw, bucket_bytes, compressor, mirrors).step)
    return Local(
        params=count,
        adamw=adamw_seconds / count,
        copies={verb: seconds / count for verb, seconds in copies.items()},
        onebit={verb: seconds / count for verb, seconds in onebit.items()},
        sgd=sgd_seconds(stand, tensors, bucket_bytes, mirrors),
        rehearsal=stand.time(make_onebit(tensors, adamw, bucket_bytes, compressor, stand.backend).step),
        kernels=time_kernels(stand, bucket_bytes, compressor),
    )


SGD: dict[str, tuple[type[CSER], int]] = {
    "cser": (CSER, 2**30),
    "cser_reset": (CSER, 1),
    "qsparse": (QSparseLocalSGD, 2**30),
    "qsparse_reset": (QSparseLocalSGD, 1),
}
"""Steps between resets and at a reset: whose, and the period with which all are such."""


def sgd_seconds(
    stand: Stand, tensors: list[Tensor], bucket_bytes: int, mirrors: Mirrors
) -> dict[str, dict[str, float]]:
    """Seconds per parameter of the steps of :data:`SGD`, by what follows; compressors as they come."""
    out, count = {}, sum(x.numel() for x in tensors)
    for name, (kind, period) in SGD.items():
        optimizer = kind(
            tensors, lr=0.0, momentum=0.9, nesterov=True, period=period, guard=Guard(check_every=None),
            bucket_mb=bucket_bytes / 2**20, backend=mirrors,
        )  # fmt: skip
        out[name] = {verb: seconds / count for verb, seconds in mirrors.time(stand, optimizer.step).items()}
    return out


def onebit_on_machines(
    stand: Stand, params: int, bucket_bytes: int, compressor: Compressor, machine: int
) -> dict[str, float]:
    """``Local.onebit`` where machines of ``machine`` ranks are nodes."""
    count = sample_size(params, bucket_bytes, stand)
    tensors = make_params(count, bucket_bytes, stand)
    adamw = torch.optim.AdamW(tensors, lr=0.0, betas=BETAS)
    adamw.step()
    mirrors = Mirrors(stand.world_size, stand.synchronize)
    onebit = make_onebit(tensors, adamw, bucket_bytes, compressor, MirroredMachines(mirrors, machine))
    return {verb: seconds / count for verb, seconds in mirrors.time(stand, onebit.step).items()}


BETAS = (0.9, 0.0)
"""With a variance of one gradient, as of a freeze_step of 1."""


def sample_size(params: int, bucket_bytes: int, stand: Stand) -> int:
    """Parameters that a model of ``params`` is timed by."""
    return min(params, max(SAMPLE[stand.device.type], 2 * bucket_bytes // 4))


def make_onebit(
    tensors: list[Tensor], adamw: torch.optim.AdamW, bucket_bytes: int, compressor: Compressor, backend: Backend
) -> OneBitAdam:
    """OneBitAdam in its compressed phase, with what ``adamw`` has learnt: another variance on each rank, which nobody
    compares."""
    optimizer = OneBitAdam(
        tensors, lr=0.0, betas=BETAS, weight_decay=0.01, freeze_step=1, guard=Guard(check_every=None),
        compressor=compressor, bucket_mb=bucket_bytes / 2**20, backend=backend,
    )  # fmt: skip
    optimizer.load_state_dict(adamw.state_dict())
    return optimizer


def make_params(count: int, bucket_bytes: int, stand: Stand) -> list[Tensor]:
    """``count`` parameters, the same on every rank, in four tensors to a bucket; with gradients of each rank's own."""
    piece = max(1, bucket_bytes // 16)
    sizes = [piece] * (count // piece) + ([count % piece] if count % piece else [])
    same, own = (torch.Generator(stand.device).manual_seed(seed) for seed in (0, 1 + stand.backend.rank))
    params: list[Tensor] = [nn.Parameter(torch.randn(n, device=stand.device, generator=same)) for n in sizes]
    for p in params:
        p.grad = torch.randn(p.shape, device=stand.device, generator=own) * 1e-3
    return params


def time_copies(stand: Stand, params: list[Tensor]) -> dict[str, float]:
    """Seconds of DDP's copies: the gradient, divided, into a bucket, and back; its bf16 hook casts in between."""
    grads = [p.grad for p in params if p.grad is not None]
    flat = torch.empty(sum(g.numel() for g in grads), device=stand.device)
    places = flat.split([g.numel() for g in grads])

    def copy(cast: bool) -> None:
        for place, g in zip(places, grads):
            torch.mul(g, 1.0, out=place)
        if cast:
            flat.copy_(flat.bfloat16())
        for place, g in zip(places, grads):
            g.copy_(place)

    return {
        "all_reduce": stand.time(lambda: copy(False)),
        "all_reduce_bf16": stand.time(lambda: copy(True)),
    }


def time_kernels(stand: Stand, bucket_bytes: int, compressor: Compressor) -> dict[str, float]:
    """Times compressing and decompressing one bucket, per element."""
    world = stand.world_size
    n = -(-bucket_bytes // 4 // (64 * world)) * 64
    x = torch.randn(world, n, device=stand.device)
    error = torch.zeros_like(x)
    payload = torch.zeros(world, compressor.nbytes(n), dtype=torch.uint8, device=stand.device)
    return {
        "compress": stand.time(lambda: compressor.compress_with_feedback(x, error, payload)) / x.numel(),
        "decompress": stand.time(lambda: compressor.decompress(payload, x)) / x.numel(),
        "decompress_mean": stand.time(lambda: compressor.decompress_mean(payload, x[0])) / x.numel(),
    }
