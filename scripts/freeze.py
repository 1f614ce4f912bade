#!/usr/bin/env python3
"""When does the warm-up end by itself, and what does the run come to? freeze_step="auto" against fixed numbers of a
grid and against no compression at all, on the tasks of scripts/convergence_tasks.py.

    scripts/freeze.py [RUN ...] [--json FILE]
    scripts/freeze.py --update-docs               # the table of docs/onebit_adam.md, no run

A run is task,seed,steps,lr,beta2,method, as in bert,0,600,1e-3,0.98,adam=auto. A method is adam, lamb or zero (0/1
Adam), and the end of its warm-up: auto, a number, never, or a number and "!" for thaw="always". A 7th field is how
often the learning rate falls, 1 if there is none: each time but the first it starts at its peak. Two ranks, on threads
of this process. What the file of figures has already is not run again.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import digits
import torch
from convergence_tasks import TASKS
from marked import markdown, put
from torch.nn import functional as F

import commopt
from commopt.comm import ThreadBackend
from commopt.comm.threads import ThreadWorld
from commopt.optim import Guard, SyncPolicy, VariancePolicy
from commopt.train.config import Config, OptimConfig
from commopt.train.data import load_corpus
from commopt.train.loop import learning_rate
from commopt.train.models import make_model
from commopt.train.parse import from_dict, parse
from commopt.train.stop import StopSignal
from commopt.train.tasks import IGNORE, make_samples
from commopt.train.world import open_world

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "benchmarks" / "freeze.json"
MARKS = "<!-- freeze: made by scripts/freeze.py --update-docs -->", "<!-- /freeze -->"
RANKS = 2
BATCH = {"gpt": 8}
NEVER = 10**6
DECAY = {"gpt": 0.1}

Record = dict[str, Any]


class Run:
    """Data and model of one rank of a run."""

    def __init__(self, task: str, seed: int, steps: int, lr: float) -> None:
        of = TASKS[task]
        config = Config()
        if of.config is not None:
            config = parse([str(ROOT / "configs" / f"{of.config[0]}.yaml"), *of.config[1:]])
        optim = from_dict({**of.optim, "name": "AdamW", "lr": lr}, OptimConfig)
        train = replace(config.train, steps=steps, batch_size=BATCH.get(task, of.batch), seed=seed)
        self.config = replace(config, optim=optim, train=train)
        self.images = digits.load() if of.config is None else None
        if self.images is None:
            with StopSignal() as stop, open_world(config.comm, stop) as world:
                corpus = load_corpus(config.data, world)
            self.samples = make_samples(self.config, corpus)
            torch.manual_seed(seed)
            self.model: Any = make_model(self.config, corpus.vocab_size)
        else:
            torch.manual_seed(seed)
            self.model = digits.ResNet()
            order = torch.Generator().manual_seed(1000 + seed)
            self.order = torch.randint(0, len(self.images[0][1]), (steps, train.batch_size), generator=order)

    def loss(self, step: int, rank: int) -> torch.Tensor:
        """Of this rank's share of the batch."""
        if self.images is not None:
            (pixels, labels), chosen = self.images[0], self.order[step][rank::RANKS]
            return F.cross_entropy(self.model(pixels[chosen]), labels[chosen])
        batch = self.config.train.batch_size
        first, share = step * batch + rank * batch // RANKS, batch // RANKS
        loss: torch.Tensor = self.model(*self.samples.train_batch(range(first, first + share)))
        return loss

    @torch.no_grad()
    def heldout(self) -> float:
        """Mean loss on held-out data."""
        self.model.eval()
        if self.images is not None:
            return float(F.cross_entropy(self.model(self.images[1][0]), self.images[1][1]))
        count = min(self.config.train.eval_samples, len(self.samples.heldout))
        chosen = torch.linspace(0, len(self.samples.heldout) - 1, count, dtype=torch.float64).long().tolist()
        total = places = 0.0
        for start in range(0, count, 32):
            inputs, labels = self.samples.heldout_batch(chosen[start : start + 32])
            here = int((labels != IGNORE).sum())
            total, places = total + float(self.model(inputs, labels)) * here, places + here
        return total / places


def rate(config: Config, step: int, cycles: int) -> float:
    """Learning rate of a step, which falls ``cycles`` times; only before the first does it warm up."""
    cycle = config.train.steps // cycles
    within = step % cycle if step < cycle else max(step % cycle, config.optim.warmup_steps)
    return learning_rate(replace(config, train=replace(config.train, steps=cycle)), within)


