"""Tables and the picture of what scripts/bench_network.py has measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from marked import put

RATIOS = {"none": "x none", "ddp": "x DDP", "hsdp_none": "x hsdp_none", "hsdp": "x HSDP"}
"""Methods that others are compared with."""

BEGIN, END = "<!-- network: made by scripts/bench_network.py --update-docs -->", "<!-- /network -->"


def title(run: dict[str, Any]) -> str:
    ranks = "" if run["ranks_per_host"] == 1 else f" of {run['ranks_per_host']} ranks"
    where = {"namespaces": link(run).replace("none", "unshaped"), "loopback": "LOOPBACK"}[run["bed"]]
    return f"{run['hosts']} hosts{ranks} on {run['cores']} cores, {where}, {run['parameters'] / 1e6:.1f} M parameters"


def link(run: dict[str, Any]) -> str:
    """Rate, and latency where there is any."""
    late = run.get("latency", "0ms")
    return run["rate"] if late == "0ms" else f"{run['rate']} and {late}"


def cell(method: dict[str, Any], key: str) -> str:
    return f"{method[key]:.2f}" if key in method else ""


def table(run: dict[str, Any]) -> str:
    """Markdown."""
    others = {f"to_{key}": name for key, name in {**RATIOS, "bound": "x bound"}.items()}
    others = {key: name for key, name in others.items() if any(key in m for m in run["methods"].values())}
    head = ["method", "ms/step", "quartiles", "tokens/s", "MB/step", "collectives", "CPU ms/step", "cores busy"]
    head += others.values()
    lines = ["| " + " | ".join(head) + " |", "| --- " + "| ---: " * (len(head) - 1) + "|"]
    for m in run["methods"].values():
        low, high = (1e3 * s for s in m["seconds_quartiles"])
        cells = [m["label"], f"{1e3 * m['seconds_median']:.1f}", f"{low:.1f} to {high:.1f}"]
        cells += [f"{m['tokens_per_second']:.0f}", f"{m['bytes_per_host'] / 1e6:.3f}"]
        cells += [str(m["collectives"]), f"{1e3 * m['cpu_seconds']:.1f}", f"{m['busy_share']:.1%}"]
        cells += (cell(m, key) for key in others)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def caveats(run: dict[str, Any]) -> str:
    words = f"Medians of {run['rounds_used']} of {run['rounds']} rounds; other processes had "
    words += f"{100 * run['others_share']:.0f} % of the machine's cores meanwhile."
    if run["bed"] == "loopback":
        words += " ON LOOPBACK, without any rate: bytes are those of all hosts, divided by their number."
    return words


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """A panel per run: seconds per step of every method, and the bound of each."""
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    from commopt.train.plot import BLUE, GREY, ORANGE, new_figure, save_figure

    rows = max(len(run["methods"]) for run in runs)
    figure = new_figure(6.2 * len(runs), 1.3 + 0.36 * rows)
    for axes, run in zip(figure.subplots(1, len(runs), squeeze=False)[0], runs):
        for row, (name, method) in enumerate(run["methods"].items()):
            color = BLUE if name.startswith(("onebit", "zero_one")) else GREY
            median, quartiles = 1e3 * method["seconds_median"], [1e3 * s for s in method["seconds_quartiles"]]
            axes.plot(quartiles, [row, row], color=color, linewidth=3, solid_capstyle="butt")
            axes.plot(median, row, "o", color=color, markersize=7)
            times = f"{method['to_none']:.2f} x" if "to_none" in method else f"{median:.0f} ms"
            axes.annotate(times, (quartiles[1], row), (9, 0), textcoords="offset points", va="center", fontsize=9)
            if "bound_seconds" in method:
                axes.plot(1e3 * method["bound_seconds"], row, "|", color=ORANGE, markersize=15, markeredgewidth=2)
        for label, marker, color in (
            ("median, quartiles, x none", "o", GREY),
            ("max(compute, bytes / rate)", "|", ORANGE),
        ):
            axes.plot([], [], marker, color=color, markersize=9, markeredgewidth=2, label=label)
        axes.set_title(title(run), fontsize=10)
        axes.set_yticks(range(len(run["methods"])), run["methods"])
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("ms per step, logarithmic")
        axes.margins(x=0.15)
        axes.set_ylim(rows - 0.5, -0.5)
        axes.grid(alpha=0.25, which="both")
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes.get_legend_handles_labels(), frameon=False, loc="outside lower center", ncols=2, fontsize=9)
    save_figure(figure, path)


def update_page(text: str, page: Path) -> None:
    """``text`` for what stands between the two markers."""
    put(text, page, (BEGIN, END))


def summary(runs: list[dict[str, Any]]) -> str:
    """Markdown: the time of a step for every shaped run; the bytes of a rank for the unshaped ones, by their number."""
    shaped = [run for run in runs if run["rate"] != "none"]
    times = {title(run): {k: f"{1e3 * m['seconds_median']:.0f} ms{ratios(m)}" for k, m in run["methods"].items()}
             for run in shaped}  # fmt: skip
    return "\n\n".join(matrix(part, runs) for part in (times, growth(runs)) if part)


BY_RATE = (
    ("network_sharded.json", "sharding_network.md", ("hsdp", "hsdp_none", "HSDP")),
    ("network_gradients.json", "gradients_measured.md", ("ddp", "none", "DDP")),
    ("network_rounds.json", "streaming.md", ("ddp", "none", "DDP")),
    ("nodes.json", "backends.md", ("ddp", "none", "DDP")),
)
"""Figures, their page, and what the methods on it are compared with, see :func:`by_rate`."""


def by_rate(runs: list[dict[str, Any]], rival: str, alone: str, name: str) -> str:
    """Markdown: the time of a step by hosts and rate, and its ratios to the methods ``rival`` and ``alone``; the bytes
    that leave a host, by hosts, of the first bed on which a method was measured; how many times fewer they are than
    the rival's (``name``) there, with as many hosts as in the first bed; the commands; how far others disturbed."""
    several = len({run["hosts"] for run in runs}) > 1

    def bed(run: dict[str, Any]) -> str:
        return f"{run['hosts']} hosts, {link(run)}" if several else link(run)

    def times(m: dict[str, Any]) -> str:
        return f"{1e3 * m['seconds_median']:.0f} ms, {m[f'to_{rival}']:.2f} x, {m[f'to_{alone}']:.2f} x"

    columns = {bed(run): {key: times(m) for key, m in run["methods"].items()} for run in runs}
    sizes: dict[str, dict[str, str]] = {}
    fewer: dict[str, str] = {}
    for run in runs:
        mb = sizes.setdefault(f"MB a host of {run['hosts']}" if several else "MB a host", {})
        native = run["methods"][rival]["bytes_per_host"]
        for key, m in run["methods"].items():
            mb.setdefault(key, f"{m['bytes_per_host'] / 1e6:.3f}")
            if run["hosts"] == runs[0]["hosts"] and m["bytes_per_host"] > 1e-3 * native:
                fewer.setdefault(key, f"{native / m['bytes_per_host']:.1f}")
    columns |= sizes | {f"{name}'s by": fewer}
    notes = [f"{bed(run)}: {caveats(run)}" for run in runs]
    commands = "\n".join(dict.fromkeys(run["command"] for run in runs))
    return "\n\n".join([matrix(columns, runs), *notes, f"```bash\n{commands}\n```"])


def ratios(method: dict[str, Any]) -> str:
    return f", {method['to_none']:.2f} x, {method['to_bound']:.2f} x" if "to_none" in method else ""


def growth(runs: list[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """MB that a rank sends in a step, by number of ranks."""
    return {
        f"{run['hosts']} ranks": {
            key: f"{method['bytes_per_host'] / run['ranks_per_host'] / 1e6:.2f} MB, {method['collectives']}"
            for key, method in run["methods"].items()
        }
        for run in runs
        if run["rate"] == "none"
    }


def matrix(columns: dict[str, dict[str, str]], runs: list[dict[str, Any]]) -> str:
    """A Markdown table of methods by columns."""
    labels = {key: method["label"] for run in runs for key, method in run["methods"].items()}
    lines = ["| | " + " | ".join(columns) + " |", "| --- " * (len(columns) + 1) + "|"]
    for key, label in labels.items():
        cells = [column.get(key, "") for column in columns.values()]
        if any(cells):
            lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
