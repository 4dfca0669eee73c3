"""What to fetch next, from where, for which batch slot or tier: one rank's run, as a pure state machine.

It is told of events (`start`, `slot_freed`, `slots_added`, `moved`, `loaded`, `seek`) and answers each with
instructions. It does no I/O and never asks for the time. Threads drive it over real stores (`flow.engine`), a virtual
clock over the machine's curves (`simulate.loading`); neither has a rule of its own.

Rules, in the order in which they win (the functions of `penstock.policy.decisions` hold them):
1. Batches are staged in the plan's order into free slots, across the ends of epochs. Moves for staged batches go out
   by due time (thesis 3.2.1, rule 1: fetch the next sample that is not there).
2. A sample is never fetched twice at a time: who needs it while it is on its way waits for that move, and a move of a
   sample that a tier shall keep fills the tier as well (one physical read per miss).
3. A sample is taken from where it is expected first, what is queued there included. A worker reads by itself what takes
   less than a hand-over between threads; what a tier cannot give back is read from the source.
4. Readers that no staged batch needs fill the tiers in the order of first use, on at most half of the readers, so that
   an urgent move never finds all of them taken; a tier whose fills are slow does not hold up another's.
5. Bytes in flight and bytes that were read and not yet decoded are bounded; decode workers take the earliest batch that
   has work.
6. A group takes a millisecond: one sample where a read takes that long, a whole batch where it takes microseconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.machine import Machine
from penstock.machine_code import Loop
from penstock.plan import AccessPlan
from penstock.policy import decisions
from penstock.policy.decision_state import new_state, views_of, with_slots
from penstock.policy.decisions import OK, STAGING
from penstock.policy.load_size import LoadSize
from penstock.policy.placement import Kept, Placement
from penstock.policy.thread_count import ThreadCount, ThreadFacts

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StagingLimits:
    """How much may be under way at once.

    slots: batch slots that exist from the start.
    readers: moves in flight at most; 0 leaves all reading to the decode workers.
    decoders: `Load`s in progress at most, unless most_decoders is given: then to begin with.
    most_decoders: where not 0, the number of `Load`s in progress follows what it does to the rate, from 1 up to this.
    undecoded_bytes: of samples that reader threads are reading, or have read for a batch and that are not decoded
        yet; one sample is always allowed.
    """

    slots: int
    readers: int
    decoders: int
    undecoded_bytes: int
    most_decoders: int = 0


class Move(NamedTuple):
    """Instruction: move some samples from a place to another, for a batch. A reader thread does it.

    entries: what the driver keeps the bytes of each sample by, until `Drop`. samples: as many.
    origin: SOURCE or a tier's number. rests: of each, the tier that is to keep it, or STAGING.
    batch: running number of the first batch that waits for one of them, -1 for a background fill of a tier, which has
        no step and counts to the epoch that is being staged.
    """

    entries: list[int]
    samples: list[int]
    origin: int
    rests: list[int]
    batch: int
    epoch: int
    step: int


class Load(NamedTuple):
    """Instruction: bring some samples of a batch into its slot (decode, transform, write).

    samples: int64[local batch], of the whole batch. rows: the places of these in it. ids: `samples[rows]`.
    origins: of each a tier's number (take it from there), STAGING (the bytes are those of the entry) or SOURCE (read it
        yourself). rests: of each the tier that is to keep what you read from the source, or STAGING.
    entries: of each, -1 where there is none.
    """

    batch: int
    epoch: int
    step: int
    samples: Ids
    slot: int
    rows: list[int]
    ids: list[int]
    origins: list[int]
    rests: list[int]
    entries: list[int]


class Staged(NamedTuple):
    """Notice: a batch got its slot; it had been the next in line since `due_seconds`."""

    epoch: int
    step: int
    due_seconds: float


class Ready(NamedTuple):
    """Notice: a batch is complete, and its slot the consumer's until `slot_freed`.

    failed: the rows whose sample could not be had.
    """

    batch: int
    epoch: int
    step: int
    slot: int
    samples: Ids
    failed: tuple[int, ...]


class Drop(NamedTuple):
    """Notice: nobody wants the bytes of these entries any more."""

    entries: list[int]


class OwnRead(NamedTuple):
    """What a worker's own reads from one place took. origin: SOURCE or a tier's number."""

    origin: int
    reads: int
    seconds: float


Instruction = Move | Load | Staged | Ready | Drop


class _Batch(NamedTuple):
    """A batch that has a slot and is not complete."""

    number: int
    epoch: int
    step: int
    samples: Ids


def _columns_of(
    table: NDArray[np.int32], view: memoryview, items: list[int], columns: tuple[int, ...]
) -> list[list[int]]:
    """Return columns of some rows of a table of rank 0. view: over it, which is quicker to ask for one row."""
    if len(items) == 1:
        return [[view[0, items[0], column]] for column in columns]
    rows = table[0][items]
    return [rows[:, column].tolist() for column in columns]


class Scheduler:
    """What one rank loads. Not thread-safe: whoever drives it holds a lock or is alone.

    plan, rank: who reads what, when.
    sizes_bytes: int64[samples], of each sample as stored.
    placement: which samples the tiers keep.
    machine: what reads cost, as far as is known; corrected by what they take.
    """

    def __init__(
        self,
        plan: AccessPlan,
        rank: int,
        sizes_bytes: NDArray[np.int64],
        placement: Placement,
        machine: Machine,
        limits: StagingLimits,
    ) -> None:
        self._plan = plan
        self._rank = rank
        self._limits = limits
        #: The compiled form of `decisions.act`, once there is one; and bound to the state.
        self._loop: Loop | None = None
        self._bound: Callable[..., int] | None = None
        kept = Kept(placement.fill_order, placement.tier_of[placement.fill_order])
        self._have(
            new_state(
                sizes_bytes,
                [kept],
                machine,
                slots=limits.slots,
                local_batch=plan.max_local_batch(rank),
                readers=limits.readers,
                undecoded_bytes=limits.undecoded_bytes,
            )
        )
        most, least = (
            (limits.most_decoders, 1) if limits.most_decoders else (limits.decoders, limits.decoders)
        )
        self._threads = ThreadCount(limits.decoders, most, least)
        #: Whether all threads that may load had work when the last event was over.
        self._were_busy = False
        self._load_size = LoadSize()
        self._loads_running = 0
        self._slots = limits.slots
        self._free_slots: deque[int] = deque(range(limits.slots))
        #: The next batch to stage, its running number, and since when it has been next.
        self._epoch, self._step = plan.first_read_from(rank, 0, 0)
        self._number = 0
        self._due_seconds = 0.0
        #: Incomplete batches by slot, and their slots by running number, in the plan's order.
        self._batches: dict[int, _Batch] = {}
        self._slot_of: dict[int, int] = {}

    # Events

    def start(self, now: float) -> list[Instruction]:
        """Begin at `now` (seconds)."""
        self._due_seconds = now
        return self._advance(now)

    def slot_freed(self, slot: int, now: float) -> list[Instruction]:
        """Nobody refers to the slot of a complete batch any more."""
        self._free_slots.append(slot)
        return self._advance(now)

    def slots_added(self, slots: int, now: float) -> list[Instruction]:
        """There are this many slots now. Said twice, it is harmless."""
        if slots > self._slots:
            if slots > self._state.slots.shape[1]:
                self._have(with_slots(self._state, max(slots, 2 * self._slots)))
            self._free_slots.extend(range(self._slots, slots))
            self._slots = slots
        return self._advance(now)

    def moved(self, move: Move, seconds: float, failed: list[int], now: float) -> list[Instruction]:
        """A reader thread finished a move after `seconds`. failed: indices of the samples that could not be had.

        What came from a tier is read from the source then; a failed fill is read again when it is due.
        """
        self._mark(move.entries, dict.fromkeys(failed, decisions.UNREAD))
        self._act(decisions.MOVED, 0, 0, len(move.entries), 0, seconds)
        return self._advance(now)

    def loaded(
        self,
        load: Load,
        failed: dict[int, int],
        own_reads: list[OwnRead],
        now: float,
        wall_seconds: float = 0.0,
        cpu_seconds: float = 0.0,
    ) -> list[Instruction]:
        """A decode worker finished a Load.

        failed: UNREAD or UNDECODED (of `decisions`) by index in the Load. What a tier could not give is read again.
        own_reads: that the worker did by itself and that succeeded.
        wall_seconds, cpu_seconds: that the Load took, but for waiting for a processor, and that its thread computed.
        """
        count = len(load.rows)
        self._loads_running -= 1
        self._threads.load_done(count, wall_seconds, cpu_seconds, now, self._were_busy)
        self._load_size.load_done(count, wall_seconds)
        for read in own_reads:
            self._act(decisions.OBSERVE, 0, 0, read.reads, read.origin, read.seconds)
        begin = load.slot * self._places
        self._mark([begin + row for row in load.rows], failed)
        self._act(decisions.LOADED, 0, load.slot, count, 0, 0.0)
        return self._advance(now)

    def seek(self, epoch: int, step: int, now: float) -> list[Instruction]:
        """Give up all batches before (epoch, step): the consumer left its loop early. Said twice, it is harmless.

        Slots of complete batches come back by `slot_freed`, as ever.
        """
        for number, slot in list(self._slot_of.items()):
            batch = self._batches[slot]
            if (batch.epoch, batch.step) < (epoch, step):
                del self._slot_of[number]
                self._act(decisions.ABANDON, 0, slot, 0, 0, 0.0)
        if (self._epoch, self._step) < (epoch, step):
            self._epoch, self._step = self._plan.first_read_from(self._rank, epoch, step)
            self._due_seconds = now
        return self._advance(now)

    # Questions

    @property
    def threads(self) -> ThreadFacts:
        """How many Loads may run at once, and why."""
        return self._threads.facts

    @property
    def loads_allowed(self) -> int:
        """How many Loads may run at once now."""
        return self._threads.threads

    @property
    def loads_running(self) -> int:
        """How many Loads were given out and are not done."""
        return self._loads_running

    def batches_waiting_for(self, entry: int) -> list[int]:
        """Return the running numbers of the batches that wait for an entry's bytes; -1 is no entry."""
        places, batches = self._views.places, []
        place = self._views.entries[0, entry, decisions.ENTRY_FIRST] if entry >= 0 else -1
        while place >= 0:
            batches.append(self._batches[place // self._places].number)
            place = places[0, place, decisions.PLACE_NEXT]
        return batches

    def limit_threads(self, most: int) -> None:
        """Say that the driver has no more threads than these and can have no more."""
        self._threads.limit(most)

    def is_wanted(self, number: int) -> bool:
        """Return whether a batch has a slot, is not complete yet, and was not given up."""
        return number in self._slot_of

    def use(self, loop: Loop) -> None:
        """Decide by compiled code from here on. loop: `decisions.act`, of the signature `decision_state.ACT`."""
        self._loop = loop
        self._bound = loop.bound(tuple(self._state))

    # Decisions

    def _advance(self, now: float) -> list[Instruction]:
        out: list[Instruction] = []
        numbers = self._numbers
        if released := numbers[0, decisions.RELEASED_ENTRIES]:
            numbers[0, decisions.RELEASED_ENTRIES] = 0
            # Before any instruction about an entry of the same number.
            if self._limits.readers:
                out.append(Drop(self._state.over[0, decisions.RELEASED, :released].tolist()))
        if numbers[0, decisions.ENDED_SLOTS]:
            self._end(out)
        while self._free_slots and self._epoch < self._plan.epochs:
            out.append(self._stage(now))
        while numbers[0, decisions.MOVES] < self._limits.readers and (move := self._next_move()) is not None:
            out.append(move)
        threads = self._threads.threads
        while self._loads_running < threads and numbers[0, decisions.DECODABLE_PLACES]:
            out.append(self._next_load(threads))
        self._were_busy = self._loads_running >= threads
        return out

    def _stage(self, now: float) -> Staged:
        samples = self._plan.local_batch(self._rank, self._epoch, self._step)
        number, slot = self._number, self._free_slots.popleft()
        self._batches[slot] = _Batch(number, self._epoch, self._step, samples)
        self._slot_of[number] = slot
        self._state.group[0, decisions.ITEM, : samples.size] = samples
        self._act(decisions.STAGE, 0, slot, samples.size, number, 0.0)
        notice = Staged(self._epoch, self._step, self._due_seconds)
        self._due_seconds = now
        self._number += 1
        epoch = self._epoch
        self._epoch, self._step = self._plan.first_read_from(self._rank, epoch, self._step + 1)
        if self._epoch != epoch:
            self._state.counts[0, :, decisions.PROBE] = 1
        return notice

    def _next_move(self) -> Move | None:
        if not self._numbers[0, decisions.QUEUED_ENTRIES] and self._is_filled():
            return None
        count = self._act(decisions.NEXT_MOVE, 0, 0, 0, 0, 0.0)
        if not count:
            return None
        entries = self._group(count)
        samples, rests, origins, batches = _columns_of(
            self._state.entries,
            self._views.entries,
            entries,
            (decisions.ENTRY_SAMPLE, decisions.ENTRY_REST, decisions.ENTRY_ORIGIN, decisions.ENTRY_BATCH),
        )
        number = batches[0]
        epoch, step = min(self._epoch, self._plan.epochs - 1), -1
        if number >= 0:
            batch = self._batches[self._slot_of[number]]
            epoch, step = batch.epoch, batch.step
        return Move(entries, samples, origins[0], rests, number, epoch, step)

    def _is_filled(self) -> bool:
        counts = self._views.counts
        return all(
            counts[0, place, decisions.FILL_NEXT] == counts[0, place, decisions.FILL_END]
            for place in range(2, counts.shape[1])
        )

    def _next_load(self, threads: int) -> Load:
        decodable = self._numbers[0, decisions.DECODABLE_PLACES]
        # So that all threads have some.
        most = max(1, min(self._load_size.samples, -(-decodable // threads)))
        count = self._act(decisions.NEXT_LOAD, 0, 0, most, 0, 0.0)
        self._loads_running += 1
        places = self._group(count)
        slot = places[0] // self._places
        ids, origins, entries = _columns_of(
            self._state.places,
            self._views.places,
            places,
            (decisions.PLACE_SAMPLE, decisions.PLACE_ORIGIN, decisions.PLACE_ENTRY),
        )
        rest_of, begin = self._views.entries, slot * self._places
        rests = [STAGING if entry < 0 else rest_of[0, entry, decisions.ENTRY_REST] for entry in entries]
        rows = [place - begin for place in places]
        return Load(*self._batches[slot], slot, rows, ids, origins, rests, entries)

    def _end(self, out: list[Instruction]) -> None:
        """Hand out the batches that are complete, and take back the slots of those that were given up."""
        state, numbers = self._state, self._numbers
        for ended in state.over[0, decisions.ENDED, : numbers[0, decisions.ENDED_SLOTS]].tolist():
            slot = ended if ended >= 0 else ~ended
            batch = self._batches.pop(slot)
            if ended < 0:
                self._free_slots.append(slot)
                continue
            del self._slot_of[batch.number]
            failed: tuple[int, ...] = ()
            if state.slots[0, slot, decisions.SLOT_FAILED]:
                begin = slot * self._places
                states = state.places[0, begin : begin + batch.samples.size, decisions.PLACE_STATE]
                failed = tuple(np.flatnonzero(states == decisions.FAILED).tolist())
            out.append(Ready(batch.number, batch.epoch, batch.step, slot, batch.samples, failed))
        numbers[0, decisions.ENDED_SLOTS] = 0

    # State

    def _have(self, state: decisions.State) -> None:
        self._state = state
        #: Over the same memory, for plain Python.
        self._views = views_of(state)
        self._numbers = self._views.numbers
        self._places = int(state.numbers[0, decisions.PLACES])
        if self._loop is not None:
            self._bound = self._loop.bound(tuple(state))

    def _group(self, count: int) -> list[int]:
        """Return what a call has put into the group."""
        if count == 1:
            return [self._views.group[0, decisions.ITEM, 0]]
        items: list[int] = self._state.group[0, decisions.ITEM, :count].tolist()
        return items

    def _mark(self, items: list[int], failed: dict[int, int]) -> None:
        """Put what an event is about into the group."""
        views = self._views.group
        if len(items) == 1:
            views[0, decisions.ITEM, 0], views[0, decisions.MARK, 0] = items[0], OK
        else:
            self._state.group[0, :, : len(items)] = items, [OK] * len(items)
        for index, mark in failed.items():
            views[0, decisions.MARK, index] = mark

    def _act(self, what: int, rank: int, slot: int, count: int, origin: int, seconds: float) -> int:
        if self._bound is None:
            return decisions.act(self._views, what, rank, slot, count, origin, seconds)
        return self._bound(what, rank, slot, count, origin, seconds)
