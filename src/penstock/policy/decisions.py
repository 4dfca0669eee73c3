"""What the scheduler decides, as short functions over arrays: the same for threads, a simulation and many ranks.

Each function is plain Python that numba can compile (`penstock.policy._decisions_kernels`). Uncompiled it takes a
`State` of memoryviews over the same memory, whose elements are Python's own numbers and several times faster to index
than an array's; so a run may begin uncompiled and go on compiled. Every array has the rank as its first index, or
belongs to all ranks.

    samples of a batch ──stage──> places of a slot
       place: WAITING for an entry ──moved──> DECODABLE ──next_load──> RUNNING ──loaded──> DONE or FAILED
              DECODABLE at once, where the worker reads by itself, or the bytes are in memory already
       entry, a sample on its way: QUEUED ──MOVE──> MOVING ──moved──> HERE ──last place loaded──> gone
              WITH_WORKER, where a worker reads the sample into a tier

Places of slot k are k * B to k * B + B - 1, where B is the size of the largest local batch. A place is in one list at a
time: the waiting ones of its entry, or the decodable ones of its slot.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

# Whatever can be indexed: memoryviews uncompiled, arrays compiled.
Ints = Any
Floats = Any

# A hand-over between threads costs about 100 us of wake-up and interpreter lock. A worker reads by itself what it waits
# for less long.
HAND_OVER_SECONDS = 100e-6
# A group of reads takes about this long, so that an instruction (some 30 us) is little beside its work.
GROUP_SECONDS = 1e-3
# Bytes that a worker reads by itself for one group, unless one sample is larger: each worker has memory for them.
OWN_BYTES = 256 * 1024
# Observed reads are forgotten over so many groups.
MEMORY = 16.0
# By what factor a worker's samples are believed to have become slower for each Load that says so, and its own reads.
SLOWER, OWN_SLOWER = 1.25, 1.05
# A worker's own read that took no longer is tried again: it may be cheaper than it looked.
TRIED_AGAIN_SECONDS = 1e-3
# How often at the start, before any reader begins: each read of many threads, which keep each other from the
# processors, waits longer.
FIRST_PROBES = 3
# A worker waits for a sample at least for this share of the seconds that it waited for a group: nobody keeps the
# interpreter's lock for longer.
SURE_SHARE = 1 / 1024
# Seconds of what was never observed.
UNKNOWN = math.inf

# Where bytes come from, as in the trace.
SOURCE, STAGING = -1, 0

# States of a place, and of an entry.
WAITING, DECODABLE, RUNNING, DONE, FAILED = 1, 2, 3, 4, 5
QUEUED, MOVING, HERE, WITH_WORKER = 1, 2, 3, 4
# States of a copy: of a sample that a rank's tier shall keep. LOST: its tier could not give it back.
ABSENT, PENDING, PRESENT, LOST = 0, 1, 2, 3
# What became of one sample of a group: done, its bytes could not be had, it could not be decoded.
OK, UNREAD, UNDECODED = 0, 1, 2

# Events that `event` takes. After the last two nothing is decided yet.
GO_ON, FREED, MOVED, LOADED, ABANDONED, OBSERVED = 0, 1, 2, 3, 4, 5

# Instructions in `State.out`: four numbers, of which the second is how many items follow, then columns of the items.
#   DROP   | items | 0      | 0      | entries
#   READY  | items | number | slot   | rows that failed
#   GAVE_UP| 0     | number | slot   |
#   STAGED | 0     | number | slot   |
#   MOVE   | items | number | origin | entries, samples, rests
#   LOAD   | items | number | slot   | rows, samples, origins, rests, entries
DROP, READY, GAVE_UP, STAGED, MOVE, LOAD = 0, 1, 2, 3, 4, 5
HEAD = 4

# A Load takes about this long: an instruction should be little beside its work, and a batch not wait for one of its
# Loads.
LOAD_SECONDS = 1e-3
# A Load of twice as many samples stays where each of them takes this share of the time at most, the median of so many.
# That is so for a data set whose `__getitems__` asks a database once, and not for one that decodes pictures.
WORTH_DOUBLING = 0.8
TRIED_LOADS = 3

# Columns of `State.numbers`.
(
    PLACES,  #: places of a slot: B
    READERS,  #: moves under way at most
    FILL_LIMIT,  #: of these, for no batch
    PASSING_LIMIT,  #: bytes that readers have read or are reading, and that are not decoded yet
    MOVES,  #: moves under way
    FILLS,  #: of these, for no batch
    QUEUED_ENTRIES,  #: entries in the urgent queue
    DECODABLE_PLACES,
    PASSING,  #: bytes, as PASSING_LIMIT
    FREE_ENTRY,  #: first of the free entries, -1 where none is
    FIRST_URGENT,  #: the urgent queue: entries by due time
    LAST_URGENT,
    FIRST_SLOT,  #: slots whose batches are incomplete, in the plan's order
    LAST_SLOT,
    ENDED_SLOTS,  #: how many slots `over` lists
    RELEASED_ENTRIES,  #: how many entries `over` lists
    FIRST_FREE,  #: free slots, those that were freed first before the others
    LAST_FREE,
    LOADS,  #: Loads under way
    LOADS_ALLOWED,  #: at most
    TRIED_SIZE,  #: samples of a Load that is tried
    TRIALS,  #: Loads of that size so far; -1: no other size is tried any more
    COMING_SIZE,  #: samples of the batch that is next in line; 0 where it is not known yet
    COMING_NUMBER,
    COMING_BEGINS,  #: 1: it is the first of an epoch
    COMES_MORE,  #: 1: the driver has more batches than this one
    PROBES_LEFT,  #: workers' own reads of the source that readers wait for at most before they begin
    NUMBERS,
) = range(28)
SAMPLE_SECONDS, HALF_SECONDS, TRIAL_SECONDS = 0, 1, 2


# Columns of the other arrays; see `State`.
LATENCY, CORRECTION, WORKER_SECONDS = 0, 1, 2
PROBE, BACKLOG, IN_FLIGHT, FILL_NEXT, FILL_END, FILLING = range(6)
COPY_RANK, COPY_TIER, COPY_STATE = 0, 1, 2
(
    SLOT_NUMBER,  #: running number of the batch
    SLOT_SIZE,  #: its samples
    SLOT_MISSING,  #: places that are neither DONE nor FAILED
    SLOT_RUNNING,  #: places in a Load
    SLOT_FAILED,  #: places that are FAILED
    SLOT_ABANDONED,  #: 1: nobody wants it any more
    SLOT_FIRST,  #: its decodable places: first, last, how many
    SLOT_LAST,
    SLOT_DECODABLE,
    SLOT_BEFORE,  #: its neighbours among the incomplete ones, or the free ones; -1 at the ends
    SLOT_AFTER,
    SLOT_COLUMNS,
) = range(12)
(
    PLACE_SAMPLE,
    PLACE_STATE,
    PLACE_ORIGIN,
    PLACE_ENTRY,  #: that it waits for, takes its bytes from, or reads for; -1 where none
    PLACE_NEXT,  #: the next in its list, or -1
    PLACE_COLUMNS,
) = range(6)
(
    ENTRY_SAMPLE,
    ENTRY_STATE,
    ENTRY_ORIGIN,
    ENTRY_REST,  #: the tier that is to keep the bytes, or STAGING
    ENTRY_BATCH,  #: running number of the batch that it is wanted for, -1 for none
    ENTRY_HOLDERS,  #: places that have yet to take the bytes
    ENTRY_FIRST,  #: waiting places
    ENTRY_LAST,
    ENTRY_BEFORE,  #: its neighbours in the urgent queue
    ENTRY_AFTER,  #: or the next of the free entries
    ENTRY_COLUMNS,
) = range(11)
ENDED, RELEASED = 0, 1
ITEM, MARK = 0, 1


class State(NamedTuple):
    """What the scheduler knows. R ranks, F samples, T tiers, S slots, P = S * B places, E entries; columns as above.

    Rows of costs, rate and counts are the source, the staging buffer, and the tiers: origin + 1. Few arrays with
    columns, not one for each: compiled functions hand all of them to each other.
    """

    #: int64[F], of each sample as stored.
    sizes: Ints
    #: float64[T + 2, readers + 1], bytes/s of so many reads together.
    rate: Floats
    #: float64[R, T + 2, 3]. LATENCY: seconds before a read's bytes flow. CORRECTION: observed over modelled seconds of
    #: readers' reads, 0 before the first. WORKER_SECONDS: of a read by a worker itself.
    costs: Floats
    #: int64[R, T + 2, 6]. PROBE: 1 where the next read is the worker's, to learn what it takes. BACKLOG: bytes that are
    #: queued or moving from there. IN_FLIGHT: moves from there. A tier is filled with
    #: fill_samples[FILL_NEXT : FILL_END] by so many moves under way: FILLING.
    counts: Ints
    fill_samples: Ints
    #: Copies that ranks keep or shall keep of sample k: copies[copy_begin[k] : copy_begin[k + 1]], by rank.
    #: int64[F + 1], int32[copies, 3].
    copy_begin: Ints
    copies: Ints
    #: int64[R, S, SLOT_COLUMNS], int32[R, P, PLACE_COLUMNS], int32[R, E, ENTRY_COLUMNS].
    slots: Ints
    places: Ints
    entries: Ints
    #: int32[R, a power of two above 2 E], entries by sample (open addressing), -1 where none.
    table: Ints
    #: int64[R, NUMBERS].
    numbers: Ints
    #: int64[R, 2, E], since the last decisions. ENDED: slots whose batch is complete, or was abandoned. RELEASED:
    #: entries whose bytes nobody wants any more.
    over: Ints
    #: int64[R, 2, G], what an event is about. ITEM: entries or places. MARK: what became of each.
    group: Ints
    #: int64[R, B], samples of the batch that is next in line.
    coming: Ints
    #: float64[R, 2 + TRIED_LOADS]. SAMPLE_SECONDS: of a Load, for each sample: the fastest lately; 0 until one ended.
    #: HALF_SECONDS: in Loads of half the size that is tried. From TRIAL_SECONDS on: in Loads of that size.
    pace: Floats
    #: int64: instructions, as above.
    out: Ints


def event(s: State, what: int, rank: int, slot: int, count: int, origin: int, seconds: float) -> int:
    """Take note of one event, and decide. Returns how many numbers of `s.out` hold the instructions.

    slot, count, origin, seconds: see the function that the event is for; 0 where it needs none.
    """
    if what == FREED:
        free_slot(s, rank, slot)
    elif what == MOVED:
        moved(s, rank, count, seconds)
    elif what == LOADED:
        loaded(s, rank, slot, count, seconds)
    elif what == ABANDONED:
        abandon(s, rank, slot)
        return 0
    elif what == OBSERVED:
        observe_worker(s, rank, origin, count, seconds)
        return 0
    return decide(s, rank)


# -- Decisions -----------------------------------------------------------------------------------------------


def decide(s: State, rank: int) -> int:
    """Write all instructions that may be given now. Returns how many numbers they take.

    Where a slot is free and the next batch is not known, the driver puts it into `coming` and asks again (GO_ON): its
    reads go before fills.
    """
    n = s.numbers
    end = _dropped(s, rank)
    end = _ended(s, rank, end)
    if n[rank, FIRST_FREE] >= 0 and n[rank, COMING_SIZE] > 0:
        slot = _stage(s, rank)
        end = _head(s, end, STAGED, 0, s.slots[rank, slot, SLOT_NUMBER], slot)
    if n[rank, FIRST_FREE] >= 0 and n[rank, COMES_MORE] != 0:
        return end
    while n[rank, MOVES] < n[rank, READERS]:
        begin = end
        end = _next_move(s, rank, begin)
        if end == begin:
            break
    while n[rank, LOADS] < n[rank, LOADS_ALLOWED] and n[rank, DECODABLE_PLACES] > 0:
        end = _next_load(s, rank, end)
    return end


def _head(s: State, at: int, what: int, count: int, number: int, where: int) -> int:
    s.out[at] = what
    s.out[at + 1] = count
    s.out[at + 2] = number
    s.out[at + 3] = where
    return at + HEAD


def _dropped(s: State, rank: int) -> int:
    """Say which entries are over; before any instruction about an entry of the same number."""
    count: int = s.numbers[rank, RELEASED_ENTRIES]
    if count == 0:
        return 0
    end = _head(s, 0, DROP, count, 0, 0)
    for k in range(count):
        s.out[end + k] = s.over[rank, RELEASED, k]
    s.numbers[rank, RELEASED_ENTRIES] = 0
    return end + count


def _ended(s: State, rank: int, end: int) -> int:
    """Hand out the batches that are complete, and take back the slots of those that were given up."""
    n = s.numbers
    for k in range(n[rank, ENDED_SLOTS]):
        slot = s.over[rank, ENDED, k]
        number = s.slots[rank, slot, SLOT_NUMBER]
        if s.slots[rank, slot, SLOT_ABANDONED] != 0:
            end = _head(s, end, GAVE_UP, 0, number, slot)
            free_slot(s, rank, slot)
            continue
        failed = s.slots[rank, slot, SLOT_FAILED]
        end = _head(s, end, READY, failed, number, slot)
        begin = slot * n[rank, PLACES]
        row = 0
        while failed > 0:
            if s.places[rank, begin + row, PLACE_STATE] == FAILED:
                s.out[end] = row
                end += 1
                failed -= 1
            row += 1
    n[rank, ENDED_SLOTS] = 0
    return end


def _stage(s: State, rank: int) -> int:
    """Give the next batch the slot that has been free longest."""
    n = s.numbers
    slot: int = n[rank, FIRST_FREE]
    _unlink(s, rank, s.slots, slot, SLOT_BEFORE, FIRST_FREE)
    count = n[rank, COMING_SIZE]
    n[rank, COMING_SIZE] = 0
    if n[rank, COMING_BEGINS] != 0:
        for place in range(s.counts.shape[1]):
            s.counts[rank, place, PROBE] = 1
    s.slots[rank, slot, SLOT_NUMBER] = n[rank, COMING_NUMBER]
    s.slots[rank, slot, SLOT_SIZE] = count
    s.slots[rank, slot, SLOT_MISSING] = count
    s.slots[rank, slot, SLOT_RUNNING] = 0
    s.slots[rank, slot, SLOT_ABANDONED] = 0
    s.slots[rank, slot, SLOT_FAILED] = 0
    s.slots[rank, slot, SLOT_FIRST] = -1
    s.slots[rank, slot, SLOT_LAST] = -1
    s.slots[rank, slot, SLOT_DECODABLE] = 0
    _append(s, rank, s.slots, slot, SLOT_BEFORE, FIRST_SLOT)
    begin = slot * n[rank, PLACES]
    for index in range(count):
        s.places[rank, begin + index, PLACE_SAMPLE] = s.coming[rank, index]
        _route(s, rank, begin + index, False)
    return slot


def _next_move(s: State, rank: int, begin: int) -> int:
    """Write the next move, if one may begin: urgent ones first, by due time; else fills, each tier's in its order."""
    n = s.numbers
    if n[rank, PROBES_LEFT] > 0:
        return begin
    count = _next_urgent(s, rank)
    if count == 0 and n[rank, QUEUED_ENTRIES] == 0:
        count = _next_fill(s, rank)
    if count == 0:
        return begin
    first = s.group[rank, ITEM, 0]
    origin = s.entries[rank, first, ENTRY_ORIGIN]
    n[rank, MOVES] += 1
    s.counts[rank, origin + 1, IN_FLIGHT] += 1
    at = _head(s, begin, MOVE, count, s.entries[rank, first, ENTRY_BATCH], origin)
    for k in range(count):
        entry = s.group[rank, ITEM, k]
        s.out[at + k] = entry
        s.out[at + count + k] = s.entries[rank, entry, ENTRY_SAMPLE]
        s.out[at + 2 * count + k] = s.entries[rank, entry, ENTRY_REST]
    return at + 3 * count


