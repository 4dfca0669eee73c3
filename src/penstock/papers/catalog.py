"""The published tables and figures that can be repeated, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Literal

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Unit = Literal["seconds", "share", "count", "factor", "bytes per second", "samples per second"]


@dataclass(frozen=True, slots=True)
class Result:
    """A number that was computed here, next to the published one.

    of: what it is of. computed: None where it cannot be computed here. published: None where the paper prints none.
    unit: of both; a share is 0 to 1, a rate is bytes per second or samples per second.
    """

    of: str
    computed: float | None
    published: float | None
    unit: Unit

    @property
    def difference(self) -> float | None:
        """Computed less published: shares in shares, else relative to the published number; None where that is 0."""
        if self.computed is None or self.published is None:
            return None
        apart = self.computed - self.published
        if self.unit == "share":
            return apart
        return apart / self.published if self.published else None


@dataclass(frozen=True, slots=True)
class Repeated:
    """A published table or figure, repeated.

    why: a sentence on why computed and published numbers differ. draw: returns the picture; needs matplotlib.
    """

    results: Sequence[Result]
    why: str
    draw: Callable[[], Figure]


@dataclass(frozen=True, slots=True)
class Paper:
    """A published table or figure.

    source: who published it. function: "module:name" in this package, which returns it `Repeated`.
    extra: of Penstock, that it needs.
    """

    name: str
    title: str
    source: str
    function: str
    extra: str = "study"

    def repeat(self) -> Repeated:
        """Compute it, with fixed seeds: the same each time."""
        module, _, name = self.function.partition(":")
        repeated: Repeated = getattr(import_module(f"{__package__}.{module}"), name)()
        return repeated


_BUNDLES = (
    'J. Lee and H. Bahn, "Analyzing data reference characteristics of deep learning workloads for improving buffer '
    'cache performance", Applied Sciences 2023'
)

_DELTAS = (
    'Wang, Boukhobza and Shao, "Preserving SSD lifetime in deep learning applications with delta snapshots", Journal '
    "of Parallel and Distributed Computing 133, 2019"
)

_THESIS = 'R. Böhringer, "Clairvoyant Prefetching for Machine Learning I/O", ETH Zürich 2020'

_CHIEN = 'S. Chien et al., "Characterizing Deep-Learning I/O Workloads in TensorFlow", arXiv:1810.03035, 2018'

_WHITE_PAPER = (
    'M. Abadi et al., "TensorFlow: Large-Scale Machine Learning on Heterogeneous Distributed Systems", 2015'
)

PAPERS = (
    Paper("bundles-table-1", "buffer cache hits on 2 to 16 nodes, SUN397", _BUNDLES, "bundles:table_1"),
    Paper("bundles-figure-2", "data references under a full shuffle", _BUNDLES, "references:figure_2"),
    Paper("bundles-figure-3", "data references by bundles", _BUNDLES, "references:figure_3"),
    Paper("bundles-figure-4", "data references by alternating bundles", _BUNDLES, "references:figure_4"),
    Paper("bundles-figure-5", "what bundles improve under LRU", _BUNDLES, "improvements:figure_5"),
    Paper(
        "bundles-figure-6",
        "loading time by epoch, under a small page cache",
        _BUNDLES,
        "loading_time:figure_6",
        "images",
    ),
    Paper("bundles-figure-7", "accuracy by epoch", _BUNDLES, "loading_time:figure_7"),
    Paper("bundles-figure-8", "accuracy by time", _BUNDLES, "loading_time:figure_8", "images"),
    Paper("bundles-figure-9", "test accuracy by bundle_ratio", _BUNDLES, "accuracy:figure_9"),
    Paper(
        "bundles-figure-10", "what bundles improve under LRU, LFU and MRU", _BUNDLES, "improvements:figure_10"
    ),
    Paper("chien-table-1", "what one stream reads and writes", _CHIEN, "characterisation:table_i"),
    Paper(
        "chien-figure-4",
        "images/s by threads: read, decode, resize",
        _CHIEN,
        "characterisation:figure_4",
        "images",
    ),
    Paper("chien-figure-5", "images/s by threads: read alone", _CHIEN, "characterisation:figure_5", "images"),
    Paper(
        "chien-figure-6", "run times with and without prefetch", _CHIEN, "characterisation:figure_6", "images"
    ),
    Paper(
        "chien-figure-7", "run times of AlexNet by batch size", _CHIEN, "characterisation:figure_7", "torch"
    ),
    Paper("chien-figure-8", "what is read over time", _CHIEN, "characterisation:figure_8", "images"),
    Paper(
        "chien-figure-9",
        "run times with saves, and a burst buffer",
        _CHIEN,
        "characterisation:figure_9",
        "torch",
    ),
    Paper("chien-figure-10", "what saves write over time", _CHIEN, "characterisation:figure_10", "torch"),
    Paper("deltas-table-1", "weights with the same first bits", _DELTAS, "delta_bits:table_1"),
    Paper("deltas-table-6", "equal pages of snapshots", _DELTAS, "delta_bits:table_6"),
    Paper("deltas-table-7", "equal weights of snapshots", _DELTAS, "delta_bits:table_7"),
    Paper("deltas-table-8", "blocks of the warm drive by what they hold", _DELTAS, "deltas:table_8"),
    Paper("deltas-table-9", "times to save and to restore CaffeNet", _DELTAS, "deltas:table_9"),
    Paper("deltas-table-10", "which snap_dis is chosen", _DELTAS, "delta_bits:table_10"),
    Paper("deltas-figure-8", "exponents of weights", _DELTAS, "delta_bits:figure_8"),
    Paper("deltas-figure-9", "bytes written by seven methods", _DELTAS, "delta_bits:figure_9"),
    Paper(
        "deltas-figure-10", "bytes written and blocks erased by delta snapshots", _DELTAS, "deltas:figure_10"
    ),
    Paper("thesis-figure-3-1", "samples that a rank reads often", _THESIS, "thesis_frequency:figure_3_1"),
    Paper("thesis-figure-5-1", "memory by threads", _THESIS, "thesis_training:figure_5_1"),
    Paper("thesis-figure-5-2", "a disk's random reads by threads", _THESIS, "thesis_training:figure_5_2"),
    Paper("thesis-figure-5-3", "the shared store by nodes", _THESIS, "thesis_training:figure_5_3"),
    Paper("thesis-table-5-1", "run times, data that fit into a node's memory", _THESIS, "thesis:table_5_1"),
    Paper("thesis-table-5-2", "run times, data that fit into a node's storage", _THESIS, "thesis:table_5_2"),
    Paper(
        "thesis-table-5-3", "run times, data that fit into all nodes' storage", _THESIS, "thesis:table_5_3"
    ),
    Paper("thesis-table-5-4", "run times, data that fit nowhere", _THESIS, "thesis:table_5_4"),
    Paper(
        "thesis-table-5-7",
        "speedup of loading 245 images, and Figure 5.9",
        _THESIS,
        "thesis_training:table_5_7",
    ),
    Paper(
        "thesis-table-5-8",
        "speedup of loading 300,000 images, and Figure 5.10",
        _THESIS,
        "thesis_training:table_5_8",
    ),
    Paper(
        "thesis-figure-5-8",
        "run times of machines with more and less memory, and Tables 5.5 and 5.6",
        _THESIS,
        "thesis:figure_5_8",
    ),
    Paper(
        "thesis-figure-5-11",
        "stalls of ResNet-50 on a tenth of ImageNet",
        _THESIS,
        "thesis_training:figure_5_11",
    ),
    Paper(
        "thesis-figure-5-12",
        "stalls of SqueezeNet on a tenth of ImageNet",
        _THESIS,
        "thesis_training:figure_5_12",
    ),
    Paper("thesis-figure-5-13", "stalls of ResNet-50 on ImageNet", _THESIS, "thesis_training:figure_5_13"),
    Paper(
        "thesis-figure-5-14",
        "stalls of 256 nodes, iteration by iteration",
        _THESIS,
        "thesis_training:figure_5_14",
    ),
    Paper(
        "whitepaper-figure-1",
        "a program that builds and runs a graph",
        _WHITE_PAPER,
        "dataflow:figure_1",
        "torch",
    ),
    Paper("whitepaper-figure-2", "its graph", _WHITE_PAPER, "dataflow:figure_2", "torch"),
    Paper("whitepaper-figure-4", "transfers between devices", _WHITE_PAPER, "dataflow:figure_4", "torch"),
    Paper("whitepaper-figure-5", "its gradients", _WHITE_PAPER, "dataflow:figure_5", "torch"),
    Paper("whitepaper-figure-6", "a part of a graph that runs", _WHITE_PAPER, "dataflow:figure_6", "torch"),
    Paper(
        "whitepaper-figure-7",
        "synchronous and asynchronous training",
        _WHITE_PAPER,
        "dataflow:figure_7",
        "torch",
    ),
    Paper("whitepaper-figure-8", "a model on several devices", _WHITE_PAPER, "dataflow:figure_8", "torch"),
    Paper("whitepaper-figure-9", "steps at the same time", _WHITE_PAPER, "dataflow:figure_9", "torch"),
)


def paper_named(name: str) -> Paper:
    """Return a paper by its name.

    Raises: ConfigError that lists the known names.
    """
    for paper in PAPERS:
        if paper.name == name:
            return paper
    known = ", ".join(paper.name for paper in PAPERS)
    raise ConfigError(
        f"NAME is {name!r}, which is no published table or figure here; the known ones are {known}"
    )
