"""Virtual time: what the scheduler decides for each rank, obeyed over the machine's curves.

Plain Python that numba can compile (`_clock_kernels`), as `penstock.policy.decisions` is, whose functions it calls:
nothing is decided here. A rank has actors, each with one event to come at most:

    its consumer  asks for a batch, has it, computes for a while; all ranks end a step together
    its readers   obey moves
    its decoders  obey Loads: read by themselves, then decode
    its wires     one for each origin: the source, its link to other ranks, the tiers
    its processors  that decoders and writers share while they compute, each of them on one at most
    its writers   of each tier that is no memory: write what tiers keep, behind those who bring it

The reads of a rank from one place each wait out its latency in parallel and then share its wire. The bytes under way
flow at the rate that so many reads get together, those of the read that came first before the others. Dividing the
rate equally instead would keep equal reads in step for ever: they would all end at once, and the wire would lie idle
during their successors' latency, which no real store does. What ranks share, the store, slows each of them by how many
have reads on their wires; a wire learns of that with its next read. What a rank reads from another's tier goes over the
wire of that tier, then over the link of the rank that has it; what a rank hands over goes over its own link. Where
ranks map each other's memory, no link takes any time, and decoders read from it by themselves.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from penstock.policy.decisions import (
    ABSENT,
    ASKED_AT,
    COMES_MORE,
    COMING,
    COMING_BEGINS,
    COMING_EPOCH,
    COMING_NUMBER,
    COMING_SIZE,
    COPY_STATE,
    COPY_TIER,
    ENTRY_ORIGIN,
    EXPECTED_ENTRIES,
    FIRST_FREE,
    FORM_EPOCHS,
    FREED,
    GO_ON,
    GROUP,
    GROUP_SIZE,
    HEAD,
    LATE,
    LOAD,
    LOADED,
    MARKS,
    MOVE,
    MOVED,
    OK,
    OUT,
    PACE,
    PLACE_COLUMNS,
    PRESENT,
    READY,
    RUN,
    SLOT_PLACES,
    SLOTS,
    SOURCE,
    STAGED,
    STAGES_UNTIL,
    STAGING,
    State,
    announced,
    epochs_left,
    event,
    expected_seconds,
    extent_of,
    heard,
    is_in_form,
    is_kept,
    is_near,
    observe_worker,
    own_copy,
    patience_seconds,
    peer_of,
    received,
    tier_of,
)

# Whatever can be indexed, as in `decisions`.
Ints = Any
Floats = Any

# What `run` returns: all is over, or there is no space for more spans.
OVER, FULL = 0, 1
NOTHING = -1
# When batches are staged: ahead of the training; ahead, but what only the store has once it is asked for; once they are
# asked for.
AHEAD, STORE_ON_DEMAND, ON_DEMAND = 0, 1, 2

# Kinds of spans, and the place of those that take bytes from nowhere, as in `penstock.trace.schema`.
WAIT, STEP, READ, HIT, DECODE, SLOT = range(6)
NO_PLACE = -128
NO_PEER = -1
# Threads in spans.
READER_THREAD, DECODER_THREAD = 2, 3

# Numbers of the clock: ints[QUEUED], and so on.
(
    QUEUED,  #: events in the heap
    HEAP,  #: where it is
    TICKET,  #: of the next event: of two at one time the one that was said first comes first
    AT_ONCE,  #: actors that go on now
    AT_ONCE_FIRST,
    AT_ONCE_RING,  #: where they are
    AT_ONCE_SIZE,
    AT_STEP,  #: that the ranks are at
    RUNNING,  #: ranks that have not ended it
    CLIENTS,  #: ranks with reads on the store's wire
    IS_SHARED,  #: 1: CLIENTS follows what the ranks do
    ORIGINS,  #: of a rank, other ranks' tiers left out
    STAGES,  #: AHEAD, STORE_ON_DEMAND or ON_DEMAND
    STORE_RATES,  #: floats: bytes/s of a rank's reads together, by clients, by reads
    STORE_COLUMNS,  #: how many there are of a number of clients
    SPANS,  #: recorded since the driver took some
    MOST_SPANS,  #: where so many are recorded, the driver takes them; 0: none are recorded
    CROP_BYTES,  #: of a crop that tier 1 keeps in place of a sample; 0: it keeps samples as stored
    EPOCHS,  #: of the run: crops are made of no later ones
    PROMISES,  #: 1: ranks wait for what others have promised to read
    MOST_UNWRITTEN,  #: bytes that may wait to be written to a tier: what finds no space is not kept
    CLOCK_NUMBERS,
) = range(22)
# Floats of the clock: seconds of decoding for each byte; of finishing a crop, for each of its bytes, where as many do
# as compute at once, and where one does alone; what each further crop adds to a decoding, as a share of it, and what
# using a kept sample leaves of it that is in memory, and one that was read from a disk; what reading that takes of a
# processor, as bytes that are decoded meanwhile; of a step for each sample and byte; of one read on the
# store's wire, for each client; when the first batch is asked for; what time it is; how many processors each rank has,
# and seconds of one for each Load, for each batch beside its Loads, for each sample that is written to a tier, and for
# each of its bytes; and the same of a sample that is copied to memory which is written for the first time.
(
    DECODE_BYTE,
    CROP_BYTE,
    CROP_ALONE,
    MORE_CROPS,
    LEFT_SHARE,
    LEFT_OF_DISK,
    DISK_READ,
    STEP_SAMPLE,
    STEP_BYTE,
    REQUEST,
    FIRST_ASK,
    NOW,
    PROCESSORS,
    LOAD_COST,
    BATCH_COST,
    WRITE_COST,
    WRITE_BYTE_COST,
    KEEP_COST,
    KEEP_BYTE_COST,
    CLOCK_FLOATS,
) = range(20)

# Ranks: ints[rank + ASKS], and so on.
(
    ROW,  #: its number among these ranks
    NUMBER,  #: its number in the job
    DECIDES,  #: the rank in the scheduler's state
    CONSUMER,
    WIRES,  #: the first of its wires; the others follow, then its processors
    IDLE_READER,  #: first of a list of workers
    IDLE_DECODER,
    NEXT_STEP,  #: to be lined up
    COMING_STEP,  #: of the batch that is next in line
    NEXT_NUMBER,  #: of the batch after that one
    ASKS,  #: number of the batch that the consumer wants
    KEEPS,  #: the slot that the training's name for the last batch is bound to, or -1
    COMPLETE,  #: by number of the batch modulo RING: its slot once it is complete, else -1
    STEPS,  #: by number of the batch modulo RING: its step
    RING,
    RANK_FLOATS,  #: where its floats are
    RANK_COLUMNS,
) = range(17)
# Floats of a rank: since when the consumer has asked; a batch has been next in line; the consumer has computed.
ASKED, DUE, BEGUN, RANK_FLOAT_COLUMNS = range(4)

# Actors: ints[actor + RANK], and so on. The first ones are of all, then those of workers, then those of wires.
(
    RANK,
    ROLE,
    PLACE_IN_HEAP,  #: or NOWHERE, or GOES_AT_ONCE
    TICKET_OF,
    ACTOR_FLOATS,  #: where its floats are
    PHASE,
    NEXT,  #: worker on the same wire, or that is idle
    READS,  #: how many samples it reads, from one place after the other
    READ_SO_FAR,
    TOGETHER,  #: how many of them the read under way brings
    FROM_HERE,  #: where the reads from the place of now began
    ITEMS,  #: where they are: entries or rows of the instruction, then samples to read, then their origins
    MOST_ITEMS,
    WRITES,  #: items that are written to a tier; behind those above are samples, then tiers
    COUNT,  #: items of the instruction
    FIRST_SAMPLE,
    BYTES,  #: of a Load's samples that are decoded, each further crop that is made of one counted as its share; or that
    #: a writer writes now
    CROPS,  #: of a Load, that are finished
    SLOT_OF,  #: of a Load, else -1
    CODE,  #: the step, counted over the run, or -1 - step for a fill
    GIVES_TO,  #: the rank that gets what it moves, -1 where its own does
    ORIGIN,  #: of a wire
    FIRST,  #: worker on the wire
    LAST,
    WAITERS,  #: how many
    TAKES_TIME,  #: 1: of a wire whose reads take any
    RATES,  #: floats: bytes/s of so many reads together; the store's are the clock's
    IS_WRITTEN,  #: 1: of the wire of a tier that has writers
    IDLE_WRITER,  #: first of a list of its writers, -1 for none
    UNWRITTEN,  #: bytes that wait to be written over it, or are being written
    UNTAKEN,  #: of these, those that no writer has
    UNTAKEN_SAMPLES,  #: and how many samples these are
    WRITES_TO,  #: of a writer: its wire
    ACTOR_COLUMNS,
) = range(34)
# Floats of an actor: of its event; when its instruction began, and its reads from one place or its decoding; the bytes
# of its read; of a wire: bytes of the first read that are to come, as of when, the latency of its reads, and how many
# bytes are read in the time in which one is written; of processors: how long each that computes has done so if it
# began at the start, as of when, and of a worker: at which such time it is through; and what keeping samples adds to
# its Load.
(
    TIME,
    BEGAN,
    SINCE,
    READ_BYTES,
    REST,
    AS_OF,
    LATENCY,
    WRITE_BYTE,
    COMPUTED,
    THROUGH_AT,
    KEEPING,
    ACTOR_FLOAT_COLUMNS,
) = range(12)
A_CONSUMER, A_WORKER, A_WIRE, ALL_PROCESSORS, A_WRITER = 0, 1, 2, 3, 4
NOWHERE, GOES_AT_ONCE = -1, -2
# Phases of a consumer, which TAKES a batch while it computes what that costs, and of a worker; a writer has the first,
# FETCHING while its bytes flow, and DECODING while it computes.
STARTS, ASKING, WAITS, TAKES, COMPUTES, RESTS, PREPARES = range(7)
BEGINS, WAITING, FETCHING, SENDING, DECODING = range(5)
# Columns of `reads`.
FROM_STORE, FROM_TIER, FROM_PEER = 0, 1, 2


class Clock(NamedTuple):
    """What virtual time knows of R ranks. Ranks and actors are known by where they begin, as in `decisions.State`."""

    ints: Ints
    floats: Floats
    #: What is read: string[bounds[rank, step] : bounds[rank, step + 1]] is the local batch of a step of the run.
    #: int32[accesses], int64[R, steps + 1]. Of each step of the run its epoch, and its number in it: int64[steps].
    string: Ints
    bounds: Ints
    #: Where samples have no home, of each access the tier where it is found, or SOURCE, and the place that keeps it
    #: afterwards, or STAGING: int8[accesses], int32[accesses]; else of size 0.
    hits: Ints
    heirs: Ints
    #: int8[samples], which disk gets a copy of what memory is to keep, STAGING for none; of size 0 where none does.
    copied: Ints
    epoch_of: Ints
    number_of: Ints
    #: float64[steps], of the training for a step; of size 0 where STEP_SAMPLE and STEP_BYTE say so.
    step_seconds: Floats
    #: Results: float64[steps], float32[steps, R] twice, int64[R, 3], float64[R], int64[R]; see `loading.Run`.
    step_end: Floats
    step_stall: Floats
    step_busy: Floats
    reads: Ints
    store_bytes: Floats
    fill_reads: Ints
    #: For spans: float64[most, 8] and int64[most, 8] over the same memory, each row `penstock.trace.schema.SPAN`.
    span_seconds: Floats
    spans: Ints


def run(s: State, c: Clock) -> int:
    """Let time go on until all is OVER, or no space for spans is left: FULL; then it can be called again."""
    w, g = c.ints, c.floats
    while True:
        if w[SPANS] >= w[MOST_SPANS] and w[MOST_SPANS] > 0:
            return FULL
        if w[AT_ONCE] > 0:
            actor = w[w[AT_ONCE_RING] + w[AT_ONCE_FIRST]]
            w[AT_ONCE_FIRST] = (w[AT_ONCE_FIRST] + 1) % w[AT_ONCE_SIZE]
            w[AT_ONCE] -= 1
            w[actor + PLACE_IN_HEAP] = NOWHERE
        elif w[QUEUED] > 0:
            actor = w[w[HEAP]]
            g[NOW] = g[w[actor + ACTOR_FLOATS] + TIME]
            _pop(w, g)
        else:
            return OVER
        now = g[NOW]
        if w[actor + ROLE] == ALL_PROCESSORS:
            actor = _end_of_work(w, g, actor, now)
        what, slot, count, seconds, receiver, worker = NOTHING, 0, 0, 0.0, -1, actor
        if w[actor + ROLE] == A_CONSUMER:
            rank = w[actor + RANK]
            if w[actor + PHASE] == STARTS or w[actor + PHASE] == PREPARES:
                what = GO_ON
            elif w[actor + PHASE] == ASKING and w[STAGES] == STORE_ON_DEMAND:
                s.ints[w[rank + DECIDES] + STAGES_UNTIL] = w[rank + ASKS]
                what = GO_ON
            was_waiting = w[actor + PHASE] == WAITS
            slot = _consume(s, c, rank, actor, now)
            if slot >= 0:
                what = FREED
            elif was_waiting and w[actor + PHASE] == WAITS:
                what, seconds = LATE, now
        else:
            if w[actor + ROLE] == A_WIRE:
                worker = _end_of_read(w, g, actor, now)
            rank = w[worker + RANK]
            if w[worker + ROLE] == A_WRITER:
                _write_on(c, rank, worker, now)
            elif _go_on(s, c, rank, worker, now):
                what = LOADED if w[worker + SLOT_OF] >= 0 else MOVED
                slot, count, seconds = _over(s, c, rank, worker, now)
                if w[worker + GIVES_TO] >= 0:
                    receiver = _hand_over(s, c, worker)
        while what != NOTHING:
            size = event(s, what, w[rank + DECIDES], slot, count, 0, seconds)
            kept = 0
            if what in (MOVED, LOADED):
                _write_behind(s, c, rank, worker, now)
                if w[PROMISES] != 0:
                    kept = _list_kept(s, c, rank, worker)
            _obey(s, c, rank, size, now)
            if kept > 0:
                _announce(s, c, rank, kept, now)
            what = GO_ON if _line_up(s, c, rank) else NOTHING
            if what == NOTHING and receiver >= 0:
                rank, what, receiver = receiver, GO_ON, -1


def _hand_over(s: State, c: Clock, worker: int) -> int:
    """Another rank has got what a reader moved. Returns that rank."""
    m, w = s.ints, c.ints
    rank: int = CLOCK_NUMBERS + w[worker + GIVES_TO] * RANK_COLUMNS
    group, samples = m[w[rank + DECIDES] + GROUP], w[worker + ITEMS] + w[worker + MOST_ITEMS]
    for k in range(w[worker + COUNT]):
        m[group + k] = w[samples + k]
    received(s, w[rank + DECIDES], w[worker + COUNT])
    return rank


def _list_kept(s: State, c: Clock, rank: int, worker: int) -> int:
    """Put what a worker has read from the source, and its rank's tiers keep, into the group; return how many."""
    m, w = s.ints, c.ints
    decides, count = w[rank + DECIDES], 0
    samples = w[worker + ITEMS] + w[worker + MOST_ITEMS]
    for k in range(w[worker + READS]):
        sample = w[samples + k]
        if w[samples + w[worker + MOST_ITEMS] + k] == SOURCE and is_kept(s, decides, sample):
            m[m[decides + GROUP] + count] = sample
            count += 1
    return count


