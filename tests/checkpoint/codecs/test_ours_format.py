"""The format of Penstock's own codec: read plainly, bit by bit, beside the kernels; and read when it is damaged."""

from __future__ import annotations

import ctypes
import json
import mmap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_bits import model_bits
from tests.for_each import for_each

from penstock.checkpoint.codecs import ours
from penstock.checkpoint.codecs.codec import SLACK_BYTES, Kind, Pair
from penstock.checkpoint.state.dtypes import DTYPES, DType
from penstock.checkpoint.state.tensors import Bytes
from penstock.errors import FormatError

CODERS = {codec.name: codec.coder(lambda: iter(())) for codec in ours.CODECS}
GOLDEN = Path(__file__).parents[2] / "golden" / "own-codec-v1.json"
NDArrayOfObjects = np.ndarray[tuple[int], np.dtype[np.object_]]
PLAIN_TYPES = [dtype for dtype in DTYPES.values() if not dtype.name.startswith("complex")]


# -- The format, plainly ---------------------------------------------------------------------------------
# Follows the layout in penstock.checkpoint.codecs.ours and the words in its kernels, and shares no line with them.


class Damaged(Exception):
    """A payload is none."""


def decode(payload: bytes, kind: Kind, dtype: DType, reference: bytes | None, count: int) -> bytes:
    """Return the bytes of so many values of a type that is no complex number."""
    width, bits = 8 * dtype.item_bytes, max(32, 8 * dtype.item_bytes)
    exponent_bits, mantissa_bits = (dtype.exponent_bits, dtype.mantissa_bits) if width > 8 else (0, 0)
    old = [0] * count if reference is None else numbers(reference, dtype.item_bytes)
    table_log, shift, contexts, groups = payload[0], payload[1], payload[2], payload[3] + 1
    symbols, runs, lead = (int.from_bytes(payload[at : at + 2], "little") for at in (4, 6, 8))
    at = 10
    boundaries = [int.from_bytes(payload[at + 2 * i : at + 2 * i + 2], "little") for i in range(contexts - 1)]
    at += 2 * (contexts - 1)
    starts = [int.from_bytes(payload[at + 2 * i : at + 2 * i + 2], "little") for i in range(groups - 1)]
    at += 2 * (groups - 1)
    begins, rests, begin = [], [], None
    for _ in range(runs):
        rest, same = payload[at], payload[at + 1]
        at += 2
        begin = lead << rest if begin is None else begin
        for _ in range(same):
            begins.append(begin)
            rests.append(rest)
            begin += 1 << rest
    begins += [0] * groups
    rests += [bits - shift] * groups
    tables = []
    for _ in range(contexts * groups):
        frequencies: list[int] = []
        while len(frequencies) < symbols + groups:
            first, second = payload[at], payload[at + 1]
            at += 1 if 0 < first < 128 else 2
            if first == 0:
                frequencies += [0] * (1 + second)
            else:
                frequencies.append(first if first < 128 else (first - 128) * 256 + second)
        if (
            len(frequencies) != symbols + groups
            or sum(frequencies) != 1 << table_log
            or len(begins) != symbols + groups
        ):
            raise Damaged
        tables.append(table_of(frequencies, table_log))
    states = [int.from_bytes(payload[at + 2 * i : at + 2 * i + 2], "little") for i in range(4)]
    place = int.from_bytes(payload[at + 8 : at + 12], "little")
    stream = int.from_bytes(payload[at + 12 :], "little")

    def take(length: int) -> int:
        nonlocal place
        if length > place:
            raise Damaged
        place -= length
        return stream >> place & ((1 << length) - 1)

    new = []
    group_of_lane = [0] * 4
    for i in range(count):
        word_of_old = old[i] << (bits - width)
        exponent = 0
        if width == 8:
            exponent = old[i] >> 4
        elif exponent_bits:
            exponent = old[i] >> mantissa_bits & ((1 << exponent_bits) - 1)
        context = sum(exponent < boundary for boundary in boundaries)
        which = i % 4 if i < count - count % 4 else 0
        symbol, taken, base = tables[context * groups + group_of_lane[which]][states[which]]
        group_of_lane[which] = (
            symbol - symbols if symbol >= symbols else sum(symbol >= start for start in starts)
        )
        # What was written last comes first: the upper bits of the rest, the state's below them, the rest's lower 32.
        rest = rests[symbol]
        low = min(rest, 32) if bits == 64 else 0
        both = take(rest - low + taken)
        states[which] = base + (both & ((1 << taken) - 1))
        word = begins[symbol] + ((both >> taken) << low) + take(low)
        if kind == Kind.PLANE and exponent_bits:
            value = plane(word << shift, bits, exponent_bits)
        else:
            value = difference(word, shift, bits, width == 8, word_of_old, exponent_bits > 0)
        new.append(value % (1 << bits) >> (bits - width))
    if place != 0 or any(states):
        raise Damaged
    return b"".join(value.to_bytes(dtype.item_bytes, "little") for value in new)


