"""FSDP2 inside other people's trainers, over two processes on CPUs: what trains, and resumes.

Trainer takes DDP on CPUs whatever it is told: it is told that it is on GPUs, and runs its own code of FSDP2.
"""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from listening import listening
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from worlds import on_processes, same_bits

from commopt import LocalSGD, OneBitAdam
from commopt.compress import Int4

STOPPED, STEPS = 4, 7


def whole(model: nn.Module) -> list[Tensor]:
    return [p.detach().full_tensor().clone() for p in model.parameters()]  # type: ignore[attr-defined]


def of_trainer(
    folder: str, steps: int, resume: bool, mesh: Any = None, kind: str = "SHARDED_STATE_DICT"
) -> dict[str, Any]:
    """Cut over all ranks, with one bit; or over a ``mesh`` of replicas and shards, with local steps: of that also the
    parameters after each step, and the model in the checkpoint. ``kind`` of what FSDP saves."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType
    from torch.distributed.fsdp import fully_shard
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    from commopt.integrations.transformers import CommoptCallback

    class Recorder(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            stepped[state.global_step] = whole(model)

    stepped: dict[int, list[Tensor]] = {}
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
    rows = torch.randint(0, 32, (64, 8), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in rows]
    args = TrainingArguments(
        folder, per_device_train_batch_size=2, max_steps=steps, save_steps=STOPPED, report_to=[], use_cpu=True,
        max_grad_norm=0, disable_tqdm=True, lr_scheduler_type="constant",
        save_strategy="steps" if steps == STOPPED else "no", average_tokens_across_devices=mesh is None,
    )  # fmt: skip
    made: dict[str, Any] = {"optimizer_cls_and_kwargs": (OneBitAdam, {"lr": 1e-2})}
    if mesh is not None:
        fully_shard(model, mesh=mesh)
        made = {"optimizers": (LocalSGD(model.parameters(), lr=1e-2, period=3, process_group=mesh), None)}
    trainer = Trainer(model, args, train_dataset=data, callbacks=[CommoptCallback(), Recorder()], **made)
    before = {}
    for state in (trainer.accelerator.state, PartialState()):
        before[id(state)] = state._shared_state["distributed_type"]
        state._shared_state["distributed_type"] = DistributedType.FSDP
    trainer.accelerator.state._shared_state["fsdp_plugin"] = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False, state_dict_type=kind
    )
    trainer.is_fsdp_enabled = True
    assert trainer.accelerator.is_fsdp2
    with listening() as said:
        trainer.train(resume_from_checkpoint=resume)
    out = {"params": whole(model), "stepped": stepped, "said": said}
    if mesh is None:
        return {**out, "phase": trainer.optimizer.optimizer.phase}
    if steps == STOPPED:
        trainer._load_from_checkpoint(f"{folder}/checkpoint-{STOPPED}")
    return {**out, "phase": None, "saved": whole(model)}


def of_lightning(
    folder: str, steps: int, resume: bool, over: str = "tensor_parallel", compressor: Any = None
) -> dict[str, Any]:
    """One bit; or, with a ``compressor``, AdamW on compressed gradients, after Lightning has tried a validation out."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    from commopt.integrations.lightning import CommoptCallback, CompressGradients

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net: nn.Module | None = None

        def configure_model(self) -> None:
            if self.net is None:
                torch.manual_seed(0)
                self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
                fully_shard(self.net, mesh=self.device_mesh[over])

        def training_step(self, batch: Any, index: int) -> Any:
            draw = torch.Generator().manual_seed(2 * self.global_step + dist.get_rank())
            return self.net(torch.randn(4, 8, generator=draw)).square().mean()

        def validation_step(self, batch: Any, index: int) -> None:
            self.net(torch.ones(4, 8))

        def configure_optimizers(self) -> Any:
            if compressor is not None:
                return torch.optim.AdamW(self.parameters(), lr=1e-2)
            return OneBitAdam(self.parameters(), lr=1e-2, freeze_step=2, process_group=self.device_mesh)

    module = Module()
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        max_steps=steps, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=compressor is not None, default_root_dir=folder,
        callbacks=[CommoptCallback()] if compressor is None else [
            CompressGradients(compressor),
            ModelCheckpoint(folder, "stopped", every_n_train_steps=STOPPED, enable_version_counter=False),
        ],
    )  # fmt: skip
    path = f"{folder}/stopped.ckpt"
    batches = torch.utils.data.DataLoader(torch.zeros(64, 1))
    validated = None if compressor is None else batches
    with listening() as said:
        trainer.fit(module, batches, validated, ckpt_path=path if resume else None)
    if steps == STOPPED and compressor is None:
        trainer.save_checkpoint(path)
    return {"params": whole(module), "phase": getattr(trainer.optimizers[0], "phase", None), "said": said}


