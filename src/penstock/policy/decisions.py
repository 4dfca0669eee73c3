"""What the scheduler decides, as short functions over arrays: the same for threads, a simulation and many ranks.

Each function is plain Python that numba can compile (`penstock.policy._decisions_kernels`). Uncompiled it takes a
`State` of memoryviews over the same memory, whose elements are Python's own numbers and several times faster to index
than an array's; so a run may begin uncompiled and go on compiled.

    samples of a batch ──STAGED──> places of a slot
       place: WAITING for an entry ──moved──> DECODABLE ──LOAD──> RUNNING ──loaded──> DONE or FAILED
              DECODABLE at once, where the worker reads by itself, or the bytes are in memory already
       entry, a sample on its way: QUEUED ──MOVE──> MOVING ──moved──> HERE ──last place loaded──> gone
              WITH_WORKER, where a worker reads the sample into a tier
              EXPECTED, where another rank hands it over, or has promised to read it
                  ──received, announced, or late──> QUEUED
          HERE, and wanted by another rank: a gift ──MOVE──moved──> gone

A place is in one list at a time: the waiting ones of its entry, or the decodable ones of its slot.
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
# Bytes that a worker reads by itself for one group, unless one sample is larger: each worker has memory for them. Of
# photographs, 100 KB each, a quarter of that made a run that keeps crops 15 % slower: two were read for each Load.
OWN_BYTES = 1 << 20
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
# Samples that are next in line, among which those are looked for that lie near the first one. Bytes that they span.
WINDOW = 1024
SPAN_BYTES = 4 << 20
# Seconds of what was never observed.
UNKNOWN = math.inf
# What another rank has read is heard of within about this long: threads look for it every 10 ms, if they get a
# processor.
HEARD_SECONDS = 0.02
# Who was not heard of for so long is expected nothing of: one that lives may wait as long for a processor.
SILENT_SECONDS = 1.0
# So long a rank waits in a run, in all, for what others have promised and do not read. Then it waits for none of that
# longer than `patience_seconds`.
VAIN_SECONDS = 10.0
# Of STAGES_UNTIL: all batches. Of MOST_IN_FLIGHT: any number.
ALWAYS = ANY_NUMBER = (1 << 63) - 1

# Of READS_PEERS: other ranks' tiers are read wherever they have a sample that this rank's have not, so that the source,
# which all ranks share, is read about once for each sample.
RATHER = 2

# Of a sample that many ranks keep, so many of them are looked at.
MOST_HOLDERS = 8

# Where bytes come from, and where they rest, as in the trace. With T tiers, 1 to T are a rank's own; tier t of rank p
# is (p + 1) * T + t to all others.
SOURCE, STAGING = -1, 0

# States of a place, and of an entry. EXPECTED: another rank will hand it over, or has promised to read it.
WAITING, DECODABLE, RUNNING, DONE, FAILED = 1, 2, 3, 4, 5
QUEUED, MOVING, HERE, WITH_WORKER, EXPECTED = 1, 2, 3, 4, 5
# States of a copy: of a sample that a rank's tier shall keep. ABSENT: its rank reads it, for a fill at the latest.
# DUE: who reads it first hands it over. GONE: its tier has given its space to another. PROMISED, ON_WAY: as ABSENT and
# PENDING, and its rank reads it before any other does, so that the others wait for it. LEFT + t: as ABSENT, and tier t
# has it from an earlier run.
ABSENT, PENDING, PRESENT, GONE, DUE, LEFT = 0, 1, 2, 3, 4, 6
KEEPS = 5  # what a promise adds
PROMISED, ON_WAY = ABSENT + KEEPS, PENDING + KEEPS
# What became of one sample of a group: done, its bytes could not be had, it could not be decoded.
OK, UNREAD, UNDECODED = 0, 1, 2

# Events that `event` takes. After the last three nothing is decided yet.
GO_ON, FREED, MOVED, LOADED, LOADED_RUN, RECEIVED, LATE, ABANDONED, OBSERVED, ANNOUNCED = (
    0,
    1,
    2,
    3,
    4,
    5,
    6,
    7,
    8,
    9,
)

# Instructions, from OUT on: four numbers, of which the second is how many items follow, then columns of the items.
#   DROP   | items | 0      | 0      | entries
#   READY  | items | number | slot   | rows that failed
#   STAGED | 0     | number | slot   |
#   MOVE   | items | number | origin | entries, samples, rests
#   LOAD   | items | number | slot   | rows, samples, origins, rests, entries
#   RUN    | items | number | slot   | the same of rows that follow each other, all from the source, for no tier
DROP, READY, STAGED, MOVE, LOAD, RUN = 0, 1, 2, 3, 4, 5
HEAD, MOVE_COLUMNS, LOAD_COLUMNS = 4, 3, 5

# A Load takes about this long: an instruction should be little beside its work, and a batch not wait for one of its
# Loads. Between pictures an instruction takes 0.3 to 0.6 ms of the interpreter's lock.
LOAD_SECONDS = 50e-3
# What a Load takes of a processor beside its samples. Measured: 0.1 to 0.4 ms; 0.35 where crops were kept.
LOAD_COST_SECONDS = 0.3e-3
# What a batch takes of one beside its Loads: it is lent, the training takes it, and lets go of the one before it.
# Measured: processor time of all threads of runs over kept crops of 8 x 8, less that of their Loads: 0.11 ms a batch.
BATCH_COST_SECONDS = 0.11e-3
# So long a Load takes at least where threads could have other batches instead of a part of one. Measured: crops of one
# validation, 2 processors, pairs: of 64 samples, 2 ms, 1.1 Loads in place of 2.5, 9 % less of the processors.
LEAST_LOAD_SECONDS = 5 * LOAD_COST_SECONDS
# A Load of twice as many samples stays where each of them takes this share of the time at most, the median of so many.
# That is so for a data set whose `__getitems__` asks a database once, and not for one that decodes pictures.
WORTH_DOUBLING = 0.8
TRIED_LOADS = 3

# Numbers of a rank: ints[rank + MOVES], and so on.
(
    RANK,  #: which one it is
    TIERS,
    READERS,  #: moves under way at most
    MOST_READERS,  #: the most that READERS may become, for which there are entries
    FILL_LIMIT,  #: of these, for no batch
    PASSING_LIMIT,  #: bytes that readers have read or are reading, and that are not decoded yet
    OWN_LIMIT,  #: bytes that a worker reads by itself for one group
    MOVES,  #: moves under way
    FILLS,  #: of these, for no batch
    GIFTS,  #: of these, to other ranks
    QUEUED_ENTRIES,  #: entries in the urgent queue
    DECODABLE_PLACES,
    PASSING,  #: bytes, as PASSING_LIMIT
    FREE_ENTRY,  #: first of the free entries; the next follows from its ENTRY_AFTER
    FIRST_URGENT,  #: the urgent queue: entries by due time
    LAST_URGENT,
    FIRST_GIFT,  #: entries that are here, and that another rank is to get
    LAST_GIFT,
    GIFTS_LEFT,  #: how many, those that move included
    GIFT_BYTES,  #: of these, which have half as much space as PASSING_LIMIT besides
    FIRST_SLOT,  #: slots whose batches are incomplete, in the plan's order
    LAST_SLOT,
    ENDED_SLOTS,  #: how many slots ENDED lists
    RELEASED_ENTRIES,  #: how many entries RELEASED lists
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
    HOLE_BYTES,  #: a hole between two samples of a unit is read over if it is no larger
    READS_PEERS,  #: 1: it may read other ranks' tiers, where expected sooner; RATHER: before the source; 0: none
    EXPECTED_ENTRIES,  #: entries that wait for what other ranks have promised to read
    STAGES_UNTIL,  #: batches whose number is no larger may be read from the source
    DROPS,  #: 1: what a rank reads no more from its tiers gives its space to spares, the fills of row STAGING
    HAS_HEIRS,  #: 1: what is read may be for other ranks' tiers, too
    HANDS_ON,  #: 1: samples have no home, but go from reader to reader; see COMING
    ROWS,  #: where the rows are of what bytes come from
    SLOTS,  #: where the slots' rows are listed, by index
    TABLE,  #: entries by sample (open addressing), 0 where none
    TABLE_MASK,  #: its length, a power of two, less 1
    GROUP,  #: what an event is about: entries, or places
    MARKS,  #: what became of each
    GROUP_SIZE,  #: the most that a group has, and places of a slot: B
    SLOT_COUNT,  #: slots that there is a place for here, used or not
    SLOTS_IN_USE,
    COMING,  #: samples of the batch that is next in line. Where HANDS_ON, behind GROUP_SIZE of them for each the tier
    #: where it is found, or SOURCE, and behind as many again where it goes then, or STAGING
    ENDED,  #: slots whose batch is complete, or was abandoned, since the last decisions
    RELEASED,  #: entries whose bytes nobody wants any more, since the last decisions
    OUT,  #: where instructions are written
    PACE,  #: where the rank's floats are about how long Loads take
    LOADS_ALL,  #: 1: a Load takes all that a batch has left
    COMING_EPOCH,  #: of the batch that is next in line
    FORM_EPOCHS,  #: a sample that tier 1 keeps is read anew every so many epochs; 0: never
    USED_ENTRIES,  #: how many entries are not free
    SOURCE_TOGETHER,  #: samples that a move from the source has, if so many are queued, however long that takes
    READS_FOR_OTHERS,  #: samples of a batch, if ranks read what they promise ahead of whoever needs that first; else 0
    SAMPLE_BYTES,  #: of a sample, on average
    NUMBERS,
) = range(64)
# Floats of a rank, from PACE on. Seconds of a Load, for each sample: of the fastest lately, 0 until one ended; of Loads
# of half the size that is tried; and, from TRIAL_SECONDS on, of each that had that size. LEAST_SECONDS: that a Load is
# to take at least, whatever each sample does, see LEAST_LOAD_SECONDS. ASKED_AT: since when the training waits for the
# earliest batch. IN_VAIN: seconds that it has waited for others and did not get what they had promised.
SAMPLE_SECONDS, HALF_SECONDS, LEAST_SECONDS, ASKED_AT, IN_VAIN, TRIAL_SECONDS = 0, 1, 2, 3, 4, 5
# Rows: one for each origin, the source, the staging buffer, the tiers, and those of other ranks: one for all that is
# read from tier 1 of any of them, and so on.
(
    PROBE,  #: 1: the next read is the worker's, to learn what it takes
    BACKLOG,  #: bytes that are queued or moving from there
    IN_FLIGHT,  #: moves from there
    MOST_IN_FLIGHT,  #: at most
    IN_QUEUE,  #: entries of the urgent queue that are read from there
    FILL_NEXT,  #: a tier is filled with fill_samples[FILL_NEXT : FILL_END]
    FILL_END,
    FILLING,  #: moves into it that are under way for no batch
    SPACE,  #: bytes that are free for spares
    COSTS,  #: where the floats are about what it costs
    IS_ELSEWHERE,  #: 1: a tier keeps no bytes as they are read in memory, so that these stay in passing until loaded
    IS_FORM,  #: 1: what a tier keeps is made by workers, perhaps for one epoch, and is read by workers alone
    ROW_COLUMNS,
) = range(13)
# Floats, from COSTS on: seconds before a read's bytes flow; observed over modelled seconds of readers' reads (see
# `moved`), 0 before the first; seconds that a worker waits for a read of its own; seconds that the rates count for a
# request, for each of its bytes; the least observed over modelled seconds of late, at least 1; bytes/s of so many reads
# together.
LATENCY, CORRECTION, WORKER_SECONDS, REQUEST, LEAST_CORRECTION, RATES = 0, 1, 2, 3, 4, 5
COPY_RANK, COPY_TIER, COPY_STATE = 0, 1, 2
# Of a table with a row for each sample; and of one with a row for each run of samples that lie in a unit at even steps:
# the run's first sample, with its unit and offset, and the step.
UNIT, OFFSET, FIRST, STEP = 0, 1, 2, 3
PLACES, RUNS = 2, 4  # their columns
(
    SLOT_INDEX,  #: its number outside of here: whose memory it has
    SLOT_HAD,  #: running number of the latest batch that was written there, and 1 more; 0: none was
    SLOT_PLACES,  #: its places, one behind the other
    SLOT_NUMBER,  #: running number of the batch
    SLOT_EPOCH,
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
) = range(16)
(
    PLACE_SLOT,
    PLACE_ROW,  #: in its batch
    PLACE_SAMPLE,
    PLACE_STATE,
    PLACE_ORIGIN,
    PLACE_ENTRY,  #: that it waits for, takes its bytes from, or reads for; -1 where none
    PLACE_NEXT,  #: the next in its list, or -1
    PLACE_HIT,  #: where HANDS_ON, the tier where it is found, or SOURCE
    PLACE_HEIR,  #: where HANDS_ON, the place that keeps it afterwards, or STAGING
    PLACE_COLUMNS,
) = range(10)
(
    ENTRY_SAMPLE,
    ENTRY_STATE,
    ENTRY_ORIGIN,
    ENTRY_REST,  #: the tier that is to keep the bytes, or STAGING
    ENTRY_HEIR,  #: the place that is to get them besides once they are here, or STAGING
    ENTRY_BATCH,  #: running number of the batch that it is wanted for, -1 for none
    ENTRY_HOLDERS,  #: places that have yet to take the bytes
    ENTRY_FIRST,  #: waiting places
    ENTRY_LAST,
    ENTRY_BEFORE,  #: its neighbours in the urgent queue
    ENTRY_AFTER,  #: or, of a free one, how far behind the row after it the next free one begins: 0 until it was used
    ENTRY_COLUMNS,
) = range(12)


class State(NamedTuple):
    """What the scheduler knows. F samples.

    Ranks, slots, places, entries, and rows of origins each have a piece of `ints`, and are known by where it begins:
    ints[entry + ENTRY_SAMPLE] is the sample of an entry. Few arrays, not one for each column: compiled functions hand
    all of them to each other, and plain Python indexes one dimension faster than two.
    """

    ints: Ints
    #: float64: first, of each rank of the job, when it was heard of, -inf before that; UNKNOWN: nothing is expected of
    #: it until it is. Then what ranks and rows point to.
    floats: Floats
    #: int64[F], of each sample as stored.
    sizes: Ints
    #: int64, of all ranks' tiers.
    fill_samples: Ints
    #: Copies that ranks keep or shall keep of sample k: copies[copy_begin[k] : copy_begin[k + 1]], by rank.
    #: int32[F + 1], int16[copies, 3]: of 10^7 samples that a rank keeps, 10 bytes a sample.
    copy_begin: Ints
    copies: Ints
    #: int32[copies], where DROPS: number of the last batch of the rank that has the sample, -1 for none; else int32[0].
    copy_last: Ints
    #: int64[F, PLACES] or int64[runs, RUNS], where in the source samples lie (UNIT -1: not known); int64[0, PLACES]
    #: where that does not tell.
    extents: Ints


def event(s: State, what: int, rank: int, index: int, count: int, origin: int, seconds: float) -> int:
    """Take note of one event, and decide. Returns how many numbers from OUT on hold the instructions.

    index: of the slot. count, origin, seconds: see the function that the event is for; 0 where it needs none.
    """
    slot = s.ints[s.ints[rank + SLOTS] + index]
    if what == FREED:
        free_slot(s, rank, slot)
    elif what == MOVED:
        moved(s, rank, count, seconds)
    elif what == LOADED:
        loaded(s, rank, slot, count, seconds)
    elif what == LOADED_RUN:
        loaded_run(s, rank, slot, origin, count, seconds)
    elif what == RECEIVED:
        received(s, rank, count)
    elif what == LATE:
        late(s, rank, seconds)
    elif what == ABANDONED:
        abandon(s, rank, slot)
        return 0
    elif what == OBSERVED:
        observe_worker(s, rank, origin, count, seconds)
        return 0
    elif what == ANNOUNCED:
        announced(s, rank, origin, count)
        return 0
    return decide(s, rank)


# -- Decisions -----------------------------------------------------------------------------------------------


def decide(s: State, rank: int) -> int:
    """Write all instructions that may be given now. Returns how many numbers they take.

    Where a slot is free and the next batch is not known, the driver puts it into `coming` and asks again (GO_ON): its
    reads go before fills.
    """
    m = s.ints
    begin: int = m[rank + OUT]
    end = _ended(s, rank, _dropped(s, rank, begin))
    if m[rank + FIRST_FREE] >= 0 and m[rank + COMING_SIZE] > 0:
        slot = _stage(s, rank)
        end = _head(m, end, STAGED, 0, m[slot + SLOT_NUMBER], m[slot + SLOT_INDEX])
    if m[rank + FIRST_FREE] >= 0 and m[rank + COMES_MORE] != 0:
        return end - begin
    while m[rank + MOVES] < m[rank + READERS]:
        before = end
        end = _next_move(s, rank, before)
        if end == before:
            break
    while m[rank + LOADS] < m[rank + LOADS_ALLOWED] and m[rank + DECODABLE_PLACES] > 0:
        before = end
        end = _next_load(s, rank, before)
        if end == before:
            break
    return end - begin


def _head(m: Ints, at: int, what: int, count: int, number: int, where: int) -> int:
    m[at] = what
    m[at + 1] = count
    m[at + 2] = number
    m[at + 3] = where
    return at + HEAD


def _dropped(s: State, rank: int, begin: int) -> int:
    """Say which entries are over; before any instruction about an entry of the same number."""
    m = s.ints
    count: int = m[rank + RELEASED_ENTRIES]
    if count == 0:
        return begin
    end = _head(m, begin, DROP, count, 0, 0)
    for k in range(count):
        m[end + k] = m[m[rank + RELEASED] + k]
    m[rank + RELEASED_ENTRIES] = 0
    return end + count


def _ended(s: State, rank: int, end: int) -> int:
    """Hand out the batches that are complete, and take back the slots of those that were given up."""
    m = s.ints
    for k in range(m[rank + ENDED_SLOTS]):
        slot = m[m[rank + ENDED] + k]
        number = m[slot + SLOT_NUMBER]
        if m[slot + SLOT_ABANDONED] != 0:
            free_slot(s, rank, slot)
            continue
        failed = m[slot + SLOT_FAILED]
        end = _head(m, end, READY, failed, number, m[slot + SLOT_INDEX])
        place = m[slot + SLOT_PLACES]
        while failed > 0:
            if m[place + PLACE_STATE] == FAILED:
                m[end] = m[place + PLACE_ROW]
                end += 1
                failed -= 1
            place += PLACE_COLUMNS
    m[rank + ENDED_SLOTS] = 0
    return end


def _stage(s: State, rank: int) -> int:
    """Give the next batch the slot that has been free longest."""
    m = s.ints
    slot: int = m[rank + FIRST_FREE]
    _unlink(m, rank, slot, SLOT_BEFORE, FIRST_FREE)
    count = m[rank + COMING_SIZE]
    m[rank + COMING_SIZE] = 0
    if m[rank + COMING_BEGINS] != 0:
        for origin in range(SOURCE, m[rank + TIERS] + 1):
            m[_row(m, rank, origin) + PROBE] = 1
    m[slot + SLOT_NUMBER] = m[rank + COMING_NUMBER]
    m[slot + SLOT_EPOCH] = m[rank + COMING_EPOCH]
    m[slot + SLOT_SIZE] = count
    m[slot + SLOT_MISSING] = count
    m[slot + SLOT_RUNNING] = 0
    m[slot + SLOT_ABANDONED] = 0
    m[slot + SLOT_FAILED] = 0
    m[slot + SLOT_FIRST] = -1
    m[slot + SLOT_LAST] = -1
    m[slot + SLOT_DECODABLE] = 0
    _append(m, rank, slot, SLOT_BEFORE, FIRST_SLOT)
    if _has_source_alone(s, rank):
        m[_row(m, rank, SOURCE) + PROBE] = 0
        _offer_all(m, rank, slot)
        return slot
    place = m[slot + SLOT_PLACES]
    coming, size = m[rank + COMING], m[rank + GROUP_SIZE]
    for index in range(count):
        m[place + PLACE_SAMPLE] = m[coming + index]
        if m[rank + HANDS_ON] != 0:
            m[place + PLACE_HIT] = m[coming + size + index]
            m[place + PLACE_HEIR] = m[coming + 2 * size + index]
        _route(s, rank, place, False)
        place += PLACE_COLUMNS
    return slot


def _has_source_alone(s: State, rank: int) -> bool:
    """Return whether workers read all samples of the next batch from the source: no other place has any."""
    m = s.ints
    is_alone: bool = m[rank + TIERS] == 0 and m[rank + READS_PEERS] == 0 and m[rank + HAS_HEIRS] == 0
    return is_alone and m[rank + USED_ENTRIES] == 0 and reads_by_itself(s, rank, SOURCE)


def _next_move(s: State, rank: int, begin: int) -> int:
    """Write the next move, if one may begin: urgent ones first, by due time; else fills, each tier's in its order."""
    m = s.ints
    if m[rank + PROBES_LEFT] > 0:
        return begin
    is_gift = False
    count = _next_gift(s, rank) if m[rank + FIRST_GIFT] >= 0 else 0
    if count > 0:
        is_gift = True
    else:
        count = _next_urgent(s, rank) if _movable(s, rank) > 0 else _next_fill(s, rank)
    if count == 0:
        return begin
    first = m[m[rank + GROUP]]
    origin, rest = m[first + ENTRY_ORIGIN], ENTRY_REST
    if is_gift:
        origin, rest = STAGING, ENTRY_HEIR
    m[rank + MOVES] += 1
    m[_row(m, rank, origin) + IN_FLIGHT] += 1
    at = _head(m, begin, MOVE, count, -1 if is_gift else m[first + ENTRY_BATCH], origin)
    for k in range(count):
        entry = m[m[rank + GROUP] + k]
        m[at + k] = entry
        m[at + count + k] = m[entry + ENTRY_SAMPLE]
        m[at + 2 * count + k] = m[entry + rest]
    return at + MOVE_COLUMNS * count


