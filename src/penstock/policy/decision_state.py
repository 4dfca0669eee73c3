"""The arrays that `decisions` work on: made, grown, and looked at from two sides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.machine import Machine
from penstock.machine_code import Signature
from penstock.policy import decisions as d
from penstock.policy.decisions import State
from penstock.policy.fetch_costs import cost_tables
from penstock.policy.forms import CropForm
from penstock.policy.merge import AllExtents, largest_paying_hole
from penstock.policy.placement import Kept

#: A NamedTuple of arrays.
Tables = TypeVar("Tables", bound=tuple[Any, ...])

#: Virtual time keeps sample ids in 32 bits.
_MOST_SAMPLES = 1 << 31
#: Copies of samples keep a rank's number in 16 bits, with a sign.
_MOST_RANKS = (1 << 15) - 1

#: Numbers of a state that are looked at together as it grows: 64 KiB.
_COPIED_AT_ONCE = 8192

#: A group has so many samples at most where some of them are read together, or a local batch of them.
_MERGED_SAMPLES = 256

#: What `decisions.event` takes when it is compiled: the state, and six numbers.
EVENT = Signature(
    (
        ("int64[:]", "float64[:]", *["int64[:]"] * 2, "int32[:]", "int16[:, :]", "int32[:]", "int64[:, :]"),
        *(["int64"] * 5),
        "float64",
    ),
    ("int64",),
)


#: Ends of lists that are empty at first.
_NONE_YET = (
    *(d.FIRST_URGENT, d.LAST_URGENT, d.FIRST_SLOT, d.LAST_SLOT, d.FREE_ENTRY),
    *(d.FIRST_FREE, d.LAST_FREE, d.FIRST_GIFT, d.LAST_GIFT),
)


def new_state(
    sizes_bytes: NDArray[np.int64],
    kept: Sequence[Kept],
    machine: Machine,
    *,
    slots: int,
    local_batch: int,
    readers: int,
    undecoded_bytes: int,
    own_bytes: int = d.OWN_BYTES,
    loads_all: bool = False,
    least_load_seconds: float = d.LEAST_LOAD_SECONDS,
    extents: AllExtents | None = None,
    due: Sequence[Kept] = (),
    reads_peers: int = 0,
    hands_on: bool = False,
    spares: Sequence[NDArray[np.int64]] = (),
    last_batches: Sequence[NDArray[np.int32]] = (),
    held: Mapping[int, Mapping[int, NDArray[np.int64]]] | None = None,
    promised: NDArray[np.int64] | None = None,
    reads_for_others: bool = False,
    maps_peers: bool = False,
    only: int | None = None,
) -> State:
    """Return the state before the first event. The rank with the number r is known as r * `decisions.NUMBERS`.

    sizes_bytes: int64[samples], as stored. kept: what each rank keeps; its length is the number of ranks.
    promised: samples that the rank which keeps them reads before any other does; reads_for_others: ahead of need.
    only: the rank that decides here, known as 0, if each has its own state. hands_on: samples go from reader to reader.
    due: what each rank keeps besides, and is handed by whoever reads it first.
    reads_peers: see `decisions.READS_PEERS`. maps_peers: other ranks' tiers are memory that they map.
    spares: of each rank, what follows where a sample that it keeps is read no more; empty where tiers drop nothing.
    last_batches: then, of each rank, the number of the last batch that has each of `kept`, `due` and `spares`, or -1.
    held: by rank and tier, samples that are there from the start; those that no tier shall keep are passed by.
    slots, local_batch: how many batch slots each rank has, all free, of so many samples.
    readers: moves under way at most of each rank, half of them for no batch. *_bytes: see `StagingLimits`.
    loads_all: a Load takes all that a batch has left. least_load_seconds: see `StagingLimits`.
    extents: of all samples, where the source gives them.
    Raises: ConfigError for 2^31 samples or copies and more, or 2^15 ranks that keep some.
    """
    deciding = list(range(len(kept))) if only is None else [only]
    ranks, tiers, samples = len(deciding), len(machine.storage) - 1, sizes_bytes.size
    reads_peers = reads_peers if len(kept) > 1 and tiers > 0 else 0
    gives = hands_on or any(each.samples.size for each in due)
    origins = tiers + 2 + (tiers if reads_peers or gives else 0)
    listed = sum(each.samples.size for each in (*kept, *due)) + sum(each.size for each in spares)
    _check_counts(samples, len(kept), listed, hands_on=hands_on)
    group = max(local_batch, 1 if extents is None else _MERGED_SAMPLES)
    mean_bytes = float(sizes_bytes.mean()) if samples else 0.0
    costs = cost_tables(machine, readers, max(mean_bytes, 1.0), maps_peers=maps_peers)[:origins]
    floats = _floats_of(costs, least_load_seconds)
    ints, numbers, rows = _empty_numbers(ranks, origins, group, 5 if hands_on else 3)
    numbers[:, [d.TIERS, d.LOADS_ALL, d.DROPS]] = tiers, loads_all, len(spares) > 0
    numbers[:, [d.READS_PEERS, d.HANDS_ON, d.HAS_HEIRS]] = reads_peers, hands_on, gives
    numbers[:, [d.READERS, d.MOST_READERS, d.FILL_LIMIT]] = readers, readers, max(1, readers // 2)
    numbers[:, [d.PASSING_LIMIT, d.OWN_LIMIT, d.SOURCE_TOGETHER]] = undecoded_bytes, own_bytes, 1
    numbers[:, [d.READS_FOR_OTHERS, d.SAMPLE_BYTES]] = local_batch * reads_for_others, int(mean_bytes)
    begins = len(kept) + np.arange(ranks) * floats.size
    numbers[:, d.RANK], numbers[:, d.PACE] = deciding, begins + costs.size
    # Workers deal with no other ranks; a disk may have all samples; and a Load of a whole batch waits for its readers.
    found = [ids for tiers_of in (held or {}).values() for ids in tiers_of.values()]
    if not (gives or reads_peers or loads_all or any(ids.size for ids in found)):
        numbers[:, d.PROBES_LEFT] = _first_probes(costs, mean_bytes)
    numbers[:, d.HOLE_BYTES], lying = _where_samples_lie(extents, machine, mean_bytes)
    rows[:, : tiers + 2, d.PROBE] = 1
    _describe_tiers(rows, machine)
    rows[:, :, d.COSTS] = begins[:, None] + np.arange(origins) * costs.shape[1]
    extra = [Kept(spare, np.zeros(spare.size, np.int8)) for spare in spares]
    table = _no_copies(samples) if hands_on else _copies(kept, due, extra, last_batches, samples)
    _promise(*table[:2], promised)
    _hold(*table[:2], held or {})
    state = State(
        ints=ints,
        floats=np.concatenate([np.full(len(kept), -np.inf), np.tile(floats, ranks)]),
        sizes=np.ascontiguousarray(sizes_bytes, np.int64),
        fill_samples=_list_fills(rows, [kept[rank] for rank in deciding], spares, machine, sizes_bytes),
        **table._asdict(),
        extents=lying,
    )
    return _with_free_slots(state, ranks, slots)


def _where_samples_lie(
    extents: AllExtents | None, machine: Machine, mean_bytes: float
) -> tuple[int, NDArray[np.int64]]:
    """Return what `State.extents` has, and the largest hole that a read pays for."""
    if extents is None:
        return 0, np.zeros((0, d.PLACES), np.int64)
    price = partial(machine.source_seconds, clients=machine.ranks, sample_bytes=max(mean_bytes, 1.0))
    return int(largest_paying_hole(mean_bytes, price)), extents.table


def _check_counts(samples: int, ranks: int, copies: int, *, hands_on: bool) -> None:
    if samples >= _MOST_SAMPLES:
        raise ConfigError(
            f"the data set has {samples:,} samples; a loader takes fewer than {_MOST_SAMPLES:,}"
        )
    if copies >= _MOST_SAMPLES or ((copies or hands_on) and ranks > _MOST_RANKS):
        raise ConfigError(
            f"{ranks:,} ranks keep {copies:,} samples together; up to {_MOST_RANKS:,} may keep fewer than "
            f"{_MOST_SAMPLES:,}: give them less memory"
        )


def _with_free_slots(state: State, ranks: int, slots: int) -> State:
    grown = with_slots(state, slots)
    for rank in range(0, ranks * d.NUMBERS, d.NUMBERS):
        grown.ints[rank + d.SLOTS_IN_USE] = slots
        for index in range(slots):
            d.free_slot(grown, rank, slot_of(grown, rank, index))
    return grown


def _first_probes(costs: NDArray[np.float64], mean_bytes: float) -> int:
    """Return how many own reads of workers show first how fast the source is; 0 where it is surely slow."""
    # What a machine says of a store that nobody measured is a guess, good to a factor of two.
    seconds = costs[0, d.LATENCY] + mean_bytes / costs[0, d.RATES]
    return d.FIRST_PROBES if seconds < 2 * d.TRIED_AGAIN_SECONDS else 0


def _empty_numbers(
    ranks: int, origins: int, group: int, columns: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return numbers of which nothing is known but where they lie, and two views of them.

    columns: arrays of a group's size that each rank has.
    Returns: all; int64[ranks, NUMBERS]; the rows of all origins, int64[ranks, origins, ROW_COLUMNS].
    """
    rows_at = ranks * d.NUMBERS
    groups_at = rows_at + ranks * origins * d.ROW_COLUMNS
    ints = np.zeros(groups_at + ranks * columns * group, np.int64)
    numbers = ints[:rows_at].reshape(ranks, d.NUMBERS)
    each = np.arange(ranks)
    numbers[:, _NONE_YET] = -1
    numbers[:, d.STAGES_UNTIL] = d.ALWAYS
    numbers[:, d.TRIED_SIZE] = 1
    numbers[:, d.ROWS] = rows_at + each * origins * d.ROW_COLUMNS
    numbers[:, d.GROUP_SIZE] = group
    numbers[:, d.GROUP] = groups_at + each * columns * group
    numbers[:, d.MARKS] = numbers[:, d.GROUP] + group
    numbers[:, d.COMING] = numbers[:, d.MARKS] + group
    return ints, numbers, ints[rows_at:groups_at].reshape(ranks, origins, d.ROW_COLUMNS)


