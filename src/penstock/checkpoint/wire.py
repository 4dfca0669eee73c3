"""Weights on the wire: what changed from one snapshot to another, sent as the store keeps it and applied in place.

    trainer                                              inference worker
    for message in refresh(store, 100, 120): send(...)   worker = Refresher(state, step=100); worker.apply(messages)

A message is bytes, for any transport that keeps messages apart and in order: a kind, a body, a checksum. The first
says from which snapshot to which, and what the tensors are; then blocks come as they are in part files, hop by hop
along the differences between the two; the last says that all were sent.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from penstock.checkpoint.catalog import Catalog, open_way
from penstock.checkpoint.codecs import decode_block
from penstock.checkpoint.codecs.codec import BLOCK_VALUES, NEEDS_REFERENCE, Kind
from penstock.checkpoint.loading import Destination, plan_loading_into
from penstock.checkpoint.manifest import Stored, count_blocks, read_layout, write_layout
from penstock.checkpoint.parts import BLOCK, checksum_of, raw_checksum_of
from penstock.checkpoint.reading import Chain, OpenSnapshot
from penstock.checkpoint.tensors import Bytes, Layout
from penstock.checkpoint.tree import ArrayLeaf, read_tree, select
from penstock.checkpoint.writing import Scratch
from penstock.errors import FormatError

_START, _BLOCKS, _END = 1, 2, 3
_HEAD = struct.Struct("<8sI")
_MAGIC = b"PENSTRE1"
_RUN = struct.Struct("<III")
#: A message has blocks of one tensor, of about so many bytes.
_MESSAGE_BYTES = 4 << 20


# -- Sending ---------------------------------------------------------------------------------------------------


def messages(
    catalog: Catalog, from_step: int | None, to_step: int, only: Iterable[str] | None = None
) -> Iterator[bytes]:
    """Yield what turns the tensors of one snapshot into those of another.

    from_step: of what the receiver has; None: nothing that counts. to_step: of what it shall have. only: names or
        patterns of what is sent; None: all.
    Raises: ConfigError if there is no such snapshot; FormatError, DataError if one is damaged.
    """
    way = catalog.ways(to_step)[0]
    # As of the receiver's snapshot, if the way to the other leads through it; else from its beginning.
    steps = [step for _, step in way]
    first = steps.index(from_step) + 1 if from_step in steps else 0
    with closing(open_way(catalog, way)) as chain:
        target = chain.manifest
        layouts = [stored.layout for stored in target.tensors]
        tree = read_tree(target.tree, layouts)
        names = sorted(tree.names if only is None else select(tree.names, only))
        chosen = frozenset(names)
        leaves = (leaf for leaf in tree.leaves if isinstance(leaf, ArrayLeaf))
        wanted = frozenset(leaf.of for leaf in leaves if leaf.name in chosen)
        yield _message(
            _START,
            json.dumps(
                {
                    "from": [from_step, chain.links[first - 1].manifest.uid] if first else None,
                    "to": [target.step, target.uid],
                    "tree": target.tree,
                    "layouts": [write_layout(layout) for layout in layouts],
                    "names": names,
                }
            ).encode(),
        )
        sent = 0
        for level in range(first, len(chain.links)):
            for number, layout in enumerate(layouts):
                if layout.name in wanted:
                    for body in _runs(chain, level, number, layout):
                        sent += 1
                        yield _message(_BLOCKS, body)
        yield _message(_END, json.dumps({"sent": sent}).encode())


def _runs(chain: Chain, level: int, number: int, layout: Layout) -> Iterator[bytes]:
    """Yield the blocks of a tensor in one snapshot, some at a time."""
    link = chain.links[level]
    stored = link.by_layout[layout]
    rows: list[np.void] = []
    payloads: list[Bytes] = []
    first = size = 0
    scratch = Scratch()
    for index in range(count_blocks(layout)):
        row, payload = _as_sent(chain, level, link, stored, index, scratch)
        rows.append(row)
        payloads.append(payload)
        size += payload.size
        if size >= _MESSAGE_BYTES:
            yield _RUN.pack(number, first, len(rows)) + _joined(rows, payloads)
            rows, payloads, first, size = [], [], index + 1, 0
    if rows:
        yield _RUN.pack(number, first, len(rows)) + _joined(rows, payloads)


def _as_sent(
    chain: Chain, level: int, link: OpenSnapshot, stored: Stored, index: int, scratch: Scratch
) -> tuple[np.void, Bytes]:
    part, block = link.parts[stored.part], stored.first_block + index
    row = part.table[block].copy()
    if row["kind"] != Kind.REPLICA:
        return row, part.payload(block)
    # What it repeats may be of another tensor, with another reference: sent as it is.
    payload = np.empty(int(row["raw"]), np.uint8)
    Chain(chain.links[: level + 1]).read_block(stored, index, payload, scratch)
    row["kind"], row["stored"], row["checksum"] = Kind.STORED, payload.size, checksum_of(payload)
    return row, payload


def _joined(rows: Sequence[np.void], payloads: Sequence[Bytes]) -> bytes:
    return np.array(rows, BLOCK).tobytes() + b"".join(payload.data for payload in payloads)


def _message(kind: int, body: bytes) -> bytes:
    head = _HEAD.pack(_MAGIC, kind)
    checksum = xxhash.xxh3_64(head)
    checksum.update(body)
    return head + body + checksum.digest()


# -- Receiving -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Refreshed:
    """What a refresh did. step: that the tensors now are of. sent_bytes: of all messages."""

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

    @property
    def step(self) -> int | None:
        """Return the step that the tensors are of; None before the first refresh, and after one that failed."""
        return None if self._at is None else self._at[0]

    def apply(self, messages: Iterable[bytes]) -> Refreshed:
        """Apply messages in place, as they come.

        Raises: FormatError if one is damaged or missing, if they begin at another snapshot than the one that the
            tensors are of, or if the tensors were changed since; nothing is changed in the first case, and in the
            others they are of no snapshot until messages from the beginning (`from_step=None`) are applied.
        """
        received = iter(messages)
        sent_bytes = 0
        kind, body = _opened(next(received, b""))
        if kind != _START:
            raise FormatError("the messages do not begin with what they are of: some were lost")
        sent_bytes += len(body)
        said = _said(body)
        begins_at = said["from"]
        if begins_at is not None and self._at != tuple(begins_at):
            raise FormatError(
                f"the messages begin at step {begins_at[0]}, and the tensors are of "
                f"{'no known step' if self._at is None else f'step {self._at[0]}'}: ask for them from there"
            )
        layouts = said["layouts"]
        tree = read_tree(said["tree"], layouts)
        loading = plan_loading_into(self._state, tree, only=said["names"])
        destinations = {destination.layout: destination for destination in loading.destinations}
        self._at = None
        if begins_at is not None:
            for destination in loading.destinations:
                destination.fetch()
        scratch = Scratch()
        for count, message in enumerate(received):
            kind, body = _opened(message)
            sent_bytes += len(body)
            if kind == _END:
                if json.loads(body) != {"sent": count}:
                    raise FormatError(f"of the messages some were lost: {count} came of {body.decode()}")
                for destination in destinations.values():
                    destination.finish()
                loading.state()
                self._at = said["to"][0], said["to"][1]
                return Refreshed(said["to"][0], sent_bytes, loading.not_found)
            _apply_run(body, layouts, destinations, scratch)
        raise FormatError("the messages end before the last: some were lost")


def _said(body: bytes) -> dict[str, Any]:
    try:
        said = json.loads(body)
        layouts = [read_layout(row) for row in said["layouts"]]
        names = said["names"]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise TypeError(f"names are {names!r:.80}")
        return {key: said[key] for key in ("from", "to", "tree", "names")} | {"layouts": layouts}
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise FormatError(f"the first message says what cannot be: {error}") from None


def _opened(message: bytes) -> tuple[int, bytes]:
    if len(message) < _HEAD.size + 8 or xxhash.xxh3_64_digest(message[:-8]) != message[-8:]:
        raise FormatError("a message is damaged or cut off: its checksum does not match")
    magic, kind = _HEAD.unpack_from(message)
    if magic != _MAGIC:
        raise FormatError("a message is not of a refresh, or of another version of Penstock")
    return kind, message[_HEAD.size : -8]


def _apply_run(
    body: bytes, layouts: Sequence[Layout], destinations: dict[Layout, Destination], scratch: Scratch
) -> None:
    if len(body) < _RUN.size:
        raise FormatError("a message of blocks has none")
    number, first, count = _RUN.unpack_from(body)
    end = _RUN.size + count * BLOCK.itemsize
    if number >= len(layouts) or first + count > count_blocks(layouts[number]) or end > len(body):
        raise FormatError("a message has blocks that its tensor does not have")
    layout = layouts[number]
    destination = destinations.get(layout)
    rows = np.frombuffer(body[_RUN.size : end], BLOCK)
    if end + int(rows["stored"].astype(np.int64).sum()) != len(body):
        raise FormatError("a message is not as long as its blocks")
    if destination is None:
        return
    block_bytes = BLOCK_VALUES * layout.dtype.item_bytes
    for offset, row in enumerate(rows):
        payload = np.frombuffer(body, np.uint8, int(row["stored"]), end)
        end += payload.size
        place = destination.memory[(first + offset) * block_bytes : (first + offset + 1) * block_bytes]
        kind = int(row["kind"])
        if int(row["raw"]) != place.size:
            raise FormatError(f"a block of {layout.name!r} is not of its size")
        if kind != Kind.EQUAL:
            out = scratch.room(0, place.size)
            decode_block(kind, payload, layout.dtype, place if kind in NEEDS_REFERENCE else None, out)
        else:
            out = place
        if raw_checksum_of(out) != int(row["raw_checksum"]):
            raise FormatError(
                f"{layout.name!r} is not what the messages begin with: it was changed since, or never was; "
                "ask for the whole snapshot"
            )
        if out is not place:
            place[:] = out
