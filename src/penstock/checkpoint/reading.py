"""Reading snapshots back: a block is followed through its references to one that needs none, and decoded on the way up.

Source: Wang, Boukhobza and Shao 2019, Algorithm 2 (restore), merged partition by partition as in section 5.6.3: the
partitions are our blocks, so two blocks' room is all that a merge of any number of deltas takes.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from penstock.checkpoint.codecs import decode_block
from penstock.checkpoint.codecs.codec import BLOCK_VALUES, NEEDS_REFERENCE, Kind
from penstock.checkpoint.manifest import Manifest, Stored, read_manifest, step_of
from penstock.checkpoint.parts import PartReader
from penstock.checkpoint.sharding import check_whole
from penstock.checkpoint.tensors import Bytes, Layout
from penstock.checkpoint.tier import MANIFEST, Tier
from penstock.checkpoint.writing import Scratch
from penstock.errors import ConfigError, FormatError
from penstock.flow.ordered import Workers


def load_manifest(tier: Tier, folder: str) -> Manifest:
    """Return a snapshot's manifest.

    Raises: FormatError if it is damaged or another snapshot's; FileNotFoundError, DataError.
    """
    where = f"{tier.name}/{folder}/{MANIFEST}"
    manifest = read_manifest(tier.read(folder, MANIFEST), where)
    if manifest.step != step_of(folder):
        raise FormatError(f"{where} is of step {manifest.step}: it was moved here from another folder")
    return manifest


class OpenSnapshot:
    """A snapshot whose files are open, its tables checked. Used by several threads at once."""

    def __init__(self, tier: Tier, folder: str, manifest: Manifest) -> None:
        """Open all parts. Raises: FormatError, FileNotFoundError, DataError; nothing stays open then."""
        self.where = f"{tier.name}/{folder}"
        self.manifest = manifest
        self.by_layout: dict[Layout, Stored] = {stored.layout: stored for stored in manifest.tensors}
        self._by_part: list[list[Stored]] = [[] for _ in manifest.parts]
        for stored in manifest.tensors:
            self._by_part[stored.part].append(stored)
        self._first_blocks = [[stored.first_block for stored in part] for part in self._by_part]
        self.parts: list[PartReader] = []
        try:
            for number, part in enumerate(manifest.parts):
                reader = tier.open(folder, part.file)
                try:
                    where = f"{self.where}/{part.file}"
                    self.parts.append(PartReader(reader, where, number, bytes.fromhex(manifest.uid), part))
                except BaseException:
                    reader.close()
                    raise
                self._check_blocks(number)
        except BaseException:
            self.close()
            raise

    def _check_blocks(self, number: int) -> None:
        """Check that a part has the blocks of the tensors that the manifest puts there, and no others."""
        tensors, reader = self._by_part[number], self.parts[number]
        expected = tensors[-1].blocks.stop if tensors else 0
        if expected != len(reader.table):
            raise FormatError(f"{reader.where} has {len(reader.table)} blocks; its tensors have {expected}")
        for stored in tensors:
            raw = reader.table["raw"][stored.first_block : stored.blocks.stop]
            whole = BLOCK_VALUES * stored.layout.dtype.item_bytes
            if raw.size and not (
                (raw[:-1] == whole).all() and int(raw[-1]) == stored.layout.nbytes - whole * (raw.size - 1)
            ):
                raise FormatError(f"{reader.where}: blocks of {stored.layout.name} are not of its shape")

    def stored_at(self, part: int, block: int) -> tuple[Stored, int]:
        """Return the tensor that a block belongs to, and the block's number in it."""
        stored = self._by_part[part][bisect_right(self._first_blocks[part], block) - 1]
        # An empty tensor begins where the next one does.
        while not stored.blocks:
            stored = self._by_part[part][self._by_part[part].index(stored) - 1]
        return stored, block - stored.first_block

    def close(self) -> None:
        """Let go of the files; twice is harmless."""
        for part in self.parts:
            part.close()


