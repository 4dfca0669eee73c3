"""Reading snapshots back: a block is followed through its references to one that needs none, and decoded on the way up.

Source: Wang, Boukhobza and Shao 2019, Algorithm 2 (restore), merged partition by partition as in section 5.6.3: the
partitions are our blocks, so two blocks' memory is all that a merge of any number of deltas takes.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.checkpoint.codecs import decode_block
from penstock.checkpoint.codecs.codec import NEEDS_REFERENCE, Kind
from penstock.checkpoint.files.fetching import Fetched, map_fetched
from penstock.checkpoint.files.manifest import Manifest, Stored, read_manifest, step_of
from penstock.checkpoint.files.parts import PartReader
from penstock.checkpoint.files.writing import Scratch
from penstock.checkpoint.state.dtypes import DType
from penstock.checkpoint.state.sharding import Copy, check_whole, copies_into
from penstock.checkpoint.state.tensors import BLOCK_VALUES, Bytes, Layout
from penstock.checkpoint.state.tree import MappingNode, Tree, c_strides, read_tree
from penstock.checkpoint.tiers.tier import MANIFEST, Tier
from penstock.errors import ConfigError, FormatError
from penstock.flow.ordered import Workers, in_groups


def load_manifest(tier: Tier, folder: str) -> Manifest:
    """Return a snapshot's manifest.

    Raises: FormatError if it is damaged or another snapshot's; FileNotFoundError, DataError.
    """
    data = tier.read(folder, MANIFEST)
    where = f"{tier.where(folder)}/{MANIFEST}"
    manifest = read_manifest(data, where)
    if manifest.step != step_of(folder):
        raise FormatError(f"{where} is of step {manifest.step}: it was moved here from another folder")
    return manifest


class OpenSnapshot:
    """A snapshot whose files are open, its tables checked. Used by several threads at once."""

    def __init__(self, tier: Tier, folder: str, manifest: Manifest) -> None:
        """Open all parts. Raises: FormatError, FileNotFoundError, DataError; nothing stays open then."""
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
                    where = f"{tier.where(folder)}/{part.file}"
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
        # All at once: of thousands of small tensors, a look at each takes longer than to read them.
        held = [stored for stored in tensors if stored.layout.values]
        counts = np.array([len(stored.blocks) for stored in held], np.int64)
        whole = np.array([BLOCK_VALUES * stored.layout.dtype.item_bytes for stored in held], np.int64)
        nbytes = np.array([stored.layout.nbytes for stored in held], np.int64)
        raw = np.repeat(whole, counts)
        raw[np.cumsum(counts) - 1] = nbytes - whole * (counts - 1)
        wrong = np.flatnonzero(raw != reader.table["raw"])
        if wrong.size:
            stored, _ = self.stored_at(number, int(wrong[0]))
            raise FormatError(f"{reader.where}: blocks of {stored.layout.name} are not of its shape")

    def stored_at(self, part: int, block: int) -> tuple[Stored, int]:
        """Return the tensor that a block belongs to, and the block's number in it."""
        stored = self._by_part[part][bisect_right(self._first_blocks[part], block) - 1]
        # An empty tensor begins where the next one does.
        while not stored.blocks:
            stored = self._by_part[part][self._by_part[part].index(stored) - 1]
        return stored, block - stored.first_block

    def close(self) -> None:
        for part in self.parts:
            part.close()


#: Kinds whose block is the one that they point to.
_AS_IT_IS = (Kind.EQUAL, Kind.REPLICA)
_NO_BYTES = np.empty(0, np.uint8)
#: Decoded together.
_GROUP_BYTES = 1 << 19
_GROUP_BLOCKS = 64


class _Step(NamedTuple):
    """A block on the way from the wanted one to the one that needs no reference.

    dtype: of the tensor that it was encoded for; a block that it repeats may be of another one.
    """

    part: PartReader
    block: int
    kind: int
    payload: Bytes
    dtype: DType


