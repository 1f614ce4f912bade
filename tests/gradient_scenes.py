"""What processes do with compressed means of gradients: under DistributedDataParallel, and sharded by FSDP2."""

from __future__ import annotations

import copy
import gc
import io
from typing import Any

import torch
import torch.distributed as dist
from mesh_scenes import Plain, grid, images
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from trainer_runs import assert_same
from worlds import same_bits

import commopt
from commopt.compress import Identity, Int4, Int8, PowerSGD, Sign
from commopt.optim import ReplicasDiffer
from commopt.sharding import local


class Fork(nn.Module):
    """Half of it is used on odd steps only, by odd ranks only; a quarter never."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.never, self.sometimes = nn.Linear(9, 40), nn.Linear(3, 5), nn.Linear(40, 7)
        self.end = nn.Linear(40, 7)

    def forward(self, x: Tensor, too: bool) -> Tensor:
        hidden = torch.tanh(self.always(x))
        return self.end(hidden) + (self.sometimes(hidden) if too else 0)


class Half(Fork):
    """Half of it is never used."""

    def forward(self, x: Tensor, too: bool) -> Tensor:
        return super().forward(x, False)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(9, 9) for _ in range(5))

    def forward(self, x: Tensor, too: bool) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


class Filters(nn.Module):
    """Filters with the channels last, whose gradients lie so in DDP's buckets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(3, 4, 2), nn.Conv2d(4, 5, 2)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor, too: bool) -> Tensor:
        images = torch.stack([x, x.flip(1), x.square()], 1).view(-1, 3, 3, 3)
        return self.second(torch.tanh(self.first(images))).flatten(1)


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 9, generator=torch.Generator().manual_seed(100 * step + rank))


def trained(net: nn.Module, rank: int, steps: range, optimizer: Any, micro: int = 1) -> None:
    """Steps of ``micro`` backward passes each."""
    for step in steps:
        optimizer.zero_grad()
        for i in range(micro):
            sync = net.no_sync() if i < micro - 1 and isinstance(net, DDP) else torch.enable_grad()
            with sync:
                net(batch(micro * step + i, rank), step % 2 == 1 and rank % 2 == 1).square().mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()


def bits(net: nn.Module) -> list[Tensor]:
    return [p.detach().contiguous().clone() for p in net.parameters()]


DDP_KINDS = {
    "default": (Deep, {}),
    "views": (Deep, {"gradient_as_bucket_view": True}),
    "static": (Deep, {"static_graph": True}),
    "static, unused": (Half, {"static_graph": True}),
    "unused": (Fork, {"find_unused_parameters": True}),
    "small buckets": (Deep, {"bucket_cap_mb": 0.0004}),
    "channels last": (Filters, {}),
}


def under_ddp(rank: int, world_size: int) -> dict[str, Any]:
    """Each way of DDP, and the same model bare: the parameters after 6 steps of AdamW."""
    out: dict[str, Any] = {}
    for name, (kind, options) in DDP_KINDS.items():
        net, bare = DDP(kind(), **options), kind()
        handle = commopt.compress_gradients(net, Sign(16), bucket_mb=4e-4)
        other = commopt.compress_gradients(bare, Sign(16), bucket_mb=4e-4)
        micro = 1 if "static_graph" in options else 2  # torch has no no_sync() before the graph is known
        trained(net, rank, range(6), torch.optim.AdamW(net.parameters(), lr=1e-2), micro)
        optimizer = torch.optim.AdamW(bare.parameters(), lr=1e-2)
        for step in range(6):
            optimizer.zero_grad()
            for i in range(micro):
                with other.no_sync() if i < micro - 1 else torch.enable_grad():
                    bare(batch(micro * step + i, rank), step % 2 == 1 and rank % 2 == 1).square().mean().backward()
            nn.utils.clip_grad_norm_(bare.parameters(), 0.5)
            optimizer.step()
        out[name] = (bits(net), bits(bare), handle.comm_stats()["steps"], other.comm_stats()["steps"])
    return out


