"""What every loading policy must do; a new one is added to `POLICIES`."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.machine import Curve, Machine, Rate, SharedStore, StorageClass
from penstock.papers import thesis_policies
from penstock.plan import AccessPlan, FullShuffle
from penstock.policy.loading import Fill, Job, Loading, LoadingPolicy, NotSupported
from penstock.policy.runnable import placement_of
from penstock.simulate.policies import POLICY_NAMES, is_policy, policy_named
from penstock.trace.schema import SOURCE


class LastFirst:
    """A user's own: each rank keeps the largest ids that fit into its first tier."""

    name = "last-first"

    def prepare(self, job: Job) -> Loading:
        ids = np.arange(job.plan.samples)[::-1]
        count = int(np.searchsorted(np.cumsum(job.sizes_bytes[ids]), job.tier(1, self.name), side="right"))
        return Loading([Fill(rank, 1, ids[:count]) for rank in job.asking])


POLICIES: dict[str, LoadingPolicy] = {
    **{name: policy_named(name) for name in POLICY_NAMES},
    **{
        f"{policy.name}, as published": policy
        for policy in thesis_policies.POLICIES
        if policy != policy_named(policy.name)
    },
    "a user's own": LastFirst(),
}


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    samples, ranks, epochs = draw(st.integers(1, 20)), draw(st.integers(1, 5)), draw(st.integers(1, 6))
    sizes = draw(st.lists(st.integers(1, 30), min_size=samples, max_size=samples))
    capacities = draw(st.lists(st.integers(1, 120), min_size=2, max_size=2))
    rate = Curve.flat(10.0)
    classes = (StorageClass(f"class {n}", size, 1, rate) for n, size in enumerate((50, *capacities)))
    machine = Machine(SharedStore(rate), tuple(classes), ranks, compute=Rate(10.0))
    plan = AccessPlan(FullShuffle(samples, 1), draw(st.integers(1, 9)), epochs, ranks)
    return Job(plan, np.array(sizes, np.int64), machine, seed=1)


def for_rank(job: Job, rank: int) -> Job:
    """The same job, as one rank asks in a run."""
    return Job(job.plan, job.sizes_bytes, job.machine, job.seed, rank)


def check_names(policy: LoadingPolicy, error: ConfigError) -> None:
    assert policy.name in str(error)


def answer(policy: LoadingPolicy, job: Job) -> Loading | None:
    """What it decides; None where it cannot run the job."""
    try:
        return policy.prepare(job)
    except NotSupported as error:
        check_names(policy, error)
        return None


def fills_of(loading: Loading | None, rank: int) -> list[tuple[int, str, bool, list[int]]]:
    fills = loading.fills if loading is not None else ()
    return [
        (fill.tier, fill.origin, fill.before_training, fill.samples.tolist())
        for fill in fills
        if fill.rank == rank and fill.samples.size
    ]


def test_all_are_known_for_policies() -> None:
    assert all(is_policy(policy) and policy.name for policy in POLICIES.values())


@settings(max_examples=64)
@given(job=jobs(), which=st.integers(0, 4))
def test_each_decides_what_can_be_done_and_each_rank_alone_decides_the_same(job: Job, which: int) -> None:
    rank = which % job.ranks
    for name, policy in POLICIES.items():
        try:
            loading = answer(policy, job)
            if loading is not None:
                check_kept(loading, job)
                check_strings(loading, job)
            check_same(loading, answer(policy, job), job)
            assert fills_of(answer(policy, for_rank(job, rank)), rank) == fills_of(loading, rank)
            check_run(policy, fills_of(loading, rank), job, rank)
        except BaseException as error:
            error.add_note(f"policy: {name}")
            raise


def check_kept(loading: Loading, job: Job) -> None:
    """What a rank keeps fits, and is kept once."""
    nbytes, held = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    for fill in loading.fills:
        assert 0 <= fill.rank < job.ranks
        assert 1 <= fill.tier < len(job.machine.storage)
        nbytes[fill.rank, fill.tier] += int(job.sizes_bytes[fill.samples].sum())
        held.update((fill.rank, sample) for sample in fill.samples.tolist())
    for (_, tier), used in nbytes.items():
        assert used <= job.machine.storage[tier].capacity_bytes
    assert set(held.values()) <= {1}
    assert {sample for _, sample in held} <= set(range(job.plan.samples))


def check_strings(loading: Loading, job: Job) -> None:
    """Where a policy changes who reads what, each rank reads as often."""
    if loading.strings is None:
        return
    assert [string.size for string in loading.strings] == [string.size for string in job.strings]
    for string in loading.strings:
        assert ((string >= 0) & (string < job.plan.samples)).all()


def check_same(once: Loading | None, again: Loading | None, job: Job) -> None:
    for rank in range(job.ranks):
        assert fills_of(once, rank) == fills_of(again, rank)
    if once is not None and once.strings is not None:
        assert again is not None
        assert again.strings is not None
        assert all(map(np.array_equal, once.strings, again.strings))


def check_run(
    policy: LoadingPolicy, fills: list[tuple[int, str, bool, list[int]]], job: Job, rank: int
) -> None:
    """What the loader runs of a policy is what it decided, or it says what it does not run."""
    try:
        placement = placement_of(policy, for_rank(job, rank), rank)
    except ConfigError as error:
        check_names(policy, error)
        return
    kept = {sample: tier for tier, *_, ids in fills for sample in ids}
    assert placement.tier_of.tolist() == [kept.get(sample, SOURCE) for sample in range(job.plan.samples)]
    assert sorted(placement.fill_order.tolist()) == sorted(kept)
