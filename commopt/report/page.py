"""The page of a report: one HTML file that needs nothing else."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path

from commopt.report.pictures import color_of
from commopt.report.runs import Run

COLUMNS = (
    "run", "optimizer", "steps", "tokens, millions", "held-out loss", "lowest", "MB sent", "less than fp32",
    "MB a step, by phase", "seconds", "tokens/s", "steps skipped",
)  # fmt: skip

TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.9rem; }
th, td { padding: 0.35rem 0.8rem; text-align: right; border-bottom: 1px solid #ddd; vertical-align: top; }
th { font-weight: 600; vertical-align: bottom; } td { white-space: pre-line; }
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) { text-align: left; }
.key { display: inline-block; width: 0.8em; height: 0.8em; margin-right: 0.5em; border-radius: 2px; }
img { max-width: 100%; height: auto; }
p { color: #555; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<div class="table"><table>
<tr>{% for name in columns %}<th>{{ name }}</th>{% endfor %}</tr>
{% for color, row in rows -%}
<tr>{% for cell in row %}<td>{% if loop.first %}<span class="key" style="background:{{ color }}"></span>{% endif -%}
{{ cell }}</td>{% endfor %}</tr>
{% endfor -%}
</table></div>
<p>Bytes are those that one rank sends; "less than fp32": all of the run, against all-reducing float32 gradients in
every step. Seconds and tokens/s are of training steps alone, without evaluation, checkpoints and start.</p>
{% for heading, picture in pictures -%}
<h2>{{ heading }}</h2>
<img alt="{{ heading }}" src="data:image/png;base64,{{ picture }}">
{% endfor -%}
<h2>Where the runs are</h2>
<ul>{% for run in runs %}<li>{{ run.label }}: {{ run.folder }}</li>{% endfor %}</ul>
</body>
</html>
"""


def final_figures(run: Run) -> list[str]:
    """A row of the table; a dash where the run did not record it."""
    last = run.last
    heldout = run.points("step", "heldout_loss")[1]
    sent, full = last["bytes_total"], last["fp32_bytes_total"]
    by_phase = "\n".join(f"{phase} {sent / 1e6:.3g}" for phase, sent in run.bytes_by_phase().items())
    return [
        run.label,
        run.optimizer,
        f"{last['step']:,}",
        f"{last['tokens_total'] / 1e6:.3g}",
        f"{heldout[-1]:.4f}" if heldout else "-",
        f"{min(heldout):.4f}" if heldout else "-",
        f"{sent / 1e6:,.1f}",
        f"{full / sent:.1f} x" if sent else "-",
        by_phase or "-",
        f"{last['seconds']:,.1f}",
        f"{last['tokens_total'] / last['seconds']:,.0f}" if last["seconds"] else "-",
        f"{last['skipped_steps']:,}",
    ]


def render(runs: Sequence[Run], pictures: Mapping[str, Path], title: str) -> str:
    """The page, with the pictures in it."""
    from jinja2 import Environment
    from matplotlib.colors import to_hex

    embedded = [(name, base64.b64encode(path.read_bytes()).decode()) for name, path in pictures.items()]
    rows = [(to_hex(color_of(i)), final_figures(run)) for i, run in enumerate(runs)]
    template = Environment(autoescape=True).from_string(TEMPLATE)
    return template.render(title=title, columns=COLUMNS, rows=rows, pictures=embedded, runs=runs)
