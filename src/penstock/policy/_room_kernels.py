"""In which tier there is room, for the compiled loops of placements. Loads numba."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.kernel import kernel


@kernel
def tier_with_room(room: NDArray[np.int64], size_bytes: int) -> int:
    """Return the fastest of a rank's tiers (0 is the first) with room for so many bytes, -1 where there is none.

    room: int64[tiers], free bytes. Complexity: O(tiers). Called on rows of a table too, at no measurable cost.
    """
    for tier in range(room.size):
        if room[tier] >= size_bytes:
            return tier
    return -1
