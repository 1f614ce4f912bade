"""Meeting of the ranks that torchrun has started: in a store first, where each can still say that it will not come.

``init_process_group`` alone waits for a rank that was told to stop until its timeout. Here all ranks say in the store
that they are there; the last one, or one that has to leave, settles for all of them what happens.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from commopt.comm import CollectiveError
from commopt.train import started
from commopt.train.errors import ConfigError
from commopt.train.stop import Stopped, StopSignal

LINGER = 20.0
"""Seconds for which a rank that has to leave tries to tell the others; torchrun ends it after 30."""
LOOK = 0.05
"""Seconds between two looks."""
HERE, FATE, READ = (f"commopt/{word}" for word in ("here", "fate", "read"))
GO = b"go"
_JOINED = itertools.count()
"""How often this process has joined others over a store of the agents."""


def join(kind: str, timeout: float, stop: StopSignal) -> None:
    """Make the default process group, of ``kind``, whose collectives have ``timeout`` seconds.

    Raises:
        ConfigError: the launcher's environment is incomplete.
        Stopped: a rank, this or another, was told to stop.
        CollectiveError: not all ranks have come within the timeout.
    """
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"the environment of a launcher is incomplete: {error}; start with torchrun, which sets RANK, WORLD_SIZE, "
            "MASTER_ADDR and MASTER_PORT"
        ) from None
    where = f"the ranks' meeting at {place[0]}:{place[1]}"
    deadline = time.monotonic() + timeout
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    joined = next(_JOINED) if agents else 0
    serves = rank == 0 and not agents
    try:
        store = _while_looking(lambda: _open_store(place, serves, size, timeout), stop)
        # a store of the agents outlives an attempt, and what joins over it, as each rank does equally often; ours does
        # not, and agents that came later count fewer attempts
        attempt = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{joined}" if agents else "0"
        store = dist.PrefixStore(f"/commopt/attempt_{attempt}", store)
        _meet(store, size, serves, deadline, stop, where)
        dist.init_process_group(kind, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
    except CollectiveError:
        raise
    except RuntimeError as error:
        raise CollectiveError(f"{where}: {error}") from error


def _open_store(place: tuple[str, int], serves: bool, size: int, timeout: float) -> Any:
    return dist.TCPStore(
        *place, size, serves, timeout=timedelta(seconds=timeout), wait_for_workers=False, multi_tenant=True
    )


def _while_looking(work: Callable[[], Any], stop: StopSignal) -> Any:
    """``work()``, which may block, in a thread of its own: this one hears signals. After one, it waits a while only."""
    result: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            result.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(LOOK)
        if stop.requested and time.monotonic() > stop.since + LINGER:
            raise Stopped("stopped by a signal, before the ranks had met")
    if errors:
        raise errors[0]
    return result[0]


def _meet(store: Any, size: int, serves: bool, deadline: float, stop: StopSignal, where: str) -> None:
    """Return when all ranks are here; raise Stopped, on all of them, if one has to leave."""
    here = 0 if stop.requested else store.add(HERE, 1)
    while True:
        fate = store.get(FATE) if store.check([FATE]) else b""
        if not fate and (stop.requested or here >= size):
            fate = store.compare_set(FATE, "", f"rank {started.rank()}" if stop.requested else GO.decode())
        if fate == GO:
            return
        if fate:
            _part(store, size, serves)
            raise Stopped(f"stopped by a signal to {fate.decode()}, before the first step")
        if time.monotonic() > deadline:
            raise CollectiveError(f"{where}: {here} of {size} ranks have come in time (comm.timeout)")
        time.sleep(LOOK)
        here = store.add(HERE, 0)


def _part(store: Any, size: int, serves: bool) -> None:
    """Whoever serves the store stays until all have read in it why they end."""
    read, until = store.add(READ, 1), time.monotonic() + LINGER
    while serves and read < size and time.monotonic() < until:
        time.sleep(LOOK)
        read = store.add(READ, 0)
