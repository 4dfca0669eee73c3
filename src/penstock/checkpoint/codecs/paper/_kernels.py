"""The compiled loops of the delta-snapshot paper's codes. Imported when a block is first coded: it loads numba.

A stream of bits is written from the most significant bit of its first byte on. Loops over words take them as uint32,
narrower ones widened, or uint64, with the `width` in bits that they have in the snapshot; one that only reads passes
2.5 GB/s on one core. Streams are read through `windows`, the payload as big-endian uint64 with one more at its end.

Measured: float32, one core of an AMD EPYC: heading zeros in at 1.9 GB/s, 1.3 with the first look, out at 1.0.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.kernel import inlined, kernel

# In numba an int beside a uint64 makes a float64, so every constant is a uint64 already.
_ONE, _TWO, _FIVE, _SIX = np.uint64(1), np.uint64(2), np.uint64(5), np.uint64(6)
_SEVEN, _EIGHT, _WORD = np.uint64(7), np.uint64(8), np.uint64(32)
_IN_WORD, _IN_WINDOW, _ALL_ONES = np.uint64(31), np.uint64(63), np.uint64(0xFFFFFFFF)
_BYTE_1, _BYTE_2, _BYTE_3 = np.uint64(8), np.uint64(16), np.uint64(24)

_Words = NDArray[np.uint32] | NDArray[np.uint64]


@inlined
def _put(out: NDArray[np.uint8], at: np.uint64, word: np.uint64) -> None:
    """Write 32 bits, the highest byte first: four stores that the compiler makes one."""
    out[at] = np.uint8(word >> _BYTE_3)
    out[at + _ONE] = np.uint8(word >> _BYTE_2)
    out[at + _TWO] = np.uint8(word >> _BYTE_1)
    out[at + np.uint64(3)] = np.uint8(word)


@inlined
def _window(windows: NDArray[np.uint64], place: np.uint64) -> np.uint64:
    """Return the 64 bits of a stream from a place on."""
    index, shift = place >> _SIX, place & _IN_WINDOW
    first, second = np.uint64(windows[index]), np.uint64(windows[index + _ONE])
    return (first << shift) | ((second >> _ONE) >> (_IN_WINDOW - shift))


@inlined
def _top(window: np.uint64, bits: np.uint64) -> np.uint64:
    """Return the first so many bits, 0 to 64, of a window as a number."""
    return np.uint64(0) if bits == np.uint64(0) else window >> (np.uint64(64) - bits)


@kernel
def _significant_bits(word: np.uint64) -> np.uint64:
    """Return the place above the highest one bit.

    The compiler makes one instruction of the loop, as long as it meets it alone: not in a function that is `inlined`.
    """
    bits = np.uint64(0)
    while word:
        bits += _ONE
        word >>= _ONE
    return bits


# -- Heading zeros (section 3.1) -------------------------------------------------------------------------


@kernel
def count_heading_zeros(words: _Words, width: int, counts: NDArray[np.int64]) -> None:
    """Add up how many words have how many heading zeros. counts: int64[width + 1]."""
    for index in range(words.size):
        counts[width - np.int64(_significant_bits(np.uint64(words[index])))] += 1


@kernel
def pack_heading_zeros(
    words: _Words, width: int, heading_bits: int, out: NDArray[np.uint8], begin: int, limit: int
) -> np.int64:
    """Write of each word the number of its heading zeros, as far as its bits can say it, then the bits after those.

    out: written from byte `begin` on, at most 16 bytes beyond `limit`.
    Returns: where the stream ends, in bytes; -1 if that would be beyond `limit`.
    """
    most, heading = np.uint64((1 << heading_bits) - 1), np.uint64(heading_bits)
    wide, end = np.uint64(width), np.uint64(limit)
    # The lowest `pending` (below 32) bits of `held` are not written yet. A word is stored after every push, and
    # counts only if it is full: no branch to foretell.
    held, pending, at = np.uint64(0), np.uint64(0), np.uint64(begin)
    for index in range(words.size):
        word = np.uint64(words[index])
        zeros = min(wide - _significant_bits(np.uint64(words[index])), most)
        left = wide - zeros
        held = (held << heading) | zeros
        pending += heading
        _put(out, at, held >> (pending & _IN_WORD))
        at += (pending >> _FIVE) << _TWO
        pending &= _IN_WORD
        if left > _WORD:
            upper = left - _WORD
            held = (held << upper) | (word >> _WORD)
            pending += upper
            _put(out, at, held >> (pending & _IN_WORD))
            at += (pending >> _FIVE) << _TWO
            pending &= _IN_WORD
            left = _WORD
        held = (held << left) | (word & _ALL_ONES)
        pending += left
        _put(out, at, held >> (pending & _IN_WORD))
        at += (pending >> _FIVE) << _TWO
        pending &= _IN_WORD
        if at > end:
            return np.int64(-1)
    _put(out, at, held << (_WORD - pending))
    written = np.int64(at + ((pending + _SEVEN) >> np.uint64(3)))
    return written if written <= limit else np.int64(-1)


@kernel
def unpack_heading_zeros(
    windows: NDArray[np.uint64], bits: int, width: int, heading_bits: int, words: _Words
) -> np.int64:
    """Read what `pack_heading_zeros` wrote. bits: of the stream.

    Returns: how many of them the words took; -1 if they are too few, or zeros are more than a word has.
    """
    heading, wide, end = np.uint64(heading_bits), np.uint64(width), np.uint64(bits)
    place = np.uint64(0)
    for index in range(words.size):
        window = _window(windows, place)
        zeros = (window >> _ONE) >> (_IN_WINDOW - heading)
        if zeros > wide:
            return np.int64(-1)
        left = wide - zeros
        if heading + left > np.uint64(64):
            if place + heading > end:
                return np.int64(-1)
            window = _window(windows, place + heading)
        else:
            window <<= heading
        place += heading + left
        if place > end:
            return np.int64(-1)
        words[index] = _top(window, left)
    return np.int64(place)


# -- Exponents (section 3.3.2) ---------------------------------------------------------------------------


@kernel
def count_exponents(words: _Words, mantissa_bits: int, counts: NDArray[np.int64]) -> None:
    """Add up how many words have which exponent. counts: int64[a power of two]."""
    shift, mask = np.uint64(mantissa_bits), np.uint64(counts.size - 1)
    for index in range(words.size):
        counts[(np.uint64(words[index]) >> shift) & mask] += 1


@kernel
def pack_exponents(
    words: _Words,
    mantissa_bits: int,
    codes: NDArray[np.uint64],
    lengths: NDArray[np.uint64],
    out: NDArray[np.uint8],
    begin: int,
) -> np.int64:
    """Write the code of each word's exponent.

    codes, lengths: uint64[a power of two], lengths at most 32, none of them 0 for an exponent that occurs.
    out: written from byte `begin` on, at most 4 bytes beyond the end. Returns: where the stream ends, in bytes.
    """
    shift, mask = np.uint64(mantissa_bits), np.uint64(codes.size - 1)
    held, pending, at = np.uint64(0), np.uint64(0), np.uint64(begin)
    for index in range(words.size):
        exponent = (np.uint64(words[index]) >> shift) & mask
        held = (held << lengths[exponent]) | codes[exponent]
        pending += lengths[exponent]
        _put(out, at, held >> (pending & _IN_WORD))
        at += (pending >> _FIVE) << _TWO
        pending &= _IN_WORD
    _put(out, at, held << (_WORD - pending))
    return np.int64(at + ((pending + _SEVEN) >> np.uint64(3)))


@kernel
def pack_rest(words: _Words, mantissa_bits: int, width: int, out: NDArray[np.uint8], begin: int) -> np.int64:
    """Write sign and mantissa of each word, without its exponent.

    out: written from byte `begin` on, at most 4 bytes beyond the end. Returns: where the stream ends, in bytes.
    """
    mantissa, top = np.uint64(mantissa_bits), np.uint64(width - 1)
    lower = min(mantissa, _WORD)
    upper = mantissa - lower + _ONE  # with the sign
    held, pending, at = np.uint64(0), np.uint64(0), np.uint64(begin)
    for index in range(words.size):
        word = np.uint64(words[index])
        rest = word & ((_ONE << mantissa) - _ONE)
        held = (held << upper) | ((word >> top) << (upper - _ONE)) | (rest >> lower)
        pending += upper
        _put(out, at, held >> (pending & _IN_WORD))
        at += (pending >> _FIVE) << _TWO
        pending &= _IN_WORD
        held = (held << lower) | (rest & ((_ONE << lower) - _ONE))
        pending += lower
        _put(out, at, held >> (pending & _IN_WORD))
        at += (pending >> _FIVE) << _TWO
        pending &= _IN_WORD
    _put(out, at, held << (_WORD - pending))
    return np.int64(at + ((pending + _SEVEN) >> np.uint64(3)))


@kernel
def unpack_floats(
    windows: NDArray[np.uint64],
    bits: int,
    table: NDArray[np.uint32],
    firsts: NDArray[np.uint64],
    symbols: NDArray[np.uint32],
    mantissa_bits: int,
    width: int,
    words: _Words,
) -> np.int64:
    """Read what `pack_exponents` wrote into the first `bits` of a stream, and `pack_rest` behind them.

    Both at once: the one waits for each code's length, and the other fills the time (float32: 0.71 to 0.8 GB/s).

    table: uint32[2**b], for the next b bits: symbol * 64 + length of the code that they begin with, 0 where it is
        longer than b or none.
    firsts: uint64[33, 2]; [length, 0]: the first code above those of this length, its bits to the left of 32;
        [length, 1]: what is added, modulo 2**64, to a code of this length for its index in `symbols`.
    Returns: the place after the last code; -1 if there is no such code, or it is beyond `bits`.
    """
    mantissa, top, end = np.uint64(mantissa_bits), np.uint64(width - 1), np.uint64(bits)
    looked_at = _significant_bits(np.uint64(table.size - 1))
    not_looked_at = np.uint64(64) - looked_at
    place, place_of_rest = np.uint64(0), end
    for index in range(words.size):
        window = _window(windows, place)
        entry = np.uint64(table[window >> not_looked_at])
        length, symbol = entry & _IN_WINDOW, entry >> _SIX
        if length == np.uint64(0):
            code = window >> _WORD
            length = looked_at + _ONE
            while length <= _WORD and code >= firsts[length, 0]:
                length += _ONE
            if length > _WORD:
                return np.int64(-1)
            symbol = np.uint64(symbols[(code >> (_WORD - length)) + firsts[length, 1]])
        place += length
        if place > end:
            return np.int64(-1)
        rest = _window(windows, place_of_rest)
        place_of_rest += mantissa + _ONE
        words[index] = ((rest >> _IN_WINDOW) << top) | (symbol << mantissa) | _top(rest << _ONE, mantissa)
    return np.int64(place)
