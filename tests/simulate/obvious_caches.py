"""A cache that looks through all it holds for whom to evict: slow, and each rule is a line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Seen(NamedTuple):
    """What a cache knows of an object that it holds; times are numbers of requests."""

    admitted: int
    last_use: int
    next_use: int
    uses: int  # since it was admitted
    uses_in_all: int  # also while it was not in the cache


#: Of the objects held, the one with the least value goes.
RULES: dict[str, Callable[[Seen], tuple[int, ...]]] = {
    "lru": lambda seen: (seen.last_use,),
    "mru": lambda seen: (-seen.last_use,),
    "fifo": lambda seen: (seen.admitted,),
    "lfu": lambda seen: (seen.uses, seen.last_use),
    "perfect-lfu": lambda seen: (seen.uses_in_all, seen.last_use),
    "min": lambda seen: (-seen.next_use,),
}


def hits(policy: str, string: Sequence[int], capacity: int, sizes: Sequence[int] | None = None) -> list[bool]:
    """Return for each request whether it hits; an object larger than the cache evicts nothing and is not kept."""
    if policy == "clock":
        return _hits_of_clock(string, capacity)
    sizes = sizes or [1] * len(string)
    held: dict[int, Seen] = {}
    size_of: dict[int, int] = {}  # of the objects held, as they were admitted
    uses_in_all: dict[int, int] = {}
    next_uses = _next_uses(string)
    found = []
    for now, (key, size, next_use) in enumerate(zip(string, sizes, next_uses, strict=True)):
        found.append(key in held)
        if key not in held and size > capacity:
            continue
        if key not in held:
            while sum(size_of.values()) + size > capacity:
                victim = min(held, key=lambda key: RULES[policy](held[key]))
                del held[victim], size_of[victim]
            size_of[key] = size
        uses_in_all[key] = uses_in_all.get(key, 0) + 1
        before = held.get(key, Seen(now, now, 0, 0, 0))
        held[key] = Seen(before.admitted, now, next_use, before.uses + 1, uses_in_all[key])
    return found


def _next_uses(string: Sequence[int]) -> list[int]:
    """Return when the object of each request is asked for next; the length of the string for never."""
    following: dict[int, int] = {}
    times = []
    for now in reversed(range(len(string))):
        times.append(following.get(string[now], len(string)))
        following[string[now]] = now
    return times[::-1]


def _hits_of_clock(string: Sequence[int], frames: int) -> list[bool]:
    """A hand walks over a ring of frames, clears the bits that it finds set and stops at the first one clear.

    Source: Corbato, "A paging experiment with the Multics system", 1968.
    """
    ring: list[list[int]] = []  # object, and whether it was used since the hand last passed
    hand = 0
    found = []
    for key in string:
        frame = next((frame for frame in ring if frame[0] == key), None)
        found.append(frame is not None)
        if frame is not None:
            frame[1] = 1
        elif len(ring) < frames:
            ring.append([key, 0])
        elif frames:
            while ring[hand][1]:
                ring[hand][1] = 0
                hand = (hand + 1) % frames
            ring[hand] = [key, 0]
            hand = (hand + 1) % frames
    return found
