"""The command line: ``commopt COMMAND ...``. A user's mistake ends with one line and exit code 2, never a traceback.

A command returns what is to be printed.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
from collections.abc import Sequence

from commopt import __version__
from commopt.comm import CollectiveError
from commopt.train import started
from commopt.train.errors import DivergedError, UserError, explain
from commopt.train.say import say
from commopt.train.stop import Stopped, StopSignal

USAGE = """usage: commopt COMMAND ...

commands:
  train   train a language model: commopt train [CONFIG.yaml] [--section.key=value ...]
  report  runs side by side: commopt report RUN [RUN ...]
  probe   does compression pay on this network? torchrun ... -m commopt probe --params=340M --step-time=0.3

Several processes: torchrun --nproc-per-node=N -m commopt train ...
               or: mpirun -np N commopt train ... --comm.backend=mpi
commopt COMMAND --help says more; commopt --version.
"""


def set_up_logging() -> None:
    """Log lines of rank 0 and warnings of all ranks on standard output; under the progress bar where that is a
    terminal."""
    from rich import get_console
    from rich.logging import RichHandler

    handler: logging.Handler = logging.StreamHandler(sys.stdout)
    layout = "%(asctime)s %(levelname)s %(message)s"
    if get_console().is_terminal:
        handler, layout = RichHandler(show_path=False, log_time_format="[%X]"), "%(message)s"
    logging.raiseExceptions = False  # a disk that is full of lines: no traceback for each
    logging.basicConfig(level=logging.WARNING, format=layout, datefmt="%H:%M:%S", handlers=[handler])
    if started.rank() == 0:
        logging.getLogger("commopt").setLevel(logging.INFO)


def check_optimizer(name: str, key: str) -> None:
    """Raise UserError for the name of no optimizer."""
    from commopt.train.optimizer import check_name

    check_name(name, key)


def train_command(argv: Sequence[str], until_said: contextlib.ExitStack) -> str:
    """``commopt train``. From here on a signal is a wish: a rank that just went would leave the others waiting. It
    stays one until the last line is said: a launcher ends all ranks when one has ended, and another may know why."""
    from commopt.train.parse import make_parser, parse, to_yaml

    if "--help" in argv or "-h" in argv:
        return make_parser().format_help()
    if "--print_config" in argv:
        from commopt.train.optimizer import check_without_importing

        config = parse([word for word in argv if word != "--print_config"], check_optimizer)
        check_without_importing(config)
        return to_yaml(config)
    stop = until_said.enter_context(StopSignal())
    config = parse(argv, check_optimizer)
    set_up_logging()
    from commopt.train.loop import train

    summary = train(config, stop)
    if summary["finished"] and not math.isfinite(summary["heldout_loss"]):
        raise DivergedError(f"the run ends with a held-out loss of {summary['heldout_loss']}: the model has diverged")
    return ""


def probe_command(argv: Sequence[str], until_said: contextlib.ExitStack) -> str:
    """``commopt probe``."""
    from commopt.probe.command import probe
    from commopt.probe.options import ProbeError

    try:
        return probe(argv)
    except ProbeError as error:
        raise UserError(str(error)) from error


def report_command(argv: Sequence[str], until_said: contextlib.ExitStack) -> str:
    """``commopt report``."""
    from commopt.report.command import report

    return report(argv)


def write_out(text: str) -> None:
    """Write to standard output. Raises UserError where that is not possible; a reader that has gone has seen enough."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is left, which is tried again at exit
        if not isinstance(error, BrokenPipeError):
            raise UserError(f"standard output cannot be written: {explain(error)}") from error


LOST = 1
"""Exit code of a rank that has lost the others. Not 2: a launcher then says which process was the first to end."""
COMMANDS = {"train": train_command, "report": report_command, "probe": probe_command}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code: 0, 2 for a mistake that the user can fix, or 1 if other ranks are lost."""
    redirect = {"stdout": contextlib.redirect_stdout, "stderr": contextlib.redirect_stderr}
    with contextlib.ExitStack() as until_said:
        for name in redirect:
            if getattr(sys, name) is None:  # closed, as a daemon's
                nowhere = until_said.enter_context(open(os.devnull, "w", encoding="utf-8"))
                until_said.enter_context(redirect[name](nowhere))
        return _main(list(sys.argv[1:] if argv is None else argv), until_said)


def _main(words: list[str], until_said: contextlib.ExitStack) -> int:
    """``main``, of which ``until_said`` is left when all has been said."""
    try:
        if not words or words[0] in ("-h", "--help"):
            write_out(USAGE)
            return 0 if words else 2
        if words[0] == "--version":
            write_out(f"commopt {__version__}\n")
            return 0
        command = COMMANDS.get(words[0])
        if command is None:
            raise UserError(f"unknown command {words[0]!r}; valid: {', '.join(COMMANDS)}")
        write_out(command(words[1:], until_said))
    except UserError as error:
        say(f"commopt: error: {error}")
        return 2
    except Stopped as error:
        say(f"commopt: {error}", about="stopped")
        return 0
    except CollectiveError as error:
        advice = "another rank has ended or does not answer; go on from the newest checkpoint with --resume=auto"
        say(f"commopt: error: {error}: {advice}", about="collective")
        return LOST
    except ModuleNotFoundError as error:
        if (error.name or "commopt").split(".")[0] == "commopt":
            raise
        needed = f"{error.name} is not installed, and training needs it: pip install 'commopt[train]'"
        say(f"commopt: error: {needed}")
        return 2
    except KeyboardInterrupt:
        return 130
    return 0
