"""What processes do with the exchanges of FSDP2 compressed: reduce-scatters of gradients, all-gathers of weights."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import weakref
from collections import OrderedDict
from typing import Any

import torch
import torch.distributed as dist
from mesh_scenes import Plain, grid, images, tensor_parallel, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import commopt
from commopt.compress import ACP, Identity, Int2, Int4, Int8, Sign, TopK
from commopt.gradients import Differences, LoCo
from commopt.sharding import local


class Block(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.wide, self.out = nn.Linear(7, 40, dtype=dtype), nn.Linear(40, 7, dtype=dtype)
        self.sometimes = nn.Linear(7, 3, bias=False, dtype=dtype)

    def forward(self, x: Tensor, too: bool) -> Tensor:
        y = self.out(torch.tanh(self.wide(x)))
        return y + (self.sometimes(x).sum(1, keepdim=True) if too else 0)


class Odd(nn.Module):
    """Pieces of other sizes and empty ones, a frozen parameter, one that is used on odd steps only, and one never."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.block, self.never = nn.Linear(8, 7, dtype=dtype), Block(dtype), nn.Linear(2, 2, dtype=dtype)
        self.shift = nn.Parameter(torch.full((7,), 0.1, dtype=dtype), requires_grad=False)

    def forward(self, x: Tensor, too: bool = True) -> Tensor:
        return self.block(self.first(x) + self.shift, too)


def cut(net: nn.Module, **options: Any) -> nn.Module:
    fully_shard(net.block, **options)  # type: ignore[call-overload]
    fully_shard(net, **options)
    return net


def placed(mesh: Any) -> nn.Module:
    """On all dimensions of ``mesh``, by nobody who averages over any."""
    net = nn.Linear(4, 4)
    for name, p in list(net.named_parameters()):
        setattr(net, name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Replicate(), Shard(0)])))
    return net