def _announce(s: State, c: Clock, rank: int, count: int, now: float) -> None:
    """Let the ranks that wait for what is in a rank's group, and in its tiers, go on."""
    m, w = s.ints, c.ints
    samples = m[w[rank + DECIDES] + GROUP]
    heard(s, w[rank + ROW], now)
    for row in range(c.bounds.shape[0]):
        other = CLOCK_NUMBERS + row * RANK_COLUMNS
        decides = w[other + DECIDES]
        if other == rank or m[decides + EXPECTED_ENTRIES] == 0:
            continue
        for k in range(count):
            m[m[decides + GROUP] + k] = m[samples + k]
        announced(s, decides, w[rank + ROW], count)
        more = True
        while more:
            _obey(s, c, other, event(s, GO_ON, decides, 0, 0, 0, 0.0), now)
            more = _line_up(s, c, other)


# -- The consumer --------------------------------------------------------------------------------------------


def _consume(s: State, c: Clock, rank: int, actor: int, now: float) -> int:
    """Let a consumer go on. Returns a slot that it does not need any more, or -1."""
    w, g = c.ints, c.floats
    mine = w[rank + RANK_FLOATS]
    if w[actor + PHASE] == PREPARES:
        return -1
    if w[actor + PHASE] == STARTS:
        # As if it ended a step before the first one when it asks for the first time.
        w[actor + PHASE] = COMPUTES
        g[mine + DUE] = now
        _push(w, g, actor, g[FIRST_ASK])
        return -1
    if w[actor + PHASE] == COMPUTES:
        w[actor + PHASE] = RESTS
        if w[rank + KEEPS] >= 0:
            _record_step(c, rank, now)
        w[RUNNING] -= 1
        if w[RUNNING] == 0:
            _next_step(c, now)
        return -1
    freed: int = -1
    if w[actor + PHASE] == ASKING:
        w[actor + PHASE] = WAITS
        g[mine + ASKED] = now
        s.floats[s.ints[w[rank + DECIDES] + PACE] + ASKED_AT] = now
        if c.hits.shape[0] > 0:
            sample = c.string[c.bounds[w[rank + ROW], w[AT_STEP]]]
            _push(w, g, actor, now + expected_seconds(s, w[rank + DECIDES], SOURCE, s.sizes[sample]))
        if w[STAGES] == ON_DEMAND:
            freed = w[rank + KEEPS]
            w[rank + KEEPS] = -1
    at = w[rank + ASKS] % w[rank + RING]
    slot = w[w[rank + COMPLETE] + at]
    if slot < 0:
        if s.ints[w[rank + DECIDES] + EXPECTED_ENTRIES] > 0:
            _push(w, g, actor, now + patience_seconds(s, w[rank + DECIDES]))
        return freed
    if w[actor + PHASE] != TAKES and g[BATCH_COST] > 0.0:
        w[actor + PHASE] = TAKES
        _take_out(w, g, actor)
        _begin_work(w, g, w[rank + WIRES] + w[ORIGINS] * ACTOR_COLUMNS, actor, g[BATCH_COST], now)
        return freed
    w[w[rank + COMPLETE] + at] = -1
    w[rank + ASKS] += 1
    row, step = w[rank + ROW], w[w[rank + STEPS] + at]
    begin, end = c.bounds[row, step], c.bounds[row, step + 1]
    if c.step_seconds.shape[0] > 0:
        busy = c.step_seconds[step]
    else:
        nbytes = 0
        for access in range(begin, end):
            nbytes += s.sizes[c.string[access]]
        busy = (end - begin) * g[STEP_SAMPLE] + nbytes * g[STEP_BYTE]
    asked = g[mine + ASKED]
    c.step_stall[step, row] = now - asked
    c.step_busy[step, row] = busy
    c.step_end[step] = max(c.step_end[step], now + busy)
    _record(c, WAIT, asked, now, step, -1, end - begin, 0, NO_PLACE, NO_PEER, DECODER_THREAD, rank)
    w[actor + PHASE] = COMPUTES
    g[mine + BEGUN] = now
    _push(w, g, actor, now + busy)
    # The training's name for the last batch is bound anew only now: until here it kept that slot.
    freed = w[rank + KEEPS]
    w[rank + KEEPS] = slot
    return freed


