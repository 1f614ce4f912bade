"""Cost of compressed means of gradients on the device, without a network, while all ranks do the same."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from commopt.comm import Backend, Work
from commopt.compress import Compressor
from commopt.gradients import CompressedGradients, compress_gradients
from commopt.gradients.method import OfGradients
from commopt.probe.local import MirroredMachines, Mirrors
from commopt.probe.measure import Stand
from commopt.probe.messages import Shapes, exchanges


class Rounds(Mirrors):
    """Mirrors of a mean: the time is split by what follows: "presence", what goes "out", what comes "back", the "end".

    Args:
        world_size, synchronize: as for :class:`Mirrors`.
        first: how many messages go out; all after them are replies.
    """

    def __init__(self, world_size: int, synchronize: Callable[[], None], first: int) -> None:
        self.first = first
        super().__init__(world_size, synchronize)

    def reset(self) -> None:
        super().reset()
        self.messages = 0

    def note(self, verb: str) -> Work:
        if verb in ("agreement", "end"):
            return super().note(verb)
        self.messages += 1
        return super().note("out" if self.messages <= self.first else "back")


class Mean:
    """A mean of given gradients, whose parameters are as large as those of a model.

    Args:
        shapes: of the parameters.
        stand: the ranks, and their device.
    """

    def __init__(self, shapes: Shapes, stand: Stand) -> None:
        same, own = (torch.Generator(stand.device).manual_seed(seed) for seed in (0, 1 + stand.backend.rank))
        self.shapes, self.stand = shapes, stand
        tensors = [torch.randn(shape, device=stand.device, generator=same) for shape in shapes]
        self.model = nn.ParameterList(tensors)
        self.brought = [torch.randn(x.shape, device=stand.device, generator=own) * 1e-3 for x in tensors]
        self.grads = [torch.empty_like(x) for x in tensors]

    @property
    def params(self) -> int:
        """How many parameters."""
        return sum(x.numel() for x in self.grads)

    def handle(
        self, spec: OfGradients, bucket_bytes: int, backend: Backend, inside: Compressor | None = None
    ) -> CompressedGradients:
        """Averages over ``backend``, without DDP."""
        return compress_gradients(self.model, spec, bucket_mb=bucket_bytes / 2**20, backend=backend, inside=inside)

    def bring(self) -> None:
        """Gives every rank its gradients again: a mean is written over them."""
        torch._foreach_copy_(self.grads, self.brought)

    def take(self, handle: CompressedGradients) -> None:
        """One mean, all gradients at once."""
        for p, g in reversed(list(zip(self.model, self.grads))):
            handle.mean.arrive(p, g)
        handle.mean.finish()

    def costs(self, spec: OfGradients, bucket_bytes: int) -> dict[str, float]:
        """Seconds per parameter, by what follows; see :class:`Rounds`."""
        stand = self.stand
        sent = exchanges(self.shapes, spec, stand.world_size, bucket_bytes)
        mirrors = Rounds(stand.world_size, stand.synchronize, sum(len(bucket) for bucket in sent))
        return self._timed(self.handle(spec, bucket_bytes, mirrors), mirrors)

    def costs_on_machines(
        self, spec: OfGradients, bucket_bytes: int, machine: int, inside: Compressor | None
    ) -> dict[str, float]:
        """The same where machines of ``machine`` ranks are nodes; see :class:`commopt.probe.local.MirroredMachines`."""
        mirrors = Mirrors(self.stand.world_size, self.stand.synchronize)
        return self._timed(self.handle(spec, bucket_bytes, MirroredMachines(mirrors, machine), inside), mirrors)

    def _timed(self, handle: CompressedGradients, mirrors: Mirrors) -> dict[str, float]:
        def step() -> None:
            self.bring()
            self.stand.synchronize()
            mirrors.reset()
            self.take(handle)

        seconds = mirrors.time(self.stand, step)
        handle.remove()
        return {{"agreement": "presence"}.get(verb, verb): s / self.params for verb, s in seconds.items()}

    def rehearsal(
        self, spec: OfGradients, bucket_bytes: int, backend: Backend, inside: Compressor | None = None
    ) -> float:
        """Seconds of a mean over the real network, by ``backend``."""
        handle = self.handle(spec, bucket_bytes, backend, inside)
        self.bring()
        seconds = self.stand.time(lambda: self.take(handle))
        handle.remove()
        return seconds
