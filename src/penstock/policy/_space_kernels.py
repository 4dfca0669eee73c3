"""In which tier there is space, for the compiled loops of placements. Loads numba."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.kernel import kernel


@kernel
def tier_with_space(space: NDArray[np.int64], size_bytes: int) -> int:
    """Return the fastest of a rank's tiers (0 is the first) with space for so many bytes, -1 where there is none.

    space: int64[tiers], free bytes. Complexity: O(tiers). Called on rows of a table too, at no measurable cost.
    """
    for tier in range(space.size):
        if space[tier] >= size_bytes:
            return tier
    return -1
