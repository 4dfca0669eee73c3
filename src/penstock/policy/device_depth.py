"""How many batches may be on a device at once: those copied ahead, and those that the training is at."""

from __future__ import annotations

import math
from collections.abc import Sequence

#: One that the training is at, and one ahead of it: double buffering.
LEAST = 2
# One that the training is at, one ready, and those that may be on their way during a step: where copies take longer
# than steps, the bus decides, and more batches bring nothing.
_MOST_ON_THEIR_WAY = 2
# Of what is free when a loader starts, for batches; the rest is the training's.
_FREE_SHARE = 1 / 8


def default_bytes(batch_bytes: int, free_bytes: int) -> int:
    """Return how much of a device batches may take where nobody says: what the most that are of use take, within a
    share of what is free, and two batches in any case.

    batch_bytes: 0 where it is not known before there is one.
    """
    share_bytes = int(free_bytes * _FREE_SHARE)
    if not batch_bytes:
        return share_bytes
    return max(LEAST * batch_bytes, min((LEAST + _MOST_ON_THEIR_WAY) * batch_bytes, share_bytes))


def wanted(copy_seconds: float, step_seconds: float) -> int:
    """Return how many batches are of use on a device, those of steps that it has not finished included.

    copy_seconds, step_seconds: of one batch, as observed; zeros before.

    >>> wanted(0.002, 0.1), wanted(0.15, 0.1)
    (3, 4)
    """
    on_their_way = math.ceil(copy_seconds / step_seconds) if step_seconds > 0 else 1
    return LEAST + min(max(on_their_way, 1), _MOST_ON_THEIR_WAY)


def may_copy(live_bytes: Sequence[int], next_bytes: int, limit_bytes: int, most: float) -> bool:
    """Return whether one more batch may be copied to the device.

    live_bytes: of each batch that is there. most: batches. Without any, the first may always be tried.
    """
    return not live_bytes or (len(live_bytes) < most and sum(live_bytes) + next_bytes <= limit_bytes)
