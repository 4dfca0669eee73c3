"""The delta-snapshot paper's codecs beside its own words: bits as text, Algorithm 1 as printed, textbook codes."""

from __future__ import annotations

import gzip
import heapq
import math
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.for_each import for_each

from penstock.checkpoint.codecs.codec import SLACK_BYTES, Kind, Pair
from penstock.checkpoint.codecs.paper import (
    CODECS,
    DECODERS,
    best_heading_bits,
    codec_of,
    delta_bits,
    exponent_counts,
    heading_zeros,
    huffman_lengths,
    word_bits,
)
from penstock.checkpoint.state.dtypes import DTYPES, DType
from penstock.checkpoint.state.tensors import BLOCK_VALUES, Bytes
from penstock.errors import FormatError
from penstock.simulate.snapshots import METHODS

CODEC_OF = {codec.name: codec for codec in CODECS}
FLOAT32 = DTYPES["float32"]
#: What arithmetic would spoil: zeros of both signs, denormals, infinities, NaNs quiet, signalling, with payloads.
AWKWARD_FLOAT32 = [
    0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFC12345,
    0x7FFFFFFF, 0xFFFFFFFF, 0x3F800000,
]  # fmt: skip


def encoded(name: str, pair: Pair, *others: Pair) -> tuple[Kind, Bytes]:
    """Return the block of a pair in a snapshot of this and the other pairs."""
    out = np.full(pair.values.size + SLACK_BYTES, 0xA5, np.uint8)
    kind, length = CODEC_OF[name].coder(lambda: iter([pair, *others])).encode(pair, out)
    assert length <= pair.values.size
    return kind, pair.values if kind is Kind.STORED else out[:length].copy()


def decoded(kind: Kind, payload: Bytes, pair: Pair) -> Bytes:
    if kind is Kind.STORED:
        return payload
    guarded = np.full(pair.values.size + 64, 0x5A, np.uint8)
    DECODERS[kind](payload, pair.dtype, pair.reference, guarded[32:-32])
    assert (guarded[:32] == 0x5A).all()
    assert (guarded[-32:] == 0x5A).all()
    return guarded[32:-32]


def weights(count: int, dtype: DType, seed: int = 0, *, change: int = 8) -> Pair:
    """Return numbers of which a part, `change` bits at their end, differs from the reference's."""
    random = np.random.default_rng(seed)
    if dtype.is_float:
        small = (random.standard_normal(count) * 0.02).astype(np.float64).view(np.uint64)
        lost = 64 - 1 - 11 - min(dtype.mantissa_bits, 52)
        words = (small >> np.uint64(lost)).astype(np.uint64)
        # From the exponent of a float64 to one that the type has, around its middle.
        exponent = (words >> np.uint64(dtype.mantissa_bits)) & np.uint64(0x7FF)
        middle = (1 << dtype.exponent_bits) // 2
        exponent = (exponent.astype(np.int64) - 1017 + middle).clip(0, 2 * middle - 1).astype(np.uint64)
        sign = (small >> np.uint64(63)) << np.uint64(8 * dtype.item_bytes - 1)
        mantissa = words & np.uint64((1 << dtype.mantissa_bits) - 1)
        words = sign | (exponent << np.uint64(dtype.mantissa_bits)) | mantissa
        reference = np.ascontiguousarray(words[:, None].view(np.uint8)[:, : dtype.item_bytes]).ravel()
    else:
        reference = random.integers(0, 4, count * dtype.item_bytes).astype(np.uint8)
    values = reference.copy()
    low = values.reshape(count, dtype.item_bytes)[:, 0]
    low ^= random.integers(0, 1 << min(change, 8), count).astype(np.uint8)
    return Pair(values, dtype, reference)


def texts(pair: Pair) -> list[str]:
    """Return the XOR of each word with its reference as text of zeros and ones."""
    assert pair.reference is not None
    bits = word_bits(pair.dtype)
    words = (pair.values ^ pair.reference).view(f"<u{bits // 8}")
    return [f"{word:0{bits}b}" for word in words.tolist()]


