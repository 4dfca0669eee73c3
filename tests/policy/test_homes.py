"""Who keeps which sample on N ranks: every rank comes to the same answer, and no space is wasted or overdrawn."""

import itertools
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.for_each import for_each
from tests.policy.test_scheduler import machine

from penstock.errors import ConfigError
from penstock.plan import AccessPlan, Explicit, FullShuffle, Sequential
from penstock.plan import frequency as frequency_module
from penstock.plan.frequency import first_reads
from penstock.policy import (
    Homes,
    _homes_kernels,
    place_by_first_read,
    place_by_frequency,
    place_by_hash,
    place_cover,
)
from penstock.policy import homes as homes_module
from penstock.policy.decision_state import new_state
from penstock.policy.placement import Kept
from penstock.trace.schema import SOURCE


@st.composite
def jobs(draw: st.DrawFn) -> tuple[AccessPlan, list[int], list[list[int]]]:
    """A plan, sizes, and unequal tiers on unequal ranks, some of them empty."""
    samples = draw(st.integers(1, 40))
    ranks = draw(st.integers(1, 4))
    order: FullShuffle | Explicit = FullShuffle(samples, draw(st.integers(0, 99)))
    if draw(st.booleans()):
        ids = st.lists(st.integers(0, samples - 1), min_size=1, max_size=60)
        order = Explicit([draw(ids) for _ in range(4)], samples)
    plan = AccessPlan(order, draw(st.integers(ranks, 12)), draw(st.integers(1, 4)), ranks)
    sizes = draw(st.lists(st.integers(0, 20), min_size=samples, max_size=samples))
    tiers = draw(st.integers(0, 3))
    row = st.lists(st.integers(0, 200), min_size=tiers, max_size=tiers)
    return plan, sizes, draw(st.lists(row, min_size=ranks, max_size=ranks))


def _counts(plan: AccessPlan) -> NDArray[np.int64]:
    """How often each rank reads each sample: int64[ranks, F]."""
    return np.array([plan.uses(rank)[0] for rank in range(plan.ranks)])


def _check(homes: Homes, sizes: list[int], capacities: list[list[int]]) -> None:
    """What holds of any placement: nothing is kept twice on a rank, nor beyond its tiers, and homes are kept."""
    keepers: dict[int, dict[int, int]] = {sample: {} for sample in range(homes.samples)}
    for rank, kept in enumerate(homes.keeps):
        used = [0] * len(capacities[rank])
        for sample, tier in zip(kept.samples.tolist(), kept.tiers.tolist(), strict=True):
            assert rank not in keepers[sample]
            keepers[sample][rank] = tier
            used[tier - 1] += sizes[sample]
        assert all(have <= most for have, most in zip(used, capacities[rank], strict=True))
    for sample, tiers in keepers.items():
        rank, tier = int(homes.rank_of[sample]), int(homes.tier_of[sample])
        assert (rank, tier) == (-1, SOURCE) if not tiers else tiers[rank] == tier


@given(jobs())
def test_no_placement_overdraws_a_tier_or_loses_a_home(
    job: tuple[AccessPlan, list[int], list[list[int]]],
) -> None:
    plan, sizes, capacities = job

    for homes in (
        place_by_hash(sizes, capacities, plan.ranks),
        place_cover(plan, sizes, capacities),
        place_by_first_read(plan, sizes, capacities)[0],
    ):
        _check(homes, sizes, capacities)


