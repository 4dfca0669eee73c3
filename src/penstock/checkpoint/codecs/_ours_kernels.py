"""A block of values to symbols in tables, and back: what is chosen for it, and its bytes. Compiled.

A word (`_words_kernels`) is a symbol, its highest bits, with the rest as it is beside it (`_tans_kernels`). The old
value's exponent says in which of a few contexts, each with frequencies of its own, a symbol stands.

Measured: docs/decisions/0012-own-codec.md.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.codecs._bits_kernels import item_bytes, left, store_word
from penstock.checkpoint.codecs._tans_kernels import (
    MOST_TABLE_LOG,
    Int,
    Words,
    build_reading,
    build_writing,
    normalise,
    read,
    write,
)
from penstock.checkpoint.codecs._words_kernels import (
    CHUNK,
    FINEST,
    PLANE_KEYS,
    Bytes,
    from_differences,
    from_planes,
    is_equal,
    load,
    ones_of,
    store,
    to_differences,
    to_planes,
)
from penstock.checkpoint.codecs.codec import BLOCK_VALUES, Kind
from penstock.kernel import kernel

#: Keys of a context: a class of 64-bit differences in 2 ** FINEST parts, and 0.
MOST_KEYS = 65 << FINEST
MOST_CONTEXTS = 16
#: Values of a run that is looked at, and how many blocks of fewer values are looked at whole.
RUN = 256
WHOLE = 16 * RUN
#: Fixed part of a payload, what ends the tables (four states, bits in the stream), and what follows the stream.
HEADER_BYTES, STATES_BYTES, PAD_BYTES = 10, 12, 8

STORED, EQUAL, PLANE, DIFFERENCE = (
    int(kind) for kind in (Kind.STORED, Kind.EQUAL, Kind.PLANE, Kind.DIFFERENCE)
)
#: Exponents are at most of 11 bits.
MOST_EXPONENTS = 2048
NO_SYMBOL = 65535
#: Sizes of scratch arrays.
SCRATCH = 2 * CHUNK + MOST_EXPONENTS + PLANE_KEYS + 1
COUNTS = PLANE_KEYS + 1 + MOST_CONTEXTS * MOST_KEYS
STATES = (MOST_CONTEXTS + 1) << 11
STEPS = MOST_CONTEXTS * MOST_KEYS
#: Three chunks, and the runs that are looked at of values and reference, all of a block at most.
BUFFER = 3 * CHUNK + 2 * BLOCK_VALUES
TABLE = MOST_CONTEXTS << MOST_TABLE_LOG

_0, _1 = np.uint64(0), np.uint64(1)


# -- What is chosen for a block --------------------------------------------------------------------------


@kernel
def _bits_of(counts: NDArray[np.uint32]) -> float:
    """Return the entropy of what was counted, in bits, all together."""
    total, bits = 0.0, 0.0
    for i in range(counts.size):
        if counts[i] > 0:
            count = float(counts[i])
            total += count
            bits -= count * math.log2(count)
    return bits + total * math.log2(total) if total > 0 else 0.0


@kernel
def _choose_contexts(counted: NDArray[np.uint32], most: Int, boundaries: NDArray[np.uint16]) -> Int:
    """Cut exponents into contexts, from the highest on; return how many there are.

    counted: uint32[exponents]. boundaries: uint16[most], overwritten: the lowest exponent of each, the last one 0.
    """
    total, common = 0, 0
    for exponent in range(counted.size):
        total += counted[exponent]
    for exponent in range(counted.size):
        if counted[exponent] * 64 >= total:
            common += 1
    # A context of fewer values costs more in its table than it gives.
    enough = total // (64 if common < most else most)
    contexts, within = 0, 0
    for exponent in range(counted.size - 1, 0, -1):
        within += counted[exponent]
        if contexts < most - 1 and within > enough:
            boundaries[contexts] = exponent
            contexts += 1
            within = 0
    boundaries[contexts] = 0
    return contexts + 1


@kernel
def _bases_of(boundaries: NDArray[np.uint16], contexts: Int, stride: Int, bases: NDArray[np.uint16]) -> None:
    """Write for each exponent `stride` times its context."""
    context = contexts - 1
    for exponent in range(bases.size):
        while context > 0 and exponent >= boundaries[context - 1]:
            context -= 1
        bases[exponent] = context * stride


@kernel
def _choose_symbols(
    counts_of_contexts: NDArray[np.uint32],
    contexts: Int,
    bits_of_symbol: float,
    symbol_of_key: NDArray[np.uint16],
    rests: Bytes,
) -> tuple[Int, float]:
    """Choose how finely each class of differences is told apart; return how many symbols, and the bits left to rests.

    counts_of_contexts: uint32[contexts * keys], of the values looked at.
    bits_of_symbol: what one more symbol costs, in bits for those values.
    """
    keys = counts_of_contexts.size // contexts
    counts = np.zeros(keys, np.uint32)
    for context in range(contexts):
        for key in range(keys):
            counts[key] += counts_of_contexts[context * keys + key]
    highest = -1
    for key in range(1 << FINEST, keys):
        if counts[key] > 0:
            highest = (key >> FINEST) - 1
    # A key is (place of the leading one << FINEST) + leading bits, that one among them; 0 for 0.
    for key in range(symbol_of_key.size):
        symbol_of_key[key] = NO_SYMBOL
    symbol_of_key[0] = 0
    rests[0] = 0
    symbols, rest_bits = 1, 0.0
    for bit in range(highest + 1):
        first = (bit + 1) << FINEST
        members = counts[first : first + (1 << FINEST)]
        total = 0
        for i in range(members.size):
            total += members[i]
        best, best_bits = 0, 0.0
        for fineness in range(min(bit, FINEST) + 1):
            part = 1 << (FINEST - fineness)
            bits = 0.0
            for i in range(0, members.size, part):
                count = 0
                for j in range(i, i + part):
                    count += members[j]
                if count > 0:
                    bits += bits_of_symbol + count * math.log2(total / count)
            bits += float(total) * (bit - fineness)
            if fineness == 0 or bits < best_bits:
                best, best_bits = fineness, bits
        if total > 0:
            rest_bits += float(total) * (bit - best)
        for i in range(members.size):
            symbol_of_key[first + i] = symbols + (i >> (FINEST - best))
        for i in range(1 << best):
            rests[symbols + i] = bit - best
        symbols += 1 << best
    return symbols, rest_bits


@kernel
def _table_bits(counts: NDArray[np.uint32], price: float) -> float:
    """Return about what a context costs beside its values, in bits; price: of a frequency."""
    bits = 24.0
    for i in range(counts.size):
        if counts[i] > 0:
            bits += price
    return bits


@kernel
def _merge_contexts(
    by_symbol: NDArray[np.uint32],
    contexts: Int,
    boundaries: NDArray[np.uint16],
    scale: float,
    price: float,
) -> Int:
    """Join neighbours that are too alike to pay for two tables, the most alike first; return how many are left.

    by_symbol: uint32[contexts * symbols], what was seen in each; joined in place. boundaries: as `_choose_contexts`
    leaves them. scale: values of the block per value looked at. price: bits that a frequency costs.
    """
    symbols = by_symbol.size // contexts
    costs, gains = np.zeros(MOST_CONTEXTS), np.zeros(MOST_CONTEXTS)
    joined = np.zeros(symbols, np.uint32)
    first, last = 0, contexts - 1
    for context in range(contexts):
        own = by_symbol[context * symbols : (context + 1) * symbols]
        costs[context] = scale * _bits_of(own) + _table_bits(own, price)
    while contexts > 1:
        # Gains of joining context c and c + 1; after a join, only its neighbours' are new.
        best = 0
        for context in range(contexts - 1):
            if first <= context <= last:
                for symbol in range(symbols):
                    joined[symbol] = (
                        by_symbol[context * symbols + symbol] + by_symbol[(context + 1) * symbols + symbol]
                    )
                gains[context] = costs[context] + costs[context + 1]
                gains[context] -= scale * _bits_of(joined) + _table_bits(joined, price)
            if gains[context] > gains[best]:
                best = context
        if gains[best] <= 0:
            break
        for symbol in range(symbols):
            by_symbol[best * symbols + symbol] += by_symbol[(best + 1) * symbols + symbol]
        own = by_symbol[best * symbols : (best + 1) * symbols]
        costs[best] = scale * _bits_of(own) + _table_bits(own, price)
        boundaries[best] = boundaries[best + 1]
        for context in range(best + 1, contexts - 1):
            boundaries[context] = boundaries[context + 1]
            costs[context] = costs[context + 1]
            gains[context] = gains[context + 1]
            for symbol in range(symbols):
                by_symbol[context * symbols + symbol] = by_symbol[(context + 1) * symbols + symbol]
        contexts -= 1
        first, last = best - 1, best
    return contexts


# -- Tables in a payload ---------------------------------------------------------------------------------


@kernel
def _put_frequencies(frequencies: NDArray[np.int64], out: Bytes, at: Int) -> Int:
    """Write frequencies; return where they end. One byte below 128, else two; 0 with how many more 0 follow it."""
    symbol = 0
    while symbol < frequencies.size:
        frequency = frequencies[symbol]
        symbol += 1
        if frequency == 0:
            more = 0
            while more < 255 and symbol < frequencies.size and frequencies[symbol] == 0:
                more += 1
                symbol += 1
            out[at] = 0
            out[at + 1] = more
            at += 2
        elif frequency < 128:
            out[at] = frequency
            at += 1
        else:
            out[at] = 128 | (frequency >> 8)
            out[at + 1] = frequency & 255
            at += 2
    return at


@kernel
def _take_frequencies(data: Bytes, at: Int, frequencies: NDArray[np.int64]) -> Int:
    """Read frequencies; return where they end, or -1 where they are none."""
    symbol: Int = 0
    while symbol < frequencies.size:
        if at + 2 > data.size:
            return -1
        first, second = np.int64(data[at]), np.int64(data[at + 1])
        if first == 0:
            if symbol + 1 + second > frequencies.size:
                return -1
            for i in range(symbol, symbol + 1 + second):
                frequencies[i] = 0
            symbol += 1 + second
            at += 2
        elif first < 128:
            frequencies[symbol] = first
            symbol += 1
            at += 1
        else:
            frequencies[symbol] = ((first & 127) << 8) | second
            symbol += 1
            at += 2
    return at


@kernel
def _put_short(out: Bytes, at: Int, number: Int) -> None:
    out[at] = number & 255
    out[at + 1] = number >> 8


@kernel
def _short_at(data: Bytes, at: Int) -> Int:
    return np.int64(data[at]) | (np.int64(data[at + 1]) << 8)


# -- A block ---------------------------------------------------------------------------------------------


@kernel
def _sample(data: Bytes, values: Int, item: Int, stride: Int, sample: Words) -> Int:
    """Take one run of RUN values in `stride`, or all of a few, as words; return how many they are."""
    if values <= WHOLE:
        load(data, 0, item, sample[:values])
        return values
    taken = 0
    for k in range(values // (RUN * stride)):
        # A jitter that no row of a matrix keeps step with.
        first = (k * stride + ((k * 40503) >> 8) % stride) * RUN
        load(data, first, item, sample[taken : taken + RUN])
        taken += RUN
    return taken


@kernel
def _shift_of(ones: np.uint64, data: Bytes, values: Int, item: Int, words: Words) -> Int:
    """Return how many lowest bits are 0 in all words of a block. ones: bits that are 1 in some of them."""
    first = 0
    # A few words say it, but where numbers were rounded to a narrower type.
    while (ones >> np.uint64(item_bytes(words) * 8 - 8 * item)) & _1 == _0 and first < values:
        size = min(values - first, CHUNK)
        load(data, first, item, words[:size])
        ones |= ones_of(words[:size])
        first += size
    shift, bits = 0, item_bytes(words) * 8
    while shift < bits and (ones >> np.uint64(shift)) & _1 == _0:
        shift += 1
    return shift


@kernel
def _first_plane(sample: Words, exponent_bits: Int) -> Int:
    """Return the key of planes to count from, so that those of the highest exponents are below PLANE_KEYS."""
    if exponent_bits <= 8:
        return 0
    to_word = sample.dtype.type
    highest = to_word(0)
    for i in range(sample.size):
        highest = max(highest, left(sample[i], to_word(1)))
    # Exponent, highest bit of the mantissa and sign; one more, for it is the end.
    keys: Int = (np.int64(highest >> to_word(item_bytes(sample) * 8 - exponent_bits - 1)) + 1) << 1
    return max(keys - PLANE_KEYS, 0)


@kernel
def _count_planes(
    sample: Words,
    shift: Int,
    rest_bits: Int,
    first: Int,
    words: Words,
    keys: NDArray[np.uint16],
    counts: NDArray[np.uint32],
) -> None:
    """Count the keys of planes. counts: uint32[PLANE_KEYS + 1], overwritten; the last one counts all others."""
    for key in range(counts.size):
        counts[key] = 0
    begin = 0
    while begin < sample.size:
        size = min(sample.size - begin, CHUNK)
        to_planes(sample[begin : begin + size], shift, rest_bits, first, words[:size], keys[:size])
        for i in range(size):
            counts[keys[i]] += 1
        begin += size


@kernel
def _count_exponents(old: Words, exponent_at: Int, exponent_mask: Int, counts: NDArray[np.uint32]) -> None:
    for exponent in range(counts.size):
        counts[exponent] = 0
    at, mask = np.uint64(exponent_at), np.uint64(exponent_mask)
    for i in range(old.size):
        counts[(np.uint64(old[i]) >> at) & mask] += 1


@kernel
def _count_differences(
    sample: Words,
    old: Words,
    shift: Int,
    is_float: bool,
    is_byte: bool,
    exponent_at: Int,
    exponent_mask: Int,
    bases: NDArray[np.uint16],
    words: Words,
    keys: NDArray[np.uint16],
    exponents: NDArray[np.uint16],
    counts: NDArray[np.uint32],
) -> None:
    """Count keys of differences per context. bases: first key of an exponent's context."""
    for key in range(counts.size):
        counts[key] = 0
    begin = 0
    while begin < sample.size:
        size = min(sample.size - begin, CHUNK)
        to_differences(
            sample[begin : begin + size],
            old[begin : begin + size],
            shift,
            is_float,
            is_byte,
            exponent_at,
            exponent_mask,
            words[:size],
            keys[:size],
            exponents[:size],
        )
        for i in range(size):
            counts[np.int64(keys[i]) + np.int64(bases[exponents[i]])] += 1
        begin += size


