"""The doors to other people's trainers, on GPUs: what Hugging Face's Trainer and accelerate, Lightning and timm train
there; replicas, the loss, and what is sent; a resumed run is one never stopped, to the bit.

    python tests/gpu_doors.py [--device cuda] [scene ...]

Ranks share GPUs as in gpu_ranks.py. With ``--device cpu`` the scenes run over Gloo, in float32, and accelerate, which
has FSDP2 for GPUs alone, is told that it is on GPUs. A scene whose framework is not installed is left out.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import gpu_ranks
import torch
import torch.distributed as dist
from gpu_ranks import WORDS, equal, equal_everywhere, falls, in_ddp, own_environment
from no_torchvision import empty_torchvision
from ports import free_port
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import commopt
from commopt.compress import Int4

SAVED, STEPS = 10, 18
OVERFLOWS = (3, 12)
"""Steps in which rank 1 alone meets inf: an averaged and a compressed one."""
ONE_BIT: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.7), "freeze_step": 5}
LIMITS = {"cuda": (120.0, 185.0), "cpu": (400.0, 3600.0)}
"""Seconds for a scene, and for all of them."""
Run = tuple[list[Tensor], list[float]]
"""Parameters at the end, and losses."""


def whole(model: nn.Module) -> list[Tensor]:
    return [getattr(p, "full_tensor", p.detach)().detach().clone() for p in model.parameters()]


def goes_on(first: Run, second: Run) -> None:
    """The second is resumed from the first."""
    equal(first[0], second[0], f"resumed otherwise: {first[1]}, {second[1]}")
    assert first[1][SAVED - STEPS :] == second[1][SAVED - STEPS :], f"{first[1]}, resumed {second[1]}"
    assert all(t.isfinite().all() for t in first[0])
    equal_everywhere(first[0], "replicas")
    falls(first[1], "loss")


def sends_one_bit(optimizer: Any) -> None:
    """In its last step; and DDP averages nothing besides."""
    stats = optimizer.comm_stats()
    assert stats["phase"] == "compressed", stats
    assert stats["step"]["bytes"] > 0, stats
    assert stats["ratio"] > 8, stats
    assert "ddp" not in stats["step"]["by_collective"], stats


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=8, attn_implementation="eager",
        )
    )  # fmt: skip


def rows(count: int, seed: int) -> Tensor:
    """Each word follows from the one before."""
    columns = [torch.randint(0, WORDS, (count,), generator=torch.Generator().manual_seed(seed))]
    for _ in range(7):
        columns.append((5 * columns[-1] + 1) % WORDS)
    return torch.stack(columns, 1)


def loss_of(model: nn.Module, step: int, rank: int, device: torch.device) -> Tensor:
    batch = rows(8, seed=100 * step + rank).to(device)
    return model(input_ids=batch, labels=batch).loss


def as_on_gpus(device: torch.device) -> None:
    """Before an Accelerator is made: on a CPU, too, it takes the way that it takes on GPUs."""
    if device.type == "cpu":
        from accelerate.state import AcceleratorState, PartialState
        from accelerate.utils import DistributedType

        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState(cpu=True)._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def of_trainer(folder: Path, device: torch.device, resume: Path | None, made: Any, **settings: Any) -> tuple[Run, Any]:
    from transformers import Trainer, TrainingArguments

    from commopt.integrations.transformers import CommoptCallback

    gpu = device.type == "cuda"
    args = TrainingArguments(
        str(folder), use_cpu=not gpu, bf16=gpu, dataloader_pin_memory=gpu, per_device_train_batch_size=8,
        max_steps=STEPS, save_strategy="steps", save_steps=SAVED, logging_steps=1, report_to=[], disable_tqdm=True,
        max_grad_norm=0, lr_scheduler_type="constant", average_tokens_across_devices=False,
        ddp_broadcast_buffers=False, **settings,
    )  # fmt: skip
    assert args.device.type == device.type
    if args.fsdp:
        as_on_gpus(device)
    data = [{"input_ids": row, "labels": row} for row in rows(1024, seed=1)]
    model = llama().to(args.device)  # which Trainer leaves to its user where FSDP2 cuts the model
    trainer = Trainer(model, args, train_dataset=data, optimizer_cls_and_kwargs=made, callbacks=[CommoptCallback()])
    assert trainer.is_fsdp_enabled == bool(args.fsdp)
    trainer.train(resume_from_checkpoint=resume and str(resume))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return (whole(trainer.model), losses), trainer.optimizer.optimizer


def trainers(folder: Path, device: torch.device, *made: Any, **settings: Any) -> Any:
    """One that is never stopped, whose optimizer it gives, and one that goes on from its checkpoint."""
    first, optimizer = of_trainer(folder / "first", device, None, made, **settings)
    saved = folder / "first" / f"checkpoint-{SAVED}"
    goes_on(first, of_trainer(folder / "second", device, saved, made, **settings)[0])
    return optimizer


def transformers_ddp(folder: Path, device: torch.device) -> None:
    """Saved while it compresses."""
    sends_one_bit(trainers(folder, device, commopt.OneBitAdam, {**ONE_BIT, "max_grad_norm": 1.0}))


def transformers_diloco(folder: Path, device: torch.device) -> None:
    """Saved in the middle of a round; the last one is ended early. Beside rounds, means are sent to be saved."""
    for compressor, full in ((None, 7.5), (Int4(), 3)):
        given = {"lr": 1e-2, "period": 4, "compressor": compressor}
        stats = trainers(folder / type(compressor).__name__, device, commopt.DiLoCo, given).comm_stats()
        assert stats["rounds"] == STEPS // 4 + 1, stats
        assert 0 < stats["total"]["bytes"] < full * stats["fp32_bytes"], stats


SHARDED: dict[str, Any] = {"fsdp": True, "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}


def transformers_fsdp2(folder: Path, device: torch.device) -> None:
    """Cut over all ranks: AdamW."""
    assert trainers(folder, device, commopt.OneBitAdam, ONE_BIT, **SHARDED).phase == "plain"


def transformers_hsdp(folder: Path, device: torch.device) -> None:
    """Replicas of pieces: one bit between them."""
    from accelerate.parallelism_config import ParallelismConfig

    mesh = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    sends_one_bit(trainers(folder, device, commopt.OneBitAdam, ONE_BIT, **SHARDED, parallelism_config=mesh))


def with_fsdp2(device: torch.device) -> Any:
    """An accelerator."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    as_on_gpus(device)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
    )
    accelerator = Accelerator(cpu=device.type == "cpu", fsdp_plugin=plugin)
    assert accelerator.is_fsdp2
    return accelerator


