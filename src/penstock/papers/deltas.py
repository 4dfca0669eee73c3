"""CaffeNet's snapshots on the drive of the delta-snapshot paper: Tables 8 and 9, Figures 9 and 10.

Source: Wang, Boukhobza and Shao, "Preserving SSD lifetime in deep learning applications with delta snapshots",
Journal of Parallel and Distributed Computing 133, 2019: "the paper" below.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

from penstock.machine.ssd import Drive, Ssd
from penstock.measure.picture import DOTTED, Colour, Panel, Series, draw_panels, write
from penstock.measure.plot_wear import COLOUR_OF, draw_methods
from penstock.papers.catalog import Repeated, Result
from penstock.policy.delta_schemes import Scheme, reference_of
from penstock.simulate.snapshots import (
    METHODS,
    SNAP_DISTANCES,
    TIMED_SNAP_DIS,
    Baseline,
    Delta,
    SnapshotSizes,
    compare_methods,
    recorded_sizes,
    time_snapshots,
)
from penstock.simulate.wear import warm_drive

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CAFFENET_PARAMETERS = 57_286_118
_PAPER_PAGE_BYTES = 4_096


@dataclass(frozen=True, slots=True)
class PublishedTimes:
    """A row of Table 9: one scheme's figures after one snapshot.

    useful_pages: of all files that the snapshot needs. save_seconds, restore_seconds: cut to milliseconds.
    """

    useful_pages: int
    save_seconds: float
    restore_seconds: float


def _published(
    useful: Sequence[int], save: Sequence[float], restore: Sequence[float]
) -> tuple[PublishedTimes, ...]:
    return tuple(PublishedTimes(*row) for row in zip(useful, save, restore, strict=True))


#: Table 9: CaffeNet's ten snapshots, every 5,000 iterations, at snap_dis 5.
TABLE_9: Mapping[Scheme, tuple[PublishedTimes, ...]] = {
    "progressive": _published(
        (46_581, 94_354, 140_551, 185_760, 224_782, 46_588, 85_059, 123_436, 156_529, 189_525),
        (1.945, 2.757, 3.469, 4.182, 4.662, 1.945, 2.367, 2.992, 3.396, 3.933),
        (0.760, 1.540, 2.294, 3.032, 3.669, 0.760, 1.388, 2.015, 2.555, 3.094),
    ),
    "chain": _published(
        (46_581, 94_354, 94_968, 95_254, 95_265, 46_588, 85_059, 85_850, 85_912, 85_975),
        (1.945, 2.757, 2.782, 2.793, 2.793, 1.945, 2.367, 2.401, 2.403, 2.406),
        (0.760, 1.540, 1.550, 1.555, 1.555, 0.760, 1.388, 1.401, 1.402, 1.403),
    ),
}
#: Section 5.5: erases of CaffeNet by progressive DynRLE at snap_dis 10, "about 27 %" fewer than complete ones.
PAPER_ERASES, PAPER_SNAP_DIS, PAPER_SAVING = 6_448, 10, 0.27
#: Figure 9: bytes that progressive DynRLE writes less than complete snapshots, at best.
PAPER_WRITTEN_SAVING = 0.31
#: Blocks of the warm drive by what they hold.
TABLE_8 = {"valid": 111_432, "invalid": 13_048, "free": 6_592}


def caffenet_sizes() -> SnapshotSizes:
    """Return the paper's CaffeNet: what Tables 5 and 9 tell of its sizes, which is snap_dis 5 and no gzip.

    A file's pages are the difference of the useful pages of two snapshots: of the one before in the progressive
    scheme, of the baseline in the chain.
    """
    huffman: list[int | None] = [None] * 10
    dynrle: dict[tuple[int, int], int] = {}
    for scheme, rows in TABLE_9.items():
        for snapshot, row in enumerate(rows):
            reference = reference_of(scheme, snapshot, TIMED_SNAP_DIS)
            if reference is None:
                huffman[snapshot] = row.useful_pages * _PAPER_PAGE_BYTES
            else:
                pages = row.useful_pages - rows[reference].useful_pages
                dynrle[snapshot, reference] = pages * _PAPER_PAGE_BYTES
    return SnapshotSizes(
        "caffenet",
        "the paper's CaffeNet, from its Tables 5 and 9",
        CAFFENET_PARAMETERS,
        dict.fromkeys(get_args(Baseline), (None,) * 10)
        | {"complete": (229_146_326,) * 10, "huffman": tuple(huffman)},
        {codec: {} for codec in get_args(Delta)} | {"dynrle": dynrle},
    )


@dataclass(frozen=True, slots=True)
class TimedSnapshot:
    """A snapshot's times by the model next to the published ones.

    snapshot: counted from 0.
    """

    scheme: Scheme
    snapshot: int
    published: PublishedTimes
    useful_pages: int
    save_seconds: float
    restore_seconds: float

    @property
    def iteration(self) -> int:
        """Of CaffeNet's training, at which the snapshot was taken."""
        return 5_000 * (self.snapshot + 1)

    @property
    def worst_error(self) -> float:
        """Return the larger of the two relative deviations."""
        published = self.published
        return max(
            abs(self.save_seconds / published.save_seconds - 1.0),
            abs(self.restore_seconds / published.restore_seconds - 1.0),
        )


