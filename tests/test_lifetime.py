"""An optimizer goes with the last reference to it: no garbage collector, no hook, thread, connection or key is left."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from every import OVERLAPPING, every_variant, make
from forks import python
from ports import free_port
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from worlds import Used, backward, on_threads, tokens, train

from commopt import (
    DiLoCo,
    Gossip,
    LocalSGD,
    OneBitAdam,
    ZeroOneAdam,
    attach,
)
from commopt.comm import CollectiveError, ThreadBackend, ThreadWorld
from commopt.state.lifetime import forget_frames


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def hooks_of(model: nn.Module) -> int:
    on_parameters = sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())
    return on_parameters + len(model._forward_pre_hooks)


@every_variant
def test_every_optimizer_goes_when_it_is_deleted_and_takes_its_hooks(name):
    def run(backend: ThreadBackend) -> None:
        model = Used()
        overlap = {"overlap": True, "bucket_mb": 1.2e-4} if name in OVERLAPPING and name != "OneBitAdam" else {}
        optimizer = make(name, model.parameters(), backend=backend, **overlap)
        optimizer.warn_in_evaluation(model)
        calls: list[int] = []
        optimizer.register_step_post_hook(lambda *_: calls.append(1))
        train(model, optimizer, range(5), backend.rank, 2)
        with optimizer.averaged():
            model(tokens(5, backend.rank, 2))
        train(model, optimizer, range(5, 7), backend.rank, 2)
        assert len(calls) == 7
        gone = [weakref.ref(optimizer), weakref.ref(optimizer.topology)]
        del optimizer
        assert [ref() for ref in gone] == [None, None]
        assert hooks_of(model) == 0
        backward(model, 8, backend.rank, 2)

    on_threads(2, run)


@contextlib.contextmanager
def refused(*kinds: type[Exception]) -> Iterator[None]:
    """As pytest.raises, but keeps nothing of the error."""
    try:
        yield
    except kinds:
        return
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("overlap", [False, True])
def test_after_an_error_in_step(overlap):
    def run(backend: ThreadBackend) -> None:
        model = Used()
        optimizer = OneBitAdam(model.parameters(), freeze_step=2, bucket_mb=1.2e-4, backend=backend, overlap=overlap)
        train(model, optimizer, range(4), backend.rank, 2)
        backward(model, 4, backend.rank, 2)
        if backend.rank == 1:
            model.weight.grad = torch.ones(5, 5).to_sparse()
        with refused(ValueError, RuntimeError):
            optimizer.step()
        gone = weakref.ref(optimizer)
        del optimizer
        assert gone() is None

    on_threads(2, run)


@pytest.mark.parametrize("overlap", [False, True])
def test_after_a_rank_has_gone(overlap):
    def run(backend: ThreadBackend) -> None:
        model = Used()
        optimizer = OneBitAdam(model.parameters(), freeze_step=2, bucket_mb=1.2e-4, backend=backend, overlap=overlap)
        train(model, optimizer, range(4), backend.rank, 2)
        if backend.rank == 0:
            with refused(CollectiveError):
                train(model, optimizer, range(4, 5), 0, 2)
        gone = weakref.ref(optimizer)
        del optimizer
        assert gone() is None

    ThreadWorld(2, timeout=0.3).run(run)


def test_a_generator_goes_on_from_which_an_error_was_found_that_is_forgotten_later():
    """As a loop over batches: to clear the frame of one that waits would end it."""

    def find() -> Exception:
        try:
            raise ValueError("found")
        except ValueError as error:
            return error

    def loop() -> Iterator[Any]:
        yield find()
        yield "the next batch"

    batches = loop()
    forget_frames(next(batches))
    assert next(batches) == "the next batch"


@pytest.mark.parametrize("kind", [OneBitAdam, LocalSGD])
def test_one_that_could_not_be_made(kind):
    def run(backend: ThreadBackend) -> None:
        backends = []

        class Noted(kind):
            def check_settings(self) -> None:
                backends.append(weakref.ref(self.topology))
                super().check_settings()

            def own_settings(self) -> dict[str, Any]:
                backends.append(weakref.ref(self.topology))
                return super().own_settings()

        with refused(ValueError):
            Noted(Used().parameters(), lr=0.1, max_grad_norm=-1.0, backend=backend, period=2) if kind is LocalSGD else (
                Noted(Used().parameters(), max_grad_norm=-1.0, backend=backend)
            )
        assert [ref() for ref in backends] == [None] * len(backends)

    on_threads(2, run)


FIRST = """
import gc, sys, weakref
gc.disable()
import torch, commopt
make = {
    "one": lambda p: commopt.OneBitAdam(p),
    "outer": lambda p: commopt.LocalSGD(p, lr=0.1, period=2),
}[sys.argv[1]]
optimizer = make(torch.nn.Linear(3, 3).parameters())
gone = weakref.ref(optimizer)
del optimizer
sys.exit(gone() is not None)
"""


@pytest.mark.long(but="one")
@pytest.mark.parametrize("kind", ["one", "outer"])
def test_the_first_optimizer_of_a_process(kind):
    """While it is made torch imports much, and keeps the frames that it was called from."""
    assert subprocess.run([sys.executable, "-c", FIRST, kind]).returncode == 0


# processes ------------------------------------------------------------------------------------------------------------

TIMES = 20


def standing(store: Any, models: list[nn.Module]) -> dict[str, int]:
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "keys": store.num_keys(),
        "hooks": sum(hooks_of(model) for model in models),
    }


def scene_many(rank: int, store: Any) -> dict[str, Any]:
    """TIMES overlapping optimizers, one after another, each trained a little; some attached to DDP."""
    out: dict[str, Any] = {"gone": 0}
    model = Used()
    wrapped = DistributedDataParallel(Used(), find_unused_parameters=True)

    def one(i: int) -> None:
        attached = i % 10 == 9
        forward: Any = wrapped if attached else model
        optimizer = OneBitAdam(forward.parameters(), freeze_step=1, overlap=True, bucket_mb=4e-4)
        if attached:
            attach(forward, optimizer)
        for t in range(2):
            forward.zero_grad()
            forward(tokens(t, rank, 2)).backward()
            optimizer.step()
        gone = weakref.ref(optimizer)
        del optimizer
        out["gone"] += gone() is None

    one(9)
    dist.barrier()
    time.sleep(0.5)
    out["before"] = standing(store, [model, wrapped])
    for i in range(TIMES):
        one(i)
    time.sleep(0.5)
    dist.barrier()
    out["after"] = standing(store, [model, wrapped])
    # without an optimizer DDP averages as it does by itself
    wrapped.zero_grad()
    wrapped(tokens(0, rank, 2)).backward()
    out["averaged"] = wrapped.module.weight.grad.tolist()
    return out


def main(rank: int, port: int, folder: str) -> None:
    gc.disable()
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    out = scene_many(rank, store)
    made = [(cls, nn.Linear(3, 2)) for cls in (OneBitAdam, ZeroOneAdam, DiLoCo, Gossip)]
    optimizers = [cls(model.parameters()) for cls, model in made]
    for optimizer, (_, model) in zip(optimizers, made):
        model(torch.full((1, 3), float(rank))).sum().backward()
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()
    out["saved"] = [len(optimizer.state_dict()["state"]) for optimizer in optimizers]
    Path(folder, str(rank)).write_text(json.dumps(out))


@pytest.mark.long
def test_many_optimizers_over_gloo_leave_nothing():
    port = str(free_port())
    with tempfile.TemporaryDirectory() as folder:
        command = [python(), __file__]
        ranks = [subprocess.Popen([*command, str(r), port, folder], stderr=subprocess.PIPE, text=True) for r in (0, 1)]
        try:
            errors = [process.communicate(timeout=240)[1] for process in ranks]
        finally:
            for process in ranks:
                process.kill()
        assert [process.returncode for process in ranks] == [0, 0], errors
        seen = [json.loads(Path(folder, str(r)).read_text()) for r in (0, 1)]
    for out in seen:
        assert out["gone"] == TIMES + 1
        assert out["after"] == out["before"]
        assert out["after"]["hooks"] == 0
        assert out["saved"] == [2, 2, 2, 2]  # when the process group has gone
    assert seen[0]["averaged"] == seen[1]["averaged"]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
