"""The span's layout is a file format and an agreement between the runtime and the simulator."""

from __future__ import annotations

import struct

import numpy as np

from penstock.trace.schema import NO_EPOCH, NO_FLOW, NO_PEER, NO_PLACE, SOURCE, SPAN, STAGING, Kind


def test_a_span_is_64_bytes_little_endian_without_padding() -> None:
    span = np.zeros(1, SPAN)
    for number, name in enumerate(SPAN.names or (), start=1):
        span[name] = number

    assert span.tobytes() == struct.pack("<ddqqQiiIiBbHI", *range(1, 14))
    assert SPAN.itemsize == 64


def test_the_numbers_of_kinds_and_special_places_never_change() -> None:
    assert {kind.name: int(kind) for kind in Kind} == {
        "WAIT": 0,
        "STEP": 1,
        "READ": 2,
        "HIT": 3,
        "DECODE": 4,
        "SLOT": 5,
        "SAVE": 6,
        "WRITE": 7,
        "DRAIN": 8,
        "LOAD": 9,
        "RETRY": 10,
        "LOCK": 11,
        "THREADS": 12,
        "NODE": 13,
        "START": 14,
    }
    assert (SOURCE, STAGING, NO_PLACE, NO_EPOCH, NO_PEER, NO_FLOW) == (-1, 0, -128, -1, -1, 0)
