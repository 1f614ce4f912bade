"""Several machines: the scripts start what docs/recipes.md says, and that trains; Slurm's signals stop and requeue.

The scripts run as they are, in a copy of the repository whose Python writes down what it should have started; Slurm's
commands are small scripts that do what Slurm would.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forks import python
from ports import free_port

from commopt.train.checkpoint import list_steps
from commopt.train.metrics import read_metrics

ROOT = Path(__file__).parents[1]
DOCUMENTED = re.findall(
    r"^torchrun --nnodes=.*", (ROOT / "docs/recipes.md").read_text().replace("\\\n", ""), re.MULTILINE
)

PYTHON = """
case "$1 $2" in
"-c import sys, yaml"*) exec "$YAML_PYTHON" -c "$2" ;;
"-c "*) echo 8 ;;
"-m commopt")
    if [ -n "${MISTAKE:-}" ]; then echo "commopt: error: $MISTAKE" >&2; exit 2; fi
    echo "$*" >>"$LOG/checked"
    resume=null; for word in "$@"; do case "$word" in --resume=*) resume="${word#*=}" ;; esac; done
    echo "resume: $resume"
    printf 'train:\n  run_dir: runs/a [b]\n' ;;
"-m commopt.train.launcher")
    printf '%s\\n' "$@" >"$LOG/launch-${COMMOPT_MACHINE:-}"
    printf '%s\\n' "${GLOO_SOCKET_IFNAME:-}" >"$LOG/environment-${COMMOPT_MACHINE:-}"
    if [ -n "${TRAINER:-}" ]; then bash -c "$TRAINER" & wait $!; fi ;;
