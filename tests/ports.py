"""A port for processes to meet at."""

import contextlib
import random
import socket

RANGE = range(10_000, 30_000)
"""Below those that systems give to connections: one of them could be given away before the processes meet."""


def free_port() -> int:
    """One that nothing listens at on this machine now."""
    draw = random.SystemRandom()  # tests seed the other
    while True:
        port = draw.choice(RANGE)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
