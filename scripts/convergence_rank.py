#!/usr/bin/env python3
"""A rank of scripts/convergence.py: trains all runs of a list, one after another, and writes a line of JSON for each.

    torchrun ... scripts/convergence_rank.py RUNS.json OUT.jsonl FOLDER

A run is [task, method, seed]. Language models go through ``commopt train``'s loop; their run folders are in FOLDER.
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import digits
import torch
import torch.distributed as dist
from convergence_tasks import TASKS, Method, Task
from torch.nn import functional as F

from commopt.train.config import CommConfig, Config, OptimConfig, ParallelConfig
from commopt.train.engine import make_engine
from commopt.train.loop import learning_rate, train
from commopt.train.parallel import open_mesh
from commopt.train.parse import from_dict, parse
from commopt.train.world import World, open_world

ROOT = Path(__file__).resolve().parent.parent
images = cache(digits.load)


def configure(task: Task, method: Method, seed: int, folder: Path) -> Config:
    """The config of a run."""
    config = Config()
    if task.config is not None:
        name, *overrides = task.config
        config = parse([str(ROOT / "configs" / f"{name}.yaml"), *overrides])
    run = {"steps": task.steps, "batch_size": task.batch, "seed": seed, "run_dir": str(folder), "keep": 1}
    often = {"log_every": task.steps // 10, "eval_every": task.steps // 5, "checkpoint_every": task.steps}
    return replace(
        config,
        optim=from_dict({**task.optim, **method.optim}, OptimConfig),
        comm=from_dict(method.comm, CommConfig),
        parallel=from_dict(method.parallel, ParallelConfig),
        train=replace(config.train, **run, **often),
    )


def train_digits(config: Config, world: World) -> dict[str, Any]:
    """Trains the residual network; what it makes of the images held out."""
    (pixels, labels), (new_pixels, new_labels) = images()
    seed, batch = config.train.seed, config.train.batch_size
    torch.manual_seed(seed)
    model = digits.ResNet()
    engine, sent, full = make_engine(config, model, world), 0, 0
    order = torch.Generator().manual_seed(1000 + seed)
    for step in range(config.train.steps):
        for group in engine.optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        chosen = torch.randint(0, len(labels), (batch,), generator=order)[world.rank :: world.size]
        engine.optimizer.zero_grad()
        F.cross_entropy(engine.module(pixels[chosen]), labels[chosen]).backward()
        engine.step()
        sent, full = sent + engine.traffic().bytes, full + engine.traffic().fp32_bytes
    with engine.averaged(), torch.no_grad():
        answers = model(new_pixels)
    right = (answers.argmax(1) == new_labels).float().mean()
    loss = F.cross_entropy(answers, new_labels)
    return {"heldout_loss": float(loss), "accuracy": float(right), "bytes": sent, "fp32_bytes": full}


def run(task: Task, config: Config) -> dict[str, Any]:
    """Trains what a config of :func:`configure` says: a language model as ``commopt train`` does, or the digits."""
    if task.config is None:
        with open_world(config.comm) as world, open_mesh(config, world) as held:
            return train_digits(config, held)
    ended = train(config)
    if not ended["finished"]:
        raise SystemExit(f"{config.train.run_dir} was stopped by a signal")
    return {key: ended[key] for key in ("heldout_loss", "bytes", "fp32_bytes")}


def main() -> None:
    runs, out, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), Path(sys.argv[3])
    logging.getLogger("commopt").setLevel(logging.ERROR)  # phases begin as they should
    dist.init_process_group("gloo")
    with open_world() as world:
        for name, method, seed in runs:
            task = TASKS[name]
            record = run(task, configure(task, task.methods[method], seed, folder / f"{name}-{method}-{seed}"))
            if world.is_main:
                with out.open("a") as file:
                    file.write(json.dumps({"task": name, "method": method, "seed": seed, **record}) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