def connected(accelerator: Any, model: nn.Module, **more: Any) -> tuple[Any, nn.Module, Any]:
    from commopt.integrations.accelerate import connect

    model.to(accelerator.device)  # before the optimizer: NCCL sends from GPUs alone
    model, optimizer = accelerator.prepare(model, commopt.OneBitAdam(model.parameters(), **ONE_BIT, **more))
    connect(accelerator, model, optimizer)
    return accelerator, model, optimizer


def steps(which: range, accelerator: Any, model: nn.Module, optimizer: Any) -> list[float]:
    losses, rank = [], accelerator.process_index
    for step in which:
        loss = loss_of(model, step, rank, accelerator.device)
        overflows = accelerator.scaler is not None and rank == 1 and step in OVERFLOWS
        accelerator.backward(loss * torch.inf if overflows else loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def accelerators(folder: Path, prepared: Callable[[], Any]) -> tuple[Any, Any]:
    """One that is never stopped, which it gives with its optimizer, and one that goes on from its state."""
    first = prepared()
    losses = steps(range(SAVED), *first)
    first[0].save_state(str(folder))
    losses += steps(range(SAVED, STEPS), *first)
    second = prepared()
    second[0].load_state(str(folder))
    again = steps(range(SAVED, STEPS), *second)
    goes_on((whole(first[1]), losses), (whole(second[1]), again))
    return first[0], first[2].optimizer


def accelerate_fsdp2(folder: Path, device: torch.device) -> None:
    """Cut over all ranks: AdamW; and with an optimizer of torch FSDP2's own exchanges are compressed."""
    optimizer = accelerators(folder / "one bit", lambda: connected(with_fsdp2(device), llama()))[1]
    assert optimizer.phase == "plain", optimizer.comm_stats()
    handles: list[Any] = []

    def prepared() -> Any:
        accelerator, model = with_fsdp2(device), llama()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        handle, own = commopt.compress_gradients(model, Int4()), f"gradients-{accelerator.process_index}.pt"
        handles.append(handle)
        accelerator.register_save_state_pre_hook(lambda *given: torch.save(handle.state_dict(), Path(given[-1], own)))
        accelerator.register_load_state_pre_hook(
            lambda *given: handle.load_state_dict(torch.load(Path(given[-1], own)))
        )
        return accelerator, model, optimizer

    accelerators(folder / "gradients", prepared)
    assert handles[0].comm_stats()["ratio"] > 4, handles[0].comm_stats()


def accelerate_hsdp(folder: Path, device: torch.device) -> None:
    """Cut before it is prepared, into replicas of pieces: one bit between them."""

    def prepared() -> Any:
        accelerator, model = with_fsdp2(device), llama().to(device)
        mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("replicate", "shard"))
        return connected(accelerator, fully_shard(model, mesh=mesh["shard"]), process_group=mesh)

    sends_one_bit(accelerators(folder, prepared)[1])


