"""Resuming: what of a run is in its checkpoint, and which settings may change when it is taken up again."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from commopt.optim import join_state_dict, split_state_dict
from commopt.sharding import cut, is_sharded, local
from commopt.train import checkpoint
from commopt.train.alike import check_same_checkpoint
from commopt.train.config import flat
from commopt.train.engine import explained
from commopt.train.errors import CheckpointError, DamagedError, DivergedError, unloadable
from commopt.train.finite import in_short, not_finite
from commopt.train.metrics import Meter
from commopt.train.models import fingerprint
from commopt.train.world import World

if TYPE_CHECKING:
    from commopt.train.loop import Trainer

log = logging.getLogger(__name__)

WRONG_CONTENT = (ValueError, RuntimeError, LookupError, TypeError, AttributeError, ArithmeticError)
"""Errors that content raises which is not a checkpoint's; RuntimeError is also that of a GPU without memory."""

FIXED = (
    "model.kind",
    "model.heads",
    "model.positions",
    "data.seq_len",
    "optim.name",
    "optim.weight_decay",
    "optim.args",
    "optim.compressor",
    "comm.compress",
)
"""Settings that live in the checkpoint: another value would have no effect, so it is refused."""
FREE = (
    *(f"train.{name}" for name in ("run_dir", "log_every", "eval_every", "eval_samples", "checkpoint_every", "keep")),
    *(f"data.{name}" for name in ("cache_dir", "corpus", "hf_config", "hf_split", "hf_text_field")),
    *(f"optim.{name}" for name in ("max_skipped", "check_every", "on_difference")),
    *(f"model.{name}" for name in ("kv_heads", "mlp_width", "tied")),
    "comm.timeout",
)
"""Settings that do not change what is computed; the corpus is compared by content, the model by its weights' shapes."""
OF_IDENTITY = ("model.", "data.", "optim.name")
"""How the keys begin of settings that make it another model, corpus or optimizer."""


def seed_dropout(trainer: Trainer) -> None:
    """Give each rank its own stream of dropout masks; those that get the same samples, the same."""
    parts = [trainer.config.train.seed, trainer.consumed, trainer.world.reader]
    torch.manual_seed(int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> 1))


def save(trainer: Trainer) -> Path:
    """Write the checkpoint of the current step.

    Raises:
        DivergedError: on all ranks, if weights or optimizer state of any are not finite; all checkpoints stay.
    """
    world, optimizer, keep = trainer.world, trainer.engine.optimizer, trainer.config.train.keep
    replicated, own_state = split_state_dict(optimizer.state_dict())
    world.together(lambda: _check_finite(trainer, [replicated, own_state]))
    shared: dict[str, Any] = {
        **_identity(trainer),
        "config": asdict(trainer.config),
        "step": trainer.step,
        "consumed": trainer.consumed,
        "meter": asdict(trainer.meter),
    }
    own: dict[str, Any] = {"rng": _get_rng(world.device), "skipped_steps": trainer.meter.skipped_steps}
    pieces = None
    if (gradients := getattr(trainer.engine, "gradients", None)) is not None:
        with explained():
            gradients.confirm()
        own["gradients"] = gradients.state_dict()
    if world.mesh is None:
        shared |= {"weights": trainer.model.state_dict(), "optimizer_state": replicated}
        own["optimizer_state"] = own_state
    else:
        from commopt.train import sharded

        pieces, shared["optimizer_state"] = sharded.optimizer_state(trainer.model, optimizer)
        pieces |= sharded.weights(trainer.model)
        shared["mesh"] = list(world.mesh.shape)
    with trainer.engine.averaged():  # the weights of all ranks; where each of them is follows from its optimizer state
        return checkpoint.save(trainer.folder, trainer.step, shared, own, world, keep, pieces)


def _check_finite(trainer: Trainer, states: list[dict[str, Any]]) -> None:
    names = not_finite(trainer.model, states)
    if not names:
        return
    since = trainer.skipping_since
    skipped = "" if since is None else f", and steps are skipped since step {since}"
    good = checkpoint.list_steps(trainer.folder)
    advice = (
        f"the newest before it stays, {good[-1].name}: go on from that with --resume=auto and a lower --optim.lr"
        if good
        else "there is none before it: start anew with a lower --optim.lr"
    )
    raise DivergedError(
        f"step {trainer.step}: inf or NaN in {in_short(names)}{skipped}; no checkpoint is written of it; {advice}"
    )


