"""Streams of snapshots, or of pages, run on an SSD: what is erased, how unevenly, in what time, for how long.

A stream is a text, one operation a line, with commas between its parts; a line may be empty or begin with ``#``:

    phase,save 5000             what follows is summed up under this name
    write,snap1,190795776       a file of so many bytes, or "191 MB"
    read,snap1                  all of it
    delete,snap1                its pages are trimmed
    write_pages,1024,8          pages of the drive: the first one and how many (1 if left out)
    trim_pages,1024,8
    read_pages,1024

A stream speaks of files or of pages, not of both: files lie where the drive has space for them.
"""

from __future__ import annotations

import csv
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, FormatError
from penstock.machine.ssd import Drive, PageOp, Ssd, Wear, Work
from penstock.plan.random import derive_key, generator_for
from penstock.units import is_integer, parse_bytes
from penstock.validate import check_above_zero, check_count

#: Runs of pages that are done at once: an interruption is noticed after each.
_RUNS_AT_ONCE = 500_000


@dataclass(frozen=True, slots=True)
class Phase:
    """What follows is summed up under a name."""

    name: str
    line: int = 0


@dataclass(frozen=True, slots=True)
class WriteFile:
    """A new file of so many bytes.

    Raises: ConfigError unless size_bytes is an integer, zero or more.
    """

    name: str
    size_bytes: int
    line: int = 0

    def __post_init__(self) -> None:
        if not is_integer(self.size_bytes) or self.size_bytes < 0:
            raise ConfigError(
                f"{self.name!r} is to be of {self.size_bytes!r} bytes; its size is an integer, zero or more"
            )


@dataclass(frozen=True, slots=True)
class ReadFile:
    """A file is read from its beginning to its end."""

    name: str
    line: int = 0


@dataclass(frozen=True, slots=True)
class DeleteFile:
    """A file is deleted, and its pages are trimmed on the drive."""

    name: str
    line: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class PageRuns:
    """Runs of logical pages, asked for without waiting for each other.

    ops: uint8[n], of `penstock.machine.ssd.PageOp`. firsts, counts: int64[n]. lines: int64[n], of the text.
    """

    ops: NDArray[np.uint8]
    firsts: NDArray[np.int64]
    counts: NDArray[np.int64]
    lines: NDArray[np.int64]


FileOperation = WriteFile | ReadFile | DeleteFile
Operation = Phase | FileOperation | PageRuns


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """Operations in their order, and where they are from, for messages."""

    name: str
    operations: tuple[Operation, ...]

    @property
    def length(self) -> int:
        """Return how many operations there are, each run of pages being one."""
        return sum(_length(operation) for operation in self.operations)

    @property
    def files(self) -> int:
        """Return how many files are written."""
        return sum(isinstance(operation, WriteFile) for operation in self.operations)


def _length(operation: Operation) -> int:
    return operation.ops.size if isinstance(operation, PageRuns) else 1


# -- Text ------------------------------------------------------------------------------------------------

_PAGE_OPS = {"write_pages": PageOp.WRITE, "trim_pages": PageOp.TRIM, "read_pages": PageOp.READ}
_PARTS = {
    "phase": "phase,NAME",
    "write": "write,NAME,SIZE",
    "read": "read,NAME",
    "delete": "delete,NAME",
    **{operation: f"{operation},FIRST[,COUNT]" for operation in _PAGE_OPS},
}


