"""What to fetch next, from where, for which batch slot or tier: one rank's run, as a pure state machine.

Its methods are events (`start`, `slot_freed`, `use_all_slots`, `slots_added`, `moved`, `divided`, `loaded`,
`announced`, `withdrawn`, `ended`, `waited`, `seek`, `evicted`, `extended`), of which all but `ended` return
instructions; and questions and settings, which return none. It does no I/O and never asks the time.
Threads drive it over real stores (`flow.engine`), a virtual clock over the machine's curves (`simulate.loading`);
neither has a rule of its own.

Rules, in the order in which they win (the functions of `penstock.policy.decisions` hold them):
1. Batches are staged in the plan's order into free slots, across the ends of epochs; where samples take microseconds, a
   slot takes as many steps of an epoch as are loaded in eight milliseconds. Moves for staged batches go out by due time
   (thesis 3.2.1, rule 1: fetch the next sample that is not there).
2. A sample is never fetched twice at a time: who needs it while it is on its way waits for that move, and a move of a
   sample that a tier shall keep fills the tier as well (one physical read per miss).
3. A sample is taken from where it is expected first, what is queued there included. A worker reads by itself what it
   waits for less long than a hand-over between threads takes; what a tier cannot give back is read from the source.
4. A tier that is not memory is read by at most as many moves at once as it has threads (`StorageClass.threads`): more
   would be no faster, and would take processors from each other. Moves from other places do not wait for them.
5. Readers that no staged batch needs fill the tiers in the order of first use, on at most half of the readers, so that
   an urgent move never finds all of them taken; a tier whose fills are slow does not hold up another's.
6. Bytes in flight and bytes that were read and not yet decoded are bounded; decode workers take the earliest batch that
   has work. Where they take it all at once, its own bytes always have space.
7. A group takes a millisecond: one sample where a read takes that long, a whole batch where it takes microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.machine import Machine
from penstock.machine_code import Loop
from penstock.plan import AccessPlan
from penstock.policy import decisions
from penstock.policy.decision_state import keep_in_form, new_state, slot_of, views_of, with_slots
from penstock.policy.decisions import OK
from penstock.policy.dropping import Dropping
from penstock.policy.forms import CropForm
from penstock.policy.merge import AllExtents
from penstock.policy.placement import Placement, Shared
from penstock.policy.read_ahead import ReadAhead
from penstock.policy.thread_count import FollowingCount, ThreadCount, ThreadFacts
from penstock.trace.schema import NO_PEER, SOURCE
from penstock.validate import check_count, check_threads

Ids = NDArray[np.int64]

#: What it takes to load all that is staged together, at most, where it is more than one step. A Load, its event, its
#: spans and lending its slot take 0.1 to 0.4 ms of a processor.
_STAGED_SECONDS = 8e-3


@dataclass(frozen=True, slots=True)
class StagingLimits:
    """How much may be under way at once.

    slots: batch slots that exist from the start.
    readers: moves in flight at most; 0 leaves all reading to the decode workers.
    decoders: `Load`s in progress at most, unless most_decoders is given: then to begin with.
    most_decoders: where not 0, the number of `Load`s in progress follows what it does to the rate, from 1 up to this.
    most_readers: the same of `Move`s in progress, which are `readers` to begin with.
    most_slots: the same of batch slots in use, from `slots` up to this; the rate is the training's.
    undecoded_bytes: of samples that reader threads are reading, or have read for a batch and that are not decoded
        yet; one sample is always allowed.
    steps: of the plan that a slot has space for.
    own_bytes: that a decode worker reads by itself for one `Load`; one sample is always allowed.
    loads_all: whether a `Load` takes all that a step has left, which comes from the source where a tier has lost some.
        What is read for the earliest step is then beyond undecoded_bytes, if later ones have filled these.
    least_load_seconds: a `Load` has samples for so long at least, if there are such, unless slots in use are too few
        for all decoders: what it costs besides is little then.
    read_together: samples that a reader reads from the source together, as many as are queued: readers read all that
        comes from there, however fast that is, as they may have it decoded elsewhere. 0: nothing is.
    unwritten_bytes: of samples that wait to be written to a tier that is no memory; more are not kept there.
    Raises: ConfigError naming the field.
    """

    slots: int
    readers: int
    decoders: int
    undecoded_bytes: int
    most_decoders: int = 0
    steps: int = 1
    own_bytes: int = decisions.OWN_BYTES
    loads_all: bool = False
    most_readers: int = 0
    read_together: int = 0
    most_slots: int = 0
    unwritten_bytes: int = decisions.ANY_NUMBER
    least_load_seconds: float = decisions.LEAST_LOAD_SECONDS

    def __post_init__(self) -> None:
        for name in ("slots", "decoders", "steps"):  # not all are threads, but as few
            check_threads(f"limits.{name}", getattr(self, name))
        for name in (
            "readers",
            "undecoded_bytes",
            "most_decoders",
            "own_bytes",
            "most_readers",
            "most_slots",
            "read_together",
            "unwritten_bytes",
        ):
            check_count(f"limits.{name}", getattr(self, name), 0)

    @property
    def all_readers(self) -> int:
        """How many `Move`s may come to be in progress at once."""
        return max(self.readers, self.most_readers)


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

    samples: int64[local batch], of the whole batch. rows: the places of these in it, a range where they follow each
        other.
    origins: of each a tier's number (take it from there), STAGING (the bytes are those of the entry) or SOURCE (read it
        yourself). rests: of each the tier that is to keep what you read from the source, or STAGING.
    entries: of each, -1 where there is none.
    steps: how many the batch has, all of one size, from `step` on.
    """

    batch: int
    epoch: int
    step: int
    samples: Ids
    slot: int
    rows: Sequence[int]
    origins: list[int]
    rests: list[int]
    entries: list[int]
    steps: int = 1

    @property
    def ids(self) -> Ids:
        """int64[rows], of these samples."""
        rows = self.rows
        return self.samples[slice(rows.start, rows.stop) if isinstance(rows, range) else rows]


