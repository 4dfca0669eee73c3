"""The published tables and figures that can be repeated, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Literal

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Result:
    """A number that was computed here, beside the published one.

    of: what it is of. computed: None where it cannot be computed. published: None where the paper prints none.
    unit: of both; a share is 0 to 1.
    """

    of: str
    computed: float | None
    published: float | None
    unit: Literal["seconds", "share", "count"]

    @property
    def difference(self) -> float | None:
        """Computed less published: of shares in shares, of all else relative to the published number."""
        if self.computed is None or self.published is None:
            return None
        apart = self.computed - self.published
        return apart if self.unit == "share" else apart / self.published


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
    """

    name: str
    title: str
    source: str
    function: str

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

PAPERS = (
    Paper("bundles-table-1", "buffer cache hits on 2 to 16 nodes, SUN397", _BUNDLES, "bundles:table_1"),
    Paper("bundles-figure-5", "what bundles improve under LRU", _BUNDLES, "improvements:figure_5"),
    Paper("bundles-figure-9", "test accuracy by bundle_ratio", _BUNDLES, "accuracy:figure_9"),
    Paper(
        "bundles-figure-10", "what bundles improve under LRU, LFU and MRU", _BUNDLES, "improvements:figure_10"
    ),
    Paper("deltas-table-8", "blocks of the warm drive by what they hold", _DELTAS, "deltas:table_8"),
    Paper("deltas-table-9", "times to save and to restore CaffeNet", _DELTAS, "deltas:table_9"),
    Paper(
        "deltas-figure-10", "bytes written and blocks erased by delta snapshots", _DELTAS, "deltas:figure_10"
    ),
    Paper("thesis-figure-3-1", "samples that a rank reads often", _THESIS, "thesis_frequency:figure_3_1"),
    Paper("thesis-table-5-1", "run times, data that fit into a node's memory", _THESIS, "thesis:table_5_1"),
    Paper("thesis-table-5-2", "run times, data that fit into a node's storage", _THESIS, "thesis:table_5_2"),
    Paper(
        "thesis-table-5-3", "run times, data that fit into all nodes' storage", _THESIS, "thesis:table_5_3"
    ),
    Paper("thesis-table-5-4", "run times, data that fit nowhere", _THESIS, "thesis:table_5_4"),
    Paper(
        "thesis-figure-5-8", "run times of machines with more and less memory", _THESIS, "thesis:figure_5_8"
    ),
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