def run_lengths(difference: list[str], heading_bits: int) -> bytes:
    """Encode as section 3.1 tells it: the number of zeros in so many bits, then the word without them."""
    stream = ""
    for word in difference:
        zeros = min(len(word) - len(word.lstrip("0")), 2**heading_bits - 1)
        stream += (f"{zeros:0{heading_bits}b}" if heading_bits else "") + word[zeros:]
    padded = stream.ljust(8 * math.ceil(len(stream) / 8), "0")
    return bytes(int(padded[place : place + 8], 2) for place in range(0, len(padded), 8))


# -- The paper's own words -------------------------------------------------------------------------------


def test_the_papers_example_saves_nine_of_32_bits() -> None:
    """Figure 5: a difference with 13 heading zeros, described by 4 bits, 1101."""
    zeros = np.zeros(33, np.int64)
    zeros[13] = 1

    assert delta_bits(zeros, 4) == 32 - 9

    words = np.array([0b0000000000000_1010011001010011010] * 8, "<u4")
    values = words.view(np.uint8)
    kind, payload = encoded("rle4", Pair(values, FLOAT32, np.zeros_like(values)))
    assert kind is Kind.HEADING_ZEROS
    stream = "".join(f"{byte:08b}" for byte in payload[1:].tolist())
    assert stream == 8 * ("1101" + "1010011001010011010")
    assert len(stream) == 8 * 23


def algorithm_1(differences: list[str]) -> int:
    """DynRLE, line by line, for words of any width."""
    width = len(differences[0])
    size = [0] * (int(math.log2(width)) + 1)
    for p in differences:
        for i in range(len(size)):
            size[i] += width + i - min(2**i - 1, len(p) - len(p.lstrip("0")))
    return size.index(min(size))


@given(
    st.sampled_from(["uint8", "int16", "float32", "float64", "complex64"]),
    st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 64)), min_size=1, max_size=60),
)
def test_the_width_of_headings_is_that_of_algorithm_1(name: str, drawn: list[tuple[int, int]]) -> None:
    dtype = DTYPES[name]
    bits = word_bits(dtype)
    parts = 8 * dtype.item_bytes // bits
    words = np.array([word >> shift for word, shift in drawn] * parts, np.uint64).astype(f"<u{bits // 8}")
    values = words.view(np.uint8)
    pair = Pair(values, dtype, np.zeros_like(values))

    zeros = heading_zeros(values, np.zeros_like(values), dtype)
    chosen = best_heading_bits(zeros)

    assert chosen == algorithm_1(texts(pair))
    kind, payload = encoded("dynrle", pair)
    assert kind is Kind.STORED or payload[0] == chosen
    assert zeros.sum() == words.size


def test_one_width_is_chosen_for_all_blocks_of_a_snapshot() -> None:
    """A block that would be smaller with a wide heading has the narrow one of the many beside it."""
    close, far = (
        Pair(np.full(4_000, byte, np.uint8), DTYPES["uint64"], np.zeros(4_000, np.uint8)) for byte in (0, 1)
    )
    ours = encoded("dynrle", close)[1][0]
    theirs = encoded("dynrle", far)[1][0]

    assert (ours, theirs) == (6, 3)
    assert encoded("dynrle", close, *[far] * 40)[1][0] == theirs


def test_words_of_another_size_have_a_width_of_their_own() -> None:
    wide = Pair(np.zeros(4_000, np.uint8), DTYPES["float64"], np.zeros(4_000, np.uint8))
    narrow = Pair(np.zeros(4_000, np.uint8), DTYPES["bfloat16"], np.zeros(4_000, np.uint8))

    assert encoded("dynrle", wide, narrow)[1][0] == 6
    assert encoded("dynrle", narrow, wide)[1][0] == 4


