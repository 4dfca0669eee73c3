"""The median of repeated measurements, and an interval in which the true median lies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Spread:
    """Repeated measurements of one quantity. low, high: the interval of `interval_ranks`, in the quantity's unit."""

    median: float
    low: float
    high: float
    repeats: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of at least one value."""
        ordered = sorted(values)
        first, last = interval_ranks(len(ordered))
        return cls(float(np.median(ordered)), ordered[first - 1], ordered[last - 1], len(ordered))

    @classmethod
    def after_first(cls, values: Sequence[float]) -> Spread:
        """Return the spread of all but the first of at least two values: the first run warms up what later ones use."""
        return cls.of(values[1:])


def interval_ranks(repeats: int) -> tuple[int, int]:
    """Return the ranks j and k, from 1, of the sorted values between which the true median lies, whatever the
    distribution: the narrowest symmetric ones that do so with a confidence of 0.95.

    Fewer than 6 values cannot reach 0.95; their interval is from the least to the largest.
    Source: thesis, equation 5.1: B(k - 1) - B(j - 1) >= 1 - alpha, B of the binomial distribution with p = 1/2.

    >>> interval_ranks(10)
    (2, 9)
    """
    if repeats < 1:
        raise ConfigError(f"repeats is {repeats}; an interval needs at least one measurement")
    outside, first = 0.0, 1
    for rank in range(1, repeats // 2 + 1):
        outside += 2 * math.comb(repeats, rank - 1) / 2**repeats
        if outside > 1 - 0.95:
            break
        first = rank
    return first, repeats + 1 - first
