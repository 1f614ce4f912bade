"""Metrics, the records of a run: counters on every rank, and on rank 0 files, TensorBoard events and a progress bar.

``metrics.jsonl`` has one line per recorded step, training and evaluation together, so that no step appears twice.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commopt.train.engine import Traffic
from commopt.train.errors import explain, writing
from commopt.train.files import replace_text

if TYPE_CHECKING:
    from commopt.train.bar import Bar

log = logging.getLogger(__name__)
METRICS, CONFIG, CURVES = "metrics.jsonl", "config.yaml", "curves.png"
MB = 1e6
JOIN = 2.0
"""Seconds for a thread to end that has failed."""
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
    """Steps skipped for inf or NaN, on all ranks or, of local steps, on this one."""

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
        """Totals of the run so far, for a record."""
        return {
            "tokens_total": self.tokens,
            "seconds": round(self.seconds, 3),
            "bytes_total": self.bytes,
            "fp32_bytes_total": self.fp32_bytes,
            "compressed_steps": self.compressed_steps,
            "skipped_steps": self.skipped_steps,
        }


COUNTED = ("tokens_total", "bytes_total", "fp32_bytes_total", "compressed_steps", "skipped_steps")
TOTALS = (*COUNTED, "seconds")
"""Keys that every record has, besides its step."""
TOLD = ("loss", "lr", "tokens_per_s", "ratio", "residual_ratio", "heldout_loss")
"""Keys that a record may have; null where it was not finite, or is not defined."""


def ratio(fp32_bytes: int, sent: int) -> float | None:
    """Bytes of fp32 over those sent; None where nothing was sent, or fp32 would send nothing."""
    return fp32_bytes / sent if sent and fp32_bytes else None


def show_ratio(value: float | None) -> str:
    """``12.3x``, or a dash."""
    return "-" if value is None else f"{value:.1f}x"


def read_metrics(run_dir: Path) -> list[Record]:
    """Records in metrics.jsonl, by step; lines that are damaged, and a last one cut off by a kill, are left out.

    Raises OSError.
    """
    path = run_dir / METRICS
    lines = path.read_bytes().splitlines() if path.exists() else []
    records: list[Record] = []
    for line in lines:
        record = _parse(line)
        while record is not None and records and records[-1]["step"] >= record["step"]:
            records.pop()  # steps only grow
        records += [] if record is None else [record]
    if len(records) < len(lines):
        log.warning("%s: %d of %d lines are damaged and left out", path, len(lines) - len(records), len(lines))
    return records


def _parse(line: bytes) -> Record | None:
    """A record, if the line is one: all that others count on is there and of its type."""
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not all(_is_number(record.get(name)) for name in ("step", *TOTALS)):
        return None
    if not isinstance(record["step"], int) or not all(isinstance(record[name], int) for name in COUNTED):
        return None
    if "phase" in record and not (isinstance(record["phase"], str) and _is_number(record.get("bytes"))):
        return None
    told = (record[name] for name in TOLD if record.get(name) is not None)
    return record if all(isinstance(v, (int, float)) and math.isfinite(v) for v in told) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 2**63


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
    """Recorder of the steps of the loop; ranks other than 0 say nothing."""

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
        with writing("train.run_dir", run_dir):
            run_dir.mkdir(parents=True, exist_ok=True)
            replace_text(run_dir / CONFIG, config_yaml)
            kept = [json.dumps(record) + "\n" for record in read_metrics(run_dir) if record["step"] <= step]
            replace_text(run_dir / METRICS, "".join(kept))
            self.events = SummaryWriter(run_dir / "tensorboard", purge_step=step + 1)
            self.file = (run_dir / METRICS).open("a", encoding="utf-8")
        self.bar = make_bar(step, steps)

    def advance(self, phase: str) -> None:
        """Move the bar."""
        if self.bar is not None:
            self.bar.advance(phase)

    def write(self, record: Record) -> None:
        """One line of JSON, TensorBoard scalars, and the bar or a log line. Raises FolderError."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        with writing("train.run_dir", self.run_dir):
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
        """Flush, and draw the curves of the whole run; what cannot be written is said, for the run is over."""
        if self.bar is not None:
            self.bar.close()
        for end in (self.file.close, self.events.close, self._draw):
            try:
                end()
            except (OSError, ImportError) as error:
                log.warning("%s: curves and events are not complete: %s", self.run_dir, explain(error))

    def _draw(self) -> None:
        from commopt.train.plot import draw_curves

        records = read_metrics(self.run_dir)
        if records:
            draw_curves(records, self.run_dir / CURVES)


@contextlib.contextmanager
def quiet_events() -> Iterator[None]:
    """Without a traceback of TensorBoard's thread: what it cannot write is raised again in whoever writes next."""
    hook = threading.excepthook

    def of_others(args: threading.ExceptHookArgs) -> None:
        if not _is_of_events(args.thread):
            hook(args)

    threading.excepthook = of_others
    try:
        yield
    finally:
        for thread in filter(_is_of_events, threading.enumerate()):  # it has told us, and may be about to say so
            thread.join(JOIN)
        threading.excepthook = hook


def _is_of_events(thread: threading.Thread | None) -> bool:
    return type(thread).__module__.startswith("tensorboard.")


def make_bar(step: int, steps: int) -> Bar | None:
    """A bar where standard output is a terminal."""
    from rich import get_console

    terminal = get_console()
    if not terminal.is_terminal:
        return None
    from commopt.train.bar import Bar

    return Bar(step, steps, terminal)
