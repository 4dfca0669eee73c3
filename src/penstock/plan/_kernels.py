"""The compiled loops of the plan. Imported only when a domain is too large for NumPy: it loads numba.

Measured: `benchmarks/plan.py`; figures in docs/decisions/0003-full-shuffle-bijection.md.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.kernel import kernel

#: Positions that go through all rounds together: four arrays of this length stay in the first-level cache.
_BLOCK = 512

# In numba an int beside a uint64 makes a float64, so every constant is a uint64 already.
_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
_MULTIPLIER = np.uint64(0xD2511F53)


@kernel
def _scatter(word: np.uint64, key: np.uint64, multiplier: np.uint64, size: np.uint64) -> np.uint64:
    """The round function: 32 bits in, a number below `size` out. Two multiplications, folded between."""
    product = (word ^ key) * multiplier
    product = ((product >> _HALF) ^ (product & _LOW)) * _MULTIPLIER
    return ((((product >> _HALF) ^ product) & _LOW) * size) >> _HALF


@kernel
def _add_round(
    source: NDArray[np.uint64],
    target: NDArray[np.uint64],
    count: int,
    key: np.uint64,
    multiplier: np.uint64,
    size: np.uint64,
) -> None:
    for position in range(count):
        total = target[position] + _scatter(source[position], key, multiplier, size)
        # total - size wraps to a huge number exactly when total < size: the smaller one is total mod size.
        target[position] = min(total, total - size)


@kernel
def _subtract_round(
    source: NDArray[np.uint64],
    target: NDArray[np.uint64],
    count: int,
    key: np.uint64,
    multiplier: np.uint64,
    size: np.uint64,
) -> None:
    for position in range(count):
        rest = target[position] - _scatter(source[position], key, multiplier, size)
        target[position] = min(rest, rest + size)


@kernel
def _split(
    values: NDArray[np.int64],
    begin: int,
    count: int,
    base: int,
    columns: np.int64,
    left: NDArray[np.uint64],
    right: NDArray[np.uint64],
) -> None:
    """Write quotient and rest of (values - base) / columns to left and right, without an integer division.

    A product with the reciprocal is off by one at most for values below 2**62; one step either way mends it.
    """
    reciprocal = 1.0 / float(columns)
    for position in range(count):
        value = values[begin + position] - base
        quotient = np.int64(np.float64(value) * reciprocal)
        rest = value - quotient * columns
        below = np.int64(rest < 0)
        quotient -= below
        rest += below * columns
        above = np.int64(rest >= columns)
        left[position] = np.uint64(quotient + above)
        right[position] = np.uint64(rest - above * columns)


@kernel
def _rounds(
    left: NDArray[np.uint64],
    right: NDArray[np.uint64],
    count: int,
    keys: NDArray[np.uint64],
    rows: np.uint64,
    columns: np.uint64,
    is_inverse: bool,
) -> None:
    rounds = keys.shape[0]
    if is_inverse:
        for turn in range(rounds - 1, 0, -2):
            _subtract_round(left, right, count, keys[turn, 0], keys[turn, 1], columns)
            _subtract_round(right, left, count, keys[turn - 1, 0], keys[turn - 1, 1], rows)
    else:
        for turn in range(0, rounds, 2):
            _add_round(right, left, count, keys[turn, 0], keys[turn, 1], rows)
            _add_round(left, right, count, keys[turn + 1, 0], keys[turn + 1, 1], columns)


@kernel
def permute(
    values: NDArray[np.int64],
    out: NDArray[np.int64],
    begin: int,
    end: int,
    base: int,
    size: int,
    rows: int,
    columns: int,
    keys: NDArray[np.uint64],
    is_inverse: bool,
) -> None:
    """Write the permuted values[begin:end] to out[begin:end], all of them in [base, base + size).

    The generalised Feistel network of `penstock.plan.bijection`: a value less base is left * columns + right
    with left below `rows` and right below `columns`; rounds add to left a function of right, modulo rows, and
    to right a function of left, modulo columns, in turn. A result outside [0, size) goes through again (cycle
    walking). Rounds are the outer loop and positions the inner one, which LLVM so turns into vector
    instructions: 20 times as fast as position by position.

    values, out: int64[n]; size at most 2**62. out is written.
    rows, columns: rows * columns >= size, each at most 2**31.
    keys: uint64[rounds, 2], per round a 32-bit key and an odd 32-bit multiplier; rounds is even.
    """
    left = np.empty(_BLOCK, np.uint64)
    right = np.empty(_BLOCK, np.uint64)
    walked = np.empty(1, np.int64)
    n_rows, n_columns = np.uint64(rows), np.uint64(columns)
    for block in range(begin, end, _BLOCK):
        count = min(_BLOCK, end - block)
        _split(values, block, count, base, np.int64(columns), left, right)
        _rounds(left, right, count, keys, n_rows, n_columns, is_inverse)
        largest = np.int64(0)
        for position in range(count):
            value = np.int64(left[position] * n_columns + right[position])
            out[block + position] = base + value
            largest = max(largest, value)
        if largest >= size:
            for position in range(block, block + count):
                while out[position] - base >= size:
                    walked[0] = out[position] - base
                    _split(walked, 0, 1, 0, np.int64(columns), left, right)
                    _rounds(left, right, 1, keys, n_rows, n_columns, is_inverse)
                    out[position] = base + np.int64(left[0] * n_columns + right[0])


@kernel
def permute_runs(
    values: NDArray[np.int64],
    out: NDArray[np.int64],
    run_starts: NDArray[np.int64],
    bases: NDArray[np.int64],
    sizes: NDArray[np.int64],
    rows: NDArray[np.int64],
    columns: NDArray[np.int64],
    keys: NDArray[np.uint64],
    is_inverse: bool,
) -> None:
    """Permute consecutive runs of values, each in its own domain under its own keys.

    run_starts: int64[runs + 1], run r is values[run_starts[r]:run_starts[r + 1]].
    bases, sizes, rows, columns: int64[runs]; keys: uint64[runs, rounds, 2]; the rest as in `permute`.
    """
    for run in range(sizes.size):
        permute(
            values,
            out,
            run_starts[run],
            run_starts[run + 1],
            bases[run],
            sizes[run],
            rows[run],
            columns[run],
            keys[run],
            is_inverse,
        )


@kernel
def shuffle_by_swaps(table: NDArray[np.int64], words: NDArray[np.uint64], begin: int) -> None:
    """Swap table[i] with table[i + word % (n - i)] for the i from `begin` on, one per word.

    table: int64[n], shuffled in place. words: uint64[steps], 32 random bits each.
    """
    length = np.uint64(table.size)
    for step in range(words.size):
        position = begin + step
        other = position + np.int64(words[step] % (length - np.uint64(position)))
        table[position], table[other] = table[other], table[position]


@kernel
def shuffle_inside_out(table: NDArray[np.int64], words: NDArray[np.uint64], begin: int) -> None:
    """Insert the numbers from `begin` on into a growing permutation, each at word % (number + 1).

    table: int64[n], of which the first `begin` are set; the next words.size are written.
    words: uint64[steps], 64 random bits each.
    """
    for step in range(words.size):
        number = begin + step
        other = np.int64(words[step] % np.uint64(number + 1))
        table[number] = table[other]
        table[other] = number


@kernel
def mark_reads(
    ids: NDArray[np.int64],
    begin: int,
    marks: NDArray[np.uint64],
    known: NDArray[np.uint64],
    first: NDArray[np.signedinteger[Any]],
) -> None:
    """Note which samples a rank reads, one bit each, which a cache holds where counts would not; and where first.

    ids: int64[n], what it reads at the places from `begin` on of its access string.
    marks, known: uint64[F / 64, rounded up], bits of those that it reads in this epoch, and that it has read so far.
    first: int32 or int64[F], the place of the first read of each. All three are written.
    """
    one = np.uint64(1)
    for index in range(ids.size):
        sample = ids[index]
        word, bit = sample >> 6, one << np.uint64(sample & 63)
        marks[word] |= bit
        if not known[word] & bit:
            known[word] |= bit
            first[sample] = begin + index


@kernel
def count_marks(marks: NDArray[np.uint64], counts: NDArray[np.signedinteger[Any]]) -> None:
    """Add the marks of an epoch to counts, int32 or int64[F], and take them away. Both are written."""
    one = np.uint64(1)
    for word in range(marks.size):
        bits = marks[word]
        for place in range(min(64, counts.size - 64 * word)):
            counts[64 * word + place] += np.int32((bits >> np.uint64(place)) & one)
        marks[word] = 0
