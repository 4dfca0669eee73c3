"""Access sequences: which object was asked for, one request after the other, and the files that keep them.

The files are those of libCacheSim (Yang et al., https://libcachesim.com), so that its traces can be replayed here and
ours there:

    txt            one object per line
    csv            a line per request with columns for object, time, size; separated by comma, tab, bar or semicolon
    oracleGeneral  records of 24 bytes, little-endian: uint32 time, uint64 object, uint32 size, int64 number of
                   the object's next request, the file's first being 1, -1 for none
    vscsi          block requests of VMware, records of 32 (version 1) or 40 bytes (version 2); read only
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.errors import ConfigError, DataError, FormatError
from penstock.files import write_whole

Ids = NDArray[np.int64]

#: Formats of files, as `read_references` knows them.
FORMATS = ("txt", "csv", "oracleGeneral", "vscsi")

_ORACLE = np.dtype([("time", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")])
_VSCSI = {
    1: np.dtype(
        [
            ("number", "<u4"),
            ("size", "<u4"),
            ("parts", "<u4"),
            ("command", "<u2"),
            ("version", "<u2"),
            ("id", "<u8"),
            ("microseconds", "<u8"),
        ]
    ),
    2: np.dtype(
        [
            ("command", "<u2"),
            ("version", "<u2"),
            ("number", "<u4"),
            ("size", "<u4"),
            ("parts", "<u4"),
            ("id", "<u8"),
            ("microseconds", "<u8"),
            ("took", "<u8"),
        ]
    ),
}
#: 384 KiB at once.
_PIECE_RECORDS = 1 << 14
_ZSTD = b"\x28\xb5\x2f\xfd"
_SEPARATORS = ",\t|;"
_COLUMN_NAMES = {
    "id": ("id", "obj_id", "object", "object_id", "obj", "key", "block", "lbn", "sample"),
    "time": ("time", "timestamp", "clock_time", "seconds"),
    "size": ("size", "obj_size", "object_size", "size_bytes", "bytes", "len"),
}


@dataclass(frozen=True, slots=True, eq=False)
class References:
    """A string of requests.

    ids: int64[n], the object of each request. Ids from 2**63 on, which libCacheSim allows, appear as negative.
    seconds: int64[n], when each request came; the request's index where nobody knows.
    sizes_bytes: int64[n], size of each request's object; 1 where nobody knows.
    first_text: line and id of the first that is no integer, for which all were numbered; None if there is none.
    Raises: ConfigError for arrays of other shapes, and negative sizes.
    """

    ids: Ids
    seconds: Ids
    sizes_bytes: Ids
    first_text: tuple[int, str] | None = None

    def __post_init__(self) -> None:
        for name in ("ids", "seconds", "sizes_bytes"):
            values = getattr(self, name)
            if values.shape != (self.ids.size,) or values.dtype != np.int64:
                raise ConfigError(
                    f"{name} is {values.dtype}{list(values.shape)}; a string of {self.ids.size} requests needs "
                    f"int64[{self.ids.size}]"
                )
        if self.sizes_bytes.size and self.sizes_bytes.min() < 0:
            raise ConfigError(f"sizes_bytes has {self.sizes_bytes.min()}; a size is 0 or more")

    @classmethod
    def of(
        cls, ids: ArrayLike, *, seconds: ArrayLike | None = None, sizes_bytes: ArrayLike | None = None
    ) -> References:
        """Return a string of these objects, for example `plan.string(rank)`; what is left out is not known."""
        string = as_string(ids)
        return cls(
            string,
            np.arange(string.size) if seconds is None else np.asarray(seconds, np.int64),
            np.ones(string.size, np.int64) if sizes_bytes is None else np.asarray(sizes_bytes, np.int64),
        )

    def __len__(self) -> int:
        return self.ids.size


def as_string(references: ArrayLike) -> Ids:
    """Return references as int64[n].

    Raises: ConfigError unless they are integers in one dimension. Unsigned ids from 2**63 on wrap round, which keeps
    objects apart.
    """
    given = np.asarray(references)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise ConfigError(
            f"references are {given.dtype}{list(given.shape)}; a string is integers in one dimension: "
            "number the objects"
        )
    return np.ascontiguousarray(given.astype(np.int64, copy=False))


def number_objects(references: ArrayLike) -> tuple[Ids, int]:
    """Return the access sequence over small ids, and a bound on them: int64[n], each in [0, bound).

    Ids that are small already stay as they are; others are numbered by first appearance.
    """
    from penstock.recordings import _references_kernels as kernels

    string = as_string(references)
    if not string.size:
        return string, 0
    if string.min() >= 0 and string.max() < 2 * string.size:
        return string, int(string.max()) + 1
    ids = np.empty_like(string)
    return ids, kernels.number_objects(string, ids)


def next_uses(references: ArrayLike, *, never: int) -> Ids:
    """Return the index of the next request of each request's object: int64[n], `never` where there is none."""
    from penstock.recordings import _references_kernels as kernels

    return kernels.next_uses(*number_objects(references), never)


