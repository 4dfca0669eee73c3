"""The header of a JPEG file: what must be known before any pixel is decoded."""

from __future__ import annotations

from typing import NamedTuple

from penstock.errors import DataError

_START = b"\xff\xd8"
_END = b"\xff\xd9"
#: Start-of-frame markers; the others between 0xC0 and 0xCF define tables.
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_SEQUENTIAL_FRAMES = frozenset((0xC0, 0xC1))
_PROGRESSIVE_FRAMES = frozenset((0xC2, 0xC6, 0xCA, 0xCE))
_LOSSLESS_FRAMES = frozenset((0xC3, 0xC7, 0xCB, 0xCF))
#: Markers without a length: TEM, RST0 to RST7, SOI.
_BARE = frozenset((0x01, *range(0xD0, 0xD9)))
#: A block of 8 x 8 pixels takes two bits at least, so 256; checked lest a damaged header takes all memory.
_MOST_PIXELS_PER_BYTE = 256
_SCAN = 0xDA
_END_OF_IMAGE = 0xD9

Encoded = bytes | bytearray | memoryview


class JpegHeader(NamedTuple):
    """What the start of frame says."""

    height: int
    width: int
    components: int
    bits: int
    is_lossless: bool
    #: Columns of the smallest unit that can be decoded on its own.
    unit_columns: int
    #: Whether the file ends as it should. If not, only decoding all of it tells whether pixels are missing.
    has_end: bool
    #: What the decoder must hold of the whole picture before its first pixel is known: all coefficients of a
    #: progressive picture, two bytes each; else nothing.
    coefficient_bytes: int = 0


def is_jpeg(data: Encoded) -> bool:
    return bytes(data[:2]) == _START


def read_header(data: Encoded) -> JpegHeader:
    """Return the header of a JPEG file.

    Raises: DataError if the file is cut off within its header or claims an impossible size.
    """
    length, at = len(data), 2
    while at + 4 <= length:
        if data[at] != 0xFF:  # bytes between segments that belong to none, which decoders skip with a warning
            at = bytes(data).find(b"\xff", at)
            if at < 0:
                break
            continue
        marker = data[at + 1]
        if marker == 0xFF:  # fill byte
            at += 1
        elif marker in _BARE:
            at += 2
        elif marker in _FRAMES:
            return _read_frame(data, at, marker)
        elif marker in (_SCAN, _END_OF_IMAGE):
            raise DataError("damaged JPEG: no start of frame before the pixels")
        else:
            at += 2 + (data[at + 2] << 8 | data[at + 3])
    raise DataError(f"truncated JPEG: its {length:,} bytes end within the header")


def _read_frame(data: Encoded, at: int, marker: int) -> JpegHeader:
    frame = bytes(data[at + 4 : at + 10])
    if len(frame) < 6 or len(data) < at + 10 + 3 * frame[5]:
        raise DataError(f"truncated JPEG: its {len(data):,} bytes end within the header")
    bits, height, width, components = frame[0], frame[1] << 8 | frame[2], frame[3] << 8 | frame[4], frame[5]
    if height == 0 or width == 0 or components == 0:
        raise DataError(f"damaged JPEG: {width} x {height} pixels of {components} components")
    if marker in _SEQUENTIAL_FRAMES and height * width > _MOST_PIXELS_PER_BYTE * len(data):
        raise DataError(
            f"damaged JPEG: its {len(data):,} bytes cannot hold the {width} x {height} pixels it claims"
        )
    samplings = [data[at + 11 + 3 * component] for component in range(components)]
    columns = max(sampling >> 4 for sampling in samplings) if components > 1 else 1
    coefficient_bytes = 0
    if marker in _PROGRESSIVE_FRAMES:
        planes = [max(sampling >> 4, 1) * max(sampling & 15, 1) for sampling in samplings]
        coefficient_bytes = 2 * (height + 31) * (width + 31) * sum(planes) // max(planes)
    is_lossless = marker in _LOSSLESS_FRAMES
    has_end = bytes(data[-2:]) == _END
    return JpegHeader(height, width, components, bits, is_lossless, 8 * columns, has_end, coefficient_bytes)
