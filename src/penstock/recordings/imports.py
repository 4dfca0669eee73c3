"""Recordings of other programs, read into one table of references.

| format    | what it is                                             | what it does not tell |
|-----------|--------------------------------------------------------|-----------------------|
| strace    | `strace -f -ttt -y -o FILE`, also without -ttt or -y   | page faults of mapped files, io_uring |
| dftracer  | DFTracer's .pfw or .pfw.gz, one of each process        | the same; calls of buffered C streams |
| darshan   | text of `darshan-dxt-parser`                           | bytes really read; opens, renames |
| blkparse  | text of `blkparse`: sectors of a device, `Q` events    | files; what the page cache already had |
| fio       | fio's iolog, version 2 or 3                            | processes; times in version 2 |
| opens     | what Penstock's own hook in Python wrote               | all but opens: each is its whole file |
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from penstock.errors import ConfigError, DataError, FormatError
from penstock.recordings.blocks import REFERENCE, Access, Recording
from penstock.recordings.strace import StraceReader
from penstock.trace.trace import JSON

_Paths = Sequence[str | os.PathLike[str]]
_SECTOR_BYTES = 512
_GZIP = b"\x1f\x8b"


class _Table:
    """Rows in the making: files get their numbers as they appear; ordered by time in the end."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, int, int, int, int, int]] = []
        self.numbers: dict[str, int] = {}
        self.names: list[str] = []

    def file(self, path: str) -> int:
        number = self.numbers.get(path)
        if number is None:
            number = self.numbers[path] = len(self.names)
            self.names.append(path)
        return number

    def add(self, time: float, access: Access, path: str, offset: int, size: int, process: int) -> None:
        if size > 0:
            self.rows.append((time, offset, size, self.file(path), process, access))

    def references(self, meta: dict[str, JSON], is_complete: bool) -> Recording:
        rows = np.array(self.rows, REFERENCE)
        rows = rows[np.argsort(rows["time"], kind="stable")]
        if rows.size:
            rows["time"] -= rows["time"][0]
        return Recording(rows, self.names, meta, is_complete)


