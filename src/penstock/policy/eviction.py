"""Which object a full cache forgets.

An eviction policy is told of every access and, when room is needed, answers with the object to forget. It knows
neither sizes nor bytes: `Residents` asks it as often as room is short. These classes own the rules; what replays long
strings compiled (`penstock.simulate.caches`) is tested against them, request by request.

Every policy here admits every object that it is told of (a buffer cache reads into itself), so a victim is chosen
among the objects that were there before.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from difflib import get_close_matches
from typing import NamedTuple, Protocol

from penstock.errors import ConfigError


class Eviction(Protocol):
    """Remembers the resident objects and says which to forget."""

    def hit(self, key: Hashable) -> None:
        """Be told that a resident object was used."""
        ...

    def admit(self, key: Hashable) -> None:
        """Be told that an object was used and is resident from now on."""
        ...

    def evict(self) -> Hashable:
        """Choose a resident object, forget it and return it. Asked only while there is one."""
        ...


class Lru:
    """Forgets the least recently used object. No ties: one object is used at a time."""

    def __init__(self) -> None:
        self._by_use: OrderedDict[Hashable, None] = OrderedDict()

    def hit(self, key: Hashable) -> None:
        """Make it the last to go."""
        self._by_use.move_to_end(key)

    def admit(self, key: Hashable) -> None:
        """Make it the last to go."""
        self._by_use[key] = None

    def evict(self) -> Hashable:
        """Return the object whose last use is longest ago."""
        return self._by_use.popitem(last=False)[0]


class Mru:
    """Forgets the most recently used object, which is always the one used just before. No ties."""

    def __init__(self) -> None:
        self._by_use: OrderedDict[Hashable, None] = OrderedDict()

    def hit(self, key: Hashable) -> None:
        """Make it the first to go."""
        self._by_use.move_to_end(key)

    def admit(self, key: Hashable) -> None:
        """Make it the first to go."""
        self._by_use[key] = None

    def evict(self) -> Hashable:
        """Return the object that was used last."""
        return self._by_use.popitem()[0]


class Fifo:
    """Forgets the object that was admitted first, used since or not. No ties."""

    def __init__(self) -> None:
        self._by_admission: OrderedDict[Hashable, None] = OrderedDict()

    def hit(self, key: Hashable) -> None:
        """Change nothing."""

    def admit(self, key: Hashable) -> None:
        """Put it at the end of the queue."""
        self._by_admission[key] = None

    def evict(self) -> Hashable:
        """Return the head of the queue."""
        return self._by_admission.popitem(last=False)[0]


class Clock:
    """A queue in which an object that was used since it last came up is passed over once.

    One bit per object, clear at admission, set by each hit. The object at the head of the queue goes if its bit is
    clear; else the bit is cleared and the object goes to the end. That is the hand that walks over a ring of frames
    with new objects put just behind it (Corbato, "A paging experiment with the Multics system", 1968). No ties.
    """

    def __init__(self) -> None:
        self._is_used: OrderedDict[Hashable, bool] = OrderedDict()

    def hit(self, key: Hashable) -> None:
        """Set its bit, where it stands."""
        self._is_used[key] = True

    def admit(self, key: Hashable) -> None:
        """Put it at the end of the queue, its bit clear."""
        self._is_used[key] = False

    def evict(self) -> Hashable:
        """Return the first object in the queue whose bit is clear, having cleared those before it."""
        while True:
            key, is_used = self._is_used.popitem(last=False)
            if not is_used:
                return key
            self._is_used[key] = False


class Lfu:
    """Forgets the object that was used least often; of several, the least recently used.

    is_perfect: count uses over the whole run, also of objects that are not resident. Otherwise an object's count
        begins anew at 1 when it is admitted ("in-cache" LFU, what libCacheSim and most systems do).
    """

    def __init__(self, *, is_perfect: bool = False) -> None:
        self._is_perfect = is_perfect
        self._uses: dict[Hashable, int] = {}  # of residents, or of everything seen where is_perfect
        self._by_uses: dict[int, OrderedDict[Hashable, None]] = {}  # residents alone; no class is empty

    def hit(self, key: Hashable) -> None:
        """Count the use."""
        self._leave_class(key)
        self._join_class(key)

    def admit(self, key: Hashable) -> None:
        """Count the use."""
        self._join_class(key)

    def evict(self) -> Hashable:
        """Return the first object of the lowest class."""
        key = next(iter(self._by_uses[min(self._by_uses)]))
        self._leave_class(key)
        if not self._is_perfect:
            del self._uses[key]
        return key

    def _join_class(self, key: Hashable) -> None:
        """Every use puts the object at its class' end, so that a class is sorted by last use."""
        self._uses[key] = self._uses.get(key, 0) + 1
        self._by_uses.setdefault(self._uses[key], OrderedDict())[key] = None

    def _leave_class(self, key: Hashable) -> None:
        members = self._by_uses[self._uses[key]]
        del members[key]
        if not members:
            del self._by_uses[self._uses[key]]


