"""What to fetch next, from where, for which batch slot or tier: one pure state machine.

It is told of events (`start`, `slot_freed`, `slots_added`, `read_done`, `read_failed`, `load_done`, `seek`) and answers
each with instructions. It does no I/O and never asks for the time. Threads drive it over real stores (`flow.engine`), a
virtual clock over the machine's curves (`simulate.loading`); neither has a rule of its own.

The life of a sample of a batch:

    in no tier ──> Read by a reader thread ───────────> Load by a decode worker ──> its place in the batch slot
             └──> (reads cheaper than a hand-over) ──> Load, the worker reads by itself
    in a tier ───────────────────────────────────────> Load straight from the tier

Rules, in the order in which they win:
1. Batches are staged in the plan's order into free slots, across the ends of epochs. Reads for staged batches go out
   by due time (thesis 3.2.1, rule 1: fetch the next sample that is not there).
2. A sample is never fetched twice at a time: who needs it while it is on its way waits for that read, and a read of a
   sample that a tier shall keep fills the tier as well (one physical read per miss).
3. Readers that no staged batch needs fill the tiers in the order of first use, on at most half of the readers, so that
   an urgent read never finds all of them taken.
4. Bytes in flight and bytes that were read and not yet decoded are bounded; decode workers take the earliest batch that
   has work.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.plan import AccessPlan
from penstock.policy.choice import FetchCosts
from penstock.policy.load_size import LoadSize
from penstock.policy.placement import Placement
from penstock.policy.thread_count import ThreadCount, ThreadFacts
from penstock.trace.schema import SOURCE, STAGING

# A hand-over between threads costs about 100 us of wake-up and interpreter lock; below it a worker reads by itself.
_HAND_OVER_SECONDS = 100e-6

_ABSENT, _PENDING, _PRESENT = 0, 1, 2


@dataclass(frozen=True, slots=True)
class StagingLimits:
    """How much may be under way at once.

    slots: batch slots that exist from the start.
    readers: reads in flight at most; 0 leaves all reading to the decode workers.
    decoders: `Load`s in progress at most, unless most_decoders is given: then to begin with.
    most_decoders: where not 0, the number of `Load`s in progress follows what it does to the rate, from 1 up to this.
    undecoded_bytes: of samples that reader threads are reading, or have read for a batch and that are not decoded
        yet; one read is always allowed.
    """

    slots: int
    readers: int
    decoders: int
    undecoded_bytes: int
    most_decoders: int = 0


@dataclass(eq=False, slots=True)
class Read:
    """Instruction: fetch one sample, and put it into `tier` unless that is STAGING.

    batch: the running number of the batch that is waiting for it, -1 for a background fill of a tier, which has no
        step and counts to the epoch that is being staged.
    by_worker: the decode worker that gets the sample's `Load` reads it; no reader thread does.
    payload: where the runtime leaves the bytes for the decode worker.
    """

    sample: int
    nbytes: int
    tier: int
    batch: int
    epoch: int
    step: int
    by_worker: bool = False
    waiters: list[tuple[int, int]] = field(default_factory=list)
    holders: int = 0
    payload: Any = None


@dataclass(eq=False, slots=True)  # not frozen: there is one for each sample, and that would double its cost
class Item:
    """One sample's place in a batch, with its bytes' whereabouts.

    origin: a tier's number (take it from there), STAGING (in `read.payload`) or SOURCE (perform `read` yourself; None
        where there are no reader threads and no tier keeps the sample, so that nobody can wait for it).
    """

    index: int
    sample: int
    origin: int
    read: Read | None


@dataclass(eq=False, slots=True)
class Load:
    """Instruction: bring some samples of a batch into its slot (decode, transform, write).

    samples: int64[local batch], of the whole batch; `items` index it.
    """

    batch: int
    epoch: int
    step: int
    slot: int
    samples: NDArray[np.int64]
    items: list[Item]


@dataclass(frozen=True, slots=True)
class Staged:
    """Notice: a batch got its slot; it had been the next in line since `due_seconds`."""

    epoch: int
    step: int
    due_seconds: float


@dataclass(frozen=True, slots=True)
class Ready:
    """Notice: a batch is whole, and its slot the consumer's until `slot_freed`.

    failed: the places in it whose sample could not be had.
    """

    batch: int
    epoch: int
    step: int
    slot: int
    samples: NDArray[np.int64]
    failed: tuple[int, ...]


Instruction = Read | Load | Staged | Ready


@dataclass(eq=False, slots=True)
class _Batch:
    """A batch between getting its slot and being whole.

    missing: places not yet decoded or failed. running: places inside a Load now.
    decodable: places whose bytes are at hand. abandoned: nobody wants it any more (see `Scheduler.seek`).
    """

    number: int
    epoch: int
    step: int
    slot: int
    samples: NDArray[np.int64]
    missing: int
    running: int = 0
    decodable: deque[Item] = field(default_factory=deque)
    failed: list[int] = field(default_factory=list)
    abandoned: bool = False


class Scheduler:
    """The loading policy of one rank. Not thread-safe: whoever drives it holds a lock or is alone.

    plan, rank: who reads what, when.
    sizes_bytes: int64[samples], of each sample as stored.
    placement: which samples the tiers keep.
    costs: expected and observed seconds of reads; the scheduler asks, the driver reports through `read_done`.
    """

    def __init__(
        self,
        plan: AccessPlan,
        rank: int,
        sizes_bytes: NDArray[np.int64],
        placement: Placement,
        costs: FetchCosts,
        limits: StagingLimits,
    ) -> None:
        self._plan = plan
        self._rank = rank
        self._sizes = sizes_bytes
        self._placement = placement
        self._costs = costs
        self._limits = limits
        self._mean_bytes = int(sizes_bytes.mean()) if sizes_bytes.size else 0
        most, least = (
            (limits.most_decoders, 1) if limits.most_decoders else (limits.decoders, limits.decoders)
        )
        self._threads = ThreadCount(limits.decoders, most, least)
        #: Whether all threads that may load had work when the last event was over.
        self._were_busy = False
        self._load_size = LoadSize()
        self._fill_limit = max(1, limits.readers // 2)

        #: int8[samples]: _ABSENT, _PENDING (a Read is in `_pending`) or _PRESENT (in the tier that Placement names).
        self._state = np.zeros(plan.samples, np.int8)
        #: Reads whose sample others may wait for, by sample. Agrees with `_state == _PENDING`.
        self._pending: dict[int, Read] = {}
        #: Reads that a reader thread should do for staged batches, by due time.
        self._urgent: deque[Read] = deque()
        self._fill_next = 0
        self._reads_in_flight = 0
        self._fills_in_flight = 0
        self._loads_running = 0
        self._undecoded_bytes = 0

        self._slots = limits.slots
        self._free_slots: deque[int] = deque(range(limits.slots))
        #: The next batch to stage, its running number, and since when it has been next.
        self._epoch, self._step = plan.first_read_from(rank, 0, 0)
        self._number = 0
        self._due_seconds = 0.0
        #: Batches with a slot that are not whole yet, in the plan's order, and how many of their places are decodable.
        self._staged: dict[int, _Batch] = {}
        self._decodable = 0
        #: Seconds of a read by a decode worker (a running mean); a probe at each epoch's start keeps it honest.
        self._worker_read_seconds = float("inf")
        self._probe = True

    # Events

    def start(self, now: float) -> list[Instruction]:
        """Begin at `now` (seconds)."""
        self._due_seconds = now
        return self._advance(now, [])

    def slot_freed(self, slot: int, now: float) -> list[Instruction]:
        """Nobody refers to the slot of a whole batch any more."""
        self._free_slots.append(slot)
        return self._advance(now, [])

    def slots_added(self, slots: int, now: float) -> list[Instruction]:
        """There are this many slots now. Said twice, it is harmless."""
        self._free_slots.extend(range(self._slots, slots))
        self._slots = max(self._slots, slots)
        return self._advance(now, [])

    def read_done(self, read: Read, seconds: float, now: float) -> list[Instruction]:
        """A reader thread finished a read after `seconds`."""
        self._costs.observe(SOURCE, read.nbytes, seconds, self._reads_in_flight)
        self._read_ended(read)
        self._settle(read)
        return self._advance(now, [])

    def read_failed(self, read: Read, now: float) -> list[Instruction]:
        """A reader thread could not read a sample: its places in batches fail; a failed fill is read again when due."""
        out: list[Instruction] = []
        self._read_ended(read)
        self._fail(read, out)
        return self._advance(now, out)

    def load_done(
        self,
        load: Load,
        failed: list[Item],
        read_seconds: list[float],
        now: float,
        wall_seconds: float = 0.0,
        cpu_seconds: float = 0.0,
    ) -> list[Instruction]:
        """A decode worker finished a Load.

        failed: the items whose bytes could not be read or decoded.
        read_seconds: of each read that the worker did by itself and that succeeded.
        wall_seconds, cpu_seconds: that the Load took, but for waiting for a processor, and that its thread computed.
        """
        out: list[Instruction] = []
        self._loads_running -= 1
        self._threads.load_done(len(load.items), wall_seconds, cpu_seconds, now, self._were_busy)
        self._load_size.load_done(len(load.items), wall_seconds)
        for seconds in read_seconds:
            known = self._worker_read_seconds
            self._worker_read_seconds = seconds if known == float("inf") else known + (seconds - known) / 16
        batch = self._staged[load.batch]
        for item in load.items:
            read = item.read
            if read is None:
                continue
            if item.origin == STAGING:
                self._release(read)
            elif item in failed:
                self._fail(read, out)
            else:
                self._settle(read)
        batch.running -= len(load.items)
        batch.failed.extend(item.index for item in failed)
        self._complete(batch, len(load.items), out)
        return self._advance(now, out)

    def seek(self, epoch: int, step: int, now: float) -> list[Instruction]:
        """Give up all batches before (epoch, step): the consumer left its loop early. Said twice, it is harmless.

        Slots of whole batches come back by `slot_freed`, as ever.
        """
        for batch in list(self._staged.values()):
            if (batch.epoch, batch.step) < (epoch, step):
                self._abandon(batch)
        if (self._epoch, self._step) < (epoch, step):
            self._epoch, self._step = self._plan.first_read_from(self._rank, epoch, step)
            self._due_seconds = now
        return self._advance(now, [])

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

    def limit_threads(self, most: int) -> None:
        """Say that the driver has no more threads than these and can have no more."""
        self._threads.limit(most)

    def is_wanted(self, number: int) -> bool:
        """Return whether a batch has a slot, is not whole yet, and was not given up."""
        batch = self._staged.get(number)
        return batch is not None and not batch.abandoned

    # Decisions

    def _advance(self, now: float, out: list[Instruction]) -> list[Instruction]:
        while self._free_slots and self._epoch < self._plan.epochs:
            out.append(self._stage(now))
        while self._reads_in_flight < self._limits.readers and (read := self._next_read()) is not None:
            out.append(read)
        threads = self._threads.threads
        while self._decodable and self._loads_running < threads:
            out.append(self._next_load(threads))
        self._were_busy = self._loads_running >= threads
        return out

    def _stage(self, now: float) -> Staged:
        samples = self._plan.local_batch(self._rank, self._epoch, self._step)
        number, slot = self._number, self._free_slots.popleft()
        batch = _Batch(number, self._epoch, self._step, slot, samples, missing=samples.size)
        self._staged[number] = batch
        prefers_tier: dict[int, bool] = {}
        for index, sample in enumerate(samples.tolist()):
            self._route(batch, index, sample, prefers_tier)
        notice = Staged(batch.epoch, batch.step, self._due_seconds)
        self._due_seconds = now
        self._number += 1
        epoch = self._epoch
        self._epoch, self._step = self._plan.first_read_from(self._rank, epoch, self._step + 1)
        self._probe |= self._epoch != epoch
        return notice

    def _route(self, batch: _Batch, index: int, sample: int, prefers_tier: dict[int, bool]) -> None:
        """Decide where one place of a batch gets its bytes from.

        prefers_tier: whether to take what lies in a tier from there, by tier, as asked once for a batch.
        """
        state = self._state[sample]
        if state == _PENDING:
            self._pending[sample].waiters.append((batch.number, index))
            return
        tier = int(self._placement.tier_of[sample])
        if state == _PRESENT:
            if tier not in prefers_tier:
                prefers_tier[tier] = self._costs.prefers_tier(tier, self._mean_bytes)
            if prefers_tier[tier]:
                self._offer(batch, Item(index, sample, tier, None))
                return
            tier = STAGING
        elif tier == SOURCE:
            tier = STAGING
        if tier == STAGING and not self._limits.readers:
            self._offer(batch, Item(index, sample, SOURCE, None))
            return
        read = Read(sample, int(self._sizes[sample]), tier, batch.number, batch.epoch, batch.step)
        read.by_worker = (
            self._probe or self._worker_read_seconds < _HAND_OVER_SECONDS or not self._limits.readers
        )
        if read.by_worker:
            self._probe = False
            self._offer(batch, Item(index, sample, SOURCE, read))
        else:
            read.waiters.append((batch.number, index))
            self._urgent.append(read)
        if state == _ABSENT and (tier != STAGING or not read.by_worker):
            self._state[sample] = _PENDING
            self._pending[sample] = read

    def _next_read(self) -> Read | None:
        while self._urgent:
            read = self._urgent[0]
            if not self._has_live_waiter(read):
                self._urgent.popleft()
                self._forget(read)
                continue
            if not self._has_room_for(read.nbytes):
                return None
            self._urgent.popleft()
            self._begin(read)
            return read
        if self._fills_in_flight == self._fill_limit:
            return None
        while self._fill_next < self._placement.fill_order.size:
            sample = int(self._placement.fill_order[self._fill_next])
            if self._state[sample] == _ABSENT:
                nbytes, tier = int(self._sizes[sample]), int(self._placement.tier_of[sample])
                if not self._has_room_for(nbytes):
                    return None
                read = Read(sample, nbytes, tier, -1, min(self._epoch, self._plan.epochs - 1), -1)
                self._state[sample] = _PENDING
                self._pending[sample] = read
                self._fills_in_flight += 1
                self._fill_next += 1
                self._begin(read)
                return read
            self._fill_next += 1
        return None

    def _has_room_for(self, nbytes: int) -> bool:
        passing = self._undecoded_bytes
        return not passing or passing + nbytes <= self._limits.undecoded_bytes

    def _next_load(self, threads: int) -> Load:
        batch = next(batch for batch in self._staged.values() if batch.decodable)
        count = min(len(batch.decodable), self._load_items(threads))
        items = [batch.decodable.popleft() for _ in range(count)]
        batch.running += count
        self._decodable -= count
        self._loads_running += 1
        return Load(batch.number, batch.epoch, batch.step, batch.slot, batch.samples, items)

    def _load_items(self, threads: int) -> int:
        """Return how many samples a Load should take, so that all threads have some."""
        return max(1, min(self._load_size.samples, -(-self._decodable // threads)))

    # State

    def _offer(self, batch: _Batch, item: Item) -> None:
        batch.decodable.append(item)
        self._decodable += 1

    def _begin(self, read: Read) -> None:
        self._reads_in_flight += 1
        self._undecoded_bytes += read.nbytes

    def _read_ended(self, read: Read) -> None:
        self._reads_in_flight -= 1
        self._fills_in_flight -= read.batch < 0

    def _forget(self, read: Read) -> None:
        """A read is over or never began: nobody can wait for it any more."""
        if self._pending.get(read.sample) is read:
            del self._pending[read.sample]
            self._state[read.sample] = _ABSENT

    def _settle(self, read: Read) -> None:
        """The bytes of a read are here: give them to all who wait."""
        was_pending = self._pending.get(read.sample) is read
        self._forget(read)
        if was_pending and read.tier != STAGING:
            self._state[read.sample] = _PRESENT
        origin = read.tier if read.by_worker else STAGING
        read.holders = 1
        for number, index in read.waiters:
            batch = self._staged.get(number)
            if batch is not None and not batch.abandoned:
                self._offer(batch, Item(index, read.sample, origin, None if read.by_worker else read))
                read.holders += 1
        if not read.by_worker:
            if read.tier != STAGING:
                self._undecoded_bytes -= read.nbytes
            self._release(read)

    def _release(self, read: Read) -> None:
        """One holder less of a read's payload, which is the tier's own memory where a tier keeps the sample."""
        read.holders -= 1
        if read.holders == 0 and read.tier == STAGING:
            self._undecoded_bytes -= read.nbytes

    def _fail(self, read: Read, out: list[Instruction]) -> None:
        self._forget(read)
        if not read.by_worker:
            self._undecoded_bytes -= read.nbytes
        for number, index in read.waiters:
            batch = self._staged.get(number)
            if batch is not None and not batch.abandoned:
                batch.failed.append(index)
                self._complete(batch, 1, out)

    def _complete(self, batch: _Batch, places: int, out: list[Instruction]) -> None:
        batch.missing -= places
        if batch.missing:
            return
        del self._staged[batch.number]
        if batch.abandoned:
            self._free_slots.append(batch.slot)
            return
        failed = tuple(sorted(batch.failed))
        out.append(Ready(batch.number, batch.epoch, batch.step, batch.slot, batch.samples, failed))

    def _has_live_waiter(self, read: Read) -> bool:
        return any(
            (batch := self._staged.get(number)) is not None and not batch.abandoned
            for number, _ in read.waiters
        )

    def _pass_on(self, read: Read) -> None:
        """The batch whose worker should have read a sample is given up: let the next that waits for it do so."""
        while read.waiters:
            number, index = read.waiters.pop(0)
            batch = self._staged.get(number)
            if batch is not None and not batch.abandoned:
                self._offer(batch, Item(index, read.sample, SOURCE, read))
                return
        self._forget(read)

    def _abandon(self, batch: _Batch) -> None:
        self._decodable -= len(batch.decodable)
        batch.abandoned = True
        for item in batch.decodable:
            if item.origin == STAGING and item.read is not None:
                self._release(item.read)
            elif item.read is not None:
                self._pass_on(item.read)
        batch.decodable.clear()
        batch.missing = batch.running
        self._complete(batch, 0, [])
