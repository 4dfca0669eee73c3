"""Hit ratios of a job's caches beside formulas and bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.for_each import for_each

from penstock.errors import ConfigError
from penstock.plan import AccessPlan, FullShuffle
from penstock.plan.parse_order import OrderName
from penstock.simulate.cache_study import Job, job_curve, string_curve
from penstock.simulate.caches import hit_shares

SHARES = [0.1, 0.3, 0.5, 0.7, 0.9, 1.0]


def test_a_file_of_ids_and_torchs_shuffle_are_replayed_like_any_order(tmp_path: Path) -> None:
    torch = OrderName("torch")
    order = torch.of(300, 4)
    np.save(tmp_path / "ids.npy", np.array([order.at(epoch, np.arange(300)) for epoch in range(5)]))
    job = Job(samples=300, epochs=5, ranks=3, batch_size=30, seed=4)

    listed = OrderName(str(tmp_path / "ids.npy"))
    for policy in ("lru", "min"):
        one, other = (job_curve(job, each, policy, [0.1, 0.5]) for each in (torch, listed))
        assert one.hit_share.tolist() == other.hit_share.tolist()
    alone = Job(samples=300, epochs=5)
    assert alone.expected(torch, [0.5]) == alone.expected(OrderName("full"), [0.5])
    assert alone.expected(listed, [0.5]) is None


@pytest.mark.parametrize("ids", [[0, 1, 1], [0, 1], [0, 1, 2, 0]])
def test_a_file_that_leaves_out_or_repeats_samples_has_no_bound(tmp_path: Path, ids: list[int]) -> None:
    np.save(tmp_path / "ids.npy", ids)

    with pytest.raises(ConfigError, match="epoch 0 does not read each of the 3 samples once"):
        job_curve(Job(samples=3, epochs=2), OrderName(str(tmp_path / "ids.npy")), "lru", [0.5])


def test_a_file_and_own_subsets_do_not_go_together(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", [0, 1, 2, 3])

    with pytest.raises(ConfigError, match="use one or the other"):
        Job(samples=4, epochs=2, ranks=2, own_subsets=True).string(OrderName(str(tmp_path / "ids.npy")), 0)


def test_lru_under_a_full_shuffle_follows_the_closed_form() -> None:
    job = Job(samples=20_000, epochs=5)
    cache = np.array(SHARES[:-1])

    curve = job_curve(job, OrderName("full"), "lru", SHARES)

    closed_form = 4 / 5 * (cache + (1 - cache) * np.log(1 - cache))
    assert curve.hit_share[:-1] == pytest.approx(closed_form, abs=0.003)
    expected = job.expected(OrderName("full"), SHARES)
    assert expected is not None
    assert expected[:-1] == pytest.approx(closed_form, abs=0.0002)
    assert curve.hit_share[-1] == 0.8


def test_lru_under_a_bundle_shuffle_attains_the_bound_with_whole_bundles_alone() -> None:
    """Hit rates computed independently: 45 % cache, 10 bundles, 5 epochs: 33.2 against a bound of 36.0."""
    job = Job(samples=20_000, epochs=5)

    curve = job_curve(job, OrderName("bundle"), "lru", [0.45, 0.5])

    assert curve.hit_share == pytest.approx([0.332, 0.4], abs=0.001)
    assert job.bound([0.45, 0.5]) == pytest.approx([0.36, 0.4])


@for_each("policy", ["lru", "lfu", "mru", "clock", "fifo", "min"])
@for_each(("ranks", "own_subsets"), [(1, False), (3, True), (3, False)])
def test_no_policy_and_no_order_exceeds_the_bound(policy: str, ranks: int, own_subsets: bool) -> None:
    job = Job(samples=601, epochs=4, ranks=ranks, own_subsets=own_subsets, batch_size=30)
    bound = job.bound([0.0, *SHARES])

    for order in ("full", "bundle", "sequential"):
        curve = job_curve(job, OrderName(order), policy, [0.0, *SHARES])

        assert (curve.hit_share <= bound + 1e-12).all()
        assert curve.hit_share[0] == 0.0


def test_min_on_one_rank_misses_the_bound_by_the_frame_of_the_sample_read_last() -> None:
    job = Job(samples=1000, epochs=5)

    curve = job_curve(job, OrderName("full"), "min", [0.2, 0.5])

    assert (job.bound([0.2, 0.5]) - curve.hit_share <= 4 / 5000).all()


def test_own_subsets_hit_as_on_one_rank_and_a_shared_order_hardly_at_all() -> None:
    alone = job_curve(Job(samples=8000, epochs=5), OrderName("bundle"), "lru", [0.5])
    own = job_curve(
        Job(samples=32_000, epochs=5, ranks=4, own_subsets=True), OrderName("bundle"), "lru", [0.5]
    )
    shared = job_curve(Job(samples=32_000, epochs=5, ranks=4), OrderName("bundle"), "lru", [0.5])

    assert own.hit_share == pytest.approx(alone.hit_share, abs=0.005)
    assert shared.hit_share[0] < 0.08
    assert own.lowest[0] <= own.hit_share[0] <= own.highest[0]


def test_ranks_with_a_shared_order_read_every_sample_once_an_epoch() -> None:
    job = Job(samples=100, epochs=2, ranks=3, batch_size=7)

    strings = [job.string(OrderName("full"), rank) for rank in range(3)]

    assert (np.bincount(np.concatenate(strings)) == 2).all()
    assert strings[1].tolist() == AccessPlan(FullShuffle(100), 7, 2, 3).string(1).tolist()


def test_subsets_are_as_even_as_shares_of_a_batch_and_shuffled_by_different_seeds() -> None:
    job = Job(samples=31, epochs=1, ranks=3, own_subsets=True)

    strings = [job.string(OrderName("full"), rank) for rank in range(3)]

    assert [string.size for string in strings] == [11, 11, 9]
    assert strings[0].tolist() != strings[1].tolist()
    assert sorted(strings[2].tolist()) == list(range(9))


@pytest.mark.parametrize("own_subsets", [False, True])
def test_scattered_ids_change_no_hit_and_no_expectation(own_subsets: bool) -> None:
    job = Job(samples=1000, epochs=3, ranks=2 if own_subsets else 1, own_subsets=own_subsets)
    plain, scattered = OrderName("bundle:0.05"), OrderName("scattered-bundle:0.05")

    assert job_curve(job, scattered, "lru", SHARES).hit_share.tolist() == (
        job_curve(job, plain, "lru", SHARES).hit_share.tolist()
    )
    np.testing.assert_array_equal(job.expected(scattered, SHARES), job.expected(plain, SHARES))
    assert job.expected(OrderName("scattered-sequential"), SHARES) is None


def test_a_share_means_the_whole_number_that_was_written() -> None:
    """0.29 * 100 is 28.999999999999996 in binary."""
    assert Job(samples=100, epochs=1).cache_samples(0, 0.29) == 29
    assert Job(samples=109, epochs=1).cache_samples(0, 0.5) == 54


@for_each("change", [{"samples": 0}, {"epochs": 0}, {"ranks": 0}, {"batch_size": 0}, {"seed": -1}])
def test_a_job_that_cannot_be_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        Job(**({"samples": 10, "epochs": 2} | change))


def test_more_ranks_than_samples_are_refused() -> None:
    with pytest.raises(ConfigError, match="ranks is 4; of 3 samples"):
        Job(samples=3, epochs=1, ranks=4)


@pytest.mark.parametrize("share", [-0.1, float("nan"), float("inf")])
def test_a_cache_of_no_size_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match="relative size"):
        job_curve(Job(samples=10, epochs=2), OrderName("full"), "lru", [share])


def test_a_string_has_a_curve_too() -> None:
    curve = string_curve([1, 2, 1, 3, 2], "lru", [1, 2, 3])

    assert curve.hit_share.tolist() == hit_shares([1, 2, 1, 3, 2], [1, 2, 3], "lru").tolist() == [0, 0.2, 0.4]