class Min:
    """Forgets the object whose next use is farthest; no policy that admits every object hits more often.

    Objects that are never used again go first; which of these does not change what hits.

    next_use: asked at every access for the time of the object's next use after this one, in any unit that grows,
        `math.inf` for never. A loader asks its plan; `Min.for_string` looks into a string.
    Source: Belady, "A study of replacement algorithms for a virtual-storage computer", 1966 (MIN); that evicting the
        farthest is optimal: Mattson, Gecsei, Slutz & Traiger, "Evaluation techniques for storage hierarchies", 1970.
    """

    def __init__(self, next_use: Callable[[Hashable], float]) -> None:
        self._ask = next_use
        self._next_use: dict[Hashable, float] = {}  # of residents
        self._farthest: list[
            tuple[float, int, Hashable]
        ] = []  # a heap; entries that _next_use contradicts are stale
        self._accesses = 0

    @classmethod
    def for_string(cls, references: Iterable[Hashable]) -> Min:
        """Return a policy that must be told of exactly these accesses, in this order."""
        string = list(references)
        later: dict[Hashable, float] = {}
        next_uses: list[float] = []
        for index in range(len(string) - 1, -1, -1):
            next_uses.append(later.get(string[index], math.inf))
            later[string[index]] = index
        return cls(lambda _key: next_uses.pop())

    def hit(self, key: Hashable) -> None:
        """Ask when it is used next."""
        self.admit(key)

    def admit(self, key: Hashable) -> None:
        """Ask when it is used next."""
        self._next_use[key] = self._ask(key)
        self._accesses += 1
        heapq.heappush(self._farthest, (-self._next_use[key], self._accesses, key))
        if len(self._farthest) > 2 * len(self._next_use) + 64:
            self._farthest = [entry for entry in self._farthest if self._is_current(entry)]
            heapq.heapify(self._farthest)

    def evict(self) -> Hashable:
        """Return the object that is not used for longest."""
        while not self._is_current(self._farthest[0]):
            heapq.heappop(self._farthest)
        key = heapq.heappop(self._farthest)[2]
        del self._next_use[key]
        return key

    def _is_current(self, entry: tuple[float, int, Hashable]) -> bool:
        return self._next_use.get(entry[2]) == -entry[0]


class Access(NamedTuple):
    """What an access did to a cache."""

    is_hit: bool
    evicted: Sequence[Hashable]


class Residents:
    """Which objects are in a cache of bounded size: a policy asked whenever room is short.

    capacity: in the unit of the sizes, or a number of objects where every size is 1.
    An object larger than the whole cache is passed by: nothing is evicted for it. An object keeps the size that it was
    admitted with.
    Raises: ConfigError for a capacity, or the size of an access, that is below zero or no number.
    """

    def __init__(self, eviction: Eviction, capacity: int) -> None:
        if not capacity >= 0:
            raise ConfigError(f"capacity is {capacity!r}; a cache holds 0 objects or more")
        self.capacity = capacity
        self.used = 0
        self._eviction = eviction
        self._sizes: dict[Hashable, int] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def access(self, key: Hashable, size: int = 1) -> Access:
        """Use an object: it is resident afterwards, unless it is larger than the cache."""
        if not size >= 0:
            raise ConfigError(f"size is {size!r} of object {key!r}; an object takes 0 bytes or more")
        if key in self._sizes:
            self._eviction.hit(key)
            return Access(True, ())
        if size > self.capacity:
            return Access(False, ())
        evicted = []
        while self.used + size > self.capacity:
            victim = self._eviction.evict()
            self.used -= self._sizes.pop(victim)
            evicted.append(victim)
        self._eviction.admit(key)
        self._sizes[key] = size
        self.used += size
        return Access(False, evicted)


_WITHOUT_FUTURE: dict[str, Callable[[], Eviction]] = {
    "lru": Lru,
    "lfu": Lfu,
    "mru": Mru,
    "clock": Clock,
    "fifo": Fifo,
    "perfect-lfu": lambda: Lfu(is_perfect=True),
}

#: Names that `eviction_of` knows, in the order in which they are shown.
EVICTIONS = (*_WITHOUT_FUTURE, "min")


def eviction_of(name: str, references: Iterable[Hashable] = ()) -> Eviction:
    """Return a new policy.

    name: of `EVICTIONS`.
    references: the accesses that "min" will be told of, in their order; no other policy looks at them.
    Raises: ConfigError for another name.
    """
    check_eviction(name)
    return Min.for_string(references) if name == "min" else _WITHOUT_FUTURE[name]()


def check_eviction(name: str) -> None:
    """Raise ConfigError unless there is a policy of this name."""
    if name not in EVICTIONS:
        close = get_close_matches(name.lower(), EVICTIONS, n=1)
        hint = f"did you mean {close[0]}? Known" if close else "known"
        raise ConfigError(f"there is no eviction policy {name!r}; {hint} are {', '.join(EVICTIONS)}")
