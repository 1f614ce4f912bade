"""The mean of a bucket in blocks that all ranks agree on: :class:`commopt.compress.TopBlocks`.

A rank's residual is what it has outside of the blocks that are sent; of the means nothing is lost. With nodes of
several ranks these take their mean in full, and each then agrees on blocks of its part with those of its place in the
other nodes.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from commopt import ops
from commopt.comm import STARTED, Channel, Work, reduce_scatter
from commopt.compress import Feedback, TopBlocks
from commopt.gradients.flat import Flat
from commopt.gradients.method import Brought, BucketMean, packed
from commopt.optim.masks import absent_runs, within
from commopt.state.state_bucket import StateBucket


class AgreedBlocks(Flat):
    """Means of blocks.

    Args:
        spec: how many of them, and how large.
        feedback: whether what is not sent is kept, and sent later.
    """

    def __init__(self, spec: TopBlocks, feedback: bool) -> None:
        super().__init__(feedback)
        self.spec = spec

    def mean(
        self, bucket: StateBucket, brought: Brought, absent: Sequence[int], send: Channel, reply: Channel
    ) -> Generator[Work, None, BucketMean]:
        local_ranks, first = bucket.local_world_size, send.inter_node
        if local_ranks > 1:
            part = yield from reduce_scatter(packed(bucket, brought), send.intra_node)
            brought, first = [(part, 0)], reply.inter_node
        feedback = self.residuals(bucket)
        n, runs = feedback.worker.numel(), absent_runs(bucket, absent)
        mine = within(runs, bucket.local_rank * n, n)
        shard = feedback.server.numel()
        spared = feedback.spare(mine, within(runs, bucket.shard_index * shard, shard))
        a = _with_residuals(brought, feedback, reply.inter_node.rank)
        for at in mine:
            a[at] = 0
        importance = self.spec.importance(a, bucket.replicas.nodes)
        if importance.numel():
            yield first.all_reduce(importance)
            first = reply.inter_node
        blocks = self.spec.choose(importance, n)
        values = blocks.gather(a)
        blocks.zero_(a)
        work, whole = first.all_reduce(values), values
        if local_ranks > 1:
            yield work
            sent = torch.zeros_like(a)
            blocks.scatter_(sent, values)
            whole = bucket.zeros()
            work = reply.intra_node.all_gather(whole.view(local_ranks, -1), sent)
        yield STARTED
        yield work

        def write(outs: Sequence[Tensor]) -> None:
            mean = whole
            if local_ranks == 1:
                mean = self.scratch(bucket).zero_()
                blocks.scatter_(mean, values)
            torch._foreach_copy_(list(outs), bucket.views(mean))

        return BucketMean(bucket, ops.all_finite(whole), write, lambda: feedback.commit(spared), feedback.let_go)


def _with_residuals(brought: Brought, feedback: Feedback, node: int) -> Tensor:
    """The next residual of the worker: gradients plus its residual; also plus that of means, which another way to take
    them may have left: it counts W times in one of W ranks. The next one of means becomes 0."""
    a = feedback.next_worker.copy_(feedback.worker)
    for g, start in brought:
        a[start : start + g.numel()].view(g.shape).add_(g)
    nodes = feedback.worker.numel() // feedback.server.numel()
    a.view(nodes, -1)[node].add_(feedback.server, alpha=nodes)
    feedback.next_server.zero_()
    return a
