"""The delta-snapshot paper's ways of storing a snapshot, and those that it compares them with, bit for bit.

    codec        baselines                  deltas to the reference
    stored       as they are                (as they are)
    gzip         gzip                       (gzip)
    gzip-delta   gzip                       XOR, gzip
    rle0...rle6  as they are                XOR, so many heading bits
    rle4-gzip    gzip                       XOR, 4 heading bits, gzip
    dynrle       Huffman-coded exponents    XOR, as many heading bits as make the snapshot's deltas smallest

A delta is the XOR with the reference's words; of each word its heading bits say how many zeros lead it, as far as they
can, and the rest of it follows, all in one stream of bits. Which baseline goes with which delta is what
`penstock.simulate.snapshots.METHODS` says; schemes, "progressive" and "chain", are the store's.

The paper has words of 32 bits, whole snapshots in one piece, and no other numbers. Beyond it: words of 8, 16 and 64
bits take 0 to 3, 4 and 6 heading bits; dynrle chooses one width for all words of a size, and has one Huffman code for
all floats of a type; every block names its width, or has its code, so that it can be read alone; what is no float is
stored as it is in dynrle's baselines; and a block that would not get smaller is stored as it is.

Source: Wang, Boukhobza and Shao, "Preserving SSD lifetime in deep learning applications with delta snapshots",
Journal of Parallel and Distributed Computing 133, 2019: "the paper" below.
"""

from __future__ import annotations

import functools
import heapq
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.codecs.codec import Codec, Coder, Decoder, Kind, Pair
from penstock.checkpoint.state.dtypes import DType
from penstock.checkpoint.state.tensors import Bytes
from penstock.errors import FormatError
from penstock.simulate.snapshots import METHODS, Baseline, Delta, Method

#: What the gzip program does by default, and its header without name and time.
_GZIP_LEVEL, _GZIP_WINDOW = 6, 31
#: Widths of headings that a static codec can be asked for: as many as can be right for 64 bits.
_STATIC_BITS = range(7)
#: A longer code needs an exponent that is rarer than one in five million.
_LONGEST_CODE = 32
#: Codes of up to so many bits are looked up at once.
_LOOKED_AT_BITS = 12

_Words = NDArray[np.uint32] | NDArray[np.uint64]
_Key = TypeVar("_Key", int, str)


@functools.cache
def _loops() -> Any:
    """Return the module of the compiled loops, which is loaded with numba when a block is first coded."""
    from penstock.checkpoint.codecs.paper import _kernels

    return _kernels


# -- Words -----------------------------------------------------------------------------------------------


def word_bits(dtype: DType) -> int:
    """Return how many bits the words have that are compared: those of a number, or of each part of a complex one."""
    parts = 2 if dtype.name.startswith("complex") else 1
    return 8 * dtype.item_bytes // parts


def _words_of(data: Bytes, bits: int) -> _Words:
    """Return a copy as the kernels take it: aligned, writable, of 32 bits a word or 64."""
    words = data.view(f"<u{bits // 8}")
    return words.astype(np.uint64) if bits == 64 else words.astype(np.uint32)


def _empty_words(nbytes: int, bits: int) -> _Words:
    count = 8 * nbytes // bits
    return np.empty(count, np.uint64) if bits == 64 else np.empty(count, np.uint32)


def _bytes_of(words: _Words, bits: int) -> Bytes:
    return words.astype(f"<u{bits // 8}", copy=False).view(np.uint8)


def _difference(values: Bytes, reference: Bytes, dtype: DType) -> _Words:
    return _words_of(values ^ reference, word_bits(dtype))


