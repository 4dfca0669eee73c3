"""Policies side by side, on several seeds and numbers of ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.errors import ConfigError
from penstock.machine import Curve, Machine, Rate, SharedStore, StorageClass
from penstock.measure.policies import run_policies
from penstock.policy.loading import DeepIO, Job, LbannStore, Loading, LoadingPolicy, LowerBound, Staging
from penstock.simulate.scenario import Scenario
from penstock.simulate.scheduled import ORIGINS, simulate_loading
from penstock.simulate.sizes import SizeDistribution


def _scenario(memory_bytes: int = 100) -> Scenario:
    rate = Curve.flat(100.0)
    storage = (StorageClass("staging", 1000, 1, rate), StorageClass("memory", memory_bytes, 1, rate))
    machine = Machine(SharedStore(Curve.flat(50.0)), storage, 2, compute=Rate(100.0))
    return Scenario("small", machine, SizeDistribution("uniform", 40, (("loc", 10), ("scale", 10))), 8, 3)


def test_rows_are_by_ranks_then_by_policy_and_average_the_seeds() -> None:
    scenario = _scenario()
    policies: list[LoadingPolicy] = [LowerBound(), Staging()]
    told: list[int] = []

    rows = run_policies(scenario, policies, repeats=3, ranks=[1, 4], done=told.append)

    assert [(row.ranks, row.policy) for row in rows] == [
        (ranks, policy.name) for ranks in (1, 4) for policy in policies
    ]
    assert told == list(range(1, 13))
    for row, policy in zip(rows, policies * 2, strict=True):
        alone = tuple(
            simulate_loading(replace(scenario.with_ranks(row.ranks), seed=seed), policy).run_seconds
            for seed in (0, 1, 2)
        )
        assert row.run_seconds == alone
        assert row.mean_seconds == pytest.approx(sum(alone) / 3)
        assert row.spread_seconds == pytest.approx(
            (sum((each - sum(alone) / 3) ** 2 for each in alone) / 2) ** 0.5
        )
        assert row.result is not None
        assert row.result.run_seconds == alone[0]
        assert row.total_bytes == scenario.sizes_bytes().sum()
        assert sum(row.shares().values()) == pytest.approx(1)
        assert list(row.shares()) == list(ORIGINS)


def test_a_policy_that_cannot_run_says_why_and_the_others_run() -> None:
    none, staging = run_policies(_scenario(), [LbannStore(), Staging()], repeats=2)

    assert none.result is None
    assert none.mean_seconds is None
    assert none.spread_seconds is None
    assert none.shares() == {}
    assert "lbann-dynamic keeps the whole data set" in none.reason
    assert len(staging.run_seconds) == 2


class _Wrong:
    name = "wrong"

    def prepare(self, job: Job) -> Loading:
        return Loading(strings=[])


# The fixture that watches every test sees a thread that one of these leaves behind.


def test_an_error_of_one_policy_ends_all() -> None:
    policies: list[LoadingPolicy] = [DeepIO(), _Wrong(), Staging()]

    with pytest.raises(ConfigError, match="'wrong' gives strings of other lengths"):
        run_policies(_scenario(), policies)


def test_an_interruption_leaves_no_threads() -> None:
    def interrupt(done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_policies(_scenario(), [Staging()] * 5, done=interrupt)
