"""Append-only files of checked chunks, which the formats of this package are made of.

    file    = prelude JSON chunk*
    prelude = magic, 8 bytes · version u32 · length of JSON u32 · CRC of JSON u32 · CRC of all these u32
    JSON    = the run's meta, UTF-8; a byte 0xNN of a file name that is not UTF-8 stands in it as U+DCNN
    chunk   = tag, 4 bytes · version u32 · length of payload u32 · CRC of payload u32 · CRC of all these u32 · payload

CRC is zlib's CRC-32; numbers are little-endian. Which tags there are, in which versions, and which one marks the end,
is the format's to say. As lengths have a checksum of their own, a cut cannot be mistaken for damage, nor damage for
a cut: what stands before a cut is intact.
"""

from __future__ import annotations

import json
import os
import stat
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Self

from penstock.errors import ConfigError, FormatError
from penstock.trace.trace import JSON

#: By how a file begins: what to do with it instead.
_HINTS = {
    b"PENBLOCK": "; it is a recording of block references, which penstock trace blocks --import reads",
    b"PENTRACE": "; it is a trace, which penstock trace reads",
    b"PENWATCH": "; it is a record of devices: give penstock report the folder that it is in",
}
_PRELUDE = struct.Struct("<8sIII")
_CHUNK = struct.Struct("<4sIII")
_CHECKSUM = struct.Struct("<I")
_PIECE_BYTES = 1 << 20


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
    """An intact chunk and where in the file it begins."""

    tag: bytes
    version: int
    payload: bytes
    offset: int


