"""The trainer on a device mesh: FSDP2 and tensor parallelism inside a replica, commopt between replicas."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from trainer_pair import run, run_and_stop
from trainer_runs import Make, assert_same, content, records
from worlds import needs_fsdp2

from commopt.sharding import local
from commopt.train import engine, manifest, sums
from commopt.train.config import CommConfig, Config, ModelConfig, ParallelConfig
from commopt.train.errors import CheckpointError, ConfigError, DamagedError, DivergedError
from commopt.train.loop import Trainer
from commopt.train.metrics import read_metrics
from commopt.train.optimizer import check_plan
from commopt.train.parallel import mesh_shape


@pytest.fixture(scope="module")
def four() -> Iterator[Pool]:
    """Four processes; ``ranks=2`` are the first two of them."""
    processes = Pool(4)
    yield processes
    processes.close()


pytestmark = needs_fsdp2

WARM = {"name": "OneBitAdam", "args": {"freeze_step": 100, "eps": 1e-3}}
"""Averages exactly throughout; eps, so that rounding of gradients that are 0 does not decide a step."""
UNCLIPPED = {**WARM, "max_grad_norm": None}
"""The same at any number of replicas: what is clipped is the root mean square of their norms."""
ROUNDS = {"name": "DiLoCo", "args": {"base": "AdamW", "base_args": {"eps": 1e-3}, "period": 4}}
BASELINE = {"name": "AdamW", "max_grad_norm": 0.05, "args": {"eps": 1e-3}}
EXACT = {"dropout": 0.0}
STEPS = 8
"""With rounds at 4 and 8, evaluated within one, at 6, and at the end."""
OF_LLAMA = {"llama": {"heads": 4, "kv_heads": 2, "mlp_width": 48, "tied": False}}
"""Two heads a tensor parallel rank, which have the same keys and values."""


def losses(run_dir: Path) -> list[float]:
    lines = read_metrics(run_dir)
    return [line[key] for line in lines for key in ("loss", "heldout_loss") if key in line]


SAME = [
    ("bert", ROUNDS, {"shard": 2}),
    ("gpt", WARM, {"tensor": 2}),
    ("bert", BASELINE, {"shard": 2, "tensor": 2}),
    ("llama", UNCLIPPED, {"shard": 2, "tensor": 2}),
]


Unsharded = Callable[[dict[str, Any]], Path]


@pytest.fixture(scope="module")
def unsharded(four: Pool, tiny: Make, tmp_path_factory: pytest.TempPathFactory) -> Unsharded:
    """Where two ranks with whole models have trained with these sections of a config; once for each."""
    folders: dict[str, Path] = {}

    def folder_of(sections: dict[str, Any]) -> Path:
        folder = folders.get(repr(sections))
        if folder is None:
            folder = folders[repr(sections)] = tmp_path_factory.mktemp("whole")
            four.run(run, tiny(folder, **sections), ranks=2)
        return folder

    return folder_of


@pytest.mark.long(but="llama OneBitAdam {'shard': 2, 'tensor': 2}")
@pytest.mark.parametrize(
    ("kind", "optim", "parallel"), SAME, ids=[f"{kind} {optim['name']} {parallel}" for kind, optim, parallel in SAME]
)
def test_a_sharded_run_is_the_unsharded_one(
    four: Pool, tiny: Make, unsharded: Unsharded, tmp_path: Path, kind: str, optim: Any, parallel: dict[str, int]
) -> None:
    """Two ranks with whole models, each with the samples of a replica; 9 samples to evaluate on are a second pass for
    some ranks only."""
    model = {"kind": kind, **EXACT, **OF_LLAMA.get(kind, {})}
    train = {"steps": STEPS, "batch_size": 16, "eval_samples": 9, "checkpoint_every": STEPS}
    pieces = {**train, "accumulate": 2 if parallel.get("tensor") else 1}
    four.run(run, tiny(tmp_path / "cut", model=model, optim=optim, parallel=parallel, train=pieces))
    expected = unsharded({"model": model, "optim": optim, "train": {**train, "accumulate": 2}})
    ours, theirs = losses(tmp_path / "cut"), losses(expected)
    assert len(ours) == 6
    assert ours == pytest.approx(theirs, rel=2e-6)
    assert ours[-1] < ours[0] - 0.1
    cut, whole = (read_metrics(folder)[-1] for folder in (tmp_path / "cut", expected))
    assert cut["tokens_total"] == whole["tokens_total"]
    if parallel == {"shard": 2}:  # half a model each, and so half the bytes
        assert cut["fp32_bytes"] == pytest.approx(whole["fp32_bytes"] / 2, rel=0.01)


COPIED = "h.0.ln_1.bias", "h.0.mlp.c_proj.bias", "ln_f.weight"
"""Parameters that each rank of a tensor group has: of a norm, of a projection that is cut, and outside of blocks."""


def run_and_nudge(config: Config, step: int, rank: int) -> dict[str, list[float]]:
    """Trains; in ``step`` the gradients of ``COPIED`` are a little other on one rank, as from a kernel that adds in no
    fixed order. This rank's pieces of the weights in the end."""
    whole, steps, pieces = engine.Hybrid.step, [], {}

    def nudged(hybrid: engine.Hybrid) -> None:
        steps.append(1)
        copied = {name: p for name, p in hybrid.module.named_parameters() if name.endswith(COPIED)}
        for p in copied.values() if (len(steps), dist.get_rank()) == (step, rank) else ():
            local(p.grad).add_(1e-6)  # type: ignore[arg-type]
        whole(hybrid)
        pieces.update({name: local(p).tolist() for name, p in copied.items()})

    with mock.patch.object(engine.Hybrid, "step", nudged):
        run(config)
    return pieces


