"""Scenes of tests/test_hsdp.py, on four ranks: a mesh of (2 replicas, 2 shards)."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from listening import listening
from mesh_scenes import grid, whole
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import commopt
from commopt.compress import Identity, Int8
from commopt.hsdp import has_replicas, modules_of
from commopt.sharding import local


class Net(nn.Module):
    """Two layers, of which a pass may leave out the second."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Linear(6, 6, dtype=torch.float64) for _ in range(2))

    def forward(self, x: Tensor, both: bool = True) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.second(x) if both else x


def net_on(mesh: Any, together: bool = False) -> Any:
    """Over ``mesh``, each layer in a group of FSDP's of its own, or both ``together`` in one."""
    net = Net()
    for layer in () if together else (net.first, net.second):
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def backward(net: nn.Module, rank: int, step: int = 0, both: bool = True) -> None:
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))
    net(x, both).square().sum().backward()


def flat(tensors: Any) -> Tensor:
    return torch.cat([whole(t.detach()).flatten() for t in tensors])


def gradient(net: nn.Module) -> Tensor:
    return flat(p.grad for p in net.parameters() if p.grad is not None)


def same_on_all(t: Tensor) -> bool:
    out = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(out, t)
    return all(torch.equal(one, t) for one in out)


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def trained(net: nn.Module, rank: int, *optimizers: Any) -> bool:
    """Whether replicas are the same after a step."""
    backward(net, rank, 7)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return same_on_all(flat(p for p in net.parameters()))


def removed_twice(model: nn.Module, rank: int) -> int:
    """Steps that another handle has counted when the first was removed for the second time."""
    old = commopt.compress_gradients(model, Int8())
    old.remove()
    new = commopt.compress_gradients(model, Int8())
    old.remove()
    backward(model, rank)
    steps: int = new.comm_stats()["steps"]
    return steps


def compressed(rank: int, world_size: int) -> dict[str, Any]:
    mesh, out = grid(2, 2), {}
    net, bare, theirs = net_on(mesh), Net(), net_on(mesh)
    for name, model in {"hsdp": net, "bare": bare}.items():  # what the last pass has not used
        handle = commopt.compress_gradients(model, Identity())
        with handle.no_sync():
            backward(model, rank)
        backward(model, rank, 1, both=False)
        out[f"kept, {name}"] = same_on_all(gradient(model))
    for i in range(2):
        theirs.set_requires_all_reduce(i == 1)
        backward(theirs, rank, i, both=i == 0)
    out["kept, as FSDP2"] = float((gradient(net) - gradient(bare)).abs().max())

    for factor, reduction in ((None, "mean"), (4.0, "mean"), (1.0, "mean"), (1.0, "sum")):
        grads = []
        for compress in (False, True):
            net = net_on(mesh)
            for module in modules_of(net):
                if factor is not None:
                    module.set_gradient_divide_factor(factor)
                module.set_force_sum_reduction_for_comms(True)
            handle = commopt.compress_gradients(net, Identity(), reduction=reduction) if compress else None
            backward(net, rank)
            grads.append(gradient(net))
            if handle is not None:
                handle.remove()
                net.zero_grad()
                backward(net, rank)
                grads.append(gradient(net))
        out[f"factor {factor}, {reduction}"] = max(float((g - grads[0]).abs().max()) for g in grads)
    net = net_on(mesh)
    handle = commopt.compress_gradients(net, Int8())
    net.first.set_gradient_divide_factor(2.0)
    out["factor set later"] = error_of(lambda: backward(net, rank))

    net = net_on(mesh)
    handle = commopt.compress_gradients(net, Int8())
    out["compressed twice"] = [error_of(lambda m=m: commopt.compress_gradients(m, Int8())) for m in (net, net.first)]
    out["as it was"] = not has_replicas(net)
    before = flat(p for p in net.parameters())
    state = {name: t.clone() + 1 for name, t in net.state_dict().items()}
    out["assigned"] = error_of(lambda: net.load_state_dict(state, assign=True))
    out["nothing loaded"] = torch.equal(before, flat(p for p in net.parameters()))
    net.load_state_dict(state)
    handle.remove()
    net.load_state_dict(state, assign=True)
    out["removed twice"] = [removed_twice(m, rank) for m in (DistributedDataParallel(Net()), fully_shard(Net()), Net())]

    for name, model in {"hsdp": Net(), "bare": Net()}.items():
        model.second.requires_grad_(False)
        if name == "hsdp":
            fully_shard(model, mesh=mesh)
        commopt.compress_gradients(model, Int8())
        backward(model, rank)
        model.second.requires_grad_(True)
        out[f"frozen, {name}"] = error_of(lambda model=model: backward(model, rank))
    model.second.requires_grad_(False)  # the bare one: FSDP2 itself averages no more after a backward that failed
    model.zero_grad()
    backward(model, rank, 1)
    out["as before"] = same_on_all(gradient(model))
    return out