class _Log:
    """The lines of a text file, with the number of the last one, also of a compressed file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.number = 0
        #: False once the last line turned out to break off.
        self.is_complete = True

    def __iter__(self) -> Iterator[str]:
        with open(self.path, "rb") as raw:
            is_packed = raw.read(2) == _GZIP
        opened = gzip.open if is_packed else open
        with (
            opened(self.path, "rb") as stream,
            io.TextIOWrapper(stream, "utf-8", "surrogateescape", newline="\n") as lines,
        ):
            try:
                for line in lines:
                    self.number += 1
                    if line.endswith("\n"):
                        yield line[:-1].removesuffix("\r")
                    else:
                        # It was still being written when the log was cut or copied.
                        self.is_complete = False
            except EOFError:
                self.is_complete = False
            except (gzip.BadGzipFile, zlib.error) as reason:
                raise FormatError(
                    f"{self.path}, line {self.number + 1}: not readable as gzip ({reason})"
                ) from reason

    def malformed(self, line: str, expected: str) -> FormatError:
        shown = line if len(line) <= 100 else line[:97] + "..."
        return FormatError(f"{self.path}, line {self.number}: {shown!r} is malformed: {expected}")


def import_recording(
    paths: _Paths, form: str, *, folder: str | None = None, data: _Paths = (), checkpoints: _Paths = ()
) -> Recording:
    """Read logs of another program.

    paths: of the logs; several of one run for `dftracer`, which writes one for each process, else one.
    form: one of `FORMATS`.
    folder: where the recorded command was started, to which relative names of a strace log belong.
    data, checkpoints: what `PhaseRule` is to count as data set and as checkpoints.
    A last line that breaks off makes a recording that is not complete.
    Raises: ConfigError for an unknown form or too many paths; FormatError, naming file and line, for a line
    that is none of the format's; OSError when a log cannot be read.
    """
    reader = FORMATS.get(form)
    if reader is None:
        raise ConfigError(f"format {form!r} is not known: give one of {', '.join(FORMATS)}")
    if not paths or (len(paths) > 1 and form != "dftracer"):
        raise ConfigError(
            f"{len(paths)} logs were given; {form} is read from one: join them, or import one by one"
        )
    for path in paths:
        if os.path.isdir(path):
            raise DataError(f"{os.fspath(path)} is a folder; give the log in it")
    meta: dict[str, JSON] = {
        "by": form,
        "imported_from": [os.fspath(path) for path in paths],
        "data": [os.path.abspath(path) for path in data],
        "checkpoints": [os.path.abspath(path) for path in checkpoints],
    }
    return reader([_Log(path) for path in paths], meta, folder)


def _read_strace(logs: Sequence[_Log], meta: dict[str, JSON], folder: str | None) -> Recording:
    (log,) = logs
    reader = StraceReader(log.path, folder)
    for line in log:
        reader.feed(line)
    rows, names = reader.take()
    return Recording(
        rows, [names[number] for number in range(len(names))], meta, log.is_complete, reader.unresolved
    )


_DFTRACER_UNITS = {"S": 1.0, "MS": 1e-3, "US": 1e-6, "NS": 1e-9}
_DFTRACER_MOVES = {
    "read": Access.READ,
    "pread": Access.READ,
    "pread64": Access.READ,
    "write": Access.WRITE,
    "pwrite": Access.WRITE,
    "pwrite64": Access.WRITE,
}
_DFTRACER_OPENS = frozenset(("open", "open64", "openat", "creat", "creat64"))


def _read_dftracer(logs: Sequence[_Log], meta: dict[str, JSON], _folder: str | None) -> Recording:
    """Read DFTracer's events: calls name their file by a hash, and no descriptor.

    So positions are kept per process and file; a process that reads one file through two descriptors at a time
    is followed wrongly, unless by pread.
    """
    paths: dict[str, str] = {}
    events: list[tuple[float, dict[str, Any], _Log, int]] = []
    for log in logs:
        unit = _DFTRACER_UNITS["US"]
        for line in log:
            text = line.strip().removesuffix(",")
            if text in ("", "[", "]"):
                continue
            try:
                event = json.loads(text)
                args = event.get("args", {})
                if event["name"] == "FH":
                    paths[str(args["value"])] = str(args["name"])
                elif event["name"] == "CM" and args.get("name") == "time_metric":
                    unit = _DFTRACER_UNITS[args["value"]]
                elif event.get("cat") == "POSIX":
                    events.append((float(event["ts"]) * unit, event, log, log.number))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as reason:
                raise log.malformed(
                    line, f"an event of DFTracer has a name, ts and args ({reason!r})"
                ) from reason
    events.sort(key=lambda each: each[0])
    table = _Table()
    positions: dict[tuple[int, str], int] = {}
    for time, event, log, number in events:
        name, args = event["name"], event.get("args", {})
        if name not in _DFTRACER_MOVES and name not in _DFTRACER_OPENS and not name.startswith("lseek"):
            continue
        try:
            process, key = int(event["pid"]), str(args["fhash"])
            if name in _DFTRACER_OPENS:
                positions[process, key] = 0
            elif name.startswith("lseek"):
                positions[process, key] = max(int(args["ret"]), 0)
            else:
                size, is_positioned = int(args["ret"]), name.startswith(("pread", "pwrite"))
                at = int(args["offset"]) if is_positioned else positions.get((process, key), 0)
                if not is_positioned:
                    positions[process, key] = at + max(size, 0)
                if size > 0:
                    table.add(time, _DFTRACER_MOVES[name], paths[key], at, size, process)
        except KeyError as missing:
            raise FormatError(
                f"{log.path}, line {number}: a {name} without {missing}: record with DFTRACER_INC_METADATA=1, and "
                "give the logs of all processes of the run, which name each file once"
            ) from missing
        except (ValueError, TypeError) as reason:
            raise FormatError(
                f"{log.path}, line {number}: a {name} that cannot be read ({reason})"
            ) from reason
    return table.references(meta, all(log.is_complete for log in logs))


_DARSHAN_FILE = re.compile(r"# DXT, file_id: \d+, file_name: (.+)")
_DARSHAN_ROW = re.compile(
    r" *X_POSIX +(-?\d+) +(read|write) +\d+ +(\d+) +(\d+) +(\d+\.\d+) +\d+\.\d+(?: .*)?"
)


def _read_darshan(logs: Sequence[_Log], meta: dict[str, JSON], _folder: str | None) -> Recording:
    """Read what darshan-dxt-parser prints: the calls of each file together, put in order of their start.

    Rows of MPI-IO are left out: what they did is there once more, as the POSIX calls that it came to.
    """
    (log,) = logs
    table, path = _Table(), None
    for line in log:
        if found := _DARSHAN_FILE.match(line):
            path = found[1].strip()
        elif line.startswith("#") or not line.strip() or line.lstrip().startswith("X_MPIIO "):
            continue
        else:
            row = _DARSHAN_ROW.fullmatch(line)
            if row is None or path is None:
                raise log.malformed(
                    line, "a row is module, rank, read or write, segment, offset, length, start, end"
                )
            access = Access.READ if row[2] == "read" else Access.WRITE
            table.add(float(row[5]), access, path, int(row[3]), int(row[4]), max(int(row[1]), 0))
    return table.references(meta, log.is_complete)


_BLKPARSE_EVENT = re.compile(
    r" *(\d+,\d+) +\d+ +\d+ +(\d+\.\d+) +(\d+) +(\w+) +([A-Z]+)(?: +(\d+) \+ (\d+))?(?: .*)?"
)


def _read_blkparse(logs: Sequence[_Log], meta: dict[str, JSON], _folder: str | None) -> Recording:
    """Read what blkparse prints: requests as they were queued, by sector. A device stands where a file does."""
    (log,) = logs
    table = _Table()
    in_summary = False
    for line in log:
        event = _BLKPARSE_EVENT.fullmatch(line)
        if event is None:
            # Sums per processor follow the events, and a note on each input file may come before them.
            in_summary = in_summary or line.startswith(("CPU", "Total"))
            if in_summary or not line.strip() or line.startswith("Input file"):
                continue
            raise log.malformed(
                line, "an event is device, cpu, number, time, pid, action, RWBS, sector + sectors"
            )
        device, time, process, action, kinds, sector, sectors = event.groups()
        if action == "Q" and sector is not None and "D" not in kinds and ("R" in kinds or "W" in kinds):
            access = Access.READ if "R" in kinds else Access.WRITE
            size = int(sectors) * _SECTOR_BYTES
            table.add(
                float(time), access, f"device {device}", int(sector) * _SECTOR_BYTES, size, int(process)
            )
    return table.references(meta, log.is_complete)


_FIO_HEAD = re.compile(r"fio version ([23]) iolog")
_FIO_LINE = re.compile(
    r"(?:(\d+) )?(.+?) (add|open|close|read|write|sync|datasync|trim|wait)(?: (\d+) (\d+))?"
)


def _read_fio(logs: Sequence[_Log], meta: dict[str, JSON], _folder: str | None) -> Recording:
    """Read fio's iolog. Times of version 3 are taken for microseconds, which fio 3.33 writes."""
    (log,) = logs
    table, version = _Table(), None
    for line in log:
        if version is None:
            head = _FIO_HEAD.fullmatch(line)
            if head is None:
                raise log.malformed(
                    line, "an iolog begins with 'fio version 2 iolog' or 'fio version 3 iolog'"
                )
            version = head[1]
            continue
        found = _FIO_LINE.fullmatch(line)
        moves = found is not None and found[3] in ("read", "write")
        if found is None or (version == "3") != (found[1] is not None) or (moves and found[4] is None):
            raise log.malformed(
                line, "a line is [time,] file, action and for reads and writes offset and length"
            )
        if moves:
            access = Access.READ if found[3] == "read" else Access.WRITE
            table.add(float(found[1] or 0) * 1e-6, access, found[2], int(found[4]), int(found[5]), 0)
    return table.references(meta, log.is_complete)


