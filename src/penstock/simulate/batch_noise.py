"""What bundles cost in randomness: how a batch's mean strays from the data set's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from penstock.errors import ConfigError
from penstock.simulate.bundles import check_bundle
from penstock.validate import check_count, is_number

#: A batch whose mean is noisier by more than this factor than a full shuffle's calls for scattered ids.
NOISY = 1.1


def scattered_variance(samples: int, bundle: int) -> float:
    """Return the share of the samples' variance that lies between bundles when ids are in random order.

    Whatever is measured of a sample (a label, a gradient): (n - 1) / (F - 1) in expectation with n bundles.
    """
    check_bundle(bundle, samples)
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
    check_bundle(bundle, given.size)
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
    #: The variance relative to that of a full shuffle's batch: 1 if ids are in random order, for then a bundle is a
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
    check_bundle(bundle, samples)
    check_count("batch_size", batch_size, most=samples)
    bundle = max(bundle, batch_size)
    between = scattered_variance(samples, bundle) if between is None else between
    check_share("between", between)
    if bundle == samples:
        return BatchNoise(0.0, 1.0)
    fixed = between
    fresh = (1 - between) / batch_size * (bundle - batch_size) / max(bundle - 1, 1)
    full = (samples - batch_size) / (batch_size * (samples - 1))
    if fixed + fresh == 0:
        return BatchNoise(0.0, 1.0)
    return BatchNoise(fixed / (fixed + fresh), (fixed + fresh) / full)


def check_share(name: str, value: float) -> None:
    """Raise ConfigError unless a value is a share, 0 to 1."""
    if not is_number(value) or not 0 <= value <= 1:
        raise ConfigError(f"{name} is {value!r}; it is a share, from 0 to 1: write 0.3 for 30 %")