class Chain:
    """A snapshot and those that it is made of.

    Owns them: closing closes all.
    """

    def __init__(self, links: Sequence[OpenSnapshot]) -> None:
        """links: the one that needs no reference first, the wanted one last; each the reference of the next."""
        self.links = list(links)

    @property
    def manifest(self) -> Manifest:
        return self.links[-1].manifest

    @property
    def reads_at_once(self) -> int:
        """Return how many reads to have under way."""
        return max((part.reads_at_once for link in self.links for part in link.parts), default=1)

    def needs(self, stored: Stored, index: int) -> Iterator[tuple[PartReader, int]]:
        """Yield the files and blocks that `read_block` will read, but for what a block is found to repeat."""
        layout = stored.layout
        for link in reversed(self.links):
            found = link.by_layout.get(layout)
            if found is None:
                return  # `read_block` raises
            part, block = link.parts[found.part], found.first_block + index
            kind = int(part.table[block]["kind"])
            yield part, block
            if kind not in NEEDS_REFERENCE:
                return

    def read_block(
        self, stored: Stored, index: int, out: Bytes, scratch: Scratch, fetched: Fetched | None = None
    ) -> None:
        """Decode block `index` of one of the wanted snapshot's tensors.

        out: uint8[bytes of the block], overwritten. fetched: what is in memory of what it needs.
        Raises: FormatError naming file and tensor if any block on the way is damaged; DataError.
        """
        name = stored.layout.name
        try:
            self._read_block(stored, index, out, scratch, fetched or Fetched())
        except FormatError as error:
            raise FormatError(f"{error}, in tensor {name!r}") from None

    def _read_block(self, stored: Stored, index: int, out: Bytes, scratch: Scratch, fetched: Fetched) -> None:
        steps: list[_Step] = []
        level = len(self.links) - 1
        while True:
            link = self.links[level]
            part, block = link.parts[stored.part], stored.first_block + index
            kind = int(part.table[block]["kind"])
            if kind == Kind.REPLICA:
                steps.append(_Step(part, block, kind, fetched.payload(part, block), stored.layout.dtype))
                block = _original(part, block, steps[-1].payload)
                stored, index = link.stored_at(stored.part, block)
                continue
            payload = _NO_BYTES if kind == Kind.STORED else fetched.payload(part, block)
            steps.append(_Step(part, block, kind, payload, stored.layout.dtype))
            if kind not in NEEDS_REFERENCE:
                break
            level -= 1
            found = self.links[level].by_layout.get(stored.layout) if level >= 0 else None
            if found is None:
                raise FormatError(f"{part.where} is damaged: block {block} is a difference to nothing")
            stored = found
        # Decoded into `out` and another buffer in turn, so that the last one ends in `out`.
        turns = sum(step.kind not in _AS_IT_IS for step in steps)
        buffers = (out, scratch.buffer(0, out.size) if turns > 1 else out)
        here = turns % 2
        reference: Bytes | None = None
        for step in reversed(steps):
            if step.kind not in _AS_IT_IS:
                here = 1 - here
                if step.kind == Kind.STORED:
                    fetched.copy_stored(step.part, step.block, buffers[here])
                else:
                    decode_block(step.kind, step.payload, step.dtype, reference, buffers[here])
                reference = buffers[here]
            step.part.check_raw(step.block, buffers[here])

    def block(self, layout: Layout, number: int, scratch: Scratch) -> Bytes | None:
        """Return a tensor's decoded block, in buffer 1 of `scratch`: the chain as a reference that is read when needed.

        Returns: None if there is no tensor of this layout. Raises: FormatError, DataError.
        """
        stored = self.links[-1].by_layout.get(layout)
        if stored is None:
            return None
        step = BLOCK_VALUES * layout.dtype.item_bytes
        out = scratch.buffer(1, min(step, layout.nbytes - number * step))
        self.read_block(stored, number, out, scratch)
        return out

    def close(self) -> None:
        for link in self.links:
            link.close()