def table_of(frequencies: list[int], table_log: int) -> list[tuple[int, int, int]]:
    """Return for each state its symbol, how many bits to take, and the next state less these."""
    size = 1 << table_log
    spread = [-1] * size
    slot = 0
    for symbol, frequency in enumerate(frequencies):
        for _ in range(frequency):
            spread[slot] = symbol
            slot = (slot + size // 2 + size // 8 + 3) % size
    seen = list(frequencies)
    table = []
    for symbol in spread:
        state = seen[symbol]
        seen[symbol] += 1
        taken = 0
        while state << taken < size:
            taken += 1
        table.append((symbol, taken, (state << taken) - size))
    return table


def plane(word: int, bits: int, exponent_bits: int) -> int:
    """Exponent, highest bit of the mantissa, sign, rest of the mantissa -> sign, exponent, mantissa."""
    below = bits - exponent_bits - 2
    exponent, sign, rest = word >> (below + 1), word >> below & 1, word & ((1 << below) - 1)
    return sign << (bits - 1) | exponent << below | rest


def difference(word: int, shift: int, bits: int, is_byte: bool, old: int, is_float: bool) -> int:
    """Return the word that a reference's word and a coded difference make."""
    if is_byte:
        step = word << shift
    elif word == 0:
        step = 0
    elif word == 1:
        step = -(1 << (bits - 1))
    else:
        highest = word.bit_length() - 1
        size = 1 << (highest - 1) | word & ((1 << (highest - 1)) - 1)
        step = (-size if word >> (highest - 1) & 1 else size) << shift
    if not is_float:
        return old + step
    flipped = ((1 << (bits - 1)) - 1) >> shift << shift
    is_below = old >> (bits - 1)
    new = ((old ^ flipped if is_below else old) + (-step if is_below else step)) % (1 << bits)
    return new ^ flipped if new >> (bits - 1) else new


def numbers(data: bytes, item: int) -> list[int]:
    """Return little-endian numbers."""
    return [int.from_bytes(data[i : i + item], "little") for i in range(0, len(data), item)]


# -- Beside the kernels ----------------------------------------------------------------------------------


def encoded(name: str, values: Bytes, dtype: DType, reference: Bytes | None) -> tuple[Kind, Bytes]:
    """Return a block's kind and payload."""
    out = np.empty(values.size + SLACK_BYTES, np.uint8)
    kind, length = CODERS[name].encode(Pair(values, dtype, reference), out)
    assert 0 <= length <= values.size
    return kind, out[:length].copy()


def patterns(dtype: DType) -> list[int]:
    """Return what arithmetic would spoil: zeros of both signs, denormals, infinities, NaNs with payloads, the ends."""
    width = 8 * dtype.item_bytes
    top = 1 << (width - 1)
    found = [0, 1, 2, top, top + 1, top - 1, 2 * top - 1]
    if dtype.exponent_bits:
        infinity = ((1 << dtype.exponent_bits) - 1) << dtype.mantissa_bits
        found += [infinity, infinity + top, infinity + 1, infinity + top + 3, (1 << dtype.mantissa_bits) - 1]
    return found


@st.composite
def blocks(draw: st.DrawFn) -> tuple[DType, Bytes, Bytes | None]:
    """Draw a type, values and perhaps a reference: near each other mostly, so that they do not end as stored."""
    dtype = draw(st.sampled_from(PLAIN_TYPES))
    width = 8 * dtype.item_bytes
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    count = draw(st.sampled_from([1, 2, 3, 63, 300, 301, 302, 999, 5000]))
    spread = draw(st.integers(0, width * 3 // 4))
    centre = draw(st.sampled_from(patterns(dtype)))
    zeros = draw(st.sampled_from([0, 0, 1, width // 2, width - 1]))
    ones = (1 << width) - 1

    def near(start: NDArrayOfObjects, bits: int) -> NDArrayOfObjects:
        steps = np.array(
            [int(step) >> (64 - bits) if bits else 0 for step in rng.integers(0, 2**64, count, "u8")], "O"
        )
        moved: NDArrayOfObjects = (start + steps) & ones >> zeros << zeros
        return moved

    old = near(np.array([centre] * count, "O"), draw(st.integers(0, width)))
    new = near(old, spread)
    for place in rng.integers(0, count, draw(st.integers(0, 5))):
        new[place] = draw(st.sampled_from(patterns(dtype)))
    as_bytes = [
        np.frombuffer(
            b"".join(int(value).to_bytes(dtype.item_bytes, "little") for value in values), np.uint8
        ).copy()
        for values in (new, old)
    ]
    return dtype, as_bytes[0], as_bytes[1] if draw(st.integers(0, 3)) else None


@given(blocks(), st.sampled_from(sorted(CODERS)))
def test_the_plain_reader_and_the_kernels_read_what_was_encoded(
    block: tuple[DType, Bytes, Bytes | None], name: str
) -> None:
    dtype, values, reference = block
    kind, payload = encoded(name, values, dtype, reference)
    if kind in (Kind.STORED, Kind.EQUAL):
        assert kind is not Kind.EQUAL or bytes(values) == bytes(reference if reference is not None else b"")
        return
    got = np.full(values.size, 0x55, np.uint8)
    ours.DECODERS[kind](payload, dtype, reference, got)
    assert got.tobytes() == values.tobytes()
    old = None if reference is None or kind == Kind.PLANE else reference.tobytes()
    plain = decode(payload.tobytes(), kind, dtype, old, values.size // dtype.item_bytes)
    assert plain == values.tobytes()


def in_stretches(dtype: DType, count: int, seed: int = 0) -> tuple[Bytes, Bytes]:
    """Return values of which whole stretches did not move, and others did, by little or much; and what they were."""
    rng = np.random.default_rng(seed)
    width = 8 * dtype.item_bytes
    word = np.dtype(f"u{dtype.item_bytes}")
    old = rng.integers(0, 1 << (width - 2), count, word)
    far = np.repeat(rng.choice([0, 3, min(width // 2, 12)], -(-count // 50)), 50)[:count]
    step = rng.integers(0, 1 << (width - 4), count, word) >> (width - 4 - far).astype(word)
    if word.itemsize < 8:  # a word that nobody will have seen: an escape, and what it leaves its lane
        step[rng.integers(0, count, 5)] = (1 << (width - 2)) - 1
    return (old + step).astype(word).view(np.uint8), old.view(np.uint8)


@for_each("dtype_name", ["float32", "bfloat16", "float64", "int16", "int32"])
def test_what_was_before_in_the_lane_is_a_context_where_that_pays(dtype_name: str) -> None:
    dtype = DTYPES[dtype_name]
    for count in (8190, 8191, 12289):
        values, reference = in_stretches(dtype, count)
        kind, payload = encoded("balance", values, dtype, reference)
        assert kind is Kind.DIFFERENCE
        assert payload[3] > 0
        got = np.full(values.size, 0x55, np.uint8)
        ours.DECODERS[kind](payload, dtype, reference, got)
        assert got.tobytes() == values.tobytes()
        assert decode(payload.tobytes(), kind, dtype, reference.tobytes(), count) == values.tobytes()
        model = model_bits(Pair(values, dtype, reference), kind, payload) / 8
        assert payload.size < 1.3 * model
        assert payload.size < 0.97 * encoded("speed", values, dtype, reference)[1].size


def test_a_payload_may_have_no_more_groups_than_its_tables_have_space_for() -> None:
    dtype = DTYPES["float32"]
    values, reference = in_stretches(dtype, 8192)
    kind, payload = encoded("balance", values, dtype, reference)
    for at, wrong in ((3, 4), (3, 255), (2, 16), (0, 12)):
        damaged = payload.copy()
        damaged[at] = wrong
        with pytest.raises(FormatError, match="header"):
            ours.DECODERS[kind](damaged, dtype, reference, np.empty_like(values))


def test_small_differences_are_told_apart_wholly_where_some_of_them_are_rare() -> None:
    """Weight decay alone, in even steps: every second number is missing."""
    rng = np.random.default_rng(3)
    old = rng.integers(1 << 29, 1 << 30, 1 << 17, "u4")
    step = 2 * rng.integers(20, 41, old.size, "u4")
    values, reference = (old - step).view(np.uint8), old.view(np.uint8)
    for name in CODERS:
        kind, payload = encoded(name, values, DTYPES["float32"], reference)
        assert kind is Kind.DIFFERENCE
        assert payload.size < 1.02 * old.size * np.log2(21) / 8


def test_bytes_of_today_are_readable_for_ever() -> None:
    """Payloads of the first version, decoded; a change that fails here makes stored snapshots unreadable."""
    for golden in json.loads(GOLDEN.read_text())["payloads"]:
        dtype = DTYPES[golden["dtype"]]
        kind = Kind(int(golden["kind"]))
        values, reference = golden_values(dtype) if kind == Kind.DIFFERENCE else golden_floats()
        got = np.zeros_like(values)
        payload = np.frombuffer(bytes.fromhex(golden["payload"]), np.uint8)
        ours.DECODERS[kind](payload, dtype, reference, got)
        np.testing.assert_array_equal(got, values)


# -- Damaged and hostile payloads ------------------------------------------------------------------------


@pytest.fixture
def between_guards() -> Iterator[Bytes]:
    """Yield memory with pages before and behind it that nobody may touch: whoever does is killed."""
    page, pages = mmap.PAGESIZE, 34
    area = mmap.mmap(-1, (pages + 2) * page)
    memory = np.frombuffer(area, np.uint8)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    begin = memory.ctypes.data
    for guard in (begin, begin + (pages + 1) * page):
        assert protect(ctypes.c_void_p(guard), ctypes.c_size_t(page), 0) == 0
    yield memory[page : (pages + 1) * page]
    for guard in (begin, begin + (pages + 1) * page):
        assert protect(ctypes.c_void_p(guard), ctypes.c_size_t(page), 3) == 0


@pytest.mark.parametrize("attempts", [400, pytest.param(4000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype_name", ["float32", "bfloat16", "float64", "int16", "uint8"])
def test_a_damaged_payload_is_refused_or_decoded_but_touches_nothing_else(
    between_guards: Bytes, dtype_name: str, attempts: int
) -> None:
    dtype = DTYPES[dtype_name]
    rng = np.random.default_rng(5)
    small = golden_values(dtype)
    cases = [("balance", *small), ("speed", *small), ("speed", small[0], None)]
    if dtype.item_bytes > 1:
        cases.append(("balance", *in_stretches(dtype, 5001)))
    refused = 0
    for name, values, reference in cases:
        kind, good = encoded(name, values, dtype, reference)
        if kind not in (Kind.PLANE, Kind.DIFFERENCE):
            continue
        for attempt in range(attempts):
            payload = good.copy()
            header = min(200, payload.size)
            damages = rng.integers(1, 4)
            for _ in range(damages):
                if attempt % 4 == 0:
                    payload[rng.integers(payload.size)] ^= 1 << rng.integers(8)
                else:
                    payload[rng.integers(header)] = rng.choice(np.array([0, 1, 255, rng.integers(256)]))
            if attempt % 5 == 0:
                payload = payload[: rng.integers(payload.size)]
            place = between_guards[: payload.size] if attempt % 2 else between_guards[-payload.size - 1 :][1:]
            if not payload.size:
                place = between_guards[:0]
            place[:] = payload
            out = np.full(values.size + 64, 0xA5, np.uint8)
            try:
                ours.DECODERS[kind](place, dtype, reference if kind == Kind.DIFFERENCE else None, out[32:-32])
            except FormatError:
                refused += 1
            assert (out[:32] == 0xA5).all()
            assert (out[-32:] == 0xA5).all()
    assert refused > attempts


def test_every_cut_is_refused() -> None:
    dtype = DTYPES["float32"]
    values, reference = golden_values(dtype)
    kind, payload = encoded("balance", values, dtype, reference)
    assert kind == Kind.DIFFERENCE
    out = np.empty_like(values)
    for length in range(payload.size):
        with pytest.raises(FormatError, match="damaged"):
            ours.DECODERS[kind](payload[:length].copy(), dtype, reference, out)
    with pytest.raises(FormatError, match="length"):
        ours.DECODERS[kind](np.append(payload, np.uint8(0)), dtype, reference, out)


def test_a_difference_without_its_reference_is_refused() -> None:
    dtype = DTYPES["float32"]
    values, reference = golden_values(dtype)
    kind, payload = encoded("balance", values, dtype, reference)
    for wrong in (None, reference[:-4]):
        with pytest.raises(FormatError, match="reference"):
            ours.DECODERS[kind](payload, dtype, wrong, np.empty_like(values))


def golden_values(dtype: DType) -> tuple[Bytes, Bytes]:
    """Return 700 values and their reference, by integer arithmetic alone."""
    width = 8 * dtype.item_bytes
    count, mask = 700, (1 << width) - 1
    old = [(i * i * 2654435761 >> 7) & mask >> 3 | (i % 3 == 0) << (width - 1) for i in range(count)]
    new = [
        (value + (i * 40503 >> 5) % (1 << (1 + i % max(width // 4, 2)))) & mask for i, value in enumerate(old)
    ]
    new[5], new[6], new[7] = mask, 1 << (width - 1), 0
    return tuple(
        np.frombuffer(
            b"".join(value.to_bytes(dtype.item_bytes, "little") for value in values), np.uint8
        ).copy()
        for values in (new, old)
    )  # type: ignore[return-value]


def golden_floats() -> tuple[Bytes, None]:
    """Return 700 float32 that are exact in binary."""
    return ((np.arange(700) % 97 - 48).astype(np.float32) * (1 + np.arange(700) % 5) / 1024).view(
        np.uint8
    ), None