#: Kinds whose block is the one that they point to.
_AS_IT_IS = (Kind.EQUAL, Kind.REPLICA)
_NO_BYTES = np.empty(0, np.uint8)


class _Step(NamedTuple):
    """A block on the way from the wanted one to the one that needs no reference."""

    part: PartReader
    block: int
    kind: int
    payload: Bytes


class Chain:
    """A snapshot and those that it is made of.

    Owns them: closing closes all.
    """

    def __init__(self, links: Sequence[OpenSnapshot]) -> None:
        """links: the one that needs no reference first, the wanted one last; each the reference of the next."""
        self.links = list(links)

    @property
    def manifest(self) -> Manifest:
        """Return the wanted snapshot's manifest."""
        return self.links[-1].manifest

    def read_block(self, stored: Stored, index: int, out: Bytes, scratch: Scratch) -> None:
        """Decode block `index` of one of the wanted snapshot's tensors.

        out: uint8[bytes of the block], overwritten.
        Raises: FormatError naming file and tensor if any block on the way is damaged; DataError.
        """
        name = stored.layout.name
        try:
            self._read_block(stored, index, out, scratch)
        except FormatError as error:
            raise FormatError(f"{error}, in tensor {name!r}") from None

    def _read_block(self, stored: Stored, index: int, out: Bytes, scratch: Scratch) -> None:
        steps: list[_Step] = []
        level = len(self.links) - 1
        while True:
            link = self.links[level]
            part, block = link.parts[stored.part], stored.first_block + index
            kind = int(part.table[block]["kind"])
            if kind == Kind.REPLICA:
                steps.append(_Step(part, block, kind, part.payload(block)))
                block = _original(part, block, steps[-1].payload)
                stored, index = link.stored_at(stored.part, block)
                continue
            payload = _NO_BYTES if kind == Kind.STORED else part.payload(block)
            steps.append(_Step(part, block, kind, payload))
            if kind not in NEEDS_REFERENCE:
                break
            level -= 1
            found = self.links[level].by_layout.get(stored.layout) if level >= 0 else None
            if found is None:
                raise FormatError(f"{part.where} is damaged: block {block} is a difference to nothing")
            stored = found
        # Decoded into `out` and a room beside it in turn, so that the last one ends in `out`.
        turns = sum(step.kind not in _AS_IT_IS for step in steps)
        rooms = (out, scratch.room(0, out.size) if turns > 1 else out)
        here = turns % 2
        reference: Bytes | None = None
        for step in reversed(steps):
            if step.kind not in _AS_IT_IS:
                here = 1 - here
                if step.kind == Kind.STORED:
                    step.part.read_stored(step.block, rooms[here])
                else:
                    decode_block(step.kind, step.payload, stored.layout.dtype, reference, rooms[here])
                reference = rooms[here]
            step.part.check_raw(step.block, rooms[here])

    def block(self, layout: Layout, number: int, scratch: Scratch) -> Bytes | None:
        """Return a tensor's decoded block, in room 1 of `scratch`: the chain as a reference that is read when needed.

        Returns: None if there is no tensor of this layout. Raises: FormatError, DataError.
        """
        stored = self.links[-1].by_layout.get(layout)
        if stored is None:
            return None
        step = BLOCK_VALUES * layout.dtype.item_bytes
        out = scratch.room(1, min(step, layout.nbytes - number * step))
        self.read_block(stored, number, out, scratch)
        return out

    def close(self) -> None:
        """Let go of all files; twice is harmless."""
        for link in self.links:
            link.close()


def _original(part: PartReader, block: int, payload: Bytes) -> int:
    """Return the earlier block that one repeats; earlier, so that no chain of them ends in itself."""
    original = int.from_bytes(payload.tobytes(), "little")
    if payload.size != 8 or original >= block or part.table[original]["raw"] != part.table[block]["raw"]:
        raise FormatError(f"{part.where} is damaged: block {block} repeats no earlier block")
    return original


