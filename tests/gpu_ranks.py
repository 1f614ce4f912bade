"""Ranks on GPUs, over NCCL: every optimizer, compressed gradients, sharded models; what they train must be equal to the
bit on all ranks, after a resume, and however late the GPU comes to what it is asked for.

    python tests/gpu_ranks.py [--ranks 2] [--device cuda] [scene ...]

Ranks share GPUs if there are fewer: NCCL allows that to ranks that it takes for different hosts (NCCL_HOSTID), and
connects them by the loopback interface. With ``--device cpu`` the scenes run over Gloo, without a GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from every import COMMUNICATING, OVERLAPPING, make
from ports import free_port
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import commopt
from commopt.comm import TorchBackend
from commopt.compress import (
    ACP,
    BFloat16,
    Float8,
    Int2,
    Int4,
    Int8,
    PowerSGD,
    Sign,
    ThresholdTopK,
    TopBlocks,
    TopK,
)  # fmt: skip
from commopt.gradients import Differences, LoCo
from commopt.sharding import local

WORDS, LIMIT = 64, 150.0
AT_ONCE = max(3, (os.cpu_count() or 1) // 3)
COMPRESSORS = [
    Sign(), Int8(), Int8(rounding="stochastic"), Int4(), Int4(rotate=True), Int2(), Float8(), BFloat16(), TopK(4, 256),
    ThresholdTopK(0.05), TopBlocks(), PowerSGD(4), ACP(4),
]  # fmt: skip


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.out, self.gain = nn.Linear(48, 200), nn.Linear(200, 48), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(torch.tanh(self.wide(x))) * self.gain


class Net(nn.Module):
    """Predicts one word from another; the table is tied to the head, and has rows that never occur."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(WORDS + 9, 48) * 0.3)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, words: Tensor) -> Tensor:
        x = nn.functional.one_hot(words, WORDS + 9).to(self.table.dtype) @ self.table
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(x @ self.table[:WORDS].t(), (5 * words + 1) % WORDS)


SETTINGS: dict[str, dict[str, Any]] = {
    "OneBitAdam": {"betas": (0.9, 0.7), "freeze_step": 4},
    "OneBitLamb": {"betas": (0.9, 0.7), "freeze_step": 4, "lr": 2e-3},
}


def made(name: str, net: nn.Module, **more: Any) -> Any:
    return make(name, net.parameters(), **{**SETTINGS.get(name, {}), **more})


def in_ddp(net: nn.Module, device: torch.device) -> DDP:
    return DDP(net, device_ids=[device] if device.type == "cuda" else None)


def cut(net: Net, **options: Any) -> Net:
    """Over the ranks of a mesh, or over all; the scalars are every rank's whole."""
    for block in net.blocks:
        fully_shard(block, ignored_params={block.gain}, **options)
    fully_shard(net, ignored_params={block.gain for block in net.blocks}, **options)
    return net


def held(net: nn.Module) -> list[Tensor]:
    """What this rank has of the parameters."""
    return [local(p.detach()) for p in net.parameters()]


def words(step: int, rank: int, device: torch.device) -> Tensor:
    return torch.randint(0, WORDS, (64,), generator=torch.Generator().manual_seed(100 * step + rank)).to(device)


def trained(net: Any, optimizer: Any, steps: range, rank: int, device: torch.device) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = net(words(step, rank, device))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def bits(tensors: Any) -> Tensor:
    """Their bytes, one after the other."""
    return torch.cat([t.detach().contiguous().view(-1).view(torch.uint8) for t in tensors])


def equal(a: Any, b: Any, what: str) -> None:
    assert torch.equal(bits(a), bits(b)), what


def equal_everywhere(tensors: Any, what: str, group: Any = None) -> None:
    least = bits(tensors).int()
    most = least.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    assert torch.equal(least, most), f"{what}: ranks differ"


