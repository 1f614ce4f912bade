"""Compressors: rows of floats <-> rows of bytes, and the residuals of what they lose."""

from commopt.compress.compressor import Chunk, Compressor, FrozenAdam, Momentum
from commopt.compress.feedback import Feedback, Spared
from commopt.compress.identity import Identity
from commopt.compress.random_block import Blocks, RandomBlocks
from commopt.compress.sign import Sign
from commopt.compress.top_k import TopK

__all__ = [
    "Blocks", "Chunk", "Compressor", "Feedback", "FrozenAdam", "Identity", "Momentum", "RandomBlocks", "Sign",
    "Spared", "TopK",
]  # fmt: skip
