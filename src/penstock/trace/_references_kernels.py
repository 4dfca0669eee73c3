"""The compiled loops of reference strings. Imported when first needed: it loads numba."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.kernel import kernel

Ids = NDArray[np.int64]

_SCATTER = np.uint64(0x9E3779B97F4A7C15)


@kernel
def number_objects(references: Ids, ids: Ids) -> int:
    """Number the objects by first appearance into ids: int64[n]; return how many there are. A hash table, O(n)."""
    bits = 10
    slots = np.full(1 << bits, -1, np.int64)  # the number of the object in the slot, -1 where free
    keys = np.empty(1 << bits, np.int64)
    objects = 0
    for index in range(references.size):
        key = references[index]
        slot = np.int64((np.uint64(key) * _SCATTER) >> np.uint64(64 - bits))
        while slots[slot] >= 0 and keys[slot] != key:
            slot = (slot + 1) & (slots.size - 1)
        if slots[slot] < 0:
            slots[slot] = objects
            keys[slot] = key
            objects += 1
        ids[index] = slots[slot]
        if 2 * objects > slots.size:
            bits += 1
            larger_slots = np.full(1 << bits, -1, np.int64)
            larger_keys = np.empty(1 << bits, np.int64)
            for old in range(slots.size):
                if slots[old] >= 0:
                    slot = np.int64((np.uint64(keys[old]) * _SCATTER) >> np.uint64(64 - bits))
                    while larger_slots[slot] >= 0:
                        slot = (slot + 1) & (larger_slots.size - 1)
                    larger_slots[slot] = slots[old]
                    larger_keys[slot] = keys[old]
            slots = larger_slots
            keys = larger_keys
    return objects


@kernel
def next_uses(ids: Ids, objects: int, never: int) -> Ids:
    """Return when the object of each request is requested next: int64[n], `never` where it is not. O(n)."""
    later = np.full(objects, never, np.int64)
    found = np.empty(ids.size, np.int64)
    for index in range(ids.size - 1, -1, -1):
        found[index] = later[ids[index]]
        later[ids[index]] = index
    return found
