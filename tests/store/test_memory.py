"""What is particular to samples in this process's memory."""

import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from penstock.arena import Arena
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


def test_a_sample_on_its_way_is_not_seen_and_not_given_space_twice() -> None:
    """Two reads of one sample end at the same time, and somebody asks for it in between."""
    tier = MemoryTier(100)
    ids = np.array([1])
    begins = tier.take_space(ids, np.array([8]))
    assert begins is not None
    tier.array[begins[0] : begins[1]] = list(b"12345678")

    assert not tier.contains(1)
    assert tier.put(1, b"12345678")
    assert tier.take_space(ids, np.array([8])) is None
    assert (tier.used_bytes, len(tier)) == (8, 0)
    tier.keep(ids)

    assert bytes(tier.view(1)) == b"12345678"
    assert len(tier) == 1
    tier.close()


def test_space_that_is_given_back_serves_others() -> None:
    """A store fails for a while: what was to be kept is read again, and all of it fits."""
    tier = MemoryTier(100)
    for _ in range(50):
        assert tier.take_space(np.arange(10), np.full(10, 10)) is not None
        tier.drop(np.array([1, 5, 4, 0]))
        assert tier.take_space(np.array([7]), np.array([1])) is None
        assert tier.take_space(np.array([20, 21]), np.array([15, 5])) is not None
        assert tier.used_bytes == 80
        tier.drop(np.array([20, 21, 9, 8, 7, 6, 3, 2]))
        assert tier.used_bytes == 0

    assert tier.put(1, bytes(100))
    assert tier._places.nbytes < 100_000
    tier.close()


def test_another_process_can_map_it() -> None:
    tier = MemoryTier(100, partial(Arena, is_shared=True))
    tier.put(5, b"abc")
    ((begin, end),) = tier.places_of(np.array([5])).tolist()

    with Arena.attach(os.dup(tier.arena.descriptor)) as theirs:
        assert bytes(theirs.array[begin:end]) == b"abc"

    tier.close()
