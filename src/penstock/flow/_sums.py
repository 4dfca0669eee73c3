"""Spans summed up by one loop, as `epoch_metrics` does it by NumPy: plain Python that `_sums_kernels` compiles.

What a wait hung on is looked up in a hash table, whose buckets hold spans by batch, by flow and by sample. What the
loop does not know, it leaves to NumPy: spans of snapshots, many epochs.

A span is eight words of 64 bits, read as integers or as numbers:

    0 start | 1 end | 2 sample | 3 bytes | 4 flow | 5 epoch, step << 32 | 6 samples, peer << 32 |
    7 kind, place << 8, worker << 16, rank << 32
"""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.trace.schema import NO_PEER, NO_STEP, SOURCE, Kind

_WAIT, _STEP, _READ, _HIT = int(Kind.WAIT), int(Kind.STEP), int(Kind.READ), int(Kind.HIT)
_DECODE, _SLOT, _FIRST_BESIDE, _LAST_BESIDE = int(Kind.DECODE), int(Kind.SLOT), int(Kind.SAVE), int(Kind.LOAD)
_START, _LAST_KIND, _SOURCE, _NO_STEP, _NO_PEER = int(Kind.START), int(max(Kind)), SOURCE, NO_STEP, NO_PEER
#: A stage's number, as `Stage.of_number` takes it, is below it.
STAGES = (_LAST_KIND + 1) << 9
#: The keys by which spans are looked up.
_BY_BATCH, _BY_FLOW, _BY_SAMPLE, KEYS = 0, 1, 2, 3
#: Columns of an epoch's integers and numbers, of a stage's.
_SAMPLES, _BATCHES, _IS_THERE = 0, 1, 2
_FIRST, _LAST, _STALL, _OWN, _CAUSES = 0, 1, 2, 3, 4
_EPOCH, _STAGE, _CALLS, _OF_SAMPLES, _OF_BYTES = 0, 1, 2, 3, 4
_SECONDS, _SLOWEST = 0, 1
#: Columns of causes, in the order of `Cause`.
(
    _SOURCE_READ,
    _TIER_READ,
    _DECODING,
    _NO_SLOT,
    _STARTING,
    _HAND_OVER,
    _NO_BATCH,
    _UNSEEN,
) = range(_CAUSES, _CAUSES + 8)
#: Steps loaded together that are looked for, at most.
_MOST_JOINT = 4096
#: Links followed for each span, at most: where many spans have one key, NumPy's sorting is quicker.
_MOST_LINKS = 32
_NEVER = -np.inf
#: Of an epoch's numbers.
COLUMNS = _UNSEEN + 1