def falls(losses: list[float], what: str) -> None:
    early, late = (sum(part) / len(part) for part in (losses[:3], losses[-3:]))
    assert late < early - 0.02, f"{what}: {early:.3f} to {late:.3f}"


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def optimizers(rank: int, device: torch.device) -> None:
    """Each of them on a bare model: replicas, a resume in the middle, and the loss."""
    for name, overlap in [(name, False) for name in COMMUNICATING] + [(name, True) for name in OVERLAPPING]:
        more = {"overlap": True} if overlap else {}
        slow = name.startswith(("CSER", "QSparse"))  # with the compressors of small tests
        goes_on(f"{name}, {overlap=}", lambda net, name=name, more=more: made(name, net, **more), rank, device, slow)


def goes_on(what: str, make: Callable[[nn.Module], Any], rank: int, device: torch.device, slow: bool = False) -> None:
    """Replicas, a resume in the middle, and the loss."""
    nets = [Net().to(device) for _ in range(2)]
    first = make(nets[0])
    losses = trained(nets[0], first, range(17), rank, device)
    second = make(nets[1])
    nets[1].load_state_dict(through_a_file(nets[0].state_dict()))
    second.load_state_dict(through_a_file(first.state_dict()))
    for net, optimizer in zip(nets, (first, second)):
        losses += trained(net, optimizer, range(17, 24), rank, device)
    equal(nets[0].parameters(), nets[1].parameters(), f"{what}: resumed otherwise")
    with first.averaged():
        equal_everywhere(nets[0].parameters(), what)
    if not slow:
        falls(losses, what)


def options(rank: int, device: torch.device) -> None:
    """What changes what is sent: a compressed warm-up, a variance that moves again, states that are averaged, sums,
    parameters of 16 bits with a master copy, a base with a fused step."""
    for name in ("OneBitAdam", "OneBitLamb"):
        ways = [{"warmup_compressor": Int4(), "freeze_step": 12}, {"reduction": "sum", "lr": 1e-3}]
        ways += [{"thaw": "always", "freeze_step": 3}]
        for way in ways:
            goes_on(f"{name}, {way}", lambda net, name=name, way=way: made(name, net, **way), rank, device)
    for name in ("OneBitAdam", "ZeroOneAdam", "OneBitLion", "DiLoCo"):
        goes_on(f"{name}, bfloat16", lambda net, name=name: made(name, net.bfloat16()), rank, device)
    for cls in (commopt.LocalSGD, commopt.DiLoCo):

        def outer(net: nn.Module, cls: Any = cls) -> Any:
            base = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
            return cls(base, period=2, state_period={"exp_avg": 2, "exp_avg_sq": 4})

        goes_on(f"{cls.__name__}, states", outer, rank, device)


def streams(rank: int, device: torch.device) -> None:
    """Fragments that are sent while training goes on, merged in each way; the GPU late, too."""
    ways = [commopt.Streaming(3, delay, merge) for merge in ("corrected", "mix") for delay in (0, 2)]
    ways += [commopt.Streaming(3, merge="eager")]
    for streaming in ways:
        for cls, more in ((commopt.DiLoCo, {}), (commopt.DiLoCo, {"compressor": Int4()}), (commopt.LocalSGD, {})):
            if streaming.is_eager and cls is commopt.LocalSGD:
                continue
            what, ends = f"{cls.__name__}, {streaming}, {more}", []

            def make(net: nn.Module, cls: Any = cls, streaming: Any = streaming, more: Any = more) -> Any:
                return cls(net.parameters(), lr=1e-2, period=4, streaming=streaming, **more)

            goes_on(what, make, rank, device)
            for late in (False, True):
                net = Net().to(device)
                with sleeping(net, device, late):
                    trained(net, make(net), range(11), rank, device)
                ends.append(net)
            equal(ends[0].parameters(), ends[1].parameters(), f"{what}: with delays")


