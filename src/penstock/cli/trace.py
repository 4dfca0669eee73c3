"""`penstock trace`: sum a recorded trace up, and show its stages, its slowest spans, or all of it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.options import check_folder
from penstock.cli.output import Table, add_command, add_output_options, needing, show
from penstock.errors import ConfigError
from penstock.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from penstock.trace import EpochMetrics, Stage, Trace


def add_trace(commands: Any) -> None:
    parser = add_command(
        commands,
        "trace",
        _trace,
        "sum a recorded trace up, and plot it; trace blocks: record what a command reads",
        epilog="Example: penstock trace run.trace --stages --export perfetto\n"
        "JSON: is_complete, and results[], one for each epoch: epoch, seconds, samples, steps, stall_seconds,\n"
        "stall_by_cause{}, own_seconds, blocked_seconds (of these, by saves) and stages[] of stage, calls, samples,\n"
        "bytes, seconds, median_seconds, p99_seconds, slowest_seconds.\n"
        "`trace blocks` records which blocks of which files a command reads: see its --help.",
    )
    parser.add_argument("trace", type=Path, metavar="FILE", help="written by a loader's trace=")
    parser.add_argument("--stages", action="store_true", help="show how long each stage of an epoch took")
    parser.add_argument("--slowest", type=int, metavar="N", help="show the N slowest spans of each kind")
    parser.add_argument(
        "--export",
        choices=("perfetto", "parquet", "tensorboard"),
        help="write it as gzipped JSON, which ui.perfetto.dev and chrome://tracing open; as a table of spans; or as "
        "event files of scalars by step",
    )
    parser.add_argument(
        "--out", type=Path, metavar="PATH", help="where an export goes (default: next to the trace)"
    )
    add_output_options(parser)


def _trace(options: argparse.Namespace) -> None:
    from penstock.trace import limiting, read_trace
    from penstock.trace.verdict import NOT_COMPLETE

    if options.out is not None and options.export is None:
        raise ConfigError("--out says where an export goes: give --export, too")
    if options.out is not None and options.export != "tensorboard":  # a folder, which is made
        check_folder("--out", options.out)
    if options.slowest is not None and options.slowest < 1:
        raise ConfigError(f"--slowest is {options.slowest}; ask for at least one of each kind")
    trace = read_trace(options.trace)
    epochs = trace.epochs()
    # A data set reads and computes in one.
    source, decode = ("the data set",) * 2 if trace.meta.get("reads") == "data set" else ("storage", "decode")
    notes = [
        limiting(epoch, source, decode, is_cut=not trace.is_complete and epoch is epochs[-1])
        for epoch in epochs
    ]
    if not epochs:
        notes.append("no batch was consumed yet")
    if not trace.is_complete:
        notes.append(NOT_COMPLETE)
    if trace.left_out.spans:
        notes.append(
            f"the file has the last {trace.spans.size:,} of {trace.left_out.spans + trace.spans.size:,} spans; "
            "the sums are of all"
        )
    notes += [f"rank {rank}: {line}" for rank, line in sorted(trace.choices.items())]
    tables = [_stages(trace)] if options.stages else []
    if options.slowest is not None:
        tables.append(_slowest(trace, options.slowest))
    if options.export is not None:
        from penstock.measure.export import export_path, export_trace

        path = options.out or export_path(options.trace, options.export)
        with needing(f"--export {options.export}", {"parquet": "arrow"}.get(options.export, "tensorboard")):
            export_trace(trace, options.export, path)
        notes.append(f"The export: {path}")
    data = {"is_complete": trace.is_complete, "results": [_values(epoch) for epoch in epochs]}
    show(options, data, tables, notes, lambda: _drawn(options.trace, trace))


def _drawn(path: Path, trace: Trace) -> Figure:
    from penstock.measure.plot import draw

    if not any(epoch.steps for epoch in trace.epochs()):
        raise ConfigError(f"{path}: no batch was consumed yet, so there is nothing to draw")
    return draw([("", trace)])


def _values(epoch: EpochMetrics) -> dict[str, Any]:
    return {
        "epoch": epoch.epoch,
        "seconds": epoch.seconds,
        "samples": epoch.samples,
        "steps": epoch.steps,
        "stall_seconds": epoch.stall_seconds,
        "stall_by_cause": {str(cause): seconds for cause, seconds in epoch.stall_by_cause.items()},
        "own_seconds": epoch.own_seconds,
        "blocked_seconds": epoch.save_seconds,
        "stages": [
            {
                "stage": _stage(stage),
                "calls": durations.calls,
                "samples": durations.samples,
                "bytes": durations.bytes,
                "seconds": durations.seconds,
                "median_seconds": durations.quantile(0.5),
                "p99_seconds": durations.quantile(0.99),
                "slowest_seconds": durations.slowest_seconds,
            }
            for stage, durations in epoch.stages.items()
        ],
    }


def _stages(trace: Trace) -> Table:
    rows = [
        (
            each.name.split(" ", 1)[1],
            _stage(stage),
            f"{durations.calls:,}",
            f"{durations.samples:,}",
            format_bytes(durations.bytes) if durations.bytes else "",
            format_seconds(durations.seconds),
            format_seconds(durations.quantile(0.5)),
            format_seconds(durations.quantile(0.99)),
            format_seconds(durations.slowest_seconds),
        )
        for each in trace.epochs()
        for stage, durations in each.stages.items()
    ]
    columns = ("epoch", "stage", "calls", "samples", "bytes", "in all", "median", "99 %", "slowest")
    return Table("Stages", columns, rows)


def _slowest(trace: Trace, most: int) -> Table:
    from penstock.trace import NO_PEER, Kind, Stage

    rows = []
    for span in trace.slowest(most):
        if span["kind"] > max(Kind).value:
            continue
        stage = Stage(Kind(int(span["kind"])), int(span["place"]), bool(span["peer"] != NO_PEER))
        rows.append(
            (
                _stage(stage),
                format_seconds(float(span["end"] - span["start"])),
                format_seconds(float(span["start"])),
                "" if span["epoch"] < 0 else str(span["epoch"]),
                "" if span["step"] < 0 else str(span["step"]),
                f"{span['samples']:,}" if span["samples"] else "",
                trace.name_of(int(span["sample"])),
            )
        )
    return Table("The slowest", ("stage", "took", "began at", "epoch", "step", "samples", "the first"), rows)


def _stage(stage: Stage) -> str:
    from penstock.trace import NO_PLACE, Kind
    from penstock.trace.stages import describe_place

    name = stage.kind.name.lower()
    if stage.place == NO_PLACE:
        return name
    if stage.kind in (Kind.WRITE, Kind.DRAIN, Kind.LOAD):  # of snapshots, whose store has tiers of its own
        return f"{name} {'from' if stage.kind == Kind.LOAD else 'to'} tier {stage.place}"
    return f"{name} from {describe_place(stage.place)}" + (" of other ranks" if stage.of_peers else "")
