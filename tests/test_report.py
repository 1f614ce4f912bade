"""``commopt report``: figures that can be recomputed, pictures that are there, mistakes that are named."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from commopt.cli import main
from commopt.report.page import COLUMNS, final_figures
from commopt.report.pictures import _residuals, _training
from commopt.report.runs import read_runs, short_names
from commopt.train.errors import UserError
from commopt.train.plot import new_figure, phase_switch


def write_run(folder: Path, name: str, steps: int = 8, switch: int | None = 4, **changes: Any) -> Path:
    """A run that sends 32 MB a step, and 1 MB after step ``switch``; its held-out loss is 10 - step."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"optim: {{name: {name}}}\n")
    sent, lines = 0, []
    for step in range(1, steps + 1):
        compressed = switch is not None and step > switch
        nbytes = 1_000_000 if compressed else 32_000_000
        sent += nbytes
        record = {
            "step": step, "loss": 11.0 - step, "phase": "compressed" if compressed else "warmup", "bytes": nbytes,
            "residual_ratio": 0.5 if compressed else None, "tokens_total": 1000 * step, "seconds": 0.5 * step,
            "bytes_total": sent, "fp32_bytes_total": 32_000_000 * step, "compressed_steps": 0, "skipped_steps": 1,
        }  # fmt: skip
        if step % 2 == 0:
            record["heldout_loss"] = 10.0 - step
        lines.append(json.dumps(record | changes))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


class Page(HTMLParser):
    """Cells, headings and pictures of a page; whether every tag is closed; and what it would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.pictures: list[bytes] = []
        self.loads: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        for key in ("src", "href"):
            value = given.get(key) or ""
            if value.startswith("data:image/png;base64,"):
                self.pictures.append(base64.b64decode(value.partition(",")[2]))
            elif value:
                self.loads.append(value)
        if tag in ("meta", "img"):
            return
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data.strip()


def test_the_figures_are_those_of_the_records(tmp_path: Path) -> None:
    (run,) = read_runs([write_run(tmp_path / "a", "OneBitAdam")])
    assert dict(zip(COLUMNS, final_figures(run))) == {
        "run": "a",
        "optimizer": "OneBitAdam",
        "steps": "8",
        "tokens, millions": "0.008",
        "held-out loss": "2.0000",
        "lowest": "2.0000",
        "MB sent": "132.0",
        "less than fp32": "1.9 x",
        "MB a step, by phase": "warmup 32\ncompressed 1",
        "seconds": "4.0",
        "tokens/s": "2,000",
        "steps skipped": "1",
    }
    assert run.points("tokens_total", "heldout_loss", 1e-3) == ([2, 4, 6, 8], [8, 6, 4, 2])


def test_a_page_that_needs_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write_run(tmp_path / "runs" / "a", "OneBitAdam"), write_run(tmp_path / "runs" / "b<", "AdamW", switch=None)]
    out = tmp_path / "out"
    assert main(["report", *map(str, runs), "--out", str(out), "--title", "A & B"]) == 0
    page = Page((out / "report.html").read_text())
    assert page.loads == []
    assert [row[0] for row in page.rows] == ["run", "a", "b<"]
    assert page.rows[0] == list(COLUMNS)
    names = ["heldout.png", "training.png", "bytes.png", "residuals.png"]
    assert page.pictures == [(out / name).read_bytes() for name in names]
    assert all(picture.startswith(b"\x89PNG") for picture in page.pictures)
    assert sorted(p.name for p in out.iterdir()) == sorted([*names, "report.html"])
    assert "<title>A &amp; B</title>" in (out / "report.html").read_text()
    said = capsys.readouterr().out
    assert re.search(r"a +8 +2.0000 +132.0 +1.9 x +4.0", said)
    assert re.search(r"b< +8 +2.0000 +256.0 +1.0 x +4.0", said)


def test_a_folder_without_a_record_is_left_out_where_others_have_some(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a run that has just begun, among those of runs/*; labels stay with their runs."""
    first, begun, last = (write_run(tmp_path / name, name) for name in "abc")
    (begun / "metrics.jsonl").write_text("")
    (begun / "config.yaml").write_text("- no\n- config: [")
    for labels, names in (((), ["a", "c"]), (("x", "y", "z"), ["x", "z"])):
        runs = read_runs([first, begun, last], labels)
        assert [(run.label, run.optimizer) for run in runs] == list(zip(names, "ac"))
    said = f"{begun} has no run: metrics.jsonl is missing, empty, or damaged in every line; it is left out"
    assert caplog.messages == [said, said]
    with pytest.raises(UserError, match="c is no folder"):
        read_runs([first, begun, tmp_path / "nowhere" / "c"])


