"""When to measure anew what hardly changes, and takes time to measure."""

from __future__ import annotations

#: The most times in a row that something is done without being measured, and one more.
_EVERY = 64


def is_due(times: int) -> bool:
    """Return whether to measure at the `times`-th time, from 1 on: at 1, 2, 4, ..., 64, and from there at each 64th.

    >>> [times for times in range(1, 200) if is_due(times)]
    [1, 2, 4, 8, 16, 32, 64, 128, 192]
    """
    return not times & (times - 1) or times % _EVERY == 0
