"""A block of values to symbols in tables, and back: what is chosen for it, and its bytes. Compiled.

A word (`_words_kernels`) is a symbol, its highest bits, with the rest as it is beside it (`_tans_kernels`). The old
value's exponent says in which of a few contexts, each with frequencies of its own, a symbol stands.

Measured: docs/decisions/0012-own-codec.md.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.codecs._bits_kernels import item_bytes, left, prefetch, store_word
from penstock.checkpoint.codecs._tans_kernels import (
    Int,
    Words,
    build_reading,
    build_writing,
    normalise,
    read,
    write,
)
from penstock.checkpoint.codecs._words_kernels import (
    Bytes,
    from_differences,
    from_planes,
    is_equal,
    load,
    loaded,
    ones_of,
    store,
    to_differences,
    to_exponents,
    to_planes,
)
from penstock.checkpoint.codecs.codec import Kind
from penstock.checkpoint.codecs.kernel_sizes import (
    BAD_FREQUENCIES,
    BAD_HEADER,
    BAD_LENGTH,
    BAD_STREAM,
    BAD_SYMBOLS,
    CHUNK,
    COUNTS,
    FINEST,
    HEADER_BYTES,
    MOST_CONTEXTS,
    MOST_EXACT,
    MOST_EXACT_KEYS,
    MOST_EXPONENTS,
    MOST_GROUPS,
    MOST_IN_GROUPS,
    MOST_KEYS,
    MOST_STATES,
    MOST_SYMBOLS,
    MOST_TABLE_LOG,
    NEARLY_EQUAL,
    PAD_BYTES,
    PLANE_KEYS,
    SIGNATURES,
    SPACE,
    STATES_BYTES,
    TABLES_COUNTS,
    WELL,
)
from penstock.checkpoint.state.tensors import BLOCK_VALUES
from penstock.kernel import entry, inlined, kernel, machine_code, stack_zeros
from penstock.machine_code import MachineCode

#: Values of a run that is looked at, and how many blocks of fewer values are looked at whole.
RUN = 256
WHOLE = 16 * RUN

STORED, EQUAL, PLANE, DIFFERENCE = (
    int(kind) for kind in (Kind.STORED, Kind.EQUAL, Kind.PLANE, Kind.DIFFERENCE)
)
NO_SYMBOL = 65535

_0, _1 = np.uint64(0), np.uint64(1)
#: A bare number as an argument would have the called loop compiled for itself.
_FIRST, _ONE, _FOUR = np.int64(0), np.int64(1), np.int64(4)
#: count * log2(count): the logarithms of a block's estimates took a tenth of its time.
_COUNT_BITS = np.array([count * math.log2(max(count, 1)) for count in range(1024)])


# -- What is chosen for a block --------------------------------------------------------------------------


@inlined
def _count_bits(count: Int) -> float:
    return float(_COUNT_BITS[count] if count < _COUNT_BITS.size else count * math.log2(count))


@kernel
def _bits_of(counts: NDArray[np.uint32]) -> float:
    """Return the entropy of what was counted, in bits, all together."""
    total, bits = 0.0, 0.0
    for i in range(counts.size):
        if counts[i] > 0:
            count = np.int64(counts[i])
            total += count
            bits -= _count_bits(count)
    return bits + total * math.log2(total) if total > 0 else 0.0


@kernel
def _count_exponents(exponents: NDArray[np.uint16], counts: NDArray[np.uint32]) -> None:
    """Count exponents, one value in four. counts: uint32[exponents there can be], overwritten."""
    for exponent in range(counts.size):
        counts[exponent] = 0
    for i in range(0, exponents.size, 4):
        counts[exponents[i]] += 1


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
def _is_uneven(members: NDArray[np.uint32]) -> bool:
    """Return whether keys differ more in their counts than by chance, within the parts that FINEST bits tell apart."""
    part = members.size >> FINEST
    pairs, expected = 0, 0.0
    for begin in range(0, members.size, part):
        count: Int = 0
        for i in range(begin, begin + part):
            count += members[i]
            pairs += int(members[i]) * (int(members[i]) - 1)
        expected += float(count) * count / part
    return float(pairs) > 1.1 * expected + 16.0


@kernel
def _choose_symbols(
    counts: NDArray[np.uint32],
    bits_of_symbol: float,
    symbol_of_key: NDArray[np.uint16],
    symbol_of_finest: NDArray[np.uint16],
    rests: Bytes,
) -> tuple[Int, float, Int]:
    """Choose how finely classes of differences are distinguished.

    counts: uint32[MOST_KEYS], of the values looked at, with exact keys below 2 ** MOST_EXACT.
    bits_of_symbol: what one more symbol costs, in bits for those values.
    symbol_of_key: uint16[MOST_KEYS], overwritten: of the keys with as many exact ones as are worth it.
    symbol_of_finest: of keys as they were counted. rests: uint8[MOST_KEYS], overwritten.
    Returns: how many symbols, the bits left to rests, and the logarithm of how many keys are exact.
    """
    highest, most_exact = counts.size - 1, 1 << MOST_EXACT
    while highest > 0 and counts[highest] == 0:
        highest -= 1
    if highest == 0:
        highest = -1
    if highest >= most_exact:
        highest = MOST_EXACT + ((highest - most_exact) >> FINEST)
    elif highest > 0:
        bit = 0
        while highest >> (bit + 1):
            bit += 1
        highest = bit
    exact = FINEST
    finenesses, sums = stack_zeros(np.int64, 65), stack_zeros(np.int64, MOST_EXACT_KEYS)
    rest_bits = 0.0
    for bit in range(highest + 1):
        if bit < MOST_EXACT:
            first, levels = 1 << bit, bit
        else:
            first, levels = most_exact + ((bit - MOST_EXACT) << FINEST), FINEST
        members = counts[first : first + (1 << levels)]
        total = 0
        for i in range(members.size):
            total += members[i]
        if total == 0:
            continue
        most = levels if levels <= FINEST or _is_uneven(members) else FINEST
        best, best_bits, total_log = 0, 0.0, math.log2(total)
        part = 1 << (levels - most)
        for i in range(1 << most):
            sums[i] = 0
            for j in range(i * part, (i + 1) * part):
                sums[i] += members[j]
        # From the finest on, so that each count is two of the one before.
        for fineness in range(most, -1, -1):
            if fineness < most:
                for i in range(1 << fineness):
                    sums[i] = sums[2 * i] + sums[2 * i + 1]
            bits = float(total) * (bit - fineness)
            for i in range(1 << fineness):
                count = sums[i]
                if count > 0:
                    bits += bits_of_symbol + count * total_log - _count_bits(count)
                    # As many as were seen once will come that were not seen (Good and Turing): escapes.
                    if fineness > FINEST and count < 4:
                        bits += 64.0 / (1 << count)
            if fineness == most or bits <= best_bits:
                best, best_bits = fineness, bits
        rest_bits += float(total) * (bit - best)
        finenesses[bit] = best
        if best > FINEST:
            exact = bit + 1
    for key in range(symbol_of_key.size):
        symbol_of_key[key] = NO_SYMBOL
        symbol_of_finest[key] = NO_SYMBOL
    symbol_of_key[0], symbol_of_finest[0] = 0, 0
    rests[0] = 0
    symbols = 1
    for bit in range(highest + 1):
        best = finenesses[bit]
        if bit < exact:
            first, levels = 1 << bit, bit
        else:
            first, levels = (1 << exact) + ((bit - exact) << FINEST), FINEST
        for i in range(1 << levels):
            symbol_of_key[first + i] = symbols + (i >> (levels - best))
        if bit < MOST_EXACT:
            first, levels = 1 << bit, bit
        else:
            first, levels = most_exact + ((bit - MOST_EXACT) << FINEST), FINEST
        for i in range(1 << levels):
            symbol_of_finest[first + i] = symbols + (i >> (levels - best))
        for i in range(1 << best):
            rests[symbols + i] = bit - best
        symbols += 1 << best
    return symbols, rest_bits, exact


@kernel
def _count_seen(
    key_counts: NDArray[np.uint32], symbol_of_key: NDArray[np.uint16], by_symbol: NDArray[np.uint32]
) -> Int:
    """Count symbols, of counted keys; return how many were seen. by_symbol: overwritten."""
    for symbol in range(by_symbol.size):
        by_symbol[symbol] = 0
    for key in range(key_counts.size):
        if key_counts[key] > 0:
            by_symbol[symbol_of_key[key]] += key_counts[key]
    seen = 0
    for symbol in range(by_symbol.size):
        seen += by_symbol[symbol] > 0
    return seen


@kernel
def _choose_groups(counts: NDArray[np.uint32], thresholds: NDArray[np.uint16]) -> Int:
    """Cut symbols into groups of about as many values; return how many there are.

    counts: uint32[symbols]. thresholds: uint16[MOST_GROUPS - 1], overwritten: the first symbol of each but the first.
    """
    total, groups = 0, 1
    for symbol in range(counts.size):
        total += counts[symbol]
    wanted, within = total / MOST_GROUPS, 0
    for symbol in range(counts.size - 1):
        within += counts[symbol]
        # No difference at all is a group where it is usual.
        if groups < MOST_GROUPS and (within >= wanted or (symbol == 0 and within * 16 >= total)):
            thresholds[groups - 1] = symbol + 1
            groups += 1
            total -= within
            within = 0
            wanted = total / (MOST_GROUPS - groups + 1)
    return groups


@kernel
def _gain_of_groups(
    keys: NDArray[np.uint16],
    symbol_of_key: NDArray[np.uint16],
    thresholds: NDArray[np.uint16],
    exponents: NDArray[np.uint16],
    bases: NDArray[np.uint16],
    symbols: Int,
    counts: NDArray[np.uint32],
) -> float:
    """Return how many bits per value groups save, from one in four of the runs looked at; the rest as `_count_symbols`.

    exponents, bases: all of one context. counts: uint32[groups * symbols], overwritten.
    """
    groups = thresholds.size + 1
    some = keys[: max(keys.size // (4 * RUN), 1) * RUN]
    _count_symbols(
        some, exponents[: some.size], symbol_of_key, bases, thresholds, symbols - 1, symbols, counts
    )
    together = stack_zeros(np.uint32, MOST_SYMBOLS)[:symbols]
    bits, total = 0.0, 0
    for group in range(groups):
        of_group = counts[group * symbols : (group + 1) * symbols]
        bits -= _bits_of(of_group)
        for symbol in range(symbols):
            together[symbol] += of_group[symbol]
            total += of_group[symbol]
    return (bits + _bits_of(together)) / max(total, 1)


@kernel
def _count_symbols(
    keys: NDArray[np.uint16],
    exponents: NDArray[np.uint16],
    symbol_of_key: NDArray[np.uint16],
    bases: NDArray[np.uint16],
    thresholds: NDArray[np.uint16],
    symbols: Int,
    row: Int,
    by_symbol: NDArray[np.uint32],
) -> None:
    """Count symbols per context and group of what is four values before.

    keys, exponents: of the values looked at, runs of RUN. thresholds: of groups; empty where there is one.
    bases: a context's number times `row` and the number of groups. by_symbol: overwritten.
    """
    for i in range(by_symbol.size):
        by_symbol[i] = 0
    groups = thresholds.size + 1
    if groups == 1:
        for i in range(keys.size):
            by_symbol[np.int64(bases[exponents[i]]) + np.int64(min(symbol_of_key[keys[i]], symbols))] += 1
        return
    first, second, third = np.int64(thresholds[0]), np.int64(NO_SYMBOL), np.int64(NO_SYMBOL)
    if groups > 2:
        second = np.int64(thresholds[1])
    if groups > 3:
        third = np.int64(thresholds[2])
    for begin in range(0, keys.size, RUN):
        for i in range(begin + 4, min(begin + RUN, keys.size)):
            before = np.int64(symbol_of_key[keys[i - 4]])
            group = (before >= first) + (before >= second) + (before >= third)
            symbol = np.int64(symbol_of_key[keys[i]])
            if symbol >= symbols:
                symbol = symbols
            by_symbol[np.int64(bases[exponents[i]]) + group * row + symbol] += 1


@kernel
def _cost_of(counts: NDArray[np.uint32], groups: Int, scale: float, price: float) -> float:
    """Return about what a context costs in its groups' tables, in bits; scale, price: as in `_merge_contexts`."""
    symbols = counts.size // groups
    bits: float = 24.0 * groups
    for group in range(groups):
        of_group = counts[group * symbols : (group + 1) * symbols]
        bits += scale * float(_bits_of(of_group))
        for i in range(symbols):
            if of_group[i] > 0:
                bits += price
            # Escapes to come, as in `_choose_symbols`; without them, contexts of many symbols look too cheap.
            if 0 < of_group[i] < 4:
                bits += scale * 32.0 / (1 << np.int64(of_group[i]))
    return bits


