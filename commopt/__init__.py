"""commopt: drop-in distributed PyTorch optimizers with compressed communication.

optimizer = commopt.OneBitAdam(model.parameters(), lr=1e-3)        # was torch.optim.Adam(...)
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from commopt.attach import attach
from commopt.gradients import compress_gradients
from commopt.optim import (
    CSER,
    Guard,
    Lamb,
    Lans,
    Muon,
    OneBitAdam,
    OneBitLamb,
    OneBitLion,
    QSparseLocalSGD,
    ZeroOneAdam,
    sort_parameters,
)
from commopt.outer import DiLoCo, Gossip, LocalSGD, Members, Mixed, NoLoCo, SignMomentum, SlowMo, SparseLoCo, Streaming

__version__ = "0.2.0"

__all__ = [
    "CSER",
    "DiLoCo",
    "Gossip",
    "Guard",
    "Lamb",
    "Lans",
    "LocalSGD",
    "Members",
    "Mixed",
    "Muon",
    "NoLoCo",
    "OneBitAdam",
    "OneBitLamb",
    "OneBitLion",
    "QSparseLocalSGD",
    "SignMomentum",
    "SlowMo",
    "SparseLoCo",
    "Streaming",
    "ZeroOneAdam",
    "__version__",
    "attach",
    "compress_gradients",
    "sort_parameters",
]


if not TYPE_CHECKING:  # to a type checker every name would be there

    def __getattr__(name: str) -> ModuleType:
        """``commopt.integrations``, imported when it is asked for."""
        if name == "integrations":
            return importlib.import_module("commopt.integrations")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
