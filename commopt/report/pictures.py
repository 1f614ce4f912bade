"""The pictures of a report: a colour for each run, the same in all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from commopt.report.runs import Run
from commopt.train.plot import new_figure, save_figure

AXES = (
    ("step", 1.0, "steps"),
    ("tokens_total", 1e-6, "million tokens"),
    ("bytes_total", 1e-6, "MB sent by one rank"),
    ("seconds", 1.0, "seconds of training"),
)
"""Quantities that held-out loss is drawn against: key of a record, factor, and label."""


def draw_all(runs: Sequence[Run], folder: Path) -> dict[str, Path]:
    """Writes all pictures for which the runs have data: title -> PNG."""
    pictures: dict[str, tuple[str, Callable[[Any, Sequence[Run]], bool], tuple[float, float]]] = {
        "Held-out loss": ("heldout.png", _heldout, (12, 8.4)),
        "Training loss": ("training.png", _training, (12, 4.4)),
        "Bytes sent in a step": ("bytes.png", _bytes, (12, 1.6 + 0.55 * sum(len(r.bytes_by_phase()) for r in runs))),
        "Residuals of compression": ("residuals.png", _residuals, (12, 4.4)),
    }
    out = {}
    for title, (name, draw, size) in pictures.items():
        figure = new_figure(*size)
        if draw(figure, runs):
            save_figure(figure, folder / name)
            out[title] = folder / name
    return out


def color_of(i: int) -> Any:
    """The colour of run ``i``."""
    from matplotlib import colormaps

    return colormaps["tab10"](i % 10)


def plain(text: str) -> str:
    """``text`` as matplotlib shows it: dollars are no formulas, and a leading underscore does not hide it."""
    return (" " if text.startswith("_") else "") + text.replace("$", r"\$")


def _mark(x: Sequence[float]) -> str:
    """Marker of a curve: one of a single point would have no line to be seen by."""
    return "o" if len(x) == 1 else ""


def _tidy(axes: Any, label: str) -> None:
    axes.set_xlabel(label)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(figure: Any, axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside upper center", ncols=min(len(labels), 4))


def _heldout(figure: Any, runs: Sequence[Run]) -> bool:
    """Against everything that it may be bought with."""
    panels = figure.subplots(2, 2, sharey=True).flatten()
    drawn = False
    for axes, (key, scale, label) in zip(panels, AXES):
        for i, run in enumerate(runs):
            x, y = run.points(key, "heldout_loss", scale)
            drawn = drawn or bool(x)
            axes.plot(x, y, color=color_of(i), linewidth=1.6, marker="o", markersize=3.5, label=plain(run.label))
        _tidy(axes, label)
    for axes in panels[::2]:
        axes.set_ylabel("held-out loss, nats per token")
    _legend(figure, panels[0])
    return drawn


def _training(figure: Any, runs: Sequence[Run]) -> bool:
    axes = figure.subplots()
    drawn = False
    for i, run in enumerate(runs):
        x, y = run.points("step", "loss")
        drawn = drawn or bool(x)
        axes.plot(x, y, color=color_of(i), linewidth=1.0, alpha=0.8, marker=_mark(x), label=plain(run.label))
    _tidy(axes, "steps")
    axes.set_ylabel("loss of single batches, nats per token")
    _legend(figure, axes)
    return drawn


def _bytes(figure: Any, runs: Sequence[Run]) -> bool:
    """A bar for each phase of each run, on a logarithmic axis: phases differ by a factor of 30."""
    axes = figure.subplots()
    rows = [(i, run, phase, sent) for i, run in enumerate(runs) for phase, sent in run.bytes_by_phase().items()]
    largest = max((sent for *_, sent in rows), default=0.0) / 1e6
    if largest <= 0:
        return False
    smallest = min(sent for *_, sent in rows if sent > 0) / 1e6
    for place, (i, _, _, sent) in enumerate(rows):
        megabytes = sent / 1e6
        axes.barh(place, megabytes, color=color_of(i), height=0.7)
        text = f" {megabytes:.3g} MB" if sent else " nothing"
        axes.annotate(text, (megabytes if sent else smallest / 3, place), va="center")
    axes.set_yticks(range(len(rows)), [plain(f"{run.label}, {phase}") for _, run, phase, _ in rows])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(smallest / 3, largest * 4)
    _tidy(axes, "MB that a rank sends in a step, logarithmic")
    axes.grid(visible=False, axis="y")
    return True


def _residuals(figure: Any, runs: Sequence[Run]) -> bool:
    axes = figure.subplots()
    drawn = False
    for i, run in enumerate(runs):
        x, y = run.points("step", "residual_ratio")
        if x:
            drawn = True
            axes.plot(x, y, color=color_of(i), linewidth=1.6, marker=_mark(x), label=plain(run.label))
    if not drawn:
        return False
    _tidy(axes, "steps")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("residual over momentum, 2-norms")
    _legend(figure, axes)
    return True