def members(rank: int, device: torch.device) -> None:
    """Ranks that may leave: the last one does, and the others go on."""
    last = dist.get_world_size() - 1
    for fused in (False, True):
        store = dist.PrefixStore(f"members {fused}", dist.distributed_c10d._get_default_store())
        there = commopt.Members(store, rank, ranks=last + 1, patience=20.0, quorum=1)
        net = Net().to(device)
        base = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=fused)
        optimizer = commopt.DiLoCo(base, period=2, members=there)
        losses = trained(net, optimizer, range(12), rank, device)
        equal_everywhere(net.parameters(), "members")
        if rank != last:
            losses += trained(net, optimizer, range(12, 24), rank, device)
            assert len(there.names) == last, there.names
        there.leave()
        falls(losses, "members")


def muon(rank: int, device: torch.device) -> None:
    """Muon for the matrices, AdamW for the rest: on compressed gradients, and as the base of rounds."""

    def both(net: nn.Module) -> Any:
        hidden, rest = commopt.sort_parameters(net, head=(), rest=["table"])
        return commopt.Mixed(commopt.Muon(hidden, lr=0.01), torch.optim.AdamW(rest, lr=1e-2, fused=True))

    goes_on("DiLoCo of Muon", lambda net: commopt.DiLoCo(both(net), period=2), rank, device)
    net = Net().to(device)
    commopt.compress_gradients(net, Int4())
    falls(trained(net, both(net), range(20), rank, device), "Muon on Int4")
    equal_everywhere(net.parameters(), "Muon on Int4")


def overflows(rank: int, device: torch.device) -> None:
    """A GradScaler of each rank's own, and inf on one rank alone in a compressed and in a local step."""
    for name in ("OneBitAdam", "ZeroOneAdam", "DiLoCo"):
        for wrapped in (False, True):
            inner: Any = Net().to(device)
            net = in_ddp(inner, device) if wrapped and name != "DiLoCo" else inner
            optimizer, scaler = made(name, inner), torch.amp.GradScaler(device.type, init_scale=256.0)
            for step in range(16):
                optimizer.zero_grad()
                loss = net(words(step, rank, device)) * (torch.inf if step in (6, 9) and rank == 1 else 1.0)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            with optimizer.averaged():
                equal_everywhere(inner.parameters(), f"{name}, {wrapped=}: overflowed")
            assert all(p.isfinite().all() for p in inner.parameters())


def compiled(rank: int, device: torch.device) -> None:
    """torch.compile, with CUDA graphs, too; and activations that are computed again."""
    for name, more in (("OneBitAdam", {}), ("OneBitAdam", {"overlap": True}), ("ZeroOneAdam", {}), ("DiLoCo", {})):
        for mode in ("default", "reduce-overhead") if device.type == "cuda" else ("default",):
            inner = Net().to(device)
            optimizer, net = made(name, inner, **more), torch.compile(inner, mode=mode)
            falls(trained(net, optimizer, range(20), rank, device), f"{name}, {more}, compiled, {mode}")
            with optimizer.averaged():
                equal_everywhere(inner.parameters(), f"{name}, {more}, compiled, {mode}")
    for wrapped in (False, True):
        inner = Net().to(device)
        net = in_ddp(inner, device) if wrapped else inner
        commopt.compress_gradients(net, Int4())
        end = torch.optim.AdamW(inner.parameters(), lr=1e-2, fused=True)
        falls(trained(torch.compile(net), end, range(16), rank, device), f"Int4, compiled, {wrapped=}")
        equal_everywhere(inner.parameters(), f"Int4, compiled, {wrapped=}")


def delays(rank: int, device: torch.device) -> None:
    """The GPU comes to its work late, at changing places: nothing may be read before it has been written."""
    for name in OVERLAPPING:
        ends = []
        for late in (False, True):
            net = Net().to(device)
            optimizer = made(name, net, overlap=True, bucket_mb=0.02)
            with sleeping(net, device, late):
                trained(net, optimizer, range(9), rank, device)
            ends.append(net)
        equal(ends[0].parameters(), ends[1].parameters(), f"{name}: with delays")
    for compressor in (Int4(), TopK(4, 256), PowerSGD(4), ACP(4)):
        ends = []
        for late in (False, True):
            net = Net().to(device)
            commopt.compress_gradients(net, compressor, bucket_mb=0.02)
            with sleeping(net, device, late):
                trained(net, torch.optim.AdamW(net.parameters(), lr=1e-2), range(9), rank, device)
            ends.append(net)
        equal(ends[0].parameters(), ends[1].parameters(), f"{compressor!r}: with delays")