def several_synced(rank: int, world_size: int) -> list[bool]:
    """Steps of two backward passes that are both averaged, of which the second reaches some parameters on one rank
    only, or on none: whether gradients under DDP are those of the bare model."""
    out = []
    for views in (False, True):
        net, bare = DDP(Fork(), find_unused_parameters=True, gradient_as_bucket_view=views), Fork()
        commopt.compress_gradients(net, Sign(16), bucket_mb=4e-4)
        commopt.compress_gradients(bare, Sign(16), bucket_mb=4e-4)
        for step, reached in enumerate([(True, False), (rank == 0, rank == 1), (rank == 1, False), (True, True)]):
            for model in (net, bare):
                model.zero_grad()
                for i, too in enumerate(reached):
                    model(batch(2 * step + i, rank), too).square().mean().backward()
            found, known = ([p.grad for p in model.parameters() if p.grad is not None] for model in (net, bare))
            out.append(same_bits(found, known))
    return out


def exact_under_ddp(rank: int, world_size: int) -> dict[str, float]:
    """How far the identity comes from DDP's own average, by way of DDP; and after it was removed."""
    out = {}
    for name, (kind, options) in DDP_KINDS.items():
        theirs, ours = DDP(kind().double(), **options), DDP(kind().double(), **options)
        handle = commopt.compress_gradients(ours, Identity(), bucket_mb=4e-4)
        for step in range(6):
            if step == 5:
                handle.remove()
            for net in (theirs, ours):
                net.zero_grad()
                net(batch(step, rank).double(), step % 2 == 1 and rank % 2 == 1).square().mean().backward()
            assert [p.grad is None for p in theirs.parameters()] == [p.grad is None for p in ours.parameters()]
            pairs = [(p.grad, q.grad) for p, q in zip(theirs.parameters(), ours.parameters()) if p.grad is not None]
            out[name] = max([out.get(name, 0.0), *(float((g - h).abs().max()) for g, h in pairs)])
    return out


