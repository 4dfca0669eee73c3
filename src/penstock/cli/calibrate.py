"""`penstock calibrate`: measure what bytes cost here, or learn it from a run, and write the machine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.launcher import ranks_of_launcher
from penstock.cli.options import check_folder
from penstock.cli.output import Table, add_command, add_output_options, show
from penstock.errors import ConfigError
from penstock.files import write_whole
from penstock.validate import check_above_zero

if TYPE_CHECKING:
    from penstock.measure.thorough import ThoroughCalibration
    from penstock.store import FileSource, PackedFiles

_SECONDS, _THOROUGH_SECONDS, _REPEATS = 10.0, 60.0, 10
_DESCRIPTION = """\
Measures a source and this host's memory in seconds; with --thorough in a minute also local disks and a folder next to
the source: read and written, at random and in sequence, by number of threads, past the page cache, ten times each.
With --from nothing is measured: a recorded run has it all. See docs/howto/calibrate.md.
"""
_EPILOG = """\
examples:
  penstock calibrate photos/train --out machine.toml
  penstock calibrate features --extensions .bin
  penstock calibrate photos/train --thorough --local-disk /scratch/penstock --plot machine.png
  penstock calibrate --from run.trace
  torchrun --nproc-per-node 4 --no-python penstock calibrate photos/train --thorough --shared photos

JSON: results[], of each measurement, place, access, threads (or ranks), bytes_per_second, and with --thorough
low_bytes_per_second, high_bytes_per_second (95 %), repeats; with --from machine (TOML).
"""


def add_calibrate(commands: Any) -> None:
    summary = "measure what a read costs here and write the machine"
    parser = add_command(commands, "calibrate", _run, summary, _DESCRIPTION, _EPILOG)
    parser.add_argument("source", nargs="?", metavar="SOURCE", help="image folder, flat folder or list file")
    parser.add_argument(
        "--extensions",
        metavar="ENDINGS",
        help="endings of a folder's files that are samples, with commas, or any (pictures)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", default=Path("machine.toml"), help="the machine (%(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, help="how long to measure, without listing files (10; 60 with --thorough)"
    )
    parser.add_argument("--thorough", action="store_true", help="measure every place, ten times")
    parser.add_argument(
        "--local-disk",
        metavar="FOLDERS",
        default="",
        help="folders on local disks for a loader's samples, with commas",
    )
    parser.add_argument(
        "--shared", metavar="FOLDER", help="on the source's file system, to write to and for several ranks"
    )
    parser.add_argument(
        "--repeats",
        type=int,
        metavar="N",
        default=_REPEATS,
        help="repetitions of each measurement with --thorough (%(default)s)",
    )
    parser.add_argument("--from", dest="trace", type=Path, metavar="RUN", help="learn from a recorded run")
    add_output_options(parser)


def _run(options: argparse.Namespace) -> None:
    if options.seconds is None:
        options.seconds = _THOROUGH_SECONDS if options.thorough else _SECONDS
    check_above_zero("--seconds", options.seconds)
    if (options.source is None) == (options.trace is None):
        raise ConfigError("name either a SOURCE to measure, or a recorded run to learn from (--from RUN)")
    if options.extensions is not None and options.trace is not None:
        raise ConfigError("--extensions is of a SOURCE to measure, not of a recorded run: leave it out")
    for name in ("local_disk", "shared", "plot"):
        if getattr(options, name) and not options.thorough:
            raise ConfigError(f"--{name.replace('_', '-')} belongs to --thorough: add that")
    check_folder("--out", options.out)
    if options.trace is not None:
        _learn(options)
    elif options.thorough:
        _measure_thoroughly(options)
    else:
        _measure(options)


def _measure(options: argparse.Namespace) -> None:
    from penstock.measure.calibrate import measure_machine

    found = measure_machine(_source(options), max_seconds=options.seconds)
    results = [
        {
            "place": "samples of the source",
            "access": "random reads",
            "threads": level.readers,
            "bytes_per_second": level.bytes_per_second,
        }
        for level in found.levels
    ]
    _report(options, found.to_toml(), {"results": results})


def _source(options: argparse.Namespace) -> FileSource | PackedFiles:
    from penstock.store import open_source

    if options.extensions is None:
        return open_source(options.source)
    if options.extensions == "any":
        return open_source(options.source, extensions=None)
    endings = [each.strip() for each in options.extensions.split(",")]
    if not all(endings):
        raise ConfigError(
            f"--extensions is {options.extensions!r}; it has endings with commas between them, as .bin,.dat, or is any"
        )
    return open_source(options.source, extensions=endings)


def _learn(options: argparse.Namespace) -> None:
    from penstock.measure.from_trace import learn_machine

    learned = learn_machine(options.trace)
    _report(options, learned.to_toml(), {"results": [{"machine": learned.machine.to_toml()}]})


def _measure_thoroughly(options: argparse.Namespace) -> None:
    from penstock.measure.thorough import measure_thoroughly

    with ranks_of_launcher("calibrate") as ranks:
        found = measure_thoroughly(
            _source(options),
            local_disks=[folder for folder in options.local_disk.split(",") if folder],
            shared=options.shared,
            max_seconds=options.seconds,
            repeats=options.repeats,
            ranks=ranks,
        )
    if found is not None:
        _report(options, found.to_toml(), found.to_json(), found)


def _report(
    options: argparse.Namespace, text: str, data: Any, found: ThoroughCalibration | None = None
) -> None:
    write_whole(options.out, text.encode())
    notes = [line.removeprefix("# ") for line in text.splitlines() if line.startswith("#")]
    tables = [] if found is None else [_table(found)]

    def draw() -> Any:
        from penstock.measure.plot_calibrate import draw_calibration

        assert found is not None, "--plot belongs to --thorough"
        return draw_calibration(found)

    show(options, data, tables, [*notes, f"The machine is in {options.out}."], draw)


def _table(found: ThoroughCalibration) -> Table:
    rows, columns = (
        [],
        sorted({count for _, curves in found.places() for each in curves for count, _ in each.points}),
    )
    for place, curves in found.places():
        for curve in curves:
            rates = dict(curve.points)
            cells = [f"{rates[count].median / 1e6:,.0f}" if count in rates else "" for count in columns]
            rows.append((f"{place}: {curve.access.label}", *cells))
    return Table("MB/s by number of threads", ("", *map(str, columns)), rows)
