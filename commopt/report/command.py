"""``commopt report RUN [RUN ...]``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from commopt.arguments import Parser
from commopt.report.page import COLUMNS, final_figures, render
from commopt.report.pictures import draw_all
from commopt.report.runs import read_runs
from commopt.train.errors import UserError
from commopt.train.files import replace

PAGE = "report.html"
IN_SHORT = ("run", "steps", "held-out loss", "MB sent", "less than fp32", "seconds")
"""Chunk that a terminal has room for."""


def report(argv: Sequence[str]) -> str:
    """Reads the runs, writes the page and its pictures; returns a table for the terminal.

    Raises:
        UserError: a run cannot be read, or the report not be written.
    """
    parser = Parser(
        UserError,
        prog="commopt report",
        description="Lays runs over each other: what they learned, and what that cost. Writes one HTML file that needs "
        "nothing else, and its pictures as PNGs.",
    )
    parser.add_argument("run", nargs="+", type=Path, help="folder of a run: its train.run_dir")
    parser.add_argument("--out", type=_folder, default=Path("report"), help="folder to write to (default: report)")
    parser.add_argument("--labels", default="", help="what to call the runs, with commas (default: by their folders)")
    parser.add_argument("--title", default="Training runs", help="of the page")
    options = parser.parse(argv)
    labels = [label.strip() for label in options.labels.split(",")] if options.labels else []
    if labels and len(labels) != len(options.run):
        raise UserError(f"--labels={options.labels} has {len(labels)} names for {len(options.run)} runs")
    options.out = options.out.expanduser()
    runs = read_runs([folder.expanduser() for folder in options.run], labels)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        pictures = draw_all(runs, options.out)
        page = options.out / PAGE
        text = render(runs, pictures, options.title)
        replace(page, lambda file: file.write(text.encode("utf-8", "replace")))
    except OSError as error:
        raise UserError(f"--out={options.out} cannot be written: {error}") from error
    return _in_short([final_figures(run) for run in runs], page)


def _folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("'' is not allowed: it must be a folder")
    return Path(text)


def _in_short(rows: Sequence[Sequence[str]], page: Path) -> str:
    from rich import get_console
    from rich.table import Table
    from rich.text import Text

    shown = [COLUMNS.index(name) for name in IN_SHORT]
    table = Table(box=None, pad_edge=False)
    for i in shown:
        table.add_column(COLUMNS[i], justify="left" if i == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(row[i]) for i in shown))
    console = get_console()
    with console.capture() as shown_here:
        console.print(table)
        console.print(f"\n{page} has the rest, and the curves", highlight=False, markup=False, soft_wrap=True)
    return shown_here.get()
