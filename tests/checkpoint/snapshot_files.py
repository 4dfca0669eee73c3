"""Snapshots as files, written by hand: what `parts` and `manifest` of penstock.checkpoint.files say of it, once more.

Checksums are right unless a test breaks them: whoever makes a hostile file can count, too.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from penstock.checkpoint.store import SnapshotStore

STORED, EQUAL, REPLICA, HEADING_ZEROS = 0, 1, 2, 33
UID = "0123456789abcdef0123456789abcdef"
OTHER_UID = "fedcba9876543210fedcba9876543210"


@dataclass(frozen=True)
class Block:
    """A block of a part. raw: its decoded bytes. payload: as stored; None: as they are. lies: of its table's row."""

    raw: bytes
    kind: int = STORED
    payload: bytes | None = None
    lies: Mapping[str, int] = field(default_factory=dict)

    @property
    def stored(self) -> bytes:
        return self.raw if self.payload is None else self.payload


def replica(of: int, raw: bytes) -> Block:
    return Block(raw, REPLICA, struct.pack("<Q", of))


@dataclass(frozen=True)
class MadePart:
    """A part file. data: all of it. table: what the manifest says of its table."""

    data: bytes
    table: str


@cache
def _raw_checksum(raw: bytes) -> int:
    return xxhash.xxh3_128_intdigest(raw) % 2**64


def made_part(
    blocks: Sequence[Block],
    *,
    number: int = 0,
    uid: str = UID,
    magic: bytes = b"PENSTPRT",
    version: int = 1,
    footer: Mapping[str, int] | None = None,
    end: bytes = b"PENSTEND",
    zeros: bytes = bytes(8),
) -> MadePart:
    """Return a part file. footer: lies about the table's offset and blocks."""
    data = bytearray(struct.pack("<8sII", magic, version, number) + bytes.fromhex(uid))
    table = bytearray()
    for block in blocks:
        row = {
            "offset": len(data),
            "checksum": xxhash.xxh3_64_intdigest(block.stored),
            "raw_checksum": _raw_checksum(block.raw),
            "stored": len(block.stored),
            "raw": len(block.raw),
            "kind": block.kind,
            "zero": 0,
        } | dict(block.lies)
        zero = row.pop("zero")
        table += struct.pack("<QQQIIB", *row.values()) + zero.to_bytes(7, "little")
        data += block.stored
    digest = xxhash.xxh3_128_digest(bytes(table))
    told = {"offset": len(data), "blocks": len(blocks)} | dict(footer or {})
    said = struct.pack("<QQ", told["offset"], told["blocks"]) + digest
    return MadePart(bytes(data) + table + said + xxhash.xxh3_64_digest(said) + end + zeros, digest.hex())


def sealed(said: Any) -> bytes:
    """Return a manifest with its checksum. said: what it says; bytes: as they are."""
    line = said if isinstance(said, bytes) else json.dumps(said).encode()
    return line + b"\n" + xxhash.xxh3_128_hexdigest(line).encode() + b"\n"


def said_by(file: Path) -> dict[str, Any]:
    """Return what a manifest says."""
    said: dict[str, Any] = json.loads(file.read_bytes().split(b"\n")[0])
    return said


def reseal(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what a manifest says, its checksum with it."""
    said = said_by(file)
    change(said)
    file.write_bytes(sealed(said))


@dataclass(frozen=True)
class MadeTensor:
    """A tensor of a snapshot that is written by hand."""

    name: str
    dtype: str
    shape: Sequence[int]
    blocks: Sequence[Block]
    box: Any = None


def tensor(name: str, array: np.ndarray[Any, Any], **lies: int) -> MadeTensor:
    """Return a tensor of one block that is stored as it is."""
    block = Block(array.tobytes(), lies=lies)
    return MadeTensor(name, array.dtype.name, array.shape, [block] if array.size else [])


def made_snapshot(
    folder: Path,
    tensors: Sequence[MadeTensor],
    /,
    *,
    step: int = 1,
    uid: str = UID,
    reference: tuple[int, str] | None = None,
    part: MadePart | None = None,
    **lies: Any,
) -> Path:
    """Write a snapshot into a store's folder, and return its own. lies: of the manifest."""
    blocks = [block for one in tensors for block in one.blocks]
    part = part or made_part(blocks, uid=uid)
    rows, first = [], 0
    for one in tensors:
        rows.append([one.name, one.dtype, list(one.shape), one.box, 0, first])
        first += len(one.blocks)
    names = dict.fromkeys(one.name for one in tensors)
    said = {
        "format": "penstock snapshot",
        "version": 1,
        "step": step,
        "uid": uid,
        "created_seconds": 1_000_000.0 + step,
        "since_bytes": [100] if reference else [],
        "codec": "rle4",
        "reference": {"step": reference[0], "uid": reference[1]} if reference else None,
        "kept_mantissa_bits": None,
        "parts": [["part-00000.pst", len(part.data), part.table]],
        "tensors": rows,
        "tree": {"map": {name: {"array": {"of": name, "kind": "numpy"}} for name in names}},
        "rank_trees": [None],
    } | lies
    own = folder / f"step-{step:012d}"
    own.mkdir(parents=True)
    (own / "part-00000.pst").write_bytes(part.data)
    (own / "manifest.json").write_bytes(sealed(said))
    return own


def opened(folder: Path, **options: Any) -> SnapshotStore:
    """Return a store that prints nothing, of one thread and a codec of the paper, unless told otherwise."""
    return SnapshotStore(folder, **{"report": None, "threads": 1, "codec": "rle4", **options})


def training(step: int) -> dict[str, Any]:
    """Return a small state in training: weights that drift, a moment that jumps, two equal tables that stay."""
    drift = np.random.default_rng(step).normal(0, 1e-3, 12).astype(np.float32)
    table = np.arange(20, dtype=np.int32)
    return {
        "weight": np.linspace(-1, 1, 12, dtype=np.float32) + drift,
        "moment": np.random.default_rng(step).normal(0, 1, (2, 3)),
        "table": table,
        "twin": table.copy(),
        "empty": np.zeros((0, 3), np.float16),
        "step": step,
    }


def same(one: Any, other: Any) -> bool:
    """Return whether two nested states of NumPy arrays and plain values are equal bit for bit."""
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, np.ndarray):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    return type(one) is type(other) and bool(one == other)


def save_all(folder: Path, steps: Sequence[int], **options: Any) -> None:
    """Save a training's states, one after the other."""
    with opened(folder, **options) as store:
        for step in steps:
            store.save(step, training(step)).wait()


def files_of(folder: Path) -> Iterator[Path]:
    """Yield all files of all snapshots."""
    yield from sorted(folder.glob("step-*/*"))


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.glob("step-*"))
