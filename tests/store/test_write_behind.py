"""What is written to a tier in the background, and by whom."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.store.write_behind import WriteBehind


@dataclass
class RecordsWriters:
    """A tier of ten bytes that records which thread wrote a sample."""

    writers: dict[int, threading.Thread] = field(default_factory=dict)
    capacity_bytes: int = 10
    is_written: bool = True

    def held(self) -> NDArray[np.int64]:
        return np.array(sorted(self.writers), np.int64)

    def contains(self, sample: int) -> bool:
        return sample in self.writers

    def sizes_of(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.full(ids.size, 1)

    def put(self, sample: int, data: memoryview) -> bool:
        if len(data) > self.capacity_bytes:
            return False
        self.writers[sample] = threading.current_thread()
        return True

    def read_group(
        self, ids: NDArray[np.int64], into: NDArray[np.uint8], begins: NDArray[np.int64]
    ) -> list[tuple[int, Exception]]:
        return []

    def evict(self, ids: NDArray[np.int64]) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_sample_without_space_in_the_queue_is_written_by_its_caller_where_others_wait_for_it(
    is_shared: bool,
) -> None:
    tier = RecordsWriters()
    behind = WriteBehind(tier, 0, is_shared=is_shared)

    assert behind.put(3, np.zeros(10, np.uint8)) == is_shared
    assert not behind.put(4, np.zeros(11, np.uint8))  # the tier has no space for it
    assert behind.put(5, np.zeros(10, np.uint8), stays=True)  # takes none of the queue

    behind.close()
    assert sorted(tier.writers) == [3, 5][not is_shared :]
    assert tier.writers.get(3) is (threading.current_thread() if is_shared else None)
    assert tier.writers[5] is not threading.current_thread()
