"""Expected seconds of a read: the machine's, corrected by what reads really took."""

import pytest

from penstock.machine import Curve, Machine, SharedStore, StorageClass
from penstock.policy import FetchCosts
from penstock.trace.schema import SOURCE


def costs(source_rate: float, latency: float, tier_rate: float) -> FetchCosts:
    tier = Curve(((1, tier_rate), (2, 2 * tier_rate)))
    return FetchCosts(
        Machine(
            SharedStore(Curve(((1, source_rate), (4, 2 * source_rate))), Curve(((1, 1e12),)), latency),
            (StorageClass("staging", 10**9, 1, tier), StorageClass("disk", 10**9, 1, tier)),
            ranks=4,
        )
    )


def test_the_model_is_the_thesis_equations_with_reads_that_share() -> None:
    model = costs(source_rate=100.0, latency=0.5, tier_rate=1000.0)

    # t(4)/4 = 200/4 = 50 bytes/s for this client, 2 reads in flight share it; the tier gives 2 readers 1000 each.
    assert model.seconds(SOURCE, 100, in_flight=2) == pytest.approx(0.5 + 100 / 25)
    assert model.seconds(1, 100, in_flight=2) == pytest.approx(100 / 1000)


def test_a_sample_is_taken_from_where_it_is_expected_first() -> None:
    assert costs(100.0, 0.5, 1000.0).prefers_tier(1, 100)
    assert not costs(1e6, 0.0, 10.0).prefers_tier(1, 100)


def test_observed_reads_turn_a_wrong_choice_around() -> None:
    """A disk that the machine calls fast turns out to be slow, as on a node whose SSD is worn."""
    model = costs(source_rate=4000.0, latency=0.0, tier_rate=1e6)
    assert model.prefers_tier(1, 1000)

    for _ in range(40):
        model.observe(1, 1000, seconds=5.0)

    assert model.seconds(1, 1000) == pytest.approx(5.0, rel=0.1)
    assert not model.prefers_tier(1, 1000)


def test_an_observation_outweighs_none_and_old_ones_fade() -> None:
    model = costs(100.0, 0.0, 1000.0)
    model.observe(SOURCE, 50, seconds=2.0)
    assert model.seconds(SOURCE, 50) == pytest.approx(2.0)

    for _ in range(64):
        model.observe(SOURCE, 50, seconds=1.0)

    assert model.seconds(SOURCE, 50) == pytest.approx(1.0, abs=0.02)
