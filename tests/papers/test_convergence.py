"""What a model learns from each order: the committed trainings, how they are compared, and that they repeat."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from penstock.errors import ConfigError
from penstock.papers import convergence
from penstock.papers.convergence import BY_CLASS, RATIOS, SCATTERED, Run, Study, compare, read_study

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "bundles.py"


@pytest.fixture(scope="module")
def train_digits() -> Callable[..., Study]:
    train: Callable[..., Study] = runpy.run_path(str(BENCHMARK))["train_digits"]
    return train


def a_study(accuracies: dict[tuple[str, float], list[float]]) -> Study:
    """Trainings of one epoch, a seed for each accuracy."""
    runs = tuple(
        Run(numbering, ratio, seed, (accuracy,))
        for (numbering, ratio), of_seeds in accuracies.items()
        for seed, accuracy in enumerate(of_seeds)
    )
    return Study("data", "model", 100, 20, 10, 1, "versions", runs)


def test_the_kept_trainings_are_whole() -> None:
    study = read_study()

    assert study.epochs == 20
    assert study.numberings == (BY_CLASS, SCATTERED)
    assert study.ratios == (*RATIOS, 1 / 1442)
    for numbering in study.numberings:
        for ratio in study.ratios:
            assert study.by_epoch(numbering, ratio).shape == (8, 20)


def test_scattered_bundles_of_every_size_learn_as_well_as_a_full_shuffle() -> None:
    """What the documentation says; a training that is kept anew must bear it out or change it."""
    rows = [row for row in compare(read_study()) if row.numbering == SCATTERED]

    assert len(rows) == 8
    for row in rows:
        assert row.is_within_noise, row
        assert abs(row.difference) < 0.002


def test_bundles_of_ids_sorted_by_class_learn_worse_the_smaller_they_are() -> None:
    rows = [row for row in compare(read_study()) if row.numbering == BY_CLASS and row.bundle_ratio < 1]

    assert not any(row.is_within_noise for row in rows)
    assert [row.bundle_ratio for row in rows[:4]] == [0.5, 0.2, 0.1, 0.05]
    differences = [row.difference for row in rows[:4]]
    assert differences == sorted(differences, reverse=True)
    assert differences[0] < -0.03
    assert differences[3] < -0.4


def test_what_is_written_is_what_is_kept() -> None:
    kept = Path(convergence.__file__).with_name("convergence.json").read_text("utf-8")

    assert json.loads(read_study().to_json()) == json.loads(kept)


def test_a_difference_is_taken_seed_by_seed() -> None:
    """Seeds differ by much, orders by little: only pairs show it."""
    full = [0.5, 0.6, 0.7, 0.8, 0.9, 0.95]
    study = a_study({(SCATTERED, 1.0): full, (SCATTERED, 0.1): [each - 0.01 for each in full]})

    itself, bundles = compare(study)

    assert (itself.difference, itself.standard_error, itself.p_value) == (0.0, 0.0, 1.0)
    assert bundles.difference == pytest.approx(-0.01)
    assert bundles.standard_error == pytest.approx(0.0, abs=1e-12)
    # All six signs alike: 2 of 64 patterns.
    assert bundles.p_value == pytest.approx(2 / 64)
    assert bundles.noise == pytest.approx(np.std(full, ddof=1))
    assert not bundles.is_within_noise


def test_a_difference_that_could_be_chance_and_is_small_is_within_noise() -> None:
    full = [0.90, 0.92, 0.94, 0.96, 0.98]
    own = [0.92, 0.90, 0.96, 0.94, 0.98]

    row = compare(a_study({(BY_CLASS, 1.0): full, (BY_CLASS, 0.1): own}))[1]

    assert row.is_within_noise
    assert replace(row, difference=0.05).is_within_noise is False


def test_orders_of_different_seeds_are_not_compared() -> None:
    with pytest.raises(ConfigError, match="same seeds"):
        compare(a_study({(SCATTERED, 1.0): [0.9, 0.8], (SCATTERED, 0.1): [0.9]}))
    with pytest.raises(ConfigError, match="not trained"):
        compare(a_study({(SCATTERED, 0.1): [0.9, 0.8]}))


def test_more_seeds_than_patterns_can_be_tried_for_are_refused() -> None:
    many = [0.5 + 0.01 * seed for seed in range(17)]

    with pytest.raises(ConfigError, match="17 seeds"):
        compare(a_study({(SCATTERED, 1.0): many, (SCATTERED, 0.1): many}))


@pytest.mark.slow
def test_a_training_repeats_and_leaves_the_callers_random_numbers_and_threads_alone(
    train_digits: Callable[..., Study],
) -> None:
    import torch

    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    threads = torch.get_num_threads()
    told: list[int] = []

    once, again = (
        train_digits(
            ratios=[0.1],
            numberings=[SCATTERED],
            seeds=1,
            epochs=1,
            batch_size=128,
            single=False,
            done=told.append,
        )
        for _ in range(2)
    )

    assert once == again
    assert told == [1, 2, 1, 2]
    assert [run.bundle_ratio for run in once.runs] == [1.0, 0.1]
    # The same start, another order: not the same end.
    assert once.runs[0].accuracy != once.runs[1].accuracy
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == threads


@pytest.mark.slow
def test_what_is_kept_comes_out_again(train_digits: Callable[..., Study]) -> None:
    """Two of its trainings, on whatever machine and version this is: within what seeds differ by."""
    kept = read_study()

    again = train_digits(ratios=[0.5], seeds=2, single=False)

    for numbering, margin in ((SCATTERED, 0.02), (BY_CLASS, 0.06)):
        for ratio in (1.0, 0.5):
            mean = again.final(numbering, ratio).mean()
            assert mean == pytest.approx(kept.final(numbering, ratio)[:2].mean(), abs=margin)