def _original(part: PartReader, block: int, payload: Bytes) -> int:
    """Return the earlier block that one repeats, which repeats none: else a row of them would be read over and over."""
    original = int.from_bytes(payload.tobytes(), "little")
    if (
        payload.size != 8
        or original >= block
        or part.table[original]["raw"] != part.table[block]["raw"]
        or part.table[original]["kind"] == Kind.REPLICA
    ):
        raise FormatError(f"{part.where} is damaged: block {block} repeats no earlier block")
    return original


def decode_all(chain: Chain, workers: Workers) -> None:
    """Decode every tensor of the chain's snapshot, into nowhere.

    Raises: FormatError naming file and tensor, DataError.
    """
    jobs = (
        _Job(None, stored, number, None, _block_place(stored, number))
        for stored in chain.manifest.tensors
        for number in range(len(stored.blocks))
    )
    for _ in _decoded(chain, jobs, workers):
        pass


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """A tensor, or a part of one, to be read.

    layout: what is wanted; its box may be any part of the whole. parts: in which it is stored, all of them or those
    that it meets. out: uint8[layout.nbytes], to fill.
    """

    layout: Layout
    parts: Sequence[Stored]
    out: Bytes


def read_wanted(chain: Chain, wanted: Iterable[Wanted], workers: Workers) -> Iterator[Wanted]:
    """Decode tensors into place on several threads, put together from their parts, yielding each once it is complete.

    Only blocks are read of which something is wanted. Memory besides: of a part that is laid out otherwise than it is
    wanted, what is read of it; some are under way at a time.
    Raises: FormatError naming file and tensor, DataError.
    """

    def jobs() -> Iterator[_Job]:
        for one in wanted:
            copies = _copies(one)
            #: What is still to come, counted by the thread that asks for it.
            left = [len(copies)]
            if not copies:
                yield _Job(_Filling(one, None, None, left), one.parts[0], -1, None, slice(0, 0))
            for copy in copies:
                stored = one.parts[copy.part]
                blocks = range(len(stored.blocks))
                data = one.out
                if stored.layout != one.layout:
                    blocks = _blocks_of(stored.layout, copy.source)
                    begin, end = (_block_place(stored, number) for number in (blocks[0], blocks[-1]))
                    data = np.empty(end.stop - begin.start, np.uint8)
                first = _block_place(stored, blocks.start).start
                for number in blocks:
                    place = _block_place(stored, number)
                    is_last = number == blocks[-1]
                    filling = _Filling(one, copy, data, left) if is_last else None
                    yield _Job(filling, stored, number, data[place.start - first : place.stop - first], place)

    for filling in _decoded(chain, jobs(), workers):
        if filling.copy is not None and filling.data is not filling.wanted.out:
            _put(filling)
        filling.left[0] -= 1
        if filling.left[0] <= 0:
            yield filling.wanted


class _Filling(NamedTuple):
    """A stored part that was read for something wanted. copy: where to; None: there is nothing to copy."""

    wanted: Wanted
    copy: Copy | None
    data: Bytes | None
    left: list[int]


class _Job(NamedTuple):
    """A block to read, `place` of the part's bytes. filling: of which it is the last. out: where to; None: nowhere."""

    filling: _Filling | None
    stored: Stored
    number: int
    out: Bytes | None
    place: slice