def attached(rank: int, world_size: int) -> dict[str, Any]:
    mesh, out = grid(2, 2), {}

    def ours(params: Any) -> Any:
        return commopt.OneBitAdam(params, lr=1e-2, freeze_step=2000)

    net = net_on(mesh)
    first, second = ours(net.first.parameters()), torch.optim.AdamW(net.second.parameters(), lr=1e-2)
    commopt.attach(net, first)
    out["the other group is FSDP2's"] = trained(net, rank, first, second)

    net = net_on(mesh, together=True)
    first, second = ours(net.first.parameters()), torch.optim.AdamW(net.second.parameters(), lr=1e-2)
    commopt.attach(net, first)
    backward(net, rank)
    out["one group, two kinds"] = error_of(first.step)
    net = net_on(mesh, together=True)
    first, second = ours(net.first.parameters()), ours(net.second.parameters())
    for optimizer in (first, second):
        commopt.attach(net, optimizer)
    out["one group, two of ours"] = trained(net, rank, first, second)
    backward(net, rank)
    del second, optimizer
    gc.collect()
    out["one of two has gone"] = error_of(first.step)
    net.second.requires_grad_(False)
    out["what it had is frozen"] = error_of(first.step)
    net.second.requires_grad_(True)
    out["and unfrozen"] = error_of(first.step)
    net.zero_grad()

    del first
    gc.collect()
    adam = torch.optim.AdamW(net.parameters(), lr=1e-2)
    out["deleted"] = trained(net, rank, adam)
    again = ours(net.parameters())
    commopt.attach(net, again)
    commopt.attach(net, again)
    out["attached again"] = trained(net, rank, again)
    out["attached, then compressed"] = error_of(lambda: commopt.compress_gradients(net, Int8()))
    out["assigned"] = error_of(lambda: net.load_state_dict(net.state_dict(), assign=True))
    net.set_gradient_divide_factor(2.0)
    backward(net, rank)
    out["factor set later"] = error_of(again.step)
    net = net_on(mesh)
    commopt.compress_gradients(net, Int8())
    out["compressed, then attached"] = error_of(lambda: commopt.attach(net, ours(net.parameters())))
    return out


def not_attached(rank: int, world_size: int) -> list[str]:
    """What is said where FSDP2 averages over the replicas of a mesh that has further dimensions, of one rank each."""
    names = ("pipeline", "copies", "cut", "tensor")  # torch takes a mesh for another one with the same names and ranks
    mesh = init_device_mesh("cpu", (1, 2, 2, 1), mesh_dim_names=names)
    net = net_on(mesh["copies", "cut"])
    optimizer = commopt.OneBitAdam(net.parameters(), lr=1e-2, freeze_step=2000)
    backward(net, rank)
    with listening() as lines:
        optimizer.step()
    return [line for line in lines if "attach(model, optimizer)" in line]


