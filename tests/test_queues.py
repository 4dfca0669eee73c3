"""A wait for a queue ends when its time is over, whatever else the machine does."""

from __future__ import annotations

from contextlib import suppress
from queue import Empty, SimpleQueue

import pytest

from penstock.queues import get_within


def test_a_wait_that_is_over_before_it_begins_ends() -> None:
    """In one of some thousand times the thread is interrupted while it computes how long it may wait."""
    for _ in range(5_000):
        with suppress(Empty):
            get_within(SimpleQueue[int](), 1e-9)


def test_an_item_is_returned_without_a_wait_and_a_queue_without_one_is_empty_in_time() -> None:
    queue = SimpleQueue[int]()
    queue.put(1)
    queue.put(2)

    assert [get_within(queue, None), get_within(queue, 1e-3)] == [1, 2]
    with pytest.raises(Empty):
        get_within(queue, 1e-3)
