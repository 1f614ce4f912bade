"""A rank of scripts/time_to_loss.py: trains as ``commopt train`` does, and notes what every evaluation has taken.

time_to_loss_rank.py SPEC      run by the bed; SPEC: a JSON file; rank 0 writes a line of JSON for each evaluation

The trainer's own counts of bytes and seconds are not used: they are without evaluation, and do not know hooks of torch.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.utils.tensorboard.writer  # the trainer's records need it: not to be loaded while the clock runs
from netbed import read_counters
from network_rank import bf16, busy_seconds
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from commopt.train.config import Config
from commopt.train.engine import _CONSTANT_BUFFERS
from commopt.train.errors import DivergedError
from commopt.train.loop import Trainer
from commopt.train.parse import from_dict
from commopt.train.tasks import Batch
from commopt.train.world import World, open_world


class OutOfTime(Exception):
    """The limit has passed; raised on all ranks, after the same evaluation."""


class Watched(Trainer):
    """A run of the trainer, with its clocks read after every evaluation.

    Args:
        config, world: as of the trainer.
        hook: of torch, for DistributedDataParallel: {"name": "bf16"}, or {"name": "PowerSGD", "rank": r, "start": s};
            None for none.
        limit: seconds after which the run ends, at the next evaluation.
        out: the file for what is noted.
    """

    def __init__(self, config: Config, world: World, hook: dict[str, Any] | None, limit: float, out: Path) -> None:
        super().__init__(config, world)
        if hook is not None and world.size > 1:
            self._hook_in(**hook)
        self.limit, self.out = limit, out
        self.began: dict[str, float] = {}
        self.evaluating = 0.0
        self.data = checksum(*(p.detach() for p in self.model.parameters()))
        """Of the weights that this rank begins with and of all inputs that it has had since."""

    def _hook_in(self, name: str, rank: int = 0, start: int = 0) -> None:
        if name == "bf16":
            self.engine.module.register_comm_hook(None, bf16)  # type: ignore[operator]
            return
        # one bucket: the hook starts collectives from callbacks, whose order over several differs between ranks
        wrapped = DistributedDataParallel(self.model, bucket_cap_mb=1 << 14, **_CONSTANT_BUFFERS)
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=max(2, start))
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        self.engine.module = wrapped

    def train_step(self) -> dict[str, Any]:
        """A step; the clock starts with the first one, when all ranks have come to it."""
        if not self.began:
            self.world.any(False)
            self.began = clocks()
        return super().train_step()

    def evaluate(self) -> float:
        """The held-out loss; what the run has taken until it is known is noted."""
        before = time.perf_counter()
        loss = super().evaluate()
        now = clocks()
        self.evaluating += now["seconds"] - before
        passed = {key: value - self.began[key] for key, value in now.items()}
        totals = self.world.reduce([passed["seconds"], passed["bytes"], passed["own"], self.data])
        seconds, sent, own, data = totals
        point = {
            "step": self.step,
            "seconds": passed["seconds"],
            "evaluating": self.evaluating,
            "bytes": sent / self.world.size,
            "loss": loss if math.isfinite(loss) else None,
            "own": own,
            "busy": passed["busy"],
            "data": int(data),
        }
        self._note(point)
        if seconds / self.world.size > self.limit and self.step < self.config.train.steps:
            raise OutOfTime
        return loss

    def _note(self, point: dict[str, Any]) -> None:
        if self.world.is_main:
            with self.out.open("a") as file:
                file.write(json.dumps(point) + "\n")

    def _batch(self, number: int) -> Batch:
        inputs, labels = super()._batch(number)
        self.data = checksum(inputs, start=self.data)
        return inputs, labels


def checksum(*tensors: torch.Tensor, start: int = 0) -> int:
    """CRC-32 of the tensors' bytes, after what ``start`` is of."""
    for tensor in tensors:
        start = zlib.crc32(tensor.contiguous().numpy(), start)
    return start


def clocks() -> dict[str, float]:
    """Seconds, bytes that this rank's NIC has sent, and CPU seconds: this rank's, and those of the whole machine."""
    return {
        "seconds": time.perf_counter(),
        "bytes": read_counters(os.environ["GLOO_SOCKET_IFNAME"])["tx_bytes"],
        "own": time.process_time(),
        "busy": busy_seconds(),
    }


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(asctime)s %(levelname)s %(message)s")
    if os.environ["RANK"] == "0":
        logging.getLogger("commopt").setLevel(logging.INFO)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    config: Config = from_dict(spec["config"])
    out, ended = Path(spec["out"]), "at the end"
    with open_world(config.comm) as world:
        run = Watched(config, world, spec["hook"], spec["limit"], out)
        try:
            run.run()
        except OutOfTime:
            ended = "out of time"
        except DivergedError as error:
            ended = f"diverged: {error}"
        run._note({"ended": ended, "parameters": sum(p.numel() for p in run.model.parameters())})


if __name__ == "__main__":
    main()