@pytest.mark.long(but="compressed")
@pytest.mark.parametrize(
    ("parallel", "comm"),
    [({"shard": 2, "tensor": 2}, {}), ({"tensor": 2}, {"compress": {"name": "Int8"}})],
    ids=["hsdp", "compressed"],
)
def test_copies_of_a_tensor_group_stay_alike(
    four: Pool, tiny: Make, tmp_path: Path, parallel: dict[str, int], comm: dict[str, Any]
) -> None:
    config = tiny(tmp_path, model=EXACT, optim=BASELINE, parallel=parallel, comm=comm, train={"steps": 4})
    pieces = four.run(run_and_nudge, config, 2, 1)
    assert len(pieces[0]) == len(COPIED)
    assert pieces[0] == pieces[1]
    assert pieces[2] == pieces[3]


def digests(run_dir: Path, step: int = STEPS) -> dict[str, str]:
    """What ranks have written of what they hold together."""
    folder = run_dir / "checkpoints" / f"step-{step:08d}" / "sharded"
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.distcp")}


RESUMED = {
    "compressed": ("gpt", {"name": "OneBitAdam", "args": {"freeze_step": 3}}, {"shard": 2}),
    "between rounds": ("bert", ROUNDS, {"shard": 2}),
    "tensor": ("bert", {"name": "OneBitAdam", "args": {"freeze_step": 3}}, {"tensor": 2}),
    "baseline": ("gpt", BASELINE, {"shard": 2}),
}


@pytest.mark.long(but="compressed")
@pytest.mark.parametrize("name", RESUMED)
def test_stopped_and_resumed_is_never_stopped(four: Pool, tiny: Make, tmp_path: Path, name: str) -> None:
    """Nor does it matter how often a run is saved: one is after its fifth step, the other where it stops."""
    kind, optim, parallel = RESUMED[name]
    often, seldom = ({"steps": STEPS, "checkpoint_every": every} for every in (5, STEPS))

    def config(folder: str, **more: Any) -> Config:
        return tiny(tmp_path / folder, model={"kind": kind}, optim=optim, parallel=parallel, **more)

    four.run(run, config("whole", train=often))
    four.run(run_and_stop, config("parts", train=seldom), 6, 3)
    assert not (tmp_path / f"parts/checkpoints/step-{STEPS:08d}").exists()
    for summary in four.run(run, config("parts", resume="auto", train=seldom)):
        assert summary["finished"]
    assert records(tmp_path / "parts") == records(tmp_path / "whole")
    assert_same(content(tmp_path / "parts", STEPS, 4), content(tmp_path / "whole", STEPS, 4))
    assert len(digests(tmp_path / "whole")) == 4
    assert digests(tmp_path / "parts") == digests(tmp_path / "whole")