def _record_step(c: Clock, rank: int, now: float) -> None:
    """A rank has ended the step that all ranks are at."""
    step, row = c.ints[AT_STEP], c.ints[rank + ROW]
    samples = c.bounds[row, step + 1] - c.bounds[row, step]
    begun = c.floats[c.ints[rank + RANK_FLOATS] + BEGUN]
    _record(c, STEP, begun, now, step, -1, samples, 0, NO_PLACE, NO_PEER, DECODER_THREAD, rank)


def _next_step(c: Clock, now: float) -> None:
    """All ranks have ended a step: those that read in the next one ask."""
    w, steps = c.ints, c.step_end.shape[0]
    while w[RUNNING] == 0 and w[AT_STEP] + 1 < steps:
        w[AT_STEP] += 1
        step = w[AT_STEP]
        c.step_end[step] = now
        for row in range(c.bounds.shape[0]):
            if c.bounds[row, step] < c.bounds[row, step + 1]:
                w[RUNNING] += 1
                consumer = w[CLOCK_NUMBERS + row * RANK_COLUMNS + CONSUMER]
                w[consumer + PHASE] = ASKING
                let_go_on(w, consumer)


# -- Instructions --------------------------------------------------------------------------------------------


def _line_up(s: State, c: Clock, rank: int) -> bool:
    """Say which batch is next, if one was staged. Returns whether a slot is free for it, too."""
    m, w = s.ints, c.ints
    decides = w[rank + DECIDES]
    if m[decides + COMING_SIZE] > 0 or m[decides + COMES_MORE] == 0:
        return False
    row, steps, step = w[rank + ROW], c.step_end.shape[0], w[rank + NEXT_STEP]
    while step < steps and c.bounds[row, step] == c.bounds[row, step + 1]:
        step += 1
    w[rank + NEXT_STEP] = step + 1
    if step < steps:
        begin, size = c.bounds[row, step], c.bounds[row, step + 1] - c.bounds[row, step]
        coming, most = m[decides + COMING], m[decides + GROUP_SIZE]
        for k in range(size):
            m[coming + k] = c.string[begin + k]
        if c.hits.shape[0] > 0:
            for k in range(size):
                m[coming + most + k] = c.hits[begin + k]
                m[coming + 2 * most + k] = c.heirs[begin + k]
        number = w[rank + NEXT_NUMBER]
        w[rank + NEXT_NUMBER] += 1
        m[decides + COMING_SIZE] = size
        m[decides + COMING_NUMBER] = number
        m[decides + COMING_EPOCH] = c.epoch_of[step]
        begins = number > 0 and c.epoch_of[step] != c.epoch_of[w[rank + COMING_STEP]]
        m[decides + COMING_BEGINS] = 1 if begins else 0
        w[rank + COMING_STEP] = step
    else:
        m[decides + COMES_MORE] = 0
    is_free: bool = m[decides + FIRST_FREE] >= 0
    return is_free


