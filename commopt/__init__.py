"""commopt: drop-in distributed PyTorch optimizers with compressed communication.

optimizer = commopt.OneBitAdam(model.parameters(), lr=1e-3)        # was torch.optim.Adam(...)
"""

from commopt.attach import attach
from commopt.optim import Lamb, OneBitAdam, OneBitLamb, ZeroOneAdam

__version__ = "0.1.0"

__all__ = ["Lamb", "OneBitAdam", "OneBitLamb", "ZeroOneAdam", "__version__", "attach"]
