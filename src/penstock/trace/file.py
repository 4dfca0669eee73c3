"""The file that keeps a trace: append-only, so that a run which dies leaves all it had written.

    file    = prelude JSON chunk* end?
    prelude = magic, 8 bytes · version u32 · length of JSON u32 · CRC of JSON u32 · CRC of all these u32
    JSON    = the run's meta, UTF-8
    chunk   = "SPAN" · length of payload u32 · CRC of payload u32 · CRC of all these u32 · payload
    end     = "DONE" · 8 u32 · CRC of payload u32 · CRC of all these u32 · spans dropped u64

The payload is whole spans as `penstock.trace.schema.SPAN` lays them out; CRC is zlib's CRC-32; numbers are
little-endian. A file without its end was cut off: what stands before the cut is whole. As lengths have a
checksum of their own, a cut cannot be mistaken for damage, nor damage for a cut.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from penstock.errors import ConfigError, FormatError
from penstock.trace.schema import SPAN, Spans
from penstock.trace.trace import JSON, Trace

MAGIC = b"PENTRACE"
VERSION = 1
_PRELUDE = struct.Struct("<8sIII")
_CHUNK = struct.Struct("<4sII")
_CHECKSUM = struct.Struct("<I")
_DROPPED = struct.Struct("<Q")
_SPANS, _END = b"SPAN", b"DONE"
#: Bounds what a crash within one append can lose, and what a reader checks at once: 3 MiB.
_CHUNK_SPANS = 65_536


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
        self._path = Path(path)
        try:
            text = json.dumps(dict(meta), sort_keys=True, ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError) as reason:
            raise ConfigError(f"meta of {self._path} is not JSON ({reason}): give plain values") from reason
        self._dropped = 0
        self._is_ended = False
        self._file = self._path.open("wb", buffering=0)
        self._write(_checked(_PRELUDE.pack(MAGIC, VERSION, len(text), zlib.crc32(text))) + text)

    def append(self, spans: Spans, dropped: int = 0) -> None:
        """Write spans, in the order given.

        dropped: how many spans were lost so far, as `Recorder.dropped` counts them. A trace that misses some
            does not read as complete.
        Raises: ConfigError after close or for an array of another dtype; OSError when the disk does not take
        them, after which the trace is closed and readable up to its last whole chunk.
        """
        if self._file.closed:
            raise ConfigError(f"{self._path} is closed; a trace takes spans until then: open another file")
        if spans.dtype != SPAN:
            raise ConfigError(
                f"spans are {spans.dtype}; a trace file holds penstock.trace.SPAN: convert them"
            )
        for first in range(0, spans.size, _CHUNK_SPANS):
            self._write_chunk(_SPANS, spans[first : first + _CHUNK_SPANS].tobytes())
        self._dropped = max(self._dropped, dropped)

    def close(self) -> None:
        """Mark the end and force the file to the disk. Twice is harmless."""
        if not self._file.closed:
            if not self._is_ended:
                # Beforehand: a second mark, after a Ctrl-C in here, would read as damage.
                self._is_ended = True
                self._write_chunk(_END, _DROPPED.pack(self._dropped))
            os.fsync(self._file.fileno())
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._file.close()

    def _write_chunk(self, tag: bytes, payload: bytes) -> None:
        self._write(_checked(_CHUNK.pack(tag, len(payload), zlib.crc32(payload))) + payload)

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            # Whatever were written after a chunk that is cut short would be read as damage.
            self._file.close()
            raise


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a trace file, one that breaks off included: its spans up to the last whole chunk.

    Raises: FormatError, naming file and offset, when it is no trace, breaks off within its header,
    is of another version, or is damaged; OSError when it cannot be read.
    """
    data = Path(path).read_bytes()
    meta, offset = _read_header(path, data)
    spans: list[Spans] = [np.empty(0, SPAN)]
    is_ended, dropped = False, 0
    while not is_ended and offset + _CHUNK.size + _CHECKSUM.size <= len(data):
        head = data[offset : offset + _CHUNK.size]
        if _checksum_at(data, offset + _CHUNK.size) != zlib.crc32(head):
            raise _damaged(path, offset, "the checksum of a chunk's head does not match")
        tag, length, checksum = _CHUNK.unpack(head)
        start = offset + _CHUNK.size + _CHECKSUM.size
        payload = data[start : start + length]
        if len(payload) < length:
            break
        if zlib.crc32(payload) != checksum:
            raise _damaged(path, offset, "the checksum of a chunk's spans does not match")
        if tag == _SPANS and not length % SPAN.itemsize:
            spans.append(np.frombuffer(payload, SPAN))
        elif tag == _END and length == _DROPPED.size:
            (dropped,) = _DROPPED.unpack(payload)
            is_ended = True
        else:
            raise _damaged(path, offset, f"version 1 knows no chunk {tag!r} of {length} bytes")
        offset = start + length
    if is_ended and offset < len(data):
        raise _damaged(path, offset, f"{len(data) - offset} bytes follow its end")
    return Trace(np.concatenate(spans), meta, is_complete=is_ended and not dropped)


def _read_header(path: str | os.PathLike[str], data: bytes) -> tuple[dict[str, JSON], int]:
    if not data.startswith(MAGIC[: len(data)]) or not data:
        raise FormatError(
            f"{path} is not a trace: it does not begin with {MAGIC!r}; give a file of TraceWriter"
        )
    start = _PRELUDE.size + _CHECKSUM.size
    if len(data) < start:
        raise FormatError(f"{path} breaks off at offset {len(data)}, within its header: nothing was recorded")
    if _checksum_at(data, _PRELUDE.size) != zlib.crc32(data[: _PRELUDE.size]):
        raise _damaged(path, 0, "the checksum of its prelude does not match")
    _, version, length, checksum = _PRELUDE.unpack_from(data)
    if version != VERSION:
        raise FormatError(
            f"{path} is a trace of version {version} (offset 8); this Penstock reads version {VERSION}: "
            "read it with the Penstock that wrote it"
        )
    text = data[start : start + length]
    if len(text) < length:
        raise FormatError(f"{path} breaks off at offset {len(data)}, within its header: nothing was recorded")
    if zlib.crc32(text) != checksum:
        raise _damaged(path, start, "the checksum of its meta does not match")
    meta: dict[str, JSON] = json.loads(text)
    return meta, start + length


def _checked(head: bytes) -> bytes:
    return head + _CHECKSUM.pack(zlib.crc32(head))


def _checksum_at(data: bytes, offset: int) -> int:
    (checksum,) = _CHECKSUM.unpack_from(data, offset)
    assert isinstance(checksum, int), "an unsigned integer was unpacked"
    return checksum


def _damaged(path: str | os.PathLike[str], offset: int, what: str) -> FormatError:
    return FormatError(
        f"{path} is damaged at offset {offset}: {what}; restore it from a copy or record it again"
    )
