#!/usr/bin/env python3
"""A rank of scripts/tuned.py: trains all runs of a list, one after another, and writes a line of JSON for each.

torchrun ... scripts/tuned_rank.py RUNS.json OUT.jsonl FOLDER
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from convergence_rank import configure, run
from convergence_tasks import TASKS
from tuned import TUNINGS

from commopt.train.errors import DivergedError
from commopt.train.world import open_world


def main() -> None:
    runs, out, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), Path(sys.argv[3])
    logging.getLogger("commopt").setLevel(logging.ERROR)  # phases begin as they should
    dist.init_process_group("gloo")
    with open_world() as world:
        for i, wanted in enumerate(runs):
            task, tuning = replace(TASKS[wanted["task"]], steps=wanted["steps"]), TUNINGS[wanted["task"]]
            method = replace(tuning.methods[wanted["method"]], optim=tuning.optim_of(wanted["method"], wanted["lr"]))
            begin, where = time.monotonic(), folder / str(i)
            try:
                ended = run(task, configure(task, method, wanted["seed"], where))
                record = {name: ended[name] for name in ("heldout_loss", "bytes", "fp32_bytes")}
            except DivergedError:
                record = {"heldout_loss": math.nan}
            if not math.isfinite(record["heldout_loss"]):
                record = {"heldout_loss": None, "bytes": 0, "fp32_bytes": 0}
            if world.is_main:
                shutil.rmtree(where, ignore_errors=True)
                seconds = time.monotonic() - begin
                line = {**wanted, **record, "seconds": round(seconds, 1)}
                with out.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                print(f"{i + 1} of {len(runs)}: {line}", file=sys.stderr, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