def take_up(trainer: Trainer, path: Path) -> Path:
    """Load the checkpoint, or with resume=auto, where that fails, the newest before it that can be loaded; say which.

    Raises:
        DamagedError: it cannot be loaded, and no other may be.
        CheckpointError: it is of another run; or none can be loaded.
    """
    while True:
        try:
            load(trainer, path)
            return path
        except DamagedError as error:
            if trainer.resume != "auto":
                raise
            if trainer.world.is_main:
                log.error("damaged checkpoint left out: %s", error)
            before = checkpoint.find(trainer.folder, "auto", trainer.world, checkpoint.step_of(path))
            if before is None:
                raise
            path = before


def load(trainer: Trainer, path: Path) -> None:
    """Take up the run where the checkpoint left it, at this world size or another.

    Raises:
        DamagedError: on all ranks, if it cannot be loaded on any. Model and optimizer are then to be loaded anew.
        CheckpointError: it is of another model, optimizer, corpus or setting.
        ConfigError: it is another checkpoint on another rank.
    """
    world = trainer.world
    check_same_checkpoint("resume", path, world)
    shared, parts = checkpoint.load(path, world)
    world.together(lambda: _check(trainer, shared, path))
    pieces: dict[str, Tensor] = {}
    if world.mesh is not None:
        from commopt.train import sharded

        pieces = sharded.wanted(trainer.model, trainer.engine.optimizer, shared["optimizer_state"])
        sharded.read(path, pieces | sharded.weights(trainer.model), world)
    world.together(lambda: _apply(trainer, shared, parts, pieces, path))
    if not _same_ranks(world, shared, parts):
        seed_dropout(trainer)
        before, now = shared.get("mesh", [len(parts)]), [world.size] if world.mesh is None else world.mesh.shape
        ranks = [" x ".join(map(str, shape)) for shape in (before, now)]
        if world.is_main:
            log.warning("the checkpoint is of %s ranks, now there are %s: residuals are merged", *ranks)
    world.once(lambda: checkpoint.set_aside_newer(trainer.folder, trainer.step))


def _same_ranks(world: World, shared: dict[str, Any], parts: list[dict[str, Any]]) -> bool:
    """True if the ranks are those that have saved it."""
    if world.mesh is None:
        return len(parts) == world.size
    return shared["mesh"] == list(world.mesh.shape)


def _check(trainer: Trainer, shared: dict[str, Any], path: Path) -> None:
    """Raise CheckpointError for a checkpoint of another run, or that this one cannot read."""
    mesh = trainer.world.mesh
    try:
        _check_identity(shared, trainer, path)
        for changed in _check_settings(shared["config"], asdict(trainer.config), path):
            if trainer.world.is_main:
                log.warning("changed since the checkpoint: %s", changed)
        _check_steps(shared["step"], trainer.config.train.steps, path)
    except CheckpointError:
        raise
    except WRONG_CONTENT as error:
        raise unloadable(path, " does not fit", error) from error
    if mesh is None and "mesh" in shared:
        raise CheckpointError(
            f"checkpoint {path} is of a run on a mesh: take it up with one, such as "
            f"--parallel.replicate={trainer.world.size}; or start a new run from its weights, with --init"
        )
    if mesh is not None and "mesh" not in shared:
        raise CheckpointError(
            f"checkpoint {path} is of a run without parallel.*: take it up without; or start a new run from its "
            "weights, with --init"
        )


def _check_steps(step: int, steps: int, path: Path) -> None:
    if step > steps:
        raise CheckpointError(
            f"checkpoint {path} is past the end of the run, train.steps={steps}: give at least {step} steps, or take "
            "up an earlier checkpoint, by its path: --resume=FOLDER"
        )


def _apply(
    trainer: Trainer,
    shared: dict[str, Any],
    parts: list[dict[str, Any]],
    pieces: dict[str, Tensor],
    path: Path,
) -> None:
    """Put into this rank's trainer what a checkpoint holds; on a mesh, the model has its weights."""
    world, optimizer = trainer.world, trainer.engine.optimizer
    try:
        if world.mesh is not None:
            from commopt.train import sharded

            sharded.load_optimizer_state(trainer.model, optimizer, pieces, shared["optimizer_state"])
        else:
            trainer.model.load_state_dict(shared["weights"])
            states = [part["optimizer_state"] for part in parts]
            topology = getattr(optimizer, "topology", None)
            nodes = topology.nodes if topology is not None else None
            joined = join_state_dict(shared["optimizer_state"], states, world.rank, world.size, nodes)
            optimizer.load_state_dict(joined)
        _take_residuals(trainer, shared, parts)
        trainer.step, trainer.consumed, trainer.meter = shared["step"], shared["consumed"], Meter(**shared["meter"])
        skipped = [part.get("skipped_steps", trainer.meter.skipped_steps) for part in parts]
        trainer.meter.skipped_steps = max(skipped)
        if _same_ranks(world, shared, parts):
            trainer.meter.skipped_steps = skipped[world.rank]
            _set_rng(parts[world.rank]["rng"], world.device)
    except CheckpointError:
        raise
    except WRONG_CONTENT as error:
        raise unloadable(path, " does not fit", error) from error