def read_references(
    path: str | os.PathLike[str], kind: str | None = None, *, columns: Sequence[str] | None = None
) -> References:
    """Read an access sequence.

    kind: of `FORMATS`; None guesses by the file's name: .txt, .csv, .vscsi, or "oracleGeneral" or .bin in it.
    columns: of a csv file, what each holds: "id", "time", "size", or "-" for none of these. None takes the names in
        the file's first line; without such a line, one column is the id, and three or more begin with time, id, size.
    Objects need not be numbers in text files; if one is not, all are numbered by first appearance.
    Times are cut to seconds. Requests of size 0 are kept (libCacheSim skips them by default).
    Raises: DataError if the file cannot be read; FormatError naming the line or record that is malformed; ConfigError
        for an unknown format, or a file compressed by zstd.
    """
    file = Path(path)
    name = kind or _guess_format(file)
    if name not in FORMATS:
        raise ConfigError(f"there is no trace format {name!r}; known are {', '.join(FORMATS)}")
    if columns is not None and name != "csv":
        raise ConfigError(f"columns are {','.join(columns)}; only csv files have columns, {file} is {name}")
    try:
        with file.open("rb") as source:
            is_compressed = source.read(len(_ZSTD)) == _ZSTD
        if is_compressed:
            raise ConfigError(f"{file} is compressed by zstd: decompress it first, zstd -d {file}")
        if name == "oracleGeneral":
            return _from_oracle(file)
        data = file.read_bytes()
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}") from error
    if name == "vscsi":
        return _from_vscsi(file, data)
    lines = _decoded(file, data).splitlines()
    return _from_txt(file, lines) if name == "txt" else _from_csv(file, lines, columns)


def write_references(path: str | os.PathLike[str], references: References) -> None:
    """Write an access sequence, complete or not at all.

    path: its name says the format: txt (objects alone), csv (time, id, size under a header) or oracleGeneral.
    Raises: ConfigError for another format, and times or sizes beyond the 32 bits that oracleGeneral has for them.
    """
    file = Path(path)
    name = _guess_format(file)
    ids = references.ids.view(np.uint64) if len(references) and references.ids.min() < 0 else references.ids
    if name == "txt":
        data = "".join(f"{each}\n" for each in ids.tolist()).encode()
    elif name == "csv":
        rows = zip(references.seconds.tolist(), ids.tolist(), references.sizes_bytes.tolist(), strict=True)
        data = ("time,id,size\n" + "".join(f"{time},{each},{size}\n" for time, each, size in rows)).encode()
    elif name == "oracleGeneral":
        data = _to_oracle(references)
    else:
        raise ConfigError(f"{name!r} is no trace format that is written; these are txt, csv, oracleGeneral")
    write_whole(file, data)


def _guess_format(file: Path) -> str:
    name = file.name.lower().removesuffix(".zst")
    for ending in ("txt", "csv", "vscsi"):
        if name.endswith(f".{ending}"):
            return ending
    if "oraclegeneral" in name or name.endswith(".bin"):
        return "oracleGeneral"
    raise ConfigError(f"{file} does not tell its format by its name: say which, of {', '.join(FORMATS)}")