def scenes(rank: int, world: int) -> dict[str, Any]:
    os.environ["LOCAL_RANK"] = str(rank)  # else Lightning starts processes of its own
    folders = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folders)
    out = {}
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    replicas = functools.partial(of_trainer, mesh=mesh)
    compressed = functools.partial(of_lightning, over="data_parallel", compressor=Int4(block=8))
    full = functools.partial(of_trainer, kind="FULL_STATE_DICT")
    runs = {
        "lightning": of_lightning, "compressed": compressed, "trainer": of_trainer, "full": full, "replicas": replicas,
    }  # fmt: skip
    for name, run in runs.items():
        folder = str(Path(folders[0], name))
        out[name] = {
            "stopped": run(folder, STOPPED, False),
            "resumed": run(folder, STEPS, True),
            "never stopped": run(f"{folder}-whole", STEPS, False),
        }
    out["replicas in full"] = {
        "stopped": replicas(f"{folders[0]}/full-replicas", STOPPED, False, kind="FULL_STATE_DICT")
    }
    out["over data_parallel"] = {"once": of_lightning(folders[0], 1, False, over="data_parallel")}
    return out


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return on_processes(2, scenes)


PHASES = [
    ("trainer", "plain"),
    ("full", "plain"),
    ("lightning", "compressed"),
    ("compressed", None),
    ("replicas", None),
]


@pytest.mark.parametrize(("name", "phase"), PHASES)
def test_a_resumed_run_is_one_never_stopped(ranks: list[dict[str, Any]], name: str, phase: str) -> None:
    for rank in ranks:
        assert rank[name]["stopped"]["phase"] == phase
        assert same_bits(rank[name]["resumed"]["params"], rank[name]["never stopped"]["params"])
        assert same_bits(rank[name]["resumed"]["params"], ranks[0][name]["resumed"]["params"])
        assert not same_bits(rank[name]["resumed"]["params"], rank[name]["stopped"]["params"])


def test_replicas_that_trainer_saves_are_their_mean_and_each_resumes_from_its_own(ranks: list[dict[str, Any]]) -> None:
    runs = [rank["replicas"] for rank in ranks]
    mine, other = (run["stopped"]["stepped"][STOPPED] for run in runs)
    assert not same_bits(mine, other)
    for run in runs:
        assert same_bits(run["stopped"]["saved"], [(a + b) / 2 for a, b in zip(mine, other)])
        for step in range(STOPPED + 1, STEPS + 1):
            assert same_bits(run["resumed"]["stepped"][step], run["never stopped"]["stepped"][step])


def test_what_rank_0_alone_would_save_is_said_before_it_is_lost(ranks: list[dict[str, Any]]) -> None:
    said = [
        [line for line in rank["replicas in full"]["stopped"]["said"] if "FULL_STATE_DICT" in line] for rank in ranks
    ]
    assert [len(lines) for lines in said] == [1, 0]
    assert 'set state_dict_type="SHARDED_STATE_DICT"' in said[0][0]
    for rank in ranks:
        for run in (*rank["replicas"].values(), *rank["trainer"].values(), *rank["full"].values()):
            assert not [line for line in run["said"] if "FULL_STATE_DICT" in line or "full_state_dict" in line]


def test_a_model_that_lightning_shards_over_data_parallel_is_said_to_have_no_replicas(ranks: list[Any]) -> None:
    told = [rank["over data_parallel"]["once"]["said"] for rank in ranks]
    said = [[line for line in lines if "nothing to average" in line] for lines in told]
    assert [len(lines) for lines in said] == [1, 0]
    assert said[0][0].startswith("OneBitAdam has nothing to average")
    assert 'fully_shard(..., mesh=self.device_mesh["tensor_parallel"])' in said[0][0]
    for rank in ranks:
        for run in rank["lightning"].values():
            assert not [line for line in run["said"] if "nothing to average" in line]