def _windows(payload: Bytes) -> NDArray[np.uint64]:
    """Return a payload as the kernels read streams: big-endian words, and zeros behind for a word and a half."""
    padded = np.zeros(-(-payload.size // 8) + 2, ">u8")
    padded.view(np.uint8)[: payload.size] = payload
    return padded.astype(np.uint64)


# -- Heading zeros ---------------------------------------------------------------------------------------


def heading_zeros(values: Bytes, reference: Bytes, dtype: DType) -> NDArray[np.int64]:
    """Return how many words begin with how many bits equal to their reference's: int64[bits of a word + 1].

    values, reference: uint8[n].
    """
    bits = word_bits(dtype)
    counts = np.zeros(bits + 1, np.int64)
    _loops().count_heading_zeros(_difference(values, reference, dtype), bits, counts)
    return counts


def delta_bits(zeros: NDArray[np.int64], heading_bits: int) -> int:
    """Return the size of a delta in bits. zeros: of `heading_zeros`. Source: the paper's Algorithm 1, line 5."""
    bits = zeros.size - 1
    saved = np.minimum(2**heading_bits - 1, np.arange(zeros.size))
    return int(zeros @ (bits + heading_bits - saved))


def best_heading_bits(zeros: NDArray[np.int64]) -> int:
    """Return how many heading bits make a delta smallest, the fewest of several.

    zeros: of `heading_zeros`. Source: the paper's Algorithm 1, its 0 to 5 for 32 bits being 0 to log2(bits).
    """
    most = (zeros.size - 1).bit_length() - 1
    return min(range(most + 1), key=lambda heading_bits: delta_bits(zeros, heading_bits))


def delta_block_bytes(zeros: NDArray[np.int64], heading_bits: int, nbytes: int) -> int:
    """Return what a block takes as a delta. zeros: of this block, see `heading_zeros`. nbytes: of its values."""
    return min(nbytes, 1 + -(-delta_bits(zeros, heading_bits) // 8))


def _pack_delta(pair: Pair, heading_bits: int, out: Bytes) -> int | None:
    """Write a block of kind HEADING_ZEROS; return its bytes, or None if it is no smaller than the values."""
    assert pair.reference is not None, "a delta is to a reference"
    difference = _difference(pair.values, pair.reference, pair.dtype)
    out[0] = heading_bits
    end = _loops().pack_heading_zeros(
        difference, word_bits(pair.dtype), heading_bits, out, 1, pair.values.size - 1
    )
    return None if end < 0 else int(end)


def _unpack_delta(payload: Bytes, dtype: DType, reference: Bytes | None, out: Bytes) -> None:
    reference = _reference(reference, out)
    if payload.size < 1 or payload[0] not in _STATIC_BITS:
        raise FormatError("a block of heading zeros does not begin with their width, 0 to 6")
    bits = word_bits(dtype)
    words = _empty_words(out.size, bits)
    stream = payload[1:]
    end = _loops().unpack_heading_zeros(_windows(stream), 8 * stream.size, bits, int(payload[0]), words)
    if end < 0 or -(-end // 8) != stream.size:
        raise FormatError(f"a block of heading zeros is damaged: it is not one of {words.size:,} numbers")
    np.bitwise_xor(_bytes_of(words, bits), reference, out=out)


def _reference(reference: Bytes | None, out: Bytes) -> Bytes:
    if reference is None or reference.size != out.size:
        raise FormatError("a block is a difference, and what it is the difference to is not there")
    return reference


# -- Exponents -------------------------------------------------------------------------------------------


def exponent_counts(values: Bytes, dtype: DType) -> NDArray[np.int64]:
    """Return how many floats have which exponent: int64[2**exponent_bits]. values: uint8[n]."""
    counts = np.zeros(1 << dtype.exponent_bits, np.int64)
    bits = word_bits(dtype)
    _loops().count_exponents(_words_of(values, bits), dtype.mantissa_bits, counts)
    return counts


def huffman_lengths(counts: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Return the length in bits of each symbol's code: uint8, 0 for one that does not occur, 1 for an only one.

    Source: the paper, section 3.3.2. Codes are kept to 32 bits by halving the counts, which no model's exponents need.
    """
    weights = counts
    while True:
        lengths = _tree_depths(weights)
        if lengths.max(initial=0) <= _LONGEST_CODE:
            return lengths.astype(np.uint8)
        weights = -(-weights // 2)


def _tree_depths(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    depths = np.zeros(counts.size, np.int64)
    # A node: its count, a number that makes ties come out alike everywhere, the symbols below it.
    heap = [(int(counts[symbol]), int(symbol), [int(symbol)]) for symbol in np.flatnonzero(counts)]
    heapq.heapify(heap)
    if len(heap) == 1:
        depths[heap[0][2]] = 1
    joined = counts.size
    while len(heap) > 1:
        (one, _, left), (two, _, right) = heapq.heappop(heap), heapq.heappop(heap)
        below = left + right
        depths[below] += 1
        heapq.heappush(heap, (one + two, joined, below))
        joined += 1
    return depths


@dataclass(frozen=True, slots=True, eq=False)
class _HuffmanCode:
    """Codes in the canonical order: by length, then by symbol.

    lengths: uint8[symbols], 0 for those without a code. Raises: FormatError if there cannot be such codes.
    """

    lengths: NDArray[np.uint8]
    #: uint32, those with a code, in the order of their codes.
    symbols: NDArray[np.uint32] = field(init=False)
    #: uint64 of each of `symbols`.
    codes: NDArray[np.uint64] = field(init=False)

    def __post_init__(self) -> None:
        used = np.flatnonzero(self.lengths)
        symbols = used[np.argsort(self.lengths[used], kind="stable")]
        lengths = self.lengths[symbols].astype(np.uint64)
        if symbols.size == 0 or lengths[-1] > _LONGEST_CODE:
            raise FormatError(f"a Huffman code has no codes, or longer ones than {_LONGEST_CODE} bits")
        # Of all codes of 32 bits, each shorter one is the first of so many; codes follow each other without a gap.
        space = np.uint64(1) << (np.uint64(_LONGEST_CODE) - lengths)
        ends = np.cumsum(space)
        if ends[-1] > 1 << _LONGEST_CODE:
            raise FormatError("a Huffman code has more codes than there can be of their lengths")
        object.__setattr__(self, "symbols", symbols.astype(np.uint32))
        object.__setattr__(self, "codes", (ends - space) >> (np.uint64(_LONGEST_CODE) - lengths))

    def by_symbol(self) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Return codes and lengths by symbol, as `pack_exponents` takes them."""
        codes = np.zeros(self.lengths.size, np.uint64)
        codes[self.symbols] = self.codes
        return codes, self.lengths.astype(np.uint64)

    def tables(self) -> tuple[NDArray[np.uint32], NDArray[np.uint64]]:
        """Return `table` and `firsts` as `unpack_floats` takes them."""
        lengths = self.lengths[self.symbols].astype(np.int64)
        table = np.zeros(1 << _LOOKED_AT_BITS, np.uint32)
        begin = 0
        for symbol, length in zip(self.symbols.tolist(), lengths.tolist(), strict=True):
            if length > _LOOKED_AT_BITS:
                break
            end = begin + (1 << (_LOOKED_AT_BITS - length))
            table[begin:end] = symbol << 6 | length
            begin = end
        firsts = np.zeros((_LONGEST_CODE + 1, 2), np.uint64)
        after, index = 0, 0
        for length in range(1, _LONGEST_CODE + 1):
            unit = 1 << (_LONGEST_CODE - length)
            count = int((lengths == length).sum())
            firsts[length, 1] = (index - after // unit) % 2**64
            after += count * unit
            index += count
            firsts[length, 0] = after
        return table, firsts


def _pack_baseline(pair: Pair, code: _HuffmanCode, out: Bytes) -> int | None:
    """Write a block of kind HUFFMAN_EXPONENTS; return its bytes, or None if it is no smaller than the values.

        first symbol, uint16 | symbols, uint16 | length of each one's code, uint8 | codes | signs and mantissas

    Codes and what follows them each begin at a byte; the exponents of the block are no others than those of the code.
    """
    dtype, size = pair.dtype, pair.values.size
    counts = exponent_counts(pair.values, dtype)
    used = np.flatnonzero(code.lengths)
    first, symbols = int(used[0]), int(used[-1] - used[0] + 1)
    if counts[code.lengths == 0].any():  # the values are not those that the code was made for
        return None
    coded = int(counts @ code.lengths.astype(np.int64))
    rest = size // dtype.item_bytes * (1 + dtype.mantissa_bits)
    begin = 4 + symbols
    if begin + -(-coded // 8) + -(-rest // 8) >= size:
        return None
    out[:4].view("<u2")[:] = first, symbols
    out[4:begin] = code.lengths[first : first + symbols]
    bits = word_bits(dtype)
    words = _words_of(pair.values, bits)
    end = _loops().pack_exponents(words, dtype.mantissa_bits, *code.by_symbol(), out, begin)
    return int(_loops().pack_rest(words, dtype.mantissa_bits, bits, out, int(end)))


def _unpack_baseline(payload: Bytes, dtype: DType, reference: Bytes | None, out: Bytes) -> None:
    if not dtype.is_float:
        raise FormatError(f"a block of Huffman-coded exponents cannot be of {dtype.name}, which has none")
    first, symbols = np.frombuffer(payload[:4].tobytes().ljust(4, b"\0"), "<u2").tolist()
    begin = 4 + symbols
    if payload.size < begin or first + symbols > 1 << dtype.exponent_bits:
        raise FormatError(
            "a block of Huffman-coded exponents is damaged: its code is cut off, or of other numbers"
        )
    lengths = np.zeros(1 << dtype.exponent_bits, np.uint8)
    lengths[first : first + symbols] = payload[4:begin]
    code = _HuffmanCode(lengths)
    bits = word_bits(dtype)
    words = _empty_words(out.size, bits)
    stream = payload[begin:]
    rest = -(-words.size * (1 + dtype.mantissa_bits) // 8)
    coded = 8 * (stream.size - rest)
    end = -1
    if coded >= 0:
        table, firsts = code.tables()
        end = int(
            _loops().unpack_floats(
                _windows(stream), coded, table, firsts, code.symbols, dtype.mantissa_bits, bits, words
            )
        )
    if end < 0 or 8 * -(-end // 8) != coded:
        raise FormatError(
            f"a block of Huffman-coded exponents is damaged: it is not one of {words.size:,} numbers"
        )
    out[:] = _bytes_of(words, bits)


# -- gzip ------------------------------------------------------------------------------------------------


def _gzip(data: Bytes, out: Bytes, limit: int) -> int | None:
    """Write data as the gzip program would; return its bytes, or None if they are not fewer than the limit."""
    packer = zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, _GZIP_WINDOW)
    packed = packer.compress(data.data) + packer.flush()
    if len(packed) >= limit:
        return None
    out[: len(packed)] = np.frombuffer(packed, np.uint8)
    return len(packed)


def _gunzip(payload: Bytes, most: int) -> Bytes:
    """Return what gzip packed, which is at most so many bytes. Raises: FormatError."""
    unpacker = zlib.decompressobj(_GZIP_WINDOW)
    try:
        unpacked = unpacker.decompress(payload.data, most + 1)
    except zlib.error as error:
        raise FormatError(f"a block of gzip is damaged: {error}") from None
    if not unpacker.eof or unpacker.unused_data or len(unpacked) > most:
        raise FormatError(f"a block of gzip is damaged: it is not one of at most {most:,} bytes")
    return np.frombuffer(unpacked, np.uint8)


def _decode_gzip(payload: Bytes, dtype: DType, reference: Bytes | None, out: Bytes) -> None:
    unpacked = _gunzip(payload, out.size)
    if unpacked.size != out.size:
        raise FormatError(f"a block of gzip is of {unpacked.size:,} bytes, not of {out.size:,}")
    out[:] = unpacked


def _decode_gzip_xor(payload: Bytes, dtype: DType, reference: Bytes | None, out: Bytes) -> None:
    reference = _reference(reference, out)
    _decode_gzip(payload, dtype, None, out)
    np.bitwise_xor(out, reference, out=out)


def _decode_gzip_heading_zeros(payload: Bytes, dtype: DType, reference: Bytes | None, out: Bytes) -> None:
    _unpack_delta(_gunzip(payload, _most_packed(out.size, dtype)), dtype, reference, out)


def _most_packed(nbytes: int, dtype: DType) -> int:
    """Return the most that a block of heading zeros can take: every word with all of its bits."""
    words = 8 * nbytes // word_bits(dtype)
    return 1 + nbytes + -(-words * _STATIC_BITS[-1] // 8)


# -- Codecs ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Looked:
    """What of a snapshot's blocks decides how they are encoded.

    zeros: of deltas, by bits of a word, see `heading_zeros`. exponents: of baselines, by type of float, see
        `exponent_counts`.
    """

    zeros: dict[int, NDArray[np.int64]] = field(default_factory=dict)
    exponents: dict[str, NDArray[np.int64]] = field(default_factory=dict)

    def look(self, pair: Pair) -> None:
        """Count a block."""
        dtype = pair.dtype
        if pair.reference is not None:
            _add(self.zeros, word_bits(dtype), heading_zeros(pair.values, pair.reference, dtype))
        elif dtype.is_float:
            _add(self.exponents, dtype.name, exponent_counts(pair.values, dtype))

    def add(self, other: Looked) -> None:
        """Count all that the other one counted."""
        for bits, zeros in other.zeros.items():
            _add(self.zeros, bits, zeros)
        for name, exponents in other.exponents.items():
            _add(self.exponents, name, exponents)


def _add(sums: dict[_Key, NDArray[np.int64]], key: _Key, counts: NDArray[np.int64]) -> None:
    sums[key] = sums[key] + counts if key in sums else counts


@dataclass(frozen=True, slots=True)
class PaperCodec:
    """One of the codecs above.

    baseline: how blocks without a reference are stored. delta: how those with one are; None as those without.
    heading_bits: of deltas of run lengths; None where the snapshot's deltas choose (Algorithm 1), or have none.
    """

    name: str
    baseline: Baseline
    delta: Literal["gzip", "rle", "rle_gzip"] | None = None
    heading_bits: int | None = None

    def coder(self, blocks: Callable[[], Iterator[Pair]]) -> Coder:
        """Return what encodes a snapshot's blocks; looks at all of them first where something is to be chosen."""
        looked_at = Looked()
        if self.baseline == "huffman":
            for pair in blocks():
                looked_at.look(pair)
        return self.coder_for(looked_at)

    def coder_for(self, looked_at: Looked) -> Coder:
        """Return what encodes blocks that were looked at already, all of a snapshot's."""
        if self.heading_bits is not None:
            return _PaperCoder(self, dict.fromkeys((8, 16, 32, 64), self.heading_bits), {})
        return _PaperCoder(
            self,
            {bits: best_heading_bits(zeros) for bits, zeros in looked_at.zeros.items()},
            {name: _HuffmanCode(huffman_lengths(counts)) for name, counts in looked_at.exponents.items()},
        )


@dataclass(frozen=True, slots=True)
class _PaperCoder:
    """What encodes the blocks of one snapshot: changed by nothing, so that threads share it.

    widths: of headings, by bits of a word. codes: by type of float.
    """

    codec: PaperCodec
    widths: Mapping[int, int]
    codes: Mapping[str, _HuffmanCode]

    def encode(self, pair: Pair, out: Bytes) -> tuple[Kind, int]:
        if pair.reference is None or self.codec.delta is None:
            kind, length = self._baseline(pair, out)
        else:
            kind, length = self._delta(pair, out)
        if length is None:
            return Kind.STORED, pair.values.size
        return kind, length

    def _baseline(self, pair: Pair, out: Bytes) -> tuple[Kind, int | None]:
        if self.codec.baseline == "gzip":
            return Kind.GZIP, _gzip(pair.values, out, pair.values.size)
        code = self.codes.get(pair.dtype.name)
        return Kind.HUFFMAN_EXPONENTS, None if code is None else _pack_baseline(pair, code, out)

    def _delta(self, pair: Pair, out: Bytes) -> tuple[Kind, int | None]:
        assert pair.reference is not None, "a delta is to a reference"
        if self.codec.delta == "gzip":
            return Kind.GZIP_XOR, _gzip(pair.values ^ pair.reference, out, pair.values.size)
        # A width that was chosen is there for every word that was looked at; 0 leaves others as they are.
        heading_bits = self.widths.get(word_bits(pair.dtype), 0)
        if self.codec.delta == "rle":
            return Kind.HEADING_ZEROS, _pack_delta(pair, heading_bits, out)
        return Kind.GZIP_HEADING_ZEROS, _gzip_delta(pair, heading_bits, out)


def _gzip_delta(pair: Pair, heading_bits: int, out: Bytes) -> int | None:
    assert pair.reference is not None, "a delta is to a reference"
    # Run lengths may take more than the values and still be less by gzip: space for the most that they can take.
    most = _most_packed(pair.values.size, pair.dtype)
    packed = np.empty(most + 16, np.uint8)
    packed[0] = heading_bits
    difference = _difference(pair.values, pair.reference, pair.dtype)
    end = _loops().pack_heading_zeros(difference, word_bits(pair.dtype), heading_bits, packed, 1, most)
    return _gzip(packed[:end], out, pair.values.size)


def codec_of(method: Method) -> str:
    """Return the name of the codec by which a method's snapshots are stored; its scheme is the store's."""
    if method.delta is None and method.baseline == "complete":
        return "stored"
    return method.name.removesuffix(f"-{method.scheme}")


_DELTAS: Mapping[Delta, tuple[Literal["gzip", "rle", "rle_gzip"], int | None]] = {
    "gzip": ("gzip", None),
    "rle4": ("rle", 4),
    "rle4_gzip": ("rle_gzip", 4),
    "dynrle": ("rle", None),
}


def _codec(method: Method) -> PaperCodec:
    delta, heading_bits = (None, None) if method.delta is None else _DELTAS[method.delta]
    return PaperCodec(codec_of(method), method.baseline, delta, heading_bits)


#: In the order of the paper's Figure 9, then other widths of static run lengths.
CODECS: tuple[Codec, ...] = tuple(
    dict.fromkeys(
        [
            *map(_codec, METHODS),
            *(PaperCodec(f"rle{bits}", "complete", "rle", bits) for bits in _STATIC_BITS),
        ]
    )
)

DECODERS: dict[Kind, Decoder] = {
    Kind.HUFFMAN_EXPONENTS: _unpack_baseline,
    Kind.HEADING_ZEROS: _unpack_delta,
    Kind.GZIP: _decode_gzip,
    Kind.GZIP_XOR: _decode_gzip_xor,
    Kind.GZIP_HEADING_ZEROS: _decode_gzip_heading_zeros,
}
