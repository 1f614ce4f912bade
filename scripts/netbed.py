#!/usr/bin/env python3
"""Hosts on a network of a chosen speed, on one machine: network namespaces on one bridge, every NIC shaped both ways.

    scripts/netbed.py --hosts 2 --rate 100mbit [--ranks-per-host 1] -- python train.py ...
    scripts/netbed.py --hosts 4 --rate 20mbit --latency 100ms --loss 1% -- python train.py ...
    scripts/netbed.py --hosts 2 --rate 1gbit --check

The command runs once per rank, in its host's namespace and on its host's cores, with the environment that torchrun
would set (RANK, WORLD_SIZE, MASTER_ADDR, ...), so that a script for torchrun runs as it is. Needs root, and ip and tc
(Debian package iproute2); ``unshare --user --map-root-user --net`` is root enough.

Both ends of a host's cable are shaped by a token bucket (tbf): what the host sends at its own end, what it receives at
the bridge. Latency is that of the machine, some 0.05 ms, plus what waits in the buckets; more of it, if asked for, is
made by scripts/netbed_switch.py, in place of the bridge, and so is the loss of packets. TCP hands its packets over in
trains of up to a burst, as to a NIC that segments (one by one where some are lost); the NIC's counters see the headers
once a train. A host can be cut off, and come back.

Nothing can stay behind: namespaces, bridge and interfaces have no names in the system, they exist while a process of
ours holds them; and a guard outlives us just long enough to kill the ranks, even when we are killed ourselves.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from netbed_switch import READY, packet_socket

NIC = "net0"
CLONE_NEWNET = 0x40000000
UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
SLOWEST, FASTEST = 64 * 10**3, 100 * 10**9
MOST_HOSTS = 250  # addresses of one /24
SLOWEST_WAY = 10e3  # ms
MOST_LOSS = 50.0  # %

GUARD = 'while read -r leader; do groups="$groups -$leader"; done; kill -s KILL -- $groups'
"""Reads the process groups of the ranks; when nobody can write to it any more, ends them."""
REGISTER = 'echo $$ >&0; exec "$@" </dev/null'
"""A rank names its group to the guard, on stdin, before it becomes the command."""


class BedError(Exception):
    """A bed that cannot be made; says what to change."""


class NotRoot(BedError):
    """This process may not make network namespaces."""


def parse_rate(text: str) -> int | None:
    """Bits per second of "100mbit", "2.5gbit", ...; None for "none", which is unshaped."""
    if text == "none":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?bit)", text.lower())
    if match is None:
        raise BedError(f'rate {text!r}: expected a number with bit, kbit, mbit or gbit, such as 100mbit, or "none"')
    rate = round(float(match[1]) * UNITS[match[2]])
    if not SLOWEST <= rate <= FASTEST:
        raise BedError(f"rate {text!r}: expected 64kbit to 100gbit")
    return rate


def parse_latency(text: str) -> float:
    """Seconds of "100ms", "0.5ms", ..."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)ms", text.lower())
    if match is None or not float(match[1]) <= SLOWEST_WAY:
        raise BedError(f"latency {text!r}: expected a number with ms, such as 100ms, from 0 to {SLOWEST_WAY:g}ms")
    return float(match[1]) / 1e3