@pytest.fixture(scope="module")
def saved(four: Pool, tiny: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on (2, 2), without dropout and compression; saved after steps 5 and 8."""
    folder = tmp_path_factory.mktemp("saved")
    train = {"steps": STEPS, "checkpoint_every": 5}
    four.run(run, tiny(folder, model=EXACT, optim=UNCLIPPED, parallel={"shard": 2}, train=train))
    return folder


@pytest.mark.long(but="2-{'shard': 2}")
@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [(4, {"shard": 2, "tensor": 2}), (2, {"shard": 2}), (1, {"replicate": 1})],
    ids=str,
)
def test_resumed_on_another_mesh(
    four: Pool, tiny: Make, saved: Path, tmp_path: Path, ranks: int, parallel: dict[str, int]
) -> None:
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / f"checkpoints/step-{STEPS:08d}")
    train = {"steps": STEPS, "checkpoint_every": STEPS}
    config = tiny(tmp_path, model=EXACT, optim=UNCLIPPED, parallel=parallel, resume="auto", train=train)
    if ranks == 1:
        run(config)
    else:
        four.run(run, config, ranks=ranks)
    assert losses(tmp_path) == pytest.approx(losses(saved), rel=2e-6)
    shared = content(tmp_path, STEPS, ranks)[0]
    assert math.prod(shared["mesh"]) == ranks


@pytest.mark.long
def test_weights_of_another_run_with_or_without_a_mesh(four: Pool, tiny: Make, saved: Path, tmp_path: Path) -> None:
    still = {"model": EXACT, "optim": {**UNCLIPPED, "lr": 1e-30}, "train": {"steps": 1}}
    first = str(saved / f"checkpoints/step-{STEPS:08d}")
    last = read_metrics(saved)[-1]["heldout_loss"]
    four.run(run, tiny(tmp_path / "whole", init=first, **still), ranks=2)
    second = str(tmp_path / "whole/checkpoints/step-00000001")
    four.run(run, tiny(tmp_path / "cut", init=second, parallel={"shard": 2, "tensor": 2}, **still))
    for name in ("whole", "cut"):
        assert read_metrics(tmp_path / name)[-1]["heldout_loss"] == pytest.approx(last, rel=1e-6)
    wrong = tiny(tmp_path / "a", resume=second, parallel={"shard": 2}, **still)
    for kind, message in four.errors(run, wrong, ranks=2):
        assert kind == CheckpointError.__name__
        assert "is of a run without parallel.*" in message
    for kind, message in four.errors(run, tiny(tmp_path / "b", model=EXACT, optim=UNCLIPPED, resume=first), ranks=2):
        assert kind == CheckpointError.__name__
        assert "take it up with one, such as --parallel.replicate=2" in message


def on_older_torch(config: Config) -> Any:
    """Trains where torch does not know some arguments, as 2.6 does not."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed import tensor

    def older(function: Callable[..., Any], unknown: str) -> Callable[..., Any]:
        def call(*args: Any, **given: Any) -> Any:
            if unknown in given:
                raise TypeError(f"{function.__name__}() got an unexpected keyword argument {unknown!r}")
            return function(*args, **given)

        return call

    with (
        mock.patch.object(dcp, "save", older(dcp.save, "no_dist")),
        mock.patch.object(dcp, "load", older(dcp.load, "no_dist")),
        mock.patch.object(tensor, "distribute_tensor", older(tensor.distribute_tensor, "src_data_rank")),
    ):
        return run(config)


@pytest.mark.long
def test_a_torch_that_knows_fewer_arguments(four: Pool, tiny: Make, tmp_path: Path) -> None:
    """Cuts the model, saves it, and takes it up."""
    settings = {"model": {"layers": 1}, "optim": WARM, "parallel": {"tensor": 2}}
    for steps in (1, 2):
        train = {"steps": steps, "eval_samples": 4}
        four.run(on_older_torch, tiny(tmp_path, **settings, train=train, resume="auto"), ranks=2)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]


