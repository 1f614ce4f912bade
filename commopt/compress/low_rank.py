"""Low rank: a matrix as the product of two thin factors. Not for rows of bytes: for gradients alone, which have shapes
(:func:`commopt.compress_gradients`).

PowerSGD (arXiv 1905.13727) takes a step of subspace iteration for each mean, with a mean for each factor; ACP-SGD
(arXiv 2306.08881) takes P and Q in turns, one factor and one mean a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LowRank:
    """Base of :class:`PowerSGD` and :class:`ACP`: see there.

    Args:
        rank: r, columns of the factors, >= 1.
        min_compression: a matrix of n x m is sent whole unless n m >= min_compression r (n + m); > 0.
        seed: of the factors that a run starts with; >= 0.

    Raises:
        ValueError: for an argument out of range.
    """

    rank: int = 4
    min_compression: float = 2.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("rank", 1), ("seed", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} must be an int >= {least}, got {value!r}")
        if not self.min_compression > 0:
            raise ValueError(f"min_compression must be > 0, got {self.min_compression!r}")

    def factors_of(self, shape: torch.Size) -> tuple[int, int, int] | None:
        """(n, m, r) for a tensor of ``shape``, seen as a matrix of shape[0] rows; None for one that is sent whole."""
        if len(shape) < 2 or 0 in shape:
            return None
        n, m = shape[0], shape[1:].numel()
        r = min(self.rank, n, m)
        return (n, m, r) if n * m >= self.min_compression * r * (n + m) else None


@dataclass(frozen=True)
class PowerSGD(LowRank):
    """P = mean(A_i) Q, orthonormal; Q = mean(A_i)' P. The mean is P Q': r (n + m) numbers for n m, in two
    all-reduces."""


@dataclass(frozen=True)
class ACP(LowRank):
    """In turns: Q orthonormal, P = mean(A_i) Q; and P orthonormal, Q = mean(A_i)' P. The mean is P Q': r n or r m
    numbers for n m, in one all-reduce."""
