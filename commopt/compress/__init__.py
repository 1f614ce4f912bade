"""Compressors: rows of floats <-> rows of bytes, and the residuals of what they lose."""

from commopt.compress.bfloat16 import BFloat16
from commopt.compress.compressor import Chunk, Compressor, FrozenAdam, Momentum
from commopt.compress.feedback import NOTHING, Feedback, Spared
from commopt.compress.float8 import Float8
from commopt.compress.identity import Identity
from commopt.compress.integers import Int2, Int4, Int8
from commopt.compress.low_rank import ACP, PowerSGD
from commopt.compress.random_block import Blocks, RandomBlocks
from commopt.compress.sign import Sign
from commopt.compress.threshold_top_k import ThresholdTopK
from commopt.compress.top_blocks import TopBlocks
from commopt.compress.top_k import TopK

__all__ = [
    "ACP", "NOTHING", "BFloat16", "Blocks", "Chunk", "Compressor", "Feedback", "Float8", "FrozenAdam", "Identity",
    "Int2", "Int4", "Int8", "Momentum", "PowerSGD", "RandomBlocks", "Sign", "Spared", "ThresholdTopK",
    "TopBlocks", "TopK",
]  # fmt: skip
