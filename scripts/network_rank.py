"""A rank of scripts/bench_network.py: the methods, each with its own model, taking turns.

network_rank.py SPEC OUT       run by the bed; SPEC: JSON; rank 0 writes all blocks of all ranks to OUT
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from netbed import read_counters
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import commopt
from commopt import ops
from commopt.optim import CommOptimizer
from commopt.outer.base import OuterOptimizer
from commopt.train.config import ModelConfig
from commopt.train.models import GPT

PERIOD = 30  # local steps of a round
WARMUP = 6  # steps of every method before anything is measured; what has a warm-up of its own is through it by then

# methods: model -> (model to call, optimizer) -------------------------------------------------------------------------


@functools.cache
def hosts_mesh() -> DeviceMesh:
    """Hosts by ranks of a host."""
    places = int(os.environ["LOCAL_WORLD_SIZE"])
    shape = (dist.get_world_size() // places, places)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-5, **options)


def none(model: nn.Module, **options: Any) -> tuple[nn.Module, Any]:
    return model, adamw(model, **options)


def ddp(model: nn.Module, hook: Callable[..., Any] | None = None, **options: Any) -> tuple[nn.Module, Any]:
    wrapped = DistributedDataParallel(model)
    if hook is not None:
        wrapped.register_comm_hook(None, hook)
    return wrapped, adamw(model, **options)


def bf16(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations
    """torch's hook under another name: by its own, DDP refuses it without NCCL, though Gloo can sum bfloat16."""
    return default_hooks.bf16_compress_hook(state, bucket)


def ddp_powersgd(model: nn.Module, rank: int) -> tuple[nn.Module, Any]:
    """One bucket: the hook starts collectives from callbacks, whose order over several buckets differs between the
    ranks over Gloo, which ends the run."""
    wrapped = DistributedDataParallel(model, bucket_cap_mb=1 << 14)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return wrapped, adamw(model)


def compressed(
    model: nn.Module,
    name: str,
    arguments: dict[str, Any],
    bare: bool = False,
    nodes: bool = False,
    inside: commopt.compress.Compressor | None = None,
    bucket_cap_mb: int | None = None,
    **options: Any,
) -> tuple[nn.Module, Any]:
    """AdamW on compressed means of gradients; with hosts as nodes, ``inside`` is for what goes inside a host."""
    wrapped = model if bare else DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb)
    mesh = hosts_mesh() if nodes else None
    spec = getattr(commopt.compress, name)(**arguments)
    handle = commopt.compress_gradients(wrapped, spec, process_group=mesh, inside=inside)
    optimizer = adamw(model, **options)
    # As after some hundred steps: the first means by top-k leave zeros in the variance, of which roots take torch eight
    # times as long on a CPU.
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e-3)
    optimizer.step()
    HANDLES[optimizer] = handle
    return wrapped, optimizer


HANDLES: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def onebit_adam(model: nn.Module, attached: bool = False, nodes: bool = False, **options: Any) -> tuple[nn.Module, Any]:
    if nodes:  # the hosts
        options["process_group"] = hosts_mesh()
    wrapped = DistributedDataParallel(model) if attached else model
    optimizer = commopt.OneBitAdam(
        model.parameters(), lr=1e-5, betas=(0.9, 0.5), weight_decay=0.01, freeze_step=3, **options
    )
    if attached:
        commopt.attach(wrapped, optimizer)
    return wrapped, optimizer


def zero_one_adam(model: nn.Module, distance: int, **options: Any) -> tuple[nn.Module, Any]:
    """A round every ``distance`` steps."""
    rounds = {"variance": {"stop": 3}, "sync": {"first": distance, "double_every": None, "longest": distance}}
    return model, commopt.ZeroOneAdam(model.parameters(), lr=1e-5, weight_decay=0.01, **rounds, **options)


