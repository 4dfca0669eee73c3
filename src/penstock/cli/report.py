"""`penstock report`: a recorded run as one page that opens offline."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from penstock.cli.options import check_folder
from penstock.cli.output import add_command, add_output_options, naming, print_line, show


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
        help="page to write (%(default)s)",
    )
    add_output_options(parser, plot=False)


def _report(options: argparse.Namespace) -> None:
    from penstock.measure.explain import read_run
    from penstock.measure.report import write_report
    from penstock.recordings.devices import FILE, read_devices

    check_folder("--out", options.out)
    devices = read_devices(options.trace) if (options.trace / FILE).exists() else None
    has_trace = devices is None or any(options.trace.glob("*.trace"))
    with naming(options.trace):
        report = write_report(read_run(options.trace) if has_trace else None, options.out, devices)
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
    show(options, data, [], [f"The page: {options.out}"])
