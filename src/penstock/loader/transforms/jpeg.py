"""The header of a JPEG file: what must be known before any pixel is decoded."""

from __future__ import annotations

from typing import NamedTuple

from penstock.errors import DataError

_START = b"\xff\xd8"
#: What `next_frame` returns where it finds none.
NO_FRAME, CUT_OFF = -1, -2
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
    #: Whether the pixels come block by block, in one go.
    is_sequential: bool = True


def is_jpeg(data: Encoded) -> bool:
    return bytes(data[:2]) == _START


def read_header(data: Encoded) -> JpegHeader:
    """Return the header of a JPEG file.

    Raises: DataError if the file is cut off within its header or claims an impossible size.
    """
    length, at = len(data), 2
    while (at := next_frame(data, at)) >= 0 and data[at] != 0xFF:
        # Bytes between segments that belong to none, which decoders skip with a warning.
        at = bytes(data).find(b"\xff", at)
    if at == NO_FRAME:
        raise DataError("damaged JPEG: no start of frame before the pixels")
    if at < 0 or is_cut_off(data, at):
        raise DataError(f"truncated JPEG: its {length:,} bytes end within the header")
    header = read_frame(data, at)
    if header.height * header.width * header.components == 0:
        raise DataError(
            f"damaged JPEG: {header.width} x {header.height} pixels of {header.components} components"
        )
    if claims_too_much(data, header):
        raise DataError(
            f"damaged JPEG: its {length:,} bytes cannot hold the {header.width} x {header.height} pixels it claims"
        )
    return header


# -- What a compiled loop does as well; `data` is an array there, whose items are of uint8 -------------------


def next_frame(data: Encoded, at: int) -> int:
    """Return where the start of frame begins, or bytes that belong to no segment; at: where a segment begins.

    Returns: NO_FRAME if the pixels come first; CUT_OFF if the data end before.
    """
    while at >= 0 and at + 4 <= len(data):
        marker = data[at + 1]
        if data[at] != 0xFF or is_frame(marker):
            return at
        if marker == 0xFF:  # fill byte
            at += 1
        elif marker == 0x01 or 0xD0 <= marker <= 0xD8:  # without a length: TEM, RST0 to RST7, SOI
            at += 2
        elif marker in (_SCAN, _END_OF_IMAGE):
            return NO_FRAME
        else:
            at += 2 + 256 * data[at + 2] + data[at + 3]
    return CUT_OFF


def is_frame(marker: int) -> bool:
    """Whether a marker starts a frame; the others between 0xC0 and 0xCF define tables."""
    return 0xC0 <= marker <= 0xCF and marker != 0xC4 and marker != 0xC8 and marker != 0xCC


def is_cut_off(data: Encoded, at: int) -> bool:
    """Whether the data end within the frame's header, which begins at `at`."""
    return len(data) < at + 10 or len(data) < at + 10 + 3 * data[at + 9]


def read_frame(data: Encoded, at: int) -> JpegHeader:
    """Return what the start of frame says that begins at `at`, all of which must be there."""
    marker, components = data[at + 1], 0 + data[at + 9]
    height, width = 256 * data[at + 5] + data[at + 6], 256 * data[at + 7] + data[at + 8]
    columns, planes, most = 1, 0, 1
    for component in range(components):
        sampling = 0 + data[at + 11 + 3 * component]
        across, down = sampling // 16, sampling % 16
        columns = max(columns, across)
        plane = max(across, 1) * max(down, 1)
        planes, most = planes + plane, max(most, plane)
    coefficient_bytes = 0
    if marker == 0xC2 or marker == 0xC6 or marker == 0xCA or marker == 0xCE:  # progressive
        coefficient_bytes = 2 * (height + 31) * (width + 31) * planes // most
    return JpegHeader(
        height,
        width,
        components,
        0 + data[at + 4],
        marker == 0xC3 or marker == 0xC7 or marker == 0xCB or marker == 0xCF,
        8 * columns if components > 1 else 8,
        data[len(data) - 2] == 0xFF and data[len(data) - 1] == _END_OF_IMAGE,
        coefficient_bytes,
        marker == 0xC0 or marker == 0xC1,
    )


def is_for_turbojpeg(header: JpegHeader) -> bool:
    """Whether the fast decoders take it: grey or three colours of eight bits."""
    return (header.components == 1 or header.components == 3) and header.bits == 8 and not header.is_lossless


def claims_too_much(data: Encoded, header: JpegHeader) -> bool:
    """Whether so many pixels cannot be in so few bytes: a damaged header must not take all memory."""
    return header.is_sequential and header.height * header.width > _MOST_PIXELS_PER_BYTE * len(data)
