"""Each modelling assumption: what it may be, with what it goes together, and which way it changes a run."""

from __future__ import annotations

from dataclasses import fields, replace
from math import inf
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
from tests.simulate.given import Given

from penstock.errors import ConfigError
from penstock.machine import Curve, Machine, Rate, SharedStore, StorageClass
from penstock.plan import AccessPlan, FullShuffle
from penstock.policy.loading import Fill, Job, Loading
from penstock.simulate.assumptions import PHYSICAL, PRESETS, THESIS, Assumptions
from penstock.simulate.policies import policy_named
from penstock.simulate.requests import ORIGINS, LoadingResult, simulate_job

NAMES = [field.name for field in fields(Assumptions)]
BY_RANK = replace(PHYSICAL, time="rank-by-rank", clients="ahead")


@pytest.mark.parametrize("name", NAMES)
def test_a_value_that_is_none_is_answered_with_those_that_are(name: str) -> None:
    known = get_args(get_type_hints(Assumptions)[name])

    wrong: dict[str, Any] = {name: "perhaps"}
    with pytest.raises(ConfigError, match=rf"assumptions\.{name} is 'perhaps'; it is one of '{known[0]}', "):
        replace(PHYSICAL, **wrong)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"clients": "ahead"}, "it needs time = 'rank-by-rank'"),
        ({"time": "rank-by-rank"}, "clients is 'reading-now'"),
        (
            {"counted": "first-time"},
            r"counted is 'first-time', and loaders that run together do as 'always' says",
        ),
    ],
)
def test_values_that_do_not_go_together_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        replace(PHYSICAL, **changes)


def test_the_presets_differ_in_everything() -> None:
    assert {"physical": PHYSICAL, "thesis": THESIS} == PRESETS
    assert Assumptions() == PHYSICAL
    for name in NAMES:
        assert getattr(PHYSICAL, name) != getattr(THESIS, name), name


# -- One small job per switch, in which it tells


def _memory(
    capacity: int = 10_000, rate: float = 1e9, name: str = "memory", threads: int = 1
) -> StorageClass:
    return StorageClass(name, capacity, threads, Curve.flat(rate))


def _job(
    *tiers: StorageClass,
    ranks: int = 4,
    samples: int = 80,
    batch: int = 16,
    epochs: int = 3,
    threads: int = 1,
    staging: int = 10_000,
    store: float = 100.0,
    decode: float = inf,
    compute: float = 100.0,
    split: str = "uniform",
) -> Job:
    machine = Machine(
        SharedStore(Curve.flat(store)),
        (StorageClass("staging", staging, threads, Curve.flat(1e12)), *tiers),
        ranks,
        preprocess_bytes_per_second=decode,
        compute=Rate(compute),
    )
    return Job(
        AccessPlan(FullShuffle(samples, 3), batch, epochs, ranks, split), np.full(samples, 10), machine
    )


def _run(job: Job, policy: str | Loading, assumed: Assumptions) -> LoadingResult:
    chosen = policy_named(policy, assumed) if isinstance(policy, str) else Given(policy)
    return simulate_job(job, chosen, assumed)


def _reads(result: LoadingResult, origin: str) -> int:
    return int(result.reads[:, ORIGINS.index(origin)].sum())


def test_time_rank_by_rank_lets_the_first_ranks_have_the_store_to_themselves() -> None:
    job = _job()

    assert _run(job, "naive", BY_RANK).run_seconds < 0.9 * _run(job, "naive", PHYSICAL).run_seconds


def test_clients_ahead_are_fewer_than_all() -> None:
    job = _job()

    assert (
        _run(job, "naive", BY_RANK).run_seconds
        < _run(job, "naive", replace(BY_RANK, clients="all")).run_seconds
    )


def test_bandwidth_per_thread_is_more_than_there_is() -> None:
    job = _job(threads=4, ranks=1, compute=1e9)

    shared, per_thread = (
        _run(job, "staging", replace(BY_RANK, bandwidth=value)) for value in ("shared", "per-thread")
    )
    assert shared.run_seconds == pytest.approx(4 * per_thread.run_seconds, rel=0.1)


def test_curves_exact_refuses_what_was_not_measured() -> None:
    job = _job(StorageClass("memory", 100, 2, Curve(((1.0, 5.0), (3.0, 9.0)))))
    exact = replace(BY_RANK, curves="exact")

    _run(job, "staging", BY_RANK)
    with pytest.raises(ConfigError, match=r"storage class 'memory' has 2 threads.*curves = 'interpolated'"):
        _run(job, "staging", exact)


def test_remote_last_may_be_the_slowest() -> None:
    job = _job(_memory(), _memory(rate=5.0, name="disk"), store=1.0, ranks=3, batch=3, epochs=1)
    all_of_them = np.arange(80)
    fills = [Fill(rank, tier, all_of_them, before_training=True) for rank, tier in ((1, 1), (2, 2))]
    loading = Loading(fills, stages_from_store=False, stages_from_peers=True)

    fastest, last = (_run(job, loading, replace(BY_RANK, remote=value)) for value in ("fastest", "last"))
    assert last.stall_seconds[0] > fastest.stall_seconds[0] + 10


