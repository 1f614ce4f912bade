"""FSDP2's all-gather of the weights of a parameter group, compressed.

    as they are     all ranks take C[x], of each piece, for the weights
    differences     all ranks hold the weights w that were gathered last;  w <- w + C[x - w],  of each piece

The second is SDP4Bit's (arXiv 2410.15526): what one difference has lost is in the next, as with error feedback, but
nothing is kept for it, for the replica w is there. So 4 bits do, where weights of 4 bits would not. A rank holds w, the
whole model, whatever FSDP frees: where that is too much, take 8 bits as they are. The optimizer steps on x, which is
exact. In backward the weights are those of the forward, and come from w: nothing is sent. A piece follows once for each
x: until a step, every forward of its micro-batches and of evaluations computes with the same weights.

Where weights have moved by more than a tenth of their norm since the last gather, because a checkpoint was loaded, or
are not finite, they are gathered in full; the ranks see that in what they send each other. So they are the first time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from commopt.agreement.checks import check_compressor
from commopt.comm import Traffic, wait
from commopt.compress import Compressor, Int4
from commopt.gradients.fsdp import Group
from commopt.gradients.shard_group import ShardGroup
from commopt.ops.checks import REAL

FAR = 0.1
"""Share of its norm by which a piece may have moved, to be sent as a difference."""

FLAG = 16
"""Bytes after a difference, of which the first says what to do with it. 16, as rows of payloads are."""

FOLLOW, STAY, IN_FULL = 0, 1, 2


@dataclass(frozen=True)
class Differences:
    """Weights as differences to those gathered last, for ``compress_gradients(..., weights=Differences())``.

    Args:
        compressor: of the differences.

    Raises:
        ValueError: for what is no compressor of rows.
    """

    compressor: Compressor = field(default_factory=lambda: Int4(block=2048))

    def __post_init__(self) -> None:
        check_compressor(self.compressor)


class GroupWeights:
    """For FSDP, in place of its all-gather.

    Args:
        group: whose weights.
        ranks: those that the parameters are cut over, counted.
        compressor: the same on all of them.
        traffic: where they count what they send.

    Attributes:
        fp32_bytes: what all-gathers of float32 would have sent since that was set to 0.
    """

    def __init__(self, group: Group, ranks: ShardGroup, compressor: Compressor, traffic: Traffic) -> None:
        self.group, self.compressor, self._ranks, self._traffic = group, compressor, ranks, traffic
        self.fp32_bytes = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the weights of all ranks."""
        return torch.empty(*size, dtype=dtype, device=device)

    @torch._disable_dynamo
    @torch.no_grad()
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        """output <- the rows of all ranks, of which ``input`` is this rank's. As FSDP does it, if fewer ranks have them
        all.

        Raises:
            commopt.comm.CollectiveError: if a rank is lost.
        """
        if group.size() != self._ranks.world_size:  # what was kept of a forward, reshard_after_forward=n
            dist.all_gather_into_tensor(output_tensor, input_tensor, group=group)
            return
        rows = output_tensor.view(self._ranks.world_size, -1)
        if self._traffic.in_step:
            self.fp32_bytes += 4 * (self._ranks.between.world_size - 1) * rows.shape[1]
        if rows.dtype.itemsize == 1:  # of an extension of FSDP's, such as float8: bytes, which Gloo knows
            self._in_full(rows.view(torch.uint8), input_tensor.view(torch.uint8))
        elif rows.dtype.is_floating_point and rows.shape[1]:
            self._gather(rows, input_tensor)
        else:
            self._in_full(rows, input_tensor)

    def _gather(self, rows: Tensor, mine: Tensor) -> None:
        payload = self._payload(self._computed(mine).unsqueeze(0))
        received = payload.new_empty(len(rows), payload.shape[1])
        self._all_gather(received, payload.view(-1))
        if rows.dtype in REAL:
            self.compressor.decompress(received, rows)
        else:
            rows.copy_(self._decoded(received, rows))

    def _payload(self, x: Tensor) -> Tensor:
        """C[x], of (1, n)."""
        nbytes = self.compressor.nbytes(x.shape[1], x.dtype)
        payload = torch.empty(1, nbytes, dtype=torch.uint8, device=x.device)
        self.compressor.compress(x, payload)
        return payload

    def _decoded(self, payload: Tensor, rows: Tensor) -> Tensor:
        values = self._computed(rows.new_empty(0)).new_empty(rows.shape)
        self.compressor.decompress(payload, values)
        return values

    def _in_full(self, rows: Tensor, mine: Tensor) -> None:
        self._all_gather(rows, mine.clone())  # mine may be in rows

    def _computed(self, x: Tensor) -> Tensor:
        """In the dtype that is compressed."""
        return x if x.dtype == torch.float64 else x.float()

    def _all_gather(self, out: Tensor, mine: Tensor) -> None:
        for work in self._ranks.all_gather(out, mine):
            wait(work, f"all-gather of the weights of {self.group.name}")

    # state ------------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """State that this rank adds to make the next gather what it would be; copies."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Takes what :meth:`state` gave; {}: begins anew. All ranks must call this at the same point."""


class GroupDifferences(GroupWeights):
    """As :class:`GroupWeights`, by differences."""

    def __init__(self, group: Group, ranks: ShardGroup, differences: Differences, traffic: Traffic) -> None:
        super().__init__(group, ranks, differences.compressor, traffic)
        self._replica: Tensor | None = None
        self._last: Tensor | None = None  # of this rank's piece, what the replica has followed

    def _gather(self, rows: Tensor, mine: Tensor) -> None:
        replica = self._replica
        if replica is None or replica.shape != rows.shape or replica.dtype != rows.dtype:
            with torch.inference_mode(False):  # they outlive an evaluation that makes them
                self._replica, self._last = torch.empty_like(rows), mine.clone()
            self._in_full(self._replica, mine)
        elif torch._C._current_graph_task_id() == -1:  # else in a backward
            self._follow(replica, mine)
        assert self._replica is not None
        rows.copy_(self._replica)

    def _follow(self, replica: Tensor, mine: Tensor) -> None:
        assert self._last is not None
        x = self._computed(mine)
        difference = x - replica[self._ranks.rank]
        payload = self._payload(difference.unsqueeze(0))
        far = ~(difference.norm() <= FAR * x.norm())  # NaN too
        flag = payload.new_zeros(1, FLAG)
        flag[0, 0] = torch.where(far, IN_FULL, torch.where((mine == self._last).all(), STAY, FOLLOW))
        self._last.copy_(mine)
        sent = torch.cat([payload, flag], 1)
        received = sent.new_empty(len(replica), sent.shape[1])
        self._all_gather(received, sent.view(-1))
        flags = received[:, -FLAG].tolist()
        if IN_FULL in flags:
            self._in_full(replica, mine)
        elif FOLLOW in flags:
            values = self._decoded(received[:, :-FLAG].contiguous(), replica)
            if STAY in flags:
                values[[r for r, flag in enumerate(flags) if flag == STAY]] = 0
            replica.add_(values)

    def state(self) -> dict[str, Any]:
        if self._replica is None or self._last is None:
            return {}
        return {"gathered": self._replica[self._ranks.rank].clone(), "followed": self._last.clone()}

    def load(self, state: dict[str, Any]) -> None:
        self._replica = self._last = None
        if state:
            mine, self._last = (state[name].to(self.group.device, copy=True) for name in ("gathered", "followed"))
            self._replica = mine.new_empty(self._ranks.world_size, len(mine))
            self._in_full(self._replica, mine)
