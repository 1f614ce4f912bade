"""Writes the tables of docs/cuda.md from benchmarks/cuda.json and benchmarks/gpu_step.json.

python scripts/cuda_report.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from marked import put

ROOT = Path(__file__).parents[1]


def kernels(facts: dict[str, Any]) -> str:
    """The table of kernels."""
    lines = [
        "| operator | µs | B an element | GB/s | of a copy | × separate operations |",
        "| --- | " + " | ".join(["---:"] * 5) + " |",
    ]
    for row in facts["rows"]:
        rate = row["bytes_per_element"] * row["size"] / row["native_us"] / 1e3
        lines.append(
            f"| {row['name'].strip()} | {row['native_us']:.0f} | {row['bytes_per_element']:.1f} | {rate:,.0f} | "
            f"{100 * row['of_copy']:.0f} % | {row['speedup']:.1f} |"
        )
    size = facts["rows"][0]["size"]
    lines.append(f"\n{facts['device']}, torch {facts['torch']}, CuPy {facts['cupy']}; {size // 2**20} Mi elements.")
    return "\n".join(lines)


def steps(facts: dict[str, Any]) -> str:
    """The tables of whole steps: of those that are steps alone, side by side, and of each model that is trained."""
    models = facts["models"]
    alone, tables = [model for model in models if TRAINED not in models[model]], []
    lines = ["| | " + " | ".join(f"{model}: host ms | step ms" for model in alone) + " |"]
    lines.append("| --- | " + " | ".join(["---:"] * (2 * len(alone))) + " |")
    for name in models[alone[0]]:
        cells = [f"{models[model][name][key]:.1f}" for model in alone for key in ("host_ms", "step_ms")]
        lines.append(f"| {name.strip()} | " + " | ".join(cells) + " |")
    for model in models:
        if model not in alone:
            tables.append(training(model, models[model]))
    last = f"{facts['device']}, torch {facts['torch']}; one of {facts['ranks']} ranks."
    return "\n\n".join(["\n".join(lines), *tables, last])


TRAINED = "DiLoCo, local steps"
"""A row of the models whose forward and backward are in what is measured."""


def training(model: str, rows: dict[str, Any]) -> str:
    """The table of one model that is trained, in units of the first row, too."""
    least = next(iter(rows.values()))["step_ms"]
    lines = [f"| {model} | ms | × |", "| --- | ---: | ---: |"]
    lines += [f"| {name.strip()} | {row['step_ms']:.1f} | {row['step_ms'] / least:.2f} |" for name, row in rows.items()]
    return "\n".join(lines)


def main() -> None:
    """Puts them between their marks."""
    for name, file, table in (("kernels", "cuda.json", kernels), ("steps", "gpu_step.json", steps)):
        facts = json.loads((ROOT / "benchmarks" / file).read_text(encoding="utf-8"))
        marks = f"<!-- {name}: made by scripts/cuda_report.py -->", f"<!-- /{name} -->"
        put(table(facts), ROOT / "docs" / "cuda.md", marks)


if __name__ == "__main__":
    main()
