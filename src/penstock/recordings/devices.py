"""What block devices, the network and a tree of processes did while a command ran: counters, sampled.

    file   = header (meta: columns, command, started) · chunk* · end?     as penstock.trace.chunks lays them out
    chunk  = "ROWS", zlib of int64[n, columns]: the first row as it is, the others as differences to the row before
    end    = "DONE", exit status i32

The first column is nanoseconds since the start. Counters only grow, so that a row may be left out: a file that has
grown to `MOST_BYTES` loses every other row of its older half. -1 stands for what was not there, such as a device that
vanished. What is not read for every row has the value read last, and "KIND:nanoseconds" says when: "tree:nanoseconds"
of all "tree:" counters.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.trace.chunks import ChunkReader, ChunkWriter, Format, damaged
from penstock.trace.trace import JSON

_FORMAT = Format(b"PENWATCH", 1, "a record of devices", "that penstock watch wrote", "rows")
_ROWS, _END, _STATUS = b"ROWS", b"DONE", struct.Struct("<i")
#: What a file takes, and what a chunk may unpack to.
MOST_BYTES, _MOST_CHUNK_BYTES, _CHUNK_ROWS = 16 << 20, 64 << 20, 4096
#: Its name in the folder of a run.
FILE = "devices.penwatch"
GONE = -1


@dataclass(frozen=True, slots=True, eq=False)
class DeviceRecord:
    """A record that was read.

    columns: names, the first "nanoseconds". rows: int64[n, columns]. exit_status: of the command; None where the record
    breaks off.
    """

    columns: tuple[str, ...]
    rows: NDArray[np.int64]
    meta: Mapping[str, JSON]
    exit_status: int | None

    @property
    def seconds(self) -> NDArray[np.float64]:
        """When each row was taken, float64[n], since the start."""
        return (self.rows[:, 0] * 1e-9).astype(np.float64)

    def read_at(self, kind: str) -> NDArray[np.int64]:
        """Return the rows for which the counters of a kind were read, int64[k]. kind: such as "tree"."""
        when = f"{kind}:nanoseconds"
        if when not in self.columns:
            return np.arange(self.rows.shape[0])
        is_new = np.diff(self.rows[:, self.columns.index(when)]) != 0
        return np.flatnonzero(np.concatenate([[True], is_new])[: self.rows.shape[0]])

    def growth(self, column: str) -> NDArray[np.int64]:
        """Return by how much a counter grew from each row to the next, int64[n - 1]; 0 where it was gone."""
        values = self.rows[:, self.columns.index(column)]
        known = (values[1:] >= 0) & (values[:-1] >= 0)
        # A counter that shrinks began anew: a device that was taken off and put back.
        return np.where(known, np.maximum(np.diff(values), 0), 0)

    def rate(self, column: str) -> NDArray[np.float64]:
        """Return by how much a counter grew in a second, float64[n - 1], between rows; 0 where it was gone."""
        rates: NDArray[np.float64] = self.growth(column) / np.maximum(np.diff(self.seconds), 1e-9)
        return rates

    def grown(self, column: str) -> int:
        """Return by how much a counter grew in all."""
        return int(self.growth(column).sum())


class DeviceWriter:
    """Writes a record row by row; what `append` was given has reached the operating system when it returns."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        columns: Sequence[str],
        meta: Mapping[str, JSON],
        most_bytes: int = MOST_BYTES,
    ) -> None:
        """Create the file. Raises: OSError when it cannot be made."""
        self._chunks = ChunkWriter(path, _FORMAT, {**meta, "columns": list(columns)})
        self._most_bytes = most_bytes

    def append(self, rows: NDArray[np.int64]) -> None:
        """Write int64[n, columns]. Raises: OSError when the disk does not take them; the file is closed then."""
        if rows.size:
            self._chunks.write(_ROWS, _packed(rows))
        if self._chunks.offset > self._most_bytes and self._chunks.is_regular:
            every = read_devices(self._chunks.path).rows
            half = every.shape[0] // 2
            thinned = np.concatenate([every[:half:2], every[half:]])
            parts = range(0, thinned.shape[0], _CHUNK_ROWS)
            chunks = [(_ROWS, _packed(thinned[first : first + _CHUNK_ROWS])) for first in parts]
            self._chunks.restart(chunks, keep_from=self._chunks.offset)

    def close(self, exit_status: int) -> None:
        """Mark the end. Raises: as `append`. Twice is harmless."""
        if not self._chunks.is_closed:
            self._chunks.write(_END, _STATUS.pack(exit_status))
            self._chunks.close(sync=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._chunks.close(sync=False)


def _packed(rows: NDArray[np.int64]) -> bytes:
    return zlib.compress(
        np.diff(rows, axis=0, prepend=np.zeros((1, rows.shape[1]), np.int64)).astype("<i8").tobytes(), 6
    )


def read_devices(path: str | os.PathLike[str]) -> DeviceRecord:
    """Read a record, one that breaks off included: its rows up to the last intact chunk.

    path: of the file, or of the folder of a run.
    Raises: FormatError, naming file and offset, when it is none or damaged; OSError when it cannot be read.
    """
    file = Path(path) / FILE if Path(path).is_dir() else Path(path)
    parts: list[NDArray[np.int64]] = []
    exit_status = None
    with ChunkReader(file, _FORMAT, _END) as chunks:
        columns = chunks.meta.get("columns")
        if not isinstance(columns, list) or not columns or columns[0] != "nanoseconds":
            raise damaged(file, 0, "its meta names no columns")
        for chunk in chunks:
            if chunk.version != 1:
                continue
            try:
                if chunk.tag == _ROWS:
                    unpacker = zlib.decompressobj()
                    data = unpacker.decompress(chunk.payload, _MOST_CHUNK_BYTES)
                    if not unpacker.eof:
                        raise ValueError("it is cut, or unpacks to too much")
                    parts.append(np.cumsum(np.frombuffer(data, "<i8").reshape(-1, len(columns)), axis=0))
                elif chunk.tag == _END:
                    (exit_status,) = _STATUS.unpack(chunk.payload)
            except (ValueError, zlib.error, struct.error) as reason:
                raise damaged(file, chunk.offset, f"its rows cannot be read ({reason})") from reason
    rows = np.concatenate(parts) if parts else np.zeros((0, len(columns)), np.int64)
    return DeviceRecord(tuple(map(str, columns)), rows, chunks.meta, exit_status)


def check_new(folder: Path) -> None:
    """Refuse a folder that has the record of another run. Raises: ConfigError."""
    if (folder / FILE).exists():
        raise ConfigError(f"{folder} has the record of another run: name another folder, or remove that one")
