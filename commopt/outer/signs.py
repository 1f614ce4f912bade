"""Signs for a sign-momentum step: exact, or drawn at random with the right mean.

The draws come from a counter, not from a generator that has a state: a number is a function of (seed, round, position
of the element in the model). So they are the same on every rank, on every device, after a resume and for every size of
buckets, and torch's global generator is never touched.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from commopt.agreement.checks import check_int, check_positive

_MASK = (1 << 64) - 1
_STEP, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # splitmix64


def _signed(x: int) -> int:
    """The int64 with the bits of the uint64 ``x``."""
    return x - (1 << 64) if x >> 63 else x


def _mix(x: int) -> int:
    """A bijection of 64-bit numbers whose output bits each depend on all input bits."""
    x = ((x ^ (x >> 30)) * _MIX1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX2) & _MASK
    return x ^ (x >> 31)


def _xor_shift(x: Tensor, k: int) -> Tensor:
    """x ^ (x >> k), the shift being that of unsigned numbers."""
    return x ^ ((x >> k) & ((1 << (64 - k)) - 1))


def uniform(seed: int, number: int, start: int, n: int, device: torch.device | str = "cpu") -> Tensor:
    """Draws from [0, 1) that are functions of their place alone.

    Args:
        seed, number: which stream, such as a user's seed and the number of a round.
        start: position of the first draw in the stream.
        n: how many.
        device: where they are put.

    Returns:
        (n,) float64, multiples of 2**-53.
    """
    key = _mix((_mix((seed + _STEP) & _MASK) ^ ((number * _STEP) & _MASK)) & _MASK)
    x = torch.arange(start + 1, start + 1 + n, dtype=torch.int64, device=device)
    x.mul_(_signed(_STEP)).add_(_signed(key))  # int64 wraps around as uint64 does
    x = _xor_shift(x, 30).mul_(_signed(_MIX1))
    x = _xor_shift(x, 27).mul_(_signed(_MIX2))
    x = _xor_shift(x, 31)
    return ((x >> 11) & ((1 << 53) - 1)).double().mul_(2.0**-53)


class SignRule(ABC):
    """Rule for how far a sign-momentum step moves a parameter, given the vector u."""

    @abstractmethod
    def of(self, u: Tensor, number: int, start: int) -> Tensor:
        """Signs of ``u``.

        Args:
            u: of one parameter, float32 or float64; unchanged.
            number: of the round.
            start: position of its first element in the model, or in what this rank holds of it.

        Returns:
            like u, of -1, 0 and 1.
        """


@dataclass(frozen=True)
class ExactSign(SignRule):
    """sign(u), with sign(0) = 0."""

    def of(self, u: Tensor, number: int, start: int) -> Tensor:
        return u.sign()


@dataclass(frozen=True)
class RandomSign(SignRule):
    """sign(u_j) with probability 1/2 + |u_j| / 2B, else -sign(u_j); 0 where u_j = 0. The mean is u / B.

    (At 0 a coin would have the same mean; but it would move what never had a gradient.)

    Args:
        seed: of the draws, the same on all ranks.
        bound: B > 0; larger elements count as B. None is the largest |u_j| of the parameter; where that is sharded, of
            this rank's piece of it.

    Raises:
        ValueError: for a bound or seed out of range.
    """

    seed: int = 0
    bound: float | None = None

    def __post_init__(self) -> None:
        check_int("seed", self.seed)
        if self.bound is not None:
            check_positive("bound", self.bound)

    def of(self, u: Tensor, number: int, start: int) -> Tensor:
        if u.numel() == 0:
            return u.clone()
        draws = uniform(self.seed, number, start, u.numel(), u.device).view(u.shape)
        return self._draw(u, u.double() / (u.abs().amax().double() if self.bound is None else self.bound), draws)

    def _draw(self, u: Tensor, ratio: Tensor, draws: Tensor) -> Tensor:
        plus = draws < ratio.mul_(0.5).add_(0.5)
        return torch.where(plus, 1.0, -1.0).to(u.dtype).mul_(u != 0)


@dataclass(frozen=True)
class RandomSignOrZero(RandomSign):
    """sign(u_j) with probability |u_j| / B, else 0. The mean is u / B, as of :class:`RandomSign`, with less noise."""

    def _draw(self, u: Tensor, ratio: Tensor, draws: Tensor) -> Tensor:
        return u.sign().mul_(draws < ratio.abs_())
