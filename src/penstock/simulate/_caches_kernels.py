"""The compiled replay of reference strings through caches. Imported when first needed: it loads numba.

Each loop is one eviction rule and is tested equal to the rule said plainly, request by request on random strings.

Throughout, `ids` are dense: int64[n], each in [0, objects). Loops return hits: bool[n].
Measured: `benchmarks/caches.py`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.kernel import kernel

Ids = NDArray[np.int64]
Hits = NDArray[np.bool_]
Words = NDArray[np.uint64]

#: Stack distance of a first use, which no cache can hit.
NEVER = 2**63 - 1

_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)
_ONE = np.uint64(1)
_BITS_OF_2 = np.uint64(0x5555555555555555)
_BITS_OF_4 = np.uint64(0x3333333333333333)
_BITS_OF_8 = np.uint64(0x0F0F0F0F0F0F0F0F)
_SUM_BYTES = np.uint64(0x0101010101010101)


@kernel
def _count_bits(word: np.uint64) -> np.int64:
    word = word - ((word >> _ONE) & _BITS_OF_2)
    word = (word & _BITS_OF_4) + ((word >> np.uint64(2)) & _BITS_OF_4)
    word = (word + (word >> np.uint64(4))) & _BITS_OF_8
    return np.int64((word * _SUM_BYTES) >> np.uint64(56))


@kernel
def _highest_bit(word: np.uint64) -> int:
    """Index of the highest bit that is set; 0 for no bit."""
    highest = 0
    for width in (32, 16, 8, 4, 2, 1):
        above = word >> np.uint64(width)
        if above:
            highest += width
            word = above
    return highest


@kernel
def lru_distances(ids: Ids, objects: int) -> Ids:
    """Return each request's depth in the LRU stack: int64[n], 1 for the object used last, NEVER at a first use.

    The depth is one more than the number of objects used since. Every object marks the slot of its last use; a request
    counts the marks above its own and moves it to a new slot on top. Marks are bits, counted by a Fenwick tree over
    the words of 64. When the slots run out, marks are moved together, so that the tree stays as small as the number
    of objects and in the processor's cache, however long the string. O(n log objects).
    Source: Bennett & Kruskal, "LRU stack processing", 1975; the marks as bits and the moving are ours.
    """
    slots = 64 * (objects // 32 + 16)  # twice the objects, at least
    marks = np.zeros(slots // 64, np.uint64)
    tree = np.zeros(slots // 64 + 1, np.int32)
    object_at = np.empty(slots, np.int64)
    slot_of = np.full(objects, -1, np.int64)
    distances = np.empty(ids.size, np.int64)
    live = 0
    top = 0
    for index in range(ids.size):
        if top == slots:
            top = _move_together(marks, tree, object_at, slot_of)
        slot = slot_of[ids[index]]
        if slot < 0:
            distances[index] = NEVER
            live += 1
        else:
            word = slot >> 6
            bit = np.uint64(slot & 63)
            below = _count_bits(marks[word] & ~(_ALL << bit))
            node = word
            while node > 0:
                below += tree[node]
                node &= node - 1
            distances[index] = live - below
            marks[word] &= ~(_ONE << bit)
            _add_to_tree(tree, word, -1)
        slot_of[ids[index]] = top
        object_at[top] = ids[index]
        marks[top >> 6] |= _ONE << np.uint64(top & 63)
        _add_to_tree(tree, top >> 6, 1)
        top += 1
    return distances


@kernel
def _add_to_tree(tree: NDArray[np.int32], word: int, change: int) -> None:
    node = word + 1
    while node < tree.size:
        tree[node] += change
        node += node & -node


@kernel
def _move_together(marks: Words, tree: NDArray[np.int32], object_at: Ids, slot_of: Ids) -> int:
    """Give the marked objects the lowest slots, in their order; return the first free slot."""
    top = 0
    for slot in range(object_at.size):
        if (marks[slot >> 6] >> np.uint64(slot & 63)) & _ONE:
            object_at[top] = object_at[slot]
            slot_of[object_at[top]] = top
            top += 1
    marks[:] = 0
    marks[: top >> 6] = _ALL
    if top & 63:
        marks[top >> 6] = ~(_ALL << np.uint64(top & 63))
    tree[:] = 0
    for word in range(marks.size):
        tree[word + 1] += _count_bits(marks[word])
        parent = (word + 1) + ((word + 1) & -(word + 1))
        if parent < tree.size:
            tree[parent] += tree[word + 1]
    return top


@kernel
def mru_distances(ids: Ids, objects: int) -> Ids:
    """Return each request's depth in the MRU stack: int64[n], NEVER at a first use.

    The object used before is what every smaller cache gives up, so it changes places with the object requested and
    nothing else moves. O(n).
    Source: Mattson et al. 1970 (the general stack update), worked out for this priority.
    """
    depth_of = np.zeros(objects, np.int64)
    object_at = np.empty(objects + 1, np.int64)
    distances = np.empty(ids.size, np.int64)
    seen = 0
    for index in range(ids.size):
        requested = ids[index]
        depth = depth_of[requested]
        if depth == 0:
            distances[index] = NEVER
            seen += 1
            depth = seen
        else:
            distances[index] = depth
        last = object_at[1] if seen > 1 else requested
        object_at[depth] = last
        depth_of[last] = depth
        object_at[1] = requested
        depth_of[requested] = 1
    return distances


@kernel
def min_distances(ids: Ids, next_use: Ids, objects: int) -> Ids:
    """Return each request's depth in the stack of Belady's MIN: int64[n], NEVER at a first use.

    The object requested goes on top. The one that was there sinks; at every depth above the requested object's old
    one, the object that is needed later of the two goes on sinking, and the last takes the old place.
    Source: Mattson et al. 1970, section "Priority lists" and the general stack update. O(n objects): the objects on a
    way down change places at nearly every depth of a shuffled string, so that looking for the places where they do
    with a tree gains nothing; from some thousand objects on, a replay per size is faster.
    """
    distances = np.empty(ids.size, np.int64)
    depth_of = np.zeros(objects, np.int64)
    object_at = np.empty(objects + 1, np.int64)
    use_at = np.empty(objects + 1, np.int64)
    seen = 0
    for index in range(ids.size):
        requested = ids[index]
        depth = depth_of[requested]
        if depth == 0:
            distances[index] = NEVER
            seen += 1
            depth = seen
        else:
            distances[index] = depth
        if depth > 1:
            sinking = object_at[1]
            sinking_use = use_at[1]
            for place in range(2, depth):
                if use_at[place] > sinking_use:
                    other = object_at[place]
                    other_use = use_at[place]
                    object_at[place] = sinking
                    use_at[place] = sinking_use
                    depth_of[sinking] = place
                    sinking = other
                    sinking_use = other_use
            object_at[depth] = sinking
            use_at[depth] = sinking_use
            depth_of[sinking] = depth
        object_at[1] = requested
        use_at[1] = next_use[index]
        depth_of[requested] = 1
    return distances


@kernel
def replay_lru(ids: Ids, sizes: Ids, capacity: int) -> Hits:
    """Victims are found by a hand that follows through the string and stops at objects not used since. O(n).

    sizes: int64[objects], each at least 1, in the unit of the capacity.
    """
    hits = np.zeros(ids.size, np.bool_)
    last_use = np.full(sizes.size, -1, np.int64)  # of residents
    used = 0
    hand = 0
    for index in range(ids.size):
        requested = ids[index]
        if last_use[requested] >= 0:
            hits[index] = True
        else:
            size = sizes[requested]
            if size > capacity:
                continue
            while used + size > capacity:
                victim = ids[hand]
                if last_use[victim] == hand:
                    last_use[victim] = -1
                    used -= sizes[victim]
                hand += 1
            used += size
        last_use[requested] = index
    return hits


@kernel
def replay_mru(ids: Ids, objects: int, capacity: int) -> Hits:
    """The victim is the object requested just before. O(n)."""
    hits = np.zeros(ids.size, np.bool_)
    is_resident = np.zeros(objects, np.bool_)
    resident = 0
    for index in range(ids.size):
        requested = ids[index]
        if is_resident[requested]:
            hits[index] = True
            continue
        if resident < capacity:
            resident += 1
        else:
            is_resident[ids[index - 1]] = False
        is_resident[requested] = True
    return hits


@kernel
def replay_fifo(ids: Ids, sizes: Ids, capacity: int) -> Hits:
    """The queue is the string without its hits and what was too large, with a hand at its head. O(n).

    sizes: int64[objects], each at least 1, in the unit of the capacity.
    """
    hits = np.zeros(ids.size, np.bool_)
    is_resident = np.zeros(sizes.size, np.bool_)
    used = 0
    hand = 0
    for index in range(ids.size):
        requested = ids[index]
        if is_resident[requested]:
            hits[index] = True
            continue
        size = sizes[requested]
        if size > capacity:
            continue
        while used + size > capacity:
            victim = ids[hand]
            if not hits[hand] and sizes[victim] <= capacity:
                is_resident[victim] = False
                used -= sizes[victim]
            hand += 1
        used += size
        is_resident[requested] = True
    return hits


@kernel
def replay_clock(ids: Ids, objects: int, capacity: int) -> Hits:
    """A hand over a ring of frames; a new object takes the frame of its victim. O(n) but for the hand's turns."""
    hits = np.zeros(ids.size, np.bool_)
    state = np.zeros(
        objects, np.uint8
    )  # 0 not resident, 1 resident, 2 resident and used since the hand passed
    frames = np.empty(min(capacity, objects), np.int64)
    resident = 0
    hand = 0
    for index in range(ids.size):
        requested = ids[index]
        if state[requested]:
            hits[index] = True
            state[requested] = 2
            continue
        if resident < frames.size:
            frames[resident] = requested
            resident += 1
        else:
            while state[frames[hand]] == 2:
                state[frames[hand]] = 1
                hand = hand + 1 if hand + 1 < frames.size else 0
            state[frames[hand]] = 0
            frames[hand] = requested
            hand = hand + 1 if hand + 1 < frames.size else 0
        state[requested] = 1
    return hits


