"""scripts/netbed.py leaves nothing behind and shapes what it says; scripts/bench_network.py measures on it.

What needs network namespaces is skipped without root or iproute2, and says so.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from bed import NO_BED, needs_bed
from forks import python

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))

import bench_network  # noqa: E402
import bench_probe  # noqa: E402
import netbed  # noqa: E402
import network_report  # noqa: E402


def traces() -> set[str]:
    """Names that network namespaces and interfaces have in this system."""
    return {name for folder in ("/run/netns", "/sys/class/net") if os.path.isdir(folder) for name in os.listdir(folder)}


class Started:
    """Commands of one test, with a mark in their environment by which all that they start is found."""

    def __init__(self) -> None:
        self.mark = f"netbed-{uuid.uuid4().hex}"
        self.processes: list[subprocess.Popen[str]] = []

    def __call__(
        self, script: str, *arguments: str, before: Sequence[str] = (), path: str = "", interpreter: str = ""
    ) -> Any:
        env = {**os.environ, "MARK": self.mark, **({"PATH": path} if path else {})}
        self.processes.append(
            subprocess.Popen(
                [*before, interpreter or sys.executable, str(SCRIPTS / script), *arguments],
                env={**env, "PYTHON_EXEC": interpreter} if interpreter else env,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
            )
        )
        return self.processes[-1]

    def netbed(self, *arguments: str, **options: Any) -> tuple[int, str, str]:
        """Exit code, stdout and stderr."""
        return finish(self("netbed.py", *arguments, **options))

    def running(self) -> list[str]:
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (process / "environ").read_bytes():
                    found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:  # it has just ended, or is not ours
                continue
        return found


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=150)
    assert "Traceback" not in err, err
    return process.returncode, out, err


@pytest.fixture
def start() -> Iterator[Started]:
    """Starts commands; in the end, within 3 s, nothing of them may be left.

    A network namespace without a name and without a process does not exist.
    """
    before, started = traces(), Started()
    yield started
    for process in started.processes:
        process.kill()
        process.communicate(timeout=10)
    until(lambda: not started.running())
    assert started.running() == []
    assert traces() <= before


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Waits for it; an interpreter takes long to start on a busy machine."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)


@pytest.mark.parametrize("rate", ["", "fast", "100", "0mbit", "-1mbit", "1bit", "101gbit", "1e3mbit", "nanmbit"])
def test_a_rate_that_cannot_be_made_is_refused(rate: str) -> None:
    with pytest.raises(netbed.BedError, match="expected"):
        netbed.parse_rate(rate)


def test_rates() -> None:
    assert netbed.parse_rate("none") is None
    assert [netbed.parse_rate(r) for r in ("64kbit", "2.5gbit", "100Mbit")] == [64_000, 2_500_000_000, 100_000_000]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hosts", "0"], "0 hosts: expected 1 to 250"),
        (["--hosts", "251"], "251 hosts: expected 1 to 250"),
        (["--ranks-per-host", "0"], "0 ranks per host: expected 1"),
        (["--cores", "0"], "0 cores per host: expected 1"),
        (["--rate", "1bit"], "rate '1bit': expected 64kbit to 100gbit"),
    ],
)
def test_bad_arguments_are_named(arguments: list[str], message: str, start: Started) -> None:
    code, _, err = start.netbed(*arguments, "--", "true")
    assert code == 2
    assert message in err


def test_missing_tools_are_named(start: Started, tmp_path: Path) -> None:
    code, _, err = start.netbed("--", "true", path=str(tmp_path))
    assert code == 2
    assert "ip not found" in err
    assert "iproute2" in err


def test_missing_root_is_named(start: Started) -> None:
    drop: list[str] = []
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("setpriv not found: cannot give up the capabilities of root")
        drop = ["setpriv", "--bounding-set=-sys_admin,-net_admin", "--inh-caps=-sys_admin,-net_admin"]
    if shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("iproute2 is not installed")
    code, _, err = start.netbed("--", "true", before=drop)
    assert code == 2
    assert "needs root" in err


@needs_bed
def test_a_kernel_without_tbf_is_named(start: Started, tmp_path: Path) -> None:
    fake = tmp_path / "tc"
    fake.write_text("#!/bin/sh\necho 'Error: Specified qdisc kind is unknown.' >&2; exit 2\n")
    fake.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    code, _, err = start.netbed("--rate", "1mbit", "--", "true", path=path)
    assert code == 2
    assert "tbf" in err
    assert "qdisc kind is unknown" in err


@needs_bed
def test_every_rank_is_told_who_it_is(start: Started) -> None:
    words = "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $GLOO_SOCKET_IFNAME"
    arguments = ["--hosts", "3", "--ranks-per-host", "2", "--", "sh", "-c", f"echo {words}; cat /proc/self/net/dev"]
    code, out, _ = start.netbed(*arguments)
    assert code == 0
    told = sorted(line for line in out.splitlines() if line.endswith(netbed.NIC))
    assert told == [f"{rank} {rank % 2} 6 2 10.77.0.1 {netbed.NIC}" for rank in range(6)]
    assert out.count(f" {netbed.NIC}:") == 6  # each sees its NIC


@needs_bed
@pytest.mark.parametrize(("ends", "expected"), [("exit 7", 7), ("kill -9 $$", 137)])
def test_a_rank_that_fails_ends_the_others(start: Started, ends: str, expected: int) -> None:
    body = f"test $RANK = 0 || {ends}; sleep 600 & sleep 600"
    code, _, err = start.netbed("--grace", "0.2", "--", "sh", "-c", body)
    assert code == expected
    assert "rank 1" in err


@needs_bed
def test_a_command_that_hangs_or_does_not_exist(start: Started) -> None:
    code, _, err = start.netbed("--timeout", "0.3", "--", "sleep", "600")
    assert code == 124
    assert "not finished" in err
    code, _, err = start.netbed("--grace", "0.2", "--", "no-such-command")
    assert code == 127


@needs_bed
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_nothing_survives_a_signal(start: Started, number: signal.Signals) -> None:
    process = start("netbed.py", "--", "sh", "-c", "trap '' INT TERM HUP; sleep 600 & sleep 600")
    until(lambda: sum(line.startswith("sleep") for line in start.running()) == 4)
    assert sum(line.startswith("sleep") for line in start.running()) == 4
    process.send_signal(number)
    code, _, _ = finish(process)
    assert code == (-number if number == signal.SIGKILL else 128 + number)


@needs_bed
def test_a_nic_is_as_fast_as_it_was_asked_to_be() -> None:
    with netbed.NetBed(2) as free, netbed.NetBed(3, 20 * 10**6) as bed:
        assert free.goodput(0.3) > 200e6
        before = bed.counters(0)["tx_bytes"]
        assert 12e6 < bed.goodput(0.5) < 20e6
        assert bed.counters(0)["tx_bytes"] - before > 0.5 * 12e6 / 8
        with ThreadPoolExecutor() as pool:
            for pairs in ([(0, 2), (1, 2)], [(0, 1), (0, 2)]):  # two hosts into one, one host into two
                assert 12e6 < sum(pool.map(lambda pair: bed.goodput(1.0, *pair), pairs)) < 30e6  # or 40e6


def test_methods_are_measured_side_by_side(start: Started, tmp_path: Path) -> None:
    arguments = [
        "--methods",
        "none,ddp,onebit_adam,zero_one_adam_4",
        "--rate",
        "1gbit",
        "--rounds",
        "2",
        "--seconds",
        "0.02",
    ]
    arguments += ["--layers", "1", "--width", "64", "--vocab", "512", "--sequence", "16", "--timeout", "120"]
    arguments += ["--json", str(tmp_path / "figures.json"), "--png", str(tmp_path / "figures.png")]
    code, out, err = finish(start("bench_network.py", *arguments, interpreter=python()))
    assert code == 0, err
    (run,) = json.loads((tmp_path / "figures.json").read_text())["runs"]
    if NO_BED:
        assert run["bed"] == "loopback"
        assert "LOOPBACK" in out
        assert "LOOPBACK" in err
    methods, payload = run["methods"], 4 * run["parameters"]  # 2 ranks each send as many bytes as the parameters have
    assert methods["none"]["collectives"] == 0
    assert methods["none"]["bytes_per_host"] < 0.02 * payload
    assert payload < methods["ddp"]["bytes_per_host"] < 1.2 * payload
    assert payload / 32 < methods["onebit_adam"]["bytes_per_host"] < payload / 16
    assert methods["onebit_adam"]["collectives"] >= 3
    assert methods["zero_one_adam_4"]["bytes_per_host"] < 0.4 * methods["onebit_adam"]["bytes_per_host"]
    assert run["rounds_used"] in (1, 2)  # a round that others disturb does not count
    assert all(len(m["seconds"]) == run["rounds_used"] and m["to_bound"] > 0 for m in methods.values())
    assert all(m["cpu_seconds"] > 0 and m["busy_share"] >= 0 for m in methods.values())  # a block is two ticks long
    assert (tmp_path / "figures.png").read_bytes().startswith(b"\x89PNG")


def test_processor_time_is_told_per_step_of_a_rank_and_as_a_share_of_all_cores() -> None:
    cores = os.cpu_count() or 1
    block = {"seconds": 0.5, "bytes": 1e6, "block": 5.0, "busy": 4.0 * cores, "steps": 10}
    ranks = [{"none": [block | {"own": own}]} for own in (2.0, 4.0)]
    method = bench_network.summarise(ranks, netbed.Loopback(1, 2), tokens=64)["none"]
    assert method["cpu_seconds"] == pytest.approx(0.3)  # 0.2 and 0.4 s a step
    assert method["busy_share"] == pytest.approx(0.8)


def test_the_page_is_made_from_the_figures(tmp_path: Path) -> None:
    method = {"label": "Some", "seconds_median": 0.25, "to_none": 1.5, "to_bound": 1.25, "bytes_per_host": 2e6}
    run = {"hosts": 2, "cores": 2, "ranks_per_host": 1, "bed": "namespaces", "parameters": 5e6, "others_share": 0.0}
    runs = [run | {"rate": rate, "methods": {"some": method | {"collectives": 3}}} for rate in ("1gbit", "none")]
    page = tmp_path / "speed.md"
    page.write_text(f"before\n{network_report.BEGIN}\nold\n{network_report.END}\nafter\n")
    network_report.update_page(network_report.summary(runs), page)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "250 ms, 1.50 x, 1.25 x" in text
    assert "2.00 MB, 3" in text
    assert "old" not in text
    page.write_text("no markers")
    with pytest.raises(SystemExit, match="has no"):
        network_report.update_page(network_report.summary(runs), page)


def test_runs_on_other_numbers_of_hosts_have_columns_of_their_own() -> None:
    def run(hosts: int, rate: str, seconds: float) -> dict[str, Any]:
        method = {"seconds_median": seconds, "bytes_per_host": hosts * 1e6, "to_ddp": 1.0, "to_none": 2.0}
        return {
            "hosts": hosts, "rate": rate, "bed": "namespaces", "rounds": 4, "rounds_used": 2, "others_share": 0.0,
            "command": f"measure --hosts {hosts}", "methods": {"ddp": method | {"label": "DDP"}},
        }  # fmt: skip

    against = ("ddp", "none", "DDP")
    one = network_report.by_rate([run(2, "1gbit", 0.5), run(2, "100mbit", 1.0)], *against)
    assert one.startswith("| | 1gbit | 100mbit | MB a host | DDP's by |")
    both = network_report.by_rate([run(2, "1gbit", 0.5), run(4, "1gbit", 1.0)], *against)
    assert "| | 2 hosts, 1gbit | 4 hosts, 1gbit | MB a host of 2 | MB a host of 4 | DDP's by |" in both
    assert "| DDP | 500 ms, 1.00 x, 2.00 x | 1000 ms, 1.00 x, 2.00 x | 2.000 | 4.000 | 1.0 |" in both
    assert "measure --hosts 2\nmeasure --hosts 4" in both


def by_rate(against: tuple[str, str, str], runs: list[dict[str, Any]]) -> str:
    return network_report.by_rate(runs, *against)


@pytest.mark.parametrize(
    ("figures", "page", "made"),
    [
        ("network.json", "speed.md", network_report.summary),
        *((figures, page, partial(by_rate, against)) for figures, page, against in network_report.BY_RATE),
    ],
)
def test_the_pages_that_are_committed_have_the_figures_that_are(figures: str, page: str, made: Any) -> None:
    runs = json.loads((SCRIPTS.parent / "benchmarks" / figures).read_text())["runs"]
    assert made(runs) in (SCRIPTS.parent / "docs" / page).read_text()


def test_what_the_probe_has_predicted_is_on_its_page() -> None:
    measured = [run for beds in bench_probe.BEDS for run in bench_probe.measured(beds)]
    predicted = json.loads(bench_probe.PREDICTED.read_text())["runs"]
    text = bench_probe.table(measured, predicted)
    assert text in bench_probe.PAGE.read_text()
    assert bench_probe.table(measured, [*predicted, {**predicted[0], "hosts": 99}]) == text  # not measured
    assert all(f"{bench_probe.place_of(run)} | DDP, AdamW |" in text for run in predicted)
    for guess in predicted:
        (run,) = (run for run in measured if bench_probe.place_of(run) == bench_probe.place_of(guess))
        left_out = {name for name in run["methods"] if name not in guess["seconds"]}
        assert all(name.startswith(("fsdp", "ddp_powersgd")) or name.endswith("_bare") for name in left_out), left_out


@pytest.mark.long
@needs_bed
def test_of_hosts_as_nodes_and_of_sharded_models_only_one_share_leaves_a_host(start: Started, tmp_path: Path) -> None:
    methods = "onebit_adam,onebit_adam_nodes,hsdp,hsdp_onebit_adam"
    arguments = ["--methods", methods, "--rate", "1gbit", "--ranks-per-host", "2"]
    arguments += ["--layers", "1", "--width", "64", "--vocab", "4096", "--sequence", "16", "--rounds", "2"]
    arguments += ["--seconds", "0.02", "--timeout", "120", "--json", str(tmp_path / "figures.json")]
    code, _, err = finish(start("bench_network.py", *arguments, interpreter=python()))
    assert code == 0, err
    (run,) = json.loads((tmp_path / "figures.json").read_text())["runs"]
    flat, nodes, hsdp, sharded = (run["methods"][name]["bytes_per_host"] for name in methods.split(","))
    payload = 4 * run["parameters"]  # each way, both ranks of a host send 1 / 32 of it to the other host
    assert 2 * payload / 32 < flat < 2.4 * payload / 32
    assert payload / 32 < nodes < 1.3 * payload / 32
    assert 1.8 < flat / nodes < 2.05
    assert payload < hsdp < 1.2 * payload
    assert payload / 32 < sharded < 1.3 * payload / 32  # what FSDP sends stays in the host


# latency, and a host that is cut off ----------------------------------------------------------------------------------


@pytest.mark.parametrize("latency", ["", "100", "-1ms", "1s", "10001ms", "nanms"])
def test_a_latency_that_cannot_be_made_is_refused(latency: str) -> None:
    with pytest.raises(netbed.BedError, match=r"latency .*expected a number with ms"):
        netbed.parse_latency(latency)


def connection(bed: netbed.NetBed) -> tuple[socket.socket, socket.socket]:
    """From host 1 to host 0."""
    with bed.inside(0):
        listener = socket.create_server((bed.address(0), 0))
    with listener, bed.inside(1):
        there = socket.create_connection(listener.getsockname())
        here, _ = listener.accept()
    for end in (here, there):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.settimeout(20)
    return here, there


@needs_bed
def test_what_is_sent_comes_whole_and_after_the_latency() -> None:
    with netbed.NetBed(2, 200 * 10**6, latency=0.03) as bed:
        here, there = connection(bed)
        with here, there:
            ways = []
            for _ in range(5):
                began = time.monotonic()
                here.sendall(b"x")
                there.recv(1)
                ways.append(time.monotonic() - began)
            assert 0.03 <= min(ways) < 0.06
            sent = random.Random(0).randbytes(1 << 20)
            with ThreadPoolExecutor(1) as pool:
                pool.submit(here.sendall, sent)
                with there.makefile("rb") as file:
                    received = file.read(len(sent))
        assert received == sent
        switch = bed.switch
        assert switch is not None
        assert switch.poll() is None
    assert switch.poll() == 0


@pytest.mark.parametrize("loss", ["", "1", "-1%", "51%", "nan%"])
def test_a_loss_that_cannot_be_made_is_refused(loss: str) -> None:
    with pytest.raises(netbed.BedError, match=r"loss .*expected a number with %"):
        netbed.parse_loss(loss)


@needs_bed
def test_of_packets_that_are_sent_one_by_one_a_share_is_lost() -> None:
    with netbed.NetBed(2, loss=0.25) as bed:
        with bed.inside(0):
            sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with bed.inside(1):
            receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            receiver.bind((bed.address(1), 0))
        with sender, receiver:
            receiver.settimeout(1)
            came = 0
            for _ in range(400):
                sender.sendto(b"x", receiver.getsockname())
                time.sleep(0.001)
            with contextlib.suppress(TimeoutError):
                while receiver.recv(1):
                    came += 1
    assert 230 < came < 370  # 300 expected; 4 sigma are 35, and the hosts' asking for addresses may lose some more


@needs_bed
def test_hosts_are_there_when_the_switch_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that nobody answers says that there is no route, after 3 s."""
    slow = tmp_path / "python"
    slow.write_text(f'#!/bin/sh\nsleep 4\nexec {sys.executable} "$@"\n')
    slow.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow))
    with netbed.NetBed(2, latency=0.01) as bed:
        for end in connection(bed):
            end.close()


@needs_bed
def test_a_switch_that_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(netbed.BedError, match=r"netbed_switch\.py ended at once; exit code 1"):
        netbed.NetBed(2, latency=0.01)


@needs_bed
@pytest.mark.parametrize("latency", [0.0, 0.01])
def test_a_host_that_was_cut_off_comes_back_and_what_was_on_its_way_arrives(latency: float) -> None:
    with netbed.NetBed(2, latency=latency) as bed:
        here, there = connection(bed)
        with here, there:
            bed.cut(0)
            here.sendall(b"late")
            there.settimeout(0.3)
            with pytest.raises(TimeoutError):
                there.recv(4)
            bed.mend(0)
            there.settimeout(20)
            assert there.recv(4) == b"late"
