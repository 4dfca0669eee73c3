"""What a bundle shuffle gains in a buffer cache.

One rank reads its F samples once an epoch, so no cache of C samples hits more than C times an epoch after the
first: (E - 1) / E * C / F of all reads is the bound for every order and every policy. A cache that evicts the
least recently used comes close to it when bundles alternate:

    epoch 0     [B1] [B2] [B3] [B4] [B5]          the cache holds the last bundles read,
    epoch 1     [B5] [B4] [B3] [B2] [B1]          which are the first to come back
                 hit  hit  part

Whole bundles that fit are hit entirely. Of the boundary bundle, with b samples, only the K read last fit, and
reading t samples of it again leaves the K - t latest of the others there: one of b - t that may come next. So
that next read hits with probability (K - t) / (b - t), and in all

    hits = sum over t < K of (K - t) / (b - t) = K - M (H(b) - H(M)),    misses = M (1 + H(b) - H(M)),    M = b - K,

with H(n) = 1 + 1/2 + ... + 1/n: M samples too many cost about M (1 + ln(b / M)) misses. A full shuffle is one bundle
of F samples, and has nothing but a boundary.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.errors import ConfigError
from penstock.plan import AccessPlan, Order
from penstock.plan.orders import check_samples
from penstock.validate import check_count


def best_hit_share(samples: int, cache: int, epochs: int) -> float:
    """Return the bound: the share of all reads that any policy hits at most, whatever the order of each epoch.

    samples: F. cache: C, in samples. epochs: E; the cache is empty before the first.
    """
    check_setting(samples, cache, epochs)
    return (epochs - 1) * min(cache, samples) / (epochs * samples)


def expected_hit_share(
    samples: int, cache: int, epochs: int, bundle: int, *, alternate: bool = True
) -> float:
    """Return the share of all reads that a cache hits which evicts the least recently used, in expectation.

    samples: F. cache: C, in samples. epochs: E; the cache is empty before the first. bundle: b samples, the last one
        takes the rest; F is a full shuffle. alternate: every second epoch takes the bundles in reverse.
    Source: see the module; exact for independent uniform shuffles within bundles.

    >>> expected_hit_share(samples=1000, cache=500, epochs=5, bundle=100)
    0.4
    """
    check_setting(samples, cache, epochs)
    check_bundle(bundle, samples)
    if not alternate:
        return (epochs - 1) / epochs * _hits_in_sequence(samples, cache, bundle) / samples
    last = (samples - 1) % bundle + 1
    from_the_end = _hits(cache, first=last, bundle=bundle, samples=samples)
    from_the_start = _hits(cache, first=bundle, bundle=bundle, samples=samples)
    # The second epoch begins with the last bundle, the third with the first, and so on.
    ends, starts = epochs // 2, (epochs - 1) // 2
    return (ends * from_the_end + starts * from_the_start) / (epochs * samples)


def replayed_hit_shares(order: Order, epochs: int, caches: ArrayLike) -> NDArray[np.float64]:
    """Return the hit ratio of each cache with least-recently-used eviction, counted: float64[caches].

    order: of one rank. caches: int[caches], in samples. Takes 8 bytes and some hundred nanoseconds per read, for all
    caches together.
    """
    from penstock.simulate.caches import hit_shares

    return hit_shares(AccessPlan(order, order.samples, epochs).string(0), caches, "lru")


def boundary_misses(missing: int, bundle: int) -> float:
    """Return the expected misses in a bundle of b samples of which M are not in the cache: M (1 + H(b) - H(M)).

    missing: M, 0 to b. bundle: b, at least 1. With 1 % of b missing, 5.6 % are missed.
    """
    if not 0 <= missing <= bundle:
        raise ConfigError(
            f"missing is {missing}; of a bundle of {bundle} samples 0 to {bundle} can be missing"
        )
    if missing in (0, bundle):
        return float(missing)
    return missing * (1 + _harmonic(bundle) - _harmonic(missing))


def _hits(cache: int, first: int, bundle: int, samples: int) -> float:
    """Expected hits of an epoch whose bundles were read in reverse just before; the first may be short."""
    if cache < first:
        return first - boundary_misses(first - cache, first)
    whole = first + (min(cache, samples) - first) // bundle * bundle
    # From the start, the short bundle is the last to come.
    size = min(bundle, samples - whole)
    if size <= 0:
        return float(samples)
    return whole + size - boundary_misses(max(size - (cache - whole), 0), size)


def _hits_in_sequence(samples: int, cache: int, bundle: int) -> float:
    """Expected hits of an epoch whose bundles were read in the same sequence before: all else is read in between."""
    last = (samples - 1) % bundle + 1
    whole_bundles = (samples - last) // bundle

    def of(size: int) -> float:
        return size - boundary_misses(min(size, max(samples - cache, 0)), size)

    return whole_bundles * of(bundle) + of(last)


#: From here on the asymptotic series is exact to the last bit or two.
_SERIES_FROM = 32
_HARMONIC: list[float] = [0.0, *np.cumsum(1 / np.arange(1, _SERIES_FROM)).tolist()]


def _harmonic(n: int) -> float:
    if n < _SERIES_FROM:
        return _HARMONIC[n]
    return (
        math.log(n) + 0.5772156649015329 + 1 / (2 * n) - 1 / (12 * n**2) + 1 / (120 * n**4) - 1 / (252 * n**6)
    )


def check_setting(samples: int, cache: int, epochs: int) -> None:
    """Raise ConfigError unless a cache of so many samples can be read through for so many epochs."""
    check_samples(samples)
    check_count("cache", cache, 0)
    check_count("epochs", epochs)


def check_bundle(bundle: int, samples: int) -> None:
    """Raise ConfigError unless a bundle has from 1 to all of the samples."""
    check_samples(samples)
    check_count("bundle", bundle, most=samples)
