"""The file that keeps a trace: append-only, so that a run which dies leaves all it had written.

    file = header (the run's meta) · chunk* · end?     as penstock.trace.chunks lays them out
    chunk = "SPAN", whole spans as `penstock.trace.schema.SPAN` lays them out
    end   = "DONE", spans dropped u64

A file without its end was cut off: what stands before the cut is whole.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from types import TracebackType
from typing import Self

import numpy as np

from penstock.errors import ConfigError
from penstock.trace.chunks import ChunkWriter, Format, damaged, read_chunks
from penstock.trace.schema import SPAN, Spans
from penstock.trace.trace import JSON, Trace

_FORMAT = Format(b"PENTRACE", 2, "a trace", "that a loader wrote with trace=", "spans")
_DROPPED = struct.Struct("<Q")
_SPANS, _END = b"SPAN", b"DONE"
#: Bounds what a crash within one append can lose, and what a reader checks at once: 4 MiB.
_CHUNK_SPANS = 65_536
#: More than any run takes, and few enough that sums of them are finite.
_MOST_SECONDS = 1e12


class TraceWriter:
    """Writes a trace as it happens.

    Every `append` has reached the operating system when it returns, so a killed process loses nothing of it;
    `close` also forces the file to the disk. Leaving a `with` block by an exception closes the file without
    its end mark: such a trace is not complete. Used by one thread at a time. An existing file is replaced.
    """

    def __init__(self, path: str | os.PathLike[str], meta: Mapping[str, JSON]) -> None:
        """Create the file and write its header.

        Raises: ConfigError when JSON cannot say `meta`; OSError when the file cannot be made.
        """
        self._chunks = ChunkWriter(path, _FORMAT, meta)
        self._dropped = 0
        self._is_ended = False

    def append(self, spans: Spans, dropped: int = 0) -> None:
        """Write spans, in the order given.

        dropped: how many spans were lost so far, as `Recorder.dropped` counts them. A trace that misses some
            does not read as complete.
        Raises: ConfigError after close or for an array of another dtype; OSError when the disk does not take
        them, after which the trace is closed and readable up to its last whole chunk.
        """
        if self._chunks.is_closed:
            raise ConfigError(
                f"{self._chunks.path} is closed; a trace takes spans until then: open another file"
            )
        if spans.dtype != SPAN:
            raise ConfigError(
                f"spans are {spans.dtype}; a trace file holds penstock.trace.SPAN: convert them"
            )
        for first in range(0, spans.size, _CHUNK_SPANS):
            self._chunks.write(_SPANS, spans[first : first + _CHUNK_SPANS].tobytes())
        self._dropped = max(self._dropped, dropped)

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._chunks.close(sync=False)


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a trace file, one that breaks off included: its spans up to the last whole chunk.

    Raises: FormatError, naming file and offset, when it is no trace, breaks off within its header,
    is of another version, or is damaged; OSError when it cannot be read.
    """
    meta, chunks, is_ended = read_chunks(path, _FORMAT, _END)
    spans: list[Spans] = [np.empty(0, SPAN)]
    dropped = 0
    for chunk in chunks:
        if chunk.tag == _SPANS and not len(chunk.payload) % SPAN.itemsize:
            part = np.frombuffer(chunk.payload, SPAN)
            for name in ("start", "end"):
                # Not-a-number is not below anything, so it is refused, too.
                if not (np.abs(part[name]) < _MOST_SECONDS).all():
                    raise damaged(path, chunk.offset, f"a span has no time as its {name}")
            spans.append(part)
        elif chunk.tag == _END and len(chunk.payload) == _DROPPED.size:
            (dropped,) = _DROPPED.unpack(chunk.payload)
        else:
            raise damaged(
                path, chunk.offset, f"version 2 knows no chunk {chunk.tag!r} of {len(chunk.payload)} bytes"
            )
    return Trace(np.concatenate(spans), meta, is_complete=is_ended and not dropped)
