"""Weights on the wire: what changed from one snapshot to another, sent as the store keeps it and applied in place.

    trainer                                              inference worker
    for message in store.refresh(100, 120): send(...)    refresher = Refresher(state); refresher.apply(messages)

A message is bytes, for any transport that keeps messages apart and in order: a kind, its number, which refresh it is
of, a body, a checksum that also covers the checksum of the message before, so that one which is lost, comes twice, or
is of another refresh is found before it is applied. The first says from which snapshot to which, and what the tensors
are; then blocks come as they are in part files, hop by hop along the differences between the two; the last says that
all were sent. As each message names its refresh, what is left over of one that failed is not taken for the next one's.
"""

from __future__ import annotations

import json
import secrets
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import xxhash

from penstock.checkpoint.codecs import decode_block
from penstock.checkpoint.codecs.codec import NEEDS_REFERENCE, Kind
from penstock.checkpoint.files.catalog import Catalog, Link, Removed, looking_again, open_links, read_first
from penstock.checkpoint.files.manifest import read_layout, write_layout
from penstock.checkpoint.files.parts import BLOCK, checksum_of, raw_checksum_of
from penstock.checkpoint.files.reading import Chain
from penstock.checkpoint.files.writing import Scratch
from penstock.checkpoint.state.fields import expect, integer, items
from penstock.checkpoint.state.sharding import check_whole
from penstock.checkpoint.state.tensors import BLOCK_VALUES, Bytes, Layout, count_blocks
from penstock.checkpoint.state.tree import ArrayLeaf, Tree, read_tree, select
from penstock.checkpoint.state.unflatten import Destination, Loading, plan_loading_into
from penstock.errors import ConfigError, DataError, FormatError

_START, _BLOCKS, _END = 1, 2, 3
#: Magic, kind, number, and which refresh it is of: drawn for each.
_HEAD = struct.Struct("<8sII8s")
_MAGIC = b"PENSTRE2"
_REFRESH_BYTES = 8
_CHECKSUM_BYTES = 8
#: Which tensor, which of its blocks is the first, how many.
_RUN = struct.Struct("<III")
#: A message has blocks of one tensor, of about so many bytes.
_MESSAGE_BYTES = 4 << 20


# -- Sending ---------------------------------------------------------------------------------------------------


def messages(
    catalog: Catalog,
    from_step: int | None,
    to_step: int,
    only: Iterable[str] | None = None,
    look_again: Callable[[], int] | None = None,
) -> Iterator[bytes]:
    """Yield what turns the tensors of one snapshot into those of another.

    from_step: of what the receiver has; None: nothing that counts; all is sent then, and where no differences lead from
        there, as from a step that was removed. to_step: of what it shall have. only: names or patterns of what is
        sent; None: all. look_again: returns what to send in place of a snapshot that another process removed before
        it was opened; None: what there is was looked at just now.
    Raises: ConfigError if there is no snapshot of `to_step`, or a pattern fits nothing; FormatError, DataError if one
        is damaged, or was removed while it was sent.
    """
    patterns = None if only is None else only if isinstance(only, str) else list(only)
    sealer = _Sealer()

    def open_anew(is_again: bool) -> tuple[Chain, int, Sequence[Link]]:
        return _open_shortest(catalog, from_step, look_again() if is_again and look_again else to_step)

    chain, first, links = looking_again(open_anew) if look_again else open_anew(False)
    with closing(chain), _name_removed(catalog, links):
        target = chain.manifest
        layouts = [stored.layout for stored in target.tensors]
        tree = read_tree(target.tree, _wholes(layouts))
        wanted = _wanted(tree, patterns)
        # A tensor that came or went on the way is in some of the snapshots: all are sent as they are in the last.
        is_alike = all(link.by_layout.keys() == set(layouts) for link in chain.links[max(first - 1, 0) :])
        if not is_alike:
            first = 0
        levels = range(first if is_alike else len(chain.links) - 1, len(chain.links))
        start = {
            "from": [from_step, chain.links[first - 1].manifest.uid] if first else None,
            "to": [target.step, target.uid],
            "hops": len(levels),
            "only": patterns,
            "tree": target.tree,
            "layouts": [write_layout(layout) for layout in layouts],
        }
        yield sealer.message(_START, json.dumps(start).encode())
        for level in levels:
            for number, layout in enumerate(layouts):
                if layout.name in wanted:
                    for body in _runs(chain, level, number, layout, decoded=not is_alike):
                        yield sealer.message(_BLOCKS, body)
        yield sealer.message(_END, b"")


