"""Which measurements make a machine, and what is said where they do not."""

from __future__ import annotations

import numpy as np
import pytest
from tests.for_each import for_each

from penstock.errors import ConfigError, DataError
from penstock.measure.evidence import reads_needed, seconds_needed, weigh
from penstock.measure.fit import Level

READERS = (1, 2, 4, 8, 16, 32, 64)


def measured(readers: int, megabytes_per_second: float, reads: int | None = None) -> Level:
    """Return a level of samples of 1 MB."""
    reads = reads_needed(readers) if reads is None else reads
    seconds = np.full(reads, readers / megabytes_per_second)
    return Level(readers, np.full(reads, 10**6), seconds, megabytes_per_second * 1e6)


def test_each_reader_reads_twice_and_all_together_eight_times() -> None:
    assert [reads_needed(readers) for readers in READERS] == [8, 8, 8, 16, 32, 64, 128]


def test_what_was_read_outside_of_the_steady_part_counts_as_read() -> None:
    level = Level(1, np.ones(6, np.int64), np.ones(6), 1.0, unsteady_reads=2)

    assert weigh([level], [1], 1.0).levels == (level,)


def test_every_number_of_readers_measured_is_all_there_is_to_want() -> None:
    tried = [
        measured(readers, readers) for readers in READERS
    ]  # still growing at the end, which is no want of time

    evidence = weigh(tried, READERS, 10.0)

    assert evidence.levels == tuple(tried)
    assert evidence.not_measured == ()


def test_a_store_that_was_seen_to_be_full_needs_no_more_readers() -> None:
    tried = [measured(1, 10), measured(2, 20), measured(4, 28), measured(8, 30, reads=15)]

    evidence = weigh(tried, READERS, 10.0)

    assert evidence.levels == tuple(tried[:3])
    assert evidence.not_measured == (8, 16, 32, 64)


@pytest.mark.parametrize("tried", [[1], [1, 2], [1, 2, 4]])
def test_a_store_that_still_got_faster_is_refused(tried: list[int]) -> None:
    """What a mounted store got: one reader, no more time, and a machine of one thread and 3 MB/s."""
    with pytest.raises(ConfigError) as refused:
        weigh([measured(readers, 3 * readers) for readers in tried], READERS, 10.0)

    assert str(refused.value).startswith(
        "10 seconds were over before the store showed what limits it (1 reader 3 MB/s"
    )
    assert f"{tried[-1]} reader" in str(refused.value)
    assert str(refused.value).endswith("give more time, --seconds 20")


def test_a_level_cut_short_does_not_show_that_a_store_is_full() -> None:
    with pytest.raises(ConfigError, match="showed what limits it"):
        weigh([measured(1, 10), measured(2, 20), measured(4, 5, reads=3)], READERS, 10.0)


@pytest.mark.parametrize(("reads", "seconds"), [(1, 6 * 8 * 4.0), (7, 6 * 8 * 4.0)])
def test_one_reader_with_too_few_reads_is_refused_and_told_how_long_it_would_take(
    reads: int, seconds: float
) -> None:
    counted = "1 read" if reads == 1 else f"{reads} reads"
    with pytest.raises(ConfigError, match=f"got through {counted} in .* 4 s each.*--seconds {seconds:.0f}$"):
        weigh([measured(1, 0.25, reads)], READERS, 10.0)


def test_more_time_is_at_least_twice_the_time() -> None:
    with pytest.raises(ConfigError, match=r"--seconds 20$"):
        weigh([measured(1, 1000, 3)], READERS, 10.0)


def test_reads_that_failed_are_named_where_they_may_be_why() -> None:
    with pytest.raises(
        ConfigError, match=r"at least 8: 2 reads failed \(a.jpg has vanished\): mend that, or give"
    ):
        weigh([measured(1, 1, 3)], READERS, 10.0, [DataError("a.jpg has vanished"), DataError("b.jpg")])


@for_each(
    ("rates", "seconds"),
    [
        ([10.0], 8 / 20),  # nothing is known yet: twice as fast
        ([10.0, 20.0], 8 / 40),
        ([10.0, 20.0, 20.0], 16 / 20),  # full
        ([10.0, 20.0, 15.0], 16 / 15),  # slower with more readers, which more will not be
        ([10.0, 30.0], 8 / 60),  # no doubling of readers does more than twice as much
    ],
)
def test_the_next_level_is_taken_to_gain_what_the_last_did(rates: list[float], seconds: float) -> None:
    levels = [measured(readers, rate) for readers, rate in zip(READERS, rates, strict=False)]

    assert seconds_needed(READERS[len(levels)], levels) == pytest.approx(seconds)
