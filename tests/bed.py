"""The network bed of scripts/netbed.py, where there can be one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import netbed


def why_not() -> str:
    """What is missing for one; empty if nothing is."""
    try:
        netbed.NetBed(1, 10**6).close()
    except netbed.BedError as error:
        return str(error)
    return ""


NO_BED = why_not()
needs_bed = pytest.mark.skipif(bool(NO_BED), reason=f"no network namespaces here: {NO_BED}")