@contextmanager
def _name_removed(catalog: Catalog, links: Sequence[Link]) -> Iterator[None]:
    """Have what fails because a snapshot was removed say so, and not that it is damaged."""
    try:
        yield
    except (FormatError, DataError) as error:
        if catalog.was_removed(links):
            raise Removed(f"the snapshot of step {links[-1].step} was removed meanwhile: {error}") from error
        raise


def _open_shortest(
    catalog: Catalog, from_step: int | None, to_step: int
) -> tuple[Chain, int, Sequence[Link]]:
    """Open the restore chain that sends least; return it, how many of its links the receiver has, and the links.

    Raises: `Removed` if a snapshot on it is there no more.
    """

    def first_sent(links: Sequence[Link]) -> int:
        # As of the receiver's snapshot, if the chain leads through it; else from its beginning.
        steps = [link.step for link in links]
        return steps.index(from_step) + 1 if from_step in steps else 0

    def sent_bytes(links: Sequence[Link]) -> int:
        sent = (catalog.manifest(link.tier, link.step) for link in links[first_sent(links) :])
        return sum(manifest.stored_bytes for manifest in sent if manifest)

    def opened(links: Sequence[Link]) -> tuple[Chain, int, Sequence[Link]]:
        return open_links(catalog, links), first_sent(links), links

    return read_first(sorted(catalog.chains(to_step), key=sent_bytes), opened, catalog.was_removed)


def _wanted(tree: Tree, patterns: Iterable[str] | None) -> frozenset[str]:
    """Return the names of the tensors that are sent. Raises: ConfigError for a pattern that fits nothing."""
    chosen = None if patterns is None else select(tree.names, patterns)
    return frozenset(
        leaf.of
        for leaf in tree.leaves
        if isinstance(leaf, ArrayLeaf) and (chosen is None or leaf.name in chosen)
    )


def _runs(chain: Chain, level: int, number: int, layout: Layout, *, decoded: bool) -> Iterator[bytes]:
    """Yield the blocks of a tensor in one snapshot, some at a time. decoded: none of them as a difference."""
    rows: list[np.void] = []
    payloads: list[Bytes] = []
    first = size = 0
    scratch = Scratch()
    for index in range(count_blocks(layout)):
        row, payload = _as_sent(chain, level, layout, index, scratch, decoded=decoded)
        rows.append(row)
        payloads.append(payload)
        size += payload.size
        if size >= _MESSAGE_BYTES:
            yield _RUN.pack(number, first, len(rows)) + _joined(rows, payloads)
            rows, payloads, first, size = [], [], index + 1, 0
    if rows:
        yield _RUN.pack(number, first, len(rows)) + _joined(rows, payloads)


def _as_sent(
    chain: Chain, level: int, layout: Layout, index: int, scratch: Scratch, *, decoded: bool
) -> tuple[np.void, Bytes]:
    link = chain.links[level]
    stored = link.by_layout[layout]
    part, block = link.parts[stored.part], stored.first_block + index
    row, payload = part.table[block].copy(), part.payload(block)
    if row["kind"] not in (Kind.REPLICA, *NEEDS_REFERENCE) or (row["kind"] != Kind.REPLICA and not decoded):
        return row, payload
    # The receiver may not have what it repeats; but made from the same reference, the same bytes make it.
    original = int.from_bytes(payload.tobytes(), "little") if not decoded else block
    if original < block:
        other, other_index = link.stored_at(stored.part, original)
        row = part.table[original].copy()
        is_alike = row["kind"] != Kind.REPLICA and other.layout.dtype == layout.dtype
        if is_alike and (
            row["kind"] not in NEEDS_REFERENCE
            or _raw_checksum(chain, level - 1, layout, index)
            == _raw_checksum(chain, level - 1, other.layout, other_index)
        ):
            return row, part.payload(original)
    payload = np.empty(int(part.table[block]["raw"]), np.uint8)
    Chain(chain.links[: level + 1]).read_block(stored, index, payload, scratch)
    row = part.table[block].copy()
    row["kind"], row["stored"], row["checksum"] = Kind.STORED, payload.size, checksum_of(payload)
    return row, payload


def _raw_checksum(chain: Chain, level: int, layout: Layout, index: int) -> int | None:
    """Return the checksum of a block of one of the snapshots; None if there is no such."""
    stored = chain.links[level].by_layout.get(layout) if level >= 0 else None
    if stored is None:
        return None
    return int(chain.links[level].parts[stored.part].table[stored.first_block + index]["raw_checksum"])


def _joined(rows: Sequence[np.void], payloads: Sequence[Bytes]) -> bytes:
    return np.array(rows, BLOCK).tobytes() + b"".join(payload.data for payload in payloads)


