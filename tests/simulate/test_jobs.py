"""Whole jobs in virtual time: runs short enough to work out by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from tests.for_each import for_each
from tests.simulate.given import Given

from penstock.errors import ConfigError
from penstock.machine import Curve, Machine, Rate, SharedStore, StorageClass
from penstock.plan import AccessPlan, FullShuffle
from penstock.policy.loading import Fill, Job, Loading, Staging
from penstock.simulate.policies import POLICY_NAMES, policy_named
from penstock.simulate.scenario import scenario_named
from penstock.simulate.scheduled import ORIGINS, LoadingResult, simulate_job, simulate_loading

# -- By hand: every sample is 10 bytes, so that times are whole


def _machine(
    *,
    store: Curve | None = None,
    ranks: int = 1,
    threads: int = 1,
    staging: int = 10_000,
    tiers: Sequence[StorageClass] = (),
    decode: float = 10.0,
    compute: float = 10.0,
    latency: float = 0.0,
) -> Machine:
    return Machine(
        SharedStore(store or Curve.flat(10.0), latency_seconds=latency),
        (StorageClass("staging", staging, threads, Curve.flat(1e12)), *tiers),
        ranks,
        preprocess_bytes_per_second=decode,
        compute=Rate(compute),
    )


def _job(machine: Machine, samples: int = 20, batch: int = 5, epochs: int = 1) -> Job:
    plan = AccessPlan(FullShuffle(samples, 0), batch, epochs, machine.ranks)
    return Job(plan, np.full(samples, 10), machine)


def _simulate(job: Job, policy: str) -> LoadingResult:
    return simulate_job(job, policy_named(policy))


def test_without_staging_fetch_decode_and_compute_add_up() -> None:
    assert _simulate(_job(_machine()), "naive").run_seconds == pytest.approx(20 * 3)


def test_the_lower_bound_is_the_slowest_rank_of_every_step() -> None:
    job = _job(_machine(ranks=2), samples=12, batch=3, epochs=2)  # rank 0 reads two, rank 1 one of each batch

    assert _simulate(job, "lower-bound").run_seconds == pytest.approx(8 * 2)


def test_a_bandwidth_that_all_ranks_share_is_what_the_job_gets() -> None:
    # All threads of all ranks read all the time: nothing is decoded or computed to speak of.
    job = _job(_machine(ranks=4, threads=3, decode=1e9, compute=1e9), samples=2000, batch=400)

    result = _simulate(job, "staging")

    assert result.run_seconds == pytest.approx(2000 * 10 / 10, rel=0.01)


def test_latency_is_divided_among_the_threads() -> None:
    job = _job(_machine(store=Curve.flat(1e9), threads=4, decode=1e9, compute=1e9, latency=2.0), samples=40)

    assert _simulate(job, "staging").run_seconds == pytest.approx(40 / 4 * 2.0, rel=1e-3)


def _memory(capacity: int = 10_000, threads: int = 1, rate: float = 1e9) -> StorageClass:
    return StorageClass("memory", capacity, threads, Curve.flat(rate))


def test_what_lies_in_a_tier_costs_decoding_alone() -> None:
    # 20 samples are loaded at 1 s each; then each costs 1 s of decoding, and the last batch 5 * 0.1 s of computing.
    job = _job(_machine(tiers=[_memory()], compute=100.0), epochs=3)
    everything = Fill(0, 1, np.arange(20), before_training=True)

    result = simulate_job(job, Given(Loading([everything], stages_from_store=False)))

    assert result.initial_stall_seconds == pytest.approx(20)
    assert result.run_seconds == pytest.approx(20 + 60 * 1 + 5 * 0.1)
    assert result.reads[0, ORIGINS.index("staged from a tier")] == 60
    assert result.store_bytes.tolist() == [200]
    assert result.fill_reads.tolist() == [20]


@for_each("policy", ["hash-home", "cover", "cover+local", "push"])
@for_each("ranks", [1, 2, 3])
def test_where_all_fits_each_sample_is_read_from_the_store_once(policy: str, ranks: int) -> None:
    # A short staging buffer: nobody wants a sample again while its first read is still under way.
    machine = _machine(ranks=ranks, staging=40, tiers=[_memory()])
    job = _job(machine, samples=60, batch=6, epochs=4)

    result = _simulate(job, policy)

    counts = dict(zip(ORIGINS, result.reads.sum(axis=0).tolist(), strict=True))
    assert counts["staged from the store"] + counts["store"] == 60
    assert result.fill_reads.sum() == 0
    assert result.store_bytes.sum() == job.total_bytes
    assert (counts["staged from a peer"] == 0) == (policy == "push" or ranks == 1)


def test_ranks_that_keep_for_themselves_read_a_sample_once_each() -> None:
    machine = _machine(ranks=2, tiers=[_memory()], store=Curve.flat(1000.0))
    job = _job(machine, samples=30, batch=6, epochs=8)

    alone = replace(policy_named("frequency").prepare(job), stages_from_peers=False)
    result = simulate_job(job, Given(alone))

    assert result.store_bytes.sum() == sum(np.unique(string).size * 10 for string in job.strings)


def test_what_does_not_fit_the_staging_buffer_is_still_read() -> None:
    job = _job(_machine(staging=5))

    assert _simulate(job, "staging").reads[0, ORIGINS.index("staged from the store")] == 20


@for_each("policy", POLICY_NAMES)
def test_ranks_that_get_nothing_of_a_short_batch_wait_for_the_others(policy: str) -> None:
    tiers = [_memory(), StorageClass("disk", 500, 1, Curve.flat(20.0))]
    job = _job(_machine(ranks=4, tiers=tiers), samples=11, batch=3, epochs=1)

    result = _simulate(job, policy)

    assert result.reads.sum() == 11
    assert result.reads[3].sum() == 0


@for_each("policy", POLICY_NAMES)
def test_a_batch_that_all_ranks_read_whole_runs_or_says_why_not(policy: str) -> None:
    machine = _machine(ranks=2, tiers=[_memory(), StorageClass("disk", 500, 1, Curve.flat(20.0))])
    job = Job(AccessPlan(FullShuffle(12, 0), 4, 2, 2, "replicated"), np.full(12, 10), machine)

    if policy in ("cover", "cover+local", "first-reader", "push", "locality-aware"):
        # These say who reads a sample, and here all do.
        with pytest.raises(ConfigError, match="split"):
            _simulate(job, policy)
    else:
        assert _simulate(job, policy).reads.sum(axis=1).tolist() == [24, 24]


def test_shares_may_be_unequal() -> None:
    machine = _machine(ranks=2, tiers=[_memory()])
    job = Job(AccessPlan(FullShuffle(20, 0), 5, 2, 2, "imbalanced"), np.full(20, 10), machine)

    assert _simulate(job, "cover").reads.sum(axis=1).tolist() == [32, 8]


def test_a_rank_that_fetches_by_itself_may_ask_its_peers() -> None:
    machine = _machine(ranks=2, store=Curve.flat(1.0), tiers=[_memory()])
    job = _job(machine, samples=10, batch=2)
    kept = [Fill(rank, 1, np.arange(5 * rank, 5 * rank + 5), before_training=True) for rank in (0, 1)]

    result = simulate_job(job, Given(Loading(kept, stages=False)))

    assert result.reads[:, ORIGINS.index("peer")].sum() > 0
    assert result.reads[:, ORIGINS.index("store")].sum() == 0


def test_loading_before_training_waits_out_the_stores_latency() -> None:
    machine = _machine(tiers=[_memory(threads=2)], latency=3.0)
    machine = replace(machine, source=replace(machine.source, threads=2))
    fill = Fill(0, 1, np.arange(20), before_training=True)

    result = simulate_job(_job(machine), Given(Loading([fill])))

    # Reads that begin at different times do not share the wire: 3 s, then 1 s alone on it.
    assert result.initial_stall_seconds == pytest.approx(20 / 2 * (3.0 + 1.0) + 1.0)


def test_loading_before_training_keeps_as_many_reads_in_flight_as_its_threads() -> None:
    own = Curve(((1.0, 10.0), (4.0, 40.0)))
    machine = replace(_machine(tiers=[_memory(threads=4)]), source=SharedStore(None, own, threads=4))
    fill = Fill(0, 1, np.arange(20), before_training=True)

    seconds = simulate_job(_job(machine), Given(Loading([fill]))).initial_stall_seconds

    # While the last three are under way, fewer reads get less.
    assert seconds == pytest.approx(170 / 40 + 10 / 30 + 10 / 20 + 10 / 10)


# -- Decisions that cannot be carried out


@for_each(
    ("loading", "said"),
    [
        (Loading([Fill(0, 1, np.arange(20))]), "fills tier 1 of rank 0 with 200 bytes, and it holds 100"),
        (Loading([Fill(0, 2, np.arange(2))]), "fills tier 2 of rank 0, and the tiers are 1 to 1"),
        (Loading([Fill(1, 1, np.arange(2))]), "fills tier 1 of rank 1, and the ranks are 0 to 0"),
        (Loading(strings=[np.arange(3)]), "strings of other lengths"),
        (Loading(hits=[np.ones(3, np.int8)]), "hits of other lengths"),
        (Loading([Fill(0, 1, np.array([3, 20]))]), "samples are 0 to 19"),
        (Loading([Fill(0, 1, np.array([3, 3]))]), "sample 3 twice"),
        (Loading(strings=[np.full(20, -1)]), "samples are 0 to 19"),
        (Loading(hits=[np.full(20, 2, np.int8)]), "hits in tier 2"),
        (Loading([Fill(0, 1, np.array([3]))], drops=True, spares=[np.array([3])]), "sample 3 twice"),
        (Loading(drops=True, spares=[np.array([20])]), "samples are 0 to 19"),
    ],
)
def test_decisions_that_cannot_be_carried_out_are_told_apart(loading: Loading, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        simulate_job(_job(_machine(tiers=[_memory(100)])), Given(loading))


@for_each(
    ("decide", "said"),
    [
        (lambda: Fill(0, 1, np.arange(2), "hand-over", before_training=True), "hand-overs happen during it"),
        (lambda: Fill(0, 1, np.arange(2), "peers"), "copies from peers are made before"),
        (lambda: Fill(0, 1, np.arange(2), "nowhere"), "'store', 'peers' or 'hand-over'"),  # type: ignore[arg-type]
        (lambda: Fill(0, 1, [1, 2]), "samples of a Fill are a list"),  # type: ignore[arg-type]
        (lambda: Fill("0", 1, np.arange(2)), "rank of a Fill is '0'"),  # type: ignore[arg-type]
        (lambda: Fill(0, 1.0, np.arange(2)), "tier of a Fill is 1.0"),  # type: ignore[arg-type]
        (lambda: Loading(None), "fills of a Loading are a list"),  # type: ignore[arg-type]
        (lambda: Loading([(0, 1)]), "fills of a Loading are a list"),  # type: ignore[list-item]
        (lambda: Loading(strings=np.zeros((2, 3))), "strings of a Loading is a ndarray"),  # type: ignore[arg-type]
        (lambda: Loading([Fill(0, 1, np.arange(2))], hits=[np.ones(2, np.int8)]), "fills or drops"),
        (lambda: Loading(strings=[np.zeros(3)]), "strings of rank 0 are float64 of shape"),  # type: ignore[list-item]
        (
            lambda: Loading(hits=[np.ones(3, np.int8), np.zeros(3)]),  # type: ignore[list-item]
            r"hits of rank 1 are float64 of shape \(3,\); they are numbers of tiers, a NumPy array of integers",
        ),
        (lambda: Loading(hits=[np.full(3, -7, np.int8)]), "hits name tier -7"),
        (lambda: Loading(spares=[np.arange(3)]), "spares are given without drops"),
    ],
)
def test_decisions_check_themselves(decide: Callable[[], object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        decide()


def test_a_policy_that_decides_nothing_at_all_is_named() -> None:
    @dataclass
    class Forgetful:
        name: str = "forgetful"

        def prepare(self, job: Job) -> Loading:
            return None  # type: ignore[return-value]

    with pytest.raises(ConfigError, match="policy 'forgetful' prepared a NoneType"):
        simulate_job(_job(_machine()), Forgetful())


def test_a_job_is_of_one_number_of_ranks_and_one_of_samples() -> None:
    job = _job(_machine())

    with pytest.raises(ConfigError, match=r"machine\.ranks is 2, and the plan's is 1"):
        Job(job.plan, job.sizes_bytes, replace(job.machine, ranks=2))
    with pytest.raises(ConfigError):
        Job(job.plan, job.sizes_bytes[:-1], job.machine)
    with pytest.raises(ConfigError):
        Job(job.plan, np.full(job.plan.samples, -1), job.machine)


def test_what_is_handed_on_pays_for_the_link_between_ranks() -> None:
    """Where the link is slower than the share of the store, a sample that is late is read from the store instead."""
    fast = scenario_named("scenario1")
    slow = replace(fast, machine=replace(fast.machine, network_bytes_per_second=3e6))

    at_once, late = (simulate_loading(scenario, policy_named("push")) for scenario in (fast, slow))

    assert at_once.store_bytes.sum() == fast.sizes_bytes().sum()
    assert late.store_bytes.sum() > 2 * at_once.store_bytes.sum()
    assert late.run_seconds > 1.5 * at_once.run_seconds


def test_a_sample_that_its_rank_reads_no_more_is_not_brought_in() -> None:
    """With cleanup every spare would be read for nothing in a run of one epoch."""
    scenario = replace(scenario_named("scenario1"), epochs=1)
    machine = scenario.machine
    memory = replace(machine.storage[1], capacity_bytes=5_000_000)
    job = Job(scenario.plan(), scenario.sizes_bytes(), replace(machine, storage=(machine.storage[0], memory)))

    result = simulate_job(job, policy_named("frequency-cleanup"))

    assert result.store_bytes.sum() <= 1.03 * job.total_bytes


def test_a_rank_keeps_as_many_reads_under_way_as_its_store_rewards() -> None:
    patient = _machine(latency=1.0, decode=1e9, compute=1e9)
    rewarded = replace(patient, source=replace(patient.source, threads=8))

    few, many = (simulate_job(_job(machine), Staging()) for machine in (patient, rewarded))

    assert many.run_seconds < 0.6 * few.run_seconds


def test_a_machine_whose_training_speed_is_unknown_is_refused() -> None:
    job = _job(replace(_machine(), compute=None))

    with pytest.raises(ConfigError, match="compute is unknown"):
        simulate_job(job, Staging())
