"""The training loop.

Everything that decides what a step does is a function of the config, the step and the number of samples consumed; what
is not (weights, optimizer state, dropout's generators, counters) is in the checkpoint. That is why a run that was
stopped and resumed equals one that never was, bit for bit.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch

import commopt.ops
from commopt.comm import CollectiveError
from commopt.optim import CommOptimizer
from commopt.outer import OuterOptimizer
from commopt.train import checkpoint, lock, resume
from commopt.train.alike import check_alike
from commopt.train.config import Config
from commopt.train.data import load_corpus
from commopt.train.engine import explained, make_engine
from commopt.train.errors import ConfigError, RankError, UserError, explain
from commopt.train.metrics import MB, Meter, Record, Recorder, RunRecorder, quiet_events, ratio, show_ratio
from commopt.train.models import count_parameters, make_model
from commopt.train.optimizer import check_plan
from commopt.train.parallel import MESH, mesh_shape, open_mesh
from commopt.train.parse import to_yaml
from commopt.train.restart import resume_now
from commopt.train.stop import StopSignal
from commopt.train.tasks import IGNORE, Batch, make_samples
from commopt.train.world import World, is_loss_of_contact, open_world

log = logging.getLogger(__name__)

ASK_AFTER = 2.0
"""Seconds of local steps after which ranks ask each other whether one was told to stop: whoever tells them waits for
some 30 at most."""
ASK_AFTER_STEPS = 10
"""Local steps after which they ask at the latest."""


def train(config: Config, stop: StopSignal | None = None) -> Record:
    """Train as ``config`` says; return the end summary. All ranks call it.

    Args:
        config: the run.
        stop: what hears signals, if something does already.

    Raises:
        UserError: on every rank, for a config, corpus or checkpoint that cannot be used, a run folder that is in use, a
            model that has diverged.
        Stopped: on every rank, if one was told to stop before the first step.
        commopt.comm.CollectiveError: the ranks have lost each other.
    """
    check_plan(config)
    to_yaml(config)  # what cannot be written is said now
    with contextlib.nullcontext(stop) if stop is not None else StopSignal() as stop:
        try:
            with open_world(config.comm, stop) as world:
                check_alike(config, world)
                if config.parallel.on_mesh:
                    mesh_shape(config.parallel, world.size)
                piece_size(config, world)
                with lock.hold(Path(config.train.run_dir), world), open_mesh(config, world) as world:
                    return Trainer(config, world).run()
        except RuntimeError as error:
            if is_loss_of_contact(error):  # torch's own words, from DistributedDataParallel
                raise CollectiveError(str(error)) from error
            raise


def learning_rate(config: Config, step: int) -> float:
    """Learning rate of a step (0 is the first): warm-up to the peak, then down as ``optim.decay`` says."""
    optim = config.optim
    peak, warmup, floor = optim.lr, optim.warmup_steps, optim.min_lr_ratio
    if step < warmup:
        return peak * ((step + 1) / warmup) ** optim.warmup_power
    progress = (step - warmup) / max(1, config.train.steps - warmup)
    if optim.decay == "exponential":
        assert optim.decay_rate is not None
        assert optim.decay_every is not None
        left = optim.decay_rate ** ((step - warmup) // optim.decay_every)
    elif optim.decay == "linear":
        left = 1 - progress
    else:
        left = 0.5 * (1 + math.cos(math.pi * progress))
    return peak * (floor + (1 - floor) * left)


def piece_size(config: Config, world: World) -> int:
    """Samples of one forward pass on one rank. Raises ConfigError if the batch cannot be shared out evenly."""
    readers = world.size // config.parallel.tensor
    batch, pieces = config.train.batch_size, readers * config.train.accumulate
    if batch % pieces:
        ranks = "ranks" if config.parallel.tensor == 1 else "ranks / parallel.tensor"
        raise ConfigError(
            f"train.batch_size={batch} is not allowed: it must be a multiple of {ranks} * train.accumulate = "
            f"{readers} * {config.train.accumulate}"
        )
    return batch // pieces


def providers(device: str) -> str:
    """The provider of most operators on a device, and others with the names of theirs, as ``commopt.ops.report`` says:
    no silent slow path."""
    served: dict[str, list[str]] = {}
    for name, by_device in commopt.ops.report().items():
        served.setdefault(by_device.get(device, by_device["default"]), []).append(name)
    most, *others = sorted(served, key=lambda provider: -len(served[provider]))
    return "; ".join([most, *(f"{provider}: {', '.join(served[provider])}" for provider in others)])


def steps_until_asked(seconds: float) -> int:
    """Local steps of so many seconds until ranks ask each other whether one was told to stop."""
    return max(1, min(ASK_AFTER_STEPS, int(ASK_AFTER / max(seconds, 1e-9))))


SETTLES = 60
"""Steps of the shortest warm-up of ``freeze_step="auto"``: its third look (:mod:`commopt.optim.settling`)."""


def warn_of_freeze(group: Mapping[str, Any], steps: int) -> str | None:
    """Warns of what is odd about the end of the warm-up of an optimizer that has one, in a run of so many steps."""
    freeze = group.get("freeze_step")
    if freeze is None:
        return None
    if freeze == "auto":
        if steps > SETTLES:
            return None
        return (
            f'freeze_step="auto" ends no warm-up before step {SETTLES}, and this run has train.steps={steps}: nothing '
            "is compressed; give a number"
        )
    if freeze >= steps:
        return f"freeze_step={freeze} is not before train.steps={steps}: this run never compresses"
    return None


def warn_of_short_run(config: Config) -> str | None:
    """Warns of a run that is over before the learning rate has warmed up."""
    optim, steps = config.optim, config.train.steps
    if optim.warmup_steps <= steps:
        return None
    return (
        f"optim.warmup_steps={optim.warmup_steps} is more than train.steps={steps}: the learning rate only rises, to "
        f"{learning_rate(config, steps - 1):.3g} at the end, and never reaches optim.lr={optim.lr:g}"
    )


class Trainer:
    """A run on this rank: model, optimizer, data position, counters."""

    def __init__(self, config: Config, world: World) -> None:
        self.config, self.world = config, world
        self.piece = piece_size(config, world)
        self.folder = Path(config.train.run_dir) / checkpoint.FOLDER
        self.resume = resume_now(config, self.folder, world)
        found = checkpoint.find(self.folder, self.resume, world)
        init = None if found is not None or config.init is None else Path(config.init)
        if init is not None:  # now, not when a tokenizer has been trained
            world.together(lambda: checkpoint.check_there("init", init, "null or the folder of a checkpoint"))
        self.corpus = load_corpus(config.data, world)
        self.samples = make_samples(config, self.corpus)
        torch.manual_seed(config.train.seed)  # the same weights on every rank
        self.model = make_model(config, self.corpus.vocab_size).to(world.device)
        self.engine = make_engine(config, self.model, world)
        self.step, self.consumed, self.meter = 0, 0, Meter()
        self.skipped = 0  # steps skipped by the rank that has skipped the most, as of the last message
        self.skipping_since: int | None = None  # first of the last steps, if all of those were skipped
        self.lap = (0, 0.0)  # tokens and seconds at the last record
        self.local, self.seconds = False, 0.0  # whether the last step was, and what it took
        self.asks_at = 0  # the step after which ranks ask each other, at the latest, whether one was told to stop
        resume.seed_dropout(self)
        if init is not None:
            resume.take_weights(self, init)
        if found is not None:
            found = resume.take_up(self, found)
            self.lap = (self.meter.tokens, self.meter.seconds)
        self._describe(found)

    def run(self) -> Record:
        """Train until the last step or a signal; return the end summary. Raises Stopped for a signal before that."""
        train, heldout = self.config.train, None
        self.world.heed()
        with self._recording() as recorder, self._until_done():
            while self.step < train.steps:
                with self._naming_step(self.step + 1):
                    record = self.train_step()
                recorder.advance(record["phase"])
                last = self.step == train.steps
                due = last or self.step % train.log_every == 0
                record = self._training_record(record) if due else {"step": self.step}
                if last or self.step % train.eval_every == 0:
                    with self._naming_step(self.step):
                        record["heldout_loss"] = heldout = self.evaluate()
                    self._warn_of(heldout)
                if len(record) > 1:
                    record |= self.meter.totals() | {"skipped_steps": self.skipped}
                    self.world.together(functools.partial(recorder.write, record), name_rank=False)
                stopping = self._told_to_stop(met=len(record) > 1) and not last
                if stopping or last or self.step % train.checkpoint_every == 0:
                    resume.save(self)
                if stopping:
                    break
        return self._summary(heldout)

    def _told_to_stop(self, met: bool) -> bool:
        """True if a rank was told to stop, as far as the ranks ask each other after this step; ``met``: they have
        waited for each other anyway. Behind local steps they do so now and then only, or nothing would be local."""
        met = met or not self.local or self.step % self.config.train.checkpoint_every == 0 or self.world.size == 1
        if not met and self.step < self.asks_at:
            return False
        wished, seconds = self.world.table([self.world.wished, self.seconds]).unbind(1)
        self.asks_at = self.step + steps_until_asked(float(seconds.max()))
        return bool(wished.any())

    def train_step(self) -> Record:
        """One optimizer step; return what happened on this rank, the loss still on its device."""
        start, accumulate = time.perf_counter(), self.config.train.accumulate
        optimizer, lr = self.engine.optimizer, learning_rate(self.config, self.step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad()
        self.local = self.engine.steps_locally
        phase, loss = self.engine.phase, torch.zeros((), device=self.world.device)
        for number in range(accumulate):
            inputs, labels = self._batch(number)
            with self.engine.accumulating(last=number == accumulate - 1), explained():
                with self._autocast():
                    part = self.engine.module(inputs, labels) / accumulate
                part.backward()
            loss += part.detach()
        self.engine.step()
        self.step += 1
        self.consumed += self.config.train.batch_size
        traffic = self.engine.traffic()
        self.skipping_since = (self.skipping_since or self.step) if traffic.skipped else None
        tokens, self.seconds = self.config.train.batch_size * self.config.data.seq_len, time.perf_counter() - start
        self.meter.add(phase, traffic, tokens, self.seconds)
        return {"loss": loss, "lr": lr, "phase": phase, "traffic": traffic}

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss per predicted token over evenly spaced held-out samples, the ranks sharing the work."""
        world, count = self.world, min(self.config.train.eval_samples, len(self.samples.heldout))
        indices = np.linspace(0, len(self.samples.heldout) - 1, count).astype(int)
        mine = indices[world.reader :: world.readers]
        # who holds a model together does as many forward passes, and those with the same samples count them once
        passes = -(-count // world.readers) if world.mesh is not None else len(mine)
        total, predicted = 0.0, 0
        self.model.eval()
        with self.engine.averaged():
            for start in range(0, passes, self.piece):
                part = mine[start : start + self.piece]
                batch = self.samples.heldout_batch((part if len(part) else indices[:1]).tolist())
                inputs, labels = self._to_device(batch)
                with self._autocast():
                    loss = float(self.model(inputs, labels))
                if len(part) and world.rank % world.same_samples == 0:
                    places = int((labels != IGNORE).sum())
                    total += loss * places
                    predicted += places
        self.model.train()
        total, places_of_all = self._reduce([total, predicted])
        return total / max(1.0, places_of_all)

    # --- pieces of a step ---

    def _batch(self, number: int) -> Batch:
        """This rank's ``number``-th piece of the batch: reader r has the r-th run of consecutive samples."""
        first = self.consumed + (self.world.reader * self.config.train.accumulate + number) * self.piece
        return self._to_device(self.samples.train_batch(range(first, first + self.piece)))

    def _to_device(self, batch: Batch) -> Batch:
        inputs, labels = batch
        return inputs.to(self.world.device), labels.to(self.world.device)

    def _autocast(self) -> AbstractContextManager[Any]:
        bf16 = self.config.train.precision == "bf16"
        return torch.autocast(self.world.device.type, torch.bfloat16, enabled=bf16)

    # --- telling ---

    @contextlib.contextmanager
    def _naming_step(self, step: int) -> Iterator[None]:
        """Context in which an error that this rank alone has met says so, with its rank and ``step``, and those of the
        others with theirs; what all ranks have met says where by itself."""
        try:
            yield
        except RankError as error:
            raise RankError(f"step {step}: {error}") from error
        except (UserError, CollectiveError):
            raise
        except Exception as error:
            if not is_loss_of_contact(error):
                log.error("rank %d, step %d: %s", self.world.rank, step, explain(error))
            raise

    def _reduce(self, values: list[float]) -> list[float]:
        """Sums over ranks; how many steps each has skipped goes along."""
        table = self.world.table([*values, self.meter.skipped_steps])
        self.skipped = int(table[:, -1].max())
        return table[:, :-1].sum(0).tolist()

    def _training_record(self, happened: Record) -> Record:
        traffic, meter = happened["traffic"], self.meter
        tokens, seconds = meter.tokens - self.lap[0], meter.seconds - self.lap[1]
        self.lap = (meter.tokens, meter.seconds)
        return {
            "step": self.step,
            "loss": self._reduce([float(happened["loss"])])[0] / self.world.size,
            "lr": happened["lr"],
            "phase": happened["phase"],
            "tokens_per_s": tokens / seconds,
            "bytes": traffic.bytes,
            "fp32_bytes": traffic.fp32_bytes,
            "ratio": ratio(traffic.fp32_bytes, traffic.bytes),
            "residual_ratio": self.engine.residual_ratio(),
        }

    @contextlib.contextmanager
    def _recording(self) -> Iterator[Recorder]:
        train = self.config.train

        def start() -> Recorder:
            if not self.world.is_main:
                return Recorder()
            return RunRecorder(Path(train.run_dir), to_yaml(self.config), self.step, train.steps)

        with quiet_events():
            recorder = self.world.together(start, name_rank=False)
            try:
                yield recorder
            finally:
                recorder.close()

    @contextlib.contextmanager
    def _until_done(self) -> Iterator[None]:
        """Context of the steps: where they end before the last one, the run does not."""
        try:
            yield
        finally:
            optimizer = self.engine.optimizer
            if self.step < self.config.train.steps and isinstance(optimizer, CommOptimizer):
                optimizer.to_be_continued()

    def _describe(self, found: Path | None) -> None:
        """Say what runs here, on what, and for how long."""
        config, world, optimizer = self.config, self.world, self.engine.optimizer
        millions = count_parameters(self.model) / 1e6
        log.info("%s of %.2f M parameters, %d tokens", config.model.kind, millions, self.corpus.vocab_size)
        threads = torch.get_num_threads()
        log.info("%d ranks on %s, %d threads each, %s", world.size, world.device.type, threads, config.train.precision)
        if world.mesh is not None:
            log.info("mesh of %s", " x ".join(f"{n} {name}" for n, name in zip(world.mesh.shape, MESH)))
        log.info("%s, phase %s", type(optimizer).__name__, self.engine.phase)
        log.info("kernels: %s", providers(world.device.type))
        epoch = len(self.samples.train) / config.train.batch_size
        log.info("%d steps of %d samples; an epoch is %.0f steps", config.train.steps, config.train.batch_size, epoch)
        if world.is_main and (warning := warn_of_short_run(config)):
            log.warning("%s", warning)
        if (
            world.is_main
            and world.size > 1
            and not isinstance(optimizer, OuterOptimizer)  # whose base, on its rank alone, compresses nothing
            and (warning := warn_of_freeze(optimizer.param_groups[0], config.train.steps))
        ):
            log.warning("%s", warning)
        if found is not None:
            log.info("resumed from %s at step %d", found, self.step)

    def _warn_of(self, heldout: float) -> None:
        if not math.isfinite(heldout) and self.world.is_main:
            log.warning("held-out loss is %s at step %d: the model has diverged", heldout, self.step)

    def _summary(self, heldout: float | None) -> Record:
        """Log and return what the run came to, or how to continue it."""
        meter, done = self.meter, self.step == self.config.train.steps
        if done and heldout is None:  # nothing was left to do
            heldout = self.evaluate()
        self._reduce([])
        summary = {
            "step": self.step,
            "finished": done,
            "heldout_loss": heldout,
            "tokens_per_s": meter.tokens / meter.seconds if meter.seconds else None,
            "bytes": meter.bytes,
            "fp32_bytes": meter.fp32_bytes,
            "ratio": ratio(meter.fp32_bytes, meter.bytes),
            "compressed_ratio": ratio(meter.compressed_fp32_bytes, meter.compressed_bytes),
            "skipped_steps": self.skipped,
        }
        if done:
            log.info("finished: held-out loss %.4f, %.0f tokens/s", heldout, summary["tokens_per_s"])
        else:
            log.info("stopped at step %d, checkpoint saved; go on with: --resume=auto", self.step)
        if meter.bytes and meter.fp32_bytes:  # with one replica ranks tell each other a few numbers, and no gradient
            sent, full = f"{meter.bytes / MB:.1f} MB", f"{meter.fp32_bytes / MB:.1f} MB"
            saved = f"ratio {show_ratio(summary['ratio'])}"
            if meter.compressed_steps:
                saved += f", {show_ratio(summary['compressed_ratio'])} in the compressed phase"
            log.info("each rank sent %s; an fp32 all-reduce would have sent %s: %s", sent, full, saved)
        if self.skipped:
            log.warning("%d steps were skipped for inf or NaN in the gradients", self.skipped)
        log.info("records, curves and checkpoints are in %s", self.config.train.run_dir)
        return summary
