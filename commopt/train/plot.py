"""The picture of a run: what it learned, and what that cost on the wire."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from commopt.train.files import replace

BLUE, ORANGE, GREY = "#1f5fa8", "#d9730d", "#8a8a8a"


def new_figure(width: float, height: float) -> Any:
    """An empty matplotlib figure of that size in inches, which needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, path: Path) -> None:
    """Write a PNG, whole or not at all."""
    replace(path, lambda file: figure.savefig(file, format="png"))


def points(records: Sequence[dict[str, Any]], x: str, y: str) -> list[tuple[Any, float]]:
    """(x, y) of the records that have both; a loss that was not finite is null."""
    return [(r[x], r[y]) for r in records if r.get(x) is not None and r.get(y) is not None]


def phase_switch(records: list[dict[str, Any]]) -> int | None:
    """Step after which everything is compressed, if the run has steps before and after it."""
    last = later = records[-1]
    for before in [*reversed(records[:-1]), {"step": 0, "compressed_steps": 0}]:
        compressed = later["compressed_steps"] - before["compressed_steps"]
        if compressed < later["step"] - before["step"]:
            step: int = later["step"] - compressed
            return step if 0 < step < last["step"] else None
        later = before
    return None


def draw_curves(records: list[dict[str, Any]], path: Path) -> None:
    """Write a PNG with two panels over steps: losses, and cumulative bytes sent against an fp32 all-reduce."""
    figure = new_figure(11, 4.4)
    left, right = figure.subplots(1, 2)
    _draw_losses(left, records)
    _draw_bytes(right, records)
    switch = phase_switch(records)
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.set_xlim(left=0)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if switch is not None:
            axes.axvline(switch, color=GREY, linestyle=":", linewidth=1.2, label="compressed from here")
        axes.legend(frameon=False)
    save_figure(figure, path)


def _draw_losses(axes: Any, records: list[dict[str, Any]]) -> None:
    train, heldout = points(records, "step", "loss"), points(records, "step", "heldout_loss")
    if train:
        axes.plot(*zip(*train), color=BLUE, linewidth=0.8, alpha=0.35, label="training, single batches")
        axes.plot(*_smooth(train), color=BLUE, linewidth=1.6, label="training, smoothed")
    if heldout:
        axes.plot(*zip(*heldout), color=ORANGE, linewidth=1.6, marker="o", markersize=4, label="held-out")
        step, loss = heldout[-1]
        axes.annotate(f"{loss:.3f}", (step, loss), (0, 9), textcoords="offset points", ha="right", color=ORANGE)
    axes.set_title("Loss")
    axes.set_ylabel("nats per token")


def _smooth(curve: list[tuple[int, float]], window: int = 7) -> tuple[list[int], list[float]]:
    """Mean of each point and its neighbours, fewer at the ends: one batch is noisy."""
    half, values = window // 2, [loss for _, loss in curve]
    parts = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [step for step, _ in curve], [sum(part) / len(part) for part in parts]


def _draw_bytes(axes: Any, records: list[dict[str, Any]]) -> None:
    steps = [0] + [record["step"] for record in records]
    for key, color, label in (
        ("fp32_bytes_total", GREY, "fp32 all-reduce would send"),
        ("bytes_total", BLUE, "sent"),
    ):
        megabytes = [0.0] + [record[key] / 1e6 for record in records]
        axes.plot(steps, megabytes, color=color, linewidth=2.0, label=label)
        axes.annotate(
            f"{megabytes[-1]:,.{0 if megabytes[-1] >= 100 else 2}f} MB",
            (steps[-1], megabytes[-1]),
            (0, 6),
            textcoords="offset points",
            ha="right",
            color=color,
        )
    top = max(records[-1]["fp32_bytes_total"], records[-1]["bytes_total"]) / 1e6
    axes.set_ylim(0, 1.1 * top or 1.0)  # room for the last number
    axes.set_title("Bytes sent by one rank, cumulative")
    axes.set_ylabel("MB")