def _to_oracle(references: References) -> bytes:
    for name in ("seconds", "sizes_bytes"):
        values = getattr(references, name)
        if values.size and not (values.min() >= 0 and values.max() < 2**32):
            raise ConfigError(
                f"{name} reach from {values.min()} to {values.max()}; oracleGeneral has 32 bits for them: write csv"
            )
    records = np.empty(len(references), _ORACLE)
    records["time"] = references.seconds
    records["id"] = references.ids.view(np.uint64)
    records["size"] = references.sizes_bytes
    following = next_uses(references.ids, never=-2)
    records["next"] = following + 1
    return records.tobytes()


def _from_oracle(file: Path) -> References:
    """Read in pieces that stay in the processor's cache while they are taken apart and checked."""
    record_bytes = _ORACLE.itemsize
    with file.open("rb", buffering=0) as source:
        whole, rest = divmod(os.fstat(source.fileno()).st_size, record_bytes)
        if rest:
            raise _cut_off(file, whole, rest, record_bytes)
        ids, seconds, sizes_bytes = (np.empty(whole, np.int64) for _ in range(3))
        buffer = bytearray(_PIECE_RECORDS * record_bytes)
        piece = np.frombuffer(buffer, _ORACLE)
        numbers = np.arange(_PIECE_RECORDS)
        begin = 0
        while begin < whole:
            read = source.readinto(memoryview(buffer)[: (whole - begin) * record_bytes]) or 0
            count, rest = divmod(read, record_bytes)
            if rest or not read:
                raise _cut_off(file, begin + count, rest, record_bytes)
            records = piece[:count]
            # Lenient by one: there are writers that count from 0.
            is_wrong = (records["next"] <= numbers[:count] + begin) & (records["next"] != -1)
            if is_wrong.any():
                wrong = int(is_wrong.argmax())
                raise FormatError(
                    f"{file}, record {begin + wrong}: its object's next request is said to be "
                    f"{records['next'][wrong]}, not after it: the file is damaged or not oracleGeneral"
                )
            end = begin + count
            ids.view(np.uint64)[begin:end] = records["id"]
            seconds[begin:end] = records["time"]
            sizes_bytes[begin:end] = records["size"]
            begin = end
    return References(ids, seconds, sizes_bytes)