@kernel
def _merge_contexts(
    by_symbol: NDArray[np.uint32],
    contexts: Int,
    groups: Int,
    boundaries: NDArray[np.uint16],
    scale: float,
    price: float,
) -> tuple[Int, float]:
    """Join neighbours that are too alike to pay for two tables, the most alike first.

    by_symbol: uint32[contexts * groups * symbols], what was seen in each; joined in place. boundaries: as
    `_choose_contexts` leaves them. scale: values of the block per value looked at. price: bits that a frequency costs.
    Returns: how many are left, and what symbols and tables cost, in bits of the block.
    """
    symbols = by_symbol.size // contexts
    costs, gains = stack_zeros(np.float64, MOST_CONTEXTS), stack_zeros(np.float64, MOST_CONTEXTS)
    joined = stack_zeros(np.uint32, MOST_IN_GROUPS)[:symbols]
    first, last = 0, contexts - 1
    for context in range(contexts):
        own = by_symbol[context * symbols : (context + 1) * symbols]
        costs[context] = _cost_of(own, groups, scale, price)
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
                gains[context] -= _cost_of(joined, groups, scale, price)
            if gains[context] > gains[best]:
                best = context
        if gains[best] <= 0:
            break
        for symbol in range(symbols):
            by_symbol[best * symbols + symbol] += by_symbol[(best + 1) * symbols + symbol]
        own = by_symbol[best * symbols : (best + 1) * symbols]
        costs[best] = _cost_of(own, groups, scale, price)
        boundaries[best] = boundaries[best + 1]
        for context in range(best + 1, contexts - 1):
            boundaries[context] = boundaries[context + 1]
            costs[context] = costs[context + 1]
            gains[context] = gains[context + 1]
            for symbol in range(symbols):
                by_symbol[context * symbols + symbol] = by_symbol[(context + 1) * symbols + symbol]
        contexts -= 1
        first, last = best - 1, best
    cost = 0.0
    for context in range(contexts):
        cost += costs[context]
    return contexts, cost


