"""FSDP2's reduce-scatter of a parameter group, compressed, with error feedback where it is wanted.

    z = g + e;  row r of C[z] goes to rank r;  e <- z - C[z];   rank r takes the mean of the rows it gets

One phase, as in LoCo (arXiv 2407.04480): what a rank has averaged is its own, and not sent again. So the way
back has no residual. That of a rank has the size of the gradient of the whole group, for that is what it compresses.

On nodes of L ranks, two levels, as in SDP4Bit (arXiv 2410.15526):

    g <- mean over the node of D[g], of the rows of this rank's place in its node;   then as above, between the nodes

D is another compressor, without feedback, or none. The residual is of the rows of a place, an L-th. (The paper has
integers of 8 bits for D, rotated ones of 4 bits for C, and no feedback.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from commopt import ops
from commopt.comm import Work, compressed_reduce_scatter, wait
from commopt.compress import Compressor
from commopt.gradients.fsdp import Group
from commopt.gradients.loco import MEMORY, LoCo
from commopt.gradients.loss_scale import rescale_
from commopt.gradients.shard_group import ShardGroup
from commopt.sharding import local


class GroupResidual(Protocol):
    """A rank's residual of a flat tensor of a group, (M, columns), of M ranks; changes with :meth:`commit` only."""

    def read(self) -> Tensor:
        """It, with what the mean under way has changed; not to be written to."""

    def write(self, lost: Tensor, before: Tensor) -> None:
        """Notes what is ``lost`` where the residual was ``before``. Takes ``lost`` over."""

    def commit(self) -> None:
        """Makes what was noted the present."""

    def forget(self) -> None:
        """Forgets what was noted."""

    def rescale(self, factor: float) -> None:
        """Multiplies it by ``factor``. No mean is under way."""

    def state(self) -> dict[str, Any]:
        """State that tells it to the bit, beside its values; copies. Each kind of residual has keys of its own."""

    def load(self, values: Tensor, state: dict[str, Any]) -> None:
        """Makes it ``values``, (M, columns); to the bit, if ``state`` is of this kind."""


class Kept:
    """Error feedback: what was lost, as it is. ``exactly``: whether what is saved of it are not its values."""

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device, exactly: bool = False) -> None:
        self._exactly = exactly
        self._now = torch.zeros(shape, dtype=dtype, device=device)
        self._next: Tensor | None = None

    def read(self) -> Tensor:
        return self._now if self._next is None else self._next

    def write(self, lost: Tensor, before: Tensor) -> None:
        self._next = lost

    def commit(self) -> None:
        self._now, self._next = self.read(), None

    def forget(self) -> None:
        self._next = None

    def rescale(self, factor: float) -> None:
        rescale_(self._now, factor)

    def state(self) -> dict[str, Any]:
        return {"rows": self.read().clone()} if self._exactly else {}

    def load(self, values: Tensor, state: dict[str, Any]) -> None:
        self._now, self._next = state.get("rows", values).to(self._now, copy=True), None


class Averaged:
    """LoCo's: a moving average in 8 bits, forgotten now and then."""

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device, loco: LoCo) -> None:
        self._loco, self._shape, self._dtype, self._means = loco, shape, dtype, 0
        nbytes = MEMORY.nbytes(shape[0] * shape[1], dtype)
        self._now = torch.zeros(1, nbytes, dtype=torch.uint8, device=device)
        self._next: Tensor | None = None

    def read(self) -> Tensor:
        now = self._now if self._next is None else self._next
        values = torch.empty(self._shape, dtype=self._dtype, device=now.device)
        MEMORY.decompress(now, values.view(1, -1))
        return values

    def write(self, lost: Tensor, before: Tensor) -> None:
        self._next = torch.empty_like(self._now)
        MEMORY.compress(lost.lerp_(before, self._loco.beta).view(1, -1), self._next)

    def commit(self) -> None:
        if self._next is None:
            return
        self._now, self._next = self._next, None
        self._means += 1
        every = self._loco.reset_every
        if every is not None and self._means % every == 0:
            self._now.zero_()

    def forget(self) -> None:
        self._next = None

    def rescale(self, factor: float) -> None:
        rescale_(MEMORY.scales(self._now, self._shape[0] * self._shape[1]), factor)

    def state(self) -> dict[str, Any]:
        return {"bytes": self._now.clone(), "means": self._means}

    def load(self, values: Tensor, state: dict[str, Any]) -> None:
        MEMORY.compress(values.to(self._now.device, self._dtype).contiguous().view(1, -1), self._now)
        self._next = None
        if "bytes" in state:  # decoded and encoded again, a scale may differ by its last bit
            self._now.copy_(state["bytes"])
            self._means = state["means"]