def read_tensors(
    chain: Chain, wanted: Iterable[tuple[Stored, Bytes]] | None, workers: Workers
) -> Iterator[Layout]:
    """Decode tensors into place on several threads, yielding each once it is complete.

    wanted: tensors of the chain's snapshot, and uint8[nbytes] to fill. None: all are decoded, into nowhere.
    Raises: FormatError naming file and tensor, DataError.
    """
    local = threading.local()

    def jobs() -> Iterator[_Job]:
        tensors = ((stored, None) for stored in chain.manifest.tensors) if wanted is None else wanted
        for stored, out in tensors:
            step = BLOCK_VALUES * stored.layout.dtype.item_bytes
            blocks = len(stored.blocks)
            if not blocks:
                yield _Job(stored, -1, None, 0, True)
            for number in range(blocks):
                place = slice(number * step, min((number + 1) * step, stored.layout.nbytes))
                nbytes = place.stop - place.start
                yield _Job(stored, number, None if out is None else out[place], nbytes, number == blocks - 1)

    def read(job: _Job) -> _Job:
        if not hasattr(local, "scratch"):
            local.scratch = Scratch()
        if job.number >= 0:
            out = local.scratch.room(1, job.nbytes) if job.out is None else job.out
            chain.read_block(job.stored, job.number, out, local.scratch)
        return job

    for job in workers.map(read, jobs()):
        if job.is_last:
            yield job.stored.layout


class _Job(NamedTuple):
    """A block to read. out: where to; None: nowhere. is_last: of its tensor."""

    stored: Stored
    number: int
    out: Bytes | None
    nbytes: int
    is_last: bool


def parts_by_name(manifest: Manifest) -> dict[str, list[Stored]]:
    """Return the stored parts of each tensor; one, where it is not spread over ranks.

    Raises: FormatError naming a tensor whose parts do not make up the whole.
    """
    by_name: dict[str, list[Stored]] = {}
    for stored in manifest.tensors:
        by_name.setdefault(stored.layout.name, []).append(stored)
    try:
        check_whole(stored.layout for stored in manifest.tensors if stored.layout.box is not None)
    except ConfigError as error:
        raise FormatError(f"the snapshot of step {manifest.step} is damaged: {error}") from None
    return by_name


def whole_layout(parts: Sequence[Stored]) -> Layout:
    """Return the layout of the tensor that parts make up."""
    layout = parts[0].layout
    return layout if layout.box is None else Layout(layout.name, layout.dtype, layout.box.whole)


def read_whole(
    chain: Chain, wanted: Iterable[tuple[Sequence[Stored], Bytes]], workers: Workers
) -> Iterator[str]:
    """Decode tensors into place, put together from their parts, yielding the name of each once it is complete.

    wanted: the parts of each, and uint8[bytes of the whole] to fill.
    Raises: as `read_tensors`.
    """
    left: dict[str, int] = {}
    targets: dict[Layout, tuple[Bytes, Bytes]] = {}

    def parts() -> Iterator[tuple[Stored, Bytes]]:
        for stored_parts, out in wanted:
            left[stored_parts[0].layout.name] = len(stored_parts)
            for stored in stored_parts:
                if stored.layout.box is None:
                    yield stored, out
                else:
                    data = np.empty(stored.layout.nbytes, np.uint8)
                    targets[stored.layout] = out, data
                    yield stored, data

    for layout in read_tensors(chain, parts(), workers):
        if layout.box is not None:
            out, data = targets.pop(layout)
            if data.size:
                item = f"V{layout.dtype.item_bytes}"
                place = tuple(
                    slice(offset, offset + size)
                    for offset, size in zip(layout.box.offsets, layout.shape, strict=True)
                )
                out.view(item).reshape(layout.box.whole)[place] = data.view(item).reshape(layout.shape)
        left[layout.name] -= 1
        if not left[layout.name]:
            yield layout.name
