"""Compressed means of gradients, for any optimizer that follows."""

from commopt.gradients.handle import CompressedGradients, compress_gradients
from commopt.gradients.loco import LoCo

__all__ = ["CompressedGradients", "LoCo", "compress_gradients"]