def evaluated(rank: int, world_size: int) -> dict[str, Any]:
    """A model that FSDP2 has gathered for an evaluation: an optimizer that was made before is attached, and one that is
    made of what was gathered is an error."""
    mesh, out = grid(2, 2), {}

    def ours(net: nn.Module) -> Any:
        return commopt.OneBitAdam(net.parameters(), lr=1e-2, freeze_step=2000, process_group=mesh)

    for together in (False, True):
        net = net_on(mesh, together)
        optimizer = ours(net)
        for module in modules_of(net):
            module.unshard()
        commopt.attach(net, optimizer)
        out[f"attached, {together}"] = trained(net, rank, optimizer)
    net = net_on(mesh, together=True)
    with torch.no_grad():
        net(torch.ones(1, 6, dtype=torch.float64))
    out["made"] = error_of(lambda: ours(net))
    net.reshard()
    optimizer = ours(net)
    commopt.attach(net, optimizer)
    out["made anew"] = trained(net, rank, optimizer)
    return out


def loaded_by_hand(rank: int, world_size: int) -> dict[str, Any]:
    """A model whose modules were given other parameters after ``fully_shard()``, of which FSDP2 hears in the first
    forward: so does transformers' ``from_pretrained()`` load one. How far gradients are from FSDP2's own, and whether
    replicas are the same after some steps of an optimizer."""
    mesh, out = grid(2, 2), {}

    def loaded() -> Any:
        net = net_on(mesh)
        for layer in (net.first, net.second):
            for name, p in [*layer.named_parameters()]:
                setattr(layer, name, nn.Parameter(p.detach() + 1))
        return net

    theirs, net = loaded(), loaded()
    handle = commopt.compress_gradients(net, Identity())
    backward(theirs, rank)
    backward(net, rank)
    out["compressed"] = float((gradient(net) - gradient(theirs)).abs().max())
    out["sent"] = handle.comm_stats()["total"]["by_collective"].get("all_to_all", {}).get("bytes", 0)
    net = loaded()
    optimizer = commopt.OneBitAdam(net.parameters(), lr=1e-2, freeze_step=2000)
    commopt.attach(net, optimizer)
    out["attached"] = trained(net, rank, optimizer) and all(b.world_size == 2 for b in optimizer.buckets)
    return out


def converted(rank: int, world_size: int) -> dict[str, bool]:
    """Whether replicas are the same after some steps of a model that was moved or cast after its average over replicas
    was taken from FSDP2; and then a layer of it unfrozen."""
    mesh, out = grid(2, 2), {}
    for name, how in {"moved": "cpu", "cast": torch.float32}.items():
        net = net_on(mesh)
        net.second.requires_grad_(False)
        adam = commopt.OneBitAdam(net.parameters(), lr=1e-2, freeze_step=2)
        commopt.attach(net, adam)
        net.to(how)
        commopt.attach(net, adam)  # once more: nothing is left to do
        dtype = net.first.weight.dtype
        out[name] = True
        for step in range(6):
            if step == 2:
                net.second.requires_grad_(True)
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank)).to(dtype)
            net(x).square().sum().backward()
            adam.step()
            adam.zero_grad()
            out[name] &= same_on_all(flat(p for p in net.parameters()))
        out[f"{name}, averaged"] = all(bucket.world_size == 2 for bucket in adam.buckets)
        net = net_on(mesh)
        diloco = commopt.DiLoCo(net.parameters(), lr=1e-2, period=2)
        commopt.attach(net, diloco)
        net.to(how)
        for step in range(4):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank)).to(dtype)
            net(x).square().sum().backward()
            diloco.step()
            diloco.zero_grad()
        out[f"{name}, DiLoCo"] = same_on_all(flat(p for p in net.parameters()))
    return out