def parse_loss(text: str) -> float:
    """Share of "1%", "0.5%", ..."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)%", text)
    if match is None or not float(match[1]) <= MOST_LOSS:
        raise BedError(f"loss {text!r}: expected a number with %, such as 1%, from 0% to {MOST_LOSS:g}%")
    return float(match[1]) / 100


def burst(rate: int) -> int:
    """Bytes that may go at once on a link of ``rate`` bits per second: 1 ms at full rate, or ten packets."""
    return max(16 * 1024, rate // 8 // 1000)


def tbf(rate: int) -> str:
    """tc's words for a token bucket of ``rate`` bits per second."""
    limit = max(1 << 20, rate // 8 // 20)  # 50 ms wait in the queue, or 1 MB; more is dropped
    return f"root tbf rate {rate}bit burst {burst(rate)} limit {limit}"


class Job:
    """The ranks of one command. ``wait()`` for them; ``close()`` ends what is left of them, their children included."""

    def __init__(self) -> None:
        self.ranks: list[subprocess.Popen[Any]] = []
        read, write = os.pipe()
        with open(read) as inlet:
            self.guard = subprocess.Popen(
                ["sh", "-c", GUARD], stdin=inlet, stderr=subprocess.DEVNULL, start_new_session=True
            )
        self.register = open(write, "w")  # noqa: SIM115

    def wait(self, timeout: float | None = None, grace: float = 5.0) -> int:
        """Exit code of the command: 0, or that of the first rank that failed (128 + n for signal n), 124 on timeout.

        The other ranks get ``grace`` seconds to fail by themselves.
        """
        deadline, code = time.monotonic() + (timeout or float("inf")), 0
        while None in (codes := [rank.poll() for rank in self.ranks]) and time.monotonic() < deadline:
            if code == 0 and any(codes):
                code = failure(codes)
                print(f"netbed: the others have {grace:g} s to end", file=sys.stderr)
                deadline = min(deadline, time.monotonic() + grace)
            time.sleep(0.02)
        if code == 0 and any(codes):
            code = failure(codes)
        elif code == 0 and None in codes:
            print(f"netbed: not finished after {timeout:g} s; ended", file=sys.stderr)
            code = 124
        self.close()
        return code

    def close(self) -> None:
        self.register.close()
        self.guard.wait()
        for rank in self.ranks:
            rank.wait()


def failure(codes: list[int | None]) -> int:
    """Exit code for the first of ``codes`` that is one of failure; says which rank it was."""
    rank, code = next((rank, code) for rank, code in enumerate(codes) if code)
    print(
        f"netbed: rank {rank} " + (f"ended by signal {-code}" if code < 0 else f"exited with {code}"), file=sys.stderr
    )
    return 128 - code if code < 0 else code


class Loopback:
    """Hosts in name only: ranks on their own cores that talk over this machine's loopback. Needs nothing."""

    def __init__(self, hosts: int, ranks_per_host: int = 1, cores_per_host: int | None = None) -> None:
        available = sorted(os.sched_getaffinity(0))
        if not 1 <= hosts <= MOST_HOSTS:
            raise BedError(f"{hosts} hosts: expected 1 to {MOST_HOSTS}")
        if not 1 <= ranks_per_host <= 1000:
            raise BedError(f"{ranks_per_host} ranks per host: expected 1 to 1000")
        count = max(1, len(available) // hosts) if cores_per_host is None else cores_per_host
        if not 1 <= count <= len(available):
            raise BedError(f"{count} cores per host: expected 1 to the {len(available)} of this machine")
        self.hosts, self.ranks_per_host, self.rate = hosts, ranks_per_host, None
        self.cores = [{available[(h * count + i) % len(available)] for i in range(count)} for h in range(hosts)]
        self.interface = "lo"

    def __enter__(self) -> Loopback:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        pass

    def address(self, host: int) -> str:
        return "127.0.0.1"

    @contextlib.contextmanager
    def inside(self, host: int) -> Iterator[None]:
        """This thread on ``host``: what it starts, opens and reads meanwhile is there."""
        yield

    def start(self, command: Sequence[str], **options: Any) -> Job:
        """``command`` once per rank. options: of ``subprocess.Popen``; ``env`` is added to this process' own."""
        with self.inside(0), socket.socket() as s:
            s.bind((self.address(0), 0))
            port = s.getsockname()[1]
        base = {**os.environ, **options.pop("env", {})}
        job, home = Job(), os.sched_getaffinity(0)
        try:
            for rank in range(self.hosts * self.ranks_per_host):
                host = rank // self.ranks_per_host
                with self.inside(host):
                    os.sched_setaffinity(0, self.cores[host])
                    job.ranks.append(
                        subprocess.Popen(
                            ["sh", "-c", REGISTER, "sh", *command],
                            stdin=job.register,
                            start_new_session=True,
                            env=base | self.environment(rank, port),
                            **options,
                        )
                    )
        except BaseException:
            job.close()
            raise
        finally:
            os.sched_setaffinity(0, home)
        return job

    def environment(self, rank: int, port: int) -> dict[str, str]:
        """What torchrun would set for ``rank``, and the interface."""
        host, local = divmod(rank, self.ranks_per_host)
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.hosts * self.ranks_per_host),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(self.ranks_per_host),
            "GROUP_RANK": str(host),
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": self.interface,
            "OMP_NUM_THREADS": str(max(1, len(self.cores[host]) // self.ranks_per_host)),
        }

    def counters(self, host: int) -> dict[str, int]:
        """Bytes and packets that ``host``'s NIC has sent and received."""
        with self.inside(host):
            return read_counters(self.interface)


class NetBed(Loopback):
    """Hosts in network namespaces of their own, on one bridge, at ``rate`` bits per second each way (None: unshaped),
    ``latency`` seconds from each to any other, and ``loss`` of the packets lost on that way, by chance.

    Raises:
        BedError: if it cannot be made; nothing is left then.
    """

    def __init__(
        self,
        hosts: int,
        rate: int | None = None,
        ranks_per_host: int = 1,
        cores_per_host: int | None = None,
        latency: float = 0.0,
        loss: float = 0.0,
    ) -> None:
        super().__init__(hosts, ranks_per_host, cores_per_host)
        self.interface, self.latency, self.loss = NIC, latency, loss
        self.switch: subprocess.Popen[bytes] | None = None
        self.rate = rate  # type: ignore[assignment]
        self.spaces: list[int] = []  # file descriptors of the namespaces: the hosts', then the switch's
        for tool in ("ip", "tc"):
            if shutil.which(tool) is None:
                raise BedError(f"{tool} not found on PATH; it is in the Debian package iproute2, in /usr/sbin")
        try:
            self.spaces = [new_namespace() for _ in range(hosts + 1)]
            self._build()
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        switched = self.latency or self.loss
        with enter(self.spaces[-1]):
            if not switched:
                tool("ip link add bridge type bridge")
                tool("ip link set bridge up")
            for h, space in enumerate(self.spaces[:-1]):
                peer = f"/proc/{os.getpid()}/fd/{space}"
                tool(f"ip link add port{h} type veth peer name {NIC} netns {peer}")
                tool(f"ip link set port{h} {'' if switched else 'master bridge'} addrgenmode none up")
                self._shape(f"port{h}")
            if switched:
                self._start_switch()
        for h, space in enumerate(self.spaces[:-1]):
            with enter(space):
                tool("ip link set lo up")
                tool(f"ip link set {NIC} addrgenmode none up")  # no IPv6: nothing on the wire that nobody sent
                tool(f"ip address add {self.address(h)}/24 dev {NIC}")
                self._shape(NIC)
        self._wait_for_switch()

    def _start_switch(self) -> None:
        cables = [packet_socket(f"port{h}") for h in range(self.hosts)]
        passed = [cable.fileno() for cable in cables]
        command = [sys.executable, str(Path(__file__).with_name("netbed_switch.py"))]
        command += map(str, (self.latency, self.loss, *passed))
        pipe = subprocess.PIPE
        self.switch = subprocess.Popen(command, stdin=pipe, stdout=pipe, pass_fds=passed, start_new_session=True)
        for cable in cables:
            cable.close()

    def _wait_for_switch(self) -> None:
        if self.switch is not None:
            assert self.switch.stdout is not None
            with self.switch.stdout as said:
                if said.readline().decode().strip() != READY:
                    raise BedError(f"scripts/netbed_switch.py ended at once; exit code {self.switch.wait()}")

    def cut(self, host: int) -> None:
        """Pulls the cable of ``host``."""
        with enter(self.spaces[-1]):
            tool(f"ip link set port{host} down")

    def mend(self, host: int) -> None:
        """Puts it in again."""
        with enter(self.spaces[-1]):
            tool(f"ip link set port{host} up")

    def cut_between(self, host: int, other: int) -> None:
        """Drops what two hosts send each other; all else goes on."""
        self._routes("add", host, other)

    def mend_between(self, host: int, other: int) -> None:
        """Drops it no more."""
        self._routes("delete", host, other)

    def _routes(self, change: str, *hosts: int) -> None:
        for host, other in (hosts, hosts[::-1]):
            with self.inside(host):
                tool(f"ip route {change} blackhole {self.address(other)}/32")

    def _shape(self, interface: str) -> None:
        if self.rate is not None:
            # What exceeds the burst is cut into packets by the CPU, 8 ms of a core for 0.7 MB; a NIC does it itself.
            tool(f"ip link set {interface} gso_max_size {min(65536, burst(self.rate) * 9 // 10)}")
            tool(f"tc qdisc replace dev {interface} {tbf(self.rate)}")
        if self.loss:
            tool(f"ip link set {interface} gso_max_segs 1")

    def close(self) -> None:
        if self.switch is not None:
            for pipe in (self.switch.stdin, self.switch.stdout):
                assert pipe is not None
                pipe.close()
            self.switch.wait()
            self.switch = None
        while self.spaces:
            os.close(self.spaces.pop())

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    @contextlib.contextmanager
    def inside(self, host: int) -> Iterator[None]:
        with enter(self.spaces[host]):
            yield

    def goodput(self, seconds: float = 1.0, source: int = 0, target: int = 1) -> float:
        """Bits per second that one TCP connection brings from host to host, headers not counted."""
        with self.inside(source):
            listener = socket.create_server((self.address(source), 0))
        with listener:
            with self.inside(target):
                receiver = socket.create_connection(listener.getsockname())
            sender, _ = listener.accept()
        with receiver, sender:
            until = time.monotonic() + seconds
            flow = threading.Thread(target=pour, args=(sender, until))
            flow.start()
            received, buffer = 0, bytearray(1 << 20)
            receiver.settimeout(seconds)
            with contextlib.suppress(TimeoutError):
                while time.monotonic() < until:
                    received += receiver.recv_into(buffer)
            elapsed = time.monotonic() - until + seconds
        flow.join()
        return 8 * received / elapsed


def pour(sender: socket.socket, until: float) -> None:
    sender.settimeout(0.1)
    with contextlib.suppress(OSError):  # a full queue, or the receiver has gone
        while time.monotonic() < until:
            with contextlib.suppress(TimeoutError):
                sender.send(bytes(1 << 16))


def new_namespace() -> int:
    """File descriptor of a new network namespace, which lives as long as that and the processes inside."""
    with open("/proc/thread-self/ns/net") as home:
        if LIBC.unshare(CLONE_NEWNET):
            reason = os.strerror(ctypes.get_errno())
            raise NotRoot(f"a network namespace needs root (CAP_SYS_ADMIN and CAP_NET_ADMIN): {reason}")
        try:
            return os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        finally:
            set_namespace(home.fileno())


@contextlib.contextmanager
def enter(space: int) -> Iterator[None]:
    """This thread in another network namespace."""
    with open("/proc/thread-self/ns/net") as home:
        set_namespace(space)
        try:
            yield
        finally:
            set_namespace(home.fileno())


def set_namespace(space: int) -> None:
    if LIBC.setns(space, CLONE_NEWNET):
        raise BedError(f"cannot enter a network namespace: {os.strerror(ctypes.get_errno())}")


def tool(line: str) -> None:
    """Run a command of iproute2."""
    done = subprocess.run(shlex.split(line), capture_output=True, text=True)
    if done.returncode:
        raise BedError(f"`{line}` failed: {done.stderr.strip() or f'exit code {done.returncode}'}")


def read_counters(interface: str) -> dict[str, int]:
    """Bytes and packets of ``interface`` in this thread's namespace, from /proc/net/dev."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            values = [int(word) for word in numbers.split()]
            return {"rx_bytes": values[0], "rx_packets": values[1], "tx_bytes": values[8], "tx_packets": values[9]}
    raise BedError(f"no interface {interface!r} here")


def exit_on_signals() -> None:
    """SIGTERM and SIGHUP end this process as SIGINT does: with all that is open being closed."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))


LIBC = ctypes.CDLL(None, use_errno=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], usage="%(prog)s [options] -- COMMAND [ARGUMENT ...]"
    )
    parser.add_argument("--hosts", type=int, default=2, help="number of hosts (default: 2)")
    parser.add_argument("--rate", default="none", help='each way, such as 100mbit; "none": unshaped (default)')
    parser.add_argument("--latency", default="0ms", help="from host to host, one way, such as 100ms (default: 0ms)")
    parser.add_argument("--loss", default="0%", help="of the packets on their way, such as 1%% (default: 0%%)")
    parser.add_argument("--ranks-per-host", type=int, default=1, help="processes on each host (default: 1)")
    parser.add_argument("--cores", type=int, help="cores of each host (default: an equal share, 1 at least)")
    parser.add_argument("--timeout", type=float, help="seconds after which everything is ended")
    parser.add_argument("--grace", type=float, default=5.0, help="seconds that others have once a rank fails")
    parser.add_argument("--check", action="store_true", help="first measure what one TCP connection gets")
    parser.add_argument("command", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.command and not args.check:
        parser.error("expected -- and a command, or --check")
    if args.check and args.hosts < 2:
        parser.error("--check needs 2 hosts")
    exit_on_signals()
    try:
        place = (args.hosts, parse_rate(args.rate), args.ranks_per_host, args.cores)
        with NetBed(*place, parse_latency(args.latency), parse_loss(args.loss)) as bed:
            if args.check:
                print(f"netbed: TCP brings {bed.goodput() / 1e6:.1f} Mbit/s at rate {args.rate}", file=sys.stderr)
            if not args.command:
                return 0
            with contextlib.closing(bed.start(args.command)) as job:
                code = job.wait(args.timeout, args.grace)
            sent = ", ".join(f"{bed.counters(h)['tx_bytes'] / 1e6:.3f}" for h in range(bed.hosts))
            print(f"netbed: MB sent by each host: {sent}", file=sys.stderr)
            return code
    except BedError as error:
        print(f"netbed: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
