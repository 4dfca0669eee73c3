"""Where the members of a tar file lie: its headers are read, and not what lies between them.

Python's `tarfile` takes 14 to 34 us a member, a read of a header 1 us. So plain headers are read here, and it reads
what else there is: long names, PAX headers that name a member or its size, sizes of 8 GiB and more.
"""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from penstock.errors import DataError
from penstock.store.files import unreadable

#: Reads so many bytes from a place on, as `os.pread` does of a file.
Pread = Callable[[int, int], bytes]

_BLOCK = 512
_NOTHING = bytes(_BLOCK)
#: Read at a time: a header, and the small members behind it with theirs.
_WINDOW = 4096
#: No header behind which longer names stand is trusted with more.
_MOST_HEADER_BYTES = 1 << 20
#: Headers whose checksums are compared at a time.
_HEADERS_AT_ONCE = 1024
_CHECKSUM = slice(148, 156)

#: Types of members: regular files; what has no content (links, devices, folders, pipes); a PAX header of one member.
_REGULAR, _WITHOUT_CONTENT, _PAX = b"0\0" + b"7", b"123456", ord("x")
_LINKS = b"12"
#: What a PAX header may say that matters: ` key=` begins each entry behind its length.
_PAX_MATTERS = (b" path=", b" size=", b" GNU.sparse", b" hdrcharset=")

#: How compressed files begin, and what unpacks them to a tar.
_COMPRESSED = (
    (b"\x1f\x8b", "gzip", "gunzip -k"),
    (b"BZh", "bzip2", "bunzip2 -k"),
    (b"\xfd7zXZ\0", "xz", "unxz -k"),
    (b"\x28\xb5\x2f\xfd", "zstd", "zstd -d"),
    (b"\x04\x22\x4d\x18", "lz4", "lz4 -d"),
    (b"PK\x03\x04", "zip", "unzip, then tar"),
)


@dataclass
class Members:
    """The regular files of a tar, in its order.

    names: as bytes. offsets, sizes: of their content. links: how many links were left out. has_end: whether the archive
    has its end mark.
    """

    names: list[bytes] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    links: int = 0
    has_end: bool = False


def read_members(
    path: str, pread: Pread, file_bytes: int, found: Callable[[int], None] = lambda count: None
) -> Members:
    """Return the members of a tar file.

    path: for errors. pread: reads it. file_bytes: its size. found: called now and then with how many more members
        were found.
    Raises: DataError if the file is empty, compressed, no tar, damaged or cut off.
    """
    if file_bytes == 0:
        raise DataError(f"{path} is empty (0 bytes): remove it or write it again")
    try:
        return _Reader(path, pread, file_bytes, found).read()
    except DataError:
        raise
    except OSError as error:
        raise unreadable(path, error) from error


