"""The entropy coder: tabled asymmetric numeral systems, four states in turn over one stream of bits.

Each value is a symbol of a table and `rest` bits that are written as they are. Four states take the values in turn,
so that four chains of dependent loads run beside each other, in writing and in reading; the bits of a step, its rest
above its state's, leave in one store. Values are encoded from the last to the first, bits run from the first byte
on, lowest bit first, and the reader goes from the last bit back: what was written last is read first.

    value i of a group of four:   state i -- table -> symbol, how many bits to take, next state less those bits

Source: Duda 2013, "Asymmetric numeral systems", arXiv:1311.2540, section 4 (the tabled variant); the spread of
symbols over a table and its two forms, for writing and for reading, are those of Collet's Finite State Entropy.

Tables of all contexts lie one behind the other. In numba an int beside a uint64 makes a float64, so what meets a
word is a uint64 already.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.codecs._bits_kernels import (
    item_bytes,
    load_byte,
    load_half,
    load_short,
    load_word,
    prefetch,
    store_word,
)
from penstock.checkpoint.codecs.kernel_sizes import MOST_SYMBOLS
from penstock.kernel import inlined, kernel, stack_zeros

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint32] | NDArray[np.uint64]
#: A count: int in Python, int64 in a loop, where every result of arithmetic has another static type.
Int = Any

#: No value takes more bits than these: 64 of its own and 12 of the state.
MOST_VALUE_BITS = 76

_0, _1, _2, _3, _4, _7, _8 = (np.uint64(number) for number in (0, 1, 2, 3, 4, 7, 8))
_12, _15, _16, _32, _56, _63 = (np.uint64(number) for number in (12, 15, 16, 32, 56, 63))
_BYTE, _STATE = np.uint64(0xFF), np.uint64(0xFFF)
_SPARE = np.uint64(4 * MOST_VALUE_BITS)


@kernel
def normalise(counts: NDArray[np.int64], table_log: Int, frequencies: NDArray[np.int64]) -> None:
    """Give every symbol that was counted a share of the table, at least 1, in proportion.

    counts: int64[symbols], at least one above 0, at most 2 ** table_log of them.
    frequencies: int64[symbols], overwritten; they sum to 2 ** table_log.
    """
    size = 1 << table_log
    total = 0
    for symbol in range(counts.size):
        total += counts[symbol]
    given = 0
    for symbol in range(counts.size):
        share = (counts[symbol] * size * 2 + total) // (2 * total)
        if counts[symbol] > 0 and share == 0:
            share = 1
        frequencies[symbol] = share
        given += share
    while given != size:
        largest = 0
        for symbol in range(counts.size):
            if frequencies[symbol] > frequencies[largest]:
                largest = symbol
        # Taken from the largest, where it costs least, but never more than a quarter of it at once.
        change = max(size - given, -max(frequencies[largest] // 4, 1))
        frequencies[largest] += change
        given += change


@kernel
def _spread(frequencies: NDArray[np.int64], table_log: Int, symbols: NDArray[np.uint16]) -> None:
    size = 1 << table_log
    stride, slot = (size >> 1) + (size >> 3) + 3, 0
    for symbol in range(frequencies.size):
        for _ in range(frequencies[symbol]):
            symbols[slot] = symbol
            slot = (slot + stride) & (size - 1)


@kernel
def _highest_bit(word: int) -> int:
    bit = -1
    while word:
        bit += 1
        word >>= 1
    return bit


@kernel
def build_writing(
    frequencies: NDArray[np.int64],
    table_log: Int,
    rests: NDArray[np.uint8],
    first: Int,
    states: NDArray[np.uint16],
    steps: NDArray[np.uint64],
    spread: NDArray[np.uint16],
) -> None:
    """Build what `write` looks up for one context.

    frequencies: int64[symbols], summing to 2 ** table_log. rests: uint8[symbols], bits beside each symbol.
    first: index in `states` of this context's table, at least 2 ** table_log and less than 2 ** 16.
    steps: uint64[symbols], overwritten for symbols of a frequency above 0: bits 0 to 7 the rest's bits; 16 to 31
        where in `states` the next one is, less the state without the bits to take; 32 to 63 what, added to a state,
        has the number of those above its 16th bit.
    spread: uint16[2 ** table_log], scratch.
    """
    size = 1 << table_log
    _spread(frequencies, table_log, spread)
    place = stack_zeros(np.int64, MOST_SYMBOLS)
    before = 0
    for symbol in range(frequencies.size):
        frequency = frequencies[symbol]
        place[symbol] = before
        if frequency > 0:
            most = table_log - _highest_bit(frequency - 1) if frequency > 1 else table_log
            delta = (most << 16) - (frequency << most)
            steps[symbol] = (
                np.uint64(rests[symbol])
                | (np.uint64(first + before - frequency) << _16)
                | (np.uint64(delta) << _32)
            )
        before += frequency
    for slot in range(size):
        symbol = spread[slot]
        states[first + place[symbol]] = size + slot
        place[symbol] += 1


@kernel
def build_reading(
    frequencies: NDArray[np.int64],
    table_log: Int,
    rests: NDArray[np.uint8],
    leads: NDArray[np.uint32],
    groups: Bytes,
    table: NDArray[np.uint64],
    spread: NDArray[np.uint16],
) -> None:
    """Build what `read` looks up for one context.

    leads: uint32[symbols], what a value is above its rest. groups: uint8[symbols], which of a context's tables comes
        next in this state's lane; at most 2 ** (12 - table_log) of them.
    table: uint64[2 ** table_log], overwritten: bits 0 to 11 the next state less what is read, the group above it, 12
        to 15 how many bits that is, 16 to 23 the rest's, 32 to 63 the lead.
    """
    size = 1 << table_log
    _spread(frequencies, table_log, spread)
    following = stack_zeros(np.int64, MOST_SYMBOLS)
    for symbol in range(frequencies.size):
        following[symbol] = frequencies[symbol]
    for slot in range(size):
        symbol = spread[slot]
        state = following[symbol]
        following[symbol] += 1
        taken = table_log - _highest_bit(state)
        table[slot] = (
            np.uint64((state << taken) - size + (np.int64(groups[symbol]) << table_log))
            | (np.uint64(taken) << _12)
            | (np.uint64(rests[symbol]) << _16)
            | (np.uint64(leads[symbol]) << _32)
        )


@inlined
def _mask(bits: np.uint64) -> np.uint64:
    """Return so many ones, 0 to 63."""
    return (_1 << bits) - _1


@inlined
def _append(
    field: np.uint64, length: np.uint64, at: np.uint64, pending: np.uint64, bits: np.uint64
) -> tuple[np.uint64, np.uint64, np.uint64]:
    """Write at most 56 bits; return where the stream is now, as `write` has it."""
    pending |= field << bits
    bits += length
    store_word(at, pending)
    return at + (bits >> _3), pending >> (bits & _56), bits & _7


@inlined
def _put(
    rest: np.uint64,
    state: np.uint64,
    taken: np.uint64,
    value: np.uint64,
    is_wide: bool,
    at: np.uint64,
    pending: np.uint64,
    bits: np.uint64,
) -> tuple[np.uint64, np.uint64, np.uint64]:
    """Write a value's rest and what is taken of the state."""
    if is_wide:
        low = min(rest, _32)
        at, pending, bits = _append(value & _mask(low), low, at, pending, bits)
        rest -= low
        value >>= low
    field = ((value & _mask(rest)) << taken) | (state & _mask(taken))
    return _append(field, rest + taken, at, pending, bits)


