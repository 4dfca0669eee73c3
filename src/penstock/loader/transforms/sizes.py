"""The height and width of a picture that is no JPEG, from its first bytes."""

from __future__ import annotations

import struct

from penstock.loader.transforms.jpeg import Encoded


def read_size(data: Encoded) -> tuple[int, int] | None:
    """Return (height, width) of a PNG, BMP or WebP file; None for anything else, or where the header is damaged."""
    head = bytes(data[:30])
    width = height = 0
    if head[:8] == b"\x89PNG\r\n\x1a\n" and head[12:16] == b"IHDR" and len(head) >= 24:
        width, height = struct.unpack(">II", head[16:24])
    elif head[:2] == b"BM" and len(head) >= 26 and struct.unpack("<I", head[14:18])[0] >= 40:
        width, height = (abs(size) for size in struct.unpack("<ii", head[18:26]))
    elif head[:4] == b"RIFF" and head[8:12] == b"WEBP" and len(head) == 30:
        match head[12:16]:
            case b"VP8 ":
                width, height = (size & 0x3FFF for size in struct.unpack("<HH", head[26:30]))
            case b"VP8L":
                bits = int.from_bytes(head[21:25], "little")
                width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
            case b"VP8X":
                width, height = (int.from_bytes(head[at : at + 3], "little") + 1 for at in (24, 27))
    return (height, width) if height > 0 and width > 0 else None
