"""`penstock report`: a recorded run as one page that opens offline."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from penstock.cli.options import check_folder
from penstock.cli.output import add_command, add_output_options, naming, print_line, show
from penstock.errors import ConfigError


def add_report(commands: Any) -> None:
    parser = add_command(
        commands,
        "report",
        _report,
        "write a recorded run as one HTML page",
        "Write what a run waited for, its throughput, reads, hits, slowest steps, saves and prediction as one HTML\n"
        "file that needs nothing else and has a table behind every picture.",
        "Example: penstock report run.trace -o report.html\n"
        "JSON: verdict, notes[], and results[], one for each picture: title, columns[], cells[][].",
    )
    parser.add_argument(
        "trace",
        type=Path,
        metavar="TRACE",
        help="trace that a loader recorded, the folder of all ranks' traces, or of penstock watch",
    )
    parser.add_argument(
        "-o",
        "--out",
        type=Path,
        metavar="FILE",
        default=Path("report.html"),
        help="page to write, a folder for its report.html, - for standard output (%(default)s)",
    )
    add_output_options(parser, plot=False)


def _report(options: argparse.Namespace) -> None:
    from penstock.measure.recorded import open_run
    from penstock.measure.report import report_of, write_report
    from penstock.recordings.devices import FILE, read_devices

    is_printed = str(options.out) == "-"
    if is_printed and options.json:
        raise ConfigError("--out - and --json both print to standard output: give a file to one of them")
    out = options.out / "report.html" if options.out.is_dir() else options.out
    check_folder("--out", out)
    devices = read_devices(options.trace) if (options.trace / FILE).exists() else None
    has_trace = devices is None or any(options.trace.glob("*.trace"))
    with naming(options.trace):
        run = open_run(options.trace) if has_trace else None
        report = report_of(run, devices) if is_printed else write_report(run, out, devices)
    if is_printed:
        print(report.html(), end="")
        return
    data = {
        "verdict": report.verdict,
        "notes": list(report.notes),
        "results": [
            {"title": each.title, "columns": list(each.columns), "cells": [list(row) for row in each.rows]}
            for each in report.sections
        ],
    }
    if not options.json:
        print_line(report.verdict)
    show(options, data, [], [f"The page: {out}"])