@kernel
def replay_lfu(ids: Ids, objects: int, capacity: int, is_perfect: bool) -> Hits:
    """Residents hang in one list per number of uses, each sorted by last use. O(n) but for the search of a class."""
    hits = np.zeros(ids.size, np.bool_)
    totals = np.zeros(objects, np.int64)
    for index in range(ids.size):
        totals[ids[index]] += 1
    most = 0
    for each in range(objects):
        most = max(most, totals[each])
    uses = np.zeros(objects, np.int64)
    is_resident = np.zeros(objects, np.bool_)
    # Lists are rings through their heads: the head of class u is element objects + u.
    before = np.arange(objects + most + 1)
    after = np.arange(objects + most + 1)
    resident = 0
    lowest = 1
    for index in range(ids.size):
        requested = ids[index]
        if is_resident[requested]:
            hits[index] = True
            after[before[requested]] = after[requested]
            before[after[requested]] = before[requested]
        else:
            if resident < capacity:
                resident += 1
            else:
                while after[objects + lowest] == objects + lowest:
                    lowest += 1
                victim = after[objects + lowest]
                after[objects + lowest] = after[victim]
                before[after[victim]] = objects + lowest
                is_resident[victim] = False
                if not is_perfect:
                    uses[victim] = 0
            is_resident[requested] = True
            lowest = min(lowest, uses[requested] + 1)
        uses[requested] += 1
        head = objects + uses[requested]
        after[before[head]] = requested
        before[requested] = before[head]
        before[head] = requested
        after[requested] = head
    return hits