def low(word: Any) -> Any:
    """Return the lower half of a word, with its sign."""
    return ((word & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000


def kind_of(words: Any, span: Any) -> Any:
    return words[8 * span + 7] & 0xFF


def place_of(words: Any, span: Any) -> Any:
    return (((words[8 * span + 7] >> 8) & 0xFF) ^ 0x80) - 0x80


def worker_of(words: Any, span: Any) -> Any:
    return (words[8 * span + 7] >> 16) & 0xFFFF


def rank_of(words: Any, span: Any) -> Any:
    return (words[8 * span + 7] >> 32) & 0xFFFFFFFF


def bucket_of(by: Any, key: Any, table: Any) -> Any:
    """Return the bucket of a key: of an epoch and step as a span has them in one word, a flow, or a sample."""
    mixed = (key ^ (key >> 29)) * 0x9E3779B1 + by * 0x85EBCA6B
    return (mixed ^ (mixed >> 17)) & (table.size - 1)


def link(by: Any, key: Any, span: Any, table: Any, links: Any) -> None:
    """Put a span at the front of the list of a key's bucket."""
    bucket = bucket_of(by, key, table)
    links[KEYS * span + by] = table[bucket]
    table[bucket] = KEYS * span + by


def latest(
    words: Any, times: Any, by: Any, key: Any, rank: Any, kind: Any, until: Any, table: Any, links: Any
) -> Any:
    """Return the span of a key and kind that ends last by then, of several the last in order; -1 where none is."""
    found = -1
    at = table[bucket_of(by, key, table)]
    while at >= 0:
        span = at // KEYS
        word = 4 if by == _BY_FLOW else 2 if by == _BY_SAMPLE else 5
        if at % KEYS == by and words[8 * span + word] == key and kind_of(words, span) == kind:
            is_in_time = rank_of(words, span) == rank and times[8 * span + 1] <= until
            # A hit without duration was not queued for.
            is_meant = kind != _HIT or times[8 * span + 1] > times[8 * span]
            if is_in_time and is_meant and (found < 0 or times[8 * span + 1] > times[8 * found + 1]):
                found = span
        at = links[at]
        links[links.size - 1] += 1
    return found


def first_of_joint(words: Any, key: Any, rank: Any, longest: Any, table: Any, links: Any) -> Any:
    """Return the key of the first of the steps that one was loaded together with: its own where it was alone."""
    for back in range(longest + 1):
        at, found = table[bucket_of(_BY_BATCH, key - (back << 32), table)], -1
        while at >= 0:
            span = at // KEYS
            is_it = at % KEYS == _BY_BATCH and words[8 * span + 5] == key - (back << 32)
            if is_it and kind_of(words, span) == _DECODE and words[8 * span + 3] > 0:
                found = span if rank_of(words, span) == rank and span > found else found
            at = links[at]
            links[links.size - 1] += 1
        if found >= 0:
            return key - (back << 32) if back <= words[8 * found + 3] else key
    return key


def latest_move(words: Any, times: Any, critical: Any, kind: Any, table: Any, links: Any) -> Any:
    """Return what brought the bytes of a critical item: by its flow, else for its batch, or by its sample."""
    rank, end, found = rank_of(words, critical), times[8 * critical + 1], -1
    if words[8 * critical + 4] != 0:
        found = latest(words, times, _BY_FLOW, words[8 * critical + 4], rank, kind, end, table, links)
    if found < 0 and (words[8 * critical + 6] & 0xFFFFFFFF) > 1:
        begin = times[8 * critical]
        return latest(words, times, _BY_BATCH, words[8 * critical + 5], rank, kind, begin, table, links)
    if found < 0:
        found = latest(words, times, _BY_SAMPLE, words[8 * critical + 2], rank, kind, end, table, links)
    return found


def overlap(phase_begin: Any, phase_end: Any, begin: Any, end: Any) -> Any:
    return max(min(phase_end, end) - max(phase_begin, begin), 0.0)


def add_causes(
    words: Any, times: Any, wait: Any, longest: Any, row: Any, numbers: Any, table: Any, links: Any
) -> None:
    """Split one wait into its causes, as `penstock.trace.causes` has them, and add them to its epoch's."""
    begin, end, rank = times[8 * wait], times[8 * wait + 1], rank_of(words, wait)
    if words[8 * wait + 5] >> 32 == _NO_STEP:
        numbers[row, _NO_BATCH] += end - begin
        return
    batch = first_of_joint(words, words[8 * wait + 5], rank, longest, table, links)
    critical = latest(words, times, _BY_BATCH, batch, rank, _DECODE, end, table, links)
    if critical < 0:
        numbers[row, _UNSEEN] += end - begin
        return
    decoded = times[8 * critical + 1]
    slot = latest(words, times, _BY_BATCH, batch, rank, _SLOT, decoded, table, links)
    read = latest_move(words, times, critical, _READ, table, links)
    hit = latest_move(words, times, critical, _HIT, table, links)
    wanted = times[8 * slot] if slot >= 0 else _NEVER
    granted = times[8 * slot + 1] if slot >= 0 else _NEVER
    read_end = max(granted, times[8 * read + 1]) if read >= 0 else granted
    hit_end = max(read_end, times[8 * hit + 1]) if hit >= 0 else read_end
    read_begin, hit_begin = granted, read_end
    if read >= 0 and worker_of(words, read) == worker_of(words, critical):
        read_begin = min(max(times[8 * read], granted), read_end)
    if hit >= 0 and worker_of(words, hit) == worker_of(words, critical):
        hit_begin = min(max(times[8 * hit], read_end), hit_end)
    reading = overlap(read_begin, read_end, begin, end)
    is_from_source = read >= 0 and place_of(words, read) == _SOURCE
    source = reading if is_from_source else 0.0
    tier = (0.0 if is_from_source else reading) + overlap(hit_begin, hit_end, begin, end)
    decoding = overlap(granted, read_begin, begin, end) + overlap(read_end, hit_begin, begin, end)
    decoding += overlap(hit_end, decoded, begin, end)
    started, starting = (
        latest(words, times, _BY_BATCH, words[8 * wait + 5], rank, _START, end, table, links),
        0.0,
    )
    if started >= 0:
        starting = min(overlap(times[8 * started], times[8 * started + 1], begin, end), decoding)
    waiting = overlap(wanted, granted, begin, end)
    numbers[row, _SOURCE_READ] += source
    numbers[row, _TIER_READ] += tier
    numbers[row, _DECODING] += decoding - starting
    numbers[row, _STARTING] += starting
    numbers[row, _NO_SLOT] += waiting
    numbers[row, _HAND_OVER] += end - begin - (source + tier + decoding + waiting)


def bucket_of_edges(edges: Any, seconds: Any) -> Any:
    """Return how many edges are at most so many seconds, as `np.searchsorted` does."""
    low_edge, high_edge = 0, edges.size
    while low_edge < high_edge:
        middle = (low_edge + high_edge) >> 1
        if edges[middle] <= seconds:
            low_edge = middle + 1
        else:
            high_edge = middle
    return low_edge


def sum_spans(
    words: Any,
    times: Any,
    before: Any,
    edges: Any,
    table: Any,
    links: Any,
    stage_counts: Any,
    stage_numbers: Any,
    buckets: Any,
    epoch_counts: Any,
    epoch_numbers: Any,
    row_of: Any,
) -> Any:
    """Sum spans up by epoch, and by epoch and stage.

    before: the first so many spans are only what waits hung on.
    table: int64[a power of two]. links: int64[3 n + 1], the last counts steps. row_of: int64[epochs * STAGES].
    Returns: the first epoch, how many there are up to the last, and rows of stages; no epochs where NumPy has to do it.
    """
    count, longest = words.size // 8, 0
    first, last = 1 << 40, -(1 << 40)
    table[:] = -1
    links[links.size - 1] = 0
    for span in range(count):
        kind, step = kind_of(words, span), words[8 * span + 5] >> 32
        if _FIRST_BESIDE <= kind <= _LAST_BESIDE:
            return 0, 0, 0
        if span >= before:
            epoch = low(words[8 * span + 5])
            first, last = min(first, epoch), max(last, epoch)
        if kind == _DECODE:
            longest = max(longest, words[8 * span + 3])
        is_move = kind in (_READ, _HIT)
        if step != _NO_STEP and (is_move or kind in (_DECODE, _SLOT, _START)):
            link(_BY_BATCH, words[8 * span + 5], span, table, links)
        if is_move:
            link(_BY_FLOW, words[8 * span + 4], span, table, links)
            link(_BY_SAMPLE, words[8 * span + 2], span, table, links)
    width, rows = last - first + 1, 0
    if width > epoch_counts.shape[0] or longest > _MOST_JOINT:
        return 0, 0, 0
    row_of[: width * STAGES] = -1
    epoch_counts[:width], epoch_numbers[:width] = 0, 0.0
    epoch_numbers[:width, _FIRST], epoch_numbers[:width, _LAST] = -_NEVER, _NEVER
    for span in range(before, count):
        kind, row = kind_of(words, span), low(words[8 * span + 5]) - first
        begin, end = times[8 * span], times[8 * span + 1]
        samples = words[8 * span + 6] & 0xFFFFFFFF
        epoch_counts[row, _IS_THERE] = 1
        if kind in (_WAIT, _STEP):
            epoch_numbers[row, _FIRST] = min(epoch_numbers[row, _FIRST], begin)
            epoch_numbers[row, _LAST] = max(epoch_numbers[row, _LAST], end)
            epoch_numbers[row, _STALL if kind == _WAIT else _OWN] += end - begin
        if kind == _DECODE:
            epoch_counts[row, _SAMPLES] += samples
        if kind == _WAIT:
            epoch_counts[row, _BATCHES] += 1 if words[8 * span + 5] >> 32 != _NO_STEP else 0
            add_causes(words, times, span, longest, row, epoch_numbers, table, links)
            if links[links.size - 1] > _MOST_LINKS * count:
                return 0, 0, 0
        if kind > _LAST_KIND:
            continue
        of_peer = 1 if words[8 * span + 6] >> 32 != _NO_PEER else 0
        stage = kind << 9 | (place_of(words, span) + 128) << 1 | of_peer
        at = row_of[row * STAGES + stage]
        if at < 0:
            if rows == stage_counts.shape[0]:
                return 0, 0, 0
            at = row_of[row * STAGES + stage] = rows
            rows += 1
            buckets[at], stage_counts[at], stage_numbers[at] = 0, 0, 0.0
            stage_counts[at, _EPOCH], stage_counts[at, _STAGE] = row, stage
        stage_counts[at, _CALLS] += 1
        stage_counts[at, _OF_SAMPLES] += samples
        stage_counts[at, _OF_BYTES] += 0 if kind == _DECODE else words[8 * span + 3]
        stage_numbers[at, _SECONDS] += end - begin
        stage_numbers[at, _SLOWEST] = max(stage_numbers[at, _SLOWEST], end - begin)
        buckets[at, bucket_of_edges(edges, end - begin)] += 1
    return first, width, rows