@kernel
def _choose_tables(
    sampled_keys: NDArray[np.uint16],
    sampled_exponents: NDArray[np.uint16],
    key_counts: NDArray[np.uint32],
    is_byte: bool,
    size: Int,
    most_contexts: Int,
    most_groups: Int,
    bases: NDArray[np.uint16],
    counts: NDArray[np.uint32],
    symbol_of_key: NDArray[np.uint16],
    symbol_of_finest: NDArray[np.uint16],
    rests: Bytes,
    boundaries: NDArray[np.uint16],
    few_boundaries: NDArray[np.uint16],
    group_starts: NDArray[np.uint16],
) -> tuple[Int, float, Int, Int, NDArray[np.uint16], NDArray[np.uint16], NDArray[np.uint32]]:
    """Choose the symbols, contexts and groups of differences.

    sampled_keys, sampled_exponents, key_counts: of the values looked at, of `size`, from `_count_differences`.
    bases: uint16[exponents], scratch; of one exponent where there are no contexts. counts: scratch; key_counts is at
        its 2 * TABLES_COUNTS. symbol_of_key, symbol_of_finest, rests: overwritten, as in `_choose_symbols`.
    boundaries, few_boundaries, group_starts: uint16[MOST_CONTEXTS] twice and uint16[MOST_GROUPS], zeros, scratch.
    Returns: how many symbols; the bits of the values looked at; the logarithm of how many keys are exact; how many
        symbols were seen; the boundaries of contexts and the first symbols of groups but the first, parts of the last
        arguments; what was seen, uint32[contexts * groups * symbols], a part of `counts`.
    """
    contexts, few, exact, bits_of_symbol = 1, 1, FINEST, 0.0
    thresholds = group_starts[:0]
    scale = size / sampled_keys.size
    # A frequency takes some 10 bits, and misses by some more what it is in all of the block (Rissanen: half a
    # logarithm's worth for each; here the sample's, seen from the block).
    price = 10.0 + 1.5 * scale
    if most_contexts > 1 and bases.size > 1:
        exponent_counts = counts[: bases.size]
        _count_exponents(sampled_exponents, exponent_counts)
        contexts = _choose_contexts(exponent_counts, most_contexts, boundaries)
        few = _choose_contexts(exponent_counts, MOST_CONTEXTS // MOST_GROUPS, few_boundaries)
    if is_byte:
        symbols, rest_bits = 256, 0.0
        for key in range(256):
            symbol_of_key[key], symbol_of_finest[key] = key, key
    else:
        bits_of_symbol = price * contexts / scale
        symbols, rest_bits, exact = _choose_symbols(
            key_counts, bits_of_symbol, symbol_of_key, symbol_of_finest, rests
        )
    seen_symbols = counts[2 * TABLES_COUNTS + MOST_KEYS :][: symbols + 1]
    seen = _count_seen(key_counts, symbol_of_finest, seen_symbols)
    if seen > 100 and contexts > few:
        # Where a context has many symbols it takes many values: few contexts say as much, and are soon joined.
        contexts = few
        # Not assigned as a slice: numba would compile the text of an error about shapes, for 4 s.
        for context in range(boundaries.size):
            boundaries[context] = few_boundaries[context]
    row = symbols + 1
    by_symbol = counts[: contexts * row]
    _bases_of(boundaries, contexts, row, bases)
    _count_symbols(
        sampled_keys, sampled_exponents, symbol_of_finest, bases, thresholds, symbols, row, by_symbol
    )
    contexts, cost = _merge_contexts(by_symbol, contexts, _ONE, boundaries, scale, price)
    by_symbol = by_symbol[: contexts * row]
    tables = contexts
    if most_groups > 1 and not is_byte and size > WHOLE and seen <= 400:
        groups = _choose_groups(seen_symbols[:symbols], group_starts)
        by_group = counts[TABLES_COUNTS:]
        gain = 0.0
        if groups > 1:
            for exponent in range(bases.size):
                bases[exponent] = 0
            gain = _gain_of_groups(
                sampled_keys,
                symbol_of_finest,
                group_starts[: groups - 1],
                sampled_exponents,
                bases,
                row,
                by_group[: groups * row],
            )
        # Of what a value costs as it is: a quarter of that is lost again to tables and time.
        if gain * size > 0.01 * (cost + rest_bits * scale):
            row = symbols + groups
            by_group = by_group[: few * groups * row]
            _bases_of(few_boundaries, few, groups * row, bases)
            _count_symbols(
                sampled_keys,
                sampled_exponents,
                symbol_of_finest,
                bases,
                group_starts[: groups - 1],
                symbols,
                row,
                by_group,
            )
            few, few_cost = _merge_contexts(by_group, few, groups, few_boundaries, scale, price)
            # The first four of a run were not counted.
            few_cost *= 1.0 + 4.0 / (RUN - 4)
            if few_cost + 0.005 * rest_bits * scale < 0.99 * cost:
                contexts, cost, boundaries = few, few_cost, few_boundaries
                by_symbol = by_group[: few * groups * row]
                tables = few * groups
                thresholds = group_starts[: groups - 1]
    if exact > FINEST and tables > 1:
        # One table of more symbols may say more than contexts, for which these are too many.
        finer, finer_bits, finer_exact = _choose_symbols(
            key_counts, price / scale, symbol_of_key, symbol_of_finest, rests
        )
        seen_symbols = counts[2 * TABLES_COUNTS + MOST_KEYS :][: finer + 1]
        finer_seen = _count_seen(key_counts, symbol_of_finest, seen_symbols)
        finer_cost = _cost_of(seen_symbols, _ONE, scale, price)
        if finer_cost + finer_bits * scale < cost + rest_bits * scale:
            symbols, rest_bits, exact, seen = finer, finer_bits, finer_exact, finer_seen
            contexts, tables, by_symbol, thresholds = 1, 1, seen_symbols, thresholds[:0]
        else:
            _choose_symbols(key_counts, bits_of_symbol, symbol_of_key, symbol_of_finest, rests)
    row = by_symbol.size // tables
    bits: float = rest_bits
    for table in range(tables):
        bits += _bits_of(by_symbol[table * row : (table + 1) * row])
    return symbols, bits, exact, seen, boundaries[: contexts - 1], thresholds, by_symbol


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


@inlined
def _first_of(run: Int, stride: Int) -> Int:
    """Return where a run that is looked at begins, with a jitter that no row of a matrix keeps step with."""
    return (run * stride + ((run * 40503) >> 8) % stride) * RUN


@kernel
def _sample(data: Bytes, values: Int, item: Int, stride: Int, sample: Words) -> Int:
    """Take one run of RUN values in `stride`, or all of a few, as words; return how many they are."""
    if values <= WHOLE:
        load(data, _FIRST, item, sample[:values])
        return values
    runs, begin = values // (RUN * stride), np.uint64(data.ctypes.data)
    for k in range(runs + 2):
        if k < runs:
            for byte in range(_first_of(k, stride) * item, (_first_of(k, stride) + RUN) * item, 64):
                prefetch(begin + np.uint64(byte))
        if k >= 2:
            load(data, _first_of(k - 2, stride), item, sample[(k - 2) * RUN : (k - 1) * RUN])
    return runs * RUN


@kernel
def _shift_of(ones: np.uint64, data: Bytes, values: Int, item: Int, words: Words) -> Int:
    """Return how many lowest bits are 0 in all words of a block. ones: bits that are 1 in some of them."""
    first = _FIRST
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
    stride: Int,
    words: Words,
    keys: NDArray[np.uint16],
    counts: NDArray[np.uint32],
) -> Int:
    """Count the keys of planes, of one run in `stride`; return of how many values.

    counts: uint32[PLANE_KEYS + 1], overwritten; the last one counts all others.
    """
    for key in range(counts.size):
        counts[key] = 0
    begin, counted = 0, 0
    while begin < sample.size:
        size = min(sample.size - begin, CHUNK if stride == 1 else RUN)
        to_planes(sample[begin : begin + size], shift, rest_bits, first, words[:size], keys[:size])
        for i in range(size):
            counts[keys[i]] += 1
        begin += size * stride
        counted += size
    return counted


