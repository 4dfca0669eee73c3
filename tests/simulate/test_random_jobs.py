"""Simulated jobs that are drawn at random keep their promises."""

from __future__ import annotations

from dataclasses import fields
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulate.given import Given
from tests.simulate.random_jobs import random_fills, random_job

from penstock.errors import ConfigError
from penstock.kernel_cache import kept_loop
from penstock.policy.loading import Job, Loading
from penstock.policy.push import decide_push
from penstock.simulate import loading as virtual_time
from penstock.simulate.policies import POLICY_NAMES, policy_named
from penstock.simulate.scheduled import ORIGINS, LoadingResult, simulate_job
from penstock.trace.schema import SOURCE

# -- Random jobs: drawn from a seed, because hypothesis takes longer to draw one value by value than both models to run


def _loading(random: Random, job: Job) -> Loading:
    """What no policy of ours decides: any mixture of fills, hits and switches that the machine has space for."""
    fills, spares = random_fills(random, job, ["store", "hand-over"])
    # What goes from reader to reader has no home.
    hands_on = random.random() < 0.3
    if hands_on:
        fills, spares = [], [np.empty(0, np.int64)] * job.ranks
    hits = []
    for rank in range(job.ranks if hands_on else 0):
        found = decide_push(job.plan, rank, job.sizes_bytes, job.capacities_bytes()).tiers
        hits.append(np.where([random.random() < 0.8 for _ in found], found, np.int8(SOURCE)))
    drops = random.random() < 0.5 and not hands_on
    return Loading(
        fills,
        stages=random.random() < 0.8,
        stages_from_store=random.random() < 0.5,
        stages_from_peers=random.random() < 0.5,
        hits=hits if hands_on else None,
        drops=drops,
        spares=spares if drops and len(job.machine.storage) > 1 else None,
    )


def _run(seed: int) -> tuple[Job, Loading]:
    random = Random(seed)
    job = random_job(random, has_latency=True)
    if random.random() < 0.3:
        return job, _loading(random, job)
    try:
        return job, policy_named(random.choice(POLICY_NAMES)).prepare(job)
    except ConfigError:  # a tier is missing, or too small
        return job, Loading()


_SEEDS = st.integers(0, 2**64 - 1)


@settings(max_examples=150)
@given(_SEEDS)
def test_every_read_is_consumed_once_in_order_and_no_run_is_shorter_than_its_bound(seed: int) -> None:
    job, loading = _run(seed)
    strings = loading.strings or job.strings

    result = simulate_job(job, Given(loading))

    assert result.reads.sum(axis=1).tolist() == [string.size for string in strings]
    assert (np.diff(result.step_end_seconds) >= 0).all()
    assert result.run_seconds == result.step_end_seconds[-1] >= result.initial_stall_seconds
    assert (
        result.step_stall_seconds + result.step_busy_seconds
        <= np.diff(result.step_end_seconds, prepend=result.initial_stall_seconds)[:, None] * (1 + 1e-5) + 1e-5
    ).all()
    bound = simulate_job(job, Given(Loading(strings=list(strings), is_ready=True)))
    assert result.run_seconds >= result.initial_stall_seconds + bound.run_seconds - 1e-9 * result.run_seconds


@settings(max_examples=100)
@given(_SEEDS)
def test_what_two_batches_want_at_once_is_read_once(seed: int) -> None:
    """The store gives each consumed sample and each fill at most once."""
    job, loading = _run(seed)
    alike = Job(job.plan, np.full(job.plan.samples, int(job.sizes_bytes.min())), job.machine)

    result = simulate_job(alike, Given(loading))

    counts = dict(zip(ORIGINS, result.reads.T, strict=True))
    reads = counts["staged from the store"] + counts["store"] + result.fill_reads
    assert (result.store_bytes <= reads * alike.sizes_bytes[0]).all()


@settings(max_examples=40)
@given(_SEEDS)
def test_compiled_ranks_that_run_together_do_what_they_do_in_plain_python(seed: int) -> None:
    job, loading = _run(seed)
    compiled = kept_loop(virtual_time.KERNELS, "run", virtual_time.RUN, compiles=True)

    found = []
    with pytest.MonkeyPatch.context() as patch:
        for loop in (None, compiled):
            patch.setattr(virtual_time, "_compiled", lambda _reads, loop=loop: loop)
            found.append(simulate_job(job, Given(loading)))

    for each in fields(LoadingResult):
        assert np.array_equal(*(getattr(result, each.name) for result in found)), each.name
