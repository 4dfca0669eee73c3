"""Python code that holds the interpreter's lock, told from code that waits for a store or computes without it."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from tests.for_each import for_each

from penstock.flow.lock_use import LateWakes, LockUse, RunDelay, ask_for_lock


def use(loads: int, cpu_seconds: float, asked_seconds: list[float]) -> LockUse:
    """Loads of 10 ms on two threads, one of which ends every 5 ms."""
    sums = LockUse()
    for load in range(loads):
        asked = asked_seconds[load % len(asked_seconds)] if asked_seconds else None
        sums = sums.plus(0.005, cpu_seconds, asked)
    return sums


@for_each(
    ("cpu_seconds", "asked_seconds", "cpus", "expected"),
    [
        pytest.param(0.005, [0.005, 0.00001], 2, True, id="Python code of two threads"),
        pytest.param(0.005, [0.005, 0.00001], 1, False, id="on the only processor there is"),
        pytest.param(
            0.005, [0.00002], 2, False, id="half of the time in a store, which leaves the lock free"
        ),
        pytest.param(0.010, [0.005], 2, False, id="two processors in use, wanted by other programs too"),
        pytest.param(0.001, [0.005], 2, False, id="the lock kept by another thread of the process"),
        pytest.param(0.004, [0.005], 2, True, id="Python code of two threads, and other programs"),
        pytest.param(0.004, [0.00001], 2, False, id="half of two processors in use by other programs"),
        pytest.param(0.005, [], 2, False, id="nobody asked"),
    ],
)
def test_the_lock_is_to_blame_where_it_is_kept_and_one_processor_is_used(
    cpu_seconds: float, asked_seconds: list[float], cpus: int, expected: bool
) -> None:
    assert use(100, cpu_seconds, asked_seconds).is_by_lock(cpus) == expected


@for_each(
    ("delayed", "expected_seconds"),
    [("1 2000000 3", 0.005), ("1 6000000 3", 0.001), ("1 9000000 3", 0.0), (None, 0.005), ("none", 0.005)],
)
def test_the_wait_for_a_processor_is_none_for_the_lock(
    tmp_path: Path, delayed: str | None, expected_seconds: float
) -> None:
    """The kernel counts in nanoseconds how long a thread that could run did not."""
    schedstat = tmp_path / "schedstat"
    if delayed is not None:
        schedstat.write_text("1 2000000 3\n" if delayed[0].isdigit() else delayed)
    times = [10.0, 10.005]

    def clock() -> float:
        if len(times) == 1 and delayed is not None:
            schedstat.write_text(delayed)
        return times.pop(0)

    with closing(RunDelay(schedstat)) as delay:
        assert ask_for_lock(clock, delay) == pytest.approx(expected_seconds)


def test_little_says_nothing() -> None:
    assert not use(9, 0.005, [0.005]).is_enough
    assert not use(9, 0.005, [0.005]).is_by_lock(2)
    assert use(10, 0.005, [0.005]).is_by_lock(2)


def test_a_part_of_a_run_is_judged_by_itself() -> None:
    first = use(100, 0.010, [0.00001])
    then = first
    for _ in range(20):
        then = then.plus(0.005, 0.005, 0.005)

    assert not then.is_by_lock(2)
    assert then.since(first).is_by_lock(2)
    assert then.since(first).processors == pytest.approx(1.0)


@for_each(
    ("wall_seconds", "cpu_seconds", "left_seconds"),
    [(0.010, 0.004, 0.007), (0.010, 0.008, 0.008), (0.010, 0.0095, 0.010), (500e-6, 250e-6, 500e-6)],
    ids=["waited for more", "for no more than it was idle", "hardly idle", "for a moment"],
)
def test_the_kernel_is_asked_how_long_a_thread_waited_for_a_processor_where_it_matters(
    tmp_path: Path, wall_seconds: float, cpu_seconds: float, left_seconds: float
) -> None:
    schedstat = tmp_path / "schedstat"
    schedstat.write_text("1 2000000 3")
    with closing(RunDelay(schedstat)) as delay:
        schedstat.write_text("1 5000000 3")

        assert delay.left_of(wall_seconds, cpu_seconds) == pytest.approx(left_seconds)

        assert delay.taken_seconds == pytest.approx(wall_seconds - left_seconds)
        # What was taken once is not taken again; what was before some work is none of its own.
        assert delay.left_of(0.010, 0.004) == pytest.approx(0.010 if left_seconds < wall_seconds else 0.007)
        schedstat.write_text("1 8000000 3")
        delay.begin()
        assert delay.left_of(0.010, 0.004) == 0.010


def test_work_that_follows_work_which_waited_for_nothing_asks_nothing_when_it_begins(tmp_path: Path) -> None:
    schedstat = tmp_path / "schedstat"
    schedstat.write_text("1 2000000 3")
    with closing(RunDelay(schedstat)) as delay:
        delay.left_of(0.010, 0.010)
        schedstat.write_text("1 5000000 3")
        delay.begin(surely=False)
        assert delay.left_of(0.010, 0.004) == pytest.approx(0.007)

        schedstat.write_text("1 7000000 3")
        delay.begin(surely=False)
        assert delay.left_of(0.010, 0.004) == 0.010


@for_each(
    ("woken", "delayed", "expected_seconds"),
    [
        (10.4, "1 2000000 3", 0.35),
        (10.4, "1 102000000 3", 0.25),
        (10.4, "1 332000000 3", 0.0),
        (10.06, "1 2000000 3", 0.0),
    ],
)
def test_a_pause_that_ends_late_was_held_up_by_the_lock_but_for_the_wait_for_a_processor(
    tmp_path: Path, woken: float, delayed: str, expected_seconds: float
) -> None:
    schedstat, times = tmp_path / "schedstat", [10.0, woken]
    schedstat.write_text("1 2000000 3\n")
    with closing(LateWakes(lambda: times.pop(0), schedstat)) as late:
        late.begin()
        schedstat.write_text(delayed)

        assert late.late_seconds(10.05) == pytest.approx(expected_seconds)
