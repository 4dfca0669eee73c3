"""The height and width of a picture that is no JPEG, from its first bytes."""

from __future__ import annotations

import re
import struct

from penstock.loader.transforms.jpeg import Encoded

#: Of a PBM, PGM or PPM file, whose header is text with comments; so long a header is read at most.
_PNM = re.compile(rb"P[1-6]" + 2 * rb"(?:\s|#[^\n\r]*[\n\r])+(\d{1,9})" + rb"[\s#]")
_PNM_HEADER_BYTES = 4096
#: Of a TIFF file's tags, and how their values are stored.
_TIFF_WIDTH, _TIFF_HEIGHT, _TIFF_ORIENTATION = 256, 257, 274
_TIFF_TYPES = {3: "H", 4: "I"}
#: Orientations in which rows and columns change places, as Pillow and OpenCV decode; both ignore those that are none.
_TIFF_TURNED = (5, 6, 7, 8)
#: Of a GIF file: size of the header with the screen, and what a block begins with.
_GIF_HEADER_BYTES = 13
_GIF_EXTENSION, _GIF_FRAME = 0x21, 0x2C
_WEBP_IS_ANIMATED = 0x02


def is_tiff(data: Encoded) -> bool:
    return bytes(data[:4]) in (b"II*\0", b"MM\0*")


def is_webp(data: Encoded) -> bool:
    """Whether a picture whose size `read_size` tells is of WebP; four bytes are enough."""
    return bytes(data[:4]) == b"RIFF"


def read_size(data: Encoded) -> tuple[int, int] | None:
    """Return (height, width) of a PNG, BMP, WebP, GIF, PNM or TIFF file as it is decoded.

    None for anything else, and where the header is damaged or does not say what decoding takes: an animated WebP file,
    of which frames are kept; a GIF file whose first picture exceeds the screen, which Pillow enlarges.
    """
    head = bytes(data[:30])
    width = height = 0
    if is_tiff(head):
        width, height = _tiff_size(data)
    elif head[:6] in (b"GIF87a", b"GIF89a") and len(head) >= 10:
        width, height = _gif_size(data)
    elif match := _PNM.match(bytes(data[:_PNM_HEADER_BYTES]) if head[:1] == b"P" else b""):
        width, height = int(match[1]), int(match[2])
    elif head[:8] == b"\x89PNG\r\n\x1a\n" and head[12:16] == b"IHDR" and len(head) >= 24:
        width, height = struct.unpack(">II", head[16:24])
    elif head[:2] == b"BM" and len(head) >= 26 and struct.unpack("<I", head[14:18])[0] >= 40:
        width, height = (abs(size) for size in struct.unpack("<ii", head[18:26]))
    elif is_webp(head) and head[8:12] == b"WEBP" and len(head) == 30:
        match head[12:16]:
            case b"VP8 ":
                width, height = (size & 0x3FFF for size in struct.unpack("<HH", head[26:30]))
            case b"VP8L":
                bits = int.from_bytes(head[21:25], "little")
                width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
            case b"VP8X" if not head[20] & _WEBP_IS_ANIMATED:
                width, height = (int.from_bytes(head[at : at + 3], "little") + 1 for at in (24, 27))
    return (height, width) if height > 0 and width > 0 else None


def _gif_size(data: Encoded) -> tuple[int, int]:
    """Return (width, height) of the screen; zeros where the first picture exceeds it."""
    width, height = struct.unpack_from("<HH", data, 6)
    try:
        flags = data[10]
        at = _GIF_HEADER_BYTES + (2 << (flags & 7)) * 3 * (flags >> 7)
        while data[at] == _GIF_EXTENSION:
            at += 2
            while data[at]:
                at += data[at] + 1
            at += 1
        if data[at] == _GIF_FRAME:
            left, top, columns, rows = struct.unpack_from("<4H", data, at + 1)
            if left + columns > width or top + rows > height:
                return 0, 0
    except (IndexError, struct.error):
        pass  # cut off, as decoding will say
    return width, height


def _tiff_size(data: Encoded) -> tuple[int, int]:
    """Return (width, height) of the first picture; zeros where the tags do not give it."""
    order = "<" if bytes(data[:2]) == b"II" else ">"
    tags: dict[int, int] = {}
    try:
        (directory,) = struct.unpack_from(f"{order}I", data, 4)
        (count,) = struct.unpack_from(f"{order}H", data, directory)
        for at in range(directory + 2, directory + 2 + 12 * count, 12):
            tag, kind = struct.unpack_from(f"{order}HH", data, at)
            if tag in (_TIFF_WIDTH, _TIFF_HEIGHT, _TIFF_ORIENTATION):
                (tags[tag],) = struct.unpack_from(order + _TIFF_TYPES[kind], data, at + 8)
        width, height = tags[_TIFF_WIDTH], tags[_TIFF_HEIGHT]
    except (struct.error, KeyError):
        return 0, 0
    return (height, width) if tags.get(_TIFF_ORIENTATION) in _TIFF_TURNED else (width, height)