@contextmanager
def sleeping(net: nn.Module, device: torch.device, late: bool) -> Iterator[None]:
    """In backward, and on the stream of the caller, the GPU sleeps for 0 to 10 ms, now here, now there."""
    calls = 0

    def sleep(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if late and device.type == "cuda" and calls % 3 != 1:
            torch.cuda._sleep(4_000_000 * (calls % 5))

    handles = [p.register_hook(sleep) for p in net.parameters()]
    handles += [net.register_forward_hook(sleep)]
    yield
    for handle in handles:
        handle.remove()


def as_on_the_cpu(rank: int, device: torch.device) -> None:
    """The same training on the CPU over Gloo comes to nearly the same losses."""
    group = dist.new_group(backend="gloo")
    for name in ("OneBitAdam", "OneBitLamb", "ZeroOneAdam", "DiLoCo"):
        losses = []
        for where, more in ((device, {}), (torch.device("cpu"), {"process_group": group})):
            net = Net().to(where)
            losses.append(trained(net, made(name, net, **more), range(8), rank, where))
        apart = max(abs(a - b) for a, b in zip(*losses))
        assert apart < 2e-3, f"{name}: {apart} from the losses on the CPU"


def ddp(rank: int, device: torch.device) -> None:
    """Found by the first step; with overlap; a GradScaler, with half precision by autocast."""
    for more in ({}, {"overlap": True}):
        net = in_ddp(Net().to(device), device)
        optimizer = made("OneBitAdam", net, **more)
        falls(trained(net, optimizer, range(20), rank, device), f"DDP, {more}")
        equal_everywhere(net.parameters(), f"DDP, {more}")
        assert optimizer.phase == "compressed"
        assert optimizer.comm_stats()["ratio"] > 4, optimizer.comm_stats()
    net = in_ddp(Net().to(device), device)
    optimizer, scaler, losses = made("OneBitAdam", net), torch.amp.GradScaler(device.type), []
    for step in range(20):
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.float16 if device.type == "cuda" else torch.bfloat16):
            loss = net(words(step, rank, device))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
    falls(losses, "GradScaler")
    equal_everywhere(net.parameters(), "GradScaler")


def gradients(rank: int, device: torch.device) -> None:
    """Each compressor, under DDP and on a bare model, with a fused optimizer; and a resume."""
    for compressor in COMPRESSORS:
        kept = [True, LoCo()] if isinstance(compressor, Int4) else [True]
        for feedback in kept:
            for wrapped in (False, True):
                what, nets, handles, ends = f"{compressor!r}, {feedback=}, {wrapped=}", [], [], []
                for _ in range(2):
                    net: Any = Net().to(device)
                    net = in_ddp(net, device) if wrapped else net
                    nets.append(net)
                    handles.append(commopt.compress_gradients(net, compressor, feedback=feedback))
                    ends.append(torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True))
                losses = trained(nets[0], ends[0], range(14), rank, device)
                nets[1].load_state_dict(through_a_file(nets[0].state_dict()))
                handles[1].load_state_dict(through_a_file(handles[0].state_dict()))
                ends[1].load_state_dict(through_a_file(ends[0].state_dict()))
                for net, end in zip(nets, ends):
                    losses += trained(net, end, range(14, 18), rank, device)
                equal_everywhere(nets[0].parameters(), what)
                equal(nets[0].parameters(), nets[1].parameters(), f"{what}: resumed otherwise")
                falls(losses, what)


