"""What a bundle shuffle gains in a buffer cache, what it costs in randomness, and which size of bundle to take.

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.errors import ConfigError
from penstock.plan import AccessPlan, BundleShuffle, Order
from penstock.plan.orders import check_samples
from penstock.units import is_integer

#: Share of its cache that the bundle paper's runs did without: 49 of 50 % explain its Table 1 (`penstock.papers`).
HEADROOM = 0.02
#: Hit ratios that differ by less, relative to each other, are taken for equal: the larger bundle is preferred.
_AS_GOOD = 0.01
#: A batch whose mean is noisier by more than this factor than a full shuffle's calls for scattered ids.
NOISY = 1.1


# What a cache hits


def best_hit_ratio(samples: int, cache: int, epochs: int) -> float:
    """Return the bound: the share of all reads that any policy hits at most, whatever the order of each epoch.

    samples: F. cache: C, in samples. epochs: E; the cache is empty before the first.
    """
    _check_setting(samples, cache, epochs)
    return (epochs - 1) * min(cache, samples) / (epochs * samples)


def expected_hit_ratio(
    samples: int, cache: int, epochs: int, bundle: int, *, alternate: bool = True
) -> float:
    """Return the share of all reads that a cache hits which evicts the least recently used, in expectation.

    samples: F. cache: C, in samples. epochs: E; the cache is empty before the first. bundle: b samples, the last one
        takes the rest; F is a full shuffle. alternate: every second epoch takes the bundles in reverse.
    Source: see the module; exact for independent uniform shuffles within bundles.

    >>> expected_hit_ratio(samples=1000, cache=500, epochs=5, bundle=100)
    0.4
    """
    _check_setting(samples, cache, epochs)
    _check_bundle(bundle, samples)
    if not alternate:
        return (epochs - 1) / epochs * _hits_in_sequence(samples, cache, bundle) / samples
    last = (samples - 1) % bundle + 1
    from_the_end = _hits(cache, first=last, bundle=bundle, samples=samples)
    from_the_start = _hits(cache, first=bundle, bundle=bundle, samples=samples)
    # The second epoch begins with the last bundle, the third with the first, and so on.
    ends, starts = epochs // 2, (epochs - 1) // 2
    return (ends * from_the_end + starts * from_the_start) / (epochs * samples)


def replayed_hit_ratios(order: Order, epochs: int, caches: ArrayLike) -> NDArray[np.float64]:
    """Return the hit ratio of each cache with least-recently-used eviction, counted: float64[caches].

    order: of one rank. caches: int[caches], in samples. Takes 8 bytes and some hundred nanoseconds per read, for all
    caches together.
    """
    from penstock.simulate.caches import hit_ratios

    return hit_ratios(AccessPlan(order, order.samples, epochs).string(0), caches, "lru")


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


# What it costs in randomness


def scattered_variance(samples: int, bundle: int) -> float:
    """Return the share of the samples' variance that lies between bundles when ids are in random order.

    Whatever is measured of a sample (a label, a gradient): (n - 1) / (F - 1) in expectation with n bundles.
    """
    _check_bundle(bundle, samples)
    return (-(-samples // bundle) - 1) / max(samples - 1, 1)


def label_variance(labels: ArrayLike, bundle: int) -> float:
    """Return the share of the labels' variance that lies between bundles of consecutive ids: 0 to 1.

    labels: integers of any value, in the order of the ids. bundle: b samples, the last one takes the rest.
    The variance is that of the indicator vectors of the classes. 0 means that every bundle has the data set's
    mixture of classes, 1 that every bundle has one class alone.
    """
    given = np.asarray(labels)
    if given.ndim != 1 or given.dtype.kind not in "iu" or not given.size:
        raise ConfigError(f"labels are {given.dtype}, shape {given.shape}; give one integer per sample")
    _check_bundle(bundle, given.size)
    classes, number = np.unique(given, return_inverse=True)
    bundles = -(-given.size // bundle)
    cells = (np.arange(given.size) // bundle) * classes.size + number
    occupied, counts = np.unique(cells, return_counts=True)
    sizes = np.full(bundles, float(bundle))
    sizes[-1] = given.size - (bundles - 1) * bundle
    squared_total = float((np.bincount(number) / given.size) ** 2 @ np.ones(classes.size))
    # Of a mixture with shares p: sum p^2 over the bundles, weighted by size, less that of the whole.
    squared_within = (
        float((counts.astype(np.float64) ** 2 / sizes[occupied // classes.size]).sum()) / given.size
    )
    return (squared_within - squared_total) / (1 - squared_total) if classes.size > 1 else 0.0


@dataclass(frozen=True, slots=True)
class BatchNoise:
    """What bundles do to the difference between a batch's mean gradient and the data set's.

    That difference has a variance: the noise that training lives with, and averages out over batches. With a full
    shuffle every batch of every epoch is a new draw of all samples. A batch from a bundle differs in two ways.
    """

    #: Share of the variance that comes back in every epoch, because the bundles' own means stay what they are: 0 for
    #: a full shuffle; 1 if the same samples make up a batch for ever. This part no number of epochs averages out.
    frozen_share: float
    #: The variance beside that of a full shuffle's batch: 1 if ids are in random order, for then a bundle is a
    #: random sample and a batch of it too; up to the batch size if each bundle holds one class alone.
    growth: float


def batch_noise(samples: int, bundle: int, batch_size: int, between: float | None = None) -> BatchNoise:
    """Return what is frozen of a batch's noise, and how it grows.

    samples: F. bundle: b. batch_size: B, as the shuffling rank reads it, at most F. between: share of the samples'
        variance that lies between bundles of max(b, B), as of `label_variance`; `scattered_variance` unless given,
        with which the frozen share is B (F - b) / (b (F - B)).
    A batch is taken to lie in one bundle, and one of several bundles to be a bundle itself: the same in every epoch.
    Source: sampling of clusters, Kish, "Survey sampling", 1965, section 5.4: the growth is his design effect, with
    finite populations' corrections.
    """
    _check_bundle(bundle, samples)
    if not is_integer(batch_size) or not 1 <= batch_size <= samples:
        raise ConfigError(
            f"batch_size is {batch_size!r}; of {samples:,} samples a batch takes an integer from 1 to all: "
            "give the batch of the rank that shuffles"
        )
    bundle = max(bundle, batch_size)
    between = scattered_variance(samples, bundle) if between is None else between
    _check_share("between", between)
    if bundle == samples:
        return BatchNoise(0.0, 1.0)
    fixed = between
    fresh = (1 - between) / batch_size * (bundle - batch_size) / max(bundle - 1, 1)
    full = (samples - batch_size) / (batch_size * (samples - 1))
    if fixed + fresh == 0:
        return BatchNoise(0.0, 1.0)
    return BatchNoise(fixed / (fixed + fresh), (fixed + fresh) / full)


# Which bundle to take


@dataclass(frozen=True, slots=True)
class Setting:
    """What a choice of bundles depends on. All of one rank: its share of the data set, its cache, its batch.

    samples: F. cache: C, in samples, of files as they are stored. epochs: E. batch_size: B.
    headroom: share of the cache that other data may take, in [0, 1): programs, checkpoints, whatever else is read.
    """

    samples: int
    cache: int
    epochs: int
    batch_size: int = 64
    headroom: float = HEADROOM

    def __post_init__(self) -> None:
        _check_setting(self.samples, self.cache, self.epochs)
        if not _is_number(self.headroom) or not 0 <= self.headroom < 1:
            raise ConfigError(
                f"headroom is {self.headroom!r}; it is the share of the cache that other data takes, from 0 to below 1"
            )
        batch_noise(self.samples, self.samples, self.batch_size)

    @property
    def effective_cache(self) -> int:
        """What is left of the cache, in samples."""
        return math.floor(self.cache * (1 - self.headroom))

    @property
    def bound(self) -> float:
        """The hit ratio that no order and no policy exceeds with the whole cache."""
        return best_hit_ratio(self.samples, self.cache, self.epochs)


@dataclass(frozen=True, slots=True)
class Choice:
    """One size of bundle in a setting."""

    setting: Setting
    #: Samples; the last bundle takes the rest.
    bundle: int

    def __post_init__(self) -> None:
        _check_bundle(self.bundle, self.setting.samples)

    @property
    def bundles(self) -> int:
        """How many there are."""
        return -(-self.setting.samples // self.bundle)

    @property
    def bundle_ratio(self) -> float:
        """What `BundleShuffle` is to be given for it."""
        return ratio_of(self.bundle, self.setting.samples)

    @property
    def hit_ratio(self) -> float:
        """Expected, with the effective cache."""
        at = self.setting
        return expected_hit_ratio(at.samples, at.effective_cache, at.epochs, self.bundle)

    @property
    def randomness_lost(self) -> float:
        """The frozen share of a batch's noise, ids being in random order (`BatchNoise`)."""
        return batch_noise(self.setting.samples, self.bundle, self.setting.batch_size).frozen_share


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The bundle to take, those beside it, and why."""

    chosen: Choice
    #: Full shuffle, the paper's ratio, and what lies around the chosen one, largest bundle first.
    beside: tuple[Choice, ...]
    reason: str


def recommend(
    setting: Setting, *, tolerate: float | None = None, reach: float | None = None
) -> Recommendation:
    """Return the bundle to take in a setting.

    tolerate: the most randomness that may be lost (`Choice.randomness_lost`), 0 to 1: of the bundles within it, the
        one with the best hit ratio; 0.1 if neither is given.
    reach: a hit ratio: the largest bundle that reaches it.
    Only bundles that cut the data set evenly are considered, for the short rest of another cut would shift what fits
    the cache in every second epoch. Of hit ratios within a hundredth of each other, the larger bundle's is taken.

    Raises: ConfigError for both, for shares outside of 0 to 1, and for a ratio out of reach.
    """
    if tolerate is not None and reach is not None:
        raise ConfigError("tolerate and reach are both given; one of them is to be kept: give that one")
    choices = [Choice(setting, bundle) for bundle in even_bundles(setting.samples)]
    if reach is not None:
        _check_share("reach", reach)
        chosen = next((each for each in choices if each.hit_ratio >= reach), None)
        if chosen is None:
            best = max(choices, key=lambda each: each.hit_ratio)
            raise ConfigError(
                f"reach is {reach:.2%}, but no bundle reaches it with this cache: {best.bundle:,} samples hit "
                f"{best.hit_ratio:.2%}, and no order more than {setting.bound:.2%}: ask for less or give more memory"
            )
        reason = f"the largest bundle with which {reach:.1%} of all reads hit the cache"
    else:
        tolerated = 0.1 if tolerate is None else tolerate
        _check_share("tolerate", tolerated)
        allowed = [each for each in choices if each.randomness_lost <= tolerated]
        best_ratio = max(each.hit_ratio for each in allowed)
        chosen = next(each for each in allowed if each.hit_ratio >= best_ratio * (1 - _AS_GOOD))
        reason = (
            f"the largest bundle within {_AS_GOOD:.0%} of the best hit ratio of all that lose at most "
            f"{tolerated:.0%} of the randomness"
        )
    return Recommendation(chosen, _beside(setting, chosen, choices), f"{reason}; {_fit(chosen)}")


def _beside(setting: Setting, chosen: Choice, choices: Sequence[Choice]) -> tuple[Choice, ...]:
    place = choices.index(chosen)
    paper = Choice(setting, BundleShuffle(setting.samples).bundle)
    around = choices[max(0, place - 1) : place + 2]
    of_bundle = {each.bundle: each for each in (choices[0], paper, *around)}
    return tuple(of_bundle[bundle] for bundle in sorted(of_bundle, reverse=True))


def _fit(chosen: Choice) -> str:
    setting = chosen.setting
    if chosen.bundles == 1:
        return "that is a full shuffle: smaller bundles gain nothing here"
    whole, rest = divmod(setting.effective_cache, chosen.bundle)
    missing = chosen.bundle - rest
    fitting = f"{whole} bundles and {rest:,} samples of the next" if rest else f"{whole} bundles"
    if missing <= chosen.bundle // 20:
        fitting = f"{whole + 1} bundles but for {missing:,} samples"
    return f"of bundles of {chosen.bundle:,}, the {setting.effective_cache:,} samples left for them hold {fitting}"


def even_bundles(samples: int) -> Iterator[int]:
    """Yield sizes of bundles that cut F samples evenly, the largest first: ceil(F / n) for n = 1, 2, 3, ...

    All of them up to a thousand bundles, then each a hundredth smaller than the one before.
    """
    count, before = 1, 0
    while count <= samples:
        bundle = -(-samples // count)
        if bundle != before:
            yield bundle
        before, count = bundle, max(count + 1, count * 101 // 100)
    if before != 1:
        yield 1


def ratio_of(bundle: int, samples: int) -> float:
    """Return the shortest decimal that `BundleShuffle` takes for bundles of so many of F samples.

    >>> ratio_of(180, 1797)
    0.1
    """
    _check_bundle(bundle, samples)
    for digits in range(18):
        ratio = float(f"{bundle * 10**digits // samples}e-{digits}")
        if ratio > 0 and BundleShuffle(samples, bundle_ratio=ratio).bundle == bundle:
            return ratio
    return bundle / samples


def _check_setting(samples: int, cache: int, epochs: int) -> None:
    check_samples(samples)
    if not is_integer(cache) or cache < 0:
        raise ConfigError(f"cache is {cache!r}; it is a whole number of samples, 0 or more")
    if not is_integer(epochs) or epochs < 1:
        raise ConfigError(f"epochs is {epochs!r}; a run has a whole number of epochs, at least 1")


def _check_bundle(bundle: int, samples: int) -> None:
    check_samples(samples)
    if not is_integer(bundle) or not 1 <= bundle <= samples:
        raise ConfigError(
            f"bundle is {bundle!r}; of {samples:,} samples a bundle takes an integer from 1 to all of them"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.floating | np.integer) and not isinstance(value, bool)


def _check_share(name: str, value: float) -> None:
    if not _is_number(value) or not 0 <= value <= 1:
        raise ConfigError(f"{name} is {value!r}; it is a share, from 0 to 1: write 0.3 for 30 %")