def on_nodes(world_size: int) -> Any:
    """Two nodes, for a model that is cut over all ranks."""
    return grid(2, world_size // 2)


def backward(net: nn.Module, step: int, rank: int, factor: float = 1.0) -> Tensor:
    dtype = next(net.parameters()).dtype
    loss = net(images(step, rank, dtype), step % 2 == 1).square().mean()
    (factor * loss).backward()
    return loss.detach()


def gradients(net: nn.Module) -> list[Tensor | None]:
    """Of whole parameters."""
    return [None if p.grad is None else whole(p.grad).clone() for p in net.parameters()]


class Scale:
    """Of a loss, as a GradScaler has it."""

    now = 1.0

    def get_scale(self) -> float:
        return self.now


def scaled(rank: int, world_size: int, ways: dict[str, dict[str, Any]]) -> dict[str, list[bool]]:
    """By each of ``ways``, whether gradients of a loss whose scale changes are those of the loss, times that, to the
    bit."""
    out = {}
    for name, way in ways.items():
        mesh = on_nodes(world_size) if "inside" in way else None
        plain, other, scale = cut(Odd()), cut(Odd()), Scale()
        commopt.compress_gradients(plain, process_group=mesh, **way)
        commopt.compress_gradients(other, process_group=mesh, scaler=scale, **way)  # type: ignore[arg-type]
        out[name] = []
        for step, scale.now in enumerate([1024.0, 1024.0, 16.0, 16.0, 32.0, 2.0]):
            plain.zero_grad()
            other.zero_grad()
            backward(plain, step, rank)
            backward(other, step, rank, scale.now)
            pairs = list(zip(gradients(plain), gradients(other)))
            out[name].append(all(h is None if g is None else torch.equal(scale.now * g, h) for g, h in pairs))
    return out


def as_fsdps_own(rank: int, world_size: int) -> dict[str, Any]:
    """With the identity: how far gradients are from FSDP's, and after it was removed; a factor of FSDP's; bfloat16."""
    out: dict[str, Any] = {}
    theirs, ours = cut(Odd()), cut(Odd())
    handle = commopt.compress_gradients(ours, Identity(), weights=Identity())
    for step in range(6):
        if step == 4:
            for net in (theirs, ours):
                net.zero_grad()
                net.set_gradient_divide_factor(2.0)
                if net is theirs:  # Gloo cannot multiply on the way
                    for module in (net, net.block):
                        module.set_force_sum_reduction_for_comms(True)
        if step == 5:
            handle.remove()
        for net in (theirs, ours):
            net.zero_grad()
            backward(net, step, rank)
        pairs = list(zip(gradients(theirs), gradients(ours)))
        assert [g is None for g, _ in pairs] == [h is None for _, h in pairs]
        out[f"apart {step}"] = max(float((g - h).abs().max()) for g, h in pairs if g is not None and h is not None)
    stats = handle.comm_stats()
    out["ratio"], out["steps"] = stats["ratio"], stats["steps"]

    for name, options in POLICIES.items():
        both = [cut(Odd(torch.float32), **options) for _ in range(2)]
        commopt.compress_gradients(both[1], Identity(), weights=Identity())
        for net in both:
            backward(net, 1, rank)
        out[name] = apart(*both)
    return out


class Stack(nn.Module):
    """Parameters of given shapes: those of the first module are its own."""

    def __init__(self, *modules: Any) -> None:
        super().__init__()
        self.own = nn.ParameterList(torch.ones(shape) for shape in modules[0])
        self.layers = nn.ModuleList(Stack(shapes) for shapes in modules[1:])

    def forward(self, x: Tensor) -> Tensor:
        y = x + sum(p.sum() for p in self.own)
        for layer in self.layers:
            y = layer(y)
        return y


def as_probed(rank: int, world_size: int, modules: Any, ways: Any) -> dict[str, tuple[int, int]]:
    """Bytes of the second step by each of ``ways``, of a model of such modules: those that leave a node, and those that
    stay inside."""
    out = {}
    for name, way in ways.items():
        net = Stack(*modules)
        for layer in net.layers:
            fully_shard(layer)
        fully_shard(net)
        mesh = on_nodes(world_size) if way.nodes else None
        handle = commopt.compress_gradients(
            net, way.gradients, inside=way.inside, weights=way.weights, process_group=mesh
        )
        for _ in range(2):
            net.zero_grad()
            net(torch.ones(())).backward()
        step = handle.comm_stats()["step"]
        out[name] = step["bytes"], step.get("intra_node", {"bytes": 0})["bytes"]
    return out


def apart(theirs: nn.Module, ours: nn.Module) -> float:
    """How far gradients are from each other, over the largest of each."""
    pairs = list(zip(gradients(theirs), gradients(ours)))
    assert [g is None for g, _ in pairs] == [h is None for _, h in pairs]
    return max(float((g - h).abs().max() / g.abs().max()) for g, h in pairs if g is not None and g.any())


HALF = torch.bfloat16
POLICIES: dict[str, dict[str, Any]] = {
    "half": {"mp_policy": MixedPrecisionPolicy(HALF, HALF)},
    "reduced in full": {"mp_policy": MixedPrecisionPolicy(HALF, torch.float32)},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "both": {"mp_policy": MixedPrecisionPolicy(HALF, HALF), "offload_policy": CPUOffloadPolicy(pin_memory=False)},
}
"""Of fully_shard."""


def beside_hsdp(rank: int, world_size: int) -> dict[str, Any]:
    """Between replicas, with the identity: how far gradients are from those that FSDP averages by itself, which an
    all-reduce hook would; two backward passes a step; and how many collectives it takes, of how many groups. Of a model
    on the shards alone, and of one on both dimensions."""
    mesh, out = grid(2, 2), {}
    for (name, options), both in itertools.product(POLICIES.items(), (False, True)):
        ours, theirs = (
            cut(Odd(torch.float32), mesh=mesh if both else mesh["shard"], **options),
            cut(Odd(torch.float32), mesh=mesh, **options),
        )
        handle = commopt.compress_gradients(ours, Identity(), process_group=None if both else mesh)
        for i in range(2):
            theirs.set_requires_all_reduce(i == 1)
            backward(theirs, 1, rank + 4 * i)
            with handle.no_sync() if i == 0 else torch.enable_grad():
                backward(ours, 1, rank + 4 * i)
        stats = handle.comm_stats()
        out[name, both] = apart(theirs, ours), stats["steps"], stats["step"]["calls"]
    return out


def on_both_dimensions(rank: int, world_size: int, compressor: Any, options: dict[str, Any]) -> dict[str, bool]:
    """Whether a model on both dimensions of the mesh has the gradients, residuals and traffic of one on the shards
    alone; whether its state goes into that, and its residuals go on there; whether FSDP averages again in the end; and
    whether that is undone which an error has stopped."""
    mesh = grid(2, 2)
    hybrid, inner, plain = (cut(Odd(), mesh=m) for m in (mesh, mesh["shard"], mesh))
    handles = [
        commopt.compress_gradients(net, compressor, process_group=m, **options)
        for net, m in ((hybrid, None), (inner, mesh))
    ]
    out = dict.fromkeys(("gradients", "residuals", "traffic"), True)
    for step in range(6):
        for net in (hybrid, inner):
            net.zero_grad()
            backward(net, step, rank)
        out["gradients"] &= same(gradients(hybrid), gradients(inner))
        states = [handle.state_dict()["residuals"]["state"] for handle in handles]
        out["residuals"] &= same(*([t for i in sorted(s, key=str) for t in s[i].values()] for s in states))
        out["traffic"] &= handles[0].comm_stats() == handles[1].comm_stats()
        if step == 3:
            for here, there in (handles, handles[::-1]):
                here.load_state_dict(there.state_dict())
    handles[0].remove()
    with contextlib.suppress(ValueError):
        commopt.compress_gradients(hybrid, compressor, weights="none")
    for net in (hybrid, plain):
        net.zero_grad()
        backward(net, 1, rank)
    out["fsdp again"] = same(gradients(hybrid), gradients(plain))
    return out


def same(ours: list[Any], theirs: list[Any]) -> bool:
    pairs = list(zip(ours, theirs, strict=True))
    return all(torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b for a, b in pairs)


def accumulated(rank: int, world_size: int) -> dict[str, Any]:
    """Three backward passes and one mean, in two ways; and the same at once."""
    out: dict[str, Any] = {}
    for way in ("handle", "fsdp", "sum"):
        net = cut(Odd())
        handle = commopt.compress_gradients(net, Int4(block=8))
        for step in range(4):
            if way == "sum":
                sum(net(images(10 * step + i, rank), True).square().mean() for i in range(3)).backward()  # type: ignore[union-attr]
            for i in range(3 if way != "sum" else 0):
                if way == "fsdp":
                    net.set_requires_gradient_sync(i == 2)
                with handle.no_sync() if way == "handle" and i < 2 else torch.enable_grad():
                    net(images(10 * step + i, rank), True).square().mean().backward()
        out[way] = gradients(net), handle.comm_stats()["steps"]
    net.set_requires_gradient_sync(False)
    with handle.no_sync():
        pass
    out["still off"] = not any(
        module._get_fsdp_state()._fsdp_param_groups[0].reduce_grads for module in (net, net.block)
    )
    return out


def conserved(rank: int, world_size: int, compressor: Any, feedback: Any, nodes: bool = False) -> dict[str, Any]:
    """The sum of what came out, the residuals, and the sum of exact means; bytes of a step with all parameters."""
    net, exact = cut(Odd()), Odd()
    mesh = on_nodes(world_size) if nodes else None
    handle = commopt.compress_gradients(net, compressor, feedback=feedback, process_group=mesh)
    came, true = ([0.0 if p.requires_grad else None for p in net.parameters()] for _ in range(2))
    stats = {}
    for step in range(6):
        net.zero_grad()
        exact.zero_grad()
        backward(net, step, rank)
        backward(exact, step, rank)
        for i, (g, h) in enumerate(zip(gradients(net), gradients(exact))):
            if h is not None:
                dist.all_reduce(h)
                true[i], came[i] = (
                    (0.0 if true[i] is None else true[i]) + h / world_size,
                    (0.0 if came[i] is None else came[i]) + g,
                )
        stats[step] = handle.comm_stats()
    residuals: list[Any] = [0.0] * len(came)
    trained = [i for i, p in enumerate(net.parameters()) if p.requires_grad]
    for i, entry in handle.state_dict()["residuals"]["state"].items():
        if isinstance(i, int):
            error = entry["worker_error"].clone()
            dist.all_reduce(error)
            residuals[trained[i]] = (error / world_size).view(exact.get_parameter(_names(exact)[trained[i]]).shape)
    return {"came": came, "true": true, "residuals": residuals, "stats": stats[5], "fewer": stats[4]}


def _names(net: nn.Module) -> list[str]:
    return [name for name, _ in net.named_parameters()]


def many_equal_steps(rank: int, world_size: int) -> float:
    """How far the mean of 64 means of one gradient is from it, of 2 bits, over its largest element."""
    net, exact = cut(Odd()), cut(Odd())
    commopt.compress_gradients(net, Int2(block=8))
    backward(exact, 1, rank)
    for _ in range(64):
        backward(net, 1, rank)
    pairs = [(g, h) for g, h in zip(gradients(net), gradients(exact)) if g is not None and h is not None]
    return max(float((g / 64 - h).abs().max() / h.abs().max()) for g, h in pairs)


def not_finite(rank: int, world_size: int, feedback: Any, assign: bool = False) -> dict[str, Any]:
    """inf in a group of parameters of one rank: whether gradients are finite on this one, and whether it has left a
    trace. ``assign``: parameters have been exchanged."""
    net = cut(Odd())
    handle = commopt.compress_gradients(net, Int4(block=8), feedback=feedback)
    if assign:
        net.load_state_dict({name: x.clone() for name, x in net.state_dict().items()}, assign=True)
    backward(net, 1, rank)
    before = residuals_of(handle)
    net.zero_grad()
    spoils = net.block.out.register_forward_hook(lambda module, args, y: y.register_hook(_with_inf) and None)
    if rank != 1:
        spoils.remove()
    ends = net.first.register_forward_hook(lambda module, args, y: y.register_hook(torch.zeros_like) and None)
    backward(net, 3, rank)
    ends.remove()
    finite = [bool(local(p.grad).isfinite().all()) for p in net.parameters() if p.grad is not None and p.grad.numel()]
    pieces = [local(p.grad).numel() for p in net.parameters() if p.grad is not None]
    after = residuals_of(handle)
    spoils.remove()
    net.zero_grad()
    backward(net, 5, rank)
    again = all(bool(local(p.grad).isfinite().all()) for p in net.parameters() if p.grad is not None)
    same = all(torch.equal(before[name], after[name]) for name in before)
    return {"finite": finite, "pieces": pieces, "same": same, "again": again, "stats": handle.comm_stats()}


def _with_inf(gradient: Tensor) -> Tensor:
    out = gradient.clone()
    out[0, -1] = torch.inf
    return out


def residuals_of(handle: Any) -> dict[Any, Tensor]:
    return residuals_in(handle.state_dict())


def residuals_in(given: dict[str, Any]) -> dict[Any, Tensor]:
    state = given["residuals"]["state"]
    return {(i, name): t for i, e in state.items() for name, t in e.items() if isinstance(t, Tensor)}


def trained(net: nn.Module, rank: int, optimizer: Any, steps: range) -> list[Tensor]:
    for step in steps:
        optimizer.zero_grad()
        backward(net, step, rank)
        optimizer.step()
    return [local(p).detach().clone() for p in net.parameters()]


def resumed(rank: int, world_size: int, feedback: Any, weights: Any, inside: Any = None) -> bool:
    """Whether a run that was stopped after an evaluation, by way of a file, is the one that was not. One group of
    parameters is gathered by no forward; a parameter has one element."""

    def made() -> tuple[nn.Module, Any, Any]:
        net = Odd(torch.float32)
        net.never = nn.Linear(2, 1)
        fully_shard(net.never)
        cut(net)
        mesh = None if inside is None else on_nodes(world_size)
        handle = commopt.compress_gradients(
            net, Int4(block=8), feedback=feedback, weights=weights, inside=inside, process_group=mesh
        )
        return net, handle, torch.optim.AdamW(net.parameters(), lr=1e-2)

    net, handle, optimizer = made()
    trained(net, rank, optimizer, range(5))
    with torch.no_grad():
        net(images(0, 99, torch.float32))  # the weights of this are those of the next step, too
        net.reshard()
    saved = [local(p).detach().clone() for p in net.parameters()]
    states = {"handle": handle.state_dict(), "optimizer": optimizer.state_dict()}
    states["optimizer"]["state"] = {
        i: {k: local(v).clone() for k, v in e.items()} for i, e in states["optimizer"]["state"].items()
    }
    uninterrupted = trained(net, rank, optimizer, range(5, 9))
    net, handle, optimizer = made()
    with torch.no_grad():
        for p, value in zip(net.parameters(), saved):
            local(p).copy_(value)
    handle.load_state_dict(states["handle"])
    for i, p in enumerate(net.parameters()):
        if (entry := states["optimizer"]["state"].get(i)) is not None:
            optimizer.state[p] = {k: v if k == "step" else commopt.sharding.like(v, p) for k, v in entry.items()}
    return all(torch.equal(a, b) for a, b in zip(uninterrupted, trained(net, rank, optimizer, range(5, 9))))


def saved_at(rank: int, world_size: int, nodes: bool) -> dict[str, Any]:
    """A state after some steps, of this rank."""
    net = cut(Odd())
    handle = commopt.compress_gradients(net, Int4(block=8), process_group=on_nodes(world_size) if nodes else None)
    for step in range(3):
        backward(net, step, rank)
    return handle.state_dict()


def loaded_at(rank: int, world_size: int, states: list[dict[str, Any]], nodes: bool) -> dict[Any, Tensor]:
    """Residuals of this rank, of those of another world."""
    split = [commopt.optim.split_state_dict(state) for state in states]
    mesh = on_nodes(world_size) if nodes else None
    handle = commopt.compress_gradients(cut(Odd()), Int4(block=8), process_group=mesh)
    joined = commopt.optim.join_state_dict(split[0][0], [own for _, own in split], rank, world_size)
    handle.load_state_dict(joined)
    return residuals_of(handle)


def folded(net: nn.Module, rank: int) -> list[Tensor]:
    """The residuals of all ranks, of whole parameters: what comes out where nothing more goes in."""
    out = [torch.zeros(p.shape, dtype=p.dtype) for p in net.parameters()]
    for _ in range(6):
        net.zero_grad()
        backward(net, 1, rank, 0.0)
        for total, g in zip(out, gradients(net)):
            total += 0 if g is None else g
    return out


def on_mesh(shape: tuple[int, int] | None, compressor: Any, feedback: Any = True) -> tuple[nn.Module, Any]:
    """A model cut over the second dimension of a mesh of replicas and shards, or over all ranks alike."""
    mesh = None if shape is None else grid(*shape)
    net = cut(Odd(), **({} if mesh is None else {"mesh": mesh["shard"]}))
    bucket_mb = None if mesh is None else 2e-4
    return net, commopt.compress_gradients(net, compressor, process_group=mesh, bucket_mb=bucket_mb, feedback=feedback)


def saved_on_mesh(rank: int, world_size: int, shape: Any, *how: Any) -> tuple[dict[str, Any], list[Tensor]]:
    """A state after some steps, and the residuals then."""
    net, handle = on_mesh(shape, *how)
    for step in range(4):
        backward(net, step, rank)
    state = handle.state_dict()
    return state, folded(net, rank)


def loaded_on_mesh(
    rank: int, world_size: int, states: list[dict[str, Any]], shape: Any, *how: Any
) -> tuple[list[Tensor], dict[str, Any]]:
    """Residuals on a mesh that has loaded them, and its state before that."""
    net, handle = on_mesh(shape, *how)
    split = [commopt.optim.split_state_dict(state) for state in states]
    joined = commopt.optim.join_state_dict(split[0][0], [own for _, own in split], rank, world_size)
    handle.load_state_dict(joined)
    state = handle.state_dict()
    return folded(net, rank), state


def regrouped(rank: int, world_size: int) -> tuple[bool, list[str]]:
    """Whether there are residuals on ranks that load, as nodes, what they saved alike; and what they were told."""
    told: list[str] = []
    watching = logging.Handler()
    watching.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("commopt").addHandler(watching)
    handle = commopt.compress_gradients(cut(Odd()), Int4(block=8), process_group=on_nodes(world_size))
    handle.load_state_dict(saved_at(rank, world_size, False))
    logging.getLogger("commopt").removeHandler(watching)
    return any(bool(residuals.any()) for residuals in residuals_of(handle).values()), told


def off(saved: Any, loaded: Any) -> float:
    """How far residuals are from those that were saved, over the largest of these."""
    there, here = residuals_of(saved), residuals_of(loaded)
    largest = max(float(t.abs().max()) for t in there.values() if t.numel())
    return max(float((t - here[key]).abs().max()) for key, t in there.items() if t.numel()) / largest


def otherwise_kept(rank: int, world_size: int, nodes: bool) -> list[float]:
    """How far residuals are from those that were saved of another kind of feedback: kept as they are and loaded in 8
    bits, and the other way round."""
    mesh, apart = on_nodes(world_size) if nodes else None, []
    for saves, loads in ((True, LoCo()), (LoCo(), True)):
        net = cut(Odd())
        handle = commopt.compress_gradients(net, Int4(block=8), feedback=saves, process_group=mesh)
        for step in range(3):
            backward(net, step, rank)
        other = commopt.compress_gradients(cut(Odd()), Int4(block=8), feedback=loads, process_group=mesh)
        other.load_state_dict(handle.state_dict())
        apart.append(off(handle, other))
    return apart


def in_other_groups(rank: int, world_size: int, feedback: Any, nodes: bool) -> list[float]:
    """How far residuals are from those that were saved of a model in two groups and loaded in one, and the other way
    round, if a backward works then."""
    mesh, apart = on_nodes(world_size) if nodes else None, []
    for saves, loads in ((cut, fully_shard), (fully_shard, cut)):
        nets = [saves(Odd()), loads(Odd())]
        handle, other = (
            commopt.compress_gradients(
                net, Int4(block=8), feedback=feedback, weights=Differences(Int4(block=8)), process_group=mesh
            )
            for net in nets
        )
        for step in range(3):
            backward(nets[0], step, rank)
        other.load_state_dict(handle.state_dict())
        apart.append(off(handle, other))
        backward(nets[1], 3, rank)
        assert all(g is None or g.isfinite().all() for g in gradients(nets[1]))
    return apart


def one_is_given_another(rank: int, world_size: int) -> list[str]:
    """What ranks are told that load weights, too, where one of them is given the residuals of another model; and
    training goes on after it."""
    net, said = cut(Odd(torch.float32)), []
    handle = commopt.compress_gradients(net, Int4(block=8), weights=Differences(Int4(block=8)))
    for step in range(3):
        backward(net, step, rank)
        state = handle.state_dict()
        if rank == 1 and step == 1:
            state["param_groups"][0]["params"].pop()
        if rank == 1 and step == 2:
            state["residuals"]["state"][0]["worker_error"] = torch.ones(1)
        try:
            handle.load_state_dict(state)
            said.append("loaded")
        except ValueError as error:
            said.append(str(error))
    backward(net, 3, rank)
    return said


def not_grouped(rank: int, world_size: int) -> dict[str, Any]:
    """What is sent of a model on a flattened mesh, of whose dimensions nobody has said that they are nodes."""
    net = cut(Odd(), mesh=on_nodes(world_size)._flatten())
    handle = commopt.compress_gradients(net, Int4(block=8))
    backward(net, 1, rank)
    step: dict[str, Any] = handle.comm_stats()["step"]
    return step


def both_levels(rank: int, world_size: int) -> dict[str, Any]:
    """SDP4Bit's pair: int8 among the ranks of a replica, rotated int4 between replicas; sharded, and whole."""
    out: dict[str, Any] = {}
    mesh = grid(2, 2)
    for name, inside in (("plain", None), ("pair", Int8())):
        net = cut(Odd(torch.float32), mesh=mesh["shard"])
        handle = commopt.compress_gradients(
            net, Int4(rotate=True), feedback=False, inside=inside, process_group=mesh, bucket_mb=1e-3
        )
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        out[name] = trained(net, rank, optimizer, range(4)), handle.comm_stats()
        nodes = init_device_mesh("cpu", (2, 2))
        model = Odd(torch.float32)
        handle = commopt.compress_gradients(
            model, Int4(rotate=True), feedback=False, inside=inside, process_group=nodes, bucket_mb=1e-3
        )
        backward(model, 1, rank)
        out[f"whole {name}"] = gradients(model), handle.comm_stats()
    exact = Odd(torch.float32)
    backward(exact, 1, rank)
    out["exact"] = gradients(exact)
    for g in out["exact"]:
        if g is not None:
            dist.all_reduce(g)
            g /= world_size
    return out


def two_levels(rank: int, world_size: int) -> dict[str, Any]:
    """A model cut over two nodes: with the identity, how far gradients are from FSDP's; of SDP4Bit, what is sent
    inside and between, the outputs, and gradients beside exact ones; and those with inf on one rank."""
    out: dict[str, Any] = {}
    mesh, x = on_nodes(world_size), images(0, 99, torch.float32)
    theirs, ours = cut(Odd()), cut(Odd())
    commopt.compress_gradients(ours, Identity(), weights=Identity(), inside=Identity(), process_group=mesh)
    for step in range(3):
        for net in (theirs, ours):
            net.zero_grad()
            backward(net, step, rank)
        pairs = list(zip(gradients(theirs), gradients(ours)))
        assert [g is None for g, _ in pairs] == [h is None for _, h in pairs]
        apart = max(float((g - h).abs().max()) for g, h in pairs if g is not None and h is not None)
        out["apart"] = max(out.get("apart", 0.0), apart)
    exact = torch.cat([g.flatten() for g in gradients(theirs) if g is not None])

    net = cut(Odd())
    pair = {"feedback": False, "inside": INSIDE, "weights": Differences(WEIGHTS), "process_group": mesh}
    handle = commopt.compress_gradients(net, BETWEEN, **pair)
    for step in (0, 1, 2, 1):  # in the first, weights are gathered in full; with the last, no step was taken
        net.zero_grad()
        backward(net, step, rank)
    out["stats"] = handle.comm_stats()
    net.zero_grad()
    backward(net, 2, rank)
    found = torch.cat([g.flatten() for g in gradients(net) if g is not None])
    out["error"] = float((found - exact).norm() / exact.norm())
    out["y"] = net(x.double()).detach()
    net.zero_grad()
    backward(net, 1, rank, torch.inf if rank == 1 else 1.0)
    pieces = [local(p.grad) for p in net.parameters() if p.grad is not None]
    out["finite"] = [bool(piece.isfinite().any()) for piece in pieces if piece.numel()]
    return out


def of_weights(rank: int, world_size: int) -> dict[str, Any]:
    """What a forward computes with weights of 8 bits, and by differences: outputs, how far the weights are from those
    of the optimizer, bytes of forward and backward; and after all weights were changed."""
    out: dict[str, Any] = {}
    x = images(0, 99, torch.float32)  # the same on all ranks
    for name, weights in (("exact", None), ("int8", Int8()), ("differences", Differences(Int4(block=8)))):
        net = cut(Odd(torch.float32))
        handle = commopt.compress_gradients(net, Int8(), weights=weights)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        apart, total, full = [], [], []
        for _ in range(6):
            before = gathered(handle)
            optimizer.zero_grad()
            y = net(x)
            middle = gathered(handle)
            y.square().mean().backward()
            flags = world_size - 1  # whether all is finite, at the end
            total.append((middle - before, gathered(handle) - middle - flags))
            with torch.no_grad():
                net(x)  # an evaluation, in no step
            net.reshard()  # else FSDP goes on with the weights of it
            assert handle.comm_stats()["step"]["by_collective"]["all_gather"]["bytes"] == sum(total[-1]) + flags
            full.append(handle.comm_stats()["fp32_bytes"])
            apart.append(float((y - whole_forward(net, x)).abs().max()))
            optimizer.step()
        with torch.no_grad():
            for p in net.parameters():
                local(p).mul_(-2)
        y = net(x).detach()
        out[name] = {
            "apart": apart, "bytes": total, "moved": float((y - whole_forward(net, x)).abs().max()), "y": y,
            "ratio": handle.comm_stats()["ratio"], "full": full,
        }  # fmt: skip
    return out


def loop_of_differences(rank: int, world_size: int) -> list[bool]:
    """Whether what each forward computes with, of one matrix, is w <- w + C[x - w] of every rank's piece x; w begins as
    x. And what a second forward and an evaluation before the step compute with, and a piece that no step moves."""
    net = fully_shard(nn.Linear(8, 2 * world_size, bias=False, dtype=torch.float64))
    compressor = Int4(block=8)
    commopt.compress_gradients(net, Int8(), weights=Differences(compressor))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    w = torch.zeros(world_size, 16, dtype=torch.float64)
    found = []
    for step in range(6):
        optimizer.zero_grad()
        used = net(torch.eye(8, dtype=torch.float64))
        with torch.no_grad():
            net.reshard()  # else FSDP goes on with the weights that it has
            again = net(torch.eye(8, dtype=torch.float64))
            net.reshard()
        (used * images(step, rank, torch.float64)[:, :1].repeat(2, 1)).sum().backward()
        x = whole(net.weight).detach().view(world_size, 16)
        if step == 0:
            w.copy_(x)
            last = x
        for number, (mine, piece) in enumerate(zip(w, x)):
            if torch.equal(piece, last[number]):
                continue
            difference = (piece - mine).unsqueeze(0)
            payload = torch.empty(1, compressor.nbytes(16, torch.float64), dtype=torch.uint8)
            compressor.compress(difference, payload)
            back = torch.empty(1, 16, dtype=torch.float64)
            compressor.decompress(payload, back)
            mine.add_(back[0])
        last = x
        found.append(
            torch.equal(used.detach().t().contiguous().view(world_size, 16), w)
            and torch.equal(used.detach(), again)
            and (step == 0 or bool((w != x).any()))
        )
        if step == 3 and rank == 1:
            continue
        optimizer.step()
    return found


def gathered(handle: Any) -> int:
    """Bytes of all-gathers so far."""
    found = handle.comm_stats()["total"]["by_collective"].get("all_gather", {"bytes": 0})
    return int(found["bytes"])


def gathered_back_inside(rank: int, world_size: int) -> float:
    """FSDP keeps pieces of every two ranks after a forward: how far gradients are from those without compression."""
    x, found = images(0, rank, torch.float32), []
    for weights in (None, Identity(), Differences(Identity())):
        net = cut(Odd(torch.float32), reshard_after_forward=2)
        commopt.compress_gradients(net, Identity(), weights=weights)
        net(x).square().mean().backward()
        found.append(torch.cat([g.flatten() for g in gradients(net) if g is not None]))
    return max(float((g - found[0]).abs().max()) for g in found)


def whole_forward(net: nn.Module, x: Tensor) -> Tensor:
    """With the optimizer's weights."""
    other = Odd(torch.float32)
    with torch.no_grad():
        for p, q in zip(other.parameters(), net.parameters()):
            p.copy_(whole(q))
        return other(x)


def replica_is_nan(rank: int, world_size: int) -> bool:
    """Weights that were NaN for a while do not stay so."""
    net = cut(Odd(torch.float32))
    commopt.compress_gradients(net, Int8(), weights=Differences())
    x = images(0, 0, torch.float32)
    net(x)
    kept = [local(p).detach().clone() for p in net.parameters()]
    with torch.no_grad():
        for p in net.parameters():
            if rank == 0:
                local(p).fill_(torch.nan)
    assert not net(x).isfinite().all()
    with torch.no_grad():
        for p, value in zip(net.parameters(), kept):
            local(p).copy_(value)
    return bool(net(x).isfinite().all())


def several_in_a_group(rank: int, world_size: int) -> dict[str, Any]:
    """Modules that FSDP has in one group: how many exchanges there are, and whose they are after they were removed."""
    net = Odd()
    fully_shard([net.block.wide, net.block.out])
    fully_shard(net)
    handle = commopt.compress_gradients(net, Int4(block=8), weights=Int8())
    backward(net, 1, rank)
    assert handle._sharded is not None
    count = len(handle._sharded.means), len(handle._sharded.weights)
    handle.remove()
    group = net.block.out._get_fsdp_state()._fsdp_param_groups[0]
    left = [type(comm).__name__ for comm in (group._reduce_scatter_comm, group._all_gather_comm)]
    sums = group.force_sum_reduction_for_comms
    commopt.compress_gradients(net, Int4(block=8))  # is allowed again
    backward(net, 1, rank)
    return {"count": count, "left": left, "sums": sums}


def gone(rank: int, world_size: int) -> dict[str, bool]:
    """Whether a model is freed, whose handle nobody keeps, and until then compressed; or whose handle was removed."""
    out = {}
    for name in ("handle is let go", "removed"):
        net = cut(Odd(torch.float32))
        handle: Any = commopt.compress_gradients(net, Int4(block=8), weights=Differences())
        backward(net, 1, rank)
        if name == "removed":
            handle.remove()
        else:
            mean = handle.mean
            del handle
            gc.collect()
            backward(net, 1, rank)
            assert mean.steps == 2
            del mean
        model = weakref.ref(net)
        handle = net = None  # type: ignore[assignment]
        gc.collect()
        out[name] = model() is None
    return out


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


def compiled(rank: int, world_size: int) -> float:
    """A block that must be one graph: how far gradients are from those of one that is not compiled."""
    found = []
    for compiles in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8), Residual())
        if compiles:
            net[1].compile(backend="aot_eager", fullgraph=True)
        fully_shard(net[1])
        fully_shard(net)
        commopt.compress_gradients(net, Identity(), weights=Identity())
        net(images(0, rank, torch.float32)).square().mean().backward()
        found.append(torch.cat([whole(p.grad).flatten() for p in net.parameters()]))
    return float((found[1] - found[0]).abs().max())


