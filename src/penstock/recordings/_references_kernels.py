"""The compiled loops of reference strings. Imported when first needed: it loads numba."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.kernel import kernel

Ids = NDArray[np.int64]

_MIX_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_MIX_SECOND = np.uint64(0x94D049BB133111EB)
_HALF = np.uint64(32)
#: The table begins with 2**12 slots and is made eight times as large when half of them are taken.
_FIRST_BITS = 12
_MORE_BITS = 3


@kernel
def number_objects(references: Ids, ids: Ids) -> int:
    """Number the objects by first appearance into ids: int64[n]; return how many there are. O(n).

    A hash table with open addressing; a slot's key and number lie side by side, so that a request looks at one line of
    the processor's cache.
    """
    table = np.zeros(
        (1 << _FIRST_BITS, 2), np.int64
    )  # key, number of the object + 1; 0 where the slot is free
    objects = 0
    for index in range(references.size):
        key = references[index]
        slot = _slot_of(table, key)
        if table[slot, 1] == 0:
            objects += 1
            table[slot, 0] = key
            table[slot, 1] = objects
        ids[index] = table[slot, 1] - 1
        if 2 * objects > table.shape[0]:
            larger = np.zeros((table.shape[0] << _MORE_BITS, 2), np.int64)
            for old in range(table.shape[0]):
                if table[old, 1]:
                    slot = _slot_of(larger, table[old, 0])
                    larger[slot, 0] = table[old, 0]
                    larger[slot, 1] = table[old, 1]
            table = larger
    return objects


@kernel
def _slot_of(table: Ids, key: np.int64) -> np.int64:
    """The slot of the key, or the free one where it belongs. Mixing: Stafford's variant 13 of MurmurHash3's, halved."""
    mixed = np.uint64(key)
    mixed = (mixed ^ (mixed >> _HALF)) * _MIX_FIRST
    mixed = (mixed ^ (mixed >> _HALF)) * _MIX_SECOND
    last = np.int64(table.shape[0] - 1)
    slot = np.int64(mixed >> _HALF) & last
    while table[slot, 1] and table[slot, 0] != key:
        slot = (slot + 1) & last
    return slot


@kernel
def next_uses(ids: Ids, objects: int, never: int) -> Ids:
    """Return when the object of each request is requested next: int64[n], `never` where it is not. O(n)."""
    later = np.full(objects, never, np.int64)
    found = np.empty(ids.size, np.int64)
    for index in range(ids.size - 1, -1, -1):
        found[index] = later[ids[index]]
        later[ids[index]] = index
    return found