def _read_opens(logs: Sequence[_Log], meta: dict[str, JSON], _folder: str | None) -> Recording:
    """Read the log of `penstock.measure.opens_hook`: an open is a reference to all of its file.

    A file opened for writing has the size that it has when this is read; where it is gone, it is left out.
    """
    (log,) = logs
    table = _Table()
    real: dict[str, str] = {}
    for line in log:
        try:
            time, process, kind, size, path = line.split("\t", 4)
            path = json.loads(path)
            if kind == "begin":
                continue
            access = {"R": Access.READ, "W": Access.WRITE}[kind]
            if path not in real:
                real[path] = os.path.realpath(path)
            if access == Access.WRITE:
                size = str(os.path.getsize(real[path])) if os.path.isfile(real[path]) else "0"
            table.add(float(time), access, real[path], 0, int(size), int(process))
        except (ValueError, KeyError) as reason:
            raise log.malformed(
                line, f"an open is time, process, R or W, size and path ({reason!r})"
            ) from reason
    return table.references(meta, log.is_complete)


_Reader = Callable[[Sequence[_Log], dict[str, JSON], str | None], Recording]

#: The formats that can be read, by name.
FORMATS: dict[str, _Reader] = {
    "strace": _read_strace,
    "dftracer": _read_dftracer,
    "darshan": _read_darshan,
    "blkparse": _read_blkparse,
    "fio": _read_fio,
    "opens": _read_opens,
}
