"""The thesis's tables come out as published; its policies decide as published; its pictures show what was computed."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import numpy as np
import pytest
from tests.policy.test_loading import _by_rank as by_rank
from tests.policy.test_loading import _job as small_job

from penstock.papers import thesis
from penstock.papers.catalog import Result
from penstock.papers.thesis_policies import (
    POLICIES,
    PublishedFrequency,
    PublishedLbann,
    PublishedLocality,
    PublishedParallelStaging,
)
from penstock.policy.loading import NotSupported
from penstock.simulate.policies import POLICY_NAMES


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2, 3])
def test_the_tables_of_the_thesis_come_out_within_one_percent(number: int) -> None:
    repeated = getattr(thesis, f"table_5_{number}")()

    assert [row.of for row in repeated.results] == list(thesis.PUBLISHED)
    for row in repeated.results:
        assert row.published == thesis.PUBLISHED[row.of][number - 1]
        assert row.computed == (row.published and pytest.approx(row.published, rel=0.01)), row.of


def test_the_policies_of_the_tables_have_the_products_names() -> None:
    names = [policy.name for policy in POLICIES]

    assert names == list(thesis.PUBLISHED)
    assert set(names) < set(POLICY_NAMES)


@pytest.mark.usefixtures("fonts")
def test_pictures_show_computed_and_published_times() -> None:
    results = [
        Result("naive", 27.0, 28.0, "seconds"),
        Result("staging", 10.0, None, "seconds"),
        Result("lbann", None, None, "seconds"),
    ]

    ours, published = thesis.draw_table("Scenario 9", results).axes[0].get_lines()

    assert np.asarray(ours.get_xdata()).tolist() == [10.0, 27.0]
    assert np.asarray(published.get_xdata()).tolist() == [28.0]
    machines = [Result(str(number), float(number), None, "seconds") for number in range(27)]
    panels = thesis.draw_figure_5_8(machines).axes
    # Of 27 machines the disk changes fastest, then RAM, then the buffer: a line has every third.
    assert [np.asarray(line.get_ydata()).tolist() for line in panels[1].get_lines()] == [
        [9.0, 12.0, 15.0],
        [10.0, 13.0, 16.0],
        [11.0, 14.0, 17.0],
    ]


# -- Policies


def test_frequency_is_cut_into_pieces_a_class_too_early() -> None:
    # A list of 24 for rank 0: pieces of 5 + 1 (staging), 10 + 1 and the rest, each sorted by first use.
    job = small_job(epochs=30)
    counts = Counter(job.strings[0].tolist())
    listed = sorted(counts, key=lambda sample: (-counts[sample], sample))
    first = job.strings[0].tolist().index
    pieces = [sorted(listed[:6], key=first), sorted(listed[6:17], key=first), sorted(listed[17:], key=first)]

    kept = by_rank(PublishedFrequency().prepare(job))

    expected = [*chain(*pieces)]
    assert kept[0, 1] == expected[:10]
    assert kept[0, 2] == expected[10:20]


def test_frequency_keeps_what_a_rank_never_reads() -> None:
    job = small_job(24, (1000,), epochs=1)

    kept = by_rank(PublishedFrequency().prepare(job))[0, 1]

    assert len(kept) == 24
    assert set(kept[6:]) == {sample for sample in range(24) if sample not in job.strings[0]}


def test_locality_aware_puts_all_into_tier_2_and_exchanges_nothing() -> None:
    loading = PublishedLocality().prepare(small_job())

    assert by_rank(loading) == {(rank, 2): list(range(6 * rank, 6 * rank + 6)) for rank in range(4)}
    assert loading.strings is None
    with pytest.raises(NotSupported, match="locality-aware keeps samples in storage class 2"):
        PublishedLocality().prepare(small_job(capacities=(100,)))


def test_parallel_staging_copies_lower_ids_alone_and_trains_on_its_part() -> None:
    loading = PublishedParallelStaging().prepare(small_job())

    copied = {fill.rank: fill.samples.tolist() for fill in loading.fills if fill.origin == "peers"}
    assert copied == {0: [], 1: [0, 1, 2, 3], 2: [0, 1, 2, 3], 3: [0, 1, 2, 3]}
    assert loading.strings is not None
    for rank, string in enumerate(loading.strings):
        assert set(string // 6) == {rank}


def test_lbann_reads_what_it_keeps_from_the_store_as_well() -> None:
    loading = PublishedLbann().prepare(small_job())

    assert {fill.origin for fill in loading.fills} == {"store"}
    assert not loading.stages_from_store
