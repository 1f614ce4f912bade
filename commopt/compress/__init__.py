"""Compressors: rows of floats <-> rows of bytes, and the residuals of what they lose."""

from commopt.compress.compressor import Compressor, Momentum
from commopt.compress.feedback import Feedback
from commopt.compress.identity import Identity
from commopt.compress.sign import Sign

__all__ = ["Compressor", "Feedback", "Identity", "Momentum", "Sign"]
