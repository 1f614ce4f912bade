"""What processes on a device mesh do with FSDP2: functions of a rank, for tests/test_mesh.py."""

from __future__ import annotations

import copy
import functools
import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from every import COMMUNICATING, make
from listening import listening
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import commopt
from commopt.comm import LocalBackend, MeshBackend, TorchBackend
from commopt.compress import Identity, Int4, Sign
from commopt.sharding import cut, like, settle
from commopt.sharding import local as piece

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
    """Settings with which nothing is lost; norms of whole tensors, and means of a base's state, are wanted."""
    more: dict[str, dict[str, Any]] = {
        "CSER": {"reset_compressor": Identity()},
        "SparseLoCo": {"clip_to_median": True},
        "LocalSGD": {"state_period": {"exp_avg": 1, "exp_avg_sq": 2}},
    }
    return {**({} if name == "NoLoCo" else {"compressor": Identity()}), **more.get(name, {})}


def as_unsharded(rank: int, world_size: int) -> dict[str, Any]:
    """How far every optimizer on (2, world_size / 2), with the identity for a compressor, comes from the same of whole
    models, of which each has the batches of a replica."""
    torch.set_num_threads(1)
    mesh = grid(2, world_size // 2)
    replica, _ = mesh.get_coordinate()
    together = [r for r in range(world_size) if r // (world_size // 2) == replica]
    out: dict[str, Any] = {}
    for name in (name for name in COMMUNICATING if name != "CSER, signs"):
        for clip in (None, 0.3) if name == "OneBitAdam" else (0.3,):
            net, reference = sharded(mesh["shard"]), Net()
            kind = {"max_grad_norm": clip, **exact(name)}
            ours = make(name, net.parameters(), process_group=mesh, **kind)
            theirs = make(name, reference.parameters(), process_group=mesh.get_group("replicate"), **kind)
            learn(net, ours, range(5), rank)
            learn(reference, theirs, range(5), *together)
            pairs = zip(net.parameters(), reference.parameters())
            out[f"{name} {clip}"] = max(float((whole(p).detach() - q.detach()).abs().max()) for p, q in pairs)
    return out


# saving ---------------------------------------------------------------------------------------------------------------

KINDS = ("OneBitAdam", "ZeroOneAdam", "CSER, signs", "QSparseLocalSGD", "DiLoCo")
"""Those whose states have other things in them."""
FORMS = {False: [name for name in COMMUNICATING if name not in KINDS], True: KINDS}
"""What goes on, on the same mesh, from its state as it is, and flattened. KINDS go to other meshes both ways."""

SAVED, LATER = 5, 8
"""Steps when a checkpoint is written, between two rounds, and when what was resumed is compared, after two more."""


def lossy(name: str) -> dict[str, Any]:
    refreshes = {"refresh_compressor": Int4(16)} if name == "ZeroOneAdam" else {}
    return {"compressor": Sign(16), **refreshes} if name.startswith(("OneBit", "ZeroOne", "DiLoCo", "QSparse")) else {}


def residuals(optimizer: Any) -> dict[int, list[tuple[str, Any, Tensor]]]:
    """Residuals of this rank: by parameter, name, place and values."""
    names = ("worker_error", "server_error")
    state = optimizer.state_dict()["state"]
    return {i: [(n, e[n].place, e[n].plain().clone()) for n in names if n in e] for i, e in state.items()}


def states(net: Net, optimizer: Any, flat: bool) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optim = get_state_dict(net, optimizer, options=options)
    return {"model": model, "optim": optim}


def saved(rank: int, world_size: int, folder: str, names: Sequence[str]) -> dict[str, Any]:
    """Trains optimizers on (2, 2), writes what they have, flattened in the background and not, and trains on."""
    mesh, out = grid(2, 2), {}
    for name in names:
        net = sharded(mesh["shard"])
        optimizer = make(name, net.parameters(), process_group=mesh, bucket_mb=2e-4, **lossy(name))
        learn(net, optimizer, range(SAVED), rank)
        for flat in (False, True) if name in KINDS else (False,):
            state, where = states(net, optimizer, flat), f"{folder}/{name} {flat}"
            if flat:
                dcp.async_save(state, checkpoint_id=where).result()
            else:
                dcp.save(state, checkpoint_id=where)
        out[name] = {"residuals": residuals(optimizer), "start": [whole(p).detach().clone() for p in net.parameters()]}
        learn(net, optimizer, range(SAVED, LATER), rank)
        out[name]["later"] = [local(p) for p in net.parameters()]
    return out


def loaded(
    rank: int,
    world_size: int,
    folder: str,
    shards: int,
    flat: bool,
    back: str = "",
    names: Sequence[str] = KINDS,
    later: int = LATER,
    hybrid: bool = False,
) -> dict[str, Any]:
    """What is loaded of that on a mesh of its own; it is written once more if told where, and trained on, until step
    ``later``, if that is past where it was saved. ``hybrid``: of a model on both dimensions of the mesh."""
    mesh, out = grid(world_size // shards, shards), {}
    for name in names:
        net = sharded(mesh if hybrid else mesh["shard"], seed=1)
        optimizer = make(name, net.parameters(), process_group=mesh, bucket_mb=2e-4, **lossy(name))
        if hybrid:
            commopt.attach(net, optimizer)
        state = states(net, optimizer, flat)
        dcp.load(state, checkpoint_id=f"{folder}/{name} {flat}")
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        set_model_state_dict(net, state["model"])
        set_optimizer_state_dict(net, optimizer, state["optim"], options=options)
        out[name] = {"residuals": residuals(optimizer), "start": [whole(p).detach().clone() for p in net.parameters()]}
        if back:
            dcp.save(states(net, optimizer, flat), checkpoint_id=f"{back}/{name} {flat}")
        if later == SAVED:
            continue
        learn(net, optimizer, range(SAVED, later), rank)
        out[name]["later"] = [local(p) for p in net.parameters()]
        with listening() as said:
            net.eval()(tokens_of(0, rank))
        out[name]["said"] = optimizer.replicas_differ, said
    return out


# Muon -----------------------------------------------------------------------------------------------------------------


def muloco(net: Net, **settings: Any) -> Any:
    """DiLoCo with Muon and AdamW inside."""
    hidden, rest = commopt.sort_parameters(net, head=["embedding"])
    base = commopt.Mixed(commopt.Muon(hidden, lr=0.1), torch.optim.AdamW(rest, lr=1e-2))
    return commopt.DiLoCo(base, period=3, outer_momentum=0.5, **settings)


def mixed(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """MuLoCo on (2, 2): how far it comes from that of whole models, and a run that is resumed within a round."""
    mesh, out = grid(2, 2), {}
    replica, _ = mesh.get_coordinate()
    net, reference = sharded(mesh["shard"]), Net()
    ours = muloco(net, process_group=mesh)
    theirs = muloco(reference, process_group=mesh.get_group("replicate"))
    out["sorted"] = [len(group["params"]) for group in ours.param_groups]
    for step in range(4):
        learn(net, ours, range(step, step + 1), rank)
        learn(reference, theirs, range(step, step + 1), 2 * replica, 2 * replica + 1)
        if step == 2:
            out["same"] = equal_over(mesh.get_group("replicate"), net)
    out["apart"] = distance(net, reference)
    nets = [sharded(mesh["shard"], seed) for seed in (0, 1)]
    first, resumed = (muloco(net, process_group=mesh, compressor=Sign(16)) for net in nets)
    learn(nets[0], first, range(4), rank)
    dcp.save(states(nets[0], first, False), checkpoint_id=f"{folder}/mixed")
    learn(nets[0], first, range(4, 8), rank)
    state = states(nets[1], resumed, False)
    dcp.load(state, checkpoint_id=f"{folder}/mixed")
    set_model_state_dict(nets[1], state["model"])
    set_optimizer_state_dict(nets[1], resumed, state["optim"])
    learn(nets[1], resumed, range(4, 8), rank)
    out["resumed"] = all(torch.equal(local(p), local(q)) for p, q in zip(*(net.parameters() for net in nets)))
    return out


class Looks(torch.optim.Optimizer):
    """Momentum whose step looks at values, and whose state has a number in it."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(count=0, momentum=torch.zeros_like(p))
                state["count"] += 1
                state["momentum"].mul_(0.9).add_(p.grad)
                norm = piece(p.grad).square().sum().item()
                p.add_(state["momentum"], alpha=-group["lr"] / (1 + norm) / state["count"])


def bases(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Bases whose first step cannot be taken without values, resumed on (2, 2) between two rounds: whether the run is
    the one that was never stopped, and what was said. Nobody says which mesh it is: their parameters do."""
    mesh, out = grid(2, 2), {}
    for name, base, more in (("looks", Looks, {}), ("asgd", torch.optim.ASGD, {"t0": 1.0})):
        nets = [sharded(mesh["shard"], seed) for seed in (0, 1)]
        with listening() as said:
            first, resumed = (commopt.DiLoCo(base(net.parameters(), lr=1e-2, **more), period=3) for net in nets)
            learn(nets[0], first, range(4), rank)
            dcp.save(states(nets[0], first, False), checkpoint_id=f"{folder}/{name}")
            learn(nets[0], first, range(4, 8), rank)
            state = states(nets[1], resumed, False)
            dcp.load(state, checkpoint_id=f"{folder}/{name}")
            set_model_state_dict(nets[1], state["model"])
            set_optimizer_state_dict(nets[1], resumed, state["optim"])
            learn(nets[1], resumed, range(4, 8), rank)
        same = all(torch.equal(local(p), local(q)) for p, q in zip(*(net.parameters() for net in nets)))
        out[name] = same, said
    return out


class Rows(torch.optim.SGD):
    """Keeps a number for each row, and what it has seen last."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            kept = {"rows": piece(p).sum(-1, keepdim=True), "seen": [p.grad.clone()]} if p.dim() > 1 else {}
            self.state[p].update({name: kept[name] for name in kept if name in self.defaults["keeps"]})


def uncuttable(rank: int, world_size: int) -> dict[str, str]:
    """What state_dict() says of a base whose state is not cut as its parameters."""
    mesh, out = grid(1, 2), {}
    for name in ("rows", "seen"):
        net = sharded(mesh["shard"])
        base = Rows(net.parameters(), lr=1e-2)
        base.defaults["keeps"] = name
        optimizer = commopt.LocalSGD(base, period=3, process_group=mesh)
        learn(net, optimizer, range(2), rank)
        try:
            optimizer.state_dict()
        except ValueError as error:
            out[name] = str(error)
    return out


# doors ----------------------------------------------------------------------------------------------------------------


class Plain(nn.Module):
    """A small network of even shapes."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 16, dtype=dtype)
        self.norm = nn.LayerNorm(16, dtype=dtype)
        self.second = nn.Linear(16, 8, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(torch.relu(self.first(x))))


def images(step: int, number: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + number)
    return torch.randn(4, 8, generator=generator, dtype=torch.float64).to(dtype)


def fit(net: nn.Module, optimizer: Any, step: int, *numbers: int) -> None:
    optimizer.zero_grad()
    net(torch.cat([images(step, number) for number in numbers])).square().mean().backward()
    optimizer.step()


def distance(net: nn.Module, other: nn.Module) -> float:
    pairs = zip(net.parameters(), other.parameters())
    return max(float((whole(p).detach().double() - whole(q).detach().double()).abs().max()) for p, q in pairs)


def equal_over(group: Any, net: nn.Module) -> bool:
    """Whether the ranks of ``group`` hold the same bits."""
    return same_over(group, torch.cat([local(p).flatten() for p in net.parameters()]))


def same_over(group: Any, mine: Tensor) -> bool:
    """Whether the ranks of ``group`` have the same bits."""
    all_of_them = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_of_them, mine.contiguous(), group=group)
    return all(torch.equal(mine, other) for other in all_of_them)


def tensor_parallel(net: nn.Module, mesh: DeviceMesh, sequence: bool = False) -> nn.Module:
    plan: dict[str, Any] = {
        "first": ColwiseParallel(output_layouts=Replicate()),
        "second": RowwiseParallel(input_layouts=Replicate()),
    }
    if sequence:  # its gradients are sums that are still to be made
        plan["norm"] = SequenceParallel(sequence_dim=0, use_local_output=False)
        plan["first"] = ColwiseParallel(output_layouts=Shard(0), use_local_output=False)
        plan["second"] = RowwiseParallel(input_layouts=Shard(0))
    return parallelize_module(net, mesh, plan)


class Beside:
    """A sharded net and its optimizer beside the whole net with the batches of all ranks."""

    def __init__(self, net: nn.Module, optimizer: Any, numbers: Sequence[int], mesh: DeviceMesh, **kind: Any) -> None:
        self.net, self.optimizer, self.mesh, self.numbers = net, optimizer, mesh, numbers
        self.whole = Plain()
        self.reference = lamb(self.whole.parameters(), **{"backend": LocalBackend(), **kind})

    def after(self, steps: int, learn_it: Callable[[int], None]) -> tuple[float, bool]:
        """How far apart they are after ``steps``, and whether replicas are the same to the bit."""
        for step in range(steps):
            self.optimizer.zero_grad()
            learn_it(step)
            self.optimizer.step()
            fit(self.whole, self.reference, step, *self.numbers)
        return distance(self.net, self.whole), equal_over(self.mesh.get_group("replicate"), self.net)


def lamb(params: Any, **kind: Any) -> Any:
    """LAMB has norms of whole tensors; it stays in its warm-up, which is plain LAMB."""
    return commopt.OneBitLamb(params, **{"lr": 1e-2, "freeze_step": 1000, "weight_decay": 0.1, **kind})


def doors(rank: int, world_size: int) -> dict[str, tuple[float, bool]]:
    """Ways to shard a model, and to train it: FSDP2 and tensor parallelism on (2, 2)."""
    mesh = grid(2, 2)
    names = ("replicate", "tensor")
    across = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    replica, _ = mesh.get_coordinate()
    everyone, out = range(world_size), {}

    def backward(net: nn.Module, number: int = rank) -> Callable[[int], None]:
        return lambda step: net(images(step, number)).square().mean().backward()

    def fsdp(**kind: Any) -> nn.Module:
        net = Plain()
        fully_shard(net.first, mesh=mesh["shard"], **kind)
        return fully_shard(net, mesh=mesh["shard"], **kind)

    net = fsdp()
    out["the mesh that parameters are on"] = Beside(net, lamb(net.parameters()), everyone, mesh).after(4, backward(net))

    for name, sequence in (("tensor", False), ("sequence", True)):
        net = tensor_parallel(Plain(), across["tensor"], sequence)
        optimizer = lamb(net.parameters(), process_group=across, max_grad_norm=0.1)
        replicas = TorchBackend(across.get_group("replicate"))
        beside = Beside(net, optimizer, [replica], across, max_grad_norm=0.1, backend=replicas)
        out[f"{name} parallelism"] = beside.after(4, backward(net, replica))

    net = fsdp()

    def in_two(step: int) -> None:
        for half, x in enumerate(images(step, rank).chunk(2)):
            net.set_requires_gradient_sync(half == 1)
            (net(x).square().mean() / 2).backward()

    out["accumulated"] = Beside(net, lamb(net.parameters(), process_group=mesh), everyone, mesh).after(4, in_two)

    net = fsdp()
    net.set_gradient_divide_factor(1.0)
    net.first.set_gradient_divide_factor(1.0)
    optimizer = lamb(net.parameters(), process_group=mesh, reduction="sum")
    out["sums"] = Beside(net, optimizer, everyone, mesh).after(
        4, lambda step: (net(images(step, rank)).square().mean() / world_size).backward()
    )

    net = Plain()
    optimizer = lamb(net.parameters())
    fully_shard(net, mesh=mesh["shard"])
    optimizer.param_groups[0]["params"] = list(net.parameters())
    out["exchanged"] = Beside(net, optimizer, everyone, mesh).after(4, backward(net))

    net = fsdp()
    optimizer = lamb(net.parameters(), process_group=mesh)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def scaled(step: int) -> None:
        scaler.scale(net(images(step, rank)).square().mean()).backward()

    beside = Beside(net, optimizer, everyone, mesh)
    beside.optimizer = _Scaled(optimizer, scaler)
    out["scaled"] = beside.after(4, scaled)

    net = fsdp()
    kind = {"freeze_step": 2, "scaling": "element", "compressor": Identity()}
    two = [2 * replica, 2 * replica + 1]  # gradients of a replica, as compression takes them
    optimizer = lamb(net.parameters(), process_group=mesh, **kind)
    beside = Beside(net, optimizer, two, mesh, backend=TorchBackend(mesh.get_group("replicate")), **kind)
    out["compressed"] = beside.after(14, backward(net))

    net = fully_shard(Plain(), mesh=mesh)  # FSDP averages over both dimensions itself
    out["native"] = Beside(net, lamb(net.parameters(), process_group=mesh), everyone, mesh).after(4, backward(net))
    return out


class _Scaled:
    """Steps through a GradScaler."""

    def __init__(self, optimizer: Any, scaler: Any) -> None:
        self.optimizer, self.scaler = optimizer, scaler
        self.zero_grad = optimizer.zero_grad

    def step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()


def experts(rank: int, world_size: int) -> dict[str, Any]:
    """A group on a mesh of its own, the same ranks otherwise arranged; and a group without one, which lacks both
    dimensions. Gradients are given; what the mean over those that hold the same comes to is known."""
    mesh = grid(2, 2)
    theirs = DeviceMesh("cpu", torch.tensor([[0, 2], [1, 3]]), mesh_dim_names=("replicate", "expert"))
    out: dict[str, Any] = {}
    for name in ("OneBitAdam", "DiLoCo"):
        net = fully_shard(nn.Linear(4, 4, bias=False, dtype=torch.float64), mesh=mesh["shard"])
        weights = torch.arange(8.0, dtype=torch.float64).view(4, 2)
        expert = nn.Parameter(distribute_tensor(weights, theirs["expert"], [Shard(0)], src_data_rank=None))
        groups = [{"params": net.parameters()}, {"params": [expert], "mesh": theirs}]
        kind = {"freeze_step": 100} if name == "OneBitAdam" else {"base": torch.optim.SGD, "outer_momentum": 0.0}
        if name == "DiLoCo":
            kind |= {"outer_lr": 1.0, "nesterov": False, "period": 1}
        optimizer = getattr(commopt, name)(groups, lr=0.5, process_group=mesh, **kind)
        before = local(expert)
        expert.grad = like(torch.full_like(before, float(2**rank)), expert)
        net(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
        optimizer.step()
        moved = before - local(expert)
        state = optimizer.state[expert]
        groups = optimizer.state_dict()["param_groups"]
        out[name] = float(moved.mean()), float(local(state.get("exp_avg", expert)).mean()), "mesh" in groups[1]
    for name in ("OneBitAdam", "OneBitLamb", "OneBitLion", "ZeroOneAdam"):
        out[f"{name}, cut over all"] = cut_over_all(name, mesh, rank)
    return out


def cut_over_all(name: str, mesh: DeviceMesh, rank: int) -> tuple[float, float]:
    """Six steps of an expert that each rank has a piece of, beside a net with replicas: this rank's exp_avg of the one,
    of gradients 2^rank, and how far it is from its replica in the other."""
    theirs = init_device_mesh("cpu", (4,), mesh_dim_names=("expert",))
    net = fully_shard(nn.Linear(4, 4, bias=False, dtype=torch.float64), mesh=mesh["shard"])
    expert = nn.Parameter(distribute_tensor(torch.ones(4, 2, dtype=torch.float64), theirs, [Shard(0)]))
    optimizer = make(name, [{"params": net.parameters()}, {"params": [expert], "mesh": theirs}], process_group=mesh)
    for _ in range(6):
        expert.grad = like(torch.full_like(local(expert), float(2**rank)), expert)
        net.zero_grad()
        net(torch.full((1, 4), 1.0 + rank, dtype=torch.float64)).sum().backward()
        optimizer.step()
    optimizer.synchronize()
    one = local(net.weight)
    mean = one.clone()
    dist.all_reduce(mean, group=mesh.get_group("replicate"))
    return float(local(optimizer.state[expert]["exp_avg"]).mean()), float((mean / 2 - one).abs().max())


def pipelines(rank: int, world_size: int) -> dict[str, Any]:
    """Two stages of two replicas that hold other parameters, and skip together."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "replicate"))
    stage, replica = mesh.get_coordinate()
    params = [nn.Parameter(torch.ones(3 + 2 * stage, dtype=torch.float64)) for _ in range(1 + stage)]
    backend = MeshBackend(mesh, pipeline="pipeline")
    optimizer = commopt.OneBitAdam(params, lr=0.1, freeze_step=2, max_grad_norm=1.0, backend=backend)
    skipped = []
    for step in range(5):
        for p in params:
            p.grad = torch.full_like(p, float(replica + 1)) if step != 3 or rank else torch.full_like(p, torch.inf)
        if step == 2:
            params[-1].grad = None  # on all replicas of either stage
        optimizer.step()
        skipped.append(optimizer.skipped_steps)
    steps = [int(optimizer.state[p]["step"]) for p in params]
    return {"params": [p.detach().clone() for p in params], "skipped": skipped, "steps": steps}


def refusals(rank: int, world_size: int, folder: str) -> dict[str, str]:
    """Each error, by what it is about."""
    mesh, line = grid(2, 2), init_device_mesh("cpu", (4,))
    out = {}

    def refused(what: str, make_it: Callable[[], Any]) -> None:
        try:
            make_it()
        except (ValueError, RuntimeError, CheckpointException) as error:
            out[what] = f"{type(error).__name__}: {error}"

    net = fully_shard(Plain(), mesh=mesh["shard"])
    other = DeviceMesh("cpu", torch.tensor([[0, 3], [1, 2]]), mesh_dim_names=("replicate", "shard"))
    moved = fully_shard(Plain(), mesh=other["shard"])
    both = [*net.parameters(), *moved.parameters()]
    refused("the shard group", lambda: lamb(net.parameters(), process_group=mesh.get_group("shard")))
    refused("Lamb", lambda: commopt.Lamb(net.parameters()))
    refused("Lans", lambda: commopt.Lans(net.parameters()))
    refused("no such dimension", lambda: lamb(net.parameters(), process_group=line))
    refused("two meshes in a group", lambda: lamb(both, process_group=mesh))
    refused("two meshes and none given", lambda: lamb(both))
    whole_mesh = DTensor.from_local(torch.ones(3), mesh["shard"], [Partial()], run_check=False)
    refused("partial", lambda: lamb([nn.Parameter(whole_mesh)], process_group=mesh))
    mine = (grid(4, 1), mesh)[min(rank, 1)]
    refused("other meshes on other ranks", lambda: lamb(Plain().parameters(), process_group=mine))
    refused("no pipeline", lambda: MeshBackend(mesh, pipeline="pp"))
    group = {"params": Plain().parameters(), "mesh": mesh["shard"]}
    refused("a group's mesh of other ranks", lambda: lamb([group], process_group=mesh))
    refused("a group's mesh and none given", lambda: lamb([{**group, "params": [nn.Parameter(torch.ones(2))]}]))
    localsgd = functools.partial(commopt.LocalSGD, process_group=mesh)
    refused("a base of ours", lambda: localsgd(net.named_parameters(), commopt.OneBitAdam))
    refused("a base of ours, in groups", lambda: localsgd([{"params": net.parameters()}], commopt.OneBitAdam))
    refused("a base of ours, made", lambda: localsgd(commopt.OneBitAdam(net.parameters(), process_group=mesh)))
    optimizer = lamb(net.parameters(), process_group=mesh)
    net(images(0, rank)).sum().backward()
    optimizer.step()
    optimizer.param_groups[0]["params"] = list(fully_shard(Plain(), mesh=mesh["shard"]).parameters())
    refused("exchanged", optimizer.step)
    folder = f"{folder}/refused"
    net = fully_shard(Plain(), mesh=mesh["shard"])
    dcp.save(states(net, lamb(net.parameters(), process_group=mesh), False), checkpoint_id=folder)
    wide = fully_shard(nn.Linear(8, 17, dtype=torch.float64), mesh=mesh["shard"])
    state = states(wide, lamb(wide.parameters(), process_group=mesh), False)
    refused("another model", lambda: dcp.load(state, checkpoint_id=folder))
    zero_one = states(net, commopt.ZeroOneAdam(net.parameters(), process_group=mesh), False)
    refused("another optimizer", lambda: dcp.load(zero_one, checkpoint_id=folder))
    for flat in (False, True):  # what OneBitAdam looks for is there, and more
        there = f"{folder}/{flat}"
        whole_of_it = lamb(net.parameters(), process_group=mesh)
        whole_of_it.param_groups[0].update(decoupled_weight_decay=True, bias_correction=True)
        dcp.save(states(net, whole_of_it, flat), checkpoint_id=there)
        adam = commopt.OneBitAdam(net.parameters(), process_group=mesh)
        fewer = states(net, adam, flat)
        dcp.load(fewer, checkpoint_id=there)
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        load = functools.partial(set_optimizer_state_dict, net, adam, fewer["optim"], options=options)
        refused(f"another optimizer, of which it needs a part, flattened {flat}", load)
    return out


def policies(rank: int, world_size: int) -> dict[str, Any]:
    """Ways in which FSDP computes, with one bit between replicas: whether these stay the same to the bit, and what
    is learnt; of overlap also, whether it changes a bit."""
    mesh, out = grid(2, 2), {}

    def trained(dtype: torch.dtype = torch.float32, overlap: bool = False, **kind: Any) -> tuple[nn.Module, Any, list]:
        net = Plain(dtype)
        if kind.pop("compiled", False):
            net.first, net.second = (torch.compile(m, backend="aot_eager") for m in (net.first, net.second))
        if kind.pop("checkpointed", False):
            net.first = checkpoint_wrapper(net.first)
        fully_shard(net.first, mesh=mesh["shard"], **kind)
        fully_shard(net, mesh=mesh["shard"], **kind)
        optimizer = commopt.OneBitAdam(
            net.parameters(), lr=1e-2, freeze_step=3, compressor=Sign(16), overlap=overlap, bucket_mb=2e-4
        )
        losses, early = [], 0
        for step in range(9):
            optimizer.zero_grad()
            loss = (net(images(step % 3, rank, dtype)).float() - 1).square().mean()
            loss.backward()
            early = max(early, 0 if optimizer._in_flight is None else optimizer._in_flight.started)
            optimizer.step()
            losses.append(float(loss.detach()))
        learnt = sum(losses[-3:]) < 0.9 * sum(losses[:3])
        return net, optimizer, [equal_over(mesh.get_group("replicate"), net), learnt, early]

    plain, optimizer, said = trained()
    out["plain"] = said
    out["state"] = [type(optimizer.state[p]["exp_avg"]).__name__ for p in plain.parameters()]
    kept = sum(flat[: bucket.numel].numel() for bucket in optimizer.buckets for flat in bucket.buffers.values())
    out["share of the state"] = kept / sum(2 * p.numel() for p in plain.parameters())
    out["state of rounds"] = kept_by_rounds(mesh)
    over, _, out["overlapped"] = trained(overlap=True)
    pairs = zip(plain.parameters(), over.parameters())
    out["overlap changes nothing"] = all(torch.equal(local(p), local(q)) for p, q in pairs)
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    out["bf16 computed"] = trained(mp_policy=mixed)[2]
    out["bf16 reduced"] = trained(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16))[2]
    out["bf16"] = trained(torch.bfloat16)[2]
    out["offloaded"] = trained(offload_policy=CPUOffloadPolicy(pin_memory=False))[2]
    out["compiled"] = trained(compiled=True)[2]
    out["checkpointed"] = trained(checkpointed=True)[2]
    out["evaluated"] = evaluated(mesh, rank)
    return out


def evaluated(mesh: DeviceMesh, rank: int) -> list[bool]:
    """Forwards without a backward, between rounds of two replicas, after which FSDP keeps weights gathered: whether
    within ``averaged()`` both have the same outputs, other ones than their own, and whether training, also what comes
    after ``synchronize()``, goes on as without them."""
    x = images(7, 0, torch.float32)

    def run(evaluates: bool) -> tuple[list[Tensor], list[Tensor]]:
        net, seen = Plain(torch.float32), []
        fully_shard(net.first, mesh=mesh["shard"])
        fully_shard(net, mesh=mesh["shard"])
        optimizer = commopt.DiLoCo(net.parameters(), torch.optim.SGD, lr=0.1, period=4)
        for step in range(7):
            optimizer.zero_grad()
            (net(images(step, rank, torch.float32)) - 1).square().mean().backward()
            optimizer.step()
            if evaluates and step in (1, 4):
                with torch.no_grad():
                    seen.append(net(x))
                    with optimizer.averaged():
                        seen.append(net(x))
            if step == 5:
                with torch.no_grad():
                    net(x) if evaluates else None
                optimizer.synchronize()
        return seen, [local(p).clone() for p in net.parameters()]

    _, plain = run(False)
    seen, trained = run(True)
    same = [same_over(mesh.get_group("replicate"), y) for y in seen]
    return [same == [False, True] * 2, all(map(torch.equal, trained, plain))]


def kept_by_rounds(mesh: DeviceMesh) -> float:
    """Buffers of the size of the parameters that a rank keeps between two rounds of local AdamW, before it has saved
    anything."""
    net = fully_shard(nn.Linear(64, 128, bias=False), mesh=mesh["shard"])
    optimizer = commopt.LocalSGD(net.parameters(), period=4)
    for _ in range(2):
        net(torch.ones(2, 64)).square().mean().backward()
        optimizer.step()
    entries = (*optimizer.state.values(), *optimizer.base.state.values())
    tensors = [piece(t) for entry in entries for t in entry.values() if isinstance(t, Tensor)]
    memory = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel() > 1}
    pieces = {piece(p).untyped_storage().data_ptr() for p in net.parameters()}
    kept = sum(nbytes for at, nbytes in memory.items() if at not in pieces)
    return round(kept / sum(piece(p).nbytes for p in net.parameters()), 2)


def cube(rank: int, world_size: int) -> dict[str, Any]:
    """FSDP over tensor parallelism over replicas, beside the whole net; and saved and loaded. FSDP is on the shards
    alone, or on the replicas, too, which it leaves to the optimizer."""
    mesh, out = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tensor")), {}
    replica, shard, _ = mesh.get_coordinate()
    for name, of_fsdp in (("cube", mesh["shard"]), ("hybrid", mesh["replicate", "shard"])):
        net = tensor_parallel(Plain(), mesh["tensor"])
        fully_shard(net, mesh=of_fsdp)
        optimizer = lamb(net.parameters(), process_group=mesh)
        if name == "hybrid":
            commopt.attach(net, optimizer)
        beside, number = Beside(net, optimizer, range(4), mesh), 2 * replica + shard

        def backward(step: int, net: nn.Module = net, number: int = number) -> None:
            net(images(step, number)).square().mean().backward()

        out[name] = beside.after(4, backward)
    return out


def unsharded_and_back(rank: int, world_size: int) -> dict[str, Any]:
    """State that was made by whole models loads into sharded ones, and the other way: by torch's tools, and by
    ``load_state_dict()``. What all of them come to after some steps in full precision, and how far that is apart."""
    mesh, out = grid(2, 2), {}
    everyone = {"backend": TorchBackend(), "freeze_step": 100, "lr": 1e-2}
    for way in ("tools", "state_dict"):
        whole_net, net = Plain(), fully_shard(Plain(), mesh=mesh["shard"])
        whole_one = commopt.OneBitAdam(whole_net.parameters(), **everyone)
        for step in range(3):
            fit(whole_net, whole_one, step, rank)
        ours = commopt.OneBitAdam(net.parameters(), lr=1e-2, freeze_step=100, process_group=mesh)
        full = StateDictOptions(full_state_dict=True)
        set_model_state_dict(net, whole_net.state_dict(), options=full)
        if way == "tools":
            set_optimizer_state_dict(net, ours, get_optimizer_state_dict(whole_net, whole_one), options=full)
        else:
            ours.load_state_dict(whole_one.state_dict())
        for step in range(3, 6):
            fit(whole_net, whole_one, step, rank)
            fit(net, ours, step, rank)
        out[f"{way}: sharded"] = distance(net, whole_net)
        back = Plain()
        again = commopt.OneBitAdam(back.parameters(), **everyone)
        state = get_optimizer_state_dict(net, ours, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        holder = [state]  # torch's tool gives all of it to rank 0 alone
        dist.broadcast_object_list(holder)
        back.load_state_dict({name: whole(p).detach().clone() for name, p in net.named_parameters()})
        if way == "tools":
            set_optimizer_state_dict(back, again, holder[0])
        else:
            saved = ours.state_dict()
            whole_state = {i: {name: whole(v) for name, v in entry.items()} for i, entry in saved["state"].items()}
            again.load_state_dict({**saved, "state": whole_state})
        for step in range(6, 9):
            fit(back, again, step, rank)
            fit(whole_net, whole_one, step, rank)
        out[f"{way}: back"] = distance(back, whole_net)
    return out


def full_states(rank: int, world_size: int) -> dict[str, Any]:
    """What is said where a full state of a sharded run, which has what is rank 0's own, is loaded into a sharded one,
    by every rank or from rank 0; and whether it goes on, with replicas that are the same after a round."""
    mesh, out = grid(2, 2), {}
    for name, kind in {"OneBitAdam": {"freeze_step": 2}, "DiLoCo": {"period": 4}}.items():
        net = fully_shard(Plain(), mesh=mesh["shard"])
        ours = getattr(commopt, name)(net.parameters(), lr=1e-2, process_group=mesh, **kind)
        for step in range(6):
            fit(net, ours, step, rank)
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        given = [get_model_state_dict(net, options=options), get_optimizer_state_dict(net, ours, options=options)]
        everybodys = list(given)
        dist.broadcast_object_list(everybodys)
        for way, (weights, state) in {"all load": everybodys, "from rank 0": given}.items():
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=way == "from rank 0")
            again = fully_shard(Plain(), mesh=mesh["shard"])
            other = getattr(commopt, name)(again.parameters(), lr=1e-2, process_group=mesh, **kind)
            with listening() as lines:
                set_model_state_dict(
                    again, copy.deepcopy(weights), options=options
                )  # which writes into what it is given
                set_optimizer_state_dict(again, other, copy.deepcopy(state), options=options)
                for step in range(6, 12):
                    fit(again, other, step, rank)
            if name == "DiLoCo":
                other.synchronize()
            numbers = torch.cat([piece(p).detach().flatten() for p in again.parameters()])
            rows = [torch.empty_like(numbers) for _ in range(2)]
            dist.all_gather(rows, numbers, group=mesh.get_group("replicate"))
            out[f"{name}, {way}"] = torch.equal(*rows) and bool(numbers.isfinite().all())
            out[f"{name}, {way}: said"] = len([line for line in lines if "another rank's in the loaded state" in line])
    return out


def pickled(rank: int, world_size: int) -> dict[str, Any]:
    """How many ranks an unpickled optimizer of parameters on a mesh has, how many of them hold the same, and whether it
    goes on as the original does."""
    mesh, out = grid(2, 2), {}
    for name in ("OneBitAdam", "DiLoCo"):
        weights = distribute_tensor(torch.arange(24.0).view(6, 4), mesh["shard"], [Shard(0)])
        params = [nn.Parameter(weights), nn.Parameter(torch.ones(3))]
        kind = {"base": torch.optim.SGD, "period": 2} if name == "DiLoCo" else {"freeze_step": 2}
        optimizer = getattr(commopt, name)(params, lr=0.1, **kind)
        for step in range(6):
            if step == 3:
                others, other = pickle.loads(pickle.dumps((params, optimizer)))
            for p, q in zip(params, others if step > 2 else params):
                noise = torch.randn(local(p).shape, generator=torch.Generator().manual_seed(10 * step + rank))
                p.grad, q.grad = like(noise, p), like(noise.clone(), q)
            optimizer.step()
            if step > 2:
                other.step()
        same = all(torch.equal(local(p), local(q)) for p, q in zip(params, others))
        out[name] = other.topology.world_size, other.topology.copies, same
    return out


# copies inside a replica ----------------------------------------------------------------------------------------------


def copies_of_a_tensor_group(rank: int, world_size: int) -> dict[str, tuple[bool, bool]]:
    """Tensor parallelism on (2, 2), where one rank gets another gradient of what each rank of a tensor group has, as
    from a kernel that adds in no fixed order. Whether the copies stay alike, and whether, where all get the same, sums
    over replicas are twice their means."""
    # names of its own: DTensor's caches would take an equal mesh of an earlier scene, whose groups are gone
    across = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "pieces"))
    kinds: dict[str, Callable[[Any], Any]] = {
        "OneBitAdam": lambda params: commopt.OneBitAdam(params, lr=1e-2, freeze_step=2, process_group=across),
        "LocalSGD": lambda params: commopt.LocalSGD(
            params, torch.optim.SGD, lr=1e-2, period=2, compressor=Sign(), process_group=across
        ),
    }
    out = {}
    for name, kind in kinds.items():
        for sequence in (False, True):
            net = tensor_parallel(Plain(torch.float32), across["pieces"], sequence)
            copied = [*net.norm.parameters(), net.second.bias]
            optimizer = kind(net.parameters())
            for step in range(5):
                optimizer.zero_grad()
                net(images(step, across.get_coordinate()[0], torch.float32)).square().mean().backward()
                settle(copied)
                for p in copied if step in (1, 3) and rank == 1 else ():
                    piece(p.grad).add_(1e-3)
                optimizer.step()
            optimizer.synchronize()
            mine = torch.cat([local(p).flatten() for p in copied])
            out[f"{name}, sequence {sequence}"] = same_over(across.get_group("pieces"), mine), twice(across, sequence)
    return out


def twice(across: DeviceMesh, sequence: bool) -> bool:
    """Whether a step by sums over two replicas is two by their mean, of DTensors."""
    steps = []
    for reduction in ("mean", "sum"):
        net = tensor_parallel(Plain(), across["pieces"], sequence)
        params = [p for p in net.parameters() if isinstance(p, DTensor)]
        before = [whole(p).detach().clone() for p in params]
        optimizer = commopt.CSER(
            net.parameters(), lr=1.0, compressor=Identity(), process_group=across, reduction=reduction
        )
        fit(net, optimizer, 0, across.get_coordinate()[0])
        steps.append([whole(p).detach() - x for p, x in zip(params, before)])
    return all(torch.allclose(2 * a, b, rtol=1e-9, atol=1e-12) for a, b in zip(*steps))


def experts_that_come_while_fragments_are_in_flight(rank: int, world_size: int) -> tuple[list[float], list[int]]:
    """Streaming on a mesh; a group with a mesh of its own comes after the first fragment was sent, and one rank is
    slower. The parameters in the end, and the channels of each set of replicas."""
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("replicate",))
    own = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("replicate", "expert"))
    torch.manual_seed(0)
    dense, experts = ([nn.Parameter(torch.randn(40, 10)) for _ in range(n)] for n in (4, 6))
    optimizer = commopt.DiLoCo(
        dense, lr=1e-2, period=8, bucket_mb=0.0015, compressor=Sign(), streaming=commopt.Streaming(4, 7),
        process_group=mesh,
    )  # fmt: skip
    for step in range(32):
        if step == 8:
            optimizer.add_param_group({"params": experts, "mesh": own})
        draw = torch.Generator().manual_seed(100 * step + rank)
        for p in dense + experts:
            p.grad = torch.randn(p.shape, generator=draw)
        time.sleep(0.05 * rank)
        optimizer.step()
    optimizer.synchronize()
    return torch.cat([p.detach().flatten() for p in dense + experts]).tolist(), [
        len(ranks.channels or ()) for ranks in optimizer.topology.replicas
    ]


def in_strips(rank: int, world_size: int) -> dict[str, bool]:
    """Matrices of which a rank of tensor parallelism has strips, some of each half: whether the pieces that are cut out
    of whole ones are those of torch, and whether Muon makes of pieces what it makes of the whole."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    strips = _StridedShard(0, split_factor=2)
    ways = {
        "strips": (mesh["inner"], (strips,)),
        "strips and columns": (mesh, (Shard(1), strips)),
        "columns and strips": (mesh, (strips, Shard(1))),
        "rows of rows": (mesh, (strips, Shard(0))),  # as FSDP2 over tensor parallelism: no strips
    }
    out = {}
    for name, place in ways.items():
        whole = nn.Parameter(torch.randn(8, 6, generator=torch.Generator().manual_seed(0)))
        p = nn.Parameter(distribute_tensor(whole.detach(), *place))
        out[name] = torch.equal(cut(whole.detach(), p), piece(p))
        whole.grad = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
        p.grad = distribute_tensor(whole.grad, *place)
        for q in (whole, p):
            commopt.Muon([q], lr=0.1).step()
        out[f"{name}, Muon"] = torch.allclose(p.full_tensor(), whole, rtol=0, atol=1e-3)  # bfloat16, rows in any order
    return out
