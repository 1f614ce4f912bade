"""Tables and the picture of what scripts/time_to_loss.py has measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from marked import put

RIVAL, BOUND = "ddp", "none"
"""The method whose last held-out loss is to be reached; and the same without a network, which computes the same."""
MARGIN = 0.02
"""Nats above that loss which are as good: what runs differ by that compute the same in another order."""
SHOWN = 7
"""Methods that have a colour in the picture: the fastest ones."""
DISTURBED = 0.1

BEGIN, END = "<!-- time to a loss: made by scripts/time_to_loss.py --update-docs -->", "<!-- /time to a loss -->"

Record = dict[str, Any]
Setting = tuple[int, str]


def settings(runs: Sequence[Record]) -> dict[Setting, list[Record]]:
    """The runs by hosts and rate. Those without a network are in all settings of as many hosts."""
    found: dict[Setting, list[Record]] = {}
    for run in runs:
        if run["method"] == RIVAL:
            found.setdefault((run["hosts"], run["rate"]), [])
    for (hosts, rate), members in found.items():
        members += [run for run in runs if run["hosts"] == hosts and run["rate"] in (rate, "none")]
    return found


def reached(curve: Sequence[Record], target: float) -> Record | None:
    """The first evaluation that found a loss of ``target`` or less; None if none did."""
    return next((point for point in curve if point["loss"] is not None and point["loss"] <= target), None)


def targets(runs: Sequence[Record], margin: float) -> dict[int, float]:
    """The loss to be reached, by seed: the rival's last one, and ``margin``."""
    return {run["seed"]: run["curve"][-1]["loss"] + margin for run in runs if run["method"] == RIVAL}


def with_rival(runs: Sequence[Record]) -> list[Record]:
    """The runs of one setting; where the rival was not run with a seed but the bound was, one of the rival besides,
    "derived": losses of the bound, seconds and bytes of a step those of the rival's first run."""
    seeds = {name: {run["seed"] for run in runs if run["method"] == name} for name in (RIVAL, BOUND)}
    first = next(run for run in runs if run["method"] == RIVAL)
    per = {key: first["curve"][-1][key] / first["curve"][-1]["step"] for key in ("seconds", "evaluating", "bytes")}
    derived = [
        {**first, "seed": run["seed"], "derived": True,
         "curve": [point | {key: value * point["step"] for key, value in per.items()} for point in run["curve"]]}
        for run in runs
        if run["method"] == BOUND and run["seed"] in seeds[BOUND] - seeds[RIVAL]
    ]  # fmt: skip
    return [*runs, *derived]


def summarise(runs: Sequence[Record], margin: float) -> dict[str, Record]:
    """What each method has taken on one setting, by name: medians over the seeds, in which a run that has not reached
    the loss has taken for ever."""
    runs = with_rival(runs)
    wanted = targets(runs, margin)
    by_method: dict[str, dict[int, Record]] = {}
    for run in runs:
        if run["seed"] in wanted:
            by_method.setdefault(run["method"], {})[run["seed"]] = run
    times = {name: {seed: time_of(run, wanted[seed]) for seed, run in of.items()} for name, of in by_method.items()}
    out: dict[str, Record] = {}
    for name, of in by_method.items():
        there = [point for seed, run in of.items() if (point := reached(run["curve"], wanted[seed])) is not None]
        ends = [run["curve"][-1] for run in of.values() if run["curve"]]
        losses = [end["loss"] for end in ends]
        training = sum(end["seconds"] - end["evaluating"] for end in ends)
        out[name] = {
            "seeds": sum("derived" not in run for run in of.values()),
            "reached": len(there),
            "network": any(run["rate"] != "none" for run in of.values()),
            "seconds": statistics.median(times[name].values()),
            "speedup": statistics.median(times[RIVAL][seed] / times[name][seed] for seed in of),
            "bytes": statistics.median(p["bytes"] for p in there) if there else None,
            "steps": statistics.median(p["step"] for p in there) if there else None,
            "step_seconds": training / max(1, sum(end["step"] for end in ends)),
            "evaluating": sum(end["evaluating"] for end in ends) / max(1e-9, sum(end["seconds"] for end in ends)),
            "loss": statistics.mean(losses) if losses and None not in losses else None,
            "last_step": statistics.median(end["step"] for end in ends) if ends else 0,
            "schedule": next(iter(of.values()))["steps"],
            "ended": sorted({run["ended"].partition(":")[0] for run in of.values()}),
            "others_share": max(run["others_share"] for run in of.values()),
        }
    return out


def time_of(run: Record, target: float) -> float:
    point = reached(run["curve"], target)
    return math.inf if point is None else point["seconds"]


