"""`penstock watch`: run a command; record devices, network and processes, and what its loaders waited for."""

from __future__ import annotations

import argparse
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.explain import switch_values
from penstock.cli.options import parsed_amount
from penstock.cli.output import Table, add_command, add_output_options, report_to, show
from penstock.errors import ConfigError, PenstockError
from penstock.report import print_report
from penstock.units import format_bytes, format_rate, format_seconds, parse_seconds

if TYPE_CHECKING:
    from penstock.measure.recorded import Run
    from penstock.measure.switch import Switch

_FASTEST_SECONDS = 0.01
_EPILOG = """\
Example: penstock watch --out runs/a -- python train.py

The command's exit status is passed on. With --json its standard output goes to standard error. A Penstock loader
inside that has no trace= of its own records into the folder, for penstock explain and report, and so does another
loader in penstock.watch(): with --source and --machine, what Penstock's would make of its run is predicted, too.

JSON: out, command[], exit_status, interrupted_by (a signal's number), seconds, verdict, switch, page_cache_share,
processors, io_pressure_share; results[] of device, read_bytes, written_bytes, read_peak and write_peak (bytes per
second), busy_share.
"""


def add_watch(commands: Any) -> None:
    parser = add_command(
        commands,
        "watch",
        _watch,
        "watch any training from outside: devices, network, processes",
        "Run a command and sample block devices, the network and its processes.",
        _EPILOG,
    )
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="folder of the run (default: watch-DATE-TIME)"
    )
    parser.add_argument(
        "--period", metavar="TIME", default="100ms", help="time between samples (%(default)s)"
    )
    parser.add_argument("--source", metavar="SOURCE", help="data that a loader in penstock.watch() reads")
    parser.add_argument("--machine", type=Path, metavar="FILE", help="machine with the costs of reads there")
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="command to run, with its own options"
    )
    add_output_options(parser, plot=False)


def _watch(options: argparse.Namespace) -> int:
    period = parsed_amount("--period", parse_seconds, options.period)
    if period < _FASTEST_SECONDS:
        raise ConfigError(
            f"--period is {options.period!r}; sampling takes up to a millisecond: give 10ms or more"
        )
    from penstock.measure.recorded import open_run
    from penstock.measure.watch_command import watch_command

    folder = options.out or Path(datetime.now().strftime("watch-%Y%m%d-%H%M%S"))
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if (options.source is None) != (options.machine is None):
        raise ConfigError("--source and --machine belong together: what is read, and what reads cost there")
    begun = time.monotonic()
    watched = watch_command(
        command, folder, period_seconds=period, report=report_to(options), stdout=2 if options.json else None
    )
    seconds = time.monotonic() - begun
    try:
        run = open_run(folder) if any(folder.glob("*.trace")) else None
        sums = _sums(folder, run)
        switch, why_none = _switch(run, options)
    except (PenstockError, OSError) as error:
        # After a command of hours its exit status is worth more than this error.
        print_report(
            f"the command ended with status {watched.exit_status}; its run cannot be summed up: {error}"
        )
        return watched.exit_status
    data = {
        "out": str(folder),
        "command": command,
        "exit_status": watched.exit_status,
        "interrupted_by": watched.interrupted_by,
        "seconds": seconds,
        **sums,
        "switch": switch_values(switch),
    }
    notes = [] if data["verdict"] is None else [str(data["verdict"])]
    if switch is not None:
        notes += [str(switch), *switch.notes]
    notes += why_none
    for line in why_none if options.json else ():
        print_report(line)
    if run is not None:
        notes += run.notes
    notes.append(_described(data))
    notes.append(f"The run: {folder}; penstock report {folder} makes a page of it")
    show(options, data, [_table(data["results"])], notes)
    return watched.exit_status


def _switch(run: Run | None, options: argparse.Namespace) -> tuple[Switch | None, list[str]]:
    """Return what Penstock's loader would make of the run of another, and why that is not known where it is asked for.

    None without --source, or where all loaders are ours.
    """
    from penstock.measure.switch import predict_switch_of_run

    if options.source is None:
        return None, []
    if run is None or not any(run.watched):
        return None, ["no other loader in penstock.watch() recorded: --source and --machine have no effect"]
    try:
        return predict_switch_of_run(run, options.source, machine=options.machine), []
    except (PenstockError, OSError) as error:  # the sums are worth more than this
        return None, [f"what a switch would bring is not known: {error}"]


def _sums(folder: Path, run: Run | None) -> dict[str, Any]:
    from penstock.measure.explain import explain
    from penstock.recordings.devices import read_devices

    record = read_devices(folder)
    seconds = float(record.seconds[-1]) if record.seconds.size else 0.0
    results = []
    for column in record.columns:
        kind, _, rest = column.partition(":")
        if kind != "disk" or not rest.endswith(":read_bytes"):
            continue
        name = column.removesuffix(":read_bytes")
        read, written = f"{name}:read_bytes", f"{name}:written_bytes"
        results.append(
            {
                "device": name.removeprefix("disk:"),
                "read_bytes": record.grown(read),
                "written_bytes": record.grown(written),
                "read_peak": float(record.rate(read).max(initial=0.0)),
                "write_peak": float(record.rate(written).max(initial=0.0)),
                "busy_share": record.grown(f"{name}:busy_milliseconds") / 1e3 / seconds if seconds else 0.0,
            }
        )
    asked, read_bytes = record.grown("tree:asked_bytes"), record.grown("tree:read_bytes")
    ticks = float(str(record.meta.get("ticks_per_second", 100)))
    try:
        verdict = None if run is None else explain(run).verdict
    except ConfigError:  # nobody waited
        verdict = None
    return {
        "verdict": verdict,
        "page_cache_share": max(0.0, 1.0 - read_bytes / asked) if asked else None,
        "processors": record.grown("tree:cpu_ticks") / ticks / seconds if seconds else 0.0,
        "io_pressure_share": record.grown("pressure:io_microseconds") / 1e6 / seconds if seconds else 0.0,
        "results": results,
    }


def _described(data: dict[str, Any]) -> str:
    text = f"{format_seconds(data['seconds'])}, {data['processors']:.2f} processors on average"
    if data["page_cache_share"] is not None:
        text += f", {100 * data['page_cache_share']:.0f} % of the bytes that it asked for came from the page cache"
    return f"{text}; tasks of this host waited for I/O {100 * data['io_pressure_share']:.1f} % of the time"


def _table(results: list[dict[str, Any]]) -> Table:
    rows = [
        (
            each["device"],
            format_bytes(each["read_bytes"]),
            format_rate(each["read_peak"]),
            format_bytes(each["written_bytes"]),
            format_rate(each["write_peak"]),
            f"{100 * each['busy_share']:.1f} %",
        )
        for each in results
    ]
    return Table("Block devices", ("device", "read", "at most", "written", "at most", "busy"), rows)
