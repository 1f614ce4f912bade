"""commopt: drop-in distributed PyTorch optimizers with compressed communication."""

__version__ = "0.1.0"
