"""The references of a recorded process to the blocks of its files, and the access sequence that a cache is asked for.

A row is one call: so many bytes of a file from an offset on, read or written. Blocks are computed from the
rows when they are wanted, of any size. So are phases: which file is the data set, which a checkpoint, which a
library is a rule over paths, and may be given anew when a recording is read.

    file  = header (meta: how it was recorded) · chunk* · end?     as penstock.trace.chunks lays them out
    chunk = "FILE", JSON: [[number, path], ...], new files and new names of those renamed
          | "REFS", zlib: complete rows as `REFERENCE` lays them out
    end   = "DONE", rows u64 · calls whose file is unknown u64

A file without its end was cut off, or its recording interrupted: what comes before is complete.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Self

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ClosedError, ConfigError
from penstock.trace.chunks import ChunkReader, ChunkWriter, Format, damaged
from penstock.trace.trace import JSON

#: Bytes of a block, by default: a page of the page cache.
BLOCK_BYTES = 4_096


class Access(IntEnum):
    """What a row is. A `MAP` is a range of a file that was mapped into memory: which of its pages are touched,
    and when, no system call shows, so it is not a reference by itself.
    """

    READ = 0
    WRITE = 1
    MAP = 2


class Phase(IntEnum):
    """What a file is to the training; the words of the source's Figure 2."""

    LIBRARY = 0
    DATA = 1
    CHECKPOINT = 2
    #: Written, but no checkpoint: logs, compiled modules. Or a whole device, which knows no files.
    OTHER = 3


#: One row: 33 bytes, little-endian, without padding. `time` is seconds since the recording began, `offset` and
#: `bytes` say what was read of, written to or mapped from the file numbered `file`, by process `process`.
REFERENCE = np.dtype(
    [
        ("time", "<f8"),
        ("offset", "<i8"),
        ("bytes", "<i8"),
        ("file", "<i4"),
        ("process", "<i4"),
        ("access", "u1"),
    ]
)

#: An array of dtype `REFERENCE`.
Rows = NDArray[np.void]

#: More references than this are refused: 16 GiB of numbers.
MOST_REFERENCES = 1 << 31

_FORMAT = Format(b"PENBLOCK", 2, "a recording of block references", "of penstock trace blocks", "content")
_FILES, _ROWS, _END = b"FILE", b"REFS", b"DONE"
_COUNTS = struct.Struct("<QQ")
#: What a crash within one append can lose, and what a reader checks at once: 2 MiB before compression.
_CHUNK_ROWS = 65_536

_SYSTEM_PLACES = tuple(
    f"/{name}/"
    for name in ("bin", "boot", "etc", "lib", "lib32", "lib64", "nix", "run", "sbin", "snap", "usr")
)
_LIBRARY_PARTS = frozenset(("site-packages", "dist-packages", "__pycache__", "lib-dynload"))
_LIBRARY_ENDINGS = (".py", ".pyc", ".pyi", ".pth", ".so", "/pyvenv.cfg")


@dataclass(frozen=True, slots=True)
class PhaseRule:
    """Which file belongs to which phase. The first of these that applies:

    1. at or below one of `checkpoints`: CHECKPOINT; at or below one of `data`: DATA. Where one lies within the
       other, the deeper one counts;
    2. a place of the system or of Python (`/usr`, `/etc`, `site-packages`, `lib/python3...`, `*.py`, `*.pyc`,
       `*.so*`): LIBRARY;
    3. written to by the recorded processes: CHECKPOINT, or OTHER where `checkpoints` were given;
    4. what is left was only read: DATA, or LIBRARY where `data` was given.

    data, checkpoints: files or folders, absolute. Without them, 3 and 4 guess.
    Raises: ConfigError for a path that is not absolute.
    """

    data: tuple[str, ...] = ()
    checkpoints: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("data", "checkpoints"):
            for path in getattr(self, name):
                if not os.path.isabs(path):
                    raise ConfigError(
                        f"{name} names {path!r}; a recording holds absolute paths: give such a one"
                    )

    def phase_of(self, path: str, is_written: bool) -> Phase:
        """Return the phase of a file.

        >>> PhaseRule(data=("/data",)).phase_of("/data/cat/1.jpg", is_written=False).name
        'DATA'
        """
        data, checkpoint = _depth(path, self.data), _depth(path, self.checkpoints)
        if max(data, checkpoint) >= 0:
            return Phase.DATA if data > checkpoint else Phase.CHECKPOINT
        if not path.startswith("/") and path.startswith("device "):
            return Phase.OTHER
        if _is_library(path):
            return Phase.LIBRARY
        if is_written:
            return Phase.OTHER if self.checkpoints else Phase.CHECKPOINT
        return Phase.LIBRARY if self.data else Phase.DATA