class ChunkWriter:
    """Writes a file of chunks; every one has reached the operating system when `write` returns.

    Used by one thread at a time. An existing file is replaced.
    """

    def __init__(self, path: str | os.PathLike[str], form: Format, meta: Mapping[str, JSON]) -> None:
        """Create the file and write its header.

        Raises: ConfigError when JSON cannot say `meta`; OSError when the file cannot be made, and is not there then.
        """
        self.path = Path(path)
        try:
            document = json.dumps(dict(meta), sort_keys=True, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as reason:
            raise ConfigError(f"meta of {self.path} is not JSON ({reason}): give plain values") from reason
        text = document.encode("utf-8", "surrogatepass")
        self._file = self.path.open("wb", buffering=0)
        self._header = _checked(_PRELUDE.pack(form.magic, form.version, len(text), zlib.crc32(text))) + text
        #: Bytes written so far.
        self.offset = 0
        try:
            self._write(self._header)
        except OSError:
            if self.path.is_file():  # without its header it is none
                self.path.unlink(missing_ok=True)
            raise

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be written any more."""
        return self._file.closed

    @property
    def is_regular(self) -> bool:
        """Whether this is a file on a disk, not a pipe or a device."""
        return stat.S_ISREG(os.fstat(self._file.fileno()).st_mode)

    def write(self, tag: bytes, *payload: bytes | memoryview, version: int = 1) -> None:
        """Append a chunk. payload: its parts, of bytes; joining them here would take longer than writing them.

        Raises: OSError when the disk does not take it, after which the file is closed and readable up to its
        last intact chunk.
        """
        self._write(_head(tag, payload, version), *payload)

    def restart(self, chunks: Iterable[tuple[bytes, bytes]], keep_from: int) -> None:
        """Replace the file by one of the same header, other chunks, and what stands in it from an offset on.

        chunks: (tag, payload).
        Who reads meanwhile reads one of the two. Not forced to the disk: if power is lost soon after, both may be lost.
        Raises: OSError when the disk does not take it; the file is then as it was before, and closed.
        """
        # The file that a symbolic link points to is replaced; the link stays a link.
        path = Path(os.path.realpath(self.path))
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
        try:
            new = unfinished.open("wb", buffering=0)
            try:
                written = _write_all(new, self._header)
                for tag, payload in chunks:
                    written += _write_all(new, _head(tag, (payload,), 1), payload)
                with path.open("rb") as old:
                    old.seek(keep_from)
                    while part := old.read(_PIECE_BYTES):
                        written += _write_all(new, part)
                unfinished.replace(path)
            finally:
                # Asked of the disk: Ctrl-C may come right before or after the replacement.
                if unfinished.exists():
                    unfinished.unlink()
                    new.close()
                else:
                    self._file.close()
                    self._file, self.offset = new, written
        except OSError:
            self._file.close()
            raise

    def close(self, *, sync: bool) -> None:
        """Close the file, with `sync` once it is on the disk. Twice is harmless."""
        if not self._file.closed:
            try:
                if sync and self.is_regular:
                    os.fsync(self._file.fileno())
            finally:
                self._file.close()

    def _write(self, *parts: bytes | memoryview) -> None:
        try:
            self.offset += _write_all(self._file, *parts)
        except OSError:
            # Whatever were written after a chunk that is cut short would be read as damage.
            self._file.close()
            raise


class ChunkReader:
    """Reads a file of chunks one by one, one that breaks off included: those before the cut.

    Holds one chunk at a time. What is appended to the file after it was opened is not read.
    """

    def __init__(self, path: str | os.PathLike[str], form: Format, end: bytes) -> None:
        """Open the file and read its header.

        end: tag of the chunk that ends a file.
        Raises: FormatError, naming file and offset, when it is of another format or version, or breaks off within its
            header; OSError when it cannot be read.
        """
        self._path, self._form, self._end = path, form, end
        self._file = open(path, "rb")  # noqa: SIM115  (closed by `__exit__`)
        try:
            status = os.fstat(self._file.fileno())
            #: Bytes of the file; of a pipe, more than there will be.
            self.size = status.st_size if stat.S_ISREG(status.st_mode) else 1 << 62
            self.meta = self._read_header()
        except BaseException:
            self._file.close()
            raise
        #: Whether the chunk that ends a file was read.
        self.is_ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[Chunk]:
        """Read on.

        Raises: FormatError, naming file and offset, when a chunk is damaged or something follows the end.
        """
        while not self.is_ended:
            offset = self._offset
            head = self._file.read(_CHUNK.size)
            checksum = self._file.read(_CHECKSUM.size)
            if len(checksum) < _CHECKSUM.size:
                return
            if _checksum_of(checksum) != zlib.crc32(head):
                raise damaged(self._path, offset, "the checksum of a chunk's head does not match")
            tag, version, length, expected = _CHUNK.unpack(head)
            self._offset += _CHUNK.size + _CHECKSUM.size + length
            # Asked beforehand: nobody allocates what a file merely claims to have.
            if self._offset > self.size:
                return
            payload = self._file.read(length)
            if len(payload) < length:
                return
            if zlib.crc32(payload) != expected:
                raise damaged(
                    self._path, offset, f"the checksum of a chunk's {self._form.content} does not match"
                )
            if tag == self._end:
                self.is_ended = True
                if self._file.read(1):
                    raise damaged(self._path, self._offset, "bytes follow its end")
            yield Chunk(tag, version, payload, offset)

    def _read_header(self) -> dict[str, JSON]:
        path, form, start = self._path, self._form, _PRELUDE.size + _CHECKSUM.size
        prelude = self._file.read(start)
        if not prelude.startswith(form.magic[: len(prelude)]) or not prelude:
            hint = _HINTS.get(prelude[: len(form.magic)], "")
            raise FormatError(
                f"{path} is not {form.what}: it does not begin with {form.magic.decode()}; "
                f"give a file {form.written_by}{hint}"
            )
        if len(prelude) < start:
            raise _cut_header(path, len(prelude))
        if _checksum_of(prelude[_PRELUDE.size :]) != zlib.crc32(prelude[: _PRELUDE.size]):
            raise damaged(path, 0, "the checksum of its prelude does not match")
        _, version, length, checksum = _PRELUDE.unpack_from(prelude)
        if version != form.version:
            raise FormatError(
                f"{path} is {form.what} of version {version} (offset 8); this Penstock reads version {form.version}: "
                "read it with the Penstock that wrote it"
            )
        if start + length > self.size:
            raise _cut_header(path, self.size)
        text = self._file.read(length)
        if len(text) < length:
            raise _cut_header(path, start + len(text))
        if zlib.crc32(text) != checksum:
            raise damaged(path, start, "the checksum of its meta does not match")
        try:
            meta: dict[str, JSON] = json.loads(text)
        except (ValueError, RecursionError) as reason:
            raise damaged(path, start, f"its meta is no JSON ({reason})") from None
        if not isinstance(meta, dict):
            raise damaged(path, start, f"its meta is no JSON object, but {type(meta).__name__}")
        self._offset = start + length
        return meta


def damaged(path: str | os.PathLike[str], offset: int, what: str) -> FormatError:
    """Return the error that says what is wrong where."""
    return FormatError(
        f"{path} is damaged at offset {offset}: {what}; restore it from a copy or record it again"
    )


def _cut_header(path: str | os.PathLike[str], offset: int) -> FormatError:
    return FormatError(f"{path} breaks off at offset {offset}, within its header: nothing was recorded")


def _write_all(file: FileIO, *parts: bytes | memoryview) -> int:
    """Write parts one after the other, in one call where the system takes them all; return how many bytes they are."""
    left = [memoryview(part) for part in parts if part]
    while left:
        written = os.writev(file.fileno(), left)
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if written:
            left[0] = left[0][written:]
    return sum(map(len, parts))


def _head(tag: bytes, payload: Sequence[bytes | memoryview], version: int) -> bytes:
    checksum = 0
    for part in payload:
        checksum = zlib.crc32(part, checksum)
    return _checked(_CHUNK.pack(tag, version, sum(map(len, payload)), checksum))


def _checked(head: bytes) -> bytes:
    return head + _CHECKSUM.pack(zlib.crc32(head))


def _checksum_of(data: bytes) -> int:
    (checksum,) = _CHECKSUM.unpack(data)
    assert isinstance(checksum, int), "an unsigned integer was unpacked"
    return checksum