def _obey(s: State, c: Clock, rank: int, size: int, now: float) -> None:
    """Hand the instructions that were written to whoever obeys them."""
    m, w = s.ints, c.ints
    at: int = m[w[rank + DECIDES] + OUT]
    end = at + size
    while at < end:
        what, count, number, where = m[at], m[at + 1], m[at + 2], m[at + 3]
        at += HEAD
        if what == MOVE:
            _begin_move(s, c, rank, at, now)
            at += 3 * count
        elif what in (LOAD, RUN):
            _begin_load(s, c, rank, at, now)
            at += 5 * count
        elif what == READY:
            w[w[rank + COMPLETE] + number % w[rank + RING]] = where
            at += count
            if w[w[rank + CONSUMER] + PHASE] == WAITS and number == w[rank + ASKS]:
                _take_out(w, c.floats, w[rank + CONSUMER])
                let_go_on(w, w[rank + CONSUMER])
        elif what == STAGED:
            step = w[rank + COMING_STEP]
            w[w[rank + STEPS] + number % w[rank + RING]] = step
            mine = w[rank + RANK_FLOATS]
            _record(
                c, SLOT, c.floats[mine + DUE], now, step, -1, 0, 0, NO_PLACE, NO_PEER, DECODER_THREAD, rank
            )
            c.floats[mine + DUE] = now
        else:  # DROP: there are no bytes
            at += count


def _begin_move(s: State, c: Clock, rank: int, at: int, now: float) -> None:
    """Let a reader begin what an instruction says. at: of its items."""
    m, w = s.ints, c.ints
    count, number, where = m[at - HEAD + 1], m[at - HEAD + 2], m[at - HEAD + 3]
    worker = w[rank + IDLE_READER]
    w[rank + IDLE_READER] = w[worker + NEXT]
    items, most = w[worker + ITEMS], w[worker + MOST_ITEMS]
    w[worker + WRITES] = 0
    for k in range(count):
        sample, rest = m[at + count + k], m[at + 2 * count + k]
        w[items + k] = m[at + k]
        w[items + most + k] = sample
        w[items + 2 * most + k] = where
        # What is kept in a form, whoever decodes it makes.
        if where != STAGING and not is_in_form(s, w[rank + DECIDES], rest):
            _note_write(s, c, rank, worker, sample, where, rest)
    w[worker + GIVES_TO] = peer_of(w[ORIGINS] - 2, m[at + 2 * count]) if where == STAGING else -1
    w[worker + READS] = count
    w[worker + SLOT_OF] = -1
    w[worker + CODE] = -1 - w[rank + COMING_STEP]
    if number >= 0:
        w[worker + CODE] = w[w[rank + STEPS] + number % w[rank + RING]]
    _begin(c, worker, count, w[items + most], now)


