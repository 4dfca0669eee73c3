"""How evenly a drive's blocks wore, and how long they will last."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.validate import check_above_zero, check_count

_DAYS_PER_YEAR = 365.25


@dataclass(frozen=True, slots=True, eq=False)
class Wear:
    """How often each block was erased.

    erases: int32[blocks].
    """

    erases: NDArray[np.int32]

    @property
    def least(self) -> int:
        """Return the erases of the least worn block."""
        return int(self.erases.min())

    @property
    def most(self) -> int:
        """Return the erases of the most worn block."""
        return int(self.erases.max())

    @property
    def mean(self) -> float:
        """Return the mean over all blocks."""
        return float(self.erases.mean())

    @property
    def deviation(self) -> float:
        """Return the standard deviation over all blocks."""
        return float(self.erases.std())

    def histogram(self, most_bins: int = 50) -> list[tuple[int, int, int]]:
        """Return (fewest erases, most erases, blocks) for bins of equal width, both ends inclusive.

        most_bins: at least 1; with fewer different numbers of erases than that, each has its own bin.
        Raises: ConfigError for fewer.
        """
        check_count("most_bins", most_bins)
        width = -(-(self.most - self.least + 1) // most_bins)
        counts = np.bincount((self.erases - self.least) // width)
        first = self.least
        return [
            (first + index * width, first + (index + 1) * width - 1, int(count))
            for index, count in enumerate(counts)
        ]


@dataclass(frozen=True, slots=True)
class Lifetime:
    """What the host can write until blocks have been erased as often as they are rated for.

    even_bytes: if all blocks wear alike from here on, inf where nothing was erased: no levelling can do better.
    first_block_bytes: until the first block is worn out, if wear stays as uneven as it was; inf likewise.
    """

    even_bytes: float
    first_block_bytes: float
    bytes_per_day: float | None

    @property
    def even_years(self) -> float | None:
        """Return how long it takes to write `even_bytes`; None where `bytes_per_day` is not known."""
        return self._years(self.even_bytes)

    @property
    def first_block_years(self) -> float | None:
        """Return how long it takes to write `first_block_bytes`, likewise."""
        return self._years(self.first_block_bytes)

    def _years(self, nbytes: float) -> float | None:
        return None if self.bytes_per_day is None else nbytes / self.bytes_per_day / _DAYS_PER_YEAR


def lifetime(
    wear: Wear, written_bytes: int, rated_cycles: int, bytes_per_day: float | None = None
) -> Lifetime:
    """Return how much can be written if writing continues as before.

    wear: of `written_bytes` that the host wrote.
    rated_cycles: erases that a block is good for, at least 1.
    bytes_per_day: what the host writes a day, above zero.
    Raises: ConfigError naming the argument.
    """
    check_count("written_bytes", written_bytes, least=0)
    check_count("rated_cycles", rated_cycles)
    if bytes_per_day is not None:
        check_above_zero("bytes_per_day", bytes_per_day)
    return Lifetime(
        even_bytes=written_bytes * rated_cycles / wear.mean if wear.most else math.inf,
        first_block_bytes=written_bytes * rated_cycles / wear.most if wear.most else math.inf,
        bytes_per_day=bytes_per_day,
    )
