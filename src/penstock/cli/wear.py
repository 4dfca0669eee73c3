"""`penstock simulate wear`: what snapshots, or any writes, do to an SSD, and how long it lasts."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.options import parsed, parsed_amount, parsed_count, parsed_names, refuse_together
from penstock.cli.output import Table, add_command, add_output_options, progress, show
from penstock.errors import ConfigError
from penstock.files import read_text

if TYPE_CHECKING:
    from penstock.machine.ssd import Drive, Lifetime, Ssd, Work
    from penstock.simulate.recorded_writes import RecordedWrites
    from penstock.simulate.snapshots import SnapshotSizes, StoredRun
    from penstock.simulate.wear import PhaseWork, Stream, WearResult

_DESCRIPTION = """\
Runs snapshots of a training, or any stream of writes, on a model of an SSD: pages written and moved, blocks erased,
how evenly, in what time, and how long the drive will last. Without a source the snapshots are those of two small
models that come with Penstock, scaled to --parameters.
"""
_EPILOG = """\
examples:
  penstock simulate wear --parameters 2e8 --every "30 min" --plot wear.png
  penstock simulate wear --models text-gpt --drive my-ssd.toml --every "30 min"
  penstock trace blocks --out run.blocks -- python train.py && penstock simulate wear --recording run.blocks
  penstock simulate wear --recording writes.csv --per-day "2 TB" --warm-up random

A stream is a recording of block references (penstock trace blocks, its own and what it imports: blkparse, fio, strace
and others), whose writes are run, or a text, one operation a line: write,NAME,SIZE; read,NAME; delete,NAME; or pages
of the drive: write_pages,FIRST,COUNT; trim_pages,FIRST,COUNT; read_pages,FIRST,COUNT; and phase,NAME to sum up what
follows.