def _begin_load(s: State, c: Clock, rank: int, at: int, now: float) -> None:
    """Let a decoder begin what an instruction says. at: of its items."""
    m, w = s.ints, c.ints
    count, number, where = m[at - HEAD + 1], m[at - HEAD + 2], m[at - HEAD + 3]
    worker, decides = w[rank + IDLE_DECODER], w[rank + DECIDES]
    w[rank + IDLE_DECODER] = w[worker + NEXT]
    code: int = w[w[rank + STEPS] + number % w[rank + RING]]
    nbytes, crops, own = 0, 0, 0
    w[worker + WRITES] = 0
    c.floats[w[worker + ACTOR_FLOATS] + KEEPING] = 0.0
    for k in range(count):
        w[w[worker + ITEMS] + k] = m[at + k]
        sample, origin = m[at + count + k], m[at + 2 * count + k]
        if is_in_form(s, decides, origin):
            crops += 1
            if 1 < origin <= w[ORIGINS] - 2:
                nbytes += int(s.sizes[sample] * c.floats[LEFT_OF_DISK] + c.floats[DISK_READ])
            else:
                nbytes += int(s.sizes[sample] * c.floats[LEFT_SHARE])
        else:
            more = _bytes_of_more_crops(s, c, rank, sample, c.epoch_of[code])
            nbytes += s.sizes[sample] + more
            made_for = _made_for(s, decides, sample)
            # Of those made together this epoch's is finished, too, and one that serves all epochs.
            crops += made_for != STAGING and (more > 0 or s.ints[decides + FORM_EPOCHS] == 0)
            _note_write(s, c, rank, worker, sample, origin, max(made_for, m[at + 3 * count + k]))
            _note_kept(s, c, rank, worker, sample, m[at + 3 * count + k])
        if origin != STAGING:
            own += 1
        else:
            origin = m[m[at + 4 * count + k] + ENTRY_ORIGIN]
        column = FROM_STORE if origin == SOURCE else FROM_TIER
        c.reads[w[rank + ROW], FROM_PEER if origin > w[ORIGINS] - 2 else column] += 1
    w[worker + READS] = own
    w[worker + GIVES_TO] = -1
    if own > 0:
        _list_own_reads(m, w, worker, at + count, count)
    w[worker + BYTES] = nbytes
    w[worker + CROPS] = crops
    w[worker + SLOT_OF] = where
    w[worker + CODE] = code
    _begin(c, worker, count, m[at + count], now)


def _bytes_of_more_crops(s: State, c: Clock, rank: int, sample: int, epoch: int) -> int:
    """Return how many bytes of a sample take as long to decode as what is made of it beside its crop of this epoch."""
    decides = c.ints[rank + DECIDES]
    epochs, crops = s.ints[decides + FORM_EPOCHS], 1
    if c.floats[MORE_CROPS] == 0.0 or _made_for(s, decides, sample) == STAGING:
        return 0
    if epochs > 0:
        crops = min(epochs_left(epochs, epoch, sample), c.ints[EPOCHS] - 1 - epoch)
    return int(s.sizes[sample] * crops * c.floats[MORE_CROPS])


def _made_for(s: State, decides: int, sample: int) -> int:
    """Return the tier that keeps a sample in a form, which whoever decodes it makes; STAGING where none does."""
    copy = own_copy(s, decides, sample)
    tier: int = STAGING if copy < 0 else s.copies[copy, COPY_TIER]
    return tier if tier > STAGING and is_in_form(s, decides, tier) else STAGING


def _list_own_reads(m: Ints, w: Ints, worker: int, at: int, count: int) -> None:
    """List what a decoder reads by itself, one place after the other. at: samples, then origins, `count` of each."""
    items, most = w[worker + ITEMS], w[worker + MOST_ITEMS]
    own, last = 0, SOURCE
    for k in range(count):
        last = max(last, m[at + count + k])
    for origin in range(SOURCE, last + 1):
        for k in range(count):
            if m[at + count + k] == origin and origin != STAGING:
                w[items + most + own] = m[at + k]
                w[items + 2 * most + own] = origin
                own += 1


def _begin(c: Clock, worker: int, count: int, sample: int, now: float) -> None:
    w = c.ints
    w[worker + PHASE] = BEGINS
    w[worker + READ_SO_FAR] = 0
    w[worker + FROM_HERE] = 0
    w[worker + COUNT] = count
    w[worker + FIRST_SAMPLE] = sample
    c.floats[w[worker + ACTOR_FLOATS] + BEGAN] = now
    c.floats[w[worker + ACTOR_FLOATS] + SINCE] = now
    let_go_on(w, worker)


def _go_on(s: State, c: Clock, rank: int, worker: int, now: float) -> bool:
    """Let a worker go on with its instruction. Returns whether that is over."""
    w, g = c.ints, c.floats
    if w[worker + PHASE] == DECODING:
        _record(
            c,
            DECODE,
            g[w[worker + ACTOR_FLOATS] + SINCE],
            now,
            w[worker + CODE],
            w[worker + FIRST_SAMPLE],
            w[worker + COUNT],
            0,
            NO_PLACE,
            NO_PEER,
            DECODER_THREAD,
            rank,
        )
        return True
    done, reads = w[worker + READ_SO_FAR], w[worker + READS]
    places = w[worker + ITEMS] + 2 * w[worker + MOST_ITEMS]
    if w[worker + PHASE] == FETCHING and _send(w, g, rank, worker, w[places + done], now):
        return False
    if w[worker + PHASE] == FETCHING or w[worker + PHASE] == SENDING:
        if w[places + done] == SOURCE:
            c.store_bytes[w[rank + ROW]] += g[w[worker + ACTOR_FLOATS] + READ_BYTES]
        done += w[worker + TOGETHER]
        w[worker + READ_SO_FAR] = done
    while w[worker + PHASE] != WAITING:
        first = w[worker + FROM_HERE]
        if done > first and (done == reads or w[places + done] != w[places + first]):
            _note_reads(s, c, rank, worker, done, now)
        if done == reads:
            break
        w[worker + READ_SO_FAR] = done
        _choose_read(s, c, rank, worker)
        wire = _wire(w, rank, w[places + done])
        if w[wire + TAKES_TIME] == 0:
            if _send(w, g, rank, worker, w[places + done], now):
                return False
            done += 1
            continue
        w[worker + PHASE] = WAITING
        latency = g[w[wire + ACTOR_FLOATS] + LATENCY]
        if latency > 0.0:
            _push(w, g, worker, now + latency)
            return False
    if w[worker + PHASE] == WAITING:
        w[worker + PHASE] = FETCHING
        _join(w, g, _wire(w, rank, w[places + done]), worker, now)
        return False
    if w[worker + SLOT_OF] < 0:
        return True
    w[worker + PHASE] = DECODING
    g[w[worker + ACTOR_FLOATS] + SINCE] = now
    decoding, crop_bytes = w[worker + BYTES] * g[DECODE_BYTE], w[worker + CROPS] * w[CROP_BYTES]
    others = g[LOAD_COST] + decoding + g[w[worker + ACTOR_FLOATS] + KEEPING]
    seconds = _beside_others(others, crop_bytes * g[CROP_ALONE], crop_bytes * g[CROP_BYTE])
    processors = w[rank + WIRES] + w[ORIGINS] * ACTOR_COLUMNS
    _begin_work(w, g, processors, worker, seconds, now)
    return False


