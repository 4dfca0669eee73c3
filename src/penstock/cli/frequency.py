"""`penstock simulate frequency`: how often a rank reads the same sample over a training."""

from __future__ import annotations

import argparse
import math
from typing import Any

from penstock.cli.output import Table, add_output_options, progress, show
from penstock.cli.shuffled import add_shuffle_options, shuffled_plan
from penstock.units import format_count

_DESCRIPTION = """\
Shuffled anew each epoch, a sample is read by each of N ranks in one epoch of N: X ~ B(E, 1/N) times in E epochs. Most
samples are read about E / N times by a rank, some far more often. Counts these in a plan and beside the formula.
"""
_EPILOG = """\
examples:
  penstock simulate frequency
  penstock simulate frequency --ranks 16 --epochs 90 --samples 1281167 --delta 0.8 --plot frequency.png

JSON: mean_reads (E / N), more_than_reads ((1 + delta) E / N), expected_samples, counted_samples[] (by rank), and
histogram{reads[], expected_samples[], counted_samples[] (of rank 0)}.
"""


def add(commands: Any) -> None:
    """Add the command to the parser of `penstock simulate`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "frequency",
        help="how often a rank reads the same sample: formula and count",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_shuffle_options(parser, samples=10_000, epochs=1_000, batch=25)
    parser.add_argument(
        "--delta",
        type=float,
        default=0.1,
        metavar="D",
        help="count what is read over (1 + D) E / N times (%(default)s)",
    )
    add_output_options(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    import numpy as np

    from penstock.plan.frequency import (
        expected_histogram,
        expected_samples_read_more_often,
        read_histograms,
        threshold,
    )

    plan = shuffled_plan(options)
    limit = threshold(options.epochs, options.ranks, options.delta)
    expected = expected_samples_read_more_often(options.samples, options.epochs, options.ranks, options.delta)
    with progress("counting", options.samples) as done:
        histograms = read_histograms(plan, done)
    counted = histograms[:, math.floor(limit) + 1 :].sum(axis=1)
    expected_by_reads = expected_histogram(options.samples, options.epochs, options.ranks)
    counted_by_reads = histograms[0]
    shown = np.flatnonzero((counted_by_reads > 0) | (expected_by_reads > 1e-3))
    data = {
        **{name: getattr(options, name) for name in ("samples", "ranks", "epochs", "delta", "seed")},
        "batch_per_rank": options.batch,
        "mean_reads": options.epochs / options.ranks,
        "more_than_reads": float(limit),
        "expected_samples": expected,
        "counted_samples": counted.tolist(),
        "histogram": {
            "reads": shown.tolist(),
            "expected_samples": expected_by_reads[shown].tolist(),
            "counted_samples": counted_by_reads[shown].tolist(),
        },
    }
    rows = [["expected", f"{expected:.1f}"]]
    rows += [[f"counted, rank {rank}", str(count)] for rank, count in enumerate(counted[:8].tolist())]
    if options.ranks > 1:
        rows.append(["counted, mean of all ranks", f"{counted.mean():.1f}"])
    title = f"Read more than {float(limit):g} times"
    table = Table(title, ["", "samples"], rows)
    note = (
        f"{format_count(options.samples, 'sample')}, {format_count(options.epochs, 'epoch')}, "
        f"{format_count(options.ranks, 'rank')}: each reads a sample "
        f"{options.epochs / options.ranks:g} times on average. One rank's count varies by {expected**0.5:.0f} from "
        "seed to seed (standard deviation)."
    )
    show(options, data, [table], [note])
    if options.plot is not None:
        from penstock.measure.plot_frequency import plot_frequency

        plot_frequency(expected_by_reads, counted_by_reads, float(limit), options.plot)
