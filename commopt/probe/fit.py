"""Times -> latency and bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

HUBER = 0.1
"""Relative error from which on a sample counts less."""


@dataclass(frozen=True)
class Line:
    """seconds = latency + bytes * per_byte.

    Attributes:
        latency: seconds, >= 0.
        per_byte: seconds per byte on the wire, >= 0.
    """

    latency: float
    per_byte: float

    def __call__(self, nbytes: float) -> float:
        """Seconds for ``nbytes``."""
        return self.latency + nbytes * self.per_byte

    @property
    def bits_per_second(self) -> float:
        """Bandwidth; infinite if no message was large enough to tell."""
        return 8 / self.per_byte if self.per_byte > 0 else float("inf")


def fit_line(nbytes: Sequence[float], seconds: Sequence[float]) -> Line:
    """The line nearest to the samples in relative error, by iteratively reweighted least squares (Huber's weights): an
    outlier has a bounded pull, and 0.1 ms counts at 1 ms as 0.1 s does at 1 s.

    Args:
        nbytes, seconds: samples, at least one; seconds > 0.
    """
    x, t = np.asarray(nbytes, dtype=float), np.asarray(seconds, dtype=float)
    weights = np.ones_like(t)
    line = Line(0.0, 0.0)
    for _ in range(50):
        line = _weighted(x / t, 1 / t, weights)
        errors = np.abs(line.latency / t + line.per_byte * x / t - 1)
        weights = np.sqrt(HUBER / np.maximum(errors, HUBER))
    return line


def _weighted(x: np.ndarray, one: np.ndarray, weights: np.ndarray) -> Line:
    """argmin sum w^2 (a * one + b * x - 1)^2 over a, b >= 0."""
    columns = np.stack([one, x], axis=1) * weights[:, None]
    best, least = Line(0.0, 0.0), np.inf
    for used in ([0, 1], [0], [1]):  # the whole plane first, then its two edges
        solution = np.zeros(2)
        solution[used] = np.linalg.lstsq(columns[:, used], weights, rcond=None)[0]
        error = float(np.square(columns @ solution - weights).sum())
        if (solution >= 0).all() and error < least:
            best, least = Line(float(solution[0]), float(solution[1])), error
    return best


def line_through(few: tuple[float, float], many: tuple[float, float]) -> Line:
    """The line through two (bytes, seconds), without a slope or a latency below 0; without a slope, too, where both are
    of as many bytes, as small rows of many ranks are."""
    per_byte = max(0.0, (many[1] - few[1]) / (many[0] - few[0])) if many[0] != few[0] else 0.0
    return Line(max(0.0, few[1] - per_byte * few[0]), per_byte)


def misfit(line: Line, nbytes: Sequence[float], seconds: Sequence[float]) -> float:
    """Median of the relative errors of ``line``."""
    return float(np.median([abs(line(x) / t - 1) for x, t in zip(nbytes, seconds)]))


def share_of_largest(line: Line, nbytes: Sequence[float], seconds: Sequence[float]) -> float:
    """Times that the sample of most bytes took of what ``line`` says for it."""
    most, took = max(zip(nbytes, seconds))
    return took / line(most)