class Staged(NamedTuple):
    """Notice: a batch got its slot; it had been the next in line since `due_seconds`."""

    epoch: int
    step: int
    due_seconds: float


class Ready(NamedTuple):
    """Notice: a batch is complete, and its slot the consumer's until `slot_freed`.

    samples: int64[samples], of all of its steps. failed: the rows whose sample could not be had.
    steps: how many follow each other in the slot from `step` on, all of one size.
    """

    batch: int
    epoch: int
    step: int
    slot: int
    samples: Ids
    failed: tuple[int, ...]
    steps: int


class Drop(NamedTuple):
    """Notice: nobody wants the bytes of these entries any more."""

    entries: list[int]


class Evict(NamedTuple):
    """Instruction: evict samples from all tiers. A reader thread does it; `evicted` says so."""

    samples: list[int]


class OwnRead(NamedTuple):
    """How long a worker waited for its own reads from one place. origin: SOURCE or a tier's number.

    What it computes for them, a reader thread would have to compute as well.
    """

    origin: int
    reads: int
    seconds: float


Instruction = Move | Load | Staged | Ready | Drop | Evict


class _Batch(NamedTuple):
    """What has a slot and is not complete, or is the next that gets one: one step of the plan, or several.

    step: the first of `steps`, which have one size.
    """

    number: int
    epoch: int
    step: int
    samples: Ids
    steps: int

    def is_before(self, epoch: int, step: int) -> bool:
        """Whether all of its steps are before this one."""
        return (self.epoch, self.step + self.steps - 1) < (epoch, step)