@given(
    st.sampled_from(["bool", "float16", "float32", "int64", "complex128"]),
    st.integers(0, 6),
    st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 64)), min_size=1, max_size=60),
)
def test_run_lengths_are_those_written_by_hand(
    name: str, heading_bits: int, drawn: list[tuple[int, int]]
) -> None:
    dtype = DTYPES[name]
    bits = word_bits(dtype)
    parts = 8 * dtype.item_bytes // bits
    words = np.array([word >> shift for word, shift in drawn] * parts, np.uint64).astype(f"<u{bits // 8}")
    pair = Pair(words.view(np.uint8), dtype, np.zeros(words.nbytes, np.uint8))

    kind, payload = encoded(f"rle{heading_bits}", pair)

    by_hand = bytes([heading_bits]) + run_lengths(texts(pair), heading_bits)
    assert len(by_hand) == 1 + math.ceil(
        delta_bits(heading_zeros(*pair[::2], dtype), heading_bits) / 8  # type: ignore[arg-type]
    )
    if len(by_hand) < words.nbytes:
        assert (kind, payload.tobytes()) == (Kind.HEADING_ZEROS, by_hand)
        assert decoded(kind, payload, pair).tobytes() == words.tobytes()
    else:
        assert (kind, payload.tobytes()) == (Kind.STORED, words.tobytes())


def test_run_lengths_behind_gzip_are_what_gzip_makes_of_them() -> None:
    pair = weights(3_000, FLOAT32, change=3)

    kind, payload = encoded("rle4-gzip", pair)

    assert kind is Kind.GZIP_HEADING_ZEROS
    assert gzip.decompress(payload.tobytes()) == b"\x04" + run_lengths(texts(pair), 4)
    kind, payload = encoded("gzip-delta", pair)
    assert pair.reference is not None
    assert gzip.decompress(payload.tobytes()) == (pair.values ^ pair.reference).tobytes()
    kind, payload = encoded("gzip", pair)
    assert gzip.decompress(payload.tobytes()) == pair.values.tobytes()


# -- Huffman codes ---------------------------------------------------------------------------------------


def test_huffman_codes_have_the_textbook_length() -> None:
    """5, 2, 1 and 1 times: codes of 1, 2, 3 and 3 bits."""
    assert huffman_lengths(np.array([0, 1, 2, 5, 0, 1])).tolist() == [0, 3, 2, 1, 0, 3]
    assert huffman_lengths(np.array([0, 9])).tolist() == [0, 1]
    assert huffman_lengths(np.array([0, 0])).tolist() == [0, 0]


@given(st.lists(st.integers(0, 2**40), min_size=2, max_size=300))
def test_huffman_codes_are_as_short_as_can_be(counts: list[int]) -> None:
    """Each joining of two nodes costs one bit for everything below it; codes are kept to 32 bits."""
    if sum(count > 0 for count in counts) < 2:
        return
    lengths = huffman_lengths(np.array(counts))

    heap = [count for count in counts if count]
    heapq.heapify(heap)
    cost = 0
    while len(heap) > 1:
        joined = heapq.heappop(heap) + heapq.heappop(heap)
        cost += joined
        heapq.heappush(heap, joined)
    ours = sum(count * int(length) for count, length in zip(counts, lengths, strict=True))
    assert cost <= ours <= cost * (1 if lengths.max() < 32 else 1.001)
    assert sum(2.0 ** -int(length) for length in lengths if length) == 1
    assert all((length > 0) == (count > 0) for count, length in zip(counts, lengths, strict=True))


def test_codes_longer_than_32_bits_are_not_made() -> None:
    """Counts that grow as Fibonacci's give the longest codes that there can be."""
    counts = [1, 1]
    while len(counts) < 60:
        counts.append(counts[-1] + counts[-2])

    lengths = huffman_lengths(np.array(counts))

    assert lengths.max() <= 32
    assert sum(2.0 ** -int(length) for length in lengths) == 1