@kernel
def _put_header(
    table_log: Int,
    shift: Int,
    first_lead: Int,
    boundaries: NDArray[np.uint16],
    rests: Bytes,
    out: Bytes,
) -> Int:
    """Write what comes before the frequencies; return where it ends. rests: uint8[symbols]; boundaries but the last."""
    out[0], out[1], out[2], out[3] = table_log, shift, boundaries.size + 1, 0
    _put_short(out, 4, rests.size)
    _put_short(out, 8, first_lead)
    at = HEADER_BYTES
    for context in range(boundaries.size):
        _put_short(out, at, boundaries[context])
        at += 2
    runs, symbol = 0, 0
    while symbol < rests.size:
        same = 1
        while same < 255 and symbol + same < rests.size and rests[symbol + same] == rests[symbol]:
            same += 1
        out[at], out[at + 1] = rests[symbol], same
        at += 2
        runs += 1
        symbol += same
    _put_short(out, 6, runs)
    return at


@kernel
def _put_tables(
    by_symbol: NDArray[np.uint32],
    contexts: Int,
    rests: Bytes,
    table_log: Int,
    is_all_seen: bool,
    symbol_of_key: NDArray[np.uint16],
    keys: Int,
    states: NDArray[np.uint16],
    steps: NDArray[np.uint64],
    out: Bytes,
    at: Int,
) -> Int:
    """Build and write the tables of all contexts; return where they end.

    by_symbol: uint32[contexts * symbols], what was seen. The last symbol is the escape, which stands before a whole
    word: what was not seen can still come, unless all was. steps: uint64[contexts * keys], overwritten.
    """
    symbols = by_symbol.size // contexts
    spread = np.empty(1 << table_log, np.uint16)
    frequencies = np.empty(symbols, np.int64)
    counted = np.empty(symbols, np.int64)
    steps_of_symbol = np.zeros(symbols, np.uint64)
    for context in range(contexts):
        total = 0
        for symbol in range(symbols):
            counted[symbol] = by_symbol[context * symbols + symbol]
            total += counted[symbol]
        if counted[symbols - 1] == 0 and (total == 0 or not is_all_seen):
            counted[symbols - 1] = 1
        normalise(counted, table_log, frequencies)
        at = _put_frequencies(frequencies, out, at)
        first = (context + 1) << table_log
        build_writing(frequencies, table_log, rests, first, states, steps_of_symbol, spread)
        for key in range(keys):
            symbol = min(np.int64(symbol_of_key[key]), symbols - 1)
            steps[context * keys + key] = steps_of_symbol[symbol if frequencies[symbol] > 0 else symbols - 1]
    return at