class Evil:
    """Runs code where it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch evil",)


def reseal(folder: Path, name: str) -> None:
    """Makes the manifest fit a changed file."""
    entries = manifest.read_manifest(folder)
    path = folder / name
    entries["files"][name] = {"size": path.stat().st_size, "sha256": sums.of_file(path)}
    text = manifest.make_manifest(entries["step"], entries["world_size"], entries["files"])
    (folder / manifest.MANIFEST).write_text(text)


def test_damage(four: Pool, tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest has a changed byte, the one before a metadata that would run code, and the first is good."""
    config = {"optim": WARM, "parallel": {"shard": 2}, "train": {"steps": 3, "checkpoint_every": 1}}
    four.run(run, tiny(tmp_path, **config), ranks=2)
    first, second, third = sorted((tmp_path / "checkpoints").iterdir())
    piece = third / "sharded/__1_0.distcp"
    data = bytearray(piece.read_bytes())
    data[len(data) // 2] ^= 1
    piece.write_bytes(data)
    for kind, message in four.errors(run, tiny(tmp_path, **config, resume=str(third)), ranks=2):
        assert kind == DamagedError.__name__
        assert "the content of sharded/__1_0.distcp has changed" in message or "__1_0.distcp" in message
    (second / "sharded/.metadata").write_bytes(pickle.dumps(Evil()))
    reseal(second, "sharded/.metadata")
    for kind, message in four.errors(run, tiny(tmp_path, **config, resume=str(second)), ranks=2):
        assert kind == DamagedError.__name__
        assert "which metadata never has" in message
    assert not Path("evil").exists()
    for summary in four.run(run, tiny(tmp_path, **config, resume="auto"), ranks=2):
        assert summary["finished"]
    assert first.exists()
    (first / "sharded/.metadata").unlink()
    for _, message in four.errors(run, tiny(tmp_path, **config, resume=str(first)), ranks=2):
        assert ".metadata is missing" in message


def spoil(trainer: Trainer) -> None:
    """One element of the piece that this rank has."""
    with torch.no_grad():
        local(next(trainer.model.parameters())).view(-1)[0] = math.inf


def test_what_is_not_finite_is_not_saved(four: Pool, tiny: Make, tmp_path: Path) -> None:
    from test_train_finite import run_and_poison

    config = tiny(tmp_path, optim=WARM, parallel={"shard": 2}, train={"checkpoint_every": 3})
    for kind, message in four.errors(run_and_poison, config, spoil, 3, 2):
        assert kind == DivergedError.__name__
        assert "step 3: inf or NaN in weights net.transformer.wte.weight" in message
        assert "(rank 2)" in message
    assert not list((tmp_path / "checkpoints").glob("step-*"))


def test_a_step_of_the_baseline_is_skipped_by_all(four: Pool, tiny: Make, tmp_path: Path) -> None:
    from test_train_finite import run_and_poison

    optim = {**BASELINE, "max_skipped": 2}
    config = tiny(tmp_path, optim=optim, parallel={"shard": 2}, train={"checkpoint_every": 12})
    for kind, message in four.errors(run_and_poison, config, spoil, 3, 2):
        assert kind == DivergedError.__name__
        assert "2 steps in a row were skipped" in message


def skip_the_first(config: Config, steps: int = 3) -> Any:
    """Trains, but for the first ``steps``, which a torch optimizer skips."""
    whole = Trainer.train_step

    def step(trainer: Trainer) -> Any:
        early = mock.patch.object(engine.Hybrid, "clip", return_value=torch.tensor(math.inf))
        with early if trainer.step < steps else contextlib.nullcontext():
            return whole(trainer)

    with mock.patch.object(Trainer, "train_step", step):
        return run(config)


def test_a_baseline_that_has_not_begun_is_resumed(tiny: Make, tmp_path: Path) -> None:
    """Its optimizer has no state when the first checkpoint is written."""
    train = {"steps": 6, "checkpoint_every": 2, "keep": 9}
    config = {"model": EXACT, "optim": BASELINE, "parallel": {"replicate": 1}, "train": train}
    skip_the_first(tiny(tmp_path / "whole", **config))
    first = str(tmp_path / "whole/checkpoints/step-00000002")
    skip_the_first(tiny(tmp_path / "again", **config, resume=first))
    assert_same(content(tmp_path / "again", 6, 1), content(tmp_path / "whole", 6, 1))
    assert digests(tmp_path / "again", 6) == digests(tmp_path / "whole", 6)


# what cannot be -------------------------------------------------------------------------------------------------------

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"parallel": ParallelConfig(tensor=3)}, "parallel.tensor=3 is not allowed: it must be a divisor of model.heads=4"),
    (
        {"parallel": ParallelConfig(tensor=4), "model": ModelConfig(kind="llama", heads=4, kv_heads=2)},
        "parallel.tensor=4 is not allowed: it must be a divisor of model.kv_heads=2",
    ),
    (
        {"parallel": ParallelConfig(tensor=2), "model": ModelConfig(mlp_width=33)},
        "parallel.tensor=2 is not allowed: it must be a divisor of model.mlp_width=33",
    ),
    (
        {"parallel": ParallelConfig(shard=2), "comm": CommConfig(ranks_per_node=2)},
        r"comm.ranks_per_node=2 is not allowed: it must be 1 with parallel",
    ),
    (
        {"parallel": ParallelConfig(replicate=2), "comm": CommConfig(backend="mpi")},
        "comm.backend='mpi' is not allowed: it must be auto, gloo or nccl with parallel",
    ),
    (
        {"parallel": ParallelConfig(shard=2), "comm": CommConfig(backend="mine.Backend")},
        "comm.backend='mine.Backend' is not allowed",
    ),
]


