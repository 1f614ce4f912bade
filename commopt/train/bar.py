"""The progress bar on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)  # fmt: skip

from commopt.train.metrics import MB, Record, show_ratio


class Fitted(Progress):
    """A progress line of those columns that fit into the terminal.

    Args:
        columns: from left to right.
        importance: the same, the most important first, which is always there.
        terminal: where it is shown.
    """

    def __init__(
        self, columns: Sequence[ProgressColumn], importance: Sequence[ProgressColumn], terminal: Console
    ) -> None:
        self.every, self.importance, self.terminal = columns, importance, terminal
        super().__init__(*columns, console=terminal)

    def get_renderables(self) -> Iterable[RenderableType]:
        """The line; the terminal may be another width each time."""
        self.columns = self.fitting()
        yield self.make_tasks_table(self.tasks)

    def fitting(self) -> tuple[ProgressColumn, ...]:
        """The columns up to the first, by their importance, that does not fit."""
        chosen: list[ProgressColumn] = []
        left = self.terminal.width
        for column in self.importance:
            width = max((self._width(column(task)) for task in self.tasks), default=0)
            if width > left and chosen:
                break
            left -= width + 1 if width else 0
            chosen += [column] if width else []
        return tuple(column for column in self.every if column in chosen)

    def _width(self, cell: RenderableType) -> int:
        return Measurement.get(self.terminal, self.terminal.options, cell).maximum


class Bar:
    """A progress bar on the terminal: phase, step, loss, tokens/s, MB per step, ratio, time left; in a narrow one the
    most important of these."""

    def __init__(self, step: int, steps: int, terminal: Console) -> None:
        numbers: dict[str, Any] = dict.fromkeys(("loss", "speed", "sent", "ratio"), "")
        phase, bar, count, left = (
            TextColumn("{task.fields[phase]}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
        )
        loss, speed, sent, ratio = (TextColumn(f"{{task.fields[{name}]}}") for name in numbers)
        self.progress = Fitted(
            columns=(phase, bar, count, loss, speed, sent, ratio, left),
            importance=(count, loss, left, phase, speed, ratio, sent, bar),
            terminal=terminal,
        )
        self.task = self.progress.add_task("", total=steps, completed=step, phase="", **numbers)
        self.progress.start()

    def advance(self, phase: str) -> None:
        """One step done, in this phase."""
        self.progress.update(self.task, advance=1, phase=phase)

    def show(self, record: Record) -> None:
        """The numbers of a training record."""
        if "loss" not in record:
            return
        self.progress.update(
            self.task,
            loss=f"loss {record['loss']:.3f}",
            speed=f"· {record['tokens_per_s']:,.0f} tok/s",
            sent=f"· {record['bytes'] / MB:.2f} MB/step",
            ratio=f"· {show_ratio(record['ratio'])}",
        )

    def close(self) -> None:
        """Leave the bar as it stands."""
        self.progress.stop()
