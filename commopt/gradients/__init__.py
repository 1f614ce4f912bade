"""Compressed means of gradients, for any optimizer that follows."""

from commopt.gradients.all_gather import Differences
from commopt.gradients.connecting import compress_gradients
from commopt.gradients.handle import CompressedGradients
from commopt.gradients.loco import LoCo

__all__ = ["CompressedGradients", "Differences", "LoCo", "compress_gradients"]
