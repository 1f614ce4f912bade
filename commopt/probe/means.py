"""Cost of compressed means of gradients on the device, without a network, while all ranks do the same."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from itertools import chain

import torch
from torch import nn

from commopt.comm import Backend, Work
from commopt.compress import Compressor
from commopt.gradients import CompressedGradients, compress_gradients
from commopt.gradients.method import OfGradients
from commopt.probe.local import MirroredMachines, Mirrors
from commopt.probe.measure import Stand
from commopt.probe.messages import Exchange, Shapes, exchanges


class Staged(Mirrors):
    """Mirrors of a mean: the time is split by what follows: "presence", the stages of its exchanges
    (:attr:`commopt.probe.messages.Exchange.stages`), the "end". Of a verb that exchanges have twice, all of them have
    the first before one has the second.

    Args:
        world_size, synchronize: as for :class:`Mirrors`.
        exchanges: of a mean.
    """

    def __init__(self, world_size: int, synchronize: Callable[[], None], exchanges: Iterable[Exchange]) -> None:
        self.of_each = Counter(stage for exchange in exchanges for stage in exchange.stages)
        super().__init__(world_size, synchronize)

    def reset(self) -> None:
        super().reset()
        self.stages = defaultdict[str, deque[str]](deque)  # those to come, by verb
        for stage, times in sorted(self.of_each.items()):
            self.stages[stage.split()[0]].extend([stage] * times)

    def note(self, verb: str) -> Work:
        stages = self.stages[verb]  # none of what is of no exchange
        return super().note(stages.popleft() if stages else verb)


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
        """Number of parameters."""
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

    def costs(
        self, spec: OfGradients, bucket_bytes: int, machine: int = 1, inside: Compressor | None = None
    ) -> dict[str, float]:
        """Seconds per parameter, by what follows; see :class:`Staged`.

        Args:
            spec, bucket_bytes: as for :meth:`handle`.
            machine: ranks of a machine, where machines are nodes.
            inside: as for :meth:`handle`.
        """
        world_size = self.stand.world_size
        sent = exchanges(self.shapes, spec, world_size, bucket_bytes, machine=machine, inside=inside)
        mirrors = Staged(world_size, self.stand.synchronize, chain.from_iterable(sent))
        backend = mirrors if machine == 1 else MirroredMachines(mirrors, machine)
        handle = self.handle(spec, bucket_bytes, backend, inside)

        def step() -> None:
            self.bring()
            self.stand.synchronize()
            mirrors.reset()
            self.take(handle)

        seconds = mirrors.time(self.stand, step)
        handle.remove()
        return {{"agreement": "presence"}.get(stage, stage): s / self.params for stage, s in seconds.items()}

    def rehearsal(
        self, spec: OfGradients, bucket_bytes: int, backend: Backend, inside: Compressor | None = None
    ) -> float:
        """Seconds of a mean over the real network, by ``backend``."""
        handle = self.handle(spec, bucket_bytes, backend, inside)
        self.bring()
        seconds = self.stand.time(lambda: self.take(handle))
        handle.remove()
        return seconds