class Scheduler:
    """What one rank loads. Not thread-safe: whoever drives it holds a lock or is alone.

    plan, rank: who reads what, when.
    sizes_bytes: int64[samples], of each sample as stored.
    placement: which samples the tiers keep.
    machine: what reads cost, as far as is known; corrected by what they take.
    extents: of all samples, where the source gives them: those that lie near each other are moved together.
    held: by tier, samples that are there from the start, of an earlier run.
    form: in which tiers keep samples, if not as they are stored.
    shared: what this rank and others keep for each other, this one as `placement` says.
    reads_together: whether `limits.read_together` holds now; without it, it always does. Asked before each decision.
    """

    _readers: ThreadCount | FollowingCount | None
    _loop: Loop | None
    _bound: Callable[..., int] | None

    def __init__(
        self,
        plan: AccessPlan,
        rank: int,
        sizes_bytes: NDArray[np.int64],
        placement: Placement,
        machine: Machine,
        limits: StagingLimits,
        extents: AllExtents | None = None,
        held: Mapping[int, Ids] | None = None,
        form: CropForm | None = None,
        shared: Shared | None = None,
        reads_together: Callable[[], bool] | None = None,
    ) -> None:
        self._plan, self._rank, self._limits = plan, rank, limits
        self._reads_together = reads_together if limits.read_together else None
        #: Samples that a slot has space for.
        self._slot_size = limits.steps * plan.max_local_batch(rank)
        #: The compiled form of `decisions.event`, once there is one; and bound to the state.
        self._loop = self._bound = None
        #: None where tiers drop nothing, as where no reader could fill the space.
        drops = placement.spares is not None and limits.all_readers > 0
        self._dropping = Dropping(plan, rank, placement) if drops else None
        only = 0 if shared is None else rank
        state = new_state(
            sizes_bytes,
            [placement.kept] if shared is None else shared.kept,
            machine,
            slots=limits.slots,
            local_batch=self._slot_size,
            readers=limits.all_readers,
            undecoded_bytes=limits.undecoded_bytes,
            own_bytes=limits.own_bytes,
            loads_all=limits.loads_all,
            least_load_seconds=limits.least_load_seconds,
            extents=extents,
            held={only: held or {}},
            reads_peers=0 if shared is None else decisions.RATHER,
            maps_peers=shared is not None and shared.is_mapped,
            promised=None if shared is None else shared.promised,
            reads_for_others=shared is not None and shared.reads_for_others,
            only=only,
            spares=() if self._dropping is None else [self._dropping.spares],
            last_batches=() if self._dropping is None else [self._dropping.last_batches],
        )
        if self._dropping is not None:
            self._dropping.begin(state)
        #: At which step the run has to begin for promises to be kept; None where there are none any more.
        self._promised_from = None if shared is None else plan.first_of_run(rank, *shared.first)
        if form is not None:
            keep_in_form(state, machine, form, maps_peers=shared is not None and shared.is_mapped)
        if limits.read_together:
            state.ints[[decisions.PROBES_LEFT, decisions.SOURCE_TOGETHER]] = 0, limits.read_together
        self._have(state)
        most, least = limits.most_decoders or limits.decoders, 1 if limits.most_decoders else limits.decoders
        self._threads = self._found_threads = ThreadCount(limits.decoders, most, least)
        #: Whether all threads that may load have had work since the last Load ended, and all that may read since the
        #: last move did. A pause of the training, in which they run out of it, says nothing about them. And whether one
        #: of them has had none since the last slot was freed.
        self._were_busy = self._readers_were_busy = self._has_idled = False
        #: None where their number is fixed.
        self._readers = ThreadCount(limits.readers, limits.most_readers) if limits.most_readers else None
        self._slots = self._most_wanted = limits.slots
        #: How many of them are in use; None where all that there are. The others, which are free.
        self._read_ahead = ReadAhead(limits.slots, limits.most_slots) if limits.most_slots else None
        self._unused_slots: list[int] = []
        #: The next batch to stage, and since when it has been next; None after the last.
        self._coming: _Batch | None = None
        self._due_seconds = 0.0
        #: Of the next batch that is staged: as many as were staged, or, where tiers drop samples, as are before it.
        self._number = 0
        #: Steps of the plan that follow it: epoch, the first one's number, int64[steps, local batch].
        self._following: tuple[int, int, Ids] | None = None
        #: Incomplete batches that are wanted, by running number: in the plan's order.
        self._batches: dict[int, _Batch] = {}
        #: Of the batch that was staged last: the first read of another epoch is a worker's own.
        self._staged_epoch, step = plan.first_read_from(rank, 0, 0)
        self._seek(self._staged_epoch, step)

    # Events

    def start(self, now: float) -> list[Instruction]:
        """Begin at `now` (seconds)."""
        self._due_seconds = now
        return self._event(now)

    def slot_freed(self, slot: int, now: float, stall_seconds: float = 0.0) -> list[Instruction]:
        """Nobody refers to the slot of a complete batch any more.

        stall_seconds: how long the training has waited for batches in all, by which it is found out how many slots
            help, unless their number is fixed.
        """
        if self._read_ahead is None:
            return self._event(now, decisions.FREED, slot)
        # With decode servers, a thread here may idle: work is shared out, and more batches ahead make it no less.
        sends = self._reads_together is not None and self._reads_together()
        has_idled = self._has_idled and not sends
        self._read_ahead.freed(now, stall_seconds, has_idled=has_idled)
        self._has_idled = False
        self._most_wanted = max(self._most_wanted, self._read_ahead.slots)
        self._unused_slots.append(slot)
        return self._use_slots(self._read_ahead.slots, now)

    def use_all_slots(self, now: float) -> list[Instruction]:
        """Use all slots that there are from now on: the caller keeps batches, and waits for others."""
        self._read_ahead = None
        return self._use_slots(self._slots, now)

    def slots_added(self, slots: int, now: float) -> list[Instruction]:
        """There are this many slots now. Said twice, it is harmless."""
        if slots > self._slots:
            if slots > self._ints[decisions.SLOT_COUNT]:
                self._have(with_slots(self._state, max(slots, 2 * self._slots)))
            self._unused_slots += range(self._slots, slots)
            self._slots = slots
        if slots > self._most_wanted:
            self._read_ahead = None  # the caller keeps batches: those in use are not those ahead
        return self._use_slots(self.slots_wanted, now)

    def moved(self, move: Move, seconds: float, failed: list[int], now: float) -> list[Instruction]:
        """A reader thread finished a move after `seconds`. failed: indices of the samples that could not be had.

        What came from a tier is read from the source then; a failed fill is read again when it is due.
        """
        if self._readers is not None:
            # A thread that reads mostly waits, whatever it computes.
            self._readers.load_done(len(move.samples), seconds, 0.0, now, self._readers_were_busy)
            self._readers_were_busy = True
        self._mark(move.entries, dict.fromkeys(failed, decisions.UNREAD))
        return self._event(now, decisions.MOVED, count=len(move.entries), seconds=seconds)

    def divided(self, move: Move, now: float) -> list[Instruction]:
        """A reader thread has not begun with a move, which would take it long: readers that are idle share it."""
        readers, moves = self._ints[decisions.READERS], self._ints[decisions.MOVES]
        count = len(move.samples)
        size = -(-count // min(count, 1 + max(0, readers - moves)))
        parts = [slice(begin, begin + size) for begin in range(0, count, size)]
        decisions.divided(self._views, 0, move.origin, len(parts))
        return [
            move._replace(entries=move.entries[each], samples=move.samples[each], rests=move.rests[each])
            for each in parts
        ]

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
        self._threads.load_done(count, wall_seconds, cpu_seconds, now, self._were_busy)
        self._were_busy = True
        for read in own_reads:
            if read.origin == SOURCE and self._limits.read_together:
                continue  # of the first sample, by which a worker finds out whether it should read by itself
            self._call(decisions.OBSERVED, 0, read.reads, read.origin, read.seconds)
        if not failed and isinstance(load.rows, range):
            return self._event(now, decisions.LOADED_RUN, load.slot, count, wall_seconds, load.rows.start)
        begin = self._ints[slot_of(self._views, 0, load.slot) + decisions.SLOT_PLACES]
        self._mark(load.rows, failed, begin, decisions.PLACE_COLUMNS)
        return self._event(now, decisions.LOADED, load.slot, count, wall_seconds)

    def announced(self, peer: int, samples: Ids, now: float) -> list[Instruction]:
        """Another rank keeps these samples from now on, where this rank can read them. -t: its tier t gets no more."""
        decisions.heard(self._views, peer, now)
        for tier in {*range(1, self._ints[decisions.TIERS] + 1)}.intersection(
            (-samples[samples < 0]).tolist()
        ):
            self._withdraw(peer, tier)
        samples = samples[samples >= 0]
        group, most = (self._ints[column] for column in (decisions.GROUP, decisions.GROUP_SIZE))
        for begin in range(0, samples.size, most):
            part = samples[begin : begin + most]
            self._state.ints[group : group + part.size] = part
            self._call(decisions.ANNOUNCED, 0, part.size, peer, 0.0)
        return self._event(now)

    def withdrawn(self, peer: int, now: float) -> list[Instruction]:
        """Another rank can no longer be read: forget what it keeps and promised, until it announces samples anew."""
        copies = self._state.copies
        states = copies[:, decisions.COPY_STATE]
        decisions.silenced(self._views, 0, peer)
        states[(copies[:, decisions.COPY_RANK] == peer) & (states == decisions.PRESENT)] = decisions.GONE
        return self._event(now)

    def _withdraw(self, peer: int, tier: int) -> None:
        """Expect nothing more to come to a tier of another rank."""
        copies = self._state.copies
        states = copies[:, decisions.COPY_STATE]
        is_its = (copies[:, decisions.COPY_RANK] == peer) & (copies[:, decisions.COPY_TIER] == tier)
        states[is_its & np.isin(states, (decisions.PROMISED, decisions.ON_WAY))] -= decisions.KEEPS
        decisions.withdrawn(self._views, 0, peer, tier)

    def ended(self, tier: int) -> None:
        """A tier of this rank keeps no more samples: it is not filled any more. Said twice, it is harmless."""
        row = self._ints[decisions.ROWS] + (tier + 1) * decisions.ROW_COLUMNS
        self._ints[row + decisions.FILL_NEXT] = self._ints[row + decisions.FILL_END]
        if self._dropping is not None:
            self._dropping.ended(tier)

    def waited(self, seconds: float, now: float) -> list[Instruction]:
        """The training has waited so long for the earliest batch: what others promised is read, if that is too long.

        See `decisions.late`.
        """
        if not self.expects_others or seconds < decisions.patience_seconds(self._views, 0):
            return []
        self._state.floats[self._ints[decisions.PACE] + decisions.ASKED_AT] = now - seconds
        return self._event(now, decisions.LATE, seconds=now)

    def seek(self, epoch: int, step: int, now: float) -> list[Instruction]:
        """Give up all batches before (epoch, step): the consumer left its loop early. Said twice, it is harmless.

        Slots of complete batches come back by `slot_freed`, as ever. What ranks promised of a run that begins
        elsewhere, or skips steps, they need not keep.
        """
        if self._promised_from is not None and (epoch, step) != self._promised_from:
            states = self._state.copies[:, decisions.COPY_STATE]
            states[np.isin(states, (decisions.PROMISED, decisions.ON_WAY))] -= decisions.KEEPS
            self._promised_from = None
        for index in range(self._slots) if self._batches else ():
            number = self._ints[slot_of(self._views, 0, index) + decisions.SLOT_NUMBER]
            batch = self._batches.get(number)
            if batch is not None and batch.is_before(epoch, step):
                del self._batches[batch.number]
                self._call(decisions.ABANDONED, index, 0, 0, 0.0)
        coming = self._coming
        if coming is not None and (coming.epoch, coming.step) < (epoch, step):
            self._seek(epoch, step)
            self._due_seconds = now
        return self._event(now)

    def evicted(self, evict: Evict, now: float) -> list[Instruction]:
        """The tiers have some samples no longer."""
        assert self._dropping is not None, "nobody else has samples evicted"
        self._dropping.evicted(self._views, evict.samples)
        return self._event(now)

    def extended(self, now: float) -> list[Instruction]:
        """Go on: the plan, whose caller asks for one batch after the other, may have more than it had."""
        if self._following is None:
            self._following = next(self._steps, None)
        if self._coming is None and self._following is not None:
            self._line_up()
            self._due_seconds = now
        return self._event(now)

    # Questions

    @property
    def threads(self) -> ThreadFacts:
        """How many Loads may run at once, and why."""
        return self._threads.facts

    @property
    def reading(self) -> ThreadFacts | None:
        """How many moves may be in progress, and why; None where that is fixed."""
        return None if self._readers is None else self._readers.facts

    @property
    def settled(self) -> tuple[int, int, int]:
        """How many moves and Loads in progress, and slots, were found best so far, whatever is tried or fixed now."""
        readers = self._limits.readers if self._readers is None else self._readers.settled
        slots = self._limits.slots if self._read_ahead is None else self._read_ahead.settled
        return readers, self._found_threads.settled, slots

    @property
    def slots_wanted(self) -> int:
        """How many slots there should be in use, as far as memory allows."""
        return self._slots if self._read_ahead is None else self._read_ahead.slots

    @property
    def slots_in_use(self) -> int:
        return self._slots - len(self._unused_slots)

    @property
    def most_moves(self) -> int:
        """How many moves may come to be in progress at once."""
        return self._limits.all_readers

    @property
    def moves_running(self) -> int:
        """How many moves were given out and are not done."""
        running: int = self._ints[decisions.MOVES]
        return running

    @property
    def loads_allowed(self) -> int:
        """How many Loads may run at once now."""
        return self._threads.threads

    @property
    def loads_running(self) -> int:
        """How many Loads were given out and are not done."""
        running: int = self._ints[decisions.LOADS]
        return running

    def batches_waiting_for(self, entry: int) -> list[int]:
        """Return the running numbers of the batches that wait for an entry's bytes; -1 is no entry."""
        ints, batches = self._ints, []
        place = ints[entry + decisions.ENTRY_FIRST] if entry >= 0 else -1
        while place >= 0:
            batches.append(ints[ints[place + decisions.PLACE_SLOT] + decisions.SLOT_NUMBER])
            place = ints[place + decisions.PLACE_NEXT]
        return batches

    @property
    def expects_others(self) -> bool:
        """Whether samples are waited for that another rank has promised to read."""
        expects: bool = self._ints[decisions.EXPECTED_ENTRIES] > 0
        return expects

    def where(self, origin: int) -> tuple[int, int]:
        """Return the tier, STAGING or SOURCE that an instruction names, and the rank whose it is, -1 for this one."""
        tiers = self._ints[decisions.TIERS]
        if origin <= tiers:
            return origin, NO_PEER
        return decisions.tier_of(tiers, origin), decisions.peer_of(tiers, origin)

    def limit_threads(self, most: int) -> None:
        """Say that the driver has no more threads that load than these and can have no more."""
        self._threads.limit(most)

    def follow(self, requests: Callable[[], int]) -> None:
        """Have as many readers as requests, from `limits.readers` up to `limits.most_readers`, whatever the rate says.

        requests: how many the source's stores reward now, which is asked before each decision.
        """
        if self._readers is not None:
            limits = self._limits
            self._readers = FollowingCount(limits.readers, limits.most_readers, requests)

    def limit_readers(self, most: int) -> None:
        """Say the same of threads that read; only where their number is not fixed."""
        assert self._readers is not None, "a fixed number is there from the start"
        self._readers.limit(most)

    def fix_threads(self, count: int | None, least_load_seconds: float | None = None) -> None:
        """Have so many Loads run at once, whatever that does to the rate; None: as many as raise it, as before.

        least_load_seconds: that each takes at least from here on; None: as the limits say.
        """
        self._threads = self._found_threads if count is None else ThreadCount(count, count, count)
        least = self._limits.least_load_seconds if least_load_seconds is None else least_load_seconds
        self._state.floats[self._ints[decisions.PACE] + decisions.LEAST_SECONDS] = least

    def is_wanted(self, number: int) -> bool:
        """Return whether a batch has a slot, is not complete yet, and was not given up."""
        return number in self._batches

    def use(self, loop: Loop) -> None:
        """Decide by compiled code from here on. loop: `decisions.event`, of the signature `decision_state.EVENT`."""
        self._loop = loop
        self._bound = loop.bound_and_short(tuple(self._state))

    # Decisions

    def _event(
        self,
        now: float,
        what: int = decisions.GO_ON,
        slot: int = 0,
        count: int = 0,
        seconds: float = 0.0,
        origin: int = 0,
    ) -> list[Instruction]:
        threads = self._threads.threads
        self._ints[decisions.LOADS_ALLOWED] = threads
        if self._readers is not None:
            allowed = self._readers.threads
            self._ints[decisions.READERS], self._ints[decisions.FILL_LIMIT] = allowed, max(1, allowed // 2)
        if self._reads_together is not None:
            together = self._limits.read_together if self._reads_together() else 1
            self._ints[decisions.SOURCE_TOGETHER] = together
        out: list[Instruction] = []
        self._read(self._call(what, slot, count, origin, seconds), now, out)
        # A batch was staged: say which is the next, and see whether a slot is free for it, too.
        while self._coming is not None and self._coming.number in self._batches:
            coming = self._coming
            self._staged_epoch = coming.epoch
            self._line_up()
            if self._ints[decisions.FIRST_FREE] >= 0:
                self._read(self._call(decisions.GO_ON, 0, 0, 0, 0.0), now, out)
        if self._dropping is not None:
            self._drop(self._dropping, now, out)
        are_busy = self._ints[decisions.LOADS] >= threads
        self._were_busy &= are_busy
        self._has_idled |= not are_busy
        self._readers_were_busy &= self._ints[decisions.MOVES] >= self._ints[decisions.READERS]
        return out

    def _use_slots(self, most: int, now: float) -> list[Instruction]:
        """Have free slots used, up to so many in all."""
        while self._unused_slots and self.slots_in_use < most:
            slot = slot_of(self._views, 0, self._unused_slots.pop(0))
            decisions.free_slot(self._views, 0, slot)
        self._ints[decisions.SLOTS_IN_USE] = self.slots_in_use
        return self._event(now)

    def _drop(self, dropping: Dropping, now: float, out: list[Instruction]) -> None:
        """Have samples evicted that are used no more, and others brought into the space that this left."""
        numbers = self._ints
        dropping.hide_space(self._views)
        if self._coming is None:
            return
        slot = numbers[decisions.FIRST_SLOT]
        oldest = self._coming.number if slot < 0 else numbers[slot + decisions.SLOT_NUMBER]
        if samples := dropping.to_evict(self._views, oldest):
            out.append(Evict(samples))
        if not dropping.show_space(self._views):
            return
        begin = len(out)
        self._read(self._call(decisions.GO_ON, 0, 0, 0, 0.0), now, out)
        dropping.hide_space(self._views)
        for each in out[begin:]:
            if isinstance(each, Move) and each.batch < 0:
                dropping.filled(self._views, each.samples, each.rests)

    def _seek(self, epoch: int, step: int) -> None:
        """Go on in the plan from a step."""
        if self._dropping is not None:
            self._number = self._dropping.number_at(epoch, step)
        self._steps = self._plan.batches(self._rank, epoch, step)
        self._following = next(self._steps, None)
        self._line_up()

    def _line_up(self) -> None:
        """Say what is staged next."""
        numbers = self._ints
        if (following := self._following) is None:
            self._coming = None
            numbers[decisions.COMING_SIZE] = numbers[decisions.COMES_MORE] = 0
            return
        epoch, step, batches = following
        steps = 1 if self._limits.steps == 1 else max(1, self._staged_together() // batches.shape[1])
        samples, later = batches[:steps].ravel(), batches[steps:]
        steps = samples.size // batches.shape[1]
        self._following = (epoch, step + steps, later) if len(later) else next(self._steps, None)
        self._coming = _Batch(self._number, epoch, step, samples, steps)
        begin, size = numbers[decisions.COMING], samples.size
        self._state.ints[begin : begin + size] = samples
        numbers[decisions.COMING_SIZE] = size
        numbers[decisions.COMING_NUMBER] = self._number
        numbers[decisions.COMING_EPOCH] = epoch
        numbers[decisions.COMING_BEGINS] = epoch != self._staged_epoch
        numbers[decisions.COMES_MORE] = 1

    def _staged_together(self) -> int:
        """Return how many samples a slot should take, if that is more than one step's."""
        each = self._views.floats[self._ints[decisions.PACE] + decisions.SAMPLE_SECONDS]
        if each == 0.0 or not decisions.reads_by_itself(self._views, 0, SOURCE):
            return 0
        return min(int(_STAGED_SECONDS / each), self._slot_size)

    def _read(self, size: int, now: float, out: list[Instruction]) -> None:
        """Read the instructions that the last call wrote."""
        begin = self._ints[decisions.OUT]
        words = self._state.ints[begin : begin + size]
        at = 0
        while at < size:
            what, count, number, where = words[at : at + decisions.HEAD].tolist()
            at += decisions.HEAD
            if what == decisions.MOVE:
                columns = decisions.MOVE_COLUMNS
                entries, samples, rests = words[at : at + columns * count].reshape(columns, count).tolist()
                at += columns * count
                if number >= 0:
                    batch = self._batches[number]
                    epoch, step = batch.epoch, batch.step
                else:
                    epoch, step = self.epoch_of_fills, -1
                out.append(Move(entries, samples, where, rests, number, epoch, step))
            elif what == decisions.RUN:
                # The columns say what is known, so that nobody reads them.
                first = int(words[at])
                at += decisions.LOAD_COLUMNS * count
                batch = self._batches[number]
                rows, rests = range(first, first + count), [decisions.STAGING] * count
                batch_and_slot = number, batch.epoch, batch.step, batch.samples, where
                out.append(Load(*batch_and_slot, rows, [SOURCE] * count, rests, [-1] * count, batch.steps))
            elif what == decisions.LOAD:
                columns = decisions.LOAD_COLUMNS
                places, _, origins, kept, entries = words[at : at + columns * count].reshape(columns, count)
                at += columns * count
                batch = self._batches[number]
                about = number, batch.epoch, batch.step, batch.samples, where, _places_of(places)
                out.append(Load(*about, _listed(origins), _listed(kept), _listed(entries), batch.steps))
            elif what == decisions.READY:
                failed = tuple(words[at : at + count].tolist())
                at += count
                batch = self._batches.pop(number)
                out.append(Ready(number, batch.epoch, batch.step, where, batch.samples, failed, batch.steps))
            elif what == decisions.STAGED:
                assert self._coming is not None, "it was lined up"
                self._batches[number] = self._coming
                self._number += 1 if self._dropping is None else self._coming.steps
                out.append(Staged(self._coming.epoch, self._coming.step, self._due_seconds))
                self._due_seconds = now
            elif what == decisions.DROP:
                if self._limits.readers:
                    out.append(Drop(words[at : at + count].tolist()))
                at += count

    @property
    def epoch_of_fills(self) -> int:
        """The epoch that work for no batch counts to."""
        return self._coming.epoch if self._coming is not None else self._plan.epochs - 1

    # State

    def _have(self, state: decisions.State) -> None:
        self._state = state
        #: Over the same memory, for plain Python.
        self._views = views_of(state)
        self._ints = self._views.ints
        if self._loop is not None:
            self._bound = self._loop.bound_and_short(tuple(state))

    def _mark(self, items: Sequence[int], failed: dict[int, int], begin: int = 0, size: int = 1) -> None:
        """Put what an event is about into the group: items of a list that begins there, each of this size."""
        ints = self._ints
        group, marks = ints[decisions.GROUP], ints[decisions.MARKS]
        if len(items) == 1:
            ints[group], ints[marks] = begin + size * items[0], OK
        else:
            is_run = isinstance(items, range)
            numbers = np.arange(items[0], items[-1] + 1) if is_run else np.array(items)
            self._state.ints[group : group + len(items)] = begin + size * numbers
            self._state.ints[marks : marks + len(items)] = OK
        for index, mark in failed.items():
            ints[marks + index] = mark

    def _call(self, what: int, slot: int, count: int, origin: int, seconds: float) -> int:
        if self._bound is None:
            return decisions.event(self._views, what, 0, slot, count, origin, seconds)
        return self._bound(what, 0, slot, count, origin, seconds)


def _places_of(rows: Ids) -> Sequence[int]:
    """Return the rows of a Load, as a range where they follow each other."""
    first, count = int(rows[0]), rows.size
    is_run = count == 1 or bool((rows == np.arange(first, first + count)).all())
    return range(first, first + count) if is_run else rows.tolist()


def _listed(column: Ids) -> list[int]:
    """Return a column as a list: most have one value, and are long where samples are small."""
    if column.size > 1 and (column == column[0]).all():
        return [int(column[0])] * column.size
    found: list[int] = column.tolist()
    return found
