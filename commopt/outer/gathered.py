"""Payloads of each rank, of some buckets, gathered by all ranks, and their means: nothing is compressed a second time.

One all-gather of a payload row of each rank, so a rank sends W - 1 rows and receives as many. With nodes of several
ranks, i is a node: each of its ranks sends a part of the bucket on its behalf, and the rows are shared in the node.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from commopt.comm import Channel, Task, Work, gather_rows, message_device, reduce_scatter
from commopt.compress import Compressor
from commopt.optim.masks import padding_mask
from commopt.outer.means import Entry, Means
from commopt.outer.rounds import mean_pseudo_gradient
from commopt.state.host import square_sums
from commopt.state.state_bucket import StateBucket

Over = Literal["ranks", "contributors"]
"""Ranks that a mean is over: all; or, element by element, those whose message has something there."""


class Gathered:
    """The messages of all M nodes (of all ranks, without nodes) about one bucket.

    Args:
        bucket: has the residuals, and is no one node's alone.
        compressor: the same on every rank.

    Attributes:
        payload: (L, M, nbytes) uint8, L the ranks of a node: row [l, i] is what node i sends of part l.
        squares: of what this rank has sent of each parameter, the sum of squares, if that was asked for.
    """

    payload: Tensor
    squares: Sequence[float]

    def __init__(self, bucket: StateBucket, compressor: Compressor) -> None:
        self.bucket, self.compressor = bucket, compressor

    def send(self, d: Tensor, decay: float, send: Channel, reply: Channel, norms: bool) -> Iterator[Work]:
        """Sends e <- decay e + d, compressed; what was sent is taken out of e. The caller commits the residuals e.

        Args:
            d: (padded,) of the bucket's dtype, unchanged.
            decay: of the residuals.
            send, reply: the ranks, on the channels for what goes out, and for what is shared in a node.
            norms: whether ``squares`` are asked for.

        Yields:
            Each collective as it starts; the caller waits for it before it resumes the generator.
        """
        bucket, compressor, feedback = self.bucket, self.compressor, self.bucket.feedback
        assert feedback is not None
        inside, between = reply.intra_node, send.inter_node
        if inside.world_size > 1:
            d = yield from reduce_scatter(d, send.intra_node)
        own = torch.empty(1, compressor.nbytes(d.numel(), d.dtype), dtype=torch.uint8, device=d.device)
        mask = bucket.part(padding_mask(bucket)).view(1, -1)
        rest = torch.mul(feedback.worker, decay, out=feedback.next_worker)
        compressor.compress_with_feedback(d.view(1, -1), rest.view(1, -1), own, mask)
        payload = own.new_empty(between.world_size, own.shape[1])
        work = between.all_gather(payload, own[0])
        if norms:
            sent = d.new_empty(1, d.numel())
            compressor.decompress_active(own, sent, mask)
            self.squares = square_sums(bucket.part_views(sent[0]))
        yield work
        self.payload = payload.unsqueeze(0)
        if inside.world_size > 1:
            self.payload = payload.new_empty(inside.world_size, *payload.shape)
            yield inside.all_gather(self.payload.flatten(1), payload.flatten())

    def is_sound(self) -> bool:
        """True if what was received can be right."""
        part = self.bucket.padded // len(self.payload)
        return bool(self.compressor.is_sound(self.payload.flatten(0, 1), part, self.bucket.dtype))

    def mean(self, out: Tensor, over: Over, factors: Sequence[Sequence[float]] | None = None) -> None:
        """Writes the mean of the messages.

        Args:
            out: (padded,) of the bucket's dtype, written with the same bits on every rank.
            over: what it is the mean over.
            factors: for each node, of each parameter, by how much its message is multiplied; None: by 1.
        """
        parts = out.view(len(self.payload), -1)
        if over == "ranks" and factors is None:
            for rows, part in zip(self.payload, parts):
                self.compressor.decompress_mean(rows, part)
            out[self.bucket.numel :] = 0
            return
        nodes, message = self.payload.shape[1], torch.empty_like(out)
        count = torch.zeros_like(out) if over == "contributors" else None
        out.zero_()
        for i in range(nodes):
            for rows, part in zip(self.payload, message.view_as(parts)):
                self.compressor.decompress(rows[i : i + 1], part.view(1, -1))
            message[self.bucket.numel :] = 0
            if count is not None:
                count.add_(message != 0)
            if factors is not None:
                torch._foreach_mul_(self.bucket.views(message), list(factors[i]))
            out.add_(message)
        out.div_(nodes if count is None else count.clamp_(min=1))


class GatheredMeans(Means):
    """Means of gathered messages: e_r <- b e_r + D_r;  s_r = C(e_r);  e_r <- e_r - s_r;  D <- mean_r s_r.

    Args:
        entries, flats: as of :class:`Means`; groups have ``error_decay``, which is b.
        compressor: C, the same on every rank.
        over: what the means are over.
        clip: whether messages are made no longer than the median.
    """

    def __init__(
        self, entries: Sequence[Entry], flats: list[Tensor], compressor: Compressor, over: Over, clip: bool
    ) -> None:
        super().__init__(entries, flats, compressor)
        self.blocks, self._over = clip, over
        alone = [bucket.feedback is None for bucket, _ in entries]  # this rank, or its node
        self._sent = {i: Gathered(bucket, compressor) for i, (bucket, _) in enumerate(entries) if not alone[i]}

    def task(self, i: int, send: Channel, reply: Channel) -> Task:
        bucket, group = self.entries[i]
        if i not in self._sent:
            return mean_pseudo_gradient(self.flats[i], bucket, None, send, reply)
        return self._sent[i].send(self.flats[i], group["error_decay"], send, reply, norms=self.blocks)

    def finish(self, where: str) -> bool:
        sent = list(self._sent.values())
        clips = factors_to_median(sent, where) if self.blocks else [None] * len(sent)
        sound = all(messages.is_sound() for messages in sent)
        for (i, messages), factors in zip(self._sent.items(), clips if sound else ()):
            messages.mean(self.flats[i], self._over, factors)
        return sound and super().finish(where)


def factors_to_median(gathered: Sequence[Gathered], where: str) -> list[list[list[float]]]:
    """For each bucket, for each node, of each parameter: what makes its message no longer than the median of the nodes'
    messages about the parameter (2-norms of whole tensors). One small all-gather a bucket, in order; blocks.

    Nodes that have sent nothing of a parameter do not count; of two in the middle, the lower one is the median.
    """
    out = []
    for messages in gathered:
        bucket, squares = messages.bucket, messages.squares
        inside, between = bucket.replicas.intra_node, bucket.replicas.inter_node
        if inside.world_size > 1:
            row = torch.tensor(squares, dtype=torch.float64, device=message_device(inside))
            squares = gather_rows(inside, row, where).sum(0).tolist()
        row = torch.tensor(bucket.total(squares), dtype=torch.float64, device=message_device(between))
        table: list[list[float]] = gather_rows(between, row, where).sqrt().tolist()
        columns = [_no_longer_than_median(norms) for norms in zip(*table)]
        out.append([list(factors) for factors in zip(*columns)])
    return out


def _no_longer_than_median(norms: Sequence[float]) -> list[float]:
    """Factors of vectors of these norms."""
    there = sorted(norm for norm in norms if norm > 0)
    median = there[(len(there) - 1) // 2] if there else 0.0
    return [min(1.0, median / norm) if norm > 0 else 1.0 for norm in norms]
