"""A port for processes to meet at."""

import socket


def free_port() -> int:
    """One that nothing listens at on this machine now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
