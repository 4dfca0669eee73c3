"""The snapshot store survives power cuts: whatever the disk may show, what was committed is there, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.checkpoint.crash.injection import Savers, Site
from tests.checkpoint.crash.trials import record_a_death_and_after, record_saves, survive_power_cuts

STORES = ["store/complete", "store/progressive", "store/chain", "store/progressive+fast"]
SESSIONS = [[1, 2, 3], [4, 5]]
MANY_SESSIONS = [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10], [11, 12, 13], [14, 15]]


@pytest.mark.system
@pytest.mark.parametrize("subject", STORES)
def test_committed_snapshots_survive_a_power_cut(savers: Savers, top: Path, subject: str) -> None:
    recording = record_saves(savers, subject, top, SESSIONS)

    assert survive_power_cuts(subject, recording, top, 100) == 100


@pytest.mark.system
@pytest.mark.parametrize("site", [Site("fsync", 1), Site("fsync", 4), Site("rename", 1)], ids=str)
def test_they_survive_one_after_a_process_was_killed_and_another_went_on(
    savers: Savers, top: Path, site: Site
) -> None:
    """The second process sees names that the first made and never synced: it must not take them to be durable."""
    recording = record_a_death_and_after(savers, "store/progressive", top, site, SESSIONS, [[6, 7, 8]])

    assert survive_power_cuts("store/progressive", recording, top, 50) == 50


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("subject", STORES)
def test_committed_snapshots_survive_a_thousand_power_cuts(savers: Savers, top: Path, subject: str) -> None:
    recording = record_saves(savers, subject, top, MANY_SESSIONS)

    assert survive_power_cuts(subject, recording, top, 1_000) == 1_000


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("subject", STORES)
def test_they_survive_one_wherever_a_process_was_killed_before_another_went_on(
    savers: Savers, top: Path, subject: str
) -> None:
    sites = [site for site in savers.sites(subject, top / "store", SESSIONS) if site.call in CHANGES]

    for site in sites:
        recording = record_a_death_and_after(savers, subject, top, site, SESSIONS, [[6, 7, 8]])
        assert survive_power_cuts(subject, recording, top, 60) == 60


#: Calls that make names durable, or change them.
CHANGES = ("fsync", "rename", "mkdir", "unlinkat", "rmdir")
