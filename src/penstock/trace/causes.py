"""What a consumer waited for: the one judgement of a trace, by the critical item's life.

    batch wants     slot        the sample's       timed hit    decode       consumer
    a slot          granted     read ends          ends         ends         has the batch
      |--no free slot--|--source or tier read--|--tier read--|--decode--|--hand-over--|
                 |<------------------- the consumer's wait, anywhere on it ---------->|

The critical item of a batch is the group whose decoding ended last; a group is one sample or many, which one call
moved or loaded. What brought its bytes is the read or hit of its flow. Where there is none, it is that of its sample;
for a group, whose bytes then came by several, the last one for its batch that ended before it was decoded.
A batch of several steps is ready for all of them at once.
Each phase counts as far as it overlaps the wait. Waiting for a read to begin counts as the read; waiting for a thread
that decodes counts as decode, also where that thread reads by itself; but for the time in which worker processes were
not ready. A wait that ended without a batch has no such item and is a cause of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from penstock.trace.schema import NO_FLOW, NO_STEP, SOURCE, Kind, Spans, choose_spans

_BATCH = ("rank", "epoch", "step")
_FLOW = ("rank", "flow")
_SAMPLE = ("rank", "sample")
# As plain numbers, see `penstock.trace.metrics`.
_READ, _HIT, _DECODE, _SLOT = Kind.READ.value, Kind.HIT.value, Kind.DECODE.value, Kind.SLOT.value
_START = Kind.START.value


class Cause(StrEnum):
    """What a consumer waited for."""

    SOURCE_READ = "source read"
    TIER_READ = "tier read"
    DECODE = "decode"
    NO_FREE_SLOT = "no free slot"
    START = "start of worker processes"
    HAND_OVER = "hand-over"
    #: No batch came: an error or an interrupt ended the wait, or the epoch was over.
    NO_BATCH = "no batch"
    #: The trace holds no `DECODE` span of the batch: a foreign loader, or spans that were dropped.
    UNSEEN = "unseen"


@dataclass(frozen=True, slots=True, eq=False)
class Critical:
    """What m waits hung on: the critical item's spans, zero where there is none, and the seconds of each cause.

    seen: bool[m], whether a `decode` is known. decode: SPAN[m], the group that was ready last.
    has_slot, slot: bool[m] and SPAN[m], when its batch wanted a slot and got it.
    was_read, read: bool[m] and SPAN[m], the read that brought its bytes. was_hit, hit: likewise the timed hit.
    parts: float64[m] seconds for each of `Cause`, in that order; together each wait's duration.
    """

    seen: NDArray[np.bool_]
    decode: Spans
    has_slot: NDArray[np.bool_]
    slot: Spans
    was_read: NDArray[np.bool_]
    read: Spans
    was_hit: NDArray[np.bool_]
    hit: Spans
    parts: dict[Cause, NDArray[np.float64]]


def stall_causes(spans: Spans, waits: Spans) -> dict[Cause, NDArray[np.float64]]:
    """Split waits into their causes.

    spans: SPAN[n], the trace, in any order.
    waits: SPAN[m], of kind `WAIT`.
    Returns: float64[m] seconds for each of `Cause`, in that order; together each wait's duration.
    """
    return critical_items(spans, waits).parts


def critical_items(spans: Spans, waits: Spans) -> Critical:
    """Return what each wait hung on, and its causes. Arguments are those of `stall_causes`."""
    kind = np.ascontiguousarray(spans["kind"])
    decodes, slots = choose_spans(spans, kind == _DECODE), choose_spans(spans, kind == _SLOT)
    begin, end = waits["start"], waits["end"]
    has_batch = waits["step"] != NO_STEP
    askers = loaded_with(decodes, waits)
    seen, critical = latest_of(decodes, _BATCH, askers, end)
    seen &= has_batch
    decoded = np.where(seen, critical["end"], -np.inf)
    has_slot, slot = latest_of(slots, _BATCH, askers, decoded)
    was_read, read = _latest_move(choose_spans(spans, kind == _READ), critical, seen)
    hits = choose_spans(spans, kind == _HIT)
    # A hit without duration was not queued for: until then the sample waited for a thread to decode it.
    was_hit, hit = _latest_move(choose_spans(hits, hits["end"] > hits["start"]), critical, seen)

    wanted = np.where(has_slot, slot["start"], -np.inf)
    granted = np.where(has_slot, slot["end"], -np.inf)
    read_end = np.maximum(granted, np.where(was_read, read["end"], -np.inf))
    hit_end = np.maximum(read_end, np.where(was_hit, hit["end"], -np.inf))

    def overlap(phase_begin: NDArray[np.float64], phase_end: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.where(
            seen, np.maximum(np.minimum(phase_end, end) - np.maximum(phase_begin, begin), 0.0), 0.0
        )

    # A thread that reads what it decodes was not waited for by a read, but by its decoding.
    own_read = was_read & (read["worker"] == critical["worker"])
    read_begin = np.where(own_read, np.clip(read["start"], granted, read_end), granted)
    own_hit = was_hit & (hit["worker"] == critical["worker"])
    hit_begin = np.where(own_hit, np.clip(hit["start"], read_end, hit_end), read_end)

    reading = overlap(read_begin, read_end)
    from_source = was_read & (read["place"] == SOURCE)
    decoding = overlap(granted, read_begin) + overlap(read_end, hit_begin) + overlap(hit_end, decoded)
    _, started = latest_of(choose_spans(spans, kind == _START), _BATCH, waits, end)
    starting = np.minimum(overlap(started["start"], started["end"]), decoding)
    parts = {
        Cause.SOURCE_READ: np.where(from_source, reading, 0.0),
        Cause.TIER_READ: np.where(from_source, 0.0, reading) + overlap(hit_begin, hit_end),
        Cause.DECODE: decoding - starting,
        Cause.NO_FREE_SLOT: overlap(wanted, granted),
        Cause.START: starting,
    }
    explained = np.sum(list(parts.values()), axis=0)
    parts[Cause.HAND_OVER] = np.where(seen, end - begin - explained, 0.0)
    parts[Cause.NO_BATCH] = np.where(has_batch, 0.0, end - begin)
    parts[Cause.UNSEEN] = np.where(seen | ~has_batch, 0.0, end - begin)
    return Critical(seen, critical, has_slot, slot, was_read, read, was_hit, hit, parts)


def loaded_with(decodes: Spans, askers: Spans) -> Spans:
    """Return the askers with the first of the steps that theirs was loaded together with, as `decodes` name it."""
    joint = choose_spans(decodes, decodes["bytes"] > 0)
    if not joint.size:
        return askers
    joint["end"] = joint["step"]
    found, first = latest_of(joint, ("rank", "epoch"), askers, askers["step"].astype(np.float64))
    found &= askers["step"] <= first["step"] + first["bytes"]
    renamed = askers.copy()
    renamed["step"][found] = first["step"][found]
    return renamed


def latest_of(
    spans: Spans, fields: tuple[str, ...], askers: Spans, deadlines: NDArray[np.float64]
) -> tuple[NDArray[np.bool_], Spans]:
    """Find for each asker the span that equals it in `fields` and ends last at or before its deadline.

    Of spans that end together, the last in `spans` is taken.
    Returns: found bool[askers]; SPAN[askers], zero where not found.
    """
    return _taken(spans, _latest_places(spans, fields, askers, deadlines))


def _latest_places(
    spans: Spans, fields: tuple[str, ...], askers: Spans, deadlines: NDArray[np.float64]
) -> NDArray[np.intp]:
    """Return where in `spans` stands what `latest_of` finds, -1 where nothing is found: intp[askers]."""
    if not spans.size or not askers.size:
        return np.full(askers.size, -1)
    keys = [np.concatenate([spans[field], askers[field]]) for field in fields]
    keys = [key for key in keys if (key != key[0]).any()]  # mostly of one rank and one epoch: less to sort by
    # Stable, and the spans come first: at one time, they come before who asks.
    order = np.lexsort((np.concatenate([spans["end"], deadlines]), *keys))
    asks = order >= spans.size
    latest_place = np.maximum.accumulate(np.where(asks, -1, np.arange(order.size)))[asks]
    latest, asker = order[np.maximum(latest_place, 0)], order[asks]
    matches = latest_place >= 0
    for key in keys:
        matches &= key[latest] == key[asker]
    places = np.empty(askers.size, np.intp)
    places[asker - spans.size] = np.where(matches, latest, -1)
    return places


def _taken(spans: Spans, places: NDArray[np.intp]) -> tuple[NDArray[np.bool_], Spans]:
    """Return which places are not -1, and the spans at these, zero elsewhere."""
    found = places >= 0
    if not found.any():
        return found, np.zeros(places.size, spans.dtype)
    taken: Spans = spans.take(places, mode="clip")
    if not found.all():
        taken[~found] = np.zeros((), spans.dtype)
    return found, taken


def _latest_move(moves: Spans, critical: Spans, seen: NDArray[np.bool_]) -> tuple[NDArray[np.bool_], Spans]:
    """Find what brought the bytes of each critical item that is seen, as the module's first lines have it."""
    places = np.full(critical.size, -1)
    is_group = critical["samples"] > 1
    for fields, asks, until in (
        (_FLOW, critical["flow"] != NO_FLOW, "end"),
        (_BATCH, is_group, "start"),
        (_SAMPLE, ~is_group, "end"),
    ):
        asking = np.flatnonzero(asks & seen & (places < 0))
        if not moves.size or not asking.size:
            continue
        askers = critical.take(asking)
        # A sort of those alone that can be meant, where most cannot.
        which = np.arange(moves.size)
        if moves.size > 2 * asking.size:
            which = np.flatnonzero(np.isin(moves[fields[-1]], askers[fields[-1]]))
        found = _latest_places(moves.take(which), fields, askers, askers[until])
        places[asking[found >= 0]] = which[found[found >= 0]]
    return _taken(moves, places)
