"""Reads of N ranks, counted: against a plain simulation, the bound, and the figures that were found independently."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.plan import AccessPlan, Explicit, FullShuffle, Sequential, split_locally
from penstock.plan.frequency import readers_of_epoch
from penstock.policy import place_by_hash, place_cover, place_frequency
from penstock.policy.push import decide_min
from penstock.simulate.sharing import (
    COVER,
    FREQUENCY,
    HASH,
    LOCAL,
    MIN,
    PUSH,
    SCHEMES,
    ReadCounts,
    compare_schemes,
    count_min,
    count_push,
    count_shares,
    in_memory,
    least_store_reads,
)


@st.composite
def plans(draw: st.DrawFn) -> AccessPlan:
    samples = draw(st.integers(1, 40))
    order: FullShuffle | Explicit = FullShuffle(samples, draw(st.integers(0, 99)))
    if draw(st.booleans()):
        ids = st.lists(st.integers(0, samples - 1), min_size=1, max_size=60)
        order = Explicit([draw(ids) for _ in range(4)], samples)
    ranks = draw(st.integers(1, 4))
    return AccessPlan(order, draw(st.integers(1, 12)), draw(st.integers(1, 4)), ranks)


def _per_epoch_and_rank(plan: AccessPlan) -> list[list[tuple[int, int]]]:
    return [
        list(zip(*(part.tolist() for part in readers_of_epoch(plan, epoch)), strict=True))
        for epoch in range(plan.epochs)
    ]


@given(plans(), st.integers(0, 60))
def test_reads_from_agreed_homes_are_counted_as_they_happen(plan: AccessPlan, room: int) -> None:
    for homes in (
        place_by_hash(np.ones(plan.samples, np.int64), [room], plan.ranks),
        place_cover(plan, np.ones(plan.samples, np.int64), [room]),
    ):
        shares = count_shares(plan, homes)

        keeps = [set(kept.samples.tolist()) for kept in homes.keeps]
        has: list[set[int]] = [set() for _ in keeps]
        for epoch, reads in enumerate(_per_epoch_and_rank(plan)):
            local, moved, store, handed = (np.zeros(plan.ranks, np.int64) for _ in range(4))
            for sample, rank in reads:
                home = int(homes.rank_of[sample])
                if sample in has[rank]:
                    local[rank] += 1
                elif home >= 0 and sample in has[home]:
                    moved[rank] += 1
                else:
                    store[rank] += 1
                    if home >= 0:
                        has[home].add(sample)
                        handed[rank] += home != rank
                if sample in keeps[rank]:
                    has[rank].add(sample)
            assert shares.local[epoch].tolist() == local.tolist()
            assert shares.moved[epoch].tolist() == moved.tolist()
            assert shares.store[epoch].tolist() == store.tolist()
            assert shares.handed[epoch].tolist() == handed.tolist()
        assert not shares.filled.any()


@given(plans(), st.integers(0, 60))
def test_ranks_that_keep_by_frequency_each_fill_what_they_keep(plan: AccessPlan, room: int) -> None:
    homes = place_frequency(plan, np.ones(plan.samples, np.int64), [room])

    shares = count_shares(plan, homes)

    keeps = [set(kept.samples.tolist()) for kept in homes.keeps]
    local = sum(sample in keeps[rank] for reads in _per_epoch_and_rank(plan) for sample, rank in reads)
    store = sum(
        not any(sample in kept for kept in keeps)
        for reads in _per_epoch_and_rank(plan)
        for sample, _ in reads
    )
    assert shares.filled.sum(axis=0).tolist() == [len(kept) for kept in keeps]
    assert (shares.local.sum(), shares.store.sum()) == (local, store)
    assert shares.reads.sum() == sum(plan.length(epoch) for epoch in range(plan.epochs))


@settings(max_examples=40)
@given(plans(), st.integers(0, 20))
def test_ranks_that_care_for_themselves_are_asked_for_what_they_have(plan: AccessPlan, room: int) -> None:
    """A rank has a sample from the step after its read until its next read, or until it gives it up."""
    sizes = np.ones(plan.samples, np.int64)
    shares = count_min(plan, sizes, [room])

    has: list[set[tuple[int, int]]] = []  # per rank: (step, sample) in which the rank has it
    for rank in range(plan.ranks):
        kept = decide_min(plan, rank, sizes, [room])
        uses = kept.given_up.copy()
        uses[kept.tiers > 0] = np.iinfo(np.int64).max
        entries = set()
        string, steps = plan.string(rank), _steps(plan, rank)
        for read in np.flatnonzero(kept.arrives >= 0):
            for step in range(int(kept.arrives[read]) + 1, min(int(uses[read]), steps[read]) + 1):
                entries.add((step, int(string[read])))
        has.append(entries)
    step = 0
    for epoch, reads in enumerate(_per_epoch_and_rank(plan)):
        store = np.zeros(plan.ranks, np.int64)
        for position, (sample, rank) in enumerate(reads):
            now = step + position // plan.batch_size
            store[rank] += not any((now, sample) in entries for entries in has)
        assert shares.store[epoch].sum() == store.sum()
        step += plan.steps(epoch)
    assert shares.local.sum() == sum(
        int((decide_min(plan, rank, sizes, [room]).tiers > 0).sum()) for rank in range(plan.ranks)
    )


def _steps(plan: AccessPlan, rank: int) -> list[int]:
    steps, before = [], 0
    for epoch in range(plan.epochs):
        for step in range(plan.steps(epoch)):
            steps += [before + step] * plan.local_batch_size(rank, epoch, step)
        before += plan.steps(epoch)
    return steps


@settings(max_examples=50)
@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 4), st.integers(0, 120), st.integers(0, 99))
def test_no_scheme_reads_the_store_less_often_than_the_bound(
    samples: int, epochs: int, ranks: int, held: int, seed: int
) -> None:
    plan = AccessPlan(FullShuffle(samples, seed), 8, epochs, ranks)

    counted = compare_schemes(plan, held)

    bound = least_store_reads(plan, held)
    assert list(counted) == list(SCHEMES)
    for shares in counted.values():
        assert shares.store_reads.sum() >= bound
        assert shares.reads.sum() == samples * epochs
    assert counted[COVER].store_reads.sum() == counted[HASH].store_reads.sum() == bound


# The figures found independently, for 20,000 samples on 4 ranks over 50 epochs


@pytest.fixture(scope="module")
def plan() -> AccessPlan:
    return in_memory(AccessPlan(FullShuffle(20_000, 0), 128, 50, ranks=4))


@pytest.fixture(scope="module")
def counted(plan: AccessPlan) -> dict[str, ReadCounts]:
    return compare_schemes(plan, 20_000)


@pytest.mark.parametrize(
    ("scheme", "percent", "within"),
    [(FREQUENCY, 19.6, 0.5), (COVER, 2.0, 1e-9), (PUSH, 2.4, 0.1), (MIN, 22.0, 1.0), (HASH, 2.0, 1e-9)],
)
def test_the_store_is_read_as_often_as_theory_says(
    counted: dict[str, ReadCounts], scheme: str, percent: float, within: float
) -> None:
    shares = counted[scheme]

    assert 100 * shares.share(shares.store_reads) == pytest.approx(percent, abs=within)


@pytest.mark.parametrize(
    ("scheme", "percent", "within"), [(FREQUENCY, 33.0, 0.5), (PUSH, 97.6, 0.1), (HASH, 24.5, 0.3)]
)
def test_as_many_reads_are_local_as_theory_says(
    counted: dict[str, ReadCounts], scheme: str, percent: float, within: float
) -> None:
    shares = counted[scheme]

    assert 100 * shares.share(shares.local) == pytest.approx(percent, abs=within)


@pytest.mark.parametrize(
    ("scheme", "percent", "within"), [(PUSH, 73.0, 0.7), (HASH, 75.0, 0.3), (LOCAL, 6.2, 0.3)]
)
def test_as_many_samples_move_as_theory_says(
    counted: dict[str, ReadCounts], scheme: str, percent: float, within: float
) -> None:
    shares = counted[scheme]

    assert 100 * shares.share(shares.peer_reads) == pytest.approx(percent, abs=within)


def test_two_first_readers_in_three_hand_a_sample_to_its_home(counted: dict[str, ReadCounts]) -> None:
    """67 % where a home is any rank that reads it most; fewer here, where it is the first to read it of these."""
    handed = counted[COVER].handed

    assert handed[1:].sum() == 0
    assert 0.60 <= handed[0].sum() / 20_000 <= 0.67


def test_of_a_small_cache_every_scheme_makes_the_same(plan: AccessPlan) -> None:
    schemes = [shares.share(shares.store_reads) for shares in compare_schemes(plan, 8_000).values()]

    assert max(schemes) - min(schemes) < 0.02


def test_of_a_large_cache_only_the_duplicated_first_fill_remains(plan: AccessPlan) -> None:
    shares = compare_schemes(plan, 40_000, [FREQUENCY])[FREQUENCY]

    assert shares.share(shares.store) < 0.001
    assert shares.filled.sum() == 40_000


def test_local_batches_move_few_samples_on_many_ranks() -> None:
    plan = in_memory(AccessPlan(FullShuffle(2**16, 0), 256 * 32, 3, ranks=256))
    homes = place_by_hash(np.ones(2**16, np.int64), [256], 256)

    shares = count_shares(split_locally(plan, homes.rank_of), homes)

    assert shares.share(shares.peer_reads) == pytest.approx(0.070, abs=0.005)


# Sizes and errors


def test_push_counts_the_reads_of_all_ranks(plan: AccessPlan) -> None:
    shares = count_push(plan, np.full(20_000, 10), [[100_000], [0], [0], [0]])

    assert shares.local[:, 1:].sum() == 0
    assert shares.local[1:, 0].min() > 0
    assert (shares.reads.sum(axis=1) == 20_000).all()


def test_homes_of_another_plan_are_refused(plan: AccessPlan) -> None:
    with pytest.raises(ConfigError, match="place for this plan"):
        count_shares(plan, place_by_hash(np.ones(20_000, np.int64), [5], 3))


def test_an_unknown_scheme_is_told_the_known_ones(plan: AccessPlan) -> None:
    with pytest.raises(ConfigError, match=r"'best'.*'cover \+ local'"):
        compare_schemes(plan, 5, ["best"])


def test_less_than_no_samples_are_refused(plan: AccessPlan) -> None:
    with pytest.raises(ConfigError, match="samples_held is -1"):
        compare_schemes(plan, -1)


@pytest.mark.parametrize("held", [float("nan"), 2.5, -5])
def test_ranks_hold_a_whole_number_of_samples(plan: AccessPlan, held: int) -> None:
    with pytest.raises(ConfigError, match=r"samples_held is .*; ranks hold a whole number"):
        compare_schemes(plan, held)
    with pytest.raises(ConfigError, match=r"samples_held is .*; ranks hold a whole number"):
        least_store_reads(plan, held)


def test_more_room_than_all_ranks_can_use_changes_nothing() -> None:
    small = AccessPlan(FullShuffle(60, 2), 12, 3, ranks=3)

    enough, more = (compare_schemes(small, held) for held in (180, 10**40))

    for scheme in SCHEMES:
        assert more[scheme].local.tolist() == enough[scheme].local.tolist()
        assert more[scheme].store_reads.tolist() == enough[scheme].store_reads.tolist()


def test_the_bound_needs_epochs_that_read_each_sample_once() -> None:
    with pytest.raises(ConfigError, match="may repeat"):
        least_store_reads(AccessPlan(Explicit([0, 0, 1], 2), 2, 2), 1)


def test_the_bound_is_the_formula() -> None:
    assert least_store_reads(AccessPlan(Sequential(100), 10, 5), 30) == 100 + 4 * 70
