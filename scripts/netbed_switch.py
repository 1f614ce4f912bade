#!/usr/bin/env python3
"""Latency and loss for scripts/netbed.py: a switch that keeps every frame for a while, and drops some.

Kernels of containers and of small virtual machines often lack netem. So the cables of the hosts do not end at a bridge,
but here: what a host sends is kept for the latency, and goes out where its destination was last heard, or everywhere. A
frame keeps its offloads (checksums, segments), as on the way between two interfaces of the kernel.

    netbed_switch.py SECONDS LOSS FD ...     packet sockets at this end of each host's cable; ends when stdin does

It prints ``READY`` when it is there: hosts that have asked for each other's addresses for three seconds give up.
"""

from __future__ import annotations

import contextlib
import random
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
READY = "ready"
"""What it prints when it is there."""
AT_ONCE = 64
"""Frames that are read of one interface before others have their turn."""
HEADER = 10
"""Bytes of what the kernel says about a frame: struct virtio_net_hdr."""
DESTINATION, SOURCE = slice(HEADER, HEADER + 6), slice(HEADER + 6, HEADER + 12)
"""Addresses in a frame."""


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


class Switch:
    """Between the hosts. What a cable has no room for is lost, as on a network.

    Args:
        cables: this end of each.
        delay: seconds that a frame is kept.
        loss: share of the frames that are dropped; always the same ones of as many.
    """

    def __init__(self, cables: Sequence[socket.socket], delay: float, loss: float = 0.0) -> None:
        self.cables, self.delay, self.loss, self.chance = cables, delay, loss, random.Random(0)
        self.waiting: deque[tuple[float, socket.socket, bytes]] = deque()  # by when it is due
        self.heard: dict[bytes, socket.socket] = {}  # where each address was, last

    def take(self, cable: socket.socket) -> None:
        """Takes what has come over ``cable``."""
        with contextlib.suppress(OSError):  # nothing more; or the interface is down
            for _ in range(AT_ONCE):
                frame = cable.recv(LARGEST)
                if self.chance.random() < self.loss:
                    continue
                self.waiting.append((time.monotonic() + self.delay, cable, frame))

    def give(self) -> float | None:
        """Sends on what is due. Returns the seconds until more is, None if nothing waits."""
        while self.waiting:
            due, source, frame = self.waiting[0]
            if (left := due - time.monotonic()) > 0:
                return left
            self.waiting.popleft()
            self.heard[frame[SOURCE]] = source
            target = self.heard.get(frame[DESTINATION])
            for cable in self.cables if target is None else [target]:
                if cable is not source:
                    with contextlib.suppress(OSError):
                        cable.send(frame)
        return None


def run(switch: Switch) -> None:
    """Until stdin ends."""
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ)
    for cable in switch.cables:
        selector.register(cable, selectors.EVENT_READ, cable)
    while True:
        for key, _ in selector.select(switch.give()):
            if key.data is None:
                return
            switch.take(key.data)


def main() -> None:
    delay, loss, *numbers = sys.argv[1:]
    switch = Switch([socket.socket(fileno=int(number)) for number in numbers], float(delay), float(loss))
    print(READY, flush=True)
    run(switch)


if __name__ == "__main__":
    main()
