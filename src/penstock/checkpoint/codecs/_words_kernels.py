"""Words: a block's values as integers whose highest bits say the most, and back. Compiled.

All arithmetic is on words of 32 bits, or of 64 for wider types, at whose upper end a value's bits stand: a bfloat16 is
a float32 with 16 zeros below it, and a float32 that once was a bfloat16 looks the same. What a word is coded as:

    difference   new - old of integers that sort as the numbers do, counted away from zero as the old one has it;
                 without its trailing zeros; its sign put below its leading one, so that few high bits say the most:
                     |d| = 1xxxx, sign s  ->  1sxxxx;      0 -> 0;      the lowest integer -> 1
    plane        exponent, highest bit of the mantissa, sign, what is left of the mantissa
    byte         the difference itself

Measured: docs/decisions/0012-own-codec.md; 0.05 to 0.2 ns per value each.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.codecs._bits_kernels import item_bytes, leading_zeros, left, right
from penstock.checkpoint.codecs._tans_kernels import Int, Words
from penstock.checkpoint.codecs.kernel_sizes import FINEST, PLANE_KEYS
from penstock.kernel import kernel

Bytes = NDArray[np.uint8]

#: Bytes that are compared at once.
_PIECE = 1024


@kernel
def load(data: Bytes, first: Int, item: Int, words: Words) -> None:
    """Take values as words, each at the upper end of one. first: the first one's index; item: bytes of each."""
    if item_bytes(words) == 8:
        wide = data[8 * first : 8 * (first + words.size)].view(np.uint64)
        for i in range(words.size):
            words[i] = wide[i]
    elif item == 4:
        singles = data[4 * first : 4 * (first + words.size)].view(np.uint32)
        for i in range(words.size):
            words[i] = singles[i]
    elif item == 2:
        halves = data[2 * first : 2 * (first + words.size)].view(np.uint16)
        for i in range(words.size):
            words[i] = np.uint32(halves[i]) << np.uint32(16)
    else:
        for i in range(words.size):
            words[i] = np.uint32(data[first + i]) << np.uint32(24)


@kernel
def loaded(data: Bytes, first: Int, size: Int, item: Int, space: Words) -> Words:
    """Return so many values as words: where they stand if they are words, else in `space`."""
    if item == item_bytes(space):
        return data[item * first : item * (first + size)].view(space.dtype)
    words = space[:size]
    load(data, first, item, words)
    return words


@kernel
def store(words: Words, data: Bytes, first: Int, item: Int) -> None:
    """The inverse of `load`."""
    if item_bytes(words) == 8:
        wide = data[8 * first : 8 * (first + words.size)].view(np.uint64)
        for i in range(words.size):
            wide[i] = words[i]
    elif item == 4:
        singles = data[4 * first : 4 * (first + words.size)].view(np.uint32)
        for i in range(words.size):
            singles[i] = words[i]
    elif item == 2:
        halves = data[2 * first : 2 * (first + words.size)].view(np.uint16)
        for i in range(words.size):
            halves[i] = words[i] >> np.uint32(16)
    else:
        for i in range(words.size):
            data[first + i] = words[i] >> np.uint32(24)


@kernel
def is_equal(values: Bytes, reference: Bytes) -> bool:
    """Return whether all bytes are the reference's: known at the first piece where they are not."""
    begin = 0
    while begin < values.size:
        end = min(begin + _PIECE, values.size)
        differing = np.uint8(0)
        for i in range(begin, end):
            differing |= values[i] ^ reference[i]
        if differing != 0:
            return False
        begin = end
    return True


@kernel
def ones_of(words: Words) -> np.uint64:
    """Return the bits that are 1 in any word."""
    ones = words.dtype.type(0)
    for i in range(words.size):
        ones |= words[i]
    return np.uint64(ones)


