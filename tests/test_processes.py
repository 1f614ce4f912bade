"""Real processes over Gloo: the same bits as threads, DistributedDataParallel attached and not, meshes.

Starting processes costs seconds, so each world is started once, runs all its scenes, and the tests look at what they
gave.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import shutil
import sys
import tempfile
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from forks import rarely_collect
from listening import listening
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from worlds import Toy, Used, backward, on_processes, on_threads, params_of, same_bits, tokens, train

from commopt import CSER, LocalSGD, OneBitAdam, OneBitLion, attach, comm, compress_gradients
from commopt.agreement.calls import OutOfStep
from commopt.comm import TorchBackend, open_control
from commopt.comm.torch import timeout_of
from commopt.compress import Int8

SETTINGS = {"lr": 1e-2, "freeze_step": 4, "bucket_mb": 3e-4}
STEPS = 9


def ddp(model: Toy, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, find_unused_parameters=True, bucket_cap_mb=3e-4, **options)


def step(model: nn.Module, optimizer: Any, t: int, rank: int, world: int, parts: int = 1) -> None:
    """One step, accumulated over ``parts`` backward passes; DDP synchronises in the last one only."""
    model.zero_grad()
    batches = tokens(t, rank, world).chunk(parts)
    for i, batch in enumerate(batches):
        local = i < parts - 1 and isinstance(model, DistributedDataParallel)
        with model.no_sync() if local else contextlib.nullcontext():
            (model(batch) / parts).backward()
    optimizer.step()


def run_bare(rank: int, world: int, parts: int = 1, **settings: Any) -> dict[str, Any]:
    model = Toy()
    optimizer = OneBitAdam(model.parameters(), **{**SETTINGS, **settings})
    stats = []
    for t in range(STEPS):
        step(model, optimizer, t, rank, world, parts)
        stats.append(optimizer.comm_stats()["step"])
    return {"params": params_of(model), "stats": stats}


def run_attached(rank: int, world: int, parts: int = 1, **settings: Any) -> dict[str, Any]:
    model = ddp(Toy())
    optimizer = OneBitAdam(model.parameters(), **{**SETTINGS, **settings})
    attach(model, optimizer)
    stats, grads = [], []
    with listening() as lines:
        for t in range(STEPS):
            step(model, optimizer, t, rank, world, parts)
            stats.append(optimizer.comm_stats()["step"])
            grads.append(model.module.weight.grad.clone())
    return {"params": params_of(model.module), "stats": stats, "grads": grads, "log": list(lines)}


def run_beside(rank: int, world: int, parts: int = 1, **settings: Any) -> dict[str, Any]:
    """Matrices are this optimizer's, the rest SGD's, and all lie in one bucket of DDP's; ``bare``: the same of a model
    whose other gradients are averaged by hand."""
    out: dict[str, Any] = {}
    for name in ("attached", "bare"):
        inner = Toy()
        inner.unused.requires_grad_(False)
        model = DistributedDataParallel(inner, find_unused_parameters=True) if name == "attached" else inner
        mine, others = ([p for p in inner.parameters() if (p.dim() > 1) == matrix] for matrix in (True, False))
        optimizer = OneBitAdam(mine, **{**SETTINGS, **settings})
        beside = torch.optim.SGD(others, lr=1e-2)
        grads, stats = [], []
        if name == "attached":
            attach(model, optimizer)

        def step_beside(*_: Any, others: Any = others, beside: Any = beside, bare: bool = name == "bare") -> None:
            for p in (p for p in others if bare and p.grad is not None):
                dist.all_reduce(p.grad)
                p.grad /= world
            beside.step()

        optimizer.register_step_post_hook(step_beside)
        for t in range(STEPS):
            step(model, optimizer, t, rank, world, parts)
            stats.append(optimizer.comm_stats()["step"])
            grads.append([inner.weight.grad.clone(), inner.bias.grad.clone()])
        nbytes = sum(p.nbytes for p in others if p.requires_grad)
        out[name] = {"params": params_of(inner), "grads": grads, "stats": stats, "others": nbytes}
    return out


def run_clipped_beside(together: bool) -> dict[str, Any]:
    """As :func:`run_beside`; gradients are clipped by the norm of all of them, or each optimizer's by its own."""
    inner = Toy()
    inner.unused.requires_grad_(False)
    model = DistributedDataParallel(inner, find_unused_parameters=True)
    mine, others = ([p for p in inner.parameters() if (p.dim() > 1) == matrix] for matrix in (True, False))
    with listening() as log:
        optimizer = OneBitAdam(mine, **SETTINGS, max_grad_norm=None if together else 0.01)
        beside = torch.optim.SGD(others, lr=1e-2)
        attach(model, optimizer)
        for t in range(STEPS):
            inner.zero_grad()
            model(tokens(t, dist.get_rank(), 2)).backward()
            torch.nn.utils.clip_grad_norm_(inner.parameters() if together else others, 0.01)
            optimizer.step()
            beside.step()
    return {"others": params_of(nn.ParameterList(others)), "log": [line for line in log if "drift apart" in line]}


