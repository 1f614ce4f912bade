"""A GradScaler, and a DDP model of which another optimizer has a part: what DDP averages has one scale."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from worlds import on_processes

import commopt


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def steps(rank: int, kind: str, scaled: bool, whole: bool) -> tuple[int, str, bool, bool, int]:
    """How many steps were taken before one is refused, and why; whether the ranks have the same head then, and whether
    a new group is told that scales may differ; how often it was said before. From the fourth on, rank 1 overflows
    alone in what is not averaged."""
    heard = Heard()
    logging.getLogger("commopt").addHandler(heard)
    torch.manual_seed(0)
    body, head = nn.Linear(4, 4), nn.Linear(4, 2)
    ddp = DistributedDataParallel(nn.Sequential(body, head), bucket_cap_mb=1e-5)
    settings: dict[str, Any] = {"lr": 1e-2, "freeze_step": 2} if kind == "OneBitAdam" else {"lr": 1e-2, "period": 2}
    mine = getattr(commopt, kind)((ddp if whole else body).parameters(), **settings)
    commopt.attach(ddp, mine)
    optimizers = [mine] if whole else [mine, torch.optim.SGD(head.parameters(), lr=1e-2)]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    taken, why = 0, ""
    try:
        for t in range(6):
            for optimizer in optimizers:
                optimizer.zero_grad()
            x = torch.ones(3, 4) * (t + 1) * (rank + 1)
            scaler.scale(ddp(x).square().mean()).backward()
            if scaled and t >= 3 and rank == 1:
                body.weight.grad[0, 0] = torch.inf
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            taken += 1
    except ValueError as error:
        why = str(error)
    heads = [torch.empty_like(head.weight) for _ in range(2)]
    torch.distributed.all_gather(heads, head.weight.detach())
    mine.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    logging.getLogger("commopt").removeHandler(heard)
    told = sum(
        "the first step whose gradients stay local will be refused: 2 trainable" in words for words in heard.said
    )
    return taken, why, torch.equal(*heads), mine.param_groups[1].get("scales_may_differ", False), told


def scenes(rank: int, world_size: int) -> dict[Any, Any]:
    logging.getLogger("commopt").propagate = False
    cases = [(k, s, w) for k in ("OneBitAdam", "LocalSGD") for s, w in ((True, True), (True, False), (False, False))]
    return {case: steps(rank, *case) for case in cases}


def test_another_optimizers_part_of_the_model_is_refused_once_scales_may_differ() -> None:
    for rank, found in enumerate(on_processes(2, scenes)):
        for (kind, scaled, whole), (taken, why, equal, may_differ, told) in found.items():
            refused = scaled and not whole
            assert taken == ({"OneBitAdam": 2, "LocalSGD": 0}[kind] if refused else 6)
            assert refused == ("2 trainable parameters of the DistributedDataParallel are not this optimizer's" in why)
            assert equal
            assert told == (refused and kind == "OneBitAdam" and rank == 0), "it has steps before that"
            assert may_differ == (scaled and whole and kind == "OneBitAdam")