@pytest.mark.parametrize(("values", "message"), WRONG, ids=[message[-40:] for _, message in WRONG])
def test_what_cannot_be_together(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config(**{"model": ModelConfig(heads=4), **values})


def test_meshes_that_fit_their_ranks() -> None:
    assert mesh_shape(ParallelConfig(shard=2, tensor=3), 12) == (2, 2, 3)
    assert mesh_shape(ParallelConfig(replicate=4), 4) == (4, 1, 1)
    for config, ranks in ((ParallelConfig(shard=3), 4), (ParallelConfig(shard=8), 4)):
        with pytest.raises(ConfigError, match=f"parallel.shard={config.shard}.*with 4 ranks.*must divide them"):
            mesh_shape(config, ranks)
    with pytest.raises(ConfigError, match=r"parallel.replicate=3, .*with 4 ranks.*must be that number"):
        mesh_shape(ParallelConfig(replicate=3, shard=2), 4)


@pytest.mark.parametrize("name", ["Lamb", "Lans"])
def test_an_optimizer_that_needs_whole_tensors(tiny: Make, tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"optim.name={name} is not allowed with parallel"):
        check_plan(tiny(tmp_path, optim={"name": name, "args": {}}, parallel={"shard": 2}))


def test_every_rank_is_told(four: Pool, tiny: Make, tmp_path: Path) -> None:
    for kind, message in four.errors(run, tiny(tmp_path, parallel={"shard": 4}), ranks=2):
        assert kind == ConfigError.__name__
        assert "parallel.shard=4, parallel.tensor=1 is not allowed with 2 ranks" in message
    batch = tiny(tmp_path, parallel={"tensor": 2}, train={"batch_size": 7, "accumulate": 2})
    for _, message in four.errors(run, batch, ranks=2):
        assert "it must be a multiple of ranks / parallel.tensor * train.accumulate = 1 * 2" in message
