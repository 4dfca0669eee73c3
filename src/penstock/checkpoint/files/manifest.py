"""What a snapshot says of itself: its manifest, JSON of our own with a checksum below it.

Nothing in it is believed before it is checked: names, counts, shapes and files come from a disk, or from a stranger.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, NamedTuple

import xxhash

from penstock.checkpoint.files.parts import BLOCK, Part, can_have_bytes
from penstock.checkpoint.state.dtypes import dtype_named
from penstock.checkpoint.state.fields import LARGEST_INT, excerpt, expect, integer, items, matched, number
from penstock.checkpoint.state.tensors import Box, Layout, count_blocks
from penstock.errors import ConfigError, FormatError
from penstock.trace.trace import JSON

FORMAT = "penstock snapshot"
VERSION = 1
_UID = re.compile(r"[0-9a-f]{32}")
_TABLE = re.compile(r"[0-9a-f]{32}")
_PART_FILE = re.compile(r"part-\d{5,9}(-[0-9a-f]{32})?\.pst")
_MOST_DIMENSIONS = 64
#: Most bytes for a rank that are of no tensor, in the manifest and in its part; most bytes for a tensor's place.
_REST_BYTES, _PLACE_BYTES = 1024, 24


class Reference(NamedTuple):
    """The snapshot to which another is the difference."""

    step: int
    uid: str


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a tensor is: its blocks are `count_blocks(layout)` in a row, from `first_block` on, of a part."""

    layout: Layout
    part: int
    first_block: int

    @property
    def blocks(self) -> range:
        """Return the numbers of its blocks in its part."""
        return range(self.first_block, self.first_block + count_blocks(self.layout))


@dataclass(frozen=True, slots=True)
class Manifest:
    """A snapshot without its bytes.

    uid: of this snapshot, 32 hexadecimal digits, never used twice.
    created_seconds: when the state was copied, since 1970-01-01 UTC, and in any case after all that were saved before.
    clock_seconds: when that was as the clock said, which is less where it was set back in between.
    since_bytes: what was stored for its baseline and for each snapshot since, before this one; empty for a baseline.
    codec: name of the codec that wrote it; blocks say themselves how they are decoded.
    kept_mantissa_bits: to which floats of 16 bits and more were cut before they were stored; None: nothing was cut.
    tree: the state around its tensors, as `penstock.checkpoint.state.flatten` writes it.
    rank_trees: the same of what each rank has for itself.
    file_bytes: of the file that it was read from, or is written to; 0 before.
    raw_bytes: of all tensors. stored_bytes: of all files, its parts and itself.
    """

    step: int
    uid: str
    created_seconds: float
    clock_seconds: float
    since_bytes: tuple[int, ...]
    codec: str
    reference: Reference | None
    kept_mantissa_bits: int | None
    tree: JSON
    rank_trees: tuple[JSON, ...]
    parts: tuple[Part, ...]
    tensors: tuple[Stored, ...] = field(repr=False)
    file_bytes: int = field(default=0, compare=False)

    raw_bytes: int = field(init=False, compare=False)
    stored_bytes: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "raw_bytes", sum(map(attrgetter("layout.nbytes"), self.tensors)))
        object.__setattr__(self, "stored_bytes", self.file_bytes + sum(map(attrgetter("nbytes"), self.parts)))


def folder_of(step: int) -> str:
    """Return the name of a step's folder."""
    return f"step-{step:012d}"


def step_of(folder: str) -> int | None:
    """Return the step that a folder is named after; None if it is no snapshot's."""
    match = re.fullmatch(r"step-(\d{12,19})", folder)
    return int(match[1]) if match and folder_of(int(match[1])) == folder else None


def write_manifest(manifest: Manifest) -> bytes:
    """Return the file: JSON in one line, its xxh3-128 in the next."""
    reference = manifest.reference
    data = {
        "format": FORMAT,
        "version": VERSION,
        "step": manifest.step,
        "uid": manifest.uid,
        "created_seconds": manifest.created_seconds,
        "since_bytes": manifest.since_bytes,
        "codec": manifest.codec,
        "reference": reference and reference._asdict(),
        "kept_mantissa_bits": manifest.kept_mantissa_bits,
        "parts": manifest.parts,
        "tensors": [
            [*write_layout(stored.layout), stored.part, stored.first_block] for stored in manifest.tensors
        ],
        "tree": manifest.tree,
        "rank_trees": manifest.rank_trees,
    }
    if manifest.clock_seconds != manifest.created_seconds:
        data["clock_seconds"] = manifest.clock_seconds
    line = json.dumps(data, allow_nan=False, separators=(",", ":")).encode()
    return line + b"\n" + xxhash.xxh3_128_hexdigest(line).encode() + b"\n"


def write_layout(layout: Layout) -> list[Any]:
    """Return a layout as JSON."""
    box = layout.box and [layout.box.whole, layout.box.offsets]
    return [layout.name, layout.dtype.name, layout.shape, box]


def bytes_beside(tree: JSON, layouts: Sequence[Layout], own_bytes: Sequence[int] = (0,)) -> int:
    """Return the most bytes that a snapshot takes besides its blocks: its manifest, and the tables of its parts.

    own_bytes: bytes in the manifest of each rank's `per_rank` tree.
    """
    said = json.dumps([tree, [write_layout(layout) for layout in layouts]], separators=(",", ":"))
    blocks = sum(map(count_blocks, layouts))
    return (
        _REST_BYTES * len(own_bytes)
        + len(said)
        + sum(own_bytes)
        + _PLACE_BYTES * len(layouts)
        + BLOCK.itemsize * blocks
    )