def scaled(rank: int, world_size: int) -> dict[str, Any]:
    """A GradScaler, and inf on one rank in the third step: who skips, the scales, and whether it left a trace; and the
    same without both, and without that step."""
    plain = DDP(Deep())
    commopt.compress_gradients(plain, Sign(16), bucket_mb=4e-4)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for step in (0, 1, 3, 4):
        optimizer.zero_grad()
        plain(batch(step, rank), False).square().mean().backward()
        optimizer.step()
    net = DDP(Deep())
    handle = commopt.compress_gradients(net, Sign(16), bucket_mb=4e-4)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    moved, trace = [], []
    for step in range(5):
        before, residuals = bits(net), handle.state_dict()["residuals"]["state"]
        optimizer.zero_grad()
        loss = net(batch(step, rank), False).square().mean()
        scaler.scale(loss * (torch.inf if step == 2 and rank == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        moved.append(not all(torch.equal(p, q) for p, q in zip(before, bits(net))))
        after = handle.state_dict()["residuals"]["state"]
        trace.append(any(not torch.equal(after[i][n], residuals[i][n]) for i in residuals for n in residuals[i]))
    return {"moved": moved, "trace": trace, "scale": scaler.get_scale(), "bits": bits(net), "plain": bits(plain)}


def resumed(rank: int, world_size: int) -> bool:
    """Under DDP, in a model that has taken no step yet: the same bits as without a stop."""
    net = DDP(Deep())
    handle = commopt.compress_gradients(net, Sign(16), bucket_mb=4e-4)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    trained(net, rank, range(4), optimizer)
    saved = {"net": {k: v.clone() for k, v in net.state_dict().items()}, "gradients": handle.state_dict()}
    rest = optimizer.state_dict()
    rest = {**rest, "state": {i: {k: v.clone() for k, v in e.items()} for i, e in rest["state"].items()}}
    trained(net, rank, range(4, 8), optimizer)
    other = DDP(Deep())
    second = commopt.compress_gradients(other, Sign(16), bucket_mb=4e-4)
    again = torch.optim.AdamW(other.parameters(), lr=1e-2)
    other.load_state_dict(saved["net"])
    second.load_state_dict(saved["gradients"])
    again.load_state_dict(rest)
    trained(other, rank, range(4, 8), again)
    return all(torch.equal(p, q) for p, q in zip(bits(net), bits(other)))


def sharded(rank: int, world_size: int) -> dict[str, Any]:
    """FSDP2 inside, compressed between: exact with the identity, the same replicas with signs, NaN in one piece, and
    hosts as nodes of whole models."""
    mesh, out = grid(2, 2), {}

    def made(compressor: Any) -> tuple[nn.Module, Any]:
        net = fully_shard(Plain(), mesh=mesh["shard"])
        return net, commopt.compress_gradients(net, compressor, process_group=mesh, bucket_mb=2e-4)

    net, _ = made(Identity())
    native = fully_shard(Plain(), mesh=mesh)
    for step in range(3):
        for model in (net, native):
            model.zero_grad()
            model(images(step, rank)).square().mean().backward()
    pairs = [(p.grad.full_tensor(), q.grad.full_tensor()) for p, q in zip(net.parameters(), native.parameters())]
    out["exact"] = max(float((g - h).abs().max()) for g, h in pairs)

    net, handle = made(Sign(16))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for step in range(5):
        optimizer.zero_grad()
        net(images(step, rank)).square().mean().backward()
        optimizer.step()
    out["pieces"] = [local(p).detach().clone() for p in net.parameters()]
    out["stats"] = handle.comm_stats()

    given = [handle.consolidated_state_dict(to=3)]
    dist.broadcast_object_list(given, src=3)
    _, other = made(Sign(16))
    other.load_state_dict(given[0])
    assert_same(other.state_dict()["residuals"], handle.state_dict()["residuals"])

    residuals = handle.state_dict()["residuals"]["state"]
    optimizer.zero_grad()
    loss = net(images(5, rank)).square().mean()
    handle.mean.arrive, real = _spoiling(handle.mean.arrive, rank), handle.mean.arrive
    loss.backward()
    handle.mean.arrive = real
    out["finite"] = [bool(local(p.grad).isfinite().all()) for p in net.parameters() if local(p.grad).numel()]
    after = handle.state_dict()["residuals"]["state"]
    out["trace"] = any(not torch.equal(after[i][n], residuals[i][n]) for i in residuals for n in residuals[i])

    nodes = init_device_mesh("cpu", (2, 2))
    whole = Plain()
    handle = commopt.compress_gradients(whole, Sign(16), process_group=nodes, bucket_mb=2e-4)
    for step in range(3):
        whole.zero_grad()
        whole(images(step, rank)).square().mean().backward()
    out["nodes"] = ([p.grad.clone() for p in whole.parameters()], handle.comm_stats())
    return out


def _spoiling(arrive: Any, rank: int) -> Any:
    """NaN in what rank 3 holds."""

    def spoilt(p: Tensor, gradient: Tensor, stays: bool) -> None:
        if rank == 3:
            gradient.fill_(torch.nan)
        arrive(p, gradient, stays)

    return spoilt


def beside_torchs_powersgd(rank: int, world_size: int) -> list[float]:
    """How far ours comes from torch's hook, from the factor that it starts with; both without feedback."""
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    torch.manual_seed(0)
    theirs, ours = DDP(nn.Linear(30, 20, bias=False).double()), nn.Linear(30, 20, bias=False).double()
    ours.load_state_dict(theirs.module.state_dict())
    state = PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1, use_error_feedback=False
    )
    theirs.register_comm_hook(state, powerSGD_hook)
    handle = commopt.compress_gradients(ours, PowerSGD(2, 1.0), feedback=False)
    apart = []
    for step in range(7):
        x = torch.randn(5, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))
        for net in (theirs, ours):
            net.zero_grad()
            net(x).square().mean().backward()
        (p,), (q,) = theirs.parameters(), ours.parameters()
        if step > 2:
            apart.append(float((p.grad - q.grad).abs().max() / p.grad.abs().max()))
        if step == 2:  # both go on from here with the same second factor
            saved = handle.state_dict()
            saved["state"][0]["q"] = next(iter(state.q_memory_dict.values())).view(30, 2).clone()
            handle.load_state_dict(saved)
    return apart


def beside_another_hook(rank: int, world_size: int) -> str:
    """What is said where an optimizer of commopt is attached already."""
    model = DDP(nn.Linear(4, 2))
    optimizer = commopt.OneBitAdam(model.parameters(), lr=1e-3)
    commopt.attach(model, optimizer)
    try:
        commopt.compress_gradients(model, Sign(16))
    except ValueError as error:
        return str(error)
    return ""


