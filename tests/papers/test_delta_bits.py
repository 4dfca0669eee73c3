"""What the delta-snapshot paper says of snapshots, on those of a short training."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest

from penstock.papers import delta_bits
from penstock.papers.catalog import Result
from penstock.papers.delta_bits import figure_8, figure_9, table_1, table_6, table_7, table_10, train


@pytest.fixture(autouse=True)
def _short_training(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(delta_bits, "STEPS", 3)
    delta_bits.study.cache_clear()
    yield
    delta_bits.study.cache_clear()


def test_a_gradient_is_the_slope_of_the_loss() -> None:
    draw = np.random.default_rng(0)
    weights = [draw.standard_normal(shape).astype(np.float32) for shape in ((4, 5), (5, 3))]
    images, classes = draw.standard_normal((6, 4)).astype(np.float32), draw.integers(0, 3, 6)

    def loss(changed: list[np.ndarray]) -> float:
        scores = np.maximum(images @ changed[0], 0) @ changed[1]
        return float(np.mean(np.log(np.exp(scores).sum(axis=1)) - scores[np.arange(6), classes]))

    found = delta_bits._gradients(weights, images, classes)

    for layer, gradient in enumerate(found):
        for place in ((0, 0), (2, 1)):
            ends = []
            for step in (1e-4, -1e-4):
                changed = [each.astype(np.float64) for each in weights]
                changed[layer][place] += step
                ends.append(loss(changed))
            assert gradient[place] == pytest.approx((ends[0] - ends[1]) / 2e-4, abs=1e-4)


@pytest.mark.usefixtures("fonts")
def test_shares_and_counts_are_those_of_the_bits() -> None:
    snapshots = [np.concatenate([each.ravel() for each in weights.values()]) for weights in train()]
    bits = [each.view(np.uint32) for each in snapshots]
    pairs = list(pairwise(bits))

    one, six, seven = table_1(), table_6(), table_7()

    first_of_12 = [float(np.mean((before ^ after) >> 20 == 0)) for before, after in pairs]
    assert [each.computed for each in one.results[:9]] == pytest.approx(first_of_12)
    assert [each.published for each in one.results[:2]] == [0.1714, 0.2576]
    assert [each.computed for each in seven.results[:9]] == [int((a == b).sum()) for a, b in pairs]
    assert seven.results[8].published == 101_066
    assert [each.published for each in six.results[-2:]] == [1, 2]
    exponents = (bits[-1] >> 23) & 0xFF
    eight = {each.of: each.computed for each in figure_8().results}
    assert eight["exponent 120"] == pytest.approx(float((exponents == 120).mean()))
    ten = {each.of: each for each in table_10().results}
    assert ten["progressive, no bound of storage"].computed == 10
    for repeated in (one, six, seven):
        assert repeated.draw().axes


def test_bytes_written_stand_next_to_the_papers() -> None:
    nine = {each.of: each for each in figure_9().results}

    assert nine["text-gpt, dynrle-progressive, snap_dis 10"].published == 0.69
    assert nine["text-gpt, dynrle-progressive, snap_dis 5"].published is None
    for model in ("digits-cnn", "text-gpt"):
        shares = [
            nine[f"{model}, {name}, snap_dis 10"].computed or 0
            for name in ("gzip", "rle4", "dynrle-progressive")
        ]
        assert shares == sorted(shares, reverse=True)


def test_a_published_count_of_none_has_no_relative_difference() -> None:
    """Table 6 has snapshots without one equal page: a training of ours with some ended in a division by zero."""
    assert Result("pages", 3, 0, "count").difference is None
    assert Result("pages", 3, 2, "count").difference == 0.5
    assert Result("hits", 0.25, 0, "share").difference == 0.25
