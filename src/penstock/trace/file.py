"""The file that keeps a trace: bounded, readable while it is written, and readable up to where a run died.

    file   = header (the run's meta) · chunk* · end?     as penstock.trace.chunks lays them out
    chunk  = "SPAN", spans as `penstock.trace.schema.SPAN` lays them out
           | "IDS ", which samples groups are: n u32 · flow u64[n] · rank u32[n] · count u32[n] · ids i64[sum of counts]
           | "ID32", the same with ids u32[sum of counts], where all are below 2**32
           | "NAME", JSON: {"samples": {id: name}, "ranks": {rank: host}, "choices": {rank: line}}, any may be missing
           | "SUMS", zlib of JSON: the sums of spans that are not in the file, once at most
           | "SLOW", spans, the slowest among those
    end    = "DONE", spans dropped u64

Ids of groups whose flow has the bit `AS_PLANNED` are not in the file: the plan in its meta tells them.

Each of them has version 1. A reader skips a chunk that it does not know, tag and version.

Spans are appended. Once they fill half of what the file may take, the next half begins; once that is full, too, the
file is replaced by one that has sums in place of the older half. So it has all spans of a short run, of a long one
those of the last steps, and the sums of all at any time. A file without its end was cut off: what stands before the cut
is intact.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ClosedError, ConfigError, DataError
from penstock.trace.chunks import Chunk, ChunkReader, ChunkWriter, Format, damaged
from penstock.trace.schema import SPAN, GroupIds, Spans
from penstock.trace.summary import Summary
from penstock.trace.trace import JSON, Trace

_FORMAT = Format(b"PENTRACE", 2, "a trace", "that a loader wrote with trace=", "content")
_DROPPED, _COUNT = struct.Struct("<Q"), struct.Struct("<I")
_SPANS, _IDS, _IDS_32, _NAMES, _SUMS, _SLOWEST, _END = (
    b"SPAN", b"IDS ", b"ID32", b"NAME", b"SUMS", b"SLOW", b"DONE",
)  # fmt: skip
_VERSION = 1
#: Bounds what a crash within one append can lose, and what a reader holds at once: 4 MiB.
_CHUNK_SPANS = 65_536
#: More than any run takes, and few enough that sums of them are finite.
_MOST_SECONDS = 1e12
#: What a trace's file takes at most, besides what is staged.
MOST_BYTES = 56 << 20
#: Environment variable by which `penstock watch` names the folder that loaders and stores inside write their traces to.
RUN_FOLDER = "PENSTOCK_RUN"
_of_process = itertools.count()
_NO_IDS: GroupIds = MappingProxyType({})
T = TypeVar("T")


class TraceWriter:
    """Writes a trace as it happens.

    Every `append` has reached the operating system when it returns, so a killed process loses nothing of it;
    `close` also forces the file to the disk. Leaving a `with` block by an exception closes the file without
    its end mark: such a trace is not complete. Used by one thread at a time. An existing file is replaced.
    """

    def __init__(
        self, path: str | os.PathLike[str], meta: Mapping[str, JSON], most_bytes: int = MOST_BYTES
    ) -> None:
        """Create the file and write its header.

        most_bytes: that spans, ids and names take, before sums take the place of the older half: see `turn`.
        Raises: ConfigError when JSON cannot say `meta`; OSError when the file cannot be made.
        """
        self._chunks = ChunkWriter(path, _FORMAT, meta)
        self._half_bytes = most_bytes // 2
        #: Where the half begins that is being written, and the chunks (tag, payload) to replace all before it by.
        self._begin = self._chunks.offset
        self._before: list[tuple[bytes, bytes]] | None = None
        self._can_turn = self._chunks.is_regular
        self._dropped = 0
        self._is_ended = False
        self._wide, self._narrow = _Scratch(), _Scratch()

    def append(self, spans: Spans, dropped: int = 0, ids: GroupIds = _NO_IDS) -> None:
        """Write spans, in the order given.

        dropped: how many spans were lost so far, as `Recorder.dropped` counts them. A trace that misses some
            does not read as complete.
        ids: of groups that these spans or later ones are of.
        Raises: ClosedError after close; ConfigError for an array of another dtype; OSError when the disk does not take
        them, after which the trace is closed and readable up to its last intact chunk.
        """
        self._check_open()
        if spans.dtype != SPAN:
            raise ConfigError(
                f"spans are {spans.dtype}; a trace file holds penstock.trace.SPAN: convert them"
            )
        for tag, parts in _chunks_of(spans, ids, self._wide, self._narrow):
            self._chunks.write(tag, *parts)
        self._dropped = max(self._dropped, dropped)

    def name(
        self,
        samples: Mapping[int, str] | None = None,
        hosts: Mapping[int, str] | None = None,
        choices: Mapping[int, str] | None = None,
    ) -> None:
        """Write what samples are called, on which host ranks run, and what they have chosen by measurement.

        Raises: ClosedError after close; OSError as `append`.
        """
        self._check_open()
        for chunk in _names(samples or {}, hosts or {}, choices or {}):
            self._chunks.write(*chunk)

    @property
    def is_turn_due(self) -> bool:
        """Whether half of what the file may take was written since the last turn."""
        return self._can_turn and self._chunks.offset - self._begin >= self._half_bytes

    def turn(
        self,
        summary: Summary,
        waiting: Spans,
        ids: GroupIds = _NO_IDS,
        names: Mapping[int, str] | None = None,
        hosts: Mapping[int, str] | None = None,
        choices: Mapping[int, str] | None = None,
    ) -> None:
        """Begin the next half, and leave out what was written before the half that ends.

        summary: of all spans that were appended but those waiting, which later ones belong to.
        ids, names, hosts, choices: that later spans may need and that were written before.
        Raises: ClosedError after close; OSError as `append`.
        """
        self._check_open()
        if self._before is not None:
            self._chunks.restart(self._before, self._begin)
        self._begin = self._chunks.offset
        self._before = [
            (_SUMS, summary.to_bytes()),
            (_SLOWEST, summary.slowest.tobytes()),
            *_names(names or {}, hosts or {}, choices or {}),
            *((tag, b"".join(parts)) for tag, parts in _chunks_of(waiting, ids, self._wide, self._narrow)),
        ]

    def close(self) -> None:
        """Mark the end and force the file to the disk. Twice is harmless."""
        if not self._chunks.is_closed:
            if not self._is_ended:
                # Beforehand: a second mark, after a Ctrl-C in here, would read as damage.
                self._is_ended = True
                self._chunks.write(_END, _DROPPED.pack(self._dropped))
            self._chunks.close(sync=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        else:
            self._chunks.close(sync=False)

    def _check_open(self) -> None:
        if self._chunks.is_closed:
            raise ClosedError(
                f"{self._chunks.path} is closed; a trace takes spans until then: open another file"
            )


def check_writable(trace: str | os.PathLike[str]) -> None:
    """Write nothing yet. Raises: DataError if no trace can be written there, as far as can be seen."""
    try:
        path = Path(trace)
        path.parent.stat()
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not os.access(path if os.access(path, os.F_OK) else path.parent, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    except (OSError, TypeError, ValueError) as error:
        raise not_written(trace, error) from error


def not_written(trace: str | os.PathLike[str], error: Exception) -> DataError:
    """Return what to raise where a trace cannot be written."""
    return DataError(f"trace is {trace!r}, which cannot be written: {error}")


def path_in_run() -> Path | None:
    """Return the path of a new file in the run of `penstock watch` that this process is part of; None without one."""
    folder = os.environ.get(RUN_FOLDER)
    if not folder or not os.path.isdir(folder):
        return None
    return Path(folder) / f"{os.uname().nodename}-{os.getpid()}-{next(_of_process)}.trace"


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a trace file, one that breaks off included: its spans up to the last intact chunk.

    Of groups whose samples the plan tells, which the file does not name, see `penstock.plan.recorded`.

    Memory: what the trace takes, and twice a chunk of at most 4 MiB.
    Raises: FormatError, naming file and offset, when it is no trace, breaks off within its header,
    is of another version, or is damaged; OSError when it cannot be read.
    """
    spans: Spans = np.empty(0, SPAN)
    count = 0
    ids: dict[tuple[int, int], NDArray[np.int64]] = {}

    def keep(chunks: ChunkReader, chunk: Chunk) -> None:
        nonlocal spans, count
        if chunk.tag != _SPANS:
            ids.update(_ids_of(chunk))
            return
        part = _spans_of(chunk)
        if count + part.size > spans.size:
            # As many as the rest of the file can hold: it is read into one array.
            left = min(chunks.size - chunk.offset, max(MOST_BYTES, len(chunk.payload)))
            larger = np.empty(count + left // SPAN.itemsize, SPAN)
            larger[:count] = spans[:count]
            spans = larger
        spans[count : count + part.size] = part
        count += part.size

    outline = _outline_of(path, keep)
    return replace(outline, spans=spans[:count], ids=ids)


def read_outline(path: str | os.PathLike[str]) -> Trace:
    """Read what a trace file has in addition to its spans and the ids of groups. Raises: as `read_trace`."""
    return _outline_of(path, lambda chunks, chunk: None)


def spans_in(path: str | os.PathLike[str]) -> Iterator[Spans]:
    """Yield the spans of a trace file, as they were written: at most 65,536 at once. Raises: as `read_trace`."""
    return _each(path, (_SPANS,), _spans_of)


def ids_in(path: str | os.PathLike[str]) -> Iterator[GroupIds]:
    """Yield which samples the groups of a trace file are, as they were written. Raises: as `read_trace`."""
    return _each(path, (_IDS, _IDS_32), lambda chunk: dict(_ids_of(chunk)))


def _each(path: str | os.PathLike[str], tags: tuple[bytes, ...], read: Callable[[Chunk], T]) -> Iterator[T]:
    with ChunkReader(path, _FORMAT, _END) as chunks:
        for chunk in _known(chunks, tags):
            with _naming(path, chunk):
                found = read(chunk)
            yield found


def _outline_of(path: str | os.PathLike[str], keep: Callable[[ChunkReader, Chunk], None]) -> Trace:
    """Return a trace without spans and ids, and give the chunks that have these to `keep`."""
    dropped = 0
    summary, slowest = Summary(), np.empty(0, SPAN)
    names: dict[str, dict[int, str]] = {"samples": {}, "ranks": {}, "choices": {}}
    with ChunkReader(path, _FORMAT, _END) as chunks:
        for chunk in _known(chunks):
            with _naming(path, chunk):
                match chunk.tag:
                    case b"NAME":
                        for which, new in json.loads(chunk.payload).items():
                            names.setdefault(which, {}).update(
                                (int(number), str(name)) for number, name in new.items()
                            )
                    case b"SUMS":
                        summary = Summary.from_bytes(chunk.payload, slowest)
                    case b"SLOW":
                        slowest = _spans_of(chunk)
                        summary = Summary(summary.spans, summary.epochs, slowest)
                    case b"DONE":
                        (dropped,) = _DROPPED.unpack(chunk.payload)
                    case b"SPAN" | b"IDS " | b"ID32":
                        keep(chunks, chunk)
    return Trace(
        np.empty(0, SPAN),
        chunks.meta,
        is_complete=chunks.is_ended and not dropped,
        left_out=summary,
        names=names["samples"],
        hosts=names["ranks"],
        choices=names["choices"],
    )


def _known(chunks: ChunkReader, tags: tuple[bytes, ...] = ()) -> Iterator[Chunk]:
    """Yield the chunks that this version knows. tags: those alone."""
    return (chunk for chunk in chunks if chunk.version == _VERSION and (not tags or chunk.tag in tags))


@contextmanager
def _naming(path: str | os.PathLike[str], chunk: Chunk) -> Iterator[None]:
    """Raise what a chunk that is not as it should be leads to as FormatError."""
    try:
        yield
    except (ValueError, AttributeError, TypeError, RecursionError, struct.error) as reason:
        raise damaged(path, chunk.offset, f"its chunk {chunk.tag!r} cannot be read ({reason})") from reason


#: Arrays that are larger are not kept.
_MOST_SCRATCH_BYTES = 8 << 20


class _Scratch:
    """Memory that is used again: for a large array, getting it anew takes ten times as long as filling it."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)

    def array(self, items: int, dtype: str) -> NDArray[Any]:
        """Return an array, whose items the next one takes the place of."""
        nbytes = items * np.dtype(dtype).itemsize
        if nbytes > _MOST_SCRATCH_BYTES:
            return np.empty(items, dtype)
        if self._bytes.size < nbytes:
            self._bytes = np.empty(nbytes, np.uint8)
        return self._bytes[:nbytes].view(dtype)


def _chunks_of(
    spans: Spans, ids: GroupIds, wide: _Scratch, narrow: _Scratch
) -> Iterator[tuple[bytes, tuple[bytes | memoryview, ...]]]:
    """Yield the tags of chunks and the parts of what they hold, which is valid until the next one."""
    if ids:
        # Before the spans: where a file is cut between them, no span misses its ids.
        flows = np.array([flow for _, flow in ids], "<u8")
        ranks = np.array([rank for rank, _ in ids], "<u4")
        counts = np.array([of_group.size for of_group in ids.values()], "<u4")
        every = wide.array(int(counts.sum(dtype=np.int64)), "<i8")
        np.concatenate(list(ids.values()), out=every)
        fit = every.view("<u8").max(initial=0) < 2**32  # one below 0 is far above that
        if fit:
            low = narrow.array(every.size, "<u4")
            np.copyto(low, every, casting="unsafe")
        parts = (flows, ranks, counts, low if fit else every)
        yield _IDS_32 if fit else _IDS, (_COUNT.pack(len(ids)), *map(_bytes_of, parts))
    for first in range(0, spans.size, _CHUNK_SPANS):
        yield _SPANS, (_bytes_of(np.ascontiguousarray(spans[first : first + _CHUNK_SPANS])),)


def _bytes_of(array: NDArray[Any]) -> memoryview:
    """Return the bytes of a contiguous array, without a copy."""
    return array.view(np.uint8).data


def _names(
    samples: Mapping[int, str], hosts: Mapping[int, str], choices: Mapping[int, str]
) -> Iterator[tuple[bytes, bytes]]:
    said = {
        which: {str(number): name for number, name in names.items()}
        for which, names in (("samples", samples), ("ranks", hosts), ("choices", choices))
        if names
    }
    if said:
        yield _NAMES, json.dumps(said).encode()


def _spans_of(chunk: Chunk) -> Spans:
    """Return the spans of a chunk. Raises: ValueError where they are none."""
    spans: Spans = np.frombuffer(chunk.payload, SPAN)
    for name in ("start", "end"):
        # Not-a-number is not below anything, so it is refused, too.
        if not (np.abs(spans[name]) < _MOST_SECONDS).all():
            raise ValueError(f"a span has no time as its {name}")
    return spans


def _ids_of(chunk: Chunk) -> Iterator[tuple[tuple[int, int], NDArray[np.int64]]]:
    """Return (rank, flow) and ids of the groups in a chunk. Raises: ValueError, struct.error where there are none."""
    (groups,) = _COUNT.unpack_from(chunk.payload)
    flows = np.frombuffer(chunk.payload, "<u8", groups, _COUNT.size)
    ranks, counts = np.frombuffer(chunk.payload, "<u4", 2 * groups, _COUNT.size + 8 * groups).reshape(
        2, groups
    )
    of_ids = "<u4" if chunk.tag == _IDS_32 else "<i8"
    ids = np.frombuffer(chunk.payload, of_ids, offset=_COUNT.size + 16 * groups).astype(np.int64)
    if int(counts.sum(dtype=np.int64)) != ids.size:
        raise ValueError(f"{ids.size} ids came with counts of {int(counts.sum(dtype=np.int64))}")
    keys = zip(ranks.tolist(), flows.tolist(), strict=True)
    return zip(keys, np.split(ids, np.cumsum(counts[:-1], dtype=np.int64)), strict=True)
