"""Whole jobs by the loaders' schedulers: what ranks read from each other, hand over, load before, and ask for late.

Unless said otherwise a sample has 10 bytes, the store and each link give 10 bytes/s, and decoding and computing take no
time to speak of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.for_each import for_each

from penstock.machine import Curve, Machine, Rate, SharedStore, StorageClass
from penstock.plan import AccessPlan, Explicit, FullShuffle
from penstock.policy.loading import Fill, Job, Loading
from penstock.policy.push import decide_push
from penstock.simulate.policies import policy_named
from penstock.simulate.scheduled import ORIGINS, run_job, simulate_job

QUICK = Curve.flat(1e12)


def _machine(
    ranks: int = 2,
    *,
    store: float = 10.0,
    link: float = 10.0,
    staging: int = 10_000,
    threads: int = 1,
    latency: float = 0.0,
    tiers: Sequence[StorageClass] = (StorageClass("memory", 10_000, 1, QUICK),),
) -> Machine:
    return Machine(
        SharedStore(Curve.flat(store), latency_seconds=latency, threads=threads),
        (StorageClass("staging", staging, 1, QUICK), *tiers),
        ranks,
        network_bytes_per_second=link,
        preprocess_bytes_per_second=1e12,
        compute=Rate(1e12),
    )


def _job(machine: Machine, batches: list[list[int]], epochs: int = 1) -> Job:
    """Batches of all ranks, one after the other: rank r reads the r-th part of each."""
    ids = np.concatenate([np.array(batch) for batch in batches])
    plan = AccessPlan(
        Explicit(lambda _epoch: ids, int(ids.max()) + 1), len(batches[0]), epochs, ranks=machine.ranks
    )
    return Job(plan, np.full(plan.samples, 10), machine)


def _before(*of_ranks: list[int]) -> list[Fill]:
    return [Fill(rank, 1, np.array(ids, np.int64), before_training=True) for rank, ids in enumerate(of_ranks)]


def _ends(job: Job, loading: Loading) -> list[float]:
    run = run_job(job, loading)
    ends: list[float] = (run.step_end_seconds - run.begin_seconds).tolist()
    return ends


def test_what_another_rank_keeps_goes_over_that_ranks_link() -> None:
    """Rank 0 has all, loaded in 40 s, while rank 1 has none; rank 1's two samples take 1 s each over rank 0's link."""
    job = _job(_machine(store=1.0), [[0, 1], [2, 3]])
    fills = _before([0, 1, 2, 3])

    alone = run_job(job, Loading(fills, stages_from_peers=False))
    shared = run_job(job, Loading(fills, stages_from_peers=True))

    assert shared.begin_seconds == alone.begin_seconds == pytest.approx(40.0)
    assert shared.reads.tolist() == [[0, 2, 0], [0, 0, 2]]
    assert alone.reads.tolist() == [[0, 2, 0], [2, 0, 0]]
    assert (shared.step_end_seconds - 40.0).tolist() == pytest.approx([1.0, 2.0])
    assert alone.step_end_seconds[-1] - 40.0 == pytest.approx(20.0)
    assert shared.store_bytes.tolist() == [40.0, 0.0]


def test_ranks_that_read_from_one_share_its_link() -> None:
    """Ranks 1 and 2 want two samples each of rank 0: the second of each pair waits for the first."""
    job = _job(_machine(3, store=0.01), [[0, 1, 2], [0, 3, 4]])

    assert _ends(job, Loading(_before([0, 1, 2, 3, 4]), stages_from_peers=True)) == pytest.approx([2.0, 4.0])


def test_a_tier_of_another_rank_is_read_and_then_sent() -> None:
    """A disk of 20 bytes/s and 3 s, which its own rank reads first: 4 s until the sample is on the link, 1 s there."""
    disk = StorageClass("disk", 10_000, 1, Curve.flat(20.0), latency_seconds=3.0)
    job = _job(_machine(store=0.01, tiers=[disk]), [[0, 1]])

    assert _ends(job, Loading(_before([0, 1]), stages_from_peers=True)) == pytest.approx([5.0])


def test_where_the_store_is_quicker_than_a_link_the_store_is_read() -> None:
    job = _job(_machine(store=1_000.0), [[0, 1], [2, 3]])

    run = run_job(job, Loading(_before([0, 1, 2, 3]), stages_from_peers=True))

    assert run.reads.tolist() == [[0, 2, 0], [2, 0, 0]]


def test_a_sample_that_another_rank_has_got_by_now_is_read_from_it() -> None:
    """All batches are staged at once, before anybody has anything; still the second half comes from the other rank."""
    job = _job(_machine(store=1.0, link=1e9), [[0, 1], [2, 3], [4, 5], [1, 0], [3, 2], [5, 4]])
    kept = [Fill(rank, 1, np.array([rank, rank + 2, rank + 4])) for rank in (0, 1)]

    run = run_job(job, Loading(kept, stages_from_peers=True))

    assert run.reads[:, 2].min() >= 2


def test_each_rank_begins_with_the_one_behind_it_where_many_keep_a_sample() -> None:
    """Four keep it and four want it: 4 s over one link where the keepers come first, 1 s where they alternate."""
    job = _job(_machine(8, store=0.01), [[0, 1, 2, 3, 4, 4, 4, 4]])
    fills = [Fill(rank, 1, np.array([rank, 4]), before_training=True) for rank in range(4)]

    # Rank 4 asks rank 0 (the next one, around the end), and so do 5, 6 and 7.
    assert _ends(job, Loading(fills, stages_from_peers=True)) == pytest.approx([4.0])
    between = [replace(fill, rank=2 * fill.rank + 1) for fill in fills]
    job = _job(_machine(8, store=0.01), [[4, 0, 4, 1, 4, 2, 4, 3]])
    assert _ends(job, Loading(between, stages_from_peers=True)) == pytest.approx([1.0])


# -- Hand-overs


def test_who_reads_a_sample_first_hands_it_to_its_home() -> None:
    """Each rank reads in the first epoch what the other keeps: afterwards nobody needs the store."""
    machine = replace(_machine(link=1e9, staging=40, threads=4), compute=Rate(10.0))
    job = _job(machine, [[0, 1], [2, 3], [4, 5], [1, 0], [3, 2]])
    homes = [Fill(0, 1, np.array([1, 3]), "hand-over"), Fill(1, 1, np.array([0, 2]), "hand-over")]

    run = run_job(job, Loading(homes, stages_from_peers=True))

    assert run.reads.tolist() == [[3, 2, 0], [3, 2, 0]]
    assert run.store_bytes.tolist() == [30.0, 30.0]
    assert run.fill_reads.tolist() == [0, 0]


def test_a_hand_over_takes_its_time_on_the_link() -> None:
    """At 0.1 byte/s a sample arrives 100 s after it was read, too late for the last step: that reads the store."""
    batches = [[0, 1], [2, 3], [4, 5], [1, 0]]
    homes = [Fill(0, 1, np.array([1]), "hand-over"), Fill(1, 1, np.array([0]), "hand-over")]

    for link, from_store in ((0.1, 4), (1e9, 3)):
        machine = replace(_machine(link=link, staging=20, threads=4), compute=Rate(10.0))
        run = run_job(_job(machine, batches), Loading(homes, stages_from_peers=True))

        assert run.reads[:, 0].tolist() == [from_store] * 2, link


def test_its_home_keeps_what_it_reads_first_by_itself() -> None:
    job = _job(_machine(staging=40), [[0, 1], [2, 3], [0, 1], [2, 3]])
    homes = [Fill(0, 1, np.array([0, 2]), "hand-over"), Fill(1, 1, np.array([1, 3]), "hand-over")]

    run = run_job(job, Loading(homes, stages_from_peers=True))

    assert run.reads.tolist() == [[2, 2, 0], [2, 2, 0]]


# -- Samples that go from reader to reader


@pytest.mark.parametrize("ranks", [1, 3])
def test_what_is_handed_on_is_found_where_the_policy_says(ranks: int) -> None:
    tiers = [StorageClass("memory", 200, 1, QUICK)]
    machine = _machine(ranks, store=1e3, link=1e9, staging=400 // ranks, threads=4, tiers=tiers)
    job = Job(AccessPlan(FullShuffle(120, 3), 6, 4, ranks), np.full(120, 10), replace(machine, ranks=ranks))
    hits = [decide_push(job.plan, rank, job.sizes_bytes, [200]).tiers for rank in range(ranks)]

    result = simulate_job(job, policy_named("push"))

    found = np.array([(each > 0).sum() for each in hits])
    assert result.reads[:, 1].tolist() == pytest.approx(found.tolist(), rel=0.05)


def test_what_comes_too_late_is_read_from_the_store() -> None:
    """Its reader waits as long as a read of the store takes, 10 s, and then reads it there, instead of 1,000 s."""
    job = _job(_machine(store=1.0, link=0.01, threads=4), [[0, 1], [1, 0]])
    hits = [np.array([-1, 1], np.int8)] * 2

    run = run_job(job, Loading(hits=hits))

    assert run.reads[:, 0].tolist() == [2, 2]
    assert 20 + 10 + 20 <= run.step_end_seconds[-1] <= 20 + 10 + 20 + 10.1


@for_each(
    ("policy", "tier", "peer", "store"),
    [
        ("hash-home", 0.225, 0.675, 0.1),
        ("cover", 0.366, 0.534, 0.1),
        ("cover+local", 0.84, 0.06, 0.1),
        ("push", 0.87, 0.0, 0.13),
    ],
)
def test_reads_come_from_where_theory_says(policy: str, tier: float, peer: float, store: float) -> None:
    """Four ranks hold the data set once for ten epochs: a quarter of a hash's homes is one's own."""
    memory = StorageClass("memory", 1_000, 1, QUICK)
    machine = _machine(4, store=1e3, link=1e9, staging=400, threads=4, tiers=[memory])
    job = Job(
        AccessPlan(FullShuffle(400, 1), 80, 10, 4), np.full(400, 10), replace(machine, compute=Rate(50.0))
    )

    reads = simulate_job(job, policy_named(policy)).reads.sum(axis=0)

    shares = dict(zip(ORIGINS, (reads / reads.sum()).tolist(), strict=True))
    found = [
        shares[name] + shares[f"staged from {of}"] for name, of in (("tier", "a tier"), ("peer", "a peer"))
    ]
    assert found == pytest.approx([tier, peer], abs=0.03)
    assert 1 - sum(found) == pytest.approx(store, abs=0.03)


# -- Before the training, and on demand


def test_before_the_training_copies_from_peers_follow_what_is_read_from_the_store() -> None:
    """Each rank reads one sample, at half of the store's rate: 2 s. Then each gets the other's: 0.1 s."""
    job = _job(_machine(link=100.0), [[0, 1]])
    copies = [Fill(rank, 1, np.array([1 - rank]), "peers", before_training=True) for rank in (0, 1)]

    run = run_job(job, Loading([*_before([0], [1]), *copies], stages_from_store=False))

    assert run.begin_seconds == pytest.approx(2.1)
    assert run.store_bytes.tolist() == [10.0, 10.0]
    assert run.reads[:, 1].tolist() == [1, 1]


def test_what_nobody_keeps_is_read_ahead_only_where_the_policy_lets_it() -> None:
    """A step computes for 2 s and reads for 1 s: ahead of it nothing is waited for but what the first steps share."""
    machine = replace(_machine(1, staging=10_000), compute=Rate(5.0))
    job = _job(machine, [[0], [1], [2], [3]])

    ahead, on_demand, naive = (
        run_job(job, loading).step_stall_seconds.sum()
        for loading in (Loading(), Loading(stages_from_store=False), Loading(stages=False))
    )

    assert ahead == pytest.approx(2.0)
    assert on_demand == naive == pytest.approx(4.0)


def test_what_a_tier_has_is_read_there_where_the_store_is_read_on_demand_alone() -> None:
    """However slow the disk is: the policy trains on what was brought there."""
    disk = StorageClass("disk", 10_000, 1, Curve.flat(1.0))
    job = _job(_machine(1, store=1e6, tiers=[disk]), [[0], [1], [2]])
    fills = _before([0, 1, 2])

    on_demand, free = (run_job(job, Loading(fills, stages_from_store=ahead)).reads for ahead in (False, True))

    assert on_demand.tolist() == [[0, 3, 0]]
    assert free.tolist() == [[3, 0, 0]]


def test_a_tier_on_a_disk_is_full_before_the_training_once_all_is_written() -> None:
    """Ten samples, of which each takes 1 s to read and 4 s to write, behind the readers."""
    disk = StorageClass("disk", 100, 1, Curve.flat(1e9), Curve.flat(2.5), latency_seconds=1e-6)
    job = _job(_machine(1, tiers=[disk]), [[sample] for sample in range(10)])

    run = run_job(job, Loading(_before(list(range(10)))))

    assert run.begin_seconds == pytest.approx(1.0 + 10 * 4.0, rel=1e-3)


def test_a_disk_that_is_slow_to_write_makes_no_batch_wait() -> None:
    """What a batch reads is written beside; fills have half of the readers."""
    disk = StorageClass("disk", 10_000, 1, Curve.flat(1e6), Curve.flat(0.1))
    machine = replace(_machine(1, threads=4, tiers=[disk]), compute=Rate(10.0))
    job = _job(machine, [[sample] for sample in range(20)])

    with_disk = _ends(job, Loading([Fill(0, 1, np.arange(20))]))
    without = _ends(job, Loading())

    assert with_disk[-1] <= without[-1] + 1.0


def test_what_is_read_no_more_makes_space_for_spares() -> None:
    """A tier of two samples: 0 and 1 are kept first, each read twice; then 2 and 3 take their places."""
    tier = StorageClass("memory", 20, 1, QUICK)
    order: list[int] = [0, 1, 0, 1, 4, 5, 6, 7, 8, 9, 10, 11, 2, 3, 2, 3]
    machine = replace(_machine(1, staging=20, tiers=[tier], threads=2), compute=Rate(1.0))
    job = _job(machine, [[sample] for sample in order])
    spares: list[NDArray[np.int64]] = [np.array([2, 3])]

    run = run_job(job, Loading([Fill(0, 1, np.array([0, 1]))], drops=True, spares=spares))
    without = run_job(job, Loading([Fill(0, 1, np.array([0, 1]))]))

    assert without.reads.tolist() == [[14, 2, 0]]
    assert run.reads.tolist() == [[10, 6, 0]]
    assert run.fill_reads.tolist() == [without.fill_reads[0] + 2]


def test_promised_samples_are_waited_for_across_the_end_of_an_epoch() -> None:
    """Two ranks stage so far ahead that they want samples of the next epoch which the other has not read yet."""
    plan = AccessPlan(FullShuffle(60, 1), 6, 3, 2)
    job = Job(plan, np.full(60, 10), replace(_machine(link=1e9, threads=2), compute=Rate(100.0)))

    result = simulate_job(job, policy_named("first-reader"))

    assert result.store_bytes.sum() == 600
    assert result.reads[:, 2].sum() > 30
    assert simulate_job(job, policy_named("frequency")).store_bytes.sum() > 600


def test_a_tier_to_which_the_policy_gives_nothing_gets_no_spares_either() -> None:
    """Samples 0 and 1 are read to the end, so that they make no space; the second tier is left empty."""
    tiers = [StorageClass("memory", 20, 1, QUICK), StorageClass("left empty", 20, 1, QUICK)]
    job = _job(_machine(1, staging=20, tiers=tiers), [[sample] for sample in (0, 1, 2, 3, 4, 2, 0, 1)])
    kept = Fill(0, 1, np.array([0, 1]))

    run = run_job(job, Loading([kept], drops=True, spares=[np.array([2])]))

    assert run.reads.tolist() == run_job(job, Loading([kept])).reads.tolist() == [[6, 2, 0]]