def rounds(model: nn.Module, name: str, period: int = PERIOD, **options: Any) -> tuple[nn.Module, Any]:
    """An outer optimizer of AdamW, with a round every ``period`` steps."""
    return model, getattr(commopt, name)(model.parameters(), lr=1e-5, weight_decay=0.01, period=period, **options)


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Every block by itself, then the rest, in place."""
    from torch.distributed.fsdp import fully_shard

    for block in model.net.transformer.h:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def hsdp(model: nn.Module, between: bool = True, **options: Any) -> tuple[nn.Module, Any]:
    """Sharded inside a host; FSDP averages ``between`` hosts, or nobody does."""
    mesh = hosts_mesh() if between else hosts_mesh()["shard"]
    return shard(model, mesh), adamw(model, **options)


def hsdp_onebit_adam(model: nn.Module, **options: Any) -> tuple[nn.Module, Any]:
    return onebit_adam(shard(model, hosts_mesh()["shard"]), process_group=hosts_mesh(), **options)


def fsdp(model: nn.Module, weights: Any = None, **arguments: Any) -> tuple[nn.Module, Any]:
    """Sharded over all hosts; gradients by a compressor of ``name`` and ``arguments``, or in full precision."""
    sharded = shard(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    handle = None
    if arguments:
        compressor = getattr(commopt.compress, arguments["name"])(**arguments["arguments"])
        handle = commopt.compress_gradients(sharded, compressor, weights=weights)
    optimizer = adamw(model)
    if handle is not None:
        HANDLES[optimizer] = handle
    return sharded, optimizer


METHODS: dict[str, tuple[str, Callable[..., Any], dict[str, Any]]] = {
    "none": ("AdamW, no communication", none, {}),
    "none_fused": ("AdamW(fused), no communication", none, {"fused": True}),
    "ddp": ("DDP, AdamW", ddp, {}),
    "ddp_fused": ("DDP, AdamW(fused)", ddp, {"fused": True}),
    "ddp_bf16": ("DDP, bf16 hook", ddp, {"hook": bf16}),
    "ddp_powersgd4": ("DDP, PowerSGD rank 4", ddp_powersgd, {"rank": 4}),
    "gradients_powersgd4": ("DDP, AdamW on PowerSGD(4)", compressed, {"name": "PowerSGD", "arguments": {"rank": 4}}),
    "gradients_acp4": ("DDP, AdamW on ACP(4)", compressed, {"name": "ACP", "arguments": {"rank": 4}}),
    "gradients_int8": ("DDP, AdamW on Int8()", compressed, {"name": "Int8", "arguments": {}}),
    "gradients_int4": ("DDP, AdamW on Int4()", compressed, {"name": "Int4", "arguments": {}}),
    "gradients_int4_buckets": (
        "DDP(bucket_cap_mb=2), AdamW on Int4()",
        compressed,
        {"name": "Int4", "arguments": {}, "bucket_cap_mb": 2},
    ),
    "gradients_acp4_bare": ("AdamW on ACP(4)", compressed, {"name": "ACP", "arguments": {"rank": 4}, "bare": True}),
    "gradients_int4_bare": ("AdamW on Int4()", compressed, {"name": "Int4", "arguments": {}, "bare": True}),
    "gradients_topk": ("DDP, AdamW on TopK()", compressed, {"name": "TopK", "arguments": {}}),
    "gradients_threshold": ("DDP, AdamW on ThresholdTopK()", compressed, {"name": "ThresholdTopK", "arguments": {}}),
    "gradients_blocks": ("DDP, AdamW on TopBlocks()", compressed, {"name": "TopBlocks", "arguments": {}}),
    "gradients_sign": ("DDP, AdamW on Sign()", compressed, {"name": "Sign", "arguments": {}}),
    "fsdp": ("FSDP2 over the hosts, AdamW", fsdp, {}),
    "fsdp_int8": (
        "FSDP2 over the hosts, AdamW on Int8(), weights by Int8()",
        fsdp,
        {"name": "Int8", "arguments": {}, "weights": commopt.compress.Int8()},
    ),
    "fsdp_int4": (
        "FSDP2 over the hosts, AdamW on Int4(), weights by Differences()",
        fsdp,
        {"name": "Int4", "arguments": {}, "weights": commopt.gradients.Differences()},
    ),
    "onebit_adam": ("OneBitAdam", onebit_adam, {}),
    "onebit_adam_overlap": ("OneBitAdam(overlap=True)", onebit_adam, {"overlap": True}),
    "onebit_adam_ddp": ("OneBitAdam attached to DDP", onebit_adam, {"attached": True}),
    "onebit_adam_ddp_overlap": (
        "OneBitAdam(overlap=True) attached to DDP",
        onebit_adam,
        {"attached": True, "overlap": True},
    ),
    "zero_one_adam_4": ("ZeroOneAdam, a round every 4 steps", zero_one_adam, {"distance": 4}),
    "diloco": ("DiLoCo, 30 steps", rounds, {"name": "DiLoCo"}),
    "diloco_int4": ("DiLoCo, 30 steps, Int4()", rounds, {"name": "DiLoCo", "compressor": commopt.compress.Int4()}),
    "diloco_int4_streamed": (
        "DiLoCo, 30 steps, Int4(), streamed",
        rounds,
        {"name": "DiLoCo", "compressor": commopt.compress.Int4(), "streaming": commopt.Streaming(5, 12)},
    ),
    "diloco_100_int4_streamed": (
        "DiLoCo, 100 steps, Int4(), streamed",
        rounds,
        {
            "name": "DiLoCo",
            "period": 100,
            "compressor": commopt.compress.Int4(),
            "streaming": commopt.Streaming(5, 12),
        },
    ),
    "sparse_loco": ("SparseLoCo, 30 steps", rounds, {"name": "SparseLoCo"}),
    "sparse_loco_streamed": (
        "SparseLoCo, 30 steps, streamed",
        rounds,
        {"name": "SparseLoCo", "streaming": commopt.Streaming(5, 12)},
    ),
    "noloco": ("NoLoCo, 30 steps", rounds, {"name": "NoLoCo"}),
    "onebit_adam_nodes": ("OneBitAdam, hosts as nodes", onebit_adam, {"nodes": True}),
    "onebit_adam_overlap_nodes": (
        "OneBitAdam(overlap=True), hosts as nodes",
        onebit_adam,
        {"nodes": True, "overlap": True},
    ),
    "gradients_int4_nodes": (
        "DDP, AdamW on Int4(), hosts as nodes",
        compressed,
        {"name": "Int4", "arguments": {}, "nodes": True},
    ),
    "gradients_powersgd4_nodes": (
        "DDP, AdamW on PowerSGD(4), hosts as nodes",
        compressed,
        {"name": "PowerSGD", "arguments": {"rank": 4}, "nodes": True},
    ),
    "gradients_acp4_nodes": (
        "DDP, AdamW on ACP(4), hosts as nodes",
        compressed,
        {"name": "ACP", "arguments": {"rank": 4}, "nodes": True},
    ),
    "gradients_blocks_nodes": (
        "DDP, AdamW on TopBlocks(), hosts as nodes",
        compressed,
        {"name": "TopBlocks", "arguments": {}, "nodes": True},
    ),
    "gradients_int4_int8_nodes": (
        "DDP, AdamW on Int4(), hosts as nodes, inside=Int8()",
        compressed,
        {"name": "Int4", "arguments": {}, "nodes": True, "inside": commopt.compress.Int8()},
    ),
    "hsdp_none": ("FSDP in a host, AdamW, no communication between hosts", hsdp, {"between": False}),
    "hsdp_none_fused": (
        "FSDP in a host, AdamW(fused), no communication between hosts",
        hsdp,
        {"between": False, "fused": True},
    ),
    "hsdp": ("HSDP, AdamW", hsdp, {}),
    "hsdp_fused": ("HSDP, AdamW(fused)", hsdp, {"fused": True}),
    "hsdp_onebit_adam": ("FSDP in a host, OneBitAdam", hsdp_onebit_adam, {}),
    "hsdp_onebit_adam_overlap": ("FSDP in a host, OneBitAdam(overlap=True)", hsdp_onebit_adam, {"overlap": True}),
}

# a rank ---------------------------------------------------------------------------------------------------------------


class Trainee:
    """One method with its model: ``step()`` trains once on this rank's tokens."""

    def __init__(self, name: str, spec: dict[str, Any]) -> None:
        torch.manual_seed(0)
        heads = spec["width"] // 64 if spec["width"] % 64 == 0 else 1
        config = ModelConfig(layers=spec["layers"], width=spec["width"], heads=heads)
        model = GPT(config, spec["vocab"], spec["sequence"])
        self.parameters = sum(p.numel() for p in model.parameters())
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.tokens = torch.randint(0, spec["vocab"], (spec["batch"], spec["sequence"]), generator=generator)
        self.model, self.optimizer = METHODS[name][1](model, **METHODS[name][2])
        # steps after which all begins again; ACP sends P and Q in turns
        group = self.optimizer.param_groups[0]
        self.cycle = group.get("sync_first", group.get("period", 2 if "acp" in name else 1))
        self.count = 0

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.tokens, self.tokens).backward()
        self.optimizer.step()

    def begin(self) -> None:
        """What comes before a block that is measured: a step; where fragments are in flight at its end, a whole cycle,
        so that as many are at its beginning."""
        streamed = isinstance(self.optimizer, OuterOptimizer) and self.optimizer.streaming is not None
        for _ in range(self.cycle if streamed else 1):
            self.step()

    def land(self) -> None:
        """Waits for what is in flight, which would go on while others have their turn."""
        if isinstance(self.optimizer, OuterOptimizer):
            self.optimizer.flights.land_all()

    def warm_up(self, seconds: float) -> None:
        """Past every warm-up; decides how many steps make a block of about ``seconds``."""
        for _ in range(WARMUP):
            self.step()
        took = measure(self.step, self.cycle if self.cycle >= PERIOD else 2 * self.cycle)["seconds"]
        self.land()
        count = torch.tensor([max(1, round(seconds / took) // self.cycle)])
        dist.broadcast(count, 0)
        self.count = int(count) * self.cycle
        if isinstance(self.optimizer, CommOptimizer) and dist.get_world_size() > 1:
            assert self.optimizer.phase in ("compressed", "frozen")
            assert self.optimizer.skipped_steps == 0

    def collectives(self) -> int:
        """Collectives that one step starts, without those of ranks of one host; of several steps, rounded."""
        ours = isinstance(self.optimizer, (CommOptimizer, OuterOptimizer))
        counts = self.optimizer if ours else HANDLES.get(self.optimizer)
        if counts is not None:  # it has groups of its own, and counts
            before = counts.comm_stats()["total"]["calls"]
            for _ in range(self.cycle):
                self.step()
            return round((counts.comm_stats()["total"]["calls"] - before) / self.cycle)
        before = between_hosts()
        self.step()
        return between_hosts() - before


def between_hosts() -> int:
    """Collectives so far of this rank's process groups of several hosts."""
    places = int(os.environ["LOCAL_WORLD_SIZE"])
    groups = [g for g in dist.distributed_c10d._world.pg_group_ranks if isinstance(g, dist.ProcessGroup)]
    several = [g for g in groups if len({rank // places for rank in dist.get_process_group_ranks(g)}) > 1]
    return sum(g._get_sequence_number_for_group() for g in several)


def measure(step: Callable[[], None], count: int) -> dict[str, float]:
    """A block of ``count`` steps between two barriers: seconds, and bytes that this rank's NIC sends, per step; and of
    the whole block the CPU seconds of this rank, and those of everything on this machine."""

    def clocks() -> tuple[float, ...]:
        sent = read_counters(os.environ["GLOO_SOCKET_IFNAME"])["tx_bytes"]
        return time.perf_counter(), sent, time.process_time(), busy_seconds()

    dist.barrier()
    before = clocks()
    for _ in range(count):
        step()
    dist.barrier()
    seconds, sent, own, busy = (b - a for a, b in zip(before, clocks()))
    return {
        "seconds": seconds / count,
        "bytes": sent / count,
        "own": own,
        "busy": busy,
        "block": seconds,
        "steps": count,
    }


def busy_seconds() -> float:
    """CPU seconds that processes, and the machine's owner, have had of all cores; not interrupts."""
    user, nice, system, _, _, _, _, stolen = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + stolen) / os.sysconf("SC_CLK_TCK")


def rank_main(spec: dict[str, Any], out: Path) -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    trainees = {name: Trainee(name, spec) for name in spec["methods"]}
    for trainee in trainees.values():
        trainee.warm_up(spec["seconds"])
    blocks: dict[str, list[dict[str, float]]] = {name: [] for name in trainees}
    order = list(trainees)
    for _ in range(spec["rounds"]):
        for name in order:
            trainees[name].begin()
            blocks[name].append(measure(trainees[name].step, trainees[name].count))
            trainees[name].land()
        order.append(order.pop(0))  # nobody always follows the same one
    collectives = {name: trainee.collectives() for name, trainee in trainees.items()}
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, blocks)
    if dist.get_rank() == 0:
        facts = {"parameters": next(iter(trainees.values())).parameters, "providers": providers()}
        out.write_text(json.dumps({"facts": facts, "collectives": collectives, "blocks": everywhere}))
    dist.barrier()
    dist.destroy_process_group()


def providers() -> list[str]:
    return sorted({by.get("cpu", by["default"]) for by in ops.report().values()})


if __name__ == "__main__":
    rank_main(json.loads(sys.argv[1]), Path(sys.argv[2]))