class GroupMean:
    """For FSDP, in place of its reduce-scatter.

    Args:
        group: whose gradients.
        ranks: those that the parameters are cut over, counted.
        compressor: the same on all of them.
        feedback: whether what is lost is kept, and sent later, or LoCo's way to.
        begin: called before a mean is taken, whose end is to come; None: it has none, for the mean goes on elsewhere.
        inside: what is sent inside a node is compressed with this; None: it is in full precision.

    Attributes:
        sound: whether what this rank has received since the last end is finite; 0-d bool, or None for nothing.
        residual: of this rank; None without feedback.
        fp32_bytes: what reduce-scatters of float32 would have sent since that was set to 0.
    """

    def __init__(
        self,
        group: Group,
        ranks: ShardGroup,
        compressor: Compressor,
        feedback: bool | LoCo,
        begin: Callable[[], None] | None,
        inside: Compressor | None = None,
    ) -> None:
        self.group, self.compressor, self._inside = group, compressor, inside
        self._ranks, self._begin = ranks, begin
        self.sound: Tensor | None = None
        self.fp32_bytes = 0
        self.residual: GroupResidual | None = None
        self.dtype = group.dtype  # as it was, also where parameters are cast later
        of = (len(ranks.rows), group.columns), self.dtype, group.device
        if isinstance(feedback, LoCo):
            self.residual = Averaged(*of, feedback)
        elif feedback:
            self.residual = Kept(*of, exactly=ranks.has_nodes)

    # for FSDP ---------------------------------------------------------------------------------------------------------

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what goes in, and for what comes out."""
        return torch.empty(*size, dtype=dtype, device=device)

    @torch._disable_dynamo
    @torch.no_grad()
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """output <- the sum (or mean, by ``op``) over the ranks of this rank's row of ``input``.

        Raises:
            commopt.comm.CollectiveError: if a rank is lost.
        """
        if self._begin is not None:
            self._begin()
        world = self._ranks.world_size
        divided = self.group.divided_by(input_tensor.dtype)
        x = input_tensor.view(world, -1).to(self.dtype)
        if divided != 1:
            x = x * divided  # the residual is of gradients as they are
        mean = output_tensor if output_tensor.dtype == x.dtype else x.new_empty(x.shape[1])
        for work in self._mean_of_rows(x, mean):
            wait(work, f"reduce-scatter of the gradients of {self.group.name}")
        mean.mul_((1 if op == dist.ReduceOp.AVG else world) / divided)
        if mean is not output_tensor:
            output_tensor.copy_(mean)
        if self._begin is not None:
            finite = ops.all_finite(output_tensor)
            self.sound = finite if self.sound is None else self.sound & finite
        self.fp32_bytes += 4 * (self._ranks.between.world_size - 1) * x.shape[1]

    def in_range(self) -> Tensor | None:
        """Whether FSDP has rounded what came out to what is finite in float16, whose largest is 65504, 0-d bool; None
        of other dtypes, which reach as far as what is sent."""
        halves = [p.grad for p in self.group.trained if p.grad is not None and p.dtype == torch.float16]
        flags = [ops.all_finite(local(grad)) for grad in halves if local(grad).numel()]
        return torch.stack(flags).all() if flags else None

    def _mean_of_rows(self, x: Tensor, mean: Tensor) -> Iterator[Work]:
        part = yield from self._ranks.mean_inside(x, self._inside)
        between = self._ranks.between
        yield from compressed_reduce_scatter(
            lambda payload: self._compress(part, payload), mean, self.compressor, between
        )

    def _compress(self, x: Tensor, payload: Tensor) -> None:
        if self.residual is None:
            self.compressor.compress(x, payload)
            return
        present = self.group.with_gradient(x.shape[1])
        before = self.residual.read()
        mask = self.group.mask(present)
        mask = None if mask is None else self._ranks.of_place(mask)
        if len(present) == len(self.group.places):
            lost = torch.empty_like(before)
            self.compressor.compress_with_feedback(x, before, payload, mask, lost)
        else:  # the residual of the others stays
            places = [self.group.places[i] for i in present]
            part = torch.cat([before[:, place.start : place.stop] for place in places], 1)
            self.compressor.compress_with_feedback(x, part, payload, mask)
            lost = before.clone()
            for place, mine in zip(places, part.split([place.stop - place.start for place in places], 1)):
                lost[:, place.start : place.stop] = mine
        self.residual.write(lost, before)

    # state ------------------------------------------------------------------------------------------------------------

    def share(self) -> Tensor:
        """This rank's residual, (W, columns), so that its mean over all ranks is that of the mean of gradients."""
        assert self.residual is not None
        residual, ranks = self.residual.read(), self._ranks
        if not ranks.has_nodes:
            return residual
        share = residual.new_zeros(ranks.world_size, residual.shape[1])
        share[ranks.rows] = ranks.inside.world_size * residual  # of the other rows, other ranks of the node
        return share

    def load(self, shares: Tensor, mine: bool, exactly: dict[str, Any]) -> None:
        """Makes this rank's residual its part of ``shares``, (W, columns), the mean of all ranks' shares, or, if it is
        ``mine``, this rank's own; to the bit, if there is what tells it ``exactly``."""
        assert self.residual is not None
        rows = self._ranks.of_place(shares)
        self.residual.load(rows / self._ranks.inside.world_size if mine else rows, exactly)

    # at the end of a backward -----------------------------------------------------------------------------------------

    def end(self, sound: bool) -> None:
        """Ends the means taken: residuals are those after them if all were ``sound``, else what they were.
        Gradients become NaN if they were not, on whichever rank: none takes a step that others do not."""
        if self.residual is not None and self.sound is not None:
            (self.residual.commit if sound else self.residual.forget)()
        if not sound:
            for p in self.group.trained:
                if p.grad is not None:
                    local(p.grad).fill_(torch.nan)
        self.sound = None

    def forget(self) -> None:
        """Forgets the means taken: the backward has failed."""
        if self.residual is not None:
            self.residual.forget()
        self.sound = None