def _next_load(s: State, rank: int, begin: int) -> int:
    """Write a Load of the earliest batch that has decodable places; nothing where it has to be all that is missing."""
    m = s.ints
    loads_all = m[rank + LOADS_ALL] != 0
    slot = m[rank + FIRST_SLOT]
    while slot >= 0 and m[slot + SLOT_DECODABLE] < (m[slot + SLOT_MISSING] if loads_all else 1):
        slot = m[slot + SLOT_AFTER]
    if slot < 0:
        return begin
    # So that all threads have some.
    threads = m[rank + LOADS_ALLOWED]
    part = max((m[rank + DECODABLE_PLACES] + threads - 1) // threads, _least_load_size(s, rank))
    most = min(load_size(s, rank), part)
    # A Load of the batch's few last places would cost as much lock as another.
    if loads_all or m[slot + SLOT_DECODABLE] < most + (most + 1) // 2:
        most = m[slot + SLOT_DECODABLE]
    place = m[slot + SLOT_FIRST]
    count, own = 0, 0
    while count < min(most, m[rank + GROUP_SIZE]) and place >= 0:
        if m[place + PLACE_ORIGIN] == SOURCE:
            own += s.sizes[m[place + PLACE_SAMPLE]]
            if count > 0 and own > m[rank + OWN_LIMIT] and not loads_all:
                break
        m[m[rank + GROUP] + count] = place
        m[place + PLACE_STATE] = RUNNING
        place = m[place + PLACE_NEXT]
        count += 1
    m[slot + SLOT_FIRST] = place
    if place < 0:
        m[slot + SLOT_LAST] = -1
    if not _is_begun(m, slot):
        _choose_memory(m, rank, slot)
    m[slot + SLOT_DECODABLE] -= count
    m[slot + SLOT_RUNNING] += count
    m[rank + DECODABLE_PLACES] -= count
    m[rank + LOADS] += 1
    at = _head(m, begin, RUN, count, m[slot + SLOT_NUMBER], m[slot + SLOT_INDEX])
    first = m[m[rank + GROUP]]
    for k in range(count):
        place = m[m[rank + GROUP] + k]
        entry = m[place + PLACE_ENTRY]
        if entry >= 0 or m[place + PLACE_ORIGIN] != SOURCE or place != first + k * PLACE_COLUMNS:
            m[begin] = LOAD
        m[at + k] = m[place + PLACE_ROW]
        m[at + count + k] = m[place + PLACE_SAMPLE]
        m[at + 2 * count + k] = m[place + PLACE_ORIGIN]
        m[at + 3 * count + k] = m[entry + ENTRY_REST] if entry >= 0 else STAGING
        m[at + 4 * count + k] = entry
    return at + LOAD_COLUMNS * count


def _is_begun(m: Ints, slot: int) -> bool:
    """Return whether samples of a batch that is incomplete were written to its slot, or are being written."""
    is_begun: bool = m[slot + SLOT_RUNNING] > 0 or m[slot + SLOT_MISSING] < m[slot + SLOT_SIZE]
    return is_begun


def _choose_memory(m: Ints, rank: int, slot: int) -> None:
    """Give a batch that is about to be written the memory that was written last, of what no other has.

    Batches are staged as far ahead as there are slots, and the memory of a slot takes space once it is written: where
    decoding is what takes longest, two or three do.
    """
    best, other = slot, m[rank + FIRST_FREE]
    while other >= 0:
        if m[other + SLOT_HAD] > m[best + SLOT_HAD]:
            best = other
        other = m[other + SLOT_AFTER]
    other = m[rank + FIRST_SLOT]
    while other >= 0:
        if m[other + SLOT_HAD] > m[best + SLOT_HAD] and not _is_begun(m, other):
            best = other
        other = m[other + SLOT_AFTER]
    index, had = m[slot + SLOT_INDEX], m[slot + SLOT_HAD]
    m[slot + SLOT_INDEX], m[best + SLOT_HAD] = m[best + SLOT_INDEX], had
    m[best + SLOT_INDEX] = index
    m[m[rank + SLOTS] + m[slot + SLOT_INDEX]] = slot
    m[m[rank + SLOTS] + index] = best
    m[slot + SLOT_HAD] = m[slot + SLOT_NUMBER] + 1


def load_size(s: State, rank: int) -> int:
    """Return how many samples a Load should take: LOAD_SECONDS' worth, or what is tried; 1 until one has ended."""
    m, f = s.ints, s.floats
    each = f[m[rank + PACE] + SAMPLE_SECONDS]
    if each == 0.0:
        return 1
    tried: int = m[rank + TRIED_SIZE]
    return max(tried, int(LOAD_SECONDS / each))


def _least_load_size(s: State, rank: int) -> int:
    """Return how many samples a Load takes at least, as far as there are some, so that it is worth its cost.

    Where no more slots are in use than threads, the training holding one of them, some would have no batch instead.
    """
    m = s.ints
    each = s.floats[m[rank + PACE] + SAMPLE_SECONDS]
    if each == 0.0 or m[rank + SLOTS_IN_USE] <= m[rank + LOADS_ALLOWED]:
        return 1
    return int(s.floats[m[rank + PACE] + LEAST_SECONDS] / each)


# -- Events --------------------------------------------------------------------------------------------------


def free_slot(s: State, rank: int, slot: int) -> None:
    """Take note that nobody uses a slot any more, or that there is a new one."""
    _append(s.ints, rank, slot, SLOT_BEFORE, FIRST_FREE)


def moved(s: State, rank: int, count: int, seconds: float) -> None:
    """Take note that a move of the entries in the group is over after `seconds`; MARK tells which have no bytes."""
    m, f = s.ints, s.floats
    first = m[m[rank + GROUP]]
    if m[first + ENTRY_STATE] == HERE:
        _given(s, rank, count)
        return
    row = _row(m, rank, m[first + ENTRY_ORIGIN])
    cost, reads = m[row + COSTS], m[row + IN_FLIGHT]
    is_fill = m[first + ENTRY_BATCH] < 0
    modelled, is_complete = 0.0, True
    unit, begin, end = -1, 0, 0
    for k in range(count):
        entry = m[m[rank + GROUP] + k]
        sample = m[entry + ENTRY_SAMPLE]
        nbytes = s.sizes[sample]
        modelled += nbytes * reads / f[cost + RATES + reads]
        if is_near(s, rank, sample, unit, begin, end):
            _, its_begin, its_end = extent_of(s, sample)
            begin, end = min(begin, its_begin), max(end, its_end)
            modelled -= nbytes * reads * f[cost + REQUEST]
        else:
            modelled += f[cost + LATENCY]
            if m[entry + ENTRY_ORIGIN] == SOURCE:
                unit, begin, end = extent_of(s, sample)
        m[row + BACKLOG] -= nbytes
        is_complete = is_complete and m[m[rank + MARKS] + k] == OK
    if is_complete and modelled > 0.0:
        # Modelled for the reads that there are at its end: as many as at any time where all readers are busy. Of n that
        # begin and end together, on one wire, the last counts as if it had been alone, and the mean comes out as
        # 1 + 1/2 + ... + 1/n, 4 for 32; their number at the begin says as little. The place then seems slower than it
        # is: groups are smaller, promises are waited for longer, and tiers are preferred to the source.
        ratio, known = seconds / modelled, f[cost + CORRECTION]
        f[cost + CORRECTION] = ratio if known == 0.0 else known + (ratio - known) / MEMORY
        least = min(ratio, OWN_SLOWER * f[cost + LEAST_CORRECTION])
        f[cost + LEAST_CORRECTION] = max(1.0, least)
    m[rank + MOVES] -= 1
    m[row + IN_FLIGHT] -= 1
    if is_fill:
        m[rank + FILLS] -= 1
        m[_row(m, rank, m[first + ENTRY_REST]) + FILLING] -= 1
    for k in range(count):
        entry = m[m[rank + GROUP] + k]
        if m[m[rank + MARKS] + k] == OK:
            _settle(s, rank, entry)
        else:
            _fail(s, rank, entry)


def divided(s: State, rank: int, origin: int, parts: int) -> None:
    """Take note that a move from there has become so many, one for each part of its entries."""
    m = s.ints
    m[rank + MOVES] += parts - 1
    m[_row(m, rank, origin) + IN_FLIGHT] += parts - 1


def received(s: State, rank: int, count: int) -> None:
    """Take note that another rank has handed over the samples in the group: a tier of this one has them."""
    m = s.ints
    for k in range(count):
        sample = m[m[rank + GROUP] + k]
        copy = own_copy(s, rank, sample)
        if copy < 0:
            continue
        s.copies[copy, COPY_STATE] = PRESENT
        entry = find(s, rank, sample)
        if entry == 0:
            continue
        if m[entry + ENTRY_STATE] == EXPECTED:
            _queue(s, rank, entry)
        elif m[rank + HANDS_ON] != 0:
            s.copies[copy, COPY_STATE] = GONE  # it came too late


def announced(s: State, rank: int, peer: int, count: int) -> None:
    """Take note that another rank's tier has the samples in the group; what waits for them is read there.

    What it keeps beyond its share is not taken note of: other ranks could not know that. Virtual time, in which all
    ranks have one table of copies, calls this as well.
    """
    m = s.ints
    for k in range(count):
        sample = m[m[rank + GROUP] + k]
        copy = _first_copy(s, sample, peer)
        if copy == s.copy_begin[sample + 1] or s.copies[copy, COPY_RANK] != peer:
            continue
        s.copies[copy, COPY_STATE] = PRESENT
        entry = find(s, rank, sample)
        if entry > 0 and m[entry + ENTRY_STATE] == EXPECTED and m[rank + HANDS_ON] == 0:
            m[rank + EXPECTED_ENTRIES] -= 1
            _queue(s, rank, entry)


def withdrawn(s: State, rank: int, peer: int, tier: int) -> None:
    """Take note that another rank's tier gets nothing from now on: what waits for that is read from the source.

    The driver has marked its copies; what is queued is looked at again before it moves.
    """
    m = s.ints
    slot = m[rank + FIRST_SLOT]
    while slot >= 0:
        place = m[slot + SLOT_PLACES]
        for _ in range(m[slot + SLOT_SIZE]):
            entry = m[place + PLACE_ENTRY]
            is_expected = m[place + PLACE_STATE] == WAITING and m[entry + ENTRY_STATE] == EXPECTED
            if is_expected and m[entry + ENTRY_ORIGIN] == place_of(m[rank + TIERS], peer, tier):
                _expect_no_more(s, rank, entry)
            place += PLACE_COLUMNS
        slot = m[slot + SLOT_AFTER]


def _expect_no_more(s: State, rank: int, entry: int) -> None:
    """Read what was expected of another rank from the source. A promise that was not kept in time is none any more."""
    m = s.ints
    copy = _copy_in(s, rank, m[entry + ENTRY_ORIGIN], m[entry + ENTRY_SAMPLE])
    if _is_promised(s, copy):
        s.copies[copy, COPY_STATE] -= KEEPS
    m[rank + EXPECTED_ENTRIES] -= 1
    m[entry + ENTRY_ORIGIN] = SOURCE
    _queue(s, rank, entry)


def heard(s: State, peer: int, now: float) -> None:
    """Take note that another rank has announced something: what it has promised is expected of it."""
    s.floats[peer] = now


def silenced(s: State, rank: int, peer: int) -> None:
    """Expect nothing of another rank until it is heard of: what waits for it is read from the source.

    That is promised no more. Its other promises stand, and count again once it is heard of.
    """
    s.floats[peer] = UNKNOWN
    for tier in range(1, s.ints[rank + TIERS] + 1):
        withdrawn(s, rank, peer, tier)


def late(s: State, rank: int, now: float) -> None:
    """Take note that the training has waited for the earliest batch for `patience_seconds` or longer.

    A rank of which the batch expects samples is waited for as long as it announces any: it reads them in an order of
    its own. So one that is behind keeps what it promised, and one that is stopped or dead costs one wait. What goes
    from reader to reader is read from the source now, and so is what was promised to a disk, which may have been too
    slow to take it. A rank may announce others and never these, too: waits in vain are bounded in all.
    """
    m, f = s.ints, s.floats
    slot = m[rank + FIRST_SLOT]
    if slot < 0:
        return
    waited = now - f[m[rank + PACE] + ASKED_AT]
    longest = UNKNOWN if m[rank + HANDS_ON] != 0 else max(SILENT_SECONDS, patience_seconds(s, rank))
    is_enough = waited >= VAIN_SECONDS - f[m[rank + PACE] + IN_VAIN]
    was_in_vain = False
    place = m[slot + SLOT_PLACES]
    for _ in range(m[slot + SLOT_SIZE]):
        entry = m[place + PLACE_ENTRY]
        if m[place + PLACE_STATE] == WAITING and m[entry + ENTRY_STATE] == EXPECTED:
            if m[rank + HANDS_ON] != 0:
                m[entry + ENTRY_ORIGIN] = SOURCE
                _queue(s, rank, entry)
            else:
                origin, tiers = m[entry + ENTRY_ORIGIN], m[rank + TIERS]
                peer = peer_of(tiers, origin)
                is_silent = f[peer] == UNKNOWN or now - f[peer] >= longest
                is_on_disk = m[_row(m, rank, tier_of(tiers, origin)) + MOST_IN_FLIGHT] != ANY_NUMBER
                if is_enough or (is_silent and (is_on_disk or waited >= longest)):
                    silenced(s, rank, peer)
                    was_in_vain = True
                elif is_on_disk:
                    _expect_no_more(s, rank, entry)
        place += PLACE_COLUMNS
    if was_in_vain:
        f[m[rank + PACE] + IN_VAIN] += waited


def loaded(s: State, rank: int, slot: int, count: int, seconds: float) -> None:
    """Take note that a Load of the places in the group is over after `seconds`; MARK tells what became of each."""
    m = s.ints
    _end_load(s, rank, slot, count, seconds)
    is_again = False  # a Load that is all of a batch, and lacks what a tier could not give
    for k in range(count):
        is_lost = m[m[rank + MARKS] + k] == UNREAD and m[m[m[rank + GROUP] + k] + PLACE_ORIGIN] > STAGING
        is_again = is_again or (m[rank + LOADS_ALL] != 0 and is_lost)
    for k in range(count):
        _place_loaded(s, rank, slot, m[m[rank + GROUP] + k], m[m[rank + MARKS] + k], is_again)
    if m[slot + SLOT_MISSING] == 0:
        _end_slot(s, rank, slot)


def loaded_run(s: State, rank: int, slot: int, row: int, count: int, seconds: float) -> None:
    """Take note that a Load of so many rows from one on is over after `seconds`, and all of them are there."""
    m = s.ints
    _end_load(s, rank, slot, count, seconds)
    place = m[slot + SLOT_PLACES] + row * PLACE_COLUMNS
    for _ in range(count):
        _place_loaded(s, rank, slot, place, OK, False)
        place += PLACE_COLUMNS
    if m[slot + SLOT_MISSING] == 0:
        _end_slot(s, rank, slot)


def _end_load(s: State, rank: int, slot: int, count: int, seconds: float) -> None:
    s.ints[rank + LOADS] -= 1
    learn_load_size(s, rank, count, seconds)
    s.ints[slot + SLOT_RUNNING] -= count


def _place_loaded(s: State, rank: int, slot: int, place: int, mark: int, is_again: bool) -> None:
    """Take note of what became of one place of a Load. is_again: the Load is made again, all from the source."""
    m = s.ints
    entry, origin = m[place + PLACE_ENTRY], m[place + PLACE_ORIGIN]
    if mark == UNREAD and origin == SOURCE:
        m[rank + PROBES_LEFT] = 0  # it tells nothing
    if entry >= 0:
        if origin == STAGING:
            _let_go(s, rank, entry)
        elif mark == UNREAD:
            _fail(s, rank, entry)
        else:
            _settle(s, rank, entry)
    m[place + PLACE_ENTRY] = -1
    if m[rank + DROPS] != 0:
        _drop_before(s, rank, m[place + PLACE_SAMPLE], m[slot + SLOT_NUMBER] + 1)
    is_to_route = False
    if mark == UNREAD and origin > STAGING:
        _lose(s, rank, origin, m[place + PLACE_SAMPLE])
        is_to_route = m[slot + SLOT_ABANDONED] == 0
    if is_again and m[slot + SLOT_ABANDONED] == 0:
        _offer(s, rank, place, SOURCE, -1)
    elif is_to_route:
        _route(s, rank, place, True)
    else:
        _end_place(s, rank, slot, place, DONE if mark == OK else FAILED)


def learn_load_size(s: State, rank: int, count: int, seconds: float) -> None:
    m, f = s.ints, s.floats
    # Of a clock that is coarse; and 0 is not known.
    each, usual = max(seconds / count, 1e-9), f[m[rank + PACE] + SAMPLE_SECONDS]
    # The fastest lately: others may only have waited for a processor.
    f[m[rank + PACE] + SAMPLE_SECONDS] = each if usual == 0.0 else min(each, SLOWER * usual)
    if m[rank + TRIALS] < 0 or count != m[rank + TRIED_SIZE]:
        return
    f[m[rank + PACE] + TRIAL_SECONDS + m[rank + TRIALS]] = each
    m[rank + TRIALS] += 1
    if m[rank + TRIALS] < TRIED_LOADS:
        return
    first, second, third = (
        f[m[rank + PACE] + TRIAL_SECONDS],
        f[m[rank + PACE] + TRIAL_SECONDS + 1],
        f[m[rank + PACE] + TRIAL_SECONDS + 2],
    )
    median = max(min(first, second), min(max(first, second), third))
    if median <= WORTH_DOUBLING * f[m[rank + PACE] + HALF_SECONDS]:
        f[m[rank + PACE] + HALF_SECONDS] = median
        m[rank + TRIED_SIZE] *= 2
        m[rank + TRIALS] = 0
    else:
        m[rank + TRIED_SIZE] //= 2
        m[rank + TRIALS] = -1


def abandon(s: State, rank: int, slot: int) -> None:
    """Give up a batch that is incomplete. Its slot ends once its running places have."""
    m = s.ints
    m[rank + PROBES_LEFT] = 0  # the probe may be among what is given up
    m[slot + SLOT_ABANDONED] = 1
    m[rank + DECODABLE_PLACES] -= m[slot + SLOT_DECODABLE]
    m[slot + SLOT_DECODABLE] = 0
    m[slot + SLOT_FIRST] = -1
    m[slot + SLOT_LAST] = -1
    begin = m[slot + SLOT_PLACES]
    end = begin + m[slot + SLOT_SIZE] * PLACE_COLUMNS
    # None of its places may wait when a sample that its worker should have read is passed on to who waits for it.
    for place in range(begin, end, PLACE_COLUMNS):
        if m[place + PLACE_STATE] == WAITING:
            entry = m[place + PLACE_ENTRY]
            _unlink_waiter(s, rank, entry, place)
            _end_place(s, rank, slot, place, DONE)
            if m[entry + ENTRY_STATE] == QUEUED:
                _want_less(s, rank, entry)
            elif (
                m[entry + ENTRY_STATE] == EXPECTED and m[rank + HANDS_ON] == 0 and m[entry + ENTRY_FIRST] < 0
            ):
                m[rank + EXPECTED_ENTRIES] -= 1
                _forget(s, rank, entry)
            m[place + PLACE_ENTRY] = -1
    for place in range(begin, end, PLACE_COLUMNS):
        if m[place + PLACE_STATE] == DECODABLE:
            entry = m[place + PLACE_ENTRY]
            _end_place(s, rank, slot, place, DONE)
            m[place + PLACE_ENTRY] = -1
            if entry >= 0 and m[place + PLACE_ORIGIN] == STAGING:
                _let_go(s, rank, entry)
            elif entry >= 0:
                _pass_on(s, rank, entry)
    if m[slot + SLOT_MISSING] == 0:
        _end_slot(s, rank, slot)


def observe_worker(s: State, rank: int, origin: int, count: int, seconds: float) -> None:
    """Learn that a worker waited for `count` samples that it read from there by itself, `seconds` in all.

    The shortest of late: a longer one may have been a wait for the interpreter's lock.
    What workers should read from now on is theirs, and what they should not is the readers'.
    """
    m, f = s.ints, s.floats
    was_quick = reads_by_itself(s, rank, origin)
    known, each = f[m[_row(m, rank, origin) + COSTS] + WORKER_SECONDS], seconds / count
    slower = max(OWN_SLOWER * known + HAND_OVER_SECONDS / MEMORY, SURE_SHARE * seconds)
    f[m[_row(m, rank, origin) + COSTS] + WORKER_SECONDS] = min(each, slower)
    is_quick = reads_by_itself(s, rank, origin)
    if HAND_OVER_SECONDS <= each < TRIED_AGAIN_SECONDS:
        m[_row(m, rank, origin) + PROBE] = 1
    if is_quick and not was_quick:
        _hand_to_workers(s, rank, origin, m[rank + QUEUED_ENTRIES])
    elif was_quick and not is_quick:
        _hand_to_readers(s, rank, origin)
    if origin == SOURCE and m[rank + PROBES_LEFT] > 0:
        m[rank + PROBES_LEFT] -= 1
        is_slow = f[m[_row(m, rank, origin) + COSTS] + WORKER_SECONDS] >= TRIED_AGAIN_SECONDS
        if is_quick or is_slow or _hand_to_workers(s, rank, SOURCE, 1) == 0:
            m[rank + PROBES_LEFT] = 0


# -- From where ----------------------------------------------------------------------------------------------


def expected_seconds(s: State, rank: int, origin: int, nbytes: int) -> float:
    """Return how long one more read from there would take by now, what is queued before it included.

    Source: thesis, equations 3.5 to 3.7, for `rate`; what shares a place is served together.
    """
    m, f = s.ints, s.floats
    row = _row(m, rank, origin)
    cost = m[row + COSTS]
    if reads_by_itself(s, rank, origin):
        own: float = f[cost + WORKER_SECONDS]
        return own
    return _reader_seconds(s, rank, origin, nbytes)


def _reader_seconds(s: State, rank: int, origin: int, nbytes: int) -> float:
    """Return the same where a reader reads."""
    m, f = s.ints, s.floats
    row = _row(m, rank, origin)
    cost = m[row + COSTS]
    reads = min(m[row + IN_FLIGHT] + 1, _most_reads(m, rank, row))
    wire = (m[row + BACKLOG] + nbytes) / f[cost + RATES + reads]
    return _corrected(f, cost, f[cost + LATENCY] + wire)


def patience_seconds(s: State, rank: int) -> float:
    """Return how long the training waits at least for samples that others have promised to read.

    As long as the source takes for one, or a hand-over does if that is longer: what is read by then was not heard of
    sooner. So a source that workers read by themselves is read once for all, too. Where ranks read for others, all
    may wait for the source: twice as long as half of the readers, those for fills, take for a batch.
    """
    m, f = s.ints, s.floats
    nbytes = m[rank + SAMPLE_BYTES]
    handed_over = HEARD_SECONDS + _reader_seconds(s, rank, place_of(m[rank + TIERS], 0, 1), nbytes)
    row = _row(m, rank, SOURCE)
    cost, reads = m[row + COSTS], max(1, _most_reads(m, rank, row))
    each = f[cost + LATENCY] / reads + nbytes / f[cost + RATES + reads]
    of_batch = _corrected(f, cost, 4 * m[rank + READS_FOR_OTHERS] * each)
    return max(_reader_seconds(s, rank, SOURCE, nbytes) + of_batch, handed_over)


def _busy_seconds(s: State, rank: int, origin: int, nbytes: int) -> float:
    """Return what one read adds to the time of a place that all readers read from: how fast it is, whatever is queued.

    Of a tier by its fastest reads of late: others may have waited for a processor, which takes as long for any place.
    But by none that took less than modelled: how many others there were at its end says little of its begin.
    """
    m, f = s.ints, s.floats
    if reads_by_itself(s, rank, origin):
        return expected_seconds(s, rank, origin, nbytes)
    row = _row(m, rank, origin)
    cost, reads = m[row + COSTS], _most_reads(m, rank, row)
    seconds = f[cost + LATENCY] / reads + nbytes / f[cost + RATES + reads]
    if origin == SOURCE:
        return _corrected(f, cost, seconds)
    fastest: float = seconds * f[cost + LEAST_CORRECTION]
    return fastest


def _corrected(f: Floats, cost: int, seconds: float) -> float:
    factor: float = f[cost + CORRECTION]
    return seconds if factor == 0.0 else seconds * factor


def reads_by_itself(s: State, rank: int, origin: int) -> bool:
    """Return whether a worker that needs a sample from there reads it without a reader thread."""
    m, f = s.ints, s.floats
    row = _row(m, rank, origin)
    is_quick: bool = f[m[row + COSTS] + WORKER_SECONDS] < HAND_OVER_SECONDS
    return is_quick or m[rank + READERS] == 0 or m[row + IS_FORM] != 0


def is_in_form(s: State, rank: int, origin: int) -> bool:
    """Return whether what an origin has is made by workers."""
    found: bool = s.ints[_row(s.ints, rank, origin) + IS_FORM] != 0
    return found


def _row(m: Ints, rank: int, origin: int) -> int:
    """Return the row of an origin."""
    tiers = m[rank + TIERS]
    if origin > tiers:
        origin = tiers + tier_of(tiers, origin)
    row: int = m[rank + ROWS] + (origin + 1) * ROW_COLUMNS
    return row


def _most_reads(m: Ints, rank: int, row: int) -> int:
    """Return how many moves there may be at once from the place of a row."""
    most: int = min(m[rank + READERS], m[row + MOST_IN_FLIGHT])
    return most


def _is_busy(m: Ints, rank: int, origin: int) -> bool:
    """Return whether as many moves are under way from a place as it takes."""
    row = _row(m, rank, origin)
    is_busy: bool = m[row + IN_FLIGHT] >= m[row + MOST_IN_FLIGHT]
    return is_busy


def place_of(tiers: int, peer: int, tier: int) -> int:
    """Return what a tier of another rank is known as."""
    return (peer + 1) * tiers + tier


def peer_of(tiers: int, place: int) -> int:
    """Return whose tier a place is that `place_of` returned."""
    return (place - 1) // tiers - 1


def tier_of(tiers: int, place: int) -> int:
    """Return which of its tiers that is."""
    return (place - 1) % tiers + 1


def own_copy(s: State, rank: int, sample: int) -> int:
    """Return the copy of a sample that a rank's tier keeps or shall keep, -1 where none does."""
    return _copy_in(s, rank, STAGING, sample)


def _copy_in(s: State, rank: int, place: int, sample: int) -> int:
    """Return the copy of a sample that is for a place, of another rank or one of this rank's; -1 where none is."""
    number, tiers = s.ints[rank + RANK], s.ints[rank + TIERS]
    if place > tiers:
        number = peer_of(tiers, place)
    copy = _first_copy(s, sample, number)
    is_there = copy < s.copy_begin[sample + 1] and s.copies[copy, COPY_RANK] == number
    return copy if is_there else -1


def _first_copy(s: State, sample: int, number: int) -> int:
    """Return the first copy of a sample by rank that is not of a lower rank than this one."""
    begin, end = s.copy_begin[sample], s.copy_begin[sample + 1]
    while begin < end:
        middle = (begin + end) // 2
        if s.copies[middle, COPY_RANK] < number:
            begin = middle + 1
        else:
            end = middle
    first: int = begin
    return first


def _route(s: State, rank: int, place: int, is_second_choice: bool) -> None:
    """Decide where a place gets its bytes from: of what holds the sample, what is expected to bring it first."""
    m = s.ints
    sample = m[place + PLACE_SAMPLE]
    entry = find(s, rank, sample)
    if entry > 0:
        if m[rank + HANDS_ON] != 0:
            _change_heir(s, rank, entry, m[place + PLACE_HEIR])
        if m[entry + ENTRY_STATE] == HERE:
            m[entry + ENTRY_HOLDERS] += 1
            _offer(s, rank, place, STAGING, entry)
        elif _cannot_wait(s, rank, place, entry):
            _offer(s, rank, place, m[entry + ENTRY_ORIGIN], -1)
        elif m[rank + LOADS_ALL] != 0 and m[m[place + PLACE_SLOT] + SLOT_NUMBER] < m[entry + ENTRY_BATCH]:
            _wait_before_others(s, rank, place, entry)
        else:
            _wait(s, rank, place, entry)
        return
    copy = own_copy(s, rank, sample)
    if m[rank + FORM_EPOCHS] > 0 and copy >= 0:
        _expire(s, rank, copy, sample, m[m[place + PLACE_SLOT] + SLOT_EPOCH])
    is_expected = False
    if m[rank + HANDS_ON] == 0:
        origin = _best_origin(s, rank, sample, copy)
        heir = STAGING
        if m[rank + HAS_HEIRS] != 0 and origin == SOURCE:
            heir = _due_elsewhere(s, rank, sample)
        if m[rank + READS_PEERS] != 0 and origin == SOURCE and not is_second_choice:
            origin = _promised_elsewhere(s, rank, sample)
            is_expected = origin != SOURCE
    else:
        origin, heir = m[place + PLACE_HIT], m[place + PLACE_HEIR]
        if is_second_choice:
            origin = SOURCE
        is_expected = origin != SOURCE and (copy < 0 or s.copies[copy, COPY_STATE] != PRESENT)
        if origin != SOURCE and not is_expected:
            s.copies[copy, COPY_STATE] = GONE  # after this read
    number = m[m[place + PLACE_SLOT] + SLOT_NUMBER]
    is_wanted = copy >= 0 and (_is_absent(s, copy) or s.copies[copy, COPY_STATE] == DUE)
    if is_wanted and m[rank + DROPS] != 0:
        is_wanted = not _drop_before(s, rank, sample, number + 1)
    by_worker = reads_by_itself(s, rank, origin) or is_second_choice
    if heir != STAGING or is_expected:
        by_worker = False
    elif m[_row(m, rank, origin) + PROBE] != 0:
        m[_row(m, rank, origin) + PROBE] = 0
        by_worker = True
    if by_worker and not is_wanted:
        _offer(s, rank, place, origin, -1)
        return
    entry = _new_entry(s, rank, sample)
    m[entry + ENTRY_ORIGIN] = origin
    m[entry + ENTRY_HEIR] = heir
    m[entry + ENTRY_BATCH] = number
    if is_wanted:
        m[entry + ENTRY_REST] = s.copies[copy, COPY_TIER]
        _take_up(s, copy)
    if by_worker:
        m[entry + ENTRY_STATE] = WITH_WORKER
        _offer(s, rank, place, origin, entry)
        return
    _wait(s, rank, place, entry)
    if is_expected:
        m[entry + ENTRY_STATE] = EXPECTED
        if m[rank + HANDS_ON] == 0:
            m[rank + EXPECTED_ENTRIES] += 1
    else:
        _queue(s, rank, entry)


def _cannot_wait(s: State, rank: int, place: int, entry: int) -> bool:
    """Return whether a worker reads an entry in the Load that a place is to be in, or in a later batch's.

    Where Loads are whole batches, the place would wait for itself, or for what waits for it.
    """
    m = s.ints
    is_whole = m[rank + LOADS_ALL] != 0 and m[entry + ENTRY_STATE] == WITH_WORKER
    cannot: bool = is_whole and m[entry + ENTRY_BATCH] >= m[m[place + PLACE_SLOT] + SLOT_NUMBER]
    return cannot


def _wait_before_others(s: State, rank: int, place: int, entry: int) -> None:
    """A place that a worker should have read waits for what a later batch has asked for, which is due for this one."""
    m = s.ints
    _wait_first(s, rank, place, entry)
    m[entry + ENTRY_BATCH] = m[m[place + PLACE_SLOT] + SLOT_NUMBER]
    if m[entry + ENTRY_STATE] == QUEUED:
        _unqueue(s, rank, entry)
        _line_up(s, rank, entry)


def epochs_left(epochs: int, epoch: int, sample: int) -> int:
    """Return for how many epochs after this one what tier 1 has of a sample lasts, where it lasts for so many."""
    return epochs - 1 - (epoch + sample) % epochs


def _expire(s: State, rank: int, copy: int, sample: int, epoch: int) -> None:
    """What tier 1 had of a sample is used up in the epoch in which it is to be read anew."""
    epochs = s.ints[rank + FORM_EPOCHS]
    is_over = epochs_left(epochs, epoch, sample) == epochs - 1
    if is_over and s.copies[copy, COPY_STATE] == PRESENT and s.copies[copy, COPY_TIER] == 1:
        s.copies[copy, COPY_STATE] = ABSENT


def _best_origin(s: State, rank: int, sample: int, copy: int) -> int:
    """Return what is expected to bring a sample first: the source, a tier, another rank's. copy: this rank's, or -1."""
    m = s.ints
    begin, end = s.copy_begin[sample], s.copy_begin[sample + 1]
    if begin == end:
        return SOURCE
    own = _tier_with(s, copy) if copy >= 0 else SOURCE
    # What a worker computes for its own reads is not seen, and it is the least for a tier.
    if own != SOURCE and reads_by_itself(s, rank, own):
        return own
    nbytes, origin = s.sizes[sample], SOURCE
    # Where it is read only once the training asks, a tier that has the sample does better.
    least = expected_seconds(s, rank, SOURCE, nbytes) if m[rank + STAGES_UNTIL] == ALWAYS else UNKNOWN
    if own != SOURCE:
        seconds = expected_seconds(s, rank, own, nbytes)
        # Batches are staged far ahead, so that a queue at the tier holds up nobody unless the tier is the slower one.
        if seconds <= least or _busy_seconds(s, rank, own, nbytes) <= _busy_seconds(s, rank, SOURCE, nbytes):
            origin, least = own, seconds
    is_preferred = m[rank + READS_PEERS] == RATHER
    if m[rank + READS_PEERS] == 0 or (reads_by_itself(s, rank, SOURCE) and not is_preferred):
        return origin
    # Each rank begins behind itself, so that not all of them ask the same one.
    number, other = m[rank + RANK], _first_copy(s, sample, m[rank + RANK] + 1)
    for _ in range(min(end - begin, MOST_HOLDERS)):
        if other == end:
            other = begin
        peer = s.copies[other, COPY_RANK]
        tier = _tier_with(s, other)
        if peer != number and tier != SOURCE:
            place = place_of(m[rank + TIERS], peer, tier)
            by_then = expected_seconds(s, rank, place, nbytes)
            if by_then < least or (is_preferred and origin == SOURCE):
                origin, least = place, by_then
        other += 1
    return origin


def _tier_with(s: State, copy: int) -> int:
    """Return which tier of a copy's rank has the sample, SOURCE for none."""
    state: int = s.copies[copy, COPY_STATE]
    if state > LEFT:
        return state - LEFT
    tier: int = s.copies[copy, COPY_TIER] if state == PRESENT else SOURCE
    return tier


def _promised_elsewhere(s: State, rank: int, sample: int) -> int:
    """Return which place of another rank is to get a sample before this rank needs it, SOURCE for none."""
    m = s.ints
    for copy in range(s.copy_begin[sample], s.copy_begin[sample + 1]):
        peer = s.copies[copy, COPY_RANK]
        if _is_promised(s, copy) and peer != m[rank + RANK] and s.floats[peer] != UNKNOWN:
            return place_of(m[rank + TIERS], peer, s.copies[copy, COPY_TIER])
    return SOURCE


def _due_elsewhere(s: State, rank: int, sample: int) -> int:
    """Return which place of another rank a sample is handed to by who reads it first, STAGING for none."""
    m = s.ints
    if reads_by_itself(s, rank, SOURCE) and m[rank + READS_PEERS] != RATHER:
        return STAGING
    for copy in range(s.copy_begin[sample], s.copy_begin[sample + 1]):
        if s.copies[copy, COPY_STATE] == DUE and s.copies[copy, COPY_RANK] != m[rank + RANK]:
            return place_of(m[rank + TIERS], s.copies[copy, COPY_RANK], s.copies[copy, COPY_TIER])
    return STAGING


def _hand_to_workers(s: State, rank: int, origin: int, most: int) -> int:
    """Let workers read by themselves what is queued to be moved from there, the first `most`; return how many."""
    m = s.ints
    entry, count = m[rank + FIRST_URGENT], 0
    while entry >= 0 and count < most:
        following = m[entry + ENTRY_AFTER]
        if m[entry + ENTRY_ORIGIN] == origin and m[entry + ENTRY_HEIR] == STAGING:
            count += 1
            _unqueue(s, rank, entry)
            m[_row(m, rank, origin) + BACKLOG] -= s.sizes[m[entry + ENTRY_SAMPLE]]
            if m[entry + ENTRY_REST] == STAGING:
                place = m[entry + ENTRY_FIRST]
                while place >= 0:
                    after = m[place + PLACE_NEXT]
                    _offer(s, rank, place, origin, -1)
                    place = after
                _forget(s, rank, entry)
            else:
                m[entry + ENTRY_STATE] = WITH_WORKER
                _pass_on(s, rank, entry)
        entry = following
    return count


def _hand_to_readers(s: State, rank: int, origin: int) -> None:
    """Have readers move what workers would read from there by themselves, and have not begun to."""
    m = s.ints
    slot = m[rank + FIRST_SLOT]
    while slot >= 0:
        place = m[slot + SLOT_FIRST]
        m[rank + DECODABLE_PLACES] -= m[slot + SLOT_DECODABLE]
        m[slot + SLOT_DECODABLE] = 0
        m[slot + SLOT_FIRST] = -1
        m[slot + SLOT_LAST] = -1
        while place >= 0:
            following, entry = m[place + PLACE_NEXT], m[place + PLACE_ENTRY]
            if m[place + PLACE_ORIGIN] != origin:
                _offer(s, rank, place, m[place + PLACE_ORIGIN], entry)
            elif entry < 0:
                _route(s, rank, place, False)
            else:
                _wait_first(s, rank, place, entry)
                m[entry + ENTRY_BATCH] = m[slot + SLOT_NUMBER]
                _queue(s, rank, entry)
            place = following
        slot = m[slot + SLOT_AFTER]


# -- Moves ---------------------------------------------------------------------------------------------------


def _next_gift(s: State, rank: int) -> int:
    """What another rank is to get, on at most as many readers as fills."""
    m = s.ints
    if m[rank + GIFTS] >= m[rank + FILL_LIMIT]:
        return 0
    entry = m[rank + FIRST_GIFT]
    heir = m[entry + ENTRY_HEIR]
    most = min(_group_size(s, rank, heir, m[entry + ENTRY_SAMPLE]), m[rank + GROUP_SIZE])
    count = 0
    while count < most and entry >= 0 and m[entry + ENTRY_HEIR] == heir:
        _unlink(m, rank, entry, ENTRY_BEFORE, FIRST_GIFT)
        m[m[rank + GROUP] + count] = entry
        count += 1
        entry = m[rank + FIRST_GIFT]
    m[rank + GIFTS] += 1
    return count


def _given(s: State, rank: int, count: int) -> None:
    """Another rank has the entries in the group, or those of MARK OK."""
    m = s.ints
    m[rank + MOVES] -= 1
    m[rank + GIFTS] -= 1
    m[_row(m, rank, STAGING) + IN_FLIGHT] -= 1
    for k in range(count):
        entry = m[m[rank + GROUP] + k]
        copy = _copy_in(s, rank, m[entry + ENTRY_HEIR], m[entry + ENTRY_SAMPLE])
        if copy >= 0:
            s.copies[copy, COPY_STATE] = PRESENT if m[m[rank + MARKS] + k] == OK else DUE
        m[rank + GIFTS_LEFT] -= 1
        m[rank + GIFT_BYTES] -= s.sizes[m[entry + ENTRY_SAMPLE]]
        _let_go(s, rank, entry)


def _movable(s: State, rank: int) -> int:
    """Return how many entries of the urgent queue are read from places that are not busy."""
    m = s.ints
    count: int = m[rank + QUEUED_ENTRIES]
    for tier in range(1, m[rank + TIERS] + 1):
        if _is_busy(m, rank, tier):
            count -= m[_row(m, rank, tier) + IN_QUEUE]
    return count


def _first_urgent(s: State, rank: int) -> int:
    """Return the first entry of the urgent queue that may be read by now, -1 where none is."""
    m = s.ints
    entry: int = m[rank + FIRST_URGENT]
    while entry >= 0:
        origin = m[entry + ENTRY_ORIGIN]
        is_later = origin == SOURCE and m[entry + ENTRY_BATCH] > m[rank + STAGES_UNTIL]
        if not is_later and not _is_busy(m, rank, origin):
            if m[rank + READS_PEERS] == 0:
                return entry
            _choose_again(s, rank, entry)
            if not _is_busy(m, rank, m[entry + ENTRY_ORIGIN]):
                return entry
        entry = m[entry + ENTRY_AFTER]
    return entry


def _choose_again(s: State, rank: int, entry: int) -> None:
    """Another rank may have got a sample since it was queued."""
    m = s.ints
    sample, known = m[entry + ENTRY_SAMPLE], m[entry + ENTRY_ORIGIN]
    origin = _best_origin(s, rank, sample, own_copy(s, rank, sample))
    m[entry + ENTRY_ORIGIN] = origin
    m[_row(m, rank, known) + BACKLOG] -= s.sizes[sample]
    m[_row(m, rank, known) + IN_QUEUE] -= 1
    m[_row(m, rank, origin) + BACKLOG] += s.sizes[sample]
    m[_row(m, rank, origin) + IN_QUEUE] += 1


def _next_urgent(s: State, rank: int) -> int:
    m = s.ints
    entry = _first_urgent(s, rank)
    if entry < 0:
        return 0
    origin = m[entry + ENTRY_ORIGIN]
    most = _group_size(s, rank, origin, m[entry + ENTRY_SAMPLE])
    # So that all readers have some: those that the place takes, of what is read from there, or all.
    row = _row(m, rank, origin)
    queued, idle = m[rank + QUEUED_ENTRIES], m[rank + READERS] - m[rank + MOVES]
    if m[row + MOST_IN_FLIGHT] != ANY_NUMBER:
        queued, idle = m[row + IN_QUEUE], min(idle, m[row + MOST_IN_FLIGHT] - m[row + IN_FLIGHT])
    most = min(most, (queued + idle - 1) // idle)
    if origin == SOURCE:
        most = max(most, m[rank + SOURCE_TOGETHER])
    count, reads, epoch = 0, 0, _epoch_of(m, entry)
    while reads < most and count < m[rank + GROUP_SIZE] and entry >= 0 and m[entry + ENTRY_ORIGIN] == origin:
        sample = m[entry + ENTRY_SAMPLE]
        # What makes samples of what the source has may draw: it is told of one epoch.
        if not _may_begin(s, rank, entry) or (origin == SOURCE and _epoch_of(m, entry) != epoch):
            break
        _begin_move(s, rank, entry, count)
        count += 1
        reads += 1
        if origin == SOURCE and s.extents.shape[0] > 0:
            count = _with_neighbours(s, rank, sample, epoch, count)
        entry = _first_urgent(s, rank)
    if origin > m[rank + TIERS] and m[rank + READS_PEERS] == RATHER:
        count = _with_others_from(s, rank, origin, most, count)
    return count


def _epoch_of(m: Ints, entry: int) -> int:
    """Return for which epoch an entry of the urgent queue is wanted first."""
    epoch: int = m[m[m[entry + ENTRY_FIRST] + PLACE_SLOT] + SLOT_EPOCH]
    return epoch


def _with_others_from(s: State, rank: int, origin: int, most: int, count: int) -> int:
    """Take what is queued soon after, to be read from the same place of another rank, into its group of `count`."""
    m = s.ints
    entry, left = m[rank + FIRST_URGENT], WINDOW
    while entry >= 0 and left > 0 and count < min(most, m[rank + GROUP_SIZE]):
        following = m[entry + ENTRY_AFTER]
        if m[entry + ENTRY_ORIGIN] == origin and _may_begin(s, rank, entry):
            _begin_move(s, rank, entry, count)
            count += 1
        entry = following
        left -= 1
    return count


def _begin_move(s: State, rank: int, entry: int, index: int) -> None:
    """Take an entry out of the urgent queue into the group."""
    m = s.ints
    _unqueue(s, rank, entry)
    m[entry + ENTRY_STATE] = MOVING
    m[m[rank + GROUP] + index] = entry
    m[rank + PASSING] += s.sizes[m[entry + ENTRY_SAMPLE]]


def _with_neighbours(s: State, rank: int, sample: int, epoch: int, count: int) -> int:
    """Take what is queued soon after a sample for its epoch, and lies near it, into its read.

    Returns: how many the group has then.
    """
    m = s.ints
    unit, begin, end = extent_of(s, sample)
    least, most = _may_be_near(s, rank, sample, begin, end)
    before = -1
    while before < count and unit >= 0:
        before = count
        entry, left = m[rank + FIRST_URGENT], WINDOW
        while entry >= 0 and left > 0 and count < m[rank + GROUP_SIZE]:
            following, near = m[entry + ENTRY_AFTER], m[entry + ENTRY_SAMPLE]
            if (
                least <= near <= most
                and m[entry + ENTRY_ORIGIN] == SOURCE
                and _epoch_of(m, entry) == epoch
                and is_near(s, rank, near, unit, begin, end)
                and _may_begin(s, rank, entry)
            ):
                _begin_move(s, rank, entry, count)
                count += 1
                _, its_begin, its_end = extent_of(s, near)
                begin, end = min(begin, its_begin), max(end, its_end)
                least, most = _may_be_near(s, rank, sample, begin, end)
            entry = following
            left -= 1
    return count


def extent_of(s: State, sample: int) -> tuple[int, int, int]:
    """Return unit, begin and end of a sample in the source; unit -1 where that does not tell."""
    if s.extents.shape[0] == 0:
        return -1, 0, 0
    row, offset = sample, 0
    if s.extents.shape[1] == RUNS:
        row = _run_of(s, sample)
        offset = (sample - s.extents[row, FIRST]) * s.extents[row, STEP]
    offset += s.extents[row, OFFSET]
    return s.extents[row, UNIT], offset, offset + s.sizes[sample]


def _run_of(s: State, sample: int) -> int:
    """Return the row of the run that has a sample."""
    row, end = 0, s.extents.shape[0]
    while end - row > 1:
        middle = (row + end) // 2
        if s.extents[middle, FIRST] <= sample:
            row = middle
        else:
            end = middle
    return row


def _may_be_near(s: State, rank: int, sample: int, begin: int, end: int) -> tuple[int, int]:
    """Return the first and the last sample that are looked at for being near `sample`.

    Two comparisons then spare plain Python most of its calls: what is next in line lies all over the unit as a rule.
    Of a unit whose runs lie in the order of their samples, none that is near is left out; of others, some may be, which
    are then read by themselves.
    """
    samples, runs = s.sizes.shape[0], s.extents.shape[0]
    if s.extents.shape[1] != RUNS:
        return 0, samples - 1
    row = _run_of(s, sample)
    is_begun_before = row > 0 and s.extents[row - 1, UNIT] == s.extents[row, UNIT]
    goes_on = row + 1 < runs and s.extents[row + 1, UNIT] == s.extents[row, UNIT]
    first, step = s.extents[row, FIRST], s.extents[row, STEP]
    last = s.extents[row + 1, FIRST] - 1 if row + 1 < runs else samples - 1
    least, most = first, last
    if step > 0:
        # No sample begins before the bytes that one read spans at most, nor behind them and a hole.
        hole = s.ints[rank + HOLE_BYTES]
        least = max(first, first + (end - SPAN_BYTES - s.extents[row, OFFSET]) // step)
        most = min(last, first + (end + hole - s.extents[row, OFFSET]) // step)
    if is_begun_before and least == first:
        least = 0
    if goes_on and most == last:
        most = samples - 1
    return least, most


def is_near(s: State, rank: int, sample: int, unit: int, begin: int, end: int) -> bool:
    """Return whether one read should bring a sample and the bytes [begin, end) of a unit. unit: -1 for none."""
    if unit < 0:
        return False
    its_unit, offset, after = extent_of(s, sample)
    hole = s.ints[rank + HOLE_BYTES]
    if its_unit != unit or offset - end > hole or begin - after > hole:
        return False
    is_short: bool = max(end, after) - min(begin, offset) <= SPAN_BYTES
    return is_short


def _next_fill(s: State, rank: int) -> int:
    """A background fill: none where a worker's own read is as cheap, unless others wait for what is promised.

    Each tier has its share of the readers.
    """
    m = s.ints
    is_own = m[rank + READS_FOR_OTHERS] == 0
    if m[rank + FILLS] >= m[rank + FILL_LIMIT] or (is_own and reads_by_itself(s, rank, SOURCE)):
        return 0
    tiers = m[rank + TIERS]
    unfinished = 0
    for tier in range(1, tiers + 1):
        row = _row(m, rank, tier)
        if m[row + FILL_NEXT] < m[row + FILL_END] or m[row + FILLING] > 0:
            unfinished += 1
    for tier in range(1, tiers + 1):
        row = _row(m, rank, tier)
        share = max(1, m[rank + FILL_LIMIT] // max(1, unfinished))
        if m[row + FILLING] >= share:
            continue
        count, reads, most, origin = 0, 0, 1, SOURCE
        while reads < most and count < m[rank + GROUP_SIZE] and m[row + FILL_NEXT] < m[row + FILL_END]:
            sample = s.fill_samples[m[row + FILL_NEXT]]
            if m[rank + DROPS] != 0:
                _drop_before(s, rank, sample, m[rank + COMING_NUMBER])
            copy = own_copy(s, rank, sample)
            # One that the tier has just lost may be on its way from there yet, for another place.
            if _is_absent(s, copy) and find(s, rank, sample) == 0:
                if not _fits(s, rank, s.sizes[sample]):
                    break
                best = _best_origin(s, rank, sample, copy)
                if _is_busy(m, rank, best):
                    break
                if count == 0:
                    origin = best
                    most = _group_size(s, rank, origin, sample)
                elif best != origin:
                    break
                _begin_fill(s, rank, origin, tier, sample, count)
                count += 1
                reads += 1
                if origin == SOURCE and s.extents.shape[0] > 0:
                    count = _with_later_fills(s, rank, tier, sample, count)
            m[row + FILL_NEXT] += 1
        if count:
            m[row + FILLING] += 1
            m[rank + FILLS] += 1
            return count
    return _next_spare(s, rank) if m[rank + DROPS] != 0 else 0


def _next_spare(s: State, rank: int) -> int:
    """The next spare that the rank still reads, once a tier has space for it."""
    m = s.ints
    spares = _row(m, rank, STAGING)
    while m[spares + FILL_NEXT] < m[spares + FILL_END]:
        sample = s.fill_samples[m[spares + FILL_NEXT]]
        copy, nbytes = own_copy(s, rank, sample), s.sizes[sample]
        if s.copy_last[copy] >= m[rank + COMING_NUMBER] and find(s, rank, sample) == 0:
            for tier in range(1, m[rank + TIERS] + 1):
                row = _row(m, rank, tier)
                if m[row + SPACE] >= nbytes and _fits(s, rank, nbytes):
                    m[row + SPACE] -= nbytes
                    m[row + FILLING] += 1
                    m[rank + FILLS] += 1
                    m[spares + FILL_NEXT] += 1
                    s.copies[copy, COPY_TIER] = tier
                    _begin_fill(s, rank, _best_origin(s, rank, sample, -1), tier, sample, 0)
                    return 1
            return 0
        m[spares + FILL_NEXT] += 1
    return 0


def _drop_before(s: State, rank: int, sample: int, number: int) -> bool:
    """Give the space of a sample to spares if no batch from a number on has it. Returns whether that is so."""
    m, copy = s.ints, own_copy(s, rank, sample)
    spares = _row(m, rank, STAGING)
    if copy < 0 or s.copy_last[copy] >= number or m[spares + FILL_NEXT] == m[spares + FILL_END]:
        return False
    if _is_absent(s, copy) or s.copies[copy, COPY_STATE] == PRESENT:
        m[_row(m, rank, s.copies[copy, COPY_TIER]) + SPACE] += s.sizes[sample]
        s.copies[copy, COPY_STATE] = GONE
    return True


def _is_absent(s: State, copy: int) -> bool:
    """Return whether the tier that shall keep a copy has still to get it."""
    state = s.copies[copy, COPY_STATE]
    is_absent: bool = state in (ABSENT, PROMISED) or state > LEFT
    return is_absent


def _is_promised(s: State, copy: int) -> bool:
    """Return whether the rank that shall keep a copy reads it before any other does, and has not got it yet."""
    is_promised: bool = s.copies[copy, COPY_STATE] in (PROMISED, ON_WAY)
    return is_promised


def _take_up(s: State, copy: int) -> None:
    """The tier that shall keep a copy is about to get it, as promised or not."""
    s.copies[copy, COPY_STATE] = ON_WAY if s.copies[copy, COPY_STATE] == PROMISED else PENDING


def is_kept(s: State, rank: int, sample: int) -> bool:
    """Return whether a rank's own tier has a sample."""
    copy = own_copy(s, rank, sample)
    is_here: bool = copy >= 0 and s.copies[copy, COPY_STATE] == PRESENT
    return is_here


def _is_to_be_read(s: State, rank: int, sample: int) -> bool:
    """Return whether a tier has still to get a sample that no other has and that is not on its way."""
    state = s.copies[own_copy(s, rank, sample), COPY_STATE]
    is_so: bool = state in (ABSENT, PROMISED) and find(s, rank, sample) == 0
    return is_so


def _begin_fill(s: State, rank: int, origin: int, tier: int, sample: int, index: int) -> None:
    """Put a new entry for a sample that a tier shall keep into the group."""
    m = s.ints
    entry, nbytes = _new_entry(s, rank, sample), s.sizes[sample]
    m[entry + ENTRY_STATE] = MOVING
    m[entry + ENTRY_ORIGIN] = origin
    m[entry + ENTRY_REST] = tier
    m[entry + ENTRY_BATCH] = -1
    _take_up(s, own_copy(s, rank, sample))
    m[_row(m, rank, origin) + BACKLOG] += nbytes
    m[rank + PASSING] += nbytes
    m[m[rank + GROUP] + index] = entry


def _with_later_fills(s: State, rank: int, tier: int, sample: int, count: int) -> int:
    """As `_with_neighbours`, of what the tier is filled with soon after the sample."""
    m = s.ints
    unit, begin, end = extent_of(s, sample)
    least, most = _may_be_near(s, rank, sample, begin, end)
    row = _row(m, rank, tier)
    first = m[row + FILL_NEXT] + 1
    last = min(first + WINDOW, m[row + FILL_END])
    before = -1
    while before < count and unit >= 0:
        before = count
        for index in range(first, last):
            near = s.fill_samples[index]
            if count == m[rank + GROUP_SIZE] or not _fits(s, rank, s.sizes[near]):
                break
            if (
                least <= near <= most
                and is_near(s, rank, near, unit, begin, end)
                and _is_to_be_read(s, rank, near)
            ):
                _begin_fill(s, rank, SOURCE, tier, near, count)
                count += 1
                _, its_begin, its_end = extent_of(s, near)
                begin, end = min(begin, its_begin), max(end, its_end)
                least, most = _may_be_near(s, rank, sample, begin, end)
    return count


def _group_size(s: State, rank: int, origin: int, sample: int) -> int:
    """Return how many reads like this one take GROUP_SECONDS for one reader, at least 1."""
    m, f = s.ints, s.floats
    row = _row(m, rank, origin)
    cost, reads = m[row + COSTS], max(1, m[row + IN_FLIGHT])
    wire = s.sizes[sample] * reads / f[cost + RATES + reads]
    seconds = _corrected(f, cost, f[cost + LATENCY] + wire)
    most: int = m[rank + GROUP_SIZE]
    return most if seconds * most <= GROUP_SECONDS else max(1, int(GROUP_SECONDS / seconds))


def _may_begin(s: State, rank: int, entry: int) -> bool:
    """Return whether there is space for an entry of the urgent queue.

    Where Loads are whole batches, there always is for the earliest one's: what is here of later ones stays until it is
    complete, and goes only after it.
    """
    m = s.ints
    if m[rank + LOADS_ALL] != 0 and m[m[entry + ENTRY_FIRST] + PLACE_SLOT] == m[rank + FIRST_SLOT]:
        return True
    return _fits(s, rank, s.sizes[m[entry + ENTRY_SAMPLE]])


def _fits(s: State, rank: int, nbytes: int) -> bool:
    m = s.ints
    passing = m[rank + PASSING] - m[rank + GIFT_BYTES]
    is_within: bool = passing == 0 or passing + nbytes <= m[rank + PASSING_LIMIT]
    return is_within


# -- Entries -------------------------------------------------------------------------------------------------


def _settle(s: State, rank: int, entry: int) -> None:
    """The bytes of an entry are here: give them to all places that wait."""
    m = s.ints
    sample, rest, state = (
        m[entry + ENTRY_SAMPLE],
        m[entry + ENTRY_REST],
        m[entry + ENTRY_STATE],
    )
    if rest != STAGING:
        s.copies[own_copy(s, rank, sample), COPY_STATE] = PRESENT
    m[entry + ENTRY_STATE] = HERE
    m[entry + ENTRY_HOLDERS] = 1
    if m[entry + ENTRY_HEIR] != STAGING:
        _hand_on(s, rank, entry)
    place = m[entry + ENTRY_FIRST]
    while place >= 0:
        following = m[place + PLACE_NEXT]
        if state == MOVING:
            m[entry + ENTRY_HOLDERS] += 1
            _offer(s, rank, place, STAGING, entry)
        else:
            _offer(s, rank, place, rest, -1)
        place = following
    m[entry + ENTRY_FIRST] = -1
    m[entry + ENTRY_LAST] = -1
    if state == MOVING and rest != STAGING:
        if m[_row(m, rank, rest) + IS_ELSEWHERE] != 0:
            m[entry + ENTRY_REST] = STAGING
        else:
            m[rank + PASSING] -= s.sizes[sample]  # the tier's memory has it
    _let_go(s, rank, entry)


def _hand_on(s: State, rank: int, entry: int) -> None:
    """An entry has come for whom there is an heir: its own tier, or another rank's, which gets it by and by.

    Where the link is so slow that too much waits to be sent, it is not sent: who reads the sample next hands it over,
    and who expects it reads it from the source.
    """
    m = s.ints
    heir, sample = m[entry + ENTRY_HEIR], m[entry + ENTRY_SAMPLE]
    tiers, nbytes = m[rank + TIERS], s.sizes[sample]
    copy, state = s.copy_begin[sample], PRESENT
    if heir > tiers:
        waiting = m[rank + GIFTS_LEFT]
        has_space = waiting < m[rank + SLOT_COUNT] * m[rank + GROUP_SIZE] and (
            waiting == 0
            or m[rank + HANDS_ON] != 0
            or m[rank + GIFT_BYTES] + nbytes <= m[rank + PASSING_LIMIT] // 2
        )
        state = PENDING if has_space else GONE
    if m[rank + HANDS_ON] != 0:
        s.copies[copy, COPY_RANK] = m[rank + RANK] if heir <= tiers else peer_of(tiers, heir)
        s.copies[copy, COPY_TIER] = heir if heir <= tiers else tier_of(tiers, heir)
    else:
        copy = _copy_in(s, rank, heir, sample)
        if state == GONE or s.copies[copy, COPY_STATE] != DUE:
            return
    s.copies[copy, COPY_STATE] = state
    if state != PENDING:
        return
    m[entry + ENTRY_HOLDERS] += 1
    m[rank + GIFTS_LEFT] += 1
    m[rank + GIFT_BYTES] += nbytes
    _append(m, rank, entry, ENTRY_BEFORE, FIRST_GIFT)
    if m[rank + HANDS_ON] != 0:
        _remove(s, rank, entry)  # whoever needs it next waits until it comes back


def _change_heir(s: State, rank: int, entry: int, heir: int) -> None:
    """A sample is read once more by the rank that was to keep it: who is its heir after that read?"""
    m = s.ints
    m[entry + ENTRY_HEIR] = heir
    if m[entry + ENTRY_STATE] != HERE:
        return
    if heir == STAGING:
        s.copies[s.copy_begin[m[entry + ENTRY_SAMPLE]], COPY_STATE] = GONE
    else:
        _hand_on(s, rank, entry)


def _let_go(s: State, rank: int, entry: int) -> None:
    """One place less needs the bytes of an entry."""
    m = s.ints
    m[entry + ENTRY_HOLDERS] -= 1
    if m[entry + ENTRY_HOLDERS] == 0:
        if m[entry + ENTRY_REST] == STAGING:
            m[rank + PASSING] -= s.sizes[m[entry + ENTRY_SAMPLE]]
        _free_entry(s, rank, entry)


def _fail(s: State, rank: int, entry: int) -> None:
    """The bytes of an entry could not be had. From a tier: try the source. From the source: its places fail."""
    m = s.ints
    sample = m[entry + ENTRY_SAMPLE]
    first, origin = m[entry + ENTRY_FIRST], m[entry + ENTRY_ORIGIN]
    if m[entry + ENTRY_STATE] == MOVING:
        m[rank + PASSING] -= s.sizes[sample]
    _forget(s, rank, entry)
    if origin != SOURCE:
        _lose(s, rank, origin, sample)
    while first >= 0:
        following = m[first + PLACE_NEXT]
        m[first + PLACE_ENTRY] = -1
        if origin != SOURCE:
            _route(s, rank, first, True)
        else:
            slot = m[first + PLACE_SLOT]
            _end_place(s, rank, slot, first, FAILED)
            if m[slot + SLOT_MISSING] == 0:
                _end_slot(s, rank, slot)
        first = following


def _lose(s: State, rank: int, place: int, sample: int) -> None:
    """A place that should have had a sample could not give it. A tier of this rank gets it again from who reads it."""
    copy, m = _copy_in(s, rank, place, sample), s.ints
    if copy >= 0 and (s.copies[copy, COPY_STATE] == PRESENT or s.copies[copy, COPY_STATE] == LEFT + place):
        is_own = place <= m[rank + TIERS] and m[rank + HANDS_ON] == 0
        s.copies[copy, COPY_STATE] = ABSENT if is_own else GONE


def _pass_on(s: State, rank: int, entry: int) -> None:
    """The batch whose worker should have read a sample is given up: let the next place that waits do so."""
    m = s.ints
    place = m[entry + ENTRY_FIRST]
    if place < 0:
        _forget(s, rank, entry)
        return
    m[entry + ENTRY_BATCH] = m[m[place + PLACE_SLOT] + SLOT_NUMBER]
    own = entry
    while place >= 0 and (own >= 0 or _cannot_wait(s, rank, place, entry)):
        following = m[place + PLACE_NEXT]
        _offer(s, rank, place, m[entry + ENTRY_ORIGIN], own)
        place, own = following, -1
    m[entry + ENTRY_FIRST] = place
    if place < 0:
        m[entry + ENTRY_LAST] = -1


def _forget(s: State, rank: int, entry: int) -> None:
    """An entry is over and brought nothing: nobody can wait for it any more."""
    m = s.ints
    if m[entry + ENTRY_REST] != STAGING:
        s.copies[own_copy(s, rank, m[entry + ENTRY_SAMPLE]), COPY_STATE] = ABSENT
    m[entry + ENTRY_HEIR] = STAGING
    _free_entry(s, rank, entry)


def _new_entry(s: State, rank: int, sample: int) -> int:
    m = s.ints
    entry: int = m[rank + FREE_ENTRY]
    m[rank + FREE_ENTRY] = entry + ENTRY_COLUMNS + m[entry + ENTRY_AFTER]
    m[rank + USED_ENTRIES] += 1
    m[entry + ENTRY_SAMPLE] = sample
    m[entry + ENTRY_REST] = STAGING
    m[entry + ENTRY_HEIR] = STAGING
    m[entry + ENTRY_HOLDERS] = 0
    m[entry + ENTRY_FIRST] = -1
    m[entry + ENTRY_LAST] = -1
    insert(s, rank, entry)
    return entry


def _free_entry(s: State, rank: int, entry: int) -> None:
    m = s.ints
    # What is handed on to the next reader is not found any more.
    if m[rank + HANDS_ON] == 0 or find(s, rank, m[entry + ENTRY_SAMPLE]) == entry:
        _remove(s, rank, entry)
    m[m[rank + RELEASED] + m[rank + RELEASED_ENTRIES]] = entry
    m[rank + RELEASED_ENTRIES] += 1
    m[entry + ENTRY_STATE] = 0
    m[entry + ENTRY_AFTER] = m[rank + FREE_ENTRY] - entry - ENTRY_COLUMNS
    m[rank + FREE_ENTRY] = entry
    m[rank + USED_ENTRIES] -= 1


# -- Lists ---------------------------------------------------------------------------------------------------


def _append(m: Ints, rank: int, item: int, before: int, first: int) -> None:
    """Put a row at the end of a list.

    before: the column with the row's neighbour before it; the next column has the one after it. first: the number of
    the rank that is the list's first row; the next number is its last.
    """
    last = m[rank + first + 1]
    m[item + before] = last
    m[item + before + 1] = -1
    if last < 0:
        m[rank + first] = item
    else:
        m[last + before + 1] = item
    m[rank + first + 1] = item


def _unlink(m: Ints, rank: int, item: int, before: int, first: int) -> None:
    """Take a row out of its list; arguments as `_append`."""
    left, right = m[item + before], m[item + before + 1]
    if left < 0:
        m[rank + first] = right
    else:
        m[left + before + 1] = right
    if right < 0:
        m[rank + first + 1] = left
    else:
        m[right + before] = left


def _offer(s: State, rank: int, place: int, origin: int, entry: int) -> None:
    """A place's bytes are at hand, or its worker reads them: put it at the end of its slot's decodable ones."""
    m = s.ints
    slot = m[place + PLACE_SLOT]
    m[place + PLACE_STATE] = DECODABLE
    m[place + PLACE_ORIGIN] = origin
    m[place + PLACE_ENTRY] = entry
    m[place + PLACE_NEXT] = -1
    last = m[slot + SLOT_LAST]
    if last < 0:
        m[slot + SLOT_FIRST] = place
    else:
        m[last + PLACE_NEXT] = place
    m[slot + SLOT_LAST] = place
    m[slot + SLOT_DECODABLE] += 1
    m[rank + DECODABLE_PLACES] += 1


def _offer_all(m: Ints, rank: int, slot: int) -> None:
    """Have workers read all that comes next from the source, for no tier: the places of a slot that has none yet."""
    first, count = m[slot + SLOT_PLACES], m[slot + SLOT_SIZE]
    place = first
    for index in range(count):
        m[place + PLACE_SAMPLE] = m[m[rank + COMING] + index]
        m[place + PLACE_STATE] = DECODABLE
        m[place + PLACE_ORIGIN] = SOURCE
        m[place + PLACE_ENTRY] = -1
        m[place + PLACE_NEXT] = place + PLACE_COLUMNS
        place += PLACE_COLUMNS
    last = place - PLACE_COLUMNS
    m[last + PLACE_NEXT] = -1
    m[slot + SLOT_FIRST] = first
    m[slot + SLOT_LAST] = last
    m[slot + SLOT_DECODABLE] = count
    m[rank + DECODABLE_PLACES] += count


def _wait(s: State, rank: int, place: int, entry: int) -> None:
    m = s.ints
    m[place + PLACE_STATE] = WAITING
    m[place + PLACE_ENTRY] = entry
    m[place + PLACE_NEXT] = -1
    last = m[entry + ENTRY_LAST]
    if last < 0:
        m[entry + ENTRY_FIRST] = place
    else:
        m[last + PLACE_NEXT] = place
    m[entry + ENTRY_LAST] = place


def _wait_first(s: State, rank: int, place: int, entry: int) -> None:
    m = s.ints
    first = m[entry + ENTRY_FIRST]
    _wait(s, rank, place, entry)
    if first >= 0:
        _unlink_waiter(s, rank, entry, place)
        m[place + PLACE_NEXT] = first
        m[entry + ENTRY_FIRST] = place


def _unlink_waiter(s: State, rank: int, entry: int, place: int) -> None:
    m = s.ints
    before, other = -1, m[entry + ENTRY_FIRST]
    while other != place:
        before, other = other, m[other + PLACE_NEXT]
    after = m[place + PLACE_NEXT]
    if before < 0:
        m[entry + ENTRY_FIRST] = after
    else:
        m[before + PLACE_NEXT] = after
    if after < 0:
        m[entry + ENTRY_LAST] = before


def _queue(s: State, rank: int, entry: int) -> None:
    m = s.ints
    m[entry + ENTRY_STATE] = QUEUED
    m[_row(m, rank, m[entry + ENTRY_ORIGIN]) + BACKLOG] += s.sizes[m[entry + ENTRY_SAMPLE]]
    _line_up(s, rank, entry)


def _line_up(s: State, rank: int, entry: int) -> None:
    """Put an entry into the urgent queue, by due time: of the first place that waits for it. Mostly at the end."""
    m = s.ints
    number, place = m[entry + ENTRY_BATCH], m[entry + ENTRY_FIRST]
    m[rank + QUEUED_ENTRIES] += 1
    m[_row(m, rank, m[entry + ENTRY_ORIGIN]) + IN_QUEUE] += 1
    _append(m, rank, entry, ENTRY_BEFORE, FIRST_URGENT)
    before, after = m[entry + ENTRY_BEFORE], -1
    while before >= 0:
        other = m[before + ENTRY_BATCH]
        if other < number or (other == number and m[before + ENTRY_FIRST] < place):
            break
        before, after = m[before + ENTRY_BEFORE], before
    if after < 0:
        return
    _unlink(m, rank, entry, ENTRY_BEFORE, FIRST_URGENT)
    m[entry + ENTRY_BEFORE] = before
    m[entry + ENTRY_AFTER] = after
    m[after + ENTRY_BEFORE] = entry
    if before < 0:
        m[rank + FIRST_URGENT] = entry
    else:
        m[before + ENTRY_AFTER] = entry


def _unqueue(s: State, rank: int, entry: int) -> None:
    """Take an entry out of the urgent queue. Its bytes stay in the backlog until it has moved, or is forgotten."""
    m = s.ints
    _unlink(m, rank, entry, ENTRY_BEFORE, FIRST_URGENT)
    m[rank + QUEUED_ENTRIES] -= 1
    m[_row(m, rank, m[entry + ENTRY_ORIGIN]) + IN_QUEUE] -= 1


def _want_less(s: State, rank: int, entry: int) -> None:
    """A place less waits for an entry of the urgent queue: it is due when the first one left is, or never."""
    m = s.ints
    place = m[entry + ENTRY_FIRST]
    if place < 0:
        _unqueue(s, rank, entry)
        nbytes = s.sizes[m[entry + ENTRY_SAMPLE]]
        m[_row(m, rank, m[entry + ENTRY_ORIGIN]) + BACKLOG] -= nbytes
        _forget(s, rank, entry)
        return
    m[entry + ENTRY_BATCH] = m[m[place + PLACE_SLOT] + SLOT_NUMBER]
    _unqueue(s, rank, entry)
    _line_up(s, rank, entry)


def _end_place(s: State, rank: int, slot: int, place: int, state: int) -> None:
    m = s.ints
    m[place + PLACE_STATE] = state
    m[slot + SLOT_MISSING] -= 1
    if state == FAILED:
        m[slot + SLOT_FAILED] += 1


def _end_slot(s: State, rank: int, slot: int) -> None:
    """A batch is complete, or was abandoned and nothing of it runs."""
    m = s.ints
    _unlink(m, rank, slot, SLOT_BEFORE, FIRST_SLOT)
    m[m[rank + ENDED] + m[rank + ENDED_SLOTS]] = slot
    m[rank + ENDED_SLOTS] += 1


# -- Entries by sample: open addressing, linear probing ------------------------------------------------------


def _home(mask: int, sample: int) -> int:
    home: int = (sample ^ (sample >> 15)) & mask
    return home


def find(s: State, rank: int, sample: int) -> int:
    """Return the entry of a sample, or 0: no entry begins there."""
    m = s.ints
    mask = m[rank + TABLE_MASK]
    at = _home(mask, sample)
    while True:
        entry: int = m[m[rank + TABLE] + at]
        if entry == 0 or m[entry + ENTRY_SAMPLE] == sample:
            return entry
        at = (at + 1) & mask


def insert(s: State, rank: int, entry: int) -> None:
    m = s.ints
    mask = m[rank + TABLE_MASK]
    at = _home(mask, m[entry + ENTRY_SAMPLE])
    while m[m[rank + TABLE] + at] > 0:
        at = (at + 1) & mask
    m[m[rank + TABLE] + at] = entry


def _remove(s: State, rank: int, entry: int) -> None:
    """Close the gap: what comes behind moves up where it may, so that no search ends early."""
    m = s.ints
    mask = m[rank + TABLE_MASK]
    gap = _home(mask, m[entry + ENTRY_SAMPLE])
    while m[m[rank + TABLE] + gap] != entry:
        gap = (gap + 1) & mask
    at = (gap + 1) & mask
    while m[m[rank + TABLE] + at] > 0:
        other = m[m[rank + TABLE] + at]
        home = _home(mask, m[other + ENTRY_SAMPLE])
        if ((at - home) & mask) >= ((at - gap) & mask):
            m[m[rank + TABLE] + gap] = other
            gap = at
        at = (at + 1) & mask
    m[m[rank + TABLE] + gap] = 0