def _depth(path: str, places: Iterable[str]) -> int:
    """Return the length of the deepest place at or above a path, -1 where there is none."""
    inside = (place.rstrip("/") for place in places)
    return max((len(place) for place in inside if path == place or path.startswith(place + "/")), default=-1)


def _is_library(path: str) -> bool:
    return (
        path.startswith(_SYSTEM_PLACES)
        or path.endswith(_LIBRARY_ENDINGS)
        or ".so." in path.rpartition("/")[2]
        or "/lib/python3" in path
        or not _LIBRARY_PARTS.isdisjoint(path.split("/"))
    )


@dataclass(frozen=True, slots=True, eq=False)
class BlockString:
    """An access sequence: which block is asked for at which logical time, and what for."""

    #: int64[n], number of the block at each logical time: 1 for the one referenced first, then 1 more for each
    #: that appears for the first time, as the source's Figure 2 has it.
    numbers: NDArray[np.int64]
    #: uint8[n], its `Phase`.
    phases: NDArray[np.uint8]
    #: int64[n], the row of `Recording.rows` that it is part of.
    rows: NDArray[np.int64]

    @property
    def blocks(self) -> int:
        """How many different blocks there are."""
        return int(self.numbers.max(initial=0))


@dataclass(frozen=True, slots=True)
class PhaseSummary:
    """What a recording holds of one phase; blocks of `block_bytes` each, as the access sequence counts them."""

    phase: Phase
    #: Files with a row of this phase, mapped ones included.
    files: int
    #: Recording to blocks, reads and writes, and different blocks among them.
    reads: int
    writes: int
    blocks: int
    #: Bytes read and written, as the calls returned them.
    read_bytes: int
    written_bytes: int
    #: Bytes of the ranges that were mapped into memory, which are no references.
    mapped_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """What a process asked of its files, call by call, in the order in which the calls returned.

    Raises: ConfigError where rows are of another dtype, or name a file, offset or size that cannot be.
    """

    #: REFERENCE[n].
    rows: Rows
    #: Path of each file, by its number. A file that was renamed has its last name; two that had one path after
    #: each other (one was removed, or replaced by a rename) are two.
    files: Sequence[str]
    #: How it was recorded: "by", "command", "data", "checkpoints". Free-form but for these.
    meta: Mapping[str, JSON] = field(default_factory=dict)
    #: False where the recording was interrupted or its file breaks off.
    is_complete: bool = True
    #: Calls that read or wrote something through a descriptor whose file the recording does not tell.
    unresolved: int = 0

    def __post_init__(self) -> None:
        rows = self.rows
        if rows.dtype != REFERENCE or rows.ndim != 1:
            raise ConfigError(
                f"rows are {rows.dtype} of {rows.ndim} dimensions; references are a row of REFERENCE: make them "
                "with np.array(rows, penstock.recordings.blocks.REFERENCE)"
            )
        wrong = (
            (rows["file"] < 0)
            | (rows["file"] >= len(self.files))
            | (rows["offset"] < 0)
            | (rows["bytes"] < 1)
            | (rows["offset"] > np.iinfo(np.int64).max - rows["bytes"])
            | (rows["access"] > max(Access))
            | ~np.isfinite(rows["time"])
        )
        if wrong.any():
            first = int(wrong.argmax())
            raise ConfigError(
                f"row {first} is {rows[first]}; it takes a finite time, an offset of 0 or more, at least one byte, "
                f"one of {len(self.files)} files and an access of 0 to {max(Access):d}"
            )

    @property
    def rule(self) -> PhaseRule:
        """The rule for phases that it was recorded with."""

        def paths(name: str) -> tuple[str, ...]:
            value = self.meta.get(name, [])
            return tuple(str(path) for path in value) if isinstance(value, list) else ()

        return PhaseRule(paths("data"), paths("checkpoints"))

    def file_phases(self) -> NDArray[np.uint8]:
        """Return the phase of each file: uint8[files]."""
        rule = self.rule
        written = np.zeros(len(self.files), np.bool_)
        written[self.rows["file"][self.rows["access"] == Access.WRITE]] = True
        phases = [rule.phase_of(path, bool(was)) for path, was in zip(self.files, written, strict=True)]
        return np.array(phases, np.uint8)

    def string(
        self,
        *,
        block_bytes: int = BLOCK_BYTES,
        phases: Collection[Phase] = tuple(Phase),
        accesses: Collection[Access] = (Access.READ, Access.WRITE),
        join: bool = True,
    ) -> BlockString:
        """Return the access sequence: each block that each call touches, in turn, numbered by first reference.

        block_bytes: size of a block.
        phases, accesses: which references count; the others are left out before blocks are numbered. With
            `Access.MAP`, a mapping counts as one reading of its whole range.
        join: a block that a process continues to read (or write) in the middle of, where its last call on this
            file ended, is not referenced again: reading 4,096 bytes in 4 calls is one reference.
        Raises: ConfigError for a block size below one, or more than `MOST_REFERENCES`.
        """
        file_phase = self.file_phases()
        rows = self.rows
        chosen = np.isin(rows["access"], list(accesses)) & np.isin(file_phase[rows["file"]], list(phases))
        places = np.flatnonzero(chosen)
        rows = rows[places]
        first, counts = block_runs(rows, block_bytes, join=join)
        total = int(counts.sum(dtype=np.float64)) if counts.size else 0
        if total > MOST_REFERENCES:
            raise ConfigError(
                f"{total:,} references of {block_bytes} bytes are more than {MOST_REFERENCES:,}: use larger blocks "
                "or choose phases"
            )
        row = np.repeat(np.arange(counts.size), counts)
        within = np.arange(row.size) - np.repeat(np.cumsum(counts) - counts, counts)
        numbers = _by_first_reference(rows["file"][row], first[row] + within)
        return BlockString(numbers, file_phase[rows["file"]][row], places[row])

    def summary(self, *, block_bytes: int = BLOCK_BYTES) -> list[PhaseSummary]:
        """Return what there is of each phase that occurs, in the order of `Phase`."""
        rows, file_phase = self.rows, self.file_phases()
        string = self.string(block_bytes=block_bytes)
        row_phase, row_access = file_phase[rows["file"]], rows["access"]
        is_write = row_access[string.rows] == Access.WRITE
        parts = []
        for phase in Phase:
            of_rows, of_string = row_phase == phase, string.phases == phase
            if not of_rows.any():
                continue

            def moved(access: Access, of_rows: NDArray[np.bool_] = of_rows) -> int:
                return int(rows["bytes"][of_rows & (row_access == access)].sum())

            parts.append(
                PhaseSummary(
                    phase,
                    np.unique(rows["file"][of_rows]).size,
                    int((of_string & ~is_write).sum()),
                    int((of_string & is_write).sum()),
                    np.unique(string.numbers[of_string]).size,
                    moved(Access.READ),
                    moved(Access.WRITE),
                    moved(Access.MAP),
                )
            )
        return parts


