"""What a run records: counters on every rank, and on rank 0 files, TensorBoard events and a progress bar.

``metrics.jsonl`` has one line per recorded step, training and evaluation together, so that no step appears twice.
"""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commopt.train.engine import Traffic

log = logging.getLogger(__name__)
METRICS, CONFIG, CURVES = "metrics.jsonl", "config.yaml", "curves.png"
MB = 1e6
Record = dict[str, Any]


SETTLED = ("compressed", "frozen")
"""Phases of optimizers whose variance stands: nothing is averaged exactly any more."""


@dataclass
class Meter:
    """Totals of a run since its first step, on this rank; part of the checkpoint. Bytes are those that a rank sends."""

    steps: int = 0
    tokens: int = 0
    """Tokens read by the model, on all ranks."""
    seconds: float = 0.0
    """Time in training steps: without evaluation, checkpoints and start."""
    bytes: int = 0
    fp32_bytes: int = 0
    compressed_bytes: int = 0
    """Bytes sent in steps of the phases in :data:`SETTLED`."""
    compressed_fp32_bytes: int = 0
    compressed_steps: int = 0
    skipped_steps: int = 0

    def add(self, phase: str, traffic: Traffic, tokens: int, seconds: float) -> None:
        """Count one step."""
        self.steps += 1
        self.tokens += tokens
        self.seconds += seconds
        self.bytes += traffic.bytes
        self.fp32_bytes += traffic.fp32_bytes
        self.skipped_steps += traffic.skipped
        if phase in SETTLED:
            self.compressed_steps += 1
            self.compressed_bytes += traffic.bytes
            self.compressed_fp32_bytes += traffic.fp32_bytes

    def totals(self) -> Record:
        """What a record says about the run so far."""
        return {
            "tokens_total": self.tokens,
            "seconds": round(self.seconds, 3),
            "bytes_total": self.bytes,
            "fp32_bytes_total": self.fp32_bytes,
            "compressed_steps": self.compressed_steps,
            "skipped_steps": self.skipped_steps,
        }


def ratio(fp32_bytes: int, sent: int) -> float | None:
    """How many times fewer bytes than fp32; None where nothing was sent."""
    return fp32_bytes / sent if sent else None


def show_ratio(value: float | None) -> str:
    """``12.3x``, or a dash."""
    return "-" if value is None else f"{value:.1f}x"


def read_metrics(run_dir: Path) -> list[Record]:
    """Lines of metrics.jsonl; a last line cut off by a kill is left out."""
    path = run_dir / METRICS
    records: list[Record] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            records.append(json.loads(line))
        except ValueError:
            log.warning("%s: left out a line that is not JSON", path)
    return records


def describe(record: Record) -> str:
    """A record as one log line."""
    parts = [f"step {record['step']}"]
    if "loss" in record:
        parts += [
            f"loss {record['loss']:.4f}",
            f"lr {record['lr']:.2e}",
            f"{record['tokens_per_s']:,.0f} tokens/s",
            record["phase"],
            f"{record['bytes'] / MB:.3f} MB sent",
            f"ratio {show_ratio(record['ratio'])}",
        ]
    if record.get("residual_ratio") is not None:
        parts.append(f"residual/momentum {record['residual_ratio']:.2f}")
    if "heldout_loss" in record:
        parts.append(f"held-out loss {record['heldout_loss']:.4f}")
    if record.get("skipped_steps"):
        parts.append(f"{record['skipped_steps']} steps skipped")
    return " | ".join(parts)


class Recorder:
    """What the loop tells about its steps; ranks other than 0 say nothing."""

    def advance(self, phase: str) -> None:
        """A step is done."""

    def write(self, record: Record) -> None:
        """A step is recorded."""

    def close(self) -> None:
        """Flush, and draw the curves."""


class RunRecorder(Recorder):
    """Writes the run folder. ``step`` is where the run starts: lines and events after it are dropped."""

    def __init__(self, run_dir: Path, config_yaml: str, step: int, steps: int) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self.run_dir = run_dir
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / CONFIG).write_text(config_yaml, encoding="utf-8")
        kept = [json.dumps(record) + "\n" for record in read_metrics(run_dir) if record["step"] <= step]
        aside = run_dir / f".{METRICS}"
        aside.write_text("".join(kept), encoding="utf-8")
        aside.rename(run_dir / METRICS)
        self.file = (run_dir / METRICS).open("a", encoding="utf-8")
        self.events = SummaryWriter(run_dir / "tensorboard", purge_step=step + 1)
        self.bar = make_bar(step, steps)

    def advance(self, phase: str) -> None:
        """Move the bar."""
        if self.bar is not None:
            self.bar.advance(phase)

    def write(self, record: Record) -> None:
        """One line of JSON, TensorBoard scalars, and the bar or a log line."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        self.file.write(json.dumps(finite, allow_nan=False) + "\n")  # JSON has no NaN: a lost loss is null
        self.file.flush()
        for name, value in record.items():
            if isinstance(value, (int, float)) and name != "step":
                self.events.add_scalar(name, value, record["step"])
        if self.bar is not None:
            self.bar.show(record)
        if self.bar is None or "heldout_loss" in record:
            log.info("%s", describe(record))

    def close(self) -> None:
        """Flush, and draw the curves of the whole run."""
        from commopt.train.plot import draw_curves

        if self.bar is not None:
            self.bar.close()
        self.file.close()
        self.events.close()
        records = read_metrics(self.run_dir)
        if records:
            draw_curves(records, self.run_dir / CURVES)


class Bar:
    """A progress bar on the terminal: step, loss, tokens/s, phase, MB per step, ratio, time left."""

    def __init__(self, step: int, steps: int) -> None:
        from rich import get_console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.progress = Progress(
            TextColumn("{task.fields[phase]}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(compact=True),
            console=get_console(),
        )
        self.task = self.progress.add_task("", total=steps, completed=step, phase="", numbers="")
        self.progress.start()

    def advance(self, phase: str) -> None:
        """One step done, in this phase."""
        self.progress.update(self.task, advance=1, phase=phase)

    def show(self, record: Record) -> None:
        """The numbers of a training record."""
        if "loss" not in record:
            return
        numbers = [
            f"loss {record['loss']:.3f}",
            f"{record['tokens_per_s']:,.0f} tok/s",
            f"{record['bytes'] / MB:.2f} MB/step",
            show_ratio(record["ratio"]),
        ]
        self.progress.update(self.task, numbers=" · ".join(numbers))

    def close(self) -> None:
        """Leave the bar as it stands."""
        self.progress.stop()


def make_bar(step: int, steps: int) -> Bar | None:
    """A bar where standard output is a terminal."""
    from rich import get_console

    return Bar(step, steps) if get_console().is_terminal else None
