"""The thesis's machine and its jobs on a supercomputer, on few samples."""

from __future__ import annotations

import pytest

from penstock.papers import thesis_training
from penstock.papers.thesis_training import figure_5_3, figure_5_11, figure_5_14, table_5_8


@pytest.fixture(autouse=True)
def _few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thesis_training, "_THINNED", 1_000)


@pytest.mark.slow
def test_one_epoch_is_bounded_by_the_store() -> None:
    found = {each.of: each for each in table_5_8().results}

    assert found["16 nodes, HDMLP, speedup"].published == 17.987
    # The store serves 8 nodes or more at 324 to 326 MB/s.
    for nodes in (16, 64):
        assert (found[f"{nodes} nodes, HDMLP, load time"].computed or 0) >= 300 * 110e3 / 326e6
    assert (found["4 nodes, HDMLP over ImageFolder"].computed or 0) > 1


@pytest.mark.slow
@pytest.mark.usefixtures("fonts")
def test_stalls_stand_next_to_the_theses_factors() -> None:
    repeated = figure_5_11()
    found = {each.of: each for each in repeated.results}

    assert found["ImageFolder over HDMLP, at most"].published == 1_132
    assert (found["4 nodes, ImageFolder, median stall"].computed or 0) > (
        found["4 nodes, HDMLP, median stall"].computed or 0
    )
    assert repeated.draw().axes[0].get_yscale() == "symlog"
    assert len(figure_5_14().results) == 11
    assert figure_5_3().results[0].computed == 66e6
