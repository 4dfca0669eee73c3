"""Where the samples of a TFRecord file lie: its frames and the features' names of each `tf.train.Example` are read.

A file is a row of frames: a length (uint64), its checksum (CRC-32C, masked), that many bytes, and their checksum. The
bytes are a protobuf message, Example > features > entry > name and feature > list of bytes, floats or integers.
Plain functions over arrays, compiled as they are (`_examples_kernels`). They read a window of the file at a time:
pictures are passed over.
Source: TensorFlow, `tensorflow/core/lib/io/record_writer.h`, `tensorflow/core/example/*.proto`.
"""

from __future__ import annotations

import struct
from typing import Any

from penstock.machine_code import Signature
from penstock.store.windows import fill

#: What `index_examples` takes.
SIGNATURE = Signature(
    ("int64", "int64", "uint8[:]", "uint8[:]", "uint8[:]", "int64[:, :]", "int64[:]"), results=("int64",)
)

#: Columns of a row: the sample's bytes; of what kind the label is, its value where that is one integer, its bytes else,
#: of numbers those of their list.
BEGIN, SIZE, LABEL_KIND, LABEL, LABEL_SIZE, COLUMNS = 0, 1, 2, 3, 4, 5
#: Kinds of labels, as the fields of `Feature` are numbered.
NO_LABEL, BYTES, FLOATS, INTEGERS = 0, 1, 2, 3
#: Kinds of labels that are several integers, and several texts.
SEVERAL, SEVERAL_TEXTS = 4, 5
#: What is wrong with a file.
CUT_OFF, NO_FRAME, NO_EXAMPLE = -1, -2, -3

#: Where in `at`: the place in the file; of the field there the end of its content and its number; an integer that was
#: read; the file; of the window, where it begins and ends in the file.
PLACE, CONTENT_END, FIELD, VALUE, DESCRIPTOR, WINDOW, WINDOW_END, NUMBERS = 0, 1, 2, 3, 4, 5, 6, 7

#: Of a frame, before its content and behind it.
FRAME_BYTES, CHECKSUM_BYTES = 12, 4
#: Wire types of protobuf: integers, 8 bytes, with a length, 4 bytes.
_VARINT, _EIGHT, _LENGTH, _FOUR = 0, 1, 2, 5


def index_examples(
    descriptor: int, end: int, sample_name: Any, label_name: Any, window: Any, rows: Any, at: Any
) -> int:
    """Find samples and labels, as many as there are rows; return how many were found, or what is wrong.

    descriptor: of the file, open. end: its size.
    sample_name, label_name: uint8[...], names of features; the latter may be empty.
    rows: int64[n, COLUMNS], written. SIZE is -1 where an example has no such feature of bytes, and exactly one of them.
    window, at: uint8[...] and int64[NUMBERS], scratch. at[PLACE]: where to begin, then where to go on; on an error
        where it is. The others are zeros at first.
    """
    count, at[DESCRIPTOR] = 0, descriptor
    while count < len(rows) and at[PLACE] < end:
        frame = at[PLACE]
        if frame + FRAME_BYTES > end:
            return CUT_OFF
        length = little(window, at, frame, 8)
        if masked_crc32c(window, at, frame, 8) != little(window, at, frame + 8, 4):
            return NO_FRAME
        begin = frame + FRAME_BYTES
        if length < 0 or length > end - begin - CHECKSUM_BYTES:
            return CUT_OFF
        rows[count, SIZE], rows[count, LABEL_KIND] = -1, NO_LABEL
        at[PLACE] = begin
        if not _find_features(window, begin + length, sample_name, label_name, rows, count, at):
            at[PLACE] = frame
            return NO_EXAMPLE
        at[PLACE] = begin + length + CHECKSUM_BYTES
        count += 1
    return count


def _find_features(
    window: Any, end: int, sample_name: Any, label_name: Any, rows: Any, row: int, at: Any
) -> bool:
    """Look through the example that begins here; return whether it is one."""
    while at[PLACE] < end:
        if not next_field(window, at, end):
            return False
        features_end = at[CONTENT_END]
        if at[FIELD] != 1:
            at[PLACE] = features_end
            continue
        while at[PLACE] < features_end:
            if not next_field(window, at, features_end):
                return False
            entry_end = at[CONTENT_END]
            if at[FIELD] == 1 and not _take_entry(window, entry_end, sample_name, label_name, rows, row, at):
                return False
            at[PLACE] = entry_end
    return True


def _take_entry(
    window: Any, end: int, sample_name: Any, label_name: Any, rows: Any, row: int, at: Any
) -> bool:
    """Look at the feature that begins here: its name comes first, as every writer has it."""
    is_sample = is_label = False
    while at[PLACE] < end:
        if not next_field(window, at, end):
            return False
        field_end = at[CONTENT_END]
        if at[FIELD] == 1:
            is_sample = _is_name(window, at, field_end, sample_name)
            is_label = _is_name(window, at, field_end, label_name)
        elif at[FIELD] == 2 and at[PLACE] < field_end and (is_sample or is_label):
            if not next_field(window, at, field_end):
                return False
            kind, list_begin, list_end = at[FIELD], at[PLACE], at[CONTENT_END]
            if kind == INTEGERS and is_label:
                found = _first_integer(window, list_end, at)
                if found < 0:
                    return False
                if found > 0 and at[PLACE] == list_end:
                    rows[row, LABEL_KIND], rows[row, LABEL] = kind, at[VALUE]
                elif found > 0:
                    rows[row, LABEL_KIND] = SEVERAL
                    rows[row, LABEL], rows[row, LABEL_SIZE] = list_begin, list_end - list_begin
            elif kind == BYTES:
                if at[PLACE] < list_end and not next_field(window, at, list_end):
                    return False
                is_one = at[CONTENT_END] == list_end
                if is_sample:
                    rows[row, BEGIN], rows[row, SIZE] = (
                        at[PLACE],
                        at[CONTENT_END] - at[PLACE] if is_one else -1,
                    )
                if is_label:
                    rows[row, LABEL_KIND] = kind if is_one else SEVERAL_TEXTS
                    rows[row, LABEL], rows[row, LABEL_SIZE] = at[PLACE], at[CONTENT_END] - at[PLACE]
            elif is_label:
                rows[row, LABEL_KIND] = kind
                rows[row, LABEL], rows[row, LABEL_SIZE] = list_begin, list_end - list_begin
        at[PLACE] = field_end
    return True