@inlined
def _put_two(
    step_1: np.uint64,
    state_1: np.uint64,
    taken_1: np.uint64,
    value_1: np.uint64,
    step_0: np.uint64,
    state_0: np.uint64,
    taken_0: np.uint64,
    value_0: np.uint64,
    is_wide: bool,
    at: np.uint64,
    pending: np.uint64,
    bits: np.uint64,
) -> tuple[np.uint64, np.uint64, np.uint64]:
    """Write two values, value_1 first; in one store where they fit, as they do nearly always: 0.2 ns less for each."""
    rest_1, rest_0 = load_byte(step_1), load_byte(step_0)
    length_1, length_0 = rest_1 + taken_1, rest_0 + taken_0
    if is_wide or length_1 + length_0 > _56:
        at, pending, bits = _put(rest_1, state_1, taken_1, value_1, is_wide, at, pending, bits)
        at, pending, bits = _put(rest_0, state_0, taken_0, value_0, is_wide, at, pending, bits)
    else:
        field_1 = ((value_1 & _mask(rest_1)) << taken_1) | (state_1 & _mask(taken_1))
        field_0 = ((value_0 & _mask(rest_0)) << taken_0) | (state_0 & _mask(taken_0))
        at, pending, bits = _append(field_1 | (field_0 << length_1), length_1 + length_0, at, pending, bits)
    return at, pending, bits


