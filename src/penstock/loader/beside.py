"""What a batch of a data set has beside its slot: texts and objects, and arrays whose size no slot can know."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from penstock.loader.reused import Reused
from penstock.loader.unequal import Padded, Ragged
from penstock.policy import Load

#: Makes of what samples have in one field what batches have: of all samples, and where in them each batch's are.
Join = Callable[[Sequence[Any], Sequence[slice]], list[Any]]


def lists(parts: Sequence[Any], steps: Sequence[slice]) -> list[Any]:
    """Return what batches have of a field as their samples have it."""
    return [list(parts[step]) for step in steps]


@dataclass
class _Slot:
    """What the batch of a slot has, by step, of several that share the slot by the first row of each.

    batch: its running number. size: rows of a step. rows: parts of samples by row, of steps that are not complete.
    joined: what those have that are. nbytes: of the arrays of each.
    """

    batch: int
    size: int
    rows: dict[int, dict[int, list[Any]]] = field(default_factory=dict)
    joined: dict[int, list[Any]] = field(default_factory=dict)
    nbytes: dict[int, int] = field(default_factory=dict)


class Held(NamedTuple):
    """What a worker process has made of some rows of a slot. See `_Slot`."""

    batch: int
    size: int
    rows: dict[int, dict[int, list[Any]]]
    joined: dict[int, list[Any]]


class Beside:
    """The parts of samples that have no place in a slot, from the moment they are made until the slot has others.

    Whoever brings a step's last rows joins them, so that the training's thread need not. Any thread may call it.
    joins: one for each part of a sample. memory: of arrays that these make.
    A copy, in another process or here, begins empty.
    """

    def __init__(self, joins: Sequence[Join], memory: Reused) -> None:
        self._joins, self._memory = tuple(joins), memory
        self._lock = threading.Lock()
        self._slots: dict[int, _Slot] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Beside, (self._joins, self._memory)

    @property
    def held_bytes(self) -> int:
        """What the arrays of all slots take."""
        return sum(sum(slot.nbytes.copy().values()) for slot in self._slots.copy().values())

    def put_columns(
        self,
        load: Load,
        rows: range,
        columns: Sequence[Sequence[Any]],
        kept: Callable[[Sequence[Any]], list[Any]],
    ) -> None:
        """Join the parts of samples step by step, and keep those of a step that has other rows as well.

        columns: of each part, in the order of rows. They are not kept. kept: returns what of a sample's parts may be.
        """
        size, first = load.samples.size // load.steps, rows[0]
        slot = self._slot_of(load.slot, load.batch, size)
        front = min(-first % size, len(rows))
        end = len(rows) - (len(rows) - front) % size
        steps = [slice(begin, begin + size) for begin in range(front, end, size)]
        made = [join(column, steps) for join, column in zip(self._joins, columns, strict=True)]
        for step, joined in zip(steps, zip(*made, strict=True), strict=True):
            row = first + step.start
            slot.joined[row], slot.nbytes[row] = list(joined), _nbytes(joined)
        alone = [*range(front), *range(end, len(rows))]
        if alone:
            self._add(slot, {first + index: kept([column[index] for column in columns]) for index in alone})

    def put_rows(self, load: Load, rows: Sequence[int], samples: Sequence[list[Any]]) -> None:
        """Keep the parts of samples, one by one, and join those of a step that has all of its rows by this.

        samples: of each row its parts, whose arrays nobody changes any more.
        """
        slot = self._slot_of(load.slot, load.batch, load.samples.size // load.steps)
        self._add(slot, dict(zip(rows, samples, strict=True)))

    def of(self, slot: int, rows: Sequence[int]) -> list[Any]:
        """Return what a batch of these rows of a slot has of each part: twice the same, if it is asked twice."""
        held = self._slots.get(slot)
        if not rows or held is None:
            return self._joined([[] for _ in self._joins])
        if (joined := held.joined.get(rows[0])) is not None:
            return joined
        known = {row: parts for step in held.rows.values() for row, parts in step.items()}
        return self._joined([[known[row][which] for row in rows] for which in range(len(self._joins))])

    def drop(self, slot: int) -> None:
        """Keep nothing of a slot any more."""
        self._slots.pop(slot, None)

    def close(self) -> None:
        """Keep no memory to use again: what batches have goes with them."""
        self._memory.close()

    def take(self, slot: int) -> Held | None:
        """Return what a slot has, in a worker process, and keep it no longer; None where that is nothing."""
        held = self._slots.pop(slot, None)
        return None if held is None else Held(held.batch, held.size, held.rows, held.joined)

    def put(self, slot: int, held: Held | None) -> None:
        """Keep what another process has made for a slot."""
        if held is None:
            return
        here = self._slot_of(slot, held.batch, held.size)
        for first, joined in held.joined.items():
            here.joined[first], here.nbytes[first] = joined, _nbytes(joined)
        for step in held.rows.values():
            self._add(here, step)

    def _slot_of(self, number: int, batch: int, size: int) -> _Slot:
        with self._lock:
            slot = self._slots.get(number)
            if slot is None or slot.batch != batch:
                slot = self._slots[number] = _Slot(batch, size)
            return slot

    def _add(self, slot: _Slot, samples: dict[int, list[Any]]) -> None:
        for row, parts in samples.items():
            slot.rows.setdefault(row - row % slot.size, {})[row] = parts
        for first in {row - row % slot.size for row in samples}:
            self._join_if_complete(slot, first)

    def _join_if_complete(self, slot: _Slot, first: int) -> None:
        with self._lock:
            if len(slot.rows.get(first, ())) < slot.size:
                return
            step = slot.rows.pop(first)
        samples = [step[row] for row in range(first, first + slot.size)]
        joined = self._joined([[parts[which] for parts in samples] for which in range(len(self._joins))])
        slot.joined[first], slot.nbytes[first] = joined, _nbytes(joined)

    def _joined(self, columns: Sequence[Sequence[Any]]) -> list[Any]:
        """Return what one batch has of each part."""
        return [
            join(column, [slice(len(column))])[0] for join, column in zip(self._joins, columns, strict=True)
        ]


def _nbytes(parts: Sequence[Any]) -> int:
    """Return what the arrays of a batch's parts take."""
    nbytes = 0
    for part in parts:
        if isinstance(part, np.ndarray):
            nbytes += part.nbytes
        elif isinstance(part, Ragged):
            nbytes += part.values.nbytes + part.offsets.nbytes
        elif isinstance(part, Padded):
            nbytes += part.values.nbytes + part.mask.nbytes
    return nbytes