@given(jobs())
def test_cover_gives_every_sample_one_home_before_any_copy(
    job: tuple[AccessPlan, list[int], list[list[int]]],
) -> None:
    """Of equal sizes, as many samples that are read have a home as there are places, whatever the tiers."""
    plan, _, capacities = job
    size = 7
    places = sum(capacity // size for row in capacities for capacity in row)
    read = int((_counts(plan).sum(axis=0) > 0).sum())
    whole = [[capacity // size * size for capacity in row] for row in capacities]

    homes = place_cover(plan, [size] * plan.samples, whole)

    assert int((homes.rank_of >= 0).sum()) == min(places, read)
    if places <= read:  # every place is a home
        assert sum(kept.samples.size for kept in homes.keeps) == places


# First readers


@given(jobs(), st.data())
def test_what_is_promised_is_read_by_its_home_before_any_other_of_those_that_share(
    job: tuple[AccessPlan, list[int], list[list[int]]], data: st.DataObject
) -> None:
    plan, _, capacities = job
    among = data.draw(st.lists(st.integers(0, plan.ranks - 1), unique=True, min_size=1).map(sorted))
    first = data.draw(st.integers(0, plan.epochs - 1)), 0
    whole = [[capacity // 7 * 7 for capacity in row] for row in capacities]

    homes, promised = place_by_first_read(plan, [7] * plan.samples, whole, among, first)

    readers: dict[int, list[int]] = {}
    for epoch in range(first[0], plan.epochs):
        for step in range(plan.steps(epoch)):
            for rank in among:
                for sample in plan.local_batch(rank, epoch, step).tolist():
                    readers.setdefault(sample, []).append(rank)
    places = {rank: sum(capacity // 7 for capacity in whole[rank]) for rank in among}
    kept = np.flatnonzero(homes.rank_of >= 0).tolist()
    assert len(kept) == min(sum(places.values()), len(readers))
    assert set(kept) <= set(readers)
    assert all(homes.keeps[rank].samples.size <= places[rank] for rank in among)
    assert all(readers[sample][0] == homes.rank_of[sample] for sample in promised.tolist())
    for sample in set(kept) - set(promised.tolist()):  # where its first reader is full
        assert homes.keeps[readers[sample][0]].samples.size == places[readers[sample][0]]


@given(jobs())
def test_first_readers_with_space_for_all_get_what_the_compiled_loop_gives(
    job: tuple[AccessPlan, list[int], list[list[int]]],
) -> None:
    """Without that loop, whose module imports numba, no rank of a host waits a second for where samples go."""
    plan, sizes, _ = job
    samples = np.random.default_rng(0).permutation(plan.samples)
    ranks = np.arange(plan.samples, dtype=np.int32) % plan.ranks
    wanted = np.bincount(ranks, np.array(sizes)[samples], plan.ranks).astype(np.int64)
    found = []
    for settle, given_bytes in itertools.product(
        (homes_module._settle, _homes_kernels.settle), (wanted, wanted // 2)
    ):
        space = np.stack([given_bytes, np.full(plan.ranks, 7)], 1)
        rank_of, tier_of = np.full(plan.samples, -1, np.int32), np.full(plan.samples, SOURCE, np.int8)
        with pytest.MonkeyPatch.context() as patch:
            if settle is homes_module._settle and given_bytes is wanted:
                patch.setitem(sys.modules, "penstock.policy._homes_kernels", None)
            settle(samples, ranks, np.array(sizes), space, rank_of, tier_of)
        found.append((rank_of.tolist(), tier_of.tolist(), space.tolist()))

    assert found[:2] == found[2:], "with space for all, and for half"


def test_homes_of_a_long_epoch_are_in_the_order_of_the_first_reads() -> None:
    """More steps than 16 bits count: NumPy sorts fewer in another way."""
    plan = AccessPlan(FullShuffle(70_000, 3), 1, 1, ranks=1)
    step_of = first_reads(plan).step_of

    homes, promised = place_by_first_read(plan, np.full(70_000, 1), [70_000])

    assert step_of[homes.keeps[0].samples].tolist() == list(range(70_000))
    assert promised.tolist() == list(range(70_000))


def test_more_ranks_than_a_copy_has_a_number_for_are_refused() -> None:
    one, none = (Kept(np.arange(count), np.ones(count, np.int8)) for count in (1, 0))

    with pytest.raises(
        ConfigError, match=r"^32,768 ranks keep 1 samples together; up to 32,767 may keep fewer"
    ):
        new_state(
            np.full(1, 10),
            [one, *[none] * 32_767],
            machine(),
            slots=1,
            local_batch=1,
            readers=1,
            undecoded_bytes=10,
        )


@given(st.data())
def test_a_scheduler_lists_copies_by_sample_and_then_by_rank(data: st.DataObject) -> None:
    """With one copy of each sample at most, as of homes, it does not sort them."""
    samples, ranks = 12, 3
    of_rank = st.lists(st.integers(0, samples - 1), unique=True)
    kept = data.draw(st.lists(of_rank, min_size=ranks, max_size=ranks))
    if data.draw(st.booleans()):
        kept = [[each for each in ids if each % ranks == rank] for rank, ids in enumerate(kept)]
    tiers = [[data.draw(st.integers(1, 2)) for _ in ids] for ids in kept]

    state = new_state(
        np.full(samples, 10),
        [Kept(np.array(ids, np.int64), np.array(of, np.int8)) for ids, of in zip(kept, tiers, strict=True)],
        machine(),
        slots=1,
        local_batch=1,
        readers=1,
        undecoded_bytes=10,
    )

    found = [
        (sample, rank, tier)
        for sample in range(samples)
        for rank, tier, *_ in state.copies[slice(*state.copy_begin[sample : sample + 2])].tolist()
    ]
    assert found == sorted(
        (sample, rank, tier)
        for rank, (ids, of) in enumerate(zip(kept, tiers, strict=True))
        for sample, tier in zip(ids, of, strict=True)
    )


# Hash


def test_homes_by_hash_are_even_and_unlike_the_ids() -> None:
    homes = place_by_hash(np.ones(10_000, np.int64), [2_500], 4)

    assert np.bincount(homes.rank_of).tolist() == [2_500] * 4
    thousands = homes.rank_of.reshape(10, -1)
    share = np.stack([(thousands == rank).mean(axis=1) for rank in range(4)])
    assert abs(share - 0.25).max() < 4 * (0.25 * 0.75 / 1_000) ** 0.5


def test_homes_by_hash_have_nothing_to_do_with_any_order() -> None:
    homes = place_by_hash(np.ones(4_000, np.int64), [1_000], 4)

    for seed in (0, 1):
        readers = AccessPlan(FullShuffle(4_000, seed), 4_000, 1, 4).reader_of(0, np.arange(4_000))[0]
        assert abs((readers == homes.rank_of).mean() - 0.25) < 4 * (0.25 * 0.75 / 4_000) ** 0.5


def test_homes_by_hash_follow_the_space_of_unequal_ranks() -> None:
    homes = place_by_hash(np.full(6_000, 10), [[10_000, 5_000], [30_000, 0], [15_000, 0]], 3)

    assert np.bincount(homes.rank_of).tolist() == [1_500, 3_000, 1_500]
    assert np.bincount(homes.tier_of[homes.rank_of == 0]).tolist() == [0, 1_000, 500]


def test_what_the_ranks_cannot_hold_is_nowhere() -> None:
    homes = place_by_hash(np.full(100, 10), [100], 4)

    assert int((homes.rank_of < 0).sum()) == 60
    assert ((homes.rank_of < 0) == (homes.tier_of == SOURCE)).all()


# Frequency


def test_few_reads_of_a_large_data_set_are_counted_as_many_of_a_small_one() -> None:
    """A rank of many reads fewer samples than there are, and lists them; its choice is the same as from tables."""
    plan = AccessPlan(FullShuffle(300, 4), 60, 3, ranks=20)
    uses, first = plan.uses(7)

    placement = place_by_frequency(plan, 7, np.full(300, 1), [25])

    expected = sorted(np.argsort(-uses, kind="stable")[:25].tolist(), key=lambda sample: first[sample])
    assert placement.fill_order.tolist() == expected


# Cover


def test_a_home_is_where_its_sample_is_read_most_as_far_as_space_goes() -> None:
    """Against the best assignment there is (Kuhn & Munkres), which needs N F entries and cubic time."""
    from scipy.optimize import linear_sum_assignment

    samples, ranks = 400, 4
    plan = AccessPlan(FullShuffle(samples, 3), 40, 30, ranks)
    counts = _counts(plan)

    homes = place_cover(plan, np.ones(samples, np.int64), [samples // ranks])

    local = counts[homes.rank_of, np.arange(samples)].sum()
    rows, columns = linear_sum_assignment(np.repeat(counts, samples // ranks, axis=0), maximize=True)
    best = np.repeat(counts, samples // ranks, axis=0)[rows, columns].sum()
    assert 0.995 * best <= local <= best


def test_where_space_is_no_object_the_home_is_the_first_of_those_that_read_it_most() -> None:
    plan = AccessPlan(FullShuffle(200, 3), 10, 5, ranks=3)
    counts = _counts(plan)

    homes = place_cover(plan, np.ones(200, np.int64), [200])

    for sample in range(200):
        most = np.flatnonzero(counts[:, sample] == counts[:, sample].max())
        epochs = [plan.reader_of(epoch, sample)[0] for epoch in range(5)]
        first = next(int(rank) for rank in epochs if rank in most)
        assert homes.rank_of[sample] == first


def test_a_rank_without_space_keeps_nothing_and_the_others_keep_all() -> None:
    plan = AccessPlan(FullShuffle(90, 3), 9, 6, ranks=3)

    homes = place_cover(plan, np.full(90, 10), [[0], [500], [400]])

    assert np.bincount(homes.rank_of, minlength=3).tolist() == [0, 50, 40]


def test_what_none_of_its_readers_has_space_for_goes_to_the_others_in_proportion() -> None:
    plan = AccessPlan(Sequential(100), 100, 3, ranks=4, split=[1, 0, 0, 0])

    homes = place_cover(plan, np.full(100, 10), [[100], [300], [400], [200]])

    assert np.bincount(homes.rank_of, minlength=4).tolist() == [10, 30, 40, 20]


def test_of_data_that_do_not_fit_what_is_read_most_gets_a_home() -> None:
    """Samples drawn with weights: those that all ranks together read most, however they share the reads."""
    ids = np.random.default_rng(5).geometric(0.05, (8, 400)) % 60
    plan = AccessPlan(Explicit(ids, 60), 20, 8, ranks=2)
    total = np.bincount(ids.ravel(), minlength=60)

    homes = place_cover(plan, np.full(60, 3), [30])

    held = homes.rank_of >= 0
    assert int(held.sum()) == 20
    assert total[held].min() >= total[~held].max()


def test_space_that_is_left_takes_copies_of_what_a_rank_reads_most() -> None:
    plan = AccessPlan(FullShuffle(120, 3), 12, 20, ranks=3)
    counts = _counts(plan)

    homes = place_cover(plan, np.full(120, 1), [60])

    for rank, kept in enumerate(homes.keeps):
        copies = kept.samples[homes.rank_of[kept.samples] != rank]
        others = np.setdiff1d(np.arange(120), kept.samples)
        assert kept.samples.size == 60
        assert copies.size == 60 - int((homes.rank_of == rank).sum())
        assert counts[rank, copies].min() >= counts[rank, others].max()


def test_what_a_rank_reads_once_is_not_copied() -> None:
    """In two epochs on two ranks a sample is read twice by its home, or once by each rank."""
    plan = AccessPlan(FullShuffle(100, 3), 10, 2, ranks=2)

    homes = place_cover(plan, np.full(100, 1), [100])

    assert _counts(plan).min(axis=0).max() == 1
    assert sum(kept.samples.size for kept in homes.keeps) == 100


def test_the_most_read_homes_are_in_the_fastest_tier() -> None:
    plan = AccessPlan(FullShuffle(100, 3), 10, 20, ranks=2)
    counts = _counts(plan)

    homes = place_cover(plan, np.full(100, 1), [20, 30])

    for rank in range(2):
        of_rank = homes.rank_of == rank
        first = counts[rank, of_rank & (homes.tier_of == 1)]
        second = counts[rank, of_rank & (homes.tier_of == 2)]
        # Those turned away elsewhere come later, to the tier that has space.
        assert np.median(first) > np.median(second)
        assert first.min() >= np.quantile(second, 0.9)


def test_tiers_fill_in_the_order_in_which_samples_first_come_by() -> None:
    plan = AccessPlan(FullShuffle(120, 3), 12, 20, ranks=3)
    first = first_reads(plan).step_of

    homes = place_cover(plan, np.full(120, 1), [60])

    for rank, kept in enumerate(homes.keeps):
        is_home = homes.rank_of[kept.samples] == rank
        own_first = plan.uses(rank)[1][kept.samples] // 4  # a rank reads four samples a step
        steps = np.where(is_home, first[kept.samples], own_first)
        assert (np.diff(steps) >= 0).all()


def test_a_large_data_set_is_placed_block_by_block_to_the_same_end(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = AccessPlan(FullShuffle(500, 3), 20, 6, ranks=4)
    sizes = np.random.default_rng(0).integers(1, 9, 500)
    at_once = place_cover(plan, sizes, [[300, 200]] * 3 + [[0, 900]])
    monkeypatch.setattr(frequency_module, "_READERS_AT_ONCE", 120)
    monkeypatch.setattr(frequency_module, "_SMALLEST_BLOCK", 16)

    in_blocks = place_cover(plan, sizes, [[300, 200]] * 3 + [[0, 900]])

    assert in_blocks.rank_of.tolist() == at_once.rank_of.tolist()
    assert in_blocks.tier_of.tolist() == at_once.tier_of.tolist()


def test_sizes_may_be_one_number_for_all_without_a_table() -> None:
    plan = AccessPlan(FullShuffle(50, 3), 10, 2, ranks=2)
    one: NDArray[np.int64] = np.broadcast_to(np.int64(5), 50)

    assert (
        place_cover(plan, one, [125]).rank_of.tolist() == place_cover(plan, [5] * 50, [125]).rank_of.tolist()
    )


# Tiers without a limit


@for_each("capacity", [2**62, 2**63, 2**70, 10**30])
@for_each("tiers", [1, 2, 3])
def test_tiers_of_any_size_hold_everything(capacity: int, tiers: int) -> None:
    plan = AccessPlan(FullShuffle(10, 0), 4, 2, ranks=4)
    sizes = np.full(10, 7)

    for homes in (place_by_hash(sizes, [capacity] * tiers, 4), place_cover(plan, sizes, [capacity] * tiers)):
        assert (homes.tier_of == 1).all()
        assert (homes.rank_of >= 0).all()
    assert place_by_frequency(plan, 0, sizes, [capacity] * tiers).tier_of.max() == 1


def test_a_tier_of_64_bits_without_a_sign_is_no_negative_one() -> None:
    homes = place_by_hash([5, 5], np.array([2**63 + 5], np.uint64), 2)

    assert homes.tier_of.tolist() == [1, 1]


def test_a_tier_as_large_as_all_samples_is_as_good_as_one_without_a_limit() -> None:
    plan = AccessPlan(FullShuffle(50, 3), 10, 6, ranks=3)
    sizes = np.random.default_rng(1).integers(0, 9, 50)

    at_most, more = (place_cover(plan, sizes, [space, 9]) for space in (int(sizes.sum()), 10**25))

    assert at_most.rank_of.tolist() == more.rank_of.tolist()
    assert at_most.tier_of.tolist() == more.tier_of.tolist()


def test_samples_of_no_bytes_find_space_wherever_there_is_any() -> None:
    assert (place_by_hash([0, 0, 0], [1], 2).rank_of >= 0).all()


# What bad input gets


@for_each(
    ("sizes", "capacities", "match"),
    [
        ([1, 2], [[3], [4], [5]], "3 rows for 2 ranks"),
        ([1, 2], [3.5], "float64"),
        ([1, 2], [-3], "holds -3"),
        ([1, -2], [3], "negative"),
        ([1.5, 2], [3], "sizes_bytes is float64"),
        ([1, 2, 3], [3], "each of the 2 samples"),
        ([2**61, 2**62], [3], "adds up to 6.92e[+]18 bytes"),
        ([1, 2], [2**70, 0.5], "capacities_bytes is object"),
        ([1, 2], [True], "capacities_bytes is bool"),
    ],
)
def test_sizes_and_capacities_that_cannot_be_are_refused(
    sizes: list[int], capacities: list[int], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        place_cover(AccessPlan(Sequential(2), 2, 1, ranks=2), sizes, capacities)


def test_no_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="ranks is 0"):
        place_by_hash([1, 2], [3], 0)
