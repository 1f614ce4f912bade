"""Members on threads: each view is a world of threads of its own."""

from __future__ import annotations

import threading

from commopt.comm import ThreadBackend, ThreadWorld


class Rendezvous:
    """``connect=`` of members that are threads of this process."""

    def __init__(self) -> None:
        self.worlds: dict[str, ThreadWorld] = {}
        self.lock = threading.Lock()

    def __call__(self, store, name, rank, world_size, timeout):
        with self.lock:
            world = self.worlds.setdefault(name, ThreadWorld(world_size, timeout))
        return ThreadBackend(world, rank)
