"""A page cache that holds some files, and what is timed under it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock.papers import characterisation, loading_time
from penstock.papers.loading_time import LimitedCache, figure_6, figure_7
from penstock.plan import FullShuffle
from penstock.simulate.bundles import replayed_hit_shares
from penstock.store import FlatFolder


def test_a_limited_cache_holds_what_was_read_last(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number:02d}.jpg").write_bytes(bytes(5000))
    folder = FlatFolder(tmp_path)
    order = FullShuffle(20, 3)
    ids = np.concatenate([order.at(epoch, np.arange(20)) for epoch in range(5)])

    cache = LimitedCache(folder, 8, 0.0)
    for sample in ids.tolist():
        cache.read(sample)

    assert cache.hits / 100 == pytest.approx(replayed_hit_shares(order, 5, [8])[0])
    last = list(dict.fromkeys(reversed(ids.tolist())))[:8]
    assert set(cache._held) == set(last)


@pytest.mark.slow
def test_loading_time_and_accuracy_stand_next_to_the_papers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("IMAGES", 20), ("_BATCH", 5), ("EPOCHS", 2), ("SEEKS", {"this disk": 0.0})):
        monkeypatch.setattr(loading_time, name, value)

    found = {each.of: each for each in figure_6().results}
    accuracy = {each.of: each.computed or 0 for each in figure_7().results}

    assert found["this disk, time that bundles save, published of Food101"].published == 0.1376
    assert found["this disk, full shuffle, epoch 2"].computed
    assert abs(accuracy["bundles less full shuffle, last epoch"]) < 0.02


@pytest.mark.slow
@pytest.mark.usefixtures("fonts")
def test_rates_by_threads_stand_next_to_the_papers(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"THREADS": (1, 8), "_IMAGES": 64, "_SECONDS": 0.1, "_LATENCY_SECONDS": 1e-4}
    for name, value in small.items():
        monkeypatch.setattr(characterisation, name, value)

    repeated = characterisation.figure_5()
    found = {each.of: each for each in repeated.results}
    one, eight = (found[f"this disk, {count} threads"].computed or 0 for count in (1, 8))

    assert found["this disk, 8 threads over one"].computed == pytest.approx(eight / one)
    assert [line.get_label() for line in repeated.draw().axes[0].lines] == ["this disk", "store of 10 ms"]