@kernel
def write(
    keys: NDArray[np.uint16],
    values: Words,
    steps: NDArray[np.uint64],
    states: NDArray[np.uint16],
    writer: NDArray[np.uint64],
    out: NDArray[np.uint8],
    soon: NDArray[np.uint64],
) -> None:
    """Encode values, from the last to the first.

    Bound by how many instructions a value takes (28, at five to six a cycle), not by any of its waits: leaving out
    the loads of states or the stores gains nothing. Parts of a step are loaded each by itself, without masks and
    shifts: an eighth less time.

    keys: uint16[values], of each value's step in `steps`.
    writer: uint64[7], the four states, the next byte of `out`, the bits not yet in it and how many these are, at most
        7; taken up and left. At most `MOST_VALUE_BITS` per value and 8 bytes are written.
    soon: uint64[3], two addresses, and the bytes per value that will be read from each on: prefetched meanwhile. The
        loop that reads them is short, and waits for memory else.
    """
    is_wide = item_bytes(values) == 8
    state_0, state_1, state_2, state_3 = writer[0], writer[1], writer[2], writer[3]
    begin, first_step = np.uint64(out.ctypes.data), np.uint64(steps.ctypes.data)
    at, pending, bits = begin + writer[4], writer[5], writer[6]
    i, groups_end = np.uint64(values.size), np.uint64(values.size) & ~_3
    while i > groups_end:
        i -= _1
        step_0 = first_step + _8 * np.uint64(keys[i])
        taken_0 = (state_0 + load_half(step_0 + _4)) >> _16
        at, pending, bits = _put(
            load_byte(step_0), state_0, taken_0, np.uint64(values[i]), is_wide, at, pending, bits
        )
        state_0 = np.uint64(states[(state_0 >> taken_0) + load_short(step_0 + _2)])
    while i > _0:
        line_begin = (i - _1) & ~_15
        prefetch(soon[0] + line_begin * soon[2])
        prefetch(soon[1] + line_begin * soon[2])
        while i > line_begin:
            i -= _4
            # In this order: more values in flight would not stay in registers.
            step_3, step_2 = (
                first_step + _8 * np.uint64(keys[i + _3]),
                first_step + _8 * np.uint64(keys[i + _2]),
            )
            taken_3 = (state_3 + load_half(step_3 + _4)) >> _16
            taken_2 = (state_2 + load_half(step_2 + _4)) >> _16
            value_3, value_2 = np.uint64(values[i + _3]), np.uint64(values[i + _2])
            at, pending, bits = _put_two(
                step_3,
                state_3,
                taken_3,
                value_3,
                step_2,
                state_2,
                taken_2,
                value_2,
                is_wide,
                at,
                pending,
                bits,
            )
            state_3 = np.uint64(states[(state_3 >> taken_3) + load_short(step_3 + _2)])
            state_2 = np.uint64(states[(state_2 >> taken_2) + load_short(step_2 + _2)])
            step_1, step_0 = first_step + _8 * np.uint64(keys[i + _1]), first_step + _8 * np.uint64(keys[i])
            taken_1 = (state_1 + load_half(step_1 + _4)) >> _16
            taken_0 = (state_0 + load_half(step_0 + _4)) >> _16
            value_1, value_0 = np.uint64(values[i + _1]), np.uint64(values[i])
            at, pending, bits = _put_two(
                step_1,
                state_1,
                taken_1,
                value_1,
                step_0,
                state_0,
                taken_0,
                value_0,
                is_wide,
                at,
                pending,
                bits,
            )
            state_1 = np.uint64(states[(state_1 >> taken_1) + load_short(step_1 + _2)])
            state_0 = np.uint64(states[(state_0 >> taken_0) + load_short(step_0 + _2)])
    writer[0], writer[1], writer[2], writer[3] = state_0, state_1, state_2, state_3
    writer[4], writer[5], writer[6] = at - begin, pending, bits