def _next_load(s: State, rank: int, begin: int) -> int:
    """Write a Load of the earliest batch that has decodable places."""
    n = s.numbers
    slot = n[rank, FIRST_SLOT]
    while s.slots[rank, slot, SLOT_DECODABLE] == 0:
        slot = s.slots[rank, slot, SLOT_AFTER]
    # So that all threads have some.
    threads = n[rank, LOADS_ALLOWED]
    most = min(load_size(s, rank), (n[rank, DECODABLE_PLACES] + threads - 1) // threads)
    place = s.slots[rank, slot, SLOT_FIRST]
    count, own = 0, 0
    while count < min(most, s.group.shape[2]) and place >= 0:
        if s.places[rank, place, PLACE_ORIGIN] == SOURCE:
            own += s.sizes[s.places[rank, place, PLACE_SAMPLE]]
            if count > 0 and own > OWN_BYTES:
                break
        s.group[rank, ITEM, count] = place
        s.places[rank, place, PLACE_STATE] = RUNNING
        place = s.places[rank, place, PLACE_NEXT]
        count += 1
    s.slots[rank, slot, SLOT_FIRST] = place
    if place < 0:
        s.slots[rank, slot, SLOT_LAST] = -1
    s.slots[rank, slot, SLOT_DECODABLE] -= count
    s.slots[rank, slot, SLOT_RUNNING] += count
    n[rank, DECODABLE_PLACES] -= count
    n[rank, LOADS] += 1
    at = _head(s, begin, LOAD, count, s.slots[rank, slot, SLOT_NUMBER], slot)
    for k in range(count):
        place = s.group[rank, ITEM, k]
        entry = s.places[rank, place, PLACE_ENTRY]
        s.out[at + k] = place - slot * n[rank, PLACES]
        s.out[at + count + k] = s.places[rank, place, PLACE_SAMPLE]
        s.out[at + 2 * count + k] = s.places[rank, place, PLACE_ORIGIN]
        s.out[at + 3 * count + k] = s.entries[rank, entry, ENTRY_REST] if entry >= 0 else STAGING
        s.out[at + 4 * count + k] = entry
    return at + 5 * count


def load_size(s: State, rank: int) -> int:
    """Return how many samples a Load should take: LOAD_SECONDS' worth, or what is tried; 1 until one has ended."""
    each = s.pace[rank, SAMPLE_SECONDS]
    if each == 0.0:
        return 1
    tried: int = s.numbers[rank, TRIED_SIZE]
    return max(tried, int(LOAD_SECONDS / each))


# -- Events --------------------------------------------------------------------------------------------------


def free_slot(s: State, rank: int, slot: int) -> None:
    """Take note that nobody uses a slot any more, or that there is a new one."""
    _append(s, rank, s.slots, slot, SLOT_BEFORE, FIRST_FREE)


def moved(s: State, rank: int, count: int, seconds: float) -> None:
    """Take note that a move of the entries in the group is over after `seconds`; MARK tells which have no bytes."""
    n = s.numbers
    first = s.group[rank, ITEM, 0]
    place = s.entries[rank, first, ENTRY_ORIGIN] + 1
    reads = s.counts[rank, place, IN_FLIGHT]
    is_fill = s.entries[rank, first, ENTRY_BATCH] < 0
    modelled, is_complete = 0.0, True
    for k in range(count):
        entry = s.group[rank, ITEM, k]
        nbytes = s.sizes[s.entries[rank, entry, ENTRY_SAMPLE]]
        modelled += s.costs[rank, place, LATENCY] + nbytes * reads / s.rate[place, reads]
        s.counts[rank, place, BACKLOG] -= nbytes
        is_complete = is_complete and s.group[rank, MARK, k] == OK
    if is_complete and modelled > 0.0:
        ratio, known = seconds / modelled, s.costs[rank, place, CORRECTION]
        s.costs[rank, place, CORRECTION] = ratio if known == 0.0 else known + (ratio - known) / MEMORY
    n[rank, MOVES] -= 1
    s.counts[rank, place, IN_FLIGHT] -= 1
    if is_fill:
        n[rank, FILLS] -= 1
        s.counts[rank, s.entries[rank, first, ENTRY_REST] + 1, FILLING] -= 1
    for k in range(count):
        entry = s.group[rank, ITEM, k]
        if s.group[rank, MARK, k] == OK:
            _settle(s, rank, entry)
        else:
            _fail(s, rank, entry)


def loaded(s: State, rank: int, slot: int, count: int, seconds: float) -> None:
    """Take note that a Load of the places in the group is over after `seconds`; MARK tells what became of each."""
    s.numbers[rank, LOADS] -= 1
    learn_load_size(s, rank, count, seconds)
    s.slots[rank, slot, SLOT_RUNNING] -= count
    for k in range(count):
        place = s.group[rank, ITEM, k]
        entry, origin = s.places[rank, place, PLACE_ENTRY], s.places[rank, place, PLACE_ORIGIN]
        mark = s.group[rank, MARK, k]
        if mark == UNREAD and origin == SOURCE:
            s.numbers[rank, PROBES_LEFT] = 0  # it tells nothing
        if entry >= 0:
            if origin == STAGING:
                _let_go(s, rank, entry)
            elif mark == UNREAD:
                _fail(s, rank, entry)
            else:
                _settle(s, rank, entry)
        s.places[rank, place, PLACE_ENTRY] = -1
        is_to_route = False
        if mark == UNREAD and origin > STAGING:
            _lose(s, rank, s.places[rank, place, PLACE_SAMPLE])
            is_to_route = s.slots[rank, slot, SLOT_ABANDONED] == 0
        if is_to_route:
            _route(s, rank, place, True)
        else:
            _end_place(s, rank, slot, place, DONE if mark == OK else FAILED)
    if s.slots[rank, slot, SLOT_MISSING] == 0:
        _end_slot(s, rank, slot)


def learn_load_size(s: State, rank: int, count: int, seconds: float) -> None:
    # Of a clock that is coarse; and 0 is not known.
    each, usual = max(seconds / count, 1e-9), s.pace[rank, SAMPLE_SECONDS]
    # The fastest lately: others may only have waited for a processor.
    s.pace[rank, SAMPLE_SECONDS] = each if usual == 0.0 else min(each, SLOWER * usual)
    n = s.numbers
    if n[rank, TRIALS] < 0 or count != n[rank, TRIED_SIZE]:
        return
    s.pace[rank, TRIAL_SECONDS + n[rank, TRIALS]] = each
    n[rank, TRIALS] += 1
    if n[rank, TRIALS] < TRIED_LOADS:
        return
    first, second, third = (
        s.pace[rank, TRIAL_SECONDS],
        s.pace[rank, TRIAL_SECONDS + 1],
        s.pace[rank, TRIAL_SECONDS + 2],
    )
    median = max(min(first, second), min(max(first, second), third))
    if median <= WORTH_DOUBLING * s.pace[rank, HALF_SECONDS]:
        s.pace[rank, HALF_SECONDS] = median
        n[rank, TRIED_SIZE] *= 2
        n[rank, TRIALS] = 0
    else:
        n[rank, TRIED_SIZE] //= 2
        n[rank, TRIALS] = -1


def abandon(s: State, rank: int, slot: int) -> None:
    """Give up a batch that is incomplete. Its slot ends once its running places have."""
    n = s.numbers
    n[rank, PROBES_LEFT] = 0  # the probe may be among what is given up
    s.slots[rank, slot, SLOT_ABANDONED] = 1
    n[rank, DECODABLE_PLACES] -= s.slots[rank, slot, SLOT_DECODABLE]
    s.slots[rank, slot, SLOT_DECODABLE] = 0
    s.slots[rank, slot, SLOT_FIRST] = -1
    s.slots[rank, slot, SLOT_LAST] = -1
    begin = slot * n[rank, PLACES]
    end = begin + s.slots[rank, slot, SLOT_SIZE]
    # None of its places may wait when a sample that its worker should have read is passed on to who waits for it.
    for place in range(begin, end):
        if s.places[rank, place, PLACE_STATE] == WAITING:
            entry = s.places[rank, place, PLACE_ENTRY]
            _unlink_waiter(s, rank, entry, place)
            _end_place(s, rank, slot, place, DONE)
            if s.entries[rank, entry, ENTRY_STATE] == QUEUED:
                _want_less(s, rank, entry)
            s.places[rank, place, PLACE_ENTRY] = -1
    for place in range(begin, end):
        if s.places[rank, place, PLACE_STATE] == DECODABLE:
            entry = s.places[rank, place, PLACE_ENTRY]
            _end_place(s, rank, slot, place, DONE)
            s.places[rank, place, PLACE_ENTRY] = -1
            if entry >= 0 and s.places[rank, place, PLACE_ORIGIN] == STAGING:
                _let_go(s, rank, entry)
            elif entry >= 0:
                _pass_on(s, rank, entry)
    if s.slots[rank, slot, SLOT_MISSING] == 0:
        _end_slot(s, rank, slot)


def observe_worker(s: State, rank: int, origin: int, count: int, seconds: float) -> None:
    """Learn that a worker waited for `count` samples that it read from there by itself, `seconds` in all.

    The shortest of late: a longer one may have been a wait for the interpreter's lock.
    What workers should read from now on is theirs, and what they should not is the readers'.
    """
    n = s.numbers
    was_quick = reads_by_itself(s, rank, origin)
    known, each = s.costs[rank, origin + 1, WORKER_SECONDS], seconds / count
    slower = max(OWN_SLOWER * known + HAND_OVER_SECONDS / MEMORY, SURE_SHARE * seconds)
    s.costs[rank, origin + 1, WORKER_SECONDS] = min(each, slower)
    is_quick = reads_by_itself(s, rank, origin)
    if HAND_OVER_SECONDS <= each < TRIED_AGAIN_SECONDS:
        s.counts[rank, origin + 1, PROBE] = 1
    if is_quick and not was_quick:
        _hand_to_workers(s, rank, origin, n[rank, QUEUED_ENTRIES])
    elif was_quick and not is_quick:
        _hand_to_readers(s, rank, origin)
    if origin == SOURCE and n[rank, PROBES_LEFT] > 0:
        n[rank, PROBES_LEFT] -= 1
        is_slow = s.costs[rank, origin + 1, WORKER_SECONDS] >= TRIED_AGAIN_SECONDS
        if is_quick or is_slow or _hand_to_workers(s, rank, SOURCE, 1) == 0:
            n[rank, PROBES_LEFT] = 0


# -- From where ----------------------------------------------------------------------------------------------


def expected_seconds(s: State, rank: int, origin: int, nbytes: int) -> float:
    """Return how long one more read from there would take by now, what is queued before it included.

    Source: thesis, equations 3.5 to 3.7, for `rate`; what shares a place is served together.
    """
    if reads_by_itself(s, rank, origin):
        own: float = s.costs[rank, origin + 1, WORKER_SECONDS]
        return own
    place = origin + 1
    reads = min(s.counts[rank, place, IN_FLIGHT] + 1, s.numbers[rank, READERS])
    wire = (s.counts[rank, place, BACKLOG] + nbytes) / s.rate[place, reads]
    return _corrected(s, rank, place, s.costs[rank, place, LATENCY] + wire)


def _corrected(s: State, rank: int, place: int, seconds: float) -> float:
    factor = s.costs[rank, place, CORRECTION]
    return seconds if factor == 0.0 else seconds * factor


def reads_by_itself(s: State, rank: int, origin: int) -> bool:
    """Return whether a worker that needs a sample from there reads it without a reader thread."""
    is_quick: bool = s.costs[rank, origin + 1, WORKER_SECONDS] < HAND_OVER_SECONDS
    return is_quick or s.numbers[rank, READERS] == 0


def own_copy(s: State, rank: int, sample: int) -> int:
    """Return the copy of a sample that a rank's tier keeps or shall keep, -1 where none does."""
    for copy in range(s.copy_begin[sample], s.copy_begin[sample + 1]):
        if s.copies[copy, COPY_RANK] == rank:
            return copy
    return -1


def _route(s: State, rank: int, place: int, is_second_choice: bool) -> None:
    """Decide where a place gets its bytes from: of what holds the sample, what is expected to bring it first."""
    sample = s.places[rank, place, PLACE_SAMPLE]
    entry = find(s, rank, sample)
    if entry >= 0:
        if s.entries[rank, entry, ENTRY_STATE] == HERE:
            s.entries[rank, entry, ENTRY_HOLDERS] += 1
            _offer(s, rank, place, STAGING, entry)
        else:
            _wait(s, rank, place, entry)
        return
    copy = own_copy(s, rank, sample)
    origin = SOURCE
    if copy >= 0 and s.copies[copy, COPY_STATE] == PRESENT:
        nbytes, tier = s.sizes[sample], s.copies[copy, COPY_TIER]
        # What a worker computes for its own reads is not seen, and it is the least for a tier.
        if reads_by_itself(s, rank, tier) or (
            expected_seconds(s, rank, tier, nbytes) <= expected_seconds(s, rank, SOURCE, nbytes)
        ):
            origin = tier
    is_wanted = copy >= 0 and s.copies[copy, COPY_STATE] == ABSENT
    by_worker = reads_by_itself(s, rank, origin) or is_second_choice
    if s.counts[rank, origin + 1, PROBE] != 0:
        s.counts[rank, origin + 1, PROBE] = 0
        by_worker = True
    if by_worker and not is_wanted:
        _offer(s, rank, place, origin, -1)
        return
    entry = _new_entry(s, rank, sample)
    s.entries[rank, entry, ENTRY_ORIGIN] = origin
    s.entries[rank, entry, ENTRY_REST] = STAGING
    s.entries[rank, entry, ENTRY_BATCH] = s.slots[rank, place // s.numbers[rank, PLACES], SLOT_NUMBER]
    if is_wanted:
        s.entries[rank, entry, ENTRY_REST] = s.copies[copy, COPY_TIER]
        s.copies[copy, COPY_STATE] = PENDING
    if by_worker:
        s.entries[rank, entry, ENTRY_STATE] = WITH_WORKER
        _offer(s, rank, place, origin, entry)
    else:
        _wait(s, rank, place, entry)
        _queue(s, rank, entry)


def _hand_to_workers(s: State, rank: int, origin: int, most: int) -> int:
    """Let workers read by themselves what is queued to be moved from there, the first `most`; return how many."""
    entry, count = s.numbers[rank, FIRST_URGENT], 0
    while entry >= 0 and count < most:
        following = s.entries[rank, entry, ENTRY_AFTER]
        if s.entries[rank, entry, ENTRY_ORIGIN] == origin:
            count += 1
            _unqueue(s, rank, entry)
            s.counts[rank, origin + 1, BACKLOG] -= s.sizes[s.entries[rank, entry, ENTRY_SAMPLE]]
            if s.entries[rank, entry, ENTRY_REST] == STAGING:
                place = s.entries[rank, entry, ENTRY_FIRST]
                while place >= 0:
                    after = s.places[rank, place, PLACE_NEXT]
                    _offer(s, rank, place, origin, -1)
                    place = after
                _forget(s, rank, entry)
            else:
                s.entries[rank, entry, ENTRY_STATE] = WITH_WORKER
                _pass_on(s, rank, entry)
        entry = following
    return count


def _hand_to_readers(s: State, rank: int, origin: int) -> None:
    """Have readers move what workers would read from there by themselves, and have not begun to."""
    n = s.numbers
    slot = n[rank, FIRST_SLOT]
    while slot >= 0:
        place = s.slots[rank, slot, SLOT_FIRST]
        n[rank, DECODABLE_PLACES] -= s.slots[rank, slot, SLOT_DECODABLE]
        s.slots[rank, slot, SLOT_DECODABLE] = 0
        s.slots[rank, slot, SLOT_FIRST] = -1
        s.slots[rank, slot, SLOT_LAST] = -1
        while place >= 0:
            following, entry = s.places[rank, place, PLACE_NEXT], s.places[rank, place, PLACE_ENTRY]
            if s.places[rank, place, PLACE_ORIGIN] != origin:
                _offer(s, rank, place, s.places[rank, place, PLACE_ORIGIN], entry)
            elif entry < 0:
                _route(s, rank, place, False)
            else:
                _wait(s, rank, place, entry)
                _queue(s, rank, entry)
            place = following
        slot = s.slots[rank, slot, SLOT_AFTER]


# -- Moves ---------------------------------------------------------------------------------------------------


def _next_urgent(s: State, rank: int) -> int:
    n = s.numbers
    entry = n[rank, FIRST_URGENT]
    if entry < 0:
        return 0
    origin = s.entries[rank, entry, ENTRY_ORIGIN]
    most = _group_size(s, rank, origin, s.entries[rank, entry, ENTRY_SAMPLE])
    # So that all readers have some.
    idle = n[rank, READERS] - n[rank, MOVES]
    most = min(most, (n[rank, QUEUED_ENTRIES] + idle - 1) // idle)
    count = 0
    while count < most and entry >= 0 and s.entries[rank, entry, ENTRY_ORIGIN] == origin:
        nbytes = s.sizes[s.entries[rank, entry, ENTRY_SAMPLE]]
        if not _fits(s, rank, nbytes):
            break
        _unqueue(s, rank, entry)
        s.entries[rank, entry, ENTRY_STATE] = MOVING
        s.group[rank, ITEM, count] = entry
        count += 1
        n[rank, PASSING] += nbytes
        entry = n[rank, FIRST_URGENT]
    return count


def _next_fill(s: State, rank: int) -> int:
    """A background fill: none where a worker's own read is as cheap, and each tier has its share of the readers."""
    n = s.numbers
    if n[rank, FILLS] >= n[rank, FILL_LIMIT] or reads_by_itself(s, rank, SOURCE):
        return 0
    tiers = s.counts.shape[1] - 1
    unfinished = 0
    for tier in range(1, tiers):
        if (
            s.counts[rank, tier + 1, FILL_NEXT] < s.counts[rank, tier + 1, FILL_END]
            or s.counts[rank, tier + 1, FILLING] > 0
        ):
            unfinished += 1
    for tier in range(1, tiers):
        share = max(1, n[rank, FILL_LIMIT] // max(1, unfinished))
        if s.counts[rank, tier + 1, FILLING] >= share:
            continue
        count, most = 0, 1
        while count < most and s.counts[rank, tier + 1, FILL_NEXT] < s.counts[rank, tier + 1, FILL_END]:
            sample = s.fill_samples[s.counts[rank, tier + 1, FILL_NEXT]]
            copy = own_copy(s, rank, sample)
            if s.copies[copy, COPY_STATE] == ABSENT:
                nbytes = s.sizes[sample]
                if not _fits(s, rank, nbytes):
                    break
                if count == 0:
                    most = _group_size(s, rank, SOURCE, sample)
                entry = _new_entry(s, rank, sample)
                s.entries[rank, entry, ENTRY_STATE] = MOVING
                s.entries[rank, entry, ENTRY_ORIGIN] = SOURCE
                s.entries[rank, entry, ENTRY_REST] = tier
                s.entries[rank, entry, ENTRY_BATCH] = -1
                s.copies[copy, COPY_STATE] = PENDING
                s.counts[rank, SOURCE + 1, BACKLOG] += nbytes
                n[rank, PASSING] += nbytes
                s.group[rank, ITEM, count] = entry
                count += 1
            s.counts[rank, tier + 1, FILL_NEXT] += 1
        if count:
            s.counts[rank, tier + 1, FILLING] += 1
            n[rank, FILLS] += 1
            return count
    return 0


def _group_size(s: State, rank: int, origin: int, sample: int) -> int:
    """Return how many reads like this one take GROUP_SECONDS for one reader, at least 1."""
    place = origin + 1
    reads = max(1, s.counts[rank, place, IN_FLIGHT])
    wire = s.sizes[sample] * reads / s.rate[place, reads]
    seconds = _corrected(s, rank, place, s.costs[rank, place, LATENCY] + wire)
    if seconds * s.group.shape[2] <= GROUP_SECONDS:
        most: int = s.group.shape[2]
        return most
    return max(1, int(GROUP_SECONDS / seconds))


def _fits(s: State, rank: int, nbytes: int) -> bool:
    passing = s.numbers[rank, PASSING]
    is_within: bool = passing == 0 or passing + nbytes <= s.numbers[rank, PASSING_LIMIT]
    return is_within


# -- Entries -------------------------------------------------------------------------------------------------


def _settle(s: State, rank: int, entry: int) -> None:
    """The bytes of an entry are here: give them to all places that wait."""
    sample, rest, state = (
        s.entries[rank, entry, ENTRY_SAMPLE],
        s.entries[rank, entry, ENTRY_REST],
        s.entries[rank, entry, ENTRY_STATE],
    )
    if rest != STAGING:
        s.copies[own_copy(s, rank, sample), COPY_STATE] = PRESENT
    s.entries[rank, entry, ENTRY_STATE] = HERE
    s.entries[rank, entry, ENTRY_HOLDERS] = 1
    place = s.entries[rank, entry, ENTRY_FIRST]
    while place >= 0:
        following = s.places[rank, place, PLACE_NEXT]
        if state == MOVING:
            s.entries[rank, entry, ENTRY_HOLDERS] += 1
            _offer(s, rank, place, STAGING, entry)
        else:
            _offer(s, rank, place, rest, -1)
        place = following
    s.entries[rank, entry, ENTRY_FIRST] = -1
    s.entries[rank, entry, ENTRY_LAST] = -1
    if state == MOVING and rest != STAGING:
        s.numbers[rank, PASSING] -= s.sizes[sample]  # the tier's memory has it
    _let_go(s, rank, entry)


def _let_go(s: State, rank: int, entry: int) -> None:
    """One place less needs the bytes of an entry."""
    s.entries[rank, entry, ENTRY_HOLDERS] -= 1
    if s.entries[rank, entry, ENTRY_HOLDERS] == 0:
        if s.entries[rank, entry, ENTRY_REST] == STAGING:
            s.numbers[rank, PASSING] -= s.sizes[s.entries[rank, entry, ENTRY_SAMPLE]]
        _free_entry(s, rank, entry)


def _fail(s: State, rank: int, entry: int) -> None:
    """The bytes of an entry could not be had. From a tier: try the source. From the source: its places fail."""
    sample = s.entries[rank, entry, ENTRY_SAMPLE]
    first, origin = s.entries[rank, entry, ENTRY_FIRST], s.entries[rank, entry, ENTRY_ORIGIN]
    if s.entries[rank, entry, ENTRY_STATE] == MOVING:
        s.numbers[rank, PASSING] -= s.sizes[sample]
    _forget(s, rank, entry)
    if origin != SOURCE:
        _lose(s, rank, sample)
    while first >= 0:
        following = s.places[rank, first, PLACE_NEXT]
        s.places[rank, first, PLACE_ENTRY] = -1
        if origin != SOURCE:
            _route(s, rank, first, True)
        else:
            slot = first // s.numbers[rank, PLACES]
            _end_place(s, rank, slot, first, FAILED)
            if s.slots[rank, slot, SLOT_MISSING] == 0:
                _end_slot(s, rank, slot)
        first = following


def _lose(s: State, rank: int, sample: int) -> None:
    copy = own_copy(s, rank, sample)
    if copy >= 0 and s.copies[copy, COPY_STATE] == PRESENT:
        s.copies[copy, COPY_STATE] = LOST


def _pass_on(s: State, rank: int, entry: int) -> None:
    """The batch whose worker should have read a sample is given up: let the next place that waits do so."""
    place = s.entries[rank, entry, ENTRY_FIRST]
    if place < 0:
        _forget(s, rank, entry)
        return
    s.entries[rank, entry, ENTRY_FIRST] = s.places[rank, place, PLACE_NEXT]
    if s.places[rank, place, PLACE_NEXT] < 0:
        s.entries[rank, entry, ENTRY_LAST] = -1
    _offer(s, rank, place, s.entries[rank, entry, ENTRY_ORIGIN], entry)


def _forget(s: State, rank: int, entry: int) -> None:
    """An entry is over and brought nothing: nobody can wait for it any more."""
    if s.entries[rank, entry, ENTRY_REST] != STAGING:
        s.copies[own_copy(s, rank, s.entries[rank, entry, ENTRY_SAMPLE]), COPY_STATE] = ABSENT
    _free_entry(s, rank, entry)


def _new_entry(s: State, rank: int, sample: int) -> int:
    n = s.numbers
    entry: int = n[rank, FREE_ENTRY]
    n[rank, FREE_ENTRY] = s.entries[rank, entry, ENTRY_AFTER]
    s.entries[rank, entry, ENTRY_SAMPLE] = sample
    s.entries[rank, entry, ENTRY_HOLDERS] = 0
    s.entries[rank, entry, ENTRY_FIRST] = -1
    s.entries[rank, entry, ENTRY_LAST] = -1
    insert(s, rank, entry)
    return entry


def _free_entry(s: State, rank: int, entry: int) -> None:
    n = s.numbers
    _remove(s, rank, entry)
    s.over[rank, RELEASED, n[rank, RELEASED_ENTRIES]] = entry
    n[rank, RELEASED_ENTRIES] += 1
    s.entries[rank, entry, ENTRY_STATE] = 0
    s.entries[rank, entry, ENTRY_AFTER] = n[rank, FREE_ENTRY]
    n[rank, FREE_ENTRY] = entry


# -- Lists ---------------------------------------------------------------------------------------------------


def _append(s: State, rank: int, table: Ints, item: int, before: int, first: int) -> None:
    """Put a row of a table at the end of a list.

    before: the column with the row's neighbour before it; the next column has the one after it. first: the column of
    `numbers` with the list's first row; the next column has its last.
    """
    last = s.numbers[rank, first + 1]
    table[rank, item, before] = last
    table[rank, item, before + 1] = -1
    if last < 0:
        s.numbers[rank, first] = item
    else:
        table[rank, last, before + 1] = item
    s.numbers[rank, first + 1] = item


def _unlink(s: State, rank: int, table: Ints, item: int, before: int, first: int) -> None:
    """Take a row out of its list; arguments as `_append`."""
    left, right = table[rank, item, before], table[rank, item, before + 1]
    if left < 0:
        s.numbers[rank, first] = right
    else:
        table[rank, left, before + 1] = right
    if right < 0:
        s.numbers[rank, first + 1] = left
    else:
        table[rank, right, before] = left


def _offer(s: State, rank: int, place: int, origin: int, entry: int) -> None:
    """A place's bytes are at hand, or its worker reads them: put it at the end of its slot's decodable ones."""
    n = s.numbers
    slot = place // n[rank, PLACES]
    s.places[rank, place, PLACE_STATE] = DECODABLE
    s.places[rank, place, PLACE_ORIGIN] = origin
    s.places[rank, place, PLACE_ENTRY] = entry
    s.places[rank, place, PLACE_NEXT] = -1
    last = s.slots[rank, slot, SLOT_LAST]
    if last < 0:
        s.slots[rank, slot, SLOT_FIRST] = place
    else:
        s.places[rank, last, PLACE_NEXT] = place
    s.slots[rank, slot, SLOT_LAST] = place
    s.slots[rank, slot, SLOT_DECODABLE] += 1
    n[rank, DECODABLE_PLACES] += 1


def _wait(s: State, rank: int, place: int, entry: int) -> None:
    s.places[rank, place, PLACE_STATE] = WAITING
    s.places[rank, place, PLACE_ENTRY] = entry
    s.places[rank, place, PLACE_NEXT] = -1
    last = s.entries[rank, entry, ENTRY_LAST]
    if last < 0:
        s.entries[rank, entry, ENTRY_FIRST] = place
    else:
        s.places[rank, last, PLACE_NEXT] = place
    s.entries[rank, entry, ENTRY_LAST] = place


def _unlink_waiter(s: State, rank: int, entry: int, place: int) -> None:
    before, other = -1, s.entries[rank, entry, ENTRY_FIRST]
    while other != place:
        before, other = other, s.places[rank, other, PLACE_NEXT]
    after = s.places[rank, place, PLACE_NEXT]
    if before < 0:
        s.entries[rank, entry, ENTRY_FIRST] = after
    else:
        s.places[rank, before, PLACE_NEXT] = after
    if after < 0:
        s.entries[rank, entry, ENTRY_LAST] = before


def _queue(s: State, rank: int, entry: int) -> None:
    n = s.numbers
    s.entries[rank, entry, ENTRY_STATE] = QUEUED
    _append(s, rank, s.entries, entry, ENTRY_BEFORE, FIRST_URGENT)
    n[rank, QUEUED_ENTRIES] += 1
    s.counts[rank, s.entries[rank, entry, ENTRY_ORIGIN] + 1, BACKLOG] += s.sizes[
        s.entries[rank, entry, ENTRY_SAMPLE]
    ]


def _unqueue(s: State, rank: int, entry: int) -> None:
    """Take an entry out of the urgent queue. Its bytes stay in the backlog until it has moved, or is forgotten."""
    _unlink(s, rank, s.entries, entry, ENTRY_BEFORE, FIRST_URGENT)
    s.numbers[rank, QUEUED_ENTRIES] -= 1


def _want_less(s: State, rank: int, entry: int) -> None:
    """A place less waits for an entry of the urgent queue: it is due when the first one left is, or never."""
    n, place = s.numbers, s.entries[rank, entry, ENTRY_FIRST]
    if place < 0:
        _unqueue(s, rank, entry)
        nbytes = s.sizes[s.entries[rank, entry, ENTRY_SAMPLE]]
        s.counts[rank, s.entries[rank, entry, ENTRY_ORIGIN] + 1, BACKLOG] -= nbytes
        _forget(s, rank, entry)
        return
    number = s.slots[rank, place // n[rank, PLACES], SLOT_NUMBER]
    s.entries[rank, entry, ENTRY_BATCH] = number
    before, after = entry, s.entries[rank, entry, ENTRY_AFTER]
    while after >= 0:
        other = s.entries[rank, after, ENTRY_BATCH]
        if other > number or (other == number and s.entries[rank, after, ENTRY_FIRST] > place):
            break
        before, after = after, s.entries[rank, after, ENTRY_AFTER]
    if before == entry:
        return
    _unqueue(s, rank, entry)
    n[rank, QUEUED_ENTRIES] += 1
    s.entries[rank, entry, ENTRY_BEFORE] = before
    s.entries[rank, entry, ENTRY_AFTER] = after
    s.entries[rank, before, ENTRY_AFTER] = entry
    if after < 0:
        n[rank, LAST_URGENT] = entry
    else:
        s.entries[rank, after, ENTRY_BEFORE] = entry


def _end_place(s: State, rank: int, slot: int, place: int, state: int) -> None:
    s.places[rank, place, PLACE_STATE] = state
    s.slots[rank, slot, SLOT_MISSING] -= 1
    if state == FAILED:
        s.slots[rank, slot, SLOT_FAILED] += 1


def _end_slot(s: State, rank: int, slot: int) -> None:
    """A batch is complete, or was abandoned and nothing of it runs."""
    n = s.numbers
    _unlink(s, rank, s.slots, slot, SLOT_BEFORE, FIRST_SLOT)
    s.over[rank, ENDED, n[rank, ENDED_SLOTS]] = slot
    n[rank, ENDED_SLOTS] += 1


# -- Entries by sample: open addressing, linear probing ------------------------------------------------------


def _home(s: State, sample: int) -> int:
    home: int = (sample ^ (sample >> 15)) & (s.table.shape[1] - 1)
    return home


def find(s: State, rank: int, sample: int) -> int:
    mask = s.table.shape[1] - 1
    at = _home(s, sample)
    while True:
        entry: int = s.table[rank, at]
        if entry < 0 or s.entries[rank, entry, ENTRY_SAMPLE] == sample:
            return entry
        at = (at + 1) & mask


def insert(s: State, rank: int, entry: int) -> None:
    mask = s.table.shape[1] - 1
    at = _home(s, s.entries[rank, entry, ENTRY_SAMPLE])
    while s.table[rank, at] >= 0:
        at = (at + 1) & mask
    s.table[rank, at] = entry


def _remove(s: State, rank: int, entry: int) -> None:
    """Close the gap: what comes behind moves up where it may, so that no search ends early."""
    mask = s.table.shape[1] - 1
    gap = _home(s, s.entries[rank, entry, ENTRY_SAMPLE])
    while s.table[rank, gap] != entry:
        gap = (gap + 1) & mask
    at = (gap + 1) & mask
    while s.table[rank, at] >= 0:
        other = s.table[rank, at]
        home = _home(s, s.entries[rank, other, ENTRY_SAMPLE])
        if ((at - home) & mask) >= ((at - gap) & mask):
            s.table[rank, gap] = other
            gap = at
        at = (at + 1) & mask
    s.table[rank, gap] = -1
