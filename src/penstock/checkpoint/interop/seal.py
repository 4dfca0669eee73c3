"""Checksums next to other people's checkpoints, so that a changed bit is found before it is trained on.

A seal is a file of JSON: of each file of the checkpoint the name, the size, and the xxh3-128 of each of its chunks; its
last line is the checksum of the lines above. It finds damage, not forgery: who can change the checkpoint can seal it
anew.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal, TypeAlias

import numpy as np
import xxhash

from penstock.checkpoint.interop.safetensors_files import parse_header
from penstock.checkpoint.state.fields import excerpt, expect, integer, matched
from penstock.checkpoint.tiers.durable import whole_file
from penstock.checkpoint.tiers.local import LocalReader
from penstock.errors import ConfigError, DataError, FormatError
from penstock.units import format_count, format_names

#: Beside a file, after its name; in a folder, alone.
SUFFIX = ".penstock-seal.json"
CHUNK_BYTES = 4 << 20
_FORMAT, _VERSION = "penstock seal", 1
_LEAST_CHUNK_BYTES, _LARGEST = 1 << 12, 1 << 62
_MOST_SEAL_BYTES = 1 << 30
_DIGEST = re.compile(r"[0-9a-f]{32}")

Wrong: TypeAlias = Literal["missing", "extra", "resized", "changed", "unreadable"]


@dataclass(frozen=True, slots=True)
class Sealed:
    """A file of a sealed checkpoint. name: below its folder, with "/". digests: of each chunk, hexadecimal."""

    name: str
    nbytes: int
    digests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Seal:
    """What a checkpoint was when it was sealed. path: of the seal."""

    path: Path
    chunk_bytes: int
    files: tuple[Sealed, ...]

    @property
    def nbytes(self) -> int:
        """Return the bytes of all files."""
        return sum(file.nbytes for file in self.files)


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with a file.

    begin, end: the bytes that are not as they were sealed, whole chunks of them; 0, 0 where that says nothing.
    tensors: names of those that have such bytes, where the file's format says so.
    """

    file: str
    wrong: Wrong
    why: str
    begin: int = 0
    end: int = 0
    tensors: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return a line for people."""
        return f"{self.file}: {self.why}"


@dataclass(frozen=True, slots=True)
class Report:
    """What checking a seal found. faults: in the order of the files; none if all is as it was sealed."""

    seal: Seal
    faults: tuple[Fault, ...]

    @property
    def is_intact(self) -> bool:
        """Return whether nothing is missing, added or changed."""
        return not self.faults


def seal_path(path: str | Path) -> Path:
    """Return where the seal of a checkpoint is."""
    path = Path(path)
    return path / SUFFIX if path.is_dir() else path.with_name(path.name + SUFFIX)


def seal(path: str | Path, *, overwrite: bool = False) -> Seal:
    """Write the checksums of a checkpoint next to it: of a file, or of all files in a folder and the folders below.

    overwrite: whether a seal that is there is written anew. It says nothing about what happened to the files before.
    Raises: ConfigError if there is a seal already, or nothing to seal; DataError naming a file that cannot be read, or
        is no ordinary file; FileNotFoundError.
    """
    path = Path(path)
    target = seal_path(path)
    if target.exists() and not overwrite:
        raise ConfigError(
            f"{path} is sealed already, by {target.name}: check it, or seal it anew (--overwrite; overwrite=True)"
        )
    base = path if path.is_dir() else path.parent
    names = list(_names_of(path))
    if not names:
        raise ConfigError(f"{path} has no files to seal")
    sealed = Seal(target, CHUNK_BYTES, tuple(_sealed(base / name, name) for name in names))
    with whole_file(target) as file:
        file.write(_encoded(sealed))
    return sealed


def check_seal(path: str | Path) -> Report:
    """Compare a checkpoint with its seal, reading all of it.

    Raises: ConfigError if it was never sealed; FormatError naming the seal if that is damaged or too new; DataError if
        the folder cannot be listed.
    """
    path = Path(path)
    target = seal_path(path)
    if not target.exists():
        if not path.exists():
            raise FileNotFoundError(f"{path} is not there, and neither is a seal of it")
        raise ConfigError(f"{path} has no seal, {target.name}: seal it while it is known to be good")
    sealed = read_seal(target)
    base = path if path.is_dir() else path.parent
    if not path.is_dir() and [file.name for file in sealed.files] != [path.name]:
        raise FormatError(
            f"{target} is not the seal of {path.name}: it was renamed, or is that of another file"
        )
    found = set(_names_of(path)) if path.exists() else set()
    faults = [
        fault for file in sealed.files if (fault := _fault(base, file, sealed.chunk_bytes, found)) is not None
    ]
    extra = sorted(found - {file.name for file in sealed.files})
    faults += [Fault(name, "extra", "it was not there when the seal was made") for name in extra]
    return Report(sealed, tuple(faults))


def read_seal(path: Path) -> Seal:
    """Read a seal, trusting nothing in it. Raises: FormatError naming it; FileNotFoundError, DataError."""
    try:
        if path.stat().st_size > _MOST_SEAL_BYTES:
            raise FormatError(f"{path} is larger than any seal")
        content = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    body, _, last = content.rstrip(b"\n").rpartition(b"\n")
    body += b"\n"
    if last.decode("ascii", "replace") != xxhash.xxh3_128_hexdigest(body):
        raise FormatError(
            f"{path} is damaged: its own checksum does not fit; seal anew what is known to be good"
        )
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        raise FormatError(f"{path} is no seal: it is not JSON") from None
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise FormatError(f"{path} is no seal of Penstock")
    if data.get("version") != _VERSION:
        raise FormatError(
            f"{path} is of version {excerpt(data.get('version'))}; this Penstock reads {_VERSION}: update it"
        )
    try:
        chunk_bytes = integer(data.get("chunk_bytes"), "chunk_bytes", _LEAST_CHUNK_BYTES, CHUNK_BYTES * 16)
        sealed = tuple(_decoded(entry, chunk_bytes) for entry in expect(list, data.get("files"), "files"))
        if not sealed:
            raise FormatError("it names no files")
        if len({file.name for file in sealed}) < len(sealed):
            raise FormatError("it names a file twice")
    except FormatError as error:
        raise FormatError(f"{path} says what cannot be: {error}") from None
    return Seal(path, chunk_bytes, sealed)


def _encoded(sealed: Seal) -> bytes:
    files = [
        {"name": file.name, "bytes": file.nbytes, "xxh3_128": list(file.digests)} for file in sealed.files
    ]
    data = {"format": _FORMAT, "version": _VERSION, "chunk_bytes": sealed.chunk_bytes, "files": files}
    body = json.dumps(data, indent=1).encode() + b"\n"
    return body + xxhash.xxh3_128_hexdigest(body).encode() + b"\n"


def _decoded(entry: object, chunk_bytes: int) -> Sealed:
    said = expect(dict, entry, "a file")
    if said.keys() != {"name", "bytes", "xxh3_128"}:
        raise FormatError("a file is not described by name, bytes and xxh3_128")
    name = expect(str, said["name"], "a file's name")
    if not _is_below(name):
        raise FormatError(f"the file {name[:200]!r} is not below its folder")
    nbytes = integer(said["bytes"], f"bytes of {name[:200]}", most=_LARGEST)
    listed = expect(list, said["xxh3_128"], f"xxh3_128 of {name[:200]}")
    digests = tuple(matched(_DIGEST, digest, f"a checksum of {name[:200]}") for digest in listed)
    if len(digests) != -(-nbytes // chunk_bytes):
        raise FormatError(f"{name[:200]} has {format_count(len(digests), 'checksum')} for {nbytes:,} bytes")
    return Sealed(name, nbytes, digests)


def _is_below(name: str) -> bool:
    parts = PurePosixPath(name).parts
    is_plain = bool(parts) and "\x00" not in name and not name.startswith("/") and ".." not in parts
    return is_plain and str(PurePosixPath(name)) == name and name != "."


def _names_of(path: Path) -> Iterator[str]:
    """Yield the names of a checkpoint's files, sorted, without seals. Raises: DataError, FileNotFoundError."""
    if not path.is_dir():
        if not path.exists():
            raise FileNotFoundError(f"{path} is not there")
        yield path.name
        return

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename or path} cannot be listed: {error.strerror}") from error

    names = []
    for folder, _, files in os.walk(path, onerror=refuse):
        below = Path(folder).relative_to(path)
        names += [(below / file).as_posix() for file in files if not file.endswith(SUFFIX)]
    # Without a seal that was being written when the process died.
    yield from sorted(name for name in names if not (SUFFIX in name and name.endswith(".unfinished")))


