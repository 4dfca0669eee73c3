"""`penstock bench input`: samples per second by threads and batch size, next to the device's maximum and peers."""

from __future__ import annotations

import argparse
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.bench_options import (
    add_batch_options,
    add_peers_option,
    add_run_options,
    counts_of,
    measure_and_show,
    peers_of,
)
from penstock.cli.options import parsed_count, parsed_names
from penstock.cli.output import Table, add_command, needing, show
from penstock.errors import ConfigError
from penstock.units import format_bytes, format_rate

if TYPE_CHECKING:
    from penstock.bench.input_rates import InputRates

_DESCRIPTION = """\
Reads random samples by 1, 2, 4 and 8 threads, alone and with decoding and resizing to 224 x 224, and prints samples/s:
the median of six runs without the first, with its spread. Each run reads other samples, whose pages are dropped from
the page cache before. PyTorch's DataLoader (as many worker processes) and tf.data are measured too where they are
installed. Under torchrun or mpirun all ranks read at the same time, each its own samples. See docs/howto/bench.md.
"""
_EPILOG = """\
examples:
  penstock bench input photos/train
  penstock bench input "shards/train-{000..099}.tar" --work read --threads 1,4,16 --seconds 60
  penstock bench input s3://bucket/train --batch-size 64,256 --peers none --json
  torchrun --nproc-per-node 4 --no-python penstock bench input photos/train --peers none

JSON: source, ranks, samples (of a run), bytes_per_sample, page_cache (cold, warm, mixed, unknown), sequential_read and
sequential_write (bytes per second, null where not measured), left_out[], cautions[], meaning; and results[] of loader,
work, threads, batch_size, samples_per_second, low and high (95 %), bytes_per_second, repeats, skipped.
"""


def add(commands: Any) -> None:
    summary = "read, or read, decode and resize samples, by number of threads"
    parser = add_command(commands, "input", _run, summary, _DESCRIPTION, _EPILOG)
    parser.add_argument("source", metavar="SOURCE", help="data set as a loader takes it, or its address")
    add_batch_options(parser, "threads of each rank")
    parser.add_argument(
        "--work", metavar="NAMES", default="read,decode", help="read, decode or both (%(default)s)"
    )
    add_peers_option(parser, "torch, tensorflow", "other libraries")
    parser.add_argument("--samples", metavar="N", help="samples of each run (default: what --seconds allows)")
    parser.add_argument(
        "--on-error",
        choices=("skip", "raise"),
        default="skip",
        help="skip and count bad samples, or end (%(default)s)",
    )
    parser.add_argument(
        "--shared",
        metavar="FOLDER",
        help="folder on the source's file system to write a file into, for the device's sequential maximum (default: "
        "the folder of a list, or above one of samples, where that is possible)",
    )
    add_run_options(parser, 6, "sets --samples, and ends the repeats before twice the time")


def _run(options: argparse.Namespace) -> None:
    with needing("penstock bench", "images"):
        from penstock.bench.input_rates import InputSettings, measure_input
        from penstock.bench.loaders import Work, check_loaders
    from penstock.store import open_source

    threads = counts_of(options.threads, "--threads")
    batch_sizes = counts_of(options.batch_size, "--batch-size")
    names = parsed_names(options.work, "--work")
    if unknown := [name for name in names if name not in tuple(Work)]:
        raise ConfigError(f"--work is {unknown[0]!r}; it is read, decode or both with a comma")
    works = [work for work in Work if work in names]
    peers = peers_of(options)
    check_loaders(peers)
    samples = None if options.samples is None else parsed_count("--samples", options.samples)
    asked = InputSettings(threads, batch_sizes, works, peers, samples, options.on_error)
    measure = partial(
        measure_input,
        open_source(options.source),
        asked,
        beside=options.shared or _folder_beside(options.source),
        is_beside_asked=options.shared is not None,
    )
    measure_and_show(options, "measuring", asked.runs, measure, _show)


def _folder_beside(source: str) -> str | None:
    """Return the folder that a source's folder or file lies in, if it may be written to; None for an address."""
    folder = Path(source).absolute().parent
    return str(folder) if os.path.exists(source) and os.access(folder, os.W_OK) else None


def _show(options: argparse.Namespace, found: InputRates) -> None:
    maximum = found.maximum
    results = [
        {
            "loader": each.loader,
            "work": str(each.work),
            "threads": each.threads,
            "batch_size": each.batch_size,
            "samples_per_second": each.samples_per_second.median,
            "low": each.samples_per_second.low,
            "high": each.samples_per_second.high,
            "bytes_per_second": each.samples_per_second.median * found.bytes_per_sample,
            "repeats": each.samples_per_second.repeats,
            "skipped": each.skipped,
        }
        for each in found.results
    ]
    data = {
        "source": options.source,
        "ranks": found.ranks,
        "samples": found.samples,
        "bytes_per_sample": found.bytes_per_sample,
        "page_cache": str(found.page_cache),
        "sequential_read": None if maximum is None else maximum.read.median,
        "sequential_write": None if maximum is None else maximum.write.median,
        "left_out": found.left_out,
        "cautions": found.cautions,
        "meaning": found.meaning,
        "results": results,
    }
    bound = (
        "The device's sequential maximum was not measured: --shared names a folder there that can be written to."
        if maximum is None
        else f"One stream reads {format_rate(maximum.read.median)} in sequence there, writes "
        f"{format_rate(maximum.write.median)} (a file of {format_bytes(maximum.file_bytes)})."
    )
    notes = [f"{line[0].upper()}{line[1:]}." for line in found.left_out]
    notes += [f"{found.samples:,} samples a run.", bound, *found.cautions, found.meaning]

    def draw() -> Any:
        from penstock.bench.pictures import draw_input

        return draw_input(found)

    show(options, data, [_table(found)], notes, draw)


def _table(found: InputRates) -> Table:
    maximum = None if found.maximum is None else found.maximum.read.median
    rows = []
    for each in found.results:
        rate = each.samples_per_second
        nbytes = rate.median * found.bytes_per_sample
        rows.append(
            (
                "read" if each.work == "read" else "read, decode, resize",
                each.loader,
                f"{each.threads}",
                f"{each.batch_size}",
                f"{rate.median:,.0f}",
                f"{rate.low:,.0f} to {rate.high:,.0f}",
                f"{nbytes / 2**20:,.1f}",
                "" if maximum is None else f"{100 * nbytes / maximum:.0f} %",
                f"{each.skipped}",
            )
        )
    columns = (
        "work", "loader", "threads", "batch", "samples/s", "spread", "MiB/s", "of sequential", "skipped",
    )  # fmt: skip
    return Table(f"Input, page cache {found.page_cache}", columns, rows)
