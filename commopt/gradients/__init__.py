"""Compressed means of gradients, for any optimizer that follows."""

from commopt.gradients.handle import CompressedGradients, compress_gradients

__all__ = ["CompressedGradients", "compress_gradients"]