@kernel
def _count_differences(
    sample: Words,
    old: Words,
    shift: Int,
    is_float: bool,
    is_byte: bool,
    exponent_at: Int,
    exponent_mask: Int,
    exact: Int,
    words: Words,
    keys: NDArray[np.uint16],
    exponents: NDArray[np.uint16],
    counts: NDArray[np.uint32],
) -> None:
    """Write the keys of differences, and the exponents; count the keys. keys, exponents: uint16[sample]."""
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
            exact,
            words[:size],
            keys[begin : begin + size],
            exponents[begin : begin + size],
        )
        for i in range(begin, begin + size):
            counts[keys[i]] += 1
        begin += size


@kernel
def _put_header(
    table_log: Int,
    shift: Int,
    first_lead: Int,
    boundaries: NDArray[np.uint16],
    thresholds: NDArray[np.uint16],
    rests: Bytes,
    out: Bytes,
) -> Int:
    """Write what comes before the frequencies; return where it ends. rests: uint8[symbols]; boundaries but the last."""
    out[0], out[1], out[2], out[3] = table_log, shift, boundaries.size + 1, thresholds.size
    _put_short(out, 4, rests.size)
    _put_short(out, 8, first_lead)
    at = HEADER_BYTES
    for context in range(boundaries.size):
        _put_short(out, at, boundaries[context])
        at += 2
    for group in range(thresholds.size):
        _put_short(out, at, thresholds[group])
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
    thresholds: NDArray[np.uint16],
    keys: Int,
    states: NDArray[np.uint16],
    steps: NDArray[np.uint64],
    out: Bytes,
    at: Int,
) -> Int:
    """Build and write all tables; return where they end.

    by_symbol: uint32[contexts * groups * symbols], what was seen. The last symbols, one for each group, are escapes,
    which stand before a whole word: what was not seen can still come, unless all was. thresholds: the first symbols
    of groups but the first. symbol_of_key: what is above all symbols is of the last group. steps: uint64[contexts *
    groups * keys], overwritten.
    """
    groups = thresholds.size + 1
    tables = contexts * groups
    symbols = by_symbol.size // tables
    spread = stack_zeros(np.uint16, MOST_STATES)
    frequencies = stack_zeros(np.int64, MOST_SYMBOLS)[:symbols]
    counted = stack_zeros(np.int64, MOST_SYMBOLS)[:symbols]
    steps_of_symbol = stack_zeros(np.uint64, MOST_SYMBOLS)[:symbols]
    for context in range(tables):
        total = 0
        for symbol in range(symbols):
            counted[symbol] = by_symbol[context * symbols + symbol]
            total += counted[symbol]
        for symbol in range(symbols - groups, symbols):
            if counted[symbol] == 0 and (total == 0 or not is_all_seen):
                counted[symbol] = 1
        normalise(counted, table_log, frequencies)
        at = _put_frequencies(frequencies, out, at)
        first = (context + 1) << table_log
        build_writing(frequencies, table_log, rests, first, states, steps_of_symbol, spread)
        # What was not seen is its group's escape.
        group, escape = 0, symbols - groups
        for symbol in range(escape):
            while group < groups - 1 and symbol >= thresholds[group]:
                group += 1
            if frequencies[symbol] == 0:
                steps_of_symbol[symbol] = steps_of_symbol[escape + group]
        own = steps[context * keys : (context + 1) * keys]
        for key in range(keys):
            own[key] = steps_of_symbol[min(np.int64(symbol_of_key[key]), symbols - 1)]
    return at


