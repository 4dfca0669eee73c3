"""`penstock bench train`: what I/O costs a training, with and without reading ahead."""

from __future__ import annotations

import argparse
import itertools
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.bench.checks import MOST_STEPS, check_model
from penstock.cli.bench_options import (
    add_batch_options,
    add_run_options,
    add_step_options,
    counts_of,
    measure_and_show,
    step_seconds_of,
)
from penstock.cli.options import parsed_count, parsed_names, refuse_together
from penstock.cli.output import Table, add_command, needing, show
from penstock.errors import ConfigError
from penstock.units import format_rate, format_seconds

if TYPE_CHECKING:
    from penstock.bench.training import TrainingResults

_DESCRIPTION = """\
Trains on a data set without prefetch (each batch is loaded when it is asked for) and with it, by 1, 2, 4 and 8
threads, and prints run time, waiting and what was read: the excess without prefetch is what I/O costs. Steps take
100 ms and no processor, as on a GPU; --model trains a network, on a GPU where there is one. All runs get the same
batches, whose pages were dropped from the page cache, and must have the same losses. See docs/howto/bench.md.
"""
_EPILOG = """\
examples:
  penstock bench train photos/train --step-seconds 250ms
  penstock bench train photos/train --model alexnet --threads 4 --steps 50 --plot train.png
  torchrun --nproc-per-node 2 --no-python penstock bench train photos/train --batch-size 128

JSON: source, ranks, steps, page_cache (cold, warm, mixed, unknown), equal_losses, cautions[], meaning; and results[] of
prefetch (0, a number or auto), threads, batch_size, run_seconds, low and high (95 %), repeats, stall_seconds,
stall_share, read_seconds and decode_seconds (over all threads), loss (the last), read_bytes and read_from (what moved
them).
"""


def add(commands: Any) -> None:
    summary = "train with and without prefetch, and see what I/O costs"
    parser = add_command(commands, "train", _run, summary, _DESCRIPTION, _EPILOG)
    parser.add_argument("source", metavar="SOURCE", help="pictures as a loader takes them, or their address")
    add_step_options(parser, "network to train")
    parser.add_argument(
        "--prefetch",
        metavar="NAMES",
        default="0,auto",
        help="batches read ahead: 0, a number, auto (as far as memory allows), or several (%(default)s)",
    )
    add_batch_options(parser, "threads with prefetch, of each rank")
    parser.add_argument(
        "--steps",
        type=int,
        help=f"steps of a run, within one epoch (default: {MOST_STEPS}, or what --seconds allows)",
    )
    add_run_options(parser, 3, "sets --steps, and ends the repeats after two")


def _run(options: argparse.Namespace) -> None:
    refuse_together(options, "model", ["step_seconds"])
    with needing("penstock bench", "images"):
        from penstock.bench.training import FixedStep, Setting, Step, label_numbers, measure_training
    from penstock.store import open_source

    threads = counts_of(options.threads, "--threads")
    names = parsed_names(options.prefetch, "--prefetch")
    rule = "it is 0, a number of batches, or auto"
    ahead = [
        None if name == "auto" else parsed_count("--prefetch", name, rule) for name in names if name != "0"
    ]
    if options.steps is not None and options.steps < 2:
        raise ConfigError(f"--steps is {options.steps}; train for at least 2")
    if options.model is not None:
        check_model(options.model)
    settings = [
        Setting(count, size, prefetch)
        for size in counts_of(options.batch_size, "--batch-size")
        for prefetch, count in [*([(0, 0)] if "0" in names else []), *itertools.product(ahead, threads)]
    ]
    source = open_source(options.source)
    step: Step
    if options.model is None:
        step = FixedStep(step_seconds_of(options))
    else:
        with needing("--model", "torch"):
            from penstock.bench.models import TrainingStep
        step = TrainingStep(options.model, int(label_numbers(source).max(initial=0)) + 1)
    measure = partial(measure_training, source, step, settings, steps=options.steps)
    measure_and_show(options, "training", len(settings), measure, _show)


def _show(options: argparse.Namespace, found: TrainingResults) -> None:
    results = [
        {
            "prefetch": each.setting.ahead,
            "threads": max(1, each.setting.threads),
            "batch_size": each.setting.batch_size,
            "run_seconds": each.run_seconds.median,
            "low": each.run_seconds.low,
            "high": each.run_seconds.high,
            "repeats": each.run_seconds.repeats,
            "stall_seconds": each.stall_seconds,
            "stall_share": each.stall_seconds / each.run_seconds.median,
            "read_seconds": each.read_seconds,
            "decode_seconds": each.decode_seconds,
            "loss": each.last_loss,
            "read_bytes": each.flow.total_bytes,
            "read_from": each.flow.place,
        }
        for each in found.results
    ]
    data = {
        "source": options.source,
        "ranks": found.ranks,
        "steps": found.steps,
        "page_cache": str(found.page_cache),
        "equal_losses": found.has_equal_losses,
        "cautions": found.cautions,
        "meaning": found.meaning,
        "results": results,
    }
    rows = [
        (
            each.setting.ahead,
            f"{max(1, each.setting.threads)}",
            f"{each.setting.batch_size}",
            format_seconds(each.run_seconds.median),
            format_seconds(each.stall_seconds),
            f"{100 * each.stall_seconds / each.run_seconds.median:.1f} %",
            format_seconds(each.read_seconds),
            format_seconds(each.decode_seconds),
            format_rate(each.flow.total_bytes / each.run_seconds.median),
            format_rate(float(each.flow.rates.max(initial=0.0))),
            f"{each.last_loss:.6g}",
        )
        for each in found.results
    ]
    columns = (
        "prefetch", "threads", "batch", "run", "waiting", "of run", "reads", "decodes", "read", "at most",
        "loss",
    )  # fmt: skip
    notes = [f"{found.steps} steps a run; read: what {found.results[-1].flow.place} moved."]
    if found.has_equal_losses:
        notes.append("The losses are equal, bit by bit, in all runs of a batch size.")

    def draw() -> Any:
        from penstock.bench.pictures import draw_training

        return draw_training(found)

    table = Table(f"Training, page cache {found.page_cache}", columns, rows)
    show(options, data, [table], [*notes, *found.cautions, found.meaning], draw)
