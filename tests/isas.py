"""Instruction sets that the CPU kernels are written for."""

from __future__ import annotations

import platform

ISAS = ["neon", "plain"] if platform.machine() in ("aarch64", "arm64") else ["avx512", "avx2", "plain"]
"""Of this machine's kind, the best first."""
