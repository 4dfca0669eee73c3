"""Tables 5.1 to 5.4 and Figure 5.8 of the thesis: run times of ten loading policies, and of machines for one of them.

Source: R. Böhringer, "Clairvoyant Prefetching for Machine Learning I/O", ETH Zürich 2020, section 5.2: "the thesis".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

from penstock.machine import Curve
from penstock.measure.picture import Colour, Panel, Series, draw_panels
from penstock.measure.policies import run_policies
from penstock.papers.catalog import Repeated, Result
from penstock.papers.thesis_job import simulate_rank_by_rank
from penstock.papers.thesis_policies import POLICIES, PublishedFrequency
from penstock.simulate.scenario import scenario_named

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Run times in seconds of Tables 5.1, 5.2 and 5.3; None where the data set does not fit.
PUBLISHED: Mapping[str, tuple[float, float, float | None]] = {
    "lower-bound": (7.30, 3825.66, 7655.25),
    "naive": (27.78, 15130.54, 30272.96),
    "frequency": (7.78, 3836.12, 7661.26),
    "staging": (10.24, 4982.27, 9945.29),
    "deepio": (8.41, 4433.27, 23948.24),
    "deepio-opportunistic": (8.40, 4432.90, 8487.42),
    "parallel-staging": (10.11, 4972.65, 9313.58),
    "lbann-dynamic": (7.71, 4051.12, None),
    "lbann-preloading": (8.41, 4433.27, None),
    "locality-aware": (8.41, 4433.27, 9314.33),
}
#: Ten thousand sizes are few: the run time of scenario 1 varies by half a percent with the seed.
SEEDS = {1: 6}
#: Megabytes of the staging buffer, of RAM and of a storage class of 100 MB/s.
FIGURE_5_8 = ((1_000, 2_000, 4_000), (10_000, 20_000, 40_000), (20_000, 40_000, 80_000))
_MB = 10**6


def table_5_1() -> Repeated:
    """Return run times where the data set fits into the memory of a node."""
    return _table(1)


def table_5_2() -> Repeated:
    """Return run times where it fits into the storage of a node."""
    return _table(2)


def table_5_3() -> Repeated:
    """Return run times where it fits into the storage of all nodes."""
    return _table(3)


def table_5_4() -> Repeated:
    """Return run times where it fits nowhere."""
    return _table(4)


def _table(number: int) -> Repeated:
    runs = run_policies(
        scenario_named(f"scenario{number}"),
        POLICIES,
        repeats=SEEDS.get(number, 1),
        simulate=simulate_rank_by_rank,
    )
    published = {name: seconds[number - 1] if number <= 3 else None for name, seconds in PUBLISHED.items()}
    results = [Result(run.policy, run.mean_seconds, published[run.policy], "seconds") for run in runs]
    why = "Sizes of samples are drawn anew, which alone moves the run time of scenario 1 by 0.3 % from seed to seed."
    if number > 3:
        why = (
            "There is nothing to compare with: the text that the others are from lacks this table's numbers."
        )
    return Repeated(results, why, lambda: draw_table(f"Scenario {number}", results))


def figure_5_8() -> Repeated:
    """Return run times of scenario 3 under HDMLP on machines with less or more staging buffer, RAM and storage."""
    scenario = scenario_named("scenario3")
    staging, ram, disk = scenario.machine.storage
    results = []
    for sizes in product(*FIGURE_5_8):
        storage = [
            replace(each, capacity_bytes=size * _MB)
            for each, size in zip((staging, ram, disk), sizes, strict=True)
        ]
        storage[2] = replace(storage[2], read=Curve.flat(100e6))
        machine = replace(scenario.machine, storage=tuple(storage))
        (run,) = run_policies(
            replace(scenario, machine=machine), [PublishedFrequency()], simulate=simulate_rank_by_rank
        )
        of = ", ".join(
            f"{what} {size // 1000} GB" for what, size in zip(("staging", "RAM", "disk"), sizes, strict=True)
        )
        results.append(Result(of, run.mean_seconds, None, "seconds"))
    why = "There is nothing to compare with: the figure prints no numbers."
    return Repeated(results, why, lambda: draw_figure_5_8(results))


def draw_table(title: str, results: Sequence[Result]) -> Figure:
    """Return the run times as points, the published ones as crosses over them."""
    shown = [each for each in reversed(results) if each.computed is not None]
    names = [each.of for each in shown]
    series = [Series("computed", [each.computed or 0.0 for each in shown], names, Colour.BLUE, "", "o")]
    published = [each for each in shown if each.published is not None]
    if published:
        times = [each.published or 0.0 for each in published]
        series.append(
            Series("published", times, [each.of for each in published], Colour.INK, "", "x", size=8.0)
        )
    figure = draw_panels([Panel(title, series)], x_label="run time (s)", y_label="", size=(7.2, 4.6))
    figure.axes[0].set_xlim(left=0.0)
    return figure


def draw_figure_5_8(results: Sequence[Result]) -> Figure:
    """Return run time against RAM, a panel a staging buffer and a line a disk. results: of `figure_5_8`."""
    seconds = dict(zip(product(*FIGURE_5_8), (each.computed for each in results), strict=True))
    buffers, rams, disks = FIGURE_5_8
    panels = [
        Panel(
            f"staging buffer of {buffer // 1000} GB",
            [
                Series(
                    f"disk of {disk // 1000} GB",
                    [ram / 1000 for ram in rams],
                    [seconds[buffer, ram, disk] or 0.0 for ram in rams],
                    colour,
                    marker="o",
                )
                for disk, colour in zip(disks, (Colour.BLUE, Colour.GREEN, Colour.RED), strict=True)
            ],
        )
        for buffer in buffers
    ]
    return draw_panels(panels, x_label="RAM (GB)", y_label="run time (s)")