def _decoded(chain: Chain, jobs: Iterable[_Job], workers: Workers) -> Iterator[_Filling]:
    local = threading.local()

    def read(group: Sequence[_Job], fetched: Fetched) -> list[_Filling]:
        if not hasattr(local, "scratch"):
            local.scratch = Scratch()
        for job in group:
            if job.number >= 0:
                out = (
                    local.scratch.buffer(1, job.place.stop - job.place.start) if job.out is None else job.out
                )
                chain.read_block(job.stored, job.number, out, local.scratch, fetched)
        return [job.filling for job in group if job.filling is not None]

    def needs(group: Sequence[_Job]) -> Iterator[tuple[PartReader, int]]:
        for job in group:
            if job.number >= 0:
                yield from chain.needs(job.stored, job.number)

    groups = in_groups(jobs, lambda job: job.place.stop - job.place.start, _GROUP_BYTES, _GROUP_BLOCKS)
    with closing(map_fetched(workers, read, groups, needs, chain.reads_at_once)) as all_read:
        for fillings in all_read:
            yield from fillings


def _copies(wanted: Wanted) -> Sequence[Copy]:
    try:
        return copies_into(wanted.layout, [stored.layout for stored in wanted.parts])
    except ConfigError as error:
        raise FormatError(f"the snapshot is damaged: {error}") from None


def _blocks_of(layout: Layout, place: Sequence[slice]) -> range:
    """Return the blocks of a part in which the numbers of a place lie, which has some."""
    strides = c_strides(layout.shape, 1)
    first = sum(part.start * stride for part, stride in zip(place, strides, strict=True))
    last = sum((part.stop - 1) * stride for part, stride in zip(place, strides, strict=True))
    return range(first // BLOCK_VALUES, last // BLOCK_VALUES + 1)


def _block_place(stored: Stored, number: int) -> slice:
    step = BLOCK_VALUES * stored.layout.dtype.item_bytes
    return slice(number * step, min((number + 1) * step, stored.layout.nbytes))


def _put(filling: _Filling) -> None:
    """Copy what was read of a part to where it is wanted."""
    wanted, copy, data, _ = filling
    assert copy is not None and data is not None, "there is something to copy"  # noqa: PT018
    layout = wanted.parts[copy.part].layout
    item_bytes = layout.dtype.item_bytes
    strides = c_strides(layout.shape, item_bytes)
    begin = _blocks_of(layout, copy.source).start * BLOCK_VALUES * item_bytes
    offset = sum(part.start * stride for part, stride in zip(copy.source, strides, strict=True)) - begin
    shape = tuple(part.stop - part.start for part in copy.source)
    source = np.ndarray(shape, f"V{item_bytes}", data, offset, strides)
    target = wanted.out.view(f"V{item_bytes}").reshape(wanted.layout.shape)
    target[copy.target] = source


def parts_by_name(manifest: Manifest) -> dict[str, list[Stored]]:
    """Return the stored parts of each tensor; one, where it is not spread over ranks.

    Raises: FormatError naming a tensor whose parts do not make up the whole.
    """
    by_name: dict[str, list[Stored]] = {}
    for stored in manifest.tensors:
        by_name.setdefault(stored.layout.name, []).append(stored)
    try:
        check_whole(stored.layout for stored in manifest.tensors)
    except ConfigError as error:
        raise FormatError(f"the snapshot of step {manifest.step} is damaged: {error}") from None
    return by_name


def tree_of(manifest: Manifest, parts: Mapping[str, Sequence[Stored]]) -> Tree:
    """Return the tree of a snapshot. parts: as `parts_by_name` gives them. Raises: FormatError."""
    return read_tree(manifest.tree, [those[0].layout.whole for those in parts.values()])


def tree_of_rank(manifest: Manifest, rank: int, shared: Tree) -> Tree | None:
    """Return the tree of what a rank saved for itself; None if it saved nothing. Raises: FormatError.

    shared: of what all ranks saved, in whose layouts are those of all tensors.
    """
    written = manifest.rank_trees[rank]
    if written is None:
        return None
    tree = read_tree(written, shared.layouts.values())
    if not isinstance(tree.root, MappingNode) or tree.root.keys != (f"rank {rank}",):
        raise FormatError(
            f"the snapshot of step {manifest.step} is damaged: it has another's values for rank {rank}"
        )
    return tree
