"""torchrun, a sharded run, and a machine that goes: the run continues with the machines that are left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from forks import python
from ports import free_port

from commopt.train.checkpoint import list_steps
from commopt.train.config import Config
from commopt.train.manifest import read_manifest
from commopt.train.metrics import read_metrics
from commopt.train.parse import to_yaml

PATIENCE = 200.0
STEPS, EVERY = 40, 10


def machine(executable: str, host: bool, port: int, config: Path) -> subprocess.Popen[str]:
    """A machine of two ranks: torchrun's agent, which starts them and waits for the agents of other machines."""
    rdzv = f"is_host={str(host).lower()},last_call_timeout=10,keep_alive_interval=1,keep_alive_max_attempt=3"
    known = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "OMPI_", "PMI_"))}
    return subprocess.Popen(
        [
            executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=2", "--max-restarts=3",
            "--rdzv-id=job", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", f"--rdzv-conf={rdzv}",
            "-m", "commopt", "train", str(config), "--resume=auto",
        ],
        env={**known, "OMP_NUM_THREADS": "1", "PYTHON_EXEC": python(), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def lose(agent: subprocess.Popen[str]) -> None:
    """What a machine without power does: all its processes are gone at once."""
    ranks = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    assert len(ranks) == 2
    for pid in (agent.pid, *map(int, ranks)):
        os.kill(pid, signal.SIGKILL)


def saved_by_both(run: Path) -> bool:
    """Whether a checkpoint is there that ranks of both machines have written, in the compressed phase."""
    good = list_steps(run / "checkpoints") if (run / "checkpoints").exists() else []
    return bool(good) and read_manifest(good[-1])["world_size"] == 4


@pytest.mark.long
def test_a_sharded_run_goes_on_with_the_machines_that_are_left(tiny: Callable[..., Config], tmp_path: Path) -> None:
    """Two machines, a model cut over the two ranks of each; the second is lost in the compressed phase."""
    run, port, config = tmp_path / "run", free_port(), tmp_path / "config.yaml"
    train = {"steps": STEPS, "checkpoint_every": EVERY, "log_every": 1, "eval_every": STEPS}
    config.write_text(to_yaml(tiny(run, train=train, parallel={"shard": 2})))
    left = machine(python(), True, port, config)
    lost = machine(sys.executable, False, port, config)
    try:
        deadline = time.monotonic() + PATIENCE
        while not saved_by_both(run):
            assert left.poll() is None, left.communicate()[0]
            assert time.monotonic() < deadline, "they did not begin"
            time.sleep(0.05)
        lose(lost)
        said, _ = left.communicate(timeout=PATIENCE)
    finally:
        for agent in (left, lost):
            agent.kill()
            agent.communicate()
    assert left.returncode == 0, said
    assert said.count("the checkpoint is of 2 x 2 x 1 ranks, now there are 1 x 2 x 1: residuals are merged") == 1, said
    resumed = int(said.partition("resumed from ")[2].partition(" at step ")[2].split()[0])
    assert resumed % EVERY == 0
    assert EVERY <= resumed < STEPS
    steps = [line["step"] for line in read_metrics(run) if "loss" in line]
    assert steps == list(range(1, STEPS + 1))  # what was trained since then is trained again
    assert (run / f"checkpoints/step-{STEPS:08d}").exists()