@kernel
def _add_contexts(
    exponents: NDArray[np.uint16], boundaries: NDArray[np.uint16], width: Int, places: NDArray[np.uint16]
) -> None:
    """Add to each place `width` for every boundary that the exponent is below.

    Compared with three boundaries at a time in vectors: a table of exponents takes three times as long for four
    contexts, and twice as long for nine.
    """
    step = np.uint16(width)
    for i in range(0, boundaries.size, 3):
        # No exponent is below 0.
        first = boundaries[i]
        second = boundaries[i + 1] if i + 1 < boundaries.size else np.uint16(0)
        third = boundaries[i + 2] if i + 2 < boundaries.size else np.uint16(0)
        for k in range(exponents.size):
            exponent = exponents[k]
            below = np.uint16(exponent < first) + np.uint16(exponent < second) + np.uint16(exponent < third)
            places[k] = np.uint16(places[k] + np.uint16(np.uint16(below) * step))


@kernel
def _add_groups(
    keys: NDArray[np.uint16],
    before: NDArray[np.uint16],
    thresholds: NDArray[np.uint16],
    width: Int,
    places: NDArray[np.uint16],
) -> None:
    """Add to each place `width` for every threshold that the key before in its lane is not below.

    before: uint16[4], the keys that each lane had before; all 0 where there are none.
    thresholds: the first keys of groups but the first.
    """
    none, step = np.uint16(65535), np.uint16(width)
    first = np.uint16(thresholds[0])
    second = np.uint16(thresholds[1]) if thresholds.size > 1 else none
    third = np.uint16(thresholds[2]) if thresholds.size > 2 else none
    groups_end = keys.size & ~3
    for i in range(min(4, keys.size)):
        # Values after the last whole group are all of the first lane.
        key = before[i] if i <= groups_end else keys[i - 1]
        places[i] += step * ((key >= first) + (key >= second) + (key >= third))
    later, earlier = places[4:groups_end], keys
    for i in range(later.size):
        key = earlier[i]
        group = np.uint16(key >= first) + np.uint16(key >= second) + np.uint16(key >= third)
        later[i] = np.uint16(later[i] + np.uint16(group * step))
    for i in range(max(groups_end, 4), keys.size):
        key = keys[i - 4] if i == groups_end else keys[i - 1]
        places[i] += step * ((key >= first) + (key >= second) + (key >= third))


