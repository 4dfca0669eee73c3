"""Reference strings through caches of every size.

The rules are those of `penstock.policy.eviction`. What runs here is a compiled second form of them, because a study of
a hundred sizes over millions of requests takes hours with objects and seconds compiled; tests hold the two equal
request by request, and nothing else may decide by the compiled form.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.errors import ConfigError
from penstock.policy.eviction import check_eviction

Ids = NDArray[np.int64]

#: Stack distance of a request that no cache can hit: the first of its object.
NEVER = 2**63 - 1

#: Policies whose larger cache always holds what the smaller one does, with one pass for all sizes.
_DISTANCES = ("lru", "mru")


def stack_distances(references: ArrayLike, policy: str = "lru") -> Ids:
    """Return for each request the smallest cache that hits: int64[n], in objects; `NEVER` at first uses.

    references: integers of any value, one dimension.
    policy: "lru" or "mru".
    Source: Mattson, Gecsei, Slutz & Traiger, "Evaluation techniques for storage hierarchies", 1970; see the kernels.

    >>> stack_distances([7, 8, 7, 9, 8])[[2, 4]]
    array([2, 3])
    """
    if policy not in _DISTANCES:
        check_eviction(policy)
        raise ConfigError(
            f"policy {policy!r} has no stack distances here, only {' and '.join(_DISTANCES)}: replay it by size"
        )
    from penstock.simulate import _caches_kernels as kernels

    ids, objects = _numbered(references)
    return (kernels.lru_distances if policy == "lru" else kernels.mru_distances)(ids, objects)


def replay(references: ArrayLike, capacity: int, policy: str) -> NDArray[np.bool_]:
    """Return for each request whether it hits: bool[n].

    references: integers of any value, one dimension.
    capacity: objects that fit, 0 or more; the cache is empty at first.
    policy: of `penstock.policy.eviction.EVICTIONS`.
    """
    return _replays(references, policy)(_checked_size(capacity))


def hit_ratios(references: ArrayLike, sizes: ArrayLike, policy: str) -> NDArray[np.float64]:
    """Return the share of requests that hit, for each cache size: float64[len(sizes)].

    references: integers of any value, one dimension, one at least.
    sizes: objects that fit, each 0 or more.
    policy: of `penstock.policy.eviction.EVICTIONS`. LRU and MRU take one pass for all sizes, the others one per size.
    """
    string = _string(references)
    if not string.size:
        raise ConfigError("references are empty; a hit ratio needs one request at least")
    wanted = np.array([_checked_size(size) for size in np.atleast_1d(np.asarray(sizes)).tolist()], np.int64)
    if policy in _DISTANCES:
        distances = np.sort(stack_distances(string, policy))
        return np.searchsorted(distances, wanted, side="right") / string.size
    hits = _replays(string, policy)
    counts = {int(size): int(hits(int(size)).sum()) for size in np.unique(wanted)}
    return np.array([counts[int(size)] for size in wanted], np.float64) / string.size


def _replays(references: ArrayLike, policy: str) -> Any:
    """Return a function from a capacity to hits; what all capacities share is done once."""
    check_eviction(policy)
    from penstock.simulate import _caches_kernels as kernels

    ids, objects = _numbered(references)
    next_use = kernels.next_uses(ids, objects) if policy == "min" else ids
    loops: dict[str, Any] = {
        "lru": lambda capacity: kernels.replay_lru(ids, objects, capacity),
        "mru": lambda capacity: kernels.replay_mru(ids, objects, capacity),
        "fifo": lambda capacity: kernels.replay_fifo(ids, objects, capacity),
        "clock": lambda capacity: kernels.replay_clock(ids, objects, capacity),
        "lfu": lambda capacity: kernels.replay_lfu(ids, objects, capacity, False),
        "perfect-lfu": lambda capacity: kernels.replay_lfu(ids, objects, capacity, True),
        "min": lambda capacity: kernels.replay_min(next_use, capacity),
    }

    def hits(capacity: int) -> NDArray[np.bool_]:
        return loops[policy](capacity) if capacity else np.zeros(ids.size, np.bool_)

    return hits


def _numbered(references: ArrayLike) -> tuple[Ids, int]:
    """Return the string over dense ids, and their number. Ids that are dense enough already stay."""
    from penstock.simulate import _caches_kernels as kernels

    string = _string(references)
    if not string.size:
        return string, 0
    if string.min() >= 0 and string.max() < 2 * string.size:
        return string, int(string.max()) + 1
    ids = np.empty_like(string)
    return ids, kernels.number_objects(string, ids)


def _string(references: ArrayLike) -> Ids:
    given = np.asarray(references)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise ConfigError(
            f"references are {given.dtype}, shape {given.shape}; a string is one dimension of integers: "
            "number the objects"
        )
    # Unsigned ids beyond int64 wrap round, which keeps them apart.
    return np.ascontiguousarray(given.astype(np.int64, copy=False))


def _checked_size(size: object) -> int:
    if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 0:
        raise ConfigError(f"cache size is {size!r}; it is a whole number of objects, 0 or more")
    return int(size)
