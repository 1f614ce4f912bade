"""torch.cuda for devices that are the CPU (device.cpp), and ranks on threads with a device each. To be imported first,
in a process that was started with that library preloaded."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.cuda
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

_spec = importlib.util.spec_from_file_location("fakecuda", os.environ["FAKE_CUDA"])
assert _spec is not None
assert _spec.loader is not None
fake: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fake)


def _index(device: Any = None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return fake.current() if index is None else index


class Stream:
    """One for each device; what is on it is done."""

    cuda_stream = 0

    def __init__(self, device: Any = None, **_: Any) -> None:
        self.device = torch.device("cuda", _index(device))

    def __getattr__(self, name: str) -> Callable[..., bool]:
        if name in ("synchronize", "wait_stream", "wait_event", "record_event", "query"):
            return lambda *_: True
        raise AttributeError(name)


class Device(contextlib.ContextDecorator):
    """``torch.cuda.device``."""

    def __init__(self, device: Any) -> None:
        self._device = _index(device)

    def __enter__(self) -> None:
        self._before = fake.current()
        fake.set_current(self._device)

    def __exit__(self, *_: Any) -> None:
        fake.set_current(self._before)


@contextlib.contextmanager
def _on(stream: Any) -> Iterator[None]:
    yield


_generators = tuple(fake.default_generator(i) for i in range(fake.devices))
for _name, _value in {
    "_lazy_init": lambda: None,
    "_is_in_bad_fork": lambda: False,
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "is_current_stream_capturing": lambda: False,
    "device_count": lambda: fake.devices,
    "current_device": fake.current,
    "set_device": lambda device: fake.set_current(_index(device)),
    "get_device_name": lambda device=None: "fake",
    "get_device_capability": lambda device=None: (9, 0),
    "synchronize": lambda device=None: None,
    "device": Device,
    "Stream": Stream,
    "current_stream": Stream,
    "default_stream": Stream,
    "stream": _on,
    "default_generators": _generators,
    "get_rng_state": lambda device="cuda": _generators[_index(device)].get_state(),
    "set_rng_state": lambda state, device="cuda": _generators[_index(device)].set_state(state),
    "manual_seed": lambda seed: _generators[fake.current()].manual_seed(seed),
    "manual_seed_all": lambda seed: [g.manual_seed(seed) for g in _generators],
}.items():
    setattr(torch.cuda, _name, _value)


def _moved(storage: Any, *, device: Any, non_blocking: bool = False) -> Any:
    there = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return there.to(device).untyped_storage()


torch.storage._StorageBase.to = _moved  # type: ignore[method-assign]

from commopt.comm import ThreadBackend, ThreadWorld  # noqa: E402


class Anywhere(ThreadBackend):
    """Sends from any device: messages go through the CPU."""

    def _start(self, collective: str, give: Tensor, finish: Callable[[Any], None], src: Any = None) -> Any:
        if collective == "exchange":
            return super()._start(collective, give, finish, src)
        home = give.device
        with _disable_current_modes():
            given = give.cpu()
        return super()._start(collective, given, lambda posts: finish([p.to(home) for p in posts]), src)


class Nccl(Anywhere):
    """Sends from the device of its rank alone."""

    devices = ("cuda",)

    def _start(self, collective: str, give: Tensor, finish: Callable[[Any], None], src: Any = None) -> Any:
        if collective != "exchange" and give.device != torch.device("cuda", self.members[self.rank]):
            raise RuntimeError(f"rank {self.members[self.rank]} gives {collective} a tensor on {give.device}")
        return super()._start(collective, give, finish, src)


def on_devices(world_size: int, fn: Callable[[Any], Any], backend_of: type[ThreadBackend] = Nccl) -> list[Any]:
    """``fn(backend)`` on a thread for each rank, whose current device is its own; what each gives."""
    world = ThreadWorld(world_size)

    def main(backend: ThreadBackend) -> Any:
        torch.cuda.set_device(backend.rank)
        return fn(backend_of(world, backend.rank))

    return world.run(main)