def _take_residuals(trainer: Trainer, shared: dict[str, Any], parts: list[dict[str, Any]]) -> None:
    """Load residuals of compressed gradients: this rank's own; on other ranks, nodes or meshes, its share of all."""
    gradients, world = getattr(trainer.engine, "gradients", None), trainer.world
    states = [part["gradients"] for part in parts if "gradients" in part]
    if gradients is None or not states:
        return
    common, residuals = split_state_dict(states[0])[0], [split_state_dict(state)[1] for state in states]
    if _same_ranks(world, shared, parts) and residuals[world.rank]["nodes"] == gradients.nodes:
        gradients.load_state_dict(states[world.rank])
    else:
        gradients.load_state_dict(join_state_dict(common, residuals, world.rank, world.size, gradients.nodes))


def take_weights(trainer: Trainer, path: Path) -> None:
    """Start a new run from the weights in another run's checkpoint, which is the same one on every rank."""
    world = trainer.world
    world.patiently(lambda heed: checkpoint.verify(path))
    check_same_checkpoint("init", path, world)

    def read() -> tuple[bool, int]:
        shared = checkpoint.load_shared(path)
        try:
            checkpoint.check_fits({**shared, "optimizer": None}, {**_identity(trainer), "optimizer": None}, path)
            if "mesh" not in shared:
                _take_whole(trainer.model, shared["weights"])
            return "mesh" in shared, int(shared["step"])
        except CheckpointError:
            raise
        except WRONG_CONTENT as error:
            raise unloadable(path, " does not fit", error) from error

    in_pieces, step = world.together(read)
    if in_pieces:
        from commopt.train import sharded

        sharded.read(path, sharded.weights(trainer.model), world)
    log.info("weights from %s, step %d", path, step)


@torch.no_grad()
def _take_whole(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Loads whole weights into a model, or this rank's pieces of them into a sharded one."""
    own = model.state_dict()
    if not any(map(is_sharded, own.values())):
        model.load_state_dict(weights)
        return
    for name, value in own.items():
        local(value).copy_(cut(weights[name], value))


def _identity(trainer: Trainer) -> dict[str, Any]:
    return {
        "optimizer": type(trainer.engine.optimizer).__name__,
        "corpus": trainer.corpus.key,
        "model": fingerprint(trainer.model),
    }


def _check_identity(shared: Mapping[str, Any], trainer: Trainer, path: Path) -> None:
    """Raise CheckpointError for another model, corpus or optimizer, with the settings that make it another."""
    try:
        checkpoint.check_fits(shared, _identity(trainer), path)
    except CheckpointError as error:
        changed = _changed(shared["config"], asdict(trainer.config))
        why = [_said(key, *both) for key, both in changed.items() if key.startswith(OF_IDENTITY)]
        raise CheckpointError(f"{error}; {', '.join(why)}" if why else str(error)) from None


def _check_settings(saved: Mapping[str, Any], given: Mapping[str, Any], path: Path) -> list[str]:
    """Raise CheckpointError for a changed setting of ``FIXED``; describe others that change what is computed."""
    changed = {key: both for key, both in _changed(saved, given).items() if key not in FREE}
    for key, (was, now) in changed.items():
        if key in FIXED:
            raise CheckpointError(f"checkpoint {path} was made with {key}={was!r}, this run has {now!r}")
    return [_said(key, *both) for key, both in changed.items()]


def _changed(saved: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings that are others now: key -> what it was, and is."""
    theirs, ours = flat(saved), flat(given)
    return {key: (theirs.get(key), now) for key, now in ours.items() if theirs.get(key) != now}


def _said(key: str, was: Any, now: Any) -> str:
    return f"{key} was {was!r}, now {now!r}"


def _get_rng(device: torch.device) -> dict[str, Any]:
    states = {"cpu": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def _set_rng(states: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