def read_stream(lines: Iterable[str], name: str) -> Stream:
    """Return the stream that a text describes.

    name: of the text, for messages.
    Raises: FormatError naming the line and what would be right.
    """
    operations: list[Operation] = []
    runs: list[tuple[int, int, int, int]] = []

    def end_runs() -> None:
        if runs:
            table = np.array(runs, np.int64)
            operations.append(PageRuns(table[:, 0].astype(np.uint8), *np.ascontiguousarray(table[:, 1:].T)))
            runs.clear()

    reader = csv.reader(lines, skipinitialspace=True)
    speaks_of: str | None = None
    try:
        for row in reader:
            if not row or row[0].lstrip().startswith("#"):
                continue
            parts = [part.strip() for part in row]
            run = _page_run(parts)
            subject = speaks_of if parts[0] == "phase" else "files" if run is None else "pages"
            if run is not None:
                runs.append((*run, reader.line_num))
            else:
                end_runs()
                operations.append(_file_operation(parts, reader.line_num))
            if None not in (speaks_of, subject) and speaks_of != subject:
                raise ConfigError(
                    f"{parts[0]!r} speaks of {subject}, the lines before of {speaks_of}: use one"
                )
            speaks_of = subject
    except (ConfigError, csv.Error) as error:
        raise FormatError(f"{name}, line {reader.line_num}: {error}") from None
    except UnicodeDecodeError as error:
        raise FormatError(f"{name}, after line {reader.line_num}: it is not text: {error}") from None
    end_runs()
    return Stream(name, tuple(operations))


def _page_run(parts: Sequence[str]) -> tuple[int, int, int] | None:
    op = _PAGE_OPS.get(parts[0])
    if op is None:
        return None
    if len(parts) not in (2, 3):
        raise ConfigError(f"{','.join(parts)!r} has {len(parts)} parts: write {_PARTS[parts[0]]}")
    first = _number(parts[1], "the first page")
    count = _number(parts[2], "the number of pages") if len(parts) == 3 else 1
    if count < 1:
        raise ConfigError(f"the number of pages is {count}; it must be at least 1")
    return int(op), first, count