def test_a_run_of_one_record_can_be_seen(tmp_path: Path) -> None:
    run = read_runs([write_run(tmp_path / "a", "AdamW", steps=1, residual_ratio=0.5)])
    for draw in (_training, _residuals):
        figure = new_figure(4, 3)
        assert draw(figure, run)
        (line,) = figure.axes[0].lines
        assert (len(line.get_xdata()), line.get_marker()) == (1, "o")


def test_what_a_run_does_not_have_is_left_out(tmp_path: Path) -> None:
    """One rank: nothing is sent, nothing is owed; and it was never evaluated."""
    run = write_run(tmp_path / "alone", "AdamW", switch=None, bytes=0, bytes_total=0, heldout_loss=None)
    (run / "config.yaml").unlink()
    assert main(["report", str(run), "--out", str(tmp_path / "out")]) == 0
    page = Page((tmp_path / "out/report.html").read_text())
    assert dict(zip(*page.rows))["held-out loss"] == dict(zip(*page.rows))["less than fp32"] == "-"
    assert dict(zip(*page.rows))["optimizer"] == "?"
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["report.html", "training.png"]


@pytest.mark.parametrize(
    ("compressed", "step"),
    [
        ([0, 0, 10, 20], 20),
        ([0, 10, 10, 20], 30),  # back in the warm-up meanwhile
        ([10, 20, 20, 20], None),  # it ends there
        ([0, 0, 0, 0], None),
        ([10, 20, 30, 40], None),
        ([0, 0, 0, 4], 36),
    ],
)
def test_where_all_is_compressed_from_in_the_picture(compressed: list[int], step: int | None) -> None:
    records = [{"step": 10 * (i + 1), "compressed_steps": n} for i, n in enumerate(compressed)]
    assert phase_switch(records) == step


def test_labels(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name / "run", "AdamW") for name in ("x", "y")]
    assert short_names(folders) == ["x/run", "y/run"]
    assert short_names(folders[:1]) == ["run"]
    assert short_names([tmp_path / "x", tmp_path / "x/run"]) == ["x", "run"]
    assert [run.label for run in read_runs(folders, ["one", "two"])] == ["one", "two"]


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    outer, inner = write_run(tmp_path / "run", "AdamW"), write_run(tmp_path / "run/run", "AdamW")
    assert [run.label for run in read_runs([outer, inner, outer])] == ["run", "run (2)", "run (3)"]
    labels = ["a", "a (2)", "a ", "a"]
    assert [run.label for run in read_runs([outer] * 4, labels)] == ["a", "a (2)", "a (3)", "a (4)"]


def test_mistakes_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, empty = write_run(tmp_path / "a", "AdamW"), tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "file").write_text("")
    cases = [
        ([str(tmp_path / "nowhere")], "nowhere is no folder: give run folders, as train.run_dir names them"),
        ([str(empty)], "empty has no run: metrics.jsonl is missing, empty, or damaged in every line"),
        ([str(run), "--labels=a,b"], "--labels=a,b has 2 names for 1 runs"),
        ([str(run), f"--out={tmp_path}/file"], "file cannot be written"),
    ]
    for argv, message in cases:
        assert main(["report", f"--out={tmp_path}/out", *argv]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="no run"):
        read_runs([empty])


