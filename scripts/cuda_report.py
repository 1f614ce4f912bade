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
    """The table of whole steps."""
    models = facts["models"]
    names = list(next(iter(models.values())))
    lines = ["| | " + " | ".join(f"{model}: host ms | step ms" for model in models) + " |"]
    lines.append("| --- | " + " | ".join(["---:"] * (2 * len(models))) + " |")
    for name in names:
        cells = [f"{models[model][name][key]:.1f}" for model in models for key in ("host_ms", "step_ms")]
        lines.append(f"| {name.strip()} | " + " | ".join(cells) + " |")
    lines.append(f"\n{facts['device']}, torch {facts['torch']}; one of {facts['ranks']} ranks.")
    return "\n".join(lines)


def main() -> None:
    """Puts them between their marks."""
    for name, file, table in (("kernels", "cuda.json", kernels), ("steps", "gpu_step.json", steps)):
        facts = json.loads((ROOT / "benchmarks" / file).read_text(encoding="utf-8"))
        marks = f"<!-- {name}: made by scripts/cuda_report.py -->", f"<!-- /{name} -->"
        put(table(facts), ROOT / "docs" / "cuda.md", marks)


if __name__ == "__main__":
    main()
