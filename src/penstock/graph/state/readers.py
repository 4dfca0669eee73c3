"""Readers of records: TFRecord files, lines of text, records of a fixed length. Their position is state."""

from __future__ import annotations

import functools
import os
import struct
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.errors import printable
from penstock.graph.errors import CorruptError, OutOfRangeError
from penstock.graph.model.dtypes import Value
from penstock.graph.model.node import Node

_HEAD = struct.Struct("<QI")
_CHECKSUM = struct.Struct("<I")
_MASK = 0xA282EAD8


def masked_crc32c(data: bytes) -> int:
    """Return the checksum of a TFRecord file. Source: TensorFlow, `tensorflow/core/lib/hash/crc32c.h` (the mask)."""
    from penstock.graph.state._checksum_kernels import crc32c

    crc = int(crc32c(np.frombuffer(data, np.uint8), _table()))
    return ((crc >> 15 | crc << 17 & 0xFFFFFFFF) + _MASK) & 0xFFFFFFFF


@functools.cache
def _table() -> Any:
    from penstock.graph.state._checksum_kernels import crc32c_table

    return crc32c_table()


class Reader:
    """The records of files, one after the other; each goes to one run only."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._files = [os.fspath(file) for file in node.attr["files"]]
        self._lock = threading.Lock()
        #: Where the next record is: number of the file, byte, number of the record in it.
        self.position = (0, 0, 0)

    def read(self) -> Value:
        """Return the next record as a scalar of bytes.

        Raises: OutOfRangeError after the last; CorruptError, which names file, record and byte, where it is damaged.
        """
        with self._lock:
            place, offset, record = self.position
            while place < len(self._files):
                with open(self._files[place], "rb", buffering=1 << 16) as file:
                    file.seek(offset)
                    try:
                        found = self._next(file)
                    except CorruptError as error:
                        name = printable(self._files[place])
                        raise CorruptError(f"{name}: record {record} at byte {offset} {error}") from None
                    if found is not None:
                        self.position = (place, file.tell(), record + 1)
                        break
                place, offset, record = place + 1, 0, 0
                self.position = (place, offset, record)
            else:
                raise OutOfRangeError(f"there are no more records in {len(self._files)} files")
        return np.array(found, object)

    def state(self) -> Any:
        """Return the position as a snapshot holds it."""
        return list(self.position)

    def load(self, state: Any) -> None:
        """Go on from what `state` returned."""
        place, offset, record = state
        self.position = (int(place), int(offset), int(record))

    def _next(self, file: Any) -> bytes | None:
        """Return the next record, or None after the last. Raises: CorruptError saying what the record is."""
        raise AssertionError(f"{type(self).__name__} says how its records lie")


class TextLines(Reader):
    """Lines without their line feed; what follows the last line feed is a line, too, if there is any."""

    def _next(self, file: Any) -> bytes | None:
        line: bytes = file.readline()
        return line.removesuffix(b"\n") if line else None


class FixedRecords(Reader):
    """Records of `record_bytes`."""

    def _next(self, file: Any) -> bytes | None:
        size = self.node.attr["record_bytes"]
        data: bytes = file.read(size)
        if data and len(data) < size:
            raise CorruptError(f"is cut off: {len(data)} of {size} bytes")
        return data or None


class TFRecords(Reader):
    """Frames of a length, its checksum, the record, its checksum."""

    def _next(self, file: Any) -> bytes | None:
        head = file.read(_HEAD.size)
        if not head:
            return None
        if len(head) < _HEAD.size:
            raise CorruptError(f"is cut off: {len(head)} of {_HEAD.size} bytes of its head")
        length, checksum = _HEAD.unpack(head)
        if masked_crc32c(head[:8]) != checksum:
            raise CorruptError("has a damaged length: its checksum differs")
        left = os.fstat(file.fileno()).st_size - file.tell()
        if length + _CHECKSUM.size > left:
            raise CorruptError(
                f"has {length:,} bytes, and the file has {max(left - _CHECKSUM.size, 0):,} more"
            )
        data: bytes = file.read(length)
        (checksum,) = _CHECKSUM.unpack(file.read(_CHECKSUM.size))
        if masked_crc32c(data) != checksum:
            raise CorruptError("is damaged: its checksum differs")
        return data


_KINDS: dict[str, type[Reader]] = {
    "TFRecords": TFRecords,
    "TextLines": TextLines,
    "FixedRecords": FixedRecords,
}


def reader_of(node: Node) -> Reader:
    """Return the reader of a node, at its first record."""
    return _KINDS[node.op](node)


def write_tfrecords(path: str | os.PathLike[str], records: Sequence[bytes]) -> None:
    """Write a TFRecord file."""
    with open(path, "wb") as file:
        for record in records:
            length = struct.pack("<Q", len(record))
            file.write(length + _CHECKSUM.pack(masked_crc32c(length)))
            file.write(record + _CHECKSUM.pack(masked_crc32c(record)))