def skips_unused(rank: int, world_size: int) -> str:
    """What is said where DDP sends nothing of buckets whose parameters are all unused."""
    model = DDP(Fork(), find_unused_parameters=True, skip_all_reduce_unused_params=True)
    try:
        commopt.compress_gradients(model, Sign(16))
    except ValueError as error:
        return str(error)
    return ""


def in_a_pipeline(rank: int, world_size: int) -> dict[str, Any]:
    """Two stages of two replicas each, by torch's schedule of two micro-batches, twice: how far gradients of the exact
    mean of replicas are from those of the stages in one; and what is said where FSDP2 cuts a stage."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    replica, stage = divmod(rank, 2)
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]

    def half(stage: int) -> nn.Module:
        torch.manual_seed(stage)
        return nn.Sequential(nn.Linear(9, 9), nn.Tanh())

    def loss(y: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(y, target)

    both, target = nn.Sequential(half(0), half(1)), torch.ones(4, 9)
    loss(both(torch.cat([batch(0, 0), batch(0, 1)])), torch.ones(8, 9)).backward()
    exact = [p.grad for p in both[stage].parameters()]
    mesh, out = DeviceMesh.from_group(columns[stage], "cpu"), {}
    ways: dict[str, Any] = {
        "ddp": lambda net: DDP(net, process_group=columns[stage], find_unused_parameters=True),
        "bare": lambda net: net,
        "fsdp": lambda net: fully_shard(net, mesh=mesh),
    }
    for name, wrap in ways.items():
        net = wrap(half(stage))
        group = mesh if name == "fsdp" else columns[stage]
        commopt.compress_gradients(net, Identity(), process_group=group)
        schedule = ScheduleGPipe(PipelineStage(net, stage, 2, torch.device("cpu"), group=rows[replica]), 2, loss)
        try:
            for _ in range(2):
                net.zero_grad()
                schedule.step(*([batch(0, replica)] if stage == 0 else []), **({"target": target} if stage else {}))
            out[name] = max(float((p.grad - g).abs().max()) for p, g in zip(net.parameters(), exact))
        except RuntimeError as error:
            out[name] = str(error)
    return out


def wrapped(rank: int, world_size: int) -> dict[str, Any]:
    """What is said where DistributedDataParallel is around what is compressed bare, before and after; and whether it is
    taken once that has gone."""
    said: dict[str, Any] = {}
    net = DDP(Plain())
    try:
        commopt.compress_gradients(net.module, Sign())
    except ValueError as error:
        said["before"] = str(error)
    bare = net.module
    vars(net)["itself"] = net  # a cycle, as one with a trainer that the model knows
    gc.collect()  # old then, so that it stays for a while
    del net
    handle = commopt.compress_gradients(bare, Sign())
    bare(images(0, rank)).square().sum().backward()
    said["steps"] = handle.comm_stats()["steps"]
    late = Plain()
    commopt.compress_gradients(late, Sign())
    net = DDP(late)
    try:
        net(images(0, rank)).square().sum().backward()
    except RuntimeError as error:
        said["after"] = str(error)
    return said


def refused_under_ddp(rank: int, world_size: int) -> list[tuple[str, bool]]:
    """Of some kinds of DDP: what a backward says before which parameters differ, and whether the means that follow,
    when they are put back, are those of a model without such a backward."""
    out = []
    for kind in ({}, {"static_graph": True}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}):
        plain = Plain()
        nets = [DDP(copy.deepcopy(plain), bucket_cap_mb=1e-3, **kind) for _ in range(2)]
        for net in nets:
            commopt.compress_gradients(net, Int8(), check_every=1)
        said = ""
        for step in range(4):
            if step == 2:
                p = next(nets[0].parameters())
                before = p.detach().clone()
                p.detach().add_(rank)
                try:
                    nets[0](images(step, rank)).square().sum().backward()
                except ReplicasDiffer as error:
                    said = str(error)
                p.detach().copy_(before)
            for net in nets:
                net.zero_grad()
                net(images(step, rank)).square().sum().backward()
        ours, theirs = ([p.grad for p in net.parameters()] for net in nets)
        out.append((said, same_bits(ours, theirs)))
    return out


def frozen_after_ddp(rank: int, world_size: int) -> dict[str, Any]:
    """Means of what is trained where a layer was frozen after DDP had been made, and before gradients were compressed:
    exact, by ways of DDP; and what is said once that layer is trained again."""
    out: dict[str, Any] = {}
    for name, options in {"unused": {"find_unused_parameters": True}, "static": {"static_graph": True}}.items():
        found = []
        for compresses in (False, True):
            net = DDP(Deep(), **options)
            net.module.layers[0].requires_grad_(False)
            if compresses:
                commopt.compress_gradients(net, Identity())
            for step in range(2):
                net.zero_grad()
                net(batch(step, rank), False).square().mean().backward()
            found.append([None if p.grad is None else p.grad.clone() for p in net.parameters()])
        out[name] = found
    net.module.layers[0].requires_grad_(True)
    try:
        net(batch(2, rank), False).square().mean().backward()
    except RuntimeError as error:
        out["thawed"] = str(error)
    return out


def sparse_under_ddp(rank: int, world_size: int) -> str:
    """What is said of sparse gradients."""
    net = DDP(nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2)))
    commopt.compress_gradients(net, Sign(16))
    try:
        net(torch.tensor([rank, 2])).sum().backward()
    except ValueError as error:
        return str(error)
    return ""


def copied(rank: int, world_size: int) -> dict[str, Any]:
    """Gradients of copies of a compressed DDP model: averaged by DDP, exactly, and compressed if asked to."""
    net = DDP(Deep())
    handle = commopt.compress_gradients(net, Sign(16))
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    copies = {"deepcopy": copy.deepcopy(net), "file": torch.load(file, weights_only=False)}
    copies["average"] = torch.optim.swa_utils.AveragedModel(net).module
    exact = DDP(Deep())
    exact(batch(0, rank), False).square().mean().backward()
    out: dict[str, Any] = {"exact": [p.grad for p in exact.parameters()]}
    for name, one in copies.items():
        one.requires_grad_(True)
        one(batch(0, rank), False).square().mean().backward()
        out[name] = [p.grad.clone() for p in one.parameters()]
    assert handle.comm_stats()["steps"] == 0
    again = commopt.compress_gradients(copies["deepcopy"], Sign(16))
    copies["deepcopy"](batch(0, rank), False).square().mean().backward()
    out["steps"] = again.comm_stats()["steps"]
    return out


def compiled_as_a_whole(rank: int, world_size: int) -> dict[str, list[list[Tensor]]]:
    """Parameters after steps that torch.compile has got whole, backward and optimizer in them, and after plain ones."""
    out: dict[str, list[list[Tensor]]] = {}
    for kind in ("bare", "ddp", "fsdp2"):
        for compiles in (False, True):
            torch._dynamo.reset()
            inner = Deep()
            net = DDP(inner) if kind == "ddp" else fully_shard(inner) if kind == "fsdp2" else inner
            commopt.compress_gradients(net, Int4())
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

            def step(x: Tensor, net: nn.Module = net, optimizer: Any = optimizer) -> Tensor:
                optimizer.zero_grad()
                loss = net(x, False).square().mean()
                loss.backward()
                optimizer.step()
                return loss

            call = torch.compile(step, backend="aot_eager") if compiles else step
            for i in range(4):
                call(batch(i, rank))
            out.setdefault(kind, []).append([local(p.detach()).clone() for p in net.parameters()])
    return out


def with_experts_of_its_own(rank: int, world_size: int) -> dict[str, Any]:
    """Under a DDP that has been told to leave a layer alone, which each rank has for itself."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    nn.init.constant_(net[1].weight, float(rank))
    DDP._set_params_and_buffers_to_ignore_for_model(net, ["1.weight", "1.bias"])
    ddp = DDP(net)
    handle = commopt.compress_gradients(ddp, Int8(), check_every=1)
    for step in range(3):
        ddp.zero_grad()
        ddp(torch.full((2, 4), 1.0 + rank + step)).sum().backward()
    return {
        "shared": net[0].bias.grad.clone(),
        "own": net[1].weight.grad.clone(),
        "residuals": sorted(key for key in handle.state_dict()["residuals"]["state"] if isinstance(key, int)),
    }
