"""Runs, read from their folders."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commopt.train.errors import UserError
from commopt.train.metrics import CONFIG, METRICS, Record, read_metrics
from commopt.train.plot import points
from commopt.train.yamlfile import read_yaml

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        label: what it is called in pictures and tables.
        folder: where it is.
        config: its config as a tree; empty where the folder has none.
        records: lines of its metrics, by step.
    """

    label: str
    folder: Path
    config: dict[str, Any]
    records: list[Record]

    def points(self, x: str, y: str, scale: float = 1.0) -> tuple[list[float], list[float]]:
        """Points at which both ``x`` (times ``scale``) and ``y`` are recorded; a value that was not finite is not."""
        pairs = points(self.records, x, y)
        return [a * scale for a, _ in pairs], [b for _, b in pairs]

    def bytes_by_phase(self) -> dict[str, float]:
        """Bytes that a rank sends in a step, by phase, in the order of the phases: the mean over the steps between
        records of one phase; where there is one record only, those of its step. Steps may differ within a phase, and
        what is recorded of a single one may be that of a round each time."""
        sent: dict[str, int] = {}
        steps: dict[str, int] = {}
        alone: dict[str, float] = {}
        before: Record = {}
        for record in (r for r in self.records if "phase" in r):
            phase = _phase(record)
            alone.setdefault(phase, record["bytes"])
            if before and _phase(before) == phase:
                sent[phase] = sent.get(phase, 0) + record["bytes_total"] - before["bytes_total"]
                steps[phase] = steps.get(phase, 0) + record["step"] - before["step"]
            before = record
        return {phase: sent[phase] / steps[phase] if steps.get(phase) else alone[phase] for phase in alone}

    @property
    def last(self) -> Record:
        """The record with the totals of the run."""
        return self.records[-1]

    @property
    def optimizer(self) -> str:
        """Name of what trained it; "?" where the folder does not say."""
        section = self.config.get("optim")
        return one_line(str(section.get("name", "?"))) if isinstance(section, dict) else "?"


def _phase(record: Record) -> str:
    """Its phase; local steps and the synchronisations between them are one."""
    phase = one_line(record["phase"])
    return "local steps" if phase in ("local", "synchronizing") else phase


def read_runs(folders: Sequence[Path], labels: Sequence[str] = ()) -> list[Run]:
    """The runs in ``folders``, called by ``labels`` or by what is different in their paths; those that would be called
    the same get a number. A folder where nothing is recorded, such as that of a run that has just begun, is left out,
    with a warning, if others have something.

    Raises:
        UserError: a folder is not there, or cannot be read, or none has metrics.
    """
    names = _told_apart([one_line(name) for name in list(labels) or short_names(folders)])
    runs = [_read(folder, name) for folder, name in zip(folders, names, strict=True)]
    for run in (run for run in runs if not run.records):
        said = f"{run.folder} has no run: {METRICS} is missing, empty, or damaged in every line"
        if not any(other.records for other in runs):
            raise UserError(said)
        log.warning("%s; it is left out", said)
    return [run for run in runs if run.records]


def _told_apart(names: Sequence[str]) -> list[str]:
    """``names``, of which those that have come before get a number: ``run``, ``run (2)``."""
    out: list[str] = []
    for name in names:
        numbered = (f"{name} ({number})" for number in itertools.count(2))
        out.append(next(label for label in itertools.chain([name], numbered) if label not in out))
    return out


def _read(folder: Path, label: str) -> Run:
    try:
        if not folder.is_dir():
            raise UserError(f"{folder} is no folder: give run folders, as train.run_dir names them")
        records = read_metrics(folder)
    except OSError as error:
        raise UserError(f"{folder}: {METRICS} cannot be read: {error.strerror}") from None
    path = folder / CONFIG
    config = read_yaml(path, "config of a run") if records and path.exists() else {}
    return Run(label, folder, config if isinstance(config, dict) else {}, records)


def one_line(text: str) -> str:
    """``text`` without what is no character of a line: of names of files, anything may be in them."""
    shown = text.encode("utf-8", "replace").decode()
    return " ".join("".join(c if c.isprintable() else " " for c in shown).split()) or "?"


def short_names(folders: Sequence[Path]) -> list[str]:
    """The paths without what all of them share at the beginning."""
    paths = [folder.resolve() for folder in folders]
    if len(paths) == 1:
        return [paths[0].name]
    shared = Path(os.path.commonpath(paths))
    return [str(path.relative_to(shared)) if path != shared else path.name for path in paths]
