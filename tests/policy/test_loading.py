"""What each loading policy decides, against its source in plain words."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from itertools import chain
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.for_each import for_each

from penstock.errors import ConfigError
from penstock.machine import Curve, Machine, Rate, SharedStore, StorageClass
from penstock.plan import AccessPlan, FullShuffle
from penstock.policy.loading import (
    DeepIO,
    Fill,
    Frequency,
    Job,
    LbannStore,
    Loading,
    LoadingPolicy,
    LocalityAware,
    NotSupported,
    OneHome,
    ParallelStaging,
    Push,
)
from penstock.simulate.policies import POLICY_NAMES, policy_named
from penstock.simulate.scenario import scenario_named
from penstock.trace.schema import SOURCE


def _job(
    samples: int = 24,
    capacities: tuple[int, ...] = (100, 100),
    *,
    ranks: int = 4,
    batch: int = 8,
    epochs: int = 6,
    sizes: list[int] | None = None,
    seed: int = 1,
) -> Job:
    rate = Curve.flat(10.0)
    classes = [
        StorageClass(f"class {number}", size, 1, rate) for number, size in enumerate((50, *capacities))
    ]
    machine = Machine(SharedStore(rate), tuple(classes), ranks, compute=Rate(10.0))
    plan = AccessPlan(FullShuffle(samples, seed), batch, epochs, ranks)
    return Job(plan, np.array(sizes or [10] * samples, np.int64), machine, seed)


def _by_rank(loading: Loading) -> dict[tuple[int, int], list[int]]:
    """Samples by (rank, tier), in filling order."""
    kept: dict[tuple[int, int], list[int]] = {}
    for fill in loading.fills:
        kept.setdefault((fill.rank, fill.tier), []).extend(fill.samples.tolist())
    return kept


# -- All of them


@for_each("name", POLICY_NAMES)
@for_each("capacities", [(), (100,), (1, 1)])
def test_a_machine_without_the_tiers_is_served_or_told_which_is_missing(
    name: str, capacities: tuple[int, ...]
) -> None:
    needed = {
        "deepio": 1,
        "deepio-opportunistic": 1,
        "lbann-dynamic": 1,
        "lbann-preloading": 1,
        "parallel-staging": 2,
    }
    policy = policy_named(name)

    if needed.get(name, 0) > len(capacities):
        with pytest.raises(NotSupported, match=f"{name} keeps samples in storage class {needed[name]}"):
            policy.prepare(_job(capacities=capacities))
    elif capacities == (1, 1) and name in ("lbann-dynamic", "lbann-preloading", "parallel-staging"):
        with pytest.raises(NotSupported, match=r"which hold 4 bytes|holds no sample"):
            policy.prepare(_job(capacities=capacities))
    else:
        kept = _by_rank(policy.prepare(_job(capacities=capacities)))
        assert capacities == (100,) or not any(kept.values())


@for_each("name", ["frequency", "frequency-cleanup", "hash-home", "cover", "push"])
@for_each(
    ("tier", "rate", "latency_seconds", "threads", "share"),
    [
        # A sample of 10 bytes: each of four ranks that share 10 bytes/s waits 4 s for it.
        ("ssd", 2.6, 0.0, 1, 1.04),
        ("ssd", 2.4, 0.0, 1, 0.96),
        ("ssd", 1.1, 0.0, 1, 0.44),
        ("ssd", 0.9, 0.0, 1, 0.36),
        ("ssd", 10.0, 3.1, 1, 4 / 4.1),
        ("ssd", 10.0, 9.1, 1, 4 / 10.1),
        ("ssd", 10.0, 12.0, 4, 4 / 3.25),  # four at once
        ("far", 0.9, 1e-9, 1, 0.36),
        ("near", 0.9, 0.0, 1, inf),
    ],
)
def test_a_tier_that_is_slow_beside_the_store_is_left_empty(
    name: str, tier: str, rate: float, latency_seconds: float, threads: int, share: float
) -> None:
    job = _job(capacities=(30,))
    slow = StorageClass(tier, 60, 1, Curve.flat(rate), latency_seconds=latency_seconds)
    source = replace(job.machine.source, threads=threads)
    machine = replace(job.machine, source=source, storage=(*job.machine.storage, slow))

    loading = policy_named(name).prepare(Job(job.plan, job.sizes_bytes, machine))

    tiers = {fill.tier for fill in loading.fills} | {
        int(tier) for hits in loading.hits or () for tier in hits
    }
    assert tiers - {SOURCE} == ({1, 2} if share >= (1.0 if name == "push" else 0.4) else {1})


# -- DeepIO


def test_deepio_shares_the_data_set_out_where_it_fits() -> None:
    assert _by_rank(DeepIO().prepare(_job())) == {
        (rank, 1): list(range(6 * rank, 6 * rank + 6)) for rank in range(4)
    }


def test_deepio_goes_on_where_the_rank_before_was_full() -> None:
    # Four samples each, and the rest of the data set nowhere.
    kept = _by_rank(DeepIO().prepare(_job(capacities=(49,))))

    assert kept == {(rank, 1): list(range(4 * rank, 4 * rank + 4)) for rank in range(4)}


def test_deepio_fills_up_where_an_equal_part_overfills_a_tier_though_all_fits() -> None:
    kept = _by_rank(DeepIO().prepare(_job(4, (35,), ranks=2, sizes=[20, 20, 10, 20])))

    assert kept == {(0, 1): [0], (1, 1): [1, 2]}


def test_deepio_opportunistic_reads_what_it_or_the_rank_before_holds() -> None:
    job = _job(4000, (100_000,), batch=400, epochs=10)
    strings = DeepIO(opportunistic=True).prepare(job).strings

    assert strings is not None
    assert set((strings[0] // 1000).tolist()) == {0}
    for rank in (1, 2, 3):
        holders = Counter((strings[rank] // 1000).tolist())
        assert set(holders) == {rank - 1, rank}
        # With probability 1/3 its own: 10,000 draws, five standard deviations.
        assert holders[rank] / strings[rank].size == pytest.approx(1 / 3, abs=5 * (2 / 9 / 10_000) ** 0.5)
    # Uniform over what is held: 1,000 ids, each tenth of them as often as another.
    tenths = np.bincount(strings[0] // 100, minlength=10)
    assert tenths.tolist() == pytest.approx([1000] * 10, abs=5 * 30)


@pytest.mark.parametrize("ranks", [1, 2])
def test_deepio_opportunistic_on_one_or_two_ranks_reads_its_own_alone(ranks: int) -> None:
    strings = DeepIO(opportunistic=True).prepare(_job(ranks=ranks, capacities=(1000,))).strings

    assert strings is not None
    share = 24 // ranks
    assert [set((string // share).tolist()) for string in strings] == [{rank} for rank in range(ranks)]


def test_deepio_opportunistic_keeps_the_plans_sample_where_nothing_is_held() -> None:
    job = _job(3, (100,), ranks=4, batch=3)  # three samples on four ranks: the last holds all

    strings = DeepIO(opportunistic=True).prepare(job).strings

    assert strings is not None
    assert strings[0].tolist() == job.strings[0].tolist()


# -- Parallel staging


def test_parallel_staging_takes_its_part_and_then_what_follows_it() -> None:
    loading = ParallelStaging().prepare(_job())

    assert all(fill.before_training for fill in loading.fills)
    assert [fill.origin for fill in loading.fills] == ["store", "peers"] * 4
    kept = _by_rank(loading)
    assert kept[0, 2] == list(range(10))
    assert kept[3, 2] == [*range(18, 24), *range(4)]  # around the end
    assert loading.strings is not None
    assert all(set(string.tolist()) <= set(kept[rank, 2]) for rank, string in enumerate(loading.strings))
    assert not loading.stages_from_store


def test_parallel_staging_draws_uniformly_with_replacement() -> None:
    job = _job(40, (1, 10_000), batch=40, epochs=1000)

    strings = ParallelStaging().prepare(job).strings

    assert strings is not None
    counts = np.bincount(strings[1], minlength=40)
    assert counts.sum() == 10_000
    assert counts.tolist() == pytest.approx([250] * 40, abs=5 * 16)
    assert max(Counter(strings[1][:10].tolist()).values()) > 1 or np.unique(strings[1][:20]).size < 20


# -- LBANN


def test_lbann_refuses_what_all_memory_together_cannot_hold() -> None:
    for policy in (LbannStore(), LbannStore(preloading=True)):
        with pytest.raises(NotSupported, match=r"240 bytes.*which hold 236 bytes"):
            policy.prepare(_job(capacities=(59,)))
        policy.prepare(_job(capacities=(60,)))


def test_lbann_dynamic_keeps_what_each_rank_reads_first() -> None:
    job = _job()
    loading = LbannStore().prepare(job)

    for fill in loading.fills:
        assert fill.samples.tolist() == job.strings[fill.rank][:6].tolist()
        assert fill.origin == "hand-over"
        assert not fill.before_training
    # In the first epoch every sample has one reader, so that all are kept once.
    assert sorted(chain(*_by_rank(loading).values())) == list(range(24))


def test_lbann_preloading_shares_the_ids_out() -> None:
    loading = LbannStore(preloading=True).prepare(_job())

    assert _by_rank(loading) == {(rank, 1): list(range(6 * rank, 6 * rank + 6)) for rank in range(4)}
    assert all(fill.before_training for fill in loading.fills)


def test_lbann_leaves_out_what_unequal_sizes_push_out_of_a_tier() -> None:
    loading = LbannStore(preloading=True).prepare(_job(4, (35,), ranks=2, sizes=[20, 20, 10, 20]))

    assert _by_rank(loading) == {(0, 1): [0], (1, 1): [2, 3]}


# -- Frequency (HDMLP)


@settings(max_examples=60)
@given(st.integers(0, 999), st.integers(1, 20), st.integers(1, 4), st.integers(10, 150), st.integers(10, 150))
def test_frequency_keeps_what_is_read_most_in_the_fastest_tiers(
    seed: int, samples: int, ranks: int, first: int, second: int
) -> None:
    job = _job(samples, (first, second), ranks=ranks, seed=seed)
    kept = _by_rank(Frequency().prepare(job))

    for rank, string in enumerate(job.strings):
        reads = Counter(string.tolist())
        by_use = sorted(reads, key=lambda sample: (-reads[sample], sample))
        for tier, space in ((1, first // 10), (2, second // 10)):
            chosen, by_use = by_use[:space], by_use[space:]
            assert kept.get((rank, tier), []) == sorted(chosen, key=string.tolist().index)


def test_frequency_in_order_of_use_or_of_frequency() -> None:
    job = _job()
    in_order, by_use = (_by_rank(Frequency(in_order=each).prepare(job)) for each in (True, False))

    assert {key: sorted(kept) for key, kept in in_order.items()} == {
        key: sorted(kept) for key, kept in by_use.items()
    }
    counts = Counter(job.strings[0].tolist())
    uses = [counts[sample] for sample in by_use[0, 1]]
    assert uses == sorted(uses, reverse=True)
    assert in_order != by_use


def test_cleanup_lists_what_follows_by_frequency() -> None:
    job = _job(capacities=(50,))
    plain, cleanup = Frequency().prepare(job), Frequency(cleanup_read=True).prepare(job)

    assert plain.spares is None
    assert not plain.drops
    assert cleanup.drops
    assert cleanup.spares is not None
    counts = Counter(job.strings[0].tolist())
    listed = sorted(counts, key=lambda sample: (-counts[sample], sample))
    assert cleanup.spares[0].tolist() == listed[5:]


# -- Locality-aware


def test_locality_aware_fills_the_fastest_tier_first_and_reads_what_it_holds() -> None:
    job = _job(capacities=(40, 40))
    loading = LocalityAware().prepare(job)

    assert _by_rank(loading)[1, 1] == list(range(6, 10))
    assert _by_rank(loading)[1, 2] == [10, 11]
    assert all(fill.before_training for fill in loading.fills)
    assert loading.strings is not None
    own = sum(int((string // 6 == rank).sum()) for rank, string in enumerate(loading.strings))
    before = sum(int((string // 6 == rank).sum()) for rank, string in enumerate(job.strings))
    assert own > 2 * before
    # The global batches are what they were.
    for step in range(job.plan.steps(0)):
        planned = {int(sample) for string in job.strings for sample in string[2 * step : 2 * step + 2]}
        assert {
            int(sample) for string in loading.strings for sample in string[2 * step : 2 * step + 2]
        } == planned


# -- Agreed homes, push


@pytest.mark.parametrize("by", ["hash", "cover"])
def test_one_home_each_where_all_fits_just_so(by: str) -> None:
    loading = OneHome("hash" if by == "hash" else "cover").prepare(_job(capacities=(60,)))

    kept = _by_rank(loading)
    assert sorted(chain(*kept.values())) == list(range(24))
    assert {fill.origin for fill in loading.fills} == {"hand-over"}
    assert loading.strings is None


def test_a_split_by_what_is_held_reads_more_of_it() -> None:
    job = _job(64, (160,), batch=32)
    loading = OneHome(reads_locally=True).prepare(job)

    home = {sample: rank for (rank, _), kept in _by_rank(loading).items() for sample in kept}
    assert loading.strings is not None

    def held(strings: list[np.ndarray]) -> int:
        return sum(home[int(sample)] == rank for rank, string in enumerate(strings) for sample in string)

    assert held(loading.strings) > 1.5 * held(job.strings)


def test_push_finds_every_sample_but_the_first_time_where_all_fits() -> None:
    job = _job(capacities=(1000,))
    loading = Push().prepare(job)

    assert loading.hits is not None
    assert not loading.fills
    assert sum(int((hits < 0).sum()) for hits in loading.hits) == 24


@for_each("policy", [OneHome("hash"), OneHome(), OneHome(reads_locally=True), Push()])
def test_without_tiers_all_is_staged_from_the_store(policy: LoadingPolicy) -> None:
    assert policy.prepare(_job(capacities=())) == Loading()


# -- Jobs


@settings(max_examples=50)
@given(st.integers(1, 30), st.integers(1, 5), st.integers(1, 9), st.integers(1, 12), st.booleans())
def test_a_jobs_strings_are_the_plans(
    samples: int, ranks: int, batch: int, epochs: int, drop_last: bool
) -> None:
    job = _job(samples, ranks=ranks)
    job.plan = AccessPlan(FullShuffle(samples, 5), batch, epochs, ranks, drop_last=drop_last)

    assert [string.tolist() for string in job.strings] == [
        job.plan.string(rank).tolist() for rank in range(ranks)
    ]


@for_each("name", POLICY_NAMES)
@for_each("ranks", [1, 2])
def test_one_epoch_on_one_or_two_ranks_is_decided(name: str, ranks: int) -> None:
    job = _job(12, (1000, 1000), ranks=ranks, epochs=1)
    loading = policy_named(name).prepare(job)

    assert all(isinstance(fill, Fill) for fill in loading.fills)
    assert sum(string.size for string in loading.strings or job.strings) == 12


def test_an_unknown_name_lists_the_known_ones_and_guesses() -> None:
    with pytest.raises(ConfigError, match=r"'frequency' is meant.*Known are lower-bound, naive"):
        policy_named("freqency")


def test_names_are_of_policies_with_their_options() -> None:
    assert policy_named("frequency-cleanup") == Frequency(cleanup_read=True)
    assert policy_named("frequency-unordered") == Frequency(in_order=False)
    assert policy_named("lbann-preloading") == LbannStore(preloading=True)
    assert policy_named("cover+local") == OneHome(reads_locally=True)


@for_each("name", ["cover", "cover+local", "push", "locality-aware"])
def test_agreements_on_who_reads_what_are_not_for_batches_that_all_ranks_read(name: str) -> None:
    scenario = replace(scenario_named("scenario1"), split="replicated", epochs=1)
    job = Job(scenario.plan(), scenario.sizes_bytes(), scenario.machine)

    with pytest.raises(NotSupported, match=f"^{re.escape(name)}: "):
        policy_named(name).prepare(job)
