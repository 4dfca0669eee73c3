"""CRC-32C of a record, masked as TFRecord files have it."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.kernel import kernel


def crc32c_table() -> Any:
    """Return uint32[256], the checksum of each byte. Source: RFC 3720, appendix B.4."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, table >> 1 ^ np.uint32(0x82F63B78), table >> 1).astype(np.uint32)
    return table


@kernel
def crc32c(data: Any, table: Any) -> Any:
    """Return the checksum of uint8[n]; one look-up per byte."""
    crc = np.uint32(0xFFFFFFFF)
    for k in range(data.size):
        crc = table[(crc ^ data[k]) & np.uint32(0xFF)] ^ (crc >> np.uint32(8))
    return crc ^ np.uint32(0xFFFFFFFF)