@kernel
def replay_min(next_use: Ids, capacity: int) -> Hits:
    """Residents are a set of times, those of their next uses: a request hits if its own time is in the set.

    next_use: int64[n], the index of the next request of each request's object, n for none.
    Residents that are never used again are only counted; they go first. The set is a tree of words of 64 bits, a bit
    for each word below that is not empty, so that its latest time is found in a word per level. O(n log n / 6).
    """
    hits = np.zeros(next_use.size, np.bool_)
    widths = np.empty(12, np.int64)
    levels = 0
    width = next_use.size
    total = 0
    while True:
        width = (width + 63) // 64
        widths[levels] = width
        levels += 1
        total += width
        if width <= 1:
            break
    words = np.zeros(total, np.uint64)
    starts = np.zeros(12, np.int64)
    for level in range(1, levels):
        starts[level] = starts[level - 1] + widths[level - 1]
    resident = 0
    unused = 0
    for index in range(next_use.size):
        if (words[index >> 6] >> np.uint64(index & 63)) & _ONE:
            hits[index] = True
            _clear_time(words, starts, levels, index)
        elif resident < capacity:
            resident += 1
        elif unused > 0:
            unused -= 1
        else:
            time = 0
            for level in range(levels - 1, -1, -1):
                time = (time << 6) + _highest_bit(words[starts[level] + time])
            _clear_time(words, starts, levels, time)
        time = next_use[index]
        if time == next_use.size:
            unused += 1
            continue
        for level in range(levels):
            words[starts[level] + (time >> 6)] |= _ONE << np.uint64(time & 63)
            time >>= 6
    return hits


@kernel
def _clear_time(words: Words, starts: Ids, levels: int, time: int) -> None:
    for level in range(levels):
        word = starts[level] + (time >> 6)
        words[word] &= ~(_ONE << np.uint64(time & 63))
        if words[word]:
            break
        time >>= 6