class _Reader:
    def __init__(self, path: str, pread: Pread, file_bytes: int, found: Callable[[int], None]) -> None:
        self._path, self._pread, self._file_bytes = path, pread, file_bytes
        self._found = found
        self._members = Members()
        #: Plain headers whose checksums were not compared yet, and where they are.
        self._headers: list[bytes] = []
        self._places: list[int] = []
        self._tar: tarfile.TarFile | None = None

    def read(self) -> Members:
        members, headers, places = self._members, self._headers, self._places
        at, window, begin = 0, b"", 0
        while True:
            within = at - begin
            if within + _BLOCK > len(window):
                window, begin, within = self._pread(_WINDOW, at), at, 0
                if len(window) < _BLOCK:
                    break
            header = window[within : within + _BLOCK]
            if not header[0] and header == _NOTHING:
                members.has_end = True
                break
            kind = header[156]
            try:
                size = int(header[124:135], 8)
            except ValueError:
                size = -1
            if size < 0 or (kind not in _REGULAR and kind not in _WITHOUT_CONTENT and kind != _PAX):
                at = self._odd(at, size)
                continue
            if kind == _PAX:
                if self._matters(at, size):
                    at = self._odd(at, size)
                    continue
            elif kind in _REGULAR:
                members.names.append(_name_of(header))
                members.offsets.append(at + _BLOCK)
                members.sizes.append(size)
            else:
                members.links += kind in _LINKS
                size = 0
            headers.append(header)
            places.append(at)
            at = self._behind(at + _BLOCK, size)
            if len(headers) >= _HEADERS_AT_ONCE or not places[0]:
                self._compare()
        self._compare()
        if not at and not members.has_end:
            raise self._damaged(0)
        if not members.has_end and window:
            raise self._cut_off(at + _BLOCK)
        return members

    def _behind(self, begin: int, size: int) -> int:
        """Return where the block behind a content begins."""
        if begin + size > self._file_bytes:
            self._compare()
            raise self._cut_off(begin + size)
        return begin + size + -size % _BLOCK

    def _matters(self, at: int, size: int) -> bool:
        """Return whether a PAX header says more than times, owners and the like."""
        if not 0 <= size <= _MOST_HEADER_BYTES:
            raise self._damaged(at)
        content = self._pread(size, at + _BLOCK)
        return any(key in content for key in _PAX_MATTERS)

    def _odd(self, at: int, size: int) -> int:
        """Have Python read a member whose header is not plain; return where the next one begins."""
        self._compare()
        try:
            if self._tar is None:
                self._tar = tarfile.TarFile(fileobj=_Blocks(self._pread))
            assert self._tar.fileobj is not None
            self._tar.fileobj.seek(at)
            self._tar.offset = at
            member = tarfile.TarInfo.fromtarfile(self._tar)
        except (tarfile.TarError, ValueError, OverflowError, RecursionError, KeyError) as error:
            raise self._damaged(at) from error
        behind: int = self._tar.offset
        if behind <= at or member.size < 0:
            raise self._damaged(at)
        name = os.fsencode(member.name)
        if member.issparse():
            raise DataError(
                f"{self._path}: {os.fsdecode(name)} is stored as a sparse file: write the tar anew without --sparse"
            )
        if member.isreg():
            if b"\0" in name:
                raise self._damaged(at)
            self._behind(member.offset_data, member.size)
            self._members.names.append(name)
            self._members.offsets.append(member.offset_data)
            self._members.sizes.append(member.size)
        elif member.islnk() or member.issym():
            self._members.links += 1
        if behind > self._file_bytes + _BLOCK:
            raise self._cut_off(behind)
        return behind

    def _compare(self) -> None:
        """Compare the checksums of the plain headers since the last time."""
        if not self._headers:
            return
        blocks = np.frombuffer(b"".join(self._headers), np.uint8).reshape(-1, _BLOCK)
        spaces = 8 * ord(" ")
        sums = blocks.sum(1, np.int64) - blocks[:, _CHECKSUM].sum(1, np.int64) + spaces
        for header, place, total in zip(self._headers, self._places, sums.tolist(), strict=True):
            try:
                is_right = int(header[_CHECKSUM].rstrip(b" \0"), 8) == total
            except ValueError:
                is_right = False
            if not is_right:
                try:  # old programs added signed bytes
                    tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
                except tarfile.TarError as error:
                    raise self._damaged(place) from error
        self._found(len(self._headers))
        self._headers.clear()
        self._places.clear()

    def _damaged(self, at: int) -> DataError:
        if at:
            return DataError(
                f"{self._path} is damaged: at byte {at:,} begins no header of a tar: copy or write it again"
            )
        front = self._pread(8, 0)
        for sign, name, command in _COMPRESSED:
            if front.startswith(sign):
                return DataError(
                    f"{self._path} is compressed ({name}), so that no sample can be read without all before it: unpack "
                    f"it once, by `{command} {os.path.basename(self._path)}`; pictures are compressed themselves"
                )
        return DataError(f"{self._path} is no tar file: take it out, or write it again")

    def _cut_off(self, end: int) -> DataError:
        names = self._members.names
        last = f"its last member is {os.fsdecode(names[-1])}, and " if names else ""
        return DataError(
            f"{self._path} is cut off: {last}it ends at byte {self._file_bytes:,} of at least {end:,}: copy or write "
            "it again"
        )


def _name_of(header: bytes) -> bytes:
    end = header.find(0, 0, 100)
    name = header[: end if end >= 0 else 100]
    return header[345:500].partition(b"\0")[0] + b"/" + name if header[345] else name


class _Blocks(io.RawIOBase):
    """A file as `tarfile` reads it, which may ask for no more than a long header has."""

    def __init__(self, pread: Pread) -> None:
        self._pread, self._at = pread, 0

    def read(self, size: int = -1) -> bytes:
        content = self._pread(min(max(size, 0), _MOST_HEADER_BYTES), self._at)
        self._at += len(content)
        return content

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset
        return offset

    def tell(self) -> int:
        return self._at
