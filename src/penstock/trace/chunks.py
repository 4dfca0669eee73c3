"""Append-only files of checked chunks, which the formats of this package are made of.

    file    = prelude JSON chunk*
    prelude = magic, 8 bytes · version u32 · length of JSON u32 · CRC of JSON u32 · CRC of all these u32
    JSON    = the run's meta, UTF-8; a byte 0xNN of a file name that is not UTF-8 stands in it as U+DCNN
    chunk   = tag, 4 bytes · length of payload u32 · CRC of payload u32 · CRC of all these u32 · payload

CRC is zlib's CRC-32; numbers are little-endian. Which tags there are, and which one marks the end, is the
format's to say. As lengths have a checksum of their own, a cut cannot be mistaken for damage, nor damage for
a cut: what stands before a cut is whole.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ConfigError, FormatError
from penstock.trace.trace import JSON

#: By how a file begins: what to do with it instead.
_HINTS = {
    b"PENBLOCK": "; it is a recording of block references, which penstock trace blocks --import reads",
    b"PENTRACE": "; it is a trace, which penstock trace reads",
}
_PRELUDE = struct.Struct("<8sIII")
_CHUNK = struct.Struct("<4sII")
_CHECKSUM = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Format:
    """What the files of a format begin with."""

    #: 8 bytes.
    magic: bytes
    version: int
    #: What such a file is, for messages: "a trace".
    what: str
    #: Who writes such files, for messages.
    written_by: str
    #: What its chunks hold, for messages.
    content: str


@dataclass(frozen=True, slots=True)
class Chunk:
    """A whole chunk and where in the file it begins."""

    tag: bytes
    payload: bytes
    offset: int


class ChunkWriter:
    """Writes a file of chunks; every one has reached the operating system when `write` returns.

    Used by one thread at a time. An existing file is replaced.
    """

    def __init__(self, path: str | os.PathLike[str], form: Format, meta: Mapping[str, JSON]) -> None:
        """Create the file and write its header.

        Raises: ConfigError when JSON cannot say `meta`; OSError when the file cannot be made.
        """
        self.path = Path(path)
        try:
            told = json.dumps(dict(meta), sort_keys=True, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as reason:
            raise ConfigError(f"meta of {self.path} is not JSON ({reason}): give plain values") from reason
        text = told.encode("utf-8", "surrogatepass")
        self._file = self.path.open("wb", buffering=0)
        self._write(_checked(_PRELUDE.pack(form.magic, form.version, len(text), zlib.crc32(text))) + text)

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be written any more."""
        return self._file.closed

    def write(self, tag: bytes, payload: bytes) -> None:
        """Append a chunk.

        Raises: OSError when the disk does not take it, after which the file is closed and readable up to its
        last whole chunk.
        """
        self._write(_checked(_CHUNK.pack(tag, len(payload), zlib.crc32(payload))) + payload)

    def close(self, *, sync: bool) -> None:
        """Close the file, with `sync` once it is on the disk. Twice is harmless."""
        if not self._file.closed:
            try:
                if sync:
                    os.fsync(self._file.fileno())
            finally:
                self._file.close()

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            # Whatever were written after a chunk that is cut short would be read as damage.
            self._file.close()
            raise


def read_chunks(
    path: str | os.PathLike[str], form: Format, end: bytes
) -> tuple[dict[str, JSON], list[Chunk], bool]:
    """Read a file of chunks, one that breaks off included: its chunks up to the cut.

    end: tag of the chunk that ends a file.
    Returns: meta, the chunks, and whether the last of them is the end.
    Raises: FormatError, naming file and offset, when it is of another format or version, breaks off within
    its header, or is damaged; OSError when it cannot be read.
    """
    data = Path(path).read_bytes()
    meta, offset = _read_header(path, data, form)
    chunks: list[Chunk] = []
    while offset + _CHUNK.size + _CHECKSUM.size <= len(data):
        head = data[offset : offset + _CHUNK.size]
        if _checksum_at(data, offset + _CHUNK.size) != zlib.crc32(head):
            raise damaged(path, offset, "the checksum of a chunk's head does not match")
        tag, length, checksum = _CHUNK.unpack(head)
        start = offset + _CHUNK.size + _CHECKSUM.size
        payload = data[start : start + length]
        if len(payload) < length:
            break
        if zlib.crc32(payload) != checksum:
            raise damaged(path, offset, f"the checksum of a chunk's {form.content} does not match")
        chunks.append(Chunk(tag, payload, offset))
        offset = start + length
        if tag == end:
            if offset < len(data):
                raise damaged(path, offset, f"{len(data) - offset} bytes follow its end")
            return meta, chunks, True
    return meta, chunks, False


def damaged(path: str | os.PathLike[str], offset: int, what: str) -> FormatError:
    """Return the error that says what is wrong where."""
    return FormatError(
        f"{path} is damaged at offset {offset}: {what}; restore it from a copy or record it again"
    )


def _read_header(path: str | os.PathLike[str], data: bytes, form: Format) -> tuple[dict[str, JSON], int]:
    if not data.startswith(form.magic[: len(data)]) or not data:
        hint = _HINTS.get(data[: len(form.magic)], "")
        raise FormatError(
            f"{path} is not {form.what}: it does not begin with {form.magic.decode()}; give a file {form.written_by}"
            f"{hint}"
        )
    start = _PRELUDE.size + _CHECKSUM.size
    if len(data) < start:
        raise FormatError(f"{path} breaks off at offset {len(data)}, within its header: nothing was recorded")
    if _checksum_at(data, _PRELUDE.size) != zlib.crc32(data[: _PRELUDE.size]):
        raise damaged(path, 0, "the checksum of its prelude does not match")
    _, version, length, checksum = _PRELUDE.unpack_from(data)
    if version != form.version:
        raise FormatError(
            f"{path} is {form.what} of version {version} (offset 8); this Penstock reads version {form.version}: "
            "read it with the Penstock that wrote it"
        )
    text = data[start : start + length]
    if len(text) < length:
        raise FormatError(f"{path} breaks off at offset {len(data)}, within its header: nothing was recorded")
    if zlib.crc32(text) != checksum:
        raise damaged(path, start, "the checksum of its meta does not match")
    try:
        meta: dict[str, JSON] = json.loads(text)
    except (ValueError, RecursionError) as reason:
        raise damaged(path, start, f"its meta is no JSON ({reason})") from None
    if not isinstance(meta, dict):
        raise damaged(path, start, f"its meta is no JSON object, but {type(meta).__name__}")
    return meta, start + length


def _checked(head: bytes) -> bytes:
    return head + _CHECKSUM.pack(zlib.crc32(head))


def _checksum_at(data: bytes, offset: int) -> int:
    (checksum,) = _CHECKSUM.unpack_from(data, offset)
    assert isinstance(checksum, int), "an unsigned integer was unpacked"
    return checksum
