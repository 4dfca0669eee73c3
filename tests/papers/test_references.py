"""Figures 2 to 4 of the bundle paper: what a loader references by each order."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.papers.references import EPOCHS, references, reuse_share, strides
from penstock.plan import BundleShuffle, FullShuffle


def test_strides_are_of_the_data_and_of_a_bundle_after_a_first_epoch_that_numbers_the_blocks() -> None:
    full, bundles, alternating = (
        references(order)
        for order in (FullShuffle(1000, 0), BundleShuffle(1000, 0, alternate=False), BundleShuffle(1000, 0))
    )

    for blocks in (full, bundles, alternating):
        assert (blocks[0] == np.arange(1000)).all()
        assert (np.sort(blocks, axis=1) == np.arange(1000)).all()
        assert blocks.shape == (EPOCHS, 1000)
    # Two numbers drawn from [0, 1) are 1/3 apart on average.
    assert strides(full)[1:] == pytest.approx(1 / 3, abs=0.03)
    assert strides(bundles)[1:] == pytest.approx(1 / 30, abs=0.005)
    assert reuse_share(full) == pytest.approx(0.1, abs=0.05)
    assert (reuse_share(bundles), reuse_share(alternating)) == (0.0, 1.0)