@inlined
def _read_one(
    entry: np.uint64, is_wide: bool, begin: np.uint64, place: np.uint64
) -> tuple[np.uint64, np.uint64, np.uint64]:
    """Decode a value; return it, the next state, and the place in bits below which all is unread."""
    taken, rest = (entry >> _12) & _15, (entry >> _16) & _BYTE
    low = min(rest, _32) if is_wide else _0
    high = rest - low
    place -= high + taken
    window = load_word(begin + (place >> _3)) >> (place & _7)
    state = (entry & _STATE) + (window & _mask(taken))
    value = ((entry >> _32) << (rest & _63)) + (((window >> taken) & _mask(high)) << low)
    if is_wide:
        place -= low
        value += (load_word(begin + (place >> _3)) >> (place & _7)) & _mask(low)
    return value, state, place


@kernel
def read(
    firsts: NDArray[np.uint16],
    table: NDArray[np.uint64],
    reader: NDArray[np.uint64],
    data: NDArray[np.uint8],
    values: Words,
    soon: NDArray[np.uint64],
) -> bool:
    """Decode values, from the first to the last.

    firsts: uint16[values], where the tables of each value's context begin in `table`: one of 2 ** table_log entries
        for each group, which a state says itself, as it is below 2 ** table_log times the groups.
    reader: uint64[5], the four states and the place in bits, at most 8 * (data.size - 8); taken up and left.
    values: uint32 or uint64, overwritten. soon: as in `write`.
    Returns: whether data did not end too early. Nothing outside it is read, whatever it is.
    """
    is_wide = item_bytes(values) == 8
    to_value = values.dtype.type
    begin = np.uint64(data.ctypes.data)
    soon_1, soon_2, item = soon[0], soon[1], soon[2]
    state_0, state_1, state_2, state_3, place = reader[0], reader[1], reader[2], reader[3], reader[4]
    i, groups_end, end = _0, np.uint64(values.size) & ~_3, np.uint64(values.size)
    while i < groups_end and place >= _SPARE:
        if i & _15 == _0:
            prefetch(soon_1 + i * item)
            prefetch(soon_2 + i * item)
        entry_0 = table[state_0 + np.uint64(firsts[i])]
        entry_1 = table[state_1 + np.uint64(firsts[i + _1])]
        entry_2 = table[state_2 + np.uint64(firsts[i + _2])]
        entry_3 = table[state_3 + np.uint64(firsts[i + _3])]
        value, state_0, place = _read_one(entry_0, is_wide, begin, place)
        values[i] = to_value(value)
        value, state_1, place = _read_one(entry_1, is_wide, begin, place)
        values[i + _1] = to_value(value)
        value, state_2, place = _read_one(entry_2, is_wide, begin, place)
        values[i + _2] = to_value(value)
        value, state_3, place = _read_one(entry_3, is_wide, begin, place)
        values[i + _3] = to_value(value)
        i += _4
    # Near the beginning of the data, and for the last values, which state 0 alone has taken: one by one.
    while i < end:
        which = i & _3 if i < groups_end else _0
        state = state_0
        if which == _1:
            state = state_1
        elif which == _2:
            state = state_2
        elif which == _3:
            state = state_3
        entry = table[state + np.uint64(firsts[i])]
        if ((entry >> _12) & _15) + ((entry >> _16) & _BYTE) > place:
            return False
        value, state, place = _read_one(entry, is_wide, begin, place)
        values[i] = to_value(value)
        if which == _0:
            state_0 = state
        elif which == _1:
            state_1 = state
        elif which == _2:
            state_2 = state
        else:
            state_3 = state
        i += _1
    reader[0], reader[1], reader[2], reader[3], reader[4] = state_0, state_1, state_2, state_3, place
    return True
