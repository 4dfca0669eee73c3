"""`penstock trace`: sum a recorded trace up, and show its stages, its slowest spans, or all of it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.options import check_folder
from penstock.cli.output import Table, add_command, add_output_options, needing, show
from penstock.errors import ConfigError
from penstock.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from penstock.measure.chains import Chain
    from penstock.trace import EpochMetrics, Stage, Trace


#: Waits, and links of a graph's longest chain, that are shown.
_WAITS, _MOST_LINKS = 5, 6
#: Changes of a number of threads, the latest.
_MOST_CHANGES = 8


def add_trace(commands: Any) -> None:
    parser = add_command(
        commands,
        "trace",
        _trace,
        "sum a recorded trace up, and plot it; trace blocks: record what a command reads",
        epilog="Example: penstock trace run.trace --stages --export perfetto\n"
        "JSON: is_complete, and results[], one for each epoch: epoch, seconds, samples, steps, stall_seconds,\n"
        "stall_by_cause{}, own_seconds, blocked_seconds (of these, by saves) and stages[] of stage, calls, samples,\n"
        "bytes, seconds, median_seconds, p99_seconds, slowest_seconds; waits[], the largest, of rank, epoch, step,\n"
        "start_seconds, seconds, links[] of what, seconds, name; chain, likewise, of a graph's longest run.\n"
        "`trace blocks` records which blocks of which files a command reads: see its --help.",
    )
    parser.add_argument(
        "trace", type=Path, metavar="TRACE", help="written by a loader's trace=, or the folder of a run"
    )
    parser.add_argument("--stages", action="store_true", help="show how long each stage of an epoch took")
    parser.add_argument("--slowest", type=int, metavar="N", help="show the N slowest spans of each kind")
    parser.add_argument(
        "--waits",
        type=int,
        nargs="?",
        const=_WAITS,
        metavar="N",
        help="show the N largest waits with the chain that led to each, and a graph's longest chain (%(const)s)",
    )
    parser.add_argument(
        "--export",
        choices=("perfetto", "parquet", "tensorboard"),
        help="write it as gzipped JSON, which ui.perfetto.dev and chrome://tracing open; as a table of spans; or as "
        "event files of scalars by step",
    )
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="FILE",
        help="profile that torch.profiler wrote of the same run: its GPU kernels become lanes of --export perfetto",
    )
    parser.add_argument(
        "--out", type=Path, metavar="PATH", help="where an export is written (default: next to the trace)"
    )
    add_output_options(parser)


def _trace(options: argparse.Namespace) -> None:
    from penstock.measure.chains import largest_waits, longest_chain
    from penstock.measure.graph_steps import explain_graph
    from penstock.measure.recorded import open_run
    from penstock.trace.verdict import NOT_COMPLETE

    if options.profile is not None and options.export != "perfetto":
        raise ConfigError("--profile adds lanes to an export for Perfetto: give --export perfetto, too")
    if options.out is not None and options.export is None:
        raise ConfigError("--out says where an export is written: give --export, too")
    if options.out is not None and options.export != "tensorboard":  # a folder, which is made
        check_folder("--out", options.out)
    for name in ("slowest", "waits"):
        if (most := getattr(options, name)) is not None and most < 1:
            raise ConfigError(f"--{name} is {most}; ask for at least one")
    devices = _export_devices(options)
    if devices is not None and not any(options.trace.glob("*.trace")):
        show(options, {"is_complete": True, "results": [], "waits": [], "chain": None}, [], [devices])
        return
    run = open_run(options.trace)
    trace = run.trace()
    epochs = trace.epochs()
    graph = explain_graph(trace) if trace.workers else None
    notes = _limits(trace, epochs) if graph is None else [graph.verdict]
    if not trace.is_complete:
        notes.append(NOT_COMPLETE)
    if trace.left_out.spans:
        notes.append(
            f"the file has the last {trace.spans.size:,} of {trace.left_out.spans + trace.spans.size:,} spans; "
            "the sums are of all"
        )
    notes += run.notes
    notes += [f"rank {rank}: {line}" for rank, line in sorted(trace.choices.items())]
    notes += _found_best(trace)
    waits, longest = largest_waits(trace, options.waits or _WAITS), longest_chain(trace)
    tables = [_waits(trace, waits)] if waits and options.waits else []
    if longest is not None and options.waits:
        links = sorted(longest.links, key=lambda link: -link.seconds)[:_MOST_LINKS]
        notes.append(
            f"The longest run of the graph, step {longest.step}, took {format_seconds(longest.seconds)}: a chain of "
            f"{len(longest.links)}, of which the longest are {', '.join(map(str, links))}"
        )
    tables += [_stages(trace)] if options.stages else []
    if options.slowest is not None:
        tables.append(_slowest(trace, options.slowest))
    if options.export is not None:
        from penstock.measure.chrome import write_chrome
        from penstock.measure.export import export_path, export_trace
        from penstock.measure.gpu_lanes import gpu_lanes

        path = options.out or export_path(options.trace, options.export)
        if options.profile is not None:
            lanes = gpu_lanes(options.profile, trace)
            write_chrome(trace, path, lanes)
            if not lanes:
                notes.append(
                    f"{options.profile} has no device events, so there are no lanes of a GPU: profile on one, with "
                    "torch.profiler.ProfilerActivity.CUDA"
                )
        else:
            with needing(
                f"--export {options.export}", {"parquet": "arrow"}.get(options.export, "tensorboard")
            ):
                export_trace(trace, options.export, path)
        notes.append(f"The export: {path}")
    if devices is not None:
        notes.append(devices)
    data = {
        "is_complete": trace.is_complete,
        "results": [_values(epoch, None if graph is None else graph.waited) for epoch in epochs],
        "waits": [asdict(wait) for wait in waits],
        "chain": None if longest is None else asdict(longest),
    }
    show(options, data, tables, notes, lambda: _drawn(options.trace, trace))


def _limits(trace: Trace, epochs: list[EpochMetrics]) -> list[str]:
    """Return what limited each epoch of a loader, in a line each."""
    from penstock.trace import limiting

    # A data set reads and computes in one.
    source, decode = ("the data set",) * 2 if trace.meta.get("reads") == "data set" else ("storage", "decode")
    return [
        limiting(epoch, source, decode, is_cut=not trace.is_complete and epoch is epochs[-1])
        for epoch in epochs
    ] or ["no batch was consumed yet"]


def _export_devices(options: argparse.Namespace) -> str | None:
    """Export what `penstock watch` sampled in a run as a table of its own, and return the line that says where."""
    from penstock.recordings.devices import FILE, read_devices

    if options.export != "parquet" or not (options.trace / FILE).exists():
        return None
    from penstock.measure.export import devices_path, export_path, write_devices

    path = devices_path(options.out or export_path(options.trace, "parquet"))
    with needing("--export parquet", "arrow"):
        write_devices(read_devices(options.trace), path)
    return f"The counters of devices and processes: {path}"


def _drawn(path: Path, trace: Trace) -> Figure:
    from penstock.measure.plot import draw
    from penstock.measure.plot_graph import draw_graph

    if trace.workers:
        return draw_graph(trace)
    if not any(epoch.steps for epoch in trace.epochs()):
        raise ConfigError(f"{path}: no batch was consumed yet, so there is nothing to draw")
    return draw([("", trace)])


def _values(epoch: EpochMetrics, waited: dict[str, float] | None) -> dict[str, Any]:
    """Return what JSON says of an epoch. waited: by a graph's steps, by what for; None: it is of a loader."""
    of_loader = {str(cause): seconds for cause, seconds in epoch.stall_by_cause.items()}
    return {
        "epoch": epoch.epoch,
        "seconds": epoch.seconds,
        "samples": epoch.samples,
        "steps": epoch.steps,
        "stall_seconds": epoch.stall_seconds,
        "stall_by_cause": of_loader if waited is None else waited,
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


def _found_best(trace: Trace) -> Iterator[str]:
    """Yield which numbers of threads and slots each rank found better than those that it began with."""
    from penstock.trace.schema import NO_PLACE, SOURCE, STAGING, Kind

    # The header is of one rank: others may have begun with other numbers.
    limits = trace.meta.get("limits") if len(set(trace.spans["rank"].tolist())) == 1 else None
    spans = trace.spans[trace.spans["kind"] == Kind.THREADS]
    for rank in sorted(set(spans["rank"].tolist())):
        for place, name, what in (
            (SOURCE, "readers", "threads that read"),
            (STAGING, "decoders", "threads that load"),
            (NO_PLACE, "slots", "batches in memory"),
        ):
            changes = spans[(spans["rank"] == rank) & (spans["place"] == place)]
            if not changes.size:
                continue
            said = [f"{each['samples']} in epoch {each['epoch']}" for each in changes[-_MOST_CHANGES:]]
            if changes.size > _MOST_CHANGES:
                said.insert(0, "...")
            if isinstance(limits, dict) and name in limits:
                said.insert(0, f"{limits[name]} at first")
            yield f"rank {rank} found best, of {what}: {', '.join(said)}"


def _waits(trace: Trace, waits: list[Chain]) -> Table:
    if trace.workers:
        of_workers = [
            (str(each.step), trace.workers[each.rank], format_seconds(each.seconds), each.links[0].what)
            for each in waits
        ]
        return Table("The largest waits", ("step", "worker", "waited", "for"), of_workers)
    rows = [
        (f"epoch {each.epoch}, step {each.step}", format_seconds(each.seconds), str(each)) for each in waits
    ]
    return Table("The largest waits", ("for the batch of", "waited", "chain of its last sample"), rows)


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
        return f"{name} received from another worker" if stage.of_peers else name
    if stage.kind in (Kind.WRITE, Kind.DRAIN, Kind.LOAD):  # of snapshots, whose store has tiers of its own
        return f"{name} {'from' if stage.kind == Kind.LOAD else 'to'} tier {stage.place}"
    return f"{name} from {describe_place(stage.place)}" + (" of other ranks" if stage.of_peers else "")