def test_remote_staging_for_some_leaves_hdmlp_to_the_store() -> None:
    job = _job(_memory(300))

    for_all, some = (
        _run(job, "frequency", replace(PHYSICAL, remote_staging=value)) for value in ("all", "some")
    )
    assert _reads(for_all, "staged from a peer") > 0
    assert _reads(some, "staged from a peer") == 0
    assert some.store_bytes.sum() > for_all.store_bytes.sum()


def test_freed_a_step_later_stages_less_ahead() -> None:
    job = _job(staging=40, ranks=1, batch=4, store=12.0, compute=10.0)

    on_use, next_step = (
        _run(job, "staging", replace(BY_RANK, freed=value)) for value in ("on-use", "next-step")
    )
    assert next_step.run_seconds > 1.1 * on_use.run_seconds


def test_counted_the_first_time_alone_makes_the_buffer_bottomless() -> None:
    # A buffer for one step, freed with the next: nothing is staged ahead, until the buffer takes no notice.
    job = _job(ranks=1, batch=4, staging=40, store=12.0, compute=10.0, epochs=2)
    base = replace(BY_RANK, freed="next-step")

    always, first_time = (
        _run(job, "staging", replace(base, counted=value)) for value in ("always", "first-time")
    )
    assert first_time.run_seconds < always.run_seconds - 8
    # Not in the first epoch, of 20 steps.
    assert first_time.step_end_seconds[:18].tolist() == always.step_end_seconds[:18].tolist()


def _unequal_fills() -> Loading:
    return Loading(
        [Fill(0, 1, np.arange(60), before_training=True), Fill(1, 1, np.arange(60, 70), before_training=True)]
    )


def test_initial_stall_of_the_last_rank_may_leave_others_loading() -> None:
    job = _job(_memory(), ranks=2)

    longest, last = (
        _run(job, _unequal_fills(), replace(BY_RANK, initial_stall=value))
        for value in ("longest", "last-rank")
    )
    # Each has half of the store until rank 1 is done with its 100 bytes; rank 0 then reads the other 500 alone.
    assert last.initial_stall_seconds == pytest.approx(100 / 50)
    assert longest.initial_stall_seconds == pytest.approx(100 / 50 + 500 / 100)


def test_staging_at_zero_is_done_with_its_start_when_training_begins() -> None:
    job = _job(_memory(), ranks=1, decode=10.0)
    loading = Loading([Fill(0, 1, np.arange(80), before_training=True)])

    after, zero = (
        _run(job, loading, replace(BY_RANK, staging_begins=value)) for value in ("after-loading", "at-zero")
    )
    assert after.initial_stall_seconds == zero.initial_stall_seconds
    assert zero.run_seconds == pytest.approx(after.run_seconds - after.initial_stall_seconds)


def test_filling_preprocessed_waits_for_the_decoder() -> None:
    job = _job(_memory(), ranks=1, decode=10.0)
    loading = Loading([Fill(0, 1, np.arange(80), before_training=True)])

    as_read, preprocessed = (
        _run(job, loading, replace(BY_RANK, filling=value)) for value in ("as-read", "preprocessed")
    )
    assert as_read.initial_stall_seconds == pytest.approx(800 / 100)
    assert preprocessed.initial_stall_seconds == pytest.approx(800 / 100 + 800 / 10)


def test_pieces_from_staging_fill_tiers_with_what_is_read_less() -> None:
    job = _job(_memory(100), _memory(100, name="disk"), staging=100, epochs=20)

    tiers, staging = (
        _run(job, "frequency", replace(PHYSICAL, pieces=value)) for value in ("tiers", "from-staging")
    )
    assert _reads(staging, "staged from a tier") < _reads(tiers, "staged from a tier")


def test_unread_samples_kept_are_read_for_nothing() -> None:
    job = _job(_memory(), epochs=1)

    left, kept = (_run(job, "frequency", replace(BY_RANK, unread=value)) for value in ("left", "kept"))
    assert left.fill_reads.sum() == 80
    assert kept.fill_reads.sum() == 4 * 80


def test_locality_reordered_reads_its_own_tiers_more() -> None:
    job = _job(_memory(200), _memory(200, name="disk"), batch=40)

    reordered, published = (
        _run(job, "locality-aware", replace(PHYSICAL, locality=value))
        for value in ("reordered", "as-published")
    )
    assert _reads(reordered, "staged from a tier") > 2 * _reads(published, "staged from a tier")


def test_late_copies_of_lower_ids_leave_rank_0_with_its_part() -> None:
    job = _job(_memory(), _memory(rate=10.0, name="disk"), ranks=2)

    any_of_them, lower = (
        policy_named("parallel-staging", replace(PHYSICAL, late_copies=value)).prepare(job)
        for value in ("any", "lower")
    )
    copied = [
        [fill.samples.size for fill in each.fills if fill.origin == "peers"] for each in (any_of_them, lower)
    ]
    assert copied == [[40, 40], [0, 40]]
    longer = _run(job, "parallel-staging", BY_RANK).initial_stall_seconds
    shorter = _run(job, "parallel-staging", replace(BY_RANK, late_copies="lower", initial_stall="last-rank"))
    assert longer >= shorter.initial_stall_seconds