def test_a_folder_below_one_that_may_not_be_entered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "a", "AdamW")
    with mock.patch.object(Path, "is_dir", side_effect=PermissionError(13, "Permission denied")):
        assert main(["report", str(run), f"--out={tmp_path}/out"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{run}: metrics.jsonl cannot be read: Permission denied" in line


TOTALS = {"tokens_total": 0, "seconds": 0.0, "fp32_bytes_total": 0, "compressed_steps": 0, "skipped_steps": 0}
LABELS = ["$\\frac{$", "[/red]", "_hidden", "a\\$b$", "\udcff\n[bold]"]


def test_labels_are_text_to_everyone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither formulas, nor markup, nor hidden; one that is no UTF-8 is shown as far as it can be."""
    runs = [write_run(tmp_path / str(i), "'[/blue]$'") for i in range(len(LABELS))]
    out = tmp_path / "out[/red]"
    assert main(["report", *map(str, runs), f"--labels={','.join(LABELS)}", f"--out={out}", "--title=$[/x]"]) == 0
    page = Page((out / "report.html").read_text())
    shown = ["$\\frac{$", "[/red]", "_hidden", "a\\$b$", "? [bold]"]
    assert [row[0] for row in page.rows[1:]] == shown
    assert {row[1] for row in page.rows[1:]} == {"[/blue]$"}
    said = capsys.readouterr().out
    assert all(f"{label} " in said for label in shown)
    assert "out[/red]" in said.replace("\n", "")


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi")
)
BAD_YAML = {
    "bomb": (BOMB, "comes to more than 100000 values, aliases written out"),
    "endless": ("optim: &a [*a]", "line 1 has an alias for what it is in (*a)"),
    "tag": ("optim: !!python/object/apply:os.getcwd []", "line 1 has a tag"),
    "own tag": ("optim: !mine {name: A}", "line 1 has a tag"),
    "deep": ("[" * 100_000, "levels deep"),
    "large": ("# " + "x" * (1 << 20), "more than 1048576 bytes"),
    "cut": ("optim: {name", "not valid YAML"),
    "date": ("optim: 2020-99-99", "not valid YAML"),
    "digits": ("optim: " + "9" * 5000, "not valid YAML"),
    "control": ("optim: \x00", "not valid YAML"),
    "key": ("{[1]: 2}", "not valid YAML"),
}


@pytest.mark.parametrize("case", BAD_YAML)
def test_a_config_that_is_no_config_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    text, message = BAD_YAML[case]
    run = write_run(tmp_path / "a", "AdamW")
    (run / "config.yaml").write_text(text)
    for argv in (["report", str(run), f"--out={tmp_path}/out"], ["train", str(run / "config.yaml")]):
        assert main(argv) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{run / 'config.yaml'}: " in line
        assert message in line


def test_a_config_of_another_shape_is_no_mistake(tmp_path: Path) -> None:
    runs = []
    for number, text in enumerate(["[]", "optim: 3", "optim: {name: [1]}", ""]):
        runs.append(write_run(tmp_path / f"run{number}", "AdamW"))
        (runs[-1] / "config.yaml").write_text(text)
    assert main(["report", *map(str, runs), f"--out={tmp_path}/out"]) == 0


def test_totals_that_fall_are_no_mistake(tmp_path: Path) -> None:
    """Another program's records."""
    lines = [{**TOTALS, "step": step, "phase": "warmup", "bytes": 1, "bytes_total": 9 - step} for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    assert main(["report", str(tmp_path), f"--out={tmp_path}/out"]) == 0


def test_bytes_of_a_step_are_the_mean_where_steps_differ(tmp_path: Path) -> None:
    """A round of 8 bytes every 4th step, and records of those alone; a phase of one record has what that says."""
    lines = [
        {**TOTALS, "step": step, "phase": phase, "bytes": sent, "bytes_total": total}
        for step, phase, sent, total in [
            (4, "warmup", 32, 128), (8, "synchronizing", 8, 136), (12, "synchronizing", 8, 144), (17, "local", 0, 152),
        ]
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    (run,) = read_runs([tmp_path])
    assert run.bytes_by_phase() == {"warmup": 32, "local steps": 16 / 9}