@kernel
def encode(
    values: Bytes,
    reference: Bytes,
    item: Int,
    exponent_bits: Int,
    mantissa_bits: Int,
    exponent_at: Int,
    exponent_mask: Int,
    most_contexts: Int,
    stride: Int,
    buffer: Words,
    scratch: NDArray[np.uint16],
    counts: NDArray[np.uint32],
    states: NDArray[np.uint16],
    steps: NDArray[np.uint64],
    out: Bytes,
) -> tuple[Int, Int]:
    """Encode a block; return its kind and how many bytes of `out` it is.

    reference: of the values' size, or empty. item: bytes of a value.
    exponent_bits, mantissa_bits: 0 for what is no float. exponent_at, exponent_mask: where the context's exponent is
        in a word, and its ones; mask 0 for none.
    most_contexts: 1 to MOST_CONTEXTS. stride: of the runs of values that are looked at, one in so many.
    buffer: [BUFFER], of 32-bit words or of 64-bit ones where items are; scratch, counts, states, steps: SCRATCH,
        COUNTS, STATES and STEPS of them. out: uint8[values.size + 65536].
    """
    size, word_bits = values.size // item, item_bytes(buffer) * 8
    has_reference, is_float, is_byte = reference.size > 0, exponent_bits > 0, item == 1
    if has_reference and is_equal(values, reference):
        return EQUAL, 0
    up = word_bits - 8 * item
    keys, exponents = scratch[:CHUNK], scratch[CHUNK : 2 * CHUNK]
    bases = scratch[2 * CHUNK : 2 * CHUNK + exponent_mask + 1]
    symbol_of_key = scratch[2 * CHUNK + MOST_EXPONENTS :]
    words, new, old = buffer[:CHUNK], buffer[CHUNK : 2 * CHUNK], buffer[2 * CHUNK : 3 * CHUNK]
    half = 3 * CHUNK + (buffer.size - 3 * CHUNK) // 2
    sample, old_sample = buffer[3 * CHUNK : half], buffer[half:]
    sample = sample[: _sample(values, size, item, stride, sample)]
    old_sample = old_sample[: sample.size]
    if has_reference:
        _sample(reference, size, item, stride, old_sample)
    else:
        for i in range(old_sample.size):
            old_sample[i] = 0
        for i in range(CHUNK):
            old[i] = 0
    shift = up
    if not is_byte:
        shift = _shift_of(ones_of(sample) | ones_of(old_sample), values, size, item, words)
        if has_reference and shift > up:
            shift = min(shift, _shift_of(ones_of(old_sample), reference, size, item, words))
        shift = min(shift, word_bits - 2)

    # As a plane: floats that have no reference, or are no nearer to it than to zero; a quarter says whether they are.
    plane_bits, plane_first = np.inf, 0
    plane_shift = min(shift, up + mantissa_bits - 1)
    plane_rest = up + mantissa_bits - 1 - plane_shift
    plane_counts = counts[: PLANE_KEYS + 1]
    if is_float and not is_byte:
        plane_first = _first_plane(sample, exponent_bits)
        some = sample[: max(sample.size // 4, min(sample.size, CHUNK))]
        _count_planes(some, plane_shift, plane_rest, plane_first, words, keys, plane_counts)
        plane_bits = _bits_of(plane_counts) + float(plane_rest) * some.size
        plane_bits += float(plane_counts[PLANE_KEYS]) * (word_bits - plane_shift)
        plane_bits *= sample.size / some.size

    # As differences: to the reference, or to zero where there is none and the values are no floats.
    difference_bits, symbols, contexts = np.inf, 0, 1
    boundaries = np.zeros(MOST_CONTEXTS, np.uint16)
    width = 256 if is_byte else (word_bits + 1) << FINEST
    rests = np.zeros(PLANE_KEYS + 1, np.uint8)
    key_counts = counts[PLANE_KEYS + 1 :]
    # A frequency takes some 10 bits, and misses by some more what it is in all of the block (Rissanen: half a
    # logarithm's worth for each; here the sample's, seen from the block).
    price = 10.0 + 1.5 * size / sample.size
    if has_reference or is_byte or not is_float:
        if has_reference and most_contexts > 1 and exponent_mask > 0:
            exponent_counts = key_counts[: exponent_mask + 1]
            _count_exponents(old_sample, exponent_at, exponent_mask, exponent_counts)
            contexts = _choose_contexts(exponent_counts, most_contexts, boundaries)
        _bases_of(boundaries, contexts, width, bases)
        key_counts = key_counts[: contexts * width]
        _count_differences(
            sample,
            old_sample,
            shift,
            is_float,
            is_byte,
            exponent_at,
            exponent_mask,
            bases,
            words,
            keys,
            exponents,
            key_counts,
        )
        if is_byte:
            symbols, difference_bits = 256, 0.0
            for key in range(256):
                symbol_of_key[key] = key
        else:
            symbol_bits = price * contexts * sample.size / size
            symbols, difference_bits = _choose_symbols(
                key_counts, contexts, symbol_bits, symbol_of_key, rests
            )
    by_symbol = np.zeros(contexts * (symbols + 1), np.uint32)
    if symbols > 0:
        for context in range(contexts):
            of_context = by_symbol[context * (symbols + 1) : (context + 1) * (symbols + 1)]
            for key in range(width):
                count = key_counts[context * width + key]
                if count > 0:
                    of_context[symbol_of_key[key]] += count
        merged = _merge_contexts(by_symbol, contexts, boundaries, size / sample.size, price)
        if merged < contexts:
            contexts = merged
            by_symbol = by_symbol[: contexts * (symbols + 1)]
            _bases_of(boundaries, contexts, width, bases)
        for context in range(contexts):
            difference_bits += _bits_of(by_symbol[context * (symbols + 1) : (context + 1) * (symbols + 1)])

    if min(plane_bits, difference_bits) * (size / sample.size) >= values.size * 8.0:
        return STORED, values.size
    kind, first_lead = DIFFERENCE if has_reference else PLANE, 0
    is_plane = plane_bits < difference_bits
    if is_plane:
        kind, first_lead = PLANE, plane_first
        shift, contexts, width = plane_shift, 1, PLANE_KEYS + 1
        _count_planes(sample, plane_shift, plane_rest, plane_first, words, keys, plane_counts)
        for key in range(PLANE_KEYS):
            if plane_counts[key] > 0:
                symbols = key + 1
            rests[key] = plane_rest
        while symbols > 0 and plane_counts[symbols - 1] == 0:
            symbols -= 1
        by_symbol = np.zeros(symbols + 1, np.uint32)
        for key in range(width):
            symbol_of_key[key] = key
            by_symbol[min(key, symbols)] += plane_counts[key]
    rests[symbols] = word_bits - shift

    # Tables of several contexts share the first-level cache: a tenth faster out for two parts in 10,000 of the size.
    table_log = 11
    if contexts > 1 and not is_byte:
        table_log = 10 if word_bits - shift <= 16 else 9
    at = _put_header(table_log, shift, first_lead, boundaries[: contexts - 1], rests[:symbols], out)
    is_all_seen = sample.size == size
    at = _put_tables(
        by_symbol, contexts, rests, table_log, is_all_seen, symbol_of_key, width, states, steps, out, at
    )
    if at + STATES_BYTES + PAD_BYTES >= values.size:
        return STORED, values.size

    writer = np.zeros(7, np.uint64)
    for i in range(4):
        writer[i] = 1 << table_log
    writer[4] = at + STATES_BYTES
    soon = np.zeros(3, np.uint64)
    soon[2] = item
    end = size
    while end > 0:
        # Whole groups of four values, but for the last chunk.
        begin = (end - 1) // CHUNK * CHUNK
        count = end - begin
        load(values, begin, item, new[:count])
        if is_plane:
            to_planes(new[:count], shift, plane_rest, first_lead, words[:count], keys[:count])
        else:
            if has_reference:
                load(reference, begin, item, old[:count])
            to_differences(
                new[:count],
                old[:count],
                shift,
                is_float,
                is_byte,
                exponent_at,
                exponent_mask,
                words[:count],
                keys[:count],
                exponents[:count],
            )
        if contexts > 1:
            for i in range(count):
                keys[i] += bases[exponents[i]]
        following = np.uint64(max(begin - CHUNK, 0)) * soon[2]
        soon[0] = np.uint64(values.ctypes.data) + following
        soon[1] = np.uint64(reference.ctypes.data) + following if has_reference else soon[0]
        write(keys[:count], words[:count], steps, states, writer, out, soon)
        if np.int64(writer[4]) + PAD_BYTES + 1 >= values.size:
            return STORED, values.size
        end = begin
    for i in range(4):
        _put_short(out, at + 2 * i, np.int64(writer[i]) - (1 << table_log))
    bits = (np.int64(writer[4]) - at - STATES_BYTES) * 8 + np.int64(writer[6])
    _put_short(out, at + 8, bits & 65535)
    _put_short(out, at + 10, bits >> 16)
    length: Int = np.int64(writer[4]) + (1 if writer[6] > _0 else 0)
    store_word(np.uint64(out.ctypes.data) + np.uint64(length), _0)
    return kind, length + PAD_BYTES


#: What `decode` returns: all is well, or what is wrong.
WELL, BAD_HEADER, BAD_SYMBOLS, BAD_FREQUENCIES, BAD_LENGTH, BAD_STREAM = range(6)


@kernel
def decode(
    payload: Bytes,
    kind: Int,
    reference: Bytes,
    item: Int,
    exponent_bits: Int,
    mantissa_bits: Int,
    exponent_at: Int,
    exponent_mask: Int,
    buffer: Words,
    scratch: NDArray[np.uint16],
    table: NDArray[np.uint64],
    values: Bytes,
) -> Int:
    """Decode a block; return WELL, or what is wrong with it, which leaves `values` as they may be.

    payload: anything. reference: of the values' size for a DIFFERENCE, else empty. values: overwritten.
    table: uint64[TABLE]. The rest as in `encode`.
    """
    word_bits, is_float, is_byte = item_bytes(buffer) * 8, exponent_bits > 0, item == 1
    size, up = values.size // item, word_bits - 8 * item
    if payload.size < HEADER_BYTES + STATES_BYTES + PAD_BYTES:
        return BAD_HEADER
    table_log, shift, contexts = np.int64(payload[0]), np.int64(payload[1]), np.int64(payload[2])
    symbols, runs, lead = _short_at(payload, 4), _short_at(payload, 6), np.uint64(_short_at(payload, 8))
    is_plane = kind == PLANE and is_float and not is_byte
    most_shift = up + mantissa_bits - 1 if is_plane else word_bits - 2
    if (
        table_log < 5
        or table_log > MOST_TABLE_LOG
        or shift < up
        or (shift != up if is_byte else shift > most_shift)
        or contexts < 1
        or contexts > (1 if is_plane else MOST_CONTEXTS)
        or payload[3] != 0
        or symbols > PLANE_KEYS
        or HEADER_BYTES + 2 * (contexts - 1 + runs) > payload.size
    ):
        return BAD_HEADER

    boundaries = np.zeros(MOST_CONTEXTS, np.uint16)
    at = HEADER_BYTES
    for context in range(contexts - 1):
        boundaries[context] = _short_at(payload, at)
        if context > 0 and boundaries[context] >= boundaries[context - 1]:
            return BAD_HEADER
        at += 2
    rests = np.zeros(symbols + 1, np.uint8)
    leads = np.zeros(symbols + 1, np.uint32)
    first, symbol = _0, 0
    for run in range(runs):
        rest, same = np.int64(payload[at]), np.int64(payload[at + 1])
        at += 2
        if rest > word_bits - shift or rest > 63 or same == 0 or symbol + same > symbols:
            return BAD_SYMBOLS
        if run == 0:
            first = lead << np.uint64(rest)
        for _ in range(same):
            rests[symbol] = rest
            leads[symbol] = np.uint32(first >> np.uint64(rest))
            first += _1 << np.uint64(rest)
            symbol += 1
    if symbol != symbols:
        return BAD_SYMBOLS
    rests[symbols] = word_bits - shift
    spread = np.empty(1 << table_log, np.uint16)
    frequencies = np.empty(symbols + 1, np.int64)
    for context in range(contexts):
        at = _take_frequencies(payload, at, frequencies)
        total = 0
        for symbol in range(symbols + 1):
            total += frequencies[symbol]
        if at < 0 or total != 1 << table_log:
            return BAD_FREQUENCIES
        build_reading(frequencies, table_log, rests, leads, table[context << table_log :], spread)
    if at + STATES_BYTES + PAD_BYTES > payload.size:
        return BAD_LENGTH
    reader = np.zeros(5, np.uint64)
    for i in range(4):
        reader[i] = _short_at(payload, at + 2 * i)
        if reader[i] >> np.uint64(table_log) != _0:
            return BAD_STREAM
    bits = _short_at(payload, at + 8) | (_short_at(payload, at + 10) << 16)
    at += STATES_BYTES
    if at + ((bits + 7) >> 3) + PAD_BYTES != payload.size:
        return BAD_LENGTH
    reader[4] = 8 * at + bits

    firsts = scratch[CHUNK : 2 * CHUNK]
    bases = scratch[2 * CHUNK : 2 * CHUNK + exponent_mask + 1]
    words, new, old = buffer[:CHUNK], buffer[CHUNK : 2 * CHUNK], buffer[2 * CHUNK : 3 * CHUNK]
    _bases_of(boundaries, contexts, 1 << table_log, bases)
    for i in range(CHUNK):
        firsts[i], old[i] = 0, 0
    soon = np.zeros(3, np.uint64)
    soon[2] = item
    at_bit, mask = np.uint64(exponent_at), np.uint64(exponent_mask)
    begin: Int = 0
    while begin < size:
        count: Int = min(size - begin, CHUNK)
        if reference.size > 0:
            load(reference, begin, item, old[:count])
            if contexts > 1:
                for i in range(count):
                    firsts[i] = bases[(np.uint64(old[i]) >> at_bit) & mask]
        following = np.uint64(min(begin + CHUNK, size)) * soon[2]
        soon[0] = np.uint64(values.ctypes.data) + following
        soon[1] = np.uint64(reference.ctypes.data) + following if reference.size > 0 else soon[0]
        if not read(firsts[:count], table, reader, payload, words[:count], soon):
            return BAD_STREAM
        if is_plane:
            from_planes(words[:count], shift, up + mantissa_bits - 1 - shift, new[:count])
        else:
            from_differences(words[:count], old[:count], shift, is_float, is_byte, new[:count])
        store(new[:count], values, begin, item)
        begin += count
    is_end = reader[4] == np.uint64(8 * at)
    for i in range(4):
        is_end = is_end and reader[i] == _0
    return WELL if is_end else BAD_STREAM
