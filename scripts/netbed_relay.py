#!/usr/bin/env python3
"""Latency for scripts/netbed.py: takes frames from interfaces to others, some of them after a while.

Kernels of containers and of small virtual machines often lack netem. So a host's cable does not end at the bridge, but
here: what the host sends is kept for the latency, and goes on to the bridge; what comes from there goes to the host at
once. A frame keeps its offloads (checksums, segments), as on the way between two interfaces of the kernel.

    netbed_relay.py SECONDS FD,FD ...     packet sockets at the host's and at the bridge's end; ends when stdin does
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence

ETH_P_ALL = 3
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
LARGEST = 1 << 17
"""Bytes of a frame that the kernel has not cut into packets yet, and of what it says about it; not more than half."""
AT_ONCE = 64
"""Frames that are read of one interface before others have their turn."""


def packet_socket(interface: str) -> socket.socket:
    """What ``interface`` receives, and a way to send there; in this thread's network namespace."""
    found = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    found.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    found.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    for direction in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        found.setsockopt(socket.SOL_SOCKET, direction, 8 << 20)
    found.bind((interface, ETH_P_ALL))
    found.setblocking(False)
    return found


class Way:
    """From one interface to another, ``delay`` seconds later. What that has no room for is lost, as on a network."""

    def __init__(self, source: socket.socket, target: socket.socket, delay: float) -> None:
        self.source, self.target, self.delay = source, target, delay
        self.waiting: deque[tuple[float, bytes]] = deque()

    def take(self) -> None:
        """Takes what has come."""
        with contextlib.suppress(OSError):  # nothing more; or the interface is down
            for _ in range(AT_ONCE):
                frame = self.source.recv(LARGEST)
                self.waiting.append((time.monotonic() + self.delay, frame))

    def give(self) -> float | None:
        """Sends on what is due. Returns the seconds until more is, None if nothing waits."""
        while self.waiting:
            due, frame = self.waiting[0]
            if (left := due - time.monotonic()) > 0:
                return left
            self.waiting.popleft()
            with contextlib.suppress(OSError):
                self.target.send(frame)
        return None


def relay(cables: Sequence[tuple[socket.socket, socket.socket]], delay: float) -> None:
    """Until stdin ends. ``cables``: the ends at a host and at the bridge."""
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ)
    ways = []
    for host, bridge in cables:
        for way in (Way(host, bridge, delay), Way(bridge, host, 0.0)):
            ways.append(way)
            selector.register(way.source, selectors.EVENT_READ, way)
    while True:
        waits = [left for way in ways if (left := way.give()) is not None]
        for key, _ in selector.select(min(waits, default=None)):
            if key.data is None:
                return
            key.data.take()


def main() -> None:
    delay, *pairs = sys.argv[1:]
    ends = [[socket.socket(fileno=int(number)) for number in pair.split(",")] for pair in pairs]
    relay([(host, bridge) for host, bridge in ends], float(delay))


if __name__ == "__main__":
    main()