@entry
def encode(
    values: Bytes,
    reference: Bytes,
    item: Int,
    exponent_bits: Int,
    mantissa_bits: Int,
    exponent_at: Int,
    exponent_mask: Int,
    most_contexts: Int,
    most_groups: Int,
    stride: Int,
    buffer: Words,
    scratch: NDArray[np.uint16],
    counts: NDArray[np.uint32],
    states: NDArray[np.uint16],
    steps: NDArray[np.uint64],
    out: Bytes,
) -> tuple[Int, Int, float]:
    """Encode a block; return its kind, how many bytes of `out` it is, and how many it would be without a reference.

    The latter is estimated for floats, as is what the block is; where both are nearly equal it is the difference. It is
    0 where nothing was estimated, and infinite where there is no reference.

    reference: of the values' size, or empty. item: bytes of a value.
    exponent_bits, mantissa_bits: 0 for what is no float. exponent_at, exponent_mask: where the context's exponent is
        in a word, and its ones; mask 0 for none.
    most_contexts: 1 to MOST_CONTEXTS. most_groups: 1 to MOST_GROUPS. stride: of the runs of values that are looked at,
        one in so many.
    buffer: [BUFFER], of 32-bit words or of 64-bit ones where items are; scratch, counts, states, steps: SCRATCH,
        COUNTS, STATES and STEPS of them. out: uint8[values.size + 65536].
    """
    size, word_bits = values.size // item, item_bytes(buffer) * 8
    has_reference, is_float, is_byte = reference.size > 0, exponent_bits > 0, item == 1
    if has_reference and is_equal(values, reference):
        return EQUAL, 0, np.inf
    up = word_bits - 8 * item
    keys, exponents, places = scratch[:SPACE], scratch[SPACE : 2 * SPACE], scratch[2 * SPACE : 3 * SPACE]
    bases = scratch[3 * SPACE :][: exponent_mask + 1]
    symbol_of_key = scratch[3 * SPACE + MOST_EXPONENTS :][:MOST_KEYS]
    symbol_of_finest = scratch[3 * SPACE + MOST_EXPONENTS + MOST_KEYS :][:MOST_KEYS]
    sampled = scratch[3 * SPACE + MOST_EXPONENTS + 2 * MOST_KEYS :]
    words, new, old = buffer[:SPACE], buffer[SPACE : 2 * SPACE], buffer[2 * SPACE : 3 * SPACE]
    half = 3 * SPACE + (buffer.size - 3 * SPACE) // 2
    sample, old_sample = buffer[3 * SPACE : half], buffer[half:]
    sample = sample[: _sample(values, size, item, stride, sample)]
    old_sample = old_sample[: sample.size]
    if has_reference:
        _sample(reference, size, item, stride, old_sample)
    else:
        for i in range(old_sample.size):
            old_sample[i] = 0
        for i in range(SPACE):
            old[i] = 0
    shift = up
    if not is_byte:
        shift = _shift_of(ones_of(sample) | ones_of(old_sample), values, size, item, words)
        if has_reference and shift > up:
            shift = min(shift, _shift_of(ones_of(old_sample), reference, size, item, words))
        shift = min(shift, word_bits - 2)

    # As a plane: floats that have no reference, or are no nearer to it than to zero; a quarter says whether they are,
    # of all parts of the block: moments of rare words are beside those of frequent ones.
    plane_bits, plane_first = np.inf, 0
    plane_shift = min(shift, up + mantissa_bits - 1)
    plane_rest = up + mantissa_bits - 1 - plane_shift
    plane_counts = counts[: PLANE_KEYS + 1]
    if is_float and not is_byte:
        plane_first = _first_plane(sample, exponent_bits)
        some = _count_planes(
            sample,
            plane_shift,
            plane_rest,
            plane_first,
            _ONE if sample.size < 4 * CHUNK else _FOUR,
            words,
            keys,
            plane_counts,
        )
        plane_bits = _bits_of(plane_counts) + float(plane_rest) * some
        plane_bits += float(plane_counts[PLANE_KEYS]) * (word_bits - plane_shift)
        plane_bits *= sample.size / some

    # As differences: to the reference, or to zero where there is none and the values are no floats.
    difference_bits, symbols, contexts, exact, seen = np.inf, 0, 1, FINEST, 0
    boundary_buffer, few_boundaries = (
        stack_zeros(np.uint16, MOST_CONTEXTS),
        stack_zeros(np.uint16, MOST_CONTEXTS),
    )
    group_starts = stack_zeros(np.uint16, MOST_GROUPS)
    boundaries, thresholds = boundary_buffer[:0], group_starts[:0]
    width = 256 if is_byte else MOST_KEYS
    rests = stack_zeros(np.uint8, MOST_SYMBOLS)
    sampled_keys = sampled[: sample.size]
    sampled_exponents = sampled[BLOCK_VALUES : BLOCK_VALUES + sample.size]
    by_symbol = counts[PLANE_KEYS + 1 :]
    by_symbol_of_plane = counts[PLANE_KEYS + 1 :]
    if has_reference or is_byte or not is_float:
        key_counts = counts[COUNTS - 2 * MOST_KEYS - 1 :][:width]
        _count_differences(
            sample,
            old_sample,
            shift,
            is_float,
            is_byte,
            exponent_at,
            exponent_mask,
            np.int64(MOST_EXACT),
            words,
            sampled_keys,
            sampled_exponents,
            key_counts,
        )
        exponents_of_old = exponent_mask + 1 if has_reference else 1
        symbols, difference_bits, exact, seen, boundaries, thresholds, by_symbol = _choose_tables(
            sampled_keys,
            sampled_exponents,
            key_counts,
            is_byte,
            size,
            most_contexts,
            most_groups,
            bases[:exponents_of_old],
            counts[PLANE_KEYS + 1 :],
            symbol_of_key,
            symbol_of_finest,
            rests,
            boundary_buffer,
            few_boundaries,
            group_starts,
        )
        contexts = boundaries.size + 1
        if not is_byte:
            width = (1 << exact) + ((word_bits - exact) << FINEST)

    alone_bytes = np.inf
    if has_reference:
        alone_bytes = plane_bits * (size / sample.size) / 8.0 if is_float and not is_byte else 0.0
    if min(plane_bits, difference_bits) * (size / sample.size) >= values.size * 8.0:
        return STORED, values.size, alone_bytes
    kind, first_lead = DIFFERENCE if has_reference else PLANE, 0
    is_plane = plane_bits < difference_bits * (1.0 - NEARLY_EQUAL)
    if is_plane:
        kind, first_lead = PLANE, plane_first
        shift, contexts, width, seen = plane_shift, 1, PLANE_KEYS + 1, 0
        boundaries, thresholds = boundaries[:0], thresholds[:0]
        _count_planes(sample, plane_shift, plane_rest, plane_first, _ONE, words, keys, plane_counts)
        for key in range(PLANE_KEYS):
            if plane_counts[key] > 0:
                symbols = key + 1
            rests[key] = plane_rest
        while symbols > 0 and plane_counts[symbols - 1] == 0:
            symbols -= 1
        by_symbol = by_symbol_of_plane[: symbols + 1]
        for key in range(symbols + 1):
            by_symbol[key] = 0
        for key in range(width):
            symbol_of_key[key] = key
            by_symbol[min(key, symbols)] += plane_counts[key]
    groups = thresholds.size + 1
    for group in range(groups):
        rests[symbols + group] = word_bits - shift

    # Tables of several contexts share the first-level cache: a tenth faster out for two parts in 10,000 of the size.
    table_log = 11
    if contexts * groups > 1 and not is_byte:
        table_log = 10 if word_bits - shift <= 16 or seen > 100 else 9
        if seen > 400:
            table_log = 11
    if seen > 1000:
        # Of at most four contexts, so that all states are below 2 ** 16.
        table_log = 12
    at = _put_header(table_log, shift, first_lead, boundaries, thresholds, rests[:symbols], out)
    # From here on what a key says, not what its symbol says.
    first_keys = stack_zeros(np.uint16, MOST_GROUPS)[: groups - 1]
    for group in range(groups - 1):
        key = 0
        while symbol_of_key[key] < thresholds[group]:
            key += 1
        first_keys[group] = key
    is_all_seen = sample.size == size and groups == 1
    at = _put_tables(
        by_symbol,
        contexts,
        rests,
        table_log,
        is_all_seen,
        symbol_of_key,
        thresholds,
        width,
        states,
        steps,
        out,
        at,
    )
    if at + STATES_BYTES + PAD_BYTES >= values.size:
        return STORED, values.size, alone_bytes
    before = stack_zeros(np.uint16, 4)

    writer = stack_zeros(np.uint64, 7)
    for i in range(4):
        writer[i] = 1 << table_log
    writer[4] = at + STATES_BYTES
    soon = stack_zeros(np.uint64, 3)
    soon[2] = item
    end = size
    while end > 0:
        # Whole groups of four values, but for the last chunk.
        begin = (end - 1) // CHUNK * CHUNK
        count = end - begin
        # What the lanes had before goes along, where it is a context.
        lead = 4 if groups > 1 and begin > 0 else 0
        new_words = loaded(values, begin - lead, lead + count, item, new)
        if is_plane:
            to_planes(new_words, shift, plane_rest, first_lead, words[:count], keys[:count])
        else:
            old_words = old[: lead + count]
            if has_reference:
                old_words = loaded(reference, begin - lead, lead + count, item, old)
            to_differences(
                new_words,
                old_words,
                shift,
                is_float,
                is_byte,
                exponent_at,
                exponent_mask,
                exact,
                words[: lead + count],
                keys[: lead + count],
                exponents[: lead + count],
            )
        if contexts * groups > 1:
            for i in range(4):
                before[i] = keys[i] if lead > 0 else 0
            if groups > 1:
                for i in range(count):
                    places[i] = 0
                _add_groups(keys[lead : lead + count], before, first_keys, width, places[:count])
                for i in range(count):
                    keys[lead + i] += places[i]
            _add_contexts(
                exponents[lead : lead + count],
                boundaries,
                groups * width,
                keys[lead : lead + count],
            )
        following = np.uint64(max(begin - CHUNK, 0)) * soon[2]
        soon[0] = np.uint64(values.ctypes.data) + following
        soon[1] = np.uint64(reference.ctypes.data) + following if has_reference else soon[0]
        write(keys[lead : lead + count], words[lead : lead + count], steps, states, writer, out, soon)
        if np.int64(writer[4]) + PAD_BYTES + 1 >= values.size:
            return STORED, values.size, alone_bytes
        end = begin
    for i in range(4):
        _put_short(out, at + 2 * i, np.int64(writer[i]) - (1 << table_log))
    bits = (np.int64(writer[4]) - at - STATES_BYTES) * 8 + np.int64(writer[6])
    _put_short(out, at + 8, bits & 65535)
    _put_short(out, at + 10, bits >> 16)
    length: Int = np.int64(writer[4]) + (1 if writer[6] > _0 else 0)
    store_word(np.uint64(out.ctypes.data) + np.uint64(length), _0)
    return kind, length + PAD_BYTES, alone_bytes