def fsdp(rank: int, device: torch.device) -> None:
    """FSDP2's reduce-scatters and all-gathers, compressed."""
    ways: list[Any] = [
        (None, None), (Int8(), None), (Int8(), Int8()), (Int4(), Differences(Int4())), (Sign(), None),
        (TopK(4, 256), None),
    ]  # fmt: skip
    for compressor, weights in ways:
        net = cut(Net().to(device), reshard_after_forward=True)
        if compressor is None:
            for block in net.blocks:
                block.gain.requires_grad_(False)
        else:
            commopt.compress_gradients(net, compressor, weights=weights)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        falls(trained(net, optimizer, range(16), rank, device), f"FSDP2, {compressor!r}, {weights!r}")
        whole = [getattr(p, "full_tensor", lambda p=p: p)() for p in net.parameters()]
        equal_everywhere(whole, f"FSDP2, {compressor!r}")


def hsdp(rank: int, device: torch.device) -> None:
    """Cut in two, with replicas: one bit between them, by every optimizer; and compressed gradients."""
    if dist.get_world_size() % 2:
        return
    mesh = init_device_mesh(device.type, (dist.get_world_size() // 2, 2), mesh_dim_names=("replicate", "shard"))
    replicas = mesh["replicate"].get_group()
    for name in COMMUNICATING:
        net = cut(Net().to(device), mesh=mesh["shard"])
        optimizer = made(name, net, process_group=mesh)
        losses = trained(net, optimizer, range(20), rank, device)
        with optimizer.averaged():
            equal_everywhere(held(net), f"{name}, sharded", replicas)
        if not name.startswith(("CSER", "QSparse")):
            falls(losses, f"{name}, sharded")
    net = cut(Net().to(device), mesh=mesh["shard"])
    commopt.compress_gradients(net, Int4(), process_group=mesh)
    falls(trained(net, torch.optim.AdamW(net.parameters(), lr=1e-2), range(20), rank, device), "Int4, sharded")
    equal_everywhere(held(net), "Int4, sharded", replicas)


def nodes(rank: int, device: torch.device) -> None:
    """Machines of two ranks: in full precision inside, one bit between."""
    if dist.get_world_size() % 2:
        return
    mesh = init_device_mesh(device.type, (dist.get_world_size() // 2, 2))
    for name in OVERLAPPING:
        net = Net().to(device)
        optimizer = made(name, net, process_group=mesh)
        losses = trained(net, optimizer, range(20), rank, device)
        with optimizer.averaged():
            equal_everywhere(net.parameters(), f"{name}, nodes")
        if not name.startswith(("CSER", "QSparse")):
            falls(losses, f"{name}, nodes")


def by_gloo(rank: int, device: torch.device) -> None:
    """Tensors on a GPU, sent by Gloo."""
    backend = TorchBackend(dist.new_group(backend="gloo"))
    for name in ("OneBitAdam", "ZeroOneAdam", "DiLoCo"):
        net = Net().to(device)
        optimizer = made(name, net, backend=backend)
        falls(trained(net, optimizer, range(20), rank, device), f"{name} by Gloo")
        with optimizer.averaged():
            equal_everywhere(net.parameters(), f"{name} by Gloo")
    net = Net().to(device)
    commopt.compress_gradients(net, Int4(), backend=backend)
    falls(trained(net, torch.optim.AdamW(net.parameters(), lr=1e-2), range(16), rank, device), "Int4 by Gloo")
    equal_everywhere(net.parameters(), "Int4 by Gloo")


def by_mpi(rank: int, device: torch.device) -> None:
    """Tensors on a GPU, sent by MPI; started by mpiexec, where there is one."""
    backend = commopt.comm.MPIBackend(timeout=40.0)
    for name, more in (("OneBitAdam", {}), ("OneBitAdam", {"overlap": True}), ("ZeroOneAdam", {}), ("DiLoCo", {})):
        net = Net().to(device)
        optimizer = made(name, net, backend=backend, **more)
        falls(trained(net, optimizer, range(20), rank, device), f"{name} by MPI")
        with optimizer.averaged():
            equal_everywhere(net.parameters(), f"{name} by MPI")
    net = Net().to(device)
    commopt.compress_gradients(net, Int4(), backend=backend)
    falls(trained(net, torch.optim.AdamW(net.parameters(), lr=1e-2), range(16), rank, device), "Int4 by MPI")
    equal_everywhere(net.parameters(), "Int4 by MPI")
    print(f"MPI reads the memory of GPUs: {backend.cuda_aware}", flush=True)


ALL = (
    optimizers, options, streams, members, muon, overflows, compiled, delays, as_on_the_cpu, ddp, gradients, fsdp, hsdp,
    nodes, by_gloo, by_mpi,
)  # fmt: skip
SCENES: dict[str, Callable[[int, torch.device], None]] = {scene.__name__: scene for scene in ALL}
FOUR = ("hsdp", "nodes")
"""Those for four ranks, if two are asked for."""


def be_a_rank(name: str, kind: str) -> None:
    if name == "by_mpi":
        os.environ |= own_environment(int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["WORLD_SIZE"]), kind)
    rank, device = int(os.environ["RANK"]), torch.device(kind)
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=timedelta(seconds=40))
    try:
        SCENES[name](rank, device)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # ends the others, too, who may wait for this one
    dist.barrier()
    if name == "by_mpi":
        from mpi4py import MPI

        MPI.Finalize()
    sys.stderr.flush()
    os._exit(0)


def gpus_for(kind: str) -> int:
    return torch.cuda.device_count() if kind == "cuda" else 0


def own_environment(rank: int, ranks: int, kind: str) -> dict[str, str]:
    """What a rank needs to know, but for where the ranks meet."""
    gpus = gpus_for(kind)
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank % gpus if gpus else rank), "WORLD_SIZE": str(ranks)}
    own |= {"OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONUNBUFFERED": "1"}
    if 0 < gpus < ranks:
        own |= {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket", "NCCL_HOSTID": f"host{rank}"}
    return own


def start(name: str, ranks: int, kind: str, log: Any) -> list[subprocess.Popen[bytes]]:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    command = [sys.executable, __file__, "--rank-of", name, "--device", kind]
    if name == "by_mpi":
        command = ["mpiexec", "--allow-run-as-root", "--oversubscribe", "-n", str(ranks), *command]
        return [subprocess.Popen(command, env=os.environ | place, stdout=log, stderr=log)]
    environments = [os.environ | place | own_environment(rank, ranks, kind) for rank in range(ranks)]
    return [subprocess.Popen(command, env=env, stdout=log, stderr=log) for env in environments]


def there(name: str) -> bool:
    """Whether a scene can run here; says so if not."""
    if name != "by_mpi" or (shutil.which("mpiexec") and importlib.util.find_spec("mpi4py")):
        return True
    print("left out: by_mpi, for want of mpiexec or mpi4py", flush=True)
    return False


def ended(ours: list[subprocess.Popen[bytes]], since: float) -> int | None:
    """None while they run. If one fails, or time is up, the others are ended."""
    codes = [process.poll() for process in ours]
    if time.monotonic() - since < LIMIT and not any(codes) and None in codes:
        return None
    for process in ours:
        process.terminate()
    for process in ours:
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return 0 if codes == [0] * len(ours) else next((code for code in codes if code), 124)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenes", nargs="*", metavar="scene", help=f"of {', '.join(SCENES)} (default: all)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rank-of", metavar="scene", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank_of:
        return be_a_rank(given.rank_of, given.device)
    waiting, running, failed = [name for name in given.scenes or SCENES if there(name)], {}, 0
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                name = waiting.pop(0)
                ranks = max(4, given.ranks) if name in FOUR else given.ranks
                with (Path(folder) / name).open("wb") as log:
                    running[name] = start(name, ranks, given.device, log), time.monotonic()
            for name, (ours, since) in list(running.items()):
                code = ended(ours, since)
                if code is None:
                    continue
                del running[name]
                failed += code != 0
                print(
                    f"{'good' if code == 0 else f'FAILED with {code}'}: {name}, {time.monotonic() - since:.0f} s",
                    flush=True,
                )
                if code != 0:
                    text = (Path(folder) / name).read_text(errors="replace")
                    print(text if len(text) < 5000 else f"{text[:2500]}\n...\n{text[-2500:]}", flush=True)
            time.sleep(0.1)
    sys.exit(failed)


if __name__ == "__main__":
    main()