def _beside_others(others: float, alone: float, together: float) -> float:
    """Return what a Load takes of a processor that finishes crops, and does other things for so long.

    Several that write at once wait for memory: a Load finishes its crops in `alone` seconds while nobody else does, and
    in `together` while all do. These do something else, too, for the same part of their time t, so that
    t = others + alone + (together - alone) * (t - others) / t.
    """
    more = max(0.0, together - alone)
    most = others + alone + more
    seconds: float = (most + max(0.0, most * most - 4.0 * more * others) ** 0.5) / 2.0
    return seconds


def _choose_read(s: State, c: Clock, rank: int, worker: int) -> None:
    """Say what a worker reads next: a sample and, from a source that tells where they lie, those near it."""
    w, decides = c.ints, c.ints[rank + DECIDES]
    first, reads = w[worker + READ_SO_FAR], w[worker + READS]
    samples = w[worker + ITEMS] + w[worker + MOST_ITEMS]
    places = samples + w[worker + MOST_ITEMS]
    count, nbytes = 1, s.sizes[w[samples + first]]
    if is_in_form(s, decides, w[places + first]):
        nbytes = w[CROP_BYTES]
    if s.extents.shape[0] > 0 and w[places + first] == SOURCE:
        unit, begin, end = extent_of(s, w[samples + first])
        before = 0
        while before < count:
            before = count
            for k in range(first + count, reads):
                near = w[samples + k]
                if w[places + k] == SOURCE and is_near(s, decides, near, unit, begin, end):
                    w[samples + k] = w[samples + first + count]
                    w[samples + first + count] = near
                    count += 1
                    _, its_begin, its_end = extent_of(s, near)
                    begin, end = min(begin, its_begin), max(end, its_end)
        if unit >= 0:
            nbytes = end - begin
    w[worker + TOGETHER] = count
    c.floats[w[worker + ACTOR_FLOATS] + READ_BYTES] = nbytes


def _send(w: Ints, g: Floats, rank: int, worker: int, place: int, now: float) -> bool:
    """Let what another rank's tier has read go over that rank's link. Returns whether that takes time."""
    tiers = w[ORIGINS] - 2
    if place <= tiers:
        return False
    link = _wire(w, CLOCK_NUMBERS + peer_of(tiers, place) * RANK_COLUMNS, STAGING)
    if w[link + TAKES_TIME] == 0:
        return False
    w[worker + PHASE] = SENDING
    _join(w, g, link, worker, now)
    return True


def _wire(w: Ints, rank: int, place: int) -> int:
    """Return the wire over which a place is read; of another rank's tier, that rank's."""
    tiers = w[ORIGINS] - 2
    if place > tiers:
        rank = CLOCK_NUMBERS + peer_of(tiers, place) * RANK_COLUMNS
        place = tier_of(tiers, place)
    wire: int = w[rank + WIRES] + (place - SOURCE) * ACTOR_COLUMNS
    return wire


def _note_reads(s: State, c: Clock, rank: int, worker: int, done: int, now: float) -> None:
    """A worker has all it wanted from one place: the samples from FROM_HERE to `done`."""
    w, g = c.ints, c.floats
    samples, first = w[worker + ITEMS] + w[worker + MOST_ITEMS], w[worker + FROM_HERE]
    origin: int = w[samples + w[worker + MOST_ITEMS] + first]
    tiers, place, peer = w[ORIGINS] - 2, origin, NO_PEER
    if origin > tiers:
        place, peer = tier_of(tiers, origin), peer_of(tiers, origin)
    is_decoder = w[worker + SLOT_OF] >= 0
    since = g[w[worker + ACTOR_FLOATS] + SINCE]
    nbytes = 0
    for k in range(first, done):
        nbytes += s.sizes[w[samples + k]]
    if is_in_form(s, w[rank + DECIDES], origin):
        nbytes = (done - first) * w[CROP_BYTES]
    if origin != STAGING:  # else another rank gets it
        _record(
            c,
            READ if origin == SOURCE else HIT,
            since,
            now,
            w[worker + CODE],
            w[samples + first],
            done - first,
            nbytes,
            place,
            peer,
            DECODER_THREAD if is_decoder else READER_THREAD,
            rank,
        )
    if origin == SOURCE and w[worker + CODE] < 0:
        c.fill_reads[w[rank + ROW]] += done - first
    if is_decoder:
        observe_worker(s, w[rank + DECIDES], origin, done - first, now - since)
    w[worker + FROM_HERE] = done
    g[w[worker + ACTOR_FLOATS] + SINCE] = now


def _over(s: State, c: Clock, rank: int, worker: int, now: float) -> tuple[int, int, float]:
    """An instruction is over: put its items into the group. Returns its slot, their number, its seconds."""
    m, w = s.ints, c.ints
    decides, count, slot = w[rank + DECIDES], w[worker + COUNT], w[worker + SLOT_OF]
    group, marks, items = m[decides + GROUP], m[decides + MARKS], w[worker + ITEMS]
    begin, size = 0, 1
    if slot >= 0:
        begin, size = m[m[m[decides + SLOTS] + slot] + SLOT_PLACES], PLACE_COLUMNS
    for k in range(count):
        m[group + k] = begin + w[items + k] * size
        m[marks + k] = OK
    idle = IDLE_READER if slot < 0 else IDLE_DECODER
    w[worker + NEXT] = w[rank + idle]
    w[rank + idle] = worker
    return max(slot, 0), count, now - c.floats[w[worker + ACTOR_FLOATS] + BEGAN]


# -- Writers -------------------------------------------------------------------------------------------------