@entry
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
    groups = np.int64(payload[3]) + 1
    symbols, runs, lead = _short_at(payload, 4), _short_at(payload, 6), np.uint64(_short_at(payload, 8))
    is_plane = kind == PLANE and is_float and not is_byte
    most_shift = up + mantissa_bits - 1 if is_plane else word_bits - 2
    if (
        table_log < 5
        or table_log > MOST_TABLE_LOG
        or shift < up
        or (shift != up if is_byte else shift > most_shift)
        or contexts < 1
        or contexts * groups > (1 if is_plane else MOST_CONTEXTS)
        or groups > MOST_GROUPS
        or groups << table_log > 1 << MOST_TABLE_LOG
        or symbols > MOST_KEYS
        or HEADER_BYTES + 2 * (contexts - 1 + groups - 1 + runs) > payload.size
    ):
        return BAD_HEADER

    boundaries = stack_zeros(np.uint16, MOST_CONTEXTS)
    at = np.int64(HEADER_BYTES)
    for context in range(contexts - 1):
        boundaries[context] = _short_at(payload, at)
        if context > 0 and boundaries[context] >= boundaries[context - 1]:
            return BAD_HEADER
        at += 2
    group_of = stack_zeros(np.uint8, MOST_SYMBOLS)[: symbols + groups]
    for group in range(1, groups):
        start = _short_at(payload, at)
        at += 2
        if start > symbols:
            return BAD_HEADER
        for symbol in range(start, symbols):
            group_of[symbol] += 1
        for symbol in range(symbols + group, symbols + groups):
            group_of[symbol] += 1
    rests = stack_zeros(np.uint8, MOST_SYMBOLS)[: symbols + groups]
    leads = stack_zeros(np.uint32, MOST_SYMBOLS)[: symbols + groups]
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
    for symbol in range(symbols, symbols + groups):
        rests[symbol] = word_bits - shift
    spread = stack_zeros(np.uint16, MOST_STATES)
    frequencies = stack_zeros(np.int64, MOST_SYMBOLS)[: symbols + groups]
    for context in range(contexts * groups):
        at = _take_frequencies(payload, at, frequencies)
        total = 0
        for symbol in range(symbols + groups):
            total += frequencies[symbol]
        if at < 0 or total != 1 << table_log:
            return BAD_FREQUENCIES
        build_reading(frequencies, table_log, rests, leads, group_of, table[context << table_log :], spread)
    if at + STATES_BYTES + PAD_BYTES > payload.size:
        return BAD_LENGTH
    reader = stack_zeros(np.uint64, 5)
    for i in range(4):
        reader[i] = _short_at(payload, at + 2 * i)
        if reader[i] >> np.uint64(table_log) != _0:
            return BAD_STREAM
    bits = _short_at(payload, at + 8) | (_short_at(payload, at + 10) << 16)
    at += STATES_BYTES
    if at + ((bits + 7) >> 3) + PAD_BYTES != payload.size:
        return BAD_LENGTH
    reader[4] = 8 * at + bits

    exponents, firsts = scratch[:CHUNK], scratch[CHUNK : 2 * CHUNK]
    words, new, old = buffer[:CHUNK], buffer[CHUNK : 2 * CHUNK], buffer[2 * CHUNK : 3 * CHUNK]
    for i in range(CHUNK):
        firsts[i], old[i] = 0, 0
    soon = stack_zeros(np.uint64, 3)
    soon[2] = item
    begin = _FIRST
    while begin < size:
        count: Int = min(size - begin, CHUNK)
        old_words = old[:count]
        if reference.size > 0:
            old_words = loaded(reference, begin, count, item, old)
            if contexts > 1:
                to_exponents(old_words, exponent_at, exponent_mask, exponents[:count])
                for i in range(count):
                    firsts[i] = 0
                _add_contexts(
                    exponents[:count], boundaries[: contexts - 1], groups << table_log, firsts[:count]
                )
        following = np.uint64(min(begin + CHUNK, size)) * soon[2]
        soon[0] = np.uint64(values.ctypes.data) + following
        soon[1] = np.uint64(reference.ctypes.data) + following if reference.size > 0 else soon[0]
        if not read(firsts[:count], table, reader, payload, words[:count], soon):
            return BAD_STREAM
        new_words = new[:count]
        if item == item_bytes(new):
            new_words = values[item * begin : item * (begin + count)].view(new.dtype)
        if is_plane:
            from_planes(words[:count], shift, up + mantissa_bits - 1 - shift, new_words)
        else:
            from_differences(words[:count], old_words, shift, is_float, is_byte, new_words)
        if item != item_bytes(new):
            store(new_words, values, begin, item)
        begin += count
    is_end = reader[4] == np.uint64(8 * at)
    for i in range(4):
        is_end = is_end and reader[i] & ((_1 << np.uint64(table_log)) - _1) == _0
    return WELL if is_end else BAD_STREAM


def compile_part(name: str) -> MachineCode:
    """Return what encodes or decodes words of one size: "encode u4", "encode u8", "decode u4" or "decode u8"."""
    return machine_code(encode if name.startswith("encode") else decode, SIGNATURES[name])