def block_runs(
    rows: Rows, block_bytes: int, *, join: bool = True
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return which blocks of its file each row touches: the first, and how many, int64[rows] both.

    join: as in `Recording.string`; a row that only continues within a block then touches 0.
    Raises: ConfigError for a block size below one.
    """
    if block_bytes < 1:
        raise ConfigError(f"block_bytes is {block_bytes}; a block has at least one byte: 4,096 is a page")
    first: NDArray[np.int64] = rows["offset"] // block_bytes
    last = (rows["offset"] + rows["bytes"] - 1) // block_bytes
    if join:
        first = first + _goes_on(rows, block_bytes)
    return first, last - first + 1


def _goes_on(rows: Rows, block_bytes: int) -> NDArray[np.bool_]:
    """Tell which rows begin inside the block in which the same process ended its last call on the file."""
    goes_on = np.zeros(rows.size, np.bool_)
    order = np.lexsort((rows["access"], rows["file"], rows["process"]))  # stable: rows of a key stay in order
    same = np.ones(max(rows.size - 1, 0), np.bool_)
    for name in ("access", "file", "process"):
        values = rows[name][order]
        same &= values[1:] == values[:-1]
    begin = rows["offset"][order]
    end = begin + rows["bytes"][order]
    goes_on[order[1:]] = same & (begin[1:] == end[:-1]) & (begin[1:] % block_bytes > 0)
    return goes_on


def _by_first_reference(files: NDArray[np.int32], blocks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number the pairs (file, block) 1, 2, ... in the order of their first appearance: int64[n]."""
    if not files.size:
        return np.empty(0, np.int64)
    # One key for both: each file gets as many keys as its highest block asks for.
    highest = np.full(int(files.max()) + 1, -1, np.int64)
    np.maximum.at(highest, files, blocks)
    bases = np.cumsum(np.maximum(highest + 1, 0).astype(np.float64))
    if bases[-1] < np.iinfo(np.int64).max:
        base = np.cumsum(highest + 1) - (highest + 1)
        _, first, of = np.unique(base[files] + blocks, return_index=True, return_inverse=True)
    else:
        pairs = np.stack([files.astype(np.int64), blocks], axis=1)
        _, first, of = np.unique(pairs, axis=0, return_index=True, return_inverse=True)
    rank = np.empty(first.size, np.int64)
    rank[np.argsort(first)] = np.arange(1, first.size + 1)
    numbers: NDArray[np.int64] = rank[of.reshape(-1)]
    return numbers


class RecordingWriter:
    """Writes a recording as it is made.

    What was appended has reached the operating system, so a killed recorder loses nothing of it. Leaving a
    `with` block by an exception closes the file without its end: such a recording is not complete. Used by one
    thread at a time. An existing file is replaced.
    """

    def __init__(self, path: str | os.PathLike[str], meta: Mapping[str, JSON]) -> None:
        """Create the file and write its header.

        Raises: ConfigError when JSON cannot say `meta`; OSError when the file cannot be made.
        """
        self._chunks = ChunkWriter(path, _FORMAT, meta)
        self._rows = 0

    def append(self, rows: Rows, names: Mapping[int, str]) -> None:
        """Write rows, in the order given, and the names that are new since the last call.

        names: path of each file that is new, or was renamed, by its number.
        Raises: ClosedError after close; ConfigError for rows of another dtype; OSError when the disk does not take
            them.
        """
        if self._chunks.is_closed:
            raise ClosedError(
                f"{self._chunks.path} is closed; it takes references until then: open another file"
            )
        if rows.dtype != REFERENCE:
            raise ConfigError(f"rows are {rows.dtype}; a recording holds REFERENCE: convert them")
        if names:
            self._chunks.write(_FILES, json.dumps(list(names.items())).encode())
        for first in range(0, rows.size, _CHUNK_ROWS):
            part = rows[first : first + _CHUNK_ROWS]
            self._chunks.write(_ROWS, zlib.compress(part.tobytes(), 1))
            self._rows += part.size

    def close(self, *, is_complete: bool = True, unresolved: int = 0) -> None:
        """Mark the end, unless the recording is not complete, and force the file to the disk. Twice is harmless."""
        if not self._chunks.is_closed:
            if is_complete:
                self._chunks.write(_END, _COUNTS.pack(self._rows, unresolved))
            self._chunks.close(sync=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(is_complete=error is None)


def write_recording(path: str | os.PathLike[str], recording: Recording) -> None:
    """Write a whole recording into a file."""
    with RecordingWriter(path, recording.meta) as writer:
        writer.append(recording.rows, dict(enumerate(recording.files)))
        writer.close(is_complete=recording.is_complete, unresolved=recording.unresolved)


def is_recording(path: str | os.PathLike[str]) -> bool:
    """Tell whether a file begins like a recording."""
    with open(path, "rb") as file:
        return file.read(len(_FORMAT.magic)) == _FORMAT.magic


def read_recording(path: str | os.PathLike[str]) -> Recording:
    """Read a recording, one that breaks off included: its rows up to the last complete chunk.

    Raises: FormatError, naming file and offset, when it is no recording, is of another version or damaged;
    OSError when it cannot be read.
    """
    rows: list[Rows] = [np.empty(0, REFERENCE)]
    names: dict[int, str] = {}
    unresolved = 0
    with ChunkReader(path, _FORMAT, _END) as chunks:
        for chunk in chunks:
            try:
                if chunk.tag == _FILES:
                    names.update((int(number), str(name)) for number, name in json.loads(chunk.payload))
                elif chunk.tag == _ROWS:
                    rows.append(np.frombuffer(zlib.decompress(chunk.payload), REFERENCE))
                elif chunk.tag == _END:
                    written, unresolved = _COUNTS.unpack(chunk.payload)
                    if written != sum(part.size for part in rows):
                        raise ValueError(f"{written} rows were written")
                else:
                    raise ValueError(f"version {_FORMAT.version} knows no chunk {chunk.tag!r}")
            except (ValueError, TypeError, RecursionError, zlib.error, struct.error) as reason:
                raise damaged(path, chunk.offset, f"its chunk cannot be read ({reason})") from reason
    if sorted(names) != list(range(len(names))):
        raise damaged(path, 0, f"its files are not numbered from 0 to {len(names) - 1}")
    try:
        return Recording(
            np.concatenate(rows),
            [names[number] for number in range(len(names))],
            chunks.meta,
            chunks.is_ended,
            unresolved,
        )
    except ConfigError as reason:
        raise damaged(path, 0, str(reason)) from reason
