"""Asks the server of forks.py for a process, and stands for it: passes signals on, and ends as it ends.

    python -I -S fork_client.py SOCKET ARGUMENT...

Imports as little as it can: it is started often.
"""

import _socket
import contextlib
import marshal
import os
import signal
import sys

PASSED_ON = (
    signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGABRT,
)  # fmt: skip


def receive(server: _socket.socket) -> int:
    """The next number that the server says."""
    data = b""
    while len(data) < 8:
        more = server.recv(8 - len(data))
        if not more:
            sys.exit("fork_client.py: the server has gone")
        data += more
    return int.from_bytes(data, "little", signed=True)


def main() -> None:
    """Be the process."""
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    server.connect(sys.argv[1])
    cores = list(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    request = marshal.dumps((sys.argv[2:], dict(os.environ), os.getcwd(), os.getppid(), cores))
    numbers = [0, 1, 2]
    with contextlib.suppress(OSError):
        numbers.append(os.open("/proc/self/ns/net", os.O_RDONLY))  # its network
    files = b"".join(number.to_bytes(4, sys.byteorder) for number in numbers)
    server.sendmsg([len(request).to_bytes(8, "little")], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, files)])
    server.sendall(request)
    process = receive(server)

    def pass_on(number: int, frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)

    for number in PASSED_ON:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    code = receive(server)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


main()
