"""Processes that live on and run one task after another: a process that is begun costs its start, and whatever torch
works out once for each (rules of DTensor, code for its operators).

A task is an importable function. Each gets a process group of its own, from the environment as under torchrun.
"""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from forks import python
from ports import free_port
from torch.distributed.device_mesh import DeviceMesh

PATIENCE = 120.0
"""Seconds after which a task counts as hung."""


def serve(rank: int, address: str, key: bytes) -> None:
    """Be a rank: run what comes from who listens at ``address``. ``key`` is that of the multiprocessing there, which
    hands out the memory of tensors."""
    import torch

    multiprocessing.current_process().authkey = key
    pipe = Client(address)
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    while True:
        try:
            size, port, task, args = pipe.recv()
        except EOFError:
            return
        os.environ |= {"WORLD_SIZE": str(size), "MASTER_PORT": str(port)}
        try:
            outcome = (True, task(*args))
        except Exception as error:
            outcome = (False, (type(error).__name__, str(error), traceback.format_exc()))
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
            forget_groups()
        pipe.send(outcome)


def forget_groups() -> None:
    """Frees the process groups that meshes know. What torch has worked out for a mesh keeps that for good, and each of
    Gloo's groups has a thread that wakes a hundred times a second."""
    gc.collect()
    for mesh in gc.get_objects():
        if type(mesh) is DeviceMesh:
            getattr(mesh, "_pg_registry", {}).clear()


def over_gloo(fn: Callable[..., Any], *args: Any) -> bytes:
    """What ``fn(rank, world_size, *args)`` returns in a process group, as a file: tensors that are handed out through
    shared memory are a handle each, of which a process has few."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    file = io.BytesIO()
    torch.save(fn(dist.get_rank(), dist.get_world_size(), *args), file)
    dist.barrier()
    return file.getvalue()


class Pool:
    """``run(task, *args)`` calls the task on ``size`` ranks, or on the first ``ranks`` of them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.pipes: list[Connection] = []
        self.processes: list[subprocess.Popen[bytes]] = []

    def _start(self) -> None:
        with Listener() as listener:
            for rank in range(self.size):
                arguments = (rank, listener.address, bytes(multiprocessing.current_process().authkey))
                code = f"import sys; sys.path = {sys.path!r}; import pool; pool.serve{arguments!r}"
                self.processes.append(subprocess.Popen([python(), "-c", code]))
                self.pipes.append(listener.accept())

    def outcomes(self, task: Callable[..., Any], *args: Any, ranks: int | None = None) -> list[tuple[bool, Any]]:
        """(True, result) or (False, (error type, message, traceback)) of each rank; fails if one hangs."""
        if not self.processes:
            self._start()
        size, port = ranks or self.size, free_port()
        pipes = self.pipes[:size]
        for pipe in pipes:
            pipe.send((size, port, task, args))
        for rank, pipe in enumerate(pipes):
            if not pipe.poll(PATIENCE):
                self.close(0)  # the next task begins anew
                raise AssertionError(f"rank {rank} hangs")
        return [pipe.recv() for pipe in pipes]

    def run(self, task: Callable[..., Any], *args: Any, ranks: int | None = None) -> list[Any]:
        """Results by rank; fails with the traceback of a rank that raised."""
        outcomes = self.outcomes(task, *args, ranks=ranks)
        for good, result in outcomes:
            assert good, result[2]
        return [result for _, result in outcomes]

    def errors(self, task: Callable[..., Any], *args: Any, ranks: int | None = None) -> list[tuple[str, str]]:
        """(type, message) of the error that every rank raised; fails if one did not raise."""
        outcomes = self.outcomes(task, *args, ranks=ranks)
        assert not any(good for good, _ in outcomes), outcomes
        return [(result[0], result[1]) for _, result in outcomes]

    def over_gloo(self, ranks: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """``fn(rank, world_size, *args)`` in a process group of ``ranks``; the results by rank."""
        import torch

        files = self.run(over_gloo, fn, *args, ranks=ranks)
        return [torch.load(io.BytesIO(file), weights_only=False) for file in files]

    def close(self, patience: float = 10.0) -> None:
        """End the processes."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            try:
                process.wait(patience)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.pipes, self.processes = [], []