def _first_integer(window: Any, end: int, at: Any) -> int:
    """Read the first integer of a list, packed or not; return 1, 0 where it has none, or -1 where it is no list."""
    while at[PLACE] < end:
        if not _varint(window, at, end):
            return -1
        tag = at[VALUE]
        if tag >> 3 == 1 and tag & 7 == _VARINT:
            return 1 if _varint(window, at, end) else -1
        if tag >> 3 != 1 or tag & 7 != _LENGTH or not _varint(window, at, end):
            return -1
        if at[VALUE] > 0:
            return 1 if _varint(window, at, end) else -1
    return 0


def next_field(window: Any, at: Any, end: int) -> bool:
    """Go to the next field: its content from PLACE to CONTENT_END, its number, 0 where it has no length."""
    if not _varint(window, at, end):
        return False
    tag = at[VALUE]
    kind, at[FIELD] = tag & 7, tag >> 3
    if kind == _LENGTH:
        if not _varint(window, at, end) or at[VALUE] < 0 or at[VALUE] > end - at[PLACE]:
            return False
        at[CONTENT_END] = at[PLACE] + at[VALUE]
        return True
    at[FIELD] = 0
    if kind == _VARINT:
        is_there = _varint(window, at, end)
        at[CONTENT_END] = at[PLACE]
        return is_there
    at[CONTENT_END] = at[PLACE] + (8 if kind == _EIGHT else 4)
    return kind in (_EIGHT, _FOUR) and at[CONTENT_END] <= end


def _varint(window: Any, at: Any, end: int) -> bool:
    """Read an integer of 7 bits a byte, and go behind it."""
    value, shift, place = 0, 0, at[PLACE]
    while place < end and shift < 64:
        byte = byte_at(window, at, place)
        if byte < 0:
            return False
        place += 1
        if shift < 63:
            value |= (byte & 127) << shift
        elif byte & 1:
            value -= 1 << 63
        if byte < 128:
            at[PLACE], at[VALUE] = place, value
            return True
        shift += 7
    return False


def _is_name(window: Any, at: Any, end: int, name: Any) -> bool:
    begin = at[PLACE]
    if end - begin != len(name) or len(name) == 0:
        return False
    for k in range(len(name)):  # noqa: SIM110 - compiled, there is no `all`
        if byte_at(window, at, begin + k) != name[k]:
            return False
    return True


def little(window: Any, at: Any, begin: int, size: int) -> int:
    value = 0
    for k in range(size):
        value |= byte_at(window, at, begin + k) << 8 * k
    return value


def masked_crc32c(window: Any, at: Any, begin: int, size: int) -> int:
    """Source: RFC 3720, appendix B.4; masked as TensorFlow does."""
    crc = 0xFFFFFFFF
    for k in range(size):
        crc ^= byte_at(window, at, begin + k) & 255
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17 & 0xFFFFFFFF) + 0xA282EAD8) & 0xFFFFFFFF


def byte_at(window: Any, at: Any, place: int) -> int:
    """Return a byte of the file, -1 where it cannot be read."""
    if place < at[WINDOW] or place >= at[WINDOW_END]:
        at[WINDOW], at[WINDOW_END] = place, place + fill(window, at[DESCRIPTOR], place)
        if place >= at[WINDOW_END]:
            return -1
    return int(window[place - at[WINDOW]])


def numbers_of(content: bytes, kind: int) -> list[int] | list[float]:
    """Return the numbers of a list, packed or not. kind: FLOATS or SEVERAL. Raises: ValueError where it is no list."""
    found: list[Any] = []
    at = [0] * NUMBERS
    at[WINDOW_END] = end = len(content)
    while at[PLACE] < end:
        if not _varint(content, at, end):
            raise ValueError("cut off")
        tag = at[VALUE]
        if tag >> 3 != 1:
            raise ValueError(f"field {tag >> 3}")
        last = end
        if tag & 7 == _LENGTH:
            if not _varint(content, at, end) or not 0 <= at[VALUE] <= end - at[PLACE]:
                raise ValueError("cut off")
            last = at[PLACE] + at[VALUE]
        elif tag & 7 != (_FOUR if kind == FLOATS else _VARINT):
            raise ValueError(f"wire type {tag & 7}")
        is_packed = tag & 7 == _LENGTH
        while at[PLACE] < last:
            if kind == FLOATS:
                if last - at[PLACE] < 4:
                    raise ValueError("cut off")
                found += struct.unpack_from("<f", content, at[PLACE])
                at[PLACE] += 4
            elif _varint(content, at, last):
                found.append(at[VALUE])
            else:
                raise ValueError("cut off")
            if not is_packed:
                break
    return found