esac
"""
"""Counts 8 GPUs; in place of torchrun, starts what the test wants instead of the trainers."""

SRUN = """
source scripts/env.sh
for word in "$@"; do case "$word" in --nodes=*) nodes="${word#*=}" ;; esac; done
while [[ "$1" == --* ]]; do echo "$1" >>"$LOG/srun"; shift; done
for node in $(seq 0 $((nodes - 1))); do SLURM_NODEID=$node "$@" & pids="${pids:-} $!"; done
trap 'kill -USR1 $pids' USR1
status=0
for pid in $pids; do wait_for $pid || status=$?; done
exit $status
"""
"""Runs its command once for each machine, on this one, and hands SIGUSR1 on."""

SCONTROL = """
echo "$*" >>"$LOG/scontrol"
if [ "$1 $2" = "show hostnames" ]; then printf '%s\\n' ${HOSTS:-node7 node9}; fi
"""


class Cluster:
    """A copy of the scripts, the commands they need, and what was started."""

    def __init__(self, folder: Path) -> None:
        self.root, self.log = folder / "repository", folder / "log"
        shutil.copytree(ROOT / "scripts", self.root / "scripts")
        for name in ("constraints.txt", "pyproject.toml", "setup.py"):
            (self.root / name).write_text("")
        for sub in ("kernels", "configs"):
            (self.root / sub).mkdir()
        self.log.mkdir()
        self.command(self.root / ".venv/bin/python", PYTHON)
        self.command(folder / "bin/srun", SRUN)
        self.command(folder / "bin/scontrol", SCONTROL)
        mine = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "COMMOPT_"))}
        path = f"{folder / 'bin'}:{os.environ['PATH']}"
        self.env = {**mine, "PATH": path, "LOG": str(self.log), "YAML_PYTHON": sys.executable}
        self.job = {"SLURM_JOB_ID": "123456", "SLURM_JOB_NODELIST": "node[7,9]", "SLURM_SUBMIT_DIR": str(self.root)}

    @staticmethod
    def command(path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/usr/bin/env bash\n{text}")
        path.chmod(0o755)

    def start(self, script: str, *words: str, **env: str) -> subprocess.Popen[str]:
        command = ["bash", str(self.root / "scripts" / script), *words]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, env={**self.env, **env}, cwd=self.root, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )

    def run(self, script: str, *words: str, **env: str) -> tuple[int, str]:
        """Exit code and standard error."""
        process = self.start(script, *words, **env)
        error = process.communicate(timeout=30)[1]
        return process.returncode, error

    def started(self, machine: str) -> list[str]:
        """Arguments of torchrun on a machine."""
        return (self.log / f"launch-{machine}").read_text().splitlines()[2:]

    def calls(self, command: str) -> list[str]:
        return (self.log / command).read_text().splitlines() if (self.log / command).exists() else []


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def documented(machine: int, host: str, port: int, *words: str) -> list[str]:
    """torchrun's arguments on a machine as the recipes have them, the trainer's replaced."""
    [line] = [line for line in DOCUMENTED if f"--node-rank={machine} " in line]
    command = shlex.split(line.replace("HOST", host).replace("29500", str(port)))
    return [*command[1 : command.index("train") + 1], *words]


WORDS = ("configs/some config.yaml", "--optim.args={freeze_step: 5}", "--train.run_dir=runs/a [b]")


def test_one_machine_stands_alone(cluster: Cluster) -> None:
    assert cluster.run("pretrain.sh", *WORDS) == (0, "")
    assert cluster.started("") == ["--standalone", "--nproc-per-node=8", "-m", "commopt", "train", *WORDS]


QUICK = "configs/gpt_quick.yaml"
"""Trained where the words name no config."""

NAMED = [
    ("pretrain.sh", [], True),
    ("pretrain.sh", ["--optim.lr", "1e-4", "--train.steps=3"], True),
    ("pretrain.sh", ["--optim.lr=1e-4", "mine.yaml"], False),
    ("pretrain.sh", ["--optim.lr", "1e-4", "mine.yaml"], False),
    ("pretrain.sh", ["--config=mine.yaml"], False),
    ("slurm.sh", [], True),
    ("slurm.sh", ["--optim.lr=1e-4"], True),
    ("slurm.sh", ["--optim.lr=1e-4", "--config", "mine.yaml"], False),
]


@pytest.mark.parametrize(("script", "words", "quick"), NAMED, ids=[" ".join([one, *words]) for one, words, _ in NAMED])
def test_a_config_of_ones_own_is_trained_as_it_is_and_else_the_quick_one(
    cluster: Cluster, script: str, words: list[str], quick: bool
) -> None:
    """What is checked before is what is trained."""
    job = {**cluster.job, "HOSTS": "node7"} if script == "slurm.sh" else {}
    assert cluster.run(script, *words, **job) == (0, "")
    trained = [*([f"{cluster.root}/{QUICK}"] if quick else []), *words]
    launched = cluster.started("0" if job else "")
    assert launched[launched.index("train") + 1 :] == trained
    assert set(cluster.calls("checked")) == {" ".join(["-m commopt train", *trained, "--print_config"])}


def test_pretrain_starts_what_the_recipes_say_on_each_machine(cluster: Cluster) -> None:
    for machine in (0, 1):
        env = {"COMMOPT_MACHINES": "2", "COMMOPT_MACHINE": str(machine), "COMMOPT_MASTER": "10.0.0.1:4567"}
        assert cluster.run("pretrain.sh", *WORDS, **env) == (0, "")
        assert cluster.started(str(machine)) == documented(machine, "10.0.0.1", 4567, *WORDS)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({}, "COMMOPT_MACHINES=2 needs COMMOPT_MACHINE: 0, 1, ..."),
        ({"COMMOPT_MACHINE": "1"}, "COMMOPT_MACHINES=2 needs COMMOPT_MASTER=HOST:PORT"),
        ({"COMMOPT_MACHINE": "1", "COMMOPT_MASTER": "host"}, "COMMOPT_MACHINES=2 needs COMMOPT_MASTER=HOST:PORT"),
    ],
)
def test_what_a_machine_must_be_told(cluster: Cluster, env: dict[str, str], message: str) -> None:
    assert cluster.run("pretrain.sh", COMMOPT_MACHINES="2", **env) == (1, f"pretrain.sh: {message}\n")
    assert not list(cluster.log.iterdir())


@pytest.mark.parametrize("name", ["COMMOPT_PROCESSES", "COMMOPT_MACHINES"])
@pytest.mark.parametrize("value", ["0", "-1", "1.5", "two", "2 "])
def test_a_number_of_processes_or_machines_that_is_none_is_named(cluster: Cluster, name: str, value: str) -> None:
    said = f"{name}={value} is not allowed: it must be a whole number >= 1\n"
    assert cluster.run("pretrain.sh", **{name: value}) == (1, f"pretrain.sh: {said}")
    if name == "COMMOPT_PROCESSES":  # of machines Slurm has its own number
        assert cluster.run("slurm.sh", **cluster.job, **{name: value}) == (1, f"slurm.sh: {said}")
    assert not list(cluster.log.iterdir())


def test_as_many_processes_as_are_asked_for(cluster: Cluster) -> None:
    assert cluster.run("pretrain.sh", *WORDS, COMMOPT_PROCESSES="3", COMMOPT_MACHINES="1") == (0, "")
    assert cluster.started("") == ["--standalone", "--nproc-per-node=3", "-m", "commopt", "train", *WORDS]


def test_slurm_starts_one_torchrun_per_machine(cluster: Cluster) -> None:
    assert cluster.run("slurm.sh", *WORDS, **cluster.job, GLOO_SOCKET_IFNAME="eth1") == (0, "")
    assert cluster.calls("scontrol") == ["show hostnames node[7,9]"]
    srun = cluster.calls("srun")
    assert {"--nodes=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "--cpu-bind=none"} == set(srun)
    for machine in (0, 1):
        assert cluster.started(str(machine)) == documented(machine, "node7", 23456, *WORDS)
        assert cluster.calls(f"environment-{machine}") == ["eth1"]


def test_slurm_with_one_machine_needs_no_address(cluster: Cluster) -> None:
    assert cluster.run("slurm.sh", *WORDS, **cluster.job, HOSTS="node7") == (0, "")
    assert cluster.started("0") == ["--standalone", "--nproc-per-node=8", "-m", "commopt", "train", *WORDS]


@pytest.mark.parametrize("given", ["--resume=elsewhere", None])
@pytest.mark.parametrize("others", [(), ("step-00000003", "step-00000004")])
@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_slurm_starts_again_where_it_was(
    cluster: Cluster, given: str | None, others: tuple[str, ...], has_checkpoint: bool
) -> None:
    """From the checkpoint that was given, or the beginning, as long as the run has none of its own; ``others`` were
    there before the job."""
    words = (*WORDS, *([given] if given else []))
    folder = cluster.root / "runs/a [b]/checkpoints"
    for name in others:
        (folder / name).mkdir(parents=True)
    assert cluster.run("slurm.sh", *words, **cluster.job) == (0, "")
    assert cluster.started("1")[-len(words) :] == list(words)
    if others:  # the run has begun at step 3
        (folder / others[-1]).rename(folder / f"discarded-{others[-1]}")
    if has_checkpoint:
        (folder / (others[-1] if others else "step-00000005")).mkdir(parents=True)
    assert cluster.run("slurm.sh", *words, **cluster.job, SLURM_RESTART_COUNT="1", MASTER_PORT="5000") == (0, "")
    added = ["--resume=auto"] if has_checkpoint else []  # the last one counts
    assert cluster.started("1") == documented(1, "node7", 5000, *words, *added)


def test_slurm_says_what_is_wrong_before_it_starts_anything(cluster: Cluster, tmp_path: Path) -> None:
    code, error = cluster.run("slurm.sh", *WORDS)
    assert (code, error.startswith("slurm.sh: not in a Slurm job: sbatch ")) == (1, True)
    elsewhere = {**cluster.job, "SLURM_SUBMIT_DIR": str(tmp_path)}
    message = f"slurm.sh: submit it in the repository's folder, not in {tmp_path}\n"
    assert cluster.run("slurm.sh", *WORDS, **elsewhere) == (1, message)
    assert cluster.run("slurm.sh", *WORDS, **cluster.job, MISTAKE="a typo") == (2, "commopt: error: a typo\n")
    assert not list(cluster.log.iterdir())


TRAINER = """
trap 'sleep 0.3; echo "stopped $COMMOPT_MACHINE" >>"$LOG/trainers"; exit' TERM
kill -USR1 $$ $PPID  # as a batch system may do to every process of a job
echo "started $COMMOPT_MACHINE" >>"$LOG/trainers"
for _ in $(seq 600); do sleep 0.05; done
"""
"""Waits for a SIGTERM, half a minute at most."""


def test_slurm_stops_the_trainers_in_time_and_requeues(cluster: Cluster) -> None:
    job = cluster.start("slurm.sh", *WORDS, **cluster.job, TRAINER=TRAINER)
    until = time.monotonic() + 30
    while len(cluster.calls("trainers")) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    job.send_signal(signal.SIGUSR1)  # what --signal=B:USR1@300 sends
    assert job.communicate(timeout=30)[1] == ""
    assert job.returncode == 0
    assert sorted(cluster.calls("trainers")) == ["started 0", "started 1", "stopped 0", "stopped 1"]
    assert cluster.calls("scontrol") == ["show hostnames node[7,9]", "requeue 123456"]


@pytest.mark.parametrize("code", [0, 3])
def test_waiting_ends_with_the_status_of_the_child(code: int) -> None:
    """Also when signals interrupt it."""
    lines = [
        f"source {ROOT}/scripts/env.sh",
        "trap : USR1",
        f"(for _ in 1 2 3; do sleep 0.1; kill -USR1 $$; done; sleep 0.3; exit {code}) &",
        "wait_for $!",
    ]
    assert subprocess.run(["bash", "-c", "\n".join(lines)], check=False).returncode == code


def test_slurm_reports_a_failure_and_does_not_requeue(cluster: Cluster) -> None:
    assert cluster.run("slurm.sh", *WORDS, **cluster.job, TRAINER="exit 7") == (7, "")
    assert cluster.calls("scontrol") == ["show hostnames node[7,9]"]


def test_the_script_asks_slurm_for_what_it_relies_on() -> None:
    asked = set(re.findall(r"^#SBATCH (.*)$", (ROOT / "scripts/slurm.sh").read_text(), re.MULTILINE))
    assert {"--ntasks-per-node=1", "--signal=B:USR1@300", "--requeue", "--open-mode=append"} <= asked


def test_the_lines_of_the_recipes_train_on_two_machines(corpus: Path, tmp_path: Path) -> None:
    """Two torchruns on this machine, one process each."""
    port = free_port()
    words = [
        str(ROOT / "configs/bert_large_128.yaml"), f"--data.corpus={corpus}", f"--data.cache_dir={tmp_path}/cache",
        f"--train.run_dir={tmp_path}/run", "--train.steps=2", "--train.batch_size=8", "--train.eval_samples=4",
        "--model.layers=1", "--model.heads=2", "--model.width=16", "--data.seq_len=16", "--data.vocab_size=300",
        "--data.heldout=0.2", "--optim.warmup_steps=0", "--optim.lr=1e-5", "--optim.args.freeze_step=1",
        "--comm.ranks_per_node=0",
    ]  # fmt: skip
    env = {**os.environ, "PYTHON_EXEC": python(), "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    command = [python(), "-m", "torch.distributed.run"]
    machines = []
    for machine in (0, 1):
        line = documented(machine, "127.0.0.1", port, *words)
        assert "--nproc-per-node=8" in line
        line[line.index("--nproc-per-node=8")] = "--nproc-per-node=1"
        machines.append(subprocess.Popen([*command, *line], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    try:
        said = [machine.communicate(timeout=120)[0].decode() for machine in machines]
    finally:
        for machine in machines:
            machine.kill()
    assert [machine.returncode for machine in machines] == [0, 0], said
    assert "2 ranks on" in said[0]
    assert read_metrics(tmp_path / "run")[-1]["phase"] == "compressed"
    [last] = list_steps(tmp_path / "run/checkpoints")
    assert {path.name for path in last.glob("rank-*")} == {"rank-00000.pt", "rank-00001.pt"}