def _describe_tiers(rows: NDArray[np.int64], machine: Machine) -> None:
    """Say which tiers are no memory, and how many moves at most read from these at once."""
    rows[:, :, d.MOST_IN_FLIGHT] = d.ANY_NUMBER
    for number, tier in enumerate(machine.storage[1:], start=1):
        rows[:, number + 1, d.IS_ELSEWHERE] = not tier.is_memory
        if not tier.is_memory:
            rows[:, number + 1, d.MOST_IN_FLIGHT] = tier.threads


def _list_fills(
    rows: NDArray[np.int64],
    kept: Sequence[Kept],
    spares: Sequence[NDArray[np.int64]],
    machine: Machine,
    sizes_bytes: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Return what the tiers of all ranks are filled with, one after the other, and then the spares.

    rows: int64[ranks, origins, ROW_COLUMNS]; gets where in this each tier's part is.
    """
    fills: list[NDArray[np.int64]] = []
    begin = 0
    for rank, keeps in enumerate(kept):
        for tier in range(1, len(machine.storage)):
            is_here = keeps.tiers == tier
            fill = keeps.samples if is_here.all() else keeps.samples[is_here]
            rows[rank, tier + 1, d.FILL_NEXT], begin = begin, begin + fill.size
            rows[rank, tier + 1, d.FILL_END] = begin
            fills.append(fill)
            if spares and fill.size:
                rows[rank, tier + 1, d.SPACE] = machine.storage[tier].capacity_bytes - sizes_bytes[fill].sum()
    for rank, spare in enumerate(spares):
        rows[rank, 1, d.FILL_NEXT], begin = begin, begin + spare.size
        rows[rank, 1, d.FILL_END] = begin
        fills.append(spare)
    some = [fill for fill in fills if fill.size]
    # Of one rank and tier this is the placement's own array, 8 bytes a sample.
    return some[0] if len(some) == 1 else np.concatenate([*some, np.empty(0, np.int64)])


def _floats_of(costs: NDArray[np.float64], least_load_seconds: float) -> NDArray[np.float64]:
    """Return the floats of one rank: what reads cost, and that nothing is known of Loads."""
    pace = np.zeros(d.TRIAL_SECONDS + d.TRIED_LOADS)
    pace[[d.HALF_SECONDS, d.LEAST_SECONDS]] = np.inf, least_load_seconds
    return np.concatenate([costs.ravel(), pace])


def _promise(
    copy_begin: NDArray[np.int32], copies: NDArray[np.int16], promised: NDArray[np.int64] | None
) -> None:
    """Take note of samples that the rank which keeps them reads before any other does."""
    if promised is not None:
        is_promised = np.zeros(copy_begin.size - 1, bool)
        is_promised[promised] = True
        copies[np.repeat(is_promised, np.diff(copy_begin)), d.COPY_STATE] = d.PROMISED


def _hold(
    copy_begin: NDArray[np.int32],
    copies: NDArray[np.int16],
    held: Mapping[int, Mapping[int, NDArray[np.int64]]],
) -> None:
    """Take note of what tiers of ranks have already, whether they shall keep it or another one."""
    for rank, tier, ids in ((rank, *each) for rank, by_tier in held.items() for each in by_tier.items()):
        is_held = np.zeros(copy_begin.size - 1, bool)
        is_held[ids] = True
        mine = np.flatnonzero(np.repeat(is_held, np.diff(copy_begin)) & (copies[:, d.COPY_RANK] == rank))
        copies[mine, d.COPY_STATE] = np.where(copies[mine, d.COPY_TIER] == tier, d.PRESENT, d.LEFT + tier)


def with_slots(state: State, slots: int) -> State:
    """Return the state with more slots, which are not free yet; what is known by where it begins stays there."""
    old = state.ints
    ranks = range(0, int(old[d.ROWS]), d.NUMBERS)
    group, readers, known_slots = (
        int(old[column]) for column in (d.GROUP_SIZE, d.MOST_READERS, d.SLOT_COUNT)
    )
    # A place has one entry at most. Moves that nobody waits for any more, and fills, have a group each; and what waits
    # to be handed on.
    places = (2 if old[d.HAS_HEIRS] else 1) * group
    known = known_slots * places + readers * group + 1 if known_slots else 0
    count = slots * places + readers * group + 1
    table = 1 << (2 * count).bit_length()
    more = slots - known_slots
    lengths = (
        more * d.SLOT_COLUMNS,
        more * group * d.PLACE_COLUMNS,
        (count - known) * d.ENTRY_COLUMNS,
        slots,
        table,
        slots,
        count,
    )
    # Each entry is dropped and moved once at most, each place loaded, each slot staged and complete.
    out = d.HEAD * (1 + 2 * slots + count + slots * group)
    out += (1 + d.MOVE_COLUMNS) * count + (1 + d.LOAD_COLUMNS) * slots * group
    # Most pages of entries are never written, and so take no memory: a copy passes by what is still zero.
    ints = np.zeros(old.size + len(ranks) * sum(lengths) + out, np.int64)
    for begin in range(0, old.size, _COPIED_AT_ONCE):
        part = old[begin : begin + _COPIED_AT_ONCE]
        if part.any():
            ints[begin : begin + part.size] = part
    grown = state._replace(ints=ints)
    begin = old.size
    for rank in ranks:
        begins = begin + np.concatenate([[0], np.cumsum(lengths)])
        slots_at, places_at, entries_at, list_at, table_at, ended_at, released_at, begin = begins.tolist()
        listed = np.concatenate(
            [
                old[old[rank + d.SLOTS] :][:known_slots],
                np.arange(slots_at, places_at, d.SLOT_COLUMNS),
            ]
        )
        ints[list_at:table_at] = listed
        new = ints[slots_at:places_at].reshape(more, d.SLOT_COLUMNS)
        new[:, d.SLOT_INDEX] = np.arange(known_slots, slots)
        new[:, d.SLOT_PLACES] = places_at + np.arange(more) * group * d.PLACE_COLUMNS
        rows = ints[places_at:entries_at].reshape(more, group, d.PLACE_COLUMNS)
        rows[:, :, d.PLACE_SLOT] = np.arange(slots_at, places_at, d.SLOT_COLUMNS)[:, None]
        rows[:, :, d.PLACE_ROW] = np.arange(group)
        # Zeros already say that each new entry is free and that the next one follows; after the last come the others.
        ints[list_at - d.ENTRY_COLUMNS + d.ENTRY_AFTER] = old[rank + d.FREE_ENTRY] - list_at
        used = old[old[rank + d.TABLE] :][: old[rank + d.TABLE_MASK] + 1] if known else old[:0]
        for column, value in (
            (d.SLOT_COUNT, slots),
            (d.SLOTS, list_at),
            (d.FREE_ENTRY, entries_at),
            (d.TABLE, table_at),
            (d.TABLE_MASK, table - 1),
            (d.ENDED, ended_at),
            (d.RELEASED, released_at),
            (d.OUT, ints.size - out),
        ):
            ints[rank + column] = value
        for entry in used[used > 0].tolist():
            d.insert(grown, rank, entry)
    return grown


def slot_of(state: State, rank: int, index: int) -> int:
    """Return a slot by its index."""
    slot: int = state.ints[state.ints[rank + d.SLOTS] + index]
    return slot


def parts_of(state: State, machine: Machine) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the numbers of all ranks, int64[ranks, NUMBERS], and the rows of their own tiers, [ranks, tiers, columns].

    Both are views of the state's memory.
    """
    numbers, rows = _rows_of(state)
    return numbers, rows[:, 2 : len(machine.storage) + 1]


def _rows_of(state: State) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the same with the rows of all origins."""
    rows_at = int(state.ints[d.ROWS])
    ranks = rows_at // d.NUMBERS
    origins = int(state.ints[d.GROUP] - rows_at) // (ranks * d.ROW_COLUMNS)
    rows = state.ints[rows_at : state.ints[d.GROUP]].reshape(ranks, origins, d.ROW_COLUMNS)
    return state.ints[:rows_at].reshape(ranks, d.NUMBERS), rows


def keep_in_form(state: State, machine: Machine, form: CropForm, *, maps_peers: bool = False) -> None:
    """Have the tiers of all ranks that a form is for keep samples in it, before the first event.

    maps_peers: whether workers read other ranks' tiers, too, which are memory that they map.
    """
    numbers, rows = _rows_of(state)
    numbers[:, d.FORM_EPOCHS] = form.epochs
    tiers = len(machine.storage) - 1
    for number in range(1, tiers + 1):
        if form.is_in(number):
            tier = rows[:, number + 1]
            tier[:, [d.IS_ELSEWHERE, d.IS_FORM]] = 1
            tier[:, d.FILL_NEXT] = tier[:, d.FILL_END]  # who decodes a sample for a batch fills it
            if maps_peers:
                rows[:, tiers + number + 1 :][:, :1, d.IS_FORM] = 1  # none where no rank has another's


def views_of(tables: Tables) -> Tables:
    """Return memoryviews of the arrays of a state or a clock: plain Python indexes them several times faster."""
    return type(tables)(*(memoryview(array) for array in tables))


class _Copies(NamedTuple):
    """See `State`: int32[samples + 1], int16[n, 3], int32[n] or [0]."""

    copy_begin: NDArray[np.int32]
    copies: NDArray[np.int16]
    copy_last: NDArray[np.int32]


def _no_copies(samples: int) -> _Copies:
    """Of each sample one copy, wherever it goes; it is nowhere yet."""
    copies = np.zeros((samples, 3), np.int16)
    copies[:, d.COPY_RANK] = -1
    copies[:, d.COPY_STATE] = d.GONE
    return _Copies(np.arange(samples + 1, dtype=np.int32), copies, np.empty(0, np.int32))


def _copies(
    kept: Sequence[Kept],
    due: Sequence[Kept],
    spares: Sequence[Kept],
    last_batches: Sequence[NDArray[np.int32]],
    samples: int,
) -> _Copies:
    """All copies, by sample, then by rank."""
    parts = [
        (rank, state, each)
        for rank in range(len(kept))
        for state, of_ranks in ((d.ABSENT, kept), (d.DUE, due), (d.GONE, spares))
        for each in of_ranks[rank : rank + 1]
    ]
    ids = np.concatenate([each.samples for _, _, each in parts])
    begin, is_several = np.zeros(samples + 1, np.int32), False
    if ids.size:  # else the zeros stay pages that nobody has written, which take no memory
        of_sample = np.bincount(ids, minlength=samples)
        is_several = int(of_sample.max()) > 1
        np.cumsum(of_sample, dtype=np.int32, out=begin[1:])
        del of_sample
    at = begin[ids]
    if is_several:  # else no sort: of 10^7 samples it takes a second, on each rank
        at[np.argsort(ids, kind="stable")] = np.arange(ids.size)
    copies, first = np.zeros((ids.size, 3), np.int16), 0
    del ids
    for rank, state, each in parts:
        here = at[first : (first := first + each.samples.size)]
        copies[here, d.COPY_RANK], copies[here, d.COPY_STATE], copies[here, d.COPY_TIER] = (
            rank,
            state,
            each.tiers,
        )
    last = np.empty(len(copies) if last_batches else 0, np.int32)
    if last_batches:
        last[at] = np.concatenate(last_batches)
    return _Copies(begin, copies, last)
