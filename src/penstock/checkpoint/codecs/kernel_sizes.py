"""What the codec's kernels take and return, for those who call them without numba."""

from __future__ import annotations

from penstock.checkpoint.state.tensors import BLOCK_VALUES
from penstock.machine_code import Signature

#: Values that go through all loops together: what is between them stays in the first-level cache.
CHUNK = 2048
#: A chunk, and a value of each lane before it.
SPACE = CHUNK + 4
#: Bits of a difference below its leading one that a key tells apart, where it does not tell all: its sign and two more.
FINEST = 3
#: Words below 2 to this have a key each, where that pays.
MOST_EXACT = 11
MOST_EXACT_KEYS = 1 << MOST_EXACT
#: Keys of a plane: exponent, highest bit of the mantissa, sign.
PLANE_KEYS = 1024
#: Keys of a context: the exact ones, and those of longer 64-bit differences.
MOST_KEYS = MOST_EXACT_KEYS + ((64 - MOST_EXACT) << FINEST)
#: Tables of a block: contexts by the reference's exponent times groups of what came before.
MOST_CONTEXTS, MOST_GROUPS = 16, 4
#: Symbols and escapes of a table.
MOST_SYMBOLS = MOST_KEYS + MOST_GROUPS
MOST_IN_GROUPS = MOST_GROUPS * MOST_SYMBOLS
#: A table has at most 2 ** 12 states.
MOST_TABLE_LOG = 12
MOST_STATES = 1 << MOST_TABLE_LOG
#: Exponents are at most of 11 bits.
MOST_EXPONENTS = 2048
#: Estimates of a block's size that differ by less may be wrong about which is smaller: they are made from one value in
#: 16 or 64, and count no tables.
NEARLY_EQUAL = 0.02

#: Fixed part of a payload, what ends the tables (four states, bits in the stream), and what follows the stream.
HEADER_BYTES, STATES_BYTES, PAD_BYTES = 10, 12, 8

#: Sizes of scratch arrays: what `encode` and `decode` call `scratch`, `counts`, `states`, `steps`, `buffer`, `table`.
SCRATCH = 3 * SPACE + MOST_EXPONENTS + 2 * MOST_KEYS + 2 * BLOCK_VALUES
TABLES_COUNTS = MOST_CONTEXTS * MOST_SYMBOLS
COUNTS = PLANE_KEYS + 1 + 2 * TABLES_COUNTS + 2 * MOST_KEYS + 1
STATES = (MOST_CONTEXTS + 1) << MOST_TABLE_LOG
STEPS = MOST_CONTEXTS * MOST_KEYS
#: Three chunks, and the runs that are looked at of values and reference, all of a block at most.
BUFFER = 3 * SPACE + 2 * BLOCK_VALUES
TABLE = MOST_CONTEXTS << MOST_TABLE_LOG

#: What `decode` returns: all is well, or what is wrong.
WELL, BAD_HEADER, BAD_SYMBOLS, BAD_FREQUENCIES, BAD_LENGTH, BAD_STREAM = range(6)

_BYTES, _SHORTS, _LONGS = "uint8[:]", "uint16[:]", "uint64[:]"
_FORM = ("int64",) * 5


def _encode(words: str) -> Signature:
    limits = ("int64",) * 3
    scratch = (words, _SHORTS, "uint32[:]", _SHORTS, _LONGS)
    return Signature((_BYTES, _BYTES, *_FORM, *limits, *scratch, _BYTES), ("int64", "int64", "float64"))


def _decode(words: str) -> Signature:
    return Signature((_BYTES, "int64", _BYTES, *_FORM, words, _SHORTS, _LONGS, _BYTES), ("int64",))


#: By what a kernel does and the words it does it with.
SIGNATURES = {
    f"{what} {word}": signature(f"{name}[:]")
    for what, signature in (("encode", _encode), ("decode", _decode))
    for word, name in (("u4", "uint32"), ("u8", "uint64"))
}
