"""`penstock trace blocks`: record which blocks of which files a command asks for, or import such a recording."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.options import check_folder
from penstock.cli.output import Table, add_output_options, check_plot, show
from penstock.errors import ConfigError
from penstock.units import format_bytes

if TYPE_CHECKING:
    from penstock.measure.blocks import Recorded
    from penstock.recordings.blocks import Recording

_OUT = Path("blocks.penstock")
_MEANS = ("strace", "opens")
_FORMATS = ("strace", "dftracer", "darshan", "blkparse", "fio")
_DESCRIPTION = """\
Runs a command and records which blocks of which files it reads and writes, in order; or imports the log of another
program. Tells the data set from libraries and checkpoints, and numbers blocks by first reference.
"""
_EPILOG = """\
examples:
  penstock trace blocks --data photos --checkpoints saves -- python train.py
  penstock trace blocks --by opens --data photos --plot references.png -- python train.py
  penstock trace blocks --import run.strace --format strace --data /data/photos --out run.blocks
  penstock trace blocks --import run.blocks --plot references.png --sequence requests.txt

The command's exit status is passed on. With --json its standard output goes to standard error.

JSON: out, by, command[], exit_status, interrupted_by (a signal's number), seconds; is_complete, block_bytes,
references and blocks (different ones), unresolved_calls, ring_processes (of io_uring, not seen); results[] of phase
(library, data, checkpoint, other), files, reads, writes and blocks (in blocks), read_bytes, written_bytes,
mapped_bytes. What does not apply is null.
"""


def blocks_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's own options; the command to record follows `--` and is not parsed."""
    parser = argparse.ArgumentParser(
        prog="penstock trace blocks",
        usage="%(prog)s [options] -- command ...\n       %(prog)s --import LOG [--format FORMAT] [options]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help=f"the recording ({_OUT}; none with --import)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a recording that is there already")
    parser.add_argument(
        "--by", choices=_MEANS, help="strace: each read and write (default); opens: a hook in Python"
    )
    parser.add_argument(
        "--data", action="append", default=[], metavar="PATH", help="a data set's folder or file"
    )
    parser.add_argument(
        "--checkpoints", action="append", default=[], metavar="PATH", help="where checkpoints are written"
    )
    parser.add_argument(
        "--block-bytes", type=int, default=4096, metavar="N", help="size of a block (%(default)s)"
    )
    parser.add_argument(
        "--import",
        dest="logs",
        nargs="+",
        metavar="LOG",
        help="read logs, or a recording, instead of running",
    )
    parser.add_argument(
        "--sequence",
        type=Path,
        metavar="FILE",
        help="write the data set's access sequence, for penstock simulate caches --recording",
    )
    parser.add_argument("--format", choices=_FORMATS, help="format of the logs; a recording needs none")
    add_output_options(parser)
    return parser


def main_blocks(arguments: Sequence[str]) -> None:
    """Run `penstock trace blocks` with what follows these words.

    Raises: SystemExit with the command's status where that is not 0; ConfigError, FormatError, OSError.
    """
    words = list(arguments)
    place = words.index("--") if "--" in words else len(words)
    options = blocks_parser().parse_args(words[:place])
    command = words[place + 1 :]
    status = _import(options, command) if options.logs else _record(options, command)
    if status:
        raise SystemExit(status)


def _record(options: argparse.Namespace, command: Sequence[str]) -> int:
    from penstock.measure.blocks import record

    if options.format is not None:
        raise ConfigError(
            f"--format {options.format} says what --import reads: name the log, or leave it out"
        )
    _check(options)
    recorded = record(
        command,
        options.out or _OUT,
        by=options.by or _MEANS[0],
        data=options.data,
        checkpoints=options.checkpoints,
        stdout=2 if options.json else None,
    )
    _show(options, recorded.recording, recorded)
    return recorded.exit_status


def _import(options: argparse.Namespace, command: Sequence[str]) -> int:
    from penstock.recordings.blocks import is_recording, read_recording, write_recording
    from penstock.recordings.imports import import_recording

    if command or options.by is not None:
        raise ConfigError("--import reads what was recorded: leave out the command and --by")
    _check(options)
    if options.format is None:
        (first, *others) = options.logs
        if others or not is_recording(first):
            raise ConfigError(f"{first} is no recording of Penstock's: say with --format what it is")
        recording = read_recording(first)
        given = {"data": options.data, "checkpoints": options.checkpoints}
        named = {name: [os.path.abspath(path) for path in paths] for name, paths in given.items() if paths}
        recording = replace(recording, meta={**recording.meta, **named})
    else:
        recording = import_recording(
            options.logs, options.format, data=options.data, checkpoints=options.checkpoints
        )
    if options.out is not None:
        write_recording(options.out, recording)
    _show(options, recording, None)
    return 0


def _check(options: argparse.Namespace) -> None:
    if options.block_bytes < 1:
        raise ConfigError(f"--block-bytes is {options.block_bytes}; a block has at least one: 4096 is a page")
    # Now, rather than when a training of days is over.
    for name in ("out", "sequence"):
        if (path := getattr(options, name)) is not None:
            check_folder(f"--{name}", path)
    check_plot(options)
    out = options.out or (None if options.logs else _OUT)
    if out is not None and out.exists() and not options.overwrite:
        raise ConfigError(f"{out} is there already: name another with --out, or replace it with --overwrite")


def _show(options: argparse.Namespace, recording: Recording, recorded: Recorded | None) -> None:
    parts = recording.summary(block_bytes=options.block_bytes)
    out = options.out or (_OUT if recorded else None)
    data: dict[str, Any] = {
        "out": out and str(out),
        "by": recording.meta.get("by"),
        "command": recording.meta.get("command"),
        "exit_status": recorded and recorded.exit_status,
        "interrupted_by": recorded and recorded.interrupted_by,
        "seconds": recorded and recorded.seconds,
        "is_complete": recording.is_complete,
        "block_bytes": options.block_bytes,
        "references": sum(part.reads + part.writes for part in parts),
        "blocks": sum(part.blocks for part in parts),
        "unresolved_calls": recording.unresolved,
        "ring_processes": recorded and recorded.rings,
        "results": [{**asdict(part), "phase": part.phase.name.lower()} for part in parts],
    }
    table = Table(
        "",
        ("phase", "files", "blocks", "reads", "writes", "read", "written", "mapped"),
        [
            (
                part.phase.name.lower(),
                *(f"{count:,}" for count in (part.files, part.blocks, part.reads, part.writes)),
                *(
                    format_bytes(size) if size else "-"
                    for size in (part.read_bytes, part.written_bytes, part.mapped_bytes)
                ),
            )
            for part in parts
        ],
    )
    show(options, data, [table], _notes(recording, recorded, out))
    if options.sequence is not None:
        from penstock.recordings.blocks import Phase
        from penstock.recordings.references import References, write_references

        string = recording.string(block_bytes=options.block_bytes, phases=[Phase.DATA])
        # After a command of hours its recording and its exit status are worth more than this error.
        if recorded is None and not string.numbers.size:
            raise ConfigError(
                f"--sequence {options.sequence} would be empty: nothing of the data set was referenced; see --data"
            )
        write_references(options.sequence, References.of(string.numbers))
    if options.plot is not None:
        from penstock.measure.plot_blocks import plot_blocks

        plot_blocks(recording, options.plot, block_bytes=options.block_bytes)


def _notes(recording: Recording, recorded: Recorded | None, out: Path | None) -> list[str]:
    from penstock.recordings.blocks import Access, Phase

    notes = []
    if not recording.is_complete:
        notes.append("The recording is not complete: it was interrupted, or its log breaks off.")
    if not recording.rule.data:
        notes.append(
            "No --data was given: files outside of the system's and Python's places count as the data set."
        )
    rows = recording.rows
    mapped = recording.file_phases()[rows["file"][rows["access"] == Access.MAP]] == Phase.DATA
    if mapped.any():
        notes.append(
            f"{mapped.sum():,} ranges of the data set were mapped into memory: which pages were read is not known."
        )
    if recording.unresolved:
        notes.append(
            f"{recording.unresolved:,} reads and writes are left out: the log does not tell their files."
        )
    if recorded and recorded.rings:
        notes.append(f"{recorded.rings} processes used io_uring, whose reads are not seen.")
    if recording.meta.get("by") == "opens":
        notes.append("By opens: each open of Python's counts as its whole file; C and C++ open unseen.")
    if out is not None:
        notes.append(f"The recording is in {out}.")
    return notes
