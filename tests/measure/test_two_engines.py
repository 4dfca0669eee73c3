"""The request model beside the loader's own scheduler: the same job, and times that can be worked out for both."""

from __future__ import annotations

import pytest

from penstock.machine import Curve, Machine, Rate, SharedStore, StorageClass
from penstock.measure.two_engines import run_two_engines
from penstock.simulate.scenario import Scenario
from penstock.simulate.sizes import SizeDistribution


def _scenario(
    *, decode: float = 1e9, compute: float = 1e9, ranks: int = 1, split: str = "uniform"
) -> Scenario:
    """400 samples of 10 bytes in steps of 20; each rank gets 100 bytes/s of the store, and holds everything."""
    classes = (
        StorageClass("staging", 800, 1, Curve.flat(1e12)),
        StorageClass("memory", 100_000, 1, Curve.flat(1e12)),
    )
    store = SharedStore(Curve.flat(100.0 * ranks))
    machine = Machine(store, classes, ranks, preprocess_bytes_per_second=decode, compute=Rate(compute))
    return Scenario("small", machine, SizeDistribution("constant", 400, (("loc", 10),)), 20, 3, split=split)


def test_where_the_wire_limits_both_take_as_long_as_the_bytes() -> None:
    staging, frequency = run_two_engines(_scenario())

    wire = 400 * 10 / 100
    assert [staging.policy, frequency.policy] == ["staging", "frequency"]
    assert staging.scheduler_seconds == pytest.approx(3 * wire, rel=0.01)
    assert staging.requests_seconds == pytest.approx(3 * wire, rel=0.01)
    # What a rank keeps it reads once.
    assert frequency.scheduler_seconds == pytest.approx(wire, rel=0.02)
    assert frequency.requests_seconds == pytest.approx(wire, rel=0.02)


def test_where_the_training_limits_both_hardly_wait() -> None:
    for row in run_two_engines(_scenario(compute=20.0)):
        assert row.scheduler_seconds == pytest.approx(3 * 200, rel=0.01)
        assert row.requests_seconds == pytest.approx(3 * 200, rel=0.01)
        assert row.scheduler_stall_seconds + 3 * 200 == pytest.approx(row.scheduler_seconds)
        assert row.requests_stall_seconds + 3 * 200 == pytest.approx(row.requests_seconds)


def test_a_thread_that_decodes_does_not_read_in_the_request_model_alone() -> None:
    # Reading and decoding take as long: one after the other in one thread, at once in a pool of readers and decoders.
    staging, _ = run_two_engines(_scenario(decode=100.0))

    assert staging.requests_seconds == pytest.approx(3 * 2 * 40, rel=0.01)
    assert staging.scheduler_seconds == pytest.approx(3 * 40, rel=0.1)


def test_a_rank_has_its_share_of_the_store_however_many_there_are() -> None:
    alone, of_four = (run_two_engines(_scenario(ranks=ranks))[0] for ranks in (1, 4))

    assert of_four.requests_seconds == pytest.approx(alone.requests_seconds / 4, rel=0.02)
    assert of_four.scheduler_seconds == pytest.approx(alone.scheduler_seconds / 4, rel=0.02)


def test_ranks_of_unequal_shares_run_rank_0s() -> None:
    staging, _ = run_two_engines(_scenario(ranks=2, split="imbalanced"))

    # Four fifths of the samples at half of what the store gives to two.
    assert staging.requests_seconds == pytest.approx(3 * 0.8 * 40, rel=0.02)
    assert staging.scheduler_seconds == pytest.approx(3 * 0.8 * 40, rel=0.02)