def by_another_method(rank: int, world_size: int) -> bool:
    """Without feedback nobody has to know which parameters have a gradient, which is not seen here."""
    block = Block(torch.float32)
    block.some = lambda x: block.forward(x, False)  # type: ignore[assignment]
    fully_shard(block)
    register_fsdp_forward_method(block, "some")
    commopt.compress_gradients(block, Int4(block=8), feedback=False)
    block.some(images(0, rank, torch.float32)[:, :7]).sum().backward()
    return block.out.weight.grad is not None and block.sometimes.weight.grad is None


class Two(nn.Module):
    """Of two equal parameters, which are in one group, the first is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.first.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def frozen_later(rank: int, world_size: int) -> bool:
    """Whether gradients are FSDP's where it hands over zeros for unused parameters, and one was frozen since."""
    nets = []
    for compresses in (False, True):
        torch.manual_seed(0)
        net = fully_shard(Block(torch.float64))
        net.set_reduce_scatter_unused_params(True)
        if compresses:
            commopt.compress_gradients(net, Identity())
        for too in (True, False, False):
            net.zero_grad()
            net(images(0, rank)[:, :7], too).sum().backward()
            net.wide.bias.requires_grad_(False)
        nets.append(net)
    return apart(*nets) < 1e-14


def frozen_before_the_first_forward(rank: int, world_size: int) -> list[float]:
    """How far gradients are from FSDP's: of a model with a parameter that was frozen between ``compress_gradients`` and
    the first forward, and when that is trained again."""
    nets, out = [], []
    for compresses in (False, True):
        torch.manual_seed(0)
        net = fully_shard(Block(torch.float64))
        if compresses:
            commopt.compress_gradients(net, Identity())
        net.wide.bias.requires_grad_(False)
        nets.append(net)
    for trained in (False, True):
        for net in nets:
            net.zero_grad()
            net.wide.bias.requires_grad_(trained)
            net(images(0, rank)[:, :7], True).sum().backward()
        assert (nets[1].wide.bias.grad is not None) == trained
        out.append(apart(*nets))
    return out