def test_a_baseline_is_its_code_its_exponents_and_the_rest() -> None:
    pair = weights(5_000, FLOAT32)._replace(reference=None)

    kind, payload = encoded("dynrle", pair)

    words = pair.values.view("<u4").tolist()
    first, symbols = payload[:4].view("<u2").tolist()
    lengths = dict(zip(range(first, first + symbols), payload[4 : 4 + symbols].tolist(), strict=True))
    code, codes = 0, {}  # the canonical ones, as RFC 1951 makes them
    for length in range(1, 33):
        for symbol, own in lengths.items():
            if own == length:
                codes[symbol] = f"{code:0{length}b}"
                code += 1
        code <<= 1
    exponents = "".join(codes[word >> 23 & 0xFF] for word in words)
    rest = "".join(f"{word >> 31:b}{word & 0x7FFFFF:023b}" for word in words)
    stream = payload[4 + symbols :].tobytes()
    expected = b""
    for bits in (exponents, rest):
        padded = bits.ljust(8 * math.ceil(len(bits) / 8), "0")
        expected += int(padded, 2).to_bytes(len(padded) // 8, "big")
    assert kind is Kind.HUFFMAN_EXPONENTS
    assert stream == expected
    counts = exponent_counts(pair.values, FLOAT32)
    assert {symbol for symbol, length in lengths.items() if length} == set(np.flatnonzero(counts).tolist())
    assert len(payload) < 0.9 * pair.values.size


def test_rare_exponents_have_codes_longer_than_the_table_and_come_back() -> None:
    """Exponents 1, 2, 4, ... 65,536 times: codes of up to 17 bits, beyond the 12 that are looked up at once."""
    exponents = np.repeat(np.arange(100, 117), 2 ** np.arange(17))[: BLOCK_VALUES - 1]
    random = np.random.default_rng(0)
    words = (exponents.astype(np.uint32) << np.uint32(23)) | random.integers(
        0, 2**23, exponents.size, np.uint32
    )
    pair = Pair(random.permutation(words).view(np.uint8), FLOAT32, None)

    kind, payload = encoded("dynrle", pair)

    assert kind is Kind.HUFFMAN_EXPONENTS
    assert payload[4 : 4 + payload[:4].view("<u2")[1]].max() > 12
    assert (decoded(kind, payload, pair) == pair.values).all()


def test_one_code_serves_a_whole_snapshot() -> None:
    """A block whose exponents are all alike has the code of all blocks, not a shorter one of its own."""
    alike = Pair(np.full(1_000, 1.5, np.float32).view(np.uint8), FLOAT32, None)
    others = weights(9_000, FLOAT32)._replace(reference=None)

    alone, within = encoded("dynrle", alike)[1], encoded("dynrle", alike, others)[1]

    assert within.size > alone.size
    assert (decoded(Kind.HUFFMAN_EXPONENTS, within, alike) == alike.values).all()


def test_values_that_changed_after_the_first_look_are_stored_as_they_are() -> None:
    coder = CODEC_OF["dynrle"].coder(lambda: iter([weights(1_000, FLOAT32)._replace(reference=None)]))
    changed = Pair(np.full(1_000, 1e30, np.float32).view(np.uint8), FLOAT32, None)

    assert coder.encode(changed, np.empty(4_000 + SLACK_BYTES, np.uint8)) == (Kind.STORED, 4_000)


# -- Every codec, every type -----------------------------------------------------------------------------


def test_every_method_of_the_paper_has_a_codec() -> None:
    assert [codec_of(method) for method in METHODS] == [
        "stored", "gzip", "gzip-delta", "rle4", "rle4-gzip", "dynrle", "dynrle",
    ]  # fmt: skip
    assert set(CODEC_OF) == {codec_of(method) for method in METHODS} | {f"rle{bits}" for bits in range(7)}


@for_each("name", list(CODEC_OF))
def test_every_type_comes_back_bit_for_bit_from_blocks_of_any_size(name: str) -> None:
    for dtype in DTYPES.values():
        for count in (1, 2, 3, 129, 4_099):
            pair = weights(count, dtype, seed=count)
            for each in (pair, pair._replace(reference=None)):
                kind, payload = encoded(name, each)
                assert (decoded(kind, payload, each) == each.values).all(), (dtype.name, count)


@for_each("dtype", ["float8_e5m2", "bfloat16", "float32", "float64", "complex128"])
def test_whole_blocks_come_back_bit_for_bit(dtype: str) -> None:
    pair = weights(BLOCK_VALUES, DTYPES[dtype])
    for name in ("rle6", "dynrle"):
        for each in (pair, pair._replace(reference=None)):
            kind, payload = encoded(name, each)
            assert (decoded(kind, payload, each) == each.values).all()


@for_each("name", list(CODEC_OF))
def test_awkward_floats_come_back_bit_for_bit(name: str) -> None:
    values = np.array(AWKWARD_FLOAT32 * 40, "<u4").view(np.uint8)
    shifted = np.roll(values, 4)
    for reference in (None, shifted, values):
        pair = Pair(values, FLOAT32, reference)
        kind, payload = encoded(name, pair)
        assert (decoded(kind, payload, pair) == values).all()


@for_each("dtype", ["uint8", "float16", "float32", "float64"])
def test_noise_is_stored_as_it_is_and_never_grows(dtype: str) -> None:
    random = np.random.default_rng(0)
    values, reference = random.integers(0, 256, (2, BLOCK_VALUES * DTYPES[dtype].item_bytes), np.uint8)

    for name in CODEC_OF:
        for each in (reference, None):
            kind, payload = encoded(name, Pair(values, DTYPES[dtype], each))
            assert kind is Kind.STORED or payload.size < values.size, name


def test_what_is_no_float_is_stored_as_it_is_in_baselines() -> None:
    pair = Pair(np.zeros(800, np.uint8), DTYPES["int64"], None)

    assert encoded("dynrle", pair)[0] is Kind.STORED
    assert encoded("dynrle", pair._replace(reference=pair.values))[0] is Kind.HEADING_ZEROS


def test_blocks_anywhere_in_memory_are_encoded_alike() -> None:
    """A tensor's bytes may begin at any address, and may be read-only."""
    pair = weights(1_000, DTYPES["float64"])
    assert pair.reference is not None
    moved = np.zeros((2, 8_003), np.uint8)
    moved[:, 3:] = pair.values, pair.reference
    moved.flags.writeable = False
    odd = Pair(moved[0, 3:], pair.dtype, moved[1, 3:])

    for one, other in ((pair, odd), (pair._replace(reference=None), odd._replace(reference=None))):
        kind, payload = encoded("dynrle", other)
        assert (payload == encoded("dynrle", one)[1]).all()
        assert (decoded(kind, payload, other) == one.values).all()


# -- Blocks that nobody encoded --------------------------------------------------------------------------

DELTA = weights(700, FLOAT32, change=4)
BASELINE = DELTA._replace(reference=None)
HONEST = [
    (*encoded(name, pair), pair)
    for name, pair in (
        ("dynrle", DELTA),
        ("rle6", weights(300, DTYPES["float64"])),
        ("dynrle", weights(900, DTYPES["bfloat16"], change=2)),
        ("dynrle", BASELINE),
        ("dynrle", weights(500, DTYPES["float64"])._replace(reference=None)),
        ("dynrle", weights(900, DTYPES["bfloat16"])._replace(reference=None)),
        ("gzip-delta", DELTA),
        ("rle4-gzip", DELTA),
        ("gzip", Pair(np.zeros(900, np.uint8), DTYPES["uint8"], None)),
    )
]


def survives(kind: Kind, payload: Bytes, pair: Pair) -> Bytes | None:
    """Decode what may be no block: something is returned, or FormatError raised, and nothing else is touched."""
    try:
        return decoded(kind, payload, pair)
    except FormatError:
        return None


@given(st.sampled_from(HONEST), st.data())
def test_a_damaged_block_is_refused_or_decoded_to_something(
    honest: tuple[Kind, Bytes, Pair], data: st.DataObject
) -> None:
    kind, payload, pair = honest
    damaged = payload.copy()
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, min(60, damaged.size - 1)))] = data.draw(st.integers(0, 255))
    damaged = damaged[: data.draw(st.integers(0, damaged.size))]

    survives(kind, damaged, pair)