def run_table_9(drive: Drive, *, phases_from_start: bool = True) -> list[TimedSnapshot]:
    """Save and restore the paper's CaffeNet on copies of a drive.

    drive: `Ssd.paper()`, warm, for the published times.
    phases_from_start: as in `run_stream`. With it all published times come out to the millisecond they are cut
        to; where each save continues on the drive that the one before left, the open block is filled differently,
        and the worst of them is 0.14 % off.
    Returns: ten of the progressive scheme, then ten of the chain.
    """
    sizes = caffenet_sizes()
    return [
        TimedSnapshot(
            method.scheme,
            times.snapshot,
            TABLE_9[method.scheme][times.snapshot],
            times.useful_pages,
            times.save_seconds,
            times.restore_seconds,
        )
        for method in METHODS[-2:]
        for times in time_snapshots(drive, sizes, method, TIMED_SNAP_DIS, phases_from_start=phases_from_start)
    ]


def table_8() -> Repeated:
    """Return how many blocks of the warm drive hold what."""
    states = dict(zip(TABLE_8, warm_drive(Ssd.paper()).block_states(), strict=True))
    results = [
        Result(f"{state} blocks", states[state], published, "count") for state, published in TABLE_8.items()
    ]
    why = "They do not differ: the drive is written over once in a row, as the paper's."
    return Repeated(results, why, lambda: draw_blocks(states))


def table_9() -> Repeated:
    """Return the seconds to save and to restore each of CaffeNet's snapshots."""
    rows = run_table_9(warm_drive(Ssd.paper()))
    one_at_a_time = run_table_9(warm_drive(replace(Ssd.paper(), host_link="shared")))
    results = [
        Result(f"{row.scheme}, iteration {row.iteration:,}, {what}", computed, published, "seconds")
        for row in rows
        for what, computed, published in (
            ("save", row.save_seconds, row.published.save_seconds),
            ("restore", row.restore_seconds, row.published.restore_seconds),
        )
    ]
    worst = max(row.worst_error for row in run_table_9(warm_drive(Ssd.paper()), phases_from_start=False))
    why = (
        "The published times are cut to milliseconds and take each save on the drive as warmed up (going on from save "
        f"to save, the worst is {100 * worst:.2f} % off); with one transfer at a time, as section 5.1 reads, the first "
        f"save would take {one_at_a_time[0].save_seconds:.3f} s."
    )
    return Repeated(results, why, lambda: draw_table_9(rows, one_at_a_time))