def accelerate_fp16(folder: Path, device: torch.device) -> None:
    """All ranks skip a step in which one rank's gradients overflow; its GradScaler alone takes a smaller scale, unless
    DDP has averaged them."""
    from accelerate import Accelerator
    from accelerate.utils import GradScalerKwargs

    def prepared() -> Any:
        if device.type == "cuda":
            scaling = GradScalerKwargs(init_scale=1024.0)
            return connected(Accelerator(mixed_precision="fp16", kwargs_handlers=[scaling]), llama())
        accelerator = Accelerator(cpu=True)
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        return connected(accelerator, llama())

    accelerator, optimizer = accelerators(folder, prepared)
    sends_one_bit(optimizer)
    assert optimizer.skipped_steps == len(OVERFLOWS), optimizer.comm_stats()
    assert accelerator.scaler.get_scale() == 512 / (1 + accelerator.process_index), accelerator.scaler.get_scale()


def fitted(folder: Path, device: torch.device, resume: Path | None, ranks: int, **settings: Any) -> Run:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    from commopt.integrations.lightning import CommoptCallback

    rank, losses, params = int(os.environ["RANK"]), [], []
    os.environ |= {"NODE_RANK": str(rank), "LOCAL_RANK": "0"}  # a node for each rank: they may share a GPU

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = llama()

        def configure_model(self) -> None:
            if self.device_mesh is not None and not isinstance(self.net, FSDPModule):
                fully_shard(self.net, mesh=self.device_mesh["tensor_parallel"])

        def training_step(self, batch: Any, index: int) -> Tensor:
            replica = rank if self.device_mesh is None else self.device_mesh["data_parallel"].get_local_rank()
            loss = loss_of(self.net, self.global_step, replica, self.device)
            losses.append(float(loss.detach()))
            return loss

        def configure_optimizers(self) -> Any:
            return commopt.OneBitAdam(self.parameters(), **ONE_BIT, process_group=self.device_mesh)

        def on_train_end(self) -> None:  # after that Lightning takes them to the CPU
            assert self.device.type == device.type
            params.extend(whole(self))
            sends_one_bit(self.trainer.optimizers[0])

    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=SAVED, save_top_k=-1)
    trainer = pl.Trainer(
        accelerator=device.type, devices=1 if device.index is None else [device.index], num_nodes=ranks,
        max_steps=STEPS, logger=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, deterministic="warn", callbacks=[CommoptCallback(), saving], **settings,
    )  # fmt: skip
    trainer.fit(Module(), [0] * 100, ckpt_path=resume)
    return params, losses


def lightning_ddp(folder: Path, device: torch.device) -> None:
    """Saved while it compresses."""
    fit = partial(fitted, ranks=2, strategy="ddp", precision="bf16-mixed" if device.type == "cuda" else "32-true")
    first = fit(folder / "first", device, None)
    goes_on(first, fit(folder / "second", device, folder / "first" / f"step={SAVED}.ckpt"))


def lightning_hsdp(folder: Path, device: torch.device) -> None:
    """Replicas of pieces: one bit between them."""
    from lightning.pytorch.strategies import ModelParallelStrategy

    cuts = [ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2) for _ in range(2)]
    first = fitted(folder / "first", device, None, 4, strategy=cuts[0])
    goes_on(first, fitted(folder / "second", device, folder / "first" / f"step={SAVED}.ckpt", 4, strategy=cuts[1]))