def optimizer_of(run: Run, method: str, lr: float, beta2: float, weight_decay: float, backend: ThreadBackend) -> Any:
    kind, _, end = method.partition("=")
    thaw = "always" if end.endswith("!") else "auto"
    at: Any = "auto" if end == "auto" else NEVER if end == "never" else int(end.rstrip("!"))
    common: dict[str, Any] = {
        "lr": lr, "betas": (0.9, beta2), "weight_decay": weight_decay, "backend": backend,
        "guard": Guard(check_every=None),
    }  # fmt: skip
    if kind == "zero":
        policies = {"variance": VariancePolicy(64, at), "sync": SyncPolicy(1, 120, 4)}
        return commopt.ZeroOneAdam(run.model.parameters(), thaw=thaw, **policies, **common)
    cls = {"adam": commopt.OneBitAdam, "lamb": commopt.OneBitLamb}[kind]
    return cls(run.model.parameters(), freeze_step=at, thaw=thaw, **common)


def fields(spec: str) -> list[str]:
    """Of a run: task, seed, steps, lr, beta2, method, cycles of the learning rate."""
    given = spec.split(",")
    return given if len(given) == 7 else [*given, "1"]


def train(spec: str) -> Record:
    """One run: its held-out loss, and the steps at which its warm-up ended, and began anew."""
    task, seed, steps, lr, beta2, method, cycles = fields(spec)
    runs = [Run(task, int(seed), int(steps), float(lr)) for _ in range(RANKS)]

    def on_rank(backend: ThreadBackend) -> Record:
        run, ends = runs[backend.rank], list[list[Any]]()
        optimizer = optimizer_of(run, method, float(lr), float(beta2), DECAY.get(task, 0.01), backend)
        group, compressed = optimizer.param_groups[0], 0
        for step in range(int(steps)):
            group["lr"] = rate(run.config, step, int(cycles))
            optimizer.zero_grad()
            run.loss(step, backend.rank).backward()
            compressed += optimizer.phase in ("compressed", "frozen")
            before = optimizer.phase
            optimizer.step()
            if optimizer.phase != before:
                ends.append([step + 1, optimizer.phase])
        with optimizer.averaged():
            return {"spec": spec, "loss": run.heldout(), "ends": ends, "compressed": compressed / int(steps)}

    return ThreadWorld(RANKS, 600.0).run(on_rank)[0]  # type: ignore[no-any-return]


def rows(records: list[Record]) -> Iterator[list[str]]:
    """The lines of the table: runs that differ in nothing but the seed are one."""
    by: dict[tuple[str, ...], dict[str, dict[int, Record]]] = {}
    for record in records:
        task, seed, steps, lr, beta2, method, cycles = fields(record["spec"])
        kind, _, end = method.partition("=")
        by.setdefault((task, cycles, kind, steps, lr, beta2), {}).setdefault(end, {})[int(seed)] = record

    def shown(runs: dict[int, Record]) -> str:
        losses = [run["loss"] for run in runs.values()]
        digits_ = 3
        text = f"{statistics.mean(losses):.{digits_}f}"
        return text if len(losses) == 1 else f"{text} ({min(losses):.{digits_}f} to {max(losses):.{digits_}f})"

    names = {"adam": "OneBitAdam", "lamb": "OneBitLamb", "zero": "ZeroOneAdam"}
    for (task, cycles, kind, steps, lr, beta2), ends in sorted(by.items()):
        again = "" if cycles == "1" else f", {cycles} cycles"
        if "auto" not in ends:
            continue
        auto = ends["auto"]
        fixed = [f"{end}: {shown(ends[str(end)])}" for end in sorted(int(end) for end in ends if end.isdigit())]
        when = [" → ".join(str(step) for step, _ in run["ends"]) or "not at all" for run in auto.values()]
        yield [
            f"{task}, {steps} steps{again}, lr {lr}, β₂ {beta2}", names[kind], str(len(auto)),
            shown(ends.get("never", {})) if "never" in ends else "", "; ".join(fixed), shown(auto), ", ".join(when),
        ]  # fmt: skip


def table(records: list[Record]) -> str:
    """The figures as a Markdown table."""
    head = ["task", "optimizer", "seeds", "never frozen", "frozen at", '"auto"', "its warm-ups ended at"]
    return markdown(head, rows(records))


def update_docs(records: list[Record], root: Path = ROOT) -> None:
    put(table(records), root / "docs" / "onebit_adam.md", MARKS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="*", help="task,seed,steps,lr,beta2,method")
    parser.add_argument("--json", type=Path, default=FIGURES, help=f"figures; {FIGURES.name} by default")
    parser.add_argument("--update-docs", action="store_true", help="the table of docs/onebit_adam.md; no run")
    args = parser.parse_args()
    logging.getLogger("commopt").setLevel(logging.ERROR)
    records: list[Record] = json.loads(args.json.read_text()) if args.json.exists() else []
    for spec in args.runs:
        if spec not in {record["spec"] for record in records}:
            records.append(train(spec))
            args.json.write_text(json.dumps(records, indent=1) + "\n")
            print(records[-1], flush=True)
    if args.update_docs:
        update_docs(records)


if __name__ == "__main__":
    main()