def _note_write(s: State, c: Clock, rank: int, worker: int, sample: int, origin: int, tier: int) -> None:
    """A tier is to have a sample of a worker's instruction once that is over, and perhaps a disk a copy.

    origin: of the sample; what comes from a tier of the rank's own is not written again.
    """
    w, decides = c.ints, c.ints[rank + DECIDES]
    if tier == STAGING or STAGING < origin <= w[ORIGINS] - 2:
        return
    if c.copied.shape[0] > 0 and c.copied[sample] != STAGING:
        copied: int = c.copied[sample]
        if is_in_form(s, decides, copied) == is_in_form(s, decides, tier):
            tier = copied
    if w[_wire(w, rank, tier) + IS_WRITTEN] != 0:
        most = w[worker + MOST_ITEMS]
        at = w[worker + ITEMS] + 3 * most + w[worker + WRITES]
        w[at] = sample
        w[at + most] = tier
        w[worker + WRITES] += 1


def _note_kept(s: State, c: Clock, rank: int, worker: int, sample: int, rest: int) -> None:
    """Count what it takes to copy a sample of a Load to memory that is to keep it. rest: the tier, or STAGING.

    Of what a form has of pictures for more than one epoch, decoding them includes that.
    """
    w, g, nbytes = c.ints, c.floats, s.sizes[sample]
    made_for = _made_for(s, w[rank + DECIDES], sample)
    if made_for != STAGING:
        rest = made_for if g[MORE_CROPS] == 0.0 else STAGING
        nbytes = w[CROP_BYTES]
    if rest != STAGING and w[_wire(w, rank, rest) + IS_WRITTEN] == 0:
        g[w[worker + ACTOR_FLOATS] + KEEPING] += g[KEEP_COST] + nbytes * g[KEEP_BYTE_COST]


def _write_behind(s: State, c: Clock, rank: int, worker: int, now: float) -> None:
    """Let what a worker has brought wait to be written; what finds no space is not kept."""
    w, decides = c.ints, c.ints[rank + DECIDES]
    most = w[worker + MOST_ITEMS]
    at = w[worker + ITEMS] + 3 * most
    for k in range(w[worker + WRITES]):
        sample, wire = w[at + k], _wire(w, rank, w[at + most + k])
        nbytes = w[CROP_BYTES] if is_in_form(s, decides, w[at + most + k]) else s.sizes[sample]
        if w[wire + UNWRITTEN] + nbytes > w[MOST_UNWRITTEN]:
            copy = own_copy(s, decides, sample)
            is_its = copy >= 0 and s.copies[copy, COPY_TIER] == w[at + most + k]
            if is_its and s.copies[copy, COPY_STATE] == PRESENT:
                s.copies[copy, COPY_STATE] = ABSENT
            continue
        w[wire + UNWRITTEN] += nbytes
        w[wire + UNTAKEN] += nbytes
        w[wire + UNTAKEN_SAMPLES] += 1
        if w[wire + IDLE_WRITER] >= 0:
            writer = w[wire + IDLE_WRITER]
            w[wire + IDLE_WRITER] = w[writer + NEXT]
            _write_on(c, rank, writer, now)


def _write_on(c: Clock, rank: int, writer: int, now: float) -> None:
    """Let a writer go on: its bytes go to the disk, then it computes, and takes more or is idle."""
    w, g = c.ints, c.floats
    wire = w[writer + WRITES_TO]
    if w[writer + PHASE] == FETCHING:
        w[writer + PHASE] = DECODING
        processors = w[rank + WIRES] + w[ORIGINS] * ACTOR_COLUMNS
        _begin_work(w, g, processors, writer, g[WRITE_COST] + w[writer + BYTES] * g[WRITE_BYTE_COST], now)
        return
    if w[writer + PHASE] == DECODING:
        w[wire + UNWRITTEN] -= w[writer + BYTES]
    if w[wire + UNTAKEN_SAMPLES] == 0:
        w[writer + PHASE] = BEGINS
        w[writer + NEXT] = w[wire + IDLE_WRITER]
        w[wire + IDLE_WRITER] = writer
        return
    # Of those that wait, which one makes no difference.
    w[writer + BYTES] = w[wire + UNTAKEN] // w[wire + UNTAKEN_SAMPLES]
    w[wire + UNTAKEN] -= w[writer + BYTES]
    w[wire + UNTAKEN_SAMPLES] -= 1
    w[writer + PHASE] = FETCHING
    g[w[writer + ACTOR_FLOATS] + READ_BYTES] = w[writer + BYTES] * g[w[wire + ACTOR_FLOATS] + WRITE_BYTE]
    _join(w, g, wire, writer, now)


# -- Wires ---------------------------------------------------------------------------------------------------


def _rate(w: Ints, g: Floats, wire: int) -> float:
    """Return the bytes/s of all reads on a wire."""
    if w[wire + ORIGIN] == SOURCE:
        rate: float = g[w[STORE_RATES] + w[CLIENTS] * w[STORE_COLUMNS] + w[wire + WAITERS]]
    else:
        rate = g[w[wire + RATES] + w[wire + WAITERS]]
    return rate


def _join(w: Ints, g: Floats, wire: int, worker: int, now: float) -> None:
    """A read's bytes begin to flow."""
    mine = w[wire + ACTOR_FLOATS]
    is_first = w[wire + WAITERS] == 0
    if is_first:
        w[wire + FIRST] = worker
        if w[wire + ORIGIN] == SOURCE and w[IS_SHARED] != 0:
            w[CLIENTS] += 1
    else:
        g[mine + REST] -= _rate(w, g, wire) * (now - g[mine + AS_OF])
        w[w[wire + LAST] + NEXT] = worker
    w[worker + NEXT] = -1
    w[wire + LAST] = worker
    w[wire + WAITERS] += 1
    _expect(w, g, wire, is_first, now)


def _end_of_read(w: Ints, g: Floats, wire: int, now: float) -> int:
    """The first read on a wire is over. Returns whose it was."""
    worker: int = w[wire + FIRST]
    w[wire + FIRST] = w[worker + NEXT]
    w[wire + WAITERS] -= 1
    if w[wire + WAITERS] > 0:
        _expect(w, g, wire, True, now)
    elif w[wire + ORIGIN] == SOURCE and w[IS_SHARED] != 0:
        w[CLIENTS] -= 1
    return worker


def _expect(w: Ints, g: Floats, wire: int, begins: bool, now: float) -> None:
    """Say when the first read on a wire ends, as far as is known now. begins: its bytes begin to flow."""
    rate, mine = _rate(w, g, wire), w[wire + ACTOR_FLOATS]
    if begins:
        rest = g[w[w[wire + FIRST] + ACTOR_FLOATS] + READ_BYTES]
        if w[wire + ORIGIN] == SOURCE:
            rest += g[REQUEST] * w[CLIENTS] * rate
        g[mine + REST] = rest
    g[mine + AS_OF] = now
    _push(w, g, wire, now + max(0.0, g[mine + REST]) / rate)