@kernel
def to_differences(
    new_words: Words,
    old_words: Words,
    shift: Int,
    is_float: bool,
    is_byte: bool,
    exponent_at: Int,
    exponent_mask: Int,
    exact: Int,
    words: Words,
    keys: NDArray[np.uint16],
    exponents: NDArray[np.uint16],
) -> None:
    """Write each difference as a word, its key (what a symbol can tell of it) and the reference's exponent.

    All arrays are of one size. shift: how many lowest bits, 0 in all new and old words, are left out.
    exact: FINEST to MOST_EXACT. A word below 2 ** exact is its own key; from there on each place of a leading one has
        2 ** FINEST keys, by the bits below it.
    """
    to_word = words.dtype.type
    top, zero, one = to_word(item_bytes(words) * 8 - 1), to_word(0), to_word(1)
    down_by, key_by = to_word(shift), to_word(top - to_word(FINEST))
    lowest = left(one, top)
    farthest = right(lowest, down_by)  # the size of the lowest integer, whose word would be a bit too long
    below = to_word(1 << exact)
    key_at = to_word(below - to_word((exact + 1) << FINEST))
    turned = to_word(zero - one) if is_float else zero
    flipped = left(right(right(turned, one), down_by), down_by)
    for i in range(words.size):
        new, old = new_words[i], old_words[i]
        exponents[i] = np.uint16(to_word(right(old, to_word(exponent_at)) & to_word(exponent_mask)))
        below_zero = to_word(zero - right(old, top))
        new = to_word(new ^ to_word(to_word(zero - right(new, top)) & flipped))
        old = to_word(old ^ to_word(below_zero & flipped))
        turn = to_word(below_zero & turned)
        difference = to_word(to_word(to_word(new - old) ^ turn) - turn)
        if is_byte:
            word = right(difference, down_by)
            words[i] = word
            keys[i] = np.uint16(word)
        else:
            sign = to_word(zero - right(difference, top))
            size = right(to_word(to_word(difference ^ sign) - sign), down_by)
            leading = right(lowest, leading_zeros(to_word(size | one)))
            word = to_word(to_word(size + leading) + to_word(sign & leading))
            word = zero if size == zero else word
            word = one if size == farthest else word
            words[i] = word
            zeros = leading_zeros(to_word(word | one))
            highest = right(left(word, zeros), key_by)
            key = to_word(to_word(left(to_word(top - zeros), to_word(FINEST)) + highest) + key_at)
            keys[i] = np.uint16(word if word < below else key)


@kernel
def to_exponents(
    old_words: Words, exponent_at: Int, exponent_mask: Int, exponents: NDArray[np.uint16]
) -> None:
    """Write the reference's exponents, as `to_differences` does."""
    to_word = old_words.dtype.type
    for i in range(old_words.size):
        exponents[i] = np.uint16(to_word(right(old_words[i], to_word(exponent_at)) & to_word(exponent_mask)))


@kernel
def from_differences(
    words: Words, old_words: Words, shift: Int, is_float: bool, is_byte: bool, new_words: Words
) -> None:
    """The inverse of `to_differences`."""
    to_word = words.dtype.type
    top, zero, one = to_word(item_bytes(words) * 8 - 1), to_word(0), to_word(1)
    down_by = to_word(shift)
    lowest = left(one, top)
    turned = to_word(zero - one) if is_float else zero
    flipped = left(right(right(turned, one), down_by), down_by)
    for i in range(words.size):
        word = to_word(words[i])
        if is_byte:
            difference = left(word, down_by)
        else:
            leading = right(lowest, leading_zeros(to_word(word | one)))
            half = right(leading, one)
            size = to_word(to_word(word - leading) | half)
            sign = to_word(zero - to_word(to_word(word & half) != zero))
            size = left(size, down_by)
            difference = to_word(to_word(size ^ sign) - sign)
            difference = zero if word == zero else difference
            difference = lowest if word == one else difference
        old = old_words[i]
        below_zero = to_word(zero - right(old, top))
        old = to_word(old ^ to_word(below_zero & flipped))
        turn = to_word(below_zero & turned)
        new = to_word(old + to_word(to_word(difference ^ turn) - turn))
        new = to_word(new ^ to_word(to_word(zero - right(new, top)) & flipped))
        new_words[i] = new


@kernel
def to_planes(
    new_words: Words, shift: Int, rest_bits: Int, first: Int, words: Words, keys: NDArray[np.uint16]
) -> None:
    """Write each float as a word, and its key: the word above `rest_bits` less `first`, at most PLANE_KEYS.

    rest_bits: of the mantissa below its highest bit, less `shift`, which is at most as many.
    """
    to_word = words.dtype.type
    top, one = to_word(item_bytes(words) * 8 - 1), to_word(1)
    down_by, rest_by = to_word(shift), to_word(rest_bits)
    above = to_word(rest_bits + shift + 1)
    below = to_word(left(one, above) - one)
    for i in range(words.size):
        value = new_words[i]
        sign = right(value, top)
        value = left(value, one)
        word = left(right(value, above), above) | right(to_word(value & below), one)
        word = right(to_word(word | left(sign, to_word(above - one))), down_by)
        words[i] = word
        key = to_word(right(word, rest_by) - to_word(first))
        keys[i] = np.uint16(min(key, to_word(PLANE_KEYS)))


@kernel
def from_planes(words: Words, shift: Int, rest_bits: Int, new_words: Words) -> None:
    """The inverse of `to_planes`."""
    to_word = words.dtype.type
    top, one = to_word(item_bytes(words) * 8 - 1), to_word(1)
    down_by = to_word(shift)
    above = to_word(rest_bits + shift + 1)
    below = to_word(left(one, to_word(above - one)) - one)
    for i in range(words.size):
        word = left(to_word(words[i]), down_by)
        sign = to_word(right(word, to_word(above - one)) & one)
        value = to_word(left(right(word, above), to_word(above - one)) | to_word(word & below))
        new_words[i] = to_word(value | left(sign, top))