class _Head(NamedTuple):
    """What a message begins with. refresh: which it is of."""

    kind: int
    number: int
    refresh: bytes


def _head_of(message: bytes) -> _Head | None:
    """Return what a message begins with, which may be damaged; None if it is not one of ours."""
    if len(message) < _HEAD.size + _CHECKSUM_BYTES:
        return None
    magic, kind, number, refresh = _HEAD.unpack_from(message)
    return _Head(kind, number, refresh) if magic == _MAGIC else None


class _Sealer:
    """Numbers the messages of one refresh, and chains their checksums."""

    def __init__(self) -> None:
        self._number = 0
        self._checksum = bytes(_CHECKSUM_BYTES)
        #: Of what is sent; what is received says itself, and the checksums say that it is all of one.
        self._refresh = secrets.token_bytes(_REFRESH_BYTES)

    def message(self, kind: int, body: bytes) -> bytes:
        head = _HEAD.pack(_MAGIC, kind, self._number, self._refresh)
        self._checksum = _checksum(self._checksum, head, body)
        self._number += 1
        return head + body + self._checksum

    def opened(self, message: bytes) -> tuple[int, memoryview]:
        """Return kind and body of the next message. Raises: FormatError if this is not it."""
        view = memoryview(message)
        if len(view) < _HEAD.size + _CHECKSUM_BYTES:
            raise FormatError(f"message {self._number} of a refresh is cut off: it has {len(view)} bytes")
        head, body, checksum = (
            view[: _HEAD.size],
            view[_HEAD.size : -_CHECKSUM_BYTES],
            view[-_CHECKSUM_BYTES:],
        )
        said = _head_of(message)
        if said is None:
            raise FormatError("a message is not of a refresh, or of another version of Penstock")
        kind, number, _ = said
        if number != self._number:
            raise FormatError(
                f"message {number} of a refresh came where message {self._number} should have: some were lost, came "
                "twice, or in another order"
            )
        found = _checksum(self._checksum, head, body)
        if found != checksum:
            raise FormatError(
                f"message {number} of a refresh is damaged, or does not follow the one before: its checksum does "
                "not match"
            )
        self._checksum = found
        self._number += 1
        return kind, body


def _checksum(before: bytes, head: bytes | memoryview, body: bytes | memoryview) -> bytes:
    checksum = xxhash.xxh3_64(before)
    checksum.update(head)
    checksum.update(body)
    return checksum.digest()


# -- Receiving -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Refreshed:
    """What a refresh did.

    step: that the tensors now are of. sent_bytes: of all messages. not_found: names of values of the state that were
    asked for and that the snapshot does not have; they are unchanged.
    """

    step: int
    sent_bytes: int
    not_found: tuple[str, ...]


