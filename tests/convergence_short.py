"""A rank of scripts/convergence.py, whose runs of the digits are of 10 steps."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import convergence_rank
from convergence_tasks import TASKS

TASKS["digits"] = replace(TASKS["digits"], steps=10)

if __name__ == "__main__":
    convergence_rank.main()