def loaded_and_attached(rank: int, world_size: int) -> dict[str, Any]:
    """Whether a run that is attached, then loaded, goes on as it was, and what is said where it is the other way."""
    mesh, out = grid(2, 2), {}

    def run(net: Any, optimizer: Any, steps: range) -> Tensor:
        for step in steps:
            backward(net, rank, step)
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([local(p).detach().flatten() for p in net.parameters()])

    def ours(net: Any) -> Any:
        return commopt.OneBitAdam(net.parameters(), lr=1e-2, freeze_step=2)

    net = net_on(mesh)
    optimizer = ours(net)
    commopt.attach(net, optimizer)
    run(net, optimizer, range(5))
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    dcp.save({"optim": get_optimizer_state_dict(net, optimizer)}, checkpoint_id=folder[0])
    weights = {name: p.detach().clone() for name, p in net.named_parameters()}
    expected = run(net, optimizer, range(5, 8))
    for order in ("attach, load", "load, attach"):
        net = net_on(mesh)
        again = ours(net)
        with torch.no_grad():
            for name, p in net.named_parameters():
                p.copy_(weights[name])
        with listening() as lines:
            if order == "attach, load":
                commopt.attach(net, again)
            state = {"optim": get_optimizer_state_dict(net, again)}
            dcp.load(state, checkpoint_id=folder[0])
            set_optimizer_state_dict(net, again, state["optim"])
            if order == "load, attach":
                commopt.attach(net, again)
        out[order] = torch.equal(run(net, again, range(5, 8)), expected)
        out[f"{order}: said"] = [line for line in lines if "loaded before attach()" in line]
    return out


def moved(rank: int, world_size: int) -> dict[str, Any]:
    """What a state of (2, 2) is on other meshes of as many ranks: an error, or how much of the residuals there is."""
    net = net_on(grid(2, 2))
    handle = commopt.compress_gradients(net, Int8())
    backward(net, rank)
    parts: list[Any] = [None] * world_size
    dist.all_gather_object(parts, handle.state_dict())
    owns = [commopt.optim.split_state_dict(part)[1] for part in parts]
    joined = commopt.optim.join_state_dict(commopt.optim.split_state_dict(parts[0])[0], owns, rank, world_size)
    across = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    meshes = {"(4, 1)": grid(4, 1), "(1, 4)": grid(1, 4), "(2, 2)": across}
    out = {}
    for name, mesh in meshes.items():
        for kind, state in (("joined", joined), ("own", parts[rank])):
            handle = commopt.compress_gradients(net_on(mesh), Int8())
            total = [0.0]

            def load(handle: Any = handle, state: Any = state, total: list[float] = total) -> None:
                handle.load_state_dict(state)
                own = handle.state_dict()["residuals"]["state"]
                total[0] = sum(float(t.abs().sum()) for e in own.values() for t in e.values())

            out[f"{name}, {kind}"] = error_of(load) or total[0]
            if (name, kind) == ("(1, 4)", "joined"):  # on one replica nothing stays: it is to come out, or to be saved
                again: list[Any] = [None] * world_size
                dist.all_gather_object(again, handle.state_dict())
                before, after = together(parts), together(again)
                out["saved once more"] = max(float((before[i] - after[i]).abs().max()) for i in before)
    return out


def together(states: list[Any]) -> dict[int, Any]:
    """Residuals of all ranks, of whole parameters."""
    owns = [commopt.optim.split_state_dict(state)[1] for state in states]
    common = commopt.optim.split_state_dict(states[0])[0]
    joined = commopt.optim.join_state_dict(common, owns, 0, len(states) + 1)["residuals"]["state"]
    return {i: e["worker_error"].flatten() + e["server_error"].flatten() for i, e in joined.items() if e}


def on_a_slice(rank: int, world_size: int) -> tuple[bool, bool]:
    """Whether, on a slice of a larger mesh, replicas are the same, and ranks of another part of it other ones."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("stage", "replicate", "shard"))["replicate", "shard"]
    net = net_on(mesh)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(rank // 2)
    handle = commopt.compress_gradients(net, Int8())
    backward(net, rank)
    mine = gradient(net)
    gathered = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(gathered, mine)
    assert handle.comm_stats()["steps"] == 1
    return torch.equal(gathered[rank], gathered[rank ^ 1]), not torch.equal(gathered[rank], gathered[rank ^ 2])


def alone(rank: int, world_size: int) -> bool:
    net = fully_shard(Net())
    commopt.compress_gradients(net, Int8())
    backward(net, rank)
    return all(p.grad is not None for p in net.parameters())