def _from_vscsi(file: Path, data: bytes) -> References:
    for version, layout in ((2, _VSCSI[2]), (1, _VSCSI[1])):
        first = np.frombuffer(
            data[: len(data) // layout.itemsize * layout.itemsize][: 2 * layout.itemsize], layout
        )
        if first.size and (first["version"] >> 8 == version).all():
            break
    else:
        raise FormatError(
            f"{file}, record 0: its version is neither 1 nor 2: the file is damaged or not vscsi"
        )
    records = np.frombuffer(_whole_records(file, data, layout.itemsize), layout)
    is_wrong = records["version"] >> 8 != version
    if is_wrong.any():
        wrong = int(is_wrong.argmax())
        raise FormatError(
            f"{file}, record {wrong}: its version is {records['version'][wrong] >> 8}, the file's is {version}"
        )
    return References(
        records["id"].astype(np.uint64).view(np.int64),
        (records["microseconds"] // 1_000_000).astype(np.int64),
        records["size"].astype(np.int64),
    )


def _whole_records(file: Path, data: bytes, record_bytes: int) -> bytes:
    whole, rest = divmod(len(data), record_bytes)
    if rest:
        raise _cut_off(file, whole, rest, record_bytes)
    return data


def _cut_off(file: Path, record: int, rest: int, record_bytes: int) -> FormatError:
    return FormatError(f"{file}, record {record}: cut off after {rest} of {record_bytes} bytes")


def _decoded(file: Path, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise FormatError(f"{file}, line {line}: not text in UTF-8: is it a binary format?") from error


def _from_txt(file: Path, lines: list[str]) -> References:
    objects: list[str] = []
    numbers: list[int] = []
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if len(words) > 1:
            raise FormatError(
                f"{file}, line {number}: {line[:60]!r} has {len(words)} words; a line is one object"
            )
        objects += words  # an empty line is no request
        numbers += [number] * len(words)
    ids, first_text = _numbered(objects, numbers)
    return replace(References.of(ids), first_text=first_text)


def _from_csv(file: Path, lines: list[str], columns: Sequence[str] | None) -> References:
    rows = _rows(file, lines)
    try:
        first_line, first = next(rows)
    except StopIteration:
        return References.of(np.empty(0, np.int64))
    named = _header(first)
    chosen = _columns(file, len(first), named if columns is None else columns)
    id_column, time_column, size_column = (
        chosen.index(name) if name in chosen else None for name in ("id", "time", "size")
    )
    assert id_column is not None, "checked by _columns"
    objects: list[str] = []
    numbers: list[int] = []
    seconds: list[int] = []
    sizes: list[int] = []

    def add(number: int, row: list[str]) -> None:
        if len(row) < len(chosen) or not row[id_column].strip():
            raise FormatError(
                f"{file}, line {number}: {','.join(row)[:60]!r} has {len(row)} columns; needed are {','.join(chosen)}"
            )
        objects.append(row[id_column].strip())
        numbers.append(number)
        seconds.append(
            len(seconds) if time_column is None else _whole(file, number, "time", row[time_column])
        )
        sizes.append(1 if size_column is None else _whole(file, number, "size", row[size_column]))

    if not named:
        add(first_line, first)
    for number, row in rows:
        add(number, row)
    ids, first_text = _numbered(objects, numbers)
    return replace(References.of(ids, seconds=seconds, sizes_bytes=sizes), first_text=first_text)


def _rows(file: Path, lines: list[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows that are not empty, with their lines' numbers."""
    separator = max(_SEPARATORS, key=lambda each: lines[0].count(each)) if lines else ","
    reader = csv.reader(lines, delimiter=separator, skipinitialspace=True)
    try:
        for row in reader:
            if any(cell.strip() for cell in row):
                yield reader.line_num, row
    except csv.Error as error:
        raise FormatError(f"{file}, line {reader.line_num}: {error}") from error


def _header(row: Sequence[str]) -> list[str] | None:
    """Return what each column of a header is, "-" for unknown names; None if no cell is the name of an id."""
    names = [cell.strip().lstrip("#").strip().lower() for cell in row]
    known = [next((what for what, those in _COLUMN_NAMES.items() if name in those), "-") for name in names]
    return known if "id" in known else None


def _columns(file: Path, count: int, given: Sequence[str] | None) -> list[str]:
    if given is None and count == 1:
        return ["id"]
    if given is None and count >= 3:
        return ["time", "id", "size"]
    if given is None:
        raise ConfigError(f"{file} has {count} columns and no header: say what they are, for example id,size")
    chosen = [name.strip() for name in given]
    wrong = [name for name in chosen if name not in ("id", "time", "size", "-")]
    if wrong or chosen.count("id") != 1 or chosen.count("time") > 1 or chosen.count("size") > 1:
        raise ConfigError(
            f"columns are {','.join(chosen)}; each is id (once), time or size (at most once), or - for none of these"
        )
    return chosen


def _whole(file: Path, line: int, what: str, text: str) -> int:
    """Return a number cut to an integer."""
    try:
        value = int(text) if text.strip().lstrip("-").isdigit() else int(float(text))
    except (ValueError, OverflowError):
        value = -1
    if not 0 <= value < 2**63:
        raise FormatError(
            f"{file}, line {line}: its {what} is {text.strip()[:40]!r}; it is a number of at least 0"
        )
    return value


def _numbered(objects: list[str], lines: list[int]) -> tuple[Ids, tuple[int, str] | None]:
    """Return the objects' own numbers if all are integers of 64 bits, else numbers by first appearance.

    lines: of each object. Returns with the numbers the line and text of the first that has no such number.
    """
    numbers = []
    for text in objects:
        try:
            number = int(text)
        except ValueError:
            break
        if not -(2**63) <= number < 2**64:
            break
        numbers.append(number)
    else:
        return np.array([each - 2**64 if each >= 2**63 else each for each in numbers], np.int64), None
    by_name: dict[str, int] = {}
    return np.array([by_name.setdefault(each, len(by_name)) for each in objects], np.int64), (
        lines[len(numbers)],
        objects[len(numbers)],
    )
