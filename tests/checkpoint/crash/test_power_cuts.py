"""What the disk may show after a power cut breaks stores that sync too little, and spares the one that is right."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.checkpoint.crash.aftermath import Lost
from tests.checkpoint.crash.broken_stores import Broken
from tests.checkpoint.crash.injection import Savers, Site
from tests.checkpoint.crash.trials import record_a_death_and_after, record_saves, survive_power_cuts

SESSIONS = [[1, 2, 3], [4]]
RIGHT = "stand-in/nothing"


@pytest.mark.system
def test_a_store_that_syncs_what_it_must_survives_every_power_cut(savers: Savers, top: Path) -> None:
    recording = record_saves(savers, RIGHT, top, SESSIONS)

    assert survive_power_cuts(RIGHT, recording, top, 150) > 80


@pytest.mark.system
@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (Broken.NO_FSYNC, "is listed and damaged"),
        (Broken.NO_FOLDER_FSYNC, "is listed and damaged"),
        (Broken.NO_PARENT_FSYNC, "was reported saved and is gone"),
        (Broken.RENAME_BEFORE_FSYNC, "is listed and damaged"),
        (Broken.RETENTION_FIRST, "was reported saved and is gone"),
        (Broken.DELETE_UNSYNCED, "is listed and damaged"),
        (Broken.MANIFEST_FIRST, "is listed and damaged"),
        (Broken.IN_PLACE, "damaged|something else|did not come back"),
        (Broken.DELETE_IN_PLACE, "is listed and damaged|did not come back"),
        (Broken.NEVER_SWEEPS, "did not come back"),
    ],
    ids=lambda value: value.name.lower() if isinstance(value, Broken) else "",
)
def test_a_power_cut_breaks_a_store_that_does_it_wrong(
    savers: Savers, top: Path, broken: Broken, says: str
) -> None:
    subject = f"stand-in/{broken.value}"
    recording = record_saves(savers, subject, top, SESSIONS)

    with pytest.raises(Lost, match=says) as lost:
        survive_power_cuts(subject, recording, top, 150)

    (note,) = lost.value.__notes__
    assert "(seed 0, index " in note
    assert "not durable then (+ survived, - lost):" in note


#: In the stand-in: the syncs of the folder above, of a commit, of a delete; the names of a save, the end of a delete.
DEATHS = [
    Site("fsync", 1),
    Site("fsync", 7),
    Site("fsync", 18),
    Site("mkdir", 1),
    Site("rename", 2),
    Site("rmdir", 1),
]


@pytest.mark.system
@pytest.mark.parametrize("site", DEATHS, ids=str)
def test_a_power_cut_after_a_process_was_killed_and_another_went_on_breaks_nothing(
    savers: Savers, top: Path, site: Site
) -> None:
    """The second process sees names that the first made and never synced: it must not take them to be durable."""
    recording = record_a_death_and_after(savers, RIGHT, top, site, SESSIONS, [[5, 6]])

    assert survive_power_cuts(RIGHT, recording, top, 50) > 20


@pytest.mark.system
def test_a_power_cut_breaks_a_store_that_sweeps_what_a_death_may_not_have_renamed(
    savers: Savers, top: Path
) -> None:
    """A process died between the renaming of what it deletes and the sync of that; the next removes the files."""
    subject = f"stand-in/{Broken.SWEEP_UNSYNCED.value}"
    recording = record_a_death_and_after(savers, subject, top, Site("fsync", 17), SESSIONS, [[5, 6]])

    with pytest.raises(Lost, match="is listed and damaged"):
        survive_power_cuts(subject, recording, top, 150)