@given(
    st.sampled_from(sorted(DECODERS)),
    st.binary(max_size=300),
    st.sampled_from(list(DTYPES.values())),
    st.integers(1, 200),
    st.booleans(),
)
@example(Kind.HUFFMAN_EXPONENTS, b"\xff\xff\xff\xff", FLOAT32, 1, False)
@example(Kind.HUFFMAN_EXPONENTS, b"\0\0\x02\0\x01\x01" + bytes(200), FLOAT32, 50, False)
@example(Kind.HEADING_ZEROS, b"\x07" + bytes(100), FLOAT32, 25, True)
@example(Kind.HEADING_ZEROS, b"\x06" + b"\xff" * 100, FLOAT32, 25, True)
def test_any_bytes_are_refused_or_decoded_to_something(
    kind: Kind, payload: bytes, dtype: DType, count: int, has_reference: bool
) -> None:
    values = np.zeros(count * dtype.item_bytes, np.uint8)
    pair = Pair(values, dtype, values if has_reference else None)

    survives(kind, np.frombuffer(payload, np.uint8), pair)


@pytest.mark.parametrize("honest", HONEST, ids=[f"{kind.name}-{pair.dtype.name}" for kind, _, pair in HONEST])
def test_a_block_of_another_size_is_refused(honest: tuple[Kind, Bytes, Pair]) -> None:
    kind, payload, pair = honest

    for cut in (payload[:-1], payload[:1], payload[:0], np.append(payload, np.uint8(0))):
        with pytest.raises(FormatError):
            decoded(kind, cut, pair)
    for count in (1, pair.values.size // 2, pair.values.size * 2):
        whole = count // pair.dtype.item_bytes * pair.dtype.item_bytes or pair.dtype.item_bytes
        resized = np.zeros(whole, np.uint8)
        with pytest.raises(FormatError):
            decoded(kind, payload, Pair(resized, pair.dtype, None if pair.reference is None else resized))


@pytest.mark.parametrize("kind", [Kind.HEADING_ZEROS, Kind.GZIP_XOR, Kind.GZIP_HEADING_ZEROS])
def test_a_delta_without_its_reference_is_refused(kind: Kind) -> None:
    (payload, pair), *_ = [(payload, pair) for own, payload, pair in HONEST if own is kind]
    assert pair.reference is not None

    for reference in (None, pair.reference[:-4]):
        with pytest.raises(FormatError, match="is not there"):
            decoded(kind, payload, pair._replace(reference=reference))


def test_exponents_of_what_has_none_are_refused() -> None:
    with pytest.raises(FormatError, match="int32"):
        decoded(Kind.HUFFMAN_EXPONENTS, HONEST[3][1], BASELINE._replace(dtype=DTYPES["int32"]))


def test_a_bomb_of_gzip_is_refused_before_it_unfolds() -> None:
    bomb = np.frombuffer(gzip.compress(bytes(50_000_000)), np.uint8)

    tracemalloc.start()
    try:
        for kind in (Kind.GZIP, Kind.GZIP_XOR, Kind.GZIP_HEADING_ZEROS):
            with pytest.raises(FormatError):
                decoded(kind, bomb, DELTA)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_codes_that_cannot_be_together_are_refused() -> None:
    """Three codes of one bit."""
    payload = np.frombuffer(b"\x00\x00\x03\x00\x01\x01\x01" + bytes(3_000), np.uint8)

    with pytest.raises(FormatError, match="more codes than there can be"):
        decoded(Kind.HUFFMAN_EXPONENTS, payload, BASELINE)


def test_a_code_is_looked_at_once_for_each_coder() -> None:
    """Codecs that choose nothing do not read the snapshot beforehand."""
    looks = 0

    def blocks() -> Iterator[Pair]:
        nonlocal looks
        looks += 1
        yield DELTA

    for codec in CODECS:
        codec.coder(blocks)
    assert looks == 1  # dynrle's
