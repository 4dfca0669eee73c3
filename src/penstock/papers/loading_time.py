"""Figures 6 to 8 of Lee & Bahn 2023: loading time by epoch under a small page cache, and accuracy by epoch and by time.

Files are read, decoded and resized one after the other, by a loader that does not read ahead; the pages of the least
recently read files are dropped from the page cache, so that it never holds more than half of the data set. Accuracies
are those of the trainings of `convergence`.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.bench.loaders import TRANSFORMS
from penstock.loader import Loader
from penstock.measure.pagecache import drop_cached, drop_files
from penstock.measure.picture import Colour, Panel, Series, draw_panels
from penstock.papers.catalog import Repeated, Result
from penstock.papers.convergence import SCATTERED, read_study
from penstock.papers.image_files import image_files
from penstock.plan import BundleShuffle, FullShuffle, Order
from penstock.store import FlatFolder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

IMAGES, EPOCHS, _BATCH = 300, 5, 50
#: What a read of a file that the cache does not hold takes besides: nothing, or a hard disk's seek.
SEEKS = {"this disk": 0.0, "with seeks of 5 ms": 5e-3}
CACHE_SHARE = 0.5
#: Bundles save this share of the loading time, and of the time to the same accuracy: section 4, Figures 6 and 8.
LOADING_SAVED = {"ImageNet100": 0.0896, "Food101": 0.1376}
TRAINING_SAVED = {"ImageNet100": 0.154, "Food101": 0.237}
_NAMES = ("full shuffle", "bundles of 10 %")
_RATIOS = (1.0, 0.1)


class LimitedCache:
    """A folder of files of which the page cache holds so many: those read last. Read by one thread.

    seek_seconds: that a read of any other file waits besides.
    hits: reads of files that it held. evicting_seconds: what dropping files took, which is no loading.
    """

    def __init__(self, folder: FlatFolder, files: int, seek_seconds: float) -> None:
        self._folder, self._most, self._seek_seconds = folder, files, seek_seconds
        self._held = OrderedDict[int, None]()
        self.hits, self.evicting_seconds = 0, 0.0
        self.sizes_bytes, self.labels, self.classes = folder.sizes_bytes, folder.labels, folder.classes
        drop_files(map(folder.path_of, range(len(folder))), probed=0)

    def __len__(self) -> int:
        return len(self._folder)

    def read(self, sample: int) -> bytes:
        data = self._folder.read(sample)
        self._note(sample)
        return data

    def read_into(self, sample: int, buffer: memoryview) -> int:
        size = self._folder.read_into(sample, buffer)
        self._note(sample)
        return size

    def describe(self, sample: int) -> str:
        return self._folder.describe(sample)

    def _note(self, sample: int) -> None:
        if sample in self._held:
            self.hits += 1
        elif self._seek_seconds:
            time.sleep(self._seek_seconds)
        self._held[sample] = None
        self._held.move_to_end(sample)
        if len(self._held) <= self._most:
            return
        begin = time.perf_counter()
        evicted, _ = self._held.popitem(last=False)
        descriptor = os.open(self._folder.path_of(evicted), os.O_RDONLY | os.O_CLOEXEC)
        try:
            drop_cached(descriptor)
        finally:
            os.close(descriptor)
        self.evicting_seconds += time.perf_counter() - begin


def loading_seconds(
    folder: FlatFolder, order: Order, seek_seconds: float, epochs: int = EPOCHS
) -> tuple[NDArray[np.float64], float]:
    """Return the seconds that each epoch loads, float64[epochs], and the share of all reads that the cache served."""
    source = LimitedCache(folder, int(CACHE_SHARE * len(folder)), seek_seconds)
    loader = Loader(
        source,
        batch_size=_BATCH,
        epochs=epochs,
        shuffle=order,
        transforms=TRANSFORMS,
        policy="staging",
        decoders=0,
        rank=0,
        world_size=1,
        report=None,
    )
    source.evicting_seconds = 0.0
    moments = [time.perf_counter()]
    with loader:
        for _ in range(epochs):
            for _ in loader:
                pass
            moments.append(time.perf_counter() - source.evicting_seconds)
    return np.diff(moments), source.hits / (epochs * len(folder))


def _both(seek_seconds: float) -> tuple[NDArray[np.float64], tuple[float, float]]:
    """Return the seconds by order and epoch, float64[2, epochs], and the hit ratio of each order."""
    with image_files(IMAGES) as folder:
        loading_seconds(folder, FullShuffle(len(folder), 1), 0.0, 1)  # the first run loads and compiles
        full, bundles = (
            loading_seconds(folder, order, seek_seconds)
            for order in (FullShuffle(len(folder), 0), BundleShuffle(len(folder), 0))
        )
    return np.array([full[0], bundles[0]]), (full[1], bundles[1])


def figure_6() -> Repeated:
    """Return the loading time of each epoch under a full shuffle and by bundles."""
    results, drawn = [], {}
    for disk, seek_seconds in SEEKS.items():
        seconds, hits = _both(seek_seconds)
        drawn[disk] = seconds
        for name, own, ratio in zip(_NAMES, seconds, hits, strict=True):
            results += [
                Result(f"{disk}, {name}, epoch {epoch + 1}", float(value), None, "seconds")
                for epoch, value in enumerate(own)
            ]
            results.append(Result(f"{disk}, {name}, reads that hit the cache", ratio, None, "share"))
        saved = 1 - float(seconds[1].sum() / seconds[0].sum())
        results += [
            Result(f"{disk}, time that bundles save, published of {data}", saved, published, "share")
            for data, published in LOADING_SAVED.items()
        ]
    why = (
        f"The page cache holds {CACHE_SHARE:.0%} of the files here; what a hit saves depends on how long the disk "
        "takes in addition to decoding and resizing, and the paper does not say what its disk and its cache were."
    )
    return Repeated(results, why, lambda: _draw_loading(drawn))


def _accuracies() -> NDArray[np.float64]:
    """Return the mean test accuracy by order and epoch: float64[2, epochs]."""
    study = read_study()
    return np.array([study.by_epoch(SCATTERED, ratio).mean(axis=0) for ratio in _RATIOS])


def figure_7() -> Repeated:
    """Return the accuracy after each epoch under a full shuffle and by bundles."""
    accuracies = _accuracies()
    results = [
        Result(f"{name}, epoch {epoch + 1}", value, None, "share")
        for name, own in zip(_NAMES, accuracies.tolist(), strict=True)
        for epoch, value in enumerate(own)
    ]
    apart = float((accuracies[1] - accuracies[0])[-1])
    results.append(Result("bundles less full shuffle, last epoch", apart, None, "share"))
    why = (
        'The paper draws training accuracies of ResNet-50 without numbers and calls them "almost the same"; these are '
        f"mean test accuracies of a small model on {read_study().data.split(',')[0]}."
    )
    epochs = np.arange(1, accuracies.shape[1] + 1)
    return Repeated(results, why, lambda: _draw_accuracy(np.tile(epochs, (2, 1)), accuracies, "epoch"))


def figure_8() -> Repeated:
    """Return the time until the same accuracies, where an epoch takes what it took to load."""
    disk, seek_seconds = list(SEEKS.items())[-1]
    seconds, _ = _both(seek_seconds)
    accuracies = _accuracies()
    # From the second epoch on the cache is warm, and each takes as long as the one before, on average.
    later = seconds[:, 1:].mean(axis=1)
    moments = seconds[:, :1] + later[:, None] * np.arange(accuracies.shape[1])
    results = []
    # What both reach: of the rising part of the curves, above the first epoch's.
    goals = np.linspace(accuracies[:, 0].max(), accuracies.max(axis=1).min(), 6)[1:]
    shares = []
    for goal in goals.tolist():
        reached = [float(when[np.argmax(own >= goal)]) for when, own in zip(moments, accuracies, strict=True)]
        results += [
            Result(f"{name}, time to {100 * goal:.1f} %", value, None, "seconds")
            for name, value in zip(_NAMES, reached, strict=True)
        ]
        shares.append(1 - reached[1] / reached[0])
    results += [
        Result(f"time that bundles save, published of {data}", float(np.mean(shares)), published, "share")
        for data, published in TRAINING_SAVED.items()
    ]
    why = (
        f"An epoch takes here what it loads, {disk}, and no computing; the accuracies are those of a small model, "
        "which an epoch more or less to a goal moves by several per cent."
    )
    return Repeated(results, why, lambda: _draw_accuracy(moments, accuracies, "seconds"))


def _draw_loading(drawn: Mapping[str, NDArray[np.float64]]) -> Figure:
    epochs, colours = np.arange(1, EPOCHS + 1), (Colour.RED, Colour.BLUE)
    panels = [
        Panel(
            disk,
            [
                Series(name, epochs, own, colour, marker="o")
                for name, own, colour in zip(_NAMES, seconds, colours, strict=True)
            ],
        )
        for disk, seconds in drawn.items()
    ]
    return draw_panels(panels, x_label="epoch", y_label="loading (s)")


def _draw_accuracy(x: NDArray[np.float64], accuracies: NDArray[np.float64], x_label: str) -> Figure:
    colours = (Colour.RED, Colour.BLUE)
    series = [
        Series(name, place, 100 * own, colour, marker="o")
        for name, place, own, colour in zip(_NAMES, x, accuracies, colours, strict=True)
    ]
    return draw_panels([Panel("test accuracy", series)], x_label=x_label, y_label="%")