BESIDE: dict[str, dict[str, Any]] = {
    "beside another": {},
    "beside another, accumulated": {"parts": 2},
    "beside another, overlapped": {"overlap": True},
}


def run_overlapped(rank: int, world: int) -> dict[str, Any]:
    """overlap=True, bare and attached, accumulated in no_sync() and not: parameters, and what backward had sent."""
    out: dict[str, Any] = {}
    for name, views, parts, overlap in [
        ("bare", None, 1, True),
        ("attached", False, 1, True),
        ("attached to views", True, 1, True),
        ("attached, accumulated", False, 2, True),
        ("attached, accumulated, plain", False, 2, False),
    ]:
        inner = Toy()
        inner.unused.requires_grad_(False)
        model = inner if views is None else ddp(inner, gradient_as_bucket_view=views)
        optimizer = OneBitAdam(model.parameters(), overlap=overlap, **SETTINGS)
        if isinstance(model, DistributedDataParallel):
            attach(model, optimizer)
        sent, after = [], []
        optimizer.register_step_pre_hook(
            lambda o, *_, sent=sent: sent.append(o.topology.traffic.total.calls.get("all_to_all", 0))
        )
        optimizer.register_step_post_hook(
            lambda o, *_, after=after: after.append(o.topology.traffic.total.calls.get("all_to_all", 0))
        )
        for t in range(STEPS):
            step(model, optimizer, t, rank, world, parts)
        out[name] = {
            "params": params_of(inner),
            "buckets": len(optimizer.buckets),
            "in backward": sent[-1] - after[-2],
            "in step": after[-1] - sent[-1],
        }
        before = params_of(inner)
        model(tokens(STEPS, rank, world)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        try:
            optimizer.step()
        except ValueError as error:
            out[name]["clipped"] = str(error)
        out[name]["unchanged"] = same_bits(before, params_of(inner))
    return out


def run_alone(rank: int, world: int) -> dict[str, str]:
    """Rank 1 stops taking part. A group of its own, because what timed out is broken for good."""
    out: dict[str, str] = {}
    for overlap in (False, True):
        group = dist.new_group(list(range(world)), timedelta(seconds=2))
        model = Toy()
        model.unused.requires_grad_(False)
        optimizer = OneBitAdam(model.parameters(), overlap=overlap, process_group=group, **SETTINGS)
        train(model, optimizer, range(5), rank, world)
        if rank == 0:
            try:
                train(model, optimizer, range(5, 6), rank, world)
            except comm.CollectiveError as error:
                out[str(overlap)] = str(error)
        dist.barrier()
    return out


def run_uneven(rank: int, world: int) -> dict[str, Any]:
    """overlap=True, and in the first step rank 1 lacks the gradient that the first bucket waits for: it starts nothing
    in backward, where rank 0 starts that bucket. Then the same with a copy, whose first step it is."""
    group = dist.new_group(list(range(world)), timedelta(seconds=20))
    first, last = (nn.Parameter(torch.arange(1.0, 901.0)) for _ in range(2))
    optimizer = OneBitAdam([first, last], overlap=True, process_group=group, **{**SETTINGS, "bucket_mb": 3e-3})
    out = []
    for _ in range(2):
        params = [p for g in optimizer.param_groups for p in g["params"]]
        for t in range(STEPS):
            optimizer.zero_grad()
            used = params[:1] if rank == 1 and t == 0 else params
            sum((p * (rank + t + 1)).sin().sum() for p in used).backward()
            optimizer.step()
        out += params_of(nn.ParameterList(params))
        optimizer = copy.deepcopy(optimizer)
    return {"params": out, "buckets": len(optimizer.buckets)}


def run_crossed(rank: int, world: int) -> dict[str, Any]:
    """A user's own all-reduce on the same group, which one rank starts before a step and the other after it."""
    out: dict[str, Any] = {"sums": []}
    for overlap in (False, True):
        model = Used()
        optimizer = OneBitAdam(model.parameters(), overlap=overlap, **SETTINGS)
        for t in range(STEPS):
            own, work = torch.full((7,), 1.0 + rank, dtype=torch.float64), None
            if rank == 0:
                work = dist.all_reduce(own, async_op=True)
            backward(model, t, rank, world)
            optimizer.step()
            (work or dist.all_reduce(own, async_op=True)).wait()
            out["sums"] += own.tolist()
        out[str(overlap)] = params_of(model)
    return out


def run_mixed(rank: int, world: int) -> dict[str, Any]:
    """A group that is not Gloo alone: what NCCL takes, but for the GPU. Rank 1 has a group more than rank 0."""
    out: dict[str, Any] = {}
    ranks = list(range(world))
    group = dist.new_group(ranks, timedelta(seconds=77), backend="cpu:gloo")
    count = dist.distributed_c10d._world.group_count
    own = TorchBackend(group).own().group
    out["counted"] = dist.distributed_c10d._world.group_count - count
    out["other"] = own is not group and dist.get_process_group_ranks(own) == ranks
    out["timeout"] = timeout_of(own).total_seconds()
    out["control"] = type(open_control(TorchBackend(group))).__name__
    for name, kind in (("adam", OneBitAdam), ("cser", CSER)):
        model, settings = Used(), {"period": 1, "lr": 0.1} if kind is CSER else SETTINGS
        optimizer = kind(model.parameters(), overlap=True, process_group=group, **{**settings, "bucket_mb": 3e-4})
        mine = torch.full((7,), 1.0 + rank)
        work = dist.all_reduce(mine, group=group, async_op=True) if rank == 0 else None
        train(model, optimizer, range(STEPS), rank, world)
        (work or dist.all_reduce(mine, group=group, async_op=True)).wait()
        with optimizer.averaged():  # replicas of CSER are apart
            params = params_of(model)
        out[name] = {
            "params": params,
            "sum": mine.tolist(),
            "channels": len(optimizer.topology.replicas[0].channels or []),
        }
    dist.new_group([1], backend="cpu:gloo")
    group = dist.new_group(ranks, backend="cpu:gloo")
    with listening() as lines:
        out["shares"] = TorchBackend(group).own().group is group
    out["log"] = list(lines)
    return out


class Wrapper:
    """A framework's, around an optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


def run_unattached(
    rank: int, world: int, hook: str = "", how: str = "", parts: int = 1, **settings: Any
) -> dict[str, Any]:
    """A DDP model that nobody attaches, with a hook of its own or none; or that somebody attaches by what wraps it."""
    inner = Toy()
    inner.unused.requires_grad_("overlap" not in settings)  # no bucket would start in backward
    if how == "replicate":
        model: Any = replicate(inner, find_unused_parameters=True)
    else:
        model = ddp(inner)
    if hook == "python":
        model.register_comm_hook(None, allreduce_hook)
    if hook == "builtin":
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    kind = settings.pop("kind", OneBitAdam)
    optimizer = kind(model.parameters(), **{**(SETTINGS if kind is OneBitAdam else {}), **settings})
    if how == "replicate":
        with pytest.raises(ValueError, match=r"in the first forward: call attach\(\) after that"):
            attach(model, optimizer)
        with torch.no_grad():
            model(tokens(0, rank, world))  # it makes its DDP model in the first forward
        attach(model, optimizer)
    if how == "wrappers":
        attach(torch.compile(model, backend="eager"), Wrapper(Wrapper(optimizer)))
    stats = []
    with listening() as lines:
        for t in range(STEPS):
            step(model, optimizer, t, rank, world, parts)
            stats.append(optimizer.comm_stats())
    attached, local, refused = optimizer._attachment is not None, params_of(inner), ""
    with optimizer.averaged():
        params = params_of(inner)
    if hook:
        del optimizer
        gc.collect()
        try:
            attach(model, OneBitAdam(model.parameters(), **SETTINGS))
        except RuntimeError as error:
            refused = str(error)
    return {
        "params": params, "local": local, "log": list(lines), "attached": attached, "stats": stats, "refused": refused
    }  # fmt: skip


UNATTACHED: dict[str, dict[str, Any]] = {
    "unattached": {},
    "unattached, overlapped": {"overlap": True, "max_grad_norm": None},
    "unattached, overlapped, accumulated": {"overlap": True, "max_grad_norm": None, "parts": 2},
    "unattached, hooked": {"hook": "python"},
    "unattached, built in": {"hook": "builtin"},
    "unattached, hooked, overlapped": {"hook": "python", "overlap": True, "max_grad_norm": None},
    "unattached, built in, overlapped": {"hook": "builtin", "overlap": True, "max_grad_norm": None},
    "unattached, hooked, local": {"hook": "python", "kind": LocalSGD, "period": 2},
    "unattached, local": {"kind": LocalSGD, "period": 2},
    "replicated": {"how": "replicate"},
    "wrapped": {"how": "wrappers"},
}


def run_copied(rank: int, world: int) -> dict[str, Any]:
    """Copies of an attached DDP model: alone it averages, as plain DDP does, and with its optimizer it trains on. And
    one whose gradients were compressed before, which DDP averages for good."""
    model = ddp(Toy())
    optimizer = OneBitAdam(model.parameters(), **SETTINGS)
    attach(model, optimizer)
    for t in range(STEPS):
        step(model, optimizer, t, rank, world)
    torch.save(model, io.BytesIO())
    other, its = copy.deepcopy((model, optimizer))
    alone = copy.deepcopy(model)
    alone.zero_grad()
    alone(tokens(STEPS, rank, world)).backward()
    for t in range(STEPS, STEPS + 2):
        step(model, optimizer, t, rank, world)
        step(other, its, t, rank, world)
    before = ddp(Toy())
    compress_gradients(before, Int8()).remove()
    beside = OneBitAdam(before.parameters(), **SETTINGS)
    with listening() as lines:
        for t in range(STEPS):
            step(before, beside, t, rank, world)
    return {
        "grads": [p.grad for p in alone.parameters() if p.grad is not None],
        "params": params_of(other),
        "as the original": same_bits(params_of(model), params_of(other)),
        "sent": its.comm_stats()["step"] == optimizer.comm_stats()["step"],
        "log": list(lines),
        "stats": beside.comm_stats(),
    }


def run_baseline(rank: int, world: int) -> dict[str, Any]:
    model = ddp(Toy())
    optimizer = torch.optim.AdamW(model.parameters(), lr=SETTINGS["lr"], weight_decay=0.0)
    for t in range(SETTINGS["freeze_step"]):
        step(model, optimizer, t, rank, world)
    return {"params": params_of(model.module)}


def run_nan(rank: int, world: int) -> dict[str, Any]:
    """DDP attached, NaN in the loss of one rank, once in each phase."""
    model = ddp(Toy())
    optimizer = OneBitAdam(model.parameters(), **SETTINGS)
    attach(model, optimizer)
    unchanged = []
    for t in range(STEPS):
        bad = t in (2, 6)
        before = params_of(model.module)
        model.zero_grad()
        loss = model(tokens(t, rank, world))
        (loss * float("nan") if bad and rank == 1 else loss).backward()
        optimizer.step()
        if bad:
            unchanged.append(same_bits(before, params_of(model.module)))
    return {"params": params_of(model.module), "unchanged": unchanged, "skipped": optimizer.skipped_steps}


def run_groups(rank: int, world: int) -> dict[str, Any]:
    """The same run on a mesh, and on one of 3 dimensions; refused: a foreign rank, others, a hook already there."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("replicate",))
    out: dict[str, Any] = {"mesh": run_bare(rank, world, process_group=mesh)["params"], "errors": {}}

    def refused(name: str, fn: Any) -> None:
        try:
            fn()
        except (ValueError, RuntimeError) as error:
            out["errors"][name] = f"{type(error).__name__}: {error}"

    cube = init_device_mesh("cpu", (1, 1, world), mesh_dim_names=("shard", "nodes", "replicate"))
    out["cube"] = run_bare(rank, world, process_group=cube)["params"]
    out["slice"] = run_bare(rank, world, process_group=cube["replicate"])["params"]
    only_rank_0 = dist.new_group([0])
    refused("foreign", lambda: OneBitAdam(Toy().parameters(), process_group=only_rank_0))
    refused("no group", lambda: OneBitAdam(Toy().parameters(), process_group="world"))
    model = Toy()
    refused("differ", lambda: OneBitAdam(list(model.parameters())[rank:]))
    refused("lr", lambda: OneBitAdam(model.parameters(), lr=-1.0 if rank else 1.0))
    wrapped = ddp(Toy())
    optimizer = OneBitAdam(wrapped.parameters())
    attach(wrapped, optimizer)
    refused("twice", lambda: attach(wrapped, optimizer))
    other = OneBitAdam(model.parameters())
    refused("not its parameters", lambda: attach(wrapped, other))
    if rank == 0:
        alone = OneBitAdam(wrapped.parameters(), process_group=only_rank_0)
        refused("other ranks", lambda: attach(wrapped, alone))
    copied = copy.deepcopy(optimizer)
    out["copy shares the group"] = copied.topology.backend.group is TorchBackend().group
    return out


RESUMED: dict[str, Any] = {
    "OneBitAdam": lambda p: OneBitAdam(p, **SETTINGS),
    "OneBitAdam, overlapped": lambda p: OneBitAdam(p, overlap=True, **SETTINGS),
    "OneBitAdam, accumulated": lambda p: OneBitAdam(p, **SETTINGS),
    "OneBitLion": lambda p: OneBitLion(p, lr=1e-2),
    "LocalSGD": lambda p: LocalSGD(p, lr=1e-2, period=4),
}
SAVED = 6


def run_resumed(rank: int, world: int) -> dict[str, Any]:
    """Resumed in the compressed phase, or between two rounds, by a script that does not attach its DDP model; which it
    makes before it loads the state of the optimizer, or after that."""
    out: dict[str, Any] = {}
    for name, make in RESUMED.items():
        parts = 2 if "accumulated" in name else 1

        def begin(seed: int, make: Any = make) -> tuple[Toy, Any]:
            inner = Toy(seed=seed)
            inner.unused.requires_grad_(False)
            return inner, make(inner.parameters())

        inner, optimizer = begin(0)
        model = ddp(inner)
        attach(model, optimizer)
        for t in range(STEPS):
            if t == SAVED:
                saved = copy.deepcopy((inner.state_dict(), optimizer.state_dict()))
            step(model, optimizer, t, rank, world, parts)
        never = params_of(inner)
        for order in ("model first", "state first"):
            if order == "state first" and name == "LocalSGD":
                continue  # as it is made, DDP sends rank 0's parameters, and each rank has its own
            inner, second = begin(1)
            inner.load_state_dict(saved[0])
            model = ddp(inner) if order == "model first" else None
            second.load_state_dict(saved[1])
            model = model or ddp(inner)
            step(model, second, SAVED, rank, world, parts)
            sent = second.comm_stats()["step"]["by_collective"]
            for t in range(SAVED + 1, STEPS):
                step(model, second, t, rank, world, parts)
            out[f"{name}, {order}"] = {
                "same": same_bits(never, params_of(inner)),
                "sent": [sent, second.comm_stats()["step"]["by_collective"]],
                "hooks": sum(len(p._backward_hooks or ()) for p in inner.parameters()),
            }
    return out


def run_resumed_alone(rank: int, world: int) -> dict[str, Any]:
    """As before, but rank 0 alone has loaded the state."""
    group = dist.new_group(list(range(world)), timedelta(seconds=120))
    inner = Toy()
    model = ddp(inner, process_group=group)
    optimizer = OneBitAdam(inner.parameters(), process_group=group, **SETTINGS)
    attach(model, optimizer)
    for t in range(SAVED):
        step(model, optimizer, t, rank, world)
    saved = copy.deepcopy((inner.state_dict(), optimizer.state_dict()))
    inner = Toy()
    second = OneBitAdam(inner.parameters(), process_group=group, **SETTINGS)
    if rank == 0:
        inner.load_state_dict(saved[0])
        second.load_state_dict(saved[1])
    model = ddp(inner, process_group=group)
    with pytest.raises(OutOfStep) as error:
        step(model, second, SAVED, rank, world)
    return {"error": str(error.value)}


def run_dcp(rank: int, world: int) -> dict[str, Any]:
    """Save and load by torch.distributed.checkpoint in the compressed phase, then go on."""
    out: dict[str, Any] = {}
    for flatten in (False, True):
        options = StateDictOptions(flatten_optimizer_state_dict=flatten)
        model = Toy()
        optimizer = OneBitAdam(model.parameters(), **SETTINGS)
        train(model, optimizer, range(6), rank, world)
        state = get_optimizer_state_dict(model, optimizer, options=options)
        folder = [tempfile.mkdtemp() if rank == 0 else ""]
        dist.broadcast_object_list(folder)
        dcp.save({"optimizer": state}, checkpoint_id=folder[0])
        other = copy.deepcopy(model)
        second = OneBitAdam(other.parameters(), **SETTINGS)
        fresh = get_optimizer_state_dict(other, second, options=options)
        dcp.load({"optimizer": fresh}, checkpoint_id=folder[0])
        with listening() as lines:
            set_optimizer_state_dict(other, second, fresh, options=options)
        moments = [second.state[p]["exp_avg"] - optimizer.state[q]["exp_avg"] for p, q in zip(*trainable(other, model))]
        train(other, second, range(6, 9), rank, world)
        out[flatten] = {
            "params": params_of(other),
            "phase": second.phase,
            "step": second.param_groups[0]["step"],
            "moments kept": not any(m.any() for m in moments),
            "warnings": sum("start again from 0" in line for line in lines),
        }
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder[0])
    return out