def title(setting: Setting, runs: Sequence[Record]) -> str:
    (hosts, rate), run = setting, next(run for run in runs if run["method"] == RIVAL)
    return f"{hosts} hosts on {run['cores']} cores, {rate}, {run['parameters'] / 1e6:.1f} M parameters"


def table(rows: dict[str, Record], labels: dict[str, list[str]]) -> str:
    """Markdown: a line for each method, the fastest first."""
    head = ["method", "time to the loss", "DDP's over it", "MB sent until then", "steps until then", "ms a step"]
    head += ["ends at", "after steps", "seeds"]
    lines = ["| " + " | ".join(head) + " |", "| --- " + "| ---: " * (len(head) - 1) + "|"]
    for name, row in sorted(rows.items(), key=lambda item: (item[1]["seconds"], item[0] != RIVAL)):
        never = math.isinf(row["seconds"])
        sent = row["bytes"] is not None and row["network"]
        mark = " ✗" if row["others_share"] > DISTURBED else ""
        some = f" ({row['reached']} of {row['seeds']} seeds)" if 1 < row["seeds"] > row["reached"] else ""
        cells = [
            labels[name][0] + mark,
            ("not reached" if never else f"{row['seconds']:.1f} s") + some,
            "" if never else f"{row['speedup']:.2f} x",
            f"{row['bytes'] / 1e6:.1f}" if sent else "",
            f"{row['steps']:.0f}" if row["steps"] is not None else "",
            f"{1e3 * row['step_seconds']:.0f}",
            "diverged" if row["loss"] is None else f"{row['loss']:.3f}",
            f"{row['last_step']:.0f} of {row['schedule']}",
            str(row["seeds"]),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def caveats(runs: Sequence[Record], rows: dict[str, Record], margin: float) -> str:
    wanted = targets(with_rival(runs), margin)
    losses = ", ".join(f"{loss:.3f}" for _, loss in sorted(wanted.items()))
    words = f"The loss: {losses} nats per token{' by seed' if len(wanted) > 1 else ''}, which is DDP's last and "
    words += f"{margin:g}. "
    if derived := [str(run["seed"]) for run in with_rival(runs) if "derived" in run]:
        words += f"With seed {' and '.join(derived)} DDP's losses are those of the run without a network, which "
        words += "computes the same, and its seconds those of as many steps with seed 0. "
        times = [time_of(run, wanted[run["seed"]]) for run in with_rival(runs) if run["method"] == RIVAL]
        words += f"So by seed it takes {', '.join(f'{seconds:.1f}' for seconds in times)} s; how many times sooner a "
        words += "method is, is the median over the seeds that it has. "
    words += f"Evaluation has taken {100 * rows[RIVAL]['evaluating']:.0f} % of DDP's time. "
    worst = max(row["others_share"] for row in rows.values())
    words += f"Other processes had up to {100 * worst:.0f} % of the cores"
    return words + (f"; ✗: more than {100 * DISTURBED:.0f} %." if worst > DISTURBED else ".")


def tables(figures: Record) -> str:
    """Markdown: a table for each setting, with what it is of."""
    parts = []
    for setting, runs in settings(figures["runs"]).items():
        rows = summarise(runs, figures["margin"])
        parts += [f"**{title(setting, runs)}**", table(rows, figures["labels"]), caveats(runs, rows, figures["margin"])]
    return "\n\n".join(parts)


def sources(labels: Record, runs: Sequence[Record]) -> str:
    """Markdown: where the settings of the methods of ``runs`` come from, by their ``labels``, how long their schedules
    are, and which methods have no run."""
    names = dict.fromkeys(run["method"] for run in runs)
    missing = "; ".join(label for name, (label, _) in labels.items() if name not in names)
    steps = {run["method"]: run["steps"] for run in reversed(runs)}
    lines = ["| method | steps | settings from |", "| --- | ---: | --- |"]
    lines += [f"| {labels[name][0]} | {steps[name]} | {labels[name][1]} |" for name in names]
    return "\n".join(lines) + (f"\n\nMethods of the script without a run: {missing}." if missing else "")


def page(figures: Record | None, others: Sequence[tuple[str, Record]] = ()) -> str:
    """What the documentation has of the figures; ``others``, with what is different there, are in tables of their
    own."""
    if not figures:
        return "No figures yet: the runs have not been made on a quiet machine."
    parts = [f"{machine(figures)}.", tables(figures)]
    parts += ["![Held-out loss against seconds, and against bytes sent](time_to_loss.png)"]
    commands, runs, labels = [figures["command"]], figures["runs"], figures["labels"]
    for what, other in others:
        parts += [f"{what}: {machine(other)}.", tables(other)]
        commands.append(other["command"])
        runs, labels = [*runs, *other["runs"]], {**labels, **other["labels"]}
    return "\n\n".join([*parts, sources(labels, runs), "```bash\n" + "\n".join(commands) + "\n```"])


def machine(figures: Record) -> str:
    """The machine that they are of, in words."""
    it = figures["machine"]
    return f"{it['cores']} cores of {it['cpu']}, Linux {it['kernel']}, torch {it['torch']}"


def update_page(text: str, page: Path) -> None:
    """``text`` for what stands between the two markers."""
    put(text, page, (BEGIN, END))


# the picture ----------------------------------------------------------------------------------------------------------


def draw(figures: Record, path: Path) -> None:
    """Two panels for each setting: held-out loss against seconds, and against bytes sent. The fastest methods have a
    colour, the same in all of them; the others are grey. A run of each, of the first seed."""
    from commopt.train.plot import new_figure, save_figure

    found = settings(figures["runs"])
    colors = colors_of(found, figures["margin"])
    figure = new_figure(12, 1.0 + 4.2 * len(found))
    panels = figure.subplots(len(found), 2, squeeze=False)
    for (setting, runs), row in zip(found.items(), panels):
        seed = min(run["seed"] for run in runs)
        target = targets(runs, figures["margin"])[seed]
        first = [run for run in runs if run["seed"] == seed]
        for axes, key, scale in zip(row, ("seconds", "bytes"), (1.0, 1e-6)):
            for run in sorted(first, key=lambda run: run["method"] in colors):
                if key == "seconds" or run["rate"] != "none":
                    draw_curve(axes, run, key, scale, colors, figures["labels"], target)
        finish(row, title(setting, runs), target, first)
    handles = {label: handle for axes in panels[:, 0] for handle, label in zip(*axes.get_legend_handles_labels())}
    order = [figures["labels"][name][0] for name in colors if figures["labels"][name][0] in handles]
    order += [label for label in handles if label not in order]
    figure.legend([handles[o] for o in order], order, frameon=False, loc="outside upper center", ncols=3, fontsize=9)
    save_figure(figure, path)


def colors_of(found: dict[Setting, list[Record]], margin: float) -> dict[str, Any]:
    """The methods with a colour: the two bounds, and those with the best time on any setting."""
    from commopt.report.pictures import color_of

    times: dict[str, float] = {}
    for runs in found.values():
        for name, row in summarise(runs, margin).items():
            times[name] = max(times.get(name, 0.0), row["speedup"])
    fast = [name for name in sorted(times, key=lambda name: -times[name]) if name not in (RIVAL, "none")][:SHOWN]
    bounds = {RIVAL: "black"} | ({"none": "0.45"} if "none" in times else {})
    return bounds | {name: color_of(i) for i, name in enumerate(fast)}


def draw_curve(
    axes: Any, run: Record, key: str, scale: float, colors: dict[str, Any], labels: dict[str, list[str]], target: float
) -> None:
    """The curve of one run, and a dot where it has reached the loss."""
    from commopt.report.pictures import plain

    name = run["method"]
    points = [(scale * p[key], p["loss"]) for p in run["curve"] if p["loss"] is not None]
    look: dict[str, Any] = {"color": "0.8", "linewidth": 0.9, "label": "others", "zorder": 1}
    if name in colors:
        look = {"color": colors[name], "linewidth": 1.7, "label": plain(labels[name][0]), "zorder": 3}
        look["linestyle"] = "--" if run["rate"] == "none" else "-"
    axes.plot([x for x, _ in points], [y for _, y in points], **look)
    point = reached(run["curve"], target)
    if point is not None and name in colors:
        axes.plot(scale * point[key], point["loss"], "o", color=colors[name], markersize=5.5, zorder=4)


def finish(row: Any, name: str, target: float, runs: Sequence[Record]) -> None:
    """Axes, of both panels of a setting."""
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    losses = [p["loss"] for run in runs for p in run["curve"] if p["loss"] is not None]
    lowest, highest = min([*losses, target]), max([*losses, target])
    for axes, label in zip(row, ("seconds", "MB that a host has sent")):
        axes.axhline(target, color="0.3", linestyle=":", linewidth=1.2, label="the loss to be reached")
        axes.set_ylim(lowest - 0.04 * (highest - lowest), min(highest + 0.05, target + 2.5))
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel(f"{label}, logarithmic")
        axes.set_title(name, fontsize=10)
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    row[0].set_ylabel("held-out loss, nats per token")