JSON, all explained in docs/howto/ssd-wear.md: drive{exported_bytes, page_bytes, blocks, rated_cycles}; for snapshots
results[] of model, parameters, snapshots, encoding, snap_dis, stored_bytes, stored_share, repeats and the sums; for a
stream recording{} and one of results[]: the sums, phases[], histogram[]. Sums: written_bytes, written_pages,
moved_pages, summary_pages, programmed_pages, trimmed_pages, read_pages, write_amplification, erases,
erases_per_block{}, busy_seconds, bytes_per_day, lifetime{}.
"""

#: The encodings of `penstock.simulate.snapshots`, for the help text.
_ENCODINGS = "complete, gzip, gzip-delta, rle4, rle4-gzip, dynrle-progressive, dynrle-chain, penstock"
#: Weights of CaffeNet: what the default drive was made for.
_PARAMETERS = 57_286_118
_WORK = ("written_pages", "moved_pages", "summary_pages", "trimmed_pages", "read_pages", "programmed_pages")


def add(commands: Any) -> None:
    summary = "what snapshots, or any writes, do to an SSD, and how long it lasts"
    parser = add_command(commands, "wear", _run, summary, _DESCRIPTION, _EPILOG)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--sizes", type=Path, metavar="FILE", help="recorded sizes of snapshots (JSON)")
    source.add_argument("--recording", type=Path, metavar="FILE", help="a recording, or a stream as text")
    drive = parser.add_argument_group("the drive")
    drive.add_argument(
        "--drive", default="paper", metavar="FILE", help="a .toml file, or paper (%(default)s)"
    )
    drive.add_argument(
        "--warm-up", default="sequential", metavar="HOW", help="sequential, random or none (%(default)s)"
    )
    snapshots = parser.add_argument_group("snapshots")
    snapshots.add_argument(
        "--models", metavar="NAMES", help="recorded models, with commas: digits-cnn, text-gpt (all)"
    )
    snapshots.add_argument(
        "--parameters", metavar="P", help=f"scale every model to P weights ({_PARAMETERS:,})"
    )
    snapshots.add_argument(
        "--encodings",
        metavar="NAMES",
        help=f"encodings of a snapshot, with commas: {_ENCODINGS} (all of the paper's)",
    )
    snapshots.add_argument("--snap-dis", metavar="D,...", help="snapshots between baselines (3,5,10)")
    life = parser.add_argument_group("its life")
    life.add_argument(
        "--repeats", type=int, default=1, metavar="N", help="repeat the workload N times (%(default)s)"
    )
    rate = life.add_mutually_exclusive_group()
    rate.add_argument("--per-day", metavar="SIZE", help='bytes written a day, as "500 GB"')
    rate.add_argument("--every", metavar="TIME", help='time from file to file, as "25 min"')
    add_output_options(parser)


def _run(options: argparse.Namespace) -> None:
    from penstock.simulate.wear import warm_drive

    refuse_together(options, "recording", ("models", "parameters", "encodings", "snap_dis"))
    if options.repeats < 1:
        raise ConfigError(f"--repeats is {options.repeats}; everything runs at least once")
    ssd = _ssd(options)
    if options.recording is not None:
        stream, recorded = _stream(options.recording, ssd)
        _run_stream(options, stream, recorded, warm_drive(ssd, options.warm_up))
    else:
        models = _models(options)
        _run_methods(options, models, warm_drive(ssd, options.warm_up))


def _ssd(options: argparse.Namespace) -> Ssd:
    from penstock.machine.ssd import Ssd

    if options.drive == "paper":
        return Ssd.paper()
    try:
        return Ssd.from_toml(read_text(Path(options.drive)))
    except FileNotFoundError:
        raise ConfigError(
            f"--drive {options.drive}: there is no such file; the built-in one is paper"
        ) from None
    except ConfigError as error:
        raise ConfigError(f"--drive {options.drive}: {error}") from None


def _stream(path: Path, ssd: Ssd) -> tuple[Stream, RecordedWrites | None]:
    """Return what a file says to do, and what is known of it where it is a recording."""
    from penstock.recordings.blocks import is_recording, read_recording
    from penstock.simulate.recorded_writes import recorded_writes
    from penstock.simulate.wear import read_stream

    if is_recording(path):
        recorded = recorded_writes(read_recording(path), ssd, str(path))
        return recorded.stream, recorded
    with path.open(encoding="utf-8", newline="") as lines:
        stream = read_stream(lines, str(path))
    if not stream.operations:
        raise ConfigError(f"--recording {path} has no operation: nothing would wear the drive")
    return stream, None


def _models(options: argparse.Namespace) -> list[SnapshotSizes]:
    from penstock.simulate.snapshots import read_sizes, recorded_sizes

    models = (
        recorded_sizes()
        if options.sizes is None
        else read_sizes(read_text(options.sizes), str(options.sizes))
    )
    names = [model.name for model in models]
    if options.models is not None:
        wanted = parsed_names(options.models, "--models")
        for name in wanted:
            if name not in names:
                raise ConfigError(f"--models: {name!r} is not recorded; the models are {', '.join(names)}")
        models = [model for model in models if model.name in wanted]
    if options.parameters is not None:
        parameters = parsed_count("--parameters", options.parameters)
    elif options.sizes is None:
        parameters = _PARAMETERS
    else:
        return models
    return [model if model.parameters == parameters else model.scaled(parameters) for model in models]


def _life(
    options: argparse.Namespace, stream: Stream, result: WearResult
) -> tuple[Lifetime | None, float | None]:
    """Return what is left to write, None where the drive has no `rated_cycles`; and the bytes of a day."""
    from penstock.machine.ssd import lifetime
    from penstock.simulate.wear import written_per_day
    from penstock.units import parse_bytes, parse_seconds

    per_day = None
    if options.per_day is not None:
        per_day = parsed_amount("--per-day", parse_bytes, options.per_day)
    elif options.every is not None:
        every = parsed_amount("--every", parse_seconds, options.every)
        per_day = written_per_day(stream, result, every, options.repeats)
    if result.ssd.rated_cycles is None:
        return None, per_day
    return lifetime(result.wear, result.written_bytes, result.ssd.rated_cycles, per_day), per_day


# -- Snapshots by method ---------------------------------------------------------------------------------


def _run_methods(options: argparse.Namespace, models: Sequence[SnapshotSizes], drive: Drive) -> None:
    from penstock.measure.plot_wear import draw_methods
    from penstock.simulate.snapshots import METHODS, SNAP_DISTANCES, compare_methods, method_named

    methods = (
        METHODS
        if options.encodings is None
        else [
            parsed("--encodings", method_named, name)
            for name in parsed_names(options.encodings, "--encodings")
        ]
    )
    distances: Sequence[int] = SNAP_DISTANCES
    if options.snap_dis is not None:
        distances = [
            parsed_count("--snap-dis", part) for part in parsed_names(options.snap_dis, "--snap-dis")
        ]
    with progress("snapshots", len(models) * len(methods) * len(distances)) as done:
        runs = compare_methods(drive, models, methods, distances, repeats=options.repeats, done=done)
    rows = [_method_row(options, run) for run in runs]
    tables = []
    for model in models:
        own = [row for row, run in zip(rows, runs, strict=True) if run.sizes is model]
        title = f"{model.name}: {model.count} snapshots of {model.parameters:,} parameters"
        tables.append(_methods_table(title, own))
    data = {
        "drive": _ssd_data(drive.ssd),
        "warm_up": options.warm_up,
        "repeats": options.repeats,
        "results": rows,
    }
    show(options, data, tables, _method_notes(options, models, runs), lambda: draw_methods(runs))


def _method_row(options: argparse.Namespace, run: StoredRun) -> dict[str, Any]:
    complete = sum(size or 0 for size in run.sizes.baselines["complete"])
    row: dict[str, Any] = {
        "model": run.sizes.name,
        "parameters": run.sizes.parameters,
        "snapshots": run.sizes.count,
        "encoding": run.method.name,
        "snap_dis": run.snap_dis,
        "stored_bytes": run.stored_bytes,
        "repeats": options.repeats,
        "stored_share": None if run.stored_bytes is None else run.stored_bytes / complete,
    }
    if run.result is not None and run.stream is not None:
        row |= _result_data(options, run.stream, run.result)
    return row


def _methods_table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    from penstock.units import format_bytes

    complete = {row["snap_dis"]: row["erases"] for row in rows if row["encoding"] == "complete"}
    cells = []
    for row in rows:
        if row["stored_bytes"] is None:
            continue
        whole = complete.get(row["snap_dis"])
        cells.append(
            [
                row["encoding"],
                str(row["snap_dis"]),
                format_bytes(row["stored_bytes"]),
                _change(row["stored_share"]),
                f"{row['erases']:,}",
                _change(row["erases"] / whole) if whole else "-",
                f"{row['write_amplification']:.3f}",
                _wear_text(row),
                _trainings_text(row),
                _years_text(row["lifetime"], "even_years"),
            ]
        )
    columns = [
        "encoding", "snap_dis", "stored", "change", "erases", "change", "write amp.",
        "erases a block", "trainings", "years",
    ]  # fmt: skip
    return Table(title, columns, cells)


def _change(share: float) -> str:
    return f"{100 * (share - 1):+.1f} %"


def _wear_text(row: dict[str, Any]) -> str:
    per_block = row["erases_per_block"]
    return f"{per_block['mean']:.3g} ({per_block['min']} to {per_block['max']})"


def _trainings_text(row: dict[str, Any]) -> str:
    """How many such trainings the drive lasts."""
    life = row["lifetime"]
    if life is None or life["even_bytes"] is None:
        return "-"
    return f"{life['even_bytes'] / row['written_bytes'] * row['repeats']:,.0f}"


def _bytes_text(life: dict[str, Any] | None, field: str) -> str:
    from penstock.units import format_bytes

    return "-" if life is None or life[field] is None else format_bytes(life[field])


def _years_text(life: dict[str, Any] | None, field: str) -> str:
    if life is None or life[field] is None:
        return "-"
    return f"{life[field]:,.0f}" if life[field] >= 100 else f"{life[field]:.3g}"


def _method_notes(
    options: argparse.Namespace, models: Sequence[SnapshotSizes], runs: Sequence[StoredRun]
) -> list[str]:
    notes = [f"{model.name}: {model.description}." for model in models if model.description]
    if options.sizes is None or options.parameters is not None:
        names = ", ".join(model.name for model in models)
        notes.append(
            f"Sizes of {names} are scaled to {models[0].parameters:,} parameters: "
            "a model that much larger is taken to compress alike."
        )
    missing = {run.sizes.name for run in runs if run.stored_bytes is None}
    if missing:
        notes.append(f"Left out: what {', '.join(sorted(missing))} has no recorded sizes for.")
    notes.append("Trainings: as many such trainings wear the drive out if all blocks wear alike.")
    if options.per_day is None and options.every is None:
        notes.append("Years need --per-day or --every.")
    return notes


# -- A stream --------------------------------------------------------------------------------------------


def _run_stream(
    options: argparse.Namespace, stream: Stream, recorded: RecordedWrites | None, drive: Drive
) -> None:
    from penstock.measure.plot_wear import draw_blocks
    from penstock.simulate.wear import run_stream

    with progress(str(options.recording), stream.length * options.repeats) as done:
        result = run_stream(drive, stream, repeats=options.repeats, done=done)
    sums = {
        **_result_data(options, stream, result),
        "phases": [
            {"name": phase.name, **_work_data(phase.work), "busy_seconds": phase.seconds}
            for phase in result.phases
        ],
        "histogram": [
            dict(zip(("fewest_erases", "most_erases", "blocks"), bin_, strict=True))
            for bin_ in result.wear.histogram()
        ],
    }
    data = {
        "drive": _ssd_data(result.ssd),
        "warm_up": options.warm_up,
        "repeats": options.repeats,
        "recording": None if recorded is None else _recording_data(recorded),
        "results": [sums],
    }
    tables = [Table(str(options.recording), ["", "total"], _totals(sums))]
    if len(result.phases) > 1:
        columns = ["phase", "written", "moved", "read", "erases", "busy"]
        tables.append(Table("", columns, [_phase_cells(phase) for phase in result.phases]))
    notes = [*(recorded.notes if recorded else ()), *_stream_notes(result)]
    show(options, data, tables, notes, lambda: draw_blocks(result, options.recording.name))


def _recording_data(recorded: RecordedWrites) -> dict[str, int]:
    return {
        "files": recorded.files,
        "devices": recorded.devices,
        "writes": recorded.writes,
        "written_bytes": recorded.written_bytes,
        "pages_beyond_drive": recorded.pages_beyond,
    }


def _totals(data: dict[str, Any]) -> list[list[str]]:
    from penstock.units import format_bytes, format_seconds

    amplification, per_block, life = data["write_amplification"], data["erases_per_block"], data["lifetime"]
    spread = f"{per_block['mean']:.3g} ± {per_block['std']:.2g}, {per_block['min']} to {per_block['max']}"
    return [
        ["written by the host", f"{format_bytes(data['written_bytes'])} ({data['written_pages']:,} pages)"],
        ["written to flash", f"{data['programmed_pages']:,} pages"],
        ["of these moved", f"{data['moved_pages']:,} pages"],
        ["write amplification", "-" if amplification is None else f"{amplification:.3f}"],
        ["blocks erased", f"{data['erases']:,}"],
        ["erases a block", spread],
        ["drive busy", format_seconds(data["busy_seconds"])],
        ["until worn out, all blocks alike", _life_text(life, "even")],
        ["until the first block is", _life_text(life, "first_block")],
    ]


def _phase_cells(phase: PhaseWork) -> list[str]:
    from penstock.units import format_seconds

    work = phase.work
    pages = (work.written_pages, work.moved_pages, work.read_pages, work.erases)
    return [
        phase.name or "(before the first)",
        *(f"{count:,}" for count in pages),
        format_seconds(phase.seconds),
    ]


def _stream_notes(result: WearResult) -> list[str]:
    notes = []
    if result.wear.most < 10:
        notes.append(
            f"No block was erased more than {result.wear.most} times: --repeats shows how unevenly they wear in the "
            "long run."
        )
    if result.ssd.rated_cycles is None:
        notes.append("How long the drive lasts needs rated_cycles in its file.")
    return notes


def _life_text(life: dict[str, Any] | None, which: str) -> str:
    if life is None:
        return "-"
    if life[f"{which}_bytes"] is None:
        return "never: nothing was erased"
    years = _years_text(life, f"{which}_years")
    written = _bytes_text(life, f"{which}_bytes")
    return written if years == "-" else f"{written}, {years} years"


def _ssd_data(ssd: Ssd) -> dict[str, Any]:
    return {name: getattr(ssd, name) for name in ("exported_bytes", "page_bytes", "blocks", "rated_cycles")}


def _work_data(work: Work) -> dict[str, int]:
    return {name: getattr(work, name) for name in (*_WORK, "erases")}


def _result_data(options: argparse.Namespace, stream: Stream, result: WearResult) -> dict[str, Any]:
    wear = result.wear
    life, per_day = _life(options, stream, result)
    years = ("even_bytes", "even_years", "first_block_bytes", "first_block_years")
    return {
        "written_bytes": result.written_bytes,
        **_work_data(result.work),
        "write_amplification": result.work.write_amplification,
        "erases_per_block": {"min": wear.least, "mean": wear.mean, "max": wear.most, "std": wear.deviation},
        "busy_seconds": result.seconds,
        "bytes_per_day": per_day,
        "lifetime": None if life is None else {name: _finite(getattr(life, name)) for name in years},
    }


def _finite(amount: float | None) -> float | None:
    return amount if amount is not None and math.isfinite(amount) else None
