"""What is particular to samples in this process's memory."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.store import MemoryTier


def resident_bytes() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096


def test_capacity_costs_memory_only_when_it_is_used() -> None:
    before = resident_bytes()

    tier = MemoryTier(4 * 10**9)
    empty = resident_bytes()
    tier.put(1, bytes(50_000_000))
    filled = resident_bytes()
    tier.close()

    assert empty - before < 20_000_000
    assert filled - empty > 45_000_000


def test_memory_goes_with_the_tier_and_its_last_view() -> None:
    tier = MemoryTier(10**8)
    tier.put(1, bytes(50_000_000))
    kept = np.frombuffer(tier.view(1), np.uint8)
    held = resident_bytes()

    tier.close()
    del tier
    with_view = resident_bytes()
    del kept

    assert held - with_view < 20_000_000
    assert with_view - resident_bytes() > 45_000_000


def test_more_than_the_address_space_is_refused() -> None:
    for capacity_bytes in (2**60, 2**70):
        with pytest.raises(ConfigError, match="more than can be mapped"):
            MemoryTier(capacity_bytes)


class HeldOpen:
    """An arena into which a copy goes only when it is let."""

    def __init__(self, arena: NDArray[np.uint8]) -> None:
        self.arena = arena
        self.begun, self.may_end = threading.Event(), threading.Event()

    def __setitem__(self, place: slice, content: NDArray[np.uint8]) -> None:
        self.begun.set()
        self.may_end.wait()
        self.arena[place] = content

    def __getitem__(self, place: slice) -> NDArray[np.uint8]:
        return self.arena[place]


def test_a_sample_on_its_way_is_not_seen_and_not_given_room_twice() -> None:
    """Two reads of one sample end at the same time, and somebody asks for it in between."""
    tier = MemoryTier(100)
    held = HeldOpen(tier._open_arena())
    tier._arena = held  # type: ignore[assignment]

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(tier.put, 1, b"12345678")
        held.begun.wait()
        try:
            assert not tier.contains(1)
            assert tier.put(1, b"12345678")
            assert tier.used_bytes == 8
        finally:
            held.may_end.set()
        assert first.result()

    assert bytes(tier.view(1)) == b"12345678"
    tier.close()
