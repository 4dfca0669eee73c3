"""The arrays that `decisions` work on: made, grown, and looked at from two sides."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.machine import Machine
from penstock.machine_code import Signature
from penstock.policy import decisions as d
from penstock.policy.decisions import State
from penstock.policy.fetch_costs import cost_tables
from penstock.policy.placement import Kept

#: Sample ids, like numbers of places and entries, are kept in 32 bits.
_MOST_SAMPLES = 1 << 31

#: What `decisions.event` takes when it is compiled: the state, and six numbers.
EVENT = Signature(
    (
        (
            "int64[:]",
            "float64[:, :]",
            "float64[:, :, :]",
            "int64[:, :, :]",
            "int64[:]",
            "int64[:]",
            "int32[:, :]",
            "int64[:, :, :]",
            "int32[:, :, :]",
            "int32[:, :, :]",
            "int32[:, :]",
            "int64[:, :]",
            "int64[:, :, :]",
            "int64[:, :, :]",
            "int64[:, :]",
            "float64[:, :]",
            "int64[:]",
        ),
        *(["int64"] * 5),
        "float64",
    ),
    ("int64",),
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
) -> State:
    """Return the state before the first event.

    sizes_bytes: int64[samples], as stored. kept: what each rank keeps; its length is the number of ranks.
    slots, local_batch: how many batch slots each rank has, of so many samples.
    readers: moves under way at most of each rank, half of them for no batch. undecoded_bytes: see `StagingLimits`.

    Raises: ConfigError for 2^31 samples and more.
    """
    ranks, places, samples = len(kept), len(machine.storage) + 1, sizes_bytes.size
    if samples >= _MOST_SAMPLES:
        raise ConfigError(
            f"the data set has {samples:,} samples; a loader takes fewer than {_MOST_SAMPLES:,}"
        )
    mean_bytes = float(sizes_bytes.mean()) if samples else 0.0
    rate, costs = cost_tables(machine, readers, max(mean_bytes, 1.0))
    counts = np.zeros((ranks, places, 6), np.int64)
    counts[:, :, d.PROBE] = 1
    fills = [np.empty(0, np.int64)]
    begin = 0
    for rank, each in enumerate(kept):
        for tier in range(1, places - 1):
            fill = each.samples[each.tiers == tier]
            counts[rank, tier + 1, d.FILL_NEXT], begin = begin, begin + fill.size
            counts[rank, tier + 1, d.FILL_END] = begin
            fills.append(fill)
    copy_begin, copies = _copies(kept, samples)
    numbers = np.zeros((ranks, d.NUMBERS), np.int64)
    numbers[:, d.PLACES] = local_batch
    numbers[:, d.READERS] = readers
    numbers[:, d.FILL_LIMIT] = max(1, readers // 2)
    numbers[:, d.PASSING_LIMIT] = undecoded_bytes
    numbers[:, d.TRIED_SIZE] = 1
    for first in (
        d.FIRST_URGENT,
        d.LAST_URGENT,
        d.FIRST_SLOT,
        d.LAST_SLOT,
        d.FREE_ENTRY,
        d.FIRST_FREE,
        d.LAST_FREE,
    ):
        numbers[:, first] = -1
    pace = np.zeros((ranks, d.TRIAL_SECONDS + d.TRIED_LOADS))
    pace[:, d.HALF_SECONDS] = np.inf
    # What a machine says of a store that nobody measured is a guess, good to a factor of two.
    if costs[0, d.LATENCY] + mean_bytes / rate[0, 1] < 2 * d.TRIED_AGAIN_SECONDS:
        numbers[:, d.PROBES_LEFT] = d.FIRST_PROBES
    none = np.zeros((ranks, 0, 0), np.int32)
    state = State(
        sizes=np.ascontiguousarray(sizes_bytes, np.int64),
        rate=rate,
        costs=np.tile(costs, (ranks, 1, 1)),
        counts=counts,
        fill_samples=np.concatenate(fills),
        copy_begin=copy_begin,
        copies=copies,
        slots=none,
        places=none,
        entries=none,
        table=none[0],
        numbers=numbers,
        over=none,
        group=np.zeros((ranks, 2, max(local_batch, 1)), np.int64),
        coming=np.zeros((ranks, max(local_batch, 1)), np.int64),
        pace=pace,
        out=np.zeros(0, np.int64),
    )
    grown = with_slots(state, slots)
    for rank in range(ranks):
        for slot in range(slots):
            d.free_slot(grown, rank, slot)
    return grown


def with_slots(state: State, slots: int) -> State:
    """Return the state with more slots, which are not free yet; what is under way keeps its numbers."""
    ranks, _, group = state.group.shape
    numbers = state.numbers
    known = state.entries.shape[1]
    # A place has one entry at most. Moves that nobody waits for any more, and fills, have a group each.
    count = slots * group + int(numbers[0, d.READERS]) * group + 1
    entries = _longer(state.entries, (ranks, count, d.ENTRY_COLUMNS), np.int32)
    entries[:, known:, d.ENTRY_AFTER] = np.arange(known + 1, count + 1)
    entries[:, -1, d.ENTRY_AFTER] = numbers[:, d.FREE_ENTRY]
    numbers[:, d.FREE_ENTRY] = known
    grown = state._replace(
        slots=_longer(state.slots, (ranks, slots, d.SLOT_COLUMNS), np.int64),
        places=_longer(state.places, (ranks, slots * group, d.PLACE_COLUMNS), np.int32),
        entries=entries,
        table=np.full((ranks, 1 << (2 * count).bit_length()), -1, np.int32),
        over=_longer(state.over, (ranks, 2, count), np.int64),
        # Each entry is dropped and moved once at most, each place loaded, each slot staged and complete.
        out=np.zeros(
            d.HEAD * (1 + 2 * slots + count + slots * group) + 4 * count + 6 * slots * group, np.int64
        ),
    )
    for rank, entry in np.argwhere(entries[:, :, d.ENTRY_STATE]).tolist():
        d.insert(grown, rank, entry)
    return grown


def views_of(state: State) -> State:
    """Return memoryviews of the arrays, which plain Python indexes several times faster."""
    return State(*(memoryview(array) for array in state))


def _copies(kept: Sequence[Kept], samples: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    ids = np.concatenate([each.samples for each in kept])
    copies = np.zeros((ids.size, 3), np.int32)
    copies[:, d.COPY_RANK] = np.repeat(np.arange(len(kept)), [each.samples.size for each in kept])
    copies[:, d.COPY_TIER] = np.concatenate([each.tiers for each in kept])
    begin = np.zeros(samples + 1, np.int64)
    np.cumsum(np.bincount(ids, minlength=samples), out=begin[1:])
    return begin, copies[np.argsort(ids, kind="stable")]


def _longer(array: NDArray[np.generic], shape: tuple[int, ...], dtype: type) -> NDArray[np.generic]:
    longer: NDArray[np.generic] = np.zeros(shape, dtype)
    if array.size:
        longer[tuple(slice(length) for length in array.shape)] = array
    return longer