def _number(text: str, what: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{what} is {text!r}; it must be an integer, zero or more")
    number = int(text)
    if number >= 2**62:
        raise ConfigError(f"{what} is {text}, more than any drive has")
    return number


def _file_operation(parts: Sequence[str], line: int) -> Operation:
    operation, *rest = parts
    if operation not in _PARTS:
        raise ConfigError(f"{operation!r} is no operation; the known ones are {', '.join(_PARTS)}")
    if len(rest) != _PARTS[operation].count(",") or not rest[0]:
        raise ConfigError(f"{','.join(parts)!r} does not have its parts: write {_PARTS[operation]}")
    match operation:
        case "phase":
            return Phase(rest[0], line)
        case "write":
            size = int(rest[1]) if rest[1].isascii() and rest[1].isdigit() else parse_bytes(rest[1])
            return WriteFile(rest[0], size, line)
        case "read":
            return ReadFile(rest[0], line)
        case _:
            return DeleteFile(rest[0], line)


# -- Space for files --------------------------------------------------------------------------------------


class FileSpace:
    """Which logical pages belong to which file.

    A file begins at the drive's first chip, so that its pages spread evenly over the chips, and takes the lowest
    free addresses, in several pieces if need be. Nothing else is kept: directories and journals are left out.
    """

    def __init__(self, ssd: Ssd) -> None:
        self._ssd = ssd
        #: Free space as [first stripe, end), apart from each other and in their order; a stripe is a page a chip.
        self._free = [(0, ssd.exported_pages // ssd.chips)]
        #: Of each file: its pieces, likewise, and its pages; the last stripe may be used in part.
        self._files: dict[str, tuple[list[tuple[int, int]], int]] = {}

    def names(self) -> list[str]:
        """Return the files that are there, the oldest first."""
        return list(self._files)

    def add(self, name: str, size_bytes: int) -> list[tuple[int, int]]:
        """Take space for a file; return its pages as (first, count).

        Raises: ConfigError if there is such a file, or no space.
        """
        if name in self._files:
            raise ConfigError(f"there is a file {name!r} already: delete it first, or write another name")
        pages = self._ssd.pages(size_bytes)
        stripes = -(-pages // self._ssd.chips)
        free = sum(end - begin for begin, end in self._free)
        if stripes > free:
            raise ConfigError(
                f"{name!r} needs {pages:,} pages, and {free * self._ssd.chips:,} of the drive's "
                f"{self._ssd.exported_pages:,} are free: delete more, write less, or take a larger drive"
            )
        pieces = []
        while stripes:
            begin, end = self._free.pop(0)
            taken = min(stripes, end - begin)
            if begin + taken < end:
                self._free.insert(0, (begin + taken, end))
            pieces.append((begin, begin + taken))
            stripes -= taken
        self._files[name] = (pieces, pages)
        return self.pages(name)

    def pages(self, name: str) -> list[tuple[int, int]]:
        """Return the pages of a file as (first, count). Raises: ConfigError if there is none."""
        if name not in self._files:
            there = ", ".join(self._files) or "none"
            raise ConfigError(f"there is no file {name!r}; those that were written and not deleted: {there}")
        pieces, left = self._files[name]
        runs = []
        for begin, end in pieces:
            count = min(left, (end - begin) * self._ssd.chips)
            runs.append((begin * self._ssd.chips, count))
            left -= count
        return runs

    def remove(self, name: str) -> list[tuple[int, int]]:
        """Give the space of a file back; return its pages as (first, count). Raises: ConfigError if there is none."""
        runs = self.pages(name)
        pieces, _ = self._files.pop(name)
        for piece in pieces:
            self._give_back(*piece)
        return runs

    def _give_back(self, begin: int, end: int) -> None:
        index = bisect_left(self._free, (begin, end))
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index and self._free[index - 1][1] == begin:
            index -= 1
            begin = self._free.pop(index)[0]
        self._free.insert(index, (begin, end))


# -- Running ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class PhaseWork:
    """What the drive did in one phase, and how long it was busy with it."""

    name: str
    work: Work
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class WearResult:
    """What a stream did to a drive.

    phases: in their order; what came before the first is under an empty name.
    wear: of all blocks, by this stream alone.
    """

    ssd: Ssd
    phases: tuple[PhaseWork, ...]
    wear: Wear

    @property
    def work(self) -> Work:
        """Return all work of all phases."""
        total = Work(np.zeros((self.ssd.chips, 6), np.int64))
        for phase in self.phases:
            total = total + phase.work
        return total

    @property
    def written_bytes(self) -> int:
        """Return what the host wrote, in whole pages."""
        return self.work.written_pages * self.ssd.page_bytes

    @property
    def seconds(self) -> float:
        """Return how long the drive was busy."""
        return sum(phase.seconds for phase in self.phases)


WARM_UPS = ("sequential", "random", "none")


def warm_drive(ssd: Ssd, how: str = "sequential") -> Drive:
    """Return a drive as it is when a stream begins; nothing is counted yet.

    how: "sequential": written over once in a row, as the paper's (see `Drive.warm_up`); "random": then, page by
        page, as many pages again as the host can see, drawn uniformly; "none": as it was bought. In the first two
        every page holds data that the drive takes for valid, though no file of the stream has it: space that
        earlier files left without a TRIM, or somebody else's files.
    Raises: ConfigError listing the known ways.
    """
    if how not in WARM_UPS:
        raise ConfigError(f"warm-up is {how!r}; it must be one of {', '.join(WARM_UPS)}")
    drive = Drive(ssd)
    if how == "none":
        return drive
    drive.warm_up()
    if how == "random":
        random = generator_for(derive_key(0, "wear: random warm-up"), 0, 0)
        for begin in range(0, ssd.exported_pages, _RUNS_AT_ONCE):
            count = min(_RUNS_AT_ONCE, ssd.exported_pages - begin)
            pages = random.integers(0, ssd.exported_pages, count)
            drive.run(np.full(count, PageOp.WRITE), pages, np.ones(count, np.int64))
        drive.forget()
    return drive


def run_stream(
    drive: Drive,
    stream: Stream,
    *,
    repeats: int = 1,
    phases_from_start: bool = False,
    done: Callable[[int], None] = lambda _: None,
) -> WearResult:
    """Run a stream on a drive, which is changed.

    A file is read or written with all its pages asked at once, one file after the other; so are the runs of pages
    of a phase. Time is the drive's: a job that computes between its snapshots waits longer.

    repeats: how often the stream is run; files that it leaves are deleted before the next time.
    phases_from_start: every phase finds the drive as it was at the beginning, not as the phase before left it,
        though the files stay where they are: how the paper took the times of its Table 9. Wear is then that of
        the last phase.
    done: called with how many operations are done, of `stream.length` times `repeats`.
    Raises: ConfigError naming the operation's line.
    """
    check_count("repeats", repeats)
    before = drive.erases()
    start = drive.copy() if phases_from_start else None
    run = _Run(drive, stream.name)
    finished = 0
    for turn in range(repeats):
        if turn:
            for name in run.space.names():
                run.do(DeleteFile(name))
        for operation in stream.operations:
            if start is not None and isinstance(operation, Phase):
                drive.become(start)
            for part in _in_parts(operation):
                run.do(part)
                finished += _length(part)
                done(finished)
    return WearResult(drive.ssd, run.phases(), Wear(drive.erases() - before))


def _in_parts(operation: Operation) -> Iterable[Operation]:
    if not isinstance(operation, PageRuns):
        return [operation]
    cuts = [slice(begin, begin + _RUNS_AT_ONCE) for begin in range(0, operation.ops.size, _RUNS_AT_ONCE)]
    return (
        PageRuns(operation.ops[cut], operation.firsts[cut], operation.counts[cut], operation.lines[cut])
        for cut in cuts
    )


class _Run:
    """A drive, its files, and the sums of the phases so far."""

    def __init__(self, drive: Drive, name: str) -> None:
        self.drive = drive
        self.space = FileSpace(drive.ssd)
        self._stream = name
        self._phase = ""
        self._sums: dict[str, tuple[Work, float]] = {}

    def phases(self) -> tuple[PhaseWork, ...]:
        return tuple(PhaseWork(name, work, seconds) for name, (work, seconds) in self._sums.items())

    def do(self, operation: Operation) -> None:
        match operation:
            case Phase():
                self._phase = operation.name
            case PageRuns():
                self._do_pages(operation)
            case _:
                try:
                    op, runs = self._file_runs(operation)
                except ConfigError as error:
                    raise ConfigError(f"{self._place(operation.line)}: {error}") from None
                self._count(self.drive.run([op] * len(runs), *zip(*runs, strict=True)) if runs else None)

    def _file_runs(self, operation: FileOperation) -> tuple[PageOp, list[tuple[int, int]]]:
        match operation:
            case WriteFile():
                return PageOp.WRITE, self.space.add(operation.name, operation.size_bytes)
            case ReadFile():
                return PageOp.READ, self.space.pages(operation.name)
            case _:
                return PageOp.TRIM, self.space.remove(operation.name)

    def _do_pages(self, runs: PageRuns) -> None:
        pages = self.drive.ssd.exported_pages
        wrong = runs.firsts + runs.counts > pages
        if wrong.any():
            index = int(wrong.argmax())
            raise ConfigError(
                f"{self._place(int(runs.lines[index]))}: {runs.counts[index]:,} pages from page "
                f"{runs.firsts[index]:,} are beyond the drive's {pages:,} pages: take a larger drive"
            )
        self._count(self.drive.run(runs.ops, runs.firsts, runs.counts))

    def _count(self, work: Work | None) -> None:
        if work is None:
            return
        seconds = work.seconds(self.drive.ssd)
        if self._phase in self._sums:
            earlier, earlier_seconds = self._sums[self._phase]
            work, seconds = earlier + work, earlier_seconds + seconds
        self._sums[self._phase] = (work, seconds)

    def _place(self, line: int) -> str:
        return f"{self._stream}, line {line}" if line else self._stream


def written_per_day(stream: Stream, result: WearResult, every_seconds: float, repeats: int = 1) -> float:
    """Return bytes a day of a stream that writes one file every so many seconds.

    Raises: ConfigError if it writes no file, or the time is not above zero.
    """
    check_above_zero("every_seconds", every_seconds)
    if not stream.files:
        raise ConfigError(f"{stream.name} writes no files, so it has no rate of its own: give bytes per day")
    return result.written_bytes / (stream.files * repeats * every_seconds) * 86_400.0
