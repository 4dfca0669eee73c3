"""Readers of records: TFRecord files, lines, rows of CSV, records of a fixed length. Their position is state."""

from __future__ import annotations

import csv
import io
import os
import struct
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from penstock.errors import ConfigError, printable
from penstock.graph.errors import CorruptError, OutOfRangeError
from penstock.graph.model.dtypes import FLOATS, Value, torch_dtype
from penstock.graph.model.node import Node

_HEAD = struct.Struct("<QI")
_CHECKSUM = struct.Struct("<I")
_MASK = 0xA282EAD8


def masked_crc32c(data: bytes) -> int:
    """Return the checksum of a TFRecord file. Source: TensorFlow, `tensorflow/core/lib/hash/crc32c.h` (the mask)."""
    try:
        import google_crc32c
    except ImportError as error:
        raise ConfigError(
            "checksums of TFRecord files need google-crc32c, which is not installed: pip install 'penstock[torch]'"
        ) from error
    crc: int = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17 & 0xFFFFFFFF) + _MASK) & 0xFFFFFFFF


class Reader:
    """The records of files, one after the other; each is given to one run only."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._files = [os.fspath(file) for file in node.attr["files"]]
        self._lock = threading.Lock()
        #: Where the next record is: number of the file, byte, number of the record in it.
        self.position = (0, 0, 0)

    def read(self) -> Value | tuple[Value, ...]:
        """Return the next record: a scalar of bytes; of CSV, one for each column.

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
        return found

    def state(self) -> Any:
        """Return the position as a snapshot holds it."""
        return list(self.position)

    def load(self, state: Any) -> None:
        """Continue from what `state` returned."""
        place, offset, record = state
        self.position = (int(place), int(offset), int(record))

    def _next(self, file: Any) -> Value | tuple[Value, ...] | None:
        """Return the next record, or None after the last. Raises: CorruptError saying what the record is."""
        data = self._data(file)
        return None if data is None else np.array(data, object)

    def _data(self, file: Any) -> bytes | None:
        raise AssertionError(f"{type(self).__name__} says how its records lie")


class TextLines(Reader):
    """Lines without their line feed; what follows the last line feed is a line, too, if there is any."""

    def _data(self, file: Any) -> bytes | None:
        line: bytes = file.readline()
        return line.removesuffix(b"\n") if line else None


class CSVRows(Reader):
    """Rows of comma-separated values, a scalar for each column; empty lines are passed over.

    Source: RFC 4180: a field in quotes may hold delimiters, line feeds and doubled quotes.
    """

    def _next(self, file: Any) -> Value | tuple[Value, ...] | None:
        if file.tell() == 0:
            for _ in range(self.node.attr.get("skip_lines", 0)):
                file.readline()
        text = b""
        while not text.strip(b"\r\n"):
            text = file.readline()
            if not text:
                return None
        while text.count(b'"') % 2:
            more = file.readline()
            if not more:
                raise CorruptError("has a quote that is not closed")
            text += more
        # Latin-1 keeps every byte as it is.
        rows = csv.reader(
            io.StringIO(text.decode("latin-1"), ""),
            delimiter=self.node.attr.get("delimiter", ","),
            strict=True,
        )
        try:
            (fields,) = rows
        except csv.Error as error:
            raise CorruptError(f"is no row of CSV: {error}") from None
        columns = self.node.attr["columns"]
        if len(fields) != len(columns):
            raise CorruptError(f"has {len(fields)} fields, and the node has {len(columns)} columns")
        values = [_field(*each) for each in zip(range(len(fields)), fields, columns, strict=True)]
        return values[0] if len(values) == 1 else tuple(values)


def _field(column: int, text: str, dtype: str) -> Value:
    if dtype == "bytes":
        return np.array(text.encode("latin-1"), object)
    try:
        return torch.tensor(float(text) if dtype in FLOATS else int(text), dtype=torch_dtype(dtype))
    except (ValueError, OverflowError, RuntimeError):
        raise CorruptError(f"has {printable(text)!r:.80} in column {column}, which is no {dtype}") from None


class FixedRecords(Reader):
    """Records of `record_bytes`."""

    def _data(self, file: Any) -> bytes | None:
        size = self.node.attr["record_bytes"]
        data: bytes = file.read(size)
        if data and len(data) < size:
            raise CorruptError(f"is cut off: {len(data)} of {size} bytes")
        return data or None


class TFRecords(Reader):
    """Frames of a length, its checksum, the record, its checksum."""

    def _data(self, file: Any) -> bytes | None:
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
    "CSVRows": CSVRows,
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
