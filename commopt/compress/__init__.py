"""Compressors: rows of floats <-> rows of bytes, and the residuals of what they lose."""

from commopt.compress.compressor import Chunk, Compressor, FrozenAdam, Momentum
from commopt.compress.feedback import NOTHING, Feedback, Spared
from commopt.compress.identity import Identity
from commopt.compress.low_rank import ACP, PowerSGD
from commopt.compress.random_block import Blocks, RandomBlocks
from commopt.compress.sign import Sign

__all__ = [
    "ACP", "NOTHING", "Blocks", "Chunk", "Compressor", "Feedback", "FrozenAdam", "Identity", "Momentum", "PowerSGD",
    "RandomBlocks", "Sign", "Spared",
]  # fmt: skip
