"""Access sequences through caches of every size.

The replay is compiled: a study of a hundred sizes over millions of requests takes seconds. Tests hold it equal, request
by request, to each rule said plainly. The loader places samples and evicts none, so nothing that runs a training asks
these policies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.errors import ConfigError
from penstock.recordings.references import as_string, next_uses, number_objects
from penstock.validate import check_count

Ids = NDArray[np.int64]
Hits = NDArray[np.bool_]

#: Eviction policies, in the order in which they are shown.
EVICTIONS = ("lru", "lfu", "mru", "clock", "fifo", "perfect-lfu", "min")

#: Stack distance of a request that no cache can hit: the first of its object.
NEVER = 2**63 - 1

#: No cache counts as larger, in objects or bytes: each holds everything.
LARGEST_CACHE = 2**62

#: Stack algorithms whose distances are found in one pass: a larger cache always holds what a smaller one does.
WITH_DISTANCES = ("lru", "mru", "min")
#: Of these, the ones whose pass is faster than replays, whatever the number of objects.
_ONE_PASS = ("lru", "mru")
_WITH_SIZES = ("lru", "fifo")


def check_eviction(name: str) -> None:
    """Raise ConfigError unless there is a policy of this name."""
    if name not in EVICTIONS:
        close = get_close_matches(name.lower(), EVICTIONS, n=1)
        hint = f"did you mean {close[0]}? Known" if close else "known"
        raise ConfigError(f"there is no eviction policy {name!r}; {hint} are {', '.join(EVICTIONS)}")


def share_of(whole: int, share: float) -> int:
    """Return the size of a cache of so large a share of `whole` objects or bytes, rounded down.

    A share that was written as a decimal is meant exactly: 0.29 of 100 are 29, though 0.29 * 100 is a little less.
    A cache larger than `LARGEST_CACHE` is that large.
    Raises: ConfigError for a share below zero, or none.
    """
    if not share >= 0:
        raise ConfigError(f"a cache's relative size is {share}; it is 0 or more: 0.3 is 30 %")
    return math.floor(min(share * whole * (1 + 1e-12), LARGEST_CACHE))


def stack_distances(references: ArrayLike, policy: str = "lru") -> Ids:
    """Return for each request the smallest cache that hits: int64[n], in objects; `NEVER` at first uses.

    references: integers of any value, one dimension.
    policy: "lru" (O(n log objects)), "mru" (O(n)) or "min" (O(n objects): for some thousand objects at most).
    Source: Mattson, Gecsei, Slutz & Traiger, "Evaluation techniques for storage hierarchies", IBM Systems Journal 1970.

    >>> stack_distances([7, 8, 7, 9, 8])[[2, 4]]
    array([2, 3])
    """
    if policy not in WITH_DISTANCES:
        check_eviction(policy)
        raise ConfigError(
            f"{policy} has no stack distances here, only {', '.join(WITH_DISTANCES)} have: replay it size by size"
        )
    from penstock.simulate import _caches_kernels as kernels

    ids, objects = number_objects(references)
    if policy == "lru":
        return kernels.lru_distances(ids, objects)
    if policy == "mru":
        return kernels.mru_distances(ids, objects)
    return kernels.min_distances(ids, next_uses(ids, never=ids.size), objects)


def replay(
    references: ArrayLike, capacity: int, policy: str, *, sizes_bytes: ArrayLike | None = None
) -> Hits:
    """Return for each request whether it hits: bool[n]. The cache is empty at first.

    references: integers of any value, one dimension.
    capacity: objects that fit, or bytes where sizes_bytes is given; 0 or more, without a limit.
    policy: of `EVICTIONS`.
    sizes_bytes: int64[n], size of each request's object, at least 1; an object's first size counts. Only "lru" and
        "fifo" take sizes: among unequal objects MIN is not the optimum and LFU and CLOCK have no agreed form.
        Objects larger than the cache are passed by.
    """
    return _replays(references, policy, sizes_bytes)(_checked_size(capacity))


def hit_shares(
    references: ArrayLike, sizes: ArrayLike, policy: str, *, sizes_bytes: ArrayLike | None = None
) -> NDArray[np.float64]:
    """Return the share of requests that hit, for each cache size: float64[len(sizes)].

    references: integers of any value, one dimension, one at least.
    sizes: capacities as in `replay`.
    policy, sizes_bytes: as in `replay`. LRU and MRU over equal objects take one pass for all sizes, the others one
        per size: MIN too, since its one pass is slower (`stack_distances`).
    """
    string = as_string(references)
    if not string.size:
        raise ConfigError("references are empty; a hit ratio needs one request at least")
    wanted = np.array([_checked_size(size) for size in np.atleast_1d(np.asarray(sizes)).tolist()], np.int64)
    if policy in _ONE_PASS and sizes_bytes is None:
        distances = np.sort(stack_distances(string, policy))
        return np.searchsorted(distances, wanted, side="right") / string.size
    hits = _replays(string, policy, sizes_bytes)
    different, place = np.unique(wanted, return_inverse=True)
    counts = np.array([hits(int(size)).sum() for size in different], np.float64)
    ratios: NDArray[np.float64] = counts[place] / string.size
    return ratios


def _replays(references: ArrayLike, policy: str, sizes_bytes: ArrayLike | None) -> Callable[[int], Hits]:
    """Return a function from a capacity to hits; what all capacities share is done once."""
    check_eviction(policy)
    if sizes_bytes is not None and policy not in _WITH_SIZES:
        raise ConfigError(
            f"{policy} is replayed over equal objects only; {' and '.join(_WITH_SIZES)} take sizes in bytes"
        )
    from penstock.simulate import _caches_kernels as kernels

    ids, objects = number_objects(references)
    sizes = np.ones(objects, np.int64)
    if sizes_bytes is not None:
        sizes = _object_sizes(ids, objects, np.asarray(sizes_bytes))
    next_use = next_uses(ids, never=ids.size) if policy == "min" else ids
    loops: dict[str, Callable[[int], Hits]] = {
        "lru": lambda capacity: kernels.replay_lru(ids, sizes, capacity),
        "mru": lambda capacity: kernels.replay_mru(ids, objects, capacity),
        "fifo": lambda capacity: kernels.replay_fifo(ids, sizes, capacity),
        "clock": lambda capacity: kernels.replay_clock(ids, objects, capacity),
        "lfu": lambda capacity: kernels.replay_lfu(ids, objects, capacity, False),
        "perfect-lfu": lambda capacity: kernels.replay_lfu(ids, objects, capacity, True),
        "min": lambda capacity: kernels.replay_min(next_use, capacity),
    }
    chosen = loops[policy]
    return lambda capacity: chosen(capacity) if capacity else np.zeros(ids.size, np.bool_)


def _object_sizes(ids: Ids, objects: int, sizes_bytes: NDArray[Any]) -> Ids:
    if sizes_bytes.shape != ids.shape or (ids.size and sizes_bytes.dtype.kind not in "iu"):
        raise ConfigError(
            f"sizes_bytes is {sizes_bytes.dtype}{list(sizes_bytes.shape)}; {ids.size} requests need an integer each"
        )
    if ids.size and sizes_bytes.min() < 1:
        request = int((sizes_bytes < 1).argmax())
        raise ConfigError(
            f"sizes_bytes is {sizes_bytes[request]} at request {request}; an object in a cache has 1 byte at least: "
            "leave such requests out"
        )
    sizes = np.ones(objects, sizes_bytes.dtype if ids.size else np.int64)
    sizes[ids[::-1]] = sizes_bytes[::-1]  # of several sizes the one written last stays, the object's first
    if (total := float(sizes.sum(dtype=np.float64))) > LARGEST_CACHE:
        raise ConfigError(
            f"sizes_bytes adds up to {total:.3g} bytes of all objects; at most {LARGEST_CACHE:.3g} can be counted: are "
            "these bytes?"
        )
    return sizes.astype(np.int64)


def _checked_size(size: Any) -> int:
    check_count("cache size", size, 0)
    return min(int(size), LARGEST_CACHE)