def trainable(*models: nn.Module) -> list[list[nn.Parameter]]:
    return [[p for p in model.parameters() if p.requires_grad] for model in models]


def scenes(rank: int, world: int) -> dict[str, Any]:
    rarely_collect()  # what looks for DDP models is not to go through all that an interpreter has imported
    return {
        "hash": hash("commopt"),
        "bare": run_bare(rank, world),
        "bare, accumulated": run_bare(rank, world, parts=2),
        "bare, clipped": run_bare(rank, world, max_grad_norm=0.1),
        "attached": run_attached(rank, world),
        "attached, accumulated": run_attached(rank, world, parts=2),
        "attached, clipped": run_attached(rank, world, max_grad_norm=0.1),
        "bare, by 8 bits": run_bare(rank, world, warmup_compressor=Int8(16)),
        "attached, by 8 bits": run_attached(rank, world, warmup_compressor=Int8(16)),
        "crossed": run_crossed(rank, world),
        "mixed": run_mixed(rank, world),
        **{name: run_unattached(rank, world, **settings) for name, settings in UNATTACHED.items()},
        "copied": run_copied(rank, world),
        "baseline": run_baseline(rank, world),
        "nan": run_nan(rank, world),
        "groups": run_groups(rank, world),
        "dcp": run_dcp(rank, world),
        "resumed": run_resumed(rank, world),
        "resumed alone": run_resumed_alone(rank, world),
        "overlapped": run_overlapped(rank, world),
        **{name: run_beside(rank, world, **settings) for name, settings in BESIDE.items()},
        "clipped beside": {together: run_clipped_beside(together) for together in (True, False)},
        "uneven": run_uneven(rank, world),
        "alone": run_alone(rank, world),
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    both = on_processes(2, scenes, sys.executable)
    assert both[0]["hash"] != both[1]["hash"]  # an interpreter has its own seed of hashes, and all forks have another
    return both


def on_thread_world(**settings: Any) -> list[Any]:
    def run(backend):
        model = Toy()
        optimizer = OneBitAdam(model.parameters(), backend=backend, **{**SETTINGS, **settings})
        train(model, optimizer, range(STEPS), backend.rank, 2)
        return params_of(model)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return on_threads(2, run)[0]
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("scene", ["bare", "bare, clipped", "attached", "attached, accumulated", "unattached", "nan"])
def test_replicas_are_bit_identical(ranks, scene):
    assert same_bits(ranks[0][scene]["params"], ranks[1][scene]["params"])
    assert not same_bits(ranks[0][scene]["params"], params_of(Toy()))


def test_processes_give_the_bits_of_threads(ranks):
    assert same_bits(ranks[0]["bare"]["params"], on_thread_world())


@pytest.mark.parametrize("variant", ["", ", accumulated", ", clipped"])
def test_an_attached_ddp_model_trains_as_the_bare_one(ranks, variant):
    for a, b in zip(ranks[0]["attached" + variant]["params"], ranks[0]["bare" + variant]["params"]):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_clipping_changes_the_run(ranks):
    assert not same_bits(ranks[0]["bare"]["params"], ranks[0]["bare, clipped"]["params"])


def test_attached_ddp_averages_in_warm_up_only_and_each_byte_is_counted(ranks):
    a, b = (r["attached"] for r in ranks)
    for t in range(STEPS):
        assert torch.equal(a["grads"][t], b["grads"][t]) == (t < SETTINGS["freeze_step"])
    bare = ranks[0]["bare"]["stats"]
    for t in (1, STEPS - 1):
        ddp_calls = a["stats"][t]["by_collective"]["all_reduce"]["calls"]
        assert (ddp_calls > 3) == (t < SETTINGS["freeze_step"])
        if t >= SETTINGS["freeze_step"]:
            assert a["stats"][t] == bare[t]
            presence = 8 * sum(p.requires_grad for p in Toy().parameters())
            assert a["stats"][t]["by_collective"]["all_reduce"] == {"bytes": presence, "calls": 1}
    assert not any("already equal" in line for line in a["log"])


def test_where_the_warm_up_is_compressed_an_attached_ddp_averages_nothing(ranks):
    for a, b in zip(ranks, reversed(ranks)):
        ours = a["attached, by 8 bits"]
        assert same_bits(ours["params"], a["bare, by 8 bits"]["params"])
        assert same_bits(ours["params"], b["attached, by 8 bits"]["params"])
        assert ours["stats"][:STEPS] == a["bare, by 8 bits"]["stats"][:STEPS]
    assert not same_bits(ranks[0]["attached, by 8 bits"]["params"], ranks[0]["attached"]["params"])


@pytest.mark.parametrize(
    "scene", ["unattached", "unattached, overlapped", "unattached, overlapped, accumulated", "wrapped"]
)
def test_the_first_step_attaches_the_ddp_model_around_the_parameters(ranks, scene):
    assert ranks[0][scene]["attached"]
    assert ranks[1][scene]["attached"]
    overlapped = "overlapped" in scene
    by_hand = (ranks[0]["overlapped"] if overlapped else ranks[0])[
        "attached" + ", accumulated" * ("accumulated" in scene)
    ]
    assert same_bits(ranks[0][scene]["params"], by_hand["params"])
    said = [line for line in ranks[0][scene]["log"] if "attached to the DistributedDataParallel" in line]
    assert len(said) == (scene != "wrapped")
    assert not any("already equal" in line for line in ranks[0][scene]["log"])
    assert not any("attached" in line for line in ranks[1][scene]["log"])


ORDERS = [f"{name}, {order}" for name in RESUMED for order in ("model first", "state first")]


@pytest.mark.parametrize("order", [order for order in ORDERS if order != "LocalSGD, state first"])
def test_a_resumed_run_that_does_not_attach_its_ddp_model_is_the_one_that_was_never_stopped(ranks, order):
    for r in ranks:
        resumed = r["resumed"][order]
        assert resumed["same"]
        assert resumed["sent"][0]["ddp"]["bytes"] > 0  # for ranks that have not loaded anything: none waits
        assert "ddp" not in resumed["sent"][1]
        assert resumed["hooks"] == 0


def test_where_one_rank_alone_has_loaded_a_state_all_are_told_with_a_ddp_model_too(ranks):
    for r in ranks:
        assert (
            "step of parameter group 0 is 0 on rank 1 and 6 on rank 0; call step() equ" in r["resumed alone"]["error"]
        )


def test_local_steps_of_a_ddp_model_that_nobody_has_attached_are_local(ranks):
    a, b = (r["unattached, local"] for r in ranks)
    assert a["attached"]
    assert same_bits(a["params"], b["params"])
    assert not same_bits(a["local"], b["local"])


def test_a_replicated_module_is_attached(ranks):
    assert ranks[0]["replicated"]["attached"]
    assert same_bits(ranks[0]["replicated"]["params"], ranks[1]["replicated"]["params"])


@pytest.mark.parametrize(
    "scene",
    ["unattached, hooked", "unattached, built in", "unattached, hooked, overlapped", "unattached, hooked, local"],
)
def test_a_ddp_model_that_cannot_be_attached_is_reported_once_on_rank_0(ranks, scene):
    assert not ranks[0][scene]["attached"]
    said = [line for line in ranks[0][scene]["log"] if "commopt.attach" in line]
    assert len(said) == 1
    assert "already equal on all ranks" in said[0]
    assert ("one of those built in" if "built in" in scene else "allreduce_hook") in said[0]
    assert "leave that out" in said[0]
    assert not ranks[1][scene]["log"]


@pytest.mark.parametrize(
    "scene",
    [f"unattached, {hook}{how}" for hook in ("hooked", "built in") for how in ("", ", overlapped")],
)
def test_gradients_that_a_ddp_model_has_averaged_are_not_averaged_again(ranks, scene):
    for a, b in zip(ranks[0][scene]["params"], ranks[1][scene]["params"]):
        assert torch.equal(a, b)
    inner = Used()  # whose gradients DDP has, and brings: those of the unused one, too
    nbytes = sum(p.nbytes for p in inner.parameters() if p.requires_grad)
    nbytes += 0 if "overlapped" in scene else inner.unused.nbytes
    for t, stats in enumerate(ranks[0][scene]["stats"]):
        sent = stats["step"]["by_collective"]
        assert sent["ddp"] == {"bytes": nbytes, "calls": 1}, t
        assert sent.get("all_reduce", {}).get("bytes", 0) <= 8 * 8  # which have a gradient: no average
        assert stats["ratio"] < 1


def test_what_ddp_sends_beside_local_steps_is_counted_from_the_first_round_on(ranks):
    stats = [stats["step"]["by_collective"].get("ddp") for stats in ranks[0]["unattached, hooked, local"]["stats"]]
    assert stats[0] is None
    assert all(stats[1:])


@pytest.mark.parametrize("scene", ["unattached, hooked", "unattached, built in"])
def test_what_cannot_be_attached_cannot_by_another_optimizer_either(ranks, scene):
    assert "it has a communication hook of its own" in ranks[0][scene]["refused"]


def test_a_copy_of_an_attached_model_averages_and_with_its_optimizer_trains_on(ranks):
    for found in (rank["copied"] for rank in ranks):
        assert found["as the original"]
        assert found["sent"]
    assert same_bits(ranks[0]["copied"]["grads"], ranks[1]["copied"]["grads"])
    assert same_bits(ranks[0]["copied"]["params"], ranks[1]["copied"]["params"])


def test_what_ddp_averages_for_good_after_compressed_gradients_is_counted_and_said(ranks):
    said = [line for line in ranks[0]["copied"]["log"] if "already equal on all ranks" in line]
    assert len(said) == 1
    assert "compress_gradients() has averaged its gradients before" in said[0]
    assert ranks[0]["copied"]["stats"]["step"]["by_collective"]["ddp"]["calls"] == 1
    assert ranks[0]["copied"]["stats"]["ratio"] < 1


def test_warm_up_is_ddp_with_torch_adamw(ranks):
    def run(rank):
        model = Toy()
        optimizer = OneBitAdam(model.parameters(), backend=rank, **SETTINGS)
        train(model, optimizer, range(SETTINGS["freeze_step"]), rank.rank, 2)
        return params_of(model)

    for a, b in zip(on_threads(2, run)[0], ranks[0]["baseline"]["params"]):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_nan_on_one_rank_under_ddp_is_skipped_by_both(ranks):
    for r in ranks:
        assert r["nan"]["unchanged"] == [True, True]
        assert r["nan"]["skipped"] == 2
        assert all(p.isfinite().all() for p in r["nan"]["params"])


def test_a_mesh_and_a_slice_of_one_are_its_group(ranks):
    for r in ranks:
        assert same_bits(r["groups"]["mesh"], ranks[0]["bare"]["params"])
        assert same_bits(r["groups"]["cube"], ranks[0]["bare"]["params"])
        assert same_bits(r["groups"]["slice"], ranks[0]["bare"]["params"])
        assert r["groups"]["copy shares the group"]


def test_groups_and_arguments_that_cannot_work_are_refused(ranks):
    for rank in (0, 1):
        errors = ranks[rank]["groups"]["errors"]
        assert "must be a ProcessGroup, a DeviceMesh or None, got 'world'" in errors["no group"]
        assert "rank 1 has 8 parameters" in errors["differ"]
        assert "lr must be a number >= 0, got -1.0" in errors["lr"]
        assert "hook" in errors["twice"]
        assert "holds none of the 9 parameters of this DistributedDataParallel" in errors["not its parameters"]
    assert "rank 1 of the world is not a member" in ranks[1]["groups"]["errors"]["foreign"]
    assert "the model averages over ranks [0, 1], the optimizer over [0]" in ranks[0]["groups"]["errors"]["other ranks"]


@pytest.mark.parametrize("flatten", [False, True])
def test_distributed_checkpoints_keep_replicas_equal_and_say_that_residuals_are_gone(ranks, flatten):
    a, b = (r["dcp"][flatten] for r in ranks)
    assert same_bits(a["params"], b["params"])
    assert (a["phase"], a["step"], a["moments kept"]) == ("compressed", 9, True)
    assert (a["warnings"], b["warnings"]) == (1, 0)


@pytest.mark.parametrize("name", ["bare", "attached", "attached to views"])
def test_overlap_gives_the_same_bits_and_starts_in_backward(ranks, name):
    for r in ranks:
        got = r["overlapped"][name]
        assert (got["in backward"], got["in step"]) == (got["buckets"] - 1, 1)
        for a, b in zip(got["params"], ranks[0]["overlapped"]["attached"]["params"]):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_overlap_with_accumulation_in_ddp_no_sync_gives_the_same_bits(ranks):
    for r in ranks:
        over = r["overlapped"]
        assert over["attached, accumulated"]["in backward"] == over["attached, accumulated"]["buckets"] - 1
        assert over["attached, accumulated, plain"]["in backward"] == 0
        plain = ranks[0]["overlapped"]["attached, accumulated, plain"]["params"]
        assert same_bits(over["attached, accumulated"]["params"], plain)


def test_overlap_where_the_ranks_start_their_first_bucket_at_different_times(ranks):
    a, b = (r["uneven"] for r in ranks)
    assert a["buckets"] == 2
    assert same_bits(a["params"], b["params"])


def test_a_group_that_is_not_gloo_has_a_twin_and_a_control_channel(ranks):
    for r in ranks:
        mixed = r["mixed"]
        assert (mixed["other"], mixed["timeout"], mixed["control"]) == (True, 77.0, "GlooChannel")
        assert mixed["counted"] == 0  # torch names groups of all ranks by it, and other ranks do not make this one
        for name in ("adam", "cser"):
            assert mixed[name]["channels"] == 0
            assert mixed[name]["sum"] == [3.0] * 7
            assert same_bits(mixed[name]["params"], ranks[0]["mixed"][name]["params"])


def test_where_the_ranks_have_different_numbers_of_groups_no_twin_is_made_and_rank_0_says_so(ranks):
    assert all(r["mixed"]["shares"] for r in ranks)
    assert sum("different numbers of process groups" in line for line in ranks[0]["mixed"]["log"]) == 1
    assert not ranks[1]["mixed"]["log"]


@pytest.mark.parametrize("scene", BESIDE)
def test_of_a_bucket_that_ddp_shares_with_another_optimizer_only_its_gradients_are_averaged(ranks, scene):
    a, b = (r[scene]["attached"] for r in ranks)
    for t in range(STEPS):
        (mine, others), (mine_there, others_there) = a["grads"][t], b["grads"][t]
        assert torch.equal(mine, mine_there) == (t < SETTINGS["freeze_step"])
        assert torch.equal(others, others_there)
    assert same_bits(a["params"], b["params"])
    for p, q in zip(a["params"], ranks[0][scene]["bare"]["params"]):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    sent, bare = a["stats"][-1]["bytes"], ranks[0][scene]["bare"]["stats"][-1]["bytes"]
    assert sent - bare == a["others"]  # what an all-reduce over two ranks sends of them


@pytest.mark.parametrize("together", [True, False])
def test_clipping_by_the_norm_of_two_optimizers_gradients_is_warned_of_where_some_are_local(ranks, together):
    a, b = (r["clipped beside"][together] for r in ranks)
    assert [len(a["log"]), len(b["log"])] == [int(together), 0]
    assert same_bits(a["others"], b["others"]) != together


@pytest.mark.parametrize("overlap", [False, True])
def test_what_a_user_sends_on_the_same_group_may_come_in_any_order(ranks, overlap):
    for r in ranks:
        assert set(r["crossed"]["sums"]) == {3.0}
        assert same_bits(r["crossed"][str(overlap)], ranks[0]["crossed"][str(overlap)])
        assert all(p.isfinite().all() for p in r["crossed"][str(overlap)])


@pytest.mark.parametrize("name", ["bare", "attached", "attached to views"])
def test_clipping_after_an_overlapped_backward_is_refused(ranks, name):
    for r in ranks:
        assert "was changed between backward() and step()" in r["overlapped"][name]["clipped"]
        assert r["overlapped"][name]["unchanged"]


def test_a_rank_that_never_joins_is_an_error_within_the_timeout(ranks):
    assert "step 6, agreement of the ranks" in ranks[0]["alone"]["False"]
    assert "step 6, bucket 0 of" in ranks[0]["alone"]["True"]