# -- Processors ----------------------------------------------------------------------------------------------


def _begin_work(w: Ints, g: Floats, processors: int, worker: int, seconds: float, now: float) -> None:
    """A worker begins to compute, for so long on a processor of its own."""
    mine, its = w[processors + ACTOR_FLOATS], w[worker + ACTOR_FLOATS]
    g[mine + COMPUTED] += (now - g[mine + AS_OF]) * _pace(w, g, processors)
    g[mine + AS_OF] = now
    g[its + THROUGH_AT] = g[mine + COMPUTED] + seconds
    w[processors + WAITERS] += 1
    before, after = -1, w[processors + FIRST] if w[processors + WAITERS] > 1 else -1
    while after >= 0 and g[w[after + ACTOR_FLOATS] + THROUGH_AT] <= g[its + THROUGH_AT]:
        before, after = after, w[after + NEXT]
    w[worker + NEXT] = after
    if before < 0:
        w[processors + FIRST] = worker
    else:
        w[before + NEXT] = worker
    _expect_end_of_work(w, g, processors)


def _end_of_work(w: Ints, g: Floats, processors: int, now: float) -> int:
    """The worker that was to be through first is. Returns it."""
    worker: int = w[processors + FIRST]
    mine = w[processors + ACTOR_FLOATS]
    g[mine + COMPUTED], g[mine + AS_OF] = g[w[worker + ACTOR_FLOATS] + THROUGH_AT], now
    w[processors + FIRST] = w[worker + NEXT]
    w[processors + WAITERS] -= 1
    if w[processors + WAITERS] > 0:
        _expect_end_of_work(w, g, processors)
    return worker


def _expect_end_of_work(w: Ints, g: Floats, processors: int) -> None:
    mine, first = w[processors + ACTOR_FLOATS], w[w[processors + FIRST] + ACTOR_FLOATS]
    rest = (g[first + THROUGH_AT] - g[mine + COMPUTED]) / _pace(w, g, processors)
    _push(w, g, processors, g[mine + AS_OF] + max(0.0, rest))


def _pace(w: Ints, g: Floats, processors: int) -> float:
    """Return how much of a processor each worker has that computes."""
    pace: float = min(1.0, g[PROCESSORS] / max(1, w[processors + WAITERS]))
    return pace


# -- Spans ---------------------------------------------------------------------------------------------------


def _record(
    c: Clock,
    kind: int,
    start: float,
    end: float,
    code: int,
    sample: int,
    samples: int,
    nbytes: int,
    place: int,
    peer: int,
    thread: int,
    rank: int,
) -> None:
    if c.ints[MOST_SPANS] == 0:
        return
    at = c.ints[SPANS]
    c.ints[SPANS] += 1
    c.span_seconds[at, 0] = start
    c.span_seconds[at, 1] = end
    step = code if code >= 0 else -1 - code
    number = c.number_of[step] if code >= 0 else -1
    span = c.spans
    span[at, 2] = sample
    span[at, 3] = nbytes
    span[at, 4] = 0  # no flow
    span[at, 5] = (number << 32) | c.epoch_of[step]
    span[at, 6] = (peer << 32) | samples
    span[at, 7] = (c.ints[rank + NUMBER] << 32) | (thread << 16) | ((place & 255) << 8) | kind


# -- Events: a heap by time, with each actor once at most ----------------------------------------------------


def let_go_on(w: Ints, actor: int) -> None:
    """Let an actor go on now, before any other event."""
    if w[actor + PLACE_IN_HEAP] == NOWHERE:
        w[w[AT_ONCE_RING] + (w[AT_ONCE_FIRST] + w[AT_ONCE]) % w[AT_ONCE_SIZE]] = actor
        w[AT_ONCE] += 1
        w[actor + PLACE_IN_HEAP] = GOES_AT_ONCE


def _is_before(w: Ints, g: Floats, left: int, right: int) -> bool:
    left_time, right_time = g[w[left + ACTOR_FLOATS] + TIME], g[w[right + ACTOR_FLOATS] + TIME]
    is_before: bool = left_time < right_time or (
        left_time == right_time and w[left + TICKET_OF] < w[right + TICKET_OF]
    )
    return is_before


def _put(w: Ints, at: int, actor: int) -> None:
    w[w[HEAP] + at] = actor
    w[actor + PLACE_IN_HEAP] = at


def _push(w: Ints, g: Floats, actor: int, time: float) -> None:
    """Let an actor go on at a time, in the place of the time that was known before, if there was one."""
    g[w[actor + ACTOR_FLOATS] + TIME] = time
    w[actor + TICKET_OF] = w[TICKET]
    w[TICKET] += 1
    at = w[actor + PLACE_IN_HEAP]
    if at >= 0:
        _sink(w, g, at)
        at = w[actor + PLACE_IN_HEAP]
    else:
        at = w[QUEUED]
        w[QUEUED] += 1
    heap = w[HEAP]
    while at > 0:
        above = (at - 1) // 2
        other = w[heap + above]
        if not _is_before(w, g, actor, other):
            break
        _put(w, at, other)
        at = above
    _put(w, at, actor)


def _pop(w: Ints, g: Floats) -> None:
    """Take the first event out."""
    heap = w[HEAP]
    w[w[heap] + PLACE_IN_HEAP] = NOWHERE
    w[QUEUED] -= 1
    if w[QUEUED] > 0:
        w[heap] = w[heap + w[QUEUED]]
        _sink(w, g, 0)


def _take_out(w: Ints, g: Floats, actor: int) -> None:
    """Take an actor's event out, if it has one."""
    if w[actor + PLACE_IN_HEAP] >= 0:
        _push(w, g, actor, -1.0)
        _pop(w, g)


def _sink(w: Ints, g: Floats, at: int) -> None:
    """Move an actor down to where its time belongs."""
    heap = w[HEAP]
    actor = w[heap + at]
    while True:
        below = 2 * at + 1
        if below >= w[QUEUED]:
            break
        if below + 1 < w[QUEUED] and _is_before(w, g, w[heap + below + 1], w[heap + below]):
            below += 1
        other = w[heap + below]
        if not _is_before(w, g, other, actor):
            break
        _put(w, at, other)
        at = below
    _put(w, at, actor)