def _sealed(path: Path, name: str) -> Sealed:
    with closing(LocalReader(path)) as opened:
        return Sealed(name, opened.nbytes, tuple(_digests(opened, CHUNK_BYTES)))


def _fault(base: Path, file: Sealed, chunk_bytes: int, found: set[str]) -> Fault | None:
    if file.name not in found:
        return Fault(file.name, "missing", "it is not there any more")
    path = base / file.name
    try:
        with closing(LocalReader(path)) as opened:
            if opened.nbytes != file.nbytes:
                return Fault(
                    file.name,
                    "resized",
                    f"it has {opened.nbytes:,} bytes, and had {file.nbytes:,} when it was sealed",
                )
            found_now = enumerate(_digests(opened, chunk_bytes))
            changed = [number for number, digest in found_now if digest != file.digests[number]]
    except (DataError, FileNotFoundError) as error:
        return Fault(file.name, "unreadable", str(error))
    if not changed:
        return None
    begin, end = changed[0] * chunk_bytes, min((changed[-1] + 1) * chunk_bytes, file.nbytes)
    tensors = _tensors_in(path, changed, chunk_bytes)
    what = f"bytes {begin:,} to {end:,} are not as they were"
    if len(changed) < -(-(end - begin) // chunk_bytes):
        what = f"{format_count(len(changed), 'chunk')} within {what}"
    if tensors:
        what += f"; there lie {format_names(tensors)}"
    return Fault(file.name, "changed", what, begin, end, tensors)


def _tensors_in(path: Path, changed: list[int], chunk_bytes: int) -> tuple[str, ...]:
    """Return the tensors of which a chunk has a byte; none where the file's format does not say.

    A file of torch.save or of torch.distributed.checkpoint says so in a pickle, which is not read.
    """
    if path.suffix.lower() != ".safetensors":
        return ()
    try:
        header = parse_header(path, np.memmap(path, np.uint8, "r"))
    except (DataError, ValueError, OSError):
        return ("the header",)
    names = []
    first = header.begins[0] if header.begins else path.stat().st_size
    if any(number * chunk_bytes < first for number in changed):
        names.append("the header")
    for layout, begin in zip(header.layouts, header.begins, strict=True):
        if layout.nbytes:
            last = (begin + layout.nbytes - 1) // chunk_bytes
            if any(begin // chunk_bytes <= number <= last for number in changed):
                names.append(layout.name)
    return tuple(names)


def _digests(file: LocalReader, chunk_bytes: int) -> Iterator[str]:
    """Yield the digest of each chunk of a file. Raises: DataError naming the file."""
    space = np.empty(min(chunk_bytes, file.nbytes), np.uint8)
    for begin in range(0, file.nbytes, chunk_bytes):
        chunk = space[: min(chunk_bytes, file.nbytes - begin)]
        file.read_into(begin, chunk)
        yield xxhash.xxh3_128_hexdigest(chunk.data)
