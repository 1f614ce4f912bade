"""Hooks on parameters."""

from __future__ import annotations

import threading
import time

import torch
from torch import Tensor, nn

from commopt.step.arrival import Arrivals


class Slow:
    """Takes a while for each gradient, and knows how many it was told of at once."""

    def __init__(self) -> None:
        self.inside = self.most = self.seen = 0

    def arrived(self, p: Tensor) -> None:
        self.inside += 1
        self.most = max(self.most, self.inside)
        time.sleep(0.01)
        self.seen += 1
        self.inside -= 1


def test_gradients_that_threads_of_autograd_make_side_by_side_are_told_of_one_at_a_time():
    """As of a model on two devices, each of which has a thread in one backward."""
    watches = Slow()
    params = [[nn.Parameter(torch.ones(3)) for _ in range(8)] for _ in range(2)]
    arrivals = Arrivals(watches)
    arrivals.follow([p for some in params for p in some])
    threads = [threading.Thread(target=sum(p.sum() for p in some).backward) for some in params]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert watches.seen == 16
    assert watches.most == 1
    arrivals.remove()
