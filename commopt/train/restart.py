"""What a run goes on from that torchrun has started again (``--max-restarts``).

The command line is the one it began with. Where that names a checkpoint, the run has been beyond it since, and that one
may be gone.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from commopt.train import started
from commopt.train.checkpoint import DISCARDED, list_steps, step_of
from commopt.train.config import Config
from commopt.train.errors import ConfigError
from commopt.train.manifest import step_in
from commopt.train.metrics import CONFIG
from commopt.train.world import World
from commopt.train.yamlfile import read_yaml

log = logging.getLogger(__name__)


def resume_now(config: Config, folder: Path, world: World) -> str:
    """``config.resume``, as it is to be taken at this start: "auto" for a checkpoint from which the run has begun
    before torchrun started it again, if it has later ones below ``folder``."""
    if config.resume == "none" and world.is_main and started.max_restarts() > started.restarts():
        log.warning(
            "torchrun is to start this run again if it fails (--max-restarts=%d), which ends with an error once there "
            "is a checkpoint: give --resume=auto, also at the first start",
            started.max_restarts(),
        )
    if config.resume in ("none", "auto") or not world.once(lambda: _has_own(config, folder)):
        return config.resume
    if world.is_main:
        log.info("started again: the newest checkpoint of this run counts, and no longer %s", config.resume)
    return "auto"


def _has_own(config: Config, folder: Path) -> bool:
    """True if this run has written a checkpoint since it began from ``config.resume``.

    Later checkpoints alone do not say so: the start that failed may have failed before they were set aside. But it has
    written the config when it began.
    """
    with contextlib.suppress(OSError, ConfigError):  # what cannot be read is said by what needs it
        steps = list_steps(folder) if started.restarts() else []
        if steps and step_of(steps[-1]) > _step_given(config.resume):
            written = read_yaml(Path(config.train.run_dir) / CONFIG)
            return isinstance(written, dict) and written.get("resume") == config.resume
    return False


def _step_given(path: str) -> int:
    step = step_in(Path(path).name.removeprefix(DISCARDED))
    return -1 if step is None else step