def timm_by_name(folder: Path, device: torch.device) -> None:
    """Its ResNet, groups by layers and schedule; images with their channels last."""
    with empty_torchvision():
        import timm
        from timm.scheduler import CosineLRScheduler

        from commopt.integrations.timm import register

    register()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)
    net = timm.create_model("resnet10t", num_classes=4).to(device, memory_format=torch.channels_last)
    given = {**ONE_BIT, "lr": 1e-3, "weight_decay": 0.05, "layer_decay": 0.75}
    optimizer = timm.optim.create_optimizer_v2(net, opt="onebitadam", **given)
    schedule, model, losses = CosineLRScheduler(optimizer, t_initial=2 * STEPS), in_ddp(net, device), []
    for step in range(STEPS):
        random = torch.Generator().manual_seed(100 * step + dist.get_rank())
        labels = torch.randint(0, 4, (16,), generator=random)
        images = torch.randn(16, 3, 32, 32, generator=random) + labels.view(-1, 1, 1, 1)
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            outputs = model(images.to(device, memory_format=torch.channels_last))
            loss = nn.functional.cross_entropy(outputs, labels.to(device))
        loss.backward()
        optimizer.step()
        schedule.step(step + 1)
        losses.append(float(loss.detach()))
    assert len({group["lr"] for group in optimizer.param_groups}) > 2, "no learning rates by layer"
    sends_one_bit(optimizer)
    equal_everywhere(net.parameters(), "replicas")
    falls(losses, "loss")


ALL = (
    transformers_hsdp, lightning_hsdp, accelerate_hsdp, transformers_ddp, transformers_diloco, transformers_fsdp2,
    accelerate_fsdp2, accelerate_fp16, lightning_ddp, timm_by_name,
)  # fmt: skip
SCENES: dict[str, Callable[[Path, torch.device], None]] = {scene.__name__: scene for scene in ALL}


def be_a_rank(name: str, kind: str, folder: Path) -> None:
    faulthandler.dump_traceback_later(LIMITS[kind][0] - 5)
    device = torch.device(kind)
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_num_threads(1)
    code = 0
    try:
        SCENES[name](folder, device)
        dist.barrier()
    except BaseException:
        traceback.print_exc()
        code = 1  # ends the others, too, who may wait for this one
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def succeeds(name: str, kind: str, place: Path, begun: float) -> bool:
    """Runs a scene, whose name begins with its framework."""
    framework = name.partition("_")[0]
    if not importlib.util.find_spec(framework):
        print(f"left out: {name}, for want of {framework}", flush=True)
        return True
    (place / name).mkdir()
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, "--rank-of", name, "--device", kind, "--folder", str(place / name)]
    ours, logs, since, ranks = [], [], time.monotonic(), 4 if name.endswith("hsdp") else 2
    for rank in range(ranks):
        own = own_environment(rank, ranks, kind) | ({"LOCAL_RANK": "0"} if kind == "cpu" else {})  # as on one GPU
        logs.append(place / f"{name}-{rank}.log")
        with logs[-1].open("wb") as log:
            ours.append(subprocess.Popen(command, env=os.environ | meeting | own, stdout=log, stderr=log))
    end = min(since + LIMITS[kind][0], begun + LIMITS[kind][1])
    while (code := gpu_ranks.ended(ours, end - gpu_ranks.LIMIT)) is None:
        time.sleep(0.1)
    said = [f"== rank {i}\n{log.read_text(errors='replace')[-3000:]}" for i, log in enumerate(logs) if code]
    print(*said, f"{'FAILED' if code else 'good'}: {name}, {time.monotonic() - since:.0f} s", sep="\n", flush=True)
    return code == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenes", nargs="*", metavar="scene", help=f"of {', '.join(SCENES)} (default: all)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rank-of", metavar="scene", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank_of:
        return be_a_rank(given.rank_of, given.device, given.folder)
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(gpu_ranks.AT_ONCE) as pool:
        run = partial(succeeds, kind=given.device, place=Path(place), begun=time.monotonic())
        good = list(pool.map(run, given.scenes or SCENES))
    sys.exit(not all(good))


if __name__ == "__main__":
    main()