def trained_later(rank: int, world_size: int) -> str:
    """What is said if a frozen parameter gets a gradient in place of another of its size; and that it can."""
    net = Two()
    fully_shard(net)
    handle = commopt.compress_gradients(net, Int4(block=8))
    x = images(0, rank, torch.float32)
    net(x).sum().backward()
    net.zero_grad()
    net.first.weight.requires_grad_(True)
    net.second.weight.requires_grad_(False)
    try:
        net(x).sum().backward()
        return "allowed"
    except RuntimeError as error:
        said = str(error)
    net.reset_iter_state()
    handle.remove()
    commopt.compress_gradients(net, Int4(block=8))
    net(x).sum().backward()
    assert net.first.weight.grad is not None
    return said


def refused(rank: int, world_size: int) -> dict[str, str]:
    """What is said about what cannot be."""
    mesh, out = grid(2, world_size // 2), {}

    class Own:
        allocate = staticmethod(lambda size, *, dtype, device: torch.empty(*size, dtype=dtype, device=device))

        def __call__(self, *args: Any, **options: Any) -> None: ...

    custom = cut(Odd())
    custom.set_custom_reduce_scatter(Own())
    twice = cut(Odd())
    commopt.compress_gradients(twice, Int4())
    two = Odd()
    other = _fsdp_common.FSDPMeshInfo(mesh["replicate"], shard_mesh_dim=0)
    fully_shard(two, mesh=mesh["shard"], shard_placement_fn=lambda p: _on(other) if p.ndim == 1 else None)
    cases: dict[str, Any] = {
        "groups": lambda: commopt.compress_gradients(two, Int4(), inside=Int8(), process_group=mesh),
        "low rank": lambda: commopt.compress_gradients(cut(Odd()), ACP(2)),
        "sum": lambda: commopt.compress_gradients(cut(Odd()), Int4(), reduction="sum"),
        "inside": lambda: commopt.compress_gradients(cut(Odd()), Int4(), inside=Int8()),
        "warm-up": lambda: commopt.compress_gradients(cut(Odd()), Int4(), warmup_steps=3),
        "warm-up inside": lambda: commopt.compress_gradients(
            cut(Odd(), mesh=mesh["shard"]), Int4(), inside=Int8(), process_group=mesh, warmup_steps=3
        ),
        "inside what": lambda: commopt.compress_gradients(cut(Odd()), Int4(), inside="int8"),
        "weights what": lambda: commopt.compress_gradients(cut(Odd()), Int4(), weights=8),
        "weights of": lambda: commopt.compress_gradients(Odd(), Int4(), weights=Int8()),
        "on all dimensions": lambda: commopt.compress_gradients(placed(mesh), Int4(), process_group=mesh),
        "some ranks": lambda: commopt.compress_gradients(cut(Odd(), mesh=mesh), Int4(), process_group=mesh["shard"]),
        "custom": lambda: commopt.compress_gradients(custom, Int4()),
        "twice": lambda: commopt.compress_gradients(twice, Int4()),
        "older torch": lambda: _as_before_2_9(cut(Odd())),
        "differ": lambda: commopt.compress_gradients(cut(Odd()), Int4(), weights=Int8(block=8 << rank)),
        "one rank": lambda: commopt.compress_gradients(cut(Odd()), Int4(), weights=8 if rank == 1 else None),
    }
    for name, make in cases.items():
        try:
            make()
            out[name] = "allowed"
        except ValueError as error:
            out[name] = str(error)
    return out


class NormFirst(nn.Sequential):
    """Of the names of ``Plain``."""

    def __init__(self) -> None:
        layers = {"norm": nn.LayerNorm(8), "first": nn.Linear(8, 16), "second": nn.Linear(16, 8)}
        super().__init__(OrderedDict(layers))


def over_tensor_parallelism(rank: int, world_size: int) -> dict[str, str]:
    """What is said where FSDP2 cuts over tensor parallelism, and there are no replicas; and with some."""
    meshes = {
        shape: init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard", "tensor")[-len(shape) :])
        for shape in ((2, 2), (1, 2, 2), (2, 1, 2))
    }
    out = {}
    for (shape, mesh), kind in itertools.product(meshes.items(), (Plain, NormFirst)):
        net = fully_shard(tensor_parallel(kind(), mesh["tensor"]), mesh=mesh["shard"])
        try:
            commopt.compress_gradients(net, Int4(block=8), process_group=mesh)
            out[f"{shape} {kind.__name__}"] = "allowed"
        except ValueError as error:
            out[f"{shape} {kind.__name__}"] = str(error)
    return out


def _as_before_2_9(net: nn.Module) -> None:
    taken = FSDPModule.set_custom_reduce_scatter
    del FSDPModule.set_custom_reduce_scatter
    try:
        commopt.compress_gradients(net, Int4())
    finally:
        FSDPModule.set_custom_reduce_scatter = taken  # type: ignore[method-assign]


def _on(mesh: _fsdp_common.FSDPMeshInfo) -> _fsdp_common.ShardPlacementResult:
    return _fsdp_common.ShardPlacementResult(Shard(0), mesh)


BETWEEN, INSIDE, WEIGHTS = Int4(block=8, rotate=True), Int8(block=8), Int4(block=16)
COMPRESSORS = (Sign(16), Int4(block=8), TopK(k=2, chunk=16))
FEEDBACKS = (True, False, LoCo(0.5, 2))


def cast_after(rank: int, world_size: int) -> float:
    """How far gradients of a model that is cast to float64 after compress_gradients() are from those of one that was
    float64, nothing lost in between."""
    found = []
    for late in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
        net = net if late else net.double()
        fully_shard(net)
        commopt.compress_gradients(net, Identity())
        net.double()
        net(torch.full((2, 6), 1.0 + rank, dtype=torch.float64)).square().mean().backward()
        found.append([p.grad.full_tensor() for p in net.parameters()])
    return max(float((a - b).abs().max()) for a, b in zip(*found))


class Three(nn.Sequential):
    """Blocks of names of their own: a base, an expert, and a head."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(OrderedDict(base=nn.Linear(16, 16), expert=nn.Linear(16, 16), head=nn.Linear(16, 16)))


def beside_what_is_cut_over_all(rank: int, world_size: int) -> dict[str, Any]:
    """Of blocks with replicas, beside one that is cut over all ranks and beside none: what they send, and owe."""
    mesh, out = grid(2, 2), {}
    for way in ("alone", "beside"):
        net = Three()
        for name in ("base", "head"):
            fully_shard(net.get_submodule(name), mesh=mesh)
        fully_shard(net.expert, **({} if way == "beside" else {"mesh": mesh}))
        fully_shard(net, mesh=mesh)
        handle = commopt.compress_gradients(net, Int4(block=8), process_group=mesh, weights=Int8(block=8))
        for _ in range(2):
            net.zero_grad()
            net(images(0, rank, torch.float32).repeat(1, 2)).square().mean().backward()
        state, stats = handle.state_dict()["residuals"]["state"], handle.comm_stats()
        out[way] = {
            "residuals": [bool(state[i]["worker_error"].any()) for i in range(6)],
            "between": stats["step"]["by_collective"]["all_to_all"]["bytes"] > 0,
            "all-reduced": "all_reduce" in stats["step"].get("intra_node", {}).get("by_collective", {}),
            "fp32": stats["fp32_bytes"],
        }
        handle.remove()
    return out


def forward_between(rank: int, world_size: int) -> tuple[float, float]:
    """Ratios of a step, and of one with a forward without gradients between its forward and its backward."""
    net = cut(Odd(torch.float32))
    handle = commopt.compress_gradients(net, Int8(block=8), weights=Int8(block=8))
    ratios = []
    for teacher in (False, True):
        net.zero_grad()
        y = net(images(0, rank, torch.float32))
        if teacher:
            with torch.no_grad():
                net(images(1, rank, torch.float32))
        y.square().mean().backward()
        ratios.append(handle.comm_stats()["ratio"])
    return ratios[0], ratios[1]


def frozen_altogether(rank: int, world_size: int) -> dict[str, Any]:
    """A block that is frozen when gradients are compressed: its weights are gathered as all are, and to train it later
    is an error."""
    net = Three()
    net.base.requires_grad_(False)
    for name in ("base", "expert", "head"):
        fully_shard(net.get_submodule(name))
    fully_shard(net)
    out: dict[str, Any] = {}
    x = images(0, rank, torch.float32).repeat(1, 2)
    for weights in (None, Int8(block=8)):
        handle = commopt.compress_gradients(net, Int4(block=8), weights=weights)
        net(x).square().mean().backward()
        out[str(weights)] = handle.comm_stats()["step"]["by_collective"].get("all_gather", {}).get("bytes", 0)
        net.base.requires_grad_(True)
        try:
            net(x).square().mean().backward()
            out["said"] = "allowed"
        except RuntimeError as error:
            out["said"] = str(error)
        net.base.requires_grad_(False)
        handle.remove()
    return out


def of_several_dtypes(rank: int, world_size: int) -> list[str]:
    """What is said of weights in bfloat16 and float32 in one group; and that a policy makes them one."""
    out = []
    for policy in ({}, {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}):
        net = Three()
        net.base.bfloat16().requires_grad_(False)
        fully_shard(net, **policy)  # type: ignore[call-overload]
        try:
            commopt.compress_gradients(net, Int4(block=8), weights=Int8(block=8))
            out.append("allowed")
        except ValueError as error:
            out.append(str(error))
    return out


def evaluated_after_a_load(rank: int, world_size: int) -> bool:
    """Whether training goes on where an evaluation was the first to gather weights after a state was loaded."""
    net = cut(Odd(torch.float32))
    handle = commopt.compress_gradients(net, Int8(block=8), weights=Differences(Int4(block=8)))
    backward(net, 0, rank)
    state = handle.state_dict()
    state["residuals"]["state"].pop("groups")  # as of another world
    handle.load_state_dict(state)
    with torch.inference_mode():
        net(images(0, rank, torch.float32))
    net.reshard()
    backward(net, 1, rank)
    return all(g is None or bool(g.isfinite().all()) for g in gradients(net))


def made_after_an_evaluation(rank: int, world_size: int) -> dict[str, float]:
    """How far gradients are from FSDP's where the model was evaluated before they were compressed, so that FSDP still
    has whole weights in their modules; cut over all ranks, inside replicas, and on both dimensions."""
    mesh, out = grid(2, world_size // 2), {}
    ways: dict[str, tuple[dict[str, Any], Any]] = {
        "all": ({}, None), "inside": ({"mesh": mesh["shard"]}, mesh), "both": ({"mesh": mesh}, None),
        "kept": ({"reshard_after_forward": False}, None),
    }  # fmt: skip
    for name, (options, process_group) in ways.items():
        plain = cut(Odd(), **({"mesh": mesh} if name == "inside" else options))
        net = cut(Odd(), **options)
        with torch.no_grad():
            net(images(0, rank))
        commopt.compress_gradients(net, Identity(), process_group=process_group)
        for each in (plain, net):
            backward(each, 1, rank)
        out[name] = apart(net, plain)
    return out


def of_the_page(rank: int, world_size: int, program: str) -> list[float]:
    """How many times fewer bytes are sent by each way of a program of the pages, on machines of two ranks."""
    imports, *ways = program.replace('"cuda"', '"cpu"').split("\n\n")
    names: dict[str, Any] = {
        "commopt": commopt, "fully_shard": fully_shard, "init_device_mesh": init_device_mesh,
        "machines": world_size // 2, "ranks_per_machine": 2,
    }  # fmt: skip
    out = []
    for way in ways:  # a later one has the mesh of those before
        names["model"] = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        exec(f"{imports}\n{way}", names)
        for _ in range(2):  # the first gathers differences to nothing, in full
            names["model"](torch.full((2, 64), 1.0 + rank)).square().sum().backward()
        out.append(names["handle"].comm_stats()["ratio"])
    return out