def read_layout(written: Sequence[Any]) -> Layout:
    """Return what `write_layout` wrote. Raises: FormatError if it did not."""
    try:
        return _layout(*items(4, written, "a layout"))
    except (FormatError, ConfigError) as error:
        raise FormatError(f"a layout says what cannot be: {error}") from None


def read_manifest(data: bytes, where: str) -> Manifest:
    """Return what a file says.

    where: what messages call it.
    Raises: FormatError if it is damaged, cut, of a newer version, or says what cannot be.
    """
    line, newline, checksum = data.partition(b"\n")
    if not newline or checksum != xxhash.xxh3_128_hexdigest(line).encode() + b"\n":
        raise FormatError(f"{where} is cut off or damaged: its checksum does not match")
    try:
        said = json.loads(line)
        if isinstance(said, dict) and (said.get("format"), said.get("version")) == (FORMAT, VERSION):
            return replace(_manifest(said), file_bytes=len(data))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where} says what cannot be: {error}") from None
    if not isinstance(said, dict) or said.get("format") != FORMAT:
        raise FormatError(f"{where} is no manifest of a snapshot: it lacks the format {FORMAT!r}")
    raise NewerFormat(
        f"{where} is of version {said.get('version')!r:.40}; this Penstock reads version {VERSION}{NewerFormat.ADVICE}"
    )


class NewerFormat(FormatError):
    """A snapshot was written by a later Penstock, and is no doubt whole."""

    ADVICE = ": read it with the Penstock that wrote it"

    @property
    def found(self) -> str:
        """Return which it is, without what to do to read it."""
        return str(self).removesuffix(self.ADVICE)


def _manifest(said: Mapping[str, Any]) -> Manifest:
    parts = tuple(
        Part(
            matched(_PART_FILE, file, "a part's file"),
            integer(nbytes, "a part's bytes"),
            matched(_TABLE, table, "a part's table"),
        )
        for file, nbytes, table in (
            items(3, part, "parts") for part in expect(list, said.get("parts"), "parts")
        )
    )
    if len({part.file for part in parts}) != len(parts):
        raise FormatError("two parts are one file")
    tensors = _tensors(expect(list, said.get("tensors"), "tensors"), len(parts))
    _check_sizes(parts, tensors)
    kept_bits = said.get("kept_mantissa_bits")
    return Manifest(
        step=integer(said.get("step"), "step"),
        uid=matched(_UID, said.get("uid"), "uid"),
        created_seconds=number(said.get("created_seconds"), "created_seconds"),
        clock_seconds=number(said.get("clock_seconds", said.get("created_seconds")), "clock_seconds"),
        since_bytes=tuple(
            integer(nbytes, "since_bytes") for nbytes in expect(list, said.get("since_bytes"), "since_bytes")
        ),
        codec=expect(str, said.get("codec"), "codec"),
        reference=_reference(said.get("reference")),
        kept_mantissa_bits=None if kept_bits is None else integer(kept_bits, "kept_mantissa_bits"),
        tree=said.get("tree"),
        rank_trees=tuple(expect(list, said.get("rank_trees"), "rank_trees")),
        parts=parts,
        tensors=tensors,
    )


def _check_sizes(parts: Sequence[Part], tensors: Sequence[Stored]) -> None:
    """Check that parts are as long as their tensors let them be: so no table is read that is not theirs."""
    raw_bytes, blocks = [0] * len(parts), [0] * len(parts)
    for stored in tensors:
        raw_bytes[stored.part] += stored.layout.nbytes
        blocks[stored.part] += len(stored.blocks)
    for part, raw, count in zip(parts, raw_bytes, blocks, strict=True):
        if not can_have_bytes(part.nbytes, count, raw):
            raise FormatError(f"{part.file} has {part.nbytes} bytes, which its {count} blocks cannot take")


def _tensors(rows: Sequence[Any], parts: int) -> tuple[Stored, ...]:
    tensors = []
    seen = set()
    next_block = [0] * parts
    for row in rows:
        *written, part, first_block = items(6, row, "tensors")
        layout = _layout(*written)
        name, box = layout.name, layout.box
        if (name, box) in seen:
            raise FormatError(f"{name!r:.200} is there twice")
        seen.add((name, box))
        stored = Stored(layout, integer(part, "a tensor's part"), integer(first_block, "a tensor's block"))
        # A part's tensors follow each other: so no block is two tensors', and the last ends where the table does.
        if stored.part >= parts or stored.first_block != next_block[stored.part]:
            raise FormatError(f"{name!r:.200} is not where the tensor before it ends")
        next_block[stored.part] = stored.blocks.stop
        tensors.append(stored)
    return tuple(tensors)


def _layout(name: Any, dtype: Any, shape: Any, box: Any) -> Layout:
    layout = Layout(
        expect(str, name, "a tensor's name"),
        dtype_named(expect(str, dtype, "a type")),
        _shape(shape),
        None if box is None else Box(*(_shape(part) for part in items(2, box, "a box"))),
    )
    if layout.box is not None and not layout.box.holds(layout.shape):
        raise FormatError(f"{name!r:.200} is no part of the whole that it says it is")
    return layout


def _shape(value: Any) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)) or len(value) > _MOST_DIMENSIONS:
        raise FormatError(f"a shape is {excerpt(value)}")
    shape = tuple(integer(size, "a dimension") for size in value)
    if math.prod(size for size in shape if size) > LARGEST_INT // 16:
        raise FormatError(f"a shape is {value!r:.80}: larger than any memory")
    return shape


def _reference(value: Any) -> Reference | None:
    if value is None:
        return None
    expect(dict, value, "reference")
    return Reference(
        integer(value.get("step"), "reference.step"), matched(_UID, value.get("uid"), "reference.uid")
    )
