"""Which size of bundle to take: the hits of each against the randomness that it loses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.errors import ConfigError
from penstock.plan import BundleShuffle
from penstock.simulate.batch_noise import batch_noise, check_share
from penstock.simulate.bundles import best_hit_share, check_bundle, check_setting, expected_hit_share
from penstock.validate import is_number

#: Share of its cache that the bundle paper's runs did without: 49 of 50 % explain its Table 1 (`penstock.papers`).
SPARE_SHARE = 0.02
#: Hit ratios that differ by less, relative to each other, are taken for equal: the larger bundle is preferred.
_AS_GOOD = 0.01


@dataclass(frozen=True, slots=True)
class Setting:
    """What a choice of bundles depends on. All of one rank: its share of the data set, its cache, its batch.

    samples: F. cache: C, in samples, of files as they are stored. epochs: E. batch_size: B.
    spare_share: share of the cache that other data may take, in [0, 1): programs, checkpoints, whatever else is read.
    """

    samples: int
    cache: int
    epochs: int
    batch_size: int = 64
    spare_share: float = SPARE_SHARE

    def __post_init__(self) -> None:
        check_setting(self.samples, self.cache, self.epochs)
        if not is_number(self.spare_share) or not 0 <= self.spare_share < 1:
            raise ConfigError(
                f"spare_share is {self.spare_share!r}; it is the share of the cache that other data takes, from 0 to "
                "below 1"
            )
        batch_noise(self.samples, self.samples, self.batch_size)

    @property
    def effective_cache(self) -> int:
        """What is left of the cache, in samples."""
        return math.floor(self.cache * (1 - self.spare_share))

    @property
    def bound(self) -> float:
        """The hit ratio that no order and no policy exceeds with the whole cache."""
        return best_hit_share(self.samples, self.cache, self.epochs)


@dataclass(frozen=True, slots=True)
class Choice:
    """One size of bundle in a setting."""

    setting: Setting
    #: Samples; the last bundle takes the rest.
    bundle: int

    def __post_init__(self) -> None:
        check_bundle(self.bundle, self.setting.samples)

    @property
    def bundles(self) -> int:
        """How many there are."""
        return -(-self.setting.samples // self.bundle)

    @property
    def bundle_ratio(self) -> float:
        """What `BundleShuffle` is to be given for it."""
        return ratio_of(self.bundle, self.setting.samples)

    @property
    def hit_share(self) -> float:
        """Expected, with the effective cache."""
        at = self.setting
        return expected_hit_share(at.samples, at.effective_cache, at.epochs, self.bundle)

    @property
    def randomness_lost(self) -> float:
        """The frozen share of a batch's noise, ids being in random order (`BatchNoise`)."""
        return batch_noise(self.setting.samples, self.bundle, self.setting.batch_size).frozen_share


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The bundle to take, its neighbours, and why."""

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
        check_share("reach", reach)
        chosen = next((each for each in choices if each.hit_share >= reach), None)
        if chosen is None:
            best = max(choices, key=lambda each: each.hit_share)
            raise ConfigError(
                f"reach is {reach:.2%}, but no bundle reaches it with this cache: {best.bundle:,} samples hit "
                f"{best.hit_share:.2%}, and no order more than {setting.bound:.2%}: ask for less or give more memory"
            )
        reason = f"the largest bundle with which {reach:.1%} of all reads hit the cache"
    else:
        tolerated = 0.1 if tolerate is None else tolerate
        check_share("tolerate", tolerated)
        allowed = [each for each in choices if each.randomness_lost <= tolerated]
        best_ratio = max(each.hit_share for each in allowed)
        chosen = next(each for each in allowed if each.hit_share >= best_ratio * (1 - _AS_GOOD))
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
    check_bundle(bundle, samples)
    for digits in range(18):
        ratio = float(f"{bundle * 10**digits // samples}e-{digits}")
        if ratio > 0 and BundleShuffle(samples, bundle_ratio=ratio).bundle == bundle:
            return ratio
    return bundle / samples