def figure_10() -> Repeated:
    """Return what the paper's text says of Figures 9 and 10: bytes saved on two models here, CaffeNet's erases."""
    drive = warm_drive(Ssd.paper())
    models = [*(model.scaled(CAFFENET_PARAMETERS) for model in recorded_sizes()), caffenet_sizes()]
    runs = compare_methods(drive, models, METHODS, SNAP_DISTANCES)
    stored = {(run.sizes.name, run.method.name, run.snap_dis): run.stored_bytes for run in runs}
    erases = {
        (run.method.name, run.snap_dis): run.result.work.erases
        for run in runs
        if run.sizes is models[-1] and run.result is not None
    }
    results = []
    for model in models[:-1]:
        best, whole = (
            stored[model.name, name, PAPER_SNAP_DIS] for name in ("dynrle-progressive", "complete")
        )
        assert best is not None, "recorded"
        assert whole is not None, "recorded"
        of = f"{model.name}, written less than complete, snap_dis {PAPER_SNAP_DIS}"
        results.append(Result(of, 1 - best / whole, PAPER_WRITTEN_SAVING, "share"))
    complete, delta = (erases[name, TIMED_SNAP_DIS] for name in ("complete", "dynrle-progressive"))
    of = (
        f"caffenet, dynrle-progressive (computed at snap_dis {TIMED_SNAP_DIS}, published at {PAPER_SNAP_DIS})"
    )
    results += [
        Result("caffenet, complete, erases", complete, None, "count"),
        Result(f"{of}, erases", delta, PAPER_ERASES, "count"),
        Result(f"{of}, fewer erases than complete", 1 - delta / complete, PAPER_SAVING, "share"),
    ]
    why = (
        f"CaffeNet's sizes at snap_dis {PAPER_SNAP_DIS} are not published, only those at {TIMED_SNAP_DIS}; the other "
        "two models were trained here and scaled to CaffeNet's parameters."
    )

    def draw() -> Figure:
        figure = draw_methods(runs)
        axes = figure.axes[-1]
        axes.axhline(PAPER_ERASES, color=COLOUR_OF["dynrle-progressive"], ls="--")
        place = (SNAP_DISTANCES.index(PAPER_SNAP_DIS), PAPER_ERASES)
        write(axes, f"the paper: {PAPER_ERASES:,}", place, (0, 4), ha="center", fontsize=8)
        return figure

    return Repeated(results, why, draw)


def draw_blocks(states: Mapping[str, int]) -> Figure:
    """Return Table 8 as points over which the published numbers are marked."""
    names = list(TABLE_8)
    series = [
        Series("the model", names, [states[name] for name in names], Colour.BLUE, "", "o"),
        Series("Table 8", names, [TABLE_8[name] for name in names], Colour.INK, "", "x", size=8.0),
    ]
    panel = Panel("blocks of the warm drive", series)
    return draw_panels([panel], x_label="what a block holds", y_label="blocks")


def draw_table_9(rows: Sequence[TimedSnapshot], one_at_a_time: Sequence[TimedSnapshot]) -> Figure:
    """Return the times of Table 9 as lines over which the published ones are marked.

    one_at_a_time: on a drive whose channels wait for each other, dotted.
    """
    whats: tuple[Literal["save", "restore"], ...] = ("save", "restore")
    panels = []
    for what in whats:
        series = []
        for scheme, marker in (("progressive", "o"), ("chain", "s")):
            colour = COLOUR_OF[f"dynrle-{scheme}"]
            own, other = ([row for row in each if row.scheme == scheme] for each in (rows, one_at_a_time))
            iterations = [row.iteration for row in own]
            name = f"{what}_seconds"
            published = [getattr(row.published, name) for row in own]
            series += [
                Series(f"{scheme}, the model", iterations, [getattr(row, name) for row in own], colour),
                Series(f"{scheme}, Table 9", iterations, published, colour, "", marker, is_open=True),
                Series(
                    f"{scheme}, one transfer at a time",
                    iterations,
                    [getattr(row, name) for row in other],
                    colour,
                    DOTTED,
                ),
            ]
        panels.append(Panel(f"to {what} a snapshot", series))
    figure = draw_panels(
        panels,
        x_label="iteration of CaffeNet's training",
        y_label="the drive is busy (s)",
        size=(9.6, 4.6),
        is_shared=False,
        legend="below",
    )
    for axes in figure.axes:
        axes.set_yscale("log")
        ticks = [1, 2, 5, 10, 20]
        axes.set_yticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.xaxis.set_major_formatter("{x:,.0f}")
    return figure
