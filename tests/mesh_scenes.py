"""What processes on a device mesh do with FSDP2: functions of a rank, for tests/test_mesh.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from every import COMMUNICATING, make
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from commopt.compress import Identity, Sign

WORDS, WIDTH = 7, 6
"""7 rows over 2 ranks are 4 and 3, over 4 ranks 2, 2, 2 and 1."""


class Net(nn.Module):
    """Tied, frozen, unused and scalar parameters, and one of so few rows that some ranks hold none of it."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)

        def param(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=g, dtype=torch.float64) * 0.4)

        self.embedding = param(WORDS, WIDTH)
        self.body = nn.Linear(WIDTH, 5, dtype=torch.float64)
        self.back = nn.Linear(5, WIDTH, bias=False, dtype=torch.float64)
        for p in (*self.body.parameters(), *self.back.parameters()):
            p.data = param(*p.shape).data
        self.one = param(1, WIDTH)
        self.gain = param()
        self.unused = param(3)
        self.frozen = nn.Parameter(torch.ones(4, dtype=torch.float64), requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding[tokens[:, :-1]] + self.one
        x = x + self.back(torch.tanh(self.body(x).clone())) * self.gain
        logits = x @ self.embedding.t()
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def sharded(mesh: DeviceMesh, seed: int = 0) -> Net:
    """The net over ``mesh``; its scalar is every rank's whole."""
    net = Net(seed)
    ignored = {net.gain}
    fully_shard(net.body, mesh=mesh, reshard_after_forward=False)
    fully_shard(net, mesh=mesh, ignored_params=ignored)
    return net


def tokens_of(step: int, rank: int) -> Tensor:
    return torch.randint(0, WORDS, (3, 5), generator=torch.Generator().manual_seed(100 * step + rank))


def learn(net: Any, optimizer: Any, steps: range, *ranks: int) -> None:
    """Trains on the batches of ``ranks`` together."""
    for step in steps:
        optimizer.zero_grad()
        net(torch.cat([tokens_of(step, rank) for rank in ranks])).backward()
        optimizer.step()


def whole(t: Tensor) -> Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t.detach().clone()


def local(t: Tensor) -> Tensor:
    return t._local_tensor.detach().clone() if isinstance(t, DTensor) else t.detach().clone()


def grid(replicas: int, shards: int) -> DeviceMesh:
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


def exact(name: str) -> dict[str, Any]:
    """Settings with which nothing is lost."""
    return {"compressor": Identity()} | ({"reset_compressor": Identity()} if name == "CSER" else {})


def as_unsharded(rank: int, world_size: int) -> dict[str, Any]:
    """How far every optimizer on (2, world_size / 2), with the identity for a compressor, comes from the same of whole
    models, of which each has the batches of a replica."""
    torch.set_num_threads(1)
    mesh = grid(2, world_size // 2)
    replica, _ = mesh.get_coordinate()
    together = [r for r in range(world_size) if r // (world_size // 2) == replica]
    out: dict[str, Any] = {}
    for name in (name for name in COMMUNICATING if name != "CSER, signs"):
        for clip in (None, 0.3):
            net, reference = sharded(mesh["shard"]), Net()
            kind = {"max_grad_norm": clip, **exact(name)}
            ours = make(name, net.parameters(), process_group=mesh, **kind)
            theirs = make(name, reference.parameters(), process_group=mesh.get_group("replicate"), **kind)
            furthest = 0.0
            for step in range(7):
                learn(net, ours, range(step, step + 1), rank)
                learn(reference, theirs, range(step, step + 1), *together)
                for p, q in zip(net.parameters(), reference.parameters()):
                    furthest = max(furthest, float((whole(p).detach() - q.detach()).abs().max()))
            out[f"{name} {clip}"] = furthest
    return out


# saving ---------------------------------------------------------------------------------------------------------------

SAVED, LATER = 7, 11
"""Steps when a checkpoint is written, between two rounds, and when what was resumed is compared."""


def lossy(name: str) -> dict[str, Any]:
    return {"compressor": Sign(16)} if name.startswith(("OneBit", "ZeroOne", "DiLoCo", "QSparse")) else {}


def owed(optimizer: Any) -> dict[int, list[tuple[str, Any, Tensor]]]:
    """What compression owes on this rank: by parameter, name, place and values."""
    names = ("worker_error", "server_error")
    state = optimizer.state_dict()["state"]
    return {i: [(n, e[n].place, e[n].plain().clone()) for n in names if n in e] for i, e in state.items()}


def states(net: Net, optimizer: Any, flat: bool) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optim = get_state_dict(net, optimizer, options=options)
    return {"model": model, "optim": optim}


def save(rank: int, world_size: int, folder: str, shards: int) -> dict[str, Any]:
    """Trains every optimizer, writes what it has, flattened and not, and trains on."""
    mesh, out = grid(world_size // shards, shards), {}
    for name in COMMUNICATING:
        net = sharded(mesh["shard"])
        optimizer = make(name, net.parameters(), process_group=mesh, bucket_mb=2e-4, **lossy(name))
        learn(net, optimizer, range(SAVED), rank)
        for flat in (False, True):
            dcp.save(states(net, optimizer, flat), checkpoint_id=f"{folder}/{name} {flat}")
        out[name] = {"owed": owed(optimizer), "start": [whole(p).detach().clone() for p in net.parameters()]}
        learn(net, optimizer, range(SAVED, LATER), rank)
        out[name]["later"] = [local(p) for p in net.parameters()]
    return out


def load(rank: int, world_size: int, folder: str, shards: int, flat: bool, back: str = "") -> dict[str, Any]:
    """Goes on from that, on a mesh of its own; and writes it once more, before it does, if told where."""
    mesh, out = grid(world_size // shards, shards), {}
    for name in COMMUNICATING:
        net = sharded(mesh["shard"], seed=1)
        optimizer = make(name, net.parameters(), process_group=mesh, bucket_mb=2e-4, **lossy(name))
        state = states(net, optimizer, flat)
        dcp.load(state, checkpoint_id=f"{folder}/{name} {flat}")
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        set_model_state_dict(net, state["model"])
        set_optimizer_state_dict(net, optimizer, state["optim"], options=options)
        out[name] = {"owed": owed(optimizer), "start": [whole(p).detach().clone() for p in net.parameters()]}
        if back:
            dcp.save(states(net, optimizer, flat), checkpoint_id=f"{back}/{name} {flat}")
        learn(net, optimizer, range(SAVED, LATER), rank)
        out[name]["later"] = [local(p) for p in net.parameters()]
    return out
