"""The compiled loop of `penstock.plan.mixing`. Loads numba."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.kernel import kernel


@kernel
def take_turns(weights: NDArray[np.int64], turns: NDArray[np.uint16]) -> None:
    """Write whose turn it is at each position of a period; `penstock.plan.mixing.take_turns` is the plain version.

    weights: int64[sources], 1 or more, their sum is the period. turns: uint16[period], written.
    Complexity: O(sources * period). Nothing overflows while sources * period is below 2**40.
    """
    count, period = weights.size, turns.size
    parts = max(2, 2 * count - 2)
    lags = np.zeros(count, np.int64)
    for position in range(period):
        best, best_wait = -1, 0
        for source in range(count):
            lags[source] += weights[source]
            if lags[source] * parts < period:
                continue
            wait = period * (parts - 1) - parts * lags[source]
            if best < 0 or wait * weights[best] < best_wait * weights[source]:
                best, best_wait = source, wait
        lags[best] -= period
        turns[position] = best
