"""The pages name what there is: links, paths and names of commopt lead somewhere, and an example is the code itself."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel
from worlds import Toy, Used, on_threads, params_of, same_bits, tensors_in, train

import commopt
from commopt import OneBitAdam
from commopt.comm import ThreadBackend

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def anchors(page: Path) -> set[str]:
    """What the headings of a page are called in links, as GitHub does it."""
    heads = [line.lstrip("#").strip().lower() for line in page.read_text().splitlines() if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", head).replace(" ", "-") for head in heads}


def exists(name: str) -> bool:
    """Whether ``name``, with dots, is a module or what lies in one. The doors of frameworks are not opened for that."""
    if name.startswith("commopt.integrations."):
        return importlib.util.find_spec(".".join(name.split(".")[:3])) is not None
    first, *rest = name.split(".")
    found = importlib.import_module(first)
    for i, part in enumerate(rest):
        if not hasattr(found, part):
            try:
                importlib.import_module(".".join([first, *rest[: i + 1]]))
            except ImportError:
                return False
        found = getattr(found, part)
    return True


@pages
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if link.startswith("http"):
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pages
def test_paths_exist(page: Path) -> None:
    for path in re.findall(r"\b(?:benchmarks|configs|docs|scripts|tests)/[\w./*-]*\w", page.read_text()):
        assert list(ROOT.glob(path)), path


@pages
def test_names_of_commopt_exist(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        return  # has old names, too
    for name in set(re.findall(r"\bcommopt(?:\.[A-Za-z_]\w*)+", page.read_text())):
        assert exists(name), name


def test_doors_name_the_versions_that_are_tested() -> None:
    pins = re.findall(r"(?m)^([\w-]+)==([\d.]+)", (ROOT / "constraints.txt").read_text())
    told = re.findall(r"\| ([a-z]+) (\d+\.\d+\.\d+) \|", (ROOT / "docs" / "doors.md").read_text())
    assert {name for name, _ in told} >= {
        "torch",
        "transformers",
        "accelerate",
        "lightning",
        "timm",
        "torchtitan",
        "peft",
    }
    assert set(told) <= set(pins)


def test_a_name_that_does_not_exist_is_seen() -> None:
    assert exists("commopt.optim.policies.SyncPolicy")
    assert not exists("commopt.optim.schedules")
    assert not exists("commopt.optim.policies.Missing")
    assert exists("commopt.integrations.timm")
    assert not exists("commopt.integrations.missing")


def test_the_example_of_an_optimizer_is_the_code() -> None:
    source = textwrap.dedent(inspect.getsource(OneBitAdam.compressed))
    assert source in (ROOT / "ARCHITECTURE.md").read_text()


def test_the_readme_is_a_page() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110


def rows(page: str) -> list[list[str]]:
    """The cells of the rows of all tables of a page."""
    lines = re.findall(r"(?m)^\|(.*)\|$", (ROOT / "docs" / page).read_text())
    return [[cell.strip() for cell in line.split("|")] for line in lines]


def test_figures_that_are_quoted_are_those_of_the_tables() -> None:
    learnt = {row[1]: row for row in rows("convergence.md") if row[0] == "gpt"}
    timed = {row[0]: row for row in rows("gradients_measured.md") if " ms, " in row[1]}
    columns = next(row for row in rows("gradients_measured.md") if "2 hosts, 100mbit" in row)
    places = [columns.index(name) for name in ("2 hosts, 100mbit", "2 hosts, 1gbit", "MB a host of 2")]
    quoted = rows("choosing.md")
    start = quoted.index(["method", "gap, gpt", "within the spread", "sent, gpt"]) + 2
    stop = quoted.index(["method", "100 Mbit/s", "1 Gbit/s", "MB a host"])
    assert stop - start > 5
    for name, *figures in quoted[start:stop]:
        assert figures == [learnt[name][i] for i in (5, 6, 8)], name
    end = quoted.index(["method", "more"])
    assert end - stop > 6
    for name, *figures in quoted[stop + 2 : end]:
        slow, fast, sent = (timed[name][place] for place in places)
        assert figures == [slow.split(",")[0], fast.split(",")[0], sent], name
    speed = {row[0]: [cell.split(",")[0] for cell in row[1:3]] for row in rows("speed.md") if " ms, " in row[1]}
    for page in ("index.md", "faq.md"):
        text = " ".join((ROOT / "docs" / page).read_text().split())
        for name in ("OneBitAdam", "DDP, AdamW"):
            assert all(re.search(rf"\b{time.split()[0]}\b", text) for time in speed[name]), (page, name)
    for page, name in (("acp", "DDP, AdamW on ACP(4)"), ("powersgd", "DDP, AdamW on PowerSGD(4)")):
        text = (ROOT / "docs" / f"compressor_{page}.md").read_text()
        for one in (name, "DDP, PowerSGD rank 4"):
            assert re.search(rf"\b{timed[one][places[0]].split()[0]}\b", text), (page, one)


def programs(page: str) -> list[str]:
    """The blocks of Python of a page."""
    return re.findall(r"(?ms)^```python\n(.*?)^```$", (ROOT / "docs" / page).read_text())


@pytest.mark.parametrize("first_block", [0, 2], ids=["each rank's own file", "one file"])
def test_the_lines_that_save_and_resume_do_so(tmp_path: Path, first_block: int) -> None:
    save, load = programs("saving.md")[first_block : first_block + 2]

    def made(backend: ThreadBackend) -> dict[str, Any]:
        model = Toy()
        settings: dict[str, Any] = {"lr": 1e-2, "freeze_step": 3, "backend": backend}
        return {
            "commopt": commopt, "torch": torch, "folder": tmp_path, "path": tmp_path / "all.pt", "rank": backend.rank,
            "saved_world_size": 2, "world_size": backend.world_size, "model": model,
            "optimizer": OneBitAdam(model.parameters(), **settings),
        }  # fmt: skip

    def trained(names: dict[str, Any], steps: range) -> list[torch.Tensor]:
        train(names["model"], names["optimizer"], steps, names["rank"], names["world_size"])
        return params_of(names["model"])

    def first(backend: ThreadBackend) -> list[torch.Tensor]:
        names = made(backend)
        trained(names, range(6))
        exec(save, names)
        return trained(names, range(6, 9))

    def resumed(backend: ThreadBackend) -> list[torch.Tensor]:
        names = made(backend)
        exec(load, names)
        assert names["optimizer"].phase == ("plain" if backend.world_size == 1 else "compressed")
        assert backend.world_size == 1 or names["optimizer"].residual_norm() > 0
        return trained(names, range(6, 9))

    never_stopped = on_threads(2, first)
    assert all(same_bits(a, b) for a, b in zip(never_stopped, on_threads(2, resumed)))
    for world_size in (1, 3):
        results = on_threads(world_size, resumed)
        assert all(same_bits(results[0], other) for other in results)


def test_the_lines_that_save_residuals_do_so(tmp_path: Path) -> None:
    block = programs("saving.md")[4]

    def run(backend: ThreadBackend) -> None:
        def made() -> tuple[Used, commopt.gradients.CompressedGradients]:
            model = Used()
            return model, commopt.compress_gradients(model, commopt.compress.Sign(16), backend=backend)

        (model, handle), (_, other) = made(), made()
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), range(4), backend.rank, backend.world_size)
        both = SimpleNamespace(state_dict=handle.state_dict, load_state_dict=other.load_state_dict)
        exec(block, {"torch": torch, "folder": tmp_path, "rank": backend.rank, "handle": both})
        residuals = tensors_in(handle.state_dict()["residuals"])
        assert same_bits(residuals, tensors_in(other.state_dict()["residuals"]))
        assert any(bool(x.any()) for x in residuals)

    on_threads(2, run)


def test_scripts_run_by_their_names() -> None:
    """Those that say by what they are run, and no others."""
    scripts = (ROOT / "scripts").glob("*.py")
    assert [path.name for path in scripts if path.read_bytes().startswith(b"#!") != os.access(path, os.X_OK)] == []


@pytest.mark.parametrize("number", [5, 6], ids=["the model", "its moving average, after one update"])
def test_the_lines_that_save_the_mean_model_do_so(tmp_path: Path, number: int) -> None:
    block = programs("saving.md")[number]

    def run(backend: ThreadBackend) -> list[torch.Tensor]:
        model = Used()
        optimizer = commopt.LocalSGD(model.parameters(), torch.optim.SGD, lr=0.1, period=8, backend=backend)
        train(model, optimizer, range(5), backend.rank, backend.world_size)
        names = {"torch": torch, "optimizer": optimizer, "model": model, "ema": AveragedModel(model)}
        exec(block, {**names, "rank": backend.rank, "path": path})
        return params_of(model)

    path = tmp_path / "mean.pt"
    ranks = on_threads(2, run)
    model = Used()
    model.load_state_dict(torch.load(path))
    assert not same_bits(*ranks)
    for mean, *values in zip(params_of(model), *ranks):
        torch.testing.assert_close(mean, sum(values) / 2)