class Refresher:
    """The tensors of a worker, kept up to date. Not for several threads at once."""

    def __init__(self, state: Any) -> None:
        """state: nested as it was saved; its arrays are overwritten in place, wherever they are."""
        self._state = state
        #: Step and uid of the snapshot that the state is of; None: of nobody knows which.
        self._at: tuple[int, str] | None = None
        #: Whether the last refresh failed: what is left of it may still come.
        self._has_failed = False
        #: The refreshes of which messages came since one was applied.
        self._seen: set[bytes] = set()

    @property
    def step(self) -> int | None:
        """Return the step that the tensors are of; None before the first refresh, and after one that failed."""
        return None if self._at is None else self._at[0]

    def apply(self, messages: Iterable[bytes]) -> Refreshed:
        """Apply messages in place, as they come; none is taken after the last of the refresh.

        After an error, messages that are left of the refresh that failed are passed over, until the first of another
        comes.

        Raises: FormatError if one is damaged or missing, if they begin at another snapshot than the one that the
            tensors are of, or if the tensors were changed since; ConfigError if what is sent does not fit the state,
            or is no bytes.
            If that is found at the first message, nothing is changed; else the tensors are of no snapshot until
            messages from the beginning (`from_step=None`) are applied.
        """
        if isinstance(messages, (bytes, bytearray, memoryview, str)) or not isinstance(messages, Iterable):
            raise ConfigError(
                f"messages is of type {type(messages).__qualname__}; give an iterator or a list of them, also of one"
            )
        try:
            refreshed = self._apply(_checked(messages))
        except BaseException:  # of the transport, too: what it had no time for comes later
            self._has_failed = True
            raise
        self._has_failed = False
        self._seen.clear()
        return refreshed

    def _first(self, received: Iterator[bytes]) -> bytes | None:
        """Return the first message of a refresh; of one that failed, what is left is passed over. None: at the end."""
        for message in received:
            head = _head_of(message)
            if not self._has_failed or (head is not None and head.number == 0):
                return message
            if head is not None and head.kind == _END and head.refresh not in self._seen:
                raise FormatError("the first message of a refresh was lost or damaged: ask for it again")
        return None

    def _apply(self, received: Iterator[bytes]) -> Refreshed:
        sealer = _Sealer()
        sent_bytes = 0

        def opened(message: bytes | None) -> tuple[int, memoryview]:
            nonlocal sent_bytes
            if message is None:
                raise FormatError("the messages end before the last of the refresh: some were lost")
            sent_bytes += len(message)
            head = _head_of(message)
            if head is not None:
                self._seen.add(head.refresh)
            return sealer.opened(message)

        kind, body = opened(self._first(received))
        if kind != _START:
            raise FormatError("the messages do not begin with what they are of: some were lost")
        start = _Start(body)
        if start.begin is not None and self._at != start.begin:
            raise FormatError(
                f"the messages begin at step {start.begin[0]}, and the tensors are of "
                f"{'no known step' if self._at is None else f'step {self._at[0]}'}: ask for them from there"
            )
        loading = plan_loading_into(self._state, start.tree, only=start.only)
        self._at = None
        tensors = _Tensors(start, loading)
        while True:
            kind, body = opened(next(received, None))
            if kind == _BLOCKS:
                tensors.apply(body)
            elif kind == _END and not body and tensors.are_complete:
                break
            else:
                raise FormatError("a message of a refresh is neither blocks nor, after all of them, the end")
        tensors.finish()
        loading.state()
        self._at = start.end
        return Refreshed(start.end[0], sent_bytes, loading.not_found)


def _checked(messages: Iterable[Any]) -> Iterator[bytes]:
    """Yield messages. Raises: ConfigError if one is no bytes."""
    for message in messages:
        if not isinstance(message, (bytes, bytearray, memoryview)):
            raise ConfigError(
                f"messages has a {type(message).__qualname__} in it; a message is bytes, as `SnapshotStore.refresh` "
                "yields them: let the transport keep them so"
            )
        yield message  # type: ignore[misc] # or what lies as bytes do


class _Start:
    """What the first message says; nothing in it is trusted."""

    def __init__(self, body: memoryview) -> None:
        """Raises: FormatError if it says what cannot be."""
        try:
            said = expect(dict, json.loads(bytes(body)), "it")
            if said.keys() != {"from", "to", "hops", "only", "tree", "layouts"}:
                raise TypeError("it does not have what it must")
            #: Step and uid of the snapshot that the messages are the difference to; None: they are from the beginning.
            self.begin = None if said["from"] is None else _snapshot(said["from"])
            self.end = _snapshot(said["to"])
            #: How many snapshots' blocks come.
            self.hops = integer(said["hops"], "hops", most=(1 << 32) - 1)
            if not self.hops and self.begin != self.end:
                raise TypeError("it has nothing between two snapshots")
            self.only = None if said["only"] is None else expect(list, said["only"], "only")
            #: Of the tensors, or parts of them, by the numbers that messages call them.
            self.layouts = [read_layout(row) for row in expect(list, said["layouts"], "layouts")]
            self.tree = read_tree(said["tree"], _wholes(self.layouts))
            wanted = _wanted(self.tree, self.only)
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise FormatError(f"the first message of a refresh says what cannot be: {error}") from None
        #: Number and blocks of each of which blocks come, in their order, in every hop.
        self.sent = [
            (number, count_blocks(layout))
            for number, layout in enumerate(self.layouts)
            if layout.name in wanted and count_blocks(layout)
        ]


def _snapshot(said: Any) -> tuple[int, str]:
    step, uid = items(2, said, "a snapshot")
    return integer(step, "step"), expect(str, uid, "uid")


def _wholes(layouts: Iterable[Layout]) -> list[Layout]:
    """Return the layouts of the tensors that parts make up. Raises: FormatError if they do not."""
    try:
        return check_whole(layouts)
    except ConfigError as error:
        raise FormatError(f"a tensor is not whole: {error}") from None


