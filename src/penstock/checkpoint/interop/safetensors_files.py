"""The safetensors format: 8 bytes with the length of the header, the header in JSON, the tensors' bytes back to back.

Written tensor by tensor, so that a state need not be in memory; read by mapping the file into memory.
Source: Hugging Face's safetensors (README of huggingface/safetensors, "Format"), which the tests compare with.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from penstock.checkpoint.state.dtypes import DTYPES, DType
from penstock.checkpoint.state.tensors import Bytes, Layout
from penstock.checkpoint.tiers.durable import whole_file
from penstock.errors import ConfigError, DataError

#: What the reference implementation takes.
_MOST_HEADER_BYTES = 100_000_000
_MOST_DIMENSIONS = 64
#: No memory is set aside for pages that might be written to, so that a file larger than memory can be mapped.
_PRIVATE = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000)
_NAMES = {
    "BOOL": "bool",
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
} | {f"{kind[0].upper()}{bits}": f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}
_TYPES: dict[str, DType] = {name: DTYPES[own] for name, own in _NAMES.items()}
_NAME_OF = {own: name for name, own in _NAMES.items()}


class Entry(NamedTuple):
    """A tensor to write. read: returns its bytes, uint8[layout.nbytes], when it is its turn."""

    layout: Layout
    read: Callable[[], Bytes]


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of itself. layouts, begins: in the order of the bytes; begins count from the file's start."""

    metadata: Mapping[str, str]
    layouts: tuple[Layout, ...]
    begins: tuple[int, ...]


def header_of(entries: Sequence[Entry], metadata: Mapping[str, str]) -> tuple[bytes, list[Entry]]:
    """Return the bytes before the first tensor, and the tensors in the order in which they follow.

    Raises: ConfigError naming a tensor of a type that the format does not have.
    """
    # The largest numbers first, as the reference does, so that all begin at multiples of their size.
    ordered = sorted(entries, key=lambda entry: -entry.layout.dtype.item_bytes)
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for layout, _ in ordered:
        name = _NAME_OF.get(layout.dtype.name)
        if name is None:
            raise ConfigError(
                f"{layout.name} is of type {layout.dtype.name}, which safetensors has not: leave it out, or write "
                "a .pt file"
            )
        if layout.name == "__metadata__" or layout.name in header:
            raise ConfigError(
                f"{layout.name!r} cannot be the name of a tensor in a safetensors file: rename it"
            )
        end = offset + layout.nbytes
        header[layout.name] = {"dtype": name, "shape": list(layout.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _MOST_HEADER_BYTES:
        raise ConfigError(
            f"the header would have {len(text):,} bytes, and {_MOST_HEADER_BYTES:,} are the most there may be"
        )
    return len(text).to_bytes(8, "little") + text, ordered


def write_safetensors(path: Path, entries: Sequence[Entry], metadata: Mapping[str, str]) -> None:
    """Write a file, tensor by tensor; it appears once it is whole and durable.

    Raises: ConfigError as `header_of`; DataError naming the file; what an entry's `read` raises.
    """
    header, ordered = header_of(entries, metadata)
    with whole_file(path) as file:
        file.write(header)
        for entry in ordered:
            data = entry.read()
            assert data.nbytes == entry.layout.nbytes, f"{entry.layout.name} has another size than its layout"
            file.write(data.data)


def map_safetensors(path: Path) -> tuple[Header, dict[str, Bytes]]:
    """Map a file into memory: pages are read when they are used, and what is written to them stays in memory.

    Returns: the header, and by name the tensors' bytes.
    Raises: DataError naming the file if it is damaged or cannot be read; FileNotFoundError.
    """
    try:
        with open(path, "rb") as file:
            # An empty file cannot be mapped; it is damaged all the same.
            mapped = mmap.mmap(file.fileno(), 0, flags=_PRIVATE) if path.stat().st_size else b""
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    data = np.frombuffer(mapped, np.uint8)
    header = parse_header(path, data)
    return header, {
        layout.name: data[begin : begin + layout.nbytes]
        for layout, begin in zip(header.layouts, header.begins, strict=True)
    }


def parse_header(path: Path, data: Bytes) -> Header:
    """Read a file's header, checking that the tensors fill the rest of it.

    data: uint8[size of the file], of which the header is read.
    Raises: DataError naming the file.
    """
    nbytes = data.size
    length = int.from_bytes(data[:8].tobytes(), "little")
    if nbytes < 8 or length > min(_MOST_HEADER_BYTES, nbytes - 8):
        raise _damaged(path, f"its header of {length:,} bytes does not fit into {nbytes:,}")
    try:
        text = data[8 : 8 + length].tobytes().decode()
        header = json.loads(text, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its header is no JSON: {str(error)[:200]}") from None
    if not isinstance(header, dict):
        raise _damaged(path, "its header is no JSON object")
    metadata = header.pop("__metadata__", {})
    if not (isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())):
        raise _damaged(path, "its metadata is not text by text")
    places = sorted(
        (_place(path, name, entry) for name, entry in header.items()), key=lambda place: place[:2]
    )
    end = 0
    for begin, own_end, layout in places:
        if begin != end:
            raise _damaged(
                path,
                f"{layout.name} begins at byte {begin:,} of the tensors, and the one before ends at {end:,}",
            )
        end = own_end
    if 8 + length + end != nbytes:
        raise _damaged(path, f"it has {nbytes:,} bytes, its header speaks of {8 + length + end:,}")
    begins = tuple(8 + length + begin for begin, _, _ in places)
    return Header(metadata, tuple(layout for _, _, layout in places), begins)


def _place(path: Path, name: str, entry: Any) -> tuple[int, int, Layout]:
    if not (isinstance(entry, dict) and entry.keys() == {"dtype", "shape", "data_offsets"}):
        raise _damaged(path, f"{name[:200]} is not described by a type, a shape and a place")
    dtype = _TYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise DataError(
            f"{path}: {name[:200]} is of type {str(entry['dtype'])[:50]}, which Penstock does not know"
        )
    shape, place = entry["shape"], entry["data_offsets"]
    if not (_are_counts(shape) and len(shape) <= _MOST_DIMENSIONS and _are_counts(place) and len(place) == 2):
        raise _damaged(path, f"{name[:200]} has a shape or place that is none")
    begin, end = place
    if end - begin != math.prod(shape) * dtype.item_bytes:
        raise _damaged(path, f"{name[:200]} has {end - begin:,} bytes, which is not what its shape needs")
    return begin, end, Layout(name, dtype, tuple(shape))


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 63 for value in values)


def _without_repeats(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    pairs = list(pairs)
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("a name is there twice")
    return entries


def _damaged(path: Path, why: str) -> DataError:
    return DataError(f"{path} is no safetensors file, or damaged: {why}")
