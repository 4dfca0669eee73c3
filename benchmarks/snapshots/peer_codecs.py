"""The codecs that ours are compared with, each at settings that suit it, behind one face.

A peer takes the bytes of all values at once, one thread, everything in memory. Where it knows nothing of pairs it
gets the XOR of the two, or the difference of their bits as ordered integers (`Differences` below), made by compiled
loops of one pass: what a user would have to write, at its best. The time of that is the peer's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np
from numba import njit
from numpy.typing import NDArray

from penstock.checkpoint.state.dtypes import DType
from penstock.checkpoint.state.tensors import Bytes

Words = NDArray[Any]


class Contender(Protocol):
    """A codec for values of one type, given a reference."""

    @property
    def name(self) -> str:
        """Return what the tables call it."""
        ...

    def encode(self, values: Bytes, reference: Bytes) -> Any:
        """Return what decode takes."""
        ...

    def size(self, encoded: Any) -> int:
        """Return how many bytes that is."""
        ...

    def decode(self, encoded: Any, reference: Bytes, out: Bytes) -> None:
        """Fill `out` with the values."""
        ...


def peers(dtype: DType, nbytes: int) -> tuple[list[Contender], list[str]]:
    """Return the peers that are installed, and the names of the packages that are not."""
    found: list[Contender] = []
    missing: list[str] = []
    makers: dict[str, Callable[[DType, int], list[Contender]]] = {
        "zipnn": _zipnn,
        "pcodec": _pcodec,
        "blosc2": _blosc2,
        "zstandard": _zstandard,
    }
    for package, make in makers.items():
        try:
            found += make(dtype, nbytes)
        except ImportError:
            missing.append(package)
    return found, missing


class MemoryCopy:
    """The limit: each byte read and written once."""

    name = "limit: memory copy"

    def __init__(self, nbytes: int) -> None:
        self.kept = np.zeros(nbytes, np.uint8)

    def encode(self, values: Bytes, reference: Bytes) -> Bytes:
        np.copyto(self.kept, values)
        return self.kept

    def size(self, encoded: Bytes) -> int:
        return encoded.size

    def decode(self, encoded: Bytes, reference: Bytes, out: Bytes) -> None:
        np.copyto(out, encoded)


# -- The peers -----------------------------------------------------------------------------------------------


def _zipnn(dtype: DType, nbytes: int) -> list[Contender]:
    from zipnn import ZipNN

    class Zipnn:
        """Byte groups, Huffman-coded each where that pays; in its delta mode, of the XOR."""

        name = "zipnn 0.5.4, delta mode"

        def __init__(self) -> None:
            self.zipnn = ZipNN(
                input_format="byte", bytearray_dtype=dtype.name, threads=1, delta_compressed_type="byte"
            )

        def encode(self, values: Bytes, reference: Bytes) -> Any:
            return self.zipnn.compress(values.data, delta_second_data=reference.data)

        def size(self, encoded: Any) -> int:
            return len(encoded)

        def decode(self, encoded: Any, reference: Bytes, out: Bytes) -> None:
            decoded = self.zipnn.decompress(encoded, delta_second_data=reference.data)
            out[:] = np.frombuffer(decoded, np.uint8)

    return [Zipnn()]


def _pcodec(dtype: DType, nbytes: int) -> list[Contender]:
    from pcodec import ChunkConfig, DeltaSpec, ModeSpec, standalone

    class Pcodec:
        """Bins of numbers and offsets in them, on the difference of ordered integers.

        The search for a mode (multiples, quantised floats) and for differences along the array is off: on these
        numbers it finds none, and costs time.
        """

        def __init__(self, level: int) -> None:
            self.name = f"pcodec {level}, difference"
            self.config = ChunkConfig(
                compression_level=level, mode_spec=ModeSpec.classic(), delta_spec=DeltaSpec.no_op()
            )
            self.pairs = Differences(dtype, nbytes, zigzag=False)

        def encode(self, values: Bytes, reference: Bytes) -> Any:
            return standalone.simple_compress(self.pairs.subtract(values, reference), self.config)

        def size(self, encoded: Any) -> int:
            return len(encoded)

        def decode(self, encoded: Any, reference: Bytes, out: Bytes) -> None:
            standalone.simple_decompress_into(encoded, self.pairs.work)
            self.pairs.add(reference, out)

    return [Pcodec(2), Pcodec(8)]


def _blosc2(dtype: DType, nbytes: int) -> list[Contender]:
    import blosc2

    class Blosc2:
        """Bytes or bits of a block gathered by significance, then zstd."""

        def __init__(self, of: str, filter_name: str, level: int) -> None:
            self.name = f"blosc2 {filter_name} + zstd {level}, {of}"
            filters = {"shuffle": blosc2.Filter.SHUFFLE, "bitshuffle": blosc2.Filter.BITSHUFFLE}
            self.settings = blosc2.CParams(
                codec=blosc2.Codec.ZSTD,
                clevel=level,
                typesize=dtype.item_bytes,
                nthreads=1,
                filters=[filters[filter_name]],
                filters_meta=[0],
            )
            self.back = blosc2.DParams(nthreads=1)
            self.pairs = (
                Differences(dtype, nbytes, zigzag=True) if of == "difference" else Xors(dtype, nbytes)
            )

        def encode(self, values: Bytes, reference: Bytes) -> Any:
            return blosc2.compress2(self.pairs.subtract(values, reference), cparams=self.settings)

        def size(self, encoded: Any) -> int:
            return len(encoded)

        def decode(self, encoded: Any, reference: Bytes, out: Bytes) -> None:
            blosc2.decompress2(encoded, dst=self.pairs.work, dparams=self.back)
            self.pairs.add(reference, out)

    return [
        Blosc2(of, filter_name, level)
        for of in ("XOR", "difference")
        for filter_name, level in (("shuffle", 1), ("bitshuffle", 1), ("shuffle", 5))
    ]


def _zstandard(dtype: DType, nbytes: int) -> list[Contender]:
    import zstandard

    class Zstd:
        """The bytes as they are; the reference is of no use to it."""

        def __init__(self, level: int) -> None:
            self.name = f"zstd {level}, raw"
            self.compressor = zstandard.ZstdCompressor(level)
            self.decompressor = zstandard.ZstdDecompressor()

        def encode(self, values: Bytes, reference: Bytes) -> Any:
            return self.compressor.compress(values)

        def size(self, encoded: Any) -> int:
            return len(encoded)

        def decode(self, encoded: Any, reference: Bytes, out: Bytes) -> None:
            out[:] = np.frombuffer(self.decompressor.decompress(encoded), np.uint8)

    class Planes:
        """The XOR (as BitX does) or the difference, byte by byte of its words, each through zstd."""

        def __init__(self, of: str, level: int) -> None:
            self.name = f"byte planes + zstd {level}, {of}" + (" (BitX)" if of == "XOR" else "")
            self.compressor = zstandard.ZstdCompressor(level)
            self.decompressor = zstandard.ZstdDecompressor()
            self.pairs = (
                Differences(dtype, nbytes, zigzag=True) if of == "difference" else Xors(dtype, nbytes)
            )
            self.planes = np.zeros((dtype.item_bytes, nbytes // dtype.item_bytes), np.uint8)

        def encode(self, values: Bytes, reference: Bytes) -> Any:
            self.pairs.loops.split(self.pairs.subtract(values, reference), self.planes)
            return [self.compressor.compress(plane) for plane in self.planes]

        def size(self, encoded: Any) -> int:
            return sum(map(len, encoded))

        def decode(self, encoded: Any, reference: Bytes, out: Bytes) -> None:
            for plane, part in zip(self.planes, encoded, strict=True):
                plane[:] = np.frombuffer(self.decompressor.decompress(part), np.uint8)
            self.pairs.loops.join(self.planes, self.pairs.work)
            self.pairs.add(reference, out)

    return [Zstd(1), Zstd(3), Planes("XOR", 1), Planes("XOR", 3), Planes("difference", 1)]


# -- How two snapshots become one array --------------------------------------------------------------------


class Loops(NamedTuple):
    """Compiled loops over words of one size; each fills its last argument."""

    difference: Callable[[Words, Words, Words], None]
    zigzag_difference: Callable[[Words, Words, Words], None]
    total: Callable[[Words, Words, Words], None]
    zigzag_total: Callable[[Words, Words, Words], None]
    split: Callable[[Words, Words], None]
    join: Callable[[Words, Words], None]


class Pairs(Protocol):
    """One array from two, and back."""

    loops: Loops
    work: Words

    def subtract(self, values: Bytes, reference: Bytes) -> Words:
        """Return `work`, filled with the difference."""
        ...

    def add(self, reference: Bytes, out: Bytes) -> None:
        """Fill `out` with the values, given the difference in `work`."""
        ...


class Xors:
    """The XOR of the bits."""

    def __init__(self, dtype: DType, nbytes: int) -> None:
        self.loops = loops_for(8 * dtype.item_bytes)
        self.work: Words = np.zeros(nbytes // dtype.item_bytes, f"uint{8 * dtype.item_bytes}")

    def subtract(self, values: Bytes, reference: Bytes) -> Words:
        return np.bitwise_xor(values.view(self.work.dtype), reference.view(self.work.dtype), out=self.work)

    def add(self, reference: Bytes, out: Bytes) -> None:
        np.bitwise_xor(self.work, reference.view(self.work.dtype), out=out.view(self.work.dtype))


class Differences:
    """The difference of the bits as integers that sort as the floats do; signed, or zigzag (0, -1, 1, -2...)."""

    def __init__(self, dtype: DType, nbytes: int, *, zigzag: bool) -> None:
        self.loops = loops_for(8 * dtype.item_bytes)
        bits = 8 * dtype.item_bytes
        self.words = np.dtype(f"uint{bits}")
        self.work: Words = np.zeros(nbytes // dtype.item_bytes, f"uint{bits}" if zigzag else f"int{bits}")
        self.there = self.loops.zigzag_difference if zigzag else self.loops.difference
        self.back = self.loops.zigzag_total if zigzag else self.loops.total

    def subtract(self, values: Bytes, reference: Bytes) -> Words:
        self.there(values.view(self.words), reference.view(self.words), self.work.view(self.words))
        return self.work

    def add(self, reference: Bytes, out: Bytes) -> None:
        self.back(self.work.view(self.words), reference.view(self.words), out.view(self.words))


@cache
def loops_for(bits: int) -> Loops:
    """Return the loops for words of so many bits; compiled at their first call.

    A float's bits sort as unsigned integers do once the sign bit is flipped, and all others too where it was set.
    """
    word = np.dtype(f"uint{bits}").type
    sign, none, one = word(1 << (bits - 1)), word(0), word(1)
    above, planes, at_once = word(bits - 1), bits // 8, 1 << 14

    # Without branches, for the compiler to vectorise: `none - top` is all ones where the top bit is set.
    @njit(nogil=True)
    def difference(values: Words, reference: Words, out: Words) -> None:
        for place in range(values.size):
            new, old = values[place], reference[place]
            new ^= word(none - (new >> above)) | sign
            old ^= word(none - (old >> above)) | sign
            out[place] = word(new - old)

    @njit(nogil=True)
    def zigzag_difference(values: Words, reference: Words, out: Words) -> None:
        for place in range(values.size):
            new, old = values[place], reference[place]
            new ^= word(none - (new >> above)) | sign
            old ^= word(none - (old >> above)) | sign
            changed = word(new - old)
            out[place] = word(changed << one) ^ word(none - (changed >> above))

    @njit(nogil=True)
    def total(differences: Words, reference: Words, out: Words) -> None:
        for place in range(out.size):
            old = reference[place]
            old ^= word(none - (old >> above)) | sign
            new = word(differences[place] + old)
            out[place] = new ^ (word((new >> above) - one) | sign)

    @njit(nogil=True)
    def zigzag_total(differences: Words, reference: Words, out: Words) -> None:
        for place in range(out.size):
            old, zigzag = reference[place], differences[place]
            old ^= word(none - (old >> above)) | sign
            new = word(((zigzag >> one) ^ word(none - (zigzag & one))) + old)
            out[place] = new ^ (word((new >> above) - one) | sign)

    # One plane of one stretch at a time, each a slice, which the compiler vectorises; a stretch stays in the cache.
    @njit(nogil=True)
    def take(words: Words, plane: Words, shift: int) -> None:
        for place in range(words.size):
            plane[place] = np.uint8(words[place] >> shift)

    @njit(nogil=True)
    def put(plane: Words, words: Words, shift: int) -> None:
        for place in range(words.size):
            words[place] |= word(word(plane[place]) << shift)

    @njit(nogil=True)
    def split(words: Words, out: Words) -> None:
        for begin in range(0, words.size, at_once):
            end = min(begin + at_once, words.size)
            for plane in range(planes):
                take(words[begin:end], out[plane, begin:end], word(8 * plane))

    @njit(nogil=True)
    def join(parts: Words, out: Words) -> None:
        for begin in range(0, out.size, at_once):
            end = min(begin + at_once, out.size)
            out[begin:end] = none
            for plane in range(planes):
                put(parts[plane, begin:end], out[begin:end], word(8 * plane))

    return Loops(difference, zigzag_difference, total, zigzag_total, split, join)