class _Tensors:
    """The tensors of a refresh that is under way, and which of their blocks comes next."""

    def __init__(self, start: _Start, loading: Loading) -> None:
        """Raises: FormatError if what the messages speak of fits into no memory."""
        self._start = start
        self._scratch = Scratch()
        #: How many hops are complete, which of the tensors sent comes next in this one, and which block of it.
        self._hop = self._place = self._block = 0
        self._destinations = {destination.layout.name: destination for destination in loading.destinations}
        #: Where the parts are whose tensor the state has, by their numbers.
        self._memory: dict[int, Bytes] = {}
        for destination in loading.destinations:
            _allocated(destination)
            if start.begin is not None:
                destination.fetch()
        for number, _ in start.sent:
            layout = start.layouts[number]
            to = self._destinations.get(layout.name)
            if to is None:
                continue
            part = to.memory if layout.box is None else np.empty(layout.nbytes, np.uint8)
            if layout.box is not None and start.begin is not None:
                _values(part, layout)[...] = _part_of(to, layout)
            self._memory[number] = part

    @property
    def are_complete(self) -> bool:
        return self._hop == self._start.hops or not self._start.sent

    def apply(self, body: memoryview) -> None:
        """Apply a message of blocks. Raises: FormatError if they are not the next, or not of these tensors."""
        if len(body) < _RUN.size:
            raise FormatError("a message of blocks has none")
        number, first, count = _RUN.unpack_from(body)
        rows_end = _RUN.size + count * BLOCK.itemsize
        if (
            self.are_complete
            or (number, first) != (self._start.sent[self._place][0], self._block)
            or not 0 < count <= self._start.sent[self._place][1] - first
            or rows_end > len(body)
        ):
            raise FormatError("a message has other blocks than those that come next")
        rows = np.frombuffer(body[_RUN.size : rows_end], BLOCK)
        if rows_end + int(rows["stored"].astype(np.int64).sum()) != len(body):
            raise FormatError("a message is not as long as its blocks")
        memory = self._memory.get(number)
        if memory is not None:
            self._decode(self._start.layouts[number], memory, first, rows, body[rows_end:])
        self._block += count
        if self._block == self._start.sent[self._place][1]:
            self._block = 0
            self._place += 1
        if self._place == len(self._start.sent):
            self._place = 0
            self._hop += 1

    def _decode(
        self, layout: Layout, memory: Bytes, first: int, rows: np.ndarray[Any, Any], payloads: memoryview
    ) -> None:
        block_bytes = BLOCK_VALUES * layout.dtype.item_bytes
        begin = 0
        for number, row in enumerate(rows, first):
            payload = np.frombuffer(payloads, np.uint8, int(row["stored"]), begin)
            begin += payload.size
            place = memory[number * block_bytes : (number + 1) * block_bytes]
            kind = int(row["kind"])
            if int(row["raw"]) != place.size:
                raise FormatError(f"a block of {layout.name!r} is not of its size")
            out = place
            fault: FormatError | None = None
            if kind != Kind.EQUAL or payload.size:
                out = self._scratch.buffer(0, place.size)
                try:
                    decode_block(kind, payload, layout.dtype, place if kind in NEEDS_REFERENCE else None, out)
                except FormatError as error:
                    # The bytes are those that were sent: it is what they are a difference to that is another.
                    fault = error
                    if kind not in NEEDS_REFERENCE:
                        raise
            if fault or raw_checksum_of(out) != int(row["raw_checksum"]):
                raise FormatError(
                    f"{layout.name!r} is not what the messages begin with: it was changed since, or never was; "
                    "ask for the whole snapshot"
                ) from fault
            if out is not place:
                place[:] = out

    def finish(self) -> None:
        """Put the tensors where they belong."""
        for number, memory in self._memory.items():
            layout = self._start.layouts[number]
            if layout.box is not None:
                _part_of(self._destinations[layout.name], layout)[...] = _values(memory, layout)
        for destination in self._destinations.values():
            destination.finish()


def _allocated(destination: Destination) -> None:
    try:
        _ = destination.memory
    except (MemoryError, RuntimeError, ValueError) as error:  # as PyTorch and NumPy say it
        layout = destination.layout
        raise FormatError(
            f"{layout.name!r} is said to have {layout.nbytes:,} bytes, which no memory has: {error}"
        ) from None


def _values(memory: Bytes, layout: Layout) -> np.ndarray[Any, Any]:
    return memory.view(f"V{layout.dtype.item_bytes}").reshape(layout.shape)


def _part_of(destination: Destination, layout: Layout) -> np.ndarray[Any, Any]:
    """Return the view of a part in the tensor that it is of."""
    assert layout.box is not None, "it is a part"
    whole = destination.memory.view(f"V{layout.dtype.item_bytes}").reshape(layout.box.whole)
    return whole[
        tuple(
            slice(offset, offset + size)
            for offset, size in zip(layout.box.offsets, layout.shape, strict=True)
        )
    ]
