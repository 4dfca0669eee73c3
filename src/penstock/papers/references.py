"""Figures 2 to 4 of Lee & Bahn 2023: which blocks of a data set a training references, one after the other.

A loader reads five epochs of small records, one by one, and what it reads is noted. Blocks are numbered as the paper
numbers them: in the order in which they are first referenced.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.loader import Loader
from penstock.measure.picture import Colour, Panel, Series, draw_panels
from penstock.papers.catalog import Repeated, Result
from penstock.plan import BundleShuffle, FullShuffle, Order
from penstock.store import Numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SAMPLES, EPOCHS, _BATCH = 2000, 5, 50


class NotedSource:
    """Records of eight bytes; `read` notes which, in order. Read by one thread."""

    def __init__(self, samples: int) -> None:
        self.sizes_bytes: NDArray[np.int64] = np.full(samples, 8, np.int64)
        self.labels: Mapping[str, NDArray[np.int64]] = {}
        self.classes: tuple[str, ...] = ()
        self.numbers = Numbers("<i8", (), "int64")
        self.noted: list[int] = []

    def __len__(self) -> int:
        return len(self.sizes_bytes)

    def read(self, sample: int) -> bytes:
        self.noted.append(sample)
        return sample.to_bytes(8, "little")

    def read_into(self, sample: int, buffer: memoryview) -> int:
        buffer[:8] = self.read(sample)
        return 8

    def describe(self, sample: int) -> str:
        return f"record {sample}"


def references(order: Order) -> NDArray[np.int64]:
    """Return the blocks that a loader references, numbered by first reference: int64[epochs, samples]."""
    source = NotedSource(order.samples)
    loader = Loader(
        source,
        batch_size=_BATCH,
        epochs=EPOCHS,
        shuffle=order,
        policy="staging",
        decoders=0,
        rank=0,
        world_size=1,
        report=None,
    )
    source.noted.clear()  # a loader looks at one sample beforehand
    with loader:
        for _ in range(EPOCHS):
            for _ in loader:
                pass
    noted = np.array(source.noted, np.int64)
    numbers = np.empty(order.samples, np.int64)
    numbers[noted[: order.samples]] = np.arange(order.samples)
    return numbers[noted].reshape(EPOCHS, order.samples)


def strides(blocks: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the mean distance of a block from the one before, as a share of all: float64[epochs]."""
    distances: NDArray[np.float64] = np.abs(np.diff(blocks, axis=1)).mean(axis=1) / blocks.shape[1]
    return distances


def reuse_share(blocks: NDArray[np.int64]) -> float:
    """Return the share of blocks, of the last tenth of an epoch, that the next epoch references in its first tenth."""
    tenth = blocks.shape[1] // 10
    pairs = pairwise(blocks)
    return float(np.mean([np.isin(later[:tenth], earlier[-tenth:]).mean() for earlier, later in pairs]))


def _figure(order: Order, title: str, expected: str) -> Repeated:
    blocks = references(order)
    distances = strides(blocks)
    results = [
        Result(f"epoch {epoch + 1}, mean distance to the block before", distance, None, "share")
        for epoch, distance in enumerate(distances.tolist())
    ]
    results.append(
        Result(
            "first tenth of an epoch that was in the last tenth before", reuse_share(blocks), None, "share"
        )
    )
    why = f"The paper draws this figure without numbers, and libraries and checkpoints with the data set; {expected}"
    return Repeated(results, why, lambda: _draw(blocks, title))


def figure_2() -> Repeated:
    """Return what a training under a full shuffle references."""
    expected = (
        "a random block is a third of the data away on average, after a first epoch that only numbers them."
    )
    return _figure(FullShuffle(SAMPLES, 0), "Original: full shuffle", expected)


def figure_3() -> Repeated:
    """Return what it references by bundles in the same order each epoch."""
    expected = "within a bundle of a tenth of the data a random block is a thirtieth of it away."
    return _figure(BundleShuffle(SAMPLES, 0, alternate=False), "Bundles", expected)


def figure_4() -> Repeated:
    """Return what it references by bundles in alternating order."""
    expected = "the bundle that is read last is the first of the next epoch, so that a cache still holds it."
    return _figure(BundleShuffle(SAMPLES, 0), "Bundles, alternating", expected)


def _draw(blocks: NDArray[np.int64], title: str) -> Figure:
    points = Series("", np.arange(blocks.size), blocks.ravel(), Colour.BLUE, "", ".", size=0.8)
    return draw_panels([Panel(title, [points])], x_label="references", y_label="block", size=(7.2, 4.4))
